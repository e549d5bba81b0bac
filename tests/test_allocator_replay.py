"""A run's allocations through the allocator: hand-made events, and measured steps with known totals."""

import dataclasses
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from counting import calls
from engine import LLAMA, shallow, simulate

from course_utils import TrainingRun, memory_map, save_snapshot
from course_utils.allocator.replay import EMPTY_CACHE, replay
from course_utils.allocator.snapshots import snapshot_of
from course_utils.measuring.recorded import from_json, to_json
from course_utils.units import MiB

GROWING = [(40 * MiB, "a"), (-40 * MiB, "a"), (12 * MiB, "b"), (30 * MiB, "c")]
"""The last finds 28 MiB free behind "b", in a segment that cannot grow."""


def test_an_emptied_cache_is_an_event_of_its_own():
    replayed = replay([(40 * MiB, "a"), (-40 * MiB, "a"), EMPTY_CACHE, (12 * MiB, "b")])
    assert replayed.reserved == [40 * MiB, 40 * MiB, 0, 12 * MiB]
    actions = [entry["action"] for entry in snapshot_of(replayed)["device_traces"][0]]
    freed = ["free_requested", "free_completed", "segment_free"]
    assert actions == ["segment_alloc", "alloc", *freed, "segment_alloc", "alloc"]


def test_each_event_has_its_figures():
    replayed = replay(GROWING)
    assert replayed.requested == [40 * MiB, 0, 12 * MiB, 42 * MiB]
    assert replayed.allocated == replayed.requested
    assert replayed.reserved == [40 * MiB, 40 * MiB, 40 * MiB, 70 * MiB]
    assert replayed.stuck == [0, 0, 28 * MiB, 28 * MiB]
    assert replayed.fragmentation == [0, 0, 0.7, 0.4]
    assert replayed.largest_free == [0, 40 * MiB, 28 * MiB, 28 * MiB]
    assert (replayed.peak_allocated, replayed.peak_event, replayed.peak_reserved) == (42 * MiB, 4, 70 * MiB)
    assert (replayed.retries, replayed.failed_at, replayed.message) == (0, None, "")
    assert "2 for 3 tensors" in repr(replayed)


def test_a_gpu_that_is_too_small_ends_the_replay_where_it_failed():
    replayed = replay(GROWING, 60 * MiB)
    assert (len(replayed), replayed.failed_at) == (3, 4)
    assert "Tried to allocate 30.00 MiB" in replayed.message and "largest piece 28.00 MiB" in replayed.message
    assert replayed.message in repr(replayed) and "largest piece" in replayed._repr_html_()
    assert replay(GROWING, 60 * MiB, expandable_segments=True).failed_at is None


def test_blocks_are_as_they_were_at_an_event():
    replayed = replay(GROWING)
    first, second = replayed.blocks_at()
    assert [(block.bytes, block.requested, block.name, block.is_allocated) for block in first.blocks] == [
        (12 * MiB, 12 * MiB, "b", True),
        (28 * MiB, 0, None, False),
    ]
    assert (first.bytes, first.allocated, first.small) == (40 * MiB, 12 * MiB, False)
    assert [block.name for block in second.blocks] == ["c"] and second.address >= first.address + first.bytes
    assert replayed.blocks_at(0) == []
    (only,) = replayed.blocks_at(2)
    assert only.allocated == 0
    for event in (5, "peak", 1.0):
        words = f"event {event!r} does not exist: this replay has events 0 to 4"
        with pytest.raises(ValueError, match=words):
            memory_map(replayed, event)  # pyrefly: ignore [bad-argument-type]
    empty = replay([])
    assert (empty.peak_allocated, empty.peak_event, empty.blocks_at()) == (0, 0, []) and repr(empty)


MEASURED = TrainingRun(shallow(LLAMA, 2), 4, 256, "bf16-master", attention="flash", accumulation_steps=2)


