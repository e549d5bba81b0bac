"""The training step that a TrainingRun describes, built and run for real on whatever device it is given.

`follow` runs it under the tracker and returns the Measurement.
"""

import atexit
import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from datetime import date
from functools import partial
from typing import Any

import torch

from ..gpus import IMITATED, Gpu
from ..measurement import Measurement, Provenance
from ..networks import Transformer, chunked_loss, loss_of, network_for
from ..pace import working
from ..planning.twin import named
from ..run import TrainingRun
from .cuda_answers import CARD
from .devices import Phases
from .optimizers import Named, make_codebooks, make_optimizer, named_states_of
from .patching import ONE_AT_A_TIME
from .tracker import Tracker

atexit.register(gc.freeze)  # or Python, as it ends, searches all of torch for cycles: most of a second

SEED = 0

DEVICE_NAMES = {"simulated": "simulated GPU", "cpu": "CPU"}
"""The name of the device in a provenance; a live one's is the GPU's own."""

SKIPPED = "gradients overflowed in fp16 and an update was skipped: optimizer states may not be there yet"

LOSS_SCALE = 2.0**12
"""First factor of the loss. torch's 65,536 is too large for fp16: the first update would be skipped."""


class MasterOptimizer:
    """An optimizer on fp32 master weights for a 16-bit network.

    With AdamW these are ZeRO's 2 + 2 + 4 + 4 + 4 bytes per parameter. One gradient is upcast at a time, or
    all of them first where foreach was asked for. Where gradients are fp32 too, backward adds each to its
    main gradient at once and lets the 16-bit one go, as Megatron-LM does.
    """

    # torch.amp.GradScaler then looks for overflows and leaves unscaling to us
    _step_supports_amp_scaling = True
    grad_scale: torch.Tensor  # set by the scaler for one step, then deleted, as for torch's fused optimizers
    found_inf: torch.Tensor

    def __init__(self, run: TrainingRun, named: Named, simulated: bool) -> None:
        choice = run.optimizer
        self.run = run
        self.simulated = simulated
        self.main_gradients = run.precision.gradient > run.precision.weight
        names = [name for name, _ in named]
        self.weights = [weight for _, weight in named]
        self.masters = [torch.nn.Parameter(weight.detach().float()) for weight in self.weights]
        self.param_groups = [{"params": self.weights}]
        everything = list(zip(names, self.weights, self.masters, strict=True))
        all_at_once = choice.forced and choice.implementation == "foreach"
        self.groups = [everything] if all_at_once else [[one] for one in everything]
        codebooks = make_codebooks(self.weights[0].device) if choice.algorithm == "adam8bit" else None
        self.optimizers = [
            make_optimizer(choice, [(name, master) for name, _, master in group], codebooks)
            for group in self.groups
        ]
        if self.main_gradients:
            for weight, master in zip(self.weights, self.masters, strict=True):
                weight.register_post_accumulate_grad_hook(partial(_add_in_fp32, master=master))

    def step(self) -> None:
        """Update masters and weights, or nothing where the loss scaler found a gradient that overflowed."""
        scaled = self.run.precision.loss_scaling
        if scaled and not self.simulated and self.found_inf.item():
            return
        inverse = self.grad_scale.double().reciprocal().float() if scaled else None
        for optimizer, group in zip(self.optimizers, self.groups, strict=True):
            if not self.main_gradients:
                for _, weight, master in group:
                    self._upcast(weight, master, inverse)
            optimizer.step()
            for _, weight, master in group:
                weight.detach().copy_(master.detach())
                if not self.main_gradients:
                    master.grad = None

    def _upcast(self, weight: torch.Tensor, master: torch.Tensor, inverse: torch.Tensor | None) -> None:
        if weight.grad is not None:
            master.grad = weight.grad.float()
            if self.run.set_to_none:
                weight.grad = None
            if inverse is not None:
                master.grad.mul_(inverse)

    @property
    def gradient_owners(self) -> list[torch.nn.Parameter]:
        return self.masters if self.main_gradients else self.weights

    def zero_grad(self, set_to_none: bool = True) -> None:
        for owner in self.gradient_owners:
            if set_to_none:
                owner.grad = None
            elif owner.grad is not None:
                owner.grad.zero_()

    def named_states(self, names: Mapping[int, str]) -> list[tuple[str, Any]]:
        """Every tensor that it owns: master weights and what the optimizer keeps of each."""
        pairs = zip(self.weights, self.masters, strict=True)
        of = {id(master): names[id(weight)] for weight, master in pairs}
        kept = [state for optimizer in self.optimizers for state in named_states_of(optimizer, of)]
        return [*((f"master of {of[id(master)]}", master) for master in self.masters), *kept]


