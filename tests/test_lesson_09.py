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
    assert mb.slope(mb.best_line(fit.x, fit.y), fit.moments()) == pytest.approx((0, 0), abs=1e-12)

    def loss(theta: mb.Point) -> float:
        return (theta[0] + theta[1] * fit.x - fit.y).square().mean().item()

    figure: Any = theta_paths(fit.x, fit.y, {"none": [mb.START]}, "It stays")
    (rings,) = figure.axes[0].collections
    assert len(rings.levels) > 5
    for level, ring in zip(rings.levels, rings.get_paths(), strict=True):
        heights = [loss(point) for point in ring.vertices.tolist()]
        assert heights == pytest.approx([level] * len(heights), rel=0.01)


def test_the_figure_holds_the_paths_that_it_shows() -> None:
    fit = mb.LineFit()
    paths = {"all": mb.path(fit, 0.5, 100, 3), "each": mb.path(fit, 0.5, 4, 1)}
    shown: Any = theta_paths(fit.x, fit.y, paths, "It wanders")
    assert "all: 3 steps; each: 25 steps" in shown.alt
    for ax, (name, path) in zip(shown.axes, paths.items(), strict=True):
        walk, _, goal = (line.get_xydata().tolist() for line in ax.lines)
        assert walk == [*map(list, path)] and goal == [list(mb.best_line(fit.x, fit.y))]
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


def outputs() -> str:
    """What the stored notebook of lesson 09 shows, as text."""
    cells = json.loads(LESSON.read_text(encoding="utf-8"))["cells"]
    found = [output for cell in cells for output in cell.get("outputs", [])]
    return "".join("".join(one.get("text", one.get("data", {}).get("text/plain", ""))) for one in found)


def test_each_rule_holds_at_its_own_rate_in_the_stored_table() -> None:
    """A rule keeps up where its median is within 2 points of the small batch's; others are well above.

    The notebook's run compares no output of these cells: trainings differ a little from machine to machine.
    """
    row = re.compile(r"^(\S.*?) +([\d.]+) \(([\d.]+) to ([\d.]+)\) +([\d.]+) \(", re.MULTILINE)
    rows = {name: list(map(float, numbers)) for name, *numbers in row.findall(outputs())}
    sgd, adam = ({name: numbers[column] for name, numbers in rows.items()} for column in (0, 3))
    for median, rule, failing in (
        (sgd, "32n, 32·η, warm-up", ("32n, η", "32n, √32·η, warm-up", "32n, 32·η, no warm-up")),
        (adam, "32n, √32·η, warm-up", ("32n, η", "32n, √32·η, no warm-up", "32n, 32·η, warm-up")),
    ):
        others = [median[name] for name in failing]
        assert median[rule] - median["n, η"] < 2 < min(others) - median["n, η"]
    assert rows["32n, 32·η, no warm-up"][2] - rows["32n, 32·η, no warm-up"][1] > 5  # seeds disagree


def lesson() -> dict[str, str]:
    """The cells in which a learner writes, by the name of the function or variable that they fill in."""
    source = (LESSON.parent / "src/09_large_batches.py").read_text(encoding="utf-8")
    parts = source.split("\n# %%")
    named = {"rates": "# write these", "solve": "# write this"}
    return {name: next(part for part in parts if told in part) for name, told in named.items()}


def said(code: str, names: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> str:
    exec(code, names)
    return capsys.readouterr().out


def test_the_first_cell_to_write_in_wants_rates_in_proportion(capsys: pytest.CaptureFixture[str]) -> None:
    source = (LESSON.parent / "src/09_large_batches.py").read_text(encoding="utf-8")
    walk = next(part for part in source.split("\n# %%") if "def walk(" in part)
    names: dict[str, Any] = {}
    exec(walk, names)
    code, blank = lesson()["rates"], "1: 0.5, 2: 0.5, 10: 0.5"
    assert said(code, dict(names), capsys) == "Not yet: another path with 1, 2, 10 points.\n"
    right = code.replace(blank, "1: 0.005, 2: 0.01, 10: 0.05")
    assert said(right, dict(names), capsys) == "Right.\n"
    for wrong in ("1: 0.006, 2: 0.01, 10: 0.05", "1: 0.005, 2: 0.014, 10: 0.05", "1: 0.005, 2: 0.01, 10: 0"):
        assert "Not yet" in said(code.replace(blank, wrong), dict(names), capsys)


def test_the_second_cell_to_write_in_wants_both_unknowns(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {"signal": 3.0, "noise": 8.0, "lengths": [11.0, 7.0, 5.0, 4.0, 3.5, 3.25]}
    code, blank = lesson()["solve"], "return 0.0, 0.0  # write this"
    assert "Not yet: |G|² 0 times, tr(Σ) 0 times as large as it is.\n" in said(code, dict(names), capsys)
    right = """noise = (length_small - length_large) / (1 / small - 1 / large)
    return length_small - noise / small, noise"""
    assert "Right." in said(code.replace(blank, right), dict(names), capsys)
    for wrong in ("return length_large, length_small", "return float('nan'), 8.0"):
        assert "Not yet" in said(code.replace(blank, wrong), dict(names), capsys)
