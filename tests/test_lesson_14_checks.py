"""Checks of lesson 14: right answers of every style pass, and each planted wrong answer gets its hint."""

from collections import deque
from collections.abc import Callable
from itertools import accumulate, pairwise, product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from checking import Answers, JudgedAnswers, nothing
from torch.autograd.graph import get_gradient_edge
from torch.nn.functional import mse_loss

from course_utils.lessons.pipelines.checks import CUT_CASES, PROGRAM, best_cut
from course_utils.lessons.pipelines.schedules import simulate
from course_utils.lessons.shared.on_ranks import outcomes


def as_many_as_needed(p: int, m: int, stage: int) -> int:
    return min(m, p - stage)


Keeps = Callable[[int, int, int], int]


def spans_of(counts: Any) -> list[tuple[int, int]]:
    ends = list(accumulate(counts))
    return [(end - count, end) for count, end in zip(counts, ends, strict=True)]


def trying_all(
    keeps: Keeps = as_many_as_needed,
    size: Callable[[int, int, int], float] = lambda states, kept, count: states + count * kept,
    worst: Callable[[Any], float] = max,
    otherwise: Any = None,
) -> Any:
    """Every choice of positive numbers of layers, with other bytes for a stage or a goal other than time."""

    def answer(times: Any, states: Any, kept: Any, p: int, m: int, capacity: int) -> Any:
        best = (float("inf"), otherwise)
        for counts in product(range(1, len(times) + 1), repeat=p):
            if sum(counts) != len(times):
                continue
            spans = spans_of(counts)
            full = [
                size(sum(states[a:b]), sum(kept[a:b]), keeps(p, m, at)) for at, (a, b) in enumerate(spans)
            ]
            time = worst([sum(times[a:b]) for a, b in spans])
            if max(full) <= capacity and time < best[0]:
                best = (time, list(counts))
        return best[1]

    return answer


def by_recursion(times: Any, states: Any, kept: Any, p: int, m: int, capacity: int) -> tuple[int, ...] | None:
    """The best of the layers from `first` on, for the stages from `stage` on."""

    def rest(first: int, stage: int) -> tuple[float, tuple[int, ...]]:
        if stage == p:
            return (0, ()) if first == len(times) else (float("inf"), ())
        found: list[tuple[float, tuple[int, ...]]] = [(float("inf"), ())]
        for end in range(first + 1, len(times) + 1):
            full = sum(states[first:end]) + min(p - stage, m) * sum(kept[first:end])
            if full <= capacity:
                slowest, counts = rest(end, stage + 1)
                found.append((max(slowest, sum(times[first:end])), (end - first, *counts)))
        return min(found, key=lambda pair: pair[0])

    slowest, counts = rest(0, 0)
    return counts if slowest < float("inf") else None


def by_simulation(times: Any, states: Any, kept: Any, p: int, m: int, capacity: int) -> Any:
    """What stages keep comes from the simulator; the slowest stage's limit grows until a cut fits."""
    pipeline = simulate("1F1B", p, m)
    for limit in range(1, sum(times) + 1):
        open_cuts = [[0]]
        for stage in range(p):
            longer = []
            for ends in open_cuts:
                start = ends[-1]
                for end in range(start + 1, len(times) + 1):
                    full = sum(states[start:end]) + pipeline.most_kept(stage) * sum(kept[start:end])
                    if sum(times[start:end]) <= limit and full <= capacity:
                        longer.append([*ends, end])
            open_cuts = longer
        done = [ends for ends in open_cuts if ends[-1] == len(times)]
        if done:
            return [end - start for start, end in pairwise(done[0])]
    return None


def until_average(times: Any, states: Any, kept: Any, p: int, m: int, capacity: int) -> list[int]:
    """Closes a stage when it has its share of the time."""
    counts = [0]
    time = 0
    for place, one in enumerate(times):
        left = len(times) - place
        if counts[-1] and len(counts) < p and (time >= sum(times) / p or left == p - len(counts)):
            counts.append(0)
            time = 0
        counts[-1] += 1
        time += one
    return counts


