"""Every demo before the lecture: executed once on this machine, or foreseen by estimate for another card."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from textwrap import fill

from ..gpus import gpu
from ..units import format_bytes
from .fragmentation import FRAGMENTATION
from .scenes import ACCUMULATION, OPTIMIZER_STATES, OUT_OF_MEMORY, RECOMPUTATION, SHARDING, TRAINING_STEP
from .stage import Demo, Foreseen, Stage

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


@dataclass(frozen=True)
class Rehearsal:
    """The lines of a rehearsal, and what did not go as the demos say."""

    lines: tuple[str, ...]
    problems: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join(self.lines)

    __repr__ = __str__


def rehearse(stage: Stage | None = None, gpu_name: str = "", say: Callable[[str], None] | None = None) -> Rehearsal:
    """Runs every demo as it will run on this machine, and says what happened: sizes, seconds, what fails on purpose.

    With `gpu_name` nothing runs: it says by estimate what would happen on that card. `say` is told each line as soon as
    it is known. Raises ValueError for a card that is not in the catalog.
    """
    stage = Stage(gpu(gpu_name), live=False) if gpu_name else stage or Stage.here()
    lines, problems = list[str](), list[str]()

    def add(line: str, indent: str = "", further: str = "") -> None:
        lines.append(fill(line, COLUMNS, initial_indent=indent, subsequent_indent=further))
        if say is not None:
            say(lines[-1])

    if gpu_name:
        add(f"On {stage.card.name}, {format_bytes(stage.card.room, 'GB', 1)}, by estimate; nothing was run.")
    elif stage.live:
        add(f"On {stage.words} free now. Let no other program use it from here to the lecture.")
    else:
        played = (
            f"On the stage each run is played back, which takes {stage.reading_seconds:.0f} s more than is said here."
        )
        add(f"There is no GPU to use here: demos run on {stage.words}. {played}")
    for name, one in DEMOS.items():
        add(f"{name}: {one.title}. {one.shows}", "\n")
        for said in _said(one, stage, run=not gpu_name):
            add(said.words, "  ", "     ")
            if not said.as_told:
                problems.append(f"{name}: {said.words}")
    if problems:
        add(f"{len(problems)} thing{' does' if len(problems) == 1 else 's do'} not go as the demos say:", "\n")
        for problem in problems:
            add(problem, "  ", "     ")
    else:
        add("Everything goes as the demos say.", "\n")
    return Rehearsal(tuple(lines), tuple(problems))


def _said(one: Demo, stage: Stage, run: bool) -> Iterator[Foreseen]:
    """What is foreseen of a demo, then each of its steps when it has been performed, so that it is said at once."""
    try:
        yield from (Foreseen(f"· {said.words}", said.as_told) for said in one.foresee(stage))
    except ValueError as problem:  # no size suits this card
        yield Foreseen(f"· {problem}", False)
    for number, step in enumerate(one.steps, start=1):
        title = f"{number}. {step.title}{' (fails on purpose)' if step.fails else ''}"
        if not run:
            yield Foreseen(title, True)
            continue
        begin = time.perf_counter()
        try:
            outcome = stage.perform(step)
        except (RuntimeError, ValueError) as problem:  # the other demos are rehearsed all the same
            yield Foreseen(f"{title}: does not work here. {' '.join(str(problem).split())}", False)
        else:
            drawn = f" [{outcome.figure.alt}]" if outcome.figure else ""
            said = f"{time.perf_counter() - begin:.1f} s. {' '.join(outcome.words.split())}{drawn}"
            yield Foreseen(f"{title}: {said}", True)
