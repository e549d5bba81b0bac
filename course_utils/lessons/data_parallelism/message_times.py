"""How long messages take between two ranks: a tensor goes there and back. A program of two ranks, for torchrun."""

from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist

from course_utils.ranks.worker import report_on_gloo

SIZES = tuple(4 * 4**power for power in range(12))  # bytes, 4 to 16 MiB
REPEATS, WARM_UP = 15, 3


def there_and_back(tensor: torch.Tensor) -> float:
    """Seconds that `tensor` takes from rank 0 to rank 1: half the way there and back. Both ranks call it."""
    other, began = 1 - dist.get_rank(), perf_counter()
    for sender in (0, 1):
        if dist.get_rank() == sender:
            dist.send(tensor, other)
        else:
            dist.recv(tensor, other)
    return (perf_counter() - began) / 2


def timed(size: int) -> list[float]:
    """Seconds of one message of `size` bytes, several times over, as rank 0 sees them."""
    tensor = torch.zeros(size, dtype=torch.uint8)
    times = []
    for _ in range(WARM_UP + REPEATS):
        dist.barrier()
        times.append(there_and_back(tensor))
    return times[WARM_UP:]


def one_rank() -> dict[str, Any]:
    """Seconds of each message by its size, largest size last."""
    return {"seconds": [[size, timed(size)] for size in SIZES]}


if __name__ == "__main__":
    report_on_gloo(one_rank)
