"""Collect and grade a folder of notebooks: each alone in a process with limits, a table and a page for the class.

What the isolation is: a notebook that crashes, hangs, fills memory or the disk, or starts processes costs only itself;
it runs in an empty folder and with a home of its own. What it is not: a prison. It runs as the user who grades, can
read what that user can read, can reach the network, and code written for the purpose can report checks as passed. For
an exam, grade in a container or as another user, and look at the answers of those that matter.
"""

import csv
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..units import GB

ROOT = Path(__file__).resolve().parents[2]
SECONDS, MEMORY = 300.0, 12 * GB
"""What a notebook may take of the processor, and of addresses: torch alone maps several GB, of which it uses few."""

CHECK = re.compile(r"check\.\w+\(")
PATIENCE = 4
"""How many times its seconds of the processor a notebook may take by the clock: others work, too, and sleeping ends."""


@dataclass(frozen=True)
class Outcome:
    """What became of one exercise: "passed", "not solved", "not right", "error", "not checked" or "not reached", and
    what its check said.
    """

    state: str
    said: str = ""


@dataclass(frozen=True)
class Graded:
    """One notebook: whose (its path in the folder), of which lesson, what became of its exercises, and of itself.

    `problem` is "" unless the notebook could not be read, or was ended: then it says so in words.
    """

    learner: str
    lesson: str
    outcomes: dict[str, Outcome]
    problem: str
    seconds: float

    @property
    def passed(self) -> int:
        """How many of the exercises passed."""
        return sum(outcome.state == "passed" for outcome in self.outcomes.values())


