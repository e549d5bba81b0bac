"""The checks of lesson 11: right answers of every style pass, each wrong answer gets the hint it deserves."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checking import Answers, JudgedAnswers, written
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils import vector_to_parameters

from course_utils.lessons.sharding.check_ranks import padded
from course_utils.lessons.sharding.checks import MOST, PROGRAM, RANKS
from course_utils.lessons.shared.on_ranks import outcomes


def by_chunks(shapes: Any, D: int) -> dict[str, int]:
    """As torch does it: the first of its chunks."""
    shard = sum(torch.empty(shape).chunk(D)[0].numel() for shape in shapes)
    return {"padding": shard * D - sum(torch.empty(shape).numel() for shape in shapes), "shard": shard}


def row_by_row(shapes: Any, D: int) -> dict[str, int]:
    """Counts the rows of all ranks, real or not."""
    rows = [(len(range(0, shape[0], D)), shape[0], math.prod(shape[1:])) for shape in shapes]
    return {
        "shard": sum(each * numbers for each, _, numbers in rows),
        "padding": sum((D * each - real) * numbers for each, real, numbers in rows),
    }


def by_matrices(shapes: Any, D: int) -> dict[str, int]:
    """Whole matrices of numbers, padded with rows."""
    cut = []
    for shape in shapes:
        ones = torch.ones(shape)
        matrix = ones.flatten(1) if shape[1:] else ones[:, None]
        cut.append(torch.nn.functional.pad(matrix, (0, 0, 0, -shape[0] % D)))
    return {
        "shard": sum(one.numel() for one in cut) // D,
        "padding": sum(int((one == 0).sum()) for one in cut),
    }


def total(shapes: Any) -> int:
    return sum(math.prod(shape) for shape in shapes)


def with_shard(shard: Callable[..., float]) -> Any:
    return lambda shapes, D: {"shard": shard(shapes, D), "padding": row_by_row(shapes, D)["padding"]}


def with_padding(padding: Callable[..., float]) -> Any:
    return lambda shapes, D: {"shard": row_by_row(shapes, D)["shard"], "padding": padding(shapes, D)}


PADDING = Answers(
    right=[by_chunks, row_by_row, by_matrices],
    wrong=[
        (with_shard(lambda shapes, D: total(shapes) // D), "no rank owns the last numbers"),
        (
            with_shard(lambda shapes, D: sum(s[0] // D * math.prod(s[1:]) for s in shapes)),
            "no rank owns the last rows",
        ),
        (with_shard(lambda shapes, D: total(shapes) / D), "a fraction"),
        (
            with_shard(lambda shapes, D: sum(-(-math.prod(s) // D) for s in shapes)),
            "You share out single numbers",
        ),
        (with_shard(lambda shapes, D: -(-total(shapes) // D)), "one flat piece"),
        (with_shard(lambda shapes, D: sum(-(-s[0] // D) for s in shapes)), "You count rows"),
        (with_shard(lambda shapes, D: D * row_by_row(shapes, D)["shard"]), "This is the sum over all shards"),
        (
            with_shard(lambda shapes, D: row_by_row(shapes[:1], D)["shard"]),
            "`shard` is off for [(50257, 768), (768,)]",
        ),
        (
            with_shard(lambda shapes, D: sum((s[0] // D + 1) * math.prod(s[1:]) for s in shapes)),
            "on 64 ranks",
        ),
        (lambda shapes, D: row_by_row([shape[:2] for shape in shapes], D), "how long is a row"),
        (
            with_padding(lambda shapes, D: D * row_by_row(shapes, D)["shard"]),
            "counts all numbers in all shards",
        ),
        (with_padding(lambda shapes, D: row_by_row(shapes, D)["padding"] / D), "This is 1/D of the padding"),
        (with_padding(lambda shapes, D: sum(-s[0] % D for s in shapes)), "`padding` is off for [(50257"),
    ],
)


def zero_of(
    own: str = "padded(self.parameters).chunk(4)[dist.get_rank()].clone()",
    adam: str = "torch.optim.Adam([self.own], lr=lr)",
    reduce: str = "dist.reduce_scatter_tensor(self.own.grad, gradients)",
    mean: str = "self.own.grad /= dist.get_world_size()",
    gather: str = "dist.all_gather_into_tensor(whole, self.own)",
    back: str = "vector_to_parameters(whole, self.parameters)",
    first: str = "pass",
    gradients: str = "padded(weight.grad for weight in self.parameters)",
    extra: str = "pass",
) -> Any:
    """The class with some of its lines in another way."""
    lines = [
        "class Zero1Adam:",
        "    def __init__(self, parameters, lr):",
        "        self.parameters, self.lr = list(parameters), lr",
        f"        self.own = {own}",
        f"        self.adam = {adam}",
        "    def step(self):",
        f"        {first}",
        f"        gradients = {gradients}",
        "        self.own.grad = torch.empty_like(self.own)",
        f"        {reduce}",
        f"        {mean}",
        "        self.adam.step()",
        "        whole = torch.empty_like(gradients)",
        f"        {gather}",
        f"        {extra}",
        f"        {back}",
    ]
    known = {"torch": torch, "dist": dist, "padded": padded, "vector_to_parameters": vector_to_parameters}
    return written(lines, "Zero1Adam", known)


class ByHand:
    """Adam's own formula, lists of pieces, weights changed in place."""

    def __init__(self, parameters: Any, lr: float) -> None:
        self.weights = list(parameters)
        self.lr = lr
        self.t = 0
        self.m, self.v = torch.zeros(2, self.cut(self.weights)[0].numel())

    def cut(self, tensors: Any) -> Any:
        flat = torch.cat([one.detach().reshape(-1) for one in tensors])
        D = dist.get_world_size()
        flat = torch.cat([flat, flat.new_zeros(-len(flat) % D)])
        return [piece.contiguous() for piece in flat.chunk(D)]

    def step(self) -> None:
        self.t += 1
        mine = self.cut(self.weights)[dist.get_rank()].clone()
        gradient = torch.zeros_like(mine)
        dist.reduce_scatter(gradient, self.cut([one.grad for one in self.weights]))
        gradient /= dist.get_world_size()
        self.m.mul_(0.9).add_(gradient, alpha=0.1)
        self.v.mul_(0.999).addcmul_(gradient, gradient, value=0.001)
        root = (self.v / (1 - 0.999**self.t)).sqrt() + 1e-8
        mine -= self.lr * self.m / (1 - 0.9**self.t) / root
        pieces = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(pieces, mine)
        sizes = [one.numel() for one in self.weights]
        padding = len(mine) * len(pieces) - sum(sizes)
        new = torch.cat(pieces).split([*sizes, padding])
        with torch.no_grad():
            for weight, numbers in zip(self.weights, new, strict=False):
                weight.copy_(numbers.view_as(weight))


