"""Checks of the exercises of lesson 15, "Which cut when": each names the misconception, never the answer."""

import operator
from collections.abc import Sequence
from functools import partial
from itertools import product
from typing import Any, cast

import torch
from torch.nn.functional import gelu, linear

from ...interactive.feedback import Mistakes, call, exercise, expect, fail, of_kind, recognized
from ..shared.judging import Ran, forward_backward, same, seeded


# --------------------------------------------------------------------------------------------------
# 15.1: parallel_mlp
@exercise("15.1", "One message forward, one backward, and every gradient is the complete MLP's.")
def parallel_mlp(answer: Any) -> None:
    """`answer(x, up, up_bias, down, down_bias, all_reduce)` is the whole MLP's output, of one rank."""
    for t, rank, shape in ((2, 0, (5, 8)), (4, 2, (3, 8)), (2, 1, (1, 4)), (1, 0, (3, 4))):
        with seeded():
            h = shape[-1]
            x = torch.randn(shape)
            up = torch.randn(4 * h, h)
            up_bias = torch.randn(4 * h)
            down = torch.randn(h, 4 * h)
            down_bias = torch.randn(h)
        parts = list(zip(up.chunk(t), up_bias.chunk(t), down.chunk(t, dim=1), strict=True))
        each = [forward_backward(_mlp, [x, *part]) for part in parts]
        whole = forward_backward(_with_residual, [x, up, up_bias, down, down_bias])
        sums = list[bool]()
        wanted = [whole.gradients[0], *each[rank].gradients[1:], whole.gradients[4]]
        all_reduce = partial(_all_reduce, each, rank, down_bias, sums)
        run = partial(_with_residual, layer=partial(_run_rank, answer, all_reduce))
        got = forward_backward(run, [x, *parts[rank], down_bias])
        where = f"With {t} ranks," if t > 1 else f"With {t} rank,"
        often = f"{where} you sum {sums.count(False)} × in forward and {sums.count(True)} × in backward."
        expect(sorted(sums) == [False, True], f"{often} Where is there only a part?")
        expect(same([got.output], [whole.output], 1e-4), f"{where} the output is not the complete MLP's.")
        pairs = zip(("x", "up", "up_bias", "down", "down_bias"), got.gradients, wanted, strict=True)
        off = [name for name, mine, right in pairs if not same([mine], [right], 1e-4)]
        slopes = f"{where} the output is right, but the gradient of {', '.join(off)} is not."
        expect(not off, f"{slopes} What do your two functions return?")


def _mlp(x: Any, up: Any, up_bias: Any, down: Any, down_bias: Any = None) -> torch.Tensor:
    return linear(gelu(linear(x, up, up_bias)), down, down_bias)


def _with_residual(x: torch.Tensor, *given: torch.Tensor, layer: Any = _mlp) -> torch.Tensor:
    """x is used next to the layer, too, so that a sum of all of x's gradient is too much."""
    return x + layer(x, *given)


def _run_rank(answer: Any, all_reduce: Any, *given: Any) -> torch.Tensor:
    return call(answer, *given, all_reduce, returns=torch.Tensor)


def _all_reduce(each: Sequence[Ran], rank: int, bias: torch.Tensor, sums: list[bool], tensor: Any) -> None:
    """Be all other ranks in one sum, of parts of the output or of x's gradient."""
    backward = torch._C._current_graph_task_id() != -1  # as long as autograd runs
    if backward:
        parts = [cast(torch.Tensor, one.gradients[0]) for one in each]
        way = "In backward you sum"
    else:
        parts = [one.output for one in each]
        way = "In forward you sum"
    of_kind(tensor, torch.Tensor, f"{way} what is")
    other_shape = f"{way} {tuple(tensor.shape)}. What has every rank only a part of?"
    expect(tensor.shape == parts[0].shape, other_shape)
    seen = tensor.requires_grad and torch.is_grad_enabled()
    unseen = f"{way} a tensor of autograd's graph in place, and autograd does not see that. Use `Summed`."
    expect(not seen, unseen)
    if not same([tensor], [parts[rank]], 1e-4):
        biased = same([tensor], [parts[rank] + bias], 1e-4)
        expect(not biased, f"{way} the bias, too: t ranks add it t times.")
        complete = (
            "If every rank has the complete gradient, pass it on unchanged: the sum is t times too large."
        )
        off = complete if backward else "Is the part itself off: its bias, its GELU?"
        fail(f"{way} something else than this rank's part of x's gradient, or of the output. {off}")
    sums.append(backward)
    with torch.no_grad():
        tensor.copy_(torch.stack(parts).sum(0))


# --------------------------------------------------------------------------------------------------
# 15.2: ring_attention
# ranks, tokens of each, the rank that is asked
RINGS = ((3, 4, 1), (4, 2, 3), (1, 5, 0), (3, 3, 0))


