"""PEFT's LoRA on a Llama of 1.2 billion parameters in bf16: only the adapters are trained."""

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, get_linear_schedule_with_warmup

config = LlamaConfig(
    hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8,
    vocab_size=128_256, tie_word_embeddings=True,
)  # fmt: skip
model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
model.gradient_checkpointing_enable()
model.enable_input_require_grads()
model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"))
model.print_trainable_parameters()
model = model.to("cuda")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
schedule = get_linear_schedule_with_warmup(optimizer, 10, 100)
text = torch.randint(0, config.vocab_size, (64, 1024))
model.train()
for step, tokens in enumerate(torch.utils.data.DataLoader(text, batch_size=4)):
    batch = {"input_ids": tokens.to("cuda"), "attention_mask": torch.ones_like(tokens).to("cuda")}
    loss = model(**batch, labels=batch["input_ids"]).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    print(step, loss.detach().float().cpu().item())
model.save_pretrained("adapters")
