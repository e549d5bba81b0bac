"""Lesson 02's own code: the valley, four optimizers for a coordinate, Adam by hand, figures and the walker."""

import functools
import math
import re
from typing import Any

import pytest
import torch
from counting import calls

from course_utils import TrainingRun, measure
from course_utils.lessons.adam.by_hand import (
    RULES,
    START,
    HandAdamW,
    Valley,
    first_updates,
    kept_by_name,
    kept_bytes,
    mean_update,
    step_temporaries,
    steps_needed,
    trajectory,
)
from course_utils.lessons.adam.figures import frame_of, outcome, walks
from course_utils.lessons.adam.widget import walker
from course_utils.lessons.shared.language_model import language_model, train_language_model

TORCHS = {
    "gradient descent": lambda tensors: torch.optim.SGD(tensors, lr=0.05),
    "momentum": lambda tensors: torch.optim.SGD(tensors, lr=0.05, momentum=0.8),
    "RMSProp": lambda tensors: torch.optim.RMSprop(tensors, lr=0.05, alpha=0.95),
    "Adam": lambda tensors: torch.optim.Adam(tensors, lr=0.05, betas=(0.8, 0.95)),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("valley", [Valley(), Valley(30, 30)])
def test_each_rule_walks_as_torchs_optimizer_does(rule: str, valley: Valley) -> None:
    place = torch.tensor(valley.turned(START), dtype=torch.float64, requires_grad=True)
    optimizer = TORCHS[rule]([place])
    for point in trajectory(rule, 0.05, 30, beta1=0.8, beta2=0.95, valley=valley)[1:]:
        place.grad = torch.tensor(valley.slope((place[0].item(), place[1].item())), dtype=torch.float64)
        optimizer.step()
        assert place.tolist() == pytest.approx(point, rel=1e-6, abs=1e-9)


def test_the_slope_is_the_losss_derivative() -> None:
    own: Any = Valley(angle=-30)
    point = torch.tensor([1.5, -0.7], dtype=torch.float64, requires_grad=True)
    along, across = own.turned(point)
    (slope,) = torch.autograd.grad(0.5 * (along**2 + 25 * across**2), point)
    assert slope.tolist() == pytest.approx(Valley(25, 30).slope((1.5, -0.7)))


@pytest.mark.parametrize("rule", RULES)
def test_turning_the_valley_changes_the_walk_of_those_with_v_alone(rule: str) -> None:
    turned = Valley(25, 40)
    straight, other = (trajectory(rule, 0.03, 50, valley=valley) for valley in (Valley(), turned))
    apart = math.dist(other[-1], turned.turned(straight[-1]))
    assert apart > 0.5 if rule in ("RMSProp", "Adam") else apart < 1e-9


def test_descent_needs_the_steps_that_the_closed_form_says() -> None:
    path = trajectory("gradient descent", 2 / 26, 200)
    assert steps_needed(path) == math.ceil(math.log(0.01) / math.log(24 / 26)) == 58
    assert steps_needed(path[:40]) is None
    assert outcome(path[:40]) == "not there after 39 steps"
    assert outcome(trajectory("gradient descent", 0.082, 500)) == "leaves the valley"
    assert len(trajectory("gradient descent", 1.0, 500)) < 20


@pytest.mark.parametrize(
    ("choice", "problem"),
    [
        ({"rule": "adan"}, "unknown optimizer 'adan'"),
        ({"rate": 0.0}, "a learning rate of 0.0"),
        ({"rate": math.nan}, "η is above 0"),
        ({"beta1": 1.0}, "β1 1.0"),
        ({"beta2": -0.1}, "β2 -0.1"),
    ],
)
def test_impossible_walks_are_refused(choice: dict[str, Any], problem: str) -> None:
    walk: dict[str, Any] = {"rule": "Adam", "rate": 0.1} | choice
    with pytest.raises(ValueError, match=re.escape(problem)):
        trajectory(**walk)


def test_first_updates_are_adams_own() -> None:
    """With gradients of 1 torch's Adam moves by the learning rate each step."""
    weight = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([weight], lr=0.1)
    for length in first_updates(5):
        before = weight.item()
        weight.grad = torch.ones(1, dtype=torch.float64)
        optimizer.step()
        assert (before - weight.item()) / 0.1 == pytest.approx(length, rel=1e-6)
    assert first_updates(1, corrected=False) == [pytest.approx(0.1 / math.sqrt(0.001))]


GAUSS = torch.randn(2000, generator=torch.Generator().manual_seed(0)).tolist()


@pytest.mark.parametrize("noise", [0.0, 1.0, 10.0])
def test_larger_gradients_do_not_get_smaller_updates(noise: float) -> None:
    gradients = [1 + noise * one for one in GAUSS[:500]]
    small, middle, large = (mean_update("Adam", [scale * g for g in gradients]) for scale in (1e-3, 1, 1e3))
    assert small == pytest.approx(middle, rel=1e-4) and large == pytest.approx(middle, rel=1e-4)
    assert mean_update("momentum", [1e3 * g for g in gradients]) > 900 * mean_update("momentum", gradients)


def test_noise_shortens_adams_updates() -> None:
    lengths = [mean_update("Adam", [1 + factor * one for one in GAUSS]) for factor in (0, 1, 10)]
    assert lengths[0] == pytest.approx(1) and lengths == sorted(lengths, reverse=True) and lengths[2] < 0.3


def test_epsilon_takes_over_where_gradients_are_as_small() -> None:
    assert mean_update("Adam", [1e-8]) == pytest.approx(0.5)
    assert mean_update("Adam", [1e-4]) > 0.999 and mean_update("Adam", [1e-11]) < 0.002


def test_only_epsilon_keeps_adam_from_walking_where_gradients_are_rounding_noise() -> None:
    name = "blocks.0.attention.qkv.bias"
    begin = language_model().get_parameter(name)
    moved = []
    for epsilon in (1e-8, 1e-16):
        make = functools.partial(torch.optim.AdamW, lr=1e-3, eps=epsilon)
        trained = train_language_model(make, steps=30)
        query, key, _ = (trained.model.get_parameter(name) - begin).abs().chunk(3)
        assert query.mean() > 2e-3
        moved.append(key.mean().item() / 1e-3)
    assert moved[0] < 0.1 < 1 < moved[1]


def test_hand_written_adamw_equals_torchs_in_double() -> None:
    dice = torch.Generator().manual_seed(0)
    ours = [torch.randn(shape, generator=dice, dtype=torch.float64) for shape in ((4, 3), (5,))]
    theirs = [weight.clone() for weight in ours]
    mine, official = HandAdamW(ours, 0.01), torch.optim.AdamW(theirs, lr=0.01)
    for _ in range(100):
        for one, other in zip(ours, theirs, strict=True):
            one.grad = torch.randn(one.shape, generator=dice, dtype=torch.float64)
            other.grad = one.grad.clone()
        mine.step()
        official.step()
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


def test_states_are_made_in_the_first_step_and_counted_once() -> None:
    weights = [torch.nn.Parameter(torch.ones(10, 10)), torch.nn.Parameter(torch.ones(7))]
    mine, official = HandAdamW(weights), torch.optim.AdamW(weights)
    assert kept_bytes(mine) == kept_bytes(official) == 0
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    mine.step()
    official.step()
    assert kept_bytes(mine) == 8 * 107
    assert kept_bytes(official) == 8 * 107 + 2 * 4  # and a counter for each tensor
    assert kept_by_name(official) == {"step": 8, "exp_avg": 428, "exp_avg_sq": 428}


def test_a_step_that_allocates_nothing_has_no_temporaries() -> None:
    run = TrainingRun("tiny-gpt", 1, 32, "fp32", "adamw-fused", attention="efficient")
    assert step_temporaries(measure(run, source="simulated")) == 0
    assert step_temporaries(measure(run.replace(optimizer="adamw-foreach"), source="simulated")) > 0


def test_walks_say_how_each_ended_and_stay_inside_their_windows() -> None:
    paths = {f"η = {rate}": trajectory("gradient descent", rate, 100) for rate in (0.01, 0.07, 0.09)}
    figure = walks(paths, "One step size for two directions")
    assert "η = 0.09: leaves the valley" in figure.alt and "in 64 steps" in figure.alt
    windows = re.findall(r'<svg x="([\d.]+)" y="[\d.]+" width="([\d.]+)"', figure.svg)
    assert len(windows) == 3 and all(float(x) + float(width) <= 865 for x, width in windows)


@pytest.mark.parametrize("angle", [0.0, 30.0, 45.0])
def test_a_window_shows_as_far_across_the_valley_as_the_start_is(angle: float) -> None:
    valley = Valley(angle=angle)
    window = frame_of(valley, 0, 0, 680, 360)
    shown = [window.place(valley.turned((START[0], side * START[1]))) for side in (1, -1)]
    assert all(0 <= x <= window.width and 0 <= y <= window.height for x, y in shown)


def test_the_walker_shows_what_its_controls_say() -> None:
    shown = walker("Adam", 0.5)
    assert shown.path == trajectory("Adam", 0.5, 200)
    before = shown.picture.value
    for name, value in {"rate": 0.1, "beta1": 0.0, "beta2": 0.9, "steepness": 100.0, "angle": 45.0}.items():
        shown.controls[name].value = value
        assert shown.picture.value != before
        before = shown.picture.value
    assert shown.path == trajectory("Adam", 0.1, 200, beta1=0.0, beta2=0.9, valley=Valley(100, 45))
    assert "8 bytes in fp32" in shown.message
    shown.controls["optimizer"].value = "gradient descent"
    assert "leaves the valley" in shown.picture.value and "no state" in shown.message
    assert repr(walker()) == repr(walker("momentum", 0.02)) == walker().invitation
    with pytest.raises(ValueError, match="unknown optimizer"):
        walker("adan")


@pytest.mark.parametrize("name", RULES)
def test_every_walk_is_drawn_in_tens_of_thousands_of_calls(name: str) -> None:
    shown = walker()
    assert calls(lambda: setattr(shown.controls["optimizer"], "value", name)) < 60_000
