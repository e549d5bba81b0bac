"""Horizontal bars: memory stacked by kind, single values, an estimate next to its measurement."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from .. import palette
from ..breakdown import KINDS
from ..gpus import Gpu
from ..measurement import Measurement
from ..palette import COLOURS, INK, OVER, RULE, UNDER, Row, Segment, words
from ..units import UNITS, format_bytes
from . import style
from .style import MARGIN, WIDTH, Drawn

BAR = 34  # points of a bar
LINE = 17  # of each line of words above it
GAP = 8  # between a bar and the next one's words
BELOW = 40  # of an axis with its numbers and label


def stack(
    rows: Mapping[str, Row] | Row,
    title: str,
    *,
    capacity: int | Gpu | None = None,
    capacity_label: str = "",
    nominal: int | None = None,
    provenance: str = "",
    unit: str = "GB",
    alt: str | None = None,
    ax: Axes | None = None,
) -> Drawn:
    """Horizontal bars stacked by kind, one for each labeled row, with totals and a GPU's capacity.

    A row is a breakdown (any mapping from kinds to bytes), a measurement, or a list of `Segment`s; a single
    one needs no label. `capacity` is bytes or a `Gpu`; `nominal` bytes, where they are not the capacity, get
    a dashed line of their own.
    Returns the figure, or `ax` if it is given. Raises ValueError without any row.
    """
    if not rows:
        raise ValueError("a stack needs at least one row")
    named = {label: palette.segments_of(row) for label, row in _labeled(rows).items()}
    totals = {label: sum(part.size for part in parts) for label, parts in named.items()}
    limit, limit_name = palette.named_capacity(capacity, capacity_label, unit)
    largest = max([*totals.values(), limit or 0, nominal or 0, 1])
    digits = palette.digits_for(max(totals.values()), unit)
    width = style.room(ax) if ax else WIDTH - 2 * MARGIN
    one = width / largest  # points of a byte
    heads = [style.wrap(label, 12.5, width - (200 if limit else 100)) or [""] for label in named]
    words_high = LINE * max(map(len, heads))
    pitch = words_high + BAR + GAP
    names = _names_for_legend([part for parts in named.values() for part in parts], one)
    above = (22 if limit else 4) + (18 * style.legend_rows([*names], width)[1] + 6 if names else 0)
    high = pitch * len(named)
    with style.look():
        drawn = ax or style.sheet(title, above + high + BELOW, provenance).place(MARGIN, above, width, high)
        style.value_axis(drawn, "x", palette.axis_label(unit), nbins=9)
        style.bare(drawn, "left", "bottom")
        drawn.set(xlim=(0, largest / UNITS[unit]), ylim=(high, 0), yticks=[])
        for index, parts in enumerate(named.values()):
            top = pitch * index + words_high
            labels = [_inside(part, one, unit, digits) for part in parts]
            _bar(drawn, parts, top + BAR / 2, UNITS[unit], labels)
            total = sum(part.size for part in parts)
            judged = palette.verdict(total, limit, unit, digits) if limit else ""
            _words_above(drawn, heads[index], format_bytes(total, unit, digits), judged, top)
        if nominal and nominal != limit:
            drawn.axvline(nominal / UNITS[unit], color=OVER, linewidth=1, linestyle="--")
        if limit:
            drawn.axvline(limit / UNITS[unit], color=OVER, linewidth=2)
            _name_line(drawn, limit * one, limit_name, width)
        if names:
            style.legend(drawn, [*names.values()], [*names], above=26 if limit else 8)
        alt = alt or palette.stack_alt(title, named, totals, limit, limit_name, unit, digits)
        table = _stack_table(named, totals, unit, digits)
        return style.finished(drawn, ax, title, alt, provenance, table, above)


def _labeled(rows: Any) -> dict[str, Row]:
    """Rows by label; a single breakdown, measurement or list of segments has none."""
    if isinstance(rows, Mapping) and not any(isinstance(row, int) for row in rows.values()):
        return dict(rows)
    return {"": rows}


def _inside(part: Segment, one: float, unit: str, digits: int) -> str:
    """The words inside a part: its name and its size, its size alone, or nothing, as there is room."""
    wide = part.size * one - 4
    size = palette.amount(part.size, unit, digits)
    if style.text_width(part.name, 10.5) <= wide:
        return f"{part.name}\n{size}"
    return size if style.text_width(size, 10.5) <= wide else ""


def _names_for_legend(parts: Sequence[Segment], one: float) -> dict[str, Patch]:
    """A patch for each name that can be seen, by kind; none if every name has room in its own part."""
    if all(style.text_width(part.name, 10.5) <= part.size * one - 4 for part in parts):
        return {}
    seen = [part for part in parts if part.size * one >= 0.5]
    seen.sort(key=lambda part: list(COLOURS).index(part.kind))
    return {part.name: swatch(part.kind) for part in seen}


LIGHT: dict[str, dict[str, Any]] = {
    "cached": {"edgecolor": RULE, "hatch": "////"},
    "free": {"edgecolor": RULE},
}
"""The looks of what is too light for a white edge."""


def swatch(kind: str) -> Patch:
    """A patch in a kind's color, as a legend shows it."""
    return Patch(facecolor=COLOURS[kind], **LIGHT.get(kind, {}))


