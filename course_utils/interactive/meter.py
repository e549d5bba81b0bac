"""A meter for demos: a GPU's memory drawn while a training loop runs, and a simulated run's at reading speed.

`live_meter()` reads torch's counters and the driver's from a thread of its own. It ends with its `with` block or loop,
and with the cell that started it, also when that is interrupted.

Cost. On the GPU, none: of torch.cuda the thread calls `memory_stats_as_nested_dict` and `mem_get_info` alone, which
read counters; they launch nothing, record nothing in a stream and wait for no kernel. (On a real GPU this has not been
timed yet.) On the CPU, little: the thread takes the interpreter's lock for less than a millisecond 20 times per second,
and, where the picture is shown, for less than 50 ms 4 times per second. A loop that keeps the GPU's queue filled does
not notice; one that waits for Python at every kernel can lose a few percent to the picture. By kind of memory it costs
a hook for each parameter that backward reaches, and three passes over all parameters per step.
"""

import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from ..allocator.replay import Replay, can_be_replayed, replay
from ..figures.canvas import Figure
from ..figures.meters import PAGE, MeterMark, Reading, meter_figure
from ..measurement import Measurement
from .failed_cells import running_shell

if TYPE_CHECKING:
    import torch

    from ..measuring.holdings import Holdings

Item = TypeVar("Item")

EVERY = 0.05  # seconds between two readings

DRAW_EVERY = 0.25
"""Seconds between two pictures: drawing takes the interpreter's lock from the loop, reading hardly does."""

LONGEST = 600.0  # seconds after which a meter ends, whatever became of the loop


class Gauge(Protocol):
    """The source of a meter: a GPU, or a run that is played back. `read` returns None when there is no more to come."""

    @property
    def source(self) -> str: ...
    @property
    def capacity(self) -> int | None: ...
    @property
    def axis(self) -> str: ...
    def read(self, seconds: float) -> Reading | None: ...


UNCOUNTED = "weights, gradients and states are counted; the rest is activations, in the update temporaries"


class CudaGauge:
    """The current CUDA GPU's counters: the allocator's statistics and cudaMemGetInfo, which wait for no kernel.

    Raises RuntimeError, torch's own, where there is no GPU. Not for use while a CUDA graph is captured.
    """

    axis = "seconds"

    def __init__(self) -> None:
        import torch

        self._index = torch.cuda.current_device()  # each thread has a current device of its own
        self._stats = torch.cuda.memory_stats_as_nested_dict
        self._free_and_total = torch.cuda.mem_get_info
        self.capacity = self._free_and_total(self._index)[1]
        self.source = f"live on {torch.cuda.get_device_name(self._index)} · torch {torch.__version__}"

    def read(self, seconds: float) -> Reading:
        """The counters now."""
        stats = self._stats(self._index)
        allocated, reserved = stats["allocated_bytes"]["all"], stats["reserved_bytes"]["all"]
        free, total = self._free_and_total(self._index)
        return Reading(allocated["current"], allocated["peak"], reserved["current"], total - free)


class ReplayGauge:
    """A measured run played back in `seconds`. Every phase gets some of the time, or the loss would be over at once.

    Where the measurement kept all its allocations, the allocator's policy says what is reserved; `capacity` (bytes) may
    then end the run as it would end on such a GPU: see `failure`.
    """

    axis = "seconds of the replay (a real step is faster)"

    def __init__(self, measured: Measurement, seconds: float = 20.0, capacity: int | None = None) -> None:
        if not seconds > 0:
            raise ValueError(f"seconds is {seconds!r}: how long the replay takes, more than 0")
        self.capacity, self.source = capacity, f"{measured.provenance} · replayed"
        self.replayed: Replay | None = replay(measured, capacity) if can_be_replayed(measured) else None
        self._curves, self._marks = measured.timeline.curves(), measured.timeline.marks
        self._totals = self.replayed.allocated if self.replayed else measured.timeline.totals()
        self._peaks, self._events = list(accumulate(self._totals, max)), len(self._totals)
        self._times, self._starts = _schedule([mark.event for mark in self._marks], self._events, seconds)
        self._seconds = seconds

    @property
    def failure(self) -> RuntimeError | None:
        """The allocator's error when the GPU was too small, or None."""
        return self.replayed.failure if self.replayed else None

    def _event_at(self, seconds: float) -> int:
        index = min(bisect_right(self._times, seconds) - 1, len(self._times) - 2)
        begin, end = self._times[index], self._times[index + 1]
        share = min(1.0, (seconds - begin) / (end - begin))
        return self._starts[index] + round(share * (self._starts[index + 1] - self._starts[index]))

    def read(self, seconds: float) -> Reading | None:
        """The run's state then; None after its end."""
        if seconds > self._seconds or not self._events:
            return None
        at = max(1, self._event_at(seconds)) - 1
        begun = [mark for mark in self._marks if mark.event <= at]
        return Reading(
            self._totals[at],
            self._peaks[at],
            self.replayed.reserved[at] if self.replayed else None,
            kinds={kind: curve[at] for kind, curve in self._curves.items()},
            phase=begun[-1].phase if begun else "set-up",
        )


