"""The policy of torch's caching allocator, in plain Python: where each tensor's bytes would lie on a GPU.

One GPU; sizes are bytes. It follows `malloc`, `free_block` and `release_cached_blocks` of
c10/cuda/CUDACachingAllocator.cpp in torch 2.13: tests/genuine_allocator.py compiles that code and compares
thousands of allocations, byte for byte. `replay` sends the allocations of a whole training step through it.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..units import BLOCK, MiB, TiB, binary, percent, round_up
from .settings import AllocatorSettings

SMALL_REQUEST = 1 * MiB  # requests up to here are served from the small pool (kSmallSize)
SMALL_SEGMENT = 2 * MiB  # bytes that the small pool asks the driver for at once (kSmallBuffer)
LARGE_REQUEST = 10 * MiB  # requests from here on get a segment of their own size (kMinLargeAlloc)
LARGE_ROUNDING = 2 * MiB  # … rounded up to a multiple of this, the GPU's page size (kRoundLarge)

TAKEN = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
"""Calls of the driver, by torch's names (cudaMalloc, mapping pages, cudaFree, unmapping), and their sign."""

FIRST_ADDRESS = 1 << 45  # the address of the first segment; any would do
ADDRESS_SPACE = 16 * TiB  # addresses of an expandable segment where no capacity is given; they cost nothing


class OutOfMemory(RuntimeError):
    """The allocator found no room, not even after giving back all that it could.

    Sizes are bytes at the moment of the failure. `requested` is what was asked for, `attempted` what that
    came to, rounded up to what the driver hands out. `free` is all that holds no tensor, at the driver or
    reserved; `free_share` that as a share of the capacity, from 0 to 1.
    """

    def __init__(self, requested: int, attempted: int, allocator: "CachingAllocator") -> None:
        self.requested = requested
        self.attempted = attempted
        self.capacity = allocator.capacity or 0
        self.allocated = allocator.allocated
        self.reserved = allocator.reserved
        self.largest_free = allocator.largest_free
        self.free = self.capacity - self.allocated
        self.free_share = self.free / self.capacity
        told = (
            f"out of GPU memory (in a replay). Tried to allocate {binary(attempted)}. The GPU has a total"
            f" capacity of {binary(self.capacity)}, of which {binary(self.capacity - self.reserved)} is free."
            f" {binary(self.allocated)} is allocated to tensors, and {binary(allocator.cached)} is reserved"
            f" but unallocated, its largest piece {binary(self.largest_free)}."
        )
        if self.free >= requested:
            told += (
                f" In all {percent(self.free_share)} of the GPU holds no tensor, which would be enough in one"
                " piece: the memory is fragmented, and expandable_segments:True may help."
            )
        super().__init__(told)


@dataclass(frozen=True, slots=True)
class DriverCall:
    """Memory taken from the driver or given back to it; `action` is one of `TAKEN`."""

    action: str
    address: int
    bytes: int
    small: bool


@dataclass(slots=True, eq=False)
class Block:
    """A range of addresses in a segment: allocated, free (never next to another free one), or not mapped."""

    address: int
    size: int
    pool: "Pool"
    expandable: bool = False
    previous: "Block | None" = None
    next: "Block | None" = None
    requested: int = 0
    allocated: bool = False
    mapped: bool = True

    @property
    def end(self) -> int:
        return self.address + self.size

    @property
    def is_whole_segment(self) -> bool:
        return self.previous is None and self.next is None


class Pool:
    """The free blocks of one pool of one stream, by size, then by address (BlockComparatorSize)."""

    def __init__(self, small: bool, page: int, stream: int = 0) -> None:
        self.small = small
        self.page = page
        self.stream = stream
        self.by_size: list[tuple[int, int]] = []
        self.free: dict[int, Block] = {}
        self.unmapped: dict[int, Block] = {}
        self.releasable = 0  # bytes that could be given back to the driver now

    def add(self, block: Block) -> None:
        insort(self.by_size, (block.size, block.address))
        self.free[block.address] = block
        first, last = releasable_range(block)
        self.releasable += last - first

    def take(self, block: Block) -> None:
        del self.by_size[bisect_left(self.by_size, (block.size, block.address))]
        del self.free[block.address]
        first, last = releasable_range(block)
        self.releasable -= last - first

    def from_size(self, size: int) -> Iterator[Block]:
        """Free blocks of at least `size` bytes, smallest first."""
        for index in range(bisect_left(self.by_size, (size, 0)), len(self.by_size)):
            yield self.free[self.by_size[index][1]]

    @property
    def largest(self) -> int:
        return self.by_size[-1][0] if self.by_size else 0


