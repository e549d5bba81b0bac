"""How checks speak: one line, the misconception named, the expected value never."""

import subprocess
import sys
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from fractions import Fraction
from functools import partial
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from nbformat.v4 import new_code_cell, new_notebook

from course_utils.interactive.feedback import (
    EXITS,
    CheckFailed,
    alike,
    call,
    call_for_effect,
    entries,
    exercise,
    expect,
    fail,
    of_kind,
    unit_slip,
)
from course_utils.interactive.notebook_runs import run
from course_utils.interactive.torch_settings import restore_defaults

SECRET = 123_456_789


def says(check: Callable[[], object]) -> str:
    """The message with which `check` fails."""
    with pytest.raises(CheckFailed) as failure:
        check()
    return str(failure.value)


def broken(size: int) -> float:
    return size / 0


def test_an_answer_leaves_what_it_was_given_as_it_was() -> None:
    def sorts(sizes: list[int]) -> int:
        sizes.sort()
        return sizes[0]

    def scales(weights: list[torch.Tensor], rate: float) -> float:
        weights[0].mul_(rate)
        return rate

    assert "changes 'sizes'" in says(lambda: call(sorts, sizes=[3, 1]))
    assert "changes argument 1" in says(lambda: call(sorts, [3, 1], returns=Real | None))
    assert "changes 'weights'" in says(lambda: call(scales, weights=[torch.ones(3)], rate=0.5))
    assert "changes 'table'" in says(lambda: call(lambda table: table.popitem()[1], table={"a": 1, "b": 2}))


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


def test_what_an_answer_may_change_is_no_mistake() -> None:
    momentum = torch.zeros(2)

    def step(weights: torch.Tensor, momenta: list[torch.Tensor]) -> torch.Tensor:
        momenta[0].add_(1)
        return weights - momenta[0]

    call(step, weights=torch.ones(2), momenta=[momentum], returns=torch.Tensor, may_change=("momenta",))
    call(step, torch.ones(2), [momentum], returns=torch.Tensor, may_change=(1,))
    seen: list[int] = []
    call_for_effect(lambda kept: kept.append(1), seen)
    assert momentum.tolist() == [2.0, 2.0] and seen == [1]
    assert "ZeroDivisionError" in says(lambda: call_for_effect(broken, size=3))
    assert "without parentheses" in says(lambda: call_for_effect(None, 3))
    assert call(lambda values: len(values), values=torch.tensor([1.0, float("nan")])) == 2


def test_notebook_shows_one_line_and_no_traceback(tmp_path: Path) -> None:
    said = {
        "raise NotSolved('Look\\n  again.')": "Not solved yet. Look again.",
        "raise CheckFailed('Look.')": "Not quite. Look.",
        "call(lambda size: size / 0, size=3)": (
            "Not quite. Called with size=3, your function raised ZeroDivisionError: division by zero"
        ),
    }
    imports = "from course_utils.interactive.feedback import CheckFailed, NotSolved, call\n"
    cells = [new_code_cell(imports + code) for code in said]
    shown = run(new_notebook(cells=cells), tmp_path, allow_errors=True).cells
    for cell, line in zip(shown, said.values(), strict=True):
        card, error = cell.outputs
        assert error.output_type == "error" and error.traceback == [line]
        opening, message = line.split(". ", 1)
        assert f"<b>{opening}.</b> {message}</div>" in card.data["text/html"]
        assert card.data["text/plain"] == ""


LEAVES: dict[str, tuple[Callable[[], object], Callable[[], object], str]] = {
    "dtype": (
        lambda: torch.set_default_dtype(torch.bfloat16),
        lambda: torch.ones(1).dtype == torch.float32,
        "default dtype was torch.bfloat16",
    ),
    "device": (
        lambda: torch.set_default_device("meta"),
        lambda: not torch.ones(1).is_meta,
        "default device was meta",
    ),
    "absent device": (
        lambda: torch.set_default_device("cuda"),
        lambda: torch.ones(1).device.type == "cpu",
        "default device was ",
    ),
    "grad mode": (
        lambda: torch.set_grad_enabled(False),
        lambda: (WEIGHT * 2).requires_grad,
        "grad mode was False",
    ),
    "a generator": (
        lambda: next(held(without_gradients())),
        lambda: (WEIGHT * 2).requires_grad,
        "grad mode was False",
    ),
    "inference": (
        lambda: held(torch.inference_mode()).__enter__(),
        lambda: not torch.ones(1).is_inference(),
        "inference mode was True",
    ),
    "autocast": (
        lambda: torch.set_autocast_enabled("cpu", True),
        lambda: (SQUARE @ SQUARE).dtype == torch.float32,
        "autocast on the CPU was True",
    ),
    "autocast GPU": (
        lambda: torch.set_autocast_enabled("cuda", True),
        lambda: not torch.is_autocast_enabled("cuda"),
        "autocast on the GPU was True",
    ),
    "anomaly": (
        lambda: torch.autograd.set_detect_anomaly(True),
        lambda: not torch.is_anomaly_enabled(),
        "anomaly detection was True",
    ),
    "deterministic": (
        lambda: torch.use_deterministic_algorithms(True),
        lambda: not torch.are_deterministic_algorithms_enabled(),
        "deterministic mode was 2",
    ),
    "precision": (
        lambda: torch.set_float32_matmul_precision("medium"),
        lambda: torch.get_float32_matmul_precision() == "highest",
        "float32 matmul precision was medium",
    ),
}
WEIGHT = torch.ones(1, requires_grad=True)
SQUARE = torch.ones(2, 2)


