"""The order of the house: imports point down, none goes in a circle, and folders need what they may need."""

import re
import subprocess
import sys

import house
import pytest

import course_utils

STANDARD_LIBRARY_ALONE = ("estimating", "planning", *house.NOUNS)
"""These answer without torch: they run before anything is installed, and in a browser."""

TORCH_ALONE = ("watching", "measuring", "allocator", "networks", "ranks")
"""These run on a GPU machine that has torch and nothing else."""


def test_the_top_of_the_package_has_the_folders_and_the_nouns_alone() -> None:
    there = {path.stem for path in house.PACKAGE.iterdir() if path.suffix == ".py" or any(path.rglob("*.py"))}
    assert there == {*house.FLOORS, *house.NOUNS, "__init__", "__main__"}
    assert not there & set(house._offered()), (
        "an imported module would hide what the package offers by that name"
    )


def test_every_import_points_down() -> None:
    upward = set()
    for name in house.modules():
        for other in house.ours(name):
            if house.floor(other) < house.floor(name):
                upward.add((name, other))
    assert {arrow for arrow in upward if arrow[0] not in ("", "__main__")} == set()


def test_the_package_imports_itself_by_relative_names() -> None:
    written = re.compile(r"^from course_utils\b", re.MULTILINE)
    files = house.modules().values()
    assert [path for path in files if written.search(path.read_text(encoding="utf-8"))] == []


def test_no_imports_go_in_a_circle() -> None:
    assert house.circles() == []


def foreign(folders: tuple[str, ...]) -> set[str]:
    """Packages outside the standard library that modules in these folders import, and the course's own."""
    names = [name for name in house.modules() if house.place(name) in folders]
    assert {house.place(name) for name in names} == set(folders)
    others = {other.partition(".")[0] for name in names for other in house.imports(name) - house.ours(name)}
    return others - {*sys.stdlib_module_names, "course_utils"}


def test_estimates_need_the_standard_library_alone() -> None:
    assert foreign(STANDARD_LIBRARY_ALONE) == set()


def test_measuring_runs_on_a_machine_with_torch_alone() -> None:
    assert foreign(TORCH_ALONE) == {"torch"}


def python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=house.ROOT, capture_output=True, text=True, timeout=1200
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_estimates_and_the_explorers_core_load_nothing_but_the_standard_library() -> None:
    """So that a page can run them in a browser."""
    code = (
        "import sys; before = set(sys.modules); import course_utils as c;"
        "c.estimate(c.TrainingRun('gpt2-xl', micro_batch=32));"
        "from course_utils.interactive.explorer import *; dashboard({}); next_changes({}); best_plan({});"
        "print({name.partition('.')[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names))"
    )
    assert python(code).strip() == "{'course_utils'}"


def test_what_the_package_offers_is_there_and_an_unknown_name_lists_it() -> None:
    for name in course_utils.__all__:
        assert getattr(course_utils, name) is not None
    assert dir(course_utils) == course_utils.__all__
    with pytest.raises(AttributeError, match=r"has no 'estimat'.*estimate"):
        course_utils.estimat  # noqa: B018  # pyrefly: ignore [missing-attribute]