class CachingAllocator:
    """torch's caching allocator without a GPU.

    `capacity` is what the driver can give (bytes; None for no limit); the other choices are those of an
    `AllocatorSettings`, and raise ValueError like it. After each call `allocated` (bytes in blocks that hold
    a tensor) and `reserved` (bytes taken from the driver) are current; `driver_calls` lists what the driver
    was asked, `retries` counts allocations that had to give cached memory back. Each CUDA stream that
    allocates has its own free blocks, and no other stream is served from them; out of memory, those of all
    streams are given back.

    `offered` takes (bytes, address) of segments as a GPU's driver placed them: the next new segments of those
    sizes lie there, any other follows the last, or with `descending` lies below all. Of equal free blocks,
    the one at the lowest address is used (torch 2.13: one of the oldest segment, the same where nothing is
    offered and nothing descends).
    """

    def __init__(self, capacity: int | None = None, *, descending: bool = False, **choices: Any) -> None:
        if capacity is not None and (type(capacity) is not int or capacity < 1):
            raise ValueError(
                f"capacity is {capacity!r}: it takes whole bytes, at least 1, or None for no limit"
            )
        self.capacity = capacity
        self.descending = descending
        self.settings = AllocatorSettings(**choices)
        # by whether the pool is the small one
        self.pages = {True: SMALL_SEGMENT, False: self.settings.large_segment}
        self._pools: dict[tuple[bool, int], Pool] = {}
        self.allocated = 0
        self.requested = 0
        self.reserved = 0
        self.retries = 0
        self.driver_calls: list[DriverCall] = []
        self.offered: list[tuple[int, int]] = []
        self._live: dict[int, Block] = {}
        self._ends: dict[int, int] = {}  # of each segment, by its start
        self._next_address = FIRST_ADDRESS

    def malloc(self, size: int, stream: int = 0) -> int:
        """The address of a block for `size` bytes on a stream. Raises OutOfMemory if the GPU has no room."""
        if type(size) is not int or size < 1:
            raise ValueError(
                f"size is {size!r}: an allocation takes at least 1 byte (torch skips empty tensors)"
            )
        rounded = self.round_size(size)
        pool = self._pool(rounded <= SMALL_REQUEST, stream)
        block = self._best_fit(pool, rounded) or self._new_block(pool, rounded)
        if block is None:
            raise OutOfMemory(size, self.segment_size(rounded), self)
        if self._should_split(block, rounded):
            after = Block(block.address + rounded, block.size - rounded, pool, block.expandable)
            block.size = rounded
            _link(block, after, block.next)
            pool.add(after)
        block.allocated = True
        block.requested = size
        self._live[block.address] = block
        self.allocated += block.size
        self.requested += size
        return block.address

    def free(self, address: int) -> None:
        """Return a block to its pool, joined with free neighbors. ValueError for an address without one."""
        block = self._live.pop(address, None)
        if block is None:
            raise ValueError(
                f"nothing is allocated at address {address}: free what malloc returned, only once"
            )
        self.allocated -= block.size
        self.requested -= block.requested
        block.allocated = False
        block.requested = 0
        self._join(block)
        block.pool.add(block)

    def empty_cache(self) -> None:
        """Give every segment without an allocation back to the driver (expandable: every such page)."""
        for _, pool in sorted(self._pools.items()):
            for block in [pool.free[address] for _, address in pool.by_size]:
                if block.expandable:
                    self._unmap(block)
                elif block.is_whole_segment:
                    self._release(block)

    @property
    def cached(self) -> int:
        """Bytes reserved that hold no tensor."""
        return self.reserved - self.allocated

    @property
    def releasable(self) -> int:
        """Free bytes that could be given back to the driver now."""
        return sum(pool.releasable for pool in self._pools.values())

    @property
    def stuck(self) -> int:
        """Free bytes that cannot be given back: something is allocated in the same segment (or page)."""
        return self.cached - self.releasable

    @property
    def largest_free(self) -> int:
        """Bytes of the largest free block; 0 without one."""
        return max((pool.largest for pool in self._pools.values()), default=0)

    def block_size(self, address: int) -> int:
        """Bytes of the block that is allocated at `address`, at least the bytes requested."""
        return self._live[address].size

    def segments(self) -> list[list[Block]]:
        """The blocks of each segment by address.

        Each unbroken mapped range of an expandable segment counts as one.
        """
        runs: list[list[Block]] = []
        free = (block for pool in self._pools.values() for block in pool.free.values())
        for block in sorted([*self._live.values(), *free], key=lambda block: block.address):
            if block.previous is None or not block.previous.mapped:
                runs.append([])
            runs[-1].append(block)
        return runs

    def round_size(self, size: int) -> int:
        """Bytes that a request of `size` takes: a multiple of 512, or of a division of the power of two."""
        divisions = self.settings.roundup_power2_divisions or 0
        if divisions > 1 and size > BLOCK * divisions:
            # The power of two at or below `size`, in so many divisions up to the next one.
            return round_up(size, (1 << size.bit_length() - 1) // divisions)
        return round_up(size, BLOCK)

    def segment_size(self, rounded: int) -> int:
        """Bytes to ask the driver for, where `rounded` bytes find no free block (get_allocation_size)."""
        if rounded <= SMALL_REQUEST:
            return SMALL_SEGMENT
        if rounded < LARGE_REQUEST:
            return self.settings.large_segment
        return round_up(rounded, LARGE_ROUNDING)

    def _should_split(self, block: Block, rounded: int) -> bool:
        """True if what a request leaves of a block becomes a free block of its own (should_split)."""
        rest = block.size - rounded
        if block.pool.small or self.settings.expandable_segments:
            return rest >= BLOCK
        limit = self.settings.max_split_size
        return rest > SMALL_REQUEST and (limit is None or rounded < limit)

    def _pool(self, small: bool, stream: int) -> Pool:
        key = (small, stream)
        if key not in self._pools:
            self._pools[key] = Pool(small, self.pages[small], stream)
        return self._pools[key]

    def _best_fit(self, pool: Pool, rounded: int) -> Block | None:
        """The smallest free block for `rounded` bytes, taken out of its pool; None if none can be used."""
        candidates = pool.from_size(rounded)
        best = next(candidates, None)
        if best is None:
            return None
        if self.settings.expandable_segments:
            # A block that can still grow is left for a larger request, if another one fits.
            for larger in candidates:
                if _growable_size(larger) >= _growable_size(best):
                    break
                best = larger
        limit = self.settings.max_split_size
        if limit is not None:  # from there on no block is split: too much of it would be lost
            if rounded >= limit:
                limit = rounded + self.settings.max_non_split_rounding
            if best.size >= limit:
                return None
        best.pool.take(best)
        return best

    def _new_block(self, pool: Pool, rounded: int) -> Block | None:
        """A block in new memory: at once, or after giving back the blocks that suffice, or all free ones."""
        block = self._grow(pool, rounded)
        if block is None and self._release_oversized(pool, rounded):
            block = self._grow(pool, rounded)
        if block is None:
            self.retries += 1
            self.empty_cache()
            block = self._grow(pool, rounded)
        return block

    def _grow(self, pool: Pool, rounded: int) -> Block | None:
        if self.settings.expandable_segments:
            return self._grow_expandable(pool, rounded)
        size = self.segment_size(rounded)
        if not self._driver_has(size):
            return None
        block = self._new_segment(pool, size)
        self._call("segment_alloc", block)
        return block

    def _driver_has(self, size: int) -> bool:
        return self.capacity is None or self.reserved + size <= self.capacity

    def _new_segment(self, pool: Pool, size: int, expandable: bool = False) -> Block:
        start = None if expandable else self._offered_address(size)
        if start is None and self.descending and not expandable:
            start = min(self._ends, default=FIRST_ADDRESS) - size
        if start is None:
            start = round_up(self._next_address, pool.page if expandable else LARGE_ROUNDING)
        block = Block(start, size, pool, expandable, mapped=not expandable)
        self._next_address = max(self._next_address, block.end)
        self._ends[start] = block.end
        return block

    def _offered_address(self, size: int) -> int | None:
        """The address that is offered for a segment of `size` bytes and not taken; None without one."""
        for offer in self.offered:
            offered_size, start = offer
            if offered_size != size:
                continue
            end = start + size
            overlaps = any(start < theirs and other < end for other, theirs in self._ends.items())
            if not overlaps:
                self.offered.remove(offer)
                return start
        return None

    def _call(self, action: str, block: Block) -> None:
        self.reserved += TAKEN[action] * block.size
        self.driver_calls.append(DriverCall(action, block.address, block.size, block.pool.small))

    def _release(self, block: Block) -> None:
        block.pool.take(block)
        del self._ends[block.address]
        self._call("segment_free", block)

    def _release_oversized(self, pool: Pool, rounded: int) -> bool:
        """Release the smallest unsplit block that holds the request (`max_split_size_mb`).

        Without one, release the largest ones first until together they do (release_available_cached_blocks).
        False if they do not.
        """
        limit = self.settings.max_split_size
        # Blocks of expandable segments are no segments, to be given back whole.
        if limit is None or self.settings.expandable_segments:
            return False
        wanted = max(rounded, limit)
        single = next(pool.from_size(wanted), None)
        if single is not None:
            self._release(single)
            return True
        released = 0
        while released < wanted and pool.largest >= limit:
            block = pool.free[pool.by_size[-1][1]]
            released += block.size
            self._release(block)
        return released >= wanted

    def _join(self, block: Block) -> None:
        """Add the free neighbors that are mapped alike to a block that is in no pool (try_merge_blocks)."""
        for neighbor in (block.previous, block.next):
            if neighbor is None or neighbor.allocated or neighbor.mapped != block.mapped:
                continue
            if neighbor.mapped:
                neighbor.pool.take(neighbor)
            else:
                del block.pool.unmapped[neighbor.address]
            if neighbor is block.previous:
                block.address = neighbor.address
                _link(neighbor.previous, block, block.next)
            else:
                _link(block.previous, block, neighbor.next)
            block.size += neighbor.size

    # Expandable segments

    def _grow_expandable(self, pool: Pool, rounded: int) -> Block | None:
        """Map pages behind what is free, at the lowest address with room (try_allocate_expandable_block)."""
        block = self._expandable_room(pool, rounded)
        if not block.mapped and not self._map(block, min(block.size, rounded)):
            return None
        while block.size < rounded:
            following = block.next
            assert following is not None  # _expandable_room has found enough addresses
            if not self._map(following, min(rounded - block.size, following.size)):
                return None  # what was mapped before the driver ran out stays mapped
            block = following  # which has taken the free block before it in
        block.pool.take(block)
        return block

    def _expandable_room(self, pool: Pool, rounded: int) -> Block:
        """The first of the free and unmapped neighbors with room together; else a new segment (unmapped)."""
        block: Block | None
        for address in sorted(pool.unmapped):
            first = pool.unmapped[address]
            if first.previous is not None and not first.previous.allocated:
                first = first.previous
            room = 0
            block = first
            while block is not None and not block.allocated and room < rounded:
                room += block.size
                block = block.next
            if room >= rounded:
                return first
        # 1 1/8 of the GPU, as torch: some pages at the front may be given back and mapped again at the end.
        space = ADDRESS_SPACE if self.capacity is None else self.capacity + self.capacity // 8
        block = self._new_segment(pool, round_up(max(space, rounded), pool.page), expandable=True)
        pool.unmapped[block.address] = block
        return block

    def _map(self, block: Block, size: int) -> bool:
        """Back the first `size` bytes of an unmapped block with pages, and join it with free neighbors."""
        mapped = round_up(size, block.pool.page)
        if not self._driver_has(mapped):
            return False
        del block.pool.unmapped[block.address]
        if mapped < block.size:
            rest = Block(block.address + mapped, block.size - mapped, block.pool, True, mapped=False)
            block.size = mapped
            _link(block, rest, block.next)
            block.pool.unmapped[rest.address] = rest
        block.mapped = True
        self._call("segment_map", block)
        self._join(block)
        block.pool.add(block)
        return True

    def _unmap(self, block: Block) -> None:
        """Give the pages that lie wholly in a free block back to the driver; the rest of it stays free."""
        pool = block.pool
        first, last = releasable_range(block)
        if first == last:
            return
        pool.take(block)
        if block.address < first:
            before = Block(block.address, first - block.address, pool, True)
            _link(block.previous, before, block)
            pool.add(before)
        if last < block.end:
            after = Block(last, block.end - last, pool, True)
            _link(block, after, block.next)
            pool.add(after)
        block.address = first
        block.size = last - first
        block.mapped = False
        self._call("segment_unmap", block)
        self._join(block)
        if block.is_whole_segment:
            del self._ends[block.address]
        else:
            pool.unmapped[block.address] = block


def _link(before: Block | None, block: Block, after: Block | None) -> None:
    block.previous = before
    block.next = after
    if before is not None:
        before.next = block
    if after is not None:
        after.previous = block


def _growable_size(block: Block) -> int:
    """Bytes that a free block of an expandable segment has, or can get by mapping pages behind it."""
    following = block.next
    if following is None or following.mapped:
        return block.size
    return block.size + following.size


def releasable_range(block: Block) -> tuple[int, int]:
    """From where to where a free block could be given back now, as a segment or as pages.

    Where nothing could be, both are its address.
    """
    if block.expandable:
        page = block.pool.page
        first = round_up(block.address, page)
        last = block.end // page * page
        if first < last:
            return first, last
    elif block.is_whole_segment:
        return block.address, block.end
    return block.address, block.address
