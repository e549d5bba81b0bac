"""The course's own environment in `.venv`: made once, recognized in milliseconds, never trusted half-made.

Standard library only: this runs before anything is installed.
"""

import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import metadata, util
from pathlib import Path

from ..units import GB, format_bytes
from .pip_runner import AGAIN, Pip, SetupError

EXTRAS = {"lab": ("lab",), "test": ("lab", "test", "author")}
"""The extras of pyproject.toml that each purpose installs; "test" contains all that "lab" does."""

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
CUDA_INDEX = "https://download.pytorch.org/whl/cu130"
"""PyTorch's own wheel indexes: elsewhere the Linux wheel is the CUDA build, and the Windows wheel the CPU build."""

NEEDED_BYTES = {"cpu": 3 * GB, "cuda": 9 * GB}
"""Disk space that an environment takes while it is made, with each torch build."""

LAYOUT = 1  # raised when the way in which an environment is made changes: older ones are then made anew


@dataclass(frozen=True)
class Home:
    """The places that set-up works with, all below the repository's root."""

    root: Path
    system: str = platform.system()

    @property
    def folder(self) -> Path:
        """The environment."""
        return self.root / ".venv"

    @property
    def python(self) -> Path:
        """The environment's interpreter: Windows keeps it elsewhere."""
        return self.folder / ("Scripts/python.exe" if self.system == "Windows" else "bin/python")

    @property
    def marker(self) -> Path:
        """The record of the set-up: written as "unfinished" first and as "ready" last."""
        return self.folder / "course-setup.json"

    @property
    def log(self) -> Path:
        """Everything that pip said."""
        return self.folder / "course-setup.log"


def interpreter(home: Home, purpose: str, here: bool = False) -> Path:
    """The Python to run the course with for a purpose ("lab" or "test"), after setting it up if need be.

    With `here`, the current interpreter if it has what is needed. Raises SetupError when it cannot be.
    """
    if here:
        absent = missing_packages(home.root, purpose)
        if absent:
            raise SetupError(
                f"--here needs {', '.join(absent)} in {sys.executable}: install {'it' if len(absent) == 1 else 'them'} "
                "there, or leave out --here and the course makes its own environment."
            )
        return Path(sys.executable)
    memory = remembered(home)
    choice = torch_choice(home.system, os.environ.get("COURSE_TORCH", ""), memory.get("torch", ""))
    if not is_ready(home, purpose, choice, memory):
        offer_here(home, purpose)
        set_up(home, purpose, choice, memory)
    return home.python


def is_ready(home: Home, purpose: str, choice: str, memory: dict[str, str]) -> bool:
    """True if the environment was finished, from these very files, for this purpose or a larger one."""
    return (
        memory.get("state") == "ready"
        and memory.get("key") == fingerprint(home, choice)
        and set(EXTRAS[purpose]) <= set(EXTRAS.get(memory.get("purpose", ""), ()))
        and home.python.exists()
    )


def fingerprint(home: Home, choice: str) -> str:
    """A hash of everything that decides what an environment contains."""
    digest = hashlib.sha256()
    for name in ("pyproject.toml", "requirements.lock"):
        digest.update((home.root / name).read_bytes())
    digest.update("|".join(foundations(home, choice).values()).encode())
    return digest.hexdigest()


def foundations(home: Home, choice: str) -> dict[str, str]:
    """The basis of an environment: when one of these changes it is made anew, not just brought up to date."""
    return {
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "torch": choice,
        "root": str(home.root),
        "layout": str(LAYOUT),
    }


def remembered(home: Home) -> dict[str, str]:
    """The marker's content; empty when there is none, "unfinished" when it cannot be read."""
    try:
        memory = json.loads(home.marker.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError):
        return {"state": "unfinished"}
    return memory if isinstance(memory, dict) else {"state": "unfinished"}


def remember(home: Home, **facts: str) -> None:
    """Write the marker in one move, so that it is never half there."""
    draft = home.marker.with_suffix(".new")
    draft.write_text(json.dumps(facts, indent=1), encoding="utf-8")
    draft.replace(home.marker)


# The torch build


