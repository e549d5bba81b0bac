"""Checks of lesson 11: right answers of every style pass, and each planted wrong answer gets its hint."""

import math
from collections.abc import Callable
from functools import cache
from itertools import accumulate, combinations, pairwise
from typing import Any

import numpy as np
from checking import Answers, JudgedAnswers

from course_utils.lessons.pipelines.memory import stage_memory
from course_utils.lessons.pipelines.schedules import simulate


def solved(p: int, idle: float) -> int:
    return max(1, math.ceil(round((p - 1) * (1 / idle - 1), 9)))


def trying(good: Callable[[int, int, float], bool]) -> Any:
    """The first m that is good."""
    return lambda p, idle: next(m for m in range(1, 999) if good(p, m, idle))


def by_halving(p: int, idle: float) -> int:
    low, high = 1, 10**6
    while low < high:
        m = (low + high) // 2
        low, high = (low, m) if p - 1 <= idle * (m + p - 1) + 1e-12 else (m + 1, high)
    return low


ENOUGH = Answers(
    right=[by_halving, trying(lambda p, m, idle: (p - 1) / (m + p - 1) <= idle + 1e-12),
           lambda p, idle: np.float64(solved(p, idle))],
    wrong=[
        (trying(lambda p, m, idle: (p - 1) / (m + p - 1) < idle - 1e-12), "At most `idle` was asked for"),
        (trying(lambda p, m, idle: (p - 1) / m <= idle + 1e-12), "do you divide by m alone"),
        (trying(lambda p, m, idle: p / (m + p) <= idle + 1e-12), "one too many"),
        (lambda p, idle: max(1, math.floor((p - 1) * (1 / idle - 1) - 1e-9)), "One too few"),
        (lambda p, idle: solved(p, idle) + p - 1, "all columns, m + p − 1"),
        (lambda p, idle: 4 * p, "rule of thumb"),
        (lambda p, idle: (p - 1) * (1 / idle - 1), "round up"),
        (lambda p, idle: math.ceil(round((p - 1) * (1 / idle - 1), 9)), "At least one micro-batch"),
        (lambda p, idle: 1, "Some m is off"),
    ],
)  # fmt: skip


def keeping(one_f: Callable[[int, int, int], Any], gpipe: Callable[[int, int, int], Any] = lambda p, m, s: m) -> Any:
    return lambda p, m, stage: {"GPipe": gpipe(p, m, stage), "1F1B": one_f(p, m, stage)}


def right_kept(p: int, m: int, stage: int) -> int:
    return min(m, p - stage)


def simulated_kept(p: int, m: int, stage: int) -> dict[str, int]:
    return {name: simulate(name, p, m).most_kept(stage) for name in ("1F1B", "GPipe")}


KEPT = Answers(
    right=[keeping(right_kept), simulated_kept, keeping(lambda p, m, s: float(len(range(s, p)[:m])))],
    wrong=[
        (keeping(right_kept, lambda p, m, s: min(m, p)), "however many stages there are"),
        (keeping(right_kept, right_kept), "That is 1F1B"),
        (keeping(right_kept, lambda p, m, s: m - 1), "One is missing"),
        (keeping(right_kept, lambda p, m, s: m * p), "all stages together"),
        (keeping(right_kept, lambda p, m, s: 8), "GPipe is off somewhere"),
        (keeping(lambda p, m, s: p - s), "m may be small"),
        (keeping(lambda p, m, s: min(m, p)), "That is the first stage"),
        (keeping(lambda p, m, s: min(m, s + 1)), "Turned round"),
        (keeping(lambda p, m, s: min(m, p - s - 1)), "One too few"),
        (keeping(lambda p, m, s: min(m, p - s + 1)), "One too many"),
        (keeping(lambda p, m, s: m), "That is GPipe"),
        (keeping(lambda p, m, s: 7), "1F1B is off somewhere"),
    ],
)


def with_ahead(ahead: Callable[[int, int, int], int]) -> Any:
    """1F1B with another number of forwards at first."""

    def answer(p: int, m: int, stage: int) -> list[str]:
        first = max(1, ahead(p, m, stage))
        works = [f"F{micro}" for micro in range(first)]
        for micro in range(m):
            works += [f"B{micro}", *([f"F{micro + first}"] if micro + first < m else [])]
        return works

    return answer


def by_counting(p: int, m: int, stage: int) -> list[str]:
    """Forward while fewer are kept than may be, else backward."""
    works, forward, backward = [], 0, 0
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
    ahead, forwards, backwards = min(m, p - stage), [f"F{n}" for n in range(m)], [f"B{n}" for n in range(m)]
    return [*forwards[:ahead], "B0", *forwards[ahead:], *backwards[1:]]


def last_in_first_out(p: int, m: int, stage: int) -> list[str]:
    """Backwards of the micro-batches that are kept at the end come in the order of a stack."""
    works, tail = by_counting(p, m, stage), min(m, p - stage)
    return [*works[:-tail], *works[-tail:][::-1]]


ORDER = Answers(
    right=[with_ahead(right_kept), by_counting, lambda p, m, stage: tuple(simulate("1F1B", p, m).order(stage))],
    wrong=[
        (with_ahead(lambda p, m, s: m), "that is GPipe"),
        (with_ahead(lambda p, m, s: min(m, s + 1)), "Turned round"),
        (with_ahead(lambda p, m, s: min(m, p - s - 1)), "Too few forwards"),
        (with_ahead(lambda p, m, s: min(m, p - s + 1)), "Too many forwards"),
        (with_ahead(lambda p, m, s: p - s), "or do not exist"),
        (forwards_first, "alternate"),
        (last_in_first_out, "in the order of the micro-batches"),
        (lambda p, m, stage: 2 * by_counting(p, m, stage), "a work occurs twice"),
        (lambda p, m, stage: by_counting(p, m, stage)[:-1], "works are missing"),
        (lambda p, m, stage: by_counting(p, m, stage)[::-1], "before its own forward"),
        (lambda p, m, stage: [work[0] + str(int(work[1:]) + 1) for work in by_counting(p, m, stage)], "are missing"),
        (lambda p, m, stage: [(work[0], int(work[1:])) for work in by_counting(p, m, stage)], "list of words"),
    ],
)


