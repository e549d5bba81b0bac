"""Grade a folder or a .zip of notebooks: a row for each file, in grades.csv and in a table at the end.

Each notebook runs in a process of its own, with limits, and on Linux behind a fence. Whatever it does costs
its own row alone. docs/classroom.md says what that does not promise.
"""

import csv
import json
import os
import site
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import suppress
from io import StringIO
from pathlib import Path
from typing import NamedTuple

import psutil

from .. import fence
from ..interactive.course_files import PACKAGE, ROOT, SHIPPED
from ..interactive.learner_folder import write_whole
from ..units import GB, MB, aligned
from .check_cells import Cells, cells_to_run
from .handed_in import Submission, handed_in, learners, printable

MOST_WRITTEN = 1_000 * MB
LARGEST_RESULTS = 1 * MB
POLL_SECONDS = 0.25

NO_FENCE = (
    "this system has no Landlock, so a notebook could read the solutions, other submissions and all your"
    " files. Grade on Linux 5.13 or newer, or add --unfenced if you trust everyone who handed in"
)
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc", "/sys", "/proc", "/nix", "/gnu")
OF_WINDOWS = ("SYSTEMROOT", "SYSTEMDRIVE", "WINDIR", "COMSPEC", "PATHEXT", "NUMBER_OF_PROCESSORS")
KEPT = ("PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", *OF_WINDOWS)
"""The variables of the grader's environment that a notebook gets. Others hold tokens and addresses."""

FORMULA = tuple("=+-@＝＋－＠")
"""Characters with which a spreadsheet's formula begins; a Japanese one takes the wide ones, too."""


class Row(NamedTuple):
    """One file: the learner whom its name suggests, the result of each exercise, and a remark."""

    file: str
    learner: str
    results: dict[str, str]
    remark: str

    @property
    def total(self) -> int:
        return list(self.results.values()).count("passed")


class Limits(NamedTuple):
    """Limits of one notebook: minutes by the clock, bytes of memory per process; and whether it is fenced."""

    minutes: float = 10.0
    memory: int = 12 * GB  # torch alone maps several GB and uses few
    fenced: bool = True


LIMITS = Limits()


def run(chosen: Namespace) -> int:
    """`grade FOLDER [--out DIR] [--minutes M] [--memory GB] [--jobs N] [--unfenced]`."""
    if min(chosen.minutes, chosen.memory) <= 0 or chosen.jobs < 1:
        raise ValueError("--minutes and --memory must be above 0, --jobs at least 1")
    if not chosen.unfenced and not fence.version():
        raise ValueError(NO_FENCE)
    chosen.out.mkdir(parents=True, exist_ok=True)
    table = chosen.out / "grades.csv"
    rows: list[Row] = []

    def done(row: Row) -> None:
        rows.append(row)
        write_table(rows, table)
        print(f"{len(rows)} done: {row.file}", flush=True)

    limits = Limits(chosen.minutes, int(chosen.memory * GB), not chosen.unfenced)
    try:
        grade(chosen.folder, done, limits, chosen.jobs)
    finally:
        if rows:
            print(f"\n{summary(rows)}\n{len(rows)} rows in {table}")
    return 0


def grade(place: Path, done: Callable[[Row], None], limits: Limits = LIMITS, jobs: int = 2) -> None:
    """Grade every file in a folder or a .zip, `jobs` at a time; call `done` with each row.

    Raises ValueError and OSError as `handed_in` does. However this ends, no notebook goes on.
    """
    with tempfile.TemporaryDirectory(prefix="course-handed-in-") as unpacked:
        waiting = handed_in(place, Path(unpacked))
        names = learners([one.file for one in waiting])
        queue = [
            (one, Row(printable(one.file), name, {}, "")) for one, name in zip(waiting, names, strict=True)
        ]
        running: list[Notebook] = []
        try:
            while queue or running:
                while queue and len(running) < jobs:
                    submission, row = queue.pop(0)
                    try:
                        running.append(Notebook(submission, row, limits, place))
                    except (ValueError, OSError) as problem:
                        done(row._replace(remark=printable(str(problem))))
                time.sleep(POLL_SECONDS)
                for one in [one for one in running if one.is_over()]:
                    running.remove(one)
                    done(one.ended())
        finally:
            for one in running:
                one.end()


