"""Colors and names of the kinds of memory, amounts of bytes, words for a picture.

It draws nothing, so what runs without matplotlib shows the same.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from .gpus import Gpu
from .measurement import Measurement
from .units import UNITS, format_bytes

COLOURS = {
    "parameters": "#0072B2",
    "weight_copies": "#12305E",
    "gradients": "#8FD0F7",
    "optimizer_states": "#E69F00",
    "activations": "#009E73",
    "inputs": "#F0E442",
    "communication": "#D55E00",
    "workspaces": "#662200",
    "temporaries": "#BFBFBF",
    "cached": "#E9E9E9",
    "free": "#FFFFFF",
}
"""One color for each kind of memory, after Okabe and Ito's palette.

`cached` and `free` belong to the allocator. They are told apart with each kind of color blindness, and
neighbors in a stack by their lightness alone, as in grey print.
"""

INK, QUIET, RULE, GRID = "#111111", "#555555", "#8A8A8A", "#E4E4E4"
OVER, UNDER = "#A8071A", "#00624A"

UNIT_NOTES = {
    "KB": "1 KB = 10³ bytes",
    "MB": "1 MB = 10⁶ bytes",
    "GB": "1 GB = 10⁹ bytes",
    "TB": "1 TB = 10¹² bytes",
    "KiB": "1 KiB = 2¹⁰ bytes",
    "MiB": "1 MiB = 2²⁰ bytes",
    "GiB": "1 GiB = 2³⁰ bytes",
    "TiB": "1 TiB = 2⁴⁰ bytes",
}


@dataclass(frozen=True)
class Segment:
    """A part of a stack with its own name ("fp32 momentum"): `size` bytes in the color of its `kind`."""

    name: str
    size: int
    kind: str

    def __post_init__(self) -> None:
        if self.kind not in COLOURS:
            raise ValueError(f"unknown kind of memory {self.kind!r}; known: {', '.join(COLOURS)}")


Row = Mapping[str, int] | Sequence[Segment] | Measurement


def segments_of(row: Row) -> list[Segment]:
    """The parts of one bar that are not empty, in stacking order. Raises ValueError for unknown kinds."""
    if isinstance(row, Measurement):
        row = row.breakdown
    if isinstance(row, Mapping):
        parts = [Segment(words(kind), size, kind) for kind, size in row.items()]
        row = sorted(parts, key=lambda part: list(COLOURS).index(part.kind))
    return [part for part in row if part.size > 0]


def words(kind: str) -> str:
    return kind.replace("_", " ")


def luminance(color: str) -> float:
    """Relative luminance of "#RRGGBB", from 0 (black) to 1 (white). WCAG 2.2, "relative luminance"."""
    channels = (channel / 255 for channel in bytes.fromhex(color[1:]))
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    """The contrast ratio of two colors, 1 to 21. WCAG 2.2 asks 4.5 of text."""
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def ink_on(fill: str) -> str:
    """The color of text on `fill`: near-black or white, the one with more contrast."""
    return INK if contrast(INK, fill) > contrast("#FFFFFF", fill) else "#FFFFFF"


def axis_label(unit: str) -> str:
    """A unit of bytes with its meaning: "GB (1 GB = 10⁹ bytes)"."""
    return f"{unit} ({UNIT_NOTES[unit]})" if unit in UNIT_NOTES else "bytes"


def named_capacity(capacity: int | Gpu | None, label: str, unit: str) -> tuple[int | None, str]:
    """The bytes of a capacity, and its label or, without one, a name with the bytes."""
    if isinstance(capacity, Gpu):
        return capacity.memory, label or f"{capacity.name}: {format_bytes(capacity.memory, unit, 1)}"
    if capacity and not label:
        label = f"{number(round(capacity / UNITS[unit], 1))} {unit} GPU"
    return capacity, label


def told_name(card: Gpu) -> str:
    """A card with the memory that a program gets of it, and what the driver lists where that is more."""
    room = format_bytes(card.room, "GB", 1)
    if card.room == card.memory:
        return f"{card.name}: {room}"
    return f"{card.name}: a program gets {room} of {format_bytes(card.memory, 'GB', 1)} (dashed)"


def digits_for(largest: int, unit: str) -> int:
    """The decimals that amounts up to `largest` bytes need in `unit`."""
    amount = largest / UNITS[unit]
    if unit == "B" or amount >= 1000:
        return 0
    if amount >= 10:
        return 1
    return 2 if amount >= 1 else 3


def amount(size: int, unit: str, digits: int) -> str:
    return f"{size / UNITS[unit]:,.{digits}f}"


def amount_with_unit(size: int, unit: str, digits: int) -> str:
    """Format bytes as `format_bytes` does, but in a smaller unit where the size would round to zero."""
    vanishes = size != 0 and round(abs(size) / UNITS[unit], digits) == 0
    return format_bytes(size) if vanishes else format_bytes(size, unit, digits)


def verdict(total: int, limit: int, unit: str, digits: int) -> str:
    """The distance of `total` bytes from a limit: "3.3 GB too much", "6.9 GB free"."""
    gap = format_bytes(abs(limit - total), unit, digits)
    return f"{gap} too much" if total > limit else f"{gap} free"


def signed(size: int, unit: str, digits: int) -> str:
    """A difference in bytes with its sign: "+0.12 GB", "−3.00 GB", and "0" only when it is exactly that."""
    if size == 0:
        return "0"
    sign = "+" if size > 0 else "−"
    return sign + amount_with_unit(abs(size), unit, digits)


def signed_percent(difference: int, whole: int) -> str:
    """`difference` in percent of `whole`, with its sign and two significant digits: "−0.65 %"."""
    percent = abs(100 * difference / whole)
    if percent >= 10:
        shown = f"{percent:,.0f}"
    elif percent >= 0.01:
        shown = f"{percent:.2g}"
    else:
        shown = "<0.01"
    sign = "+" if difference > 0 else "−"
    return f"{sign}{shown} %"


SMALLEST_IN_DECIMALS = 1e-4
RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def number(value: float) -> str:
    """A number for an axis: thousands with commas, no needless decimals, 10⁻⁵ instead of many zeros."""
    if value == int(value):
        return f"{value:,.0f}".replace("-", "−")
    if abs(value) >= SMALLEST_IN_DECIMALS:
        return f"{value:,.10g}".replace("-", "−")
    digits, _, exponent = f"{value:.10e}".partition("e")
    power = f"10{str(int(exponent)).translate(RAISED)}"
    shown = f"{float(digits):.10g}".replace("-", "−")
    return power if shown == "1" else f"{shown}·{power}"


def sentence(parts: Iterable[str]) -> str:
    """Words joined as in a sentence: "a, b and c"."""
    *first, last = list(parts) or [""]
    if not first:
        return last
    return f"{', '.join(first)} and {last}"


def stop(title: str) -> str:
    """A title as a sentence, with a full stop unless it has its own."""
    return title if title.endswith((".", "!", "?")) else f"{title}."


def stack_alt(
    title: str,
    named: Mapping[str, Sequence[Segment]],
    totals: Mapping[str, int],
    limit: int | None,
    limit_name: str,
    unit: str,
    digits: int,
) -> str:
    """The description of a stack: each bar's total, its largest part, and whether it is within the limit."""
    told = []
    for label, parts in named.items():
        said = f"{label}: " if label else ""
        said += format_bytes(totals[label], unit, digits)
        if parts:
            most = max(parts, key=lambda part: part.size)
            said += f", most of it {most.name} ({amount(most.size, unit, digits)})"
        if limit:
            said += f", {verdict(totals[label], limit, unit, digits)}"
        told.append(said)
    marks = f" The line marks {limit_name}." if limit else ""
    return f"{stop(title)} Stacked bars. {'; '.join(told)}.{marks}"
