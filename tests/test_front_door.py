"""The commands as a new user types them: refusals in one sentence, a quick second start, a JupyterLab."""

import ast
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import urllib.request
import venv
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from servers import running

from course_utils import GPUS, estimate, gpu
from course_utils.__main__ import CANDIDATES, refusal
from course_utils.cli import command as commands
from course_utils.cli import doctor, environment, learn, maintain
from course_utils.cli import main as front_door
from course_utils.errors import GpuOutOfMemory, SimulationUnavailable
from course_utils.interactive.course_files import ROOT, number_of, numbered
from course_utils.measuring import recorded
from course_utils.run import ATTENTIONS, OPTIMIZERS, OVERRIDES, PRECISIONS, RECOMPUTES, TrainingRun
from course_utils.units import GiB

BARE = [sys.executable, "-S", "-E"]
"""A Python without its installed packages: nothing but the standard library."""


def course(*arguments: str, python=(sys.executable,), root: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Runs `python -m course_utils ARGUMENTS` in `root`."""
    command = [*python, "-m", "course_utils", *arguments]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=1200, check=False)


def assert_refused(done: subprocess.CompletedProcess[str], *words: str, code: int = 1) -> None:
    """One line on stderr that contains the words, and an exit code."""
    assert done.returncode == code
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    for word in words:
        assert word in done.stderr


# A Python too old


@pytest.mark.parametrize("version", [(2, 7), (3, 6), (3, 10, 13)])
def test_old_python_is_told_what_to_install_or_of_a_newer_one_that_is_here(version):
    assert "install Python 3.11 or newer" in refusal(version, ["lab"], lambda name: None)
    said = refusal(version, ["test", "-x"], lambda name: "/somewhere" if name == "python3.12" else None)
    assert "`python3.12 -m course_utils test -x`" in said
    assert refusal((3, 11, 0), [], lambda name: None) == refusal((4, 0), [], lambda name: None) == ""


def test_old_python_exits_with_one_sentence():
    pretend = "import sys, runpy; sys.version_info = (3, 8, 0); sys.argv = ['', 'lab']"
    run = "runpy.run_module('course_utils', run_name='__main__', alter_sys=False)"
    command = [sys.executable, "-c", f"{pretend}; {run}"]
    assert_refused(subprocess.run(command, cwd=ROOT, capture_output=True, text=True), "Python 3.8 is too old")


@pytest.mark.parametrize("name", ["__main__.py", "__init__.py"])
def test_what_an_old_python_reads_it_can_parse(name):
    tree = ast.parse((ROOT / "course_utils" / name).read_text(encoding="utf-8"), feature_version=(3, 6))
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr | ast.AnnAssign)]


# Commands and their words

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.mark.parametrize("words", [[], ["-h"]])
def test_the_list_of_commands_is_what_no_argument_prints(words):
    done = course(*words, python=BARE)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout == course("--help", python=BARE).stdout
    listed = re.findall(r"^  (\w[\w-]*) +\w", done.stdout, re.MULTILINE)
    assert listed == list(front_door.COMMANDS)
    assert max(map(len, done.stdout.splitlines())) <= 105


def test_the_version_is_that_of_the_package():
    done = course("--version", python=BARE)
    assert (done.returncode, done.stdout) == (0, f"{PROJECT['name']} {PROJECT['version']}\n")


def test_the_console_script_is_the_same_under_its_own_name():
    (script, place), *others = PROJECT["scripts"].items()
    module, function = place.split(":")
    assert (script, others) == (PROJECT["name"], [])
    assert getattr(import_module(module), function) is front_door.main
    begin = (
        f"import sys; sys.argv[0] = '/somewhere/bin/{script}'; from {module} import main; sys.exit(main())"
    )
    done = subprocess.run([*BARE, "-c", begin], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == course(python=BARE).stdout.replace("python3 -m course_utils", script)


@pytest.mark.parametrize(
    ("words", "said", "code"),
    [
        ("tset", "did you mean 'test'?", 1),
        ("Lab", "did you mean 'lab'?", 1),
        ("--versoin", "Unknown option --versoin: --version is the nearest", 2),
        ("progress please", "'please' is one word too many", 2),
        ("lint --zzz=3", "Unknown option --zzz. See `python3 -m course_utils lint --help`.", 2),
        ("test --full --quick", "not allowed with", 2),
        ("estimate --micro-batch 4", "required: MODEL", 2),
        ("estimate gpt2-xl --zero 3", "Unknown option --zero: --zero-stage is the nearest", 2),
        ("estimate gpt2-xl --micro-bacth 4", "--micro-batch is the nearest", 2),
        ("estimate gpt2-xl --micro-batch", "--micro-batch: expected one argument", 2),
        ("estimate gpt2-xl --micro-batch four", "--micro-batch: invalid int value: 'four'", 2),
        ("estimate gpt2-xl --bucket-view maybe", "'maybe' is neither true nor false", 2),
        ("estimate gpt2-xl --micro-batch 0", "at least 1", 1),
        ("estimate gpt2-xl --precision fp33", "did you mean 'fp32'?", 1),
        ("estimate gpt2-xll", "did you mean 'gpt2-xl'?", 1),
        ("fit gpt2 --gpu T5 --global-batch 8", "unknown GPU 'T5'", 1),
        ("fit gpt2 --gpu T4-16GB --global-batch 8 --may-change loar", "did you mean 'lora'?", 1),
    ],
)
def test_what_cannot_be_is_refused_in_one_line_before_anything_is_set_up(words, said, code):
    assert_refused(course(*words.split(), python=BARE), said, code=code)


def test_here_without_the_packages_says_what_is_missing():
    assert_refused(course("lab", "--here", python=BARE), "--here needs torch, jupyterlab")


@pytest.fixture(scope="module")
def copied(tmp_path_factory) -> Path:
    """A folder with the course's package alone."""
    folder = tmp_path_factory.mktemp("copied")
    without = shutil.ignore_patterns("__pycache__", "recordings")
    shutil.copytree(ROOT / "course_utils", folder / "course_utils", ignore=without)
    return folder


@pytest.mark.parametrize("name", front_door.COMMANDS)
def test_help_needs_the_standard_library_alone_and_makes_nothing(name, copied):
    done = course(name, "--help", python=BARE, root=copied)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"usage: python3 -m course_utils {name}")
    assert [path.name for path in copied.iterdir()] == ["course_utils"], "no environment"


def test_every_option_says_what_it_does():
    for name, parser in front_door.everything()[1].items():
        assert all(len((action.help or "").split()) > 1 for action in parser._actions), name


PATHS = {
    "compare": ["gpt2"],
    "grade": ["class", "--out", "out"],
    "build": ["--check"],
    "site": ["--out", "out"],
    "evidence": ["--out", "out"],
    "demos": ["--check"],
}


@pytest.mark.parametrize(("name", "words"), PATHS.items())
def test_a_command_goes_on_where_it_was_called(name, words, monkeypatch, tmp_path):
    """Or paths among its arguments would be looked for in the course's folder."""
    went_on = []

    def hand_over(command, environment, folder):
        went_on.append((command[1:], folder))
        return 7

    monkeypatch.setattr(commands, "interpreter", lambda purpose, here: tmp_path / "bin" / "python")
    monkeypatch.setattr(commands, "hand_over", hand_over)
    monkeypatch.chdir(tmp_path)
    assert front_door.main([name, *words]) == 7
    assert went_on == [(["-m", "course_utils", name, "--here", *words], tmp_path)]


def test_a_fault_in_a_maintainers_command_keeps_its_traceback(monkeypatch, capsys):
    def fault(_):
        raise ValueError("a fault")

    for name in ("progress", "evidence"):
        monkeypatch.setitem(front_door.COMMANDS, name, commands.Command("", fault))
    assert front_door.main(["progress"]) == 1 and capsys.readouterr().err == "a fault.\n"
    with pytest.raises(ValueError, match="a fault"):
        front_door.main(["evidence"])


def test_fit_prints_the_path_to_a_run_that_fits():
    done = course("fit", "gpt2-xl", "--gpu", "RTX5090-32GB", "--global-batch", "32", python=BARE)
    assert done.returncode == 0, done.stderr
    assert "as asked for" in done.stdout and "fits: TrainingRun('gpt2-xl'" in done.stdout


