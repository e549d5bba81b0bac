"""Demo: out of memory with half of the memory free, and the setting that helps.

On a GPU the tensors are real, in a process of its own for each setting. The pictures are the allocator's policy
replayed with the same sizes.
"""

import json
import os
import subprocess
import sys

from ..allocator.policy import OutOfMemory
from ..allocator.replay import Replay, replay
from ..measuring.comparing import ALLOCATOR_VARIABLES
from ..units import format_bytes, percent
from .holes import COUNT, trace
from .stage import Demo, DemoStep, Foreseen, Stage, StepResult
from .stage_figures import stage_segments

REPLAYED = "the allocator's policy, replayed"
CURE = (
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True makes one segment that grows page by page. "
    "Same tensors, same order: does the last one fit now?"
)
SECONDS = 120  # a process that has not said anything by then is ended


def replayed(stage: Stage, expandable: bool) -> Replay:
    """The tensors through the allocator's policy on this card."""
    return replay(trace(stage.card.room), stage.card.room, expandable_segments=expandable)


def question(stage: Stage) -> StepResult:
    events = trace(stage.card.room)
    activation, state, late = events[0][0], events[-2][0], events[-1][0]
    return StepResult(
        f"On {stage.words}, {COUNT} activations of {format_bytes(activation)} come and go. Then {COUNT} of Adam's "
        f"states of {format_bytes(state)} come, and stay. Now the next activation wants {format_bytes(late)}. "
        "Is there room?"
    )


def failure(stage: Stage) -> StepResult:
    """The last request fails; RuntimeError if it does not."""
    failed = _failure_of(replayed(stage, expandable=False), stage)
    if not stage.live:
        return StepResult(str(failed), source=REPLAYED)
    said = in_another_process(expandable=False)
    if not said["message"]:
        raise RuntimeError("the request was meant to fail, and succeeded: PyTorch's allocator has another policy here")
    return StepResult(said["message"].split(" If reserved")[0], source=said["source"])


def holes(stage: Stage) -> StepResult:
    found = replayed(stage, expandable=False)
    failed = _failure_of(found, stage)
    title = f"{percent(failed.free_share)} is free, in pieces of at most {format_bytes(failed.largest_free)}"
    return StepResult(
        f"Each state sits in a segment that an activation made, and keeps it. Wanted: {format_bytes(failed.requested)} "
        "in one piece.",
        figure=stage_segments(found.blocks_at(len(found)), title, stage.card.room),
    )


def expandable_segments(stage: Stage) -> StepResult:
    """The same requests succeed; RuntimeError if they do not."""
    found = replayed(stage, expandable=True)
    said = in_another_process(expandable=True) if stage.live else {"message": ""}
    if found.failure is not None or said["message"]:
        raise RuntimeError(f"expandable segments were meant to help: {found.message or said['message']}")
    source = said["source"] if stage.live else REPLAYED
    title = f"{format_bytes(found.allocated[-1])} in one segment, states side by side"
    figure = stage_segments(found.blocks_at(len(found)), title, stage.card.room)
    return StepResult(f"It fits ({source}).", found.peak_allocated, source, figure=figure)


def in_another_process(expandable: bool) -> dict[str, str]:
    """The `message` and `source` of a program that asks the GPU for these tensors; RuntimeError if it fails."""
    from ..measuring.live import release

    release(None)  # what this process has cached is room that the other one needs
    environment = {name: value for name, value in os.environ.items() if name not in ALLOCATOR_VARIABLES}
    environment["PYTORCH_CUDA_ALLOC_CONF"] = f"expandable_segments:{expandable}"
    done = subprocess.run(
        [sys.executable, "-m", "course_utils.demos.holes"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"the program with the tensors ended with {done.returncode}: {done.stderr[-300:].strip()}")
    said = json.loads(done.stdout)
    return {"message": said["message"], "source": f"live on {said['device']} · torch {said['torch']}"}


def _failure_of(found: Replay, stage: Stage) -> OutOfMemory:
    if found.failure is None:
        raise RuntimeError(f"the request was meant to fail, and fits {stage.words}: nothing to show")
    return found.failure


def foresee(stage: Stage) -> list[Foreseen]:
    """The same tensors twice: they fail, then they fit."""
    plain, expandable = replayed(stage, expandable=False), replayed(stage, expandable=True)
    free = f" with {percent(plain.failure.free_share)} free" if plain.failure else ""
    return [
        Foreseen(f"{format_bytes(plain.requests[-1].bytes)} more than fit in one piece, on purpose{free}", bool(free)),
        Foreseen("the same tensors in expandable segments fit", expandable.failure is None),
    ]


FRAGMENTATION = Demo(
    "Free, but in pieces",
    "A request fails with half of the memory free, and succeeds with expandable segments.",
    (
        DemoStep("Guess first", "Is there room for one more tensor?", question),
        DemoStep("Out of memory", "The request fails.", failure, fails=True),
        DemoStep("Where the free memory is", "Free memory in used segments helps nobody.", holes),
        DemoStep("A setting", "A segment of fixed size cannot grow. Another kind can.", lambda _: StepResult(CURE)),
        DemoStep("Expandable segments", "The states lie side by side, and behind them is room.", expandable_segments),
    ),
    foresee,
)
