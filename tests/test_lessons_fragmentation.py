"""Lesson 12: traces and what is said of them, the pictures, and the player."""

import xml.etree.ElementTree as ElementTree
from typing import Any

import pytest
from engine import GPT, shallow, simulate

from course_utils import TrainingRun
from course_utils.allocator.replay import can_be_replayed, replay
from course_utils.lessons.allocator.figures import segments_figure
from course_utils.lessons.allocator.traces import RULES, curves, in_one_process, reasons, spelled, trace_of
from course_utils.lessons.allocator.widget import allocator_player
from course_utils.measuring.recorded import from_json, to_json
from course_utils.units import MiB

SVG = "{http://www.w3.org/2000/svg}"
RUN = TrainingRun(shallow(GPT, 2), micro_batch=4, seq_len=256, precision="amp-bf16", attention="flash")


def test_a_trace_is_spelled_in_mebibytes_and_freed_with_its_size():
    assert trace_of("a=4 b=0.5K -a") == [(4 * MiB, "a"), (512, "b"), (-4 * MiB, "a")]


@pytest.mark.parametrize(
    ("text", "words"),
    [("a", "'a' is not an event"), ("-a", "'a' is not allocated"), ("a=1 a=2", "'a' is allocated already")],
)
def test_what_is_no_trace_is_refused_in_words(text: str, words: str):
    with pytest.raises(ValueError, match=words):
        trace_of(text)


def test_the_rules_show_each_rule_and_every_event_has_its_reason():
    told = reasons(replay(trace_of(RULES)))
    assert len(told) == len(RULES.split())
    for words in (
        "the driver gives 20 MiB",
        "the driver gives 2 MiB",
        "the driver gives 14 MiB",
        "best fit",
        "which it fills",
        "stay free behind it",
        "too small for a block",
        "joined with free neighbors",
        "whole segment is empty",
    ):
        assert any(words in line for line in told), words
    assert "a free block of 16 MiB is there, and 12 MiB stay free" in told[1]
    assert "joined" not in told[5] and "joined" in told[8]
    told = reasons(replay(trace_of("a=20 -a b=30"), 40 * MiB))
    assert "20 MiB of empty segments go back to the driver, then no free block holds it" in told[-1]


def test_curves_keep_the_peaks():
    replayed = replay(simulate(RUN))
    drawn = curves(replayed, points=50)
    assert max(drawn["allocated"][1]) == replayed.peak_allocated / 1e9
    assert max(drawn["reserved"][1]) == replayed.peak_reserved / 1e9
    assert len(drawn["reserved"][0]) <= 50 and drawn["reserved"][0][-1] == len(replayed)


def test_runs_in_one_process_share_an_allocator_that_keeps_its_cache():
    large, small = (simulate(RUN.replace(micro_batch=batch)) for batch in (4, 1))
    process = in_one_process({"4": large, "1": small})
    first, last = process.spans["1"]
    allocated, reserved = process.replayed.allocated, process.replayed.reserved
    assert process.replayed.allocated[first - 1] == 0  # the first run has ended
    assert max(allocated[first:last]) < max(allocated[:first])
    assert min(reserved[first:last]) == max(reserved[:first])
    assert process.replayed.requested[-1] == 0 and max(process.replayed.requested) == max(
        replay(large).requested
    )


def blocks_in(figure: Any) -> list[str]:
    rects = ElementTree.fromstring(figure.svg).iter(f"{SVG}rect")
    return [rect.attrib["data-block"] for rect in rects if "data-block" in rect.attrib]


def test_a_picture_has_every_block_and_says_so_in_words():
    replayed = replay(trace_of("a=4 b=18 -a"))
    figure = segments_figure(replayed, 2)
    assert blocks_in(figure) == ["a", "free", "b"]
    assert figure.alt == (
        "38 MiB reserved, 22 MiB of it allocated, the largest free block 16 MiB. "
        "Segment 1, 20 MiB: a 4 MiB, free 16 MiB. Segment 2, 18 MiB: b 18 MiB."
    )
    assert blocks_in(segments_figure(replayed)) == ["free", "b"]


def test_the_player_steps_through_the_rules():
    player = allocator_player(event=1)
    assert "Event 1 of 13: a asks for 4 MiB" in player.message
    player.controls["event"].value = 13
    assert "the driver gives 14 MiB" in player.message and player.figure is not None
    assert repr(player) == "An allocator to play with: run this cell to step through its events."


def test_the_player_takes_another_trace_and_another_gpu():
    player = allocator_player()
    player.controls["trace"].value = "a=30 b=12"
    assert player.controls["event"].max == 2 and len(player.replayed) == 2
    player.controls["gpu"].value = "40 MiB"
    assert player.controls["event"].max == 1 and "The next event fails:" in player.message
    player.controls["segments"].value = "expandable segments"
    assert player.replayed.choices == {"expandable_segments": True}


@pytest.mark.parametrize(
    ("trace", "words"),
    [("a", "is not an event"), ("", "no requests"), ("a=100", "the first request already fails")],
)
def test_the_player_explains_what_it_cannot_play(trace: str, words: str):
    player = allocator_player()
    player.controls["gpu"].value = "24 MiB"
    player.controls["trace"].value = trace
    assert "Not possible" in player.message and words in player.message


def test_a_run_that_is_recorded_whole_can_be_replayed():
    measured = simulate(RUN)
    again = from_json(to_json(measured, whole=True), "")
    assert can_be_replayed(again) and not can_be_replayed(from_json(to_json(measured), ""))
    assert list(replay(again).reserved) == list(replay(measured).reserved)
    assert again.peak == measured.peak and again.largest(5) == measured.largest(5)


def test_sizes_are_spelled_in_the_allocators_units():
    assert list(map(spelled, (512, 1536, 4 * MiB, 3 * 2**29))) == ["512 B", "1.5 KiB", "4 MiB", "1.5 GiB"]


def test_the_run_that_fails_does_so_where_and_why_the_lesson_says():
    """GPT-2 on a 6 GiB card: the fp32 log-probabilities' gradient finds two holes, both too small."""
    measured = simulate(TrainingRun("gpt2", micro_batch=8, seq_len=512, precision="amp-bf16"))
    logits = 8 * 512 * 50257
    first_step = [item for item in measured.allocations if item.step == 1]
    large = [(item.operation, item.bytes) for item in first_step if item.bytes > 300 * MiB]
    assert large[:2] == [("mm", 2 * logits), ("_log_softmax", 2 * logits)]
    assert large[2:4] == [("_to_copy", 4 * logits), ("nll_loss_backward", 4 * logits)]
    tight = replay(measured, "6 GiB")
    failure = tight.failure
    at = tight.failed_at
    free = []
    assert failure is not None and at is not None and tight.moment(at) == "step 2, backward"
    assert failure.requested == 4 * logits
    assert failure.attempted - (failure.capacity - failure.reserved) == 4 * MiB
    for segment in tight.blocks_at(at - 1):
        free += [block.bytes for block in segment.blocks if block.kind == "free"]
    largest, second = sorted(free)[:-3:-1]
    assert largest == failure.largest_free and 2 * logits < second < largest < 4 * logits
