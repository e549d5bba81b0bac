"""Checks of lesson 06, "Recomputation": each names the misconception, never the answer."""

import operator
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from itertools import product
from traceback import walk_stack
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from ... import SimulationUnavailable
from ...interactive.feedback import call, exercise, expect, recognized
from ...watching.on_gpu import on_new_gpu
from ..shared.judging import Ran, alive_during, counted, forward_backward, same, seeded, told


# --------------------------------------------------------------------------------------------------
# 06.1: mlp
@exercise("06.1", "The output of the cheap operation is not kept, and no product runs again.")
def mlp(answer: Any) -> None:
    """`answer(x, up, down)` is down(gelu(up(x))), keeps x and up's output, and runs no product again."""
    for tokens, h in ((256, 32), (64, 64), (1, 48)):
        with seeded():
            x = torch.randn(tokens, h)
            layers = {"up": nn.Linear(h, 4 * h), "down": nn.Linear(4 * h, h)}
        weights = [weight for layer in layers.values() for weight in layer.parameters()]
        right, once = counted(partial(_mlp, **layers), [x], weights)
        theirs = partial(call, answer, returns=torch.Tensor, **layers)
        got, flops = counted(theirs, [x], weights)
        expect(same([got.output], [right.output]), "The output is not down(gelu(up(x))).")
        expect(same(got.gradients, right.gradients), "The output is right, but some gradient is not.")
        expect(got.kept > 2 * x.nbytes, "You keep only x, so `up` runs again. Keep its output, too.")
        who = "GELU's output is still kept. Which operation needs it in backward: GELU, or the next one?"
        expect(got.kept <= 5 * x.nbytes, who)  # x, and up's output of 4h
        again = "A matrix product runs again. Is `up` in what you checkpoint? Does your variant stop early?"
        expect(flops <= once, again)


def _mlp(x: torch.Tensor, up: nn.Module, down: nn.Module) -> torch.Tensor:
    return down(nn.functional.gelu(up(x)))


# --------------------------------------------------------------------------------------------------
# 06.2: in_groups

# number of blocks, how many of them share a checkpoint, and dropout
GROUPS = ((6, 2, 0.0), (7, 3, 0.0), (5, 1, 0.0), (6, 2, 0.5))
WIDTH = 16
LOOP_OVER = "Your function runs again after the loop has ended. What do its variables refer to then?"
OTHER = f"Backward ran something other than forward. {LOOP_OVER}"
FROZEN = "No weight gets a gradient when x requires none. Which variant of `checkpoint` does that?"
HINTS = {"Recomputed values": OTHER, "different number of tensors": OTHER, "None of the inputs have": FROZEN}


class Noted(nn.Module):
    """A small block that appends its number to `runs` whenever it runs."""

    def __init__(self, number: int, runs: list[int], dropout: float) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.number = number
        self.runs = runs
        self.dropout = dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.runs.append(self.number)
        return x + nn.functional.dropout(torch.tanh(self.linear(x)), self.dropout, self.training)


def groups_right(blocks: list[Noted], x: Any, k: int) -> Any:
    for first in range(0, len(blocks), k):
        x = checkpoint(nn.Sequential(*blocks[first : first + k]), x, use_reentrant=False)
    return x


def _in_groups(answer: Callable[..., Any], count: int, k: int, dropout: float) -> tuple[Ran, list[int]]:
    """Forward and backward through `answer(blocks, x, k)`, and what ran, in order.

    With dropout x requires no gradient, as after a frozen embedding.
    """
    runs: list[int] = []
    with seeded(count):
        blocks = [Noted(number, runs, dropout) for number in range(count)]

    def compute(x: torch.Tensor) -> torch.Tensor:
        given = x.detach() if dropout else x
        output = call(answer, blocks, given, k, returns=torch.Tensor, hints=HINTS)
        changed = dropout and given.requires_grad
        expect(not changed, "You made x require a gradient. Its caller did not want that.")
        expect(output.requires_grad or not dropout, FROZEN)
        return output

    x = torch.linspace(-1, 1, 4 * WIDTH).reshape(4, WIDTH)
    return forward_backward(compute, [x], nn.Sequential(*blocks).parameters(), 0, HINTS), runs


