"""`record --verify FILE`: check recordings before they are taken in. Reads JSON alone, never a pickle."""

import gzip
import io
import lzma
import math
import os
import re
import socket
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from ..measuring.recorded import read_recording
from ..measuring.recording_file import MEASURED, SETTLED, STATUSES, Line, parse_lines
from ..units import MB
from .allocation_history import ACTIONS, unpacked
from .tasks import recording_list

MOST_FILE = 20 * MB
MOST_UNPACKED = 200 * MB
MOST_LINES = 2_000
PLAUSIBLE = 0.05  # A person looks at a counter that its simulation misses by a larger share
LISTED = 12  # Items of a list on the page
WIDEST = 150  # Letters of each

BYTES = (
    "counters",
    "estimate",
    "formula",
    "simulated",
    "context",
    "workspaces",
    "scratch",
    "cells",
    "said",
    "counted",
)
"""Parts of a result, by the first word of their name, in which every number is bytes or a count."""

TEXTS = ("notebook", "demos", "out_of_memory", "refused")  # Parts that hold sentences

SHAPES = {
    "torch": r"\d+\.\d+\.\S+",
    "commit": r"[0-9a-f]{7,40}( changed, code [0-9a-f]{12})?|code [0-9a-f]{12}",
    "driver": r"(\d+(\.\d+)+)?",
    "date": r"\d{4}-\d\d-\d\d",
}

PUBLIC = r"https?://[\w.]*\b(pytorch\.org|nvidia\.com)/\S*"  # Pages that torch's messages name
PRIVATE = {
    "a path": r"(?<![\w.])/([\w.+-]+/)+|\b[A-Za-z]:[\\/]|\\\\\w|~/",
    "an e-mail address": r"[\w.+-]+@[\w-]+\.\w",
    "a network address": r"\b\d{1,3}(\.\d{1,3}){3}\b|://",
}


def verify(path: Path, names: Collection[str] = ()) -> tuple[str, list[str]]:
    """A page about a file, and the reasons not to take it in. None of `names` may be in its text."""
    try:
        lines = _read(path)
    except (OSError, EOFError, ValueError, RecursionError) as problem:
        return f"{path.name} cannot be read: {problem}", [str(problem)]
    kinds = {task.name: task.kind for task in recording_list()}
    problems = [f"{line.place}: {said}" for line in lines for said in _problems(line, kinds, names)]
    settled = [line for line in lines if line.content["status"] in SETTLED]
    times_settled = Counter((*line.origin, line.content["task"]) for line in settled)
    for (*_, task), count in times_settled.items():
        if count > 1:
            problems.append(f"{task!r} is settled {count} times, not once")
    cards = {str({**line.content["device"], "driver": ""}) for line in lines}
    if len(cards) > 1:
        problems.append(f"it holds results of {len(cards)} cards: `record` writes a file for each")
    return _page([line.content for line in lines], len(kinds), problems), problems


def names_here() -> set[str]:
    """The names of this machine and this user that are long enough to be looked for."""
    host = socket.gethostname().partition(".")[0]
    user = os.environ.get("USER") or os.environ.get("USERNAME", "")
    return {name for name in (host, user) if len(name) > 4}


def _read(path: Path) -> list[Line]:
    if not path.name.endswith((".jsonl", ".jsonl.gz", ".jsonl.xz")):
        raise ValueError(
            f"{path.name} is not a recording: its name must end in .jsonl, .jsonl.gz or .jsonl.xz"
        )
    if path.stat().st_size > MOST_FILE:
        raise ValueError(f"{path.name} is too large: a recording has at most {MOST_FILE:,} bytes")
    content = path.read_bytes()
    if path.suffix != ".jsonl":
        content = _decompressed(content, path.suffix)
    if not content.endswith(b"\n") or content.count(b"\n") > MOST_LINES:
        raise ValueError(
            f"{path.name} is empty, cut off within its last line, or longer than {MOST_LINES:,} lines"
        )
    return parse_lines(path, content)


def _decompressed(content: bytes, ending: str) -> bytes:
    opened = gzip.open if ending == ".gz" else lzma.open
    try:
        found = opened(io.BytesIO(content)).read(MOST_UNPACKED + 1)
    except lzma.LZMAError as error:
        raise ValueError(f"it is damaged ({error})") from None
    if len(found) > MOST_UNPACKED:
        raise ValueError(f"unpacked it is too large: a recording has at most {MOST_UNPACKED:,} bytes")
    return found


def _problems(line: Line, kinds: dict[str, str], names: Collection[str]) -> Iterator[str]:
    content = line.content
    device = content["device"]
    try:
        task, kind, status = content["task"], content["kind"], content["status"]
        if kinds.get(task) != kind or status not in STATUSES:
            yield f"{task!r} ({kind}, {status}) is not in this version's list of tasks"
        for name, shape in SHAPES.items():
            holder = device if name == "driver" else content
            if not re.fullmatch(shape, holder[name]):
                yield f"its {name} is {content.get(name)!r}, which is invalid"
        date.fromisoformat(content["date"])
        if not all(map(_is_size, (device["memory"], *device["capability"]))):
            yield "its device has no memory in bytes, or no compute capability"
        yield from _wrong_parts(content["parts"], device["memory"])
        if kind == "run" and status == MEASURED:
            read_recording(line).measurement()
        yield from _private(content, names)
    except (AttributeError, EOFError, KeyError, OSError, RecursionError, TypeError, ValueError) as error:
        yield f"it is damaged ({type(error).__name__}: {error})"


