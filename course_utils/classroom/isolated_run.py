"""Run a notebook's cells alone: in the learners' copy of the course, which has no solutions, and kept apart.

docs/classroom.md says what code can still do that was written for the purpose: behind walls, within a fence,
or where the system has neither. Walls are taken where there are any; else the fence, if there is one.
"""

import atexit
import compileall
import contextlib
import functools
import json
import os
import shutil
import site
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from ..interactive.course_files import IS_CLONE, PACKAGE, ROOT
from .graded_process import REFUSED, Limits
from .grading_results import STATES, Outcome, printable
from .release import release

LATE_SECONDS = 60.0
"""Seconds that a process may take after a notebook's time to end it and all that it started."""

LARGEST_RESULTS = 1_000_000
HIDDEN = (ROOT, PACKAGE)
"""The folders with solutions: a clone, or a started course and the package that has the wheel's own copy."""
LIBRARIES = () if IS_CLONE else (PACKAGE.parent,)  # a wheel's neighbors, which a notebook needs

GUARANTEES = tomllib.loads(Path(__file__).with_name("isolation.toml").read_text(encoding="utf-8"))

SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc", "/sys", "/nix", "/gnu")
"""Folders of programs and libraries that a Python may need."""

OF_WINDOWS = (
    "SYSTEMROOT",
    "SYSTEMDRIVE",
    "WINDIR",
    "COMSPEC",
    "PATHEXT",
    "NUMBER_OF_PROCESSORS",
    "PROCESSOR_ARCHITECTURE",
)
KEPT = ("PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", *OF_WINDOWS)
"""The variables of the grader's environment that a notebook gets. Others hold tokens and addresses."""


@dataclass(frozen=True)
class Isolation:
    """Learners' course, what keeps notebooks apart ("walls", "fence", ""), what is shown, why not more."""

    course: Path
    kind: str
    shown: tuple[str, ...] = ()
    why_not_more: str = ""

    @property
    def words(self) -> str:
        """The guarantees that hold here, for the command line and the page."""
        return " ".join(GUARANTEES[self.kind or "nothing"].split()).format(why=self.why_not_more)


@functools.cache
def isolation() -> Isolation:
    """The isolation that this machine has, found out by running a notebook. Call it before starting threads.

    Raises ValueError if no notebook can run here at all, or if the course cannot be released.
    """
    course = Path(tempfile.mkdtemp(prefix="course-copy-")).resolve() / "course"
    atexit.register(shutil.rmtree, course.parent, ignore_errors=True)
    release(course)
    compileall.compile_dir(course / "course_utils", quiet=2)
    shown = tuple(map(str, _shown(course)))
    problem = f"{sys.platform} has no such thing"
    kinds = ("walls", "fence") if sys.platform == "linux" else ()
    for kind in kinds:
        tried = Isolation(course, kind, shown, problem)
        # behind walls, what is hidden is covered; a fence can only show whole folders
        if kind == "fence" and any(one.is_relative_to(path) for one in HIDDEN for path in shown):
            problem += "; the course lies in a folder that Python needs"
            continue
        why = _probe(tried)
        if not why:
            return tried
        why = why.removeprefix(REFUSED)
        problem = why if kind == "walls" else f"{problem}; {why}"
    bare = Isolation(course, "", (), problem)
    problem = _probe(bare)
    if problem:
        raise ValueError(f"no notebook can be graded here, not even one that only imports torch: {problem}")
    return bare


def _probe(isolation: Isolation) -> str:
    """The reason why a notebook that imports torch does not run; "" if it does."""
    probe = [{"source": "import torch\nprint('✓')", "exercise": "probe"}]
    found, problem = run_alone(probe, "course_utils.interactive.feedback", Limits(), isolation)
    probed = found.get("probe", Outcome("not reached"))
    if probed.state == "passed":
        return ""
    return problem or f"{probed.state}: {probed.said}"


