"""Memory against time of GPT-2's training step, recorded on a GPU, for lessons 06 and 07."""

import tomllib
from pathlib import Path
from typing import Any, NamedTuple


class Step(NamedTuple):
    """The most bytes allocated in a step, the median of its milliseconds, and bytes after forward."""

    peak: int
    ms: float
    kept: int


_TABLE: dict[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))

FRONT: dict[str, dict[str, Step]] = {
    group: {policy: Step(**counted) for policy, counted in steps.items()}
    for group, steps in _TABLE.items()
    if isinstance(steps, dict)
}
"""Steps by how they are executed, then by policy of recomputation (or by the compiler's budget)."""

PROVENANCE = f"recorded on {_TABLE['device']} · torch {_TABLE['torch']} · {_TABLE['date']}"
