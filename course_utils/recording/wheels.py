"""The wheels that executing lessons needs next to torch and matplotlib, fetched for a GPU machine without a network."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..interactive.course_files import ROOT
from ..units import format_bytes

PACKAGES = ("nbclient", "ipykernel", "ipywidgets", "jupytext", "nbformat")
"""pip adds what they need in turn. None of them needs torch, numpy or matplotlib, which the machine has."""

PYTHON = "3.12"
PLATFORMS = tuple(f"manylinux{tag}_x86_64" for tag in ("_2_28", "_2_27", "_2_17", "2014", "_2_12", "2010", "_2_5", "1"))
"""pip takes each name literally: a wheel for an older system has to be asked for by the name of that system."""

LOCK = ROOT / "requirements.lock"


def fetch(folder: Path, ask: Callable[..., Any] = subprocess.run) -> str:
    """Download the wheels for Python 3.12 on Linux (x86-64) into `folder`; returns their names, sizes and what to do.

    Raises RuntimeError with pip's own words if it cannot have them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    done = ask(pip_command(folder), capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
        raise RuntimeError(f"pip could not fetch the wheels: {' '.join(lines[-1:]) or f'exit code {done.returncode}'}")
    wheels = sorted(folder.glob("*.whl"), key=lambda wheel: wheel.name.lower())
    sizes = [wheel.stat().st_size for wheel in wheels]
    rows = [f"{format_bytes(size, 'MB', 2):>9}  {wheel.name}" for wheel, size in zip(wheels, sizes, strict=True)]
    total = f"{len(wheels)} wheels, {format_bytes(sum(sizes), 'MB', 1)} in {folder}. On the GPU machine, in the clone:"
    return "\n".join([*rows, total, f"python3 -m pip install --no-index --find-links {folder} {' '.join(PACKAGES)}"])


def pip_command(folder: Path) -> list[str]:
    """The command line that downloads them, in the locked versions where the course's lock is there."""
    platforms = [word for name in PLATFORMS for word in ("--platform", name)]
    locked = ["-c", str(LOCK)] if LOCK.exists() else []
    return [
        sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--only-binary=:all:",
        "--implementation", "cp", "--python-version", PYTHON, *platforms, "--dest", str(folder), *locked, *PACKAGES,
    ]  # fmt: skip
