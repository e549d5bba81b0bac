"""Checks of the exercises of lesson 02, "Adam": each names the misconception, never the answer."""

import copy
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch

from ...interactive.feedback import Mistakes, call_for_effect, exercise, expect, fail, recognized
from ...measuring.tracker import Tracker
from ..shared.judging import alive, same, seeded, told
from ..shared.language_model import language_model, train_language_model
from .by_hand import kept_bytes, kept_tensors

RAISED = "In training, your optimizer raised"


# --------------------------------------------------------------------------------------------------
# 02.1: adam_in_pieces
def _update(
    m: torch.Tensor, v: torch.Tensor, t: int, *_: Any, corrected: str = "mv", eps: Any = (0, 1e-8)
) -> Any:
    """Adam's update in learning rates (Kingma and Ba 2015, algorithm 1).

    `corrected` names the means that are corrected for beginning at zero; `eps` is ε inside the root, and
    outside.
    """
    m = m / (1 - 0.9**t if "m" in corrected else 1)
    v = v / (1 - 0.999**t if "v" in corrected else 1)
    return m / ((v + eps[0]).sqrt() + eps[1])


# a weight's shape, and how many numbers a piece has
PIECES = (((5, 3), 4), ((3,), 7), ((1,), 1), ((64, 50), 512))
STEP_MISTAKES: Mistakes = {
    "You correct neither m nor v: both began at zero, so the first steps have the wrong length.": partial(
        _update, corrected=""
    ),
    "You correct m but not v: both began at zero.": partial(_update, corrected="m"),
    "You correct v but not m: both began at zero.": partial(_update, corrected="v"),
    "Your ε is inside the root. It belongs outside: √v̂ + ε.": partial(_update, eps=(1e-8, 0)),
    "Your ε is missing: the small gradients here get too long a step.": partial(_update, eps=(0, 0)),
    "You add ε before you correct v: √v̂ + ε.": (
        lambda m, v, t, _: _update(m, (v.sqrt() + 1e-8) ** 2, t, eps=(0, 0))
    ),
    "The weight goes up the slope: subtract the step.": lambda m, v, t, _: -_update(m, v, t),
    "The weight shrinks, too: that is AdamW's decay.": (
        lambda m, v, t, weight: _update(m, v, t) + 0.01 * weight
    ),
    "Your learning rate is 1e-3 whatever `rate` is.": lambda m, v, t, _: _update(m, v, t) / 10,
    "You always correct as in step 1: use `step`.": lambda m, v, t, _: _update(m, v, 1),
}


def _means(gradient: torch.Tensor, m: torch.Tensor, v: torch.Tensor, **_: Any) -> None:
    m.lerp_(gradient, 0.1)
    v.lerp_(gradient.square(), 0.001)


@exercise("02.1", "Adam up to rounding, and never more new numbers than one piece has.")
def adam_in_pieces(answer: Any) -> None:
    """`answer(weight, gradient, m, v, step, rate, size)` updates weight, m and v in pieces of `size`."""
    for shape, size in PIECES:
        got, most = _walk(answer, shape, size)
        right, _ = _walk(_means, shape, size)
        for index, name in ((1, "m"), (2, "v"), (0, "weight")):
            before = got[0, index]
            after = got[-1, index]
            endless = f"{name} holds numbers that are not finite: what do you divide by?"
            expect(after.isfinite().all(), endless)
            place = (
                f"{name} has not changed. "
                f"`{name} = …` makes a new tensor: use methods that end in _, such as mul_."
            )
            expect(not torch.equal(before, after), place)
            rest = math.prod(shape) % size
            left_out = rest > 0 and torch.equal(before[-rest:], after[-rest:])
            expect(not left_out, "You leave out the last piece, which has fewer numbers than the others.")
            mean = (
                f"{name} is off: "
                "it keeps β of itself, takes 1 − β of the new value, and is not corrected in place."
            )
            expect(name == "weight" or torch.allclose(got[:, index], right[:, index], 1e-3, 1e-20), mean)
        # m and v are right from here on, so a wrong weight is its own line's mistake
        still = torch.equal(got[0, 0], got[1, 0])
        expect(not still, "In the first step the weight does not change. Update m and v before the weight.")
        cases = [(after[1], after[2], t, got[t - 1, 0]) for t, after in enumerate(right[1:], 1)]
        otherwise = "m and v are right, the weight is not: compare its line with the one above, part by part."
        moved = list(-got[:, 0].diff(dim=0) / 0.01)  # per step, in learning rates
        recognized(moved, cases, _update, STEP_MISTAKES, otherwise, partial(same, tolerance=1e-3))
    whole = (
        "You hold as many new numbers as the weight has. "
        "Do you cut the flat tensor? Do you keep pieces in a list?"
    )
    expect(most < got[0, 0].nbytes, whole)
    more = (
        "You hold more than one new tensor of a piece's size. Does an expression make several? "
        "Or does the name in your loop still hold the last one while the next is made?"
    )
    expect(most <= 4 * size + 512, more)  # a piece in fp32, and a number or two


