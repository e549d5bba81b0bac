"""Lesson 09's own code: paths of θ, their picture and sliders, a published ramp, and the stored figures."""

import json
import math
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from course_utils.lessons.accumulation import large_batch_results as papers
from course_utils.lessons.accumulation import micro_batches as mb
from course_utils.lessons.accumulation.figures import theta_paths
from course_utils.lessons.accumulation.widget import theta_sliders

LESSON = Path(__file__).parent.parent / "notebooks/09_large_batches.ipynb"


def test_a_path_by_groups_is_the_large_batchs_and_small_steps_wander() -> None:
    fit = mb.LineFit()
    large = mb.path(fit, 0.5, 100, 4)
    grouped = mb.path(fit, 0.5, 4, 4, group=25)
    assert torch.allclose(torch.tensor(large), torch.tensor(grouped), atol=1e-12)
    each = mb.path(fit, 0.5, 4, 4)
    straight, wandering = (sum(math.dist(*ends) for ends in pairwise(walked)) for walked in (large, each))
    assert len(each) == 101 and wandering > 2 * straight
    with pytest.raises(ValueError, match="do not divide into steps"):
        mb.path(fit, 0.5, 7, 1)


def test_the_best_line_has_no_slope_left_and_contours_are_level() -> None:
    fit = mb.LineFit()
    assert mb.slope(fit.best(), fit.moments()) == pytest.approx((0, 0), abs=1e-12)

    def loss(theta: mb.Point) -> float:
        return (theta[0] + theta[1] * fit.x - fit.y).square().mean().item()

    figure: Any = theta_paths(fit, {"none": [mb.START]}, "It stays")
    (rings,) = figure.axes[0].collections
    assert len(rings.levels) > 5
    for level, ring in zip(rings.levels, rings.get_paths(), strict=True):
        heights = [loss(point) for point in ring.vertices.tolist()]
        assert heights == pytest.approx([level] * len(heights), rel=0.01)


def test_the_figure_holds_the_paths_that_it_shows() -> None:
    fit = mb.LineFit()
    paths = {"all": mb.path(fit, 0.5, 100, 3), "each": mb.path(fit, 0.5, 4, 1)}
    shown: Any = theta_paths(fit, paths, "It wanders")
    assert "all: 3 steps; each: 25 steps" in shown.alt
    for ax, (name, path) in zip(shown.axes, paths.items(), strict=True):
        walk, _, goal = (line.get_xydata().tolist() for line in ax.lines)
        assert walk == [*map(list, path)] and goal == [list(fit.best())]
        assert ax.get_title("left") == name


def test_the_sliders_walk_as_they_say_and_say_what_is_not_possible() -> None:
    shown = theta_sliders(4, 25)
    large = mb.path(mb.LineFit(), 0.5, 100, 8)
    assert torch.allclose(torch.tensor(shown.path), torch.tensor(large), atol=1e-12)
    assert "<b>100</b> points; <b>4</b> are in memory" in shown.message
    before = shown.picture.value
    for name, value in {"group": 5, "passes": 2}.items():
        shown.controls[name].value = value
    assert len(shown.path) == 1 + 2 * 5
    assert shown.picture.value != before
    assert "leaves the picture" in theta_sliders(1, 1, 1.5).picture.value
    shown.controls["size"].value, shown.controls["group"].value = 50, 50
    assert "do not divide into steps of 50 micro-batches" in shown.message


def test_a_ramp_says_its_batch_at_any_time() -> None:
    ramp = ((0, 10), (100, 20), (300, 40))
    assert [papers.batch_at(ramp, seen) for seen in (0, 99, 100, 10_000)] == [10, 10, 20, 40]


def shown_bars(beginning: str) -> list[float]:
    """The numbers of the stored figure of lesson 09 whose title begins like this."""
    cells = json.loads(LESSON.read_text(encoding="utf-8"))["cells"]
    outputs = [output.get("data", {}) for cell in cells for output in cell.get("outputs", [])]
    texts = ["".join(data.get("text/plain", "")) for data in outputs]
    (text,) = [text for text in texts if text.startswith(beginning)]
    return [float(number) for number in re.findall(r"([\d.]+) %", text)]


def test_each_rule_holds_at_its_own_rate_in_the_stored_figures() -> None:
    """A rule keeps up where its bar is within 2 points of the small batch's; others are well above.

    The notebook's run compares no output of these cells: trainings differ a little from machine to machine.
    """
    small, unscaled, root, warmed, sudden = shown_bars("SGD: with k and a warm-up")
    assert abs(warmed - small) < 2 < root - small < unscaled - small < sudden - small
    small, unscaled, sudden, root, linear = shown_bars("Adam: with √k and a warm-up")
    assert root - small < 1 < min(unscaled, sudden) - small and linear - small > 20
