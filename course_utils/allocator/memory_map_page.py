"""The page behind `memory_map_page`: one HTML file with the data of every event, a slider, and the script that draws.

Each tensor is in it once, with its place and the events of its birth and death, so every event can be shown and the
page stays small.
"""

import json
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import accumulate
from math import ceil
from pathlib import Path
from typing import Any

from ..figures.axes import words
from ..figures.canvas import Figure
from ..units import BLOCK, format_bytes
from .policy import CachingAllocator, DriverCall
from .replay import Playback, Replay

ROWS = 14  # rows of a map, unless its segments are few and alike: then each has a row of its own
MOST_BLOCKS = 6_000  # the largest tensors, as many as are drawn; the others are narrower than a pixel
HEIGHT = 680  # pixels that the page takes in a notebook


@dataclass(frozen=True)
class Page:
    """A whole HTML document and its description. In a notebook it shows itself, with a still picture below.

    The still picture is for readers of the stored notebook: viewers take scripts out of what they have not run.
    """

    html: str = field(repr=False)
    alt: str
    still: Figure = field(repr=False)

    def __repr__(self) -> str:
        return self.alt

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        frame = (
            f'<iframe title="{escape(self.alt)}" srcdoc="{escape(self.html)}" sandbox="allow-scripts" '
            f'style="width:100%;max-width:900px;height:{HEIGHT}px;border:0;background:#FFFFFF"></iframe>'
        )
        still = f"<details><summary>A still picture of it</summary>{self.still.html}</details>"
        return {"text/html": frame + still, "text/plain": self.alt}

    def save(self, path: str | Path) -> Path:
        """Write the page to `path` and return that path. Raises ValueError unless it ends in .html."""
        path = Path(path)
        if path.suffix != ".html":
            raise ValueError(f"{path.name!r}: the page is HTML, so its name must end in .html")
        path.write_text(self.html, encoding="utf-8")
        return path


def bytes_in_a_row(segments: Sequence[int], total: int) -> int:
    """Bytes in a row of the map: one segment where all are alike and few, else a share of `total`."""
    alike = len(set(segments)) == 1 and total <= ROWS * segments[0]
    return segments[0] if alike else ceil(total / ROWS)


def page_of(replayed: Replay, title: str, still: Figure, fills: Mapping[str, str], hatches: Mapping[str, str]) -> Page:
    """The page of a replay. `fills` and `hatches` are the colors of each look."""
    data = page_data(replayed)
    left_out = data["left_out"]
    few = f"{left_out:,} tensors of at most {format_bytes(data['smallest'])} are not drawn" if left_out else ""
    note = " · ".join(filter(None, (few, replayed.provenance)))
    data["fills"], data["hatches"] = dict(fills), dict(hatches)
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False).replace("</", "<\\/")
    alt = f"{title}. A map of the memory with a slider over {len(replayed):,} events. {still.alt}"
    html = TEMPLATE.replace("@TITLE@", escape(title)).replace("@NOTE@", escape(note))
    return Page(html.replace("@DATA@", text), alt, still)


def page_data(replayed: Replay) -> dict[str, Any]:
    """The data for the page's script. Places and sizes count 512-byte units, events count from 0 (nothing yet).

    `ranges` and `blocks` are rows of place, size, first event and last event at which they are there; a range goes on
    with the size of the pages in which it can be given back, a block with the number of its label.
    """
    playback = Playback(CachingAllocator(replayed.capacity, **replayed.choices))
    pages = {pool.small: pool.page for pool in (playback.allocator.small, playback.allocator.large)}
    history = _History(len(replayed), pages)
    calls = playback.allocator.driver_calls
    for event, request in enumerate(replayed.requests[: len(replayed)], start=1):
        known = len(calls)
        address = playback.perform(request)
        for call in calls[known:]:
            history.drive(call, event)
        size = playback.allocator.block_size(address) if request.bytes > 0 else 0
        history.hold(address, size, request.name, event)
    return history.data(replayed)


