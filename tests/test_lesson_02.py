"""Lesson 02: answers to its exercises; the valley and its walks, figures, the walker."""

import functools
import math
import textwrap
from contextlib import redirect_stdout
from io import StringIO
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from checking import Answers, JudgedAnswers
from lesson_source import SOURCES, cells, names_from_cells

from course_utils.lessons.adam.by_hand import RULES, START, Valley, steps_needed, trajectory
from course_utils.lessons.adam.figures import LEVELS, outcome, walks
from course_utils.lessons.adam.widget import walker

# --------------------------------------------------------------------------------------------------
# 02.1: adam_in_pieces


def by_index(weight: Any, gradient: Any, m: Any, v: Any, step: int, rate: float, size: int) -> None:
    """With slices, and one buffer for all pieces."""
    buffer = torch.empty(size)
    flat = [tensor.view(-1) for tensor in (weight, gradient, m, v)]
    for first in range(0, weight.numel(), size):
        w, g, mean, square = (tensor[first : first + size] for tensor in flat)
        mean.lerp_(g, 0.1)
        root = torch.mul(g, g, out=buffer[: len(g)])
        square.lerp_(root, 0.001)
        torch.sqrt(square, out=root).div_((1 - 0.999**step) ** 0.5).add_(1e-8)
        w.addcdiv_(mean, root, value=-rate / (1 - 0.9**step))


def at_once(weight: Any, gradient: Any, m: Any, v: Any, step: int, rate: float, size: int = 0) -> None:
    m.mul_(0.9).add_(gradient, alpha=0.1)
    v.mul_(0.999).addcmul_(gradient, gradient, value=0.001)
    weight.sub_(rate * m / (1 - 0.9**step) / ((v / (1 - 0.999**step)).sqrt() + 1e-8))


def without_del(weight: Any, gradient: Any, m: Any, v: Any, step: int, rate: float, size: int) -> None:
    pieces = (tensor.view(-1).split(size) for tensor in (weight, gradient, m, v))
    for w, g, mean, square in zip(*pieces, strict=True):
        mean.lerp_(g, 0.1)
        square.mul_(0.999).addcmul_(g, g, value=0.001)
        root = (square / (1 - 0.999**step)).sqrt_().add_(1e-8)
        w.addcdiv_(mean, root, value=-rate / (1 - 0.9**step))


def with_new_means(weight: Any, gradient: Any, m: Any, v: Any, step: int, rate: float, size: int) -> None:
    m = 0.9 * m + 0.1 * gradient
    v = 0.999 * v + 0.001 * gradient**2
    weight.sub_(rate * m / (1 - 0.9**step) / ((v / (1 - 0.999**step)).sqrt() + 1e-8))


def correcting_m(weight: Any, gradient: Any, m: Any, v: Any, step: int, rate: float, size: int) -> None:
    m.mul_(0.9).add_(gradient, alpha=0.1)
    v.mul_(0.999).addcmul_(gradient, gradient, value=0.001)
    weight.sub_(rate * m / (1 - 0.9**step) / (v.sqrt() + 1e-8))


def as_in_the_cell(weight: Any, gradient: Any, m: Any, v: Any, step: int, rate: float, size: int) -> None:
    m.mul_(0.9).add_(gradient, alpha=0.1)
    v.mul_(0.999).addcmul_(gradient, gradient, value=0.001)
    weight.sub_(1e-3 * (m / (1 - 0.9)) / ((v / (1 - 0.999)).sqrt() + 1e-8))


def by_rows(weight: Any, gradient: Any, m: Any, v: Any, step: int, rate: float, size: int) -> None:
    for row in zip(weight, gradient, m, v, strict=True):
        without_del(*row, step, rate, row[0].numel())


ADAM_IN_PIECES = Answers(
    right=by_index,
    wrong=[
        (at_once, "as many new numbers as the weight has"),
        (without_del, "still hold the last one"),
        (with_new_means, "`m = …` makes a new tensor"),
        (correcting_m, "You correct m but not v"),
        (as_in_the_cell, "still that of the cell above"),
        (by_rows, "Do you cut the flat tensor"),
    ],
)

# --------------------------------------------------------------------------------------------------
# 02.2: update_in_backward


def with_dictionaries(parameters: Any, rate: float, keep: str = "") -> None:
    """One optimizer for all: it steps those masters that have a gradient. `keep` says which is not freed."""
    masters = {p: torch.nn.Parameter(p.detach().float()) for p in parameters if p.requires_grad}
    optimizer = torch.optim.AdamW(masters.values(), lr=rate)

    def update(p: Any) -> None:
        masters[p].grad = p.grad.float()
        if keep != "16 bits":
            p.grad = None
        optimizer.step()
        if keep != "fp32":
            masters[p].grad = None
        p.data = masters[p].detach().to(p.dtype)

    for p in masters:
        p.register_post_accumulate_grad_hook(update)


