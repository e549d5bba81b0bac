"""A small model of autograd that counts bytes: what a step allocates and frees, in order, without torch.

A step is described operation by operation (`operations.py`): what each allocates, what it saves for backward,
what its backward allocates. The tape adds the rest as torch does (torch/csrc/autograd: engine.cpp,
input_buffer.cpp, saved_variable.cpp): backward runs the newest node that is ready, and a gradient is added in
place to the one that waits unless somebody else holds that too.

Lifetimes are explicit. A storage counts its holders, and is freed when the last of them releases it:
- a function holds the tensors that it makes until it returns (`operation`), as Python's variables and
  expressions do;
- a node holds the tensors that it saved until its backward has run;
- a gradient holds its storage until it has been added up or handed to its weight.

Sizes are formulas, not numbers ("c·sb·h": bytes per element, tokens, hidden size), so one tape serves every
run that differs in numbers alone.
"""

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any, Literal, NamedTuple, TypeVar, cast

Function = TypeVar("Function", bound=Callable[..., Any])

FORWARD = ("forward", "loss")
LAST = 1 << 60
"""The serial number of weights: their gradients are accumulated before anything else is done."""


class Place(NamedTuple):
    """A part of the network.

    Of blocks: which group of them, as one checkpoint has several, and which in that group; of the loss's
    pieces: which (`group`). END is where backward has ended.
    """

    part: Literal["stem", "block", "head", "loss", "piece", "end"]
    group: int = 0
    block: int = 0


STEM = Place("stem")
HEAD = Place("head")
LOSS = Place("loss")
END = Place("end")


class Mark(NamedTuple):
    """A phase comes to another place: the number of the event that comes next."""

    event: int
    phase: str
    place: Place


@dataclass(slots=True, eq=False)
class Storage:
    """Bytes on the device, with a count of their holders: one at first. The last to release them frees them.

    `recomputation` is the number of the second forward that made them, or 0; `kept` is True if they outlived
    the pass that made them.
    """

    tape: "Tape"
    size: str
    phase: str
    recomputation: int
    place: Place
    kind: str = ""
    kept: bool = True
    holders: int = 1

    def retain(self) -> "Storage":
        """One holder more."""
        assert self.holders > 0, "a storage was used after it had been freed"
        self.holders += 1
        return self

    unpack = retain  # as the tensor that a node saved

    def release(self) -> None:
        """One holder less."""
        assert self.holders > 0, "a storage was released more often than it was retained"
        self.holders -= 1
        if not self.holders:
            self.tape.free(self)

    def settled(self) -> str:
        """Its kind of memory: what it was bound to.

        Else it is an activation if it outlived the forward that made it, or temporary.
        """
        if self.kind:
            return self.kind
        made_by_forward = self.phase in FORWARD or self.recomputation
        return "activations" if made_by_forward and self.kept else "temporaries"


class Recovered(NamedTuple):
    """A saved tensor that a checkpoint computes again, or that is fetched from the host.

    `unpack` gives its storage, retained for the node's backward; `release` says that the node has run.
    """

    unpack: Callable[[], Storage]
    release: Callable[[], None]


Saved = Storage | Recovered


class Edge(NamedTuple):
    """The target of a tensor's gradient: an operation, and which of its outputs the tensor is."""

    node: "Node"
    output: int


@dataclass(slots=True, eq=False)
class Tensor:
    """A tensor of `shape` elements ("sb·h") of `element` bytes each ("c", "r", "4").

    Without an `edge` it has no gradient.
    """

    element: str
    shape: str
    storage: Storage
    edge: Edge | None = None

    @property
    def size(self) -> str:
        """Its bytes, as a formula."""
        return f"{self.element}·{self.shape}"


class Gradient(NamedTuple):
    """A gradient on its way.

    torch adds to a view only out of place; `becomes` is the size in which it arrives where it has to be
    summed or cast for its tensor.
    """

    storage: Storage
    size: str
    view: bool = False
    becomes: str = ""

    def again(self, view: bool = False, becomes: str = "") -> "Gradient":
        """The same gradient for a second tensor, or as a view."""
        return Gradient(self.storage.retain(), self.size, view or self.view, becomes)


Backward = Callable[[list[Gradient]], Sequence[Gradient | None]]
"""From the gradients of an operation's outputs to those of its inputs."""


class Node:
    """An operation in autograd's graph: what it saved, what its backward does, where those gradients go."""

    __slots__ = ("backward", "edges", "gradients", "place", "saved", "serial")

    def __init__(
        self, serial: int, place: Place | None, backward: Backward, edges: list[Edge | None]
    ) -> None:
        self.serial = serial
        self.place = place
        self.backward = backward
        self.edges = edges
        self.saved: list[Saved] = []
        self.gradients: dict[int, Gradient] = {}


