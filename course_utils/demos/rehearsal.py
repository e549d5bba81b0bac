"""Every demo before the lecture: what it will do on this machine, done once, or on another card, by estimate."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from textwrap import fill

from ..units import format_bytes
from .stage import Demo, DemoStep, Foreseen, Stage

COLUMNS = 110


@dataclass(frozen=True)
class Rehearsal:
    """What a rehearsal says, line by line, and what did not go as told."""

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
    for line, problem in _all(demos, stage, run):
        lines.append(line)
        problems += [problem] if problem else []
        if say is not None:
            say(line)
    verdict = _verdict(problems)
    if say is not None:
        say(verdict)
    return Rehearsal((*lines, verdict), tuple(problems))


def _all(demos: Mapping[str, Demo], stage: Stage, run: bool) -> Iterator[tuple[str, str]]:
    """Every line, and the problem that it tells of, or ""."""
    yield fill(_heading(stage, run), COLUMNS), ""
    for name, one in demos.items():
        yield fill(f"{name}: {one.title}. {one.shows}", COLUMNS, initial_indent="\n"), ""
        for sayings in (_foreseen(one, stage), _steps(one, stage, run)):
            for said in sayings:
                line = fill(said.words, COLUMNS, initial_indent="  ", subsequent_indent="     ")
                yield line, "" if said.as_told else f"{name}: {said.words}"


def _verdict(problems: list[str]) -> str:
    if not problems:
        return "\nEverything goes as the demos say."
    count = f"{len(problems)} thing{' does' if len(problems) == 1 else 's do'} not go as the demos say:"
    return "\n".join(
        ["", count, *(fill(problem, COLUMNS, initial_indent="  ", subsequent_indent="     ") for problem in problems)]
    )


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
