"""A soak: threads estimate, simulate and compare at random; every figure has to be the one that it is alone.

`python tests/soak.py --minutes 30 --threads 8` prints how much was done and every figure that was wrong.
"""

import argparse
import queue
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence

from course_utils import TrainingRun, compare, estimate, measure
from course_utils.measuring import tracing

Figures = dict[str, object]
"""The results of one run by task."""


def small_runs() -> list[TrainingRun]:
    """Runs of every kind of patch: kernels, loss scaling, Adafactor's norms, shards, recomputation,
    offloading.
    """
    small = TrainingRun("gpt2", 1, 64)
    return [
        small,
        small.replace(attention="efficient", precision="amp-fp16"),
        small.replace(precision="fp32", attention="eager", optimizer="adafactor"),
        TrainingRun("gpt2", 1, 64, "bf16", world_size=4, zero_stage=3),
        small.replace(recompute="full", precision="bf16-master"),
        small.replace(accumulation_steps=4, clip_grad_norm=1.0),
        TrainingRun("llama3.2-1b", 1, 128, "bf16", lora_rank=8),
        TrainingRun("gpt2-medium", 16, 512),
    ]


def figures(run: TrainingRun) -> Figures:
    """The right figures: each asked for alone."""
    return {task: does(run) for task, does in TASKS.items()}


def _simulated(run: TrainingRun) -> object:
    tracing.trace_simulated.cache_clear()
    measured = measure(run, source="simulated")
    return dict(measured.breakdown), len(measured.timeline)


def _compared(run: TrainingRun) -> object:
    return compare(run, source="simulated").rows()


TASKS = {"estimate": lambda run: dict(estimate(run)), "simulate": _simulated, "compare": _compared}


class Soak:
    """Threads that take runs and tasks at random, until so many are done or time is up."""

    def __init__(self, runs: Sequence[TrainingRun], right: Sequence[Figures], threads: int) -> None:
        self.runs, self.right, self.threads = runs, right, threads
        self.done: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._left: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()

    def run(self, tasks: int, seconds: float = float("inf")) -> list[str]:
        """Do the tasks; returns what was wrong."""
        choose = random.Random(0)
        end = time.monotonic() + seconds
        for _ in range(tasks):
            self._left.put((choose.randrange(len(self.runs)), choose.choice(list(TASKS))))
        workers = [threading.Thread(target=self._work, args=(end,)) for _ in range(self.threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        return self.wrong

    def _work(self, end: float) -> None:
        while time.monotonic() < end:
            try:
                number, task = self._left.get_nowait()
            except queue.Empty:
                return
            try:
                found: object = TASKS[task](self.runs[number])
            except Exception as error:
                found = repr(error)
            self.done[task] += 1
            if found != self.right[number][task]:
                self.wrong.append(f"{task} of {self.runs[number]}: {found}, not {self.right[number][task]}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--threads", type=int, default=8)
    options = parser.parse_args()
    runs = small_runs()
    soak = Soak(runs, [figures(run) for run in runs], options.threads)
    wrong = soak.run(1_000_000, 60 * options.minutes)
    print(
        f"{options.threads} threads, {options.minutes:g} minutes: {dict(soak.done)}, {len(wrong)} figures"
        " wrong"
    )
    print("\n".join(wrong[:20]))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