def _schedule(marks: list[int], events: int, seconds: float) -> tuple[list[float], list[int]]:
    """When each phase begins (seconds) and at which event: half of the time in equal shares, half by their events."""
    starts = [*sorted({0, *(event for event in marks if event < events)}), events]
    lengths = [end - start for start, end in pairwise(starts)]
    shares = [0.5 / len(lengths) + 0.5 * length / max(1, events) for length in lengths]
    return [0.0, *(seconds * done for done in accumulate(shares))], starts


class Meter:
    """Reads a gauge every `every` seconds from `start` to `stop`, and draws what it has read.

    Use it as `with meter:` around a loop, or as `for batch in meter.over(batches):`. `mark("backward")` names a phase.
    Readings miss what happens between two of them; `peak` is the counter's own wherever that is of this time alone.
    Set `look` to `figures.meters.STAGE` before it is shown, for text that a lecture room can read.
    """

    def __init__(self, gauge: Gauge, *, every: float = EVERY, longest: float = LONGEST) -> None:
        if not 0 < every <= longest:
            raise ValueError(f"every is {every!r} and longest {longest!r}: seconds, more than 0, every ≤ longest")
        self.gauge, self.every, self.longest = gauge, every, longest
        self.samples: list[Reading] = []
        self.marks: list[MeterMark] = []
        self.failure: Exception | None = None
        self.look = PAGE
        self._held: Holdings | None = None
        self._note = ""
        self._widget: Any = None
        self._ended, self._lock = threading.Event(), threading.Lock()
        self._began = self._drawn = 0.0
        self._thread: threading.Thread | None = None
        self._forget: Callable[[], None] = lambda: None

    def follow(self, held: "Holdings") -> "Meter":
        """Color the memory by what a training holds, to the meter's end; call it on the thread that trains."""
        self._held, self._note = held, UNCOUNTED
        if self.running:
            held.start()
        return self

    def leave(self) -> None:
        """Stop following, so that the meter keeps nothing of the training alive."""
        if self._held is not None:
            self._held.stop()
        self._held = None

    def start(self, with_cell: bool = True) -> "Meter":
        """Begin to read. With `with_cell` the cell that runs now ends it, however it ends. RuntimeError if begun."""
        if self._thread is not None:
            raise RuntimeError("this meter has been used: make a new one for each loop")
        if self._held is not None:
            self._held.start()
        self._began = time.monotonic()
        self._sample()
        self._thread = threading.Thread(target=self._follow, name="memory meter", daemon=True)
        self._forget = _stop_with_the_cell(self.stop) if with_cell else self._forget
        self._thread.start()
        return self

    def stop(self) -> None:
        """End, with a last reading and picture; nothing to do if it has ended. Raises what a reading had raised."""
        if self._thread is None:
            return
        running = not self._ended.is_set()
        self._ended.set()
        self._thread.join()
        self._forget()
        try:
            if self.failure is not None:
                failure, self.failure = self.failure, None
                raise failure
            if running:
                if self._held is not None:
                    self._held.count()
                self._sample()
                self._draw()
        finally:
            self.leave()

    def wait(self) -> "Meter":
        """Return when the gauge has no more to say; interrupting the kernel ends it early."""
        try:
            while not self._ended.wait(0.1):
                pass
        finally:
            self.stop()
        return self

    @property
    def running(self) -> bool:
        """True while it reads."""
        return self._thread is not None and self._thread.is_alive()

    def mark(self, words: str) -> None:
        """Name what begins now: "forward", "backward", …"""
        with self._lock:
            self.marks.append(MeterMark(time.monotonic() - self._began, words))

    def over(self, items: Iterable[Item]) -> Iterator[Item]:
        """The items of a loop, metered from the first to the last, or to where the loop is left."""
        with self:
            yield from items

    def __enter__(self) -> "Meter":
        return self.start()

    def __exit__(self, kind: Any, error: BaseException | None, *_: Any) -> None:
        try:
            self.stop()
        except Exception as problem:
            if error is None:
                raise
            error.add_note(f"The meter failed, too: {problem}")  # the loop's own error says more

    def _follow(self) -> None:
        try:
            while not self._ended.wait(self.every):
                if not self._sample() or self.samples[-1].seconds > self.longest:
                    break
                if self.samples[-1].seconds - self._drawn >= DRAW_EVERY:
                    self._draw()
            if not self._ended.is_set():
                self._draw()
        except Exception as error:  # raised again by `stop`, on the thread that can show it
            self.failure = error
        finally:
            self._ended.set()

    def _sample(self) -> bool:
        """Read the gauge once; False when it has no more to say."""
        seconds = time.monotonic() - self._began
        reading = self.gauge.read(seconds)
        if reading is None:
            return False
        with self._lock:
            if reading.phase is not None and (not self.marks or self.marks[-1].words != reading.phase):
                self.marks.append(MeterMark(seconds, reading.phase))
            kinds = reading.kinds if self._held is None else self._held.by_kind(reading.allocated)
            self.samples.append(replace(reading, seconds=seconds, kinds=kinds))
        return True

    @property
    def peak(self) -> int:
        """The most bytes allocated: by the counter, or at least by the readings. ValueError before the start."""
        return self.samples[-1].peak if self.peak_is_exact else max(one.allocated for one in self.samples)

    @property
    def peak_is_exact(self) -> bool:
        """True if `peak` is the counter's own: not where the counter still shows something higher from before."""
        if not self.samples:
            raise ValueError("this meter has not read anything yet: start it first")
        first, last = self.samples[0], self.samples[-1]
        return last.peak > first.peak or first.peak == first.allocated

    def figure(self) -> Figure:
        """The memory so far, as a picture. ValueError before the start."""
        peak, about = self.peak, "" if self.peak_is_exact else "at least "
        with self._lock:
            samples, marks = list(self.samples), list(self.marks)
        gauge = self.gauge
        source = " · ".join(filter(None, [gauge.source, self._note]))
        return meter_figure(samples, marks, gauge.capacity, peak, about, source, gauge.axis, self.look)

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
        return self.figure().alt if self.samples else f"A meter that has not been started: {self.gauge.source}"


