"""Measurements in several threads: each has its own figures, and torch is left as it was found."""

import gc
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch._dynamo  # as it is imported it replaces functions of torch
import torch.cuda.amp.common as amp
import torch.optim.optimizer as torch_optimizer
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator

from course_utils import estimate, measure
from course_utils.measuring import sources
from course_utils.measuring.simulated import simulated_gpu
from course_utils.run import TrainingRun
from course_utils.watching.on_gpu import on_new_gpu

PLACES = (
    torch,
    torch.cuda,
    torch.autograd,
    torch.nn.functional,
    torch.amp.GradScaler,
    torch.UntypedStorage,
    FakeTensor,
    torch_optimizer,
    amp,
    ShardingPropagator,
    sys,
    torch.accelerator,
    torch.cuda.memory,
)
"""Everything in which a simulation changes a name."""

SMALL = TrainingRun("tiny-gpt", 2, 32)
ADAFACTOR = SMALL.replace(optimizer="adafactor", precision="fp32", attention="eager")
SHARDED = SMALL.replace(precision="bf16", world_size=4, zero_stage=3)


def names() -> dict[str, Any]:
    """Every name of those places with what it stands for, and torch's settings that a simulation changes."""
    found = {f"{place.__name__}.{name}": value for place in PLACES for name, value in vars(place).items()}
    settings = {"cudnn": torch.backends.cudnn.enabled, "collecting": gc.isenabled(), "hook": sys.excepthook}
    settings |= {"modes": torch._C._len_torch_dispatch_stack(), "dtype": torch.get_default_dtype()}
    return found | settings | {"threads": torch.autograd.is_multithreading_enabled()}


@contextmanager
def nothing_changed() -> Iterator[None]:
    """Fail if a name means another thing than before; imports meanwhile may add names."""
    if torch.cuda.is_available():  # a GPU that is used for the first time changes names, too
        torch.cuda.init()
    before = names()
    yield
    after = names()
    ignored = {"sys.last_exc", "sys.last_value", "sys.last_type", "sys.last_traceback"}
    assert [name for name in before if name not in ignored and after.get(name) is not before[name]] == []


def together(*works: Callable[[], object]) -> None:
    """Run these at once, each in a thread of its own, and raise what any of them raised."""
    errors: list[BaseException] = []

    def guarded(work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def test_threads_that_estimate_and_simulate_at_once_get_what_each_gets_alone():
    runs = [SMALL, SMALL.replace(attention="efficient", precision="amp-fp16"), ADAFACTOR, SHARDED]
    expected = [(estimate(run).total, measure(run, "simulated").peak) for run in runs]
    wrong: list[str] = []

    def work(first: int) -> None:
        for place in (first, (first + 1) % len(runs)):
            figures = (estimate(runs[place]).total, measure(runs[place], "simulated").peak)
            if figures != expected[place]:
                wrong.append(f"{runs[place]}: {figures}")

    sources.simulated_run.cache_clear()
    with nothing_changed():
        together(*(partial(work, number) for number in range(len(runs))))
    assert wrong == []


def test_other_threads_keep_the_torch_that_they_had():
    q = torch.ones(1, 1, 4, 8, dtype=torch.float32)
    real = torch.nn.functional.scaled_dot_product_attention(q, q, q)
    found: list[torch.Tensor] = []
    with simulated_gpu("flash"):  # which takes 16 bits only
        attend = torch.nn.functional.scaled_dot_product_attention
        together(lambda: found.append(attend(q, q, q)))
    assert torch.equal(found[0], real) and not isinstance(found[0], FakeTensor)


def test_blocks_of_two_threads_leave_torch_as_it_was():
    """The second begins while the first is inside, and ends after it."""
    first_is_inside = threading.Event()
    second_begins = threading.Event()

    def first() -> None:
        with on_new_gpu():
            first_is_inside.set()
            second_begins.wait(60)
            time.sleep(0.2)

    def second() -> None:
        first_is_inside.wait(60)
        second_begins.set()
        with on_new_gpu():
            torch.ones(4, device="cuda")

    before = dict(os.environ)
    with nothing_changed():
        together(first, second)
    assert dict(os.environ) == before


def fails(*_: Any) -> Any:
    raise RuntimeError("on purpose")


@pytest.mark.parametrize("run", [ADAFACTOR, SHARDED.replace(seq_len=16)], ids=["adafactor", "sharded"])
def test_a_simulation_that_fails_leaves_torch_as_it_was(monkeypatch, run):
    sources.simulated_run.cache_clear()
    monkeypatch.setattr("course_utils.measuring.step.Training._update", fails)
    with nothing_changed(), pytest.raises(RuntimeError, match="on purpose"):
        measure(run, source="simulated")


@pytest.mark.parametrize(("source", "fails"), [("simulated", True), ("simulated", False), ("cpu", True)])
def test_a_step_of_ones_own_leaves_torch_as_it_was(source, fails):
    def step(model: torch.nn.Module, optimizer: Any, x: torch.Tensor) -> None:
        model(x).sum().backward()
        if fails:
            raise RuntimeError("on purpose")

    model = torch.nn.Linear(4, 4)
    x = torch.ones(2, 4)
    with nothing_changed(), pytest.raises(RuntimeError, match="on purpose") if fails else nullcontext():
        measure(step=step, model=model, optimizer=torch.optim.SGD(model.parameters()), batch=x, source=source)
