"""Is each file graded for itself, whatever it does, and does the fence hold?"""

import csv
import io
import json
import os
import signal
import stat
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zlib import crc32

import psutil
import pytest

from course_utils import fence
from course_utils.cli.main import main
from course_utils.teaching import grade as grading
from course_utils.teaching.check_cells import cells_to_run, check_cells
from course_utils.teaching.grade import Limits, Row, grade, summary, write_table
from course_utils.teaching.handed_in import handed_in, learners

ROOT = Path(__file__).resolve().parent.parent
EXERCISES = ROOT / "exercises" / "03_mixed_precision.ipynb"
SOLUTIONS = ROOT / "solutions" / "03_mixed_precision.ipynb"
FENCED = bool(fence.version())
SLEEPS = "time.sleep(987.25)"

Rows = dict[str, dict[str, str]]


def notebook(path: Path = EXERCISES) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def code(cell: dict[str, Any]) -> str:
    return "".join(cell["source"])


def with_code(added: str, path: Path = EXERCISES) -> bytes:
    """A notebook whose first cell, which imports, goes on with what is `added`."""
    changed = notebook(path)
    first = next(cell for cell in changed["cells"] if cell["cell_type"] == "code")
    first["source"] = code(first) + "\n" + added
    return json.dumps(changed).encode()


def saying(expression: str, added: str) -> bytes:
    """Exercises whose checks say the value of an expression, for what is `added` to their first cell."""
    changed = json.loads(with_code(added))
    for cell in changed["cells"]:
        if "raise NotSolved(" in code(cell):
            before, _, _ = code(cell).partition("raise NotSolved(")
            cell["source"] = f"{before}raise NotSolved(str({expression}))"
    return json.dumps(changed).encode()


def put(folder: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def zipped(files: dict[str, bytes], mode: int = 0) -> bytes:
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w", zipfile.ZIP_DEFLATED) as opened:
        for name, content in files.items():
            entry = zipfile.ZipInfo(name)
            entry.external_attr = mode << 16
            opened.writestr(entry, content)
    return held.getvalue()


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
    OTHER_ADA: EXERCISES.read_bytes(),
    "kills.ipynb": with_code("import os\nos.kill(os.getpid(), 9)"),
    "greedy.ipynb": with_code(STARTS + "parts = [bytes(10**9) for _ in range(100)]", SOLUTIONS),
}
UNREADABLE = {
    "damaged.ipynb": b'{"cells": [',
    "deep.ipynb": b"[" * 100_000,
    "empty.ipynb": b"",
    "foreign.ipynb": b'{"cells": [{"cell_type": "code", "source": "1"}]}',
    "homework.pdf": b"%PDF",
}


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Rows:
    """A class whose files do their worst, handed in as an archive."""
    folder = tmp_path_factory.mktemp("class")
    put(folder, {"class.zip": zipped(READABLE | UNREADABLE)})
    return graded(folder / "class.zip", folder / "out", "--minutes", "30", "--memory", "10")


def test_namesakes_have_rows_of_their_own_and_printing_200_mb_costs_nothing(rows: Rows) -> None:
    assert [rows[name]["learner"] for name in (ADA, OTHER_ADA)] == ["Ada Lovelace"] * 2
    assert (rows[ADA]["total"], rows[ADA]["remark"]) == ("4", "")
    assert rows[OTHER_ADA]["total"] == "0" and rows[OTHER_ADA]["03.1"].startswith("not solved: ")
    assert set(rows) == {*READABLE, *UNREADABLE}


def test_a_kernel_that_kills_itself_costs_its_own_row(rows: Rows) -> None:
    assert rows["kills.ipynb"]["remark"].startswith("its kernel died")
    assert rows["kills.ipynb"]["03.1"] == "not reached"


def test_who_asks_for_100_gb_or_starts_others_is_graded_and_leaves_nothing(rows: Rows) -> None:
    assert sys.platform != "linux" or rows["greedy.ipynb"]["total"] == "4"
    assert sleeping() == []


def test_what_is_no_notebook_says_so(rows: Rows) -> None:
    remarks = {name: rows[name]["remark"].partition(" (")[0] for name in UNREADABLE}
    damaged = "is not a notebook, or is damaged"
    assert remarks == {
        "damaged.ipynb": damaged,
        "deep.ipynb": damaged,
        "empty.ipynb": "is empty",
        "foreign.ipynb": "has none of the course's exercises",
        "homework.pdf": "is not a notebook: its name does not end in .ipynb",
    }
    assert {rows[name]["total"] for name in UNREADABLE} == {""}