def run_alone(
    cells: list[dict[str, str]], checks: str, limits: Limits, isolation: Isolation
) -> tuple[dict[str, Outcome], str]:
    """Run a notebook; returns the outcomes of its checks, and why it ended early, if it did."""
    holder = tempfile.TemporaryDirectory(prefix="course-grading-", ignore_cleanup_errors=True)
    with (
        tempfile.TemporaryFile() as task,
        tempfile.TemporaryFile() as report,
        tempfile.TemporaryFile() as results,
    ):
        home = Path(holder.name).resolve()
        asked = {
            "cells": cells,
            "checks": checks,
            "home": str(home),
            "limits": limits._asdict(),
            "grader": os.getpid(),
            "kind": isolation.kind,
            "shown": isolation.shown,
            "hidden": [str(folder) for folder in HIDDEN],
        }
        task.write(json.dumps(asked).encode())
        task.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-m", "course_utils.classroom.graded_process"],
            cwd=home,
            env=environment(home, isolation.course),
            stdin=task,
            stdout=report,
            stderr=results,
            start_new_session=True,
        )
        problem = _why_not_ended(process, limits)
        said = printable(_text_of(report))
        lines = _text_of(results)
    try:
        holder.cleanup()
    except RecursionError:  # Python before 3.13 removes a folder in each folder by a call in each call
        said = said or f"left folders too deep to be removed in {holder.name}"
    return _outcomes(lines), problem or said


def _why_not_ended(process: "subprocess.Popen[bytes]", limits: Limits) -> str:
    """Wait for a process and end it; returns why it did not end well by itself, or ""."""
    try:
        code = process.wait(timeout=limits.clock + LATE_SECONDS)
    except subprocess.TimeoutExpired:
        return f"could not be ended in {LATE_SECONDS:g} s"
    finally:
        process.kill()
        process.wait()
    return f"ended together with the process that watched it (code {code})" if code else ""


def _text_of(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read(LARGEST_RESULTS).decode("utf-8", "replace")


def environment(home: Path, course: Path) -> dict[str, str]:
    """The environment of a notebook: nothing of the grader's but `KEPT`, and a home of its own."""
    paths = [str(course), *(str(path) for path in _added_paths())]
    kept = {name: os.environ[name] for name in KEPT if name in os.environ}
    return {
        **kept,
        "HOME": str(home),
        "USERPROFILE": str(home),
        "TMPDIR": str(home / "work"),
        "TEMP": str(home / "work"),
        "TMP": str(home / "work"),
        "COURSE_HOME": str(home / "course"),
        "IPYTHONDIR": str(home / "ipython"),
        "COURSE_SOURCE": "simulated",
        "OMP_NUM_THREADS": "1",
        "MPLBACKEND": "agg",
        "PYTHONPATH": os.pathsep.join(paths),
    }


def _added_paths() -> list[Path]:
    """Folders of packages that PYTHONPATH names, or that this user has; not those of the course."""
    named = [*os.environ.get("PYTHONPATH", "").split(os.pathsep), site.getusersitepackages()]
    found = [Path(name).resolve() for name in named if name in sys.path and Path(name).is_dir()]
    in_course = [path for path in found if ROOT.is_relative_to(path) or path.is_relative_to(ROOT)]
    return [path for path in found if path not in in_course or path in LIBRARIES]


def _shown(course: Path) -> list[Path]:
    """The files of this machine that a notebook sees: the system's programs, this Python, and the copy."""
    python = [Path(name) for name in (sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix)]
    libraries = [Path(name) for name in os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep) if name]
    system = [Path(name) for name in SYSTEM]
    every: list[Path] = []
    for one in [*system, *python, Path(sys.executable).parent, *libraries, *_added_paths(), course]:
        for path in (one.resolve(), one.absolute()):  # a link, and where it leads
            if path.exists() and path not in every:
                every.append(path)
    needed = [*system, *python, *LIBRARIES]
    return [path for path in every if not ROOT.is_relative_to(path) or path in needed]


def _outcomes(results: str) -> dict[str, Outcome]:
    """Results that the worker wrote before it ended. Other lines are the learner's code's, and ignored."""
    found = {}
    for line in results.split("\n")[:-1]:
        with contextlib.suppress(ValueError, RecursionError, TypeError, KeyError):
            entry = json.loads(line)
            exercise = entry["exercise"]
            state = entry["state"]
            said = printable(entry["said"])
            if isinstance(exercise, str) and state in STATES:
                found[exercise] = Outcome(state, said)
    return found
