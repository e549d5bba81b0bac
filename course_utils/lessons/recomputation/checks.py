"""Checks of lesson 06, "Recomputation": each names the misconception, never the answer."""

import operator
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import product
from traceback import walk_stack
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

from ... import SimulationUnavailable
from ...interactive.feedback import Mistakes, call, exercise, expect, of_kind, recognized
from ...watching.on_gpu import on_new_gpu
from ..shared.judging import Ran, alive_during, counted, forward_backward, same, seeded, told


# --------------------------------------------------------------------------------------------------
# 06.1: mlp
def _mlp(x: torch.Tensor, up: nn.Module, down: nn.Module) -> torch.Tensor:
    return down(nn.functional.gelu(up(x)))


@exercise("06.1", "The output of the cheap operation is not kept, and no product runs again.")
def mlp(answer: Any) -> None:
    """`answer(x, up, down)` is down(gelu(up(x))), keeps x and up's output, and runs no product again."""
    for tokens, h in ((256, 32), (64, 64), (1, 48)):
        with seeded():
            x = torch.randn(tokens, h)
            layers = {"up": nn.Linear(h, 4 * h), "down": nn.Linear(4 * h, h)}
        weights = [weight for layer in layers.values() for weight in layer.parameters()]
        right, once = counted(partial(_mlp, **layers), [x], weights)
        got, flops = counted(partial(call, answer, returns=torch.Tensor, **layers), [x], weights)
        expect(same([got.output], [right.output]), "The output is not down(gelu(up(x))).")
        expect(same(got.gradients, right.gradients), "The output is right, but some gradient is not.")
        expect(got.kept > 2 * x.nbytes, "You keep only x, so `up` runs again. Keep its output, too.")
        who = "GELU's output is still kept. Which operation needs it in backward: GELU, or the next one?"
        expect(got.kept <= 5 * x.nbytes, who)  # x, and up's output of 4h
        again = "A matrix product runs again. Is `up` in what you checkpoint? Does your variant stop early?"
        expect(flops <= once, again)


# --------------------------------------------------------------------------------------------------
# 06.2: in_groups

# number of blocks, how many of them share a checkpoint, and dropout
GROUPS = ((6, 2, 0.0), (7, 3, 0.0), (5, 1, 0.0), (6, 2, 0.5))
LOOP_OVER = "Your function runs again after the loop has ended. What do its variables refer to then?"
OTHER = f"Backward ran something other than forward. {LOOP_OVER}"
FROZEN = "No weight gets a gradient when x requires none. Which variant of `checkpoint` does that?"
HINTS = {"Recomputed values": OTHER, "different number of tensors": OTHER, "None of the inputs have": FROZEN}


def _groups(blocks: Any, x: torch.Tensor, k: int) -> torch.Tensor:
    for first in range(0, len(blocks), k):
        x = checkpoint(nn.Sequential(*blocks[first : first + k]), x, use_reentrant=False)
    return x


def _in_groups(answer: Callable[..., Any], count: int, k: int, dropout: float) -> tuple[Ran, list[int]]:
    """Forward and backward through `answer(blocks, x, k)`, and which blocks ran, in order.

    With dropout x requires no gradient, as after a frozen embedding.
    """
    runs: list[int] = []
    with seeded(count):
        blocks = [nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Dropout(dropout)) for _ in range(count)]
    for number, block in enumerate(blocks):
        block.register_forward_pre_hook(lambda *_, number=number: runs.append(number))

    def compute(x: torch.Tensor) -> torch.Tensor:
        given = x.detach() if dropout else x
        output = call(answer, blocks, given, k, returns=torch.Tensor, hints=HINTS)
        changed = dropout and given.requires_grad
        expect(not changed, "You made x require a gradient. Its caller did not want that.")
        expect(output.requires_grad or not dropout, FROZEN)
        return output

    x = torch.linspace(-1, 1, 64).reshape(4, 16)
    return forward_backward(compute, [x], nn.Sequential(*blocks).parameters(), 0, HINTS), runs


