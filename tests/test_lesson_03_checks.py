"""The checks of lesson 03: right answers of every style pass, each planted wrong answer gets the hint it deserves."""

import math
from collections.abc import Callable
from typing import Any

import numpy
import torch
from checking import Answers, JudgedAnswers
from torch.nn.utils import clip_grad_norm_

from course_utils import TrainingRun, estimate, gpu

# ------------------------------------------------------------------------------------------------------- 03.1: limits


def right_limits(e: int, m: int) -> tuple[float, float, float]:
    bias = 2 ** (e - 1) - 1
    return 2.0**-m, (2 - 2.0**-m) * 2.0**bias, 2.0 ** (1 - bias)


def limits_in_torch(e: int, m: int) -> Any:
    known = {(5, 10): torch.float16, (8, 7): torch.bfloat16, (8, 23): torch.float32}
    if (e, m) not in known:
        return numpy.array(right_limits(e, m))
    found = torch.finfo(known[e, m])
    return found.eps, found.max, found.smallest_normal


def other(place: int, formula: Callable[[int, int], float]) -> Any:
    """The right answer, with another formula for one of its three numbers."""
    return lambda e, m: [formula(e, m) if n == place else one for n, one in enumerate(right_limits(e, m))]


LIMITS = Answers(
    right=[right_limits, limits_in_torch, lambda e, m: list(right_limits(e, m))],
    wrong=[
        (other(0, lambda e, m: 2.0 ** -(m + 1)), "Half of epsilon"),
        (other(0, lambda e, m: 1 + 2.0**-m), "Your epsilon is off for e = 5, m = 10. It depends"),
        (other(1, lambda e, m: 65504.0), "Your largest number is off for e = 8, m = 7"),
        (other(1, lambda e, m: (2 - 2.0**-m) * 2.0**127), "Your bias is 127"),
        (lambda e, m: (2.0**-m, right_limits(e, m)[2], right_limits(e, m)[1]), "The order is epsilon, largest"),
        (other(1, lambda e, m: 2 * right_limits(e, m)[1]), "set aside for infinity"),
        (other(1, lambda e, m: 2.0 ** (2 ** (e - 1))), "*beyond* the largest"),
        (other(1, lambda e, m: 2.0 ** (2 ** (e - 1) - 1)), "a mantissa of zeros"),
        (other(2, lambda e, m: 2.0 ** -(2 ** (e - 1) - 1)), "E = 0, which is for subnormal"),
        (other(2, lambda e, m: right_limits(e, m)[2] * 2.0**-m), "smallest *subnormal*"),
        (other(2, lambda e, m: 2.0**-14), "Your smallest normal number is off"),
        (lambda e, m: (2.0**-m, right_limits(e, m)[1]), "2 values, where 3"),
    ],
)

# ---------------------------------------------------------------------------------------------------- 03.2: read_bits


def reader(
    bias_shift: int = 0, hidden: float = 1.0, subnormal_shift: int = 1, subnormal_hidden: float = 0.0,
    signed: bool = True, special: str = "right", unit: int | None = None, exponent_bits: int | None = None,
) -> Callable[[str, int], float]:  # fmt: skip
    """A reader of bits, right by default, with one thing or another changed."""

    def read(bits: str, e: int) -> float:
        e = exponent_bits or e
        m, bias = len(bits) - 1 - e, 2 ** (e - 1) - 1 + bias_shift
        sign = -1.0 if signed and bits[0] == "1" else 1.0
        exponent, mantissa = int(bits[1 : 1 + e], 2), int(bits[1 + e :], 2) / (unit or 2**m)
        if special != "none" and exponent == 2**e - 1:
            return math.nan if mantissa and special == "right" else sign * math.inf
        if exponent == 0:
            return sign * 2.0 ** (subnormal_shift - bias) * (subnormal_hidden + mantissa)
        return sign * 2.0 ** (exponent - bias) * (hidden + mantissa)

    return read


