"""The result of `measure`: a run's memory over time, at its peak and at moments, and its provenance."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import accumulate
from math import prod
from typing import Any

from .breakdown import KINDS, MemoryBreakdown
from .units import GB, aligned, cut, format_bytes, html_table

SOURCES = {
    "live": "live on {device}",
    "simulated": "{device}",
    "cpu": "traced on the CPU",
    "recorded": "recorded on {device}",
}

WORDS = {"live": "measured", "cpu": "measured", "simulated": "simulated", "recorded": "recorded"}
"""The word for the bytes of each source: only those of a device that was there are measured."""


@dataclass(frozen=True)
class Allocation:
    """One storage that a step allocated: what it was for, where it came from, when it lived.

    `bytes` is what the allocator takes (a multiple of 512); `born` and `died` count events in the timeline
    (`died` is None for what was never freed); `step` is the training step (1 is the first, 0 the set-up).
    `module` is the module that ran (of the network itself its class; outside of it the phase, "(loss)"); in
    backward, the one whose backward it was; for weights and gradients the parameter's name, for states
    "exp_avg of" that name. `line` is the line of code that made it, "model.py:42  x = self.up(x)"; in
    backward, the line of the forward. It is "" where nothing is known of it, and two allocations are equal
    whatever it says, as code moves. `stream` is the CUDA stream on which it was allocated; 0 is the default
    stream.
    """

    kind: str
    bytes: int
    shape: tuple[int, ...]
    dtype: str
    operation: str
    module: str
    phase: str
    step: int
    born: int
    died: int | None
    line: str = field(default="", compare=False)
    stream: int = 0

    @property
    def requested(self) -> int:
        """Bytes of its elements, which the allocator rounded up."""
        bits = re.search(r"\d+", self.dtype)
        return prod(self.shape) * (int(bits[0]) // 8 if bits else 1)  # "bool" has no number

    def alive_at(self, event: int) -> bool:
        """True if it still occupies memory when `event` events have happened."""
        return self.born < event and (self.died is None or self.died >= event)


@dataclass(frozen=True)
class Mark:
    """The event count at which a phase of a step begins.

    Phases are "forward", "loss", "backward", "clip" (where gradients are clipped), "optimizer", "zero_grad".
    """

    event: int
    step: int
    phase: str


@dataclass(frozen=True)
class Timeline:
    """Every allocation and free of a run, in order.

    `changes` holds (signed bytes, kind) for each event, `marks` where each phase begins.
    """

    changes: Sequence[tuple[int, str]]
    marks: Sequence[Mark]

    def __len__(self) -> int:
        return len(self.changes)

    def curves(self) -> dict[str, list[int]]:
        """Bytes allocated after each event: for each kind that occurs, a list as long as the timeline."""
        kinds = {kind for _, kind in self.changes}
        curves: dict[str, list[int]] = {kind: [] for kind in KINDS if kind in kinds}
        now = dict.fromkeys(curves, 0)
        for change, kind in self.changes:
            now[kind] += change
            for name, curve in curves.items():
                curve.append(now[name])
        return curves

    def totals(self) -> list[int]:
        """Bytes allocated after each event, all kinds together."""
        return list(accumulate(change for change, _ in self.changes))

    def step_peaks(self) -> dict[int, int]:
        """The most bytes allocated at once within each step, by its number; without marks none.

        The first step is 1.
        """
        return step_peaks(self.marks, self.totals())


def step_peaks(marks: Sequence[Mark], sizes: Sequence[int]) -> dict[int, int]:
    """The largest of the sizes after each event within each step, by its number; without marks none."""
    peaks: dict[int, int] = {}
    ends = [*(mark.event for mark in marks[1:]), len(sizes)]
    for mark, end in zip(marks, ends, strict=False):  # without a mark there is an end all the same
        peaks[mark.step] = max([peaks.get(mark.step, 0), *sizes[mark.event : end]])
    return peaks


@dataclass(frozen=True)
class Provenance:
    """The source of a measurement; printed with everything that shows it."""

    source: str
    device: str
    torch: str
    date: str
    note: str = ""

    def __post_init__(self) -> None:
        if self.source not in SOURCES:
            raise ValueError(f"unknown source {self.source!r}; known: {', '.join(SOURCES)}")

    def __str__(self) -> str:
        parts = [SOURCES[self.source].format(device=self.device), f"torch {self.torch}"]
        if self.source == "recorded":
            parts.append(self.date)
        if self.note:
            parts.append(self.note)
        return " · ".join(parts)


@dataclass(frozen=True)
class Messages:
    """All messages of one kind ("all-reduce", "all-gather", …) to other ranks in a step.

    `bytes` are those of the whole tensors: reduced, gathered, or broadcast. `sent` is what this rank sends of
    them in a ring.
    """

    kind: str
    count: int
    bytes: int
    sent: int


@dataclass(frozen=True)
class RunPart:
    """One part of a whole run, such as "loading" or "evaluation", and the script's line that begins it.

    `before`, `after` and `allocated`, its peak, are bytes by the allocator's rules; `reserved` is the most
    that was reserved until then. `breakdown` has the bytes of tensors by kind at their peak.
    """

    name: str
    line: str
    before: int
    after: int
    allocated: int
    reserved: int
    breakdown: MemoryBreakdown

    def to_dict(self) -> dict[str, Any]:
        """The part as plain data, sizes in bytes."""
        return vars(self) | {"breakdown": self.breakdown.to_dict()}


@dataclass(frozen=True)
class HostMemory:
    """The most bytes of tensors in the host's memory at once, those of them in pinned memory, and the line.

    `ranks` processes on a node take as much each.
    """

    peak: int
    pinned: int
    line: str
    ranks: int = 1


@dataclass(frozen=True, repr=False)
class Measurement:
    """Memory of a training run that really executed.

    `breakdown` is by kind at the peak of the last step; `phase_peaks` has the peak of each phase of that
    step. `moments` names others: "end of forward", "after loss" and "end of backward" (last micro-batch of
    the last step), and "end of step 1", "end of step 2", …. `counters` holds what the device itself reported
    ("allocated", "reserved", "driver" and cuBLAS's "workspaces", in bytes); it is empty unless the run was
    live. `not_predicted` are kinds of convolutions whose workspaces a simulation leaves out, and the most
    bytes that a GPU was seen to take for such a one: None for a kind that no GPU was asked about. `messages`
    are those of the last step to other simulated ranks, by kind. `parts` are those of a script that was
    watched as a whole; `host` is its tensors in the host's memory, None where nobody asked.
    """

    breakdown: MemoryBreakdown
    moments: Mapping[str, MemoryBreakdown]
    timeline: Timeline
    provenance: Provenance
    peak_event: int
    allocations: Sequence[Allocation] = field(repr=False, default=())
    losses: Sequence[float] = ()
    counters: Mapping[str, int] = field(default_factory=dict)
    phase_peaks: Mapping[str, MemoryBreakdown] = field(default_factory=dict)
    not_predicted: Mapping[str, int | None] = field(default_factory=dict)
    messages: Sequence[Messages] = ()
    parts: Sequence[RunPart] = ()
    host: HostMemory | None = None

    @property
    def peak(self) -> int:
        """Bytes allocated at the peak."""
        return self.breakdown.total

    @property
    def peak_phase(self) -> str:
        """The phase of the step that owns the peak."""
        return self.breakdown.phase

    @property
    def source(self) -> str:
        """ "live", "simulated", "cpu" or "recorded"."""
        return self.provenance.source

    @property
    def word(self) -> str:
        """The word for these bytes: "measured" (on a GPU here, or on the CPU), "simulated" or "recorded"."""
        return WORDS[self.source]

    def alive_at(self, event: int) -> Iterator[Allocation]:
        """The allocations alive when `event` events have happened."""
        return (item for item in self.allocations if item.alive_at(event))

    def largest(self, count: int = 10) -> list[Allocation]:
        """The `count` largest allocations alive at the peak, largest first."""
        return sorted(self.alive_at(self.peak_event), key=lambda item: -item.bytes)[:count]

    def explain(self, count: int = 10) -> "Explanation":
        """The largest tensors at the peak, as a table of `count` rows.

        A row says what they are for, which module and operation made them, and in which line of code. Tensors
        of several layers that are alike share a row.

        Raises ValueError unless `count` is a whole number above 0.
        """
        title = f"{format_bytes(self.peak)} at the peak, in {self.peak_phase} ({self.provenance})"
        return explained(self.alive_at(self.peak_event), count, title)

    def to_dict(self) -> dict[str, Any]:
        """The results as plain data, sizes in bytes.

        Breakdowns are as by `MemoryBreakdown.to_dict`; counters and provenance are there, too.

        Its tensors are `rows`, its curves `timeline.curves()`; `save_measurement` writes all, to be read
        again.
        """
        return {
            "peak": self.peak,
            "peak_phase": self.peak_phase,
            "breakdown": self.breakdown.to_dict(),
            "phase_peaks": {name: highest.to_dict() for name, highest in self.phase_peaks.items()},
            "moments": {name: moment.to_dict() for name, moment in self.moments.items()},
            "counters": dict(self.counters),
            "not_predicted": dict(self.not_predicted),
            "losses": list(self.losses),
            "messages": [dict(vars(each)) for each in self.messages],
            "parts": [part.to_dict() for part in self.parts],
            "host": dict(vars(self.host)) if self.host else None,
            "provenance": vars(self.provenance) | {"text": str(self.provenance)},
        }

    def to_json(self) -> str:
        """`to_dict` as JSON."""
        return json.dumps(self.to_dict())

    def rows(self) -> list[dict[str, Any]]:
        """A flat row for each allocation that was kept: its fields, in bytes.

        `pandas.DataFrame(measured.rows())` makes a table of them.

        "at_peak" says whether it is part of the peak, "provenance" where it was measured.
        """
        origin = {"provenance": str(self.provenance)}
        return [
            vars(item) | {"shape": str(item.shape), "at_peak": item.alive_at(self.peak_event)} | origin
            for item in self.allocations
        ]

    def __repr__(self) -> str:
        return f"{self.breakdown}\n{self.provenance}"

    def _repr_html_(self) -> str:
        note = f"<p><small>{escape(str(self.provenance))}</small></p>"
        return self.breakdown._repr_html_() + note

    def summary(self) -> str:
        """One line: the peak, the phase that owns it, and the provenance."""
        size = format_bytes(self.peak, "GB", 2) if self.peak >= GB else format_bytes(self.peak)
        return f"{size} at the peak, in {self.peak_phase} ({self.provenance})"


# The largest tensors at the peak

COLUMNS = (
    "count",
    "each",
    "together",
    "of peak",
    "kind",
    "module",
    "operation",
    "shape",
    "dtype",
    "made in",
    "line",
)


@dataclass(frozen=True)
class Row:
    """`count` tensors alike, of `bytes` each; `module` has a * for each number in which they differ."""

    count: int
    bytes: int
    kind: str
    module: str
    operation: str
    shape: tuple[int, ...]
    dtype: str
    made_in: str
    line: str

    @property
    def total(self) -> int:
        """Bytes of all of them together."""
        return self.count * self.bytes

    def to_dict(self) -> dict[str, Any]:
        """The row as plain data, sizes in bytes."""
        return vars(self) | {"shape": list(self.shape), "total": self.total}


@dataclass(frozen=True, repr=False)
class Explanation:
    """The result of `Measurement.explain`: the largest groups of tensors at the peak, and what is left out.

    `rows` are the groups.

    `rest` counts the tensors that are not shown, `rest_bytes` is what they take, `peak` all that is
    allocated.
    """

    title: str
    rows: tuple[Row, ...]
    rest: int
    rest_bytes: int
    peak: int

    def _cells(self, row: Row) -> tuple[str, ...]:
        share = f"{100 * row.total / self.peak:.1f} %"
        return (
            f"{row.count} ×",
            format_bytes(row.bytes),
            format_bytes(row.total),
            share,
            row.kind.replace("_", " "),
            row.module,
            row.operation,
            str(row.shape),
            row.dtype,
            row.made_in,
            row.line,
        )

    def _closing(self) -> str:
        if not self.rest:
            return "These are all the tensors at the peak."
        tensors = "tensors" if self.rest > 1 else "tensor"
        share = f"{100 * self.rest_bytes / self.peak:.1f} %"
        return f"{self.rest:,} more {tensors}: {format_bytes(self.rest_bytes)}, {share} of the peak."

    def __repr__(self) -> str:
        table = aligned([COLUMNS, *map(self._cells, self.rows)], range(4, len(COLUMNS)))  # numbers come first
        return "\n".join([self.title, table, self._closing()])

    def to_text(self, width: int) -> str:
        """The table within so many characters, or where it is wider, three short lines for each row."""
        if max(map(len, repr(self).split("\n")[1:])) <= width:
            return repr(self)
        cells = [self._cells(row) for row in self.rows]
        return "\n".join([self.title, *short_lines(cells, 4, width), self._closing()])

    def _repr_html_(self) -> str:
        table = html_table([COLUMNS, *map(self._cells, self.rows)], len(COLUMNS), caption=self.title)
        return f"{table}<p><small>{escape(self._closing())}</small></p>"


def short_lines(cells: Sequence[Sequence[str]], numbers: int, width: int) -> list[str]:
    """Rows of a table of tensors, each as three lines of at most `width` characters.

    The first cells of a row are that many `numbers`; the others are those of `COLUMNS` from "kind" on.
    """
    begin = aligned([row[:numbers] for row in cells], 0).split("\n")
    left = " " * (max(map(len, begin)) + 2)
    lines = []
    for number, row in zip(begin, cells, strict=True):
        kind, module, operation, shape, dtype, made_in, code = row[numbers:]
        named = [f"{kind}: {operation} in {module}", f"{shape} {dtype}, {made_in}", code]
        lines += [f"{number:<{len(left)}}{named[0]}", *(f"{left}{words}" for words in named[1:])]
    return [cut(line, width) for line in lines]


def explained(allocations: Iterable[Allocation], count: int, title: str) -> Explanation:
    """The `count` groups of `allocations` that take most.

    Raises ValueError unless count is a whole number above 0.
    """
    how_many(count)
    groups: dict[tuple[object, ...], list[Allocation]] = {}
    for item in allocations:
        groups.setdefault(_features(item), []).append(item)
    rows = sorted((row_of(group) for group in groups.values()), key=lambda row: -row.total)
    left_out = rows[count:]
    return Explanation(
        title,
        tuple(rows[:count]),
        rest=sum(row.count for row in left_out),
        rest_bytes=sum(row.total for row in left_out),
        peak=sum(row.total for row in rows),
    )


def _features(item: Allocation) -> tuple[object, ...]:
    """The features that tensors of one row share: of their modules' names all but the numbers."""
    module = re.sub(r"\d+", "*", item.module)
    return (
        item.kind,
        item.bytes,
        item.shape,
        item.dtype,
        item.operation,
        item.phase,
        item.step,
        item.line,
        module,
    )


def how_many(count: int) -> int:
    """`count`, if it is a number of rows to show. Raises ValueError unless it is a whole number above 0."""
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise ValueError(f"count is {count!r}: how many rows to show, a whole number of at least 1")
    return count


def row_of(group: list[Allocation]) -> Row:
    """One row for allocations that differ in the numbers of their modules, and in the step, alone."""
    first = group[0]
    steps = sorted({item.step for item in group})
    names = {item.module for item in group}
    module = first.module if len(names) == 1 else _pattern(names)
    numbers = f"steps {steps[0]} to {steps[-1]}" if len(steps) > 1 else f"step {steps[0]}"
    made_in = f"{first.phase}, {numbers}" if any(steps) else "set-up"
    return Row(
        len(group),
        first.bytes,
        first.kind,
        module,
        first.operation,
        first.shape,
        first.dtype,
        made_in,
        first.line,
    )


def _pattern(names: set[str]) -> str:
    """One name for several that differ in numbers alone.

    It is blocks.*.mlp.0 for blocks.0.mlp.0 and blocks.1.mlp.0.
    """
    parts = zip(*(re.split(r"(\d+)", name) for name in names), strict=True)
    return "".join(part[0] if len(set(part)) == 1 else "*" for part in parts)
