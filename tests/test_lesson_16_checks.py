"""The checks of lesson 16: right answers of every style pass, each wrong answer gets the hint it deserves."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from checking import Answers, JudgedAnswers, hint
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


class Lora(nn.Module):
    """What the exercise gives, and an answer in the style of its solution."""

    def __init__(self, base: nn.Linear, r: int, alpha: float, dropout: float = 0.0) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.scale = alpha / r
        self.merged = False
        self.A = nn.Parameter(torch.randn(r, base.in_features) / base.in_features**0.5)
        self.B = nn.Parameter(torch.zeros(base.out_features, r))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (
            self.base(x)
            if self.merged
            else self.base(x) + self.scale * (self.dropout(x) @ self.A.T) @ self.B.T
        )

    @torch.no_grad()
    def merge(self) -> None:
        if not self.merged:
            self.base.weight += self.scale * self.B @ self.A
            self.merged = True

    @torch.no_grad()
    def unmerge(self) -> None:
        if self.merged:
            self.base.weight -= self.scale * self.B @ self.A
            self.merged = False


class ByFunctions(Lora):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.linear(x, self.base.weight, self.base.bias)
        if not self.merged:
            thin = F.linear(F.dropout(x, self.dropout.p, self.training), self.A)
            y = y + F.linear(thin, self.scale * self.B)
        return y

    def merge(self) -> None:
        self.change(1)

    def unmerge(self) -> None:
        self.change(-1)

    def change(self, sign: int) -> None:
        if self.merged != (sign == 1):
            self.base.weight.data.addmm_(self.B.detach(), self.A.detach(), alpha=sign * self.scale)
            self.merged = sign == 1


class InOtherOrder(Lora):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.merged:
            return self.base.forward(x)
        return (self.dropout(x) @ self.A.mT @ self.B.mT).mul(self.scale).add(self.base(x))

    def merge(self) -> None:
        with torch.no_grad():
            for row, column in zip(self.A, self.B.T, strict=True) if not self.merged else ():
                self.base.weight += self.scale * torch.outer(column, row)
        self.merged = True


def lora(merge: Any = None, unmerge: Any = None, **changes: Any) -> Any:
    """The right layer with other methods; a `forward` gets the layer and x."""
    methods = changes | ({"merge": merge} if merge else {}) | ({"unmerge": unmerge} if unmerge else {})
    return type("Mine", (Lora,), methods)


def forward_of(adapter: Callable[[Any, torch.Tensor], torch.Tensor], x: Any = lambda layer, x: x) -> Any:
    return lora(forward=lambda self, x_: self.base(x(self, x_)) + (0 if self.merged else adapter(self, x_)))


def thin(layer: Any, x: torch.Tensor) -> torch.Tensor:
    return layer.scale * (x @ layer.A.T) @ layer.B.T


def dense(layer: Any, x: torch.Tensor) -> torch.Tensor:
    return layer.dropout(x) @ (layer.scale * layer.B @ layer.A).T


def with_a_copy(layer: Any) -> None:
    if not layer.merged:
        layer.copy = layer.base.weight.detach().clone()
        Lora.merge(layer)


def a_new_weight(layer: Any) -> None:
    merged = (layer.base.weight + layer.scale * layer.B @ layer.A).detach()
    layer.base.weight = nn.Parameter(merged, requires_grad=False)
    layer.merged = True


def with_a_graph(layer: Any) -> None:
    layer.base.weight.add_(layer.B @ layer.A, alpha=layer.scale)
    layer.merged = True


def adding_always(layer: Any) -> None:
    layer.base.weight.data += layer.scale * (layer.B @ layer.A).detach()
    layer.merged = True


def taking_always(layer: Any) -> None:
    layer.base.weight.data -= layer.scale * (layer.B @ layer.A).detach()
    layer.merged = False


def without_scale(layer: Any) -> None:
    if not layer.merged:
        layer.base.weight.data += (layer.B @ layer.A).detach()
        layer.merged = True


def dropping_some(layer: Any) -> None:
    if not layer.merged:
        layer.base.weight.data += layer.scale * layer.dropout(layer.B @ layer.A).detach()
        layer.merged = True


def dense_in_eval(layer: Any, x: torch.Tensor) -> torch.Tensor:
    if layer.training or layer.merged:
        return Lora.forward(layer, x)
    return F.linear(x, layer.base.weight + layer.scale * layer.B @ layer.A, layer.base.bias)


def without_what_drops(layer: Any) -> None:
    if not layer.merged:
        layer.base.weight.data += (1 - layer.dropout.p) * layer.scale * (layer.B @ layer.A).detach()
        layer.merged = True


def in_eval_mode(layer: Any) -> None:
    layer.eval()
    Lora.merge(layer)


def only_noted(layer: Any) -> None:
    layer.merged = True


def still_noted(layer: Any) -> None:
    layer.base.weight.data -= layer.scale * (layer.B @ layer.A).detach() if layer.merged else 0


def plus_equals(layer: Any) -> None:
    layer.base.weight += layer.scale * layer.B @ layer.A
    layer.merged = True


def with_b_put_away(layer: Any) -> None:
    if not layer.merged:
        Lora.merge(layer)
        layer.away = layer.B.detach().clone()
        layer.B.data.zero_()


def with_b_put_back(layer: Any) -> None:
    if layer.merged:
        layer.B.data.copy_(2 * layer.away)
        layer.base.weight.data -= layer.scale * (layer.away @ layer.A).detach()
        layer.merged = False


class FreezesNothing(Lora):
    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.base.requires_grad_(True)


class RandomB(Lora):
    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        nn.init.normal_(self.B)


class OfItsOwn(Lora):
    def __init__(self, base: nn.Linear, *given: Any) -> None:
        super().__init__(nn.Linear(base.in_features, base.out_features), *given)


def dropping_for_both(self: Any, x: torch.Tensor) -> torch.Tensor:
    x = self.dropout(x)
    return self.base(x) + (0 if self.merged else thin(self, x))


def always_with_a_bias(self: Any, x: torch.Tensor) -> torch.Tensor:
    adapter = 0 if self.merged else thin(self, self.dropout(x))
    return x @ self.base.weight.T + self.base.bias + adapter


def product_of_factors_first(self: Any, x: torch.Tensor) -> torch.Tensor:
    if self.merged:
        return self.base(x)
    return self.base(x) + (self.scale * self.B @ self.A @ self.dropout(x).mT).mT


LORA_LINEAR = Answers(
    right=[Lora, ByFunctions, InOtherOrder],
    wrong=[
        (forward_of(lambda layer, x: thin(layer, x).detach()), "the gradient of x is not"),
        (forward_of(lambda layer, x: thin(layer, layer.dropout(x)) / layer.scale), "You leave out the scale"),
        (forward_of(lambda layer, x: -thin(layer, layer.dropout(x))), "You subtract the adapter"),
        (forward_of(lambda layer, x: 0 * x[..., :1]), "The adapter is missing"),
        (forward_of(lambda layer, x: thin(layer, x) - layer.base.bias * layer.B.any()), "bias is missing"),
        (
            lora(
                forward=lambda self, x: thin(self, x) + (0 * self.base(x) if self.B.any() else self.base(x))
            ),
            "The frozen layer is missing",
        ),
        (
            lora(forward=lambda self, x: self.base(x) * (self.scale if self.B.any() else 1) + thin(self, x)),
            "You scale the frozen layer",
        ),
        (
            forward_of(lambda layer, x: thin(layer, F.dropout(x, layer.dropout.p))),
            "In eval mode numbers are still",
        ),
        (forward_of(thin), "In training mode nothing is dropped"),
        (lora(forward=dropping_for_both), "Dropout is only for the adapter's input"),
        (
            forward_of(lambda layer, x: layer.scale * layer.dropout(x @ layer.A.T) @ layer.B.T),
            "Dropout comes before A",
        ),
        (forward_of(lambda layer, x: layer.dropout(thin(layer, x))), "off in training mode"),
        (forward_of(dense), "in which order do you multiply"),
        (
            lora(forward=lambda self, x: Lora.forward(self, x) + 0 * x.square().exp().mean(-1, keepdim=True)),
            "Forward keeps more than its input",
        ),
        (FreezesNothing, "bias gets a gradient"),
        (RandomB, "B is zero at first"),
        (OfItsOwn, "another base layer than the one"),
        (lora(with_a_copy), "W's copy, a new W, or B·A"),
        (lora(a_new_weight), "W's copy, a new W, or B·A"),
        (lora(with_a_graph), "What is `no_grad` for"),
        (lora(adding_always), "adds the adapter twice"),
        (lora(without_scale), "merge() leaves out the scale"),
        (lora(only_noted), "W is what it was before"),
        (lora(plus_equals), "What is `no_grad` for"),
        (
            lora(lambda self: (Lora.merge(self), self.base.requires_grad_(True))),
            "W requires a gradient. It is frozen",
        ),
        (lora(lambda self: (self.eval(), Lora.merge(self), self.train())), "turns training mode on"),
        (
            lora(lambda self: (setattr(self.dropout, "p", 0.0), Lora.merge(self))),
            "In training mode nothing is dropped",
        ),
        (
            lora(lambda self: (Lora.merge(self), self.B.data.zero_()), lambda self: self.merged and 1 / 0),
            "raised",
        ),
        (lora(with_b_put_away, with_b_put_back), "After unmerge(), the adapter's part is missing"),
        (lora(forward=always_with_a_bias), "your function raised TypeError"),
        (lora(without_what_drops), "is not W + scale·B·A"),
        (lora(dropping_some), "W + scale·B·A, whatever dropout is"),
        (
            lora(lambda self: None if self.training and self.dropout.p else Lora.merge(self)),
            "W is what it was before",
        ),
        (lora(forward=dense_in_eval), "a matrix as large as W"),
        (lora(forward=lambda self, x: x @ self.base.weight.T), "layer's bias is missing"),
        (lora(in_eval_mode), "turns training mode off"),
        (lora(unmerge=lambda self: (Lora.unmerge(self), self.eval())), "unmerge() turns training mode off"),
        (
            lora(
                forward=lambda self, x: self.base(self.dropout(x)) if self.merged else Lora.forward(self, x)
            ),
            "a merged layer still drops",
        ),
        (lora(forward=product_of_factors_first), "a matrix as large as W"),
        (Lora(nn.Linear(3, 2), 1, 1.0), "Give the class, not a layer"),
        (
            lora(forward=lambda self, x: self.base(x) + thin(self, self.dropout(x))),
            "should use only the frozen layer",
        ),
        (lora(unmerge=lambda self: setattr(self, "merged", False)), "is not what it was before merge"),
        (lora(unmerge=taking_always), "After unmerge() twice, W is not"),
        (lora(unmerge=still_noted), "After unmerge() twice, W is not"),
        (lora(forward=lambda self, x: self.base(x)[0]), "the new layer's output is not"),
        (lambda base, r, alpha, dropout: base, "keep the names that were given"),
    ],
)


class Packed:
    """In the style of the solution; each method below may do one thing in another way."""

    def __init__(self, values: torch.Tensor, block: int) -> None:
        self.shape, self.block = values.shape, block
        rows = F.pad(values.flatten(), (0, -values.numel() % block)).view(-1, block)
        self.scales = self.scale(rows)
        codes = self.code(rows / self.guard(self.scales)).to(torch.int8).flatten()[: values.numel()]
        self.packed = self.pack(F.pad(codes, (0, len(codes) % 2)).view(-1, 2))

    def scale(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.abs().amax(dim=1, keepdim=True) / 7

    def guard(self, scales: torch.Tensor) -> torch.Tensor:
        return scales.clamp_min(1e-30)

    def code(self, numbers: torch.Tensor) -> torch.Tensor:
        return numbers.round()

    def pack(self, pairs: torch.Tensor) -> torch.Tensor:
        return (pairs[:, 0] * 16 | pairs[:, 1] & 15).view(torch.uint8)

    def codes(self) -> torch.Tensor:
        signed = self.packed.view(torch.int8)
        return torch.stack((signed >> 4, signed << 4 >> 4), dim=1)

    def unpack(self) -> torch.Tensor:
        count = self.shape.numel()
        codes = self.codes().flatten()[:count]
        rows = F.pad(codes, (0, -count % self.block)).view(-1, self.block)
        return (rows * self.scales).flatten()[:count].view(self.shape)


class WithAnOffset(Packed):
    """Codes from 1 to 15, the second of each two in the higher half, arithmetic in place of shifts."""

    def pack(self, pairs: torch.Tensor) -> torch.Tensor:
        first, second = (pairs + 8).to(torch.uint8).unbind(1)
        return first + 16 * second

    def codes(self) -> torch.Tensor:
        return torch.stack([self.packed % 16, self.packed // 16], 1).int() - 8


class WithATable(Packed):
    """By `repeat_interleave`, and a sign that a comparison finds."""

    def unpack(self) -> torch.Tensor:
        count = self.shape.numel()
        four = torch.stack([self.packed // 16, self.packed % 16], 1).flatten().float()
        values = torch.where(four > 7, four - 16, four)[:count]
        return (values * self.scales.flatten().repeat_interleave(self.block)[:count]).reshape(self.shape)


class AsModule(nn.Module):
    """Buffers, rows made by hand, and a tiny number added to each scale."""

    def __init__(self, values: torch.Tensor, block: int) -> None:
        super().__init__()
        self.block, self.size = block, values.shape
        rows = values.reshape(-1).split(block)
        scales = torch.stack([row.abs().max() / 7 for row in rows])
        codes = torch.cat([(row / (scale + 1e-20)).round() for row, scale in zip(rows, scales, strict=True)])
        codes = F.pad((codes + 8).to(torch.uint8), (0, len(codes) % 2))
        self.register_buffer("codes", codes[::2] * 16 + codes[1::2])
        self.register_buffer("scales", scales)

    def unpack(self) -> torch.Tensor:
        codes = torch.stack((self.codes >> 4, self.codes & 15), 1).flatten()[: self.size.numel()].float() - 8
        rows = zip(codes.split(self.block), self.scales, strict=True)
        return torch.cat([row * scale for row, scale in rows]).reshape(self.size)


def packed(**changes: Any) -> Any:
    return type("Mine", (Packed,), changes)


class Keeping(Packed):
    """Keeps the values as well."""

    def __init__(self, values: torch.Tensor, block: int) -> None:
        super().__init__(values, block)
        self.values = values


class Listed(Packed):
    def __init__(self, values: torch.Tensor, block: int) -> None:
        self.values = values.tolist()

    def unpack(self) -> torch.Tensor:
        return torch.tensor(self.values)


def holding(more: Callable[[Any], Any], **changes: Any) -> Any:
    """The right class, which also holds what `more` makes of it, or holds it in another way."""

    def init(self: Any, values: torch.Tensor, block: int) -> None:
        Packed.__init__(self, values, block)
        vars(self).update(more(self))

    return packed(__init__=init, **changes)


def spoiling(self: Any) -> torch.Tensor:
    values = Packed.unpack(self)
    self.scales *= 2
    return values


class ByView(Packed):
    def __init__(self, values: torch.Tensor, block: int) -> None:
        super().__init__(values.view(-1), block)
        self.shape = values.shape


def packed_of(held: torch.Tensor) -> Any:
    return SimpleNamespace(packed=held)


class InMemoryOrder(Packed):
    def __init__(self, values: torch.Tensor, block: int) -> None:
        super().__init__(
            values if values.is_contiguous() else values.as_strided(values.shape, (values.shape[1], 1)), block
        )


class Remembering(Packed):
    """Unpacks once, and keeps that."""

    made: torch.Tensor | None = None

    def unpack(self) -> torch.Tensor:
        self.made = super().unpack() if self.made is None else self.made
        return self.made


class Padded(Packed):
    """Packs what only fills up the last block, too."""

    def __init__(self, values: torch.Tensor, block: int) -> None:
        super().__init__(values, block)
        self.packed = torch.cat((self.packed, torch.zeros(-values.numel() % block // 2, dtype=torch.uint8)))

    def codes(self) -> torch.Tensor:
        return super().codes()


PACKED = Answers(
    right=[Packed, WithAnOffset, WithATable, AsModule],
    wrong=[
        (
            packed(codes=lambda self: torch.stack((self.packed // 16, self.packed % 16), 1).int()),
            "Negative codes come",
        ),
        (packed(codes=lambda self: Packed.codes(self).flip(1)), "are swapped"),
        (
            packed(scale=lambda self, rows: rows.abs().amax().expand(len(rows), 1).clone() / 7),
            "share one scale",
        ),
        (packed(scale=lambda self, rows: rows.abs().amax() / 7), "That is too little"),
        (
            packed(scale=lambda self, rows: rows.amax(dim=1, keepdim=True) / 7),
            "its largest *magnitude* below",
        ),
        (
            packed(
                scale=lambda self, rows: rows.abs().amax(dim=1, keepdim=True) / 8,
                code=lambda self, x: x.round().clamp(-8, 7),
            ),
            "Is its scale that magnitude over 7",
        ),
        (
            packed(
                scale=lambda self, rows: rows.abs().amax(dim=1, keepdim=True) / 7.5,
                code=lambda self, x: x.round().clamp(-7, 7),
            ),
            "Is its scale that magnitude over 7",
        ),
        (
            packed(pack=lambda self, pairs: pairs[:, 0] * 16 + pairs[:, 1]),
            "other number in their byte is below zero",
        ),
        (
            packed(pack=lambda self, pairs: pairs[:, 0] << 4 | pairs[:, 1]),
            "other number in their byte is below zero",
        ),
        (packed(code=lambda self, x: (x.round() * 1.0).to(torch.uint8)), "A negative float becomes a uint8"),
        (packed(scale=lambda self, rows: rows.abs().amax(dim=1, keepdim=True) / 8), "7 is the largest code"),
        (packed(code=lambda self, x: x.floor()), "to the *nearest* code"),
        (packed(codes=lambda self: Packed.codes(self).T), "Which two share a byte"),
        (packed(codes=lambda self: Packed.codes(self).clamp_min(-1)), "Only numbers below zero"),
        (InMemoryOrder, "A transposed tensor comes back in another order"),
        (Remembering, "more bytes than were held"),
        (packed(code=lambda self, x: x.trunc()), "round to the *nearest* code"),
        (packed(guard=lambda self, scales: scales), "you divide 0 by 0"),
        (
            packed(pack=lambda self, pairs: pairs.flatten(), codes=lambda self: self.packed),
            "A code has a whole byte",
        ),
        (Keeping, "The original numbers are among them"),
        (Listed, "Numbers are held in a list"),
        (
            holding(
                lambda self: {"packed": self.packed.tolist()},
                codes=lambda self: Packed.codes(packed_of(torch.tensor(self.packed, dtype=torch.uint8))),
            ),
            "Numbers are held in a list",
        ),
        (
            holding(
                lambda self: {"packed": self.packed.numpy().copy()},
                codes=lambda self: Packed.codes(packed_of(torch.from_numpy(self.packed))),
            ),
            "an array",
        ),
        (
            holding(
                lambda self: {"packed": bytes(self.packed.tolist())},
                codes=lambda self: Packed.codes(
                    packed_of(torch.tensor(list(self.packed), dtype=torch.uint8))
                ),
            ),
            "or bytes",
        ),
        (holding(lambda self: {"table": torch.arange(16.0)}), "float32 (16,). What is neither"),
        (holding(lambda self: {"size": torch.tensor(self.shape)}), "int64 (2,). What is neither"),
        (
            holding(lambda self: {"wide": self.scales.repeat_interleave(self.block)}),
            "float32 (128,). What is neither",
        ),
        (
            holding(lambda self: {"scales": torch.cat((self.scales, self.scales))[: len(self.scales)]}),
            "the rest of a sliced tensor",
        ),
        (packed(unpack=lambda self: Packed.unpack(self).bfloat16()), "come back as torch.bfloat16"),
        (packed(unpack=lambda self: Packed.unpack(self).to(torch.int8)), "come back as torch.int8"),
        (packed(guard=lambda self, scales: scales + 1e-8), "A block of tiny numbers"),
        (packed(guard=lambda self, scales: scales.clamp_min(1e-6)), "A block of tiny numbers"),
        (
            packed(scale=lambda self, rows: rows.abs().amax(dim=1, keepdim=True).clamp_min(1e-6) / 7),
            "of tiny numbers",
        ),
        (packed(unpack=spoiling), "A second unpack()"),
        (ByView, "A transposed tensor has no flat view"),
        (Padded, "Some are for padding"),
        (packed(unpack=lambda self: Packed.unpack(self).flatten()), "in another shape"),
        (packed(unpack=lambda self: Packed.unpack(self) / Packed.unpack(self)), "as nan or infinity"),
        (packed(unpack=lambda self: None), "returned nothing"),
        (lambda values, block: (values, block), "has no `unpack`"),
    ],
)


class KeepsNothing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, packed: Any, bias: Any) -> torch.Tensor:
        ctx.packed = packed
        return F.linear(x, packed.unpack().to(x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] @ ctx.packed.unpack().to(gradients[0].dtype), None, None


class WithShapes(torch.autograd.Function):
    """Rows and columns by hand, in another order of the arguments."""

    @staticmethod
    def forward(ctx: Any, packed: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.packed, ctx.dtype = packed, x.dtype
        return (x.flatten(0, -2) @ packed.unpack().to(x.dtype).T).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        W = ctx.packed.unpack().to(ctx.dtype)
        return None, torch.einsum("...o,oi->...i", gradients[0], W)


def by_shapes(x: torch.Tensor, packed: Any, bias: Any) -> torch.Tensor:
    y = WithShapes.apply(packed, x)
    return y if bias is None else y + bias


def in_a_closure(x: torch.Tensor, packed: Any, bias: Any) -> torch.Tensor:
    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x @ packed.unpack().to(x).T

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            return gradients[0] @ packed.unpack().to(gradients[0])

    return Function.apply(x) + (0 if bias is None else bias)


class KeepsX(KeepsNothing):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, packed: Any, bias: Any) -> torch.Tensor:
        ctx.save_for_backward(x)
        return KeepsNothing.forward(ctx, x, packed, bias)


class KeepsOutput(KeepsNothing):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, packed: Any, bias: Any) -> torch.Tensor:
        y = KeepsNothing.forward(ctx, x, packed, bias)
        ctx.save_for_backward(y)
        return y


class KeepsW(KeepsNothing):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, packed: Any, bias: Any) -> torch.Tensor:
        ctx.W = packed.unpack().to(x.dtype)
        return F.linear(x, ctx.W, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] @ ctx.W, None, None


def backwards(back: Any) -> Any:
    """The right forward with another backward."""
    made: Any = type("Mine", (KeepsNothing,), {"backward": staticmethod(back)})
    return made.apply


def in_the_matrix(x: torch.Tensor, packed: Any, bias: Any) -> torch.Tensor:
    packed.dense = packed.unpack().to(x.dtype)
    return KeepsNothing.apply(x, packed, bias)


def by_checkpoint(x: torch.Tensor, packed: Any, bias: Any) -> torch.Tensor:
    return checkpoint(lambda x: F.linear(x, packed.unpack().to(x.dtype), bias), x, use_reentrant=False)


def unpacking_twice(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
    return gradient @ ctx.packed.unpack() + 0 * ctx.packed.unpack()[:1], None, None


PRODUCT = Answers(
    right=[KeepsNothing.apply, by_shapes, in_a_closure],
    wrong=[
        (
            lambda x, packed, bias: F.linear(x, packed.unpack().to(x.dtype), bias),
            "W is kept for backward, unpacked",
        ),
        (KeepsW.apply, "W is kept for backward, unpacked"),
        (in_the_matrix, "W is kept for backward, unpacked"),
        (KeepsX.apply, "x is kept for backward"),
        (by_checkpoint, "x is kept for backward"),
        (lambda x, packed, bias: KeepsNothing.apply(x, packed, None), "The bias is missing"),
        (
            lambda x, packed, bias: KeepsNothing.apply(
                x.float(), packed, None if bias is None else bias.float()
            ),
            "but the output is not: the unpacked W is fp32",
        ),
        (lambda x, packed, bias: 2 * KeepsNothing.apply(x, packed, bias), "The output is not x·Wᵀ"),
        (lambda x, packed, bias: KeepsNothing.apply(x, packed, bias).flatten(), "another shape than x·Wᵀ"),
        (lambda x, packed, bias: KeepsNothing.apply(x.detach(), packed, bias), "something cuts the graph"),
        (
            backwards(lambda ctx, gradient: gradient @ ctx.packed.unpack()),
            "Backward through your output raised",
        ),
        (
            backwards(lambda ctx, gradient: (gradient @ ctx.packed.unpack().T, None, None)),
            "Backward through your",
        ),
        (
            backwards(lambda ctx, gradient: (2 * gradient @ ctx.packed.unpack(), None, None)),
            "is not the output's",
        ),
        (backwards(lambda ctx, gradient: (None, None, None)), "No gradient reaches x"),
        (
            backwards(
                lambda ctx, gradient: (gradient @ ctx.packed.unpack().to(gradient.dtype), None, gradient[0])
            ),
            "Backward returns None for all but x",
        ),
        (KeepsOutput.apply, "The output is kept for backward"),
        (backwards(unpacking_twice), "is unpacked 3 times"),
    ],
)


def test_a_failure_names_the_case_without_its_numbers() -> None:
    def shapeless(x: torch.Tensor, packed: Any, bias: Any) -> None:
        raise ValueError("shapes")

    assert "a tensor of (5, 64) in float32, W of (48, 64) in four bits, a tensor of (48,)" in hint(
        "16.3", shapeless
    )


def per_token(
    most: Callable[[torch.Tensor], torch.Tensor] = lambda x: x.abs().max(dim=-1, keepdim=True).values,
    levels: float = 127,
    nearest: Callable[[torch.Tensor], torch.Tensor] = torch.round,
    kind: torch.dtype = torch.int32,
    tokens: Callable[[torch.Tensor], Any] = lambda each: each,
    rows: Callable[[torch.Tensor], Any] = lambda scale: scale.T,
    least: float = 1e-30,
) -> Any:
    """A learner's product, with one thing done in another way."""

    def answer(x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        each = (most(x) / levels).clamp_min(least)
        rounded = nearest(x / each).clamp(-127, 127).to(kind)
        return (rounded @ codes.to(kind).T) * tokens(each) * rows(scale)

    return answer


def with_einsum(x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """In whole numbers of int64; tokens of zeros are left out of the division."""
    most = x.abs().amax(-1)
    factor = torch.where(most > 0, 127 / most, torch.zeros_like(most))
    rounded = torch.round(x * factor[..., None]).long()
    sums = torch.einsum("...i,oi->...o", rounded, codes.long())
    return sums * (most / 127)[..., None] * scale.flatten()


def row_by_row(x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """One token after the other, in floats that hold whole numbers."""
    found = []
    for token in x.reshape(-1, x.shape[-1]):
        each = token.abs().max() / 127
        whole = (token / each).round() if each > 0 else torch.zeros_like(token)
        found.append(codes.float() @ whole * each * scale[:, 0])
    return torch.stack(found).view(*x.shape[:-1], -1)


def static(x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """A scale per channel, folded into nothing."""
    each = x.abs().flatten(0, -2).amax(dim=0) / 127 + 1e-30
    return ((x / each).round().int() @ codes.int().T) * each.mean() * scale.T


PRODUCT8 = Answers(
    right=[per_token(), with_einsum, row_by_row],
    wrong=[
        (lambda x, codes, scale: x @ (codes * scale).T, "You round nothing"),
        (lambda x, codes, scale: F.linear(x, codes.float()) * scale.T, "You round nothing"),
        (per_token(most=lambda x: x.abs().max()), "All tokens share one scale"),
        (static, "those of channels"),
        (per_token(most=lambda x: x.amax(-1, keepdim=True)), "largest *magnitude*"),
        (per_token(tokens=torch.ones_like), "You leave out the tokens' scales"),
        (per_token(rows=lambda scale: 1), "You leave out the scales of W's rows"),
        (per_token(tokens=lambda each: 1, rows=lambda scale: 1.0), "You leave out both scales"),
        (per_token(levels=128), "The largest code is 127"),
        (per_token(nearest=torch.trunc), "You cut off the digits"),
        (per_token(nearest=torch.floor), "You round down"),
        (per_token(kind=torch.int8), "does not fit into int8"),
        (per_token(levels=7), "Some number is off"),
        (per_token(least=0.0), "a token may be all zeros"),
        (per_token(least=1e-6), "A tiny token comes out wrong"),
        (
            per_token(most=lambda x: x.abs().max(dim=-1, keepdim=True).values + 1e-5),
            "A tiny token comes out wrong",
        ),
        (per_token(rows=lambda scale: scale), "raised"),
        (lambda *given: per_token()(*given).bfloat16(), "You return torch.bfloat16"),
        (lambda *given: per_token()(*given).flatten(0, -2), "give (2, 3, 6), not"),
        (
            lambda x, codes, scale: per_token(tokens=lambda e: 1, rows=lambda s: 1)(x, codes, scale),
            "torch.int32",
        ),
    ],
)

ANSWERS = {"16.1": LORA_LINEAR, "16.2": PACKED, "16.3": PRODUCT, "16.4": PRODUCT8}


class TestAnswers(JudgedAnswers):
    answers = ANSWERS
