"""GPUs by name: their memory, and the rates that a training step runs into.

Memory is what the driver lists, and the capacity that a program then sees. Rates are the data sheets' peaks, which
no program reaches: they serve to compare choices, not to promise times.
"""

from dataclasses import dataclass

from .errors import unknown
from .units import GB, GiB, MiB, parse_bytes

TERA = 10**12
PCIE = {3: 15.75 * GB, 4: 31.5 * GB, 5: 63.0 * GB}
"""Bytes a second over 16 lanes in one direction, by PCI Express generation: 8, 16, 32 GT/s a lane, coded 128b/130b."""


@dataclass(frozen=True)
class Rates:
    """A card's peak rates: FLOP/s (a multiply-add is two, without sparsity) and bytes/s.

    `tensor` multiplies 16-bit matrices and adds in fp32, `tf32` matrices in tf32 (where the hardware has it, else it is
    `fp32`), `fp32` is everything else. `memory` reads or writes the card's own memory; `link` goes to another GPU and
    `host` to the host's memory, each in one direction. `source` is the document of the first four.
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
    """A GPU. `memory` is in bytes, as the driver lists it (`nvidia-smi`, memory.total) before any program runs.

    `capability` is CUDA's compute capability: from 8.0 (Ampere) on the hardware computes in bf16 and torch has a
    flash kernel. `usable` is the bytes that a CUDA program sees ("total capacity" in torch's
    out-of-memory message): the driver has kept the rest; `usable_source` says who saw that. `rates` is None for a card
    that is not in the catalog.
    """

    name: str
    memory: int
    capability: tuple[int, int]
    usable: int = 0
    usable_source: str = ""
    rates: Rates | None = None

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
    """Rates from the data sheet's units: TFLOP/s, GB/s, and NVLink's GB/s in both directions together."""
    link = nvlink / 2 * GB if nvlink else PCIE[pcie]
    return Rates(tensor * TERA, tf32 * TERA, fp32 * TERA, memory * GB, link, PCIE[pcie], source)


def _seen(gibibytes: float, issue: str) -> tuple[int, str]:
    """Bytes out of the message of a program that ran out of memory on such a card, and where it can be read.

    The message has two decimals of a GiB; drivers differ by more.
    """
    return int(gibibytes * GiB), f"https://github.com/{issue}"


ADA = "NVIDIA Ada GPU Architecture whitepaper"
AMPERE = "NVIDIA A100 Tensor Core GPU data sheet"

# A card sold as "32 GB" holds 32 GiB of memory cells; error correction and the driver keep some of it on some cards.
GPUS: dict[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        Gpu(
            "T4-16GB", 15_360 * MiB, (7, 5), *_seen(14.56, "AlphaGPU/leetgpu-challenges/issues/52"),
            rates=_rates(65, 8.1, 8.1, 320, "NVIDIA T4 product page (its data sheet has 300 GB/s)", pcie=3),
        ),
        Gpu(
            "V100-16GB", 16_384 * MiB, (7, 0), *_seen(15.78, "kchengiva/Shift-GCN/issues/34"),
            rates=_rates(125, 15.7, 15.7, 900, "NVIDIA V100 data sheet (SXM2)", pcie=3, nvlink=300),
        ),
        Gpu(
            "V100-32GB", 32_768 * MiB, (7, 0), *_seen(31.74, "liucongg/ChatGLM-Finetuning/issues/73"),
            rates=_rates(125, 15.7, 15.7, 900, "NVIDIA V100 data sheet (SXM2)", pcie=3, nvlink=300),
        ),
        # 15.99 GiB is all of it, as Windows reports it; no message from Linux is known
        Gpu(
            "RTX4080-16GB", 16_376 * MiB, (8, 9), *_seen(15.99, "aigc-apps/sd-webui-EasyPhoto/issues/281"),
            rates=_rates(97.5, 48.7, 48.7, 716.8, ADA, pcie=4),
        ),
        Gpu(
            "RTX3090-24GB", 24_576 * MiB, (8, 6), *_seen(23.70, "GaoLii/DSP/issues/10"),
            rates=_rates(71, 35.6, 35.6, 936, "NVIDIA Ampere GA102 GPU Architecture whitepaper, table 9", pcie=4),
        ),
        Gpu(
            "RTX4090-24GB", 24_564 * MiB, (8, 9), *_seen(23.64, "ali-vilab/VGen/issues/104"),
            rates=_rates(165.2, 82.6, 82.6, 1008, f"{ADA}, appendix A", pcie=4),
        ),
        Gpu(
            "RTX5090-32GB", 32_607 * MiB, (12, 0), *_seen(31.37, "Wan-Video/Wan2.1/issues/465"),
            rates=_rates(209.5, 104.8, 104.8, 1792, "NVIDIA RTX Blackwell GPU Architecture whitepaper", pcie=5),
        ),
        Gpu(
            "L4-24GB", 23_034 * MiB, (8, 9), *_seen(22.03, "ArcInstitute/evo2/issues/190"),
            rates=_rates(121, 60, 30.3, 300, "NVIDIA L4 data sheet", pcie=4),
        ),
        Gpu(
            "A100-40GB", 40_960 * MiB, (8, 0), *_seen(39.50, "TianheWu/CoSeR/issues/10"),
            rates=_rates(312, 156, 19.5, 1555, f"{AMPERE} (SXM)", pcie=4, nvlink=600),
        ),
        Gpu(
            "A100-80GB", 81_920 * MiB, (8, 0), *_seen(79.10, "pixeli99/SVD_Xtend/issues/39"),
            rates=_rates(312, 156, 19.5, 2039, f"{AMPERE} (SXM)", pcie=4, nvlink=600),
        ),
        Gpu(
            "H100-80GB", 81_559 * MiB, (9, 0), *_seen(79.11, "vllm-project/vllm/issues/27508"),
            rates=_rates(989, 495, 67, 3350, "NVIDIA H100 data sheet (SXM)", pcie=5, nvlink=900),
        ),
        Gpu(
            "H200-141GB", 143_771 * MiB, (9, 0), *_seen(139.81, "modelscope/ms-swift/issues/9191"),
            rates=_rates(989, 495, 67, 4800, "NVIDIA H200 data sheet (SXM)", pcie=5, nvlink=900),
        ),
    )
}  # fmt: skip
"""The catalog. `memory` is memory.total of nvidia-smi on each card, in MiB, turned into bytes."""


def gpu(name: str) -> Gpu:
    """The GPU of that name. Raises ValueError naming the known ones and the nearest."""
    if not isinstance(name, str) or name not in GPUS:
        by_lower = {known.lower(): known for known in GPUS}
        if str(name).lower() not in by_lower:
            raise unknown("GPU", name, GPUS)
        name = by_lower[str(name).lower()]
    return GPUS[name]


def card_named(name: str, capability: tuple[int, int]) -> Gpu:
    """A card of the catalog, or one of so much memory, as in "16 GB", of this compute capability.

    Raises ValueError for a name that is neither.
    """
    if name[:1].isdigit():
        return Gpu(f"a card of {name}", parse_bytes(name), capability)
    return gpu(name)
