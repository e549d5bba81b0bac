"""Commands for learners: open the course, estimate and compare runs, look things up."""

import inspect
import json
import os
import platform
import sys
import tomllib
from argparse import REMAINDER, ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..errors import ScriptError, SimulationUnavailable
from ..gpus import GPUS
from ..interactive.course_files import ROOT, old_numbers
from ..models import LOGITS, PRESETS
from ..run import ATTENTIONS, COMPILES, OPTIMIZERS, PRECISIONS, RECOMPUTES, TrainingRun
from ..terminal import columns, say, shows_colors, stack
from ..units import parse_bytes
from ..watching import out_of_memory
from . import start
from .command import Command, course_environment, hand_over, is_current, need_a_folder
from .environment import FOLDER, SetupError, python_in, remembered

FIRST_LESSON = "/lab/tree/notebooks/00_start_here.ipynb"
JUPYTERLAB = (
    f"--LabApp.app_settings_dir={Path(__file__).resolve().parent / 'jupyterlab_settings'}",
    "--ServerApp.contents_manager_class=course_utils.cli.contents.CourseContents",
)
"""No question about news, no check for updates, room for names, no notebook changed by being opened."""

MODEL = f"one of {', '.join(PRESETS)}, or the path of a Hugging Face config.json"

WATCH_CODES = (
    "Exit codes: 0 if the script fits the GPU or budget that is named, or if none is named; 1 if it does not;"
    " 2 for everything else, such as a script that fails."
)

CLOSED_FORMS_ONLY = (
    "Tensor and sequence parallelism are estimated in Python alone, as nothing here measures them: "
    "course_utils.estimate takes a TrainingRun with tensor_parallel."
)

_OPTIONS_FILE = Path(__file__).with_name("run_options.toml")
RUN_OPTIONS: dict[str, list[str]] = tomllib.loads(_OPTIONS_FILE.read_text(encoding="utf-8"))
"""Each option of a run: its value's kind, one of `KINDS`, and what it chooses. TrainingRun has defaults."""


def _truth(text: str) -> bool:
    if text not in ("true", "false"):
        raise ArgumentTypeError(f"{text!r} is neither true nor false")
    return text == "true"


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


KINDS: dict[str, Callable[[str], Any]] = {
    "int": int,
    "float": float,
    "str": str,
    "bool": _truth,
    "tuple": _names,
}
KNOWN = {
    "precisions": PRECISIONS,
    "optimizers": OPTIMIZERS,
    "attentions": ATTENTIONS,
    "recomputes": RECOMPUTES,
    "compiles": COMPILES,
    "cards": GPUS,
    "formats": LOGITS,
}


def lab_options(parser: ArgumentParser) -> None:
    parser.description = "Open the course in JupyterLab, which gets all other options, such as --no-browser."
    parser.set_defaults(others=[])


def lab(chosen: Namespace) -> int:
    """Open JupyterLab on the first lesson: the whole course in its file browser, no pop-ups."""
    need_a_folder("lab")
    if old_numbers(ROOT):
        print(old_numbers(ROOT), file=sys.stderr)
    root = ["--allow-root"] if platform.system() == "Linux" and os.geteuid() == 0 else []
    own = [f"--ServerApp.root_dir={ROOT}", f"--LabApp.default_url={FIRST_LESSON}", *JUPYTERLAB]
    command = [sys.executable, "-m", "jupyterlab", *own, *root, *chosen.others]
    return hand_over(command, course_environment())


def doctor(chosen: Namespace) -> int:
    """Print what this machine can do, as seen from the course's environment where there is one."""
    python = python_in(FOLDER)
    if remembered().get("state") == "ready" and not chosen.here and not is_current(python):
        return hand_over([str(python), "-m", "course_utils", "doctor", "--here"], course_environment())
    from .doctor import report

    say(report())
    return 0


def run_options(parser: ArgumentParser) -> None:
    """The model, and `--micro-batch 4` and the like."""
    parser.usage = "%(prog)s MODEL [options]"
    parser.epilog = CLOSED_FORMS_ONLY
    parser.add_argument("model", metavar="MODEL", help=MODEL)
    parameters = inspect.signature(TrainingRun).parameters
    known = {name: ", ".join(choices) for name, choices in KNOWN.items()}
    for name, (kind, told) in RUN_OPTIONS.items():
        told = told.format(**known)
        default = parameters[name].default
        if default not in (None, ()):
            told += f" (default: {str(default).lower()})"
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=KINDS[kind], metavar="VALUE", default=default, help=told)
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")


