"""Simulate the runs of the lessons and ship the results, for platforms that cannot simulate a GPU (Windows).

`python -m course_utils.authoring.recordings` writes them. A test runs every lesson from recordings alone.
"""

from collections.abc import Iterator
from dataclasses import astuple, replace
from datetime import date
from functools import partial
from itertools import product

import torch
from torch import nn

from ..gpus import gpu
from ..interactive.saved import saved_by
from ..lessons.activations.checks import STORY, BilinearMLP
from ..lessons.one_step.checks import HIDDEN_RUNS
from ..lessons.plans.detective import broken_runs
from ..lessons.recomputation import checks as lesson_06_checks
from ..lessons.sharding.zero import gpt_of_six_blocks
from ..measuring import measure, saved_recordings
from ..measuring.recorded import FILE, key, save
from ..measuring.recording_file import FOLDER
from ..measuring.saved_recordings import Question, Row
from ..planning.twin import twin
from ..run import TrainingRun


def lesson_runs() -> list[tuple[TrainingRun, int]]:
    """Each run that a lesson or an exercise measures on a GPU, simulated or not, and its number of steps."""
    more = [(TrainingRun("llama3.2-1b", 4, 1024), 4), (TrainingRun("gpt2", 4, 512), 3)]
    return [*((run, 2) for run in (*_runs(), *replayed_runs(), *HIDDEN_RUNS)), *more]