READ_BITS = Answers(
    right=[reader(), *(lambda bits, e, kind=kind: kind(reader()(bits, e)) for kind in (torch.tensor, numpy.float64))],
    wrong=[
        (reader(signed=False), "The sign of"),
        (reader(hidden=0.0), "a normal number has a hidden 1"),
        (reader(bias_shift=1), "off by a power of two"),
        (reader(unit=1), "Is M divided by 2^m?"),
        (reader(exponent_bits=4), "Cut the text into 1, e and m bits"),
        (reader(subnormal_shift=0), "half of it. Subnormal numbers share the exponent"),
        (reader(subnormal_hidden=1.0), "there is no hidden 1 in front"),
        (reader(subnormal_shift=3), "your value is off. Cut the text"),
        (lambda bits, e: reader()(bits, e) or 0.0, "is one of two zeros"),
        (lambda bits, e: reader()(bits, e) * ("1" in bits[1 : 1 + e]), "is subnormal, and not 0"),
        (reader(special="none"), "This means infinity with a mantissa of 0"),
        (reader(special="infinity"), "This means infinity with a mantissa of 0"),
    ],
)

# ---------------------------------------------------------------------------------------------- 03.3: round_at_random


def by_floor(values: torch.Tensor, step: float, u: torch.Tensor) -> torch.Tensor:
    return torch.floor(values / step + u) * step


def coin(chance: Callable[[torch.Tensor], Any], whole: Any = torch.floor) -> Any:
    """Up with a chance that depends on how far the value is above the whole number below."""

    def answer(values: torch.Tensor, step: float, u: torch.Tensor) -> torch.Tensor:
        below = whole(values / step)
        return step * (below + (u < chance(values / step - below)))

    return answer


def moves_multiples(values: torch.Tensor, step: float, u: torch.Tensor) -> torch.Tensor:
    return torch.where(values == torch.round(values / step) * step, values + step, by_floor(values, step, u))


def below_or_equal(values: torch.Tensor, step: float, u: torch.Tensor) -> torch.Tensor:
    below = torch.floor(values / step)
    return step * (below + (u <= values / step - below))


def dice_of_its_own(values: torch.Tensor, step: float, u: torch.Tensor) -> torch.Tensor:
    u = torch.rand(values.shape, generator=torch.Generator().manual_seed(3))
    return by_floor(values, step, u)


ROUND_AT_RANDOM = Answers(
    right=[
        by_floor,
        coin(lambda fraction: fraction),
        lambda values, step, u: step * torch.ceil(values / step - u),
        lambda values, step, u: torch.from_numpy(numpy.floor(values.numpy() / step + u.numpy()) * step),
    ],
    wrong=[
        (lambda values, step, u: torch.round(values / step) * step, "All results above zero are the same"),
        (lambda values, step, u: torch.floor(values / step + u), "Your results count steps"),
        (lambda values, step, u: values + (u - 0.5) * step, "Not all of your results are multiples"),
        (lambda values, step, u: torch.round(values / step + u) * step, "On average your results are off above zero"),
        (coin(lambda fraction: 0.5), "like a fair coin"),
        (coin(lambda fraction: 1 - fraction), "Reversed: the closer"),
        (coin(lambda fraction: fraction, torch.trunc), "Truncation goes up there"),
        (coin(lambda fraction: fraction**2), "On average your results are off"),
        (lambda values, step, u: by_floor(values, step, torch.rand_like(values)), "u is all the randomness"),
        (moves_multiples, "A multiple of `step` has to stay as it is"),
        (below_or_equal, "also where u is 0"),
        (dice_of_its_own, "Another u gives the same result"),
    ],
)

# --------------------------------------------------------------------------------------------------- 03.4: exact_step


def halves(*mistakes: str, kept: list[torch.Tensor] = []) -> Any:  # noqa: B006
    """A step on masters in two halves, right by default, with one mistake or another."""

    def answer(weights: Any, rests: Any, update: Any) -> None:
        masters = []
        for weight, rest in zip(weights, rests, strict=True):
            upper = weight.detach().view(torch.int16)
            lower = rest.int() if "sign" in mistakes else rest.int() & 0xFFFF
            bits = (upper.int() << (0 if "not shifted" in mistakes else 16)) + lower
            master = weight.detach().float() if "without rest" in mistakes else bits.view(torch.float32)
            gradient = rest if "no gradient" in mistakes else weight.grad
            update(master.bfloat16() if "in bf16" in mistakes else master, gradient)
            masters.append((upper, rest, master.view(torch.int32)))
            if "all at once" not in mistakes:
                store(*masters.pop(), weight)
            kept.extend([master] * ("keeps" in mistakes))
        for upper, rest, bits in masters:
            store(upper, rest, bits, None)

    def store(upper: Any, rest: Any, bits: Any, weight: Any) -> None:
        if "rounds" in mistakes:
            weight.data.copy_(bits.view(torch.float32))
        elif "not stored" not in mistakes:
            upper.copy_(bits >> 16)
        if "difference" in mistakes:
            rest.copy_(bits.view(torch.float32) - upper.view(torch.bfloat16).float())
        elif "no rest" not in mistakes:
            rest.copy_(bits)

    return answer


