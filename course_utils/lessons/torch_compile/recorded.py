"""Counted on a GPU for lesson 07: ways to compile one GPT, and memory against time for GPT-2.

`tests/gpu/compiled_step.py` and `tests/gpu/in_turn.py` counted them; tests/gpu/recorded has all that they
said.
"""

import json
from pathlib import Path

_RECORDED = json.loads(Path(__file__).with_name("recorded.json").read_text(encoding="utf-8"))

WAYS: dict[str, dict[str, int]] = _RECORDED["ways"]
"""Bytes by way: `kept` after forward (weights and states included), `peak` and `reserved`, fourth step."""

FRONT: dict[str, dict[str, float]] = _RECORDED["front"]
"""By choice: `kept` and `peak` in bytes, and `ms`, a step's median milliseconds. GPT-2, 16 · 1,024 tokens."""

WHERE: str = _RECORDED["where"]
