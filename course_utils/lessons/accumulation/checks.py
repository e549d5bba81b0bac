"""Checks of lessons 08 and 09: each names the misconception, never the answer."""

import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial, reduce
from numbers import Real
from typing import Any

import torch
from torch import nn

from ...interactive.feedback import Mistakes, alike, call, exercise, expect, fail, of_kind, recognized
from ..shared.judging import alive_during, forward_backward, same, seeded
from ..shared.language_model import batches, language_model, vocabulary
from .micro_batches import IGNORED, MicroBatch, mean_loss

# --------------------------------------------------------------------------------------------------
# 08.1: train_pass
WORDS = 7

# real tokens of each micro-batch, and how many make a group
STREAMS: dict[str, tuple[tuple[int, ...], int]] = {
    "lengths that differ": ((4, 60, 17, 33, 9, 28, 71, 12, 40, 6), 4),
    "one incomplete group": ((50, 7, 21), 8),
    "a micro-batch of padding": ((0, 40, 25, 11, 30, 0, 19), 3),
    "an empty loader": ((), 4),
    "a group of padding": ((20, 31, 0, 0, 45), 2),
    "padding at the end": ((20, 31, 9, 0), 3),
    "a group of padding at the end": ((20, 31, 0, 0), 2),
}
Weigh = Callable[[MicroBatch, Sequence[MicroBatch], int], float]  # a micro-batch's weight in its group, and k


def micro_batch(real: int) -> MicroBatch:
    """Token ids and targets of three sequences, of which `real` tokens count and the rest is padding."""
    length = real // 2 + 4
    dice = torch.Generator().manual_seed(real)
    tokens, targets = torch.randint(WORDS, (2, 3, length), generator=dice)
    # counted from position to position, so that the three sequences have about as many real tokens each
    places = torch.arange(3 * length).reshape(length, 3).T
    return tokens, targets.masked_fill(real <= places, IGNORED)


