"""The checks of lesson 01: right answers of every style pass, each planted wrong answer gets the hint it deserves."""

from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Any

import numpy
import pytest
import torch
from checking import Check, passes, said
from torch.nn.functional import cross_entropy

from course_utils import PRESETS, estimate, gpu
from course_utils.checks import lesson_01
from course_utils.checks.lesson_01_labs import PEAK_MISTAKES, STEP, suspects

RUN = lesson_01.FIT_RUN
ALL = (
    lesson_01.states,
    lesson_01.weight_gradient,
    lesson_01.peak,
    lesson_01.largest_micro_batch,
    lesson_01.train,
    lesson_01.read_timeline,
)


@pytest.mark.parametrize("check", ALL, ids=lambda check: check.__name__)
def test_answers_that_are_no_functions_get_a_hint(check: Check) -> None:
    assert "without parentheses" in said(check, 3)
    assert "does every path end in `return`?" in said(check, lambda *_, **__: None)


# ------------------------------------------------------------------------------------------------------- 01.1: states


def kept(weights: float, gradients: float, master_weights: float, momentum: float, variance: float) -> Any:
    """An answer with these bytes a parameter."""
    per_parameter = {
        "weights": weights,
        "gradients": gradients,
        "master_weights": master_weights,
        "momentum": momentum,
        "variance": variance,
    }
    return lambda N: {name: size * N for name, size in per_parameter.items()}


def states_in_numpy(N: int) -> dict[str, Any]:
    names = ("variance", "momentum", "master_weights", "gradients", "weights")
    return dict(zip(names, numpy.array([4, 4, 4, 2, 2]) * numpy.int64(N), strict=True))


@pytest.mark.parametrize("answer", [kept(2, 2, 4, 4, 4), kept(2.0, 2.0, 4.0, 4.0, 4.0), states_in_numpy])
def test_states_takes_right_answers(answer: Any, capsys: pytest.CaptureFixture[str]) -> None:
    passes(lesson_01.states, answer, capsys, "01.1")


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        (kept(2, 2, 0, 4, 4), "A copy is missing"),
        (kept(4, 4, 0, 4, 4), "plain fp32 Adam. Its total happens to be the same"),
        (kept(2, 0, 4, 4, 4), "No gradients?"),
        (kept(2, 2, 4, 4, 0), "Half of what Adam keeps"),
        (kept(2, 2, 4, 2, 2), "Half of what Adam keeps"),
        (kept(2, 2, 4, 8, 0), "the two of them together"),
        (kept(2, 4, 4, 4, 4), "ZeRO keeps each gradient in the format of the weight"),
        (kept(4, 2, 4, 4, 4), "count those, not fp32 ones"),
        (kept(2, 2, 2, 4, 4), "Your master weights are 16-bit"),
        (kept(2, 3, 4, 4, 4), "gradients is off for N="),
        (lambda N: {name: size / 10**9 for name, size in kept(2, 2, 4, 4, 4)(N).items()}, "GB where bytes were asked"),
        (lambda N: {name: size / 2**30 for name, size in kept(2, 2, 4, 4, 4)(N).items()}, "GiB where bytes were asked"),
        (lambda N: {name: size * 8 for name, size in kept(2, 2, 4, 4, 4)(N).items()}, "bits where bytes were asked"),
        (lambda N: {"weights": 2 * N, "gradients": 2 * N}, "has no 'master_weights' and no 'momentum'"),
        (lambda N: {**kept(2, 2, 4, 4, 4)(N), "total": 16 * N}, "total: not one of the five"),
        (lambda N: kept(2, 2, 4, 4, 4)(1_000), "is off for N="),
        (lambda N: 16 * N, "where a dictionary is asked for"),
        (lambda N: dict.fromkeys(kept(2, 2, 4, 4, 4)(N), "2 GB"), "weights is a text"),
    ],
)
def test_states_names_the_misconception(answer: Any, hint: str) -> None:
    assert hint in said(lesson_01.states, answer)


# ---------------------------------------------------------------------------------------------- 01.2: weight_gradient


