"""Collect and grade a folder of notebooks: each alone in a process with limits, a table and a page for the class.

What the isolation is: a notebook that crashes, hangs, fills memory or the disk, or leaves processes behind costs only
itself; it runs in an empty folder and with a home of its own. What it is not: a prison. It runs as the user who grades,
can read and write what that user can, and can reach the network; processes started without end can stop the machine;
and code written for the purpose can report checks as passed. For an exam, grade in a container or as another user, and
look at the answers of those that matter.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..notebook_files import numbered
from ..units import GB
from .collecting import Submission, collected
from .graded import STATES, Graded, Journal, Outcome, write_table

ROOT = Path(__file__).resolve().parents[2]
SECONDS, MEMORY = 300.0, 12 * GB
"""What a notebook may take of the processor, and of addresses: torch alone maps several GB, of which it uses few."""

CHECK = re.compile(r"check\.\w+\(")
LARGEST_RESULTS = 1_000_000
PATIENCE = 4
"""How many times its seconds of the processor a notebook may take by the clock: others work, too, and sleeping ends."""


def grade(
    place: Path,
    seconds: float = SECONDS,
    memory: int = MEMORY,
    jobs: int = 2,
    told: Callable[[Graded], None] = lambda _: None,
    journal: Path | None = None,
) -> list[Graded]:
    """Grade every notebook in a folder or an archive, `jobs` at a time, each with at most `seconds` of the processor
    (by the clock four times that) and `memory` bytes.

    `told` hears of each as it is done. What is in the file `journal` already is not graded again, unless the notebook,
    the course's exercises and checks, or the limits have changed. Raises ValueError as `collected` does.
    """
    with tempfile.TemporaryDirectory(prefix="course-collected-") as scratch, ThreadPoolExecutor(jobs) as pool:
        found = collected(place, Path(scratch))
        notes = Journal(journal, f"{seconds} {memory}")

        def one(submission: Submission) -> Graded:
            known = notes.recall(submission)
            graded = known or _grade(submission, seconds, memory)
            told(graded)
            if not known:
                notes.write(submission, graded)
            return graded

        return _counted(found, list(pool.map(one, found)))


def _grade(one: Submission, seconds: float, memory: int) -> Graded:
    if one.problem:
        return Graded(one.learner, "", {}, one.problem, 0.0, one.file)
    return replace(grade_notebook(one.path, one.learner, seconds, memory), file=one.file)


def _counted(found: Sequence[Submission], graded: Sequence[Graded]) -> list[Graded]:
    """The same, in which of a learner's notebooks of one lesson only the newest counts; of equally old, the last."""
    latest: dict[tuple[str, str], tuple[float, str]] = {}
    for submission, one in zip(found, graded, strict=True):
        key, age = (one.learner, one.lesson), (submission.time, one.file)
        latest[key] = max(latest.get(key, age), age)
    return [replace(one, counts=not one.lesson or latest[one.learner, one.lesson][1] == one.file) for one in graded]


def grade_notebook(path: Path, learner: str, seconds: float = SECONDS, memory: int = MEMORY) -> Graded:
    """Grade one notebook in a process of its own. Never raises for what a notebook does or is."""
    began = time.monotonic()
    try:
        submitted = _content(path)
        reference = reference_of(submitted)
        cells = merged(submitted, reference)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return Graded(learner, "", {}, f"cannot be read: {_printable(str(error))}", 0.0)
    found, problem = _run(cells, lesson_of(reference), seconds, memory)
    outcomes = {
        cell["exercise"]: found.get(cell["exercise"], Outcome("not reached")) for cell in cells if "exercise" in cell
    }
    if not problem and any(outcome.state == "not reached" for outcome in outcomes.values()):
        problem = "ended itself before its last check"
    return Graded(learner, lesson_of(reference), outcomes, problem, time.monotonic() - began)


def _content(path: Path) -> dict[str, Any]:
    text = path.read_text(encoding="utf-8")
    if not text.strip():
        raise ValueError("it is empty")
    return json.loads(text)


def reference_of(submitted: dict[str, Any]) -> dict[str, Any]:
    """The exercises that a submission began as, by its cells' ids. Raises ValueError if it is none of the course's."""
    found: dict[int, dict[str, Any]] = {}
    for path in numbered(ROOT / "exercises"):
        notebook = json.loads(path.read_text(encoding="utf-8"))
        found[_likeness(submitted, notebook)] = notebook
    best = max(found, default=0)
    if not best:
        raise ValueError("its cells are those of none of the course's exercises")
    return found[best]


def _likeness(submitted: dict[str, Any], reference: dict[str, Any]) -> int:
    """How many cells of the reference are in the submission, by id; without ids, how many of its checks, by source."""
    ids = {_id(cell) for cell in submitted["cells"]}
    by_id = sum(cell["id"] in ids for cell in reference["cells"])
    sources = {"".join(cell["source"]).strip() for cell in submitted["cells"]}
    return by_id or sum(check["source"] in sources for check in check_cells(reference).values())


