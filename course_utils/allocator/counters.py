"""Predict a GPU's own counters for a run: the sum of tensors, and what torch counts and reserves on top."""

from dataclasses import dataclass

from ..measurement import Measurement
from ..units import format_bytes, html_table
from .replay import replay


@dataclass(frozen=True, repr=False)
class Counted:
    """The counters at the last step's peak, term by term, in bytes.

    `tensors` is the sum of all tensors; `workspaces` what cuBLAS keeps (where a card is named, or on a GPU);
    `unsplit` what blocks are larger than the tensors in them; `scratch` what a GPU counted inside kernels, 0
    where there is none. `reserved` is what the allocator took from the driver, over the whole run.
    """

    tensors: int
    workspaces: int
    unsplit: int
    scratch: int
    reserved: int
    provenance: str

    @property
    def allocated(self) -> int:
        """The allocator's counter, torch.cuda.max_memory_allocated(): all terms together."""
        return self.tensors + self.workspaces + self.unsplit + self.scratch

    def _rows(self) -> list[tuple[str, str, str]]:
        terms = {
            "tensors": self.tensors,
            "cuBLAS's workspaces": self.workspaces,
            "rest of blocks not split": self.unsplit,
            "scratch inside kernels": self.scratch,
        }
        rows = [(name, size, "") for name, size in terms.items() if size]
        rows += [("allocator's counter", self.allocated, "torch.cuda.max_memory_allocated()")]
        rows += [("reserved", self.reserved, "torch.cuda.max_memory_reserved()")]
        return [(name, format_bytes(size, "GB", 3), where) for name, size, where in rows]

    def __repr__(self) -> str:
        lines = (f"{name:<26}{size:>12}  {where}".rstrip() for name, size, where in self._rows())
        return "\n".join([*lines, self.provenance])

    def _repr_html_(self) -> str:
        return html_table([("counter", "at the peak", "in torch"), *self._rows()], caption=self.provenance)


def counted(source: Measurement) -> Counted:
    """The counters of a measurement: its allocations are sent through the allocator.

    A live measurement's are the GPU's own, and what no rule explains of them is `scratch`. Raises ValueError
    and TypeError as `replay` does.
    """
    replayed = replay(source)
    # Reversed, so that of a step's marks the first one is kept.
    begins = {mark.step: mark.event for mark in reversed(replayed.marks)}
    last = max(begins)
    peak = max(replayed.requested[begins[last] :])
    unsplit = replayed.step_peaks()[last] - peak
    tensors = source.peak - source.breakdown["workspaces"]
    workspaces = source.breakdown["workspaces"]
    if "allocated" not in source.counters:
        return Counted(tensors, workspaces, unsplit, 0, replayed.peak_reserved, replayed.provenance)
    kept = max(workspaces, source.counters.get("workspaces", 0))
    scratch = source.counters["allocated"] - tensors - kept - unsplit
    return Counted(tensors, kept, unsplit, scratch, source.counters["reserved"], replayed.provenance)
