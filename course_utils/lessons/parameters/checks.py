"""Checks of lesson 04, "Counting parameters": each names the misconception, never the answer."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

from ...interactive.feedback import call, entries, exercise, expect, fail, recognized
from ..shared.judging import forward_backward, same, seeded

# --------------------------------------------------------------------------------------------------
# 04.1: count


def _with_buffers() -> nn.Module:
    """Two layers of one shape that share a mask, and a buffer that is never saved."""
    network = nn.Sequential(nn.Linear(7, 7), nn.Linear(7, 7))
    mask = torch.ones(16, 16, dtype=torch.bool)
    for layer in network:
        layer.register_buffer("mask", mask)
    network.register_buffer("angles", torch.ones(16, 3), persistent=False)
    return network


def _tied() -> nn.Module:
    network = nn.Sequential(nn.Embedding(100, 8), nn.Linear(8, 100, bias=False))
    network[1].weight = network[0].weight
    return network


def _frozen() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 4), nn.Embedding(16, 8, dtype=torch.bfloat16).requires_grad_(False))


KINDS = ("trained", "frozen", "bytes")
LARGE = partial(nn.Linear, 200_000, 350_000, dtype=torch.bfloat16)
COUNTED: Mapping[Callable[[], nn.Module], tuple[int, int, int]] = {
    nn.ReLU: (0, 0, 0),
    _frozen: (36, 128, 4 * 36 + 2 * 128),
    _with_buffers: (2 * 56, 0, 4 * 2 * 56 + 16 * 16 + 4 * 16 * 3),
    _tied: (800, 0, 4 * 800),
    LARGE: (200_001 * 350_000, 0, 2 * 200_001 * 350_000),
}
COUNT_HINTS = {  # what is said if one of KINDS is off, by the network that shows why
    (_with_buffers, "trained"): "Buffers get no gradient. Two tensors may have one shape.",
    (_with_buffers, "frozen"): "Buffers are not parameters, frozen or not: count only their bytes.",
    (_with_buffers, "bytes"): "Buffers take memory. A state dict leaves out some, and repeats others.",
    (_tied, "trained"): "A parameter with two names is in memory once, with one gradient.",
    (_tied, "bytes"): "You add bytes twice. A tensor with two names is in memory once.",
    (_frozen, "trained"): "You count frozen parameters as trained. Frozen parameters get no gradient.",
    (_frozen, "bytes"): "Do you take 4 bytes per number? Ask each tensor, whether it is frozen or not.",
}
LOADS = "The first check loads torch's rules for tensors without memory, which takes up to ten seconds."


@exercise(
    "04.1",
    "Each tensor once, trained or frozen, to the byte; nothing is allocated, even for 70 billion.",
    first=LOADS,
)
def count(answer: Any) -> None:
    """`answer(build)` is a dictionary: numbers trained and frozen, and the bytes of what `build()` makes."""
    hints = {"StopIteration": "You ask for a first parameter. A network may have no parameters at all."}
    left = "After your function, all tensors are still made on `meta`. Use `with` instead."
    for build, wanted in COUNTED.items():
        got = entries(call(answer, build=partial(_on_meta, build), returns=Mapping, hints=hints), KINDS)
        expect(not torch.empty(0).is_meta, left)
        for kind, number in zip(KINDS, wanted, strict=True):
            off = f"{kind} is off. Do you count the right tensors, each once?"
            expect(got[kind] == number, COUNT_HINTS.get((build, kind), off))


def _on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    made = torch.empty(0)  # a fake tensor says that it is on the CPU, and has no memory either
    allocates = "You let `build` allocate. On which device does a tensor have a shape but no memory?"
    expect(made.is_meta or type(made) is not torch.Tensor, allocates)
    return build()


# --------------------------------------------------------------------------------------------------
# 04.2 and 04.3: modules
Weights = Mapping[str, torch.Tensor]
close = partial(same, tolerance=1e-3)


def _judge(
    answer: Any,
    names: Sequence[str],
    cases: Sequence[Any],
    shapes_of: Callable[..., Mapping[str, tuple[int, ...]]],
    right: Callable[..., torch.Tensor],
    mistakes: Mapping[str, Mapping[str, Any]],
    otherwise: str,
    parts: Mapping[str, str] = {},
) -> list[tuple[nn.Module, torch.Tensor]]:
    """Compare a learner's modules with `right(weights, sizes, x)`; return them with their inputs.

    Each of `cases` is the sizes called `names`, then the shape of the tokens. Raises CheckFailed with the
    first of `mistakes`, options of `right`, that fits; else with the first of `parts` that is wrong even
    while the matrix that it names is zero; else with `otherwise`.
    """
    modules, given, mine, wanted = [], [], [], []
    for *sizes, tokens in cases:
        module, weights = _made(answer, dict(zip(names, sizes, strict=True)), shapes_of(*sizes))
        with seeded():
            x = 0.5 + torch.randn(*tokens, sizes[0])
        modules.append((module, x))
        given.append((weights, sizes, x))
        mine.append(forward_backward(partial(_not_zero, module), [x], weights.values()))
        wanted.append(forward_backward(partial(right, weights, sizes), [x], weights.values()))
        shape = "Your output has another shape than x. (x may be a single token.)"
        expect(mine[-1].output.shape == x.shape, shape)
    wrong = {message: partial(right, **options) for message, options in mistakes.items()}
    if not recognized([ran.output for ran in mine], given, right, wrong, same=close):
        for message, name in parts.items():
            for (module, x), (weights, sizes, _) in zip(modules, given, strict=True):
                zeros = {name: torch.zeros_like(weights[name])}
                alone = functional_call(module, zeros, x)
                expect(close([alone], [right({**weights, **zeros}, sizes, x)]), message)
        fail(otherwise)
    for got, ran, (weights, _, x) in zip(mine, wanted, given, strict=True):
        pairs = zip(got.gradients, (x, *weights.values()), strict=True)
        # an expert that no token chose has no gradient: as good as zeros
        found = [torch.zeros_like(tensor) if one is None else one for one, tensor in pairs]
        cut = "Your output is right, but its gradients are wrong: is the graph cut somewhere?"
        expect(close(found, ran.gradients), cut)
    return modules


def _not_zero(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    output = call(module, x, returns=torch.Tensor)
    expect(output.any(), "Your output is all zeros. (Index 0 is valid, and its `any()` is False.)")
    return output


def _made(answer: Any, sizes: Any, shapes: Mapping[str, tuple[int, ...]]) -> tuple[nn.Module, Weights]:
    """A learner's module of these sizes, and its weights by name: of these shapes, and drawn again."""
    expect(not isinstance(answer, nn.Module), "You hand over a module. Hand over the class itself.")
    module = call(answer, **sizes, returns=nn.Module)
    found = dict(module.named_parameters())
    for name, shape in shapes.items():
        lacks = f"Your module has no parameter {name}. Give its modules the names in the exercise."
        expect(name in found, lacks)
        mine = tuple(found[name].shape)
        wide = f"{name} has shape {mine}, for (outputs, inputs). How many heads does it make, and how wide?"
        expect(mine == shape, wide)
    more = ", ".join(name for name in found if name not in shapes)
    expect(not more, f"{more}: a Llama has no biases, not even in its norms. Add nothing to the closed form.")
    with seeded(), torch.no_grad():
        for name, shape in shapes.items():
            if len(shape) == 2:  # a matrix, so that outputs are about as large as inputs
                found[name].copy_(torch.randn(shape) / shape[-1] ** 0.5)
            else:
                found[name].copy_(1 + torch.rand(shape))
    return module, {name: found[name] for name in shapes}


