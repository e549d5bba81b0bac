"""Copying a learner's model, optimizer and batch to a device, with a stand-in for each tensor."""

import copy
import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses import fake_tensor
from torch.nn.parameter import is_lazy
from torch.optim.lr_scheduler import LRScheduler

from ..estimating.workspaces import Workspaces
from ..gpus import Gpu
from ..ranks.functions import globals_used
from .optimizers import named_states_of

WRITE = "write it as def step(model, optimizer, batch): …"
CONTAINERS = (list, tuple, set, frozenset)
CHANGING = (torch.optim.Optimizer, LRScheduler, torch.amp.GradScaler)
"""A step changes these by using them: it works on a copy only if they were handed over."""


@dataclass(frozen=True)
class OwnStep:
    """A step with what it works on, handed over or carried.

    `workspaces` are cuBLAS's, if counted; `card` is the GPU that is imitated, if named.
    """

    step: Callable[..., Any]
    model: torch.nn.Module
    optimizer: Any = None
    batch: Any = None
    workspaces: Workspaces | None = None
    card: Gpu | None = None

    @property
    def arguments(self) -> list[Any]:
        """The step's arguments: the model, then the optimizer and the batch if there are any."""
        return [self.model, *(given for given in (self.optimizer, self.batch) if given is not None)]

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        if self.optimizer is None:
            return []
        if isinstance(self.optimizer, (list, tuple)):
            return list(self.optimizer)
        return [self.optimizer]

    def advance(self) -> Any:
        return self.step(*self.arguments)

    def named_states(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The optimizers' tensors: ("exp_avg of head.weight", tensor), or ("exp_avg", …) of no parameter."""
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        for optimizer in self.optimizers:
            for name, value in named_states_of(optimizer, names):
                yield from ((name, tensor) for tensor in tensors_in(value, set()))


def checked(step: Any, model: Any, optimizer: Any, batch: Any) -> OwnStep:
    """The arguments as an OwnStep. Raises TypeError or ValueError, saying what to write, if they are none."""
    if not callable(step):
        raise TypeError(f"step is {step!r}, which cannot be called: {WRITE}")
    if not isinstance(model, torch.nn.Module):
        made = f": make one first, model={model.__name__}(…)" if isinstance(model, type) else ""
        raise TypeError(f"model is {_short(model)}, not a torch.nn.Module{made}; pass model=… and {WRITE}")
    own = OwnStep(step, model, optimizer, batch)
    known = {id(parameter) for parameter in model.parameters()}
    for each in own.optimizers:
        if not isinstance(each, torch.optim.Optimizer):
            raise TypeError(f"optimizer is {_short(each)}, not a torch.optim.Optimizer, nor a list of them")
        if not any(id(parameter) in known for parameter in _parameters_of(each)):
            advice = "make the optimizer from model.parameters() of the model that you hand over"
            raise ValueError(f"the {type(each).__name__} updates no parameter of this model: {advice}")
    _check_model(model)
    if own.optimizers and not any(parameter.requires_grad for parameter in model.parameters()):
        why = "there is no training step without one that requires a gradient"
        raise ValueError(f"{type(model).__name__} has no trained parameter: {why}")
    _check_signature(own)
    _check_outside(step)
    return own


def _short(thing: Any) -> str:
    return f"the class {thing.__name__}" if isinstance(thing, type) else f"a {type(thing).__name__}"


def _check_model(model: torch.nn.Module) -> None:
    for name, module in model.named_modules():
        if hasattr(module, "_orig_mod") or module._compiled_call_impl is not None:
            which = f"part {name} of the model" if name else "the model"
            raise ValueError(
                f"{which} is compiled, and what is compiled cannot be copied:"
                " hand over the model as it was before, and call torch.compile inside the step"
            )
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if is_lazy(tensor):
            raise ValueError(f"{name} has no shape yet: run the model once before it is measured")
        dense = tensor.layout is torch.strided
        ordinary = type(tensor) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
        if not dense or not ordinary:
            kind = type(tensor).__name__ if dense else tensor.layout
            raise ValueError(
                f"{name} is a {kind}: only ordinary, dense tensors are carried over to the device"
            )


def _check_signature(own: OwnStep) -> None:
    given = {"model": own.model, "optimizer": own.optimizer, "batch": own.batch}
    names = [name for name, value in given.items() if value is not None]
    signature = inspect.signature(own.step)
    try:
        signature.bind(*own.arguments)
    except TypeError as error:
        name = getattr(own.step, "__name__", "step")
        raise TypeError(
            f"{name}{signature} cannot be called as {name}({', '.join(names)}) ({error}):"
            " it is given copies to work on, in this order, of what measure(…) was given"
        ) from None


def _check_outside(step: Callable[..., Any]) -> None:
    """Raise ValueError for a step that changes a scheduler, scaler or optimizer that it was not given."""
    if not inspect.isfunction(step):  # of a method or a callable object nobody knows what it uses
        return
    used = {name: step.__globals__.get(name) for name in globals_used(step.__code__)}
    for name, cell in zip(step.__code__.co_freevars, step.__closure__ or (), strict=True):
        with suppress(ValueError):  # of a variable that has no value yet
            used[name] = cell.cell_contents
    for name, thing in used.items():
        if isinstance(thing, CHANGING):
            raise ValueError(
                f"{step.__name__} uses {name}, {_short(thing)} from outside, which measuring would change."
                f" Hand it over too, as in batch=(x, y, {name}), and use the argument instead"
            )


def carried_over(own: OwnStep, device: str, simulated: bool) -> OwnStep:
    """A copy of `own` on `device`.

    What the model holds neither as parameter nor as buffer stays where it is, as with .to().
    """
    memo: dict[int, Any] = {}
    for tensor, stays in _to_carry(own):
        if id(tensor) not in memo:
            memo[id(tensor)] = _stand_in(tensor, "cpu" if stays else device, simulated)
    with fake_tensor.unset_fake_temporarily():
        model = _copied("model", own.model, memo)
        if not simulated:  # cuDNN copies an LSTM's weights at every call unless they lie in one piece
            for module in model.modules():
                if isinstance(module, torch.nn.RNNBase):
                    module.flatten_parameters()
        for optimizer in own.optimizers:
            memo[id(optimizer)] = _copied_optimizer(optimizer, memo)
        return OwnStep(own.step, model, copy.deepcopy(own.optimizer, memo), _copied("batch", own.batch, memo))


def _copied(name: str, thing: Any, memo: dict[int, Any]) -> Any:
    try:
        return copy.deepcopy(thing, memo)
    except torch.OutOfMemoryError:
        raise
    except (TypeError, RuntimeError) as error:
        if name == "batch":
            how = "batch=next(iter(loader))"
        else:
            how = "a model that keeps no tensor of an earlier step"
        raise ValueError(
            f"{name} is {_short(thing)} that cannot be copied ({error}): hand over {how}"
        ) from error


def _to_carry(own: OwnStep) -> Iterator[tuple[torch.Tensor, bool]]:
    """Each tensor that goes along, and whether it stays on the CPU, where optimizers count their steps."""
    yield from ((tensor, False) for tensor in tensors_in(own.model, set()))
    for optimizer in own.optimizers:
        for group in optimizer.param_groups:
            on_device = group.get("capturable") or group.get("fused")
            for parameter in group["params"]:
                yield parameter, False
                for name, value in optimizer.state.get(parameter, {}).items():
                    for tensor in tensors_in(value, set()):
                        yield tensor, name == "step" and not on_device
    yield from ((tensor, False) for tensor in tensors_in(own.batch, set()))


def tensors_in(thing: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    """Every tensor in containers, objects, modules (parameters and buffers) and optimizers, each once."""
    holds_none = isinstance(thing, (str, bytes, int, float, type(None), type)) or inspect.isroutine(thing)
    if holds_none or id(thing) in seen:
        return
    seen.add(id(thing))
    if isinstance(thing, torch.Tensor):
        yield thing
        return
    # in the order of Module._apply, by which .to("cuda") carries them over
    if isinstance(thing, torch.nn.Module):
        inner: Any = [*thing.children(), *thing._parameters.values(), *thing._buffers.values()]
    elif isinstance(thing, torch.optim.Optimizer):
        inner = [*_parameters_of(thing), thing.state]
    elif isinstance(thing, Mapping):
        inner = thing.values()
    elif isinstance(thing, CONTAINERS):
        inner = thing
    else:
        inner = _attributes(thing)
    for part in list(inner):
        yield from tensors_in(part, seen)


def _attributes(thing: Any) -> list[Any]:
    # a dataclass may have slots
    names = [*getattr(thing, "__dict__", {}), *getattr(type(thing), "__slots__", ())]
    return [getattr(thing, name) for name in names if hasattr(thing, name)]


def _parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _stand_in(tensor: torch.Tensor, device: str, simulated: bool) -> torch.Tensor:
    """A leaf tensor like this one on `device`, its gradient too, as `tensor.to(device)` lays it out."""
    if simulated and device == "cpu" and tensor.numel() == 1:  # a count of steps, which the optimizer reads
        with fake_tensor.unset_fake_temporarily():
            value = tensor.item()
        return torch.tensor(value, dtype=tensor.dtype).view(tensor.shape)
    with torch.no_grad():
        if simulated:
            with fake_tensor.unset_fake_temporarily():
                outline = torch.empty_like(tensor.detach(), device="meta")
            made = torch.empty_strided(outline.size(), outline.stride(), dtype=outline.dtype, device=device)
        else:
            made = torch.empty_like(tensor.detach(), device=device).copy_(tensor.detach())
    if isinstance(tensor, torch.nn.Parameter):
        made = torch.nn.Parameter(made, tensor.requires_grad)
    elif tensor.requires_grad:
        made.requires_grad_()
    if tensor.is_leaf and tensor.grad is not None:
        made.grad = _stand_in(tensor.grad, device, simulated)
    return made


def _copied_optimizer(optimizer: torch.optim.Optimizer, memo: dict[int, Any]) -> torch.optim.Optimizer:
    """A copy with all attributes, of which torch's own copy keeps three.

    All but a scheduler's `step`, which would step the original.
    """
    made = optimizer.__class__.__new__(optimizer.__class__)
    memo[id(optimizer)] = made
    kept = {name: value for name, value in vars(optimizer).items() if name != "step"}
    vars(made).update({name: copy.deepcopy(value, memo) for name, value in kept.items()})
    if "step" in vars(optimizer):
        made.step = _scheduled_step(weakref.ref(made))
    return made


def _scheduled_step(optimizer: weakref.ref[torch.optim.Optimizer]) -> Callable[..., Any]:
    """The optimizer's `step` as torch's schedulers want it: marked as theirs, and noting each call."""

    def step(*args: Any, **kwargs: Any) -> Any:
        made = optimizer()
        assert made is not None
        vars(made)["_opt_called"] = True
        return type(made).step(made, *args, **kwargs)

    vars(step)["_wrapped_by_lr_sched"] = True
    return step
