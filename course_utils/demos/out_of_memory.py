"""Demo: out of memory on purpose, and back: a batch too large for the card, its end, and the batch that fits."""

from ..estimating import estimate
from ..units import format_bytes, percent
from .stage import Demo, DemoStep, Foreseen, Outcome, Stage
from .stage_figures import stage_bars

SMALLER = 0.6


def plan(stage: Stage) -> Outcome:
    """The run that is too large, beside the card."""
    run = stage.too_large()
    figure = stage_bars({"": estimate(run)}, f"{run.micro_batch} sequences do not fit, by estimate", stage.card.room)
    return Outcome(f"{run} on {stage.words}. Where in the step will it fail?", figure=figure)


def failure(stage: Stage) -> Outcome:
    """It fails, for real; the message is shown."""
    return Outcome(stage.fails(stage.too_large()))


def what_fits(stage: Stage) -> Outcome:
    """The guess before the recovery, with what each sequence costs."""
    large, small = stage.too_large(), stage.run_of(SMALLER)
    each = (estimate(large).total - estimate(small).total) // (large.micro_batch - small.micro_batch)
    return Outcome(
        f"Each sequence costs {format_bytes(each)}. {large.micro_batch} did not fit. "
        f"Does the same process still work, and how many fit into {percent(SMALLER)} of the card?"
    )


def recovery(stage: Stage) -> Outcome:
    """The same model in the same process, with a batch that fits even where the memory is fragmented."""
    return stage.attempt(stage.run_of(SMALLER))


def foresee(stage: Stage) -> list[Foreseen]:
    """A run that fails and one that fits."""
    return [stage.foresee(stage.too_large(), fails=True), stage.foresee(stage.run_of(SMALLER))]


OUT_OF_MEMORY = Demo(
    "Out of memory, and back",
    "A batch that is too large fails on purpose; the memory comes back, and the same process trains on.",
    (
        DemoStep("Too large on purpose", "This batch needs more memory than the GPU has.", plan),
        DemoStep(
            "Out of memory",
            "The allocator looks for room, gives back what it has cached, and gives up.",
            failure,
            fails=True,
        ),
        DemoStep("What now?", "The failed step's memory has been given back.", what_fits),
        DemoStep("And back", "The same process trains on, with fewer sequences.", recovery),
    ),
    foresee,
)
