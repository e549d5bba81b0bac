"""Mutants: a seeded sample of small faults, each put into a copy of the course; some test has to notice it.

`python tests/mutants.py` prints which part of the faults was noticed (killed), and every fault that was not.
It takes about an hour on two cores, needs `coverage`, and Linux or macOS. It is no part of the test suite.
"""

import argparse
import ast
import hashlib
import importlib
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
MUTATED = (
    *("course_utils/estimating/**/*.py", "course_utils/allocator/*.py", "course_utils/run.py"),
    *(f"course_utils/lessons/{lesson}/*.py" for lesson in ("adam", "sharding", "lora")),
)
TESTS = (
    *("activations", "allocator*", "breakdown", "checks_in_common", "dashboard", "distributed"),
    *("estimate", "explain", "feedback", "genuine_allocator", "gpu_tables", "house", "language_model"),
    *("lesson_02_checks", "lesson_11_checks", "lesson_16_checks", "lessons_*", "lora", "memory_map"),
    *(
        "model_files",
        "models",
        "networks",
        "optimizers",
        "pipelines",
        "planning",
        "published",
        "cuda_answers",
    ),
    *("recompute", "run", "schedules", "sharding", "simulated", "snapshots", "states", "tape", "tracker"),
    *("update", "workspaces"),
)
"""Test files that reach the mutated lines in their own process. None needs a browser, a server or a notebook.
"""

KILLED, SURVIVED, UNREACHED = "killed", "survived", "not reached"
WANTED = 0.90
SECONDS = 60
"""Tests for one mutant, by the time that they took alone and under coverage."""

ENVIRONMENT = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "COURSE_SOURCE": "simulated"}
ENVIRONMENT |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
"""As the test command has it, without plugins. With one thread, a process that has loaded torch can fork."""

LOADED = ("coverage", "jupytext", "matplotlib.pyplot", "nbclient", "numpy", "torch")
"""What takes long to import is imported once, not once for each mutant."""

MEMORY = 12 * 2**30
"""Bytes of addresses for one process, because endless loops tend to fill lists."""

ARITHMETIC: dict[type[ast.AST], str] = {
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "//",
    ast.FloorDiv: "*",
    ast.Div: "*",
}
ARITHMETIC |= {
    ast.Mod: "//",
    ast.Pow: "*",
    ast.BitAnd: "|",
    ast.BitOr: "&",
    ast.LShift: ">>",
    ast.RShift: "<<",
}
COMPARISONS: dict[type[ast.AST], tuple[str, str]] = {ast.Eq: ("==", "!="), ast.NotEq: ("!=", "==")}
COMPARISONS |= {ast.Is: ("is", "is not"), ast.IsNot: ("is not", "is")}
COMPARISONS |= {ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">")}
COMPARISONS |= {ast.In: ("in", "not in"), ast.NotIn: ("not in", "in")}
EXTREMES = {"min": "max", "max": "min"}