def rounded_halves(weights: Any, rests: Any, update: Any) -> None:
    """Right as well: weights are rounded, and the rest is negative where they are rounded up."""
    for weight, rest in zip(weights, rests, strict=True):
        upper = weight.data.view(torch.int16)
        bits = upper.to(torch.int32) * 65536 + rest
        update(bits.view(torch.float32), weight.grad)
        rest.copy_(bits)
        upper.copy_((bits - rest) >> 16)


@torch.no_grad()
def halves_of_bytes(weights: Any, rests: Any, update: Any) -> list[Any]:
    """Right as well: a master is two int16 next to each other."""
    for place, weight in enumerate(weights):
        pairs = torch.stack([rests[place], weight.view(torch.int16)], dim=-1)
        master = pairs.view(torch.float32).squeeze(-1)
        update(master, weight.grad.float())
        rests[place].copy_(pairs[..., 0])
        weight.copy_(pairs[..., 1].view(torch.bfloat16))
    return rests


@torch.no_grad()
def cut_floats(weights: Any, rests: Any, update: Any) -> None:
    """Right as well: the weight gets a float whose lower bits are already 0, so nothing is rounded."""
    for weight, rest in zip(weights, rests, strict=True):
        bits = weight.float().view(torch.int32) | (rest.int() & 0xFFFF)
        update(bits.view(torch.float32), weight.grad)
        weight.copy_((bits & -65536).view(torch.float32))
        rest.copy_(bits & 0xFFFF)


@torch.no_grad()
def new_memory(weights: Any, rests: Any, update: Any) -> None:
    for weight, rest in zip(weights, rests, strict=True):
        bits = weight.float().view(torch.int32) | (rest.int() & 0xFFFF)
        update(bits.view(torch.float32), weight.grad)
        weight.data = (bits >> 16).short().view(torch.bfloat16)
        rest.copy_(bits)


def new_lists(weights: Any, rests: Any, update: Any) -> None:
    for place, weight in enumerate(weights):
        master = weight.detach().float()
        update(master, weight.grad)
        weights[place], rests[place] = master.bfloat16(), (master.view(torch.int32) & 0xFFFF).short()


def watched_halves(weights: Any, rests: Any, update: Any) -> None:
    for weight, _ in zip(weights, rests, strict=True):
        master = weight.detach().float()
        update(master, weight.grad)
        weight.copy_(master)


@torch.no_grad()
def as_numbers(weights: Any, rests: Any, update: Any) -> None:
    for weight, rest in zip(weights, rests, strict=True):
        bits = weight.to(torch.int32) << 16 | (rest.int() & 0xFFFF)
        update(bits.view(torch.float32), weight.grad)


@torch.no_grad()
def stored_as_numbers(weights: Any, rests: Any, update: Any) -> None:
    for weight, rest in zip(weights, rests, strict=True):
        bits = weight.float().view(torch.int32) | (rest.int() & 0xFFFF)
        update(bits.view(torch.float32), weight.grad)
        weight.copy_(bits >> 16)
        rest.copy_(bits)


@torch.no_grad()
def other_halves(weights: Any, rests: Any, update: Any) -> None:
    for weight, rest in zip(weights, rests, strict=True):
        bits = weight.float().view(torch.int32) | (rest.int() & 0xFFFF)
        update(bits.view(torch.float32), weight.grad)
        weight.view(torch.int16).copy_(bits)
        rest.copy_(bits >> 16)


@torch.no_grad()
def by_slices(weights: Any, rests: Any, update: Any) -> None:
    """Right as well: slices of everything are assigned to."""
    for weight, rest in zip(weights, rests, strict=True):
        bits = weight.float().view(torch.int32) | (rest.int() & 0xFFFF)
        update(bits.view(torch.float32), weight.grad)
        weight.view(torch.int16)[:] = (bits >> 16).to(torch.int16)
        rest[:] = (bits & 0xFFFF).to(torch.int16)


