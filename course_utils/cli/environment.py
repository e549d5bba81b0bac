"""The course's own environment in `.venv`: made once, recognized in milliseconds, never trusted half-made.

Standard library only: this runs before anything is installed. pip's output is one line of progress and a log.
"""

import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from ..interactive.course_files import IS_CLONE
from ..interactive.learner_folder import write_whole

NAME = "where-did-the-memory-go"

SET_UP_WITH = {"torch": "lab", "lab": "lab", "test": "author", "author": "author"}
"""For each purpose, the extra of pyproject.toml that set-up installs. The purpose itself is the extra that a
command needs where it runs in another Python; each extra contains those before it.
"""

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
CUDA_INDEX = "https://download.pytorch.org/whl/cu130"
"""PyTorch's own wheel indexes: elsewhere Linux wheels are the CUDA build, Windows wheels the CPU build."""

OFFLINE = re.compile("connection broken by|Could not fetch URL|ConnectionResetError|ReadTimeoutError")
FULL = re.compile("No space left on device|not enough space on the disk")
"""Words in pip's output when it could not reach an index, and when the disk is full."""

PROGRESS = ("Collecting", "Downloading", "Installing", "Building")
"""How lines of pip's begin that say what it is doing."""

AGAIN = "then run the same command"


class SetupError(Exception):
    """An obstacle to starting the course; the message is one sentence that says what to do about it."""


@dataclass(frozen=True)
class Home:
    """The places that set-up works with, all below the repository's root."""

    root: Path
    system: str = platform.system()

    @property
    def folder(self) -> Path:
        return self.root / ".venv"

    @property
    def python(self) -> Path:
        return self.folder / ("Scripts/python.exe" if self.system == "Windows" else "bin/python")

    @property
    def marker(self) -> Path:
        """The record of the set-up: written as "unfinished" first and as "ready" last."""
        return self.folder / "course-setup.json"

    @property
    def log(self) -> Path:
        return self.folder / "course-setup.log"


def interpreter(home: Home, purpose: str, here: bool = False) -> Path:
    """The Python to run the course with for a purpose (a key of SET_UP_WITH), after setting it up if need be.

    With `here`, with a wheel, and in a `.venv` that the user made, it is the current one if that has what is
    needed. Raises SetupError when it cannot be.
    """
    memory = remembered(home)
    is_users_own = not memory and Path(sys.prefix).resolve() == home.folder.resolve()
    if here or not IS_CLONE or is_users_own:
        if absent := missing_packages(home.root, purpose):
            raise SetupError(how_to_install(absent, purpose, here))
        return Path(sys.executable)
    choice = torch_choice(home.system, os.environ.get("COURSE_TORCH", ""), memory.get("torch", ""))
    if not is_ready(home, purpose, choice, memory):
        set_up(home, purpose, choice, memory)
    return home.python


def how_to_install(absent: list[str], purpose: str, here: bool) -> str:
    """One sentence: which packages are missing in this Python, and the command that installs them."""
    pip = f"{sys.executable} -m pip" if find_spec("pip") else "uv pip"  # uv makes environments without pip
    what = f'--editable ".[{purpose}]"' if IS_CLONE else f'"{NAME}[{purpose}]"'
    named = absent[:3]
    if len(absent) > 3:
        named.append(f"{len(absent) - 3} more")
    who = "--here" if here else "This"
    advice = f"install that with `{pip} install {what}`"
    if IS_CLONE and here:
        advice += ", or leave out --here and the course makes its own environment"
    return f"{who} needs {', '.join(named)} in {sys.executable}: {advice}."


def is_ready(home: Home, purpose: str, choice: str, memory: dict[str, str]) -> bool:
    """True if the environment was finished, from these very files, for this purpose or a larger one."""
    return (
        memory.get("state") == "ready"
        and memory.get("key") == fingerprint(home, choice)
        and memory.get("purpose") in (SET_UP_WITH[purpose], "author")
        and home.python.exists()
    )


def fingerprint(home: Home, choice: str) -> str:
    """A hash of everything that decides what an environment contains."""
    digest = hashlib.sha256()
    for name in ("pyproject.toml", "constraints.txt"):
        digest.update((home.root / name).read_bytes())
    digest.update("|".join(foundations(home, choice).values()).encode())
    return digest.hexdigest()


def foundations(home: Home, choice: str) -> dict[str, str]:
    """The basis of an environment: when one of these changes it is made anew, not just brought up to date."""
    return {
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "torch": choice,
        "root": str(home.root),
        "layout": "1",  # the way in which it is made
    }