def main() -> int:
    """Sample mutants, run the tests that reach each, print what survived and the score;
    1 if that is too low.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sample", type=int, default=400, help="how many mutants")
    parser.add_argument("--seed", type=int, default=16)
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument("--only", default="", metavar="PATTERN", help="only those of the sample that match")
    chosen = parser.parse_args()
    for module in LOADED:
        importlib.import_module(module)
    with tempfile.TemporaryDirectory(prefix="course-mutants-") as folder:
        pristine, *copies = copies_of(ROOT, chosen.jobs + 1, Path(folder))
        paths = sorted(
            str(path.relative_to(pristine)) for pattern in MUTATED for path in pristine.glob(pattern)
        )
        sites = [mutant for path in paths for mutant in Sites(path, (pristine / path).read_bytes())]
        sampled = [
            one for one in sample(sites, chosen.sample, chosen.seed) if re.search(chosen.only, str(one))
        ]
        return report(
            Trial(Tests(reached(paths, pristine, copies), pristine), pristine, copies).judge(sampled)
        )


def report(results: "Sequence[tuple[Mutant, str]]") -> int:
    """Print the survivors and the score of each folder."""
    scores: dict[str, Counter[str]] = defaultdict(Counter)
    for mutant, result in results:
        scores[mutant.path.split("/")[1]][result] += 1
        scores["all"][result] += 1
        if result != KILLED:
            print(f"{result}: {mutant}")
    for folder, score in scores.items():
        counts = ", ".join(f"{score[result]} {result}" for result in (KILLED, SURVIVED, UNREACHED))
        print(f"{folder}: {score[KILLED] / score.total():.1%} of {score.total()} ({counts})")
    return int(scores["all"][KILLED] < WANTED * scores["all"].total())


# What can be changed


@dataclass(frozen=True)
class Mutant:
    """One change of one file: `text` in place of the bytes from `start` to `end`."""

    path: str
    scope: str
    change: str
    start: int
    end: int
    text: str
    lines: range
    statement: range
    names: frozenset[str]
    """What the statement binds, if it is executed on import: its tests are those that reach where these are
    used.
    """

    def __str__(self) -> str:
        return f"{self.path}:{self.lines[0]} {self.scope}: {self.change}"


def sample(mutants: Iterable[Mutant], size: int, seed: int) -> list[Mutant]:
    """The `size` mutants whose hashes come first: a change of the code elsewhere leaves the others in the
    sample.
    """
    ranks: dict[str, Mutant] = {}
    times: Counter[tuple[str, str, str]] = Counter()
    for mutant in mutants:
        site = (mutant.path, mutant.scope, mutant.change)
        times[site] += 1
        ranks[hashlib.sha256(repr((seed, *site, times[site])).encode()).hexdigest()] = mutant
    return sorted(
        (ranks[rank] for rank in sorted(ranks)[:size]), key=lambda mutant: (mutant.path, mutant.start)
    )


class Sites:
    """All mutants of one file. Iterate over it."""

    def __init__(self, path: str, source: bytes) -> None:
        self.path, self.source = path, source
        self.offsets = [0]
        for line in source.splitlines(keepends=True):
            self.offsets.append(self.offsets[-1] + len(line))

    def __iter__(self) -> Iterator[Mutant]:
        for statement in ast.parse(self.source).body:
            yield from self._walk(statement, statement, "", True)

    def _walk(self, node: Any, statement: Any, scope: str, on_import: bool) -> Iterator[Mutant]:
        match node:
            case (
                ast.Import()
                | ast.ImportFrom()
                | ast.Assign(targets=[ast.Name(id="__all__")])
                | ast.JoinedStr()
            ):
                return  # Python 3.11 does not know where in the file the parts of an f-string are
            case ast.If(test=ast.Name(id="TYPE_CHECKING")) | ast.Call(func=ast.Name(id="lru_cache")):
                return  # how much is kept in a cache changes no result
            case ast.keyword(arg="strict"):
                return  # zip's assertion
            case (
                ast.Assign(targets=[ast.Name(id=name)])
                | ast.AnnAssign(target=ast.Name(id=name))
                | ast.FunctionDef(name=name)
            ):
                if name.lower().endswith("_cases"):
                    return  # what a check asks about: other numbers do as well
        statement = node if isinstance(node, ast.stmt) else statement
        for replaced, text in self._edits(node, on_import):
            yield self._mutant(replaced, text, statement, scope, on_import)
        for name, value in () if isinstance(node, ast.Raise) else ast.iter_fields(node):
            inside, still = scope, on_import
            if name == "body" and isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Lambda):
                inside = f"{scope}.{getattr(node, 'name', 'lambda')}".lstrip(".")
                still = on_import and isinstance(node, ast.ClassDef)
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST) and name not in ("annotation", "returns"):
                    yield from self._walk(child, statement, inside, still)

    def _edits(self, node: ast.AST, on_import: bool) -> Iterator[tuple[ast.AST, str]]:
        """Pairs of a node and the text that takes its place."""
        of = self._text
        match node:
            case ast.BinOp(op=ast.BitOr()) if on_import:
                return  # a union of types
            case ast.BinOp(left, op, right) if type(op) in ARITHMETIC:
                yield node, f"(({of(left)}) {ARITHMETIC[type(op)]} ({of(right)}))"
            case ast.Compare(left, ops, right):
                for swapped in range(len(ops)):
                    signs = [COMPARISONS[type(op)][index == swapped] for index, op in enumerate(ops)]
                    rest = " ".join(f"{sign} ({of(term)})" for sign, term in zip(signs, right, strict=True))
                    yield node, f"(({of(left)}) {rest})"
            case ast.BoolOp(op, values):
                sign = " or " if isinstance(op, ast.And) else " and "
                yield node, f"({sign.join(f'({of(value)})' for value in values)})"
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                yield node, f"({of(operand)})"
            case ast.Constant(value=bool(value)):
                yield node, repr(not value)
            case ast.Constant(value=int(value)):
                yield from ((node, f"({value + 1})"), (node, f"({value - 1})"))
            case ast.Call(func=ast.Name(id=name) as called) if name in EXTREMES:
                yield called, EXTREMES[name]
            case ast.If(test=test, body=[ast.Raise()], orelse=[]):  # never true would be the same as no raise
                yield test, "(True)"
            case ast.If(test=test) | ast.IfExp(test=test) | ast.comprehension(ifs=[test]):
                yield from ((test, "(True)"), (test, "(False)"))
            case ast.match_case(guard=ast.expr() as test):
                yield from ((test, "(True)"), (test, "(False)"))
            case ast.While(test=test):
                yield test, "(False)"
            case ast.AugAssign(target, op, value):
                yield node, f"{of(target)} {ARITHMETIC[type(op)]}= {of(value)}"
        words = isinstance(node, ast.Expr | ast.AnnAssign) and isinstance(node.value, ast.Constant | None)
        changes = isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign | ast.Expr | ast.Raise)
        if changes and not words and not on_import:
            yield node, "pass"

    def _mutant(self, node: Any, text: str, statement: Any, scope: str, on_import: bool) -> Mutant:
        start, end = self._span(node)
        change = f"{' '.join(self.source[start:end].decode().split())}  →  {' '.join(text.split())}"
        body = getattr(statement, "body", [])
        header = max(statement.lineno, body[0].lineno - 1) if body else statement.end_lineno
        # a default's calls
        last: Any = statement if on_import and isinstance(statement, ast.FunctionDef) else node
        lines = range(node.lineno, last.end_lineno + 1)
        names: set[str] = set()
        if on_import and isinstance(statement, ast.ClassDef | ast.FunctionDef):
            names = {statement.name}
        elif on_import:
            inside = (child for child in ast.walk(statement) if isinstance(child, ast.Name))
            names = {child.id for child in inside if isinstance(child.ctx, ast.Store)}
        whole = range(statement.lineno, header + 1)
        return Mutant(self.path, scope, change, start, end, text, lines, whole, frozenset(names))

    def _span(self, node: Any) -> tuple[int, int]:
        return self.offsets[node.lineno - 1] + node.col_offset, self.offsets[
            node.end_lineno - 1
        ] + node.end_col_offset

    def _text(self, node: ast.AST) -> str:
        start, end = self._span(node)
        return self.source[start:end].decode()


# Which tests reach a line


def reached(paths: Sequence[str], pristine: Path, copies: Sequence[Path]) -> list[dict[str, Any]]:
    """The seconds of each test of each test file, and the lines of `paths` that the tests reach."""
    files = sorted(
        str(p.relative_to(pristine)) for name in TESTS for p in pristine.glob(f"tests/test_{name}.py")
    )
    answers = {file: pristine.parent / f"{Path(file).stem}.json" for file in files}

    def done(code: int, text: str, copy: Path, file: str) -> None:
        if code:
            raise SystemExit(f"{file}: exit status {code}\n{text[-2000:]}")
        print(f"{file}: done", flush=True)

    run_all(
        [Job(partial(record, file, paths, answers[file]), partial(done, file=file), 1800) for file in files],
        copies,
    )
    return [json.loads(answer.read_text(encoding="utf-8")) for answer in answers.values()]


def record(file: str, paths: Sequence[str], answer: Path) -> int:
    """Run one test file in the current folder, a copy, and write down what each of its tests reaches."""
    coverage = importlib.import_module("coverage")
    measuring = coverage.Coverage(data_file=None, include=[str(Path.cwd() / path) for path in paths])
    recorder = Recorder(measuring)
    measuring.start()
    pytest.main(["-q", "-p", "no:cacheprovider", file], plugins=[recorder, Imported()])
    measuring.stop()
    data = measuring.get_data()
    lines = {path: data.contexts_by_lineno(str(Path.cwd() / path)) for path in paths}
    lines = {path: lines_of_path for path, lines_of_path in lines.items() if lines_of_path}
    passed = {test: taken for test, taken in recorder.seconds.items() if test not in recorder.failed}
    answer.write_text(json.dumps({"seconds": passed, "lines": lines}), encoding="utf-8")
    return 0


class Imported:
    """A plugin of pytest that stops if the course is not imported from the copy."""

    def pytest_collection_finish(self) -> None:
        package = sys.modules.get("course_utils")
        if package and not Path(str(package.__file__)).is_relative_to(Path.cwd()):
            pytest.exit(f"{package.__file__} is not in the copy", returncode=99)


class Recorder:
    """A plugin of pytest that asks coverage which lines each test executes, and notes its CPU time."""

    def __init__(self, measuring: Any) -> None:
        self.measuring = measuring
        self.seconds: dict[str, float] = {}
        self.failed: set[str] = set()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        started = time.process_time()
        self.measuring.switch_context(item.nodeid)
        result = yield
        self.measuring.switch_context("")
        self.seconds[item.nodeid] = time.process_time() - started
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.passed:
            self.failed.add(report.nodeid)


class Tests:
    """The tests that may notice a mutant."""

    def __init__(self, reached: Iterable[dict[str, Any]], pristine: Path) -> None:
        self.seconds: dict[str, float] = {}
        self.lines: dict[tuple[str, int], set[str]] = defaultdict(set)
        self.imported: dict[tuple[str, int], set[str]] = defaultdict(set)
        for of_file in reached:
            self.seconds |= of_file["seconds"]
            for path, lines in of_file["lines"].items():
                for line, tests in lines.items():
                    self.lines[path, int(line)] |= of_file["seconds"].keys() & set(tests)
                    if "" in tests:  # when the test file was imported
                        self.imported[path, int(line)] |= of_file["seconds"].keys()
        paths = {path for path, _ in self.lines}
        self.sources = {path: (pristine / path).read_text(encoding="utf-8").splitlines() for path in paths}

    def noticing(self, mutant: Mutant) -> list[str]:
        """The tests to run: those that reach it first, then others of their files, which share fixtures and
        caches.
        """
        certain = self._reaching(mutant)
        files = {test.partition("::")[0] for test in certain}
        others = {test for test in self.seconds if test.partition("::")[0] in files} - certain
        chosen = []
        taken = 0.0
        for test in [*self._ordered(certain, mutant), *self._ordered(others, mutant)]:
            taken += self.seconds[test]
            if taken <= SECONDS:
                chosen.append(test)
        return chosen

    def _reaching(self, mutant: Mutant) -> set[str]:
        lines = {(mutant.path, line) for line in mutant.lines}
        if mutant.names:
            named = re.compile(rf"\b(?:{'|'.join(mutant.names)})\b")
            for path, source in self.sources.items():
                lines |= {(path, number) for number, text in enumerate(source, start=1) if named.search(text)}
        statement = {(mutant.path, line) for line in mutant.statement}
        for known, sites in ((self.lines, lines), (self.lines, statement), (self.imported, statement)):
            if found := set[str]().union(*(known[site] for site in sites & known.keys())):
                return found
        return set()

    def _ordered(self, tests: set[str], mutant: Mutant) -> list[str]:
        """Those of the file's own tests first, then the quickest of each test file,
        then the second of each.
        """
        own = f"test_{Path(mutant.path).stem.removesuffix('_labs')}"
        turns: Counter[str] = Counter()
        ranked = []
        for test in sorted(tests, key=lambda test: (self.seconds[test], test)):
            file = test.partition("::")[0]
            turns[file] += 1
            ranked.append((own not in file, turns[file], test))
        return [test for *_, test in sorted(ranked)]


# Trying them


class Trial:
    """Runs the tests of each mutant, and afterwards every test that noticed one without any mutant."""

    def __init__(self, tests: Tests, pristine: Path, copies: Sequence[Path]) -> None:
        self.tests, self.pristine, self.copies = tests, pristine, copies
        self.results: list[tuple[Mutant, str]] = []
        self.killers: set[str] = set()
        self.jobs: list[Job] = []

    def judge(self, mutants: Sequence[Mutant]) -> list[tuple[Mutant, str]]:
        for mutant in mutants:
            if tests := self.tests.noticing(mutant):
                self.jobs.append(self._job(mutant, tests))
            else:
                self._decide(mutant, UNREACHED)
        files = sorted({test.partition("::")[0] for test in self.tests.seconds})
        compiled = Job(
            partial(pytest.main, ["-q", "--collect-only", "-p", "no:cacheprovider", *files]), _control, 600
        )
        run_all([compiled] * len(self.copies), self.copies)  # once, not once for each mutant
        run_all(self.jobs, self.copies)
        if killers := sorted(self.killers & self.tests.seconds.keys()):
            arguments = ["-q", "--tb=short", "-p", "no:cacheprovider", *killers]
            run_all([Job(partial(pytest.main, arguments), _control, 1800)], self.copies)
        return self.results

    def _job(self, mutant: Mutant, tests: Sequence[str]) -> "Job":
        # for endless loops alone
        limit = int(20 + 5 * sum(self.tests.seconds.get(test, 1) for test in tests))
        return Job(partial(self._run, mutant, tests), partial(self._ran, mutant, tests), limit)

    def _run(self, mutant: Mutant, tests: Sequence[str]) -> int:
        sys.dont_write_bytecode = True  # compiled files are of the original, and known by its time
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
        source = (self.pristine / mutant.path).read_bytes()
        Path(mutant.path).write_bytes(source[: mutant.start] + mutant.text.encode() + source[mutant.end :])
        return pytest.main(["-x", "-q", "--tb=line", "-p", "no:cacheprovider", *tests], plugins=[Imported()])

    def _ran(self, mutant: Mutant, tests: Sequence[str], code: int, text: str, copy: Path) -> None:
        shutil.copy2(self.pristine / mutant.path, copy / mutant.path)
        failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", text, re.MULTILINE)
        if code in (5, 98, 99):
            raise SystemExit(f"{mutant}: exit status {code}\n{text[-2000:]}")
        # the mutant changes names of parameters
        if code == 4 and not failed and any("[" in test for test in tests):
            self.jobs.insert(0, self._job(mutant, [*dict.fromkeys(test.partition("[")[0] for test in tests)]))
        elif code:
            self._decide(mutant, KILLED, failed[1] if failed else f"exit status {code}")
        else:
            self._decide(mutant, SURVIVED)

    def _decide(self, mutant: Mutant, result: str, killer: str = "") -> None:
        self.results.append((mutant, result))
        self.killers.add(killer)
        print(f"{result}: {mutant}  {killer}", flush=True)


def _control(code: int, text: str, copy: Path) -> None:
    if code:
        raise SystemExit(f"These fail without a mutant, too (exit status {code}):\n{text[-4000:]}")


@dataclass
class Job:
    """What a process does in a copy, who hears how it ended, and how long it may compute."""

    work: Callable[[], int]
    done: Callable[[int, str, Path], None]
    cpu_seconds: int


def copies_of(root: Path, number: int, folder: Path) -> list[Path]:
    """Copies of the checkout as it is now, with what is not committed, without what git ignores."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout.split("\0")
    copies = [folder / f"copy{index}" for index in range(number)]
    for name in filter(None, names):
        for copy in copies if (root / name).is_file() else ():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, copy / name)
    return copies


