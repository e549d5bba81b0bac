"""Choosing where a training step is measured: on a GPU, a simulated GPU, the CPU, or from a recording."""

import os
from collections.abc import Callable
from functools import partial
from typing import Any

from ..errors import GpuOutOfMemory, check_known
from ..estimating import estimate
from ..estimating.workspaces import workspaces_on
from ..gpus import Gpu, gpu
from ..measurement import Measurement
from ..pace import working
from ..planning.twin import fits, unsupported
from ..run import TrainingRun
from ..units import GB, format_bytes
from .recorded import find
from .recording_file import SIMULATED_GPU

SOURCES = ("auto", "live", "simulated", "cpu", "recorded")

OWN_ATTENTIONS = ("auto", "flash", "efficient")
MOST_STEPS = 1000
BALANCED = (
    "balanced experts: each computes b·s·k/E pairs of a token and a choice, a real router's load differs"
)
# Larger runs are not traced on the CPU: they would take minutes, and memory that a laptop needs
CPU_LIMIT = 4 * GB


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
    card: str | None = None,
    device: str | None = None,
) -> Measurement:
    """Run `steps` training steps of `run` and return where each byte went; the peak is that of the last step.

    `source` is "live" (a CUDA GPU), "simulated" (a GPU that is not there), "cpu" (small models), "recorded"
    (shipped results; `device`, part of a GPU's name, picks one of several), or "auto": live where a GPU is
    there and the run is predicted to fit it, else simulated, and the provenance says why. If the GPU then
    runs out of memory or refuses a kernel, "auto" simulates, too. The environment variable COURSE_SOURCE
    settles "auto". Raises ValueError for what a source cannot do and, live, GpuOutOfMemory for a run that is
    too large: memory is then released.

    A model and a step of your own: `measure(step=step, model=model, optimizer=optimizer, batch=(x, y))` calls
    `step(model, optimizer, batch)` with copies on the device, so yours are left as they are. An optimizer, or
    a list of them, and a batch of any form may be left out, and are then not passed; a scheduler or a loss
    scaler goes into the batch, as using it changes it. Phases are noticed; the step may return its loss.
    `attention` says which kernel `scaled_dot_product_attention` is on a simulated GPU: "flash", "efficient"
    or "auto", flash wherever it can run; `card`, a name of `gpus.GPUS`, adds what cuBLAS keeps for itself
    there. Without an optimizer the step may be a forward alone, and gradients may come from
    `torch.autograd.grad`. Raises StepError for a step that cannot be measured; others pass as they are.
    """
    check_known("attention", attention, OWN_ATTENTIONS)
    check_known("source", source, SOURCES)
    if not isinstance(steps, int) or isinstance(steps, bool) or not 1 <= steps <= MOST_STEPS:
        usual = "2 is usual, as the first has no states yet"
        raise ValueError(f"steps is {steps!r}: a whole number from 1 to {MOST_STEPS}; {usual}")
    if device is not None and source != "recorded":
        raise ValueError(
            f"device={device!r} picks a recording: it goes with source='recorded', not {source!r}"
        )
    chosen = forced_source() if source == "auto" else source
    if run is None and step is not None and model is not None:
        if source == "auto" and chosen == "recorded":
            chosen = "simulated"  # COURSE_SOURCE has no recording of one's own step
        workspaces = workspaces_on(None if card is None else gpu(card).name)
        # an interrupt in the middle of an import would leave modules half made
        with working("getting ready"):
            from .own_step import measure_own

            return measure_own(
                step,
                model,
                optimizer,
                batch,
                source=chosen,
                steps=steps,
                attention=attention,
                workspaces=workspaces,
            )
    own = {"step": step, "model": model, "optimizer": optimizer, "batch": batch}
    own["attention"] = None if attention == "auto" else attention
    own["card"] = card
    given = [name for name, value in own.items() if value is not None]
    run = _measurable(run, given)
    if run.world_size > 1:
        chosen = _source_of_ranks(run, chosen)
    note = BALANCED if run.model.experts else ""
    if source == "recorded":
        return find(run, steps, "", device)
    recorded = partial(find, device=SIMULATED_GPU)
    measured_by = {"auto": _auto, "live": _live, "simulated": _simulated, "cpu": _cpu, "recorded": recorded}
    with working("getting ready"):
        return measured_by[chosen](run, steps, note)


