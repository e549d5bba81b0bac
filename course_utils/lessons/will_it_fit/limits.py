"""The smallest cards on which 20 runs work: on a recorded GPU, by the rule of `fit`, by the replay."""

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from ... import TrainingRun, estimate
from ...figures import CourseFigure
from ...figures.style import WIDTH, bare, look, paper, sheet, value_axis
from ...palette import COLOURS, OVER, UNDER
from ...planning.twin import SAFETY
from ...units import Table, format_bytes, percent

_RECORDED = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
PROVENANCE = "recorded on {device} · torch {torch} · {date}; replayed with torch {replayed_with}".format_map(
    _RECORDED
)
SHOWN = (
    "gpt2 8 × 512",
    "gpt2-medium 8 × 1024 every-4",
    "gpt2-xl 4 × 1024 bf16-master",
    "llama3.2-1b 2 × 2048",
)
"""Runs of the table: the lesson's own, and one of each other model."""


@dataclass(frozen=True)
class Limit:
    """A run, the largest card that was too small for it, the smallest that worked, and the replay's."""

    name: str
    run: TrainingRun
    too_small: int
    works: int
    replayed: int

    @property
    def rule(self) -> int:
        """The smallest card that `fit` accepts."""
        return round(estimate(self.run).total * SAFETY)


LIMITS = tuple(Limit(**row | {"run": TrainingRun(**row["run"])}) for row in _RECORDED["cards"])


def figure() -> CourseFigure:
    """The smallest card by the rule and by the replay, for each run, as a share of what worked on the GPU."""
    wrong = sum(one.rule <= one.too_small for one in LIMITS)
    off = median(abs(one.replayed / one.works - 1) for one in LIMITS)
    title = (
        f"The rule accepts a card that is too small for {wrong} of {len(LIMITS)} runs; "
        f"the replay is off by {percent(off, 1)}"
    )
    rows = range(len(LIMITS))
    dots = {
        "the rule: 1.05 · estimate": ([100 * one.rule / one.works for one in LIMITS], OVER, "o"),
        "the allocator's replay": ([100 * one.replayed / one.works for one in LIMITS], UNDER, "D"),
    }
    with look():
        drawn = sheet(title, 20 * len(LIMITS) + 78, PROVENANCE)
        ax = drawn.place(220, 26, WIDTH - 240, 20 * len(LIMITS))
        ax.axvline(100, color=COLOURS["parameters"], linewidth=1.8)
        for label, (shares, color, mark) in dots.items():
            ax.plot(shares, rows, mark, color=color, markersize=6, label=label)
        ax.set_yticks(rows, [one.name for one in LIMITS], fontsize=10)
        ax.set_ylim(len(LIMITS) - 0.5, -0.5)
        value_axis(ax, "x", "smallest card accepted, % of what worked")
        ax.text(90, 3, "← accepted, but too small", ha="center", va="center", color=OVER, bbox=paper())
        bare(ax)
        ax.legend(ncols=2, loc="lower right", bbox_to_anchor=(1, 1.01))
    drawn.alt = f"{title}."
    head = ["run", "too small", "works", "by the rule", "by the replay"]
    sizes = [(one.too_small, one.works, one.rule, one.replayed) for one in LIMITS]
    drawn.rows = [head]
    for one, row in zip(LIMITS, sizes, strict=True):
        drawn.rows.append([one.name, *(format_bytes(size, "GB", 3) for size in row)])
    return drawn


def table() -> Table:
    """Answers of the GPU, the rule and the replay on both sides of the limit; ✗ marks a wrong one."""
    rows: list[Sequence[str]] = [("run", "card for tensors", "the GPU", "rule of fit", "replay")]
    for one in (one for one in LIMITS if one.name in SHOWN):
        for size in (one.too_small, one.works):
            right = size == one.works
            answers = [_answer(needed <= size, right) for needed in (one.rule, one.replayed)]
            rows.append((one.name, format_bytes(size, "GB", 3), "yes" if right else "no", *answers))
    return Table(rows)


def _answer(said: bool, right: bool) -> str:
    return f"{'yes' if said else 'no'}{'' if said == right else ' ✗'}"
