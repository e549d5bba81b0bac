"""Does a submission that is damaged, or made to do harm, cost anybody but its own learner?"""

import csv
import io
import json
import os
import random
import stat
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from course_utils.classroom import collecting, grading
from course_utils.classroom.collecting import collected
from course_utils.classroom.grading import grade
from course_utils.classroom.grading_results import Graded, Outcome, write_table
from course_utils.classroom.grading_worker import outcome
from course_utils.classroom.isolated_run import Isolation
from course_utils.cli.main import main

ROOT = Path(__file__).resolve().parent.parent
EXERCISES = (ROOT / "exercises" / "06_recomputation.ipynb").read_bytes()


@pytest.fixture(autouse=True)
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here notebooks are read, but not executed."""

    def run(cells: list[dict[str, str]], *_: Any) -> tuple[dict[str, Outcome], str]:
        json.dumps(cells).encode()
        return {}, ""

    monkeypatch.setattr(grading, "isolation", lambda: Isolation(ROOT, "", (), "nothing runs"))
    monkeypatch.setattr(grading, "run_alone", run)


def zipped(
    contents: dict[str, bytes], method: int = zipfile.ZIP_DEFLATED, mode: int = 0, month: int = 11
) -> bytearray:
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w") as opened:
        for name, content in contents.items():
            entry = zipfile.ZipInfo(name, (2026, month, 21, 10, 0, 0))
            entry.compress_type = method
            entry.external_attr = mode << 16
            opened.writestr(entry, content)
    return bytearray(held.getvalue())


def damaged(archive: bytearray, start: int = 60, end: int = 160) -> bytes:
    archive[start:end] = bytes(255 - byte for byte in archive[start:end])
    return bytes(archive)


def encrypted(archive: bytearray) -> bytes:
    archive[archive.find(b"PK\3\4") + 6] |= 1
    archive[archive.rfind(b"PK\1\2") + 8] |= 1
    return bytes(archive)


WORK = {"06.ipynb": EXERCISES}
ARCHIVES: dict[str, tuple[Callable[[], bytes], str]] = {
    "bz2": (lambda: damaged(zipped(WORK, zipfile.ZIP_BZIP2)), "it is damaged"),
    "lzma": (lambda: damaged(zipped(WORK, zipfile.ZIP_LZMA)), "it is damaged"),
    "deflated": (lambda: damaged(zipped(WORK)), "it is damaged"),
    "directory": (lambda: bytes(zipped(WORK)).replace(b"PK\1\2", b"PK\1\3"), "it is damaged"),
    "no archive": (lambda: b"PK", "it is damaged"),
    "password": (lambda: encrypted(zipped(WORK)), "it is protected by a password"),
    "link": (lambda: bytes(zipped(WORK, mode=stat.S_IFLNK | 0o777)), "it is a link"),
    "nested": (lambda: bytes(zipped({"a.zip": bytes(zipped(WORK))})), "it is an archive in an archive"),
    "other files": (lambda: bytes(zipped({"a.txt": b"a"})), "there is no notebook in it"),
    "large": (lambda: bytes(zipped({"06.ipynb": bytes(60_000_000)})), "it is larger than 50 MB"),
}


@pytest.mark.parametrize(("made", "problem"), ARCHIVES.values(), ids=ARCHIVES)
def test_a_damaged_archive_is_a_remark_and_the_others_are_graded(
    made: Callable[[], bytes], problem: str, tmp_path: Path
) -> None:
    for learner in ("ada", "eve"):
        (tmp_path / "class" / learner).mkdir(parents=True)
    (tmp_path / "class" / "ada" / "06.ipynb").write_bytes(EXERCISES)
    (tmp_path / "class" / "eve" / "work.zip").write_bytes(made())
    ada, eve = grade(tmp_path / "class")
    assert ada.learner == "ada" and ada.lesson == "06"
    assert eve.learner == "eve" and eve.problem.startswith(f"cannot be read: {problem}")


def test_an_archive_of_month_13_is_read(tmp_path: Path) -> None:
    (tmp_path / "class.zip").write_bytes(zipped({"ada/06.ipynb": EXERCISES}, month=13))
    (one,) = collected(tmp_path / "class.zip", tmp_path / "scratch")
    assert one.time == 0.0 and not one.problem and one.path.read_bytes() == EXERCISES


def test_the_whole_download_damaged_is_said(tmp_path: Path) -> None:
    (tmp_path / "class.zip").write_bytes(bytes(zipped(WORK)).replace(b"PK\1\2", b"PK\1\3"))
    with pytest.raises(ValueError, match=r"class\.zip cannot be unpacked.*Download it again"):
        collected(tmp_path / "class.zip", tmp_path / "scratch")


def test_what_is_unpacked_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for limit, most in (("MOST_FILES", 3), ("MOST_BYTES", 1_000), ("MOST_NOTEBOOKS", 2)):
        monkeypatch.setattr(collecting, limit, most)
    made = {
        "ada/w.zip": zipped({f"{one}.txt": b"" for one in range(4)}),
        "bob/w.zip": zipped({"a.ipynb": bytes(600), "b.ipynb": bytes(600)}),
        "eve/w.zip": zipped({f"{one}.ipynb": b"" for one in range(3)}),
    }
    for name, content in made.items():
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_bytes(content)
    found = {one.file: one.problem for one in collected(tmp_path, tmp_path / "scratch")}
    assert found == {
        "ada/w.zip": "cannot be read: it holds more than 3 files",
        "bob/w/a.ipynb": "",
        "bob/w/b.ipynb": "cannot be read: the notebooks in its archive are too large in total",
        "eve/w/0.ipynb": "not graded: 2 newer ones are",
        "eve/w/1.ipynb": "",
        "eve/w/2.ipynb": "",
    }


def test_an_archive_in_moodles_is_opened_and_belongs_to_its_learner(tmp_path: Path) -> None:
    theirs = bytes(zipped({"Bob_2_assignsubmission_file_/06.ipynb": EXERCISES, "../../06.ipynb": EXERCISES}))
    (tmp_path / "class.zip").write_bytes(zipped({"Eve_1_assignsubmission_file_/work.zip": theirs}))
    found = collected(tmp_path / "class.zip", tmp_path / "scratch")
    assert [(one.learner, one.problem) for one in found] == [("Eve", "")] * 2
    assert all(one.path.is_relative_to(tmp_path / "scratch") and one.path.exists() for one in found)


@pytest.mark.skipif(sys.platform == "win32", reason="links and pipes need privileges there, or are not there")
def test_links_and_pipes_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "06.ipynb").symlink_to(ROOT / "solutions" / "06_recomputation.ipynb")
    os.mkfifo(tmp_path / "08.ipynb")
    (tmp_path / "10.ipynb").mkdir()
    assert [one.problem for one in grade(tmp_path)] == [
        "cannot be read: it is a link",
        "cannot be read: it is not a file",
        "cannot be read: it is not a file",
    ]


def test_whatever_goes_wrong_is_a_remark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ada", "eve"):
        (tmp_path / f"{name}.ipynb").write_bytes(EXERCISES)
    told = iter([({}, "")])
    monkeypatch.setattr(grading, "run_alone", lambda *_: next(told))
    ada, eve = grade(tmp_path, jobs=1)
    assert ada.lesson == "06" and eve.problem.startswith("cannot be graded: it is damaged (StopIteration")


def test_notebooks_in_other_encodings_are_read(tmp_path: Path) -> None:
    (tmp_path / "ada.ipynb").write_bytes(b"\xef\xbb\xbf" + EXERCISES)
    (tmp_path / "bob.ipynb").write_bytes(EXERCISES.decode().encode("utf-16"))
    (tmp_path / "eve.ipynb").write_bytes(b'{"cells": "\xe9"}')
    ada, bob, eve = grade(tmp_path)
    assert ada.lesson == bob.lesson == "06"
    assert eve.problem.startswith("cannot be read: it is damaged (Unicode")


def test_archives_with_faults_at_random_cost_only_themselves(tmp_path: Path) -> None:
    chance = random.Random(20271)
    (tmp_path / "ada").mkdir()
    (tmp_path / "ada" / "06.ipynb").write_bytes(EXERCISES)
    for number in range(150):
        method = chance.choice((0, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA))
        archive = zipped({"06.ipynb": EXERCISES[: chance.choice((100, 3000))], "b.ipynb": b"{}"}, method)
        for _ in range(chance.choice((1, 5))):
            archive[chance.randrange(len(archive))] = chance.randrange(256)
        (tmp_path / f"z{number}").mkdir()
        (tmp_path / f"z{number}" / "work.zip").write_bytes(archive)
    graded = grade(tmp_path)
    assert {one.learner for one in graded} == {"ada", *(f"z{one}" for one in range(150))}
    assert sum("it is damaged" in one.problem for one in graded) > 50


def test_a_table_that_cannot_be_written_whole_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_table([Graded("bob", "06", {}, "", 0.0)], tmp_path / "grades.csv")
    before = (tmp_path / "grades.csv").read_bytes()
    monkeypatch.setattr(os, "fsync", lambda _: os.close(-1))
    with pytest.raises(OSError, match="Bad file"):
        write_table([], tmp_path / "grades.csv")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"grades.csv": before}


FORMULAS = ("=1", "+1", "-1", "@A1", "\t=1", "\r=1", "\n=1", "  =1", "\0=1", "\ufeff=1", "＝1", "\tharmless")


@pytest.mark.parametrize("text", FORMULAS, ids=ascii)
def test_no_cell_is_a_formula(text: str, tmp_path: Path) -> None:
    one = Graded(text, "06", {"06.1": Outcome("error", text)}, text, 0.0, text)
    write_table([one], tmp_path / "grades.csv")
    with (tmp_path / "grades.csv").open(encoding="utf-8", newline="") as file:
        _, row = csv.reader(file)
    assert [row[cell][:1] for cell in (0, 4, 5, 7)] == ["'"] * 4 and row[4].replace("'", "") == text


def test_no_part_of_a_cell_is_a_formula_where_semicolons_separate(tmp_path: Path) -> None:
    outcome = Outcome("error", "a; b;\t=1;-2; 3 - 2 = 1")
    write_table([Graded("ada", "", {"": outcome}, "", 0.0)], tmp_path / "x.csv")
    assert "a; b;\t'=1;'-2; 3 - 2 = 1" in (tmp_path / "x.csv").read_text(encoding="utf-8")


def test_names_cannot_write_to_the_terminal_nor_stop_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "class.zip").write_bytes(zipped({"\x1b[31mŁuk\nasz/06.ipynb": EXERCISES}))
    said = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", said)
    assert main(["grade", "--here", str(tmp_path / "class.zip"), "--out", str(tmp_path / "out")]) == 0
    said.seek(0)
    lines = said.read().splitlines()
    assert lines[0].startswith("[31m?uk asz: 0 of ") and "\x1b" not in lines[0]
    assert lines[1] == Isolation(ROOT, "", (), "nothing runs").words
    assert lines[1] in (tmp_path / "out" / "class.html").read_text(encoding="utf-8").replace("&#x27;", "'")


def test_a_check_that_first_says_how_long_it_takes_has_passed_all_the_same() -> None:
    assert outcome(None, "This takes ten seconds.\n✓ 01.1 Right.\n") == ("passed", "")
    assert outcome(None, "This takes ten seconds.\n") == ("not checked", "")
