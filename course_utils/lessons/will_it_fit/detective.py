"""Lesson 19's detective: six runs that ran out of memory, each with what a victim would see of it.

A simulated step's allocations go through the allocator's replay on a card that is too small, until it finds
no room.
"""

import tomllib
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ... import MemoryBreakdown, TrainingRun, measure, replay
from ...measurement import Measurement, Timeline
from ...measuring.simulated import availability
from ...units import GiB, MiB

WORDS = tomllib.loads(Path(__file__).with_name("causes.toml").read_text(encoding="utf-8"))
# Causes of death, by the name to answer with.
CAUSES: dict[str, str] = {name: words["is"] for name, words in WORDS.items()}


@dataclass(frozen=True)
class Evidence:
    """The evidence on a run that is out of memory: sizes in bytes at the moment when it failed.

    `requested` found no room, `free` held no tensor (`free_share` of the card), `largest_free` is the largest
    piece of it that was reserved. `alive` has the bytes of each kind of memory then, `step_starts` all that
    was allocated when each step began. `heads` and `vocab` are 0 for a model without.
    """

    step: int
    phase: str
    requested: int
    free: int
    free_share: float
    largest_free: int
    alive: MemoryBreakdown
    step_starts: tuple[int, ...]
    parameters: int
    micro_batch: int
    seq_len: int
    heads: int
    vocab: int

    @property
    def when(self) -> str:
        return f"step {self.step}, {self.phase.replace('_', ' ')}"


@dataclass(frozen=True)
class Case:
    """A broken run: what its owner says of it, the message, the evidence, the timeline up to the failure."""

    told: str
    message: str
    evidence: Evidence
    measured: Measurement = field(repr=False)


def broken_runs() -> dict[str, TrainingRun]:
    """The runs behind the cases, by what they are broken by; the others are `PROGRAMS`."""
    gpt2 = TrainingRun("gpt2", 16, 1024)
    # requests above b·a·s², no multiples of it
    short = gpt2.replace(micro_batch=40, seq_len=320)
    return {
        "loss": gpt2.replace(recompute="full"),
        "states": TrainingRun("gpt2-medium", 1, 512),
        "attention": gpt2.replace(micro_batch=4, attention="eager"),
        "fragmentation": gpt2.replace(micro_batch=8, seq_len=512),
        "activations": gpt2,
        "short sequences": short,
    }


ORDER = (  # the six cases: the run, and the memory for tensors on its card
    ("loss", 6 * GiB), ("graphs", 144 * MiB), ("states", 4 * GiB), ("attention", 6 * GiB),
    ("fragmentation", 6 * GiB), ("activations", 6 * GiB),
)  # fmt: skip
WIDTH, LAYERS = 512, 6
# Rows of the batch that is too much.
PROGRAMS = {"graphs": 1024, "graphs of few rows": 256, "a long batch": 16 * 1024}


def case(number: int) -> Case:
    """One of the six cases, by its number from 1. Raises ValueError for a number that there is none of."""
    if number not in range(1, len(ORDER) + 1):
        raise ValueError(f"case {number}: there are cases 1 to {len(ORDER)}")
    return broken(*ORDER[number - 1])


@cache
def broken(name: str, capacity: int) -> Case:
    """The run of that name on a card with `capacity` bytes for tensors, which are too few for it."""
    run = broken_runs().get(name)
    measured = _measured(name)
    replayed = replay(measured, capacity)
    failure = replayed.failure
    end = len(replayed)
    assert failure is not None, "it fits"
    marks = [mark for mark in measured.timeline.marks if mark.event <= end]
    # Backwards, so that the first mark of each step stays.
    starts = {mark.step: replayed.allocated[mark.event - 1] for mark in reversed(marks)}
    alive = MemoryBreakdown({kind: curve[end - 1] for kind, curve in measured.timeline.curves().items()})
    if run is None:
        rows = PROGRAMS[name]
        size = f"{LAYERS} layers, {rows:,} rows of {WIDTH} numbers"
        told = f"“A plain network of {size}, fp32, AdamW. The first steps worked.”"
        sizes = [LAYERS * (WIDTH + 1) * WIDTH, rows, 1, 0, 0]
    else:
        told = f"“{run.model.name}, {run.micro_batch} × {run.seq_len:,} tokens, autocast in bf16, AdamW.”"
        sizes = [run.model.parameters, run.micro_batch, run.seq_len, run.model.heads, run.model.vocab]
    evidence = Evidence(
        marks[-1].step,
        marks[-1].phase,
        failure.requested,
        failure.free,
        failure.free_share,
        failure.largest_free,
        alive,
        tuple(starts[step] for step in sorted(starts)),
        *sizes,
    )
    return Case(told, replayed.message, evidence, until_failure(measured, end))


@cache
def _measured(name: str) -> Measurement:
    if name not in PROGRAMS:
        return measure(broken_runs()[name], source="simulated")
    model = perceptron()
    source = "simulated" if availability()[0] else "cpu"
    if name == "a long batch":
        step = lengthening()
        rows = 1024
    else:
        step = leaking()
        rows = PROGRAMS[name]
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.zeros(rows, WIDTH)
    return measure(step=step, model=model, optimizer=optimizer, batch=batch, source=source, steps=8)


def until_failure(measured: Measurement, events: int) -> Measurement:
    """The first `events` events of a measurement, without what would name tensors; its peak is theirs."""
    marks = [mark for mark in measured.timeline.marks if mark.event < events]
    line = Timeline(measured.timeline.changes[:events], marks)
    totals = line.totals()
    peak = totals.index(max(totals)) + 1
    at_peak = MemoryBreakdown(
        {kind: curve[peak - 1] for kind, curve in line.curves().items()}, marks[-1].phase
    )
    quiet = replace(measured.provenance, note="")  # a note may say what grows, and in which line
    return replace(
        measured,
        breakdown=at_peak,
        moments={},
        timeline=line,
        peak_event=peak,
        allocations=(),
        losses=(),
        phase_peaks={},
        provenance=quiet,
    )


def perceptron() -> nn.Sequential:
    return nn.Sequential(*(layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())))


def leaking() -> Any:
    """A training step that validates, too, and keeps the losses as they come, to print them in the end."""
    kept: list[Any] = []

    def train_and_validate(model: Any, optimizer: Any, batch: Any) -> Any:
        loss = trained(model, optimizer, batch)
        kept.append(model(batch).square().mean())  # no torch.no_grad(), and no .item(): the bug
        return loss

    return train_and_validate


def lengthening() -> Any:
    """A training step whose fourth batch is 16 times as long."""
    steps = count(1)

    def train(model: Any, optimizer: Any, batch: Any) -> Any:
        return trained(model, optimizer, batch.repeat(16, 1) if next(steps) == 4 else batch)

    return train


def trained(model: Any, optimizer: Any, batch: Any) -> Any:
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss
