"""A run's allocations through the allocator: hand-made events, and measured steps with known totals."""

import pytest
from counting import calls
from engine import LLAMA, shallow, simulate

from course_utils import TrainingRun
from course_utils.allocator.replay import replay
from course_utils.units import MiB

GROWING = [(40 * MiB, "a"), (-40 * MiB, "a"), (12 * MiB, "b"), (30 * MiB, "c")]
"""The last finds 28 MiB free behind "b", in a segment that cannot grow."""


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


def test_twice_as_many_events_take_twice_as_many_calls():
    events = []
    for repetition in range(4):
        sizes = {f"{repetition}.{index}": (index % 97 + 1) * 100_000 for index in range(500)}
        events += [(size, name) for name, size in sizes.items()]
        events += [(-size, name) for name, size in sizes.items()]
    of_half = calls(lambda: replay(events[:2000]))
    assert calls(lambda: replay(events)) == pytest.approx(2 * of_half, rel=0.05)
