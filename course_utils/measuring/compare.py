"""An estimate and a measurement of one run next to each other, with the gap explained; two measurements, too.

`compare` takes a run, `difference` two measurements, whose tensors at the peak it pairs.
"""

import json
import os
import re
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from html import escape
from itertools import chain
from operator import attrgetter
from typing import Any

from ..allocator.counters import Counted, counted
from ..allocator.replay import can_be_replayed, replay
from ..breakdown import KINDS, MemoryBreakdown
from ..estimating import estimate
from ..measurement import COLUMNS as COLUMNS_OF_ROWS
from ..measurement import Allocation, Measurement, Row, how_many, row_of, short_lines
from ..run import TrainingRun
from ..units import aligned, format_bytes, format_signed, formatter, html_table, plus_minus
from .sources import measure

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Environment variables that set the policy of torch's allocator."""

ON_THE_CPU = (
    "A CPU differs from a GPU in three ways: dropout masks take 4 bytes per element,"
    " RMSNorm keeps a normalized copy, and AdamW's step counters are in the same memory."
)

STATES = ("parameters", "gradients", "optimizer_states", "workspaces")

COLUMNS = ("change", "count", "each before", "each after", *COLUMNS_OF_ROWS[3:])

SAME = "kind operation shape dtype bytes"
RUNGS = (
    f"{SAME} module phase age line",
    f"{SAME} module phase age",
    f"{SAME} pattern phase age",
    f"{SAME} pattern",
    "kind operation dtype module phase age line",
    "kind operation dtype pattern phase age",
    "kind operation pattern",
    "kind module shape dtype bytes",
    SAME,
)
"""How tensors of two measurements are paired: each line says what has to agree, for those that are left.

So code may move, and blocks may be added, before a tensor counts as another; then its bytes may differ, where
module and operation agree; last of all its operation or its module may. `pattern` is the module without its
numbers, `age` the step in which it was made, counted back from that of the peak.
"""

ALIKE = attrgetter("kind", "bytes", "shape", "dtype", "operation", "phase", "line")
Tensor = dict[str, Any]
Pair = tuple[Allocation | None, Allocation | None]


