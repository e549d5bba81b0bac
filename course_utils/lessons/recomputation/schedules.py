"""Three ways to run a chain of n nodes forward and backward: keep all, none, every k-th (Chen et al. 2016).

Each node f leaves one value behind, which its backward b needs, and hands another to the next node. A
checkpoint is a node's input, kept so that the chain can be run again from there. Both count as one. The value
that passes from node to node and the gradient on its way back exist in every schedule and are not counted.
"""

from collections.abc import Sequence
from typing import NamedTuple


class Tick(NamedTuple):
    """One node at work: `kind` is "f" or "b", `node` counts from 1, `again` says that f has run before.

    Meanwhile the inputs of the nodes in `checkpoints` are kept, and the values of those in `kept`.
    """

    kind: str
    node: int
    again: bool
    checkpoints: tuple[int, ...]
    kept: tuple[int, ...]

    @property
    def memory(self) -> int:
        return len(self.checkpoints) + len(self.kept)

    @property
    def words(self) -> str:
        again = " again" if self.again else ""
        return f"{self.kind}{self.node} runs{again}"


class Schedule(NamedTuple):
    """A chain of `nodes` run forward and backward, node by node."""

    name: str
    nodes: int
    ticks: Sequence[Tick]

    @property
    def memory(self) -> int:
        """The most values kept at once."""
        return max(tick.memory for tick in self.ticks)

    @property
    def forwards(self) -> int:
        """Runs of any f: one per node, and the repetitions."""
        return sum(tick.kind == "f" for tick in self.ticks)


def keep_all(nodes: int) -> Schedule:
    """Every f leaves its value: n values, n runs of f."""
    return Schedule("keep all", nodes, _stretch((), 1, nodes, again=False))


def keep_none(nodes: int) -> Schedule:
    """Only the chain's input is kept, and before each b all up to its f runs again.

    2 values, n + n(n+1)/2 runs of f.
    """
    ticks = [Tick("f", node, False, (1,), ()) for node in range(1, nodes + 1)]
    for node in range(nodes, 0, -1):
        ticks += [Tick("f", other, True, (1,), ()) for other in range(1, node)]
        ticks.append(Tick("f", node, True, (1,), (node,)))
        ticks.append(Tick("b", node, False, (1,), (node,)))
    return Schedule("keep none", nodes, ticks)


def keep_every(nodes: int, k: int) -> Schedule:
    """Every k-th node's input is kept, each stretch of k nodes runs again: n/k + k values, 2n runs of f."""
    ticks = [Tick("f", node, False, tuple(range(1, node + 1, k)), ()) for node in range(1, nodes + 1)]
    for start in reversed(range(1, nodes + 1, k)):
        ticks += _stretch(tuple(range(1, start + 1, k)), start, min(start + k - 1, nodes), again=True)
    return Schedule(f"keep every {k}", nodes, ticks)


def _stretch(checkpoints: tuple[int, ...], first: int, last: int, again: bool) -> list[Tick]:
    """From node `first` to `last`: forward, each f leaving its value, then backward."""
    there = [(node, tuple(range(first, node + 1))) for node in range(first, last + 1)]
    forward = [Tick("f", node, again, checkpoints, kept) for node, kept in there]
    return forward + [Tick("b", node, False, checkpoints, kept) for node, kept in reversed(there)]


def several(count: int, noun: str) -> str:
    """Return a count with its noun: "1 run", "2 runs"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
