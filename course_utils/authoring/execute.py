"""Run a notebook from its first cell to its last, in a fresh kernel, as on a machine that nobody has used yet."""

import atexit
import os
import signal
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError
from nbformat import NotebookNode

from ..guard import SET_PARENT_DEATH_SIGNAL, prctl
from .sources import BuildError, Draft

PACKAGE_ROOT = Path(__file__).resolve().parents[2]
CELL_SECONDS = 300
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"


def kernel_environment(home: Path) -> dict[str, str]:
    """Variables under which lessons give the same outputs everywhere: to be added to the environment of a kernel.

    The GPU is simulated, no guess has been made yet (`home` stands in for the learner's own folder), one thread
    computes, and sets are ordered alike.
    """
    path = os.pathsep.join(filter(None, [str(PACKAGE_ROOT), os.environ.get("PYTHONPATH")]))
    return {
        "COURSE_SOURCE": "simulated",
        "COURSE_HOME": str(home / "course"),
        "IPYTHONDIR": str(home / "ipython"),
        "OMP_NUM_THREADS": "1",
        "PYTHONHASHSEED": "0",
        "PYTHONPATH": path,
    }


def execute(draft: Draft) -> NotebookNode:
    """The notebook with the outputs of every cell, run in its own folder.

    Raises BuildError naming the cell that failed, ran too long or wrote to stderr.
    """
    notebook = run(draft.notebook, draft.target.parent)
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            if output.get("name") == "stderr":
                raise BuildError(f"{draft.target.name}: {_name(cell)} writes to stderr:\n{output['text']}")
    return notebook


def run(
    notebook: NotebookNode, folder: Path, allow_errors: bool = False, environment: Mapping[str, str] | None = None
) -> NotebookNode:
    """Execute `notebook` in place with `folder` as its working directory and return it, its metadata as they were.

    `environment` changes variables of the kernel. Raises BuildError naming the first cell that fails, unless
    `allow_errors`.
    """
    metadata = notebook.metadata.copy()
    for cell in notebook.cells:  # what an earlier execution left would say of a cell that it has been reached
        if cell.cell_type == "code":
            cell.execution_count, cell.outputs = None, []
    with tempfile.TemporaryDirectory(prefix="course-build-", ignore_cleanup_errors=True) as home:
        client = NotebookClient(
            notebook,
            timeout=CELL_SECONDS,
            kernel_name="python3",
            allow_errors=allow_errors,
            record_timing=False,
            store_widget_state=False,
            coalesce_streams=True,
            shutdown_kernel="immediate",  # what it holds is not wanted any more, and to end by itself takes a second
            extra_arguments=["--log-level=ERROR"],  # or each kernel warns about its connection
            resources={"metadata": {"path": str(folder)}},
        )
        try:
            variables = {**os.environ, **kernel_environment(Path(home)), **(environment or {})}
            client.execute(env=variables, **_ends_with_this_process())
        except (CellExecutionError, CellTimeoutError, RuntimeError) as error:  # the last: a kernel died, or never began
            atexit.unregister(client._cleanup_kernel)  # nbclient leaves it, and it fails, after one that never began
            raise BuildError(f"{_place(notebook)}: {error}") from error
    notebook.metadata = metadata  # the kernel's own version would differ between machines
    _drop_widget_views(notebook)
    return notebook


def _ends_with_this_process() -> dict[str, Any]:
    """How a kernel is started so that it ends when this process is killed (Linux).

    ipykernel looks for its parent only when it is up; one that has lost it by then waits for ever, unless process 1
    has adopted it, which in a desktop's session is another one.
    """
    if sys.platform != "linux":
        return {}
    parent = os.getpid()

    def end_with_parent() -> None:
        prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)

    return {"preexec_fn": end_with_parent}


def _place(notebook: NotebookNode) -> str:
    """Which cell was running when execution stopped: the last that was given to the kernel."""
    started = [cell for cell in notebook.cells if cell.cell_type == "code" and (cell.execution_count or cell.outputs)]
    return _name(started[-1]) if started else "before the first cell"


def _name(cell: NotebookNode) -> str:
    first_line = next(iter(cell.source.splitlines()), "")
    return f"cell {cell.id} ({first_line})"


def _drop_widget_views(notebook: NotebookNode) -> None:
    """Leave only a widget's text: its view names a model that is gone, by an id that is new each time."""
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            output.get("data", {}).pop(WIDGET_VIEW, None)
