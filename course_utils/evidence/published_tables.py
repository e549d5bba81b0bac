"""Tables of what GPUs counted elsewhere, against the simulated GPU."""

from collections.abc import Callable, Sequence
from pathlib import Path

from ..units import format_bytes
from .published import COUNTERS, TEN, Row, Said, answered_rows, percent, published_rows, say
from .tables import BIAS_HEADINGS, Cell, Table, bias_of

MUCH = 1.0
"""A difference beyond this many percent is explained, or listed as not understood."""


def tables(quick: bool, report: Callable[[str], None]) -> list[Table]:
    """The summary by counter, then every row, run anew and compared with what was frozen.

    `quick` takes one row of each family.
    """
    everything = published_rows()
    rows = [row for row in everything if row.family]
    if quick:
        rows = list({row.family: row for row in rows}.values())
    answers: dict[str, Said] = {}
    for number, row in enumerate(rows, start=1):
        answers[row.id] = say(row)
        report(f"{number} of {len(rows)}: {row.id}")
    changed = [row.id for row in rows if answers[row.id] != row.said]
    note = f"Run again just now: {len(rows) - len(changed)} of {len(rows)} rows equal their stored answer."
    left_out = (f"Not covered: {row.id}, {row.printed}. {row.gap}." for row in everything if not row.family)
    notes = (note, *(f"Differs from its stored answer: {name}." for name in changed), *left_out)
    return [summary(rows, answers, notes), each(rows, answers)]


def summary(rows: Sequence[Row], answers: dict[str, Said], notes: Sequence[str] = ()) -> Table:
    """Errors by counter and certainty, with their bias."""
    lines: list[tuple[Cell, ...]] = []
    for certain in (True, False):
        for counter in COUNTERS:
            alike = [row for row in rows if row.certain == certain and row.counter == counter]
            ratios = [answers[row.id].of(row) / row.bytes for row in alike]
            if ratios:
                worst = max(abs(100 * (ratio - 1)) for ratio in ratios)
                lines.append((counter, "yes" if certain else "in part", len(ratios), worst, *bias_of(ratios)))
    headings = ("counter", "configuration known", "rows", "largest error, %", *BIAS_HEADINGS)
    title = "What GPUs counted elsewhere, against the simulated GPU"
    return Table("published-gpus", title, headings, tuple(lines), tuple(notes), "simulated GPU")


def ten_rows() -> Table:
    """Ten rows of as many models and sources as possible: counted by a GPU, and said by the simulation."""
    known = {row.id: row for row in answered_rows()}
    lines: list[tuple[Cell, ...]] = []
    for name in TEN:
        row = known[name]
        gpu = row.gpu.partition(" (")[0]
        counted = format_bytes(row.bytes, "GB", 3)
        ours = format_bytes(row.said.of(row), "GB", 3)
        off = round(percent(row, row.said), 2) + 0.0  # no negative zero
        source = _short_source(row.source)
        lines.append((row.id, gpu, row.counter, row.printed, counted, ours, f"{off:+.2f} %", source))
    headings = ("what was run", "GPU", "counter", "published", "in GB", "ours", "error", "source")
    return Table("ten-rows", "Counted by GPUs elsewhere, and simulated", headings, tuple(lines))


def _short_source(source: str) -> str:
    """`repository@commit` and the file's name, of "repository@commit:path § place"."""
    place, _, path = source.partition(" §")[0].partition(":")
    repository, _, commit = place.partition("@")
    return f"`{repository}@{commit[:9]}` {Path(path).name}".strip()


def each(rows: Sequence[Row], answers: dict[str, Said]) -> Table:
    """Each row, the furthest off first; a difference beyond `MUCH` has its reason, or "not understood"."""
    lines: list[tuple[Cell, ...]] = []
    for row in sorted(rows, key=lambda row: -abs(percent(row, answers[row.id]))):
        answer = answers[row.id]
        off = percent(row, answer)
        reason = row.gap
        if not reason and abs(off) > MUCH:
            reason = "not understood"
        lines.append((row.id, row.gpu, row.counter, row.printed, answer.of(row), off, reason, row.source))
    headings = ("row", "GPU", "counter", "published", "ours, bytes", "error, %", "why", "source")
    return Table("published-gpus-rows", "Each published figure", headings, tuple(lines))
