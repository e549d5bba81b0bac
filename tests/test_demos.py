"""Demos: sizes that follow the card, genuine failures, a rehearsal that runs them all, one key a step."""

import asyncio
import gc
import json
import re
import signal
import subprocess
import threading
import weakref
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from course_utils import demos, estimate
from course_utils.breakdown import MemoryBreakdown
from course_utils.cli import main as front_door
from course_utils.demos import DEMOS, Stage, demo, fragmentation, rehearse
from course_utils.demos import stage as stages
from course_utils.demos.show import DemoWidget
from course_utils.demos.stage import Demo, DemoStep, Foreseen, StepResult
from course_utils.demos.stage_figures import TYPE, stage_bars, stage_segments
from course_utils.figures.canvas import text_width
from course_utils.figures.meters import Reading
from course_utils.gpus import GPUS, Gpu
from course_utils.interactive.meter import Meter
from course_utils.measuring import devices, live
from course_utils.units import MB, MiB, format_bytes

SMALL = Gpu("small card", 2000 * MB, (8, 0))
"""So small that tiny-gpt fills it: a demo then runs in a second."""

FULL = Gpu("full card", 10 * MB, (8, 0))


# Sizes


@pytest.mark.parametrize("card", GPUS.values(), ids=str)
def test_sizes_are_fractions_of_every_card_and_all_demos_do_as_told_by_estimate(card):
    stage = Stage(card, live=False)
    run = stage.run_of(0.6)
    assert 0.45 * card.room < estimate(run).total <= 0.6 * card.room
    assert 1.2 * card.room < estimate(stage.too_large()).total < 1.6 * card.room
    assert card.has_bf16 or (run.precision.name, run.attention) == ("amp-fp16", "efficient")
    failure = fragmentation.replayed(stage, expandable=False).failure
    assert failure is not None and failure.free_share > 0.45 and failure.largest_free < failure.requested
    foreseen = rehearse(gpu_name=card.name)
    assert foreseen.problems == () and "Nothing was run" in str(foreseen)
    assert str(foreseen).count("on purpose") >= 5


# Failures on purpose


def test_the_failure_is_genuine_and_the_next_run_works():
    stage = Stage(SMALL, live=False)
    assert "Tried to allocate" in stage.fails(stage.too_large())
    assert 0 < stage.attempt(stage.run_of(0.6)).peak <= SMALL.room
    with pytest.raises(RuntimeError, match="should have been too large"):
        stage.fails(stage.run_of(0.5))


# The rehearsal


def test_the_rehearsal_runs_every_step_and_names_its_source():
    told = " ".join(str(rehearse(Stage(SMALL, live=False))).split())
    for one in DEMOS.values():
        assert 3 <= len(one.steps) <= 8 and one.shows in told
        assert all(step.title in told for step in one.steps)
    assert "demos run on a simulated small card" in told and "simulated GPU" in told
    assert "out of GPU memory (in a replay)" in told and "(fails on purpose)" in told
    assert told.endswith("Every demo does what it announces.")


def broken(stage: Stage) -> StepResult:
    raise RuntimeError("the projector is gone")


BROKEN = Demo(
    "Broken",
    "Nothing works.",
    steps=(DemoStep("One", "", broken),),
    foresee=lambda stage: [Foreseen("a run", True)],
)


def test_what_does_not_go_as_told_is_said_and_the_command_fails(monkeypatch, capsys):
    monkeypatch.setattr(demos, "DEMOS", {"broken": BROKEN})
    assert front_door.main(["rehearse", "--here"]) == 1
    said = capsys.readouterr().out
    assert "the projector is gone" in said and "These steps do not do what the demos announce" in said
    assert front_door.main(["rehearse", "--here", "--gpu", "H200-141GB"]) == 0
    assert "1. One" in capsys.readouterr().out
    assert front_door.main(["rehearse", "--here", "--gpu", "T5"]) == 1
    assert "unknown GPU 'T5'" in capsys.readouterr().err


