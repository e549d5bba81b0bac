"""Out of memory on purpose in every kind of cell, notebooks run live, a GPU as a smaller card: stand-ins."""

import json
import os
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import nbformat
import pytest
import torch
from stand_in import LimitedMemory, stand_in

from course_utils.gpus import GPUS
from course_utils.measuring import choose_source, devices
from course_utils.measuring.devices import Cuda, as_card
from course_utils.measuring.live import this_gpu
from course_utils.recording.notebooks import execute_live
from course_utils.recording.recorder import RecordingError, card_option, read_parts, work_command
from course_utils.recording.tasks import CELLS, TIMES_OUT_OF_MEMORY, Task, rehearsal_list
from course_utils.run import TrainingRun
from course_utils.units import GB, MB

ROOT = Path(__file__).resolve().parent.parent

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def python(code: str) -> subprocess.CompletedProcess[str]:
    """Run it in a process of its own: IPython's shell takes the place of the main module."""
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}",
        "COURSE_SOURCE": "auto",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-W", "ignore", "-c", code]
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1200, check=False
    )


LOOP = """
import json
from course_utils.interactive.failed_cells import watch_cells
from course_utils.recording import out_of_memory_cells
from stand_in import stand_in
from course_utils.measuring.devices import Cuda
found = {}
for kind, times, room in json.loads(%r):
    with stand_in(room):
        out_of_memory_cells.prepared_shell(Cuda())
        watch_cells()
        found[kind] = out_of_memory_cells.run_out(kind, Cuda(), times)
print(json.dumps(found))
"""


@pytest.mark.parametrize("often", [5, pytest.param(TIMES_OUT_OF_MEMORY, marks=pytest.mark.sweep(0))])
def test_memory_is_back_and_the_kernel_works_after_every_failure(often):
    times = {"plain torch": often, "live_meter": 3, "measure(step=…)": 3, "measure(run)": 3}
    assert times.keys() | {"demo"} == set(CELLS)
    done = python(LOOP % json.dumps([[kind, often, 100 * MB] for kind, often in times.items()]))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert {kind: one["times"] for kind, one in found.items()} == times
    assert all(one["before"] == one["after"] for one in found.values())


def test_a_cell_that_keeps_its_memory_is_found_out():
    spoiled = (
        "from course_utils.interactive import failed_cells\nfailed_cells.give_back = lambda result: None\n"
    )
    done = python(spoiled + LOOP % json.dumps([["plain torch", 1, 150 * MB]]))
    assert done.returncode == 1 and "bytes are left by a cell with plain torch" in done.stderr


def test_a_demo_comes_to_its_end_through_its_failure():
    done = python(LOOP % json.dumps([["demo", 1, 400 * MB]]))
    assert done.returncode == 0, done.stderr


@needs_gpu
@pytest.mark.parametrize("kind", CELLS)
def test_a_real_gpu_gives_every_byte_back_100_times(kind, tmp_path):
    results = tmp_path / "parts"
    task = Task(f"out of memory in a cell with {kind}", "cells", "", topic=kind)
    command = work_command(False)(task, results, 500.0)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert read_parts(results)["cells"]["times"] == TIMES_OUT_OF_MEMORY


def test_the_stand_in_counts_what_lives_and_fails_when_it_is_full():
    with LimitedMemory(10_000) as memory:
        first = torch.ones(1000)
        view = first[10:]
        assert memory.allocated == 4096  # in blocks of 512 bytes, a view for nothing
        del first
        assert memory.allocated == 4096
        del view
        assert memory.allocated == 0 and memory.peak == 4096
        with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 0\.01 MiB.*is free"):
            torch.ones(3000)


def test_a_notebook_tells_what_was_live_why_not_and_what_failed(tmp_path):
    path = tmp_path / "lesson.ipynb"
    code = nbformat.v4.new_code_cell
    cells = [
        code("import os; print('live on a card · torch', os.environ['COURSE_SOURCE'])"),
        code("print('live on a GPU: no; needs 134.5 GB, a card has 15.0 GB free')"),
        code("1 / 0", metadata={"tags": ["raises-exception"]}),
        code("# what fails\nraise ValueError('x\\ny')"),
    ]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    before = path.read_bytes()
    found = execute_live(path)
    assert (found["cells"], found["live"]) == (4, 1) and found["seconds"] > 0
    assert found["not_live"] == ["needs 134.5 GB, a card has 15.0 GB free"]
    assert found["failed"] == ["# what fails: ValueError: x"]
    assert path.read_bytes() == before


Card = namedtuple("Card", "name major minor total_memory")


@pytest.fixture
def large_gpu(monkeypatch):
    """torch seems to have an H200, whose allocator can be limited; what is set is put back."""
    fraction = [1.0]
    with stand_in(141 * GB) as memory:
        monkeypatch.setattr(devices, "IMITATED", [])
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H200")
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(
            torch.cuda, "get_device_properties", lambda _: Card("NVIDIA H200", 9, 0, 141 * GB)
        )
        monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda *_: fraction[0])
        monkeypatch.setattr(
            torch.cuda, "set_per_process_memory_fraction", lambda share: fraction.__setitem__(0, share)
        )
        monkeypatch.delenv("COURSE_SOURCE", raising=False)
        yield memory


def test_a_gpu_that_stands_for_a_t4_has_its_memory_and_lacks_what_it_lacks(large_gpu):
    run = TrainingRun("gpt2", 8, 1024)
    assert choose_source(run) == ("live", "") and this_gpu().memory == 141 * GB
    as_card("T4-16GB")
    here = this_gpu()
    old = run.replace(precision="amp-fp16", attention="efficient")
    assert here.memory == pytest.approx(GPUS["T4-16GB"].room, abs=1) and here.capability == (7, 5)
    assert "does not compute in bf16" in choose_source(run)[1] and choose_source(old) == ("live", "")
    assert "NVIDIA H200 as T4-16GB has" in choose_source(old.replace(micro_batch=64))[1]
    large_gpu.allocated = GB
    assert Cuda().free() == pytest.approx(GPUS["T4-16GB"].room - GB, abs=1)


def test_a_limit_that_somebody_else_has_set_counts_too(large_gpu):
    torch.cuda.set_per_process_memory_fraction(0.5)
    assert this_gpu().memory == 141 * GB // 2


def test_an_amount_stands_for_a_card_of_this_generation_but_for_no_larger_one(large_gpu):
    with pytest.raises(ValueError, match="cannot imitate"):
        as_card("200 GB")
    as_card("16 GB")
    assert this_gpu().memory == pytest.approx(16 * GB, abs=1) and this_gpu().capability == (9, 0)


@pytest.mark.parametrize(
    ("given", "said"), [("T5-16GB", "unknown GPU"), ("16 potatoes", "not an amount of memory")]
)
def test_a_card_that_nobody_knows_is_refused_before_anything_starts(given, said):
    with pytest.raises(RecordingError, match=said):
        card_option(given)


def test_every_tasks_process_gets_the_card(tmp_path):
    command = work_command(True, "T4-16GB")
    assert all(command(task, tmp_path, 5.0)[-2:] == ["--as-card", "T4-16GB"] for task in rehearsal_list())
