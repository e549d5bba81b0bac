"""The look of the course's figures, and how a page shows one: a picture with words that describe it."""

import logging
import re
import sys
from base64 import b64encode
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from html import escape
from io import BytesIO, StringIO
from math import ceil
from threading import RLock
from typing import Any, Literal
from urllib.parse import quote

from ..palette import GRID, INK, QUIET, RULE, number

# The first import of all says on stderr, and so in a lesson, that it looks for fonts.
_log = logging.getLogger("matplotlib.font_manager")
_level = _log.level
_log.setLevel(logging.ERROR)
from matplotlib import rc_context  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from matplotlib.font_manager import FontProperties  # noqa: E402
from matplotlib.textpath import text_to_path  # noqa: E402
from matplotlib.ticker import FuncFormatter, MaxNLocator  # noqa: E402

_log.setLevel(_level)

AS_SVG: dict[str, Any] = {"svg.fonttype": "none", "svg.hashsalt": "course"}
STYLE: dict[str, Any] = {
    "font.family": "DejaVu Sans",  # it comes with matplotlib, which so lays texts out alike everywhere
    "font.size": 11.5,
    "text.color": INK,
    "text.parse_math": False,
    "figure.facecolor": "white",
    "figure.dpi": 72,
    "savefig.facecolor": "white",
    "axes.facecolor": "white",
    "axes.edgecolor": RULE,
    "axes.labelcolor": QUIET,
    "axes.labelsize": 11.5,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 14,
    "axes.titleweight": "bold",
    "axes.titlecolor": INK,
    "axes.formatter.use_mathtext": False,
    "xtick.color": RULE,
    "ytick.color": RULE,
    "xtick.labelcolor": QUIET,
    "ytick.labelcolor": QUIET,
    "grid.color": GRID,
    "grid.linewidth": 1,
    "hatch.linewidth": 0.8,
    "legend.frameon": False,
    "legend.fontsize": 11.5,
    "legend.handlelength": 1.1,
    "legend.handletextpad": 0.5,
    "legend.columnspacing": 1.4,
    "legend.borderpad": 0,
    "legend.borderaxespad": 0,
    **AS_SVG,
}
"""matplotlib's settings for our figures; `plt.style.use(STYLE)` gives a figure of your own the same look."""

WIDTH = 560  # points, each a pixel of a picture at its own size: readable on a phone, where it is two thirds
SHOWN = 680  # pixels that a page shows it in at most
MARGIN = 16
LARGE = 120_000  # bytes of an SVG, which a figure of thousands of points exceeds: it is shown as a PNG
DOTS = 144  # of that PNG, per inch
TITLE, SMALL = 14.0, 10.0  # sizes of fonts

Drawn = Any
"""What a figure's function returns: a `CourseFigure`, or the `ax` that it was given to draw on."""

FONT = "Helvetica Neue, Helvetica, Arial, DejaVu Sans, sans-serif"
NO_METADATA = {"Creator": None, "Date": None, "Format": None, "Type": None}
NEEDLESS = re.compile(
    r' id="(text|line2d|[xy]tick|patch|axes|figure|legend|matplotlib|FillBetween|PathCollection)[^"]*"'
    r"|<metadata>.*?</metadata>|<!--.*?-->|<\?xml.*?<svg|<defs>\s*<style.*?</style>\s*</defs>"
    r'| transform="rotate\(-0 [^"]*\)"| ?font-family: \'DejaVu Sans\';?',
    re.DOTALL,
)
VIEW = re.compile(r'viewBox="0 0 ([\d.]+) ([\d.]+)"')
NUMBERS = re.compile(r' (?:d|x|y|width|height|transform)="[^"]*"')

PLAIN = " !$'()*+,-./:;=?@[]^_`{|}~"
"""What stays as it is in the address of an image."""

BREAK = re.compile(r"(?<!\d)\s+|\s+(?!%|[KMGT]?i?B\b|ms\b)")
"""Where a line may end."""

_turn = RLock()


@contextmanager
def look(settings: dict[str, Any] = STYLE) -> Iterator[None]:
    """Our look for what is made inside; one thread at a time, as matplotlib's settings are the process's."""
    with _turn, rc_context(settings):
        yield


class CourseFigure(Figure):
    """matplotlib's Figure with words for those who do not see it.

    `alt` is its description, which states the conclusion; `rows` are its numbers as a table, the first row
    its head. A notebook shows the picture as an HTML `<img>`, as JupyterLab shows no SVG in a notebook that
    is not trusted, such as one of a fresh clone; the table is folded below it.
    """

    alt: str = ""
    rows: Sequence[Sequence[str]] = ()
    body = 0.0  # points from the upper edge to what is below the title

    def __repr__(self) -> str:
        return self.alt

    @property
    def svg(self) -> str:
        return svg_of(self, self.alt)

    @property
    def html(self) -> str:
        return picture(self, self.alt) + table(self.rows)

    def _ipython_display_(self) -> None:
        show(self)

    def place(self, left: float, top: float, width: float, height: float) -> Axes:
        """New Axes, in points from the left edge and from below the title."""
        whole_width, whole_height = (72 * inches for inches in self.get_size_inches())
        bottom = 1 - (self.body + top + height) / whole_height
        box = (left / whole_width, bottom, width / whole_width, height / whole_height)
        return self.add_axes(box)