def run_all(jobs: list[Job], copies: Sequence[Path]) -> None:
    """Run each job in a process of its own, one to a copy at a time. A job that is done may add others to the
    list.
    """
    free = list(copies)
    running = dict[int, tuple[Job, Path, float]]()
    while jobs or running:
        while jobs and free:
            job = jobs.pop(0)
            copy = free.pop()
            running[fork(job, copy)] = (job, copy, time.monotonic())
        time.sleep(0.05)
        for child, (job, copy, started) in list(running.items()):
            ended, status = os.waitpid(child, os.WNOHANG)
            if not ended and time.monotonic() - started > 10 * job.cpu_seconds:  # it waits for ever
                os.killpg(child, signal.SIGKILL)
            if ended:
                with suppress(ProcessLookupError):
                    os.killpg(child, signal.SIGKILL)  # what it has started
                del running[child]
                free.append(copy)
                job.done(os.waitstatus_to_exitcode(status), log_of(copy).read_text(errors="replace"), copy)


def fork(job: Job, copy: Path) -> int:  # pyrefly: ignore [bad-return]  # the child ends in `finally`
    """Start a job in a process that has torch and pytest, and nothing of the course."""
    child = os.fork()
    if child:
        return child
    code = 98
    try:
        os.setsid()
        os.chdir(copy)
        with log_of(copy).open("wb") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        os.environ["PYTHONPATH"] = sys.path[0] = str(copy)  # in place of the folder of this file
        resource.setrlimit(resource.RLIMIT_CPU, (job.cpu_seconds, job.cpu_seconds + 5))
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        code = job.work()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def log_of(copy: Path) -> Path:
    return copy.with_suffix(".log")


if __name__ == "__main__":
    if any(os.environ.get(name) != value for name, value in ENVIRONMENT.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **ENVIRONMENT})
    raise SystemExit(main())
