"""Checks of the exercises of lesson 19, "Will it fit?": each names the misconception, never the answer."""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from operator import eq
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from ... import GPUS, TrainingRun, estimate, fit, measure
from ...estimating.step_time import lost_seconds
from ...interactive.feedback import Mistakes, call, call_for_effect, exercise, expect, recognized
from ...measurement import Measurement
from ...planning.twin import SAFETY
from ...units import MB, format_bytes
from ...watching.on_gpu import on_new_gpu
from ..shared.judging import same, seeded

# --------------------------------------------------------------------------------------------------
# 19.1: largest_micro_batch
SEARCHES = ((64, 330, 32), (100, 370, 50), (48, 900, 48), (3, 25, None), (128, 330, 32))
"""First size, MB on the card, the largest size that fits. 128: it refers to itself; 3: none can be built."""

WORKSPACES = 20 * MB  # cuBLAS keeps two, which take less


class Trainings:
    """Builds trainings on the GPU, and notes each one's size and what was alive there when it began."""

    def __init__(self, cycle: bool = False, error: Exception | None = None) -> None:
        self.cycle, self.error = cycle, error
        self.sizes, self.alive = list[Any](), list[int]()

    def build(self, size: Any) -> Callable[[], None]:
        end = f"You build a training for {size} sequences. Where must halving end?"
        expect(type(size) is int and size > 0, end)
        self.sizes.append(size)
        self.alive.append(torch.cuda.memory_allocated() - WORKSPACES)
        model = nn.Sequential(*(nn.Linear(2048, 2048, device="cuda") for _ in range(2)))
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        x = torch.zeros(size, 64, 2048, device="cuda")

        def step() -> None:
            if self.error:
                raise self.error
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        if self.cycle:
            vars(model)["step"] = step
        return step


@contextmanager
def collected_alone() -> Iterator[None]:
    """Inside, cycles wait for gc.collect(), which looks at none of the objects that are there already."""
    gc.collect()
    gc.disable()
    frozen_before = gc.get_freeze_count()
    gc.freeze()
    try:
        yield
    finally:
        if not frozen_before:
            gc.unfreeze()
        gc.enable()


@exercise("19.1", "You halve until it fits, and every attempt has the card to itself.")
@collected_alone()
def largest_micro_batch(answer: Any) -> None:
    """`answer(build, start)` is the first of start, start // 2, … whose training takes two steps."""
    hints = {"OutOfMemoryError": "An out-of-memory error leaves your function. `build` may raise one, too."}
    for start, room, right in SEARCHES:
        with on_new_gpu(room * MB):
            trainings = Trainings(cycle=start == 128)
            got = call(answer, trainings.build, start, returns=int | None, hints=hints)
            gc.collect()
            left = torch.cuda.memory_allocated() - WORKSPACES
        card = f"From {start} on a card of {room} MB:"
        cycle = "the training refers to itself. What frees such a cycle once names and error are gone?"
        held = "an attempt is still alive when the next begins. Who refers to it: a name, or a traceback?"
        expect(max(trainings.alive, default=0) <= 0, f"{card} {cycle if start == 128 else held}")
        outlives = "a training is still alive after you return. Which name outlives your function?"
        expect(left <= 0, f"{card} {outlives}")
        states = "the first step fits, but the second would not. When do the optimizer's states appear?"
        expect(not (right and got == 2 * right), f"{card} {states}")
        expect(right or got is None, f"{card} not even one sequence fits. In that case return None.")
        halves = [start >> times for times in range(start.bit_length())]
        sizes = [size for size in halves if size >= (right or 1)]
        expect(trainings.sizes == sizes, f"{card} try start, then half of it, then half of that, down to 1.")
        expect(got == right, f"{card} you do not return the size that ran.")
    for error in (RuntimeError("no such shape"), RuntimeError("the host is out of memory")):
        goes_on = f"A step raises RuntimeError: “{error}”, and you go on."
        advice = "Let it pass: which type of error means that the GPU is full?"
        with on_new_gpu(900 * MB):
            expect(_raised(answer, Trainings(error=error).build) is error, f"{goes_on} {advice}")


def _raised(answer: Any, build: Any) -> Exception | None:
    try:
        answer(build, 4)
    except Exception as raised:
        return raised
    return None


# --------------------------------------------------------------------------------------------------
# 19.2: fitting_step
CARD = 200 * MB
FORMATS = {"mm": "bfloat16", "addmm": "bfloat16", "bmm": "bfloat16", "nll_loss_forward": "float32"}
"""Those under autocast: of products, and of what `cross_entropy` adds up, as its log-softmax is not."""
STEPS_FIRST = "The check compares gradients of three batches and simulates a small card: 5 to 20 seconds."