class Bigrams(nn.Module):
    """A table in fp64 whose dropout depends on the micro-batch alone; it notes what a loop does with it."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(
            torch.linspace(-1, 1, WORDS * WORDS, dtype=torch.float64).reshape(WORDS, WORDS)
        )
        self.unused = nn.Parameter(torch.ones(3))
        self.handed: list[weakref.ref[torch.Tensor]] = []  # the tokens of all micro-batches so far
        self.alive = 0  # the most of them that were alive in a forward
        self.steps = 0
        self.begins = False  # the next forward is the first of its group
        self.dirty = False  # a group began with the gradients of the one before
        self.used = True  # the last micro-batch went forward, or is padding
        self.ahead = False  # a micro-batch was taken before the last one was used

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.alive = max(self.alive, sum(one() is not None for one in self.handed))
        self.dirty |= self.begins and self.table.grad is not None and bool(self.table.grad.any())
        self.begins = False
        self.used = True
        with seeded(int(tokens.sum())):
            return nn.functional.dropout(self.table[tokens], 0.2)

    def stream(self, counts: Sequence[int]) -> Iterator[MicroBatch]:
        """Hand out each micro-batch once, and remember which ones somebody still holds."""
        for real in counts:
            part = micro_batch(real)
            self.handed.append(weakref.ref(part[0]))
            self.used = not real
            yield part
            del part  # else it would live until the next one is made
            self.ahead |= not self.used

    def stepped(self, *_: Any) -> None:
        self.begins = True
        self.steps += 1


def passed(loop: Callable[..., Any], counts: Sequence[int], k: int) -> tuple[Bigrams, Any, int]:
    """The model after two passes, as two epochs make, what the last one returned, and the peak in bytes."""
    model = Bigrams()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    optimizer.register_step_post_hook(model.stepped)
    seen = alive_during(lambda: [loop(model, optimizer, model.stream(counts), k) for _ in range(2)])
    return model, seen.result[-1], seen.peak


def real_tokens(*parts: MicroBatch) -> int:
    return sum(int((targets != IGNORED).sum()) for _, targets in parts)


def _share(part: MicroBatch, group: Sequence[MicroBatch], _: int) -> float:
    return real_tokens(part) / real_tokens(*group)


def looking_ahead(
    model: Bigrams,
    optimizer: torch.optim.Optimizer,
    loader: Iterator[MicroBatch],
    k: int,
    weigh: Weigh = _share,
) -> list[float]:
    """A pass that knows all its micro-batches beforehand; a mean loss counts by its weight in its group."""
    losses = []
    parts = list(loader)
    for group in (parts[first : first + k] for first in range(0, len(parts), k)):
        if real_tokens(*group):
            weighed = [mean_loss(model, part) * weigh(part, group, k) for part in group if real_tokens(part)]
            loss = torch.stack(weighed).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


def _last_alone(part: MicroBatch, group: Sequence[MicroBatch], k: int) -> float:
    return _share(part, group, k) if part is group[-1] else 0.0


PASS_MISTAKES: dict[str, tuple[Weigh, ...]] = {  # what learners make of a micro-batch's weight, by their hint
    "The parameters have not moved: who calls `optimizer.step()`?": (lambda *_: 0,),
    "You take a mean of means: a token of a short micro-batch counts more than one of a long micro-batch.": (
        lambda part, group, k: 1 / len(group),
        lambda part, group, k: 1 / k,
    ),
    "You add up losses and never divide: your step grows with the number of tokens.": (
        lambda part, *_: real_tokens(part),
        lambda *_: 1,
    ),
    "You divide by padding, too. How many tokens have a target?": (
        lambda part, group, _: real_tokens(part) / sum(y.numel() for _, y in group),
    ),
    "You divide by the number of micro-batches. How many tokens are in this sum?": (
        lambda part, group, _: real_tokens(part) / len(group),
    ),
    "You call zero_grad within a group: that throws away the sum so far.": (_last_alone,),
}
STREAM = "The loader is a stream: it hands out one micro-batch at a time, and cannot say how many there are."
UNUSED = {"'NoneType'": "A weight that no loss has used has no gradient: its `.grad` is None."}
PASS_HINTS = {"has no len()": STREAM, "not subscriptable": STREAM, **UNUSED}


@exercise(
    "08.1",
    "Every token counts once, one micro-batch at a time.",
    "Seven streams run, with two epochs each: this takes up to ten seconds.",
)
def train_pass(answer: Any) -> None:
    """`answer(model, optimizer, loader, k)` steps per k micro-batches and returns each step's mean loss."""
    asked = partial(call, answer, returns=(list, tuple), may_change=range(4), hints=PASS_HINTS)
    held = 0
    for name, (counts, k) in STREAMS.items():
        model, losses, _ = passed(asked, counts, k)
        right, means, _ = passed(looking_ahead, counts, k)
        nan = "NaN in the weights. A mean over no token at all is 0/0: where do you divide?"
        expect(not model.table.isnan().any(), f"With {name}: {nan}")
        moved = "You step on a group without real tokens. With momentum, even zeros move the weights."
        expect(model.steps <= right.steps or "padding" not in name, f"With {name}: {moved}")
        none = f"With {name}: your list has a number for a group that took no step."
        expect(len(losses) <= len(means) or 2 * len(losses) <= model.steps, none)
        steps = "A step takes k micro-batches, also those of padding, or fewer at the end of the stream."
        short = f"With {name}: your list has length {len(losses)}, not one number for each step."
        expect(len(losses) == len(means), f"{short} {steps}")
        if not same([model.table], [right.table]):
            expect(not model.dirty, "The previous group's gradients are still in `.grad`: who clears them?")
            for message, weighs in PASS_MISTAKES.items():
                tables = [passed(partial(looking_ahead, weigh=weigh), counts, k)[0].table for weigh in weighs]
                expect(not any(same([table], [model.table]) for table in tables), message)
            fail(
                f"With {name}: the weights end elsewhere. "
                "Do you step on the mean over all real tokens of the group?"
            )
        for one in losses:
            graph = getattr(one, "requires_grad", False)
            expect(not graph, "You return a loss with its graph: use `.item()`.")
        mine = [float(of_kind(one, Real, "In your list there is")) for one in losses]
        other = f"With {name}: a loss that you return is not the mean per real token of its step."
        expect(alike(mine, means), other)
        clean = all(weight.grad is None for weight in model.parameters())
        expect(clean, f"With {name}: some `.grad` is not None after the pass. Who clears it?")
        held = max(held, model.alive)
        if model.ahead:  # as bad as holding several
            held = max(held, 3)
    one, several = (passed(asked, [60] * k, k)[-1] for k in (1, 4))
    waits = "you keep graphs, or outputs of the model, until the group is complete."
    expect(several < 1.6 * one, f"The numbers are right, the memory is not: {waits}")
    expect(held <= 2, "You hold several micro-batches at a time: finish one before you take the next.")


