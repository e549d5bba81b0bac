"""cuBLAS's workspaces: memory that torch takes for each thread that multiplies matrices.

It keeps them to the end.

torch's rule (`parseChosenWorkspaceSize` and `parseCUDABlasLtWorkspaceSize` in
aten/src/ATen/cuda/CublasHandlePool.cpp), and what torch 2.11 and 2.13 took by their own counters when asked
as a card of each capability. Forward runs on one thread and backward on autograd's own, so a training step
has two.
"""

import os
import re
from functools import cache
from typing import NamedTuple

from ..gpus import GPUS
from ..run import TrainingRun
from ..units import KiB, MiB, round_up

VARIABLE = "CUBLAS_WORKSPACE_CONFIG"
"""Environment variable that sets the size, as ":SIZE:COUNT" in KiB, several times."""

NEWEST = (2, 13)
"""The release of torch whose rule holds where no torch is installed."""

LARGE = 32 * MiB
USUAL = 8192 * KiB + 128 * KiB


class Workspaces(NamedTuple):
    """Bytes that one thread keeps.

    `cublas` from its first matrix product on, `lt` from the first that adds a bias.

    `lt_each` are bytes that each product with a bias takes while it runs.
    """

    cublas: int
    lt: int
    lt_each: int = 0


def workspaces_of(capability: tuple[int, int], torch: tuple[int, int] | None = None) -> Workspaces:
    """Bytes that a thread keeps on a GPU of this compute capability under this release of torch.

    By default the installed one.

    Hopper has 32 MiB, and from torch 2.12 on Blackwell too; every other 8.125 MiB. Until torch 2.11 a product
    with a bias had 1 MiB of its own, which is kept from torch 2.9 on (pytorch's pull request 156495).
    CUBLAS_WORKSPACE_CONFIG goes before.
    """
    release = torch or installed_torch()
    is_hopper = capability == (9, 0)
    is_large = capability[0] in (9, 10, 12) if release >= (2, 12) else is_hopper
    cublas = asked_for()
    if cublas is None:
        cublas = LARGE if is_large else USUAL
    if release < (2, 9):
        return Workspaces(cublas, lt=0, lt_each=MiB)
    if release < (2, 12):
        return Workspaces(cublas, lt=MiB)
    return Workspaces(cublas, lt=0)


@cache
def asked_for() -> int | None:
    """Bytes that CUBLAS_WORKSPACE_CONFIG asks for; None if it is not set.

    It is read once, as torch reads it.
    """
    pairs = re.findall(r":(\d+):(\d+)", os.environ.get(VARIABLE, ""))
    if not pairs:
        return None
    return sum(int(size) * int(count) * KiB for size, count in pairs)


@cache
def installed_torch() -> tuple[int, int]:
    """The release of torch that is installed; the newest that is known where there is none."""
    from importlib import metadata  # not above: it would take a third of the estimates' import

    try:
        major, minor = metadata.version("torch").split(".")[:2]
    except metadata.PackageNotFoundError:
        return NEWEST
    return int(major), int(minor)


def workspaces_on(card: str | None) -> Workspaces | None:
    """Bytes that a thread keeps on a card of the catalog; None if no card is named."""
    if card is None:
        return None
    return workspaces_of(GPUS[card].capability)


def workspace_bytes(run: TrainingRun) -> int:
    """Bytes of both threads' workspaces from the second step on; 0 for a run that names no card."""
    kept = workspaces_on(run.card)
    if kept is None:
        return 0
    threads_with_bias = 0
    if run.model.bias or run.model.qkv_bias:
        # forward's, and backward's where it runs whole blocks again
        threads_with_bias = 2 if run.blocks_per_checkpoint else 1
    return 2 * round_up(kept.cublas) + threads_with_bias * round_up(kept.lt)
