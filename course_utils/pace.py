"""Slow work: say in a terminal what is being done, and end between two operations when interrupted."""

import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from subprocess import Popen, TimeoutExpired
from threading import current_thread, main_thread

AFTER_SECONDS = 2.0


class Work:
    """Slow work that is going on: what is being done, and whether somebody has interrupted it."""

    outermost: "Work | None" = None
    """The one that others are a part of. It alone says something and takes interrupts."""

    def __init__(self, words: str) -> None:
        self.words = words
        self.due = time.monotonic() + AFTER_SECONDS
        self.said = ""
        self.interrupted = False

    def at(self, words: str) -> None:
        """Say what comes now."""
        self.words = words
        self.go_on()

    def go_on(self) -> None:
        """Say what is being done, if it is time to. Raises KeyboardInterrupt if there was an interrupt."""
        if self.interrupted:
            raise KeyboardInterrupt
        if self.words != self.said and time.monotonic() >= self.due:
            self.said = self.words
            self.due = time.monotonic() + AFTER_SECONDS
            if sys.stderr and sys.stderr.isatty():  # a notebook has a mark of its own
                print(f"{self.words} …", file=sys.stderr)

    def interrupt(self, *_: object) -> None:
        """Remember an interrupt. Raises KeyboardInterrupt at once for the second one."""
        if self.interrupted:
            raise KeyboardInterrupt
        self.interrupted = True


@contextmanager
def working(words: str) -> Iterator[Work]:
    """Inside, say on stderr, in a terminal alone, what is being done when that takes long.

    An interrupt ends it between two operations. In the middle of one, Python may lose an interrupt, or leave
    what it does half done.
    """
    if Work.outermost:
        Work.outermost.words = words
        yield Work.outermost
        return
    work = Work(words)
    before = signal.getsignal(signal.SIGINT)
    if current_thread() is not main_thread() or before != signal.default_int_handler:
        yield work
        return
    Work.outermost = work
    signal.signal(signal.SIGINT, work.interrupt)
    try:
        yield work
        work.go_on()
    finally:
        signal.signal(signal.SIGINT, before)
        Work.outermost = None


def wait_for(process: "Popen[bytes]", words: str) -> int:
    """Wait until a process has ended, and say what it does if that takes long. Returns its exit code."""
    with working(words) as work:
        while process.poll() is None:
            work.go_on()
            with suppress(TimeoutExpired):
                process.wait(timeout=0.2)
    return process.returncode
