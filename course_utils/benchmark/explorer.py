"""Speed of the Explorer: from a control's new value to the message that carries text and figure.

Milliseconds of this thread's processor time, which on an idle machine are those of the clock. What the browser adds
is measured where there is one, by tests/test_browser.py.
"""

import asyncio
import statistics
import time
from collections.abc import Callable
from typing import Any

from ..interactive.explorer import DEFAULTS, dashboard, next_changes, run_of
from .tables import Cell, Table

CASES: dict[str, dict[str, Any]] = {
    "GPT-2 XL on one card": {},
    "Llama-3 8B, LoRA on 4 bits": {"model": "llama3-8b", "trained": "lora-4", "gpu": "RTX4090-24GB"},
    "Llama-3 8B, ZeRO-1 on 8 ranks": {"model": "llama3-8b", "world_size": 8, "zero_stage": 1, "gpu": "H100-80GB"},
    "Llama-3 8B, ZeRO-3 on 8 ranks": {"model": "llama3-8b", "world_size": 8, "zero_stage": 3, "gpu": "H100-80GB"},
    "Mixtral 8x7B, ZeRO-3 on 64 ranks": {
        "model": "mixtral-8x7b", "world_size": 64, "zero_stage": 3, "recompute": "full", "gpu": "H100-80GB",
    },
}  # fmt: skip
SIZES = (1, 2, 4, 8, 16, 32, 64, 128)  # the values that the micro-batch's slider is moved through, each once in a round
REDRAW_MS = 50  # from key to picture, as the course promises; the browser needs its share of it


def explorer_table(quick: bool, report: Callable[[str], None]) -> Table:
    """One row a case: the first redraw, then each further one, the message's size, and what to change next."""
    rows = []
    for name, chosen in CASES.items():
        report(name)
        rows.append((name, *_case(DEFAULTS | chosen, 1 if quick else 5)))
    slowest = max(row[2] for row in rows)
    title = (
        f"A redraw of the Explorer takes up to {slowest:.1f} ms of the kernel, of {REDRAW_MS} ms from key to picture"
    )
    headings = ("case", "first, ms", "median, ms", "slowest, ms", "kB a message", "changes first, ms", "changes, ms")
    notes = (
        "first: a kind of run that this process has not estimated yet",
        "median and slowest: the micro-batch's slider moved on; what the browser adds is not in it",
        "changes: what to change next, weighed when the input rests, after the picture",
    )
    return Table("explorer", title, headings, tuple(rows), notes, "the widget without a browser")


def _case(chosen: dict[str, Any], rounds: int) -> tuple[Cell, ...]:
    first, moved, size = asyncio.run(_moving(chosen, rounds))
    weighed = [_milliseconds(lambda: next_changes(chosen)) for _ in range(1 + rounds)]
    return (
        first, statistics.median(moved), max(moved), round(size / 1000), weighed[0], statistics.median(weighed[1:]),
    )  # fmt: skip


async def _moving(chosen: dict[str, Any], rounds: int) -> tuple[float, list[float], int]:
    """Milliseconds of the first dashboard of its kind and of each move of the slider, and bytes of a message.

    It runs in an event loop, as in a kernel, so that what to change next waits.
    """
    from ..interactive.explorer_widget import DashboardWidget

    run_of(chosen)
    first = _milliseconds(lambda: dashboard(chosen))
    page = DashboardWidget(**chosen)
    slider = page.controls["micro_batch"]
    sizes = [size for _ in range(rounds) for size in (*SIZES, *reversed(SIZES)) if size != chosen["micro_batch"]]
    moved = [_milliseconds(lambda size=size: setattr(slider, "value", size)) for size in sizes]
    return first, moved, len((page.picture.value + page.words.value).encode())


def _milliseconds(call: Callable[[], object]) -> float:
    began = time.thread_time()
    call()
    return 1000 * (time.thread_time() - began)
