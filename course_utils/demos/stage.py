"""The machine that a demo runs on: its GPU or a simulated one, sizes that suit it, how a run is tried."""

import time
import tomllib
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from .. import PRESETS, GpuOutOfMemory, TrainingRun, estimate
from ..allocator.policy import OutOfMemory
from ..figures.canvas import Figure
from ..gpus import Gpu
from ..interactive.meter import Meter, Playback, live_meter
from ..measurement import WORDS
from ..measuring import card_here, forced_source, measure
from ..measuring.counting import Unwatched
from ..planning.twin import fits, largest_micro_batch, unsupported
from ..units import format_bytes, percent

if TYPE_CHECKING:
    from ..measuring.devices import Device

SCENES = tomllib.loads(Path(__file__).with_name("scenes.toml").read_text(encoding="utf-8"))

# Of the GPU's memory: what weights, gradients and Adam's states may take at 16 bytes per parameter.
STATES_SHARE = 0.4
MOST_SEQUENCES = 4096
LIVE_STEPS = 6
# Of the live steps, which are not timed: kernels are chosen and memory is asked for in them.
WARM_UP_STEPS = 2


@dataclass(frozen=True)
class StepResult:
    """The result of a step: `words` to show, and a `figure` in the meter's place if there is one.

    Of a run that was tried: the bytes of its `peak`, the seconds of a step if timed, and the most bytes
    allocated up to each step's end.
    """

    words: str
    peak: int = 0
    figure: Figure | None = None
    step_seconds: float | None = None
    step_peaks: tuple[int, ...] = ()


class DemoStep(NamedTuple):
    """A demo's step: its title and words on the screen, what its key runs, if that `fails` on purpose."""

    title: str
    words: str
    run: Callable[["Stage"], StepResult | str]
    fails: bool = False


class Foreseen(NamedTuple):
    """Something that a demo will try on a card, and True if it will go as the demo says."""

    words: str
    as_told: bool


class Demo(NamedTuple):
    """A demo: title, what it shows in a sentence, steps, what is foreseen of them, if it runs anything."""

    title: str
    shows: str
    steps: tuple[DemoStep, ...]
    foresee: Callable[["Stage"], list[Foreseen]]
    runs: bool = True


def in_words(
    name: str,
    each: Iterable[Callable[["Stage"], StepResult | str]],
    foresee: Callable[["Stage"], list[Foreseen]],
    runs: bool = True,
) -> Demo:
    """The demo of that name in scenes.toml, and what each step runs. ValueError if these are not as many."""
    words = SCENES[name]
    steps = list[DemoStep]()
    for (title, text, *more), run in zip(words["steps"], each, strict=True):
        steps.append(DemoStep(title, text, run, fails="fails" in more))
    return Demo(words["title"], words["shows"], tuple(steps), foresee, runs)


class MarkedPhases(Unwatched):
    """Marks on the meter where each phase of a live step begins."""

    def __init__(self, meter: Meter) -> None:
        self.meter = meter

    def in_phase(self, phase: str) -> AbstractContextManager[Any]:
        self.meter.mark(phase)
        return nullcontext()


