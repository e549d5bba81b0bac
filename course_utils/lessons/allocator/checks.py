"""Checks of lesson 12, "Allocator and fragmentation": each names the misconception, never the answer."""

import tomllib
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import nn

from ... import TrainingRun, TransformerConfig, measure
from ...allocator.replay import replay, requests_of
from ...interactive.feedback import (
    CheckFailed,
    Mistakes,
    call,
    call_for_effect,
    entries,
    exercise,
    expect,
    fail,
    of_kind,
    recognized,
)
from ...units import MiB
from ...watching.on_gpu import on_new_gpu
from ..shared.judging import same, seeded
from .traces import trace_of

# --------------------------------------------------------------------------------------------------
# 12.1: peaks
TRAININGS = ((512, (8192, 4096, 2048)), (384, (1024, 8192, 4096)), (1024, (16384,)))
"""The width of a model, and the batch sizes: falling, mixed, and one alone."""


def _model(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 8 * width), nn.ReLU(), nn.Linear(8 * width, width)).to("cuda")


def _draw(width: int, batch: int) -> torch.Tensor:
    return torch.randn(batch, width, device="cuda")


@cache
def counted(width: int, batches: tuple[int, ...]) -> dict[str, dict[int, int]]:
    """Some counters by batch size, where all are trained in one process."""
    found: dict[str, dict[int, int]] = defaultdict(dict)
    with on_new_gpu():
        for batch in batches:
            model = optimizer = None
            model = _model(width)
            optimizer = torch.optim.AdamW(model.parameters())
            torch.cuda.reset_peak_memory_stats()
            for counter in ("first step", "peak"):
                model(_draw(width, batch)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                found[counter][batch] = torch.cuda.max_memory_allocated()
            found["never reset"][batch] = max(found["peak"].values())
            found["after"][batch] = torch.cuda.memory_allocated()
            found["reserved"][batch] = torch.cuda.memory_reserved()
    return found


def report() -> dict[int, int]:
    """A colleague's report of one training after the other: its maxima were never reset."""
    return counted(*TRAININGS[0])["never reset"]


def _read(counter: str) -> Callable[[int, int], int]:
    """A counter by width and batch size, with all of its batch sizes in one process."""
    return lambda width, batch: counted(width, dict(TRAININGS)[width])[counter][batch]


PEAK_MISTAKES: Mistakes = {
    "Your figures are one maximum since the process began: what resets it for each training?": (
        _read("never reset")
    ),
    "This is what is left after a training: weights and states. When was memory fullest?": _read("after"),
    "This is `reserved`, which keeps what earlier trainings took. Which counter counts tensors?": (
        _read("reserved")
    ),
    "This is the first step's peak: Adam makes its states at the end. The second step has them.": (
        _read("first step")
    ),
}


@exercise("12.1", "Each batch size has its own peak: you read the right counter, and reset it each time.")
def peaks(answer: Any) -> None:
    """`answer(make, draw, batches)` maps each batch size to the peak of a training of its own."""
    mine = list[float]()
    cases = [(width, batch) for width, batches in TRAININGS for batch in batches]
    for width, batches in TRAININGS:
        with on_new_gpu():
            make, draw = partial(_model, width), partial(_draw, width)
            got = call(answer, make=make, draw=draw, batches=list(batches), returns=Mapping)
        texts = str in map(type, got)
        expect(not texts, "Your dictionary's keys are texts: use the batch sizes, whole numbers.")
        mine += entries(got, list[Any](batches)).values()

    def close(got: Sequence[float], wanted: Sequence[float]) -> bool:
        # Blocks depend on what is cached. And a loop that names output or loss may keep two more outputs
        # at its peak.
        outputs = [4 * width * batch for width, batch in cases]
        spans = zip(got, wanted, outputs, strict=True)
        return all(0.98 * least <= one <= 1.02 * least + 2 * more for one, least, more in spans)

    otherwise = (
        "Some peak is off. Take two steps with exactly that loss, and read the most bytes allocated, with "
        "nothing subtracted. Is an earlier training still in memory: its model, or a loss with its graph?"
    )
    recognized(mine, cases, _peak_alone, PEAK_MISTAKES, otherwise, close)


def _peak_alone(width: int, batch: int) -> int:
    return counted(width, (batch,))["peak"][batch]


# --------------------------------------------------------------------------------------------------
# 12.2: fragmented
@exercise("12.2", "Out of memory with over half free: you can build it, so you can recognize it.")
def fragmented(answer: Any) -> None:
    """`answer(capacity)` is a list of events; the last, a request, fails with more than half free."""
    for capacity in (80 * MiB, 200 * MiB, 640 * MiB):
        events = call(answer, capacity=capacity, returns=(list, tuple))
        try:
            result = replay(events, capacity)
        except (TypeError, ValueError) as error:
            fail(f"Your events do not work for a GPU of {capacity // MiB} MiB: {error}")
        gpu = f"On a GPU of {capacity // MiB} MiB"
        failure = result.failure
        if failure is None:
            fail(
                f"{gpu} everything fits, even the last request. Which hole took it? "
                "Or did a segment without a tensor go back to the driver?"
            )
        at = len(result) + 1
        expect(at == len(events), f"{gpu} memory runs out before the last request, at event {at}.")
        all_free = f"{gpu} the last request asks for more than all that is free, or for all of it."
        expect(failure.requested < failure.free, all_free)
        little = f"{gpu} it fails, but not more than half is free then. Leave larger holes."
        expect(failure.free_share > 0.50, little)


# --------------------------------------------------------------------------------------------------
# 12.3: embed
CORPORA = (
    (range(2000, 5301, 300), 680 * MiB),
    (range(5504, 4095, -128), 860 * MiB),
    ((*range(2000, 5301, 220), *range(5200, 1899, -220)), 1200 * MiB),
)
"""Lengths of documents, rising, falling, both; the GPU's memory, for all features and one forward."""
FEATURES = 2048
WHOLE = "Call the model once for each document, with the whole document and no other."


def _corpus(lengths: Sequence[int], device: str, width: int, features: int) -> tuple[nn.Module, list[Any]]:
    """A small encoder, per token `width` numbers inside and `features` at the end, and its documents."""
    model = nn.Sequential(nn.Embedding(1000, width), nn.GELU(), nn.Linear(width, features)).to(device)
    return model, [torch.randint(1000, (length,), device=device) for length in lengths]


@exercise("12.3", "You changed only the order: now nothing large must fit between long-lived tensors.")
def embed(answer: Any) -> None:
    """`answer(model, documents)` lists each document's features, made in an order that fits the card."""
    _check_features(answer)
    for lengths, memory in CORPORA:
        seen = list[tuple[int, int]]()  # tokens of each forward, and the bytes in memory before it
        with on_new_gpu(memory):
            model, given = _corpus(lengths, "cuda", 4096, FEATURES)
            start = torch.cuda.memory_allocated()
            model.register_forward_pre_hook(partial(_note_forward, seen))
            try:
                got = call(answer, model, given, returns=(list, tuple), may_change=(0, 1))
                found = [(one.device.type, *one.shape) for one in got]
            except CheckFailed as problem:
                if isinstance(problem.__cause__, torch.OutOfMemoryError):
                    fail(_why_full(seen, lengths, start))
                raise
        expect(sorted(tokens for tokens, _ in seen) == sorted(lengths), WHOLE)
        kept = accumulate((4 * FEATURES * tokens for tokens, _ in seen), initial=start)
        stayed = all(there >= least for (_, there), least in zip(seen, kept, strict=False))
        stayed &= found == [("cuda", length, FEATURES) for length in lengths]
        expect(stayed, "The features must stay on the GPU, from the moment they are made.")


def _note_forward(seen: list[tuple[int, int]], model: nn.Module, given: tuple[torch.Tensor]) -> None:
    seen.append((len(given[0]), torch.cuda.memory_allocated()))


def _check_features(answer: Any) -> None:
    """Judge the values on the CPU: also one document alone, and two of the same length."""
    for lengths in ((5,), (2, 3, 3, 7)):
        with seeded(), torch.no_grad():
            model, given = _corpus(lengths, "cpu", 8, 6)
            right = [model(tokens) for tokens in given]
        got = call(answer, model, given, returns=(list, tuple))
        tensors = len(got) == len(given) and all(isinstance(one, torch.Tensor) for one in got)
        expect(tensors, "Return a list with one tensor of features for each document.")
        leave = "Your features carry a graph, which keeps the model's activations: leave `no_grad` in place."
        expect(not any(one.requires_grad for one in got), leave)
        exact = same(got, right)
        moved = not exact and all(any(same([one], [other]) for one in got) for other in right)
        order = "The features are right, but in the order that you made them. Return the documents' order."
        expect(not moved, order)
        wrong = "Some features are wrong. In fp32 all the way? Two documents may have the same length."
        expect(exact, wrong)


def _why_full(seen: Sequence[tuple[int, int]], lengths: Sequence[int], start: int) -> str:
    """The reason why memory ran out, from the order of the forwards."""
    tokens = [count for count, _ in seen]
    if Counter(tokens) - Counter(lengths):
        return WHOLE
    if not seen or seen[0][1] - start >= 4 * FEATURES * sum(lengths):
        return "You make room for all features. How much? Do you copy, or does `features[i] = …` replace?"
    if tokens != sorted(tokens):
        return "Out of memory, not from short to long: what else stays, or is copied in the end?"
    if lengths[0] > lengths[-1]:
        return "Out of memory where documents come from long to short: you rely on their order."
    return (
        "Out of memory. "
        "From short to long, features lie in segments that are too small for the next document. "
        "Neither `del` nor `empty_cache` gives back a segment with a tensor in it."
    )


# --------------------------------------------------------------------------------------------------
# 12.4: leak
LINES = ("hidden = model[0](batch)", "output = model[1](hidden)")


@cache
def snapshots(leak: str | None) -> list[dict[str, Any]]:
    """torch's snapshots after each of four steps, which keep what `leak` makes; step 3 keeps more, once."""
    kept = list[torch.Tensor]()
    found = list[Any]()
    with on_new_gpu():
        torch.cuda.memory._record_memory_history()
        model = nn.Sequential(nn.Linear(96, 640), nn.Linear(640, 48)).to("cuda")
        optimizer = torch.optim.AdamW(model.parameters())
        batch = torch.randn(512, 96, device="cuda")
        for step in range(1, 5):
            hidden = model[0](batch)
            output = model[1](hidden)
            output.square().mean().backward()
            made = dict(zip(LINES, (hidden.detach(), output.detach()), strict=True))
            kept += [tensor for line, tensor in made.items() if line == leak or step == 3]
            del hidden, output, made
            optimizer.step()
            optimizer.zero_grad()
            if step == 3:
                kept.append(torch.zeros(2048, 1024, device="cuda"))
            found.append(torch.cuda.memory._snapshot())
    return found


LEAKS: tuple[str | None, ...] = (LINES[1], None, LINES[0])
"""The line whose tensors pile up in each hidden case; None where none do."""
example_snapshots = partial(snapshots, LEAKS[0])  # one of the hidden cases, to look at


@exercise("12.4", "A leak is neither the largest nor the oldest block: its line grows from step to step.")
def leak(answer: Any) -> None:
    """`answer(snapshots)` is the line of code whose tensors pile up, or None."""
    got = [call(answer, snapshots=snapshots(line), returns=str | None) for line in LEAKS]
    wrong = [(mine, line) for mine, line in zip(got, LEAKS, strict=True) if mine != line]
    none = "You find a leak where there is none. Do the line's bytes grow from *each* snapshot to the next?"
    expect(None not in [line for _, line in wrong], none)
    missed = "You find nothing, but something piles up: add up each line's living bytes in each snapshot."
    expect(None not in [mine for mine, _ in wrong], missed)
    expect(not wrong, "You name a line whose tensors are kept once. Which line makes more and more?")


# --------------------------------------------------------------------------------------------------
# 12.5: allocator
Rule = tuple[str, str, list[str]]
"""What is said where that counter ("": any) is off in *all* of these traces, for the lesson's player."""
SMALL = TransformerConfig("small", "gpt2", 2, hidden=128, heads=4, vocab=4000, max_positions=128)
RULES: list[Rule] = tomllib.loads(Path(__file__).with_name("rules.toml").read_text(encoding="utf-8"))["rules"]


def random_requests(seed: int, events: int = 3000, most: int = 40) -> list[tuple[int, str]]:
    """Allocations of small, middling and large sizes, and frees, of up to `most` tensors at a time."""
    random = Random(seed)
    live = list[tuple[int, str]]()
    made = list[tuple[int, str]]()
    for number in range(events):
        if len(live) > random.randrange(most):
            size, name = live.pop(random.randrange(len(live)))
            made.append((-size, name))
        else:
            low, high = random.choice(((1, MiB), (MiB, 10 * MiB), (9 * MiB, 40 * MiB)))
            live.append((random.randint(low, high), f"t{number}"))
            made.append(live[-1])
    return made


def first_off(answer: Any, events: Sequence[tuple[int, Any]]) -> tuple[int, str] | None:
    """The first event after which a counter is off, numbered from 1, and the counter's name; else None."""
    memory = call(answer, returns=object)
    right = replay(events)
    for index, (size, name) in enumerate(events):
        # A half allocator, which cannot free yet, is asked for `free` only where it is needed.
        needed = ["allocate", "allocated", "reserved"]
        if size < 0:
            needed.insert(1, "free")
        for method in needed:
            expect(hasattr(memory, method), f"Your allocator has no `{method}`.")
        if size > 0:
            call_for_effect(memory.allocate, name, size)
            lost = "After a request nothing is reserved: is your new segment in `self.small` or `self.large`?"
            expect(memory.reserved != 0, lost)
        else:
            call_for_effect(memory.free, name)
        for counter in ("allocated", "reserved"):
            if of_kind(getattr(memory, counter), int, f"{counter} is") != getattr(right, counter)[index]:
                return index + 1, counter
    return None


@exercise(
    "12.5",
    "Every rule, a real training, thousands of events: your allocator matches PyTorch's, byte for byte.",
)
def allocator(answer: Any) -> None:
    """`answer()` is an allocator: `allocate(name, size)`, `free(name)`, and `allocated` and `reserved`."""
    half = isinstance(answer, type) and not hasattr(answer, "free")
    rules = [rule for rule in RULES if not (half and "-" in "".join(rule[-1]))]
    traces = {trace: trace_of(trace) for _, _, those in rules for trace in those}
    off = {trace: first_off(answer, events) for trace, events in traces.items()}
    for message, counter, those in rules:
        slips = [off[trace] for trace in those]
        found = [slip for slip in slips if slip is not None and counter in slip[1]]
        if len(found) == len(those):
            event, wrong = found[0]
            place = f"Your `{wrong}` is off after event {event} of {those[0]!r}"
            fail(f"{message} {place}. Play it in the lesson's player.")
    expect(not half, "Everything that works without `free` is right. Now write the half that frees.")
    step = requests_of(measure(TrainingRun(SMALL, 8, 64, "fp32", attention="eager"), source="cpu"))
    for events in ([(size, f"t{name}") for size, name, _ in step], random_requests(1), random_requests(2)):
        slip = first_off(answer, events)
        if slip is not None:
            event, wrong = slip
            fail(
                f"Each rule alone is right, but `{wrong}` is off after event {event} of a longer trace. "
                "Which rules meet there?"
            )
