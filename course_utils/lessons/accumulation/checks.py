"""Checks of lessons 08 and 09: each names the misconception, never the answer."""

import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial, reduce
from numbers import Real
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parameters_to_vector

from ...interactive.feedback import Mistakes, alike, call, exercise, expect, of_kind, recognized
from ..shared.judging import alive_during, forward_backward, same, seeded
from ..shared.language_model import batches, language_model
from .micro_batches import IGNORED, MicroBatch, mean_loss

# --------------------------------------------------------------------------------------------------
# 08.1: train_pass
WORDS = 7
STREAMS: dict[str, tuple[tuple[int, ...], int]] = {  # real tokens of each micro-batch, and k
    "lengths that differ": ((4, 60, 17, 33, 9, 28, 71, 12), 4),
    "an incomplete group": ((50, 7, 21, 40, 9), 3),
    "micro-batches of padding": ((0, 40, 25, 11, 30, 0, 19), 3),
    "groups of padding": ((20, 31, 0, 0, 45, 9, 0), 2),
    "an empty loader": ((), 4),
}


def _bigrams() -> nn.Module:
    """Logits of the next word from a table in fp64, and a weight that nobody uses."""
    with seeded():
        model = nn.Embedding(WORDS, WORDS, dtype=torch.float64)
    model.unused = nn.Parameter(torch.ones(3))
    return model


def _micro_batch(real: int) -> MicroBatch:
    """Token ids and targets of three sequences, of which `real` tokens count and the rest is padding."""
    length = real // 2 + 4
    dice = torch.Generator().manual_seed(real)
    tokens, targets = torch.randint(WORDS, (2, 3, length), generator=dice)
    # counted from position to position, so that the three sequences have about as many real tokens each
    places = torch.arange(3 * length).reshape(length, 3).T
    return tokens.clone(), targets.masked_fill(real <= places, IGNORED)


def _stream(counts: Sequence[int], held: list[int]) -> Iterator[MicroBatch]:
    """Hand out each micro-batch once, and note how many earlier ones, or their graphs, somebody holds."""
    tokens: list[weakref.ref[torch.Tensor]] = []
    for real in counts:
        held.append(sum(one() is not None for one in tokens))
        part = _micro_batch(real)
        tokens.append(weakref.ref(part[0]))
        yield part
        del part  # else it would live until the next one is made


def _by_tokens(group: Sequence[int]) -> list[float]:
    return [real / sum(group) for real in group]


