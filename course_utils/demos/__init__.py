"""Demos for a lecture, each a list of steps, sized as fractions of the GPU that is there: `demo("out-of-memory")`.

Without a GPU everything runs on a simulated T4 and says so. `rehearse` runs every demo beforehand.
"""

from typing import TYPE_CHECKING

from ..nearest import unknown
from .out_of_memory import OUT_OF_MEMORY
from .stage import DemoStep, Outcome, Stage
from .training_step import TRAINING_STEP

if TYPE_CHECKING:
    from .show import DemoWidget

__all__ = ["DEMOS", "DemoStep", "Outcome", "Stage", "demo", "rehearse"]

DEMOS: dict[str, list[DemoStep]] = {"training-step": TRAINING_STEP, "out-of-memory": OUT_OF_MEMORY}


def steps_of(name: str) -> list[DemoStep]:
    """The demo's steps. Raises ValueError naming the known demos for another name."""
    if name not in DEMOS:
        raise unknown("demo", name, DEMOS)
    return DEMOS[name]


def demo(name: str, stage: Stage | None = None) -> "DemoWidget":
    """The demo in large type; a button that has the keyboard's focus goes on: one key (space) a step.

    Raises ValueError naming the known demos for another name.
    """
    from .show import DemoWidget

    steps = steps_of(name)
    return DemoWidget(steps, stage or Stage.here())


def rehearse(stage: Stage | None = None) -> str:
    """Runs every demo as it will run on this machine, and says what happened: seconds, peak and source of each step."""
    stage = stage or Stage.here()
    lines = [f"On {stage.words}:"]
    for name, steps in DEMOS.items():
        lines += ["", name]
        for number, step in enumerate(steps, start=1):
            outcome = stage.perform(step)
            lines += [f"  {number}. {step.title}: {outcome.seconds:.1f} s", f"     {outcome.summary}"]
    return "\n".join(lines)
