"""The model of autograd behind the estimates: operation by operation against torch's, and its own rules."""

import math
from collections import Counter
from itertools import groupby

import pytest
from engine import simulate, tiny

from course_utils.breakdown import KINDS
from course_utils.estimating import estimate
from course_utils.estimating.exact.network import tape_of
from course_utils.estimating.exact.program import compiled
from course_utils.estimating.exact.structure import structure, symbols
from course_utils.models import TransformerConfig
from course_utils.run import TrainingRun
from course_utils.units import round_up

Event = tuple[int, str]

SEQUENCES = [
    TrainingRun("tiny-gpt", 1, 64, "bf16-master", attention="eager"),
    TrainingRun("tiny-gpt", 2, 64, "fp32", attention="efficient", recompute="full", accumulation_steps=2),
    TrainingRun("tiny-gpt", 2, 64, "amp-fp16", "adamw", "eager", "selective"),
    TrainingRun("tiny-gpt", 2, 64, "fp16-master", loss_chunks=3, logits="fp32", set_to_none=False),
    TrainingRun("tiny-gpt", 2, 64, lora_rank=4, lora_targets="mlp", frozen_bits=4, recompute="full"),
    TrainingRun(
        tiny("gpt2", layers=1, experts=4, experts_per_token=2), 2, 64, "bf16-master", recompute="full"
    ),
]


@pytest.mark.parametrize("run", SEQUENCES, ids=str)
def test_tape_and_torch_do_the_same_in_the_same_order(run):
    """Every birth and death from forward to the end of backward; what dies in one go is in no order."""
    numbers = symbols(run)
    tape = tape_of(structure(run))
    estimated = [
        (sign * round_up(math.prod(numbers[symbol] for symbol in record.size.split("·"))), record.settled())
        for record, sign in tape.events
    ]
    assert in_order(estimated) == in_order(really(run))
    times = Counter(id(record) for record, _ in tape.events)
    assert {record.kind for record, _ in tape.events if times[id(record)] == 1} <= {"gradients"}


def really(run: TrainingRun) -> list[Event]:
    """What a simulated step allocates and frees in forward, loss and backward of its last micro-batch."""
    timeline = simulate(run).timeline
    marks = [mark for mark in timeline.marks if mark.step == 2]
    start = [mark.event for mark in marks if mark.phase == "forward"][-1]
    end = next(mark.event for mark in marks if mark.phase == "optimizer")
    return list(timeline.changes[start:end])


def in_order(events: list[Event]) -> list[Event]:
    runs = groupby(events, lambda event: event[0] < 0)
    return [event for frees, some in runs for event in (sorted(some) if frees else some)]


@pytest.mark.parametrize(("layers", "recompute"), [(4, "every-3"), (5, "sqrt")])
def test_a_deep_model_is_read_as_if_every_block_were_on_the_tape(layers, recompute):
    """Against simulations of the whole depth, so that remainders and repetitions of every kind occur."""
    model = TransformerConfig("deep", "gpt2", layers, 128, 4, 512, 128, dropout=0.1)
    run = TrainingRun(model, 4, 128, recompute=recompute, loss_chunks=layers)
    measured = simulate(run).breakdown
    assert {kind: estimate(run)[kind] - measured[kind] for kind in KINDS} == dict.fromkeys(KINDS, 0)


def test_runs_that_differ_in_numbers_alone_share_a_program():
    small = TrainingRun("gpt2", 2, 128)
    assert compiled(structure(small)) is compiled(structure(TrainingRun("gpt2-xl", 32, 1024)))
    assert compiled(structure(small)) is not compiled(structure(small.replace(attention="eager")))
