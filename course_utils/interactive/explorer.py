"""The Explorer's core: what can be chosen, what a choice looks like, and what to change next.

It needs the standard library alone, as it is executed in a browser, too.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import gcd
from typing import Any, NamedTuple

from .. import PRESETS, MemoryBreakdown, estimate, moments
from ..errors import check_known, unknown
from ..estimating.step_time import step_seconds
from ..gpus import GPUS, Gpu, gpu
from ..palette import amount_with_unit, number, told_name, words
from ..planning.fit import FREE, MAY_CHANGE, arrange, precision_at
from ..planning.twin import SAFETY, fit_words, lacks, unsupported
from ..run import ATTENTIONS, OPTIMIZERS, PRECISIONS, TrainingRun
from ..units import format_bytes, percent
from .html_bars import HtmlPicture, stacked_bars


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

STAGES = ("0 (nothing)", "1 (states)", "2 (+ gradients)", "3 (+ weights)")
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
    stack: HtmlPicture
    timeline: HtmlPicture
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
    comes = "in" if name_of(breakdown) in ("forward", "clipping") else "at"
    phase = f"The peak comes {comes} {place_words(breakdown)}."
    title = peak_title(run, breakdown)
    code = f"from course_utils import TrainingRun, estimate; estimate(run := {run.code()})"
    timeline = step_bars(of_step, card)
    return Dashboard(run, card, breakdown, stack, timeline, title, verdict, phase, code)


NOT_COUNTED = "not counted: what CUDA itself takes (its context, workspaces)"


def peak_stack(run: TrainingRun, breakdown: MemoryBreakdown, card: Gpu, verdict: str) -> HtmlPicture:
    """The run's peak by kind, and a line at what a program gets of the GPU.

    `verdict` continues "It …" in the alt.
    """
    title = peak_title(run, breakdown)
    parts = ", ".join(
        f"{words(kind)} {amount_with_unit(size, 'GB', 2)}" for kind, size in breakdown.items() if size
    )
    return stacked_bars(
        {"": breakdown},
        title,
        limit=card.room,
        limit_name=told_name(card),
        nominal=card.memory,
        note=f"estimated from formulas · {NOT_COUNTED}",
        alt=f"Estimate for {title}. It {verdict}. {run}: {parts}.",
    )


def peak_title(run: TrainingRun, breakdown: MemoryBreakdown) -> str:
    """The model, its batch and its peak: "gpt2-xl, 32 × 1,024 tokens: 134.45 GB at the peak, in backward"."""
    several = f"{run.accumulation_steps} micro-batches of " if run.accumulation_steps > 1 else ""
    peak = f"{format_bytes(breakdown.total, 'GB', 2)} at the peak, in {words(breakdown.phase)}"
    trained = f"LoRA r={run.lora_rank}, " if run.lora_rank else ""
    return f"{run.model.name}, {trained}{several}{run.micro_batch} × {run.seq_len:,} tokens: {peak}"


FAR = 5
"""A card of more than so many times the peak is not drawn: the bars would be too small to be told apart."""


def step_bars(moments: Mapping[str, MemoryBreakdown], card: Gpu) -> HtmlPicture:
    """The moments of a step, as `moments(run)` gives them: bars by kind, and the card's line.

    The end of a step comes first: it is how the next one begins. Raises ValueError without moments.
    """
    if not moments:
        raise ValueError("a step without moments cannot be drawn")
    rows = in_order(moments)
    peak = max(rows, key=lambda moment: moment.total)
    largest = max(peak, key=lambda kind: peak[kind])
    share = percent(peak[largest] / max(1, peak.total))
    title = f"The step is highest at {place_words(peak)}, and {share} of that are {words(largest)}"
    bars = {place_words(moment): moment for moment in rows}
    if card.memory > FAR * peak.total:
        return stacked_bars(bars, title, slim=True)
    return stacked_bars(
        bars, title, limit=card.room, limit_name=told_name(card), nominal=card.memory, slim=True
    )


def in_order(moments: Mapping[str, MemoryBreakdown]) -> list[MemoryBreakdown]:
    """The moments as they are drawn: from the beginning of a step, which is the last one's end."""
    last = [moments["end of step"]] if "end of step" in moments else []
    return last + [moment for name, moment in moments.items() if name != "end of step"]