def grade(
    folder: Path,
    seconds: float = SECONDS,
    memory: int = MEMORY,
    jobs: int = 2,
    told: Callable[[Graded], None] = lambda _: None,
) -> list[Graded]:
    """Grade every notebook below `folder`, `jobs` at a time, each with at most `seconds` of the processor (by
    the clock four times that) and `memory` bytes.

    `told` hears of each as it is done. Raises ValueError for a folder that is none or holds no notebooks.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder: name the one that holds the learners' notebooks")
    paths = sorted(path for path in folder.rglob("*.ipynb") if ".ipynb_checkpoints" not in path.parts)
    if not paths:
        raise ValueError(f"there is no notebook in {folder}")

    def one(path: Path) -> Graded:
        graded = grade_notebook(path, str(path.relative_to(folder).with_suffix("")), seconds, memory)
        told(graded)
        return graded

    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(one, paths))


def grade_notebook(path: Path, learner: str, seconds: float = SECONDS, memory: int = MEMORY) -> Graded:
    """Grade one notebook in a process of its own. Never raises for what a notebook does or is."""
    began = time.monotonic()
    try:
        submitted = json.loads(path.read_text(encoding="utf-8"))
        reference = reference_of(submitted)
        cells = merged(submitted, reference)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return Graded(learner, "", {}, f"cannot be read: {error}", 0.0)
    found, problem = _run(cells, lesson_of(reference), seconds, memory)
    outcomes = {
        cell["exercise"]: found.get(cell["exercise"], Outcome("not reached")) for cell in cells if "exercise" in cell
    }
    return Graded(learner, lesson_of(reference), outcomes, problem, time.monotonic() - began)


def reference_of(submitted: dict[str, Any]) -> dict[str, Any]:
    """The exercises that a submission began as, by its cells' ids. Raises ValueError if it is none of the course's."""
    ids = {cell.get("id", "") for cell in submitted["cells"]}
    found: dict[int, dict[str, Any]] = {}
    for path in sorted((ROOT / "exercises").glob("[0-9][0-9]_*.ipynb")):
        if ".edited-" not in path.name:
            notebook = json.loads(path.read_text(encoding="utf-8"))
            found[sum(cell["id"] in ids for cell in notebook["cells"])] = notebook
    best = max(found, default=0)
    if not best:
        raise ValueError("its cells are those of none of the course's exercises")
    return found[best]


def lesson_of(reference: dict[str, Any]) -> str:
    """ "06" for the exercises of lesson 06."""
    return str(reference["cells"][0]["id"])[:2]


def merged(submitted: dict[str, Any], reference: dict[str, Any]) -> list[dict[str, str]]:
    """The learner's code cells in their order, with the course's own check cells in the place of theirs.

    A check cell that the learner deleted comes at the end, so that its exercise is judged all the same.
    """
    checks = check_cells(reference)
    cells: list[dict[str, str]] = []
    for cell in submitted["cells"]:
        if cell["cell_type"] == "code":
            own = checks.pop(cell.get("id", ""), None)
            cells.append(own or {"source": "".join(cell["source"])})
    return [*cells, *checks.values()]


def check_cells(reference: dict[str, Any]) -> dict[str, dict[str, str]]:
    """The cells of an exercise notebook that call a check, by id, each with the number of its exercise ("06.1")."""
    found, exercise = {}, ""
    for cell in reference["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown" and source.startswith("## "):
            exercise = f"{lesson_of(reference)}.{source[3:].split(' ', 1)[0]}"
        if cell["cell_type"] == "code" and CHECK.match(source):
            found[cell["id"]] = {"source": source, "exercise": exercise}
    return found


def _run(cells: list[dict[str, str]], lesson: str, seconds: float, memory: int) -> tuple[dict[str, Outcome], str]:
    """What the checks said before the process ended, and why it ended early, if it did."""
    with tempfile.TemporaryDirectory(prefix="course-grading-", ignore_cleanup_errors=True) as name:
        home = Path(name)
        checks = f"course_utils.checks.lesson_{lesson}"
        task = {"cells": cells, "checks": checks, "memory": memory, "seconds": seconds}
        (home / "task.json").write_text(json.dumps(task), encoding="utf-8")
        (home / "work").mkdir()
        command = [sys.executable, "-m", "course_utils.classroom.worker"]
        command += ["--task", str(home / "task.json"), "--results", str(home / "results")]
        process = subprocess.Popen(
            command, cwd=home / "work", env=_environment(home), start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        problem = _wait(process, seconds)
        return _outcomes(home / "results"), problem


def _environment(home: Path) -> dict[str, str]:
    """The environment of whoever grades, with a home of the notebook's own, so that it finds and leaves nothing."""
    own = {"HOME": home, "COURSE_HOME": home / "course", "IPYTHONDIR": home / "ipython", "TMPDIR": home / "work"}
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    fixed = {"COURSE_SOURCE": "simulated", "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    return os.environ | {key: str(value) for key, value in own.items()} | fixed


def _wait(process: "subprocess.Popen[bytes]", seconds: float) -> str:
    """Why the process did not end by itself and well, in words; "" if it did. Its whole group is ended."""
    try:
        code = process.wait(timeout=PATIENCE * seconds)
        problem = "" if code == 0 else _ended(code, seconds)
    except subprocess.TimeoutExpired:
        problem = f"ended after {PATIENCE * seconds:g} s by the clock"
    finally:
        _end(process)
    return problem


def _ended(code: int, seconds: float) -> str:
    if code in (-getattr(signal, "SIGXCPU", 0), -getattr(signal, "SIGKILL", 0)):
        return f"ended by the system: more than {seconds:g} s of the processor, or too much memory"
    return f"crashed ({signal.Signals(-code).name})" if code < 0 else f"ended itself with code {code}"


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End the process and all that it started and did not move to another session."""
    if hasattr(os, "killpg"):
        with suppress(ProcessLookupError):  # none of them is left
            os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()
    process.wait()


def _outcomes(results: Path) -> dict[str, Outcome]:
    """What the worker wrote before it ended, line by line; a line cut short at its end says nothing."""
    found: dict[str, Outcome] = {}
    text = results.read_text(encoding="utf-8", errors="replace") if results.exists() else ""
    for line in text.splitlines(keepends=True):
        if line.endswith("\n"):
            entry = json.loads(line)
            found[entry["exercise"]] = Outcome(entry["state"], entry["said"])
    return found


def write_table(graded: Iterable[Graded], path: Path) -> None:
    """One row for each notebook and exercise: learner, lesson, exercise, state, what the check said, problem."""
    with path.open("w", encoding="utf-8", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["learner", "lesson", "exercise", "state", "said", "problem", "seconds"])
        for one in graded:
            end = [one.problem, f"{one.seconds:.0f}"]
            for exercise, outcome in one.outcomes.items():
                rows.writerow([one.learner, one.lesson, exercise, outcome.state, _plain(outcome.said), *end])
            if not one.outcomes:
                rows.writerow([one.learner, one.lesson, "", "", "", *end])


def _plain(text: str) -> str:
    """Text that no spreadsheet takes for a formula."""
    return f"'{text}" if text[:1] in ("=", "+", "-", "@") else text


def main(arguments: Sequence[str]) -> int:
    """`grade FOLDER [--out DIR] [--minutes M] [--jobs N]`: prints a line a notebook, writes grades.csv, class.html."""
    import argparse

    from .page import class_page

    parser = argparse.ArgumentParser(prog="python3 -m course_utils grade", description=__doc__)
    parser.add_argument(
        "folder", type=Path, help="holds the learners' notebooks, in folders of their own or side by side"
    )
    parser.add_argument("--out", type=Path, default=Path("grades"), help="folder for grades.csv and class.html")
    parser.add_argument(
        "--minutes", type=float, default=SECONDS / 60, help="of the processor that one notebook may take"
    )
    parser.add_argument("--memory", type=float, default=MEMORY / GB, help="GB that one notebook may ask for")
    parser.add_argument("--jobs", type=int, default=2, help="notebooks graded at once")
    options = parser.parse_args(arguments)
    if options.minutes <= 0 or options.memory <= 0 or options.jobs < 1:
        raise ValueError("--minutes and --memory must be above 0, --jobs at least 1")
    graded = grade(options.folder, 60 * options.minutes, int(options.memory * GB), options.jobs, told=_tell)
    options.out.mkdir(parents=True, exist_ok=True)
    write_table(graded, options.out / "grades.csv")
    (options.out / "class.html").write_text(class_page(graded), encoding="utf-8")
    print(f"{len(graded)} notebooks: {options.out / 'grades.csv'}, {options.out / 'class.html'}")
    return 0


def _tell(one: Graded) -> None:
    count = f"{one.passed} of {len(one.outcomes)}" if one.outcomes else "nothing"
    print(f"{one.learner}: {count} passed{f' ({one.problem})' if one.problem else ''}", flush=True)