def training_run(chosen: Namespace) -> TrainingRun:
    """The run that was chosen. Raises ValueError as TrainingRun does."""
    return TrainingRun(chosen.model, **{name: getattr(chosen, name) for name in RUN_OPTIONS})


def estimate(chosen: Namespace) -> int:
    """Print the memory that a training run is estimated to need, and a GPU's counters, by a simulation."""
    from .. import estimate as estimate_bytes

    run = training_run(chosen)
    estimated = estimate_bytes(run)
    if not chosen.json:
        say(run)
        print(stack(estimated, min(columns(), 100), shows_colors()))
    counters, why_not = None, None
    try:
        from .. import counted, measure

        counters = counted(measure(run, "simulated"))
    except (ModuleNotFoundError, ValueError) as error:
        why_not = str(error)
    if chosen.json:
        told = vars(counters) if counters else None
        more = {"counters": told, "not_predicted": why_not}
        print(json.dumps({"run": run.code(), "estimate": estimated.to_dict(), **more}))
    else:
        say(f"\n{counters}" if counters else f"\nThe GPU's own counters are not predicted: {why_not}")
    return 0


def compare(chosen: Namespace) -> int:
    """Print a run's estimate next to its measurement, live or simulated."""
    from .. import compare as compare_bytes

    compared = compare_bytes(training_run(chosen))
    if chosen.json:
        print(compared.to_json())
    else:
        say(compared)
    return 0


def fit_options(parser: ArgumentParser) -> None:
    from ..planning.fit import MAY_CHANGE

    add = parser.add_argument
    add("model", metavar="MODEL", help=MODEL)
    add("--gpu", metavar="GPU", required=True, help=f"one of {', '.join(GPUS)} (required)")
    add("--global-batch", type=int, required=True, help="sequences per optimizer step (required)")
    add("--seq-len", type=int, default=1024, help="tokens per sequence (default: 1024)")
    add("--world-size", type=int, default=1, help="number of such GPUs (default: 1)")
    changes = f"separated by commas: {', '.join(MAY_CHANGE)}; without it, nothing that changes results"
    add("--may-change", type=_names, default=(), metavar="NAMES", help=changes)
    add("--json", action="store_true", help="print the plan as JSON")


def fit(chosen: Namespace) -> int:
    """Print the configuration that fits a card at the least cost in time.

    The exit code is 0 if one fits, 1 if none does, or if the simulated step of the best says otherwise.
    """
    from ..planning.fit import fit as fit_run

    size = {name: getattr(chosen, name) for name in ("global_batch", "seq_len", "world_size")}
    plan = fit_run(chosen.model, chosen.gpu, may_change=chosen.may_change, **size)
    fits, said = _verdict(plan.best.run, chosen.gpu) if plan.best else (False, "")
    if chosen.json:
        print(json.dumps({**plan.to_dict(), "fits": fits, "verdict": said}))
    else:
        say(f"{plan}\n\n{said}".rstrip())
    return 0 if fits else 1


def _verdict(run: Any, card: str) -> tuple[bool, str]:
    """True if a plan's step fits, and text on what the allocator makes of it, or why this is an estimate."""
    try:
        from .. import verdict

        found = verdict(run, card)
        return found.fits, str(found)
    except ModuleNotFoundError:
        return True, "Estimate only, no verdict: that needs torch."
    except (ValueError, SimulationUnavailable) as error:
        return True, f"Estimate only, no verdict: {error}"