def _ring(q: Any, rank: int, keys: Any, values: Any, mistake: str = "") -> torch.Tensor:
    """Causal attention of one rank's queries (Liu et al. 2023); on request with a `mistake`."""
    s, d = q.shape
    parts = range(len(keys)) if mistake == "all" else range(rank + 1)
    if mistake == "own":
        parts = range(rank, rank + 1)
    scores = torch.cat([q @ keys[part].T for part in parts], dim=1)
    place = torch.cat([torch.arange(part * s, part * s + s) for part in parts])
    if mistake != "all" and mistake != "unmasked":
        own = rank * s + torch.arange(s)[:, None]
        scores = scores.masked_fill(place > own, float("-inf"))
    weights = (scores if mistake == "unscaled" else scores / d**0.5).softmax(-1)
    if mistake == "mean":
        each = (scores / d**0.5).split(s, dim=1)
        weights = torch.cat([one.softmax(-1) for one in each], dim=1) / len(each)
    return weights @ torch.cat([values[part] for part in parts])


RING_MISTAKES: Mistakes = {
    "You average the parts' outputs. A part counts by its sum of exponentials.": partial(
        _ring, mistake="mean"
    ),
    "Tokens see later ones: of parts after this rank's, and in its own part.": partial(_ring, mistake="all"),
    "In the rank's own part, tokens see later ones.": partial(_ring, mistake="unmasked"),
    "You attend to the rank's own part alone. Earlier parts count, too.": partial(_ring, mistake="own"),
    "Divide the scores by the root of the queries' width.": partial(_ring, mistake="unscaled"),
}


@exercise("15.2", "Exact, one part at a time, and large scores do not overflow.")
def ring_attention(answer: Any) -> None:
    """`answer(q, rank, keys, values)` is causal attention of the rank's queries over all parts."""
    cases, mine = [], []
    for number, (ranks, s, rank) in enumerate(RINGS):
        with seeded(number):
            q, *parts = torch.randn(1 + 2 * ranks, s, 8, dtype=torch.float64).unbind()
        cases.append((q, rank, parts[:ranks], parts[ranks:]))
        got = call(answer, *cases[-1], returns=torch.Tensor, finite=False)
        expect(got.shape == q.shape, f"The output has {tuple(got.shape)}, the queries {tuple(q.shape)}.")
        mine.append(got)
    other = "The output is off. With one rank it is plain causal attention: begin there."
    recognized(mine, cases, _ring, RING_MISTAKES, other, same)
    q, rank, keys, values = cases[0]
    large = call(answer, 1000 * q, rank, keys, values, returns=torch.Tensor, finite=False)
    overflow = "Scores of some thousands overflow: keep logarithms of sums, as `logsumexp` does."
    expect(same([large], [_ring(1000 * q, rank, keys, values)]), overflow)


# --------------------------------------------------------------------------------------------------
# 15.3: within_capacity
# tokens, experts, choices of each token, the factor of a capacity
ROUTES = ((12, 4, 2, 1.0), (9, 3, 1, 1.25), (16, 8, 2, 0.5), (6, 2, 1, 2.0))


def _within(choices: torch.Tensor, experts: int, factor: float, mistake: str = "") -> torch.Tensor:
    """True for each pair that its expert takes, in the tokens' order; on request with a `mistake`."""
    tokens, k = choices.shape
    equal = tokens * (1 if mistake == "tokens" else k) / experts
    most = int(equal if mistake == "factor" else factor * equal)
    flat = choices.T.flatten() if mistake == "first choices" else choices.flatten()
    if mistake == "last":
        flat = flat.flip(0)
    chosen = torch.nn.functional.one_hot(flat, experts)
    place = (chosen.cumsum(0) * chosen).sum(1)  # from 1, within the expert
    taken = place < most if mistake == "one less" else place <= most
    if mistake == "last":
        taken = taken.flip(0)
    return taken.view(k, tokens).T if mistake == "first choices" else taken.view(tokens, k)


ROUTE_MISTAKES: Mistakes = {
    "Your capacity counts tokens. Experts take pairs, and a token makes k of them.": (
        partial(_within, mistake="tokens")
    ),
    "Your capacity has no factor.": partial(_within, mistake="factor"),
    "Your experts take one pair too few.": partial(_within, mistake="one less"),
    "Your experts keep the last pairs and drop the first.": partial(_within, mistake="last"),
    "All first choices come before any second choice in yours. Go token by token.": (
        partial(_within, mistake="first choices")
    ),
}


