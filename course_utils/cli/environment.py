"""The course's own environment in `.venv`: made once, recognized in milliseconds, never trusted half-made.

Standard library only: this runs before anything is installed.
"""

import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from ..interactive.course_files import IS_CLONE, SHIPPED

NAME = "where-did-the-memory-go"
FOLDER = SHIPPED / ".venv"
MARKER = "course-setup.json"
FILES = ("pyproject.toml", "constraints.txt")
"""What decides which packages an environment has."""

NEEDED = {
    "torch": ("torch", "numpy"),
    "lab": ("torch", "jupyterlab", "ipywidgets", "matplotlib"),
    "test": ("torch", "jupyterlab", "ipywidgets", "matplotlib", "pytest", "xdist", "nbval", "jupytext"),
    "author": ("torch", "jupyterlab", "pytest", "jupytext", "ruff", "sphinx"),
    "scripts": ("torch", "pytest", "torchvision", "transformers", "diffusers", "lightning", "peft", "timm"),
}
"""For each extra of pyproject.toml, modules that tell whether a Python has it."""

EXTRAS = ("lab", "author", "scripts")
"""Extras that the course's own environment may have; each contains the one before it."""

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
CUDA_INDEX = "https://download.pytorch.org/whl/cu130"
"""PyTorch's own wheel indexes: elsewhere Linux wheels are the CUDA build, Windows wheels the CPU build."""

AGAIN = "then run the same command again"


class SetupError(Exception):
    """An obstacle to starting the course; the message is one sentence that says what to do about it."""


def interpreter(purpose: str, here: bool = False, folder: Path = FOLDER) -> Path:
    """The Python to run the course with, after making its environment if need be.

    `purpose` is the extra that a command needs. With `here`, with a wheel, and in a `.venv` that the user
    made, it is the current Python if that has what is needed. Raises SetupError when it cannot be.
    """
    before = remembered(folder)
    is_users_own = not before and Path(sys.prefix).resolve() == folder.resolve()
    if here or not IS_CLONE or is_users_own:
        absent = [name for name in NEEDED[purpose] if find_spec(name) is None]
        if absent:
            raise SetupError(how_to_install(absent, purpose, here))
        return Path(sys.executable)
    facts = wanted_facts(purpose, before)
    if before != facts or not python_in(folder).exists():
        try:
            set_up(folder, facts, before)
        except OSError as problem:  # a folder that may not be written to, a full disk
            raise SetupError(
                f"Setting up {folder} failed ({problem}): fix this or clone the course elsewhere, {AGAIN}."
            ) from None
    return python_in(folder)


def python_in(folder: Path) -> Path:
    """The Python of an environment."""
    return folder / ("Scripts/python.exe" if platform.system() == "Windows" else "bin/python")


def wanted_facts(purpose: str, before: Mapping[str, str]) -> dict[str, str]:
    """Facts that the marker of a finished environment holds. An extra that was installed before stays."""
    extra = "author" if purpose in ("test", "author") else "lab"
    if extra == "author" and os.environ.get("COURSE_LIBRARIES") == "1":
        extra = "scripts"
    kept = before.get("extra")
    if kept in EXTRAS:
        extra = max(extra, kept, key=EXTRAS.index)
    files = [(SHIPPED / name).read_bytes() for name in FILES]
    return {
        "state": "ready",
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "torch": torch_choice(before.get("torch", "")),
        "root": str(SHIPPED),
        "extra": extra,
        "files": hashlib.sha256(b"".join(files)).hexdigest(),
    }


def remembered(folder: Path = FOLDER) -> dict[str, str]:
    """The marker's content; empty when there is none, "unfinished" when it cannot be read."""
    try:
        facts = json.loads((folder / MARKER).read_text(encoding="utf-8"))
        return dict(facts) or {"state": "unfinished"}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError):
        return {"state": "unfinished"}


def remember(folder: Path, facts: Mapping[str, str]) -> None:
    """Write the marker."""
    (folder / MARKER).write_text(json.dumps(facts, indent=1), encoding="utf-8")


# The torch build


def torch_choice(before: str = "") -> str:
    """The build, "cpu" or "cuda": what COURSE_TORCH asks for, else the present one, else the machine's."""
    asked = os.environ.get("COURSE_TORCH", "").strip().lower()
    builds = ("cpu",) if platform.system() == "Darwin" else ("cpu", "cuda")
    if asked and asked not in builds:
        allowed = " or ".join(builds)
        raise SetupError(f"COURSE_TORCH is {asked!r}: here it may be {allowed}, or leave it unset.")
    return asked or before or ("cuda" if nvidia_driver() else "cpu")


def nvidia_driver() -> bool:
    """True if an NVIDIA driver is installed. Looks for files only: this runs at each start."""
    if platform.system() == "Windows":
        windows = Path(os.environ.get("SYSTEMROOT", r"C:\Windows"))
        return (windows / "System32" / "nvcuda.dll").exists()
    places = ("/proc/driver/nvidia/version", "/usr/lib/wsl/lib/libcuda.so.1")
    return platform.system() == "Linux" and any(Path(place).exists() for place in places)


