"""Two stages, what their step should do, and its judge on two real ranks."""

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from ..shared.judging import seeded
from ..shared.on_ranks import sending

SIZES = ((3, 1, 4, 2), (4,), (1, 1, 1), (2, 5))  # rows of each micro-batch


def stages() -> list[nn.Sequential]:
    """The first and the last stage: the same weights each time. What is between them is the widest."""
    with seeded(11):
        first = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 32))
        return [first, nn.Sequential(nn.Linear(32, 8), nn.Tanh(), nn.Linear(8, 3))]


def batch(sizes: Sequence[int]) -> list[list[torch.Tensor]]:
    """Inputs and targets of a whole batch, as micro-batches of these sizes."""
    with seeded(sum(sizes)):
        whole = torch.randn(sum(sizes), 4), 2 + torch.randn(sum(sizes), 3)
    return [list(tensor.split(list(sizes))) for tensor in whole]


def of_whole(sizes: Sequence[int]) -> tuple[list[list[torch.Tensor]], list[list[torch.Tensor]]]:
    """Messages that each stage gets from the other, and its gradients, for the complete batch at once."""
    first, last = stages()
    x, target = batch(sizes)
    between = first(torch.cat(x))
    between.retain_grad()
    functional.mse_loss(last(between), torch.cat(target)).backward()
    messages = [list(tensor.detach().split(list(sizes))) for tensor in (between.grad, between)]
    gradients = [
        [cast(torch.Tensor, weight.grad) for weight in stage.parameters()] for stage in (first, last)
    ]
    return messages, gradients


def difference(step: Any) -> dict[str, float]:
    """The largest difference of this rank's gradients from the complete batch's, over all `SIZES`."""
    rank = dist.get_rank()
    off = 0.0

    def receive(shape: Any) -> torch.Tensor:
        arrived = torch.empty(shape)
        dist.recv(arrived, 1 - rank)
        return arrived

    for sizes in SIZES:
        mine = stages()[rank]
        data = batch(sizes)[rank]
        with sending() as send:
            step(mine, rank, data, lambda tensor: send(tensor, 1 - rank), receive)
        for weight, right in zip(mine.parameters(), of_whole(sizes)[1][rank], strict=True):
            found = torch.zeros_like(weight) if weight.grad is None else weight.grad
            off = max(off, (found - right).abs().max().item())
    return {"off": off}