# --------------------------------------------------------------------------------------------------
# 08.2: add_up_in_fp32
Gradients = list[Any]  # of each weight a tensor, or None


def tower(width: int) -> nn.Sequential:
    """Eight products in bf16, two with the same matrix; one weight is frozen, one is not used."""
    with seeded():
        layers = [nn.Linear(width, width, bias=False) for _ in range(7)]
    model = nn.Sequential(nn.LayerNorm(width), *layers, nn.Tanh(), layers[0])
    model.register_parameter("unused", nn.Parameter(torch.ones(5)))
    model[0].get_parameter("bias").requires_grad_(False)
    return model.bfloat16()


def added(each: Sequence[Gradients], add: Callable[..., Any] = torch.add) -> Gradients:
    """The sums of several lists of gradients; `add` adds one of bf16 to the sum in fp32."""
    return [
        None if first is None else reduce(add, more, first.float())
        for first, *more in zip(*each, strict=True)
    ]


SUM_MISTAKES: Mistakes = {  # how a gradient is added to what there is
    "Only the last micro-batch is left in the masters: add to `.grad`, do not replace it.": (
        lambda _, new: new.float()
    ),
    "The sum is rounded to bf16: in which format do you add?": (
        lambda total, new: (total.bfloat16() + new).float()
    ),
}
FROZEN = {
    "hook on a tensor that doesn": "A frozen weight takes no hook, because it gets no gradient: leave it out."
}
IN_FP32 = "A master's `.grad` must be fp32, like the master, not bf16."
SUM_HINTS = {
    **FROZEN,
    "different type": IN_FP32,
    "dtype": IN_FP32,
    "size": (
        "A gradient goes to another weight's master. "
        "Which value does your loop variable have when the hook runs? "
        "Or does a frozen weight shift your pairs?"
    ),
    "'NoneType'": (
        "Your hook finds None. A master's `.grad` is None until its first gradient, and after zero_grad. "
        "Or do you read another weight, because your loop variable has its last value when the hook runs?"
    ),
}


