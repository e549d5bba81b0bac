"""Counted on a GPU for lesson 07: ways to compile one GPT, and memory against time for GPT-2.

`tests/gpu/compiled_step.py` and `tests/gpu/in_turn.py` counted them; tests/gpu/recorded has all that they said.
"""

import json
from pathlib import Path

from ...errors import check_known
from ...figures import CourseFigure, lines

_RECORDED = json.loads(Path(__file__).with_name("recorded.json").read_text(encoding="utf-8"))

WAYS: dict[str, dict[str, int]] = _RECORDED["ways"]
"""Bytes by way: `kept` after forward (weights and states included), `peak` and `reserved`, fourth step."""

FRONT: dict[str, dict[str, float]] = _RECORDED["front"]
"""By choice: `kept` and `peak` in bytes, and `ms`, a step's median milliseconds. GPT-2, 16 · 1,024 tokens."""

WHERE: str = _RECORDED["where"]


def front_figure(title: str, groups: dict[str, list[str]]) -> CourseFigure:
    """Milliseconds of a step over its peak in GB: a line for each group of choices of FRONT."""
    for choices in groups.values():
        for choice in choices:
            check_known("choice", choice, FRONT)
    points = {
        name: ([FRONT[one]["peak"] / 1e9 for one in choices], [FRONT[one]["ms"] for one in choices])
        for name, choices in groups.items()
    }
    return lines(points, title, "GB at the peak", "ms of a step", provenance=f"GPT-2, b = 16, {WHERE}")
