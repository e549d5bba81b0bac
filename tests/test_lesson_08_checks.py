"""Checks of lesson 08: right answers of every style pass, and each planted wrong answer gets its hint."""

import math
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, islice
from typing import Any

import numpy
import torch
from checking import Answers, JudgedAnswers
from torch.nn.functional import cross_entropy

from course_utils.lessons.accumulation.micro_batches import mean_loss

Parts = Iterator[tuple[torch.Tensor, torch.Tensor]]


def streaming(
    counts: Callable[[torch.Tensor], int] = lambda targets: int((targets != -100).sum()),
    reduction: str = "sum",
    least: int = 0,
    skips: bool = True,
    last: bool = True,
    clears: bool = True,
    number: Callable[[torch.Tensor], Any] = torch.Tensor.item,
    steps: bool = True,
) -> Any:
    """A pass that counts micro-batches and divides gradients at the end of each group; right by default."""

    def train_pass(model: Any, optimizer: Any, loader: Parts, k: int) -> list[float]:
        losses: list[Any] = []
        total: Any = 0
        count = waiting = 0

        def finish() -> None:
            nonlocal total, count, waiting
            if count or not skips:
                for weight in model.parameters():
                    if weight.grad is not None:
                        weight.grad.div_(max(count, least))
                if steps:
                    optimizer.step()
                losses.append(total / max(count, least, 1))
            if clears:
                optimizer.zero_grad()
            total, count, waiting = 0, 0, 0

        for tokens, targets in loader:
            loss = cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), reduction=reduction)
            loss.backward()
            total = total + number(loss)
            count = count + counts(targets)
            waiting = waiting + 1
            if waiting == k:
                finish()
        if waiting and last:
            finish()
        optimizer.zero_grad()
        return losses

    return train_pass


def by_shares(model: Any, optimizer: Any, loader: Parts, k: int) -> list[Any]:
    """Means, weighed back to sums; gradients divided all at once; losses as tensors without a graph."""
    losses = []
    loader = iter(loader)
    for first in loader:
        group = chain([first], islice(loader, k - 1))
        first = None
        total = torch.zeros(()).double()
        count = 0
        for tokens, targets in group:
            real = targets != -100
            if real.any():
                loss = cross_entropy(model(tokens)[real], targets[real]) * real.sum()
                loss.backward()
                total = total + loss.detach()
                count = count + real.sum()
        grads = [weight.grad for weight in model.parameters() if weight.grad is not None]
        if count:
            torch._foreach_div_(grads, float(count))
            optimizer.step()
            losses.append(total / count)
        for weight in model.parameters():
            weight.grad = None
    return losses


def in_groups(
    model: Any, optimizer: Any, loader: Parts, k: int, graphs: bool = False, keep: bool = False
) -> list[Any]:
    """Looks at a whole group first; or keeps all its graphs."""
    losses: list[Any] = []
    loader = iter(loader)
    while group := list(islice(loader, k)):
        count = sum(int((targets != -100).sum()) for _, targets in group)
        waiting = []
        for tokens, targets in group if count else ():
            loss = cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), reduction="sum") / count
            waiting.append(loss)
            if not graphs:
                loss.backward()
        if count:
            if graphs:
                torch.stack(waiting).sum().backward()
            optimizer.step()
            losses.append(sum(waiting) if keep else torch.stack(waiting).sum().item())
        optimizer.zero_grad()
    return losses


def graphs_wait(model: Any, optimizer: Any, loader: Parts, k: int) -> list[float]:
    """Takes one micro-batch at a time, and goes backward once for each group."""
    losses = []
    loader = iter(loader)
    size = k
    while size:
        total = torch.zeros(()).double()
        count = 0
        size = 0
        for tokens, targets in islice(loader, k):
            total = total + cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), reduction="sum")
            count = count + (targets != -100).sum().item()
            size = size + 1
        if count:
            (total / count).backward()
            optimizer.step()
            losses.append(total.item() / count)
        optimizer.zero_grad()
    return losses


def of_means(model: Any, optimizer: Any, loader: Parts, k: int, divided: bool = True) -> list[float]:
    losses: list[float] = []
    while group := list(islice(loader, k)):
        for part in group:
            (mean_loss(model, part) / (k if divided else 1)).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(1.0)
    return losses