def _looking_ahead(
    counts: Sequence[int], k: int, weigh: Callable[[Sequence[int]], Sequence[float]] = _by_tokens
) -> tuple[torch.Tensor, list[float]]:
    """All weights after a pass that knows each group beforehand, and the loss of each step.

    `weigh` says how much the mean loss of each micro-batch counts, from the real tokens in its group.
    """
    model, losses = _bigrams(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    for group in [counts[first : first + k] for first in range(0, len(counts), k)]:
        if sum(group):
            pairs = zip(group, weigh(group), strict=True)
            weighed = [weight * mean_loss(model, _micro_batch(real)) for real, weight in pairs if real]
            loss = torch.stack(weighed).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return parameters_to_vector(model.parameters()), losses


def _after(counts: Sequence[int], k: int, weigh: Any = _by_tokens) -> torch.Tensor:
    return _looking_ahead(counts, k, weigh)[0]


PASS_MISTAKES: Mistakes = {
    "You take a mean of means: a token of a short micro-batch counts more than one of a long micro-batch.": (
        partial(_after, weigh=lambda group: [1 / len(group)] * len(group))
    ),
    "You add up sums and never divide: your step grows with the number of tokens.": (
        partial(_after, weigh=lambda group: group)
    ),
    "You add up means and never divide: your step grows with k.": (
        partial(_after, weigh=lambda group: [1] * len(group))
    ),
    "You divide by padding, too. How many tokens have a target?": partial(
        _after, weigh=lambda group: [real / sum(_micro_batch(n)[1].numel() for n in group) for real in group]
    ),
    "You call zero_grad within a group: that throws away the sum so far.": partial(
        _after, weigh=lambda group: [0] * (len(group) - 1) + _by_tokens(group)[-1:]
    ),
}
STREAM = "The loader is a stream: it hands out one micro-batch at a time, and cannot say how many there are."
UNUSED = {"'NoneType'": "A weight that no loss has used has no gradient: its `.grad` is None."}
PASS_HINTS = {"has no len()": STREAM, "not subscriptable": STREAM, **UNUSED}


@exercise("08.1", "Every token counts once, one micro-batch at a time.")
def train_pass(answer: Any) -> None:
    """`answer(model, optimizer, loader, k)` steps per k micro-batches and returns each step's mean loss."""
    for name, (counts, k) in STREAMS.items():
        model = _bigrams()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
        held: list[int] = []
        given = model, optimizer, _stream(counts, held), k
        losses = call(answer, *given, returns=(list, tuple), may_change=range(4), hints=PASS_HINTS)
        means = _looking_ahead(counts, k)[1]
        nan = "NaN in the weights. A mean over no token at all is 0/0: where do you divide?"
        weights = parameters_to_vector(model.parameters())
        expect(not weights.isnan().any(), f"With {name}: {nan}")
        steps = (
            "A step takes k micro-batches, also those of padding, or fewer at the end of the stream. "
            "A group without real tokens takes no step."
        )
        short = f"With {name}: your list has length {len(losses)}, not one number for each step."
        expect(len(losses) == len(means), f"{short} {steps}")
        clean = all(weight.grad is None for weight in model.parameters())
        expect(clean, f"With {name}: some `.grad` is not None after the pass. Who clears it?")
        elsewhere = f"With {name}: the weights end elsewhere. Whose mean is it, and who clears `.grad`?"
        recognized([weights], [(counts, k)], _after, PASS_MISTAKES, elsewhere, same)
        graph = any(getattr(one, "requires_grad", False) for one in losses)
        expect(not graph, "You return a loss with its graph: use `.item()`.")
        mine = [float(of_kind(one, Real, "In your list there is")) for one in losses]
        other = f"With {name}: a loss that you return is not the mean per real token of its step."
        expect(alike(mine, means), other)
        several = "You hold several micro-batches at a time, or their graphs. Run backward before the next."
        expect(max(held, default=0) <= 2, several)


# --------------------------------------------------------------------------------------------------
# 08.2: add_up_in_fp32
WIDTH = 64


def _tower() -> nn.Sequential:
    """Eight products in bf16, two with the same matrix; one weight is frozen, one is not used."""
    with seeded():
        layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(7)]
    model = nn.Sequential(nn.LayerNorm(WIDTH), *layers, nn.Tanh(), layers[0])
    model.register_parameter("unused", nn.Parameter(torch.ones(5)))
    model[0].get_parameter("bias").requires_grad_(False)
    return model.bfloat16()


def _added(first: Any, *more: Any, add: Callable[..., Any] = torch.add) -> Any:
    """The sum of a weight's gradients, None if it gets none; `add` adds one of bf16 to the sum in fp32."""
    return None if first is None else reduce(add, more, first.float())


SUM_MISTAKES: Mistakes = {
    "Only the last micro-batch is left in the masters: add to `.grad`, do not replace it.": (
        partial(_added, add=lambda _, new: new.float())
    ),
    "The sum is rounded to bf16: in which format do you add?": (
        partial(_added, add=lambda total, new: (total.bfloat16() + new).float())
    ),
}
ANOTHER = (
    "Some sum is off. Is each gradient added once? Or does one go to another weight's master? "
    "Which value does your loop variable have when the hook runs? Does a frozen weight shift your pairs?"
)
FROZEN = {
    "hook on a tensor that doesn": "A frozen weight takes no hook, because it gets no gradient: leave it out."
}
SUM_HINTS = {
    **FROZEN,
    "different type": "A master's `.grad` must be fp32, like the master, not bf16.",
    "size": ANOTHER,
    "'NoneType'": (
        "Your hook finds None. A master's `.grad` is None until its first gradient, and after zero_grad. "
        "Or do you read another weight, because your loop variable has its last value when the hook runs?"
    ),
}


@exercise("08.2", "Sums in fp32, and never more than one gradient in bf16.")
def add_up_in_fp32(answer: Any) -> None:
    """`answer(weights, masters)` adds each weight's gradient to its master's as soon as it is complete."""
    model = _tower()
    weights = list(model.parameters())
    masters = [one.detach().float() for one in weights]
    with seeded(1):
        inputs = list(torch.randn(4, 2, WIDTH).bfloat16())
    usual = [forward_backward(model, [x], weights) for x in inputs]
    model.zero_grad()
    lists = list(weights), list(masters)
    handles = call(answer, *lists, returns=(list, tuple), hints=SUM_HINTS, may_change=(0, 1))
    for _ in range(2):  # the second time as after zero_grad
        early = any(master.grad is not None for master in masters)
        expect(not early, "A master has a gradient before any backward.")
        rans = [forward_backward(model, [x], weights, hints=SUM_HINTS) for x in inputs]
        held = any(one is not None for ran in rans for one in ran.gradients[1:])
        expect(not held, "Weights still hold their gradient after backward: both copies stay in memory.")
        each = zip(*(ran.gradients[1:] for ran in usual), strict=True)
        sums = [master.grad for master in masters]
        recognized(sums, each, _added, SUM_MISTAKES, ANOTHER, partial(same, tolerance=1e-6))
        for master in masters:
            master.grad = None
    # The usual backward ends with all gradients in bf16; here the sums in fp32 take their place.
    in_fp32 = sum(4 * weight.numel() for weight in weights)
    late = "Gradients in bf16 wait until backward ends. What still refers to one that you added?"
    expect(rans[0].peak < usual[0].peak + in_fp32 - 8 * WIDTH * WIDTH, late)
    for handle in handles:
        expect(hasattr(handle, "remove"), "Return the handles that you get from registering.")
        handle.remove()
    expect(not _hooked(model), "After remove() on all handles in your list, some hook is still there.")