def _add_in_fp32(weight: torch.Tensor, master: torch.Tensor) -> None:
    if weight.grad is not None:
        gradient, weight.grad = weight.grad, None
        if master.grad is None:
            master.grad = gradient.float()
        else:
            master.grad.add_(gradient)


def clip(owners: list[torch.nn.Parameter], largest: float, scale: torch.Tensor | None = None) -> None:
    """Scale gradients to a common norm of at most `largest` (Pascanu et al. 2013).

    With `scale`, the factor of the loss that the gradients still have, the norm is in fp32.
    """
    if scale is None:
        torch.nn.utils.clip_grad_norm_(owners, largest, foreach=True)
        return
    gradients = [owner.grad for owner in owners if owner.grad is not None]
    norms = torch.stack([torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients])
    torch.nn.utils.clip_grads_with_norm_(
        owners, largest, torch.linalg.vector_norm(norms).div_(scale), foreach=True
    )


class Training:
    """A network, its optimizer and one batch on `device`, ready to step as `run` says."""

    def __init__(self, run: TrainingRun, device: str, simulated: bool) -> None:
        self.run = run
        self.device = device
        self.simulated = simulated
        self.losses: list[float] = []
        self.network = self._network()
        self.network_and_loss: Callable[..., torch.Tensor] | None = None  # once compiled
        self.compiled = run.compile == "none"
        self.optimizer = self._optimizer()
        self.scaler: torch.amp.GradScaler | None = None
        if run.precision.loss_scaling:
            self.scaler = torch.amp.GradScaler(device, init_scale=LOSS_SCALE)
        shape = (run.micro_batch, run.seq_len + 1)
        text = torch.randint(run.model.vocab, shape, device=device)
        self.tokens = text[:, :-1].clone()
        self.targets = text[:, 1:].clone()

    def _network(self) -> Transformer:
        with torch.device(self.device):
            return network_for(self.run)

    def _compile(self) -> None:
        """Compile what the run says, in its first step: a simulated GPU can do so only under the tracker."""
        self.compiled = True
        if self.run.compile == "model":
            self.network_and_loss = torch.compile(self._network_and_loss)
            return
        for block in self.network.blocks:
            block.compile()

    def _network_and_loss(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        chunks, upcast = self.run.loss_chunks, self.run.model.logits == "fp32"
        if chunks == 1:
            return loss_of(self.network(tokens), targets, upcast)
        return chunked_loss(self.network.features(tokens), self.network.head, targets, chunks, upcast)

    def _optimizer(self) -> torch.optim.Optimizer | MasterOptimizer:
        named = [(name, weight) for name, weight in self.network.named_parameters() if weight.requires_grad]
        if self.run.precision.master:
            return MasterOptimizer(self.run, named, self.simulated)
        return make_optimizer(self.run.optimizer, named)

    @property
    def skipped_an_update(self) -> bool:
        """True if the loss scaler found a gradient that overflowed."""
        return self.scaler is not None and not self.simulated and self.scaler.get_scale() < LOSS_SCALE

    def named_states(self) -> list[tuple[str, Any]]:
        """Tensors that optimizer and scaler keep between steps, each once: ("exp_avg of head.weight", …)."""
        own = self._optimizer_states()
        if self.scaler is not None:
            own.append(("loss scale", self.scaler._scale))
            own.append(("steps since the loss scale changed", self.scaler._growth_tracker))
        once = {id(tensor): (name, tensor) for name, tensor in own}
        return list(once.values())

    def _optimizer_states(self) -> list[tuple[str, Any]]:
        names = {id(weight): name for name, weight in self.network.named_parameters()}
        if isinstance(self.optimizer, MasterOptimizer):
            return self.optimizer.named_states(names)
        return named_states_of(self.optimizer, names)

    def gradient_owners(self) -> list[torch.nn.Parameter]:
        """Those whose `.grad` backward fills: trained weights, or their masters where gradients are fp32."""
        if isinstance(self.optimizer, MasterOptimizer):
            return self.optimizer.gradient_owners
        return [weight for weight in self.network.parameters() if weight.requires_grad]

    def autocast(self) -> AbstractContextManager[Any]:
        name = self.run.precision.autocast
        return torch.autocast(self.device, getattr(torch, name)) if name else nullcontext()

    def step(self, tracker: Phases) -> None:
        """One optimizer step of `accumulation_steps` micro-batches, each phase named to `tracker`."""
        if not self.compiled:
            self._compile()
        with _tf32(self.run.precision.tf32):
            for micro_batch in range(self.run.accumulation_steps):
                tracker.micro_batch = micro_batch
                self._forward_and_backward(tracker)
        if self.run.clip_grad_norm is not None:
            with tracker.in_phase("clip"):
                self._clip(self.run.clip_grad_norm)
        with tracker.in_phase("optimizer"):
            self._update()
            tracker.bind_states()
        with tracker.in_phase("zero_grad"):
            self.optimizer.zero_grad(set_to_none=self.run.set_to_none)

    def _forward_and_backward(self, tracker: Phases) -> None:
        loss = self._loss(tracker)
        with tracker.in_phase("backward"):
            (self.scaler.scale(loss) if self.scaler is not None else loss).backward()
            tracker.bind("gradients", (owner.grad for owner in self.gradient_owners()))
        if not self.simulated:  # a simulated loss has a shape but no value
            self.losses.append(loss.item() * self.run.accumulation_steps)

    def _loss(self, tracker: Phases) -> torch.Tensor:
        chunks = self.run.loss_chunks
        upcast = self.run.model.logits == "fp32"
        with self.autocast():
            if self.network_and_loss is not None:
                with tracker.in_phase("forward"):
                    return self.network_and_loss(self.tokens, self.targets) / self.run.accumulation_steps
            with tracker.in_phase("forward"):
                out = self.network(self.tokens) if chunks == 1 else self.network.features(self.tokens)
            with tracker.in_phase("loss"):
                if chunks == 1:
                    return loss_of(out, self.targets, upcast) / self.run.accumulation_steps
                loss = chunked_loss(out, self.network.head, self.targets, chunks, upcast)
                return loss / self.run.accumulation_steps

    def _clip(self, largest: float) -> None:
        scale = None
        if isinstance(self.optimizer, MasterOptimizer):  # its gradients are unscaled when they become fp32
            scale = self.scaler._scale if self.scaler is not None else None
        elif self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        clip(self.gradient_owners(), largest, scale)

    def _update(self) -> None:
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)  # pyrefly: ignore [bad-argument-type]  # MasterOptimizer has what it needs
            self.scaler.update()