def padding_left_out(model: Any, optimizer: Any, loader: Parts, k: int) -> list[float]:
    """Groups k micro-batches that have real tokens."""
    return streaming()(model, optimizer, (part for part in loader if (part[1] != -100).any()), k)


def last_left_over(model: Any, optimizer: Any, loader: Parts, k: int) -> list[float]:
    """Returns when a group is incomplete, and leaves its gradients where they are."""
    losses: list[float] = []
    total = count = 0
    for number, (tokens, targets) in enumerate(loader, 1):
        loss = cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), reduction="sum")
        loss.backward()
        total = total + loss.item()
        count = count + int((targets != -100).sum())
        if number % k == 0:
            model.table.grad /= count
            optimizer.step()
            optimizer.zero_grad()
            losses.append(total / count)
            total = count = 0
    return losses


def no_gradient(model: Any, optimizer: Any, loader: Parts, k: int) -> list[float]:
    list(loader)
    for weight in model.parameters():
        weight.grad /= k
    return []


def cleared_each_time(model: Any, optimizer: Any, loader: Parts, k: int) -> list[float]:
    losses = []
    while group := list(islice(loader, k)):
        count = sum(int((targets != -100).sum()) for _, targets in group)
        for tokens, targets in group:
            optimizer.zero_grad()
            (
                cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), reduction="sum") / count
            ).backward()
        optimizer.step()
        losses.append(0.0)
    return losses


def zeros_left(model: Any, optimizer: Any, loader: Parts, k: int) -> list[float]:
    losses = streaming()(model, optimizer, loader, k)
    model.table.grad = torch.zeros_like(model.table)
    return losses


def by_index(model: Any, optimizer: Any, loader: Any, k: int) -> list[float]:
    for first in range(0, len(loader), k):
        print(loader[first : first + k])
    return []


def each_alone(model: Any, optimizer: Any, loader: Parts, k: int) -> list[float]:
    losses = []
    for part in loader:
        optimizer.zero_grad()
        loss = mean_loss(model, part)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def rest_unguarded(model: Any, optimizer: Any, loader: Parts, k: int) -> list[float]:
    """Asks whether there are tokens in whole groups, not in the rest."""
    losses: list[float] = []
    total, count, waiting = 0.0, 0, 0

    def finish() -> None:
        for weight in model.parameters():
            if weight.grad is not None:
                weight.grad /= torch.tensor(count)
        optimizer.step()
        losses.append(total / max(count, 1))

    for tokens, targets in loader:
        loss = cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), reduction="sum")
        loss.backward()
        total = total + loss.item()
        count = count + int((targets != -100).sum())
        waiting = waiting + 1
        if waiting == k:
            if count:
                finish()
            optimizer.zero_grad()
            total, count, waiting = 0.0, 0, 0
    if waiting:
        finish()
    optimizer.zero_grad()
    return losses


def cleared_by_steps(model: Any, optimizer: Any, loader: Parts, k: int) -> list[float]:
    """Clears gradients after a step alone: padding at the end leaves zeros."""
    losses: list[float] = []
    total, count, waiting = 0.0, 0, 0

    def finish() -> None:
        if count:
            model.table.grad /= count
            optimizer.step()
            optimizer.zero_grad()
            losses.append(total / count)

    for tokens, targets in loader:
        loss = cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), reduction="sum")
        loss.backward()
        total = total + loss.item()
        count = count + int((targets != -100).sum())
        waiting = waiting + 1
        if waiting == k:
            finish()
            total, count, waiting = 0.0, 0, 0
    finish()
    return losses


def one_ahead(model: Any, optimizer: Any, loader: Parts, k: int) -> list[float]:
    """Takes the next micro-batch before this one has been used."""

    def ahead() -> Parts:
        this = next(loader, None)
        while this is not None:
            coming = next(loader, None)
            yield this
            this = coming

    return streaming()(model, optimizer, ahead(), k)


def zeros_for_no_step(model: Any, optimizer: Any, loader: Parts, k: int) -> list[float]:
    losses: list[float] = []
    for first in loader:
        group = chain([first], islice(loader, k - 1))
        losses += streaming()(model, optimizer, group, k) or [0.0]
    return losses


def keeps_outputs(model: Any, optimizer: Any, loader: Parts, k: int) -> list[float]:
    kept: list[Any] = []
    model.register_forward_hook(lambda _, __, output: kept.append(output.detach()))
    return streaming()(model, optimizer, loader, k)


