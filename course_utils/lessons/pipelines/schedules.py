"""Simulate m micro-batches sent through a model cut into p stages: who works, who waits, who keeps what.

Each rank does its works in an order, each as soon as what it needs has arrived: naive (the whole batch at
once), GPipe (Huang et al. 2019: all forwards, then all backwards), 1F1B (Narayanan et al. 2021, section 2.2:
one forward, one backward, and a flush at the end), and PipeDream (Narayanan et al. 2019: without a flush,
weights updated after every backward). `follow` takes any other order, also one in which ranks have several
stages. A unit of time is one forward of one micro-batch in a rank's layers; sending takes none.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from ...errors import check_known

FORWARD, BACKWARD = "F", "B"
INPUT_HALF, WEIGHT_HALF = "I", "W"  # a backward cut in two: the input's gradient, and the weights'
SCHEDULES = ("naive", "GPipe", "1F1B", "PipeDream")
MOST_STAGES, MOST_MICRO_BATCHES = 64, 512


@dataclass(frozen=True)
class Work:
    """A forward ("F") or backward ("B", or its halves "I" and "W") of a micro-batch (−1: all at once).

    `rank` does it on its `stage`; all count from 0. `version` counts the updates that its forward sees,
    `late` those between that forward and this backward.
    """

    kind: str
    rank: int
    stage: int
    micro: int
    start: float
    end: float
    version: int = 0
    late: int = 0


@dataclass(frozen=True)
class Pipeline:
    """The result of `simulate` or `follow`: `works` in the order in which they began.

    Each of its `stages` is a rank's row; where a rank has several `chunks` of the layers, they share the row.
    """

    schedule: str
    stages: int
    micro_batches: int
    works: Sequence[Work]
    chunks: int = 1

    @cached_property
    def span(self) -> float:
        """Units from the first work's start to the last one's end."""
        return max(work.end for work in self.works)

    @property
    def idle(self) -> float:
        """The bubble: the part of all stages' time in which they wait."""
        return 1 - sum(work.end - work.start for work in self.works) / (self.stages * self.span)

    def of_stage(self, stage: int) -> list[Work]:
        """The works of one stage (or rank, where one has several), in order."""
        return [work for work in self.works if work.rank == stage]

    @property
    def messages(self) -> int:
        """Messages of one micro-batch, forward and back: none where the next stage is on the same rank."""
        rank_of = {work.stage: work.rank for work in self.works}
        return 2 * sum(rank_of[stage] != rank_of[stage - 1] for stage in range(1, len(rank_of)))

    def order(self, stage: int) -> list[str]:
        """The works of one stage as text: F0, F1, B0, …"""
        return [f"{work.kind}{work.micro}" for work in self.of_stage(stage)]

    def kept(self, stage: int) -> list[tuple[float, float]]:
        """(time, micro-batches whose activations are kept from then on): one more as a forward begins.

        A chunk of a rank's layers keeps its part of a micro-batch, until the weights' gradient is there.
        """
        size = self.micro_batches if self.schedule == "naive" else 1
        changes: list[tuple[float, int]] = []
        for work in self.of_stage(stage):
            if work.kind == FORWARD:
                changes.append((work.start, size))
            elif work.kind != INPUT_HALF:
                changes.append((work.end, -size))
        # In order of time, at one moment frees first: what is freed is free for what begins then.
        times, steps = zip(*sorted(changes), strict=True)
        counts = [count / self.chunks for count in accumulate(steps, initial=0)]
        return list(zip((0.0, *times), counts, strict=True))

    def most_kept(self, stage: int) -> float:
        """Micro-batches whose activations the stage keeps at its fullest moment."""
        return max(count for _, count in self.kept(stage))

    def versions(self, stage: int) -> int:
        """Copies of its weights that the stage keeps at most: one per version that a backward still needs."""
        works = self.of_stage(stage)
        forwards = [work for work in works if work.kind == FORWARD]
        ends = {work.micro: work.end for work in works if work.kind == BACKWARD}
        most = 0
        for now in (work.start for work in works):
            in_flight = [work for work in forwards if work.start <= now < ends[work.micro]]
            most = max(most, len({work.version for work in in_flight}))
        return most

    def late(self, stage: int) -> int:
        """Updates between a micro-batch's forward and its own update, at most: its gradient's staleness."""
        return max(work.late for work in self.of_stage(stage))


def simulate(
    schedule: str,
    stages: int,
    micro_batches: int,
    *,
    backward: float = 2.0,
    slow: Mapping[int, float] | None = None,
) -> Pipeline:
    """One batch of m micro-batches through p stages; PipeDream's run without an end, cut after m.

    A backward takes `backward` units; `slow` says how many times as long a stage takes for its work (1 unless
    named). Raises ValueError for an unknown schedule, and for sizes below 1 or too large to draw.
    """
    check_known("schedule", schedule, SCHEDULES)
    sizes = (("stages", stages, MOST_STAGES), ("micro_batches", micro_batches, MOST_MICRO_BATCHES))
    for name, value, most in sizes:
        if value not in range(1, most + 1):
            raise ValueError(f"{name} is {value!r}: a whole number from 1 to {most}")
    size = micro_batches if schedule == "naive" else 1
    forwards = [size * (slow or {}).get(stage, 1.0) for stage in range(stages)]
    orders = [
        [(kind, stage, micro) for kind, micro in order(schedule, stages, micro_batches, stage)]
        for stage in range(stages)
    ]
    works = _run(orders, [_units(each, backward) for each in forwards], schedule == "PipeDream")
    return Pipeline(schedule, stages, micro_batches, works)


