"""diffusers' text-to-image training: Stable Diffusion's U-Net with frozen encoders, through accelerate."""

import torch
from accelerate import Accelerator
from diffusers import AutoencoderKL, DDPMScheduler, UNet2DConditionModel
from torch.nn import functional as F
from transformers import CLIPTextConfig, CLIPTextModel

accelerator = Accelerator(mixed_precision="fp16", gradient_accumulation_steps=1)
schedule = DDPMScheduler(num_train_timesteps=1000)
encoder = CLIPTextModel(
    CLIPTextConfig(hidden_size=768, intermediate_size=3072, num_attention_heads=12, num_hidden_layers=12)
)
blocks = {"down_block_types": ["DownEncoderBlock2D"] * 4, "up_block_types": ["UpDecoderBlock2D"] * 4}
vae = AutoencoderKL(block_out_channels=(128, 256, 512, 512), layers_per_block=2, latent_channels=4, **blocks)
unet = UNet2DConditionModel(cross_attention_dim=768)
for frozen in (vae, encoder):
    frozen.requires_grad_(False).to(accelerator.device, dtype=torch.float16)
unet.enable_gradient_checkpointing()
optimizer = torch.optim.AdamW(unet.parameters(), lr=1e-5)
data = torch.utils.data.TensorDataset(torch.rand(32, 3, 512, 512), torch.randint(0, 49_408, (32, 77)))
unet, optimizer, loader = accelerator.prepare(unet, optimizer, torch.utils.data.DataLoader(data, batch_size=4))
for pixels, words in loader:
    with accelerator.accumulate(unet):
        latents = vae.encode(pixels.to(torch.float16)).latent_dist.sample() * vae.config.scaling_factor
        noise = torch.randn_like(latents)
        times = torch.randint(0, 1000, (len(latents),), device=latents.device).long()
        noisy = schedule.add_noise(latents, noise, times)
        predicted = unet(noisy, times, encoder(words)[0], return_dict=False)[0]
        loss = F.mse_loss(predicted.float(), noise.float())
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(unet.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    print(accelerator.gather(loss.repeat(4)).mean().item())