@contextmanager
def _tf32(allowed: bool) -> Iterator[None]:
    """Inside, where `allowed`, fp32 matrix products on the GPU round their factors to tf32.

    Then all is as it was.
    """
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    if not allowed or before == "tf32":
        yield
        return
    # sets what torch's older settings say as well: torch refuses to compute where they differ
    matmul.allow_tf32 = True
    try:
        yield
    finally:
        matmul.allow_tf32 = False
        matmul.fp32_precision = before


def follow(
    training: Training | Callable[[], Training],
    tracker: Tracker,
    steps: int,
    provenance: Provenance,
    inside: AbstractContextManager[Any] | None = None,
) -> Measurement:
    """Run `steps` steps of `training` under `tracker`; the peak is that of the last one.

    A function that makes the training is called under the tracker as well. `inside` is entered last.
    """
    said = "simulating" if provenance.source == "simulated" else "tracing"
    # The tracker is entered last, after the fake mode: it sees an operator first, then what that mode makes.
    with working(said) as work, tracker, inside or nullcontext():
        if not isinstance(training, Training):
            training = training()
        tracker.watch(training.network, training.named_states)
        tracker.bind("inputs", [training.tokens, training.targets])
        ends = []
        for step in range(1, steps + 1):
            tracker.step = step
            work.at(f"{said} step {step} of {steps}")
            training.step(tracker)
            ends.append(len(tracker.events))
    if training.skipped_an_update:
        provenance = replace(provenance, note="; ".join(filter(None, (provenance.note, SKIPPED))))
    return tracker.measurement(ends, training.losses, provenance)


@contextmanager
def own_random_numbers() -> Iterator[None]:
    """Inside, torch's random numbers begin at the course's seed; then they go on as before."""
    gpus = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with ONE_AT_A_TIME, torch.random.fork_rng(devices=gpus, device_type="cuda"):
        torch.default_generator.manual_seed(SEED)
        for gpu in gpus:
            torch.cuda.default_generators[gpu].manual_seed(SEED)
        yield


def provenance_of(source: str, *notes: str, card: Gpu | None = None) -> Provenance:
    """The provenance of what is measured now; of the notes those that are not empty.

    `card` is the one that a simulated GPU imitates, named if it is not the usual one.
    """
    note = "; ".join(filter(None, notes))
    today = date.today().isoformat()
    if source == "live":
        return Provenance(source, torch.cuda.get_device_name(), torch.__version__, today, note)
    device = DEVICE_NAMES[source]
    if source == "simulated" and card and card not in (CARD, IMITATED):
        device += f", as {named(card)}"
    return Provenance(source, device, torch_release(), today, note)


def torch_release() -> str:
    """torch's version without its build (+cpu, +cu130), which makes no difference where no GPU is used."""
    return torch.__version__.split("+")[0]