@exercise("15.3", "No expert takes more than its capacity, so its bytes have an upper end.")
def within_capacity(answer: Any) -> None:
    """`answer(choices, experts, factor)` is a mask of the pairs that are taken, of the shape of choices."""
    cases, mine = [], []
    for tokens, experts, k, factor in ROUTES:
        with seeded(tokens):
            choices = (torch.randn(tokens, experts) + torch.linspace(2, 0, experts)).topk(k).indices
        cases.append((choices, experts, factor))
        got = call(answer, *cases[-1], returns=torch.Tensor, finite=False)
        expect(got.dtype == torch.bool, f"Return a mask, of True and False. Yours has {got.dtype}.")
        expect(
            got.shape == choices.shape, f"The mask has {tuple(got.shape)}, choices {tuple(choices.shape)}."
        )
        mine.append(got)
    other = "The shape is right, but other pairs are taken: count each expert's pairs up to there."
    recognized(mine, cases, _within, ROUTE_MISTAKES, other, lambda one, two: all(map(torch.equal, one, two)))


# --------------------------------------------------------------------------------------------------
# 15.4: choose
Plan = tuple[int, int, int] | None

# parameters and blocks; s·b·h; micro-batches of all; GPUs, per machine; bytes of a card
CLUSTERS = (
    (175e9, 96, 2048 * 12288, 256, 64, 8, 80e9),
    (175e9, 96, 2048 * 12288, 16, 64, 4, 80e9),
    (8e9, 32, 8192 * 4096, 512, 16, 4, 24e9),
    (1e9, 16, 2048 * 2048, 64, 8, 8, 40e9),
    (405e9, 128, 8192 * 16384, 256, 32, 8, 80e9),
    (70e9, 80, 4096 * 8192, 512, 64, 8, 80e9),
)


def _needs(N: float, L: int, sbh: int, m: int, d: int, t: int, p: int, mistake: str = "") -> float:
    """ZeRO-1's states, and checkpoints of as many micro-batches as the first stage keeps."""
    own = N if mistake == "whole" else N / (t * p)
    states = 16 * own if mistake == "no ZeRO" else 4 * own + 12 * own / d
    kept = 1 if mistake == "one kept" else min(p, m / d)
    return states + kept * (L / p) * 2 * sbh


def _choose(
    N: float, L: int, sbh: int, m: int, gpus: int, per_node: int, card: float, mistake: str = ""
) -> Plan:
    """The plan (d, t, p) that costs least of all that fit; on request with a `mistake`."""
    found = []
    for t, p in product(range(1, gpus + 1), range(1, gpus + 1)):
        if gpus % (t * p) or L % p or m % (gpus // (t * p)):
            continue
        if mistake != "over the network" and per_node % t:
            continue
        d = gpus // (t * p)
        if mistake == "no memory" or _needs(N, L, sbh, m, d, t, p, mistake) <= card:
            bubble = 0 if mistake == "no bubble" else (p - 1) / (m / d + p - 1)
            tensor = 0 if mistake == "free messages" else 0.01 * (t - 1)
            found.append((bubble + tensor, (d, t, p)))
    return min(found)[1] if found else None


CHOICES: Mistakes = {
    "Your plan is the cheapest of all, and does not fit. First memory, then cost.": (
        partial(_choose, mistake="no memory")
    ),
    "You count all parameters on each rank. Tensor and pipeline divide them.": (
        partial(_choose, mistake="whole")
    ),
    "You count 16 bytes per parameter. With ZeRO-1, d ranks share 12 of them.": (
        partial(_choose, mistake="no ZeRO")
    ),
    "You count one micro-batch's checkpoints. The first stage of p keeps more.": (
        partial(_choose, mistake="one kept")
    ),
    "Tensor parallelism leaves the machine in your plan.": partial(_choose, mistake="over the network"),
    "Your pipelines have no bubble.": partial(_choose, mistake="no bubble"),
    "Tensor parallelism costs nothing in your plan.": partial(_choose, mistake="free messages"),
}


@exercise("15.4", "First what fits, then what is cheapest.")
def choose(answer: Any) -> None:
    """`answer(N, L, sbh, m, gpus, per_node, card)` is the plan (d, t, p), or None if nothing fits."""
    mine = list[Plan]()
    for case in CLUSTERS:
        got = call(answer, *case, returns=tuple | None)
        if got is not None:
            expect(len(got) == 3, "A plan is (d, t, p).")
            got = tuple(of_kind(count, int, "A plan's number is") for count in got)
            d, t, p = got
            gpus = case[4]
            expect(d * t * p == gpus, f"{d} · {t} · {p} ranks are not {gpus}.")
        mine.append(cast(Plan, got))
    other = "Some plan is another one. Do you try every t that divides the machine, and every p?"
    recognized(mine, CLUSTERS, _choose, CHOICES, other, operator.eq)
