"""The peak is the largest of a few moments of the step. Each is stated here; the largest wins and says which it was."""

from functools import lru_cache

from course_utils.breakdown import MemoryBreakdown
from course_utils.models import TransformerConfig
from course_utils.run import Optimizer, Precision, TrainingRun
from course_utils.units import round_up

from ..sharding import ddp_communication, rank_0_states, zero_1_share
from ..states import Trainable, gradient_bytes, optimizer_state_bytes, parameter_bytes
from ..workspaces import workspace_bytes
from .program import Reading
from .update import clipping, lets_gradients_go, optimizer_step, step_on
from .walk import Totals, plus

NOT_REDUCED = ("bf16-master-fp32grad", "fp8")
"""Recipes for which torch has no data parallelism with whole gradients; libraries that have it lay out their own."""


def estimate(run: TrainingRun) -> MemoryBreakdown:
    """Bytes by kind at the peak of a step (the second or a later one), from formulas alone; of several ranks on rank 0.

    `phase` names the phase that owns the peak, `label` the moment within it. Raises ValueError for tensor parallelism,
    which has closed forms of its own (`megatron.rank_states`), and for what is not covered on several ranks: LoRA; with
    FSDP2 (zero_stage 2, 3) fp8, optimizers that look at whole tensors, checkpoints of several blocks, models of one
    block. Raises TypeError for what is no TrainingRun.
    """
    check(run)
    if run.zero_stage >= 2:
        return max(moments(run).values(), key=lambda moment: moment.total)
    reading = Reading(run)
    between = _before_forward(run)
    top, visit = reading.highest()
    after = _after_backward(run)
    best = max(after, key=lambda name: sum(after[name][1].values()))
    if sum(between.values()) + top >= sum(after[best][1].values()):
        parts = plus(between, reading.at_top_of(visit).parts)
        return MemoryBreakdown(parts, *reading.name(visit))
    return MemoryBreakdown(after[best][1], after[best][0], best)


def moments(run: TrainingRun) -> dict[str, MemoryBreakdown]:
    """The moments of a step at which memory may peak, in their order, by name. Raises like `estimate`."""
    check(run)
    if run.zero_stage >= 2:
        from .sharded_peak import fsdp_moments  # which needs this module's names of places

        return fsdp_moments(run)
    reading = Reading(run)
    between = _before_forward(run)
    found: dict[str, tuple[str, Totals]] = {}
    for visit in reading.visits():
        phase, name = reading.name(visit)
        parts = plus(between, reading.at_top_of(visit).parts)
        if name not in found or sum(parts.values()) > sum(found[name][1].values()):
            found[name] = phase, parts
        if name == "loss" and "end of forward" not in found:
            found["end of forward"] = "forward", plus(between, reading.before(visit).parts)
        if name == "loss's backward" and "after loss" not in found:
            found["after loss"] = "loss", plus(between, reading.before(visit).parts)
    order = ["forward", "end of forward", "loss", "after loss"]
    ordered = {name: found[name] for name in [*order, *(name for name in found if name not in order)]}
    return {
        name: MemoryBreakdown(parts, phase, name) for name, (phase, parts) in (ordered | _after_backward(run)).items()
    }


def check(run: TrainingRun) -> None:
    """Refuse what is no run, and what is not estimated."""
    if not isinstance(run, TrainingRun):
        raise TypeError(f"an estimate is of a TrainingRun, not of {run!r}: write estimate(TrainingRun(...))")
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


def _standing(run: TrainingRun, gradients: bool) -> Totals:
    """What is there between the passes."""
    standing = {
        "parameters": parameter_bytes(run),
        "optimizer_states": optimizer_state_bytes(run),
        "inputs": 2 * round_up(8 * run.seq_len * run.micro_batch),  # token ids and targets, int64
        "gradients": gradient_bytes(run) if gradients else 0,
        "workspaces": workspace_bytes(run),
    }
    return standing if run.world_size == 1 else _replicated(run, standing)


def _before_forward(run: TrainingRun) -> Totals:
    """What is there when the micro-batch that needs most begins, the gradients of those before it included.

    Of three or more micro-batches with gradients as views of buckets it is not the last, in which the gradients that
    no_sync left beside the buckets go one by one.
    """
    standing = _standing(run, gradients=run.accumulates)
    if run.bucket_view and run.accumulation_steps > 2 and run.set_to_none:
        standing["gradients"] += gradient_bytes(run)
    return standing


def _replicated(run: TrainingRun, standing: Totals) -> Totals:
    """With DistributedDataParallel's buckets, and with ZeRO-1 only a share of the optimizer's states."""
    states = rank_0_states(run)
    standing["optimizer_states"] = states["optimizer_states"]
    if run.bucket_view:
        return standing | {"gradients": states["gradients"]}  # views of the buckets, which stay
    return standing | {"communication": ddp_communication(run)}


def _after_backward(run: TrainingRun) -> dict[str, tuple[str, Totals]]:
    """Clipping, the optimizer's step, and what is left when the step has ended."""
    full = _standing(run, gradients=True)
    clip = {"clipping": ("clip", plus(full, clipping(run)))} if run.clip_grad_norm is not None else {}
    return {
        **clip,
        "optimizer step": ("optimizer", plus(full, _optimizer_step(run))),
        "end of step": ("zero_grad", _standing(run, gradients=not run.set_to_none)),
    }


def _optimizer_step(run: TrainingRun) -> Totals:
    """What the step adds; with ZeRO-1 rank 0 steps only the parameters of its share."""
    if not run.zero_stage:
        return optimizer_step(run)
    clips = run.clip_grad_norm is not None
    names = (run.precision, run.optimizer)
    return dict(_zero_1_step(run.model, run.world_size, *names, lets_gradients_go(run), clips))


@lru_cache(maxsize=256)
def _zero_1_step(
    model: TransformerConfig, ranks: int, precision: Precision, optimizer: Optimizer, set_to_none: bool, clips: bool
) -> Totals:
    share = Trainable(dict(zero_1_share(model, ranks)), {}, 0, {})
    return step_on(precision, optimizer, share, set_to_none, clips)
