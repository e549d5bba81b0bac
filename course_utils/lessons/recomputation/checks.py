"""Checks of the exercises of lesson 06, "Recomputation": each names the misconception, never the answer."""

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from course_utils.breakdown import MemoryBreakdown
from course_utils.estimating import estimate
from course_utils.estimating.exact.activations import activation_bytes
from course_utils.gpus import gpu
from course_utils.interactive.feedback import (
    CheckFailed,
    Mistakes,
    NotSolved,
    alike,
    call,
    divisors,
    entries,
    exercise,
    expect,
    fail,
    handed,
    of_kind,
    recognized,
)
from course_utils.measurement import Mark, Measurement, Timeline
from course_utils.measuring import measure
from course_utils.run import TrainingRun

from . import schedules
from .policies import added_percent, small_gpt

# ---------------------------------------------------------------------------------------------------------- 06.1: cost

COST_CASES = ((12, 3), (48, 4), (64, 8), (10, 10), (10, 1), (60, 5))

MEMORY_MISTAKES: Mistakes = {
    "Those are the checkpoints alone. In backward a stretch runs again and leaves its values.": lambda n, k: n // k,
    "That is one stretch alone. The checkpoints are kept all the while.": lambda n, k: k,
    "That is a chain that keeps all. What do the checkpoints save?": lambda n, k: n,
    "You let every stretch keep its values: each goes before the next one runs.": lambda n, k: n + n // k,
    "One checkpoint is missing: the first node's input is kept, too.": lambda n, k: n // k - 1 + k,
    "That holds for the best k alone. The question is about any k.": lambda n, k: 2 * math.sqrt(n),
}
FORWARD_MISTAKES: Mistakes = {
    "That is one forward pass: either the first one or the repetition is missing.": lambda n, k: n,
    "You seem to count backward too. `forwards` counts runs of f alone.": lambda n, k: 3 * n,
    "You run one stretch again. All stretches have to, each when backward comes to it.": lambda n, k: n + k,
    "You run one node of each stretch again. All of them have to leave their values.": lambda n, k: n + n // k,
    "That is what keeping nothing costs. Who begins at a checkpoint?": lambda n, k: n + n * (n + 1) // 2,
}


