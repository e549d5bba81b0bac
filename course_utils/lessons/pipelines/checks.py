"""Checks of the exercises of lesson 11, "Model and pipeline parallelism": each names the misconception."""

import math
import operator
from collections.abc import Callable, Mapping
from functools import partial
from itertools import accumulate, combinations, pairwise
from typing import Any

from course_utils.interactive.feedback import (
    Mistakes,
    by_name,
    call,
    entries,
    exercise,
    expect,
    fail,
    of_kind,
    recognized,
)
from course_utils.run import TrainingRun

from .memory import blocks_of, stage_memory
from .schedules import bubble, micro_batches_for, most_kept, simulate

# -------------------------------------------------------------------------------------------------------- 11.1: enough

ENOUGH_CASES = ((4, 0.1), (8, 0.2), (2, 0.25), (4, 0.5), (16, 0.3), (1, 0.1), (3, 0.9))


def _first(good: Callable[[int, int, float], bool]) -> Callable[[int, float], int]:
    return lambda p, idle: next(m for m in range(1, 10_000) if good(p, m, idle))


ENOUGH_MISTAKES: Mistakes = {
    "You go one further. At most `idle` was asked for.": _first(lambda p, m, idle: bubble(p, m) < idle - 1e-12),
    "Those are all columns, m + p − 1, of which m do the work. (Or do you divide by m alone?)":
        _first(lambda p, m, idle: (p - 1) / m <= idle + 1e-12),
    "p stages wait for p − 1 others: you count one too many.": _first(lambda p, m, idle: p / (m + p) <= idle + 1e-12),
    "One too few: the bubble is still larger than `idle`.": lambda p, idle: max(1, micro_batches_for(p, idle) - 1),
    "4·p is GPipe's rule of thumb. Which m does this `idle` need?": lambda p, idle: 4 * p,
    "Micro-batches come whole, and at least one: round up.": lambda p, idle: (p - 1) * (1 / idle - 1),
    "At least one micro-batch is needed, whatever the formula says.":
        lambda p, idle: math.ceil(round((p - 1) * (1 / idle - 1), 9)),
}  # fmt: skip


@exercise("11.1", "The bubble turned round: as many micro-batches as it takes.")
def enough(answer: Any) -> None:
    """`answer(p, idle)` is the smallest m with (p − 1)/(m + p − 1) ≤ idle."""
    got = [call(answer, p=p, idle=idle) for p, idle in ENOUGH_CASES]
    otherwise = "Some m is off: is its bubble at most `idle`, and that of m − 1 larger?"
    recognized(got, ENOUGH_CASES, micro_batches_for, ENOUGH_MISTAKES, otherwise)


# ---------------------------------------------------------------------------------------------------------- 11.2: kept

KEPT_CASES = ((4, 8, 0), (4, 8, 1), (4, 8, 3), (8, 3, 0), (8, 3, 6), (1, 5, 0), (6, 6, 2))

GPIPE_MISTAKES: Mistakes = {
    "GPipe takes none backward before all are forward, however many stages there are.": lambda p, m, stage: min(m, p),
    "That is 1F1B. GPipe takes none backward before all are forward.": lambda p, m, stage: min(m, p - stage),
    "One is missing: the last one's forward is done before the first one's backward.": lambda p, m, stage: m - 1,
    "That is all stages together. One stage was asked for.": lambda p, m, stage: m * p,
}
ONE_F_MISTAKES: Mistakes = {
    "No stage keeps more micro-batches than there are: m may be small.": lambda p, m, stage: p - stage,
    "That is the first stage. Those after it wait less for their first backward.": lambda p, m, stage: min(m, p),
    "Turned round: the first stage keeps the most, the last one a single one.": lambda p, m, stage: min(m, stage + 1),
    "One too few: the one that the stage works on is kept, too.": lambda p, m, stage: min(m, p - stage - 1),
    "One too many. The last stage goes backward at once.": lambda p, m, stage: min(m, p - stage + 1),
    "That is GPipe. 1F1B goes backward as soon as it can.": lambda p, m, stage: m,
}  # fmt: skip


@exercise("11.2", "GPipe keeps all; 1F1B as many as stages from here to the end.")
def kept(answer: Any) -> None:
    """`answer(p, m, stage)` is a dictionary: GPipe and 1F1B, micro-batches kept at most."""
    returned = [call(answer, p=p, m=m, stage=stage, returns=Mapping) for p, m, stage in KEPT_CASES]
    got = [entries(both, ("GPipe", "1F1B")) for both in returned]
    for name, mistakes in (("GPipe", GPIPE_MISTAKES), ("1F1B", ONE_F_MISTAKES)):
        otherwise = f"{name} is off somewhere. Draw it, pipeline_figure(simulate({name!r}, 4, 8)), and count in a row."
        recognized([both[name] for both in got], KEPT_CASES, partial(most_kept, name), mistakes, otherwise)