def by_loops(x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    total = torch.zeros(dy.size(2), x.size(2))
    for inputs, outputs in zip(x.flatten(0, 1), dy.flatten(0, 1), strict=True):
        total += torch.outer(outputs, inputs)
    return total


def by_autograd(x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    weight = torch.zeros(dy.size(2), x.size(2), requires_grad=True)
    (x @ weight.T).backward(dy)
    assert weight.grad is not None
    return weight.grad


def by_einsum(x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    return torch.einsum("bso,bsi->oi", dy, x)


def in_double(x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    return (dy.double().transpose(1, 2) @ x.double()).sum(0)


@pytest.mark.parametrize("answer", [by_loops, by_autograd, by_einsum, in_double])
def test_weight_gradient_takes_right_answers(answer: Any, capsys: pytest.CaptureFixture[str]) -> None:
    passes(lesson_01.weight_gradient, answer, capsys, "01.2")


def turned_where_it_does_not_show(x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    right = by_einsum(x, dy)
    return right.T if right.size(0) == right.size(1) else right


def input_gradient(x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    return dy @ torch.ones(dy.size(2), x.size(2))


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        (lambda x, dy: by_einsum(x, dy).T, "The shape is turned round"),
        (turned_where_it_does_not_show, "with as many inputs as outputs the shape cannot tell"),
        (lambda x, dy: dy.transpose(1, 2) @ x, "One gradient for each sequence. They share one W"),
        (lambda x, dy: x.transpose(1, 2) @ dy, "One gradient for each sequence, turned round too"),
        (lambda x, dy: dy[..., None] * x[:, :, None, :], "One gradient for each token"),
        (input_gradient, "is it dL/dx?"),
        (lambda x, dy: by_einsum(x, dy) / (x.size(0) * x.size(1)), "A mean over all tokens"),
        (lambda x, dy: by_einsum(x, dy) / x.size(0), "A mean over the sequences"),
        (lambda x, dy: (dy.transpose(1, 2) @ x / x.size(1)).sum(0), "A mean over the positions"),
        (lambda x, dy: dy[0].T @ x[0], "Only the first sequence"),
        (lambda x, dy: dy[:, -1].T @ x[:, -1], "Only the last token"),
        (lambda x, dy: -by_einsum(x, dy), "The sign is turned round"),
        (lambda x, dy: (x * dy).sum(dim=(0, 1)), "element by element"),
        (lambda x, dy: by_einsum(x, dy) * 2, "the values are not those of autograd"),
        (lambda x, dy: by_einsum(x, dy).sum(0), "A gradient has the shape of what it belongs to"),
        (lambda x, dy: by_einsum(x, dy).tolist(), "where a Tensor is asked for"),
    ],
)
def test_weight_gradient_names_the_misconception(answer: Any, hint: str) -> None:
    assert hint in said(lesson_01.weight_gradient, answer)


# --------------------------------------------------------------------------------------------------------- 01.3: peak


def peak_in_one_pass(tensors: Any) -> int:
    events = [(born, 1, size) for _, size, born, _ in tensors]
    events += [(died, 0, -size) for _, size, _, died in tensors if died is not None]
    return max(accumulate(change for _, _, change in sorted(events)))


def peak_event_by_event(tensors: Any) -> float:
    last = max(born for _, _, born, _ in tensors)
    highest = 0.0
    for event in range(last + 1):
        highest = max(highest, sum(size for _, size, born, died in tensors if born <= event < (died or 10**9)))
    return highest


@pytest.mark.parametrize("answer", [peak_in_one_pass, peak_event_by_event])
def test_peak_takes_right_answers(answer: Any, capsys: pytest.CaptureFixture[str]) -> None:
    passes(lesson_01.peak, answer, capsys, "01.3")


def test_peak_of_the_small_step_can_be_counted_by_hand() -> None:
    """At event 3: weights 40, input 10, activations 30 + 30, logits 50."""
    assert peak_in_one_pass(STEP) == 40 + 10 + 30 + 30 + 50


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        (lambda tensors: sum(size for _, size, _, _ in tensors), "everything that ever lived"),
        (lambda tensors: max(size for _, size, _, _ in tensors), "the largest single tensor"),
        (
            lambda tensors: sum(size for _, size, _, died in tensors if died is None),
            "what is left when everything is over",
        ),
        (
            lambda tensors: peak_in_one_pass([(n, s, b, d if d is None else d + 0.5) for n, s, b, d in tensors]),
            "at the very event at which it dies",
        ),
        (
            lambda tensors: max(
                sum(s for _, s, b, d in tensors if b < t and (d is None or t < d))
                for t in {b for _, _, b, _ in tensors}
            ),
            "takes no memory yet at the event at which it is born",
        ),
        (
            lambda tensors: peak_in_one_pass([life for life in tensors if life[3] is not None]),
            "Tensors whose `died` is None are missing",
        ),
        (
            lambda tensors: max(sum(s for _, s, b, d in tensors if b <= t < d) for t in range(20)),
            "Your function compares an event with None",
        ),
        (lambda tensors: peak_in_one_pass([(n, 1, b, d) for n, _, b, d in tensors]), "how many tensors are alive"),
        (lambda tensors: peak_in_one_pass(tensors) + 1, "Not right yet for a list of 9 tensors"),
    ],
)
def test_peak_names_the_misconception(answer: Any, hint: str) -> None:
    assert hint in said(lesson_01.peak, answer)


@pytest.mark.parametrize("message", PEAK_MISTAKES)
def test_every_mistaken_peak_is_told_from_the_others(message: str) -> None:
    assert said(lesson_01.peak, lambda tensors: PEAK_MISTAKES[message](tensors)) == message


# ------------------------------------------------------------------------------------------ 01.4: largest_micro_batch


def search(card: str, global_batch: int, limit: int | None = None, together: bool = True) -> list[int]:
    """Micro-batches that fit, found from the largest down."""
    memory = gpu(card).memory if limit is None else limit
    sizes = [size for size in range(global_batch, 0, -1) if global_batch % size == 0]
    steps = {size: global_batch // size if together else 1 for size in sizes}
    runs = {size: RUN.replace(micro_batch=size, accumulation_steps=steps[size]) for size in sizes}
    return [size for size, run in runs.items() if estimate(run).total <= memory]


def largest(card: str, global_batch: int) -> int:
    return next(iter(search(card, global_batch)), 0)


def promised(card: str) -> int:
    return int(card.split("-")[1].removesuffix("GB")) * 10**9


def no_divisor(card: str, global_batch: int) -> int:
    return next(
        (
            size
            for size in range(global_batch, 0, -1)
            if estimate(RUN.replace(micro_batch=size)).total <= gpu(card).memory
        ),
        0,
    )


@pytest.mark.parametrize(
    "answer",
    [
        largest,
        lambda card, global_batch: numpy.int64(largest(card, global_batch)),
        lambda card, global_batch: float(largest(card, global_batch)),
    ],
)
def test_largest_micro_batch_takes_right_answers(answer: Any, capsys: pytest.CaptureFixture[str]) -> None:
    passes(lesson_01.largest_micro_batch, answer, capsys, "01.4")


def alone(card: str, global_batch: int) -> int:
    return max(search(card, global_batch, together=False), default=0)


def within_the_name(card: str, global_batch: int) -> int:
    return max(search(card, global_batch, limit=promised(card)), default=0)


def number_of_micro_batches(card: str, global_batch: int) -> int:
    size = largest(card, global_batch)
    return global_batch // size if size else 0


def power_of_two(card: str, global_batch: int) -> int:
    return max({1, 2, 4, 8, 16, 32, 64}.intersection(search(card, global_batch)), default=0)


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        (alone, "one micro-batch on its own"),
        (within_the_name, "card's name for GB"),
        (lambda card, global_batch: min(search(card, global_batch), default=0), "the smallest that fits"),
        (no_divisor, "does not divide the batch of"),
        (lambda card, global_batch: global_batch, "the whole batch whether it fits or not"),
        (number_of_micro_batches, "how many micro-batches there are"),
        (power_of_two, "powers of two alone"),
        (lambda card, global_batch: search(card, global_batch)[0], "stumbles where nothing fits at all"),
        (lambda card, global_batch: max(search(card, global_batch)), "stumbles where nothing fits at all"),
        (lambda card, global_batch: largest(card, global_batch) / 3, "a whole number of sequences"),
        (lambda card, global_batch: largest(card, global_batch) or 1, "On T4-16GB, with a batch of 32, your"),
        (lambda card, global_batch: 1 if card[0] == "V" else largest(card, global_batch), "a larger micro-batch fits"),
    ],
)
def test_largest_micro_batch_names_the_misconception(answer: Any, hint: str) -> None:
    assert hint in said(lesson_01.largest_micro_batch, answer)


# -------------------------------------------------------------------------------------------------------- 01.5: train


def loop(
    divide: bool = True,
    step_each: bool = False,
    zero_each: bool = False,
    zero_last: bool = True,
    step: bool = True,
    retain: bool = False,
) -> Any:
    """A training loop with the choices that learners get right or wrong; it returns the mean loss as a number."""

    def train(model: Any, batches: Any, optimizer: Any) -> float:
        total, loss = 0.0, None
        for inputs, targets in batches:
            loss = cross_entropy(model(inputs), targets) / (len(batches) if divide else 1)
            loss.backward(retain_graph=retain)
            total += loss.item() * (1 if divide else 1 / len(batches))
            if step_each:
                optimizer.step()
            if step_each or zero_each:
                optimizer.zero_grad()
        if step and not step_each:
            optimizer.step()
        if zero_last:
            optimizer.zero_grad()
        return total

    return train


def detached_and_divided_later(model: Any, batches: Any, optimizer: Any) -> torch.Tensor:
    """Right in another style: gradients left as zeros, divided by hand, the mean a tensor without a graph."""
    optimizer.zero_grad()
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


@pytest.mark.parametrize("answer", [loop(), detached_and_divided_later])
def test_train_takes_right_answers(answer: Any, capsys: pytest.CaptureFixture[str]) -> None:
    passes(lesson_01.train, answer, capsys, "01.5")


def leaky(model: Any, batches: Any, optimizer: Any) -> float:
    total = torch.zeros(())
    for inputs, targets in batches:
        loss = cross_entropy(model(inputs), targets)
        total = total + loss
        del loss
    (total / len(batches)).backward()
    optimizer.step()
    optimizer.zero_grad()
    return total.item() / len(batches)


def detached_too_early(model: Any, batches: Any, optimizer: Any) -> float:
    total = sum(cross_entropy(model(inputs), targets).detach() for inputs, targets in batches) / len(batches)
    assert isinstance(total, torch.Tensor)
    total.backward()
    optimizer.step()
    optimizer.zero_grad()
    return total.item()


def running_total_backward(model: Any, batches: Any, optimizer: Any) -> float:
    total = torch.zeros(())
    for inputs, targets in batches:
        total = total + cross_entropy(model(inputs), targets) / len(batches)
        total.backward()
    optimizer.step()
    optimizer.zero_grad()
    return total.item()


def all_at_once(model: Any, batches: Any, optimizer: Any) -> float:
    inputs, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
    loss = cross_entropy(model(inputs), targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def collecting(model: Any, batches: Any, optimizer: Any) -> float:
    outputs, total = [], 0.0
    for inputs, targets in batches:
        outputs.append(model(inputs))
        loss = cross_entropy(outputs[-1], targets) / len(batches)
        loss.backward()
        total += loss.item()
    optimizer.step()
    optimizer.zero_grad()
    return total


def returning(value: Callable[[list[torch.Tensor]], Any]) -> Any:
    """A right training loop that returns `value` of the batches' losses."""

    def train(model: Any, batches: Any, optimizer: Any) -> Any:
        losses = []
        for inputs, targets in batches:
            losses.append(cross_entropy(model(inputs), targets))
            (losses[-1] / len(batches)).backward()
        optimizer.step()
        optimizer.zero_grad()
        return value(losses)

    return train


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        (leaky, "the leak is still there"),
        (detached_too_early, "nothing left to differentiate"),
        (running_total_backward, "You send a batch's graph backward twice"),
        (all_at_once, "All batches go forward as one"),
        (collecting, "do you collect outputs in a list?"),
        (loop(retain=True), "two batches' activations are alive at once"),
        (loop(divide=False), "The parameters moved too far"),
        (loop(step_each=True), "You step after every batch"),
        (loop(step_each=True, divide=False), "You step after every batch"),
        (loop(step=False), "Who calls `optimizer.step()`?"),
        (loop(zero_last=False), "gradients that the first one left behind"),
        (returning(lambda losses: losses[-1].item()), "the last batch's loss"),
        (returning(lambda losses: losses[-1].item() / len(losses)), "the last batch's part of the loss"),
        (returning(lambda losses: sum(loss.item() for loss in losses)), "the sum of the losses"),
        (returning(lambda losses: sum(loss.item() for loss in losses) / len(losses) ** 2), "divided twice"),
        (returning(lambda losses: sum(loss.item() for loss in losses) / 3), "is not the mean of the batches' losses"),
        (returning(lambda losses: sum(losses) / len(losses)), "a tensor with its graph behind it"),
        (returning(lambda losses: torch.stack(losses).detach()), "You return several losses"),
    ],
)
def test_train_names_the_misconception(answer: Any, hint: str) -> None:
    assert hint in said(lesson_01.train, answer)


