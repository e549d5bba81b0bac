"""Checks of the exercises of lesson 14, "Model and pipeline parallelism": each names the misconception."""

import operator
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, chain, combinations, pairwise
from math import inf
from types import NoneType
from typing import Any, cast

import torch
from torch.func import functional_call
from torch.nn.functional import mse_loss

from ...interactive.feedback import Mistakes, call, exercise, expect, fail, of_kind, recognized
from ..shared.judging import same, seeded
from ..shared.on_ranks import found_on_ranks
from .check_ranks import SIZES, batch, difference, of_whole, stages
from .schedules import most_kept, simulate

# --------------------------------------------------------------------------------------------------
# 14.1: cut
Cut = list[int] | None

# each layer's times, states and kept activations; p, m, capacity; one cut is the fastest, or none fits
CUT_CASES = (
    ((4, 4, 6, 3, 7, 6, 2, 7), (3, 6, 7, 6, 9, 7, 4, 9), (4, 2, 1, 3, 1, 3, 4, 1), 4, 8, 32),
    ((9, 7, 5, 4, 4, 8, 3, 4), (8, 7, 4, 2, 8, 6, 4, 9), (2, 4, 4, 3, 4, 3, 3, 4), 4, 2, 31),
    ((6, 8, 8, 2, 8, 4), (4, 1, 8, 10, 9, 7), (1, 1, 2, 2, 2, 1), 3, 4, 25),
    ((8, 4, 7, 3, 6), (4, 4, 6, 9, 7), (3, 1, 1, 1, 1), 1, 4, 37),
    ((3, 4, 5, 2), (5, 5, 5, 5), (2, 2, 2, 2), 2, 4, 13),
)


KEPT_BY_1F1B = partial(most_kept, "1F1B")


def best_cut(
    times: Sequence[int],
    states: Sequence[int],
    kept: Sequence[int],
    p: int,
    m: int,
    capacity: float,
    keeps: Callable[[int, int, int], int] = KEPT_BY_1F1B,
) -> Cut:
    """Layers per stage: of all cuts that fit, the one with the best slowest stage, else None."""
    found = []
    for inner in combinations(range(1, len(times)), p - 1):
        layers = [b - a for a, b in pairwise((0, *inner, len(times)))]
        if max(_sizes(layers, states, kept, m, keeps)) <= capacity:
            found.append((max(map(sum, _by_stage(layers, times))), layers))
    return min(found)[1] if found else None


def _sizes(layers: Sequence[int], states: Any, kept: Any, m: int, keeps: Any = KEPT_BY_1F1B) -> list[int]:
    """Bytes of each stage: its states, and the activations of as many micro-batches as it `keeps`."""
    stages = zip(_by_stage(layers, states), _by_stage(layers, kept), strict=True)
    return [sum(own) + keeps(len(layers), m, stage) * sum(each) for stage, (own, each) in enumerate(stages)]


def _by_stage(layers: Sequence[int], numbers: Sequence[int]) -> list[Sequence[int]]:
    return [numbers[end - count : end] for count, end in zip(layers, accumulate(layers), strict=True)]


def _equal_layers(times: Sequence[int], states: Any, kept: Any, p: int, m: int, capacity: int) -> Cut:
    each, more = divmod(len(times), p)
    return [each + 1 if stage < more else each for stage in range(p)]


CUT_MISTAKES: Mistakes = {
    "You cut by time alone, and some stage does not fit.": (
        lambda times, states, kept, p, m, capacity: best_cut(times, states, kept, p, m, inf)
    ),
    "You give each stage the same number of layers. Layers differ in time and bytes.": _equal_layers,
    "You count one micro-batch per stage. How many does it keep at its fullest?": (
        partial(best_cut, keeps=lambda p, m, stage: 1)
    ),
    "You let every stage keep all micro-batches. That is GPipe.": (
        partial(best_cut, keeps=lambda p, m, stage: m)
    ),
    "You let every stage keep as many as the first. Later stages keep fewer.": (
        partial(best_cut, keeps=lambda p, m, stage: min(m, p))
    ),
    "No stage keeps more micro-batches than there are: m may be small.": (
        partial(best_cut, keeps=lambda p, m, stage: p - stage)
    ),
}


