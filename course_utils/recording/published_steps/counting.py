"""Published steps on the GPU that is here: runs that other people's cards have counted, counted by this one.

The steps are those of tests/published_models, in plain torch; the simulation says first what this card
would count.
"""

from collections.abc import Callable
from dataclasses import replace

import torch

from ...errors import GpuOutOfMemory
from ...estimating.workspaces import installed_torch
from ...measuring.live import released
from ..hardware import first_line
from . import Row, family_of, published_rows, say

Send = Callable[..., None]

MOMENTS = ("start", "peak", "end")


def rows_of(topic: str) -> list[Row]:
    """The rows of a task: those whose ids the topic names, with commas between."""
    named = topic.split(",")
    return [row for row in published_rows() if row.id in named]


def send_said(topic: str, send: Send) -> None:
    """Part "said ID" for each row: the simulation of a card like this one under this torch, by moment."""
    capability = torch.cuda.get_device_capability()
    for row in rows_of(topic):
        here = replace(row, capability=capability, torch=installed_torch())
        counters: dict[str, list[int]] = {}
        for moment in MOMENTS:
            said = say(replace(here, moment=moment))
            counters[moment] = [said.allocated, said.reserved]
        send(f"said {row.id}", **counters)


def send_counted(topic: str, send: Send) -> None:
    """Part "counted ID" for each row: bytes allocated and reserved by moment; or "error".

    The moments are before the first step ("start"), the last step's peak, and after it ("end").
    """
    for row in rows_of(topic):
        try:
            with released(lambda asked: asked):
                count = family_of(row.family, live=True)
                send(f"counted {row.id}", **count(None, **row.how))
        except (GpuOutOfMemory, RuntimeError, TypeError) as error:
            send(f"counted {row.id}", error=first_line(error))
