"""The checks of lesson 14: right answers of every style pass, each wrong answer gets the hint it deserves."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from checking import Answers, JudgedAnswers

from course_utils import TrainingRun, estimate, fit
from course_utils.lessons.plans import checks as lesson_14
from course_utils.lessons.plans.checks import BROKEN, HIDDEN, PEAK_MISTAKES, TOLERANCE, peak_right, peaks, true_peaks


def by_arrays(configurations: Any, room: int) -> Any:
    peaks, lost = np.array(configurations).T
    order = np.lexsort((peaks, lost))
    fitting = order[peaks[order] * 1.05 <= room]
    return fitting[0] if len(fitting) else None


def choosing(key: Callable[[int, float], Any], reserve: float = 1.05) -> Any:
    """The one with the least `key` of those that fit with this reserve; of equal ones the first in the list."""

    def answer(configurations: Any, room: int) -> int | None:
        fitting = [index for index, (peak, _) in enumerate(configurations) if reserve * peak <= room]
        return min(fitting, key=lambda index: key(*configurations[index]), default=None)

    return answer


least = choosing(lambda peak, lost: (lost, peak))

CHOOSE = Answers(
    right=[
        by_arrays,
        least,
        lambda configurations, room: min(
            ((lost, peak, i) for i, (peak, lost) in enumerate(configurations) if 1.05 * peak <= room), default=[None]
        )[-1],
    ],
    wrong=[
        (choosing(lambda peak, lost: (lost, peak), reserve=1), "You leave no reserve"),
        (choosing(lambda peak, lost: (lost, peak), reserve=1 / 1.05), "off the wrong side"),
        (choosing(lambda peak, lost: peak), "You take the lowest peak"),
        (choosing(lambda peak, lost: -peak), "the fullest of those that fit"),
        (choosing(lambda peak, lost: 0), "the first that fits"),
        (choosing(lambda peak, lost: lost), "take the smaller, wherever the list has it"),
        (choosing(lambda peak, lost: -lost), "Some choices are off"),
        (lambda configurations, room: configurations.sort() or 0, "changes 'configurations'"),
        (lambda configurations, room: None, "You find nothing"),
        (lambda configurations, room: least(configurations, room) or 0, "where nothing fits"),
    ],
)


def from_above(batch: int, fixed: float, each: float, room: float) -> tuple[int, int] | None:
    for size in range(batch, 0, -1):
        if batch % size == 0 and 1.05 * (fixed + each * size) <= room:
            return size, batch // size
    return None


def by_counts(batch: int, fixed: float, each: float, room: float) -> tuple[float, int] | None:
    """The fewest micro-batches; the size is a float."""
    counts = (count for count in range(1, batch + 1) if batch % count == 0)
    return next(((batch / n, n) for n in counts if (fixed + each * batch / n) * 1.05 <= room), None)


def splitting(fits: Callable[[int, float, float, float], bool], divides: bool = True) -> Any:
    """From above, with another question whether a size fits, or whether it divides the batch."""

    def answer(batch: int, fixed: float, each: float, room: float) -> tuple[int, int] | None:
        sizes = [size for size in range(1, batch + 1) if fits(size, fixed, each, room)]
        sizes = [size for size in sizes if batch % size == 0 or not divides]
        return (sizes[-1], batch // sizes[-1]) if sizes else None

    return answer


def halving(batch: int, fixed: float, each: float, room: float) -> tuple[int, int] | None:
    size, count = batch, 1
    while size > 1 and (fixed + each * size) * 1.05 > room:
        size, count = size // 2, count * 2
    return (size, count) if (fixed + each * size) * 1.05 <= room else None


SPLIT = Answers(
    right=[from_above, by_counts, lambda **case: list(from_above(**case) or ()) or None],
    wrong=[
        (splitting(lambda size, fixed, each, room: (fixed + each * size) * 1.05 <= room, False), "some sequences are"),
        (splitting(lambda size, fixed, each, room: fixed + each * size <= room), "no reserve of 5 %"),
        (splitting(lambda size, fixed, each, room: each * size * 1.05 <= room), "whatever the micro-batch"),
        (splitting(lambda size, fixed, each, room: fixed + each * size * 1.05 <= room), "what is fixed included"),
        (splitting(lambda size, fixed, each, room: size == 1 and (fixed + each) * 1.05 <= room), "One sequence at a"),
        (lambda **case: (from_above(**case) or ())[::-1] or None, "the wrong way round"),
        (halving, "3 × 8 is another batch"),
        (lambda **case: None, "something fits"),
        (lambda **case: from_above(**case) or (1, case["batch"]), "not even one sequence fits"),
        (lambda **case: from_above(**case) and (case["batch"], 1), "is not the largest that fits"),
        (lambda **case: (*(from_above(**case) or (0, 0)), case["room"]), "two whole numbers"),
        (lambda **case: (1.5, 2), "1.5 × 2 is another batch"),
    ],
)

ON_T4 = TrainingRun(
    "gpt2-large", 4, 1024, "amp-fp16", "adamw-fused", "efficient", "every-2", accumulation_steps=8, loss_chunks=8
)


def changing(**changes: Any) -> Any:
    return lambda: ON_T4.replace(**changes)


ON_A_T4 = Answers(
    right=[
        lambda: fit("gpt2-large", "T4-16GB", global_batch=32).path[-1].run,
        lambda: ON_T4,
        changing(recompute="every-3", loss_chunks=16),
    ],
    wrong=[
        (changing(model="gpt2-medium"), "gpt2-large was asked for"),
        (changing(seq_len=512), "as long as they are"),
        (changing(accumulation_steps=1), "another batch"),
        (changing(world_size=8, accumulation_steps=1), "There is one T4"),
        (changing(tensor_parallel=4), "There is one T4"),
        (changing(precision="amp-bf16"), "does not compute in bf16"),
        (changing(attention="flash"), "no flash kernel"),
        (changing(precision="fp16-master"), "fp16-master changes the training"),
        (changing(optimizer="adam8bit"), "AdamW was asked for"),
        (changing(lora_rank=8), "All weights were to be trained"),
        (changing(dropout=0.0), "has dropout"),
        (changing(recompute="none"), "too much for a T4"),
        (changing(micro_batch=1, accumulation_steps=32), "times what the best plan loses"),
    ],
)


def on_paper(
    states: float = 16, stream: float = 4, moments: Callable[[float, float], float] = max, block: Any = lambda h, a: 0
) -> Any:
    """A learner's two moments, with another number of bytes a parameter, or for each number of the residual stream."""

    def answer(N: int, L: int, h: int, a: int, V: int, s: int, b: int) -> float:
        always = states * N + stream * s * b * h * L + s * b * L * block(h, a)
        copies = 2 * h * V + 24 * L * h * h
        return moments(always + copies + 8 * s * b * V, always + 2 * h * V + 10 * s * b * V)

    return answer


