"""Lesson 10, allocator and fragmentation: buffers, segments, counters, holes, pages."""

from course_utils.allocator.policy import CachingAllocator
from course_utils.allocator.settings import LARGE_SEGMENT_MB
from course_utils.interactive.quiz import Question, gb, question
from course_utils.model_files import model_config
from course_utils.units import MiB, format_bytes


def questions() -> tuple[Question, ...]:
    """The questions in the order of the lesson."""
    size = model_config("gpt2-large").parameters
    flat_buffer = question(
        "GPT-2 large has gradients in 16 bits. How large is one flat fp32 buffer for all of them?",
        (gb(4 * size), "4 bytes for each parameter: the buffer's format counts."),
        (gb(2 * size), "That is the gradients themselves, in 16 bits."),
        (gb(8 * size), "That is two such buffers, as Adam's two moments are."),
        (gb(16 * size), "That is everything that mixed-precision Adam keeps, and no buffer at all."),
    )  # fmt: skip
    allocator, size, count = CachingAllocator(), 6, 5
    for _ in range(count):
        allocator.malloc(size * MiB)
    segments = question(
        f"A fresh process makes {count} tensors of {size} MiB. How much does it take from the driver?",
        (_mib(allocator.reserved), f"Segments of {LARGE_SEGMENT_MB} MiB, of which each has room for "
         f"{LARGE_SEGMENT_MB // size} of them."),
        (_mib(count * size * MiB), "That is what the tensors ask for. The driver is asked for more at once."),
        (_mib(count * LARGE_SEGMENT_MB * MiB), "That gives each tensor a segment. They share."),
        (_mib(LARGE_SEGMENT_MB * MiB), "One segment alone is too small for all of them."),
    )  # fmt: skip
    allocator, weights, activations = CachingAllocator(), 120, 400
    allocator.malloc(weights * MiB)
    allocator.free(allocator.malloc(activations * MiB))
    what_others_cannot_have = question(
        f"A process has {weights} MiB of weights and has just freed {activations} MiB of activations, the most that it "
        "ever needs. How much of the GPU can no other process have, its context aside?",
        (_mib(allocator.reserved), "What is reserved: freed memory stays with the process."),
        (_mib(allocator.allocated), "That is what is allocated. The driver does not know that the rest is free."),
        (_mib(allocator.cached), "That is the cache alone. The weights are there as well."),
        (_mib(0), "Tensors that live cannot move away."),
    )  # fmt: skip
    size, count = 4, 20
    allocator = CachingAllocator(size * count * MiB)
    for index, address in enumerate([allocator.malloc(size * MiB) for _ in range(count)]):
        if index % 5 in (1, 3):
            allocator.free(address)
    largest_hole = question(
        f"{count} tensors of {size} MiB fill a GPU of {size * count} MiB. Of each five, the second and the fourth "
        "are freed. How large a tensor can be made now?",
        (_mib(allocator.largest_free), "As large as one hole: no neighbors of it are free."),
        (_mib(allocator.cached), "That is all that is free, and it does not lie together."),
        (_mib(2 * size * MiB), "The two holes of a segment have a tensor between them."),
        (_mib(LARGE_SEGMENT_MB * MiB), "No segment is empty, so none goes back to the driver."),
    )  # fmt: skip
    page, hole = LARGE_SEGMENT_MB, 38
    whole_pages = question(
        f"In an expandable segment, whose pages are {page} MiB, a hole of {hole} MiB lies between two tensors. How "
        "much of it can go back to the driver at most?",
        (_mib(hole // page * page * MiB), "Whole pages only, and no two of them fit into the hole."),
        (_mib(hole * MiB), "That would leave parts of pages, and a page is there or not."),
        (_mib(2 * page * MiB), "Two pages are more than the hole: they hold parts of its neighbors."),
        (_mib(0), "That is how a segment of a fixed size behaves, as long as a tensor is in it."),
    )  # fmt: skip
    return flat_buffer, segments, what_others_cannot_have, largest_hole, whole_pages


def _mib(size: int) -> str:
    return format_bytes(size, "MiB", 0)
