"""Causal attention, as `networks/transformer.py` and `networks/attention.py` run it: written out, or in one kernel."""

from collections.abc import Callable

from .layers import Linear, call
from .operations import Step, add, cast, copied, dropout, join, lowered, multiply, negative, relaid, split, view
from .recomputation import checkpoint
from .tape import Gradient, Saving, Tensor

Shared = list[Tensor]


class Attention:
    """Causal attention, by one matrix or three for q, k and v."""

    def __init__(self, step: Step) -> None:
        self.step, shape = step, step.structure
        names = {"qkv": "qkv"} if shape.fused_qkv else {"q": "h", "k": "kv", "v": "kv"}
        self.inputs = [Linear(step, name, "h", width, shape.qkv_bias, name) for name, width in names.items()]
        self.out = Linear(step, "attention output", "h", "h", shape.bias, "out")

    def __call__(self, x: Tensor, shared: Shared) -> Tensor:
        step, shape = self.step, self.step.structure
        if shape.fused_qkv:
            parts = split(step, call(self.inputs[0], x), ["sb·h", "sb·kv", "sb·kv"])
        else:
            parts = [call(make, x) for make in self.inputs]
        q, k, v = (heads_apart(step, part, number) for number, part in enumerate(parts))
        del parts
        if shape.positions == "rotary":
            q, k = rotate(step, q, shared, "h"), rotate(step, k, shared, "kv")
        y = attention_core(step, q, k, v, shared[-1:])
        return dropout(step, call(self.out, heads_joined(step, y)), "attention output")


def heads_apart(step: Step, x: Tensor, number: int) -> Tensor:
    """q, k or v (`number`), (b, s, h) as (b, a, s, d): whether its gradient comes in the order of its memory.

    It does from a fused kernel, unless the repetition of keys and values is summed on the way; of eager attention it
    does for kᵀ alone, unless it was rotated.
    """
    shape = step.structure
    summed = shape.attention == "efficient" and shape.grouped and number > 0
    fits = number == 1 and shape.positions != "rotary" if shape.attention == "eager" else not summed
    return view(step, x) if fits else relaid(step, x)


def heads_joined(step: Step, y: Tensor) -> Tensor:
    """(b, a, s, d) as (b, s, h): a fused kernel has it in this order already, a matrix product has to be copied."""
    return copied(step, y) if step.structure.attention == "eager" else view(step, y)


def rotate(step: Step, x: Tensor, shared: Shared, width: str) -> Tensor:
    """Rotary positions: a head times the cosine, plus its halves swapped, the second negated, times the sine."""
    first, second = split(step, x, [f"sb·{width}/2"] * 2)
    cosine, sine = shared[:2]
    return add(step, _turn(step, x, cosine), _turn(step, join(step, negative(step, second), first, x.shape), sine))


def _turn(step: Step, x: Tensor, angles: Tensor) -> Tensor:
    return multiply(step, x, angles, "rotary positions", ("tensor", "cosine and sine"))


def full_width(step: Step, x: Tensor) -> Tensor:
    """Keys or values repeated, one of each for every query head."""
    return copied(step, x, "sb·h") if step.structure.grouped else x


def attention_core(step: Step, q: Tensor, k: Tensor, v: Tensor, mask: Shared) -> Tensor:
    """From q·kᵀ to weights·v, under a checkpoint of its own where that is what is run again."""
    core: Callable[..., Tensor] = eager_attention if step.structure.attention == "eager" else fused_attention
    arguments = (step, q, k, v, *(mask if step.structure.attention == "eager" else []))
    return checkpoint(step, core, *arguments) if step.structure.recompute == "selective-attention" else core(*arguments)


def fused_attention(step: Step, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One kernel: it keeps q, k, v, its output, one fp32 logsumexp a row, and its random numbers' state (Dao et al.
    2022). Flash and cuDNN take grouped keys and values as they are; the efficient kernel pads rows to 32.
    """
    kernel, tape = step.structure.attention, step.tape
    if kernel == "efficient":
        k, v = full_width(step, k), full_width(step, v)
    out = step.product("c", "sb·h")
    rows = "b·a·s32" if kernel == "efficient" else "b·a·s"
    names = ("queries", "keys", "values")
    random = "drop the same again" if step.structure.dropout else "nothing: there is no dropout"
    saved = [
        *(Saving(x, "attention", name, "attention's backward") for x, name in zip((q, k, v), names, strict=True)),
        Saving(out, "attention", "output", "its backward, and the gradient of the next weights"),
        Saving(step.product("4", rows), "attention", "logsumexp", "softmax again, row by row"),
    ]
    if kernel != "efficient":  # whose random state is on the host
        saved.append(Saving(step.product("16", "1"), "attention", "random seed", random))
        saved.append(Saving(step.product("8", "1"), "attention", "random offset", random))
    sizes = [q.size, k.size, v.size]
    tape.apply(out, [q, k, v], saved, lambda _: [tape.gradient(size) for size in sizes])
    return out


def eager_attention(step: Step, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """softmax(q·kᵀ/√d)·v written out: 5·a·s²·b bytes in 16-bit with dropout (Korthikanti et al. 2022, section 4.1)."""
    k, v = full_width(step, k), full_width(step, v)
    grouped = step.structure.grouped
    scores = divided(step, product(step, as_factor(step, q), as_factor(step, k, grouped), "b·a·s·s", "q·kᵀ"))
    scores = masked(step, scores, mask)
    weights = dropout(step, softmax(step, scores), "attention weights")
    out = product(step, as_factor(step, weights, True), as_factor(step, v, grouped), "sb·h", "weights·v")
    return view(step, out) if step.structure.factors_are_views else relaid(step, out)


def product(step: Step, x: Tensor, y: Tensor, shape: str, name: str) -> Tensor:
    """A batched matrix product: torch copies what is not laid out for it; the gradient of each needs the other."""
    tape, sizes = step.tape, [x.size, y.size]
    saved = [
        Saving(x, name, "first factor", "gradient of the second"),
        Saving(y, name, "second factor", "gradient of the first"),
    ]

    def backward(_: list[Gradient]) -> list[Gradient | None]:
        for_y = tape.gradient(sizes[1])
        return [tape.gradient(sizes[0]), for_y]

    kept = tape.keep([x, y], saved)
    out = step.product("c", shape)
    tape.apply(out, [x, y], [], backward, kept)
    return out


def as_factor(step: Step, x: Tensor, in_order: bool = False) -> Tensor:
    """A factor of a batched product: in 16 bits under autocast; copied, unless it is `in_order` or the batch is of one
    sequence or one head.
    """
    x = lowered(step, x)
    return view(step, x) if in_order or step.structure.factors_are_views else copied(step, x)


def divided(step: Step, x: Tensor) -> Tensor:
    """x/√d: keeps nothing."""
    return negative(step, x)


def masked(step: Step, x: Tensor, mask: Tensor) -> Tensor:
    """Keeps the mask, one for all layers."""
    tape, back = step.tape, x.size
    out = tape.tensor(x.element, x.shape)
    tape.apply(
        out,
        [x],
        [Saving(mask, "attention", "causal mask", "which scores get no gradient")],
        lambda _: [tape.gradient(back)],
    )
    return out


def softmax(step: Step, x: Tensor) -> Tensor:
    """Keeps its output; under autocast it is computed in fp32."""
    x = cast(step, x, "r") if step.structure.autocast else x
    tape, back = step.tape, x.size
    out = tape.tensor(x.element, x.shape)
    saved = [Saving(out, "softmax", "attention weights", "softmax's own backward")]
    tape.apply(out, [x], saved, lambda _: [tape.gradient(back)])
    return out
