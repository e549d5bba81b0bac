"""Does a search find what the course has, best first, quickly, and never an answer?"""

import re
import subprocess
import sys
from html import unescape
from pathlib import Path
from urllib.parse import unquote

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from course_utils.authoring.build import ROOT, committed_notebooks
from course_utils.cli.main import main
from course_utils.lessons import quiz
from course_utils.lessons.shared.search import find, places, plain

SECRET = "shibboleth"


def test_the_best_place_comes_first() -> None:
    assert find("K").places[0].name == "glossary: K"
    assert find("max_memory_allocated").places[0].name.startswith("lesson 01")
    answered = find("resume", "checkpoint").places[0]
    assert answered.kind == "question" and answered.line.startswith("torch.load puts")


def test_every_kind_of_place_is_searched() -> None:
    sections = list(places(ROOT))
    kinds = {section.kind for section in sections}
    assert kinds == {"glossary", "cheat sheet", "errata", "question", "lesson", "exercises", "quiz"}
    for folder in ("notebooks", "exercises"):
        assert set(committed_notebooks(ROOT, folder)) <= {section.path for section in sections}
    whole = " ".join(section.text + section.code for section in sections)
    for question in quiz(12).questions:
        assert plain(question.text) in whole and plain(question.right.why) not in whole


@pytest.fixture
def course(tmp_path: Path) -> Path:
    """A course of one lesson with a quiz, one exercise with hints and an answer, and a solution."""
    lesson = [
        new_markdown_cell("# 01 · Bytes\nHere `lives` the **cache**.\n\n## Holes\n[Free](x.md) blocks."),
        new_code_cell("quiz(1)"),
    ]
    hint = f"<details><summary>Hint 1</summary>\n\n{SECRET}\n\n</details>"
    exercise = [new_markdown_cell("# Exercises 01 · Bytes\n## 1 · Count\nHow many?"), new_markdown_cell(hint)]
    exercise.append(new_code_cell(f"{SECRET} = 3"))
    for name, cells in (("notebooks", lesson), ("exercises", exercise), ("solutions", exercise)):
        (tmp_path / name).mkdir()
        nbformat.write(new_notebook(cells=cells), tmp_path / name / "01_bytes.ipynb")
    nbformat.write(new_notebook(cells=lesson), tmp_path / "notebooks" / "01_bytes.edited-2026-01-01.ipynb")
    return tmp_path


def test_no_solution_hint_or_choice_is_searched(course: Path) -> None:
    assert not find(SECRET, root=course).places
    assert find("count", root=course).places[0].name == "exercises 01 · Bytes: 1 · Count"
    asked = [place.text for place in places(course) if place.kind == "quiz"]
    assert asked == [plain(question.text) for question in quiz(1).questions]


def test_links_lead_from_the_notebooks_folder_to_files_cells_and_headings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(ROOT / "notebooks")
    shown = find("reserved memory")._repr_html_()
    links = [unquote(unescape(link)) for link in re.findall(r"<a href='([^']*)'>", shown)]
    assert links[0] == "../docs/glossary.md#allocated-and-reserved"
    assert any(link.startswith("../docs/questions.md#") for link in links)
    for link in links:
        path, fragment = link.split("#")
        text = Path(path).read_text(encoding="utf-8")
        cell = f'"id": "{fragment.removeprefix("cell-id=")}"'
        wanted = cell if fragment.startswith("cell-id=") else f'<span id="{fragment}"></span>\n\n## '
        headings = [heading.replace(" ", "-") for heading in re.findall("^### (.+)$", text, re.MULTILINE)]
        assert wanted in text or fragment in headings


def test_the_command_needs_python_alone(capsys: pytest.CaptureFixture[str]) -> None:
    command = [sys.executable, "-S", "-E", "-m", "course_utils", "find", "--here", "reserved", "memory"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[2] == "glossary: Allocated and reserved"
    assert main(["find", " ?!"]) == 1 and "name what to look for" in capsys.readouterr().err
