"""Bytes of one GPT, compiled in several ways, counted on the GPU of lesson 07's other recordings.

`tests/gpu/compiled_step.py` counted them; tests/gpu/recorded has all that it said.
"""

import tomllib
from pathlib import Path

WAYS: dict[str, dict[str, int]] = tomllib.loads(
    Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
)
"""Bytes by way: `kept` after forward (weights and states included), `peak` and `reserved`, fourth step."""
