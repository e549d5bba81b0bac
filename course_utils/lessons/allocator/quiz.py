"""The numbers in the quiz of lesson 12, question by question; its words are in quiz.toml."""

from collections.abc import Iterator
from functools import partial

from ...allocator.policy import CachingAllocator
from ...allocator.settings import LARGE_SEGMENT_MB
from ...interactive.quiz import Numbers, gb
from ...model_files import model_config
from ...units import MiB, each, format_bytes

_mib = partial(format_bytes, unit="MiB", digits=0)


def numbers() -> Iterator[Numbers]:
    size = model_config("gpt2-large").parameters
    segment = LARGE_SEGMENT_MB * MiB
    yield "flat_buffer", each(gb, buffer=4 * size, gradients=2 * size, moments=8 * size, everything=16 * size)
    allocator = CachingAllocator()
    size = 6
    count = 5
    for _ in range(count):
        allocator.malloc(size * MiB)
    known = {"count": count, "size": size, "segment": LARGE_SEGMENT_MB, "room": LARGE_SEGMENT_MB // size}
    asked = count * size * MiB
    apart = count * segment
    yield "segments", known | each(_mib, reserved=allocator.reserved, asked=asked, apart=apart, one=segment)
    allocator = CachingAllocator()
    weights = 120
    activations = 400
    allocator.malloc(weights * MiB)
    allocator.free(allocator.malloc(activations * MiB))
    known = {"weights": weights, "activations": activations}
    counters = {"reserved": allocator.reserved, "allocated": allocator.allocated, "cached": allocator.cached}
    yield "what_others_cannot_have", known | each(_mib, **counters, none=0)
    size, count = 4, 20
    allocator = CachingAllocator(size * count * MiB)
    for index, address in enumerate([allocator.malloc(size * MiB) for _ in range(count)]):
        if index % 5 in (1, 3):
            allocator.free(address)
    known = {"count": count, "size": size, "capacity": size * count}
    hole = allocator.largest_free
    free = allocator.cached
    two = 2 * size * MiB
    yield "largest_hole", known | each(_mib, hole=hole, free=free, two=two, segment=segment)
    page, hole = LARGE_SEGMENT_MB, 38
    sizes = each(_mib, whole=hole // page * page * MiB, all=hole * MiB, two=2 * page * MiB, none=0)
    yield "whole_pages", {"page": page, "hole": hole} | sizes
