"""Number formats: every pattern of torch's own formats decodes and encodes as torch does it."""

import math
import re
from itertools import pairwise

import pytest
import torch

from course_utils.lessons.precision.number_formats import (
    FORMATS,
    bits_figure,
    decode,
    encode,
    number_format,
    rounded,
)

OURS = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8-e4m3": torch.float8_e4m3fn,
    "fp8-e5m2": torch.float8_e5m2,
}
VIEWS = {1: torch.uint8, 2: torch.int16}


def torchs_numbers(name: str) -> list[float]:
    """Every number of a format, by pattern, as torch reads it."""
    form = FORMATS[name]
    patterns = torch.arange(2**form.bits, dtype=torch.int64)
    return patterns.to(VIEWS[form.bytes]).view(OURS[name]).double().tolist()


def same(one: float, other: float) -> bool:
    return repr(one) == repr(other) or (math.isnan(one) and math.isnan(other))


@pytest.mark.parametrize("name", OURS)
def test_every_pattern_is_the_number_that_torch_reads(name: str) -> None:
    numbers = torchs_numbers(name)
    assert all(same(decode(name, pattern), number) for pattern, number in enumerate(numbers))
    assert all(
        encode(name, number) == pattern for pattern, number in enumerate(numbers) if math.isfinite(number)
    )


@pytest.mark.parametrize("name", OURS)
def test_rounding_is_torchs(name: str) -> None:
    """Random numbers of all magnitudes, and all midpoints of neighbors, where rounding goes wrong."""
    form = FORMATS[name]
    dice = torch.Generator().manual_seed(0)
    powers = torch.empty(2000, dtype=torch.float64).uniform_(
        -48, math.log2(form.largest) - 0.1, generator=dice
    )
    finite = sorted({number for number in torchs_numbers(name) if math.isfinite(number)})[
        :: max(1, form.bits**2 // 80)
    ]
    middles = [(one + other) / 2 for one, other in pairwise(finite)]
    values = [*torch.exp2(powers).tolist(), *middles]
    wanted = torch.tensor(values, dtype=torch.float32).to(OURS[name]).double().tolist()
    exact = torch.tensor(values, dtype=torch.float32).tolist()  # torch rounds from fp32, so we do
    assert all(same(rounded(name, value), number) for value, number in zip(exact, wanted, strict=True))


@pytest.mark.parametrize("name", ["fp32", *OURS])
def test_limits_are_torchs(name: str) -> None:
    form = FORMATS[name]
    known = torch.finfo(OURS.get(name, torch.float32))
    assert (form.largest, form.smallest_normal, form.epsilon) == (known.max, known.smallest_normal, known.eps)
    assert form.smallest == form.smallest_normal * form.epsilon


def test_fp32_agrees_bit_for_bit() -> None:
    values = torch.tensor([0.0, -0.0, 1.0, 0.1, -3.14159, 1e-42, 3.4e38, 2.0**-149])
    patterns = values.view(torch.int32).tolist()
    assert [encode("fp32", value) for value in values.tolist()] == [
        pattern & 0xFFFFFFFF for pattern in patterns
    ]


def test_beyond_the_largest() -> None:
    assert rounded("fp16", 65_519.0) == 65_504 and rounded("fp16", 65_520.0) == math.inf
    assert rounded("fp16", -1e9) == -math.inf == rounded("fp16", -math.inf)
    assert rounded("fp8-e4m3", 460.0) == 448 and math.isnan(rounded("fp8-e4m3", 500.0))
    assert math.isnan(rounded("bf16", math.nan))


def test_tf32_has_bf16s_range_and_fp16s_precision() -> None:
    tf32 = FORMATS["tf32"]
    assert (tf32.bits, tf32.bytes, tf32.epsilon) == (19, 4, FORMATS["fp16"].epsilon)
    assert tf32.smallest_normal == FORMATS["bf16"].smallest_normal


def test_unknown_formats_are_refused() -> None:
    with pytest.raises(ValueError, match=r"unknown number format 'fp61'.*fp16"):
        number_format("fp61")


def test_bits_are_drawn_as_they_are_stored() -> None:
    figure = bits_figure(0.1, "A tenth is in none of them.")
    wanted = "".join(f"{encode(form, 0.1):0{form.bits}b}" for form in FORMATS.values())
    for layout in (figure.svg, figure.narrow):
        assert "".join(re.findall(r'data-bit="([01]?)"', layout)) == wanted
    assert figure.alt.startswith("A tenth is in none of them.") and "bf16 holds 0.1000976562" in figure.alt
    assert "fp32 holds 0.1000000015" in figure.alt  # not 0.1, which no row has
