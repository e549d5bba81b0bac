"""Read an out-of-memory message of PyTorch.

The answer is what was full, the likely cause, three changes and the lesson for each.

out_of_memory.toml has the words to look for, and the texts of the answers.
"""

import json
import os
import re
import sys
import tomllib
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product, takewhile
from pathlib import Path
from textwrap import fill, indent
from typing import Any

from ..terminal import WIDE, columns, within
from ..units import GiB, MiB, TiB, aligned, binary, parse_bytes, percent

TEXTS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
VERSION = 1
"""Of `Diagnosis.to_dict`."""

SIZE = r"([0-9]+(?:\.[0-9]+)? (?:[KMGT]i?)?B)"
HEADER = "Traceback (most recent call last)"
NEAR = ("loss", "attention")
INNERMOST = 7
"""Lines in which these are looked for: further out their words are names of variables."""

# Shares of a card that must be exceeded: HUGE by a tensor in forward; LARGE by other tensors, by other
# processes, and by what is outside torch; SOME by what is reserved.
HUGE = 0.25
LARGE = 0.1
SOME = 0.05

FAR = tuple(name for name in TEXTS["phases"] if name not in NEAR)
WINDOW = 4 * MiB
OVERLAP = MiB
"""Bytes of a log that are read at once, from its end, and how far such windows overlap."""

UNSURE = ("killed", "retried")
"""Kinds of messages that often follow a better one."""


@dataclass(frozen=True)
class OutOfMemory:
    """The content of a message. `kind` is one of out_of_memory.toml's, known by these `words`.

    `sizes` are bytes: `requested`, `total`, `free`, `allocated` and `allowed` if it names them, `cached`
    (reserved but unallocated), `pools` and `others` (of other processes) always. `lines` are the traceback's;
    `step` is how the log counts its last step if that is at least the third. `at`, `numbers` and `step_at`
    are the numbers of these lines in the log, 0 or missing if there is no log.
    """

    kind: str
    words: str
    sizes: dict[str, int]
    lines: tuple[str, ...] = ()
    step: str = ""
    at: int = 0
    numbers: tuple[int, ...] = ()
    step_at: int = 0

    @property
    def parts(self) -> dict[str, int]:
        """Bytes of the card by kind, none if the message does not say.

        Windows may lend more than the card has.
        """
        if not {"total", "free", "allocated"} <= self.sizes.keys():
            return {}
        names = ("allocated", "cached", "others", "free")
        allocated, cached, others, free = (self.sizes[name] for name in names)
        rest = self.sizes["total"] - allocated - cached - others - free
        pools = min(allocated, self.sizes["pools"])
        sizes = (allocated - pools, pools, cached, max(0, rest), others, free)
        return dict(zip(TEXTS["parts"], sizes, strict=True))


