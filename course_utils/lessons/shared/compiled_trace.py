"""A compiled block's forward: the tensors that it still writes to memory, and which of them backward gets.

Nothing here is a formula. The graph is the compiler's own, as its partitioner cuts it. Matrix products and
attention kernels read and write memory. All between them is fused, and writes only what they read, what
backward gets, and the block's output.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import fx

from .block_trace import NAMES, Made, Operation, Trace, short

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")
ATTENTION = "_scaled_dot_product"
VIEWS = ("reshape", "view", "permute", "transpose", "split", "expand", "slice", "select", "unsqueeze")
UNNAMED = (*VIEWS, "_unsafe_view", "_to_copy", "convert_element_type", "getitem")
IN_MODULE = re.compile(r"^L\['\w+'\]\.?")
"""Beginning of Dynamo's name of a module: the local variable that holds the outermost one."""


def compiled_trace(block: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> Trace:
    """Compile and run block(x), and list what its forward writes, as `trace` does for an eager block.

    The block returns one tensor and changes nothing. Weights and their copies are left out. What was compiled
    before will be compiled again. Raises ValueError where torch.compile compiles nothing, and torch's error
    for a block with a graph break.
    """
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    found: list[list[Operation]] = []

    def take(module: fx.GraphModule, inputs: Sequence[Any], **choices: Any) -> Any:
        found.append(_operations(module.graph, choices["static_input_idxs"], x.numel()))
        return compile_fx_inner(module, inputs, **choices)

    def backend(module: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        return compile_fx(module, inputs, inner_compile=take)

    torch.compiler.reset()  # else the code of an earlier picture might serve this one, too
    torch.compile(block, backend=backend, fullgraph=True)(x)
    if not found:
        raise ValueError("torch.compile compiles nothing here, so there is no compiled block to draw")
    return Trace(found[0], x.numel())


def _operations(graph: fx.Graph, weights: Iterable[int], numbers: int) -> list[Operation]:
    """The results that a forward graph writes. Inputs with the numbers `weights` are weights.

    x has so many `numbers`. Masks and statistics for backward are no results: the kernel of the first result
    that is computed from them writes them, too.
    """
    of_weights = _of_weights(graph, weights)
    nodes = [node for node in graph.nodes if node.op != "output" and node not in of_weights]
    output, *handed = [_storage(node) for node in graph.output_node().all_input_nodes]
    kept = set(handed) - of_weights
    kernels = [node for node in nodes if _is_kernel(node)]
    results = {output, *kernels, *(node for node in nodes if node.op == "placeholder")}
    results |= {_storage(one) for node in kernels for one in node.all_input_nodes}
    results |= {node for node in kept if not _is_besides(node, numbers)}
    results = {node for node in results if not _is_part(node)}
    operations: list[Operation] = []
    places: dict[fx.Node, int] = {}  # of results and of what is written besides: the number of an operation
    behind: dict[fx.Node, dict[fx.Node, None]] = {}  # what a node is computed from, back to results
    for node in nodes:
        chain = {one: None for given in node.all_input_nodes for one in behind.get(given, ())}
        behind[node] = {node: None} if node in results else chain | {node: None}
        if node in results:
            besides = [one for one in chain if one in kept and one not in places and not _is_part(one)]
            makes = [_made(one, one in kept) for one in (*_parts(node), *besides)]
            reads = sorted({places[one] for one in chain if one in places})
            fused = [one for one in chain if one not in places and not behind[one].keys().isdisjoint(results)]
            operations.append(Operation(_name([*fused, node]), _module([*fused, node]), makes, reads))
            places |= dict.fromkeys((node, *besides), len(operations) - 1)
    return operations


def _of_weights(graph: fx.Graph, weights: Iterable[int]) -> set[fx.Node]:
    """Weights, and what is made of weights alone."""
    given = graph.find_nodes(op="placeholder")
    found = {given[number] for number in weights}
    for node in graph.nodes:
        if node.all_input_nodes and found.issuperset(node.all_input_nodes):
            found.add(node)
    return found


def _operator(node: fx.Node) -> str:
    """The name of the operator that `node` calls; "" for an input."""
    if node.op != "call_function":
        return ""
    called: Any = getattr(node.target, "overloadpacket", node.target)
    return called.__name__


def _is_kernel(node: fx.Node) -> bool:
    return _operator(node) in PRODUCTS or _operator(node).startswith(ATTENTION)


def _is_part(node: fx.Node) -> bool:
    """True for one of several tensors that a kernel returns."""
    return _operator(node) == "getitem" and _is_kernel(node.all_input_nodes[0])


def _parts(node: fx.Node) -> list[fx.Node]:
    return [one for one in node.users if _is_part(one)] or [node]


def _storage(node: fx.Node) -> fx.Node:
    """The node that makes the memory which `node` shows."""
    name = _operator(node)
    shown = node.all_input_nodes[0] if name in VIEWS or name == "getitem" else node
    if shown is node or (name == "getitem" and _operator(shown) not in VIEWS):
        return node
    return _storage(shown)


def _is_besides(node: fx.Node, numbers: int) -> bool:
    """True for masks and statistics."""
    tensor = node.meta["val"]
    return tensor.dtype == torch.bool or tensor.numel() < numbers


def _made(node: fx.Node, is_kept: bool) -> Made:
    tensor = node.meta["val"]
    return Made(tuple(tensor.shape), short(tensor.dtype), tensor.numel() * tensor.itemsize, is_kept)


def _name(fused: Sequence[fx.Node]) -> str:
    """The operators behind a result as the model called them; a cast only where there is nothing else."""
    if fused[-1].op == "placeholder":
        return "input x"
    called = [
        node.meta["original_aten"].overloadpacket.__name__
        for node in fused
        if node.meta.get("original_aten") and not _is_part(node)
    ]
    named = dict.fromkeys(NAMES.get(one, one.strip("_")) for one in called if one not in UNNAMED)
    return " + ".join(named) or f"to {short(fused[-1].meta['val'].dtype)}"


def _module(fused: Sequence[fx.Node]) -> str:
    """The innermost module of the last of these nodes that is no cast and no view."""
    last = next((node for node in reversed(fused) if _operator(node) not in UNNAMED), fused[-1])
    stack = last.meta.get("nn_module_stack")
    return IN_MODULE.sub("", [*stack.values()][-1][0]) if stack else ""
