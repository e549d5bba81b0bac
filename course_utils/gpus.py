"""GPUs by name, and the memory that the driver reports for each."""

from dataclasses import dataclass

from .nearest import unknown
from .units import MiB


@dataclass(frozen=True)
class Gpu:
    """A GPU. `memory` is in bytes, as the driver lists it (`nvidia-smi`, memory.total) before any program runs.

    `capability` is CUDA's compute capability: from 8.0 (Ampere) on the hardware computes in bf16 and torch has a
    flash kernel.
    """

    name: str
    memory: int
    capability: tuple[int, int]

    @property
    def has_bf16(self) -> bool:
        """Whether bf16 arithmetic and the flash attention kernel run on it (NVIDIA Ampere and newer)."""
        return self.capability >= (8, 0)


# A card sold as "32 GB" holds 32 GiB of memory cells; error correction and the driver keep some of it on some cards.
GPUS: dict[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        Gpu("T4-16GB", 15_360 * MiB, (7, 5)),
        Gpu("V100-16GB", 16_384 * MiB, (7, 0)),
        Gpu("V100-32GB", 32_768 * MiB, (7, 0)),
        Gpu("RTX4080-16GB", 16_376 * MiB, (8, 9)),
        Gpu("RTX3090-24GB", 24_576 * MiB, (8, 6)),
        Gpu("RTX4090-24GB", 24_564 * MiB, (8, 9)),
        Gpu("RTX5090-32GB", 32_607 * MiB, (12, 0)),
        Gpu("L4-24GB", 23_034 * MiB, (8, 9)),
        Gpu("A100-40GB", 40_960 * MiB, (8, 0)),
        Gpu("A100-80GB", 81_920 * MiB, (8, 0)),
        Gpu("H100-80GB", 81_559 * MiB, (9, 0)),
        Gpu("H200-141GB", 143_771 * MiB, (9, 0)),
    )
}
"""The catalog: memory.total of nvidia-smi on each card, in MiB, turned into bytes."""


def gpu(name: str) -> Gpu:
    """The GPU of that name. Raises ValueError naming the known ones and the nearest."""
    if name not in GPUS:
        by_lower = {known.lower(): known for known in GPUS}
        if str(name).lower() not in by_lower:
            raise unknown("GPU", name, GPUS)
        name = by_lower[str(name).lower()]
    return GPUS[name]
