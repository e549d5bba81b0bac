"""`measure`, from choosing where a step runs (a GPU, a simulated GPU, the CPU) to its Measurement.

For each source one function builds the run's `Training` and a `Tracker`, and has `step.follow` run its steps
(on a real GPU `live.traced`, on several processes `data_parallel`). A step of one's own goes to `own_step`.
"""

import os
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

from ..errors import GpuOutOfMemory, check_known
from ..estimating import estimate
from ..estimating.sharding import lacking_in_fsdp
from ..estimating.workspaces import workspaces_on
from ..gpus import Gpu, gpu
from ..measurement import Measurement
from ..pace import working
from ..planning.twin import fits, named, needed, unsupported, untrainable
from ..run import TrainingRun
from ..units import GB, format_bytes
from . import data_parallel, live, sharded, simulated
from .compiling import compiling
from .cuda_answers import CARD, Memory, answered
from .devices import Cuda
from .files import SIMULATED_GPU
from .own_step import measure_own, noted
from .recorded import find
from .replicated import HostSide, RankTracker
from .step import Training, follow, own_random_numbers, provenance_of
from .tracker import Tracker

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
    or "auto", flash wherever it can run; `card`, a name of `gpus.GPUS`, is the one that a simulated GPU
    imitates: what torch.cuda says of it, which kernel "auto" is, and what cuBLAS keeps for itself. Without an
    optimizer the step may be a forward alone, and gradients may come from `torch.autograd.grad`. Raises
    StepError for a step that cannot be measured; others pass as they are.
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
    if run is None and step is not None and model is not None:
        chosen = source
        if source == "auto":  # COURSE_SOURCE has no recording of one's own step
            chosen = "simulated" if forced_source() == "recorded" else forced_source()
        imitated = None if card is None else gpu(card)
        if imitated and attention == "flash" and not imitated.has_bf16:
            raise ValueError(f"torch has no flash kernel for {named(imitated)}: choose attention='efficient'")
        how: dict[str, Any] = {"source": chosen, "steps": steps, "attention": attention, "card": imitated}
        how["workspaces"] = workspaces_on(imitated.name) if imitated else None
        with working("getting ready"):
            return measure_own(step, model, optimizer, batch, **how)
    own = {"step": step, "model": model, "optimizer": optimizer, "batch": batch}
    own["attention"] = None if attention == "auto" else attention
    own["card"] = card
    given = [name for name, value in own.items() if value is not None]
    run = _measurable(run, given)
    chosen = forced_source() if source == "auto" else source
    if run.world_size > 1:
        chosen = _source_of_ranks(run, chosen)
    note = BALANCED if run.model.experts else ""
    # Asked for by name, the recording of any GPU will do. COURSE_SOURCE=recorded stands for a simulated GPU,
    # so that lessons show the same.
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
            "tensor parallelism is not measured: estimate(run) counts it,"
            " course_utils.rank_states(run) says what one rank keeps; or set tensor_parallel=1"
        )
    return run


def choose_source(run: TrainingRun) -> tuple[str, str]:
    """The source that "auto" takes for `run` on this machine, and why."""
    forced = forced_source()
    if forced != "auto":
        return forced, ""
    card, reason = live.usable_gpu()
    if card is None:
        return "simulated", reason
    reason = unsupported(run, card.capability)
    if not reason and not fits(run, card.memory):
        asked = format_bytes(needed(run), "GB", 1)
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
    card, _ = live.usable_gpu()
    return card or gpu("T4-16GB")


def _source_of_ranks(run: TrainingRun, source: str) -> str:
    if source in ("auto", "simulated"):
        return "simulated"
    if source == "recorded" or (run.zero_stage < 2 and source == "cpu"):
        return source
    raise ValueError(
        f"{run.world_size} ranks with zero_stage={run.zero_stage} cannot be measured with source={source!r}:"
        " choose source='simulated', or for zero_stage 0 and 1 source='cpu'"
        " and a small model in fp32 with eager attention"
    )


def _auto(run: TrainingRun, steps: int, note: str) -> Measurement:
    source, reason = choose_source(run)
    if source == "live":
        try:
            return _live(run, steps, note)
        except (GpuOutOfMemory, live.KernelRefused) as error:
            reason = f"not live: {error}"
    return _simulated(run, steps, "; ".join(filter(None, (reason, note))))


def _live(run: TrainingRun, steps: int, note: str) -> Measurement:
    """The run on the current CUDA GPU. ValueError if it lacks what the run needs, GpuOutOfMemory if small."""
    live.demand_gpu()
    reason = unsupported(run, Cuda().capability())
    if reason:
        raise ValueError(reason)
    # the GPU's own counters are read without the tracker, and the kinds of memory with it
    with own_random_numbers(), live.memory_released(run, live.free_bytes):
        with live.only_kernel(run):
            counters = live.counters(lambda: live.ready(run, Cuda())[0].step, steps)
        measured = live.traced(run, steps, Cuda.kind, provenance_of("live", note))
    return replace(measured, counters=counters)


