"""Try the demos before the lecture: execute their notebook on this machine, and report each one."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbformat import NotebookNode

from ..interactive.notebook_runs import CELL_SECONDS, kernel_environment, read_notebook, text_of

TOO_LONG = {"ename": "TimeoutError", "evalue": f"a cell took over {CELL_SECONDS} s", "traceback": []}
HEADING = "## "


def check(path: Path) -> int:
    """Execute a notebook in a fresh kernel; print for each section if it passed, and its seconds.

    A section that fails ends there, and the next one begins. Returns 1 if one failed.
    """
    notebook = read_notebook(path)
    failed = 0
    with fresh_kernel(notebook, path.parent) as client:
        for title, cells in sections(notebook):
            began = time.monotonic()
            problem = first_problem(client, notebook, cells)
            seconds = time.monotonic() - began
            if problem:
                failed += 1
                print(f"FAIL {seconds:5.0f} s  {title}: {problem}", flush=True)
            elif title:
                print(f"pass {seconds:5.0f} s  {title}", flush=True)
            else:
                print("".join(text_of(cell) for cell in cells[-1:]), flush=True)
    print(f"{failed} failed" if failed else "Every demo passed.")
    return 1 if failed else 0


def sections(notebook: NotebookNode) -> list[tuple[str, list[NotebookNode]]]:
    """The code cells under each heading; those before the first are under ""."""
    found: list[tuple[str, list[NotebookNode]]] = [("", [])]
    for cell in notebook.cells:
        if cell.cell_type == "code":
            found[-1][1].append(cell)
        elif cell.source.startswith(HEADING):
            title = cell.source.splitlines()[0].removeprefix(HEADING)
            found.append((title, []))
    return found


def first_problem(client: NotebookClient, notebook: NotebookNode, cells: list[NotebookNode]) -> str:
    """Execute `cells` until one fails; the name and the first line of its error, or ""."""
    for cell in cells:
        try:
            client.execute_cell(cell, notebook.cells.index(cell))
        except CellExecutionError as error:
            return f"{error.ename}: {error.evalue.partition(chr(10))[0]}"
        except RuntimeError as error:
            return f"the kernel died: {error}"
    return ""


@contextmanager
def fresh_kernel(notebook: NotebookNode, folder: Path) -> Iterator[NotebookClient]:
    """A kernel that measures where this machine can: on its GPU, else simulated."""
    client = NotebookClient(
        notebook,
        kernel_name="python3",
        timeout=CELL_SECONDS,
        interrupt_on_timeout=True,
        error_on_timeout=TOO_LONG,
        resources={"metadata": {"path": str(folder)}},
        shutdown_kernel="immediate",
        extra_arguments=["--log-level=ERROR"],
    )
    with TemporaryDirectory(prefix="course-demos-", ignore_cleanup_errors=True) as home:
        source = os.environ.get("COURSE_SOURCE", "auto")
        environment = {**os.environ, **kernel_environment(Path(home)), "COURSE_SOURCE": source}
        with client.setup_kernel(env=environment):
            yield client
