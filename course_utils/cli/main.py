"""What `python3 -m course_utils …` can do, command by command. Standard library only until the environment exists."""

import inspect
import io
import os
import platform
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any, get_args, get_origin

from ..errors import GpuOutOfMemory, SimulationUnavailable
from ..interactive.course_files import ROOT
from .environment import Home, interpreter, is_ready, remembered, torch_choice
from .pip_runner import SetupError

if TYPE_CHECKING:
    from ..run import TrainingRun

HELP = ("-h", "--help")
FIRST_LESSON = "notebooks/00_start_here.ipynb"
SETTINGS = Path(__file__).resolve().parent / "jupyterlab_settings"
"""A settings directory for JupyterLab: no question about news, no check for updates."""

SAME_ANSWERS = {"COURSE_SOURCE": "simulated", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""What makes notebooks print the same on every machine: simulated measurements, one thread for each kernel."""

TEST_TARGETS = ("tests", "notebooks", "solutions")
# A worker that dies ends the run: pytest-xdist's replacement would start its file again, and may wait for ever. A cell
# may take ten times what the longest one takes: the limit is for those that hang.
TEST_OPTIONS = (
    "-n", "2", "--dist", "loadfile", "--no-loadscope-reorder", "--max-worker-restart=0", "--nbval",
    "--nbval-current-env", "--nbval-sanitize-with", "tests/nbval_sanitize.cfg", "--nbval-cell-timeout=600",
)  # fmt: skip

QUICK_TARGETS = (
    "notebooks/02_adam.ipynb", "tests/test_own.py", "tests/test_measure.py", "tests/test_estimate.py",
    "tests/test_breakdown.py", "tests/test_allocator.py", "tests/test_optimizers.py",
)  # fmt: skip
"""What tells somebody that the course works on their machine: a lesson, and the engine's core."""

NOT_OFFERED = ("tensor_parallel", "sequence_parallel")
"""Choices of a run that no command can follow."""

CLOSED_FORMS_ONLY = (
    "Tensor and sequence parallelism have closed forms only, of what one rank keeps: in Python, see "
    "course_utils.rank_states and course_utils.estimating.megatron."
)


@dataclass(frozen=True)
class Command:
    """One thing that the front door does: `run` takes the arguments after the name and returns an exit code.

    `sets_up` says that it makes the course's own environment if that is not there, `has_help` that it answers `--help`
    itself; for the others the summary has to do.
    """

    summary: str
    run: Callable[[list[str]], int]
    sets_up: bool = False
    has_help: bool = True


def main(arguments: Sequence[str]) -> int:
    """Runs the command line and returns its exit code: 1, with one sentence on stderr, for what cannot be done."""
    accept_any_encoding()
    try:
        code = dispatch(list(arguments))
        sys.stdout.flush()
        return code
    except SetupError as problem:
        print(problem, file=sys.stderr)
        return 1
    except BrokenPipeError:  # a reader such as head has seen enough; Python's own last flush would fail too
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        print("\nStopped.", file=sys.stderr)
        return 130


def accept_any_encoding() -> None:
    """Prints "?" for what the terminal or file behind stdout and stderr has no letters for, instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def dispatch(arguments: list[str]) -> int:
    """Runs the command that the first argument names; without one, says what there is. SetupError for another name."""
    if not arguments or arguments[0] in (*HELP, "help"):
        print(usage())
        return 0
    name, *rest = arguments
    if name not in COMMANDS:
        close = get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise SetupError(f"There is no command {name!r}: {hint}Known are {', '.join(COMMANDS)}.")
    command = COMMANDS[name]
    if not command.has_help and any(word in HELP for word in rest):
        print(f"python3 -m course_utils {name}: {command.summary}")
        return 0
    return command.run(rest)


def usage() -> str:
    """The commands, one a line."""
    rows = [f"  {name:<9} {command.summary}" for name, command in COMMANDS.items()]
    *first, last = [name for name, command in COMMANDS.items() if command.sets_up]
    setting_up = (
        f"{', '.join(first)} and {last} make the course's own environment in .venv when they first need it; "
        "with --here they use the Python that runs them. COURSE_TORCH=cpu or cuda chooses torch's build."
    )
    return "\n".join(
        [
            "Where Did the GPU Memory Go? A course that accounts for every byte of a training step.",
            "",
            "python3 -m course_utils COMMAND [options]",
            "",
            *rows,
            "",
            *_wrapped(setting_up, ""),
        ]
    )


def lab(arguments: list[str]) -> int:
    """Opens JupyterLab on the first lesson; other options (`--no-browser`, `--port 9999`) are JupyterLab's."""
    python, rest = prepare("lab", arguments)
    return hand_over([str(python), "-m", "jupyterlab", *lab_options(), *rest], course_environment())


def lab_options() -> list[str]:
    """JupyterLab's options: the whole course in its file browser, the first lesson open, no pop-ups."""
    options = [
        f"--ServerApp.root_dir={ROOT}",
        f"--LabApp.default_url=/lab/tree/{FIRST_LESSON}",
        f"--LabApp.app_settings_dir={SETTINGS}",
    ]
    is_root = platform.system() == "Linux" and os.geteuid() == 0
    return [*options, "--allow-root"] if is_root else options


def test(arguments: list[str]) -> int:
    """Runs the tests and re-executes the notebooks; other options and paths are pytest's.

    `--quick` takes `QUICK_TARGETS` after the doctor's report, `--full` every parameter set of every sweep. Raises
    SetupError for both together.
    """
    quick, rest = take_flag(arguments, "--quick")
    full, rest = take_flag(rest, "--full")
    if quick and full:
        raise SetupError("test takes --quick or --full, not both: what tells that it works here, or all there is.")
    python, rest = prepare("test", rest)
    environment = course_environment(SAME_ANSWERS | {"COURSE_FULL": str(int(full))})
    if quick:
        subprocess.run([str(python), "-m", "course_utils", "doctor", "--here"], cwd=ROOT, env=environment, check=False)
    targets = QUICK_TARGETS if quick else test_targets(ROOT, rest)
    return hand_over([str(python), "-m", "pytest", *TEST_OPTIONS, *targets, *rest], environment)


def test_targets(root: Path, arguments: Sequence[str]) -> list[str]:
    """What pytest should look at: nothing to add if the arguments name a path, else everything there is."""
    if any(not item.startswith("-") and (root / item.split("::")[0]).exists() for item in arguments):
        return []
    return [name for name in TEST_TARGETS if (root / name).exists()]


def build(arguments: list[str]) -> int:
    """Makes notebooks, exercises and solutions from their sources; `--check` only compares."""
    rest = entered("test", "build", arguments)
    from ..authoring.build import main as build_notebooks

    return build_notebooks(rest)


def lint(arguments: list[str]) -> int:
    """Runs formatter, linter, type checker and spelling checker over the repository; 1 if any of them objects."""
    python, rest = prepare("test", arguments)
    if rest:
        raise SetupError(f"lint takes no {rest[0]!r}: it checks the whole repository.")
    failed = []
    for name, command in checks(python):
        print(f"{name} …", flush=True)
        if subprocess.run(command, cwd=ROOT, check=False).returncode:
            failed.append(name)
    print(f"Not clean: {', '.join(failed)}" if failed else "All clean")
    return 1 if failed else 0


def checks(python: Path) -> list[tuple[str, list[str]]]:
    """What `lint` runs: a name and a command line each."""
    run = [str(python), "-m"]
    return [
        ("ruff check", [*run, "ruff", "check", "--quiet", "."]),
        ("ruff format", [*run, "ruff", "format", "--check", "--quiet", "."]),
        ("pyrefly", [*run, "pyrefly", "check", "--python-interpreter-path", str(python)]),
        ("codespell", [*run, "codespell_lib"]),
    ]


def doctor(arguments: list[str]) -> int:
    """Prints what this machine can do, looking from the course's environment where there is one."""
    here, rest = take_flag(arguments, "--here")
    if rest:
        raise SetupError(f"doctor takes no {rest[0]!r}: run it alone, or with --here for the Python in use.")
    home = Home(ROOT)
    memory = remembered(home)
    ready = is_ready(home, "lab", torch_choice(home.system, before=memory.get("torch", "")), memory)
    if ready and not here and not is_current(home.python):
        return hand_over([str(home.python), "-m", "course_utils", "doctor"], course_environment())
    from .doctor import report

    print(report())
    return 0


def estimate(arguments: list[str]) -> int:
    """Prints what a training run is estimated to take; needs nothing but Python, so that `--here` changes nothing."""
    from .. import estimate as estimate_bytes

    _, rest = take_flag(arguments, "--here")
    if any(word in HELP for word in rest):
        return print_options("estimate")
    run = chosen_run("estimate", rest)
    return print_answer(lambda: f"{run}\n{estimate_bytes(run)}")


def compare(arguments: list[str]) -> int:
    """Prints a run's estimate beside its measurement, live or simulated; works in the course's environment.

    The run is read first: what is refused should not wait for a set-up.
    """
    _, rest = take_flag(arguments, "--here")
    if any(word in HELP for word in rest):
        return print_options("compare")
    run = chosen_run("compare", rest)
    entered("lab", "compare", arguments)
    from .. import compare as compare_bytes

    return print_answer(lambda: compare_bytes(run))


def fit(arguments: list[str]) -> int:
    """Prints the configuration that fits a card and loses least time; needs nothing but Python."""
    from argparse import ArgumentParser

    from ..gpus import GPUS
    from ..planning.fit import MAY_CHANGE
    from ..planning.fit import fit as fit_run

    _, rest = take_flag(arguments, "--here")
    parser = ArgumentParser(prog="python3 -m course_utils fit", description="Make a training run fit a GPU.")
    parser.add_argument("model", help="a preset's name, or the path of a Hugging Face config.json")
    parser.add_argument("--gpu", required=True, help=f"one of {', '.join(GPUS)}")
    parser.add_argument("--global-batch", type=int, required=True, help="sequences that one step learns from")
    parser.add_argument("--seq-len", type=int, default=1024, help="tokens in a sequence")
    parser.add_argument("--world-size", type=int, default=1, help="how many such GPUs share the work")
    parser.add_argument("--may-change", default="", help=f"what it may change, with commas: {', '.join(MAY_CHANGE)}")
    asked = vars(parser.parse_args(rest))
    asked["may_change"] = tuple(name for name in asked["may_change"].split(",") if name)
    with warnings_in_words():
        return print_answer(lambda: fit_run(asked.pop("model"), asked.pop("gpu"), **asked))


def benchmark(arguments: list[str]) -> int:
    """Prints and saves how right and how fast the engine is; works in the course's environment."""
    from ..benchmark import WrongOption, options
    from ..benchmark import main as print_tables

    _, rest = take_flag(arguments, "--here")
    try:
        if not any(word in HELP for word in rest):
            options(rest)  # what is refused should not wait for a set-up
            entered("lab", "benchmark", arguments, SAME_ANSWERS)
        return print_tables(rest)
    except WrongOption as problem:
        raise SetupError(f"{problem}.") from None


def rehearse(arguments: list[str]) -> int:
    """Runs every demo as it will run on this machine, and says what happened; works in the course's environment.

    With `--gpu NAME` nothing runs: it says by estimate what would happen there. Returns 1 if anything would not go as
    the demos say.
    """
    words = _words(take_flag(arguments, "--here")[1])
    if words and (len(words) != 2 or words[0] != "--gpu"):
        raise SetupError(f"rehearse takes no {words[0]!r}: it runs every demo here, or says what --gpu NAME would do.")
    entered("lab", "rehearse", arguments)
    from ..demos import rehearse as rehearse_demos

    try:
        rehearsed = rehearse_demos(gpu_name=words[1] if words else "", say=print)
    except ValueError as problem:
        raise SetupError(str(problem)) from None
    return 1 if rehearsed.problems else 0


def record(arguments: list[str]) -> int:
    """Records the course's runs on the GPU that is here. Makes no environment: this Python needs torch alone."""
    from ..recording import recorder

    try:
        return recorder.main(arguments)
    except recorder.RecordingError as problem:
        raise SetupError(str(problem)) from None
    except (OSError, ValueError) as problem:  # a full disk, a file of another schema
        raise SetupError(f"Recording stopped: {problem}") from None


def quiz(arguments: list[str]) -> int:
    """Asks a lesson's questions in the terminal; needs nothing but Python, so that `--here` changes nothing."""
    from ..interactive.quiz import ask
    from ..lessons import lessons
    from ..lessons import quiz as quiz_of

    _, rest = take_flag(arguments, "--here")
    if len(rest) != 1 or not rest[0].isdecimal():
        known = ", ".join(map(str, lessons()))
        raise SetupError(f"Name one lesson by its number, as in: quiz 1. It is one of {known}.")
    try:
        asked = quiz_of(int(rest[0]))
    except ValueError as problem:
        raise SetupError(str(problem)) from None
    attempt = ask(asked)
    if attempt.finished:
        from ..interactive.progress import mark_quiz

        try:
            mark_quiz(asked.lesson, sum(attempt.first_tries), len(attempt.first_tries))
        except ValueError as problem:  # a full disk, a folder that cannot be written
            raise SetupError(f"Your result is not kept. {problem}") from None
    return 0


def progress(arguments: list[str]) -> int:
    """Prints which exercises and quizzes are done; needs nothing but Python, so that `--here` changes nothing."""
    from ..interactive.keeping import course_home
    from ..interactive.progress import FILE
    from ..interactive.progress import progress as progress_now

    _, rest = take_flag(arguments, "--here")
    if rest:
        raise SetupError(f"progress takes no {rest[0]!r}: it shows all lessons.")
    return print_answer(lambda: f"{progress_now()}\nThe file is {course_home() / FILE}.")


def find(arguments: list[str]) -> int:
    """Prints where the course speaks of some words; needs nothing but Python, so that `--here` changes nothing."""
    from ..lessons.shared.search import find as find_words

    _, rest = take_flag(arguments, "--here")
    if any(word in HELP for word in rest):
        print("python3 -m course_utils find WORDS: where lessons, exercises, glossary, cheat sheet, errata and quizzes")
        print("speak of them. No solution is searched.")
        return 0
    try:
        findings = find_words(*rest)
    except ValueError as problem:
        raise SetupError(f"{problem}.") from None
    if not findings.places:
        raise SetupError(repr(findings))
    print(findings)
    return 0


def grade(arguments: list[str]) -> int:
    """Grades a folder of notebooks, each in a process of its own; works in the course's environment."""
    _, rest = take_flag(arguments, "--here")
    if not any(word in HELP for word in rest):
        entered("lab", "grade", arguments)
    from ..classroom.grading import main as grade_folder

    return in_words(lambda: grade_folder(rest))


def release(arguments: list[str]) -> int:
    """Copies the course without solutions; needs nothing but Python, so that `--here` changes nothing."""
    from ..classroom.release import main as release_to

    _, rest = take_flag(arguments, "--here")
    return in_words(lambda: release_to(rest))


def nbgrader(arguments: list[str]) -> int:
    """Writes the exercises as nbgrader's source; needs nothing but Python, so that `--here` changes nothing."""
    from ..classroom.nbgrader_course import main as write_course

    _, rest = take_flag(arguments, "--here")
    return in_words(lambda: write_course(rest))


def colab(arguments: list[str]) -> int:
    """Writes copies of the notebooks for Colab; needs nothing but Python, so that `--here` changes nothing."""
    from ..classroom.colab import main as write_copies

    _, rest = take_flag(arguments, "--here")
    return in_words(lambda: write_copies(rest))


def links(arguments: list[str]) -> int:
    """Prints links that open the lessons elsewhere; needs nothing but Python, so that `--here` changes nothing."""
    from ..classroom.links import main as print_links

    _, rest = take_flag(arguments, "--here")
    return in_words(lambda: print_links(rest))


def in_words(work: Callable[[], int]) -> int:
    """What `work` returns. SetupError for what it refuses, and for files that cannot be written."""
    try:
        return work()
    except (ValueError, OSError) as problem:
        raise SetupError(f"{problem}.") from None


def site(arguments: list[str]) -> int:
    """Makes the website; works in the course's environment for tests."""
    rest = entered("test", "site", arguments)
    from ..authoring.site import main as make_site

    return make_site(rest)


def slides(arguments: list[str]) -> int:
    """Makes slides of lessons; works in the course's environment for tests."""
    rest = entered("test", "slides", arguments)
    from ..authoring.slides import main as make_slides

    return make_slides(rest)


def print_answer(answer: Callable[[], object]) -> int:
    """Prints what `answer` returns. SetupError for a run that is refused, or too large for this GPU, or that cannot be
    simulated here.
    """
    try:
        text = str(answer())
    except ValueError as problem:
        raise SetupError(str(problem)) from None
    except (GpuOutOfMemory, SimulationUnavailable) as problem:
        raise SetupError(" ".join(str(problem).split())) from None  # torch's own words may have several lines
    print(text)
    return 0


def print_options(command: str) -> int:
    """Prints how a run is spelled after `command`: the models, and each option with its default and its choices."""
    from .. import PRESETS, TrainingRun
    from ..run import ATTENTIONS, OPTIMIZERS, PRECISIONS, RECOMPUTES

    signature = inspect.signature(TrainingRun)
    values = {
        "--precision": PRECISIONS,
        "--attention": ATTENTIONS,
        "--recompute": [*RECOMPUTES, "every-K"],
        "--optimizer": OPTIMIZERS,
    }
    lines = [
        f"python3 -m course_utils {command} MODEL [options]",
        "",
        *_wrapped(f"MODEL is one of {', '.join(PRESETS)}, or the path of a Hugging Face config.json.", ""),
        "",
        "Options and their defaults:",
    ]
    for option, parameter in _options(signature).items():
        lines.append(f"  {option:<21} {_default_in_words(parameter, signature.parameters[parameter].default)}".rstrip())
        if option in values:
            lines += _wrapped(", ".join(values[option]), " " * 6)
    print("\n".join([*lines, "", *_wrapped(CLOSED_FORMS_ONLY, "")]))
    return 0


def _wrapped(text: str, indent: str) -> list[str]:
    return wrap(text, 100, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)


def _default_in_words(parameter: str, default: Any) -> str:
    if parameter == "lora_targets":
        return "attention"
    return "" if default is None else str(getattr(default, "name", default))


def chosen_run(command: str, arguments: Sequence[str]) -> "TrainingRun":
    """The run that the arguments spell. SetupError for one that is refused."""
    from ..run import TrainingRun

    try:
        with warnings_in_words():
            return TrainingRun(**run_choices(command, inspect.signature(TrainingRun), arguments))
    except ValueError as problem:
        raise SetupError(str(problem)) from None


@contextmanager
def warnings_in_words() -> Iterator[None]:
    """Inside, a warning is a line on stderr, without the line of code that it came from."""
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: print(message, file=sys.stderr)
        yield


def run_choices(command: str, signature: inspect.Signature, arguments: Sequence[str]) -> dict[str, Any]:
    """The choices of a TrainingRun that a command line makes: the model first, then `--micro-batch 4` and the like.

    Raises SetupError for an option that is none of the parameters, comes twice, or has no value.
    """
    options = _options(signature)
    words = _words(arguments)
    if not words or words[0].startswith("-"):
        raise SetupError(
            f"{command} needs a model first, as in: {command} gpt2-xl --micro-batch 32. {_listed(options)}"
        )
    choices: dict[str, Any] = {"model": words[0]}
    rest = iter(words[1:])
    for option in rest:
        if option.removeprefix("--").replace("-", "_") in NOT_OFFERED:
            raise SetupError(f"{command} has no {option}. {CLOSED_FORMS_ONLY}")
        if option not in options:
            close = get_close_matches(option, options, n=1)
            hint = f"; did you mean {close[0]}?" if close else "."
            raise SetupError(f"{command} knows no {option!r}{hint} {_listed(options)}")
        value = next(rest, None)
        if value is None:
            raise SetupError(f"{option} needs a value after it.")
        if options[option] in choices:
            raise SetupError(f"{option} is there twice: leave one of them out.")
        choices[options[option]] = _converted(signature.parameters[options[option]], value)
    return choices


def _words(arguments: Sequence[str]) -> list[str]:
    """The arguments with an option and its value apart: `--gpu=T4-16GB` is two words."""
    return [part for item in arguments for part in (item.split("=", 1) if item.startswith("--") else [item])]


def _options(signature: inspect.Signature) -> dict[str, str]:
    left_out = ("model", *NOT_OFFERED)
    return {f"--{name.replace('_', '-')}": name for name in signature.parameters if name not in left_out}


def _listed(options: Mapping[str, str]) -> str:
    return f"Options: {', '.join(options)}."


def _converted(parameter: inspect.Parameter, text: str) -> Any:
    """The value in the parameter's type where it can be had (a number, true or false, none, names with commas between
    them), the text otherwise: TrainingRun then says what is wrong with it.
    """
    wanted = {get_origin(kind) or kind for kind in (parameter.annotation, *get_args(parameter.annotation))}
    if bool in wanted and text.lower() in ("true", "false"):
        return text.lower() == "true"
    if type(None) in wanted and text.lower() == "none":
        return None
    if tuple in wanted and "," in text:
        return tuple(text.split(","))
    if int in wanted and re.fullmatch(r"[+-]?\d+", text):
        return int(text)
    number = r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?"
    return float(text) if float in wanted and re.fullmatch(number, text) else text


COMMANDS = {
    "lab": Command("open the course in JupyterLab (options go to JupyterLab)", lab, sets_up=True),
    "test": Command(
        "run all tests and notebooks (--quick, --full; other options and paths go to pytest)", test, sets_up=True
    ),
    "doctor": Command("say what this machine can do", doctor, has_help=False),
    "estimate": Command("estimate a training run: estimate gpt2-xl --micro-batch 32 --seq-len 1024", estimate),
    "compare": Command("estimate, measure, show both: compare gpt2-xl --recompute full", compare, sets_up=True),
    "fit": Command("make a run fit a card: fit gpt2-xl --gpu RTX5090-32GB --global-batch 32", fit),
    "benchmark": Command("say how right and how fast the engine is (--table NAME, --quick)", benchmark, sets_up=True),
    "record": Command("record the course's runs on this GPU: record --out DIR --minutes 30", record),
    "rehearse": Command("run every demo beforehand (--gpu NAME: by estimate)", rehearse, sets_up=True, has_help=False),
    "quiz": Command("ask the questions of a lesson's quiz: quiz 1", quiz, has_help=False),
    "progress": Command("show which exercises and quizzes you have done", progress, has_help=False),
    "find": Command("search lessons, glossary and the rest: find reserved memory", find),
    "release": Command("copy the course without solutions: release FOLDER", release),
    "grade": Command("grade a folder or a .zip of notebooks: grade FOLDER --out grades", grade, sets_up=True),
    "nbgrader": Command("write the exercises as nbgrader's source: nbgrader FOLDER", nbgrader),
    "colab": Command("copy the notebooks for Google Colab: colab FOLDER [--repository URL]", colab),
    "links": Command("print links that open the lessons on JupyterHub, Binder, Colab: links --repository URL", links),
    "build": Command("make the notebooks from their sources (--check: only compare)", build, sets_up=True),
    "site": Command("make the website: site --out site", site, sets_up=True),
    "slides": Command("make slides of lessons, with speaker notes: slides 05 --out slides", slides, sets_up=True),
    "lint": Command("check format, style, types and spelling", lint, sets_up=True, has_help=False),
}


# Getting into the environment


def prepare(purpose: str, arguments: list[str]) -> tuple[Path, list[str]]:
    """The Python to use, set up if need be, and the arguments without `--here`."""
    here, rest = take_flag(arguments, "--here")
    return interpreter(Home(ROOT), purpose, here), rest


def entered(purpose: str, name: str, arguments: list[str], variables: Mapping[str, str] | None = None) -> list[str]:
    """The arguments without `--here`, once this is the environment for the purpose. Where it is another, this goes on
    as the same command there, with `variables`, and does not return.
    """
    python, rest = prepare(purpose, arguments)
    if not is_current(python):
        command = [str(python), "-m", "course_utils", name, "--here", *rest]
        sys.exit(hand_over(command, course_environment(variables), folder=Path.cwd()))
    return rest


def take_flag(arguments: Sequence[str], flag: str) -> tuple[bool, list[str]]:
    """Whether the flag is among the arguments, and the others."""
    return flag in arguments, [item for item in arguments if item != flag]


def is_current(python: Path) -> bool:
    """Whether `python` is the interpreter that runs this, or the one of the environment that this runs in."""
    return python == Path(sys.executable) or python.parent.parent.resolve() == Path(sys.prefix).resolve()


def course_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Environment variables for what the front door starts: the course importable from any folder, and `extra`."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **(extra or {})}


def hand_over(
    command: list[str], environment: Mapping[str, str], system: str = platform.system(), folder: Path = ROOT
) -> int:
    """Goes on as `command` in a folder; on Windows, which cannot, runs it there and returns its exit code."""
    sys.stdout.flush()
    sys.stderr.flush()
    if system != "Windows":
        os.chdir(folder)
        os.execve(command[0], command, dict(environment))
    return subprocess.run(command, cwd=folder, env=dict(environment), check=False).returncode
