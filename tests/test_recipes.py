"""Does each lesson end in code of one's own that runs, with torch's calls and a line to change?"""

import gc
import linecache
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from lesson_source import SOURCES, cells
from torch.nn.parallel import DistributedDataParallel

from course_utils.authoring.pages import recipes
from course_utils.interactive.course_files import ROOT

LESSONS = [path for path in sorted(SOURCES.glob("[01]*.py")) if "01" <= path.name[:2] <= "17"]
OF_TORCH = re.compile(r"\b(torch|nn|dist)\.\w|\.(backward|step|zero_grad)\(")


def own(path: Path) -> list[str]:
    """The code of a lesson's section "In your own script"."""
    section = path.read_text(encoding="utf-8").partition("\n# ## In your own script\n")[2]
    section = re.split(r"(?m)^# ## ", section)[0]
    return [cell for cell in cells(path) if cell in section]


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """An empty folder to run in, as the simulated course; nothing may be left in it."""
    monkeypatch.setenv("COURSE_SOURCE", "simulated")
    monkeypatch.setenv("COURSE_HOME", str(tmp_path / "home"))
    folder = tmp_path / "empty"
    folder.mkdir()
    monkeypatch.chdir(folder)
    destroy = dist.destroy_process_group

    def destroy_after_models() -> None:
        """Else the group ends while Python holds its lock, and a thread of it may wait for that: for ever."""
        assert not any(type(one) is DistributedDataParallel for one in gc.get_objects())
        destroy()

    monkeypatch.setattr(dist, "destroy_process_group", destroy_after_models)
    yield folder
    if dist.is_available() and dist.is_initialized():  # by code that failed
        destroy()


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_a_lesson_ends_in_code_of_ones_own(path: Path, alone: Path) -> None:
    codes = own(path)
    assert codes and "course_utils" not in codes[0]
    names = {"__name__": "__main__"}
    for number, code in enumerate(codes):
        name = f"<{alone}: cell {number}>"
        # as IPython does, for getsource
        linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
        exec(compile(code, name, "exec"), names)
    assert not (dist.is_available() and dist.is_initialized()) and not list(alone.iterdir())


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_a_lesson_shows_torchs_own_code_and_lines_to_change(path: Path) -> None:
    """Torch in a quarter of its cells or more."""
    all_cells = cells(path)
    with_torch = [cell for cell in all_cells if OF_TORCH.search(cell)]
    assert len(with_torch) >= 0.25 * len(all_cells)
    assert sum("# change this" in cell for cell in all_cells) >= 6


def test_the_page_of_recipes_has_each_lessons_own() -> None:
    page = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    assert page == recipes(ROOT)
    for path in LESSONS:
        first, *more = own(path)
        code = [f"{first}\n```", "\n\n".join([first, *more[:1]])]  # a second cell follows, maybe after words
        assert any(f"```python\n{one}" in page for one in code) and f"notebooks/{path.stem}.ipynb)" in page