def test_a_card_too_small_is_a_problem_of_every_demo_that_runs():
    with pytest.raises(ValueError, match="no demo fits"):
        Stage(FULL, live=False).run_of(0.6)
    problems = rehearse(Stage(FULL, live=False)).problems
    assert {problem.partition(":")[0] for problem in problems} >= set(DEMOS) - {"sharding"}


# On the screen


def test_one_press_a_step_back_and_again():
    shown = demo("recomputation", Stage(SMALL, live=False, reading_seconds=0.1))
    for number, step in enumerate(DEMOS["recomputation"].steps, start=1):
        shown.button.click()
        assert f"{number} · {step.title}" in shown.heading.value and "does not work" not in shown.page.value
    assert shown.button.description == "Again" and len(shown.picture.children) == 1
    last = shown.page.value
    shown.back.click()
    assert "5 · Full" in shown.heading.value and "simulated GPU" in shown.page.value
    shown.button.click()
    assert shown.page.value == last
    shown.button.click()
    assert DEMOS["recomputation"].title in shown.heading.value and shown.button.description == "Start"


def test_what_does_not_work_is_said_and_the_step_can_be_tried_again():
    with pytest.raises(ValueError, match="did you mean 'out-of-memory'"):
        demo("out-of-memry")
    shown = demo("training-step", Stage(FULL, live=False))
    shown.button.click()
    assert "does not work here" in shown.page.value and shown.shown == 0 and not shown.button.disabled


def test_an_interrupt_ends_the_meter_and_leaves_the_button(monkeypatch):
    shown = demo("training-step", Stage(SMALL, live=False, reading_seconds=60.0))
    shown.button.click()
    shown.button.click()

    def interrupted(meter: Meter) -> Meter:
        assert meter.running and shown.button.disabled
        raise KeyboardInterrupt

    monkeypatch.setattr(Meter, "wait", interrupted)
    shown.button.click()
    assert "Stopped" in shown.page.value and shown.shown == 2 and not shown.button.disabled
    assert not any(thread.name == "memory meter" for thread in threading.enumerate())


def test_a_press_that_comes_on_another_thread_runs_its_step_where_interrupts_arrive():
    """JupyterLab's presses come on a thread of their own, to which no interrupt goes."""
    ran: list[threading.Thread] = []

    def until_interrupted(stage: Stage) -> StepResult:
        ran.append(threading.current_thread())
        signal.raise_signal(signal.SIGINT)
        return StepResult("not reached")

    one = Demo("One", "", (DemoStep("One", "", until_interrupted),), lambda stage: [])
    shown = DemoWidget(one, Stage(SMALL, False))

    async def press() -> None:
        shown._repr_mimebundle_()
        await asyncio.to_thread(shown.button.click)
        await asyncio.sleep(0)

    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a kernel does while no cell runs
    try:
        asyncio.run(press())
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    assert ran == [threading.main_thread()]
    assert "Stopped" in shown.page.value and not shown.button.disabled


def test_pictures_say_in_words_what_they_draw():
    stage = Stage(SMALL, live=False)
    run = stage.run_of(0.6)
    drawn = stage_bars({"so": estimate(run)}, "A title", SMALL.room, {"so": "a note"})
    for said in (f"so {format_bytes(estimate(run).total)} (activations", "a note", "2.00 GB"):
        assert said in drawn.alt
    found = fragmentation.replayed(stage, expandable=False)
    drawn = stage_segments(found.blocks_at(len(found)), "In pieces", SMALL.room)
    assert drawn.alt.count("free: ") == fragmentation.COUNT


def test_the_line_of_the_gpus_memory_crosses_no_number():
    found = MemoryBreakdown({"activations": 1000 * MB})
    for room in range(1000 * MB, 1400 * MB, 50 * MB):
        drawn = stage_bars({"so": found}, "A title", room, {}).svg
        (line,) = re.findall(r'<line x1="([\d.]+)"', drawn)
        start = float(re.findall(r'<text x="([\d.]+)"[^>]*>1.00 GB<', drawn)[0])
        assert not start < float(line) < start + text_width("1.00 GB", TYPE, bold=True)


# On a GPU, which a stand-in plays: steps run on the CPU, and its counters are made up


