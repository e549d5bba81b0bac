"""The bit-flipper: a number in a format, each of its bits a button. Only notebooks import this module."""

from contextlib import suppress
from html import escape
from math import isfinite, isnan
from typing import Any

import ipywidgets

from ...interactive.html_bars import SHEET, HtmlPicture, Picture
from ...interactive.widgets import LAYOUT, STYLE, SliderBox, dropdown
from ...palette import QUIET, ink_on, stop
from .number_formats import FORMATS, UNUSED, NumberFormat, decode, encode, field_color, rounded, spelled


class BitFlipper(SliderBox):
    """Buttons for the bits of one number, a field for its value, and formats that round it again."""

    invitation = "Bits to flip: run this cell to use them."

    def __init__(self, form: str = "bf16", value: float = 1.0) -> None:
        self.asked = float(value)
        self.pattern = encode(form, value)
        self.busy = False
        self.form = FORMATS[form]
        self.bits = [ipywidgets.ToggleButton(layout={"width": "26px", "padding": "0"}) for _ in range(32)]
        for bit in self.bits:
            bit.observe(self.flip, names="value")
        number = ipywidgets.Text(value=f"{value:g}", description="number", style=STYLE, layout=LAYOUT)
        number.continuous_update = False
        super().__init__({"format": dropdown("format", FORMATS, form), "number": number})

    def parts(self) -> list[Any]:
        """The controls, the bits in a row, and the picture."""
        rows = (list(self.controls.values()), self.bits)
        return [*(ipywidgets.HBox(row, layout={"flex_flow": "row wrap"}) for row in rows), self.picture]

    @property
    def value(self) -> float:
        """The number that the bits make."""
        return decode(self.form, self.pattern)

    def flip(self, change: Any) -> None:
        """Take the pattern from the buttons when one was pressed."""
        if not self.busy:
            pressed = (str(int(bit.value)) for bit in self.bits[: self.form.bits])
            self.pattern = int("".join(pressed), 2)
            self.asked = self.value
            self.set_buttons(repr(self.value) if isfinite(self.value) else "")

    def update(self, change: object = None) -> None:
        """Round the number again when it or the format was chosen, then draw."""
        if self.busy:
            return
        before = self.form
        typed = self.controls["number"].value
        self.form = FORMATS[self.controls["format"].value]
        if before is self.form:
            with suppress(ValueError):  # what is no number leaves the bits alone, and `redraw` says so
                self.asked = float(typed)
        self.pattern = encode(self.form, self.asked)
        self.set_buttons(typed)

    def set_buttons(self, typed: str) -> None:
        """Set the buttons and the field to what has been chosen, then draw.

        `busy` keeps the observers of these controls from taking it for a learner's choice.
        """
        self.busy = True
        self.controls["number"].value = typed
        for index, bit in enumerate(self.bits):
            bit.layout.display = None if index < self.form.bits else "none"
            if index < self.form.bits:
                bit.value = bool(self.pattern >> (self.form.bits - 1 - index) & 1)
                bit.description = str(int(bit.value))
                bit.style.button_color = field_color(self.form, index)
                bit.tooltip = bit_name(self.form, index)
        self.busy = False
        super().update()

    def redraw(self) -> tuple[Picture, str]:
        """Return the bits with their sum, and the numbers on either side. ValueError for no number."""
        typed = self.controls["number"].value
        try:
            float(typed or 0)
        except ValueError:
            raise ValueError(f"{typed!r} is not a number: write 0.1 or 1e-8") from None
        return flipped_figure(self.form, self.pattern, self.asked), escape(neighbors(self.form, self.pattern))


bit_flipper = BitFlipper


def bit_name(form: NumberFormat, index: int) -> str:
    """Return what the bit at `index` is worth, 0 being the sign."""
    if index == 0:
        return "sign: minus when it is 1"
    if index <= form.exponent:
        return f"exponent: counts {2 ** (form.exponent - index):,}"
    return f"mantissa: counts 1/{2 ** (index - form.exponent):,}"


def sum_of(form: NumberFormat, pattern: int) -> str:
    """Return a pattern's number as the formula has it: "+ 2^(127 − 127) · (1 + 26/128)"."""
    sign, exponent, mantissa = form.fields(pattern)
    plus = "−" if sign else "+"
    whole = 2**form.mantissa
    if pattern & (2 ** (form.bits - 1) - 1) > form.largest_pattern:
        return f"{plus}: the largest exponent is set aside for infinity and NaN" if form.infinite else "NaN"
    if exponent == 0:
        if mantissa == 0:
            return f"{plus} 0"
        return f"{plus} 2^(1 − {form.bias}) · {mantissa:,}/{whole:,}, a subnormal number"
    return f"{plus} 2^({exponent} − {form.bias}) · (1 + {mantissa:,}/{whole:,})"


def neighbors(form: NumberFormat, pattern: int) -> str:
    """Return the next numbers toward and away from zero as text."""
    sign = pattern >> (form.bits - 1) << (form.bits - 1)
    magnitude = pattern & (2 ** (form.bits - 1) - 1)
    if magnitude > form.largest_pattern:
        return f"The largest finite number of {form.name} is {spelled(form.largest)}."
    toward = f"Next toward zero: {spelled(decode(form, sign | (magnitude - 1)))}. " if magnitude else ""
    return f"{toward}Next away from zero: {spelled(decode(form, sign | (magnitude + 1)))}."


def flipped_figure(form: NumberFormat, pattern: int, asked: float) -> HtmlPicture:
    """One number's bits, large, with its sum below."""
    value = decode(form, pattern)
    nearest = "" if asked == rounded(form, asked) or isnan(asked) else f", the nearest to {spelled(asked)}"
    title = f"In {form.name}: {spelled(value)}{nearest}"
    limits = [f"{name} {spelled(getattr(form, name))}" for name in ("epsilon", "largest", "smallest")]
    told = "not a number" if isnan(value) else " · ".join(limits)
    read = f"{pattern:0{form.bits}b}"
    cells = "".join(bit_cell(field_color(form, index), bit) for index, bit in enumerate(read))
    cells += bit_cell(UNUSED, "") * (8 * form.bytes - form.bits)
    inside = (
        f"<div style='font-weight:bold;font-size:16px'>{escape(title)}</div>"
        f"<div style='display:flex;margin:8px 0'>{cells}</div>"
        f"<div style='font-size:16px'>{sum_of(form, pattern)}</div><div style='color:{QUIET}'>{told}</div>"
    )
    alt = f"{stop(title)} Its {form.bits} bits stand for {sum_of(form, pattern)}."
    return HtmlPicture(f"<div role='img' aria-label='{escape(alt)}' style='{SHEET}'>{inside}</div>", alt)


def bit_cell(color: str, bit: str) -> str:
    look = f"flex:1;max-width:40px;height:28px;background:{color};color:{ink_on(color)}"
    look += ";box-shadow:inset -1px 0 #fff;text-align:center;font:12px/28px sans-serif"
    return f"<div style='{look}'>{bit}</div>"