def _id(cell: dict[str, Any]) -> str:
    """A cell's id: where notebooks have it since nbformat 4.5, or in its metadata, where Colab puts it."""
    return str(cell.get("id") or cell.get("metadata", {}).get("id", ""))


def lesson_of(reference: dict[str, Any]) -> str:
    """ "06" for the exercises of lesson 06."""
    return str(reference["cells"][0]["id"])[:2]


def merged(submitted: dict[str, Any], reference: dict[str, Any]) -> list[dict[str, str]]:
    """The learner's code cells in their order, with the course's own check cells in the place of theirs.

    A check cell that the learner deleted comes at the end, so that its exercise is judged all the same.
    """
    checks = check_cells(reference)
    ids = {_id(cell) for cell in submitted["cells"]}
    without_id = {check["source"]: key for key, check in checks.items() if key not in ids}
    cells: list[dict[str, str]] = []
    for cell in submitted["cells"]:
        if cell["cell_type"] == "code":
            source = "".join(cell["source"])
            own = checks.pop(_id(cell), None) or checks.pop(without_id.get(source.strip(), ""), None)
            cells.append(own or {"source": source})
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
        _end_strays(home)
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


def _end_strays(home: Path) -> None:
    """End what the notebook started in sessions of their own, told by the home that they have inherited (Linux)."""
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # gone by now, or somebody else's
            if f"HOME={home}".encode() in environment.read_bytes().split(b"\0"):
                os.kill(int(environment.parent.name), signal.SIGKILL)


def _outcomes(results: Path) -> dict[str, Outcome]:
    """What the worker wrote before it ended, line by line. The file was open to the learner's code: what is no line of
    the worker's, such as one cut short at the end, says nothing.
    """
    found: dict[str, Outcome] = {}
    if not results.is_file():
        return found
    with results.open(encoding="utf-8", errors="replace") as file:
        for line in file.read(LARGEST_RESULTS).splitlines(keepends=True):
            entry = _entry(line)
            if line.endswith("\n") and entry.get("state") in STATES:
                found[entry["exercise"]] = Outcome(entry["state"], _printable(entry["said"]))
    return found


def _entry(line: str) -> dict[str, str]:
    """A line of the worker's; nothing for another."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):  # not JSON: cut short, or not by the worker
        return {}
    keys = {"exercise", "state", "said"}
    is_ours = isinstance(entry, dict) and entry.keys() == keys and all(isinstance(entry[key], str) for key in keys)
    return entry if is_ours else {}


def _printable(text: str) -> str:
    """Text without what no file in UTF-8 holds: lone surrogates."""
    return text.encode("utf-8", "replace").decode("utf-8")


def main(arguments: Sequence[str]) -> int:
    """`grade FOLDER [--out DIR] [--minutes M] [--jobs N] [--again]`: a line a notebook, grades.csv, class.html."""
    from .page import class_page

    options = _options(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    journal = options.out / "journal.jsonl"
    if options.again:
        journal.unlink(missing_ok=True)
    limits = 60 * options.minutes, int(options.memory * GB)
    graded = grade(options.folder, *limits, options.jobs, told=_tell, journal=journal)
    write_table(graded, options.out / "grades.csv")
    (options.out / "class.html").write_text(class_page(graded), encoding="utf-8")
    older = sum(not one.counts for one in graded)
    words = f", of which {older} do not count, as their learners handed in newer ones" if older else ""
    print(f"{len(graded)} notebooks{words}: {options.out / 'grades.csv'}, {options.out / 'class.html'}")
    return 0


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    """What the command line asks for. ValueError for limits under which nothing could run."""
    parser = argparse.ArgumentParser(prog="python3 -m course_utils grade", description=__doc__)
    parser.add_argument(
        "folder", type=Path, help="holds the learners' notebooks: a folder, or a .zip as Moodle or Canvas makes it"
    )
    parser.add_argument("--out", type=Path, default=Path("grades"), help="folder for grades.csv and class.html")
    parser.add_argument(
        "--minutes", type=float, default=SECONDS / 60, help="of the processor that one notebook may take"
    )
    parser.add_argument("--memory", type=float, default=MEMORY / GB, help="GB that one notebook may ask for")
    parser.add_argument("--jobs", type=int, default=2, help="notebooks graded at once")
    parser.add_argument("--again", action="store_true", help="grade anew what --out holds from an earlier call")
    options = parser.parse_args(arguments)
    if options.minutes <= 0 or options.memory <= 0 or options.jobs < 1:
        raise ValueError("--minutes and --memory must be above 0, --jobs at least 1")
    return options


def _tell(one: Graded) -> None:
    count = f"{one.passed} of {len(one.outcomes)}" if one.outcomes else "nothing"
    print(f"{one.learner}: {count} passed{f' ({one.problem})' if one.problem else ''}", flush=True)
