"""Recomputation and offload: the same gradients to the bit, and exactly what each kind promises to keep."""

import dataclasses
from collections import Counter
from typing import Any

import pytest
import torch
from engine import GPT, LLAMA, shallow, simulate, storage_of, tiny
from test_tracker import allocator_events, cpu_run, tracker_events

from course_utils.measurement import Allocation, Measurement
from course_utils.measuring.step import Training
from course_utils.networks import recompute
from course_utils.run import TrainingRun

KINDS = ["full", "selective", "selective-attention", "offload", "every-3"]
DEEP = {
    family: tiny(family, layers=4, dropout=0.1 if family == "gpt2" else 0.0) for family in ("gpt2", "llama")
}


@pytest.fixture
def offload_everything(monkeypatch):
    monkeypatch.setattr(recompute, "SMALLEST_TO_OFFLOAD", 0)


def gradients(run: TrainingRun, autocast: bool = False) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    training = Training(run, "cpu", simulated=False)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        logits = training.network(training.tokens)
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), training.targets.flatten()).backward()
    return {
        name: weight.grad for name, weight in training.network.named_parameters() if weight.grad is not None
    }


@pytest.mark.parametrize(
    ("kind", "family", "attention", "autocast"),
    [
        *((kind, "gpt2", "eager", False) for kind in KINDS),
        *((kind, "llama", "efficient", True) for kind in ("selective", "offload")),
    ],
)
def test_gradients_are_the_same_to_the_bit_with_dropout(
    kind, family, attention, autocast, offload_everything
):
    run = TrainingRun(DEEP[family], 2, 64, "fp32", attention=attention)
    expected = gradients(run, autocast)
    found = gradients(run.replace(recompute=kind), autocast)
    assert found.keys() == expected.keys() and expected
    for name, gradient in expected.items():
        assert torch.equal(found[name], gradient), name


def model(family: str, layers: int = 3) -> Any:
    return shallow({"gpt2": GPT, "llama": LLAMA}[family], layers)


def kept(measured: Measurement) -> list[Allocation]:
    loss = max(mark.event for mark in measured.timeline.marks if mark.phase == "loss")
    alive = [item for item in measured.allocations if item.alive_at(loss) and item.kind == "activations"]
    return [item for item in alive if item.module.startswith("blocks.")]


def test_selective_keeps_products_and_attention_and_makes_the_rest_again():
    run = TrainingRun(model("gpt2"), 2, 128, recompute="selective")
    measured = simulate(run)
    found = Counter(item.operation for item in kept(measured))
    products = {operator for operator in found if operator == "addmm" or "attention" in operator}
    assert set(found) - products == {"add"}  # the stream from block to block, which each checkpoint keeps
    assert found["add"] == run.model.layers and found["addmm"] == 4 * run.model.layers
    again = [item for item in measured.allocations if item.phase == "backward" and item.kind == "activations"]
    assert not {item.operation for item in again} & products
    assert {"gelu", "native_dropout"} <= {item.operation for item in again}


def test_a_storage_saved_several_times_travels_once(offload_everything):
    x = torch.randn(6, 4, requires_grad=True)
    hooks = recompute.Offloading(set(), set())
    with hooks:
        q, k = (x * 1.0).split(2, dim=1)  # two views of one storage
        y = (q * k).sum()
        copies = {id(copy) for copy, _ in hooks.travelled.values()}
    assert len(copies) == 1
    y.backward()
    left, right = x.detach().split(2, dim=1)
    assert x.grad is not None and torch.equal(x.grad, torch.cat((right, left), dim=1))
    del q, k
    assert not hooks.travelled  # nothing is remembered of a storage that is gone


def test_weights_and_what_blocks_share_stay_on_the_device(offload_everything, monkeypatch):
    mask = torch.randn(3, 8)
    travelled = set[int]()

    class Block(torch.nn.Linear):
        def forward(self, x, by):  # pyrefly: ignore [bad-override]
            return super().forward(x) * by[0]

    class Spy(recompute.HostCopy):
        def __init__(self, tensor: torch.Tensor) -> None:
            super().__init__(tensor)
            travelled.add(storage_of(tensor))

    monkeypatch.setattr(recompute, "HostCopy", Spy)
    block = Block(8, 8)
    y = recompute.run_blocks([block], torch.randn(3, 8), ((mask,),), "offload")
    assert travelled and travelled.isdisjoint({storage_of(block.weight), storage_of(mask)})
    y.sum().backward()
    assert block.weight.grad is not None


@pytest.mark.parametrize(
    "choices",
    [
        {"recompute": "full", "accumulation_steps": 2},
        {"recompute": "selective"},
        {"recompute": "selective-attention"},
        {"recompute": "offload"},
        {"loss_chunks": 3, "recompute": "every-2"},
        {"lora_rank": 4, "lora_targets": ("attention", "mlp")},
    ],
    ids=str,
)
def test_every_allocation_is_seen_in_order(choices, offload_everything):
    """A policy of selective checkpoints is a dispatch mode too, but not there when gradients are joined."""
    run = cpu_run("llama", **choices)
    run = run.replace(model=dataclasses.replace(run.model, layers=3))
    assert tracker_events(run) == allocator_events(run)
