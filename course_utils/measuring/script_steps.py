"""Following a script as it is: its models, optimizers and steps are noticed, data on the host stays real."""

import gc
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules import module as all_modules
from torch.nn.modules.loss import _Loss
from torch.optim import optimizer as all_optimizers
from torch.utils._pytree import tree_leaves

from .copy_to_device import OwnStep
from .optimizers import named_states_of
from .patches import on_this_thread
from .tracker import Tracker
from .watching import Watch

# Steps of one optimizer after which another one, that was made and never stepped, is waited for no more
PATIENCE = 16


class Finished(BaseException):
    """Ends a script that has taken its steps. No Exception, so that no handler of the script's stops it."""


class ScriptWatch(Watch):
    """Tells the tracker the phases of a script's steps; the last one calls `finish` with each step's end."""

    def __init__(
        self, tracker: Tracker, steps: int, simulated: bool, finish: Callable[[list[int]], None]
    ) -> None:
        super().__init__(tracker, OwnStep(lambda: None, torch.nn.Module()), simulated)
        self.steps = steps
        self.finish = finish
        self.ends: list[int] = []
        self.taken: list[Counter[str]] = []
        self.stepped: Counter[int] = Counter()  # by optimizer, since the last step of the training was over
        self._optimizers: dict[int, torch.optim.Optimizer] = {}
        self._names: dict[int, str] = {}
        self._modules: dict[int, torch.nn.Module] = {}
        self._weights: dict[int, str] = {}

    def _bind_all(self) -> None:
        enter = self._stack.enter_context
        enter(all_modules.register_module_forward_pre_hook(self._enters))
        enter(all_modules.register_module_forward_hook(self._leaves, always_call=True))
        enter(all_optimizers.register_optimizer_step_pre_hook(lambda *_: self._before_update()))
        enter(all_optimizers.register_optimizer_step_post_hook(lambda one, *_: self._after_update(one)))
        self.tracker._states = self._named_states
        for owner in (torch.optim.Optimizer, torch.nn.Module):
            enter(on_this_thread(owner, "zero_grad", partial(self._follow_zero_grad, owner.zero_grad)))
        make = torch.optim.Optimizer.__init__

        def made(one: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
            make(one, *args, **kwargs)
            self._optimizers[id(one)] = one

        enter(mock.patch.object(torch.optim.Optimizer, "__init__", made))

    def arrived(self, tensors: list[FakeTensor]) -> None:
        """Bind what came to the GPU from the host, outside of a model, as inputs."""
        if self._depth == 0 and not self._in_backward():
            self.tracker.bind("inputs", tensors)

    def _enters(self, module: torch.nn.Module, _: Any) -> None:
        if self.tracker.step == 0:
            self.begin_step(1)
        if id(module) not in self._names:
            self._discover(module)
        self.tracker._modules.append(self._names[id(module)])
        if isinstance(module, _Loss) and self._depth == 0:  # torch's own losses are no part of the model
            self._depth += 1
        else:
            self._enter_module()

    def _leaves(self, *_: Any) -> None:
        self.tracker._modules.pop()
        self._leave_module()

    def _discover(self, root: torch.nn.Module) -> None:
        """Name a model's modules, and bind its weights, buffers and gradients, when first a part is met."""
        kind = type(root).__name__
        for path, module in root.named_modules():
            if self._names.setdefault(id(module), f"{kind}.{path}" if path else kind):
                self._modules[id(module)] = module  # alive, or another may get its id
        for path, weight in root.named_parameters():
            self._bind_weight(weight, f"{kind}.{path}")
        for path, buffer in root.named_buffers():
            self.tracker.bind("parameters", [buffer], f"{kind}.{path}")

    def _bind_weight(self, weight: torch.Tensor, name: str) -> None:
        if id(weight) in self._weights:
            return
        self._weights[id(weight)] = name
        self.tracker.bind("parameters", [weight], name)
        if weight.requires_grad and weight.is_leaf:
            bind = partial(self._bind_gradient, name)
            self._stack.enter_context(weight.register_post_accumulate_grad_hook(bind))

    def _bind_gradient(self, name: str, owner: torch.Tensor) -> None:
        self.tracker.bind("gradients", [owner.grad], name)

    def _after_update(self, optimizer: torch.optim.Optimizer) -> None:
        """Count a step of an optimizer; when all that step have, one step of the training is over."""
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        for number, weight in enumerate(weights):
            self._bind_weight(weight, f"{type(optimizer).__name__}.params.{number}")
            self.tracker.bind("gradients", [weight.grad], self._weights[id(weight)])
        self._optimizers[id(optimizer)] = optimizer
        self.stepped[id(optimizer)] += 1
        self.tracker.bind_states()
        if all(self.stepped[one] for one in self._optimizers) or max(self.stepped.values()) == PATIENCE:
            self.end_step()

    def _named_states(self) -> Iterator[tuple[str, Any]]:
        for one in self._optimizers.values():
            names = {id(weight): self._weights.get(id(weight), "a weight") for weight in one.state}
            for name, kept in named_states_of(one, names):
                yield from (
                    (name, tensor) for tensor in tree_leaves(kept) if isinstance(tensor, torch.Tensor)
                )

    def end_step(self) -> None:
        """One step of the training is over: note where it ended; with the last of them, end the script."""
        taken: Counter[str] = Counter()
        for one, times in self.stepped.items():
            taken[type(self._optimizers[one]).__name__] += times
        self.taken.append(taken)
        self._optimizers = {one: self._optimizers[one] for one in self.stepped}  # the others never step
        self.stepped.clear()
        self.ends.append(len(self.tracker.events))
        if len(self.ends) == self.steps:
            self.last_step()
            raise Finished
        self.begin_step(self.tracker.step + 1)

    def last_step(self) -> None:
        """Bind the weights of modules that were never called, as of a moving average, and call `finish`."""
        for module in [one for one in gc.get_objects() if issubclass(type(one), torch.nn.Module)]:
            for name, weight in module.named_parameters(recurse=False):
                if id(weight) not in self._weights and self.tracker._known(weight):
                    self.tracker.bind("parameters", [weight], f"{type(module).__name__}.{name}")
        self.finish(self.ends)
