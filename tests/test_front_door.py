"""The commands as a new user types them: refusals in one sentence, what is handed over, the doctor."""

import ast
import inspect
import json
import re
import shutil
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from course_utils import estimate
from course_utils.__main__ import GATES, refusal
from course_utils.cli import command as commands
from course_utils.cli import doctor, learn, maintain
from course_utils.cli import main as front_door
from course_utils.errors import GpuOutOfMemory, SimulationUnavailable
from course_utils.interactive.course_files import ROOT
from course_utils.run import TrainingRun
from course_utils.units import GiB

BARE = [sys.executable, "-S", "-E"]
"""A Python without its installed packages: nothing but the standard library."""


def course(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs `python -m course_utils ARGUMENTS` with the standard library alone."""
    command = [*BARE, "-m", "course_utils", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200, check=False)


# A Python too old, or without packages


def test_old_python_is_told_what_to_install_or_of_a_newer_one_that_is_here():
    assert "install Python 3.11 or newer" in refusal((3, 10, 13), ["lab"], lambda name: None)
    said = refusal((2, 7), ["test", "-x"], lambda name: "/somewhere" if name == "python3.12" else None)
    assert "`python3.12 -m course_utils test -x`" in said
    assert refusal((3, 11, 0), [], lambda name: None) == ""
    pretend = "import sys, runpy; sys.version_info = (3, 8, 0); sys.argv = ['', 'lab']"
    code = f"{pretend}; runpy.run_module('course_utils', run_name='__main__', alter_sys=False)"
    for command, refused in (("lab", 1), ("watch", 2)):  # an answer of `watch` is 1
        words = [sys.executable, "-c", code.replace("lab", command)]
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (refused, "")
        assert done.stderr.startswith("Python 3.8 is too old") and done.stderr.count("\n") == 1


@pytest.mark.parametrize("name", ["__main__.py", "__init__.py"])
def test_what_an_old_python_reads_it_can_parse(name):
    tree = ast.parse((ROOT / "course_utils" / name).read_text(encoding="utf-8"), feature_version=(3, 6))
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr | ast.AnnAssign)]


def test_help_needs_the_standard_library_alone_and_lists_every_command():
    done = course()
    assert (done.returncode, done.stderr) == (0, "") and done.stdout == course("--help").stdout
    assert re.findall(r"^  (\w[\w-]*) +\w", done.stdout, re.MULTILINE) == list(front_door.COMMANDS)
    for name, parser in front_door.everything()[1].items():
        assert all(len((action.help or "").split()) > 1 for action in parser._actions), name


# Refusals


@pytest.mark.parametrize(
    ("words", "said", "code"),
    [
        ("tset", "did you mean 'test'?", 2),
        ("progress please", "'please' is one word too many", 2),
        ("test --full --rest", "not allowed with", 2),
        ("estimate --micro-batch 4", "required: MODEL", 2),
        ("estimate gpt2-xl --zero 3", "Unknown option --zero: --zero-stage is the nearest", 2),
        ("estimate gpt2-xl --bucket-view maybe", "'maybe' is neither true nor false", 2),
        ("estimate gpt2-xl --micro-batch 0", "at least 1", 1),
        ("fit gpt2 --gpu T4-16GB --global-batch 8 --may-change loar", "did you mean 'lora'?", 2),
        ("fit gpt2 --gpu H300 --global-batch 8", "unknown GPU 'H300'", 2),
        ("oom -- all is well", "No out-of-memory", 2),
        ("oom missing.log", "There is no file", 2),
        ("watch --gpu T4-16GB missing.py", "there is no script", 2),
    ],
)
def test_what_cannot_be_is_refused_in_one_line_before_anything_is_set_up(words, said, code, capsys):
    assert front_door.main(words.split()) == code
    out, err = capsys.readouterr()
    assert out == "" and said in err and err.count("\n") == 1


def test_a_learners_command_that_fails_says_why_and_a_maintainers_keeps_its_traceback(monkeypatch, capsys):
    problems = GpuOutOfMemory("too large"), SimulationUnavailable("a step fails:\nno device"), OSError("full")

    def fault(_):
        raise problem

    monkeypatch.setitem(front_door.COMMANDS, "progress", commands.Command("", fault))
    for problem in problems:
        assert front_door.main(["progress"]) == 1
        assert capsys.readouterr() == ("", str(problem).replace("\n", " ") + ".\n")
    monkeypatch.setitem(front_door.COMMANDS, "evidence", commands.Command("", fault))
    with pytest.raises(OSError, match="full"):
        front_door.main(["evidence"])


# Runs on the command line


NOT_OFFERED = ("model", "tensor_parallel", "sequence_parallel", "others")
"""No options: the two in the middle no command supports."""


def test_estimate_and_fit_need_the_standard_library_only():
    done = course("estimate", "gpt2-xl", "--micro-batch", "32", "--precision=bf16-master")
    assert (done.returncode, done.stderr) == (0, "")
    run = TrainingRun("gpt2-xl", micro_batch=32, precision="bf16-master")
    total = re.search(r"^total +([\d.,]+) GB$", done.stdout, re.MULTILINE)
    assert total and float(total[1].replace(",", "")) == pytest.approx(estimate(run).total / 1e9, abs=5e-4)
    done = course("fit", "gpt2-xl", "--gpu", "RTX5090-32GB", "--global-batch", "32")
    assert done.returncode == 0 and "fits: TrainingRun('gpt2-xl'" in done.stdout
    done = course("fit", "gpt2-xl", "--gpu", "T4-16GB", "--global-batch", "1")
    assert done.returncode == 1 and "nothing fits; smallest: TrainingRun('gpt2-xl'" in done.stdout


def test_fit_as_json_says_what_the_text_does(capsys, monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.setenv("COLUMNS", "200")
    for card, code in (("RTX5090-32GB", 0), ("T4-16GB", 1)):
        words = ["fit", "gpt2-xl", "--gpu", card, "--global-batch", "2"]
        assert front_door.main(words) == code
        text = capsys.readouterr().out
        assert front_door.main([*words, "--json"]) == code
        data = json.loads(capsys.readouterr().out)
        assert (data["format"], data["version"], data["card"]) == ("course_utils fit", 1, card)
        assert data["fits"] is (data["best"] is not None) is (code == 0)
        assert (data["best"] or data["nearest"])["run"] in text and data["verdict"] in text
        assert all(step["what"] in text for step in data["path"])


def test_a_plan_that_the_simulated_step_refutes_does_not_fit(monkeypatch, capsys):
    refuted = SimpleNamespace(fits=False)
    monkeypatch.setattr("course_utils.verdict", lambda *_: refuted)
    assert front_door.main(["fit", "gpt2", "--gpu", "T4-16GB", "--global-batch", "1"]) == 1
    assert "fits: TrainingRun" in capsys.readouterr().out


def test_an_error_of_the_courses_own_is_no_answer(monkeypatch, capsys):
    def fault(_):
        raise KeyError("ours")

    for name, command in front_door.COMMANDS.items():
        monkeypatch.setitem(front_door.COMMANDS, name, command._replace(run=fault, purpose=""))
    for words in ("watch train.py", "fit gpt2 --gpu T4-16GB --global-batch 1", "oom"):
        assert front_door.main(words.split()) == 2
        assert "KeyError: 'ours'" in capsys.readouterr().err
    with pytest.raises(KeyError):
        front_door.main(["progress"])
    answering = [name for name, command in front_door.COMMANDS.items() if command.failed == 2]
    assert tuple(answering) == ("fit", "watch", "oom") and set(answering) == set(GATES)


def test_every_choice_of_a_run_can_be_made_on_the_command_line():
    offered = inspect.signature(TrainingRun).parameters.keys() - {*NOT_OFFERED}
    assert set(learn.RUN_OPTIONS) == offered
    words = "estimate gpt2 --seq-len=512 --clip-grad-norm 0.5 --set-to-none false --card T4-16GB"
    typed = learn.training_run(front_door.parse([*words.split(), "--lora-rank=8", "--lora-targets=qkv,up"]))
    lora = {"lora_rank": 8, "lora_targets": ("qkv", "up")}
    assert typed == TrainingRun("gpt2", 1, 512, clip_grad_norm=0.5, set_to_none=False, card="T4-16GB", **lora)
    assert learn.training_run(front_door.parse(["estimate", "gpt2"])) == TrainingRun("gpt2")


# What is handed over


def test_a_command_goes_on_where_it_was_called_in_the_courses_environment(monkeypatch, tmp_path):
    """Or paths among its arguments would be looked for in the course's folder."""
    went_on = []

    def hand_over(command, environment, folder):
        went_on.append((command, folder))
        return 7

    python = tmp_path / "bin" / "python"
    monkeypatch.setattr(commands, "interpreter", lambda purpose, here: python)
    monkeypatch.setattr(commands, "hand_over", hand_over)
    monkeypatch.chdir(tmp_path)
    words = ["grade", "class", "--out", "out"]
    assert front_door.main(words) == 7
    assert went_on == [([str(python), "-m", "course_utils", "grade", "--here", *words[1:]], tmp_path)]


@pytest.mark.parametrize(
    ("words", "targets"),
    [
        ([], ["notebooks", "tests", f"--ignore={maintain.DEMOS}"]),
        (["--rest"], ["tests/rest", "solutions", maintain.DEMOS]),
        (["--full"], ["tests/rest", "solutions", maintain.DEMOS]),
        (["tests/test_units.py::test_x"], []),
    ],
)
def test_the_test_command_runs_the_part_that_is_asked_for(words, targets, monkeypatch):
    handed = []
    reports = []
    monkeypatch.setattr(maintain, "hand_over", lambda *given: handed.append(given) or 7)
    monkeypatch.setattr(maintain.subprocess, "run", lambda command, **_: reports.append(command))
    assert front_door.main(["test", "--here", *words, "-x"]) == 7
    [(command, variables)] = handed
    named = [word for word in words if "::" in word]
    assert command == [sys.executable, "-m", "pytest", *maintain.TEST_OPTIONS, *targets, *named, "-x"]
    assert variables["COURSE_SOURCE"] == "simulated" and variables["OMP_NUM_THREADS"] == "1"
    assert variables["COURSE_FULL"] == str(int(words == ["--full"]))
    assert ["doctor" in report for report in reports] == ([True] if not words else [])


def test_a_lessons_tests_are_its_notebook_and_its_file_and_an_unknown_one_is_refused(capsys):
    notebook, *tests = maintain.one_lesson(ROOT, "5")
    assert notebook == "notebooks/05_activations.ipynb"
    assert tests and all(name.startswith("tests/test_lesson_05") for name in tests)
    assert front_door.main(["test", "--here", "--lesson", "77"]) == 1
    assert "unknown lesson '77'" in capsys.readouterr().err


# The doctor


def test_doctor_works_where_nothing_is_installed():
    done = course("doctor", "--here")
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(r"✗ torch +not installed: `python3 -m course_utils lab` installs it", done.stdout)
    assert re.search(r"✗ simulated GPU +needs torch", done.stdout)


def test_doctor_says_what_a_gpu_can_do_that_it_does_not_answer_or_why_there_is_none():
    def refuse(index):
        raise RuntimeError("CUDA error: out of memory\nmore of it")

    torch: Any = SimpleNamespace(cuda=SimpleNamespace())
    torch.cuda.get_device_name = lambda index: "Tesla T4"
    torch.cuda.get_device_capability = lambda index: (7, 5)
    torch.cuda.mem_get_info = lambda index: (14 * GiB, 15 * GiB)
    can = "compute capability 7.5: fp16 and efficient attention; no bf16, no flash attention"
    expected = ("GPU 0", doctor.YES, f"Tesla T4, 15.0 GiB, 14.0 GiB free, {can}")
    assert doctor.gpu_finding(torch, 0) == expected
    torch.cuda.mem_get_info = refuse
    assert doctor.gpu_finding(torch, 0)[1:] == (doctor.NO, "does not answer: CUDA error: out of memory")
    assert "set COURSE_TORCH=cuda" in doctor.no_gpu(None, True)
    assert "update the driver" in doctor.no_gpu("13.0", True)
    assert "no NVIDIA GPU" in doctor.no_gpu("13.0", False)


def test_pytest_without_nbval_refuses_notebooks_and_says_what_to_do(tmp_path):
    shutil.copy(ROOT / "conftest.py", tmp_path)
    without = (
        "import importlib.util as util, sys; find = util.find_spec\n"
        "util.find_spec = lambda name, *more: None if name == 'nbval' else find(name, *more)\n"
        "import pytest; sys.exit(pytest.main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", without, "-p", "no:nbval", "--nbval"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert f"{sys.executable} lacks nbval. `python3 -m course_utils test` makes" in done.stderr
    assert 'pip install -e ".[lab,test]"' in done.stderr