def sheet(title: str, height: float, provenance: str = "") -> CourseFigure:
    """A white sheet with a title, `height` points for what is drawn, and where that comes from."""
    heading = balanced(title, WIDTH - 2 * MARGIN)
    note = wrap(provenance, SMALL, WIDTH - 2 * MARGIN)
    body = 18 + 19 * len(heading)
    whole = body + height + MARGIN + 13 * len(note)
    figure = CourseFigure(figsize=(WIDTH / 72, whole / 72))
    figure.body = body
    for index, line in enumerate(heading):
        y = 1 - (28 + 19 * index) / whole
        figure.text(MARGIN / WIDTH, y, line, fontsize=TITLE, fontweight="bold")
    for index, line in enumerate(reversed(note)):
        place = {"ha": "right", "fontsize": SMALL, "color": QUIET}
        figure.text(1 - MARGIN / WIDTH, (MARGIN - 4 + 13 * index) / whole, line, **place)
    return figure


def finished(
    drawn: Axes,
    ax: Axes | None,
    title: str,
    alt: str,
    provenance: str = "",
    rows: Sequence[Sequence[str]] = (),
    above: float = 4,
) -> Drawn:
    """The figure with its words; or `ax`, titled, if the learner gave one to draw on.

    `above` are the points over the Axes that are taken already, such as by a legend.
    """
    if ax is None:
        figure: Any = drawn.figure
        figure.alt, figure.rows = alt, rows
        return figure
    ax.set_title("\n".join(balanced(title, room(ax))), pad=above + 4)
    if provenance:
        where = {"xycoords": "axes fraction", "textcoords": "offset points", "ha": "right", "va": "top"}
        ax.annotate(provenance, (1, 0), (0, -42), fontsize=SMALL, color=QUIET, **where)
    return ax


def show(figure: Figure, alt: str = "", rows: Sequence[Sequence[str]] = ()) -> None:
    """Show any matplotlib figure in a notebook once, with its alt text, which a screen reader reads out.

    Raises ValueError for a figure without one.
    """
    from IPython.display import display

    if isinstance(figure, CourseFigure):
        alt, rows = alt or figure.alt, rows or figure.rows
    if not alt.strip():
        raise ValueError("a figure needs an alt text: one sentence that says what it shows")
    shown = picture(figure, alt) + table(rows)
    if pyplot := sys.modules.get("matplotlib.pyplot"):
        pyplot.close(figure)  # or it would be shown a second time at the end of the cell
    display({"text/html": shown, "text/plain": alt}, raw=True)


def svg_of(figure: Figure, alt: str) -> str:
    """The figure as an SVG of text and rounded numbers, the same bytes each time, described by `alt`."""
    page = StringIO()
    # A learner's own figure keeps what it was drawn with, such as formulas on an axis.
    with look() if isinstance(figure, CourseFigure) else look(AS_SVG):
        figure.savefig(page, format="svg", dpi=72, metadata=NO_METADATA, bbox_inches=edges(figure))
    width, height = (f"{float(size):.0f}" for size in VIEW.findall(page.getvalue())[0])
    inside = NEEDLESS.sub("", page.getvalue())
    inside = inside[inside.index(">", inside.index("viewBox")) + 1 :]
    inside = re.sub(r"\s*\n\s*", " ", inside).replace("> <", "><").replace('style=" ', 'style="').strip()
    inside = NUMBERS.sub(_rounded, inside)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" width="{width}"'
        f' height="{height}" viewBox="0 0 {width} {height}" role="img" aria-label="{escape(alt)}"'
        f' font-family="{FONT}"><title>{escape(alt, quote=False)}</title>{inside}'
    )


def edges(figure: Figure) -> str | None:
    """The `bbox_inches` of `savefig`: ours stay as they are, a learner's own loses no label."""
    return None if isinstance(figure, CourseFigure) else "tight"


def _rounded(found: re.Match[str]) -> str:
    """An attribute with tenths of a point; in a path of straight lines, numbers alone."""
    text = re.sub(r"(\.\d)\d+", r"\1", found[0])
    return text if "C" in text or "Q" in text else text.replace(" L ", " ")


