"""Commands for learners: open the course, estimate and compare runs, take quizzes, look things up."""

import inspect
import os
import platform
import sys
from argparse import REMAINDER, SUPPRESS, Namespace
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args, get_origin

from ..gpus import GPUS
from ..interactive.command_line import Parser
from ..interactive.course_files import ROOT
from ..models import LOGITS, PRESETS
from ..run import ATTENTIONS, OPTIMIZERS, PRECISIONS, RECOMPUTES, TrainingRun
from .command import HERE, Command, course_environment, hand_over, is_current, no_options
from .environment import Home, SetupError, is_ready, remembered, torch_choice

FIRST_LESSON = "/lab/tree/notebooks/00_start_here.ipynb"
JUPYTERLAB = (
    f"--LabApp.app_settings_dir={Path(__file__).resolve().parent / 'jupyterlab_settings'}",
    "--ServerApp.contents_manager_class=course_utils.cli.contents.CourseContents",
)
"""No question about news, no check for updates, room for the names of files, no notebook changed by being opened."""

MODEL = f"one of {', '.join(PRESETS)}, or the path of a Hugging Face config.json"

CLOSED_FORMS_ONLY = (
    "Tensor and sequence parallelism have closed forms only, of what one rank keeps: in Python, see "
    "course_utils.rank_states and course_utils.estimating.megatron."
)

NOT_OFFERED = ("model", "tensor_parallel", "sequence_parallel")  # no options: the last two no command supports

VALUES: dict[str, Sequence[str]] = {
    "precision": tuple(PRECISIONS),
    "attention": ATTENTIONS,
    "recompute": (*RECOMPUTES, "every-K"),
    "optimizer": tuple(OPTIMIZERS),
    "logits": LOGITS,
    "card": tuple(GPUS),
}


def read_lab(arguments: Sequence[str]) -> list[str]:
    summary = "Open the course in JupyterLab. Other options, as --no-browser or --port 9999, go to JupyterLab."
    return Parser("lab", summary, HERE).parse_known_args(arguments)[1]


def lab(options: list[str]) -> int:
    """Open JupyterLab on the first lesson: the whole course in its file browser, no pop-ups."""
    root = ["--allow-root"] if platform.system() == "Linux" and os.geteuid() == 0 else []
    chosen = [f"--ServerApp.root_dir={ROOT}", f"--LabApp.default_url={FIRST_LESSON}", *JUPYTERLAB]
    first = os.environ.get("PYTHONSTARTUP") or str(ROOT / "course_utils" / "interactive" / "kernel_start.py")
    command = [sys.executable, "-m", "jupyterlab", *chosen, *root, *options]
    return hand_over(command, course_environment({"PYTHONSTARTUP": first}))


def doctor(options: Namespace) -> int:
    """Print what this machine can do, as seen from the course's environment where there is one."""
    home = Home(ROOT)
    memory = remembered(home)
    ready = is_ready(home, "lab", torch_choice(home.system, before=memory.get("torch", "")), memory)
    if ready and not options.here and not is_current(home.python):
        return hand_over([str(home.python), "-m", "course_utils", "doctor"], course_environment())
    from .doctor import report

    print(report())
    return 0


def read_run(command: str, arguments: Sequence[str]) -> TrainingRun:
    """The run that a command line describes: the model first, then `--micro-batch 4` and the like.

    Raises WrongOption for an unknown option, and ValueError as TrainingRun does for values.
    """
    here = HERE if command == "compare" else None
    usage = "%(prog)s MODEL [options]"
    parser = Parser(command, f"{command.capitalize()} a training run.", here, usage=usage, epilog=CLOSED_FORMS_ONLY)
    parser.add_argument("model", metavar="MODEL", help=MODEL)
    for name, parameter in inspect.signature(TrainingRun).parameters.items():
        option = f"--{name.replace('_', '-')}"
        if name not in NOT_OFFERED:
            value = partial(_value, parameter)
            parser.add_argument(option, type=value, metavar="VALUE", default=SUPPRESS, help=_described(parameter))
    choices = vars(parser.parse_args(arguments))
    del choices["here"]
    return TrainingRun(**choices)


def _described(parameter: inspect.Parameter) -> str:
    default = "attention" if parameter.name == "lora_targets" else parameter.default
    values = f"{', '.join(VALUES[parameter.name])} " if parameter.name in VALUES else ""
    return values + (f"(default: {default})" if default is not None else "")


def _value(parameter: inspect.Parameter, text: str) -> Any:
    """`text` as what the parameter may be (number, boolean, none, names with commas between them).

    Otherwise the text: TrainingRun then says what is wrong with it.
    """
    types = {get_origin(kind) or kind for kind in (parameter.annotation, *get_args(parameter.annotation))}
    if bool in types and text.lower() in ("true", "false"):
        return text.lower() == "true"
    if type(None) in types and text.lower() == "none":
        return None
    if tuple in types and "," in text:
        return tuple(text.split(","))
    with suppress(ValueError):
        return int(text) if int in types else float(text) if float in types else text
    return text


def estimate(run: TrainingRun) -> int:
    """Print the memory that a training run is estimated to need, and what a GPU's counters would say."""
    from .. import counted
    from .. import estimate as estimate_bytes

    print(f"{run}\n{estimate_bytes(run)}")
    try:
        print(f"\n{counted(run)}")
    except ValueError as error:
        print(f"\nWhat a GPU's counters would say is not known: {error}")
    return 0


def compare(run: TrainingRun) -> int:
    """Print a run's estimate next to its measurement, live or simulated."""
    from .. import compare as compare_bytes

    print(compare_bytes(run))
    return 0