@exercise("06.2", "Same output, same gradients, and only one checkpoint kept per group.")
def in_groups(answer: Any) -> None:
    """`answer(blocks, x, k)` runs x through all blocks, recomputing them in groups of k."""
    for count, k, dropout in GROUPS:
        right, order = _in_groups(groups_right, count, k, dropout)
        got, runs = _in_groups(answer, count, k, dropout)
        output = (
            "The output is not what the blocks compute. Does each block run once, in order, with its dropout?"
        )
        expect(same([got.output], [right.output]), output)
        expect(dropout or got.gradients[0] is not None, "No gradient reaches x. What cuts the graph?")
        expect(len(runs) != count, "Nothing runs again: every block keeps everything. Where is `checkpoint`?")
        last = "Not all blocks run again: even the last one must, which `checkpoint_sequential` leaves out."
        expect(len(runs) >= 2 * count, last)
        slopes = f"The output is right, but the gradients are not. {LOOP_OVER}"
        masks = (
            "The second forward draws other masks than the first. Who restores the random state of dropout?"
        )
        expect(same(got.gradients, right.gradients), masks if dropout else slopes)
        places = f"With {count} blocks and k = {k}, you do not keep one checkpoint for each group of k."
        smaller = "Only the last group is smaller."
        expect(runs == order and got.kept < right.kept + 64, f"{places} {smaller}")


# --------------------------------------------------------------------------------------------------
# 06.3: worth
WORTH_CASES = list(product((0, 24, 31.2, 31.8, 32, 63, 100, 999), (torch.float32, torch.bfloat16)))
PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default)


def _flops_per_byte(left: torch.Tensor, _: torch.Tensor) -> float:
    return 2 * left.shape[-1] / left.itemsize


def _policy(
    least: float, worth: Any = _flops_per_byte, products: Any = PRODUCTS, keep: Any = operator.ge
) -> Callable[..., bool]:
    """The right policy, or with other options a mistaken one."""

    def policy(ctx: Any, op: Any, *args: Any, **_: Any) -> bool:
        # addmm takes the bias first: left and right are the last two of all products
        return op in products and keep(worth(*args[-2:]), least)

    return policy


def _kept_by(policy_for: Callable[..., Any], least: float, dtype: torch.dtype) -> tuple[int, int]:
    """Bytes that a small network keeps under `policy_for(least)`, and the FLOPs of all its products."""
    with seeded():
        wide = nn.Linear(63, 256, dtype=dtype)
        narrow = nn.Linear(256, 32, bias=False, dtype=dtype)
        x = torch.randn(4, 16, 63).to(dtype)

    def network(x: torch.Tensor) -> torch.Tensor:
        h = wide(x)
        y = narrow(nn.functional.gelu(h) * h.sigmoid()) + x[..., :32]
        # stacks of products, with inner dimensions of 32 and 16
        return torch.tanh((y @ y.mT).softmax(-1) @ y)

    contexts = partial(create_selective_checkpoint_contexts, policy_for(least))
    run = partial(checkpoint, network, use_reentrant=False, context_fn=contexts)
    with told("With your policy, the network raised"):
        ran, flops = counted(run, [x], nn.Sequential(wide, narrow).parameters())
    return ran.kept, flops


