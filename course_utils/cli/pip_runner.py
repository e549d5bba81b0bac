"""Running pip quietly: one line of progress, everything in a log, and failures in one sentence."""

import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

OFFLINE = (
    "NewConnectionError",
    "NameResolutionError",
    "Name or service not known",
    "Temporary failure in name resolution",
    "getaddrinfo failed",
    "Network is unreachable",
    "ConnectTimeoutError",
    "ReadTimeoutError",
    "ConnectionResetError",
    "ProxyError",
    "Could not fetch URL",
)
"""Words in pip's output when it could not reach an index."""


AGAIN = "then run the same command"


class SetupError(Exception):
    """An obstacle to starting the course; the message is one sentence that says what to do about it."""


@dataclass(frozen=True)
class Pip:
    """The pip of one environment, run in `root`, with all that it says kept in `log`."""

    python: Path
    root: Path
    log: Path

    def install(self, what: str, arguments: Sequence[str], may_fail: bool = False) -> bool:
        """Install, and say so in one line. Return True if it worked; raise SetupError if not, unless it `may_fail`."""
        command = [str(self.python), "-m", "pip", "install", "--no-input", "--disable-pip-version-check", *arguments]
        started = time.monotonic()
        print(f"Installing {what} …", flush=True)
        failed, said = self._run(command)
        seconds = time.monotonic() - started
        if not failed:
            print(f"  done in {seconds:.0f} s", flush=True)
            return True
        if may_fail and not out_of_disk(said):
            print(f"  not available there ({seconds:.0f} s): trying another way", flush=True)
            return False
        raise SetupError(explain_failure(said, what, self.log))

    def _run(self, command: Sequence[str]) -> tuple[int, str]:
        """Exit code and output. On a terminal, the latest thing that pip does is shown in one line."""
        visible, lines = sys.stdout.isatty(), list[str]()
        with self.log.open("a", encoding="utf-8") as log:
            log.write(f"\n$ {' '.join(command)}\n")
            pip = subprocess.Popen(
                command, cwd=self.root, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                encoding="utf-8", errors="replace",
            )  # fmt: skip
            with pip:
                for line in pip.stdout or ():
                    lines.append(line)
                    log.write(line)
                    if visible and line.lstrip().startswith(("Collecting", "Downloading", "Installing", "Building")):
                        print(f"\r\033[K  {line.strip()[:100]}", end="", flush=True)
        if visible:
            print("\r\033[K", end="", flush=True)
        return pip.returncode, "".join(lines)


def out_of_disk(said: str) -> bool:
    """True if pip's output reports a full disk."""
    return "No space left on device" in said or "not enough space on the disk" in said


def explain_failure(said: str, what: str, log: Path) -> str:
    """One sentence that says why pip failed and what to do."""
    if out_of_disk(said):
        return f"The disk is full, so {what} could not be installed: make room, {AGAIN}."
    if any(sign in said for sign in OFFLINE):
        return (
            f"No network: the package index did not answer, so {what} could not be installed; "
            f"connect (or set HTTPS_PROXY if you are behind a proxy), {AGAIN}."
        )
    if "No matching distribution found" in said:
        machine = f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"
        return f"There is no build of {what} for {machine}: use Python 3.11 to 3.14 on a 64-bit system, {AGAIN}."
    if "No module named pip" in said:
        return f"The environment in {log.parent} has no pip: delete that folder, {AGAIN}."
    errors = [line.strip() for line in said.splitlines() if line.startswith("ERROR:")]
    return f"pip could not install {what}: {errors[-1] if errors else 'see'} (all of it is in {log})."
