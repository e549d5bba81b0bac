"""The folder of a learner's guesses and progress, which never leave this machine, and safe ways to write there."""

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def course_home() -> Path:
    """The folder on this machine where a learner's guesses and progress are kept; `COURSE_HOME` names another."""
    if os.environ.get("COURSE_HOME"):
        return Path(os.environ["COURSE_HOME"])
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData/Local")
    elif sys.platform == "darwin":
        base = Path.home() / "Library/Application Support"
    else:
        base = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state")
    return base / "where-did-the-memory-go"


@contextmanager
def problems_in_words(what: str, folder: Path) -> Iterator[None]:
    """Turn an OSError into a ValueError that a learner can act on: `what` ("Guesses") cannot be kept in `folder`."""
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"{what} cannot be kept in {folder} ({error.strerror or error}): "
            "set the environment variable COURSE_HOME to a folder that you may write to."
        ) from error


def write_whole(file: Path, text: str, newline: str = "\n") -> None:
    """Write a file in which a reader finds what was there before, or this: never half, and no less on a full disk."""
    scratch = file.with_name(f"{file.name}.{os.getpid()}.part")
    try:
        with scratch.open("w", encoding="utf-8", newline=newline) as written:
            written.write(text)
            written.flush()
            os.fsync(written.fileno())  # or a machine that stops may have the new name, and nothing below it
        scratch.replace(file)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise


NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)
"""Errors by which a folder on some servers says that nothing in it can be locked."""


@contextmanager
def one_at_a_time(file: Path) -> Iterator[None]:
    """Let no other kernel in here for the same `file`: it waits. Makes the folder, and a file FILE.lock that stays.

    The system lifts the lock when a kernel ends, however it ends. Where nothing can be locked, nobody waits.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.with_suffix(".lock").open("ab") as lock:
        try:
            _take(lock.fileno())
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
        yield  # closing the file gives the lock back


def _take(lock: int) -> None:
    if sys.platform == "win32":
        import msvcrt

        msvcrt.locking(lock, msvcrt.LK_LOCK, 1)  # tries for 10 seconds
    else:
        import fcntl

        fcntl.flock(lock, fcntl.LOCK_EX)
