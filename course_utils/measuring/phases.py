"""Following a step that names no phases: the model's modules, autograd and the optimizer show them."""

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from typing import Any, Self

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from ..errors import StepError
from .call_site import calling_place, described
from .copy_to_device import OwnStep, tensors_in
from .fake_mode import ASK_DEVICE, LIFT, READ_NUMBER
from .patching import UnlessCompiling, on_this_thread
from .tracker import Tracker, has_made_of_others, newest_node

PLACEHOLDER = 1.0  # The value of a simulated loss.item(): finite, and safe to divide by


class PhaseWatch(TorchDispatchMode):
    """Tells the tracker each phase of the copied step `work`; answers for values of a simulated GPU."""

    def __init__(self, tracker: Tracker, work: OwnStep, simulated: bool) -> None:
        super().__init__()
        self.tracker = tracker
        self.work = work
        self.simulated = simulated
        self.placeholders = False
        self._depth = 0  # of modules within each other
        self._calls = 0  # of backward within each other
        self._had_backward = False
        self._has_gradient = self._asked_for_gradients = self._called = False
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self._bind_all()
        # no hook tells of a backward's beginning: these stay until torch has one
        for name, seen in (("backward", _ignore), ("grad", self._note_gradients)):
            followed = partial(self._follow_backward, getattr(torch.autograd, name), seen)
            self._stack.enter_context(on_this_thread(torch.autograd, name, followed))
        if self.simulated:  # a fake tensor has no values to show; these go when its own errors say what to do
            self._fake = torch.empty(0, device="cuda").fake_mode  # pyrefly: ignore [missing-attribute]
            answers = {"__format__": formatted, "numpy": _no_numpy, "__array__": _no_numpy}
            for name, answer in answers.items():
                self._stack.enter_context(on_this_thread(FakeTensor, name, answer))
        return super().__enter__()

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        super().__exit__(exc_type, exc_val, exc_tb)
        self._stack.close()  # hooks as well, or the copies and what watches them would keep each other alive

    def _bind_all(self) -> None:
        tracker = self.tracker
        work = self.work
        enter = self._stack.enter_context
        for module in work.model.modules():
            enter(module.register_forward_pre_hook(UnlessCompiling(lambda *_: self._enter_module())))
            leave = UnlessCompiling(lambda *_: self._leave_module())
            enter(module.register_forward_hook(leave, always_call=True))
        tracker.bind("parameters", tensors_in(work.model, set()))
        tracker.watch(work.model, work.named_states)
        for tensor in tensors_in(work.batch, set()):
            tracker.bind("parameters" if isinstance(tensor, torch.nn.Parameter) else "inputs", [tensor])
        tracker.bind("gradients", [parameter.grad for parameter in work.model.parameters()])
        for trained in (parameter for parameter in work.model.parameters() if parameter.requires_grad):
            enter(trained.register_post_accumulate_grad_hook(self._note_gradient))
        for optimizer in work.optimizers:
            enter(optimizer.register_step_pre_hook(lambda *_: self._before_update()))
            enter(optimizer.register_step_post_hook(lambda *_: tracker.bind_states()))
        for owner in (work.model, *work.optimizers):
            owner.zero_grad = partial(self._follow_zero_grad, owner.zero_grad)
            self._stack.callback(vars(owner).pop, "zero_grad")

    def begin_step(self, number: int) -> None:
        """A step begins: what comes before the model is called counts as forward."""
        self.tracker.step = number
        self.tracker.micro_batch = 0
        self._had_backward = False
        self.tracker.begin("forward")

    def end_step(self) -> None:
        """Bind what the step may have replaced. Raises StepError if model or backward never ran."""
        self.tracker.bind("parameters", self.work.model.parameters())
        forward_alone = self._called and not self._had_backward and not self.work.optimizers
        if not (self._has_gradient or self._asked_for_gradients or forward_alone):
            raise StepError(
                "the step gave no gradient to any parameter of the model that it was called with."
                " It must call loss.backward() on a loss of that model,"
                " not of one with the same name outside."
                " To measure only a forward, leave out the optimizer"
            )

    def _note_gradient(self, _: torch.Tensor) -> None:
        self._has_gradient = True

    def _note_gradients(self, gradients: Iterable[torch.Tensor | None]) -> None:
        """Note the gradients that `torch.autograd.grad` returned."""
        self._asked_for_gradients = True
        self.tracker.bind("gradients", gradients)

    def _begin(self, phase: str) -> None:
        if self.tracker.phase != phase:
            self.tracker.begin(phase)

    def _in_backward(self) -> bool:
        return self._calls > 0 or torch._C._current_graph_task_id() != -1

    def _enter_module(self) -> None:
        self._depth += 1
        self._called = True
        if self._depth > 1 or self._in_backward():
            return
        if self._had_backward:  # one more micro-batch
            self.tracker.micro_batch += 1
            self._had_backward = False
        self._begin("forward")

    def _leave_module(self) -> None:
        self._depth -= 1
        if self._depth == 0 and not self._in_backward():
            self._begin("loss")

    def _begin_backward(self) -> None:
        self._had_backward = True
        self._begin("backward")

    def _follow_backward(
        self, backward: Callable[..., Any], seen: Callable[[Any], None], *args: Any, **how: Any
    ) -> Any:
        self._begin_backward()
        self._calls += 1
        first = newest_node()
        try:
            result = backward(*args, **how)
        finally:
            self._calls -= 1
        if self.simulated and result is not None and newest_node() > first:
            self.tracker.number_anew(result, first)
        seen(result)
        return result

    def _before_update(self) -> None:
        self._begin("optimizer")
        self.tracker.bind("gradients", [parameter.grad for parameter in self.work.model.parameters()])

    def _follow_zero_grad(self, zero_grad: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        before = self.tracker.phase
        self._begin("zero_grad")
        try:
            return zero_grad(*args, **kwargs)
        finally:
            if before in ("forward", "loss"):  # before backward, as many write it: the pass goes on
                self._begin(before)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is ASK_DEVICE:
            return func(*args, **kwargs)
        if has_made_of_others(types):
            return NotImplemented
        if self._in_backward():
            self._begin_backward()
        elif self.tracker.phase == "backward" and not func.is_view and func is not READ_NUMBER:
            self._begin("optimizer")  # clipping, unscaling, or an update written by hand
        if self.simulated:
            if func is READ_NUMBER and isinstance(args[0], FakeTensor) and args[0].is_floating_point():
                return self._value(args[0])
            if func is not LIFT and any(_is_outside(leaf) for leaf in tree_leaves((args, kwargs))):
                args, kwargs = tree_map_only(torch.Tensor, self._let_in, (args, kwargs))
        return func(*args, **kwargs)

    def _value(self, tensor: torch.Tensor) -> Any:
        """Read a number that is on the host, as an optimizer's count of steps; else give the placeholder."""
        try:
            return READ_NUMBER(tensor)
        except DataDependentOutputException:
            self.tracker.failure = None
            self.placeholders = True
            return PLACEHOLDER

    def _let_in(self, tensor: torch.Tensor) -> torch.Tensor:
        """A simulated tensor for a real one that the step found outside, so that .to("cuda") works on it."""
        if not _is_outside(tensor):
            return tensor
        if tensor.requires_grad:
            place, _ = calling_place()
            raise StepError(
                f"{described(place)}: uses a weight of shape {tuple(tensor.shape)}"
                " that is not of the model that the step was called with."
                " The step works on copies: use its arguments, not the objects outside of it"
            )
        return self._fake.from_tensor(tensor)


def _ignore(_: Any) -> None:
    """Do nothing with what torch.autograd.backward returns, which is None."""


def _is_outside(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor)


def formatted(tensor: torch.Tensor, how: str) -> str:
    """f"{loss:.3f}" on a simulated loss; torch formats the numbers of plain tensors only."""
    if tensor.dim() == 0:
        return format(tensor.item(), how)
    return object.__format__(tensor, how)


def _no_numpy(tensor: torch.Tensor, *_: Any, **__: Any) -> Any:
    place, _in_backward = calling_place()
    raise StepError(
        f"{described(place)}: numpy needs the values of a tensor,"
        " and a simulated tensor has a shape but no values."
        " Leave this out of the step, or measure it with source='cpu' or, on a GPU, 'live'"
    )
