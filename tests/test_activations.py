"""What forward keeps: the estimate's list of tensors against the tensors that autograd really saves."""

from collections import Counter

import pytest
import torch
from engine import GPT, LLAMA, Operators, shallow, storage_of, tiny

from course_utils.estimating.exact.activations import (
    Saved,
    activation_bytes,
    block_saved,
    head_saved,
    loss_saved,
    stem_saved,
    sum_bytes,
)
from course_utils.measuring.simulated import simulated_gpu
from course_utils.measuring.step import Training
from course_utils.networks import loss_of
from course_utils.run import TrainingRun
from course_utils.units import round_up

RUNS = [
    TrainingRun(shallow(GPT, 2), 1, 65, "bf16-master", attention="eager"),
    TrainingRun(shallow(LLAMA, 2), 2, 48, "amp-fp16"),
    TrainingRun(tiny("llama", kv_heads=4, layers=3), 1, 65, "amp-bf16", attention="eager"),
    TrainingRun(tiny("llama", layers=3, logits="compute"), 2, 48, "bf16-master", attention="efficient"),
    TrainingRun(tiny("gpt2", dropout=0.1, tied=False), 1, 65, "fp32", attention="efficient"),
]


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


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_every_tensor_that_autograd_saves_is_listed(run):
    in_forward, in_loss = saved_by(run)
    listed = stem_saved(run) + run.model.layers * block_saved(run) + head_saved(run)
    assert sizes_of(listed) == in_forward
    saved = sum(size * count for size, count in in_forward.items())
    assert activation_bytes(run) == sum_bytes(listed) == saved
    assert sizes_of(loss_saved(run)) == in_loss
