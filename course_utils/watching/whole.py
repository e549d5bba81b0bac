"""A whole run: its parts by what a script calls, and loops that end once their training was watched.

A loop that trains ends after the watched steps: those of the script's own file, and every DataLoader's. So
the script reaches its own evaluation and saving. A part lasts until the next one begins.
"""

import ast
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch

from ..allocator.replay import Playback, Request
from ..estimating.workspaces import installed_torch
from ..measurement import RunPart
from ..measuring.call_site import INSTALLED, described, is_machinery
from ..measuring.patching import on_this_thread
from ..measuring.tracker import Tracker
from ..units import format_bytes
from .report import ORDERED_BY_AGE
from .shield import SAFETENSORS

MOST_BATCHES = 32  # That an evaluation gets from one DataLoader
MOST_MORE = 16  # Steps after the watched ones, in loops that cannot be ended
SET_UP, LOADING = "set-up", "loading"
EVALUATION, WITH_GRADIENTS = "evaluation", "evaluation with gradients"
FIRST_STEP, LATER_STEPS, SAVING, GENERATION = "first step", "later steps", "saving", "generation"
EVALUATIONS = (EVALUATION, WITH_GRADIENTS)

CALLS = {
    "torch.save": SAVING, "save_pretrained": SAVING, "torch.load": LOADING, "load_state_dict": LOADING,
    "eval": EVALUATION, "generate": GENERATION,
}  # fmt: skip
"""Functions and methods in a script's source, and the part that a call begins."""

NAME = "_loop_of_a_watched_script"


@dataclass
class Begun:
    """A part that begins at this event, in this line of the script."""

    event: int
    name: str
    line: str = ""