class WithAHelper:
    def __init__(self, parameters: Any, lr: float) -> None:
        self.inner = ByHand(parameters, lr)

    def step(self) -> None:
        self.inner.step()


OWN = "self.own.grad = gradients.chunk(4)[dist.get_rank()].clone()"
ALL = f"dist.all_reduce(gradients); {OWN}"
ADDED = (
    "self.own.grad /= dist.get_world_size(); self.sum = self.sum + self.own.grad; self.own.grad = self.sum"
)
TWICE = (
    "half = self.own[: len(self.own) // 2].clone(); dist.all_gather([half.clone() for _ in range(4)], half)"
)
ZERO_1_ADAM = Answers(
    right=[
        zero_of(),
        ByHand,
        zero_of(own="torch.nn.Parameter(padded(parameters).chunk(4)[dist.get_rank()].clone())"),
    ],
    wrong=[
        (zero_of(mean="pass"), "You step with the sum"),
        (zero_of(reduce=OWN, mean="pass"), "Each rank steps with only its own gradients"),
        (zero_of(back="pass"), "The weights do not change"),
        (
            zero_of(first="self.adam = torch.optim.Adam([self.own], lr=self.lr)"),
            "Only the first step is right",
        ),
        (zero_of(reduce=ALL), "an all-reduce sends every rank all sums"),
        (zero_of(adam="torch.optim.Adam([self.own])"), "You leave out the learning rate"),
        (zero_of(mean="self.own.grad /= dist.get_world_size() ** 2"), "You take the mean twice"),
        (zero_of(extra="dist.broadcast(whole, 0)"), "Two kinds of exchange are enough"),
        (
            zero_of(gradients="torch.cat([weight.grad.flatten() for weight in self.parameters])"),
            "Did you pad weights",
        ),
        (zero_of(first="self.sum = getattr(self, 'sum', 0)", mean=ADDED), "Is an old gradient still there"),
        (zero_of(first=TWICE), "make each exchange only once"),
        (zero_of(own="padded(parameters).chunk(4)[dist.get_rank()]"), "keeps more than its own slice"),
        (zero_of(back="self.last = gradients; vector_to_parameters(whole, self.parameters)"), "keeps more"),
        (
            zero_of(gather="dist.get_rank() or dist.all_gather_into_tensor(whole, self.own)"),
            "the same exchanges",
        ),
        (zero_of(adam="torch.optim.RMSprop([self.own], lr=lr)"), "The first step is not Adam's"),
        (
            zero_of(adam="torch.optim.AdamW([self.own], lr=lr, weight_decay=0.1)"),
            "The first step is not Adam's",
        ),
        (zero_of(reduce="dist.reduce_scatter_tensor(gradients, self.own.grad)"), "of the exchange in order"),
        (WithAHelper, "raised NameError: name 'ByHand'"),
        (lambda parameters, lr: 1, "Pass the class itself"),
    ],
)


