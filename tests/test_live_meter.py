"""The meter: what it reads from a GPU's counters, when it ends, what it draws, and a run played back."""

import re
import threading
import time

import pytest
import torch
from counting import calls

from course_utils import TrainingRun, measure, replay
from course_utils.allocator.policy import OutOfMemory
from course_utils.breakdown import KINDS
from course_utils.figures.canvas import WIDTH, text_width
from course_utils.figures.meters import LOOK, MOST_POINTS, MeterMark, Reading, meter_figure, thinned
from course_utils.interactive import meter as meters
from course_utils.interactive.meter import Meter, Playback, live_meter, replay_meter
from course_utils.units import GB, MB, round_up


class Counters:
    """Stands in for a GPU's counters: memory that a loop fills, and the peak counter beside it."""

    def __init__(self, before: int = 0, peak: int = 0) -> None:
        self.allocated = before
        self.peak = max(before, peak)
        self.threads: set[str] = set()
        self.broken = False

    def take(self, size: int) -> None:
        self.allocated += size
        self.peak = max(self.peak, self.allocated)

    def read(self, seconds: float) -> Reading:
        if self.broken:
            raise RuntimeError("the driver is gone")
        self.threads.add(threading.current_thread().name)
        return Reading(self.allocated, self.peak, self.allocated + MB, self.allocated + GB)


@pytest.fixture(autouse=True)
def quick(monkeypatch) -> None:
    monkeypatch.setattr(meters, "EVERY", 0.002)


def meter_of(counters: Counters) -> Meter:
    return Meter(counters.read, "a stand-in", 10 * GB)


def until(happened, seconds: float = 300.0) -> None:
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.002)


# When it reads, and when it ends


def test_it_reads_from_a_thread_of_its_own_while_the_loop_runs():
    gauge = Counters()
    with meter_of(gauge) as meter:
        gauge.take(2 * GB)
        until(lambda: len(meter.samples) > 5)
        assert meter.running
        gauge.take(-GB)
    assert "memory meter" in gauge.threads
    assert not meter.running and not any(thread.name == "memory meter" for thread in threading.enumerate())
    assert meter.samples[-1].allocated == GB and meter.peak == 2 * GB and meter.peak_is_exact


@pytest.mark.parametrize("error", [KeyboardInterrupt, torch.OutOfMemoryError])
def test_an_interrupt_or_an_error_of_the_loop_ends_it_and_it_is_used_up(error):
    meter = meter_of(Counters())
    with pytest.raises(error, match="on purpose"), meter:
        raise error("on purpose")
    assert not meter.running
    with pytest.raises(RuntimeError, match="make a new one"):
        meter.start()


def test_a_meter_that_is_forgotten_ends(monkeypatch):
    monkeypatch.setattr(meters, "LONGEST", 0.02)
    forgotten = meter_of(Counters()).start()
    until(lambda: not forgotten.running)


def test_the_end_of_a_cell_ends_it_even_if_the_cell_was_interrupted():
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    shell = InteractiveShell.instance(config=Config({"HistoryManager": {"enabled": False}}))
    try:
        meter = shell.user_ns["meter"] = meter_of(Counters())
        done = shell.run_cell(
            "meter.start()\nwas_running = meter.running\nraise KeyboardInterrupt", silent=False
        )
        assert isinstance(done.error_in_exec, KeyboardInterrupt) and shell.user_ns["was_running"]
        assert not meter.running
        assert meter._cell_ended not in shell.events.callbacks["post_run_cell"]
    finally:
        InteractiveShell.clear_instance()


def test_what_a_reading_raises_comes_out_where_it_can_be_seen_unless_the_loop_failed_too():
    gauge = Counters()
    meter = meter_of(gauge).start()
    gauge.broken = True
    until(lambda: not meter.running)
    with pytest.raises(RuntimeError, match="the driver is gone"):
        meter.stop()
    with pytest.raises(KeyError, match="the loop's"), meter_of(Counters()) as meter:
        meter.read = gauge.read
        until(lambda: not meter.running)
        raise KeyError("the loop's")


# What its peak means


def test_a_peak_from_before_is_not_taken_for_the_loops_own():
    gauge = Counters(before=GB, peak=8 * GB)
    with meter_of(gauge) as meter:
        gauge.take(2 * GB)
        until(lambda: meter.samples[-1].allocated == 3 * GB)
        gauge.take(-2 * GB)
    assert meter.peak == 3 * GB and not meter.peak_is_exact
    assert "at least 3.00 GB at the peak" in meter.figure().alt


# The GPU's counters


@pytest.fixture
def card(monkeypatch) -> None:
    """Pretends that torch sees a GPU of 16 GB."""
    counters = {"allocated_bytes": {"all": {"current": 3 * GB, "peak": 5 * GB}}}
    counters["reserved_bytes"] = {"all": {"current": 6 * GB, "peak": 6 * GB}}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "Tesla T4")
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda index: counters)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (7 * GB, 16 * GB))


def test_reading_calls_nothing_of_torch_cuda_but_the_counters(card, monkeypatch):
    """What can launch, record or wait is a function or class of torch.cuda: each of the others fails here."""
    meter = live_meter()

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the meter must not touch the stream")

    counters = {"memory_stats_as_nested_dict", "mem_get_info"}
    others = [
        name for name in dir(torch.cuda) if callable(getattr(torch.cuda, name)) and name not in counters
    ]
    assert {"synchronize", "Event", "Stream", "current_stream", "empty_cache", "memory_snapshot"} <= set(
        others
    )
    for name in others:
        monkeypatch.setattr(torch.cuda, name, refuse)
    with meter:
        until(lambda: len(meter.samples) > 5)
    sample = meter.samples[-1]
    assert (sample.allocated, sample.reserved, sample.driver) == (3 * GB, 6 * GB, 9 * GB) and calls(
        meter._sample
    ) < 30
    assert meter.capacity == 16 * GB and "live on Tesla T4" in meter.source