def _bar(drawn: Axes, parts: Sequence[Segment], y: float, one: int, labels: Sequence[str]) -> None:
    """A bar of parts with labels, in whose color the limit's line is interrupted."""
    left = 0.0
    for part, label in zip(parts, labels, strict=True):
        fill = COLOURS[part.kind]
        look: dict[str, Any] = {"edgecolor": "white", **LIGHT.get(part.kind, {})}
        made = drawn.barh(y, part.size / one, BAR, left, color=fill, label=part.name, **look)
        text = {"color": palette.ink_on(fill), "bbox": {"facecolor": fill, "edgecolor": "none", "pad": 1}}
        drawn.bar_label(made, [label], label_type="center", fontsize=10.5, **text)
        left += part.size / one


def _words_above(drawn: Axes, lines: Sequence[str], total: str, judged: str, top: float) -> None:
    """A bar's label at the left above it, its total and its verdict at the right."""
    look: dict[str, Any] = {"textcoords": "offset points", "va": "baseline", "bbox": style.paper()}
    look["xycoords"] = ("axes fraction", "data")
    for index, line in enumerate(reversed(lines)):
        drawn.annotate(line, (0, top - 5), (0, LINE * index), fontsize=12.5, **look)
    ink = OVER if judged.endswith("too much") else UNDER
    drawn.annotate(judged, (1, top - 5), (0, 0), fontsize=11, color=ink, ha="right", **look)
    before = style.text_width(judged, 11) + 8 if judged else 0
    drawn.annotate(total, (1, top - 5), (-before, 0), fontsize=12.5, fontweight="bold", ha="right", **look)


def _name_line(drawn: Axes, x: float, name: str, width: float) -> None:
    """The name of the limit's line above it, kept on the sheet."""
    half = style.text_width(name, 11.5, bold=True) / 2
    x = min(max(x, half), width - half) / width
    place = {"xycoords": "axes fraction", "textcoords": "offset points", "ha": "center"}
    drawn.annotate(name, (x, 1), (0, 6), color=OVER, fontweight="bold", **place)


def _stack_table(
    named: Mapping[str, Sequence[Segment]], totals: Mapping[str, int], unit: str, digits: int
) -> list[list[str]]:
    """A row for each bar, a column for each name of a part, and the total."""
    names = [*dict.fromkeys(part.name for parts in named.values() for part in parts)]
    table = [["", *names, f"total ({unit})"]]
    for label, parts in named.items():
        sizes = {part.name: palette.amount_with_unit(part.size, unit, digits) for part in parts}
        table.append(
            [label, *(sizes.get(name, "0") for name in names), palette.amount(totals[label], unit, digits)]
        )
    return table


def bars(
    values: Mapping[str, float] | Measurement,
    title: str,
    *,
    unit: str = "GB",
    digits: int | None = None,
    kind: str = "parameters",
    highlight: str = "",
    provenance: str = "",
    ax: Axes | None = None,
) -> Drawn:
    """One horizontal bar for each value, its value at its end.

    Values are bytes where `unit` is one of bytes ("GB", "MiB"); otherwise plain numbers in that unit ("ms",
    "%"). A bar named after a kind of memory gets that kind's color, all others that of `kind`; `highlight`
    names a bar to set off. A measurement gives its peak by kind. Returns the figure, or `ax` if it is given.
    Raises ValueError for negative values.
    """
    if isinstance(values, Measurement):
        values = {kind: size for kind, size in values.breakdown.items() if size}
    if not values or any(value < 0 for value in values.values()):
        raise ValueError("bars need at least one value, and none below zero")
    one = UNITS.get(unit, 1)
    largest = max(values.values()) / one
    if digits is None:
        digits = 0 if largest >= 1000 else 1 if largest >= 10 else 2
    shown = {name: f"{value / one:,.{digits}f} {unit}".strip() for name, value in values.items()}
    names = ["\n".join(style.wrap(words(name) if name in COLOURS else name, 12, 190)) for name in values]
    other = COLOURS["temporaries"] if highlight else COLOURS[kind]
    colors = [COLOURS.get(name, COLOURS[kind] if name == highlight else other) for name in values]
    left = MARGIN + 10 + max(style.text_width(line, 12) for name in names for line in name.split("\n"))
    right = MARGIN + 8 + max(style.text_width(text, 12, bold=True) for text in shown.values())
    high = 34 * len(values)
    with style.look():
        drawn = ax or style.sheet(title, high + 8, provenance).place(left, 2, WIDTH - left - right, high)
        made = drawn.barh(range(len(values)), [value / one for value in values.values()], 0.74, color=colors)
        drawn.bar_label(made, [*shown.values()], padding=7, fontsize=12, fontweight="bold")
        drawn.set(xlim=(0, largest or 1), ylim=(len(values) - 0.5, -0.5), xticks=[])
        drawn.set_yticks(range(len(values)), names, fontsize=12, color=INK)
        style.bare(drawn, "left")
        alt = f"{palette.stop(title)} Bars: {'; '.join(f'{name} {text}' for name, text in shown.items())}."
        return style.finished(drawn, ax, title, alt, provenance)