class WholeRun:
    """Follows the parts of a script, and ends its loops once `over` is set."""

    def __init__(self, tracker: Tracker, path: Path) -> None:
        self.tracker = tracker
        self.path = path
        self.begun = [Begun(0, SET_UP)]
        self.over = False  # True once the watched steps are taken
        self.steps = 0  # that were taken so far
        self.end: int | None = None  # the event at which the script ended
        self.notes: dict[str, None] = {}
        self._lines: dict[str, str] = {}  # in which steps began
        self._asked_for_states: int | None = None  # the event at which a state dict was asked for
        self._inside = False  # of a call that is a part
        self._left_loop = False  # True from the end of a loop that trained until the next step

    # The parts

    def begin(self, name: str, line: str) -> None:
        """A part begins here, unless it goes on."""
        self._asked_for_states = None
        last = self.begun[-1]
        if (last.name, last.line) != (name, line):
            self._add(Begun(self.tracker.certain(), name, line))

    def _add(self, part: Begun) -> None:
        self.begun.append(part)
        self.tracker.borders.add(part.event)

    def forward(self, module: torch.nn.Module, trained: bool) -> None:
        """A module is called by no other one. With gradients on, in training, it is a step's forward."""
        other = self._left_loop and any(True for _ in module.parameters())  # an average of the weights, say
        if self._inside or not (trained or other):
            return
        graded = torch.is_grad_enabled()
        if graded and module.training:
            self.begin_step()
            return
        line, generates = self._place()
        self.begin(GENERATION if generates else WITH_GRADIENTS if graded else EVALUATION, line)

    def begin_step(self) -> None:
        """A training step goes on, or the next one begins."""
        self._left_loop = False
        self.begin(*self._step())

    def backward(self) -> None:
        """Backward begins: what was taken for an evaluation with gradients was a step's forward."""
        last = self.begun[-1]
        if last.name == WITH_GRADIENTS:
            last.name, last.line = self._step()

    def _step(self) -> tuple[str, str]:
        """The part of this step, and the line in which the first of its kind began."""
        name = LATER_STEPS if self.steps else FIRST_STEP
        return name, self._lines.setdefault(name, self._place()[0])

    def _place(self) -> tuple[str, bool]:
        """The innermost line of the script's own files, and True if a function `generate` called from there.

        Where `generate` is the script's own, the line is that of its caller.
        """
        folder = self.path.resolve().parent
        found, generates = "", False
        frame = sys._getframe(1)
        while frame is not None:
            code = frame.f_code
            if code.co_name == "generate":
                found, generates = "", True
            elif not found and _is_own(code.co_filename, folder):
                found = described((code.co_filename, frame.f_lineno))
            frame = frame.f_back
        return found, generates

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Inside, calls that load and save begin parts, and loops over a DataLoader may end."""
        loader = torch.utils.data.DataLoader
        begin = loader.__iter__

        def batches(one: Any) -> _Batches:
            return _Batches(self, begin(one), one)

        calls: list[tuple[Any, str, str]] = [(torch, "load", LOADING), (torch, "save", SAVING)]
        if find_spec("safetensors"):
            calls += [(import_module("safetensors.torch"), name, SAVING) for name in SAFETENSORS]
        with ExitStack() as stack:
            enter = stack.enter_context
            enter(mock.patch.object(loader, "__iter__", batches))
            for owner in (torch.nn.Module, torch.optim.Optimizer):
                calls.append((owner, "load_state_dict", LOADING))
                asked = partial(self._ask_for_states, owner.state_dict)
                enter(on_this_thread(owner, "state_dict", asked))
            for owner, name, part in calls:
                enter(on_this_thread(owner, name, partial(self._follow, part, getattr(owner, name))))
            yield

    def _follow(self, name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function that is a part; afterwards the part before it goes on."""
        if self._inside:
            return function(*args, **kwargs)
        before = self.begun[-1]
        line = self._place()[0]
        if name == SAVING and self._asked_for_states is not None:
            self._add(Begun(self._asked_for_states, name, line))  # they were asked for in order to be saved
        self.begin(name, line)
        self._inside = True
        try:
            return function(*args, **kwargs)
        finally:
            self._inside = False
            self.begin(before.name, before.line)

    def _ask_for_states(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not self._inside and self._asked_for_states is None:
            self._asked_for_states = self.tracker.certain()
        return function(*args, **kwargs)

    def found(self, emptied: Sequence[int]) -> tuple[RunPart, ...]:
        """The parts in the order in which they first began, each at its highest moment.

        `emptied` are the numbers of events after which the script gave back what the allocator had cached.
        """
        end = self.tracker.certain() if self.end is None else self.end
        self.tracker.borders.add(end)
        self.tracker.order_frees()
        run = Playback(None, {}, descending=installed_torch() < ORDERED_BY_AGE)
        levels = [(0, 0, 0)]  # bytes of tensors, allocated and reserved after each event
        for size, storage in self.tracker.events[:end]:
            if len(levels) - 1 in emptied:
                run.allocator.empty_cache()
            run.perform(Request(size, id(storage), storage.stream))
            levels.append((levels[-1][0] + size, run.allocator.allocated, run.allocator.reserved))
        moments: dict[tuple[str, str], list[int]] = {}
        for part, until in zip(self.begun, [*(part.event for part in self.begun[1:]), end], strict=True):
            their = moments.setdefault((part.name, part.line), [])
            if until > part.event or not their:  # nothing was allocated where a part went on for a moment
                their += range(part.event, until + 1)
        return tuple(
            RunPart(
                name,
                line,
                before=levels[their[0]][1],
                after=levels[their[-1]][1],
                allocated=max(levels[event][1] for event in their),
                reserved=max(levels[event][2] for event in their),
                breakdown=self.tracker.at(max(their, key=lambda event: levels[event][0]), f"peak of {name}"),
            )
            for (name, line), their in moments.items()
        )

    # The loops

    def ends_loop(self, steps: int) -> bool:
        """True for a loop that began when so many steps had been taken, if it has trained since."""
        ends = self.over and self.steps > steps
        self._left_loop |= ends
        return ends

    def execute(self, path: Path) -> None:
        """Execute the script as `runpy` does, with its loops so that they may end."""
        tree = ast.parse(path.read_bytes(), str(path))
        wanted = _calls(tree)
        code = compile(ast.fix_missing_locations(_Loops().visit(tree)), str(path.absolute()), "exec")
        module = ModuleType("__main__")
        vars(module).update({"__file__": str(path.absolute()), NAME: partial(_loop, self)})
        before = sys.modules["__main__"]
        sys.modules["__main__"] = module
        try:
            exec(code, vars(module))
        finally:  # before the module and all that it holds is gone
            self.end = self.tracker.certain()
            sys.modules["__main__"] = before
            reached = {part.name.removesuffix(" with gradients") for part in self.begun}
            for name, number in wanted.items():
                if name not in reached:
                    line = described((str(path), number))
                    self.notes.setdefault(f"not reached, or not recognized: {name}, {line}")


@cache
def _is_own(filename: str, folder: Path) -> bool:
    if is_machinery(filename) or INSTALLED.search(filename):
        return False
    return Path(filename).resolve().is_relative_to(folder)


class _Loop:
    """A loop that ends when it has trained, after the watched steps. It keeps no item alive."""

    def __init__(self, run: WholeRun, items: Iterable[Any]) -> None:
        self._run = run
        self._items = iter(items)
        self._steps = run.steps

    def __iter__(self) -> "_Loop":
        return self

    def __next__(self) -> Any:
        if not self.goes_on():
            raise StopIteration
        return next(self._items)

    def goes_on(self) -> bool:
        return not self._run.ends_loop(self._steps)


class _Batches(_Loop):
    """A loop over the batches of a DataLoader, of which an evaluation gets the first `MOST_BATCHES`."""

    def __init__(self, run: WholeRun, batches: Iterator[Any], loader: Any) -> None:
        super().__init__(run, batches)
        self._count = len(loader) if hasattr(loader.dataset, "__len__") else 0
        self._given = 0
        self._first = 0  # bytes alive after the first batch

    def __next__(self) -> Any:
        if self._given == 1:
            self._first = _alive(self._run.tracker)
        evaluates = self._run.begun[-1].name in EVALUATIONS and self._run.steps == self._steps
        if evaluates and self._given >= MOST_BATCHES != self._count:
            self._note_end()
            raise StopIteration
        self._given += 1
        return super().__next__()

    def _note_end(self) -> None:
        count, line = self._count, self._run.begun[-1].line
        note = f"evaluation got {self._given} of {count or 'unknown'} batches, in {line}"
        each = (_alive(self._run.tracker) - self._first) // (self._given - 1)
        if each > 0 and count:
            more = each * (count - self._given)
            note += f", and each leaves {format_bytes(each)}: the others add {format_bytes(more)}"
        self._run.notes.setdefault(note)


def _alive(tracker: Tracker) -> int:
    return sum(size for size, _ in tracker.events)


def _loop(run: WholeRun, items: Iterable[Any] | None = None) -> Any:
    """A `for` over these items, or a `while` without any, that may end; one that is compiled goes on."""
    if torch.compiler.is_compiling():
        return _Endless() if items is None else items
    return _Loop(run, () if items is None else items)


class _Endless:
    def goes_on(self) -> bool:
        return True


class _Loops(ast.NodeTransformer):
    """Puts each loop of a script's source through `_loop`, but for those of generators.

    A generator goes on, as something else may wait for its next item.
    """

    def visit_For(self, node: ast.For) -> ast.For:
        self.generic_visit(node)
        if not _yields(node):
            node.iter = ast.copy_location(_call(NAME, node.iter), node.iter)
        return node

    def visit_While(self, node: ast.While) -> Any:
        self.generic_visit(node)
        if _yields(node):
            return node
        name = f"{NAME}_{node.lineno}_{node.col_offset}"
        begin = ast.Assign([ast.Name(name, ast.Store())], _call(NAME))
        goes_on = ast.Call(ast.Attribute(ast.Name(name, ast.Load()), "goes_on", ast.Load()), [], [])
        node.test = ast.copy_location(ast.BoolOp(ast.And(), [goes_on, node.test]), node.test)
        return [ast.copy_location(begin, node), node]


def _call(name: str, *arguments: ast.expr) -> ast.Call:
    return ast.Call(ast.Name(name, ast.Load()), list(arguments), [])


def _yields(loop: ast.For | ast.While) -> bool:
    return any(isinstance(node, (ast.Yield, ast.YieldFrom)) for node in ast.walk(loop))


def _calls(tree: ast.AST) -> dict[str, int]:
    """Parts that the source calls for, with the line of the first such call."""
    found: dict[str, int] = {}
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id=owner), attr=name), lineno=line):
                part = CALLS.get(name) or CALLS.get(f"{owner}.{name}")
                if part:
                    found[part] = min(line, found.get(part, line))
    return found
