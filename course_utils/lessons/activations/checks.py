"""Checks of lesson 05, "What does each operation keep?": each names the misconception."""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from numbers import Real
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ... import SimulationUnavailable, StepError
from ...interactive.feedback import Mistakes, call, entries, exercise, expect, fail, of_kind, recognized
from ...interactive.saved_tensors import saved_by
from ...watching.on_gpu import on_new_gpu
from ..shared.judging import counted, forward_backward, same, seeded

# --------------------------------------------------------------------------------------------------
# 05.1: expressions

# those that the lesson has not shown, of two tensors of one shape
EXPRESSIONS: dict[str, Callable[..., torch.Tensor]] = {
    "tanh(x + y)": lambda x, y: torch.tanh(x + y),
    "relu(x) ** 2": lambda x, y: torch.relu(x) ** 2,
    "x * sigmoid(x)": lambda x, y: x * torch.sigmoid(x),
    "exp(x) + sin(x)": lambda x, y: torch.exp(x) + torch.sin(x),
    "sigmoid(x) / 3 + y": lambda x, y: torch.sigmoid(x) / 3 + y,
}
# how many tensors of n numbers a mistaken answer counts, and what is said of it
MISCOUNTED = (
    ("tanh(x + y)", 3, "an addition needs neither of its terms. What does tanh need?"),
    ("relu(x) ** 2", 2, "ReLU keeps its output, the square its input. How many storages are these two?"),
    ("x * sigmoid(x)", 3, "sigmoid keeps its output, which the product needs, too. It is stored once."),
    ("x * sigmoid(x)", 1, "a product of two activations needs both factors."),
    ("exp(x) + sin(x)", 1, "sin's derivative is cos(x), which its output does not determine."),
    ("sigmoid(x) / 3 + y", 2, "a division by a number keeps nothing. Neither does an addition."),
)


@exercise("05.1", "Autograd keeps exactly what you said, for every expression.")
def expressions(answer: Any) -> None:
    """`answer(n)` is a dictionary: bytes kept for each of EXPRESSIONS; x and y are n bf16 numbers."""
    small, large = (entries(call(answer, n=n, returns=Mapping), tuple(EXPRESSIONS)) for n in (1024, 4096))
    expect(small != large, "Your bytes are the same for every n. Do you use the argument?")
    for n, got in {1024: small, 4096: large}.items():
        kept = {name: saved_by(work, (n,), (n,), dtype="bf16") for name, work in EXPRESSIONS.items()}
        wanted = {name: sum(item.bytes for item in items) for name, items in kept.items()}
        numbers = "Return bytes, not numbers. A bf16 number takes two."
        expect(any(2 * got[name] != wanted[name] for name in wanted), numbers)
        twice = "All are twice too large. How many bytes has a bf16 number? (`saved_by` defaults to fp32.)"
        expect(any(got[name] != 2 * wanted[name] for name in wanted), twice)
        for name, tensors, message in MISCOUNTED:
            expect(got[name] != tensors * 2 * n, f"{name}: {message}")
        for name in wanted:
            off = f"{name} is off. Go through its operations one by one, then count each storage once."
            expect(got[name] == wanted[name], off)


# --------------------------------------------------------------------------------------------------
# 05.2: kept_by_module


