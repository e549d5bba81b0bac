"""One of Hugging Face's models, whole, from its configuration alone: python hugging_face.py qwen3."""

import sys

import torch
import transformers as hf

CONFIGURATIONS = {
    "gpt2": hf.GPT2Config(),
    "llama": hf.LlamaConfig(),
    "qwen3": hf.Qwen3Config(),
    "mistral": hf.MistralConfig(),
    "phi3": hf.Phi3Config(),
    "gpt-neox": hf.GPTNeoXConfig(),
    "opt": hf.OPTConfig(),
    "gemma2": hf.Gemma2Config(),
    "bloom": hf.BloomConfig(hidden_size=1024, n_layer=24, n_head=16),
    "mamba": hf.MambaConfig(),
    "t5": hf.T5Config(decoder_start_token_id=0),
    "vit": hf.ViTConfig(),
    "whisper": hf.WhisperConfig(),
    "mixtral": hf.MixtralConfig(),
}
HEADS = {
    "t5": hf.AutoModelForSeq2SeqLM,
    "vit": hf.AutoModelForImageClassification,
    "whisper": hf.AutoModelForSpeechSeq2Seq,
}

name = sys.argv[1]
with torch.device("meta"):
    model = HEADS.get(name, hf.AutoModelForCausalLM).from_config(CONFIGURATIONS[name], dtype=torch.bfloat16)
model.to_empty(device="cuda")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
words = torch.zeros(2, int(sys.argv[2]) if sys.argv[2:] else 512, dtype=torch.long, device="cuda")
given = {"input_ids": words, "labels": words}
if name == "vit":
    pixels = torch.zeros(2, 3, 224, 224, dtype=torch.bfloat16, device="cuda")
    given = {"pixel_values": pixels, "labels": words[:, 0]}
if name == "whisper":
    sound = torch.zeros(2, 80, 3000, dtype=torch.bfloat16, device="cuda")
    given = {"input_features": sound, "labels": words[:, :256]}
for _ in range(2):
    model(**given).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
