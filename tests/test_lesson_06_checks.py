"""Checks of lesson 06: right answers of every style pass, and each planted wrong answer gets its hint."""

import math
from collections.abc import Callable
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import count
from typing import Any

import numpy
import pytest
import torch
from checking import Answers, JudgedAnswers
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    get_device_states,
    set_device_states,
)


def mlp(whole: bool = False, activation: bool = False, reentrant: bool = False) -> Any:
    """An answer that checkpoints GELU and the product after it: or everything, or GELU alone."""

    def answer(x: Any, up: Any, down: Any) -> Any:
        if whole:
            return checkpoint(lambda x: down(F.gelu(up(x))), x, use_reentrant=reentrant)
        if activation:
            return down(checkpoint(F.gelu, up(x), use_reentrant=reentrant))
        return checkpoint(lambda z: down(F.gelu(z)), up(x), use_reentrant=reentrant)

    return answer


def mlp_by_hand(x: Any, up: Any, down: Any) -> Any:
    """Hooks of one's own: GELU's output is not kept, but made again from its input."""
    z = up(x)
    y = F.gelu(z)
    place = y.data_ptr()
    makes_it_again = saved_tensors_hooks(
        lambda kept: None if kept.data_ptr() == place else kept,
        lambda kept: F.gelu(z.detach()) if kept is None else kept,
    )
    with makes_it_again:
        return down(y)


MLP = Answers(
    right=[
        mlp(),
        mlp_by_hand,
        lambda x, up, down: checkpoint(
            torch.nn.Sequential(torch.nn.GELU(), down), up(x), use_reentrant=False
        ),
    ],
    wrong=[
        (lambda x, up, down: down(F.gelu(up(x))), "GELU's output is still kept"),
        (mlp(activation=True), "GELU's output is still kept"),
        (mlp(activation=True, reentrant=True), "GELU's output is still kept"),
        (mlp(whole=True), "You keep only x"),
        (mlp(whole=True, reentrant=True), "You keep only x"),
        (mlp(reentrant=True), "A matrix product runs again"),
        (
            lambda x, up, down: down(checkpoint(lambda x: F.gelu(up(x)), x, use_reentrant=False)),
            "A matrix product runs again",
        ),
        (lambda x, up, down: down(F.relu(up(x))), "The output is not"),
        (lambda x, up, down: mlp()(x.detach(), up, down), "some gradient is not"),
        (lambda x, up, down: down(F.gelu(up(x))).detach(), "something cuts the graph"),
    ],
)


def plain(blocks: Any, x: Any, k: int = 0) -> Any:
    for block in blocks:
        x = block(x)
    return x


def grouped(blocks: Any, x: Any, k: int, preserve: bool = True, reentrant: bool = False) -> Any:
    for first in range(0, len(blocks), k):
        x = checkpoint(
            plain, blocks[first : first + k], x, use_reentrant=reentrant, preserve_rng_state=preserve
        )
    return x


def from_the_end(blocks: Any, x: Any, k: int) -> Any:
    if not blocks:
        return x
    first = (len(blocks) - 1) // k * k
    x = from_the_end(blocks[:first], x, k)
    return checkpoint(torch.nn.Sequential(*blocks[first:]), x, use_reentrant=False)


def by_hand(way: Any) -> Any:
    def answer(blocks: Any, x: Any, k: int) -> Any:
        for first in range(0, len(blocks), k):
            x = way(torch.nn.Sequential(*blocks[first : first + k]), x)
        return x

    return answer


def late_binding(blocks: Any, x: Any, k: int) -> Any:
    for first in range(0, len(blocks), k):
        group = blocks[first : first + k]
        x = checkpoint(lambda x: plain(group, x), x, use_reentrant=False)  # noqa: B023 (the trap of this exercise)
    return x


def past_the_end(blocks: Any, x: Any, k: int) -> Any:
    """The same trap with a counter, which is past the last group when backward begins."""
    first = 0
    while first < len(blocks):
        x = checkpoint(lambda x: plain(blocks[first : first + k], x), x, use_reentrant=False)  # noqa: B023 (again)
        first += k
    return x


def goes_backward_itself(blocks: Any, x: Any, k: int) -> Any:
    x = grouped(blocks, x, k)
    x.sum().backward()
    return x


def rest_is_plain(blocks: Any, x: Any, k: int) -> Any:
    whole = len(blocks) // k * k
    return plain(blocks[whole:], grouped(blocks[:whole], x, k))


