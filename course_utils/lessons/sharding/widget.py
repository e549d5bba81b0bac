"""The Explorer with ranks and ZeRO's stage, and what is left on each GPU. For notebooks only."""

from typing import Any

from ... import TrainingRun, format_bytes
from ...estimating.published import zero_sharded_state_bytes
from ...interactive.html_bars import Picture, stacked_bars
from ...interactive.widgets import RunSliders, code_html, verdict_html
from ...model_files import model_config
from ...palette import number, segments_of, told_name


class ShardSliders(RunSliders):
    """Controls for ranks, stage, model, GPU and micro-batch, and a picture of what one rank needs.

    `choices` are those of a `TrainingRun` to begin with. In the next cell, `.run` and `.gpu` are what has
    been chosen. Raises ValueError like `TrainingRun` if the first choices are impossible.
    """

    invitation = "Sliders over ranks and stage: run this cell to use them."
    names = ("world_size", "zero_stage", "model", "gpu", "micro_batch", "precision", "recompute")

    def __init__(
        self,
        model: str = "llama3-8b",
        ranks: int = 8,
        stage: int = 3,
        *,
        gpu: str = "A100-80GB",
        **choices: Any,
    ) -> None:
        first: dict[str, Any] = {"micro_batch": 1, "precision": "bf16-master", "recompute": "full"} | choices
        super().__init__(TrainingRun(model, world_size=ranks, zero_stage=stage, **first), gpu)

    @property
    def run(self) -> TrainingRun:
        """The run that has been chosen.

        Its sequences are no longer than the model can read, its attention is one that the precision allows.
        Raises ValueError, saying why, where choices contradict each other.
        """
        chosen = {name: value for name, value in self.chosen.items() if name != "gpu"}
        chosen["model"] = model_config(chosen["model"])
        chosen["seq_len"] = min(self.first.seq_len, chosen["model"].max_positions)
        if chosen["precision"] == "fp32" and self.first.attention == "flash":
            chosen["attention"] = "efficient"
        return self.first.replace(**chosen)

    def redraw(self) -> tuple[Picture, str]:
        """ZeRO's formula above, the whole step's estimated peak below, and the GPU's line through both."""
        run = self.run
        card = self.gpu
        peak = self.breakdown
        states = zero_sharded_state_bytes(run.model.parameters, run.zero_stage, run.world_size)
        stage = run.zero_stage
        left, whole = (format_bytes(size, "GB", 1) for size in (sum(states.values()), peak.total))
        ranks = number(run.world_size)
        title = f"Stage {stage} on {ranks} ranks: {left} by ZeRO's formula, but {whole} at the peak"
        how = "DistributedDataParallel" if stage < 2 else "FSDP2"
        note = f"ZeRO's formula with K = 12 · peak estimated for {how}, in {peak.label}"
        line = told_name(card).removesuffix(" (dashed)")
        rows = {"formula": segments_of(states), "whole step": segments_of(peak)}
        figure = stacked_bars(rows, title, limit=card.room, limit_name=line, note=note)
        tokens = f"{run.world_size * run.micro_batch * run.seq_len:,} tokens at a time"
        verdict = verdict_html(run, peak.total, card)
        return figure, f"{verdict} All ranks together process {tokens}.{code_html(run)}"


shard_sliders = ShardSliders
