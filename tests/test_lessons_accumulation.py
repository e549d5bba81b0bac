"""Lesson 07's own code: sums of gradients and four mistakes, noise, schedules, the classifier, figures."""

import math
from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch

from course_utils.estimating import estimate
from course_utils.gpus import gpu
from course_utils.lessons.accumulation import batch_noise, large_batches
from course_utils.lessons.accumulation import micro_batches as mb
from course_utils.lessons.accumulation import published_batches as papers
from course_utils.lessons.accumulation.figures import contour, published_and_ours, theta_paths
from course_utils.lessons.accumulation.widget import theta_explorer
from course_utils.lessons.shared.language_model import language_model, train_language_model
from course_utils.run import TrainingRun


def test_only_the_right_loop_ends_where_large_batches_end() -> None:
    found = mb.distances(mb.uneven(6), k=4)
    assert found.pop("accumulated, by tokens") < 1e-5
    assert all(0.05 < off < 10 for off in found.values()), found
    assert set(found) == set(mb.LOOPS) - {"accumulated, by tokens"}


def test_averaging_over_batches_is_right_for_equal_lengths_and_adam_hides_a_constant_factor() -> None:
    equal = mb.distances(mb.micro_batches(4), k=4, optimizer="adam")
    assert equal["averaged over batches"] < 1e-3
    assert equal["not divided"] < 0.05 < mb.distances(mb.micro_batches(4), k=4)["not divided"]


def test_uneven_micro_batches_have_an_eighth_to_all_of_their_tokens() -> None:
    counts = [mb.counted_tokens(part) for part in mb.uneven(8, size=2, seq_len=16)]
    assert counts[0] == 2 * 2 and counts[-1] == 2 * 16 and counts == sorted(counts)
    tokens, targets = mb.joined(mb.uneven(3, size=2, seq_len=16))
    assert tokens.shape == targets.shape == (6, 16) and (targets == mb.IGNORED).any()


def test_a_bf16_accumulator_loses_what_an_fp32_one_keeps() -> None:
    coarse, fine = (mb.accumulator_errors([1, 32], kind) for kind in (torch.bfloat16, torch.float32))
    assert coarse[1] > 2 * coarse[0] > 1e-3
    assert max(fine) < 1e-6


def length(walked: Sequence[mb.Point]) -> float:
    return sum(math.dist(one, other) for one, other in pairwise(walked))


def test_a_path_by_groups_is_the_large_batchs_and_small_steps_wander() -> None:
    fit = mb.LineFit()
    large, grouped = mb.path(fit, 0.5, 100, 4), mb.path(fit, 0.5, 4, 4, group=25)
    assert torch.allclose(torch.tensor(large), torch.tensor(grouped), atol=1e-12)
    each, slow = mb.path(fit, 0.5, 4, 4), mb.path(fit, 0.02, 4, 4)
    assert len(each) == 101 and length(each) > 2 * length(large)
    assert math.dist(slow[-1], large[-1]) < 0.15 * math.dist(mb.START, large[-1])
    with pytest.raises(ValueError, match="no whole number"):
        mb.path(fit, 0.5, 7, 1)


def test_the_best_line_has_no_slope_left_and_contours_are_level() -> None:
    fit = mb.LineFit()

    def loss(theta: mb.Point) -> float:
        return (theta[0] + theta[1] * fit.x - fit.y).square().mean().item()

    assert mb.slope(fit.best(), fit.moments()) == pytest.approx((0, 0), abs=1e-12)
    least, start = loss(fit.best()), loss(mb.START)
    heights = [loss(point) for point in contour(fit, mb.START, 0.5)]
    assert heights == pytest.approx([least + 0.5 * (start - least)] * len(heights))


def gradients(signal: float, noise: float, count: int = 4096, width: int = 50) -> torch.Tensor:
    dice = torch.Generator().manual_seed(0)
    spread = torch.randn(count, width, generator=dice, dtype=torch.float64) * math.sqrt(noise / width)
    return spread + math.sqrt(signal / width)


def test_noise_is_found_in_gradients_of_known_noise_by_both_ways() -> None:
    rows = gradients(2.0, 30.0)
    found, (short, long) = batch_noise.noise_of(rows), batch_noise.squared_lengths(rows, [1, 64])
    assert found.noise == pytest.approx(30, rel=0.02) and found.signal == pytest.approx(2, rel=0.05)
    assert short == pytest.approx(batch_noise.Noise(2, 30).squared_length(1), rel=0.02)
    assert long == pytest.approx(batch_noise.Noise(2, 30).squared_length(64), rel=0.1)
    assert batch_noise.from_two(1, 64, short, long).scale == pytest.approx(15, rel=0.1)
    truth = batch_noise.Noise(1.5, 60.0)
    exact = batch_noise.from_two(4, 100, truth.squared_length(4), truth.squared_length(100))
    assert (exact.signal, exact.noise) == pytest.approx(truth) and truth.scale == 40