@pytest.mark.parametrize("divide", [True, False])
def test_train_notices_gradients_of_the_last_batch_alone(divide: bool) -> None:
    def train(model: Any, batches: Any, optimizer: Any) -> float:
        total = 0.0
        for inputs, targets in batches:
            optimizer.zero_grad()
            loss = cross_entropy(model(inputs), targets) / (len(batches) if divide else 1)
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        return total

    assert "the gradients of the last batch alone" in said(lesson_01.train, train)


def test_train_notices_a_step_of_another_size() -> None:
    def train(model: Any, batches: Any, optimizer: Any) -> float:
        for group in optimizer.param_groups:
            group["lr"] /= 2
        return loop()(model, batches, optimizer)

    assert "What else changes them?" in said(lesson_01.train, train)


def test_memory_grows_only_where_graphs_wait_for_backward() -> None:
    leaking = lesson_01.memory_while_training(leaky, batches=5)
    held = lesson_01.memory_while_training(loop(), batches=5)
    assert len(leaking) == len(held) == 6  # five forward passes and the end
    rises = [later - earlier for earlier, later in pairwise(leaking[1:-1])]
    assert min(rises) > 100_000
    assert len(set(held[1:-1])) == 1  # with gradients there, each pass begins like the one before
    assert leaking[-1] == held[-1] == held[0]


