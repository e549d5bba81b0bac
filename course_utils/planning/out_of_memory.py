"""Read an out-of-memory message of PyTorch: what was full, the likely cause, three changes and the lesson for
each.

out_of_memory.toml has the words to look for, and the texts of the answers.
"""

import os
import re
import sys
import tomllib
from argparse import ArgumentParser, Namespace
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from textwrap import fill, indent

from ..units import GiB, MiB, aligned, binary, parse_bytes, percent

TEXTS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
SIZE = r"([0-9]+(?:\.[0-9]+)? (?:[KMG]i?)?B)"
INNERMOST = (
    7  # lines in which loss and attention are looked for: further out their words are names of variables
)
# shares of a card that a tensor in forward, others, what is reserved may have
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
        """Bytes of the card by kind, none if the message does not say. Windows may lend more than the card
        has.
        """
        if not {"total", "free", "allocated"} <= self.sizes.keys():
            return {}
        allocated, cached, others, free = (
            self.sizes[name] for name in ("allocated", "cached", "others", "free")
        )
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
        chosen = (TEXTS["changes"][name] for name in TEXTS["causes"][self.cause]["changes"])
        device = '"mps"' if "MPS" in self.failure.words else '"cuda"'
        return [
            (code.replace('"cuda"', device), f"{lesson}: {TEXTS['lessons'][lesson]}")
            for lesson, code in chosen
        ]

    def __str__(self) -> str:
        sizes = {"free": 0, **self.failure.sizes, **self.failure.parts}
        sizes["together"] = sizes["free"] + sizes["cached"]
        shares = {f"{name}_share": percent(size / (sizes.get("total") or 1)) for name, size in sizes.items()}
        shares["numbers"] = f"{sizes.get('requested', 0) // 4:,}"
        words = {name: binary(size) for name, size in sizes.items()} | shares
        cause = TEXTS["causes"][self.cause]["text"].format(**words)
        said = "\n".join(fill(text, 98, break_on_hyphens=False) for text in (cause, f"Why: {self.because}"))
        changes = aligned(
            [(f"  {n}. {code}", f"lesson {of}") for n, (code, of) in enumerate(self.changes, 1)], 2
        )
        scripts = (re.match(TEXTS["log"]["script"], line) for line in self.failure.lines)
        script = next((match[1] for match in scripts if match), "train.py")
        return "\n\n".join(
            (
                f"What was full\n{_full(self.failure)}",
                f"Likely cause\n{indent(said, '  ')}",
                f"Three changes\n{changes}",
                f"Predict it before the next run, without a GPU: python3 -m course_utils watch {script}",
            )
        )


def parse(text: str) -> OutOfMemory:
    """The last out-of-memory message in a text, such as a paste or a log. Raises
    ValueError if there is none.
    """
    text = re.sub(r"\x1b\[[0-9;]*m|\0", "", text)
    matches = ((kind, list(re.finditer(words, text, re.DOTALL))) for kind, words in TEXTS["kinds"].items())
    kind, mark = next(((kind, found[-1]) for kind, found in matches if found), ("", None))
    if mark is None or kind == "foreign":
        raise ValueError(TEXTS["refused"][kind or "none"])
    message = re.sub(r"[\s│]+", " ", text[mark.start() : mark.start() + 2000])
    return OutOfMemory(kind, " ".join(mark[0].split()), _sizes(message), *_before(text[: mark.start()]))


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
    # Windows' driver may say 2^64 bytes
    others = [size for size in processes if size <= said.get("total", size)]
    ours = 0 if "this process has" in message else 0.99 * (allocated + cached)
    # in a container a process does not know its number
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
    for line in reversed("\n".join((lines[:start] if headers else lines)[-2000:]).splitlines()):
        match = None if re.search(TEXTS["log"]["not"], line) else re.search(TEXTS["log"]["step"], line)
        if match:
            return found, match[0].strip(" [") if int(match[1] or match[2]) > 2 else ""
    return found, ""


