"""How checks speak: one line, the misconception named, the expected value never."""

import sys
import traceback
import weakref
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from nbformat.v4 import new_code_cell, new_notebook

from course_utils.interactive.feedback import (
    EXITS,
    CheckFailed,
    call,
    call_for_effect,
    exercise,
    expect,
    fail,
    unit_slip,
)
from course_utils.interactive.notebook_runs import run
from course_utils.interactive.torch_settings import restore_defaults

SECRET = 123_456_789


def says(check: Callable[..., object], *given: Any, **named: Any) -> str:
    """The message with which `check` fails."""
    with pytest.raises(CheckFailed) as failure:
        check(*given, **named)
    return str(failure.value)


def giving(value: Any) -> Callable[..., Any]:
    """A learner's function that returns this."""
    return lambda *_, **__: value


def broken(size: int) -> float:
    return size / 0


def ends(size: int) -> None:
    sys.exit(size)


def test_right_answer_gets_one_friendly_line_after_what_a_long_check_says_first(
    capsys: pytest.CaptureFixture[str],
) -> None:
    @exercise("01.1", "Doubled.", first="This takes ten seconds.")
    def check(answer: Any) -> None:
        expect(all(call(answer, size=size) == 2 * size for size in (2, 9, 70_000)), "Twice, please.")

    check(lambda size: size + size)
    told = ["This takes ten seconds.", "✓ 01.1 Doubled.", "  Next: 01.2 Weigh a training run"]
    assert capsys.readouterr().out.splitlines() == told
    assert says(check, lambda size: size) == "Twice, please."
    assert capsys.readouterr().out.splitlines() == told[:1]


def test_notebook_shows_one_line_and_no_traceback(tmp_path: Path) -> None:
    said = {
        "raise NotSolved('Look\\n  again.')": "Not solved yet. Look again.",
        "call(lambda size: size / 0, size=3)": (
            "Not quite. Called with size=3, your function raised ZeroDivisionError: division by zero"
        ),
    }
    imports = "from course_utils.interactive.feedback import NotSolved, call\n"
    cells = [new_code_cell(imports + code) for code in said]
    shown = run(new_notebook(cells=cells), tmp_path, allow_errors=True).cells
    for cell, line in zip(shown, said.values(), strict=True):
        card, error = cell.outputs
        assert error.output_type == "error" and error.traceback == [line]
        opening, message = line.split(". ", 1)
        assert f"<b>{opening}.</b> {message}</div>" in card.data["text/html"]
        assert card.data["text/plain"] == ""


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (3, "without parentheses"),
        (broken, "Called with size=3, your function raised ZeroDivisionError"),
        (ends, EXITS),
        (giving(None), "does every path end in `return`?"),
        (giving("3 GB"), "returned a text, but the exercise asks for a number"),
        (giving(float("nan")), "not finite"),
        (lambda amount: 3, "should take (size)"),
    ],
)
def test_answers_that_are_no_answers_are_named(answer: Any, message: str) -> None:
    assert message in says(call, answer, size=3)


def test_an_answer_leaves_what_it_was_given_as_it_was_unless_it_may_change_it() -> None:
    def scales(weights: list[torch.Tensor], rate: float) -> float:
        weights[0].mul_(rate)
        return rate

    ones = [torch.ones(3)]
    assert "changes 'weights'" in says(call, scales, weights=ones, rate=0.5)
    assert "changes argument 1" in says(call, scales, [torch.ones(3)], 0.5)
    assert "changes 'table'" in says(call, lambda table: table.popitem()[1], table={"a": 1, "b": 2})
    assert call(scales, weights=ones, rate=0.5, may_change=("weights",)) == 0.5
    assert call(scales, ones, 0.5, may_change=(0,)) == 0.5
    assert ones[0].tolist() == [0.125] * 3
    assert call(len, torch.tensor([1.0, float("nan")])) == 2, "NaN has not changed"
    seen: list[int] = []
    call_for_effect(lambda kept: kept.append(1), seen)
    assert seen == [1] and "ZeroDivisionError" in says(call_for_effect, broken, size=3)


