"""Checks of lesson 01: right answers of every style pass, and each planted wrong answer gets its hint."""

import functools
from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Any

import numpy
import torch
from checking import Answers, JudgedAnswers, hint
from torch.nn.functional import cross_entropy

from course_utils import estimate, gpu
from course_utils.lessons.one_step import checks as lesson_01

RUN = lesson_01.FIT_RUN

# --------------------------------------------------------------------------------------------------
# 01.1: peak


def in_one_pass(tensors: Any) -> int:
    events = [(born, 1, size) for _, size, born, _ in tensors]
    events += [(died, 0, -size) for _, size, _, died in tensors if died is not None]
    return max(accumulate(change for _, _, change in sorted(events)))


def event_by_event(
    tensors: Any, alive: Callable[[float, int, float], bool] = lambda b, t, d: b <= t < d
) -> float:
    """The largest sum over the events of births, by an idea of who is alive; None is an endless life."""
    lives = [(size, born, float("inf") if died is None else died) for _, size, born, died in tensors]
    return max(sum(size for size, b, d in lives if alive(b, t, d)) for _, t, _ in lives)


def forgets_none(tensors: Any) -> int:
    return max(sum(size for _, size, born, died in tensors if born <= t < died) for t in range(20))


def until_the_last_death(tensors: Any) -> int:
    end = max((died for *_, died in tensors if died is not None), default=1)
    lives = [(size, born, end if died is None else died) for _, size, born, died in tensors]
    return max(sum(size for size, born, died in lives if born <= t < died) for t in range(end))


PEAK = Answers(
    right=[in_one_pass, event_by_event, lambda tensors: numpy.int64(in_one_pass(tensors))],
    wrong=[
        (lambda tensors: sum(size for _, size, _, _ in tensors), "everything that ever lived"),
        (lambda tensors: max(size for _, size, _, _ in tensors), "the largest single tensor"),
        (
            lambda tensors: sum(size for _, size, _, died in tensors if died is None),
            "is left after the last event",
        ),
        (
            lambda tensors: event_by_event(tensors, lambda b, t, d: b <= t <= d),
            "You count a tensor at the event",
        ),
        (
            lambda tensors: event_by_event(tensors, lambda b, t, d: b < t < d),
            "You do not count a tensor at the event",
        ),
        (lambda tensors: in_one_pass([life for life in tensors if life[3]]), "`died` is None are missing"),
        (forgets_none, "with None never dies: handle it before you compare."),
        (until_the_last_death, "You treat None as the last event"),
        (lambda tensors: 160, "names may repeat"),
        (lambda tensors: 160, "Not right yet: draw each tensor's life"),
    ],
)


def test_peak_of_the_small_step_can_be_counted_by_hand() -> None:
    """At event 3: weights 40, input 10, activations 30 + 30, logits 50."""
    assert in_one_pass(lesson_01.STEP) == 40 + 10 + 30 + 30 + 50


def test_peak_of_the_real_step_is_what_the_tracker_saw() -> None:
    lives, seen = lesson_01.real_step()
    assert in_one_pass(lives) == seen


# --------------------------------------------------------------------------------------------------
# 01.2: weigh


def in_full(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes()


def weighing(*how: str, weights: Any = lambda model: model.parameters(), size: Any = in_full) -> Any:
    """An answer with sets of addresses; `how` names what it leaves out or does otherwise."""

    def weigh(model: Any, optimizer: Any) -> dict[str, int]:
        updated = [p for group in optimizer.param_groups for p in group["params"]]
        states = [
            one
            for state in optimizer.state.values()
            for one in state.values()
            if isinstance(one, torch.Tensor)
        ]
        own = list(model.parameters())
        kinds = {"weights": list(weights(model)), "master_weights": updated}
        kinds["gradients"] = [
            p.grad for p in (own if "own gradients" in how else own + updated) if p.grad is not None
        ]
        kinds["states"] = [one for one in states if one.ndim or "no counter" not in how]
        seen = set[int]()
        sizes = {}
        for kind, tensors in kinds.items():
            known = set() if "again" in how else seen
            sizes[kind] = 0
            for tensor in tensors:
                place = tensor.untyped_storage().data_ptr()
                if place not in known or "each" in how:
                    sizes[kind] += size(tensor)
                    known.add(place)
        return sizes

    return weigh


def changed_kind(kind: str, size: Callable[[Any, Any, dict[str, int]], int]) -> Any:
    """The right answer but for one kind."""

    def weigh(model: Any, optimizer: Any) -> dict[str, int]:
        found = weighing()(model, optimizer)
        return found | {kind: size(model, optimizer, found)}

    return weigh


def by_identity(model: Any, optimizer: Any) -> dict[str, int]:
    """Master weights are those that are not the same Python object; each kind by its own storages."""
    own = {id(p) for p in model.parameters()}
    masters = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in own]
    places = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in masters}
    return weighing()(model, optimizer) | {"master_weights": sum(places.values())}


