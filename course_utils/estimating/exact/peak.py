"""The peak is the largest of a few moments of the step.

Each is stated here; the largest wins and says which it was.
"""

from ...breakdown import MemoryBreakdown
from ...run import TrainingRun
from ...units import round_up
from ..sharding import ddp_communication, rank_0_states
from ..states import gradient_bytes
from ..workspaces import workspace_bytes
from .program import Reading
from .sharded_peak import fsdp_moments, fsdp_updates
from .update import clipping, optimizer_step
from .walk import Totals, plus

NOT_REDUCED = ("bf16-master-fp32grad", "fp8")
"""Recipes for which torch has no data parallelism with whole gradients; libraries that have it lay out their
own.
"""


def estimate(run: TrainingRun) -> MemoryBreakdown:
    """Bytes by kind at the peak: see `estimating.estimate`."""
    check(run)
    if run.zero_stage >= 2:
        return max(moments(run).values(), key=lambda moment: moment.total)
    reading = Reading(run)
    full = persistent(run)
    start = _before_forward(run, full)
    top, visit = reading.highest()
    after = max(_after_backward(run, full).values(), key=lambda moment: moment.total)
    if sum(start.values()) + top < after.total:
        return after
    return MemoryBreakdown(plus(start, reading.at_top_of(visit)), *reading.name(visit))


def moments(run: TrainingRun) -> dict[str, MemoryBreakdown]:
    """The moments of a step at which memory may peak, in their order, by name."""
    check(run)
    full = persistent(run)
    start = _before_forward(run, full)
    during = fsdp_moments(run, start) if run.zero_stage >= 2 else _moments(Reading(run), start)
    return during | _after_backward(run, full)


def _moments(reading: Reading, start: Totals) -> dict[str, MemoryBreakdown]:
    """The highest point of each part of forward and backward, with the ends of forward and of the loss."""
    found = dict[str, MemoryBreakdown]()
    ends = {"loss": ("forward", "end of forward"), "backward of the loss": ("loss", "after loss")}
    for visit in reading.visits():
        phase, name = reading.name(visit)
        if name in ends and name not in found:
            found[ends[name][1]] = MemoryBreakdown(plus(start, reading.before(visit)), *ends[name])
        highest = MemoryBreakdown(plus(start, reading.at_top_of(visit)), phase, name)
        if name not in found or highest.total > found[name].total:
            found[name] = highest
    return found


def check(run: TrainingRun) -> None:
    """Raise ValueError for runs that `estimate` does not cover."""
    if run.world_size > 1 and run.lora_rank:
        raise ValueError("several ranks are estimated only without LoRA: set lora_rank=0 or world_size=1")
    if run.world_size > 1 and run.zero_stage < 2 and run.precision.name in NOT_REDUCED:
        raise ValueError(
            f"{run.precision.name} with zero_stage={run.zero_stage} on several ranks is not estimated: "
            "torch's DistributedDataParallel reduces gradients in the format of the weights, "
            "and none in fp8; choose precision='bf16-master'"
        )
    if run.tensor_parallel > 1:
        raise ValueError(
            "tensor parallelism has closed forms of its own, and no estimate of the peak: "
            "course_utils.rank_states(run) says what one rank keeps; or set tensor_parallel=1"
        )


def persistent(run: TrainingRun) -> Totals:
    """Bytes by kind on rank 0 between backward and the optimizer's step, when all gradients are there.

    Gradients that are views of DistributedDataParallel's buckets are in them; else the buckets are there,
    too.
    """
    states = rank_0_states(run)
    states["inputs"] = 2 * round_up(8 * run.seq_len * run.micro_batch)  # token ids and targets, int64
    states["workspaces"] = workspace_bytes(run)
    if run.world_size > 1 and run.zero_stage < 2:
        states["communication"] = ddp_communication(run)
    return states


def _before_forward(run: TrainingRun, full: Totals) -> Totals:
    """Bytes by kind when the micro-batch that needs most begins, the gradients of those before it included.

    Of three or more micro-batches with gradients as views of buckets it is not the last, in which the
    gradients that no_sync left besides the buckets are freed one by one.
    """
    if not run.accumulates:
        return full | {"gradients": 0}
    gradients = full["gradients"]
    if run.bucket_view and run.accumulation_steps > 2 and run.set_to_none:
        gradients += gradient_bytes(run)
    return full | {"gradients": gradients}


def _after_backward(run: TrainingRun, full: Totals) -> dict[str, MemoryBreakdown]:
    """Clipping and the optimizer's step, from what they add at most, and what is left at the step's end."""
    if run.zero_stage >= 2:
        added = fsdp_updates(run)
    elif run.clip_grad_norm is None:
        added = {"optimizer step": optimizer_step(run)}
    else:
        added = {"clipping": clipping(run), "optimizer step": optimizer_step(run)}
    phases = {"clipping": "clip", "optimizer step": "optimizer"}
    found = {name: MemoryBreakdown(plus(full, top), phases[name], name) for name, top in added.items()}
    left = full
    if run.set_to_none and not run.bucket_view:
        left = full | {"gradients": 0}
    return found | {"end of step": MemoryBreakdown(left, "zero_grad", "end of step")}
