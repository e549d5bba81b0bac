"""What the checks of lesson 10 run: right answers, wrong ones that learners give, instruments to tell them apart."""

from collections.abc import Callable, Sequence
from functools import cache
from itertools import count
from typing import Any

import torch
from torch import nn

from course_utils.allocator.policy import CachingAllocator
from course_utils.allocator.replay import replay
from course_utils.allocator.snapshots import snapshot_of
from course_utils.measurement import Measurement
from course_utils.measuring import measure
from course_utils.models import TransformerConfig
from course_utils.run import TrainingRun
from course_utils.units import KiB, MiB, round_up

from .traces import Process, in_one_process

# ------------------------------------------------------------------------------------------------ 10.1: block, segment

REQUESTS = (1, 512, 513, 700 * KiB, MiB, MiB + 1, 5 * MiB, 10 * MiB - 512, 10 * MiB - 511, 10 * MiB, 11 * MiB - 512,
            11 * MiB, 11 * MiB + 1, 12 * MiB + 5, 786 * MiB + 3, 787 * MiB + 3)  # fmt: skip
"""Bytes. Of a segment for a large block up to 2 MiB are left over; from 11 MiB on it is too little to be split off."""


def handed_out_right(size: int) -> dict[str, int]:
    """What the allocator does with a first request: the bytes of its block, with what is not split off, and of its
    segment.
    """
    allocator = CachingAllocator()
    address = allocator.malloc(size)
    return {"block": allocator.block_size(address), "segment": allocator.reserved}


def unsplit(size: int, limit: int) -> int:
    """The block of a first request if a rest has to be more than `limit` bytes to be split off in the large pool."""
    block, segment = round_up(size), _by_block(size)
    return block if block <= MiB or segment - block > limit else segment


BLOCK_MISTAKES: dict[str, Callable[[int], int]] = {
    "Your block is the request, rounded. But does the allocator split every segment? A rest that it does not split off "
    "belongs to the block.": round_up,
    "Your block is the whole segment. The allocator splits it, and the rest is free.": lambda size: _by_block(size),
    "A rest of 1 MiB exactly is not split off.": lambda size: unsplit(size, MiB - 1),
    "You keep large rests with the block: what is larger than 1 MiB is split off.": lambda size: unsplit(size, 2 * MiB),
}
"""What a learner can take for the block instead, and what to say to it."""


SEGMENT_MISTAKES: dict[str, Callable[[int], int]] = {
    "You give each block a segment of its own size. Small blocks share segments, so more is asked for at once.": (
        lambda size: round_up(size)
    ),
    "Large segments come in multiples of 2 MiB.": (
        lambda size: 2 * MiB if size <= MiB else 20 * MiB if round_up(size) < 10 * MiB else round_up(size)
    ),
    "A block of 1 MiB exactly still belongs to the small pool.": (
        lambda size: 2 * MiB if round_up(size) < MiB else _large_segment(round_up(size))
    ),
    "A block of 10 MiB exactly gets a segment of its own.": (
        lambda size: _by_block(size) if round_up(size) != 10 * MiB else 20 * MiB
    ),
    "You choose by the request. The *block* decides, and it is larger.": (
        lambda size: 2 * MiB if size <= MiB else 20 * MiB if size < 10 * MiB else round_up(size, 2 * MiB)
    ),
    "The small pool takes 2 MiB at once; you give it the large pool's 20.": (
        lambda size: _large_segment(round_up(size))
    ),
    "Large blocks get a segment of their own; 20 MiB are for those under 10 MiB.": (
        lambda size: 2 * MiB if round_up(size) <= MiB else round_up(round_up(size), 20 * MiB)
    ),
}
"""What a learner can ask the driver for instead, and what to say to it."""


def _large_segment(block: int) -> int:
    return 20 * MiB if block < 10 * MiB else round_up(block, 2 * MiB)


def _by_block(size: int) -> int:
    return 2 * MiB if round_up(size) <= MiB else _large_segment(round_up(size))


# ------------------------------------------------------------------------------------------------------ 10.2: the norm

NORM_SIZES = (300_000, 1_000, 150_000, 300_000, 7, 250_000, 300_000)
BIG = 200.0
"""Factor of a second set of gradients, whose squares no 16-bit float holds."""


def gradients(dtype: torch.dtype, factor: float = 1.0) -> list[torch.Tensor]:
    """Gradients in a 16-bit format, the same for everybody."""
    generator = torch.Generator().manual_seed(10)
    return [(factor * torch.randn(size, generator=generator)).to(dtype) for size in NORM_SIZES]


