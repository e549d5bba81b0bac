"""What every run of pytest over notebooks shares: a machine that nobody has used, and their CPU seconds.

It needs the extra `lab` alone: `pytest --nbval notebooks`.
"""

import importlib
import os
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

SANITIZE = Path(__file__).resolve().parent / "tests" / "nbval_sanitize.cfg"
NEEDED = ("nbval", "nbclient", "torch", "ipykernel", "ipywidgets", "matplotlib", "psutil")
"""Modules without which no notebook and hardly a test of the course runs."""


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    if not pluginmanager.hasplugin("nbval"):  # `pytest_configure` then says what is missing
        for option in ("--nbval", "--nbval-lax"):
            parser.addoption(option, action="store_true", help="run notebooks (nbval is not installed here)")


def pytest_configure(config: pytest.Config) -> None:
    _refuse_a_python_that_lacks_the_course()
    if not hasattr(config, "workerinput"):  # workers inherit what the controller sets
        _prepare_machine(config)
    if config.pluginmanager.hasplugin("nbval"):
        config.option.nbval_current_env = not config.option.nbval_kernel_name
        config.option.nbval_sanitize_with = config.option.nbval_sanitize_with or str(SANITIZE)
    config.pluginmanager.register(NotebookTimes(config), "course-notebook-times")


def _refuse_a_python_that_lacks_the_course() -> None:
    """Raise UsageError, with what to do, where this Python cannot run the course."""
    lacking = [name for name in NEEDED if find_spec(name) is None]
    if sys.version_info < (3, 11):  # noqa: UP036 (somebody's own pytest may run on an older one)
        lacking.insert(0, "Python 3.11 or newer")
    if lacking:
        raise pytest.UsageError(
            f"{sys.executable} lacks {', '.join(lacking)}. "
            "`python3 -m course_utils test` makes an environment for them, and runs them there. "
            'With pip: `pip install -e ".[lab,test]"`, then `python -m pytest --nbval notebooks`.'
        )


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
    """Adds up the CPU seconds of each notebook and shows them at the end. No time makes a test fail.

    A kernel is a child of this process, which is told the CPU seconds of a child, and of the child's own
    children, when the child has ended. Windows tells none. nbval kills kernels, so what a kernel's children
    have taken that still run is asked just before.
    """

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.seconds: dict[str, float] = defaultdict(float)

    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        """Leave out the saved copies of notebooks that a learner has edited."""
        return True if ".edited-" in collection_path.name else None

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
        """The kernel of a notebook starts with its first cell and has ended after its last one."""
        before = _seconds_of_ended_children()
        result = yield
        self._add(item, _seconds_of_ended_children() - before)
        return result

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item, nextitem: pytest.Item | None) -> None:
        if nextitem is None or nextitem.path != item.path:
            self._add(item, _seconds_of_grandchildren())

    def _add(self, item: pytest.Item, seconds: float) -> None:
        if item.path.suffix == ".ipynb":
            self.seconds[item.path.relative_to(self.config.rootpath).as_posix()] += seconds

    def pytest_sessionfinish(self) -> None:
        if hasattr(self.config, "workeroutput"):
            self.config.workeroutput["notebook_seconds"] = dict(self.seconds)

    @pytest.hookimpl(optionalhook=True)  # pytest-xdist's
    def pytest_testnodedown(self, node: Any) -> None:
        self.seconds.update(getattr(node, "workeroutput", {}).get("notebook_seconds", {}))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not any(self.seconds.values()):
            return
        budget = importlib.import_module("course_utils.interactive.course_files").budget
        total = sum(self.seconds.values())
        terminalreporter.section(f"CPU seconds of notebooks: {total:.0f}, the most expensive first")
        for notebook, seconds in sorted(self.seconds.items(), key=lambda pair: -pair[1]):
            allowed = budget(self.config.rootpath / notebook)
            over = "  over its budget" if seconds > allowed else ""
            terminalreporter.write_line(f"{seconds:6.1f} s of {allowed:3.0f} s  {notebook}{over}")


def _seconds_of_ended_children() -> float:
    times = os.times()
    return times.children_user + times.children_system


def _seconds_of_grandchildren() -> float:
    psutil = importlib.import_module("psutil")
    found = 0.0
    for kernel in psutil.Process().children():
        for process in kernel.children():
            with suppress(psutil.NoSuchProcess):  # it has ended, and counts among those that have
                times = process.cpu_times()
                found += times.user + times.system + times.children_user + times.children_system
    return found
