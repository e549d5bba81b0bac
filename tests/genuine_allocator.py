"""torch's own allocator, compiled, asked what it does on many traces without a GPU; its answers are kept as
hashes.

Under a CUDA build of torch and with g++, `python tests/genuine_allocator.py` asks it again and writes the
hashes anew.
"""

import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from itertools import product
from pathlib import Path

import torch

from course_utils.allocator.policy import FIRST_ADDRESS, TAKEN, CachingAllocator, OutOfMemory
from course_utils.allocator.settings import settings
from course_utils.units import MiB

ANSWERS = Path(__file__).with_suffix(".json")
UNLIMITED = 2**50

SETTINGS = (
    "",
    "expandable_segments:True",
    "max_split_size_mb:24",
    "max_split_size_mb:32,max_non_split_rounding_mb:40",
    "roundup_power2_divisions:4",
    "large_segment_size_mb:40",
    "large_segment_size_mb:12",
    "expandable_segments:True,roundup_power2_divisions:8",
    "expandable_segments:True,large_segment_size_mb:40",
    "expandable_segments:True,max_split_size_mb:24",
)
CAPACITIES = (UNLIMITED, 1000 * MiB, 300 * MiB, 151 * MiB)
SEEDS = (0, 1)
CASES = [f"{capacity} {seed} {text}".strip() for text, capacity, seed in product(SETTINGS, CAPACITIES, SEEDS)]

DESCENDING = [case for case in CASES if case.split()[1:] in (["0"], ["1"], ["0", "max_split_size_mb:24"])]
"""Asked a second time of a driver that puts each segment below the one before it. Equal free blocks are told
apart by their address in torch 2.11, and by the age of their segment in 2.13, whose answers stay what they
were.
"""

Action = tuple[str, int, int]
"""("a", name, bytes) allocates, ("f", name, 0) frees, ("e", 0, 0) empties the cache."""


def parts(case: str) -> tuple[int, int, str]:
    """Capacity, seed and settings of a case."""
    capacity, seed, text = (case + " ").split(" ", 2)
    return int(capacity), int(seed), text.strip()


def trace(seed: int, length: int = 2500) -> list[Action]:
    """Allocations from 1 byte to 64 MiB, most of them of sizes that come back, and frees in any order."""
    generator = random.Random(seed)
    live = list[int]()
    actions = list[Action]()

    def size() -> int:
        return int(2 ** (26 * generator.random()))

    common = [size() for _ in range(40)]
    for name in range(length):
        chance = generator.random()
        if chance < 0.002:
            actions.append(("e", 0, 0))
        elif live and chance < 0.49:
            actions.append(("f", live.pop(int(generator.random() * len(live))), 0))
        else:
            asked = common[int(generator.random() * len(common))] if generator.random() < 0.6 else size()
            live.append(name)
            actions.append(("a", name, asked))
    return actions


def our_answers(case: str, descending: bool = False) -> list[str]:
    """After each action: requested, allocated and reserved bytes, retries, calls of the driver, 1 if out of
    memory.
    """
    capacity, seed, text = parts(case)
    allocator = CachingAllocator(capacity, **settings(text))
    live = dict[int, int]()
    answers = list[str]()
    lowest = FIRST_ADDRESS
    for action, name, size in trace(seed):
        failed = 0
        if action == "a":
            segment = allocator.segment_size(allocator.round_size(size))
            allocator.offered = [(segment, lowest - segment)] if descending else []
            try:
                live[name] = allocator.malloc(size)
                lowest -= 0 if allocator.offered else segment
            except OutOfMemory:
                failed = 1
        elif action == "f" and name in live:
            allocator.free(live.pop(name))
        elif action == "e":
            allocator.empty_cache()
        figures = (allocator.requested, allocator.allocated, allocator.reserved, allocator.retries)
        taken = sum(TAKEN[call.action] > 0 for call in allocator.driver_calls)
        answers.append(" ".join(map(str, (*figures, taken, failed))))
    return answers


def digest(answers: Iterable[str]) -> str:
    """A hash of all answers of a case."""
    return hashlib.sha256("\n".join(answers).encode()).hexdigest()[:16]


def why_not() -> str:
    """What is missing to ask torch's own allocator here; "" if nothing is."""
    if torch.version.cuda is None:
        return "this build of torch holds no CUDA allocator"
    if shutil.which("g++") is None:
        return "there is no g++ to compile it with"
    return "" if _includes() else "CUDA's headers are not installed"


def _includes() -> list[Path]:
    """Folders with CUDA's headers, as torch's CUDA wheels bring them; the compiler's are in another than the
    rest.
    """
    site = Path(torch.__path__[0]).parent
    folders = {path.parent for path in site.glob("nvidia/*/include/cuda_runtime_api.h")}
    folders |= {path.parent.parent for path in site.glob("**/include/crt/host_defines.h")}
    both = any((folder / "crt").is_dir() for folder in folders) and any(
        "nvidia" in folder.parts for folder in folders
    )
    return sorted(folders) if both else []


def compiled(folder: Path) -> Path:
    """The program that runs torch's own allocator, compiled into `folder`."""
    home = Path(torch.__path__[0])
    program = folder / "genuine_allocator"
    # the rest of it is for CUDA's compiler
    (folder / "cuda_runtime.h").write_text("#include <cuda_runtime_api.h>\n")
    runtime = next(home.parent.glob("nvidia/*/lib/libcudart.so.*"))
    includes = [f"-I{path}" for path in (folder, *_includes(), home / "include")]
    source = Path(__file__).with_suffix(".cpp")
    libraries = [
        f"-L{home / 'lib'}",
        "-lc10_cuda",
        "-lc10",
        str(runtime),
        f"-Wl,-rpath,{home / 'lib'}:{runtime.parent}",
    ]
    command = ["g++", "-std=c++20", "-w", "-rdynamic", *includes, str(source), "-o", str(program), *libraries]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return program


def genuine_answers(program: Path, case: str, descending: bool = False) -> list[str]:
    """What torch's own allocator answers, in the form of `our_answers`."""
    capacity, seed, text = parts(case)
    environment = {name: value for name, value in os.environ.items() if "ALLOC_CONF" not in name}
    environment |= {"PYTORCH_CUDA_ALLOC_CONF": text} if text else {}
    lines = "".join(
        f"{' '.join(map(str, action)) if action[0] == 'a' else _short(action)}\n" for action in trace(seed)
    )
    command = [str(program), str(capacity), *(["descending"] if descending else [])]
    done = subprocess.run(command, input=lines, env=environment, check=True, capture_output=True, text=True)
    return done.stdout.splitlines()


def _short(action: Action) -> str:
    return f"f {action[1]}" if action[0] == "f" else "e"


def main() -> None:
    """Write the answers of this torch; those on a descending driver where they are others."""
    if reason := why_not():
        sys.exit(reason)
    kept = json.loads(ANSWERS.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as folder:
        program = compiled(Path(folder))
        answers = {case: digest(genuine_answers(program, case)) for case in CASES}
        descending = {case: digest(genuine_answers(program, case, descending=True)) for case in DESCENDING}
    kept |= {"torch": torch.__version__, "answers": answers}
    if any(descending[case] != answers[case] for case in DESCENDING):
        kept["descending"] = {"torch": torch.__version__, "answers": descending}
    ANSWERS.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
