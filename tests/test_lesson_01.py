"""Lesson 01: answers to its exercises; the puzzle, the loss, the layer slider and the first steps."""

from collections.abc import Iterable
from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
import torch
from checking import Answers, JudgedAnswers
from engine import simulate
from torch.nn.functional import cross_entropy

from course_utils import PRESETS, TrainingRun, estimate, gpu
from course_utils.lessons.one_step import checks as lesson_01
from course_utils.lessons.one_step.widget import layer_slider

# --------------------------------------------------------------------------------------------------
# 01.1: peak


def in_one_pass(tensors: Any) -> int:
    events = [(born, 1, size) for _, size, born, _ in tensors]
    events += [(died, 0, -size) for _, size, _, died in tensors if died is not None]
    return max(accumulate(change for _, _, change in sorted(events)))


def with_the_dying(tensors: Any) -> int:
    lives = [(size, born, float("inf") if died is None else died) for _, size, born, died in tensors]
    return max(sum(size for size, born, died in lives if born <= t <= died) for _, t, _ in lives)


def until_the_last_death(tensors: Any) -> int:
    end = max(died for *_, died in tensors if died is not None)
    lives = [(size, born, end if died is None else died) for _, size, born, died in tensors]
    return max(sum(size for size, born, died in lives if born <= t < died) for t in range(end))


PEAK = Answers(
    right=in_one_pass,
    wrong=[
        (lambda tensors: sum(size for _, size, _, _ in tensors), "everything that ever lived"),
        (with_the_dying, "You count a tensor at the event of its death"),
        (until_the_last_death, "You treat None as the last event"),
        (
            lambda tensors: max(sum(n for _, n, b, d in tensors if b <= t < d) for t in range(20)),
            "with None never dies: handle it before you compare.",
        ),
    ],
)


def test_peak_of_the_real_step_is_what_the_tracker_saw() -> None:
    lives, seen = lesson_01.real_step()
    assert in_one_pass(lives) == seen


# --------------------------------------------------------------------------------------------------
# 01.2: weigh


def storages(tensors: Iterable[Any]) -> dict[int, int]:
    """Bytes of each storage by its address; what is no tensor has none."""
    found = [one.untyped_storage() for one in tensors if torch.is_tensor(one)]
    return {storage.data_ptr(): storage.nbytes() for storage in found}


def weigh(model: Any, optimizer: Any) -> dict[str, int]:
    """Of each kind, those storages that no kind before it has."""
    own = list(model.parameters())
    updated = [p for group in optimizer.param_groups for p in group["params"]]
    gradients = [p.grad for p in own + updated]
    states = [value for state in optimizer.state.values() for value in state.values()]
    names = ("weights", "master_weights", "gradients", "states")
    sizes = {}
    seen: set[int] = set()
    for name, tensors in zip(names, (own, updated, gradients, states), strict=True):
        new = storages(tensors)
        sizes[name] = sum(size for place, size in new.items() if place not in seen)
        seen.update(new)
    return sizes


def counts_updated_weights(model: Any, optimizer: Any) -> dict[str, int]:
    updated = [p for group in optimizer.param_groups for p in group["params"]]
    return weigh(model, optimizer) | {"master_weights": sum(storages(updated).values())}


def compares_tensors(model: Any, optimizer: Any) -> dict[str, int]:
    own = {id(p) for p in model.parameters()}
    updated = [p for group in optimizer.param_groups for p in group["params"]]
    return weigh(model, optimizer) | {"master_weights": sum(p.nbytes for p in updated if id(p) not in own)}


def asks_every_gradient(model: Any, optimizer: Any) -> dict[str, int]:
    return weigh(model, optimizer) | {"gradients": sum(p.grad.nbytes for p in model.parameters())}


def without_frozen(model: Any, optimizer: Any) -> dict[str, int]:
    trained = [p for p in model.parameters() if p.requires_grad]
    return weigh(model, optimizer) | {"weights": sum(storages(trained).values())}


def slice_by_slice(model: Any, optimizer: Any) -> dict[str, int]:
    sizes = {p.untyped_storage().data_ptr(): p.nbytes for p in model.parameters()}
    return weigh(model, optimizer) | {"weights": sum(sizes.values())}


