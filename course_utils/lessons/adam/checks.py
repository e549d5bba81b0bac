"""Checks of the exercises of lesson 02, "Adam": each names the misconception, never the answer."""

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.utils import parameters_to_vector

from ...interactive.feedback import Mistakes, call_for_effect, exercise, expect, recognized
from ..shared.judging import alive_during, same, seeded, told
from ..shared.language_model import language_model, train_language_model

# --------------------------------------------------------------------------------------------------
# 02.1: adam_in_pieces

# a weight's shape, and how many numbers a piece has: in the last, a row is too large for a piece
PIECES = (((5, 3), 4), ((3,), 7), ((1,), 1), ((1, 3200), 512))


def _adam(
    weight: Any, gradient: Any, m: Any, v: Any, step: int, rate: float, size: int, mistake: str = ""
) -> None:
    """Adam's step (Kingma and Ba 2015, algorithm 1), all at once; on request with a `mistake`."""
    m.mul_(0.9).add_(gradient, alpha=0.1)
    v.mul_(0.999).addcmul_(gradient, gradient, value=0.001)
    v_hat = v if mistake == "v uncorrected" else v / (1 - 0.999**step)
    root = (v_hat + 1e-8).sqrt() if mistake == "ε inside" else v_hat.sqrt() + 1e-8
    weight.sub_(rate * m / (1 - 0.9**step) / root)


def _walk(
    update: Callable[..., None], shape: tuple[int, ...], size: int, **how: Any
) -> tuple[torch.Tensor, int]:
    """m, v and weight, flat, before and after each of three steps; the most bytes that were new in one."""
    m, v, weight = torch.zeros(shape), torch.zeros(shape), torch.linspace(1, 2, math.prod(shape))
    given = {"m": m, "v": v, "weight": weight.reshape(shape)}
    dice = torch.Generator().manual_seed(2)
    states = [torch.stack([tensor.flatten() for tensor in given.values()])]
    most = 0
    for number in range(1, 4):
        gradient = 1e-6 * torch.randn(shape, generator=dice)  # so small that ε counts
        before = gradient.clone()
        arguments = {**given, "gradient": gradient, "step": number, "rate": 0.1, "size": size, **how}
        seen = alive_during(partial(call_for_effect, update, **arguments), [*given.values(), gradient])
        changed = "You change the gradient. Only read it: make a new tensor instead."
        expect(torch.equal(gradient, before), changed)
        most = max(most, seen.peak)
        states.append(torch.stack([tensor.flatten() for tensor in given.values()]))
    return torch.stack(states, dim=1), most


def _weight_after(shape: tuple[int, ...], size: int, **how: Any) -> torch.Tensor:
    return _walk(_adam, shape, size, **how)[0][2]


STEP_MISTAKES: Mistakes = {
    "You correct m but not v: both began at zero.": partial(_weight_after, mistake="v uncorrected"),
    "Your ε is inside the root. It belongs outside: √v̂ + ε.": partial(_weight_after, mistake="ε inside"),
    "Your learning rate is 1e-3 whatever `rate` is.": partial(_weight_after, rate=1e-3),
    "You always correct as in step 1: use `step`.": partial(_weight_after, step=1),
    "Your weight's line is still that of the cell above: it has its own rate and step.": (
        partial(_weight_after, rate=1e-3, step=1)
    ),
}


@exercise("02.1", "Adam up to rounding, and never more new numbers than one piece has.")
def adam_in_pieces(answer: Any) -> None:
    """`answer(weight, gradient, m, v, step, rate, size)` updates weight, m and v in pieces of `size`."""
    most = 0
    for shape, size in PIECES:
        states, most = _walk(answer, shape, size)
        right, _ = _walk(_adam, shape, size)
        rest = math.prod(shape) % size
        for name, mine, wanted in zip(("m", "v", "weight"), states, right, strict=True):
            place = f"{name} has not changed. `{name} = …` makes a new tensor: use methods such as `mul_`."
            expect(not torch.equal(mine[0], mine[-1]), place)
            left_out = rest > 0 and torch.equal(mine[0, -rest:], mine[-1, -rest:])
            expect(not left_out, "You leave out the last piece, which has fewer numbers than the others.")
            mean = (
                f"{name} is off: it keeps β of itself and takes 1 − β of the new. Do not correct it in place."
            )
            expect(name == "weight" or torch.allclose(mine, wanted, 1e-3, 1e-20), mean)
        otherwise = "m and v are right, the weight is not: compare its line with the one above, part by part."
        close = partial(same, tolerance=1e-4)
        recognized([states[2]], [(shape, size)], _weight_after, STEP_MISTAKES, otherwise, close)
    shape, size = PIECES[-1]
    whole = "You hold as many new numbers as the weight has. Do you cut the flat tensor, or keep all pieces?"
    expect(most < 4 * math.prod(shape), whole)
    more = (
        "You hold more than one new tensor of a piece's size. Does an expression make several? "
        "Or does the name in your loop still hold the last one while the next is made?"
    )
    expect(most <= 4 * size + 512, more)  # a piece in fp32, and a number or two


