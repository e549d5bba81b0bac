"""The operations of a transformer as autograd sees them.

That is what they allocate, save for backward, and allocate in backward.

Each function stands for one of torch's and saves what that function's derivative needs
(torch/tools/autograd/derivatives.yaml). `Step` holds what they share within one step.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from ..workspaces import installed_torch
from .structure import Structure
from .tape import Gradient, Saving, Storage, Tape, Tensor, operation


class Step:
    """One training step on its tape.

    It has its structure, autocast's cache of weights, and what selective recomputation keeps.
    """

    def __init__(self, structure: Structure) -> None:
        self.tape = Tape()
        self.structure = structure
        self.wide = "r" if structure.autocast else "c"  # the type of weights and of the residual stream
        self.copies: dict[Weight, Tensor] = {}
        self.kept_products: list[Storage] | None = None
        self.found_products: list[Storage] | None = None

    @contextmanager
    def autocast(self) -> Iterator[None]:
        """Inside, weights are cast once; the copies that no node saved are freed at the end."""
        before = self.copies
        self.copies = {}
        yield
        for copy in self.copies.values():
            copy.storage.release()
        self.copies = before

    def product(self, element: str, shape: str) -> Tensor:
        """The result of a matrix product or of attention.

        It is what selective recomputation keeps, and then finds again.
        """
        if self.found_products:
            return self.tape.tensor(element, shape, storage=self.found_products.pop(0))
        made = self.tape.tensor(element, shape)
        if self.kept_products is not None:
            self.kept_products.append(made.storage.retain())
        return made


class Module:
    """A part of the network with weights; `__call__` mirrors `forward` of the module in `networks/`."""

    def __init__(self, step: Step) -> None:
        self.step = step
        self.tape = step.tape
        self.structure = step.structure


class Weight(Module):
    """A parameter of `shape` elements. Its gradient, once there, stays until the optimizer has used it."""

    def __init__(self, step: Step, shape: str, adapter: bool = False) -> None:
        super().__init__(step)
        self.shape = shape
        self.gradient: Storage | None = None
        self.used = False
        trained = adapter or not step.structure.lora
        self.element = "c" if step.structure.frozen_bits and not adapter else step.wide
        self.leaf = step.tape.leaf(self.element, shape, self.accumulate if trained else None)

    def use(self) -> Tensor:
        """The weight as an operation's input.

        The gradient that earlier micro-batches left besides the buckets is counted here, at the weight's
        first use, as part of the block that uses it. It is freed when the last micro-batch's is added and
        copied to its bucket.
        """
        if self.structure.unsynchronized and not self.used:
            self.gradient = self.tape.make(self.leaf.size, "gradients")
        self.used = True
        return self.leaf

    def accumulate(self, gradient: Gradient) -> None:
        """Take the first micro-batch's gradient as it is; add any later one to it."""
        shape = self.structure
        before = self.gradient
        self.gradient = None
        goes_elsewhere = shape.accumulates or shape.main_gradients
        if shape.copied_to_buckets or not goes_elsewhere:
            gradient.storage.kind = "gradients"
        if shape.main_gradients and not shape.accumulates:  # copied to fp32 at once; the 16-bit one is freed
            self.gradient = self.tape.make(f"4·{self.shape}", "gradients")
        elif not shape.accumulates:
            self.gradient = gradient.storage.retain()
        if before is not None:
            before.release()


def new_gradients(step: Step, out: Tensor, inputs: Sequence[Tensor], saving: Iterable[Saving] = ()) -> Tensor:
    """`out`, the result of an operation whose backward allocates a gradient for each input that needs one."""
    tape = step.tape
    sizes = [x.size if x.edge else "" for x in inputs]
    tape.apply(out, inputs, lambda _: [tape.gradient(size) if size else None for size in sizes], saving)
    return out


def way_back(step: Step, out: Tensor, x: Tensor, sizes: Sequence[str], saving: Saving) -> Tensor:
    """`out`, an operation's result whose backward makes tensors of these `sizes` for the gradient of x."""
    tape = step.tape
    size = x.size

    def backward(_: list[Gradient]) -> list[Gradient | None]:
        made = [tape.make(each) for each in sizes]
        gradient = tape.gradient(size)
        for storage in made:
            storage.release()
        return [gradient]

    tape.apply(out, [x], backward, [saving])
    return out


def same_gradient(step: Step, out: Tensor, inputs: Sequence[Tensor], view: bool = False) -> Tensor:
    """`out`, the result of an operation whose backward passes its gradient on.

    It does so as a `view`, or in each input's size, cast to its type or summed over what was repeated.
    """
    sizes = ["" if view or x.size == out.size else x.size for x in inputs]
    step.tape.apply(out, inputs, lambda came: [came[0].again(view, size) for size in sizes])
    return out


@operation
def view(step: Step, x: Tensor) -> Tensor:
    """The same storage in another shape; its gradient likewise."""
    return same_gradient(step, step.tape.view(x), [x])