def gathering(
    value: str = "value.full_tensor() if isinstance(value, DTensor) else value",
    copied: str = "whole.detach().clone().cpu()",
    states: str = "optimizer.state.get(weight, {})",
    who: str = "dist.get_rank() == 0",
    end: str = "kept",
) -> Any:
    lines = [
        "def checkpoint(model, optimizer, kept=None):",
        "    kept = {}",
        "    for name, weight in model.named_parameters():",
        f"        for key, value in {{'weight': weight, **{states}}}.items():",
        f"            whole = {value}",
        f"            if {who}:",
        f"                kept.setdefault(name, {{}})[key] = {copied}",
        f"    return {end}",
    ]
    return written(lines, "checkpoint", {"dist": dist, "DTensor": DTensor, "torch": torch})


def by_torch(model: Any, optimizer: Any) -> Any:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    found: Any = get_state_dict(model, optimizer, options=options)
    weights, states = found
    whole = {}
    for name, weight in weights.items():
        kept = {"weight": weight, **states["state"].get(name, {})}
        whole[name] = {key: one.clone() for key, one in kept.items()}
    return whole


def of_each_name(model: Any, optimizer: Any) -> Any:
    def whole(value: Any) -> Any:
        return value.detach().full_tensor() if hasattr(value, "full_tensor") else torch.clone(value)

    found: dict = {}
    for name, weight in model.named_parameters():
        for key, value in [("weight", weight), *optimizer.state[weight].items()]:
            gathered = whole(value)
            if dist.get_rank() == 0:
                found[name] = {**found.get(name, {}), key: gathered.to("cpu")}
            del gathered
    return found


@torch.no_grad()
def without_a_graph(model: Any, optimizer: Any) -> Any:
    found: dict = {}
    for name, weight in model.named_parameters():
        kept = {"weight": weight, **optimizer.state.get(weight, {})}
        whole = {}
        for key, one in kept.items():
            whole[key] = one.full_tensor() if isinstance(one, DTensor) else one.clone()
        if dist.get_rank() == 0:
            found[name] = {key: one.cpu() for key, one in whole.items()}
    return found


def key_by_key(model: Any, optimizer: Any) -> Any:
    """Relies on it that all learning weights have states."""
    found: dict = {}
    for name, weight in model.named_parameters():
        kept = {"weight": weight.detach().full_tensor()}
        if weight.requires_grad:
            states = optimizer.state[weight]
            kept["step"] = states["step"].clone()
            kept |= {key: states[key].full_tensor() for key in ("exp_avg", "exp_avg_sq")}
        if dist.get_rank() == 0:
            found[name] = {key: one.to(device="cpu") for key, one in kept.items()}
    return found


def moments_on_rank_0(model: Any, optimizer: Any) -> Any:
    """Every rank gathers weights, and rank 0 alone the rest."""
    found: dict = {}
    for name, weight in model.named_parameters():
        whole = weight.detach().full_tensor()
        if dist.get_rank() == 0:
            found[name] = {"weight": whole}
            for key, value in optimizer.state.get(weight, {}).items():
                found[name][key] = value.full_tensor() if isinstance(value, DTensor) else value.clone()
    return found