def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        while True:
            yield


HELD: list[Any] = []


def held(thing: Any) -> Any:
    """The thing, which nothing frees: a mode may end with it."""
    HELD.append(thing)
    return thing


@pytest.fixture
def defaults() -> Iterator[None]:
    yield
    restore_defaults()


@pytest.mark.usefixtures("defaults")
@pytest.mark.parametrize("wrong", [False, True])
@pytest.mark.parametrize(("leave", "as_ever", "said"), LEAVES.values(), ids=LEAVES)
def test_a_check_begins_and_ends_with_torchs_defaults_and_says_so(
    leave: Callable[[], object],
    as_ever: Callable[[], bool],
    said: str,
    wrong: bool,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def check(answer: Any) -> None:
        assert as_ever(), "the check begins with torch's defaults"
        answer()
        expect(not wrong, "Wrong.")

    assert as_ever()
    leave()
    with pytest.raises(CheckFailed) if wrong else nullcontext():
        exercise("01.1", "")(check)(lambda: None)
    before = capsys.readouterr().out
    assert as_ever() and before.startswith(f"Before this check, torch's settings were changed: {said}")
    with pytest.raises(CheckFailed) if wrong else nullcontext():
        exercise("01.1", "")(check)(leave)
    after = capsys.readouterr().out
    assert as_ever() and after.startswith(f"Your answer left torch's settings changed: {said}")
    assert "The check restored torch's defaults.\n" in before
    assert "The check restored torch's defaults.\n" in after


def test_a_setting_that_a_with_around_the_check_holds_comes_back_after_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with torch.no_grad():
        exercise("01.1", "")(lambda: expect((WEIGHT * 2).requires_grad, "No gradients."))()
    assert torch.is_grad_enabled() and "grad mode was False" in capsys.readouterr().out
    with torch.device("meta"):  # which a check cannot take back
        exercise("01.1", "")(lambda: None)()
        assert torch.ones(1).is_meta
    assert not torch.ones(1).is_meta and "default device" not in capsys.readouterr().out


def ending(code: Any) -> Callable[..., Any]:
    """A learner's function that ends the program."""

    def answer(size: int = 3) -> None:
        sys.exit(code)

    return answer


def test_an_answer_that_ends_the_program_is_told_what_to_do_instead() -> None:
    check = exercise("01.1", "")(lambda answer: answer())
    for code in (None, 0, 1, "the end"):
        assert says(partial(call, ending(code), size=3)) == EXITS
        assert says(partial(check, ending(code))) == EXITS
    assert "`return`" in EXITS


def test_right_answer_gets_one_friendly_line(capsys: pytest.CaptureFixture[str]) -> None:
    @exercise("01.1", "Doubled, and for every size.")
    def check(answer: Any) -> None:
        expect(all(call(answer, size=size) == 2 * size for size in (2, 9, 70_000)), "Twice, please.")

    check(lambda size: size + size)
    told = "✓ 01.1 Doubled, and for every size.\n  Next: 01.2 Weigh a training run\n"
    assert capsys.readouterr().out == told
    with pytest.raises(CheckFailed):
        check(lambda size: size)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (3, "without parentheses"),
        (broken, "ZeroDivisionError"),
        (lambda size: None, "does every path end in `return`?"),
        (lambda size: "3 GB", "returned a text, but the exercise asks for a number"),
        (lambda size: [size], "returned a list, but the exercise asks for a number"),
        (lambda size: True, "returned True or False, but the exercise asks for a number"),
        (lambda size: float("nan"), "not finite"),
        (lambda: 3, "should take (size)"),
        (lambda amount: 3, "should take (size)"),
    ],
)
def test_answers_that_are_no_answers_are_named(answer: Any, message: str) -> None:
    assert message in says(lambda: call(answer, size=3))
    long = says(lambda: call(lambda *_, **__: None, 7, size=10**6, unit="GB", rows=list(range(1000))))
    assert "Called with 7, size=1_000_000, unit='GB', rows=[0, 1" in long and len(long) < 200


