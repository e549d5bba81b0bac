"""A small model of autograd that counts bytes: what a training step allocates and frees, in order, without torch.

The step is told once, operation by operation (`operations.py`): what each makes, what it keeps for backward, what its
backward makes. Everything else follows as it does in torch, from who still holds what: a storage lives as long as
something refers to it, backward runs the newest node that is ready first, and gradients that meet are added in place
where nobody else holds the older one (torch/csrc/autograd: engine.cpp, input_buffer.cpp, saved_variable.cpp).

Sizes are formulas, not numbers ("c·sb·h": bytes an element, tokens, hidden size), so one tape serves every run that
differs in numbers alone.
"""

import heapq
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

FORWARD = ("forward", "loss")
LAST = 1 << 60
"""Gradients are added to `.grad` before anything else is done."""


@dataclass(slots=True, eq=False)
class Record:
    """One storage from birth to death, and what it turned out to be for."""

    size: str
    phase: str
    recomputation: int
    place: Any
    kind: str = ""
    kept: bool = True

    def settled(self) -> str:
        """Its kind of memory: what it was bound to, else whether it outlived the pass that made it."""
        if self.kind:
            return self.kind
        made_by_forward = self.phase in FORWARD or self.recomputation
        return "activations" if made_by_forward and self.kept else "temporaries"


class Storage:
    """Bytes on the device. Its birth and its death, when nothing refers to it any more, are events of the tape."""

    __slots__ = ("__weakref__", "record", "tape")

    def __init__(self, tape: "Tape", record: Record) -> None:
        self.tape, self.record = tape, record
        tape.events.append((record, 1))

    def __del__(self) -> None:
        self.tape.forget(self.record)


@dataclass(slots=True, eq=False)
class Tensor:
    """A tensor of `shape` elements ("sb·h") of `element` bytes each ("c", "r", "4"). A weight has no storage here: it
    stands.
    """

    element: str
    shape: str
    storage: Storage | None = None
    node: "Edge | None" = None

    @property
    def size(self) -> str:
        """Its bytes, as a formula."""
        return f"{self.element}·{self.shape}"


@dataclass(slots=True, eq=False)
class Gradient:
    """A gradient on its way. torch adds to a view only out of place; `becomes` is the size in which it arrives where
    it has to be summed or cast for its tensor.
    """

    storage: Storage
    size: str
    view: bool = False
    becomes: str = ""

    def again(self, view: bool = False, becomes: str = "") -> "Gradient":
        """The same gradient for a second tensor, or as a view."""
        return Gradient(self.storage, self.size, view or self.view, becomes)


class Saving(NamedTuple):
    """A tensor to be kept for backward, as the ledger is to name it."""

    tensor: Tensor
    operation: str
    name: str
    why: str


Handle = Callable[[], Storage | None]
Packer = Callable[[Storage | None], Handle]
Backward = Callable[[list[Gradient]], list[Gradient | None]]


class Node:
    """An operation in autograd's graph: what it kept, what its backward does, and whose gradients those are."""

    __slots__ = ("backward", "edges", "inputs", "place", "saved", "serial")

    def __init__(self, serial: int, place: Any, backward: Backward, edges: list[Any]) -> None:
        self.serial, self.place, self.backward, self.edges = serial, place, backward, edges
        self.saved: list[Handle] = []
        self.inputs: dict[int, Gradient] = {}


class Kept(NamedTuple):
    """One line of the ledger: a storage that autograd keeps, and why."""

    operation: str
    name: str
    size: str
    why: str


def _holders(storage: object) -> int:
    return sys.getrefcount(storage)


class _Holder:
    storage: Any = None


def _alone() -> int:
    """What `_holders` says of an object that one attribute alone refers to."""
    holder = _Holder()
    holder.storage = _Holder()
    return _holders(holder.storage)


ALONE = _alone()