@exercise("08.2", "Sums in fp32, and never more than one gradient in bf16.")
def add_up_in_fp32(answer: Any) -> None:
    """`answer(weights, masters)` adds each weight's gradient to its master's as soon as it is complete."""
    for width, steps in ((8, 16), (5, 1), (64, 3)):
        model = tower(width)
        weights = list(model.parameters())
        masters = [one.detach().float() for one in model.parameters()]
        with seeded(steps):
            inputs = list(torch.randn(steps, 2, width).bfloat16())
        usual = [forward_backward(model, [x], weights) for x in inputs]
        model.zero_grad()
        asked = partial(call, answer, returns=(list, tuple), hints=SUM_HINTS, may_change=(0, 1))
        handles = asked(list(weights), list(masters))
        for when in ("", "After zero_grad: "):
            for master in masters:
                expect(when or master.grad is None, "A master has a gradient before any backward.")
                master.grad = None
            rans = [forward_backward(model, [x], weights, hints=SUM_HINTS) for x in inputs]
            held = any(one is not None for ran in rans for one in ran.gradients[1:])
            expect(not held, "Weights still hold their gradient after backward: both copies stay in memory.")
            _expect_sums([master.grad for master in masters], [ran.gradients[1:] for ran in usual], when)
        # The usual backward ends with all gradients in bf16; here the sums in fp32 take their place.
        sums = sum(4 * weight.numel() for weight in weights)
        late = (
            "Gradients in bf16 wait until backward ends. What still refers to a gradient after you added it?"
        )
        expect(rans[0].peak < usual[0].peak + sums - 8 * width * width, late)
        for handle in handles:
            expect(hasattr(handle, "remove"), "Return the handles that you get from registering.")
            handle.remove()
        expect(not hooked(model), "After remove() on all handles in your list, some hook is still there.")


def hooked(model: nn.Module) -> bool:
    """True if a weight of the model has a hook."""
    return any(weight._backward_hooks or weight._post_accumulate_grad_hooks for weight in model.parameters())


def _expect_sums(got: Gradients, each: Sequence[Gradients], when: str) -> None:
    right = added(each)
    if same(got, right, 1e-6):
        return
    pairs = list(zip(got, right, strict=True))
    unwanted = [wanted is None for mine, wanted in pairs if mine is not None]
    expect(unwanted, f"{when}No master has a gradient.")
    missing = any(mine is None and wanted is not None for mine, wanted in pairs)
    expect(not missing, SUM_HINTS["size"])
    decayed = f"{when}A weight got no gradient, but its master has one: an optimizer would decay it."
    expect(not any(unwanted), decayed)
    for message, add in SUM_MISTAKES.items():
        expect(not same(got, added(each, add), 1e-6), f"{when}{message}")
    fail(f"{when}Some sum is off. Is each gradient added once, and unchanged, to its own weight's master?")


# --------------------------------------------------------------------------------------------------
# 08.3: measure_noise

# different micro-batches, sequences in each, times repeated
NOISE_CASES = ((4, 2, 1), (2, 1, 1), (6, 3, 1), (1, 2, 3))


def small_gpt() -> nn.Module:
    """A small GPT in fp64, with one weight that nobody uses and one that is frozen."""
    model = language_model(layers=1, hidden=32).double()
    model.unused = nn.Parameter(torch.ones(3))
    model.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
    return model


def opposed() -> list[MicroBatch]:
    """Two micro-batches whose gradients nearly cancel, so that the estimate of |G|² is negative.

    Both have the same sequence many times, followed by each character of one half of the vocabulary, or by
    each of the other half.
    """
    tokens, _ = next(batches(1, 1, 8))
    half = len(vocabulary()) // 2
    targets = torch.arange(half)[:, None].expand(half, 8)
    return [(tokens.expand(half, 8), targets), (tokens.expand(half, 8), targets + half)]


def squared(gradients: Gradients) -> float:
    return sum(one.square().sum().item() for one in gradients if one is not None)


def mean_of(each: Sequence[Gradients], scale: float = 1.0) -> Gradients:
    return [None if one is None else scale * one / len(each) for one in added(each)]


def noise_right(b: int, lengths: Sequence[float], long: float, *_: Any) -> tuple[float, float]:
    """|G|² and tr(Σ) from mean |gradient|² of micro-batches and of all (McCandlish et al. 2018, A.1)."""
    k = len(lengths)
    noise = (sum(lengths) / k - long) * b * k / (k - 1)
    return long - noise / (b * k), noise


def _scaled(power: int) -> Callable[..., tuple[float, float]]:
    """`noise_right` of squared lengths times k to this power."""
    return lambda b, s, q, _: noise_right(b, [one * len(s) ** power for one in s], q)


