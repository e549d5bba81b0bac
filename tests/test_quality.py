"""The repository's own checks, as `python3 -m course_utils lint` runs them."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from course_utils.cli.maintain import checks
from course_utils.interactive.course_files import ROOT

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
