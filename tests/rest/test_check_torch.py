"""Does check-torch say what holds and what changed, and fail when something does? Everything is offline."""

import argparse
import sys
from pathlib import Path

import check_torch
import pytest
import torch
from check_torch import Facts, asked, own_environment, page

from course_utils.cli.environment import SetupError
from course_utils.cli.maintain import check_torch_options

PASSED = (0, "==== 3 passed in 1.00s ====\n")


def facts_of(version: str, digest: str = "aa", size: int = 512, **more: object) -> Facts:
    """The answers of a torch with one run, whose matrix takes `size` bytes."""
    operators = {"aten.mm": [2, size], "aten.add": [1, 512]}
    runs = {"gpt": {"hash": digest, "peak": 10 * size, "operators": operators}}
    return {"torch": version, "can": True, "how": "CPU build of torch", "runs": runs} | more


NOW = facts_of("2.13.0+cpu")


def test_a_torch_that_changes_nothing_holds() -> None:
    holds, text = page(NOW, facts_of("2.14.0+cpu"), PASSED, {})
    assert holds and text.startswith("# The course on torch 2.14.0+cpu\n\nThe course holds.\n")
    assert "| what steps allocate | holds | 1 of 1 runs as on torch 2.13.0+cpu |" in text
    assert "| the tests | holds | 3 passed |" in text and "Keep its hashes for 2.14" in text


def test_a_run_that_allocates_otherwise_is_named_with_its_bytes_and_fails_unless_that_is_known() -> None:
    other = facts_of("2.14.0", "bb", 1024)
    holds, text = page(NOW, other, PASSED, {})
    assert not holds and "The course does not hold: what steps allocate." in text
    assert "- gpt: peak 5,120 → 10,240 bytes (+5,120); aten.mm 2× 512 → 2× 1,024 bytes\n" in text
    known = {"2.14": {"gpt": "bb"}}
    holds, text = page(NOW, other, PASSED, known)
    assert holds and "1 of 1 runs as kept for it" in text and "peak 5,120 → 10,240" in text
    assert not page(NOW, facts_of("2.14.0", "aa"), PASSED, known)[0]
    assert "the same operators in another order" in page(NOW, facts_of("2.14.0", "bb"), PASSED, {})[1]


def test_a_gpu_that_cannot_be_simulated_and_a_run_that_fails_do_not_hold() -> None:
    other = facts_of("3.0.0", can=False, how="laid out in a way this course does not know", runs={})
    holds, text = page(NOW, other, PASSED, {})
    assert not holds and "does not hold: the simulated GPU, what steps allocate." in text
    assert "| the simulated GPU | **fails** | laid out in a way" in text and "gpt: not simulated" in text
    holds, text = page(NOW, facts_of("2.14.0", runs={"gpt": {"error": "StepError: no kernel"}}), PASSED, {})
    assert not holds and "- gpt: StepError: no kernel" in text and "0 of 1 runs" in text
    assert not page(facts_of("2.13.0", runs={}), facts_of("2.14.0", runs={}), PASSED, {})[0]


def test_tests_that_fail_are_listed_and_a_long_list_is_cut() -> None:
    failed = "".join(f"FAILED tests/test_x.py::test_{number} - assert 1 == 2\n" for number in range(40))
    holds, text = page(NOW, facts_of("2.14.0"), (1, f"{failed}= 40 failed, 2 passed in 3.21s =\n"), {})
    assert not holds and "**fails** | 40 failed, 2 passed |" in text
    assert text.count("test_x.py") == check_torch.MOST and "- and 28 more" in text
    holds, text = page(NOW, facts_of("2.14.0"), (139, "Fatal Python error: Segmentation fault\n"), {})
    assert not holds and "exit code 139: Fatal Python error: Segmentation fault" in text


def chosen(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    check_torch_options(parser)
    return parser.parse_args(arguments)


def test_the_command_asks_both_saves_and_prints_the_page_and_returns_its_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here = asked(sys.executable, ["gpt fp32 efficient"])
    (run,) = here["runs"].values()
    assert (
        here["torch"] == torch.__version__
        and sum(size for _, size in run["operators"].values()) > run["peak"]
    )
    version = torch.__version__.partition("+")[0]
    monkeypatch.setattr(check_torch, "asked", lambda python: here)
    for suite in (PASSED, (1, "= 1 failed in 2s =\n")):
        monkeypatch.setattr(check_torch, "run_tests", lambda *_, suite=suite: suite)
        words = [version, "--python", sys.executable, "--folder", str(tmp_path)]
        assert check_torch.run(chosen(*words)) == suite[0]
        assert (tmp_path / "report.md").read_text(encoding="utf-8") in capsys.readouterr().out
    with pytest.raises(SetupError, match=rf"has torch {version}\S*, not 9\.9\.9"):
        check_torch.run(chosen("9.9.9", *words[1:]))
    with pytest.raises(SetupError, match=r"cannot run the course at all"):
        asked("false")
    with pytest.raises(SetupError, match=r"'latest' is no version of torch: write three numbers"):
        check_torch.run(chosen("latest"))


def test_an_environment_has_the_pins_of_all_but_torch_and_is_made_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked_for: list[list[str]] = []
    python = check_torch.environment.python_in(tmp_path / "environment")

    def made(folder: Path) -> None:
        python.parent.mkdir(parents=True, exist_ok=True)
        python.touch()

    monkeypatch.setattr(check_torch.environment, "make_environment", made)
    monkeypatch.setattr(
        check_torch.environment, "run_pip", lambda _, arguments: not asked_for.append(arguments)
    )
    for _ in range(2):
        assert own_environment("2.11.0", False, tmp_path) == str(python)
    first, second = asked_for
    assert first[-1] == "torch==2.11.0"
    assert second == ["--constraint", str(tmp_path / "constraints.txt"), first[-1], "--editable", ".[test]"]
    pins = (tmp_path / "constraints.txt").read_text(encoding="utf-8")
    assert "\nnumpy==" in pins and "torch==" not in pins