def _measurable(run: Any, given: list[str]) -> TrainingRun:
    """`run` itself. TypeError if it is no run or something is `given` with it, ValueError if unmeasurable."""
    if not isinstance(run, TrainingRun):
        raise TypeError(
            "measure takes a TrainingRun, measure(run), or a step of your own with the model that it trains,"
            " measure(step=step, model=model, optimizer=optimizer, batch=batch)"
        )
    if given:
        raise TypeError(
            f"a TrainingRun says everything that measure needs: leave out {', '.join(given)}, or the run"
        )
    if run.precision.name == "fp8":
        raise ValueError(
            "fp8 is not measured: torch by itself trains nothing in fp8, libraries such as MS-AMP do;"
            " estimate(run) accounts for its states;"
            " choose precision='bf16-master' to measure the nearest recipe"
        )
    if run.tensor_parallel > 1:
        raise ValueError(
            "tensor parallelism has closed forms only:"
            " course_utils.rank_states(run) says what one rank keeps; or set tensor_parallel=1"
        )
    return run


def choose_source(run: TrainingRun) -> tuple[str, str]:
    """The source that "auto" takes for `run` on this machine, and why."""
    forced = forced_source()
    if forced != "auto":
        return forced, ""
    from .live import usable_gpu

    card, reason = usable_gpu()
    if card is None:
        return "simulated", reason
    reason = unsupported(run, card.capability)
    if not reason and not fits(run, card.memory):
        asked = format_bytes(estimate(run).total, "GB", 1)
        there = format_bytes(card.memory, "GB", 1)
        reason = f"needs {asked}, {card.name} has {there} free"
    if reason:
        return "simulated", reason
    return "live", ""


def forced_source() -> str:
    """The source that the environment variable COURSE_SOURCE names; "auto" if it is not set, or empty."""
    forced = os.environ.get("COURSE_SOURCE") or "auto"
    check_known("COURSE_SOURCE", forced, SOURCES)
    return forced


def card_here() -> Gpu:
    """The GPU on which "auto" would measure live; where there is none, a T4 of 16 GB takes its place."""
    if forced_source() not in ("auto", "live"):
        return gpu("T4-16GB")
    from .live import usable_gpu

    card, _ = usable_gpu()
    return card or gpu("T4-16GB")


def _source_of_ranks(run: TrainingRun, source: str) -> str:
    if source == "recorded" or (run.zero_stage < 2 and source == "cpu"):
        return source
    if run.zero_stage >= 2 and source in ("auto", "simulated"):
        return "simulated"
    raise ValueError(
        f"{run.world_size} ranks with zero_stage={run.zero_stage} cannot be measured with source={source!r}:"
        " zero_stage 2 and 3 (FSDP2) work with source='simulated',"
        " 0 and 1 (DistributedDataParallel, whose reducer wants real gradients) with source='cpu'"
        " and a small model in fp32 with eager attention"
    )


def _auto(run: TrainingRun, steps: int, note: str) -> Measurement:
    source, reason = choose_source(run)
    if source == "live":
        from .live import KernelRefused

        try:
            return _live(run, steps, note)
        except (GpuOutOfMemory, KernelRefused) as error:
            reason = f"not live: {error}"
    return _simulated(run, steps, "; ".join(filter(None, (reason, note))))


def _live(run: TrainingRun, steps: int, note: str) -> Measurement:
    from .live import measure_live

    return measure_live(run, steps, note)


def _simulated(run: TrainingRun, steps: int, note: str) -> Measurement:
    from .simulated import availability

    works, how = availability()
    if not works:
        notes = "; ".join(filter(None, (note, f"not simulated here: {how}")))
        return find(run, steps, notes, SIMULATED_GPU)
    if run.world_size > 1:
        from .sharded import measure_sharded

        return measure_sharded(run, steps, note)
    from .tracing import trace_simulated

    return trace_simulated(run, steps, note)


def _cpu(run: TrainingRun, steps: int, note: str) -> Measurement:
    if run.precision.name != "fp32" or run.attention != "eager":
        raise ValueError(
            "on the CPU the course runs precision='fp32' with attention='eager' only;"
            f" this run has {run.precision.name} and {run.attention},"
            " whose CPU kernels keep quite other tensors: simulate it instead"
        )
    needed = run.world_size * estimate(run.replace(world_size=1, zero_stage=0, bucket_view=False)).total
    if needed > CPU_LIMIT:
        raise ValueError(
            f"{run} needs about {format_bytes(needed, 'GB', 1)} of host memory;"
            f" on the CPU the course runs up to {format_bytes(CPU_LIMIT, 'GB', 0)}:"
            " choose a smaller model such as 'tiny-gpt', or simulate it"
        )
    if run.world_size > 1:
        from .data_parallel import measure_data_parallel

        return measure_data_parallel(run, steps)
    from .tracing import trace_on_cpu

    return trace_on_cpu(run, steps, note)