def with_the_loops_names(parameters: Any, rate: float) -> None:
    for p in parameters:
        if p.requires_grad:
            master = torch.nn.Parameter(p.detach().float())
            optimizer = torch.optim.AdamW([master], lr=rate)

            def update(p: Any) -> None:
                master.grad, p.grad = p.grad.float(), None  # noqa: B023 (it is the mistake)
                optimizer.step()  # noqa: B023 (it is the mistake)
                master.grad = None  # noqa: B023 (it is the mistake)
                p.copy_(master)  # noqa: B023 (it is the mistake)

            p.register_post_accumulate_grad_hook(update)


def without_masters(parameters: Any, rate: float) -> None:
    optimizers = {p: torch.optim.AdamW([p], lr=rate) for p in parameters if p.requires_grad}

    def update(p: Any) -> None:
        optimizers[p].step()
        p.grad = None

    for p in optimizers:
        p.register_post_accumulate_grad_hook(update)


def made_again(parameters: Any, rate: float) -> None:
    masters = {p: torch.nn.Parameter(p.detach().float()) for p in parameters if p.requires_grad}
    kept = {}

    def update(p: Any) -> None:
        masters[p].grad, p.grad = p.grad.float(), None
        kept[p] = torch.optim.AdamW([masters[p]], lr=rate)
        kept[p].step()
        masters[p].grad = None
        p.copy_(masters[p])

    for p in masters:
        p.register_post_accumulate_grad_hook(update)


def made_in_the_hook(parameters: Any, rate: float) -> None:
    def update(p: Any) -> None:
        master = torch.nn.Parameter(p.detach().float())
        master.grad, p.grad = p.grad.float(), None
        torch.optim.AdamW([master], lr=rate).step()
        p.copy_(master)

    for p in parameters:
        if p.requires_grad:
            p.register_post_accumulate_grad_hook(update)


def for_all(parameters: Any, rate: float) -> None:
    for p in parameters:
        p.register_post_accumulate_grad_hook(lambda p: None)


UPDATE_IN_BACKWARD = Answers(
    right=with_dictionaries,
    wrong=[
        (for_all, "A frozen parameter never gets a gradient"),
        (with_the_loops_names, "A hook looks up a loop's names when it *runs*"),
        (functools.partial(with_dictionaries, keep="16 bits"), "A gradient is still there after your hook"),
        (functools.partial(with_dictionaries, keep="fp32"), "whose gradients are in fp32?"),
        (without_masters, "AdamW has 16-bit weights"),
        (made_again, "makes an optimizer again in each step"),
        (made_in_the_hook, "Nothing is kept from step to step"),
    ],
)

# --------------------------------------------------------------------------------------------------
# 02.3: factored


class Sums(torch.optim.Optimizer):
    """As in the paper, with sums instead of means; subclasses have one mistake each."""

    def __init__(self, parameters: Any, lr: float = 3e-3) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(self.direction(p, self.state[p]), alpha=group["lr"])

    def direction(self, p: Any, state: Any) -> Any:
        state.setdefault("t", torch.zeros(())).add_(1)
        squares = p.grad.square() + 1e-30
        axes = (1, 0) if p.ndim == 2 else ()
        new = [squares.sum(axis, keepdim=True) for axis in axes] or [squares]
        means = state.setdefault("means", [torch.zeros_like(one) for one in new])
        for mean, one in zip(means, new, strict=True):
            mean.lerp_(one, state["t"].item() ** -0.8)
        return p.grad * (means[0] * (means[1] / means[1].sum()) if axes else means[0]).rsqrt()


class WholeMean(Sums):
    """RMSProp: a mean of squares for every number."""

    def direction(self, p: Any, state: Any) -> Any:
        state["t"] = state.get("t", 0) + 1
        state.setdefault("v", torch.zeros_like(p)).lerp_(p.grad.square() + 1e-30, state["t"] ** -0.8)
        return p.grad * state["v"].rsqrt()


class AsksEveryGradient(Sums):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(self.direction(p, self.state[p]), alpha=group["lr"])


class StopsAtNone(Sums):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    break
                p.sub_(self.direction(p, self.state[p]), alpha=group["lr"])


class OneRate(Sums):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            p.sub_(self.direction(p, self.state[p]), alpha=self.defaults["lr"])


class StatesOutside(Sums):
    def __init__(self, parameters: Any, lr: float = 3e-3) -> None:
        super().__init__(parameters, lr)
        self.own: dict[Any, Any] = {}

    def direction(self, p: Any, state: Any) -> Any:
        return super().direction(p, self.own.setdefault(p, {}))


class RemembersUpdates(Sums):
    def direction(self, p: Any, state: Any) -> Any:
        p.update = super().direction(p, state)
        return p.update