def _hooked(model: nn.Module) -> bool:
    return any(weight._backward_hooks or weight._post_accumulate_grad_hooks for weight in model.parameters())


# --------------------------------------------------------------------------------------------------
# 08.3: scaled_step
LONGEST, EVERY, STEPS = 0.15, 2, 9  # some gradients are shorter
FIRST_SCALE = 2.0**23


def _scaled(
    model: nn.Module, optimizer: Any, parts: Any, state: Any, longest: float, every: int, mistake: str = ""
) -> bool:
    """A step as `torch.amp.GradScaler` takes it, with micro-batches; on request with a `mistake`."""
    weight: Any = model.get_parameter("weight")
    for part in parts:
        loss = mean_loss(model, part) / (1 if mistake == "sum" else len(parts))
        (loss * state["scale"]).backward()
        if mistake == "each time" and part is not parts[-1]:
            weight.grad /= state["scale"]
    good = bool(weight.grad.isfinite().all())
    if good:
        if mistake == "clipped before":
            nn.utils.clip_grad_norm_([weight], longest)
        if mistake != "scaled":
            weight.grad /= state["scale"]
        if mistake != "clipped before":
            nn.utils.clip_grad_norm_([weight], longest)
        optimizer.step()
    state["good"] = state["good"] + 1 if good else 0
    if not good or state["good"] == every:
        state["scale"] *= 2 if good else 0.5
        state["good"] *= mistake == "goes on"
    optimizer.zero_grad()
    return good


def _steps(step: Callable[..., Any]) -> torch.Tensor:
    """The weights, the state and the answer after each of some steps, whose gradients overflow as in fp16."""
    model = _bigrams()
    table = model.get_parameter("weight")
    table.register_hook(lambda gradient: gradient.masked_fill(gradient.abs() > 65504, torch.inf))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    state, rows = {"scale": FIRST_SCALE, "good": 0}, []
    for number in range(STEPS):
        parts = [_micro_batch(40 + number + place) for place in range(3)]
        stepped = step(model, optimizer, parts, state, LONGEST, EVERY)
        infinite = "A weight is not finite: you step with a sum of gradients that has overflowed."
        expect(table.isfinite().all(), infinite)
        left = "After a step, or one that was left out, some `.grad` is not None. Who clears it?"
        expect(table.grad is None, left)
        now = [state["scale"] / FIRST_SCALE, float(state["good"]), float(stepped)]
        rows.append(torch.cat([table.detach().flatten(), torch.tensor(now, dtype=table.dtype)]))
    return torch.stack(rows)


SCALE_MISTAKES = {
    "You clip gradients that still have the scale. Which comes first?": "clipped before",
    "You divide by the scale after each micro-batch: the first ones are divided again and again.": (
        "each time"
    ),
    "The optimizer steps with gradients that still have the scale.": "scaled",
    "You go backward from a sum of losses. The gradient of their mean was asked for.": "sum",
    "After the scale has doubled, the count of good steps begins again.": "goes on",
}


@exercise("08.3", "Divided once, judged once, clipped once: a scale for the whole sum.")
def scaled_step(answer: Any) -> None:
    """`answer(model, optimizer, parts, state, longest, every)` takes a step with a scaled loss, or none."""
    got = _steps(partial(call, answer, returns=bool, may_change=range(6), hints=UNUSED))
    right = _steps(_scaled)
    scale = "The scale, the count or what you return is off. Print `state` after each step."
    weights = "The weights are off. What happens once per micro-batch, and what once per step?"
    apart = same([got[:, :-3]], [right[:, :-3]])
    mistakes = {
        says: partial(_steps, partial(_scaled, mistake=mistake)) for says, mistake in SCALE_MISTAKES.items()
    }
    recognized([got], [()], partial(_steps, _scaled), mistakes, scale if apart else weights, same)


