"""Which files are graded, by which cells, and what the table holds. tests/rest executes whole notebooks."""

import csv
import io
import json
import os
import stat
import sys
import zipfile
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

from course_utils import fence
from course_utils.cli.main import main
from course_utils.interactive.course_files import ROOT, numbered
from course_utils.teaching import grade as grading
from course_utils.teaching.check_cells import cells_to_run, check_cells
from course_utils.teaching.grade import Limits, Row, grade, summary, write_table
from course_utils.teaching.handed_in import handed_in, learners

EXERCISES = ROOT / "exercises" / "03_mixed_precision.ipynb"
SOLUTIONS = ROOT / "solutions" / "03_mixed_precision.ipynb"


def notebook(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def code(cell: dict[str, Any]) -> str:
    return "".join(cell["source"])


def zipped(path: Path, files: dict[str, bytes], mode: int = 0) -> Path:
    """An archive of these files."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as opened:
        for name, content in files.items():
            entry = zipfile.ZipInfo(name)
            entry.external_attr = mode << 16
            opened.writestr(entry, content)
    return path


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
    archive = zipped(tmp_path / "a.zip", files)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    found = handed_in(archive, scratch)
    said = {name.replace("\\", "/"): problem for name, problem in ENTRIES.items()}
    assert {one.file: one.problem for one in found} == said
    unpacked = [path for path in tmp_path.rglob("*") if path.is_file() and path != archive]
    assert [path.parent for path in unpacked] == [scratch]
    link = zipped(tmp_path / "link.zip", {"a.ipynb": b"/"}, stat.S_IFLNK | 0o777)
    assert [one.problem for one in handed_in(link, scratch)] == ["not read: it is a link"]
    damaged = zipped(tmp_path / "crc.zip", {"a.ipynb": b"{}"})
    damaged.write_bytes(damaged.read_bytes().replace(crc32(b"{}").to_bytes(4, "little"), bytes(4)))
    assert "cannot be unpacked" in handed_in(damaged, scratch)[0].problem
    monkeypatch.setattr("course_utils.teaching.handed_in.MOST_UNPACKED", 1)
    assert "no room" in handed_in(archive, scratch)[2].problem
    monkeypatch.setattr("course_utils.teaching.handed_in.MOST_FILES", 3)
    with pytest.raises(ValueError, match="1 to 3 submissions"):
        handed_in(archive, scratch)


@pytest.mark.skipif(sys.platform == "win32", reason="links and pipes need privileges there, or are not there")
def test_links_and_pipes_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "1.ipynb").symlink_to(SOLUTIONS)
    (tmp_path / "2").symlink_to(ROOT / "solutions")
    os.mkfifo(tmp_path / "3.ipynb")
    problems = [one.problem for one in handed_in(tmp_path, tmp_path)]
    assert problems == ["not read: it is a link", "not read: it is a link", "not read: it is not a file"]


def test_bad_folders_are_refused_and_without_a_fence_grade_asks_for_consent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    damaged = zipped(tmp_path / "damaged.zip", {"a.ipynb": b"{}"})
    damaged.write_bytes(damaged.read_bytes().replace(b"PK\1\2", b"PK\1\3"))
    options = ["--out", str(tmp_path / "out")]
    for name in ("none", "empty", "damaged.zip"):
        assert main(["grade", "--here", str(tmp_path / name), *options, "--unfenced"]) == 1
    said = capsys.readouterr().err
    assert "is neither a folder nor a .zip" in said and "has 0 files" in said and "download it again" in said
    monkeypatch.setattr(fence, "version", lambda: 0)
    assert main(["grade", "--here", str(tmp_path), *options]) == 1
    assert "add --unfenced" in capsys.readouterr().err


LAYOUTS = {
    "ada/06_recomputation.ipynb": "ada",
    "06_recomputation/ada/work.ipynb": "ada",
    "Lesson 6/ada.ipynb": "ada",
    "Ada Lovelace_271828_assignsubmission_file_/homework/06.ipynb": "Ada Lovelace",
    "lovelaceada_LATE_1815_1852_06_recomputation-1.ipynb": "lovelaceada",
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
    (tmp_path / "a.ipynb").write_bytes(json.dumps(lost).encode("utf-16"))
    cells, remark = cells_to_run(tmp_path / "a.ipynb")
    assert [cell["exercise"] for cell in cells if "exercise" in cell] == ["03.1", "03.2", "03.3", "03.4"]
    assert remark.startswith("its title says 09")


def test_the_courses_own_checks_run_also_where_a_learner_changed_or_deleted_them(tmp_path: Path) -> None:
    changed = notebook(EXERCISES)
    first, second, *_ = check_cells(changed).values()
    kept = [cell for cell in changed["cells"] if code(cell) != second["source"]]
    for cell in kept:
        if code(cell) == first["source"]:
            cell["source"] = f"mine = 1\n{first['source']}"
    (tmp_path / "a.ipynb").write_text(json.dumps(changed | {"cells": kept}))
    cells, _ = cells_to_run(tmp_path / "a.ipynb")
    places = {cell["exercise"]: index for index, cell in enumerate(cells) if "exercise" in cell}
    assert cells[places["03.1"] - 1]["source"].startswith("mine = 1") and cells[-1]["exercise"] == "03.2"
    assert all(cells[place]["source"].startswith("from course_utils.lessons.") for place in places.values())


def test_every_exercise_notebook_has_its_checks() -> None:
    for path in numbered(ROOT / "exercises"):
        numbers = [cell["exercise"] for cell in cells_to_run(path)[0] if "exercise" in cell]
        assert numbers == [f"{path.name[:2]}.{number}" for number in range(1, len(numbers) + 1)] != []


@pytest.mark.parametrize("text", ["=1", "＝1", "\t=1", "\ufeff=1", "a;=1"], ids=ascii)
def test_no_cell_is_a_formula_nor_writes_to_the_terminal(text: str, tmp_path: Path) -> None:
    archive = zipped(tmp_path / "class.zip", {f"{text}\x1b[31m.ipynb": b"{", "a.ipynb": b""})
    found: list[Row] = []
    grade(archive, found.append, Limits(fenced=False))
    write_table(found, tmp_path / "grades.csv")
    rows = csv.reader(io.StringIO((tmp_path / "grades.csv").read_text(encoding="utf-8")))
    cells = [cell.lstrip("\ufeff") for row in rows for cell in row]
    assert not [cell for cell in cells if cell.startswith(grading.FORMULA) or ";" in cell]
    assert len(found) == 2 and "\x1b" not in summary(found) and summary(found).count("\n") == 2


def test_a_table_that_cannot_be_written_whole_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_table([Row("bob.ipynb", "bob", {}, "")], tmp_path / "grades.csv")
    before = (tmp_path / "grades.csv").read_bytes()
    monkeypatch.setattr(os, "fsync", lambda _: os.close(-1))
    with pytest.raises(OSError, match="Bad file"):
        write_table([], tmp_path / "grades.csv")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"grades.csv": before}
