"""The second verb: what a training step really takes, on a GPU, a simulated GPU or the CPU."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from typing import Any

from ..allocator.replay import can_be_replayed, replay
from ..breakdown import KINDS, MemoryBreakdown
from ..errors import GpuOutOfMemory, unknown
from ..estimating import estimate
from ..gpus import Gpu, gpu
from ..measurement import Measurement
from ..planning.twin import fits, unsupported
from ..run import TrainingRun
from ..units import GB, format_bytes, formatter
from .recording_file import SIMULATED_GPU

SOURCES = ("auto", "live", "simulated", "cpu", "recorded")

OWN_ATTENTIONS = ("auto", "flash", "efficient")
"""What scaled_dot_product_attention may be in a learner's own model on a simulated GPU."""

MOST_STEPS = 1000

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Environment variables that set the policy of torch's allocator."""

ON_THE_CPU = (
    "A CPU differs from a GPU in three ways: dropout masks take 4 bytes an element, RMSNorm keeps a normalized copy, "
    "and AdamW's step counters stand in the same memory."
)

BALANCED = "balanced experts: each computes b·s·k/E pairs of a token and a choice, a real router's load differs"
"""Said wherever a mixture of experts is measured: its capacity is fixed, so that no shape depends on the data."""

CPU_LIMIT = 4 * GB
"""Larger runs are not traced on the CPU: they would take minutes, and memory that a laptop needs."""


def measure(
    run: TrainingRun | None = None,
    source: str = "auto",
    steps: int = 2,
    *,
    step: Callable[..., Any] | None = None,
    model: Any = None,
    optimizer: Any = None,
    batch: Any = None,
    attention: str = "auto",
    device: str | None = None,
) -> Measurement:
    """Run `steps` training steps as `run` says and tell where each byte went; the peak is that of the last step.

    `source` is "live" (a CUDA GPU), "simulated" (a GPU that is not there), "cpu" (small models), "recorded" (shipped
    results; `device`, part of a GPU's name, picks one of several), or "auto": live where a GPU is there and the run is
    predicted to fit it, else simulated, and the provenance says why. If the GPU then runs out of memory or refuses a
    kernel, "auto" simulates, too. The environment variable COURSE_SOURCE settles "auto". Raises ValueError for what a
    source cannot do and, live, GpuOutOfMemory for a run that is too large: memory is then released.

    A model and a step of your own: `measure(step=step, model=model, optimizer=optimizer, batch=(x, y))` calls
    `step(model, optimizer, batch)` with copies on the device, so yours are left as they are. An optimizer, or a list of
    them, and a batch of any form may be left out, and are then not passed; a scheduler or a loss scaler goes into the
    batch, as using it changes it. Phases are noticed; the step may return its loss. `attention` says which kernel
    `scaled_dot_product_attention` is on a simulated GPU: "flash", "efficient" or "auto", flash wherever it can run.
    Raises StepError for a step that cannot be measured; others pass as they are.
    """
    _check_what(run, {"step": step, "model": model, "optimizer": optimizer, "batch": batch})
    if attention not in OWN_ATTENTIONS:
        raise unknown("attention", attention, OWN_ATTENTIONS)
    if run is not None and attention != "auto":
        raise ValueError(f"attention={attention!r} is for a step of your own: a run says its kernel itself")
    if source not in SOURCES:
        raise unknown("source", source, SOURCES)
    if not isinstance(steps, int) or isinstance(steps, bool) or not 1 <= steps <= MOST_STEPS:
        raise ValueError(
            f"steps is {steps!r}: a whole number from 1 to {MOST_STEPS}; 2 is usual, as the first has no states yet"
        )
    if device is not None and not isinstance(device, str):
        raise ValueError(f"device is {device!r}: a part of a GPU's name, such as 'H200'")
    if device is not None and source != "recorded":
        raise ValueError(f"device={device!r} picks a recording: it goes with source='recorded', not {source!r}")
    if run is None:
        from .own import measure_own

        chosen = forced_source() if source == "auto" else source
        return measure_own(step, model, optimizer, batch, chosen, steps, attention)
    if run.precision.name == "fp8":
        raise ValueError(
            "fp8 is not measured: torch by itself trains nothing in fp8, libraries such as MS-AMP do; estimate(run) "
            "accounts for its states; choose precision='bf16-master' to measure the nearest recipe"
        )
    if run.tensor_parallel > 1:
        raise ValueError(
            "tensor parallelism has closed forms only: course_utils.rank_states(run) says what one rank keeps; "
            "or set tensor_parallel=1"
        )
    if run.world_size > 1:
        return _of_many_ranks(run, source, steps, device)
    if source == "recorded":
        return _recorded(run, steps, "", device)
    if source == "auto" and forced_source() == "auto":
        return _auto(run, steps)
    source = forced_source() if source == "auto" else source
    measured_by = {"live": _live, "simulated": _simulated, "cpu": _cpu, "recorded": _recorded}
    return measured_by[source](run, steps, _notes(run))


