"""Demo: one training step on the meter, at six tenths of the card."""

from ..estimating import estimate
from ..units import format_bytes
from .stage import DemoStep, Outcome, Stage, estimated

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
    parts = ", ".join(f"{kind.replace('_', ' ')} {format_bytes(size)}" for kind, size in found.items() if size)
    return Outcome(f"{estimated(run)} At the peak, in {found.phase}: {parts}.")


def training(stage: Stage) -> Outcome:
    """The run itself, on the meter."""
    return stage.attempt(stage.run_of(SHARE))


TRAINING_STEP = [
    DemoStep("Guess first", "How much memory does this training step take? Write your guess down.", question),
    DemoStep("The estimate", "Add up what is alive at the worst moment.", prediction),
    DemoStep("The step itself", "Watch what rises in forward and falls in backward, and what stays.", training),
]
