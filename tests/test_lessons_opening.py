"""Lesson 01's verdicts: which recipe fits the card, what the first peak is made of, where activations win."""

from dataclasses import replace
from math import prod

import pytest

from course_utils import PRESETS, TrainingRun, estimate, gpu, measure, replay, twin
from course_utils.estimating import moments
from course_utils.lessons.one_step.widget import layer_slider
from course_utils.measurement import Measurement
from course_utils.models import parameter_shapes

CARD = gpu("RTX5090-32GB")
PUZZLE = TrainingRun("gpt2-xl", 32, 1024, "bf16-master", "adamw-foreach", recompute="full")
CUT_LOSS = ({"loss_chunks": 8}, {"micro_batch": 4, "accumulation_steps": 8})


def room_left(**changes: object) -> int:
    """Bytes that a program has left on the card."""
    return CARD.room - estimate(PUZZLE.replace(**changes)).total


@pytest.mark.parametrize("cut", CUT_LOSS)
def test_the_puzzle_fits_with_the_loss_cut_and_one_gradient_upcast_at_a_time_and_with_neither_alone(cut):
    assert room_left() < 0 and room_left(optimizer="adamw") < 0 and room_left(**cut) < 0
    assert room_left(optimizer="adamw", **cut) > 4 * 10**9
    assert 32 * 10**9 < estimate(PUZZLE.replace(**cut)).total < 35 * 10**9, "the newsletter's sum"


def test_cutting_the_loss_twice_does_not_replace_upcasting_one_by_one():
    assert room_left(loss_chunks=8, micro_batch=4, accumulation_steps=8) < 0


def test_under_autocast_a_context_decides():
    left = [
        room_left(precision="amp-bf16", optimizer="adamw", loss_chunks=chunks) for chunks in (1, 8, 16, 32)
    ]
    assert left[0] < left[1] < 0 < left[2] < left[3] < 10**9


def test_autocasts_states_are_smaller_its_activations_are_larger_and_it_fits_in_8_micro_batches():
    master, autocast = (
        moments(PUZZLE.replace(precision=name))["after loss"] for name in ("bf16-master", "amp-bf16")
    )
    weights, wider = (one["parameters"] + one["optimizer_states"] for one in (master, autocast))
    assert master["gradients"] == autocast["gradients"] == 0 and weights > wider + 3 * 10**9
    assert autocast["activations"] > master["activations"] + 8 * 10**9
    assert room_left(precision="amp-bf16", **CUT_LOSS[1]) > 2 * 10**9


def test_with_eager_attention_chunks_are_not_enough_and_micro_batches_are():
    chunks, micro_batches = (room_left(optimizer="adamw", attention="eager", **cut) for cut in CUT_LOSS)
    assert chunks < 0 < micro_batches


def test_of_all_phases_only_forward_stays_below_what_a_program_gets():
    at = moments(PUZZLE)
    peaks = {name: at[name].total for name in ("forward", "loss", "backward of the loss", "optimizer step")}
    assert [name for name, peak in peaks.items() if peak <= CARD.room] == ["forward"]
    assert CARD.memory > peaks["loss"], "against the driver's number the loss would seem to fit"


def test_half_of_the_optimizers_temporaries_are_square_roots_which_fused_does_without():
    at = {
        how: moments(PUZZLE.replace(optimizer=f"adamw-{how}"))["optimizer step"]
        for how in ("foreach", "fused")
    }
    N = PUZZLE.model.parameters
    assert at["foreach"]["temporaries"] == pytest.approx(8 * N, rel=1e-4)
    assert at["fused"]["temporaries"] < N
    left = [room_left(optimizer=name, **CUT_LOSS[1]) for name in ("adamw", "adamw-fused")]
    assert abs(left[0] - left[1]) < 10**6, (
        "where one gradient is copied at a time, fused changes next to nothing"
    )


BYTES_PER_LOGIT = (
    ("bf16-master", "compute", 6),
    ("amp-bf16", "compute", 10),
    ("amp-bf16", "fp32", 12),
    ("fp32", "compute", 12),
)


