"""Lesson 11's closed forms: bytes that a rank keeps by ZeRO's formulas, and what FSDP2 gathers."""

from ... import TrainingRun, TransformerConfig
from ...estimating.formula_of_ranks import buffers
from ...estimating.published import zero_sharded_state_bytes


def formula(run: TrainingRun) -> dict[str, int]:
    """Bytes of a rank's states by kind; ZeRO's formula for mixed-precision Adam: 2 + 2 + 12 per parameter."""
    return zero_sharded_state_bytes(run.model.parameters, run.zero_stage, run.world_size)


def cut_three_ways(parameters: int, ranks: int) -> dict[str, dict[str, int]]:
    """Bytes by kind of a rank with mixed-precision Adam, for no sharding and ZeRO's three stages, by name."""
    names = ("no sharding", "stage 1: optimizer", "stage 2: + gradients", "stage 3: + parameters")
    return {name: zero_sharded_state_bytes(parameters, stage, ranks) for stage, name in enumerate(names)}


def gathered_terms(run: TrainingRun) -> dict[str, int]:
    """Bytes of communication at the peak: a block goes backward at stage 3 of FSDP2; by name."""
    held = buffers(run)
    outer, block = held.outer, held.block
    return {
        "embedding and head, gathered": outer.whole,
        "a block, gathered": block.whole,
        "the next block, on its way": block.arrived,
        "a finished block's gradients, flat": block.summed,
    }


def tokens_to_hide(bytes_each: float, flops_per_second: float, bytes_per_second: float) -> float:
    """Tokens per rank and step from which arithmetic takes as long as sending `bytes_each` per parameter.

    A token takes 6 FLOPs per parameter, forward and backward (Kaplan et al. 2020, section 2.1): N cancels.
    """
    return bytes_each / bytes_per_second * flops_per_second / 6


def gpt_of_six_blocks(ranks: int = 64) -> TrainingRun:
    """A GPT of six wide blocks and few words, at stage 3: small to simulate, and nearly all in blocks."""
    model = TransformerConfig("GPT of six blocks", "gpt2", 6, 1024, heads=16, vocab=1000, max_positions=128)
    return TrainingRun(model, 1, 128, "bf16-master", world_size=ranks, zero_stage=3)
