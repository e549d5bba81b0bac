"""Runs drawn from all choices of TrainingRun, in a list that was frozen before anything was compared."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from ..models import PRESETS, TransformerConfig
from ..run import TrainingRun

FROZEN = Path(__file__).with_suffix(".json")
"""The frozen list: {"schema": 1, "runs": [choices, …]}, each choices what `run_of` takes."""

Choices = dict[str, Any]


@cache
def frozen_runs() -> tuple[TrainingRun, ...]:
    """The runs of the frozen list, in order. Raises ValueError for one that TrainingRun refuses by now."""
    content = json.loads(FROZEN.read_text(encoding="utf-8"))
    return tuple(run_of(choices) for choices in content["runs"])


def run_of(choices: Choices) -> TrainingRun:
    """The run of a mapping of choices: "preset" and "changes" for the model, the others as in TrainingRun.

    Raises KeyError for a preset that is not known, and like TrainingRun.
    """
    rest = dict(choices)
    model = changed(rest.pop("preset"), **rest.pop("changes", {}))
    if "lora_targets" in rest:
        rest["lora_targets"] = tuple(rest["lora_targets"])
    return TrainingRun(model, **rest)


def changed(preset: str, **changes: Any) -> TransformerConfig:
    """A preset with some choices changed, named after what differs: nobody is to take it for the preset."""
    model = PRESETS[preset]
    differing = {choice: value for choice, value in changes.items() if value != getattr(model, choice)}
    words = [_in_words(choice, value) for choice, value in differing.items()]
    return replace(model, name=", ".join([model.name, *words]), **differing)


def _in_words(choice: str, value: Any) -> str:
    if choice != "layers":
        return f"{choice}={value}"
    return f"{value} block" if value == 1 else f"{value} blocks"
