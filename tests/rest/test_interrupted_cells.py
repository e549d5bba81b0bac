"""A person interrupts a cell, in a kernel as JupyterLab has one: nothing is left behind."""

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import psutil
import pytest
from jupyter_client.manager import start_new_kernel
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[2]

TELLS = """
from course_utils import *
import course_utils.pace as pace
go_on = pace.Work.go_on
def telling(work):
    if work.words != work.said:
        work.said = work.words
        print(work.words, flush=True)
    go_on(work)
pace.Work.go_on = telling
"""
"""Prints in a notebook what slow work says in a terminal."""


class Kernel:
    """A kernel as JupyterLab has one: a person is there to answer."""

    def __init__(self) -> None:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "COURSE_SOURCE": "simulated"}
        self.manager, self.client = start_new_kernel(env=environment)

    def run(self, code: str, interrupt_at: str = "") -> tuple[str, str]:
        """What a cell returns, and its error; it is interrupted once, when it prints these words."""
        heard = {"execute_result": "", "error": ""}
        waited_for = [interrupt_at] if interrupt_at else []

        def hear(message: dict[str, Any]) -> None:
            kind, content = message["msg_type"], message["content"]
            if kind == "execute_result":
                heard[kind] = content["data"]["text/plain"]
            elif kind == "error":
                heard[kind] = "\n".join(content["traceback"])
            elif kind == "stream" and waited_for and waited_for[0] in content["text"]:
                waited_for.clear()
                self.manager.interrupt_kernel()

        self.client.execute_interactive(code, allow_stdin=True, output_hook=hear, timeout=600)
        return heard["execute_result"], re.sub(r"\x1b\[[\d;]*m", "", heard["error"])


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    running = Kernel()
    running.run(TELLS)
    yield running
    running.client.stop_channels()
    running.manager.shutdown_kernel(now=True)


def test_an_interrupt_ends_a_measurement_and_the_next_one_is_right(kernel: Kernel) -> None:
    """It comes in the middle of a step, and the kernel's own interrupts work as before."""
    again = "measure(TrainingRun('tiny-gpt', seq_len=16), 'simulated', {}).peak"
    fresh = kernel.run(again.format(3))[0]
    for asked in ("simulating step 1 of 1000", "simulating step 3 of 1000"):
        error = kernel.run(again.format(1000), asked)[1]
        assert "KeyboardInterrupt" in error
        assert kernel.run(again.format(3))[0] == fresh
    loop = "import torch\nwith on_gpu():\n    while True:\n        torch.ones(3, device='cuda')"
    assert "KeyboardInterrupt" in kernel.run(loop, "simulated GPU")[1]
    assert kernel.run("torch.ones(3).sum().item(), torch.nn.Module.__call__.__qualname__")[0]
    endless = "print('go', flush=True)\nwhile True: pass"
    assert "KeyboardInterrupt" in kernel.run(endless, "go")[1]


def test_a_notebook_that_nobody_watches_shows_nothing_of_how_far_slow_work_is() -> None:
    """Although the line is due at once."""
    slow = """
import course_utils.pace
from course_utils import TrainingRun, measure
course_utils.pace.AFTER_SECONDS = 0.0
measure(TrainingRun("tiny-gpt", seq_len=16), "simulated").peak
"""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(slow)])
    NotebookClient(notebook, timeout=1200).execute()
    assert [output.output_type for output in notebook.cells[0].outputs] == ["execute_result"]


@pytest.mark.skipif(sys.platform == "win32", reason="no ranks on Windows")
def test_interrupted_ranks_end(kernel: Kernel) -> None:
    code = "from course_utils.ranks.launch import run_ranks\n"
    code += "def wait(seconds):\n    import time\n    time.sleep(seconds)\n"
    error = kernel.run(f"{code}run_ranks(wait, 2, seconds=3600)", "running 2 ranks")[1]
    assert "KeyboardInterrupt" in error
    process = psutil.Process(int(kernel.run("import os\nos.getpid()")[0]))
    assert [one.cmdline() for one in process.children(recursive=True)] == []
    assert kernel.run("run_ranks(wait, 2, seconds=0)")[0] == "[None, None]"