def _walk(step: Any, shape: tuple[int, ...], size: int) -> tuple[torch.Tensor, int]:
    """Weight, m and v, flat, before and after each of three steps; the most bytes that were new in one."""
    weight = torch.linspace(1, 2, math.prod(shape)).reshape(shape)
    m = torch.zeros(shape)
    v = torch.zeros(shape)
    dice = torch.Generator().manual_seed(2)
    states = [torch.stack([weight, m, v]).flatten(1)]
    most = 0
    for number in range(1, 4):
        gradient = 1e-6 * torch.randn(shape, generator=dice)
        given = {"weight": weight, "gradient": gradient, "m": m, "v": v}
        before = gradient.clone()
        with torch.no_grad(), Tracker("cpu") as tracker:
            tracker.bind("parameters", given.values())
            call_for_effect(step, **given, step=number, rate=0.01, size=size)
        changed = "You change the gradient. Only read it: make a new tensor instead."
        expect(torch.equal(gradient, before), changed)
        most = max(most, *alive(tracker))
        states.append(torch.stack([weight, m, v]).flatten(1))
    return torch.stack(states), most


# --------------------------------------------------------------------------------------------------
# 02.2 to 02.4: an optimizer in training
class Trial(NamedTuple):
    """The result of a short training with somebody's optimizer."""

    optimizer: Any
    parameters: int
    kept: int  # bytes that it leaves next to the weights, wherever they are
    hidden: int  # those of them that are not on the optimizer
    weights: Sequence[torch.Tensor]
    final: float  # the last loss
    diverged: bool  # a weight or the loss is not finite

    def __repr__(self) -> str:
        return (
            f"{self.kept:,} bytes kept for {self.parameters:,} parameters; the last loss was {self.final:.3f}"
        )


def trial(make: Callable[..., Any], steps: int = 4, louder: float = 1.0, traced: bool = True) -> Trial:
    """Train a small character model with the optimizer of `make(parameters, rate)` or `make(parameters)`.

    Gradients are `louder` times as large, as if the loss were. Untraced is twice as fast, but misses hidden
    bytes.
    """
    model = language_model(1, 32)
    weights = list(model.parameters())
    for weight in weights:
        weight.register_hook(lambda gradient: gradient * louder)
    takes_rate = "rate" in inspect.signature(make).parameters
    with Tracker("cpu") if traced else nullcontext() as tracker:
        optimizer = make(weights, 3e-3) if takes_rate else make(weights)
        nothing = "What you pass to the check makes nothing with a `step()`: pass the class."
        expect(hasattr(optimizer, "step"), nothing)
        final = train_language_model(lambda _: optimizer, steps=steps, model=model).final
        if tracker:
            tracker.bind("parameters", weights)  # now: an optimizer may give them new storages
        kept = alive(tracker)[-1] if tracker else kept_bytes(optimizer)
    parameters = sum(weight.numel() for weight in weights)
    diverged = not (math.isfinite(final) and all(weight.isfinite().all() for weight in weights))
    return Trial(optimizer, parameters, kept, kept - kept_bytes(optimizer), weights, final, diverged)


def _tried(answer: Any, hints: Mapping[str, str] = {}, **how: Any) -> Trial:
    expect(callable(answer), "Pass the class itself: its name, without parentheses.")
    with told(RAISED, hints):
        got = trial(answer, **how)
    pairs = zip(got.weights, language_model(1, 32).parameters(), strict=True)
    moved = any(not torch.equal(now, first) for now, first in pairs)
    expect(
        moved,
        "The weights do not change. Change them in place, as weight.sub_(…) does, under torch.no_grad().",
    )
    return got


def _expect_clean(got: Trial) -> None:
    expect(not got.diverged, "The weights are not finite any more: what do you divide by?")
    graphs = any(tensor.grad_fn is not None for tensor in kept_tensors(got.optimizer))
    kept = "A state still has its graph, which keeps more alive each step: put step under no_grad."
    expect(not graphs, kept)


