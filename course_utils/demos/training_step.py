"""Demo: one training step on the meter, at six tenths of the card."""

from ..estimating import estimate
from ..units import format_bytes
from .stage import Demo, DemoStep, Foreseen, Outcome, Stage
from .stage_figures import stage_bars

SHARE = 0.6


def question(stage: Stage) -> Outcome:
    """The run, and what its states alone take."""
    run = stage.run_of(SHARE)
    states = format_bytes(16 * run.model.parameters)
    return Outcome(f"{run} on {stage.words}. At 16 bytes a parameter its states take {states}. What is the peak?")


def prediction(stage: Stage) -> Outcome:
    """The estimate by kind."""
    run = stage.run_of(SHARE)
    found = estimate(run)
    title = f"{format_bytes(found.total)} by estimate, in {found.phase}"
    return Outcome("Which of these stay when the step is over?", figure=stage_bars({"": found}, title, stage.card.room))


def training(stage: Stage) -> Outcome:
    """The run itself, on the meter."""
    return stage.attempt(stage.run_of(SHARE))


def what_stays(stage: Stage) -> Outcome:
    """What is freed after a step, and what is not."""
    run = stage.run_of(SHARE)
    stays = format_bytes(estimate(run)["parameters"] + estimate(run)["optimizer_states"])
    peak = format_bytes(stage.outcome_of(run).peak)
    return Outcome(f"Between two steps {stays} stay: weights and Adam's states. The rest of {peak} comes and goes.")


def foresee(stage: Stage) -> list[Foreseen]:
    """One run, which fits."""
    return [stage.foresee(stage.run_of(SHARE))]


TRAINING_STEP = Demo(
    "One training step",
    "What rises in forward, falls in backward, and stays.",
    (
        DemoStep("Guess first", "How much memory does this training step take? Write your guess down.", question),
        DemoStep("The estimate", "Add up what is alive at the worst moment.", prediction),
        DemoStep("The step itself", "Watch what rises in forward and falls in backward, and what stays.", training),
        DemoStep("What stays", "The step is over.", what_stays),
    ),
    foresee,
)