def read_fit(arguments: Sequence[str]) -> dict[str, Any]:
    """The arguments of `planning.fit.fit`."""
    from ..planning.fit import MAY_CHANGE

    parser = Parser("fit", "Make a training run fit a GPU.")
    parser.add_argument("model", help=MODEL)
    parser.add_argument("--gpu", dest="card", metavar="GPU", required=True, help=f"one of {', '.join(GPUS)}")
    parser.add_argument("--global-batch", type=int, required=True, help="sequences per optimizer step")
    parser.add_argument("--seq-len", type=int, default=1024, help="tokens per sequence (default: 1024)")
    parser.add_argument("--world-size", type=int, default=1, help="number of such GPUs (default: 1)")
    parser.add_argument("--may-change", default="", help=f"what it may change, with commas: {', '.join(MAY_CHANGE)}")
    options = vars(parser.parse_args(arguments))
    options["may_change"] = tuple(name for name in options["may_change"].split(",") if name)
    del options["here"]
    return options


def fit(options: dict[str, Any]) -> int:
    """Print the configuration that fits a card at the least cost in time."""
    from ..planning.fit import fit as fit_run

    print(fit_run(**options))
    return 0


def read_watch(arguments: Sequence[str]) -> Namespace:
    """The script, its arguments, and where to run it; what stands after the script's name is the script's."""
    parser = Parser("watch", "Run a training script of yours, unchanged, for two steps on a simulated GPU.")
    sources = ("simulated", "live", "auto")
    parser.add_argument("--source", choices=sources, default="simulated", help="live: on the GPU of this machine")
    parser.add_argument("--save", metavar="FILE", type=Path, help="keep the measurement, to compare a later one with")
    parser.add_argument("--against", metavar="FILE", type=Path, help="show what changed since that was kept")
    parser.add_argument("script", help="a Python file")
    parser.add_argument("arguments", nargs=REMAINDER, help="the script's own")
    return parser.parse_args(arguments)


def watch(options: Namespace) -> int:
    """Print where a script's memory goes. It runs in this Python, which has what it imports; handlers that it left to
    the end of the process do not run, as they might write."""
    if find_spec("torch") is None:
        raise SetupError(f"{sys.executable} has no torch: use the Python that your script runs with")
    from ..errors import ScriptError
    from ..measuring.differences import difference
    from ..measuring.measurement_file import read_measurement, save_measurement
    from ..measuring.script_report import report
    from ..measuring.scripts import watch_script

    code = 0
    before = read_measurement(options.against) if options.against else None
    try:
        measured = watch_script(options.script, options.arguments, options.source)
        print(f"{options.script}, run as it is\n\n{report(measured)}")
        if before:
            print(f"\n{difference(before, measured)!r}")
        if options.save:
            save_measurement(measured, options.save)
    except ScriptError as error:
        print(error, file=sys.stderr)
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def read_quiz(arguments: Sequence[str]) -> int:
    from ..lessons import lessons

    parser = Parser("quiz", "Ask the questions of a lesson's quiz.")
    known = ", ".join(map(str, lessons()))
    parser.add_argument("lesson", type=int, choices=lessons(), metavar="LESSON", help=f"its number: one of {known}")
    return parser.parse_args(arguments).lesson


def quiz(lesson: int) -> int:
    """Ask a lesson's questions in the terminal and store the result."""
    from ..interactive.progress import mark_quiz
    from ..interactive.quiz import ask
    from ..lessons import quiz as quiz_of

    attempt = ask(quiz_of(lesson))
    if attempt.finished:
        mark_quiz(lesson, sum(attempt.first_tries), len(attempt.first_tries))
    return 0


def progress(_: Namespace) -> int:
    """Print which exercises and quizzes are done."""
    from ..interactive.keeping import progress_file
    from ..interactive.progress import progress as progress_now

    print(f"{progress_now()}\nThe file is {progress_file()}.")
    return 0


def read_find(arguments: Sequence[str]) -> list[str]:
    places = "lessons, exercises, glossary, cheat sheet, errata and quizzes"
    parser = Parser("find", f"Search {places}. No solution is searched.")
    parser.add_argument("words", nargs="*")
    return parser.parse_args(arguments).words


def find(words: list[str]) -> int:
    """Print where the course mentions these words."""
    from ..lessons.shared.search import find as find_words

    findings = find_words(*words)
    if not findings.places:
        raise ValueError(repr(findings))
    print(findings)
    return 0


COMMANDS = {
    "lab": Command("open the course in JupyterLab (options go to JupyterLab)", read_lab, lab, "lab"),
    "doctor": no_options("doctor", "say what this machine can do", doctor, here=HERE),
    "estimate": Command(
        "estimate a training run: estimate gpt2-xl --micro-batch 32 --seq-len 1024",
        partial(read_run, "estimate"),
        estimate,
    ),
    "compare": Command(
        "estimate, measure, show both: compare gpt2-xl --recompute full", partial(read_run, "compare"), compare, "lab"
    ),
    "fit": Command("make a run fit a card: fit gpt2-xl --gpu RTX5090-32GB --global-batch 32", read_fit, fit),
    "watch": Command("watch a training script's memory, as it is: watch train.py --batch 8", read_watch, watch),
    "quiz": Command("ask the questions of a lesson's quiz: quiz 1", read_quiz, quiz),
    "progress": no_options("progress", "show which exercises and quizzes you have done", progress),
    "find": Command("search lessons, glossary and the rest: find reserved memory", read_find, find),
}