FACTORED = Answers(
    right=Sums,
    wrong=[
        (WholeMean, "the mean of squares of a whole matrix"),
        (AsksEveryGradient, "has None in `.grad`"),
        (StopsAtNone, "go on with the next one"),
        (OneRate, "a learning rate of its own"),
        (StatesOutside, "what do you keep outside of `self.state`?"),
        (RemembersUpdates, "more than a row and a column per matrix"),
    ],
)

# --------------------------------------------------------------------------------------------------
# 02.4: frugal


class Adam:
    """An Adam that keeps all its states in `state`, right as it is."""

    def __init__(self, parameters: Any, rate: float = 3e-3) -> None:
        self.parameters = list(parameters)
        self.rate = rate
        self.steps = 0
        self.state = [{"m": torch.zeros_like(p), "v": torch.zeros_like(p)} for p in self.parameters]

    @torch.no_grad()
    def step(self) -> None:
        self.steps += 1
        for weight, state in zip(self.parameters, self.state, strict=True):
            self.one(weight, state)

    def one(self, weight: torch.Tensor, state: Any) -> None:
        at_once(weight, weight.grad, state["m"], state["v"], self.steps, self.rate)


class InBf16(Adam):
    """Both moments in 16 bits, and v of the last twenty steps."""

    def one(self, weight: Any, state: Any) -> None:
        m = 0.9 * state["m"].float() + 0.1 * weight.grad
        v = 0.95 * state["v"].float() + 0.05 * weight.grad**2
        state.update(m=m.bfloat16(), v=v.bfloat16())
        root = (v / (1 - 0.95**self.steps)).sqrt() + 1e-12
        weight.sub_(self.rate * m / (1 - 0.9**self.steps) / root)