def weighs_and_frees(model: Any, optimizer: Any) -> dict[str, int]:
    found = weigh(model, optimizer)
    optimizer.zero_grad()
    return found


WEIGH = Answers(
    right=weigh,
    wrong=[
        (counts_updated_weights, "There is no master copy here"),
        (compares_tensors, "has the weight's own storage"),
        (asks_every_gradient, "Not every parameter has a gradient"),
        (without_frozen, "Some weights are frozen"),
        (slice_by_slice, "All parameters are slices of one buffer"),
        (weighs_and_frees, "changes what it should only read"),
    ],
)

# --------------------------------------------------------------------------------------------------
# 01.3: largest_micro_batch


def fits(card: str, **changes: Any) -> bool:
    return estimate(lesson_01.FIT_RUN.replace(**changes)).total <= gpu(card).room


def from_the_largest_down(card: str, global_batch: int) -> int:
    sizes = [size for size in range(global_batch, 0, -1) if global_batch % size == 0]
    return next((b for b in sizes if fits(card, micro_batch=b, global_batch=global_batch)), 0)


def on_its_own(card: str, global_batch: int) -> int:
    sizes = [size for size in range(1, global_batch + 1) if global_batch % size == 0]
    return max([0, *(size for size in sizes if fits(card, micro_batch=size, global_batch=size))])


def of_any_size(card: str, global_batch: int) -> int:
    return next((size for size in range(global_batch, 0, -1) if fits(card, micro_batch=size)), 0)


def of_those_that_fit(card: str, global_batch: int) -> int:
    sizes = [size for size in range(1, global_batch + 1) if global_batch % size == 0]
    return max(size for size in sizes if fits(card, micro_batch=size, global_batch=global_batch))


FITTING = Answers(
    right=from_the_largest_down,
    wrong=[
        (on_its_own, "You estimated one micro-batch on its own"),
        (of_any_size, "does not divide the batch of"),
        (of_those_that_fit, "fails when nothing fits"),
        (lambda card, global_batch: global_batch, "the whole batch, whether it fits or not"),
    ],
)

# --------------------------------------------------------------------------------------------------
# 01.4: train


def divided_by_hand(model: Any, batches: Any, optimizer: Any) -> torch.Tensor:
    """Gradients divided in the end and left as zeros; the mean is a tensor without a graph."""
    losses = []
    for inputs, targets in batches:
        loss = cross_entropy(model(inputs), targets)
        loss.backward()
        losses.append(loss.detach())
    for parameter in model.parameters():
        parameter.grad /= len(batches)
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    return torch.stack(losses).mean()


def leaky(model: Any, batches: Any, optimizer: Any) -> float:
    total = torch.zeros(())
    for inputs, targets in batches:
        total = total + cross_entropy(model(inputs), targets) / len(batches)
    total.backward()
    optimizer.step()
    optimizer.zero_grad()
    return total.item()


def undivided(model: Any, batches: Any, optimizer: Any) -> float:
    optimizer.zero_grad()
    losses = []
    for inputs, targets in batches:
        loss = cross_entropy(model(inputs), targets)
        loss.backward()
        losses.append(loss.item())
    optimizer.step()
    return sum(losses) / len(losses)


def as_one_batch(model: Any, batches: Any, optimizer: Any) -> float:
    inputs, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
    return undivided(model, [(inputs, targets)], optimizer)


def step_by_step(model: Any, batches: Any, optimizer: Any) -> float:
    return sum(undivided(model, [batch], optimizer) for batch in batches) / len(batches)


def keeps_graphs(model: Any, batches: Any, optimizer: Any) -> float:
    total = 0.0
    for inputs, targets in batches:
        loss = cross_entropy(model(inputs), targets) / len(batches)
        loss.backward(retain_graph=True)
        total += loss.item()
    optimizer.step()
    optimizer.zero_grad()
    return total


def own_sums_of_gradients(model: Any, batches: Any, optimizer: Any) -> float:
    """Right, although more than `.grad` waits from batch to batch: it does not grow with the batch."""
    sums = [torch.zeros_like(weight) for weight in model.parameters()]
    total = 0.0
    for inputs, targets in batches:
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs), targets) / len(batches)
        loss.backward()
        total += loss.item()
        for weight, gradient in zip(model.parameters(), sums, strict=True):
            gradient += weight.grad
    for weight, gradient in zip(model.parameters(), sums, strict=True):
        weight.grad = gradient
    optimizer.step()
    optimizer.zero_grad()
    return total


