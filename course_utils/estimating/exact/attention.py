"""Causal attention, as `networks/transformer.py` and `networks/attention.py` run it: written out, or in one
kernel.

What it keeps for backward is what the `Saving`s here name: `fused_attention` for a kernel; `matrix_product`,
`masked`, `softmax` and `dropout` for `eager_attention`. The last two, and `copied`, are in `operations.py`.
"""

from . import operations as ops
from .layers import Linear
from .operations import Module, Step
from .recomputation import checkpoint
from .tape import Gradient, Saving, Tensor, operation

Shared = list[Tensor]


class Attention(Module):
    """Causal attention, by one matrix or three for q, k and v."""

    def __init__(self, step: Step) -> None:
        super().__init__(step)
        shape = step.structure
        names = {"qkv": "qkv"} if shape.fused_qkv else {"q": "h", "k": "kv", "v": "kv"}
        self.inputs = [Linear(step, name, "h", width, shape.qkv_bias, name) for name, width in names.items()]
        self.out = Linear(step, "attention output", "h", "h", shape.bias, "out")

    @operation
    def __call__(self, x: Tensor, shared: Shared) -> Tensor:
        step = self.step
        parts = [make(x) for make in self.inputs]
        if self.structure.fused_qkv:
            parts = ops.split(step, parts[0], ["sb·h", "sb·kv", "sb·kv"])
        q, k, v = (heads_apart(step, part, number) for number, part in enumerate(parts))
        if self.structure.positions == "rotary":
            q, k = rotated(step, q, k, shared)
        q, k, v = map(self.tape.hold, (q, k, v))
        y = self.tape.hold(attention_core(step, q, k, v, shared[-1:]))
        return ops.dropout(step, self.out(heads_joined(step, y)), "attention output")


def heads_apart(step: Step, x: Tensor, number: int) -> Tensor:
    """q, k or v (`number`), (b, s, h) as (b, a, s, d).

    Its gradient is copied unless it comes in the order of x.

    It does from a fused kernel, unless the repetition of keys and values is summed on the way; of eager
    attention it does for kᵀ alone, unless it was rotated.
    """
    shape = step.structure
    if shape.attention == "eager":
        in_order = number == 1 and shape.positions != "rotary"
    else:
        summed = shape.repeats and shape.grouped and number > 0
        in_order = not summed
    return ops.view(step, x) if in_order else ops.relaid(step, x)


def heads_joined(step: Step, y: Tensor) -> Tensor:
    """(b, a, s, d) as (b, s, h).

    A fused kernel has it in this order already, a matrix product has to be copied.
    """
    return ops.copied(step, y) if step.structure.attention == "eager" else ops.view(step, y)


@operation
def rotated(step: Step, q: Tensor, k: Tensor, shared: Shared) -> tuple[Tensor, Tensor]:
    """Rotary positions: a head times the cosine, plus its swapped halves times the sine.

    The second half is negated as it is swapped.
    """
    return rotate(step, q, shared, "h"), rotate(step, k, shared, "kv")


@operation
def rotate(step: Step, x: Tensor, shared: Shared, width: str) -> Tensor:
    """All heads of queries or of keys, `width` elements per token, rotated."""
    first, second = ops.split(step, x, [f"sb·{width}/2"] * 2)
    cosine, sine = shared[:2]
    names = ("tensor", "cosine and sine")
    straight = ops.multiply(step, x, cosine, "rotary positions", names)
    swapped = ops.join(step, ops.scaled(step, second), first, x.shape)
    return ops.add(step, straight, ops.multiply(step, swapped, sine, "rotary positions", names))


def full_width(step: Step, x: Tensor) -> Tensor:
    """Keys or values repeated, one of each for every query head."""
    return ops.copied(step, x, "sb·h") if step.structure.grouped else x


def attention_core(step: Step, q: Tensor, k: Tensor, v: Tensor, mask: Shared) -> Tensor:
    """From q·kᵀ to weights·v, under a checkpoint of its own where that is what is run again."""
    if step.structure.attention == "eager":
        core = eager_attention
        arguments = mask
    else:
        core = fused_attention
        arguments = []
    if step.structure.recompute == "selective-attention":
        return checkpoint(step, core, step, q, k, v, *arguments)
    return core(step, q, k, v, *arguments)


