"""The operations of a transformer as autograd sees them: what each makes, keeps for backward, and makes in backward.

Each function stands for one of torch's and says of its tensors what that function's derivative needs
(torch/tools/autograd/derivatives.yaml). `Step` holds what they share within one step.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from .structure import Structure
from .tape import Gradient, Node, Saving, Storage, Tape, Tensor


class Weight:
    """A parameter of `shape` elements. Its gradient, once there, stays until the optimizer has used it."""

    def __init__(self, step: "Step", shape: str, adapter: bool = False) -> None:
        self.step, self.shape = step, shape
        self.gradient: Storage | None = None
        self.stood = False
        trained = adapter or not step.structure.lora
        self.element = "c" if step.structure.frozen_bits and not adapter else step.wide
        self.leaf = step.tape.leaf(self.element, shape, self.accumulate) if trained else Tensor(self.element, shape)

    def stand(self) -> None:
        """A gradient that earlier micro-batches left, which goes when the last one's is added and copied to its bucket.

        It is told at the weight's first use, as part of the block that uses it.
        """
        if self.step.structure.unsynchronized and not self.stood:
            self.stood = True
            self.gradient = self.step.tape.make(f"{self.element}·{self.shape}", "gradients")

    def accumulate(self, gradient: Gradient) -> None:
        """Take the first micro-batch's gradient as it is; add any later one to it."""
        if self.step.structure.copied_to_buckets:
            gradient.storage.record.kind = "gradients"
        if self.step.structure.accumulates:
            self.gradient = None
            return
        if self.step.structure.main_gradients:  # copied to fp32 at once; the 16-bit one goes
            self.gradient = self.step.tape.make(f"4·{self.shape}", "gradients")
        else:
            gradient.storage.record.kind = "gradients"
            self.gradient = gradient.storage


class Step:
    """One training step being told: its tape, its structure, autocast's cache of weights."""

    def __init__(self, structure: Structure) -> None:
        self.tape, self.structure = Tape(), structure
        self.wide = "r" if structure.autocast else "c"  # the type of weights and of the residual stream
        self.copies: dict[Weight, Tensor] = {}
        self.kept_products: list[Storage] | None = None
        self.replayed_products: list[Storage] | None = None

    @contextmanager
    def autocast(self) -> Iterator[None]:
        """Inside, weights are cast once; the copies that nobody saved go at the end."""
        before, self.copies = self.copies, {}
        yield
        self.copies = before

    def product(self, element: str, shape: str) -> Tensor:
        """The result of a matrix product or of attention: what selective recomputation keeps, and then finds again."""
        if self.replayed_products:
            return Tensor(element, shape, self.replayed_products.pop(0))
        made = self.tape.tensor(element, shape)
        if self.kept_products is not None and made.storage is not None:
            self.kept_products.append(made.storage)
        return made


def view(step: Step, x: Tensor) -> Tensor:
    """The same storage seen otherwise; so is its gradient."""
    out = Tensor(x.element, x.shape, x.storage)
    step.tape.apply(out, [x], [], lambda gradients: [gradients[0].again()])
    return out


def relaid(step: Step, x: Tensor) -> Tensor:
    """A view that splits or joins heads: its gradient comes in another order of memory and has to be copied."""
    tape, back = step.tape, x.size
    out = Tensor(x.element, x.shape, x.storage)
    tape.apply(out, [x], [], lambda _: [tape.gradient(back)])
    return out


def cast(step: Step, x: Tensor, element: str, kind: str = "") -> Tensor:
    """`x.to(dtype)`: a copy; its gradient is cast back."""
    tape = step.tape
    out = Tensor(element, x.shape, tape.make(f"{element}·{x.shape}", kind))
    back = x.size
    tape.apply(out, [x], [], lambda _: [tape.gradient(back)])
    return out


def lowered(step: Step, x: Tensor) -> Tensor:
    """`x` as matrix products take it: under autocast in 16 bits."""
    return cast(step, x, "c") if step.structure.autocast and x.element != "c" else x


