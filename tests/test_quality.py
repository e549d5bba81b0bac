"""The repository's own checks, as `python3 -m course_utils lint` runs them."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from needs import need

from course_utils.authoring.build import committed_notebooks
from course_utils.cli.maintain import checks
from course_utils.interactive.course_files import ROOT

need("codespell_lib", "pyrefly", "ruff")

CHECKS = dict(checks(Path(sys.executable)))


def run(name: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(CHECKS[name], cwd=folder, capture_output=True, text=True, timeout=1200, check=False)


@pytest.mark.parametrize("name", CHECKS)
def test_repository_is_clean(name):
    done = run(name, ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("ruff check", "import os\n"),
        ("ruff format", "x = {  'a':1 }\n"),
        ("pyrefly", "x: int = 'a'\n"),
        ("codespell", "# Teh spelling is wrong\n"),  # codespell:ignore
    ],
)
def test_each_check_objects_to_what_it_is_for(name, text, tmp_path):
    """Under the repository's own settings, and to nothing else there."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for folder in ("course_utils", "tests"):
        (tmp_path / folder).mkdir()
    file = tmp_path / "tests" / "test_it.py"
    file.write_text("x = 1\n")
    before = run(name, tmp_path)
    assert before.returncode == 0, before.stdout + before.stderr
    file.write_text(text)
    assert run(name, tmp_path).returncode != 0


# Sizes, in bytes: what a clone fetches, and what a browser has to show

WHOLE, NOTEBOOK, CELL = 11_000_000, 400_000, 150_000


def too_large(path):
    """What is too large in a notebook: the file, or a cell's outputs as they are stored."""
    found = [f"{path.name} has {path.stat().st_size:,} bytes"] if path.stat().st_size > NOTEBOOK else []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        size = len(json.dumps(cell.get("outputs", []), indent=1, ensure_ascii=False).encode())
        if size > CELL:
            found.append(f"the outputs of {cell['id']} have {size:,} bytes")
    return found


def test_no_notebook_and_no_cell_is_too_large():
    assert [line for path in committed_notebooks(ROOT) for line in too_large(path)] == []


def test_a_large_notebook_and_a_large_cell_are_found(tmp_path):
    cells = [
        {"id": f"x-{number}", "outputs": [{"text": size * "x"}]}
        for number, size in enumerate((149_000, 151_000))
    ]
    path = tmp_path / "01_x.ipynb"
    path.write_text(json.dumps({"cells": cells}))
    assert too_large(path) == ["the outputs of x-1 have 151,022 bytes"]
    path.write_text(json.dumps({"cells": [cells[0]] * 3}))
    assert [line.split()[0] for line in too_large(path)] == ["01_x.ipynb"]


def test_the_repository_is_small_and_holds_nothing_that_a_build_fetches():
    if not shutil.which("git") or not (ROOT / ".git").exists():
        pytest.skip("this is no git repository")
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    files = [ROOT / name for name in done.stdout.split("\0") if name and (ROOT / name).exists()]
    assert sum(path.stat().st_size for path in files) < WHOLE
    assert [path.name for path in files if path.suffix in (".wasm", ".whl", ".tgz", ".zip", ".mjs")] == []