def watch_options(parser: ArgumentParser) -> None:
    """The script, its arguments, and where to run it; what comes after the script's name is the script's."""
    parser.description = "Run a training script of yours, unchanged, for a few steps on a simulated GPU."
    parser.epilog = WATCH_CODES
    add = parser.add_argument
    cards = f"one of {', '.join(GPUS)} (default: the GPU of this machine, else A100-80GB)"
    add("--gpu", metavar="GPU", help=f"the card to simulate, and to fit: {cards}")
    add("--budget", metavar="SIZE", help="the memory to fit in place of the card's: 24GB")
    add("--steps", type=int, default=2, help="optimizer steps to take; the last one is shown (default: 2)")
    add("--ranks", type=int, metavar="N", help="watch a script made for torchrun as one of N simulated ranks")
    add("--rank", type=int, default=0, metavar="K", help="the one of them to watch (default: 0)")
    add("--whole", action="store_true", help="then go on to the end: the peak of each part of the run")
    add("--json", action="store_true", help="print the report as one JSON object")
    sources = ("simulated", "live", "auto")
    add("--source", choices=sources, default="simulated", help="live: on the GPU of this machine")
    add("--save", metavar="FILE", type=Path, help="save the measurement here")
    add("--against", metavar="FILE", type=Path, help="compare with this saved measurement")
    add("script", help="a Python file")
    add("arguments", nargs=REMAINDER, help="the script's own")


def watch(chosen: Namespace) -> int:
    """Print where a script's memory goes; returns an exit code of WATCH_CODES.

    The script runs in a process of its own, of this Python, which has what it imports.
    """
    if find_spec("torch") is None:
        raise SetupError(f"{sys.executable} has no torch: use the Python that your script runs with")
    try:
        return _watched(chosen)
    except ScriptError as error:
        print(error, file=sys.stderr)
        return 2


def _watched(chosen: Namespace) -> int:
    """Print the report on a script; returns 1 if it does not fit what was named, else 0."""
    from ..measuring.files import read_measurement, save_measurement
    from ..watching.apart import watch_apart
    from ..watching.report import report
    from ..watching.which_cards import with_room

    before = read_measurement(chosen.against) if chosen.against else None
    budget = None if chosen.budget is None else parse_bytes(chosen.budget)
    choices = {"card": chosen.gpu, "steps": chosen.steps, "ranks": chosen.ranks, "rank": chosen.rank}
    choices["whole"] = chosen.whole
    measured, card = watch_apart(chosen.script, chosen.arguments, chosen.source, **choices)
    wanted = with_room(card, budget) if chosen.gpu or budget is not None else None
    if chosen.save:
        save_measurement(measured, chosen.save)
    found = report(measured, card, wanted)
    changed = None
    if before:
        from ..measuring.compare import difference  # imports torch

        changed = difference(before, measured)
    if chosen.json:
        script = {"script": chosen.script, "arguments": chosen.arguments}
        more = {"difference": changed.to_dict() if changed else None}
        print(json.dumps(found.to_dict() | script | more))
    else:
        print(f"{chosen.script}, run unchanged\n\n{found.to_text(columns(), shows_colors())}")
        if changed:
            say(f"\n{changed.to_text(columns())}")
    return 0 if found.wanted is None or found.wanted.fits else 1


def progress(_: Namespace) -> int:
    """Print which exercises and quizzes are done."""
    from ..interactive.learner_folder import progress_file
    from ..interactive.progress import progress as progress_now

    say(f"{progress_now()}\nThe file is {progress_file()}.")
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
    say(findings)
    return 0


COMMANDS = {
    "lab": Command("open the course in JupyterLab (options go to JupyterLab)", lab, lab_options, "lab"),
    "start": Command("copy the course out of the installed package: start FOLDER", start.run, start.options),
    "doctor": Command("report what this machine can do", doctor),
    "estimate": Command("estimate a run: estimate gpt2-xl --micro-batch 32", estimate, run_options),
    "compare": Command("estimate and measure: compare gpt2 --recompute full", compare, run_options, "torch"),
    "fit": Command(
        "make a run fit a card: fit gpt2-xl --gpu L4-24GB --global-batch 32", fit, fit_options, failed=2
    ),
    "watch": Command(
        "watch an unchanged training script: watch train.py --batch 8", watch, watch_options, failed=2
    ),
    "oom": Command(
        "explain an out-of-memory message, pasted or in a log",
        out_of_memory.run,
        out_of_memory.options,
        failed=2,
    ),
    "progress": Command("show which exercises and quizzes you have done", progress),
    "find": Command("search lessons, glossary and docs: find reserved memory", find, find_options),
}