class _History:
    """Ranges of addresses that were reserved and blocks that held a tensor, each with its first and last event."""

    def __init__(self, events: int, pages: Mapping[bool, int]) -> None:
        self.events, self.pages = events, pages
        self.ranges: list[tuple[int, int, int, int, int]] = []
        self.blocks: list[tuple[int, int, int, int, Any]] = []
        self._open_ranges: dict[int, tuple[int, int, int]] = {}
        self._open_blocks: dict[int, tuple[int, int, Any]] = {}

    def drive(self, call: DriverCall, event: int) -> None:
        """Follow a call to the driver: a range begins, or what lies in a range ends."""
        if call.action in ("segment_alloc", "segment_map"):
            page = self.pages[call.small] if call.action == "segment_map" else call.bytes
            self._open_ranges[call.address] = (call.bytes, event, page)
            return
        end = call.address + call.bytes
        for start, (size, born, page) in list(self._open_ranges.items()):
            if start >= end or start + size <= call.address:
                continue
            del self._open_ranges[start]
            first, last = max(start, call.address), min(start + size, end)
            self.ranges.append((first, last - first, born, event - 1, page))
            for left, right in ((start, first), (last, start + size)):
                if left < right:  # pages that stay mapped on either side
                    self._open_ranges[left] = (right - left, born, page)

    def hold(self, address: int, size: int, name: Any, event: int) -> None:
        """Note that a tensor was put into a block of `size` bytes, or with 0 taken out of it."""
        if size:
            self._open_blocks[address] = (size, event, name)
        else:
            size, born, name = self._open_blocks.pop(address)
            self.blocks.append((address, size, born, event - 1, name))

    def data(self, replayed: Replay) -> dict[str, Any]:
        """The rows for the page; what is still there ends with the last event."""
        self.ranges += [(at, size, born, self.events, page) for at, (size, born, page) in self._open_ranges.items()]
        self.blocks += [(at, size, born, self.events, name) for at, (size, born, name) in self._open_blocks.items()]
        place, total = _places([(start, start + size) for start, size, *_ in self.ranges])
        total = max(total, (replayed.capacity or 0) // BLOCK)
        ranges = [
            [place(start), size // BLOCK, born, died, page // BLOCK] for start, size, born, died, page in self.ranges
        ]
        drawn = sorted(self.blocks, key=lambda block: -block[1])[:MOST_BLOCKS]
        labels: dict[tuple[str, str], int] = {}
        rows = []
        for start, size, born, died, name in drawn:
            label = labels.setdefault(_description(replayed, name), len(labels))
            rows.append([place(start), size // BLOCK, born, died, label])
        return {
            "events": self.events, "total": total, "row": bytes_in_a_row([size for _, size, *_ in ranges], total),
            "start": replayed.peak_event, "ranges": ranges, "blocks": rows, "labels": [list(label) for label in labels],
            "left_out": len(self.blocks) - len(drawn), "smallest": drawn[-1][1] if drawn else 0,
            "allocated": _steps(replayed.allocated), "reserved": _steps(replayed.reserved),
            "marks": [[mark.event, f"step {mark.step}, {words(mark.phase)}"] for mark in replayed.marks],
            "failure": replayed.message,
        }  # fmt: skip


def _places(ranges: Sequence[tuple[int, int]]) -> tuple[Any, int]:
    """A function from an address to its place in the map, which has no gaps, and the map's size; in units."""
    merged: list[list[int]] = []
    for start, end in sorted(ranges):
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    offsets = list(accumulate((end - start for start, end in merged), initial=0))
    starts = [start for start, _ in merged]

    def place(address: int) -> int:
        index = bisect_right(starts, address) - 1
        return (offsets[index] + address - starts[index]) // BLOCK

    return place, offsets[-1] // BLOCK


def _steps(values: Sequence[int]) -> list[int]:
    """Each value's difference from the one before, in units: short numbers make a small page."""
    return [(after - before) // BLOCK for before, after in zip([0, *values], values, strict=False)]


def _description(replayed: Replay, name: Any) -> tuple[str, str]:
    if not replayed.allocations:
        return "tensors", str(name)
    item = replayed.allocations[name]
    shape = "×".join(str(size) for size in item.shape)
    return item.kind, f"{item.operation} in {item.module or 'the network'}, {shape} {item.dtype}"


TEMPLATE = Path(__file__).with_name("memory_map_page.html").read_text(encoding="utf-8")