def _noise_scale(*case: Any) -> tuple[float, float]:
    signal, noise = noise_right(*case)
    return signal, noise / signal


def _cut_off(*case: Any) -> tuple[float, float]:
    signal, noise = noise_right(*case)
    return max(signal, 0.0), noise


# of the sequences in a micro-batch, and of squared lengths: each gradient's, their mean's, their sums'
NOISE_MISTAKES: Mistakes = {
    "You measure gradients of loss / k. How long is the gradient of a micro-batch's own loss?": _scaled(-2),
    "A squared length changes with the square of a factor. By which factor do you divide each loss?": (
        _scaled(-1)
    ),
    "`len` of a pair is 2. How many sequences does a micro-batch have?": (
        lambda b, s, q, _: noise_right(2, s, q)
    ),
    "Return |G|² and tr(Σ) themselves, not their ratio, the noise scale.": _noise_scale,
    "You add up the micro-batches' squared lengths. The equation has their mean.": _scaled(1),
    "`register_post_accumulate_grad_hook` runs after the adding, so it finds sums. Which hook runs before?": (
        lambda b, s, q, sums: noise_right(b, sums, q)
    ),
    "You look at only the first micro-batch. The others say as much.": (
        lambda b, s, q, _: noise_right(b, s[:1] * len(s), q)
    ),
    "Your |G|² is the squared length of the mean of k gradients: a little noise is still in it.": (
        lambda b, s, q, _: (q, noise_right(b, s, q)[1])
    ),
    "You take the mean of k gradients for G. The formula has noise for k·b sequences, too.": (
        lambda b, s, q, _: (q, b * (sum(s) / len(s) - q))
    ),
    "Your tr(Σ) is the noise of a micro-batch's gradient. Return the noise of one sequence.": (
        lambda b, s, q, _: noise_right(1, s, q)
    ),
    "Your two numbers are in the wrong order: first |G|², then tr(Σ).": (
        lambda *case: tuple(reversed(noise_right(*case)))
    ),
    "Your |G|² never falls below 0. Cut off like this, the estimate is too large on average.": _cut_off,
}
NOISE_HINTS = FROZEN | UNUSED
NOISE_HINTS["the size of value"] = (
    "Your hook returns something, and that replaces the gradient. Let it return nothing."
)