@exercise("14.1", "Every stage fits, and none is slower than it must be.")
def cut(answer: Any) -> None:
    """`answer(times, states, kept, p, m, capacity)` is a list of layers per stage under 1F1B, or None."""
    mine = list[Cut]()
    for case in CUT_CASES:
        times, _, _, p, *_ = case
        given = [list(one) if isinstance(one, tuple) else one for one in case]
        got = call(answer, *given, returns=list | tuple | None)
        if got is not None:
            got = [of_kind(count, int, "A stage's number of layers is") for count in got]
            expect(len(got) == p, f"{p} stages were asked for. Your list has {len(got)} numbers.")
            expect(min(got) > 0, "Some stage has no layer.")
            layers = f"Your stages have {sum(got)} layers in all, the model has {len(times)}."
            expect(sum(got) == len(times), layers)
        mine.append(got)
    if not recognized(mine, CUT_CASES, best_cut, CUT_MISTAKES, same=operator.eq):
        answered = zip(mine, CUT_CASES, strict=True)
        got, case = next((got, case) for got, case in answered if got != best_cut(*case))
        times, states, kept, p, m, capacity = case
        where = f"With {len(times)} layers, {p} stages and {m} micro-batches,"
        if got is None:
            fail(f"{where} you return None, but a cut fits. Do you try every place to cut?")
        large = "some stage of yours does not fit: add its states, and what it keeps when fullest."
        expect(max(_sizes(got, states, kept, m)) <= capacity, f"{where} {large}")
        fail(f"{where} your cut fits, but another one that fits has a faster slowest stage.")


# --------------------------------------------------------------------------------------------------
# 14.2: order
@exercise("14.2", "PyTorch's Schedule1F1B uses the same order.")
def order(answer: Any) -> None:
    """`answer(p, m, stage)` is the list of a stage's works under 1F1B."""
    for p, m, stage in ((4, 6, 0), (4, 6, 1), (4, 6, 3), (4, 2, 0), (1, 3, 0), (3, 8, 1)):
        got = list(call(answer, p=p, m=m, stage=stage, returns=(list, tuple)))
        right = simulate("1F1B", p, m).order(stage)
        where = f"Stage {stage} of {p}, {m} micro-batches"
        once = f"{where}: return each of F0 to F{m - 1} and B0 to B{m - 1} once, as texts, and nothing else."
        expect(Counter(got) == Counter(right), once)
        mine, ahead = (_forwards_first(works) for works in (got, right))
        all_first = mine == m and m != ahead
        expect(not all_first, "All forwards come first: that is GPipe. How many may this stage keep?")
        expect(mine >= ahead, "Too few forwards at first: the later stages would wait for input.")
        many = "Too many forwards at first: the stage keeps more micro-batches than 1F1B needs."
        expect(mine <= ahead, many)
        alternate = (
            "The start is right. After it, backward and forward alternate, in the micro-batches' order."
        )
        expect(got == right, alternate)


def _forwards_first(works: Sequence[str]) -> int:
    """The number of forwards before the first backward."""
    return next(place for place, work in enumerate(works) if work[0] == "B")


# --------------------------------------------------------------------------------------------------
# 14.3: two_stages
STARTS = "First the check plays the other stage. Then two processes start, which takes about five seconds."
SCALES: dict[str, Callable[[int, Sequence[int]], float]] = {
    "You count each micro-batch's loss as if it were the complete batch's: whose mean is it?": (
        lambda rows, sizes: 1.0
    ),
    "You count each micro-batch 1/m, also the smaller one. How many rows has it?": (
        lambda rows, sizes: 1 / len(sizes)
    ),
}


@exercise("14.3", "Two stages compute the complete model's gradient, and keep no old output.", first=STARTS)
def two_stages(answer: Any) -> None:
    """`answer(layers, rank, data, send, receive)` does one step of one of two stages under 1F1B."""
    for sizes in SIZES:
        for rank in (1, 0):
            _play(answer, rank, sizes)
    off = max(found["off"] for found in found_on_ranks(difference, 2, answer))
    outside = "It is right in one process, but not on real ranks. Do you keep anything outside of it?"
    expect(off < 1e-4, outside)


