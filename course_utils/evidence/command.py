"""The command `evidence`: the tables of how right the course's engine is, printed and saved."""

import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from functools import partial
from pathlib import Path

from ..errors import unknown
from ..interactive.course_files import HAS_FOLDER, ROOT
from .tables import TABLES

# the default folder for tables; git ignores it
OUT = (ROOT if HAS_FOLDER else Path()) / "build" / "evidence"


def options(parser: ArgumentParser) -> None:
    listed = "\n".join(f"  {name:<14} {table['shows']}" for name, table in TABLES.items())
    parser.description = f"How right the course's engine is, in tables that are printed and saved:\n{listed}"
    one = "only this one, and may be repeated; all of them without"
    folder = "folder for NAME.md (default: the course's build/evidence)"
    parser.add_argument("--table", action="append", type=_table, metavar="NAME", help=one)
    parser.add_argument("--quick", action="store_true", help="a sample of each, in about two minutes")
    parser.add_argument("--out", type=Path, default=OUT, help=folder)


def _table(name: str) -> str:
    if name not in TABLES:
        raise ArgumentTypeError(str(unknown("table", name, TABLES)))
    return name


def run(chosen: Namespace) -> int:
    """Print and save the tables that were asked for; return 0."""
    from . import accuracy, gpu, judged, published_tables

    for name in chosen.table or TABLES:
        report = partial(print, f"{name}:", file=sys.stderr)
        if name == "accuracy":
            tables = accuracy.frozen_accuracy(chosen.quick, report)
        elif name == "published-gpus":
            tables = published_tables.tables(chosen.quick, report)
        elif name == "calculators":
            tables = [judged.table()]
        else:
            tables = gpu.GPU_TABLES[name]()
        for table in tables:
            table.save(chosen.out)
            print(f"{table.markdown()}\n", flush=True)
    print(f"Saved in {chosen.out}")
    return 0