class Saving(NamedTuple):
    """A tensor to be saved for backward, as the ledger is to name it."""

    tensor: Tensor
    operation: str
    name: str
    why: str


class Kept(NamedTuple):
    """One line of the ledger: a storage that autograd keeps, and why."""

    operation: str
    name: str
    size: str
    why: str


class Tape:
    """Runs a step's operations and records what they allocate and free."""

    def __init__(self) -> None:
        self.events: list[tuple[Storage, int]] = []
        self.marks = [Mark(0, "forward", STEM)]
        self.ledger: dict[Storage, tuple[Place, Kept]] = {}
        self.phase = "forward"
        self.place = STEM
        self.recomputations = 0
        self.recomputing = 0
        self.grad_enabled = True
        self._serial = 0
        self._parameters = Storage(self, "", "", 0, STEM, "parameters")
        self._pack: Callable[[Storage], Saved] | None = None
        # what the function that runs has made: True if it holds it as a variable
        self.scope: dict[Tensor, bool] = {}

    # Memory

    def make(self, size: str, kind: str = "") -> Storage:
        """A new storage of `size` bytes."""
        storage = Storage(self, size, self.phase, self.recomputing, self.place, kind)
        self.events.append((storage, 1))
        return storage

    def free(self, storage: Storage) -> None:
        """The last holder of a storage has released it."""
        if storage.recomputation:
            storage.kept = self.recomputing != storage.recomputation
        else:
            storage.kept = self.phase not in FORWARD
        self.events.append((storage, -1))

    def gradient(self, size: str, view: bool = False, becomes: str = "") -> Gradient:
        """A new gradient."""
        return Gradient(self.make(size), size, view, becomes)

    def tensor(self, element: str, shape: str, kind: str = "", storage: Storage | None = None) -> Tensor:
        """A tensor held by the function that runs: new, or on a `storage` that was retained for it."""
        tensor = Tensor(element, shape, storage or self.make(f"{element}·{shape}", kind))
        self.scope[tensor] = False
        return tensor

    def view(self, x: Tensor, shape: str = "") -> Tensor:
        """Another tensor on the storage of `x`."""
        return self.tensor(x.element, shape or x.shape, storage=x.storage.retain())

    def hold(self, tensor: Tensor) -> Tensor:
        """Hold a tensor until the function that runs returns, as a variable does; see `operation`."""
        if tensor in self.scope:
            self.scope[tensor] = True
        return tensor

    def drop(self, tensor: Tensor) -> None:
        """Release a tensor now that the function that runs has made."""
        del self.scope[tensor]
        tensor.storage.release()

    # Where the step is

    def begin(self, phase: str, place: Place) -> None:
        """Another phase begins."""
        self.phase = phase
        self.enter(place)

    def enter(self, place: Place) -> None:
        """The phase comes to another place."""
        self.place = place
        self.marks.append(Mark(len(self.events), "recompute" if self.recomputing else self.phase, place))

    @contextmanager
    def recomputation(self, place: Place, pack: Callable[[Storage], Saved]) -> Iterator[None]:
        """Inside, forward is run again in the midst of backward, and `pack` gets what it saves."""
        before = self.place
        self.recomputations += 1
        self.recomputing = self.recomputations
        self.grad_enabled = True
        self.enter(place)
        with self.packing(pack):
            yield
        self.recomputing = 0
        self.grad_enabled = False
        self.enter(before)

    # Autograd's graph

    def leaf(self, element: str, shape: str, accumulate: Callable[[Gradient], None] | None) -> Tensor:
        """A weight, which is there anyway.

        `accumulate` gets its gradient when all that use it have given theirs.
        """
        weight = Tensor(element, shape, self._parameters)
        if accumulate is not None:

            def backward(gradients: list[Gradient]) -> list[Gradient | None]:
                accumulate(gradients[0])
                return []

            weight.edge = Edge(Node(LAST, None, backward, []), 0)
        return weight

    def apply(
        self,
        out: Tensor | list[Tensor],
        inputs: Sequence[Tensor],
        backward: Backward,
        saving: Iterable[Saving] = (),
        saved: Iterable[Saved] = (),
    ) -> None:
        """Make `out` the result of an operation on `inputs`, whose gradients `backward` gives in their order.

        If any input needs a gradient, it saves what `saving` names, besides what it `saved` before it ran.
        """
        edges = [tensor.edge for tensor in inputs]
        if not self.grad_enabled or not any(edges):
            return
        self._serial += 1
        node = Node(self._serial, self.place, backward, edges)
        for number, tensor in enumerate(out if isinstance(out, list) else [out]):
            tensor.edge = Edge(node, number)
        node.saved = [*saved, *map(self._save, saving)]

    def save(self, inputs: Iterable[Tensor], saving: Iterable[Saving]) -> list[Saved]:
        """Save inputs before the operation runs, as torch does, if any of them needs a gradient."""
        if not self.grad_enabled or not any(tensor.edge for tensor in inputs):
            return []
        return [self._save(item) for item in saving]

    def _save(self, item: Saving) -> Saved:
        storage = item.tensor.storage
        if self._pack is not None:
            return self._pack(storage)
        # One line per storage; parts of it that the same operation keeps are named together.
        if not storage.kind:
            new = (self.place, Kept(item.operation, "", storage.size, item.why))
            place, line = self.ledger.get(storage, new)
            if line.operation == item.operation and item.name not in line.name:
                line = line._replace(name=", ".join(filter(None, (line.name, item.name))))
            self.ledger[storage] = place, line
        return storage.retain()

    @contextmanager
    def packing(self, pack: Callable[[Storage], Saved]) -> Iterator[None]:
        """Inside, `pack` decides how tensors are saved, as torch's saved_tensors_hooks do."""
        before = self._pack
        self._pack = pack
        yield
        self._pack = before

    def backward(self, root: Tensor, gradient: Gradient) -> None:
        """Run backward from `root`: of the nodes that are ready, always the newest."""
        assert root.edge is not None, "backward begins where something needs a gradient"
        self.grad_enabled = False
        first = root.edge.node
        waiting = _dependencies(first)
        pushed = 0
        first.gradients[root.edge.output] = gradient
        # The newest node has the smallest key; of equals (weights) the one that was ready first comes first.
        ready = [(-first.serial, pushed, first)]
        while ready:
            node = heapq.heappop(ready)[2]
            if node.place is not None and node.place != self.place:
                self.enter(node.place)
            for edge, result in self._run(node):
                if result is not None:
                    self._add(edge, result)
                waiting[edge.node] -= 1
                if not waiting[edge.node]:
                    pushed += 1
                    heapq.heappush(ready, (-edge.node.serial, pushed, edge.node))

    def _run(self, node: Node) -> list[tuple[Edge, Gradient | None]]:
        """Run a node's backward: its gradients with where they go, cast and summed.

        Then what it saved is released.
        """
        gradients = [node.gradients[output] for output in sorted(node.gradients)]
        unpacked = [saved.unpack() for saved in node.saved]
        results = node.backward(gradients)
        assert len(results) == len(node.edges), "one gradient for each input"
        for storage in unpacked:
            storage.release()
        pairs: list[tuple[Edge, Gradient | None]] = []
        for edge, result in zip(node.edges, results, strict=True):
            if result is not None and edge is None:
                result.storage.release()
            elif result is not None and result.becomes:
                before = result
                result = self.gradient(result.becomes)
                before.storage.release()
            if edge is not None:
                pairs.append((edge, result))
        for saved in node.saved:
            saved.release()
        for gradient in gradients:
            gradient.storage.release()
        node.edges = []
        node.saved = []
        node.gradients = {}
        return pairs

    def _add(self, edge: Edge, new: Gradient) -> None:
        """Add a gradient to the one that waits, in place unless that is a view or is held elsewhere too."""
        waiting = edge.node.gradients
        old = waiting.setdefault(edge.output, new)
        if old is new:
            return
        if old.view or old.storage.holders > 1:
            waiting[edge.output] = self.gradient(new.size)
            old.storage.release()
        new.storage.release()


