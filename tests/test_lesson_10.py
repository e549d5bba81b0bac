"""Lesson 10: answers to its exercises, its own training on ranks, and the ring's picture."""

import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checking import Answers, JudgedAnswers
from edits import edited
from matplotlib.text import Annotation, Text
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from course_utils.lessons.data_parallelism import ddp_training, figures
from course_utils.lessons.data_parallelism.checks import (
    RANKS,
    judge_ring,
    judge_step,
    judge_tokens,
    judge_training,
)
from course_utils.lessons.data_parallelism.widget import ring_player
from course_utils.lessons.shared.on_ranks import outcomes


# --------------------------------------------------------------------------------------------------
# 10.1: exposed
def exposed(ready: Any, sizes: Any, D: int, alpha: float, beta: float) -> float:
    """From the last bucket back to the first."""

    def ends(number: int) -> float:
        before = ends(number - 1) if number else 0.0
        return max(before, ready[number]) + 2 * (D - 1) * alpha + 2 * (D - 1) / D * beta * sizes[number]

    return ends(len(ready) - 1) - ready[-1]


EXPOSED = Answers(
    right=exposed,
    wrong=[
        (edited(exposed, "max(before, ready[number])", "ready[number]"), "Is the link free when"),
        (edited(exposed, "max(before, ready[number])", "before"), "before it is ready"),
        (edited(exposed, " - ready[-1]", ""), "Return only the time after backward"),
        (edited(exposed, "2 * (D - 1) / D * beta", "2 * (D - 1) * beta"), "cuts it into D parts"),
        (edited(exposed, "2 * (D - 1) * alpha", "alpha"), "Draw a row for backward"),
    ],
)


# --------------------------------------------------------------------------------------------------
# 10.2: ring
def ring(parts: Any, rank: int, ranks: int, send: Any, receive: Any) -> Any:
    """Both halves in one loop."""
    for step in range(2 * (ranks - 1)):
        send(parts[(rank - step) % ranks], (rank + 1) % ranks)
        comes = (rank - step - 1) % ranks
        parts[comes] = receive((rank - 1) % ranks) + (parts[comes] if step < ranks - 1 else 0)
    return parts


def to_everybody(parts: Any, rank: int, ranks: int, send: Any, receive: Any) -> Any:
    others = [other for other in range(ranks) if other != rank]
    for other in others:
        send(torch.stack(parts), other)
    return list(sum([receive(other) for other in others], torch.stack(parts)))


def waiting_first(parts: Any, rank: int, ranks: int, send: Any, receive: Any) -> Any:
    arrived = receive((rank - 1) % ranks)
    send(parts[rank] + arrived, (rank + 1) % ranks)
    return parts


def in_one_box(parts: Any, rank: int, ranks: int, send: Any, receive: Any, box: Any = {}) -> Any:  # noqa: B006, the slip
    box[ranks, rank] = [part.clone() for part in parts]
    for _ in range(ranks - 1):
        send(parts[rank], (rank + 1) % ranks)
        receive((rank - 1) % ranks)
    return [sum(kept[part] for (size, _), kept in box.items() if size == ranks) for part in range(ranks)]


RING = Answers(
    right=ring,
    wrong=[
        (edited(ring, "2 * (ranks - 1)", "ranks - 1"), "this is only the first half"),
        (edited(ring, " if step < ranks - 1 else 0", ""), "more than once"),
        (to_everybody, "this is not a ring"),
        (waiting_first, "Deadlock: rank 0 waits for a message from rank 3"),
        (in_one_box, "but not on real ranks: do you keep anything outside"),
    ],
)


# --------------------------------------------------------------------------------------------------
# 10.3: token_backward
def token_backward(model: Any, inputs: Any, targets: Any) -> float:
    """Gathers losses and numbers of tokens as objects."""
    own = (targets != -100).sum().item()
    loss = cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), reduction="sum")
    found: list = [None] * dist.get_world_size()
    dist.all_gather_object(found, (loss.item(), own))
    tokens = sum(count for _, count in found)
    (loss * len(found) / tokens).backward()
    return sum(one for one, _ in found) / tokens


