"""Speed: estimates, imports, the Explorer. `python tests/speeds.py` prints both tables; it wants a quiet
machine.

Seconds are the processor's, which on an idle machine are those of the clock, and of several tries the best:
what else runs on the machine can only slow a try down. What the browser adds to a redraw,
tests/test_browser.py measures.
"""

import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # where this file is run alone

from course_utils.estimating import estimate
from course_utils.evidence.tables import Cell, Table
from course_utils.interactive.course_files import ROOT
from course_utils.interactive.explorer import DEFAULTS, next_changes
from course_utils.interactive.explorer_widget import Explorer
from course_utils.run import TrainingRun

ESTIMATE_US, SWEEP_SECONDS, SWEEP_RUNS, IMPORT_MS = 100, 1.0, 10_000, 50
"""The course's promises for the closed forms."""

REDRAW_MS = 50  # from key to picture, as the course promises; the browser needs its share of it


def best(tries: int, measure_once: Callable[[], float]) -> float:
    """The least of several tries."""
    return min(measure_once() for _ in range(tries))


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


def estimate_microseconds(model: str, count: int = 400) -> float:
    """The median over `count` runs of the microseconds that an estimate takes."""
    times = []
    for run in fresh_runs(model, count):
        started = time.perf_counter()
        estimate(run)
        times.append(time.perf_counter() - started)
    return 1e6 * statistics.median(times)


def sweep_seconds() -> float:
    """Seconds to make and estimate many runs of one model."""
    return seconds_of(lambda: [estimate(TrainingRun("llama3-8b", 1 + n, 1024)) for n in range(SWEEP_RUNS)])


IMPORT = """
import sys, time
started = time.process_time()
import course_utils.estimating
print(1000 * (time.process_time() - started))
sys.exit("torch" in sys.modules)
"""


def import_milliseconds() -> float:
    """Milliseconds that importing the closed forms takes a fresh process. Raises RuntimeError if they load
    torch.
    """
    return float(_fresh_process(IMPORT))


def _fresh_process(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=1200, check=False
    )
    if done.returncode:
        raise RuntimeError(f"a fresh process failed: {done.stderr.strip()[-500:] or 'it has loaded torch'}")
    return done.stdout


def speed_table(quick: bool, report: Callable[[str], None]) -> Table:
    """Closed forms: what was measured, what is promised."""
    tries = 2 if quick else 3
    rows = list[tuple[Cell, ...]]()
    for model in ("gpt2-xl", "llama3-8b"):
        report(model)
        took = best(tries, partial(estimate_microseconds, model))
        rows.append(row(f"an estimate of {model}, µs", took, under=ESTIMATE_US))
    rows += [
        row(f"a sweep of {SWEEP_RUNS:,} runs, s", best(tries, sweep_seconds), under=SWEEP_SECONDS),
        row("importing the closed forms, ms", best(tries, import_milliseconds), under=IMPORT_MS),
    ]
    note = f"Seconds are the processor's, the best of {tries} tries."
    return Table("speed", "Speed", HEADINGS, tuple(rows), (note,), "this machine")


HEADINGS = ("", "measured", "promised", "kept")


def row(what: str, measured: float, under: float) -> tuple[Cell, ...]:
    """A row of a table of promises: what was measured, what was promised, and "kept" or "missed"."""
    return what, measured, f"under {under:g}", "kept" if measured < under else "missed"


# The Explorer: from a control's new value to the message that carries text and figure


CASES: dict[str, dict[str, Any]] = {
    "GPT-2 XL on one card": {},
    "Llama-3 8B, LoRA on 4 bits": {"model": "llama3-8b", "trained": "lora-4", "gpu": "RTX4090-24GB"},
    "Llama-3 8B, ZeRO-1 on 8 ranks": {
        "model": "llama3-8b",
        "world_size": 8,
        "zero_stage": 1,
        "gpu": "H100-80GB",
    },
    "Llama-3 8B, ZeRO-3 on 8 ranks": {
        "model": "llama3-8b",
        "world_size": 8,
        "zero_stage": 3,
        "gpu": "H100-80GB",
    },
    "Mixtral 8x7B, ZeRO-3 on 64 ranks": {
        "model": "mixtral-8x7b",
        "world_size": 64,
        "zero_stage": 3,
        "recompute": "full",
        "gpu": "H100-80GB",
    },
}
# the values that the micro-batch's slider is moved through, each once in a round
SIZES = (1, 2, 4, 8, 16, 32, 64, 128)


def explorer_table(quick: bool, report: Callable[[str], None]) -> Table:
    """One row a case: the redraws as the slider moves, the message's size, and what to change next."""
    rows = []
    for name, chosen in CASES.items():
        report(name)
        rows.append((name, *_case(DEFAULTS | chosen, 1 if quick else 5)))
    slowest = max(row[2] for row in rows)
    title = (
        f"A redraw of the Explorer takes up to {slowest:.1f} ms of the kernel, of {REDRAW_MS} from key to"
        " picture"
    )
    headings = ("case", "median, ms", "slowest, ms", "kB a message", "changes, ms")
    notes = (
        "median and slowest: the micro-batch's slider moved on; what the browser adds is not in it",
        "changes: what to change next, weighed after the picture",
    )
    return Table("explorer", title, headings, tuple(rows), notes, "the widget without a browser")


def _case(chosen: dict[str, Any], rounds: int) -> tuple[Cell, ...]:
    moved, size = _moving(chosen, rounds)
    weighed = statistics.median(1000 * seconds_of(lambda: next_changes(chosen)) for _ in range(rounds))
    return statistics.median(moved), max(moved), round(size / 1000), weighed


def _moving(chosen: dict[str, Any], rounds: int) -> tuple[list[float], int]:
    """Milliseconds from each move of the slider to the picture's message, and its bytes."""
    page = Explorer(**chosen)
    slider = page.controls["micro_batch"]
    arrived: list[float] = []
    page.picture.observe(lambda _: arrived.append(time.perf_counter()), names="value")
    moved = []
    for size in rounds * (*SIZES, *reversed(SIZES)):
        if size != slider.value:
            begun = time.perf_counter()
            slider.value = size
            moved.append(1000 * (arrived[-1] - begun))
    return moved, len(page.picture.value.encode())


if __name__ == "__main__":
    for made in (speed_table, explorer_table):
        print(f"{made('--quick' in sys.argv, lambda text: print(text, file=sys.stderr)).markdown()}\n")