def test_compare_prints_estimate_and_measurement_side_by_side():
    done = course("compare", "--here", "tiny-gpt", "--micro-batch", "2", "--seq-len", "64")
    assert done.returncode == 0, done.stderr
    tensors = next(line.split() for line in done.stdout.splitlines() if line.startswith("tensors"))
    assert tensors[1] == tensors[3] and tensors[-1] == "0"
    assert "simulated GPU" in done.stdout


@pytest.mark.parametrize(
    "problem",
    [
        GpuOutOfMemory("gpt2-xl does not fit this GPU."),
        SimulationUnavailable("a step fails:\nno such device."),
    ],
)
def test_compare_tells_in_one_line_what_cannot_be_measured(problem, monkeypatch, capsys):
    def refuse(run):
        raise problem

    monkeypatch.setattr("course_utils.compare", refuse, raising=False)
    assert front_door.main(["compare", "--here", "gpt2-xl"]) == 1
    assert capsys.readouterr() == ("", str(problem).replace("\n", " ") + "\n")


@pytest.mark.parametrize("command", ["estimate", "compare"])
def test_help_lists_models_options_and_defaults(command):
    done = course(command, "--help", python=BARE)
    listed = re.findall(r"^  (--[a-z-]+) VALUE", done.stdout, re.MULTILINE)
    offered = [name for name in inspect.signature(TrainingRun).parameters if name not in NOT_OFFERED]
    assert listed == [f"--{name.replace('_', '-')}" for name in offered]
    said = " ".join(done.stdout.split())
    assert " tokens per sequence (default: 1024) " in said and "(default: amp-bf16)" in said
    for choices in (PRECISIONS, OPTIMIZERS, ATTENTIONS, RECOMPUTES, ["config.json", "gpt2-xl"]):
        assert all(choice in said.replace("- ", "-") for choice in choices)


# estimate


# no options: the last two no command supports
NOT_OFFERED = ("model", "tensor_parallel", "sequence_parallel", "others")


def typed_run(*words: str) -> TrainingRun:
    """The run that the words after `estimate` describe."""
    return learn.training_run(front_door.parse(["estimate", *words]))