WRONG_POLICIES: dict[str, dict[str, Any]] = {
    "Compare FLOPs per *byte*: how many bytes has a number here?": {
        "worth": lambda left, _: 2 * left.shape[-1]
    },
    "A number has 4 bytes in fp32 and 2 in 16 bits. Ask the tensor.": {
        "worth": lambda left, _: left.shape[-1] / 2
    },
    "You count half the FLOPs. A multiplication and an addition are two.": {
        "worth": lambda left, _: left.shape[-1] / left.itemsize
    },
    "You count the result's columns. How many multiplications does *one* of its numbers take?": {
        "worth": lambda left, right: 2 * right.shape[-1] / left.itemsize
    },
    "You require more FLOPs per byte than `least`. *At least* includes the bound itself.": {
        "keep": operator.gt
    },
    "Nothing is kept: everything runs again. What does your policy return?": {"products": ()},
    "Attention's products are missing: they come as `bmm`.": {"products": PRODUCTS[:2]},
    "A linear layer with a bias is missing: it comes as `addmm`.": {"products": PRODUCTS[::2]},
}
# A learner tries again: what the right policy and the wrong ones keep is computed once.
KEPT_RIGHT = cache(partial(_kept_by, _policy))
WORTH_MISTAKES = {
    says: cache(partial(_kept_by, partial(_policy, **wrong))) for says, wrong in WRONG_POLICIES.items()
}


@exercise("06.3", "Long inner dimensions first: they cost the most to run again, and no more to keep.")
def worth(answer: Any) -> None:
    """`answer(least)` is a policy that keeps a product of at least `least` FLOPs per byte of its result."""
    got = [_kept_by(partial(call, answer, returns=object), *case) for case in WORTH_CASES]
    x = torch.zeros(4, 4)
    with told("For a change of format with `dtype=…`, your policy raised"):
        answer(0)(SimpleNamespace(is_recompute=False), torch.ops.aten._to_copy.default, x, dtype=x.dtype)
    otherwise = (
        "You keep some products that should run again, or the reverse. Print `op` and its FLOPs per byte."
    )
    recognized(got, WORTH_CASES, KEPT_RIGHT, WORTH_MISTAKES, otherwise, operator.eq)


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


