"""The course's figures: one color for each kind of memory, a title that states the conclusion, alt text.

Each function takes an optional `ax` to draw on and returns matplotlib's `Figure`, or that `ax`. Sizes are
bytes; `unit` says how to print them.
"""

from ..palette import COLOURS, Segment
from .curves import lines
from .rows import bars, compare_bars, stack
from .style import STYLE, CourseFigure, show
from .timelines import timeline

__all__ = [
    "COLOURS",
    "STYLE",
    "CourseFigure",
    "Segment",
    "bars",
    "compare_bars",
    "lines",
    "show",
    "stack",
    "timeline",
]
