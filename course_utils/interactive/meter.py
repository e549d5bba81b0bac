"""A meter: a GPU's memory drawn while a training loop runs, or a simulated run's at reading speed.

Of torch.cuda its thread calls `memory_stats_as_nested_dict` and `mem_get_info` alone, which read counters:
they launch nothing, record nothing in a stream and wait for no kernel.
"""

import threading
import time
from collections.abc import Callable
from itertools import accumulate
from typing import Any

from .. import Measurement, replay
from ..figures.meters import Reading, meter_figure
from ..figures.style import CourseFigure
from .display import running_shell, show

EVERY = 0.05  # seconds between two readings
DRAW_EVERY = 10  # readings: a picture takes the interpreter's lock from the loop for far longer


class Meter:
    """Calls `read` every 50 ms while a `with` block runs, and draws what it returns in the notebook.

    `read` gets the seconds since the start, and returns None when there is no more to come; `source` says
    what is read. Readings miss what happens between two of them.
    """

    def __init__(
        self, read: Callable[[float], Reading | None], source: str, capacity: int | None = None
    ) -> None:
        self.read = read
        self.source = source
        self.capacity = capacity
        self.readings: list[Reading] = []
        self.picture: Any = None
        self.failure: Exception | None = None
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._follow, name="memory meter", daemon=True)

    def __enter__(self) -> "Meter":
        self.began = time.monotonic()
        self._read_on()
        if running_shell():
            from ipywidgets import HTML

            self.picture = HTML(self.figure().html)
            show(self.picture)
        self.thread.start()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, *_: Any) -> None:
        """End with a last reading and picture. Raises what a reading has raised, unless the loop failed."""
        self.ended.set()
        self.thread.join()
        if self.failure is not None and error is None:
            raise self.failure

    def wait(self) -> None:
        """Wait until there is no more to read, as after a replay."""
        while self.thread.is_alive():
            self.thread.join(0.1)

    def _follow(self) -> None:
        try:
            while not self.ended.wait(EVERY) and self._read_on():
                if len(self.readings) % DRAW_EVERY == 0:
                    self._draw()
            self._read_on()
            self._draw()
        except Exception as error:  # raised again at the end, on the thread that can show it
            self.failure = error

    def _read_on(self) -> bool:
        seconds = time.monotonic() - self.began
        reading = self.read(seconds)
        if reading is None:
            return False
        self.readings.append(reading._replace(seconds=seconds))
        return True

    def _draw(self) -> None:
        if self.picture is not None:
            self.picture.value = self.figure().html

    @property
    def peak_is_exact(self) -> bool:
        """True if the counter's peak is of this time: it rose, or began with what was allocated then."""
        first = self.readings[0]
        return self.readings[-1].peak > first.peak or first.peak == first.allocated

    @property
    def peak(self) -> int:
        """The most bytes allocated: the counter's own, or at least the readings'."""
        if self.peak_is_exact:
            return self.readings[-1].peak
        return max(reading.allocated for reading in self.readings)

    def figure(self) -> CourseFigure:
        """The memory so far, as a picture. ValueError before the start."""
        if not self.readings:
            raise ValueError("this meter has not read anything yet: use it as `with live_meter() as meter:`")
        about = "" if self.peak_is_exact else "at least "
        return meter_figure(list(self.readings), self.capacity, self.peak, about, self.source)

    def __repr__(self) -> str:
        return self.figure().alt if self.readings else f"A meter that has not been started: {self.source}"


def live_meter() -> Meter:
    """A meter of the current CUDA GPU. Raises ValueError, saying what works instead, where there is none."""
    import torch

    if not torch.cuda.is_available():
        raise ValueError(
            "there is no CUDA GPU to read here:"
            " replay_meter(measure(run)) shows a simulated run at reading speed"
        )
    gpu = torch.cuda.current_device()  # each thread has a current device of its own
    stats_of = torch.cuda.memory_stats_as_nested_dict
    free_and_total = torch.cuda.mem_get_info

    def read(_: float) -> Reading:
        stats = stats_of(gpu)
        free, total = free_and_total(gpu)
        allocated = stats["allocated_bytes"]["all"]
        reserved = stats["reserved_bytes"]["all"]["current"]
        return Reading(allocated["current"], allocated["peak"], reserved, total - free)

    source = f"live on {torch.cuda.get_device_name(gpu)} · torch {torch.__version__}"
    return Meter(read, source, free_and_total(gpu)[1])


def replay_meter(measured: Measurement, seconds: float = 20.0, capacity: int | None = None) -> Meter:
    """A meter that plays a run back in `seconds`, as on a GPU of `capacity` bytes; its `wait()` shows it all.

    Raises ValueError for a time that is not positive, and like `replay`.
    """
    if not seconds > 0:
        raise ValueError(f"seconds is {seconds!r}: how long the replay takes, more than 0")
    replayed = replay(measured, capacity)
    events = len(replayed)
    peaks = list(accumulate(replayed.allocated, max))

    def read(passed: float) -> Reading | None:
        if passed > seconds or not events:
            return None
        at = min(int(events * passed / seconds), events - 1)
        phase = replayed.moment(at + 1)
        return Reading(replayed.allocated[at], peaks[at], replayed.reserved[at], None, phase)

    return Meter(read, f"{measured.provenance} · replayed, a real step is faster", capacity)