def _noting(dropout: float = 0.0) -> tuple[Callable[..., torch.Tensor], list[torch.Tensor], list[Any]]:
    """A function of token ids, x and a gate, its weights, and the list of autocast's dtype at each run."""
    notes: list[Any] = []
    with seeded():
        table = nn.Embedding(10, 32)
        up = nn.Linear(32, 128)
        down = nn.Linear(128, 32)

    def function(tokens: torch.Tensor, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        callers = {frame.f_globals.get("__name__") for frame, _ in walk_stack(None)}
        theirs = "That is PyTorch's checkpoint. This time, write your own."
        expect("torch.utils.checkpoint" not in callers, theirs)
        notes.append(torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu"))
        return x + gate * nn.functional.dropout(down(nn.functional.gelu(up(x + table(tokens)))), dropout)

    return function, list(nn.ModuleList([table, up, down]).parameters()), notes


def _own(
    answer: Any, dropout: float = 0, times: int = 1, seed: int = 0, dtype: Any = None
) -> tuple[Ran, Any, Any]:
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

    return forward_backward(compute, INPUTS, weights, seed, OWN_HINTS), notes, after


def _expect_like_direct(answer: Any, otherwise: str, **options: Any) -> tuple[Ran, list[Any]]:
    """Raise CheckFailed unless output, gradients and later random numbers are those without a checkpoint."""
    got, notes, after = _own(answer, **options)
    right, _, later = _own(lambda function, *inputs: function(*inputs), **options)
    output = "The output is not the function's. Do you leave the first run as it is, random numbers too?"
    expect(same([got.output], [right.output]), output)
    never = "Backward never runs the function again: everything is kept."
    expect(len(notes) > options.get("times", 1), never)
    expect(got.gradients[1] is not None, "No gradient reaches x. What does your backward return for it?")
    missing = "A weight that the function uses gets no gradient. It is not an input. Who goes backward to it?"
    expect(all(gradient is not None for gradient in got.gradients[len(INPUTS) :]), missing)
    expect(len(after) == 1, TOO_FAR)
    expect(len(set(notes)) == 1, FORMATS)
    expect(same(got.gradients, right.gradients), otherwise)
    expect(same(after, later), PUT_BACK)
    return got, notes


@exercise(
    "06.4", "It keeps only its inputs, and runs the same forward again, with the same masks and formats."
)
def own_checkpoint(answer: Any) -> None:
    """`answer(function, *inputs)` is function(*inputs), which backward runs again from the inputs."""
    got, notes = _expect_like_direct(answer, "Gradients are off, even without dropout and autocast.")
    twice = "The function runs more than twice. Once in forward and once in backward is enough."
    expect(len(notes) == 2, twice)
    most = sum(tensor.nbytes for tensor in INPUTS) + 2**14  # with random states
    more = "You keep more than the inputs for backward. What still holds tensors of the first run?"
    expect(got.kept <= most, more)
    _expect_like_direct(answer, f"With two in a row, gradients are off. {TOO_FAR}", times=2)
    masks = "With dropout, gradients are off: the second run draws other masks. Which state had the first?"
    _expect_like_direct(answer, masks, dropout=0.5, times=2, seed=1)
    _expect_like_direct(answer, "Under autocast, gradients are off.", dtype=torch.float16)
    _expect_inputs_alone(answer)
    _expect_gpus_state(answer)


def _expect_inputs_alone(answer: Any) -> None:
    """Check inputs that the caller still holds, with a backward under autocast; then under `no_grad`."""
    function, weights, notes = _noting()
    tokens, x, gate = (one.clone() for one in INPUTS)
    run = partial(answer, function, tokens, x.requires_grad_(), gate)  # `call` would hand over copies
    output, _, held, _ = alive_during(run, weights)
    copies = "You keep copies of the inputs. Your caller has the inputs: keep those."
    expect(held <= output.nbytes + 2**14, copies)
    with torch.autocast("cpu", torch.bfloat16), told("Backward under autocast raised", OWN_HINTS):
        output.backward(torch.ones_like(output))
    expect(len(set(notes)) == 1, FORMATS)
    expect(not gate.requires_grad, "In backward you make an input of your caller require a gradient.")
    notes.clear()
    with torch.no_grad():
        output, _, held, _ = alive_during(run, weights)
    once = not output.requires_grad and len(notes) == 1 and held <= output.nbytes + 2**14
    expect(once, "Under no_grad, run the function once, make no graph, and keep nothing.")


def _expect_gpus_state(answer: Any) -> None:
    """Check "cuda" with a stand-in for its generator: its state is a tensor's size, the CPU's is its seed."""
    states = [3]  # every state that the stand-in has had
    found = []  # at each run of the function: the CPU's seed, the GPU's state, autocast

    def get(*_: Any) -> torch.Tensor:
        return torch.zeros(16 + states[-1], dtype=torch.uint8, device="cpu")

    def function(x: torch.Tensor) -> torch.Tensor:
        autocast = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
        found.append((torch.initial_seed(), states[-1], autocast))
        states.append(states[-1] + 1)  # one random number is drawn
        return x.sin()

    def restore(state: torch.Tensor, *_: Any) -> None:
        states.append(len(state) - 16)

    stand_in = partial(
        mock.patch.multiple,
        get_rng_state=get,
        get_rng_state_all=lambda: [get()],
        set_rng_state=restore,
        set_rng_state_all=lambda of_all: restore(*of_all),
    )
    with (
        suppress(SimulationUnavailable),
        seeded(),
        on_new_gpu(),
        stand_in(torch.cuda),
        stand_in(torch.cuda.random),
    ):
        x = torch.ones(4, 4, device="cuda", requires_grad=True)
        with torch.autocast("cuda", torch.bfloat16):
            y = call(answer, function, x, returns=torch.Tensor, may_change=(1,))
        states.append(9)
        torch.manual_seed(9)
        with told("On a GPU, backward through your output raised", OWN_HINTS):
            y.backward(torch.ones_like(y))
        after = torch.initial_seed()
    if found:  # a GPU could be simulated
        numbers = "On a GPU, the second run draws other numbers. A GPU has random numbers of its own."
        expect(found[0][1] == found[-1][1], numbers)
        both = "With inputs on a GPU, the second run draws other numbers on the CPU. Restore both states."
        expect(found[0][0] == found[-1][0], both)
        outside = 'On a GPU, the second run is outside of autocast. Its device type is "cuda".'
        expect(found[0] == found[-1], outside)
        expect(states[-1] == after == 9, f"With inputs on a GPU: {PUT_BACK}")
