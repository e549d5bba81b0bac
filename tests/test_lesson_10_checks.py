"""The checks of lesson 10: right answers of every style pass, each wrong answer gets the hint it deserves."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from checking import Answers, JudgedAnswers

from course_utils.allocator.replay import replay
from course_utils.lessons.allocator import checks as lesson_10
from course_utils.lessons.allocator.checks import ORDER_CASES, late_fits, leak_right, report, snapshot, sweep
from course_utils.units import MiB


def up(size: int, step: int = 512) -> int:
    return -(-size // step) * step


def segment_of(size: int, small: int = MiB, large: int = 10 * MiB, step: int = 2 * MiB) -> int:
    rounded = up(size)
    return 2 * MiB if rounded <= small else 20 * MiB if rounded < large else up(rounded, step)


def block_of(size: int, limit: int = MiB) -> int:
    rest = segment_of(size) - up(size)
    return segment_of(size) if up(size) > MiB and rest <= limit else up(size)


def allocating(segment: Callable[[int], float] = segment_of, block: Callable[[int], float] = block_of) -> Any:
    return lambda size: {"segment": segment(size), "block": block(size)}


def by_the_replay(size: int) -> dict[str, int]:
    """As the lesson's table prints it."""
    replayed = replay([(size, "first")])
    return {"block": replayed.allocated[0], "segment": replayed.reserved[0]}


