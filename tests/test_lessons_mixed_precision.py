"""Lesson 03's experiments: what they show is really so, and what they draw says it."""

import re

import pytest
import torch

from course_utils import TrainingRun, estimate, measure
from course_utils.lessons.precision import formats_in_a_step as formats
from course_utils.lessons.precision.experiments import (
    PARTS,
    DynamicLossScale,
    five_trainings,
    gradients_of,
    gradscaler_scales,
    late_training,
    learns_as_well,
    loss_figure,
    repeated_update,
    round_stochastically,
    scale_figure,
    unmoved_share,
    update_figure,
)
from course_utils.lessons.precision.figures import flow_figure, histogram_figure, lost_share
from course_utils.lessons.precision.number_formats import FORMATS, encode
from course_utils.lessons.precision.widget import bit_flipper, bit_name, neighbors, sum_of
from course_utils.lessons.shared.language_model import Training
from course_utils.measuring.devices import Host
from course_utils.planning.twin import fits
from course_utils.units import GB


def test_an_update_vanishes_in_16_bits_and_both_cures_help() -> None:
    last = {name: values[-1] for name, values in repeated_update(1.0, 1e-4, 1000).items()}
    assert last["fp16"] == last["bf16"] == 1.0
    assert last["fp32"] == pytest.approx(1.1, rel=1e-3)
    assert last["bf16, fp32 master"] == pytest.approx(1.1, abs=2**-7)
    assert last["bf16, stochastic"] == pytest.approx(1.1, abs=0.05)


def test_bf16_alone_freezes_at_the_rates_of_the_end() -> None:
    fp32, alone, masters = (late_training(name, before=60, steps=40) for name in ("fp32", "bf16", "bf16-master"))
    assert alone.unmoved > 0.75 and fp32.unmoved < 0.01 and masters.unmoved < alone.unmoved
    assert alone.gain < 0.5 * fp32.gain and masters.gain > 0.8 * fp32.gain
    assert late_training("bf16", rate=1e-3, before=60, steps=40).unmoved < 0.2


def test_stochastic_rounding_is_right_on_average_and_keeps_what_is_exact() -> None:
    dice = torch.Generator().manual_seed(1)
    values = torch.tensor([1.001, -1.001, 3.1e-5, -250.3]).repeat(40_000, 1)
    landed = round_stochastically(values, dice)
    assert landed.dtype == torch.bfloat16 and all(len(set(column.tolist())) == 2 for column in landed.T)
    assert torch.allclose(landed.float().mean(0), values[0], rtol=2e-4)
    exact = torch.tensor([0.0, 1.0, -2.5, 2.0**-100])
    assert torch.equal(round_stochastically(exact, dice).float(), exact)


def test_fewer_weights_move_the_smaller_the_rate_and_the_coarser_the_format() -> None:
    shares = [unmoved_share(rate, torch.bfloat16) for rate in (1e-3, 1e-4, 1e-5)]
    assert shares == sorted(shares) and shares[0] < 0.01 and shares[2] > 0.5
    assert unmoved_share(1e-5, torch.float16) < shares[2] and unmoved_share(1e-5, torch.float32) == 0


def test_division_makes_gradients_underflow_and_scaling_brings_them_back() -> None:
    part = gradients_of(steps=5) / PARTS
    assert bool((part != 0).all())
    assert lost_share(part) > 0.1 > 0.01 > lost_share(part, 2**16)


OVERFLOWS = [step in (0, 3, 4, 30) for step in range(50)]


@pytest.mark.parametrize(("start", "interval"), [(2.0**16, 2000), (1024.0, 3), (8.0, 10)])
def test_the_dynamic_scale_is_gradscalers(start: float, interval: int) -> None:
    scale, found = DynamicLossScale(start, interval), []
    for overflowed in OVERFLOWS:
        scale.update(overflowed)
        found.append(scale.scale)
    assert found == gradscaler_scales(OVERFLOWS, start, interval)
    assert scale.history == [start, *found[:-1]]


@pytest.fixture(scope="module")
def trainings() -> dict[str, Training]:
    return five_trainings(steps=60)


def test_fp16_fails_without_scaling_and_only_so(trainings: dict[str, Training]) -> None:
    as_well = {name: learns_as_well(training, trainings["fp32"]) for name, training in trainings.items()}
    assert as_well == {name: name != "fp16, no scaling" for name in trainings}
    assert trainings["fp32"].final < trainings["fp32"].losses[0] - 0.8
    begins = [training.losses[0] for training in trainings.values()]
    assert max(begins) - min(begins) < 0.01, "all five begin alike"


def test_the_histogram_counts_what_is_lost() -> None:
    figure = histogram_figure(torch.tensor([2.0**-30, 2.0**-20, 2.0**-10, 1.0]), "A quarter is lost.")
    assert "fp16 turns 25 % of the gradients into zero" in figure.alt
    scaled = histogram_figure(torch.tensor([2.0**-30, 2.0**-20]), "Nothing is lost.", scale=2**12)
    assert "0 % of the gradients times 4,096" in scaled.alt
    assert sum(int(count) for count in re.findall(r"<title>(\d+) of 2\^", figure.svg)) == 4
    just_lost, just_kept = 2.0**-25, 2.0**-25 * (1 + 2**-10)  # half of the smallest number is rounded to even: to 0
    assert encode("fp16", just_lost) == 0 and encode("fp16", just_kept) == 1
    assert lost_share(torch.tensor([just_lost, just_kept])) == 0.5


def test_the_flow_names_every_step() -> None:
    figure = flow_figure("Sums are fp32.")
    names = ("input x", "weights W", "output y", "dL/dy", "dL/dW", "dL/dx", "fp32 gradients", "master weights")
    assert all(name in figure.alt for name in names)
    assert figure.svg.count('Z"') == 15, "an arrow without a head"


def test_products_of_a_layer_are_added_in_fp32_and_rounded_once_as_the_flow_says() -> None:
    dice = torch.Generator().manual_seed(0)
    dy, x, W = (torch.randint(-16, 17, shape, generator=dice).bfloat16() for shape in ((512, 8), (512, 6), (8, 6)))
    for one, other in ((x, W.T), (dy.T, x), (dy, W)):
        exact = one.float() @ other.float()  # whole numbers: nothing of the sum is rounded
        assert torch.equal(one @ other, exact.bfloat16())
    assert not torch.equal((dy.T @ x).float(), dy.float().T @ x.float()), "dL/dW is rounded"


def test_only_what_is_stored_in_fp16_overflows() -> None:
    row = (5 * torch.tensor([1.0, -1.0]).repeat(2048)).half()
    assert row.square().sum().isinf() and (row @ row).isinf()
    assert row.square().sum(dtype=torch.float32) == 4096 * 25
    assert row.norm() == 320 and row.pow(2).mean() == 25
    for size in (5, 300, 1000):
        large = size / 5 * row
        for kernel in (torch.nn.functional.rms_norm, torch.nn.functional.layer_norm):
            assert kernel(large, large.shape).abs().max() == 1
        assert large.norm().isfinite()
    assert (60 * row).pow(2).mean().isinf(), "the squares are stored on the way"
    up_and_down = torch.tensor([60.0] * 2048 + [-60.0] * 2048).half()  # 122,880 halfway, which fp16 does not have
    assert up_and_down.sum() == 0 and up_and_down.cumsum(0).max().isinf(), "kernels add up in fp32"


def test_squares_underflow_in_fp8_where_gradients_do_not() -> None:
    gradients, form = gradients_of(steps=50), FORMATS["fp8-e4m3"]
    lost = []
    for values in (gradients, gradients**2):
        scaled = values * (form.largest / values.abs().max())
        lost.append((scaled.to(torch.float8_e4m3fn).float() == 0).float().mean().item())
    assert lost[0] < 0.05 < 0.2 < lost[1]


def test_curves_are_drawn(trainings: dict[str, Training]) -> None:
    assert "fp16, no scaling" in loss_figure(trainings, "One of the five stays behind.").svg
    assert "change of the weight" in update_figure(repeated_update(1.0, 0.01, 5), "Up.").svg
    assert "loss scale" in scale_figure([1.0, 2.0, 4.0], "Up.").svg


def test_bits_pressed_numbers_typed_and_formats_chosen_change_one_another() -> None:
    shown = bit_flipper("bf16", 1.0)
    shown.bits[0].value = True
    assert shown.value == -1 and shown.controls["number"].value == "-1.0"
    shown.bits[15].value = True
    assert shown.value == -1.0078125 and "−1.007812" in shown.picture.value
    shown.controls["format"].value = "fp8-e4m3"
    shown.controls["number"].value = "0.1"
    pressed = "".join(str(int(bit.value)) for bit in shown.bits[:8])
    assert int(pressed, 2) == encode("fp8-e4m3", 0.1) == shown.pattern and shown.value == 0.1015625
    assert all(bit.layout.display == "none" for bit in shown.bits[8:])
    shown.controls["format"].value = "fp32"
    assert shown.value == torch.tensor(0.1).item(), "the number asked for is rounded anew"
    shown.controls["number"].value = "two"
    assert "is no number" in shown.message and shown.value == torch.tensor(0.1).item()


@pytest.mark.parametrize("form", FORMATS)
def test_every_format_shows_its_extremes(form: str) -> None:
    for value in (0.0, 1e300, float("nan"), FORMATS[form].smallest, -FORMATS[form].largest):
        shown = bit_flipper(form, value)
        assert shown.figure is not None and shown.figure.alt
    assert repr(shown) == shown.invitation


