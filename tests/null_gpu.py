"""The course on a GPU that does nothing, for machines without one: torch's CUDA build over a stand-in for the
driver.

`python3 tests/null_gpu.py` makes an environment of its own (5 GB in `build/null_gpu`), compiles the stand-in
(`tests/null_gpu/`), and runs live tests, recorder, demos, lessons and solutions on it. Standard library only.
"""

import argparse
import contextlib
import fnmatch
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # where this file is run alone

from check_torch import own_environment  # noqa: E402

from course_utils.cli.environment import SetupError  # noqa: E402

SOURCES = Path(__file__).with_suffix("")
TORCH = "2.11.0"
"""Its default wheel for Linux is a CUDA build, and it is the oldest torch of the course."""

RECORDED = ("context", "workspaces", "scratch", "script", "times", "kernels", "history", "run", "published")
"""Kinds of the recorder's tasks. Notebooks, which it knows too, are checks of their own here."""

CANNOT = {
    "recorder: run: *attention='cudnn'*: failed RuntimeError: cuDNN error: CUDNN_STATUS_NOT_INITIALIZED": (
        "cuDNN asks the hardware itself, and finds none."
    ),
    "notebooks/11*: no cell was live": "Lesson 11 simulates one rank of many.",
    "*NCCL error*": "NCCL asks the driver for what the null GPU has not.",
}
"""Failures that the null GPU explains: a pattern of "check: failure", and the reason."""

NOTEBOOK = (
    "import json, sys; from pathlib import Path; "
    "from course_utils.evidence.live_notebook import execute_live; "
    "print(json.dumps(execute_live(Path(sys.argv[1]))))"
)


@dataclass(frozen=True)
class Check:
    """One command: Python's arguments, the seconds that it may take, and how failures are found in its
    output.
    """

    name: str
    arguments: Sequence[str]
    seconds: float
    failures: Callable[[str], list[str]]


# What is checked


def checks(folder: Path) -> Iterator[Check]:
    """Everything that has a live path, by groups: tests, recorder, demos, lessons, solutions."""
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        text = path.read_text(encoding="utf-8")
        if "torch.cuda" in text and re.search(r"^(import|from) torch\b", text, re.MULTILINE):
            command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-rfE", str(path)]
            yield Check(path.relative_to(ROOT).as_posix(), command, 1200, failed_tests)
    for kind in RECORDED:
        out = folder / "recordings" / kind
        command = [
            "-m",
            "course_utils",
            "record",
            "--minutes",
            "60",
            "--out",
            str(out),
            "--only",
            f"{kind}: ",
        ]
        yield Check(f"recorder: {kind}", command, 3700, partial(failed_tasks, out))
    yield Check("demos", ["-m", "course_utils", "demos", "--check", "--here"], 900, failed_demos)
    for group in ("notebooks", "solutions"):
        for path in sorted((ROOT / group).glob("[0-9]*.ipynb")):
            yield Check(
                f"{group}/{path.name}", ["-c", NOTEBOOK, str(path)], 1800, partial(failed_cells, path)
            )


def failed_tests(output: str) -> list[str]:
    """The lines of pytest's summary that name a test which failed."""
    return re.findall(r"^(?:FAILED|ERROR) (.*)$", output, re.MULTILINE)


def failed_tasks(folder: Path, output: str) -> list[str]:
    """The recorder's tasks that were not measured or whose result is wrong, and how many were left."""
    lines = [json.loads(line) for path in folder.glob("*.jsonl") for line in path.read_text().splitlines()]
    wrong = [f"{line['task']}: {words}" for line in lines for words in wrong_in(line)]
    return [*wrong, *re.findall(r"\d+ are left", output)] if lines else ["no task was done"]


def wrong_in(line: dict[str, Any]) -> Iterator[str]:
    """Faults in a recorder's line that would be faults on any GPU: none depends on a
    number of the null GPU.
    """
    if line["status"] != "measured":
        yield f"{line['status']} {line['detail']}".strip()
    if not line["parts"].get("history", {}).get("exact", True):
        yield "the replay of the allocator's history is not exact"
    for one in line["parts"].get("scratch", {}).get("operations", ()):
        if one.get("scratch", 0) < 0:
            yield f"the scratch of {one['operation']} is negative"


def failed_demos(output: str) -> list[str]:
    """Each demo that failed, with its error."""
    return re.findall(r"^FAIL +\d+ s  (.*)$", output, re.MULTILINE)


def failed_cells(path: Path, output: str) -> list[str]:
    """The cells of a notebook that failed, from the last line of the output; and whether none was live that
    should be.

    Those of a lesson that shows a simulated GPU where it is committed should. Some exercises simulate on
    purpose.
    """
    last = "".join(output.splitlines()[-1:])
    if not last.startswith("{"):
        return [f"no result: {last[:300]}"]
    found = json.loads(last)
    could = path.parent.name == "notebooks" and "simulated GPU · torch" in path.read_text(encoding="utf-8")
    return [*found["failed"], *(["no cell was live"] if could and not found["live"] else [])]


# One check


@dataclass(frozen=True)
class Result:
    """The result of a check: failures that count, failures that `CANNOT` explains with their reasons, and its
    time.
    """

    name: str
    failures: list[str]
    explained: list[str]
    seconds: float

    def __str__(self) -> str:
        lines = [f"{'FAILED' if self.failures else 'passed'} {self.seconds:5.0f} s  {self.name}"]
        return "\n".join(
            [*lines, *(f"    {one}" for one in self.failures), *(f"    ({one})" for one in self.explained)]
        )