def place_words(peak: MemoryBreakdown) -> str:
    """The place in the step of a moment of `moments(run)`, such as "the backward of the loss"."""
    names = {"forward": "forward", "after loss": "the end of the loss", "clipping": "clipping"}
    return names.get(name_of(peak), f"the {name_of(peak)}")


def name_of(moment: MemoryBreakdown) -> str:
    """The name of a moment, without the operation that its label adds to it."""
    return moment.label.partition(":")[0]


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
    """A change of one choice, or of a few that go together, and what it does.

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


def seconds_words(seconds: float) -> str:
    if seconds >= 10:
        return f"{seconds:,.0f} s"
    if seconds >= 0.1:
        return f"{seconds:.2g} s"
    return f"{1000 * seconds:.2g} ms"


MOST = 10  # so many changes are offered at most
LOWERS = 0.99  # of the peak: so much a change that does not make a run fit may leave to be offered


def next_changes(chosen: Mapping[str, Any]) -> tuple[Suggestion, ...]:
    """Single changes worth trying, best first; none for a run that fits the card.

    First comes what makes the run fit (with `twin.SAFETY` in reserve, as for `fit`): the same training before
    another, by the time that it loses. Then comes what lowers the peak most. Raises ValueError like
    `dashboard`.
    """
    now = complete(chosen)
    card = card_of(now)
    run = run_of(now)
    peak = estimate(run).total
    if peak * SAFETY <= card.room and not unsupported(run, card.capability):
        return ()
    found = list(_changes(now))
    fitting = [change for change in found if change.fits]
    fitting.sort(key=lambda change: (not change.same_training, change.lost))
    lowering = [change for change in found if not change.fits and change.peak <= LOWERS * peak]
    lowering.sort(key=lambda change: change.peak)
    return tuple((fitting + lowering)[:MOST])


def best_plan(chosen: Mapping[str, Any]) -> Suggestion | None:
    """The arrangement of the same training that fits and loses least time, several choices changed at once.

    None if none fits, or if it is best as it is. May take a second. Raises ValueError like `dashboard`.
    """
    now = complete(chosen)
    best = arrange(run_of(now), card_of(now)).best
    if best is None:
        return None
    run = best.run
    names = ("micro_batch", "accumulation_steps", "recompute", "attention", "loss_chunks", "zero_stage")
    after = {name: getattr(run, name) for name in names} | {"precision": run.precision.name}
    after |= {"optimizer": run.optimizer.name, "bucket_view": int(run.bucket_view)}
    return _weighed(now, after, same_training=True)


def _changes(now: dict[str, Any]) -> Iterator[Suggestion]:
    """Yield of each row of changes the first that fits, or the last that is possible."""
    for same_training, row in _rows(now, card_of(now)):
        found = None
        for asked in row:
            found = _weighed(now, asked, same_training) or found
            if found is not None and found.fits:
                break
        if found is not None:
            yield found


def _weighed(now: dict[str, Any], asked: dict[str, Any], same_training: bool) -> Suggestion | None:
    """These choices with other values; None if they change nothing, are refused, or the card lacks them."""
    after = now | asked
    card = GPUS[after["gpu"]]
    try:
        run = run_of(after)
        if after == now or unsupported(run, card.capability):
            return None
        peak = estimate(run).total
    except ValueError:
        return None
    before = sum(step_seconds(run_of(now), card_of(now)).values())
    lost = sum(step_seconds(run, card).values()) - before
    return Suggestion(_spelled(now, after), after, peak, peak * SAFETY <= card.room, lost, same_training)


def _spelled(now: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """The controls that change, and to what: "micro-batch: 4, micro-batches per step: 8"."""
    changed = [control for control in CONTROLS if now[control.name] != after[control.name]]
    values = [control.options[control.values.index(after[control.name])][0] for control in changed]
    return ", ".join(f"{control.label}: {value}" for control, value in zip(changed, values, strict=True))


Row = tuple[bool, Sequence[dict[str, Any]]]
"""True if the training stays the same, and changes that go further and further."""


def _rows(now: dict[str, Any], card: Gpu) -> Iterator[Row]:
    """Changes to look at: those that `planning.fit` knows, then smaller batches, more ranks, larger cards."""
    for name in ("recompute", "attention", "loss_chunks"):
        yield from ((True, [{name: value}]) for value in FREE[name])
    algorithm = OPTIMIZERS[now["optimizer"]].algorithm
    if algorithm in ("adam", "adamw"):
        yield from ((True, [{"optimizer": f"{algorithm}-{how}"}]) for how in FREE["implementation"])
    if now["world_size"] > 1:
        yield from ((True, [{"bucket_view": int(value)}]) for value in FREE["bucket_view"])
        yield from ((True, [_sharded(now, stage)]) for stage in FREE["zero_stage"])
    changes = [change for name in ("precision", "pure-bf16", "optimizer") for change in MAY_CHANGE[name]]
    if not card.has_bf16:
        changes.append({"precision": "amp-fp16", "attention": "efficient"})
    as_it_is = {"precision": precision_at(now["zero_stage"], now["precision"], now["zero_stage"])}
    yield from ((False, [change]) for change in changes if change != as_it_is)
    yield from ((False, [{"trained": name}]) for name in TRAINED)
    yield True, _splits(now)
    yield from _more_ranks(now)
    larger = [other for other in GPUS.values() if other.room > card.room]
    larger.sort(key=lambda other: other.room)
    yield True, [{"gpu": other.name} for other in larger]


def _sharded(now: dict[str, Any], stage: int) -> dict[str, Any]:
    """Another of ZeRO's stages, with the recipe that learns the same there (`planning.FSDP_POLICY`)."""
    precision = precision_at(stage, now["precision"], now["zero_stage"])
    return {"zero_stage": stage, "bucket_view": 0, "precision": precision}