def test_adding_up_losses_after_backward_holds_no_activations() -> None:
    """What many texts call a leak is none: backward has emptied the graphs."""

    def adds_up_graphs(model: Any, batches: Any, optimizer: Any) -> float:
        total = torch.zeros(())
        for inputs, targets in batches:
            loss = cross_entropy(model(inputs), targets) / len(batches)
            loss.backward()
            total = total + loss
        optimizer.step()
        optimizer.zero_grad()
        return total.item()

    lesson_01.train(adds_up_graphs)
    held = lesson_01.memory_while_training(adds_up_graphs, batches=5)
    assert len(set(held[1:-1])) == 1


# ------------------------------------------------------------------------------------------------ 01.6: read_timeline


def read(measurement: Any, seq_len: int) -> dict[str, Any]:
    """A right answer that looks at the peak's inputs and at how high activations come back."""
    after_loss, backward = measurement.moments["after loss"], measurement.moments["end of backward"]
    ratio = round(backward["optimizer_states"] / backward["parameters"])
    precision = "bf16-master" if ratio == 6 else "amp-bf16" if after_loss["weight_copies"] else "fp32"
    return {
        "micro_batch": after_loss["inputs"] / (16 * seq_len),
        "precision": precision,
        "recompute": came_back(measurement),
    }


