"""Demos: sizes that follow the card, a failure that is genuine, a rehearsal that runs them all, a button to go on."""

import pytest

from course_utils import estimate
from course_utils.allocator import OutOfMemory
from course_utils.demos import DEMOS, Stage, demo, rehearse
from course_utils.gpus import GPUS, Gpu
from course_utils.live_meter import Meter
from course_utils.units import MB

SMALL = Gpu("small card", 2000 * MB, (8, 0))
"""So small that tiny-gpt fills it: a demo then runs in a second."""


@pytest.fixture(scope="module")
def rehearsed() -> str:
    return rehearse(Stage(SMALL, live=False))


@pytest.mark.parametrize("card", GPUS.values(), ids=str)
def test_sizes_are_fractions_of_every_card(card):
    stage = Stage(card, live=False)
    assert 0.45 * card.room < estimate(stage.run_of(0.6)).total <= 0.6 * card.room
    assert 1.2 * card.room < estimate(stage.too_large()).total < 1.6 * card.room


def test_an_old_card_is_asked_for_nothing_that_it_lacks():
    run = Stage(GPUS["T4-16GB"], live=False).run_of(0.6)
    assert (run.precision.name, run.attention) == ("amp-fp16", "efficient")


def test_a_card_without_room_is_told_so():
    with pytest.raises(ValueError, match="no demo fits"):
        Stage(Gpu("full card", 10 * MB, (8, 0)), live=False).run_of(0.6)


def test_the_failure_is_genuine_and_the_next_run_works():
    stage = Stage(SMALL, live=False)
    with pytest.raises(OutOfMemory, match="Tried to allocate"):
        stage.attempt(stage.too_large())
    assert 0 < stage.attempt(stage.run_of(0.6)).peak <= SMALL.room


def test_a_failure_that_does_not_come_is_an_error():
    stage = Stage(SMALL, live=False)
    with pytest.raises(RuntimeError, match="meant to be too large"):
        stage.fails(stage.run_of(0.5))


def test_the_rehearsal_runs_every_step_and_names_its_source(rehearsed):
    for steps in DEMOS.values():
        for step in steps:
            assert step.title in rehearsed
    assert "On a simulated small card" in rehearsed and "simulated GPU" in rehearsed
    assert "out of GPU memory (in a replay)" in rehearsed


def test_one_press_a_step_and_the_meter_is_shown(rehearsed):
    stage = Stage(SMALL, live=False, reading_seconds=0.2)
    shown = demo("out-of-memory", stage)
    for step in DEMOS["out-of-memory"]:
        shown.button.click()
        assert step.title in shown.page.value and "does not work here" not in shown.page.value
    assert shown.at == 3 and shown.button.description == "Again"
    assert "at the peak" in shown.page.value and len(shown.picture.children) == 1


def test_what_does_not_work_is_said_and_the_step_can_be_tried_again():
    shown = demo("training-step", Stage(Gpu("full card", 10 * MB, (8, 0)), live=False))
    shown.button.click()
    assert "does not work here" in shown.page.value and shown.at == 0 and not shown.button.disabled


def test_an_unknown_demo_names_the_nearest():
    with pytest.raises(ValueError, match="did you mean 'out-of-memory'"):
        demo("out-of-memry")


def test_a_live_stage_trains_under_the_meter(monkeypatch):
    """A stand-in for the GPU: the steps run on the CPU, its counters are made up."""
    import torch

    from course_utils.demos import stage as stages
    from course_utils.live_meter import Reading
    from course_utils.measuring import devices, live

    class Gauge:
        source, capacity, axis = "live on a stand-in", SMALL.memory, "seconds"

        def read(self, seconds: float) -> Reading:
            return Reading(MB, 2 * MB)

    meters: list[Meter] = []
    monkeypatch.setattr(stages, "live_meter", lambda: Meter(Gauge()))
    monkeypatch.setattr(devices, "Cuda", devices.Host)
    monkeypatch.setattr(live, "free_bytes", lambda: SMALL.memory)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    stage = Stage(SMALL, live=True, show=meters.append)
    run = stage.run_of(0.3).replace(precision="fp32", attention="eager", micro_batch=1, seq_len=16)
    outcome = stage.attempt(run)
    phases = [mark.words for mark in meters[0].marks]
    assert phases.count("forward") == stages.LIVE_STEPS and "optimizer" in phases and not meters[0].running
    assert outcome.source == "live on a stand-in"