def test_an_endless_loop_and_too_many_files_are_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = with_code("while True: pass")
    writes = "import time\nfor part in 'ab': open(part, 'wb').write(bytes(22_000_000))\ntime.sleep(600)"
    put(tmp_path, {"loop/03.ipynb": loop, "writes/03.ipynb": with_code(writes)})
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
    other = tmp_path / "class" / "other.ipynb"
    read = [SOLUTIONS, ROOT / "solutions", ROOT / "README.md", other, tmp_path, Path.home()]
    write = [
        other,
        tmp_path / "out" / "mine",
        Path.home() / ".course-mine",
        ROOT / "mine",
        "/etc/course-mine",
    ]
    grader = os.getpid() if fence.version() >= fence.SCOPES_SINCE else 2**30
    known = f"READ, WRITE, GRADER = {[*map(str, read)]}, {[*map(str, write)]}, {grader}\n"
    put(tmp_path, {"class/looks.ipynb": saying("found", known + LOOKS), "class/other.ipynb": b""})
    found = graded(tmp_path / "class", tmp_path / "out")
    assert found["looks.ipynb"]["03.2"] == "not solved: []"
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["grades.csv"]
    assert other.read_bytes() == b"" and not (Path.home() / ".course-mine").exists()


def test_without_a_fence_grade_asks_for_consent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fence, "version", lambda: 0)
    put(
        tmp_path,
        {"class/03.ipynb": saying("Path(SEEN).exists()", f"from pathlib import Path\nSEEN = {str(ROOT)!r}")},
    )
    words = ["grade", "--here", str(tmp_path / "class"), "--out", str(tmp_path / "out")]
    assert main(words) == 1 and "add --unfenced" in capsys.readouterr().err
    assert main([*words, "--unfenced"]) == 0
    assert table(tmp_path / "out")["03.ipynb"]["03.2"] == "not solved: True"


@pytest.mark.skipif(sys.platform == "win32", reason="there are no such signals")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_grader_that_ends_keeps_its_rows_and_leaves_nothing(number: int, tmp_path: Path) -> None:
    starts = STARTS.replace("(False, True)", "(False,)") + f"import time; {SLEEPS}"
    put(tmp_path / "class", {"1.ipynb": b"", "2.ipynb": with_code(starts)})
    words = [str(tmp_path / "class"), "--out", str(tmp_path / "out"), *([] if FENCED else ["--unfenced"])]
    command = [sys.executable, "-m", "course_utils", "grade", "--here", *words]
    own = {**os.environ, "TMPDIR": str(tmp_path)}
    grader = subprocess.Popen(command, cwd=ROOT, env=own, stdout=subprocess.DEVNULL)
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


ENTRIES = {
    "/03.ipynb": "not read: its name leads out of the archive",
    "C:\\03.ipynb": "not read: its name leads out of the archive",
    "bob/../../ada/03.ipynb": "not read: its name leads out of the archive",
    "ada/03.ipynb": "",
    "ada/work.zip": "not read: unpack this archive into a folder, and grade again",
    "ada/large.ipynb": "not read: it is larger than 20 MB",
}


def test_an_archive_is_unpacked_safely(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = dict.fromkeys(ENTRIES, b"{}") | {"__MACOSX/._a.ipynb": b"", "ada/large.ipynb": bytes(21_000_000)}
    put(tmp_path, {"a.zip": zipped(files), "link.zip": zipped({"a.ipynb": b"/"}, stat.S_IFLNK | 0o777)})
    put(
        tmp_path,
        {"crc.zip": zipped({"a.ipynb": b"{}"}).replace(crc32(b"{}").to_bytes(4, "little"), bytes(4))},
    )
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    found = handed_in(tmp_path / "a.zip", scratch)
    assert {one.file: one.problem for one in found} == {
        name.replace("\\", "/"): said for name, said in ENTRIES.items()
    }
    assert [path.parent for path in tmp_path.rglob("*") if path.suffix != ".zip" and path.is_file()] == [
        scratch
    ]
    assert [one.problem for one in handed_in(tmp_path / "link.zip", scratch)] == ["not read: it is a link"]
    assert "cannot be unpacked" in handed_in(tmp_path / "crc.zip", scratch)[0].problem
    monkeypatch.setattr("course_utils.teaching.handed_in.MOST_UNPACKED", 1)
    assert "no room" in handed_in(tmp_path / "a.zip", scratch)[2].problem
    monkeypatch.setattr("course_utils.teaching.handed_in.MOST_FILES", 3)
    with pytest.raises(ValueError, match="1 to 3 submissions"):
        handed_in(tmp_path / "a.zip", scratch)


@pytest.mark.skipif(sys.platform == "win32", reason="links and pipes need privileges there, or are not there")
def test_links_and_pipes_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "1.ipynb").symlink_to(SOLUTIONS)
    (tmp_path / "2").symlink_to(ROOT / "solutions")
    os.mkfifo(tmp_path / "3.ipynb")
    assert [one.problem for one in handed_in(tmp_path, tmp_path)] == [
        "not read: it is a link",
        "not read: it is a link",
        "not read: it is not a file",
    ]