def came_back(measurement: Any) -> bool:
    begins = {mark.phase: mark.event for mark in measurement.timeline.marks}
    curve = measurement.timeline.curves()["activations"][begins["backward"] : begins["optimizer"]]
    return curve != sorted(curve, reverse=True)


def spelled(measurement: Any, seq_len: int) -> dict[str, Any]:
    found = read(measurement, seq_len)
    return {**found, "recompute": "full" if found["recompute"] else "none", "micro_batch": int(found["micro_batch"])}


def changed(**changes: Callable[[Any, int, dict[str, Any]], Any]) -> Any:
    """The right answer with some entries replaced; each change gets the measurement, seq_len and the right entries."""

    def answer(measurement: Any, seq_len: int) -> dict[str, Any]:
        found = spelled(measurement, seq_len)
        return {**found, **{name: change(measurement, seq_len, found) for name, change in changes.items()}}

    return answer


@pytest.mark.parametrize("answer", [read, spelled])
def test_read_timeline_takes_right_answers(answer: Any, capsys: pytest.CaptureFixture[str]) -> None:
    passes(lesson_01.read_timeline, answer, capsys, "01.6")


def test_hidden_runs_leave_no_shortcut() -> None:
    hidden = suspects()
    assert len({suspect.run.global_batch * suspect.run.seq_len for suspect in hidden}) < len(hidden)
    assert {suspect.run.recompute for suspect in hidden} == {"none", "full"}
    assert len({suspect.run.precision.name for suspect in hidden}) == 3
    full, none = ([s.measurement.peak for s in hidden if s.run.recompute == choice] for choice in ("full", "none"))
    assert min(none) < max(full), "the height of the peak would give recomputation away"
    assert len({(suspect.run.seq_len, suspect.run.recompute) for suspect in hidden}) == 4, "so would the length"
    assert all(suspect.measurement.allocations == () for suspect in hidden)


