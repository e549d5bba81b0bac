"""An allocator to play with: requests as text, a slider, and what it did at each. For notebooks only."""

from contextlib import suppress
from html import escape
from typing import Any

import ipywidgets

from ...allocator.replay import Replay, replay
from ...interactive.html_bars import Picture
from ...interactive.widgets import LAYOUT, STYLE, SliderBox, dropdown
from ...units import MiB
from .figures import segments_figure
from .traces import RULES, reasons, trace_of

CAPACITIES = {"no limit": None} | {f"{size} MiB": size * MiB for size in (24, 40, 60, 80)}
SEGMENTS = {"segments of a fixed size": False, "expandable segments": True}


class AllocatorPlayer(SliderBox):
    """Go through `trace` ("a=4 b=512K -a": MiB, KiB, free) event by event, or type another.

    Begins at `event`, at the last where it is None. In the next cell, `.replayed` is the replay of what has
    been typed. Raises ValueError for a trace that is none.
    """

    invitation = "An allocator to play with: run this cell to step through its events."

    def __init__(self, trace: str = RULES, event: int | None = None) -> None:
        wide = {"width": "868px", "max_width": "100%"}
        most = len(trace_of(trace))
        typed = ipywidgets.Text(
            trace, description="requests", continuous_update=False, style=STYLE, layout=wide
        )
        segments = dropdown("memory in", SEGMENTS, next(iter(SEGMENTS)))
        look = {"continuous_update": False, "style": STYLE, "layout": LAYOUT}
        slider = ipywidgets.IntSlider(event or most, 1, most, description="event", **look)
        gpu = dropdown("the GPU has", CAPACITIES, next(iter(CAPACITIES)))
        controls = {"trace": typed, "segments": segments, "event": slider, "gpu": gpu}
        super().__init__(controls)

    @property
    def replayed(self) -> Replay:
        """The replay of what has been typed. Raises ValueError for what is no trace."""
        chosen = {name: control.value for name, control in self.controls.items()}
        events = trace_of(chosen["trace"])
        if not events:
            raise ValueError("no requests: write a=4 to allocate 4 MiB, b=512K for KiB, -a to free")
        return replay(events, CAPACITIES[chosen["gpu"]], expandable_segments=SEGMENTS[chosen["segments"]])

    def update(self, change: Any = None) -> None:
        """Draw; the slider ends with the trace, or where memory runs out."""
        slider = self.controls["event"]
        with suppress(ValueError), slider.hold_trait_notifications():
            most = max(1, len(self.replayed))
            value = min(slider.value, most)
            slider.max = most
            slider.value = value
        super().update(change)

    def redraw(self) -> tuple[Picture, str]:
        """The segments after the chosen event, and the reason for it."""
        replayed = self.replayed
        if not len(replayed):
            raise ValueError("the first request already fails: " + replayed.message.removesuffix("."))
        at = min(self.controls["event"].value, len(replayed))
        told = f"Event {at} of {len(replayed.requests)}: {escape(reasons(replayed)[at - 1])}"
        if replayed.failure is not None and at == len(replayed):
            told += f" <b>The next event fails:</b> {escape(replayed.message)}"
        return segments_figure(replayed, at), told


allocator_player = AllocatorPlayer
