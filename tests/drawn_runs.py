"""Runs drawn by a seed from all choices of TrainingRun.

`python tests/drawn_runs.py 1000000` compares a hundred of them, from that seed on, with simulations, as
`evidence` does with the frozen list; `--freeze` draws that list anew.
"""

import json
import random
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # where this file is run alone

from course_utils.evidence.accuracy import accuracy_tables
from course_utils.evidence.frozen_runs import FROZEN, Choices, run_of
from course_utils.gpus import GPUS
from course_utils.models import LOGITS, PRESETS
from course_utils.run import OPTIMIZERS, PRECISIONS, RECOMPUTES, TrainingRun

WIDEST = 8192
"""Presets with a larger hidden size than this are left out; so are the course's own tiny ones, which nobody
trains.
"""

MEASURED_OPTIMIZERS = [name for name in OPTIMIZERS if name not in ("adam8bit", "lion")]
"""Optimizers of torch. Of the others only the bytes are known; they are drawn less often, as is fp8."""

CARDS = list(GPUS)


def random_choices(seed: int) -> Choices:
    """Choices for `run_of`, the same for the same seed, every choice of TrainingRun among them.

    Models have published widths and few blocks, so that a simulation takes a fraction of a second. A
    TrainingRun knows best which choices contradict each other: what it refuses is drawn again.
    """
    dice = random.Random(seed)
    while True:
        choices = {**_model(dice), **_sizes(dice), **_recipe(dice), **_ranks(dice), **_frozen_weights(dice)}
        with suppress(ValueError):
            run_of(choices)
            choices |= _sometimes(
                random.Random(f"card {seed}"), 0.2, lambda: {"card": CARDS[seed % len(CARDS)]}
            )
            choices |= _sometimes(random.Random(f"unfused {seed}"), 0.15, lambda: {"unfused": True})
            return choices | _sometimes(
                random.Random(f"logits {seed}"), 0.25, lambda: {"logits": LOGITS[seed % 2]}
            )


def random_run(seed: int) -> TrainingRun:
    """The run that `random_choices(seed)` makes."""
    return run_of(random_choices(seed))


def _sometimes(dice: random.Random, share: float, choices: Callable[[], Choices]) -> Choices:
    return choices() if dice.random() < share else {}


def _model(dice: random.Random) -> Choices:
    """A preset's widths with one to four blocks, and now and then an option that its family does not have."""
    presets = [
        name for name, model in PRESETS.items() if model.hidden <= WIDEST and not name.startswith("tiny-")
    ]
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
    """LoRA in one run of eight, on some of the matrices, the weights beneath it in 16, 8 or 4 bits or as they
    are.
    """
    if dice.random() >= 0.125:
        return {}
    targets = dice.choice([["attention"], ["attention", "mlp"], ["mlp"], ["out"]])
    bits = _sometimes(dice, 0.6, lambda: {"frozen_bits": dice.choice([16, 8, 4])})
    return {"lora_rank": dice.choice([4, 16, 64]), "lora_targets": targets, **bits}


def freeze(first_seed: int = 0, count: int = 400) -> None:
    """Write the frozen list anew: for when TrainingRun has got new choices, and before they are compared."""
    lines = ",\n".join(json.dumps(random_choices(seed)) for seed in range(first_seed, first_seed + count))
    FROZEN.write_text(
        f'{{"schema": 1, "first_seed": {first_seed}, "runs": [\n{lines}\n]}}\n', encoding="utf-8"
    )


def compare(seed: int, count: int = 100) -> None:
    runs = [random_run(one) for one in range(seed, seed + count)]
    source = f"simulated GPU, seeds {seed} to {seed + count - 1}"
    for table in accuracy_tables(runs, source, lambda text: print(text, file=sys.stderr)):
        print(f"{table.markdown()}\n")


if __name__ == "__main__":
    if sys.argv[1:] == ["--freeze"]:
        freeze()
    else:
        compare(int(sys.argv[1]))
