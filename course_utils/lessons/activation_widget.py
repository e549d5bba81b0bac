"""The heat map of lesson 05 with controls. Only notebooks import this module."""

from collections.abc import Sequence
from typing import Any

import ipywidgets

from ..figure import Figure
from ..gpus import GPUS, gpu
from ..models import PRESETS
from ..run import TrainingRun
from ..widgets import LAYOUT, STYLE, Explorable
from .activation_map import heat_map

MODELS = ("gpt2", "gpt2-xl", "tinyllama-1.1b", "llama3.2-1b", "llama3.2-3b", "llama3-8b")
PRECISIONS = ("amp-bf16", "bf16-master", "fp32")
ATTENTIONS = ("eager", "flash", "efficient")
RECOMPUTES = ("none", "selective-attention", "full")


def activation_map(model: str = "llama3.2-1b", *, gpu: str = "A100-80GB", **choices: Any) -> "ActivationMap":
    """Controls for model, GPU, precision, attention and recomputation, and the heat map that follows them.

    `choices` are those of a `TrainingRun` to begin with. Raises ValueError like `TrainingRun` if they are impossible.
    """
    return ActivationMap(TrainingRun(model, **choices), gpu)


class ActivationMap(Explorable):
    """What `activation_map` shows; `.run` is what has been chosen."""

    invitation = "Heat map of activations over b and s: run this cell to use its controls."

    def __init__(self, run: TrainingRun, gpu_name: str) -> None:
        super().__init__(
            {
                "model": _dropdown("model", MODELS, run.model.name),
                "gpu": _dropdown("GPU", tuple(GPUS), gpu(gpu_name).name),
                "attention": _dropdown("attention", ATTENTIONS, run.attention),
                "recompute": _dropdown("recompute", RECOMPUTES, run.recompute),
                "precision": _dropdown("precision", PRECISIONS, run.precision.name),
            }
        )

    @property
    def run(self) -> TrainingRun:
        """The run that has been chosen, of one sequence. Raises ValueError, in words, where choices contradict."""
        chosen = {name: control.value for name, control in self.controls.items() if name != "gpu"}
        model = PRESETS[chosen.pop("model")]
        return TrainingRun(model, 1, 128, **chosen)

    def redraw(self) -> tuple[Figure, str]:
        """The heat map of what has been chosen, and the run as a line of code."""
        run = self.run
        return heat_map(run, GPUS[self.controls["gpu"].value]), f"<code>{run.code()}</code>"


def _dropdown(description: str, options: Sequence[str], value: str) -> ipywidgets.Dropdown:
    choices = [*options, *([] if value in options else [value])]
    return ipywidgets.Dropdown(options=choices, value=value, description=description, style=STYLE, layout=LAYOUT)
