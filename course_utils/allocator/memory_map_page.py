"""The memory map with a slider: one HTML file with the life of every tensor and the script that draws it."""

import json
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from ..figures.axes import words
from ..figures.canvas import Figure
from ..figures.themes import DARK, image
from ..units import BLOCK, format_bytes
from .memory_map import FILLS, HATCHES, bytes_in_a_row, conclusion, memory_map, telling_event
from .policy import TAKEN
from .replay import Playback, Replay, check_replay

MOST_BLOCKS = 6_000  # the largest tensors, as many as are drawn; the others are narrower than a pixel
HEIGHT = 680  # pixels that the page takes in a notebook
TEMPLATE = Path(__file__).with_name("memory_map_page.html").read_text(encoding="utf-8")


@dataclass(frozen=True)
class Page:
    """A whole HTML document, its description, and a still picture for viewers that run no scripts."""

    html: str = field(repr=False)
    alt: str
    still: Figure = field(repr=False)

    def __repr__(self) -> str:
        return self.alt

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        quoted = self.html.replace("&", "&amp;").replace("'", "&#39;")  # most of it is full of double quotes
        frame = (
            f'<iframe title="{escape(self.alt)}" sandbox="allow-scripts" srcdoc=\'{quoted}\' '
            f'style="width:100%;max-width:900px;height:{HEIGHT}px;border:0"></iframe>'
        )
        still = image(without_tips(self.still.svg), self.still.alt)
        still = f"<details><summary>A still picture of it</summary>{still}</details>"
        return {"text/html": frame + still, "text/plain": self.alt}

    def save(self, path: str | Path) -> Path:
        """Write the page to `path` and return that path. Raises ValueError unless it ends in .html."""
        path = Path(path)
        if path.suffix != ".html":
            raise ValueError(f"{path.name!r}: the page is HTML, so its name must end in .html")
        path.write_text(self.html, encoding="utf-8")
        return path


LOOK = r'height="(.+?)" fill="(.+?)" data-look="\w+"(?:/>|>.+</rect>)\n'
STRETCH = re.compile(rf'<rect x="(.+?)" y="(.+?)" width="(.+?)" {LOOK}')
SEAM = re.compile(r'<line x1="(.+?)" y1="(.+?)" x2=".+?" y2="(.+?)" stroke="(.+?)" stroke-width="0.8"/>\n')


def without_tips(svg: str) -> str:
    """A map with one path for all stretches of a color: a third of the text. An image shows no tips."""
    paths = defaultdict[str, str](str)
    for x, y, width, height, fill in STRETCH.findall(svg):
        paths[f'fill="{fill}"'] += f"M{x} {y}h{width}v{height}h-{width}z"
    for x, y, end, ink in SEAM.findall(svg):
        paths[f'stroke="{ink}" stroke-width="0.8"'] += f"M{x} {y}V{end}"
    head, paper, rest = SEAM.sub("", STRETCH.sub("", svg)).partition('fill="#FFFFFF"/>\n')
    return head + paper + "\n".join(f'<path d="{data}" {look}/>' for look, data in paths.items()) + rest


def memory_map_page(replayed: Replay) -> Page:
    """A page with a slider that steps through the memory map event by event.

    It needs no network and no kernel. In a notebook it shows itself; `.save("map.html")` writes it. Raises
    ValueError for a replay without events, TypeError for what is no replay.
    """
    check_replay(replayed)
    if not len(replayed):
        raise ValueError("this replay holds no events, so there is nothing to step through")
    title = conclusion(replayed, telling_event(replayed))
    still = memory_map(replayed)
    data = page_data(replayed)
    left_out = data["left_out"]
    few = ""
    if left_out:
        few = f"{left_out:,} tensors of at most {format_bytes(data['smallest'])} are not drawn"
    note = " · ".join(filter(None, (few, replayed.provenance)))
    text = json.dumps(short(data), separators=(",", ":"), ensure_ascii=False).replace("</", "<\\/")
    alt = f"{title}. A map of the memory with a slider over {len(replayed):,} events. {still.alt}"
    html = TEMPLATE.replace("@TITLE@", escape(title)).replace("@NOTE@", escape(note))
    return Page(html.replace("@DATA@", text).replace("@DARK@", json.dumps(DARK)), alt, still)


