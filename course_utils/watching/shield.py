"""Running somebody's script as a bystander: nothing of theirs is written or deleted, no process, no network.

What Python writes goes to a temporary folder, from where it is read again. An audit hook stops what gets
around it in Python. Libraries in C get around both: `apart` has a fence for them.
"""

import builtins
import io
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from ..measuring.call_site import calling_place, described

WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
READING = ("stat", "lstat", "listdir", "scandir", "access", "readlink")
CHANGING = ("mkdir", "chmod", "chown", "utime", "truncate", "mkfifo")
DELETING = ("remove", "unlink", "rmdir")
RENAMING = ("rename", "replace")
PROCESSES = (
    "os.fork",
    "os.forkpty",
    "os.posix_spawn",
    "os.system",
    "os.exec",
    "os.spawn",
    "subprocess.Popen",
)
NETWORK = ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto")
AUDITED = {
    "os.remove",
    "os.rename",
    "os.rmdir",
    "os.mkdir",
    "os.truncate",
    "os.chmod",
    "os.link",
    "os.symlink",
}
DEVICES = ("/dev/", "/proc/self/")
NOT_DEVICES = "/dev/shm"  # Memory that processes share, with files of others
SAFETENSORS = ("save_file", "serialize_file")

AVAILABLE = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup/memory.max")
# Part of the host's free memory that a script may not take, or the machine would begin to swap
KEPT_FREE = 0.1


class NotAllowed(PermissionError):
    """A script did what is not done while it is watched. An OSError, so that libraries can do without."""


