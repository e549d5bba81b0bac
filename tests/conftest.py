"""What every test shares: a machine that nobody has used yet, and how long each lesson took."""

import gc
import importlib
import os
import random
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

LONGEST = ("test_browser.py", "test_site.py", "test_quality.py")
"""Files that take a minute or so. A worker that is free takes the next file: the last ones should be short."""


FULL = os.environ.get("COURSE_FULL") == "1"
"""Whether every parameter set of every sweep is asked for: `python3 -m course_utils test --full`."""


def pytest_configure(config: pytest.Config) -> None:
    gc.disable()  # until all tests are there: a third of collecting them was the search for cycles among them
    config.addinivalue_line("markers", "sweep(most): so many of the parameter sets stand for all, which --full runs")
    if not hasattr(config, "workerinput"):  # workers inherit what the controller sets
        _prepare_machine(config)
    config.pluginmanager.register(NotebookTimes(config), "course-notebook-times")


def _prepare_machine(config: pytest.Config) -> None:
    """Give this process, its workers and their kernels the environment in which the stored outputs were made."""
    home = tempfile.TemporaryDirectory(prefix="course-tests-", ignore_cleanup_errors=True)
    config.add_cleanup(home.cleanup)
    build = importlib.import_module("course_utils.recording.notebooks")
    os.environ.update(build.kernel_environment(Path(home.name)))
    if config.getoption("--nbval", default=False):
        importlib.import_module("matplotlib.font_manager")  # or the first lesson says on stderr that it looks for fonts


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
    """From each file on, `gc.collect()` looks through what that file made, not through thousands of other tests."""
    gc.freeze()


class NotebookTimes:
    """Adds up the time of each notebook's cells and shows it at the end. No time makes a test fail."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.finished: dict[str, float] = defaultdict(float)

    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        """Leave out the saved copies of notebooks that a learner has edited."""
        return True if ".edited-" in collection_path.name else None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        notebook = report.nodeid.partition("::")[0]
        if notebook.endswith(".ipynb"):
            self.finished[notebook] += report.duration

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self.finished:
            return
        budget = importlib.import_module("course_utils.recording.tasks").budget
        terminalreporter.section("slowest notebooks")
        for notebook, seconds in sorted(self.finished.items(), key=lambda pair: -pair[1])[:10]:
            allowed = budget(self.config.rootpath / notebook)
            over = "  over its budget" if seconds > allowed else ""
            terminalreporter.write_line(f"{seconds:6.1f} s of {allowed:3.0f} s  {notebook}{over}")


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A GPU that is not there, of 200 MB; a simulation is prepared before, as it looks for a GPU only once."""
    from stand_in import stand_in

    from course_utils.measuring.simulated import availability
    from course_utils.units import MB

    availability()
    monkeypatch.delenv("COURSE_SOURCE", raising=False)
    with stand_in(200 * MB) as memory:
        yield memory
