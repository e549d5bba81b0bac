"""A fence for a notebook that is graded, where Linux allows no walls: Landlock, by which a program gives up files.

From then on this process, and all that it starts, can open nothing but what it is shown, can write below its home
alone, and, from Linux 6.12 on, signals only what it started. The network stays open. Landlock is there since Linux
5.13, if it was not left out; Docker allows it (moby/moby, pull request 43199). Numbers as in linux/landlock.h.
"""

import ctypes
import os
import struct
from collections.abc import Iterable
from pathlib import Path

from .walls import DEVICES, NO_NEW_PRIVILEGES, prctl

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
ASK_VERSION, BELOW_PATH = 1, 1
EXECUTE, WRITE_FILE, READ_FILE, READ_FOLDER = 1, 2, 4, 8
RIGHTS = {1: 13, 2: 14, 3: 15, 5: 16}
"""How many rights to files a version of Landlock knows, from which on."""

SIGNALS_SINCE, SCOPE_SIGNALS, NETWORK_SINCE = 6, 2, 4


def enclose(shown: Iterable[Path], home: Path) -> None:
    """Give up all files but those that are `shown`, to be read, and those below `home`.

    Raises OSError where there is no Landlock.
    """
    version = _call(CREATE_RULESET, None, 0, ASK_VERSION)
    every = (1 << max(count for since, count in RIGHTS.items() if since <= version)) - 1
    sizes = [every] + [0] * (version >= NETWORK_SINCE) + [SCOPE_SIGNALS] * (version >= SIGNALS_SINCE)
    rules = struct.pack(f"{len(sizes)}Q", *sizes)
    ruleset = _call(CREATE_RULESET, rules, len(rules), 0)
    for path in (Path("/proc"), *shown):
        _allow(ruleset, path, EXECUTE | READ_FILE | READ_FOLDER)
    for name in DEVICES:
        _allow(ruleset, Path("/dev") / name, READ_FILE | WRITE_FILE)
    _allow(ruleset, home, every)
    prctl(NO_NEW_PRIVILEGES, 1)
    _call(RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)


def _allow(ruleset: int, path: Path, rights: int) -> None:
    """Leave some rights to what is below a path; a path that is not there needs none."""
    if not path.exists():
        return
    place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    kept = rights if path.is_dir() else rights & (EXECUTE | READ_FILE | WRITE_FILE)
    _call(ADD_RULE, ruleset, BELOW_PATH, struct.pack("=Qi", kept, place), 0)
    os.close(place)


def _call(number: int, *arguments: bytes | int | None) -> int:
    found = ctypes.CDLL(None, use_errno=True).syscall(number, *arguments)
    if found < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"Landlock: {os.strerror(error)}")
    return found