# --------------------------------------------------------------------------------------------------
# 08.4: measure_noise
def _small_gpt() -> nn.Module:
    """A small GPT in fp64, with one weight that nobody uses and one that is frozen."""
    model = language_model(layers=1, hidden=32).double()
    model.unused = nn.Parameter(torch.ones(3))
    model.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
    return model


def _squared(gradients: Sequence[Any]) -> float:
    return sum(one.square().sum().item() for one in gradients if one is not None)


def _mean(*gradients: Any) -> Any:
    """The mean of a weight's gradients, None if it gets none."""
    return None if gradients[0] is None else _added(*gradients) / len(gradients)


MEAN_MISTAKES: Mistakes = {
    "Nothing is left in `.grad`: how should the optimizer step?": lambda *gradients: None,
    "Only the last micro-batch is left in `.grad`: who cleared the others?": (
        lambda *gradients: None if gradients[-1] is None else gradients[-1] / len(gradients)
    ),
    "The sum of k gradients is left in `.grad`, k times too long for a step.": _added,
}


def _noise(b: int, lengths: Sequence[float], long: float) -> torch.Tensor:
    """|G|² and tr(Σ) from mean |gradient|² of micro-batches and of all (McCandlish et al. 2018, A.1)."""
    k = len(lengths)
    noise = (sum(lengths) / k - long) * b * k / (k - 1)
    return torch.tensor([long - noise / (b * k), noise])


# of the sequences in a micro-batch, and of squared lengths: each gradient's, and their mean's
NOISE_MISTAKES: Mistakes = {
    "You measure gradients of loss / k. How long is the gradient of a micro-batch's own loss?": (
        lambda b, lengths, long: _noise(b, [one / len(lengths) ** 2 for one in lengths], long)
    ),
    "You look at only the first micro-batch. The others say as much.": (
        lambda b, lengths, long: _noise(b, lengths[:1] * len(lengths), long)
    ),
    "Your |G|² is the squared length of the mean of k gradients: a little noise is still in it.": (
        lambda b, lengths, long: torch.tensor([long, _noise(b, lengths, long)[1]])
    ),
    "Your tr(Σ) is the noise of a micro-batch's gradient. Return the noise of one sequence.": (
        lambda b, lengths, long: _noise(1, lengths, long)
    ),
}
NOISE_HINTS = {
    **FROZEN,
    **UNUSED,
    "the size of value": "Your hook returns something, which replaces the gradient. Let it return nothing.",
}


@exercise("08.4", "Every micro-batch counts, and no gradient was copied.")
def measure_noise(answer: Any) -> None:
    """`answer(model, parts)` is (|G|², tr(Σ)), and leaves the mean's gradient in `.grad`."""
    got, known = [], []
    for k, b in ((4, 2), (2, 1)):
        parts, model = list(batches(k, b)), _small_gpt()
        weights = [weight for weight in model.parameters() if weight.requires_grad]
        each = [torch.autograd.grad(mean_loss(model, part), weights, allow_unused=True) for part in parts]
        pair = call(answer, model=model, parts=parts, returns=tuple, hints=NOISE_HINTS)
        expect(len(pair) == 2, "Return two numbers: |G|² and tr(Σ).")
        got.append(torch.tensor([float(of_kind(value, Real, "In your pair there is")) for value in pair]))
        of_weights = list(zip(*each, strict=True))
        known.append((b, list(map(_squared, each)), _squared([_mean(*one) for one in of_weights])))
        off = "`.grad` is not the gradient of the mean over all micro-batches."
        recognized([weight.grad for weight in weights], of_weights, _mean, MEAN_MISTAKES, off, same)
        expect(not _hooked(model), "Your hooks are still on the weights, and run in every later backward.")
    otherwise = "Your two numbers are off. Write |G|² + tr(Σ)/B for B = b and for B = k·b, and solve."
    recognized(got, known, _noise, NOISE_MISTAKES, otherwise, partial(same, tolerance=1e-4))
    loops = _accumulated, answer
    usual, most = (alive_during(partial(loop, _small_gpt(), list(batches(4, 2)))).peak for loop in loops)
    second = "The numbers are right, the memory is not: you keep another set of gradients next to `.grad`."
    # half of such a set: gradients are in fp64
    expect(most < usual + 4 * sum(weight.numel() for weight in _small_gpt().parameters()), second)


def _accumulated(model: nn.Module, parts: Sequence[MicroBatch]) -> None:
    for part in parts:
        (mean_loss(model, part) / len(parts)).backward()