def test_bits_are_named_and_summed() -> None:
    half = FORMATS["fp16"]
    assert bit_name(half, 0).startswith("sign") and bit_name(half, 1) == "exponent: counts 16"
    assert bit_name(half, 15) == "mantissa: counts 1/1,024"
    assert sum_of(half, encode("fp16", 1.5)) == "+ 2^(15 − 15) · (1 + 512/1,024)"
    assert "subnormal" in sum_of(half, 1) and sum_of(half, 0) == "+ 0" and "set aside" in sum_of(half, 0x7C00)
    assert neighbors(half, encode("fp16", 65504)).endswith("Next away from zero: inf.")
    with pytest.raises(ValueError, match="unknown number format"):
        bit_flipper("fp12")


RUN = TrainingRun("tiny-gpt", micro_batch=2, seq_len=64, attention="eager")


@pytest.mark.parametrize(
    ("precision", "wanted"),
    [
        ("fp32", ("fp32", "fp32", "fp32")),
        ("amp-bf16", ("fp32", "fp32", "fp32")),
        ("bf16-master", ("bf16", "bf16", "fp32")),
        ("bf16-master-fp32grad", ("bf16", "fp32", "fp32")),
        ("bf16", ("bf16", "bf16", "bf16")),
        ("fp16-master", ("fp16", "fp16", "fp32")),
    ],
)
def test_states_are_in_the_formats_of_their_recipe(precision: str, wanted: tuple[str, ...]) -> None:
    run = RUN.replace(precision=precision)
    measured = measure(run, source="simulated")
    assert tuple(formats.state_formats(measured).values()) == wanted
    assert formats.estimated_states(run) == formats.measured_states(measured)
    assert formats.per_parameter({"parameters": 20, "gradients": 40, "optimizer_states": 120}, 10) == "2 + 4 + 12 = 18"


def test_autocast_runs_norms_and_softmax_in_fp32_and_products_in_bf16() -> None:
    measured = measure(RUN.replace(precision="amp-bf16"), source="simulated")
    found = formats.operation_formats(measured)
    assert found["forward: native_layer_norm"] == found["forward: _softmax"] == found["forward: add"] == "fp32"
    assert found["forward: addmm"] == found["forward: bmm"] == found["loss: _log_softmax"] == "bf16"
    kept = formats.activation_formats(measured)
    assert sum(kept.values()) == measured.moments["end of forward"]["activations"]
    assert kept["fp32"] > 0 and kept["bf16"] > 0


def test_a_recording_is_said_to_know_no_formats() -> None:
    recorded = measure(TrainingRun("gpt2", micro_batch=8, seq_len=1024), source="recorded", device="simulated GPU")
    assert set(formats.state_formats(recorded).values()) == {formats.NOT_RECORDED}
    assert formats.operation_formats(recorded) == {"all": formats.NOT_RECORDED}
    assert list(formats.activation_formats(recorded)) == [formats.NOT_RECORDED]


def test_without_a_gpu_no_time_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COURSE_SOURCE", "simulated")
    times = formats.step_times({"fp32": RUN})
    assert times.milliseconds == {}
    assert "no time to show" in formats.tell_times(times) and "course_utils record" in formats.tell_times(times)


def test_a_step_is_timed_and_told_next_to_the_first() -> None:
    assert formats.median_step(RUN.replace(precision="fp32"), Host()) > 0
    told = formats.tell_times(formats.StepTimes({"fp32": 30.0, "bf16": 10.0})).splitlines()
    assert "1.00 times as fast" in told[0] and "3.00 times as fast" in told[1]


WAYS = {name: TrainingRun("gpt2", 4, 1024, name, attention="efficient") for name in ("fp32", "tf32", "amp-bf16")}
"""The runs that lesson 03 times, or nearly."""

FOR_TWO = int(1.06 * estimate(WAYS["fp32"].replace(micro_batch=2)).total)


class Card(Host):
    """A device with so many bytes free."""

    def __init__(self, free: int, capability: tuple[int, int] = (9, 0)) -> None:
        super().__init__()
        vars(self).update(free=lambda: free, capability=lambda: capability)


@pytest.mark.parametrize(("memory", "micro_batch"), [(80 * GB, 4), (FOR_TWO, 2)])
def test_steps_that_are_timed_fit_what_is_free(memory: int, micro_batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[TrainingRun] = []
    monkeypatch.setattr(formats, "median_step", lambda run, device: trained.append(run) or 10.0)
    told = formats.tell_times(formats.step_times(WAYS, Card(memory)))
    assert [run.micro_batch for run in trained] == [micro_batch] * len(WAYS)
    assert all(fits(run, memory) for run in trained) and told.count("ms a step") == len(WAYS)
    assert ("these are steps of micro_batch=2" in told) == (micro_batch == 2)


def test_a_run_that_runs_out_of_memory_all_the_same_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(run: TrainingRun, device: Host) -> float:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has no room.")

    monkeypatch.setattr(formats, "median_step", step)
    times = formats.step_times(WAYS, Card(80 * GB, (7, 5)))
    assert times.milliseconds == {} and len(times.notes) == 3
    assert "fp32 is left out: " in times.notes[2] and "does not fit this GPU" in times.notes[2]
    assert all("older than Ampere" in note for note in times.notes[:2])
