"""Lesson 11: answers to its exercises, its closed forms against simulated ranks, and its sliders."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from checking import Answers, JudgedAnswers
from edits import edited
from lesson_source import names_from_cells
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import pad
from torch.nn.utils import vector_to_parameters

from course_utils.lessons.sharding.checks import RANKS, judge_checkpoint, judge_zero_1
from course_utils.lessons.sharding.widget import shard_sliders
from course_utils.lessons.shared.on_ranks import outcomes, pretended


# --------------------------------------------------------------------------------------------------
# 11.1: start
def start(model: Any, whole: Any, mesh: Any) -> Any:
    """Pieces of equally many rows, fewer than ranks where rows are few."""
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device=mesh.device_type)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            pieces = whole[name].split(-(-len(weight) // mesh.size()))
            if mesh.get_local_rank() < len(pieces):
                weight.to_local().copy_(pieces[mesh.get_local_rank()])
    return model


BYTES = "    model.to_empty(device=mesh.device_type)\n"
LOOP = "    for layer in model:\n"
PIECE = "pieces[mesh.get_local_rank()]"
WHOLE = "whole[name].split"
SHARD = "weight.to_local().copy_"
START = Answers(
    right=start,
    wrong=[
        (edited(start, PIECE, "pieces[0][: len(weight.to_local())]"), "Every rank has rank 0's rows"),
        (edited(start, LOOP, LOOP.replace("model", "()")), "Each layer with weights is a unit"),
        (edited(start, BYTES, ""), "still on the meta device"),
        (edited(start, LOOP, BYTES + LOOP), "The whole model was on the GPU"),
        (edited(start, WHOLE, WHOLE.replace(".", ".to(mesh.device_type).")), "A whole weight was on the GPU"),
        (edited(start, SHARD, SHARD.replace(".copy_", ".clone().copy_")), "What did `to_empty` leave"),
    ],
)


# --------------------------------------------------------------------------------------------------
# 11.2: Zero1Adam
def padded(tensors: Any) -> Any:
    """The exercise's own."""
    vector = torch.cat([tensor.detach().flatten() for tensor in tensors])
    return pad(vector, (0, -len(vector) % dist.get_world_size()))


class Zero1Adam:
    """With lists of pieces, and weights changed in place."""

    def __init__(self, parameters: Any, lr: float) -> None:
        self.weights = list(parameters)
        self.ranks = dist.get_world_size()
        self.own = padded(self.weights).chunk(self.ranks)[dist.get_rank()].clone()
        self.adam = torch.optim.Adam([self.own], lr=lr)

    def step(self) -> None:
        pieces = [one.contiguous() for one in padded(one.grad for one in self.weights).chunk(self.ranks)]
        self.own.grad = torch.empty_like(self.own)
        dist.reduce_scatter(self.own.grad, pieces)
        self.own.grad /= self.ranks
        self.adam.step()
        dist.all_gather(pieces, self.own)
        with torch.no_grad():
            vector_to_parameters(torch.cat(pieces), self.weights)


SCATTER = "dist.reduce_scatter(self.own.grad, pieces)"
ALL_REDUCE = (
    "dist.all_reduce(whole := torch.cat(pieces)); self.own.grad = whole.chunk(4)[dist.get_rank()].clone()"
)
ZERO_1_ADAM = Answers(
    right=Zero1Adam,
    wrong=[
        (edited(Zero1Adam, "self.own.grad /= self.ranks", "pass"), "You step with the sum"),
        (edited(Zero1Adam, SCATTER, "self.own.grad = 4 * pieces[dist.get_rank()]"), "only its own gradients"),
        (edited(Zero1Adam, SCATTER, ALL_REDUCE), "an all-reduce sends every rank all sums"),
        (
            edited(Zero1Adam, "self.adam.step()", "torch.optim.Adam([self.own], lr=0.01).step()"),
            "Only the first",
        ),
        (
            edited(Zero1Adam, "[dist.get_rank()].clone()", "[dist.get_rank()]"),
            "keeps more than its own slice",
        ),
    ],
)


# --------------------------------------------------------------------------------------------------
# 11.3: checkpoint
def checkpoint(model: Any, optimizer: Any) -> Any:
    """One entry after the other, in whole."""
    kept: dict[str, Any] = {}
    for name, weight in model.named_parameters():
        entry = {}
        for key, value in [("weight", weight.detach()), *optimizer.state[weight].items()]:
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            if dist.get_rank() == 0:
                entry[key] = whole.clone().to("cpu")
        if entry:
            kept[name] = entry
    return kept


