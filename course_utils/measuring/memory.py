"""torch's counters of a GPU's memory, for what a tracker sees go through torch's caching allocator."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..allocator.policy import CachingAllocator, OutOfMemory
from ..gpus import gpu
from ..units import binary

CARD = replace(gpu("A100-80GB"), name="simulated GPU")  # It has every kernel that the course knows


class Memory:
    """The counters after the events so far: (bytes, storage) allocates, (−bytes, storage) frees."""

    def __init__(self, events: Callable[[], Sequence[tuple[int, Any]]]) -> None:
        self._events = events
        self._since = 0
        self._capacity: int | None = None
        self._emptied_at = set[int]()  # the numbers of events after which a program called empty_cache
        self._begin()

    def _begin(self) -> None:
        self.allocator = CachingAllocator(self._capacity)
        self._addresses: dict[int, int] = {}
        self._done: list[tuple[int, Any]] = []
        self.emptied: list[int] = []  # the numbers of events after which the cache was given back
        self.most_allocated = self.most_reserved = self.most_requested = self.failures = 0

    def limit(self, capacity: int | None) -> None:
        """Run out of memory at `capacity` bytes from now on; with None, never."""
        self._capacity = self.allocator.capacity = capacity

    def followed(self, certain: int | None = None) -> "Memory":
        """These counters, up to the newest event or the number of those that are `certain`.

        Raises torch.OutOfMemoryError, with torch's own words, for the allocation that finds no room.
        """
        events = self._events()
        done = len(self._done)
        taken_back = done > 0 and (len(events) < done or events[done - 1] is not self._done[-1])
        if taken_back:  # the tracker undid an event that these counters include
            self._begin()
        for event in events[len(self._done) : certain]:
            self._follow(*event)
            self._done.append(event)
            if self.count in self._emptied_at:
                self._give_back()
        return self

    def _follow(self, size: int, storage: Any) -> None:
        if len(self._done) == self._since:
            self._restart_peaks()
        if size < 0:
            self.allocator.free(self._addresses.pop(id(storage)))
            return
        retries = self.allocator.retries
        refused = ""
        try:
            self._addresses[id(storage)] = self.allocator.malloc(size, getattr(storage, "stream", 0))
        except OutOfMemory as error:
            refused = _as_torch_says_it(error)
        # the allocator gives its cache back before it tries again
        self.emptied += [len(self._done)] * (self.allocator.retries - retries)
        if refused:  # raised here, without a context whose frames would keep the caller's tensors alive
            self.failures += 1
            raise torch.OutOfMemoryError(refused)
        self.most_allocated = max(self.most_allocated, self.allocator.allocated)
        self.most_reserved = max(self.most_reserved, self.allocator.reserved)
        self.most_requested = max(self.most_requested, self.allocator.requested)

    @property
    def limited(self) -> bool:
        """True if there is a capacity."""
        return self._capacity is not None

    @property
    def count(self) -> int:
        """The number of events that these counters include."""
        return len(self._done)

    def reset_peaks(self) -> None:
        """Count the most allocated and reserved anew from here."""
        self.followed()
        self._since = len(self._done)
        self._restart_peaks()

    def _restart_peaks(self) -> None:
        self.most_allocated = self.allocator.allocated
        self.most_reserved = self.allocator.reserved
        self.most_requested = self.allocator.requested

    def empty_cache(self) -> None:
        """Give back to the driver what holds no tensor."""
        self._emptied_at.add(self.followed().count)
        self._give_back()

    def _give_back(self) -> None:
        self.allocator.empty_cache()
        self.emptied.append(self.count)

    def free_and_total(self) -> tuple[int, int]:
        """Bytes that the driver still has, and all that a program gets of the card."""
        total = self._capacity or CARD.room
        return max(0, total - self.followed().allocator.reserved), total

    def statistics(self) -> dict[str, int]:
        """The counters that `torch.cuda.memory_stats` has, as far as they are known here."""
        allocator = self.followed().allocator
        segments = allocator.segments()
        now = {
            "allocated_bytes": (allocator.allocated, self.most_allocated),
            "active_bytes": (allocator.allocated, self.most_allocated),
            "reserved_bytes": (allocator.reserved, self.most_reserved),
            "requested_bytes": (allocator.requested, self.most_requested),
            "inactive_split_bytes": (allocator.stuck, None),
            "segment": (len(segments), None),
            "active": (sum(block.allocated for blocks in segments for block in blocks), None),
        }
        found = {"num_alloc_retries": allocator.retries, "num_ooms": self.failures}
        for name, (current, most) in now.items():
            found[f"{name}.all.current"] = current
            if most is not None:
                found[f"{name}.all.peak"] = most
        return found


def _as_torch_says_it(error: OutOfMemory) -> str:
    free = max(0, error.capacity - error.reserved)
    return (
        f"CUDA out of memory. Tried to allocate {binary(error.attempted)}."
        f" GPU 0 (simulated) has a total capacity of {binary(error.capacity)}"
        f" of which {binary(free)} is free."
        f" Of the allocated memory {binary(error.allocated)} is allocated by PyTorch,"
        f" and {binary(error.reserved - error.allocated)} is reserved by PyTorch but unallocated."
    )