def weight_as_used(step: Step, weight: Weight) -> Tensor:
    """A weight as matrix products take it: autocast casts it once for all its uses, but only if it is trained."""
    weight.stand()
    if not step.structure.autocast or weight.element == "c":
        return weight.leaf
    if weight in step.copies:
        return step.copies[weight]
    copy = cast(step, weight.leaf, "c", "weight_copies")
    if weight.leaf.node is not None:
        step.copies[weight] = copy
    return copy


def transposed(step: Step, weight: Tensor) -> Tensor:
    """`weight.t()`: its gradient is a view."""
    out = Tensor(weight.element, weight.shape, weight.storage)
    step.tape.apply(out, [weight], [], lambda gradients: [gradients[0].again(view=True)])
    return out


def linear(step: Step, x: Tensor, n_in: str, n_out: str, weight: Weight, bias: Weight | None, name: str) -> Tensor:
    """y = x·Wᵀ + bias: dL/dW needs x, dL/dx needs W, dL/dbias is dL/dy summed over the tokens."""
    tape, tokens = step.tape, x.shape.removesuffix(f"·{n_in}")
    bias_used = weight_as_used(step, bias) if bias else None  # C++ evaluates arguments from the last to the first
    matrix = weight_as_used(step, weight)
    x_used = lowered(step, x)
    turned = transposed(step, matrix)
    back, matrix_back, bias_back = x_used.size, matrix.size, f"c·{n_out}"
    needs_x, needs_matrix = x_used.node is not None, matrix.node is not None
    saved = [Saving(x_used, name, "input" if x_used is x else "input, cast to 16-bit", "gradient of its weights")]
    saved = (saved if needs_matrix else []) + (
        [Saving(turned, name, "weight", "gradient of its input")] if needs_x else []
    )
    inputs = [*([bias_used] if bias_used else []), x_used, turned]
    kept = tape.keep(inputs, saved)
    out = step.product("c", f"{tokens}·{n_out}")

    def backward(gradients: list[Gradient]) -> list[Gradient | None]:
        # torch computes them in the alphabetical order of its names: mat1 and mat2 with a bias, else mat2 and self
        first = tape.gradient(back) if needs_x and bias else None
        for_matrix = tape.gradient(matrix_back) if needs_matrix else None
        for_x = tape.gradient(back) if needs_x and not bias else first
        if for_x is not None:
            for_x.view = tokens == "sb"  # (b, s, …) seen from the matrix of all tokens
        return [*([gradients[0].again(becomes=bias_back)] if bias else []), for_x, for_matrix]

    tape.apply(out, inputs, [], backward, kept)
    return out


def frozen_linear(step: Step, x: Tensor, n_in: str, n_out: str) -> Tensor:
    """A product with a weight stored in 8 or 4 bits: made 16-bit for it in forward and in backward, kept in neither."""
    tape, tokens = step.tape, x.shape.removesuffix(f"·{n_in}")
    x = lowered(step, x)
    dense = dequantized(step, n_in, n_out)
    out, back = step.product("c", f"{tokens}·{n_out}"), x.size
    del dense

    def backward(_: list[Gradient]) -> list[Gradient | None]:
        dense = dequantized(step, n_in, n_out)
        gradient = tape.gradient(back)
        del dense
        return [gradient]

    tape.apply(out, [x], [], backward)
    return out


def dequantized(step: Step, n_in: str, n_out: str) -> Storage:
    """The 16-bit weight; from 4 bits by way of an index of 4 bytes for each byte, which is two weights."""
    index = step.tape.make(f"2·{n_in}·{n_out}") if step.structure.frozen_bits == 4 else None
    dense = step.tape.make(f"c·{n_in}·{n_out}")
    del index
    return dense


