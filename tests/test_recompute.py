"""Recomputation and offload: the same gradients to the bit, and exactly what each kind promises to keep."""

import dataclasses
from collections import Counter
from typing import Any

import pytest
import torch
from engine import GPT, LLAMA, Operators, Unwatched, shallow, simulate, tiny
from test_tracker import allocator_events, cpu_run, tracker_events

from course_utils.measurement import Allocation, Measurement
from course_utils.measuring.simulated import simulated_gpu
from course_utils.measuring.step import Training
from course_utils.networks import recompute
from course_utils.run import RECOMPUTES, TrainingRun
from course_utils.units import round_up

KINDS = [*RECOMPUTES[1:], "every-2", "every-3", "every-5"]
DEEP = {
    family: tiny(family, layers=5, dropout=0.1 if family == "gpt2" else 0.0) for family in ("gpt2", "llama")
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


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("attention", ["eager", "efficient"])
@pytest.mark.parametrize("family", DEEP)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sweep(20)
def test_gradients_are_the_same_to_the_bit_with_dropout(
    kind, family, attention, autocast, offload_everything
):
    run = TrainingRun(DEEP[family], 2, 64, "fp32", attention=attention)
    expected = gradients(run, autocast)
    found = gradients(run.replace(recompute=kind), autocast)
    assert found.keys() == expected.keys() and expected
    for name, gradient in expected.items():
        assert torch.equal(found[name], gradient), name


def model(family: str, layers: int = 5) -> Any:
    return shallow({"gpt2": GPT, "llama": LLAMA}[family], layers)


def kept(measured: Measurement) -> list[Allocation]:
    loss = max(mark.event for mark in measured.timeline.marks if mark.phase == "loss")
    alive = [item for item in measured.allocations if item.alive_at(loss) and item.kind == "activations"]
    return [item for item in alive if item.module.startswith("blocks.")]


def activations(run: TrainingRun) -> int:
    return simulate(run).moments["end of forward"]["activations"]


def operators_of(run: TrainingRun) -> list[str]:
    with simulated_gpu(run.attention):
        training = Training(run, "cuda", simulated=True)
        with Operators() as operators:
            training.step(Unwatched())
    return operators.names


@pytest.mark.parametrize(("precision", "attention"), [("amp-bf16", "flash"), ("bf16-master", "eager")])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize(
    ("kind", "checkpoints"), [("every-2", 3), ("every-3", 2), ("sqrt", 3), ("every-5", 1)]
)
@pytest.mark.sweep(5)
def test_one_stream_is_kept_for_each_group_of_blocks(family, kind, checkpoints, precision, attention):
    run = TrainingRun(model(family), 2, 128, precision, attention=attention, recompute="full")
    stream = round_up((4 if precision.startswith("amp") else 2) * 2 * 128 * run.model.hidden)
    assert (
        activations(run) - activations(run.replace(recompute=kind))
        == (run.model.layers - checkpoints) * stream
    )


@pytest.mark.parametrize("attention", ["flash", "efficient"])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_selective_keeps_products_and_attention_and_makes_the_rest_again(family, attention):
    run = TrainingRun(model(family), 2, 128, attention=attention, recompute="selective")
    measured = simulate(run)
    found = Counter(item.operation for item in kept(measured))
    products = {operator for operator in found if operator in ("mm", "addmm") or "attention" in operator}
    assert set(found) - products == {"add"}  # the stream from block to block, which each checkpoint keeps
    assert found["add"] == run.model.layers
    assert found["mm"] + found["addmm"] == run.model.layers * (4 if family == "gpt2" else 7)
    again = [item for item in measured.allocations if item.phase == "backward" and item.kind == "activations"]
    assert not {item.operation for item in again} & products
    assert {"gelu", "native_dropout"} <= {item.operation for item in again} or family == "llama"


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_selective_with_attention_written_out_keeps_its_two_products(family):
    run = TrainingRun(model(family), 2, 128, "bf16-master", attention="eager", recompute="selective")
    found = Counter(item.operation for item in kept(simulate(run)))
    assert set(found) <= {"add", "mm", "addmm", "bmm"} and found["bmm"] == 2 * run.model.layers


@pytest.mark.parametrize(
    ("family", "precision"), [("gpt2", "amp-bf16"), ("gpt2", "bf16-master"), ("llama", "amp-bf16")]
)
def test_selective_attention_keeps_nothing_of_size_s_by_s(family, precision):
    run = TrainingRun(model(family), 2, 256, precision, attention="eager")
    everything = simulate(run)
    selective = simulate(run.replace(recompute="selective-attention"))

    def square(allocations: list[Allocation]) -> list[Allocation]:
        return [item for item in allocations if item.shape[-2:] == (256, 256) and item.kind == "activations"]

    assert square(kept(everything)) and not square(kept(selective))
    core = sum(item.bytes for item in square(kept(everything)))
    assert activations(run) - selective.moments["end of forward"]["activations"] >= core
    again = [
        item for item in square(list(selective.allocations)) if (item.step, item.phase) == (2, "backward")
    ]
    assert sum(item.bytes for item in again) == core


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_selective_attention_runs_a_fused_kernel_twice_and_keeps_none_of_its_results(family):
    run = TrainingRun(model(family), 2, 128, recompute="selective-attention")
    assert operators_of(run).count("_scaled_dot_product_flash_attention") == 2 * run.model.layers
    measured = simulate(run)
    flash = [item for item in kept(measured) if "flash" in item.operation]
    assert {item.dtype for item in flash} == {"bfloat16"}  # its output, which the next matrix product keeps
    assert len(flash) == run.model.layers


@pytest.mark.parametrize("kind", ["full", "every-2", "selective"])
def test_dropout_runs_once_more_for_each_recomputed_block_on_a_simulated_gpu(kind):
    run = TrainingRun(dataclasses.replace(model("gpt2"), dropout=0.1), 2, 128)
    # after attention's output and after the MLP's; a fused kernel drops for itself
    in_blocks = 2 * run.model.layers
    assert operators_of(run).count("native_dropout") == in_blocks + 1
    assert operators_of(run.replace(recompute=kind)).count("native_dropout") == 2 * in_blocks + 1


@pytest.mark.parametrize("precision", ["amp-bf16", "bf16-master"])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_offload_leaves_small_tensors_and_the_last_stream(family, precision):
    run = TrainingRun(model(family), 2, 512, precision, recompute="offload")
    measured = simulate(run)
    stays = [item for item in kept(measured) if item.bytes >= recompute.SMALLEST_TO_OFFLOAD]
    # the input of the final norm, which is no block's affair
    assert [item.operation for item in stays] == ["add"]
    back = [item for item in measured.allocations if item.phase == "backward" and item.operation == "empty"]
    assert back and {item.kind for item in back} == {"activations"}
    assert all(item.died is not None for item in back)


def test_offloaded_activations_come_back_complete():
    """What left is what comes back: each storage once, or again where a second operator needs it later."""
    run = TrainingRun(model("gpt2"), 2, 512, "bf16-master", recompute="none")
    before = Counter(
        item.bytes for item in kept(simulate(run)) if item.bytes >= recompute.SMALLEST_TO_OFFLOAD
    )
    measured = simulate(run.replace(recompute="offload"))
    empty = (2, "backward", "empty")
    back = Counter(
        item.bytes for item in measured.allocations if (item.step, item.phase, item.operation) == empty
    )
    # the last stream never left
    assert before - back <= Counter({round_up(2 * 2 * 512 * run.model.hidden): 1})


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


def test_weights_and_what_blocks_share_stay_on_the_device(offload_everything):
    linear = torch.nn.Linear(8, 8)
    mask = torch.randn(3, 8)

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = linear

        def forward(self, x: torch.Tensor, by: tuple[torch.Tensor]) -> torch.Tensor:
            return self.linear(x) * by[0]

    travelled: list[int] = []

    class Spy(recompute.HostCopy):
        def __init__(self, tensor: torch.Tensor) -> None:
            super().__init__(tensor)
            travelled.append(tensor.untyped_storage()._cdata)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recompute, "HostCopy", Spy)
        y = recompute.run_blocks([Block()], torch.randn(3, 8), ((mask,),), "offload")
    assert travelled
    assert {tensor.untyped_storage()._cdata for tensor in (linear.weight, mask)}.isdisjoint(travelled)
    y.sum().backward()
    assert linear.weight.grad is not None


def test_autocasts_copies_of_weights_are_not_offloaded():
    run = TrainingRun(model("llama"), 2, 512, "amp-bf16")
    standard = simulate(run)
    offloaded = simulate(run.replace(recompute="offload"))
    moment = "end of forward"
    assert standard.moments[moment]["weight_copies"] == offloaded.moments[moment]["weight_copies"] > 0


LORA = {"lora_rank": 4, "lora_targets": ("attention", "mlp")}


@pytest.mark.parametrize("accumulation_steps", [1, 2])
@pytest.mark.parametrize(
    "choices",
    [*({"recompute": kind} for kind in KINDS if kind != "every-5"), {"loss_chunks": 3}, LORA],
    ids=lambda choices: "-".join(map(str, choices.values())),
)
@pytest.mark.sweep(7)
def test_every_allocation_is_seen_in_order(choices, accumulation_steps, offload_everything):
    """A policy of selective checkpoints is a dispatch mode too, but not there when gradients are joined."""
    run = cpu_run("llama", accumulation_steps=accumulation_steps)
    run = run.replace(model=dataclasses.replace(run.model, layers=3), **choices)
    assert tracker_events(run) == allocator_events(run)