def _simulated(run: TrainingRun, steps: int, note: str) -> Measurement:
    works, how = simulated.availability()
    if not works:
        notes = "; ".join(filter(None, (note, f"not simulated here: {how}")))
        return find(run, steps, notes, SIMULATED_GPU)
    if run.world_size == 1:
        return simulated_run(run, steps, note)
    return (simulated_replica if run.zero_stage < 2 else simulated_rank)(run, steps, note)


@lru_cache(maxsize=16)
def simulated_run(run: TrainingRun, steps: int, note: str) -> Measurement:
    """The run on a simulated GPU; one that this process has done already is given again."""
    shown, fewer = _shortened(run)
    provenance = provenance_of("simulated", note, fewer)
    with simulated.simulated_gpu(run.attention), simulated.cycles_left_alone():
        training = Training(shown, "cuda", simulated=True)
        tracker = Tracker("cuda", workspaces_on(run.card))
        if run.compile == "none":
            return follow(training, tracker, steps, provenance)
        notes = dict[str, None]()
        card = gpu(run.card) if run.card else CARD
        with answered(Memory(lambda: tracker.events, card)):
            measured = follow(training, tracker, steps, provenance, compiling(card, notes))
        return noted(measured, *notes)


@lru_cache(maxsize=16)
def simulated_rank(run: TrainingRun, steps: int, note: str) -> Measurement:
    """`steps` steps of `run` as FSDP2 on rank 0 of `run.world_size` simulated ranks; the last one's peak.

    zero_stage 3 frees parameters after a block's forward and gathers them again for its backward; zero_stage
    2 keeps them in between. Gathered parameters and the buffers of collectives are "communication". With
    bf16-master the shards are fp32 and serve as master weights: bf16 is gathered, gradients are summed in
    fp32. Raises ValueError for a run that FSDP2 is not covered for, SimulationUnavailable where torch cannot
    simulate it.
    """
    if reason := lacking_in_fsdp(run):
        raise ValueError(reason)
    shown, fewer = _shortened(run)
    notes = [note, f"rank 0 of {run.world_size} simulated ranks", fewer]
    if run.precision.master:
        notes.append("the fp32 shards are the master weights, and gradients are also fp32 shards")
    provenance = provenance_of("simulated", *notes)
    # the ranks come first: a device mesh reads the values of its tensor of ranks, which a fake one has not
    with (
        sharded.simulated_ranks(run.world_size) as mesh,
        simulated.simulated_gpu(run.attention),
        simulated.cycles_left_alone(),
        sharded.quick_plans(),
    ):
        training = sharded.ShardedTraining(shown, mesh)
        tracker = sharded.ShardTracker("cuda", workspaces_on(run.card))
        return follow(training, tracker, steps, provenance)


@lru_cache(maxsize=16)
def simulated_replica(run: TrainingRun, steps: int, note: str) -> Measurement:
    """`steps` steps of `run` with DistributedDataParallel on rank 0 of `run.world_size` simulated ranks.

    torch rebuilds its buckets after the first step. Raises as `simulated_rank`.
    """
    data_parallel.check_data_parallel(run)
    if reason := untrainable(run):
        raise ValueError(reason)
    shown, fewer = _shortened(run)
    provenance = provenance_of("simulated", note, f"rank 0 of {run.world_size} simulated ranks", fewer)
    tracker = RankTracker("cuda", workspaces_on(run.card))
    with (
        sharded.simulated_ranks(run.world_size),
        simulated.simulated_gpu(run.attention),
        simulated.cycles_left_alone(),
        answered(Memory(lambda: tracker.events)),
        HostSide(tracker),
    ):
        training = partial(data_parallel.ReplicatedTraining, shown, "cuda", simulated=True)
        return follow(training, tracker, steps, provenance)


def _shortened(run: TrainingRun) -> tuple[TrainingRun, str]:
    """The run with at most two micro-batches, as later ones repeat the second, and a note that says so."""
    if run.accumulation_steps <= 2:
        return run, ""
    note = f"2 of {run.accumulation_steps} micro-batches run, the others repeat the second"
    return run.replace(accumulation_steps=2), note


def _cpu(run: TrainingRun, steps: int, note: str) -> Measurement:
    """The run on the CPU, with real numbers and real losses; several ranks as processes of gloo."""
    if run.compile != "none":
        raise ValueError(
            f"compile={run.compile!r}: on the CPU the course compiles nothing; choose source='simulated'"
        )
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
        return data_parallel.measure_data_parallel(run, steps)
    with own_random_numbers():
        training = Training(run, "cpu", simulated=False)
        return follow(training, Tracker("cpu"), steps, provenance_of("cpu", note))