def follow(schedule: str, orders: Sequence[Sequence[str]], backward: float = 2.0) -> Pipeline:
    """The pipeline whose ranks do their works in these orders, written as torch does: "4F0", "4I0", "4W0".

    That is the stage, F, B, I or W, and the micro-batch. All ranks have equally many stages of equal length.
    Raises ValueError for another text, and for orders in which every rank waits for another.
    """
    works = [[_parsed(text) for text in each] for each in orders]
    stages = 1 + max(stage for each in works for _, stage, _ in each)
    micro_batches = 1 + max(micro for each in works for _, _, micro in each)
    chunks, more = divmod(stages, len(orders))
    if more:
        raise ValueError(f"{stages} stages on {len(orders)} ranks: each must have equally many")
    units = [_units(1 / chunks, backward)] * len(orders)
    return Pipeline(schedule, len(orders), micro_batches, _run(works, units, updates=False), chunks)


def _parsed(text: str) -> tuple[str, int, int]:
    found = re.fullmatch(r"(\d+)([FBIW])(\d+)", text)
    if not found:
        raise ValueError(f"{text!r} is not a work: write stage, F, B, I or W, and micro-batch, as in '0F3'")
    return found[2], int(found[1]), int(found[3])


def _units(forward: float, backward: float) -> dict[str, float]:
    half = backward * forward / 2
    return {FORWARD: forward, BACKWARD: 2 * half, INPUT_HALF: half, WEIGHT_HALF: half}


def order(schedule: str, stages: int, micro_batches: int, stage: int) -> list[tuple[str, int]]:
    """The works of one stage, in order: (F or B, micro-batch)."""
    every = [-1] if schedule == "naive" else range(micro_batches)
    ahead = most_kept(schedule, stages, micro_batches, stage)
    works = [(FORWARD, micro) for micro in every[:ahead]]
    # Each backward frees the room for one more forward.
    for place, micro in enumerate(every):
        works.append((BACKWARD, micro))
        if place + ahead < len(every):
            works.append((FORWARD, every[place + ahead]))
    return works


def bubble(stages: int, micro_batches: int) -> float:
    """The part of the time that a stage waits in GPipe and 1F1B: (p−1)/(m+p−1) (Huang et al. 2019, 2.3)."""
    return (stages - 1) / (micro_batches + stages - 1)


def most_kept(schedule: str, stages: int, micro_batches: int, stage: int) -> int:
    """Micro-batches whose activations a stage keeps at most: all m, or one per stage from it to the end."""
    if schedule in ("naive", "GPipe"):
        return micro_batches
    return min(micro_batches, stages - stage)


def _run(
    orders: list[list[tuple[str, int, int]]], units: list[dict[str, float]], updates: bool
) -> list[Work]:
    """Let every rank do its works as early as its order and the others' results allow."""
    last = max(stage for works in orders for _, stage, _ in works)
    done: dict[tuple[str, int, int], Work] = {}
    free = [0.0] * len(orders)  # when each rank has ended its last work
    nexts = [0] * len(orders)  # the place of each rank's next work
    # Round after round, each rank goes as far as the results that it needs have been computed.
    while sum(nexts) < sum(map(len, orders)):
        before = sum(nexts)
        for rank, works in enumerate(orders):
            while nexts[rank] < len(works):
                kind, stage, micro = works[nexts[rank]]
                # The stage whose result it takes; at either end there is none.
                way = FORWARD if kind == FORWARD else BACKWARD
                sender = {FORWARD: stage - 1, WEIGHT_HALF: -1}.get(kind, stage + 1)
                needed = done.get((way, sender, micro))
                if 0 <= sender <= last and not needed:
                    break
                start = max(needed.end if needed else 0.0, free[rank])
                updated = 0
                if updates:
                    updated = sum(earlier == BACKWARD for earlier, *_ in works[: nexts[rank]])
                seen = updated if kind == FORWARD else done[FORWARD, stage, micro].version
                free[rank] = start + units[rank][kind]
                nexts[rank] += 1
                work = Work(kind, rank, stage, micro, start, free[rank], seen, updated - seen)
                done[WEIGHT_HALF if kind == WEIGHT_HALF else way, stage, micro] = work
        if sum(nexts) == before:
            stuck = [works[place] for works, place in zip(orders, nexts, strict=True) if place < len(works)]
            raise ValueError(f"no rank can go on: each waits for another. Next would be {stuck}")
    return sorted(done.values(), key=lambda work: (work.start, work.rank))