@dataclass
class Stage:
    """A card, `live` if it is really there, and where its meter is shown (nowhere in a rehearsal).

    A simulated run that is shown is played back in `reading_seconds`; what was `tried` is kept for later
    steps.
    """

    card: Gpu
    live: bool
    show: Callable[[Meter], None] | None = None
    reading_seconds: float = 15.0
    tried: dict[TrainingRun, StepResult] = field(default_factory=dict, repr=False)

    @classmethod
    def here(cls) -> "Stage":
        """The GPU of this machine with what is free on it now, or a simulated T4 where none may be used."""
        import torch

        return cls(card_here(), forced_source() in ("auto", "live") and torch.cuda.is_available())

    @property
    def words(self) -> str:
        """Its name: "a simulated T4-16GB, 16.1 GB"."""
        words = f"{self.card.name}, {format_bytes(self.card.room, 'GB', 1)}"
        return words if self.live else f"a simulated {words}"

    def perform(self, step: DemoStep) -> StepResult:
        outcome = step.run(self)
        return StepResult(outcome) if isinstance(outcome, str) else outcome

    def run_of(self, share: float, states: float = STATES_SHARE, **choices: Any) -> TrainingRun:
        """A run whose peak is estimated at just under `share` of the card.

        It has the largest model whose weights, gradients and states take no more than `states` of the card;
        `choices` are TrainingRun's. ValueError where not one sequence fits.
        """
        models = [model for model in PRESETS.values() if model.family == "gpt2" and not model.experts]
        small = [model for model in models if 16 * model.parameters <= states * self.card.room]
        model = max(small, key=lambda model: model.parameters, default=PRESETS["tiny-gpt"])
        older: dict[str, Any] = {}
        if not self.card.has_bf16:
            older = {"precision": "amp-fp16", "attention": "efficient"}
        run = TrainingRun(model, MOST_SEQUENCES, min(512, model.max_positions), **older | choices)
        count = largest_micro_batch(run, round(share * self.card.room))
        if not count:
            raise ValueError(f"no demo fits {self.words}: free some of its memory")
        return run.replace(micro_batch=count)

    def too_large(self) -> TrainingRun:
        run = self.run_of(1.4)
        return run.replace(micro_batch=run.micro_batch + 1)

    def foresee(self, run: TrainingRun, fails: bool = False) -> Foreseen:
        """The estimate for a run that is meant to fit this card, or meant to fail there."""
        need = estimate(run).total
        room = self.card.room
        reason = unsupported(run, self.card.capability)
        if fails:
            told = "is too large, on purpose"
            as_told = not reason and need > room
        else:
            told = "fits"
            as_told = not reason and fits(run, room)
        if not as_told:
            told = reason or f"was meant to be one that {told}, and is not"
        size = f"{format_bytes(need)} by estimate, {percent(need / room)} of the card"
        return Foreseen(f"{run}: {size}, {told}", as_told)

    def attempt(self, run: TrainingRun) -> StepResult:
        """Trains a few steps. Raises GpuOutOfMemory (live) or OutOfMemory (in a replay) if too large."""
        result = self._live(run) if self.live else self._simulated(run)
        self.tried[run] = result
        return result

    def outcome_of(self, run: TrainingRun) -> StepResult:
        return self.tried.get(run) or self.attempt(run)

    def fails(self, run: TrainingRun) -> str:
        """The message of the failure of a run that is too large. RuntimeError if it fits after all."""
        try:
            self.attempt(run)
        except (GpuOutOfMemory, OutOfMemory) as failure:
            return str(failure)
        raise RuntimeError(
            f"{run} should have been too large but fits {self.words}: there is nothing to show"
        )

    def _simulated(self, run: TrainingRun) -> StepResult:
        measured = measure(run, "simulated")
        played = Playback(measured, self.reading_seconds, self.card.room)
        if self.show is not None:
            with played.meter() as meter:
                self.show(meter)
                meter.wait()
        if played.replayed.failure:
            raise played.replayed.failure
        peaks = measured.timeline.step_peaks()
        so_far = tuple(accumulate((peaks[step] for step in sorted(peaks) if step), max))
        blocks = format_bytes(played.replayed.peak_allocated)
        words = f"{_compared(run, measured.peak, measured.word)} ({blocks} in blocks)"
        return StepResult(f"{words} · {measured.provenance}", measured.peak, step_peaks=so_far)

    def _live(self, run: TrainingRun) -> StepResult:
        from ..measuring.devices import Cuda
        from ..measuring.live import free_bytes, memory_released, only_kernel

        device = Cuda()
        with memory_released(run, free_bytes), only_kernel(run):
            device.release()
            device.reset_peaks()
            with live_meter() as meter:
                if self.show is not None:
                    self.show(meter)
                seconds, peaks = _trained(run, device, meter)
        words = f"{_compared(run, meter.peak, WORDS['live'])} · {seconds:.2f} s per step · {meter.source}"
        return StepResult(words, meter.peak, step_seconds=seconds, step_peaks=peaks)


def _trained(run: TrainingRun, device: "Device", meter: Meter) -> tuple[float, tuple[int, ...]]:
    """Seconds of a step, and the most allocated up to each step's end.

    The meter's end frees all that it makes.
    """
    from ..measuring.live import ready

    training, _ = ready(run, device)
    meter.follow(training.holdings())
    ends = []
    peaks = []
    for _ in range(LIVE_STEPS):
        training.step(MarkedPhases(meter))
        device.synchronize()
        ends.append(time.perf_counter())
        peaks.append(device.peaks()[0])
    seconds = (ends[-1] - ends[WARM_UP_STEPS - 1]) / (LIVE_STEPS - WARM_UP_STEPS)
    return seconds, tuple(peaks)


def _compared(run: TrainingRun, peak: int, word: str) -> str:
    return f"Estimated {format_bytes(estimate(run).total)}, {word} {format_bytes(peak)}"
