"""Bytes inside, GB and GiB only where a person reads them: the one formatter and the one parser."""

import re
from collections.abc import Callable

KB, MB, GB, TB = 10**3, 10**6, 10**9, 10**12
KiB, MiB, GiB, TiB = 2**10, 2**20, 2**30, 2**40

UNITS = {"B": 1, "KB": KB, "MB": MB, "GB": GB, "TB": TB, "KiB": KiB, "MiB": MiB, "GiB": GiB, "TiB": TiB}
"""Bytes in each unit; the letter i means a power of two (IEC 80000-13)."""

BLOCK = 512
"""Bytes: CUDA's caching allocator hands out multiples of this (c10/cuda/CUDACachingAllocator, kMinBlockSize)."""


def round_up(size: int, multiple: int = BLOCK) -> int:
    """The smallest multiple of `multiple` (bytes) that holds `size` bytes; what the allocator really takes."""
    return -(-size // multiple) * multiple


def format_bytes(size: int, unit: str | None = None, digits: int | None = None) -> str:
    """`size` bytes for a reader, always with its unit: `format_bytes(3_115_222_400)` is "3.12 GB".

    `unit` is one of `UNITS`; without it the largest decimal unit that leaves at least 1 is taken.
    `digits` counts decimals; without it three significant figures are shown (whole bytes stay whole).
    Raises ValueError for a unit that is not known.
    """
    unit = unit or _natural_unit(size)
    if unit not in UNITS:
        raise ValueError(f"unknown unit {unit!r}; known: {', '.join(UNITS)}")
    amount = size / UNITS[unit]
    if digits is None:
        digits = 0 if unit == "B" else max(0, 2 - len(str(int(abs(amount)))) + 1) if abs(amount) >= 1 else 3
    return f"{amount:,.{digits}f} {unit}"


def formatter(total: int) -> Callable[[int], str]:
    """How the parts of a total of so many bytes are written: all in one unit that suits it, with three decimals.

    A table of them can be added up by eye: GB for totals of 1 GB and more, MB below, KB below 1 MB.
    """
    unit = next((unit for unit in ("GB", "MB") if abs(total) >= UNITS[unit]), "KB")
    return lambda size: format_bytes(size, unit, 3)


def _natural_unit(size: int) -> str:
    return next((unit for unit in ("TB", "GB", "MB", "KB") if abs(size) >= UNITS[unit]), "B")


def parse_bytes(text: str | int) -> int:
    """Bytes meant by "80 GB", "1.5GiB", "512" or an int. Raises ValueError saying what it takes."""
    if isinstance(text, int):
        return text
    match = re.fullmatch(r"\s*([0-9][0-9_,]*(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", text)
    unit = {name.lower(): name for name in UNITS}.get((match[2] or "B").lower()) if match else None
    if match is None or unit is None:
        raise ValueError(f"{text!r} is no amount of memory; write a number and a unit, as in '80 GB' or '16 GiB'")
    return round(float(match[1].replace(",", "").replace("_", "")) * UNITS[unit])