def page_data(replayed: Replay) -> dict[str, Any]:
    """The data for the page's script.

    Places and sizes count 512-byte units, events count from 0 (nothing yet). `ranges` (what the driver takes
    back as one: a segment, or a page) and `blocks` are rows of place, size, first event and last event at
    which they are there; a block goes on with the number of its label, which is numbers of `parts`.
    """
    ranges, blocks = _lives_of(replayed)
    sizes = {start: size for start, size, *_ in ranges.rows}
    starts = sorted(sizes)
    before = list(accumulate((sizes[start] for start in starts), initial=0))
    total = max(before[-1], replayed.capacity or 0) // BLOCK

    def placed(row: Sequence[Any]) -> list[int]:
        """An address's place in the map, which has no gaps."""
        address, size, born, died, _ = row
        index = bisect_right(starts, address) - 1
        return [(before[index] + address - starts[index]) // BLOCK, size // BLOCK, born, died]

    drawn = sorted(blocks.rows, key=lambda block: -block[1])[:MOST_BLOCKS]
    # Each label, and each of its parts, is numbered when it first comes.
    labels: dict[tuple[str, ...], int] = {}
    parts: dict[str, int] = {}
    return {
        "events": len(replayed),
        "total": total,
        "row": bytes_in_a_row([size // BLOCK for size in sizes.values()], total),
        "start": replayed.peak_event,
        "ranges": [placed(row) for row in ranges.rows],
        "blocks": [
            [*placed(row), labels.setdefault(_description(replayed, row[4]), len(labels))] for row in drawn
        ],
        "labels": [[parts.setdefault(part, len(parts)) for part in label] for label in labels],
        "parts": list(parts),
        "left_out": len(blocks.rows) - len(drawn),
        "smallest": drawn[-1][1] if drawn else 0,
        "allocated": _steps(replayed.allocated),
        "reserved": _steps(replayed.reserved),
        "marks": [[mark.event, f"step {mark.step}, {words(mark.phase)}"] for mark in replayed.marks],
        "failure": replayed.message,
        "fills": FILLS,
        "hatches": HATCHES,
    }


def _lives_of(replayed: Replay) -> tuple["_Lives", "_Lives"]:
    """The areas that the driver takes back as one, and the blocks, each with the events of its life."""
    playback = Playback(replayed.capacity, replayed.choices)
    allocator = playback.allocator
    events = len(replayed)
    ranges = _Lives(events)
    blocks = _Lives(events)
    for event, request in enumerate(replayed.requests[:events], start=1):
        known = len(allocator.driver_calls)
        address = playback.perform(request)
        for call in allocator.driver_calls[known:]:
            # Pages are mapped many at a time, but may be unmapped one by one.
            step = allocator.pages[call.small] if call.action.endswith("map") else call.bytes
            for start in range(call.address, call.address + call.bytes, step):
                ranges.follow(start, step if TAKEN[call.action] > 0 else 0, event)
        size = allocator.block_size(address) if request.bytes > 0 else 0
        blocks.follow(address, size, event, request.name)
    return ranges, blocks


def short(data: dict[str, Any]) -> dict[str, Any]:
    """The same in half the text: sizes by number, events as steps from the one before, no zeros."""
    sizes = sorted({0, *(row[1] for row in data["blocks"]), *map(abs, data["allocated"])})
    number = {size: index for index, size in enumerate(sizes)}
    blocks = sorted(data["blocks"], key=lambda row: row[2])
    steps = [now[2] - before[2] for before, now in pairwise([[0, 0, 0], *blocks])]
    return data | {
        "sizes": sizes,
        "allocated": [number[step] if step > 0 else -number[-step] for step in data["allocated"]],
        "blocks": [
            [place, number[size], step, died - born, label]
            for step, (place, size, born, died, label) in zip(steps, blocks, strict=True)
        ],
        "reserved": [[event, step] for event, step in enumerate(data["reserved"], start=1) if step],
    }


class _Lives:
    """Rows of address, bytes, first event, last event and name of what was there."""

    def __init__(self, events: int) -> None:
        self.events = events
        self.rows = list[list[Any]]()
        self._there = dict[int, list[Any]]()

    def follow(self, address: int, size: int, event: int, name: Any = None) -> None:
        """Note that `size` bytes are there from this event on, or with 0 no longer."""
        if size:
            self._there[address] = [address, size, event, self.events, name]
            self.rows.append(self._there[address])
        else:
            self._there.pop(address)[3] = event - 1


def _steps(values: Sequence[int]) -> list[int]:
    """Each value's difference from the one before, in units: short numbers make a small page."""
    return [(after - before) // BLOCK for before, after in zip([0, *values], values, strict=False)]


def _description(replayed: Replay, name: Any) -> tuple[str, ...]:
    """A tensor's kind, then what is known of it in pieces that many have in common."""
    if not replayed.allocations:
        return "tensors", str(name)
    item = replayed.allocations[name]
    shape = "×".join(str(size) for size in item.shape)
    module = re.split("(?<= of )", item.module or "the network")
    return item.kind, f"{item.operation} in ", *module, f", {shape} {item.dtype}"
