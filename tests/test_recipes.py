"""Does each lesson end in code of one's own that runs, with torch's calls and a line to change?"""

import ast
import gc
import linecache
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from matplotlib import pyplot
from torch.nn.parallel import DistributedDataParallel
from torch_statements import SOURCES, counted

from course_utils import gpu
from course_utils.authoring.pages import OWN_FIGURE, recipes
from course_utils.interactive.course_files import ROOT

LESSONS = [path for path in sorted(SOURCES.glob("[01]*.py")) if "01" <= path.name[:2] <= "16"]
CODELESS = re.compile(r"^(In your own script|Take home|\w+ questions)$")


def sections(path: Path) -> dict[str, list[str]]:
    """The code cells of each section of a lesson's source, by its heading."""
    found: dict[str, list[str]] = {}
    parts = re.split(r"(?m)^# %%(.*)$", path.read_text(encoding="utf-8"))
    heading = ""
    for mark, body in zip(parts[1::2], parts[2::2], strict=True):
        if "[markdown]" not in mark:
            found.setdefault(heading, []).append(body.strip())
        for one in re.findall(r"(?m)^# ## (.+)$", body) if "[markdown]" in mark else ():
            heading = one
            found.setdefault(heading, [])
    return found


def own(path: Path) -> list[str]:
    return sections(path).get("In your own script", [])


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """An empty folder to run in, as the simulated course; nothing may be left in it."""
    monkeypatch.setenv("COURSE_SOURCE", "simulated")
    monkeypatch.setenv("COURSE_HOME", str(tmp_path / "home"))
    folder = tmp_path / "empty"
    folder.mkdir()
    monkeypatch.chdir(folder)
    yield folder
    # by code that failed: later tests begin without its group
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def executed(codes: list[str], folder: Path) -> None:
    """Run cells in order, in one namespace of their own; no file and no group of processes is left behind."""
    names = {"__name__": "__main__"}
    for number, code in enumerate(codes):
        name = f"<{folder}: cell {number}>"
        # as IPython does, for getsource
        linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
        exec(compile(code, name, "exec"), names)
    assert not (dist.is_available() and dist.is_initialized()) and not list(folder.iterdir())


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_a_lesson_ends_in_code_of_ones_own(path: Path, alone: Path) -> None:
    first = next(iter(own(path)), "")
    assert first and "course_utils" not in first
    executed([first], alone)


def test_a_wrapped_model_goes_before_the_group_that_it_uses(
    alone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the group ends while Python holds its lock, and a thread of it may wait for that: for ever."""
    left = list[int]()
    destroy = dist.destroy_process_group

    def destroying() -> None:
        left.append(sum(type(one) is DistributedDataParallel for one in gc.get_objects()))
        destroy()

    monkeypatch.setattr(dist, "destroy_process_group", destroying)
    [path] = (path for path in LESSONS if path.stem.startswith("10"))
    executed(own(path)[:1], alone)
    assert left == [0]


@pytest.mark.parametrize("path", [path for path in LESSONS if len(own(path)) > 1], ids=lambda path: path.stem)
def test_all_cells_of_that_section_run_in_order_where_a_gpu_is_simulated(path: Path, alone: Path) -> None:
    executed(own(path), alone)


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_three_statements_in_ten_are_of_torch(path: Path) -> None:
    everything, torch = counted(path)
    assert torch >= 0.3 * everything, f"{torch} of {everything}"


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_each_section_has_a_line_to_change(path: Path) -> None:
    assert [heading for heading, codes in sections(path).items() if changeable(heading, codes)] == []


def changeable(heading: str, codes: list[str]) -> bool:
    """True for a section whose code has something to change, and no line that says so."""
    plain = [code for code in codes if not _controls_alone(code)]
    if not heading or not plain or CODELESS.match(heading):
        return False
    return not re.search(r"# change this$", "\n".join(codes), re.MULTILINE)


def _controls_alone(code: str) -> bool:
    """True for a cell that only opens something with controls of its own: an import and one call."""
    plain = "\n".join(line for line in code.splitlines() if not line.startswith(("%", "!")))
    body = [node for node in ast.parse(plain).body if not isinstance(node, ast.Import | ast.ImportFrom)]
    return len(body) <= 1 and all(isinstance(node, ast.Expr) for node in body)


def test_the_page_of_recipes_has_each_lessons_own() -> None:
    page = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    # the last is a figure of one's own
    assert page == recipes(ROOT) and page.count("\n## ") == len(LESSONS) + 1
    for path in LESSONS:
        assert f"```python\n{own(path)[0]}\n```" in page and f"notebooks/{path.stem}.ipynb)" in page
    said = re.findall(r"\n## [^\n]+\n\n(.+?)\n\n```python\n", page, re.DOTALL)
    assert len(said) == len(LESSONS) + 1 and all(len(text.split()) > 8 for text in said)
    for place in ("README.md", "docs/index.md", "notebooks/src/00_start_here.py"):
        assert "recipes.md" in (ROOT / place).read_text(encoding="utf-8"), place


def test_the_last_recipe_saves_a_figure_and_a_restyled_one(alone: Path) -> None:
    [code] = re.findall(r"```python\n(.+?)```", OWN_FIGURE.read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(code, "own figure", "exec"), names)
    plain = alone / "gpt2-xl.png"
    restyled = alone / "gpt2-xl-restyled.pdf"
    assert plain.read_bytes()[:4] == b"\x89PNG" and restyled.read_bytes()[:4] == b"%PDF"
    room = gpu("RTX4090-24GB").memory
    (kept, recomputed) = (row.total for row in names["rows"].values())
    assert room < recomputed < kept, "what its title says"
    assert names["ax"].get_title().startswith("Recomputation alone is not enough for 24 GB")
    pyplot.close(names["ax"].figure)


def test_the_plain_code_of_the_tour_prints_what_it_says(
    alone: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    code = re.findall(r"```python\n(import torch\n.+?)```", text, re.DOTALL)[0]
    with_layer_freed = code.replace(
        "{torch.cuda.memory_allocated():,}", "{torch.cuda.memory_allocated() - before:,}"
    )
    executed(
        [with_layer_freed.replace("    layer =", "    before = torch.cuda.memory_allocated()\n    layer =")],
        alone,
    )
    assert re.findall(r"# ([\d,]+ bytes)\n", code)[0] in capsys.readouterr().out.splitlines()