class Heads(nn.Module):
    """Attention of one head, computed in its own forward: it keeps views of what `qkv` made."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.register_buffer("scale", torch.linspace(1, 2, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return (q * self.scale @ k.mT).softmax(-1) @ v


class Gated(nn.Module):
    """Two operations use one tensor: SiLU its input, and the product its factor."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 32)
        self.act = nn.SiLU()
        self.down = nn.Linear(32, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = self.up(x)
        return self.down(self.act(wide) * wide)


def kept_cases() -> dict[str, tuple[nn.Module, dict[str, int]]]:
    """Modules to ask, by what a message calls them, and the fp32 numbers per token that each name keeps."""
    nested = nn.Sequential(OrderedDict[str, nn.Module](heads=Heads(), mlp=Gated()))
    # of `heads`: qkv's output, scaled q, the scores of five tokens
    kept = {"heads": 24 + 8 + 5, "mlp.up": 8, "mlp.act": 32, "mlp": 32, "mlp.down": 32}
    layer = nn.Linear(8, 8)
    return {
        "attention and an MLP": (nested, kept),
        "one layer used twice": (nn.Sequential(layer, nn.ReLU(inplace=True), layer), {"1": 8}),
        "a model that computes between its children": (Gated(), {"act": 32, "": 32, "down": 32}),
    }


@exercise("05.2", "Every storage counts once, under the name of the module that kept it.")
def kept_by_module(answer: Any) -> None:
    """`answer(model, x)` is a dictionary from names of modules to the bytes that their forward keeps."""
    for what, (model, wanted) in kept_cases().items():
        found = call(answer, model, torch.randn(2, 5, 8, requires_grad=True), returns=Mapping)
        names = [name for name, _ in model.named_modules()]
        for name in found:
            expect(name in names, f"With {what}, {name!r} is not a name of `named_modules()`.")
        sizes = {name: of_kind(size, int, f"With {what}, {name!r} is") for name, size in found.items()}
        got = {name: sizes.get(name, 0) / (4 * 2 * 5) for name in names}
        if "heads" in names:
            _expect_no_mistake(got)
        off = [name for name in names if got[name] != wanted.get(name, 0)]
        names_only = "the sum is right, names are not. Which module runs when a storage is first kept?"
        expect(not off or sum(got.values()) != sum(wanted.values()), f"With {what}, {names_only}")
        for name in off:
            much = "too much. Does a storage count twice, or one from before?"
            expect(got[name] < wanted.get(name, 0), f"With {what}, {name!r} has {much}")
            fail(f"With {what}, {name!r} has too little. What is saved first while its own forward runs?")


def _expect_no_mistake(got: Mapping[str, float]) -> None:
    """Raise CheckFailed for a known mistake in numbers per token of the model with attention and an MLP."""
    existing = "You count x or parameters, too. A transposed view still has the parameter's storage."
    expect(not got["heads.qkv"], existing)
    nothing = "The outermost module keeps nothing itself. Give a storage to the innermost one that runs."
    expect(not got[""], nothing)
    twice = "You count some storages more than once: two operations may keep one storage."
    expect((got["mlp.act"], got["mlp"]) != (32, 32 + 32), twice)
    view = "You count the bytes of a view. It keeps its complete storage in memory."
    expect(got["heads"] != 8 + 8 + 5, view)
    buffer = "You count a buffer. It persists anyway, like a parameter."
    expect(got["heads"] != 24 + 8 + 5 + 8 / (2 * 5), buffer)


# --------------------------------------------------------------------------------------------------
# 05.3: lean

# in training or not, and what is asked if the output or a gradient is off
LEAN_CASES = {
    "With `block.eval()`": (
        False,
        "Is the norm complete (weight, bias, eps)? Is it SiLU, is x added, nothing dropped?",
        "Does x reach the output by both paths?",
    ),
    "In training": (
        True,
        "Does it drop what the block drops, at its rate, only in training?",
        "Does the second forward drop the same?",
    ),
}


class Wasteful(nn.Module):
    """x + W3·dropout(SiLU(n·W1) · n·W2), n being LayerNorm of x: right, and it keeps too much."""

    def __init__(self, h: int, ffn: int, rate: float = 0.1) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(h)
        self.rate = rate
        self.log: list[Any] = []
        self.gate = nn.Linear(h, ffn, bias=False)
        self.up = nn.Linear(h, ffn, bias=False)
        self.down = nn.Linear(ffn, h, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        centered = x - x.mean(-1, keepdim=True)
        normal = centered / (centered.square().mean(-1, keepdim=True) + self.norm.eps).sqrt()
        normal = self.norm.weight * normal + self.norm.bias
        gate = self.gate(normal)
        up = self.up(normal)
        y = self.down(F.dropout(gate * torch.sigmoid(gate) * up, self.rate, self.training))
        self.log.append(y.abs().mean())
        return x + y


@exercise(
    "05.3", "Same output, gradients and log, each product once, and nothing kept that is cheap to compute."
)
def lean(answer: Any) -> None:
    """`answer(block, x)` is what `block(x)` is, and keeps 2·h + 3·ffn numbers per token."""
    tokens, h, ffn = 200, 16, 256
    # fp32 numbers, a norm's statistics per token, and one state of the CPU's random numbers
    allowed = tokens * (4 * (2 * h + 3 * ffn) + 4 * 8) + 5056
    for what, (training, which, why) in LEAN_CASES.items():
        with seeded():
            block = Wasteful(h, ffn, 0.3).train(training)
            x = torch.randn(tokens, h) + 1
            block.norm.eps = 1e-2
            nn.init.normal_(block.norm.weight)
            nn.init.normal_(block.norm.bias)
        wanted, least = counted(block, [x], block.parameters())
        logged = block.log[0].item()
        block.log = [0.5]
        got, work = counted(partial(call, answer, block, returns=torch.Tensor), [x], block.parameters())
        expect(same([got.output], [wanted.output], 1e-4), f"{what}, the output differs. {which}")
        off = f"{what}, the output is right, but a gradient is not. {why} Do you keep everything in fp32?"
        expect(same(got.gradients, wanted.gradients, 1e-3), off)
        _expect_one_logged(block.log, logged)
        expect(work <= least, "A matrix product runs a second time. Run only cheap operations again.")
        wide = "You keep one wide tensor too many. What can you compute again from gate and up?"
        expect(got.kept < allowed + 4 * tokens * ffn / 2, wide)
        besides = "You keep too much besides the wide tensors. The norm's tensors, or copies of weights?"
        expect(got.kept <= allowed, besides)


def _expect_one_logged(log: list[Any], wanted: float) -> None:
    """Raise CheckFailed unless a step has appended `wanted` alone to a log that had one entry of 0.5."""
    expect(log[:1] == [0.5], "The old entries of `block.log` are gone. Append to it.")
    expect(len(log) == 2, f"A step must log one number. Yours logs {len(log) - 1}.")
    graph = "Your log holds a graph, and everything that the graph keeps. A number is enough."
    expect(not getattr(log[1], "requires_grad", False), graph)
    number = of_kind(log[1], Real, "Your log's entry is")
    expect(abs(number - wanted) < 1e-4, "You log another number than the block does.")


# --------------------------------------------------------------------------------------------------
# 05.4: LeanLoss


def plain_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of an fp32 copy, as in most code."""
    return F.cross_entropy(logits.float(), targets)


def peaks(loss: Callable[..., torch.Tensor]) -> tuple[float, float]:
    """Bytes per logit at the peaks of forward and backward on a simulated GPU, with the logits' own two."""
    with on_new_gpu(), torch.device("cuda"):
        logits = torch.randn(256, 2**21, dtype=torch.bfloat16, requires_grad=True)
        output = loss(logits, torch.randint(2**21, (256,)))
        forward = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        output.backward()
        return forward / logits.numel(), torch.cuda.max_memory_allocated() / logits.numel()


def _loss_case(
    tokens: int, ignored: Sequence[int] = (), factor: float = 4, vocabulary: int = 9
) -> list[torch.Tensor]:
    with seeded(tokens):
        targets = torch.randint(vocabulary, (tokens,))
        targets[list(ignored)] = -100
        return [(factor * torch.randn(tokens, vocabulary)).bfloat16(), targets]


LOSS_MISTAKES: Mistakes = {
    "Your loss is a sum. Divide it by the number of tokens that count.": (
        lambda logits, targets: F.cross_entropy(logits.float(), targets, reduction="sum")
    ),
    "Your mean is over all tokens. Average only tokens that count.": (
        lambda logits, targets: plain_loss(logits, targets) * (targets >= 0).float().mean()
    ),
    "Is z still unchanged where you look up the target?": (
        lambda logits, targets: plain_loss(logits, targets) + logits.amax(-1)[targets >= 0].float().mean()
    ),
}
LOSS_HINTS = {
    "out of bounds": "A row has no entry -100. Look up another entry for that target, and do not count it."
}


@exercise(
    "05.4", "Loss and gradient are in fp32, with two bytes per logit kept, and at most eight at any moment."
)
def lean_loss(answer: Any) -> None:
    """`answer` is an `autograd.Function` whose `apply(logits, targets)` is the mean loss in fp32."""
    run = getattr(answer, "apply", answer)
    cases = {
        "With 6 tokens": _loss_case(6),
        "With one token": _loss_case(1),
        "With targets that do not count (-100)": _loss_case(7, (0, 3, 4)),
        "With large logits": _loss_case(5, (1,), 300.0),
    }
    for what, case in cases.items():
        _expect_loss_and_gradient(run, what, case)
    _expect_few_bytes(run)


def _expect_loss_and_gradient(run: Any, what: str, case: Sequence[torch.Tensor]) -> None:
    """Raise CheckFailed unless `run` computes the loss of `case` and its gradient as `plain_loss` does."""
    handed: list[torch.Tensor] = []

    def one_number(*given: torch.Tensor) -> torch.Tensor:
        handed.append(given[0].detach())
        loss = call(run, *given, returns=torch.Tensor, hints=LOSS_HINTS)
        several = f"{what}, your loss is not a single number. Return the mean over tokens."
        expect(loss.shape == (), several)
        endless = f"{what}, your loss is {loss.item()}. exp overflows, or you take the log of 0: see hint 3."
        expect(loss.isfinite(), endless)
        return loss

    wanted = forward_backward(plain_loss, case)
    got = forward_backward(one_number, case)
    close = partial(same, tolerance=1e-2)
    recognized([got.output], [case], plain_loss, LOSS_MISTAKES, f"{what}, the loss is wrong.", close)
    exact = got.output.dtype == torch.float32 and same([got.output], [wanted.output], 1e-4)
    expect(exact, f"{what}, the loss is close, but computed in 16 bits. Compute with an fp32 copy.")
    missing = f"{what}, the logits get no gradient. backward must return it first, then None."
    expect(got.gradients[0] is not None, missing)
    opening = f"{what}, the loss is right, but its gradient is not."
    _expect_gradient(got.gradients[0], wanted.gradients[0], case[1] < 0, opening)
    overwrites = f"{what}, backward overwrites the logits. Others may still need them."
    expect(torch.equal(handed[0], case[0]), overwrites)


def _expect_gradient(mine: Any, wanted: Any, ignored: torch.Tensor, opening: str) -> None:
    """Raise CheckFailed unless two gradients are equal, up to 16 bits. Rows that are `ignored` are zero."""
    mine, wanted = mine.double(), wanted.double()
    close = partial(torch.allclose, wanted, rtol=0.01, atol=1e-6)
    if close(mine):
        return
    expect(not mine[ignored].any(), f"{opening} Rows with target -100 must have a gradient of 0.")
    expect(not close(-mine), f"{opening} Its sign is reversed. Do you multiply by the incoming gradient?")
    scaled = mine * (wanted.norm() / mine.norm())
    expect(not close(scaled), f"{opening} It is off by one factor everywhere: the loss is a mean.")
    rounded = f"{opening} It is close, but computed in 16 bits. Compute it from an fp32 copy."
    expect(not same([mine], [wanted], 0.03), rounded)
    fail(f"{opening} It is softmax, minus 1 at the target, over the number of tokens that count.")


def _expect_few_bytes(run: Any) -> None:
    """Raise CheckFailed unless `run` keeps two bytes per logit and never needs more than about eight."""
    number = 64 * 4096
    got = forward_backward(run, _loss_case(64, (5,), vocabulary=4096))
    large = "What you keep is as large as the fp32 copy. What can you recompute from 16 bits?"
    expect(got.kept < 3.9 * number, large)
    expect(got.kept <= 2 * number + 48 * 64, "Besides 16 bits per logit, keep only a few numbers per token.")
    try:
        forward, backward = peaks(run)
    except (StepError, SimulationUnavailable) as error:
        print(f"Traced on the CPU, where temporaries inside an operation do not count: {error}")
        forward, backward = 0.0, got.peak / number
    wide = "at one moment two fp32 tensors of the logits' size exist."
    expect(forward <= 8.5, f"You keep little, but in forward {wide} `logsumexp` makes one inside.")
    again = f"You keep little, but in backward {wide} Which operations can overwrite their input?"
    expect(backward <= 8.5, again)
