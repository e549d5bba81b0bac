"""The checks of lesson 10: right answers of every style pass, each wrong answer gets the hint it deserves."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from checking import Answers, JudgedAnswers, written
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from course_utils.lessons.data_parallelism.checks import PROGRAM, RANKS
from course_utils.lessons.shared.on_ranks import outcomes


def by_steps(D: int, S: int) -> dict[str, float]:
    part = S / D
    steps = range(D - 1)
    return {"server": D * (S + S), "naive": len(steps) * S, "ring": part * len(steps) + part * len(steps)}


def arrow_by_arrow(D: int, S: int) -> dict[str, float]:
    others = range(1, D)
    return {
        "ring": sum(S / D for _ in others) * 2,
        "naive": sum(S for _ in others),
        "server": sum([S + S] * D),
    }


def with_one(name: str, formula: Callable[[int, int], float]) -> Any:
    return lambda D, S: {**by_steps(D, S), name: formula(D, S)}


TRAFFIC = Answers(
    right=[
        arrow_by_arrow,
        by_steps,
        lambda D, S: {"server": S * 2 * D, "naive": S * D - S, "ring": 2 * (S - S / D)},
        with_one("ring", lambda D, S: 2 * (D - 1) * S // D),
        with_one("ring", lambda D, S: 2 * (D - 1) * -(-S // D)),
    ],
    wrong=[
        (with_one("server", lambda D, S: D * S), "one way"),
        (with_one("server", lambda D, S: 2 * S), "one worker's traffic"),
        (with_one("server", lambda D, S: 2 * (D - 1) * S), "a machine of its own"),
        (with_one("server", lambda D, S: 3 * S), "server is off"),
        (with_one("naive", lambda D, S: D * S), "No rank sends to itself"),
        (with_one("naive", lambda D, S: D * (D - 1) * S), "the sum over all ranks. Return the bytes of one"),
        (with_one("ring", lambda D, S: (D - 1) * S / D), "ring: this is the first half"),
        (with_one("ring", lambda D, S: 2 * (D - 1) * S), "you send the whole gradient in each message"),
        (with_one("ring", lambda D, S: 2 * S), "the limit for very many ranks"),
        (with_one("ring", lambda D, S: 2 * (D - 1) * (S // D)), "rounds down"),
        (with_one("ring", lambda D, S: 2 * (S // D)), "ring is off"),
    ],
)


def ring_right(parts: Any, rank: int, ranks: int, send: Any, receive: Any) -> Any:
    for step in range(2 * (ranks - 1)):
        leaves = (rank - step) % ranks
        comes = (rank - step - 1) % ranks
        send(parts[leaves], (rank + 1) % ranks)
        arrived = receive((rank - 1) % ranks)
        parts[comes] = parts[comes] + arrived if step < ranks - 1 else arrived
    return parts


def in_two_loops(parts: Any, rank: int, ranks: int, send: Any, receive: Any) -> Any:
    current = rank
    for _ in range(ranks - 1):
        send(parts[current], (rank + 1) % ranks)
        current = (current - 1) % ranks
        parts[current] += receive((rank - 1) % ranks)
    for _ in range(ranks - 1):
        send(parts[current], (rank + 1) % ranks)
        current = (current - 1) % ranks
        parts[current].copy_(receive((rank - 1) % ranks))
    return tuple(parts)


def by_a_list(parts: Any, rank: int, ranks: int, send: Any, receive: Any) -> Any:
    mine = list(parts)
    order = [(rank - step) % ranks for step in range(2 * ranks - 1)]
    for step in range(2 * ranks - 2):
        send(mine[order[step]], (rank + 1) % ranks)
        arrived = receive((rank - 1) % ranks)
        mine[order[step + 1]] = arrived if step >= ranks - 1 else torch.add(arrived, mine[order[step + 1]])
    return mine


def ring_of(steps: Callable[[int], int], added: int = 1, moves: int = 1, more: int = 0) -> Any:
    """A ring of other steps that adds in `added` halves; a part `moves` on with each, `more` messages."""

    def answer(parts: Any, rank: int, ranks: int, send: Any, receive: Any) -> Any:
        right = (rank + 1) % ranks
        left = (rank - 1) % ranks
        for step in range(steps(ranks)):
            leaves = (rank - step * moves) % ranks
            comes = (rank - (step + 1) * moves) % ranks
            send(parts[leaves], right)
            parts[comes] = receive(left) + (parts[comes] if step < added * (ranks - 1) else 0)
        for _ in range(more):
            send(parts[0], right)
        return parts

    return answer


def to_everybody(parts: Any, rank: int, ranks: int, send: Any, receive: Any) -> Any:
    others = [other for other in range(ranks) if other != rank]
    for other in others:
        send(torch.stack(parts), other)
    return list(sum([receive(other) for other in others], torch.stack(parts)))


def around(joined: bool) -> Any:
    """Every part whole: D−1 rounds, in which all that came from the left is added and handed on."""

    def answer(parts: Any, rank: int, ranks: int, send: Any, receive: Any) -> Any:
        passing = [torch.stack(parts)] if joined else list(parts)
        sums = torch.stack(parts)
        for _ in range(ranks - 1):
            for piece in passing:
                send(piece, (rank + 1) % ranks)
            passing = [receive((rank - 1) % ranks) for _ in passing]
            sums += passing[0] if joined else torch.stack(passing)
        return list(sums)

    return answer


def stacked(parts: Any, rank: int, ranks: int, send: Any, receive: Any) -> Any:
    for step in range(2 * (ranks - 1)):
        send(parts[(rank - step) % ranks], (rank + 1) % ranks)
        comes = (rank - step - 1) % ranks
        parts[comes] = receive((rank - 1) % ranks) + parts[comes] * (step < ranks - 1)
    return torch.stack(parts)


def in_means(*given: Any) -> Any:
    return [part / given[2] for part in ring_right(*given)]


def with_a_helper(parts: Any, rank: int, ranks: int, send: Any, receive: Any) -> Any:
    return in_two_loops(parts, rank, ranks, send, receive)


def in_another_order(*given: Any) -> Any:
    return list(reversed(ring_right(*given)))


def by_torch(parts: Any, rank: int, ranks: int, send: Any, receive: Any) -> Any:
    for part in parts:
        dist.all_reduce(part)
    return parts


def in_one_box(parts: Any, rank: int, ranks: int, send: Any, receive: Any, box: Any = {}) -> Any:  # noqa: B006, the slip
    box[ranks, rank] = [part.clone() for part in parts]
    for _ in range(ranks - 1):
        send(parts[rank], (rank + 1) % ranks)
        receive((rank - 1) % ranks)
    return [sum(kept[part] for (size, _), kept in box.items() if size == ranks) for part in range(ranks)]


RING = Answers(
    right=[ring_right, in_two_loops, by_a_list, stacked],
    wrong=[
        (ring_of(lambda D: D - 1), "this is only the first half"),
        (ring_of(lambda D: 2 * D - 2, added=2), "more than once"),
        (ring_of(lambda D: 2 * D - 2 - (D > 2)), "Which part leaves first in the second"),
        (in_another_order, "not in their original order"),
        (by_torch, "not with `dist`"),
        (
            lambda parts, rank, ranks, send, receive: send(parts[0], (rank + 1) % ranks).wait(),
            "`send` returns nothing",
        ),
        (lambda parts, rank, ranks, send, receive: receive(parts[0], rank), "takes one argument"),
        (in_means, "divided by the number of ranks"),
        (ring_of(lambda D: 2 * D - 2, more=1), "never received"),
        (ring_of(lambda D: D - 1, moves=0), "no part is a complete sum"),
        (to_everybody, "this is not a ring"),
        (
            lambda parts, rank, ranks, send, receive: send(parts[rank], rank + 1) or parts,
            "closes with `% ranks`",
        ),
        (lambda parts, rank, ranks, send, receive: send(parts, (rank + 1) % ranks), "not a list"),
        (around(joined=False), "a rank sends 12 messages"),
        (around(joined=True), "larger than a part"),
        (
            lambda parts, rank, ranks, send, receive: receive(rank - 1 if rank else ranks - 1),
            "Deadlock: rank 0 waits for a message from rank 3",
        ),
        (lambda parts, rank, ranks, send, receive: receive(9), "There is no rank 9 to receive from"),
        (lambda parts, rank, ranks, send, receive: parts[:1], "all 4 parts"),
        (lambda parts, rank, ranks, send, receive: [1] * ranks, "One of your parts is"),
        (lambda parts, rank, ranks, send, receive: [part[:2] for part in parts], "has changed its length"),
        (in_one_box, "but not on real ranks: do you keep anything outside"),
        (with_a_helper, "your function raised NameError: name 'in_two_loops'"),
    ],
)


def backward_of(
    factor: str = "D / tokens",
    own: Sequence[str] = (),
    returned: str = "mean.item() / tokens.item()",
    reduction: str = "sum",
    model: str = "model",
    counted: str = "(targets != -100).sum()",
) -> Any:
    lines = [
        "def backward(model, inputs, targets):",
        f"    own = tokens = {counted}",
        "    dist.all_reduce(tokens := tokens.clone())",
        "    D = dist.get_world_size()",
        f"    loss = cross_entropy({model}(inputs).transpose(1, 2), targets, reduction='{reduction}')",
        f"    (loss * ({factor})).backward()",
        "    dist.all_reduce(mean := loss.detach().clone())",
        f"    return {returned}",
    ]
    return written(lines, "backward", {"torch": torch, "dist": dist, "cross_entropy": cross_entropy})


def means_weighted(model: Any, inputs: Any, targets: Any) -> Any:
    own = torch.tensor(float((targets >= 0).sum()))
    whole = own.clone()
    dist.all_reduce(whole)
    mean = cross_entropy(model(inputs).flatten(0, 1), targets.flatten()) if own else 0.0 * model(inputs).sum()
    share = own / whole
    (mean * share * dist.get_world_size()).backward()
    total = (mean * share).detach()
    dist.all_reduce(total)
    return total


def gradients_weighted(model: Any, inputs: Any, targets: Any) -> float:
    logits = model(inputs)
    found = targets != -100
    both = torch.stack(
        [found.sum(), F.cross_entropy(logits[found], targets[found], reduction="sum").detach()]
    )
    cross_entropy(logits[found], targets[found], reduction="sum").backward()
    dist.all_reduce(both)
    for weight in model.parameters():
        weight.grad *= dist.get_world_size() / both[0]
    return float(both[1] / both[0])


def gathered_numbers(model: Any, inputs: Any, targets: Any) -> float:
    own = (targets != -100).sum()
    counts = [torch.zeros_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(counts, own)
    tokens = sum(count.item() for count in counts)
    loss = cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), reduction="sum")
    (loss * len(counts) / tokens).backward()
    loss = loss.detach()
    dist.all_reduce(loss)
    return loss.item() / tokens


def gathered_objects(model: Any, inputs: Any, targets: Any) -> float:
    loss = cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), reduction="sum")
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, (loss.item(), (targets != -100).sum().item()))
    tokens = sum(count for _, count in found)
    (loss * len(found) / tokens).backward()
    return sum(one for one, _ in found) / tokens


def only_with_tokens(model: Any, inputs: Any, targets: Any) -> float:
    own = (targets != -100).sum()
    tokens = own.clone()
    dist.all_reduce(tokens)
    if own == 0:
        loss = torch.zeros(())
    else:
        loss = cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), reduction="sum") / tokens
        (loss * dist.get_world_size()).backward()
    dist.all_reduce(mean := loss.detach())
    return mean.item()


def only_when_needed(model: Any, inputs: Any, targets: Any) -> float:
    own = (targets != -100).sum()
    loss = cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), reduction="sum")
    if own == 0:
        (loss * 0).backward()
        return 0.0
    dist.all_reduce(own)
    (loss / own * dist.get_world_size()).backward()
    return float(loss / own)


def no_backward(model: Any, inputs: Any, targets: Any) -> float:
    return cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).item()


TOKEN_BACKWARD = Answers(
    right=[backward_of(), means_weighted, gradients_weighted, gathered_numbers, gathered_objects],
    wrong=[
        (backward_of("1", reduction="mean", returned="mean.item() / D"), "You leave the loss as it is"),
        (backward_of("1 / tokens"), "DDP takes the mean of their gradients"),
        (only_with_tokens, "does not go backward"),
        (backward_of("1"), "a sum over tokens"),
        (backward_of("D"), "Which number must divide it?"),
        (backward_of(counted="torch.tensor(targets.numel())"), "Those of -100 are not tokens"),
        (backward_of("1 / (tokens * D)"), "You divide by the number of ranks. DDP already"),
        (backward_of("D * own / tokens", reduction="mean"), "A mean over no token is 0/0"),
        (backward_of("D / tokens / 3"), "DDP takes the mean of their gradients"),
        (backward_of("D / tokens", model="model.module"), "who calls DDP's own forward"),
        (backward_of(returned="loss.item() / max(own.item(), 1)"), "the mean over the tokens of *all* ranks"),
        (backward_of("D * 2 / tokens"), "The gradient is off"),
        (no_backward, "does not go backward"),
        (backward_of(returned="None"), "returned nothing"),
        (only_when_needed, "the same exchanges"),
        (backward_of("3 / tokens"), "Who knows how many ranks there are?"),
        (backward_of("max(D - (tokens == 12).int(), 1) / tokens"), "all ranks, with or without them"),
        (backward_of(model="reader"), "raised NameError: name 'reader'"),
    ],
)


STEP, CLEAR = "optimizer.step()", "optimizer.zero_grad()"
BY_HAND = "[torch.distributed.all_reduce(one.grad.div_(3)) for one in model.parameters()]"
MEAN = "for weight in model.parameters(): weight.grad /= len(micro_batches)"


def step_of(
    loss: str = "mse_loss(model(x), y) / len(micro_batches)",
    waits: str = "index < len(micro_batches) - 1",
    after_each: Sequence[str] = (),
    end: Sequence[str] = (STEP, CLEAR),
) -> Any:
    """A training step with some of its lines in another way."""
    lines = [
        "def step(model, optimizer, micro_batches):",
        "    for index, (x, y) in enumerate(micro_batches):",
        f"        with model.no_sync() if {waits} else nullcontext():",
        f"            ({loss}).backward()",
        *(f"        {line}" for line in after_each),
        *(f"    {line}" for line in end),
    ]
    return written(lines, "step", {"torch": torch, "nullcontext": nullcontext, "mse_loss": mse_loss})


def two_blocks(model: Any, optimizer: Any, micro_batches: Any) -> None:
    optimizer.zero_grad()
    *early, last = micro_batches
    with model.no_sync():
        for x, y in early:
            (mse_loss(model(x), y) / len(micro_batches)).backward()
    (mse_loss(model(last[0]), last[1]) / len(micro_batches)).backward()
    optimizer.step()


def of_another_cell(model: Any, optimizer: Any, micro_batches: Any) -> None:
    two_blocks(model, optimizer, micro_batches)


def joined(model: Any, optimizer: Any, micro_batches: Any) -> None:
    inputs, targets = (torch.cat(parts) for parts in zip(*micro_batches, strict=True))
    mse_loss(model(inputs), targets).backward()
    optimizer.step()
    optimizer.zero_grad()


MENDED_STEP = Answers(
    right=[step_of(), two_blocks, step_of(loss="mse_loss(model(x), y)", end=(MEAN, STEP, CLEAR))],
    wrong=[
        (
            step_of(loss="mse_loss(model.module(x), y) / len(micro_batches)"),
            "DDP exchanges no gradient at all",
        ),
        (step_of(waits="True"), "DDP exchanges no gradient at all"),
        (step_of(waits="True", end=[BY_HAND, STEP, CLEAR]), "DDP exchanges no gradient at all"),
        (step_of(waits="(index + 1) % 4"), "With some numbers of micro-batches"),
        (step_of(waits="index != len(micro_batches) // 2 * 2 - 1"), "With some numbers of micro-batches"),
        (step_of(waits="index < len(micro_batches) - 1 or not index"), "With some numbers of micro-batches"),
        (step_of(loss="mse_loss(model(x), y) / 4"), "Right with 4 micro-batches"),
        (step_of(waits="index"), "The ranks drift apart, though gradients are exchanged"),
        (step_of(loss="mse_loss(model(x), y) / 4"), "By how much do you divide the loss"),
        (step_of(end=[STEP]), "what does a step leave behind?"),
        (step_of(waits="False"), "more than once per step"),
        (joined, "the memory is not"),
        (step_of(waits="False", after_each=(STEP, CLEAR), end=()), "When do you step and clear?"),
        (step_of(end=[CLEAR]), "When do you step and clear?"),
        (of_another_cell, "raised NameError: name 'two_blocks' is not defined"),
        (lambda model, optimizer, micro_batches: None, "with `def`"),
    ],
)


MODEL = "model = DistributedDataParallel(body.append(nn.Linear(8, 1)))"
SAMPLER, EPOCH = "sampler = DistributedSampler(data)", "sampler.set_epoch(epoch)"
SHARED = ("dist.all_reduce(total)", "losses.append(total.item() / seen / dist.get_world_size())")
KNOWN = {
    "torch": torch,
    "nn": torch.nn,
    "dist": dist,
    "DistributedDataParallel": DistributedDataParallel,
    "DataLoader": DataLoader,
    "DistributedSampler": DistributedSampler,
    "mse_loss": mse_loss,
}


def training_of(
    start: Sequence[str] = (MODEL,),
    sampler: str = SAMPLER,
    order: str = EPOCH,
    forward: str = "model(x)",
    loader: str = "DataLoader(data, batch, sampler=sampler)",
    logged: Sequence[str] = SHARED,
    optimizer: str = "torch.optim.SGD(model.parameters(), lr=0.1)",
    result: str = "model, losses",
) -> Any:
    """A training on all ranks with some of its lines in another way."""
    lines = [
        "def train(body, data, epochs, batch):",
        *(f"    {line}" for line in start),
        f"    optimizer, losses = {optimizer}, []",
        f"    {sampler}",
        "    for epoch in range(epochs):",
        f"        {order}",
        "        total, seen = torch.zeros(()), 0",
        f"        for x, y in {loader}:",
        "            optimizer.zero_grad()",
        f"            loss = mse_loss({forward}, y)",
        "            loss.backward()",
        "            optimizer.step()",
        "            total, seen = total + len(x) * loss.detach(), seen + len(x)",
        *(f"        {line}" for line in logged),
        f"    return {result}",
    ]
    return written(lines, "train", KNOWN)


def by_indices(body: Any, data: Any, epochs: int, batch: int) -> Any:
    """Without a sampler: one order for all, and every third of it."""
    D = dist.get_world_size()
    rank = dist.get_rank()
    model = DistributedDataParallel(nn.Sequential(*body, nn.Linear(8, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for epoch in range(epochs):
        order = torch.randperm(len(data), generator=torch.Generator().manual_seed(epoch)).tolist()
        mine = (order + order[: -len(order) % D])[rank::D]
        total = []
        for at in range(0, len(mine), batch):
            drawn = [data[i] for i in mine[at : at + batch]]
            x, y = (torch.stack(column) for column in zip(*drawn, strict=True))
            model.zero_grad()
            loss = mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            total += [loss.item()] * len(x)
        everybody: list = [None] * D
        dist.all_gather_object(everybody, total)
        losses.append(sum(map(sum, everybody)) / sum(map(len, everybody)))
    return [model, losses]


LATE = ("model = DistributedDataParallel(body)", "model.module.append(nn.Linear(8, 1))")
FROZEN = "torch.optim.SGD(body[0].parameters(), lr=0.1)"
FIXED_TRAINING = Answers(
    right=[training_of(), by_indices, training_of(start=("torch.manual_seed(1)", MODEL))],
    wrong=[
        (training_of(start=LATE), "Ranks start with different weights"),
        (
            training_of(start=("torch.manual_seed(0)", "body[0] = nn.Linear(8, 8)", *LATE)),
            "Are all weights in DDP",
        ),
        (
            training_of(sampler="", order="", loader="DataLoader(data, batch, shuffle=True)"),
            "more than all samples",
        ),
        (
            training_of(
                sampler="torch.manual_seed(0)", order="", loader="DataLoader(data, batch, shuffle=True)"
            ),
            "more than all samples",
        ),
        (training_of(order=""), "the same order"),
        (training_of(sampler="sampler = DistributedSampler(data, shuffle=False)"), "the same order"),
        (
            training_of(sampler="sampler = DistributedSampler(data, seed=dist.get_rank())"),
            "never drawn in an epoch",
        ),
        (
            training_of(sampler="sampler = DistributedSampler(data, drop_last=True)"),
            "never drawn in an epoch",
        ),
        (
            training_of(loader="DataLoader(data, batch, sampler=sampler, drop_last=True)"),
            "never drawn in an epoch",
        ),
        (training_of(loader="DataLoader(data, batch // 3, sampler=sampler)"), "at once than `batch`"),
        (training_of(loader="DataLoader(data, batch * 3, sampler=sampler)"), "at once than `batch`"),
        (training_of(forward="model(x)", logged=["losses.append(loss.item())"]), "losses of its own samples"),
        (training_of(result="losses, model"), "Return two things"),
        (training_of(optimizer=FROZEN), "Does every weight learn"),
        (training_of(optimizer="torch.optim.SGD(model.parameters(), lr=0.3)"), "one process with SGD"),
        (training_of(forward="model.module(x)"), "is not in DDP, or you never call"),
        (training_of(result="model.module, losses"), "is not the model in DDP"),
        (training_of(logged=[SHARED[0], "losses.append(total.item() / seen / 3)"]), "Right on three ranks"),
        (training_of(logged=["losses.append(total.item() / seen)"]), "losses of its own samples"),
        (
            training_of(logged=[SHARED[0], "losses.append(total.item() / seen)"]),
            "D times too large on D ranks",
        ),
        (training_of(logged=[SHARED[0], "losses.append(total.item())"]), "not the mean over all"),
        (training_of(logged=[]), "one loss for each epoch"),
        (
            training_of(logged=["[model(x) for x, y in DataLoader(data, 2, sampler=sampler)]"]),
            "only its own, once",
        ),
        (training_of(start=["model = DistributedDataParallel(body)"]), "where is the new head?"),
        (training_of(result="model"), "a DistributedDataParallel, but the exercise asks"),
        (training_of(result="model, losses, 1"), "Return two things"),
    ],
)


def _real(answers: Answers) -> list[Any]:
    """Wrong answers that pass the dry run: the others would keep real ranks waiting."""
    alone = ("does not go backward", "the same exchanges", "Return two things")
    return [bad for bad, words in answers.wrong if words not in alone]


@pytest.fixture(scope="module", autouse=True)
def tried() -> None:
    """All that reach real ranks, by the same processes: a start takes seconds.

    Outcomes are kept for the checks.
    """
    rings = [("ring", ring) for ring in (*RING.right, with_a_helper, in_one_box)]
    judged = {"step": MENDED_STEP, "tokens": TOKEN_BACKWARD, "train": FIXED_TRAINING}
    others = [(judge, one) for judge, all_ in judged.items() for one in (*all_.right, *_real(all_))]
    named = [(judge, one) for judge, one in others if one.__name__ != "<lambda>"]
    outcomes(PROGRAM, RANKS, [*rings, *named])
    right_on_three = [bad for bad, words in FIXED_TRAINING.wrong if words == "Right on three ranks"]
    outcomes(PROGRAM, 2, [("train", one) for one in (*FIXED_TRAINING.right, *right_on_three)])


ANSWERS = {
    "10.1": TRAFFIC, "10.2": RING, "10.3": TOKEN_BACKWARD, "10.4": MENDED_STEP, "10.5": FIXED_TRAINING
}  # fmt: skip


class TestAnswers(JudgedAnswers):
    answers = ANSWERS
