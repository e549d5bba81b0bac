"""A training script as it is, counted by a real GPU: python count_script.py HISTORY SCRIPT [ARGUMENTS …]

Prints one JSON line for each of the first three training steps: the most bytes allocated and reserved since
the script began, and what is allocated when the step ends. A training step is over when each optimizer that
steps at all has stepped (`watch` counts the same way). HISTORY is a file for the allocator's events up to the
end of step 2, or -.
"""

import json
import lzma
import os
import runpy
import sys
import time
from pathlib import Path

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

STEPS, WITH_HISTORY, PATIENCE = 3, 2, 16
KEPT = ("alloc", "free_completed", "segment_alloc", "segment_free", "segment_map", "segment_unmap")

history, script = sys.argv[1], sys.argv[2]
optimizers: dict[int, Optimizer] = {}
stepped: dict[int, int] = {}
ended = 0
began = time.monotonic()


def note_optimizers() -> None:
    make = Optimizer.__init__

    def made(one: Optimizer, *arguments: object, **options: object) -> None:
        make(one, *arguments, **options)  # pyrefly: ignore [bad-argument-type]
        optimizers[id(one)] = one

    Optimizer.__init__ = made  # pyrefly: ignore [bad-assignment]


def after_update(optimizer: Optimizer, *_: object) -> None:
    global ended, optimizers
    optimizers[id(optimizer)] = optimizer
    stepped[id(optimizer)] = stepped.get(id(optimizer), 0) + 1
    if not all(one in stepped for one in optimizers) and max(stepped.values()) < PATIENCE:
        return
    optimizers = {one: optimizers[one] for one in stepped}  # the others never step
    stepped.clear()
    ended += 1
    torch.cuda.synchronize()
    row = {
        "step": ended,
        "peak_allocated": torch.cuda.max_memory_allocated(),
        "peak_reserved": torch.cuda.max_memory_reserved(),
        "allocated": torch.cuda.memory_allocated(),
        "retries": torch.cuda.memory_stats()["num_alloc_retries"],
        "seconds": round(time.monotonic() - began, 1),
    }
    print(json.dumps(row), file=sys.__stdout__, flush=True)
    if ended == WITH_HISTORY and history != "-":
        save_history()
    if ended == STEPS:
        os._exit(0)  # no handler of the script's may keep it alive


def save_history() -> None:
    """Columns of the allocator's events, without stacks."""
    events = [event for event in torch.cuda.memory._snapshot()["device_traces"][0] if event["action"] in KEPT]
    columns = {name: [event[name] for event in events] for name in ("action", "addr", "size")}
    Path(history).write_bytes(lzma.compress(json.dumps(columns, separators=(",", ":")).encode(), preset=4))


torch.cuda.init()
if history != "-":
    torch.cuda.memory._record_memory_history(max_entries=3_000_000, context=None)
note_optimizers()
register_optimizer_step_post_hook(after_update)
sys.argv = sys.argv[2:]
sys.path.insert(0, str(Path(script).resolve().parent))
sys.stdout = sys.stderr
runpy.run_path(script, run_name="__main__")
sys.exit(0 if ended else 3)  # a script that ends before step 3 has printed what there is
