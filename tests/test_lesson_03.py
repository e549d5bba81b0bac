"""Lesson 03: answers to its exercises, its histogram, and torch's arithmetic."""

import math
from typing import Any

import numpy
import pytest
import torch
from checking import Answers, JudgedAnswers
from lesson_source import SOURCES, cells, names_from_cells
from torch.nn.utils import clip_grad_norm_

from course_utils import on_gpu
from course_utils.lessons.precision import checks
from course_utils.lessons.precision.figures import histogram_figure
from course_utils.lessons.shared.growing_script import stages

[LESSON] = SOURCES.glob("03_*.py")

# --------------------------------------------------------------------------------------------------
# 03.1: limits


def limits(e: int, m: int) -> list[float]:
    top = 2 ** (e - 1) - 1
    return [math.ldexp(1, -m), math.ldexp(2 ** (m + 1) - 1, top - m), math.ldexp(1, 1 - top)]


LIMITS = Answers(
    right=limits,
    wrong=[
        (lambda e, m: (2.0**-10, 65504.0, 2.0**-14), "Your epsilon is off for e = 8, m = 7"),
        (lambda e, m: (2.0**-m, (2 - 2.0**-m) * 2.0**127, 2.0**-126), "Is the bias right?"),
        (lambda e, m: (2.0**-m, 2.0**2 ** (e - 1), 2.0 ** (2 - 2 ** (e - 1))), "*beyond* the largest"),
        (lambda e, m: [*limits(e, m)[:2], limits(e, m)[2] / 2], "E = 0, which is for subnormal"),
    ],
)

# --------------------------------------------------------------------------------------------------
# 03.2: round_at_random


def as_whole_steps(values: torch.Tensor, step: float, u: torch.Tensor) -> torch.Tensor:
    return torch.floor(values / step + u)


def truncated(values: torch.Tensor, step: float, u: torch.Tensor) -> torch.Tensor:
    below = torch.trunc(values / step)
    return step * (below + (u < values / step - below))


def up_by_a_coin(values: torch.Tensor, step: float, u: torch.Tensor) -> torch.Tensor:
    return step * (torch.floor(values / step) + (u < 0.5))


ROUND_AT_RANDOM = Answers(
    right=lambda values, step, u: torch.from_numpy(numpy.ceil(values.numpy() / step - u.numpy()) * step),
    wrong=[
        (lambda values, step, u: torch.round(values / step) * step, "so nothing is stochastic"),
        (as_whole_steps, "not the multiples of `step` next to a value"),
        (truncated, "Truncation goes up there"),
        (up_by_a_coin, "like a fair coin"),
        (
            lambda values, step, u: as_whole_steps(values, step, torch.rand_like(u)) * step,
            "all randomness must come from u",
        ),
    ],
)

# --------------------------------------------------------------------------------------------------
# 03.3: exact_step


@torch.no_grad()
def halves_of_bytes(weights: Any, rests: Any, update: Any) -> None:
    """A master is two int16 next to each other, the lower one first."""
    for weight, rest in zip(weights, rests, strict=True):
        pairs = torch.stack([rest, weight.view(torch.int16)], dim=-1)
        update(pairs.view(torch.float32).squeeze(-1), weight.grad)
        rest.copy_(pairs[..., 0])
        weight.copy_(pairs[..., 1].view(torch.bfloat16))


@torch.no_grad()
def rounded_with_negative_rests(weights: Any, rests: Any, update: Any) -> None:
    for weight, rest in zip(weights, rests, strict=True):
        upper = weight.view(torch.int16)
        bits = (upper.int() << 16) + rest.int()
        update(bits.view(torch.float32), weight.grad)
        upper.copy_((bits + 0x8000) >> 16)
        rest.copy_(bits)


def test_weights_may_be_rounded_if_rests_may_be_negative() -> None:
    checks.exact_step(rounded_with_negative_rests)