def test_a_check_that_fails_holds_nothing_that_the_answer_had() -> None:
    """A notebook keeps the last error, and with its frame torch 2.11's checkpoint keeps modes and hooks."""
    held = []

    def answer() -> None:
        tensor = torch.ones(3)
        held.append(weakref.ref(tensor))
        raise KeyError("x")

    with pytest.raises(CheckFailed, match="your function raised KeyError") as kept:
        exercise("01.1", "")(lambda answer: call(answer))(answer)
    assert held[0]() is None
    shown = "".join(traceback.format_exception(kept.value))
    assert "raise KeyError" in shown, "the traceback still shows every line"


WEIGHT = torch.ones(1, requires_grad=True)
HELD: list[Any] = []
"""What nothing frees: a mode may end with it."""


def spoil() -> None:
    """Change every setting of torch's that a learner is likely to change."""
    torch.set_default_dtype(torch.bfloat16)
    torch.set_default_device("meta")
    HELD.append(torch.inference_mode())
    HELD[-1].__enter__()
    torch.set_grad_enabled(False)
    torch.set_autocast_enabled("cpu", True)
    torch.set_autocast_enabled("cuda", True)
    torch.autograd.set_detect_anomaly(True)
    torch.use_deterministic_algorithms(True)
    torch.set_float32_matmul_precision("medium")


def expect_defaults() -> None:
    tensor = torch.ones(2, 2)
    assert tensor.dtype == (tensor @ tensor).dtype == torch.float32
    assert tensor.device.type == "cpu" and not tensor.is_inference()
    assert (WEIGHT * 2).requires_grad
    assert not torch.is_autocast_enabled("cuda") and not torch.is_anomaly_enabled()
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.fixture
def defaults() -> Iterator[None]:
    yield
    restore_defaults()


@pytest.mark.usefixtures("defaults")
def test_a_check_begins_and_ends_with_torchs_defaults_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    @exercise("01.1", "")
    def check(answer: Any) -> None:
        expect_defaults()
        answer()
        fail("Wrong.")

    spoil()
    assert says(check, lambda: None) == "Wrong."
    expect_defaults()
    before = capsys.readouterr().out
    assert says(check, spoil) == "Wrong."
    expect_defaults()
    after = capsys.readouterr().out
    assert before.startswith("Before this check, torch's settings were changed: ")
    assert after.startswith("Your answer left torch's settings changed: ")
    for said in (before, after):
        assert "default dtype was torch.bfloat16" in said and "float32 matmul precision was medium" in said
        assert said.endswith("The check restored torch's defaults.\n")


def test_an_answer_may_come_in_another_form() -> None:
    for three in (3.0, np.float32(3), np.array(3), torch.tensor(3), Fraction(3)):
        assert call(giving(three)) == 3
        got = call(giving(three), returns=(int, str))
        assert got == 3 and type(got) is int
    assert call(giving(torch.tensor([3, 4])), returns=tuple) == (3, 4)
    tensor = torch.tensor(3.0)
    assert call(giving(tensor), returns=torch.Tensor) is tensor
    assert call(giving(np.bool_(True)), returns=bool) is True
    assert call(giving(np.float32("inf")), finite=False) == float("inf")
    assert call(giving(None), returns=tuple | None) is None


def test_slips_of_units_are_recognized_and_the_value_is_not_told() -> None:
    slips = {
        2**30 / 10**9: "off by 1.074: GB where GiB was asked?",
        1 / 8: "8 times too small",
        10**9: "bytes where GB was asked?",
        1 / 10**6: "MB where bytes were asked?",
    }
    for factor, slip in slips.items():
        message = unit_slip(SECRET * factor, SECRET)
        assert message is not None and slip in message and str(SECRET) not in message
    for got in (SECRET * 2, SECRET * 1.01, 0, -SECRET, "text", None):
        assert unit_slip(got, SECRET) is None
