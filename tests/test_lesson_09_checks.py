"""The checks of lesson 09: right answers of every style pass, each wrong answer gets the hint it deserves."""

import math
from collections.abc import Callable
from typing import Any

import torch
from checking import Answers, JudgedAnswers

from course_utils import TrainingRun, estimate, gpu
from course_utils.lessons.sharding import checks as lesson_09
from course_utils.lessons.sharding.checks import ABOVE_CASES, CHOOSE_CASES, choose_right
from course_utils.lessons.sharding.zero import formula


def by_table(N: int, D: int, stage: int, weight: int, gradient: int, optimizer: int) -> float:
    cut, whole = [(0, weight + gradient + optimizer), (optimizer, weight + gradient), (gradient + optimizer, weight),
                  (weight + gradient + optimizer, 0)][stage]  # fmt: skip
    return whole * N + cut * N / D


def in_whole_bytes(N: int, D: int, stage: int, weight: int, gradient: int, optimizer: int) -> int:
    kinds = [optimizer, gradient, weight]
    return sum(kinds[stage:]) * N + sum(kinds[:stage]) * N // D


def each_kind_rounded_up(N: int, D: int, stage: int, weight: int, gradient: int, optimizer: int) -> int:
    kinds = [optimizer, gradient, weight]
    return sum(-(-kind * N // D) if index < stage else kind * N for index, kind in enumerate(kinds))


def of_whole_shares(N: int, D: int, stage: int, weight: int, gradient: int, optimizer: int) -> int:
    shares = [N // D if stage >= first else N for first in (3, 2, 1)]
    return weight * shares[0] + gradient * shares[1] + optimizer * shares[2]


def named(change: Callable[..., Any]) -> Any:
    """The same function with the exercise's names."""
    return lambda N, D, stage, weight, gradient, optimizer: change(N, D, stage, weight, gradient, optimizer)


RANK_BYTES = Answers(
    right=[by_table, in_whole_bytes, each_kind_rounded_up],
    wrong=[(named(change), words) for change, words in (
        (lambda N, D, stage, w, g, K: (w + g + K) * N, "one rank without sharding"),
        (lambda N, D, stage, w, g, K: (w + g + K) * N / D, "You divide everything"),
        (lambda N, D, stage, w, g, K: by_table(N, D, stage, 2, 2, 12), "You took 2, 2 and 12"),
        (lambda N, D, stage, w, g, K: D * by_table(N, D, stage, w, g, K), "all ranks together"),
        (lambda N, D, stage, w, g, K: by_table(N, D, min(stage, 2), w, g, K), "At stage 3"),
        (lambda N, D, stage, w, g, K: by_table(N, D, min(stage + 1, 3), w, g, K), "one kind more"),
        (lambda N, D, stage, w, g, K: by_table(N, D, stage, K, g, w), "The order is off"),
        (lambda N, D, stage, w, g, K: by_table(N, D, stage, g, w, K), "swapped"),
        (lambda N, D, stage, w, g, K: by_table(N, D, stage, w, g, K) / 1000, "KB where bytes were asked"),
        (lambda N, D, stage, w, g, K: by_table(N, D, stage, w, g, K) + 4 * (stage == 2), "Some stage is off"),
        (of_whole_shares, "You round the share of the parameters"),
    )],
)  # fmt: skip


def by_chunks(shapes: Any, D: int) -> dict[str, int]:
    """As torch does it: the first of its chunks."""
    shard = sum(torch.empty(shape).chunk(D)[0].numel() for shape in shapes)
    return {"padding": shard * D - sum(torch.empty(shape).numel() for shape in shapes), "shard": shard}


def row_by_row(shapes: Any, D: int) -> dict[str, int]:
    """Counts the rows of all ranks, real or not."""
    rows = [(len(range(0, shape[0], D)), shape[0], math.prod(shape[1:])) for shape in shapes]
    return {
        "shard": sum(each * numbers for each, _, numbers in rows),
        "padding": sum((D * each - real) * numbers for each, real, numbers in rows),
    }


def by_matrices(shapes: Any, D: int) -> dict[str, int]:
    """Whole matrices of numbers, padded with rows."""
    cut = [torch.nn.functional.pad(torch.ones(s).flatten(1) if s[1:] else torch.ones(s)[:, None], (0, 0, 0, -s[0] % D))
           for s in shapes]  # fmt: skip
    return {"shard": sum(one.numel() for one in cut) // D, "padding": sum(int((one == 0).sum()) for one in cut)}


def total(shapes: Any) -> int:
    return sum(math.prod(shape) for shape in shapes)


def with_shard(shard: Callable[..., float]) -> Any:
    return lambda shapes, D: {"shard": shard(shapes, D), "padding": row_by_row(shapes, D)["padding"]}


def with_padding(padding: Callable[..., float]) -> Any:
    return lambda shapes, D: {"shard": row_by_row(shapes, D)["shard"], "padding": padding(shapes, D)}


PADDING = Answers(
    right=[by_chunks, row_by_row, by_matrices],
    wrong=[
        (with_shard(lambda shapes, D: total(shapes) // D), "last numbers belong to nobody"),
        (with_shard(lambda shapes, D: sum(s[0] // D * math.prod(s[1:]) for s in shapes)), "last rows belong to nobody"),
        (with_shard(lambda shapes, D: total(shapes) / D), "a fraction"),
        (with_shard(lambda shapes, D: sum(-(-math.prod(s) // D) for s in shapes)), "numbers one by one"),
        (with_shard(lambda shapes, D: -(-total(shapes) // D)), "one flat piece"),
        (with_shard(lambda shapes, D: sum(-(-s[0] // D) for s in shapes)), "Those are rows"),
        (with_shard(lambda shapes, D: D * row_by_row(shapes, D)["shard"]), "One rank's was asked for"),
        (with_shard(lambda shapes, D: row_by_row(shapes[:1], D)["shard"]), "shard is off"),
        (lambda shapes, D: row_by_row([shape[:2] for shape in shapes], D), "How long is a row"),
        (with_padding(lambda shapes, D: D * row_by_row(shapes, D)["shard"]), "real numbers included"),
        (with_padding(lambda shapes, D: row_by_row(shapes, D)["padding"] / D), "a D-th of it"),
        (with_padding(lambda shapes, D: sum(-s[0] % D for s in shapes)), "rows of padding"),
        (with_padding(lambda shapes, D: sum(math.prod(s) % D for s in shapes)), "the remainder"),
    ],
)  # fmt: skip


def whole_then_cut(weights: Any, gradients: Any, momenta: Any, lr: float, beta: float) -> torch.Tensor:
    size = len(momenta[0])
    new = weights.clone()
    for rank in range(len(momenta)):
        mine = slice(rank * size, (rank + 1) * size)
        mean = torch.stack([gradient[mine] for gradient in gradients]).mean(0)
        momenta[rank].copy_(beta * momenta[rank] + mean)
        new[mine] -= lr * momenta[rank]
    return new


def weights_in_place(weights: Any, gradients: Any, momenta: Any, lr: float, beta: float) -> torch.Tensor:
    mean = torch.stack(gradients).mean(0).chunk(len(momenta))  # all-reduced, then cut
    for mine, gradient, momentum in zip(weights.chunk(len(momenta)), mean, momenta, strict=True):
        momentum *= beta
        momentum += gradient
        mine.sub_(momentum, alpha=lr)
    return weights


def in_double(weights: Any, gradients: Any, momenta: Any, lr: float, beta: float) -> torch.Tensor:
    return whole_then_cut(weights.double(), gradients, momenta, lr, beta)


def by_hand(
    reduce: Callable[[list[Any], int], Any] = lambda slices, rank: sum(slices) / len(slices),
    share: float = 1.0,
    sign: int = -1,
    hold: Callable[[list[Any]], list[Any]] = lambda momenta: momenta,
    after: Callable[[Any], Any] = lambda momentum: momentum,
) -> Any:
    """One rank after the other, with one thing done in another way."""

    def answer(weights: Any, gradients: Any, momenta: Any, lr: float, beta: float) -> torch.Tensor:
        new, D = [], len(momenta)
        for rank, momentum in enumerate(hold(momenta)):
            reduced = reduce([gradient.chunk(D)[rank] for gradient in gradients], rank)
            momentum.mul_(beta).add_(share * reduced)
            new.append(weights.chunk(D)[rank] + sign * lr * momentum)
        for momentum in momenta:
            after(momentum)
        return torch.cat(new)

    return answer


def in_one_matrix(weights: Any, gradients: Any, momenta: Any, lr: float, beta: float) -> torch.Tensor:
    """One row for each rank, and all of them in one tensor."""
    rows = beta * torch.stack(momenta) + torch.stack(gradients).mean(0).view(len(momenta), -1)
    for momentum, row in zip(momenta, rows, strict=True):
        momentum.copy_(row)
    return weights - lr * rows.flatten()


ZERO_1_STEP = Answers(
    right=[by_hand(), in_double, weights_in_place],
    wrong=[
        (by_hand(reduce=lambda slices, rank: sum(slices)), "You add the ranks' gradients"),
        (by_hand(reduce=lambda slices, rank: slices[rank]), "the reduction is missing"),
        (by_hand(reduce=lambda slices, rank: slices[0]), "You take one rank's gradient"),
        (by_hand(share=0.1), "without a factor 1 − β"),
        (by_hand(sign=1), "Weights climb"),
        (by_hand(hold=lambda momenta: [momentum.clone() for momentum in momenta]), "Momenta are forgotten"),
        (lambda weights, gradients, momenta, lr, beta: weights.chunk(len(momenta))[0], "another shape than the old"),
        (by_hand(after=lambda momentum: momentum.resize_(1)), "A momentum has changed its size"),
        (by_hand(after=lambda momentum: setattr(momentum, "data", momentum.clone())), "in the place of momenta"),
        (in_one_matrix, "the momenta of several ranks together"),
        (by_hand(hold=lambda momenta: [one.neg_() for one in momenta], after=torch.neg_), "The weights are right, the"),
        (by_hand(after=lambda momentum: momentum.mul_(0.9)), "The new weights are off"),
    ],
)


def above(**changes: Callable[[int, int], float]) -> Any:
    right: dict[str, Callable[[int, int], float]] = {
        "outer": lambda outer, block: 2 * outer,
        "block": lambda outer, block: 2 * block,
        "next": lambda outer, block: 2 * block,
        "reduce": lambda outer, block: 4 * block,
    }
    return lambda outer, block: {name: size(outer, block) for name, size in (right | changes).items()}


def of_run(outer: int, block: int) -> TrainingRun:
    return next(run for run in ABOVE_CASES if lesson_09.units(run) == (outer, block))


ABOVE = Answers(
    right=[above(), above(next=lambda outer, block: 2.0 * block), lambda outer, block: above()(outer / 1, block / 1)],
    wrong=[
        (above(reduce=lambda outer, block: 2 * block), "summed in another format"),
        (above(outer=lambda outer, block: 4 * outer), "`outer` is twice too much"),
        (above(block=lambda outer, block: block), "`block` is in elements"),
        (above(reduce=lambda outer, block: block), "`reduce` is in elements"),
        (above(next=lambda outer, block: 0), "`next` is nothing"),
        (above(outer=lambda outer, block: 2 * block), "`outer` is off"),
        (above(outer=lambda outer, block: 2 * outer / of_run(outer, block).world_size), "`outer` is a shard of it"),
        (above(block=lambda outer, block: 2 * block * of_run(outer, block).model.layers), "`block` is all blocks at"),
    ],
)  # fmt: skip


def downward(run: Any, ranks: int, card: str, least: int) -> Any:
    for stage in (0, 1, 2, 3):
        for b in reversed(lesson_09.MICRO_BATCHES):
            candidate = run.replace(micro_batch=b, world_size=ranks, zero_stage=stage)
            if b >= least and estimate(candidate).total <= gpu(card).memory:
                return [stage, b]
    return None


def test_every_stage_and_nothing_are_among_the_right_choices() -> None:
    right = [choose_right(*case) for case in CHOOSE_CASES]
    assert None in right and {found[0] for found in right if found} == {0, 1, 2, 3}


def fitting(run: Any, ranks: int, card: str, stage: int, least: int) -> list[int]:
    sharded = run.replace(world_size=ranks, zero_stage=stage)
    return [b for b in lesson_09.MICRO_BATCHES
            if b >= least and estimate(sharded.replace(micro_batch=b)).total <= gpu(card).memory]  # fmt: skip


def stage_by_formula(run: Any, ranks: int, card: str, least: int) -> Any:
    sums = [sum(formula(run.replace(world_size=ranks, zero_stage=stage)).values()) for stage in range(4)]
    stage = next((stage for stage, bytes_ in enumerate(sums) if bytes_ <= gpu(card).memory), 0)
    sizes = fitting(run, ranks, card, stage, least)
    return (stage, max(sizes)) if sizes else None


def choosing(take: Callable[[list[tuple[int, int]]], Any], more: Callable[[int], int] = lambda least: least) -> Any:
    """What `take` takes of all the pairs that fit, lowest stage and smallest micro-batch first."""

    def answer(run: Any, ranks: int, card: str, least: int) -> Any:
        pairs = [(stage, b) for stage in range(4) for b in fitting(run, ranks, card, stage, more(least))]
        return take(pairs) if pairs else None

    return answer


def lowest(pairs: list[tuple[int, int]]) -> tuple[int, int]:
    return max(pair for pair in pairs if pair[0] == pairs[0][0])


CHOOSE = Answers(
    right=[downward, choosing(lowest)],
    wrong=[
        (stage_by_formula, "The stage comes from ZeRO's formula"),
        (choosing(max), "Shard as little as you must"),
        (choosing(min), "The stage is right. At that stage"),
        (choosing(lambda pairs: max(pairs, key=lambda both: (both[1], -both[0]))), "at any stage"),
        (choosing(lowest, lambda least: 1), "You forget `least`"),
        (choosing(lowest, lambda least: least + 1), "exactly `least` sequences counts"),
        (lambda run, ranks, card, least: downward(run, ranks, card, least) or (3, 1), "Some choice is off"),
        (choosing(lambda pairs: (3, lowest(pairs)[1])), "Some choice is off"),
        (choosing(lambda pairs: (4, 1)), "a stage from 0 to 3"),
        (choosing(lambda pairs: (pairs[0][0], 3)), "one of MICRO_BATCHES"),
        (choosing(lambda pairs: pairs[0][:1]), "Return (stage, micro_batch)"),
    ],
)


def term_by_term(s: int, b: int, h: int, a: int, t: int, sequence: bool) -> float:
    split = 24 * s * b * h / t + 5 * a * s * s * b / t
    return split + (10 * s * b * h / t if sequence else 10 * s * b * h)


def in_whole_numbers(s: int, b: int, h: int, a: int, t: int, sequence: bool) -> int:
    whole = 0 if sequence else 10 * s * b * h
    return whole + (34 * s * b * h + 5 * a * s * s * b - whole) // t


def by_parts(s: int, b: int, h: int, a: int, t: int, sequence: bool) -> float:
    """Each tensor with its bytes, and what it is divided by."""
    kept = [(10 * h, t if sequence else 1), (24 * h, t), (5 * a * s, t)]
    return sum(s * b * bytes_ / ranks for bytes_, ranks in kept)


def spelled(change: Callable[..., Any]) -> Any:
    return lambda s, b, h, a, t, sequence: change(s, b, h, a, t, sequence)


RANK_ACTIVATIONS = Answers(
    right=[term_by_term, in_whole_numbers, by_parts],
    wrong=[(spelled(change), words) for change, words in (
        (lambda s, b, h, a, t, q: term_by_term(s, b, h, a, t, True), "You divide all by t"),
        (lambda s, b, h, a, t, q: term_by_term(s, b, h, a, t, False), "even with sequence parallelism"),
        (lambda s, b, h, a, t, q: term_by_term(s, b, h, a, 1, q), "t is missing"),
        (lambda s, b, h, a, t, q: term_by_term(s, b, h, 0, t, q), "scores are missing"),
        (lambda s, b, h, a, t, q: term_by_term(s, b, h, 0, t, q) + 5 * a * s * s * b, "Attention scores are split"),
        (lambda s, b, h, a, t, q: 2 * term_by_term(s, b, h, a, t, q), "no further 2"),
        (lambda s, b, h, a, t, q: term_by_term(s, b, h, a, t, not q), "turned round"),
        (lambda s, b, h, a, t, q: term_by_term(s, 1, h, a, t, q), "That is one sequence"),
        (lambda s, b, h, a, t, q: term_by_term(s, b, h, a, t, q) / 1e9, "GB where bytes were asked"),
        (lambda s, b, h, a, t, q: term_by_term(s, b, h, a, t, q) * (1 + 1e-8), "Some bytes are off"),
    )],
)  # fmt: skip


ANSWERS = {"09.1": RANK_BYTES, "09.2": PADDING, "09.3": ZERO_1_STEP, "09.4": ABOVE, "09.5": CHOOSE,
           "09.6": RANK_ACTIVATIONS}  # fmt: skip


class TestAnswers(JudgedAnswers):
    answers = ANSWERS
