"""Accuracy: the tables that `python -m course_utils benchmark` prints and saves."""

import sys
from argparse import Namespace, RawTextHelpFormatter
from collections.abc import Sequence
from pathlib import Path

from ..errors import unknown
from ..interactive.command_line import Parser
from ..interactive.course_files import ROOT

OUT = ROOT / "build" / "benchmark"  # the default folder for tables; git ignores it

TABLES = {
    "accuracy": "estimates against simulations, over the frozen list of runs",
    "published-gpus": "the simulated GPU against what GPUs counted elsewhere, step by step (5 minutes)",
    "gpu": "estimates and simulations against GPUs' own counters, from recordings, as all that follow",
    "gpu-published": "the published steps once more, on the GPU that was here",
    "gpu-hardware": "context, workspaces and scratch, which no simulation sees",
    "gpu-allocator": "the allocator's model against GPUs' histories",
    "gpu-times": "step times with their spread",
    "gpu-live": "lessons executed on a GPU, and out-of-memory errors on purpose",
}
"""The tables by name, and what each shows."""


def read_options(arguments: Sequence[str]) -> Namespace:
    """The tables that a command line asks for, and how. Raises WrongOption."""
    help_of_tables = "\n".join(f"{name:<14} {text}" for name, text in TABLES.items())
    summary = f"How right the course's engine is, in tables that are printed and saved:\n{help_of_tables}"
    parser = Parser("benchmark", summary, "use the Python that runs this command", formatter_class=RawTextHelpFormatter)
    parser.add_argument("--table", action="append", metavar="NAME", help="only this one; may be repeated")
    parser.add_argument("--quick", action="store_true", help="a sample of each, in about two minutes")
    parser.add_argument("--out", type=Path, default=OUT, help="folder for NAME.md (build/benchmark)")
    options = parser.parse_args(arguments)
    for name in set(options.table or ()) - set(TABLES):
        parser.error(str(unknown("table", name, TABLES)).rstrip("."))
    options.table = options.table or list(TABLES)
    return options


def print_tables(options: Namespace) -> int:
    """Print and save the tables that were asked for; return 0."""
    from .all_tables import MADE

    for name in options.table:
        for table in MADE[name](options.quick, lambda text, name=name: print(f"{name}: {text}", file=sys.stderr)):
            table.save(options.out)
            print(f"{table.markdown()}\n", flush=True)
    print(f"Saved in {options.out}")
    return 0