def equal_layers(times: Any, states: Any, kept: Any, p: int, m: int, capacity: int) -> list[int]:
    return [len(times) // p + (stage < len(times) % p) for stage in range(p)]


def first_that_fits(times: Any, states: Any, kept: Any, p: int, m: int, capacity: int) -> Any:
    return trying_all(worst=lambda times: 1)(times, states, kept, p, m, capacity)


def smallest_fullest(times: Any, states: Any, kept: Any, p: int, m: int, capacity: int) -> Any:
    """Levels memory, not time."""
    fitting = [capacity - spare for spare in range(capacity)]
    found = [trying_all()(times, states, kept, p, m, one) for one in fitting]
    return next((one for one in reversed(found) if one), None)


def ends_of(*given: Any) -> Any:
    counts = by_recursion(*given)
    return counts and list(accumulate(counts))


CUT = Answers(
    right=[trying_all(), by_recursion, by_simulation],
    wrong=[
        (trying_all(size=lambda states, kept, count: 0), "You cut by time alone"),
        (equal_layers, "the same number of layers"),
        (trying_all(keeps=lambda p, m, stage: 1), "one micro-batch per stage"),
        (trying_all(keeps=lambda p, m, stage: m), "That is GPipe"),
        (trying_all(keeps=lambda p, m, stage: min(m, p)), "Later stages keep fewer"),
        (trying_all(keeps=lambda p, m, stage: p - stage), "m may be small"),
        (trying_all(keeps=lambda p, m, stage: min(m, stage + 1)), "Reversed"),
        (trying_all(keeps=lambda p, m, stage: min(m, p - stage + 1)), "stages count from 0"),
        (trying_all(keeps=lambda p, m, stage: min(m, p - stage - 1)), "You count one too few"),
        (trying_all(size=lambda states, kept, count: count * (states + kept)), "A stage has them once"),
        (trying_all(size=lambda states, kept, count: count * kept), "You leave out the states"),
        (trying_all(size=lambda states, kept, count: states), "You leave out the activations"),
        (smallest_fullest, "It must only fit"),
        (until_average, "does not fit: add its states"),
        (first_that_fits, "has a faster slowest stage"),
        (trying_all(worst=lambda times: sum(time**2 for time in times[:1])), "has a faster slowest stage"),
        (trying_all(otherwise=[2, 2]), "does not fit: add its states"),
        (lambda *given: [len(given[0])], "Your list has"),
        (lambda *given: [len(given[0])] + [0] * (given[3] - 1), "has no layer"),
        (ends_of, "layers in all"),
        (lambda *given: None, "but a cut fits"),
        (lambda *given: (by_recursion(*given) or (0,))[:-1], "Your list has"),
        (lambda *given: [[1]], "A stage's number of layers is"),
    ],
)


def test_in_each_case_of_the_cut_one_is_best() -> None:
    """So that a check may compare cuts, and not only their slowest stages."""
    for times, states, kept, p, m, capacity in CUT_CASES:
        best = best_cut(times, states, kept, p, m, capacity)
        for counts in product(range(1, len(times) + 1), repeat=p):
            if sum(counts) != len(times) or list(counts) == best:
                continue
            spans = spans_of(counts)
            full = [sum(states[a:b]) + min(m, p - at) * sum(kept[a:b]) for at, (a, b) in enumerate(spans)]
            if max(full) <= capacity:
                assert best and slowest(times, counts) > slowest(times, best)


def slowest(times: Any, counts: Any) -> int:
    return max(sum(times[a:b]) for a, b in spans_of(counts))


def with_ahead(ahead: Callable[[int, int, int], int]) -> Any:
    """1F1B with another number of forwards at first."""

    def answer(p: int, m: int, stage: int) -> list[str]:
        first = max(1, ahead(p, m, stage))
        works = [f"F{micro}" for micro in range(first)]
        for micro in range(m):
            works.append(f"B{micro}")
            if micro + first < m:
                works.append(f"F{micro + first}")
        return works

    return answer


def by_counting(p: int, m: int, stage: int) -> list[str]:
    """Forward while fewer are kept than may be, else backward."""
    works = []
    forward = 0
    backward = 0
    while backward < m:
        if forward < m and forward - backward < p - stage:
            works.append(f"F{forward}")
            forward += 1
        else:
            works.append(f"B{backward}")
            backward += 1
    return works


def forwards_first(p: int, m: int, stage: int) -> list[str]:
    """The right number at first, then all the other forwards."""
    ahead = min(m, p - stage)
    forwards = [f"F{n}" for n in range(m)]
    backwards = [f"B{n}" for n in range(m)]
    return [*forwards[:ahead], "B0", *forwards[ahead:], *backwards[1:]]


def last_in_first_out(p: int, m: int, stage: int) -> list[str]:
    """Backwards of the micro-batches that are kept at the end come in the order of a stack."""
    works = by_counting(p, m, stage)
    tail = min(m, p - stage)
    return [*works[:-tail], *works[-tail:][::-1]]


ORDER = Answers(
    right=[
        with_ahead(as_many_as_needed),
        by_counting,
        lambda p, m, stage: tuple(simulate("1F1B", p, m).order(stage)),
    ],
    wrong=[
        (with_ahead(lambda p, m, s: m), "that is GPipe"),
        (with_ahead(lambda p, m, s: min(m, s + 1)), "Too few forwards"),
        (with_ahead(lambda p, m, s: min(m, p - s - 1)), "Too few forwards"),
        (with_ahead(lambda p, m, s: min(m, p - s + 1)), "Too many forwards"),
        (with_ahead(lambda p, m, s: p - s), "there is no F2"),
        (forwards_first, "alternate"),
        (last_in_first_out, "in the order of the micro-batches"),
        (lambda p, m, stage: 2 * by_counting(p, m, stage), "F0 occurs more than once"),
        (lambda p, m, stage: by_counting(p, m, stage)[:-1], "B5 is missing"),
        (lambda p, m, stage: by_counting(p, m, stage)[::-1], "before its own forward"),
        (
            lambda p, m, stage: [work[0] + str(int(work[1:]) + 1) for work in by_counting(p, m, stage)],
            "there is no F6",
        ),
        (
            lambda p, m, stage: [(work[0], int(work[1:])) for work in by_counting(p, m, stage)],
            "list of strings",
        ),
    ],
)


def in_one_loop(layers: Any, rank: Any, data: Any, send: Any, receive: Any) -> None:
    if rank == 1:
        for target in data:
            x = receive((len(target), layers[0].in_features)).requires_grad_()
            loss = mse_loss(layers(x), target) * len(target) / sum(map(len, data))
            loss.backward()
            send(x.grad)
        return
    waiting = []
    for batch in [*data, None]:
        if batch is not None:
            y = layers(batch)
            send(y.detach())
            waiting.append((get_gradient_edge(y), y.shape))
        if batch is None or len(waiting) == 2:
            edge, shape = waiting.pop(0)
            torch.autograd.backward(edge, receive(shape))


def with_helpers(layers: Any, rank: Any, data: Any, send: Any, receive: Any) -> Any:
    """With inner functions and a queue; the loss is a sum, divided once."""
    waiting = deque()

    def forward(x: Any) -> None:
        y = layers(x)
        waiting.append((get_gradient_edge(y), tuple(y.shape)))
        send(y)

    def backward() -> None:
        edge, shape = waiting.popleft()
        torch.autograd.backward([edge], [receive(shape)])

    if rank == 0:
        forward(data[0])
        for x in data[1:]:
            forward(x)
            backward()
        backward()
        return None
    numbers = sum(target.numel() for target in data)
    total = 0.0
    for target in data:
        x = receive([len(target), layers[0].weight.shape[1]])
        x.requires_grad = True
        loss = mse_loss(layers(x), target, reduction="sum") / numbers
        loss.backward()
        total += loss.item()
        send(x.grad.detach())
    return total


def with_a_function(layers: Any, rank: Any, data: Any, send: Any, receive: Any) -> None:
    """Backward of what sends receives the gradient: autograd itself takes part in the messages."""

    class ToNext(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, y: Any) -> Any:
            ctx.shape = y.shape
            send(y)
            return torch.zeros(())

        @staticmethod
        def backward(ctx: Any, *_: Any) -> Any:
            return receive(ctx.shape)

    sent = deque()
    for number, part in enumerate(data):
        if rank == 0:
            sent.append(ToNext.apply(layers(part)))
            if number:
                sent.popleft().backward()
        else:
            x = receive((part.shape[0], layers[0].in_features)).requires_grad_(True)
            weight = len(part) / sum(len(one) for one in data)
            torch.autograd.backward(F.mse_loss(layers(x), part), torch.tensor(weight))
            send(x.grad)
    while sent:
        sent.popleft().backward()


def stages_with(
    scale: Callable[[Any, Any], float] = lambda part, data: len(part) / sum(map(len, data)),
    ahead: Callable[[int], int] = lambda m: 2,
    keep: Callable[[Any], Any] = get_gradient_edge,
    gradient: Callable[[Any], Any] = lambda x: x.grad,
    before: Callable[[Any], Any] = lambda layers: None,
) -> Any:
    """The first answer with one thing done in another way; it does not come as far as real ranks."""

    def answer(layers: Any, rank: Any, data: Any, send: Any, receive: Any) -> None:
        waiting = []
        for part in [*data, *[None] * ahead(len(data))]:
            if part is not None:
                before(layers)
            if rank == 1 and part is not None:
                x = receive((len(part), layers[0].in_features)).requires_grad_()
                (mse_loss(layers(x), part) * scale(part, data)).backward()
                send(gradient(x))
            elif rank == 0 and part is not None:
                y = layers(part)
                send(y.detach())
                waiting.append((keep(y), y.shape))
            if waiting and (part is None or len(waiting) == ahead(len(data))):
                kept, shape = waiting.pop(0)
                torch.autograd.backward(kept, receive(shape))

    return answer


def first_waits(layers: Any, rank: Any, data: Any, send: Any, receive: Any) -> Any:
    if rank == 0:
        receive((len(data[0]), layers[-1].out_features))
    return in_one_loop(layers, rank, data, send, receive)


def as_a_whole(layers: Any, rank: Any, data: Any, send: Any, receive: Any) -> None:
    return in_one_loop(layers, rank, [torch.cat(list(data))], send, receive)


def sent_twice(layers: Any, rank: Any, data: Any, send: Any, receive: Any) -> None:
    in_one_loop(layers, rank, data, lambda tensor: [send(tensor), send(tensor)], receive)


def all_targets_first(layers: Any, rank: Any, data: Any, send: Any, receive: Any) -> None:
    if rank == 0:
        return in_one_loop(layers, rank, data, send, receive)
    losses = []
    for target in data:
        x = receive((len(target), layers[0].in_features)).requires_grad_()
        losses.append((x, mse_loss(layers(x), target) * len(target) / sum(map(len, data))))
    for x, loss in losses:
        loss.backward()
        send(x.grad)
    return None


def inputs_kept(layers: Any, rank: Any, data: Any, send: Any, receive: Any) -> None:
    """Every input that has come stays in a list."""
    kept = []

    def receive_and_keep(shape: Any) -> Any:
        kept.append(receive(shape))
        return kept[-1]

    in_one_loop(layers, rank, data, send, receive_and_keep)


def copies_kept(layers: Any, rank: Any, data: Any, send: Any, receive: Any) -> None:
    """A copy of every input that has come stays in a list."""
    kept = []

    def receive_and_keep(shape: Any) -> Any:
        kept.append(receive(shape).clone())
        return kept[-1]

    in_one_loop(layers, rank, data, send, receive_and_keep if rank else receive)


def messages_kept(layers: Any, rank: Any, data: Any, send: Any, receive: Any) -> None:
    """Every message that was sent stays in a list."""
    kept = []

    def send_and_keep(tensor: Any) -> None:
        kept.append(tensor.clone())
        send(kept[-1])

    in_one_loop(layers, rank, data, send if rank else send_and_keep, receive)


def last_out_first(layers: Any, rank: Any, data: Any, send: Any, receive: Any) -> None:
    """Takes the newest output backward, not the oldest."""
    if rank == 1:
        return in_one_loop(layers, rank, data, send, receive)
    waiting = []
    for batch in [*data, None]:
        if batch is not None:
            y = layers(batch)
            send(y.detach())
            waiting.append((get_gradient_edge(y), y.shape))
        if batch is None or len(waiting) == 2:
            edge, shape = waiting.pop()
            torch.autograd.backward(edge, receive(shape))
    return None


def all_but_the_last_alike(part: Any, data: Any) -> float:
    return len(part) / (len(data[0]) * (len(data) - 1) + len(data[-1]))


def in_double(layers: Any, rank: Any, data: Any, send: Any, receive: Any) -> None:
    in_one_loop(layers, rank, data, lambda tensor: send(tensor.double()), receive)


def with_an_optimizer(layers: Any, rank: Any, data: Any, send: Any, receive: Any) -> None:
    in_one_loop(layers, rank, data, send, receive)
    torch.optim.SGD(layers.parameters(), lr=0.1).step()


def with_autograd_grad(layers: Any, rank: Any, data: Any, send: Any, receive: Any) -> None:
    """Gradients by `autograd.grad`; of an output that has been sent, only the storage is given back."""
    weights = list(layers.parameters())
    if rank == 1:
        for target in data:
            x = receive((len(target), layers[0].in_features)).requires_grad_()
            loss = mse_loss(layers(x), target) * (len(target) / sum(map(len, data)))
            gradient, *ours = torch.autograd.grad(loss, [x, *weights])
            send(gradient)
            for weight, one in zip(weights, ours, strict=True):
                weight.grad = one if weight.grad is None else weight.grad + one
        return
    waiting = []
    for number, batch in enumerate(data):
        y = layers(batch)
        send(y.detach().clone())
        y.untyped_storage().resize_(0)
        waiting.append(y)
        if number:
            waiting[number - 1].backward(receive(waiting[number - 1].shape))
    waiting[-1].backward(receive(waiting[-1].shape))


def only_rank_1_here(layers: Any, rank: Any, data: Any, send: Any, receive: Any) -> None:
    """Raises on rank 1 alone; rank 0 then waits."""
    if rank == 1:
        COUNTED.append(rank)
    in_one_loop(layers, rank, data, send, receive)


def forward_only(layers: Any, rank: Any, data: Any, send: Any, receive: Any) -> None:
    if rank == 1:
        return in_one_loop(layers, rank, data, send, receive)
    for batch in data:
        send(layers(batch).detach())
    return None


COUNTED: list[int] = []


def only_here(layers: Any, rank: Any, data: Any, send: Any, receive: Any) -> None:
    """Right in one process, and raises on real ranks, where the list of this file is missing."""
    COUNTED.append(rank)
    in_one_loop(layers, rank, data, send, receive)


TWO_STAGES = Answers(
    right=[in_one_loop, with_helpers, with_a_function, with_autograd_grad],
    wrong=[
        (stages_with(scale=lambda part, data: 1.0), "as if it were the complete batch's"),
        (stages_with(scale=lambda part, data: 1 / len(data)), "also the smaller one"),
        (
            stages_with(scale=lambda part, data: 1 / sum(map(len, data))),
            "gradients are not the complete batch's",
        ),
        (stages_with(scale=lambda part, data: 3 * len(part) / sum(map(len, data))), "a sum over the columns"),
        (stages_with(before=lambda layers: layers.zero_grad()), "Does each micro-batch add its own"),
        (stages_with(gradient=lambda x: x), "what you send is not a gradient of the input"),
        (stages_with(gradient=lambda x: None), "where x does not require a gradient"),
        (stages_with(ahead=lambda m: m), "Under 1F1B it goes backward sooner"),
        (stages_with(ahead=lambda m: 1), "send one more first"),
        (stages_with(keep=lambda y: y), "Who holds y?"),
        (all_targets_first, "a third input before you send the first gradient"),
        (inputs_kept, "Who holds x?"),
        (copies_kept, "Who holds x?"),
        (messages_kept, "Who holds y?"),
        (stages_with(scale=all_but_the_last_alike), "gradients are not the complete batch's"),
        (in_double, "the other rank expects fp32"),
        (last_out_first, "in the order of the micro-batches"),
        (with_an_optimizer, "Leave only gradients: no optimizer"),
        (first_waits, "for a gradient whose output you have not sent yet"),
        (as_a_whole, "and another shape comes"),
        (sent_twice, "The other stage expects one per micro-batch"),
        (forward_only, "leave messages of the other stage unread"),
        (nothing, "leave messages of the other stage unread"),
        (only_here, "raised NameError"),
        (only_rank_1_here, "raised NameError"),
    ],
)


@pytest.fixture(scope="module", autouse=True)
def tried() -> None:
    """All that reach real ranks, by the same processes: a start takes seconds.

    Outcomes are kept for the checks.
    """
    outcomes(PROGRAM, 2, [("step", step) for step in (*TWO_STAGES.right, only_here, only_rank_1_here)])


class Shared(torch.autograd.Function):
    """Megatron's f."""

    @staticmethod
    def forward(ctx: Any, x: Any, all_reduce: Any) -> Any:
        ctx.all_reduce = all_reduce
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        whole = gradients[0].clone()
        ctx.all_reduce(whole)
        return whole, None


class Summed(torch.autograd.Function):
    """Megatron's g."""

    @staticmethod
    def forward(ctx: Any, part: Any, all_reduce: Any) -> Any:
        whole = part.clone()
        all_reduce(whole)
        return whole

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None


class SummedAgain(Summed):
    """As `torch.distributed.nn.functional.all_reduce` has it: the gradient is summed, too."""

    @staticmethod
    def forward(ctx: Any, part: Any, all_reduce: Any) -> Any:
        ctx.all_reduce = all_reduce
        return Summed.forward(ctx, part, all_reduce)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return Shared.backward(ctx, *gradients)


class WithoutACopy(Shared):
    """Sums what autograd hands it, in place."""

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.all_reduce(gradients[0])
        return gradients[0], None


class GivesNothing(Shared):
    """Returns what `all_reduce` returns."""

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return ctx.all_reduce(gradients[0].clone()), None


class Halved(Summed):
    """Shares the gradient out among two ranks."""

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] / 2, None