@exercise("06.2", "Same output, same gradients, and only one checkpoint kept per group.")
def in_groups(answer: Any) -> None:
    """`answer(blocks, x, k)` runs x through all blocks, recomputing them in groups of k."""
    for count, k, dropout in GROUPS:
        right, order = _in_groups(_groups, count, k, dropout)
        got, runs = _in_groups(answer, count, k, dropout)
        off = "The output is not what the blocks compute. Does each block run once, in order?"
        expect(same([got.output], [right.output]), off)
        expect(dropout or got.gradients[0] is not None, "No gradient reaches x. What cuts the graph?")
        expect(len(runs) != count, "Nothing runs again: every block keeps everything. Where is `checkpoint`?")
        last = "Not all blocks run again: even the last one must, which `checkpoint_sequential` leaves out."
        expect(len(runs) >= 2 * count, last)
        slopes = f"The output is right, but the gradients are not. {LOOP_OVER}"
        if dropout:
            slopes = "The second forward draws other masks than the first. Who restores the random state?"
        expect(same(got.gradients, right.gradients), slopes)
        places = f"With {count} blocks and k = {k}, you do not keep one checkpoint for each group of k."
        expect(runs == order and got.kept < right.kept + 64, f"{places} Only the last group may be smaller.")


# --------------------------------------------------------------------------------------------------
# 06.3: worth
aten = torch.ops.aten
GIVEN: dict[Any, tuple[tuple[int, ...], ...]] = {  # operators, and the shapes of their tensors
    aten.mm.default: ((5, 32), (32, 7)),
    aten.addmm.default: ((7,), (5, 32), (32, 7)),  # a bias comes first
    aten.bmm.default: ((3, 5, 16), (3, 16, 64)),
    aten.add.Tensor: ((5, 32), (5, 32)),
    aten.gelu.default: ((5, 32),),
}
LEAST = (0, 7.9, 8, 8.1, 15.9, 16, 16.1, 32, 33)
WORTH_CASES = list(product(LEAST, GIVEN, (torch.float32, torch.bfloat16)))


def _keeps(
    least: float,
    op: Any,
    dtype: torch.dtype,
    flops: Callable[..., float] = lambda left, right: 2 * left[-1],
    size: Callable[..., float] = lambda dtype: dtype.itemsize,
    products: Any = (aten.mm.default, aten.addmm.default, aten.bmm.default),
) -> bool:
    """True if the policy keeps the result, by FLOPs and bytes of one of its numbers."""
    return op in products and flops(*GIVEN[op][-2:]) / size(dtype) >= least


WORTH_MISTAKES: Mistakes = {
    "Compare FLOPs per *byte*: how many bytes has a number here?": partial(_keeps, size=lambda dtype: 1),
    "A number has 4 bytes in fp32 and 2 in 16 bits. Ask the tensor.": partial(_keeps, size=lambda dtype: 4),
    "You count half the FLOPs. A multiplication and an addition are two.": (
        partial(_keeps, flops=lambda left, right: left[-1])
    ),
    "You count the result's columns. How many multiplications does *one* of its numbers take?": (
        partial(_keeps, flops=lambda left, right: 2 * right[-1])
    ),
    "Products are missing. With a bias they come as `addmm`, and attention's as `bmm`.": (
        partial(_keeps, products=(aten.mm.default,))
    ),
}


def _asked(policy: Callable[..., Any], op: Any, dtype: torch.dtype) -> bool:
    """The policy's decision in both runs: True if it keeps the result."""
    given = [torch.zeros(shape, dtype=dtype) for shape in GIVEN[op]]
    with told("For a change of format with `dtype=…`, your policy raised"):
        policy(SimpleNamespace(is_recompute=False), aten._to_copy.default, given[0], dtype=dtype)
    with told("Asked about an operator, your policy raised"):
        both = [policy(SimpleNamespace(is_recompute=again), op, *given) for again in (False, True)]
    for decision in both:
        of_kind(decision, (CheckpointPolicy, bool), "Your policy returns")
    expect(both[0] == both[1], "Your policy answers differently in the second run. What does it remember?")
    return both[0] in (True, CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)