class SmallTransformer(nn.Module):
    """Token ids (b, s) to logits (b, s, vocab): `embedding`, `blocks`, each x → x, and `head`."""

    def __init__(self, vocab: int = 8000, hidden: int = 256, layers: int = 3) -> None:
        super().__init__()
        how: dict[str, Any] = {"dropout": 0.0, "batch_first": True, "norm_first": True}
        blocks = (nn.TransformerEncoderLayer(hidden, 4, 4 * hidden, **how) for _ in range(layers))
        self.embedding = nn.Embedding(vocab, hidden)
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(hidden, vocab, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def plain_step(
    model: SmallTransformer, optimizer: torch.optim.Optimizer, batch: Sequence[torch.Tensor]
) -> None:
    tokens, targets = batch
    with torch.autocast(tokens.device.type, torch.bfloat16):
        loss = cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def training(device: str = "cuda") -> tuple[SmallTransformer, torch.optim.Optimizer, list[torch.Tensor]]:
    """The model, its optimizer and a batch: token ids and targets."""
    model = SmallTransformer().to(device)
    batch = [torch.zeros(8, 512, dtype=torch.long, device=device) for _ in range(2)]
    return model, torch.optim.AdamW(model.parameters(), fused=True), batch


def refusal(step: Callable[..., object]) -> str:
    """The first sentences of the out-of-memory error in two steps on "cuda"; "" if there is none."""
    parts = training()
    try:
        for _ in range(2):
            step(*parts)
    except torch.OutOfMemoryError as error:
        return str(error).partition(" GPU 0")[0]
    return ""


def gradients(step: Callable[..., object], b: int, s: int) -> list[list[Any]]:
    """The gradients of each optimizer step, for two batches, in fp64, which autocast leaves alone."""
    with seeded():
        model = SmallTransformer(11, 8, 2).double()
        batch = tuple(torch.randint(11, (2, b, s)))
    found = list[list[Any]]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def note_gradients(*_: Any) -> None:
        found.append([None if one.grad is None else one.grad.clone() for one in model.parameters()])

    optimizer.register_step_pre_hook(note_gradients)
    for _ in range(2):
        step(model, optimizer, batch)
    return found


@exercise("19.2", "The same gradient, on a card where the plain step runs out of memory.", first=STEPS_FIRST)
def fitting_step(answer: Any) -> None:
    """`answer(model, optimizer, batch)` takes plain_step's step on a card of 200 MB."""
    asked = partial(call_for_effect, answer)
    for b, s in ((7, 307), (5, 13), (1, 1)):
        got, right = (gradients(step, b, s) for step in (asked, plain_step))
        sizes = f"With {b} sequences of {s}:"
        expect(len(got) == 2, f"{sizes} {len(got) / 2:g} optimizer steps for one batch. Take exactly one.")
        expect(None not in got[0], f"{sizes} a weight has no gradient.")
        mine, wanted = (torch.cat([one.flatten() for one in ones]) for ones in (got[0], right[0]))
        uneven = "some tokens count more than others. Are sequences whole, and pieces equally long?"
        expect(torch.cosine_similarity(mine, wanted, dim=0) > 1 - 1e-9, f"{sizes} {uneven}")
        longer = f"the gradient is {mine.norm() / wanted.norm():.3g} times as long as plain_step's."
        expect(same(got[0], right[0]), f"{sizes} {longer} What do you divide by?")
        expect(same(got[1], right[1]), f"{sizes} only the first step is right. What did it leave behind?")
    model, optimizer, batch = training("cpu")
    found = measure(step=asked, model=model, optimizer=optimizer, batch=batch, source="simulated")
    made = {(one.operation, one.dtype) for one in found.allocations if one.operation in FORMATS}
    other = [f"{operation} in {dtype}" for operation, dtype in sorted(made) if dtype != FORMATS[operation]]
    recipe = f"You compute something outside bf16 autocast, which is another recipe: {', '.join(other)}."
    expect(not other, recipe)
    gc.collect()
    with on_new_gpu(CARD):
        refused = refusal(answer)
    expect(not refused, f"The gradient is right. But torch says: “{refused}” {_fills_peak(found)}")


def _fills_peak(found: Measurement) -> str:
    """The likely contents of a step's peak, and a question about them."""
    logits = [one.bytes for one in found.alive_at(found.peak_event) if one.shape[-1:] == (8000,)]
    if max(logits, default=0) > 9 * MB:
        return "Logits are among the largest tensors there. For how many tokens at a time do you make them?"
    if sum(logits) > 20 * MB:
        return "All pieces of the loss keep their logits. Must they, or can you compute them again?"
    return "The blocks' activations fill it. Of how many sequences, and must all of them wait for backward?"


# --------------------------------------------------------------------------------------------------
# 19.3: cluster
H100 = GPUS["H100-80GB"]
ASKED: dict[str, Any] = {"model": "llama3-70b", "card": H100, "global_batch": 256, "seq_len": 4096}
MACHINE = 8
MACHINES = (1, 2, 4, 8)  # 256 sequences are shared equally


@exercise("19.3", "Llama-3 70B, all weights, on the fewest machines.")
def cluster(answer: Any) -> None:
    """`answer()` is a TrainingRun of 70B parameters on as few machines of 8 H100s as possible."""
    run = call(answer, returns=TrainingRun)
    plans = (fit(**ASKED, world_size=MACHINE * number) for number in MACHINES)
    best = next(plan.best for plan in plans if plan.best)
    for name in ("model", "seq_len", "global_batch", "lora_rank", "clip_grad_norm", "tensor_parallel"):
        other = f"You change {name}. Keep the training that was asked for."
        expect(getattr(run, name) == getattr(best.run, name), other)
    expect(run.optimizer.algorithm == "adamw", f"{run.optimizer.algorithm} is another optimizer. Keep AdamW.")
    precise = ("amp-bf16", "bf16-master") if run.zero_stage > 1 else ("amp-bf16",)
    recipe = f"{run.precision.name} with ZeRO stage {run.zero_stage} rounds otherwise: another training."
    expect(run.precision.name in precise, recipe)
    whole = f"You rent machines of {MACHINE} cards. {run.world_size} cards cut one of them."
    expect(run.world_size % MACHINE == 0, whole)
    peak = estimate(run)
    over = format_bytes(peak.total - round(H100.room / SAFETY), "GB", 1)
    largest = max(peak, key=lambda kind: peak[kind]).replace("_", " ")
    too_much = f"Each card needs {over} too much. The largest part: {largest}."
    expect(peak.total * SAFETY <= H100.room, too_much)
    expect(run.world_size == best.run.world_size, "It fits. But fewer machines would do, too.")
    share = lost_seconds(run, H100) / best.lost
    slow = f"It fits, but loses {share:.2f} times the time of `fit`'s plan. What is gathered too often?"
    expect(share <= 1.25, slow)


# --------------------------------------------------------------------------------------------------
# 19.4: qlora
LOANS = (
    ("llama3-8b", "RTX4090-24GB"),
    ("llama3-8b", "RTX4080-16GB"),
    ("llama3-8b", "L4-24GB"),
    ("llama3.2-1b", "RTX4080-16GB"),
    ("llama3-70b", "H100-80GB"),
    ("llama3-70b", "RTX5090-32GB"),  # nothing fits
    ("llama3-8b", "A100-40GB"),
)


def adapted(model: str, bits: int, micro_batch: int) -> TrainingRun:
    """A run with LoRA of rank 16 on every matrix, and frozen weights of so many bits."""
    choices: dict[str, Any] = {"recompute": "full", "loss_chunks": 8, "lora_rank": 16}
    return TrainingRun(
        model, micro_batch, 4096, lora_targets=("attention", "mlp"), frozen_bits=bits, **choices
    )


def _chosen(
    model: str,
    card: str,
    order: tuple[int, ...] = (16, 8, 4),
    reserve: float = SAFETY,
    room: Callable[[Any], int] = lambda card: card.room,
    largest: bool = True,
) -> tuple[int, int]:
    """The bits and the micro-batch, (0, 0) if none fits; with other arguments, those of a mistake."""
    for bits in order:
        runs = {size: adapted(model, bits, size) for size in range(1, 17)}
        sizes = [size for size, run in runs.items() if reserve * estimate(run).total <= room(GPUS[card])]
        if sizes:
            return bits, max(sizes) if largest else 1
    return 0, 0


LOAN_MISTAKES: Mistakes = {
    "You take the fewest bits at once. Rounding costs quality: when are 16 or 8 bits possible?": (
        partial(_chosen, order=(4, 8, 16))
    ),
    "You fill the card without a reserve. `fit` leaves 5 % of the estimate.": partial(_chosen, reserve=1.0),
    "You use what the driver lists. A program gets less.": (partial(_chosen, room=lambda card: card.memory)),
    "The bits are right. With one sequence at a time the card waits: how many fit?": (
        partial(_chosen, largest=False)
    ),
}


@exercise("19.4", "As many bits as the card allows, then as many sequences.")
def qlora(answer: Any) -> None:
    """`answer(model, card)` is the bits of frozen weights and the micro-batch, or (0, 0)."""
    got = []
    for model, card in LOANS:
        bits, size = call(answer, model, GPUS[card], returns=tuple)
        expect(bits in (0, 4, 8, 16), f"{bits} bits: frozen weights have 16, 8 or 4, and 0 if nothing fits.")
        expect(size in range(17), f"A micro-batch of {size}: it is 1 to 16, and 0 if nothing fits.")
        got.append((bits, size))
    wrong = "Some card gets other bits or another micro-batch. Take the most bits that fit with one sequence."
    recognized(got, LOANS, _chosen, LOAN_MISTAKES, wrong, same=eq)
