"""The peak is the largest of a few moments of the step. Each is stated here; the largest wins and says which it was."""

from course_utils.breakdown import MemoryBreakdown
from course_utils.run import TrainingRun

from ..states import gradient_bytes
from .program import Reading
from .sharded_peak import after_backward, fsdp_moments, persistent
from .update import clipping, optimizer_step
from .walk import Totals, plus

NOT_REDUCED = ("bf16-master-fp32grad", "fp8")
"""Recipes for which torch has no data parallelism with whole gradients; libraries that have it lay out their own."""


def estimate(run: TrainingRun) -> MemoryBreakdown:
    """Bytes by kind at the peak: see `estimating.estimate`."""
    check(run)
    if run.zero_stage >= 2:
        return max(moments(run).values(), key=lambda moment: moment.total)
    reading, between = Reading(run), _before_forward(run)
    top, visit = reading.highest()
    after = max(_after_backward(run).values(), key=lambda moment: moment.total)
    if sum(between.values()) + top < after.total:
        return after
    return MemoryBreakdown(plus(between, reading.at_top_of(visit)), *reading.name(visit))


def moments(run: TrainingRun) -> dict[str, MemoryBreakdown]:
    """The moments of a step at which memory may peak, in their order, by name."""
    check(run)
    if run.zero_stage >= 2:
        return fsdp_moments(run)
    reading, between, found = Reading(run), _before_forward(run), dict[str, MemoryBreakdown]()
    ends = {"loss": ("forward", "end of forward"), "loss's backward": ("loss", "after loss")}
    for visit in reading.visits():
        phase, name = reading.name(visit)
        if name in ends and name not in found:
            found[ends[name][1]] = MemoryBreakdown(plus(between, reading.before(visit)), *ends[name])
        highest = MemoryBreakdown(plus(between, reading.at_top_of(visit)), phase, name)
        if name not in found or highest.total > found[name].total:
            found[name] = highest
    return found | _after_backward(run)


def check(run: TrainingRun) -> None:
    """Raise ValueError for runs that `estimate` does not cover."""
    if run.world_size > 1 and run.lora_rank:
        raise ValueError("several ranks are estimated for a whole model: set lora_rank=0, or world_size=1")
    if run.world_size > 1 and run.zero_stage < 2 and run.precision.name in NOT_REDUCED:
        raise ValueError(
            f"{run.precision.name} with zero_stage={run.zero_stage} on several ranks is not estimated: torch's "
            "DistributedDataParallel reduces gradients in the format of the weights, and none in fp8; "
            "choose precision='bf16-master'"
        )
    if run.tensor_parallel > 1:
        raise ValueError(
            "tensor parallelism has closed forms of its own, and no estimate of the peak: "
            "course_utils.rank_states(run) says what one rank keeps; or set tensor_parallel=1"
        )


def _before_forward(run: TrainingRun) -> Totals:
    """Bytes by kind when the micro-batch that needs most begins, the gradients of those before it included.

    Of three or more micro-batches with gradients as views of buckets it is not the last, in which the gradients that
    no_sync left besides the buckets are freed one by one.
    """
    before = persistent(run, gradients=run.accumulates)
    if run.bucket_view and run.accumulation_steps > 2 and run.set_to_none:
        before["gradients"] += gradient_bytes(run)
    return before


def _after_backward(run: TrainingRun) -> dict[str, MemoryBreakdown]:
    clip = {"clipping": clipping(run)} if run.clip_grad_norm is not None else {}
    return after_backward(run, clip | {"optimizer step": optimizer_step(run)})
