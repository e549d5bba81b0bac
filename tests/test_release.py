"""Is the learners' copy of the course complete, and free of solutions?"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from course_utils.cli.maintain import TEST_OPTIONS
from course_utils.interactive.course_files import ANSWERS
from course_utils.teaching.release import release


def test_the_learners_copy_has_no_solutions_and_works(tmp_path: Path) -> None:
    target = tmp_path / "copy"
    names = [str(name) for name in release(target)]
    assert "exercises" in names and not {"solutions", ".git", ".venv"} & set(names)
    text = "".join(path.read_text(encoding="utf-8") for path in target.rglob("*.ipynb"))
    assert not any(mark in text for mark in ANSWERS)
    assert not list(target.rglob("src")) and not list(target.rglob("skeletons"))
    assert (target / "conftest.py").exists()
    in_tests = {path.relative_to(target).as_posix() for path in (target / "tests").iterdir()}
    assert {word for word in TEST_OPTIONS if "/" in word} == in_tests
    linked = re.findall(r"\]\(([^)#:]+)[)#]", (target / "README.md").read_text(encoding="utf-8"))
    assert len(linked) > 5 and not [path for path in linked if not (target / path).exists()]
    command = [sys.executable, "-m", "course_utils", "estimate", "gpt2"]
    done = subprocess.run(command, cwd=target, capture_output=True, text=True, check=True)
    assert "optimizer states" in done.stdout
    with pytest.raises(ValueError, match="is not empty"):
        release(target)


@pytest.mark.parametrize(
    ("file", "target", "problem"),
    [("docs/index.md", "docs/copy", "is inside"), ("exercises/06_x.ipynb", "copy", "holds a solution")],
)
def test_a_release_that_would_harm_is_refused(file: str, target: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / file).parent.mkdir()
    (tmp_path / file).write_text("### BEGIN SOLUTION")
    with pytest.raises(ValueError, match=problem):
        release(tmp_path / target, tmp_path)
    assert not (tmp_path / target).exists()
