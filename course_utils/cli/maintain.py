"""Commands for maintainers: test, check, build, publish, record and benchmark the course."""

import subprocess
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from pathlib import Path

from .. import benchmark
from ..interactive.course_files import ROOT
from .command import (
    SAME_ANSWERS,
    Command,
    course_environment,
    hand_over,
    later,
    no_options,
    refuse_outside_a_course,
)
from .environment import SetupError

TEST_TARGETS = ("tests", "notebooks", "solutions")
# A worker that dies ends the run: pytest-xdist's replacement would start its file again, and may wait for
# ever. A cell may take ten times what the longest one takes: the limit is for those that hang.
TEST_OPTIONS = (
    "-n", "2", "--dist", "loadfile", "--no-loadscope-reorder", "--max-worker-restart=0", "--nbval",
    "--nbval-current-env", "--nbval-sanitize-with", "tests/nbval_sanitize.cfg", "--nbval-cell-timeout=600",
)  # fmt: skip

# for a lesson's tests: seconds in each process
LIGHT = ("-p", "tests.light_imports", "-p", "no:hypothesispytest")

WORKFLOWS = (".github/workflows/tests.yml", ".github/workflows/site.yml")

QUICK_TARGETS = (
    "notebooks/02_adam.ipynb", "tests/test_own_step.py", "tests/test_measure.py", "tests/test_estimate.py",
    "tests/test_breakdown.py", "tests/test_allocator.py", "tests/test_optimizers.py",
)  # fmt: skip
"""Enough to know that the course works on a machine: a lesson, and the engine's core."""


def test_options(parser: ArgumentParser) -> None:
    parser.set_defaults(others=[])
    size = parser.add_mutually_exclusive_group()
    size.add_argument(
        "--quick", action="store_true", help="the doctor's report, one lesson and the engine's core"
    )
    size.add_argument("--full", action="store_true", help="every parameter set of every sweep")
    size.add_argument("--lesson", metavar="NN", help="one lesson's tests; without it, all of them")


def test(chosen: Namespace) -> int:
    """Run pytest over tests and notebooks, or over the paths among its options."""
    refuse_outside_a_course("test")
    if chosen.lesson and not (ROOT / "tests" / "conftest.py").exists():
        raise SetupError(
            "`test --lesson` needs a clone of the course's repository, because the wheel has no tests."
        )
    environment = course_environment(SAME_ANSWERS | {"COURSE_FULL": "1" if chosen.full else "0"})
    run = [sys.executable, "-m"]
    if chosen.quick:
        subprocess.run([*run, "course_utils", "doctor", "--here"], cwd=ROOT, env=environment, check=False)
        targets = [name for name in QUICK_TARGETS if (ROOT / name).exists()]
    else:
        targets = test_targets(ROOT, chosen.others)
    lesson = ["--lesson", chosen.lesson, *LIGHT] if chosen.lesson else []
    return hand_over([*run, "pytest", *TEST_OPTIONS, *lesson, *targets, *chosen.others], environment)


def test_targets(root: Path, arguments: Sequence[str]) -> list[str]:
    """The folders to add to pytest's arguments: none if these name a path."""
    if any(not item.startswith("-") and (root / item.split("::")[0]).exists() for item in arguments):
        return []
    return [name for name in TEST_TARGETS if (root / name).exists()]


def lint(_: Namespace) -> int:
    """Run formatter, linter, type checker and spelling checker over the repository; 1 if any objects."""
    failed = []
    for name, command in checks(Path(sys.executable)):
        print(f"{name} …", flush=True)
        if subprocess.run(command, cwd=ROOT, check=False).returncode:
            failed.append(name)
    print(f"Not clean: {', '.join(failed)}" if failed else "All clean")
    return 1 if failed else 0


def checks(python: Path) -> list[tuple[str, list[str]]]:
    """The checks of `lint`: a name and a command line each."""
    run = [str(python), "-m"]
    workflows = ["check_jsonschema", "-q", "--builtin-schema=vendor.github-workflows", *WORKFLOWS]
    return [
        ("ruff check", [*run, "ruff", "check", "--quiet", "."]),
        ("ruff format", [*run, "ruff", "format", "--check", "--quiet", "."]),
        ("pyrefly", [*run, "pyrefly", "check", "--python-interpreter-path", str(python)]),
        ("codespell", [*run, "codespell_lib"]),
        ("plain English", [str(python), "tests/prose.py"]),
        ("workflows", [*run, *workflows]),
    ]


