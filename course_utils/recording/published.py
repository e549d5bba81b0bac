"""Published steps on the GPU that is here: what this card counts of the runs that other people's cards have counted.

The steps are those of tests/published, in plain torch; the simulation says first what this card would count.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from ..benchmark.published import Row, family_of, published_rows, say
from ..errors import GpuOutOfMemory
from ..estimating.workspaces import installed_torch
from ..measuring.live import released
from .hardware import first_line

Send = Callable[..., None]

MOMENTS = ("start", "peak", "end")


def rows_of(topic: str) -> list[Row]:
    """The rows of a task: those whose ids the topic names, with commas between."""
    named = topic.split(",")
    return [row for row in published_rows() if row.id in named]


def send_said(topic: str, send: Send) -> None:
    """For each row, part "said ID": what the simulation says for a card like this one under this torch, by moment."""
    capability = torch.cuda.get_device_capability()
    for row in rows_of(topic):
        here = replace(row, capability=capability, torch=installed_torch())
        said = {moment: say(replace(here, moment=moment)) for moment in MOMENTS}
        send(f"said {row.id}", **{moment: [one.allocated, one.reserved] for moment, one in said.items()})


def send_counted(topic: str, send: Send) -> None:
    """For each row, part "counted ID": bytes allocated and reserved by moment, as `counted` has them; or "error"."""
    for row in rows_of(topic):
        try:
            with released(lambda asked: asked):
                send(f"counted {row.id}", **dict(counted(row)))
        except (GpuOutOfMemory, RuntimeError, TypeError) as error:
            send(f"counted {row.id}", error=first_line(error))


def counted(row: Row) -> Iterator[tuple[str, list[int]]]:
    """Bytes allocated and reserved before the first step, at the last step's peak, and after it."""
    how: dict[str, Any] = json.loads(json.dumps(row.how))
    step = family_of(row.family, live=True)
    yield from step(None, **how).items()
