"""A picture with its description, and what draws most of the course's pictures: SVG written by hand.

A slider has 50 ms from key to picture, and a plotting library takes several times that. `lines` is left to
matplotlib.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field, replace
from functools import lru_cache, wraps
from html import escape
from math import ceil, floor, log10
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec

from .themes import DARK, ON_DARK, ON_DARKENED, ON_LIGHT, ON_LIGHTENED, as_image, in_page

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH = 880  # pixels: a figure with one layout is this wide, and scales down with its page
WIDE = 720  # of a figure that reflows: its layout for a page
NARROW = 400  # … and for a phone or a small window
MARGIN = 16
INK, QUIET, RULE, GRID = "#111111", "#555555", "#8A8A8A", "#E4E4E4"
SCALES_DOWN = "max-width:100%;height:auto"
FONT = "Helvetica Neue, Helvetica, Arial, DejaVu Sans, sans-serif"


@dataclass(frozen=True)
class Figure:
    """A picture (`svg`) and its description (`alt`) for those who do not see it.

    A notebook holds the SVG inside an HTML `<img>` whose `alt` is the description. JupyterLab shows that also
    where the notebook is not trusted, as in a fresh clone, and so does GitHub; both take `<svg>` out of HTML.
    `narrow` is the layout for a phone or a small window, where there is one, and `chart` the
    `plotting.Chart`, if it has one.
    """

    svg: str = field(repr=False)
    alt: str
    narrow: str = field(default="", repr=False)
    chart: Any = field(default=None, repr=False, compare=False)

    def __repr__(self) -> str:
        return self.alt

    @property
    def html(self) -> str:
        """The picture as an HTML `<img>` that needs no other file; where scripts run, it becomes `inline`."""
        return as_image(self.svg, self.narrow, self.alt)

    @property
    def inline(self) -> str:
        """The picture as HTML to set into a page or widget: it follows their theme and width."""
        return in_page(self.svg, self.narrow)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return {"text/html": self.html, "text/plain": self.alt}

    def plot(self, ax: "Axes | None" = None) -> "Axes":
        """The same data drawn by matplotlib on `ax`, or on the Axes of a new figure: to restyle as you like.

        Returns the Axes. Raises ValueError for a picture that only the course draws, ImportError without
        matplotlib.
        """
        return self._charted.plot(ax)

    def save(self, path: str | Path) -> Path:
        """Write the picture to `path` and return that path.

        .svg is as lessons show it, .png and .pdf are drawn by matplotlib. Raises ValueError for another
        ending, and for .png and .pdf where `plot` raises.
        """
        path = Path(path)
        if path.suffix == ".svg":
            path.write_text(self.svg, encoding="utf-8")
        elif path.suffix in (".png", ".pdf"):
            self._charted.save(path)
        else:
            raise ValueError(
                f"{path.name!r} must end in .svg, .png or .pdf: a figure is saved as one of these"
            )
        return path

    @property
    def _charted(self) -> Any:
        if self.chart is None:
            raise ValueError("this picture is drawn by the course alone, not by matplotlib: save it as .svg")
        return self.chart


Given = ParamSpec("Given")
asked_width: ContextVar[int] = ContextVar("asked_width", default=0)  # 0 outside of `reflowing` functions


def reflowing(draw: Callable[Given, Any]) -> Callable[Given, Any]:
    """A function that draws a `Figure` as wide as its `Canvas` says, made to draw it in both layouts."""

    @wraps(draw)
    def drawn(*given: Given.args, **named: Given.kwargs) -> Any:
        # Each layout has a context of its own, so a figure drawn inside another one finds its width.
        def at(width: int) -> Any:
            asked_width.set(width)
            return draw(*given, **named)

        if asked_width.get():  # part of another figure
            return draw(*given, **named)
        wide, narrow = (copy_context().run(at, width) for width in (WIDE, NARROW))
        return replace(wide, narrow=narrow.svg, chart=wide.chart or narrow.chart)

    return drawn


class Canvas:
    """Collects shapes, in pixels from the top left corner, and joins them into an SVG.

    Every look is an attribute of its own element: style sheets do not survive the sanitizers of notebook
    viewers.
    """

    def __init__(self) -> None:
        self.shapes: list[str] = []
        self.boxes: list[tuple[float, float, float, float]] = []  # left, top, right and bottom of each text
        self.width = asked_width.get() or WIDTH
        self.narrow = self.width == NARROW

    def rect(
        self, x: float, y: float, width: float, height: float, fill: str, tip: str = "", **more: Any
    ) -> None:
        """A rectangle; `tip` shows when the pointer rests on it."""
        attributes = attribute_text({"x": x, "y": y, "width": width, "height": height, "fill": fill, **more})
        if tip:
            self.shapes.append(f"<rect {attributes}><title>{escape(tip)}</title></rect>")
        else:
            self.shapes.append(f"<rect {attributes}/>")

    def line(self, x1: float, y1: float, x2: float, y2: float, stroke: str = GRID, **more: Any) -> None:
        attributes = attribute_text({"x1": x1, "y1": y1, "x2": x2, "y2": y2, "stroke": stroke, **more})
        self.shapes.append(f"<line {attributes}/>")

    def line_around_texts(
        self, x1: float, y1: float, x2: float, y2: float, *looks: Mapping[str, Any]
    ) -> None:
        """A level or upright line in each of `looks`, with a gap at each text that it would cross."""
        upright = x1 == x2
        if upright:
            at, start, end = x1, y1, y2
            extents = [((left, right), (top, bottom)) for left, top, right, bottom in self.boxes]
        else:
            at, start, end = y1, x1, x2
            extents = [((top, bottom), (left, right)) for left, top, right, bottom in self.boxes]
        # Each text has an extent across the line, which decides if they meet, and along it, which is the gap.
        gaps = sorted(
            (along[0] - 2, along[1] + 2)
            for across, along in extents
            if across[0] - 1.5 < at < across[1] + 1.5
        )
        for low, high in [*gaps, (end, end)]:
            stop = min(low, end)
            if stop - start >= 3:
                for look in looks:
                    if upright:
                        self.line(at, start, at, stop, **look)
                    else:
                        self.line(start, at, stop, at, **look)
            start = max(start, high)

    def path(self, data: str, **more: Any) -> None:
        self.shapes.append(f'<path d="{data}" {attribute_text(more)}/>')

    def text(self, x: float, y: float, words: str, size: float = 12, fill: str = INK, **more: Any) -> None:
        """One line of text whose baseline starts, or with `text_anchor` ends or centers, at (x, y)."""
        attributes = attribute_text({"x": x, "y": y, "font_size": size, "fill": fill, **more})
        width = text_width(words, size, more.get("font_weight") == "bold")
        before = {"middle": 0.5, "end": 1.0}.get(more.get("text_anchor") or "", 0.0)
        left = x - width * before
        self.boxes.append((left, y - 0.77 * size, left + width, y + 0.23 * size))
        self.shapes.append(f"<text {attributes}>{escape(words, quote=False)}</text>")

    def halo_text(
        self, x: float, y: float, words: str, size: float = 12, halo: str = "#FFFFFF", **more: Any
    ) -> None:
        """Text with an outline in the color of its background, readable over anything."""
        look = {"stroke": halo, "stroke_width": 4, "stroke_linejoin": "round", "paint_order": "stroke"}
        self.text(x, y, words, size, **look, **more)

    def upright(self, x: float, y: float, words: str) -> None:
        """Words that read from bottom to top, their middle at (x, y): what a vertical axis shows."""
        turn = f"rotate(-90 {short(x)} {short(y)})"
        self.text(x, y, words, 12, QUIET, text_anchor="middle", transform=turn)

    def hatch(self, x: float, y: float, width: float, height: float, stroke: str, gap: float = 6) -> None:
        """Diagonal strokes inside a rectangle (drawn, as sanitizers drop patterns)."""
        strokes = ""
        for k in range(1, ceil((width + height) / gap)):
            # The stroke joins the points whose distances from the top left corner add up to `reach`.
            reach = k * gap
            start = min(reach, width)
            end = max(0.0, reach - height)
            strokes += f"M{short(x + start)} {short(y + reach - start)}"
            strokes += f"l{short(end - start)} {short(start - end)}"
        if strokes:
            self.path(strokes, stroke=stroke, stroke_width=1, fill="none")

    def title(self, words: str) -> float:
        """The conclusion, in bold, on as many lines as it needs; returns the y below it."""
        lines = wrap(words, 16.5, self.width - 2 * MARGIN, bold=True)
        for index, line in enumerate(lines):
            self.text(MARGIN, 28 + 21 * index, line, 16.5, font_weight="bold")
        return 28.0 + 21 * (len(lines) - 1) + 8

    def note(self, words: str, y: float) -> float:
        """Small print at the right, `y` being the baseline of its first line; returns the y below it."""
        lines = wrap(words, 11, self.width - 2 * MARGIN)
        for index, line in enumerate(lines):
            self.text(self.width - MARGIN, y + 14 * index, line, 11, QUIET, text_anchor="end")
        return y + 14 * len(lines)

    def figure(self, bottom: float, title: str, alt: str, provenance: str, chart: Any = None) -> Figure:
        """The whole as a figure with an axis at `bottom`, room for its numbers and label, and small print."""
        end = self.note(provenance, bottom + 62)
        height = end - (2 if provenance else 10)
        return Figure(self.svg(height, title, alt), alt, chart=chart)

    def svg(self, height: float, title: str, alt: str) -> str:
        return framed("\n".join(self.shapes), self.width, height, title, alt)


def framed(shapes: str, width: float, height: float, title: str, alt: str, **more: Any) -> str:
    """An SVG of `shapes` on white, with its name and description inside."""
    frame = {"width": width, "height": height, "viewBox": f"0 0 {width} {short(height)}"}
    look = {"font_family": FONT, "style": SCALES_DOWN, **more}
    head = attribute_text(
        {"xmlns": "http://www.w3.org/2000/svg", **frame, "role": "img", "aria-label": alt, **look}
    )
    names = f"<title>{escape(title, quote=False)}</title><desc>{escape(alt, quote=False)}</desc>"
    paper = f'<rect width="{width}" height="{short(height)}" fill="#FFFFFF"/>'
    return "\n".join([f"<svg {head}>", names, paper, shapes, "</svg>"])


def below_one_another(figures: Sequence[Figure], title: str) -> Figure:
    """Several figures as one, from top to bottom; its description is theirs, one after another.

    It has a narrow layout if all of them have one.
    """
    alt = " ".join(figure.alt for figure in figures)
    wide = _joined([figure.svg for figure in figures], title, alt)
    narrow = ""
    if all(figure.narrow for figure in figures):
        narrow = _joined([figure.narrow for figure in figures], title, alt)
    return Figure(wide, alt, narrow)


def _joined(pictures: Iterable[str], title: str, alt: str) -> str:
    placed = []
    widest = 0
    y = 0.0
    for picture in pictures:
        inner = re.sub(r' role="img" aria-label="[^"]*"', "", picture, count=1)  # the whole has both
        placed.append(inner.replace(f'style="{SCALES_DOWN}"', f'y="{short(y)}"', 1))
        width, height = re.findall(r'viewBox="0 0 (\d+) ([\d.]+)"', picture)[0]
        widest = max(widest, int(width))
        y += float(height)
    return framed("\n".join(placed), widest, y, title, alt)


def attribute_text(attributes: Mapping[str, Any]) -> str:
    """`{"stroke_width": 2}` as `stroke-width="2"`; numbers are rounded to a tenth of a pixel."""
    return " ".join(
        f'{name.replace("_", "-")}="{escape(value) if isinstance(value, str) else short(value)}"'
        for name, value in attributes.items()
        if value is not None
    )


def short(value: Any) -> str:
    """A number as a float of one decimal without trailing zeros, whole numbers and text as they are."""
    if not isinstance(value, float):
        return str(value)
    text = f"{value:.1f}".removesuffix(".0")
    return "0" if text == "-0" else text


SLIM = set("ijl.,:;'|!I")
THIN = set('ft()[]{}/\\- r"')
BROAD = set("mwMW%@—")


@lru_cache(maxsize=4096)
def text_width(words: str, size: float, bold: bool = False) -> float:
    """Pixels that `words` take, from above: measured on the widest of the fonts that a figure may get."""
    share = sum(map(_letter_width, words))
    return share * size * (1.08 if bold else 1.0)


def _letter_width(letter: str) -> float:
    """The width of a letter as a share of the font's size."""
    if letter in SLIM:
        return 0.34
    if letter in THIN:
        return 0.41
    if letter in BROAD:
        return 0.96
    return 0.70 if letter.isupper() else 0.62