def weighs_and_frees(model: Any, optimizer: Any) -> dict[str, int]:
    found = weighing()(model, optimizer)
    optimizer.zero_grad()
    return found


def trips(model: Any, optimizer: Any) -> dict[str, int]:
    gradients = {"gradients": sum(p.grad.nbytes for p in model.parameters())}
    return weighing()(model, optimizer) | gradients


def counts_everything(model: Any, optimizer: Any) -> dict[str, int]:
    states = {"states": sum(one.nbytes for state in optimizer.state.values() for one in state.values())}
    return weighing()(model, optimizer) | states


def in_four_loops(model: Any, optimizer: Any) -> dict[str, int]:
    """By subtraction: what all storages take with a kind, minus what they take without it."""

    def together(tensors: Any) -> int:
        storages = [one.untyped_storage() for one in tensors if torch.is_tensor(one)]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    own = list(model.parameters())
    both = own + [p for group in optimizer.param_groups for p in group["params"]]
    grown = both + [p.grad for p in both]
    everything = grown + [value for state in optimizer.state.values() for value in state.values()]
    sizes = [together(tensors) for tensors in ([], own, both, grown, everything)]
    names = "weights", "master_weights", "gradients", "states"
    return {name: int(size) for name, size in zip(names, numpy.diff(sizes), strict=True)}


def weights_layer_by_layer(model: Any, _: Any, __: Any) -> int:
    return sum(layer.weight.nbytes + layer.bias.nbytes for layer in model)


def without_asking(model: Any, optimizer: Any, _: Any) -> int:
    values = [value for state in optimizer.state.values() for value in state.values()]
    return sum(4 * value.numel() for value in values if torch.is_tensor(value))


def of_the_models_own(model: Any, optimizer: Any, _: Any) -> int:
    states = [optimizer.state.get(weight, {}) for weight in model.parameters()]
    return sum(in_full(value) for state in states for value in state.values() if torch.is_tensor(value))


def last_kind_wins(model: Any, optimizer: Any) -> dict[str, int]:
    found = weighing()(model, optimizer)
    own = found["weights"] if not found["master_weights"] else 0
    return found | {"weights": found["weights"] - own, "master_weights": found["master_weights"] + own}


def of_the_first_group(_: Any, optimizer: Any, found: dict[str, int]) -> int:
    return sum(map(in_full, optimizer.param_groups[0]["params"])) if found["master_weights"] else 0


WEIGH = Answers(
    right=[
        weighing(),
        in_four_loops,
        lambda model, optimizer: {name: float(size) for name, size in weighing()(model, optimizer).items()},
    ],
    wrong=[
        (weighing(size=lambda tensor: tensor.numel()), "You count numbers, not bytes"),
        (weighing("no counter"), "Do you count its `step`?"),
        (weighing("again"), "There is no master copy here"),
        (weighing("each", size=lambda tensor: tensor.nbytes), "There is no master copy here"),
        (trips, "Not every parameter has a gradient"),
        (counts_everything, "Not everything in an optimizer's state is a tensor"),
        (weighing(weights=lambda model: model.state_dict().values()), "The weights are off"),
        (weighing(weights=lambda model: model[0].parameters()), "The weights are off"),
        (last_kind_wins, "are weights, updated or not"),
        (changed_kind("master_weights", of_the_first_group), "in two groups. Where can you find them?"),
        (changed_kind("weights", weights_layer_by_layer), "two layers share one, which counts once"),
        (changed_kind("gradients", lambda m, _, found: found["weights"]), "Before the first backward"),
        (
            changed_kind("gradients", lambda m, _, found: found["gradients"] and found["weights"]),
            "or frozen weights",
        ),
        (
            changed_kind("states", lambda m, _, found: found["states"] or 2 * found["weights"]),
            "Before the first step",
        ),
        (weighing(size=lambda tensor: tensor.nbytes), "All parameters are slices of one buffer"),
        (changed_kind("states", without_asking), "do you take 4 bytes"),
        (changed_kind("states", of_the_models_own), "You find no states"),
        (
            weighing(weights=lambda model: [p for p in model.parameters() if p.requires_grad]),
            "Some weights are frozen",
        ),
        (changed_kind("master_weights", lambda *_: 0), "fp32 copies of the weights, in two groups"),
        (weighing("own gradients"), "The fp32 copies have gradients of their own"),
        (by_identity, "makes no copy: it has the weight's own storage"),
        (weighs_and_frees, "changes what it should only read"),
        (lambda model, optimizer: {"weights": 4}, "has no 'master_weights' and no 'gradients'"),
        (lambda model, optimizer: 16, "the exercise asks for a dictionary"),
    ],
)