@dataclass(frozen=True, repr=False)
class Comparison:
    """An estimate and a measurement of one run."""

    run: TrainingRun
    estimate: MemoryBreakdown
    measurement: Measurement

    @property
    def differences(self) -> dict[str, int]:
        """Estimate minus measurement at the peak, in bytes, by kind."""
        return {kind: self.estimate[kind] - self.measurement.breakdown[kind] for kind in KINDS}

    @property
    def ratio(self) -> float:
        """Estimated peak over measured peak."""
        return self.estimate.total / self.measurement.peak

    @cached_property
    def counters(self) -> Counted | None:
        """The allocator's counters by the measurement; None where it did not keep all its allocations."""
        return counted(self.measurement) if can_be_replayed(self.measurement) else None

    @cached_property
    def terms(self) -> dict[str, int]:
        """Estimate minus measurement at the peak, in bytes, term by term; "elsewhere" is what has no name.

        The allocator rounds each tensor up to blocks of 512 bytes; the formula counts that for states alone.
        It leaves out tensors of a few numbers, such as the loss and the kernels' seeds, and autocast's copies
        of biases.
        """
        there = self._beside_states()
        rounded = sum(max(0, item.bytes - item.requested) for item in there)
        named = {
            f"rounding {len(there):,} tensors to blocks of 512 bytes": -rounded,
            "tensors of a few numbers, such as the loss": -sum(i.requested for i in there if is_small(i)),
            "autocast's copies of biases": -sum(i.requested for i in there if is_bias_copy(i)),
        }
        gap = self.estimate.total - self.measurement.peak
        return {name: size for name, size in named.items() if size} | {"elsewhere": gap - sum(named.values())}

    def _beside_states(self) -> list[Allocation]:
        """The tensors at the peak that the formula does not round to blocks."""
        alive = self.measurement.alive_at(self.measurement.peak_event)
        return [item for item in alive if item.kind not in STATES]

    def _elsewhere(self) -> dict[str, int]:
        """The differences by kind, without the terms that have a name."""
        left = self.differences
        for item in self._beside_states():
            whole = is_small(item) or is_bias_copy(item)
            left[item.kind] += item.requested * whole + max(0, item.bytes - item.requested)
        return left

    def rows(self) -> list[dict[str, Any]]:
        """A flat row, in bytes, for each kind that occurs, their sum, and the allocator's two counters.

        "estimated", the word for what was measured ("measured", "simulated", "recorded"), and their
        "difference" are None where they cannot be told. `pandas.DataFrame(compare(run).rows())` takes them.
        """
        word = self.measurement.word
        origin = {"run": self.run.code(), "provenance": str(self.measurement.provenance)}
        rows: list[dict[str, Any]] = []
        for name, one, other in self._sizes():
            gap = None if one is None or other is None else one - other
            rows.append({"name": name, "estimated": one, word: other, **origin, "difference": gap})
        return rows

    def to_dict(self) -> dict[str, Any]:
        """The run as code, its estimate, its measurement and their `rows`, as plain data; sizes in bytes."""
        both = {"estimate": self.estimate.to_dict(), "measurement": self.measurement.to_dict()}
        return {"run": self.run.code(), **both, "rows": self.rows()}

    def to_json(self) -> str:
        """`to_dict` as JSON."""
        return json.dumps(self.to_dict())

    def _sizes(self) -> list[tuple[str, int | None, int | None]]:
        found = self.estimate
        truth = self.measurement.breakdown
        sizes: list[tuple[str, int | None, int | None]] = [
            (kind.replace("_", " "), found[kind], truth[kind]) for kind in KINDS if found[kind] or truth[kind]
        ]
        sizes.append(("tensors", found.total, truth.total))
        if self.counters:
            sizes.append(("allocator's counter", None, self.counters.allocated))
            sizes.append(("reserved", None, self.counters.reserved))
        return sizes

    def _cells(self) -> Iterator[tuple[str, str, str, str]]:
        shown = self._formatter()
        for name, found, truth in self._sizes():
            gap = ""
            if found is not None and truth is not None:
                gap = plus_minus(found - truth)
                if found != truth:
                    gap += " B"
            one, other = ("not told" if size is None else shown(size) for size in (found, truth))
            yield name, one, other, gap

    def explanation(self) -> str:
        """Sentences that say how large the gap is, and what causes it."""
        measured = self.measurement
        counters = measured.counters
        text = self._gap()
        if max((mark.step for mark in measured.timeline.marks), default=0) == 1:
            text += (
                f" Only the first step was {measured.word},"
                " at whose beginning there are no optimizer states yet."
            )
        if measured.source == "cpu":
            text += f" {ON_THE_CPU}"
        if "allocated" not in counters:
            return text
        workspaces = counters.get("workspaces", 0) - measured.breakdown["workspaces"]
        beyond = self._beyond_the_tensors(counters["allocated"] - measured.peak - workspaces)
        named = f"{plus_minus(workspaces)} bytes are cuBLAS's workspaces, " if workspaces else ""
        return f"{text} The GPU itself counted {self._formatter()(counters['allocated'])}: {named}{beyond}."

    def _gap(self) -> str:
        gap = self.estimate.total - self.measurement.peak
        if gap == 0:
            return "The gap is 0 bytes: every tensor at the peak is in the formula."
        text = f"{plus_minus(gap)} bytes are left ({plus_minus(100 * (self.ratio - 1), 3)} %)"
        *named, (_, elsewhere) = self.terms.items()
        parts = [f"{plus_minus(size)} by {name}" for name, size in named]
        if elsewhere:
            left = self._elsewhere()
            kind = max(left, key=lambda name: abs(left[name]))
            most = f", most of it in {kind.replace('_', ' ')}" if left[kind] else ""
            parts.append(f"{plus_minus(elsewhere)} elsewhere{most}")
        return f"{text}: {', '.join(parts)}."

    def _beyond_the_tensors(self, beyond: int) -> str:
        """Name what torch counts beyond the tensors; a replay by the default policy separates two kinds."""
        scratch = "scratch space inside kernels"
        rounding = "rounding to blocks that were not split"
        default_policy = not any(os.environ.get(name) for name in ALLOCATOR_VARIABLES)
        if default_policy and can_be_replayed(self.measurement):
            peaks = replay(self.measurement).step_peaks()
            rounded = peaks[max(peaks)] - self.measurement.peak
            if 0 == rounded <= beyond:
                return f"{plus_minus(beyond)} bytes are {scratch}"
            if rounded <= beyond:
                rest = plus_minus(beyond - rounded)
                return f"{plus_minus(rounded)} bytes are {rounding}, {rest} bytes {scratch}"
        return f"{plus_minus(beyond)} bytes are {rounding} and {scratch}"

    def _formatter(self) -> Callable[[int], str]:
        return formatter(max(self.estimate.total, self.measurement.peak))

    def __repr__(self) -> str:
        word = self.measurement.word
        lines = [f"{'':20}{'estimate':>12}{word:>12}{f'estimate − {word}':>22}"]
        for name, found, truth, gap in self._cells():
            lines.append(f"{name:20}{found:>12}{truth:>12}{gap:>22}".rstrip())
        return "\n".join([str(self.run), *lines, self.explanation(), str(self.measurement.provenance)])

    def _repr_html_(self) -> str:
        word = self.measurement.word
        rows = [("", "estimate", word, f"estimate − {word}"), *self._cells()]
        provenance = escape(str(self.measurement.provenance))
        notes = f"<p>{escape(self.explanation())}<br><small>{provenance}</small></p>"
        return f"{html_table(rows, caption=str(self.run))}{notes}"