def _play(answer: Any, rank: int, sizes: Sequence[int]) -> None:
    """Be the other stage for one step, and judge the messages, the gradients, and what is kept meanwhile."""
    mine = stages()[rank]
    data = batch(sizes)[rank]
    messages, gradients = of_whole(sizes)
    sent = list[torch.Tensor]()
    taken = list[torch.Tensor]()
    # Weak references see whether a learner's function still holds a tensor, without holding it: storages
    # within the stage; and for each micro-batch, of what it passed on or was handed, and of copies.
    hidden = list[Any]()
    passed = list[list[Any]]()
    kept = list[int]()
    late = list[bool]()
    mine[1].register_forward_hook(lambda _, __, y: hidden.append(weakref.ref(y.untyped_storage())))
    mine[1].register_forward_hook(lambda *_: kept.append(sum(map(_alive, hidden))))
    if rank == 0:
        mine[-1].register_forward_hook(lambda _, __, y: passed.append([weakref.ref(y.untyped_storage())]))
    else:
        mine[0].register_forward_pre_hook(lambda _, x: passed[-1].append(weakref.ref(x[0].untyped_storage())))
    stage = f"Stage {rank}, micro-batches of {', '.join(map(str, sizes))} rows:"
    m = len(sizes)

    def send(tensor: torch.Tensor) -> None:
        none = f"{stage} you send None. Is that x.grad, where x does not require a gradient?"
        expect(tensor is not None, none)
        sent.append(of_kind(tensor, torch.Tensor, f"{stage} what you send is").detach().clone())
        if rank == 0 and passed:
            passed[-1].append(weakref.ref(tensor.untyped_storage()))

    def receive(shape: Any) -> torch.Tensor:
        late.append(any(map(_alive, chain(*passed[:-1]))))
        _expect_message(stage, rank, m, len(sent), len(taken))
        taken.append(messages[rank][len(taken)].clone())
        shape = tuple(shape)
        given = taken[-1].clone()
        order = f"{stage} you wait for {shape}, and another shape comes. In which order do you wait?"
        expect(shape == given.shape, order)
        if rank == 1:
            passed.append([weakref.ref(given.untyped_storage())])
        return given

    call(answer, mine, rank, data, send, receive, returns=(object, NoneType), finite=False)
    number = f"{stage} you send {len(sent)} and receive {len(taken)} tensors, not one per micro-batch."
    expect(len(sent) == len(taken) == m, number)
    _expect_gradients([weight.grad for weight in mine.parameters()], gradients[rank], rank, sizes, stage)
    if rank == 0:
        way = "an output"
        held = "an output older than the last one sent. Who holds y?"
    else:
        way = "a gradient of the input"
        held = "an input older than the last. Who holds x?"
    expect(same(sent, messages[1 - rank]), f"{stage} what you send is not {way}, micro-batch by micro-batch.")
    most = max(kept)
    many = f"{stage} it keeps {most} micro-batches at once. Under 1F1B it goes backward sooner."
    expect(most <= 2 - rank, many)
    expect(not any(late), f"Stage {rank} still has {held}")


def _expect_message(stage: str, rank: int, m: int, sent: int, taken: int) -> None:
    """CheckFailed if a rank that waits for a message now gets none, or makes both stages wait by turns."""
    expect(taken < m, f"{stage} you wait for more messages than come. There is one per micro-batch.")
    soon = rank == 0 and sent < min(m, taken + 2)
    expect(not soon, f"{stage} you wait before two outputs are on their way: send one more first.")
    early = rank == 1 and taken > sent + 1
    both = "you wait for a third input before you send the first gradient. Stage 0 waits for that."
    expect(not early, f"{stage} {both}")


def _expect_gradients(
    found: list[Any], right: list[torch.Tensor], rank: int, sizes: Sequence[int], stage: str
) -> None:
    if same(found, right):
        return
    if rank == 1:  # where the loss is
        for message, scale in SCALES.items():
            expect(not same(found, _scaled(sizes, scale)), message)
    fail(f"{stage} gradients are not the complete batch's. Does each micro-batch add its own, once?")