def torch_choice(system: str, asked: str = "", before: str = "") -> str:
    """The build, "cpu" or "cuda": what COURSE_TORCH asks for, else what is there already, else what the machine has."""
    asked = asked.strip().lower()
    if asked not in ("", "cpu", "cuda"):
        meant = get_close_matches(asked, ["cpu", "cuda"], n=1)
        hint = f" (did you mean {meant[0]}?)" if meant else ""
        raise SetupError(f"COURSE_TORCH is {asked!r}{hint}: set it to cpu or cuda, or leave it unset.")
    if system == "Darwin":
        if asked == "cuda":
            raise SetupError("COURSE_TORCH=cuda cannot be met on macOS, which has no CUDA: leave it unset.")
        return "cpu"
    return asked or before or ("cuda" if nvidia_driver(system) else "cpu")


def nvidia_driver(system: str = platform.system()) -> bool:
    """True if an NVIDIA driver is installed. Looks for files only: this runs at each start."""
    if system == "Windows":
        return (Path(os.environ.get("SYSTEMROOT", r"C:\Windows")) / "System32" / "nvcuda.dll").exists()
    places = ("/proc/driver/nvidia/version", "/usr/lib/wsl/lib/libcuda.so.1")
    return system == "Linux" and any(Path(place).exists() for place in places)


def torch_sources(system: str, choice: str) -> list[tuple[str, list[str]]]:
    """Where to get torch, best first: a name to say, and pip's options.

    PyTorch's own index gives torch alone (`--no-deps`): the packages that torch needs come with all the others. Where
    the package index would do as well, it is asked briefly, with one retry; the CUDA build for Windows is nowhere else.
    """
    brief = ["--no-deps", "--timeout", "10", "--retries", "1", "--index-url"]
    plain: list[tuple[str, list[str]]] = [("from the package index", [])]
    if (system, choice) == ("Linux", "cpu"):
        return [("CPU build, from PyTorch's own index", [*brief, CPU_INDEX]), *plain]
    if (system, choice) == ("Windows", "cuda"):
        return [("CUDA build, from PyTorch's own index", ["--no-deps", "--index-url", CUDA_INDEX])]
    return plain


# Making it


def set_up(home: Home, purpose: str, choice: str, memory: dict[str, str]) -> None:
    """Make the environment or bring it up to date. Raises SetupError; what an error leaves behind is not trusted."""
    base = foundations(home, choice)
    ours = memory.get("made_by", "course" if not home.folder.exists() or memory else "you") == "course"
    current = memory.get("state") == "ready" and all(memory.get(name) == value for name, value in base.items())
    purpose = "test" if current and memory.get("purpose") == "test" else purpose
    marks = {**base, "purpose": purpose, "made_by": "course" if ours else "you"}
    try:
        check_disk(home.root, 0 if current else NEEDED_BYTES[choice])
        if ours and not (current and home.python.exists()):
            make_folder(home, marks)
        if not home.python.exists():
            raise SetupError(f"{home.folder} is there but holds no Python environment: move it away, {AGAIN}.")
        remember(home, **marks, state="unfinished")
        install(home, purpose, choice)
        remember(home, **marks, state="ready", key=fingerprint(home, choice))
    except OSError as problem:
        raise SetupError(f"Setting up in {home.folder} failed ({problem}): fix that, {AGAIN}.") from None


def make_folder(home: Home, marks: dict[str, str]) -> None:
    """An empty environment, in place of whatever an earlier set-up left. Raises SetupError without the venv module."""
    check_venv_module()
    print(f"Making the course's own Python environment in {home.folder}", flush=True)
    if home.folder.exists():
        shutil.rmtree(home.folder)
    home.folder.mkdir()
    remember(home, **marks, state="unfinished")
    base_python = getattr(sys, "_base_executable", "") or sys.executable
    made = subprocess.run([base_python, "-m", "venv", str(home.folder)], capture_output=True, text=True, check=False)
    if made.returncode:
        said = (made.stderr.strip() or made.stdout.strip()).splitlines()
        raise SetupError(f"`{base_python} -m venv` failed ({said[-1] if said else 'silently'}): {VENV_ADVICE}")


VENV_ADVICE = (
    "on Debian or Ubuntu run `sudo apt install python3-venv`; elsewhere install Python from python.org, "
    f"which has it; {AGAIN}."
)


