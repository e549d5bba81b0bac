"""Lesson 09's sliders: ranks and stage, and what is left on each GPU. Only notebooks import this module."""

from html import escape
from typing import Any

from course_utils.estimating import estimate
from course_utils.estimating.published import zero_sharded_state_bytes
from course_utils.figures import stack
from course_utils.figures.axes import segments_of
from course_utils.figures.canvas import Figure, number
from course_utils.figures.runs import told_name
from course_utils.gpus import GPUS, Gpu, gpu
from course_utils.interactive.widgets import Explorable, dropdown, slider, verdict_html
from course_utils.model_files import model_config
from course_utils.run import TrainingRun
from course_utils.units import format_bytes

MODELS = ("gpt2", "gpt2-xl", "llama3.2-1b", "llama3.2-3b", "mistral-7b", "llama3-8b", "llama3-70b", "gpt3-175b")
RANKS = tuple(2**k for k in range(1, 11))
PRECISIONS = ("bf16-master", "amp-bf16", "fp32")
RECOMPUTES = ("none", "selective", "full")


def shard_sliders(
    model: str = "llama3-8b", ranks: int = 8, stage: int = 3, *, gpu: str = "A100-80GB", **choices: Any
) -> "ShardSliders":
    """Controls for ranks, stage, model, GPU and micro-batch, and a picture of what one rank needs.

    `choices` are those of a `TrainingRun` to begin with. In the next cell, `.run` is what has been chosen. Raises
    ValueError like `TrainingRun` if the first choices are impossible.
    """
    first: dict[str, Any] = {"micro_batch": 1, "precision": "bf16-master", "recompute": "full"} | choices
    return ShardSliders(TrainingRun(model, world_size=ranks, zero_stage=stage, **first), gpu)


class ShardSliders(Explorable):
    """What `shard_sliders` shows; `.run` and `.gpu` are what has been chosen."""

    invitation = "Sliders over ranks and stage: run this cell to use them."

    def __init__(self, run: TrainingRun, gpu_name: str) -> None:
        self.first = run
        self._kernels = {"fp32": "efficient" if run.attention == "flash" else run.attention}
        super().__init__(
            {
                "world_size": slider("ranks D", RANKS, run.world_size),
                "zero_stage": slider("stage", (0, 1, 2, 3), run.zero_stage),
                "model": dropdown("model", MODELS, run.model.name),
                "gpu": dropdown("GPU", GPUS, gpu(gpu_name).name),
                "micro_batch": slider("micro-batch", (1, 2, 4, 8, 16, 32), run.micro_batch),
                "precision": dropdown("precision", PRECISIONS, run.precision.name),
                "recompute": dropdown("recompute", RECOMPUTES, run.recompute),
            }
        )

    @property
    def gpu(self) -> Gpu:
        """The GPU that has been chosen."""
        return GPUS[self.controls["gpu"].value]

    @property
    def run(self) -> TrainingRun:
        """The run that has been chosen, its sequences no longer than the model can read. Raises ValueError, in words,
        where choices contradict each other.
        """
        chosen = {name: control.value for name, control in self.controls.items() if name != "gpu"}
        chosen["model"] = model_config(chosen["model"])
        chosen["seq_len"] = min(self.first.seq_len, chosen["model"].max_positions)
        return self.first.replace(**chosen, attention=self._kernels.get(chosen["precision"], self.first.attention))

    def redraw(self) -> tuple[Figure, str]:
        """ZeRO's formula above, the estimated peak of the whole step below, and the GPU's line through both."""
        run, card = self.run, self.gpu
        peak = estimate(run)
        states = zero_sharded_state_bytes(run.model.parameters, run.zero_stage, run.world_size)
        left, whole = (format_bytes(size, "GB", 1) for size in (sum(states.values()), peak.total))
        title = (
            f"Stage {run.zero_stage} on {number(run.world_size)} ranks: {left} by ZeRO's formula, {whole} at the peak"
        )
        rows = {"formula": segments_of(states), "whole step": segments_of(peak)}
        how = "DistributedDataParallel" if run.zero_stage < 2 else "FSDP2"
        note = f"ZeRO's formula with K = 12 · peak estimated for {how}, in {peak.label}"
        line = told_name(card).removesuffix(" (dashed)")
        figure = stack(rows, title, capacity=card.room, capacity_label=line, provenance=note)
        return figure, (
            f"{verdict_html(peak.total, card)} Together the ranks work on "
            f"{run.world_size * run.micro_batch * run.seq_len:,} tokens at a time."
            f"<br><code style='user-select:all'>{escape(run.code())}</code>"
        )
