"""A fence: this process, and all that it starts, open only the files that it names (Linux).

Landlock in the kernel makes it, without root, and nothing takes it down again. From Linux 6.12 on, signals
stay inside as well. The network stays open. Code can still ask whether a file exists, and change the
permissions and times of the user's files. Standard library only.
"""

import ctypes
import os
import signal
import struct
import sys
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

# From linux/landlock.h and linux/prctl.h
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
ASK_VERSION, BELOW_PATH = 1, 1
EXECUTE, WRITE_FILE, READ_FILE, READ_FOLDER = 1, 2, 4, 8
READ = EXECUTE | READ_FILE | READ_FOLDER
OF_FILES = EXECUTE | WRITE_FILE | READ_FILE
IOCTL = 1 << 15
RIGHTS = {1: 13, 2: 14, 3: 15, 5: 16}  # number of rights to files, from each version on
SCOPES_SINCE, NETWORK_SINCE = 6, 4
SIGNALS_AND_SOCKETS = 3
NO_NEW_PRIVILEGES = 38
SIGNAL_WHEN_PARENT_ENDS = 1

DEVICES = ("null", "zero", "full", "random", "urandom")

_entered: list[bool] = []


def version() -> int:
    """The version of this kernel's Landlock; 0 where there is none."""
    if sys.platform != "linux":
        return 0
    try:
        return _call("syscall", CREATE_RULESET, None, 0, ASK_VERSION)
    except OSError:
        return 0


def enter(readable: Iterable[Path] | None, writable: Iterable[Path], hidden: Collection[Path] = ()) -> None:
    """Put up the fence: only what is `readable`, and not `hidden` in it, can be read from here on.

    With None, all can be read. Files can be changed and made below `writable` alone. It holds for this thread
    and those that it starts: enter before there are others. Raises OSError where there is no Landlock.
    """
    known = version()
    count = max((rights for since, rights in RIGHTS.items() if since <= known), default=0)
    rights = (1 << count) - 1
    if readable is None:
        rights &= ~(READ | IOCTL)
    members = [rights]  # of struct landlock_ruleset_attr, which has grown
    if known >= NETWORK_SINCE:
        members.append(0)
    if known >= SCOPES_SINCE:
        members.append(SIGNALS_AND_SOCKETS)
    attributes = struct.pack(f"{len(members)}Q", *members)
    rules = _call("syscall", CREATE_RULESET, attributes, len(attributes), 0)
    for folder in readable or ():
        for path, shown in _shown(folder, hidden):
            _allow(rules, path, shown)
    for name in DEVICES:
        _allow(rules, Path("/dev", name), rights & (READ_FILE | WRITE_FILE))
    for folder in writable:
        _allow(rules, folder, rights)
    _call("prctl", NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    _call("syscall", RESTRICT_SELF, rules, 0)
    os.close(rules)
    _entered.append(True)


def is_up() -> bool:
    """True once this process has entered the fence."""
    return bool(_entered)


def end_with_parent() -> None:
    """Let Linux end this process when the thread that started it ends, in whatever way."""
    _call("prctl", SIGNAL_WHEN_PARENT_ENDS, signal.SIGKILL, 0, 0, 0)


def _shown(path: Path, hidden: Collection[Path]) -> Iterator[tuple[Path, int]]:
    """A path with its rights. Landlock takes nothing back: around what is hidden, each neighbor is shown."""
    if path in hidden:
        return
    if not any(one.is_relative_to(path) for one in hidden):
        yield path, READ
        return
    yield path, READ_FOLDER
    for entry in path.iterdir():
        if not entry.is_symlink():
            yield from _shown(entry, hidden)


def _allow(rules: int, path: Path, rights: int) -> None:
    if path.exists():
        opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
        kept = rights if path.is_dir() else rights & OF_FILES
        _call("syscall", ADD_RULE, rules, BELOW_PATH, struct.pack("=Qi", kept, opened), 0)
        os.close(opened)


def _call(name: str, *arguments: int | bytes | None) -> int:
    """Call a function of the C library. Raises OSError."""
    words = [ctypes.c_long(one) if isinstance(one, int) else one for one in arguments]
    result = getattr(ctypes.CDLL(None, use_errno=True), name)(*words)
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result