@operation
def relaid(step: Step, x: Tensor) -> Tensor:
    """A view that splits or joins heads: its gradient comes in another order of memory, and is copied."""
    return new_gradients(step, step.tape.view(x), [x])


@operation
def transposed(step: Step, weight: Tensor) -> Tensor:
    """`weight.t()`: its gradient is a view."""
    return same_gradient(step, step.tape.view(weight), [weight], view=True)


@operation
def cast(step: Step, x: Tensor, element: str, kind: str = "") -> Tensor:
    """`x.to(dtype)`: a copy; its gradient is cast back."""
    return new_gradients(step, step.tape.tensor(element, x.shape, kind), [x])


def lowered(step: Step, x: Tensor) -> Tensor:
    """`x` as matrix products take it: under autocast in 16 bits."""
    if step.structure.autocast and x.element != "c":
        return cast(step, x, "c")
    return x


def weight_as_used(step: Step, weight: Weight) -> Tensor:
    """A weight as matrix products take it.

    Autocast casts it once for all its uses, but only if it is trained.
    """
    leaf = weight.use()
    if not step.structure.autocast or weight.element == "c":
        return leaf
    if weight in step.copies:
        return step.copies[weight]
    copy = cast(step, leaf, "c", "weight_copies")
    if leaf.edge is not None:
        copy.storage.retain()
        step.copies[weight] = copy
    return copy


@operation
def linear(
    step: Step, x: Tensor, n_in: str, n_out: str, weight: Weight, bias: Weight | None, name: str
) -> Tensor:
    """y = x·Wᵀ + bias: dL/dW needs x, dL/dx needs W, dL/dbias is dL/dy summed over the tokens."""
    tape = step.tape
    tokens = x.shape.removesuffix(f"·{n_in}")
    # C++ evaluates arguments from the last to the first: the bias, the matrix, x.
    bias_used = [weight_as_used(step, bias)] if bias else []
    matrix = weight_as_used(step, weight)
    x_used = lowered(step, x)
    turned = transposed(step, matrix)
    x_size = x_used.size
    matrix_size = turned.size
    bias_size = f"c·{n_out}"
    x_edge, matrix_edge = x_used.edge, turned.edge
    input_name = "input" if x_used is x else "input, cast to 16-bit"
    saving = []
    if matrix_edge:
        saving.append(Saving(x_used, name, input_name, "gradient of its weights"))
    if x_edge:
        saving.append(Saving(turned, name, "weight", "gradient of its input"))
    inputs = [*bias_used, x_used, turned]
    saved = tape.save(inputs, saving)
    out = step.product("c", f"{tokens}·{n_out}")

    def backward(gradients: list[Gradient]) -> list[Gradient | None]:
        # torch computes them in the alphabetical order of its names: with a bias x is mat1 and the matrix
        # mat2; without one x is self, and comes after mat2.
        of_all_tokens = tokens == "sb"  # its gradient is a view, (b, s, …), of that matrix
        for_x = None
        for_matrix = None
        if x_edge and bias:
            for_x = tape.gradient(x_size, of_all_tokens)
        if matrix_edge:
            for_matrix = tape.gradient(matrix_size)
        if x_edge and not bias:
            for_x = tape.gradient(x_size, of_all_tokens)
        for_bias = [gradients[0].again(becomes=bias_size) for _ in bias_used]
        return [*for_bias, for_x, for_matrix]

    tape.apply(out, inputs, backward, saved=saved)
    return out


@operation
def frozen_linear(step: Step, x: Tensor, n_in: str, n_out: str) -> Tensor:
    """A product with a weight stored in 8 or 4 bits.

    It is made 16-bit for it in forward and in backward, kept in neither.
    """
    tape = step.tape
    tokens = x.shape.removesuffix(f"·{n_in}")
    x = lowered(step, x)
    dense = dequantized(step, n_in, n_out)
    out = step.product("c", f"{tokens}·{n_out}")
    x_size = x.size
    dense.release()

    def backward(_: list[Gradient]) -> list[Gradient | None]:
        dense = dequantized(step, n_in, n_out)
        gradient = tape.gradient(x_size)
        dense.release()
        return [gradient]

    tape.apply(out, [x], backward)
    return out


def dequantized(step: Step, n_in: str, n_out: str) -> Storage:
    """The 16-bit weight; from 4 bits by way of an index of 4 bytes for each byte, which is two weights."""
    if step.structure.frozen_bits != 4:
        return step.tape.make(f"c·{n_in}·{n_out}")
    index = step.tape.make(f"2·{n_in}·{n_out}")
    dense = step.tape.make(f"c·{n_in}·{n_out}")
    index.release()
    return dense


