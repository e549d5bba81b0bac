"""Is each file graded for itself, whatever it does, and does the fence hold? Whole notebooks are executed."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from real_ranks import hears_ctrl_c

from course_utils import fence
from course_utils.cli.main import main
from course_utils.interactive.course_files import ROOT
from course_utils.teaching import grade as grading
from course_utils.teaching.grade import Limits, Row, grade

EXERCISES = ROOT / "exercises" / "03_mixed_precision.ipynb"
SOLUTIONS = ROOT / "solutions" / "03_mixed_precision.ipynb"
FENCED = bool(fence.version())
SLEEPS = "time.sleep(987.25)"

Rows = dict[str, dict[str, str]]


def with_code(added: str, path: Path = EXERCISES, says: str = "") -> bytes:
    """A notebook whose first cell goes on with what is `added`; its checks say the value of `says`."""
    changed = json.loads(path.read_text(encoding="utf-8"))
    cells = [cell for cell in changed["cells"] if cell["cell_type"] == "code"]
    for cell in cells:
        before, gap, after = "".join(cell["source"]).partition("raise NotSolved(")
        cell["source"] = f"{before}raise NotSolved(str({says}))" if gap and says else before + gap + after
    cells[0]["source"] += f"\n{added}"
    return json.dumps(changed).encode()


def put(folder: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def table(folder: Path) -> Rows:
    with (folder / "grades.csv").open(encoding="utf-8", newline="") as file:
        return {row["file"]: row for row in csv.DictReader(file)}


def graded(folder: Path, out: Path, *options: str) -> Rows:
    unfenced = () if FENCED else ("--unfenced",)
    assert main(["grade", "--here", str(folder), "--out", str(out), *unfenced, *options]) == 0
    return table(out)


def sleeping() -> list[psutil.Process]:
    return [one for one in psutil.process_iter(["cmdline"]) if SLEEPS in " ".join(one.info["cmdline"] or [])]


def until(reached: Callable[[], object]) -> None:
    for _ in range(1200):
        if reached():
            return
        time.sleep(0.1)
    raise AssertionError("it never happened")


STARTS = f"""
import os, subprocess, sys
for alone in (False, True):
    subprocess.Popen([sys.executable, "-c", "import time; {SLEEPS}"], start_new_session=alone)
"""
ADA, OTHER_ADA = (f"Ada Lovelace_{number}_assignsubmission_file_/03.ipynb" for number in (123, 456))
READABLE = {
    ADA: with_code('for _ in range(200): print("x" * 1_000_000)', SOLUTIONS),
    OTHER_ADA: with_code(STARTS + "parts = [bytes(10**9) for _ in range(100)]"),
    "kills.ipynb": with_code("import os\nos.kill(os.getpid(), 9)"),
}
UNREADABLE = {
    "deep.ipynb": (b"[" * 100_000, "is not a notebook, or is damaged"),
    "empty.ipynb": (b"", "is empty"),
    "foreign.ipynb": (
        b'{"cells": [{"cell_type": "code", "source": "1"}]}',
        "has none of the course's exercises",
    ),
    "homework.pdf": (b"%PDF", "is not a notebook: its name does not end in .ipynb"),
}


def test_each_file_of_a_class_is_graded_for_itself_whatever_it_does(tmp_path: Path) -> None:
    files = READABLE | {name: content for name, (content, _) in UNREADABLE.items()}
    with zipfile.ZipFile(tmp_path / "class.zip", "w") as opened:
        for name, content in files.items():
            opened.writestr(name, content)
    rows = graded(tmp_path / "class.zip", tmp_path / "out", "--minutes", "30", "--memory", "10")
    assert set(rows) == set(files)
    assert [rows[name]["learner"] for name in (ADA, OTHER_ADA)] == ["Ada Lovelace"] * 2
    assert (rows[ADA]["total"], rows[ADA]["remark"]) == ("4", ""), "printing 200 MB costs nothing"
    assert rows[OTHER_ADA]["total"] == "0"
    if sys.platform == "linux":
        assert rows[OTHER_ADA]["03.1"].startswith("not solved: "), "too much memory fails its cell alone"
    assert rows["kills.ipynb"]["remark"].startswith("its kernel died")
    assert rows["kills.ipynb"]["03.1"] == "not reached"
    assert sleeping() == [], "nothing that a notebook started goes on"
    for name, (_, remark) in UNREADABLE.items():
        assert rows[name]["remark"].partition(" (")[0] == remark and rows[name]["total"] == ""


def test_an_endless_loop_and_too_many_files_are_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes = "import time\nfor part in 'ab': open(part, 'wb').write(bytes(22_000_000))\ntime.sleep(600)"
    put(tmp_path, {"loop/03.ipynb": with_code("while True: pass"), "writes/03.ipynb": with_code(writes)})
    found: list[Row] = []
    grade(tmp_path / "loop", found.append, Limits(0.05, fenced=FENCED))
    monkeypatch.setattr(grading, "MOST_WRITTEN", 40_000_000)
    grade(tmp_path / "writes", found.append, Limits(30, fenced=FENCED))
    assert [row.remark.partition(":")[0] for row in found] == ["ended after 0.05 minutes", "ended"]
    assert "MB of files" in found[1].remark and {row.total for row in found} == {0}


LOOKS = """
import os
from pathlib import Path
found = [name for name in os.environ if "SECRET" in name]
for path in map(Path, READ):
    try: found.append(list(path.iterdir()) if path.is_dir() else path.read_bytes()[:9])
    except OSError: pass
