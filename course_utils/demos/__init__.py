"""Demos for a lecture, each a list of steps, sized as fractions of the GPU that is there: `demo("out-of-memory")`.

Without a GPU everything runs on a simulated T4 and says so. `rehearse` runs every demo beforehand.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from ..errors import unknown
from ..gpus import gpu
from ..interactive.failed_cells import watch_cells
from .fragmentation import FRAGMENTATION
from .rehearsal import Rehearsal
from .scenes import ACCUMULATION, OPTIMIZER_STATES, OUT_OF_MEMORY, RECOMPUTATION, SHARDING, TRAINING_STEP
from .stage import Demo, DemoStep, Outcome, Stage

if TYPE_CHECKING:
    from .show import DemoWidget

__all__ = ["DEMOS", "Demo", "DemoStep", "Outcome", "Rehearsal", "Stage", "demo", "rehearse"]

DEMOS: dict[str, Demo] = {
    "training-step": TRAINING_STEP,
    "out-of-memory": OUT_OF_MEMORY,
    "optimizer-states": OPTIMIZER_STATES,
    "recomputation": RECOMPUTATION,
    "accumulation": ACCUMULATION,
    "fragmentation": FRAGMENTATION,
    "sharding": SHARDING,
}


def demo(name: str, stage: Stage | None = None) -> "DemoWidget":
    """The demo in large type; a button that has the keyboard's focus goes on: one key (space, Enter) a step.

    Raises ValueError naming the known demos for another name.
    """
    from .show import DemoWidget

    watch_cells()
    if name not in DEMOS:
        raise unknown("demo", name, DEMOS)
    return DemoWidget(DEMOS[name], stage or Stage.here())


def rehearse(stage: Stage | None = None, gpu_name: str = "", say: Callable[[str], None] | None = None) -> Rehearsal:
    """Runs every demo as it will run on this machine, and says what happened: sizes, seconds, what fails on purpose.

    With `gpu_name` nothing runs: it says by estimate what would happen on that card. `say` is told each line as soon as
    it is known. Raises ValueError for a card that is not in the catalog.
    """
    from .rehearsal import rehearse as rehearse_all

    if gpu_name:
        return rehearse_all(DEMOS, Stage(gpu(gpu_name), live=False), run=False, say=say)
    return rehearse_all(DEMOS, stage or Stage.here(), say=say)
