"""What a training holds, counted by its hooks, against the tracker, which sees every tensor."""

import gc
import weakref
from collections import Counter

import pytest
import torch

from course_utils import TrainingRun
from course_utils.live_meter import Meter, Reading
from course_utils.measuring.counting import Unwatched
from course_utils.measuring.holdings import Holdings
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


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("optimizer", ["adamw", "adam8bit", "muon", "sgd"])
def test_what_is_held_is_what_the_tracker_sees_wherever_it_is_counted(optimizer, set_to_none):
    run = TrainingRun(
        "tiny-gpt", 2, 64, precision="fp32", attention="eager", optimizer=optimizer, set_to_none=set_to_none
    )
    training = Training(run, "cpu", simulated=False)
    held, seen = Holdings(training.network, training.optimizer, training.states), []
    with Tracker("cpu") as tracker:
        tracker.watch(training.network, training.named_states)

        def compare(*_: object) -> None:
            seen.append((counted(held), alive(tracker)))

        held.start()
        training.network.register_forward_hook(compare)
        training.optimizer.register_step_pre_hook(compare)
        for step in range(3):
            tracker.step = step
            training.step(tracker)
            held.count()
            compare()
    assert len(seen) == 9 and len({found["gradients"] for found, _ in seen}) == 2  # none, and all
    assert [found for found, _ in seen] == [truth for _, truth in seen]


def test_gradients_are_counted_one_by_one_as_backward_fills_them():
    model = torch.nn.Sequential(*(torch.nn.Linear(10, 10, bias=False) for _ in range(4)))
    held, sizes = Holdings(model, torch.optim.SGD(model.parameters())), []
    held.start()
    for weight in model.parameters():
        weight.register_post_accumulate_grad_hook(lambda _: sizes.append(held.by_kind(ALLOCATED)["gradients"]))
    for _ in range(2):
        model.zero_grad()
        model(torch.ones(1, 10)).sum().backward()
    assert sizes == [512, 1024, 1536, 2048] * 2


def test_the_rest_is_activations_until_the_update_and_temporaries_in_it():
    model = torch.nn.Linear(10, 10)
    optimizer = torch.optim.SGD(model.parameters())
    held, rest = Holdings(model, optimizer), []

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


class Counters:
    source, capacity, axis = "a stand-in", None, "seconds"

    def read(self, seconds: float) -> Reading:
        return Reading(ALLOCATED, ALLOCATED)


def test_a_meter_that_has_left_keeps_nothing_of_the_training_alive():
    training = Training(TrainingRun("tiny-gpt", 1, 16, precision="fp32", attention="eager"), "cpu", simulated=False)
    with Meter(Counters(), every=0.002) as meter:
        meter.follow(Holdings(training.network, training.optimizer, training.states))
        training.step(Unwatched())
        meter.leave()
        assert not training.network._forward_pre_hooks and not training.optimizer._optimizer_step_pre_hooks
        network = weakref.ref(training.network)
        del training
        gc.collect()
        assert network() is None
    assert {"parameters", "activations"} <= {kind for sample in meter.samples for kind in sample.kinds}