TRAIN_PASS = Answers(
    right=[streaming(), by_shares, streaming(number=lambda loss: float(loss.detach()))],
    wrong=[
        (of_means, "mean of means"),
        (partial(of_means, divided=False), "You add up losses and never divide:"),
        (streaming(counts=lambda targets: 1, least=1), "by the number of micro-batches"),
        (streaming(counts=torch.Tensor.numel), "You divide by padding, too"),
        (streaming(clears=False), "previous group's gradients are still in"),
        (streaming(last=False), "not one number for each step"),
        (last_left_over, "fewer at the end of the stream"),
        (padding_left_out, "also those of padding"),
        (no_gradient, "A weight that no loss has used"),
        (cleared_each_time, "zero_grad within a group"),
        (zeros_left, "some `.grad` is not None"),
        (streaming(steps=False), "The parameters have not moved"),
        (each_alone, "not one number for each step"),
        (streaming(skips=False), "where do you divide"),
        (streaming(skips=False, least=1), "You step on a group without real tokens"),
        (rest_unguarded, "where do you divide"),
        (cleared_by_steps, "With padding at the end: some `.grad` is not None"),
        (one_ahead, "You hold several micro-batches"),
        (zeros_for_no_step, "a number for a group that took no step"),
        (keeps_outputs, "or outputs of the model"),
        (in_groups, "You hold several micro-batches"),
        (partial(in_groups, graphs=True), "you keep graphs"),
        (partial(in_groups, keep=True), "You return a loss with its graph"),
        (streaming(number=lambda loss: loss), "You return a loss with its graph"),
        (streaming(number=lambda loss: loss.item() / 2), "is not the mean per real token of its step"),
        (graphs_wait, "you keep graphs"),
        (by_index, "The loader is a stream"),
        (streaming(reduction="none"), "raised RuntimeError"),
    ],
)


def hooks(
    add: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = lambda total, new: total + new.float(),
    frees: bool = True,
    first: bool = False,
    all_weights: bool = False,
    late: bool = False,
    returns: Any = list,
    keeps: bool = False,
) -> Any:
    """A closure for each weight; right by default."""

    def add_up(weights: list[Any], masters: list[Any]) -> Any:
        kept = []
        handles = []
        newest = {}
        for weight, master in zip(weights, masters, strict=True):
            if not weight.requires_grad and not all_weights:
                continue
            newest["master"] = master
            if first:
                master.grad = torch.zeros_like(master)

            def hook(weight: Any, mine: Any = master) -> None:
                into = newest["master"] if late else mine
                if into.grad is None:
                    into.grad = weight.grad.float()
                else:
                    into.grad = add(into.grad, weight.grad)
                if keeps:
                    kept.append(weight.grad)
                if frees:
                    weight.grad = None

            handles.append(weight.register_post_accumulate_grad_hook(hook))
        return returns(handles)

    return add_up


def by_dictionary(weights: list[Any], masters: list[Any]) -> tuple[Any, ...]:
    of = {id(weight): master for weight, master in zip(weights, masters, strict=True)}

    def add(weight: Any) -> None:
        master = of[id(weight)]
        if master.grad is None:
            master.grad = torch.zeros_like(master)
        master.grad.add_(weight.grad)
        weight.grad = None

    return tuple(one.register_post_accumulate_grad_hook(add) for one in weights if one.requires_grad)


class Adder:
    def __init__(self, master: Any) -> None:
        self.master = master

    def __call__(self, weight: Any) -> None:
        gradient, weight.grad = weight.grad, None
        self.master.grad = gradient.float() + (0 if self.master.grad is None else self.master.grad)


def by_objects(weights: list[Any], masters: list[Any]) -> list[Any]:
    handles = []
    for number, weight in enumerate(weights):
        if weight.requires_grad:
            handles.append(weight.register_post_accumulate_grad_hook(Adder(masters[number])))
    return handles


def before_it_is_added(weights: list[Any], masters: list[Any]) -> list[Any]:
    def add(master: Any, gradient: Any) -> None:
        master.grad = gradient.float() if master.grad is None else master.grad + gradient

    pairs = zip(weights, masters, strict=True)
    return [one.register_hook(partial(add, master)) for one, master in pairs if one.requires_grad]


