"""The Explorer's core: what can be chosen, what a choice looks like, and what to change next.

It needs the standard library alone, as it is executed in a browser, too.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import gcd
from typing import Any, NamedTuple

from .. import PRESETS, MemoryBreakdown, estimate, moments
from ..errors import check_known, unknown
from ..estimating.step_time import step_seconds
from ..figures.canvas import Figure, number
from ..figures.runs import peak_stack, peak_title, place_words, step_columns
from ..gpus import GPUS, Gpu, gpu
from ..planning.fit import FREE, FSDP_POLICY, MAY_CHANGE, arrange, precision_at
from ..planning.twin import SAFETY, fit_words, lacks, named, unsupported
from ..run import ATTENTIONS, OPTIMIZERS, PRECISIONS, TrainingRun
from ..units import format_bytes, percent


@dataclass(frozen=True)
class Control:
    """Something to choose: `options` are (text, value), a whole number or a string; "steps" are in order."""

    name: str
    label: str
    options: tuple[tuple[str, Any], ...]
    kind: str
    group: str

    @cached_property
    def values(self) -> tuple[Any, ...]:
        return tuple(value for _, value in self.options)


GROUPS = ("Model and data", "The card", "How it is trained", "Across GPUs")  # from the one that is used most
MODEL, CARD, TRAINING, RANKS = GROUPS


def _steps(name: str, label: str, group: str, first: int, last: int) -> Control:
    sizes = (2**power for power in range(first, last + 1))
    return Control(name, label, tuple((number(size), size) for size in sizes), "steps", group)


def _choice(name: str, label: str, group: str, *options: str) -> Control:
    return Control(name, label, tuple((option, option) for option in options), "choice", group)


TRAINED: dict[str, tuple[str, int, int | None]] = {
    "all": ("every weight", 0, None),
    **{f"lora-{bits}": (f"LoRA r=16, rest in {bits} bits", 16, bits) for bits in (16, 8, 4)},
}
"""The label, LoRA's rank, and the bits of the frozen weights."""

LOGITS = {"family": "as the model's family", "fp32": "copied to fp32", "compute": "in the compute type"}

STAGES = ("0: nothing", "1: states", "2: + gradients", "3: + weights")
RECOMPUTE = ("none", "selective-attention", "selective", "every-2", "every-4", "sqrt", "full", "offload")

CONTROLS: tuple[Control, ...] = (
    _choice("model", "model", MODEL, *PRESETS),
    _steps("micro_batch", "micro-batch", MODEL, 0, 9),
    _steps("accumulation_steps", "micro-batches per step", MODEL, 0, 10),
    _steps("seq_len", "sequence (tokens)", MODEL, 7, 17),
    Control("gpu", "GPU", tuple((name, name) for name in GPUS), "choice", CARD),
    _choice("precision", "precision", TRAINING, *PRECISIONS),
    _choice("optimizer", "optimizer", TRAINING, *OPTIMIZERS),
    Control("trained", "trained", tuple((TRAINED[name][0], name) for name in TRAINED), "choice", TRAINING),
    _choice("attention", "attention", TRAINING, *ATTENTIONS),
    _choice("recompute", "recompute", TRAINING, *RECOMPUTE),
    _steps("loss_chunks", "chunks of the loss", TRAINING, 0, 5),
    Control("logits", "logits", tuple((words, name) for name, words in LOGITS.items()), "choice", TRAINING),
    Control("clip_grad_norm", "clip gradients", (("no", 0), ("at norm 1", 1)), "choice", TRAINING),
    _steps("world_size", "ranks (GPUs)", RANKS, 0, 10),
    Control("zero_stage", "ZeRO shards", tuple((text, i) for i, text in enumerate(STAGES)), "steps", RANKS),
    Control(
        "bucket_view", "gradients", (("next to the buckets", 0), ("views of the buckets", 1)), "choice", RANKS
    ),
)
CONTROL = {control.name: control for control in CONTROLS}

DEFAULTS: dict[str, Any] = {
    "model": "gpt2-xl",
    "micro_batch": 32,
    "accumulation_steps": 1,
    "seq_len": 1024,
    "gpu": "RTX5090-32GB",
    "precision": "amp-bf16",
    "optimizer": "adamw",
    "trained": "all",
    "attention": "flash",
    "recompute": "none",
    "loss_chunks": 1,
    "logits": "family",
    "clip_grad_norm": 0,
    "world_size": 1,
    "zero_stage": 0,
    "bucket_view": 0,
}
"""The puzzle that the course opens with."""


