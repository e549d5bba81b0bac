"""How right and how fast: the tables that `python -m course_utils benchmark` prints and saves."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from ..errors import nearest
from ..interactive.course_files import ROOT
from .tables import Table

OUT = ROOT / "build" / "benchmark"
"""Where tables are saved unless told otherwise; git ignores it."""

Report = Callable[[str], None]

RANDOM_RUNS = 100


def _accuracy(quick: bool, seed: int, report: Report) -> list[Table]:
    """Estimate against simulation over the frozen list."""
    from .accuracy import frozen_accuracy

    return frozen_accuracy(quick, report)


def _random_accuracy(quick: bool, seed: int, report: Report) -> list[Table]:
    """The same over runs drawn just now, from `seed` on."""
    from dataclasses import replace

    from .accuracy import accuracy_tables, drawn_runs

    count = 20 if quick else RANDOM_RUNS
    source = f"simulated GPU, seeds {seed} to {seed + count - 1}"
    return [replace(t, name=f"random_{t.name}") for t in accuracy_tables(drawn_runs(seed, count), source, report)]


def _ranks(quick: bool, seed: int, report: Report) -> list[Table]:
    """Estimate against processes of the CPU, for the runs of several ranks that cannot be simulated."""
    from .ranks import rank_runs, ranks_table

    return [ranks_table(rank_runs(quick), report)]


def _builds(quick: bool, seed: int, report: Report) -> list[Table]:
    """The same GPU on every build of torch."""
    from .builds import builds_table

    return [builds_table()]


def _published(quick: bool, seed: int, report: Report) -> list[Table]:
    """The field's formulas against a step that runs."""
    from .accuracy import published_table

    return [published_table(quick, report)]


def _speed(quick: bool, seed: int, report: Report) -> list[Table]:
    """Speed, beside torch's MemTracker."""
    from .speed import speed_table

    return [speed_table(quick, report)]


def _deep(quick: bool, seed: int, report: Report) -> list[Table]:
    """Time and memory of Llama-3 70B."""
    from .speed import deep_table

    return [deep_table()]


def _explorer(quick: bool, seed: int, report: Report) -> list[Table]:
    """The Explorer, from a control's value to the message."""
    from .explorer import explorer_table

    return [explorer_table(quick, report)]


def _gpu(quick: bool, seed: int, report: Report) -> list[Table]:
    """Estimate and simulation against what real GPUs counted, from recordings."""
    from .gpu import gpu_tables

    return gpu_tables()


def _gpu_allocator(quick: bool, seed: int, report: Report) -> list[Table]:
    """The allocator's model against real GPUs' histories, from recordings."""
    from .gpu_allocator import gpu_allocator_tables

    return gpu_allocator_tables()


def _gpu_times(quick: bool, seed: int, report: Report) -> list[Table]:
    """Times with their spread, from recordings."""
    from .gpu_times import gpu_times_tables

    return gpu_times_tables()


def _gpu_overhead(quick: bool, seed: int, report: Report) -> list[Table]:
    """What the meter and the tracker cost, from recordings."""
    from .gpu_times import gpu_overhead_tables

    return gpu_overhead_tables()


def _gpu_live(quick: bool, seed: int, report: Report) -> list[Table]:
    """The lessons on a GPU, and memory that ran out on purpose, from recordings."""
    from .gpu_live import gpu_live_tables

    return gpu_live_tables()


TABLES: dict[str, Callable[[bool, int, Report], list[Table]]] = {
    "accuracy": _accuracy,
    "random": _random_accuracy,
    "ranks": _ranks,
    "builds": _builds,
    "published": _published,
    "speed": _speed,
    "explorer": _explorer,
    "deep": _deep,
    "gpu": _gpu,
    "gpu-allocator": _gpu_allocator,
    "gpu-times": _gpu_times,
    "gpu-overhead": _gpu_overhead,
    "gpu-live": _gpu_live,
}
"""The tables by name; "deep" takes longest and is left out of --quick, those of a GPU are read from recordings."""

GPU_TABLES = ("gpu", "gpu-allocator", "gpu-times", "gpu-overhead", "gpu-live")
"""Those that are read from recordings of real GPUs."""

USAGE = f"""python3 -m course_utils benchmark [options]

How right and how fast the course's engine is, in tables that are printed and saved.

  --table NAME   only this one: {", ".join(TABLES)} (may be given several times)
  --quick        a sample of each, in about two minutes
  --seed N       where the random grid begins (default 1000000)
  --out FOLDER   where NAME.md and NAME.json are saved (default build/benchmark)"""


class WrongOption(ValueError):
    """An option of the command line that cannot be followed; the message says which would."""


def main(arguments: Sequence[str]) -> int:
    """Prints and saves the tables that the arguments ask for; returns 0. Raises WrongOption for what it cannot read."""
    if "-h" in arguments or "--help" in arguments:
        print(USAGE)
        return 0
    names, quick, seed, out = options(arguments)
    for name in names:
        for table in TABLES[name](quick, seed, lambda text, name=name: print(f"{name}: {text}", file=sys.stderr)):
            table.save(out)
            print(f"{table.markdown()}\n", flush=True)
    print(f"Saved in {out}")
    return 0


def options(arguments: Sequence[str]) -> tuple[list[str], bool, int, Path]:
    """The tables' names, whether quick, the seed, and the folder that the arguments ask for.

    Raises WrongOption for one that is unknown or lacks its value.
    """
    names, quick, seed, out = [], False, 1_000_000, OUT
    words = iter([part for word in arguments for part in (word.split("=", 1) if word.startswith("--") else [word])])
    for word in words:
        if word == "--quick":
            quick = True
            continue
        if word not in ("--table", "--seed", "--out"):
            raise WrongOption(f"benchmark knows no {word!r}: its options are --table, --quick, --seed and --out")
        value = next(words, None)
        if value is None:
            raise WrongOption(f"{word} needs a value after it")
        if word == "--table":
            names.append(_table_name(value))
        elif word == "--seed":
            seed = _seed(value)
        else:
            out = Path(value)
    everything = [name for name in TABLES if not (quick and name == "deep")]
    return names or everything, quick, seed, out


def _table_name(value: str) -> str:
    if value not in TABLES:
        close = nearest(value, TABLES)
        hint = f"did you mean {close}? " if close else ""
        raise WrongOption(f"there is no table {value!r}: {hint}known are {', '.join(TABLES)}")
    return value


def _seed(value: str) -> int:
    if not value.isdecimal():
        raise WrongOption(f"--seed is {value!r}: a whole number that is not negative")
    return int(value)
