"""What every test shares: a machine that nobody has used yet, and how long each lesson takes."""

import functools
import importlib
import json
import os
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
BUDGET_SECONDS = 60.0
"""What a lesson may take when run from top to bottom, unless its source states `course: {budget_seconds: 90}`."""

SLACK = float(os.environ.get("COURSE_BUDGET_SLACK", "2"))
"""How much slower than the author's machine this one may be, two lessons at a time included."""


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # workers inherit what the controller sets
        _prepare_machine(config)
    config.pluginmanager.register(NotebookTimes(config), "course-notebook-times")


def _prepare_machine(config: pytest.Config) -> None:
    """Give this process, its workers and their kernels the environment in which the stored outputs were made."""
    home = tempfile.TemporaryDirectory(prefix="course-tests-", ignore_cleanup_errors=True)
    config.add_cleanup(home.cleanup)
    build = importlib.import_module("course_utils.authoring.execute")
    os.environ.update(build.kernel_environment(Path(home.name)))
    if config.getoption("--nbval", default=False):
        importlib.import_module("matplotlib.font_manager")  # or the first lesson says on stderr that it looks for fonts


class NotebookTimes:
    """Adds up the time of each notebook's cells; a lesson over its budget fails in the cell that crosses it."""

    def __init__(self, config: pytest.Config) -> None:
        self.running: dict[Path, float] = defaultdict(
            float
        )  # where the cells run: a worker has all cells of a notebook
        self.blamed: set[Path] = set()
        self.finished: dict[str, float] = defaultdict(float)  # where the reports arrive: the controller
        self.config = config

    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        """Leave out the saved copies of notebooks that a learner has edited."""
        return True if ".edited-" in collection_path.name else None

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
        report = yield
        if item.path.suffix == ".ipynb":
            self.running[item.path] += call.duration
            allowed = budget_seconds(item.path) * SLACK
            too_long = self.running[item.path] > allowed and item.path not in self.blamed
            if too_long and report.when == "call" and report.passed:
                self.blamed.add(item.path)
                report.outcome = "failed"
                report.longrepr = (
                    f"{item.path.name} takes more than {allowed:.0f} s ({SLACK:g} times its budget). Shorten it, state "
                    "another budget in its source, or set COURSE_BUDGET_SLACK on a slow machine."
                )
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        notebook = report.nodeid.partition("::")[0]
        if notebook.endswith(".ipynb"):
            self.finished[notebook] += report.duration

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self.finished:
            return
        terminalreporter.section("slowest notebooks")
        for notebook, seconds in sorted(self.finished.items(), key=lambda pair: -pair[1])[:10]:
            budget = budget_seconds(self.config.rootpath / notebook)
            terminalreporter.write_line(f"{seconds:6.1f} s of {budget:3.0f} s  {notebook}")


@functools.cache
def budget_seconds(notebook: Path) -> float:
    """The seconds that a notebook's source grants it; `BUDGET_SECONDS` where it states none."""
    metadata = json.loads(notebook.read_text(encoding="utf-8"))["metadata"]
    return float(metadata.get("course", {}).get("budget_seconds", BUDGET_SECONDS))


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A GPU that is not there, of 200 MB; a simulation is prepared before, as it looks for a GPU only once."""
    from course_utils.live_checks.stand_in import stand_in
    from course_utils.measuring.simulated import availability
    from course_utils.units import MB

    availability()
    monkeypatch.delenv("COURSE_SOURCE", raising=False)
    with stand_in(200 * MB) as memory:
        yield memory
