"""Cells that fail: a learner's mistake is one line, all else has its traceback, interrupts leave nothing."""

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
from course_utils.interactive import failed_cells
from course_utils.interactive.failed_cells import one_line

ROOT = Path(__file__).resolve().parent.parent
START = "from course_utils import *\nfrom course_utils import measure, TransformerConfig\n"
MORE = " (%tb shows the full traceback.)"


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[\d;]*m", "", text)


def told(code: str, **names: Any) -> str | None:
    """The line for a cell of this code, run after the imports; None if the cell keeps its traceback."""
    names = {"__name__": "__main__", **names}
    exec(START, names)
    try:
        exec(compile(code, "<cell>", "exec"), names)
    except BaseException as error:
        line = one_line(error, names)
        return line and plain(line)
    raise AssertionError(f"nothing failed in {code}")


@pytest.mark.parametrize(
    ("code", "line"),
    [
        ('TrainingRun("gtp2")', "ValueError in line 1: unknown model 'gtp2': did you mean 'gpt2'?"),
        (
            '\n\nTrainingRun("gpt2", batch_size=8)',
            "TypeError in line 3: TrainingRun() has no batch_size: did you mean micro_batch?",
        ),
        (
            'TrainingRun("gpt2").replace(zero=3)',
            "ValueError in line 1: unknown choice of a TrainingRun 'zero': did you mean 'zero_stage'?",
        ),
        (
            "TrainingRun()",
            "TypeError in line 1: TrainingRun() missing 1 required positional argument: 'model'.",
        ),
        ("estimate(runs=3)", "TypeError in line 1: estimate() has no runs: did you mean run?"),
        (
            "estimate(TrainingRun('gpt2'), 1, 2, 3)",
            "TypeError in line 1: estimate() takes from 1 to 2 positional arguments but 4 were given.",
        ),
        (
            "parse_bytes('5 GX')",
            "ValueError in line 1: '5 GX' is not an amount of memory: write a number and a unit, "
            "such as '80 GB' or '16 GiB'.",
        ),
        ("gpu('A1000')", "ValueError in line 1: unknown GPU 'A1000': did you mean 'A100-80GB'?"),
        (
            "compare(TrainingRun('gpt2'), source='gpu')",
            "ValueError in line 1: unknown source 'gpu': did you mean 'cpu'?",
        ),
        (
            "estimate('gpt2')",
            "TypeError in line 1: estimate takes a TrainingRun, not 'gpt2': write "
            "estimate(TrainingRun(...)).",
        ),
        (
            "from course_utils import TraningRun",
            "ImportError in line 1: cannot import name 'TraningRun' from "
            "'course_utils': did you mean TrainingRun?",
        ),
        (
            "def make():\n    return TrainingRun('gtp2')\nmake()",
            "ValueError in line 2: unknown model 'gtp2': did you mean 'gpt2'?",
        ),
        (
            "print(trained.peak)",
            "NameError in line 1: trained is not defined yet: run the cells above this one first, "
            "or check its spelling.",
        ),
        (
            "checks.two_moments(moments)",
            "NameError in line 1: checks is not defined yet: run the cells above this one "
            "first, or check its spelling.",
        ),
        (
            "TraningRun('gpt2')",
            "NameError in line 1: TraningRun is not defined yet: run the cells above this one "
            "first, or write TrainingRun, if you mean that.",
        ),
        (
            "del measure\n[measure for _ in 'a']",
            "NameError in line 2: measure is not defined yet: run the cells above "
            "this one first, or `from course_utils import measure`.",
        ),
        ("raise GpuOutOfMemory('x')", None),
    ],
)
def test_a_learners_mistake_is_one_line(code: str, line: str | None) -> None:
    assert told(code) == (line and line + MORE)


def test_errors_of_the_courses_own_classes_are_one_line_through_any_library() -> None:
    code = (
        "import torch\nfrom course_utils import StepError\n"
        "def step(model, batch):\n    model(batch).sum().nonzero().tolist()\n"
        "measure(step=step, model=torch.nn.Linear(2, 2), batch=torch.ones(1, 2), source='simulated')"
    )
    line = told(code)
    assert line and line.startswith("StepError in line 5: ") and "nonzero" in line and "\n" not in line


