"""Checks of lesson 04, "Counting parameters": each names the misconception, never the answer."""

import tomllib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import eq
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

from ...interactive.feedback import Mistakes, call, entries, exercise, expect, fail, recognized
from ..shared.judging import forward_backward, same, seeded

# --------------------------------------------------------------------------------------------------
# 04.1: count


def _mixed() -> nn.Module:
    """A tied head, frozen positions in 16 bits, a mask that two modules share, a buffer never saved."""
    network = nn.Module()
    mask = torch.ones(16, 16, dtype=torch.bool)
    words = nn.Embedding(100, 8)
    head = nn.Linear(8, 100, bias=False)
    network.words = words
    network.head = head
    network.positions = nn.Embedding(16, 8, dtype=torch.bfloat16).requires_grad_(False)
    head.weight = words.weight
    head.register_buffer("mask", mask)
    words.register_buffer("mask", mask)
    words.register_buffer("angles", torch.ones(16, 3), persistent=False)
    return network


def _twins() -> nn.Module:
    """Two layers of one shape, and a third that has the first one's matrix."""
    layers = [nn.Linear(7, 7) for _ in range(3)]
    layers[2].weight = layers[0].weight
    return nn.Sequential(*layers)


LARGE = partial(nn.Linear, 200_000, 350_000, dtype=torch.bfloat16)
NETWORKS = (_mixed, _twins, partial(nn.Linear, 7, 3), nn.ReLU, LARGE)


def _facts(network: nn.Module) -> SimpleNamespace:
    """Return the numbers and the bytes of each kind of tensor, and under all names."""
    kinds = {
        "trained": [p for p in network.parameters() if p.requires_grad],
        "frozen": [p for p in network.parameters() if not p.requires_grad],
        "named": [p for _, p in network.named_parameters(remove_duplicate=False)],
        "buffers": list(network.buffers()),
        "saved": list(network.state_dict().values()),
    }
    sizes = {f"{name}_bytes": sum(tensor.nbytes for tensor in tensors) for name, tensors in kinds.items()}
    numbers = {name: sum(map(torch.numel, tensors)) for name, tensors in kinds.items()}
    return SimpleNamespace(**sizes, **numbers)


COUNTS: Mapping[str, tuple[Callable[[Any], int], Mistakes]] = {
    "trained": (
        lambda n: n.trained,
        {
            "A parameter with two names is in memory once, with one gradient.": lambda n: n.named - n.frozen,
            "You count frozen parameters as trained. Frozen parameters get no gradient.": (
                lambda n: n.trained + n.frozen
            ),
            "Buffers are not trained: they have no gradient.": lambda n: n.trained + n.frozen + n.buffers,
        },
    ),
    "frozen": (
        lambda n: n.frozen,
        {
            "Buffers are not parameters, frozen or not: count only their bytes.": (
                lambda n: n.frozen + n.buffers
            )
        },
    ),
    "bytes": (
        lambda n: n.trained_bytes + n.frozen_bytes + n.buffers_bytes,
        {
            "You take 4 bytes per number. Ask each tensor for its size.": (
                lambda n: 4 * (n.trained + n.frozen + n.buffers)
            ),
            "Buffers are missing. They are not parameters, but take memory.": (
                lambda n: n.trained_bytes + n.frozen_bytes
            ),
            "A state dict lists names, and leaves out some buffers. What is in memory?": (
                lambda n: n.saved_bytes
            ),
            "You take buffers from the state dict: "
            "it leaves out what is never saved, and lists shared ones twice.": (
                lambda n: n.trained_bytes + n.frozen_bytes + n.saved_bytes - n.named_bytes
            ),
            "You add bytes twice. A tensor with two names is in memory once.": (
                lambda n: n.named_bytes + n.buffers_bytes
            ),
        },
    ),
}


LOADS = "The first check loads torch's rules for tensors without memory, which takes up to ten seconds."