def all_at_the_end(weights: list[Any], masters: list[Any]) -> list[Any]:
    """Waits for the gradient that is the last one in backward."""
    handles = []
    waiting = []

    def add(weight: Any) -> None:
        waiting.append((weight, weight.grad))
        weight.grad = None
        if len(waiting) == len([one for one in weights if one.requires_grad]) - 1:
            for one, gradient in waiting:
                number = next(i for i, other in enumerate(weights) if other is one)
                of = masters[number]
                of.grad = gradient.float() if of.grad is None else of.grad + gradient
            waiting.clear()

    for weight in weights:
        if weight.requires_grad:
            handles.append(weight.register_post_accumulate_grad_hook(add))
    return handles


def two_hooks(weights: list[Any], masters: list[Any]) -> list[Any]:
    """One hook adds, another one clears."""
    handles = []
    for weight, master in zip(weights, masters, strict=True):
        if weight.requires_grad:

            def add(weight: Any, master: Any = master) -> None:
                master.grad = weight.grad.float() + (0 if master.grad is None else master.grad)

            def clear(weight: Any) -> None:
                weight.grad = None

            handles += [weight.register_post_accumulate_grad_hook(one) for one in (add, clear)]
    return handles


def last_weight(weights: list[Any], masters: list[Any]) -> list[Any]:
    """The hook reads the loop's weight, not its own argument."""
    handles = []
    for weight, master in zip(weights, masters, strict=True):
        if weight.requires_grad:

            def add(_: Any, master: Any = master) -> None:
                gradient = weight.grad.float()  # noqa: B023
                master.grad = gradient if master.grad is None else master.grad + gradient
                weight.grad = None  # noqa: B023

            handles.append(weight.register_post_accumulate_grad_hook(add))
    return handles


def shifted(weights: list[Any], masters: list[Any]) -> list[Any]:
    return hooks()([one for one in weights if one.requires_grad], masters[: len(weights) - 1])


ADD_UP = Answers(
    right=[hooks(), by_dictionary, by_objects, two_hooks],
    wrong=[
        (hooks(late=True), "to another weight's master"),
        (hooks(add=lambda total, new: new.float()), "Only the last micro-batch is left"),
        (hooks(add=lambda total, new: (total.bfloat16() + new).float()), "rounded to bf16"),
        (hooks(add=lambda total, new: total.bfloat16() + new), "must be fp32, like the master"),
        (hooks(add=lambda total, new: (total + new) / 2), "Some sum is off"),
        (hooks(frees=False), "Weights still hold their gradient"),
        (before_it_is_added, "Weights still hold their gradient"),
        (hooks(all_weights=True), "A frozen weight takes no hook"),
        (hooks(first=True), "before any backward"),
        (hooks(keeps=True), "Gradients in bf16 wait"),
        (all_at_the_end, "Gradients in bf16 wait"),
        (hooks(returns=lambda handles: None), "nothing: does every path"),
        (hooks(returns=lambda handles: [1]), "Return the handles"),
        (hooks(returns=lambda handles: handles[1:]), "some hook is still there"),
        (lambda weights, masters: two_hooks(weights, masters)[::2], "some hook is still there"),
        (last_weight, "because your loop variable has its last value"),
        (shifted, "Or does a frozen weight shift your pairs?"),
        (lambda weights, masters: hooks()(weights[:0], masters[:0]), "Weights still hold"),
    ],
)


def measuring(
    divided: bool = True,
    power: int = 1,
    chosen: Callable[[list[Any]], list[Any]] = lambda each: each,
    biased: bool = False,
    of: Callable[[int, int], tuple[int, int]] = lambda b, k: (b, b * k),
    turned: bool = False,
    clears: bool = False,
    removes: bool = True,
    ends: Callable[[Any], None] = lambda model: None,
) -> Any:
    """Hooks that add up squares per micro-batch; right by default. Undivided, it divides `.grad` last."""

    def measure_noise(model: Any, parts: list[Any]) -> tuple[float, float]:
        k = len(parts)
        b = len(parts[0][0])
        each = []
        weights = [one for one in model.parameters() if one.requires_grad]

        def hook(gradient: Any) -> None:
            each[-1] += gradient.pow(2).sum().item()

        handles = [one.register_hook(hook) for one in weights]
        for part in parts:
            if clears:
                model.zero_grad()
            each.append(0.0)
            (mean_loss(model, part) / (k if divided else 1)).backward()
        for handle in handles if removes else ():
            handle.remove()
        if not divided:
            for one in weights:
                one.grad = None if one.grad is None else one.grad / k
        used = chosen(each)
        short = k ** (power * 2 if divided else 0) * math.fsum(used) / len(used)
        long = sum(one.grad.square().sum().item() for one in weights if one.grad is not None)
        small, big = of(b, k)
        noise = (short - long) / (1 / small - 1 / big)
        ends(model)
        pair = (long if biased else long - noise / big, noise)
        return pair[::-1] if turned else pair

    return measure_noise