@operation
def norm(step: Step, x: Tensor, weights: list[Weight], name: str) -> Tensor:
    """LayerNorm or RMSNorm, one kernel each: its input and fp32 statistics are saved.

    Statistics are one or two numbers per token.

    Autocast computes both in fp32, frozen 16-bit weights or not; RMSNorm from torch 2.12 on (pytorch's issue
    188955).
    """
    tape = step.tape
    centered = step.structure.norm == "layernorm"
    used = [weight.use() for weight in weights]
    if step.structure.autocast and x.element == "c" and (centered or installed_torch() >= (2, 12)):
        # From the last to the first, as C++ evaluates arguments.
        backwards = [cast(step, leaf, "r", "weight_copies") for leaf in reversed(used)]
        used = backwards[::-1]
        x = cast(step, x, "r")
    out = tape.tensor(x.element, x.shape)
    names = ("mean", "inverse deviation") if centered else ("inverse root mean square",)
    saving = [Saving(x, name, "input", "normalize again")]
    saving += [Saving(tape.tensor("4", "sb"), name, statistic, "normalize again") for statistic in names]
    saving += [Saving(leaf, name, "weight", "gradient of its input") for leaf in used]
    return new_gradients(step, out, [x, *used], saving)


@operation
def dropout(step: Step, x: Tensor, where: str) -> Tensor:
    """Saves one byte per element that says what was dropped; where nothing is dropped, nothing happens."""
    if not step.structure.dropout:
        return x
    out = step.tape.tensor(x.element, x.shape)
    mask = step.tape.tensor("1", x.shape)
    return new_gradients(step, out, [x], [Saving(mask, where, "dropout mask", "drop the same again")])


@operation
def add(step: Step, x: Tensor, y: Tensor) -> Tensor:
    """x + y in the wider type: both get the one gradient, cast for the one that is narrower."""
    return same_gradient(step, step.tape.tensor(x.element, x.shape), [x, y])


@operation
def pointwise(step: Step, x: Tensor, name: str, why: str) -> Tensor:
    """An activation function: saves its input."""
    return new_gradients(step, step.tape.tensor(x.element, x.shape), [x], [Saving(x, name, "input", why)])


@operation
def scaled(step: Step, x: Tensor) -> Tensor:
    """x times, or divided by, a number; or −x: saves nothing."""
    return new_gradients(step, step.tape.tensor(x.element, x.shape), [x])


@operation
def softmax(step: Step, x: Tensor, name: str, what: str, element: str = "") -> Tensor:
    """Save the output, in the type of x or `element`.

    Backward begins with the product of the output and the gradient (softmax_backward_cuda_out).
    """
    out = step.tape.tensor(element or x.element, x.shape)
    return way_back(step, out, x, [out.size], Saving(out, name, what, "softmax's own backward"))


@operation
def keeps_output(step: Step, x: Tensor, name: str, what: str, why: str) -> Tensor:
    """Log-softmax or tanh, whose derivative is written with the output: saves that."""
    out = step.tape.tensor(x.element, x.shape)
    return new_gradients(step, out, [x], [Saving(out, name, what, why)])


@operation
def multiply(step: Step, x: Tensor, y: Tensor, name: str, names: tuple[str, str]) -> Tensor:
    """x · y, element by element, in the wider type and the longer shape.

    The gradient of each needs the other, and is cast or summed for what is narrower or shorter.
    """
    tape = step.tape
    widest = max((x.element, y.element), key="cr4".index)  # "c" is the narrowest type, fp32 the widest
    out = tape.tensor(widest, max(x.shape, y.shape, key=len))  # the longer formula is the larger tensor's
    saving = []
    if y.edge:
        saving.append(Saving(x, name, names[0], f"gradient of {names[1]}"))
    if x.edge:
        saving.append(Saving(y, name, names[1], f"gradient of {names[0]}"))
    whole = out.size
    sizes = [one.size if one.edge else "" for one in (x, y)]

    def backward(_: list[Gradient]) -> list[Gradient | None]:
        gradients: list[Gradient | None] = []
        for size in sizes:
            if not size:
                gradients.append(None)
            elif size == whole:
                gradients.append(tape.gradient(whole))
            else:
                gradients.append(tape.gradient(whole, becomes=size))
        return gradients

    tape.apply(out, [x, y], backward, saving)
    return out


@operation
def split(step: Step, x: Tensor, shapes: list[str]) -> list[Tensor]:
    """Views of the parts of x; backward puts their gradients together in one tensor."""
    tape = step.tape
    size = x.size
    parts = [tape.view(x, shape) for shape in shapes]
    tape.apply(parts, [x], lambda _: [tape.gradient(size)])
    return parts


@operation
def join(step: Step, first: Tensor, second: Tensor, shape: str) -> Tensor:
    """Two tensors side by side; their gradients are views of its."""
    return same_gradient(step, step.tape.tensor(first.element, shape), [first, second], view=True)


@operation
def copied(step: Step, x: Tensor, shape: str = "") -> Tensor:
    """A copy in another layout, whose gradient is passed on.

    It may also be a copy of repeated elements, whose gradients are summed.
    """
    return same_gradient(step, step.tape.tensor(x.element, shape or x.shape), [x])