# --------------------------------------------------------------------------------------------------
# 02.2: update_in_backward
LATE = (
    "A hook looks up a loop's names when it *runs*: by then they are those of the last parameter. Make each "
    "hook in a function of its own, or look up by the hook's argument."
)
HOOK_HINTS = {
    "doesn't require gradient": "A frozen parameter never gets a gradient, so it takes no hook: skip it.",
    "to assign a gradient of size": LATE,
    "'NoneType'": (
        "There is no gradient in `.grad`. Is it a `register_hook`, which runs before PyTorch stores it? "
        f"Or the gradient of another parameter? {LATE}"
    ),
}
HOOKED_BYTES = {
    0: "Nothing is kept from step to step. Master weights and AdamW's states must outlive the hook's call.",
    4: "4 bytes per parameter: AdamW has 16-bit weights. Small updates are lost: give it fp32 masters.",
    8: "4 bytes per parameter too few are kept: which fp32 number does AdamW not keep?",
    14: "2 bytes per parameter too many are kept after backward: the 16-bit gradients.",
    16: "4 bytes per parameter too many are kept after backward: whose gradients are in fp32?",
}
HOOKED_MISTAKES: Mapping[str, Mapping[str, Any]] = {
    "Your hook makes an optimizer again in each step: the last one's states are forgotten.": {
        "forgets": True
    },
    "Your learning rate is 1e-3 whatever `rate` is.": {"rate": 1e-3},
}
STEPS, RATE = 8, 3e-3


def _hooked_model() -> torch.nn.Sequential:
    with seeded():
        model = torch.nn.Sequential(
            torch.nn.Linear(48, 64), torch.nn.GELU(), torch.nn.Linear(64, 64), torch.nn.Linear(64, 48)
        ).bfloat16()
    model[2].requires_grad_(False)
    return model


def _backwards(model: torch.nn.Sequential) -> Iterator[None]:
    """Run backward on another batch each time."""
    dice = torch.Generator().manual_seed(6)
    for _ in range(STEPS):
        x = torch.randn(8, 48, generator=dice).bfloat16()
        (model(x).float() - 1).square().mean().backward()
        yield


def _updated_after(rate: float = RATE, forgets: bool = False) -> list[torch.Tensor]:
    """The 16-bit weights of a plain loop whose step comes after backward; with options a mistaken one."""
    model = _hooked_model()
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    masters = [torch.nn.Parameter(weight.detach().float()) for weight in weights]
    optimizer = torch.optim.AdamW(masters, lr=rate)
    for _ in _backwards(model):
        for weight, master in zip(weights, masters, strict=True):
            gradient = weight.grad
            assert gradient is not None
            master.grad, weight.grad = gradient.float(), None
        optimizer.step()
        for weight, master in zip(weights, masters, strict=True):
            weight.data.copy_(master)
        if forgets:
            optimizer = torch.optim.AdamW(masters, lr=rate)
    return [weight.detach() for weight in weights]


@exercise("02.2", "Backward updates the weights as a step after it would, and no gradient waits.")
def update_in_backward(answer: Any) -> None:
    """`answer(parameters, rate)` lets backward update 16-bit parameters by AdamW on fp32 masters."""
    model = _hooked_model()
    weights = list(model.parameters())
    first = [weight.detach().clone() for weight in weights]
    waiting = []
    with Tracker("cpu") as tracker:
        with told("Your function raised", HOOK_HINTS):
            answer(list(weights), RATE)
        for weight in weights:
            if weight.requires_grad:
                weight.register_post_accumulate_grad_hook(lambda w: waiting.append(w.grad is not None))
        with told("In backward, your hook raised", HOOK_HINTS):
            for step, _ in enumerate(_backwards(model)):
                if step == 0:
                    _expect_all_moved(weights, first)
        tracker.bind("parameters", weights)
        kept = alive(tracker)[-1]
    expect(all(w.isfinite().all() for w in weights), "The weights are not finite any more.")
    frozen = [(w, old) for w, old in zip(weights, first, strict=True) if not w.requires_grad]
    expect(all(torch.equal(w, old) for w, old in frozen), "You change frozen parameters.")
    late = "A gradient is still there after your hook: free it inside, `p.grad = None`."
    expect(not any(waiting), late)
    trained = [weight for weight in weights if weight.requires_grad]
    per = kept / sum(weight.numel() for weight in trained)
    otherwise = f"{per:.1f} bytes per trained parameter are kept after backward. Which tensors are they?"
    expect(abs(per - 12) < 0.7, HOOKED_BYTES.get(round(per), otherwise))
    if not same(trained, _updated_after(), 0.01):
        for message, how in HOOKED_MISTAKES.items():
            expect(not same(trained, _updated_after(**how), 0.01), message)
        fail("The memory is right, the weights are not AdamW's. Compare with a step after backward.")
    print(f"{per:.1f} bytes per trained parameter are kept, and no gradient (traced on the CPU)")


