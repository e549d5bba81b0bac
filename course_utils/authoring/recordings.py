"""Simulate the runs of the lessons and ship the results, for platforms that cannot simulate a GPU (Windows).

`python -m course_utils.authoring.recordings` writes `simulated.json.gz` and `saved.json.gz` in
`course_utils/measuring/recordings`. A test runs every lesson from recordings alone, so a missing run is found.
"""

from dataclasses import astuple, replace
from datetime import date
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import nn

from ..gpus import gpu
from ..interactive.course_files import ROOT
from ..interactive.saved import saved_by
from ..lessons.activations.checks import STORY, BilinearMLP
from ..lessons.activations.ledgers import block_and_inputs
from ..lessons.one_step.checks import HIDDEN_RUNS
from ..lessons.plans.detective import broken_runs
from ..lessons.recomputation import checks as lesson_06_checks
from ..lessons.sharding.units import six_blocks
from ..measuring import measure, saved_recordings
from ..measuring.recorded import FILE, key, save
from ..measuring.saved_recordings import Question, Row
from ..planning.twin import twin
from ..run import TrainingRun

FOLDER = ROOT / "course_utils" / "measuring" / "recordings"

LESSON_03 = ("fp32", "amp-bf16", "bf16-master", "bf16-master-fp32grad", "bf16")
"""Recipes of number formats that lesson 03 measures."""


def lesson_runs() -> list[tuple[TrainingRun, int]]:
    """Each run that a lesson or an exercise measures on a GPU, simulated or not, and its number of steps."""
    puzzle = TrainingRun("gpt2-xl", 32, 1024, "bf16-master", "adamw-foreach", recompute="full")
    ways = product(("amp-bf16", "bf16-master"), ("none", "full"))
    return [
        (TrainingRun("tiny-llama", 8, 256), 2),
        (TrainingRun("gpt2", 8, 1024), 2),
        (TrainingRun("llama3.2-1b", 4, 1024), 4),
        (puzzle, 2),
        (twin(puzzle.replace(recompute="none", optimizer="adamw"), gpu("T4-16GB")), 2),
        (puzzle.replace(micro_batch=4, accumulation_steps=8), 2),
        (puzzle.replace(optimizer="adamw", micro_batch=4, accumulation_steps=8), 2),
        (puzzle.replace(optimizer="adamw", loss_chunks=8), 2),
        (puzzle.replace(optimizer="adamw", recompute="none", attention="eager"), 2),
        *((TrainingRun("gpt2-xl", 32, 1024, precision, recompute=recompute), 2) for precision, recompute in ways),
        (TrainingRun("gpt2", 4, 256, "amp-bf16"), 2),
        (TrainingRun("gpt2", 8, 512, "bf16-master", recompute="full"), 2),
        *((run, 2) for run in HIDDEN_RUNS),
        *adam_runs(),
        *((TrainingRun("gpt2", 4, 256, precision, attention="eager"), 2) for precision in LESSON_03),
        *activation_runs(),
        *((run, 2) for run in lesson_06_runs()),
        *((run, 2) for run in lesson_07_runs()),
        *((run, 2) for run in replayed_runs()),
        *((run, 2) for run in lesson_09_runs()),
        *((run, 2) for run in lesson_12_runs()),
        *((run, 2) for run in lesson_13_runs()),
        (TrainingRun("gpt2-xl", 1, 1024, "bf16-master", "adamw-fused", accumulation_steps=32), 2),
    ]


def adam_runs() -> list[tuple[TrainingRun, int]]:
    """Those of lesson 02: the first steps, every optimizer, each way to step, master weights."""
    plain = TrainingRun("gpt2", 1, 128, "fp32", attention="efficient")
    masters = TrainingRun("gpt2", 1, 128, "bf16-master")
    optimizers = ("sgd", "adafactor", "adam8bit", "momentum", "lion", "muon", "adamw")
    ways = ("adamw-loop", "adamw-foreach", "adamw-fused")
    return [
        (TrainingRun("gpt2", 4, 512), 3),
        *((plain.replace(optimizer=name), 2) for name in (*optimizers, *ways)),
        *((masters.replace(optimizer=name), 2) for name in ("adamw", "adamw-foreach")),
    ]


