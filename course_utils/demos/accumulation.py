"""Demo: one large batch, the same batch as micro-batches, and one ten times as large that takes no more."""

from ..estimating import estimate
from ..run import TrainingRun
from ..units import format_bytes, percent
from .stage import Demo, DemoStep, Foreseen, Outcome, Stage
from .stage_figures import stage_bars

SHARE, STATES = 0.8, 0.2
"""Of the card: the large batch, and the model's states."""

PARTS, TIMES = 4, 10


def large(stage: Stage) -> TrainingRun:
    """The large batch at once; its sequences can be shared by the micro-batches."""
    run = stage.run_of(SHARE, STATES)
    if run.micro_batch < PARTS:
        raise ValueError(f"only {run.micro_batch} sequences fit {stage.words}: free some of its memory")
    return run.replace(micro_batch=run.micro_batch // PARTS * PARTS)


def in_parts(stage: Stage, times: int = 1) -> TrainingRun:
    """The same batch, or `times` as many sequences, in micro-batches."""
    run = large(stage)
    return run.replace(micro_batch=run.micro_batch // PARTS, accumulation_steps=PARTS * times)


def question(stage: Stage) -> Outcome:
    """What is asked."""
    run = large(stage)
    return Outcome(
        f"{run} takes {format_bytes(estimate(run).total)} by estimate. The same {run.micro_batch} sequences in {PARTS} "
        f"micro-batches of {run.micro_batch // PARTS}, gradients added up: does that take a quarter?"
    )


def prediction(stage: Stage) -> Outcome:
    """Both estimates."""
    rows = {"at once": estimate(large(stage)), f"in {PARTS} parts": estimate(in_parts(stage))}
    whole, parts = rows.values()
    title = f"{percent(parts.total / whole.total)} of the memory, not {percent(1 / PARTS)}, by estimate"
    return Outcome("Which kinds did not shrink?", figure=stage_bars(rows, title, stage.card.room))


def at_once(stage: Stage) -> Outcome:
    """The large batch on the meter."""
    return stage.attempt(large(stage))


def micro_batches(stage: Stage) -> Outcome:
    """The micro-batches on the meter."""
    return stage.attempt(in_parts(stage))


def ten_times(stage: Stage) -> Outcome:
    """A batch that would never fit at once, by estimate."""
    run, more = large(stage), in_parts(stage, TIMES)
    rows = {
        f"{more.global_batch} at once": estimate(run.replace(micro_batch=more.global_batch)),
        f"in {more.accumulation_steps} parts": estimate(more),
    }
    same = estimate(more).total == estimate(in_parts(stage)).total
    title = f"{TIMES} times the batch takes {'the same memory' if same else 'hardly more memory'}, by estimate"
    return Outcome("Only time grows with the batch.", figure=stage_bars(rows, title, stage.card.room))


def foresee(stage: Stage) -> list[Foreseen]:
    """Two runs, which fit."""
    return [stage.foresee(large(stage)), stage.foresee(in_parts(stage))]


ACCUMULATION = Demo(
    "Gradient accumulation",
    "A large batch at once and in micro-batches: what shrinks, and what does not.",
    (
        DemoStep("Guess first", "The same batch, in one piece and in several.", question),
        DemoStep("The estimate", "Activations are one micro-batch's.", prediction),
        DemoStep("One large batch", "All sequences at once.", at_once),
        DemoStep("Micro-batches", "Gradients stay from one to the next, activations do not.", micro_batches),
        DemoStep("Ten times the batch", "Ten times as many sequences a step. How much memory?", ten_times),
    ),
    foresee,
)
