"""The smallest card on which a training run works, found on a real GPU.

    python tests/gpu/near_the_limit.py OUT.jsonl [NUMBER] [--gigabytes 60] [--seconds 200]
    python tests/gpu/near_the_limit.py OUT.jsonl --replay

A memory fraction makes the GPU as small as wanted: torch's allocator then gets no more bytes than that. The
run takes three steps on smaller and smaller cards until it runs out of memory. Every try begins with an empty
allocator, and one JSON line says which sizes worked. What a card's driver and context take is not in it.
NUMBER chooses one of RUNS; without it, each of them has a process of its own, as many at a time as fit the
gigabytes.
"""

import argparse
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path

import torch
from room import Room

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from course_utils import TrainingRun, estimate  # noqa: E402
from course_utils.measuring.devices import Cuda, Unwatched  # noqa: E402
from course_utils.measuring.live import only_kernel, ready  # noqa: E402
from course_utils.measuring.release import is_out_of_memory, release  # noqa: E402

STEPS, CLOSE, MOST_TRIES = 3, 0.002, 9

GPT2 = TrainingRun("gpt2", micro_batch=8, seq_len=1024)
MEDIUM = TrainingRun("gpt2-medium", micro_batch=8, seq_len=1024)
XL = TrainingRun("gpt2-xl", micro_batch=4, seq_len=1024)
LLAMA = TrainingRun("llama3.2-1b", micro_batch=2, seq_len=2048)
RUNS = (
    GPT2.replace(seq_len=512),  # the run of the lesson on the allocator, in 6 GiB
    GPT2,
    GPT2.replace(micro_batch=16),
    GPT2.replace(attention="eager"),
    GPT2.replace(recompute="full"),
    GPT2.replace(accumulation_steps=4),
    GPT2.replace(precision="bf16-master"),
    GPT2.replace(precision="fp32", attention="efficient"),
    GPT2.replace(loss_chunks=8, micro_batch=16),
    GPT2.replace(clip_grad_norm=1.0),
    MEDIUM,
    MEDIUM.replace(recompute="full", micro_batch=16),
    MEDIUM.replace(recompute="every-4"),
    MEDIUM.replace(optimizer="adamw-fused"),
    MEDIUM.replace(optimizer="sgd"),
    XL.replace(recompute="full", precision="bf16-master"),
    XL.replace(precision="bf16-master"),
    LLAMA,
    LLAMA.replace(recompute="full"),
    LLAMA.replace(lora_rank=16),
)


def works(run: TrainingRun, limit: int, device: Cuda) -> tuple[bool, int, int]:
    """Whether three steps fit `limit` bytes, and the peaks: allocated, reserved."""
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total))
    device.release()
    if torch.cuda.memory_reserved():
        raise RuntimeError(f"{torch.cuda.memory_reserved():,} bytes are left of the try before")
    torch.cuda.reset_peak_memory_stats()
    fits = True
    try:
        with only_kernel(run):
            training, _ = ready(run, device)
            for _ in range(STEPS):
                training.step(Unwatched())
            torch.cuda.synchronize()
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        fits = False
        release(error)
    peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    training = None
    release(None)
    device.release()
    return fits, *peaks


def smallest(run: TrainingRun) -> dict[str, object]:
    """Bisect between the bytes allocated on a large card, which are too few, and a size that works."""
    device, tries, began = Cuda(), [], time.monotonic()
    _, allocated, reserved = works(run, torch.cuda.get_device_properties(0).total_memory, device)

    def fits(limit: int) -> bool:
        found, *_ = works(run, limit, device)
        tries.append([limit, found])
        return found

    low, high = allocated - 1, reserved
    while not fits(high):  # the bytes reserved on a large card can be too few on a small one
        low, high = high, round(1.02 * high)
    while high - low > CLOSE * high and len(tries) < MOST_TRIES:
        middle = (low + high) // 2
        if fits(middle):
            high = middle
        else:
            low = middle
    return {
        "run": run.code(),
        "closed_form": estimate(run).total,
        "allocated": allocated,
        "reserved": reserved,
        "too_small": low,
        "works": high,
        "tries": tries,
        "steps": STEPS,
        "seconds": round(time.monotonic() - began, 1),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "date": date.today().isoformat(),
    }


def replayed(run: TrainingRun, card: str = "H200-141GB") -> int:
    """The same size as the course predicts it: three simulated steps, replayed through the allocator's
    policy.
    """
    from course_utils.allocator.replay import replay
    from course_utils.measuring.sources import simulated_run

    simulated = simulated_run(run.replace(card=card), STEPS, "")
    whole = replay(simulated)
    low, high = whole.peak_allocated - 1, round(1.05 * whole.peak_reserved)
    while high - low > CLOSE / 4 * high:
        middle = (low + high) // 2
        if replay(simulated, middle).failure is None:
            high = middle
        else:
            low = middle
    return high


def add_replayed(recorded: Path) -> None:
    """Write what the course predicts into each line of a recording; only the CPU is used."""
    rows = [json.loads(line) for line in recorded.read_text().splitlines()]
    runs = {run.code(): run for run in RUNS}
    for row in rows:
        row["replayed"] = {"works": replayed(runs[row["run"]]), "torch": torch.__version__.partition("+")[0]}
        print(row["run"], row["works"], row["replayed"]["works"], flush=True)
    recorded.write_text("".join(json.dumps(row) + "\n" for row in rows))


def one(out: Path, number: int) -> None:
    row = smallest(RUNS[number])
    with out.open("a") as file:
        file.write(json.dumps(row) + "\n")
    print(row["run"], row["too_small"], row["works"], flush=True)


def all_of_them(out: Path, gigabytes: float, seconds: float) -> None:
    room, end = Room(gigabytes), time.monotonic() + seconds

    def process(number: int) -> None:
        taken = room.take(1.3 * estimate(RUNS[number]).total / 1e9)
        command = [sys.executable, __file__, str(out), str(number)]
        try:
            subprocess.run(command, timeout=max(1.0, end - time.monotonic()), check=False)
        except subprocess.TimeoutExpired:
            print(f"{RUNS[number].code()}: no time left", flush=True)
        finally:
            room.give(taken)

    with ThreadPoolExecutor(6) as pool:
        done = [pool.submit(process, number) for number in range(len(RUNS))]
    for each in done:
        each.result()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("number", type=int, nargs="?")
    parser.add_argument("--gigabytes", type=float, default=60)
    parser.add_argument("--seconds", type=float, default=200)
    parser.add_argument("--replay", action="store_true", help="add the course's predictions to a recording")
    options = parser.parse_args()
    if options.replay:
        add_replayed(options.out)
    elif options.number is None:
        all_of_them(options.out, options.gigabytes, options.seconds)
    else:
        one(options.out, options.number)