@exercise("08.3", "Every micro-batch counts, and no gradient was copied.")
def measure_noise(answer: Any) -> None:
    """`answer(model, parts)` is (|G|², tr(Σ)), and leaves the mean's gradient in `.grad`."""
    got = []
    known = []
    drawn = [(b, list(batches(different, b)) * times) for different, b, times in NOISE_CASES]
    for b, parts in [*drawn, (len(vocabulary()) // 2, opposed())]:
        model = small_gpt()
        weights = [weight for weight in model.parameters() if weight.requires_grad]
        each = [
            list(torch.autograd.grad(mean_loss(model, part), weights, allow_unused=True)) for part in parts
        ]
        pair = call(answer, model=model, parts=parts, returns=tuple, hints=NOISE_HINTS)
        expect(len(pair) == 2, "Return two numbers: |G|² and tr(Σ).")
        got.append([float(of_kind(value, Real, "In your pair there is")) for value in pair])
        sums = [squared(added(each[:number])) for number in range(1, len(each) + 1)]
        known.append((b, list(map(squared, each)), squared(mean_of(each)), sums))
        _expect_mean([weight.grad for weight in model.parameters() if weight.requires_grad], each)
        expect(not hooked(model), "Your hooks are still on the weights, and run in every later backward.")
    otherwise = (
        "Your two numbers are off. Write |G|² + tr(Σ)/B for a micro-batch and for all of them, and solve."
    )
    recognized(got, known, noise_right, NOISE_MISTAKES, otherwise, _close)
    second = "The numbers are right, the memory is not: you keep another set of gradients next to `.grad`."
    # half of such a set: gradients are in fp64
    margin = 4 * sum(weight.numel() for weight in small_gpt().parameters())
    usual, most = (
        alive_during(partial(loop, small_gpt(), list(batches(4, 2)))).peak for loop in (accumulated, answer)
    )
    expect(most < usual + margin, second)


def _expect_mean(left: Gradients, each: Sequence[Gradients]) -> None:
    """Raise CheckFailed unless the gradients that are left are the mean of those of each micro-batch."""
    some = any(one is not None for one in left)
    expect(some, "Nothing is left in `.grad`: how should the optimizer step?")
    if same(left, mean_of(each)):
        return
    alone = any(same(left, mean_of(each[-1:], scale)) for scale in (1, 1 / len(each)))
    expect(not alone, "Only the last micro-batch is left in `.grad`: who cleared the others?")
    long = same(left, mean_of(each, len(each)))
    expect(not long, "The sum of k gradients is left in `.grad`, k times too long for a step.")
    fail("`.grad` is not the gradient of the mean over all micro-batches.")


def _close(mine: Sequence[Any], right: Sequence[Any]) -> bool:
    """True to 0.01 % of the larger one: either may be a small difference of large numbers."""
    found = torch.tensor(mine)
    wanted = torch.tensor(right)
    return bool(((found - wanted).abs() <= 1e-4 * wanted.abs().amax(1, keepdim=True)).all())


def accumulated(model: nn.Module, parts: Sequence[MicroBatch]) -> None:
    for part in parts:
        (mean_loss(model, part) / len(parts)).backward()


# --------------------------------------------------------------------------------------------------
# 08.4: rate
RATE_CASES = (
    *((step, 500, 0.1, 32, "sgd") for step in (0, 250, 500, 900)),
    (10, 40, 0.02, 4, "sgd"),
    *((step, 200, 3e-4, 36, "adam") for step in (0, 50, 201)),
)


def rate_right(step: int, warm: int, rate: float, k: int, optimizer: str) -> float:
    """k·rate for "sgd" (Goyal et al. 2017), √k·rate for "adam" (Granziol 2022), after a line from `rate`."""
    peak = rate * {"sgd": k, "adam": k**0.5}[optimizer]
    return peak if step >= warm else rate + (peak - rate) * step / warm


def _rate_swapped(step: int, warm: int, rate: float, k: int, optimizer: str) -> float:
    other = "sgd" if optimizer == "adam" else "adam"
    return rate_right(step, warm, rate, k, other)


RATE_MISTAKES: Mistakes = {
    "You scale by k for Adam, too. Its rule is different.": (
        lambda t, w, r, k, o: rate_right(t, w, r, k, "sgd")
    ),
    "You scale by √k for SGD, too. Its rule is linear.": (
        lambda t, w, r, k, o: rate_right(t, w, r, k, "adam")
    ),
    "The two rules are swapped.": _rate_swapped,
    "You start from zero, not from the small batch's rate.": (
        lambda t, w, r, k, o: rate_right(w, w, r, k, o) * min(1, t / w)
    ),
    "There is no warm-up: your rate is at its peak from the first step.": (
        lambda t, *case: rate_right(10**6, *case)
    ),
    "Your rate still grows after the warm-up.": (
        lambda t, w, r, k, o: r + (rate_right(w, w, r, k, o) - r) * t / w
    ),
    "Your rate never changes: where do you use k?": lambda t, w, r, k, o: r,
}


@exercise("08.4", "Linear or √k, and gently at first.")
def rate(answer: Any) -> None:
    """`answer(step, warm, rate, k, optimizer)` is a step's learning rate for a batch k times as large."""
    got = [call(answer, step=t, warm=w, rate=r, k=k, optimizer=o) for t, w, r, k, o in RATE_CASES]
    otherwise = "Some rate is off: what is it at step 0, what from step `warm` on, and what halfway between?"
    recognized(got, RATE_CASES, rate_right, RATE_MISTAKES, otherwise)