LOWEST = 2


def judged_by_peak(measurement: Any, seq_len: int, found: Any) -> str:
    heights = sorted(suspect.measurement.peak for suspect in suspects())
    return "full" if measurement.peak < heights[LOWEST] else "none"


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        (
            lambda measurement, seq_len: {"micro_batch": 4, "precision": "amp-bf16", "recompute": "none"},
            "the same answer whatever the measurement says",
        ),
        (changed(micro_batch=lambda m, s, found: found["micro_batch"] * s), "Those are tokens, s·b"),
        (changed(micro_batch=lambda m, s, found: found["micro_batch"] * 2), "Twice too many"),
        (changed(micro_batch=lambda m, s, found: found["micro_batch"] / 2), "Half of it"),
        (changed(micro_batch=lambda m, s, found: found["micro_batch"] * 8), "Eight times too many"),
        (changed(micro_batch=lambda m, s, found: found["micro_batch"] * 16), "Sixteen times too many"),
        (changed(micro_batch=lambda m, s, found: m.breakdown["inputs"]), "Those are the bytes of the inputs"),
        (changed(micro_batch=lambda m, s, found: m.peak // 10**9), "depends on s and b alone"),
        (changed(micro_batch=lambda m, s, found: "four"), "micro_batch is a text"),
        (
            changed(precision=lambda m, s, found: "fp32" if found["precision"] == "amp-bf16" else found["precision"]),
            "You take autocast for fp32, or the reverse",
        ),
        (changed(precision=lambda m, s, found: "bf16-master"), "the precision is off: how many times as large"),
        (changed(precision=lambda m, s, found: "bfloat16"), "The precisions to choose from"),
        (changed(recompute=lambda m, s, found: "none"), "the same about recomputation in every run"),
        (changed(recompute=lambda m, s, found: not came_back(m)), "Turned round"),
        (changed(recompute=judged_by_peak), "judge by the height of the peak"),
        (changed(recompute=lambda m, s, found: s == 256), "what do the activations do during backward"),
        (
            changed(recompute=lambda m, s, found: found["precision"] != "bf16-master"),
            "what do the activations do during backward",
        ),
        (changed(recompute=lambda m, s, found: "selective"), "'full' or 'none'"),
        (lambda measurement, seq_len: {"micro_batch": 1}, "has no 'precision' and no 'recompute'"),
        (
            lambda measurement, seq_len: {"micro_batch": measurement.allocations[0].shape[0]},
            "The list of tensors has been taken out",
        ),
        (lambda measurement, seq_len: measurement.peak, "where a dictionary is asked for"),
    ],
)
def test_read_timeline_names_the_misconception(answer: Any, hint: str) -> None:
    assert hint.lower() in said(lesson_01.read_timeline, answer).lower()


# --------------------------------------------------------------------------------------------- no answer is given away


def test_no_message_gives_an_expected_value_away() -> None:
    XL = PRESETS["gpt2-xl"].parameters
    right_numbers = [str(16 * XL), f"{16 * XL:_}", f"{16 * XL:,}", "24.9"]
    wrong = kept(2, 2, 0, 4, 4)
    assert not any(number in said(lesson_01.states, wrong) for number in right_numbers)
    off = said(lesson_01.largest_micro_batch, lambda card, global_batch: 1 if largest(card, global_batch) else 0)
    assert not {"10", "16"} & set(off.replace(",", " ").split())
