"""Checks of lesson 06: right answers of every style pass, and each planted wrong answer gets its hint."""

import math
from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Any

import numpy
import pytest
import torch
from checking import Answers, JudgedAnswers
from lesson_source import names_from_cells
from torch.utils.checkpoint import checkpoint

from course_utils import estimate, gpu
from course_utils.estimating.exact.activations import activation_bytes
from course_utils.interactive.feedback import divisors
from course_utils.lessons.recomputation import checks as lesson_06
from course_utils.lessons.recomputation.checks import SECRET_POLICIES, SECRETS, TEETH, case, kept_by_forward, measured


def costing(
    memory: Callable[[int, int], float] = lambda n, k: n / k + k,
    forwards: Callable[[int, int], float] = lambda n, k: 2 * n,
) -> Any:
    return lambda n, k: {"memory": memory(n, k), "forwards": forwards(n, k)}


COST = Answers(
    right=[costing()],
    wrong=[
        (costing(lambda n, k: n // k), "the checkpoints alone"),
        (costing(lambda n, k: k), "one stretch alone"),
        (costing(lambda n, k: n), "a chain that keeps all"),
        (costing(lambda n, k: n + n // k), "every stretch keep its values"),
        (costing(lambda n, k: n // k - 1 + k), "One checkpoint is missing"),
        (costing(lambda n, k: 2 * math.sqrt(n)), "the best k alone"),
        (costing(lambda n, k: n * k), "memory is off"),
        (costing(forwards=lambda n, k: n), "one forward pass"),
        (costing(forwards=lambda n, k: 3 * n), "count backward too"),
        (costing(forwards=lambda n, k: n + k), "You run one stretch again"),
        (costing(forwards=lambda n, k: n + n // k), "one node of each stretch"),
        (costing(forwards=lambda n, k: n + n * (n + 1) // 2), "keeping nothing costs"),
        (costing(forwards=lambda n, k: n * k), "forwards is off"),
    ],
)


def by_pairs(n: int, c: float) -> int:
    return min((n / k + c * k, k) for k in range(1, n + 1) if n % k == 0)[1]


BEST_INTERVAL = Answers(
    right=[by_pairs],
    wrong=[
        (lambda n, c: by_pairs(n, 1), "You leave c out"),
        (lambda n, c: max(1, round(math.sqrt(n / c))), "does not divide n"),
        (lambda n, c: min(divisors(n)[::-1], key=lambda k: n / k + c * k), "the largest of several"),
        (lambda n, c: min(divisors(n), key=lambda k: c * n / k + k), "on the wrong side"),
        (lambda n, c: min(divisors(n), key=lambda k: abs(k - math.sqrt(n / c))), "You rounded"),
        (lambda n, c: 1, "Some k is not the best"),
    ],
)


def plain(blocks: Any, x: Any, k: int = 0) -> Any:
    for block in blocks:
        x = block(x)
    return x


def grouped(blocks: Any, x: Any, k: int, preserve: bool = True) -> Any:
    for first in range(0, len(blocks), k):
        x = checkpoint(plain, blocks[first : first + k], x, use_reentrant=False, preserve_rng_state=preserve)
    return x


def from_the_end(blocks: Any, x: Any, k: int) -> Any:
    if not blocks:
        return x
    first = (len(blocks) - 1) // k * k
    x = from_the_end(blocks[:first], x, k)
    return checkpoint(torch.nn.Sequential(*blocks[first:]), x, use_reentrant=True)


def by_hand(blocks: Any, x: Any, k: int) -> Any:
    recomputed = names_from_cells("06", "def flash(", "def state(", "class Recomputed")["Recomputed"]
    for first in range(0, len(blocks), k):
        x = recomputed.apply(torch.nn.Sequential(*blocks[first : first + k]), x)
    return x


def late_binding(blocks: Any, x: Any, k: int) -> Any:
    for first in range(0, len(blocks), k):
        group = blocks[first : first + k]
        x = checkpoint(lambda x: plain(group, x), x, use_reentrant=False)  # noqa: B023 (the trap of this exercise)
    return x


def past_the_end(blocks: Any, x: Any, k: int) -> Any:
    """The same trap with a counter, which is past the last group when backward begins."""
    first = 0
    while first < len(blocks):
        x = checkpoint(lambda x: plain(blocks[first : first + k], x), x, use_reentrant=False)  # noqa: B023 (again)
        first += k
    return x


def goes_backward_itself(blocks: Any, x: Any, k: int) -> Any:
    x = grouped(blocks, x, k)
    x.sum().backward()
    return x


def rest_is_plain(blocks: Any, x: Any, k: int) -> Any:
    whole = len(blocks) // k * k
    return plain(blocks[whole:], grouped(blocks[:whole], x, k))


def evenly(blocks: Any, x: Any, k: int) -> Any:
    for group in numpy.array_split(blocks, math.ceil(len(blocks) / k)):
        x = grouped(list(group), x, k)
    return x


def popping(blocks: Any, x: Any, k: int) -> Any:
    while blocks:
        x = grouped([blocks.pop(0) for _ in range(min(k, len(blocks)))], x, k)
    return x


IN_GROUPS = Answers(
    right=[grouped, from_the_end, by_hand],
    wrong=[
        (late_binding, "The output is right and the gradients are not"),
        (past_the_end, "Backward ran something else than forward"),
        (goes_backward_itself, "Backward through your output raised RuntimeError"),
        (plain, "Nothing is run again"),
        (lambda blocks, x, k: grouped(blocks[: len(blocks) // k * k], x, k), "not what the blocks compute"),
        (rest_is_plain, "last, smaller group"),
        (lambda blocks, x, k: grouped(blocks, x, 1), "not one for each group"),
        (lambda blocks, x, k: grouped(blocks, x.detach().requires_grad_(), k), "No gradient reaches x"),
        (lambda blocks, x, k: grouped(blocks, x, k, preserve=False), "draws other masks than the first"),
        (lambda blocks, x, k: grouped([block.eval() for block in blocks], x, k), "in training mode"),
        (evenly, "in other places"),
        (popping, "work on a copy"),
    ],
)


def percent(
    full: Callable[[float, float], float] = lambda blocks, head: 100 * blocks / (3 * (blocks + head)),
    core: Callable[[float, float], float] = lambda core, all: 100 * core / (3 * all),
    layers: int | None = None,
) -> Any:
    """An answer by forward's FLOPs: `full` from those of blocks and head, `core` from those of cores and everything."""

    def answer(s: int, h: int, L: int, V: int) -> dict[str, float]:
        L = layers or L
        blocks, head = L * (24 * h * h + 4 * s * h), 2 * h * V
        return {"full": full(blocks, head), "core": core(L * 4 * s * h, blocks + head)}

    return answer


def percent_by_shares(s: int, h: int, L: int, V: int) -> dict[str, Any]:
    block, core = 12 * h + 2 * s, 2 * s
    return {"core": numpy.float64(100 / 3) / (block / core + V / L / core), "full": 100 / 3 / (1 + V / L / block)}


def percent_step_by_step(s: int, h: int, L: int, V: int) -> dict[str, float]:
    step = 0
    for part in [24 * h**2, 4 * s * h] * L + [2 * h * V]:
        step += part + 2 * part
    more = {"full": step + sum([24 * h**2 + 4 * s * h] * L), "core": step + 4 * s * h * L}
    return {name: (flops - step) / step * 100 for name, flops in more.items()}


ADDED = Answers(
    right=[percent(), percent_by_shares, percent_step_by_step],
    wrong=[
        (percent(full=lambda blocks, head: 100 / 3), "runs the head again"),
        (percent(full=lambda blocks, head: 100 * blocks / (blocks + head)), "divide by forward alone"),
        (percent(full=lambda blocks, head: blocks / (3 * (blocks + head))), "parts of 1"),
        (percent(full=lambda blocks, head: 50 * blocks / (blocks + head)), "twice forward's FLOPs"),
        (percent(full=lambda blocks, head: 100), "full is off"),
        (percent(layers=1), "The model has L blocks"),
        (percent(core=lambda core, all: 100 * core / all), "as in the paper's eq. 8"),
        (percent(core=lambda core, all: core / (3 * all)), "parts of 1"),
        (percent(core=lambda core, all: 50 * core / (3 * all)), "One product is missing"),
        (percent(core=lambda core, all: 100 * core / (2 * all)), "core is off"),
    ],
)


def fitting(run: Any, card: str) -> list[tuple[float, int, str]]:
    runs = [run.replace(recompute=policy) for policy in lesson_06.POLICIES]
    costs = [(lesson_06.added_percent(one), estimate(one).total, one.recompute) for one in runs]
    return [cost for cost in costs if cost[1] <= gpu(card).memory]


def by_sorting(run: Any, card: str) -> str | None:
    return next((policy for _, _, policy in sorted(fitting(run, card))), None)


CHEAPEST = Answers(
    right=[by_sorting],
    wrong=[
        (lambda run, card: min([(peak, name) for _, peak, name in fitting(run, card)], default=(0, None))[1],
         "You always take the lowest peak"),
        (lambda run, card: next((policy for _, _, policy in fitting(run, card)), None), "You take the first that fits"),
        (lambda run, card: "none", "You look at the arithmetic alone"),
        (lambda run, card: "nothing", "not one of POLICIES"),
        (lambda run, card: by_sorting(run, card) or "full", "none of them does there"),
        (lambda run, card: None, "you find nothing, but something fits"),
        (lambda run, card: by_sorting(run, card) and "every-4", "another that fits adds less arithmetic"),
    ],
)  # fmt: skip


def phase(measurement: Any, begin: str = "backward", end: str = "optimizer", step: int = 2) -> list[int]:
    marks = {mark.phase: mark.event for mark in measurement.timeline.marks if mark.step == step}
    changes = measurement.timeline.changes[: marks[end]]
    curve = accumulate(size if kind == "activations" else 0 for size, kind in changes)
    return list(curve)[marks[begin] :]


def climbs(curve: list[int], size: int = 10**7) -> int:
    count, low, high = 0, curve[0], curve[0]
    for value in curve:
        if value > high and value - low > size >= high - low:
            count += 1
        high = max(high, value)
        if value < low or value < (high + low) / 2:
            low = high = value
    return count


def empties_the_marks(measurement: Any) -> int:
    """Right, and careless with what it was given: a check may not trip over that the next time."""
    marks = {}
    while measurement.timeline.marks:
        mark = measurement.timeline.marks.pop(0)
        marks[mark.phase] = mark.event
    return climbs(measurement.timeline.curves()["activations"][marks["backward"] : marks["optimizer"]])


def teeth(change: Callable[[int], Any]) -> Any:
    return lambda measurement: change(climbs(phase(measurement)))


STRETCHES = Answers(
    right=[
        lambda measurement: climbs(phase(measurement)),
        empties_the_marks,
        empties_the_marks,  # a second time
        lambda measurement: float(climbs(phase(measurement))),
    ],
    wrong=[
        (teeth(lambda count: 4), "the same answer whatever"),
        (teeth(lambda count: 12 // count if count else 0), "count blocks in a stretch"),
        (teeth(lambda count: max(count - 1, 0)), "One tooth is missing"),
        (lambda measurement: climbs(phase(measurement, "forward")), "forward's climb is no recomputation"),
        (lambda measurement: climbs(phase(measurement)) + climbs(phase(measurement, step=1)), "the teeth of all steps"),
        (teeth(lambda count: count or 5), "where there is none"),
        (lambda measurement: sum(b > a for a, b in pairwise(phase(measurement))), "More stretches than blocks"),
        (lambda measurement: climbs(phase(measurement), 6 * 10**7), "off somewhere"),
    ],
)


def read(measurement: Any) -> dict[str, Any]:
    policy = {0: "none", 6: "full", 3: "every-2", 2: "every-3"}[climbs(phase(measurement), 10**5)]
    return {"micro_batch": divided(measurement, policy), "recompute": policy}


def divided(measurement: Any, policy: str) -> int:
    return by_size(phase(measurement, "forward", "loss")[-1], policy)


def by_size(kept: int, policy: str) -> int:
    return round(kept / activation_bytes(lesson_06.KNOWN.replace(recompute=policy)))


def by_trying(measurement: Any) -> dict[str, Any]:
    kept, policy = max(phase(measurement, "forward", "loss")), read(measurement)["recompute"]
    run = lesson_06.KNOWN.replace(recompute=policy)
    sizes = {b: abs(activation_bytes(run.replace(micro_batch=b)) - kept) for b in range(1, 40)}
    return {"recompute": policy, "micro_batch": min(sizes, key=sizes.__getitem__)}


def changed(**changes: Callable[[Any, dict[str, Any]], Any]) -> Any:
    """An answer that is right but for `changes`, each a function of the measurement and the right answer."""

    def answer(measurement: Any) -> dict[str, Any]:
        found = read(measurement)
        return found | {name: change(measurement, found) for name, change in changes.items()}

    return answer


def exchanged(measurement: Any, right: dict[str, Any]) -> str:
    return {"every-2": "every-3", "every-3": "every-2"}.get(right["recompute"], right["recompute"])


def only(batch: int, policy: str) -> Any:
    return changed(recompute=lambda m, r: policy if r["micro_batch"] == batch else r["recompute"])


INFER = Answers(
    right=[read, by_trying, changed(micro_batch=lambda m, r: numpy.float64(r["micro_batch"]))],
    wrong=[
        (changed(recompute=lambda m, r: "full"), "the same policy for every curve"),
        (changed(recompute=exchanged), "Turned round"),
        (only(24, "none"), "does the curve ever climb"),
        (only(24, "every-2"), "in what stretches"),
        (changed(recompute=lambda m, r: "sqrt"), "not one of none, full"),
        (changed(micro_batch=lambda m, r: divided(m, "none") or 1), "as if everything were kept"),
        (changed(micro_batch=lambda m, r: r["micro_batch"] + 1), "off by one sequence"),
        (changed(micro_batch=lambda m, r: by_size(max(m.timeline.totals()), r["recompute"])), "from the highest point"),
        (changed(micro_batch=lambda m, r: 3 * r["micro_batch"]), "the micro-batch is off"),
        (changed(micro_batch=lambda m, r: r["micro_batch"] + 0.25), "a whole number of sequences"),
    ],
)


def test_a_case_shows_activations_and_nothing_else() -> None:
    for number in SECRETS:
        hidden = case(number)
        assert {kind for _, kind in hidden.timeline.changes} == {"activations"}
        assert not hidden.allocations and not hidden.moments and not hidden.phase_peaks
        totals = hidden.timeline.totals()
        assert hidden.breakdown.total == max(totals) == totals[hidden.peak_event - 1]
    assert lesson_06.mystery(1) is lesson_06.mystery(1 + len(SECRETS)) is case(1)
    assert lesson_06.mystery(0) is case(len(SECRETS))


def test_neither_a_height_nor_tensors_give_a_policy_away() -> None:
    assert all(measured(policy).allocations == () for policy in TEETH)
    assert {policy for _, policy in SECRETS.values()} == set(SECRET_POLICIES)
    assert kept_by_forward(case(2)) == pytest.approx(kept_by_forward(case(3)), rel=0.05)
    by_peak = [SECRETS[n][1] for n in sorted(SECRETS, key=lambda n: max(case(n).timeline.totals()))]
    assert by_peak != sorted(by_peak)


ANSWERS = {
    "06.1": COST, "06.2": BEST_INTERVAL, "06.3": IN_GROUPS, "06.4": ADDED, "06.5": CHEAPEST, "06.6": STRETCHES,
    "06.7": INFER,
}  # fmt: skip


class TestAnswers(JudgedAnswers):
    answers = ANSWERS