class Dashboard(NamedTuple):
    """All that is shown of one choice: the run and the card, two pictures, sentences, a line of Python."""

    run: TrainingRun
    card: Gpu
    breakdown: MemoryBreakdown
    stack: Figure
    timeline: Figure
    title: str
    verdict: str
    peak_phase: str
    code: str

    @property
    def fits(self) -> bool:
        return self.breakdown.total <= self.card.room


def dashboard(chosen: Mapping[str, Any]) -> Dashboard:
    """Draw a choice; what it lacks is as in `DEFAULTS`. ValueError for unknown and contradicting ones."""
    run = run_of(chosen)
    card = card_of(chosen)
    of_step = moments(run)
    breakdown = max(of_step.values(), key=lambda moment: moment.total)
    stack = peak_stack(run, breakdown, card, fit_words(breakdown.total, card))
    verdict = verdict_words(run, breakdown.total, card)
    comes = "in" if breakdown.label in ("forward", "clipping") else "at"
    phase = f"The peak comes {comes} {place_words(breakdown)}."
    title = peak_title(run, breakdown)
    code = f"from course_utils import TrainingRun, estimate; estimate(run := {run.code()})"
    timeline = step_columns(of_step, card)
    return Dashboard(run, card, breakdown, stack, timeline, title, verdict, phase, code)


def verdict_words(run: TrainingRun, total: int, card: Gpu) -> str:
    """Say if a run that peaks at `total` bytes fits the card, warn if it is close, and say what it lacks."""
    said = fit_words(total, card)
    said = f"{said[0].upper()}{said[1:]}."
    if total <= card.room < total * SAFETY:
        reserve = f"the {percent(SAFETY - 1)} that workspaces and kernels' scratch may take"
        said += f" That is less than {reserve}: it may fail."
    refused = unsupported(run, card.capability)
    missing = lacks(run, card)
    if missing:
        return said + missing
    if refused:
        return f"{said} But {refused}."
    return said


