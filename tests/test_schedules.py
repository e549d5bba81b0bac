"""Lesson 06's schedules against closed forms, policies against counted FLOPs, and the checkpoint by hand."""

import warnings
from dataclasses import replace
from functools import partial

import pytest
import torch
from lesson_source import SOURCES, names_from_cells
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from course_utils import PRESETS, TrainingRun, TransformerConfig, estimate, gpu
from course_utils.estimating.published import korthikanti_model_flops
from course_utils.estimating.step_time import recomputed_flops, step_seconds
from course_utils.lessons.recomputation.figures import pareto, pareto_front, schedule_figure
from course_utils.lessons.recomputation.schedules import (
    Schedule,
    best_interval,
    keep_all,
    keep_every,
    keep_none,
    memory_every,
)
from course_utils.lessons.recomputation.widget import SCHEDULES, schedule_player
from course_utils.networks import build_network
from course_utils.networks.recompute import KEPT


def small_gpt(layers: int = 6, hidden: int = 128, vocab: int = 1000) -> TransformerConfig:
    """A GPT small enough to train on any processor, with dropout."""
    return replace(PRESETS["tiny-gpt"], layers=layers, hidden=hidden, heads=4, vocab=vocab, ffn=4 * hidden)


SMALL = TrainingRun(small_gpt(layers=4, hidden=64, vocab=100), 2, 32, "fp32", attention="eager")