# --------------------------------------------------------------------------------------------------
# 02.2: update_in_backward
RATE = 3e-3
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


def _hooked_model() -> nn.Sequential:
    with seeded():
        layers = (nn.Linear(48, 64), nn.GELU(), nn.Linear(64, 64), nn.Linear(64, 48))
        model = nn.Sequential(*layers).bfloat16()
    model[2].requires_grad_(False)
    return model


def _backwards(model: nn.Sequential) -> Iterator[None]:
    """Run backward on another batch each time."""
    dice = torch.Generator().manual_seed(6)
    for _ in range(8):
        x = torch.randn(8, 48, generator=dice).bfloat16()
        (model(x).float() - 1).square().mean().backward()
        yield


def _updated_after(rate: float = RATE, forgets: bool = False) -> torch.Tensor:
    """The 16-bit weights of a plain loop whose step comes after backward, as one vector.

    A mistaken one has another `rate`, or `forgets` the optimizer's states.
    """
    model = _hooked_model()
    weights: list[Any] = [weight for weight in model.parameters() if weight.requires_grad]
    masters = [nn.Parameter(weight.detach().float()) for weight in weights]
    optimizer = torch.optim.AdamW(masters, lr=rate)
    for _ in _backwards(model):
        for weight, master in zip(weights, masters, strict=True):
            master.grad, weight.grad = weight.grad.float(), None
        optimizer.step()
        for weight, master in zip(weights, masters, strict=True):
            weight.data.copy_(master)
        if forgets:
            optimizer = torch.optim.AdamW(masters, lr=rate)
    return parameters_to_vector(weights)


HOOKED_MISTAKES: Mistakes = {
    "Your hook makes an optimizer again in each step: the last one's states are forgotten.": (
        partial(_updated_after, forgets=True)
    ),
    "Your learning rate is 1e-3 whatever `rate` is.": partial(_updated_after, rate=1e-3),
}
HOOKED_BYTES = {  # by bytes per parameter after backward
    0: "Nothing is kept from step to step. Master weights and AdamW's states must outlive the hook's call.",
    4: "4 bytes per parameter: AdamW has 16-bit weights. Small updates are lost: give it fp32 masters.",
    16: "4 bytes per parameter too many are kept after backward: whose gradients are in fp32?",
}


@exercise("02.2", "Backward updates the weights as a step after it would, and no gradient waits.")
def update_in_backward(answer: Any) -> None:
    """`answer(parameters, rate)` lets backward update 16-bit parameters by AdamW on fp32 masters."""
    model = _hooked_model()
    weights = list(model.parameters())
    first = [weight.detach().clone() for weight in weights]
    trained = [weight for weight in weights if weight.requires_grad]
    waiting = []

    def train() -> None:
        call_for_effect(answer, list(weights), RATE, hints=HOOK_HINTS)
        for weight in trained:
            weight.register_post_accumulate_grad_hook(lambda w: waiting.append(w.grad is not None))
        with told("In backward, your hook raised", HOOK_HINTS):
            list(_backwards(model))

    per = alive_during(train, weights).end / sum(weight.numel() for weight in trained)
    stuck = "A parameter has not changed. Is each hook registered? Do master weights go back, in place?"
    for now, old in zip(weights, first, strict=True):
        changed = not torch.equal(now, old)
        expect(changed or not now.requires_grad, stuck)
        expect(not changed or now.requires_grad, "You change frozen parameters.")
    late = "A gradient is still there after your hook: free it inside, `p.grad = None`."
    expect(not any(waiting), late)
    got = [parameters_to_vector(trained)]
    right = recognized(got, [()], _updated_after, HOOKED_MISTAKES, same=partial(same, tolerance=0.002))
    more = f"{per:.1f} bytes per trained parameter are kept after backward. Which tensors are they?"
    expect(abs(per - 12) < 0.7, HOOKED_BYTES.get(round(per), more))
    expect(right, "The memory is right, the weights are not AdamW's. Compare with a step after backward.")
    print(f"{per:.1f} bytes per trained parameter are kept, and no gradient (traced on the CPU)")


