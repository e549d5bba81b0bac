"""The optimizers that a TrainingRun can name: torch's own where it has them, else short versions."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor

from ..estimating.states import BLOCK_8BIT, PIECE_8BIT, SMALL_8BIT, is_hidden_matrix
from ..run import Optimizer
from .patching import on_this_thread

Named = Sequence[tuple[str, torch.nn.Parameter]]
Moments = tuple[torch.Tensor, torch.Tensor]

LEARNING_RATES = {"sgd": 1e-2, "momentum": 1e-2, "lion": 1e-4, "adafactor": 1e-2, "muon": 1e-2}
"""Rates at which the course's small models learn; every other optimizer takes 3e-4."""


def make_optimizer(
    choice: Optimizer, named: Named, codebooks: "Codebooks | None" = None
) -> torch.optim.Optimizer:
    """An optimizer of the named parameters as `choice` says.

    `codebooks` are those of the 8-bit optimizer, which makes its own if none are given.
    """
    tensors = [tensor for _, tensor in named]
    rate = LEARNING_RATES.get(choice.algorithm, 3e-4)
    way = choice.implementation
    how: dict[str, Any] = {"fused": True} if way == "fused" else {"foreach": way == "foreach"}
    makers: dict[str, Callable[[], torch.optim.Optimizer]] = {
        "sgd": lambda: torch.optim.SGD(tensors, lr=rate, **how),
        "momentum": lambda: torch.optim.SGD(tensors, lr=rate, momentum=0.9, **how),
        "adam": lambda: torch.optim.Adam(tensors, lr=rate, **how),
        "adamw": lambda: torch.optim.AdamW(tensors, lr=rate, **how),
        "adafactor": lambda: SimulableAdafactor(tensors, lr=rate, **how),
        "muon": lambda: MuonWithAdamW(named, rate),
        "lion": lambda: Lion(tensors, rate),
        "adam8bit": lambda: Adam8bit(tensors, rate, codebooks=codebooks),
    }
    return makers[choice.algorithm]()