@pytest.mark.parametrize(
    "code",
    [
        "1 / 0",
        "raise ValueError('the learner, who means something by it')",
        "int('a')",
        "def f():\n    return missing\nf()",
        "def estimate(run):\n    return run\nestimate(runs=3)",
        "TrainingRun('gpt2').micro",
        "print(sep=3)",
        "import torch\ntorch.ones(2) @ torch.ones(3)",
        "import torch\nwith on_gpu('1 MB'):\n    torch.ones(10_000_000, device='cuda')",
    ],
)
def test_what_goes_wrong_in_a_learners_own_code_keeps_its_traceback(
    code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COURSE_SOURCE", "simulated")
    names = {"on_gpu": course_utils.on_gpu} if "on_gpu" in code else {}
    assert told(code, **names) is None


@pytest.mark.parametrize(
    ("body", "line"),
    [
        ("raise ValueError('say 3')", "ValueError in line 1: say 3."),
        ("raise OSError('the disk is full')", "OSError in line 1: the disk is full."),
        ("int('a')", None),
        ("None.run", None),
        ("{}['a']", None),
        ("raise KeyError('a')", None),
        ("assert False", None),
        ("import json; json.loads('{')", None),
        ("undefined", None),
    ],
)
def test_a_fault_of_the_course_keeps_its_traceback(body: str, line: str | None) -> None:
    """What the course itself raises is meant; what befalls it is not."""
    module: dict[str, Any] = {"__name__": "course_utils.somewhere"}
    exec(f"def helper():\n    {body}", module)
    assert told("helper()", helper=module["helper"]) == (line and line + MORE)


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
    assert "Known: gpt2, " in mistake.evalue
    assert [plain(line) for line in mistake.traceback] == [told("TrainingRun('gtp2')")]
    shown = plain("\n".join(asked.traceback))
    assert "in check_known(what, name, known)" in shown and "Known: gpt2, " in shown
    assert measured.output_type == "execute_result"
    assert len("\n".join(own.traceback).splitlines()) > 3


class Kernel:
    """A kernel as JupyterLab has one: a person is there to answer."""

    def __init__(self) -> None:
        start = str(Path(failed_cells.__file__).with_name("kernel_start.py"))
        environment = {
            **os.environ,
            "PYTHONSTARTUP": start,
            "PYTHONPATH": str(ROOT),
            "COURSE_SOURCE": "simulated",
        }
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


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    running = Kernel()
    yield running
    running.client.stop_channels()
    running.manager.shutdown_kernel(now=True)


def containing(words: str) -> Callable[[str], bool]:
    return lambda said: words in said


def read(printed: str) -> str:
    """What is left of it on a page: a backspace takes back a character."""
    shown = ""
    for letter in printed:
        shown = shown[:-1] if letter == "\b" else shown + letter
    return shown.rstrip(" ")


def test_a_name_of_a_cell_above_is_told_before_anything_is_imported(kernel: Kernel) -> None:
    error = kernel.run("run = TrainingRun('gpt2')")[2]
    opening = "NameError in line 1: TrainingRun is not defined yet: run the cells above this one first"
    assert error.startswith(opening)
    assert kernel.run("[name for name in dir() if 'course' in name]")[1] == "[]"


def test_slow_work_says_how_far_it_is_and_leaves_nothing(kernel: Kernel) -> None:
    kernel.run(START + "import course_utils.pace as pace\npace.AFTER_SECONDS = pace.EVERY_SECONDS = 0.0")
    printed, value, error = kernel.run("measure(TrainingRun('tiny-gpt', seq_len=16), steps=4).peak")
    assert re.search(r"Simulating step 1 of 4 … \d+ s so far", printed)
    assert re.search(r"Simulating step 3 of 4 █+░+ \d\d %, about \d+ s left", printed)
    assert read(printed) == "" and int(value) > 0 and not error
    loop = "from course_utils.lessons.shared.language_model import batches\n"
    printed = kernel.run(loop + "for number, _ in enumerate(batches(4)):\n    print('step', number)")[0]
    assert "Training step 4 of 4 " in printed and read(printed) == "step 0\nstep 1\nstep 2\nstep 3\n"


def test_an_interrupt_is_one_line_and_the_next_call_works(kernel: Kernel) -> None:
    kernel.run(START + "import course_utils.pace as pace\npace.AFTER_SECONDS = pace.EVERY_SECONDS = 0.0")
    again = "measure(TrainingRun('tiny-gpt', seq_len=16), 'simulated', {}).peak"
    fresh = kernel.run(again.format(3))[1]
    for asked in ("Simulating step 1 of 1000", "Simulating step 3 of 1000"):
        code = "steps = 1000\n" + again.format("steps")
        printed, _, error = kernel.run(code, when=containing(asked))
        words = r"Interrupted in line 2, while simulating step \d+ of 1000. Nothing is left running."
        assert re.fullmatch(words, error)
        assert read(printed) == ""
    assert kernel.run(again.format(3))[1] == fresh
    loop = "import torch\nwith on_gpu():\n    while True:\n        torch.ones(3, device='cuda')"
    error = kernel.run(loop, when=lambda said: "Running on" in said)[2]
    assert error.startswith("Interrupted in line 4, while running on the simulated GPU.")
    endless = "print('go', flush=True)\nwhile True: pass"
    assert "KeyboardInterrupt" in kernel.run(endless, when=lambda _: True)[2]


@pytest.mark.skipif(sys.platform == "win32", reason="no ranks on Windows")
def test_interrupted_ranks_end(kernel: Kernel) -> None:
    kernel.run("import course_utils.pace as pace\npace.AFTER_SECONDS = pace.EVERY_SECONDS = 0.0")
    code = "from course_utils.ranks.launch import run_ranks\n"
    code += "def wait(seconds):\n    import time\n    time.sleep(seconds)\n"
    error = kernel.run(
        f"{code}run_ranks(wait, 2, seconds=3600)", when=lambda said: "Running 2 ranks" in said
    )[2]
    assert error.startswith("Interrupted in line 5, while running 2 ranks.")
    process = psutil.Process(int(kernel.run("import os\nos.getpid()")[1]))
    assert [one.cmdline() for one in process.children(recursive=True)] == []
    assert kernel.run("run_ranks(wait, 2, seconds=0)")[1] == "[None, None]"