# --------------------------------------------------------------------------------------------------
# 01.3: largest_micro_batch


@functools.cache
def fits(
    card: str, global_batch: int, memory: Any = lambda card: gpu(card).room, together: bool = True
) -> list[int]:
    """Micro-batches that fit, found from the largest down; `together` with the others of their step."""
    sizes = [size for size in range(global_batch, 0, -1) if global_batch % size == 0]
    runs = {
        size: RUN.replace(micro_batch=size, global_batch=global_batch if together else size) for size in sizes
    }
    return [size for size, run in runs.items() if estimate(run).total <= memory(card)]


def pick(choose: Callable[[list[int]], Any] = max, **changes: Any) -> Any:
    """One of those that fit; 0 is among them where there are none."""
    return lambda card, global_batch: choose(fits(card, global_batch, **changes) or [0])


largest = pick()


def of_any_size(card: str, global_batch: int) -> int:
    sizes = range(global_batch, 0, -1)
    return next(
        (size for size in sizes if estimate(RUN.replace(micro_batch=size)).total <= gpu(card).room), 0
    )


def up_to_64(card: str, global_batch: int) -> int:
    return max(
        [0, *(size for size in range(1, min(64, global_batch) + 1) if size in fits(card, global_batch))]
    )


def skips_nothing(card: str, global_batch: int) -> int:
    """Never asks whether a size divides the batch: TrainingRun refuses the first that does not."""
    runs = [RUN.replace(micro_batch=size, global_batch=global_batch) for size in range(1, global_batch + 1)]
    return max([0, *(run.micro_batch for run in runs if estimate(run).total <= gpu(card).room)])


