"""The checks of lesson 19: right answers of every style pass, each wrong answer gets the hint it deserves."""

import gc
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from checking import Answers, JudgedAnswers
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from course_utils import TrainingRun, fit
from course_utils.lessons.will_it_fit import checks as lesson_19
from course_utils.lessons.will_it_fit.checks import BROKEN

Build = Callable[[Any], Callable[[], None]]


def search(
    build: Build,
    start: int,
    steps: int = 2,
    error: Any = torch.OutOfMemoryError,
    collects: bool = True,
    frees: bool = True,
    smaller: Callable[[int], Any] = lambda size: size // 2,
    least: int = 1,
    none: Any = None,
    found: Callable[[int], Any] = lambda size: size,
) -> Any:
    """A loop that lets go and collects before each attempt; right by default."""
    size: Any = start
    step: Any = None
    while size >= least:
        if frees:
            step = None
        if collects:
            gc.collect()
        try:
            step = build(size)
            for _ in range(steps):
                step()
            return found(size)
        except error:
            size = smaller(size)
    return none


def fits(build: Build, size: int) -> bool:
    """In a function of its own, whose names are gone when it returns."""
    try:
        step = build(size)
        step()
        step()
    except torch.OutOfMemoryError:
        return False
    return True


def by_its_words(build: Build, start: int) -> int | None:
    while start:
        step = None
        gc.collect()
        try:
            step = build(start)
            step()
            step()
            return start
        except RuntimeError as error:
            if "out of memory" not in str(error):
                raise
        start //= 2
    return None


def clears_frames(build: Build, start: int) -> int | None:
    """Empties the error's own frames, and collects within the handler."""
    step = None
    while start:
        try:
            step = build(start)
            step()
            step()
            return start
        except torch.OutOfMemoryError as error:
            traceback.clear_frames(error.__traceback__)
            error.__traceback__ = None
            step = None
            gc.collect()
        start //= 2
    return None


def by_function(build: Build, start: int) -> int | None:
    while start > 0:
        gc.collect()
        torch.cuda.empty_cache()
        if fits(build, start):
            return start
        start //= 2
    return None


