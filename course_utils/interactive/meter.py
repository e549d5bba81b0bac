"""A meter for demos: a GPU's memory drawn while a training loop runs, or a simulated run's at reading speed.

Of torch.cuda its thread calls `memory_stats_as_nested_dict` and `mem_get_info` alone, which read counters:
they launch nothing, record nothing in a stream and wait for no kernel. It takes the interpreter's lock for
less than a millisecond 20 times per second, and, where the picture is shown, for less than 50 ms 4 times per
second.
"""

import threading
import time
from bisect import bisect_right
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

from .. import Measurement, replay
from ..figures.canvas import Figure
from ..figures.meters import MeterMark, Reading, meter_figure
from .ledgers import running_shell

if TYPE_CHECKING:
    import torch

    from ..measuring.held_bytes import Holdings

EVERY = 0.05  # seconds between two readings
DRAW_EVERY = 0.25  # seconds between two pictures, which take the interpreter's lock from the loop for longer
LONGEST = 600.0  # seconds after which a meter ends, whatever became of the loop
UNCOUNTED = "weights, gradients and states are known; the rest is activations, or temporaries in the update"


class Playback:
    """A measured run played back in `seconds`, some for every phase, or the loss would be over at once.

    A `capacity` (bytes) may end the run as it would end on such a GPU: see `replayed.failure`.
    """

    def __init__(self, measured: Measurement, seconds: float, capacity: int | None = None) -> None:
        if not seconds > 0:
            raise ValueError(f"seconds is {seconds!r}: how long the replay takes, more than 0")
        self.replayed = replay(measured, capacity)
        self._source = f"{measured.provenance} · replayed"
        self._capacity = capacity
        self._curves = measured.timeline.curves()
        self._marks = measured.timeline.marks
        self._peaks = list(accumulate(self.replayed.allocated, max))
        self._seconds = seconds
        events = len(self.replayed)
        begins = {0, *(mark.event for mark in self._marks if mark.event < events)}
        self._starts = [*sorted(begins), events]
        lengths = [end - start for start, end in pairwise(self._starts)]
        # half of the time in equal parts, half by the number of events
        shares = (0.5 / len(lengths) + 0.5 * length / max(1, events) for length in lengths)
        self._times = [0.0, *(seconds * done for done in accumulate(shares))]

    def meter(self) -> "Meter":
        return Meter(self.read, self._source, self._capacity, "seconds of the replay (a real step is faster)")

    def read(self, seconds: float) -> Reading | None:
        if seconds > self._seconds or not self._peaks:
            return None
        index = min(bisect_right(self._times, seconds) - 1, len(self._times) - 2)
        begin, end = self._times[index : index + 2]
        first, last = self._starts[index : index + 2]
        done = min(1.0, (seconds - begin) / (end - begin))
        at = max(1, first + round(done * (last - first))) - 1  # the last event that has happened
        begun = [mark.phase for mark in self._marks if mark.event <= at]
        phase = begun[-1] if begun else "set-up"
        allocated = self.replayed.allocated[at]
        reserved = self.replayed.reserved[at]
        kinds = {kind: curve[at] for kind, curve in self._curves.items()}
        return Reading(allocated, self._peaks[at], reserved, None, kinds, phase)


