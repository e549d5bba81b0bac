"""The machine that a demo runs on: its GPU or a simulated one, sizes that suit it, and how a run is tried there."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from ..allocator import OutOfMemory
from ..estimating import estimate
from ..fitting import largest_micro_batch
from ..gpus import Gpu
from ..live_meter import Meter, ReplayGauge, live_meter
from ..measuring import card_here, forced_source, measure
from ..measuring.counting import Unwatched
from ..measuring_errors import GpuOutOfMemory
from ..models import PRESETS
from ..run import TrainingRun
from ..units import format_bytes

STATES_SHARE = 0.4
"""Of the GPU's memory: what weights, gradients and Adam's states may take at 16 bytes a parameter."""

MOST_SEQUENCES = 4096
LIVE_STEPS = 6


@dataclass(frozen=True)
class Outcome:
    """What came of a step: `words` to show, the peak in bytes (0 where nothing ran), where it was measured."""

    words: str
    peak: int = 0
    source: str = ""
    seconds: float = 0.0

    @property
    def summary(self) -> str:
        """One line for a rehearsal."""
        measured = f"{format_bytes(self.peak)} at the peak ({self.source}). " if self.peak else ""
        return f"{measured}{self.words}"


@dataclass(frozen=True)
class DemoStep:
    """One step of a demo: what stands on the screen, and what its key does."""

    title: str
    words: str
    run: Callable[["Stage"], Outcome]


class MarkedPhases(Unwatched):
    """Tells the meter where each phase of a live step begins."""

    def __init__(self, meter: Meter) -> None:
        self.meter = meter

    def in_phase(self, phase: str) -> AbstractContextManager[Any]:
        self.meter.mark(phase)
        return nullcontext()


@dataclass
class Stage:
    """A card, whether it is really there, and where its meter is shown (nowhere in a rehearsal).

    `reading_seconds` is how long a simulated run is played back where it is shown.
    """

    card: Gpu
    live: bool
    show: Callable[[Meter], None] | None = None
    reading_seconds: float = 15.0

    @classmethod
    def here(cls) -> "Stage":
        """The GPU of this machine with what is free on it now, or a simulated T4 where none may be used."""
        import torch

        return cls(card_here(), forced_source() in ("auto", "live") and torch.cuda.is_available())

    @property
    def words(self) -> str:
        """What it is: "a simulated T4-16GB, 16.1 GB"."""
        kind = "" if self.live else "a simulated "
        return f"{kind}{self.card.name}, {format_bytes(self.card.room, 'GB', 1)}"

    def perform(self, step: DemoStep) -> Outcome:
        """Runs the step, and says how long it took."""
        begin = time.perf_counter()
        outcome = step.run(self)
        return replace(outcome, seconds=time.perf_counter() - begin)

    # Sizes

    def run_of(self, share: float) -> TrainingRun:
        """A run whose peak is estimated at just under `share` of the card. ValueError where not one sequence fits."""
        base = self._base()
        count = largest_micro_batch(base, round(share * self.card.room))
        if not count:
            raise ValueError(f"no demo fits {self.words}: free some of its memory")
        return base.replace(micro_batch=count)

    def too_large(self, share: float = 1.4) -> TrainingRun:
        """A run that needs about `share` of the card."""
        base = self._base()
        return base.replace(micro_batch=1 + largest_micro_batch(base, round(share * self.card.room)))

    def _base(self) -> TrainingRun:
        models = [model for model in PRESETS.values() if model.family == "gpt2" and not model.experts]
        small = [model for model in models if 16 * model.parameters <= STATES_SHARE * self.card.room]
        if not small:
            raise ValueError(f"no demo fits {self.words}: free some of its memory")
        model = max(small, key=lambda model: model.parameters)
        older: dict[str, Any] = {} if self.card.has_bf16 else {"precision": "amp-fp16", "attention": "efficient"}
        return TrainingRun(model, MOST_SEQUENCES, min(512, model.max_positions), **older)

    # Trying a run

    def attempt(self, run: TrainingRun) -> Outcome:
        """Trains a few steps. Raises GpuOutOfMemory (live) or OutOfMemory (the allocator's replay) if too large."""
        return self._live(run) if self.live else self._simulated(run)

    def fails(self, run: TrainingRun) -> str:
        """What the failure says of a run that is too large. RuntimeError if it fits after all."""
        try:
            self.attempt(run)
        except (GpuOutOfMemory, OutOfMemory) as failure:
            return str(failure)
        raise RuntimeError(f"{run} was meant to be too large, and fits {self.words}: nothing to show")

    def _simulated(self, run: TrainingRun) -> Outcome:
        measured = measure(run, "simulated")
        gauge = ReplayGauge(measured, self.reading_seconds, self.card.room)
        if self.show is not None:
            meter = Meter(gauge).start(with_cell=False)
            self.show(meter)
            meter.wait()
        if gauge.failure is not None:
            raise gauge.failure
        return Outcome(estimated(run), measured.peak, str(measured.provenance))

    def _live(self, run: TrainingRun) -> Outcome:
        import torch

        from ..measuring.devices import Cuda
        from ..measuring.live import free_bytes, memory_released, only_kernel, ready

        device = Cuda()
        with memory_released(run, free_bytes), only_kernel(run):
            device.reset_peaks()
            with live_meter() as meter:
                if self.show is not None:
                    self.show(meter)
                training, _ = ready(run, device)
                for _ in range(LIVE_STEPS):
                    training.step(MarkedPhases(meter))
                torch.cuda.synchronize()
            return Outcome(estimated(run), meter.peak, meter.gauge.source)


def estimated(run: TrainingRun) -> str:
    """The run and its estimate in words."""
    return f"{run}: {format_bytes(estimate(run).total)} by estimate."