def _expect_all_moved(weights: Sequence[torch.Tensor], first: Sequence[torch.Tensor]) -> None:
    pairs = [(w, old) for w, old in zip(weights, first, strict=True) if w.requires_grad]
    moved = [not torch.equal(w, old) for w, old in pairs]
    nothing = (
        "After backward no parameter has changed. Is your hook registered? "
        "Does the master weight go back to the parameter, in place?"
    )
    expect(any(moved), nothing)
    expect(all(moved), f"Only {sum(moved)} of {len(moved)} parameters change. {LATE}")


# --------------------------------------------------------------------------------------------------
# 02.3: factored
OTHER_SHAPES = "Only a matrix has rows and columns. For every other shape, v is the mean of squares itself."
FACTORED = (  # a parameter's shape, its steps without a gradient, and the message if it is off
    (
        (5, 3),
        (),
        "The update of a matrix is off. Compare one entry of v by hand, after one step and after two.",
    ),
    ((3, 4), (2,), "t counts a parameter's own updates. In a step without a gradient it does not change."),
    ((4,), (), OTHER_SHAPES),
    ((2, 3, 2), (), OTHER_SHAPES),
    (
        (1, 6),
        (3,),
        'Use the learning rate of each group, `group["lr"]`: one group has a learning rate of its own.',
    ),
)
FACTORED_MISTAKES: Mapping[str, Mapping[str, Any]] = {
    "You keep the mean of squares of a whole matrix. Keep only a row and a column.": {"v_of": lambda v: v},
    "You use only the rows: then all columns of v are equal.": {
        "v_of": lambda v: v.mean(1, True).expand_as(v)
    },
    "A product of two means of squares is a fourth power: divide one of them by its mean.": {
        "v_of": lambda v: v.mean(1, True) * v.mean(0, True)
    },
    "v is a mean of *squares*: its root has the gradient's size.": {"root": lambda v: v},
    "There is an ε in your denominator. The 10⁻³⁰ in the means is enough.": {
        "root": lambda v: v.sqrt() + 1e-8
    },
    "The parameters go up the slope: θ ← θ − lr · g/√v.": {"root": lambda v: -v.sqrt()},
    "You keep only the squares of the last gradient. The means keep 1 − s of themselves.": {
        "share": lambda t: 1
    },
}
FACTORED_HINTS = {
    "'NoneType'": "A parameter without a gradient has None in `.grad`: do not change it or its state.",
    "Dimension out of range": OTHER_SHAPES,
    "must match the size of tensor": (
        "Rows and columns do not fit: one has a mean per row, the other per column."
    ),
}


def _walked(gradients: Sequence[torch.Tensor], rate: float, **how: Any) -> Any:
    """The way of a parameter by the root of a factored v (Shazeer and Stern 2018, algorithm 4)."""
    share = how.get("share", lambda t: t**-0.8)
    v_of = how.get("v_of", lambda v: v.mean(1, True) / v.mean() * v.mean(0, True))
    root = how.get("root", torch.sqrt)
    mean = torch.zeros(())
    way = torch.zeros(())
    for t, gradient in enumerate(gradients, 1):
        mean = mean + share(t) * (gradient.square() + 1e-30 - mean)  # its rows' means are the means of rows
        v = v_of(mean) if mean.ndim == 2 else mean
        way = way - rate * gradient / root(v)
    return way


def _updated(make: Any, reload: bool = False) -> tuple[list[torch.Tensor], list[list[torch.Tensor]]]:
    """Return the change of each parameter of `FACTORED` in four steps from one, and its gradients."""
    dice = torch.Generator().manual_seed(4)
    weights = [torch.ones(shape) for shape, _, _ in FACTORED]
    given: list[list[torch.Tensor]] = [[] for _ in weights]
    optimizer: Any = None
    stays = (
        "Parameters after one without a gradient are not updated: go on with the next, as `continue` does."
    )
    moved = "`p.data = …` gives the parameter new memory, and its views keep the old: change it in place."
    for step in range(1, 5):
        if step == 1 or (step == 3 and reload):
            saved = copy.deepcopy(optimizer.state_dict()) if optimizer else None
            weights = [torch.nn.Parameter(weight.detach().clone()) for weight in weights]
            optimizer = make([{"params": weights[:-1]}, {"params": weights[-1:], "lr": 0.1}])
            if saved:
                optimizer.load_state_dict(saved)
        for weight, gradients, (shape, without, _) in zip(weights, given, FACTORED, strict=True):
            drawn = 1e-8 * torch.randn(shape, generator=dice)
            if shape == (1, 6) and step == 1:
                drawn.zero_()  # a mean of squares of zeros: only 10⁻³⁰ keeps its root from dividing by 0
            if step in without:
                weight.grad = None
            else:
                weight.grad = drawn.clone()
                gradients.append(drawn)
        before = [(weight, weight.data_ptr(), weight.detach().clone()) for weight in weights]
        optimizer.step()
        used = [(weight, old, weight.grad) for weight, _, old in before if weight.grad is not None]
        stuck = any(torch.equal(weight, old) and bool(gradient.any()) for weight, old, gradient in used)
        expect(not stuck or len(used) == len(weights), stays)
        expect(all(weight.data_ptr() == place for weight, place, _ in before), moved)
        for weight, gradients in zip(weights, given, strict=True):
            untouched = weight.grad is None or torch.equal(weight.grad, gradients[-1])
            expect(untouched, "You change gradients in place. Others may read them: only read them, too.")
    return [weight.detach() - 1 for weight in weights], given


