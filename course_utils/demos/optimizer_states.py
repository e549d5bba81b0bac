"""Demo: SGD against Adam on one model and batch, and when Adam's states appear."""

from ..estimating import estimate
from ..run import TrainingRun
from ..units import format_bytes
from .stage import Demo, DemoStep, Foreseen, Outcome, Stage
from .stage_figures import stage_bars

SHARE = 0.6
NAMES = {"sgd": "SGD", "momentum": "momentum", "adamw": "AdamW"}


def runs(stage: Stage) -> dict[str, TrainingRun]:
    """The run with each optimizer, by the name that stands beside its bar; the batch is what AdamW leaves room for."""
    base = stage.run_of(SHARE)
    return {name: base.replace(optimizer=optimizer) for optimizer, name in NAMES.items()}


def question(stage: Stage) -> Outcome:
    """What is asked."""
    run = runs(stage)["SGD"]
    return Outcome(
        f"{run} takes {format_bytes(estimate(run).total)} by estimate, with {run.model.parameters / 1e6:,.0f} M "
        "parameters in fp32. How much more with AdamW, and from which moment on?"
    )


def prediction(stage: Stage) -> Outcome:
    """Three estimates."""
    rows = {name: estimate(run) for name, run in runs(stage).items()}
    more = rows["AdamW"].total - rows["SGD"].total
    title = f"AdamW takes {format_bytes(more)} more than SGD, by estimate"
    return Outcome(
        "One number a parameter for momentum, two for Adam.", figure=stage_bars(rows, title, stage.card.room)
    )


def sgd(stage: Stage) -> Outcome:
    """SGD on the meter."""
    return stage.attempt(runs(stage)["SGD"])


def adamw(stage: Stage) -> Outcome:
    """AdamW on the meter."""
    return stage.attempt(runs(stage)["AdamW"])


def first_step(stage: Stage) -> Outcome:
    """The peak of the first step beside that of the later ones."""
    peaks = stage.outcome_of(runs(stage)["AdamW"]).step_peaks
    first, later = format_bytes(peaks[0]), format_bytes(peaks[-1])
    return Outcome(
        f"AdamW's first step peaked at {first}, later ones at {later}. A batch that passes one step may still fail in "
        "the second: always try two."
    )


def foresee(stage: Stage) -> list[Foreseen]:
    """Two runs, which fit."""
    return [stage.foresee(runs(stage)[name]) for name in ("SGD", "AdamW")]


OPTIMIZER_STATES = Demo(
    "What Adam remembers",
    "SGD and AdamW on the same batch: how much more, and when the states appear.",
    (
        DemoStep("Guess first", "The same model, the same batch, another optimizer.", question),
        DemoStep("The estimate", "What each optimizer keeps for every parameter.", prediction),
        DemoStep("SGD", "Between steps the weights are alone.", sgd),
        DemoStep("AdamW", "Watch the first step of the optimizer.", adamw),
        DemoStep("The first step differs", "Forward began without states once, and never again.", first_step),
    ),
    foresee,
)