def diagnose(failure: OutOfMemory) -> Diagnosis:
    """The likely cause of a failure: first what the numbers say, then the log, then the traceback."""
    size = failure.sizes
    parts = failure.parts
    traceback = "\n".join(failure.lines)
    total, free, requested = (size.get(name, 0) for name in ("total", "free", "requested"))
    kind = {"short": "gpu", "bare": "gpu", "killed": "host"}.get(failure.kind, failure.kind)
    (phase, line) = _phase(failure.lines)
    evaluates = re.search(TEXTS["log"]["evaluates"], traceback)
    says = f'the traceback says "{line}"' if line else "the paste does not say when it happened"
    rules = (
        (kind != "gpu", kind, f'the words "{failure.words}"'),
        (
            "allowed" in size and requested <= free,
            "allowed",
            f'the words "{binary(size.get("allowed", 0))} allowed"',
        ),
        (
            size["others"] > LARGE * total > 0 and requested <= free + size["others"],
            "others",
            "the message lists them",
        ),
        (
            size["cached"] > SOME * total > 0 and requested <= free + size["cached"],
            "fragmented",
            "torch returns every completely free segment before it raises this error",
        ),
        (
            parts.get("rest", 0) > LARGE * total + GiB and requested <= free + parts["rest"],
            "outside",
            "the numbers in the message do not explain that much",
        ),
        (
            failure.step and phase not in ("states", "load"),
            "grew",
            f'the log had already reached "{failure.step}"',
        ),
        (
            evaluates and phase in ("loss", "attention", "forward"),
            "evaluation",
            f'the traceback has "{evaluates[0] if evaluates else ""}"',
        ),
        (
            phase in ("", "backward", "forward")
            and requested > {"forward": HUGE}.get(phase, LARGE) * total > 0,
            "tensor",
            f"one request was for {binary(requested)}; {says}",
        ),
        (True, phase or "full", says),
    )
    cause, because = next((cause, because) for holds, cause, because in rules if holds)
    return Diagnosis(failure, cause, f"{because}.")


def _phase(lines: tuple[str, ...]) -> tuple[str, str]:
    """The moment that the innermost telling line of a traceback names, and that line;
    ("", "") if none does.
    """
    near = ("loss", "attention")
    far = ("states", "step", "gather", "load", "backward", "forward")
    for names, some in ((near, lines[-INNERMOST:]), (far, lines)):
        for line, name in ((line, name) for line in reversed(some) for name in names):
            if re.search(TEXTS["phases"][name], line):
                recomputes = name == "forward" and any("run_backward" in line for line in lines)
                return "backward" if recomputes else name, re.sub(r'File ".*?([^/\\"]+)"', r"\1", line)
    return "", ""


def _full(failure: OutOfMemory) -> str:
    """A sentence, and where the message has the numbers a bar of the card and its parts."""
    asked = (
        f" {binary(failure.sizes['requested'])} more were asked for." if "requested" in failure.sizes else ""
    )
    parts = {name: size for name, size in failure.parts.items() if size}
    whole = sum(parts.values())
    if not whole:
        where = (
            "The computer's own memory, not the GPU's"
            if failure.kind in ("host", "killed")
            else "The GPU's memory"
        )
        return f"  {where}. The message does not say who held it.{asked}"
    of = TEXTS["parts"]
    bar = "".join(of[name][0] * round(60 * size / whole) for name, size in parts.items())
    rows = [
        (f"  {of[name][0]}", binary(size), percent(size / whole), of[name][1]) for name, size in parts.items()
    ]
    lent = (
        "\n  In total that is more than the card has: the driver lends the computer's memory, which is slow."
    )
    more = lent if whole > 1.01 * failure.sizes["total"] else ""
    return (
        f"  A card of {binary(failure.sizes['total'])}.{asked}\n  {bar}\n{aligned(rows, range(3, 4))}{more}"
    )


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
    if len(words) == 1 and " " not in words[0] and not Path(words[0]).exists():
        raise ValueError(f"There is no file {words[0]!r}: name a log, or give a message's words after --.")
    if len(words) == 1 and (" " not in words[0] or (len(words[0]) < 256 and Path(words[0]).is_file())):
        text = Path(words[0]).read_bytes()[-4 * MiB :]  # the end of a long log
    else:
        text = os.fsencode(" ".join(words)) if words else sys.stdin.buffer.read()
    print(diagnose(parse(text.decode(errors="replace"))))
    return 0
