"""Runs learners' rings, and training steps under DDP, on real ranks; a program that `checks` starts."""

import __future__

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from course_utils.ranks.worker import report_on_gloo

from .ddp_training import Trace

STEPS, RATE, WIDTH, SEQUENCES = 3, 0.1, 8, 2
COUNTS = (4, 6)  # micro-batches of a step: a multiple of four, and not
NAMES = {  # that a learner's step may use
    "torch": torch, "nn": nn, "F": functional, "mse_loss": functional.mse_loss, "nullcontext": nullcontext, "dist": dist
}  # fmt: skip


def network() -> nn.Module:
    """The same small network on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def micro_batches(rank: int, step: int, count: int) -> list[tuple[torch.Tensor, ...]]:
    """Inputs and targets of one rank in one step: other numbers on every rank."""
    drawn = torch.randn(count, 2, SEQUENCES, WIDTH, generator=torch.Generator().manual_seed(1000 * rank + step))
    return [pair.unbind() for pair in drawn]


def trained(step: Any, count: int) -> dict[str, Any]:
    """A few optimizer steps of `count` micro-batches: how far the ranks are `apart` after each, and `off` one process
    with the whole batch, how often gradients were `exchanged` in a step, for each optimizer step True where there was a
    gradient (`stepped`), and the most sequences that went forward before a backward (`at_once`).
    """
    model, trace = DistributedDataParallel(network()), Trace(torch.device("cpu"))
    model.register_comm_hook(None, trace.hook)
    first, forward = next(model.parameters()), [0]  # sequences since the last backward
    model.module.register_forward_pre_hook(lambda _, inputs: forward.append(forward[-1] + len(inputs[0])))
    first.register_hook(lambda _: forward.append(0))
    optimizer, stepped = torch.optim.SGD(model.parameters(), lr=RATE), list[bool]()
    optimizer.register_step_pre_hook(lambda *_: stepped.append(first.grad is not None and bool(first.grad.any())))
    apart, off = [], []
    for number, right in enumerate(right_weights(count)):
        step(model, optimizer, micro_batches(dist.get_rank(), number, count))
        apart.append(distance(model))
        off.append((weights(model) - right).abs().max().item())
    exchanged = sum(bucket["size"] for bucket in trace.buckets) / weights(model).nbytes / STEPS
    return {"apart": apart, "off": off, "exchanged": exchanged, "stepped": stepped, "at_once": max(forward)}


def right_weights(count: int) -> list[torch.Tensor]:
    """Weights after each step of one process that sees all ranks' micro-batches as one large batch."""
    model, found = network(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for number in range(STEPS):
        batches = [pair for rank in range(dist.get_world_size()) for pair in micro_batches(rank, number, count)]
        inputs, targets = (torch.cat(tensors) for tensors in zip(*batches, strict=True))
        functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(weights(model))
    return found


def weights(model: nn.Module) -> torch.Tensor:
    """All weights as one vector, copied."""
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def distance(model: nn.Module) -> float:
    """The largest difference of any weight between any two ranks."""
    highest, lowest = weights(model), weights(model)
    dist.all_reduce(highest, op=dist.ReduceOp.MAX)
    dist.all_reduce(lowest, op=dist.ReduceOp.MIN)
    return (highest - lowest).max().item()


def reduced(ring: Any, elements: int = 5) -> bool:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    parts = [torch.full((elements,), float(10**rank + part)) for part in range(ranks)]
    wanted = [sum(10**other + part for other in range(ranks)) for part in range(ranks)]
    sending: list[tuple[torch.Tensor, Any]] = []

    def send(tensor: torch.Tensor, to: int) -> None:
        copied = tensor.clone()
        sending.append((copied, dist.isend(copied, to)))  # keeps the copy until it has been sent

    def receive(source: int) -> torch.Tensor:
        arrived = torch.empty(elements)
        dist.recv(arrived, source)
        return arrived

    found = ring(parts, rank, ranks, send, receive)
    for _, work in sending:
        work.wait()
    return [part.tolist() for part in found] == [[float(number)] * elements for number in wanted]


def outcome(kind: str, source: str, name: str) -> dict[str, Any]:
    """Outcome of a learner's ring, or training step for each number of micro-batches; or the error that it raises."""
    namespace: dict[str, Any] = dict(NAMES)
    try:
        exec(compile(source, "<your function>", "exec", __future__.annotations.compiler_flag), namespace)
        if kind == "ring":
            return {"reduced": reduced(namespace[name])}
        return {str(count): trained(namespace[name], count) for count in COUNTS}
    except Exception as error:  # a learner's code may raise anything; the check reports it
        return {"error": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    functions = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    report_on_gloo(lambda: [outcome(*function) for function in functions])