MEAN_OF_MEANS = 'reduction="mean") * own'
SKIPPED = "if own:\n        (loss * len(found) / tokens).backward()"
TOKEN_BACKWARD = Answers(
    right=token_backward,
    wrong=[
        (edited(token_backward, "* len(found) / tokens)", "/ own)"), "You leave the loss as it is"),
        (
            edited(token_backward, "* len(found) / tokens)", "/ tokens)"),
            "DDP takes the mean of their gradients",
        ),
        (edited(token_backward, "(loss * len(found) / tokens).backward()", SKIPPED), "does not go backward"),
        (edited(token_backward, 'reduction="sum")', MEAN_OF_MEANS), "A mean over no token is 0/0"),
        (edited(token_backward, "* len(found)", "* 3"), "Who knows how many ranks there are?"),
    ],
)


# --------------------------------------------------------------------------------------------------
# 10.4: mended_step
def step(model: Any, optimizer: Any, micro_batches: Any) -> None:
    """The last micro-batch after the others."""
    optimizer.zero_grad()
    *early, (x, y) = micro_batches
    with model.no_sync():
        for inputs, targets in early:
            (mse_loss(model(inputs), targets) / len(micro_batches)).backward()
    (mse_loss(model(x), y) / len(micro_batches)).backward()
    optimizer.step()


def joined(model: Any, optimizer: Any, micro_batches: Any) -> None:
    inputs, targets = (torch.cat(parts) for parts in zip(*micro_batches, strict=True))
    mse_loss(model(inputs), targets).backward()
    optimizer.step()
    optimizer.zero_grad()


MENDED_STEP = Answers(
    right=step,
    wrong=[
        (edited(step, "mse_loss(model(x)", "mse_loss(model.module(x)"), "DDP exchanges no gradient at all"),
        (edited(step, "len(micro_batches)", "4"), "Right with 4 micro-batches"),
        (edited(step, "optimizer.zero_grad()", "pass"), "what does a step leave behind?"),
        (edited(step, "model.no_sync()", "torch.enable_grad()"), "more than once per step"),
        (joined, "the memory is not"),
    ],
)