def mlp(
    share: Callable[..., Any] = Shared.apply, add: Callable[..., Any] = Summed.apply, bias: str = "once"
) -> Callable[..., Any]:
    def answer(x: Any, up: Any, up_bias: Any, down: Any, down_bias: Any, all_reduce: Any) -> Any:
        hidden = F.gelu(F.linear(share(x, all_reduce), up, up_bias))
        part = F.linear(hidden, down, down_bias if bias == "in each" else None)
        y = add(part, all_reduce)
        return y + down_bias if bias == "once" else y

    return answer


def by_hooks(x: Any, up: Any, up_bias: Any, down: Any, down_bias: Any, all_reduce: Any) -> Any:
    """A hook in place of f, and a constant added in place of g."""

    def summed(tensor: Any) -> Any:
        whole = tensor.detach().clone()
        all_reduce(whole)
        return whole

    x = x.view_as(x)
    x.register_hook(summed)
    part = F.gelu(x @ up.T + up_bias) @ down.T
    return part + (summed(part) - part).detach() + down_bias


def hook_on_x(x: Any, up: Any, up_bias: Any, down: Any, down_bias: Any, all_reduce: Any) -> Any:
    """Sums whatever gradient comes to the caller's x."""

    def summed(gradient: Any) -> Any:
        gradient = gradient.clone()
        all_reduce(gradient)
        return gradient

    x.register_hook(summed)
    return Summed.apply(F.gelu(F.linear(x, up, up_bias)) @ down.T, all_reduce) + down_bias