def check_venv_module() -> None:
    """Raises SetupError where Python cannot make environments (Debian splits that off)."""
    absent = [name for name in ("venv", "ensurepip") if util.find_spec(name) is None]
    if absent:
        raise SetupError(f"This Python comes without its {' and '.join(absent)} module: {VENV_ADVICE}")


def check_disk(place: Path, needed: int) -> None:
    """Raises SetupError if fewer than `needed` bytes are free at `place`."""
    free = shutil.disk_usage(place).free
    if free < needed:
        raise SetupError(
            f"Setting up needs about {format_bytes(needed, 'GB', 0)} of disk and {place} has "
            f"{format_bytes(free, 'GB', 1)} free: make room there, or clone the course to another disk, {AGAIN}."
        )


def install(home: Home, purpose: str, choice: str) -> None:
    """Install torch, then the course with its extras at the locked versions, and check that torch loads."""
    pip = Pip(home.python, home.root, home.log)
    install_torch(home, pip, locked(home.root)["torch"], choice)
    editable = f".[{','.join(EXTRAS[purpose])}]"
    pip.install("the course and its packages", ["--constraint", "requirements.lock", "--editable", editable])
    check_torch_loads(home)


def install_torch(home: Home, pip: Pip, version: str, choice: str) -> None:
    """Install torch from the first source that has it. Raises SetupError if none does.

    It says how to do without a GPU where only PyTorch's own index has the CUDA build.
    """
    sources = torch_sources(home.system, choice)
    for number, (name, options) in enumerate(sources):
        last = number == len(sources) - 1
        if last and choice == "cpu" and home.system == "Linux":
            check_disk(home.root, NEEDED_BYTES["cuda"])  # the package index's Linux wheel is the CUDA build
        try:
            if pip.install(f"torch {version} ({name})", [*options, f"torch=={version}"], may_fail=not last):
                return
        except SetupError as problem:
            if CUDA_INDEX not in options:
                raise
            raise SetupError(f"{problem} Or set COURSE_TORCH=cpu, to go without a GPU.") from None


def check_torch_loads(home: Home) -> None:
    """Raises SetupError if the torch just installed cannot be imported."""
    loaded = subprocess.run(
        [str(home.python), "-c", "import torch; print(torch.__version__)"], capture_output=True, text=True, check=False
    )
    if loaded.returncode:
        said = loaded.stderr.strip().splitlines() or [f"exit code {loaded.returncode}"]
        advice = "install Microsoft's Visual C++ Redistributable" if home.system == "Windows" else "fix that"
        raise SetupError(f"torch is installed but does not load ({said[-1]}): {advice}, {AGAIN}.")
    print(f"Ready: torch {loaded.stdout.strip()}", flush=True)


# What is needed, and what is here


def locked(root: Path) -> dict[str, str]:
    """The version of each package that requirements.lock pins."""
    lines = (root / "requirements.lock").read_text(encoding="utf-8").splitlines()
    pins = (line.split("==") for line in lines if "==" in line and not line.startswith("#"))
    return {name.strip(): version.strip() for name, version in pins}


def requirements(root: Path, purpose: str) -> dict[str, str]:
    """The packages that a purpose needs, as pyproject.toml lists them: the name and its oldest version."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    listed = list(project["dependencies"])
    for extra in EXTRAS[purpose]:
        listed += project["optional-dependencies"][extra]
    return dict(item.split(">=") for item in listed)


def missing_packages(root: Path, purpose: str) -> list[str]:
    """Requirements ("torch>=2.11") of a purpose that the current interpreter does not meet."""
    absent = []
    for name, least in requirements(root, purpose).items():
        try:
            old = version_numbers(metadata.version(name)) < version_numbers(least)
        except metadata.PackageNotFoundError:
            old = True
        absent += [f"{name}>={least}"] if old else []
    return absent


def version_numbers(version: str) -> tuple[int, ...]:
    """ "2.13.0+cpu" as (2, 13, 0): numbers by which releases can be compared."""
    release = re.match(r"[0-9.]+", version)
    return tuple(int(part) for part in release[0].split(".") if part) if release else ()


def offer_here(home: Home, purpose: str) -> None:
    """Say that the set-up can be skipped, where the interpreter in use already has everything."""
    inside = Path(sys.prefix).resolve() == home.folder.resolve()
    if not inside and not missing_packages(home.root, purpose):
        print("The Python in use already has what this needs: add --here to use it and skip the set-up.", flush=True)