@exercise("06.3", "Long inner dimensions first: they cost the most to run again, and no more to keep.")
def worth(answer: Any) -> None:
    """`answer(least)` is a policy that keeps a product of at least `least` FLOPs per byte of its result."""
    policies = {least: call(answer, least, returns=object) for least in LEAST}  # all in use at once
    got = [_asked(policies[least], op, dtype) for least, op, dtype in WORTH_CASES]
    otherwise = (
        "You keep some products that should run again, or the reverse. Do you compare with *at least*? "
        "Print `op` and its FLOPs per byte."
    )
    recognized(got, WORTH_CASES, _keeps, WORTH_MISTAKES, otherwise, operator.eq)


# --------------------------------------------------------------------------------------------------
# 06.4: own_checkpoint
TOO_FAR = "Backward of the second run continues into the operations that made the inputs. Where must it end?"
PUT_BACK = "After backward, your caller gets other random numbers. Restore the state that you found."
FORMATS = "The second run has another autocast than the first. Was it on, and in which dtype?"
NO_GRAPH = "The second run has no graph: autograd is off in backward. Or does x require no gradient there?"
OWN_HINTS = {
    "have the same dtype": FORMATS,
    "require gradients": "Token ids are whole numbers and take no gradient. Which inputs required one?",
    "incorrect number of gradients": "A backward returns one item per argument of its forward, some None.",
    "a second time": TOO_FAR,
    **dict.fromkeys(
        ("KeyError", "IndexError", "does not require grad and does not have a grad_fn"), NO_GRAPH
    ),
}
INPUTS = torch.arange(256) % 10, torch.linspace(-1, 1, 256 * 32).reshape(256, 32), torch.linspace(0, 1, 32)
STATES = 2**14  # bytes for random states
OWN_CASES: dict[str, dict[str, Any]] = {  # by what is said if gradients are off
    "Gradients are off, even without dropout and autocast.": {},
    f"With two in a row, gradients are off. {TOO_FAR}": {"times": 2},
    "With dropout, gradients are off: the second run draws other masks. Which state had the first?": {
        "dropout": 0.5, "times": 2
    },
    "Under autocast, gradients are off.": {"dtype": torch.float16},
}  # fmt: skip