def build_options(parser: ArgumentParser) -> None:
    parser.add_argument(
        "names", nargs="*", help="lessons to build, such as 01 or 01_name; without any, all lessons"
    )
    parser.add_argument("--check", action="store_true", help="only compare cells with sources; write nothing")


def build(chosen: Namespace) -> int:
    """Build lessons, or compare them with their sources; 1 for a wrong source, failing cell or difference."""
    from ..authoring.build import build_all

    return build_all(ROOT, chosen.names, only_check=chosen.check)


def site_options(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--out", type=Path, default=ROOT / "site", help="folder for the pages (default: the course's site)"
    )
    parser.add_argument(
        "--url", default="", help="the site's address; without it, shared links show no preview card"
    )
    parser.add_argument(
        "--explorer", action="store_true", help="only the explorer's page, in its subfolder explorer"
    )


def record_options(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--out",
        type=Path,
        help="folder for the recordings, one file per GPU; without it, nothing is recorded",
    )
    add("--minutes", type=float, default=30.0, help="stop after this many minutes")
    add("--jobs", type=int, default=1, help="most tasks to run at a time, as the GPU's memory allows")
    add("--list", action="store_true", help="print what would be recorded, and record nothing")
    add("--verify", type=Path, metavar="FILE", help="only check a file that `record` wrote (default: none)")
    add("--only", default="", metavar="WORDS", help="tasks whose name or kind contains this (default: all)")
    add(
        "--as-card",
        default="",
        metavar="CARD",
        help="smaller card to imitate, T4-16GB or '16 GB' (default: none)",
    )
    add("--rehearse", action="store_true", help="try the machinery with small runs on the CPU")


def record(chosen: Namespace) -> int:
    """Record the course's runs on this machine's GPU. Makes no environment: this Python needs torch alone."""
    from ..recording import recorder

    try:
        return recorder.run(chosen)
    except (recorder.RecordingError, OSError, ValueError) as problem:  # a full disk, a file of another schema
        raise SetupError(str(problem)) from None


def new_lesson_options(parser: ArgumentParser) -> None:
    parser.add_argument("number", help="the next number, such as 15")
    parser.add_argument("name", help="its name in files and folders, such as my_lesson")
    parser.add_argument("--title", default="", help="its title (default: the name, with spaces)")


def check_torch_options(parser: ArgumentParser) -> None:
    parser.add_argument("version", help="the version of torch to check, such as 2.15.0")
    parser.add_argument("--cuda", action="store_true", help="use its CUDA build instead of its CPU build")
    parser.add_argument("--python", help="a Python with that torch and the extra test (default: make one)")
    parser.add_argument("--folder", type=Path, help="folder for the results (default: build/torch-VERSION)")


def of_clone(file: str, chosen: Namespace) -> int:
    """Run the command that a file of `tests/` has. SetupError where there is no such file."""
    folder = ROOT / "tests"
    if not (folder / f"{file}.py").exists():
        raise SetupError(
            "This command needs a clone of the course's repository: it is part of the folder tests."
        )
    sys.path.append(str(folder))
    return import_module(file).run(chosen)


COMMANDS = {
    "test": Command(
        "run tests and notebooks (other options and paths go to pytest)", test_options, test, "test"
    ),
    "lint": Command("check format, style, types and spelling", no_options, lint, "author"),
    "build": Command(
        "build the notebooks from their sources (--check: only compare)", build_options, build, "test"
    ),
    "new-lesson": Command(
        "make a new lesson's files: 15 my_lesson", new_lesson_options, partial(of_clone, "new_lesson")
    ),
    "check-torch": Command(
        "try another torch: 2.15.0", check_torch_options, partial(of_clone, "check_torch"), "test"
    ),
    "site": Command("make the website: site --out site", site_options, later("authoring.site"), "author"),
    "record": Command(
        "record the course's runs on this GPU: record --out DIR --minutes 30", record_options, record
    ),
    "benchmark": Command(
        "report how accurate the engine is (--quick)", benchmark.options, benchmark.run, "torch", SAME_ANSWERS
    ),
}
