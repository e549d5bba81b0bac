"""GELU and RMSNorm in single operations, as `networks/unfused.py` has them."""

from .operations import (
    Step,
    Weight,
    add,
    cast,
    keeps_output,
    multiply,
    new_gradients,
    same_gradient,
    scaled,
    way_back,
)
from .tape import Saving, Tensor, operation


def is_narrow(step: Step, x: Tensor) -> bool:
    """True for a tensor of 16 bits."""
    if step.structure.narrow:
        return x.element != "4"
    return step.structure.autocast and x.element == "c"


@operation
def unfused_gelu(step: Step, x: Tensor) -> Tensor:
    """½·x·(1 + tanh(√(2/π)·(x + 0.044715·x³))). Autocast computes powers in fp32, and all that follows."""
    half = scaled(step, x)
    wide = cast(step, x, "4") if is_narrow(step, x) and step.structure.autocast else x
    inner = scaled(step, add(step, scaled(step, power(step, wide, "gelu")), x))
    bent = keeps_output(step, inner, "gelu", "tanh", "derivative of tanh")
    return multiply(step, half, shifted(step, bent), "gelu", ("half of its input", "1 + tanh"))


@operation
def unfused_norm(step: Step, x: Tensor, weight: Weight, name: str) -> Tensor:
    """w · x/√(mean(x²) + ε), in fp32 but for the last product."""
    narrow = is_narrow(step, x)
    wide = step.tape.hold(cast(step, x, "4")) if narrow else x
    square = step.tape.hold(mean(step, power(step, wide, name)))
    root = inverse_root(step, shifted(step, square), name)
    normed = multiply(step, wide, root, name, ("input", "inverse root"))
    used = cast(step, normed, x.element) if narrow else normed
    return multiply(step, weight.use(), used, name, ("weight", "normed input"))


@operation
def power(step: Step, x: Tensor, name: str) -> Tensor:
    """x to a power n: saves x.

    Backward is n·xⁿ⁻¹ times the gradient, with two tensors on the way (pow_backward).
    """
    out = step.tape.tensor(x.element, x.shape)
    return way_back(step, out, x, [x.size] * 2, Saving(x, name, "input", "derivative of a power"))


@operation
def inverse_root(step: Step, x: Tensor, name: str) -> Tensor:
    """1/√x: saves its output, and cubes it in backward (derivatives.yaml, rsqrt)."""
    out = step.tape.tensor(x.element, x.shape)
    return way_back(step, out, x, [x.size] * 2, Saving(out, name, "inverse root", "derivative of a root"))


@operation
def shifted(step: Step, x: Tensor) -> Tensor:
    """x plus a number: its gradient is passed on."""
    return same_gradient(step, step.tape.tensor(x.element, x.shape), [x])


@operation
def mean(step: Step, x: Tensor) -> Tensor:
    """Over each token's elements."""
    return new_gradients(step, step.tape.tensor(x.element, "sb"), [x])
