"""GPUs by name: their memory, and the rates that a training step runs into.

Memory is what the driver lists, and the capacity that a program then sees. Rates are the data sheets' peaks,
which no program reaches: they serve to compare choices, not to promise times.
"""

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .errors import unknown
from .units import GB, GiB, MiB

TERA = 10**12
PCIE = {3: 15.75 * GB, 4: 31.5 * GB, 5: 63.0 * GB}
"""Bytes per second of 16 lanes in one direction, by PCI Express version.

8, 16 and 32 GT/s per lane, coded 128b/130b.
"""


@dataclass(frozen=True)
class Rates:
    """A card's peak rates: FLOP/s (a multiply-add is two, without sparsity) and bytes/s.

    `tensor` multiplies 16-bit matrices and adds in fp32, `tf32` matrices in tf32 (where the hardware has it,
    else it is `fp32`), `fp32` is everything else. `memory` reads or writes the card's own memory; `link` goes
    to another GPU and `host` to the host's memory, each in one direction. `source` is the document of the
    first four.
    """

    tensor: float
    tf32: float
    fp32: float
    memory: float
    link: float
    host: float
    source: str


@dataclass(frozen=True)
class Gpu:
    """A GPU.

    `memory` is in bytes, as the driver lists it (`nvidia-smi`, memory.total) before any program runs.
    `capability` is CUDA's compute capability: from 8.0 (Ampere) on the hardware computes in bf16 and torch
    has a flash kernel. `usable` is the bytes that a CUDA program sees ("total capacity" in torch's
    out-of-memory message): the driver has kept the rest; `usable_source` says who saw that. `rates` is None
    for a card that is not in the catalog. `processors` is the number of streaming multiprocessors, 0 where
    nobody has said.
    """

    name: str
    memory: int
    capability: tuple[int, int]
    usable: int = 0
    usable_source: str = ""
    rates: Rates | None = None
    processors: int = 0

    @property
    def has_bf16(self) -> bool:
        """True if bf16 arithmetic and the flash attention kernel run on it (NVIDIA Ampere and newer)."""
        return self.capability >= (8, 0)

    @property
    def room(self) -> int:
        """Bytes that a program can count on: `usable`, or `memory` of a card that nobody has looked at."""
        return self.usable or self.memory


def _rates(
    tensor: float, tf32: float, fp32: float, memory: float, source: str, *, pcie: int, nvlink: float = 0
) -> Rates:
    """Rates from the data sheet's units, as gpus.toml has them."""
    link = nvlink / 2 * GB if nvlink else PCIE[pcie]
    return Rates(tensor * TERA, tf32 * TERA, fp32 * TERA, memory * GB, link, PCIE[pcie], source)


def _catalog() -> Iterator[Gpu]:
    text = Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
    for name, card in tomllib.loads(text).items():
        major, minor = card["capability"]
        gibibytes, issue = card["seen"]
        rates = _rates(**card["rates"], source=card["source"])
        usable = int(gibibytes * GiB)
        seen_in = f"https://github.com/{issue}"
        yield Gpu(name, card["memory"] * MiB, (major, minor), usable, seen_in, rates, card["processors"])


GPUS: dict[str, Gpu] = {card.name: card for card in _catalog()}
"""The catalog, in gpus.toml's order."""


def gpu(name: str) -> Gpu:
    """The GPU of that name. Raises ValueError naming the known ones and the nearest."""
    if not isinstance(name, str) or name not in GPUS:
        by_lower = {known.lower(): known for known in GPUS}
        if str(name).lower() not in by_lower:
            raise unknown("GPU", name, GPUS)
        name = by_lower[str(name).lower()]
    return GPUS[name]


IMITATED = gpu("A100-80GB")
"""The card that a simulated GPU is where none is named: it has every kernel that the course knows."""

VARIANTS = {"SUPER", "Ti", "D", "Laptop", "MIG"}
"""Words in a driver's name for a card that make it another one: "NVIDIA GeForce RTX 4090 D"."""

CLOSE = 0.03
"""Part by which a card's memory may differ from the catalog's: drivers and error correction keep some."""


def recognized(name: str, memory: int, capability: tuple[int, int], processors: int = 0) -> Gpu:
    """The catalog's card for a device that is there; one that the catalog lacks is a card of its own.

    `name` is the driver's, as "NVIDIA H100 80GB HBM3", `memory` the bytes that a program sees. Part of a card
    (MIG) and a laptop's are none of the catalog: their memory differs.
    """
    words = name.replace("RTX ", "RTX").replace("-", " ").split()
    for card in GPUS.values():
        is_named = card.name.split("-")[0] in words and VARIANTS.isdisjoint(words)
        is_near = abs(memory - card.room) <= CLOSE * card.room
        if is_named and is_near and capability == card.capability:
            return card
    return Gpu(name, memory, capability, usable=memory, processors=processors)
