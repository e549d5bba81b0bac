"""What forward keeps: the estimate's list of tensors against the tensors that autograd really saves."""

from collections import Counter

import pytest
import torch
from engine import GPT, LLAMA, RECIPES, Operators, shallow, simulate, storage_of, tiny

from course_utils.estimating.exact.activations import (
    Saved,
    activation_bytes,
    block_bytes,
    block_input,
    block_saved,
    head_saved,
    loss_saved,
    stem_saved,
    sum_bytes,
)
from course_utils.estimating.published import korthikanti_block_bytes
from course_utils.measuring.simulated import simulated_gpu
from course_utils.measuring.step import Training
from course_utils.models import PRESETS
from course_utils.networks import loss_of
from course_utils.run import TrainingRun
from course_utils.units import BLOCK, round_up

FAMILIES = {
    "gpt2": shallow(GPT, 2),
    "llama": shallow(LLAMA, 2),
    "llama without groups": tiny("llama", kv_heads=4, layers=3),
    "gpt2 without dropout": tiny("gpt2", layers=3),
    "gpt2 with its own head": tiny("gpt2", dropout=0.1, tied=False),
    "gpt2 with fp32 logits": tiny("gpt2", dropout=0.1, logits="fp32"),
    "llama without fp32 logits": tiny("llama", layers=3, logits="compute"),
}


def saved_by(run: TrainingRun) -> tuple[Counter[int], Counter[int]]:
    """How many storages of each rounded size autograd keeps: for forward, and for the loss.

    Weights, autocast's copies of them and the batch are there anyway and are left out; so is the efficient
    kernel's random state, which every GPU has on the host.
    """
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() or tensor.dtype != torch.int64:
            kept.setdefault(storage_of(tensor), tensor)
        return tensor

    with simulated_gpu(run.attention):
        training = Training(run, "cuda", simulated=True)
        weights = {storage_of(parameter) for parameter in training.network.parameters()}
        hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
        with Operators(weights) as operators, hooks, training.autocast():
            logits = training.network(training.tokens)
            in_forward = set(kept)
            loss = loss_of(logits, training.targets, run.model.logits == "fp32")
        there_anyway = (training.tokens, training.targets, *operators.copies)
        known = weights | {storage_of(tensor) for tensor in there_anyway}
        forward: Counter[int] = Counter()
        of_loss: Counter[int] = Counter()
        for key, tensor in kept.items():
            if key not in known:
                found = forward if key in in_forward else of_loss
                found[round_up(tensor.untyped_storage().nbytes())] += 1
        assert loss.requires_grad
    return forward, of_loss


def sizes_of(saved: list[Saved]) -> Counter[int]:
    return Counter(item.bytes for item in saved)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("precision", "attention"), RECIPES)
@pytest.mark.parametrize(("micro_batch", "seq_len"), [(2, 48), (1, 65)])
@pytest.mark.sweep(16)
def test_every_tensor_that_autograd_saves_is_listed(family, precision, attention, micro_batch, seq_len):
    run = TrainingRun(FAMILIES[family], micro_batch, seq_len, precision, attention=attention)
    in_forward, in_loss = saved_by(run)
    listed = stem_saved(run) + run.model.layers * block_saved(run) + head_saved(run)
    assert sizes_of(listed) == in_forward
    saved = sum(size * count for size, count in in_forward.items())
    assert activation_bytes(run) == sum_bytes(listed) == saved
    assert sizes_of(loss_saved(run)) == in_loss


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("recipe", RECIPES[::3])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.sweep(6)
def test_saved_tensors_are_what_the_tracker_calls_activations(family, recipe, recompute):
    run = TrainingRun(FAMILIES[family], 2, 48, recipe[0], attention=recipe[1], recompute=recompute)
    measured = simulate(run)
    kept = activation_bytes(run)
    assert measured.moments["end of forward"]["activations"] == kept
    the_loss = BLOCK  # nothing saves it, but backward begins with it
    expected = kept + sum_bytes(loss_saved(run)) + the_loss
    assert measured.moments["after loss"]["activations"] == expected


def test_full_recomputation_keeps_the_stream_between_blocks_alone():
    run = TrainingRun("gpt2-xl", micro_batch=2, recompute="full")
    without = run.replace(recompute="none")
    saving = activation_bytes(without) - activation_bytes(run)
    assert saving == run.model.layers * (block_bytes(without) - block_input(run).bytes)


@pytest.mark.parametrize(("name", "scores"), [("gpt2-xl", 1024), ("gpt3-175b", 2048), ("gpt2", 512)])
def test_eager_16_bit_is_korthikantis_formula_and_the_norms_statistics(name, scores):
    run = TrainingRun(name, 4, scores, "bf16-master", attention="eager")
    statistics = 4 * (4 * run.micro_batch * run.seq_len)  # mean and inverse deviation of two norms, fp32
    assert block_bytes(run) == korthikanti_block_bytes(run) + statistics


@pytest.mark.parametrize("name", ["gpt2-xl", "llama3-8b"])
def test_fused_attention_has_no_quadratic_term(name):
    run = TrainingRun(name, 1, 512, attention="flash")
    assert block_bytes(run.replace(seq_len=1024)) < 2.001 * block_bytes(run)
    eager = run.replace(attention="eager")
    assert block_bytes(eager.replace(seq_len=1024)) > 2.2 * block_bytes(eager)


def test_activations_are_linear_in_the_micro_batch():
    one, two, three = (block_bytes(TrainingRun("llama3-8b", b, 1024)) for b in (1, 2, 3))
    rng_state = 2 * 512  # one seed and one offset a call, however many sequences
    assert two - one == three - two == one - rng_state


def test_swiglu_keeps_four_wide_tensors_where_gelu_keeps_two():
    def wide(name: str) -> int:
        run = TrainingRun(name, 1, 1024, "bf16-master")
        size = 2 * run.seq_len * run.model.ffn
        return sum(item.size == size for item in block_saved(run))

    assert (wide("llama3-8b"), wide("gpt2-xl")) == (4, 2)


@pytest.mark.parametrize("name", PRESETS)
def test_every_saved_tensor_says_why(name):
    run = TrainingRun(name, 1, 128)
    for item in stem_saved(run) + block_saved(run) + head_saved(run) + loss_saved(run):
        assert item.operation and item.name and item.why
        assert item.size > 0 and item.bytes % 512 == 0 and 0 <= item.bytes - item.size < 512
