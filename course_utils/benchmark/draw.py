"""Runs drawn from all choices of TrainingRun: by a seed, and a list that was frozen before anything was compared."""

import json
import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from ..gpus import GPUS
from ..models import LOGITS, PRESETS, TransformerConfig
from ..run import OPTIMIZERS, PRECISIONS, RECOMPUTES, TrainingRun

FROZEN = Path(__file__).with_name("runs.json")
"""The frozen list: {"schema": 1, "runs": [choices, …]}, each choices what `run_of` takes."""

Choices = dict[str, Any]

WIDEST = 8192
"""Presets with a larger hidden size than this are left out; so are the course's own tiny ones, which nobody trains."""

MEASURED_OPTIMIZERS = [name for name in OPTIMIZERS if name not in ("adam8bit", "lion")]
"""Optimizers of torch. Of the others only the bytes are known; they are drawn less often, as is fp8."""

CARDS = list(GPUS)


def random_choices(seed: int) -> Choices:
    """Choices for `run_of`, the same for the same seed, every choice of TrainingRun among them.

    Models have published widths and few blocks, so that a simulation takes a fraction of a second. A TrainingRun knows
    best which choices contradict each other: what it refuses is drawn again.
    """
    dice = random.Random(seed)
    while True:
        choices = {**_model(dice), **_sizes(dice), **_recipe(dice), **_ranks(dice), **_frozen_weights(dice)}
        with suppress(ValueError):
            run_of(choices)
            choices |= _sometimes(random.Random(f"card {seed}"), 0.2, lambda: {"card": CARDS[seed % len(CARDS)]})
            choices |= _sometimes(random.Random(f"unfused {seed}"), 0.15, lambda: {"unfused": True})
            return choices | _sometimes(random.Random(f"logits {seed}"), 0.25, lambda: {"logits": LOGITS[seed % 2]})


def random_run(seed: int) -> TrainingRun:
    """The run that `random_choices(seed)` makes."""
    return run_of(random_choices(seed))


def run_of(choices: Choices) -> TrainingRun:
    """The run of a mapping of choices: "preset" and "changes" for the model, the others as TrainingRun spells them.

    Raises ValueError for a preset that is not known, and like TrainingRun.
    """
    rest = dict(choices)
    preset, changes = rest.pop("preset"), rest.pop("changes", {})
    if preset not in PRESETS:
        raise ValueError(f"a frozen run is of {preset!r}, which is no preset: known are {', '.join(PRESETS)}")
    if "lora_targets" in rest:
        rest["lora_targets"] = tuple(rest["lora_targets"])
    return TrainingRun(changed(preset, **changes), **rest)


def _sometimes(dice: random.Random, share: float, choices: Callable[[], Choices]) -> Choices:
    return choices() if dice.random() < share else {}


def _model(dice: random.Random) -> Choices:
    """A preset's widths with one to four blocks, and now and then an option that its family does not have."""
    presets = [name for name, model in PRESETS.items() if model.hidden <= WIDEST and not name.startswith("tiny-")]
    preset = dice.choice(presets)
    changes: Choices = {"layers": dice.choice([1, 2, 2, 3, 4])}
    changes |= _sometimes(dice, 0.1, lambda: {"tied": not PRESETS[preset].tied})
    changes |= _sometimes(dice, 0.1, lambda: {"qkv_bias": not PRESETS[preset].qkv_bias})
    changes |= _sometimes(dice, 0.1, lambda: {"positions": dice.choice(["learned", "rotary", "none"])})
    changes |= _sometimes(dice, 0.05, lambda: {"norm": dice.choice(["layernorm", "rmsnorm"])})
    changes |= _sometimes(dice, 0.05, lambda: {"mlp": dice.choice(["gelu", "swiglu"])})
    changes |= _sometimes(dice, 0.05, lambda: {"bias": not PRESETS[preset].bias})
    changes |= _sometimes(dice, 0.05, lambda: {"kv_heads": 1})
    changes |= _sometimes(dice, 0.1, lambda: {"vocab": dice.choice([4099, 32003, 50257])})
    changes |= _sometimes(dice, 0.1, lambda: {"ffn": dice.choice([1000, 2728, 4096])})
    changes |= _sometimes(
        dice, 0.1, lambda: {"experts": dice.choice([2, 4, 8]), "experts_per_token": dice.choice([1, 2])}
    )
    return {"preset": preset, "changes": changes}