def _splits(now: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Smaller micro-batches of the same global batch, the largest first."""
    batch = now["micro_batch"] * now["accumulation_steps"]
    counts = CONTROL["accumulation_steps"].values
    smaller = [size for size in CONTROL["micro_batch"].values if size < now["micro_batch"]]
    smaller = [size for size in reversed(smaller) if batch // size in counts]
    return [{"micro_batch": size, "accumulation_steps": batch // size} for size in smaller]


def _more_ranks(now: Mapping[str, Any]) -> Iterator[Row]:
    """More ranks: those that can share the global batch, and others if they shard something, too."""
    batch = now["micro_batch"] * now["accumulation_steps"] * now["world_size"]
    more = [count for count in CONTROL["world_size"].values if count > now["world_size"]]
    yield True, [_on_ranks(now, count) for count in more if batch % count == 0]
    if now["zero_stage"]:
        yield False, [_on_ranks(now, count) for count in more if batch % count]


def _on_ranks(now: Mapping[str, Any], ranks: int) -> dict[str, Any]:
    """So many ranks, with fewer micro-batches, then smaller ones, as far as they can share the batch."""
    times = ranks // now["world_size"]
    fewer = gcd(times, now["accumulation_steps"])
    smaller = gcd(times // fewer, now["micro_batch"])
    return {
        "world_size": ranks,
        "accumulation_steps": now["accumulation_steps"] // fewer,
        "micro_batch": now["micro_batch"] // smaller,
    }
