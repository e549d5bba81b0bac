"""Arithmetic that a policy of recomputation costs, in percent of the step's, and a small network to count it with."""

from dataclasses import replace

from course_utils import PRESETS, TrainingRun, TransformerConfig
from course_utils.estimating.step_time import model_flops, recomputed_flops


def added_percent(run: TrainingRun) -> float:
    """FLOPs that the policy runs again, in percent of the model's own, forward and backward."""
    return 100 * recomputed_flops(run) / model_flops(run)


def small_gpt(layers: int = 6, hidden: int = 128, vocab: int = 1000) -> TransformerConfig:
    """A GPT small enough to train on any processor, with dropout."""
    return replace(PRESETS["tiny-gpt"], layers=layers, hidden=hidden, heads=4, vocab=vocab, ffn=4 * hidden)
