"""Simulate the runs of the lessons and ship the results, for platforms that cannot simulate a GPU (Windows).

`python tests/ship_recordings.py` writes them. A test runs every lesson from recordings alone.
"""

import lzma
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from course_utils.gpus import gpu
from course_utils.measurement import Measurement
from course_utils.measuring.files import FOLDER, thinned
from course_utils.measuring.recorded import FILE, key, save
from course_utils.measuring.sources import measure
from course_utils.models import PRESETS
from course_utils.planning.twin import twin
from course_utils.run import TrainingRun


def lesson_runs() -> list[tuple[TrainingRun, int]]:
    """Each run that a lesson or an exercise measures on a GPU, simulated or not, and its number of steps."""
    more = [(TrainingRun("llama3.2-1b", 4, 1024), 4), (TrainingRun("gpt2", 8, 512), 3)]  # lessons 01 and 02
    once = [(run, 1) for run in _runs_of_one_step()]
    return [*((run, 2) for run in (*_runs(), *replayed_runs())), *more, *once]


def _runs() -> Iterator[TrainingRun]:
    # 00, 01 with its exercises, the puzzle in others, and 19
    puzzle = TrainingRun("gpt2-xl", 32, 1024, "bf16-master", "adamw-foreach", recompute="full")
    one_gradient = puzzle.replace(optimizer="adamw")
    yield from (TrainingRun("gpt2", 8, 1024), puzzle)
    yield from _with_two_blocks(puzzle, one_gradient)
    yield twin(one_gradient.replace(recompute="none"), gpu("T4-16GB"))
    yield TrainingRun("gpt2", 4, 256, "amp-bf16")
    yield TrainingRun("gpt2", 8, 512, "bf16-master", recompute="full")
    yield TrainingRun("gpt2-xl", 1, 1024, "bf16-master", "adamw-fused", accumulation_steps=32)
    # 03: number formats
    for precision in ("fp32", "amp-bf16", "bf16-master", "bf16-master-fp32grad", "bf16"):
        yield TrainingRun("gpt2", 4, 256, precision, attention="eager")
    # 06: each policy of recomputation
    half = replace(PRESETS["gpt2"], layers=6)
    gpt2 = TrainingRun(half, 8, 1024, "bf16-master", "adamw-foreach")
    for policy in ("none", "selective-attention", "selective", "full", "every-3", "offload"):
        yield gpt2.replace(recompute=policy)
    # 08: 100 sequences per step, cut into micro-batches, and 4 sequences alone
    gpt2 = TrainingRun("gpt2", 4, 1024)
    yield from (gpt2, *(gpt2.replace(micro_batch=b, accumulation_steps=100 // b) for b in (1, 4, 20, 100)))
    # 11: FSDP2 as rank 0 of 128
    yield TrainingRun(
        "llama3-70b", 1, 8192, "bf16-master", recompute="full", world_size=128, zero_stage=3, loss_chunks=16
    )
    # 16: all weights trained, LoRA, and a small QLoRA step
    gpt2 = TrainingRun("gpt2", 4, 512)
    everywhere = ("attention", "mlp")
    yield from (gpt2, gpt2.replace(lora_rank=8), gpt2.replace(lora_rank=8, lora_targets=everywhere))
    yield TrainingRun(
        "tiny-llama",
        4,
        256,
        "bf16",
        "adam8bit",
        recompute="full",
        lora_rank=16,
        lora_targets=everywhere,
        frozen_bits=4,
    )
    # 18
    yield from counted_runs()


def _with_two_blocks(puzzle: TrainingRun, one_gradient: TrainingRun) -> Iterator[TrainingRun]:
    """The recipes of lesson 01, with two of GPT-2 XL's blocks."""
    in_pieces = {"micro_batch": 4, "accumulation_steps": 8}
    recipes = [puzzle, one_gradient, puzzle.replace(**in_pieces), one_gradient.replace(**in_pieces)]
    recipes += [one_gradient.replace(loss_chunks=8), one_gradient.replace(precision="amp-bf16")]
    two_blocks = replace(PRESETS["gpt2-xl"], layers=2)
    for run in recipes:
        yield run.replace(model=two_blocks)


def _runs_of_one_step() -> Iterator[TrainingRun]:
    """Those whose lessons ask only for a forward, or for what an optimizer keeps."""
    # 02
    for name in ("adafactor", "adam8bit", "lion"):
        yield TrainingRun("gpt2", 1, 128, "fp32", name, attention="efficient")
    # 05 and 06
    xl = TrainingRun("gpt2-xl", 32, 1024, "bf16-master", "sgd")
    yield from (xl, xl.replace(attention="eager"), xl.replace(recompute="full"))
    yield TrainingRun("llama3-8b", 1, 4096, "bf16-master", "sgd")


def counted_runs() -> list[TrainingRun]:
    """Those of lesson 18, recorded with every tensor of the peak, which it adds up by component.

    They are two models on which calculators disagree, and a GPT as one of their formulas means it.
    """
    gpt = TrainingRun("gpt2", 8, 1024, "bf16-master", attention="eager")
    return [TrainingRun("llama3.1-8b", 2, 8192), TrainingRun("gpt2-xl", 32, 1024), gpt]


def replayed_runs() -> list[TrainingRun]:
    """Those of lesson 12, recorded with all their allocations: the allocator replays them."""
    step = TrainingRun("gpt2", 8, 512)
    return [step, step.replace(loss_chunks=2)]


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
