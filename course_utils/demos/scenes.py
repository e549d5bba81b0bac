"""The demos that try training runs on the card, or estimate them, step by step; see also `fragmentation`.

scenes.toml has their titles and words.
"""

from collections.abc import Callable, Mapping

from .. import PRESETS, TrainingRun, estimate
from ..estimating.step_time import model_flops, recomputed_flops
from ..figures.canvas import sentence
from ..measurement import WORDS
from ..planning.twin import fits
from ..units import format_bytes, percent
from .stage import Foreseen, Stage, StepResult, in_words
from .stage_figures import stage_bars


def _drawn(
    stage: Stage,
    words: str,
    runs: Mapping[str, TrainingRun],
    title: str,
    notes: Mapping[str, str] | None = None,
) -> StepResult:
    rows = {name: estimate(run) for name, run in runs.items()}
    return StepResult(words, figure=stage_bars(rows, title, stage.card.room, notes or {}))


def _takes(run: TrainingRun) -> str:
    return f"{run} takes {format_bytes(estimate(run).total)} by estimate"


def _share(run: TrainingRun, of: TrainingRun) -> float:
    return estimate(run).total / estimate(of).total


def _tried(chosen: Callable[[Stage], TrainingRun]) -> Callable[[Stage], StepResult]:
    return lambda stage: stage.attempt(chosen(stage))


# One training step, at six tenths of the card

SIX_TENTHS = 0.6


def _six_tenths(stage: Stage) -> TrainingRun:
    return stage.run_of(SIX_TENTHS)


def _step_question(stage: Stage) -> str:
    run = _six_tenths(stage)
    states = format_bytes(16 * run.model.parameters)
    return f"{run} on {stage.words}. At 16 bytes per parameter its states take {states}. What is the peak?"


def _step_prediction(stage: Stage) -> StepResult:
    run = _six_tenths(stage)
    found = estimate(run)
    title = f"{format_bytes(found.total)} by estimate, in {found.phase}"
    return _drawn(stage, "Which of these stay when the step is over?", {"": run}, title)


def _what_stays(stage: Stage) -> str:
    run = _six_tenths(stage)
    found = estimate(run)
    stays = format_bytes(found["parameters"] + found["optimizer_states"])
    peak = format_bytes(stage.outcome_of(run).peak)
    return f"Between two steps {stays} stay: weights and Adam's states. The rest of {peak} comes and goes."


TRAINING_STEP = in_words(
    "training-step",
    (_step_question, _step_prediction, _tried(_six_tenths), _what_stays),
    lambda stage: [stage.foresee(_six_tenths(stage))],
)


# Out of memory on purpose, and back


def _too_large(stage: Stage) -> StepResult:
    run = stage.too_large()
    title = f"{run.micro_batch} sequences do not fit, by estimate"
    return _drawn(stage, f"{run} on {stage.words}. Where in the step will it fail?", {"": run}, title)


def _what_fits(stage: Stage) -> str:
    large = stage.too_large()
    small = _six_tenths(stage)
    each = (estimate(large).total - estimate(small).total) // (large.micro_batch - small.micro_batch)
    return (
        f"Each sequence costs {format_bytes(each)}. {large.micro_batch} did not fit. "
        f"Does the same process still work, and how many fit into {percent(SIX_TENTHS)} of the card?"
    )


OUT_OF_MEMORY = in_words(
    "out-of-memory",
    (_too_large, lambda stage: stage.fails(stage.too_large()), _what_fits, _tried(_six_tenths)),
    lambda stage: [stage.foresee(stage.too_large(), fails=True), stage.foresee(_six_tenths(stage))],
)


# SGD against Adam on one model and batch, and when Adam's states appear


def _sgd(stage: Stage) -> TrainingRun:
    return _six_tenths(stage).replace(optimizer="sgd")


def _optimizer_question(stage: Stage) -> str:
    run = _sgd(stage)
    parameters = f"{run.model.parameters / 1e6:,.0f} M parameters"
    return f"{_takes(run)}, with {parameters} in fp32. How much more with AdamW, and from which moment on?"