@exercise("06.1", "Memory falls and rises with k, the work stays: one more forward.")
def cost(answer: Any) -> None:
    """`answer(n, k)` is a dictionary: memory (values kept at most) and forwards (runs of f)."""
    got = [entries(call(answer, n=n, k=k, returns=Mapping), ("memory", "forwards")) for n, k in COST_CASES]
    memory, forwards = ([both[name] for both in got] for name in ("memory", "forwards"))
    otherwise = "is off. Draw a chain of 6 nodes with k = 2 and count."
    recognized(memory, COST_CASES, lambda n, k: n // k + k, MEMORY_MISTAKES, f"memory {otherwise}")
    recognized(forwards, COST_CASES, lambda n, k: 2 * n, FORWARD_MISTAKES, f"forwards {otherwise}")


# ------------------------------------------------------------------------------------------------- 06.2: best_interval

INTERVAL_CASES = ((64, 1), (48, 1), (48, 17), (100, 4), (96, 57), (36, 0.25), (60, 2.4), (72, 1), (7, 3), (10, 0.918))

INTERVAL_MISTAKES: Mistakes = {
    "You leave c out: nodes keep more than a checkpoint here.": lambda n, c: schedules.best_interval(n),
    "You took the largest of several equally good k.": lambda n, c: min(divisors(n)[::-1], key=lambda k: n / k + c * k),
    "c is on the wrong side: it belongs to the stretch.": lambda n, c: min(divisors(n), key=lambda k: c * n / k + k),
    "You rounded √(n/c) to a divisor.": lambda n, c: min(divisors(n), key=lambda k: abs(k - math.sqrt(n / c))),
}


@exercise("06.2", "Tried, not assumed: the square root belongs to equal nodes alone.")
def best_interval(answer: Any) -> None:
    """`answer(n, c)` is the k that divides n with the least n/k + c·k."""
    got = [call(answer, n=n, c=c) for n, c in INTERVAL_CASES]
    for (n, _), k in zip(INTERVAL_CASES, got, strict=True):
        expect(k >= 1 and n % k == 0, f"Your k for n = {n} does not divide n: stretches would differ in length.")
    otherwise = "Some k is not the best. Try every k that divides n, and work out n/k + c·k for each."
    recognized(got, INTERVAL_CASES, schedules.best_interval, INTERVAL_MISTAKES, otherwise)


# ----------------------------------------------------------------------------------------------------- 06.3: in_groups

GROUPS = ((6, 2), (7, 3), (5, 1), (4, 4))  # number of blocks, and how many of them share a checkpoint
DROPOUT, WIDTH = 0.5, 16


class Noted(nn.Module):
    """A small block that appends its number to `runs` whenever it runs."""

    def __init__(self, number: int, runs: list[int], dropout: float) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.number, self.runs, self.dropout = number, runs, dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.runs.append(self.number)
        return x + nn.functional.dropout(torch.tanh(self.linear(x)), self.dropout, self.training)


Chain = list[Noted]
LOOP_OVER = "Your function runs again when the loop is over: what do its variables refer to by then?"


def chain(count: int, dropout: float = 0.0) -> Chain:
    runs: list[int] = []  # which all blocks share
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(count)
        return [Noted(number, runs, dropout) for number in range(count)]


class Ran(NamedTuple):
    """One forward and backward: output, gradients, the blocks that ran in order, and the number of tensors kept."""

    output: Any
    gradients: list[torch.Tensor | None]
    runs: list[int]
    kept: int


def _one_by_one(blocks: Chain, x: torch.Tensor, _: int = 0) -> torch.Tensor:
    return nn.Sequential(*blocks)(x)


def groups_right(blocks: Chain, x: Any, k: int) -> Any:
    for first in range(0, len(blocks), k):
        x = checkpoint(_one_by_one, blocks[first : first + k], x, use_reentrant=False)
    return x


def run_in_groups(blocks: Chain, k: int, answer: Callable[..., Any] = groups_right) -> Ran:
    """Forward and backward through `answer(blocks, x, k)`, watched, with the same random numbers each time."""
    mine = list(blocks)
    x = torch.linspace(-1, 1, 4 * WIDTH).reshape(4, WIDTH).requires_grad_()
    inputs: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        inputs.extend([tensor] * (tensor.shape == x.shape))
        return tensor

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            output = answer(blocks, x, k)
        if isinstance(output, torch.Tensor) and output.requires_grad:
            output.square().sum().backward()
    gradients = [x.grad, *(weight.grad for block in mine for weight in block.parameters())]
    return Ran(output, gradients, mine[0].runs, len(inputs))


@exercise("06.3", "Same output, same gradients, and nothing kept but a checkpoint for each group.")
def in_groups(answer: Any) -> None:
    """`answer(blocks, x, k)` runs x through all blocks, recomputing them in groups of k."""
    for count, k in GROUPS:
        right, got = run_in_groups(chain(count), k), _ran(answer, chain(count), k)
        where = f"With {count} blocks and k = {k}, "
        same = got.output.shape == right.output.shape and torch.allclose(got.output, right.output, atol=1e-6)
        places = f"{where}checkpoints are in other places: a group has k blocks, the last fewer."
        expect(same, "The output is not what the blocks compute one after the other. Does each run, in order?")
        expect(got.gradients[0] is not None, "No gradient reaches x. Who cuts the graph?")
        expect(len(got.runs) != count, "Nothing is run again: every block keeps all. Where is `checkpoint`?")
        expect(len(got.runs) >= 2 * count, "Some blocks run again, others do not: does the last, smaller group?")
        expect(_same_gradients(got, right), f"The output is right and the gradients are not. {LOOP_OVER}")
        expect(got.kept == right.kept, f"{where}the number of checkpoints is not one for each group of k.")
        expect(got.runs == right.runs, places)
    _expect_same_masks(answer)


def _same_gradients(one: Ran, other: Ran) -> bool:
    pairs = zip(one.gradients, other.gradients, strict=True)
    return all(a is not None and b is not None and torch.allclose(a, b, atol=1e-5) for a, b in pairs)


def _expect_same_masks(answer: Any) -> None:
    count, k = GROUPS[0]
    got, kept = _ran(answer, chain(count, DROPOUT), k), run_in_groups(chain(count, DROPOUT), k, _one_by_one)
    same = torch.allclose(got.output, kept.output, atol=1e-6)
    expect(same, "With dropout your output is another. Seed nothing, and leave the blocks in training mode.")
    masks = "With dropout, the second forward draws other masks than the first. What restores the random state?"
    expect(_same_gradients(got, kept), masks)


def _ran(answer: Any, blocks: Chain, k: int) -> Ran:
    try:
        return run_in_groups(blocks, k, lambda *arguments: call(answer, *arguments, returns=torch.Tensor))
    except (CheckFailed, NotSolved):
        raise
    except Exception as error:  # what backward raises, because of what the learner's function left for it
        again = "Recomputed values" in str(error) or "different number of tensors" in str(error)
        raised = f"Backward through your output raised {type(error).__name__}: {error}"
        raise CheckFailed(f"Backward ran something else than forward. {LOOP_OVER}" if again else raised) from error


# --------------------------------------------------------------------------------------------------------- 06.4: added

ADDED_CASES = ((1024, 768, 12, 50257), (2048, 12288, 96, 50257), (4096, 1024, 4, 1000))


def full_right(s: int, h: int, L: int, V: int) -> float:
    blocks = L * (24 * h * h + 4 * s * h)
    return 100 * blocks / (3 * (blocks + 2 * h * V))


def core_right(s: int, h: int, L: int, V: int) -> float:
    return full_right(s, h, L, V) * 4 * s * h / (24 * h * h + 4 * s * h)


FULL_MISTAKES: Mistakes = {
    "A third exactly: that runs the head again, too, which lies outside the blocks.": lambda *_: 100 / 3,
    "You divide by forward alone. The step has backward, too.": lambda *case: 3 * full_right(*case),
    "Those are parts of 1. Percent were asked for.": lambda *case: full_right(*case) / 100,
    "Backward takes twice forward's FLOPs, not once.": lambda *case: 1.5 * full_right(*case),
    "You count one block and one head. The model has L blocks.": lambda s, h, L, V: full_right(s, h, 1, V),
}
CORE_MISTAKES: Mistakes = {
    "Three times too much, as in the paper's eq. 8: only forward runs again.": lambda *case: 3 * core_right(*case),
    "Those are parts of 1. Percent were asked for.": lambda *case: core_right(*case) / 100,
    "One product is missing: q·kᵀ and weights·v run again.": lambda *case: core_right(*case) / 2,
}


@exercise("06.4", "One forward against three: a third of the blocks' share, and far less for the core.")
def added(answer: Any) -> None:
    """`answer(s, h, L, V)` is a dictionary: full and core, percent of the step's FLOPs."""
    got = [entries(call(answer, s=s, h=h, L=L, V=V, returns=Mapping), ("full", "core")) for s, h, L, V in ADDED_CASES]
    same, otherwise = partial(alike, tolerance=1e-3), "is off: 100 · what runs again / all of forward and backward."
    for name, right, mistakes in (("full", full_right, FULL_MISTAKES), ("core", core_right, CORE_MISTAKES)):
        recognized([both[name] for both in got], ADDED_CASES, right, mistakes, f"{name} {otherwise}", same)


# ------------------------------------------------------------------------------------------------------ 06.5: cheapest

POLICIES = ("none", "selective-attention", "every-12", "every-6", "every-4", "full")
EAGER = TrainingRun("gpt2-xl", 8, 1024, "bf16-master", attention="eager")
CHEAPEST_CASES = (
    *((EAGER, card) for card in ("H200-141GB", "A100-80GB", "A100-40GB", "T4-16GB")),
    *((EAGER.replace(micro_batch=b), "A100-80GB") for b in (16, 2)),
)


def _costs(run: TrainingRun, card: str = "") -> list[tuple[float, int, str]]:
    """(percent added, peak bytes, policy) for each policy that fits the card, if one is named."""
    runs = [run.replace(recompute=policy) for policy in POLICIES]
    costs = [(added_percent(one), estimate(one).total, one.recompute) for one in runs]
    return [cost for cost in costs if not card or cost[1] <= gpu(card).memory]


CHEAPEST_MISTAKES: Mistakes = {
    "You always take the lowest peak. Where more fits, that recomputes for nothing.":
        lambda run, card: min(_costs(run, card), key=lambda cost: cost[1], default=(None,))[-1],
    "You take the first that fits. Several policies cost the same: among those, the lowest peak was asked for.":
        lambda run, card: next(iter(_costs(run, card)), (None,))[-1],
    "You look at the arithmetic alone: does the policy fit the card?": lambda run, card: min(_costs(run))[-1],
}  # fmt: skip


@exercise("06.5", "As much recomputation as the card makes you do, and no more.")
def cheapest(answer: Any) -> None:
    """`answer(run, card)` is the policy that fits with the least arithmetic, then the least memory; or None."""
    got = [call(answer, run=run, card=card, returns=str | None) for run, card in CHEAPEST_CASES]
    unknown = [policy for policy in got if policy not in (None, *POLICIES)]
    expect(not unknown, f"{', '.join(map(repr, unknown))}: not one of POLICIES.")
    right = partial(min, default=(None,))  # the first in percent, then in peak
    if recognized(got, CHEAPEST_CASES, lambda *case: right(_costs(*case))[-1], CHEAPEST_MISTAKES, same=operator.eq):
        return
    for policy, (run, card) in zip(got, CHEAPEST_CASES, strict=True):
        fits = _costs(run, card)
        expect(policy is None or fits, f"On the {card} you choose a policy that does not fit: none of them does there.")
        expect(policy or not fits, f"On the {card} you find nothing, but something fits `gpu(card).memory` bytes.")
    fail("A policy that fits, but another that fits adds less arithmetic, or as much with a lower peak.")


# ----------------------------------------------------------------------------------------------------- 06.6: stretches

BLOCKS = 12
TEETH = {"every-3": 4, "none": 0, "full": 12, "every-6": 2, "every-4": 3}
HIDDEN = TrainingRun("gpt2", 2, 256, "amp-bf16")

TEETH_MISTAKES: Mistakes = {
    "You count blocks in a stretch. How many stretches are there?": lambda _, teeth: BLOCKS // teeth if teeth else 0,
    "One tooth is missing: does your loop end before the last is counted?": lambda _, teeth: max(teeth - 1, 0),
    "One too many: forward's climb is no recomputation.": lambda _, teeth: teeth + 1,
    "You count the teeth of all steps. The last one was asked for.": lambda _, teeth: 2 * teeth,
}


def hidden_runs() -> list[TrainingRun]:
    return [HIDDEN.replace(recompute=policy) for policy in TEETH]


@cache
def measured(policy: str) -> Measurement:
    """The hidden run with this policy, simulated, without its tensors' names."""
    return replace(measure(HIDDEN.replace(recompute=policy), source="simulated"), allocations=())


def example() -> Measurement:
    """A measurement to look at, without its tensors' names."""
    return measured("every-4")


@exercise("06.6", "Read off memory alone: what was run again, and in how many stretches.")
def stretches(answer: Any) -> None:
    """`answer(measurement)` is how many stretches ran again in backward of the last step."""
    got = [call(answer, measurement=handed(measured(policy))) for policy in TEETH]
    expect(len(set(got)) > 1, "You give the same answer whatever the measurement says. The hidden runs differ.")
    if recognized(got, TEETH.items(), lambda _, teeth: teeth, TEETH_MISTAKES):
        return
    none = got[list(TEETH).index("none")]
    expect(none == 0, "You find recomputation where there is none: do activations ever rise there?")
    expect(max(got) <= BLOCKS, "More stretches than blocks: small tensors come and go within a tooth. Leave them out.")
    fail("The count is off somewhere: plot the activations in backward, and count the teeth by eye first.")


# --------------------------------------------------------------------------------------------------------- 06.7: infer

KNOWN = TrainingRun(small_gpt(), 1, 128, "bf16-master")
SECRETS = {1: (12, "every-2"), 2: (2, "none"), 3: (24, "full"), 4: (20, "every-3"), 5: (5, "none"), 6: (7, "full")}
"""Micro-batch and policy of each case. Neither the peak nor what forward keeps puts the policies in order."""

SECRET_POLICIES = ("none", "full", "every-2", "every-3")


def secret_runs() -> list[TrainingRun]:
    return [KNOWN.replace(micro_batch=b, recompute=policy) for b, policy in SECRETS.values()]


def mystery(seed: int) -> Measurement:
    """One of the hidden runs, by any whole number: the timeline of its activations, and nothing else."""
    return case(1 + (seed - 1) % len(SECRETS))


@cache
def case(number: int) -> Measurement:
    """The simulated run of a case with the events of its activations and without all others, its peak theirs."""
    measurement = measure(secret_runs()[number - 1], source="simulated")
    changes, before = [], [0]
    for size, kind in measurement.timeline.changes:
        if kind == "activations":
            changes.append((size, kind))
        before.append(len(changes))
    line = Timeline(changes, [Mark(before[mark.event], mark.step, mark.phase) for mark in measurement.timeline.marks])
    most = max(line.totals())
    highest = MemoryBreakdown({"activations": most}, "", "the most activations at once")
    bare = replace(measurement, breakdown=highest, moments={}, allocations=(), phase_peaks={})
    return replace(bare, timeline=line, peak_event=line.totals().index(most) + 1)


def kept_by_forward(measurement: Measurement) -> int:
    """Bytes of activations when the last step's forward is through."""
    starts = {mark.phase: mark.event for mark in measurement.timeline.marks}
    return measurement.timeline.curves()["activations"][starts["loss"] - 1]


def _batch_of(size: int, policy: str) -> int:
    return max(1, round(size / activation_bytes(KNOWN.replace(recompute=policy))))


INFER_MISTAKES: Mistakes = {
    "You divide as if everything were kept, but forward may keep checkpoints.":
        lambda number: _batch_of(kept_by_forward(case(number)), "none"),
    "That is from the highest point. There the loss stands on top.":
        lambda number: _batch_of(max(case(number).timeline.totals()), SECRETS[number][1]),
}  # fmt: skip


@exercise("06.7", "Both secrets of every hidden run, from one curve.")
def infer(answer: Any) -> None:
    """`answer(measurement)` is {"micro_batch": b, "recompute": policy} of a run like KNOWN."""
    batches, policies = zip(*(_inferred(answer, case(number)) for number in SECRETS), strict=True)
    secrets = [policy for _, policy in SECRETS.values()]
    expect(len(set(policies)) > 1, "You name the same policy for every curve. The hidden runs differ.")
    exchanged = [{"every-2": "every-3", "every-3": "every-2"}.get(policy, policy) for policy in secrets]
    expect(list(policies) != exchanged, "Turned round: three teeth of two blocks each, or two of three blocks each?")
    for number, policy, secret in zip(SECRETS, policies, secrets, strict=True):
        known = (policy == "none") == (secret == "none")
        expect(known, f"mystery({number}): does the curve ever climb between the beginning of backward and its end?")
    right = list(policies) == secrets
    expect(right, "Who recomputes is right, but not in what stretches of 6 blocks: count the climbs in backward.")
    if not recognized(batches, [(number,) for number in SECRETS], lambda number: SECRETS[number][0], INFER_MISTAKES):
        for number, batch in zip(SECRETS, batches, strict=True):
            off = abs(batch - SECRETS[number][0])
            expect(off != 1, f"mystery({number}): off by one sequence. Round to the nearest, at the end of forward.")
            expect(not off, f"mystery({number}): the micro-batch is off. What does one sequence keep here?")


def _inferred(answer: Any, measurement: Measurement) -> tuple[int, str]:
    given = call(answer, measurement=handed(measurement), returns=Mapping)
    got = entries(given, ("micro_batch", "recompute"), (Real, str))
    policy = of_kind(got["recompute"], str, "recompute is")
    expect(policy in SECRET_POLICIES, f"{policy!r}: not one of {', '.join(SECRET_POLICIES)}.")
    batch = of_kind(got["micro_batch"], Real, "micro_batch is")
    expect(batch == int(batch) and batch >= 1, "A micro-batch is a whole number of sequences: round what you get.")
    return int(batch), policy
