"""Checks of the exercises of lesson 06, "Recomputation": each names the misconception, never the answer."""

import math
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any

import torch

from course_utils.estimating.exact.activations import activation_bytes
from course_utils.interactive.feedback import (
    CheckFailed,
    NotSolved,
    alike,
    call,
    call_or_none,
    divisors,
    entries,
    exercise,
    expect,
    fail,
    handed,
    of_kind,
)
from course_utils.measurement import Measurement

from . import schedules
from .labs import (
    CHEAPEST_CASES,
    CHEAPEST_MISTAKES,
    DROPOUT,
    GROUPS,
    KNOWN,
    POLICIES,
    SECRET_POLICIES,
    SECRETS,
    TEETH,
    Chain,
    Ran,
    added_right,
    batch_if,
    case,
    chain,
    cheapest_right,
    measured,
    rerun_in_groups,
    run_in_groups,
)
from .policies import added_percent

__all__ = [
    "KNOWN",
    "POLICIES",
    "SECRET_POLICIES",
    "added",
    "added_percent",
    "best_interval",
    "cheapest",
    "cost",
    "example",
    "in_groups",
    "infer",
    "mystery",
    "stretches",
]

# ---------------------------------------------------------------------------------------------------------- 06.1: cost

COST_CASES = ((12, 3), (48, 4), (64, 8), (10, 10), (10, 1), (60, 5))