def norm(step: Step, x: Tensor, weights: list[Weight], name: str) -> Tensor:
    """LayerNorm or RMSNorm, one kernel each: its input and fp32 statistics, one or two numbers a token, are kept."""
    tape, centered = step.tape, step.structure.norm == "layernorm"
    for weight in weights:
        weight.stand()
    used = [weight.leaf for weight in weights]
    if step.structure.autocast and x.element == "c":  # norms are computed in fp32, frozen 16-bit weights or not
        used = [cast(step, leaf, "r", "weight_copies") for leaf in reversed(used)][::-1]
        x = cast(step, x, "r")
    out = tape.tensor(step.wide, x.shape)
    names = ("mean", "inverse deviation") if centered else ("inverse root mean square",)
    statistics = [Saving(tape.tensor("4", "sb"), name, statistic, "normalize again") for statistic in names]
    back, own_back = x.size, [leaf.size for leaf in used if leaf.node]
    needs_x = x.node is not None

    def backward(_: list[Gradient]) -> list[Gradient | None]:
        for_x = tape.gradient(back) if needs_x else None
        own = [tape.gradient(size) for size in own_back]
        return [for_x, *(own or [None] * len(weights))]

    saved = [Saving(x, name, "input", "normalize again"), *statistics]
    saved += [Saving(leaf, name, "weight", "gradient of its input") for leaf in used]
    tape.apply(out, [x, *used], saved, backward)
    return out


def dropout(step: Step, x: Tensor, where: str) -> Tensor:
    """Keeps one byte an element that says what was dropped; where nothing is dropped, nothing happens."""
    if not step.structure.dropout:
        return x
    tape = step.tape
    out, mask, back = tape.tensor(x.element, x.shape), tape.tensor("1", x.shape), x.size
    tape.apply(out, [x], [Saving(mask, where, "dropout mask", "drop the same again")], lambda _: [tape.gradient(back)])
    return out


def add(step: Step, x: Tensor, y: Tensor) -> Tensor:
    """x + y in the wider type: both get the one gradient, cast for the one that is narrower."""
    out = step.tape.tensor(x.element, x.shape)
    becomes = "" if x.element == y.element else y.size
    step.tape.apply(out, [x, y], [], lambda gradients: [gradients[0].again(), gradients[0].again(becomes=becomes)])
    return out


def pointwise(step: Step, x: Tensor, operation: str, why: str) -> Tensor:
    """An activation function: keeps its input."""
    tape, back = step.tape, x.size
    out = tape.tensor(x.element, x.shape)
    tape.apply(out, [x], [Saving(x, operation, "input", why)], lambda _: [tape.gradient(back)])
    return out


def negative(step: Step, x: Tensor) -> Tensor:
    """-x: keeps nothing."""
    tape, back = step.tape, x.size
    out = tape.tensor(x.element, x.shape)
    tape.apply(out, [x], [], lambda _: [tape.gradient(back)])
    return out


def multiply(step: Step, x: Tensor, y: Tensor, operation: str, names: tuple[str, str]) -> Tensor:
    """x · y, element by element: the gradient of each needs the other."""
    tape = step.tape
    out = tape.tensor(x.element, x.shape)
    needs = [tensor.size if tensor.node is not None else "" for tensor in (x, y)]
    saved = [Saving(x, operation, names[0], f"gradient of {names[1]}")] if needs[1] else []
    saved += [Saving(y, operation, names[1], f"gradient of {names[0]}")] if needs[0] else []
    tape.apply(out, [x, y], saved, lambda _: [tape.gradient(size) if size else None for size in needs])
    return out


def split(step: Step, x: Tensor, shapes: list[str]) -> list[Tensor]:
    """Views of the parts of x; backward puts their gradients together in one tensor."""
    tape, back = step.tape, x.size
    parts = [Tensor(x.element, shape, x.storage) for shape in shapes]
    tape.apply(parts, [x], [], lambda _: [tape.gradient(back)])
    return parts


def join(step: Step, first: Tensor, second: Tensor, shape: str) -> Tensor:
    """Two tensors side by side; their gradients are views of its."""
    out = step.tape.tensor(first.element, shape)
    step.tape.apply(out, [first, second], [], lambda gradients: [gradients[0].again(True), gradients[0].again(True)])
    return out


def copied(step: Step, x: Tensor, shape: str = "") -> Tensor:
    """A copy in another layout, whose gradient is passed on, or of repeated elements, whose gradients are summed."""
    out = step.tape.tensor(x.element, shape or x.shape)
    becomes = x.size if shape and shape != x.shape else ""
    step.tape.apply(out, [x], [], lambda gradients: [gradients[0].again(becomes=becomes)])
    return out


def root(tensor: Tensor) -> Node:
    """Where backward begins."""
    assert isinstance(tensor.node, Node)
    return tensor.node
