"""Show progress of slow work: one line after two seconds, removed when the work is done.

No output stays. The line is written where somebody waits: in a terminal, and in a notebook that a person
runs, not nbclient or nbval.
"""

import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import current_thread, main_thread
from typing import Any

AFTER_SECONDS = 2.0
EVERY_SECONDS = 0.25
BAR = 20
"""Characters of a full bar."""


def running_shell() -> Any:
    """IPython's shell where this runs in a notebook, else None."""
    ipython = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython else None


class Work:
    """Slow work: what is being done, and how far it is.

    The outermost that runs speaks, what it calls is silent.
    """

    outermost: "Work | None" = None

    def __init__(self, words: str = "") -> None:
        self.words = words
        self.began = time.monotonic()
        self.out = _stream()
        self.shown = ""
        self.due = self.began + AFTER_SECONDS
        self.done = 0.0
        self.took = 0.0
        self.stopped = False

    def at(self, done: float, words: str) -> None:
        """Say which share is done, from 0 to 1, and what comes now."""
        self.words = words
        self.done = done
        self.took = time.monotonic() - self.began
        self.go_on()

    def go_on(self) -> None:
        """Show the line if it is time to. Raises KeyboardInterrupt if an interrupt was asked for."""
        if self.stopped:
            raise KeyboardInterrupt
        if self.out and time.monotonic() >= self.due and Work.outermost in (None, self):
            self.due = time.monotonic() + EVERY_SECONDS
            self.show(f"{self.words[:1].upper()}{self.words[1:]} {self._pace(time.monotonic() - self.began)}")

    def _pace(self, spent: float) -> str:
        if not self.done:
            return f"… {spent:.0f} s so far"
        whole = max(self.took / self.done, spent + 0.5)  # never less than has been spent already
        bar = "█" * int(BAR * spent / whole)
        return f"{bar:░<{BAR}} {100 * spent / whole:.0f} %, about {whole - spent + 0.5:.0f} s left"

    def show(self, line: str = "") -> None:
        """Put `line` in the place of the one that is shown; backspaces leave nothing behind in JupyterLab."""
        if line or self.shown:
            back = "\b" * len(self.shown)
            self.shown = line
            self.out.write(f"{back}{' ' * len(back)}{back}{line}")
            self.out.flush()
            # While the line is there, other output goes through `write`, which removes it first.
            if sys.stdout in (self, self.out):
                sys.stdout = self if line else self.out

    def write(self, text: str) -> int:
        """Write what others print: this is the standard output as long as it shows a line."""
        self.show()
        return self.out.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.out, name)

    def stop(self, *_: Any) -> None:
        """Be interrupted where it next goes on, or at once when asked again."""
        if self.stopped:
            raise KeyboardInterrupt
        self.stopped = True


@contextmanager
def working(words: str) -> Iterator[Work]:
    """Inside, say what is being done.

    An interrupt ends it between two operations; its note says what was being done. In the middle of one,
    Python may lose an interrupt, or leave what it does half done.
    """
    work = Work.outermost or Work(words)
    before = signal.getsignal(signal.SIGINT)
    work.words = words
    if Work.outermost or current_thread() is not main_thread() or before != signal.default_int_handler:
        yield work
        return
    Work.outermost = work
    signal.signal(signal.SIGINT, work.stop)
    try:
        yield work
        work.go_on()
    except KeyboardInterrupt as error:
        error.add_note(f"while {work.words}")
        raise
    finally:
        signal.signal(signal.SIGINT, before)
        Work.outermost = None
        work.show()


def steps_of(count: int, words: str) -> Iterator[int]:
    """The numbers below `count`, for a loop whose steps are slow together: its line says how far it is."""
    work = Work()
    try:
        for step in range(count):
            work.at(step / count, f"{words} step {step + 1} of {count}")
            yield step
    finally:
        work.show()


def _stream() -> Any:
    """A notebook's output if a person runs its cells, or a terminal; None where nobody waits."""
    kernel = getattr(running_shell(), "kernel", None)
    if kernel is not None:
        return sys.stdout if kernel._allow_stdin and hasattr(sys.stdout, "pub_thread") else None
    return sys.stderr if sys.stderr and sys.stderr.isatty() else None
