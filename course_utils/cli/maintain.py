"""Commands for maintainers: test, check, build, publish, record and benchmark the course."""

import subprocess
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from ..benchmark import print_tables, read_options
from ..interactive.command_line import Parser, WrongOption
from ..interactive.course_files import ROOT
from .command import HERE, SAME_ANSWERS, Command, course_environment, hand_over, no_options
from .environment import SetupError
from .teach import passed_on

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
"""Enough to know that the course works on a machine: a lesson, and the engine's core."""


def read_test(arguments: Sequence[str]) -> tuple[Namespace, list[str]]:
    parser = Parser("test", "Run the tests and re-execute the notebooks. Other options and paths go to pytest.", HERE)
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="the doctor's report, one lesson and the engine's core")
    size.add_argument("--full", action="store_true", help="every parameter set of every sweep")
    return parser.parse_known_args(arguments)


def test(options: tuple[Namespace, list[str]]) -> int:
    """Run pytest over tests and notebooks, or over the paths among its options."""
    chosen, rest = options
    environment = course_environment(SAME_ANSWERS | {"COURSE_FULL": str(int(chosen.full))})
    run = [sys.executable, "-m"]
    if chosen.quick:
        subprocess.run([*run, "course_utils", "doctor", "--here"], cwd=ROOT, env=environment, check=False)
    targets = QUICK_TARGETS if chosen.quick else test_targets(ROOT, rest)
    return hand_over([*run, "pytest", *TEST_OPTIONS, *targets, *rest], environment)


def test_targets(root: Path, arguments: Sequence[str]) -> list[str]:
    """The folders to add to pytest's arguments: none if these name a path."""
    if any(not item.startswith("-") and (root / item.split("::")[0]).exists() for item in arguments):
        return []
    return [name for name in TEST_TARGETS if (root / name).exists()]


def lint(_: Namespace) -> int:
    """Run formatter, linter, type checker and spelling checker over the repository; 1 if any of them objects."""
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
    return [
        ("ruff check", [*run, "ruff", "check", "--quiet", "."]),
        ("ruff format", [*run, "ruff", "format", "--check", "--quiet", "."]),
        ("pyrefly", [*run, "pyrefly", "check", "--python-interpreter-path", str(python)]),
        ("codespell", [*run, "codespell_lib"]),
    ]


def record(arguments: list[str]) -> int:
    """Record the course's runs on the GPU of this machine. Makes no environment: this Python needs torch alone."""
    from ..recording import recorder

    try:
        return recorder.main(arguments)
    except WrongOption:
        raise
    except (recorder.RecordingError, OSError, ValueError) as problem:  # a full disk, a file of another schema
        raise SetupError(str(problem)) from None


COMMANDS = {
    "test": Command(
        "run all tests and notebooks (--quick, --full; other options and paths go to pytest)", read_test, test, "test"
    ),
    "lint": no_options("lint", "check format, style, types and spelling", lint, "test", HERE),
    "build": passed_on("make the notebooks from their sources (--check: only compare)", "authoring.build", "test"),
    "site": passed_on("make the website: site --out site", "authoring.site", "test"),
    "record": Command("record the course's runs on this GPU: record --out DIR --minutes 30", list, record),
    "benchmark": Command(
        "say how right and how fast the engine is (--table NAME, --quick)", read_options, print_tables, "lab",
        SAME_ANSWERS,
    ),
}  # fmt: skip
