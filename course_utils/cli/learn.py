"""Commands for learners: open the course, estimate and compare runs, take quizzes, look things up."""

import inspect
import os
import platform
import sys
import tomllib
from argparse import REMAINDER, ArgumentParser, Namespace
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..gpus import GPUS
from ..interactive.course_files import PACKAGE, ROOT, SHIPPED, old_numbers
from ..models import LOGITS, PRESETS
from ..planning import out_of_memory
from ..run import ATTENTIONS, OPTIMIZERS, PRECISIONS, RECOMPUTES, TrainingRun
from . import start
from .command import Command, course_environment, hand_over, is_current, no_options, refuse_outside_a_course
from .environment import Home, SetupError, is_ready, remembered, torch_choice

FIRST_LESSON = "/lab/tree/notebooks/00_start_here.ipynb"
JUPYTERLAB = (
    f"--LabApp.app_settings_dir={Path(__file__).resolve().parent / 'jupyterlab_settings'}",
    "--ServerApp.contents_manager_class=course_utils.cli.contents.CourseContents",
)
"""No question about news, no check for updates, room for names, no notebook changed by being opened."""

MODEL = f"one of {', '.join(PRESETS)}, or the path of a Hugging Face config.json"

CLOSED_FORMS_ONLY = (
    "Tensor and sequence parallelism have only closed forms for what one rank keeps. In Python, see "
    "course_utils.rank_states and course_utils.estimating.megatron."
)

_OPTIONS_FILE = Path(__file__).with_name("run_options.toml")
RUN_OPTIONS: dict[str, list[str]] = tomllib.loads(_OPTIONS_FILE.read_text(encoding="utf-8"))
"""Each option of a run: its value's kind, one of `KINDS`, and what it chooses. TrainingRun has defaults."""

KINDS: dict[str, type] = {kind.__name__: kind for kind in (int, float, str, bool, tuple)}
KNOWN = {
    "precisions": PRECISIONS,
    "optimizers": OPTIMIZERS,
    "attentions": ATTENTIONS,
    "recomputes": RECOMPUTES,
    "cards": GPUS,
    "formats": LOGITS,
}


def lab_options(parser: ArgumentParser) -> None:
    parser.description = "Open the course in JupyterLab, which gets all other options, such as --no-browser."
    parser.set_defaults(others=[])


def lab(chosen: Namespace) -> int:
    """Open JupyterLab on the first lesson: the whole course in its file browser, no pop-ups."""
    refuse_outside_a_course("lab")
    if old_numbers(ROOT):
        print(old_numbers(ROOT), file=sys.stderr)
    root = ["--allow-root"] if platform.system() == "Linux" and os.geteuid() == 0 else []
    own = [f"--ServerApp.root_dir={ROOT}", f"--LabApp.default_url={FIRST_LESSON}", *JUPYTERLAB]
    first = os.environ.get("PYTHONSTARTUP") or str(PACKAGE / "interactive" / "kernel_start.py")
    command = [sys.executable, "-m", "jupyterlab", *own, *root, *chosen.others]
    return hand_over(command, course_environment({"PYTHONSTARTUP": first}))


def doctor(chosen: Namespace) -> int:
    """Print what this machine can do, as seen from the course's environment where there is one."""
    home = Home(SHIPPED)
    memory = remembered(home)
    ready = is_ready(home, "lab", torch_choice(home.system, before=memory.get("torch", "")), memory)
    if ready and not chosen.here and not is_current(home.python):
        return hand_over([str(home.python), "-m", "course_utils", "doctor"], course_environment())
    from .doctor import report

    print(report())
    return 0


def run_options(parser: ArgumentParser) -> None:
    """The model, and `--micro-batch 4` and the like."""
    parser.usage = "%(prog)s MODEL [options]"
    parser.epilog = CLOSED_FORMS_ONLY
    parser.add_argument("model", metavar="MODEL", help=MODEL)
    parameters = inspect.signature(TrainingRun).parameters
    known = {name: ", ".join(choices) for name, choices in KNOWN.items()}
    for name, (called, told) in RUN_OPTIONS.items():
        kind = KINDS[called]
        default = parameters[name].default
        shown = str(default).lower() if kind is bool and default is not None else default
        value = partial(_value, kind, default is None)
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=value, metavar="VALUE", default=shown, help=told.format(**known))
    parser.set_defaults(examine=training_run)


def _value(kind: type, optional: bool, text: str) -> Any:
    """`text` as a value of that kind, or as it is where it is none.

    TrainingRun says what is wrong with it better than argparse's own `type` and `choices` would: with what is
    allowed, and the nearest name.
    """
    if optional and text.lower() == "none":
        return None
    if kind is bool:
        return {"true": True, "false": False}.get(text.lower(), text)
    if kind is tuple:
        return tuple(text.split(","))
    with suppress(ValueError):
        return kind(text)
    return text


def training_run(chosen: Namespace) -> TrainingRun:
    """The run that was chosen. Raises ValueError as TrainingRun does."""
    return TrainingRun(chosen.model, **{name: getattr(chosen, name) for name in RUN_OPTIONS})


def estimate(chosen: Namespace) -> int:
    """Print the memory that a training run is estimated to need, and what a GPU's counters would say."""
    from .. import counted
    from .. import estimate as estimate_bytes

    run = training_run(chosen)
    print(f"{run}\n{estimate_bytes(run)}")
    try:
        print(f"\n{counted(run)}")
    except ValueError as error:
        print(f"\nNo estimate of the GPU's own counters: {error}")
    return 0


def compare(chosen: Namespace) -> int:
    """Print a run's estimate next to its measurement, live or simulated."""
    from .. import compare as compare_bytes

    print(compare_bytes(training_run(chosen)))
    return 0


