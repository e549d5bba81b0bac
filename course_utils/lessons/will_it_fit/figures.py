"""Lesson 19: results of `fit` as a figure, and the decisions of the lesson as a tree."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch
from matplotlib.ticker import LogLocator

from ...figures.style import MARGIN, NUMBERED, SMALL, WIDTH, CourseFigure, bare, look, sheet
from ...palette import COLOURS, OVER, QUIET, stop
from ...planning.fit import Candidate, Plan
from ...planning.twin import SAFETY
from ...units import GB, format_bytes, percent

PATH = COLOURS["parameters"]

STEPS = (
    (
        "Do the states fit? 16 bytes per parameter,\nor 16/D on D cards",
        "shard (ZeRO-3), or change the training:\nLoRA, QLoRA, Adafactor, pure bf16",
    ),
    (
        "Does one sequence fit?\n1.05 · estimate ≤ what a program gets",
        "flash, the loss in chunks, then recompute:\nselective, every k blocks, full",
    ),
    ("Do all sequences fit at once?", "accumulate: the largest micro-batch\nthat fits"),
    (
        "Does the allocator find room?\nreplay ≤ room without CUDA's context",
        "expandable segments,\nor a smaller micro-batch",
    ),
    ("Do three steps work on the card?", "read the message: divide the request\nby s·b·V and by b·a·s²"),
)
"""Each step of the decision: what to ask, and what to do if the answer is no."""


def plan_figure(plan: Plan, title: str) -> CourseFigure:
    """All configurations that `fit` estimated: seconds lost against peak bytes, the card's line, the path."""
    limit = plan.card.room / SAFETY
    fitting = [one for one in plan.tried if one.fits(plan.card)]
    others = [one for one in plan.tried if not one.fits(plan.card)]
    name = f"{plan.card.name}\nless {percent(SAFETY - 1)}\nin reserve:\n{format_bytes(round(limit), 'GB', 1)}"
    note = (
        f"{len(plan.tried)} estimated, {plan.covered:,} decided; times at data-sheet rates, without overlap"
    )
    with look():
        figure = sheet(title, 344, note)
        ax = figure.place(64, 28, WIDTH - 64 - 118, 270)
        # Those that fit come after those that do not, and so on top of them.
        for label, candidates, style, color in (
            ("too large", others, "o", "#BDBDBD"),
            ("fits", fitting, "o", COLOURS["activations"]),
            ("the path, in the order of the table", plan.path, "-", PATH),
        ):
            places = [one.lost for one in candidates], [one.peak / GB for one in candidates]
            ax.plot(*places, style, color=color, markersize=6, linewidth=2, label=label)
        ax.axhline(limit / GB, color=OVER, linewidth=1.8)
        place = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points", "va": "center"}
        ax.annotate(name, (1, limit / GB), (6, 0), color=OVER, fontweight="bold", **place)
        ax.set(xscale="log", yscale="log", xlabel="seconds lost per step", ylabel="estimated peak in GB")
        ax.margins(0.06, 0.08)
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.set_major_formatter(NUMBERED)
        ax.minorticks_off()
        ax.grid(axis="y")
        bare(ax, "bottom")
        _number(ax, plan.path)
        ax.legend(ncols=3, loc="lower left", bbox_to_anchor=(0, 1.03))
    first, last = (format_bytes(plan.path[at].peak, "GB", 1) for at in (0, -1))
    told = f"{len(fitting)} of {len(plan.tried)} configurations fit; the path goes from {first} to {last}"
    figure.alt = f"{stop(title)} Peak against seconds lost: {told}."
    return figure


def _number(ax: Axes, path: Sequence[Candidate]) -> None:
    """The numbers of the path's steps; those at places that are close share a mark."""
    ax.autoscale_view()
    points = ax.transData.transform([(step.lost, step.peak / GB) for step in path])
    marks: dict[int, list[str]] = {}  # by the first step of each
    for index, point in enumerate(points):
        near = (first for first in marks if abs(points[first] - point).max() < 15)
        marks.setdefault(next(near, index), []).append(str(index))
    style = {"color": "white", "fontweight": "bold", "fontsize": SMALL, "ha": "center", "va": "center"}
    for first, numbers in marks.items():
        shape = "circle,pad=0.25" if len(numbers) == 1 else "round,pad=0.3,rounding_size=0.8"
        ring = {"boxstyle": shape, "facecolor": PATH, "edgecolor": "white"}
        ax.text(path[first].lost, path[first].peak / GB, ", ".join(numbers), bbox=ring, **style)


def decision_tree() -> CourseFigure:
    """Questions to ask of a run and a card, from the cheapest to the surest, and what to do after each no."""
    title = "Ask the cheapest question first; each no names the next change"
    row, box, half = 82.0, 46.0, 236.0
    right, middle = WIDTH - MARGIN - half, MARGIN + half / 2
    height = row * len(STEPS) + 36
    arrow = {"arrowstyle": "-|>", "color": QUIET, "linewidth": 1.4, "shrinkA": 0, "shrinkB": 0}
    with look():
        figure = sheet(title, height)
        ax = figure.place(0, 0, WIDTH, height)
        ax.set(xlim=(0, WIDTH), ylim=(height, 0))
        ax.set_axis_off()
        for index, (question, change) in enumerate(STEPS):
            top = 14 + row * index
            _box(ax, question, MARGIN, top, half, box, COLOURS["parameters"])
            _box(ax, change, right, top, half, box, COLOURS["optimizer_states"])
            center = top + box / 2
            ax.annotate("", (right, center), (MARGIN + half, center), arrowprops=arrow)
            ax.text((MARGIN + half + right) / 2, center - 5, "no", ha="center", fontsize=SMALL)
            ax.annotate("", (middle, top + row), (middle, top + box), arrowprops=arrow)
            ax.text(middle + 6, top + (box + row) / 2, "yes", va="center", fontsize=SMALL)
        ax.text(middle, height - 12, "train", ha="center", fontweight="bold")
    said = [f"{question} If not: {change}." for question, change in STEPS]
    figure.alt = " ".join([f"{title}.", *said]).replace("\n", " ")
    return figure


def _box(ax: Axes, text: str, left: float, top: float, width: float, height: float, color: str) -> None:
    style = "round,pad=0,rounding_size=6"
    ax.add_patch(
        FancyBboxPatch(
            (left, top), width, height, boxstyle=style, facecolor="white", edgecolor=color, linewidth=1.8
        )
    )
    ax.text(left + width / 2, top + height / 2, text, ha="center", va="center", fontsize=SMALL)