def by_difference(model: Any, parts: list[Any]) -> tuple[float, float]:
    """Each gradient is the difference of `.grad`, of which it keeps a copy."""
    k = len(parts)
    b = len(parts[0][0])
    squares = 0.0
    before: dict[Any, Any] = {}
    for part in parts:
        (mean_loss(model, part) / k).backward()
        for one in model.parameters():
            if one.grad is not None:
                squares += k * (one.grad - before.get(one, 0)).square().sum().item()
        before = {one: one.grad.clone() for one in model.parameters() if one.grad is not None}
    long = sum(one.grad.square().sum().item() for one in model.parameters() if one.grad is not None)
    noise = (squares - long) / (1 / b - 1 / (k * b))
    return long - noise / (k * b), noise


def by_norms(model: Any, parts: list[Any]) -> Any:
    """After each weight's accumulation, by vector norms; solves the two equations by matrix."""
    k = len(parts)
    b = len(parts[0][0])
    squares = torch.zeros((), dtype=torch.float64)

    def look(gradient: Any) -> None:
        squares.add_((torch.linalg.vector_norm(gradient) * k) ** 2 / k)

    handles = [weight.register_hook(look) for weight in model.parameters() if weight.requires_grad]
    try:
        for part in parts:
            loss = mean_loss(model, part) / k
            loss.backward()
    finally:
        for handle in handles:
            handle.remove()
    used = [weight.grad.flatten() for weight in model.parameters() if weight.grad is not None]
    long = torch.stack([one @ one for one in used]).sum()
    return tuple(numpy.linalg.solve([[1, 1 / b], [1, 1 / b / k]], [squares.item(), long.item()]))


def as_variance(
    model: Any, parts: list[Any], of_sums: bool = False, naive: bool = False
) -> tuple[float, float]:
    """The variance of the micro-batches' gradients, or of the sums so far, or without noise in the mean."""
    k = len(parts)
    b = len(parts[0][0])
    total = []

    def after(weight: Any) -> None:
        total.append(weight.grad.square().sum().item())

    def before(gradient: Any) -> None:
        total.append(gradient.square().sum().item())

    weights = [one for one in model.parameters() if one.requires_grad]
    register = "register_post_accumulate_grad_hook" if of_sums else "register_hook"
    handles = [getattr(one, register)(after if of_sums else before) for one in weights]
    for part in parts:
        (mean_loss(model, part) / k).backward()
    for handle in handles:
        handle.remove()
    short = k * sum(total)
    long = sum(w.grad.square().sum().item() for w in model.parameters() if w.grad is not None)
    noise = b * (short - long)
    return (long, noise) if naive else (long - noise / b / (k - 1), noise * k / (k - 1))


def doubled_grad(model: Any) -> None:
    for weight in model.parameters():
        if weight.grad is not None:
            weight.grad *= 3


def sum_left(model: Any, parts: list[Any]) -> tuple[float, float]:
    result = measuring()(model, parts)
    for weight in model.parameters():
        if weight.grad is not None:
            weight.grad *= len(parts)
    return result


def by_ratio(signal: float, noise: float) -> tuple[float, float]:
    return signal, noise / signal


def never_negative(signal: float, noise: float) -> tuple[float, float]:
    return max(signal, 0.0), noise


def adds_in_place(model: Any, parts: list[Any]) -> tuple[float, float]:
    total = torch.zeros((), dtype=torch.float64)
    for weight in model.parameters():
        if weight.requires_grad:
            weight.register_hook(lambda gradient: total.add_(gradient.square().sum()))
    return measuring()(model, parts)


def unused_too(model: Any, parts: list[Any]) -> tuple[float, float]:
    result = measuring()(model, parts)
    return sum(weight.grad.square().sum().item() for weight in model.parameters()), result[1]


