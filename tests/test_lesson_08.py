"""Lesson 08: answers to its exercises, and its recording."""

import json
import math
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy
import torch
from checking import Answers, JudgedAnswers
from edits import edited
from torch.nn.functional import cross_entropy

from course_utils.lessons.accumulation import recorded
from course_utils.lessons.accumulation.micro_batches import mean_loss

Parts = Iterator[tuple[torch.Tensor, torch.Tensor]]


# --------------------------------------------------------------------------------------------------
# 08.1: train_pass
def train_pass(model: Any, optimizer: Any, loader: Parts, k: int) -> list[float]:
    """Counts micro-batches, and divides gradients at the end of each group."""
    losses: list[float] = []
    total: Any = 0
    count = waiting = 0

    def finish() -> None:
        nonlocal total, count, waiting
        if count:
            for weight in model.parameters():
                if weight.grad is not None:
                    weight.grad /= count
            optimizer.step()
            losses.append((total / count).item())
        optimizer.zero_grad()
        total = count = waiting = 0

    for tokens, targets in loader:
        loss = cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), reduction="sum")
        loss.backward()
        total = total + loss.detach()
        count = count + int((targets != -100).sum())
        waiting = waiting + 1
        if waiting == k:
            finish()
    if waiting:
        finish()
    return losses


def of_means(model: Any, optimizer: Any, loader: Parts, k: int) -> list[float]:
    losses: list[float] = []
    while group := list(islice(loader, k)):
        for part in group:
            (mean_loss(model, part) / k).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(1.0)
    return losses


def by_index(model: Any, optimizer: Any, loader: Any, k: int) -> list[float]:
    for first in range(0, len(loader), k):
        of_means(model, optimizer, iter(loader[first : first + k]), k)
    return []


def group_by_group(model: Any, optimizer: Any, loader: Parts, k: int) -> list[float]:
    """Looks at a whole group first."""
    losses: list[float] = []
    while group := list(islice(loader, k)):
        losses += train_pass(model, optimizer, iter(group), k)
    return losses


TRAIN_PASS = Answers(
    right=train_pass,
    wrong=[
        (of_means, "mean of means"),
        (by_index, "The loader is a stream"),
        (group_by_group, "You hold several micro-batches"),
        (edited(train_pass, "    if waiting:\n", "    if waiting == k:\n"), "not one number for each step"),
        (edited(train_pass, "if count:", "if True:"), "A mean over no token at all is 0/0"),
    ],
)


# --------------------------------------------------------------------------------------------------
# 08.2: add_up_in_fp32
def add_up(weights: list[Any], masters: list[Any]) -> list[Any]:
    def add(master: Any, weight: Any) -> None:
        gradient, weight.grad = weight.grad, None
        master.grad = gradient.float() + (0 if master.grad is None else master.grad)

    pairs = [pair for pair in zip(weights, masters, strict=True) if pair[0].requires_grad]
    return [weight.register_post_accumulate_grad_hook(partial(add, master)) for weight, master in pairs]


def late_binding(weights: list[Any], masters: list[Any]) -> list[Any]:
    handles = []
    for weight, master in zip(weights, masters, strict=True):

        def add(weight: Any) -> None:
            master.grad = weight.grad.float() + (0 if master.grad is None else master.grad)  # noqa: B023
            weight.grad = None

        if weight.requires_grad:
            handles.append(weight.register_post_accumulate_grad_hook(add))
    return handles


def kept_for_later(weights: list[Any], masters: list[Any]) -> list[Any]:
    kept: list[Any] = []
    looks = [weight.register_hook(kept.append) for weight in weights if weight.requires_grad]
    return [*looks, *add_up(weights, masters)]


IN_FP32 = "gradient.float() + (0 if master.grad is None else master.grad)"
IN_BF16 = "(gradient + (0 if master.grad is None else master.grad.bfloat16())).float()"
ADD_UP = Answers(
    right=add_up,
    wrong=[
        (late_binding, "to another weight's master"),
        (kept_for_later, "Gradients in bf16 wait"),
        (lambda weights, masters: add_up(weights, masters)[1:], "some hook is still there"),
        (
            edited(add_up, "weight.grad = weight.grad, None", "_ = weight.grad, None"),
            "still hold their gradient",
        ),
        (edited(add_up, "if pair[0].requires_grad", ""), "A frozen weight takes no hook"),
        (edited(add_up, IN_FP32, IN_BF16), "rounded to bf16"),
    ],
)


# --------------------------------------------------------------------------------------------------
# 08.3: scaled_step
def scaled_step(model: Any, optimizer: Any, parts: Any, state: Any, longest: float, every: int) -> bool:
    """By the length of all gradients, which is not finite if one number is not."""
    for part in parts:
        (state["scale"] * mean_loss(model, part) / len(parts)).backward()
    used = [weight for weight in model.parameters() if weight.grad is not None]
    finite = math.isfinite(sum(weight.grad.abs().sum().item() for weight in used))
    if finite:
        for weight in used:
            weight.grad /= state["scale"]
        torch.nn.utils.clip_grad_norm_(used, longest)
        optimizer.step()
        state["good"] += 1
        if state["good"] == every:
            state.update(scale=2 * state["scale"], good=0)
    else:
        state.update(scale=state["scale"] / 2, good=0)
    optimizer.zero_grad()
    return finite


