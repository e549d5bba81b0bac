"""Floating-point formats bit by bit: numbers encoded and decoded exactly, and the colors of their bits.

A pattern is the integer that a number's bits make, sign first. A normal number is (−1)^s · 2^(E − bias) · (1
+ M/2^m), E and M being the exponent's and the mantissa's bits; with E = 0 it is *subnormal*, (−1)^s · 2^(1 −
bias) · M/2^m (IEEE 754-2019, section 3.4). Every number of these formats is a Python float too.
"""

from math import copysign, frexp, inf, isnan, ldexp, nan
from typing import NamedTuple

from ...errors import unknown


class NumberFormat(NamedTuple):
    """A format of a sign, `exponent` and `mantissa` bits, which takes `bytes` in memory.

    If it is `infinite`, its largest exponent stands for infinity and NaN, as in IEEE 754. fp8 E4M3 gives it
    to numbers, and keeps one pattern for NaN (Micikevicius et al. 2022, "FP8 Formats for Deep Learning",
    table 1).
    """

    name: str
    exponent: int
    mantissa: int
    bytes: int
    infinite: bool = True

    @property
    def bits(self) -> int:
        """Bits that carry information: 19 for tf32, though it is stored in 32."""
        return 1 + self.exponent + self.mantissa

    @property
    def bias(self) -> int:
        """The number that is subtracted from the exponent's bits."""
        return 2 ** (self.exponent - 1) - 1

    @property
    def epsilon(self) -> float:
        """The distance from 1 to the next larger number: 2^−m."""
        return 2.0**-self.mantissa

    @property
    def largest(self) -> float:
        """The largest finite number."""
        return decode(self, self.largest_pattern)

    @property
    def smallest_normal(self) -> float:
        """The smallest number with all its mantissa bits."""
        return 2.0 ** (1 - self.bias)

    @property
    def smallest(self) -> float:
        """The smallest number above zero, a subnormal."""
        return 2.0 ** (1 - self.bias - self.mantissa)

    @property
    def largest_pattern(self) -> int:
        """The pattern of the largest finite number."""
        reserved = 2**self.mantissa if self.infinite else 1  # for infinity and NaN
        return 2 ** (self.exponent + self.mantissa) - 1 - reserved

    def fields(self, pattern: int) -> tuple[int, int, int]:
        """Return sign, exponent and mantissa of a pattern."""
        magnitude = pattern & (2 ** (self.bits - 1) - 1)
        return pattern >> (self.bits - 1), magnitude >> self.mantissa, magnitude & (2**self.mantissa - 1)


_FORMATS_OF_TRAINING = (
    NumberFormat("fp32", 8, 23, 4),
    # what Ampere's matrix units read of an fp32 number; memory holds all 32 bits
    NumberFormat("tf32", 8, 10, 4),
    NumberFormat("bf16", 8, 7, 2),
    NumberFormat("fp16", 5, 10, 2),
    NumberFormat("fp8-e4m3", 4, 3, 1, infinite=False),
    NumberFormat("fp8-e5m2", 5, 2, 1),
)
FORMATS = {form.name: form for form in _FORMATS_OF_TRAINING}
# colors of fields, and of bits not read
SIGN = "#D55E00"
EXPONENT = "#E69F00"
MANTISSA = "#8FD0F7"
UNUSED = "#F2F2F2"


def number_format(name: str | NumberFormat) -> NumberFormat:
    """Return the format of that name, or the one that is given. Raises ValueError for an unknown name."""
    if isinstance(name, NumberFormat):
        return name
    if name not in FORMATS:
        raise unknown("number format", name, FORMATS)
    return FORMATS[name]


def decode(form: str | NumberFormat, pattern: int) -> float:
    """Return the number of a pattern, exactly; infinity or NaN where the format means that."""
    form = number_format(form)
    sign, exponent, mantissa = form.fields(pattern)
    if pattern & (2 ** (form.bits - 1) - 1) > form.largest_pattern:
        return copysign(inf, -sign) if form.infinite and mantissa == 0 else nan
    # An exponent of 0 marks a subnormal number: the same scale as an exponent of 1, without the leading 1.
    whole = mantissa + 2**form.mantissa if exponent else mantissa
    size = ldexp(whole, max(exponent, 1) - form.bias - form.mantissa)
    return -size if sign else size


def encode(form: str | NumberFormat, value: float) -> int:
    """Return the pattern nearest to `value`, ties to even; beyond the largest that of infinity or NaN."""
    form = number_format(form)
    sign = int(copysign(1.0, value) < 0) << (form.bits - 1)
    if isnan(value):
        return 2 ** (form.bits - 1) - 1
    size = min(abs(value), 2 * form.largest)  # what is further out, infinity too, gets the same pattern
    exponent = 1 - form.bias  # the smallest, of subnormal numbers and of zero too
    if size:
        exponent = max(frexp(size)[1] - 1, exponent)
    # in units of the last bit; Python's round takes the even one of two as near
    units = round(ldexp(size, form.mantissa - exponent))
    # For normal numbers 2^m is their leading 1, which no bit holds; for subnormal ones it undoes E = 1.
    # Units that were rounded up to the next power of two carry into the exponent, as they should.
    pattern = ((exponent + form.bias) << form.mantissa) + units - 2**form.mantissa
    return sign | min(pattern, form.largest_pattern + 1)  # infinity's pattern; in E4M3, that of NaN


def rounded(form: str | NumberFormat, value: float) -> float:
    """Return `value` as the format holds it."""
    return decode(form, encode(form, value))


def spelled(value: float, digits: int = 7) -> str:
    """Return a number in at most `digits` digits, as a figure shows it."""
    return f"{value:.{digits}g}".replace("e-0", "e-").replace("e+0", "e").replace("e+", "e").replace("-", "−")


def field_color(form: NumberFormat, index: int) -> str:
    """Return the color of the bit at `index`, 0 being the sign."""
    if index >= form.bits:
        return UNUSED
    if index == 0:
        return SIGN
    return EXPONENT if index <= form.exponent else MANTISSA