def by_recursion(build: Build, start: int) -> int | None:
    """Goes on after the except block."""
    if not start:
        return None
    gc.collect()
    if fits(build, start):
        return start
    return by_recursion(build, start // 2)


def within_the_handler(build: Build, start: int) -> int | None:
    try:
        step = build(start)
        step()
        step()
        return start
    except torch.OutOfMemoryError:
        return within_the_handler(build, start // 2) if start > 1 else None


def stores_errors(build: Build, start: int) -> int | None:
    errors = []
    while start:
        try:
            step = build(start)
            step()
            step()
            return start
        except torch.OutOfMemoryError as error:
            errors.append(error)
        start //= 2
    return None


def from_below(build: Build, start: int) -> int | None:
    best, size = None, 1
    while size <= start and fits(build, size):
        best = size
        size = 2 * size
        gc.collect()
    return best


def collects_too_soon(build: Build, start: int) -> int | None:
    """Within the handler the error's traceback still refers to the training."""
    while start:
        try:
            step = build(start)
            step()
            step()
            return start
        except torch.OutOfMemoryError:
            step = None
            gc.collect()
            start //= 2
    return None


def builds_outside(build: Build, start: int) -> int | None:
    while start:
        step = None
        gc.collect()
        step = build(start)
        try:
            step()
            step()
            return start
        except torch.OutOfMemoryError:
            start //= 2
    return None


def keeps_the_winner(build: Build, start: int) -> int | None:
    """Keeps the training that fits under a name of its own, to go on with it."""
    while start:
        step = None
        gc.collect()
        try:
            step = build(start)
            step()
            step()
            vars(keeps_the_winner)["step"] = step
            return start
        except torch.OutOfMemoryError:
            start //= 2
    return None


LARGEST = Answers(
    right=[search, by_function, by_recursion, clears_frames],
    wrong=[
        (partial(search, steps=1), "the second would not"),
        (partial(search, frees=False), "Who refers to it"),
        (within_the_handler, "Who refers to it"),
        (stores_errors, "Who refers to it"),
        (partial(search, collects=False), "What frees such a cycle"),
        (collects_too_soon, "once names and error are gone"),
        (builds_outside, "`build` may raise one, too"),
        (keeps_the_winner, "Which name outlives your function"),
        (partial(search, error=Exception), "and you go on"),
        (partial(search, error=RuntimeError), "and you go on"),
        (by_its_words, "the host is out of memory”, and you go on"),
        (partial(search, none=0), "In that case return None"),
        (partial(search, least=0), "Where must halving end"),
        (partial(search, smaller=lambda size: size / 2), "Where must halving end"),
        (partial(search, smaller=lambda size: size - 8), "half of it"),
        (partial(search, found=lambda size: size // 2), "the size that ran"),
        (partial(search, smaller=lambda size: size), "twice"),
        (from_below, "half of it"),
        (lambda build, start: build(start), "the exercise asks for"),
    ],
)


@lesson_19.collected_alone()
def test_searches_find_what_the_first_step_alone_does_not() -> None:
    found: dict[int, list[int | None]] = {1: [], 2: []}
    for steps, sizes in found.items():
        for start, room, _ in lesson_19.SEARCHES:
            with lesson_19.small_card(room):
                sizes.append(search(lesson_19.Trainings(start == 128).build, start, steps))
    assert found[2] == [right for *_, right in lesson_19.SEARCHES] and found[1][0] == 64


def fitting(
    size: int | None = None,
    blocks: bool = True,
    chunk: int | None = 128,
    mean: bool = False,
    divide: Callable[[torch.Tensor], float] = torch.Tensor.numel,
    each: bool = False,
    clears: bool = True,
    autocast: bool = True,
    twice: bool = False,
    waits: bool = False,
) -> Any:
    """Micro-batches of `size`, checkpoints of blocks, and chunks of the loss; right by default."""

    def step(model: Any, optimizer: Any, batch: Any) -> None:
        def loss_of(x: Any, y: Any) -> Any:
            return cross_entropy(model.head(x), y, reduction="mean" if mean else "sum")

        for tokens, targets in zip(*(part.split(size or len(part)) for part in batch), strict=True):
            with torch.autocast(tokens.device.type, torch.bfloat16, enabled=autocast):
                x = model.embedding(tokens)
                for block in model.blocks:
                    x = checkpoint(block, x, use_reentrant=False) if blocks else block(x)
                x = x.flatten(0, 1)
                y = targets.flatten()
                pieces = list(zip(x.split(chunk or len(x)), y.split(chunk or len(x)), strict=True))
                loss = torch.stack(
                    [
                        loss_of(*one) if waits else checkpoint(loss_of, *one, use_reentrant=False)
                        for one in pieces
                    ]
                ).sum()
                loss = loss / (len(pieces) if mean else divide(batch[1]))
            loss.backward()
            if each:
                optimizer.step()
                optimizer.zero_grad()
        if not each:
            optimizer.step()
        if twice:
            optimizer.step()
        if clears:
            optimizer.zero_grad()

    return step


def in_two_parts(model: Any, optimizer: Any, batch: Any) -> None:
    """The head's pieces go backward one by one into a detached input, not recomputed; then the rest does."""
    for tokens, targets in zip(*(part.split(2) for part in batch), strict=True):
        with torch.autocast(tokens.device.type, torch.bfloat16):
            x = model.embedding(tokens)
            for block in model.blocks:
                x = block(x)
        cut = x.detach().requires_grad_()
        y = targets.flatten()
        for first in range(0, len(y), 100):
            with torch.autocast(tokens.device.type, torch.bfloat16):
                logits = model.head(cut.flatten(0, 1)[first : first + 100])
                loss = cross_entropy(logits, y[first : first + 100], reduction="sum") / batch[1].numel()
            loss.backward()
        x.backward(cut.grad)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def along_sequences(model: Any, optimizer: Any, batch: Any) -> None:
    for tokens, targets in zip(*(part.split(64, dim=1) for part in batch), strict=True):
        with torch.autocast(tokens.device.type, torch.bfloat16):
            logits = model(tokens).flatten(0, 1)
            loss = cross_entropy(logits, targets.flatten(), reduction="sum") / batch[1].numel()
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def dropping_the_rest(model: Any, optimizer: Any, batch: Any) -> None:
    tokens, targets = batch
    with torch.autocast(tokens.device.type, torch.bfloat16):
        logits = model(tokens).flatten(0, 1)
        y = targets.flatten()
        pieces = [slice(256 * i, 256 * (i + 1)) for i in range(len(y) // 256)]
        loss = sum(cross_entropy(logits[one], y[one], reduction="sum") for one in pieces) / y.numel()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def clears_first(model: Any, optimizer: Any, batch: Any) -> None:
    optimizer.zero_grad(set_to_none=False)
    fitting(size=1, clears=False)(model, optimizer, batch)


def keeps_gradients(model: Any, optimizer: Any, batch: Any) -> None:
    optimizer.zero_grad(set_to_none=False)
    fitting(clears=False)(model, optimizer, batch)


def loss_outside(model: Any, optimizer: Any, batch: Any) -> None:
    for tokens, targets in zip(*(part.split(1) for part in batch), strict=True):
        with torch.autocast(tokens.device.type, torch.bfloat16):
            logits = model(tokens).flatten(0, 1)
        (cross_entropy(logits, targets.flatten(), reduction="sum") / batch[1].numel()).backward()
    optimizer.step()
    optimizer.zero_grad()


def head_in(dtype: torch.dtype, model: Any, optimizer: Any, batch: Any) -> None:
    for tokens, targets in zip(*(part.split(1) for part in batch), strict=True):
        with torch.autocast(tokens.device.type, torch.bfloat16):
            x = model.embedding(tokens)
            for block in model.blocks:
                x = checkpoint(block, x, use_reentrant=False)
        with torch.autocast(tokens.device.type, torch.float16, enabled=dtype == torch.float16):
            logits = model.head(x.to(model.head.weight.dtype)).flatten(0, 1)
            loss = cross_entropy(logits, targets.flatten(), reduction="sum") / batch[1].numel()
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()


class Again(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(self.block, x, use_reentrant=False)


def wrapping(model: Any, optimizer: Any, batch: Any) -> None:
    model.blocks = nn.ModuleList(Again(block) for block in model.blocks)
    fitting(blocks=False)(model, optimizer, batch)


FITTING = Answers(
    right=[fitting(), fitting(size=1, blocks=False), fitting(size=1, chunk=None), in_two_parts, clears_first],
    wrong=[
        (lesson_19.plain_step, "Logits are among the largest tensors there"),
        (keeps_gradients, "How long do you need those of the last step"),
        (fitting(blocks=False), "The blocks' activations fill it"),
        (fitting(chunk=None), "Logits are among the largest tensors there"),
        (fitting(size=1, blocks=False, chunk=None), "too high"),
        (fitting(divide=lambda targets: 1.0), "times as long as plain_step's"),
        (fitting(divide=len), "times as long as plain_step's"),
        (fitting(mean=True, chunk=5), "Are all pieces equally long"),
        (fitting(size=2, mean=True), "some tokens count more than others"),
        (fitting(mean=True, chunk=300), "Are all pieces equally long"),
        (along_sequences, "What does a token attend to"),
        (dropping_the_rest, "Do their gradients add up"),
        (fitting(size=1, each=True), "optimizer steps for one batch"),
        (fitting(twice=True), "optimizer steps for one batch"),
        (fitting(clears=False), "What did it leave behind"),
        (fitting(size=1, blocks=False, autocast=False), "outside bf16 autocast"),
        (loss_outside, "nll_loss_forward in bfloat16"),
        (partial(head_in, torch.float32), "mm in float32"),
        (partial(head_in, torch.float16), "in float16"),
        (wrapping, "its modules are wrapped"),
        (
            lambda model, optimizer, batch: fitting()(model.bfloat16(), optimizer, batch),
            "its weights are in another",
        ),
        (fitting(chunk=40, waits=True), "Must they, or can you compute them again"),
        (lambda model, optimizer, batch: None, "0 optimizer steps"),
        (lambda model, optimizer, batch: optimizer.step(), "no gradient"),
    ],
)


ON_V100 = TrainingRun(
    "gpt2-large",
    12,
    1024,
    "amp-fp16",
    "adamw-fused",
    "efficient",
    "every-2",
    accumulation_steps=4,
    loss_chunks=8,
)


def changing(**changes: Any) -> Any:
    return lambda: ON_V100.replace(**changes)


ON_A_V100 = Answers(
    right=[
        lambda: fit("gpt2-large", "V100-16GB", global_batch=48).path[-1].run,
        lambda: ON_V100,
        changing(recompute="every-3", loss_chunks=16),
        changing(micro_batch=16, accumulation_steps=3, loss_chunks=16),
    ],
    wrong=[
        (changing(model="gpt2-medium"), "You train gpt2-medium. Train gpt2-large"),
        (changing(seq_len=512), "You change the length of the sequences"),
        (changing(accumulation_steps=1), "another batch"),
        (changing(world_size=4, accumulation_steps=1), "There is only one V100"),
        (changing(tensor_parallel=4), "There is only one V100"),
        (changing(precision="amp-bf16"), "does not compute in bf16"),
        (changing(attention="flash"), "no flash kernel"),
        (changing(precision="fp16-master"), "fp16-master is another recipe"),
        (changing(optimizer="adam8bit"), "Keep AdamW"),
        (changing(lora_rank=8), "You train only a part of the weights"),
        (changing(dropout=0.0), "You removed the dropout"),
        (changing(clip_grad_norm=1.0), "You clip gradients"),
        (changing(card="H100-80GB"), "is another card"),
        (changing(recompute="none"), "more than the card's room"),
        (changing(micro_batch=1, accumulation_steps=48), "times the time of `fit`'s plan"),
    ],
)


def rising(starts: Any) -> bool:
    return len(starts) > 3 and all(one < two for one, two in zip(starts[-3:], starts[-2:], strict=False))


CLUES: dict[str, Callable[[Any], bool]] = {
    "graphs": lambda seen: rising(seen.step_starts),
    "fragmentation": lambda seen: seen.free > seen.requested and seen.free_share > 0.2,
    "states": lambda seen: seen.phase == "optimizer" and seen.alive["optimizer_states"] < 8 * seen.parameters,
    "update": lambda seen: seen.phase == "optimizer",
    "loss": lambda seen: (
        seen.vocab and seen.requested // (seen.micro_batch * seen.seq_len * seen.vocab) in (2, 4)
    ),
    "attention": lambda seen: (
        seen.heads and seen.requested % (seen.micro_batch * seen.heads * seen.seq_len**2) == 0
    ),
}


def detective(order: Any = tuple(CLUES), **changes: Callable[[Any], bool]) -> Any:
    """Goes through the clues in this order, some of them changed; activations if none holds."""
    clues = CLUES | changes
    return lambda seen: next((name for name in order if clues[name](seen)), "activations")


def without(*names: str) -> Any:
    return detective([name for name in CLUES if name not in names])


def by_phase(seen: Any) -> str:
    """Branches by phase, and the sizes as fractions."""
    if rising(seen.step_starts):
        return "graphs"
    if seen.largest_free < seen.requested < seen.free and seen.free_share > 0.25:
        return "fragmentation"
    if seen.phase == "optimizer":
        complete = seen.alive["optimizer_states"] / seen.parameters >= 8
        return "update" if complete else "states"
    tokens = seen.micro_batch * seen.seq_len
    scores = tokens * seen.seq_len * seen.heads
    logits = tokens * seen.vocab
    if logits and any(abs(seen.requested / logits - n) < 0.01 for n in (2, 4)):
        return "loss"
    return "attention" if scores and seen.requested / scores in (1, 2, 4) else "activations"


DIAGNOSE = Answers(
    right=[
        detective(),
        by_phase,
        detective(["fragmentation", "graphs", "states", "update", "loss", "attention"]),
    ],
    wrong=[
        (
            detective(["states", "update", "graphs", "fragmentation", "attention", "loss"]),
            "You blame the last request",
        ),
        (detective(graphs=lambda seen: seen.step >= 3), "Not every later failure is a leak"),
        (detective(graphs=lambda seen: seen.heads == 0), "Not every later failure is a leak"),
        (
            detective(
                attention=lambda seen: seen.requested == 4 * seen.micro_batch * seen.heads * seen.seq_len**2
            ),
            "How large was the request",
        ),
        (detective(fragmentation=lambda seen: seen.free > seen.requested), "Less is crumbs"),
        (detective(states=lambda seen: seen.phase == "optimizer"), "Are the states complete"),
        (without("states"), "Were its states complete"),
        (without("loss", "attention"), "How large was the request"),
        (without("graphs"), "You blame the last request"),
        (without("fragmentation"), "You miss fragmentation"),
        (detective(fragmentation=lambda seen: seen.free_share > 0.2), "Was it more than the request"),
        (detective(fragmentation=lambda seen: seen.phase == "backward"), "The cause was not 'fragmentation'"),
        (
            detective(graphs=lambda seen: sorted(seen.step_starts)[0] < seen.step_starts[-1]),
            "Does the third begin",
        ),
        (detective(["attention", *CLUES]), "The cause was not 'attention'"),
        (
            detective(
                attention=lambda seen: seen.requested > seen.micro_batch * seen.heads * seen.seq_len**2 > 0
            ),
            "Is it a whole multiple",
        ),
        (detective(attention=lambda seen: seen.heads), "Is it a whole multiple"),
        (detective(["loss"], loss=lambda seen: seen.requested % seen.vocab == 0), "raised ZeroDivisionError"),
        (
            detective(loss=lambda seen: seen.requested == 2 * seen.micro_batch * seen.seq_len * seen.vocab),
            "How large was the request",
        ),
        (detective(graphs=lambda seen: seen.step > 1), "Not every later failure is a leak"),
        (lambda seen: max(seen.alive, key=lambda kind: seen.alive[kind]), "not one of activations"),
        (
            lambda seen: "weights" if seen.phase == "loss" else detective()(seen),
            "The cause was not 'weights'",
        ),
    ],
)


def test_hidden_cases_are_of_every_cause_that_can_be_told() -> None:
    assert {cause for cause, _, _ in BROKEN} == set(lesson_19.CAUSES) - {"weights"}


ANSWERS = {"19.1": LARGEST, "19.2": FITTING, "19.3": ON_A_V100, "19.4": DIAGNOSE}


class TestAnswers(JudgedAnswers):
    answers = ANSWERS
