"""A step watched by nobody, by the course's tracker, by torch's MemTracker; `python tests/step_speed.py`
times it.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.distributed._tools.mem_tracker import MemTracker

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # where this file is run alone

from speeds import seconds_of

from course_utils.measuring.counting import Unwatched
from course_utils.measuring.simulated import simulated_gpu
from course_utils.measuring.step import Training
from course_utils.measuring.tracker import Tracker
from course_utils.run import TrainingRun

TIMES_FASTER = 15  # as the course promises, than under MemTracker


def step_seconds(run: TrainingRun, second_step: Callable[[Any], float]) -> float:
    """Seconds of the second simulated step of `run`, as `second_step` watches a training."""
    with simulated_gpu(run.attention):
        return second_step(Training(run, "cuda", simulated=True))


def _unwatched(training: Any) -> float:
    training.step(Unwatched())
    return seconds_of(lambda: training.step(Unwatched()))


def _tracked(training: Any) -> float:
    with Tracker("cuda") as tracker:
        tracker.watch(training.network, training.named_states)
        tracker.bind("inputs", [training.tokens, training.targets])
        tracker.step = 1
        training.step(tracker)
        tracker.step = 2
        return seconds_of(lambda: training.step(tracker))


def _memtracked(training: Any) -> float:
    peer = MemTracker()
    peer.track_external(training.network, training.optimizer, training.tokens, training.targets)
    with peer:
        training.step(Unwatched())
        peer.reset_mod_stats()  # it refuses a second step otherwise
        return seconds_of(lambda: training.step(Unwatched()))


def step_times(run: TrainingRun, tries: int) -> dict[str, float]:
    """The best `step_seconds` for each watcher: of several tries, or of one for MemTracker, which takes so
    long.

    Tracked and untracked steps alternate: a processor's clock changes from one second to the next.
    """
    turns = [(step_seconds(run, _unwatched), step_seconds(run, _tracked)) for _ in range(tries)]
    nobody, tracker = map(min, zip(*turns, strict=True))
    return {"nobody": nobody, "tracker": tracker, "memtracker": step_seconds(run, _memtracked)}


if __name__ == "__main__":
    times = step_times(TrainingRun("gpt2-xl", 4, 512), tries=3)
    print(", ".join(f"{name} {1000 * seconds:,.1f} ms" for name, seconds in times.items()))
    print(f"MemTracker over ours: {times['memtracker'] / times['tracker']:.1f}, promised {TIMES_FASTER}")