def operation(function: Function) -> Function:
    """Mark a function, or a module's call, that mirrors one of torch's: its first argument has the tape.

    Its tensors live as Python's do. When it returns, or is stopped, what it made is released but for what it
    returns. A value that is passed straight into another operation is released when that returns; `Tape.hold`
    makes it a variable, which lives until the function returns.
    """

    @wraps(function)
    def call(owner: Any, *arguments: Any, **options: Any) -> Any:
        tape: Tape = owner.tape
        outer = tape.scope
        scope: dict[Tensor, bool] = {}
        tape.scope = scope
        try:
            result = function(owner, *arguments, **options)
            returned = (result,) if isinstance(result, Tensor) else result
            for tensor in returned:
                if tensor in scope:
                    del scope[tensor]
                    outer[tensor] = False
        finally:
            tape.scope = outer
            for tensor in scope:
                tensor.storage.release()
        # Arguments that no variable holds die here, as temporaries of the caller's expression do.
        for value in arguments:
            if isinstance(value, Tensor) and outer.get(value) is False and value is not result:
                tape.drop(value)
        return result

    return cast("Function", call)


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """All tensors among `values` and in lists of them."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)


def _dependencies(root: Node) -> dict[Node, int]:
    """The number of gradients that each node waits for."""
    counts: dict[Node, int] = {}
    seen = {root}
    stack = [root]
    while stack:
        for target, _ in filter(None, stack.pop().edges):
            counts[target] = counts.get(target, 0) + 1
            if target not in seen:
                seen.add(target)
                stack.append(target)
    return counts
