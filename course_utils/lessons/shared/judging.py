"""Learners' torch code, judged by running it. Two harnesses serve most checks.

`forward_backward` is for bytes kept for backward, `alive_during` for bytes alive during a training loop.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import FlopCounterMode

from ...interactive.feedback import CheckFailed, NotSolved, expect
from ...measuring.tracker import Tracker
from ...units import round_up


@contextmanager
def seeded(seed: int = 0) -> Iterator[None]:
    """The same random numbers each time, and the caller's own ones as before afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


class Ran(NamedTuple):
    """One forward and backward: output, gradients of inputs and weights, bytes kept between, the peak."""

    output: torch.Tensor
    gradients: list[torch.Tensor | None]
    kept: int
    peak: int


def forward_backward(
    compute: Callable[..., Any],
    inputs: Sequence[torch.Tensor],
    weights: Iterable[torch.Tensor] = (),
    seed: int = 0,
    hints: Mapping[str, str] = {},
) -> Ran:
    """Run `compute` on copies of `inputs`, and backward from its output, traced on the CPU.

    Inputs are what earlier operations made: they count as kept if something keeps them for backward.
    `weights` count as nothing. `kept` counts every storage that is alive after forward, wherever it is held,
    without the output's own; `peak` the most at any moment. Backward begins with a gradient that differs from
    element to element. Raises CheckFailed for an output that is no tensor or has no graph, and for whatever
    backward raises, as in `told`.
    """
    leaves = [tensor.detach().clone().requires_grad_(tensor.is_floating_point()) for tensor in inputs]
    weights = list(weights)
    for weight in weights:
        weight.grad = None
    with seeded(seed), Tracker("cpu") as tracker:
        tracker.bind("parameters", weights)
        output = compute(*[leaf.clone() for leaf in leaves])
        expect(isinstance(output, torch.Tensor), f"Your output is a {type(output).__name__}, not one tensor.")
        cut = (
            "No gradient can flow from your output: something cuts the graph (`detach`, `no_grad`, `.data`)."
        )
        expect(output.requires_grad, cut)
        kept = alive(tracker)[-1] - output.untyped_storage().nbytes()
        start = (
            torch.linspace(-1, 2, output.numel(), dtype=torch.float64).reshape(output.shape).to(output.dtype)
        )
        # what may raise is a learner's own backward, or a graph that their forward has spoiled
        with told("Backward through your output raised", hints):
            output.backward(start)
    gradients = [tensor.grad for tensor in (*leaves, *weights)]
    return Ran(output.detach(), gradients, kept, max(alive(tracker)))


class Alive(NamedTuple):
    """The result of some work, and the bytes alive at moments of it that were not there before."""

    result: Any
    begins: list[int]  # as each forward pass of the model begins
    end: int
    peak: int


def alive_during(
    work: Callable[[], Any],
    known: Iterable[torch.Tensor] = (),
    model: torch.nn.Module | None = None,
    block: int = 1,
) -> Alive:
    """Run `work()`, traced on the CPU, and count every storage that it makes, wherever it is held.

    `known` are tensors that were there before. They count as nothing, also in new memory that `work` gives
    them; others count as new as soon as `work` makes a view of them or writes into them. Without a `model`,
    `begins` is empty. Sizes are rounded up to multiples of `block`, which is 512 on a GPU.
    """
    begins: list[int] = []  # the number of events so far
    known = list(known)
    with Tracker("cpu") as tracker:
        tracker.bind("parameters", known)
        hook = nullcontext()
        if model is not None:
            hook = model.register_forward_pre_hook(lambda *_: begins.append(len(tracker.events)))
        with hook:
            result = work()
        tracker.bind("parameters", known)  # again: `.data = …` gives a tensor new memory
        sizes = alive(tracker, block)
    return Alive(result, [sizes[event] for event in begins], sizes[-1], max(sizes))


@contextmanager
def told(what: str, hints: Mapping[str, str] = {}) -> Iterator[None]:
    """Inside, what a learner's code raises becomes CheckFailed.

    It follows `what`, as in "Your step raised", or is replaced by the first of `hints` (a part of the error's
    text, and what is said instead) that fits.
    """
    try:
        yield
    except (CheckFailed, NotSolved):
        raise
    except Exception as error:
        problem = f"{what} {type(error).__name__}: {error}"
        raise CheckFailed(next((hint for part, hint in hints.items() if part in problem), problem)) from error


def counted(
    compute: Callable[..., Any], inputs: Sequence[torch.Tensor], weights: Iterable[torch.Tensor] = ()
) -> tuple[Ran, int]:
    """The result of `forward_backward`, and the FLOPs of all matrix products in it."""
    with FlopCounterMode(display=False) as counter:
        ran = forward_backward(compute, inputs, weights)
    return ran, counter.get_total_flops()


def alive(tracker: Tracker, block: int = 1) -> list[int]:
    """The bytes of all tensors but parameters before and after each event, in multiples of `block`."""
    changes = []
    for size, storage in tracker.events:
        taken = 0 if storage.kind == "parameters" else round_up(storage.exact, block)
        changes.append(taken if size > 0 else -taken)
    return list(accumulate(changes, initial=0))


def same(
    one: Sequence[torch.Tensor | None], other: Sequence[torch.Tensor | None], tolerance: float = 1e-5
) -> bool:
    """True if two lists hold the same tensors, up to rounding; None, a missing gradient, equals only None."""
    if len(one) != len(other):
        return False

    def alike(mine: torch.Tensor | None, right: torch.Tensor | None) -> bool:
        if mine is None or right is None:
            return mine is right
        if mine.shape != right.shape:
            return False
        return torch.allclose(mine.double(), right.double(), tolerance, tolerance)

    return all(alike(mine, right) for mine, right in zip(one, other, strict=True))