# --------------------------------------------------------------------------------------------------
# 02.3 and 02.4: an optimizer in training
RAISED = "In training, your optimizer raised"


class Trial(NamedTuple):
    """The result of a short training with somebody's optimizer."""

    parameters: int
    kept: int  # bytes that it leaves next to the weights, wherever they are
    final: float  # the last loss


def trial(make: Callable[..., Any], steps: int = 4, louder: float = 1.0) -> Trial:
    """Train a small character model with the optimizer of `make(parameters)`, traced on the CPU.

    Gradients are `louder` times as large, as if the loss were.
    """
    expect(callable(make), "Pass the class itself: its name, without parentheses.")
    model = language_model(1, 32)
    weights = list(model.parameters())
    first = parameters_to_vector(weights).detach()
    for weight in weights:
        weight.register_hook(lambda gradient: gradient * louder)

    def train() -> tuple[Any, float]:
        optimizer = make(weights)
        return optimizer, train_language_model(lambda _: optimizer, steps=steps, model=model).final

    (_, final), _, kept, _ = alive_during(train, weights)  # with the optimizer, so that it is alive
    still = "The weights do not change. Change them in place, as weight.sub_(…) does, under torch.no_grad()."
    expect(not torch.equal(parameters_to_vector(weights), first), still)
    return Trial(len(first), kept, final)


# --------------------------------------------------------------------------------------------------
# 02.3: factored
OTHER_SHAPES = "Only a matrix has rows and columns. For every other shape, v is the mean of squares itself."
MATRIX = "The update of a matrix is off. Compare one entry of v by hand, after one step and after two."
OWN_T = "t counts a parameter's own updates. In a step without a gradient it does not change."
NEXT = "After a parameter without a gradient, go on with the next one, as `continue` does."
GROUPS = 'Use the learning rate of each group, `group["lr"]`: one group has a learning rate of its own.'
FACTORED = (  # shape, rate, steps without a gradient, rows with a gradient of 0, what is said if it is off
    ((5, 3), 3e-3, (), 0, MATRIX),
    ((4,), 3e-3, (), 0, OTHER_SHAPES),
    ((2, 3, 2), 3e-3, (), 0, OTHER_SHAPES),
    ((3, 4), 3e-3, (2,), 1, OWN_T),
    ((3,), 3e-3, (), 0, NEXT),
    ((2, 6), 0.1, (), 0, GROUPS),  # in a group of its own
)
FACTORED_HINTS = {
    "'NoneType'": "A parameter without a gradient has None in `.grad`: do not change it or its state.",
    "Dimension out of range": OTHER_SHAPES,
    "must match the size of tensor": "Rows and columns do not fit: one has a mean per row, one per column.",
}


def _gradients() -> list[list[torch.Tensor | None]]:
    """The gradients of each parameter of `FACTORED` in four steps."""
    dice = torch.Generator().manual_seed(4)
    found: list[list[torch.Tensor | None]] = []
    for shape, _, without, zeros, _ in FACTORED:
        drawn = 1e-8 * torch.randn(4, *shape, generator=dice)  # so small that an ε of 1e-8 counts
        drawn[:, :zeros] = 0
        found.append([None if step in without else drawn[step - 1] for step in range(1, 5)])
    return found


def _walked(
    gradients: Sequence[torch.Tensor | None],
    rate: float,
    whole: bool = False,
    divided: bool = True,
    root: Callable[[torch.Tensor], torch.Tensor] = torch.sqrt,
) -> torch.Tensor:
    """The way of a parameter by the root of a factored v (Shazeer and Stern 2018, algorithm 4).

    A mistaken one keeps a `whole` matrix, has a product that is not `divided`, or another `root`.
    """
    mean = way = torch.zeros(())
    for t, gradient in enumerate((one for one in gradients if one is not None), 1):
        mean = mean + t**-0.8 * (gradient.square() + 1e-30 - mean)  # its rows' means are the means of rows
        v = mean
        if mean.ndim == 2 and not whole:
            v = mean.mean(1, True) / (mean.mean() if divided else 1) * mean.mean(0, True)
        way = way - rate * gradient / root(v)
    return way


