"""What the tests of the engine share: small models, every recipe, a step that nobody watches."""

import dataclasses
import functools
from collections.abc import Collection
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from course_utils import estimate
from course_utils.estimating.formula_of_ranks import rank_0_states
from course_utils.estimating.states import Trainable, trainable
from course_utils.measurement import Measurement
from course_utils.measuring.devices import Unwatched as Unwatched
from course_utils.measuring.sources import measure
from course_utils.models import PRESETS, TransformerConfig
from course_utils.run import TrainingRun
from course_utils.units import BLOCK

RECIPES = (
    ("fp32", "eager"),
    ("fp32", "efficient"),
    ("amp-bf16", "eager"),
    ("amp-bf16", "flash"),
    ("amp-bf16", "efficient"),
    ("amp-fp16", "flash"),
    ("bf16-master", "eager"),
    ("bf16-master", "flash"),
    ("bf16-master", "efficient"),
)
"""Every precision with every attention that it allows (fp16 differs from bf16 only in its loss scaler)."""

GPT = PRESETS["gpt2"]
LLAMA = PRESETS["llama3.2-1b"]


def shallow(model: TransformerConfig, layers: int) -> TransformerConfig:
    """The same model with fewer layers."""
    return dataclasses.replace(model, layers=layers)


def trainable_shapes(run: TrainingRun) -> Trainable:
    return trainable(run.model, run.lora_rank, run.lora_targets)


def tiny(family: str, **changes: Any) -> TransformerConfig:
    """A model of a few hundred thousand parameters, so that a CPU takes milliseconds for a step."""
    sizes: dict[str, Any] = {"layers": 2, "hidden": 256, "heads": 4, "vocab": 512, "max_positions": 128}
    if family == "llama":
        sizes |= {"kv_heads": 2, "ffn": 640, "tied": False}
    return TransformerConfig(f"tiny {family}", family, **(sizes | changes))


@functools.cache
def simulate(run: TrainingRun, steps: int = 2) -> Measurement:
    """`measure(run, "simulated")`, once for each run however many tests ask."""
    return measure(run, "simulated", steps)


def assert_rank_0_is_near(run: TrainingRun) -> None:
    """Compare the closed form and a simulated rank of many: the states exact, the peak and its phase near."""
    found = simulate(run)
    assert estimate(run).total == pytest.approx(found.peak, rel=0.03)
    assert found.phase_peaks[estimate(run).phase].total > 0.99 * found.peak
    before_step = found.moments["end of backward"]
    states = rank_0_states(run)
    for kind, size in states.items():
        assert before_step[kind] == pytest.approx(size, abs=BLOCK * trainable_shapes(run).tensors), kind
    assert before_step["communication"] == before_step["temporaries"] == before_step["activations"] == 0
    assert dict(found.moments["end of step 1"]) == dict(found.moments["end of step 2"])


class Operators(TorchDispatchMode):
    """Writes down the name of every operator that runs inside, and remembers autocast's copies of weights."""

    def __init__(self, weights: Collection[int] = ()) -> None:
        super().__init__()
        self.weights = weights
        self.names = list[str]()
        self.copies: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func).removeprefix("aten.").rsplit(".", 1)[0])
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and storage_of(args[0]) in self.weights:
            self.copies.append(out)
        return out


def storage_of(tensor: torch.Tensor) -> int:
    """What is the same for two tensors exactly if they share their memory."""
    return tensor.untyped_storage()._cdata