@dataclass(frozen=True)
class Diagnosis:
    """The likely causes of a failure, by name in out_of_memory.toml, the likeliest first. Prints itself.

    `because` is what led to them, and `line` the number of the line that they were read from (0 if unknown).
    """

    failure: OutOfMemory
    causes: tuple[str, ...]
    because: str
    line: int = 0

    @property
    def cause(self) -> str:
        """The likeliest cause."""
        return self.causes[0]

    @property
    def sure(self) -> str:
        """Say "certain" if the message names the cause, "possible" if others fit as well, else "likely"."""
        if len(self.causes) > 1:
            return "possible"
        return TEXTS["causes"][self.cause].get("sure", "likely")

    @property
    def changes(self) -> list[tuple[str, str]]:
        """Three changes, each with its lesson: "06: Recomputation". Two causes take turns."""
        words = self.failure.words
        device = '"mps"' if "MPS" in words else '"xpu"' if "XPU" in words else '"cuda"'
        lists = [TEXTS["causes"][cause]["changes"] for cause in self.causes]
        turns = dict.fromkeys(name for names in zip(*lists, strict=True) for name in names)
        found = []
        for name in list(turns)[:3]:
            lesson, code = TEXTS["changes"][name]
            found.append((code.replace('"cuda"', device), f"{lesson}: {TEXTS['lessons'][lesson]}"))
        return found

    @property
    def script(self) -> str:
        """The script that the log names, or "train.py"."""
        scripts = (re.match(TEXTS["log"]["script"], line) for line in self.failure.lines)
        return next((match[1] for match in scripts if match), "train.py")

    @property
    def reasons(self) -> list[str]:
        """A text for each cause, with the message's numbers."""
        return [TEXTS["causes"][cause]["text"].format(**self._words()) for cause in self.causes]

    def to_dict(self) -> dict[str, Any]:
        """The diagnosis as plain data, sizes in bytes; a change of its form changes "version"."""
        texts = self.reasons
        return {
            "format": "course_utils oom",
            "version": VERSION,
            "message": self.failure.words,
            "line": self.failure.at,
            "sizes": self.failure.sizes,
            "parts": self.failure.parts,
            "causes": [{"name": name, "text": text} for name, text in zip(self.causes, texts, strict=True)],
            "sure": self.sure,
            "because": self.because,
            "because_line": self.line,
            "changes": [{"code": code, "lesson": lesson} for code, lesson in self.changes],
        }

    def __str__(self) -> str:
        return self.to_text()

    def to_text(self, width: int = WIDE) -> str:
        """The diagnosis for a terminal of so many characters."""
        where = f" (line {self.line})" if self.line else ""
        texts = [*self.reasons, f"Why: {self.because}{where}."]
        said = "\n".join(fill(text, min(width, 100) - 2, break_on_hyphens=False) for text in texts)
        title = {"certain": "Cause", "likely": "Likely cause", "possible": "Possible cause"}[self.sure]
        rows = [(f"  {n}. {code}", f"lesson {of}") for n, (code, of) in enumerate(self.changes, 1)]
        changes = aligned(rows, 2)
        if max(map(len, changes.split("\n"))) > width:
            changes = "\n".join(f"{code}\n     {lesson}" for code, lesson in rows)
        parts = [
            f"What was full\n{_full(self.failure, self.cause)}",
            f"{title}{'s' * (len(self.causes) > 1)}\n{indent(said, '  ')}",
            f"Three changes\n{changes}",
            f"Predict it before the next run, without a GPU: python3 -m course_utils watch {self.script}",
        ]
        return within("\n\n".join(parts), width)

    def _words(self) -> dict[str, str]:
        """The message's sizes as the texts of out_of_memory.toml name them, and their shares of the card."""
        sizes = {"free": 0, **self.failure.sizes, **self.failure.parts}
        sizes["together"] = sizes["free"] + sizes["cached"]
        total = sizes.get("total") or 1
        words = {name: binary(size) for name, size in sizes.items()}
        words |= {f"{name}_share": percent(size / total) for name, size in sizes.items()}
        words["numbers"] = f"{sizes.get('requested', 0) // 4:,}"
        return words


def parse(text: str, skipped: int = 0) -> OutOfMemory:
    """The last out-of-memory message in a text, such as a paste or a log of which lines were `skipped`.

    Raises ValueError if there is none.
    """
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\0", "", text)
    kind, mark = _last_mark(text)
    if mark is None:
        raise ValueError(TEXTS["refused"]["none"])
    if kind == "foreign":
        raise ValueError(TEXTS["refused"]["foreign"])
    message = re.sub(r"[\s│]+", " ", text[mark.start() : mark.start() + 2000])
    at = text.count("\n", 0, mark.start())
    stack, before = _traceback(text, at)
    step, step_at = _step(before)
    return OutOfMemory(
        kind,
        " ".join(mark[0].split()),
        _sizes(message),
        tuple(line for _, line in stack),
        step,
        skipped + at + 1,
        tuple(skipped + number for number, _ in stack),
        skipped + step_at,
    )


def parse_log(log: bytes) -> OutOfMemory:
    """The last out-of-memory message in a log of any length. Raises ValueError if there is none."""
    unsure = refused = None
    for end in range(len(log), 0, -WINDOW):
        start = max(0, end - WINDOW - OVERLAP)
        try:
            failure = parse(log[start:end].decode(errors="replace"), log.count(b"\n", 0, start))
        except ValueError as error:
            refused = refused or error
            continue
        if failure.kind not in UNSURE:
            return failure
        unsure = unsure or failure
    if unsure:
        return unsure
    raise refused or ValueError(TEXTS["refused"]["none"])


def _last_mark(text: str) -> tuple[str, re.Match[str] | None]:
    """The first kind of message that the text has, and where its last one begins; "" and None if none."""
    for kind, words in TEXTS["kinds"].items():
        found = list(re.finditer(words, text, re.DOTALL))
        if found:
            return kind, found[-1]
    return "", None


