"""Lesson 03's figures, its account of bytes, the bit-flipper; what its texts say of PyTorch's arithmetic."""

import re
from typing import Any

import pytest
import torch
from torch_statements import SOURCES, cells

from course_utils import TrainingRun, measure, on_gpu
from course_utils.lessons.precision import formats_in_a_step as formats
from course_utils.lessons.precision.figures import flow_figure, histogram_figure
from course_utils.lessons.precision.number_formats import FORMATS, encode
from course_utils.lessons.precision.widget import bit_flipper, bit_name, neighbors, sum_of
from course_utils.lessons.shared.language_model import HalfProducts, batches, language_model


def test_the_histogram_counts_what_is_lost() -> None:
    figure = histogram_figure(torch.tensor([2.0**-30, 2.0**-20, 2.0**-10, 1.0]), "A quarter is lost.")
    assert "fp16 turns 25 % of the gradients into zero" in figure.alt
    scaled = histogram_figure(torch.tensor([2.0**-30, 2.0**-20]), "Nothing is lost.", scale=2**12)
    assert "0 % of the gradients times 4,096" in scaled.alt
    assert sum(int(count) for count in re.findall(r"<title>(\d+) of 2\^", figure.svg)) == 4
    # half of the smallest number is rounded to even: to 0
    just_lost = 2.0**-25
    just_kept = 2.0**-25 * (1 + 2**-10)
    assert encode("fp16", just_lost) == 0 and encode("fp16", just_kept) == 1
    assert "fp16 turns 50 %" in histogram_figure(torch.tensor([just_lost, just_kept]), "Half is lost.").alt


def test_the_flow_names_every_step() -> None:
    figure = flow_figure("Sums are fp32.")
    names = (
        "input x",
        "weights W",
        "output y",
        "dL/dy",
        "dL/dW",
        "dL/dx",
        "fp32 gradients",
        "master weights",
    )
    assert all(name in figure.alt for name in names)
    assert figure.svg.count('Z"') == figure.narrow.count('Z"') == 15, "an arrow without a head"


def test_products_of_a_layer_are_added_in_fp32_and_rounded_once_as_the_flow_says() -> None:
    dice = torch.Generator().manual_seed(0)
    dy, x, W = (
        torch.randint(-16, 17, shape, generator=dice).bfloat16() for shape in ((512, 8), (512, 6), (8, 6))
    )
    for one, other in ((x, W.T), (dy.T, x), (dy, W)):
        exact = one.float() @ other.float()  # whole numbers: nothing of the sum is rounded
        assert torch.equal(one @ other, exact.bfloat16())
    assert not torch.equal((dy.T @ x).float(), dy.float().T @ x.float()), "dL/dW is rounded"


def test_autocast_rounds_each_weight_gradient_before_it_is_added_in_fp32() -> None:
    torch.manual_seed(0)
    layer = torch.nn.Linear(64, 64, bias=False)
    sums = torch.empty(0)
    for place in range(3):
        x = torch.randn(512, 64)
        with torch.autocast("cpu", torch.bfloat16):
            y = layer(x)
        (y.float().square().sum() / 512).backward()
        assert layer.weight.grad is not None and layer.weight.grad.dtype == torch.float32
        sums = layer.weight.grad.clone()
        assert place or torch.equal(sums, sums.bfloat16().float()), "the first is a bf16 number, in fp32"
    assert not torch.equal(sums, sums.bfloat16().float()), "the sum is not"


def test_on_a_gpu_partial_sums_may_be_rounded_to_16_bits_by_default() -> None:
    assert torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    assert torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction


def test_convolutions_run_in_16_bits_under_autocast_and_norms_powers_and_softmax_do_not() -> None:
    nn = torch.nn
    with on_gpu():
        x = torch.randn(2, 8, 8, device="cuda")
        layers = [nn.Conv1d(8, 8, 3).to("cuda"), nn.Linear(8, 8).to("cuda"), lambda x: x @ x]
        wide = [
            nn.LayerNorm(8).to("cuda"),
            nn.Softmax(-1),
            lambda x: x.pow(2),
            lambda x: nn.functional.mse_loss(x, x),
        ]
        with torch.autocast("cuda", torch.bfloat16):
            assert all(layer(x).dtype == torch.bfloat16 for layer in layers)
            assert all(layer(x.bfloat16()).dtype == torch.float32 for layer in wide)
            assert nn.functional.gelu(x).dtype == torch.float32
            assert nn.functional.gelu(x.bfloat16()).dtype == torch.bfloat16


def test_sgd_in_fp16_alone_learns_as_in_fp32_where_adam_does_not() -> None:
    ends = {}
    for dtype in (torch.float32, torch.float16):
        model = language_model(seed=0).to(dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for tokens, targets in batches(30, seed=0):
            with HalfProducts():
                loss = torch.nn.functional.cross_entropy(
                    model(tokens).float().flatten(0, 1), targets.flatten()
                )
            ends.setdefault(dtype, []).append(loss.item())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert ends[torch.float16][-1] == pytest.approx(ends[torch.float32][-1], abs=0.1)
    assert ends[torch.float16][0] - ends[torch.float16][-1] > 0.3


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
    # 122,880 halfway, which fp16 does not have
    up_and_down = torch.tensor([60.0] * 2048 + [-60.0] * 2048).half()
    assert up_and_down.sum() == 0 and up_and_down.cumsum(0).max().isinf(), "kernels add up in fp32"


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
    assert "is not a number" in shown.message and shown.value == torch.tensor(0.1).item()


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
    "precision", ["fp32", "amp-bf16", "bf16-master", "bf16-master-fp32grad", "bf16", "fp16-master"]
)
def test_bytes_that_stay_are_those_of_the_closed_forms(precision: str) -> None:
    run = RUN.replace(precision=precision)
    assert formats.estimated_states(run) == formats.measured_states(measure(run, source="simulated"))
    assert (
        formats.per_parameter({"parameters": 20, "gradients": 40, "optimizer_states": 120}, 10)
        == "2 + 4 + 12 = 18"
    )


def test_fp16_needs_its_scaler_and_bf16_its_masters_at_a_low_rate() -> None:
    lesson: dict[str, Any] = {}
    for part in ("import cross_entropy", "def train_in_fp16(", "def train("):
        exec(
            "import torch\nfrom course_utils.lessons.shared.language_model import language_model\n"
            + cell(part),
            lesson,
        )
    scaled, alone = (
        lesson["train_in_fp16"](torch.amp.GradScaler("cpu", enabled=on), steps=60)[0] for on in (True, False)
    )
    assert scaled[-1] < alone[-1] - 0.5 and scaled[0] - scaled[-1] > 0.8
    moved = {}
    for masters in (False, True):
        model = language_model(seed=0).bfloat16()
        first = [weight.detach().clone() for weight in model.parameters()]
        held = (
            [weight.detach().float() for weight in model.parameters()]
            if masters
            else list(model.parameters())
        )
        lesson["train"](model, held, rate=1e-5, steps=40)
        same = sum(int((now == old).sum()) for now, old in zip(model.parameters(), first, strict=True))
        moved[masters] = 1 - same / sum(weight.numel() for weight in first)
    assert moved[True] > 2 * moved[False]


def cell(part: str) -> str:
    """The code cell of lesson 03 in which `part` stands."""
    return next(code for code in cells(SOURCES / "03_mixed_precision.py") if part in code)