def test_expandable_segments_allocate_what_was_measured_and_others_up_to_1_mib_more_a_tensor():
    measured = simulate(MEASURED)
    expandable = replay(measured, expandable_segments=True)
    assert expandable.allocated == expandable.requested == measured.timeline.totals()
    assert expandable.step_peaks()[2] == measured.peak
    plain = replay(measured)
    assert plain.requested == measured.timeline.totals()
    unsplit = plain.allocated[measured.peak_event - 1] - measured.peak
    assert 0 <= unsplit <= MiB * sum(item.bytes > MiB for item in measured.alive_at(measured.peak_event))


def test_moments_are_named_as_the_measurement_names_them():
    measured = simulate(MEASURED)
    replayed = replay(measured)
    assert replayed.moment(1) == "set-up" and replay(GROWING).moment(2) == ""
    for mark, later in pairwise(measured.timeline.marks):
        moment = f"step {mark.step}, {mark.phase.replace('_', ' ')}"
        if later.event > mark.event:
            for event in (mark.event + 1, later.event):  # the first and the last of the phase
                assert replayed.moment(event) == moment


def test_a_measurement_needs_all_its_allocations():
    measured = simulate(MEASURED)
    recorded = from_json(to_json(measured), "")
    with pytest.raises(ValueError, match="keep only what was alive at the peak: measure the run"):
        replay(recorded)
    lacking = dataclasses.replace(measured, allocations=measured.allocations[1:])
    with pytest.raises(ValueError, match="at 1 of its"):
        replay(lacking)


def test_twice_as_many_events_take_twice_as_many_calls():
    events = []
    for repetition in range(4):
        sizes = {f"{repetition}.{index}": (index % 97 + 1) * 100_000 for index in range(500)}
        events += [(size, name) for name, size in sizes.items()]
        events += [(-size, name) for name, size in sizes.items()]
    of_half = calls(lambda: replay(events[:2000]))
    assert calls(lambda: replay(events)) == pytest.approx(2 * of_half, rel=0.05)


def test_capacity_may_be_a_text_bytes_any_whole_number_and_choices_are_checked():
    events = [(40 * MiB, "a"), (40 * MiB, "b")]
    assert replay(events, capacity="60 MB").failed_at == 2
    of_numpy: list[Any] = [(np.int64(40 * MiB), "a")]
    assert replay(of_numpy, capacity="60 MB").reserved == [40 * MiB]
    assert replay(events, capacity="1 GiB").failure is None
    for capacity in ("sixty", 60e6):
        with pytest.raises(ValueError, match=f"{capacity!r} is not an amount of memory"):
            replay(events, capacity)  # pyrefly: ignore [bad-argument-type]
    words = "unknown allocator setting 'max_split': did you mean 'max_split_size_mb'"
    with pytest.raises(ValueError, match=words):
        replay(events, max_split=21)


@pytest.mark.parametrize(
    ("source", "error", "said"),
    [
        ("gpt2", TypeError, "given a str: a measurement, a run, or"),
        ([512, -512], TypeError, "512 is not an event, a pair of whole bytes and a name"),
        ([(512.0, "a")], TypeError, "is not an event, a pair of whole bytes"),
        ([(512, "a"), (512, "a")], ValueError, "event 2 allocates 'a', which is allocated already"),
        ([(512, "a"), (-1024, "a")], ValueError, "event 2 is .-1024, 'a'.: a free is minus the bytes"),
        ([(0, "a")], ValueError, "event 1"),
    ],
)
def test_what_cannot_be_replayed_is_refused_in_words(source, error, said):
    with pytest.raises(error, match=said):
        replay(source)


def test_what_takes_a_replay_says_how_to_get_one():
    with pytest.raises(TypeError, match="given a TrainingRun: replay it first, measured or estimated"):
        save_snapshot(TrainingRun("gpt2"), "memory.pickle")  # pyrefly: ignore [bad-argument-type]
    with pytest.raises(TypeError, match=r"given a list: give what replay\(measured\) returns"):
        memory_map([(512, "a")])  # pyrefly: ignore [bad-argument-type]
    with pytest.raises(TypeError, match=r"given a Measurement: replay it first: replayed = replay\(mea"):
        memory_map(simulate(MEASURED))  # pyrefly: ignore [bad-argument-type]
