"""Cells that fail: a refusal is one line, all else has its traceback, interrupts leave nothing."""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nbformat
import psutil
import pytest
from jupyter_client.manager import start_new_kernel
from nbclient import NotebookClient

import course_utils
from course_utils.interactive.failed_cells import is_refused

ROOT = Path(__file__).resolve().parent.parent
START = "from course_utils import *\nfrom course_utils import measure, TransformerConfig\n"


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[\d;]*m", "", text)


def refused(code: str, **names: Any) -> bool:
    """True if a cell of this code, run after the imports, fails in one line, not with a traceback."""
    names = {"__name__": "__main__", **names}
    exec(START, names)
    try:
        exec(compile(code, "<cell>", "exec"), names)
    except Exception as error:
        return is_refused(error)
    raise AssertionError(f"nothing failed in {code}")


@pytest.mark.parametrize(
    "code",
    [
        'TrainingRun("gtp2")',
        "TrainingRun('gpt2', batch_size=8)",
        'TrainingRun("gpt2").replace(zero=3)',
        "parse_bytes('5 GX')",
        "compare(TrainingRun('gpt2'), source='gpu')",
        "estimate('gpt2')",
        "def make():\n    return TrainingRun('gtp2')\nmake()",
        "import torch\n"
        "def step(model, batch):\n    model(batch).sum().nonzero().tolist()\n"
        "measure(step=step, model=torch.nn.Linear(2, 2), batch=torch.ones(1, 2), source='simulated')",
    ],
)
def test_what_the_course_refuses_is_one_line(code: str) -> None:
    assert refused(code)


@pytest.mark.parametrize(
    "code",
    [
        "1 / 0",
        "print(trained.peak)",
        "from course_utils import TraningRun",
        "raise GpuOutOfMemory('x')",
        "raise ValueError('the learner, who means something by it')",
        "TrainingRun('gpt2').micro",
        "import torch\ntorch.ones(2) @ torch.ones(3)",
        "import torch\nwith on_gpu('1 MB'):\n    torch.ones(10_000_000, device='cuda')",
    ],
)
def test_what_goes_wrong_in_a_learners_own_code_keeps_its_traceback(
    code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COURSE_SOURCE", "simulated")
    assert not refused(code, on_gpu=course_utils.on_gpu, GpuOutOfMemory=course_utils.GpuOutOfMemory)


@pytest.mark.parametrize(
    ("body", "is_meant"),
    [
        ("raise ValueError('say 3')", True),
        ("raise OSError('the disk is full')", True),
        ("int('a')", False),
        ("None.run", False),
        ("raise KeyError('a')", False),
        ("assert False", False),
        ("import json; json.loads('{')", False),
    ],
)
def test_a_fault_of_the_course_keeps_its_traceback(body: str, is_meant: bool) -> None:
    """What the course itself raises is meant; what befalls it is not."""
    module: dict[str, Any] = {"__name__": "course_utils.somewhere"}
    exec(f"def helper():\n    {body}", module)
    assert refused("helper()", helper=module["helper"]) == is_meant


def test_scripts_see_the_errors_as_ever() -> None:
    code = "from course_utils import TrainingRun\nTrainingRun('gtp2')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and done.stderr.startswith("Traceback") and "Known: gpt2, " in done.stderr


def test_a_failing_cell_fails_for_whoever_runs_the_notebook() -> None:
    """And shows nothing of how far slow work is, with the line due at once."""
    slow = "measure(TrainingRun('tiny-gpt', seq_len=16)).peak"
    slow = "import course_utils.pace\ncourse_utils.pace.AFTER_SECONDS = 0.0\n" + slow
    sources = (START, "TrainingRun('gtp2')", "%tb", slow, "1 / 0")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
    NotebookClient(notebook, timeout=1200, allow_errors=True).execute()
    outputs = [cell.outputs for cell in notebook.cells]
    [mistake], [asked], [measured], [own] = outputs[1:]
    assert (mistake.output_type, mistake.ename) == ("error", "ValueError")
    assert "did you mean 'gpt2'? Known: gpt2, " in mistake.evalue
    [line] = mistake.traceback
    said = mistake.evalue.partition(" Known: ")[0]  # the list of what is known is in the traceback
    assert plain(line) == f"ValueError: {said} (%tb shows the full traceback.)"
    shown = plain("\n".join(asked.traceback))
    assert "in check_known(what, name, known)" in shown and "Known: gpt2, " in shown
    assert measured.output_type == "execute_result"
    assert len("\n".join(own.traceback).splitlines()) > 3


class Kernel:
    """A kernel as JupyterLab has one: a person is there to answer."""

    def __init__(self) -> None:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "COURSE_SOURCE": "simulated"}
        self.manager, self.client = start_new_kernel(env=environment)

    def run(self, code: str, when: Callable[[str], bool] = lambda _: False) -> tuple[str, str, str]:
        """What a cell prints, its value, and its error; interrupted once `when` is true of what it says."""
        asked = self.client.execute(code, allow_stdin=True)
        printed = ""
        value = ""
        error = ""
        interrupted = False
        while True:
            message = self.client.get_iopub_msg(timeout=300)
            kind = message["msg_type"]
            content = message["content"]
            if message["parent_header"].get("msg_id") != asked:
                continue
            if kind == "status" and content["execution_state"] == "idle":
                self.client.get_shell_msg(timeout=300)
                return printed, value, plain(error)
            if kind == "stream":
                printed += content["text"]
            elif kind == "execute_result":
                value = content["data"]["text/plain"]
            elif kind == "error":
                error = "\n".join(content["traceback"])
            if kind == "stream" and not interrupted and when(content["text"]):
                interrupted = True
                self.manager.interrupt_kernel()