@exercise(
    "04.1",
    "Each tensor once, trained or frozen, to the byte; nothing is allocated, even for 70 billion.",
    first=LOADS,
)
def count(answer: Any) -> None:
    """`answer(build)` is a dictionary: numbers trained and frozen, and the bytes of what `build()` makes."""
    builds = [partial(_on_meta, build) for build in NETWORKS]
    hints = {"StopIteration": "You ask for a first parameter. A network may have no parameters at all."}
    got = []
    for build in builds:
        returned = call(answer, build=build, returns=Mapping, hints=hints)
        got.append(entries(returned, tuple(COUNTS)))
    left = (
        "After your function, all tensors are made on `meta`. "
        "Call torch.set_default_device(None), then use `with`."
    )
    expect(not torch.empty(0).is_meta, left)
    with torch.device("meta"):
        facts = [(_facts(build()),) for build in builds]
    for name, (right, mistakes) in COUNTS.items():
        off = f"{name} is off. Do you count the right tensors, each once? Two tensors may have one shape."
        recognized([one[name] for one in got], facts, right, mistakes, off, eq)


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
    off: Callable[..., str],
) -> list[tuple[nn.Module, torch.Tensor]]:
    """Compare a learner's modules with `right(weights, sizes, x)`, then with its `mistakes`; return them.

    Each of `cases` is the sizes called `names`, then the shape of the tokens. Raises CheckFailed, with what
    `off(modules, given)` says where no mistake fits. The modules come with their inputs.
    """
    modules = []
    given = []
    runs = []
    for *sizes, tokens in cases:
        module, weights = _made(answer, dict(zip(names, sizes, strict=True)), shapes_of(*sizes))
        with seeded():
            x = 0.5 + torch.randn(*tokens, sizes[0])
        ways = (partial(_not_zero, module), partial(right, weights, sizes))
        runs.append([forward_backward(way, [x], weights.values()) for way in ways])
        given.append((weights, sizes, x))
        modules.append((module, x))
    for (mine, _), (*_, x) in zip(runs, given, strict=True):
        shape = "Your output has another shape than x. (x may be a single token.)"
        expect(mine.output.shape == x.shape, shape)
    wrong = {message: partial(right, **options) for message, options in mistakes.items()}
    if not recognized([mine.output for mine, _ in runs], given, right, wrong, same=close):
        fail(off(modules, given))
    for (mine, wanted), (weights, _, x) in zip(runs, given, strict=True):
        pairs = zip(mine.gradients, (x, *weights.values()), strict=True)
        # an expert that no token chose has no gradient: as good as zeros
        found = [torch.zeros_like(tensor) if one is None else one for one, tensor in pairs]
        cut = "Your output is right, but its gradients are wrong: is the graph cut somewhere?"
        expect(close(found, wanted.gradients), cut)
    return modules


