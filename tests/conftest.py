"""What every test shares, besides what the conftest.py above gives to notebooks as well."""

import gc
import os
import random
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

LONGEST = (
    "test_browser_full.py", "test_site_live.py", "test_scripts_of_others.py", "test_wheel.py", "test_site.py",
    "test_grading_whole.py", "test_ranks.py", "test_published_steps_again.py", "test_distributed.py",
)  # fmt: skip
"""Files that take a minute or so. A worker that is free takes the next file: the last ones should be short.
"""

FULL = os.environ.get("COURSE_FULL") == "1"
"""Whether every parameter set of every sweep is asked for: `python3 -m course_utils test --full`."""


def pytest_configure(config: pytest.Config) -> None:
    gc.disable()  # until all tests are there: a third of collecting them was the search for cycles among them
    config.addinivalue_line(
        "markers", "sweep(most): so many of the parameter sets stand for all, which --full runs"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The longest files first, then the notebooks; of each sweep a sample."""
    items.sort(key=lambda item: (item.path.name not in LONGEST, item.path.suffix != ".ipynb"))
    sweeps = defaultdict[tuple[Path, str, int], list[pytest.Item]](list)
    for item in items:
        for mark in item.iter_markers("sweep"):
            sweeps[item.path, getattr(item, "originalname", item.name), mark.args[0]].append(item)
    drawn = {item for (*_, most), sets in sweeps.items() for item in some(sets, most)}
    left_out = {item for sets in sweeps.values() for item in sets} - drawn
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=list(left_out))


def pytest_collection_finish() -> None:
    gc.enable()


def some(cases: list[pytest.Item], most: int) -> list[pytest.Item]:
    """At most that many of the cases, drawn alike each time; with --full all of them."""
    return cases if FULL or len(cases) <= most else random.Random(16).sample(cases, most)


@pytest.fixture(autouse=True, scope="module")
def what_is_there_need_not_be_searched() -> None:
    """From each file on, `gc.collect()` looks through what that file made, not through thousands of other
    tests.
    """
    gc.freeze()


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A GPU that is not there, of 200 MB; a simulation is prepared before, as it looks
    for a GPU only once.
    """
    from stand_in import stand_in

    from course_utils.measuring.simulated import availability
    from course_utils.units import MB

    availability()
    monkeypatch.delenv("COURSE_SOURCE", raising=False)
    with stand_in(200 * MB) as memory:
        yield memory
