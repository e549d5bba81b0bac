"""Simulate the runs of the lessons and ship the results, for platforms that cannot simulate a GPU (Windows).

`python tests/ship_recordings.py` writes them. A test runs every lesson from recordings alone.
"""

import lzma
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from course_utils.measurement import Measurement
from course_utils.measuring.files import FOLDER, thinned
from course_utils.measuring.recorded import FILE, key, save
from course_utils.measuring.sources import measure
from course_utils.models import TransformerConfig
from course_utils.run import TrainingRun


def lesson_runs() -> list[tuple[TrainingRun, int]]:
    """Each run that a lesson or an exercise measures on a GPU, simulated or not, and its number of steps."""
    one_step = [TrainingRun("gpt2", 1, 128, "fp32", name, attention="efficient") for name in OPTIMIZERS]
    found = [(run, 2) for run in (*_runs(), *replayed_runs())]
    found += [(TrainingRun("llama3.2-1b", 4, 1024), 4)]  # lesson 01
    return found + [(run, 1) for run in one_step]  # lesson 02


OPTIMIZERS = ("adafactor", "adam8bit", "lion")


def _runs() -> Iterator[TrainingRun]:
    # 00, 01 with its puzzle, and 19
    yield TrainingRun("gpt2", 8, 1024)
    yield TrainingRun("gpt2-xl", 32, 1024, "bf16-master", "adamw-foreach", recompute="full")
    yield TrainingRun("gpt2-xl", 1, 1024, "bf16-master", "adamw-fused", accumulation_steps=32)
    # 07: two compiled blocks
    sizes: dict[str, Any] = {"hidden": 1024, "heads": 16, "vocab": 50_304, "max_positions": 2048}
    small = TransformerConfig("two blocks of it", "gpt2", layers=2, tied=False, **sizes)
    choices: dict[str, Any] = {"optimizer": "adamw-fused", "dropout": 0.0, "card": "H200-141GB"}
    yield TrainingRun(small, 8, compile="model", **choices)
    # 11: FSDP2 as rank 0 of 128
    yield TrainingRun(
        "llama3-70b", 1, 8192, "bf16-master", recompute="full", world_size=128, zero_stage=3, loss_chunks=16
    )
    # 18
    yield from counted_runs()
    # the demos, for the card that stands for every machine without a GPU
    on_t4: dict[str, Any] = {"precision": "amp-fp16", "attention": "efficient"}
    medium = TrainingRun("gpt2-medium", 6, 512, **on_t4)
    chunked = TrainingRun("gpt2", 18, 1024, loss_chunks=8, **on_t4)
    whole = TrainingRun("gpt2", 8, 1024, **on_t4)
    yield from (medium, medium.replace(optimizer="sgd"))
    yield from (chunked, chunked.replace(recompute="selective"), chunked.replace(recompute="full"))
    yield from (whole, whole.replace(micro_batch=2, accumulation_steps=4))


def counted_runs() -> list[TrainingRun]:
    """Those of lesson 18, recorded with every tensor of the peak, which it adds up by component.

    They are two models on which calculators disagree.
    """
    return [TrainingRun("llama3.1-8b", 2, 8192), TrainingRun("gpt2-xl", 32, 1024)]


def replayed_runs() -> list[TrainingRun]:
    """Those of lesson 12, recorded with all their allocations: the allocator replays them."""
    step = TrainingRun("gpt2", 8, 512)
    return [step]


def shipped(run: TrainingRun, steps: int) -> Measurement:
    """The run simulated; thinned where the lessons need but its figure and its largest tensors."""
    measured = measure(run, source="simulated", steps=steps)
    return measured if run in (*counted_runs(), *replayed_runs()) else thinned(measured)


def main() -> None:
    """Simulate every run, and write the file."""
    measured = {key(run, steps): shipped(run, steps) for run, steps in lesson_runs()}
    text = save(measured, {key(run, 2) for run in replayed_runs()})
    (FOLDER / FILE).write_bytes(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME))


if __name__ == "__main__":
    main()
