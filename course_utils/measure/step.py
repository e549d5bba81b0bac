"""The training step that a TrainingRun describes, built and run for real on whatever device it is given."""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

from ..networks import build_network, loss_of
from ..run import TrainingRun
from .tracker import Tracker


class Stepper(Protocol):
    """What a training step needs of an optimizer."""

    def step(self) -> Any: ...
    def zero_grad(self) -> None: ...


class MasterAdamW:
    """AdamW on fp32 master weights for a network in 16-bit: ZeRO's 2 + 2 + 4 + 4 + 4 bytes a parameter.

    Tensor by tensor, one gradient is upcast at a time; `all_at_once` upcasts every gradient first, as is common, which
    adds 4 bytes a parameter for the gradients and 4 for what foreach makes, less the 2 of the 16-bit gradients.
    """

    def __init__(self, weights: Iterable[torch.nn.Parameter], all_at_once: bool, **options: Any) -> None:
        self.weights = list(weights)
        self.masters = [torch.nn.Parameter(weight.detach().float()) for weight in self.weights]
        groups = [self.masters] if all_at_once else [[master] for master in self.masters]
        self.optimizers = [torch.optim.AdamW(group, **options) for group in groups]
        self.sizes = [len(group) for group in groups]

    def step(self) -> None:
        first = 0
        for optimizer, size in zip(self.optimizers, self.sizes, strict=True):
            pairs = list(zip(self.weights, self.masters, strict=True))[first : first + size]
            for weight, master in pairs:
                if weight.grad is not None:
                    master.grad, weight.grad = weight.grad.float(), None
            optimizer.step()
            for weight, master in pairs:
                weight.detach().copy_(master.detach())
                master.grad = None
            first += size

    def zero_grad(self) -> None:
        for weight in self.weights:
            weight.grad = None

    def states(self) -> list[Any]:
        """Every tensor that it owns: master weights and both moments."""
        return [*self.masters, *(tensor for optimizer in self.optimizers for tensor in _states(optimizer))]


def _states(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [tensor for state in optimizer.state.values() for tensor in state.values()]


class Training:
    """A network, its optimizer and one batch on `device`, ready to step as `run` says."""

    def __init__(self, run: TrainingRun, device: str) -> None:
        self.run, self.device = run, device
        dtype = torch.bfloat16 if run.precision.weight == 2 else torch.float32
        with torch.device(device), _default_dtype(dtype):
            self.network = build_network(run.model, run.attention, run.recompute)
        self.optimizer = self._optimizer()
        self.scaler = torch.amp.GradScaler(device) if run.precision.loss_scaling else None
        shape = (run.micro_batch, run.seq_len + 1)
        text = torch.randint(run.model.vocab, shape, device=device)
        self.tokens, self.targets = text[:, :-1].contiguous(), text[:, 1:].contiguous()

    def _optimizer(self) -> Any:
        choice, weights = self.run.optimizer, self.network.parameters()
        options = {choice.implementation: True} if choice.forced and choice.implementation != "loop" else {}
        options |= {"foreach": False} if choice.implementation == "loop" else {}
        if choice.algorithm == "sgd":
            return torch.optim.SGD(weights, lr=1e-2, momentum=0.9, **options)
        if self.run.precision.master:
            return MasterAdamW(weights, all_at_once=choice.name == "adamw-foreach", lr=3e-4, **options)
        return torch.optim.AdamW(weights, lr=3e-4, **options)

    def states(self) -> list[Any]:
        """Tensors that the optimizer (and the loss scaler) keeps from step to step."""
        own = self.optimizer.states() if isinstance(self.optimizer, MasterAdamW) else _states(self.optimizer)
        scaler = [self.scaler._scale, self.scaler._growth_tracker] if self.scaler is not None else []
        return [*own, *scaler]

    def autocast(self) -> AbstractContextManager[Any]:
        name = self.run.precision.autocast
        return torch.autocast(self.device, getattr(torch, name)) if name else nullcontext()

    def step(self, tracker: Tracker) -> list[torch.Tensor]:
        """One optimizer step of `accumulation_steps` micro-batches, each phase named to `tracker`; returns the losses."""
        losses = []
        for micro_batch in range(self.run.accumulation_steps):
            tracker.micro_batch = micro_batch
            losses.append(self._forward_and_backward(tracker))
        with tracker.in_phase("optimizer"):
            self._update()
            tracker.bind_states()
        with tracker.in_phase("zero_grad"):
            self.optimizer.zero_grad()
        return losses

    def _forward_and_backward(self, tracker: Tracker) -> torch.Tensor:
        loss = self._loss(tracker)
        with tracker.in_phase("backward"):
            (self.scaler.scale(loss) if self.scaler is not None else loss).backward()
        return loss.detach()

    def _loss(self, tracker: Tracker) -> torch.Tensor:
        with self.autocast():
            with tracker.in_phase("forward"):
                logits = self.network(self.tokens)
            with tracker.in_phase("loss"):
                return loss_of(logits, self.targets) / self.run.accumulation_steps

    def _update(self) -> None:
        if self.scaler is None:
            self.optimizer.step()
        else:
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
