"""Following code as it is: a script's models, optimizers and steps are noticed, data on the host stays real.

`ScriptWatch` follows the steps. `HostValues` decides where each operator runs: values of the host's tensors
are known, and so are results of small known values on the simulated GPU.
"""

import gc
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NoReturn
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules import module as all_modules
from torch.nn.modules.loss import _Loss
from torch.optim import optimizer as all_optimizers
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from ..errors import StepError
from ..measuring.call_site import calling_place, described
from ..measuring.copy_to_device import OwnStep
from ..measuring.cuda_answers import check_device
from ..measuring.fake_mode import ASK_DEVICE, LIFT, READ_NUMBER
from ..measuring.optimizers import named_states_of
from ..measuring.patching import UnlessCompiling, on_this_thread
from ..measuring.phases import PLACEHOLDER, PhaseWatch, formatted
from ..measuring.tracker import Tracker, has_made_of_others, tensors_in
from .guesses import guess, guessed, known_on, known_values
from .shield import NotAllowed
from .whole import MOST_MORE, WholeRun

# Steps of one optimizer after which another one, that was made and never stepped, is waited for no more
PATIENCE = 16

SMALL = 1 << 20  # Elements up to which values are known on the simulated GPU
HUGE = 1 << 30  # Bytes from which a new tensor on the host has no values: a weight, not data
ASK_PINNED = torch.ops.aten.is_pinned.default
PLAIN = (torch.Tensor, torch.nn.Parameter)
ANY_VALUE = ("empty", "new_empty", "empty_like", "empty_strided")  # Operators that leave values open

INDEX, MASKED = torch.ops.aten.index.Tensor, torch.ops.aten.masked_select.default


class Finished(BaseException):
    """Ends a script that has taken its steps. No Exception, so that no handler of the script's stops it."""


