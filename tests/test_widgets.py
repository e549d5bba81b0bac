"""Sliders: they draw what they say, and explain what is impossible."""

import re

from course_utils import TrainingRun, estimate
from course_utils.interactive.explorer import CONTROL
from course_utils.interactive.widgets import run_sliders


def drawn_bytes(page: str) -> int:
    return sum(map(int, re.findall(r"data-bytes='(\d+)'", page)))


def test_the_explorer_draws_the_estimate_of_what_it_says():
    shown = run_sliders(micro_batch=4, recompute="full", gpu="A100-80GB")
    assert shown.run == TrainingRun("gpt2-xl", micro_batch=4, recompute="full")
    assert drawn_bytes(shown.picture.value) == estimate(shown.run).total == shown.breakdown.total
    assert "micro_batch=4" in shown.message and "recompute" in shown.message
    shown.controls["micro_batch"].value = 2
    shown.controls["model"].value = "gpt2"
    assert shown.run.model.name == "gpt2" and "gpt2, 2 × 1,024 tokens" in shown.picture.value
    assert drawn_bytes(shown.picture.value) == estimate(shown.run).total
    shown.controls["accumulation_steps"].value = 8
    assert "8 micro-batches of 2 × 1,024 tokens" in shown.picture.value
    assert run_sliders(micro_batch=12).run.micro_batch == 12 not in CONTROL["micro_batch"].values


def test_an_impossible_combination_is_explained_and_the_last_picture_stays_greyed():
    shown = run_sliders()
    assert shown.figure is not None
    before, last = shown.picture.value, shown.figure.html
    shown.controls["seq_len"].value = 2048
    assert "longer than the 1,024 positions of gpt2-xl" in shown.message
    assert shown.message in shown.picture.value and "role='alert'" in shown.picture.value
    assert f"<div style='opacity:0.25'>{last}</div>" in shown.picture.value
    shown.controls["seq_len"].value = 1024
    assert shown.picture.value == before and "Not possible" not in shown.message