# --------------------------------------------------------------------------------------------------------- 11.3: order

ORDER_CASES = ((4, 6, 0), (4, 6, 1), (4, 6, 3), (4, 2, 0), (1, 3, 0), (3, 8, 1))


@exercise("11.3", "The same order in which PyTorch's stages work.")
def order(answer: Any) -> None:
    """`answer(p, m, stage)` is the list of a stage's works under 1F1B."""
    for p, m, stage in ORDER_CASES:
        got = list(call(answer, p=p, m=m, stage=stage, returns=(list, tuple)))
        right, where = simulate("1F1B", p, m).order(stage), f"Stage {stage} of {p}, {m} micro-batches"
        expect(all(isinstance(work, str) for work in got), "Return a list of words such as F0 and B0.")
        expect(len(got) == len(set(got)), f"{where}: a work occurs twice.")
        expect(set(got) == set(right), f"{where}: works are missing, or do not exist. Micro-batches are 0 to m − 1.")
        if got != right:
            _judge_order(got, right, m, stage)


def _judge_order(got: list[str], right: list[str], m: int, stage: int) -> None:
    """Raise CheckFailed about a list that has the right words in another order."""
    ahead, mine = (next(place for place, work in enumerate(works) if work[0] == "B") for works in (right, got))
    early = [work for work in got if work[0] == "B" and got.index(work) < got.index(f"F{work[1:]}")]
    backwards, in_order = ([work for work in works if work[0] == "B"] for works in (got, right))
    turned_round = mine == min(m, stage + 1) != ahead
    expect(not early, "A backward stands before its own forward.")
    expect(not mine == m != ahead, "All forwards come first: that is GPipe. How many may this stage keep?")
    expect(not turned_round, "Turned round: the *first* stage goes forward most often at first.")
    expect(mine >= ahead, "Too few forwards at first: the stages after this one would wait for work.")
    expect(mine <= ahead, "Too many forwards at first: the stage keeps more micro-batches than 1F1B needs.")
    expect(backwards == in_order, "Backwards come in the order of the micro-batches, as forwards do.")
    fail("The start is right. Then one backward and one forward alternate, until no forward is left.")


# ----------------------------------------------------------------------------------------------------------- 11.4: cut

CUT_CASES: tuple[tuple[list[float], int], ...] = (
    ([1, 1, 1, 1, 1, 1, 1, 1], 4), ([1, 1, 1, 1, 1, 1, 4], 3), ([5, 1, 1, 1, 1, 1, 1, 2], 3),
    ([2, 3, 1, 4, 2, 2, 1, 3, 5, 1], 4), ([4, 1, 3], 3), ([3, 1, 2], 1), ([9, 1, 1, 1, 9, 1, 1, 1], 4),
    ([1, 6, 3, 1, 2], 3),  # where the slowest stage is quickest, the stages are not as equal as they can be
)  # fmt: skip


def slowest(times: list[float], counts: list[int]) -> float:
    return max(sum(times[a:b]) for a, b in pairwise(accumulate(counts, initial=0)))


def best_cut(times: list[float], p: int) -> list[int]:
    """The cut whose slowest stage is quickest, by trying all."""
    ways = ((0, *cuts, len(times)) for cuts in combinations(range(1, len(times)), p - 1))
    return min(([b - a for a, b in pairwise(edges)] for edges in ways), key=lambda counts: slowest(times, counts))


def greedy_cut(times: list[float], p: int) -> list[int]:
    """Fill each stage up to the mean; the last one gets the rest."""
    mean, counts, start = sum(times) / p, [], 0
    for stage in range(p - 1):
        end = start + 1
        while sum(times[start:end]) < mean and len(times) - end > p - stage - 1:
            end += 1
        counts.append(end - start)
        start = end
    return [*counts, len(times) - start]


CUT_MISTAKES: Mistakes = {
    "You cut into equal numbers of layers. They do not take equally long.":
        lambda times, p: [len(blocks_of(len(times), p, stage)) for stage in range(p)],
    "You fill one stage after the other up to the mean. What is left for the last one may be too much: compare whole "
    "cuts.": greedy_cut,
}  # fmt: skip


