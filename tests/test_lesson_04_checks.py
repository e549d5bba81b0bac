"""Checks of lesson 04: right answers of every style pass, and each planted wrong answer gets its hint."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from math import prod
from typing import Any

import numpy
import pytest
import torch
from checking import Answers, JudgedAnswers, every_check
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from course_utils.lessons.parameters import checks as lesson_04
from course_utils.models import PRESETS, parameter_shapes

# --------------------------------------------------------------------------------------------------
# 04.1: count

Listing = Callable[[nn.Module], Iterable[torch.Tensor]]


def counting(
    trained: Listing = nn.Module.parameters,
    frozen: Listing = nn.Module.parameters,
    filtered: bool = True,
    held: Listing = lambda network: [*network.parameters(), *network.buffers()],
    each: int = 0,
) -> Any:
    """Counts what functions list as trained, frozen and held; right by default. `each`: bytes per number."""

    def answer(build: Any) -> dict[str, int]:
        with torch.device("meta"):
            network = build()
        return {
            "trained": sum(one.numel() for one in trained(network) if one.requires_grad or not filtered),
            "frozen": sum(one.numel() for one in frozen(network) if not one.requires_grad),
            "bytes": sum(one.numel() * (each or one.element_size()) for one in held(network)),
        }

    return answer


def by_identity(build: Any) -> dict[str, float]:
    """Right as well: goes from module to module, and remembers which tensors it has seen."""
    before = torch.get_default_device()
    torch.set_default_device("meta")
    network = build()
    seen = set()
    found = Counter()
    torch.set_default_device(None if before.type == "cpu" else before)
    for module in network.modules():
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                found["bytes"] += tensor.untyped_storage().nbytes()
                if isinstance(tensor, nn.Parameter):
                    found["trained" if tensor.requires_grad else "frozen"] += tensor.numel()
    return {"trained": float(found["trained"]), "frozen": found["frozen"], "bytes": found["bytes"]}


def named(network: nn.Module) -> list[torch.Tensor]:
    return [one for _, one in network.named_parameters(remove_duplicate=False)]


def everything(network: nn.Module) -> list[torch.Tensor]:
    return [*network.parameters(), *network.buffers()]


def saved_buffers(network: nn.Module) -> list[torch.Tensor]:
    names = dict(network.named_parameters(remove_duplicate=False))
    return [*network.parameters(), *(one for name, one in network.state_dict().items() if name not in names)]


def as_fake_tensors(build: Any) -> dict[str, int]:
    """Right as well: fake tensors allocate nothing, though their device is the CPU."""
    with FakeTensorMode():
        network = build()
    return counting()(lambda: network)


def in_memory(build: Any) -> dict[str, int]:
    network = build()
    return {"trained": sum(one.numel() for one in network.parameters()), "frozen": 0, "bytes": 0}


def leaves_meta(build: Any) -> dict[str, int]:
    torch.set_default_device("meta")
    return counting()(build)


def without_key(build: Any) -> dict[str, int]:
    return {"trained": counting()(build)["trained"]}


def by_shape(network: nn.Module) -> Iterable[torch.Tensor]:
    return {one.shape: one for one in network.parameters()}.values()


def without_heads(network: nn.Module) -> list[torch.Tensor]:
    return [one for name, one in network.named_parameters(remove_duplicate=False) if "head" not in name]


def counting_first(build: Any) -> Iterator[dict[str, int]]:
    with torch.device("meta"):
        network = build()
    size = next(one for one in network.parameters()).itemsize
    yield counting(each=size)(build)


COUNT = Answers(
    right=[counting(), by_identity, as_fake_tensors, lambda build: {**counting()(build), "more": 1}],
    wrong=[
        (in_memory, "You let `build` allocate"),
        (counting(trained=named), "with one gradient"),
        (counting(filtered=False), "Frozen parameters get no gradient"),
        (counting(trained=everything, filtered=False), "Buffers are not trained"),
        (counting(frozen=everything), "Buffers are not parameters"),
        (counting(each=4), "You take 4 bytes per number"),
        (counting(held=nn.Module.parameters), "Buffers are missing"),
        (counting(held=lambda network: network.state_dict().values()), "A state dict lists names"),
        (counting(held=saved_buffers), "it leaves out what is never saved"),
        (counting(held=lambda network: [*named(network), *network.buffers()]), "is in memory once."),
        (counting(trained=lambda network: list(network.parameters())[:1]), "trained is off"),
        (counting(trained=by_shape), "Two tensors may have one shape"),
        (counting(trained=without_heads), "trained is off"),
        (lambda build: next(counting_first(build)), "A network may have no parameters at all"),
        (leaves_meta, "After your function, all tensors"),
        (without_key, "no 'frozen' and no 'bytes'"),
    ],
)

# --------------------------------------------------------------------------------------------------
# 04.2: block


def linear(inputs: int, outputs: int, bias: bool = False) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=bias)


class Block(nn.Module):
    """A block in another style than the solution's, right as it is; subclasses have one mistake each."""

    bias = False
    norm = nn.RMSNorm
    keys = "kv_heads"
    causal = True
    gate = staticmethod(F.silu)

    def __init__(self, h: int, heads: int, kv_heads: int, f: int) -> None:
        super().__init__()
        self.h, self.heads, self.kv_heads, self.f = h, heads, kv_heads, f
        k = h // heads * (heads if self.keys == "heads" else kv_heads)
        self.norm1 = self.norm(h)
        self.norm2 = self.norm(h)
        self.qkv = linear(h, h + 2 * k, self.bias)
        self.output = linear(h, h)
        self.gate_up = linear(h, 2 * f)
        self.down = linear(f, h)

    def repeated(self, one: torch.Tensor) -> torch.Tensor:
        return one.repeat_interleave(self.heads // self.kv_heads, dim=2)

    def joined(self, y: torch.Tensor) -> torch.Tensor:
        return y.permute(0, 2, 1, 3).flatten(2)

    def scores(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return q @ k.mT / q.shape[-1] ** 0.5

    def attended(self, x: torch.Tensor) -> torch.Tensor:
        b, s, _ = x.shape
        k = self.h // self.heads * self.kv_heads
        q, k, v = self.qkv(x).split([self.h, k, k], dim=2)
        q, k, v = (one.view(b, s, -1, self.h // self.heads) for one in (q, k, v))
        q, k, v = (one.transpose(1, 2) for one in (q, self.repeated(k), self.repeated(v)))
        mask = torch.ones(s, s, dtype=torch.bool).triu(1) & self.causal
        return self.output(self.joined(self.scores(q, k).masked_fill(mask, float("-inf")).softmax(-1) @ v))

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        both = self.gate_up(x)
        return self.down(self.gate(both[..., : self.f]) * both[..., self.f :])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attended(self.norm1(x))
        return x + self.mlp(self.norm2(x))


def block_with(**changed: Any) -> Any:
    """A block with other attributes or methods."""
    return type("Changed", (Block,), changed)


def in_one_call(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Right as well: PyTorch's attention, and heads of queries in groups as a dimension of their own."""
    width = self.h // self.heads
    group = self.heads // self.kv_heads
    parts = self.qkv(x).unflatten(-1, (-1, width)).transpose(1, 2)
    q = parts[:, : self.heads]
    k = parts[:, self.heads : -self.kv_heads]
    v = parts[:, -self.kv_heads :]
    q = q.unflatten(1, (self.kv_heads, group))
    y = F.scaled_dot_product_attention(q, k.unsqueeze(2), v.unsqueeze(2), is_causal=True)
    return self.output(y.flatten(1, 2).transpose(1, 2).flatten(2))


class Hurried(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.attended(self.norm1(x)) + self.mlp(self.norm2(x))


class Forgetful(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(self.norm2(self.attended(self.norm1(x))))


class Bare(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attended(x)
        return x + self.mlp(x)


class Renamed(Block):
    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        self.out = self.output
        del self.output


class Squeezed(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)[:, -1]


class Cut(Block):
    def attended(self, x: torch.Tensor) -> torch.Tensor:
        return super().attended(x.detach())


def attend(self: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return self.output(y.transpose(1, 2).flatten(2))


def without_transpose(self: Any, x: torch.Tensor) -> torch.Tensor:
    b, s, width = *x.shape[:2], self.h // self.heads
    q, k, v = self.qkv(x).split([self.h, width * self.kv_heads, width * self.kv_heads], -1)
    return attend(self, *(one.reshape(b, -1, s, width) for one in (q, k, v)))


def exchanged(self: Any, x: torch.Tensor) -> torch.Tensor:
    parts = self.qkv(x).unflatten(-1, (-1, self.h // self.heads)).transpose(1, 2)
    q, v, k = parts.split([self.heads, self.kv_heads, self.kv_heads], 1)
    return attend(self, q, k, v)


def with_norm1_twice(self: Any, x: torch.Tensor) -> torch.Tensor:
    x = x + self.attended(self.norm1(x))
    return x + self.mlp(self.norm1(x)) + 0 * self.norm2(x)


BLOCK = Answers(
    right=[
        Block,
        block_with(attended=in_one_call),
        lambda h, heads, kv_heads, f: Block(h, heads, kv_heads, f),
    ],
    wrong=[
        (block_with(bias=True), "a Llama has no biases"),
        (block_with(norm=nn.LayerNorm), "a Llama has no biases"),
        (block_with(keys="heads"), "How many heads does it make"),
        (block_with(causal=False), "A token sees the tokens after it"),
        (
            block_with(repeated=lambda self, one: one.repeat(1, 1, self.heads // self.kv_heads, 1)),
            "Yours take turns",
        ),
        (block_with(scores=lambda self, q, k: q @ k.mT), "The half with attention is off"),
        (block_with(attended=without_transpose), "without `transpose`"),
        (block_with(attended=exchanged), "Keys and values are exchanged"),
        (block_with(forward=with_norm1_twice), "The half with the MLP is off"),
        (
            block_with(joined=lambda self, y: y.reshape(y.shape[0], y.shape[2], -1)),
            "You join heads in the wrong order",
        ),
        (block_with(gate=staticmethod(F.gelu)), "not GELU"),
        (block_with(gate=staticmethod(torch.tanh)), "The half with the MLP is off"),
        (
            block_with(mlp=lambda self, x: self.down(swapped_gates(self.gate_up(x)))),
            "Gate and up are exchanged",
        ),
        (Hurried, "from before attention"),
        (Forgetful, "where is the residual?"),
        (Bare, "The half with attention is off"),
        (Renamed, "Your module has no parameter output.weight"),
        (Squeezed, "another shape than x"),
        (Cut, "is the graph cut somewhere?"),
        (Block(8, 2, 1, 4), "Hand over the class itself"),
        (lambda h, heads, kv_heads, f: None, "nothing: does every path"),
    ],
)


def swapped_gates(both: torch.Tensor) -> torch.Tensor:
    up, gate = both.chunk(2, dim=-1)
    return F.silu(gate) * up


# --------------------------------------------------------------------------------------------------
# 04.3: experts


class Mlp(nn.Module):
    def __init__(self, h: int, f: int) -> None:
        super().__init__()
        self.gate = linear(h, f)
        self.up = linear(h, f)
        self.down = linear(f, h)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Experts(nn.Module):
    """Experts in another style than the solution's, right as they are; subclasses have one mistake each."""

    def __init__(self, h: int, f: int, E: int, chosen: int) -> None:
        super().__init__()
        self.router = linear(h, E)
        self.chosen = chosen
        self.experts = nn.ModuleList(Mlp(h, f) for _ in range(E))

    def shared(self, top: torch.Tensor, scores: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
        return top.softmax(-1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        scores = self.router(tokens)
        top, where = scores.topk(self.chosen)
        shares = self.shared(top, scores, where)
        pieces = []
        for place in range(self.chosen):
            one = torch.zeros_like(tokens)
            for number in where[:, place].unique():
                rows = where[:, place] == number
                one[rows] = self.experts[number](tokens[rows]) * shares[rows, place, None]
            pieces.append(one)
        return torch.stack(pieces).sum(0).reshape(x.shape)


class TokenByToken(Experts):
    """Right as well, and slow."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = []
        for token in x.flatten(0, -2):
            top, where = self.router(token).topk(self.chosen)
            shares = self.shared(top, self.router(token), where)
            made = [self.experts[n](token) for n in where.tolist()]
            rows.append(shares @ torch.stack(made))
        return torch.stack(rows).view(x.shape)


class ByMask(Experts):
    """Right as well: sends a mask's rows, and some experts nothing at all."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.router(x)
        top, where = scores.topk(self.chosen)
        shares = torch.zeros_like(scores).scatter(-1, where, top.softmax(-1))
        y = torch.zeros_like(x)
        for n, expert in enumerate(self.experts):
            sent = (where == n).any(-1)
            y = y.masked_scatter(sent[..., None], y[sent] + shares[..., n][sent][:, None] * expert(x[sent]))
        return y


class Wasteful(Experts):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.router(x)
        top, where = scores.topk(self.chosen)
        shares = torch.zeros_like(scores).scatter(-1, where, top.softmax(-1))
        return torch.stack([shares[..., n, None] * expert(x) for n, expert in enumerate(self.experts)]).sum(0)


class Overwriting(Experts):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, -2)
        top, where = self.router(tokens).topk(self.chosen)
        y = torch.zeros_like(tokens)
        for n, expert in enumerate(self.experts):
            rows, places = (where == n).nonzero(as_tuple=True)
            y[rows] = top.softmax(-1)[rows, places, None] * expert(tokens[rows])
        return y.view(x.shape)


class AnyRow(Experts):
    """Asks whether some row is not zero, where it means whether there is one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, -2)
        top, where = self.router(tokens).topk(self.chosen)
        y = torch.zeros_like(tokens)
        for n, expert in enumerate(self.experts):
            rows, places = (where == n).nonzero(as_tuple=True)
            if rows.any():
                y = y.index_add(0, rows, top.softmax(-1)[rows, places, None] * expert(tokens[rows]))
        return y.view(x.shape)


class Gathered(Experts):
    """Takes the matrices out of the modules, so that no forward of an expert ever runs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        top, where = self.router(x).topk(self.chosen)
        parts = ([getattr(expert, part).weight for expert in self.experts] for part in ("gate", "up", "down"))
        gate, up, down = (torch.stack(one)[where] for one in parts)
        x = x[..., None, :, None]
        made = down @ (F.silu(gate @ x) * (up @ x))
        return (top.softmax(-1)[..., None] * made.squeeze(-1)).sum(-2)


class Flat(Experts):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).flatten(0, -2)


class Unrouted(Experts):
    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        del self.router


def sharing(share: Callable[..., torch.Tensor], base: type[Experts] = Experts) -> Any:
    return type("Sharing", (base,), {"shared": lambda self, top, scores, where: share(top, scores, where)})


EXPERTS = Answers(
    right=[Experts, TokenByToken, ByMask],
    wrong=[
        (Wasteful, "experts compute tokens that are not theirs"),
        (Overwriting, "Only one of a token's experts arrives"),
        (sharing(lambda top, scores, where: torch.ones_like(top)), "Where do shares come in?"),
        (sharing(lambda top, scores, where: scores.softmax(-1).gather(-1, where)), "do not add up to 1"),
        (sharing(lambda top, scores, where: top), "Scores are not shares yet"),
        (AnyRow, "your output is all zeros"),
        (sharing(lambda top, scores, where: top.softmax(-1).flip(-1)), "Not yet: take one token"),
        (sharing(lambda top, scores, where: top.softmax(-1).detach()), "is the graph cut somewhere?"),
        (Flat, "another shape than x"),
        (Gathered, "you never call an expert"),
        (Unrouted, "Your module has no parameter router.weight"),
        (Experts(8, 4, 3, 2), "Hand over the class itself"),
    ],
)

# --------------------------------------------------------------------------------------------------
# 04.4: read_shapes


def read(shapes: Any) -> dict[str, Any]:
    """Reads the sizes in another way than the solution: from how often each shape occurs."""
    often = {shape: shapes.count(shape) for shape in shapes}
    (h,) = next(shape for shape in often if len(shape) == 1)
    L = (often[(h,)] - 1) // 2
    V = next(shape[0] for shape, times in often.items() if times < L and shape[1:] == (h,))
    f = next(shape[1] for shape, times in often.items() if len(shape) == 2 and shape[1] != h)
    k = next(
        (shape[0] for shape, times in often.items() if shape[1:] == (h,) and shape[0] not in (h, f, V)), h
    )
    return {"hidden": h, "layers": L, "vocab": V, "ffn": f, "kv": k, "tied": often[(V, h)] == 1}


def narrower(shapes: Any) -> list[int]:
    found = read(shapes)
    return [size for size, *_ in shapes if size not in (found["hidden"], found["vocab"], found["ffn"])]


def reads(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """The right sizes, some of them changed."""
    return lambda shapes: read(shapes) | change(read(shapes))


READ_SHAPES = Answers(
    right=[
        read,
        lambda shapes: {name: numpy.int64(size) for name, size in read(shapes).items()},
        lambda shapes: {name: float(size) for name, size in reversed(read(shapes).items())},
    ],
    wrong=[
        (reads(lambda r: {"hidden": r["ffn"]}), "Which tensors leave no choice?"),
        (reads(lambda r: {"layers": 2 * r["layers"] + 1}), "You count the norms."),
        (reads(lambda r: {"layers": r["layers"] + 1}), "do you count blocks, or tensors?"),
        (reads(lambda r: {"vocab": max(r["vocab"], r["ffn"])}), "need not be the largest size"),
        (reads(lambda r: {"vocab": r["vocab"] + 1}), "V is a size of no block"),
        (reads(lambda r: {"ffn": 4 * r["hidden"]}), "it follows from no other size"),
        (reads(lambda r: {"kv": r["hidden"] // 4}), "not every Llama groups its queries"),
        (reads(lambda r: {"tied": True}), "if it were the other way round"),
        (lambda shapes: read(shapes) | {"kv": shapes[0][0]}, "kv is off"),
        (lambda shapes: read(shapes) | {"kv": narrower(shapes)[0]}, "where keys are as wide as queries"),
        (
            lambda shapes: (
                read(shapes) | {"ffn": max(size for size, *_ in shapes if size != read(shapes)["vocab"])}
            ),
            "f need not be the largest size",
        ),
    ],
)


def test_anonymous_shapes_are_those_of_the_real_model() -> None:
    m = PRESETS["llama3.2-1b"]
    shapes = lesson_04.anonymous_shapes(m.hidden, m.layers, m.vocab, m.kv, m.ffn, m.tied)
    assert shapes == sorted(parameter_shapes(m).values())
    assert sum(map(prod, shapes)) == m.parameters


ANSWERS = {f"04.{n}": one for n, one in enumerate((COUNT, BLOCK, EXPERTS, READ_SHAPES), 1)}


class TestAnswers(JudgedAnswers):
    answers = ANSWERS

    @pytest.fixture(autouse=True)
    def default_device(self) -> Iterator[None]:
        yield
        torch.set_default_device(None)  # which a wrong answer leaves elsewhere


def test_no_hint_says_where_in_the_list_a_size_is_found() -> None:
    """The count and the place of a shape are the method, which is the answer: hints name the belief."""
    secrets = ("once", "twice", "column", "row", "matrix of words")
    for hint_of_size in lesson_04.READ["sizes"].values():
        assert not [words for words in secrets if words in hint_of_size]


def test_the_first_check_says_that_it_takes_a_while(capsys: pytest.CaptureFixture[str]) -> None:
    every_check()["04.1"](counting())
    assert capsys.readouterr().out.startswith("The first check loads")