def test_bad_folders_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    put(tmp_path, {"damaged.zip": zipped({"a.ipynb": b"{}"}).replace(b"PK\1\2", b"PK\1\3")})
    for name in ("none", "empty", "damaged.zip"):
        assert (
            main(["grade", "--here", str(tmp_path / name), "--out", str(tmp_path / "out"), "--unfenced"]) == 1
        )
    said = capsys.readouterr().err
    assert "is neither a folder nor a .zip" in said and "has 0 files" in said and "download it again" in said


LAYOUTS = {
    "ada/06_recomputation.ipynb": "ada",
    "06_recomputation/ada/work.ipynb": "ada",
    "Lesson 6/ada.ipynb": "ada",
    "Ada Lovelace_271828_assignsubmission_file_/homework/06.ipynb": "Ada Lovelace",
    "lovelaceada_LATE_1815_1852_06_recomputation-1.ipynb": "lovelaceada",
    "ada.ipynb": "ada",
    "06.ipynb": "",
}


def test_learners_are_guessed_in_the_layouts_that_courses_use() -> None:
    assert learners(list(LAYOUTS)) == list(LAYOUTS.values())
    assert learners(["all/ada/06.ipynb", "all/bob/06.ipynb"]) == ["ada", "bob"]


def test_exercises_are_known_by_their_checks(tmp_path: Path) -> None:
    lost = notebook(SOLUTIONS)
    for cell in lost["cells"]:
        del cell["id"]
    lost["cells"][0]["source"] = code(lost["cells"][0]).replace("Exercises 03", "Exercises 09")
    put(tmp_path, {"a.ipynb": json.dumps(lost).encode("utf-16")})
    cells, remark = cells_to_run(tmp_path / "a.ipynb")
    assert [cell["exercise"] for cell in cells if "exercise" in cell] == ["03.1", "03.2", "03.3", "03.4"]
    assert remark.startswith("its title says 09")


def test_the_courses_own_checks_run_also_where_a_learner_changed_or_deleted_them(tmp_path: Path) -> None:
    changed = notebook()
    first, second, *_ = check_cells(changed).values()
    kept = [cell for cell in changed["cells"] if code(cell) != second["source"]]
    for cell in kept:
        if code(cell) == first["source"]:
            cell["source"] = f"mine = 1\n{first['source']}"
    put(tmp_path, {"a.ipynb": json.dumps(changed | {"cells": kept}).encode()})
    cells, _ = cells_to_run(tmp_path / "a.ipynb")
    places = {cell["exercise"]: index for index, cell in enumerate(cells) if "exercise" in cell}
    assert cells[places["03.1"] - 1]["source"].startswith("mine = 1") and cells[-1]["exercise"] == "03.2"
    assert all(cells[place]["source"].startswith("from course_utils.lessons.") for place in places.values())


def test_every_exercise_notebook_has_its_checks() -> None:
    for path in sorted((ROOT / "exercises").glob("[0-9][0-9]_*.ipynb")):
        numbers = [cell["exercise"] for cell in cells_to_run(path)[0] if "exercise" in cell]
        assert numbers == [f"{path.name[:2]}.{number}" for number in range(1, len(numbers) + 1)]
        # a task that no program can judge
        unchecked = path.read_text(encoding="utf-8").count('"## Unchecked · ')
        assert len(numbers) + unchecked >= 4 and unchecked <= 1


def test_a_table_that_cannot_be_written_whole_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_table([Row("bob.ipynb", "bob", {}, "")], tmp_path / "grades.csv")
    before = (tmp_path / "grades.csv").read_bytes()
    monkeypatch.setattr(os, "fsync", lambda _: os.close(-1))
    with pytest.raises(OSError, match="Bad file"):
        write_table([], tmp_path / "grades.csv")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"grades.csv": before}


@pytest.mark.parametrize("text", ["=1", "+1", "-1", "@A1", "＝1", "\t=1", "\ufeff=1", "a;=1"], ids=ascii)
def test_no_cell_is_a_formula_nor_writes_to_the_terminal(text: str, tmp_path: Path) -> None:
    put(tmp_path, {"class.zip": zipped({f"{text}\x1b[31m.ipynb": b"{", "a.ipynb": b""})})
    found: list[Row] = []
    grade(tmp_path / "class.zip", found.append, Limits(fenced=False))
    write_table(found, tmp_path / "grades.csv")
    cells = [cell.lstrip("\ufeff") for row in table(tmp_path).values() for cell in row.values()]
    assert not [cell for cell in cells if cell.startswith(grading.FORMULA) or ";" in cell]
    assert len(found) == 2 and "\x1b" not in summary(found) and summary(found).count("\n") == 2
