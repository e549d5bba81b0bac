"""LoRA's choices with controls, beside a GPU. Only notebooks import this module."""

from collections.abc import Mapping
from html import escape
from typing import Any

from course_utils import estimate
from course_utils.figures import stack_svg
from course_utils.figures.axes import segments_of
from course_utils.figures.canvas import Figure
from course_utils.figures.runs import told_name
from course_utils.gpus import GPUS, Gpu, gpu
from course_utils.interactive.widgets import Explorable, dropdown, slider, verdict_html
from course_utils.planning.twin import fit_words, lacks
from course_utils.run import TrainingRun
from course_utils.units import format_bytes

MODELS = ("gpt2", "gpt2-xl", "llama3.2-1b", "llama3.2-3b", "llama3-8b", "llama3-70b")
RANKS = (0, 2, 4, 8, 16, 32, 64)
TARGETS = {"attention": ("attention",), "attention and MLP": ("attention", "mlp")}
FROZEN = {"as trained": None, "16 bits": 16, "8 bits": 8, "4 bits (NF4)": 4}
MICRO_BATCHES = tuple(2**power for power in range(7))


def lora_explorer(model: str = "llama3-8b", *, gpu: str = "RTX4090-24GB", **choices: Any) -> "LoraExplorer":
    """Controls for rank, targets, bits of the frozen weights and what else decides, and the estimate beside a GPU.

    `choices` are those of a `TrainingRun` to begin with. Raises ValueError like `TrainingRun` if they are impossible.
    """
    return LoraExplorer(TrainingRun(model, **choices), gpu)


class LoraExplorer(Explorable):
    """What `lora_explorer` shows; `.run` is what has been chosen."""

    invitation = "LoRA and quantization beside a GPU: run this cell to use its controls."

    def __init__(self, run: TrainingRun, gpu_name: str) -> None:
        self.first = run
        mlp = any(name in run.lora_targets for name in ("up", "down"))
        super().__init__(
            {
                "model": dropdown("model", MODELS, run.model.name),
                "gpu": dropdown("GPU", GPUS, gpu(gpu_name).name),
                "lora_rank": slider("rank (0: all)", RANKS, run.lora_rank),
                "lora_targets": dropdown("on", TARGETS.items(), TARGETS["attention and MLP" if mlp else "attention"]),
                "frozen_bits": dropdown("frozen in", FROZEN.items(), run.frozen_bits),
                "optimizer": dropdown("optimizer", ("adamw", "adam8bit"), run.optimizer.name),
                "micro_batch": slider("micro-batch", MICRO_BATCHES, run.micro_batch),
                "recompute": dropdown("recompute", ("none", "full"), run.recompute),
            }
        )

    @property
    def run(self) -> TrainingRun:
        """The run that has been chosen. Raises ValueError, in words, where the choices contradict each other."""
        chosen = {name: control.value for name, control in self.controls.items() if name != "gpu"}
        if not chosen["lora_rank"]:
            chosen["lora_targets"] = ()
        return self.first.replace(**chosen)

    def redraw(self) -> tuple[Figure, str]:
        """The stack of what has been chosen beside the GPU's capacity, the verdict, and the run as a line of code."""
        run, card = self.run, GPUS[self.controls["gpu"].value]
        peak = estimate(run)
        trained = f"rank {run.lora_rank}" if run.lora_rank else "all weights trained"
        title = f"{run.model.name}, {trained}: {format_bytes(peak.total, 'GB', 1)} at the peak"
        verdict = fit_words(peak.total, card)
        alt = f"Estimate for {title}. {run}. It {verdict}."
        message = (
            f"{verdict_html(peak.total, card)}{escape(lacks(run, card))}"
            f"<br><code style='user-select:all'>{escape(run.code())}</code>"
        )
        return Figure(_picture(peak, title, card, alt), alt), message


def _picture(peak: Mapping[str, int], title: str, card: Gpu, alt: str) -> str:
    rows, note = {"": segments_of(peak)}, "estimated from formulas"
    return stack_svg(
        rows, title, card.room, told_name(card), note, "GB", None, alt, values_in_legend=True, nominal=card.memory
    )
