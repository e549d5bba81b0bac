"""Is a notebook that is graded kept from the solutions, the grader's secrets and the rest of the machine?"""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from course_utils.classroom import isolated_run
from course_utils.classroom.graded_process import Limits, ended
from course_utils.classroom.grading_results import Outcome
from course_utils.classroom.isolated_run import Isolation, isolation, run_alone
from course_utils.units import MB

ROOT = Path(__file__).resolve().parent.parent
CHECKS = "course_utils.interactive.feedback"
LINUX = sys.platform == "linux"

COPY = """
import course_utils
from pathlib import Path
course = Path(course_utils.__file__).parents[1]
assert (course / "exercises").is_dir() and not (course / "solutions").exists()
assert not list(course.rglob("skeletons")) and not list(course.rglob("src"))
print("✓")
"""
SECRET = """
import os
assert not [name for name in os.environ if "SECRET" in name or "TOKEN" in name]
assert os.environ["HOME"] != HOME and os.environ["COURSE_SOURCE"] == "simulated" and "PATH" in os.environ
print("✓")
"""
FILES = """
import sys
from pathlib import Path
def read(path):
    try: return path.read_bytes() if path.is_file() else list(path.iterdir())
    except OSError: return None
places = {ROOT, *map(Path, sys.path), Path(sys.prefix).parent, *Path("/proc").glob("*/root" + str(ROOT))}
assert not [place for place in places if read(place / "solutions") or read(place / "solutions/instructor.md")]
assert not [place for place in places if read(place / "tests/contract.py")]
assert not read(THEIRS) and not read(THEIRS / "theirs") and read(Path(sys.prefix))
print("✓")
"""
OUTSIDE = """
import os, tempfile
from pathlib import Path
with tempfile.NamedTemporaryFile(dir=".") as file: file.write(b"mine")
for path in (THEIRS / "mine", THEIRS / "theirs", Path(os.__file__), Path("/etc/mine")):
    try: path.write_text("mine")
    except OSError: continue
    raise AssertionError(path)
print("✓")
"""
NETWORK = """
import socket
try: socket.create_connection(("127.0.0.1", PORT), timeout=5)
except OSError: print("✓")
"""
GRADER = """
import os
assert not os.path.exists(f"/proc/{GRADER}/root/usr") or os.getpid() == GRADER
try: os.kill(-1, 15)  # all that it may signal
except ProcessLookupError: pass
print("✓")
"""
WALLS = """
import ctypes, os
library = ctypes.CDLL(None)
assert library.unshare(0x10000000)  # a user namespace, in which it could mount
assert library.umount2(b"/proc", 2) and library.mount(b"none", b"/usr", None, 32 | 4096, None)
assert not os.access("/usr/bin", os.W_OK) and not os.access(os.path.dirname(os.__file__), os.W_OK)
print("✓")
"""
OUTLIVES = """
import os
if not os.fork():
    os.setsid()
    if not os.fork():
        os.execve("/bin/sleep", ["sleep", "4242.25"], {})
    os._exit(0)
os.wait()
print("✓")
"""
WRITES = """
import time
for part in range(2):
    with open(f"part{part}", "wb") as file: file.write(bytes(22_000_000))
time.sleep(600)
"""
"""More than may be written, less than fits behind walls: nothing fails before somebody looks."""


def cells(**sources: str) -> list[dict[str, str]]:
    """Each source as an exercise, which passes if it prints a check mark."""
    return [{"source": source, "exercise": name} for name, source in sources.items()]


def apart(kind: str) -> Isolation:
    """An isolation of this kind, which may be less than what this machine has."""
    if kind == "walls" and isolation().kind != "walls":
        pytest.skip(f"no walls here: {isolation().why_not_more}")
    tried = replace(isolation(), kind=kind, why_not_more="more is not tried here")
    if kind == "fence" and "no Landlock" in run_alone([], CHECKS, Limits(), tried)[1]:
        pytest.skip("no Landlock here")
    return tried


@pytest.fixture(params=["walls", "fence", ""])
def held(request: pytest.FixtureRequest) -> Isolation:
    if request.param and not LINUX:
        pytest.skip("Linux has these")
    return apart(request.param)