def test_steps_and_examples_trade_off_as_a_hyperbola() -> None:
    for batch in (1, 8, 100):
        steps, examples = batch_noise.steps_and_examples(batch, 8.0)
        assert (steps - 1) * (examples - 1) == pytest.approx(1)
        assert steps * batch_noise.progress(batch, 8.0) == pytest.approx(1)
    assert [batch_noise.rounded(scale) for scale in (0.55, 1.2, 7.5, 17.6)] == [0.5, 1, 8, 16]


def test_a_sequences_gradient_is_a_part_of_its_batchs() -> None:
    model, parts = language_model(), mb.micro_batches(2, size=1)
    each = [mb.gradient_of(mb.mean_loss(model, part), model) for part in parts]
    both = mb.gradient_of(mb.mean_loss(model, mb.joined(parts)), model)
    assert torch.allclose((each[0] + each[1]) / 2, both, atol=1e-6)


def curvature_weighted_noise(model: torch.nn.Module, count: int) -> float:
    """B_noise = tr(HΣ)/(GᵀHG) over `count` sequences, by products with the loss's second derivatives."""
    rows, everything = batch_noise.sequence_gradients(model, count), mb.joined(mb.micro_batches(count, size=1, seed=1))
    weights = list(model.parameters())
    slopes = torch.autograd.grad(mb.mean_loss(model, everything), weights, create_graph=True)
    slope = torch.cat([part.flatten() for part in slopes])

    def curvature(way: torch.Tensor) -> float:
        bent = torch.autograd.grad(slope @ way, weights, retain_graph=True)
        return (way @ torch.cat([part.flatten() for part in bent])).item()

    whole = rows.mean(0)
    return sum(curvature(row - whole) for row in rows) / count / curvature(whole)


def test_larger_batches_gain_more_as_noise_weighed_by_curvature_says_and_the_model_stays_as_it_was() -> None:
    model = train_language_model(steps=20).model
    before = torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    few, some = batch_noise.gains(model, [2, 4], count=8, draws=32)
    assert torch.equal(before, torch.nn.utils.parameters_to_vector(model.parameters()))
    assert 0 < few < some < 1
    implied = (2 * (1 / few - 1) + 4 * (1 / some - 1)) / 2
    assert implied == pytest.approx(curvature_weighted_noise(model, 8), rel=0.3)
    simple = batch_noise.noise_of(batch_noise.sequence_gradients(model, 8))
    assert implied > 2 * simple.scale  # tr(Σ)/|G|² promises too much


def test_the_published_table_has_its_best_rates_where_the_text_says() -> None:
    small, large = ([row for row in papers.GOYAL if row.batch == batch] for batch in (256, 8192))
    assert min(small, key=lambda row: row.error).rate == "0.10"
    assert min(large, key=lambda row: row.error).rate == "0.10·32"
    assert papers.published(8192, "0.10").error == 41.67


def test_a_ramp_counts_steps_and_draws_stairs() -> None:
    ramp = ((0, 10), (100, 20), (300, 40))
    assert [papers.ramp_steps(ramp, total) for total in (50, 300, 340)] == [5, 20, 21]
    assert [papers.batch_at(ramp, seen) for seen in (0, 99, 100, 10_000)] == [10, 10, 20, 40]
    xs, ys = papers.staircase(papers.RAMP, 5 * 10**12, 10**10)
    assert xs == [10, 69, 69, 790, 790, 4700, 4700, 5000] and ys == [16, 16, 32, 32, 64, 64, 128, 128]


def test_the_critical_batch_doubles_as_its_papers_say() -> None:
    """Kaplan et al. 2020, figure 10: it doubles whenever the loss falls by 13 %. MiniMax-01's grows eightfold."""
    shrunk = 2**-papers.KAPLAN.exponent
    assert papers.critical_batch(1.0) == 2e8 and 1 - shrunk == pytest.approx(0.13, abs=0.01)
    assert papers.critical_batch(3 * shrunk) == pytest.approx(2 * papers.critical_batch(3.0))
    alpha = papers.exponent_between(papers.MINIMAX_LOSSES)
    for loss, batch in papers.MINIMAX_LOSSES.items():
        assert 16e6 * (2.22 / loss) ** (1 / alpha) == pytest.approx(batch, rel=0.02)
    assert [size for _, size in papers.RAMP] == list(papers.MINIMAX_LOSSES.values())