TELLS = """
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


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    running = Kernel()
    running.run(TELLS)
    yield running
    running.client.stop_channels()
    running.manager.shutdown_kernel(now=True)


def test_an_interrupt_ends_a_measurement_and_the_next_one_is_right(kernel: Kernel) -> None:
    """It comes in the middle of a step, and the kernel's own interrupts work as before."""
    kernel.run(START)
    again = "measure(TrainingRun('tiny-gpt', seq_len=16), 'simulated', {}).peak"
    fresh = kernel.run(again.format(3))[1]
    for asked in ("simulating step 1 of 1000", "simulating step 3 of 1000"):
        error = kernel.run(again.format(1000), when=lambda said, asked=asked: asked in said)[2]
        assert "KeyboardInterrupt" in error
        assert kernel.run(again.format(3))[1] == fresh
    loop = "import torch\nwith on_gpu():\n    while True:\n        torch.ones(3, device='cuda')"
    assert "KeyboardInterrupt" in kernel.run(loop, when=lambda said: "simulated GPU" in said)[2]
    assert kernel.run("torch.ones(3).sum().item(), torch.nn.Module.__call__.__qualname__")[1]
    endless = "print('go', flush=True)\nwhile True: pass"
    assert "KeyboardInterrupt" in kernel.run(endless, when=lambda _: True)[2]


@pytest.mark.skipif(sys.platform == "win32", reason="no ranks on Windows")
def test_interrupted_ranks_end(kernel: Kernel) -> None:
    code = "from course_utils.ranks.launch import run_ranks\n"
    code += "def wait(seconds):\n    import time\n    time.sleep(seconds)\n"
    error = kernel.run(
        f"{code}run_ranks(wait, 2, seconds=3600)", when=lambda said: "running 2 ranks" in said
    )[2]
    assert "KeyboardInterrupt" in error
    process = psutil.Process(int(kernel.run("import os\nos.getpid()")[1]))
    assert [one.cmdline() for one in process.children(recursive=True)] == []
    assert kernel.run("run_ranks(wait, 2, seconds=0)")[1] == "[None, None]"
