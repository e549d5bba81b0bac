"""Run out of memory on purpose in each kind of cell, many times.

Is the memory back? Does the next cell work?
"""

import gc
import tomllib
from pathlib import Path
from typing import Any

import torch
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output

from ..errors import GpuOutOfMemory
from ..measuring.devices import Cuda, Device
from ..run import TrainingRun
from ..units import GB, MiB

ROOM = 2 * GB  # Bytes that the process may use of a GPU: little, so that it is full quickly

CODE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
"""The code of the cells: what all of them use, those that fail by their kind, and one that works."""


def run_out(kind: str, device: Device, times: int) -> dict[str, Any]:
    """Run a failing cell of this kind `times` times in a row, and after each a cell that works.

    Returns how often, and for the last time the bytes that were allocated before and after. RuntimeError as
    soon as a cell fails otherwise, or not at all, keeps a byte, or leaves a kernel that does not work.
    """
    shell = prepared_shell(device)
    device.release()
    gc.freeze()  # what is there now need not be looked through again and again
    before = device.allocated()
    after = 0
    for number in range(1, times + 1):
        failing_cell(shell, kind)
        working_cell(shell)
        device.release()
        after = device.allocated()
        if after != before:
            raise RuntimeError(f"time {number}: {after - before:+,} bytes are left by a cell with {kind}")
    return {"cell": kind, "times": times, "before": before, "after": after}


def prepared_shell(device: Device) -> InteractiveShell:
    """The shell that notebooks run in, with what the cells use."""
    shell = InteractiveShell.instance()
    shell.user_ns.update(
        device=device.kind,
        too_large=TrainingRun("tiny-gpt", 4096, 64, "fp32", attention="eager"),
        model=torch.nn.Linear(1024, 1024),
        batch=torch.ones(2 * MiB // 1024, 1024),
    )
    shell.user_ns["optimizer"] = torch.optim.SGD(shell.user_ns["model"].parameters(), lr=0.1)
    run_cell(shell, CODE["prepared"])
    working_cell(shell)
    return shell


def failing_cell(shell: InteractiveShell, kind: str) -> None:
    """Run it. RuntimeError unless it runs out of memory."""
    error = run_cell(shell, CODE["failing"][kind])
    if isinstance(error, torch.OutOfMemoryError | GpuOutOfMemory):
        return
    raise RuntimeError(f"a cell with {kind} was to run out of memory, and: {error!r}")


def working_cell(shell: InteractiveShell) -> None:
    error = run_cell(shell, CODE["working"])
    if error is not None:
        raise RuntimeError(f"the next cell does not work: {error!r}")


def run_cell(shell: InteractiveShell, code: str) -> BaseException | None:
    with capture_output():
        result = shell.run_cell(code, store_history=False)
    return result.error_before_exec or result.error_in_exec


def little_memory() -> Device:
    """The GPU that is here, of which this process may from now on use little."""
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    torch.cuda.set_per_process_memory_fraction(ROOM / total)
    return Cuda()
