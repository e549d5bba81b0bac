"""Walls or a fence around a notebook that is graded, on Linux, without root.

Walls are namespaces. A process behind them has a file system in memory, of limited size: the system's
programs, this Python and the learners' copy of the course, all read-only, and a home. It has no network but
its own loopback. It sees and signals only the processes that it started, and they end with it: the kernel
ends a PID namespace with its first process.

A fence is Landlock (Linux 5.13): the process, and all that it starts, can open only what it is shown, write
only below its home, and, from Linux 6.12 on, signal only what it started. The network stays open.

Numbers are those of linux/sched.h, mount.h, prctl.h and landlock.h.
"""

import ctypes
import fcntl
import os
import platform
import signal
import socket
import struct
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from ..ranks.guard import SET_PARENT_DEATH_SIGNAL, prctl

NEW_MOUNTS, NEW_IPC, NEW_USER, NEW_PIDS, NEW_NETWORK = 0x20000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
READ_ONLY = 1
NO_SET_ID = 2
NO_DEVICES = 4
REMOUNT = 32
BIND = 4096
AND_BELOW = 16384
PRIVATE = 1 << 18
DETACH = 2
KEPT_FLAGS = {2: 2, 4: 4, 8: 8, 1024: 1024, 2048: 2048, 4096: 1 << 21}
"""Flags of a mount for statvfs, and for mount: a read-only view has to keep those of its source."""

SET_DUMPABLE, NO_NEW_PRIVILEGES, DROP_FROM_BOUNDS = 4, 38, 24
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41, "riscv64": 41}
LOOPBACK_UP = struct.pack("16sH14s", b"lo", 0x41, b"")  # IFF_UP and IFF_RUNNING
SET_INTERFACE_FLAGS = 0x8914

DEVICES = ("null", "zero", "full", "random", "urandom")
MOST_FILES = 50_000

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
ASK_VERSION, BELOW_PATH = 1, 1
EXECUTE, WRITE_FILE, READ_FILE, READ_FOLDER = 1, 2, 4, 8
RIGHTS = {1: 13, 2: 14, 3: 15, 5: 16}
"""Number of rights to files in Landlock from each version on."""

SIGNALS_SINCE, SCOPE_SIGNALS, NETWORK_SINCE = 6, 2, 4


def enter(shown: Sequence[Path], hidden: Sequence[Path], home: Path, size: int) -> None:
    """Go on behind walls, in a child of this process, which waits for it and ends with its exit code.

    Below the new root is what is `shown`, but of what lies within a `hidden` folder only what is `shown` by
    name. `home`, an empty folder, is the one place for files, of `size` bytes with everything else that is
    written. Raises OSError where the system does not allow it.
    """
    user = os.getuid()
    group = os.getgid()
    parent = os.getppid()
    _call("unshare", NEW_USER | NEW_MOUNTS | NEW_PIDS | NEW_IPC | NEW_NETWORK)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    child = os.fork()
    if child:
        prctl(SET_DUMPABLE, 0)
        prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)  # again: who gets new privileges has forgotten it
        if os.getppid() != parent:
            os.kill(child, signal.SIGKILL)
        os._exit(max(0, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])))
    prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:  # ranks of one machine meet at 127.0.0.1
        fcntl.ioctl(asked, SET_INTERFACE_FLAGS, LOOPBACK_UP)
    _furnish(shown, hidden, home, size)
    _give_up_privileges()


def _call(name: str, *arguments: object) -> int:
    found = getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments)
    if found < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}")
    return found


def _mount(source: Path | str, target: Path, kind: str | None, flags: int, options: str = "") -> None:
    file_system = kind.encode() if kind else None
    where = (os.fsencode(source), os.fsencode(target))
    _call("mount", *where, file_system, ctypes.c_ulong(flags), options.encode())


