"""Checks of lesson 07, "torch.compile": each names the misconception, never the answer."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from math import isqrt
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from ...interactive.feedback import call, entries, exercise, expect, fail
from ..shared.judging import same, seeded, told

BACKEND = "aot_eager_decomp_partition"
"""Makes the compiler's decisions and no code: it needs no GPU and no C++ compiler."""


class Ran(NamedTuple):
    """One forward and backward: output, gradients of inputs and weights, bytes that autograd was given."""

    output: torch.Tensor
    gradients: list[torch.Tensor | None]
    kept: int


def run(
    function: Callable[..., Any], inputs: Sequence[torch.Tensor], weights: Iterable[nn.Parameter] = ()
) -> Ran:
    """Run function(*inputs) and backward. No mode may be on where Dynamo traces, so that hooks count here."""
    leaves = [tensor.detach().clone().requires_grad_(tensor.is_floating_point()) for tensor in inputs]
    weights = list(weights)
    for weight in weights:
        weight.grad = None
    own = {weight.untyped_storage() for weight in weights}
    kept: dict[torch.UntypedStorage, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage() not in own:
            kept[tensor.untyped_storage()] = tensor.untyped_storage().nbytes()
        return tensor.detach()

    with seeded(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = function(*leaves)
    cut = "No gradient can flow from your output: something cuts the graph (`detach`, `no_grad`, `.data`)."
    expect(isinstance(output, torch.Tensor) and output.requires_grad, cut)
    with told("Backward through your output raised"):
        output.backward(torch.ones_like(output))
    return Ran(output.detach(), [tensor.grad for tensor in (*leaves, *weights)], sum(kept.values()))


def run_compiled(function: Callable[..., torch.Tensor], inputs: Sequence[torch.Tensor]) -> Ran:
    """Act as `run`, with the function compiled anew."""
    torch.compiler.reset()
    return run(torch.compile(function, backend=BACKEND), inputs)


# --------------------------------------------------------------------------------------------------
# 07.1: expressions

EXPRESSIONS: dict[str, Callable[..., torch.Tensor]] = {
    "exp(x) + sin(x)": lambda x, y: torch.exp(x) + torch.sin(x),
    "exp(sin(x)) * y": lambda x, y: torch.exp(torch.sin(x)) * y,
    "sin(x + y) * cos(x + y)": lambda x, y: torch.sin(x + y) * torch.cos(x + y),
    "dropout(gelu(x)) * y": lambda x, y: F.dropout(F.gelu(x)) * y,
    "gelu(x @ y)": lambda x, y: F.gelu(x @ y),
}
# bytes per number that a mistaken answer gives, and what is said of it
MISCOUNTED = (
    ("exp(x) + sin(x)", 4, "both need x or what comes from x. From how many tensors can both be computed?"),
    ("exp(sin(x)) * y", 6, "that is what autograd keeps. Which of these can be computed from x again?"),
    ("sin(x + y) * cos(x + y)", 8, "that is what autograd keeps."),
    ("sin(x + y) * cos(x + y)", 4, "two tensors are enough, but is there a place where one is?"),
    ("dropout(gelu(x)) * y", 4, "can backward draw the same random numbers again?"),
    ("dropout(gelu(x)) * y", 6, "how many bytes does a mask take for each number?"),
    ("dropout(gelu(x)) * y", 8, "that is what autograd keeps. GELU can be computed again."),
    ("gelu(x @ y)", 4, "from x and y alone, the matrix product would have to run again."),
    ("gelu(x @ y)", 2, "a matrix product keeps both of its factors."),
)


@exercise("07.1", "The compiler keeps exactly what you said, for every expression.")
def expressions(answer: Any) -> None:
    """`answer(n)` is a dictionary: bytes kept for each of EXPRESSIONS; x and y are n bf16 numbers."""
    for n in (1024, 4096):
        got = entries(call(answer, n=n, returns=Mapping), tuple(EXPRESSIONS))
        shape = (isqrt(n), isqrt(n))
        inputs = [torch.ones(shape, dtype=torch.bfloat16) for _ in range(2)]
        for name, size, message in MISCOUNTED:
            expect(got[name] != size * n, f"{name}: {message}")
        for name, function in EXPRESSIONS.items():
            wanted = run_compiled(function, inputs).kept
            expect(2 * got[name] != wanted, f"{name}: return bytes, not numbers. A bf16 number takes two.")
            off = f"{name} is off. From which tensors can backward compute all the rest, without a product?"
            expect(got[name] == wanted, off)


# --------------------------------------------------------------------------------------------------
# 07.2: one graph


def soft_clip(x: torch.Tensor, limit: float) -> torch.Tensor:
    """The function of the exercise, in which Python looks at a value."""
    wide = torch.tanh(x / limit) * limit
    if wide.abs().max() > limit / 2:
        wide = wide * 0.5
    return wide * torch.sigmoid(x)


@exercise("07.2", "One graph for both cases, and backward needs nothing but x.")
def one_graph(answer: Any) -> None:
    """`answer(x, limit)` gives what `soft_clip` gives, in one graph."""
    small, large = torch.linspace(-0.1, 0.1, 64).view(8, 8), torch.linspace(-4, 4, 64).view(8, 8)
    for which, values in {"below the limit": small, "above the limit": large}.items():
        right = run(partial(soft_clip, limit=2.0), [values])
        got = run(partial(call, answer, limit=2.0, returns=torch.Tensor), [values])
        halved = "Halve `wide` only where its largest value is above half of the limit."
        expect(same([got.output], [right.output]), f"The result is off {which}. {halved}")
        expect(same(got.gradients, right.gradients), f"The result is right {which}, the gradient is not.")
    found = torch._dynamo.explain(partial(answer, limit=2.0))(large.clone().requires_grad_())
    looks = "Something still looks at a value in Python: `if`, `.item()`, `float(…)`, `print`."
    expect(found.graph_break_count == 0, f"The compiler finds {found.graph_count} graphs. {looks}")
    kept = run_compiled(partial(answer, limit=2.0), [large]).kept
    expect(kept <= large.nbytes + 64, "It is one graph, but keeps more than x for backward.")


# --------------------------------------------------------------------------------------------------
# 07.3: the fastest choice that fits

FRONTS: tuple[dict[str, tuple[int, float]], ...] = (
    {"eager": (16, 74.0), "compiled": (9, 38.0), "again": (4, 44.0), "budget": (7, 39.0)},
    {"budget 0.5": (6, 44.0), "budget 0.4": (7, 42.0), "budget 0.0": (9, 49.0)},
    {"only": (5, 10.0)},
)


@exercise("07.3", "The fastest that fits, and no name where nothing does.")
def choose(answer: Any) -> None:
    """`answer(front, room)` is the name of the fastest choice whose peak is at most `room`, or None."""
    for front in FRONTS:
        for room in (3, 4, 5, 6, 7, 9, 20):
            fits = {name: ms for name, (peak, ms) in front.items() if peak <= room}
            wanted = min(fits, key=fits.__getitem__) if fits else None
            got = call(answer, dict(front), room, returns=str | None)
            nothing = f"With a room of {room} nothing of {front} fits: return None."
            expect(wanted is not None or got is None, nothing)
            expect(wanted is None or got is not None, f"With a room of {room} something of {front} fits.")
            if got == wanted:
                continue
            expect(got in front, f"The front has no choice {got!r}.")
            expect(front[got][0] <= room, f"{got!r} takes more than the room of {room}.")
            smallest = min(front, key=lambda name: front[name][0])
            expect(got != smallest, "You take the smallest peak. Which one is fastest?")
            fail(f"With a room of {room} there is a faster one than {got!r} in {front}.")


# --------------------------------------------------------------------------------------------------
# 07.4: the peak of a wrapper

WRAPPERS: dict[str, tuple[str, int]] = {
    "two buffers, one freed": (
        """buf0 = empty_strided_cuda((512, 1024), (1024, 1), torch.float32)
extern_kernels.mm(primals_1, primals_2, out=buf0)
buf1 = empty_strided_cuda((512, 1024), (1024, 1), torch.float32)
triton_poi_fused_gelu_0.run(buf0, buf1, 524288, stream=stream0)
del buf0
buf2 = empty_strided_cuda((512, 256), (256, 1), torch.float32)
extern_kernels.mm(buf1, primals_3, out=buf2)
return (buf2, buf1, )""",
        2 * 4 * 512 * 1024,
    ),
    "a buffer that is used again": (
        """buf0 = empty_strided_cuda((64, 128), (128, 1), torch.bfloat16)
extern_kernels.mm(primals_1, primals_2, out=buf0)
buf1 = buf0; del buf0  # reuse
triton_poi_fused_relu_0.run(buf1, 8192, stream=stream0)
buf2 = empty_strided_cuda((64, 128), (128, 1), torch.bool)
triton_poi_fused_relu_1.run(buf1, buf2, 8192, stream=stream0)
del buf1
buf3 = empty_strided_cuda((64, ), (1, ), torch.float32)
return (buf2, buf3, )""",
        2 * 64 * 128 + 64 * 128,
    ),
    "inputs that are deleted": (
        """primals_1, primals_2 = args
buf0 = empty_strided_cuda((32, 32), (32, 1), torch.float32)
extern_kernels.mm(primals_1, primals_2, out=buf0)
del primals_1
del primals_2
buf1 = empty_strided_cuda((8, 32, 32), (1024, 32, 1), torch.float32)
triton_poi_fused_0.run(buf0, buf1, 8192, stream=stream0)
return (buf1, )""",
        4 * 1024 + 4 * 8 * 1024,
    ),
}


@exercise("07.4", "You read a wrapper as the allocator does.")
def wrapper_peak(answer: Any) -> None:
    """`answer(code)` is the most bytes that a wrapper's buffers take at once; its inputs do not count."""
    for what, (code, wanted) in WRAPPERS.items():
        got = call(answer, code, returns=int)
        sizes = _sizes(code)
        reused = "`buf1 = buf0; del buf0  # reuse` gives the same memory another name: nothing is freed."
        not_renamed = _peak(code.replace("  # reuse", ""), BYTES)
        expect(got != not_renamed or got == wanted, f"{what}: it is off. {reused}")
        together = "You add up all buffers. Which of them exist at the same time?"
        expect(got != sum(sizes) or got == wanted, f"{what}: {together}")
        expect(got != max(sizes) or got == wanted, f"{what}: that is the largest buffer alone.")
        formats = "How many bytes has a number of torch.bfloat16, of torch.bool?"
        expect(got != _peak(code, {}) or got == wanted, f"{what}: {formats}")
        expect(got == wanted, f"{what}: it is off. Go through it line by line, with a set of live buffers.")


BYTES = {"torch.float32": 4, "torch.bfloat16": 2, "torch.bool": 1}


def _made(code: str, sizes: Mapping[str, int]) -> Sequence[tuple[str, int]]:
    """Name and bytes of each buffer that the code allocates; a format that `sizes` lacks counts 4."""
    found = []
    for line in code.splitlines():
        if "empty_strided_cuda(" in line:
            name, _, made = line.partition(" = ")
            shape = made.partition("((")[2].partition(")")[0]
            numbers = 1
            for each in shape.split(","):
                numbers *= int(each) if each.strip() else 1
            found.append((name, numbers * sizes.get(made.rpartition(" ")[2].rstrip(")"), 4)))
    return found


def _sizes(code: str) -> list[int]:
    return [size for _, size in _made(code, BYTES)]


def _peak(code: str, sizes: Mapping[str, int]) -> int:
    """The most bytes at once, line by line."""
    made = dict(_made(code, sizes))
    live: dict[str, int] = {}
    most = 0
    for line in code.splitlines():
        name = line.partition(" = ")[0]
        if name in made:
            live[name] = made[name]
        elif line.endswith("# reuse"):
            live[name] = live.pop(line.partition(" = ")[2].partition(";")[0])
        elif line.startswith("del "):
            live.pop(line.removeprefix("del "), None)
        most = max(most, sum(live.values()))
    return most


# --------------------------------------------------------------------------------------------------
# 07.5: compile the loss


def eager_loss(head: nn.Linear, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The loss of the exercise: logits in 16 bits, cross-entropy in fp32."""
    return F.cross_entropy(head(x).float(), targets)


@exercise("07.5", "The same loss and gradients, and no fp32 logits are kept.")
def compiled_loss(answer: Any) -> None:
    """`answer(backend)` gives a compiled function of head, x (tokens, h) and targets: the mean loss."""
    torch.compiler.reset()
    compiles: list[int] = []

    def counting(module: Any, inputs: Any) -> Any:
        compiles.append(1)
        return torch._dynamo.lookup_backend(BACKEND)(module, inputs)

    loss = call(answer, backend=counting, returns=object)
    with seeded():
        head = nn.Linear(16, 1000, bias=False).to(torch.bfloat16)
        x = torch.randn(64, 16, dtype=torch.bfloat16)
        targets = torch.randint(1000, (64,))
    right = run(lambda x: eager_loss(head, x, targets), [x], head.parameters())
    got = run(lambda x: loss(head, x, targets), [x], head.parameters())
    expect(compiles, "Nothing was compiled with the backend that you were given.")
    half = "Is the cross-entropy in fp32, and the mean over all tokens?"
    expect(got.output.dtype == torch.float32, f"The loss is {got.output.dtype}. {half}")
    expect(same([got.output], [right.output], 1e-3), f"The loss is off. {half}")
    expect(same(got.gradients, right.gradients, 1e-2), "The loss is right, but a gradient is not.")
    logits = 64 * 1000
    outside = "Is the head compiled together with the loss? Alone, the loss keeps what the head hands it."
    expect(got.kept < 3 * logits, f"It keeps {got.kept / logits:.1f} bytes per logit. {outside}")