def evenly(blocks: Any, x: Any, k: int) -> Any:
    for group in numpy.array_split(blocks, math.ceil(len(blocks) / k)):
        x = grouped(list(group), x, k)
    return x


def popping(blocks: Any, x: Any, k: int) -> Any:
    while blocks:
        x = grouped([blocks.pop(0) for _ in range(min(k, len(blocks)))], x, k)
    return x


def by_pytorch(blocks: Any, x: Any, k: int) -> Any:
    return checkpoint_sequential(
        torch.nn.Sequential(*blocks), math.ceil(len(blocks) / k), x, use_reentrant=False
    )


def lets_x_require(blocks: Any, x: Any, k: int) -> Any:
    return grouped(blocks, x if x.requires_grad else x.requires_grad_(), k, reentrant=True)


IN_GROUPS = Answers(
    right=[grouped, from_the_end, lambda blocks, x, k: by_hand(with_hooks())(blocks, x, k)],
    wrong=[
        (late_binding, "The output is right, but the gradients are not"),
        (past_the_end, "Backward ran something other than forward"),
        (goes_backward_itself, "Backward through your output raised RuntimeError"),
        (plain, "Nothing runs again"),
        (lambda blocks, x, k: grouped(blocks[: len(blocks) // k * k], x, k), "not what the blocks compute"),
        (rest_is_plain, "Every group must, even the last one"),
        (by_pytorch, "`checkpoint_sequential` leaves out"),
        (lets_x_require, "You made x require a gradient"),
        (lambda blocks, x, k: grouped(blocks, x, 1), "you do not keep one checkpoint for each group"),
        (lambda blocks, x, k: grouped(blocks, x.detach().requires_grad_(), k), "No gradient reaches x"),
        (lambda blocks, x, k: grouped(blocks, x, k, preserve=False), "draws other masks than the first"),
        (lambda blocks, x, k: grouped([block.eval() for block in blocks], x, k), "in training mode"),
        (evenly, "in the wrong places"),
        (popping, "Work on a copy"),
        (
            lambda blocks, x, k: grouped(blocks, x, k, reentrant=True),
            "No weight gets a gradient when x requires none",
        ),
        (
            lambda blocks, x, k: by_hand(reentrant())(blocks, x, k),
            "No weight gets a gradient when x requires none",
        ),
    ],
)


def policy(
    worth: Callable[[Any, Any], float] = lambda left, right: 2 * left.shape[-1] / left.itemsize,
    names: str = "mm addmm bmm",
    above: bool = False,
) -> Any:
    def answer(least: float) -> Any:
        def chosen(ctx: Any, op: Any, *args: Any, **_: Any) -> CheckpointPolicy:
            product = op in [getattr(torch.ops.aten, name).default for name in names.split()]
            keep = product and (worth(*args[-2:]) > least if above else worth(*args[-2:]) >= least)
            return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

        return chosen

    return answer


def policy_by_counting(least: float) -> Any:
    """FLOPs and bytes counted out, and the decision as True or False."""

    def chosen(ctx: Any, op: Any, *args: Any, **_: Any) -> bool:
        if op.overloadpacket not in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm):
            return False
        left, right = args[-2:]
        stack = left.shape[0] if left.dim() == 3 else 1
        numbers = stack * left.shape[-2] * right.shape[-1]
        return 2 * numbers * left.shape[-1] >= least * numbers * left.element_size()

    return chosen


def intensity(left: Any, right: Any) -> float:
    rows, inner, columns = left.shape[-2], left.shape[-1], right.shape[-1]
    return 2 * rows * inner * columns / left.itemsize / (rows * inner + inner * columns + rows * columns)


class Prefers:
    def __init__(self, least: float) -> None:
        self.least = least

    def __call__(self, ctx: Any, op: Any, *args: Any, **_: Any) -> CheckpointPolicy:
        if "mm" in op.name() and args[-1].shape[-2] * 2 / args[-1].dtype.itemsize >= self.least:
            return CheckpointPolicy.PREFER_SAVE
        return CheckpointPolicy.MUST_RECOMPUTE


def whatever_multiplies(least: float) -> Any:
    """Asks for two matrices, and not for the operator."""

    def chosen(ctx: Any, op: Any, *args: Any, **_: Any) -> CheckpointPolicy:
        both = [one for one in args if isinstance(one, torch.Tensor) and one.dim() > 1]
        keep = len(both) == 2 and 2 * both[0].shape[-1] / both[0].itemsize >= least
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return chosen


class OfAll:
    """The newest policy decides for all."""

    least = 0.0

    def __init__(self, least: float) -> None:
        OfAll.least = least

    def __call__(self, *given: Any, **named: Any) -> CheckpointPolicy:
        return policy()(OfAll.least)(*given, **named)


def in_the_first_run_alone(least: float) -> Any:
    def chosen(ctx: Any, *given: Any, **named: Any) -> CheckpointPolicy:
        return (
            CheckpointPolicy.PREFER_RECOMPUTE if ctx.is_recompute else policy()(least)(ctx, *given, **named)
        )

    return chosen


WORTH = Answers(
    right=[policy(), policy_by_counting, lambda least: Prefers(least)],
    wrong=[
        (policy(lambda left, right: 2 * left.shape[-1]), "Compare FLOPs per *byte*"),
        (policy(lambda left, right: left.shape[-1] / left.itemsize), "You count half the FLOPs"),
        (policy(lambda left, right: 2 * right.shape[-1] / left.itemsize), "the result's columns"),
        (policy(lambda left, right: left.shape[-1] / 2), "Ask the tensor"),
        (
            policy(lambda left, right: 2 * left.shape[1] / left.itemsize),
            "In `bmm` the first size is the stack",
        ),
        (policy(intensity), "without those of left and right"),
        (policy(lambda left, right: 2 * left.shape[-1] / left.itemsize + 0.25), "You keep some products"),
        (policy(above=True), "*At least* includes the bound"),
        (policy(lambda left, right: 10**9), "You keep every product"),
        (policy(names=""), "Nothing is kept"),
        (lambda least: lambda ctx, op, *args, **named: None, "What does your policy return?"),
        (policy(names="mm"), "You keep some products"),
        (policy(names="mm addmm"), "they come as `bmm`"),
        (policy(names="mm bmm"), "it comes as `addmm`"),
        (policy(lambda left, right: 2 * left.shape[0] / left.itemsize), "You keep some products"),
        (
            lambda least: lambda ctx, op, *args, **named: bool(args[0].nothing),
            "With your policy, the network raised",
        ),
        (lambda least: None, "your function returned nothing"),
        (
            lambda least: lambda ctx, op, *args: policy()(least)(ctx, op, *args),
            "a change of format with `dtype=…`",
        ),
        (whatever_multiplies, "You keep some products"),
        (policy(lambda left, right: 2 * left.shape[-1] // left.itemsize), "You keep some products"),
        (OfAll, "With two in use"),
        (in_the_first_run_alone, "In the second run"),
    ],
)


def state_of(x: Any) -> tuple[Any, ...]:
    kind = x.device.type
    on_gpu = torch.cuda.get_rng_state(x.device) if x.is_cuda else None
    return torch.get_rng_state(), on_gpu, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)


@contextmanager
def restored(
    x: Any,
    state: Any,
    cpu: bool = True,
    gpu: bool = True,
    autocast: bool = True,
    put_back: bool = True,
    only_if_on: bool = False,
) -> Any:
    on_cpu, on_gpu, dtype, enabled = state
    devices = [x.device] if x.is_cuda else []
    with ExitStack() as stack:
        if put_back:
            stack.enter_context(torch.random.fork_rng(devices))
        if autocast and (enabled or not only_if_on):
            stack.enter_context(torch.autocast(x.device.type, dtype, enabled))
        if cpu:
            torch.set_rng_state(on_cpu)
        if gpu and x.is_cuda:
            torch.cuda.set_rng_state(on_gpu, x.device)
        yield


def reentrant(detach: bool = True, accumulate: bool = True, ids: bool = False, **restore: bool) -> Any:
    """An answer with a Function of one's own, as the lesson begins it; some parts of it left out."""

    class Again(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, function: Any, *inputs: Any) -> Any:
            ctx.function = function
            ctx.state = state_of(inputs[0])
            ctx.save_for_backward(*inputs)
            return function(*inputs)

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            inputs = list(ctx.saved_tensors)
            if detach:
                inputs = [x.detach().requires_grad_(ids or x.requires_grad) for x in inputs]
            for x in inputs if not detach else ():
                if x.requires_grad:
                    x.retain_grad()
            with torch.enable_grad(), restored(inputs[0], ctx.state, **restore):
                y = ctx.function(*inputs)
            if accumulate:
                y.backward(*gradients)
                return None, *[x.grad if x.requires_grad else None for x in inputs]
            wanted = [x for x in inputs if x.requires_grad]
            found = iter(torch.autograd.grad(y, wanted, *gradients))
            return None, *[next(found) if x.requires_grad else None for x in inputs]

    return Again.apply


def own_device_alone(function: Any, *inputs: Any) -> Any:
    """Restores the CPU's state where inputs are there, and the GPU's where they are on a GPU."""
    return reentrant(cpu=not inputs[0].is_cuda)(function, *inputs)


def with_hooks(again_each_time: bool = False, graph: bool = True) -> Any:
    """An answer with placeholders, as PyTorch's own without a second entry into autograd."""

    def answer(function: Any, *inputs: Any) -> Any:
        state = state_of(inputs[0])
        numbers = count()
        made = {}

        def unpack(number: int) -> Any:
            if again_each_time or number not in made:
                kept: list[Any] = []
                hooks = saved_tensors_hooks(
                    lambda tensor: kept.append(tensor.detach()), lambda nothing: nothing
                )
                with restored(inputs[0], state), torch.set_grad_enabled(graph), hooks:
                    function(*inputs)
                if not kept:
                    return kept[number]
                made.update(enumerate(kept))
            return made.pop(number)

        with saved_tensors_hooks(lambda tensor: next(numbers), unpack):
            return function(*inputs)

    return answer


def with_all_devices(function: Any, *inputs: Any) -> Any:
    """PyTorch's helpers for states, and those of all GPUs; inputs that need no gradient stay outside."""
    kind = inputs[0].device.type
    on_cpu = torch.get_rng_state()
    devices = get_device_states(*inputs)
    options = {"dtype": torch.get_autocast_dtype(kind), "enabled": torch.is_autocast_enabled(kind)}

    class Again(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            ctx.save_for_backward(*inputs)
            with torch.no_grad():
                return function(*inputs)

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            now = torch.get_rng_state(), torch.cuda.get_rng_state_all() if devices[0] else None
            torch.set_rng_state(on_cpu)
            set_device_states(*devices, device_type=kind)
            with torch.enable_grad(), torch.autocast(kind, **options):
                detached = [x.detach().requires_grad_(x.requires_grad) for x in ctx.saved_tensors]
                y = function(*detached)
            torch.set_rng_state(now[0])
            if now[1]:
                torch.cuda.set_rng_state_all(now[1])
            torch.autograd.backward(y, *gradients)
            return tuple(x.grad for x in detached)

    return Again.apply(*inputs)


def seeding(fork: bool) -> Any:
    """The same seed for both runs, and so for every checkpoint."""

    def answer(function: Any, *inputs: Any) -> Any:
        def seeded(*inputs: Any) -> Any:
            with torch.random.fork_rng([]) if fork else nullcontext():
                torch.manual_seed(3)
                return function(*inputs)

        return with_hooks()(seeded, *inputs)

    return answer


def with_a_graph(function: Any, *inputs: Any) -> Any:
    with torch.enable_grad():
        return with_hooks()(function, *inputs)


def requiring(function: Any, *inputs: Any) -> Any:
    return reentrant()(function, *[x.requires_grad_() if x.is_floating_point() else x for x in inputs])


def keeping_all(function: Any, *inputs: Any) -> Any:
    """Runs again, and throws that away for what the first run has left."""
    kept = []

    def unpack(number: int) -> Any:
        if number == 0:
            with torch.no_grad():
                function(*inputs)
        return kept[number]

    def pack(tensor: Any) -> int:
        kept.append(tensor)
        return len(kept) - 1

    with saved_tensors_hooks(pack, unpack):
        return function(*inputs)


def always_autocast(way: Any) -> Any:
    """The second run is under autocast even where the first was not."""

    def answer(function: Any, *inputs: Any) -> Any:
        first = iter([True])

        def run(*inputs: Any) -> Any:
            dtype = torch.get_autocast_dtype(inputs[0].device.type)
            with nullcontext() if next(first, False) else torch.autocast(inputs[0].device.type, dtype):
                return function(*inputs)

        return way(run, *inputs)

    return answer


class Graphless(torch.autograd.Function):
    """Forgets that gradients are off in backward."""

    @staticmethod
    def forward(ctx: Any, function: Any, *inputs: Any) -> Any:
        ctx.function = function
        ctx.save_for_backward(*inputs)
        return function(*inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        inputs = [x.detach().requires_grad_(x.requires_grad) for x in ctx.saved_tensors]
        ctx.function(*inputs).backward(*gradients)
        return None, *[x.grad for x in inputs]


class ForOneInput(Graphless):
    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        inputs = [x.detach().requires_grad_(x.requires_grad) for x in ctx.saved_tensors]
        with torch.enable_grad():
            ctx.function(*inputs).backward(*gradients)
        return None, inputs[1].grad


def with_copies(function: Any, *inputs: Any) -> Any:
    return with_hooks()(function, *[x.clone() for x in inputs])


def letting_all_require(function: Any, *inputs: Any) -> Any:
    """Changes its caller's inputs when the function runs again."""
    first = []

    def run(*again: Any) -> Any:
        for x in inputs if first else ():
            if x.is_floating_point() and x.is_leaf:
                x.requires_grad_()
        first.append(1)
        return function(*again)

    return reentrant()(run, *inputs)


KEPT: list[Any] = []


def keeping_without_a_graph(function: Any, *inputs: Any) -> Any:
    if not torch.is_grad_enabled():
        KEPT.append([x.clone() for x in inputs])
    return with_hooks()(function, *inputs)


def twice_without_gradients(function: Any, *inputs: Any) -> Any:
    if not torch.is_grad_enabled():
        function(*inputs)
    return with_hooks()(function, *inputs)


OWN_CHECKPOINT = Answers(
    right=[with_hooks(), reentrant(), with_all_devices],
    wrong=[
        (lambda function, *inputs: function(*inputs), "Backward never runs the function again"),
        (
            lambda function, *inputs: checkpoint(function, *inputs, use_reentrant=False),
            "That is PyTorch's checkpoint",
        ),
        (lambda function, *inputs: function(*inputs) + 1, "The output is not what the function returns"),
        (
            lambda function, *inputs: with_hooks()(function, *[x.detach() for x in inputs]),
            "No gradient reaches x",
        ),
        (reentrant(accumulate=False), "A weight that the function uses gets no gradient"),
        (reentrant(detach=False), "continues into the operations that made the inputs"),
        (reentrant(ids=True), "Token ids are whole numbers"),
        (ForOneInput.apply, "one item per argument of its forward"),
        (Graphless.apply, "The second run has no graph"),
        (with_hooks(again_each_time=True), "runs more than twice"),
        (keeping_all, "You keep more than the inputs"),
        (reentrant(cpu=False, gpu=False), "the second run draws other masks"),
        (seeding(fork=True), "The output is not what the function returns"),
        (seeding(fork=False), "your caller gets other random numbers"),
        (reentrant(put_back=False), "your caller gets other random numbers"),
        (reentrant(autocast=False), "The second run has another autocast than the first"),
        (always_autocast(with_hooks()), "Was it on in the first run"),
        (always_autocast(reentrant()), "Was it on in the first run"),
        (requiring, "You make an input of your caller require a gradient"),
        (with_a_graph, "Under no_grad, run the function once, and make no graph"),
        (twice_without_gradients, "Under no_grad, run the function once"),
        (reentrant(gpu=False), "A GPU has random numbers of its own"),
        (own_device_alone, "the second run draws other numbers on the CPU"),
        (with_hooks(graph=False), "Do you turn it on"),
        (with_copies, "You keep copies of the inputs"),
        (reentrant(only_if_on=True), "Was it on in the first run"),
        (letting_all_require, "In backward you make an input"),
        (keeping_without_a_graph, "Under no_grad you keep something"),
    ],
)


ANSWERS = {"06.1": MLP, "06.2": IN_GROUPS, "06.3": WORTH, "06.4": OWN_CHECKPOINT}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("way", OWN_CHECKPOINT.right)
def test_a_checkpoint_of_ones_own_gives_the_same_gradients_on_a_gpu(way: Any) -> None:
    found = []
    for run in (lambda block, x: block(x), way):
        torch.manual_seed(0)
        block = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Dropout(0.5)).cuda()
        x = torch.randn(32, 64, device="cuda", requires_grad=True)
        with torch.autocast("cuda", torch.bfloat16):
            y = run(block, x)
        y.float().square().sum().backward()
        found.append([x.grad, *(weight.grad for weight in block.parameters())])
    assert all(torch.equal(mine, other) for mine, other in zip(*found, strict=True))


class TestAnswers(JudgedAnswers):
    answers = ANSWERS
