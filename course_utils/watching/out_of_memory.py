"""Read an out-of-memory message of PyTorch.

The answer is what was full, the likely cause, three changes and the lesson for each.

out_of_memory.toml has the words to look for, and the texts of the answers.
"""

import os
import re
import sys
import tomllib
from argparse import ArgumentParser, Namespace
from dataclasses import dataclass
from itertools import product, takewhile
from pathlib import Path
from textwrap import fill, indent

from ..units import GiB, MiB, aligned, binary, parse_bytes, percent

TEXTS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
SIZE = r"([0-9]+(?:\.[0-9]+)? (?:[KMG]i?)?B)"
INNERMOST = 7
"""Lines in which loss and attention are looked for: further out their words are names of variables."""

# Shares of a card that must be exceeded: HUGE by a tensor in forward; LARGE by other tensors, by other
# processes, and by what is outside torch; SOME by what is reserved.
HUGE = 0.25
LARGE = 0.1
SOME = 0.05


@dataclass(frozen=True)
class OutOfMemory:
    """The content of a message. `kind` is one of out_of_memory.toml's, known by these `words`.

    `sizes` are bytes: `requested`, `total`, `free`, `allocated` and `allowed` if it names them, `cached`
    (reserved but unallocated), `pools` and `others` (of other processes) always. `lines` are the traceback's;
    `step` is how the log counts its last step if that is at least the third.
    """

    kind: str
    words: str
    sizes: dict[str, int]
    lines: tuple[str, ...] = ()
    step: str = ""

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
    """The likely cause of a failure, by its name in out_of_memory.toml, and what led to it. Prints itself."""

    failure: OutOfMemory
    cause: str
    because: str

    @property
    def changes(self) -> list[tuple[str, str]]:
        """Three changes, each with its lesson: "06: Recomputation"."""
        device = '"mps"' if "MPS" in self.failure.words else '"cuda"'
        found = []
        for name in TEXTS["causes"][self.cause]["changes"]:
            lesson, code = TEXTS["changes"][name]
            found.append((code.replace('"cuda"', device), f"{lesson}: {TEXTS['lessons'][lesson]}"))
        return found

    def __str__(self) -> str:
        cause = TEXTS["causes"][self.cause]["text"].format(**self._words())
        said = "\n".join(fill(text, 98, break_on_hyphens=False) for text in (cause, f"Why: {self.because}"))
        rows = [(f"  {n}. {code}", f"lesson {of}") for n, (code, of) in enumerate(self.changes, 1)]
        scripts = (re.match(TEXTS["log"]["script"], line) for line in self.failure.lines)
        script = next((match[1] for match in scripts if match), "train.py")
        parts = [
            f"What was full\n{_full(self.failure)}",
            f"Likely cause\n{indent(said, '  ')}",
            f"Three changes\n{aligned(rows, 2)}",
            f"Predict it before the next run, without a GPU: python3 -m course_utils watch {script}",
        ]
        return "\n\n".join(parts)

    def _words(self) -> dict[str, str]:
        """The message's sizes as the texts of out_of_memory.toml name them, and their shares of the card."""
        sizes = {"free": 0, **self.failure.sizes, **self.failure.parts}
        sizes["together"] = sizes["free"] + sizes["cached"]
        total = sizes.get("total") or 1
        words = {name: binary(size) for name, size in sizes.items()}
        words |= {f"{name}_share": percent(size / total) for name, size in sizes.items()}
        words["numbers"] = f"{sizes.get('requested', 0) // 4:,}"
        return words


def parse(text: str) -> OutOfMemory:
    """The last out-of-memory message in a text, such as a paste or a log.

    Raises ValueError if there is none.
    """
    text = re.sub(r"\x1b\[[0-9;]*m|\0", "", text)
    kind, mark = _last_mark(text)
    if mark is None:
        raise ValueError(TEXTS["refused"]["none"])
    if kind == "foreign":
        raise ValueError(TEXTS["refused"]["foreign"])
    message = re.sub(r"[\s│]+", " ", text[mark.start() : mark.start() + 2000])
    return OutOfMemory(kind, " ".join(mark[0].split()), _sizes(message), *_before(text[: mark.start()]))


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


def _before(text: str) -> tuple[tuple[str, ...], str]:
    """The lines of the traceback that ends with `text`, and the words before it that count the steps."""
    *lines, last = text.split("\n")
    rank = re.match(r"\[rank[0-9]+\]:", last)
    if rank:  # torchrun mixes the lines of all ranks
        lines = [line.removeprefix(rank[0]) for line in lines if line.startswith(rank[0])]
    headers = [number for number, line in enumerate(lines, 1) if "Traceback (most recent call last)" in line]
    start = headers[-1] if headers else max(0, len(lines) - 40)
    stack = takewhile(lambda line: not re.search(TEXTS["log"]["ours"], line), lines[start:])
    found = tuple(line.strip(" │\r") for line in stack if line.strip(" ^~│\r"))
    return found, _step(lines[:start] if headers else lines)