# --------------------------------------------------------------------------------------------------
# 04.2: block
BLOCKS = ((16, 4, 2, 24, (2, 6)), (12, 3, 1, 20, (1, 5)), (24, 6, 6, 10, (3, 2)), (16, 4, 2, 24, (2, 1)))


def _block_shapes(h: int, heads: int, kv_heads: int, f: int) -> dict[str, tuple[int, ...]]:
    return {
        "norm1.weight": (h,),
        "norm2.weight": (h,),
        "qkv.weight": (h + 2 * (h // heads) * kv_heads, h),
        "output.weight": (h, h),
        "gate_up.weight": (2 * f, h),
        "down.weight": (h, f),
    }


def _block(
    weights: Weights,
    sizes: Sequence[int],
    x: torch.Tensor,
    cut: Any = lambda one, width: one.unflatten(-1, (-1, width)).transpose(1, 2),
    repeat: Any = torch.repeat_interleave,
    causal: bool = True,
    parallel: bool = False,
) -> torch.Tensor:
    h, heads, kv_heads, _ = sizes
    made = F.linear(F.rms_norm(x, (h,), weights["norm1.weight"]), weights["qkv.weight"])
    width = h // heads
    parts = made.split([h, width * kv_heads, width * kv_heads], -1)
    q, k, v = (cut(part, width) for part in parts)
    k, v = (repeat(one, heads // kv_heads, 1) for one in (k, v))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    y = x + F.linear(y.transpose(1, 2).flatten(2), weights["output.weight"])
    normed = F.rms_norm(x if parallel else y, (h,), weights["norm2.weight"])
    gate, up = F.linear(normed, weights["gate_up.weight"]).chunk(2, -1)
    return y + F.linear(F.silu(gate) * up, weights["down.weight"])


BLOCK_MISTAKES: Mapping[str, Mapping[str, Any]] = {
    "You cut into heads without `transpose`, so one head gets numbers of several tokens.": {
        "cut": lambda one, width: one.reshape(len(one), -1, one.shape[1], width)
    },
    "Neighboring query heads share their keys and values. Yours take turns: `repeat` has another order.": {
        "repeat": lambda one, times, _: one.repeat(1, times, 1, 1)
    },
    "A token sees the tokens after it: make attention causal.": {"causal": False},
    "Your MLP reads x from before attention. It must read the sum after attention.": {"parallel": True},
}
BLOCK_HALVES = {  # and the other half's last matrix
    "The half with attention is off: the output is wrong even with `down.weight` at zero. Follow one token: "
    "norm1, queries, keys, values, attention, heads next to each other again, output. What is added?": (
        "down.weight"
    ),
    "The half with the MLP is off; attention is right. Follow one token: "
    "norm2, gate (its rows come first) and up, SiLU, down. What is added?": "output.weight",
}


@exercise("04.2", "A Llama's block to the unit: causal, in groups, and with the right gradients.")
def block(answer: Any) -> None:
    """`answer(h, heads, kv_heads, f)` is a module, one block of a Llama without positions."""
    names = ("h", "heads", "kv_heads", "f")
    off = "Both halves are right alone, together they are not. What does the MLP read, what is it added to?"
    _judge(answer, names, BLOCKS, _block_shapes, _block, BLOCK_MISTAKES, off, BLOCK_HALVES)


# --------------------------------------------------------------------------------------------------
# 04.3: experts
PARTS = ("gate", "up", "down")
EXPERTS = ((8, 12, 4, 2, (2, 5)), (6, 5, 5, 3, (7,)), (4, 6, 3, 3, (3,)), (8, 4, 6, 1, (1, 1)))


def _experts_shapes(h: int, f: int, E: int, _: int) -> dict[str, tuple[int, int]]:
    shapes = {
        f"experts.{n}.{part}.weight": (h, f) if part == "down" else (f, h) for n in range(E) for part in PARTS
    }
    return shapes | {"router.weight": (E, h)}


def _experts(
    weights: Weights,
    sizes: Sequence[int],
    x: torch.Tensor,
    share: Any = lambda scores, top, where: top.softmax(-1),
) -> torch.Tensor:
    """The slow way: every expert computes every token, and those that are chosen are picked."""
    mlps = ([weights[f"experts.{n}.{part}.weight"] for part in PARTS] for n in range(sizes[2]))
    every = [F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down) for gate, up, down in mlps]
    scores = F.linear(x, weights["router.weight"])
    top, where = scores.topk(sizes[3])
    picked = torch.stack(every, -2).gather(-2, where[..., None].expand(*where.shape, x.shape[-1]))
    return (share(scores, top, where)[..., None] * picked).sum(-2)


EXPERT_MISTAKES: Mapping[str, Mapping[str, Any]] = {
    "A token's shares do not add up to 1: take the softmax over its chosen scores, not over all.": {
        "share": lambda scores, top, where: scores.softmax(-1).gather(-1, where)
    },
    "Scores are not shares yet: take the softmax of the chosen ones.": {
        "share": lambda scores, top, where: top
    },
    "Only one of a token's experts arrives: you overwrite the others' outputs. Add to them.": {
        "share": lambda scores, top, where: top.softmax(-1) * (where == where.amax(-1, keepdim=True))
    },
}


@exercise("04.3", "Each token in its own experts, and in no others.")
def experts(answer: Any) -> None:
    """`answer(h, f, E, chosen)` is a module: E experts, and a router from each token to `chosen` of them."""
    computed: list[int] = []
    names = ("h", "f", "E", "chosen")
    off = "Not yet: take one token. Which experts does it visit, and with what shares are they added?"
    judged = _judge(answer, names, EXPERTS, _experts_shapes, _experts, EXPERT_MISTAKES, off)
    for module, x in judged:
        for name, part in module.named_modules():
            if name.endswith("gate"):
                part.register_forward_pre_hook(lambda _, given: computed.append(given[0].shape[:-1].numel()))
        module(x)
    asked = sum(chosen * torch.Size(tokens).numel() for *_, chosen, tokens in EXPERTS)
    wasted = "Your output is right, but experts compute tokens that are not theirs. Send each its own rows."
    never = "Your output is right, but you never call an expert. Send rows through the modules themselves."
    expect(computed, never)
    expect(sum(computed) == asked, wasted)


# --------------------------------------------------------------------------------------------------
# 04.4: read_shapes
HIDDEN: tuple[dict[str, Any], ...] = (
    {"hidden": 2048, "layers": 16, "vocab": 128256, "kv": 512, "ffn": 8192, "tied": True},
    {"hidden": 64, "layers": 5, "vocab": 100, "kv": 64, "ffn": 176, "tied": False},
    {"hidden": 512, "layers": 6, "vocab": 256, "kv": 128, "ffn": 1376, "tied": True},
    {"hidden": 4096, "layers": 32, "vocab": 32000, "kv": 1024, "ffn": 14336, "tied": False},
    {"hidden": 4096, "layers": 8, "vocab": 256, "kv": 1024, "ffn": 2048, "tied": False},
)
SIZES = {  # what is asked for, and what is said if it is off
    "hidden": "A matrix has two sizes, and either may be another width. Which tensors leave no choice?",
    "layers": "Do you count blocks, or tensors? Norms and some matrices occur several times in a block.",
    "vocab": "V is a size of no block, and need not be the largest size. Is that true of yours?",
    "ffn": "f need not be the largest size, and it follows from no other size.",
    "kv": "It follows from no other size, and not every Llama groups its queries.",
    "tied": "What would the list contain if it were the other way round?",
}


def anonymous_shapes(
    hidden: int, layers: int, vocab: int, kv: int, ffn: int, tied: bool
) -> list[tuple[int, ...]]:
    """The shapes of all tensors of a Llama of these sizes, without names and sorted by their shapes."""
    one = 2 * [(hidden,), (hidden, hidden), (kv, hidden), (ffn, hidden)] + [(hidden, ffn)]
    words = [(vocab, hidden)] * (1 if tied else 2)
    return sorted([*words, *(layers * one), (hidden,)])


@exercise("04.4", "Every size of every hidden model, from shapes alone.")
def read_shapes(answer: Any) -> None:
    """`answer(shapes)` is a dictionary of the SIZES of the Llama with tensors of these shapes."""
    absent = "You look for a size that does not exist: where keys are as wide as queries, none is left."
    hints = dict.fromkeys(("IndexError", "StopIteration"), absent)
    for sizes in HIDDEN:
        given = call(answer, shapes=anonymous_shapes(**sizes), returns=Mapping, hints=hints)
        got = entries(given, tuple(SIZES), object)
        for name, hint in SIZES.items():
            expect(got[name] == sizes[name], f"{name} is off. {hint}")