def three_moments(N: int, L: int, h: int, a: int, V: int, s: int, b: int) -> float:
    tokens, body = s * b, 16 * N + 4 * s * b * h * (L + 1)
    return np.max([body + 2 * h * V + 24 * L * h**2 + 8 * tokens * V, body + 2 * h * V + 10 * tokens * V,
                   body + tokens * (38 * h + 4 * a + 16)])  # fmt: skip


PREDICTED_PEAK = Answers(
    right=[on_paper(), three_moments, lambda **of: np.float64(1.01 * on_paper()(**of))],
    wrong=[
        (lambda **of: 16 * of["N"], "nothing of it sees the batch"),
        (on_paper(states=12), "The gradients are missing"),
        (on_paper(states=20), "You count the gradients twice"),
        (on_paper(stream=0, block=lambda h, a: 38 * h + 4 * a + 16), "Nothing is recomputed"),
        (on_paper(stream=0), "The checkpoints are missing"),
        (on_paper(stream=2), "checkpoints are in 16 bits"),
        (lambda N, L, h, a, V, s, b: 16 * N + 4 * s * b * h * L + 2 * h * V + 24 * L * h**2, "The loss is missing"),
        (on_paper(moments=lambda loss, backward: loss), "You take the loss alone"),
        (on_paper(moments=lambda loss, backward: backward), "the loss's backward alone"),
        (lambda N, L, h, a, V, s, b: 16 * N + 2 * h * V + 24 * L * h**2 + 4 * s * b * h * L + 10 * s * b * V,
         "two moments that are never together"),
        (lambda **of: on_paper()(**of) / 1e9, "Right in GB"),
        (lambda **of: on_paper()(**of) / 2**30, "Right in GiB"),
        (lambda **of: on_paper()(**of) / 2, "Right in 16-bit numbers"),
        (lambda **of: 1.4 * on_paper()(**of), "prediction − peak is +40 %"),
        (lambda **of: on_paper()(**(of | {"b": 1})), "prediction − peak is −"),
    ],
)  # fmt: skip