def giving(value: Any) -> Callable[[], Any]:
    """A learner's function that returns this."""
    return lambda: value


THREES = [3, 3.0, np.int64(3), np.float32(3), np.array(3), torch.tensor(3), Fraction(3)]


@pytest.mark.parametrize("three", THREES)
@pytest.mark.parametrize("kind", [Real, int, (int, str)])
def test_a_number_in_another_form_is_the_same_number(three: Any, kind: Any) -> None:
    got = call(lambda: three, returns=kind)
    assert got == 3 and (kind is Real or type(got) is int)
    for pair in ((3, 4), [3, 4], np.array([3, 4]), torch.tensor([3, 4])):
        assert call(giving(pair), returns=tuple) == (3, 4)
        assert list(call(giving(pair), returns=(tuple, list))) == [3, 4]


def test_other_forms_are_not_taken_for_what_they_are_not() -> None:
    tensor = torch.tensor(3.0)
    assert call(lambda: tensor, returns=torch.Tensor) is tensor
    assert "not finite" in says(lambda: call(lambda: np.float32("nan")))
    said = says(lambda: call(lambda: torch.tensor(3.5), returns=int))
    assert "but the exercise asks for a whole number" in said
    assert "returned True or False" in says(lambda: call(lambda: np.bool_(True)))
    said = says(lambda: call(lambda: np.ones(3), returns=torch.Tensor))
    assert "an array, but the exercise asks for a T" in said
    assert call(lambda: np.bool_(True), returns=bool) is True
    assert call(lambda: np.float32("inf"), finite=False) == float("inf")
    assert "but the exercise asks for a number" in says(lambda: call(lambda: "inf", finite=False))
    assert of_kind("backward", (str, int)) == "backward" and of_kind(True, bool) is True
    assert "but the exercise asks for a text or a whole number" in says(lambda: of_kind(0.5, (str, int)))


@pytest.mark.parametrize(
    ("factor", "slip"),
    [
        (2**30 / 10**9, "off by 1.074: GB where GiB was asked?"),
        (10**9 / 2**30, "off by 0.931: GiB where GB was asked?"),
        (2**20 / 10**6, "off by 1.049: MB where MiB was asked?"),
        (8, "bits instead of bytes"),
        (1 / 8, "8 times too small"),
        (10**9, "bytes where GB was asked?"),
        (2**30, "bytes where GiB was asked?"),
        (1 / 10**6, "MB where bytes were asked?"),
    ],
)
def test_slips_of_units_are_recognized(factor: float, slip: str) -> None:
    message = unit_slip(SECRET * factor, SECRET)
    assert message is not None and slip in message
    assert str(SECRET) not in message
    for got in (SECRET * 2, SECRET * 1.01, 0, -SECRET, "text", None):
        assert unit_slip(got, SECRET) is None
    assert unit_slip(SECRET, 0) is None


def test_none_is_an_answer_where_it_may_be_one() -> None:
    assert call(lambda size: None, size=3, returns=tuple | None) is None
    assert call(lambda size: [size, 1], size=3, returns=tuple | None) == (3, 1)
    said = says(lambda: call(lambda size: size, size=3, returns=str | None))
    assert "the exercise asks for a text or None" in said
    assert "should take (size)" in says(lambda: call(lambda: None, size=3, returns=Real | None))


def test_entries_are_those_that_were_asked_for() -> None:
    assert entries({"a": 1, "b": np.float64(2.5), "c": "more"}, ("a", "b")) == {"a": 1, "b": 2.5}
    assert says(lambda: entries({"a": 1}, ("a", "b", "c"))) == "Your dictionary has no 'b' and no 'c'."
    assert "a is a text, but the exercise asks for a number" in says(lambda: entries({"a": "1"}, ("a",)))
    assert entries({"a": True, "b": "text"}, ("a", "b"), object) == {"a": True, "b": "text"}


def test_helpers_of_checks() -> None:
    expect(1, "unused")
    assert says(lambda: expect([], "Empty.")) == "Empty."
    assert says(lambda: fail("Half of it.")) == "Half of it."
    assert alike([0.1 + 0.2, 0], (0.3, 0.0)) and not alike([1.0], [1.0001])
    assert alike([1.0], [1.0005], 1e-3) and not alike([0.0], [1e-9])
    code = "import sys, course_utils.interactive.feedback; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