class Meter:
    """Calls `read` every 50 ms from `start` to `stop`, or in a `with` block, and draws what it returns.

    `read` gets the seconds since the start, and returns None when there is no more to come; `source` says
    what is read. `mark("backward")` names a phase. Readings miss what happens between two of them; `peak` is
    the counter's own wherever that is of this time alone.
    """

    def __init__(
        self,
        read: Callable[[float], Reading | None],
        source: str,
        capacity: int | None = None,
        axis: str = "seconds",
    ) -> None:
        self.read = read
        self.source = source
        self.capacity = capacity
        self.axis = axis
        self.samples: list[Reading] = []
        self.marks: list[MeterMark] = []
        self._failure: Exception | None = None
        self._held: Holdings | None = None
        self._note = ""  # to the source, also when nothing is held any more
        self._widget: Any = None
        self._began = 0.0
        self._drawn = 0.0
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def follow(self, held: "Holdings") -> "Meter":
        """Color the memory by what a training holds, until the end; call it on the thread that trains."""
        self._held = held
        self._note = f" · {UNCOUNTED}"
        if self.running:
            held.start()
        return self

    def start(self) -> "Meter":
        """Begin to read; the cell that runs now ends it, however that ends. RuntimeError if begun."""
        if self._thread is not None:
            raise RuntimeError("this meter has already been used: make a new one for each loop")
        if self._held is not None:
            self._held.start()
        self._began = time.monotonic()
        self._sample()
        self._thread = threading.Thread(target=self._follow, name="memory meter", daemon=True)
        if shell := running_shell():
            shell.events.register("post_run_cell", self._cell_ended)
        self._thread.start()
        return self

    def _cell_ended(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End with a last reading and picture, unless it has ended. Raises what a reading had raised."""
        if self._thread is None:
            return
        running = not self._ended.is_set()
        self._ended.set()
        self._thread.join()
        if shell := running_shell():
            with suppress(ValueError):  # it is no longer registered
                shell.events.unregister("post_run_cell", self._cell_ended)
        try:
            if self._failure is not None:
                raise self._failure
            if running:
                if self._held is not None:
                    self._held.count()
                self._sample()
                self._draw()
        finally:
            if self._held is not None:
                self._held.stop()
            self._held = None  # and nothing of the training is kept alive

    def wait(self) -> None:
        while not self._ended.wait(0.1):
            pass

    @property
    def running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def mark(self, words: str) -> None:
        """Name what begins now: "forward", "backward", …"""
        self.marks.append(MeterMark(time.monotonic() - self._began, words))

    __enter__ = start

    def __exit__(self, kind: Any, error: BaseException | None, *_: Any) -> None:
        try:
            self.stop()
        except Exception:
            if error is None:  # the loop's own error says more
                raise

    def _follow(self) -> None:
        try:
            while not self._ended.wait(EVERY):
                if not self._sample() or self.samples[-1].seconds > LONGEST:
                    break
                if self.samples[-1].seconds - self._drawn >= DRAW_EVERY:
                    self._draw()
            if not self._ended.is_set():
                self._draw()
        except Exception as error:  # raised again by `stop`, on the thread that can show it
            self._failure = error
        finally:
            self._ended.set()

    def _sample(self) -> bool:
        seconds = time.monotonic() - self._began
        reading = self.read(seconds)
        if reading is None:
            return False
        if reading.phase is not None and (not self.marks or self.marks[-1].words != reading.phase):
            self.marks.append(MeterMark(seconds, reading.phase))
        kinds = reading.kinds if self._held is None else self._held.by_kind(reading.allocated)
        self.samples.append(replace(reading, seconds=seconds, kinds=kinds))
        return True

    @property
    def peak(self) -> int:
        """The most bytes allocated: the counter's, or at least the readings'. ValueError before the start."""
        if self.peak_is_exact:
            return self.samples[-1].peak
        return max(sample.allocated for sample in self.samples)

    @property
    def peak_is_exact(self) -> bool:
        """True if `peak` is the counter's own: not where the counter still shows a higher one from before."""
        if not self.samples:
            raise ValueError("this meter has not read anything yet: start it first")
        first = self.samples[0]
        rose = self.samples[-1].peak > first.peak
        return rose or first.peak == first.allocated

    def figure(self) -> Figure:
        """The memory so far, as a picture. ValueError before the start."""
        peak = self.peak
        about = "" if self.peak_is_exact else "at least "
        # copies, as the thread goes on
        samples = list(self.samples)
        marks = list(self.marks)
        source = f"{self.source}{self._note}"
        return meter_figure(samples, marks, self.capacity, peak, about, source, self.axis)

    def show(self) -> "Meter":
        """Show the picture in a notebook; it is drawn anew as the loop goes on."""
        from IPython.display import display

        display(self.widget)
        return self

    @property
    def widget(self) -> Any:
        """The picture as a widget, for a notebook or a part of a larger widget."""
        if self._widget is None:
            from ipywidgets import HTML

            self._widget = HTML(self.figure().html if self.samples else "")
        return self._widget

    def _draw(self) -> None:
        self._drawn = self.samples[-1].seconds
        if self._widget is not None:
            self._widget.value = self.figure().html

    def __repr__(self) -> str:
        return self.figure().alt if self.samples else f"A meter that has not been started: {self.source}"


def live_meter(
    model: "torch.nn.Module | None" = None, optimizer: "torch.optim.Optimizer | None" = None
) -> Meter:
    """A meter of the current CUDA GPU, by kind of memory with a `model` and its `optimizer`.

    Weights, gradients and states are counted; all else is activations, or temporaries while the optimizer
    updates. Raises ValueError, saying what works instead, where there is no GPU and where one of the two is
    missing.
    """
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
        reserved = stats["reserved_bytes"]["all"]
        return Reading(allocated["current"], allocated["peak"], reserved["current"], total - free)

    source = f"live on {torch.cuda.get_device_name(gpu)} · torch {torch.__version__}"
    meter = Meter(read, source, free_and_total(gpu)[1])
    if model is None and optimizer is None:
        return meter
    if not isinstance(model, torch.nn.Module) or not isinstance(optimizer, torch.optim.Optimizer):
        got = " and ".join(type(one).__name__ for one in (model, optimizer))
        raise ValueError(f"model and optimizer go together, as live_meter(model, optimizer): got {got}")
    from ..measuring.held_bytes import Holdings

    return meter.follow(Holdings(model, [optimizer]))


def replay_meter(measured: Measurement, seconds: float = 20.0, capacity: int | None = None) -> Meter:
    """A meter that plays a run back in `seconds` and ends by itself. `capacity` is the GPU's, in bytes."""
    return Playback(measured, seconds, capacity).meter()
