"""The picture of lesson 17: a code's values under a histogram of weights."""

from collections.abc import Mapping, Sequence

from ...figures.style import MARGIN, NUMBERED, WIDTH, CourseFigure, bare, look, sheet, text_width
from ...palette import COLOURS, INK, stop


def code_picture(
    values: Sequence[float], codes: Mapping[str, Sequence[float]], title: str, provenance: str = ""
) -> CourseFigure:
    """A histogram of `values` between −1 and 1, and under it each code's values as strokes on its axis."""
    high = 40 * len(codes)
    left = MARGIN + 10 + max(text_width(name, 12.5) for name in codes)
    with look():
        figure = sheet(title, 136 + high + 42, provenance)
        weights = figure.place(left, 0, WIDTH - 24 - left, 132)
        weights.hist(values, bins=48, range=(-1, 1), rwidth=0.9, color=COLOURS["parameters"])
        weights.set(xlim=(-1, 1), xticks=[], yticks=[])
        bare(weights, "bottom")
        strokes = figure.place(left, 136, WIDTH - 24 - left, high)
        strokes.eventplot([*codes.values()], linelengths=0.64, linewidths=2.4, colors=INK, clip_on=False)
        strokes.set(xlim=(-1, 1), ylim=(len(codes) - 0.5, -0.5), xticks=(-1, -0.5, 0, 0.5, 1))
        strokes.set_yticks(range(len(codes)), [*codes], fontsize=12.5, color=INK)
        strokes.tick_params("y", pad=10)
        strokes.xaxis.set_major_formatter(NUMBERED)
        strokes.set_xlabel("weight / its block's largest magnitude")
        bare(strokes)
    told = "; ".join(f"{name}: {len(code)} values" for name, code in codes.items())
    figure.alt = f"{stop(title)} Strokes under a histogram of weights mark each code's values. {told}."
    return figure
