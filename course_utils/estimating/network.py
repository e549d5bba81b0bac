"""The course's network and its training step, told operation by operation as `networks/` and `measuring/step.py` run
them: the same order, and the same tensors held by the same variables.
"""

from collections.abc import Callable
from typing import Any

from .operations import (
    Step,
    Weight,
    add,
    cast,
    copied,
    dropout,
    frozen_linear,
    join,
    linear,
    lowered,
    multiply,
    negative,
    norm,
    pointwise,
    relaid,
    root,
    split,
    view,
)
from .recomputation import Offloading, checkpoint
from .structure import Structure
from .tape import Gradient, Saving, Tape, Tensor

Shared = list[Tensor]


def call(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a module: as in torch, whoever calls it holds its arguments until it returns."""
    return function(*arguments)


class Linear:
    """A linear layer's weights."""

    def __init__(self, step: Step, name: str, n_in: str, n_out: str, bias: bool, target: str = "") -> None:
        self.step, self.name, self.n_in, self.n_out = step, name, n_in, n_out
        self.weight = Weight(step, f"{n_in}·{n_out}")
        self.bias = Weight(step, n_out) if bias else None
        self.quantized = bool(target) and step.structure.frozen_bits in (4, 8)
        adapted = target in step.structure.lora
        self.factors = [Weight(step, shape, adapter=True) for shape in (f"{n_in}·R", f"R·{n_out}")] if adapted else []

    def __call__(self, x: Tensor) -> Tensor:
        if not self.factors:
            return self.base(x)
        step, (A, B), name = self.step, self.factors, self.name
        inner = linear(step, x, self.n_in, "R", A, None, f"{name}, LoRA's A")
        learned = linear(step, inner, "R", self.n_out, B, None, f"{name}, LoRA's B")
        del inner
        return add(step, call(self.base, x), learned)

    def base(self, x: Tensor) -> Tensor:
        """The layer itself, without what LoRA adds."""
        if self.quantized:
            return frozen_linear(self.step, x, self.n_in, self.n_out)
        return linear(self.step, x, self.n_in, self.n_out, self.weight, self.bias, self.name)


class Norm:
    """A norm's weights."""

    def __init__(self, step: Step, name: str) -> None:
        self.step, self.name = step, name
        both = step.structure.norm == "layernorm" and step.structure.bias
        self.weights = [Weight(step, "h") for _ in range(2 if both else 1)]

    def __call__(self, x: Tensor) -> Tensor:
        return norm(self.step, x, self.weights, self.name)


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
    return add(
        step,
        _turn(step, x, cosine),
        _turn(step, join(step, negative(step, second), first, x.shape), sine),
    )


def _turn(step: Step, x: Tensor, angles: Tensor) -> Tensor:
    return multiply(step, x, angles, "rotary positions", ("tensor", "cosine and sine"))


def full_width(step: Step, x: Tensor) -> Tensor:
    """Keys or values repeated, one of each for every query head."""
    return copied(step, x, "sb·h") if step.structure.grouped else x


def attention_core(step: Step, q: Tensor, k: Tensor, v: Tensor, mask: Shared) -> Tensor:
    """From q·kᵀ to weights·v, under a checkpoint of its own where that is what is run again."""
    arguments = (step, q, k, v, *mask) if step.structure.attention == "eager" else (step, q, k, v)
    core = eager_attention if step.structure.attention == "eager" else fused_attention
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
    saved = [
        *(Saving(x, "attention", name, "attention's backward") for x, name in zip((q, k, v), names, strict=True)),
        Saving(out, "attention", "output", "its backward, and the gradient of the next weights"),
        Saving(step.product("4", rows), "attention", "logsumexp", "softmax again, row by row"),
        Saving(step.product("16", "1"), "attention", "random seed", "drop the same again"),
        Saving(step.product("8", "1"), "attention", "random offset", "drop the same again"),
    ]
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
    return view(step, out) if step.structure.one_sequence else relaid(step, out)


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
    """A factor of a batched product: in 16 bits under autocast, copied unless it is `in_order` or of one sequence."""
    x = lowered(step, x)
    return view(step, x) if in_order or step.structure.one_sequence else copied(step, x)


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


class MLP:
    """GELU: 19·s·b·h bytes in 16-bit (Korthikanti et al. 2022, section 4.1). SwiGLU keeps four wide tensors."""

    def __init__(self, step: Step) -> None:
        self.step, bias = step, step.structure.bias
        self.gate = Linear(step, "gate", "h", "ffn", bias, "gate") if step.structure.mlp == "swiglu" else None
        self.up = Linear(step, "up", "h", "ffn", bias, "up")
        self.down = Linear(step, "down", "ffn", "h", bias, "down")

    def __call__(self, x: Tensor) -> Tensor:
        return dropout(self.step, call(self.down, self.inside(x)), "mlp output")

    def inside(self, x: Tensor) -> Tensor:
        """The wide tensor that the last matrix reads."""
        step = self.step
        if self.gate is None:
            return pointwise(step, call(self.up, x), "gelu", "derivative of GELU")
        gated = ("SiLU's output", "up's output")
        return multiply(
            step,
            pointwise(step, call(self.gate, x), "silu", "derivative of SiLU"),
            call(self.up, x),
            "gate · up",
            gated,
        )


class Block:
    """Norm, attention, residual; norm, MLP, residual."""

    def __init__(self, step: Step) -> None:
        self.step = step
        self.norm1, self.attention = Norm(step, "norm1"), Attention(step)
        self.norm2, self.mlp = Norm(step, "norm2"), MLP(step)

    def __call__(self, x: Tensor, shared: Shared) -> Tensor:
        x = add(self.step, x, call(self.attention, call(self.norm1, x), shared))
        return add(self.step, x, call(self.mlp, call(self.norm2, x)))


class Network:
    """The whole: embeddings, blocks in groups, final norm, head."""

    def __init__(self, step: Step) -> None:
        self.step, shape = step, step.structure
        self.embedding = Weight(step, "V·h")
        self.positions = Weight(step, "P·h")
        self.groups = [[Block(step) for _ in range(size)] for size in shape.groups]
        self.offloads: Offloading | None = None
        self.norm = Norm(step, "final norm")
        self.head = Linear(step, "head", "h", "V", bias=False)
        if shape.tied:
            self.head.weight = self.embedding

    def features(self) -> Tensor:
        """Everything before the head."""
        step, shape = self.step, self.step.structure
        x = embedded(step, self.embedding)
        if shape.positions == "learned":
            x = plus_positions(step, x, looked_up(step, self.positions, step.tape.tensor("8", "s")))
        x = dropout(step, x, "embedding")
        x = self.blocks(x, shared_by_blocks(step))
        step.tape.enter("head")
        return call(self.norm, x)

    def blocks(self, x: Tensor, shared: Shared) -> Tensor:
        """The blocks, group by group, keeping for backward what the run says."""
        step = self.step
        for number, blocks in enumerate(self.groups):
            step.tape.enter(("block", number, 0))
            if step.structure.recompute == "blocks":
                x = checkpoint(step, run_group, step, number, blocks, x, shared)
            elif step.structure.recompute == "selective":
                x = checkpoint(step, run_group, step, number, blocks, x, shared, keep_products=True)
            elif step.structure.recompute == "offload":
                with step.tape.packing(self.offloading(shared).pack):
                    x = run_group(step, number, blocks, x, shared)
            else:
                x = run_group(step, number, blocks, x, shared)
        return x

    def offloading(self, shared: Shared) -> Offloading:
        """One for all blocks, so that what they share in turn is copied once."""
        if self.offloads is None:
            self.offloads = Offloading(self.step, self.step.structure.is_small, shared)
        return self.offloads


def run_group(step: Step, number: int, blocks: list[Block], x: Tensor, shared: Shared) -> Tensor:
    """One group of blocks, one after the other."""
    for position, block in enumerate(blocks):
        if position:
            step.tape.enter(("block", number, position))
        x = call(block, x, shared)
    return x


def embedded(step: Step, table: Weight) -> Tensor:
    """Rows of the table, one a token. Its gradient is dense, V·h, though a batch touches few rows."""
    tape, back = step.tape, table.leaf.size
    out = tape.tensor(table.element, "sb·h")
    tape.apply(out, [table.leaf], [], lambda _: [tape.gradient(back)])
    return out


def looked_up(step: Step, table: Weight, indices: Tensor) -> Tensor:
    """Rows of the positions' table, one a position; keeps the indices."""
    tape, back = step.tape, table.leaf.size
    out = tape.tensor(table.element, "s·h")
    saved = [Saving(indices, "positions", "position indices", "which rows get a gradient")]
    tape.apply(out, [table.leaf], saved, lambda _: [tape.gradient(back)])
    return out


def plus_positions(step: Step, x: Tensor, positions: Tensor) -> Tensor:
    """Each sequence plus the positions, whose gradient is summed over the sequences."""
    out = step.tape.tensor(x.element, "sb·h")
    becomes = positions.size
    step.tape.apply(
        out, [x, positions], [], lambda gradients: [gradients[0].again(), gradients[0].again(True, becomes)]
    )
    return out


def shared_by_blocks(step: Step) -> Shared:
    """Made once for all blocks: the angles of rotary positions, the mask of eager attention."""
    angles = angles_of_positions(step) if step.structure.positions == "rotary" else []
    return [*angles, causal_mask(step)] if step.structure.attention == "eager" else angles


def causal_mask(step: Step) -> Tensor:
    """One byte a pair of tokens: all of them first, then those above the diagonal."""
    everything = step.tape.tensor("1", "s·s")
    above = step.tape.tensor("1", "s·s")
    del everything
    return above


def angles_of_positions(step: Step) -> Shared:
    """Cosine and sine of every position's angles."""
    return [step.tape.tensor("c", "s·d") for _ in range(2)]


def cross_entropy(step: Step, logits: Tensor) -> Tensor:
    """Log-softmax in the logits' type, which autocast copies to fp32 for the loss itself."""
    tape, size = step.tape, logits.size
    likelihoods = tape.tensor(logits.element, logits.shape)
    saved = [Saving(likelihoods, "log-softmax", "output", "gradient of the logits")]
    tape.apply(likelihoods, [logits], saved, lambda _: [tape.gradient(size)])
    read = cast(step, likelihoods, "4") if step.structure.autocast else likelihoods
    return negative_likelihood(step, read)


def negative_likelihood(step: Step, likelihoods: Tensor) -> Tensor:
    """The mean over the tokens; keeps what it read and the number of tokens."""
    tape, back = step.tape, likelihoods.size
    out, count = tape.tensor("4", "1"), tape.tensor("4", "1")
    saved = [
        Saving(likelihoods, "loss", "log-softmax", "gradient of the loss"),
        Saving(count, "loss", "weight of all tokens", "mean"),
    ]
    tape.apply(out, [likelihoods], saved, lambda _: [tape.gradient(back)])
    return out


def scaled(step: Step, x: Tensor) -> Tensor:
    """A number times or divided by another."""
    return negative(step, x)


def scaled_up(step: Step, loss: Tensor) -> Tensor:
    """The loss times the fp32 scale of a loss scaler; a 16-bit loss gets its gradient back in 16 bits."""
    tape = step.tape
    out = tape.tensor("4", "1")
    becomes = "" if step.structure.autocast else "c·1"
    tape.apply(out, [loss], [], lambda _: [Gradient(tape.make("4·1"), "4·1", becomes=becomes)])
    return out


def loss_phase(step: Step, network: Network) -> Tensor:
    """Forward and loss, as `Training._loss` runs them: the logits go when it returns."""
    tape = step.tape
    with step.autocast():
        out = call(network.head, network.features()) if step.structure.chunks == 1 else network.features()
        tape.phase = tape.place = "loss"
        tape.mark(("loss", "loss"))
        return scaled(step, mean_loss(step, network, out))


def mean_loss(step: Step, network: Network, out: Tensor) -> Tensor:
    """The loss of the logits; in pieces, of what the head reads."""
    if step.structure.chunks == 1:
        return cross_entropy(step, view(step, out))
    tape, number = step.tape, step.structure.chunks
    pieces = split(step, view(step, out), ["t·h"] * (number - 1) + ["u·h"])
    losses = []
    for position, piece in enumerate(pieces):
        tape.enter(("piece", position, 0))
        losses.append(checkpoint(step, share_of_loss, step, network.head, piece))
    tape.enter("loss")
    return summed(step, stacked(step, losses))


def share_of_loss(step: Step, head: Linear, piece: Tensor) -> Tensor:
    """What a piece of the tokens adds to the mean over all."""
    return scaled(step, cross_entropy(step, call(head, piece)))


def stacked(step: Step, numbers: list[Tensor]) -> Tensor:
    """The pieces' losses in one tensor; their gradients are views of its."""
    out = step.tape.tensor("4", "pieces")
    count = len(numbers)
    step.tape.apply(out, numbers, [], lambda came: [came[0].again(view=True) for _ in range(count)])
    return out


def summed(step: Step, x: Tensor) -> Tensor:
    """Their sum; its gradient is seen by all of them."""
    out = step.tape.tensor("4", "1")
    step.tape.apply(out, [x], [], lambda came: [came[0].again(view=True)])
    return out


def tell(structure: Structure) -> Tape:
    """The tape of forward, loss and backward of one micro-batch."""
    step = Step(structure)
    network = Network(step)
    tape = step.tape
    loss = loss_phase(step, network)
    tape.phase = "backward"
    tape.mark(("backward", "loss"))
    top = scaled_up(step, loss) if structure.loss_scaling else loss
    ones = Gradient(tape.make("4·1"), "4·1")
    tape.backward(root(top), ones.again())
    del ones, loss, top  # held until backward has ended
    return tape