CLONED, GATHERED = "whole.clone()", "value.full_tensor() if isinstance(value, DTensor) else value"
ALL_FIRST = "kept, weights = {}, [one.full_tensor() for one in model.parameters()]"
CHECKPOINT = Answers(
    right=checkpoint,
    wrong=[
        (edited(checkpoint, "full_tensor()", "to_local()"), "is not whole"),
        (edited(checkpoint, GATHERED, f"dist.get_rank() == 0 and ({GATHERED})"), "the same exchanges"),
        (edited(checkpoint, "if dist.get_rank() == 0", "if True"), "Only rank 0 should return"),
        (edited(checkpoint, CLONED, "whole"), "is it a copy"),
        (edited(checkpoint, '.to("cpu")', ""), "keeps whole tensors on its GPU"),
        (edited(checkpoint, "kept: dict[str, Any] = {}", ALL_FIRST), "many whole tensors at once"),
    ],
)


# --------------------------------------------------------------------------------------------------
# 11.4: shard_to_fit
def shard_to_fit(model: Any, most: int, policy: Any) -> Any:
    """By a list of the units, the inner ones last."""
    units = []
    waiting = [model]
    while waiting:
        one = waiting.pop()
        if not isinstance(one, nn.ModuleList):
            units.append(one)
        if sum(weight.numel() for weight in one.parameters()) > most:
            waiting += one.children()
    for one in reversed(units):
        fully_shard(one, mp_policy=policy)
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def one_level(model: Any, most: int, policy: Any) -> Any:
    for part in (*model, model):
        fully_shard(part, mp_policy=policy)
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def early(model: Any, most: int, policy: Any) -> Any:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    shard_to_fit(model, most, policy)
    return optimizer


WITHOUT_RESHARDING = "mp_policy=policy, reshard_after_forward=False"
SHARD_TO_FIT = Answers(
    right=shard_to_fit,
    wrong=[
        (one_level, "A unit gathers more than `most` numbers"),
        (early, "steps weights that the model no longer has"),
        (edited(shard_to_fit, "> most", ">= most"), "Your units are too small"),
        (edited(shard_to_fit, ", mp_policy=policy", ""), "gathered in fp32"),
        (edited(shard_to_fit, "mp_policy=policy", WITHOUT_RESHARDING), "the peak is too high"),
    ],
)


# --------------------------------------------------------------------------------------------------
ANSWERS = {"11.1": START, "11.2": ZERO_1_ADAM, "11.3": CHECKPOINT, "11.4": SHARD_TO_FIT}


@pytest.fixture(scope="module", autouse=True)
def tried() -> None:
    """All that reach real ranks, by the same processes: a start takes seconds.

    Outcomes are kept for the checks.
    """
    trials = [(judge_zero_1, Zero1Adam), (judge_checkpoint, checkpoint)]
    trials += [(judge_zero_1, answer) for answer, _ in ZERO_1_ADAM.wrong]
    trials += [
        (judge_checkpoint, answer) for answer, words in CHECKPOINT.wrong if words != "the same exchanges"
    ]
    outcomes(RANKS, trials)


class TestAnswers(JudgedAnswers):
    answers = ANSWERS


# --------------------------------------------------------------------------------------------------
# The lesson's own code
def test_sliders_follow_ranks_and_stage() -> None:
    sliders = shard_sliders("llama3-8b", ranks=8, stage=2, gpu="A100-40GB", seq_len=4096)
    assert "Fits an A100-40GB" in sliders.message
    sliders.controls["zero_stage"].value = 1
    assert "Does not fit" in sliders.message and sliders.run.zero_stage == 1
    sliders.controls["precision"].value = "fp32"
    assert sliders.run.attention == "efficient"
    sliders.controls["model"].value = "gpt2-xl"
    assert sliders.run.seq_len == 1024 and "Not possible" not in sliders.message


def test_sent_bytes_are_those_of_the_paper_by_kind() -> None:
    sent_bytes = names_from_cells("11", "def sent_bytes")["sent_bytes"]
    with pretended(0, 4), sent_bytes() as sent:
        whole = torch.zeros(40)
        own = torch.zeros(10)
        dist.all_reduce(whole)
        dist.reduce_scatter_tensor(own, whole)
        dist.all_gather_into_tensor(whole, own)
        dist.broadcast(own, 0)
    assert sent.by_kind == {"all-reduce": 320, "reduce-scatter": 160, "all-gather": 160, "broadcast": 40}