def all_weights_first(model: Any, optimizer: Any) -> Any:
    weights = {name: weight.detach().full_tensor() for name, weight in model.named_parameters()}
    found: dict = {}
    for name, weight in model.named_parameters():
        for key, value in [("weight", weights[name]), *optimizer.state.get(weight, {}).items()]:
            whole = value.full_tensor() if isinstance(value, DTensor) else value.clone()
            if dist.get_rank() == 0:
                found.setdefault(name, {})[key] = whole
    return found


ONLY_ONE = "(value.full_tensor() if isinstance(value, DTensor) else value) if dist.get_rank() == 0 else None"
CHECKPOINT = Answers(
    right=[gathering(), by_torch, of_each_name, without_a_graph, key_by_key],
    wrong=[
        (gathering(value="value.to_local() if isinstance(value, DTensor) else value"), "is not whole"),
        (gathering(value="value"), "is not a plain tensor"),
        (gathering(value="value.full_tensor()"), "raised AttributeError"),
        (gathering(value=ONLY_ONE), "the same exchanges"),
        (moments_on_rank_0, "the same exchanges"),
        (gathering(who="True"), "Only rank 0 should return"),
        (gathering(who="True", end="kept if dist.get_rank() == 0 else {}"), "many whole tensors at once"),
        (gathering(copied="whole"), "still carries a graph"),
        (gathering(copied="whole.detach()"), "is it a copy"),
        (gathering(copied="whole.detach().cpu()"), "is it a copy"),
        (gathering(copied="whole.detach().clone()"), "keeps whole tensors on its GPU"),
        (gathering(states="{}"), "has no exp_avg and no exp_avg_sq and no step"),
        (
            gathering(end="[1] if dist.get_rank() == 0 else {}"),
            "a list, but the exercise asks for a dictionary",
        ),
        (
            gathering(end="{name.split('.')[0]: one for name, one in kept.items()}"),
            "is not the name of a parameter",
        ),
        (
            gathering(states="(optimizer.state.get(weight) or {'step': torch.zeros(())})"),
            "does not keep for it",
        ),
        (
            gathering(
                end="{} if dist.get_rank() else {name: kept[name] for name in kept if name != '0.weight'}"
            ),
            "Under '0.weight', return a dictionary",
        ),
        (all_weights_first, "many whole tensors at once"),
    ],
)


def from_the_inside(model: Any, most: int, policy: Any) -> Any:
    def go_on(module: Any) -> None:
        for part in module.children():
            if total([one.shape for one in module.parameters()]) > most:
                go_on(part)
        if type(module) is not nn.ModuleList:
            fully_shard(module, mp_policy=policy, reshard_after_forward=True)

    go_on(model)
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def by_a_list(model: Any, most: int, policy: Any) -> Any:
    units = []
    waiting = [model]
    while waiting:
        one = waiting.pop()
        numbers = total([weight.shape for weight in one.parameters()])
        if numbers and not isinstance(one, nn.ModuleList):
            units.append(one)
        if numbers > most:
            waiting += one.children()
    for one in reversed(units):
        fully_shard(one, mp_policy=policy)
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def at_most(times: float) -> Any:
    return lambda module, most: total([one.shape for one in module.parameters()]) <= times * most


def no_list(module: Any, model: Any) -> bool:
    return not isinstance(module, nn.ModuleList)


def sharding(
    few: Callable[[Any, int], bool] = at_most(1),  # noqa: B008
    unit: Callable[[Any, Any], bool] = no_list,
    early: bool = False,
    **choices: Any,
) -> Any:
    def answer(model: Any, most: int, policy: Any) -> Any:
        def shard(module: Any) -> None:
            if not few(module, most):
                for part in module.children():
                    shard(part)
            if unit(module, model):
                fully_shard(module, **({"mp_policy": policy} | choices))

        old = torch.optim.AdamW(model.parameters(), lr=1e-3)
        shard(model)
        return old if early else torch.optim.AdamW(model.parameters(), lr=1e-3)

    return answer