DIVIDE = """        for weight in used:
            weight.grad /= state["scale"]
"""
CLIP = "        torch.nn.utils.clip_grad_norm_(used, longest)\n"
CLEAR = "    optimizer.zero_grad()\n"
SCALED_STEP = Answers(
    right=scaled_step,
    wrong=[
        (
            edited(scaled_step, "    if finite:", "    if True:"),
            "you step with a sum of gradients that has over",
        ),
        (edited(scaled_step, DIVIDE + CLIP, CLIP + DIVIDE), "You clip gradients that still have the scale"),
        (edited(scaled_step, DIVIDE, ""), "The optimizer steps with gradients that still have"),
        (edited(scaled_step, CLEAR, "    if finite:\n    " + CLEAR), "one that was left out, some `.grad`"),
        (edited(scaled_step, 'scale=2 * state["scale"], good=0', 'scale=2 * state["scale"]'), "begins again"),
    ],
)


# --------------------------------------------------------------------------------------------------
# 08.4: measure_noise
def measure_noise(model: Any, parts: list[Any]) -> Any:
    """Adds up squared lengths as backward makes gradients; solves the two equations as a matrix."""
    k = len(parts)
    b = len(parts[0][0])
    squares = torch.zeros((), dtype=torch.float64)

    def look(gradient: Any) -> None:
        squares.add_(k * gradient.square().sum())

    handles = [weight.register_hook(look) for weight in model.parameters() if weight.requires_grad]
    for part in parts:
        (mean_loss(model, part) / k).backward()
    for handle in handles:
        handle.remove()
    used = [weight.grad for weight in model.parameters() if weight.grad is not None]
    long = sum(gradient.square().sum().item() for gradient in used)
    return tuple(numpy.linalg.solve([[1, 1 / b], [1, 1 / b / k]], [squares.item(), long]))


def by_difference(model: Any, parts: list[Any]) -> tuple[float, float]:
    """Each gradient is the difference between `.grad` and the copy that it keeps."""
    k = len(parts)
    b = len(parts[0][0])
    squares = 0.0
    before: dict[Any, Any] = {}
    for part in parts:
        (mean_loss(model, part) / k).backward()
        now = {one: one.grad for one in model.parameters() if one.grad is not None}
        squares += sum(k * (grad - before.get(one, 0)).square().sum().item() for one, grad in now.items())
        before = {one: grad.clone() for one, grad in now.items()}
    long = sum(one.square().sum().item() for one in before.values())
    noise = (squares - long) / (1 / b - 1 / (k * b))
    return long - noise / (k * b), noise


def with_noise_in_the_mean(model: Any, parts: list[Any]) -> tuple[float, float]:
    _, noise = measure_noise(model, parts)
    used = [weight.grad for weight in model.parameters() if weight.grad is not None]
    return sum(gradient.square().sum().item() for gradient in used), noise


MEASURE_NOISE = Answers(
    right=measure_noise,
    wrong=[
        (by_difference, "another set of gradients"),
        (with_noise_in_the_mean, "a little noise is still in it"),
        (edited(measure_noise, "squares.add_(k *", "squares.add_(1 / k *"), "of a micro-batch's own loss"),
        (edited(measure_noise, "handle.remove()", "pass"), "Your hooks are still on"),
        (edited(measure_noise, "squares.add_", "return squares.add_"), "Let it return nothing"),
    ],
)

ANSWERS = {"08.1": TRAIN_PASS, "08.2": ADD_UP, "08.3": SCALED_STEP, "08.4": MEASURE_NOISE}


class TestAnswers(JudgedAnswers):
    answers = ANSWERS


# --------------------------------------------------------------------------------------------------
# the recording
def test_the_lessons_table_is_the_recording() -> None:
    plain = {"precision": "bf16", "attention": "flash", "recompute": "none", "optimizer": "fused"}
    plain |= {"loss_chunks": 1, "budget": 1.0, "seq_len": 1024, "model": "gpt2"}
    split, compiled = {}, {}
    file = Path(__file__).parent / "gpu" / "recorded" / "turns.jsonl"
    for row in map(json.loads, file.read_text(encoding="utf-8").splitlines()):
        choice = row["choice"]
        if not plain.items() <= choice.items():
            continue
        b, k = choice["micro_batch"], choice["micro_batches"]
        counted = row["peak_allocated"], row["tokens_per_second"]
        if choice["compiled"] == "model" and k == 1 and row["group"] != "stages":
            compiled[b] = counted
        if not choice["compiled"] and b * k == 64:
            split[b] = counted
        version = row["torch"].partition("+")[0]
        assert f"recorded on {row['device']} · torch {version} · {row['date']}" == recorded.PROVENANCE
    assert split == recorded.SPLIT and compiled == recorded.COMPILED