def norm_right(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The right answer: the norm of the norms, one gradient in fp32 at a time."""
    return torch.stack([tensor.float().norm() for tensor in tensors]).norm()


NORM_LIMIT = round(2.2 * 4 * max(NORM_SIZES))
"""Bytes: one gradient in fp32, its square, and some room; all gradients in fp32 are more than twice that."""


# ---------------------------------------------------------------------------------------------------- 10.3: the counter

BATCHES = (32, 16, 8, 4)
SMALL = TransformerConfig("small", "gpt2", 2, hidden=128, heads=4, vocab=4000, max_positions=128)
HIDDEN_BATCHES, HIDDEN_LENGTH = (4, 8, 32), 48
"""Of a process that no learner sees: other lengths, so that none of its peaks is one of the visible process."""


@cache
def sweep(batches: tuple[int, ...] = BATCHES, seq_len: int = 64) -> Process:
    """A small GPT trained with one batch size after the other in one process, on the CPU, through one allocator."""
    return in_one_process({str(batch): _trained(batch, seq_len) for batch in batches})


def processes() -> tuple[Process, Process]:
    """The process that learners see, where batches fall, and a hidden one, where they grow."""
    return sweep(), sweep(HIDDEN_BATCHES, HIDDEN_LENGTH)


@cache
def _trained(batch: int, seq_len: int) -> Measurement:
    return measure(TrainingRun(SMALL, batch, seq_len, "fp32", attention="eager"), source="cpu")


Curve = Sequence[int]

COUNTERS: dict[str, Callable[[Process, str], int]] = {
    "peak allocated": lambda process, label: max(_span(process, process.replayed.allocated, label)),
    "max_memory_allocated, never reset": lambda process, label: max(
        process.replayed.allocated[: process.spans[label][1]]
    ),
    "memory_allocated after the step": lambda process, label: _span(process, process.replayed.allocated, label)[-1],
    "memory_reserved after the step": lambda process, label: _span(process, process.replayed.reserved, label)[-1],
}
"""What each counter says of the run with a label, in bytes."""


def _span(process: Process, curve: Curve, label: str) -> Curve:
    first, last = process.spans[label]
    return curve[first:last]


def report(process: Process, counter: str) -> dict[str, int]:
    """What somebody would report who reads this counter once for each batch size."""
    return {label: COUNTERS[counter](process, label) for label in process.spans}


# ----------------------------------------------------------------------------------------------- 10.5, 10.6: in pieces

CAPACITIES = (80 * MiB, 200 * MiB, 640 * MiB)
ENOUGH_FREE = 0.30

Tensors = list[tuple[str, int, bool]]
"""Name, bytes, and whether it lives long."""


def tensors_of(pattern: str, sizes: Sequence[int]) -> Tensors:
    """One tensor for each letter, L for a long life and s for a short one; sizes in MiB, over and over. Names do not
    say which: they would sort by lifetime.
    """
    return [(f"t{index}", sizes[index % len(sizes)] * MiB, letter == "L") for index, letter in enumerate(pattern)]


ORDER_CASES: tuple[tuple[Tensors, int, int], ...] = (
    (tensors_of("LsLsL" * 4, (6, 2, 7, 4)), 20 * MiB, 100 * MiB),
    (tensors_of("LsLsL" * 4, (4,)), 8 * MiB, 80 * MiB),
    (tensors_of("sLLsL" * 3, (4,)), 24 * MiB, 80 * MiB),
    (tensors_of("sL" * 8, (9, 2)), 60 * MiB, 120 * MiB),
)
"""Tensors in the order of the step, the late request, and the GPU's memory, both in bytes. With all long-lived ones
first it fits, in whatever order each kind is.
"""


def late_fits(tensors: Tensors, order: Sequence[str], late: int, capacity: int) -> bool:
    """Whether a late request fits when the tensors are made in this order and the short-lived ones are freed."""
    size = {name: bytes_ for name, bytes_, _ in tensors}
    made = [(size[name], name) for name in order]
    freed = [(-bytes_, name) for name, bytes_, long in tensors if not long]
    return replay([*made, *freed, (late, "late")], capacity).failure is None


# ---------------------------------------------------------------------------------------------------------- 10.7: leaks


class Chain(nn.Module):
    """Three layers with names, for steps that keep too much."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.act, self.last = nn.Linear(96, 640), nn.GELU(), nn.Linear(640, 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.act(self.first(x)))


LEAKS: tuple[str | None, ...] = ("last", None, "first")
"""For each hidden snapshot the module whose tensors pile up in it; None where none do."""

DECOYS = {"last": "first", None: "act", "first": "last"}
"""For each of them the module of which something is kept on purpose, in step 3 alone: one large tensor, or of `last`
several, at lower addresses than all that is large.
"""


def _leaky_step(leak: str | None, kept: list[Any]) -> Callable[..., None]:
    numbers = count(1)

    def step(model: Chain, optimizer: Any, x: torch.Tensor) -> None:
        optimizer.zero_grad()
        hidden = model.first(x)
        active = model.act(hidden)
        output = model.last(active)
        if next(numbers) == 3:
            made = {"first": [hidden], "act": [active]}.get(DECOYS[leak]) or [model.last(active) for _ in range(6)]
            kept.extend(tensor.detach() for tensor in made)
        output.square().mean().backward()
        optimizer.step()
        if leak is not None:
            kept.append({"first": hidden, "last": output}[leak].detach())

    return step


@cache
def snapshot(leak: str | None, steps: int = 5) -> dict[str, Any]:
    """A few steps with one of the leaks, traced on the CPU, as a snapshot such as `read_snapshot` gives."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(10)
        model, x = Chain(), torch.randn(512, 96)
    optimizer = torch.optim.AdamW(model.parameters())
    step = _leaky_step(leak, [])
    measured = measure(step=step, model=model, optimizer=optimizer, batch=x, steps=steps, source="cpu")
    return snapshot_of(replay(measured))


def leak_right(content: dict[str, Any]) -> str | None:
    """The right answer: the module whose living blocks come from the most steps, three at least."""
    steps = leak_steps(content)
    module = max(steps, key=lambda name: len(steps[name]))
    return module if len(steps[module]) > 2 else None


def leak_steps(content: dict[str, Any]) -> dict[str, set[str]]:
    """For each module the steps from which it has living blocks."""
    steps: dict[str, set[str]] = {}
    for segment in content["segments"]:
        for block in segment["blocks"]:
            if block["state"] == "active_allocated":
                made_by, kind = block["frames"]
                steps.setdefault(made_by["filename"], set()).add(kind["filename"].split()[1])
    return steps
