"""Commands for maintainers: test, check, build, publish, record and report the evidence."""

import subprocess
import sys
from argparse import ArgumentParser, Namespace
from importlib import import_module
from pathlib import Path

from ..authoring import address
from ..errors import unknown
from ..evidence import command as evidence
from ..interactive.course_files import ROOT, number_of, numbered
from .command import SAME_ANSWERS, Command, course_environment, hand_over, need_a_clone, need_a_folder
from .environment import SetupError

TEST_TARGETS = ("notebooks", "tests")
"""What takes longest comes first: else one of two workers would wait for the other's last notebook."""
DEMOS = "notebooks/demos.ipynb"
REST_TARGETS = ("tests/rest", "solutions", DEMOS)
"""What is slow and rarely fails. pytest finds `tests/rest` only where it is named: see pyproject.toml."""

# A worker that dies ends the run: pytest-xdist's replacement would start its file again, and may wait for
# ever. A cell may take ten times what the longest one takes: the limit is for those that hang.
TEST_OPTIONS = (
    "-n", "2", "--dist", "loadfile", "--no-loadscope-reorder", "--max-worker-restart=0", "--nbval",
    "--nbval-current-env", "--nbval-sanitize-with", "tests/nbval_sanitize.cfg", "--nbval-cell-timeout=600",
)  # fmt: skip

WORKFLOWS = (".github/workflows/tests.yml", ".github/workflows/site.yml")
FORMS = tuple(f".github/ISSUE_TEMPLATE/{name}.yml" for name in ("recording", "stuck", "wrong"))
SCHEMAS = {
    "github-workflows": WORKFLOWS,
    "github-issue-forms": FORMS,
    "github-issue-config": (".github/ISSUE_TEMPLATE/config.yml",),
    "citation-file-format": ("CITATION.cff",),
}
"""Files that others read, by the schema of check-jsonschema that each has to follow."""


def test_options(parser: ArgumentParser) -> None:
    parser.description = "Run tests and notebooks. Other options and paths go to pytest."
    parser.set_defaults(others=[])
    part = parser.add_mutually_exclusive_group()
    part.add_argument("--rest", action="store_true", help="what is slow and rarely fails: solutions, website")
    part.add_argument("--full", action="store_true", help="the rest, with every parameter set of every sweep")
    part.add_argument("--lesson", metavar="NN", help="one lesson's tests")


def test(chosen: Namespace) -> int:
    """Run pytest over tests and notebooks, or over the paths among its options."""
    need_a_folder("test")
    if chosen.rest or chosen.full or chosen.lesson:
        need_a_clone("test " + ("--lesson" if chosen.lesson else "--rest"))
    environment = course_environment(SAME_ANSWERS | {"COURSE_FULL": "1" if chosen.full else "0"})
    targets = test_targets(ROOT, chosen)
    run = [sys.executable, "-m"]
    if "notebooks" in targets:  # nobody named a part: say first what this machine is
        subprocess.run([*run, "course_utils", "doctor", "--here"], cwd=ROOT, env=environment, check=False)
    return hand_over([*run, "pytest", *TEST_OPTIONS, *targets, *chosen.others], environment)


def test_targets(root: Path, chosen: Namespace) -> list[str]:
    """Paths to add to pytest's arguments: none if these name a path. SetupError for an unknown lesson."""
    if any(not item.startswith("-") and (root / item.split("::")[0]).exists() for item in chosen.others):
        return []
    if chosen.lesson:
        return one_lesson(root, chosen.lesson)
    rest = chosen.rest or chosen.full
    found = [name for name in (REST_TARGETS if rest else TEST_TARGETS) if (root / name).exists()]
    return found if rest else [*found, f"--ignore={DEMOS}"]


def one_lesson(root: Path, number: str) -> list[str]:
    """A lesson's notebook and the file that tests its code and its checks, for a number such as "05"."""
    notebooks = {number_of(path): path for path in numbered(root / "notebooks")}
    number = number.zfill(2)
    if number not in notebooks:
        raise SetupError(str(unknown("lesson", number, notebooks)))
    paths = [notebooks[number], *sorted((root / "tests").glob(f"test_lesson_{number}*.py"))]
    return [path.relative_to(root).as_posix() for path in paths]