def complete(chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Every control's value, in order. Raises ValueError for names and values that no control has."""
    for name in chosen:
        check_known("control", name, CONTROL)
    found = {name: chosen.get(name, DEFAULTS[name]) for name in CONTROL}
    for name, value in found.items():
        if value not in CONTROL[name].values:
            raise unknown(CONTROL[name].label, str(value), map(str, CONTROL[name].values))
    return found


def run_of(chosen: Mapping[str, Any]) -> TrainingRun:
    """The run that has been chosen. Raises ValueError like `dashboard`."""
    choices = complete(chosen)
    del choices["gpu"]
    _, rank, bits = TRAINED[choices.pop("trained")]
    choices |= {"lora_rank": rank, "frozen_bits": bits, "bucket_view": bool(choices["bucket_view"])}
    choices["clip_grad_norm"] = float(choices["clip_grad_norm"]) or None
    if choices["logits"] == "family":
        choices["logits"] = None
    return TrainingRun(**choices)


def card_of(chosen: Mapping[str, Any]) -> Gpu:
    return gpu(complete(chosen)["gpu"])


class Suggestion(NamedTuple):
    """A change of one choice, in words, and what it does.

    `chosen` are the choices after it and `peak` the run's bytes then. `lost` is by how many seconds a step
    becomes longer (see `step_time`). `same_training` is True if what is learned stays the same but for
    rounding.
    """

    words: str
    chosen: dict[str, Any]
    peak: int
    fits: bool
    lost: float
    same_training: bool = True

    @property
    def effect(self) -> str:
        """The peak and the time after the change: "26.8 GB, fits, 0.21 s per step slower"."""
        fits = "fits" if self.fits else "does not fit"
        time = "as fast"
        if abs(self.lost) >= 1e-4:
            way = "slower" if self.lost > 0 else "faster"
            time = f"{seconds_words(abs(self.lost))} per step {way}"
        learns = "" if self.same_training else ", another training"
        return f"{format_bytes(self.peak, 'GB', 1)}, {fits}, {time}{learns}"


MOST = 10  # so many changes are offered at most
LOWERS = 0.99  # of the peak: so much a change that does not make a run fit may leave to be offered
WORTH_WHILE = 0.001  # of the step: so much a change that makes a run faster has to save


def next_changes(chosen: Mapping[str, Any]) -> tuple[Suggestion, ...]:
    """Single changes worth trying, best first.

    First comes what makes the run fit (with `twin.SAFETY` in reserve, as for `fit`): the same training before
    another, by the time that it loses. Then comes what lowers the peak most. Of a run that fits already: what
    makes it faster; of one that asks for what the card lacks: what it can run. Raises ValueError like
    `dashboard`.
    """
    now = _Choice(complete(chosen))
    options = list(now.changes())
    if now.refused:
        options.sort(key=lambda change: (not change.fits, change.lost))
        return tuple(options[:MOST])
    fitting = [change for change in options if change.fits]
    if now.fits:
        least = -now.seconds * WORTH_WHILE
        options = [change for change in fitting if change.same_training and change.lost < least]
        fitting = options
    fitting.sort(key=lambda change: (not change.same_training, change.lost))
    lowering = [change for change in options if not change.fits and change.peak <= LOWERS * now.peak]
    lowering.sort(key=lambda change: change.peak)
    return tuple((fitting + lowering)[:MOST])


def best_plan(chosen: Mapping[str, Any]) -> Suggestion | None:
    """The arrangement of the same training that fits and loses least time, several choices changed at once.

    None if none fits, or if it is best as it is. May take a second. Raises ValueError like `dashboard`.
    """
    now = _Choice(complete(chosen))
    best = arrange(run_of(chosen), now.card).best
    if best is None:
        return None
    run = best.run
    names = ("micro_batch", "accumulation_steps", "recompute", "attention", "loss_chunks", "zero_stage")
    after = {name: getattr(run, name) for name in names} | {"precision": run.precision.name}
    after |= {"optimizer": run.optimizer.name, "bucket_view": int(run.bucket_view)}
    return now.weigh(after)


def seconds_words(seconds: float) -> str:
    if seconds >= 10:
        return f"{seconds:,.0f} s"
    if seconds >= 0.1:
        return f"{seconds:.2g} s"
    return f"{1000 * seconds:.2g} ms"


class _Choice:
    """One choice, what it needs and how long a step takes: other choices are compared with it."""

    def __init__(self, chosen: dict[str, Any]) -> None:
        self.chosen = chosen
        self.card = card_of(chosen)
        run = run_of(chosen)
        self.peak = estimate(run).total
        self.refused = unsupported(run, self.card.capability)
        self.fits = self.peak * SAFETY <= self.card.room
        self.seconds = sum(step_seconds(run, self.card).values())

    def weigh(self, asked: Mapping[str, Any]) -> Suggestion | None:
        """This choice with other values; None if they change nothing, are refused, or the card lacks them."""
        different = {name: value for name, value in asked.items() if self.chosen[name] != value}
        after = self.chosen | different
        card = GPUS[after["gpu"]]
        try:
            run = run_of(after)
            if not different or unsupported(run, card.capability):
                return None
            peak = estimate(run).total
        except ValueError:
            return None
        fits = peak * SAFETY <= card.room
        lost = sum(step_seconds(run, card).values()) - self.seconds
        # the recipe as it is, or as another of ZeRO's stages writes the same one
        formats = (self.chosen["precision"], _formats(self.chosen, after["zero_stage"])["precision"])
        same = _learned(self.chosen) == _learned(after) and after["precision"] in formats
        return Suggestion(_spelled(different, after), after, peak, fits, lost, same)

    def changes(self) -> Iterator[Suggestion]:
        """Every possible change of one choice; of sizes and cards the one that goes just far enough."""
        alternatives = [[different] for different in _single(self.chosen, self.card)]
        for row in [*alternatives, *_rows(self.chosen, self.card, self.fits)]:
            found = None
            for different in row:
                change = self.weigh(different)
                fits = change is not None and change.fits
                if self.fits and not fits:
                    break  # of what makes a run faster, the last that still fits
                found = change or found
                if not self.fits and fits:
                    break  # of what makes it smaller, the first that fits
            if found is not None:
                yield found


def _single(chosen: Mapping[str, Any], card: Gpu) -> Iterator[dict[str, Any]]:
    """Choices that `planning.fit` knows too, each changed alone."""
    if not card.has_bf16 and unsupported(run_of(chosen), card.capability):
        yield {"precision": "amp-fp16", "attention": "efficient"}
    for name in ("recompute", "attention", "loss_chunks"):
        yield from ({name: value} for value in FREE[name])
    algorithm = OPTIMIZERS[chosen["optimizer"]].algorithm
    if algorithm in ("adam", "adamw"):
        yield from ({"optimizer": f"{algorithm}-{how}"} for how in FREE["implementation"])
    if chosen["world_size"] > 1:
        yield from ({"bucket_view": int(value)} for value in FREE["bucket_view"])
        for stage in FREE["zero_stage"]:
            yield {"zero_stage": stage, "bucket_view": 0} | _formats(chosen, stage)
    as_it_is = _formats(chosen, chosen["zero_stage"])
    for name in ("precision", "pure-bf16", "optimizer"):
        yield from (dict(change) for change in MAY_CHANGE[name] if change != as_it_is)
    yield from ({"trained": name} for name in TRAINED)


def _formats(chosen: Mapping[str, Any], stage: int) -> dict[str, Any]:
    """The recipe that learns the same at another of ZeRO's stages, as `planning.FSDP_POLICY` has it."""
    return {"precision": precision_at(stage, chosen["precision"], chosen["zero_stage"])}


def _rows(chosen: Mapping[str, Any], card: Gpu, fits: bool) -> Iterator[list[dict[str, Any]]]:
    """Sizes in order, from the nearest, each row a series of changes.

    Micro-batches of one global batch grow for a run that fits, else they shrink. For what does not fit there
    are ranks and cards, too.
    """
    size = chosen["micro_batch"]
    batch = size * chosen["accumulation_steps"]
    sizes = CONTROL["micro_batch"].values
    if fits:
        others = [other for other in sizes if other > size]
    else:
        others = [other for other in reversed(sizes) if other < size]
    steps = CONTROL["accumulation_steps"].values
    pairs = [(other, batch // other) for other in others if batch % other == 0 and batch // other in steps]
    row = [{"micro_batch": other, "accumulation_steps": count} for other, count in pairs]
    yield row
    if fits:
        return
    ranks = [count for count in CONTROL["world_size"].values if count > chosen["world_size"]]
    if not chosen["zero_stage"]:  # ranks that shard nothing save memory only by dividing the batch
        ranks = [count for count in ranks if batch * chosen["world_size"] % count == 0]
    yield [_on_ranks(chosen, count) for count in ranks]
    larger = [other for other in GPUS.values() if other.room > card.room]
    larger.sort(key=lambda other: other.room)
    yield [{"gpu": other.name} for other in larger]


def _on_ranks(chosen: Mapping[str, Any], ranks: int) -> dict[str, Any]:
    times = ranks // chosen["world_size"]
    steps = chosen["accumulation_steps"]
    size = chosen["micro_batch"]
    fewer = gcd(times, steps)
    smaller = gcd(times // fewer, size)
    return {"world_size": ranks, "accumulation_steps": steps // fewer, "micro_batch": size // smaller}


def _learned(chosen: Mapping[str, Any]) -> list[Any]:
    """All that decides what is learned, but for rounding and the order of sums; see `planning.FREE`."""
    batch = chosen["micro_batch"] * chosen["accumulation_steps"] * chosen["world_size"]
    kept = [chosen[name] for name in ("model", "seq_len", "trained", "clip_grad_norm")]
    return [batch, OPTIMIZERS[chosen["optimizer"]].algorithm, *kept]


def _spelled(different: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    recompute = {"none": "no recomputation", "offload": "activations offloaded to the host"}
    count = after["accumulation_steps"]
    several = f"{number(count)} micro-batches" if count > 1 else "one micro-batch"
    chunks = after["loss_chunks"]
    pieces = f"{chunks} chunks" if chunks > 1 else "one piece"
    stage = after["zero_stage"]
    precision = f"precision {after['precision']}"
    if stage > 1 and after["precision"] in FSDP_POLICY.values():
        precision = f"FSDP2's mixed precision ({after['precision']})"
    words = {
        "zero_stage": f"ZeRO-{stage}" if stage else "nothing sharded",
        "precision": precision,
        "gpu": f"{named(GPUS[after['gpu']])} instead",
        "world_size": f"{number(after['world_size'])} ranks",
        "micro_batch": f"{several} of {number(after['micro_batch'])}",
        "bucket_view": f"gradients {CONTROL['bucket_view'].options[after['bucket_view']][0]}",
        "recompute": recompute.get(after["recompute"], f"{after['recompute']} recomputation"),
        "attention": f"{after['attention']} attention",
        "loss_chunks": f"the loss in {pieces}",
        "optimizer": f"optimizer {after['optimizer']}",
        "trained": TRAINED[after["trained"]][0],
    }
    return ", ".join(text for name, text in words.items() if name in different)