def test_the_formula_is_within_its_tolerance_and_the_mistakes_are_not() -> None:
    for one, other in zip(peaks(peak_right), true_peaks(), strict=True):
        assert one == pytest.approx(other, rel=TOLERANCE / 2)
    for mistaken in PEAK_MISTAKES.values():
        assert any(abs(a / b - 1) > TOLERANCE for a, b in zip(peaks(mistaken), true_peaks(), strict=True))
    assert true_peaks()[0] == estimate(HIDDEN[0]).total


def rising(starts: Any) -> bool:
    return len(starts) > 3 and all(one < two for one, two in zip(starts[-3:], starts[-2:], strict=False))


CLUES: dict[str, Callable[[Any], bool]] = {
    "graphs": lambda seen: rising(seen.step_starts),
    "fragmentation": lambda seen: seen.free > seen.requested and seen.free_share > 0.2,
    "states": lambda seen: seen.phase == "optimizer" and seen.alive["optimizer_states"] < 8 * seen.parameters,
    "update": lambda seen: seen.phase == "optimizer",
    "loss": lambda seen: seen.vocab and seen.requested // (seen.micro_batch * seen.seq_len * seen.vocab) in (2, 4),
    "attention": lambda seen: seen.heads and seen.requested % (seen.micro_batch * seen.heads * seen.seq_len**2) == 0,
}


def detective(order: Any = tuple(CLUES), **changes: Callable[[Any], bool]) -> Any:
    """Goes through the clues in this order, some of them changed; activations if none holds."""
    clues = CLUES | changes
    return lambda seen: next((name for name in order if clues[name](seen)), "activations")


def without(*names: str) -> Any:
    return detective([name for name in CLUES if name not in names])


def by_phase(seen: Any) -> str:
    """Branches by phase, and the sizes as fractions."""
    if rising(seen.step_starts):
        return "graphs"
    if seen.largest_free < seen.requested < seen.free and seen.free_share > 0.25:
        return "fragmentation"
    if seen.phase == "optimizer":
        complete = seen.alive["optimizer_states"] / seen.parameters >= 8
        return "update" if complete else "states"
    tokens = seen.micro_batch * seen.seq_len
    scores, logits = tokens * seen.seq_len * seen.heads, tokens * seen.vocab
    if logits and any(abs(seen.requested / logits - n) < 0.01 for n in (2, 4)):
        return "loss"
    return "attention" if scores and seen.requested / scores in (1, 2, 4) else "activations"


DIAGNOSE = Answers(
    right=[detective(), by_phase, detective(["states", "update", "graphs", "fragmentation", "attention", "loss"])],
    wrong=[
        (detective(fragmentation=lambda seen: seen.free > seen.requested), "every full card has crumbs"),
        (detective(states=lambda seen: seen.phase == "optimizer"), "Are they complete"),
        (without("states"), "Were its states complete"),
        (without("loss", "attention"), "How large was the request"),
        (without("graphs"), "You blame the last request"),
        (without("fragmentation"), "You miss fragmentation"),
        (detective(["attention", *CLUES]), "did not die of 'attention'"),
        (detective(["loss"], loss=lambda seen: seen.requested % seen.vocab == 0), "raised ZeroDivisionError"),
        (detective(loss=lambda seen: seen.requested == 2 * seen.micro_batch * seen.seq_len * seen.vocab),
         "How large was the request"),
        (detective(graphs=lambda seen: seen.step > 1), "Not every later step is a leak"),
        (lambda seen: max(seen.alive, key=lambda kind: seen.alive[kind]), "not one of activations"),
        (lambda seen: "loss", "The same cause for every run"),
        (lambda seen: "weights" if seen.phase == "loss" else detective()(seen), "did not die of 'weights'"),
    ],
)  # fmt: skip


def test_hidden_cases_are_of_every_cause_that_can_be_told() -> None:
    assert {cause for cause, _, _ in BROKEN} == set(lesson_14.CAUSES) - {"weights"}


ANSWERS = {"14.1": CHOOSE, "14.2": SPLIT, "14.3": ON_A_T4, "14.4": PREDICTED_PEAK, "14.5": DIAGNOSE}


class TestAnswers(JudgedAnswers):
    answers = ANSWERS
