"""Speed: estimates, imports, a tracked step. Run `python tests/speeds.py` on a quiet machine.

Seconds are the processor's, and of several tries the best: what else runs on the machine can only slow a try
down. Tests count calls instead (tests/counting.py).
"""

import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # where this file is run alone

from torch.distributed._tools.mem_tracker import MemTracker

from course_utils.estimating import estimate
from course_utils.interactive.course_files import ROOT
from course_utils.measuring.devices import Unwatched
from course_utils.measuring.simulated import simulated_gpu
from course_utils.measuring.step import Training
from course_utils.measuring.tracker import Tracker
from course_utils.run import TrainingRun

Clock = Callable[[Callable[[], object]], float]


def seconds_of(work: Callable[[], object]) -> float:
    started = time.process_time()
    work()
    return time.process_time() - started


# Closed forms


def fresh_runs(model: str, count: int) -> list[TrainingRun]:
    """Runs that differ from each other, so that no cache answers for a whole one."""
    kernels = ("flash", "eager")
    recomputes = ("none", "full")
    return [
        TrainingRun(
            model, 1 + number // 4, 512, attention=kernels[number % 2], recompute=recomputes[number // 2 % 2]
        )
        for number in range(count)
    ]


def fresh_process(code: str) -> str:
    """What a new Python prints for this code. Raises RuntimeError with the end of its error if it fails."""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200, check=False)
    if done.returncode:
        raise RuntimeError(f"a fresh process failed: {done.stderr.strip()[-500:]}")
    return done.stdout


IMPORT = """
import time
started = time.process_time()
import course_utils.estimating
print(1000 * (time.process_time() - started))
"""


# A step watched by nobody, by the course's tracker, by torch's MemTracker


def _unwatched(training: Any, clock: Clock) -> float:
    training.step(Unwatched())
    return clock(lambda: training.step(Unwatched()))


def _tracked(training: Any, clock: Clock) -> float:
    with Tracker("cuda") as tracker:
        tracker.watch(training.network, training.named_states)
        tracker.bind("inputs", [training.tokens, training.targets])
        tracker.step = 1
        training.step(tracker)
        tracker.step = 2
        return clock(lambda: training.step(tracker))


def _memtracked(training: Any, clock: Clock) -> float:
    peer = MemTracker()
    peer.track_external(training.network, training.optimizer, training.tokens, training.targets)
    with peer:
        training.step(Unwatched())
        peer.reset_mod_stats()  # it refuses a second step otherwise
        return clock(lambda: training.step(Unwatched()))


WATCHERS = {"nobody": _unwatched, "tracker": _tracked, "memtracker": _memtracked}


def step_times(run: TrainingRun, clock: Clock = seconds_of) -> dict[str, float]:
    """What the second simulated step of `run` takes under each watcher, by that clock."""
    found = {}
    for name, second_step in WATCHERS.items():
        with simulated_gpu(run.attention):
            found[name] = second_step(Training(run, "cuda", simulated=True), clock)
    return found


def main() -> None:
    for model in ("gpt2-xl", "llama3-8b"):
        times = [seconds_of(lambda run=run: estimate(run)) for run in fresh_runs(model, 400)]
        print(f"an estimate of {model}: {1e6 * statistics.median(times):.0f} µs, promised under 200")
    swept = min(
        seconds_of(lambda: [estimate(TrainingRun("llama3-8b", 1 + n, 1024)) for n in range(10_000)])
        for _ in range(3)
    )
    print(f"a sweep of 10,000 runs: {swept:.2f} s, promised under 3")
    imported = min(float(fresh_process(IMPORT)) for _ in range(3))
    print(f"importing the closed forms: {imported:.0f} ms, promised under 40")
    step = step_times(TrainingRun("gpt2-xl", 4, 512))
    print(
        "a simulated step of gpt2-xl:", ", ".join(f"{name} {seconds:.2f} s" for name, seconds in step.items())
    )
    print(f"MemTracker over the tracker: {step['memtracker'] / step['tracker']:.1f}, promised 15")


if __name__ == "__main__":
    main()
