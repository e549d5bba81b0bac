"""Hash what a step allocates and frees, in order: the hash says which step a recording is of."""

import hashlib
from collections.abc import Iterable, Mapping
from importlib import metadata

from ..measurement import Allocation
from ..measuring.sources import simulated_run
from ..run import TrainingRun


def sequence_hash(run: TrainingRun, steps: int = 2) -> str:
    """A hash of what simulated steps of `run` allocate and free, in order. Raises like `measure`."""
    return hash_of(simulated_run(run, steps, "").allocations)


def hash_of(allocations: Iterable[Allocation]) -> str:
    """A hash of allocations: operator, bytes, kind, birth and death, in order."""
    digest = hashlib.sha256()
    for item in allocations:
        digest.update(f"{item.operation} {item.bytes} {item.kind} {item.born} {item.died}\n".encode())
    return digest.hexdigest()[:16]


def release_line() -> str:
    """torch's release line, "2.13" of 2.13.0+cpu: hashes are kept for each."""
    return ".".join(metadata.version("torch").split(".")[:2])


def kept_hash(hashes: Mapping[str, str]) -> str:
    """The hash kept for this torch; that of the last release line where there is none for it."""
    return hashes.get(release_line()) or list(hashes.values())[-1]
