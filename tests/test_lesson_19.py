"""Lesson 19: answers and their hints; the figure of a plan; the recorded limits of a GPU."""

import gc
import json
from typing import Any, cast

import pytest
import torch
from checking import Answers, JudgedAnswers
from edits import edited
from torch.nn.functional import cross_entropy

from course_utils import TrainingRun, estimate, fit
from course_utils.interactive.course_files import ROOT
from course_utils.lessons.will_it_fit import checks, limits
from course_utils.lessons.will_it_fit.figures import decision_tree, plan_figure
from course_utils.units import GB


# --------------------------------------------------------------------------------------------------
# 19.1: largest_micro_batch
def halving(build: Any, start: int) -> int | None:
    """Tries in a function of its own, whose names are gone when it returns."""

    def fits(size: int) -> bool:
        try:
            step = build(size)
            for _ in range(2):
                step()
        except torch.OutOfMemoryError:
            return False
        return True

    while start:
        gc.collect()
        if fits(start):
            return start
        start //= 2
    return None


def within_the_handler(build: Any, start: int) -> int | None:
    try:
        step = build(start)
        step()
        step()
        return start
    except torch.OutOfMemoryError:
        return within_the_handler(build, start // 2) if start > 1 else None


LARGEST = Answers(
    right=halving,
    wrong=[
        (edited(halving, "range(2)", "range(1)"), "the second would not"),
        (edited(halving, "gc.collect()", "pass"), "What frees such a cycle"),
        (edited(halving, "torch.OutOfMemoryError", "RuntimeError"), "and you go on"),
        (within_the_handler, "Who refers to it"),
    ],
)


# --------------------------------------------------------------------------------------------------
# 19.2: fitting_step
def in_two_parts(model: Any, optimizer: Any, batch: Any) -> None:
    """The head's pieces go backward one by one into a detached input, not recomputed; then the rest does."""
    for tokens, targets in zip(*(part.split(1) for part in batch), strict=True):
        with torch.autocast(tokens.device.type, torch.bfloat16):
            x = model.embedding(tokens)
            for block in model.blocks:
                x = block(x)
        cut = x.detach().requires_grad_()
        y = targets.flatten()
        for first in range(0, len(y), 200):
            with torch.autocast(tokens.device.type, torch.bfloat16):
                logits = model.head(cut.flatten(0, 1)[first : first + 200])
                loss = cross_entropy(logits, y[first : first + 200], reduction="sum") / batch[1].numel()
            loss.backward()
        x.backward(cut.grad)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


STEPS = "x.backward(cut.grad)\n        optimizer.step()"

FITTING = Answers(
    right=in_two_parts,
    wrong=[
        (checks.plain_step, "Logits are among the largest tensors there"),
        (edited(in_two_parts, "/ batch[1].numel()", "/ targets.numel()"), "What do you divide by"),
        (edited(in_two_parts, "x.backward(cut.grad)", STEPS), "optimizer steps for one batch"),
        (edited(in_two_parts, "optimizer.zero_grad(set_to_none=True)", ""), "What did it leave behind"),
    ],
)


# --------------------------------------------------------------------------------------------------
# 19.3: cluster
PLAN_70B = TrainingRun(
    "llama3-70b",
    2,
    4096,
    "bf16-master",
    "adamw-fused",
    recompute="every-3",
    accumulation_steps=4,
    world_size=32,
    zero_stage=3,
    loss_chunks=4,
)


def changing(**changes: Any) -> Any:
    return lambda: PLAN_70B.replace(**changes)


CLUSTER = Answers(
    right=changing(micro_batch=4, accumulation_steps=2),
    wrong=[
        (changing(accumulation_steps=1), "You change global_batch"),
        (changing(zero_stage=2), "The largest part"),
        (changing(precision="bf16"), "rounds otherwise"),
        (changing(world_size=64, accumulation_steps=2), "fewer machines would do"),
        (changing(micro_batch=1, accumulation_steps=8), "gathered too often"),
        (changing(lora_rank=16), "You change lora_rank"),
    ],
)


# --------------------------------------------------------------------------------------------------
# 19.4: qlora
def qlora(model: str, card: Any) -> tuple[int, int]:
    """The size grows as long as the next one fits."""
    bits, size = 16, 0
    while bits >= 4 and not size:
        while size < 16 and estimate(checks.adapted(model, bits, size + 1)).total * 1.05 <= card.room:
            size += 1
        bits //= 2
    return (2 * bits, size) if size else (0, 0)


UPWARD = edited(qlora, "bits, size = 16, 0", "bits, size = 4, 0")
QLORA = Answers(
    right=qlora,
    wrong=[
        (UPWARD, "fewest bits"),
        (edited(qlora, "* 1.05 <=", "<="), "without a reserve"),
        (edited(qlora, "card.room", "card.memory"), "what the driver lists"),
        (edited(qlora, "size < 16", "size < 1"), "the card waits"),
        (edited(qlora, "2 * bits, size", "bits, size"), "frozen weights have 16, 8 or 4"),
    ],
)

ANSWERS = {"19.1": LARGEST, "19.2": FITTING, "19.3": CLUSTER, "19.4": QLORA}


class TestAnswers(JudgedAnswers):
    answers = ANSWERS


# --------------------------------------------------------------------------------------------------
# the figures
PLAN = fit("gpt2-medium", "T4-16GB", global_batch=32)


def test_the_figure_shows_what_fit_found() -> None:
    figure = plan_figure(PLAN, "It fits")
    too_large, fitting, path, limit = [line.get_xydata() for line in cast("Any", figure.axes[0].lines)]
    assert limit[0, 1] == pytest.approx(PLAN.card.room / 1.05 / GB)
    assert len(too_large) + len(fitting) == len(PLAN.tried)
    assert too_large[:, 1].min() > limit[0, 1] >= fitting[:, 1].max()
    assert [tuple(place) for place in path] == [(step.lost, step.peak / GB) for step in PLAN.path]
    marks = ", ".join(text.get_text() for text in figure.axes[0].texts if text.get_text()[0].isdigit())
    assert sorted(map(int, marks.split(", "))) == [*range(len(PLAN.path))]
    assert (
        f"{sum(one.fits(PLAN.card) for one in PLAN.tried)} of {len(PLAN.tried)} configurations fit"
        in figure.alt
    )


def test_each_text_of_the_tree_is_within_its_box() -> None:
    figure = decision_tree()
    ax: Any = figure.axes[0]
    boxes = [patch.get_window_extent() for patch in ax.patches]
    for text in ax.texts:
        extent = text.get_window_extent()
        around = [box for box in boxes if box.contains(*extent.get_points().mean(axis=0))]
        assert all(box.x0 <= extent.x0 and extent.x1 <= box.x1 for box in around), text.get_text()


# --------------------------------------------------------------------------------------------------
# what a GPU said
def test_the_limits_are_those_that_the_gpu_recorded() -> None:
    lines = (ROOT / "tests/gpu/recorded/limits.jsonl").read_text(encoding="utf-8").splitlines()
    rows = {row["run"]: row for row in map(json.loads, lines)}
    assert {one.run.code() for one in limits.LIMITS} == set(rows)
    for one in limits.LIMITS:
        row = rows[one.run.code()]
        assert [one.too_small, one.works] == [row["too_small"], row["works"]]
        assert one.replayed == row["replayed"]["works"]
        for said in (row["device"], row["torch"].partition("+")[0], row["date"], row["replayed"]["torch"]):
            assert said in limits.PROVENANCE


def test_the_table_marks_what_differs_from_the_gpu() -> None:
    rows = limits.table().rows[1:]
    assert len(rows) == 2 * len(limits.SHOWN)
    for _, _, gpu, *answers in rows:
        assert all(said == gpu or said == f"{'no' if gpu == 'yes' else 'yes'} ✗" for said in answers)