def test_what_is_left_out_is_as_training_run_has_it():
    assert typed_run("gpt2") == TrainingRun("gpt2")


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_output_goes_through_a_narrow_encoding(encoding, monkeypatch):
    monkeypatch.setenv("PYTHONIOENCODING", encoding)
    command = [sys.executable, "-S", "-m", "course_utils"]
    done = subprocess.run([*command, "doctor", "--here"], cwd=ROOT, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert "? estimates" in done.stdout.decode(encoding)
    model = "gpt\N{GREEK SMALL LETTER ALPHA}"
    done = subprocess.run([*command, "estimate", model], cwd=ROOT, capture_output=True)
    assert done.returncode == 1
    assert "gpt?" in done.stderr.decode(encoding)


def test_estimate_needs_the_standard_library_only():
    words = ("estimate", "gpt2-xl", "--micro-batch", "32", "--precision=bf16-master")
    done = course(*words, python=BARE)
    assert (done.returncode, done.stderr) == (0, "")
    assert course(*words, "--here", python=BARE).stdout == done.stdout
    run = TrainingRun("gpt2-xl", micro_batch=32, precision="bf16-master")
    total = re.search(r"^total +([\d.,]+) GB$", done.stdout, re.MULTILINE)
    assert total and float(total[1].replace(",", "")) == pytest.approx(estimate(run).total / 1e9, abs=5e-4)


CHOSEN = TrainingRun(
    "gpt2",
    2,
    512,
    "bf16-master",
    "adamw-foreach",
    "efficient",
    "every-2",
    3,
    4,
    1,
    bucket_view=True,
    clip_grad_norm=0.5,
    set_to_none=False,
    loss_chunks=7,
    lora_rank=8,
    lora_targets=("qkv", "up"),
    frozen_bits=4,
    card="T4-16GB",
    dropout=0.25,
    logits="fp32",
    unfused=True,
)


def test_every_choice_of_a_run_can_be_made_on_the_command_line():
    offered = inspect.signature(TrainingRun).parameters.keys() - {"global_batch", *OVERRIDES, *NOT_OFFERED}
    given = {name: getattr(CHOSEN, name) for name in offered}
    assert not [name for name, value in given.items() if value == getattr(TrainingRun("gpt2"), name)]
    given |= {name: getattr(CHOSEN.model, name) for name in OVERRIDES} | {
        "lora_targets": ",".join(CHOSEN.lora_targets)
    }
    words = []
    for name, value in given.items():
        typed = str(value).lower() if isinstance(value, bool) else getattr(value, "name", value)
        words.append(f"--{name.replace('_', '-')}={typed}")
    assert typed_run("gpt2", *words) == CHOSEN


@pytest.mark.skipif(sys.platform == "win32", reason="a pipe that nobody reads is another error there")
def test_a_reader_that_has_seen_enough_is_no_error():
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "course_utils", "estimate", "gpt2"]
    done = subprocess.run(command, cwd=ROOT, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")


# doctor


def test_doctor_works_where_nothing_is_installed():
    done = course("doctor", "--here", python=BARE)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(r"✗ torch +not installed: `python3 -m course_utils lab` installs it", done.stdout)
    assert re.search(r"✗ simulated GPU +needs torch", done.stdout)


def test_doctor_counts_the_recordings_and_those_of_real_gpus(monkeypatch):
    simulated = len(recorded.load())
    real = len(recorded.newest("run"))
    text = doctor.recorded_finding().text
    assert text == f"{simulated} runs on a simulated GPU, {real} on NVIDIA H200"
    monkeypatch.setattr(recorded, "load", lambda: {"one": {}, "two": {}})
    runs = [SimpleNamespace(device=name) for name in "BAB"]
    monkeypatch.setattr(recorded, "newest", {"run": runs}.__getitem__)
    assert doctor.recorded_finding() == ("recorded", doctor.YES, "2 runs on a simulated GPU, 3 on A, B")
    monkeypatch.setattr(recorded, "newest", lambda kind: [])
    assert doctor.recorded_finding().text == "2 runs on a simulated GPU, none on a real GPU yet"


def test_doctor_says_that_recordings_cannot_be_read(monkeypatch):
    monkeypatch.setattr(recorded, "load", lambda: json.loads("cut short"))
    assert doctor.recorded_finding()[:2] == ("recorded", doctor.NO)
    assert doctor.recorded_finding().text.startswith("cannot be read: ")


def torch_with_gpu(answer, capability=(7, 5)) -> ModuleType:
    """A torch that has one T4, whose free and total bytes `answer` gives or whose refusal it raises."""
    torch: Any = ModuleType("torch")
    torch.__version__ = "2.13.0"
    torch.version = SimpleNamespace(cuda="13.0")
    torch.cuda = SimpleNamespace(
        is_available=lambda: True,
        device_count=lambda: 1,
        mem_get_info=answer,
        get_device_name=lambda index: "Tesla T4",
        get_device_capability=lambda index: capability,
    )
    return torch


def test_doctor_says_what_a_gpu_can_do_or_that_it_does_not_answer():
    def answer(index):
        return 14 * GiB, 15 * GiB

    finding = doctor.gpu_findings(torch_with_gpu(answer))[0]
    assert (finding.name, finding.verdict) == ("GPU 0", doctor.YES)
    can = "compute capability 7.5: fp16 and efficient attention; no bf16, no flash attention"
    assert finding.text == f"Tesla T4, 15.0 GiB, 14.0 GiB free, {can}"
    assert "8.0: bf16 and flash attention" in doctor.gpu_findings(torch_with_gpu(answer, (8, 0)))[0].text

    def refuse(index):
        raise RuntimeError("CUDA error: out of memory\nmore of it")

    finding = doctor.gpu_findings(torch_with_gpu(refuse))[0]
    assert (finding.verdict, finding.text) == (doctor.NO, "does not answer: CUDA error: out of memory")


@pytest.mark.parametrize(
    ("cuda", "driver", "said"),
    [
        (None, True, "set COURSE_TORCH=cuda"),
        ("13.0", True, "update the driver"),
        ("13.0", False, "no NVIDIA GPU"),
    ],
)
def test_doctor_says_why_there_is_no_gpu(cuda, driver, said):
    assert said in doctor.no_gpu(cuda, driver)


def test_doctor_shows_the_same_in_a_notebook_and_a_terminal():
    odd = doctor.Finding("torch", doctor.NO, "a < b")
    findings = doctor.course_findings(False, False, (False, "needs torch"))
    report = doctor.DoctorReport({"Machine": (odd,), "Course": findings})
    assert "a &lt; b" in report._repr_html_() and "✗ torch" in str(report)
    assert all(finding.text in report._repr_html_() and finding.text in str(report) for finding in findings)


# The second start


@pytest.fixture
def set_up_course(tmp_path, monkeypatch) -> Path:
    """A copy of the course that is set up; its jupyterlab and pytest only say how they were called."""
    for name in ("COURSE_TORCH", *commands.SAME_ANSWERS):
        monkeypatch.delenv(name, raising=False)
    without = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "course_utils", tmp_path / "course_utils", ignore=without)
    for name in ("pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path / name)
    for name in maintain.TEST_TARGETS:
        (tmp_path / name).mkdir()
    for name in ("tests/conftest.py", *maintain.QUICK_TARGETS):
        (tmp_path / name).touch()
    folder = tmp_path / ".venv"
    venv.create(folder, with_pip=False, symlinks=os.name != "nt")
    packages = next(folder.glob("[lL]ib*/**/site-packages"))
    tell = "import json, os, sys\nprint(json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]))\n"
    for name in environment.NEEDED["test"]:
        if name in ("jupyterlab", "pytest"):
            (packages / name).mkdir()
            (packages / name / "__main__.py").write_text(tell)
        else:
            (packages / f"{name}.py").write_text("raise ImportError('only here to be found')")
        (packages / f"{name}-9999.dist-info").mkdir()
        (packages / f"{name}-9999.dist-info" / "METADATA").write_text(f"Name: {name}\nVersion: 9999\n")
    monkeypatch.setattr(environment, "SHIPPED", tmp_path)
    environment.remember(folder, environment.wanted_facts("author", {}))
    return tmp_path


@pytest.mark.parametrize(("command", "option"), [("lab", "--port=9999"), ("test", "-x")])
def test_second_start_hands_over_at_once(set_up_course, command, option):
    """Nothing is installed or asked: what stands here for JupyterLab and pytest is all that speaks."""
    done = course(command, option, root=set_up_course)
    assert done.stderr == ""
    arguments, folder, variables = json.loads(done.stdout)
    assert arguments[-1] == option
    assert Path(folder).samefile(set_up_course)
    assert variables["PYTHONPATH"].split(os.pathsep)[0] == str(set_up_course)
    assert (variables.get("COURSE_SOURCE") == "simulated") == (command == "test")


def test_a_quick_test_takes_a_lesson_and_the_core_after_the_doctor_and_a_full_one_every_sweep(set_up_course):
    *report, handed = course("test", "--quick", "-x", root=set_up_course).stdout.splitlines()
    assert any("Python" in line for line in report)
    arguments = json.loads(handed)[0]
    *others, last = arguments
    assert last == "-x"
    assert others[-len(maintain.QUICK_TARGETS) :] == list(maintain.QUICK_TARGETS)
    assert all((ROOT / name).exists() for name in maintain.QUICK_TARGETS)
    arguments, _, variables = json.loads(course("test", root=set_up_course).stdout)
    assert arguments[-3:] == ["tests", "notebooks", "solutions"]
    assert variables["OMP_NUM_THREADS"] == "1" and variables["COURSE_FULL"] == "0"
    arguments, _, variables = json.loads(course("test", "--full", root=set_up_course).stdout)
    assert arguments[-3:] == ["tests", "notebooks", "solutions"] and variables["COURSE_FULL"] == "1"
    arguments, _, _ = json.loads(course("test", "--lesson", "05", "-x", root=set_up_course).stdout)
    lesson = ["--lesson", "05", *maintain.LIGHT]
    assert arguments[-len(lesson) - 4 :] == [*lesson, "tests", "notebooks", "solutions", "-x"]


def test_paths_among_the_arguments_replace_everything(tmp_path):
    for name in ("tests", "notebooks"):
        (tmp_path / name).mkdir()
    (tmp_path / "tests" / "test_units.py").touch()
    assert maintain.test_targets(tmp_path, ["-x", "-k", "units"]) == ["tests", "notebooks"]
    assert maintain.test_targets(tmp_path, ["tests/test_units.py::test_one"]) == []


def test_windows_waits_for_what_it_starts(monkeypatch):
    monkeypatch.setattr(commands.platform, "system", lambda: "Windows")
    command = [
        sys.executable,
        "-c",
        "import os; raise SystemExit(os.environ['COURSE_SOURCE'] == 'simulated' and 7)",
    ]
    assert commands.hand_over(command, commands.course_environment(commands.SAME_ANSWERS)) == 7


# JupyterLab itself


def test_lab_opens_the_first_lesson_without_news():
    command = [sys.executable, "-m", "course_utils", "lab", "--here"]
    with running(command, ROOT, dict(os.environ)) as server:
        with urllib.request.urlopen(f"{server.address}/?token={server.token}", timeout=300) as page:
            assert page.url.split("?")[0].endswith("/lab/tree/notebooks/00_start_here.ipynb")
        setting = "lab/api/settings/@jupyterlab/apputils-extension:notification"
        address = f"{server.address}/{setting}?token={server.token}"
        with urllib.request.urlopen(address, timeout=300) as answer:
            properties = json.load(answer)["schema"]["properties"]
    assert properties["fetchNews"]["default"] == "false"
    assert properties["checkForUpdates"]["default"] is False


# The same command everywhere


def test_continuous_integration_runs_the_readme_test_command():
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert "python3 -m course_utils test" in (ROOT / "README.md").read_text(encoding="utf-8")
    assert 'exec "$python" -m course_utils test "$@"' in script
    assert "COURSE_REQUIRE_BROWSER=1" in script
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    assert f"for candidate in python3 {' '.join(CANDIDATES)}; do" in script


# The README


README = (ROOT / "README.md").read_text(encoding="utf-8")
EVIDENCE = (ROOT / "docs" / "evidence.md").read_text(encoding="utf-8")
LESSON_ROW = re.compile(
    r"^\| \[(\d\d) [^|\]]+\]\((notebooks/\w+\.ipynb)\) \| [^|]+\| (\d+) \| [^|]+\|$", re.MULTILINE
)
ESTIMATE = re.compile(r"`([a-z0-9.-]+(?: --[a-z-]+ [a-z0-9-]+)+)`[^|\n]*\| ([\d.]+) GB \|")


def test_readme_links_every_lesson_with_its_minutes():
    rows = LESSON_ROW.findall(README)
    assert [number for number, _, _ in rows] == list(map(number_of, numbered(ROOT / "notebooks")))
    assert [ROOT / link for _, link, _ in rows] == numbered(ROOT / "notebooks")
    for _, link, minutes in rows:
        course_settings = json.loads((ROOT / link).read_text(encoding="utf-8"))["metadata"]["course"]
        assert course_settings["minutes"] == int(minutes), link


def test_figures_of_evidence_are_what_the_course_estimates_and_fit_their_gpu_or_not():
    figure, words = re.findall(r"takes ([\d.]+) GB\s+by\s+estimate \(`([^`]+)`\)", EVIDENCE)[0]
    peak = estimate(typed_run(*words.split())).total
    assert f"{peak / 1e9:.1f}" == figure and peak > GPUS["A100-80GB"].memory

    cards = {"T4": "T4-16GB", "A100": "A100-80GB"}
    smallest = ""
    rows = [line for line in EVIDENCE.splitlines() if ESTIMATE.search(line)]
    assert len(rows) == 5
    for row in rows:
        smallest = next((name for mark, name in cards.items() if mark in row), smallest)
        words, figure = ESTIMATE.findall(row)[0]
        peak = estimate(typed_run(*words.split())).total
        assert f"{peak / 1e9:.1f}" == figure, row
        assert peak < 0.9 * gpu(smallest).memory, row


def test_evidence_names_every_label_of_a_measurement():
    from course_utils.measurement import SOURCES

    for label in SOURCES.values():
        assert f"| {label.format(device='…')} |" in EVIDENCE
