"""Lesson 02's own code: the valley and its walks, rules and optimizer of its cells, figures, the walker."""

import functools
import math
import re
from typing import Any

import pytest
import torch
from counting import calls
from lesson_source import names_from_cells

from course_utils import TrainingRun, moments, on_gpu
from course_utils.lessons.adam.by_hand import RULES, START, Valley, kept_bytes, steps_needed, trajectory
from course_utils.lessons.adam.figures import frame_of, outcome, walks
from course_utils.lessons.adam.widget import walker
from course_utils.lessons.shared.language_model import language_model, train_language_model


@pytest.mark.parametrize("rule", RULES)
def test_each_rule_of_the_lesson_walks_as_torchs_optimizer_does(rule: str) -> None:
    cells = names_from_cells("02", "flat, steep =", "def walk(", "def adam(")
    betas = {"momentum": {"beta1": 0.8}, "RMSProp": {"beta2": 0.95}, "Adam": {"beta1": 0.8, "beta2": 0.95}}
    ours = functools.partial(cells[rule.lower().replace(" ", "_")], **betas.get(rule, {}))
    path = cells["walk"](ours, 0.05, 30)
    for one, other in zip(path, trajectory(rule, 0.05, 30, beta1=0.8, beta2=0.95), strict=True):
        assert one == pytest.approx(other, rel=1e-6, abs=1e-9)


def test_the_lessons_adamw_equals_torchs_in_double_and_makes_its_states_in_the_first_step() -> None:
    made = names_from_cells("02", "def walk(", "def adam(", "class HandAdamW")["HandAdamW"]
    dice = torch.Generator().manual_seed(0)
    ours = [
        torch.nn.Parameter(torch.randn(size, generator=dice, dtype=torch.float64)) for size in ((4, 3), (5,))
    ]
    theirs = [torch.nn.Parameter(weight.detach().clone()) for weight in ours]
    mine = made(ours, 0.01)
    official = torch.optim.AdamW(theirs, lr=0.01)
    assert kept_bytes(mine) == kept_bytes(official) == 0
    for _ in range(100):
        for one, other in zip(ours, theirs, strict=True):
            one.grad = torch.randn(one.shape, generator=dice, dtype=torch.float64)
            other.grad = one.grad.clone()
        mine.step()
        official.step()
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)
    # which has a counter for each tensor, too
    assert kept_bytes(mine) == 2 * 8 * 17 == kept_bytes(official) - 2 * 4


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
        ({"rate": 0.0}, "learning rate 0.0"),
        ({"rate": math.nan}, "η must be above 0"),
        ({"beta1": 1.0}, "β1 1.0"),
        ({"beta2": -0.1}, "β2 -0.1"),
    ],
)
def test_impossible_walks_are_refused(choice: dict[str, Any], problem: str) -> None:
    walk: dict[str, Any] = {"rule": "Adam", "rate": 0.1} | choice
    with pytest.raises(ValueError, match=re.escape(problem)):
        trajectory(**walk)


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


def test_the_second_steps_peak_is_higher_by_the_states_and_one_workspace() -> None:
    gpt = names_from_cells("02", "def walk(", "class GPT(")["GPT"]
    requested = []
    with on_gpu():
        model = gpt(layers=2).to("cuda")
        N = sum(p.numel() for p in model.parameters())
        optimizer = torch.optim.AdamW(model.parameters())
        tokens = torch.zeros(8, 512, dtype=torch.long, device="cuda")
        for _ in range(3):
            torch.cuda.reset_peak_memory_stats()
            with torch.autocast("cuda", torch.bfloat16):
                loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            requested.append(torch.cuda.memory_stats()["requested_bytes.all.peak"])
    # torch's own choice: ":4096:2:16:8"
    assert requested[1] - requested[0] == 8 * N + (2 * 4096 + 8 * 16) * 1024
    assert requested[2] == requested[1]


def fullest(precision: str, optimizer: str) -> int:
    """Return the bytes in GPT-2's optimizer step."""
    run = TrainingRun("gpt2", seq_len=128, precision=precision, optimizer=optimizer, attention="efficient")
    return moments(run)["optimizer step"].total


def test_an_optimizers_name_means_what_the_lesson_says_in_each_recipe() -> None:
    N = 124_439_808
    largest = 50_257 * 768
    for precision in ("fp32", "amp-bf16"):
        counters = 148 * 512  # fused keeps each tensor's t on the GPU
        fused = fullest(precision, "adamw-fused") - counters
        assert fullest(precision, "adamw") == fullest(precision, "adamw-foreach") == fused + 4 * N
    assert fullest("bf16-master", "adamw-foreach") == pytest.approx(22 * N, rel=1e-4)
    assert fullest("bf16-master", "adamw") == pytest.approx(16 * N + 6 * largest, rel=1e-4)


def test_epsilon_halves_the_update_of_its_own_size() -> None:
    cells = names_from_cells("02", "flat, steep =", "def walk(", "def adam(")
    sizes = torch.tensor([1e-8, 1e-9, 1e-2])
    updates = cells["adam"](sizes, torch.zeros(3), torch.zeros(3), 1)
    assert updates.tolist() == pytest.approx([1 / 2, 1 / 11, 1.0], rel=1e-4)


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
