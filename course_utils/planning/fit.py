"""Make a training run fit a GPU: `fit` finds the choices that lose least time, and says how."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import product
from os import PathLike
from typing import Any

from ..errors import check_known
from ..estimating import estimate
from ..estimating.states import gradient_bytes, optimizer_state_bytes, parameter_bytes
from ..estimating.step_time import alone, lost_seconds
from ..gpus import Gpu, gpu
from ..models import TransformerConfig
from ..run import TrainingRun, check_size
from ..units import format_bytes, percent
from .twin import SAFETY, named, unsupported, untrainable

VERSION = 1  # Of `Plan.to_dict`

FREE = {
    "recompute": ("none", "selective-attention", "selective", "every-2", "sqrt", "full", "offload"),
    "attention": ("flash", "efficient"),
    "implementation": ("fused", "foreach", "loop"),
    "loss_chunks": (1, 8),
    "bucket_view": (False, True),
    "zero_stage": (0, 1, 2, 3),
}
"""Choices that leave the training what it is: the same numbers but for rounding and the order of sums."""

FSDP_POLICY = {"amp-bf16": "bf16-master", "amp-fp16": "fp16-master"}
"""FSDP2's policy in place of autocast, wherever the weights are sharded (ZeRO stages 2 and 3).

Shards, sums of gradients and optimizer states are fp32 with either, so the training stays what it is but for
rounding. The policy rounds more than autocast does: norms and the residual stream are in 16 bits, too. On
whole weights "bf16-master" is another training, as it adds up gradients in 16 bits.
"""

MAY_CHANGE: dict[str, tuple[dict[str, Any], ...]] = {
    "precision": ({"precision": "bf16-master"},),
    "pure-bf16": ({"precision": "bf16"},),
    "optimizer": ({"optimizer": "adam8bit"}, {"optimizer": "adafactor"}, {"optimizer": "momentum"}),
    "lora": tuple({"lora_rank": 16, "frozen_bits": bits} for bits in (16, 8, 4)),
}
"""Choices that change what is learned, or how exactly, tried only if allowed."""


@dataclass(frozen=True)
class Candidate:
    """A configuration: its run, the bytes of its estimated peak, the seconds that a step loses.

    On a path `what` says what changed.
    """

    run: TrainingRun
    peak: int
    lost: float
    what: str = ""

    def fits(self, card: Gpu) -> bool:
        """True if it is predicted to fit the card with the margin of `twin.SAFETY`."""
        return self.peak * SAFETY <= card.room

    def to_dict(self) -> dict[str, Any]:
        """The configuration as plain data: the run as code, bytes and seconds."""
        sizes = {"peak": self.peak, "lost_seconds": self.lost}
        return {"run": self.run.code(), "what": self.what} | sizes


@dataclass(frozen=True)
class Plan:
    """The result of `fit`: `best` is None if nothing fits.

    `tried` are all estimated configurations; `covered` counts those that were decided, some because a smaller
    one of their kind was already too large.
    """

    start: TrainingRun
    card: Gpu
    best: Candidate | None
    tried: tuple[Candidate, ...]
    covered: int

    @property
    def nearest(self) -> Candidate:
        """The configuration that needs least memory, whether it fits or not."""
        return min(self.tried, key=lambda candidate: candidate.peak)

    @cached_property
    def path(self) -> tuple[Candidate, ...]:
        """From the run as it was asked for to the best (or the nearest), one choice at a time.

        The cheapest comes first.
        """
        return tuple(_path(self.start, (self.best or self.nearest).run, self.card))

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain data, sizes in bytes; "best" is None if nothing fits."""
        return {
            "format": "course_utils fit",
            "version": VERSION,
            "card": self.card.name,
            "room": self.card.room,
            "covered": self.covered,
            "best": self.best.to_dict() if self.best else None,
            "nearest": self.nearest.to_dict(),
            "path": [step.to_dict() for step in self.path],
        }

    def __str__(self) -> str:
        room = f"{self.card.name} gives a program {format_bytes(self.card.room)}"
        reserve = f"{percent(SAFETY - 1)} stay in reserve"
        header = f"{room}; {reserve}. {self.covered:,} configurations were compared:"
        rows = [f"{format_bytes(step.peak):>9}  {step.lost:7.2f} s lost  {step.what}" for step in self.path]
        if self.best:
            verdict = f"fits: {self.best.run.code()}"
        else:
            verdict = f"nothing fits; smallest: {self.nearest.run.code()}"
        return "\n".join([header, *rows, verdict])