ASKED = "Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 4.00 GiB of which 1.00 GiB is free."


@pytest.fixture
def meters(monkeypatch) -> Iterator[list[Meter]]:
    """The meters that a live stage has shown."""

    def stand_in() -> Meter:
        return Meter(lambda _: Reading(MB, 2 * MB), "live on a stand-in")

    monkeypatch.setattr(stages, "live_meter", stand_in)
    monkeypatch.setattr(devices, "Cuda", devices.Host)
    monkeypatch.setattr(live, "free_bytes", lambda: SMALL.memory)
    yield []


def small_run(stage: Stage, micro_batch: int = 1):
    return stage.run_of(0.3).replace(precision="fp32", attention="eager", micro_batch=micro_batch, seq_len=16)


def test_a_live_stage_trains_under_the_meter_and_times_its_steps(meters):
    stage = Stage(SMALL, live=True, show=meters.append)
    outcome = stage.attempt(small_run(stage))
    phases = [mark.words for mark in meters[0].marks]
    assert phases.count("forward") == stages.LIVE_STEPS and "optimizer" in phases and not meters[0].running
    assert outcome.words.endswith("live on a stand-in") and (outcome.step_seconds or 0) > 0
    assert len(outcome.step_peaks) == stages.LIVE_STEPS and "s per step" in outcome.words


def test_a_live_failure_in_mid_step_gives_the_memory_back_and_the_next_run_works(meters, monkeypatch):
    networks = []

    class Cramped(live.Training):
        """Out of memory in backward of any batch of more than one sequence."""

        def step(self, tracker) -> None:
            networks.append(weakref.ref(self.network))
            if self.run.micro_batch > 1:
                self.network(self.tokens).sum().backward()
                raise torch.OutOfMemoryError(f"CUDA out of memory. {ASKED}")
            super().step(tracker)

    monkeypatch.setattr(live, "Training", Cramped)
    stage = Stage(SMALL, live=True, show=meters.append)
    told = stage.fails(small_run(stage, micro_batch=2))
    assert "asked for 2.00 GiB more when 1.00 GiB was free" in told and "would fit" in told
    gc.collect()
    assert [network() for network in networks] == [None] and not meters[0].running
    assert stage.attempt(small_run(stage)).peak == MB
    assert not meters[1].running


def test_the_program_that_leaves_holes_says_what_happened(monkeypatch, capsys):
    asked: list[int] = []

    def empty(size: int, **_: object) -> object:
        asked.append(size)
        if len(asked) == 2 * fragmentation.COUNT + 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return object()

    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1000 * MiB, 1200 * MiB))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla T4")
    fragmentation.main()
    assert json.loads(capsys.readouterr().out)["message"] == "CUDA out of memory."
    assert sum(asked[:4]) <= 1000 * MiB


@pytest.mark.parametrize(("expandable", "message"), [(False, "CUDA out of memory."), (True, "")])
def test_on_a_gpu_the_tensors_are_real_and_in_a_process_of_their_own(monkeypatch, expandable, message):
    started = []

    def run(command: list[str], env: dict[str, str], **_: object) -> SimpleNamespace:
        started.append((command[-1], env["PYTORCH_CUDA_ALLOC_CONF"]))
        return SimpleNamespace(returncode=0, stdout=json.dumps({"source": "live on T4", "message": message}))

    monkeypatch.setattr(subprocess, "run", run)
    stage = Stage(SMALL, live=True)
    step = fragmentation.expandable_segments if expandable else fragmentation.failure
    said = stage.perform(DemoStep("", "", step)).words
    assert said == (message or "It fits (live on T4).")
    assert started == [(fragmentation.PROGRAM, f"expandable_segments:{expandable}")]
    other = fragmentation.failure if expandable else fragmentation.expandable_segments
    with pytest.raises(RuntimeError, match=r"should have (failed|helped)"):
        other(stage)
    dead = SimpleNamespace(returncode=1, stdout="", stderr="no driver")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: dead)
    with pytest.raises(RuntimeError, match="no driver"):
        step(stage)
