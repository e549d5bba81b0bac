"""Layers with weights, as `networks/` has them: linear layers with LoRA's factors, norms, MLPs."""

from collections.abc import Callable
from typing import Any

from .operations import Step, Weight, add, dropout, frozen_linear, linear, multiply, norm, pointwise
from .tape import Tensor


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


class MLP:
    """GELU: 19·s·b·h bytes in 16-bit (Korthikanti et al. 2022, section 4.1). SwiGLU keeps four wide tensors."""

    def __init__(self, step: Step, expert: bool = False) -> None:
        self.step, self.expert, bias = step, expert, step.structure.bias
        self.gate = Linear(step, "gate", "h", "ffn", bias, "gate") if step.structure.mlp == "swiglu" else None
        self.up = Linear(step, "up", "h", "ffn", bias, "up")
        self.down = Linear(step, "down", "ffn", "h", bias, "down")

    def __call__(self, x: Tensor) -> Tensor:
        out = call(self.down, self.inside(x))
        return out if self.expert else dropout(self.step, out, "mlp output")

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