def fit(
    model: str | PathLike[str] | TransformerConfig,
    card: str | Gpu,
    *,
    global_batch: int,
    seq_len: int = 1024,
    world_size: int = 1,
    may_change: Sequence[str] = (),
    **choices: Any,
) -> Plan:
    """The configuration of this training that fits the card and loses least time, and the path to it.

    The training is `global_batch` sequences of `seq_len` tokens per step, on `world_size` such cards.
    Searched are the micro-batch and the choices of `FREE`, on several ranks with `FSDP_POLICY` in place of
    autocast; with `may_change` also those of `MAY_CHANGE`. `choices` are TrainingRun's, for the run to start
    from (autocast in bf16, or fp16 on cards older than Ampere). A configuration fits if its estimate and a
    reserve of 5 % do (`twin.SAFETY` says what that leaves out). Times are `step_time`'s. Raises ValueError
    like TrainingRun, and for a card whose rates are unknown.
    """
    card = card if isinstance(card, Gpu) else gpu(card)
    check_size("global_batch", global_batch)
    check_size("world_size", world_size)
    if global_batch % world_size:
        raise ValueError(f"a global batch of {global_batch} cannot be shared equally by {world_size} ranks")
    if not card.has_bf16:
        older: dict[str, Any] = {"precision": "amp-fp16", "attention": "efficient"}
        choices = older | choices
    start = TrainingRun(model, global_batch // world_size, seq_len, world_size=world_size, **choices)
    return arrange(start, card, may_change)


def arrange(run: TrainingRun, card: Gpu, may_change: Sequence[str] = ()) -> Plan:
    """`fit` for a run that is there already, arranged to fit `card`.

    The model, the tokens, the global batch and the ranks stay the same.

    Branch and bound: for each set of choices the largest micro-batch that fits is found by bisection, as
    memory grows and the time lost shrinks with it; a set that would lose more than the best even with the
    largest is not looked at. Raises ValueError for a change that is not known, and for a run that nothing
    here trains.
    """
    if reason := untrainable(run):
        raise ValueError(reason)
    for name in may_change:
        check_known("change", name, MAY_CHANGE)
    share = run.global_batch // run.world_size
    sizes = [size for size in range(1, share + 1) if share % size == 0]
    shapes = list(_shapes(run, card, may_change))
    if not shapes:
        raise ValueError(f"{named(card)} can run none of these choices: {unsupported(run, card.capability)}")
    bounds = sorted((lost_seconds(_resized(shape, sizes[-1]), card), i) for i, shape in enumerate(shapes))
    best: Candidate | None = None
    tried: list[Candidate] = []
    for bound, i in bounds:
        if best is None or bound < best.lost:
            found = _largest_that_fits(shapes[i], sizes, card, tried)
            if found and (best is None or found.lost < best.lost):
                best = found
    if best is None:  # those that keep least between the passes, with a micro-batch of one sequence
        least = min(map(_floor, shapes))
        smallest = [_estimated(shape, card) for shape in shapes if _floor(shape) == least]
        tried += filter(None, smallest)
    return Plan(run, card, best, tuple(tried), len(shapes) * len(sizes))


def _shapes(run: TrainingRun, card: Gpu, may_change: Sequence[str]) -> Iterator[TrainingRun]:
    """Every set of choices that the card can run, with a micro-batch of one sequence."""
    run = _resized(run, 1)
    changes = [{}, *(change for name in may_change for change in MAY_CHANGE[name])]
    # The fastest first; the run's own for heads that neither takes.
    kernels = (*FREE["attention"], run.attention)
    free = product(changes, FREE["recompute"], FREE["loss_chunks"], _shardings(run))
    for change, recompute, chunks, sharding in free:
        if change and change.items() <= sharding.items():
            continue  # the policy that FSDP2 takes anyway
        chosen: dict[str, Any] = {"recompute": recompute, "loss_chunks": chunks} | sharding | change
        algorithm = chosen.get("optimizer", run.optimizer.algorithm)
        optimizers = [algorithm]
        if algorithm in ("adam", "adamw"):
            optimizers = [f"{algorithm}-{how}" for how in FREE["implementation"]]
        for optimizer in optimizers:
            shape = _with_first_kernel(run, chosen | {"optimizer": optimizer}, kernels, card)
            if shape:
                yield shape


def _with_first_kernel(
    run: TrainingRun, choices: dict[str, Any], kernels: Sequence[str], card: Gpu
) -> TrainingRun | None:
    """The run with these choices and the first of `kernels` that it can have on the card; None if none."""
    for kernel in kernels:
        shape = _possible(run, choices | {"attention": kernel})
        if shape and not unsupported(shape, card.capability):
            return shape
    return None


def _possible(run: TrainingRun, choices: dict[str, Any]) -> TrainingRun | None:
    """The run with these choices; None if they contradict each other, as TrainingRun says."""
    try:
        return run.replace(**choices)
    except ValueError:
        return None


def _shardings(run: TrainingRun) -> list[dict[str, Any]]:
    if run.world_size == 1:
        return [{}]
    views = [{"zero_stage": 0, "bucket_view": view} for view in FREE["bucket_view"]]
    stages = views + [{"zero_stage": stage, "bucket_view": False} for stage in FREE["zero_stage"] if stage]
    name = run.precision.name
    return [one | {"precision": precision_at(one["zero_stage"], name, run.zero_stage)} for one in stages]


def precision_at(stage: int, name: str, before: int) -> str:
    """The recipe that learns at ZeRO's `stage` what `name` learned at stage `before`.

    It is `FSDP_POLICY`'s or autocast.
    """
    if stage > 1:
        return FSDP_POLICY.get(name, name)
    if before > 1:
        autocast = {policy: name for name, policy in FSDP_POLICY.items()}
        return autocast.get(name, name)
    return name


def _resized(run: TrainingRun, micro_batch: int) -> TrainingRun:
    """The run with the same global batch in micro-batches of this size."""
    return run.replace(micro_batch=micro_batch, global_batch=run.global_batch)


def _largest_that_fits(
    shape: TrainingRun, sizes: list[int], card: Gpu, tried: list[Candidate]
) -> Candidate | None:
    """The largest of `sizes` for which `shape` fits; None if none does.

    What is estimated is added to `tried`.
    """
    if _floor(shape) * SAFETY > card.room:
        return None
    best = None
    low = 0
    high = len(sizes) - 1
    middle = 0  # the smallest first: most sets of choices that do not fit are known by it
    while low <= high:
        candidate = _estimated(_resized(shape, sizes[middle]), card)
        if candidate is None:
            return None
        tried.append(candidate)
        if candidate.fits(card):
            best = candidate
            low = middle + 1
        else:
            high = middle - 1
        middle = (low + high + 1) // 2
    return best


def _estimated(run: TrainingRun, card: Gpu, what: str = "") -> Candidate | None:
    """The run with its estimate; None for a pair of choices that no torch trains (`twin.untrainable`)."""
    if untrainable(run):
        return None
    return Candidate(run, estimate(run).total, lost_seconds(run, card), what)


def _floor(run: TrainingRun) -> int:
    """Bytes that the peak cannot be below: weights, gradients and states are all there when backward ends."""
    whole = alone(run)
    # In the order in which ZeRO's stages shard them: stage 1 the first, 2 the first two, 3 all.
    kept = [optimizer_state_bytes(whole), gradient_bytes(whole), parameter_bytes(whole)]
    for sharded in range(run.zero_stage):
        kept[sharded] //= run.world_size
    return sum(kept)


def _path(start: TrainingRun, target: TrainingRun, card: Gpu) -> Iterator[Candidate]:
    """One group of choices after another.

    First comes what costs no time, then what saves most bytes for a second lost.
    """
    now = Candidate(start, estimate(start).total, lost_seconds(start, card), "as asked for")
    yield now
    left = _differences(start, target)
    while left:
        following = ((what, _possible(now.run, choices)) for what, choices in left.items())
        found = (_estimated(run, card, what) for what, run in following if run)
        now = max(filter(None, found), key=partial(_worth, now))
        left.pop(now.what)
        yield now


def _worth(now: Candidate, then: Candidate) -> tuple[bool, float]:
    """The rank of a change: those that lose no time come first, the others by bytes saved per second lost."""
    saved = now.peak - then.peak
    lost = then.lost - now.lost
    return (lost <= 0 and saved >= 0, saved if lost <= 0 else saved / lost)


def _differences(start: TrainingRun, target: TrainingRun) -> dict[str, dict[str, Any]]:
    """Descriptions of the changes from one run to the other, and the choices that make them."""
    before = "all at once"
    if start.accumulation_steps > 1:
        before = f"{start.accumulation_steps} of {start.micro_batch}"
    micro_batches = f"{target.accumulation_steps} of {target.micro_batch} instead of {before}"
    # The precision that sharding brings with it is part of that change, not one of its own.
    follows = target.precision.name == precision_at(target.zero_stage, start.precision.name, start.zero_stage)
    precision_alone = () if follows else ("precision",)
    precision_with_sharding = ("precision",) if follows else ()
    lora = f"rank {target.lora_rank}, frozen weights in {target.frozen_bits} bits"
    groups = {
        f"micro-batches: {micro_batches}": ("micro_batch", "accumulation_steps"),
        f"precision: {target.precision.name}": precision_alone,
        f"optimizer: {target.optimizer.name}": ("optimizer",),
        f"attention: {target.attention}": ("attention",),
        f"recomputation: {target.recompute}": ("recompute",),
        f"chunks of the loss: {target.loss_chunks}": ("loss_chunks",),
        f"sharding: {_sharding(start, target)}": ("zero_stage", "bucket_view", *precision_with_sharding),
        f"LoRA: {lora}": ("lora_rank", "lora_targets", "frozen_bits"),
    }
    changes = {}
    for what, names in groups.items():
        if any(getattr(start, name) != getattr(target, name) for name in names):
            changes[what] = {name: getattr(target, name) for name in names}
    return changes


def _sharding(start: TrainingRun, target: TrainingRun) -> str:
    """The sharding of the target, as a change from the start."""
    if not target.zero_stage:
        return "gradients as views of the buckets" if target.bucket_view else "none"
    if target.zero_stage > 1 and start.precision != target.precision:
        return f"ZeRO-{target.zero_stage} in FSDP2's mixed precision"
    return f"ZeRO-{target.zero_stage}"