EXACT_STEP = Answers(
    right=[halves(), rounded_halves, halves_of_bytes, cut_floats, by_slices],
    wrong=[
        (halves("sign"), "Where a rest is negative, the upper half is wrong"),
        (halves("rounds"), "Some weights were rounded up, but not their rests"),
        (halves("no rest"), "All rests are still 0 after a step"),
        (halves("difference"), "All rests are still 0 after a step"),
        (halves("without rest"), "You hand over the weight without its rest"),
        (halves("not shifted"), "compare its bits with"),
        (halves("in bf16"), "Hand it a float32 tensor"),
        (halves("no gradient"), "another gradient than the weight's own"),
        (halves("not stored"), "A weight has not changed"),
        (as_numbers, "You convert a weight to an integer"),
        (stored_as_numbers, "A weight holds its bits as a number"),
        (other_halves, "A weight is not its new master's upper half"),
        (halves("all at once"), "Several masters exist at once"),
        (halves("keeps"), "Something is left after the step"),
        (new_lists, "A weight or a rest is a new tensor"),
        (new_memory, "write into the memory that it has"),
        (watched_halves, "use torch.no_grad()"),
        (lambda weights, rests, update: None, "not called once for every weight"),
        (lambda weights, rests, update: [halves()(weights, rests, update) for _ in range(2)], "Call it once for each"),
        (
            lambda weights, rests, update: update(weights[0].detach().float().view(-1, 1), weights[0].grad),
            "of the weight's shape",
        ),
    ],
)

# ---------------------------------------------------------------------------------------------------- 03.5: good_step


def step_with(*mistakes: str, factor: float = 1.0) -> Any:
    """A training step, right by default, with one mistake or another."""

    def answer(weights: Any, masters: Any, optimizer: Any, loss: Any, scale: float) -> Any:
        (loss if "not scaled" in mistakes else loss * scale).backward()
        divisor = 1.0 if {"divides last", "never divides"} & {*mistakes} else scale / factor
        for weight, master in zip(weights, masters, strict=True):
            wide, narrow = weight.grad.float() / divisor, (weight.grad / divisor).float()
            master.grad = narrow if "divides in fp16" in mistakes else wide
            weight.grad = weight.grad if "leaves weights'" in mistakes else None
        checked = masters[-1:] if "looks at the last" in mistakes else masters
        checked = masters[:1] if "looks at the first" in mistakes else checked
        finite = all(bool(master.grad.isfinite().all()) for master in checked)
        finite = finite or ("looks for any" in mistakes and all(bool(one.grad.isfinite().any()) for one in masters))
        finite = finite or ("looks for infinity" in mistakes and not any(bool(m.grad.isinf().any()) for m in masters))
        for master in masters if "steps on zeros" in mistakes and not finite else ():
            master.grad = torch.zeros_like(master)
        for group in [[master] for master in masters] if "clips each" in mistakes else [masters]:
            clip_grad_norm_(group, math.inf if "no clipping" in mistakes else 1.0)
        for master in masters if "divides last" in mistakes else ():
            master.grad /= scale
        if (finite or {"does not look", "steps on zeros"} & {*mistakes}) and "no step" not in mistakes:
            optimizer.step()
        if (finite and "no copy" not in mistakes) or "copies infinities" in mistakes:
            with torch.no_grad():
                for weight, master in zip(weights, masters, strict=True):
                    copied = master * (2 if "copies twice" in mistakes else 1)
                    weight.copy_(copied if finite else torch.full_like(master, math.inf))
        for master in () if "leaves masters'" in mistakes else masters:
            master.grad = None
        return ("says always" in mistakes) or (finite and "says never" not in mistakes)

    return answer


def with_fp32_weights(weights: Any, masters: Any, optimizer: Any, loss: Any, scale: float) -> Any:
    taken = step_with()(weights, masters, optimizer, loss, scale)
    for weight, master in zip(weights, masters, strict=True):
        weight.data = master.data
    return taken


def clips_scaled(weights: Any, masters: Any, optimizer: Any, loss: Any, scale: float) -> bool:
    """Right as well: clips the scaled gradients at the scale, zeros are left in place of gradients."""
    loss.mul(scale).backward()
    for place in range(len(weights)):
        masters[place].grad = weights[place].grad.to(torch.float32)
        weights[place].grad.zero_()
    taken = torch.isfinite(clip_grad_norm_(masters, scale)).item()
    for master in masters:
        master.grad.mul_(1 / scale)
    if taken:
        optimizer.step()
        for weight, master in zip(weights, masters, strict=True):
            weight.data.copy_(master.data)
    optimizer.zero_grad(set_to_none=False)
    return bool(taken)


def copies_with_autograd(weights: Any, masters: Any, optimizer: Any, loss: Any, scale: float) -> bool:
    for weight, master in zip(weights, masters, strict=True):
        weight.copy_(master)
    return True


