"""The allocator's model beside real GPUs' histories: bytes reserved after every allocation and free, and each step."""

from collections.abc import Sequence
from dataclasses import dataclass

from ..allocator.snapshots import Agreement, compare_with_gpu
from ..measuring.recorded import Recording, newest
from ..recording.histories import unpacked
from ..recording.tasks import EXPANDABLE
from .gpu import devices, nothing
from .tables import Cell, Table

TITLE = "The allocator's model against real histories"


@dataclass(frozen=True)
class History:
    """A recorded history and its replay, made now; `steps` has the bytes reserved at each training step's end:
    counted by the GPU, in its history, in the replay as it was recorded.
    """

    recording: Recording
    agreement: Agreement
    steps: Sequence[dict[str, int]]

    @property
    def equal(self) -> int:
        """After how many of all allocations and frees the same bytes are reserved."""
        return sum(not gap for gap in self.agreement.differences)

    @property
    def settings(self) -> str:
        """ "default", or what was set."""
        environment = self.recording.line.content.get("environment", {})
        return "expandable segments" if environment == EXPANDABLE else ", ".join(environment.values()) or "default"

    @property
    def steps_equal(self) -> int:
        """At how many training steps' ends counter, history and replay say the same."""
        return sum(len({step["counted"], step["history"], step["replayed"]}) == 1 for step in self.steps)


def histories() -> list[History]:
    """Every history that is kept, replayed. ValueError for one that is damaged."""
    found = [(item, item.parts["history"]) for item in newest("history") if "history" in item.parts.get("history", {})]
    return [History(item, compare_with_gpu(unpacked(part["history"])), part.get("steps", ())) for item, part in found]


def gpu_allocator_tables() -> list[Table]:
    """For each history: at how many moments the replay reserves what the GPU reserved, and the largest difference."""
    found = histories()
    if not found:
        return [nothing("gpu-allocator", TITLE)]
    rows: list[tuple[Cell, ...]] = []
    for history in found:
        told = history.agreement
        steps = f"{history.steps_equal} of {len(history.steps)}"
        peaks = (max(told.real, default=0), max(told.replayed, default=0))
        name = history.recording.task.removeprefix("history of ").rpartition(", ")[0]
        rows.append((name, history.settings, len(told.real), history.equal, steps, *peaks, told.largest_difference))
    headings = ("run", "settings", "moments", "equal", "steps equal", "most reserved", "replayed", "largest difference")
    source = devices([history.recording for history in found])
    return [Table("gpu-allocator", TITLE, headings, tuple(rows), (said(found),), source)]


def said(found: Sequence[History]) -> str:
    """The agreement in a sentence for each setting."""
    parts = []
    for settings in dict.fromkeys(history.settings for history in found):
        those = [history for history in found if history.settings == settings]
        moments, equal = sum(len(one.agreement.real) for one in those), sum(one.equal for one in those)
        exact = sum(one.agreement.exact for one in those)
        parts.append(
            f"{settings}: {exact} of {len(those)} histories equal throughout, {equal:,} of {moments:,} moments"
        )
    return "; ".join(parts) + "."
