"""Own code of lessons 08 and 09: paths of θ, noise from two batches, rates, published batches, a figure."""

import json
import math
import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from course_utils.estimating import estimate
from course_utils.gpus import gpu
from course_utils.lessons.accumulation import checks
from course_utils.lessons.accumulation import large_batch_results as papers
from course_utils.lessons.accumulation import micro_batches as mb
from course_utils.lessons.accumulation.figures import contour, theta_paths
from course_utils.lessons.accumulation.widget import theta_sliders
from course_utils.measuring import measure
from course_utils.run import TrainingRun

ROOT = Path(__file__).parent.parent


def length(walked: Sequence[mb.Point]) -> float:
    return sum(math.dist(one, other) for one, other in pairwise(walked))


def test_a_path_by_groups_is_the_large_batchs_and_small_steps_wander() -> None:
    fit = mb.LineFit()
    large = mb.path(fit, 0.5, 100, 4)
    grouped = mb.path(fit, 0.5, 4, 4, group=25)
    assert torch.allclose(torch.tensor(large), torch.tensor(grouped), atol=1e-12)
    each = mb.path(fit, 0.5, 4, 4)
    slow = mb.path(fit, 0.02, 4, 4)
    assert len(each) == 101 and length(each) > 2 * length(large)
    assert math.dist(slow[-1], large[-1]) < 0.15 * math.dist(mb.START, large[-1])
    with pytest.raises(ValueError, match="do not divide into steps"):
        mb.path(fit, 0.5, 7, 1)


def test_the_best_line_has_no_slope_left_and_contours_are_level() -> None:
    fit = mb.LineFit()

    def loss(theta: mb.Point) -> float:
        return (theta[0] + theta[1] * fit.x - fit.y).square().mean().item()

    assert mb.slope(fit.best(), fit.moments()) == pytest.approx((0, 0), abs=1e-12)
    least = loss(fit.best())
    start = loss(mb.START)
    heights = [loss(point) for point in contour(fit, mb.START, 0.5)]
    assert heights == pytest.approx([least + 0.5 * (start - least)] * len(heights))


def test_the_published_table_has_its_best_rates_where_the_text_says() -> None:
    small, large = ([row for row in papers.GOYAL if row.batch == batch] for batch in (256, 8192))
    assert min(small, key=lambda row: row.error).rate == "0.10"
    assert min(large, key=lambda row: row.error).rate == "0.10·32"
    assert papers.published(8192, "0.10").error == 41.67


def test_noise_follows_from_two_batches_and_rates_grow_by_k_or_by_its_root() -> None:
    assert checks.noise_right(4, [1.5 + 60 / 4] * 25, 1.5 + 60 / 100) == pytest.approx((1.5, 60))
    assert [checks.rate_right(t, 4, 1.0, 9, "sgd") for t in (0, 2, 4, 9)] == [1, 5, 9, 9]
    assert checks.rate_right(9, 4, 0.1, 16, "adam") == pytest.approx(0.4)


def test_a_ramp_says_its_batch_at_any_time() -> None:
    ramp = ((0, 10), (100, 20), (300, 40))
    assert [papers.batch_at(ramp, seen) for seen in (0, 99, 100, 10_000)] == [10, 10, 20, 40]


def test_the_puzzle_in_single_sequences_fits_no_card_of_24_gb_once_cuda_has_its_context() -> None:
    """The lesson's verdict: what a program gets, less about 300 MB of context, which no estimate contains."""
    run = TrainingRun("gpt2-xl", 1, 1024, "bf16-master", recompute="full", accumulation_steps=32)
    peak = estimate(run).total
    assert all(gpu(card).room - peak < 300e6 for card in ("RTX3090-24GB", "RTX4090-24GB", "L4-24GB"))
    in_fp32 = estimate(
        run.replace(precision="bf16-master-fp32grad", micro_batch=4, accumulation_steps=8)
    ).total
    assert in_fp32 + 300e6 < gpu("RTX5090-32GB").room and round(in_fp32 / 1e9, 1) == 29.9


