"""Speed: a step with and without trackers, estimates, imports, the Explorer.

Seconds are the processor's, which on an idle machine are those of the clock, and of several tries the best: what else
runs on the machine can only slow a try down. What the browser adds to a redraw, tests/test_browser.py measures.
"""

import asyncio
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from ..estimating import estimate
from ..interactive.course_files import ROOT
from ..interactive.explorer import DEFAULTS, next_changes
from ..run import TrainingRun
from .tables import Cell, Table

TIMES_FASTER = 15
ESTIMATE_US, SWEEP_SECONDS, SWEEP_RUNS, IMPORT_MS = 100, 1.0, 10_000, 50
"""The course's promises: for a tracked step against MemTracker's, and for the closed forms."""

REDRAW_MS = 50  # from key to picture, as the course promises; the browser needs its share of it


def best(tries: int, measure_once: Callable[[], float]) -> float:
    """The least of several tries."""
    return min(measure_once() for _ in range(tries))


# A step, watched by nobody, by the course's tracker, by torch's


def step_seconds(run: TrainingRun, second_step: Callable[[Any], float]) -> float:
    """Seconds of the second simulated step of `run`, as `second_step` watches a training."""
    from ..measuring.simulated import simulated_gpu
    from ..measuring.step import Training

    with simulated_gpu(run.attention):
        return second_step(Training(run, "cuda", simulated=True))


def _seconds(work: Callable[[], object]) -> float:
    started = time.process_time()
    work()
    return time.process_time() - started


def _unwatched(training: Any) -> float:
    from ..measuring.counting import Unwatched

    training.step(Unwatched())
    return _seconds(lambda: training.step(Unwatched()))


def _tracked(training: Any) -> float:
    from ..measuring.tracker import Tracker

    with Tracker("cuda") as tracker:
        tracker.watch(training.network, training.named_states)
        tracker.bind("inputs", [training.tokens, training.targets])
        tracker.step = 1
        training.step(tracker)
        tracker.step = 2
        return _seconds(lambda: training.step(tracker))


def _memtracked(training: Any) -> float:
    from torch.distributed._tools.mem_tracker import MemTracker

    from ..measuring.counting import Unwatched

    peer = MemTracker()
    peer.track_external(training.network, training.optimizer, training.tokens, training.targets)
    with peer:
        training.step(Unwatched())
        peer.reset_mod_stats()  # it refuses a second step otherwise
        return _seconds(lambda: training.step(Unwatched()))


def step_times(run: TrainingRun, tries: int) -> dict[str, float]:
    """The best `step_seconds` for each watcher: of several tries, or of one for MemTracker, which takes so long.

    Tracked and untracked steps alternate: a processor's clock changes from one second to the next.
    """
    turns = [(step_seconds(run, _unwatched), step_seconds(run, _tracked)) for _ in range(tries)]
    nobody, tracker = map(min, zip(*turns, strict=True))
    return {"nobody": nobody, "tracker": tracker, "memtracker": step_seconds(run, _memtracked)}


# Closed forms