def _step(lines: list[str]) -> str:
    """The words that count the last step of a log, if that is at least the third; else ""."""
    log = "\n".join(lines[-2000:]).splitlines()  # a progress bar writes many lines between two line feeds
    for line in reversed(log):
        if re.search(TEXTS["log"]["not"], line):
            continue
        match = re.search(TEXTS["log"]["step"], line)
        if match:
            number = int(match[1] or match[2])
            return match[0].strip(" [") if number > 2 else ""
    return ""


def diagnose(failure: OutOfMemory) -> Diagnosis:
    """The likely cause of a failure: first what the numbers say, then the log, then the traceback."""
    cause, because = _cause_by_numbers(failure) or _cause_by_lines(failure)
    return Diagnosis(failure, cause, f"{because}.")


def _cause_by_numbers(failure: OutOfMemory) -> tuple[str, str] | None:
    """The cause that the message itself shows, and what shows it; None if it does not.

    What would have been enough for the request is a cause; what would not have been is none.
    """
    size = failure.sizes
    total, free, requested = (size.get(name, 0) for name in ("total", "free", "requested"))
    others, cached = size["others"], size["cached"]
    rest = failure.parts.get("rest", 0)
    kind = {"short": "gpu", "bare": "gpu", "killed": "host"}.get(failure.kind, failure.kind)
    if kind != "gpu":
        return kind, f'the words "{failure.words}"'
    if "allowed" in size and requested <= free:
        return "allowed", f'the words "{binary(size["allowed"])} allowed"'
    if others > LARGE * total > 0 and requested <= free + others:
        return "others", "the message lists them"
    if cached > SOME * total > 0 and requested <= free + cached:
        return "fragmented", "torch returns every completely free segment before it raises this error"
    if rest > LARGE * total + GiB and requested <= free + rest:
        return "outside", "the numbers in the message do not explain that much"
    return None


def _cause_by_lines(failure: OutOfMemory) -> tuple[str, str]:
    """The cause that the log and the traceback show, and what shows it; "full" if they do not."""
    phase, line = _phase(failure.lines)
    says = f'the traceback says "{line}"' if line else "the paste does not say when it happened"
    if failure.step and phase not in ("states", "load"):
        return "grew", f'the log had already reached "{failure.step}"'
    evaluates = re.search(TEXTS["log"]["evaluates"], "\n".join(failure.lines))
    if evaluates and phase in ("loss", "attention", "forward"):
        return "evaluation", f'the traceback has "{evaluates[0]}"'
    total, requested = (failure.sizes.get(name, 0) for name in ("total", "requested"))
    large = HUGE if phase == "forward" else LARGE
    if phase in ("", "backward", "forward") and requested > large * total > 0:
        return "tensor", f"one request was for {binary(requested)}; {says}"
    return phase or "full", says


def _phase(lines: tuple[str, ...]) -> tuple[str, str]:
    """The moment that the innermost telling line of a traceback names, and that line; else ("", "")."""
    near = ("loss", "attention")
    far = ("states", "step", "gather", "load", "backward", "forward")
    for names, some in ((near, lines[-INNERMOST:]), (far, lines)):
        for line, name in product(reversed(some), names):
            if re.search(TEXTS["phases"][name], line):
                recomputes = name == "forward" and any("run_backward" in line for line in lines)
                short = re.sub(r'File ".*?([^/\\"]+)"', r"\1", line)  # a file without its folders
                return "backward" if recomputes else name, short
    return "", ""


def _full(failure: OutOfMemory) -> str:
    """A sentence, and where the message has the numbers a bar of the card and its parts."""
    asked = ""
    if "requested" in failure.sizes:
        asked = f" {binary(failure.sizes['requested'])} more were asked for."
    parts = {name: size for name, size in failure.parts.items() if size}
    whole = sum(parts.values())
    if not whole:
        is_host = failure.kind in ("host", "killed")
        where = "The computer's own memory, not the GPU's" if is_host else "The GPU's memory"
        return f"  {where}. The message does not say who held it.{asked}"
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
        "message", nargs="*", metavar="LOG", help="a log, or words after -- (default: what you paste)"
    )


def run(chosen: Namespace) -> int:
    """Print what an out-of-memory message says. Raises ValueError if there is none, or no such file."""
    words = chosen.message
    if not words and sys.stdin.isatty():
        print("Paste the message, then press Ctrl-D (on Windows Ctrl-Z and Enter).", file=sys.stderr)
    if not words:
        text = sys.stdin.buffer.read()
    elif len(words) == 1 and _is_file(words[0]):
        text = Path(words[0]).read_bytes()[-4 * MiB :]  # the end of a long log
    else:
        text = os.fsencode(" ".join(words))
    print(diagnose(parse(text.decode(errors="replace"))))
    return 0


def _is_file(argument: str) -> bool:
    """True for a file's name, False for a message in one argument. Raises ValueError for a missing file."""
    if " " in argument:
        return len(argument) < 256 and Path(argument).is_file()  # a longer name is an error of the system
    if not Path(argument).exists():
        raise ValueError(f"There is no file {argument!r}: name a log, or give a message's words after --.")
    return True