def is_small(item: Allocation) -> bool:
    """True for a tensor of a few numbers, which the formula leaves out."""
    return item.requested <= 64


def is_bias_copy(item: Allocation) -> bool:
    """True for autocast's copy of a bias, which the formula leaves out."""
    return item.kind == "weight_copies" and len(item.shape) == 1 and not is_small(item)


def compare(run: TrainingRun, source: str = "auto", steps: int = 2) -> Comparison:
    """Estimate and measure `run`, and show the signed difference of each kind. Raises like `measure`."""
    return Comparison(run, estimate(run), measure(run, source, steps))


@dataclass(frozen=True)
class Change:
    """Tensors alike: as one `was` at the first peak and is `now` at the second, None at a peak without it.

    `bytes` is what they did to the peak, signed. Without both it is the rest, which no known tensor explains.
    """

    was: Row | None
    now: Row | None
    bytes: int

    @property
    def change(self) -> str:
        """ "came", "went", "grew", "shrank" or "not attributed"."""
        if self.was and self.now:
            return "grew" if self.bytes > 0 else "shrank"
        if self.now:
            return "came"
        if self.was:
            return "went"
        return "not attributed"

    def to_dict(self) -> dict[str, Any]:
        """The change as plain data, sizes in bytes."""
        was, now = (row.to_dict() if row else None for row in (self.was, self.now))
        return {"change": self.change, "bytes": self.bytes, "was": was, "now": now}

    def _cells(self) -> list[str]:
        rows = [row for row in (self.was, self.now) if row]
        if not rows:
            others = [""] * (len(COLUMNS) - 5)
            return [self.change, "", "", "", format_signed(self.bytes), *others]
        row = rows[-1]
        sizes = [format_bytes(one.bytes) if one else "–" for one in (self.was, self.now)]
        shapes = " → ".join(dict.fromkeys(str(one.shape) for one in rows))
        dtypes = " → ".join(dict.fromkeys(str(one.dtype) for one in rows))
        kind = row.kind.replace("_", " ")
        words = [kind, row.module, row.operation, shapes, dtypes, row.made_in, row.line]
        return [self.change, f"{row.count} ×", *sizes, format_signed(self.bytes), *words]


