"""Other people's training scripts, as they are: what `watch` predicts, and what an H200 counted.

Those of libraries run where the libraries are: COURSE_SCRIPTS_PYTHON names a Python that has them.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from course_utils.allocator.replay import replay
from course_utils.interactive.course_files import ROOT
from course_utils.measuring.files import read_measurement
from course_utils.units import MiB

SCRIPTS = ROOT / "tests" / "scripts"
PYTHON = os.environ.get("COURSE_SCRIPTS_PYTHON", sys.executable)
LACKING = (
    "import sys; from importlib.util import find_spec; print(*[n for n in sys.argv[1:] if not find_spec(n)])"
)

MOST_OLDER = 2 * MiB + 16 * 1024
"""Bytes by which torch 2.11 may take more: it gives cuBLASLt a workspace of its own for layers with a bias.

Each thread has one, so where a checkpoint computes such layers again, backward's thread has one, too. And it
takes cuDNN's attention for more layers, which keeps two random states.
"""

Bounds = tuple[float, float]
"""From where to where a prediction may be, in percent above what the card counted."""

CLOSE: Bounds = (-1.0, 1.0)
CLOSE_RESERVED: Bounds = (-3.0, 3.0)
CONVOLVED: Bounds = (-3.5, 1.0)
CONVOLVED_RESERVED: Bounds = (-10.0, 12.0)

OTHERWISE: dict[str, tuple[Bounds, Bounds]] = {
    "actor_critic.py": ((-13.0, 0.0), (-34.0, 0.0)),  # a small model, and cuDNN's workspaces for fp32
    "ctc.py": ((0.0, 27.0), (0.0, 28.0)),  # its LSTM is predicted cell by cell, which keeps more than cuDNN's
    "lstm.py": ((-12.0, 0.0), (-12.0, 0.0)),  # cuDNN's workspace for it is not predicted
}
"""Bounds of bytes allocated and reserved for scripts whose convolutions or LSTM are most of the step."""


def recorded(name: str = "scripts") -> dict[str, dict[str, Any]]:
    """What was counted, or predicted since, by script and arguments (tests/gpu/scripts_as_they_are.py)."""
    text = (ROOT / "tests" / "gpu" / "recorded" / f"{name}.jsonl").read_text(encoding="utf-8")
    lines = [json.loads(line) for line in text.splitlines()]
    return {line["script"]: line for line in lines}


def lacking(path: Path) -> str:
    """The libraries of a script that the Python which executes it does not have."""
    modules = set(re.findall(r"^(?:import|from) (\w+)", path.read_text(encoding="utf-8"), re.MULTILINE))
    command = [PYTHON, "-c", LACKING, *sorted(modules - sys.stdlib_module_names)]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=600).stdout.strip()


def test_every_script_has_been_executed_on_a_gpu():
    assert {name.split()[0] for name in recorded()} == {
        path.name for path in SCRIPTS.glob("*.py") if not path.name.startswith("ranks_")
    }


FORKS = """
import os, sys
from course_utils.errors import ScriptError
from course_utils.measuring.files import save_measurement
from course_utils.watching.script import watch_script
for line in sys.stdin:
    folder, *words = line.split()
    child = os.fork()
    if not child:
        os.chdir(folder)
        os.dup2(os.open("errors", os.O_CREAT | os.O_WRONLY), 2)
        code = 0
        try:
            save_measurement(watch_script(words[0], words[1:], card="H200-141GB"), "kept.measurement")
        except ScriptError as error:
            print(error, file=sys.stderr, flush=True)
            code = 2
        os._exit(code)
    _, status = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(status), flush=True)
"""
"""Watches each script that it is told in a process of its own, which need not import torch again."""


@pytest.fixture(scope="module")
def watcher() -> Iterator[subprocess.Popen[str]]:
    if not hasattr(os, "fork"):
        pytest.skip("processes cannot be forked here")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([PYTHON, "-c", FORKS], env=environment, text=True, **pipes) as running:
        yield running


def watched(watcher: subprocess.Popen[str], folder: Path, words: str) -> tuple[int, str]:
    """Returns 0, or 2 for a script that cannot be followed, and what was printed to stderr."""
    assert watcher.stdin and watcher.stdout
    watcher.stdin.write(f"{folder} {SCRIPTS}/{words}\n")
    watcher.stdin.flush()
    code = int(watcher.stdout.readline())
    return code, (folder / "errors").read_text()


@pytest.mark.parametrize("name", [name for name in recorded() if "DYNAMO" not in name])
def test_a_script_is_predicted_as_a_gpu_counted_it(name, watcher, tmp_path):
    script = name.split()[0]
    if missing := lacking(SCRIPTS / script):
        pytest.skip(f"{PYTHON} lacks {missing}")
    code, errors = watched(watcher, tmp_path, name)
    before = recorded("predictions")[name]["predicted"]
    assert code == 0, errors
    measured = read_measurement(tmp_path / "kept.measurement")
    assert measured.peak_phase == before["phase"]
    older = before["tensors"] - measured.peak
    assert 0 <= older <= MOST_OLDER
    assert measured.not_predicted == before["not_predicted"]
    allocated, reserved = CLOSE, CLOSE_RESERVED
    if measured.not_predicted:
        allocated, reserved = CONVOLVED, CONVOLVED_RESERVED
    allocated, reserved = OTHERWISE.get(name, (allocated, reserved))
    counted = next(step for step in recorded()[name]["steps"] if step["step"] == 2)
    replayed = replay(measured, descending=True)  # as torch 2.11 did on the card
    assert_within(allocated, replayed.peak_allocated + older, counted["peak_allocated"])
    assert_within(reserved, replayed.peak_reserved + older, counted["peak_reserved"])


def assert_within(bounds: Bounds, predicted: int, counted: int) -> None:
    low, high = bounds
    assert low <= 100 * (predicted / counted - 1) <= high


def test_a_changed_script_is_compared_with_the_one_that_was_saved(watcher, tmp_path):
    assert watched(watcher, tmp_path, "gan.py --batch-size 4 --width 32")[0] == 0
    changed = [str(SCRIPTS / "gan.py"), "--batch-size", "4", "--width", "64"]
    command = [PYTHON, "-m", "course_utils", "watch", "--against", "kept.measurement", *changed]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=1200, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "(784, 64)" in done.stdout and "(784, 32)" in done.stdout
