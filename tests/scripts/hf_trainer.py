"""Hugging Face's Trainer: a GPT-2 from its config, fp16 with a loss scaler, accumulation, checkpoints, a report."""

import torch
from transformers import AutoModelForCausalLM, GPT2Config, Trainer, TrainingArguments


class Text(torch.utils.data.Dataset):
    def __len__(self):
        return 256

    def __getitem__(self, index):
        tokens = torch.randint(0, 50257, (512,))
        return {"input_ids": tokens, "labels": tokens}


model = AutoModelForCausalLM.from_config(GPT2Config())
arguments = TrainingArguments(
    output_dir="out-hf-trainer",
    per_device_train_batch_size=8,
    gradient_accumulation_steps=2,
    learning_rate=2e-5,
    max_steps=10,
    fp16=True,
    logging_steps=1,
    save_steps=1,
    dataloader_num_workers=2,
    report_to="none",
)
Trainer(model=model, args=arguments, train_dataset=Text()).train()
