"""Bars as plain HTML: they answer a slider in milliseconds, in a browser without matplotlib too."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Protocol

from ..palette import (
    COLOURS,
    INK,
    OVER,
    QUIET,
    UNDER,
    Row,
    Segment,
    amount,
    amount_with_unit,
    digits_for,
    ink_on,
    segments_of,
    stack_alt,
    verdict,
)
from ..units import format_bytes


class Picture(Protocol):
    """The picture that a slider shows: HTML, and words for those who do not see it."""

    @property
    def html(self) -> str: ...

    @property
    def alt(self) -> str: ...


@dataclass(frozen=True)
class HtmlPicture:
    """A picture made of HTML alone."""

    html: str
    alt: str


SHEET = f"background:#fff;color:{INK};max-width:680px;padding:12px 16px;font:14px/1.4 sans-serif"
LINE = "position:absolute;top:-3px;bottom:-3px;"
DASHED = f"{LINE}border-left:1px dashed {OVER}"
SOLID = f"{LINE}border-left:2px solid {OVER}"


def stacked_bars(
    rows: Mapping[str, Row],
    title: str,
    *,
    limit: int | None = None,
    limit_name: str = "",
    nominal: int | None = None,
    note: str = "",
    unit: str = "GB",
    slim: bool = False,
    alt: str = "",
    scale: int = 0,
) -> HtmlPicture:
    """A bar of memory by kind for each row, its total at the right, and the line of a limit in bytes.

    `slim` bars have their names at the left and no numbers inside: for many of them. The width is the largest
    of what is shown, or `scale` bytes if that is more. ValueError without rows.
    """
    if not rows:
        raise ValueError("a stack needs at least one row")
    named = {label: segments_of(row) for label, row in rows.items()}
    totals = {label: sum(part.size for part in parts) for label, parts in named.items()}
    largest = max([*totals.values(), limit or 0, nominal or 0, scale, 1])
    digits = digits_for(max(totals.values()), unit)
    lines = ""
    if limit:
        lines += f"<i style='{SOLID};left:{100 * limit / largest:.2f}%'></i>"
    if nominal and nominal != limit:
        lines += f"<i style='{DASHED};left:{100 * nominal / largest:.2f}%'></i>"
    drawn = []
    for label, parts in named.items():
        bar = "".join(_segment(part, largest, unit, digits, slim) for part in parts)
        high = 18 if slim else 36
        bar = f"<div style='position:relative;display:flex;height:{high}px;flex:1'>{bar}{lines}</div>"
        total = format_bytes(totals[label], unit, digits)
        judged = verdict(totals[label], limit, unit, digits) if limit else ""
        if slim and totals[label] == max(totals.values()):
            total = f"<b>{total}</b>"
        drawn.append(_slim(label, bar, total, judged) if slim else _wide(label, bar, total, judged))
    alt = alt or stack_alt(title, named, totals, limit, limit_name, unit, digits)
    head = f"<div style='font-weight:bold;font-size:16px'>{escape(title)}</div>"
    values = unit if len(named) == 1 else ""
    key = _key([part for parts in named.values() for part in parts], values, digits)
    if limit:
        key += f"<span style='color:{OVER};font-weight:bold'>│ {escape(limit_name)}</span>"
    foot = f"<div style='color:{QUIET};font-size:12px;text-align:right'>{escape(note)}</div>"
    inside = f"{head}<div style='margin:4px 0'>{key}</div>{''.join(drawn)}{foot}"
    return HtmlPicture(f"<div role='img' aria-label='{escape(alt)}' style='{SHEET}'>{inside}</div>", alt)


def _segment(part: Segment, largest: int, unit: str, digits: int, slim: bool) -> str:
    """A part of a bar, with its size inside if there is room, and its name for a pointer."""
    share = 100 * part.size / largest
    shown = "" if slim or share < 6 else amount(part.size, unit, digits)
    look = f"width:{share:.3f}%;background:{COLOURS[part.kind]};color:{ink_on(COLOURS[part.kind])}"
    look += ";box-shadow:inset -1px 0 #fff;overflow:hidden;text-align:center;font-size:12px;line-height:36px"
    tip = f"{part.name}: {amount_with_unit(part.size, unit, max(2, digits))}"
    return f"<div title='{escape(tip)}' data-bytes='{part.size}' style='{look}'>{shown}</div>"


def _wide(label: str, bar: str, total: str, judged: str) -> str:
    ink = OVER if judged.endswith("too much") else UNDER
    ends = f"<b>{total}</b> <span style='color:{ink}'>{judged}</span>"
    head = f"<div style='display:flex;justify-content:space-between;gap:12px'><span>{escape(label)}</span>"
    return f"<div style='margin-top:6px'>{head}<span>{ends}</span></div>{bar}</div>"


def _slim(label: str, bar: str, total: str, judged: str) -> str:
    ink = OVER if judged.endswith("too much") else INK
    name = f"<span style='flex:0 0 32%'>{escape(label)}</span>"
    end = f"<span style='flex:0 0 5.5em;white-space:nowrap;text-align:right;color:{ink}'>{total}</span>"
    return f"<div style='display:flex;gap:8px;margin-top:3px'>{name}{bar}{end}</div>"


def _key(parts: Sequence[Segment], unit: str, digits: int) -> str:
    """A swatch for each name, with its bytes if `unit` says in what."""
    shown = {}
    for part in sorted(parts, key=lambda part: list(COLOURS).index(part.kind)):
        size = f" {amount_with_unit(part.size, unit, digits)}" if unit else ""
        shown.setdefault(part.name, (part.kind, size))
    swatch = "display:inline-block;width:12px;height:12px;margin-right:6px;background:"
    return "".join(
        f"<span style='display:inline-block;margin-right:14px'><i style='{swatch}{COLOURS[kind]}'></i>"
        f"{escape(name)}{size}</span>"
        for name, (kind, size) in shown.items()
    )
