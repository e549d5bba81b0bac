"""Every demo before the lecture: executed once on this machine, or foreseen by estimate for another card."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
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
    run = not gpu_name
    stage = Stage(gpu(gpu_name), live=False) if gpu_name else stage or Stage.here()
    lines, problems = list[str](), list[str]()

    def add(line: str) -> None:
        lines.append(line)
        if say is not None:
            say(line)

    add(fill(_heading(stage, run), COLUMNS))
    for name, one in DEMOS.items():
        add(fill(f"{name}: {one.title}. {one.shows}", COLUMNS, initial_indent="\n"))
        for said in chain(_foreseen(one, stage), _steps(one, stage, run)):
            add(_indented(said.words))
            if not said.as_told:
                problems.append(f"{name}: {said.words}")
    if problems:
        count = f"{len(problems)} thing{' does' if len(problems) == 1 else 's do'} not go as the demos say:"
        add("\n".join(["", count, *map(_indented, problems)]))
    else:
        add("\nEverything goes as the demos say.")
    return Rehearsal(tuple(lines), tuple(problems))


def _indented(words: str) -> str:
    return fill(words, COLUMNS, initial_indent="  ", subsequent_indent="     ")


def _heading(stage: Stage, run: bool) -> str:
    if not run:
        return f"On {stage.card.name}, {format_bytes(stage.card.room, 'GB', 1)}, by estimate; nothing was run."
    if stage.live:
        return f"On {stage.words} free now. Let no other program use it from here to the lecture."
    return (
        f"There is no GPU to use here: demos run on {stage.words}. On the stage each run is played back, which takes "
        f"{stage.reading_seconds:.0f} s more than is said here."
    )


def _foreseen(one: Demo, stage: Stage) -> Iterator[Foreseen]:
    try:
        for said in one.foresee(stage):
            yield Foreseen(f"· {said.words}", said.as_told)
    except ValueError as problem:  # no size suits this card
        yield Foreseen(f"· {problem}", False)


def _steps(one: Demo, stage: Stage, run: bool) -> Iterator[Foreseen]:
    """Each step when it has been performed: one at a time, so that its line is said at once."""
    for number, step in enumerate(one.steps, start=1):
        title = f"{number}. {step.title}{' (fails on purpose)' if step.fails else ''}"
        if not run:
            yield Foreseen(title, True)
            continue
        try:
            outcome = stage.perform(step)
        except (RuntimeError, ValueError) as problem:  # the other demos are rehearsed all the same
            yield Foreseen(f"{title}: does not work here. {' '.join(str(problem).split())}", False)
        else:
            drawn = f" [{outcome.figure.alt}]" if outcome.figure else ""
            yield Foreseen(f"{title}: {outcome.seconds:.1f} s. {' '.join(outcome.words.split())}{drawn}", True)
