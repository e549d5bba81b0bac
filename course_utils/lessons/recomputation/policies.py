"""Arithmetic that a policy of recomputation costs, as a formula, and a small network to count it with."""

from dataclasses import replace

from course_utils.estimating.published import korthikanti_model_flops, selective_recomputation_flops
from course_utils.models import PRESETS, TransformerConfig
from course_utils.run import TrainingRun


def recomputed_flops(run: TrainingRun) -> int:
    """FLOPs of matrix products that backward runs again under the run's policy, a core of attention as a whole.

    Forward of all blocks takes (24·b·s·h² + 4·b·s²·h)·L (Korthikanti et al. 2022, appendix A): an MLP of 4h without a
    gate, and attention as if it were not causal. ValueError for a gate, grouped queries or experts.
    """
    model = run.model
    if model.mlp != "gelu" or model.kv_heads != model.heads or model.experts:
        raise ValueError(f"{model.name}: the formulas are for GPT's blocks, without gates, grouped queries or experts")
    if run.blocks_per_checkpoint:
        s, b, h, L = run.seq_len, run.micro_batch, model.hidden, model.layers
        return 24 * b * L * s * h * h + selective_recomputation_flops(run)
    return selective_recomputation_flops(run) if run.recompute == "selective-attention" else 0


def added_percent(run: TrainingRun) -> float:
    """FLOPs that the policy runs again, in percent of the model's own, forward and backward."""
    return 100 * recomputed_flops(run) / korthikanti_model_flops(run)


def small_gpt(layers: int = 6, hidden: int = 128, vocab: int = 1000) -> TransformerConfig:
    """A GPT small enough to train on any processor, with dropout."""
    return replace(PRESETS["tiny-gpt"], layers=layers, hidden=hidden, heads=4, vocab=vocab, ffn=4 * hidden)