class Notebook:
    """A notebook that is being executed, in a process and a folder of its own."""

    def __init__(self, submission: Submission, row: Row, limits: Limits, place: Path) -> None:
        """Start it. Raises ValueError, whose words are the remark, for what is no notebook of the course."""
        if submission.problem:
            raise ValueError(submission.problem)
        cells, self.remark = cells_to_run(submission.path)
        results = {cell["exercise"]: "not reached" for cell in cells if "exercise" in cell}
        self.row = row._replace(results=results)
        self.problem = ""
        self.limits = limits
        self.until = time.monotonic() + 60 * limits.minutes
        self.holder = tempfile.TemporaryDirectory(prefix="course-grade-", ignore_cleanup_errors=True)
        self.folder = Path(self.holder.name).resolve()
        self.home = self.folder / "home"
        self.process = self._start(cells, place)

    def _start(self, cells: Cells, place: Path) -> "subprocess.Popen[bytes]":
        self.home.mkdir()
        course = PACKAGE.parent
        if self.limits.fenced:  # what lies next to the package stays out of sight
            course = self.folder / "course"
            course.mkdir()
            (course / PACKAGE.name).symlink_to(PACKAGE)
        added = [name for name in (site.getusersitepackages(), *_path("PYTHONPATH")) if name in sys.path]
        libraries = [name for name in added if Path(name).resolve() not in (ROOT, PACKAGE.parent)]
        python = (sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix)
        packages = [name for name in sys.path if name.endswith("-packages")]
        readable = [*SYSTEM, *python, *packages, *libraries, *_path("LD_LIBRARY_PATH"), PACKAGE, course]
        task = {
            "fenced": self.limits.fenced,
            "readable": [str(Path(path).resolve()) for path in readable],
            "hidden": [str(path.resolve()) for path in (ROOT, SHIPPED, place)],
            "memory": self.limits.memory,
            "cells": [{"source": "import torch, course_utils"}, *cells],
        }
        (self.folder / "task.json").write_text(json.dumps(task), encoding="utf-8")
        with (self.folder / "results").open("wb") as results:
            return subprocess.Popen(
                [sys.executable, "-m", "course_utils.teaching.graded_notebook", str(self.folder)],
                cwd=self.home,
                env=environment(self.home, [str(course), *libraries]),
                stdin=subprocess.PIPE,
                stdout=results,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )

    def is_over(self) -> bool:
        """True when it has ended, or has to be; then `problem` says why, unless it ended well."""
        code = self.process.poll()
        if code:
            self.problem = f"its process was ended ({code})"
        elif time.monotonic() > self.until:
            self.problem = f"ended after {self.limits.minutes:g} minutes: does something in it run for ever?"
        elif _bytes_below(self.home) > MOST_WRITTEN:
            self.problem = f"ended: it wrote more than {MOST_WRITTEN // MB:,} MB of files"
        return code is not None or bool(self.problem)

    def ended(self) -> Row:
        """End what is left of it, and return its row: what the checks said until then."""
        for line in self.end().splitlines():
            with suppress(ValueError, TypeError, KeyError, RecursionError):
                told = json.loads(line)
                self.problem = self.problem or str(told.get("problem", ""))
                if told.get("exercise") in self.row.results:
                    self.row.results[told["exercise"]] = printable(told["result"])
        if "not reached" in self.row.results.values():
            self.problem = self.problem or "ended before its last check"
        remarks = filter(None, (self.remark, self.problem))
        return self.row._replace(remark=printable(", ".join(remarks)))

    def end(self) -> bytes:
        """End its process and all that it started, and remove its files; returns what its checks said."""
        for _ in range(10):
            found = _processes(self.process.pid, self.home)
            for other in found:
                with suppress(psutil.Error):
                    other.kill()
            if not found:
                break
        self.process.kill()
        self.process.communicate()
        with (self.folder / "results").open("rb") as file:
            results = file.read(LARGEST_RESULTS)
        with suppress(RecursionError):  # of a folder in each folder, before Python 3.13
            self.holder.cleanup()
        return results


def _processes(started: int, home: Path) -> list[psutil.Process]:
    """The descendants of a process, and all who have this home: some leave their family."""
    found: list[psutil.Process] = []
    with suppress(psutil.Error):
        found += psutil.Process(started).children(recursive=True)
    for other in psutil.process_iter():
        with suppress(psutil.Error):
            if other.environ().get("TMPDIR") == str(home):
                found.append(other)
    return found


def _path(variable: str) -> list[str]:
    return [name for name in os.environ.get(variable, "").split(os.pathsep) if name]


def environment(home: Path, python_path: Sequence[str]) -> dict[str, str]:
    """The environment of a notebook: nothing of the grader's but `KEPT`, and a home of its own."""
    kept = {name: os.environ[name] for name in KEPT if name in os.environ}
    homes = dict.fromkeys(("HOME", "USERPROFILE", "COURSE_HOME", "TMPDIR", "TEMP", "TMP"), str(home))
    return {
        **kept,
        **homes,
        "COURSE_SOURCE": "simulated",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "MPLBACKEND": "agg",
        "PYTHONPATH": os.pathsep.join(python_path),
    }


def _bytes_below(folder: Path) -> int:
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):  # removed meanwhile
                total += Path(place, name).lstat().st_size
    return total


def write_table(rows: Sequence[Row], path: Path) -> None:
    """Write a row for each file. A reader finds the table before or after, never half of it."""
    exercises = sorted({name for row in rows for name in row.results})
    text = StringIO()
    table = csv.writer(text)
    table.writerow(["file", "learner", *exercises, "total", "remark"])
    for row in sorted(rows, key=lambda row: row.file):
        cells = [row.results.get(name, "") for name in exercises]
        total = str(row.total) if row.results else ""
        table.writerow(map(_plain, (row.file, row.learner, *cells, total, row.remark)))
    write_whole(path, text.getvalue(), newline="")


def _plain(text: str) -> str:
    """Text that no spreadsheet takes for a formula, nor splits where semicolons separate cells."""
    text = text.replace(";", ",")
    first = next((letter for letter in text if letter.isprintable() and not letter.isspace()), "")
    return f"'{text}" if first in FORMULA else text


def summary(rows: Sequence[Row]) -> str:
    """A table of all files for the terminal."""
    shown = [("file", "learner", "lesson", "passed", "remark")]
    for row in sorted(rows, key=lambda row: row.file):
        lesson = next(iter(row.results), "")[:2]
        passed = f"{row.total} of {len(row.results)}" if row.results else "nothing"
        shown.append((row.file, row.learner, lesson, passed, row.remark))
    return aligned(shown, words=5)