def wrap(words: str, size: float, width: float, bold: bool = False) -> list[str]:
    """`words` broken into lines of at most `width` pixels; a longer single word keeps a line of its own."""
    lines: list[str] = []
    for word in words.split():
        longer = f"{lines[-1]} {word}" if lines else word
        if lines and text_width(longer, size, bold) <= width:
            lines[-1] = longer
        else:
            lines.append(word)
    return lines


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
    """The color of text on `fill`: near-black or white, the one with more contrast, in either theme."""

    def is_light(color: str) -> bool:
        return contrast(INK, color) > contrast("#FFFFFF", color)

    light_in_dark = is_light(DARK.get(fill, fill))
    if is_light(fill):
        return ON_LIGHT if light_in_dark else ON_DARKENED
    return ON_LIGHTENED if light_in_dark else ON_DARK


def ticks(low: float, high: float, count: int = 7) -> list[float]:
    """About `count` round numbers from `low` to `high`: steps of 1, 2 or 5 times a power of ten."""
    if high <= low:
        return [low]
    rough = (high - low) / count
    power = 10.0 ** floor(log10(rough))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= rough * 0.999)
    return [round(k * step, 12) for k in range(ceil(low / step - 1e-9), floor(high / step + 1e-9) + 1)]


def spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Positions near the `wanted` ones in their order, at least `gap` apart.

    They lie within `low` to `high` if they fit.
    """
    order = sorted(range(len(wanted)), key=wanted.__getitem__)
    placed = [*wanted]
    # First push each one up to keep its distance from the one below, then back from the upper end.
    for index in order:
        placed[index] = max(placed[index], low)
        low = placed[index] + gap
    for index in reversed(order):
        placed[index] = min(placed[index], high)
        high = placed[index] - gap
    return placed


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