def _check_what(run: Any, own: dict[str, Any]) -> None:
    """Either a TrainingRun, or a step with a model. Raises TypeError, saying what to write, for both or neither."""
    given = [name for name, value in own.items() if value is not None]
    if run is None and ("step" not in given or "model" not in given):
        raise TypeError(
            "measure takes a TrainingRun, measure(run), or a step of your own with the model that it trains, "
            "measure(step=step, model=model, optimizer=optimizer, batch=batch)"
        )
    if run is not None and not isinstance(run, TrainingRun):
        raise TypeError(
            f"run is a {type(run).__name__}: a TrainingRun; a model of your own goes with measure(step=…, model=…)"
        )
    if run is not None and given:
        raise TypeError(f"a TrainingRun says all there is to measure: leave out {', '.join(given)}, or the run")


def choose_source(run: TrainingRun) -> tuple[str, str]:
    """What "auto" means for `run` on this machine, and why."""
    forced = forced_source()
    if forced != "auto":
        return forced, ""
    from .live import usable_gpu

    card, reason = usable_gpu()
    if card is None:
        return "simulated", reason
    reason = unsupported(run, card.capability)
    if not reason and not fits(run, card.memory):
        asked, there = format_bytes(estimate(run).total, "GB", 1), format_bytes(card.memory, "GB", 1)
        reason = f"needs {asked}, {card.name} has {there} free"
    return ("simulated", reason) if reason else ("live", "")


def forced_source() -> str:
    """What the environment variable COURSE_SOURCE settles; "auto" if it is not set, or empty."""
    forced = os.environ.get("COURSE_SOURCE") or "auto"
    if forced not in SOURCES:
        raise unknown("COURSE_SOURCE", forced, SOURCES)
    return forced


def card_here() -> Gpu:
    """The GPU on which "auto" would measure live; where there is none, a T4 of 16 GB stands in for it."""
    if forced_source() not in ("auto", "live"):
        return gpu("T4-16GB")
    from .live import usable_gpu

    card, _ = usable_gpu()
    return card or gpu("T4-16GB")


def _of_many_ranks(run: TrainingRun, source: str, steps: int, device: str | None) -> Measurement:
    """Rank 0 of several. FSDP2 (zero_stage 2 and 3) is simulated, DistributedDataParallel (0 and 1) run on the CPU.

    Raises ValueError, naming what works, for another source.
    """
    forced = forced_source() if source == "auto" else source
    if run.zero_stage >= 2 and forced in ("auto", "simulated"):
        return _simulated(run, steps, BALANCED if run.model.experts else "")
    if run.zero_stage < 2 and forced == "cpu":
        return _cpu(run, steps, "")
    if forced == "recorded":
        return _recorded(run, steps, "", device)
    raise ValueError(
        f"{run.world_size} ranks with zero_stage={run.zero_stage} cannot be measured with source={forced!r}: "
        "zero_stage 2 and 3 (FSDP2) work with source='simulated', 0 and 1 (DistributedDataParallel, whose reducer "
        "wants real gradients) with source='cpu' and a small model in fp32 with eager attention"
    )


