"""Faults: each kind of work is killed at random moments, or its disk fills up. Is all that a learner wrote
still there?

`python tests/faults.py --times 100 kernel build grader disk` prints a line for each kind, then every
fault. After each kill: nothing that was there before or was acknowledged is lost, no file is half of one, no
process is left (and so no port: a port is held by a process), and the same work can go on. Linux only. About
a second to ten each.
"""

import argparse
import csv
import ctypes
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import psutil
from jupyter_client.manager import KernelManager
from test_build import LESSON, SOLUTION, write_source

from course_utils import fence
from course_utils.authoring.build import write
from course_utils.authoring.sources import drafts
from course_utils.interactive.guesses import lock_guess, stored_guesses
from course_utils.interactive.progress import mark_passed, mark_quiz, passed, progress, quiz_scores
from course_utils.measuring.recording_file import append, read_lines, repair
from course_utils.teaching.grade import Row, write_table

SET_CHILD_SUBREAPER = 36  # from linux/prctl.h
ROOT = Path(__file__).resolve().parent.parent
LATE_SECONDS = 30.0
"""Within so many seconds of a kill everything that was started has to be gone."""

NEW_MOUNTS, NEW_USER = 0x20000, 0x10000000
DETACH, AND_BELOW, PRIVATE = 2, 1 << 14, 1 << 18
"""From linux/sched.h and linux/mount.h."""

TRACEBACK = "Traceback (most recent call last)"


class Work:
    """Something that is killed while it works in `folder`. `writes` are patterns of
    files to which it writes.
    """

    command: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.said = folder / "said"
        self.scratch = folder / "tmp"
        self.scratch.mkdir()

    def before(self, number: int) -> None:
        """Do the learner's or the teacher's part before the work is started for the `number`th time."""

    def start(self) -> "subprocess.Popen[bytes]":
        """Begin; what it says goes to a file."""
        environment = {
            **os.environ,
            "TMPDIR": str(self.scratch),
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
        }
        with self.said.open("wb") as said:
            return subprocess.Popen(
                [sys.executable, *self.command],
                cwd=self.folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def faults(self) -> Iterator[str]:
        """Sentences that say what is lost or half written, after a kill."""
        return iter(())

    def written(self) -> list[tuple[str, int]]:
        """The files that it writes, with the time of each: another answer means that it
        has begun to write.
        """
        paths = [path for pattern in self.writes for path in self.folder.glob(pattern)]
        return sorted((str(path), path.stat().st_mtime_ns) for path in paths if path.exists())


class Build(Work):
    """A build of a lesson and its exercises, in which a learner has changed cells since the last build."""

    writes = ("course/*/*.ipynb*",)

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        build = "from pathlib import Path; from course_utils.authoring.build import build_all"
        self.command = (
            "-c",
            f"import sys; {build}; sys.exit(build_all(Path(sys.argv[1])))",
            str(folder / "course"),
        )
        write_source(folder / "course", "notebooks", LESSON)
        write_source(folder / "course", "solutions", SOLUTION)
        self.marks: list[str] = []

    def before(self, number: int) -> None:
        for path in self.folder.glob("course/*/01_first.ipynb"):
            notebook = json.loads(path.read_text())
            mark = f"# learner {number} in {path.parent.name}"
            notebook["cells"][1]["source"] = [*notebook["cells"][1]["source"], f"\n{mark}"]
            path.write_text(json.dumps(notebook))
            self.marks.append(mark)

    def faults(self) -> Iterator[str]:
        texts = [path.read_text() for path in self.folder.glob("course/*/*.ipynb")]
        for text in texts:
            if not _is_json(text):
                yield f"half a notebook: {text[-80:]!r}"
        yield from (f"{mark} is lost" for mark in self.marks if not any(mark in text for text in texts))


SLOW = "import time; time.sleep(40)\n"
"""Longer than what is left behind has to end."""


class Grader(Work):
    """A class of three is graded."""

    writes = ("out/*",)

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.command = (
            "-m",
            "course_utils",
            "grade",
            str(folder / "class"),
            "--out",
            str(folder / "out"),
            "--here",
        )
        self.exercises = json.loads((ROOT / "exercises" / "04_counting_parameters.ipynb").read_text())
        self.handed_in: dict[Path, bytes] = {}
        for number in range(3):
            self.before(number)

    def before(self, number: int) -> None:
        path = self.folder / "class" / ("ada", "bob", "eve")[number % 3] / "04.ipynb"
        path.parent.mkdir(parents=True, exist_ok=True)
        cells = [
            *self.exercises["cells"][:2],
            {"cell_type": "code", "id": "own", "source": SLOW * (number % 8 == 3) + f"own = {number}"},
        ]
        path.write_text(json.dumps(self.exercises | {"cells": cells}))
        self.handed_in[path] = path.read_bytes()

    def faults(self) -> Iterator[str]:
        yield from (f"{path} was changed" for path, was in self.handed_in.items() if path.read_bytes() != was)
        table = self.folder / "out" / "grades.csv"
        if table.exists():
            with table.open(newline="") as file:
                rows = list(csv.reader(file))
            if rows[0][:2] != ["file", "learner"] or len({len(row) for row in rows}) != 1:
                yield f"half a table: {rows[-2:]}"


class Kernel(Work):
    """A notebook's kernel in which a learner passes exercises, finishes quizzes and locks guesses."""

    CELL = """
import os
from course_utils.interactive.progress import mark_passed, mark_quiz
from course_utils.interactive.guesses import lock_guess
acknowledged = os.open({said!r}, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
for step in range(25):
    name = "{number}.%d" % step
    mark_passed(name)
    os.write(acknowledged, f"exercise {{name}}\\n".encode())
    lock_guess(name, step, "GB")
    os.write(acknowledged, f"guess {{name}}\\n".encode())
    mark_quiz(1000 * {number} + step, 1, 2)
    os.write(acknowledged, f"quiz {{1000 * {number} + step}}\\n".encode())
"""

    def before(self, number: int) -> None:
        self.number = number
        if number % 10 == 0:  # a new machine now and then, as each mark reads all that came before
            os.environ["COURSE_HOME"] = str(self.folder / f"home{number}")
            self.acknowledged = list[str]()
        self.said.write_text("")

    def start(self) -> "subprocess.Popen[bytes]":
        manager = KernelManager(kernel_name="python3")
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(self.scratch)}
        manager.start_kernel(env=environment, cwd=str(self.folder), extra_arguments=["--log-level=ERROR"])
        client = manager.blocking_client()
        client.start_channels()
        client.wait_for_ready(timeout=90)
        client.execute(self.CELL.format(said=str(self.said), number=self.number))
        while not self.said.stat().st_size and manager.is_alive():
            time.sleep(0.005)
        client.stop_channels()
        return manager.provisioner.process  # pyrefly: ignore [missing-attribute]

    def faults(self) -> Iterator[str]:
        self.acknowledged += self.said.read_text().splitlines()
        there = {f"exercise {name}" for name in passed()} | {f"guess {name}" for name in stored_guesses()}
        there |= {f"quiz {number}" for number in quiz_scores()}
        yield from (f"{line} is lost" for line in self.acknowledged if line not in there)
        yield from progress().problems[10:]  # each kill may leave half a line, which nobody was told was kept
        mark_passed(f"{self.number}.later")  # and it goes on, without waiting for a lock that nobody holds
        lock_guess(f"{self.number}.later", 1, "GB")


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


