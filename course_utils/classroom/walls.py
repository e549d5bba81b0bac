"""Walls around a notebook that is graded: Linux namespaces of its own, which need no root.

A process behind the walls sees a file system made for it, in memory and of limited size: the system's programs, this
Python and the learners' copy of the course, all read-only, and a home. Nothing else of the machine's files is there. It
has no network but its own loopback, and sees and signals only the processes that it started. They end with it: the
kernel ends a PID namespace when its first process ends.

Not every Linux allows this: Ubuntu since 23.10 denies it to programs without an AppArmor profile, Docker denies it by
default. Then `enter` raises OSError.
"""

import ctypes
import fcntl
import os
import platform
import signal
import socket
import struct
from collections.abc import Sequence
from pathlib import Path

NEW_MOUNTS, NEW_IPC, NEW_USER, NEW_PIDS, NEW_NETWORK = 0x20000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
READ_ONLY, NO_SET_ID, NO_DEVICES, REMOUNT, BIND, AND_BELOW, PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
DETACH = 2
KEPT_FLAGS = {2: 2, 4: 4, 8: 8, 1024: 1024, 2048: 2048, 4096: 1 << 21}
"""What statvfs calls a mount's flags, and what mount calls them: a read-only view has to keep those of its source."""

END_WITH_PARENT, SET_DUMPABLE, SET_CHILD_SUBREAPER, NO_NEW_PRIVILEGES, DROP_FROM_BOUNDS = 1, 4, 36, 38, 24
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41, "riscv64": 41}
LOOPBACK_UP = struct.pack("16sH14s", b"lo", 0x41, b"")  # IFF_UP and IFF_RUNNING
SET_INTERFACE_FLAGS = 0x8914

DEVICES = ("null", "zero", "full", "random", "urandom")
MOST_FILES = 50_000
ANY_CAPABILITY = range(64)


def enter(shown: Sequence[Path], hidden: Path, home: Path, size: int) -> None:
    """Go on behind walls, in a child of this process. The process itself waits for it and ends with its exit code.

    Below the new root is what is `shown`, but of what lies within `hidden` only what is `shown` by name. `home`, an
    empty folder, is the one place for files, of `size` bytes with everything else that is written.
    Raises OSError where the system does not allow it.
    """
    user, group, parent = os.getuid(), os.getgid(), os.getppid()
    _call("unshare", NEW_USER | NEW_MOUNTS | NEW_PIDS | NEW_IPC | NEW_NETWORK)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    child = os.fork()
    if child:
        prctl(SET_DUMPABLE, 0)
        prctl(END_WITH_PARENT, signal.SIGKILL)  # again: who gets new privileges has forgotten it
        if os.getppid() != parent:
            os.kill(child, signal.SIGKILL)
        os._exit(max(0, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])))
    prctl(END_WITH_PARENT, signal.SIGKILL)
    _raise_loopback()
    _furnish(shown, hidden, home, size)
    _give_up_privileges()


def prctl(option: int, value: int) -> None:
    """Set one of this process's properties, with the numbers of linux/prctl.h. Raises OSError."""
    _call("prctl", option, ctypes.c_ulong(value), *[ctypes.c_ulong(0)] * 3)


def _call(name: str, *arguments: object) -> None:
    """A function of the C library. Raises OSError where it fails."""
    library = ctypes.CDLL(None, use_errno=True)
    if getattr(library, name)(*arguments):
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}")


def _mount(source: Path | str, target: Path, kind: str | None, flags: int, options: str = "") -> None:
    _call(
        "mount", os.fsencode(source), os.fsencode(target), kind and kind.encode(), ctypes.c_ulong(flags),
        options.encode(),
    )  # fmt: skip


def _raise_loopback() -> None:
    """Ranks of one machine find each other at 127.0.0.1."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        fcntl.ioctl(asked, SET_INTERFACE_FLAGS, LOOPBACK_UP)


def _furnish(shown: Sequence[Path], hidden: Path, home: Path, size: int) -> None:
    """Make a new root on top of `home`, go there, and leave the old one behind."""
    _mount("none", Path("/"), None, AND_BELOW | PRIVATE)
    _mount("tmpfs", home, "tmpfs", NO_SET_ID | NO_DEVICES, f"size={size},nr_inodes={MOST_FILES},mode=755")
    root = home
    for path in shown:
        if not path.is_relative_to(hidden):
            _show(path, root)
    covered = _within(root, hidden)
    if covered.exists():  # the course lies in one of the folders that are shown
        _mount("tmpfs", covered, "tmpfs", NO_SET_ID | NO_DEVICES, "size=1m,mode=755")
    for path in shown:
        if path.is_relative_to(hidden):
            _show(path, root)
    (root / "proc").mkdir()
    _mount("proc", root / "proc", "proc", NO_SET_ID | NO_DEVICES)
    (root / "proc" / "sys" / "user" / "max_user_namespaces").write_text("0")  # in one more, it had every privilege
    (root / "dev").mkdir()
    for name in DEVICES:
        (root / "dev" / name).touch()
        _mount(Path("/dev") / name, root / "dev" / name, None, BIND)
    for folder in (root / "dev" / "shm", root / "tmp", _within(root, home)):
        folder.mkdir(parents=True, exist_ok=True)
    os.chdir(root)
    if ctypes.CDLL(None, use_errno=True).syscall(PIVOT_ROOT.get(platform.machine(), -1), b".", b"."):
        raise OSError(ctypes.get_errno(), f"pivot_root: {os.strerror(ctypes.get_errno())}")
    _call("umount2", b".", DETACH)
    os.chdir(home)


def _show(path: Path, root: Path) -> None:
    """Make `path` visible below `root`, read-only; a link as a link, and nothing that is there already, or nowhere."""
    target = _within(root, path)
    if target.exists() or not path.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    if path.is_symlink() and _within(root, path.resolve()).exists():  # /bin is a part of /usr by now
        target.symlink_to(path.resolve())
        return
    if path.is_dir():
        target.mkdir()
    else:
        target.touch()
    _mount(path, target, None, BIND | AND_BELOW)
    has = os.statvfs(target).f_flag
    kept = sum(flag for known, flag in KEPT_FLAGS.items() if has & known)
    _mount("none", target, None, REMOUNT | BIND | READ_ONLY | kept)


def _within(root: Path, path: Path) -> Path:
    return root / path.relative_to("/")


def _give_up_privileges() -> None:
    """What is started from here on has no power over the walls, not even where the grader is root."""
    for capability in ANY_CAPABILITY:
        try:
            prctl(DROP_FROM_BOUNDS, capability)
        except OSError:  # this kernel has no more of them
            break
    prctl(NO_NEW_PRIVILEGES, 1)