def remembered(home: Home) -> dict[str, str]:
    """The marker's content; empty when there is none, "unfinished" when it cannot be read."""
    if not home.marker.exists():
        return {}
    try:
        memory = json.loads(home.marker.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        memory = None
    return memory if isinstance(memory, dict) else {"state": "unfinished"}


def remember(home: Home, **facts: str) -> None:
    write_whole(home.marker, json.dumps(facts, indent=1))


# The torch build


def torch_choice(system: str, asked: str = "", before: str = "") -> str:
    """The build, "cpu" or "cuda": what COURSE_TORCH asks for, else the present one, else the machine's."""
    asked = asked.strip().lower()
    builds = ("cpu",) if system == "Darwin" else ("cpu", "cuda")
    if asked and asked not in builds:
        allowed = " or ".join(builds)
        raise SetupError(f"COURSE_TORCH is {asked!r}: here it may be {allowed}, or leave it unset.")
    if asked or before:
        return asked or before
    return "cuda" if nvidia_driver(system) else "cpu"


def nvidia_driver(system: str = platform.system()) -> bool:
    """True if an NVIDIA driver is installed. Looks for files only: this runs at each start."""
    if system == "Windows":
        windows = Path(os.environ.get("SYSTEMROOT", r"C:\Windows"))
        return (windows / "System32" / "nvcuda.dll").exists()
    places = ("/proc/driver/nvidia/version", "/usr/lib/wsl/lib/libcuda.so.1")
    return system == "Linux" and any(Path(place).exists() for place in places)


def torch_sources(system: str, choice: str) -> list[list[str]]:
    """pip's options for the places to get torch from, best first.

    PyTorch's own index gives torch alone (`--no-deps`): the packages that torch needs come with all the
    others. Where the package index would do as well, it is asked briefly, with one retry; the CUDA build for
    Windows is nowhere else.
    """
    if (system, choice) == ("Linux", "cpu"):
        return [["--no-deps", "--timeout", "10", "--retries", "1", "--index-url", CPU_INDEX], []]
    if (system, choice) == ("Windows", "cuda"):
        return [["--no-deps", "--index-url", CUDA_INDEX]]
    return [[]]


# Making it


def set_up(home: Home, purpose: str, choice: str, memory: dict[str, str]) -> None:
    """Make the environment or bring it up to date. Raises SetupError; what an error leaves is not trusted."""
    if home.folder.exists() and not memory:
        raise SetupError(
            f"{home.folder} is not the course's own: move it away, {AGAIN}, or use your own Python: --here."
        )
    base = foundations(home, choice)
    current = memory.get("state") == "ready" and memory.items() >= base.items() and home.python.exists()
    # what is installed already stays: bringing up to date never takes packages away
    has_all = current and memory.get("purpose") in ("test", "author")
    extra = "author" if has_all else SET_UP_WITH[purpose]
    marks = {**base, "purpose": extra}
    try:
        if not current:
            make_folder(home, marks)
        remember(home, **marks, state="unfinished")
        torch = f"torch=={locked(home.root)['torch']}"
        sources = torch_sources(home.system, choice)
        for options in sources:
            if pip_install(home, torch, [*options, torch], may_fail=options != sources[-1]):
                break
        course = ["--constraint", "constraints.txt", "--editable", f".[{extra}]"]
        pip_install(home, "the course and its packages", course)
        remember(home, **marks, state="ready", key=fingerprint(home, choice))
    except PermissionError as problem:
        raise SetupError(
            f"You may not write to {problem.filename}:"
            f" clone the course into a folder of your own, {AGAIN},"
            " or use a Python of yours that has its packages: --here."
        ) from None
    except OSError as problem:
        raise SetupError(f"Setting up {home.folder} failed ({problem}): fix this, {AGAIN}.") from None


def make_folder(home: Home, marks: dict[str, str]) -> None:
    """An empty environment in place of an earlier one. Raises SetupError if Python has no module venv."""
    print(f"Making the course's own Python environment in {home.folder}", flush=True)
    if home.folder.exists():
        shutil.rmtree(home.folder)
    home.folder.mkdir()
    remember(home, **marks, state="unfinished")
    # not sys.executable first: that one may just have been removed with the folder
    base_python = getattr(sys, "_base_executable", "") or sys.executable
    command = [base_python, "-m", "venv", str(home.folder)]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    if made.returncode:
        said = (made.stderr.strip() or made.stdout.strip()).splitlines()
        raise SetupError(
            f"`{base_python} -m venv` failed ({said[-1] if said else 'silently'}):"
            " on Debian or Ubuntu run `sudo apt install python3-venv`;"
            f" elsewhere install Python from python.org, which has it; {AGAIN}."
        )


def pip_install(home: Home, what: str, arguments: Sequence[str], may_fail: bool = False) -> bool:
    """Install with the environment's pip, say so in one line, and return True if it worked.

    Raises SetupError if not, unless it `may_fail`.
    """
    print(f"Installing {what} …", flush=True)
    started = time.monotonic()
    failed, said = run_pip(home, ["install", "--no-input", "--disable-pip-version-check", *arguments])
    seconds = time.monotonic() - started
    if failed and (not may_fail or FULL.search(said)):
        raise SetupError(explain_failure(said, what, home.log))
    print(f"  {'not available there' if failed else 'done'} in {seconds:.0f} s", flush=True)
    return not failed


def run_pip(home: Home, arguments: Sequence[str]) -> tuple[int, str]:
    """Exit code and output. On a terminal, the latest thing that pip does is shown in one line."""
    visible = sys.stdout.isatty()
    lines = list[str]()
    command = [str(home.python), "-m", "pip", *arguments]
    with home.log.open("a", encoding="utf-8") as log:
        log.write(f"\n$ {' '.join(command)}\n")
        pip = subprocess.Popen(
            command,
            cwd=home.root,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
        )
        with pip:
            for line in pip.stdout or ():
                lines.append(line)
                log.write(line)
                if visible and line.lstrip().startswith(PROGRESS):
                    print(f"\r\033[K  {line.strip()[:100]}", end="", flush=True)
    if visible:
        print("\r\033[K", end="", flush=True)
    return pip.returncode, "".join(lines)


def explain_failure(said: str, what: str, log: Path) -> str:
    """One sentence that says why pip failed and what to do."""
    if FULL.search(said):
        return f"The disk is full, so {what} could not be installed: make room, {AGAIN}."
    if "ProxyError" in said:
        return (
            f"The proxy did not answer, so {what} could not be installed:"
            f" correct HTTPS_PROXY or unset it, {AGAIN}."
        )
    if OFFLINE.search(said):
        return (
            f"No network: the package index did not answer, so {what} could not be installed;"
            f" connect (or set HTTPS_PROXY if you are behind a proxy), {AGAIN}."
        )
    if "No matching distribution found" in said:
        machine = f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"
        advice = f"use Python 3.11 to 3.14 on a 64-bit system, {AGAIN}"
        return f"There is no build of {what} for {machine}: {advice}."
    errors = [line for line in said.splitlines() if line.startswith("ERROR:")]
    last = errors[-1] if errors else "see"
    return f"pip could not install {what}: {last} (all of it is in {log})."


# What is needed, and what is here


def locked(root: Path) -> dict[str, str]:
    """The version of each package that constraints.txt pins."""
    lines = (root / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = (line.split("==") for line in lines if "==" in line and not line.startswith("#"))
    return {name.strip(): version.strip() for name, version in pins}


def requirements(root: Path, purpose: str) -> dict[str, str]:
    """The packages that a purpose needs, as pyproject.toml lists them: the name and its oldest version."""
    settings = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    extras = settings["project"]["optional-dependencies"]
    needed: dict[str, str] = {}
    for item in extras[purpose]:
        contained = re.fullmatch(rf"{NAME}\[(\w+)\]", item)
        if contained:
            needed |= requirements(root, contained[1])
        else:
            name, least = item.split(">=")
            needed[name] = least
    return needed


def missing_packages(root: Path, purpose: str) -> list[str]:
    """Requirements ("torch>=2.11") of a purpose that the current interpreter does not meet."""
    absent = []
    for name, least in requirements(root, purpose).items():
        try:
            old = version_numbers(metadata.version(name)) < version_numbers(least)
        except metadata.PackageNotFoundError:
            old = True
        if old:
            absent.append(f"{name}>={least}")
    return absent


def version_numbers(version: str) -> tuple[int, ...]:
    """ "2.13.0+cpu" as (2, 13, 0): numbers by which releases can be compared."""
    release = re.match(r"[0-9.]+", version)
    if release is None:
        return ()
    return tuple(int(part) for part in release[0].split(".") if part)