KINDS: dict[str, type[Work]] = {"kernel": Kernel, "build": Build, "grader": Grader}


# Killing


def killed(kind: str, times: int, seed: int) -> tuple[str, list[str]]:
    """Kill one kind of work so many times; what was done in a line, and what was found."""
    dice = random.Random(f"{kind} {seed}")
    found = []
    victims = Counter[str]()
    with tempfile.TemporaryDirectory(prefix="course-faults-", ignore_cleanup_errors=True) as home:
        work = KINDS[kind](Path(home))
        around = _strays()
        seconds, problem = _unharmed(work, 0)
        found += problem
        for number in range(1, times + 1):
            work.before(number)
            process = work.start()
            _wait(process, work, dice, seconds)
            victims[_kill(process, kind, dice)] += 1
            if process.poll() != -signal.SIGKILL and TRACEBACK in work.said.read_text():
                found.append(f"{kind} {number}: {work.said.read_text()[-600:]}")
            found += [f"{kind} {number}: {fault}" for fault in [*left_behind(), *_faults_of(work)]]
            # who is killed cannot remove its own; the system does in the end
            for folder in work.scratch.iterdir():
                shutil.rmtree(folder, ignore_errors=True)
        found += _unharmed(work, times + 1)[1]
        found += [f"{kind}: left in the repository: {path}" for path in _strays() - around]
    counts = ", ".join(f"{count} {victim}" for victim, count in victims.most_common())
    return f"{kind}: killed {times} times within {seconds:.1f} s ({counts}): {len(found)} faults", found