@dataclass(frozen=True, repr=False)
class Difference:
    """The result of `difference`: `rows`, largest first, that sum exactly to the difference of the peaks.

    The last row is what no tensor of the two explains, 0 where all allocations are known. `elsewhere` counts
    tensors that are alike in all but operation or module. `count` rows are shown.
    """

    before: Measurement
    after: Measurement
    rows: tuple[Change, ...]
    elsewhere: int
    count: int

    @property
    def bytes(self) -> int:
        """The peak of `after` minus that of `before`."""
        return self.after.peak - self.before.peak

    @property
    def by_kind(self) -> dict[str, int]:
        """Signed bytes of each kind of memory that changed, by the breakdowns at the two peaks."""
        changes = {kind: self.after.breakdown[kind] - self.before.breakdown[kind] for kind in KINDS}
        return {kind: size for kind, size in changes.items() if size}

    def to_dict(self) -> dict[str, Any]:
        """The difference as plain data, sizes in bytes, with every row."""
        rows = [row.to_dict() for row in self.rows]
        return {"bytes": self.bytes, "by_kind": self.by_kind, "rows": rows, "elsewhere": self.elsewhere}

    def _opening(self) -> str:
        both = (self.before, self.after)
        old = self.before.peak_phase
        new = self.after.peak_phase
        peaks = " → ".join(f"{format_bytes(item.peak)} in {item.peak_phase}" for item in both)
        origins = " → ".join(dict.fromkeys(str(replace(item.provenance, note="")) for item in both))
        title = f"{format_signed(self.bytes)} at the peak: {peaks} ({origins})"
        if old == new:
            return title
        moved = f"The peak moved from {old} to {new}, so these are tensors of two different moments."
        if all(old in item.phase_peaks for item in both):
            there = " → ".join(format_bytes(item.phase_peaks[old].total) for item in both)
            moved += f" The peak of {old} alone: {there}."
        return f"{moved}\n{title}"

    def _table(self) -> list[list[str]]:
        shown = [*self.rows[:-1][: self.count], self.rows[-1]]
        return [[*COLUMNS], *(row._cells() for row in shown)]

    def _closing(self) -> str:
        said = list[str]()
        left_out = self.rows[self.count : -1]
        if left_out:
            size = sum(row.bytes for row in left_out)
            said.append(f"Not shown: {len(left_out):,} more rows, {format_signed(size)}.")
        if len(self.rows) == 1 and not self.bytes:
            said.append("The same tensors exist at both peaks.")
        if self.elsewhere:
            said.append(f"Not shown: {self.elsewhere:,} tensors that differ only in operation or module.")
        if self.by_kind:
            kinds = (f"{kind.replace('_', ' ')} {format_signed(size)}" for kind, size in self.by_kind.items())
            said.append(f"By kind: {', '.join(kinds)}.")
        for name, item in (("before", self.before), ("after", self.after)):
            if not can_be_replayed(item):
                unknown = _unknown(item)
                small = f", without small ones ({format_bytes(unknown)})" if unknown else ""
                said.append(f"Of {name} the allocations at the peak alone are kept{small}.")
        old = self.before.counters.get("allocated")
        new = self.after.counters.get("allocated")
        if old is not None and new is not None:
            change = new - old
            beyond = format_signed(change - self.bytes)
            said.append(
                f"The GPU's own counter differs by {format_signed(change)}: {beyond} beyond the tensors."
            )
        return " ".join(said)

    def __repr__(self) -> str:
        return "\n".join([self._opening(), aligned(self._table(), range(5, len(COLUMNS))), self._closing()])

    def to_text(self, width: int) -> str:
        """The table within so many characters: three short lines for each row, as `Explanation.to_text`."""
        *rows, rest = self._table()[1:]
        lines = short_lines(rows, 5, width) if rows else []
        return "\n".join([self._opening(), *lines, f"{rest[0]}: {rest[4]}", self._closing()])

    def _repr_html_(self) -> str:
        table = html_table(self._table(), len(COLUMNS), caption=self._opening())
        return f"{table}<p><small>{escape(self._closing())}</small></p>"


