"""The training step that a TrainingRun describes, built and run for real on whatever device it is given."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

from ..networks import build_network, loss_of
from ..run import TrainingRun


class Phases(Protocol):
    """Who is told how far a step has come: the tracker, or a stand-in where nothing is tracked."""

    micro_batch: int

    def in_phase(self, phase: str) -> AbstractContextManager[Any]: ...
    def bind_states(self) -> None: ...


MakeOptimizer = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


class MasterOptimizer:
    """An optimizer on fp32 master weights for a network in 16-bit: ZeRO's 2 + 2 + 4 + 4 + 4 bytes a parameter with
    AdamW.

    Tensor by tensor, one gradient is upcast at a time. `all_at_once` upcasts every gradient first, as is common, which
    adds 4 bytes a parameter for the gradients and 4 for what foreach makes, less the 2 of the 16-bit gradients.
    """

    def __init__(self, weights: Iterable[torch.nn.Parameter], make: MakeOptimizer, all_at_once: bool) -> None:
        self.weights = list(weights)
        self.masters = [torch.nn.Parameter(weight.detach().float()) for weight in self.weights]
        pairs = list(zip(self.weights, self.masters, strict=True))
        self.groups = [pairs] if all_at_once else [[pair] for pair in pairs]
        self.optimizers = [make([master for _, master in group]) for group in self.groups]

    def step(self) -> None:
        for optimizer, group in zip(self.optimizers, self.groups, strict=True):
            for weight, master in group:
                if weight.grad is not None:
                    master.grad, weight.grad = weight.grad.float(), None
            optimizer.step()
            for weight, master in group:
                weight.detach().copy_(master.detach())
                master.grad = None

    def zero_grad(self) -> None:
        for weight in self.weights:
            weight.grad = None

    def states(self) -> list[Any]:
        """Every tensor that it owns: master weights and what the optimizer keeps of each."""
        return [*self.masters, *(tensor for optimizer in self.optimizers for tensor in _states(optimizer))]


def _states(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [tensor for state in optimizer.state.values() for tensor in state.values()]


class Training:
    """A network, its optimizer and one batch on `device`, ready to step as `run` says."""

    def __init__(self, run: TrainingRun, device: str, simulated: bool) -> None:
        self.run, self.device, self.simulated = run, device, simulated
        self.losses: list[float] = []
        dtype = torch.bfloat16 if run.precision.weight == 2 else torch.float32
        with torch.device(device), _default_dtype(dtype):
            self.network = build_network(run.model, run.attention, run.recompute)
        self.optimizer = self._optimizer()
        self.scaler = torch.amp.GradScaler(device) if run.precision.loss_scaling else None
        shape = (run.micro_batch, run.seq_len + 1)
        text = torch.randint(run.model.vocab, shape, device=device)
        self.tokens, self.targets = text[:, :-1].clone(), text[:, 1:].clone()

    def _optimizer(self) -> torch.optim.Optimizer | MasterOptimizer:
        choice, weights = self.run.optimizer, list(self.network.parameters())
        # Said outright, so that every device steps alike: left alone, torch takes foreach on CUDA and the for-loop on a
        # CPU.
        options: dict[str, Any] = {"loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}[
            choice.implementation
        ]

        def make(tensors: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
            if choice.algorithm == "momentum":
                return torch.optim.SGD(tensors, lr=1e-2, momentum=0.9, **options)
            return torch.optim.AdamW(tensors, lr=3e-4, **options)

        if self.run.precision.master:
            return MasterOptimizer(weights, make, all_at_once=choice.forced and choice.implementation == "foreach")
        return make(weights)

    def states(self) -> list[Any]:
        """Tensors that the optimizer (and the loss scaler) keeps from step to step."""
        own = self.optimizer.states() if isinstance(self.optimizer, MasterOptimizer) else _states(self.optimizer)
        scaler = [self.scaler._scale, self.scaler._growth_tracker] if self.scaler is not None else []
        return [*own, *scaler]

    def autocast(self) -> AbstractContextManager[Any]:
        name = self.run.precision.autocast
        return torch.autocast(self.device, getattr(torch, name)) if name else nullcontext()

    def step(self, tracker: Phases) -> None:
        """One optimizer step of `accumulation_steps` micro-batches, each phase named to `tracker`."""
        for micro_batch in range(self.run.accumulation_steps):
            tracker.micro_batch = micro_batch
            self._forward_and_backward(tracker)
        with tracker.in_phase("optimizer"):
            self._update()
            tracker.bind_states()
        with tracker.in_phase("zero_grad"):
            self.optimizer.zero_grad()

    def _forward_and_backward(self, tracker: Phases) -> None:
        loss = self._loss(tracker)
        with tracker.in_phase("backward"):
            (self.scaler.scale(loss) if self.scaler is not None else loss).backward()
        if not self.simulated:  # a simulated loss has a shape but no value
            self.losses.append(loss.item() * self.run.accumulation_steps)

    def _loss(self, tracker: Phases) -> torch.Tensor:
        with self.autocast():
            with tracker.in_phase("forward"):
                logits = self.network(self.tokens)
            with tracker.in_phase("loss"):
                return loss_of(logits, self.targets) / self.run.accumulation_steps

    def _update(self) -> None:
        if self.scaler is None:
            self.optimizer.step()
        else:
            assert isinstance(self.optimizer, torch.optim.Optimizer), (
                "loss scaling comes with fp32 weights under autocast"
            )
            self.scaler.step(self.optimizer)
            self.scaler.update()


class _default_dtype:
    """Make `dtype` torch's default for new floating-point tensors, inside."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __enter__(self) -> None:
        self.before = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)

    def __exit__(self, *error: Any) -> None:
        torch.set_default_dtype(self.before)
