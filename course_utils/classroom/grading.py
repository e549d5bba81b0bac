"""Collect and grade a folder of notebooks, each alone in a process with limits; write a table and a page.

A notebook that crashes, hangs, fills memory or its folder, cannot be read, or leaves processes behind costs
only itself: it gets a remark. docs/classroom.md says what code written to do harm can do on which system.
Nowhere does anything keep such code from reporting its own checks as passed.
"""

import json
import re
import time
from argparse import Namespace
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ..interactive.course_files import LESSONS, numbered
from ..interactive.learner_folder import write_whole
from ..interactive.progress import HEADING
from ..units import GB, MB
from .collecting import Submission, collected, problem_of
from .graded_process import Limits
from .grading_results import Graded, Outcome, class_page, write_table
from .isolated_run import ROOT, isolation, run_alone

CHECK = re.compile(r"check\.\w+\(")
DEFAULTS = Limits()


def grade(place: Path, most: Limits = DEFAULTS, jobs: int = 2) -> list[Graded]:
    """Grade every notebook in a folder or an archive, `jobs` at a time; print a line for each that is done.

    Whatever is wrong with a submission becomes its `problem`. Raises ValueError as `collected` and
    `isolation` do.
    """
    with TemporaryDirectory(prefix="course-collected-") as scratch:
        found = collected(place, Path(scratch))
        isolation()  # before threads are started, as it asks
        with ThreadPoolExecutor(jobs) as pool:
            graded = list(pool.map(partial(_grade_and_print, most=most), found))
        return _counted(found, graded)


def _grade_and_print(submission: Submission, most: Limits) -> Graded:
    graded = Graded(submission.learner, "", {}, submission.problem, 0.0)
    if not submission.problem:
        try:
            graded = grade_notebook(submission.path, submission.learner, most)
        except Exception as error:  # of any kind: the others have to be graded
            graded = graded._replace(problem=f"cannot be graded: {problem_of(error)}")
    graded = graded._replace(file=submission.file)
    count = f"{graded.passed} of {len(graded.outcomes)}" if graded.outcomes else "nothing"
    remark = f" ({graded.problem})" if graded.problem else ""
    print(f"{graded.learner}: {count} passed{remark}", flush=True)
    return graded


def _counted(found: Sequence[Submission], graded: Sequence[Graded]) -> list[Graded]:
    """The same; of a learner's notebooks of one lesson only the newest counts, of equally old the last."""
    latest: dict[tuple[str, str], tuple[float, str]] = {}
    for submission, one in zip(found, graded, strict=True):
        key = (one.learner, one.lesson)
        age = (submission.time, one.file)
        latest[key] = max(latest.get(key, age), age)
    counted: list[Graded] = []
    for one in graded:
        _, newest = latest[one.learner, one.lesson]
        counted.append(one._replace(counts=not one.lesson or one.file == newest))
    return counted


def grade_notebook(path: Path, learner: str, most: Limits = DEFAULTS) -> Graded:
    """Grade one notebook in a process of its own. Never raises for what a notebook does or is."""
    began = time.monotonic()
    try:
        submitted = _content(path)
        reference = reference_of(submitted)
        cells = merged(submitted, reference)
    except Exception as error:  # of any kind: whatever was handed in
        return Graded(learner, "", {}, f"cannot be read: {problem_of(error)}", 0.0)
    lesson = lesson_of(reference)
    checks = f"course_utils.lessons.{LESSONS[int(lesson)]}.checks"
    found, problem = run_alone(cells, checks, most, isolation())
    exercises = [cell["exercise"] for cell in cells if "exercise" in cell]
    outcomes = {exercise: found.get(exercise, Outcome("not reached")) for exercise in exercises}
    if not problem and any(outcome.state == "not reached" for outcome in outcomes.values()):
        problem = "ended itself before its last check"
    return Graded(learner, lesson, outcomes, problem, time.monotonic() - began)


def _content(path: Path) -> dict[str, Any]:
    """A notebook's JSON, which may be in UTF-8, with or without a mark of that, in UTF-16 or in UTF-32."""
    content = json.loads(path.read_bytes())
    if not isinstance(content, dict) or not isinstance(content.get("cells"), list):
        raise ValueError("it is JSON but not a notebook: it has no list of cells")
    return content


def reference_of(submitted: dict[str, Any]) -> dict[str, Any]:
    """The exercises that a submission began as. Raises ValueError if it is none of the course's."""
    found: dict[int, dict[str, Any]] = {}
    for path in numbered(ROOT / "exercises"):
        notebook = json.loads(path.read_text(encoding="utf-8"))
        found[_likeness(submitted, notebook)] = notebook
    best = max(found, default=0)
    if not best:
        raise ValueError("its cells belong to none of the course's exercises")
    return found[best]


def _likeness(submitted: dict[str, Any], reference: dict[str, Any]) -> int:
    """Number of the reference's cells in the submission, by id; without ids, of its checks, by source."""
    ids = {_id(cell) for cell in submitted["cells"]}
    by_id = sum(cell["id"] in ids for cell in reference["cells"])
    sources = {"".join(cell["source"]).strip() for cell in submitted["cells"]}
    if by_id:
        return by_id
    return sum(check["source"] in sources for check in check_cells(reference).values())


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
            check = checks.pop(_id(cell), None)
            if check is None:
                check = checks.pop(without_id.get(source.strip(), ""), None)
            cells.append(check or {"source": source})
    return [*cells, *checks.values()]


def check_cells(reference: dict[str, Any]) -> dict[str, dict[str, str]]:
    """The cells of an exercise notebook that call a check, by id, with their exercise's number ("06.1")."""
    found = {}
    exercise = ""
    for cell in reference["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            heading = HEADING.search(source)
            if heading:
                exercise = f"{lesson_of(reference)}.{heading[1]}"
        if cell["cell_type"] == "code" and CHECK.match(source):
            found[cell["id"]] = {"source": source, "exercise": exercise}
    return found


def run(chosen: Namespace) -> int:
    """`grade FOLDER [--out DIR] [--minutes M] [--jobs N]`: a line a notebook, grades.csv, class.html."""
    if min(chosen.minutes, chosen.memory, chosen.disk) <= 0 or chosen.jobs < 1:
        raise ValueError("--minutes, --memory and --disk must be above 0, --jobs at least 1")
    chosen.out.mkdir(parents=True, exist_ok=True)
    table = chosen.out / "grades.csv"
    page = chosen.out / "class.html"
    most = Limits(60 * chosen.minutes, int(chosen.memory * GB), int(chosen.disk * MB))
    graded = grade(chosen.folder, most, chosen.jobs)
    write_table(graded, table)
    write_whole(page, class_page(graded, isolation().words))
    print(isolation().words)
    older = sum(not one.counts for one in graded)
    words = f", {older} of them not counted: their learners handed in newer ones" if older else ""
    print(f"{len(graded)} notebooks{words}: {table}, {page}")
    return 0