@pytest.mark.parametrize("nodes", [1, 2, 7, 24, 48])
def test_schedules_cost_what_their_formulas_say(nodes: int) -> None:
    assert (keep_all(nodes).memory, keep_all(nodes).forwards) == (nodes, nodes)
    assert (keep_none(nodes).memory, keep_none(nodes).forwards) == (2, nodes + nodes * (nodes + 1) // 2)
    for k in range(1, nodes + 1):
        schedule = keep_every(nodes, k)
        assert schedule.memory == memory_every(nodes, k)
        assert schedule.forwards == 2 * nodes


@pytest.mark.parametrize(
    "schedule", [keep_all(9), keep_none(9), keep_every(9, 4)], ids=lambda item: item.name
)
def test_backward_finds_what_it_needs(schedule: Schedule) -> None:
    """b runs from last to first, each with its value; f runs from a checkpoint or after its neighbor."""
    backward = [tick for tick in schedule.ticks if tick.kind == "b"]
    assert [tick.node for tick in backward] == list(range(schedule.nodes, 0, -1))
    assert all(tick.node in tick.kept for tick in backward)
    in_hand = 1
    for tick in schedule.ticks:
        if tick.kind == "f":
            assert tick.node == in_hand or tick.node in tick.checkpoints
            in_hand = tick.node + 1


def test_best_interval_is_the_square_root_for_equal_nodes_alone() -> None:
    assert (best_interval(64), best_interval(48, 17), best_interval(48, 57)) == (8, 2, 1)


def test_figure_shows_the_tick() -> None:
    figure = schedule_figure(keep_every(6, 2), 7)
    assert "Tick 7 of 18: f5 runs again. Values kept: 5. Checkpoints: 1, 3, 5." in figure.alt
    assert figure.svg.count("data-node=") == 12
    assert "6 nodes keep at most 5 values and take 12 runs of f" in schedule_figure(keep_every(6, 2), 18).alt


def test_player_follows_its_controls() -> None:
    player = schedule_player("keep every k", nodes=8, k=2, tick=3)
    assert player.message == "Tick 3 of 24: f3 runs. Work so far: 3 runs of f (0 repeated) and 0 of b."
    player.play.value = 9
    assert player.controls["tick"].value == 9
    assert not player.controls["k"].disabled
    player.controls["schedule"].value = "keep none"
    assert player.controls["k"].disabled, "k counts for nothing here"
    assert player.schedule.forwards == 8 + 8 * 9 // 2
    assert player.controls["tick"].value == player.controls["tick"].max == len(player.schedule.ticks)
    player.controls["n"].value = 2
    assert player.message == "Tick 7 of 7: b1 runs. Work so far: 5 runs of f (3 repeated) and 2 of b."
    assert repr(player).startswith("A chain to step through")


def test_player_refuses_what_it_cannot_show() -> None:
    assert [schedule_player(name).schedule.nodes for name in SCHEDULES] == [8, 8, 8]
    with pytest.raises(ValueError, match="Known: keep all"):
        schedule_player("keep some")
    with pytest.raises(ValueError, match="nodes is 25"):
        schedule_player(nodes=25)


def counted_flops(run: TrainingRun) -> tuple[int, int]:
    """FLOPs of matrix products in forward and in backward, as the course's network runs on the CPU."""
    network = build_network(run.model, run.attention, run.recompute)
    tokens = torch.zeros(2, 32, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        loss = network(tokens).square().mean()
        forward = counter.get_total_flops()
        loss.backward()
    return forward, counter.get_total_flops() - forward


def test_step_counts_as_the_paper_says() -> None:
    forward, backward = counted_flops(SMALL)
    assert backward == 2 * forward
    assert forward + backward == korthikanti_model_flops(SMALL)


def test_the_lessons_own_gpt_counts_as_the_paper_says() -> None:
    cells = ("import predict, reveal", "def flash(", "class Block(", "class GPT(", "def eager(", "def flops(")
    names = names_from_cells("06", *cells)
    run = TrainingRun(small_gpt(), 2, 128, "fp32", attention="eager")
    again = sum(names["flops"](names["small"], partial(checkpoint, use_reentrant=False))) - names["whole"]
    assert names["whole"] == korthikanti_model_flops(run)
    assert again == recomputed_flops(run.replace(recompute="full"))


@pytest.mark.parametrize(
    ("policy", "part"), [("full", 1), ("every-2", 1), ("selective", 1), ("selective-attention", 2)]
)
def test_recomputation_counts_as_the_formula_says(policy: str, part: int) -> None:
    """torch's checkpoint stops before weights·v, the second of the core's two equal products."""
    run = SMALL.replace(recompute=policy)
    again = sum(counted_flops(run)) - sum(counted_flops(SMALL))
    assert recomputed_flops(run) == part * again


def test_front_leaves_out_what_is_beaten() -> None:
    points = {"a": (0.0, 9), "b": (1.0, 5), "c": (2.0, 5), "d": (3.0, 1)}
    assert pareto_front(points) == ["a", "b", "d"]
    assert "On the front: a, b, d." in pareto(points, "A title").alt
    assert "the cost (repeated arithmetic" in pareto(points, "A title").alt
    assert "the cost (time added)" in pareto(points, "A title", cost="time added").alt


XL = TrainingRun("gpt2-xl", 32, 1024, "bf16-master")


@pytest.mark.parametrize(("chunks", "best"), [(1, 4), (8, 2)])
def test_the_best_number_of_blocks_depends_on_the_loss(chunks: int, best: int) -> None:
    """Without the loss's three tensors it is the formula's, √(L/c) with c = 17."""
    peaks = {
        k: estimate(XL.replace(recompute=f"every-{k}", loss_chunks=chunks)).total for k in (1, 2, 3, 4, 6, 8)
    }
    assert min(peaks, key=lambda k: peaks[k]) == best
    assert chunks == 1 or best == best_interval(48, 17)


@pytest.mark.parametrize("name", ["A100-80GB", "H100-80GB"])
def test_checkpoints_hide_behind_forward_over_pcie_and_all_activations_do_not(name: str) -> None:
    card = gpu(name)
    assert card.rates is not None
    forward = step_seconds(XL, card)["model"] / 3
    everything = estimate(XL)["activations"] - estimate(XL.replace(recompute="offload"))["activations"]
    checkpoints = 48 * 2 * 1024 * 32 * 1600
    assert checkpoints / card.rates.host < forward < everything / card.rates.host / 5


def test_the_lessons_selective_policy_knows_every_attention_kernel_of_a_gpu() -> None:
    source = next(SOURCES.glob("06_*.py")).read_text(encoding="utf-8")
    kernels = [str(kernel).removeprefix("aten.") for kernel in KEPT if "attention" in str(kernel)]
    missing = [kernel for kernel in kernels if f"aten.{kernel}," not in source]
    assert len(kernels) == 4
    assert missing == ["_scaled_dot_product_flash_attention_for_cpu.default"]


def test_the_lessons_small_gpt_is_not_the_size_of_gpt2() -> None:
    """Its head is not tied, which adds V·h, and it has no P·h of positions and no last norm."""
    names = names_from_cells("06", "def flash(", "class Block(", "class GPT(")
    with torch.device("meta"):
        count = sum(weight.numel() for weight in names["GPT"](12, 768, 12, 50257).parameters())
    assert count == 162_249_216 == PRESETS["gpt2"].parameters + 50257 * 768 - 1024 * 768 - 2 * 768


BY_HAND = ("def flash(", "class Block(", "class GPT(", "class Recomputed", "def gradients(")


@pytest.mark.parametrize(("case", "off"), [((0.0, False), False), ((0.5, False), True), ((0.0, True), True)])
def test_the_naive_checkpoint_fails_where_the_lesson_says_and_pytorchs_does_not(
    case: tuple[float, bool], off: bool
) -> None:
    names = names_from_cells("06", *BY_HAND)
    gradients = names["gradients"]
    right = names["gradients"](names["keep_everything"], *case)
    for call, wrong in ((names["Recomputed"].apply, off), (partial(checkpoint, use_reentrant=True), False)):
        pairs = zip(gradients(call, *case), right, strict=True)
        assert all(torch.equal(mine, other) for mine, other in pairs) is not wrong


@pytest.mark.parametrize(("variant", "again"), [(True, 2), (False, 1)])
def test_only_the_variant_that_is_not_reentrant_stops_early(variant: bool, again: int) -> None:
    """Of the two products of the lesson's block, backward needs both inputs, not the second's output."""
    names = names_from_cells("06", *BY_HAND)
    flops = []
    for run in (names["keep_everything"], partial(checkpoint, use_reentrant=variant)):
        with FlopCounterMode(display=False) as counter:
            names["gradients"](run, 0.5, False)
        flops.append(counter.get_total_flops())
    assert flops[1] - flops[0] == again * flops[0] // 6  # a step is six products, two of them forward's


def test_the_reentrant_variant_loses_gradients_when_no_input_requires_one() -> None:
    for variant, gradients in ((True, False), (False, True)):
        linear = torch.nn.Linear(4, 4)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch warns, and goes on
            y = checkpoint(linear, torch.randn(2, 4), use_reentrant=variant)
        assert y.requires_grad is gradients


@pytest.mark.parametrize("card", ["A100-80GB", "H100-80GB"])
def test_offloaded_copies_take_longer_than_the_steps_arithmetic_over_pcie(card: str) -> None:
    """What lesson 06 says of GPT-2 XL, and that over NVLink-C2C they fit a forward at 54 % of the peak."""
    run = TrainingRun("gpt2-xl", 32, 1024, "bf16-master")
    rates = gpu(card).rates
    assert rates is not None
    moved = estimate(run)["activations"] - estimate(run.replace(recompute="offload"))["activations"]
    arithmetic = step_seconds(run, gpu(card))["model"]
    assert moved / rates.host > arithmetic
    assert moved / 450e9 < arithmetic / 3 / 0.542