def test_the_copy_has_no_solutions_and_the_environment_no_secrets(
    held: Isolation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_OF_MINE", "1")
    monkeypatch.setenv("GITHUB_TOKEN", "1")
    home = f"HOME = {os.environ.get('HOME')!r}"
    found, problem = run_alone(cells(copy=COPY, secret=home + SECRET), CHECKS, Limits(), held)
    assert found == {"copy": Outcome("passed"), "secret": Outcome("passed")} and not problem


@pytest.mark.skipif(not LINUX, reason="Linux has these")
@pytest.mark.parametrize(
    ("kind", "tried"),
    {"walls": ("files", "writes", "network", "grader", "walls"), "fence": ("files", "writes")}.items(),
)
def test_there_is_nothing_else_to_find(kind: str, tried: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "theirs").write_text("a grade")
    with socket.create_server(("127.0.0.1", 0)) as server:
        known = f"from pathlib import Path\nROOT, THEIRS = Path({str(ROOT)!r}), Path({str(tmp_path)!r})\n"
        known += f"PORT, GRADER = {server.getsockname()[1]}, {os.getpid()}\n"
        sources = {
            "files": known + FILES,
            "writes": OUTSIDE,
            "network": NETWORK,
            "walls": WALLS,
            "grader": GRADER,
        }
        tries = cells(**{name: sources[name] for name in tried})
        found, problem = run_alone(tries, CHECKS, Limits(), apart(kind))
    assert found == dict.fromkeys(tried, Outcome("passed")) and not problem
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]


@pytest.mark.skipif(
    not LINUX, reason="elsewhere a session of its own outlives its notebook, as the page says"
)
def test_what_a_notebook_starts_ends_with_it(held: Isolation) -> None:
    found, problem = run_alone(cells(starts=OUTLIVES), CHECKS, Limits(), held)
    assert found == {"starts": Outcome("passed")} and not problem
    assert not [one for one in psutil.process_iter(["cmdline"]) if "4242.25" in (one.info["cmdline"] or [])]


SLEEPS = "import os, time\nos.fork() or os.execve('/bin/sleep', ['sleep', '4343.25'], {})\ntime.sleep(600)"
GRADER_OF_ONE = """
from pathlib import Path, PosixPath
from course_utils.classroom.isolated_run import Isolation, Limits, run_alone
run_alone({cells!r}, {checks!r}, Limits(), {held!r})
"""


@pytest.mark.skipif(not LINUX, reason="elsewhere a notebook that is graded outlives a grader that is killed")
def test_nothing_outlives_a_grader_that_is_killed(held: Isolation) -> None:
    code = GRADER_OF_ONE.format(cells=cells(sleeps=SLEEPS), checks=CHECKS, held=held)
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT) as grader:
        _until(lambda: bool(_sleeping()))
        assert _sleeping()
        below = psutil.Process(grader.pid).children(recursive=True)
        grader.kill()
    _until(lambda: not any(one.is_running() for one in below))
    left = [one for one in {*below, *_sleeping()} if one.is_running()]
    for one in left:
        one.kill()
    assert left == []


def _sleeping() -> list[psutil.Process]:
    return [one for one in psutil.process_iter(["cmdline"]) if "4343.25" in (one.info["cmdline"] or [])]


def _until(reached: Callable[[], bool]) -> None:
    for _ in range(600):
        if reached():
            return
        time.sleep(0.1)


@pytest.mark.skipif(sys.platform == "win32", reason="there are no such signals")
def test_a_signal_without_a_name_and_too_many_bytes_are_remarks(held: Isolation) -> None:
    found, problem = run_alone(cells(writes=WRITES), CHECKS, Limits(disk=40 * MB), held)
    assert not found and problem == "ended: it wrote more than 40 MB of files, or too many"
    assert ended(-40, Limits()) == "crashed (signal 40)" and not ended(0, Limits())
    if LINUX:
        signals = cells(signal="import os\nos.kill(os.getpid(), 40)")
        assert run_alone(signals, CHECKS, Limits(), held) == ({}, "crashed (signal 40)")


def test_where_there_are_no_walls_it_is_said() -> None:
    words = Isolation(ROOT, "", (), "it is Tuesday").words
    for said in ("it is Tuesday", "can find the solutions", "leave files and processes"):
        assert said in words
    assert "behind walls" in Isolation(ROOT, "walls").words
    assert "fence" in Isolation(ROOT, "fence").words and "use the network" in Isolation(ROOT, "fence").words


def test_without_any_notebook_that_runs_nobody_is_graded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolated_run, "run_alone", lambda *_: ({}, "crashed (SIGSEGV)"))
    with pytest.raises(ValueError, match=r"no notebook can be graded here.*SIGSEGV"):
        isolation.__wrapped__()