def _sizes(message: str) -> dict[str, int]:
    """The `sizes` of an `OutOfMemory`."""
    message = message.replace(" bytes", " B")
    if "MPS" in message:
        message = re.sub("([KMG])B", r"\1iB", message)  # it writes GB where it counts GiB
    found = {name: re.search(words.replace("SIZE", SIZE), message) for name, words in TEXTS["sizes"].items()}
    said = {name: parse_bytes(next(filter(None, match.groups()))) for name, match in found.items() if match}
    reserved = said.pop("reserved", 0)
    elsewhere = said.pop("elsewhere", None)
    allocated = said.get("allocated", 0)
    cached = said.get("cached", max(0, reserved - allocated))
    if elsewhere is not None and "total" in said:
        said["free"] = max(0, said["total"] - allocated - elsewhere)
    processes = sorted(map(parse_bytes, re.findall(rf"Process [0-9]+ has {SIZE} memory in use", message)))
    # Windows' driver may say 2^64 bytes.
    others = [size for size in processes if size <= said.get("total", size)]
    # In a container a process does not know its number, and lists itself with the others: it is the smallest
    # that is as large as what torch has.
    ours = 0 if "this process has" in message else 0.99 * (allocated + cached)
    own = next((size for size in others if size >= ours > 0), 0)
    return {"pools": 0, **said, "cached": cached, "others": sum(others) - own}


def _traceback(text: str, at: int) -> tuple[list[tuple[int, str]], list[tuple[int, str]]]:
    """The lines of the traceback that belongs to a message, and those before it, each with its number.

    `at` is the message's line, from 0. A logger may write the traceback below the message.
    """
    lines = list(enumerate(text.split("\n"), 1))
    rank = re.match(r"\[rank[0-9]+\]:", lines[at][1])
    above, below = lines[:at], lines[at + 1 :]
    if rank:  # torchrun mixes the lines of all ranks
        above, below = (_of_rank(some, rank[0]) for some in (above, below))
    headers = [place for place, line in enumerate(above) if HEADER in line[1]]
    start = headers[-1] + 1 if headers else max(0, len(above) - 40)
    stack, before = above[start:], above[:start] if headers else above
    if not any(re.search(TEXTS["log"]["frame"], line) for _, line in above[-8:]):
        stack = _stack_below(below) or stack
    ours = takewhile(lambda line: not re.search(TEXTS["log"]["ours"], line[1]), stack)
    stripped = [(number, line.strip(" │\r")) for number, line in ours if line.strip(" ^~│\r")]
    return stripped, before


def _of_rank(lines: list[tuple[int, str]], rank: str) -> list[tuple[int, str]]:
    """The lines that begin with a rank's name, without it."""
    return [(number, line.removeprefix(rank)) for number, line in lines if line.startswith(rank)]


def _stack_below(lines: list[tuple[int, str]]) -> list[tuple[int, str]]:
    """The lines of a traceback that begins at once; none if it does not, or is another error's."""
    for place, (_, line) in enumerate(lines[:6]):
        if re.search(TEXTS["log"]["chained"], line):
            return []
        if HEADER in line:
            indented = takewhile(lambda pair: pair[1].lstrip("│")[:1] in (" ", "\t"), lines[place + 1 :])
            return list(indented)
    return []


def _step(lines: list[tuple[int, str]]) -> tuple[str, int]:
    """The words that count the last step of a log, and their line, if that is at least the third; else ""."""
    for number, text in reversed(lines[-2000:]):
        for line in reversed(text.splitlines()):  # a progress bar writes many between two line feeds
            match = re.search(TEXTS["log"]["step"], line)
            if match and not re.search(TEXTS["log"]["not"], line):
                words = match[0].strip(" [") if int(match[1] or match[2]) > 2 else ""
                return words, number if words else 0
    return "", 0


def diagnose(failure: OutOfMemory) -> Diagnosis:
    """The likely causes of a failure: first what the message says, then the traceback and the log."""
    kind_causes = TEXTS["kind_causes"].get(failure.kind, [failure.kind])
    if failure.kind == "driver":
        found = _by_whole(failure)
        if found:
            return Diagnosis(failure, (*found.causes, "driver"), found.because, found.line)
    if kind_causes:
        shape = ["shape"] if failure.sizes.get("requested", 0) >= TiB else []
        return Diagnosis(failure, (*shape, *kind_causes), f'the words "{failure.words}"', failure.at)
    by_traceback = _by_whole(failure) or _by_evaluation(failure)
    return _by_numbers(failure) or by_traceback or _by_lines(failure)


