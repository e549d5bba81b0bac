"""Every demo before the lecture: executed once on this machine, or foreseen by estimate for another card."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from textwrap import fill

from ..units import format_bytes
from .stage import Demo, DemoStep, Foreseen, Stage

COLUMNS = 110


@dataclass(frozen=True)
class Rehearsal:
    """The lines of a rehearsal, and what did not go as the demos say."""

    lines: tuple[str, ...]
    problems: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join(self.lines)

    __repr__ = __str__


def rehearse(
    demos: Mapping[str, Demo], stage: Stage, run: bool = True, say: Callable[[str], None] | None = None
) -> Rehearsal:
    """Runs every step of every demo on the stage; without `run` nothing runs, and estimates alone speak.

    `say` is told each line as soon as it is known.
    """
    lines, problems = list[str](), list[str]()

    def add(line: str) -> None:
        lines.append(line)
        if say is not None:
            say(line)

    add(fill(_heading(stage, run), COLUMNS))
    for name, one in demos.items():
        add(fill(f"{name}: {one.title}. {one.shows}", COLUMNS, initial_indent="\n"))
        for said in chain(_foreseen(one, stage), _steps(one, stage, run)):
            add(_indented(said.words))
            problems += [] if said.as_told else [f"{name}: {said.words}"]
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
        yield _performed(step, stage, title) if run else Foreseen(title, True)


def _performed(step: DemoStep, stage: Stage, title: str) -> Foreseen:
    try:
        outcome = stage.perform(step)
    except (RuntimeError, ValueError) as problem:  # the other demos are rehearsed all the same
        return Foreseen(f"{title}: does not work here. {' '.join(str(problem).split())}", False)
    drawn = f" [{outcome.figure.alt}]" if outcome.figure else ""
    return Foreseen(f"{title}: {outcome.seconds:.1f} s. {' '.join(outcome.words.split())}{drawn}", True)