MEASURE_NOISE = Answers(
    right=[measuring(), by_norms, as_variance, measuring(divided=False)],
    wrong=[
        (measuring(power=0), "the gradient of a micro-batch's own loss"),
        (measuring(chosen=lambda each: [sum(each) / len(each) ** 2]), "with the square"),
        (measuring(chosen=lambda each: [sum(each)]), "The equation has their mean"),
        (measuring(chosen=lambda each: each[:1]), "only the first micro-batch"),
        (measuring(biased=True), "a little noise is still in it"),
        (measuring(of=lambda b, k: (1, k)), "Return the noise of one sequence"),
        (partial(as_variance, of_sums=True), "Which hook runs before"),
        (partial(as_variance, naive=True), "The formula has noise for k·b sequences, too"),
        (measuring(turned=True), "in the wrong order"),
        (measuring(of=lambda b, k: (b, k)), "Your two numbers are off"),
        (measuring(of=lambda b, k: (2, 2 * k)), "`len` of a pair is 2. How many sequences"),
        (lambda model, parts: by_ratio(*measuring()(model, parts)), "not their ratio"),
        (lambda model, parts: never_negative(*measuring()(model, parts)), "never falls below 0"),
        (lambda model, parts: tuple(map(abs, measuring()(model, parts))), "Your two numbers are off"),
        (adds_in_place, "Let it return nothing"),
        (unused_too, "A weight that no loss has used"),
        (measuring(clears=True), "Only the last micro-batch is left"),
        (measuring(clears=True, divided=False), "Only the last micro-batch is left"),
        (measuring(removes=False), "Your hooks are still on"),
        (measuring(ends=lambda model: model.zero_grad()), "how should the optimizer step"),
        (measuring(ends=doubled_grad), "is not the gradient of the mean"),
        (sum_left, "k times too long for a step"),
        (by_difference, "another set of gradients"),
        (lambda model, parts: measuring()(model, parts)[0], "but the exercise asks for a tuple"),
    ],
)


def warmed(
    sgd: Callable[[float], float] = float,
    adam: Callable[[float], float] = math.sqrt,
    start: float = 1,
    after: Callable[[float, float, float], float] = lambda rate, peak, part: peak,
    part: Callable[[int, int], float] = lambda step, warm: step / warm,
) -> Any:
    """A rule for each optimizer, and a straight line from `start` rates to the peak; right by default."""

    def answer(step: int, warm: int, rate: float, k: int, optimizer: str) -> float:
        peak = rate * {"sgd": sgd, "adam": adam}[optimizer](k)
        done = part(step, warm)
        return after(rate, peak, done) if done >= 1 else start * rate + (peak - start * rate) * done

    return answer


def by_part(step: int, warm: int, rate: float, k: int, optimizer: str) -> float:
    part = min(1.0, step / warm)
    return rate * (1 - part) + part * rate * k ** (1 if optimizer == "sgd" else 0.5)


def by_interpolation(step: int, warm: int, rate: float, k: int, optimizer: str) -> Any:
    return numpy.interp(step, [0, warm], [rate, rate * {"sgd": k, "adam": numpy.sqrt(k)}[optimizer]])


RATE = Answers(
    right=[warmed(), by_part, by_interpolation],
    wrong=[
        (warmed(adam=float), "You scale by k for Adam, too"),
        (warmed(sgd=math.sqrt), "You scale by √k for SGD, too"),
        (warmed(sgd=math.sqrt, adam=float), "The two rules are swapped"),
        (warmed(start=0), "You start from zero"),
        (warmed(part=lambda step, warm: 1), "There is no warm-up"),
        (warmed(after=lambda rate, peak, part: rate + (peak - rate) * part), "still grows after the warm-up"),
        (warmed(after=lambda rate, peak, part: rate), "Some rate is off"),
        (warmed(sgd=lambda k: 1, adam=lambda k: 1), "Your rate never changes"),
        (lambda step, warm, rate, k, optimizer: rate / k, "Some rate is off"),
        # log₂ 16 is √16: a k for which the two agree would let it pass
        (warmed(adam=math.log2), "Some rate is off"),
        (warmed(sgd=lambda k: 32), "Some rate is off"),
        (warmed(part=lambda step, warm: step / 500), "Some rate is off"),
    ],
)

ANSWERS = {"08.1": TRAIN_PASS, "08.2": ADD_UP, "08.3": MEASURE_NOISE, "08.4": RATE}


class TestAnswers(JudgedAnswers):
    answers = ANSWERS
