"""Tensors that leave holes: large ones come and go, long-lived ones move into their places, and a large one comes back.

Run as a program (`python -m course_utils.demos.holes`) it asks a GPU for these tensors and prints what happened, as
JSON: in a process of its own, because the allocator's settings hold for a whole process.
"""

import json
import sys
from collections.abc import Callable
from typing import Any

from ..units import MiB

Event = tuple[int, str]  # bytes, positive to allocate and negative to free, and the tensor's name

ACTIVATION, STATE, LATE = 0.23, 0.12, 0.2
"""Shares of the GPU's free memory: four activations, four states that come when those have gone, one more activation.

Two states do not fit into the place of one activation, so each takes one and leaves a hole of nearly half of it.
"""

COUNT = 4
PAGE = 20 * MiB  # sizes are multiples of it, the large pages of an expandable segment


def trace(room: int) -> list[Event]:
    """The events for a GPU with `room` bytes free; the last is the request that comes too late."""
    activation, state, late = (int(share * room) // PAGE * PAGE for share in (ACTIVATION, STATE, LATE))
    if not state:
        raise ValueError(f"no demo fits {room:,} bytes: free some of the GPU's memory")
    activations = [(activation, f"activation {index}") for index in range(1, COUNT + 1)]
    states = [(state, f"state {index}") for index in range(1, COUNT + 1)]
    return [*activations, *((-size, name) for size, name in activations), *states, (late, "next activation")]


def play(events: list[Event], allocate: Callable[[int], Any]) -> None:
    """Allocate and free as the events say. Raises what `allocate` raises; tensors that live are freed with the rest."""
    held: dict[str, Any] = {}
    for size, name in events:
        if size > 0:
            held[name] = allocate(size)
        else:
            del held[name]


def main() -> int:
    """Plays the events on the current GPU, and prints what came of it."""
    import torch

    free, _ = torch.cuda.mem_get_info()
    message = ""
    try:
        play(trace(free), lambda size: torch.empty(size, dtype=torch.uint8, device="cuda"))
    except torch.OutOfMemoryError as error:
        message = str(error)
    print(json.dumps({"device": torch.cuda.get_device_name(), "torch": torch.__version__, "message": message}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
