"""An estimate and a measurement of one run next to each other, with the gap explained."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from html import escape
from typing import Any

from ..allocator.counters import Counted, counted
from ..allocator.replay import can_be_replayed, replay
from ..breakdown import KINDS, MemoryBreakdown
from ..estimating import estimate
from ..measurement import Measurement
from ..run import TrainingRun
from ..units import formatter, html_table, plus_minus
from .sources import measure

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Environment variables that set the policy of torch's allocator."""

ON_THE_CPU = (
    "A CPU differs from a GPU in three ways: dropout masks take 4 bytes per element,"
    " RMSNorm keeps a normalized copy, and AdamW's step counters are in the same memory."
)


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
    def counters(self) -> tuple[Counted | None, Counted | None]:
        """The allocator's counters by the estimate and by the measurement; None where they are not known."""
        estimated = None
        with suppress(ValueError):  # several ranks, or LoRA
            estimated = counted(self.run)
        return estimated, counted(self.measurement) if can_be_replayed(self.measurement) else None

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
        one, other = self.counters
        if one or other:
            allocated = [counter.allocated if counter else None for counter in (one, other)]
            reserved = [counter.reserved if counter else None for counter in (one, other)]
            sizes.append(("allocator's counter", allocated[0], allocated[1]))
            sizes.append(("reserved", reserved[0], reserved[1]))
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
        gap = self.estimate.total - measured.peak
        if gap == 0:
            text = "The gap is 0 bytes: every tensor at the peak is in the formula."
        else:
            kind = max(self.differences, key=lambda name: abs(self.differences[name]))
            text = (
                f"{plus_minus(gap)} bytes are left ({plus_minus(100 * (self.ratio - 1), 3)} %),"
                f" most of it in {kind.replace('_', ' ')} ({plus_minus(self.differences[kind])})."
            )
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


def compare(run: TrainingRun, source: str = "auto", steps: int = 2) -> Comparison:
    """Estimate and measure `run`, and show the signed difference of each kind. Raises like `measure`."""
    return Comparison(run, estimate(run), measure(run, source, steps))
