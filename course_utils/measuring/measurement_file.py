"""Measurements in files, to be compared with later ones: gzipped JSON, nothing that could run."""

import gzip
import json
import os
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..measurement import Measurement, Provenance
from .recorded import FIELDS, from_json, to_json
from .recording_file import SCHEMA, text_of

KEY = "measurement"

DEVICES = {"simulated": "a simulated GPU", "cpu": "a CPU"}

WHOLE_NUMBERS = dict.fromkeys(("bytes", "step", "born", "stream"), int)
# the other fields are text
TYPES = WHOLE_NUMBERS | {"shape": list, "died": (int, type(None))}


def save_measurement(measured: Measurement, path: str | Path) -> Path:
    """Write a measurement with all its allocations to `path` and return that path.

    A file of an earlier measurement is replaced. Raises ValueError, and writes nothing, where any other file
    is at `path`; TypeError for what is no measurement.
    """
    if not isinstance(measured, Measurement):
        raise TypeError(f"only a measurement can be saved here, but this is a {type(measured).__name__}")
    path = Path(path)
    if not path.parent.is_dir():
        raise ValueError(f"there is no folder {str(path.parent)!r} to save a measurement in")
    if path.exists():
        try:
            _content(path)
        except ValueError as error:
            raise ValueError(
                f"nothing was written: {error}. Choose another name, or delete that file"
            ) from None
    more = {
        "note": measured.provenance.note,
        "losses": list(measured.losses),
        "counters": dict(measured.counters),
    }
    # an earlier file stays whole until this one is
    partial = path.with_name(f"{path.name}.partial-{os.getpid()}")
    partial.write_bytes(gzip.compress(text_of({KEY: to_json(measured, whole=True) | more}), mtime=0))
    partial.replace(path)
    return path


def read_measurement(path: str | Path) -> Measurement:
    """The measurement in a file that `save_measurement` wrote; its source is "recorded", with device and
    date.

    Raises ValueError for a file that is missing, damaged, of another schema, or anything else.
    """
    path = Path(path)
    content = _content(path)
    try:
        for row in content["allocations"]:
            _check_allocation(row)
        source, device, torch_version, date = content["provenance"]
        origin = Provenance("recorded", DEVICES.get(source, device), torch_version, date, content["note"])
        found = replace(from_json(content, ""), provenance=origin)
        # what these two add up has to be numbers
        found.timeline.curves()
        found.largest()
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path.name} is damaged ({type(error).__name__}: {error}): measure and save again"
        ) from None
    return found


def _check_allocation(row: list[Any]) -> None:
    """Raise TypeError or ValueError for what is no allocation; the last field, the stream, may be missing."""
    names = FIELDS[: max(len(row), len(FIELDS) - 1)]
    for name, value in zip(names, row, strict=True):
        if not isinstance(value, TYPES.get(name, str)):
            raise TypeError(f"{value!r} is not the {name} of an allocation")


def _content(path: Path) -> dict[str, Any]:
    """The content of a measurement file. ValueError for any other, with a sentence that has no full stop."""
    if not path.is_file():
        raise ValueError(f"{str(path)!r} does not exist or is not a file")
    try:
        content = json.loads(gzip.decompress(path.read_bytes()))
    except (EOFError, OSError, RecursionError, ValueError, zlib.error) as error:
        raise ValueError(
            f"{path.name} holds no measurement, or it is damaged ({type(error).__name__})"
        ) from None
    if not isinstance(content, dict) or not isinstance(content.get(KEY), dict):
        raise ValueError(f"{path.name} holds no measurement: save one with save_measurement(measured, path)")
    if content.get("schema") != SCHEMA:
        raise ValueError(
            f"{path.name} has schema {content.get('schema')!r}, this course reads {SCHEMA}: save it again"
        )
    return content[KEY]