MEMORY_MISTAKES: tuple[tuple[Callable[[int, int], float], str], ...] = (
    (lambda n, k: n // k, "Those are the checkpoints alone. In backward a stretch runs again and leaves its values."),
    (lambda n, k: k, "That is one stretch alone. The checkpoints are kept all the while."),
    (lambda n, k: n, "That is a chain that keeps all. What do the checkpoints save?"),
    (
        lambda n, k: n + n // k,
        "You let every stretch keep its values. Each is done with before the next one runs again.",
    ),
    (lambda n, k: n // k - 1 + k, "One checkpoint is missing: the first node's input is kept, too."),
    (lambda n, k: 2 * math.sqrt(n), "That holds for the best k alone. The question is about any k."),
)
FORWARD_MISTAKES: tuple[tuple[Callable[[int, int], float], str], ...] = (
    (lambda n, k: n, "That is one forward pass: either the first one or the repetition is missing."),
    (lambda n, k: 3 * n, "You seem to count backward too. `forwards` counts runs of f alone."),
    (lambda n, k: n + k, "You run one stretch again. All stretches have to, each when backward comes to it."),
    (lambda n, k: n + n // k, "You run one node of each stretch again. All of them have to leave their values."),
    (lambda n, k: n + n * (n + 1) // 2,
     "That is what keeping nothing costs. From a checkpoint, a stretch alone runs again."),
    (lambda n, k: n + n // k * (k * (k + 1) // 2),
     "You run a stretch again for each of its nodes. Once leaves all values."),
)  # fmt: skip


@exercise("06.1", "Memory falls and rises with k, the work stays: one more forward.")
def cost(answer: Any) -> None:
    """`answer(n, k)` is a dictionary: memory (values kept at most) and forwards (runs of f)."""
    got = [entries(call(answer, n=n, k=k, returns=Mapping), ("memory", "forwards")) for n, k in COST_CASES]
    for name, right, mistakes in (
        ("memory", lambda n, k: n // k + k, MEMORY_MISTAKES),
        ("forwards", lambda n, k: 2 * n, FORWARD_MISTAKES),
    ):
        values = [both[name] for both in got]
        if alike(values, (right(*case) for case in COST_CASES)):
            continue
        for mistaken, message in mistakes:
            expect(not alike(values, (mistaken(*case) for case in COST_CASES)), message)
        fail(f"{name} is off. Draw a chain of 6 nodes with k = 2 and count.")


# ------------------------------------------------------------------------------------------------- 06.2: best_interval

INTERVAL_CASES = ((64, 1), (48, 1), (48, 17), (100, 4), (96, 57), (36, 0.25), (60, 2.4), (72, 1), (7, 3), (10, 0.918))


@exercise("06.2", "Tried, not assumed: the square root belongs to equal nodes alone.")
def best_interval(answer: Any) -> None:
    """`answer(n, c)` is the k that divides n with the least n/k + c·k."""
    got = [call(answer, n=n, c=c) for n, c in INTERVAL_CASES]
    if got == [schedules.best_interval(n, c) for n, c in INTERVAL_CASES]:
        return
    for (n, _), k in zip(INTERVAL_CASES, got, strict=True):
        expect(k >= 1 and n % k == 0, f"Your k for n = {n} does not divide n: stretches would differ in length.")
    mistakes = {
        "You leave c out: that is the best k for nodes that keep no more than a checkpoint.": _of_equal_nodes,
        "You took the largest of several equally good k. The smallest was asked for.": _largest_tie,
        "c is on the wrong side: it belongs to the stretch, c·k, not to the checkpoints.": _swapped,
        "That is the k that needs the most. Which needs the least?": _worst,
        "You rounded √(n/c) to a divisor. The sum is not symmetric: compare what each k really needs.": _rounded,
    }
    for message, mistaken in mistakes.items():
        expect(got != [mistaken(n, c) for n, c in INTERVAL_CASES], message)
    fail("Some k is not the best. Try every k that divides n, and work out n/k + c·k for each.")


def _of_equal_nodes(n: int, _: float) -> int:
    return schedules.best_interval(n)


def _largest_tie(n: int, c: float) -> int:
    return min(reversed(divisors(n)), key=lambda k: n / k + c * k)


def _swapped(n: int, c: float) -> int:
    return min(divisors(n), key=lambda k: c * n / k + k)


def _worst(n: int, c: float) -> int:
    return max(divisors(n), key=lambda k: n / k + c * k)


def _rounded(n: int, c: float) -> int:
    return min(divisors(n), key=lambda k: abs(k - math.sqrt(n / c)))


# ----------------------------------------------------------------------------------------------------- 06.3: in_groups


@exercise("06.3", "Same output, same gradients, and nothing kept but a checkpoint for each group.")
def in_groups(answer: Any) -> None:
    """`answer(blocks, x, k)` runs x through all blocks, recomputing them in groups of k."""
    for count, k in GROUPS:
        right = run_in_groups(chain(count), k)
        got = _ran(answer, chain(count), k)
        expect(
            got.output.shape == right.output.shape and torch.allclose(got.output, right.output, atol=1e-6),
            "The output is not what the blocks compute one after the other: is each block run, the last ones too, "
            "and in order?",
        )
        reached = got.gradients[0] is not None
        expect(reached, "No gradient reaches x, so nothing in front of these blocks would learn. Who cuts the graph?")
        expect(len(got.runs) >= 2 * count, _too_few(len(got.runs), count))
        expect(
            _same_gradients(got, right),
            "The output is right and the gradients are not. Your function runs again in backward, when the loop is "
            "over: what do its variables refer to by then?",
        )
        expect(
            got.kept == right.kept,
            f"With {count} blocks and k = {k}, the number of checkpoints is not one for each group of k.",
        )
        _expect_groups(got.runs[count:], count, k)
    _expect_same_masks(answer)


def _same_gradients(one: Ran, other: Ran) -> bool:
    pairs = zip(one.gradients, other.gradients, strict=True)
    return all(a is not None and b is not None and torch.allclose(a, b, atol=1e-5) for a, b in pairs)


def _expect_groups(again: list[int], count: int, k: int) -> None:
    """CheckFailed unless backward has run the blocks `again` in groups of k from the first block on."""
    whole, rest = divmod(count, k)
    expect(
        not rest or again != rerun_in_groups([rest, *[k] * whole]),
        f"With {count} blocks and k = {k}, your smaller group is the first one. Begin with a whole group of k: what is "
        "left over comes last.",
    )
    expect(
        again == rerun_in_groups([*[k] * whole, *[rest] * bool(rest)]),
        f"With {count} blocks and k = {k}, the number of checkpoints is right, but they are in other places: every "
        "group but the last has k blocks.",
    )


def _expect_same_masks(answer: Any) -> None:
    """CheckFailed unless the second forward pass draws the same masks of dropout as the first."""
    count, k = GROUPS[0]
    got, kept = _ran(answer, chain(count, DROPOUT), k), run_in_groups(chain(count, DROPOUT), k, _nothing_again)
    expect(
        torch.allclose(got.output, kept.output, atol=1e-6),
        "Right so far, but with dropout in the blocks your output is another. Seed nothing, and leave the blocks in "
        "training mode.",
    )
    expect(
        _same_gradients(got, kept),
        "Right so far, but not with dropout in the blocks: the second forward draws other masks than the first, so the "
        "gradients are those of another network. What do you tell `checkpoint` about the random state?",
    )


def _nothing_again(blocks: Chain, x: torch.Tensor, _: int) -> torch.Tensor:
    for block in blocks:
        x = block(x)
    return x


def _ran(answer: Any, blocks: Chain, k: int) -> Ran:
    try:
        return run_in_groups(blocks, k, lambda *arguments: call(answer, *arguments, returns=torch.Tensor))
    except (CheckFailed, NotSolved):
        raise
    except Exception as error:  # what backward raises, because of what the learner's function left for it
        again = "Recomputed values" in str(error) or "different number of tensors" in str(error)
        raise CheckFailed(
            "Backward ran something else than forward. Your function runs again when the loop is over: what do its "
            "variables refer to by then?"
            if again
            else f"Backward through your output raised {type(error).__name__}: {error}"
        ) from error


def _too_few(called: int, count: int) -> str:
    if called == count:
        return "Nothing is run again: every block keeps all that it computes. Where is `checkpoint`?"
    return "Some blocks run again, others do not: does the last, smaller group go through `checkpoint`, too?"


# --------------------------------------------------------------------------------------------------------- 06.4: added

ADDED_CASES = ((1024, 768, 12, 50257), (2048, 12288, 96, 50257), (4096, 1024, 4, 1000))

FULL_MISTAKES: tuple[tuple[Callable[..., float], str], ...] = (
    (lambda s, h, L, V: 100 / 3, "A third exactly: that runs the head again, too, which lies outside the blocks."),
    (lambda s, h, L, V: 100.0, "You run the step's whole forward against itself. The step has backward, too."),
    (
        lambda s, h, L, V: 3 * added_right(s, h, L, V)["full"],
        "You divide by forward alone. The step has backward, too.",
    ),
    (lambda s, h, L, V: added_right(s, h, L, V)["full"] / 100, "Those are parts of 1. Percent were asked for."),
    (lambda s, h, L, V: 1.5 * added_right(s, h, L, V)["full"], "Backward takes twice forward's FLOPs, not once."),
    (lambda s, h, L, V: added_right(s, h, 1, V)["full"], "You count one block and one head. The model has L blocks."),
)
CORE_MISTAKES: tuple[tuple[Callable[..., float], str], ...] = (
    (lambda s, h, L, V: 3 * added_right(s, h, L, V)["core"],
     "Three times too much, as in the paper's eq. 8: the core runs *forward* once more, its backward once as ever."),
    (lambda s, h, L, V: added_right(s, h, L, V)["core"] / 100, "Those are parts of 1. Percent were asked for."),
    (lambda s, h, L, V: added_right(s, h, L, V)["core"] / 2, "One product is missing: q·kᵀ and weights·v run again."),
    (lambda s, h, L, V: added_right(s, h, 1, V)["core"], "You count one block and one head. The model has L blocks."),
)  # fmt: skip


@exercise("06.4", "One forward against three: a third of the blocks' share, and far less for the core.")
def added(answer: Any) -> None:
    """`answer(s, h, L, V)` is a dictionary: full and core, percent of the step's FLOPs."""
    got = [entries(call(answer, s=s, h=h, L=L, V=V, returns=Mapping), ("full", "core")) for s, h, L, V in ADDED_CASES]
    for name, mistakes in (("full", FULL_MISTAKES), ("core", CORE_MISTAKES)):
        values = [both[name] for both in got]
        if alike(values, (added_right(*case)[name] for case in ADDED_CASES), 1e-3):
            continue
        for mistaken, message in mistakes:
            expect(not alike(values, (mistaken(*case) for case in ADDED_CASES), 1e-3), message)
        fail(f"{name} is off: what runs again, divided by forward and backward of all blocks and the head, times 100.")


# ------------------------------------------------------------------------------------------------------ 06.5: cheapest


@exercise("06.5", "As much recomputation as the card makes you do, and no more.")
def cheapest(answer: Any) -> None:
    """`answer(run, card)` is the policy that fits with the least arithmetic, then the least memory; or None."""
    got = [call_or_none(answer, run=run, card=card, returns=str) for run, card in CHEAPEST_CASES]
    right = [cheapest_right(run, card) for run, card in CHEAPEST_CASES]
    if got == right:
        return
    unknown = [policy for policy in got if policy is not None and policy not in POLICIES]
    expect(not unknown, f"{', '.join(map(repr, unknown))}: not one of POLICIES.")
    for message, mistaken in CHEAPEST_MISTAKES.items():
        expect(got != [mistaken(run, card) for run, card in CHEAPEST_CASES], message)
    for policy, wanted, (_, card) in zip(got, right, CHEAPEST_CASES, strict=True):
        if policy is not None and wanted is None:
            fail(f"On the {card} you choose a policy that does not fit: none of them does there.")
        if policy is None and wanted is not None:
            fail(f"On the {card} you find nothing, but something fits. Its memory is `gpu(card).memory`, in bytes.")
    fail("A policy that fits, but another that fits adds less arithmetic, or as much with a lower peak.")


# ----------------------------------------------------------------------------------------------------- 06.6: stretches

BLOCKS = 12


def example() -> Measurement:
    """A measurement to look at, without its tensors' names."""
    return measured("every-4")


@exercise("06.6", "Read off memory alone: what was run again, and in how many stretches.")
def stretches(answer: Any) -> None:
    """`answer(measurement)` is how many stretches ran again in backward of the last step."""
    got = [call(answer, measurement=handed(measured(policy))) for policy in TEETH]
    right = [TEETH[policy] for policy in TEETH]
    if got == right:
        return
    expect(len(set(got)) > 1, "You give the same answer whatever the measurement says. The hidden runs differ.")
    mistakes = {
        "You count blocks in a stretch. How many stretches are there?": lambda teeth: BLOCKS // teeth if teeth else 0,
        "One tooth is missing: does your loop end before the last is counted?": lambda teeth: max(teeth - 1, 0),
        "One too many: forward's climb is no recomputation.": lambda teeth: teeth + 1,
        "You count the teeth of all steps. The last one was asked for.": lambda teeth: 2 * teeth,
    }
    for message, mistaken in mistakes.items():
        expect(got != [mistaken(teeth) for teeth in right], message)
    expect(got[right.index(0)] == 0, "You find recomputation where there is none: do activations ever rise there?")
    expect(
        max(got) <= BLOCKS,
        "More stretches than blocks: small tensors come and go within a tooth. Count only climbs of about its height.",
    )
    fail("The count is off somewhere: plot the activations in backward, and count the teeth by eye first.")


# --------------------------------------------------------------------------------------------------------- 06.7: infer


def mystery(seed: int) -> Measurement:
    """One of the hidden runs, by any whole number: the timeline of its activations, and nothing else."""
    return case(1 + (seed - 1) % len(SECRETS))


@exercise("06.7", "Both secrets of every hidden run, from one curve.")
def infer(answer: Any) -> None:
    """`answer(measurement)` is {"micro_batch": b, "recompute": policy} of a run like KNOWN."""
    answers = {number: _inferred(answer, case(number)) for number in SECRETS}
    policies = {number: policy for number, (_, policy) in answers.items()}
    right = {number: policy for number, (_, policy) in SECRETS.items()}
    expect(len(set(policies.values())) > 1, "You name the same policy for every curve. The hidden runs differ.")
    if policies != right:
        _explain_policies(policies, right)
    for number, (batch, _) in answers.items():
        _explain_batch(number, batch)


def _inferred(answer: Any, measurement: Measurement) -> tuple[int, str]:
    got = entries(
        call(answer, measurement=handed(measurement), returns=Mapping), ("micro_batch", "recompute"), (Real, str)
    )
    policy = of_kind(got["recompute"], str, "recompute is")
    expect(policy in SECRET_POLICIES, f"{policy!r}: not one of {', '.join(SECRET_POLICIES)}.")
    batch = of_kind(got["micro_batch"], Real, "micro_batch is")
    expect(batch == int(batch) and batch >= 1, "A micro-batch is a whole number of sequences: round what you get.")
    return int(batch), policy


SWAPPED = {"every-2": "every-3", "every-3": "every-2"}


def _explain_policies(got: Mapping[int, str], right: Mapping[int, str]) -> None:
    """CheckFailed in the words that a wrong list of policies deserves."""
    turned = {number: SWAPPED.get(policy, policy) for number, policy in right.items()}
    expect(got != turned, "Turned round: three teeth of two blocks each, or two teeth of three blocks each?")
    for number, policy in right.items():
        if (got[number] == "none") != (policy == "none"):
            fail(f"mystery({number}): does the curve ever climb between the beginning of backward and its end?")
    fail("Who recomputes is right, but not in what stretches: the model has 6 blocks; count the climbs in backward.")


def _explain_batch(number: int, batch: int) -> None:
    wanted, policy = SECRETS[number]
    if batch == wanted:
        return
    expect(
        policy == "none" or batch != batch_if("none", case(number)),
        f"mystery({number}): you divide as if everything were kept, but its forward keeps checkpoints.",
    )
    expect(
        abs(batch - wanted) > 1,
        f"mystery({number}): off by one sequence. Round to the nearest, and take the end of forward, before the loss.",
    )
    peak = max(case(number).timeline.totals())
    by_peak = round(peak / activation_bytes(KNOWN.replace(recompute=policy)))
    expect(batch != by_peak, f"mystery({number}): that is from the highest point. There the loss stands on top.")
    fail(f"mystery({number}): the policy is right, the micro-batch is off. What does one sequence keep under it?")
