"""Arithmetic that a policy of recomputation costs: as a formula, and counted while a small network really runs."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from time import process_time

import torch
from torch.nn.functional import cross_entropy
from torch.utils.flop_counter import FlopCounterMode

from course_utils.estimating.published import korthikanti_model_flops, selective_recomputation_flops
from course_utils.models import PRESETS, TransformerConfig
from course_utils.networks import build_network
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


def small_step(run: TrainingRun) -> Callable[[], torch.Tensor]:
    """The run's network and random tokens on the CPU in fp32, the same each time: a function that gives its loss."""
    torch.manual_seed(0)
    network = build_network(run.model, run.attention, run.recompute)
    tokens = torch.randint(run.model.vocab, (run.micro_batch, run.seq_len + 1))
    return lambda: cross_entropy(network(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def counted_flops(run: TrainingRun) -> tuple[int, int]:
    """FLOPs of the forward and of the backward pass, counted by torch as the matrix products run on the CPU."""
    step = small_step(run)
    with FlopCounterMode(display=False) as counter:
        loss = step()
        forward = counter.get_total_flops()
        loss.backward()
    return forward, counter.get_total_flops() - forward


def seconds(runs: Mapping[str, TrainingRun], repeats: int = 5) -> dict[str, float]:
    """The quickest of several forward and backward passes of each run, in seconds of one core's processor time.

    Runs take turns, so that what slows the machine slows all of them; a first round to warm up is not counted.
    """
    steps = {name: small_step(run) for name, run in runs.items()}
    took: dict[str, list[float]] = {name: [] for name in runs}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for _ in range(repeats + 1):
            for name, step in steps.items():
                begin = process_time()
                step().backward()
                took[name].append(process_time() - begin)
    finally:
        torch.set_num_threads(threads)
    return {name: min(times[1:]) for name, times in took.items()}
