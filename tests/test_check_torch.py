"""Does check-torch say what holds and what changed, and fail when something does? Everything is offline."""

import argparse
import re
import sys
from copy import deepcopy
from pathlib import Path
from unittest.mock import Mock

import check_torch
import pytest
import torch
from check_torch import Facts, asked, own_environment, page, quick_suite, warning_line, without_pictures

from course_utils.cli.environment import SetupError
from course_utils.cli.maintain import TEST_OPTIONS, check_torch_options

PASSED = (0, "==== 3 passed in 1.00s ====\n")


def facts_of(version: str, digest: str = "aa", size: int = 512, **more: object) -> Facts:
    """The answers of a torch with one run, whose matrix takes `size` bytes."""
    runs = {
        "gpt": {"hash": digest, "peak": 10 * size, "operators": {"aten.mm": [2, size], "aten.add": [1, 512]}}
    }
    return {
        "torch": version,
        "can": True,
        "how": "CPU build of torch",
        "runs": runs,
        "operators": ["aten::add", "aten::mm"],
        "warnings": [],
    } | more


NOW = facts_of("2.13.0+cpu")


def test_a_torch_that_changes_nothing_holds() -> None:
    holds, text = page(NOW, facts_of("2.14.0+cpu"), PASSED, {})
    assert holds and text.startswith("# The course on torch 2.14.0+cpu\n\nThe course holds.\n")
    assert "| what steps allocate | holds | 1 of 1 runs as on torch 2.13.0+cpu |" in text
    assert "| the quick suite | holds | 3 passed |" in text
    assert "Nothing that is compared here: 1 runs, 2 oper" in text
    assert "Keep its hashes for 2.14" in text


def test_a_run_that_allocates_otherwise_is_named_with_its_bytes_and_fails() -> None:
    holds, text = page(NOW, facts_of("2.14.0", "bb", 1024), PASSED, {})
    assert not holds and "The course does not hold: what steps allocate." in text
    assert "- gpt: peak 5,120 → 10,240 bytes (+5,120); aten.mm 2× 512 → 2× 1,024 bytes" in text
    assert "aten.add 1×" not in text and "tests/test_builds.py --write" in text


def test_an_order_alone_may_differ() -> None:
    assert "the same operators in another order" in page(NOW, facts_of("2.14.0", "bb"), PASSED, {})[1]


def test_what_was_kept_for_a_release_is_what_it_is_held_to() -> None:
    known = {"2.14": {"gpt": "bb"}}
    holds, text = page(NOW, facts_of("2.14.0", "bb", 1024), PASSED, known)
    assert holds and "1 of 1 runs as kept for it" in text and "peak 5,120 → 10,240" in text
    assert "Keep its hashes" not in text
    assert not page(NOW, facts_of("2.14.0", "aa"), PASSED, known)[0]


def test_a_gpu_that_cannot_be_simulated_fails_with_its_reason() -> None:
    how = "torch 3.0.0 is laid out in a way this course does not know"
    other = facts_of("3.0.0", can=False, how=how, runs={})
    holds, text = page(NOW, other, PASSED, {})
    assert not holds and "does not hold: the simulated GPU, what steps allocate." in text
    assert "| the simulated GPU | **fails** | torch 3.0.0 is laid out in a way" in text
    assert "gpt: not simulated" in text
    assert "Begin with course_utils/measuring/simulated.py" in text


def test_a_run_that_fails_is_no_run_that_agrees() -> None:
    other = facts_of("2.14.0")
    other["runs"] = {"gpt": {"error": "StepError: no kernel"}}
    holds, text = page(NOW, other, PASSED, {})
    assert not holds and "- gpt: StepError: no kernel" in text and "0 of 1 runs" in text


def test_no_run_at_all_does_not_hold() -> None:
    assert not page(facts_of("2.13.0", runs={}), facts_of("2.14.0", runs={}), PASSED, {})[0]


def test_tests_that_fail_are_listed_and_a_suite_that_did_not_end_says_so() -> None:
    output = "FAILED tests/test_own_step.py::test_x - assert 1 == 2\n=== 1 failed, 2 passed in 3.21s ===\n"
    holds, text = page(NOW, facts_of("2.14.0"), (1, output), {})
    assert not holds and "**fails** | 1 failed, 2 passed |" in text
    assert "- tests/test_own_step.py::test_x - assert 1 == 2" in text
    holds, text = page(NOW, facts_of("2.14.0"), (139, "Fatal Python error: Segmentation fault\n"), {})
    assert not holds and "exit code 139: Fatal Python error: Segmentation fault" in text


def test_operators_and_deprecations_that_come_and_go_are_told() -> None:
    before = deepcopy(NOW)
    now = facts_of("2.14.0")
    before["operators"] += ["aten::qr"]
    now["operators"] += ["aten::new", "aten::newer"]
    del before["runs"]["gpt"]["operators"]["aten.mm"], now["runs"]["gpt"]["operators"]["aten.add"]
    before["warnings"] = ["FutureWarning: old (torch/a.py:3)", "FutureWarning: both (torch/b.py:3)"]
    now["warnings"] = ["FutureWarning: both (torch/b.py:9)", "DeprecationWarning: new (torch/a.py:3)"]
    suite = (0, "  /x/site-packages/torch/c.py:7: FutureWarning: soon gone\n= 1 passed in 2s =\n")
    text = page(before, now, suite, {})[1]
    new_ones = "Deprecations that this torch warns of, and the other did not"
    told = {
        "Operators that steps call now": "aten.mm",
        "Operators that steps no longer call": "aten.add",
        "Operators that torch no longer has (2 are new)": "aten::qr",
        new_ones: "DeprecationWarning: new (torch/a.py:3)",
        "Deprecations that it warns of no longer": "FutureWarning: old (torch/a.py:3)",
        "Deprecations in the quick suite": "FutureWarning: soon gone (torch/c.py:7)",
    }
    for title, line in told.items():
        assert f"**{title}:**\n\n- {line}\n" in text
    assert "both" not in text


