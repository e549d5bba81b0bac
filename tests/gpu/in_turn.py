"""Steps of training, counted and timed on a real GPU one after the other, while nothing else uses GPU or CPU.

    python tests/gpu/in_turn.py OUT.jsonl [--only front|batches|stages] [--seconds 200] [--at-once 9] [--tiny]

A compiled step takes half a minute to compile. So a group of processes, one for each case, compiles at the
same time; when the last is ready, each measures in turn while the others sleep. One JSON line per case, as it
comes.
"""

import argparse
import gc
import json
import multiprocessing
import statistics
import time
from dataclasses import asdict, replace
from datetime import date
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from gpt import Choice, Training

WARM_UP, FEWEST_STEPS, MOST_STEPS, MOST_SECONDS = 3, 7, 30, 1.2

PLAIN = Choice()
POLICIES = ("none", "full", "every-2", "every-3", "every-4", "every-6", "selective", "offload", "offload-all")


def front() -> list[Choice]:
    """Recomputation: policies without the compiler and with it, and the compiler's own budget."""
    found = [PLAIN]
    found += [replace(PLAIN, recompute=policy) for policy in POLICIES[1:]]
    found += [
        replace(PLAIN, loss_chunks=8, recompute=policy) for policy in ("none", "full", "every-3", "selective")
    ]
    for how in ("model", "blocks"):
        found += [replace(PLAIN, compiled=how, recompute=policy) for policy in ("none", "full", "selective")]
    budgets = (0.8, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0)
    found += [replace(PLAIN, compiled="model", budget=budget) for budget in budgets]
    return found


def batches() -> list[Choice]:
    """Tokens per second against the micro-batch, and one batch of 64 in more and more micro-batches."""
    found = [replace(PLAIN, micro_batch=b) for b in (1, 2, 4, 8, 32, 64)]
    found += [replace(PLAIN, micro_batch=64 // n, micro_batches=n) for n in (2, 4, 8, 16, 32, 64)]
    found += [replace(PLAIN, micro_batch=b, compiled="model") for b in (1, 2, 4, 8, 32)]
    return found


def stages() -> list[Choice]:
    """A script that grows: each stage changes one line of the one before it."""
    first = Choice(micro_batch=8, precision="fp32", attention="math", optimizer="foreach")
    found = [first]
    changes: tuple[dict[str, Any], ...] = (
        {"precision": "tf32"},
        {"precision": "bf16"},
        {"attention": "flash"},
        {"optimizer": "fused"},
        {"loss_chunks": 8},
        {"recompute": "full"},
        {"micro_batches": 4},
    )
    for change in changes:
        found.append(replace(found[-1], **change))
    found.append(replace(found[4], compiled="model"))
    found.append(replace(found[4], compiled="model", micro_batch=32))
    found.append(replace(found[6], micro_batch=64))
    return found


GROUPS = {"front": front, "batches": batches, "stages": stages}


def work(choices: list[Choice], tell: Connection) -> None:
    """For each case: prepare, say so, wait for the turn, measure, release."""
    for choice in choices:
        try:
            training, took = prepared(choice)
            tell.send({"ready_after": took})
            tell.recv()
            tell.send(measured(training))
        except Exception as error:  # reported in the case's line; the other cases go on
            tell.send({"failed": f"{type(error).__name__}: {error}"[:300]})
        training = None
        release()


def prepared(choice: Choice) -> tuple[Training, float]:
    import torch

    began = time.monotonic()
    training = Training(choice)
    for _ in range(WARM_UP):
        training.step()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return training, round(time.monotonic() - began, 1)


def release() -> None:
    import torch

    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()


def measured(training: Training) -> dict[str, object]:
    """Counters of one step, then the milliseconds of more."""
    import torch

    torch.cuda.reset_peak_memory_stats()
    at_rest = torch.cuda.memory_allocated()
    kept = training.step()
    torch.cuda.synchronize()
    counted = {
        "at_rest": at_rest,
        "kept": kept,
        "peak_allocated": torch.cuda.max_memory_allocated(),
        "peak_reserved": torch.cuda.max_memory_reserved(),
    }
    times, began = [], time.monotonic()
    while len(times) < MOST_STEPS and (len(times) < FEWEST_STEPS or time.monotonic() - began < MOST_SECONDS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        training.step()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    low, middle, high = statistics.quantiles(times, n=4, method="inclusive")
    tokens = training.choice.micro_batch * training.choice.micro_batches * training.choice.seq_len
    return {
        **counted,
        "step_ms": {"median": round(middle, 3), "q1": round(low, 3), "q3": round(high, 3), "n": len(times)},
        "tokens_per_second": round(1000 * tokens / middle),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "date": date.today().isoformat(),
    }


def group(name: str, shares: list[list[Choice]], out: Path, end: float) -> None:
    """A process for each share of the cases: all prepare their first case at the same time, then measure in
    turn.
    """
    context = multiprocessing.get_context("spawn")
    started = []
    for choices in shares:
        ours, theirs = context.Pipe()
        process = context.Process(target=work, args=(choices, theirs))
        process.start()
        theirs.close()
        started.append((choices, process, ours))
    first = [heard(ours, process, end) for _, process, ours in started]
    for (choices, process, ours), ready in zip(started, first, strict=True):
        for number, choice in enumerate(choices):
            answer = ready if number == 0 else heard(ours, process, end)
            if "ready_after" in answer:
                ours.send("your turn")
                answer |= heard(ours, process, end + 20)
            write(out, {"group": name, "label": choice.label, "choice": asdict(choice), **answer})
        process.join(timeout=5)
        if process.is_alive():
            process.kill()


def write(out: Path, row: dict[str, object]) -> None:
    with out.open("a") as file:
        file.write(json.dumps(row) + "\n")
    print(
        row["group"],
        row["label"],
        row.get("peak_allocated"),
        row.get("step_ms"),
        row.get("failed", ""),
        flush=True,
    )


def heard(ours: Connection, process: BaseProcess, end: float) -> dict[str, object]:
    """What a worker says, or why it says nothing."""
    try:
        if ours.poll(max(0.0, end - time.monotonic())):
            return ours.recv()
    except (EOFError, OSError):
        return {"failed": f"ended with exit code {process.exitcode}"}
    process.kill()
    return {"failed": "not ready in time"}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", choices=GROUPS, default=None)
    parser.add_argument("--seconds", type=float, default=200)
    parser.add_argument("--at-once", type=int, default=9)
    parser.add_argument("--compiled", action="store_true", help="the compiled cases; without it, the others")
    parser.add_argument("--tiny", action="store_true", help="two small cases, to try the machinery")
    options = parser.parse_args()
    end = time.monotonic() + options.seconds
    for name in [options.only] if options.only else list(GROUPS):
        cases = [choice for choice in GROUPS[name]() if bool(choice.compiled) == options.compiled]
        cases = cases[:2] if options.tiny else cases
        # nothing to wait for without compiling
        shares = [[choice] for choice in cases] if options.compiled else [cases]
        for start in range(0, len(shares), options.at_once):
            if time.monotonic() < end:
                group(name, shares[start : start + options.at_once], options.out, end)


if __name__ == "__main__":
    main()
