"""The cut of a function's graph between forward and backward: as autograd makes it, or the compiler.

Nothing here is a formula. AOTAutograd, a part of `torch.compile`, traces both passes into one graph, and
torch's own partitioner cuts it in two.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ..shared.block_trace import NAMES

PRODUCTS = {"mm": "matrix product"}  # written as x @ W, not as a layer
VIEWS = ("t", "view", "transpose", "permute", "detach", "alias")


@dataclass(frozen=True)
class Node:
    """An operation of one pass: its name, the numbers of the nodes it reads, the bytes of its result."""

    name: str
    reads: tuple[int, ...]
    bytes: int


@dataclass(frozen=True)
class Partition:
    """Both passes of a function, nodes numbered from the input on; `kept` are those that backward is given.

    The node with number `turn` is the gradient that comes in; those after it are backward's. Weights and
    views are no nodes.
    """

    nodes: tuple[Node, ...]
    turn: int
    kept: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Bytes that forward hands over to backward, weights left out."""
        return sum(self.nodes[number].bytes for number in self.kept)

    @property
    def again(self) -> list[int]:
        """Numbers of the nodes of backward that need no gradient: forward's, computed again."""
        of_gradient = {self.turn}
        for number in range(self.turn + 1, len(self.nodes)):
            if of_gradient & set(self.nodes[number].reads):
                of_gradient.add(number)
        return [number for number in range(self.turn, len(self.nodes)) if number not in of_gradient]


def partition(function: Callable[..., torch.Tensor], *inputs: torch.Tensor, compiled: bool) -> Partition:
    """Trace function(x, *weights) and its gradients, and cut the graph in two.

    With `compiled`, torch keeps as few bytes as it can and computes cheap operations again; without, it keeps
    what autograd would keep.
    """
    from functorch.compile import (
        aot_function,
        default_partition,
        make_boxed_func,
        min_cut_rematerialization_partition,
    )

    graphs: list[torch.fx.Graph] = []

    def take(module: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(module.graph)
        return make_boxed_func(module.forward)

    smallest = partial(min_cut_rematerialization_partition, compiler="inductor")
    cut = smallest if compiled else default_partition
    compiler: Any = take
    aot_function(function, compiler, compiler, partition_fn=cut)(*inputs).sum().backward()
    return _numbered(*graphs)


def _numbered(forward: torch.fx.Graph, backward: torch.fx.Graph) -> Partition:
    numbers: dict[str, int] = {}  # by name in the graphs; a view has the number of what it shows
    nodes: list[Node] = []
    for step in forward.nodes:
        if step.op == "placeholder" and not nodes:
            _add(step, "x", nodes, numbers)
        elif step.op == "call_function":
            _follow(step, nodes, numbers)
    turn = len(nodes)
    handed = [step.name for step in backward.nodes if step.op == "placeholder"]
    kept = dict.fromkeys(numbers[name] for name in handed if name in numbers)
    for step in backward.nodes:
        if step.op == "placeholder" and step.name.startswith("tangents"):
            _add(step, "gradient", nodes, numbers)
    for step in backward.nodes:
        if step.op == "call_function":
            _follow(step, nodes, numbers)
    return Partition(tuple(nodes), turn, tuple(kept))


def _follow(step: torch.fx.Node, nodes: list[Node], numbers: dict[str, int]) -> None:
    name = step.target.overloadpacket.__name__  # pyrefly: ignore [missing-attribute]
    if name not in VIEWS:
        _add(step, (NAMES | PRODUCTS).get(name, name.replace("_", " ")), nodes, numbers)
        return
    shown = step.all_input_nodes[0].name
    if shown in numbers:
        numbers[step.name] = numbers[shown]


def _add(step: torch.fx.Node, name: str, nodes: list[Node], numbers: dict[str, int]) -> None:
    reads = dict.fromkeys(numbers[one.name] for one in step.all_input_nodes if one.name in numbers)
    numbers[step.name] = len(nodes)
    nodes.append(Node(name, tuple(reads), step.meta["val"].nbytes))