def one_level(model: Any, most: int, policy: Any) -> Any:
    for part in model:
        fully_shard(part, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def outer_first(module: Any, most: int, policy: Any) -> Any:
    if not isinstance(module, nn.ModuleList):
        fully_shard(module, mp_policy=policy)
    if total([one.shape for one in module.parameters()]) > most:
        for part in module.children():
            outer_first(part, most, policy)
    return torch.optim.AdamW(module.parameters(), lr=1e-3)


def own_parameters(module: Any) -> bool:
    """A large part with parts and parameters: it is left to the model."""
    large = total([one.shape for one in module.parameters()]) > MOST and list(module.children())
    return isinstance(module, nn.ModuleList) or bool(large and list(module.parameters(recurse=False)))


def items_alone(model: Any, most: int, policy: Any) -> Any:
    """A list's items are units, whatever their size."""

    def shard(module: Any) -> None:
        if isinstance(module, nn.ModuleList):
            for part in module:
                fully_shard(part, mp_policy=policy)
            return
        if not at_most(1)(module, most):
            for part in module.children():
                shard(part)
        fully_shard(module, mp_policy=policy)

    shard(model)
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def with_siblings(model: Any, most: int, policy: Any) -> Any:
    """The experts of a list are one unit."""

    def shard(module: Any) -> None:
        if isinstance(module, nn.ModuleList):
            fully_shard(list(module), mp_policy=policy)
            return
        if not at_most(1)(module, most):
            for part in module.children():
                shard(part)
        fully_shard(module, mp_policy=policy)

    shard(model)
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def two_rates(*given: Any) -> Any:
    first, *others = sharding()(*given).param_groups[0]["params"]
    return torch.optim.AdamW([{"params": [first]}, {"params": others, "lr": 1e-2}], lr=1e-3)


def layers_alone(module: Any, model: Any) -> bool:
    return module is model or not list(module.children())


SHARD_TO_FIT = Answers(
    right=[sharding(), from_the_inside, by_a_list],
    wrong=[
        (sharding(few=lambda module, most: True), "A unit gathers more than `most` numbers"),
        (one_level, "A unit gathers more than `most` numbers"),
        (sharding(few=lambda module, most: False, unit=layers_alone), "Your units are too small"),
        (
            sharding(
                unit=lambda module, model: module is not model and not isinstance(module, nn.ModuleList)
            ),
            "The model itself is not a unit",
        ),
        (sharding(unit=lambda module, model: not own_parameters(module)), "has parameters of its own"),
        (
            lambda *given: torch.optim.AdamW(sharding()(*given).param_groups[0]["params"], lr=1e-2),
            "rate of 1e-3",
        ),
        (sharding(early=True), "steps weights that the model no longer has"),
        (sharding(mp_policy=MixedPrecisionPolicy()), "gathered in fp32"),
        (sharding(reshard_after_forward=False), "the peak is too high"),
        (sharding(unit=lambda module, model: True), "your function raised"),
        (
            sharding(few=lambda module, most: total([one.shape for one in module.parameters()]) < most),
            "are too small",
        ),
        (sharding(few=at_most(1.05)), "A unit gathers more than `most` numbers"),
        (
            sharding(unit=lambda module, model: not isinstance(module, nn.LayerNorm | nn.ModuleList)),
            "What does the",
        ),
        (items_alone, "A unit gathers more than `most` numbers"),
        (with_siblings, "Several parts share one unit"),
        (two_rates, "a learning rate of 1e-3"),
        (outer_first, "is a part sharded after the module that contains it?"),
        (
            lambda model, most, policy: fully_shard(model, mp_policy=policy),
            "but the exercise asks for an Optimizer",
        ),
    ],
)


@pytest.fixture(scope="module", autouse=True)
def tried() -> None:
    """All that reach real ranks, by the same processes: a start takes seconds.

    Outcomes are kept for the checks.
    """
    own = (
        "Pass the class itself",
        "the same exchanges",
        "Did you pad weights",
        "of the exchange in order",
        "AttributeError",
        "a list, but the exercise asks",
    )
    judged = {"zero_1": ZERO_1_ADAM, "checkpoint": CHECKPOINT}
    wrong = [(judge, bad) for judge, all_ in judged.items() for bad, words in all_.wrong if words not in own]
    right = [(judge, one) for judge, all_ in judged.items() for one in all_.right]
    outcomes(PROGRAM, RANKS, [pair for pair in (*right, *wrong) if pair[1] is not WithAHelper])


ANSWERS = {
    "11.1": PADDING, "11.2": ZERO_1_ADAM, "11.3": CHECKPOINT, "11.4": SHARD_TO_FIT
}  # fmt: skip


class TestAnswers(JudgedAnswers):
    answers = ANSWERS