def difference(before: Measurement, after: Measurement, count: int = 20) -> Difference:
    """The tensors that came, went, grew or shrank between the peaks of two measurements, by module and line.

    Any two can be compared: simulated, live, on the CPU, recorded, of runs or of your own step. `count` is
    how many rows are shown. Raises TypeError for what is no measurement, ValueError for a count that is no
    whole number above 0.
    """
    for item in (before, after):
        if not isinstance(item, Measurement):
            kind = type(item).__name__
            raise TypeError(
                f"difference takes two measurements, and was given a {kind}: measure(…) makes one"
            )
    how_many(count)
    pairs, elsewhere = _paired(_tensors(before), _tensors(after))
    rows = sorted(_rows(pairs), key=lambda row: -abs(row.bytes))
    rest = Change(None, None, _unknown(after) - _unknown(before))
    return Difference(before, after, (*rows, rest), elsewhere, count)


def _unknown(measured: Measurement) -> int:
    """Bytes of the peak that belong to no allocation that was kept."""
    return measured.peak - sum(item.bytes for item in measured.alive_at(measured.peak_event))


def _tensors(measured: Measurement) -> list[Tensor]:
    """The tensors alive at the peak, the largest first, in the form that `RUNGS` need."""
    step = max((mark.step for mark in measured.timeline.marks if mark.event < measured.peak_event), default=0)
    return [
        {**vars(item), "pattern": re.sub(r"\d+", "*", item.module), "age": item.step - step, "item": item}
        for item in measured.alive_at(measured.peak_event)
    ]


def _paired(old: list[Tensor], new: list[Tensor]) -> tuple[list[Pair], int]:
    """Pairs of tensors whose bytes differ, None for one that is missing; and how many the last rungs pair.

    Each rung pairs what it can, the largest first; what is left over goes on to the next.
    """
    pairs = list[Pair]()
    unpaired = list[int]()
    for rung in map(str.split, RUNGS):
        unpaired.append(len(new))
        waiting = defaultdict[tuple[Any, ...], deque[Tensor]](deque)
        still = list[Tensor]()
        for tensor in sorted(old, key=_largest_first):
            waiting[tuple(map(tensor.get, rung))].append(tensor)
        for tensor in sorted(new, key=_largest_first):
            others = waiting[tuple(map(tensor.get, rung))]
            if not others:
                still.append(tensor)
                continue
            other = others.popleft()
            if other["bytes"] != tensor["bytes"]:
                pairs.append((other["item"], tensor["item"]))
        old = list(chain(*waiting.values()))
        new = still
    pairs += [(tensor["item"], None) for tensor in old]
    pairs += [(None, tensor["item"]) for tensor in new]
    return pairs, unpaired[-2] - len(new)


def _largest_first(tensor: Tensor) -> tuple[Any, ...]:
    return -tensor["bytes"], tensor["shape"], tensor["module"]


def _rows(pairs: Iterable[Pair]) -> Iterator[Change]:
    """One row for all pairs alike but for the numbers in their modules and the step."""
    groups = defaultdict[Any, list[Pair]](list)
    for pair in pairs:
        groups[tuple(_alike(item) for item in pair)].append(pair)
    for group in groups.values():
        was = [item for item, _ in group if item]
        now = [item for _, item in group if item]
        old = row_of(was) if was else None
        new = row_of(now) if now else None
        yield Change(old, new, sum(item.bytes for item in now) - sum(item.bytes for item in was))


def _alike(item: Allocation | None) -> tuple[Any, ...] | None:
    """The values that tensors of one row share."""
    if item is None:
        return None
    return ALIKE(item), re.sub(r"\d+", "*", item.module)
