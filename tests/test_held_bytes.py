"""Bytes that a training holds, counted by its hooks, against the tracker, which sees every tensor."""

import gc
import weakref
from collections import Counter
from typing import Any

import pytest
import torch

from course_utils import TrainingRun
from course_utils.figures.meters import Reading
from course_utils.interactive.meter import Meter
from course_utils.measuring.counting import Unwatched
from course_utils.measuring.held_bytes import Holdings
from course_utils.measuring.step import Training
from course_utils.measuring.tracker import Tracker

COUNTED = ("parameters", "gradients", "optimizer_states")
ALLOCATED = 10**9


def alive(tracker: Tracker) -> dict[str, int]:
    """Bytes by kind of the storages that are alive and that the tracker knows the kind of."""
    now: Counter[str] = Counter()
    for storage, _ in tracker._live.values():
        now[storage.kind] += storage.bytes
    return {kind: now[kind] for kind in COUNTED}


def counted(held: Holdings) -> dict[str, int]:
    return {kind: size for kind, size in held.by_kind(ALLOCATED).items() if kind in COUNTED}


class Comparing(Tracker):
    """Compares where the network is called and where the update begins."""

    def __init__(self, held: Holdings) -> None:
        super().__init__("cpu")
        self.held = held
        self.compared = list[tuple[dict[str, int], dict[str, int]]]()

    def compare(self, *_: object) -> None:
        self.compared.append((counted(self.held), alive(self)))

    def in_phase(self, phase: str) -> Any:
        if phase == "optimizer":
            self.compare()
        return super().in_phase(phase)


@pytest.mark.parametrize(
    "choices",
    [
        {"optimizer": "adamw"},
        {"optimizer": "adamw", "set_to_none": False},
        {"optimizer": "adam8bit"},
        {"optimizer": "muon"},
        {"optimizer": "sgd", "precision": "amp-bf16"},
        {"precision": "bf16-master"},
        {"precision": "bf16-master-fp32grad", "micro_batch": 1, "accumulation_steps": 2},
        {"optimizer": "adamw-foreach", "precision": "bf16-master"},
        {"lora_rank": 4, "lora_targets": ("qkv",), "precision": "amp-bf16"},
    ],
    ids=str,
)
def test_what_is_held_is_what_the_tracker_sees(choices):
    run = TrainingRun("tiny-gpt", 2, 64, precision="fp32", attention="eager").replace(**choices)
    training = Training(run, "cpu", simulated=False)
    held = training.holdings()
    tracker = Comparing(held)
    with tracker:
        tracker.watch(training.network, training.named_states)
        held.start()
        training.network.register_forward_hook(tracker.compare)
        for step in range(3):
            tracker.step = step
            training.step(tracker)
            held.count()
            tracker.compare()
    assert len(tracker.compared) == 3 * (2 + run.accumulation_steps)
    assert [found for found, _ in tracker.compared] == [truth for _, truth in tracker.compared]
    assert {found["gradients"] > 0 for found, _ in tracker.compared} == {True, False}


def test_gradients_are_counted_one_by_one_as_backward_fills_them():
    model = torch.nn.Sequential(*(torch.nn.Linear(10, 10, bias=False) for _ in range(4)))
    held = Holdings(model, [torch.optim.SGD(model.parameters())])
    sizes = []
    held.start()
    for weight in model.parameters():
        weight.register_post_accumulate_grad_hook(
            lambda _: sizes.append(held.by_kind(ALLOCATED)["gradients"])
        )
    for _ in range(2):
        model.zero_grad()
        model(torch.ones(1, 10)).sum().backward()
    assert sizes == [512, 1024, 1536, 2048] * 2


def test_the_rest_is_activations_until_the_update_and_temporaries_in_it():
    model = torch.nn.Linear(10, 10)
    optimizer = torch.optim.SGD(model.parameters())
    held = Holdings(model, [optimizer])
    rest = []

    def look(*_: object) -> None:
        kinds = held.by_kind(10_000)
        assert sum(kinds.values()) == 10_000
        rest.append(next(kind for kind in kinds if kind not in COUNTED))

    held.start()
    optimizer.register_step_pre_hook(look)
    for _ in range(2):
        model(torch.ones(1, 10)).sum().backward()
        look()
        optimizer.step()
    assert rest == ["activations", "temporaries"] * 2


def test_a_meter_that_has_ended_keeps_nothing_of_the_training_alive():
    training = Training(
        TrainingRun("tiny-gpt", 1, 16, precision="fp32", attention="eager"), "cpu", simulated=False
    )
    with Meter(lambda _: Reading(ALLOCATED, ALLOCATED), "a stand-in") as meter:
        meter.follow(training.holdings())
        training.step(Unwatched())
    assert {"parameters", "gradients", "temporaries"} <= set(meter.samples[-1].kinds)
    assert not training.network._forward_pre_hooks
    network = weakref.ref(training.network)
    del training
    gc.collect()
    assert network() is None