def _noting(dropout: float = 0.0) -> tuple[Callable[..., torch.Tensor], list[torch.Tensor], list[Any]]:
    """A function of token ids, x and a gate, its weights, and the list of autocast's dtype at each run."""
    notes: list[Any] = []
    with seeded():
        table, up, down = nn.Embedding(10, 32), nn.Linear(32, 128), nn.Linear(128, 32)

    def function(tokens: torch.Tensor, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        callers = {frame.f_globals.get("__name__") for frame, _ in walk_stack(None)}
        theirs = "That is PyTorch's checkpoint. This time, write your own."
        expect("torch.utils.checkpoint" not in callers, theirs)
        notes.append(torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu"))
        return x + gate * nn.functional.dropout(down(nn.functional.gelu(up(x + table(tokens)))), dropout)

    return function, list(nn.ModuleList([table, up, down]).parameters()), notes


def _own(answer: Any, dropout: float = 0, times: int = 1, dtype: Any = None) -> tuple[Ran, Any, Any]:
    """One forward and backward through `times` checkpoints, what each run noted, later random numbers."""
    function, weights, notes = _noting(dropout)
    after: list[torch.Tensor] = []

    def compute(tokens: torch.Tensor, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        # runs when backward has come through all checkpoints
        x.register_hook(lambda _: after.append(torch.rand(2)))
        gate = gate.detach()
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            for _ in range(times):
                x = call(answer, function, tokens, x, gate, returns=torch.Tensor, hints=OWN_HINTS)
        changed = "You make an input of your caller require a gradient. Work on a detached one."
        expect(not gate.requires_grad, changed)
        return x

    return forward_backward(compute, INPUTS, weights, 1, OWN_HINTS), notes, after


@exercise(
    "06.4", "It keeps only its inputs, and runs the same forward again, with the same masks and formats."
)
def own_checkpoint(answer: Any) -> None:
    """`answer(function, *inputs)` is function(*inputs), which backward runs again from the inputs."""
    for otherwise, options in OWN_CASES.items():
        times = options.get("times", 1)
        got, notes, after = _own(answer, **options)
        right, _, later = _own(lambda function, *inputs: function(*inputs), **options)
        output = "The output is not the function's. Do you leave the first run as it is, random numbers too?"
        expect(same([got.output], [right.output]), output)
        never = "Backward never runs the function again: everything is kept."
        expect(len(notes) > times, never)
        none = "No gradient reaches x. What does your backward return for it?"
        expect(got.gradients[1] is not None, none)
        missing = (
            "A weight that the function uses gets no gradient. Who goes backward to what is not an input?"
        )
        expect(all(gradient is not None for gradient in got.gradients[len(INPUTS) :]), missing)
        expect(len(after) == 1, TOO_FAR)
        expect(len(set(notes)) == 1, FORMATS)
        expect(same(got.gradients, right.gradients), otherwise)
        expect(same(after, later), PUT_BACK)
        twice = "The function runs more than twice. Once in forward and once in backward is enough."
        expect(len(notes) == 2 * times, twice)
        more = "You keep more than the inputs for backward. What still holds tensors of the first run?"
        expect(times > 1 or got.kept <= sum(tensor.nbytes for tensor in INPUTS) + STATES, more)
    _expect_inputs_alone(answer)
    _expect_gpus_state(answer)


def _expect_inputs_alone(answer: Any) -> None:
    """Check inputs that the caller still holds, with a backward under autocast; then under `no_grad`."""
    function, weights, notes = _noting()
    tokens, x, gate = (one.clone() for one in INPUTS)
    run = partial(answer, function, tokens, x.requires_grad_(), gate)  # `call` would hand over copies
    output, _, held, _ = alive_during(run, weights)
    copies = "You keep copies of the inputs. Your caller has the inputs: keep those."
    expect(held <= output.nbytes + STATES, copies)
    with torch.autocast("cpu", torch.bfloat16), told("Backward under autocast raised", OWN_HINTS):
        output.backward(torch.ones_like(output))
    expect(len(set(notes)) == 1, FORMATS)
    expect(not gate.requires_grad, "In backward you make an input of your caller require a gradient.")
    notes.clear()
    with torch.no_grad():
        output, _, held, _ = alive_during(run, weights)
    once = not output.requires_grad and len(notes) == 1 and held <= output.nbytes + STATES
    expect(once, "Under no_grad, run the function once, make no graph, and keep nothing.")


def _expect_gpus_state(answer: Any) -> None:
    """Check "cuda" with a stand-in for its generator: its state is a tensor's size, the CPU's is its seed."""
    states = [3]  # every state that the stand-in has had
    found = []  # at each run of the function: the GPU's state, the CPU's seed, autocast

    def get(*_: Any) -> torch.Tensor:
        return torch.zeros(16 + states[-1], dtype=torch.uint8, device="cpu")

    def restore(state: torch.Tensor, *_: Any) -> None:
        states.append(len(state) - 16)

    def function(x: torch.Tensor) -> torch.Tensor:
        autocast = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
        found.append((states[-1], torch.initial_seed(), autocast))
        states.append(states[-1] + 1)  # one random number is drawn
        return x.sin()

    of_all = {"get_rng_state_all": lambda: [get()], "set_rng_state_all": lambda all: restore(*all)}
    stand_in = partial(mock.patch.multiple, get_rng_state=get, set_rng_state=restore, **of_all)
    simulated = suppress(SimulationUnavailable), seeded(), on_new_gpu()
    with simulated[0], simulated[1], simulated[2], stand_in(torch.cuda), stand_in(torch.cuda.random):
        x = torch.ones(4, 4, device="cuda", requires_grad=True)
        with torch.autocast("cuda", torch.bfloat16):
            y = call(answer, function, x, returns=torch.Tensor, may_change=(1,))
        states.append(9)
        torch.manual_seed(9)
        with told("On a GPU, backward through your output raised", OWN_HINTS):
            y.backward(torch.ones_like(y))
        after = torch.initial_seed()
    if not found:  # no GPU could be simulated
        return
    hints = (
        "On a GPU, the second run draws other numbers. A GPU has random numbers of its own.",
        "With inputs on a GPU, the second run draws other numbers on the CPU. Restore both states.",
        'On a GPU, the second run is outside of autocast. Its device type is "cuda".',
    )
    for first, second, hint in zip(found[0], found[-1], hints, strict=True):
        expect(first == second, hint)
    expect(states[-1] == after == 9, f"With inputs on a GPU: {PUT_BACK}")
