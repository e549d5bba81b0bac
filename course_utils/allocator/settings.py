"""The options of PYTORCH_CUDA_ALLOC_CONF that choose the allocator's policy, read as torch reads them.

Source of every limit: c10/core/AllocatorConfig of torch 2.13; a test asks torch itself.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ..errors import check_known
from ..units import MiB

LARGE_SEGMENT_MB = 20  # MiB (torch writes MB): requests of 1 to 10 MiB share buffers of this size


@dataclass(frozen=True)
class AllocatorSettings:
    """The policy's choices; sizes in MiB, as in torch, whose names end in `_mb` nevertheless.

    `max_split_size_mb`: larger blocks are never split, and serve large requests only.
    `roundup_power2_divisions`: round sizes up to this many steps between powers of two.
    `max_non_split_rounding_mb`: how much larger than the request an unsplittable block may be. Raises
    ValueError for values that torch refuses too.
    """

    expandable_segments: bool = False
    max_split_size_mb: int | None = None
    roundup_power2_divisions: int | None = None
    large_segment_size_mb: int = LARGE_SEGMENT_MB
    max_non_split_rounding_mb: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.expandable_segments, bool):
            raise ValueError(f"expandable_segments is {self.expandable_segments!r}: it is True or False")
        # At least 11, as a request of 10 MiB gets a segment of its own.
        _check_size("large_segment_size_mb", self.large_segment_size_mb, 11)
        for name in ("max_split_size_mb", "max_non_split_rounding_mb"):
            if getattr(self, name) is not None:
                _check_size(name, getattr(self, name), self.large_segment_size_mb)
        steps = self.roundup_power2_divisions
        # A power of two has a single bit, which `steps & (steps - 1)` clears.
        if steps is not None and (type(steps) is not int or steps < 1 or steps & (steps - 1)):
            raise ValueError(f"roundup_power2_divisions is {steps!r}: it must be a power of two, such as 8")

    @property
    def large_segment(self) -> int:
        """Bytes of the segments that requests of 1 to 10 MiB share, and of the large expandable pages."""
        return self.large_segment_size_mb * MiB

    @property
    def max_split_size(self) -> int | None:
        """Bytes from which a block is never split; None where every block may be."""
        return None if self.max_split_size_mb is None else self.max_split_size_mb * MiB

    @property
    def max_non_split_rounding(self) -> int:
        """Bytes by which an unsplittable block may exceed the request that it serves."""
        if self.max_non_split_rounding_mb is None:
            return self.large_segment
        return self.max_non_split_rounding_mb * MiB


EXAMPLES = {
    "expandable_segments": "True",
    "max_split_size_mb": "128",
    "roundup_power2_divisions": "8",
    "large_segment_size_mb": "20",
    "max_non_split_rounding_mb": "20",
}
"""Every option that a replay follows, with a value."""


def check_names(names: Iterable[str]) -> None:
    """Raises ValueError, with the nearest, for a name that is no option of an `AllocatorSettings`."""
    for name in names:
        check_known("allocator setting", name, EXAMPLES)


def settings(text: str) -> dict[str, Any]:
    """The choices of an `AllocatorSettings` that a value of PYTORCH_CUDA_ALLOC_CONF makes.

    `replay(measured, **settings("expandable_segments:True,max_split_size_mb:128"))` takes them. Raises
    ValueError for a name that a replay does not follow (with the nearest that it does), and for a value that
    torch refuses.
    """
    found: dict[str, Any] = {}
    for part in filter(None, "".join(text.split()).split(",")):
        name, _, value = part.partition(":")
        if name.startswith("pinned_") or part == "backend:native":  # which change nothing on a GPU
            continue
        check_names([name])
        if not value:
            raise ValueError(f"{name} has no value: write {name}:{EXAMPLES[name]}")
        found[name] = _value(name, value)
    AllocatorSettings(**found)
    return found


def _value(name: str, text: str) -> Any:
    if name == "expandable_segments":
        if text not in ("True", "False"):
            raise ValueError(
                f"expandable_segments is {text!r}: torch takes True or False, with a capital letter"
            )
        return text == "True"
    if not text.isdecimal():
        raise ValueError(f"{name} has {text!r}, which is not a whole number: write {name}:{EXAMPLES[name]}")
    return int(text)


def _check_size(name: str, value: object, least: int) -> None:
    if type(value) is not int:
        raise ValueError(f"{name} is {value!r}: it takes a whole number of MiB")
    if value < least:
        raise ValueError(f"{name} is {value}: torch takes {least} or more")
