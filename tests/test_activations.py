"""What forward keeps: the closed form's rows against the storages that autograd really saves, in bytes."""

from collections import Counter
from itertools import product

import pytest
import torch
from engine import RECIPES, Operators, storage_of, tiny

from course_utils.estimating.formula import activation_bytes, block_table, loss_bytes
from course_utils.measuring.simulated import simulated_gpu
from course_utils.measuring.step import Training
from course_utils.networks import loss_of
from course_utils.run import TrainingRun

GPT = tiny("gpt2", dropout=0.1)
LLAMA = tiny("llama")
RUNS = [
    TrainingRun(model, 2, 48, precision, attention=kernel)
    for model, (precision, kernel) in product((GPT, LLAMA), RECIPES)
]
RUNS += [
    TrainingRun(tiny("gpt2", tied=False), 1, 65, "bf16-master", attention="eager"),
    TrainingRun(tiny("llama", kv_heads=4), 1, 65, "amp-bf16", attention="eager"),
    TrainingRun(tiny("llama", logits="compute"), 1, 65, "bf16-master", attention="efficient"),
    TrainingRun(tiny("llama", unfused=True), 2, 48, "amp-bf16", attention="eager"),
]
A_FEW_NUMBERS = 64
"""Bytes: storages up to this size, such as a kernel's seed, are in no row."""


class Saved:
    """The storages that autograd saves in a step's forward: in the last block, in the rest, in the loss.

    Weights, autocast's copies of them and the batch are there anyway and are left out.
    """

    def __init__(self, run: TrainingRun) -> None:
        self.kept: dict[int, tuple[str, int]] = {}  # by storage: where it was saved first, and its bytes
        self.go_to("rest of forward")
        with simulated_gpu(run.attention):
            training = Training(run, "cuda", simulated=True)
            last = training.network.get_submodule(f"blocks.{run.model.layers - 1}")
            last.register_forward_pre_hook(lambda *_: self.go_to("block"))
            last.register_forward_hook(lambda *_: self.go_to("rest of forward"))
            weights = {storage_of(parameter) for parameter in training.network.parameters()}
            hooks = torch.autograd.graph.saved_tensors_hooks(self.keep, lambda tensor: tensor)
            with Operators(weights) as operators, hooks, training.autocast():
                logits = training.network(training.tokens)
                self.go_to("loss")
                loss = loss_of(logits, training.targets, run.model.logits == "fp32")
            assert loss.requires_grad
            for tensor in (training.tokens, training.targets, *operators.copies):
                self.kept.pop(storage_of(tensor), None)
            for storage in weights:
                self.kept.pop(storage, None)

    def go_to(self, where: str) -> None:
        self.where = where

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        size = tensor.untyped_storage().nbytes()
        if size > A_FEW_NUMBERS:
            self.kept.setdefault(storage_of(tensor), (self.where, size))
        return tensor

    def sizes(self, *places: str) -> Counter[int]:
        """How many storages of each size were first saved at these places."""
        return Counter(size for where, size in self.kept.values() if where in places)

    def bytes(self, *places: str) -> int:
        return sum(size * count for size, count in self.sizes(*places).items())


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_each_row_of_the_formula_is_a_storage_that_autograd_keeps(run: TrainingRun) -> None:
    saved = Saved(run)
    assert saved.sizes("block") == Counter(block_table(run).values())
    assert saved.bytes("block", "rest of forward") == activation_bytes(run)
    assert saved.bytes("loss") == loss_bytes(run)
