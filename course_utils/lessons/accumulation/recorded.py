"""GPT-2's step by the size of its micro-batch, recorded on a GPU, for lesson 08."""

import tomllib
from pathlib import Path
from typing import Any, NamedTuple

from ...figures import lines
from ...figures.style import Drawn


class Step(NamedTuple):
    """The most bytes allocated in a step, and its tokens per second."""

    peak: int
    speed: int


_TABLE: dict[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def _steps(name: str) -> dict[int, Step]:
    return {int(size): Step(**counted) for size, counted in _TABLE[name].items()}


SPLIT = _steps("split")
"""A batch of 64 sequences by the sequences in its micro-batch, each kernel launched by Python."""

COMPILED = _steps("compiled")
"""One micro-batch per step, by its sequences, with the model compiled."""

PROVENANCE = f"recorded on {_TABLE['device']} · torch {_TABLE['torch']} · {_TABLE['date']}"


def draw_speeds(title: str) -> Drawn:
    """Tokens per second against the sequences in a micro-batch, in both ways."""
    ways = {"64 sequences, cut": SPLIT, "compiled, one micro-batch": COMPILED}
    curves = {}
    for name, steps in ways.items():
        sizes = sorted(steps)
        curves[name] = sizes, [steps[size].speed / 1000 for size in sizes]
    axes = "sequences in a micro-batch", "thousand tokens per second"
    return lines(curves, title, *axes, log_x=True, provenance=PROVENANCE)