@exercise("02.3", "It learns with a row and a column per matrix, and continues from a state_dict.")
def factored(answer: Any) -> None:
    """`answer(parameters, lr)` makes an optimizer that keeps the means of squares of rows and columns."""
    begun = _tried(answer, steps=2, hints=FACTORED_HINTS)  # finds most mistakes before the 60 steps
    theirs = "Your class does not make a torch.optim.Optimizer: keep its first lines as they were."
    expect(isinstance(begun.optimizer, torch.optim.Optimizer), theirs)
    with told(RAISED, FACTORED_HINTS):
        got, given = _updated(answer)
        loaded, _ = _updated(answer, reload=True)
    zero = (
        "A weight is not finite after a first gradient of zeros. Is 10⁻³⁰ in each mean? Then row · column is "
        "10⁻⁶⁰, which is 0 in fp32: divide first."
    )
    rates = [*[begun.optimizer.defaults.get("lr", 0)] * (len(got) - 1), 0.1]
    for weight, gradients, rate, (_, _, message) in zip(got, given, rates, FACTORED, strict=True):
        if not same([weight], [_walked(gradients, rate)]):
            if weight is got[0]:  # the matrix: the mistakes are ideas of its rows and columns
                for mistake, how in FACTORED_MISTAKES.items():
                    expect(not same([weight], [_walked(gradients, rate, **how)]), mistake)
            expect(weight.isfinite().all(), zero)
            fail(message)
    tried = _tried(answer, steps=60, hints=FACTORED_HINTS)
    _expect_clean(tried)
    means = sum(sum(one.shape) if one.ndim == 2 else one.numel() for one in tried.weights)
    most = 4 * means + 8 * len(tried.weights)  # 8 for each parameter's t
    per = f"{tried.kept / tried.parameters:.2f} bytes per parameter"
    more = f"It keeps {per}: more than a row and a column per matrix. What else do you keep?"
    expect(tried.kept <= most, more)
    other = "After `load_state_dict()` it continues differently: what do you keep outside of `self.state`?"
    expect(same(got, loaded), other)
    print(f"{per} (traced on the CPU), and a loss of {tried.final:.2f} after 60 steps")


# --------------------------------------------------------------------------------------------------
# 02.4: frugal
@exercise("02.4", "It learns, whatever the size of the loss, with little more than half of Adam's bytes.")
def frugal(answer: Any) -> None:
    """`answer(parameters)` makes an optimizer of your own: few bytes, any size of the loss, and it learns."""
    most, best = 4.5, 2.8  # bytes per parameter, loss
    got = _tried(answer, steps=60)
    _expect_clean(got)
    per = got.kept / got.parameters
    hidden = got.hidden / got.parameters
    many = f"It keeps {per:.2f} bytes per parameter, but the limit is {most}."
    if hidden > 0.1:
        many += f" {hidden:.2f} are on the weights, in a global or in a closure: they count too."
    expect(per <= most, many)
    loud = _tried(answer, steps=60, louder=1024.0, traced=False)  # for its loss alone
    follows = (
        "With a loss 1,024 times as large it trains differently. Does your step grow with the gradient? "
        "Or does a state leave the range of its format?"
    )
    expect(not loud.diverged and abs(loud.final - got.final) < 0.15, follows)
    poor = (
        f"After 60 steps the loss is {got.final:.3f}, but the limit is {best}. "
        "Try other rates, or another design."
    )
    expect(got.final <= best, poor)
    print(f"{per:.2f} bytes per parameter (traced on the CPU)")
