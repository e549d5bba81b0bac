"""The caching allocator: cases worked out by hand, settings as torch reads them.

That it rounds, splits, fits, retries and fails as torch's own allocator does is the subject of
test_genuine_allocator.
"""

import pytest
import torch

from course_utils.allocator.policy import CachingAllocator
from course_utils.allocator.settings import AllocatorSettings, settings
from course_utils.units import MiB


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

CAN_BE_ASKED = hasattr(torch._C, "_accelerator_setAllocatorSettings") and not torch.cuda.is_available()
"""Where there is a GPU, asking would change the allocator of this process."""


def torch_takes(text: str) -> bool:
    """Whether torch's own allocator takes these settings."""
    # torch keeps the last one otherwise
    torch._C._accelerator_setAllocatorSettings("large_segment_size_mb:20")
    try:
        torch._C._accelerator_setAllocatorSettings(text)
    except (ValueError, RuntimeError):
        return False
    return True


@pytest.mark.skipif(not CAN_BE_ASKED, reason="torch cannot be asked here")
def test_settings_are_taken_and_refused_as_torch_does():
    assert [text for text in GOOD + BAD if torch_takes(text)] == list(GOOD)
    for text in GOOD:
        AllocatorSettings(**settings(text))
    for text in BAD:
        named = "40" if "," in text else text.split(":")[0]
        with pytest.raises(ValueError, match=named):
            settings(text)
