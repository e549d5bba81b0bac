"""Execute notebooks in a fresh kernel, as on a machine that nobody has used yet."""

import atexit
import ctypes
import os
import signal
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError
from nbformat import NotebookNode

from .course_files import python_path

CELL_SECONDS = 300
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG in linux/prctl.h


class BuildError(Exception):
    """A source or a notebook that cannot be built; the message names the file, the place and what to do."""


def read_notebook(path: Path) -> NotebookNode:
    notebook: Any = nbformat.read(path, as_version=4)
    return notebook


def text_of(cell: NotebookNode) -> str:
    """The printed text of a cell, and what else of its outputs is text."""
    parts: list[str] = []
    for output in cell.outputs:
        parts.append(output.get("text", ""))
        parts += [str(value) for kind, value in output.get("data", {}).items() if kind.startswith("text/")]
    return "\n".join(parts)


def kernel_environment(home: Path) -> dict[str, str]:
    """Variables to add to a kernel's environment, so that lessons give the same outputs everywhere.

    The GPU is simulated, no guess has been made yet (`home` replaces the learner's own folder), one thread
    computes, and sets are ordered alike.
    """
    return {
        "COURSE_SOURCE": "simulated",
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "PYTHONHASHSEED": "0",
        "PYTHONPATH": python_path(),
        "PYTHONSTARTUP": "",  # a start-up file of one's own
        "COURSE_HOME": str(home / "course"),
        "COURSE_SCRIPTS": str(home / "scripts"),
        "IPYTHONDIR": str(home / "ipython"),
    }


def run(
    notebook: NotebookNode,
    folder: Path,
    allow_errors: bool = False,
    environment: Mapping[str, str] | None = None,
) -> NotebookNode:
    """Execute `notebook` in place, with `folder` as its working directory, and return it.

    Its metadata stay as they were. `environment` changes variables of the kernel. Raises BuildError naming
    the first cell that fails, unless `allow_errors`.
    """
    metadata = notebook.metadata.copy()
    _clear_outputs(notebook)
    with tempfile.TemporaryDirectory(prefix="course-build-", ignore_cleanup_errors=True) as home:
        client = _client(notebook, folder, allow_errors)
        variables = {**os.environ, **kernel_environment(Path(home)), **(environment or {})}
        try:
            client.execute(env=variables, **_ends_with_this_process())
        # RuntimeError: a kernel died, or never began
        except (CellExecutionError, CellTimeoutError, RuntimeError) as error:
            # nbclient leaves it, and it fails, after one that never began
            atexit.unregister(client._cleanup_kernel)
            raise BuildError(f"{_place(notebook)}: {error}") from error
    notebook.metadata = metadata  # the kernel's own version would differ between machines
    _drop_widget_views(notebook)
    return notebook


def _clear_outputs(notebook: NotebookNode) -> None:
    """Remove what an earlier execution left: it would say of a cell that it has been reached."""
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.execution_count = None
            cell.outputs = []


def _client(notebook: NotebookNode, folder: Path, allow_errors: bool) -> NotebookClient:
    return NotebookClient(
        notebook,
        timeout=CELL_SECONDS,
        kernel_name="python3",
        allow_errors=allow_errors,
        record_timing=False,
        store_widget_state=False,
        coalesce_streams=True,
        resources={"metadata": {"path": str(folder)}},
        # what it holds is not wanted any more, and to end by itself takes a second
        shutdown_kernel="immediate",
        extra_arguments=["--log-level=ERROR"],  # or each kernel warns about its connection
    )


def _drop_widget_views(notebook: NotebookNode) -> None:
    """Remove views of widgets: each names a model that is gone, by an id that is new each time."""
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            output.get("data", {}).pop(WIDGET_VIEW, None)


def _ends_with_this_process() -> dict[str, Any]:
    """Options that start a kernel so that it ends when this process is killed (Linux).

    ipykernel looks for its parent only when it is up; one that has lost it by then waits for ever, unless
    process 1 has adopted it, which in a desktop's session is another one.
    """
    if sys.platform != "linux":
        return {}
    parent = os.getpid()

    def end_with_parent() -> None:
        ctypes.CDLL(None).prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)

    return {"preexec_fn": end_with_parent}


def _place(notebook: NotebookNode) -> str:
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    started = [cell for cell in code if cell.execution_count or cell.outputs]
    return cell_name(started[-1]) if started else "before the first cell"


def cell_name(cell: NotebookNode) -> str:
    return f"cell {cell.id} ({_first_line(cell)})"


def _first_line(cell: NotebookNode) -> str:
    return next(iter(cell.source.splitlines()), "")
