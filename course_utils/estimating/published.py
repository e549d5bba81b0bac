"""The field's published formulas, each as its source has it: for lessons to lay beside the course's own, never tuned
to it.
"""

from math import sqrt

from ..run import TrainingRun


def zero_state_bytes(parameters: int, optimizer_bytes: int = 12) -> dict[str, int]:
    """Bytes of fp16 weights, fp16 gradients and K·Ψ of optimizer states: 2Ψ + 2Ψ + KΨ, K = 12 for mixed-precision Adam.

    Rajbhandari et al. 2020 (ZeRO), section 3.1: fp32 weights, momentum and variance are 4Ψ each.
    """
    third = optimizer_bytes // 3
    return {
        "fp16 parameters": 2 * parameters,
        "fp16 gradients": 2 * parameters,
        "fp32 parameters": third * parameters,
        "fp32 momentum": third * parameters,
        "fp32 variance": third * parameters,
    }


def zero_activation_elements(run: TrainingRun) -> int:
    """Activation elements of a GPT-2-like model: 12 · h · b · s · L (ZeRO, section 3.2, footnote 3)."""
    return 12 * run.model.hidden * run.micro_batch * run.seq_len * run.model.layers


def zero_activation_bytes(run: TrainingRun) -> int:
    """Bytes of those in 16-bit."""
    return 2 * zero_activation_elements(run)


def zero_checkpointed_bytes(run: TrainingRun) -> int:
    """Bytes left with checkpointing, "the square root of the total": the total over √L (ZeRO, section 3.2)."""
    return round(zero_activation_bytes(run) / sqrt(run.model.layers))


def korthikanti_block_bytes(run: TrainingRun) -> int:
    """Bytes that one block keeps in 16-bit with eager attention: s·b·h·(34 + 5·a·s/h) (Korthikanti et al. 2022, eq.
    2).
    """
    s, b, h, a = run.seq_len, run.micro_batch, run.model.hidden, run.model.heads
    return s * b * (34 * h + 5 * a * s)


def korthikanti_activation_bytes(run: TrainingRun) -> int:
    """The same for L blocks (Korthikanti et al. 2022, eq. 2 times L)."""
    return run.model.layers * korthikanti_block_bytes(run)


def checkpoints_bytes(run: TrainingRun, element: int = 2) -> int:
    """Bytes of one checkpoint per block: 2·s·b·h·L in 16-bit (Korthikanti et al. 2022, section 5)."""
    return element * run.seq_len * run.micro_batch * run.model.hidden * run.model.layers