def live_meter(
    model: "torch.nn.Module | None" = None, optimizer: "torch.optim.Optimizer | None" = None, *, every: float = EVERY
) -> Meter:
    """A meter of the current CUDA GPU, by kind of memory with a `model` and its `optimizer`.

    Weights, gradients and states are counted; all else is activations, or temporaries while the optimizer updates.
    Raises ValueError, saying what works instead, where there is no GPU and where one of the two is missing.
    """
    import torch

    if not torch.cuda.is_available():
        raise ValueError(
            "there is no CUDA GPU to read here: replay_meter(measure(run)) shows a simulated run at reading speed"
        )
    meter = Meter(CudaGauge(), every=every)
    if model is None and optimizer is None:
        return meter
    if not isinstance(model, torch.nn.Module) or not isinstance(optimizer, torch.optim.Optimizer):
        got = " and ".join(type(one).__name__ for one in (model, optimizer))
        raise ValueError(f"model and optimizer go together, as live_meter(model, optimizer): got {got}")
    from ..measuring.holdings import Holdings

    return meter.follow(Holdings(model, [optimizer]))


def replay_meter(measured: Measurement, seconds: float = 20.0, capacity: int | None = None) -> Meter:
    """A meter that plays a measured run back in `seconds`; it ends by itself. `capacity` is the GPU's, in bytes."""
    return Meter(ReplayGauge(measured, seconds, capacity), longest=max(LONGEST, 2 * seconds))


def _stop_with_the_cell(stop: Callable[[], None]) -> Callable[[], None]:
    """Have `stop` called when the running cell ends, interrupted or not; returns what takes that back."""
    shell = running_shell()
    if shell is None:
        return lambda: None

    def ended(*_: Any) -> None:
        stop()

    def forget() -> None:
        if ended in shell.events.callbacks["post_run_cell"]:
            shell.events.unregister("post_run_cell", ended)

    shell.events.register("post_run_cell", ended)
    return forget