def test_a_long_list_is_cut_and_counted() -> None:
    now = facts_of("2.14.0", warnings=[f"FutureWarning: {n:02d} (torch/a.py:1)" for n in range(40)])
    text = page(NOW, now, PASSED, {})[1]
    assert text.count("FutureWarning") == check_torch.MOST and "- and 28 more" in text


def test_only_deprecations_are_told_with_their_module() -> None:
    place = "/env/lib/python3.11/site-packages/torch/nn/functional.py"
    line = warning_line(FutureWarning, "use\n sdpa", place, 7)
    assert line == "FutureWarning: use sdpa (torch/nn/functional.py:7)"
    assert warning_line(UserWarning, "no GPU", place, 7) == ""
    ours = str(check_torch.ROOT / "course_utils" / "run.py")
    assert warning_line(DeprecationWarning, "x", ours, 1) == "DeprecationWarning: x (course_utils/run.py:1)"


@pytest.fixture(scope="module")
def here() -> Facts:
    return asked(sys.executable, ["gpt fp32 efficient"])


def test_an_interpreter_answers_for_its_own_torch(here: Facts) -> None:
    assert here["torch"] == torch.__version__ and here["can"] and "aten::mm" in here["operators"]
    (run,) = here["runs"].values()
    assert len(run["hash"]) == 16 and sum(size for _, size in run["operators"].values()) > run["peak"] > 0
    assert page(here, here, PASSED, {})[0]


def test_an_interpreter_without_the_course_is_refused(tmp_path: Path) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho 'no torch here' >&2\nexit 3\n")
    broken.chmod(0o755)
    with pytest.raises(SetupError, match=r"cannot run the course at all.*no torch here"):
        asked(str(broken))


def test_the_suite_is_run_and_its_output_kept(tmp_path: Path) -> None:
    (tmp_path / "test_two.py").write_text("def test_a(): pass\ndef test_b(): assert 1 == 2\n")
    options = ["--rootdir", str(tmp_path)]
    code, output = quick_suite(sys.executable, [str(tmp_path)], options, tmp_path / "quick.txt")
    holds, text = page(NOW, facts_of("2.14.0"), (code, output), {})
    assert not holds and "1 failed, 1 passed" in text and "test_b - assert 1 == 2" in text
    assert (tmp_path / "quick.txt").read_text() == output


def test_pictures_are_left_out_of_the_comparison_as_they_name_their_torch(tmp_path: Path) -> None:
    options = without_pictures(TEST_OPTIONS, tmp_path)
    assert len(options) == len(TEST_OPTIONS) and str(tmp_path / "nbval_sanitize.cfg") in options
    rules = (tmp_path / "nbval_sanitize.cfg").read_text(encoding="utf-8")
    assert "regex: torch " in rules and rules.endswith("regex: base64,[\\w+/=]+\nreplace: base64,PICTURE\n")


def chosen(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    check_torch_options(parser)
    return parser.parse_args(arguments)


def test_the_command_saves_and_prints_the_page_and_returns_its_verdict(
    tmp_path: Path, here: Facts, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    version = torch.__version__.partition("+")[0]
    monkeypatch.setattr(check_torch, "asked", lambda python: here)
    for suite in (PASSED, (1, "= 1 failed in 2s =\n")):
        code, _ = suite
        monkeypatch.setattr(check_torch, "quick_suite", Mock(return_value=suite))
        folder = tmp_path / str(code)
        assert check_torch.run(chosen(version, "--python", sys.executable, "--folder", str(folder))) == code
        assert (folder / "report.md").read_text(encoding="utf-8") in capsys.readouterr().out
    with pytest.raises(SetupError, match=rf"has torch {version}\S*, not 9\.9\.9"):
        check_torch.run(chosen("9.9.9", "--python", sys.executable, "--folder", str(tmp_path / "other")))


@pytest.mark.parametrize("version", ["2.11", "latest", "2.11.0; rm -r", ""])
def test_what_is_no_version_is_refused(version: str) -> None:
    with pytest.raises(SetupError, match=r"is no version of torch: write three numbers, as in 2\.11\.0\."):
        check_torch.run(chosen(version))


def test_an_environment_has_the_pins_of_all_but_torch_and_is_made_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked_for: list[list[str]] = []
    python = check_torch.environment.python_in(tmp_path / "environment")

    def made(folder: Path) -> None:
        python.parent.mkdir(parents=True, exist_ok=True)
        python.touch()

    def install(python: Path, arguments: list[str]) -> bool:
        asked_for.append(arguments)
        return True

    monkeypatch.setattr(check_torch.environment, "make_environment", made)
    monkeypatch.setattr(check_torch.environment, "run_pip", install)
    for _ in range(2):
        assert own_environment("2.11.0", False, tmp_path) == str(python)
    first, second = asked_for
    assert first[-1] == "torch==2.11.0"
    assert second == ["--constraint", str(tmp_path / "constraints.txt"), first[-1], "--editable", ".[test]"]
    pins = (tmp_path / "constraints.txt").read_text(encoding="utf-8")
    kept = (check_torch.ROOT / "constraints.txt").read_text(encoding="utf-8")
    assert pins == re.sub(r"^torch==.*\n", "", kept, flags=re.MULTILINE) != kept
