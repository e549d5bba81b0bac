"""Measurements in several threads: each has its own figures, and torch is left as it was found."""

import gc
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.cuda.amp.common as amp
import torch.optim.optimizer as torch_optimizer
from soak import Soak, figures, small_runs
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator

from course_utils import measure
from course_utils.measuring import tracing
from course_utils.measuring.simulated import simulated_gpu
from course_utils.run import TrainingRun

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


def simulated_peak(run: TrainingRun) -> int:
    tracing.trace_simulated.cache_clear()
    return measure(run, source="simulated").peak


def test_two_simulations_at_once_give_what_each_gives_alone():
    runs = [SMALL, SMALL.replace(attention="efficient", precision="amp-fp16"), SHARDED]
    alone = [simulated_peak(run) for run in runs]
    found: dict[int, int] = {}

    def simulate(number: int) -> None:
        found[number] = simulated_peak(runs[number])

    with nothing_changed():
        together(*(partial(simulate, number) for number in range(len(runs))))
    assert [found[number] for number in range(len(runs))] == alone


def test_the_second_simulation_begins_when_the_first_has_ended():
    inside = threading.Event()
    outside = threading.Event()
    order: list[str] = []

    def first() -> None:
        with simulated_gpu("flash"):
            inside.set()
            outside.wait(1)  # the second asks meanwhile
            order.append("first")

    def second() -> None:
        inside.wait()
        outside.set()
        with simulated_gpu("efficient"):
            order.append("second")

    with nothing_changed():
        together(first, second)
    assert order == ["first", "second"]


def test_other_threads_keep_the_torch_that_they_had():
    q = torch.ones(1, 1, 4, 8, dtype=torch.float32)
    real = torch.nn.functional.scaled_dot_product_attention(q, q, q)
    found: list[torch.Tensor] = []
    with simulated_gpu("flash"):  # which takes 16 bits only
        attend = torch.nn.functional.scaled_dot_product_attention
        together(lambda: found.append(attend(q, q, q)))
    assert torch.equal(found[0], real) and not isinstance(found[0], FakeTensor)


def fails(*_: Any) -> Any:
    raise RuntimeError("on purpose")


ADAFACTOR = SMALL.replace(optimizer="adafactor", precision="fp32", attention="eager")


@pytest.mark.parametrize("run", [SMALL, ADAFACTOR, SHARDED.replace(seq_len=16)])
def test_a_simulation_that_fails_leaves_torch_as_it_was(monkeypatch, run):
    tracing.trace_simulated.cache_clear()
    monkeypatch.setattr("course_utils.measuring.step.Training._update", fails)
    with nothing_changed(), pytest.raises(RuntimeError, match="on purpose"):
        measure(run, source="simulated")


@pytest.mark.parametrize("source", ["simulated", "cpu"])
@pytest.mark.parametrize("fails", [True, False])
def test_a_step_of_ones_own_leaves_torch_as_it_was(source, fails):
    def step(model: torch.nn.Module, optimizer: Any, x: torch.Tensor) -> None:
        model(x).sum().backward()
        if fails:
            raise RuntimeError("on purpose")

    model = torch.nn.Linear(4, 4)
    x = torch.ones(2, 4)
    with nothing_changed(), pytest.raises(RuntimeError, match="on purpose") if fails else nullcontext():
        measure(step=step, model=model, optimizer=torch.optim.SGD(model.parameters()), batch=x, source=source)


def test_a_short_soak_finds_every_figure_right():
    runs = [run.replace(model="tiny-gpt", seq_len=32) for run in small_runs()[:4]]
    soak = Soak(runs, [figures(run) for run in runs], threads=4)
    assert soak.run(tasks=12) == []
