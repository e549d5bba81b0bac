"""Heat map of lesson 05 with controls. Only notebooks import this module."""

from functools import partial
from typing import Any

import ipywidgets

from ... import GPUS, PRESETS, TrainingRun, estimate, format_bytes
from ... import gpu as known_gpu
from ...gpus import Gpu
from ...interactive.html_bars import Picture
from ...interactive.widgets import LAYOUT, STYLE, SliderBox, dropdown, slider
from ...planning.twin import fit_words
from .heat_map import BATCHES, SEQUENCES, heat_map, kept_bytes

# in the order of their numbers of parameters
MODELS = ("gpt2", "tinyllama-1.1b", "llama3.2-1b", "gpt2-xl", "llama3.2-3b", "llama3-8b")


class ActivationMap(SliderBox):
    """Sliders for model, GPU and a cell of the map, choices for kernel and recipe, and their heat map.

    `choices` are the first ones of a `TrainingRun`; in the next cell, `.run` is what you chose. Raises
    ValueError like `TrainingRun` if they are impossible, and for a `micro_batch` or `seq_len` that the map
    lacks.
    """

    invitation = "Heat map of activations over b and s: run this cell to use its sliders."

    def __init__(
        self,
        model: str = "llama3.2-1b",
        *,
        gpu: str = "A100-80GB",
        micro_batch: int = 4,
        seq_len: int = 2048,
        **choices: Any,
    ) -> None:
        for value, known, name in ((micro_batch, BATCHES, "micro_batch"), (seq_len, SEQUENCES, "seq_len")):
            if value not in known:
                raise ValueError(f"{name} is {value}; the map has {', '.join(map(str, known))}")
        run = TrainingRun(model, **choices)
        models = list(dict.fromkeys([*MODELS, run.model.name]))
        cards = sorted(GPUS, key=lambda name: GPUS[name].memory)
        names = partial(ipywidgets.SelectionSlider, continuous_update=False, style=STYLE, layout=LAYOUT)
        controls = {
            "model": names(options=models, value=run.model.name, description="model"),
            "gpu": names(options=cards, value=known_gpu(gpu).name, description="GPU"),
            "micro_batch": slider("look at b", BATCHES, micro_batch, continuous=False),
            "seq_len": slider("look at s", SEQUENCES, seq_len, continuous=False),
            "attention": dropdown("attention", ("eager", "flash", "efficient"), run.attention),
            "recompute": dropdown("recompute", ("none", "selective-attention", "full"), run.recompute),
            "precision": dropdown("precision", ("amp-bf16", "bf16-master", "fp32"), run.precision.name),
        }
        super().__init__(controls)

    @property
    def gpu(self) -> Gpu:
        return GPUS[self.controls["gpu"].value]

    @property
    def run(self) -> TrainingRun:
        """The run at the chosen cell, no longer than the model takes. ValueError where choices contradict."""
        chosen = {name: control.value for name, control in self.controls.items() if name != "gpu"}
        model = PRESETS[chosen.pop("model")]
        chosen["seq_len"] = max(s for s in SEQUENCES if s <= min(chosen["seq_len"], model.max_positions))
        return TrainingRun(model, **chosen)

    def redraw(self) -> tuple[Picture, str]:
        run = self.run
        step = estimate(run)
        asked = self.controls["seq_len"].value
        shorter = ""
        if asked > run.seq_len:
            shorter = f"{run.model.name} has fewer than {asked:,} positions, so: "
        message = (
            f"{shorter}{run.micro_batch} × {run.seq_len:,} tokens: forward and loss keep "
            f"<b>{format_bytes(kept_bytes(run), 'GB', 2)}</b>; the whole step takes "
            f"{format_bytes(step.total, 'GB', 2)} and {fit_words(step.total, self.gpu)}."
            f"<br><code style='user-select:all'>{run.code()}</code>"
        )
        return heat_map(run, self.gpu, (run.micro_batch, run.seq_len)), message


activation_map = ActivationMap