def picture(figure: Figure, alt: str) -> str:
    """HTML of an image that needs no other file and keeps its white sheet in a dark theme."""
    svg = re.sub(' aria-label="[^"]*"|<title>.*?</title>', "", svg_of(figure, alt))  # the image's alt says it
    if len(svg) > LARGE:
        page = BytesIO()
        figure.savefig(page, format="png", dpi=DOTS, bbox_inches=edges(figure))
        data = f"png;base64,{b64encode(page.getvalue()).decode()}"
    else:
        data = "svg+xml," + quote(svg.replace("'", "&#39;").replace('"', "'"), safe=PLAIN)
    look = f"width:100%;max-width:{SHOWN}px;background:#fff"
    return f'<img alt="{escape(alt)}" class="course-figure" style="{look}" src="data:image/{data}">'


def table(rows: Sequence[Sequence[str]]) -> str:
    """HTML of a figure's numbers, folded, for screen readers and for those who want to copy them."""
    if not rows:
        return ""
    lines = []
    for cell, row in zip(["th", *["td"] * (len(rows) - 1)], rows, strict=True):
        lines.append("".join(f"<{cell}>{escape(text)}</{cell}>" for text in row))
    inside = "".join(f"<tr>{line}</tr>" for line in lines)
    return f"<details class='course-data'><summary>The numbers</summary><table>{inside}</table></details>"


def room(ax: Axes) -> float:
    """The width of Axes in points."""
    figure: Any = ax.figure
    return 72 * figure.get_size_inches()[0] * ax.get_position().width


@lru_cache(maxsize=4096)
def text_width(text: str, size: float, bold: bool = False) -> float:
    """Points that `text` takes in matplotlib's own font, which is wider than those that browsers have."""
    font = FontProperties(family="DejaVu Sans", size=size, weight="bold" if bold else "normal")
    return float(text_to_path.get_text_width_height_descent(text, font, ismath=False)[0])


def wrap(text: str, size: float, width: float, bold: bool = False) -> list[str]:
    """`text` broken into lines of at most `width` points; a longer single word keeps a line of its own.

    A number stays with its unit.
    """
    lines: list[str] = []
    for word in filter(None, BREAK.split(text)):
        longer = f"{lines[-1]} {word}" if lines else word
        if lines and text_width(longer, size, bold) <= width:
            lines[-1] = longer
        else:
            lines.append(word)
    return lines


def balanced(title: str, width: float) -> list[str]:
    """A title's lines, about equally long, so that no single word is left for the last."""
    lines = wrap(title, TITLE, width, bold=True)
    even = 1.1 * text_width(title, TITLE, bold=True) / len(lines)
    closer = wrap(title, TITLE, min(width, even), bold=True)
    return closer if len(closer) == len(lines) else lines


def value_axis(ax: Axes, axis: Literal["x", "y"], label: str, nbins: int = 6) -> None:
    """Grid lines with round numbers as the course writes them, along an axis without ticks."""
    along = ax.xaxis if axis == "x" else ax.yaxis
    along.set_major_locator(MaxNLocator(nbins=nbins, steps=[1, 2, 5, 10]))
    along.set_major_formatter(NUMBERED)
    along.set_tick_params(length=0, pad=6)
    along.set_label_text(label)
    ax.grid(axis=axis)
    ax.set_axisbelow(True)


NUMBERED = FuncFormatter(lambda value, _: number(float(f"{value:.10g}")))


def legend_rows(names: Sequence[str], width: float) -> tuple[int, int]:
    """The columns and rows that a legend of `names`, read in rows, takes within a width in points."""
    for columns in range(len(names), 1, -1):
        widths = [max(text_width(name, 11.5) for name in names[at::columns]) + 36 for at in range(columns)]
        if sum(widths) <= width + 16:
            return columns, ceil(len(names) / columns)
    return 1, len(names)


def legend(ax: Axes, handles: Sequence[Any], names: Sequence[str], above: float = 6) -> None:
    """A legend in rows, `above` points over the Axes."""
    columns, _ = legend_rows(names, room(ax))
    # matplotlib fills columns from the top; ours are read in rows.
    pairs = list(zip(handles, names, strict=True))
    pairs = [pair for column in range(columns) for pair in pairs[column::columns]]
    handles, names = [handle for handle, _ in pairs], [name for _, name in pairs]
    figure: Any = ax.figure
    height = 72 * figure.get_size_inches()[1] * ax.get_position().height
    ax.legend(handles, names, ncols=columns, loc="lower left", bbox_to_anchor=(0, 1 + above / height))


def bare(ax: Axes, *sides: str) -> None:
    """Take ticks and spines away, but for those of the `sides` named."""
    for side, spine in ax.spines.items():
        spine.set_visible(side in sides)
    ax.tick_params(length=0)


def paper(pad: float = 1.5) -> dict[str, Any]:
    """A white ground for a text, so that lines pass behind it."""
    return {"facecolor": "white", "edgecolor": "none", "pad": pad}