def in_place(part: Any, all_reduce: Any) -> Any:
    all_reduce(part)
    return part


def twice(part: Any, all_reduce: Any) -> Any:
    return Summed.apply(Summed.apply(part, all_reduce) / 2, all_reduce)


PARALLEL_MLP = Answers(
    right=[mlp(), by_hooks, mlp(share=WithoutACopy.apply)],
    wrong=[
        (mlp(share=lambda x, all_reduce: x), "1 × in forward and 0 × in backward"),
        (mlp(add=lambda part, all_reduce: part), "0 × in forward and 1 × in backward"),
        (mlp(add=SummedAgain.apply), "t times too large"),
        (mlp(share=Summed.apply), "something else than this rank's part"),
        (mlp(bias="in each"), "the bias, too"),
        (mlp(bias="never"), "the output is not the complete MLP's"),
        (mlp(add=twice), "something else than"),
        (hook_on_x, "something else than this rank's part of x's gradient"),
        (mlp(add=in_place), "autograd does not see that"),
        (mlp(add=Halved.apply), "something else than this rank's part of x's gradient"),
        (mlp(share=GivesNothing.apply), "no gradient reaches x"),
        (
            lambda *given: mlp()(*given[:4], 2 * given[4] - given[4].detach(), given[5]),
            "gradient of down_bias is not",
        ),
        (lambda *given: F.gelu(F.linear(*given[:3])) @ given[3].T + given[4], "0 × in forward and 0 ×"),
        (lambda *given: mlp()(given[0].detach(), *given[1:]), "1 × in forward and 0 ×"),
        (lambda *given: mlp()(*given[:4], given[4].detach(), given[5]), "no gradient reaches down_bias"),
        (lambda *given: mlp()(*given).detach(), "something cuts the graph"),
        (lambda *given: given[5](F.gelu(F.linear(*given[:3]))), "What has every rank only a part of"),
    ],
)

ANSWERS = {"14.1": CUT, "14.2": ORDER, "14.3": TWO_STAGES, "14.4": PARALLEL_MLP}


class TestAnswers(JudgedAnswers):
    answers = ANSWERS
