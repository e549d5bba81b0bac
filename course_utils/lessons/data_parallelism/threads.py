"""The speed of a process's threads, which share one lock, and of several processes."""

import inspect
import subprocess
import sys
import timeit
from concurrent.futures import ThreadPoolExecutor

ROUNDS, TRIES = 1_000_000, 5


def python_work() -> None:
    total = 0
    for number in range(ROUNDS):
        total += number


def in_threads(count: int) -> float:
    """Seconds until `count` threads have each done `python_work`; the best of a few tries."""

    def work() -> None:
        with ThreadPoolExecutor(count) as pool:
            list(pool.map(lambda _: python_work(), range(count)))

    return min(timeit.repeat(work, number=1, repeat=TRIES))


def in_processes(count: int) -> float:
    """Seconds of the slowest of `count` processes for the same work, starts not counted; best of a few."""
    timed = "import timeit; print(timeit.timeit(python_work, number=1))"
    command = [sys.executable, "-c", f"ROUNDS = {ROUNDS}\n{inspect.getsource(python_work)}\n{timed}"]
    times = []
    for _ in range(TRIES):
        processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(count)]
        times.append(max(float(process.communicate()[0]) for process in processes))
    return min(times)