def _by_numbers(failure: OutOfMemory) -> Diagnosis | None:
    """The causes that the message's numbers show, and what shows them; None if they do not.

    What would have been enough for the request is a cause; what would not have been is none.
    """
    size = failure.sizes
    total, free, requested = (size.get(name, 0) for name in ("total", "free", "requested"))
    others, cached = size["others"], size["cached"]
    rest = failure.parts.get("rest", 0)
    near, line, number = _phase(failure)
    told = _by_whole(failure) or _by_evaluation(failure)
    if near and not told:
        told = Diagnosis(failure, (near,), f'the traceback says "{line}"', number)

    def found(causes: tuple[str, ...], because: str) -> Diagnosis:
        return Diagnosis(failure, causes, because, failure.at)

    if "allowed" in size and requested <= free:
        return found(("allowed",), f'the words "{binary(size["allowed"])} allowed"')
    if requested >= (total or TiB):
        return found(("shape", near) if near else ("shape",), f"one request was for {binary(requested)}")
    if "free" not in size and "allocated" in size:  # as Intel's cards say it
        free = total - size["allocated"] - cached
    if 0 < requested <= free and free > SOME * total > 0:
        crowd = ("others",) if others > LARGE * total else ()
        return found(("refused", *crowd), f"{binary(requested)} were refused and {binary(free)} were unused")
    if others > LARGE * total > 0 and requested <= free + others:
        besides = (told.cause,) if told and told.cause != near else ()
        return found(("others", *besides), "the message lists them")
    if cached > SOME * total > 0 and requested <= free + cached:
        if told and (requested > LARGE * total or told.cause != near):
            return Diagnosis(failure, (told.cause, "fragmented"), told.because, told.line)
        causes = ("fragmented", told.cause) if told else ("fragmented",)
        because = "torch returns every completely free segment before it raises this error"
        return found(causes, because)
    if rest > LARGE * total + GiB and requested <= free + rest:
        return found(("outside",), "the numbers in the message do not explain that much")
    return None


def _by_whole(failure: OutOfMemory) -> Diagnosis | None:
    """The cause that a function names wherever it is in the traceback; None if there is no such function."""
    for cause, words in TEXTS["whole"].items():
        line, number = _innermost(failure, words)
        if line:
            return Diagnosis(failure, (cause,), f'the traceback says "{line}"', number)
    return None


def _by_evaluation(failure: OutOfMemory) -> Diagnosis | None:
    """The causes if the traceback is one of an evaluation; None if it is not."""
    log = TEXTS["log"]
    evaluates, number = _innermost(failure, log["evaluates"])
    if not evaluates:
        return None
    collects, at = _innermost(failure, log["collects"])
    if collects:
        return Diagnosis(failure, ("collected",), f'the traceback says "{collects}"', at)
    if _phase(failure, FAR)[0] not in (*NEAR, "forward"):
        return None
    by_library = _innermost(failure, log["trainer"])[0]
    causes = ("collected", "evaluation") if by_library else ("evaluation", "collected")
    return Diagnosis(failure, causes, f'the traceback says "{evaluates}"', number)


def _by_lines(failure: OutOfMemory) -> Diagnosis:
    """The causes that the log and the traceback show, and what shows them; "full" if they do not."""
    phase, line, number = _phase(failure, FAR)
    says = f'the traceback says "{line}"' if line else "the paste does not say when it happened"
    if failure.step and phase not in ("states", "load"):
        causes = ("grew", phase) if phase in NEAR else ("grew",)
        because = f'the log had already reached "{failure.step}"'
        return Diagnosis(failure, causes, because, failure.step_at)
    total, requested = (failure.sizes.get(name, 0) for name in ("total", "requested"))
    large = HUGE if phase == "forward" else LARGE
    if phase in ("", "backward", "forward") and requested > large * total > 0:
        because = f"one request was for {binary(requested)}; {says}"
        return Diagnosis(failure, ("tensor",), because, number or failure.at)
    return Diagnosis(failure, (phase or "full",), says, number or failure.at)


def _innermost(failure: OutOfMemory, words: str) -> tuple[str, int]:
    """The innermost line of the traceback that has such words, shortened, and its number; else "" and 0."""
    for place in reversed(range(len(failure.lines))):
        if re.search(words, failure.lines[place]):
            number = failure.numbers[place] if failure.numbers else 0
            return _short(failure.lines[place]), number
    return "", 0


def _short(line: str) -> str:
    """A line of a traceback with a file's name without its folders."""
    return re.sub(r'File ".*?([^/\\"]+)"', r"\1", line)