HANDED_OUT = Answers(
    right=[allocating(), by_the_replay, allocating(block=lambda size: float(block_of(size)))],
    wrong=[
        (allocating(segment=up), "a segment of its own size"),
        (allocating(segment=lambda size: segment_of(size, step=512)), "multiples of 2 MiB"),
        (allocating(segment=lambda size: segment_of(size, small=MiB - 512)), "still belongs to the small"),
        (allocating(segment=lambda size: segment_of(size, large=10 * MiB + 512)), "10 MiB exactly gets"),
        (allocating(segment=lambda n: 2 * MiB if n <= MiB else 20 * MiB if n < 10 * MiB else up(n, 2 * MiB)),
         "You choose by the request"),
        (allocating(segment=lambda size: segment_of(size, small=0)), "The small pool takes"),
        (allocating(segment=lambda size: segment_of(size, step=20 * MiB)), "for those under 10 MiB"),
        (allocating(segment=lambda size: up(size, 2 * MiB)), "There are three cases"),
        (allocating(segment=lambda size: segment_of(size) / MiB), "MiB where bytes were asked"),
        (allocating(block=up), "Your block is the request, rounded"),
        (allocating(block=segment_of), "Your block is the whole segment"),
        (allocating(block=lambda size: block_of(size, MiB - 1)), "1 MiB exactly is not split off"),
        (allocating(block=lambda size: block_of(size, 2 * MiB)), "You keep large rests"),
        (allocating(block=lambda size: size), "a multiple of 512"),
        (allocating(block=lambda size: (size // 512 + 1) * 512), "Some block is off"),
    ],
)  # fmt: skip


def of_norms(gradients: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([gradient.float().norm() for gradient in gradients]).norm()


def by_squares(gradients: list[torch.Tensor]) -> float:
    return sum(gradient.float().square().sum().item() for gradient in gradients) ** 0.5


def in_a_loop(gradients: list[torch.Tensor]) -> torch.Tensor:
    total = torch.zeros(())
    for gradient in gradients:
        total = torch.hypot(total, gradient.float().norm())
    return total


LEAN_NORM = Answers(
    right=[of_norms, by_squares, in_a_loop],
    wrong=[
        (lambda gs: torch.cat([g.flatten().float() for g in gs]).norm(), "who keeps the copies"),
        (lambda gs: torch.stack([g.norm() for g in gs]).norm(), "added up in 16 bits"),
        (lambda gs: torch.stack([g.norm() for g in gs]).norm() if gs[0].dtype == torch.float16 else of_norms(gs),
         "leaves the range of 16 bits"),
        (lambda gs: sum(g.float().norm() for g in gs), "You add the norms"),
        (lambda gs: sum(g.float().norm() for g in gs) / len(gs), "the mean of the norms"),
        (lambda gs: sum(g.float().square().sum() for g in gs), "a root is missing"),
        (lambda gs: max(g.float().norm() for g in gs), "the largest gradient's norm"),
        (lambda gs: of_norms(gs[:-1]), "One gradient is missing"),
        (lambda gs: 3 * of_norms(gs), "The norm is off"),
        (lambda gs: gs[0].mul_(2.0).norm(), "changes the gradients"),
        (lambda gs: gs.clear() or 0.0, "changes the gradients, or their list"),
        (lambda gradients: torch.stack([g.float().norm() for g in gradients]), "You return several numbers"),
    ],
)  # fmt: skip


def test_the_planted_report_does_not_move_and_the_true_one_does() -> None:
    planted, true = lesson_10.planted_report(), report(lesson_10.process(), "peak allocated")
    assert len(set(planted.values())) == 1
    assert list(true.values()) == sorted(set(true.values()), reverse=True) and true["32"] > 4 * true["4"]


def by_loop(process: Any) -> dict[str, int]:
    found = dict.fromkeys(process.spans, 0)
    for label, (first, last) in process.spans.items():
        for event in range(first, last):
            found[label] = max(found[label], process.replayed.allocated[event])
    return found


def by_slices(process: Any) -> dict[str, int]:
    curve = np.array(process.replayed.allocated)
    return {label: curve[slice(*span)].max() for label, span in process.spans.items()}


def reading(counter: Callable[[Any, int, int], Any]) -> Any:
    """For each label what `counter(replayed, first, last)` says."""
    return lambda process: {label: counter(process.replayed, *span) for label, span in process.spans.items()}


def typed_in(process: Any) -> dict[str, int]:
    """The peaks of the process that learners see, whatever process is given."""
    seen = by_loop(lesson_10.process())
    return {label: seen[label] for label in process.spans}


PEAKS = Answers(
    right=[by_loop, by_slices, reading(lambda curves, first, last: sorted(curves.allocated[first:last])[-1] / 1)],
    wrong=[
        (reading(lambda curves, first, last: max(curves.allocated[:last])), "a maximum since the process began"),
        (reading(lambda curves, first, last: curves.allocated[last - 1]), "weights and states"),
        (reading(lambda curves, first, last: curves.reserved[last - 1]), "keeps what the first run took"),
        (reading(lambda curves, first, last: max(curves.requested[first:last])), "Some peak is off"),
        (reading(lambda curves, first, last: max(curves.allocated[first:last]) / 1e6), "MB where bytes were asked"),
        (typed_in, "the peaks of the process above"),
    ],
)

FLAT, KEPT = "max_memory_allocated, never reset", "memory_reserved after the step"
LEFT, PEAK = "memory_allocated after the step", "peak allocated"

COUNTERS: dict[str, Callable[[Any, int, int], int]] = {
    FLAT: lambda curves, first, last: max(curves.allocated[:last]),
    KEPT: lambda curves, first, last: curves.reserved[last - 1],
    LEFT: lambda curves, first, last: curves.allocated[last - 1],
    PEAK: lambda curves, first, last: max(curves.allocated[first:last]),
}


def by_trying(process: Any, report: Any) -> str:
    return next(name for name, counter in COUNTERS.items() if reading(counter)(process) == report)


def by_leaving_out(process: Any, report: Any) -> str:
    left = [name for name, counter in COUNTERS.items() if not reading(counter)(process).items() - report.items()]
    return left[-1]


def by_distance(process: Any, report: Any) -> str:
    return min(COUNTERS, key=lambda name: sum(
        abs(said - report[label]) for label, said in reading(COUNTERS[name])(process).items()
    ))  # fmt: skip


def accusing(counter: str, other: str) -> Any:
    """The right answer, but for one counter another."""

    def answer(process: Any, report: Any) -> str:
        right = by_trying(process, report)
        return other if right == counter else right

    return answer


CULPRIT = Answers(
    right=[by_trying, by_leaving_out, by_distance],
    wrong=[
        (lambda process, report: FLAT, "whatever the report says"),
        (accusing(KEPT, FLAT), "you take one for the other"),
        (accusing(PEAK, KEPT), "an honest report"),
        (accusing(LEFT, PEAK), "pass as right"),
        (accusing(LEFT, KEPT), "from another counter"),
        (accusing(PEAK, "nvidia-smi"), "not one of COUNTERS"),
    ],
)


def test_where_batches_grow_a_maximum_never_reset_is_right() -> None:
    growing = sweep((4, 8, 32))
    assert report(growing, FLAT) == report(growing, PEAK) != report(growing, KEPT)


def filled(size: float, keep: Callable[[int], bool], late: float = 0.0, share: float = 0.0, over: int = 1) -> Any:
    """Tensors of `size` MiB fill the GPU, those stay that `keep` names; `late` MiB or a `share` of it come last."""

    def answer(capacity: int) -> list[tuple[int, str]]:
        bytes_ = int(size * MiB)
        made = [(bytes_, f"t{index}") for index in range(over * capacity // bytes_)]
        freed = [(-bytes_, name) for index, (_, name) in enumerate(made) if not keep(index)]
        return [*made, *freed, (int(late * MiB + share * capacity), "late")]

    return answer


every_second = filled(4, lambda index: index % 2 == 0, late=8)

FRAGMENTED = Answers(
    right=[
        every_second,
        lambda capacity: tuple(filled(4, lambda index: index % 5 in (0, 2, 4), late=5)(capacity)),
        filled(2, lambda index: index % 10 == 0, late=20),
    ],
    wrong=[
        (filled(4, lambda index: index % 2 == 0, late=4), "everything fits"),
        (filled(4, lambda index: index % 10 > 0, late=8), "no more than 30 %"),
        (filled(4, lambda index: index % 2 == 0, share=1), "a full GPU"),
        (filled(4, lambda index: index % 2 == 0, late=8, over=2), "before the last request"),
        (filled(4, lambda index: index % 2 == 0, share=0.5), "all that is free."),
        (lambda capacity: every_second(80 * MiB), "On a GPU of 200 MiB everything fits"),
        (lambda capacity: [(-4, "a")], "These are no events"),
    ],
)


def grouped(tensors: Any) -> list[str]:
    long = [name for name, _, lives_long in tensors if lives_long]
    return [*long, *(name for name, _, lives_long in tensors if not lives_long)]


def sorting(key: Callable[[Any], Any]) -> Any:
    return lambda tensors: [name for name, _, _ in sorted(tensors, key=key)]


def test_in_the_order_of_the_step_each_case_fails_and_grouped_it_fits() -> None:
    for tensors, late, capacity in ORDER_CASES:
        assert not late_fits([name for name, _, _ in tensors], tensors, late, capacity)
        assert late_fits(grouped(tensors), tensors, late, capacity)


ORDER = Answers(
    right=[grouped, sorting(lambda t: (not t[2], t[1])), sorting(lambda t: (not t[2], -t[1]))],
    wrong=[
        (lambda tensors: [name for name, _, _ in tensors], "the order of the step"),
        (lambda tensors: [name for name, _, _ in tensors][::-1], "as mixed as before"),
        (sorting(lambda t: t[1]), "You sort by size."),
        (sorting(lambda t: -t[1]), "You sort by size, turned"),
        (sorting(lambda t: t[2]), "You sort by lifetime"),
        (lambda tensors: grouped(tensors)[1::2] + grouped(tensors)[::2], "short and long lives share segments"),
        (lambda tensors: [name for name, _, lives_long in tensors if lives_long], "Each tensor has to be made once"),
        (lambda tensors: sorted(tensors, key=lambda t: not t[2]), "Return names alone"),
    ],
)  # fmt: skip


def living(content: Any) -> list[tuple[str, str, int]]:
    """Module, moment and bytes of each living block."""
    blocks = [block for segment in content["segments"] for block in segment["blocks"]]
    return [(block["frames"][0]["filename"], block["frames"][1]["filename"], block["size"])
            for block in blocks if block["state"] == "active_allocated"]  # fmt: skip


def by_counting(snapshot: Any) -> str | None:
    """By sorted pairs of module and step."""
    pairs = {(made_by, when.split()[1]) for made_by, when, _ in living(snapshot)}
    names = [name for name, _ in pairs]
    return next((name for name in sorted(names) if names.count(name) >= 3), None)


def by_forwards(snapshot: Any) -> str | None:
    """What forwards made, in more than one step."""
    found: dict[str, set[str]] = {}
    for made_by, when, _ in living(snapshot):
        if "forward" in when:
            found.setdefault(made_by, set()).add(when)
    return next((made_by for made_by, moments in found.items() if len(moments) > 1), None)


def in_every_step(snapshot: Any) -> str | None:
    made = [{made_by for made_by, when, _ in living(snapshot) if when.startswith(f"step {step} ")}
            for step in (1, 2, 3, 4, 5)]  # fmt: skip
    return next(iter(set.intersection(*made)), None)


def of_two_steps(snapshot: Any) -> str | None:
    pairs = {(made_by, when) for made_by, when, _ in living(snapshot)}
    names = sorted(name for name, _ in pairs)
    return next((name for name in names if names.count(name) >= 2), None)


def largest(snapshot: Any) -> str:
    return max(living(snapshot), key=lambda block: block[2])[0]


def first_of_step_3(snapshot: Any) -> str | None:
    return next((made_by for made_by, when, _ in living(snapshot) if when.startswith("step 3")), None)


def where_something_leaks(answer: Any) -> Any:
    return lambda snapshot: answer(snapshot) if by_counting(snapshot) else None


NONE_THERE = "You find a leak where there is none"

LEAK = Answers(
    right=[by_counting, by_forwards, in_every_step],
    wrong=[
        (largest, NONE_THERE),
        (of_two_steps, NONE_THERE),
        (first_of_step_3, NONE_THERE),
        (where_something_leaks(of_two_steps), "does not pile up"),
        (where_something_leaks(largest), "made in one step"),
        (where_something_leaks(first_of_step_3), "made in one step"),
        (lambda snapshot: None if by_counting(snapshot) == "last" else by_counting(snapshot), "You find nothing"),
        (where_something_leaks(lambda snapshot: f"addmm in {by_counting(snapshot)}"), "is no module"),
        (lambda snapshot: "last", "whatever the snapshot says"),
    ],
)


def test_the_example_is_a_snapshot_of_five_steps() -> None:
    steps = {when.split()[1] for _, when, _ in living(lesson_10.example_snapshot())}
    assert steps == {"0", "1", "2", "3", "4", "5"} and leak_right(snapshot(None)) is None


ANSWERS = {"10.1": HANDED_OUT, "10.2": LEAN_NORM, "10.3": PEAKS, "10.4": CULPRIT, "10.5": FRAGMENTED, "10.6": ORDER,
           "10.7": LEAK}  # fmt: skip


class TestAnswers(JudgedAnswers):
    answers = ANSWERS