def test_with_a_model_and_its_optimizer_the_memory_is_shown_by_kind(card):
    model = torch.nn.Linear(100, 100)
    optimizer = torch.optim.AdamW(model.parameters())
    with live_meter(model, optimizer) as meter:
        until(lambda: len(meter.samples) > 2)
        model(torch.ones(1, 100)).sum().backward()
    weights = round_up(4 * 100 * 100) + round_up(4 * 100)
    assert meter.samples[0].kinds == {
        "parameters": weights,
        "gradients": 0,
        "optimizer_states": 0,
        "activations": 3 * GB - weights,
    }
    assert meter.samples[-1].kinds["gradients"] == weights
    assert "weights, gradients and states are known" in meter.figure().alt


def test_a_model_without_its_optimizer_and_a_machine_without_a_gpu_are_refused(card, monkeypatch):
    model = torch.nn.Linear(2, 2)
    for given in ((model, None), (None, torch.optim.SGD(model.parameters()))):
        with pytest.raises(ValueError, match=r"go together.*got .*NoneType"):
            live_meter(*given)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"replay_meter\(measure\(run\)\)"):
        live_meter()


# A run played back


@pytest.fixture(scope="module")
def measured():
    return measure(TrainingRun("tiny-gpt", 2, 64), "simulated")


def test_a_replay_shows_every_phase_and_ends_by_itself(measured):
    with replay_meter(measured, seconds=1.0) as meter:
        meter.wait()
    phases = [mark.words for mark in meter.marks]
    assert phases[:4] == ["set-up", "forward", "loss", "backward"] and phases.count("optimizer") == 2
    assert sum(meter.samples[-1].kinds.values()) > 0 and not meter.running
    assert "simulated GPU" in meter.source


def test_a_replays_end_is_the_measurements(measured):
    played = Playback(measured, 10.0)
    replayed = replay(measured)
    last = played.read(10.0)
    assert last is not None and played.read(10.1) is None
    assert (last.peak, last.reserved, last.driver) == (max(replayed.allocated), replayed.reserved[-1], None)
    assert sum(last.kinds.values()) == measured.timeline.totals()[-1]


def test_a_gpu_that_is_too_small_ends_the_replay_where_it_fails(measured):
    played = Playback(measured, 10.0, capacity=measured.peak // 2)
    last = played.read(10.0)
    assert isinstance(played.replayed.failure, OutOfMemory)
    assert last is not None and last.allocated <= measured.peak // 2
    for seconds in (0, -1.0):
        with pytest.raises(ValueError, match="more than 0"):
            Playback(measured, seconds)


# The picture


def test_the_picture_draws_the_kinds_and_says_the_rest_in_words():
    kinds = {"parameters": GB, "activations": 2 * GB}
    samples = [Reading(3 * GB, 0, 4 * GB, 5 * GB, kinds, seconds=t / 10) for t in range(30)]
    figure = meter_figure(samples, [MeterMark(0.5, "backward")], 16 * GB, 6 * GB, "", "a stand-in", "seconds")
    drawn = re.findall(r'data-kind="(\w+)" data-bytes="(\d+)"', figure.svg)
    assert {kind: int(size) for kind, size in drawn} == kinds
    for said in (
        "3.00 GB allocated now, 6.00 GB at the peak",
        "4.00 GB reserved",
        "5.00 GB taken",
        "backward",
    ):
        assert said in figure.alt


def test_thinning_keeps_the_highest_and_the_last():
    samples = [Reading(10 * GB if t == 4321 else t, 0, seconds=float(t)) for t in range(12_000)]
    kept = thinned(samples)
    assert len(kept) <= MOST_POINTS
    assert max(sample.allocated for sample in kept) == 10 * GB
    assert kept[-1] == samples[-1]


def test_twelve_thousand_readings_are_drawn_small_and_with_few_calls_each():
    samples = [
        Reading(8 * t * MB, 0, 9 * t * MB, 9 * t * MB, dict.fromkeys(KINDS, t * MB), seconds=t / 20)
        for t in range(12_000)
    ]
    assert calls(lambda: meter_figure(samples, [], 16 * GB, GB, "", "", "seconds")) < 160_000
    assert len(meter_figure(samples, [], 16 * GB, GB, "", "", "seconds").svg) < 70_000


def test_labels_stay_in_the_picture():
    samples = [
        Reading(3 * GB, 0, 4 * GB, 5 * GB, dict.fromkeys(KINDS, GB // 2), seconds=t / 10) for t in range(30)
    ]
    drawn = meter_figure(samples, [MeterMark(0.5, "backward")], 16 * GB, 6 * GB, "", "", "seconds").svg
    labels = re.findall(rf'<text x="{LOOK.right + 8:g}" [^>]*font-size="([0-9.]+)"[^>]*>([^<]+)<', drawn)
    assert len(labels) == len(KINDS) + 4  # allocated, reserved, the driver's and the GPU's
    assert all(LOOK.right + 8 + text_width(words, float(size)) <= WIDTH for size, words in labels)