def fit_options(parser: ArgumentParser) -> None:
    from ..planning.fit import MAY_CHANGE

    parser.add_argument("model", metavar="MODEL", help=MODEL)
    parser.add_argument("--gpu", metavar="GPU", required=True, help=f"required, one of {', '.join(GPUS)}")
    parser.add_argument(
        "--global-batch", type=int, required=True, help="required, sequences per optimizer step"
    )
    parser.add_argument("--seq-len", type=int, default=1024, help="tokens per sequence")
    parser.add_argument("--world-size", type=int, default=1, help="number of such GPUs")
    changes = f"separated by commas: {', '.join(MAY_CHANGE)}; without it, nothing that changes results"
    parser.add_argument("--may-change", default="", metavar="NAMES", help=changes)


def fit(chosen: Namespace) -> int:
    """Print the configuration that fits a card at the least cost in time."""
    from ..planning.fit import fit as fit_run

    may_change = tuple(filter(None, chosen.may_change.split(",")))
    size = {name: getattr(chosen, name) for name in ("global_batch", "seq_len", "world_size")}
    print(fit_run(chosen.model, chosen.gpu, may_change=may_change, **size))
    return 0


def watch_options(parser: ArgumentParser) -> None:
    """The script, its arguments, and where to run it; what stands after the script's name is the script's."""
    parser.description = "Run a training script of yours, unchanged, for two steps on a simulated GPU."
    sources = ("simulated", "live", "auto")
    parser.add_argument(
        "--source", choices=sources, default="simulated", help="live: on the GPU of this machine"
    )
    parser.add_argument(
        "--save", metavar="FILE", type=Path, help="save the measurement here (default: nowhere)"
    )
    parser.add_argument(
        "--against", metavar="FILE", type=Path, help="a saved one to compare with (default: none)"
    )
    parser.add_argument("script", help="a Python file")
    parser.add_argument("arguments", nargs=REMAINDER, help="the script's own")


def watch(chosen: Namespace) -> int:
    """Print where a script's memory goes.

    The script runs in this Python, which has what it imports. Handlers that it left to the end of the process
    do not run, as they might write.
    """
    if find_spec("torch") is None:
        raise SetupError(f"{sys.executable} has no torch: use the Python that your script runs with")
    from ..errors import ScriptError
    from ..measuring.differences import difference
    from ..measuring.measurement_file import read_measurement, save_measurement
    from ..measuring.script_report import report
    from ..measuring.scripts import watch_script

    code = 0
    before = read_measurement(chosen.against) if chosen.against else None
    try:
        measured = watch_script(chosen.script, chosen.arguments, chosen.source)
        print(f"{chosen.script}, run unchanged\n\n{report(measured)}")
        if before:
            print(f"\n{difference(before, measured)!r}")
        if chosen.save:
            save_measurement(measured, chosen.save)
    except ScriptError as error:
        print(error, file=sys.stderr)
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def quiz_options(parser: ArgumentParser) -> None:
    from ..lessons import lessons

    known = ", ".join(map(str, lessons()))
    parser.add_argument(
        "lesson", type=int, choices=lessons(), metavar="LESSON", help=f"its number: one of {known}"
    )


def quiz(chosen: Namespace) -> int:
    """Ask a lesson's questions in the terminal and store the result."""
    from ..interactive.progress import mark_quiz
    from ..interactive.quiz import ask
    from ..lessons import quiz as quiz_of

    attempt = ask(quiz_of(chosen.lesson))
    if attempt.finished:
        mark_quiz(chosen.lesson, sum(attempt.first_tries), len(attempt.first_tries))
    return 0


def progress(_: Namespace) -> int:
    """Print which exercises and quizzes are done."""
    from ..interactive.learner_folder import progress_file
    from ..interactive.progress import progress as progress_now

    print(f"{progress_now()}\nThe file is {progress_file()}.")
    return 0


def find_options(parser: ArgumentParser) -> None:
    parser.description = "Search lessons, exercises, docs and quizzes. Solutions are not searched."
    parser.add_argument("words", nargs="*", help="what to look for")


def find(chosen: Namespace) -> int:
    """Print where the course mentions these words."""
    from ..lessons.shared.search import find as find_words

    findings = find_words(*chosen.words)
    if not findings.places:
        raise ValueError(repr(findings))
    print(findings)
    return 0


COMMANDS = {
    "start": Command("copy the course out of the installed package: start FOLDER", start.options, start.run),
    "lab": Command("open the course in JupyterLab (options go to JupyterLab)", lab_options, lab, "lab"),
    "doctor": Command("report what this machine can do", no_options, doctor),
    "estimate": Command(
        "estimate a run: estimate gpt2-xl --micro-batch 32 --seq-len 1024", run_options, estimate
    ),
    "compare": Command(
        "estimate, measure, show both: compare gpt2-xl --recompute full", run_options, compare, "torch"
    ),
    "fit": Command(
        "make a run fit a card: fit gpt2-xl --gpu RTX5090-32GB --global-batch 32", fit_options, fit
    ),
    "watch": Command(
        "watch an unchanged training script's memory: watch train.py --batch 8", watch_options, watch
    ),
    "oom": Command(
        "explain an out-of-memory message, pasted or in a log", out_of_memory.options, out_of_memory.run
    ),
    "quiz": Command("ask the questions of a lesson's quiz: quiz 1", quiz_options, quiz),
    "progress": Command("show which exercises and quizzes you have done", no_options, progress),
    "find": Command("search lessons, glossary and docs: find reserved memory", find_options, find),
}
