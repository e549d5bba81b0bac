"""Layers with weights, as `networks/` has them: linear layers with LoRA's factors, norms, MLPs."""

from .operations import Module, Step, Weight, add, dropout, frozen_linear, linear, multiply, norm, pointwise
from .tape import Tensor, operation
from .unfused import unfused_gelu, unfused_norm


class Linear(Module):
    """A linear layer; with LoRA's factors it is the base layer's result plus theirs."""

    def __init__(self, step: Step, name: str, n_in: str, n_out: str, bias: bool, target: str = "") -> None:
        super().__init__(step)
        self.name = name
        self.n_in = n_in
        self.n_out = n_out
        self.weight = Weight(step, f"{n_in}·{n_out}")
        self.bias = Weight(step, n_out) if bias else None
        self.quantized = bool(target) and step.structure.frozen_bits in (4, 8)
        self.factors: list[Weight] = []
        if target in step.structure.lora:
            self.factors = [Weight(step, shape, adapter=True) for shape in (f"{n_in}·R", f"R·{n_out}")]

    def __call__(self, x: Tensor) -> Tensor:
        if self.factors:
            return self.adapted(x)
        return self.base(x)

    def base(self, x: Tensor) -> Tensor:
        """The layer itself, without what LoRA adds."""
        if self.quantized:
            return frozen_linear(self.step, x, self.n_in, self.n_out)
        return linear(self.step, x, self.n_in, self.n_out, self.weight, self.bias, self.name)

    @operation
    def adapted(self, x: Tensor) -> Tensor:
        """The layer's output, plus LoRA's part."""
        step = self.step
        name = self.name
        A, B = self.factors
        inner = linear(step, x, self.n_in, "R", A, None, f"{name}, LoRA's A")
        learned = linear(step, inner, "R", self.n_out, B, None, f"{name}, LoRA's B")
        return add(step, self.base(x), learned)


class Norm(Module):
    """A norm."""

    def __init__(self, step: Step, name: str) -> None:
        super().__init__(step)
        self.name = name
        self.weights = [Weight(step, "h")]
        if step.structure.norm == "layernorm" and step.structure.bias:
            self.weights.append(Weight(step, "h"))

    def __call__(self, x: Tensor) -> Tensor:
        if self.structure.unfused and self.structure.norm == "rmsnorm":
            return unfused_norm(self.step, x, self.weights[0], self.name)
        return norm(self.step, x, self.weights, self.name)


class MLP(Module):
    """The MLP: GELU keeps 19·s·b·h bytes in 16-bit, SwiGLU four wide tensors.

    Korthikanti et al. 2022, section 4.1.
    """

    def __init__(self, step: Step, expert: bool = False) -> None:
        super().__init__(step)
        self.expert = expert
        bias = step.structure.bias
        self.gate = Linear(step, "gate", "h", "ffn", bias, "gate") if step.structure.mlp == "swiglu" else None
        self.up = Linear(step, "up", "h", "ffn", bias, "up")
        self.down = Linear(step, "down", "ffn", "h", bias, "down")

    @operation
    def __call__(self, x: Tensor) -> Tensor:
        step = self.step
        if self.gate:
            gate = pointwise(step, self.gate(x), "silu", "derivative of SiLU")
            wide = multiply(step, gate, self.up(x), "gate · up", ("SiLU's output", "up's output"))
        else:
            up = self.up(x)
            if step.structure.unfused:
                wide = unfused_gelu(step, up)
            else:
                wide = pointwise(step, up, "gelu", "derivative of GELU")
        out = self.down(wide)
        return out if self.expert else dropout(step, out, "mlp output")
