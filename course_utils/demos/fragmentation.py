"""Demo: out of memory with half of the memory free, and the setting that helps.

Large tensors come and go, long-lived ones move into their places, and a large one comes back. On a GPU they
are real, in a process of its own for each setting. The pictures are the allocator's policy replayed with the
same sizes.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from ..allocator.policy import OutOfMemory
from ..allocator.replay import Replay, replay
from ..measuring.comparing import ALLOCATOR_VARIABLES
from ..units import MiB, format_bytes, percent
from .stage import Foreseen, Stage, StepResult, in_words
from .stage_figures import stage_segments

# Shares of the GPU's free memory. Two states do not fit into the place of one activation, so each takes one
# and leaves a hole of nearly half of it.
ACTIVATION = 0.23  # each of four
STATE = 0.12  # each of four, which come when the activations have gone
LATE = 0.2  # one more activation

COUNT = 4
PAGE = 20 * MiB  # sizes are multiples of it, the large pages of an expandable segment
SECONDS = 120  # a process that has not said anything by then is ended
PROGRAM = f"import {__name__} as demo; demo.main()"
CURE = (
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True makes one segment that grows page by page. "
    "The same tensors come in the same order. Does the last one fit now?"
)


def trace(room: int) -> list[tuple[int, str]]:
    """Bytes (negative: freed) and a tensor's name, for a GPU with `room` free. The last come too late."""
    activation = _pages(ACTIVATION * room)
    state = _pages(STATE * room)
    late = _pages(LATE * room)
    if not state:
        raise ValueError(f"no demo fits {room:,} bytes: free some of the GPU's memory")
    activations = [(activation, f"activation {index}") for index in range(1, COUNT + 1)]
    states = [(state, f"state {index}") for index in range(1, COUNT + 1)]
    freed = [(-size, name) for size, name in activations]
    return [*activations, *freed, *states, (late, "next activation")]


def _pages(size: float) -> int:
    """The whole pages in `size` bytes, in bytes."""
    return int(size) // PAGE * PAGE


def play(room: int, allocate: Callable[[int], Any]) -> None:
    """Allocate and free as `trace` says; what lives at the end is freed. Raises what `allocate` raises."""
    held: dict[str, Any] = {}
    for size, name in trace(room):
        if size > 0:
            held[name] = allocate(size)
        else:
            del held[name]


def main() -> None:
    import torch

    message = ""
    try:
        play(torch.cuda.mem_get_info()[0], lambda size: torch.empty(size, dtype=torch.uint8, device="cuda"))
    except torch.OutOfMemoryError as error:
        message = str(error)
    source = f"live on {torch.cuda.get_device_name()} · torch {torch.__version__}"
    print(json.dumps({"message": message, "source": source}))


def in_another_process(expandable: bool) -> dict[str, str]:
    """The `message` and `source` that `main` prints in another process. RuntimeError if that fails."""
    from ..measuring.live import release

    release(None)  # what this process has cached is room that the other one needs
    environment = {name: value for name, value in os.environ.items() if name not in ALLOCATOR_VARIABLES}
    environment["PYTORCH_CUDA_ALLOC_CONF"] = f"expandable_segments:{expandable}"
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    if done.returncode:
        raise RuntimeError(
            f"the program with the tensors ended with {done.returncode}: {done.stderr[-300:].strip()}"
        )
    return json.loads(done.stdout)


def replayed(stage: Stage, expandable: bool) -> Replay:
    return replay(trace(stage.card.room), stage.card.room, expandable_segments=expandable)


def question(stage: Stage) -> str:
    events = trace(stage.card.room)
    activation, state, late = (format_bytes(events[index][0]) for index in (0, -2, -1))
    return (
        f"On {stage.words}, {COUNT} activations of {activation} come and go. Then {COUNT} of Adam's states of"
        f" {state} come, and stay. Now the next activation wants {late}. Is there room?"
    )


def failure(stage: Stage) -> str:
    if not stage.live:
        return str(_failure_of(replayed(stage, expandable=False), stage))
    said = in_another_process(expandable=False)["message"]
    if not said:
        raise RuntimeError(
            "the request should have failed but succeeded: PyTorch's allocator has another policy here"
        )
    return said.split(" If reserved")[0]


def _failure_of(found: Replay, stage: Stage) -> OutOfMemory:
    if found.failure is None:
        raise RuntimeError(f"the request should have failed but fits {stage.words}: there is nothing to show")
    return found.failure


def holes(stage: Stage) -> StepResult:
    found = replayed(stage, expandable=False)
    failed = _failure_of(found, stage)
    title = f"{percent(failed.free_share)} is free, in pieces of at most {format_bytes(failed.largest_free)}"
    words = (
        "Each state sits in a segment that an activation made, and keeps it."
        f" Wanted: {format_bytes(failed.requested)} in one piece."
    )
    return StepResult(words, figure=stage_segments(found.blocks_at(len(found)), title, stage.card.room))


def expandable_segments(stage: Stage) -> StepResult:
    found = replayed(stage, expandable=True)
    said = {"message": "", "source": "the allocator's policy, replayed"}
    if stage.live:
        said = in_another_process(expandable=True)
    if found.failure is not None or said["message"]:
        raise RuntimeError(f"expandable segments should have helped: {found.message or said['message']}")
    title = f"{format_bytes(found.allocated[-1])} in one segment, states side by side"
    figure = stage_segments(found.blocks_at(len(found)), title, stage.card.room)
    return StepResult(f"It fits ({said['source']}).", found.peak_allocated, figure=figure)


def foresee(stage: Stage) -> list[Foreseen]:
    plain = replayed(stage, expandable=False)
    expandable = replayed(stage, expandable=True)
    words = f"{format_bytes(plain.requests[-1].bytes)} more than fit in one piece, on purpose"
    if plain.failure is not None:
        words += f" with {percent(plain.failure.free_share)} free"
    return [
        Foreseen(words, plain.failure is not None),
        Foreseen("the same tensors in expandable segments fit", expandable.failure is None),
    ]


FRAGMENTATION = in_words(
    "fragmentation", (question, failure, holes, lambda _: CURE, expandable_segments), foresee
)