@operation
def fused_attention(step: Step, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One kernel: it saves q, k, v, its output, one fp32 logsumexp per row, and its random numbers' state.

    Dao et al. 2022. Flash and cuDNN can take grouped keys and values as they are; the efficient kernel pads
    rows to 32.
    """
    kernel, tape = step.structure.attention, step.tape
    if step.structure.repeats:
        k = full_width(step, k)
        v = full_width(step, v)
    out = step.product("c", "sb·h")
    rows = "b·a·s32" if kernel == "efficient" else "b·a·s"
    random = "drop the same again" if step.structure.dropout else "nothing: there is no dropout"
    saving = [
        Saving(q, "attention", "queries", "attention's backward"),
        Saving(k, "attention", "keys", "attention's backward"),
        Saving(v, "attention", "values", "attention's backward"),
        Saving(out, "attention", "output", "its backward, and the gradient of the next weights"),
        Saving(step.product("4", rows), "attention", "logsumexp", "softmax again, row by row"),
    ]
    if kernel != "efficient":  # whose random state is on the host
        saving.append(Saving(step.product("16", "1"), "attention", "random seed", random))
        saving.append(Saving(step.product("8", "1"), "attention", "random offset", random))
    sizes = [q.size, k.size, v.size]
    scratch = flash_scratch(step) if kernel == "flash" else []

    def backward(_: list[Gradient]) -> list[Gradient | None]:
        gradients: list[Gradient | None] = [tape.gradient(size) for size in sizes]
        for storage in [tape.make(size) for size in scratch]:
            storage.release()
        return gradients

    tape.apply(out, [q, k, v], backward, saving)
    return out


def flash_scratch(step: Step) -> list[str]:
    """Tensors of the flash kernel's backward that are gone when it returns.

    These are a number for each row, the gradient of q in fp32, and of shared keys and values the gradients
    for every head; rows and heads in whole tiles (mha_bwd in torch's flash_api.cpp).
    """
    sizes = ["4·b·a·s128", "4·b·a·s128·d32"]
    if step.structure.grouped and not step.structure.repeats:
        sizes += ["c·sb·h", "c·sb·h"]
    return sizes


@operation
def eager_attention(step: Step, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """softmax(q·kᵀ/√d)·v written out: 5·a·s²·b bytes in 16-bit with dropout.

    Korthikanti et al. 2022, section 4.1.
    """
    shape, hold = step.structure, step.tape.hold
    k = hold(full_width(step, k))
    v = hold(full_width(step, v))
    products = matrix_product(step, as_factor(step, q), as_factor(step, k, shape.grouped), "b·a·s·s", "q·kᵀ")
    scores = hold(masked(step, ops.scaled(step, products), mask))
    upcast = shape.unfused and shape.norm == "rmsnorm" and (shape.autocast or shape.narrow)
    element = "4" if upcast else step.wide
    # CUDA's softmax of fp16 writes fp32 itself (SoftMax.cpp)
    if (shape.autocast or upcast) and not shape.loss_scaling:
        scores = ops.cast(step, scores, element)
    softmax = ops.softmax(step, scores, "softmax", "attention weights", element)
    if upcast:
        softmax = ops.cast(step, softmax, "c")
    weights = hold(ops.dropout(step, softmax, "attention weights"))
    factors = as_factor(step, weights, True), as_factor(step, v, shape.grouped)
    out = matrix_product(step, *factors, "sb·h", "weights·v")
    return ops.view(step, out) if shape.factors_are_views else ops.relaid(step, out)


@operation
def matrix_product(step: Step, x: Tensor, y: Tensor, shape: str, name: str) -> Tensor:
    """A batched matrix product: the gradient of each factor needs the other."""
    tape = step.tape
    x_size = x.size
    y_size = y.size
    saving = [
        Saving(x, name, "first factor", "gradient of the second"),
        Saving(y, name, "second factor", "gradient of the first"),
    ]

    def backward(_: list[Gradient]) -> list[Gradient | None]:
        for_y = tape.gradient(y_size)
        return [tape.gradient(x_size), for_y]

    saved = tape.save([x, y], saving)
    out = step.product("c", shape)
    tape.apply(out, [x, y], backward, saved=saved)
    return out


def as_factor(step: Step, x: Tensor, in_order: bool = False) -> Tensor:
    """A factor of a batched product: in 16 bits under autocast.

    It is copied, unless it is `in_order` or the batch is of one sequence or one head.
    """
    x = ops.lowered(step, x)
    if in_order or step.structure.factors_are_views:
        return ops.view(step, x)
    return ops.copied(step, x)


@operation
def masked(step: Step, x: Tensor, mask: Tensor) -> Tensor:
    """Scores with −∞ where a query may not look: saves the mask, one for all layers."""
    saving = [Saving(mask, "attention", "causal mask", "which scores get no gradient")]
    return ops.new_gradients(step, step.tape.tensor(x.element, x.shape), [x], saving)