def activation_runs() -> list[tuple[TrainingRun, int]]:
    """Those of lesson 05: two and three blocks of each variant, sweeps over b and s, Llama-3 8B, a loss in chunks, a
    timeline's run.
    """
    block = TrainingRun("gpt2", 2, 512, "bf16-master")
    gpt = block.model
    changes: list[dict[str, Any]] = [
        {"dropout": 0.0}, {"norm": "rmsnorm"}, {"mlp": "swiglu", "ffn": 8 * gpt.hidden // 3}, {"kv_heads": 4},
    ]  # fmt: skip
    variants = [block, block.replace(attention="eager"), block.replace(precision="amp-bf16")]
    variants += [block.replace(model=replace(gpt, **change)) for change in changes]
    tiny = TrainingRun("tiny-gpt", 4, 128, "bf16-master")
    sizes = [{"micro_batch": b} for b in (2, 6, 10, 16)] + [{"seq_len": s} for s in (64, 128, 192, 256)]
    return [
        *((run.replace(model=replace(run.model, layers=L)), 2) for run in variants for L in (2, 3)),
        *((tiny.replace(attention=kernel, **size), 2) for kernel in ("eager", "flash") for size in sizes),
        (TrainingRun("llama3-8b", 1, 4096, "bf16-master"), 2),
        (TrainingRun("gpt2-xl", 32, 1024, "bf16-master", loss_chunks=8), 2),
        (STORY, 2),
    ]


def lesson_06_runs() -> list[TrainingRun]:
    """GPT-2 under each policy of recomputation, and the runs behind the hidden timelines."""
    gpt2 = TrainingRun("gpt2", 8, 1024, "bf16-master")
    policies = ("none", "selective-attention", "selective", "full", "every-3", "offload")
    hidden = [*lesson_06_checks.hidden_runs(), *lesson_06_checks.secret_runs()]
    return [*(gpt2.replace(recompute=policy) for policy in policies), *hidden]


def lesson_07_runs() -> list[TrainingRun]:
    """GPT-2 with 100 sequences a step, cut into micro-batches, and 4 sequences alone."""
    gpt2 = TrainingRun("gpt2", 4, 1024)
    return [gpt2, *(gpt2.replace(micro_batch=b, accumulation_steps=100 // b) for b in (1, 4, 20, 100))]


def replayed_runs() -> list[TrainingRun]:
    """Those of lessons 10 and 14, recorded with all their allocations: they are sent through the allocator."""
    step = TrainingRun("gpt2", 8, 512)
    broken = [run for run in broken_runs().values() if run != step]
    return [step, step.replace(loss_chunks=2), *broken]


def lesson_09_runs() -> list[TrainingRun]:
    """FSDP2 as rank 0 of 8 and of 64: Llama-3 8B and GPT-2 XL, and on 64 six blocks in four ways."""
    llama = TrainingRun("llama3-8b", 1, 4096, "bf16-master", recompute="full", world_size=64, zero_stage=3)
    xl = TrainingRun("gpt2-xl", 1, 1024, "bf16-master", recompute="full", world_size=64, zero_stage=3)
    six = six_blocks(ranks=64)
    return [
        *(run.replace(world_size=ranks) for run, ranks in product((llama, xl), (8, 64))),
        six, six.replace(zero_stage=2), six.replace(precision="fp32", attention="efficient"),
        six.replace(precision="amp-bf16"),
    ]  # fmt: skip


def lesson_12_runs() -> list[TrainingRun]:
    """GPT-2 with all weights trained and with LoRA, and a small QLoRA step."""
    gpt2, everywhere = TrainingRun("gpt2", 4, 512), ("attention", "mlp")
    small = TrainingRun("tiny-llama", 4, 256, "bf16", "adam8bit", recompute="full", lora_rank=16,
                        lora_targets=everywhere, frozen_bits=4)  # fmt: skip
    return [gpt2, gpt2.replace(lora_rank=8), gpt2.replace(lora_rank=8, lora_targets=everywhere), small]


def lesson_13_runs() -> list[TrainingRun]:
    """The two models on which calculators disagree, and a GPT as one of their formulas means it."""
    return [
        TrainingRun("llama3.1-8b", 2, 8192),
        TrainingRun("gpt2-xl", 32, 1024),
        TrainingRun("gpt2", 8, 1024, "bf16-master", attention="eager"),
    ]


def saved_questions() -> list[Question]:
    """What lesson 05 and its exercises ask the hooks on a simulated GPU: operations, MLPs, whole blocks."""
    s, b, h = 1024, 4, 1024
    alone = [partial(torch.div, other=8), nn.Linear(h, h), nn.GELU(), nn.Softmax(-1), nn.Dropout(0.1), nn.LayerNorm(h)]
    mlps = [nn.Sequential(nn.Linear(h, 4 * h), middle, nn.Linear(4 * h, h)) for middle in (nn.GELU(), nn.ReLU())]
    block = TrainingRun("gpt2", 2, 512, "bf16-master", attention="eager")
    blocks = [block, block.replace(attention="flash"), TrainingRun("llama3-8b", 1, 4096, "bf16-master")]
    return [
        *(Question(operation, [(b, s, h)], "bf16") for operation in (*alone, *mlps)),
        *(Question(operation, [(b, s, h)] * 2, "bf16") for operation in (torch.add, torch.mul)),
        *(Question(*block_and_inputs(run)) for run in blocks),
        Question(BilinearMLP(256, 1024), [(2, 512, 256)], "bf16"),
    ]


def answers() -> dict[str, list[Row]]:
    """What the hooks find for each of these questions, by its key, on this machine's simulated GPU."""
    found: dict[str, list[Row]] = {}
    for question in saved_questions():
        assert question.key, f"{question.operation}: no words are enough to tell this operation"
        saved = saved_by(question.operation, *question.inputs, dtype=question.dtype, device="gpu")
        found[question.key] = [astuple(item) for item in saved]
    return found


def main() -> None:
    """Simulate every run, ask every question, and write the files."""
    FOLDER.mkdir(exist_ok=True)
    write(saved_recordings.FILE, saved_recordings.save(answers(), date.today().isoformat()))
    measured = {key(run, steps): measure(run, source="simulated", steps=steps) for run, steps in lesson_runs()}
    write(FILE, save(measured, {key(run, 2) for run in replayed_runs()}))


def write(name: str, content: bytes) -> None:
    """Write one of the shipped files, and say how large it is."""
    (FOLDER / name).write_bytes(content)
    print(f"{name}: {len(content):,} bytes")


if __name__ == "__main__":
    main()