def perform(check: Check, python: str, environment: dict[str, str], logs: Path) -> Result:
    """Run a check in a process of its own and keep its output in `logs`."""
    start = time.monotonic()
    log = logs / f"{re.sub(r'[^a-z0-9]+', '-', check.name.lower())}.txt"
    with log.open("w") as stream:
        code = ended([python, *check.arguments], environment, check.seconds, stream.fileno())
    failures = judged(check, code, log.read_text(encoding="utf-8", errors="replace"))
    reasons = {
        one: [why for what, why in CANNOT.items() if fnmatch.fnmatch(f"{check.name}: {one}", what)]
        for one in failures
    }
    explained = [f"{one} Why: {why[0]}" for one, why in reasons.items() if why]
    return Result(
        check.name, [one for one, why in reasons.items() if not why], explained, time.monotonic() - start
    )


def ended(command: list[str], environment: dict[str, str], seconds: float, stream: int) -> int | None:
    """The exit code of a command; None if it was ended, with all its children, because its time was over."""
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=stream,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        for number in (signal.SIGTERM, signal.SIGKILL):  # the recorder ends its task when it is asked to end
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(process.pid, number)
                process.wait(10)
        return None


def judged(check: Check, code: int | None, output: str) -> list[str]:
    """Each failure in one line; the last line of the output where a command failed and does not say why."""
    if code is None:
        return [f"not done after {check.seconds:.0f} s"]
    last = "".join(output.strip().splitlines()[-1:])
    return check.failures(output) or ([f"exit code {code}: {last[:300]}"] if code else [])


# The stand-in and its environment


def missing(site: Path) -> str:
    """The missing part of that folder of packages to compile and use the stand-in; ""
    if nothing is missing.
    """
    if not (site / "torch" / "lib" / "libc10_cuda.so").exists():
        return "this build of torch is not for CUDA"
    if shutil.which("g++") is None:
        return "there is no g++ to compile the stand-in with"
    return "" if all(headers(site)) else "CUDA's headers are not installed"


def headers(site: Path) -> tuple[list[Path], list[Path]]:
    """Folders with headers, as torch's wheels bring them: of CUDA's runtime, and of its compiler, which
    Triton has.
    """
    runtime = site.glob("nvidia/*/include/cuda_runtime_api.h")
    compiler = [
        path
        for where in ("nvidia/*", "triton/backends/*")
        for path in site.glob(f"{where}/include/crt/host_defines.h")
    ]
    return [path.parent for path in runtime], [path.parents[1] for path in compiler]


def standing_in(site: Path, folder: Path) -> dict[str, str]:
    """Compile the stand-in into `folder`; returns the environment in which a program finds it in place of a
    GPU.
    """
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / "libcuda.so.1"  # the driver's name, by which torch looks for it
    runtime, compiler = headers(site)
    folders = [f"-I{path}" for path in (*runtime, *compiler)]
    command = ["g++", "-std=c++17", "-O1", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", *folders]
    subprocess.run([*command, *map(str, sorted(SOURCES.glob("*.cpp"))), "-o", str(library)], check=True)
    ours = {
        "LD_PRELOAD": str(library),
        "CUDA_MODULE_LOADING": "LAZY",
        "PYTHONPATH": str(ROOT),
        "PYTHONUNBUFFERED": "1",
    }
    ours["TORCH_CUDNN_SDPA_DEPRIORITIZED"] = "1"  # cuDNN finds no hardware: flash attention comes first
    return {name: value for name, value in os.environ.items() if name != "COURSE_SOURCE"} | ours


def main(arguments: Sequence[str]) -> int:
    """Runs the checks; 1 if anything failed that `CANNOT` does not explain."""
    parser = argparse.ArgumentParser(prog="null_gpu.py", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "patterns", nargs="*", help="only checks whose name contains one of these, as in notebooks/03"
    )
    parser.add_argument(
        "--python", help="use this Python, which has torch's CUDA build and the extras lab and test"
    )
    parser.add_argument(
        "--folder", type=Path, default=ROOT / "build" / "null_gpu", help="where everything is put"
    )
    parser.add_argument("--jobs", type=int, default=2, help="checks at a time (2)")
    parser.add_argument("--list", action="store_true", help="print the names of the checks, and run none")
    options = parser.parse_args(arguments)
    chosen = [
        one for one in checks(options.folder) if any(word in one.name for word in options.patterns or [""])
    ]
    if options.list or not chosen:
        print("\n".join(one.name for one in chosen) or "No check has such a name: --list shows them all.")
        return 0 if chosen else 1
    try:
        python = options.python or own_environment(TORCH, cuda=True, place=options.folder)
    except SetupError as error:
        sys.exit(str(error))
    ask = "import sysconfig; print(sysconfig.get_path('platlib'))"
    site = Path(
        subprocess.run([python, "-c", ask], check=True, capture_output=True, text=True).stdout.strip()
    )
    if reason := missing(site):
        sys.exit(f"{python}: {reason}.")
    environment = standing_in(site, options.folder) | {
        "COURSE_HOME": str(options.folder / "home"),
        "COLUMNS": "400",
    }
    shutil.rmtree(options.folder / "recordings", ignore_errors=True)  # the recorder goes on where it stopped
    (options.folder / "logs").mkdir(exist_ok=True)
    with ThreadPoolExecutor(options.jobs) as pool:
        begun = [pool.submit(perform, one, python, environment, options.folder / "logs") for one in chosen]
        results = []
        for done in as_completed(begun):
            results.append(done.result())
            print(results[-1], flush=True)
    failed = [one for one in results if one.failures]
    print(f"{len(failed)} of {len(results)} checks failed. Their output is in {options.folder / 'logs'}.")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
