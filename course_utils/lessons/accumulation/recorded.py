"""GPT-2's step by the size of its micro-batch, recorded on a GPU, for lesson 08."""

import tomllib
from pathlib import Path
from typing import Any, NamedTuple


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