def _optimizer_prediction(stage: Stage) -> StepResult:
    runs = {
        "SGD": _sgd(stage),
        "momentum": _sgd(stage).replace(optimizer="momentum"),
        "AdamW": _six_tenths(stage),
    }
    more = estimate(runs["AdamW"]).total - estimate(runs["SGD"]).total
    title = f"AdamW takes {format_bytes(more)} more than SGD, by estimate"
    return _drawn(stage, "Momentum keeps one number per parameter, Adam keeps two.", runs, title)


def _first_step(stage: Stage) -> str:
    peaks = stage.outcome_of(_six_tenths(stage)).step_peaks
    return (
        f"AdamW's first step peaked at {format_bytes(peaks[0])}, later ones at {format_bytes(peaks[-1])}. A"
        " batch that passes one step may still fail in the second: always try two."
    )


OPTIMIZER_STATES = in_words(
    "optimizer-states",
    (_optimizer_question, _optimizer_prediction, _tried(_sgd), _tried(_six_tenths), _first_step),
    lambda stage: [stage.foresee(_sgd(stage)), stage.foresee(_six_tenths(stage))],
)


# The same batch under three policies of recomputation

POLICIES = {"all kept": "none", "selective": "selective", "full": "full"}


def _under(policy: str) -> Callable[[Stage], TrainingRun]:
    """A run mostly of activations.

    Its loss is in pieces: logits, which no policy touches, would hide the blocks.
    """
    return lambda stage: stage.run_of(0.7, states=0.2, loss_chunks=8).replace(recompute=policy)


def _recomputing(stage: Stage) -> dict[str, TrainingRun]:
    return {name: _under(policy)(stage) for name, policy in POLICIES.items()}


def _recompute_question(stage: Stage) -> str:
    return (
        f"{_takes(_recomputing(stage)['all kept'])}. Keep only each block's input, and compute the "
        "block again in backward: how much is left, and how much longer is a step?"
    )


def _recompute_prediction(stage: Stage) -> StepResult:
    runs = _recomputing(stage)
    notes = {name: _price_of(run) for name, run in runs.items()}
    less = percent(1 - _share(runs["full"], runs["all kept"]))
    title = f"Full recomputation needs {less} less, by estimate"
    words = (
        "The forward pass is a third of a step's arithmetic. Recomputation runs the blocks' part of it twice."
    )
    return _drawn(stage, words, runs, title, notes)


def _price_of(run: TrainingRun, seconds: float | None = None, first: float | None = None) -> str:
    if seconds and first:
        return f"{seconds:.2f} s per step, {seconds / first - 1:+.0%}"
    more = recomputed_flops(run) / model_flops(run)
    if more:
        return f"{percent(more)} more arithmetic"
    return "no product is computed again" if run.recompute == "selective" else "nothing is computed again"


def _price(stage: Stage) -> StepResult:
    runs = _recomputing(stage)
    made = {name: stage.outcome_of(run) for name, run in runs.items()}
    word = WORDS["live" if stage.live else "simulated"]
    first = made["all kept"]
    prices = {name: _price_of(runs[name], one.step_seconds, first.step_seconds) for name, one in made.items()}
    notes = {name: f"{format_bytes(one.peak)} {word}, {prices[name]}" for name, one in made.items()}
    title = f"{percent(1 - made['full'].peak / first.peak)} less memory, for one more forward pass"
    words = "Memory for time: without a GPU no time is measured, the arithmetic is counted."
    if stage.live:
        words = "Memory for time: timed on this GPU."
    return _drawn(stage, words, runs, title, notes)


RECOMPUTATION = in_words(
    "recomputation",
    (_recompute_question, _recompute_prediction, *(_tried(_under(one)) for one in POLICIES.values()), _price),
    lambda stage: [stage.foresee(run) for run in _recomputing(stage).values()],
)


# One large batch, the same as micro-batches, and one ten times as large that takes no more

PARTS = 4
TIMES = 10


