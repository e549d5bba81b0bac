"""The meter: what it reads from a GPU's counters, when it ends, and a run played back."""

import threading
import time
from typing import Any

import pytest
import torch
from counting import calls

from course_utils import TrainingRun, measure, replay
from course_utils.figures.meters import MOST_POINTS, Reading, meter_figure
from course_utils.interactive import meter as meters
from course_utils.interactive.meter import Meter, live_meter, replay_meter
from course_utils.units import GB, MB


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


def running() -> bool:
    return any(thread.name == "memory meter" for thread in threading.enumerate())


# When it reads, when it ends, what its peak means


def test_it_reads_from_a_thread_of_its_own_while_the_loop_runs():
    gauge = Counters()
    with meter_of(gauge) as meter:
        gauge.take(2 * GB)
        until(lambda: len(meter.readings) > 5)
        assert running()
        gauge.take(-GB)
    assert "memory meter" in gauge.threads and not running()
    assert meter.readings[-1].allocated == GB and meter.peak == 2 * GB and meter.peak_is_exact


def test_an_error_of_the_loop_ends_it_and_it_is_used_up():
    meter = meter_of(Counters())
    with pytest.raises(KeyboardInterrupt, match="on purpose"), meter:
        raise KeyboardInterrupt("on purpose")
    assert not running()
    with pytest.raises(RuntimeError, match="once"), meter:
        pass


def test_a_peak_from_before_is_not_taken_for_the_loops_own():
    gauge = Counters(before=GB, peak=8 * GB)
    with meter_of(gauge) as meter:
        gauge.take(2 * GB)
        until(lambda: meter.readings[-1].allocated == 3 * GB)
        gauge.take(-2 * GB)
    assert meter.peak == 3 * GB and not meter.peak_is_exact
    assert "at least 3.00 GB at the peak" in meter.figure().alt


def test_its_picture_has_every_counter_and_loses_no_peak():
    readings = [Reading(GB, 2 * GB, 3 * GB, 4 * GB, seconds=index / 20) for index in range(5 * MOST_POINTS)]
    readings[777] = readings[777]._replace(allocated=2 * GB)
    figure = meter_figure(readings, 8 * GB, 2 * GB, "", "a stand-in")
    drawn: Any = figure.axes[0]
    allocated, reserved, programs, card = (line.get_ydata() for line in drawn.lines)
    assert [max(ys) for ys in (allocated, reserved, programs, card)] == [2, 3, 4, 8]
    assert len(allocated) <= MOST_POINTS and allocated[-1] == 1
    labels = {text.get_text().replace("\n", " ") for text in drawn.texts}
    assert {"allocated 1.00 GB", "reserved 3.00 GB", "all programs 4.00 GB", "GPU 8.00 GB"} <= labels


# The GPU's counters


def test_reading_calls_nothing_of_torch_cuda_but_the_counters(monkeypatch):
    """What can launch, record or wait is a function or class of torch.cuda: each of the others fails here."""
    counters = {
        "allocated_bytes": {"all": {"current": 3 * GB, "peak": 5 * GB}},
        "reserved_bytes": {"all": {"current": 6 * GB, "peak": 6 * GB}},
    }
    asked = {
        "memory_stats_as_nested_dict": lambda index: counters,
        "mem_get_info": lambda index: (7 * GB, 16 * GB),
    }
    before = {
        "is_available": lambda: True,
        "current_device": lambda: 0,
        "get_device_name": lambda index: "T4",
    }
    for name, answer in (asked | before).items():
        monkeypatch.setattr(torch.cuda, name, answer)
    meter = live_meter()

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the meter must not touch the stream")

    others = {name for name in dir(torch.cuda) if callable(getattr(torch.cuda, name))} - asked.keys()
    assert {"synchronize", "Event", "Stream", "empty_cache", "memory_snapshot"} <= others
    for name in others:
        monkeypatch.setattr(torch.cuda, name, refuse)
    with meter:
        until(lambda: len(meter.readings) > 5)
    sample = meter.readings[-1]
    assert (sample.allocated, sample.reserved, sample.driver) == (3 * GB, 6 * GB, 9 * GB)
    assert calls(meter._read_on) < 30
    assert meter.capacity == 16 * GB and "live on T4" in meter.source


# A run played back


@pytest.fixture(scope="module")
def measured():
    return measure(TrainingRun("tiny-gpt", 2, 64), "simulated")


def test_a_replay_shows_every_phase_and_ends_by_itself_where_the_allocator_does(measured):
    with replay_meter(measured, seconds=2.0) as meter:
        meter.wait()
    slow = replay_meter(measured, 10.0)  # a busy machine may read `meter` seldom
    readings = [slow.read(tenths / 10) for tenths in range(100)]
    phases = {reading.phase for reading in readings if reading}
    assert {"set-up", "step 1, forward", "step 2, backward", "step 2, optimizer"} <= phases
    assert not running() and "simulated GPU" in meter.source and "replayed" in meter.figure().alt
    replayed = replay(measured)
    last = slow.read(10.0)
    assert last is not None
    assert (last.peak, last.reserved, last.driver) == (max(replayed.allocated), replayed.reserved[-1], None)