def _unharmed(work: Work, number: int) -> tuple[float, list[str]]:
    """Do the work to its end: how long it takes, and what is wrong although nobody was killed."""
    work.before(number)
    began = time.monotonic()
    process = work.start()
    if isinstance(work, Kernel):
        began = time.monotonic()
        while work.said.read_text().count("\n") % 75 or f"guess {number}.24" not in work.said.read_text():
            time.sleep(0.02)
        process.kill()
    process.wait(timeout=300)
    seconds = time.monotonic() - began
    said = work.said.read_text()
    wrong = [said[-600:]] if process.returncode and not isinstance(work, Kernel) else []
    return seconds, [f"unharmed: {fault}" for fault in [*wrong, *_faults_of(work), *left_behind()]]


def _faults_of(work: Work) -> list[str]:
    """The faults, and an error that came while they were looked for, which is one too."""
    try:
        return list(work.faults())
    except Exception as error:
        return [f"{type(error).__name__}: {error}"]


def _wait(process: "subprocess.Popen[bytes]", work: Work, dice: random.Random, seconds: float) -> None:
    """Until a moment in what the work takes; three times of ten until just after it has begun to write."""
    until = time.monotonic() + dice.uniform(0, seconds)
    if work.writes and dice.random() < 0.3:
        before = work.written()
        until = time.monotonic() + 3 * seconds
        while work.written() == before and process.poll() is None and time.monotonic() < until:
            time.sleep(0.0005)
        until = time.monotonic() + dice.uniform(0, 0.02)
    while time.monotonic() < until and process.poll() is None:
        time.sleep(0.001)


def _kill(process: "subprocess.Popen[bytes]", kind: str, dice: random.Random) -> str:
    """Kill the work itself or, as often, a process that it has started; then it has to end by itself."""
    below: list[psutil.Process] = []
    with suppress(psutil.Error):
        below = psutil.Process(process.pid).children(recursive=True)
    if below and dice.random() < 0.5:
        with suppress(psutil.Error):
            dice.choice(below).kill()
        process.wait(timeout=180)
        return f"a process of the {kind}"
    process.kill()
    process.wait()
    return f"the {kind}" if process.returncode == -signal.SIGKILL else "too late"


def left_behind() -> list[str]:
    """Sentences that name what still executes. This process adopts every orphan,
    whatever session it is in.
    """
    until = time.monotonic() + LATE_SECONDS
    while True:
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        running = psutil.Process().children(recursive=True)
        if not running or time.monotonic() > until:
            break
        time.sleep(0.1)
    said = []
    for process in running:
        with suppress(psutil.Error):
            said.append(f"left behind: {' '.join(process.cmdline())[:200]}")
            process.kill()
    return said


def _strays() -> set[Path]:
    """Files and folders in the repository that look like somebody's scratch."""
    folders = [top for top in ROOT.iterdir() if top.name not in (".venv", ".git", "build")]
    paths = [*folders, *(path for top in folders for path in top.rglob("*"))]
    return {path for path in paths if path.name.startswith(("course-", "tmp")) or ".part" in path.suffixes}


# A full disk


def disk(times: int, seed: int) -> tuple[str, list[str]]:
    """Fill up the disk at random bytes while everything that is kept for a learner is written."""
    dice = random.Random(f"disk {seed}")
    found = []
    full = Counter[str]()
    with tempfile.TemporaryDirectory(prefix="course-faults-", ignore_cleanup_errors=True) as folder:
        fills = {"a limit of a file's size": _limited} | (
            {"a full tmpfs": _filled} if _mounted(Path(folder)) else {}
        )
        for number in range(times):
            home = Path(folder) / str(number)
            home.mkdir()
            os.environ["COURSE_HOME"] = str(home)
            name = dice.choice(list(fills))
            for step, (what, works) in enumerate(_keepers(home).items()):
                kept: list[int] = []
                with fills[name](home, dice.randrange(6000)):
                    for event in range(40):
                        try:
                            works[0](event)
                        except (
                            ValueError,
                            OSError,
                        ) as problem:  # and then it is tried once more, as a learner would
                            full[f"{name}, {what}"] += 1
                            if not str(problem):
                                found.append(f"disk {number}: {what} fails without words")
                            if full[f"{name}, {what}"] % 2 == 0:
                                break
                            continue
                        kept.append(event)
                for more in ([], [99 + step]):  # as it was left, and when there is room again
                    for event in more:
                        works[0](event)
                    said = works[1]([*kept, *more]) if [*kept, *more] else ()
                    found += [f"disk {number}: {what}: {fault}" for fault in said]
            shutil.rmtree(home)
        with suppress(OSError):
            fence._call("umount2", os.fsencode(folder), DETACH)
    return (
        f"disk: {sum(full.values())} times full in {times} trials ({dict(full)}): {len(found)} faults",
        found,
    )


