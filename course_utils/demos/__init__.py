"""Demos for a lecture, each a list of steps, sized as fractions of the GPU that is there: `demo("out-of-memory")`.

Without a GPU everything runs on a simulated T4 and says so. `rehearse` runs every demo beforehand.
"""

from typing import TYPE_CHECKING

from ..errors import unknown
from ..interactive.failed_cells import watch_cells
from .rehearsal import DEMOS, Rehearsal, rehearse
from .stage import Demo, DemoStep, Stage, StepResult

if TYPE_CHECKING:
    from .show import DemoWidget

__all__ = ["DEMOS", "Demo", "DemoStep", "StepResult", "Rehearsal", "Stage", "demo", "rehearse"]


def demo(name: str, stage: Stage | None = None) -> "DemoWidget":
    """The demo in large type, one key (space, Enter) a step. ValueError, with the known demos, for another name."""
    from .show import DemoWidget

    watch_cells()
    if name not in DEMOS:
        raise unknown("demo", name, DEMOS)
    return DemoWidget(DEMOS[name], stage or Stage.here())