def _auto(run: TrainingRun, steps: int) -> Measurement:
    """As `choose_source` says; simulated, too, where the GPU then runs out of memory or refuses a kernel."""
    source, reason = choose_source(run)
    if source == "live":
        from .live import KernelRefused

        try:
            return _live(run, steps, _notes(run))
        except (GpuOutOfMemory, KernelRefused) as error:
            reason = f"not live: {error}"
    return _simulated(run, steps, _notes(run, reason))


def _notes(run: TrainingRun, *notes: str) -> str:
    """All that a provenance has to say of how a run was measured."""
    return "; ".join(part for part in (*notes, BALANCED if run.model.experts else "") if part)


def _live(run: TrainingRun, steps: int, note: str) -> Measurement:
    from .live import measure_live

    return measure_live(run, steps, note)


def _simulated(run: TrainingRun, steps: int, note: str) -> Measurement:
    from .simulated import availability
    from .tracing import trace_simulated

    works, how = availability()
    if not works:
        return _recorded(run, steps, "; ".join(part for part in (note, f"not simulated here: {how}") if part))
    if run.world_size > 1:
        from .sharded import measure_sharded

        return measure_sharded(run, steps, note)
    return trace_simulated(run, steps, note)


def _cpu(run: TrainingRun, steps: int, note: str) -> Measurement:
    from .tracing import trace_on_cpu

    if run.precision.name != "fp32" or run.attention != "eager":
        raise ValueError(
            f"on the CPU the course runs precision='fp32' with attention='eager' only; this run has "
            f"{run.precision.name} and {run.attention}, whose CPU kernels keep quite other tensors: simulate it instead"
        )
    needed = run.world_size * estimate(run.replace(world_size=1, zero_stage=0, bucket_view=False)).total
    if needed > CPU_LIMIT:
        raise ValueError(
            f"{run} needs about {format_bytes(needed, 'GB', 1)} of host memory; on the CPU the course runs up to "
            f"{format_bytes(CPU_LIMIT, 'GB', 0)}: choose a smaller model such as 'tiny-gpt', or simulate it"
        )
    if run.world_size > 1:
        from .data_parallel import measure_data_parallel

        return measure_data_parallel(run, steps)
    return trace_on_cpu(run, steps, note)


def _recorded(run: TrainingRun, steps: int, note: str, device: str | None = SIMULATED_GPU) -> Measurement:
    """A shipped result; unless a learner asked for recordings, what the simulation would have given."""
    from .recorded import find

    return find(run, steps, note, device)


