"""Checks of lesson 07: right answers of every style pass, and each planted wrong answer gets its hint."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy
import torch
from checking import Answers, JudgedAnswers

from course_utils.lessons.accumulation import checks as lesson_07
from course_utils.lessons.accumulation import micro_batches as mb
from course_utils.lessons.accumulation.changes import changed
from course_utils.lessons.shared.language_model import batches, language_model


def loop(
    divide: Callable[[int, int, int], float] = lambda group, k, every: group,
    last: bool = True,
    clear: str = "group",
    step: str = "group",
) -> Any:
    """A loop that divides by a number of (group's size, k, all), and clears and steps where it should, or elsewhere."""

    def one_pass(model: Any, optimizer: Any, parts: Sequence[Any], k: int) -> None:
        for first in range(0, len(parts), k):
            group = parts[first : first + k]
            if clear == "group":
                optimizer.zero_grad()
            for part in group:
                if clear == "each" or step == "each":
                    optimizer.zero_grad()
                (mb.mean_loss(model, part) / divide(len(group), k, len(parts))).backward()
                if step == "each":
                    optimizer.step()
            if step == "group" and (last or len(group) == k):
                optimizer.step()
        if step == "pass":
            optimizer.step()
            optimizer.zero_grad()

    return one_pass


def with_a_counter(model: Any, optimizer: Any, parts: Any, k: int, last: bool = True, divided: bool = True) -> None:
    for i, part in enumerate(parts):
        size = min(k, len(parts) - i // k * k) if last else k
        (mb.mean_loss(model, part) / (size if divided else 1)).backward()
        if (i + 1) % k == 0 or (last and i + 1 == len(parts)):
            optimizer.step()
            optimizer.zero_grad()


common_loop = partial(with_a_counter, last=False, divided=False)


def one_backward(model: Any, optimizer: Any, parts: Sequence[Any], k: int) -> None:
    for first in range(0, len(parts), k):
        group = parts[first : first + k]
        optimizer.zero_grad()
        torch.stack([mb.mean_loss(model, part) for part in group]).mean().backward()
        optimizer.step()


ONE_PASS = Answers(
    right=[loop(), with_a_counter],
    wrong=[
        (common_loop, "Both bugs are still in"),
        (loop(divide=lambda group, k, every: 1, last=False), "Both bugs are still in"),
        (loop(divide=lambda group, k, every: 1), "Losses are added up"),
        (loop(divide=lambda group, k, every: k, last=False), "gets no step of its own"),
        (partial(with_a_counter, last=False), "gets no step"),
        (loop(divide=lambda group, k, every: k), "You divide the last group by k, too"),
        (loop(divide=lambda group, k, every: every), "You divide by all of them"),
        (loop(clear="each"), "zero_grad within a group throws away"),
        (loop(divide=lambda group, k, every: 1, clear="each"), "zero_grad within a group throws away"),
        (loop(clear="never"), "The gradients of the group before are still in"),
        (loop(divide=lambda group, k, every: 1, step="each"), "You step on every micro-batch"),
        (loop(divide=lambda group, k, every: k, step="each"), "You step on every micro-batch"),
        (loop(divide=lambda group, k, every: every, clear="pass", step="pass"), "You step once for the whole pass"),
        (loop(divide=lambda group, k, every: k, clear="never", step="never"), "The parameters have not moved"),
        (one_backward, "the memory is not"),
        (loop(divide=lambda group, k, every: group + 1), "end elsewhere"),
    ],
)  # fmt: skip


def test_trial_shows_that_the_common_loop_is_off_and_that_right_loops_are_not() -> None:
    assert lesson_07.trial(common_loop, 8, 4) > 0.5
    assert lesson_07.trial(with_a_counter, 10, 4) < 1e-12


def shares_one_by_one(counts: list[int]) -> list[float]:
    return [1 / (1 + (sum(counts) - n) / n) for n in counts]


FACTORS = Answers(
    right=[
        lambda counts: tuple(n / math.fsum(counts) for n in counts),
        lambda counts: numpy.array(counts) / numpy.sum(counts),
        shares_one_by_one,
    ],
    wrong=[
        (lambda counts: [1 / len(counts) for _ in counts], "That is 1/k for each"),
        (lambda counts: counts[:], "Those are the tokens themselves"),
        (lambda counts: [n / max(counts) for n in counts], "Compared with the longest"),
        (lambda counts: [n / numpy.mean(counts) for n in counts], "by the mean number of tokens"),
        (lambda counts: [1 / n / sum(1 / m for m in counts) for n in counts], "a shorter micro-batch more weight"),
        (lambda counts: [1 for _ in counts], "All weights are 1"),
        (lambda counts: [n / sum(counts) / len(counts) for n in counts], "Divided by k once too often"),
        (lambda counts: [n / 144 for n in counts], "Some weights are off"),
        (lambda counts: [1.0], "One number for each micro-batch"),
    ],
)


def test_the_right_factors_give_the_gradient_of_the_large_batch() -> None:
    model, counts = language_model(), [16, 64, 128]
    parts = [
        (tokens, targets.masked_fill(torch.arange(32) >= count // 4, mb.IGNORED))
        for count, (tokens, targets) in zip(counts, batches(3, 4), strict=True)
    ]
    tokens, targets = map(torch.cat, zip(*parts, strict=True))
    weights = list(model.parameters())
    large = torch.autograd.grad(mb.mean_loss(model, (tokens, targets)), weights)
    losses = [factor * mb.mean_loss(model, part) for factor, part in zip(shares_one_by_one(counts), parts, strict=True)]
    assert all(map(partial(torch.allclose, atol=1e-6), torch.autograd.grad(losses, weights), large))


def by_first_row(found: Any) -> str:
    row = found.rows[0]
    if row.change in ("not attributed", "grew"):
        return "batch" if row.bytes else "nothing"
    if row.now.dtype == "float32":
        return "logits"
    return "validation" if "steps 1" in row.made_in else "graphs"


def reading(**changes: Callable[[Any, Any], bool]) -> Any:
    """Goes through the clues in order, some of them changed; graphs if none holds."""
    clues: dict[str, Callable[[Any, Any], bool]] = {
        "nothing": lambda found, row: found.bytes == 0,
        "batch": lambda found, row: row.was and row.now.shape != row.was.shape,
        "logits": lambda found, row: "float32" in row.now.dtype and row.now.shape[-1] == 2048,
        "validation": lambda found, row: not row.now.made_in.endswith("step 3"),
    }
    return lambda found: next((n for n, clue in (clues | changes).items() if clue(found, found.rows[0])), "graphs")


def never(found: Any, row: Any) -> bool:
    return False


def by_line(found: Any) -> str:
    """Adds up what came by the line of code that made it."""
    came = [row for row in found.rows[:-1] if row.change == "came"]
    if not came:
        return "batch" if found.bytes > 0 else "nothing"
    lines = " ".join(row.now.line for row in came)
    return "logits" if ".float()" in lines else "validation" if "kept.append" in lines else "graphs"


def by_kinds(found: Any) -> str:
    if not found.by_kind:
        return "nothing"
    if "inputs" in found.by_kind:
        return "batch"
    if "gradients" in found.by_kind:
        return "graphs"
    return "logits" if len(found.rows) == 2 else "validation"


CAUSE = Answers(
    right=[reading(), by_line, by_kinds],
    wrong=[
        (by_first_row, "'Change' object has no attribute 'made_in'"),
        (lambda found: "graphs", "The same cause for every change"),
        (lambda found: "batch" if not found.bytes else reading()(found), "where the peaks are equal"),
        (reading(batch=never), "has each one grown"),
        (reading(logits=never), "which dtype does the model compute in"),
        (reading(validation=never), "In which steps was it made"),
        (reading(validation=lambda found, row: row.change == "came"), "validation everywhere"),
        (reading(logits=lambda found, row: row.now.shape[-1] == 2048), "You find logits"),
        (lambda found: found.rows[0].now.kind if found.bytes else "nothing", "not one of batch, graphs"),
        (lambda found: found.rows[-1].change, "'not attributed': not one of"),
        (lambda found: {"batch": "graphs", "graphs": "batch"}.get(by_line(found), by_line(found)), "whose largest row"),
        (lambda found: found.rows[0].now.line, "has no attribute 'line'"),
    ],
)


def test_what_a_change_costs_is_what_it_keeps() -> None:
    """Worked out by hand: k micro-batches of b·s·V logits in fp32, and a validation's graph for each earlier step."""
    assert changed("logits", k=4, sequences=8).bytes == 4 * (2 * 128 * 2048 * 4)
    one_graph = 128 * (64 + 256 + 256) * 2 + 512  # embeddings, what GELU reads and makes, in bf16; and the mean
    assert changed("validation", k=3, sequences=12).bytes == 2 * one_graph
    assert changed("nothing").bytes == 0 < changed("graphs").bytes


def scale(formula: Callable[..., Any]) -> Any:
    return lambda small, big, length_small, length_big: formula(small, big, length_small, length_big)


def signal(b: int, B: int, p: float, q: float) -> float:
    return (B * q - b * p) / (B - b)


def noise(b: int, B: int, p: float, q: float) -> float:
    return b * (p - signal(b, B, p, q))


def by_matrix(b: int, B: int, p: float, q: float) -> Any:
    squared, trace = numpy.linalg.solve([[1, 1 / b], [1, 1 / B]], [p, q])
    return trace / squared


def in_one_line(b: int, B: int, p: float, q: float) -> float:
    return (p - q) * b * B / (B * q - b * p)


NOISE_SCALE = Answers(
    right=[scale(lambda *case: noise(*case) / signal(*case)), scale(by_matrix), scale(in_one_line)],
    wrong=[
        (scale(lambda *case: 1 / in_one_line(*case)), "signal over noise"),
        (scale(lambda b, B, p, q: p / q), "the ratio of the two lengths"),
        (scale(noise), "That is tr(Σ)"),
        (scale(signal), "That is |G|²"),
        (scale(lambda b, B, p, q: noise(b, B, p, q) / q), "It still has a little noise"),
        (scale(lambda b, B, p, q: b * (p - q) / signal(b, B, p, q)), "the big one has some of it, too"),
        (scale(lambda b, B, p, q: in_one_line(b, B, p**2, q**2)), "squared already"),
        (scale(lambda b, B, p, q: in_one_line(b, B, p**0.5, q**0.5)), "You took roots first"),
        (scale(lambda b, B, p, q: in_one_line(B, b, p, q)), "The scale is off"),
    ],
)

Scales = Sequence[tuple[int, float]]


def doubled(
    more: Callable[[int, float], bool] = lambda batch, scale: 2 * batch <= scale,
    often: int = 99,
    shrinks: bool = False,
    lists: str = "changes",
    begin: Callable[[int, Scales], list[tuple[int, int]]] = lambda first, scales: [(0, first)],
) -> Any:
    """A ramp by doubling, right by default; `lists` says when a pair is added."""

    def ramp(first: int, scales: Scales) -> list[tuple[int, int]]:
        planned, batch = begin(first, scales), first
        for seen, scale in scales:
            before = batch
            batch = first if shrinks else batch
            for _ in range(often):
                if not more(batch, scale):
                    break
                batch *= 2
                if lists == "doublings":
                    planned.append((seen, batch))
            if lists == "all" or (lists == "changes" and batch != before):
                planned.append((seen, batch))
        return planned

    return ramp


def by_logarithm(first: int, scales: Scales) -> list[list[int]]:
    ramp = [[0, first]]
    for seen, scale in scales:
        batch = max(ramp[-1][1], first * 2 ** max(0, math.floor(math.log2(scale / first))))
        if batch > ramp[-1][1]:
            ramp.append([seen, batch])
    return ramp


def by_highest(first: int, scales: Scales) -> Any:
    highest = numpy.maximum.accumulate([first, *[scale for _, scale in scales]])
    batches = [first * 2 ** int(numpy.log2(scale / first)) for scale in highest]
    events = [0, *[seen for seen, _ in scales]]
    changes = [(event, now) for event, (before, now) in zip(events[1:], pairwise(batches), strict=True) if now > before]
    return ((0, first), *changes)


def takes_the_scale(first: int, scales: Scales) -> list[tuple[int, int]]:
    planned = [(0, first)]
    for seen, scale in scales:
        if scale > planned[-1][1]:
            planned.append((seen, int(scale)))
    return planned


RAMP = Answers(
    right=[doubled(), by_logarithm, by_highest],
    wrong=[
        (doubled(often=1), "You double once at most"),
        (doubled(lambda batch, scale: 2 * batch < scale), "Where twice the batch is exactly the noise scale"),
        (doubled(shrinks=True), "Your batch shrinks"),
        (takes_the_scale, "You take the scale itself for the batch"),
        (doubled(lambda batch, scale: batch < scale), "You double beyond the noise scale"),
        (doubled(lists="all"), "You list every measurement"),
        (doubled(lists="doublings"), "You add a pair for each doubling"),
        (doubled(begin=lambda first, scales: []), "The beginning is missing"),
        (
            doubled(begin=lambda first, scales: [(scales[0][0] if scales else 0, first)]),
            "begins at the first measurement",
        ),
        (doubled(lambda batch, scale: 2 * batch <= scale and batch < 128), "Some ramp is off"),
        (lambda first, scales: [first], "a list of pairs"),
    ],
)


def warmed(
    sgd: Callable[[float], float] = float,
    adam: Callable[[float], float] = math.sqrt,
    start: float = 1,
    after: Callable[[float, float, float], float] = lambda rate, peak, part: peak,
    part: Callable[[int, int], float] = lambda step, warm: step / warm,
) -> Any:
    """A rule for each optimizer, and a straight line from `start` rates to the peak; right by default."""

    def answer(step: int, warm: int, rate: float, k: int, optimizer: str) -> float:
        peak = rate * {"sgd": sgd, "adam": adam}[optimizer](k)
        done = part(step, warm)
        return after(rate, peak, done) if done >= 1 else start * rate + (peak - start * rate) * done

    return answer


def by_part(step: int, warm: int, rate: float, k: int, optimizer: str) -> float:
    part = min(1.0, step / warm)
    return rate * (1 - part) + part * rate * k ** (1 if optimizer == "sgd" else 0.5)


def by_interpolation(step: int, warm: int, rate: float, k: int, optimizer: str) -> Any:
    return numpy.interp(step, [0, warm], [rate, rate * {"sgd": k, "adam": numpy.sqrt(k)}[optimizer]])


RATE = Answers(
    right=[warmed(), by_part, by_interpolation],
    wrong=[
        (warmed(adam=float), "You scale by k for Adam, too"),
        (warmed(sgd=math.sqrt), "You scale by √k for SGD, too"),
        (warmed(sgd=math.sqrt, adam=float), "The two rules are exchanged"),
        (warmed(start=0), "You start from zero"),
        (warmed(part=lambda step, warm: 1), "There is no warm-up"),
        (warmed(after=lambda rate, peak, part: rate + (peak - rate) * part), "grows on when the warm-up is over"),
        (warmed(after=lambda rate, peak, part: rate), "falls back to the small batch's"),
        (warmed(sgd=lambda k: 1, adam=lambda k: 1), "Your rate never changes"),
        (lambda step, warm, rate, k, optimizer: rate / k, "not a smaller one"),
        (warmed(adam=math.log2), "Some rate is off"),  # log₂ 16 is √16: a k for which the two agree would let it pass
        (warmed(sgd=lambda k: 32), "Some rate is off"),
        (warmed(part=lambda step, warm: step / 500), "Some rate is off"),
    ],
)

ANSWERS = {"07.1": ONE_PASS, "07.2": FACTORS, "07.3": CAUSE, "07.4": NOISE_SCALE, "07.5": RAMP, "07.6": RATE}


class TestAnswers(JudgedAnswers):
    answers = ANSWERS