def rounds_down(card: str, global_batch: int) -> int:
    """Takes sizes that do not divide the batch, with as many whole micro-batches as there are."""
    sizes = range(1, global_batch + 1)
    runs = [RUN.replace(micro_batch=size, accumulation_steps=global_batch // size) for size in sizes]
    return max([0, *(run.micro_batch for run in runs if estimate(run).total <= gpu(card).room)])


FITTING = Answers(
    right=[largest, pick(lambda sizes: numpy.int64(sizes[0])), pick(lambda sizes: float(max(sizes)))],
    wrong=[
        (pick(together=False), "micro-batch on its own"),
        (pick(memory=lambda card: int(card[-4:-2]) * 10**9), "card's name for GB"),
        (pick(memory=lambda card: gpu(card).memory), "How much of it does a program get?"),
        (up_to_64, "only micro-batches of up to 64"),
        (skips_nothing, "Skip those"),
        (rounds_down, "does not divide the batch of"),
        (pick(min), "the smallest that fits"),
        (of_any_size, "does not divide the batch of"),
        (lambda card, global_batch: global_batch, "the whole batch, whether it fits or not"),
        (
            lambda card, global_batch: global_batch // (largest(card, global_batch) or 99),
            "the number of micro-batches",
        ),
        (pick(lambda sizes: max({0, 1, 2, 4, 8, 16, 32, 64}.intersection(sizes))), "only powers of two"),
        (lambda card, global_batch: fits(card, global_batch)[0], "fails when nothing fits"),
        (pick(lambda sizes: sizes[0] / 3), "a whole number of sequences"),
        (pick(lambda sizes: sizes[0] or 1), "On T4-16GB your micro-batch for 32 needs more than"),
        (
            lambda card, global_batch: 1 if card[0] == "V" else largest(card, global_batch),
            "a larger micro-batch fits",
        ),
    ],
)

# --------------------------------------------------------------------------------------------------
# 01.4: train


def loop(*how: str, divide: float | None = None, value: Callable[[list[Any]], Any] | None = None) -> Any:
    """A loop that sends each loss, divided by `divide` (their number), backward and returns their `value`.

    It is right where `how` says nothing, "zero first" (and not last) or "numbers" (of losses, not tensors).
    """

    def train(model: Any, batches: Any, optimizer: Any) -> Any:
        losses = []
        outputs = []
        if "zero first" in how:
            optimizer.zero_grad()
        for inputs, targets in batches:
            if "zero each" in how:
                optimizer.zero_grad()
            outputs = [*(outputs if "collect" in how else []), model(inputs)]
            loss = cross_entropy(outputs[-1], targets)
            (loss / (divide or len(batches))).backward(retain_graph="retain" in how)
            losses.append(loss.item() if "numbers" in how else loss)
            if "step each" in how:
                optimizer.step()
                optimizer.zero_grad()
        if "no step" not in how and "step each" not in how:
            optimizer.step()
        if "zero first" not in how and "no zero" not in how:
            optimizer.zero_grad()
        numbers = [loss if isinstance(loss, float) else loss.item() for loss in losses]
        return value(losses) if value else sum(numbers) / len(numbers)

    return train


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


def leaky(model: Any, batches: Any, optimizer: Any, once: bool = True, detached: bool = False) -> float:
    """Adds up losses and sends the total backward at the end, or each time."""
    total = torch.zeros(())
    for inputs, targets in batches:
        loss = cross_entropy(model(inputs), targets) / len(batches)
        total = total + (loss.detach() if detached else loss)
        if not once:
            total.backward()
    if once:
        total.backward()
    optimizer.step()
    optimizer.zero_grad()
    return total.item()


def all_at_once(model: Any, batches: Any, optimizer: Any) -> float:
    inputs, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
    return loop()(model, [(inputs, targets)], optimizer)


def last_backward_alone(model: Any, batches: Any, optimizer: Any) -> float:
    """Adds up numbers, and goes backward once, from the last loss."""
    total = 0.0
    loss = torch.zeros(())
    for inputs, targets in batches:
        loss = cross_entropy(model(inputs), targets) / len(batches)
        total += loss.item()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return total


TRAIN = Answers(
    right=[loop(), loop("zero first"), divided_by_hand],
    wrong=[
        (leaky, "The leak is still there"),
        (functools.partial(leaky, once=False), "You use a batch's graph twice"),
        (functools.partial(leaky, detached=True), "nothing left to differentiate"),
        (all_at_once, "All batches go forward as one"),
        (loop("numbers", "collect"), "Do you collect outputs in a list?"),
        (loop("numbers", "retain"), "two batches' activations are alive at once"),
        (loop(divide=1), "The parameters moved too far"),
        (loop("step each"), "You step after every batch"),
        (loop("no step"), "Where do you call `optimizer.step()`, and on"),
        (loop("no zero"), "gradients that the first call left behind"),
        (loop("zero each"), "Do you set gradients to zero in between?"),
        (last_backward_alone, "Do you call `backward()` on every loss"),
        (loop("zero each", divide=1), "only the gradients of the last batch"),
        (loop(divide=6), "What else changes them?"),
        (loop(value=lambda losses: losses[-1].item()), "the last batch's loss"),
        (loop(value=lambda losses: sum(loss.item() for loss in losses)), "the sum of the losses"),
        (
            loop(value=lambda losses: sum(loss.item() for loss in losses) / 6),
            "is not the mean of the batches' losses",
        ),
        (loop(value=lambda losses: sum(losses) / len(losses)), "a tensor with its graph, so your caller"),
        (
            loop(value=lambda losses: torch.stack(losses).detach()),
            "Your answer is a Tensor, but the exercise asks",
        ),
    ],
)


def test_memory_grows_only_where_graphs_wait_for_backward() -> None:
    ways = leaky, loop("numbers"), loop()  # the last lists losses whose graphs backward has used
    leaking, held, emptied = (lesson_01.memory_while_training(way, batches=5) for way in ways)
    assert len(leaking) == len(held) == 6  # five forward passes and the end
    assert min(later - earlier for earlier, later in pairwise(leaking[1:-1])) > 100_000
    assert len(set(held[1:-1])) == 1  # with gradients there, each pass begins like the one before
    assert [later - earlier for earlier, later in pairwise(emptied[1:-1])] == [512] * 3, (
        "a loss each, and no graph"
    )
    assert leaking[-1] == held[-1] == held[0]


ANSWERS = {"01.1": PEAK, "01.2": WEIGH, "01.3": FITTING, "01.4": TRAIN}


class TestAnswers(JudgedAnswers):
    answers = ANSWERS


def test_no_message_gives_an_expected_value_away() -> None:
    off = hint("01.3", pick(lambda sizes: min(sizes[0], 1)))
    assert not {"10", "16", "22", "75"} & set(off.replace(",", " ").split())