@pytest.mark.parametrize(("precision", "logits", "each"), BYTES_PER_LOGIT)
def test_the_loss_takes_6_10_or_12_bytes_per_logit(precision, logits, each):
    def at_backward(vocab: int) -> int:
        small = replace(PRESETS["tiny-gpt"], vocab=vocab)
        run = TrainingRun(small, 4, 64, precision, attention="efficient", logits=logits)
        peak = measure(run, source="simulated").phase_peaks["backward"]
        return peak["activations"] + peak["temporaries"]

    assert at_backward(16_384) - at_backward(8192) == each * 4 * 64 * 8192


def test_a_twins_tensors_fit_a_t4_and_their_blocks_only_with_a_sequence_less():
    card = gpu("T4-16GB")
    mine = twin(TrainingRun("gpt2-xl", 32, 1024, "bf16-master"), card)
    assert estimate(mine).total < card.room
    assert replay(mine, card.room).failure is not None
    assert replay(mine.replace(micro_batch=mine.micro_batch - 1), card.room).failure is None


LAYERS = (("none", "flash", 2.0, 2.5), ("none", "eager", 6.0, 7.0), ("full", "flash", 0.5, 0.7))


@pytest.mark.parametrize(("recompute", "attention", "least", "most"), LAYERS)
def test_one_more_layer_adds_gigabytes_only_where_everything_is_kept(recompute, attention, least, most):
    shown = layer_slider(
        TrainingRun("gpt2-xl", 32, 1024, "bf16-master", attention=attention, recompute=recompute)
    )
    shallow, deep = shown.runs
    assert deep.model.layers == shallow.model.layers + 1 == 49
    more = shown.more
    assert more == estimate(deep).total - estimate(shallow).total
    assert least < more / 10**9 < most
    shown.controls["layers"].value = 12
    assert shown.runs[0].model.layers == 12 and shown.more == more, "whatever the depth"


def test_the_layer_slider_refuses_a_model_that_it_has_no_room_for():
    with pytest.raises(ValueError, match="the slider ends at 96"):
        layer_slider(TrainingRun(replace(PRESETS["gpt2"], layers=97)))


@pytest.fixture(scope="module")
def three_steps() -> Measurement:
    return measure(TrainingRun("tiny-llama", micro_batch=1, seq_len=64), steps=3, source="simulated")


def test_the_first_step_peaks_at_five_numbers_a_parameter_and_the_batch(three_steps):
    weights = sum(item.bytes for item in three_steps.allocations if item.kind == "parameters")
    peaks = three_steps.timeline.step_peaks()
    assert peaks[1] == 5 * weights + 2 * 8 * 64


def test_as_backward_begins_the_first_step_lacks_the_optimizer_states_and_nothing_else(three_steps):
    begins = [mark.event for mark in three_steps.timeline.marks if mark.phase == "backward"]
    totals = three_steps.timeline.totals()
    first, second, third = (totals[event - 1] for event in begins)
    states = sum(item.bytes for item in three_steps.allocations if item.kind == "optimizer_states")
    assert second - first == states and third == second


@pytest.mark.parametrize("element", [2, 4])
def test_most_tensors_of_gpt2_xl_are_rounded_up_but_not_all(element):
    sizes = [element * prod(shape) for shape in parameter_shapes(PUZZLE.model).values()]
    assert (sum(size % 512 > 0 for size in sizes), len(sizes)) == (339, 580)


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("name", ["gpt2", "gpt2-xl", "llama3-8b", "gpt3-175b"])
def test_whether_states_are_most_of_the_memory_depends_on_the_tokens_and_on_recomputation(name, recompute):
    one = TrainingRun(name, 1, 1024, "bf16-master", recompute=recompute)
    kept, doubled = (moments(one.replace(micro_batch=b))["after loss"]["activations"] for b in (1, 2))
    assert doubled == pytest.approx(2 * kept, rel=1e-3), "in proportion to the tokens"
    if name == "gpt2-xl":
        assert (16 * one.model.parameters * 1024 // kept < 32 * 1024) == (recompute == "none")


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("attention", ["flash", "eager"])
@pytest.mark.parametrize("precision", ["amp-bf16", "bf16-master"])
def test_the_estimate_names_every_byte_whatever_precision_kernel_and_recomputation(
    precision, attention, recompute
):
    three_blocks = replace(PUZZLE.model, layers=3)
    run = TrainingRun(three_blocks, 32, 1024, precision, attention=attention, recompute=recompute)
    assert estimate(run).total == measure(run, source="simulated").peak
