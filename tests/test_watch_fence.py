"""Is a script that is watched kept from the user's files, to the end of its process, and does that end?"""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from test_watch import SET_UP, TRAINED

from course_utils import fence
from course_utils.errors import ScriptError
from course_utils.interactive.course_files import ROOT
from course_utils.watching.apart import NO_FENCE, watch_apart
from course_utils.watching.script import REFUSED, watch_script

WRITES = ROOT / "tests" / "writes_everywhere.py"
NEEDED = 3  # from which on it knows truncation
fenced = pytest.mark.skipif(fence.version() < NEEDED, reason=f"there is no Landlock of version {NEEDED}")

WAYS = set(re.findall(r"^def (\w+)\(path", WRITES.read_text(encoding="utf-8"), re.MULTILINE))
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "COURSE_SOURCE": "simulated"}


def planted(folder: Path) -> Path:
    """The folder with a file for each way, and another in a folder."""
    folder.mkdir()
    for way in WAYS:
        (folder / way).write_text("mine")
        (folder / f"{way}.folder").mkdir()
        (folder / f"{way}.folder" / "file").write_text("mine")
    return folder


def content(folder: Path) -> dict[str, bytes]:
    """All that lies in a folder, by its path in it."""
    found = {}
    for path in folder.rglob("*"):
        is_plain = path.is_file() and not path.is_symlink()
        found[str(path.relative_to(folder))] = path.read_bytes() if is_plain else b""
    return found


def changed(folder: Path, before: dict[str, bytes]) -> set[str]:
    """The ways that have changed something in a folder."""
    after = content(folder)
    names = {name for name in before | after if before.get(name) != after.get(name)}
    return {Path(name).parts[0].partition(".")[0] for name in names}


def executed(*words: object, folder: Path) -> "subprocess.CompletedProcess[str]":
    """What a Python did with these words, in this folder, which gets its temporary files."""
    command = [sys.executable, *map(str, words)]
    environment = ENVIRONMENT | {"TMPDIR": str(folder)}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=600
    )


@fenced
def test_no_way_to_write_leads_to_the_user_s_files(tmp_path):
    plain, watched = planted(tmp_path / "plain"), planted(tmp_path / "watched")
    before = content(plain)
    tried = executed(WRITES, plain, folder=tmp_path)
    lacking = set(re.findall(r"not tried: (\w+),", tried.stdout))
    assert changed(plain, before) == WAYS - lacking, "each way works where nothing is watched"
    around = set(tmp_path.iterdir())
    done = executed("-m", "course_utils", "watch", "--here", WRITES, watched, folder=tmp_path)
    assert done.returncode == 0 and "2 steps taken" in done.stdout, done.stderr
    assert content(watched) == before
    assert set(tmp_path.iterdir()) == around, "its temporary folder is deleted"


LOCKS = """import multiprocessing
number = multiprocessing.Value("i", 3)
with number.get_lock():
    number.value += 1
torch.ones(8).share_memory_()
open("/dev/null", "w").write("x")
"""


def test_the_measurement_is_the_same_as_in_this_process(tmp_path, monkeypatch):
    monkeypatch.setenv("COURSE_SOURCE", "simulated")
    path = tmp_path / "train.py"
    path.write_text(SET_UP + LOCKS + "step(), step()\n")
    apart, card = watch_apart(str(path), card="T4-16GB")
    here = watch_script(path, card="T4-16GB")
    assert apart.to_dict() == here.to_dict() | {"provenance": apart.to_dict()["provenance"]}
    assert apart.allocations == here.allocations and apart.timeline == here.timeline
    assert apart.provenance.note.startswith(here.provenance.note) and card.name == "T4-16GB"


def test_without_landlock_a_note_says_what_is_not_protected(tmp_path, monkeypatch):
    monkeypatch.setattr(fence, "version", lambda: 0)
    path = tmp_path / "train.py"
    path.write_text(TRAINED)
    assert watch_apart(str(path))[0].provenance.note.endswith(NO_FENCE)


AT_EXIT = "import atexit, pathlib\natexit.register(pathlib.Path('at_exit').write_text, 'x')\n"
ENDS = {
    "fails": (f"{AT_EXIT}1 / 0\n", "ZeroDivisionError"),
    "crashes": ("import ctypes\nctypes.string_at(0)\n", "train.py: .* ended by SIGSEGV before"),
    "is killed": ("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n", "SIGKILL, as when .* memory"),
    "leaves in C": ("import ctypes\nctypes.CDLL(None).exit(0)\n", "train.py: .* ended with exit code 0"),
}


@pytest.mark.skipif(sys.platform == "win32", reason="there are no such signals")
@pytest.mark.parametrize("how", ENDS)
def test_however_a_script_ends_there_is_one_sentence_and_nothing_is_left(how, tmp_path, monkeypatch):
    text, words = ENDS[how]
    (tmp_path / "train.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ScriptError, match=words):
        watch_apart("train.py")
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


@fenced
def test_a_refusal_of_the_fence_is_explained(tmp_path):
    (tmp_path / "train.py").write_text(f"import torch\ntorch._C.PyTorchFileWriter({str(tmp_path / 'x')!r})\n")
    with pytest.raises(ScriptError, match="Permission denied") as refused:
        watch_apart(str(tmp_path / "train.py"))
    assert REFUSED in str(refused.value)


GOES_ON = """import ctypes, os, sys, time
{0}
print("started", flush=True)
while True:
    try:
        time.sleep(600)
    except BaseException:
        pass
"""
FORKS = "if ctypes.CDLL(None).fork() == 0: os.setsid()"
ENDED = [("SIGINT", 130, FORKS, 0), ("SIGTERM", -15, "", 1)]  # the last: temporary folders that stay


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing ends with its parent")
@pytest.mark.parametrize(("number", "code", "first", "most"), ENDED)
def test_who_ends_the_command_ends_the_script(number, code, first, most, tmp_path):
    (tmp_path / "train.py").write_text(GOES_ON.format(first))
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    words = [sys.executable, "-m", "course_utils", "watch", "--here", "train.py"]
    environment = ENVIRONMENT | {"TMPDIR": str(temporary)}
    with subprocess.Popen(words, cwd=tmp_path, env=environment, stderr=subprocess.PIPE) as command:
        assert command.stderr
        for _ in range(2 if first else 1):
            assert command.stderr.readline() == b"started\n"
        command.send_signal(signal.Signals[number])
        command.stderr.read()  # which ends when no process has it open
    assert command.returncode == code and len(list(temporary.iterdir())) == most