def _sizes(dice: random.Random) -> Choices:
    choices: Choices = {
        "micro_batch": dice.choice([1, 1, 2, 3, 4, 8]),
        "seq_len": dice.choice([64, 127, 256, 512, 1000]),
    }
    choices |= _sometimes(dice, 0.25, lambda: {"accumulation_steps": dice.choice([2, 3, 8])})
    return choices | _sometimes(dice, 0.15, lambda: {"dropout": dice.choice([0.0, 0.1])})


def _recipe(dice: random.Random) -> Choices:
    precision = dice.choice([name for name in PRECISIONS if name != "fp8"] * 4 + ["fp8"])
    kernels = ["flash", "flash", "cudnn"] if PRECISIONS[precision].compute == 2 else []
    choices: Choices = {
        "precision": precision,
        "optimizer": dice.choice(["adamw"] * 4 + MEASURED_OPTIMIZERS * 2 + ["adam8bit", "lion"]),
        "attention": dice.choice(["eager", "efficient", *kernels]),
        "recompute": dice.choice(["none", "none", "none", "full", "full", "every-2", "every-3", *RECOMPUTES]),
    }
    choices |= _sometimes(dice, 0.2, lambda: {"clip_grad_norm": 1.0})
    choices |= _sometimes(dice, 0.15, lambda: {"set_to_none": False})
    return choices | _sometimes(dice, 0.2, lambda: {"loss_chunks": dice.choice([2, 4, 7])})


def _ranks(dice: random.Random) -> Choices:
    """One rank in four runs of five; of the others, plain data parallelism, ZeRO, or tensor parallelism."""
    kind = dice.choice(["one"] * 16 + ["ddp", "zero", "zero", "tensor"])
    if kind == "ddp":
        return {"world_size": dice.choice([2, 8]), "bucket_view": dice.choice([False, True])}
    if kind == "zero":
        return {"world_size": dice.choice([2, 3, 64]), "zero_stage": dice.choice([1, 2, 3])}
    if kind == "tensor":
        return {"tensor_parallel": dice.choice([2, 4]), "sequence_parallel": dice.choice([False, True])}
    return {}


def _frozen_weights(dice: random.Random) -> Choices:
    """LoRA in one run of eight, on some of the matrices, the weights beneath it in 16, 8 or 4 bits or as they are."""
    if dice.random() >= 0.125:
        return {}
    targets = dice.choice([["attention"], ["attention", "mlp"], ["mlp"], ["out"]])
    bits = _sometimes(dice, 0.6, lambda: {"frozen_bits": dice.choice([16, 8, 4])})
    return {"lora_rank": dice.choice([4, 16, 64]), "lora_targets": targets, **bits}


@cache
def frozen_runs() -> tuple[TrainingRun, ...]:
    """The runs of the frozen list, in order. Raises ValueError for one that TrainingRun refuses by now."""
    return tuple(run_of(choices) for choices in json.loads(FROZEN.read_text(encoding="utf-8"))["runs"])


def freeze(first_seed: int = 0, count: int = 400) -> None:
    """Write the frozen list anew: for when TrainingRun has got new choices, and before they are compared."""
    lines = ",\n".join(json.dumps(random_choices(seed)) for seed in range(first_seed, first_seed + count))
    FROZEN.write_text(f'{{"schema": 1, "first_seed": {first_seed}, "runs": [\n{lines}\n]}}\n', encoding="utf-8")


def shallow(model: str, layers: int) -> TransformerConfig:
    """A preset's widths with fewer blocks, which its name says: "gpt2, 2 blocks"."""
    return changed(model, layers=layers)


def changed(preset: str, **changes: Any) -> TransformerConfig:
    """A preset with some choices changed, and named after what differs, so that nobody takes it for the preset."""
    model = PRESETS[preset]
    differing = {choice: value for choice, value in changes.items() if value != getattr(model, choice)}
    words = (
        f"{value} block{'s' if value != 1 else ''}" if choice == "layers" else f"{choice}={value}"
        for choice, value in differing.items()
    )
    return replace(model, name=", ".join([model.name, *words]), **differing)