def _large(stage: Stage) -> TrainingRun:
    """A batch at eight tenths of the card; its sequences can be shared by the micro-batches."""
    run = stage.run_of(0.8, states=0.2)
    return run.replace(micro_batch=run.micro_batch // PARTS * PARTS)


def _in_parts(stage: Stage) -> TrainingRun:
    run = _large(stage)
    return run.replace(micro_batch=run.micro_batch // PARTS, accumulation_steps=PARTS)


def _batch_question(stage: Stage) -> str:
    run = _large(stage)
    return (
        f"{_takes(run)}. The same {run.micro_batch} sequences in {PARTS} "
        f"micro-batches of {run.micro_batch // PARTS}, gradients added up: does that take a quarter?"
    )


def _batch_prediction(stage: Stage) -> StepResult:
    whole = _large(stage)
    parts = _in_parts(stage)
    title = f"{percent(_share(parts, whole))} of the memory, not {percent(1 / PARTS)}, by estimate"
    return _drawn(stage, "Which kinds did not shrink?", {"at once": whole, f"in {PARTS} parts": parts}, title)


def _ten_times(stage: Stage) -> StepResult:
    parts = _in_parts(stage)
    more = parts.replace(accumulation_steps=PARTS * TIMES)
    whole = more.replace(micro_batch=more.global_batch, accumulation_steps=1)
    same = "the same memory" if _share(more, parts) == 1 else "hardly more memory"
    title = f"{TIMES} times the batch takes {same}, by estimate"
    runs = {f"{more.global_batch} at once": whole, f"in {more.accumulation_steps} parts": more}
    return _drawn(stage, "Only time grows with the batch.", runs, title)


ACCUMULATION = in_words(
    "accumulation",
    (_batch_question, _batch_prediction, _tried(_large), _tried(_in_parts), _ten_times),
    lambda stage: [stage.foresee(_large(stage)), stage.foresee(_in_parts(stage))],
)


# ZeRO's three stages for a model whose states no single card holds: estimates alone, as the other cards are
# not here

RANKS = (8, 16, 32, 64)
STAGES = {"replicas": 0, "ZeRO-1": 1, "ZeRO-2": 2, "ZeRO-3": 3}


def _sharded(stage: Stage) -> dict[str, TrainingRun]:
    """The run at each of ZeRO's stages, on as few cards as the third needs, or on the most of `RANKS`.

    One sequence of the smallest dense model whose 16 bytes per parameter are more than the card holds. Its
    precision is ZeRO's own, 2 + 2 + 12 bytes: autocast would keep a whole 16-bit copy of the weights on each
    card.
    """
    large = (one for one in PRESETS.values() if not one.experts and 16 * one.parameters > stage.card.room)
    model = min(large, key=lambda one: one.parameters)
    if stage.card.has_bf16:
        precision, attention = "bf16-master", "flash"
    else:
        precision, attention = "fp16-master", "efficient"
    base = TrainingRun(
        model, 1, min(512, model.max_positions), precision, attention=attention, recompute="full"
    )
    third = (base.replace(world_size=ranks, zero_stage=3) for ranks in RANKS)
    ranks = next((run.world_size for run in third if fits(run, stage.card.room)), RANKS[-1])
    return {name: base.replace(world_size=ranks, zero_stage=number) for name, number in STAGES.items()}


def _cards_question(stage: Stage) -> str:
    model = _sharded(stage)["replicas"].model
    return (
        f"{model.name} on {stage.words}: at 16 bytes per parameter its states take "
        f"{format_bytes(16 * model.parameters)}. How many of these cards do you need if each keeps a copy?"
    )


def _replicas(stage: Stage) -> StepResult:
    run = _sharded(stage)["replicas"]
    few = RANKS[0]
    many = run.world_size * 8
    runs = {f"{ranks} cards": run.replace(world_size=ranks) for ranks in (few, many)}
    title = f"Estimated: a replica is as large on {many} cards as on {few}"
    return _drawn(stage, "Each card holds everything. What does not have to exist twice?", runs, title)


def _stages(stage: Stage) -> StepResult:
    runs = _sharded(stage)
    ranks = runs["ZeRO-3"].world_size
    fitting = [name for name, run in runs.items() if fits(run, stage.card.room)]
    words = (
        f"The bytes of one of {ranks} cards, by estimate."
        " Nothing was measured, because these cards are not here."
    )
    return _drawn(stage, words, runs, f"On {ranks} cards {sentence(fitting)} fit, by estimate")


def _sharding_foreseen(stage: Stage) -> list[Foreseen]:
    runs = _sharded(stage)
    return [stage.foresee(runs["replicas"], fails=True), stage.foresee(runs["ZeRO-3"])]


SHARDING = in_words("sharding", (_cards_question, _replicas, _stages), _sharding_foreseen, runs=False)