def joined(weight: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
    return weight.detach().float().view(torch.int32) + (rest.int() & 0xFFFF)


def with_the_rests_sign(weights: Any, rests: Any, update: Any) -> None:
    for weight, rest in zip(weights, rests, strict=True):
        bits = weight.detach().float().view(torch.int32) | rest.int()
        update(bits.view(torch.float32), weight.grad)
        weight.detach().view(torch.int16).copy_(bits >> 16)
        rest.copy_(bits)


@torch.no_grad()
def rounded_weights(weights: Any, rests: Any, update: Any) -> None:
    for weight, rest in zip(weights, rests, strict=True):
        bits = joined(weight, rest)
        update(bits.view(torch.float32), weight.grad)
        weight.copy_(bits.view(torch.float32))
        rest.copy_(bits)


@torch.no_grad()
def without_rests(weights: Any, rests: Any, update: Any) -> None:
    for weight in weights:
        master = weight.float()
        update(master, weight.grad)
        weight.copy_(master)


def new_rests(weights: Any, rests: Any, update: Any) -> None:
    for place, weight in enumerate(weights):
        bits = joined(weight, rests[place])
        update(bits.view(torch.float32), weight.grad)
        weight.detach().view(torch.int16).copy_(bits >> 16)
        rests[place] = bits.to(torch.int16)


def all_together(weights: Any, rests: Any, update: Any) -> None:
    masters = [joined(weight, rest) for weight, rest in zip(weights, rests, strict=True)]
    for weight, rest, bits in zip(weights, rests, masters, strict=True):
        update(bits.view(torch.float32), weight.grad)
        weight.detach().view(torch.int16).copy_(bits >> 16)
        rest.copy_(bits)


EXACT_STEP = Answers(
    right=halves_of_bytes,
    wrong=[
        (with_the_rests_sign, "Where a rest is negative, the upper half is wrong"),
        (rounded_weights, "Some weights were rounded up, but not their rests"),
        (without_rests, "All rests are still 0 after a step"),
        (new_rests, "A weight or a rest is a new tensor"),
        (all_together, "Several masters exist at once"),
    ],
)

# --------------------------------------------------------------------------------------------------
# 03.4: good_step


def clips_scaled(weights: Any, masters: Any, optimizer: Any, loss: Any, scale: float) -> bool:
    """Clips scaled gradients at the scale, before it divides them."""
    loss.mul(scale).backward()
    for weight, master in zip(weights, masters, strict=True):
        master.grad = weight.grad.to(torch.float32)
        weight.grad = None
    taken = torch.isfinite(clip_grad_norm_(masters, scale)).item()
    for master in masters:
        master.grad.mul_(1 / scale)
    if taken:
        optimizer.step()
        for weight, master in zip(weights, masters, strict=True):
            weight.data.copy_(master.data)
    optimizer.zero_grad()
    return bool(taken)


def step_without(left_out: str) -> Any:
    """A step that leaves one thing out."""

    def answer(weights: Any, masters: Any, optimizer: Any, loss: Any, scale: float) -> bool:
        (loss * scale).backward()
        for weight, master in zip(weights, masters, strict=True):
            gradient = weight.grad if left_out == "upcast" else weight.grad.float()
            master.grad = (gradient / scale).float()
            weight.grad = None
        norm = clip_grad_norm_(masters, math.inf if left_out == "clip" else 1.0)
        taken = left_out == "look" or bool(norm.isfinite())
        if taken:
            optimizer.step()
        if taken and left_out != "copy":
            for weight, master in zip(weights, masters, strict=True):
                weight.data.copy_(master)
        if left_out != "clear":
            optimizer.zero_grad()
        return taken

    return answer


GOOD_STEP = Answers(
    right=clips_scaled,
    wrong=[
        (step_without("upcast"), "Tiny gradients get lost"),
        (step_without("clip"), "Large gradients are not clipped"),
        (step_without("look"), "The optimizer steps with infinite gradients"),
        (step_without("copy"), "The fp16 weights do not get the masters' numbers"),
        (step_without("clear"), "Gradients are left behind"),
    ],
)

ANSWERS = {"03.1": LIMITS, "03.2": ROUND_AT_RANDOM, "03.3": EXACT_STEP, "03.4": GOOD_STEP}


class TestAnswers(JudgedAnswers):
    answers = ANSWERS


# --------------------------------------------------------------------------------------------------
# What the lesson says of a step


def test_the_histogram_counts_what_is_lost() -> None:
    just_lost = 2.0**-25  # half of fp16's smallest number is rounded to even: to 0
    gradients = torch.tensor([just_lost, just_lost * (1 + 2**-10), 2.0**-10, 1.0])
    figure: Any = histogram_figure(gradients, "A quarter is lost.")
    assert "fp16 turns 25 % of the gradients into zero" in figure.alt
    heights = {bar.get_x(): bar.get_height() for bar in figure.axes[0].patches if bar.get_height()}
    assert heights == {-25: 2, -10: 1, 0: 1}
    assert ["from 2⁻²⁵", "2", "subnormal"] in figure.rows
    assert "0 % of the gradients times 4,096" in histogram_figure(gradients, "None is lost.", 2.0**12).alt


def test_products_of_a_layer_are_added_in_fp32_and_rounded_once() -> None:
    dice = torch.Generator().manual_seed(0)
    shapes = ((512, 8), (512, 6), (8, 6))
    dy, x, W = (torch.randint(-16, 17, shape, generator=dice).bfloat16() for shape in shapes)
    for one, other in ((x, W.T), (dy.T, x), (dy, W)):
        exact = one.float() @ other.float()  # whole numbers: nothing of the sum is rounded
        assert torch.equal(one @ other, exact.bfloat16())
    assert not torch.equal((dy.T @ x).float(), dy.float().T @ x.float()), "dL/dW is rounded"


# --------------------------------------------------------------------------------------------------
# What the lesson asks learners to write, and the step that it weighs


def said(part: str, line: str, written: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Return the last line that the cell with `part` prints once a learner has `written` over `line`."""
    names = names_from_cells("03", "import predict", "value = 0.1", "class Block", "import on_gpu")
    [cell] = [cell for cell in cells(LESSON) if part in cell]
    assert line in cell
    exec(cell.replace(line, written), dict(names))
    return capsys.readouterr().out.splitlines()[-1]


def test_a_master_is_right_only_in_fp32_and_its_weight_only_rounded(capsys: Any) -> None:
    line = "weight = weight + update"
    right = "master = master + update; weight = master.bfloat16()"
    assert said("def with_master", line, right, capsys).startswith("Right")
    wrong = {
        line: "weight 1.000 in torch.bfloat16.",
        "master = master + update; weight = master": "weight 1.100 in torch.float32.",
        "weight = weight + update; master = weight": "master 1.000 in torch.bfloat16",
    }
    for written, told in wrong.items():
        heard = said("def with_master", line, written, capsys)
        assert heard.startswith("Not yet") and told in heard


def test_one_line_makes_eighteen_bytes_of_twenty(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COURSE_SOURCE", "simulated")
    lines = {
        "pass": "20",
        "weight.grad = None": "Right.",
        "master.grad = None": "16",
        "adam.zero_grad()": "16",
    }
    for written, told in lines.items():
        assert told in said("# write one line here", "# write one line here", written, capsys)


def test_the_lessons_step_is_the_scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COURSE_SOURCE", "simulated")
    parts = ("import predict", "value = 0.1", "class Block", "class GPT", "def weigh")
    weigh = names_from_cells("03", *parts)["weigh"]
    simulated = {stage.lesson: stage.simulated for stage in stages()}
    with on_gpu():
        for lesson, autocast in (("02", False), ("03", True)):
            assert weigh(8, autocast=autocast)[1] == pytest.approx(simulated[lesson], rel=0.002)