FACTORED_MISTAKES: Mistakes = {
    "You keep the mean of squares of a whole matrix. Keep only a row and a column.": (
        partial(_walked, whole=True)
    ),
    "A product of two means of squares is a fourth power: divide one of them by its mean.": (
        partial(_walked, divided=False)
    ),
    "v is a mean of *squares*: its root has the gradient's size.": partial(_walked, root=lambda v: v),
    "There is an ε in your denominator. The 10⁻³⁰ in the means is enough.": (
        partial(_walked, root=lambda v: v.sqrt() + 1e-8)
    ),
}


def _updated(make: Callable[..., Any], reload: bool = False) -> list[torch.Tensor]:
    """The change of each parameter of `FACTORED` in four steps; to `reload`, two optimizers take two each."""

    def begin(at: Sequence[torch.Tensor]) -> tuple[list[nn.Parameter], Any]:
        parameters = [nn.Parameter(tensor.detach().clone()) for tensor in at]
        groups = [{"params": parameters[:-1]}, {"params": parameters[-1:], "lr": 0.1}]
        return parameters, make(groups, lr=3e-3)

    weights, optimizer = begin([torch.ones(shape) for shape, *_ in FACTORED])
    for step, gradients in enumerate(zip(*_gradients(), strict=True), 1):
        if reload and step == 3:
            saved = copy.deepcopy(optimizer.state_dict())
            weights, optimizer = begin(weights)
            optimizer.load_state_dict(saved)
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.grad = None if gradient is None else gradient.clone()
        optimizer.step()
        untouched = same([weight.grad for weight in weights], gradients, 0)
        expect(untouched, "You change gradients in place. Others may read them: only read them, too.")
    return [weight.detach() - 1 for weight in weights]


@exercise("02.3", "Right updates from a row and a column per matrix, and it continues from a state_dict.")
def factored(answer: Any) -> None:
    """`answer(parameters, lr)` makes an optimizer that keeps the means of squares of rows and columns."""
    with told(RAISED, FACTORED_HINTS):
        tried = trial(answer)
        got, loaded = (_updated(answer, reload) for reload in (False, True))
    zero = "A weight is not finite after gradients of zero. Is 10⁻³⁰ in each mean? And do you divide first?"
    for mine, gradients, (_, rate, *_, message) in zip(got, _gradients(), FACTORED, strict=True):
        expect(mine.isfinite().all(), zero)
        mistakes = FACTORED_MISTAKES if message == MATRIX else {}
        recognized([mine], [(gradients, rate)], _walked, mistakes, message, same)
    shapes = [weight.shape for weight in language_model(1, 32).parameters()]
    means = sum(sum(shape) if len(shape) == 2 else shape.numel() for shape in shapes)
    per = f"{tried.kept / tried.parameters:.2f} bytes per parameter"
    more = f"It keeps {per}: more than a row and a column per matrix. What else do you keep?"
    expect(tried.kept <= 4 * means + 8 * len(shapes), more)  # 8 for each parameter's t
    other = "After `load_state_dict()` it continues differently: what do you keep outside of `self.state`?"
    expect(same(got, loaded), other)
    print(f"{per} (traced on the CPU)")


# --------------------------------------------------------------------------------------------------
# 02.4: frugal
@exercise("02.4", "It learns, whatever the size of the loss, with little more than half of Adam's bytes.")
def frugal(answer: Any) -> None:
    """`answer(parameters)` makes an optimizer of your own: few bytes, any size of the loss, and it learns."""
    most, best = 4.5, 2.8  # bytes per parameter, loss
    with told(RAISED):
        got = trial(answer, steps=60)
        loud = trial(answer, steps=60, louder=1024.0)
    expect(math.isfinite(got.final), "The weights are not finite any more: what do you divide by?")
    per = got.kept / got.parameters
    many = (
        f"It keeps {per:.2f} bytes per parameter, but the limit is {most}. "
        "Tensors on the weights, in a global or in a closure count too."
    )
    expect(per <= most, many)
    follows = (
        "With a loss 1,024 times as large it trains differently. Does your step grow with the gradient? "
        "Or does a state leave the range of its format?"
    )
    expect(abs(loud.final - got.final) < 0.15, follows)
    poor = f"After 60 steps the loss is {got.final:.3f}, above {best}. Try other rates, or another design."
    expect(got.final <= best, poor)
    print(f"{per:.2f} bytes per parameter (traced on the CPU)")