def stretches(times: list[float], counts: Any) -> list[float]:
    edges = [0, *accumulate(counts)]
    return [sum(times[a:b]) for a, b in pairwise(edges)]


def by_combinations(times: list[float], p: int, best: Any = max) -> list[int]:
    ways = [(0, *cuts, len(times)) for cuts in combinations(range(1, len(times)), p - 1)]
    counts = [[b - a for a, b in pairwise(edges)] for edges in ways]
    return min(counts, key=lambda one: best(stretches(times, one)))


def by_recursion(times: list[float], p: int) -> list[float]:
    def best(start: int, stages: int) -> tuple[float, list[float]]:
        if stages == 1:
            return sum(times[start:]), [(len(times) - start) / 1]
        rests = [(end, *best(end, stages - 1)) for end in range(start + 1, len(times) - stages + 2)]
        return min((max(sum(times[start:end]), slowest), [(end - start) / 1, *rest]) for end, slowest, rest in rests)

    return best(0, p)[1]


def in_equal_numbers(times: list[float], p: int) -> list[int]:
    return [len(part) for part in np.array_split(times, p)]


def up_to_the_mean(times: list[float], p: int) -> list[int]:
    mean, counts, total, layers = sum(times) / p, [], 0.0, 0
    for place, seconds in enumerate(times):
        total, layers = total + seconds, layers + 1
        stages_left = p - len(counts) - 1
        if stages_left and (total >= mean or len(times) - place - 1 == stages_left):
            counts.append(layers)
            total, layers = 0.0, 0
    return [*counts, layers]


CUT = Answers(
    right=[by_combinations, by_recursion, lambda times, p: np.array(by_combinations(times, p))],
    wrong=[
        (in_equal_numbers, "equal numbers of layers"),
        (up_to_the_mean, "up to the mean"),
        (lambda times, p: [1] * (p - 1) + [len(times) - p + 1], "another cut is quicker"),
        (lambda times, p: by_combinations(times, p, best=lambda sums: max(sums) - min(sums)), "another cut is quicker"),
        (lambda times, p: [len(times)], "one for each"),
        (lambda times, p: [len(times) // p] * p, "Your numbers add up to"),
        (lambda times, p: [0] * (p - 1) + [len(times)], "no layer at all"),
        (lambda times, p: list(accumulate(by_combinations(times, p))), "places, not numbers"),
    ],
)

STAGES = (1, 2, 4, 8, 16)


@cache
def sizes(run: Any, m: int, p: int, schedule: str = "1F1B") -> list[int]:
    return [stage_memory(run, schedule, p, m, stage).total for stage in range(p)] if p <= run.model.layers else [10**99]


def fewest(
    fits: Callable[[list[int], int], bool] = lambda sizes, room: max(sizes) <= room,
    micro: Callable[[Any, int], int] = lambda run, sequences: sequences // run.micro_batch,
    stages: Any = STAGES,
    schedule: str = "1F1B",
) -> Any:
    """The first of `stages` that fits, with one thing done in another way."""
    return lambda run, sequences, room: next(
        (p for p in stages if fits(sizes(run, micro(run, sequences), p, schedule), room)), None
    )


def backwards_search(run: Any, sequences: int, room: int) -> int | None:
    """From many stages to few, as long as they fit."""
    found = None
    for p in (p for p in (16, 8, 4, 2, 1) if p <= run.model.layers):
        m = sequences // run.micro_batch
        if max(stage_memory(run, "1F1B", p, m, stage).total for stage in range(p)) <= room:
            found = p
    return found


def doubling(run: Any, sequences: int, room: int) -> float | None:
    p = 1.0
    while any(size > room for size in sizes(run, sequences // run.micro_batch, int(p))):
        p *= 2
        if p > 16:
            return None
    return p


FEWEST_STAGES = Answers(
    right=[fewest(), backwards_search, doubling],
    wrong=[
        (fewest(lambda sizes, room: sizes[0] <= room), "the first stage alone"),
        (fewest(lambda sizes, room: sizes[-1] <= room), "what the last one keeps"),
        (fewest(lambda sizes, room: sum(sizes) <= room), "add up all stages"),
        (fewest(lambda sizes, room: sum(sizes) / len(sizes) <= room), "the mean of the stages"),
        (fewest(schedule="GPipe"), "That is GPipe"),
        (fewest(stages=STAGES[::-1]), "the largest number that fits"),
        (fewest(micro=lambda run, sequences: sequences), "You count sequences"),
        (fewest(lambda sizes, room: max(sizes) * 1.05 <= room), "another number is right"),
        (fewest(stages=(1, 2, 4, 8)), "You find nothing where"),
        (fewest(stages=range(1, 17)), "not one of 1, 2, 4, 8, 16"),
    ],
)

ANSWERS = {"11.1": ENOUGH, "11.2": KEPT, "11.3": ORDER, "11.4": CUT, "11.5": FEWEST_STAGES}


class TestAnswers(JudgedAnswers):
    answers = ANSWERS