def _alive(storage: Any) -> bool:
    """True if a weakly referenced storage still has bytes."""
    there = storage()
    return there is not None and there.nbytes() > 0


def _scaled(sizes: Sequence[int], scale: Callable[[int, Sequence[int]], float]) -> list[torch.Tensor]:
    """The last stage's gradients, with each micro-batch's mean loss times `scale`."""
    last = stages()[1]
    for x, target in zip(of_whole(sizes)[0][1], batch(sizes)[1], strict=True):
        (mse_loss(last(x), target) * scale(len(target), sizes)).backward()
    return [cast(torch.Tensor, weight.grad) for weight in last.parameters()]


# --------------------------------------------------------------------------------------------------
# 14.4: stashed
# works in order; the first stage of three, a stage that goes two ahead, the last one
ORDERS = ("F0 F1 F2 B0 F3 B1 F4 B2 B3 B4", "F0 F1 B0 F2 B1 B2", "F0 B0 F1 B1")


def _stashed(
    stage: Any, order: Any, inputs: Any, gradients: Any, rate: float, mistake: str = ""
) -> dict[str, torch.Tensor]:
    """The weights after a stage of PipeDream (Narayanan et al. 2019, 3.3); on request with a `mistake`."""
    weights = {name: weight.detach().clone() for name, weight in stage.named_parameters()}
    newest = weights
    slopes = [torch.zeros_like(weight) for weight in weights.values()]
    seen = dict[int, dict[str, torch.Tensor]]()
    for work in order:
        micro = int(work[1:])
        if work[0] == "F":
            seen[micro] = weights if mistake == "flush" else newest
            continue
        version = newest if mistake == "newest" else seen[micro]
        leaves = {name: weight.clone().requires_grad_() for name, weight in version.items()}
        y = functional_call(stage, leaves, (inputs[micro],))
        found = torch.autograd.grad(y, list(leaves.values()), gradients[micro])
        if mistake == "added":
            slopes = [old + new for old, new in zip(slopes, found, strict=True)]
            found = tuple(slopes)
        begin = version if mistake == "lost" else newest
        step = -rate if mistake == "uphill" else rate
        pairs = zip(begin.items(), found, strict=True)
        newest = {name: weight - step * slope for (name, weight), slope in pairs}
    return newest


STASH_MISTAKES: Mistakes = {
    "Your backward uses the newest weights. It needs those that this micro-batch's forward saw.": (
        partial(_stashed, mistake="newest")
    ),
    "Your update starts from the version that forward saw. Updates since then are lost.": (
        partial(_stashed, mistake="lost")
    ),
    "Every forward sees the first weights. The newest ones are there after each backward.": (
        partial(_stashed, mistake="flush")
    ),
    "Gradients of earlier micro-batches are still in yours.": partial(_stashed, mistake="added"),
    "Your weights go uphill: subtract rate times gradient.": partial(_stashed, mistake="uphill"),
}


@exercise("14.4", "Each backward saw the weights of its forward, and each update began at the newest.")
def stashed(answer: Any) -> None:
    """`answer(stage, order, inputs, gradients, rate)` is the stage's weights at the end, by name."""
    cases, mine = [], []
    for number, order in enumerate(ORDERS):
        with seeded(number):
            stage = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
            micro_batches = len(order.split()) // 2
            inputs = [torch.randn(5, 3) for _ in range(micro_batches)]
            gradients = [torch.randn(5, 2) for _ in range(micro_batches)]
        cases.append((stage, order.split(), inputs, gradients, 0.3))
        got = call(answer, *cases[-1], returns=dict)
        names = [name for name, _ in stage.named_parameters()]
        expect(sorted(got) == sorted(names), f"Return a dictionary with these names: {', '.join(names)}.")
        mine.append([of_kind(got[name], torch.Tensor, f"{name} is").detach() for name in names])
    other = "The weights at the end are off. Follow one micro-batch with paper and pencil."
    recognized(mine, cases, _stashed, STASH_MISTAKES, other, _same_weights)


def _same_weights(found: Sequence[Any], wanted: Sequence[Any]) -> bool:
    pairs = zip(found, wanted, strict=True)
    return all(same(one, list(other.values())) for one, other in pairs)