class Elsewhere:
    """A temporary folder that a script's files go to, each under its own path, and what was done to them."""

    def __init__(self, folder: str) -> None:
        self.folder = os.path.realpath(folder)
        self.written: dict[str, None] = {}
        self.kept: dict[str, None] = {}
        self.stat = os.stat  # the genuine one: the name is replaced while a script is watched
        self.mkdir = os.makedirs
        self.chdir = os.chdir
        self.getcwd = os.getcwd

    def exists(self, path: str) -> bool:
        with suppress(OSError):
            return bool(self.stat(path))
        return False

    def is_own(self, path: Any) -> bool:
        """True for what is left alone: open files, devices, and what lies in this folder."""
        if isinstance(path, int):
            return True
        whole = os.path.abspath(os.fsdecode(path))
        return whole.startswith((self.folder, *DEVICES)) and not whole.startswith(NOT_DEVICES)

    def shadow(self, path: Any) -> str:
        return self.folder + os.path.abspath(os.fsdecode(path))

    def reading(self, path: Any = ".") -> Any:
        """The path to read from: the file that the script wrote, if it did."""
        if self.is_own(path):
            return path
        if self.getcwd().startswith(self.folder):  # where a relative path would be found in this folder alone
            path = os.path.abspath(path)
        if not self.exists(self.shadow(path)):
            return path
        both_folders = os.path.isdir(self.shadow(path)) and self.exists(os.fspath(path))
        return path if both_folders else self.shadow(path)

    def writing(self, path: Any, whole: bool = True) -> Any:
        """The path to write to; with not `whole`, what is there already is copied first."""
        if self.is_own(path):
            return path
        shadow = self.shadow(path)
        there = self.exists(path)
        if self.exists(os.path.dirname(os.path.abspath(os.fsdecode(path)))):
            self.mkdir(os.path.dirname(shadow), exist_ok=True)
        if there and not self.exists(shadow) and not whole:
            shutil.copyfile(path, shadow)
        self.written.setdefault(os.fsdecode(path))
        return shadow

    def enter(self, path: Any) -> None:
        """`os.chdir`, also into a folder that the script has made."""
        self.chdir(self.reading(path))

    def current(self) -> str:
        """`os.getcwd`: a folder that the script has made has the path that it was made with."""
        here = self.getcwd()
        return here.removeprefix(self.folder) or "/" if here.startswith(self.folder) else here

    def read(self, original: Callable[..., Any], path: Any = ".", *args: Any, **kwargs: Any) -> Any:
        in_open_folder = kwargs.get("dir_fd") is not None
        return original(path if in_open_folder else self.reading(path), *args, **kwargs)

    def open(self, original: Callable[..., Any], path: Any, how: Any = "r", *args: Any, **kwargs: Any) -> Any:
        mode = kwargs.pop("flags" if original is ORIGINAL_OS_OPEN else "mode", how)
        if isinstance(mode, int):
            writes = bool(mode & WRITES)
            whole = bool(mode & os.O_TRUNC)
        else:
            writes = bool(set(mode) & set("wxa+"))
            whole = bool(set(mode) & set("wx"))
        if kwargs.get("dir_fd") is not None:
            return original(path, mode, *args, **kwargs)
        if not writes:
            return original(self.reading(path), mode, *args, **kwargs)
        if not isinstance(path, int) and self.exists(path) and "x" in str(mode):
            raise FileExistsError(f"{path} already exists")
        return original(self.writing(path, whole), mode, *args, **kwargs)

    def change(self, original: Callable[..., Any], path: Any, *args: Any, **kwargs: Any) -> Any:
        outside = kwargs.get("dir_fd") is not None or (original.__name__ == "mkdir" and self.exists(path))
        return original(path if outside else self.writing(path, whole=False), *args, **kwargs)

    def delete(self, original: Callable[..., Any], path: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("dir_fd") is not None or self.is_own(path):
            return original(path, *args, **kwargs)
        if self._keep(path):
            return None
        self.written.pop(os.fsdecode(path), None)
        return original(self.shadow(path), *args, **kwargs)

    def rename(self, original: Callable[..., Any], source: Any, target: Any, **kwargs: Any) -> None:
        self._keep(source)
        return original(self.writing(source, whole=False), self.writing(target), **kwargs)

    def connect(self, original: Callable[..., Any], database: Any, *args: Any, **kwargs: Any) -> Any:
        """A connection to the copy of a database; one in memory, or at an address, is left alone."""
        in_a_file = database not in (":memory:", "") and not kwargs.get("uri")
        return original(self.writing(database, whole=False) if in_a_file else database, *args, **kwargs)

    def _keep(self, path: Any) -> bool:
        """True for a file of the user's, that is there and that the script has not written: noted as kept."""
        users = not self.is_own(path) and not self.exists(self.shadow(path)) and self.exists(path)
        if users:
            self.kept.setdefault(os.fsdecode(path))
        return users

    def replacements(self) -> Iterator[tuple[Any, str, Any]]:
        """Python's functions that read, write or delete by a path: owner, name and replacement of each."""
        for owner, original in ((builtins, builtins.open), (io, builtins.open), (os, os.open)):
            yield owner, "open", partial(self.open, original)
        ways = {self.read: READING, self.change: CHANGING, self.delete: DELETING, self.rename: RENAMING}
        for way, names in ways.items():
            for name in names:
                yield os, name, partial(way, getattr(os, name))
        yield os, "chdir", self.enter
        yield os, "getcwd", self.current
        yield shutil, "rmtree", partial(self.delete, shutil.rmtree)
        if find_spec("_sqlite3"):  # Python may be built without it
            for name in ("sqlite3", "sqlite3.dbapi2"):
                module = import_module(name)
                yield module, "connect", partial(self.connect, module.connect)
        for owner in (torch.jit, torch.jit.RecursiveScriptModule, torch.export):
            yield owner, "save", _left_empty
        yield torch.autograd.profiler.profile, "export_chrome_trace", _left_empty
        if find_spec("safetensors"):
            for name in SAFETENSORS:
                yield import_module("safetensors.torch"), name, _left_empty
        yield BaseProcess, "start", lambda *_: _refuse("starts a process, but only one can be watched")

    def audit(self, event: str, args: tuple[Any, ...]) -> None:
        """Raise NotAllowed for what is not done while a script is watched."""
        if event in PROCESSES:
            _refuse(f"starts a process ({event}), but only one can be watched")
        within_the_machine = event == "socket.connect" and isinstance(args[1], (str, bytes))
        if event in NETWORK and not within_the_machine:
            where = args[1][0] if event == "socket.connect" else args[0]
            _refuse(
                f"asks the network for {where!s:.80}, closed while a script is watched: download it before"
            )
        writes = event == "open" and isinstance(args[2], int) and args[2] & WRITES
        changes = writes or event in AUDITED
        # by an open folder's number: of rmtree, which was let in
        in_folder = event in ("os.remove", "os.rmdir", "os.mkdir") and args[-1] >= 0
        named = bool(args) and isinstance(args[0], (str, bytes, os.PathLike))
        if changes and named and not in_folder and not self.is_own(args[0]):
            _refuse(f"would change {os.fsdecode(args[0])!r}, but a watched script must not change your files")

    def notes(self) -> Iterator[str]:
        """Sentences about files that were written or deleted elsewhere."""
        if self.written:
            yield f"written to a temporary folder, now deleted: {_first_three(self.written)}"
        if self.kept:
            yield f"not deleted: {_first_three(self.kept)}"


def _first_three(paths: dict[str, None]) -> str:
    more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
    return f"{', '.join(list(paths)[:3])}{more}"


ORIGINAL_OS_OPEN = os.open
_watching: list[Elsewhere] = []


def _left_empty(_: Any, file: Any, *__: Any, **___: Any) -> None:
    """Write an empty file in place of one that a library would write around Python's `open`."""
    if isinstance(file, (str, os.PathLike)):
        builtins.open(file, "wb").close()


def _refuse(what: str) -> None:
    raise NotAllowed(f"{described(calling_place()[0])}: {what}")


def _hook(event: str, args: tuple[Any, ...]) -> None:
    if _watching:
        _watching[-1].audit(event, args)


@cache
def _add_hook() -> None:
    """Once per process: an audit hook stays to its end."""
    sys.addaudithook(_hook)


@contextmanager
def nothing_changed(folder: str | None = None) -> Iterator[Elsewhere]:
    """Inside, files are written elsewhere; processes and the network raise NotAllowed.

    Elsewhere is this folder, or else one that is deleted afterwards. Within another block it is that block's.
    """
    if _watching:
        yield _watching[-1]
        return
    _add_hook()
    with ExitStack() as stack:
        if folder is None:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="watched-"))
        elsewhere = Elsewhere(folder)
        stack.callback(os.chdir, os.getcwd())
        for owner, name, replacement in list(elsewhere.replacements()):
            stack.enter_context(mock.patch.object(owner, name, replacement))
        stack.enter_context(mock.patch.object(sys, "dont_write_bytecode", True))
        stack.enter_context(mock.patch.object(tempfile, "tempdir", elsewhere.folder))
        _watching.append(elsewhere)
        stack.callback(_watching.pop)
        yield elsewhere


def free_bytes() -> int | None:
    """Bytes of host memory that can be taken before the machine swaps; None where the system does not say."""
    if not AVAILABLE.exists():
        return None
    lines = AVAILABLE.read_text().splitlines()
    free = next(int(line.split()[1]) * 1024 for line in lines if "MemAvailable" in line)
    limit = CGROUP.read_text().strip() if CGROUP.exists() else "max"
    return free if limit == "max" else min(free, int(limit))


@contextmanager
def memory_limited() -> Iterator[None]:
    """Inside, this process may take nine tenths of the memory that is free; then allocating fails."""
    free = free_bytes()
    if free is None:
        yield
        return
    import resource  # Unix alone has it

    before = resource.getrlimit(resource.RLIMIT_DATA)
    data_pages = int(Path("/proc/self/statm").read_text().split()[5])
    used = data_pages * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_DATA, (used + int(free * (1 - KEPT_FREE)), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)