@contextmanager
def _limited(home: Path, room: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextmanager
def _filled(home: Path, room: int) -> Iterator[None]:
    """All but a few pages, as a file system in memory counts by them."""
    ballast = home / "ballast"
    free = os.statvfs(home).f_bavail * os.statvfs(home).f_frsize
    ballast.write_bytes(bytes(max(0, free - room)))
    try:
        yield
    finally:
        ballast.unlink()


def _mounted(folder: Path) -> bool:
    """Put a small file system on the folder: as root, or in a namespace of this process's own where that is
    allowed.
    """
    user = os.getuid()
    group = os.getgid()
    try:
        if user:
            fence._call("unshare", NEW_USER | NEW_MOUNTS)
            Path("/proc/self/setgroups").write_text("deny")
            Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
            Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
        else:
            fence._call("unshare", NEW_MOUNTS)
        fence._call("mount", b"none", b"/", None, AND_BELOW | PRIVATE, None)
        fence._call("mount", b"tmpfs", os.fsencode(folder), b"tmpfs", 0, b"size=4m")
    except OSError:
        return False
    return True


Kept = tuple[Callable[[int], object], Callable[[list[int]], Iterator[str]]]
"""Writes an event, and yields what is wrong if these have been written."""


def _keepers(home: Path) -> dict[str, Kept]:
    """Everything that the course keeps for a learner or a teacher."""
    table = home / "grades.csv"
    recording = home / "gpu.jsonl"
    [draft] = drafts(home, write_source(home, "notebooks", LESSON))
    draft.target.parent.mkdir(exist_ok=True)
    line = {
        "task": "",
        "kind": "",
        "status": "",
        "device": {"name": ""},
        "torch": "",
        "date": "",
        "commit": "",
    }

    def graded(event: int) -> Row:
        return Row(f"{event:04d}", "ada", {"04.1": "error: " + "x" * 400}, "")

    def recorded(event: int) -> None:
        repair(recording)
        append(recording, {**line, "steps": event, "parts": {"x": "x" * 400}})

    def lesson(event: int) -> None:
        draft.notebook.cells[1].source = f"# {event}" + " " * 400 * (event % 10)
        write(draft.notebook, draft.target)

    def expect(there: Callable[[], set[str]]) -> Callable[[list[int]], Iterator[str]]:
        def missing(kept: list[int]) -> Iterator[str]:
            gone = set(map(str, kept)) - there()
            if gone:
                yield f"{sorted(gone)} of {len(kept)} are lost"

        return missing

    def latest(read: Callable[[], str]) -> Callable[[list[int]], Iterator[str]]:
        def other(kept: list[int]) -> Iterator[str]:
            if read() != str(kept[-1]):
                yield f"it is {read()!r}, and {kept[-1]} was written last"

        return other

    def told() -> set[str]:
        repair(recording)  # as `record` does before it reads
        return {str(one.content["steps"]) for one in read_lines(recording)}

    def row() -> str:
        return str(int(list(csv.reader(table.read_text().splitlines()))[-1][0]))

    def cell() -> str:
        return json.loads(draft.target.read_text())["cells"][1]["source"][0].removeprefix("# ").strip()

    return {
        "exercises": (lambda event: mark_passed(str(event)), expect(lambda: set(passed()))),
        "quizzes": (lambda event: mark_quiz(event, 1, 2), expect(lambda: set(map(str, quiz_scores())))),
        "guesses": (lambda event: lock_guess(str(event), event, "GB"), expect(lambda: set(stored_guesses()))),
        "table": (lambda event: write_table([graded(one) for one in range(event + 1)], table), latest(row)),
        "recordings": (recorded, expect(told)),
        "notebooks": (lesson, latest(cell)),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("kinds", nargs="*", help=f"of {', '.join(KINDS)} and disk; all of them without")
    parser.add_argument("--times", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if unknown := set(options.kinds) - {*KINDS, "disk"}:
        parser.error(f"there is no kind {', '.join(unknown)}")
    # As a desktop's session does: an orphan's parent is not process 1.
    ctypes.CDLL(None).prctl(SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    found = []
    for kind in options.kinds or [*KINDS, "disk"]:
        tried = disk if kind == "disk" else partial(killed, kind)
        line, faults = tried(options.times, options.seed)
        print(line, flush=True)
        found += faults
    print("\n".join(found))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