def _furnish(shown: Sequence[Path], hidden: Sequence[Path], home: Path, size: int) -> None:
    """Make a new root on top of `home`, go there, and leave the old one behind."""
    _mount("none", Path("/"), None, AND_BELOW | PRIVATE)
    _mount("tmpfs", home, "tmpfs", NO_SET_ID | NO_DEVICES, f"size={size},nr_inodes={MOST_FILES},mode=755")
    root = home
    for path in shown:
        if not any(path.is_relative_to(folder) for folder in hidden):
            _show(path, root)
    for folder in hidden:
        covered = root / folder.relative_to("/")
        if covered.exists():  # the course lies in one of the folders that are shown
            _mount("tmpfs", covered, "tmpfs", NO_SET_ID | NO_DEVICES, "size=1m,mode=755")
        for path in shown:
            if path.is_relative_to(folder):
                _show(path, root)
    (root / "proc").mkdir()
    _mount("proc", root / "proc", "proc", NO_SET_ID | NO_DEVICES)
    # in one more, it had every privilege
    (root / "proc" / "sys" / "user" / "max_user_namespaces").write_text("0")
    (root / "dev").mkdir()
    for name in DEVICES:
        (root / "dev" / name).touch()
        _mount(Path("/dev") / name, root / "dev" / name, None, BIND)
    for folder in (root / "dev" / "shm", root / "tmp", root / home.relative_to("/")):
        folder.mkdir(parents=True, exist_ok=True)
    os.chdir(root)
    _call("syscall", PIVOT_ROOT.get(platform.machine(), -1), b".", b".")
    _call("umount2", b".", DETACH)
    os.chdir(home)


def _show(path: Path, root: Path) -> None:
    """Make `path` visible below `root`, read-only; a link as a link; nothing that is there, or nowhere."""
    target = root / path.relative_to("/")
    if target.exists() or not path.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    leads_to = path.resolve()
    # /bin is a part of /usr by now
    if path.is_symlink() and (root / leads_to.relative_to("/")).exists():
        target.symlink_to(leads_to)
        return
    if path.is_dir():
        target.mkdir()
    else:
        target.touch()
    _mount(path, target, None, BIND | AND_BELOW)
    has = os.statvfs(target).f_flag
    kept = sum(flag for known, flag in KEPT_FLAGS.items() if has & known)
    _mount("none", target, None, REMOUNT | BIND | READ_ONLY | kept)


def _give_up_privileges() -> None:
    """Leave whatever starts from here on no power over the walls, not even where the grader is root."""
    with suppress(OSError):  # this kernel has fewer of them
        for capability in range(64):
            prctl(DROP_FROM_BOUNDS, capability)
    prctl(NO_NEW_PRIVILEGES, 1)


def enclose(shown: Iterable[Path], home: Path) -> None:
    """Put up a fence: `shown` can be read, files below `home` used, no others. OSError without Landlock."""
    version = _call("syscall", CREATE_RULESET, None, 0, ASK_VERSION)
    count = max(count for since, count in RIGHTS.items() if since <= version)
    every = (1 << count) - 1
    # struct landlock_ruleset_attr has grown: its members for files, the network (all allowed) and scopes
    members = [every]
    if version >= NETWORK_SINCE:
        members.append(0)
    if version >= SIGNALS_SINCE:
        members.append(SCOPE_SIGNALS)
    rules = struct.pack(f"{len(members)}Q", *members)
    ruleset = _call("syscall", CREATE_RULESET, rules, len(rules), 0)
    for path in (Path("/proc"), *shown):
        _allow(ruleset, path, EXECUTE | READ_FILE | READ_FOLDER)
    for name in DEVICES:
        _allow(ruleset, Path("/dev") / name, READ_FILE | WRITE_FILE)
    _allow(ruleset, home, every)
    prctl(NO_NEW_PRIVILEGES, 1)
    _call("syscall", RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)


def _allow(ruleset: int, path: Path, rights: int) -> None:
    if path.exists():
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        kept = rights if path.is_dir() else rights & (EXECUTE | READ_FILE | WRITE_FILE)
        _call("syscall", ADD_RULE, ruleset, BELOW_PATH, struct.pack("=Qi", kept, place), 0)
        os.close(place)
