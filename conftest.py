"""What every run of pytest over notebooks shares: a machine that nobody has used, and each lesson's time.

It needs the extra `lab` alone: `pytest --nbval-lax notebooks/00_start_here.ipynb`.
"""

import importlib
import os
import tempfile
from collections import defaultdict
from pathlib import Path

import pytest

SANITIZE = Path(__file__).resolve().parent / "tests" / "nbval_sanitize.cfg"


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # workers inherit what the controller sets
        _prepare_machine(config)
    if config.pluginmanager.hasplugin("nbval"):
        config.option.nbval_current_env = not config.option.nbval_kernel_name
        config.option.nbval_sanitize_with = config.option.nbval_sanitize_with or str(SANITIZE)
    config.pluginmanager.register(NotebookTimes(config), "course-notebook-times")


def _prepare_machine(config: pytest.Config) -> None:
    """Give this process, its workers and their kernels the environment in which the stored outputs were made.

    A learner's guesses, progress, number of threads and COURSE_SOURCE change no output then.
    """
    home = tempfile.TemporaryDirectory(prefix="course-tests-", ignore_cleanup_errors=True)
    config.add_cleanup(home.cleanup)
    notebooks = importlib.import_module("course_utils.interactive.notebook_runs")
    os.environ.update(notebooks.kernel_environment(Path(home.name)))
    if config.getoption("--nbval", default=False):
        # or the first lesson says on stderr that it looks for fonts
        importlib.import_module("matplotlib.font_manager")


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
        budget = importlib.import_module("course_utils.interactive.course_files").budget
        terminalreporter.section("slowest notebooks")
        for notebook, seconds in sorted(self.finished.items(), key=lambda pair: -pair[1])[:10]:
            allowed = budget(self.config.rootpath / notebook)
            over = "  over its budget" if seconds > allowed else ""
            terminalreporter.write_line(f"{seconds:6.1f} s of {allowed:3.0f} s  {notebook}{over}")