def _wrong_parts(parts: dict[str, Any], memory: int) -> Iterator[str]:
    """Say which bytes are no bytes, and which counters a card of `memory` bytes cannot have shown."""
    for name, part in parts.items():
        numbers = [value for value in _leaves(part) if isinstance(value, int | float)]
        if not all(math.isfinite(number) for number in numbers if isinstance(number, float)):
            yield f"part {name!r} holds a number that is not finite"
        if name.split()[0] in BYTES and not all(map(_is_size, numbers)):
            yield f"part {name!r} holds a value that is not a whole number of bytes of at least 0"
        if name == "counters":
            counted = [(part["allocated"], part["reserved"])]
        elif name.startswith("counted "):
            counted = list(part.values())
        else:
            counted = []
        if not all(allocated <= reserved <= memory for allocated, reserved in counted):
            yield (
                f"part {name!r} has more allocated than reserved,"
                f" or more reserved than the card's {memory:,} bytes"
            )
        if name == "history":
            (entries,) = unpacked(part["history"])["device_traces"]
            if not all(entry["action"] in ACTIONS and _is_size(entry["size"]) for entry in entries):
                yield "its history has an entry that is not an allocation"


def _is_size(value: object) -> bool:
    return type(value) is int and value >= 0


def _leaves(value: Any) -> Iterator[Any]:
    """Every value in a JSON document, and every key."""
    if isinstance(value, dict):
        yield from value
        value = list(value.values())
    if not isinstance(value, list):
        yield value
        return
    for inner in value:
        yield from _leaves(inner)


def _private(content: Any, names: Collection[str]) -> Iterator[str]:
    """Say which texts may tell where, or by whom, the file was made."""
    patterns = dict(PRIVATE)
    if names:
        patterns["a name of this machine or user"] = rf"\b({'|'.join(map(re.escape, names))})\b"
    for text in _leaves(content):
        if not isinstance(text, str):
            continue
        text = re.sub(PUBLIC, "", text)
        for what, pattern in patterns.items():
            if found := re.search(pattern, text):
                yield f"{what} may be in {text[: found.end() + 20][-60:]!r}"


def _page(contents: Sequence[dict[str, Any]], known: int, problems: Sequence[str]) -> str:
    """A summary of the file, and what a person should check: implausible counters, and free text."""
    counts = Counter(f"{content['kind']} {content['status']}" for content in contents)
    tasks = {content["task"] for content in contents}
    gaps = [gap for content in contents for gap in _gaps(content)]
    apart = [f"{share:+.1%} {name}" for share, name in gaps if abs(share) > PLAUSIBLE]
    texts = _free_texts(contents)
    verdict = "Do not take it in:" if problems else "It can be taken in."
    lines = [
        str(contents[0]["device"]),
        *_origins(contents),
        f"{len(contents)} results of {len(tasks)} tasks; this version has {known}",
        ", ".join(f"{count} {name}" for name, count in counts.items()),
        f"{len(gaps)} counters next to their simulation; {len(apart)} differ by more than {PLAUSIBLE:.0%}",
        *_listed(apart),
        f"Texts, for a person to read: {len(texts)}",
        *_listed(texts),
        f"Problems: {len(problems)}. {verdict}",
        *_listed(problems),
    ]
    return "\n".join(lines)


def _listed(items: Sequence[str]) -> list[str]:
    """The first of many items, a short line each."""
    return [" ".join(item.split())[:WIDEST] for item in items[:LISTED]]


def _origins(contents: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Say under which torch, commit, driver and on which days the results were made."""
    made = [{"driver": content["device"].get("driver")} | content for content in contents]
    for name in SHAPES:
        values = sorted({str(each[name]) or "unknown" for each in made})
        yield f"{name}: {', '.join(values)}"


def _free_texts(contents: Sequence[dict[str, Any]]) -> list[str]:
    """Texts of more than one word in the parts that hold sentences."""
    held: list[Any] = []
    for content in contents:
        held.append(content.get("detail"))
        held += [content["parts"].get(name) for name in TEXTS]
    return sorted({leaf for leaf in _leaves(held) if isinstance(leaf, str) and " " in leaf})


def _gaps(content: dict[str, Any]) -> Iterator[tuple[float, str]]:
    """Simulated minus counted as a share of the counted bytes, and of what, where a counter has both."""
    simulated = content["parts"].get("simulated")
    counted = content["parts"].get("counters")
    if not isinstance(simulated, dict) or not isinstance(counted, dict):
        return
    for name in ("allocated", "reserved"):
        if _is_size(simulated.get(name)) and _is_size(counted.get(name)) and counted[name]:
            yield simulated[name] / counted[name] - 1, f"{name} in {content['task']}"