@dataclass(frozen=True, repr=False)
class Comparison:
    """An estimate and a measurement of one run, laid side by side."""

    run: TrainingRun
    estimate: MemoryBreakdown
    measurement: Measurement

    @property
    def differences(self) -> dict[str, int]:
        """Estimate minus measurement at the peak, in bytes, by kind."""
        return {kind: self.estimate[kind] - self.measurement.breakdown[kind] for kind in KINDS}

    @property
    def ratio(self) -> float:
        """Estimated peak over measured peak."""
        return self.estimate.total / self.measurement.peak

    @property
    def _steps(self) -> int:
        return max((mark.step for mark in self.measurement.timeline.marks), default=0)

    def rows(self) -> list[tuple[str, int, int, int]]:
        """(kind, estimated, measured, difference) in bytes for each kind that occurs, then the total."""
        found, truth = self.estimate, self.measurement.breakdown
        rows = [
            (kind, found[kind], truth[kind], found[kind] - truth[kind]) for kind in KINDS if found[kind] or truth[kind]
        ]
        return [*rows, ("total", found.total, truth.total, found.total - truth.total)]

    def explanation(self) -> str:
        """What is left between the two, in words."""
        gap = self.estimate.total - self.measurement.peak
        if gap == 0:
            text = "Nothing is left between them: every tensor at the peak is in the formula."
        else:
            kind = max(self.differences, key=lambda name: abs(self.differences[name]))
            text = (
                f"{gap:+,} bytes are left ({100 * (self.ratio - 1):+.3f} %), "
                f"most of it in {kind.replace('_', ' ')} ({self.differences[kind]:+,})."
            )
        if self._steps == 1:
            word = self.measurement.word
            text = f"{text} Only the first step was {word}, at whose beginning there are no optimizer states yet."
        if self.measurement.source == "cpu":
            text = f"{text} {ON_THE_CPU}"
        allocated = self.measurement.counters.get("allocated")
        if allocated is None:
            return text
        workspaces = self.measurement.counters.get("workspaces", 0) - self.measurement.breakdown["workspaces"]
        beyond = self._beyond_the_tensors(allocated - self.measurement.peak - workspaces)
        named = f"{workspaces:+,} bytes are cuBLAS's workspaces, " if workspaces else ""
        return f"{text} The GPU itself counted {self._formatter()(allocated)}: {named}{beyond}."

    def _beyond_the_tensors(self, beyond: int) -> str:
        """What torch counts beside the tensors: whole blocks, where one is too small to be split, and scratch space.

        A replay under torch's default policy tells the two apart, unless a measurement kept part of its allocations, or
        the policy is set to another.
        """
        scratch, rounding = "scratch space inside kernels", "rounding to blocks that were not split"
        policy_is_set = any(os.environ.get(name) for name in ALLOCATOR_VARIABLES)
        if policy_is_set or not can_be_replayed(self.measurement):
            return f"{beyond:+,} bytes are {rounding} and {scratch}"
        peaks = replay(self.measurement).step_peaks()
        rounded = peaks[max(peaks)] - self.measurement.peak
        if beyond < rounded:  # scratch changed which blocks were free, so that the replay's are others
            return f"{beyond:+,} bytes are {rounding} and {scratch}"
        if not rounded:
            return f"{beyond:+,} bytes are {scratch}"
        return f"{rounded:+,} bytes are {rounding}, {beyond - rounded:+,} bytes {scratch}"

    def _formatter(self) -> Callable[[int], str]:
        """One unit for both columns, chosen by the larger total."""
        return formatter(max(self.estimate.total, self.measurement.peak))

    def __repr__(self) -> str:
        shown = self._formatter()
        word = self.measurement.word
        lines = [f"{'':18}{'estimate':>12}{word:>12}{f'estimate − {word}':>22}"]
        lines += [
            f"{kind:18}{shown(found):>12}{shown(truth):>12}{gap:>+20,} B" for kind, found, truth, gap in self.rows()
        ]
        return "\n".join([str(self.run), *lines, self.explanation(), str(self.measurement.provenance)])

    def _repr_html_(self) -> str:
        shown, word = self._formatter(), self.measurement.word
        head = f"<tr><th></th><th>estimate</th><th>{word}</th><th>estimate − {word}</th></tr>"
        body = "".join(
            f"<tr><td style='text-align:left'>{kind.replace('_', ' ')}</td><td>{shown(found)}</td>"
            f"<td>{shown(truth)}</td><td>{gap:+,} B</td></tr>"
            for kind, found, truth, gap in self.rows()
        )
        notes = f"<p>{escape(self.explanation())}<br><small>{escape(str(self.measurement.provenance))}</small></p>"
        caption = f"<caption style='text-align:left;white-space:nowrap'>{escape(str(self.run))}</caption>"
        return f"<table>{caption}{head}{body}</table>{notes}"


def compare(run: TrainingRun, source: str = "auto", steps: int = 2) -> Comparison:
    """Estimate and measure `run`; the result shows the signed difference of each kind. Raises like `measure`."""
    return Comparison(run, estimate(run), measure(run, source, steps))


__all__ = ["Comparison", "card_here", "choose_source", "compare", "measure"]
