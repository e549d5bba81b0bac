"""Three ways to all-reduce, written with send and receive alone. Run by torchrun, it reports what each rank sent."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from course_utils.ranks.worker import report_on_gloo


class Wire:
    """A rank's connection to the others: sends and receives tensors.

    `sent` lists messages: the ring's `step` (from 1), `sender`, `receiver`, the part's number `chunk`, `size` in bytes.
    """

    def __init__(self) -> None:
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.sent: list[dict[str, int]] = []
        self.step = 0

    def start(self, tensor: torch.Tensor, to: int, chunk: int = 0) -> dist.Work:
        """Begin to send `tensor`; it must not change before `wait()` of what is returned has come back."""
        message = {"step": self.step, "sender": self.rank, "receiver": to, "chunk": chunk, "size": tensor.nbytes}
        self.sent.append(message)
        work = dist.isend(tensor, to)
        assert work is not None, "every rank is in the group"
        return work

    def receive(self, like: torch.Tensor, source: int) -> torch.Tensor:
        """Receive from `source`: a new tensor of the shape and dtype of `like`."""
        arrived = torch.empty_like(like)
        dist.recv(arrived, source)
        return arrived


def server_all_reduce(tensor: torch.Tensor, wire: Wire) -> None:
    """Replace `tensor` by the sum over all ranks: rank 0 is a server that collects, adds, and hands the sum out."""
    if wire.rank == 0:
        for worker in range(1, wire.ranks):
            tensor += wire.receive(tensor, worker)
        for work in [wire.start(tensor, worker) for worker in range(1, wire.ranks)]:
            work.wait()
    else:
        wire.start(tensor, to=0).wait()
        tensor.copy_(wire.receive(tensor, 0))


def naive_all_reduce(tensor: torch.Tensor, wire: Wire) -> None:
    """Replace `tensor` by the sum over all ranks: everybody sends everything to everybody, and adds up what comes."""
    own, others = tensor.clone(), [rank for rank in range(wire.ranks) if rank != wire.rank]
    sending = [wire.start(own, other) for other in others]
    for other in others:
        tensor += wire.receive(tensor, other)
    for work in sending:
        work.wait()


def ring_all_reduce(tensor: torch.Tensor, wire: Wire, after_step: Callable[[], None] | None = None) -> None:
    """Replace `tensor` by the sum over all ranks: its D parts travel around a ring (Patarasuk and Yuan 2009).

    `after_step`, if given, is called after each of 2(D−1) steps.
    """
    me, D = wire.rank, wire.ranks
    right, left = (me + 1) % D, (me - 1) % D
    parts = tensor.tensor_split(D)  # views: what is added to a part is added to the tensor
    for step in range(2 * (D - 1)):
        wire.step, leaves, comes = step + 1, (me - step) % D, (me - step - 1) % D
        sending = wire.start(parts[leaves], to=right, chunk=leaves)
        arrived = wire.receive(parts[comes], source=left)
        sending.wait()
        if step < D - 1:
            parts[comes].add_(arrived)  # the sum of one rank more
        else:
            parts[comes].copy_(arrived)  # the whole sum, from the rank that has it
        if after_step:
            after_step()


WAYS = {"server": server_all_reduce, "naive": naive_all_reduce, "ring": ring_all_reduce}
ELEMENTS = 120_000  # 480 kB in fp32; divisible by each number of ranks up to 6, so that the ring's parts are equal


def one_rank() -> dict[str, Any]:
    """This rank's bytes sent for each way, and True where its sum equals torch's all_reduce.

    Also the `parts` and messages, `steps`, of a ring that begins with 10^r on rank r: digits show who contributed.
    """
    own = torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(dist.get_rank()))
    wanted = own.clone()
    dist.all_reduce(wanted)
    found: dict[str, Any] = {"size": own.nbytes}
    for name, all_reduce in WAYS.items():
        tensor, wire = own.clone(), Wire()
        all_reduce(tensor, wire)
        equal = torch.allclose(tensor, wanted, rtol=1e-5, atol=1e-5)
        found[name] = {"equal": equal, "sent": sum(message["size"] for message in wire.sent)}
    wire = Wire()
    small = torch.full((wire.ranks,), 10**wire.rank)
    parts = [small.tolist()]
    ring_all_reduce(small, wire, lambda: parts.append(small.tolist()))
    return found | {"parts": parts, "steps": wire.sent}


if __name__ == "__main__":
    report_on_gloo(one_rank)