def compare_bars(
    estimated: Mapping[str, int],
    measured: Measurement,
    title: str,
    *,
    unit: str = "GB",
    ax: Axes | None = None,
) -> Drawn:
    """Estimate and measurement one above the other, a pair of bars for each kind, and the gap of each.

    Differences are estimate minus measurement. The measurement is called what it was: measured, simulated or
    recorded. Kinds that are zero in both are left out. Returns the figure, or `ax` if it is given.
    """
    word = measured.word
    both = {kind: (estimated.get(kind, 0), measured.breakdown[kind]) for kind in KINDS}
    pairs = {kind: pair for kind, pair in both.items() if any(pair)}
    totals = (sum(pair[0] for pair in pairs.values()), sum(pair[1] for pair in pairs.values()))
    digits = palette.digits_for(max(totals), unit) + 1
    numbers = {words(kind): _numbers(pair, unit, digits) for kind, pair in pairs.items()}
    gaps = [", ".join(filter(None, row[2:])) for row in numbers.values()]
    numbers["total"] = _numbers(totals, unit, digits)
    left = MARGIN + 10 + max(style.text_width(name, 12) for name in numbers)
    right = MARGIN + 8 + max(style.text_width(gap, 12) for gap in gaps)
    high = 42 * len(pairs)
    told = [f"estimated {numbers['total'][0]}", f"{word} {numbers['total'][1]}"]
    above = 14 + 18 * style.legend_rows(told, WIDTH - left - right)[1]
    with style.look():
        page = style.sheet(title, above + high + BELOW, str(measured.provenance))
        drawn = ax or page.place(left, above, WIDTH - left - right, high)
        ends = zip(*pairs.values(), strict=True)
        first, second = ([size / UNITS[unit] for size in sizes] for sizes in ends)
        hatched = {"edgecolor": INK, "hatch": "////", "linewidth": 0.7}
        shades = [f"{COLOURS[kind]}40" for kind in pairs]
        drawn.barh([row - 0.19 for row in range(len(pairs))], first, 0.34, color=shades, **hatched)
        colors = [COLOURS[kind] for kind in pairs]
        drawn.barh([row + 0.19 for row in range(len(pairs))], second, 0.34, color=colors)
        for row, gap in enumerate(gaps):
            end = max(first[row], second[row])
            drawn.annotate(gap, (end, row), (7, 0), textcoords="offset points", va="center", fontsize=12)
        style.value_axis(drawn, "x", palette.axis_label(unit))
        drawn.set(xlim=(0, max(*first, *second) or 1), ylim=(len(pairs) - 0.5, -0.5))
        drawn.set_yticks(range(len(pairs)), [*map(words, pairs)], fontsize=12, color=INK)
        style.bare(drawn, "left", "bottom")
        swatches = [Patch(facecolor="white", **hatched), Patch(facecolor="#6B6B6B")]
        style.legend(drawn, swatches, told, above=10)
        ours, theirs, gap, _ = numbers["total"]
        alt = f"{palette.stop(title)} A pair of bars for each kind."
        alt += f" In total {ours} estimated and {theirs} {word}: {gap}."
        table = [["", "estimated", word, "difference", "relative"]]
        table += [[name, *row] for name, row in numbers.items()]
        return style.finished(drawn, ax, title, alt, str(measured.provenance), table, above)


def _numbers(pair: tuple[int, int], unit: str, digits: int) -> list[str]:
    """Both of a pair, estimate minus measurement in bytes, and that in percent where it can be told."""
    gap = pair[0] - pair[1]
    relative = palette.signed_percent(gap, pair[1]) if pair[1] and gap else ""
    both = [palette.amount_with_unit(size, unit, digits) for size in pair]
    return [*both, palette.signed(gap, unit, digits), relative]
