"""A diffusion model in fp32: a small U-Net that predicts the noise in 64 x 64 images."""

import math

import torch
from torch import nn
from torch.nn import functional as F

device, batch, widths = "cuda", 32, (128, 256, 512)


class Residual(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.norm_1, self.conv_1 = nn.GroupNorm(8, inputs), nn.Conv2d(inputs, outputs, 3, padding=1)
        self.time = nn.Linear(256, outputs)
        self.norm_2, self.conv_2 = nn.GroupNorm(8, outputs), nn.Conv2d(outputs, outputs, 3, padding=1)
        self.short = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x, time):
        h = self.conv_1(F.silu(self.norm_1(x))) + self.time(time)[:, :, None, None]
        return self.short(x) + self.conv_2(F.silu(self.norm_2(h)))


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.start = nn.Conv2d(3, widths[0], 3, padding=1)
        pairs = list(zip((widths[0], *widths[:-1]), widths, strict=True))
        self.down = nn.ModuleList(Residual(before, after) for before, after in pairs)
        self.shrink = nn.ModuleList(nn.Conv2d(after, after, 3, stride=2, padding=1) for _, after in pairs)
        self.middle = Residual(widths[-1], widths[-1])
        self.grow = nn.ModuleList(nn.ConvTranspose2d(after, after, 4, stride=2, padding=1) for _, after in pairs[::-1])
        self.up = nn.ModuleList(Residual(2 * after, before) for before, after in pairs[::-1])
        self.end = nn.Conv2d(widths[0], 3, 3, padding=1)

    def forward(self, x, when):
        frequencies = torch.exp(-math.log(10_000) * torch.arange(128, device=x.device) / 128)
        angles = when[:, None].float() * frequencies
        time = torch.cat([angles.sin(), angles.cos()], 1)
        x, kept = self.start(x), []
        for block, shrink in zip(self.down, self.shrink, strict=True):
            x = block(x, time)
            kept.append(x)
            x = shrink(x)
        x = self.middle(x, time)
        for grow, block in zip(self.grow, self.up, strict=True):
            x = block(torch.cat([grow(x), kept.pop()], 1), time)
        return self.end(x)


model = UNet().to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=2e-4)
keep = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 1000, device=device), 0)
for step in range(10):
    images = torch.rand(batch, 3, 64, 64, device=device)
    when, noise = torch.randint(1000, (batch,), device=device), torch.randn_like(images)
    share = keep[when][:, None, None, None]
    loss = F.mse_loss(model(share.sqrt() * images + (1 - share).sqrt() * noise, when), noise)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item())
