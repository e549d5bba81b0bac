"""The caching allocator: cases worked out by hand, invariants on random traces, settings as torch reads them.

That it rounds, splits, fits, retries and fails as torch's own allocator does is the subject of
test_genuine_allocator.
"""

import json
import subprocess
import sys
from typing import Any

import pytest
import torch

from course_utils.allocator.policy import CachingAllocator, OutOfMemory
from course_utils.allocator.settings import AllocatorSettings, settings
from course_utils.units import MiB


def fragmented(**choices: Any) -> CachingAllocator:
    """80 MiB in 20 tensors of 4 MiB, of which two in five, never neighbors, have been freed: 40 % is free."""
    allocator = CachingAllocator(80 * MiB, **choices)
    for index, address in enumerate([allocator.malloc(4 * MiB) for _ in range(20)]):
        if index % 5 in (1, 3):
            allocator.free(address)
    return allocator


def test_an_allocation_fails_with_40_percent_of_the_memory_free():
    allocator = fragmented()
    with pytest.raises(OutOfMemory) as failed:
        allocator.malloc(8 * MiB)
    error = failed.value
    assert error.free == 32 * MiB and error.free_share == 0.4
    assert (error.requested, error.attempted, error.largest_free) == (8 * MiB, 20 * MiB, 4 * MiB)
    for words in (
        "Tried to allocate 20.00 MiB",
        "total capacity of 80.00 MiB, of which 0 bytes is free",
        "48.00 MiB is allocated",
        "32.00 MiB is reserved but unallocated",
        "40 % of the GPU",
        "fragmented",
    ):
        assert words in str(error)
    with pytest.raises(OutOfMemory, match=r"largest piece 4\.00 MiB\.$"):  # not fragmented but full
        allocator.malloc(33 * MiB)
    with pytest.raises(OutOfMemory, match=r"largest piece 4\.00 MiB"):  # no page of these is free
        fragmented(expandable_segments=True).malloc(8 * MiB)
    assert allocator.allocated == 48 * MiB


def test_a_stream_is_served_from_its_own_blocks_and_out_of_memory_takes_those_of_all():
    allocator = CachingAllocator(capacity=45 * MiB)
    allocator.free(allocator.malloc(20 * MiB))
    other = allocator.malloc(20 * MiB, stream=1)
    assert (allocator.reserved, allocator.cached, allocator.largest_free) == (40 * MiB, 20 * MiB, 20 * MiB)
    assert allocator.malloc(20 * MiB, stream=2) != other and allocator.retries == 1
    assert allocator.reserved == allocator.allocated == 40 * MiB


GOOD = (
    "expandable_segments:False",
    " max_split_size_mb : 20 , ",
    "large_segment_size_mb:40,max_split_size_mb:40",
    "max_non_split_rounding_mb:30",
    "roundup_power2_divisions:1",
    "pinned_use_background_threads:True",
    "",
)
BAD = (
    "expandable_segments:true",
    "max_split_size_mb:19",
    "max_split_size_mb:x",
    "max_split_size_mb",
    "large_segment_size_mb:10",
    "large_segment_size_mb:40,max_split_size_mb:30",
    "max_non_split_rounding_mb:10",
    "roundup_power2_divisions:3",
    "roundup_power2_divisions:0",
)

ASK_TORCH = """
import json, sys, torch
answers = {}
for text in json.load(sys.stdin):
    try:
        # torch keeps the last one otherwise
        torch._C._accelerator_setAllocatorSettings("large_segment_size_mb:20")
        torch._C._accelerator_setAllocatorSettings(text)
        answers[text] = True
    except (ValueError, RuntimeError):
        answers[text] = False
print(json.dumps(answers))
"""


CAN_BE_ASKED = hasattr(torch._C, "_accelerator_setAllocatorSettings")


@pytest.mark.skipif(not CAN_BE_ASKED, reason="this torch cannot be asked")
def test_settings_are_taken_and_refused_as_torch_does():
    asked = [sys.executable, "-c", ASK_TORCH]
    done = subprocess.run(asked, input=json.dumps(GOOD + BAD), capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == dict.fromkeys(GOOD, True) | dict.fromkeys(BAD, False)
    for text in GOOD:
        AllocatorSettings(**settings(text))
    for text in BAD:
        named = "40" if "," in text else text.split(":")[0]
        with pytest.raises(ValueError, match=named):
            settings(text)