def _not_zero(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    output = call(module, x, returns=torch.Tensor)
    zeros = (
        f"With x of shape {tuple(x.shape)} your output is all zeros. "
        "(Index 0 is valid, and its `any()` is False.)"
    )
    expect(output.any(), zeros)
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
        expect(
            mine == shape,
            f"{name} has shape {mine}. Is that (outputs, inputs)? How many heads does it make, and how wide?",
        )
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
    skip: int = 1,
    act: Any = F.silu,
    swapped: bool = False,
    parallel: bool = False,
    causal: bool = True,
    repeat: Any = torch.repeat_interleave,
    tokens: int = 1,
    order: Sequence[int] = (0, 1, 2),
    cut: Any = lambda one, width: one.unflatten(-1, (-1, width)).transpose(1, 2),
) -> torch.Tensor:
    h, heads, kv_heads, _ = sizes
    made = F.linear(F.rms_norm(x, (h,), weights["norm1.weight"]), weights["qkv.weight"])
    width = h // heads
    parts = made.split([h, width * kv_heads, width * kv_heads], -1)
    q, k, v = (cut(parts[place], width) for place in order)
    k, v = (repeat(one, heads // kv_heads, 1) for one in (k, v))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    y = skip * x + F.linear(y.transpose(1, 1 + tokens).reshape(x.shape), weights["output.weight"])
    normed = F.rms_norm(x if parallel else y, (h,), weights["norm2.weight"])
    gate, up = F.linear(normed, weights["gate_up.weight"]).chunk(2, -1)
    return skip * y + F.linear(act(up) * gate if swapped else act(gate) * up, weights["down.weight"])


BLOCK_MISTAKES: Mapping[str, Mapping[str, Any]] = {
    "You cut into heads without `transpose`, so one head gets numbers of several tokens.": {
        "cut": lambda one, width: one.reshape(len(one), -1, one.shape[1], width)
    },
    "Keys and values are exchanged: the last rows are the values.": {"order": (0, 2, 1)},
    "A token sees the tokens after it: make attention causal.": {"causal": False},
    "Neighboring query heads share their keys and values. "
    "Yours take turns: `repeat` copies in another order.": {
        "repeat": lambda one, times, _: one.repeat(1, times, 1, 1)
    },
    "You join heads in the wrong order: tokens come before heads again.": {"tokens": 0},
    "Attention and MLP must *add* their result to their input: where is the residual?": {"skip": 0},
    "Your MLP reads x from before attention. It must read the sum after attention.": {"parallel": True},
    "Gate and up are exchanged: the gate's rows come first, and only the gate goes through SiLU.": {
        "swapped": True
    },
    "SwiGLU's gate goes through SiLU, not GELU.": {"act": F.gelu},
}
BLOCK_HALVES = {
    "The half with attention is off: the output is wrong even with `down.weight` at zero. "
    "Follow one token: norm1, cut into heads, attention, heads next to each other again, output, and x.": (
        "down.weight"
    ),
    "The half with the MLP is off; attention is right. "
    "Follow one token: norm2, gate and up, down. What is the result added to?": "output.weight",
}


@exercise("04.2", "A Llama's block to the unit: causal, in groups, and with the right gradients.")
def block(answer: Any) -> None:
    """`answer(h, heads, kv_heads, f)` is a module, one block of a Llama without positions."""
    _judge(answer, ("h", "heads", "kv_heads", "f"), BLOCKS, _block_shapes, _block, BLOCK_MISTAKES, _half_off)


def _half_off(modules: Sequence[Any], given: Sequence[Any]) -> str:
    """Return which half of a block is wrong, judged with the other half's last matrix at zero."""
    for what, other in BLOCK_HALVES.items():
        for (module, x), (weights, sizes, _) in zip(modules, given, strict=True):
            zeros = {other: torch.zeros_like(weights[other])}
            if not close([functional_call(module, zeros, x)], [_block(weights | zeros, sizes, x)]):
                return what
    return (
        "The parameters are right, but the output is wrong. "
        "Follow one token: norm, attention, add, norm, MLP, add."
    )


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
    "You add the experts' outputs unweighted. Where do shares come in?": {
        "share": lambda scores, top, where: top**0
    },
    "Only one of a token's experts arrives: you overwrite the others' outputs. Add to them.": {
        "share": lambda scores, top, where: top.softmax(-1) * (where == where.amax(-1, keepdim=True))
    },
}


@exercise("04.3", "Each token in its own experts, and in no others.")
def experts(answer: Any) -> None:
    """`answer(h, f, E, chosen)` is a module: E experts, and a router from each token to `chosen` of them."""
    off = "Not yet: take one token. Work out by hand which experts it visits and what they return."
    computed: list[int] = []
    names = ("h", "f", "E", "chosen")
    mistakes = EXPERT_MISTAKES
    judged = _judge(answer, names, EXPERTS, _experts_shapes, _experts, mistakes, lambda *_: off)
    for module, x in judged:
        for name, part in module.named_modules():
            if name.endswith("gate"):
                part.register_forward_pre_hook(lambda _, given: computed.append(given[0].shape[:-1].numel()))
        module(x)
    asked = sum(chosen * torch.Size(tokens).numel() for *_, chosen, tokens in EXPERTS)
    wasted = (
        "Your output is right, but experts compute tokens that are not theirs. Give each only its own rows."
    )
    never = "Your output is right, but you never call an expert. Send rows through the modules themselves."
    expect(computed, never)
    expect(sum(computed) == asked, wasted)


# --------------------------------------------------------------------------------------------------
# 04.4: read_shapes
READ = tomllib.loads(Path(__file__).with_name("shapes.toml").read_text(encoding="utf-8"))


def anonymous_shapes(
    hidden: int, layers: int, vocab: int, kv: int, ffn: int, tied: bool
) -> list[tuple[int, ...]]:
    """The shapes of all tensors of a Llama of these sizes, without names and sorted by their shapes."""
    one = 2 * [(hidden,), (hidden, hidden), (kv, hidden), (ffn, hidden)] + [(hidden, ffn)]
    words = [(vocab, hidden)] * (1 if tied else 2)
    return sorted([*words, *(layers * one), (hidden,)])


@exercise("04.4", "Every size of every hidden model, from shapes alone.")
def read_shapes(answer: Any) -> None:
    """`answer(shapes)` is a dictionary of shapes.toml's `sizes` of the Llama with tensors of these shapes."""
    absent = "You look for a size that does not exist: where keys are as wide as queries, none is left."
    hints = dict.fromkeys(("IndexError", "StopIteration"), absent)
    for sizes in READ["models"]:
        given = call(answer, shapes=anonymous_shapes(**sizes), returns=Mapping, hints=hints)
        got = entries(given, tuple(READ["sizes"]), object)
        norms = "You count the norms. How many does a block have, and how many come after the blocks?"
        expect(got["layers"] != 2 * sizes["layers"] + 1, norms)
        largest = "You return the MLP's width for V. V need not be the largest size."
        expect(got["vocab"] != sizes["ffn"], largest)
        for name, hint in READ["sizes"].items():
            expect(got[name] == sizes[name], f"{name} is off: {hint}")