def fresh_runs(model: str, count: int) -> list[TrainingRun]:
    """Runs that differ from each other, so that no cache answers for a whole one."""
    kernels, recomputes = ("flash", "eager"), ("none", "full")
    return [
        TrainingRun(model, 1 + number // 4, 512, attention=kernels[number % 2], recompute=recomputes[number // 2 % 2])
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
    return _seconds(lambda: [estimate(TrainingRun("llama3-8b", 1 + n, 1024)) for n in range(SWEEP_RUNS)])


IMPORT = """
import sys, time
started = time.process_time()
import course_utils.estimating
print(1000 * (time.process_time() - started))
sys.exit("torch" in sys.modules)
"""


def import_milliseconds() -> float:
    """Milliseconds that importing the closed forms takes a fresh process. Raises RuntimeError if they load torch."""
    return float(_fresh_process(IMPORT))


def _fresh_process(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=1200, check=False
    )
    if done.returncode:
        raise RuntimeError(f"a fresh process failed: {done.stderr.strip()[-500:] or 'it has loaded torch'}")
    return done.stdout


def speed_table(quick: bool, report: Callable[[str], None]) -> Table:
    """Steps and closed forms: what was measured, what is promised."""
    tries = 2 if quick else 3
    times = step_times(TrainingRun("gpt2-xl", 4, 512), tries)
    report("steps")
    rows = [
        row("gpt2-xl: untracked step, ms", 1000 * times["nobody"]),
        row("gpt2-xl: tracked step, ms", 1000 * times["tracker"]),
        row("gpt2-xl: step under torch's MemTracker, ms", 1000 * times["memtracker"]),
        row("gpt2-xl: MemTracker's step over ours", times["memtracker"] / times["tracker"], at_least=TIMES_FASTER),
    ]
    for model in ("gpt2-xl", "llama3-8b"):
        took = best(tries, partial(estimate_microseconds, model))
        rows.append(row(f"an estimate of {model}, µs", took, under=ESTIMATE_US))
    rows += [
        row(f"a sweep of {SWEEP_RUNS:,} runs, s", best(tries, sweep_seconds), under=SWEEP_SECONDS),
        row("importing the closed forms, ms", best(tries, import_milliseconds), under=IMPORT_MS),
    ]
    note = (
        "A step is the second of a run with b=4, s=512 under autocast; seconds are the processor's, "
        f"the best of {tries} tries (MemTracker's of one)."
    )
    return Table("speed", "Speed", HEADINGS, tuple(rows), (note,), "this machine")


HEADINGS = ("", "measured", "promised", "kept")


def row(what: str, measured: float, under: float | None = None, at_least: float | None = None) -> tuple[Cell, ...]:
    """A row of a table of promises: what was measured, what was promised, and "kept" or "missed"; or no promise."""
    if under is not None:
        return what, measured, f"under {under:g}", "kept" if measured < under else "missed"
    if at_least is not None:
        return what, measured, f"at least {at_least:g}", "kept" if measured >= at_least else "missed"
    return what, measured, "", ""


# The Explorer: from a control's new value to the message that carries text and figure


CASES: dict[str, dict[str, Any]] = {
    "GPT-2 XL on one card": {},
    "Llama-3 8B, LoRA on 4 bits": {"model": "llama3-8b", "trained": "lora-4", "gpu": "RTX4090-24GB"},
    "Llama-3 8B, ZeRO-1 on 8 ranks": {"model": "llama3-8b", "world_size": 8, "zero_stage": 1, "gpu": "H100-80GB"},
    "Llama-3 8B, ZeRO-3 on 8 ranks": {"model": "llama3-8b", "world_size": 8, "zero_stage": 3, "gpu": "H100-80GB"},
    "Mixtral 8x7B, ZeRO-3 on 64 ranks": {
        "model": "mixtral-8x7b", "world_size": 64, "zero_stage": 3, "recompute": "full", "gpu": "H100-80GB",
    },
}  # fmt: skip
SIZES = (1, 2, 4, 8, 16, 32, 64, 128)  # the values that the micro-batch's slider is moved through, each once in a round


def explorer_table(quick: bool, report: Callable[[str], None]) -> Table:
    """One row a case: the redraws as the slider moves, the message's size, and what to change next."""
    rows = []
    for name, chosen in CASES.items():
        report(name)
        rows.append((name, *_case(DEFAULTS | chosen, 1 if quick else 5)))
    slowest = max(row[2] for row in rows)
    title = f"A redraw of the Explorer takes up to {slowest:.1f} ms of the kernel, of {REDRAW_MS} from key to picture"
    headings = ("case", "median, ms", "slowest, ms", "kB a message", "changes, ms")
    notes = (
        "median and slowest: the micro-batch's slider moved on; what the browser adds is not in it",
        "changes: what to change next, weighed when the input rests, after the picture",
    )
    return Table("explorer", title, headings, tuple(rows), notes, "the widget without a browser")


def _case(chosen: dict[str, Any], rounds: int) -> tuple[Cell, ...]:
    moved, size = asyncio.run(_moving(chosen, rounds))
    weighed = statistics.median(_milliseconds(lambda: next_changes(chosen)) for _ in range(rounds))
    return statistics.median(moved), max(moved), round(size / 1000), weighed


async def _moving(chosen: dict[str, Any], rounds: int) -> tuple[list[float], int]:
    """Milliseconds of each move of the slider, and bytes of a message.

    It runs in an event loop, as in a kernel, so that what to change next waits.
    """
    from ..interactive.explorer_widget import DashboardWidget

    page = DashboardWidget(**chosen)
    slider = page.controls["micro_batch"]
    sizes = [size for _ in range(rounds) for size in (*SIZES, *reversed(SIZES)) if size != chosen["micro_batch"]]
    moved = [_milliseconds(lambda size=size: setattr(slider, "value", size)) for size in sizes]
    return moved, len((page.picture.value + page.words.value).encode())


def _milliseconds(work: Callable[[], object]) -> float:
    return 1000 * _seconds(work)