# --------------------------------------------------------------------------------------------------
# 10.5: fixed_training
def train(body: Any, data: Any, epochs: int, batch: int) -> Any:
    model = DistributedDataParallel(nn.Sequential(*body, nn.Linear(8, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sampler = DistributedSampler(data)
    losses = []
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros(2)
        for x, y in DataLoader(data, batch, sampler=sampler):
            optimizer.zero_grad()
            loss = mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            total += torch.stack([len(x) * loss.detach(), torch.tensor(float(len(x)))])
        dist.all_reduce(total)
        losses.append((total[0] / total[1]).item())
    return [model, losses]


WRAPPED = "DistributedDataParallel(nn.Sequential(*body, nn.Linear(8, 1)))"
LATE = "DistributedDataParallel(body); model.module.append(nn.Linear(8, 1))"
FIXED_TRAINING = Answers(
    right=train,
    wrong=[
        (edited(train, WRAPPED, LATE), "Ranks start with different weights"),
        (edited(train, "sampler=sampler", "shuffle=True"), "more than all samples"),
        (edited(train, "sampler.set_epoch(epoch)", "pass"), "the same order"),
        (edited(train, "dist.all_reduce(total)", "pass"), "losses of its own samples"),
        (edited(train, "total[0] / total[1]", "total[0] / len(sampler) / 3"), "Right on three ranks"),
    ],
)


# --------------------------------------------------------------------------------------------------
ANSWERS = {
    "10.1": EXPOSED, "10.2": RING, "10.3": TOKEN_BACKWARD, "10.4": MENDED_STEP, "10.5": FIXED_TRAINING
}  # fmt: skip


def reaching_ranks(answers: Answers) -> list[Any]:
    """The answers that pass the dry run in one process."""
    return [answers.right, *(answer for answer, words in answers.wrong if "go backward" not in words)]


@pytest.fixture(scope="module", autouse=True)
def tried() -> None:
    """All that reach real ranks, by the same processes: a start takes seconds.

    Outcomes are kept for the checks.
    """
    judged = {judge_tokens: TOKEN_BACKWARD, judge_step: MENDED_STEP, judge_training: FIXED_TRAINING}
    trials = [(judge, answer) for judge, answers in judged.items() for answer in reaching_ranks(answers)]
    outcomes(RANKS, [(judge_ring, ring), (judge_ring, in_one_box), *trials])
    on_three = [(judge_training, FIXED_TRAINING.wrong[-1][0]), (judge_tokens, TOKEN_BACKWARD.wrong[-1][0])]
    outcomes(2, [(judge_training, train), (judge_tokens, token_backward), *on_three])


class TestAnswers(JudgedAnswers):
    answers = ANSWERS


# --------------------------------------------------------------------------------------------------
# The lesson's own code
@pytest.mark.parametrize(
    ("gpus", "source", "device", "why"),
    [
        (1, "live", "cpu", "2 ranks need 2 GPUs, torch finds 1"),
        (2, "", "cuda:1", ""),
        (2, "simulated", "cpu", "COURSE_SOURCE is simulated"),
    ],
)
def test_ranks_take_gpus_where_each_can_have_its_own(
    gpus: int, source: str, device: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "COURSE_SOURCE": source}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    taken: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    assert ddp_training.device_of_rank() == torch.device(device)
    assert taken == ([torch.device(device)] if device != "cpu" else [])
    assert ddp_training.why_on_cpus() == why


def test_a_traced_step_has_its_buckets_in_order_and_inside_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ddp_training, "LAYERS", 6)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # a process group changes it
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        found = ddp_training.one_rank(torch.device("cpu"))
    finally:
        dist.destroy_process_group()
    many = found["many"]
    ready = [bucket["ready"] for bucket in many["buckets"]]
    assert len(ready) > 1 and ready == sorted(ready)
    sizes = sum(bucket["size"] for bucket in many["buckets"])
    assert sizes == found["gradients"] == 6 * (512 * 512 + 512) * 4
    assert all(many["forward"] < b["ready"] <= b["done"] <= many["end"] for b in many["buckets"])
    assert len(found["one"]["buckets"]) == 1 and not found["none"]["buckets"]
    assert found["where"] == "1 processes on the CPU that ran this cell (gloo)"


def texts(figure: Any) -> list[str]:
    return [text.get_text() for text in figure.findobj(Text)]


RECORDED = [
    [[1, 1, 1], [1, 1, 101], [1, 111, 101], [111, 111, 101], [111, 111, 111]],
    [[10, 10, 10], [11, 10, 10], [11, 10, 111], [11, 111, 111], [111, 111, 111]],
    [[100, 100, 100], [100, 110, 100], [111, 110, 100], [111, 110, 111], [111, 111, 111]],
]
"""The parts of three ranks after each step; rank r begins with 10^r."""


def test_a_ring_is_drawn_step_by_step() -> None:
    half: Any = figures.ring_figure(RECORDED, 2)
    assert "adding up: 3 of 9 parts" in half.alt
    assert "rank 0 sends part 2, rank 1 sends part 0" in half.alt
    held = [text for text in texts(half) if text.isdigit()]
    assert held == [f"{part:03d}" for rank in RECORDED for part in rank[2]]
    assert [row[1:] for row in half.rows[1:]] == [*map(list, zip(held[:3], held[3:6], held[6:], strict=True))]
    arrows = [(round(arrow.xyann[0], 1), arrow.xy[1]) for arrow in half.findobj(Annotation)]
    assert arrows == [(-0.7, 1), (0.3, 2), (1.3, 0), (2.3, 1)]  # the last one comes in again at the left
    assert not figures.ring_figure(RECORDED, 0).findobj(Annotation)
    player = ring_player(RECORDED, step=2)
    assert "Step 2 of 4" in player.picture.value
    player.controls["step"].value = 4
    assert "9 of 9 parts" in player.picture.value
    player.play.value = 1
    assert "Step 1 of 4" in player.picture.value
    with pytest.raises(ValueError, match="steps 0 to 4"):
        ring_player(RECORDED, step=5)