def named_states_of(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> list[tuple[str, Any]]:
    """("exp_avg of head.weight", tensor) for all that an optimizer keeps.

    `names` has parameters' names by `id`; what is kept of a weight without a name is ("exp_avg", tensor).
    """
    kept: list[tuple[str, Any]] = []
    for weight, state in optimizer.state.items():
        owner = names.get(id(weight))
        of_owner = f" of {owner}" if owner else ""
        kept += [(f"{name}{of_owner}", tensor) for name, tensor in state.items()]
    if isinstance(optimizer, Adam8bit):
        kept += [("codebook", table) for table in optimizer.codebooks.tensors()]
    return kept


class SimulableAdafactor(torch.optim.Adafactor):
    """torch's Adafactor (Shazeer and Stern 2018), which reads norms on the host; fake ones count as 1.

    It can go when torch's own keeps them on the device.
    """

    def step(self, closure: Any = None) -> Any:
        with on_this_thread(FakeTensor, "item", lambda _: 1.0):
            return super().step(closure)


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon for the blocks' matrices, AdamW for all else, as its author uses it (Jordan et al. 2024)."""

    def __init__(self, named: Named, rate: float) -> None:
        hidden = [tensor for name, tensor in named if is_hidden_matrix(name, tuple(tensor.shape))]
        others = [tensor for name, tensor in named if not is_hidden_matrix(name, tuple(tensor.shape))]
        self.parts: list[torch.optim.Optimizer] = []
        if hidden:
            self.parts.append(torch.optim.Muon(hidden, lr=rate))
        if others:
            self.parts.append(torch.optim.AdamW(others, lr=3e-4, foreach=False))
        super().__init__([*hidden, *others], {})
        for part in self.parts:
            part.state = self.state

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for part in self.parts:
            part.step()


class Lion(torch.optim.Optimizer):
    """Lion: the sign of an interpolated momentum, one state a parameter (Chen et al. 2023, algorithm 2)."""

    def __init__(
        self, tensors: Iterable[torch.nn.Parameter], rate: float = 1e-4, weight_decay: float = 0.01
    ) -> None:
        super().__init__(tensors, {"lr": rate, "betas": (0.9, 0.99), "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._step_one(weight, weight.grad, group)

    def _step_one(self, weight: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[weight]
        rate = group["lr"]
        betas = group["betas"]
        if not state:
            state["momentum"] = torch.zeros_like(weight)
        direction = state["momentum"].lerp(gradient, 1 - betas[0]).sign_()
        weight.mul_(1 - rate * group["weight_decay"]).add_(direction, alpha=-rate)
        state["momentum"].lerp_(gradient, 1 - betas[1])


class Codebook(NamedTuple):
    """The 256 numbers that an 8-bit code can mean, in order, and the borders between them."""

    values: torch.Tensor
    borders: torch.Tensor


class Codebooks(NamedTuple):
    """One codebook for the first moment, which has a sign, and one for the second, which has none."""

    signed: Codebook
    unsigned: Codebook

    def tensors(self) -> list[torch.Tensor]:
        return [*self.signed, *self.unsigned]


def make_codebooks(device: torch.device | str) -> Codebooks:
    """The dynamic tree quantization of Dettmers et al. 2022, for both moments."""
    return Codebooks(_codebook(True, device), _codebook(False, device))


def _codebook(signed: bool, device: torch.device | str) -> Codebook:
    """0, 1, and for each power of ten from 10⁻⁶ to 1 twice as many steps as for the one below it."""
    signs = (1, -1) if signed else (1,)
    values = [0.0, 1.0]
    for exponent in range(7):
        steps = 2**exponent if signed else 2 ** (exponent + 1)
        for step in range(steps):
            middle = 0.1 + 0.9 * (step + 0.5) / steps
            values += [sign * 10.0 ** (exponent - 6) * middle for sign in signs]
    values.sort()
    borders = [(low + high) / 2 for low, high in pairwise(values)]
    return Codebook(
        torch.tensor(values, dtype=torch.float32, device=device),
        torch.tensor(borders, dtype=torch.float32, device=device),
    )


class Adam8bit(torch.optim.Optimizer):
    """AdamW whose moments are 8-bit codes with one fp32 scale a block (Dettmers et al. 2022).

    Blocks have 256 elements, as in bitsandbytes (the paper's have 2,048); parameters of fewer than 4,096
    elements keep fp32 moments. Large tensors are updated piece by piece, as a fused kernel needs no memory of
    its own.
    """

    def __init__(
        self, tensors: Iterable[torch.nn.Parameter], rate: float = 3e-4, codebooks: Codebooks | None = None
    ) -> None:
        super().__init__(tensors, {"lr": rate, "betas": (0.9, 0.999), "epsilon": 1e-8, "weight_decay": 0.01})
        self.codebooks = codebooks or make_codebooks(self.param_groups[0]["params"][0].device)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    weight.mul_(1 - group["lr"] * group["weight_decay"])
                    self._step_one(weight, weight.grad, group)

    def _step_one(self, weight: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[weight]
        if not state:
            state.update(_zero_moments(weight))
        state["step"] += 1
        if weight.numel() < SMALL_8BIT:
            _adam(weight, gradient, (state["first"], state["second"]), state["step"], group)
            return
        flat = weight.view(-1)
        gradient = gradient.view(-1)
        for start in range(0, weight.numel(), PIECE_8BIT):
            blocks = slice(start // BLOCK_8BIT, (start + PIECE_8BIT) // BLOCK_8BIT)
            piece = slice(start, start + PIECE_8BIT)
            self._step_piece(flat[piece], gradient[piece], blocks, state, group)

    def _step_piece(
        self,
        weight: torch.Tensor,
        gradient: torch.Tensor,
        blocks: slice,
        state: dict[str, Any],
        group: dict[str, Any],
    ) -> None:
        first = _decode(state["first"][blocks], state["first_scale"][blocks], self.codebooks.signed)
        second = _decode(state["second"][blocks], state["second_scale"][blocks], self.codebooks.unsigned)
        # the last block may be padded
        flat_first = first.view(-1)
        flat_second = second.view(-1)
        count = weight.numel()
        _adam(weight, gradient, (flat_first[:count], flat_second[:count]), state["step"], group)
        _encode(first, state["first"][blocks], state["first_scale"][blocks], self.codebooks.signed)
        _encode(second, state["second"][blocks], state["second_scale"][blocks], self.codebooks.unsigned)


def _zero_moments(weight: torch.Tensor) -> dict[str, Any]:
    """Both moments of a parameter, all 0, in fp32 or as codes and scales; and the number of steps, an int."""
    state: dict[str, Any] = {"step": 0}
    if weight.numel() < SMALL_8BIT:
        for moment in ("first", "second"):
            state[moment] = torch.zeros_like(weight, dtype=torch.float32)
        return state
    blocks = -(-weight.numel() // BLOCK_8BIT)
    for moment in ("first", "second"):
        state[moment] = torch.zeros(blocks, BLOCK_8BIT, dtype=torch.uint8, device=weight.device)
        state[f"{moment}_scale"] = torch.zeros(blocks, 1, dtype=torch.float32, device=weight.device)
    return state


def _adam(
    weight: torch.Tensor, gradient: torch.Tensor, moments: Moments, step: int, group: dict[str, Any]
) -> None:
    """Update the moments and the weight in place (Kingma and Ba 2015, algorithm 1)."""
    first, second = moments
    beta1, beta2 = group["betas"]
    first.mul_(beta1).add_(gradient, alpha=1 - beta1)
    second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    root = second.sqrt().div_((1 - beta2**step) ** 0.5).add_(group["epsilon"])
    weight.addcdiv_(first, root, value=-group["lr"] / (1 - beta1**step))


def _decode(codes: torch.Tensor, scales: torch.Tensor, codebook: Codebook) -> torch.Tensor:
    """The fp32 numbers that 8-bit codes mean, a row for each block."""
    return codebook.values.index_select(0, codes.view(-1).int()).view(codes.shape).mul_(scales)


def _encode(moment: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, codebook: Codebook) -> None:
    """Write a moment's nearest codes and its blocks' largest values; the moment itself is used up."""
    torch.linalg.vector_norm(moment, float("inf"), dim=1, keepdim=True, out=scales)
    moment.div_(scales.clamp(min=torch.finfo(torch.float32).tiny))
    codes.copy_(torch.bucketize(moment, codebook.borders, out_int32=True))