def lint(_: Namespace) -> int:
    """Run formatter, linter, type checker and spelling checker over the repository; 1 if any objects."""
    need_a_clone("lint")
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
    schemas = [
        (schema, [*run, "check_jsonschema", "-q", f"--builtin-schema=vendor.{schema}", *files])
        for schema, files in SCHEMAS.items()
    ]
    return [
        ("ruff check", [*run, "ruff", "check", "--quiet", "."]),
        ("ruff format", [*run, "ruff", "format", "--check", "--quiet", "."]),
        ("pyrefly", [*run, "pyrefly", "check", "--python-interpreter-path", str(python)]),
        ("codespell", [*run, "codespell_lib"]),
        ("plain English", [str(python), "tests/prose.py"]),
        *schemas,
    ]


def build_options(parser: ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", help="lessons to build, such as 01; without any, all lessons")
    parser.add_argument("--check", action="store_true", help="only compare cells with sources; write nothing")


def build(chosen: Namespace) -> int:
    """Build lessons, or compare them with their sources; 1 for a wrong source, failing cell or difference."""
    need_a_clone("build")
    from ..authoring.build import build_all

    return build_all(ROOT, chosen.names, only_check=chosen.check)


def site_options(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--out", type=Path, default=ROOT / "site", help="folder for the pages (default: the course's site)")
    add("--url", default="", help="the site's address; without it, shared links show no preview card")
    add("--explorer", action="store_true", help="only the explorer's page, in its subfolder explorer")


def site(chosen: Namespace) -> int:
    """Make the website, or only the page of the explorer."""
    need_a_clone("site")
    from ..authoring.site import run

    return run(chosen)


def record_options(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--out", type=Path, help="folder for the recordings, one file per GPU; needed to record")
    add("--minutes", type=float, default=30.0, help="stop after this many minutes (default: 30)")
    add("--jobs", type=int, default=1, help="most tasks to run at a time, as the GPU's memory allows")
    add("--list", action="store_true", help="print what would be recorded, and record nothing")
    add("--only", default="", metavar="WORDS", help="tasks whose name or kind contains this")


def record(chosen: Namespace) -> int:
    """Record the course's runs on this machine's GPU. Makes no environment: this Python needs torch alone."""
    from ..evidence import record as recorder

    try:
        return recorder.run(chosen)
    except (recorder.RecordingError, ValueError) as problem:  # ValueError: a file that is no recording
        raise SetupError(str(problem)) from None


def new_lesson_options(parser: ArgumentParser) -> None:
    parser.add_argument("number", help="the next number, such as 15")
    parser.add_argument("name", help="its name in files and folders, such as my_lesson")
    parser.add_argument("--title", default="", help="its title; without it, the name, with spaces")


def new_lesson(chosen: Namespace) -> int:
    """Write a new lesson's files."""
    return of_tests("new_lesson", chosen)


def check_torch_options(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("version", help="the version of torch to check, such as 2.15.0")
    add("--cuda", action="store_true", help="use its CUDA build instead of its CPU build")
    add("--python", help="a Python with that torch and the extra test; without it, one is made")
    add("--folder", type=Path, help="folder for the results (default: build/torch-VERSION)")


def check_torch(chosen: Namespace) -> int:
    """Report whether the course holds on another torch."""
    return of_tests("check_torch", chosen)


def of_tests(file: str, chosen: Namespace) -> int:
    """Run the command that a file of `tests/` has."""
    need_a_clone(file.replace("_", "-"))
    sys.path.append(str(ROOT / "tests"))
    return import_module(file).run(chosen)


COMMANDS = {
    "test": Command("run tests and notebooks (options and paths go to pytest)", test, test_options, "test"),
    "lint": Command("check format, style, types, spelling and English", lint, purpose="author"),
    "build": Command("build the notebooks from their sources: build 05", build, build_options, "test"),
    "new-lesson": Command("make a new lesson's files: 20 my_lesson", new_lesson, new_lesson_options),
    "check-torch": Command("try another torch: 2.15.0", check_torch, check_torch_options, "test"),
    "site": Command("make the website: site --out site", site, site_options, "author"),
    "address": Command("write the repository's address: address URL", address.run, address.options),
    "record": Command("record the course's runs on this GPU: record --out DIR", record, record_options),
    "evidence": Command(
        "report how right the engine is (--quick)", evidence.run, evidence.options, "torch", SAME_ANSWERS
    ),
}