def torch_sources(build: str) -> list[list[str]]:
    """pip's options for the places to get torch from, best first.

    PyTorch's own index gives torch alone (`--no-deps`): the packages that torch needs come with all the
    others. Where the package index would do as well, it is asked briefly, with one retry; the CUDA build for
    Windows is nowhere else.
    """
    system = platform.system()
    if (system, build) == ("Linux", "cpu"):
        return [["--no-deps", "--timeout", "10", "--retries", "1", "--index-url", CPU_INDEX], []]
    if (system, build) == ("Windows", "cuda"):
        return [["--no-deps", "--index-url", CUDA_INDEX]]
    return [[]]


# Making it


def set_up(folder: Path, facts: Mapping[str, str], before: Mapping[str, str]) -> None:
    """Make the environment or bring it up to date. Until the end its marker says "unfinished"."""
    if not before and folder.exists() and any(folder.iterdir()):
        raise SetupError(
            f"{folder} is not the course's own: move it away, {AGAIN}, or use your own Python: --here."
        )
    is_sound = all(before.get(name) == facts[name] for name in ("state", "python", "torch", "root"))
    folder.mkdir(exist_ok=True)
    remember(folder, {**facts, "state": "unfinished"})
    if not is_sound or not python_in(folder).exists():
        make_environment(folder)
    pins = ["--constraint", "constraints.txt"]
    # torchvision as well has a build of its own for each of torch
    torch = ["torch", "torchvision"] if facts["extra"] == "scripts" else ["torch"]
    install_torch(python_in(folder), facts["torch"], [*pins, *torch])
    pip_install(python_in(folder), [*pins, "--editable", f".[{facts['extra']}]"])
    if facts["extra"] == "scripts":
        check_vision(python_in(folder))
    remember(folder, facts)


def make_environment(folder: Path) -> None:
    """A new environment in a folder, in place of all that is in it but the marker. Raises SetupError."""
    print(f"Making the course's own Python environment in {folder}", flush=True)
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != MARKER:
            path.unlink()
    # Not sys.executable first: that one may just have been removed with the folder.
    python = getattr(sys, "_base_executable", "") or sys.executable
    if subprocess.run([python, "-m", "venv", str(folder)], check=False).returncode:
        raise SetupError(
            f"`{python} -m venv` failed and says why above: on Debian or Ubuntu `sudo apt install"
            f" python3-venv` may be missing; make room if the disk is full; {AGAIN}."
        )


def install_torch(python: Path, build: str, what: Sequence[str]) -> None:
    """Install that build of torch from the first place that has it. Raises SetupError."""
    *others, last = torch_sources(build)
    for options in others:
        if run_pip(python, [*options, *what]):
            return
        print("Trying the package index instead", flush=True)
    pip_install(python, [*last, *what])


def check_vision(python: Path) -> None:
    """Remove torchvision, and timm, which needs it, where its build is not torch's.

    Only PyTorch's own index has the CPU build, and with another one every library that imports torchvision
    fails.
    """
    if subprocess.run([str(python), "-c", "import torchvision"], check=False, capture_output=True).returncode:
        print("This torchvision is not of torch's build: scripts with torchvision or timm are skipped.")
        uninstall = [str(python), "-m", "pip", "uninstall", "--yes", "torchvision", "timm"]
        subprocess.run(uninstall, cwd=SHIPPED, check=True)


def pip_install(python: Path, arguments: Sequence[str]) -> None:
    """Install with an environment's pip. Raises SetupError if that fails; pip has said why."""
    if not run_pip(python, arguments):
        raise SetupError(
            "pip could not install that and says why above: check the network (or HTTPS_PROXY)"
            f" and the free space on the disk, {AGAIN}."
        )


def run_pip(python: Path, arguments: Sequence[str]) -> bool:
    """True if an environment's pip could install what the arguments name."""
    command = [str(python), "-m", "pip", "install", "--no-input", "--disable-pip-version-check", *arguments]
    return subprocess.run(command, cwd=SHIPPED, check=False).returncode == 0


# What is here already


def how_to_install(absent: Sequence[str], purpose: str, here: bool) -> str:
    """One sentence: which packages are missing in this Python, and the command that installs them."""
    pip = f"{sys.executable} -m pip" if find_spec("pip") else "uv pip"  # uv makes environments without pip
    what = f'--editable ".[{purpose}]"' if IS_CLONE else f'"{NAME}[{purpose}]"'
    advice = f"install that with `{pip} install {what}`"
    if IS_CLONE and here:
        advice += ", or leave out --here and the course makes its own environment"
    return f"{'--here' if here else 'This'} needs {', '.join(absent)} in {sys.executable}: {advice}."
