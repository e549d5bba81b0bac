"""One training script through the whole course: lessons change a few lines, and a table shows the effect."""

import os
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from difflib import unified_diff
from hashlib import sha256
from html import escape
from pathlib import Path
from typing import Any

import torch

from ... import TrainingRun, estimate, replay
from ...errors import unknown
from ...interactive.course_files import HAS_FOLDER, ROOT, python_path
from ...interactive.learner_folder import clear_problems, course_home
from ...measuring.files import read_measurement
from ...measuring.recorded import Recording, newest
from ...units import Table, format_bytes, format_signed

STAGES: dict[str, dict[str, Any]] = tomllib.loads(
    Path(__file__).with_name("stages.toml").read_text(encoding="utf-8")
)
TORCH = "2.13.0"
"""The release of torch that the stored simulations ran on."""

OWN = "my_train.py"


@dataclass(frozen=True)
class Stage:
    """The script after a lesson: what the lesson `changes`, and the same training as a run, or None.

    `simulated` is the allocated peak in bytes, of rank 0 if the script is for several `ranks`.
    """

    lesson: str
    what: str
    run: TrainingRun | None
    simulated: int
    ranks: int = 1

    @property
    def file(self) -> Path:
        return ROOT / "notebooks" / "train" / f"train_{self.lesson}.py"

    @property
    def recording(self) -> Recording | None:
        """The recording of a GPU that executed exactly this text, or None."""
        text = sha256(self.file.read_bytes()).hexdigest()
        found = [one for one in newest("script") if one.task == f"script: {self.file.name}"]
        return next((one for one in found if one.parts["script"]["sha256"] == text), None)


def stages() -> list[Stage]:
    """All stages, in order; each run is the one before with what this lesson changes."""
    found = []
    choices: dict[str, Any] = {}
    for lesson, facts in STAGES.items():
        choices |= facts.get("run", {})
        run = TrainingRun(**choices) if "run" in facts else None
        found.append(Stage(**facts | {"lesson": lesson, "run": run}))
    return found


@dataclass(frozen=True, repr=False)
class Script:
    """The growing script in a lesson: the lesson's change, and the table up to here with the learner's copy.

    `own` is that copy, `peak` its allocated peak in bytes; `problem` says why it has none.
    """

    stages: list[Stage]
    own: Path
    peak: int | None
    problem: str = ""

    def __repr__(self) -> str:
        parts = [self.change(), repr(self.table()), *self.notes()]
        return "\n\n".join(filter(None, parts))

    def _repr_html_(self) -> str:
        lines = [_colored(line) for line in self.change().splitlines()]
        sheet = "background:#fff;color:#111;padding:.5em"
        change = f"<pre style='{sheet}'>{'<br>'.join(lines)}</pre>" if lines else ""
        notes = "".join(f"<p>{escape(note)}</p>" for note in self.notes())
        return change + self.table()._repr_html_() + notes

    def change(self) -> str:
        """The lines that this lesson changes, as a unified diff; "" for the first stage."""
        if len(self.stages) == 1:
            return ""
        before, after = (stage.file.read_text(encoding="utf-8").splitlines() for stage in self.stages[-2:])
        names = (stage.file.name for stage in self.stages[-2:])
        return "\n".join(unified_diff(before, after, *names, n=1, lineterm=""))

    def table(self) -> Table:
        """Rows of the stages, and one of the learner's copy: formula, simulation, what a GPU counted."""
        rows = [("lesson", "change", "estimated", "simulated", "gap", "counted", "tokens/s")]
        for stage in self.stages:
            estimated, gap = "no formula", ""
            if stage.run:
                total = estimate(stage.run).total
                estimated, gap = _gb(total), format_signed(total - stage.simulated)
            counted = speed = "not recorded"
            if found := stage.recording:
                counted = _gb(found.parts["script"]["allocated"])
                speed = f"{found.parts['script']['tokens_per_second']:,.0f}"
            rows.append((stage.lesson, stage.what, estimated, _gb(stage.simulated), gap, counted, speed))
        if self.peak is not None:
            rows.append(("", f"yours, {OWN}", "", _gb(self.peak), "", "", ""))
        return Table(rows, words=2)

    def notes(self) -> Iterator[str]:
        """Sentences on where the numbers come from, and on what the learner can do now."""
        yield f"Simulated: max_memory_allocated() by the allocator's rules, torch {TORCH}."
        yield from {f"Counted: {stage.recording.provenance}." for stage in self.stages if stage.recording}
        if self.problem:
            yield f"{OWN} could not be watched: {self.problem}"
        place = "" if HAS_FOLDER else f" in {self.own.parent}"
        yield f"{OWN}{place} is your copy: change it, and run this cell again. Nothing overwrites it."


