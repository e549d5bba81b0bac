"""Demos for a lecture, each a list of steps, sized as fractions of the GPU: `demo("out-of-memory")`.

Without a GPU everything runs on a simulated T4 and says so. `rehearse` runs every demo beforehand.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from textwrap import fill
from typing import TYPE_CHECKING

from .. import format_bytes, gpu
from ..errors import check_known
from .fragmentation import FRAGMENTATION
from .scenes import ACCUMULATION, OPTIMIZER_STATES, OUT_OF_MEMORY, RECOMPUTATION, SHARDING, TRAINING_STEP
from .stage import Demo, Foreseen, Stage

if TYPE_CHECKING:
    from .show import DemoWidget

__all__ = ["DEMOS", "Rehearsal", "Stage", "demo", "rehearse"]

DEMOS: dict[str, Demo] = {
    "training-step": TRAINING_STEP,
    "out-of-memory": OUT_OF_MEMORY,
    "optimizer-states": OPTIMIZER_STATES,
    "recomputation": RECOMPUTATION,
    "accumulation": ACCUMULATION,
    "fragmentation": FRAGMENTATION,
    "sharding": SHARDING,
}
COLUMNS = 110


def demo(name: str, stage: Stage | None = None) -> "DemoWidget":
    """The demo in large type, one key (space, Enter) a step.

    Raises ValueError, with the known demos, for another name.
    """
    from .show import DemoWidget

    check_known("demo", name, DEMOS)
    return DemoWidget(DEMOS[name], stage or Stage.here())


@dataclass(frozen=True)
class Rehearsal:
    """The lines of a rehearsal, and what did not go as the demos say."""

    lines: tuple[str, ...]
    problems: tuple[str, ...]

    def __repr__(self) -> str:
        return "\n".join(self.lines)


def rehearse(
    stage: Stage | None = None, gpu_name: str = "", say: Callable[[str], None] | None = None
) -> Rehearsal:
    """Runs every demo as it will run on this machine, and says what happened.

    That is sizes, seconds, and what fails on purpose. With `gpu_name` nothing runs: it says by estimate what
    would happen on that card. `say` is told each line as soon as it is known. Raises ValueError for a card
    that is not in the catalog.
    """
    if gpu_name:
        stage = Stage(gpu(gpu_name), live=False)
    elif stage is None:
        stage = Stage.here()
    lines = list[str]()
    problems = list[str]()

    def add(line: str, indent: str = "", further: str = "") -> None:
        lines.append(fill(line, COLUMNS, initial_indent=indent, subsequent_indent=further))
        if say is not None:
            say(lines[-1])

    if gpu_name:
        add(f"On {stage.card.name}, {format_bytes(stage.card.room, 'GB', 1)}, by estimate. Nothing was run.")
    elif stage.live:
        add(f"On {stage.words} free now. Let no other program use the GPU until the lecture is over.")
    else:
        played = f"In the lecture each run is also played back, for {stage.reading_seconds:.0f} s more."
        add(f"There is no GPU to use here: demos run on {stage.words}. {played}")
    for name, one in DEMOS.items():
        add(f"{name}: {one.title}. {one.shows}", "\n")
        for said in _said(one, stage, run=not gpu_name):
            add(said.words, "  ", "     ")
            if not said.as_told:
                problems.append(f"{name}: {said.words}")
    if problems:
        add("These steps do not do what the demos announce:", "\n")
    else:
        add("Every demo does what it announces.", "\n")
    for problem in problems:
        add(problem, "  ", "     ")
    return Rehearsal(tuple(lines), tuple(problems))


def _said(one: Demo, stage: Stage, run: bool) -> Iterator[Foreseen]:
    """The forecast of a demo, then each of its steps as soon as it has been performed."""
    try:
        for said in one.foresee(stage):
            yield Foreseen(f"· {said.words}", said.as_told)
    except ValueError as problem:  # no size suits this card
        yield Foreseen(f"· {problem}", False)
    for number, step in enumerate(one.steps, start=1):
        title = f"{number}. {step.title}"
        if step.fails:
            title += " (fails on purpose)"
        if not run:
            yield Foreseen(title, True)
            continue
        begin = time.perf_counter()
        try:
            outcome = stage.perform(step)
        except (RuntimeError, ValueError) as problem:  # the other demos are rehearsed all the same
            yield Foreseen(f"{title}: does not work here. {' '.join(str(problem).split())}", False)
        else:
            words = f"{time.perf_counter() - begin:.1f} s. {' '.join(outcome.words.split())}"
            if outcome.figure:
                words += f" [{outcome.figure.alt}]"
            yield Foreseen(f"{title}: {words}", True)