def _runs() -> Iterator[TrainingRun]:
    # 01, and the puzzle in others
    puzzle = TrainingRun("gpt2-xl", 32, 1024, "bf16-master", "adamw-foreach", recompute="full")
    yield from (TrainingRun("tiny-llama", 8, 256), TrainingRun("gpt2", 8, 1024), puzzle)
    yield twin(puzzle.replace(recompute="none", optimizer="adamw"), gpu("T4-16GB"))
    yield puzzle.replace(micro_batch=4, accumulation_steps=8)
    yield puzzle.replace(optimizer="adamw", micro_batch=4, accumulation_steps=8)
    yield puzzle.replace(optimizer="adamw", loss_chunks=8)
    yield puzzle.replace(optimizer="adamw", recompute="none", attention="eager")
    for precision, recompute in product(("amp-bf16", "bf16-master"), ("none", "full")):
        yield TrainingRun("gpt2-xl", 32, 1024, precision, recompute=recompute)
    yield TrainingRun("gpt2", 4, 256, "amp-bf16")
    yield TrainingRun("gpt2", 8, 512, "bf16-master", recompute="full")
    yield TrainingRun("gpt2-xl", 1, 1024, "bf16-master", "adamw-fused", accumulation_steps=32)
    # 02: every optimizer, each way to step, master weights
    masters = TrainingRun("gpt2", 1, 128, "bf16-master")
    plain = masters.replace(precision="fp32", attention="efficient")
    optimizers = ("sgd", "adafactor", "adam8bit", "momentum", "lion", "muon", "adamw")
    for name in (*optimizers, "adamw-loop", "adamw-foreach", "adamw-fused"):
        yield plain.replace(optimizer=name)
    yield from (masters.replace(optimizer=name) for name in ("adamw", "adamw-foreach"))
    # 03: number formats
    for precision in ("fp32", "amp-bf16", "bf16-master", "bf16-master-fp32grad", "bf16"):
        yield TrainingRun("gpt2", 4, 256, precision, attention="eager")
    # 05: two and three blocks of each variant, sweeps over b and s, a loss in chunks, a timeline
    block = TrainingRun("gpt2", 2, 512, "bf16-master")
    gpt = block.model
    yield TrainingRun("llama3-8b", 1, 4096, "bf16-master")
    models = [replace(gpt, dropout=0.0), replace(gpt, norm="rmsnorm"), replace(gpt, kv_heads=4)]
    models += [replace(gpt, mlp="swiglu", ffn=8 * gpt.hidden // 3), replace(gpt, unfused=True)]
    variants = [block, block.replace(attention="eager"), block.replace(precision="amp-bf16")]
    variants += [block.replace(model=model) for model in models]
    yield from (run.replace(model=replace(run.model, layers=layers)) for run in variants for layers in (2, 3))
    tiny = TrainingRun("tiny-gpt", 4, 128, "bf16-master")
    for kernel in ("eager", "flash"):
        yield from (tiny.replace(attention=kernel, micro_batch=b) for b in (2, 6, 10, 16))
        yield from (tiny.replace(attention=kernel, seq_len=s) for s in (64, 128, 192, 256))
    yield TrainingRun("gpt2-xl", 32, 1024, "bf16-master", loss_chunks=8)
    yield STORY
    # 06: each policy of recomputation, and the runs behind the hidden timelines
    gpt2 = TrainingRun("gpt2", 8, 1024, "bf16-master")
    for policy in ("none", "selective-attention", "selective", "full", "every-3", "offload"):
        yield gpt2.replace(recompute=policy)
    yield from (*lesson_06_checks.hidden_runs(), *lesson_06_checks.secret_runs())
    # 07: 100 sequences per step, cut into micro-batches, and 4 sequences alone
    gpt2 = TrainingRun("gpt2", 4, 1024)
    yield from (gpt2, *(gpt2.replace(micro_batch=b, accumulation_steps=100 // b) for b in (1, 4, 20, 100)))
    # 09: FSDP2 as rank 0 of 8 and of 64, and on 64 six blocks in four ways
    sharded = {"recompute": "full", "zero_stage": 3}
    for ranks in (8, 64):
        yield TrainingRun("llama3-8b", 1, 4096, "bf16-master", world_size=ranks, loss_chunks=8, **sharded)
        yield TrainingRun("gpt2-xl", 1, 1024, "bf16-master", world_size=ranks, **sharded)
    six = gpt_of_six_blocks(ranks=64)
    yield from (six, six.replace(zero_stage=2), six.replace(precision="amp-bf16"))
    yield six.replace(precision="fp32", attention="efficient")
    # 12: all weights trained, LoRA, and a small QLoRA step
    gpt2, everywhere = TrainingRun("gpt2", 4, 512), ("attention", "mlp")
    yield from (gpt2, gpt2.replace(lora_rank=8), gpt2.replace(lora_rank=8, lora_targets=everywhere))
    yield TrainingRun("tiny-llama", 4, 256, "bf16", "adam8bit", recompute="full", lora_rank=16,
                      lora_targets=everywhere, frozen_bits=4)  # fmt: skip
    # 13: two models on which calculators disagree, and a GPT as one of their formulas means it
    yield from (TrainingRun("llama3.1-8b", 2, 8192), TrainingRun("gpt2-xl", 32, 1024))
    yield TrainingRun("gpt2", 8, 1024, "bf16-master", attention="eager")


def replayed_runs() -> list[TrainingRun]:
    """Those of lessons 10 and 14, recorded with all their allocations: they are sent through the allocator."""
    step = TrainingRun("gpt2", 8, 512)
    return [step, step.replace(loss_chunks=2), *(run for run in broken_runs().values() if run != step)]


def saved_questions() -> list[Question]:
    """Questions about lesson 05's operations and MLPs to the hooks on a simulated GPU."""
    s, b, h = 1024, 4, 1024
    alone = [partial(torch.div, other=8), nn.Linear(h, h), nn.GELU(), nn.Softmax(-1), nn.Dropout(0.1), nn.LayerNorm(h)]
    mlps = [nn.Sequential(nn.Linear(h, 4 * h), middle, nn.Linear(4 * h, h)) for middle in (nn.GELU(), nn.ReLU())]
    return [
        *(Question(operation, [(b, s, h)], "bf16") for operation in (*alone, *mlps)),
        *(Question(operation, [(b, s, h)] * 2, "bf16") for operation in (torch.add, torch.mul)),
        Question(BilinearMLP(256, 1024), [(2, 512, 256)], "bf16"),
    ]


def answers() -> dict[str, list[Row]]:
    """Answers of the hooks to these questions, by key, on this machine's simulated GPU."""
    found = {}
    for question in saved_questions():
        assert question.key, f"{question.operation}: this operation cannot be described"
        saved = saved_by(question.operation, *question.inputs, dtype=question.dtype, device="gpu")
        found[question.key] = [astuple(item) for item in saved]
    return found


def main() -> None:
    """Simulate every run, ask every question, and write the files."""
    (FOLDER / saved_recordings.FILE).write_bytes(saved_recordings.save(answers(), date.today().isoformat()))
    measured = {key(run, steps): measure(run, source="simulated", steps=steps) for run, steps in lesson_runs()}
    (FOLDER / FILE).write_bytes(save(measured, {key(run, 2) for run in replayed_runs()}))


if __name__ == "__main__":
    main()
