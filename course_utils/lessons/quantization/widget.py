"""The Explorer with LoRA's choices. Only notebooks import this module."""

from typing import Any

from ...interactive.widgets import RunSliders, dropdown, slider
from ...run import TrainingRun

TARGETS = {"attention": ("attention",), "attention and MLP": ("attention", "mlp")}
FROZEN = {"as trained": None, "16 bits": 16, "8 bits": 8, "4 bits (NF4)": 4}


class LoraSliders(RunSliders):
    """Controls for rank, targets, bits of the frozen weights and other choices; the estimate next to a GPU.

    `choices` are a `TrainingRun`'s, and refused like its; `.run` is what has been chosen.
    """

    invitation = "LoRA and quantization on a GPU: run this cell to use its controls."
    names = (
        "model",
        "gpu",
        "lora_rank",
        "lora_targets",
        "frozen_bits",
        "optimizer",
        "micro_batch",
        "recompute",
    )

    def __init__(self, model: str = "llama3-8b", *, gpu: str = "RTX4090-24GB", **choices: Any) -> None:
        run = TrainingRun(model, **choices)
        mlp = any(name in run.lora_targets for name in ("up", "down"))
        targets = TARGETS["attention and MLP"] if mlp else TARGETS["attention"]
        own = {
            "lora_rank": slider("rank (0: all)", (0, 2, 4, 8, 16, 32, 64), run.lora_rank),
            "lora_targets": dropdown("on", TARGETS.items(), targets),
            "frozen_bits": dropdown("frozen in", FROZEN.items(), run.frozen_bits),
        }
        super().__init__(run, gpu, own)


lora_sliders = LoraSliders