class ScriptWatch(PhaseWatch):
    """Tells the tracker the phases of a script's steps; the last one calls `finish` with each step's end.

    With a `whole` run the script then goes on, and its parts are told to that.
    """

    def __init__(
        self,
        tracker: Tracker,
        steps: int,
        simulated: bool,
        finish: Callable[[list[int]], None],
        whole: WholeRun | None = None,
    ) -> None:
        super().__init__(tracker, OwnStep(lambda: None, torch.nn.Module()), simulated)
        self.steps = steps
        self.finish = finish
        self.whole = whole
        self.ends: list[int] = []
        self.taken: list[Counter[str]] = []
        self.in_a_thread = ""  # a sentence once another thread has used the GPU, or an optimizer
        self._thread = threading.get_ident()
        self.stepped: Counter[int] = Counter()  # by optimizer, since the last step of the training was over
        self._kinds: dict[int, str] = {}  # of optimizers that have stepped
        # By id, and weak: a script may replace its model, and what nobody else holds is freed
        self._optimizers: MutableMapping[int, torch.optim.Optimizer] = weakref.WeakValueDictionary()
        self._names: dict[int, str] = {}
        self._modules: dict[int, weakref.ref[torch.nn.Module]] = {}
        self._weights: dict[int, str] = {}

    def _bind_all(self) -> None:
        enter = self._stack.enter_context
        enter(all_modules.register_module_forward_pre_hook(UnlessCompiling(self._enters)))
        leaves = UnlessCompiling(only_here(self._leaves))
        enter(all_modules.register_module_forward_hook(leaves, always_call=True))
        enter(all_optimizers.register_optimizer_step_pre_hook(lambda *_: self._update_begins()))
        enter(all_optimizers.register_optimizer_step_post_hook(lambda one, *_: self._after_update(one)))
        self.tracker.states = self._named_states
        # no hook tells of zero_grad, or of a new optimizer: both stay until torch has one
        for owner in (torch.optim.Optimizer, torch.nn.Module):
            enter(on_this_thread(owner, "zero_grad", partial(self._follow_zero_grad, owner.zero_grad)))
        make = torch.optim.Optimizer.__init__

        def made(one: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
            make(one, *args, **kwargs)
            self._optimizers[id(one)] = one

        enter(mock.patch.object(torch.optim.Optimizer, "__init__", made))

    def _update_begins(self) -> None:
        if threading.get_ident() != self._thread:
            self.refuse_thread()
        if self.whole:
            self.whole.begin_step()
        self._before_update()

    def refuse_thread(self) -> NoReturn:
        """Raise NotAllowed, and keep its sentence, as an error ends its thread and not the script."""
        self.in_a_thread = (
            f"{described(calling_place()[0])}: runs in another thread, but only the main thread is followed:"
            " call the thread's function there"
        )
        raise NotAllowed(self.in_a_thread)

    def begin_gpu(self, begin: Callable[[], None]) -> None:
        """`torch.cuda._lazy_init`, which a simulated tensor does not need: so this is another thread."""
        if threading.get_ident() != self._thread:
            self.refuse_thread()
        begin()

    def arrived(self, tensors: list[FakeTensor]) -> None:
        """Bind what came to the GPU from the host, outside of a model, as inputs."""
        if self._depth == 0 and not self._in_backward():
            known = ((tensor, self.tracker.known(tensor)) for tensor in tensors)
            self.tracker.bind(
                "inputs", (tensor for tensor, storage in known if storage and not storage.bound)
            )

    def _enters(self, module: torch.nn.Module, _: Any) -> None:
        if threading.get_ident() != self._thread:  # a module that it has made itself has real weights
            if any(isinstance(weight, FakeTensor) for weight in module.parameters(recurse=False)):
                self.refuse_thread()
            return
        module = getattr(module, "_orig_mod", module)  # of a module that torch.compile returned
        if self.tracker.step == 0:
            self.begin_step(1)
        if id(module) not in self._names:
            self._discover(module)
        if self.whole and self._depth == 0 and not self._in_backward():
            self.whole.forward(module, self._trains(module))
        self.tracker.modules.append(self._names[id(module)])
        if isinstance(module, _Loss) and self._depth == 0:  # torch's own losses are no part of the model
            self._depth += 1
        else:
            self._enter_module()

    def _trains(self, module: torch.nn.Module) -> bool:
        """True for a module with a weight of an optimizer's, and for any before there is an optimizer."""
        groups = [group for one in self._optimizers.values() for group in one.param_groups]
        trained = {id(weight) for group in groups for weight in group["params"]}
        return not trained or any(id(weight) in trained for weight in module.parameters())

    def _begin_backward(self) -> None:
        if self.whole:
            self.whole.backward()
        super()._begin_backward()

    def _leaves(self, *_: Any) -> None:
        self.tracker.modules.pop()
        self._leave_module()

    def _discover(self, root: torch.nn.Module) -> None:
        """Name a model's modules, and bind its weights, buffers and gradients, when first a part is met."""
        kind = type(root).__name__
        for path, module in root.named_modules():
            if id(module) not in self._names:
                self._names[id(module)] = f"{kind}.{path}" if path else kind
                weights = [id(weight) for weight in module.parameters(recurse=False)]
                forget = partial(self._forget, id(module), weights)  # as another may get its id
                self._modules[id(module)] = weakref.ref(module, forget)
        for path, weight in root.named_parameters():
            self._bind_weight(weight, f"{kind}.{path}")
        for path, buffer in root.named_buffers():
            self.tracker.bind("parameters", [buffer], f"{kind}.{path}")

    def _forget(self, module: int, weights: list[int], _: Any) -> None:
        for names, each in ((self._names, module), *((self._weights, weight) for weight in weights)):
            names.pop(each, None)
        del self._modules[module]

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
        self._kinds[id(optimizer)] = type(optimizer).__name__
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
        if self.whole:
            self.whole.steps += 1
            if self.whole.over:
                self._end_further_step(self.whole)
                return
        taken: Counter[str] = Counter()
        for one, times in self.stepped.items():
            taken[self._kinds[one]] += times
        self.taken.append(taken)
        for one in set(self._optimizers) - set(self.stepped):  # which never step
            del self._optimizers[one]
        self.stepped.clear()
        self.ends.append(len(self.tracker.events))
        if len(self.ends) == self.steps:
            self.last_step()
            if not self.whole:
                raise Finished
            self.whole.over = True
        self.begin_step(self.tracker.step + 1)

    def _end_further_step(self, whole: WholeRun) -> None:
        """One more step after the watched ones is over. A loop that does not end is ended with the script."""
        self.stepped.clear()
        if whole.steps == self.steps + MOST_MORE:
            whole.notes.setdefault(
                f"the script was ended after {MOST_MORE} more steps, as its loop of training did not end:"
                " what comes after it was not reached"
            )
            raise Finished
        self.begin_step(self.tracker.step + 1)

    def last_step(self) -> None:
        """Bind the weights of modules that were never called, as of a moving average, and call `finish`."""
        for module in [one for one in gc.get_objects() if issubclass(type(one), torch.nn.Module)]:
            for name, weight in module.named_parameters(recurse=False):
                if id(weight) not in self._weights and self.tracker.known(weight):
                    self.tracker.bind("parameters", [weight], f"{type(module).__name__}.{name}")
        self.finish(self.ends)


class HostValues(TorchDispatchMode):
    """Decides for each operator whether it runs on the host, on the simulated GPU, or small on both.

    `arrived` is told of tensors that come from the host to the GPU. Values that nobody knows are
    placeholders, and the lines that read them are in `read`.
    """

    GUESSES = True  # A test of unknown values has the answer that the placeholder gives

    def __init__(self, arrived: Callable[[list[FakeTensor]], Any]) -> None:
        super().__init__()
        self.read: dict[str, None] = {}
        self.anomalies = False  # True once backward has asked a gradient whether it has a NaN
        self._arrived = arrived
        self._stack = ExitStack()

    def __enter__(self) -> "HostValues":
        self._fake = torch.empty(0, device="cuda").fake_mode  # pyrefly: ignore [missing-attribute]
        enter = self._stack.enter_context
        enter(all_modules.register_module_parameter_registration_hook(only_here(self._without_values)))
        # What torch refuses for fake tensors is answered from known values. Each goes when torch answers.
        enter(on_this_thread(torch.utils, "swap_tensors", partial(self._swap, torch.utils.swap_tensors)))
        enter(on_this_thread(torch.UntypedStorage, "data_ptr", lambda storage: storage._cdata))
        answers: dict[str, Callable[..., Any]] = {
            "numpy": self._as_numbers,
            "__array__": self._as_numbers,
            "__deepcopy__": _copied,
            "data_ptr": _address,
            "__format__": formatted,
        }
        for name, answer in answers.items():
            enter(on_this_thread(FakeTensor, name, answer))
        return super().__enter__()

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        super().__exit__(exc_type, exc_val, exc_tb)
        self._stack.close()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as in fake_mode

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is ASK_DEVICE:
            return func(*args, **kwargs)
        if has_made_of_others(types):
            return NotImplemented
        if func is ASK_PINNED and torch._C._current_graph_task_id() != -1:
            return True  # DDP's reducer has asked for pinned memory, and refuses what is not
        if "pin_memory" in kwargs:
            kwargs = kwargs | {"pin_memory": False}
        asked: Any = kwargs.get("device") or torch.device("cpu")
        if asked.type == "cuda":
            check_device(str(asked))
        elif FakeTensor not in types and not (asked.type == "cpu" and _is_huge(args, kwargs)):
            with no_dispatch():
                return func(*args, **kwargs)
        if func is READ_NUMBER and isinstance(args[0], FakeTensor):
            return self._number(args[0])
        # An operator takes tensors and lists of tensors: torch's own search through all kinds of containers
        # would take as long as all the rest.
        given = [*tensors_in(args), *tensors_in(kwargs.values())]
        if func is not LIFT and not all(isinstance(one, FakeTensor) for one in given):
            args, kwargs = tree_map_only(torch.Tensor, self._let_in, (args, kwargs))
            given = [*tensors_in(args), *tensors_in(kwargs.values())]
        if torch.Tag.dynamic_output_shape in func.tags:
            out = self._shaped_by_values(func, args, kwargs, given)
        else:
            out = func(*args, **kwargs)
        self._follow_values(func, args, kwargs, given, out)
        return out

    def _shaped_by_values(self, func: Any, args: Any, kwargs: Any, given: Sequence[torch.Tensor]) -> Any:
        """The result of an operator whose shape depends on values, where these are known."""
        if func is MASKED and args[0].shape == args[1].shape:  # CUDA's kernel, too, makes it an index
            func, args = INDEX, (args[0], [args[1]])
        if func is INDEX:
            return func(args[0], self._positions(args[1]))
        values = {id(one): known_values(one) for one in given}
        if any(value is None for value in values.values()):
            return func(*args, **kwargs)  # which raises torch's error
        real_args, real_kwargs = tree_map_only(torch.Tensor, lambda one: values[id(one)], (args, kwargs))
        with no_dispatch():
            real = func(*real_args, **real_kwargs)
        return tree_map_only(torch.Tensor, partial(known_on, given[0]), real)

    def _positions(self, indices: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Indices with the positions that a known mask chooses instead of it, as CUDA's kernel makes them."""
        found: list[torch.Tensor | None] = []
        for index in indices:
            mask = None if index is None or index.dtype != torch.bool else known_values(index)
            if mask is None:
                found.append(index)
            else:
                with no_dispatch():
                    chosen = mask.nonzero()
                assert index is not None, "a mask is known"
                found += known_on(index, chosen).unbind(1)
        return found

    def _without_values(self, _: Any, __: str, weight: Any) -> None:
        """Put a weight that a module registers into a simulated host's memory, without values."""
        if type(weight) not in PLAIN or weight.device.type != "cpu" or weight.layout is not torch.strided:
            return
        with no_dispatch():
            outline = torch.empty_strided(weight.shape, weight.stride(), dtype=weight.dtype, device="meta")
        made = FakeTensor(self._fake, outline, torch.device("cpu"))
        vars(made).update(vars(weight), _is_param=True)
        made.requires_grad_(weight.requires_grad)
        torch.utils.swap_tensors(weight, made)

    def _swap(self, swap: Callable[[Any, Any], None], one: torch.Tensor, other: torch.Tensor) -> None:
        """`swap_tensors`, which refuses tensors that torch's fake mode remembers by a weak reference."""
        self._fake.fake_tensor_converter.meta_converter.tensor_memo.clear()
        swap(one, other)

    def _let_in(self, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, FakeTensor):
            return tensor
        if tensor.is_meta:
            return FakeTensor(self._fake, tensor, torch.device("cpu"))
        with torch.no_grad(), no_dispatch():
            plain = tensor.detach() if tensor.requires_grad else tensor
        made = self._fake.from_tensor(plain)
        made.known = tensor
        return made

    def _follow_values(
        self, func: Any, args: Any, kwargs: Any, given: Sequence[torch.Tensor], out: Any
    ) -> None:
        """Bind what comes to the GPU as inputs, and compute small results of known values on the host."""
        made = [leaf for leaf in tensors_in((out,)) if isinstance(leaf, FakeTensor)]
        if not any(_on_gpu(one) for one in given):
            self._arrived([one for one in made if _on_gpu(one)])
        values = {id(leaf): known_values(leaf) for leaf in given}
        unknown = any(value is None for value in values.values())
        left_open = func.overloadpacket.__name__ in ANY_VALUE
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        no_values = unknown or is_random or (left_open and not self.GUESSES)
        if no_values or any(one.numel() > SMALL for one in made):
            if func._schema.is_mutable:
                for one in made:
                    _forget(one)
            if self.GUESSES and unknown:
                guess(func, args, kwargs, given, made)
            return
        if "device" in kwargs:
            kwargs = kwargs | {"device": torch.device("cpu")}
        args = tuple(torch.device("cpu") if isinstance(one, torch.device) else one for one in args)
        args, kwargs = tree_map_only(torch.Tensor, lambda leaf: values[id(leaf)], (args, kwargs))
        try:
            with no_dispatch():
                real = func(*args, **kwargs)
                if left_open:
                    real.fill_(PLACEHOLDER)
        except NotImplementedError:
            # the host lacks some kernels in 16 bits: these values are unknown from now on
            for one in made:
                _forget(one)
            return
        for one, value in zip(made, tensors_in((real,)), strict=False):
            one.known = value  # pyrefly: ignore [missing-attribute]

    def _number(self, tensor: FakeTensor) -> Any:
        """The number in a tensor where it is known, else a placeholder.

        Raises StepError for a truth where nothing is guessed.
        """
        if tensor.dtype == torch.bool and known_values(tensor) is None:
            if torch.is_anomaly_enabled() and calling_place()[1]:
                self.anomalies = True
                return False
            if not self.GUESSES:
                place = described(calling_place()[0])
                raise StepError(f"{place}: tests values on the GPU, but a simulated GPU has no values")
        with no_dispatch():
            return self._values(tensor).item()

    def _as_numbers(self, tensor: FakeTensor, *_: Any, **__: Any) -> Any:
        with no_dispatch():
            return self._values(tensor).detach().numpy()

    def _values(self, tensor: FakeTensor) -> torch.Tensor:
        """Numbers on the host; placeholders where they are unknown, and the line that reads them is noted."""
        if (value := known_values(tensor)) is not None:
            return value
        self.read.setdefault(described(calling_place()[0]))
        return torch.full(tensor.shape, guessed(tensor)).to(tensor.dtype)


def only_here(hook: Callable[..., None]) -> Callable[..., None]:
    """A hook that torch calls in all threads, for this one alone."""
    here = threading.get_ident()

    def chosen(*args: Any) -> None:
        if threading.get_ident() == here:
            hook(*args)

    return chosen


def _copied(tensor: FakeTensor, memo: dict[int, Any]) -> FakeTensor:
    """`copy.deepcopy` of a simulated tensor, as torch has it for others."""
    if id(tensor) not in memo:
        with torch.no_grad():
            made = tensor.detach().clone()
        vars(made).update({name: value for name, value in vars(tensor).items() if name not in vars(made)})
        memo[id(tensor)] = made.requires_grad_(tensor.requires_grad)
    return memo[id(tensor)]


def _address(tensor: FakeTensor) -> int:
    """An address that tells tensors apart; nothing is there."""
    return tensor.untyped_storage().data_ptr() + int(tensor.storage_offset()) * tensor.element_size()


def _on_gpu(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, FakeTensor) and tensor.fake_device.type == "cuda"


def _is_huge(args: Any, kwargs: Any) -> bool:
    """True for a new tensor on the host of over `HUGE` bytes: a weight, as data is read from somewhere."""
    shape = args[0] if args and isinstance(args[0], (list, tuple)) else ()
    if not shape or not all(isinstance(size, int) for size in shape):
        return False
    dtype = kwargs.get("dtype") or torch.get_default_dtype()
    return torch.Size(shape).numel() * dtype.itemsize > HUGE


def _forget(tensor: FakeTensor) -> None:
    """Values that were overwritten by unknown ones are unknown, those of views as well."""
    value = vars(tensor).pop("known", None)
    if value is not None and _on_gpu(tensor):
        value.untyped_storage().resize_(0)