GOOD_STEP = Answers(
    right=[step_with(), clips_scaled, lambda **given: numpy.bool_(clips_scaled(**given))],
    wrong=[
        (step_with("no step"), "who calls `optimizer.step()`"),
        (step_with("never divides"), "still scaled when the optimizer"),
        (step_with("not scaled"), "were they ever multiplied"),
        (step_with("divides last"), "so small ones are clipped too. Divide first."),
        (step_with("divides in fp16"), "Tiny gradients get lost"),
        (step_with("no clipping"), "Large gradients are not clipped"),
        (step_with("clips each"), "Large gradients are not clipped"),
        (step_with("does not look"), "A step with infinite gradients changes the masters"),
        (step_with("copies infinities"), "look at a step with infinite gradients"),
        (step_with("looks at the last"), "You step although one gradient is infinite"),
        (step_with("looks at the first"), "You step although one gradient is infinite"),
        (step_with("looks for any"), "You step although one gradient is infinite"),
        (step_with("looks for infinity"), "You step although a gradient is NaN"),
        (step_with("steps on zeros"), "Zeros are gradients, too"),
        (with_fp32_weights, "no longer fp16"),
        (step_with("says always"), "but your function says that it took a step"),
        (step_with("says never"), "look at a step with small gradients"),
        (step_with("no copy"), "the fp16 weights do not. The next forward"),
        (step_with("copies twice"), "look at a step with small gradients"),
        (step_with("leaves weights'"), "Gradients are left behind"),
        (step_with("leaves masters'"), "Gradients are left behind"),
        (step_with(factor=0.75), "look at a step with small gradients"),
        (copies_with_autograd, "use torch.no_grad()"),
    ],
)

# --------------------------------------------------------------------------------------------- 03.6: choose_precision


def chooser(
    pick: Any = min, memory: Callable[[str], float] = lambda card: gpu(card).memory, ranks: int = 3,
    together: bool = False, none: Any = "",
) -> Any:  # fmt: skip
    """A choice by ranks, right by default."""

    def answer(card: str, run: TrainingRun) -> Any:
        choices = [["amp-bf16", "bf16-master-fp32grad"], ["bf16-master"], ["bf16"]]
        if not gpu(card).has_bf16:
            choices, run = [["amp-fp16"], ["fp16-master"]], run.replace(precision="amp-fp16", attention="efficient")
        for names in [[name for rank in choices for name in rank]] if together else choices[:ranks]:
            peaks = {name: estimate(run.replace(precision=name)).total for name in names}
            fitting = {name: peak for name, peak in peaks.items() if peak <= memory(card)}
            if fitting:
                return pick(fitting, key=fitting.__getitem__)
        return none

    return answer


def in_flat_order(card: str, run: TrainingRun) -> str:
    """One sorted list of (rank, peak, name)."""
    bf16 = {"amp-bf16": 1, "bf16-master-fp32grad": 1, "bf16-master": 2, "bf16": 3}
    ranks = bf16 if gpu(card).has_bf16 else {"amp-fp16": 1, "fp16-master": 2}
    attention = run.attention if gpu(card).has_bf16 else "efficient"
    peaks = {name: estimate(run.replace(precision=name, attention=attention)).total for name in ranks}
    order = sorted((rank, peaks[name], name) for name, rank in ranks.items())
    return next((name for _, peak, name in order if not peak > gpu(card).memory), "")


CHOOSE_PRECISION = Answers(
    right=[chooser(), in_flat_order, lambda card, run: numpy.str_(in_flat_order(card, run))],
    wrong=[
        (chooser(together=True), "You take the lowest peak of all"),
        (chooser(pick=lambda peaks, key: next(iter(peaks))), "You take autocast wherever it fits"),
        (chooser(ranks=1), "You give up after the first rank"),
        (chooser(ranks=2), "There is a better choice"),
        (chooser(none="bf16"), "has no bf16, but you choose 'bf16'"),
        (chooser(memory=lambda card: math.inf), "does not fit"),
        (lambda card, run: "fp32", "not among the precisions"),
    ],
)

ANSWERS = {f"03.{n}": one for n, one in enumerate(
    (LIMITS, READ_BITS, ROUND_AT_RANDOM, EXACT_STEP, GOOD_STEP, CHOOSE_PRECISION), 1
)}  # fmt: skip


class TestAnswers(JudgedAnswers):
    answers = ANSWERS