def test_the_puzzle_in_single_sequences_fits_no_card_of_24_gb_once_cuda_has_its_context() -> None:
    """The lesson's verdict: what a program gets, less about 300 MB of context, which no estimate contains."""
    run = TrainingRun("gpt2-xl", 1, 1024, "bf16-master", recompute="full", accumulation_steps=32)
    peak = estimate(run).total
    assert all(gpu(card).room - peak < 300e6 for card in ("RTX3090-24GB", "RTX4090-24GB", "L4-24GB"))
    in_fp32 = estimate(run.replace(precision="bf16-master-fp32grad", micro_batch=4, accumulation_steps=8)).total
    assert in_fp32 + 300e6 < gpu("RTX5090-32GB").room and round(in_fp32 / 1e9, 1) == 29.9


def test_rates_grow_by_k_or_by_its_root_from_where_the_warm_up_is_told_to_start() -> None:
    assert [large_batches.warm_up(t, 4, 8.0) for t in (0, 1, 4, 9)] == [0, 2, 8, 8]
    assert [large_batches.warm_up(t, 4, 9.0, start=1.0) for t in (0, 2, 4)] == [1, 5, 9]
    assert (large_batches.scaled(0.1, 32), large_batches.scaled(0.1, 16, "adam")) == pytest.approx((3.2, 0.4))


def test_replicas_trained_together_are_those_trained_alone() -> None:
    small = large_batches.Setting("one", 1024, 0.05), large_batches.Setting("other", 1024, 0.2, 0.05)
    settings = [*small, large_batches.Setting("third", 2048, 0.01, None, "adam")]
    together = large_batches.train(settings, seeds=(0, 1), epochs=1)
    alone = [large_batches.train([setting], seeds=(1,), epochs=1)[0] for setting in settings]
    for both, single in zip(together, alone, strict=True):
        assert both.setting == single.setting
        assert both.errors[1] == pytest.approx(single.errors[0], abs=0.5)


def test_the_large_batch_needs_a_larger_rate() -> None:
    rows = {setting.name: setting for setting in large_batches.table()}
    names = ("32n, η", "32n, √32·η", "32n, 32·η")
    errors = [outcome.mean for outcome in large_batches.train([rows[name] for name in names], seeds=(0,))]
    assert errors[0] > errors[1] + 5 > errors[2] + 7


def test_learning_diverges_into_a_guess_not_into_an_error() -> None:
    assert set(large_batches.data()[1].tolist()) == set(range(10))
    (outcome,) = large_batches.train([large_batches.Setting("far too large", 1024, 1e6)], seeds=(0,), epochs=1)
    assert 60 < outcome.mean < 100
    assert {setting.optimizer for setting in large_batches.adam_table()} == {"adam"}


def test_figures_state_their_conclusion_and_hold_what_they_show() -> None:
    fit = mb.LineFit()
    shown = theta_paths(fit, {"all": mb.path(fit, 0.5, 100, 3), "each": mb.path(fit, 0.5, 4, 1)}, "It wanders")
    assert shown.alt.startswith("It wanders. ") and "each: 25 steps" in shown.alt and 'data-steps="3"' in shown.svg
    settings = large_batches.Setting("16, η", 16, 0.1), large_batches.Setting("no warm-up", 512, 3.2)
    ours = [large_batches.ErrorRates(settings[0], (20.0, 30.0)), large_batches.ErrorRates(settings[1], (84.0, 80.0))]
    assert ours[0].mean == 25 and ours[0].spread == pytest.approx(math.sqrt(50))
    drawn = published_and_ours([papers.GOYAL[1], None], ours, "It holds")
    assert "Bars: 16, η ± 0.12 23.60 %." in drawn.alt
    assert "16, η ± 7.1 25.0 %; no warm-up ± 2.8 82.0 %." in drawn.alt


def test_the_explorer_walks_as_its_controls_say() -> None:
    shown = theta_explorer(4, 25)
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
    shown = theta_explorer(1, 1, 1.5)
    assert "leaves the picture" in shown.picture.value and "nan" not in shown.picture.value
    shown.controls["size"].value, shown.controls["group"].value = 50, 50
    assert "Not possible" in shown.picture.value and "no whole number of 50 micro-batches" in shown.message
    assert repr(theta_explorer()) == repr(shown) == shown.invitation
