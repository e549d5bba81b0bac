"""FSDP2 as rank 0 of many: the closed form is near in more recipes, depths and numbers of ranks."""

from typing import Any

import pytest
from engine import GPT, assert_rank_0_is_near, shallow, tiny

from course_utils.run import TrainingRun

RUN = TrainingRun(tiny("gpt2"), 2, 64, world_size=8, zero_stage=3)
LARGE_VOCABULARY = {
    "model": tiny("llama", vocab=20_000),
    "micro_batch": 1,
    "seq_len": 8,
    "recompute": "full",
    "world_size": 2,
}

CHANGES: list[dict[str, Any]] = [
    {"zero_stage": 2},
    {"precision": "bf16", "optimizer": "adamw-fused", "loss_chunks": 4},
    {"precision": "bf16-master", "world_size": 64},
    {**LARGE_VOCABULARY, "precision": "bf16-master"},
    {**LARGE_VOCABULARY, "precision": "fp16-master"},
    {"model": tiny("llama", layers=4), "micro_batch": 8, "recompute": "full", "precision": "bf16-master"},
    {"model": tiny("gpt2", layers=5), "optimizer": "adamw-loop", "clip_grad_norm": 1.0, "seq_len": 8},
    {"model": tiny("gpt2", layers=3), "micro_batch": 8, "recompute": "selective-attention", "loss_chunks": 4},
    {"model": shallow(GPT, 4), "micro_batch": 1, "seq_len": 512},
    {"model": tiny("llama", layers=3), "precision": "bf16-master", "world_size": 2, "zero_stage": 2},
    {"model": shallow(GPT, 3), "seq_len": 512, "precision": "bf16-master", "zero_stage": 2, "world_size": 7},
]


@pytest.mark.parametrize("changes", CHANGES, ids=str)
def test_peak_is_near_and_states_are_exact(changes: dict[str, Any]) -> None:
    assert_rank_0_is_near(RUN.replace(**changes))