@exercise("11.4", "The slowest stage is as quick as it can be.")
def cut(answer: Any) -> None:
    """`answer(times, p)` is a list of p numbers of layers."""
    got = [_counts(answer, times, p) for times, p in CUT_CASES]
    slow = [slowest(times, counts) for counts, (times, _) in zip(got, CUT_CASES, strict=True)]
    best = [slowest(times, best_cut(times, p)) for times, p in CUT_CASES]
    off = [place for place, (mine, least) in enumerate(zip(slow, best, strict=True)) if mine > least + 1e-9]
    if not off:
        return
    recognized(got, CUT_CASES, best_cut, CUT_MISTAKES, same=operator.eq)
    times, p = CUT_CASES[off[0]]
    fail(f"For {times} and p = {p} your slowest stage takes {slow[off[0]]:g}; another cut is quicker.")


def _counts(answer: Any, times: list[float], p: int) -> list[int]:
    given = call(answer, times=list(times), p=p, returns=(list, tuple))
    got = [of_kind(n, int, "One of your numbers of layers is") for n in given]
    total = sum(got)
    expect(len(got) == p, f"You return {len(got)} numbers for {p} stages: one for each, how many layers it gets.")
    expect(total == len(times), f"Your numbers add up to {total} of {len(times)} layers. Are they places, not numbers?")
    expect(min(got) >= 1, "A stage gets no layer at all.")
    return got


# ------------------------------------------------------------------------------------------------- 11.5: fewest_stages

STAGES = (1, 2, 4, 8, 16)
XL = TrainingRun("gpt2-xl", 2, 1024, "bf16-master")
SMALL = TrainingRun("gpt2", 8, 1024, "bf16-master")
FULL = max(stage_memory(XL, "1F1B", 4, 16, stage).total for stage in range(4))
FEWEST_CASES = (
    (XL, 32, 80 * 10**9), (XL, 32, 17 * 10**9), (XL, 32, 17_400_000_000), (XL, 32, 10**9), (SMALL, 64, 8_400_000_000),
    (SMALL, 8, 3_000_000_000), (XL.replace(micro_batch=4), 32, 14_000_000_000), (XL, 32, FULL),
)  # fmt: skip


def _fewest(
    fits: Callable[[list[int], int], bool], schedule: str = "1F1B", stages: tuple[int, ...] = STAGES, each: int = 0
) -> Callable[[TrainingRun, int, int], int | None]:
    """A function that returns the first of `stages` that fits; `each` sequences in a micro-batch, or the run's."""

    def answer(run: TrainingRun, sequences: int, room: int) -> int | None:
        m = sequences // (each or run.micro_batch)
        cuts = [p for p in stages if p <= run.model.layers]
        sizes = ((p, [stage_memory(run, schedule, p, m, stage).total for stage in range(p)]) for p in cuts)
        return next((p for p, of_stages in sizes if fits(of_stages, room)), None)

    return answer


def _fullest_fits(sizes: list[int], room: int) -> bool:
    return max(sizes) <= room


fewest_right = _fewest(_fullest_fits)

FEWEST_MISTAKES: Mistakes = {
    "You look at the first stage alone. The last has the loss.": _fewest(lambda sizes, room: sizes[0] <= room),
    "You count as if each stage kept what the last one keeps.": _fewest(lambda sizes, room: sizes[-1] <= room),
    "You add up all stages. Each has a card of its own.": _fewest(lambda sizes, room: sum(sizes) <= room),
    "You take the mean of the stages. One decides.": _fewest(lambda sizes, room: sum(sizes) <= room * len(sizes)),
    "That is GPipe, which keeps all micro-batches. 1F1B was asked for.": _fewest(_fullest_fits, "GPipe"),
    "You take the largest number that fits. Fewer stages wait less.": _fewest(_fullest_fits, stages=STAGES[::-1]),
    "You count sequences. How many micro-batches are they?": _fewest(_fullest_fits, each=1),
}  # fmt: skip


@exercise("11.5", "As few stages as the card allows: no deeper than needed.")
def fewest_stages(answer: Any) -> None:
    """`answer(run, sequences, room)` is the smallest number of stages that fits, or None."""
    names = ("run", "sequences", "room")
    got = [call(answer, **by_name(names, case), returns=int | None) for case in FEWEST_CASES]
    unknown = [p for p in got if p not in (None, *STAGES)]
    expect(not unknown, f"{', '.join(map(str, unknown))}: not one of 1, 2, 4, 8, 16.")
    if recognized(got, FEWEST_CASES, fewest_right, FEWEST_MISTAKES, same=operator.eq):
        return
    lost = any(mine is None and fewest_right(*case) for mine, case in zip(got, FEWEST_CASES, strict=True))
    expect(not lost, "You find nothing where some number of stages fits: does every case reach its `return`?")
    fail("Somewhere another number is right: every stage has to fit, and the first of 1, 2, 4, 8, 16 counts.")
