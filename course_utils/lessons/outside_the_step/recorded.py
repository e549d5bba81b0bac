"""Moments of a training run outside of its step, counted on a GPU, for lesson 13."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ...errors import check_known
from ...units import Table


class Moment(NamedTuple):
    """Bytes allocated before and after some work, and the most allocated and reserved during it."""

    before: int
    after: int
    peak: int
    reserved: int


_FILE: dict[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))

RECORDED = {name: Moment(**counted) for name, counted in _FILE["moments"].items()}
"""What the GPU counted, by moment, in the order of the run. The lesson has its code."""

PROVENANCE = f"recorded on {_FILE['device']} · torch {_FILE['torch']} · {_FILE['date']}"


def three_ways(peaks: Mapping[str, tuple[int, int]]) -> Table:
    """Peaks of moments: by formula, counted here, and recorded; the gap is formula minus recorded.

    `peaks` has formula and count by the moment's name in `RECORDED`. Raises ValueError for another name.
    """
    rows = [["peak in GB", "formula", "here", "recorded", "gap"]]
    for name, (formula, here) in peaks.items():
        check_known("moment", name, RECORDED)
        recorded = RECORDED[name].peak
        sizes = [f"{size / 1e9:.2f}" for size in (formula, here, recorded)]
        rows.append([name, *sizes, f"{formula / recorded - 1:+.2%}"])
    return Table(rows)
