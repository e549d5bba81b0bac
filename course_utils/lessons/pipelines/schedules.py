"""Simulate m micro-batches sent through a model cut into p stages: who works, who waits, who keeps what.

Each stage does its works in an order, each as soon as what it needs has arrived: naive (the whole batch at
once), GPipe (Huang et al. 2019: all forwards, then all backwards), 1F1B (Narayanan et al. 2021, section 2.2:
one forward, one backward, and a flush at the end), and PipeDream (Narayanan et al. 2019: without a flush,
weights updated after every backward). A unit of time is one forward of one micro-batch on one stage; sending
takes none.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from ...errors import check_known

FORWARD, BACKWARD = "F", "B"
SCHEDULES = ("naive", "GPipe", "1F1B", "PipeDream")
MOST_STAGES, MOST_MICRO_BATCHES = 64, 512


@dataclass(frozen=True)
class Work:
    """A forward ("F") or backward ("B") of one micro-batch (−1: all at once) on one stage; both count from 0.

    `version` counts the updates that its forward sees, `late` those between that forward and this backward.
    """

    kind: str
    stage: int
    micro: int
    start: float
    end: float
    version: int = 0
    late: int = 0


@dataclass(frozen=True)
class Pipeline:
    """The result of `simulate`: `works` in the order in which they began."""

    schedule: str
    stages: int
    micro_batches: int
    works: Sequence[Work]

    @cached_property
    def span(self) -> float:
        """Units from the first work's start to the last one's end."""
        return max(work.end for work in self.works)

    @property
    def idle(self) -> float:
        """The bubble: the part of all stages' time in which they wait."""
        return 1 - sum(work.end - work.start for work in self.works) / (self.stages * self.span)

    def of_stage(self, stage: int) -> list[Work]:
        """The works of one stage, in order."""
        return [work for work in self.works if work.stage == stage]

    def order(self, stage: int) -> list[str]:
        """The works of one stage as text: F0, F1, B0, …"""
        return [f"{work.kind}{work.micro}" for work in self.of_stage(stage)]

    def kept(self, stage: int) -> list[tuple[float, int]]:
        """(time, micro-batches whose activations are kept from then on): one more as a forward begins."""
        size = self.micro_batches if self.schedule == "naive" else 1
        changes: list[tuple[float, int]] = []
        for work in self.of_stage(stage):
            if work.kind == FORWARD:
                changes.append((work.start, size))
            else:
                changes.append((work.end, -size))
        # In order of time, at one moment frees first: what is freed is free for what begins then.
        times, steps = zip(*sorted(changes), strict=True)
        return list(zip((0.0, *times), accumulate(steps, initial=0), strict=True))

    def most_kept(self, stage: int) -> int:
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
    units = [{FORWARD: each, BACKWARD: backward * each} for each in forwards]
    orders = [order(schedule, stages, micro_batches, stage) for stage in range(stages)]
    return Pipeline(schedule, stages, micro_batches, _run(orders, units, schedule == "PipeDream"))


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


def micro_batches_for(stages: int, most_idle: float) -> int:
    """The fewest micro-batches whose bubble is no more than `most_idle` (a part of 1, above 0)."""
    return next(m for m in range(1, 10**6) if bubble(stages, m) <= most_idle + 1e-12)


def _run(orders: list[list[tuple[str, int]]], units: list[dict[str, float]], updates: bool) -> list[Work]:
    """Let every stage do its works as early as its order and the others' results allow."""
    done: dict[tuple[str, int, int], Work] = {}
    free = [0.0] * len(orders)  # when each stage has ended its last work
    nexts = [0] * len(orders)  # the place of each stage's next work
    # Round after round, each stage goes as far as the results that it needs have been computed.
    while len(done) < sum(map(len, orders)):
        for stage, works in enumerate(orders):
            while nexts[stage] < len(works):
                kind, micro = works[nexts[stage]]
                # The stage whose result it takes; at either end there is none.
                sender = stage - 1 if kind == FORWARD else stage + 1
                needed = done.get((kind, sender, micro))
                if sender in range(len(orders)) and not needed:
                    break
                start = max(needed.end if needed else 0.0, free[stage])
                updated = 0
                if updates:
                    updated = sum(earlier == BACKWARD for earlier, _ in works[: nexts[stage]])
                seen = done[FORWARD, stage, micro].version if kind == BACKWARD else updated
                free[stage] = start + units[stage][kind]
                nexts[stage] += 1
                done[kind, stage, micro] = Work(kind, stage, micro, start, free[stage], seen, updated - seen)
    return sorted(done.values(), key=lambda work: (work.start, work.stage))