for path in map(Path, WRITE):
    try: path.write_text("mine"); found.append(path)
    except OSError: pass
try: os.kill(GRADER, 0); found.append("may signal the grader")
except OSError: pass
Path("here").write_text("mine")
from course_utils.ranks.launch import run_ranks
def rank(): return 7
if run_ranks(rank, 2) != [7, 7]: found.append("no ranks")
"""


@pytest.mark.skipif(not FENCED, reason="there is no Landlock")
def test_the_fence_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_OF_MINE", "1")
    home = Path.home()
    other = tmp_path / "class" / "other.ipynb"
    read = [SOLUTIONS, ROOT / "solutions", ROOT / "README.md", other, tmp_path, home]
    write = [other, tmp_path / "out" / "mine", home / ".course-mine", ROOT / "mine", "/etc/course-mine"]
    grader = os.getpid() if fence.version() >= fence.SCOPES_SINCE else 2**30
    known = f"READ, WRITE, GRADER = {[*map(str, read)]}, {[*map(str, write)]}, {grader}\n"
    put(tmp_path, {"class/looks.ipynb": with_code(known + LOOKS, says="found"), "class/other.ipynb": b""})
    found = graded(tmp_path / "class", tmp_path / "out")
    assert found["looks.ipynb"]["03.2"] == "not solved: []"
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["grades.csv"]
    assert other.read_bytes() == b"" and not (home / ".course-mine").exists()


@pytest.mark.skipif(sys.platform == "win32", reason="there are no such signals")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_grader_that_ends_keeps_its_rows_and_leaves_nothing(number: int, tmp_path: Path) -> None:
    starts = STARTS.replace("(False, True)", "(False,)") + f"import time; {SLEEPS}"
    put(tmp_path / "class", {"1.ipynb": b"", "2.ipynb": with_code(starts)})
    words = [str(tmp_path / "class"), "--out", str(tmp_path / "out"), *([] if FENCED else ["--unfenced"])]
    command = [sys.executable, "-m", "course_utils", "grade", "--here", *words]
    own = {**os.environ, "TMPDIR": str(tmp_path)}
    grader = subprocess.Popen(command, cwd=ROOT, env=own, stdout=subprocess.DEVNULL, preexec_fn=hears_ctrl_c)
    until(sleeping)
    below = psutil.Process(grader.pid).children(recursive=True)
    grader.send_signal(number)
    assert grader.wait() == (130 if number == signal.SIGINT else -number)
    assert table(tmp_path / "out")["1.ipynb"]["remark"] == "is empty"
    kernels = [one for one in below if SLEEPS not in str(one)]
    until(lambda: not any(one.is_running() and one not in sleeping() for one in kernels))
    left = sleeping()
    for one in left:
        one.kill()
    assert number == signal.SIGKILL or left == []