def test_figures_state_their_conclusion_and_hold_what_they_show() -> None:
    fit = mb.LineFit()
    shown = theta_paths(
        fit, {"all": mb.path(fit, 0.5, 100, 3), "each": mb.path(fit, 0.5, 4, 1)}, "It wanders"
    )
    assert shown.alt.startswith("It wanders. ")
    assert "each: 25 steps" in shown.alt
    assert 'data-steps="3"' in shown.svg


def test_the_explorer_walks_as_its_controls_say() -> None:
    shown = theta_sliders(4, 25)
    large = mb.path(mb.LineFit(), 0.5, 100, 8)
    assert torch.allclose(torch.tensor(shown.path), torch.tensor(large), atol=1e-12)
    assert "<b>100</b> points; <b>4</b> are in memory" in shown.message
    before = shown.picture.value
    for name, value in {"group": 5, "rate": 0.02, "passes": 2}.items():
        shown.controls[name].value = value
        assert shown.picture.value != before
        before = shown.picture.value
    assert len(shown.path) == 1 + 2 * 5


def test_the_explorer_says_what_is_not_possible_and_what_leaves_the_picture() -> None:
    shown = theta_sliders(1, 1, 1.5)
    assert "leaves the picture" in shown.picture.value and "nan" not in shown.picture.value
    shown.controls["size"].value, shown.controls["group"].value = 50, 50
    assert "Not possible" in shown.picture.value
    assert "do not divide into steps of 50 micro-batches" in shown.message
    assert repr(theta_sliders()) == repr(shown) == shown.invitation


def test_the_tensors_of_a_recorded_gpu_are_the_estimates_and_its_allocator_counts_more() -> None:
    """What lesson 08 says of its gap: it is 0 on an H200, too, in tensors alone."""
    run = TrainingRun("gpt2-xl", 4, 1024, "bf16-master", recompute="full", accumulation_steps=8)
    real = measure(run, source="recorded", device="NVIDIA H200")
    assert real.peak == estimate(run).total
    assert 0 < real.counters["allocated"] - real.peak < 0.03 * real.peak


def test_a_bf16_sum_stands_still_if_gradients_agree_and_goes_on_if_they_are_noise() -> None:
    off = {}
    for name, slope in {"agree": 1.0, "noise": 0.0}.items():
        dice = torch.Generator().manual_seed(0)
        spread = 0.1 if slope else 1.0
        each = (slope + spread * torch.randn(1024, 500, generator=dice)).bfloat16()
        total = torch.zeros(500, dtype=torch.bfloat16)
        for gradient in each:
            total += gradient
        exact = each.double().sum(0)
        off[name] = ((total.double() - exact).norm() / exact.norm()).item()
    assert off["agree"] > 0.4 and off["noise"] < 0.1


def shown_bars(beginning: str) -> list[float]:
    """The numbers of the stored figure of lesson 09 whose title begins like this."""
    cells = json.loads((ROOT / "notebooks/09_large_batches.ipynb").read_text(encoding="utf-8"))["cells"]
    outputs = [output.get("data", {}) for cell in cells for output in cell.get("outputs", [])]
    texts = ["".join(data.get("text/plain", "")) for data in outputs]
    (text,) = [text for text in texts if text.startswith(beginning)]
    return [float(number) for number in re.findall(r"([\d.]+) %", text)]


def test_each_rule_holds_at_its_own_rate_in_the_stored_figures() -> None:
    """A rule keeps up where its bar is within 2 points of the small batch's; others are well above."""
    small, unscaled, root, warmed, sudden = shown_bars("SGD: with k and a warm-up")
    assert abs(warmed - small) < 2 < root - small < unscaled - small < sudden - small
    small, unscaled, sudden, root, linear = shown_bars("Adam: with √k and a warm-up")
    assert root - small < 1 < min(unscaled, sudden) - small and linear - small > 20