def _phase(failure: OutOfMemory, far: tuple[str, ...] = ()) -> tuple[str, str, int]:
    """The moment that the innermost telling line of a traceback names, that line and its number; else "".

    `NEAR` moments are looked for in the innermost lines alone, those in `far` in all.
    """
    count = len(failure.lines)
    recomputes = any("run_backward" in line for line in failure.lines)
    for names, first in ((NEAR, max(0, count - INNERMOST)), (far, 0)):
        for place, name in product(reversed(range(first, count)), names):
            line = failure.lines[place]
            within = failure.lines[max(0, place - 1)] + line
            if re.search(TEXTS["phases"][name], line) and not re.search(TEXTS["log"]["shared"], within):
                moment = "backward" if recomputes and name == "forward" else name
                return moment, _short(line), failure.numbers[place] if failure.numbers else 0
    return "", "", 0


def _full(failure: OutOfMemory, cause: str) -> str:
    """A sentence, and where the message has the numbers a bar of the card and its parts."""
    asked = ""
    if "requested" in failure.sizes:
        asked = f" {binary(failure.sizes['requested'])} more were asked for."
    parts = {name: size for name, size in failure.parts.items() if size}
    whole = sum(parts.values())
    if not whole:
        gpu = "The GPU's memory. The message does not say who held it."
        where = TEXTS["where"]
        return f"  {where.get(failure.kind) or where.get(cause, gpu)}{asked}"
    total = failure.sizes["total"]
    bar = ""
    rows = []
    for name, size in parts.items():
        letter, meaning = TEXTS["parts"][name]
        bar += letter * round(60 * size / whole)
        rows.append((f"  {letter}", binary(size), percent(size / whole), meaning))
    lines = [f"  A card of {binary(total)}.{asked}", f"  {bar}", aligned(rows, range(3, 4))]
    if whole > 1.01 * total:
        lent = "the driver lends the computer's memory, which is slow"
        lines.append(f"  In total that is more than the card has: {lent}.")
    return "\n".join(lines)


def options(parser: ArgumentParser) -> None:
    """Add the arguments of the command `oom`."""
    parser.add_argument(
        "message", nargs="*", metavar="LOG", help="logs, or words after -- (default: what you paste)"
    )
    parser.add_argument("--json", action="store_true", help="print the diagnoses as one JSON list")


def run(chosen: Namespace) -> int:
    """Print what an out-of-memory message says. Raises ValueError if there is none, or no such file."""
    words = chosen.message
    if not words and sys.stdin.isatty():
        print("Paste the message, then press Ctrl-D (on Windows Ctrl-Z and Enter).", file=sys.stderr)
    logs: dict[str, bytes]
    if not words:
        logs = {"": sys.stdin.buffer.read()}
    elif not _are_files(words):
        logs = {"": os.fsencode(" ".join(words))}
    else:
        logs = {name: Path(name).read_bytes() for name in words}
    found, refused = _diagnosed(logs)
    if chosen.json:
        print(json.dumps([{"log": name, **one.to_dict()} for name, one in found.items()]))
        return 0
    several = len(logs) > 1
    heads = {name: f"{name}\n{'=' * len(name)}\n\n" if several else "" for name in found}
    print("\n\n".join(heads[name] + one.to_text(columns()) for name, one in found.items()))
    if refused:
        print(f"\nNo message in {', '.join(refused)}.")
    return 0


def _diagnosed(logs: Mapping[str, bytes]) -> tuple[dict[str, Diagnosis], list[str]]:
    """The diagnosis of each log, and the logs without a message. Raises ValueError if none has one."""
    found: dict[str, Diagnosis] = {}
    refused: dict[str, str] = {}
    for name, log in logs.items():
        try:
            found[name] = diagnose(parse_log(log))
        except ValueError as error:
            refused[name] = str(error)
    if not found:
        names = f"{', '.join(refused)}: " if len(refused) > 1 else ""
        raise ValueError(f"{names}{next(iter(refused.values()))}")
    return found, list(refused)


def _are_files(arguments: list[str]) -> bool:
    """True for names of files, False for the words of a message. Raises ValueError for a missing file."""
    missing = [word for word in arguments if not _exists(word)]
    alone = len(arguments) == 1
    in_quotes = alone and " " in arguments[0]  # a message, even if it ends as a file would: "… 2.00 GiB"
    named = alone or _exists(arguments[0]) or all(Path(word).suffix for word in arguments)
    if missing and named and not in_quotes:
        raise ValueError(f"There is no file {missing[0]!r}: name a log, or give a message's words after --.")
    return not missing


def _exists(name: str) -> bool:
    return len(name) < 256 and Path(name).exists()  # a longer name is an error of the system