def script(lesson: int) -> Script:
    """The growing script as `lesson` leaves it, next to the learner's own copy, which is watched here.

    Where there is no copy yet, the stage before this lesson's becomes it (lesson 01's own for the first): the
    learner applies the lesson's change. A copy that is there is only read. Raises ValueError for a lesson
    that does not change the script.
    """
    known = stages()
    numbers = [stage.lesson for stage in known]
    number = f"{lesson:02d}"
    if number not in numbers:
        raise unknown("stage of the script", number, numbers)
    shown = known[: numbers.index(number) + 1]
    own = _own_copy(shown[-2:][0])
    text = own.read_bytes()
    for stage in known:  # an unchanged stage needs no simulation, which takes half a minute if it compiles
        if text == stage.file.read_bytes() and torch.__version__.partition("+")[0] == TORCH:
            return Script(shown, own, stage.simulated)
    # somebody who comes back from a later lesson has a script for several ranks
    ranks = known[-1].ranks if b"init_process_group" in text else 1
    try:
        return Script(shown, own, watched(own, ranks))
    except ValueError as error:
        return Script(shown, own, None, str(error))


def all_stages() -> Table:
    """The table of every stage, without a learner's copy."""
    return Script(stages(), Path(OWN), None).table()


def _own_copy(stage: Stage) -> Path:
    """The learner's copy, next to the lessons; a new one has the text of `stage`.

    With COURSE_SCRIPTS, a folder, it lies there, and each stage begins one of its own, so that lessons that
    are tested side by side share none.
    """
    own = (ROOT / "notebooks" if HAS_FOLDER else course_home()) / OWN
    if os.environ.get("COURSE_SCRIPTS"):
        own = Path(os.environ["COURSE_SCRIPTS"]) / f"after_{stage.lesson}" / OWN
    with clear_problems():
        own.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError), own.open("x", encoding="utf-8") as file:  # never over what is there
            file.write(stage.file.read_text(encoding="utf-8"))
    return own


def watched(file: Path, ranks: int = 1) -> int:
    """The allocated peak in bytes of a script's second step on a simulated GPU, by `watch` as a process.

    Of several ranks it is rank 0's.

    Raises ValueError with what `watch` says of a script that it cannot follow.
    """
    with tempfile.TemporaryDirectory() as folder:
        saved = Path(folder) / "measurement.json"
        command = [sys.executable, "-m", "course_utils", "watch", "--save", str(saved)]
        command += [*(["--ranks", str(ranks)] if ranks > 1 else []), str(file)]
        # the same card as in the course's own table, whatever is here
        variables = os.environ | {"PYTHONPATH": python_path(), "COURSE_SOURCE": "simulated"}
        done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ValueError(done.stderr.strip().splitlines()[-1])
        return replay(read_measurement(saved)).peak_allocated


def _gb(size: int) -> str:
    return format_bytes(size, "GB", 2)


def _colored(line: str) -> str:
    """A line of a diff as HTML; its sign tells what the color tells."""
    color = {"+": "#00624A", "-": "#A8071A"}.get(line[:1])
    text = escape(line)
    return f"<span style='color:{color}'>{text}</span>" if color else text
