"""Memory against time of GPT-2's training step, recorded on a GPU: lesson 06's front."""

import tomllib
from pathlib import Path
from typing import Any, NamedTuple


class Step(NamedTuple):
    """The most bytes allocated in a step, and the median of its milliseconds."""

    peak: int
    ms: float


_TABLE: dict[str, Any] = tomllib.loads(Path(__file__).with_name("recorded.toml").read_text(encoding="utf-8"))

FRONT: dict[str, dict[str, Step]] = {
    group: {policy: Step(**counted) for policy, counted in steps.items()}
    for group, steps in _TABLE.items()
    if isinstance(steps, dict)
}
"""Steps by how they are executed, then by policy of recomputation (or by the compiler's budget)."""

PROVENANCE = f"recorded on {_TABLE['device']} · torch {_TABLE['torch']} · {_TABLE['date']}"