class OnTheWeights(Adam):
    """All states out of sight."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        for weight, state in zip(self.parameters, self.state, strict=True):
            weight.m = state.pop("m")
            weight.v = state.pop("v")

    def one(self, weight: Any, state: Any) -> None:
        at_once(weight.data, weight.grad, weight.m, weight.v, self.steps, self.rate)


class UnderAutograd(InBf16):
    def step(self) -> None:
        for weight in self.parameters:
            weight -= self.rate * weight.grad.sign()


FRUGAL = Answers(
    right=InBf16,
    wrong=[
        (UnderAutograd, "In training, your optimizer raised RuntimeError"),
        (OnTheWeights, "keeps 8.00 bytes per parameter, but the limit is 4.5"),
        (lambda parameters: torch.optim.SGD(parameters, lr=0.3), "Does your step grow with the gradient"),
    ],
)

ANSWERS = {"02.1": ADAM_IN_PIECES, "02.2": UPDATE_IN_BACKWARD, "02.3": FACTORED, "02.4": FRUGAL}


class TestAnswers(JudgedAnswers):
    answers = ANSWERS


# --------------------------------------------------------------------------------------------------
# The lesson's own code


@pytest.mark.parametrize("rule", RULES)
def test_each_rule_of_the_lesson_walks_as_torchs_optimizer_does(rule: str) -> None:
    cells = names_from_cells("02", "class GPT", "def momentum(", "def walk(", "def adam(")
    betas = {"momentum": {"beta1": 0.8}, "RMSProp": {"beta2": 0.95}, "Adam": {"beta1": 0.8, "beta2": 0.95}}
    ours = functools.partial(cells[rule.lower().replace(" ", "_")], **betas.get(rule, {}))
    path = cells["walk"](ours, 0.05, 30)
    for one, other in zip(path, trajectory(rule, 0.05, 30, beta1=0.8, beta2=0.95), strict=True):
        assert one == pytest.approx(other, rel=1e-6, abs=1e-9)


def test_the_lessons_adamw_equals_torchs_in_double() -> None:
    """The notebook compares losses alone, to four digits: weight decay left out would not show there."""
    made = names_from_cells("02", "class GPT", "def adam(", "class HandAdamW")["HandAdamW"]
    dice = torch.Generator().manual_seed(0)
    ours = torch.nn.Parameter(torch.randn(4, 3, generator=dice, dtype=torch.float64))
    theirs = torch.nn.Parameter(ours.detach().clone())
    optimizers = made([ours], 0.01), torch.optim.AdamW([theirs], lr=0.01)
    for _ in range(50):
        ours.grad = torch.randn(4, 3, generator=dice, dtype=torch.float64)
        theirs.grad = ours.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)


def _says(part: str, answer: str, **names: Any) -> str:
    """What a cell that asks for lines says once they are written, indented, in the place it has for them."""
    [cell] = [cell for cell in cells(next(SOURCES.glob("02_*.py"))) if part in cell]
    place = next(line for line in cell.splitlines() if "# write t" in line)
    said = StringIO()
    with redirect_stdout(said):
        exec(cell.replace(place, textwrap.indent(answer, "    ")), names)
    return said.getvalue()


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("update = torch.sign(0.9 * m + 0.1 * g)\nm.mul_(0.99).add_(g, alpha=0.01)", "Right."),
        ("m.mul_(0.99).add_(g, alpha=0.01)\nupdate = torch.sign(0.9 * m + 0.1 * g)", "Not yet"),
        ("update = torch.sign(0.9 * m + 0.1 * g)\nm = 0.99 * m + 0.01 * g", "Not yet"),
    ],
)
def test_the_lessons_lion_is_judged(answer: str, said: str) -> None:
    assert _says("def lion(", answer, torch=torch).startswith(said)


def test_the_bytes_that_an_optimizer_keeps_are_judged() -> None:
    words = torch.nn.Embedding(100, 8)
    optimizer = torch.optim.AdamW(words.parameters(), foreach=False)
    words.weight.grad = torch.zeros_like(words.weight)
    optimizer.step()
    names: dict[str, Any] = {
        "optimizer": optimizer,
        "model": SimpleNamespace(words=words),
        "allocated": {"the gradients": 0, "step()": 6400},
    }
    answer = (
        "for state in optimizer.state.values():\n    total += sum(tensor.nbytes for tensor in state.values())"
    )
    assert _says("def kept_bytes(", answer, **names).startswith("Right.")
    assert _says("def kept_bytes(", "", **names).startswith("Not yet: 0 bytes")


@pytest.mark.parametrize("rule", RULES)
def test_turning_the_valley_changes_the_walk_of_those_with_v_alone(rule: str) -> None:
    turned = Valley(25, 40)
    straight, other = (trajectory(rule, 0.03, 50, valley=valley) for valley in (Valley(), turned))
    apart = math.dist(other[-1], turned.turned(straight[-1]))
    assert apart > 0.5 if rule in ("RMSProp", "Adam") else apart < 1e-9


def test_descent_needs_the_steps_that_the_closed_form_says() -> None:
    path = trajectory("gradient descent", 2 / 26, 200)
    assert steps_needed(path) == math.ceil(math.log(0.01) / math.log(24 / 26)) == 58
    assert steps_needed(path[:40]) is None
    assert outcome(path[:40]) == "not there after 39 steps"
    assert outcome(trajectory("gradient descent", 0.082, 500)) == "leaves the valley"
    assert len(trajectory("gradient descent", 1.0, 500)) < 20


def test_a_walk_without_a_length_is_refused() -> None:
    with pytest.raises(ValueError, match="η must be above 0"):
        trajectory("Adam", math.nan)


def test_walks_draw_every_step_and_say_how_each_ended() -> None:
    paths = {f"η = {rate}": trajectory("gradient descent", rate, 100) for rate in (0.01, 0.07, 0.09)}
    figure: Any = walks(paths, "One step size for two directions")
    assert "η = 0.09: leaves the valley" in figure.alt and "in 64 steps" in figure.alt
    for ax, (name, path) in zip(figure.axes, paths.items(), strict=True):
        walk, dots, _ = (line.get_xydata() for line in ax.lines)
        assert walk.tolist() == [*map(list, path)]
        assert all(np.abs(dots[::3] - point).max(axis=1).min() < 0.02 for point in path)
        assert ax.get_title("left") == name and ax.get_xlabel() == outcome(path)


def test_the_lines_around_a_walk_are_level_and_the_map_has_one_scale() -> None:
    valley = Valley(100, 30)
    (ax,) = walks({"Adam": [valley.turned(START)]}, "A walk", valley).axes
    for level, ring in zip(LEVELS, ax.patches, strict=True):
        corners = ax.transData.inverted().transform(ring.get_verts()).tolist()
        own = [Valley(angle=-30).turned(corner) for corner in corners]
        assert [(x**2 + 100 * y**2) / 2 for x, y in own] == pytest.approx([level] * len(own), rel=0.03)
    (left, low), (right, high) = ax.transData.transform([(0, 0), (1, 1)])
    assert right - left == pytest.approx(high - low)


def test_the_walker_shows_what_its_controls_say() -> None:
    shown = walker("Adam", 0.5)
    assert shown.path == trajectory("Adam", 0.5, 200)
    for name, value in {"rate": 0.1, "beta1": 0.0, "beta2": 0.9, "steepness": 100.0, "angle": 45.0}.items():
        before = shown.picture.value
        shown.controls[name].value = value
        assert shown.picture.value != before
    assert shown.path == trajectory("Adam", 0.1, 200, beta1=0.0, beta2=0.9, valley=Valley(100, 45))
    assert "8 bytes in fp32" in shown.message
    shown.controls["optimizer"].value = "gradient descent"
    assert "leaves the valley" in shown.picture.value and "no state" in shown.message