class Tape:
    """Runs a step's operations and writes down what they allocate and free."""

    def __init__(self) -> None:
        self.events: list[tuple[Record, int]] = []
        self.marks: list[tuple[int, Any]] = []
        self.ledger: dict[Record, tuple[Any, Kept]] = {}
        self.phase = "forward"
        self.place: Any = "stem"
        self.recomputations = 0
        self.recomputing = 0
        self.grad_enabled = True
        self._serial = 0
        self._packers: list[Packer] = []

    # Memory

    def make(self, size: str, kind: str = "") -> Storage:
        """A new storage of `size` bytes."""
        return Storage(self, Record(size, self.phase, self.recomputing, self.place, kind))

    def tensor(self, element: str, shape: str) -> Tensor:
        """A new tensor, of no operation that backward would know."""
        return Tensor(element, shape, self.make(f"{element}·{shape}"))

    def gradient(self, size: str) -> Gradient:
        """A new gradient."""
        return Gradient(self.make(size), size)

    def forget(self, record: Record) -> None:
        """The last that referred to a storage has let go of it."""
        if record.recomputation:
            record.kept = self.recomputing != record.recomputation
        else:
            record.kept = self.phase not in FORWARD
        self.events.append((record, -1))

    def mark(self, what: Any) -> None:
        """Note that something begins here."""
        self.marks.append((len(self.events), what))

    def enter(self, place: Any) -> None:
        """Forward, or its second run, comes to another place."""
        self.place = place
        self.mark(("recompute" if self.recomputing else self.phase, place))

    # Autograd's graph

    def apply(
        self, out: Tensor | list[Tensor], inputs: Iterable[Tensor], saved: Iterable[Saving], backward: Backward,
        kept: Iterable[Handle] = (),
    ) -> None:  # fmt: skip
        """Make `out` the result of an operation on `inputs`, whose gradients `backward` gives in their order.

        It keeps `saved` for that, if any input needs a gradient, beside what it has `kept` before it ran.
        """
        edges = [tensor.node for tensor in inputs]
        if not self.grad_enabled or not any(edges):
            return
        self._serial += 1
        node = Node(self._serial, self.place, backward, edges)
        for number, tensor in enumerate(out if isinstance(out, list) else [out]):
            tensor.node = Output(node, number) if number else node
        node.saved.extend(kept)
        node.saved.extend(self._keep(saving) for saving in saved)

    def keep(self, inputs: Iterable[Tensor], saved: Iterable[Saving]) -> list[Handle]:
        """Keep inputs before the operation runs, as torch does, if any of them needs a gradient."""
        if not self.grad_enabled or not any(tensor.node for tensor in inputs):
            return []
        return [self._keep(saving) for saving in saved]

    def _keep(self, saving: Saving) -> Handle:
        storage = saving.tensor.storage
        if self._packers:
            return self._packers[-1](storage)
        if storage is not None and not storage.record.kind:
            self._write_down(storage.record, saving)
        return lambda: storage

    def _write_down(self, record: Record, saving: Saving) -> None:
        """Enter a storage in the ledger, once; parts of it that the same operation keeps are named together."""
        place, line = self.ledger.get(record, (self.place, Kept(saving.operation, "", record.size, saving.why)))
        if line.operation == saving.operation and saving.name not in line.name:
            line = line._replace(name=", ".join(filter(None, (line.name, saving.name))))
        self.ledger[record] = place, line

    @contextmanager
    def packing(self, packer: "Packer") -> Iterator[None]:
        """Inside, `packer` decides how saved tensors are kept, as torch's saved_tensors_hooks do."""
        self._packers.append(packer)
        try:
            yield
        finally:
            self._packers.pop()

    @contextmanager
    def recomputation(self, place: Any) -> Iterator[None]:
        """Inside, forward is run again in the midst of backward."""
        before = self.place, self.grad_enabled, self._packers
        self.recomputations += 1
        self.recomputing, self.place, self.grad_enabled, self._packers = self.recomputations, place, True, []
        self.mark(("recompute", place))
        try:
            yield
        finally:
            self.recomputing = 0
            self.place, self.grad_enabled, self._packers = before
            self.mark(("backward", self.place))

    def leaf(self, element: str, shape: str, accumulate: Callable[[Gradient], None]) -> Tensor:
        """A weight: `accumulate` gets its whole gradient once all that use it have given theirs."""

        def backward(gradients: list[Gradient]) -> list[Gradient | None]:
            accumulate(gradients.pop())
            return []

        return Tensor(element, shape, None, Node(LAST, None, backward, []))

    def backward(self, root: Node, gradient: Gradient) -> None:
        """Run backward from `root`: of the nodes that are ready, always the newest."""
        self.grad_enabled = False
        waiting = _dependencies(root)
        root.inputs[0] = gradient
        del gradient
        ready = [(-root.serial, 0, root)]
        del root
        pushed = 0
        while ready:
            node = heapq.heappop(ready)[2]
            self._enter(node.place)
            results = self._run(node)
            del node
            while results:
                edge, result = results.pop()
                target, number = (edge.node, edge.number) if isinstance(edge, Output) else (edge, 0)
                if result is not None:
                    self._add(target, number, result)
                del result
                waiting[target] -= 1
                if not waiting[target]:
                    pushed += 1
                    heapq.heappush(ready, (-target.serial, pushed, target))
                del edge, target

    def _enter(self, place: Any) -> None:
        if place is not None and place != self.place:
            self.place = place
            self.mark(("backward", place))

    def _run(self, node: Node) -> list[tuple["Edge", Gradient | None]]:
        """A node's gradients with where they go, the first last; what it had kept is let go."""
        gradients = [node.inputs.pop(number) for number in sorted(node.inputs)]
        unpacked = [handle() for handle in node.saved]
        results = node.backward(gradients)
        del unpacked
        pairs: list[tuple[Edge, Gradient | None]] = []
        results.reverse()
        for edge in node.edges:
            result = results.pop()
            if edge is not None and result is not None and result.becomes:
                result = self.gradient(result.becomes)
            if edge is not None:
                pairs.append((edge, result))
            del result
        assert not results, "one gradient for each input"
        node.saved.clear()
        node.edges = []
        pairs.reverse()
        return pairs

    def _add(self, target: Node, number: int, new: Gradient) -> None:
        """Add a gradient to the one that waits, in place unless that is shared or a view of another."""
        old = target.inputs.get(number)
        if old is None:
            target.inputs[number] = new
        elif old.view or _holders(old.storage) > ALONE:
            target.inputs[number] = self.gradient(new.size)


class Output:
    """A further output of a node."""

    __slots__ = ("node", "number")

    def __init__(self, node: Node, number: int) -> None:
        self.node, self.number = node, number


Edge = Node | Output


def _dependencies(root: Node) -> dict[Node, int]:
    """How many gradients each node waits for."""
    counts: dict[Node, int] = {}
    seen, stack = {root}, [root]
    while stack:
        for edge in stack.pop().edges:
            if edge is not None:
                target = edge.node if isinstance(edge, Output) else edge
                counts[target] = counts.get(target, 0) + 1
                if target not in seen:
                    seen.add(target)
                    stack.append(target)
    return counts