def test_the_leak_is_told_from_whatever_does_not_grow_with_the_batch() -> None:
    lesson_01.train(own_sums_of_gradients)


def sum_of_losses(model: Any, batches: Any, optimizer: Any) -> float:
    return len(batches) * divided_by_hand(model, batches, optimizer).item()


TRAIN = Answers(
    right=divided_by_hand,
    wrong=[
        (leaky, "The leak is still there"),
        (keeps_graphs, "or a graph after backward?"),
        (as_one_batch, "All batches go forward as one"),
        (undivided, "The parameters moved too far"),
        (step_by_step, "You step after every batch"),
        (sum_of_losses, "You return the sum of the losses"),
    ],
)


ANSWERS = {"01.1": PEAK, "01.2": WEIGH, "01.3": FITTING, "01.4": TRAIN}


class TestAnswers(JudgedAnswers):
    answers = ANSWERS


# --------------------------------------------------------------------------------------------------
# The lesson's own verdicts

CARD = gpu("RTX5090-32GB")
PUZZLE = TrainingRun("gpt2-xl", 32, 1024, "bf16-master", "adamw-foreach", recompute="full")


def room_left(**changes: object) -> int:
    """Bytes that a program has left on the card."""
    return CARD.room - estimate(PUZZLE.replace(**changes)).total


def test_the_puzzle_fits_with_the_loss_cut_and_one_gradient_upcast_at_a_time_and_with_neither_alone() -> None:
    assert room_left() < 0 and room_left(optimizer="adamw") < 0
    for cut in ({"loss_chunks": 8}, {"micro_batch": 4, "accumulation_steps": 8}):
        assert room_left(**cut) < 0
        assert room_left(optimizer="adamw", **cut) > 4 * 10**9
        assert 32 * 10**9 < estimate(PUZZLE.replace(**cut)).total < 35 * 10**9, "the newsletter's sum"


@pytest.mark.parametrize(
    ("precision", "logits", "each"),
    [("bf16-master", "compute", 6), ("amp-bf16", "compute", 10), ("fp32", "compute", 12)],
)
def test_the_loss_takes_6_10_or_12_bytes_per_logit(precision: str, logits: str, each: int) -> None:
    def at_backward(vocab: int) -> int:
        small = replace(PRESETS["tiny-gpt"], vocab=vocab)
        run = TrainingRun(small, 4, 64, precision, attention="efficient", logits=logits)
        peak = simulate(run).phase_peaks["backward"]
        return peak["activations"] + peak["temporaries"]

    assert at_backward(16_384) - at_backward(8192) == each * 4 * 64 * 8192


def test_the_layer_slider_says_what_one_more_layer_adds_and_refuses_more_than_it_has_room_for() -> None:
    shown = layer_slider(PUZZLE)
    shown.controls["layers"].value = 12
    shallow, deep = shown.runs
    assert (shallow.model.layers, deep.model.layers) == (12, 13)
    assert shown.more == estimate(deep).total - estimate(shallow).total > 0
    recomputed = shown.more
    shown.controls["recompute"].value = "none"
    assert shown.more > 3 * recomputed
    with pytest.raises(ValueError, match="the slider ends at 96"):
        layer_slider(TrainingRun(replace(PRESETS["gpt2"], layers=97)))


def test_the_first_step_peaks_at_five_numbers_per_parameter_and_lacks_the_states_as_backward_begins() -> None:
    measured = simulate(TrainingRun("tiny-llama", micro_batch=1, seq_len=64), steps=3)
    timeline = measured.timeline
    weights = sum(item.bytes for item in measured.allocations if item.kind == "parameters")
    states = sum(item.bytes for item in measured.allocations if item.kind == "optimizer_states")
    assert timeline.step_peaks()[1] == 5 * weights + 2 * 8 * 64
    totals = timeline.totals()
    begins = [totals[mark.event - 1] for mark in timeline.marks if mark.phase == "backward"]
    assert begins[1] - begins[0] == states and begins[2] == begins[1]
