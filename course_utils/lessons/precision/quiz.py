"""The numbers in the quiz of lesson 03, question by question; its words are in quiz.toml."""

import struct
from collections.abc import Iterator

from ... import TrainingRun, moments
from ...estimating.formula import block_bytes
from ...estimating.states import gradient_bytes, optimizer_state_bytes, parameter_bytes
from ...interactive.quiz import Numbers, gb
from ...units import each

MODEL = "gpt2-medium"
BF16_EPS = 2**-7
HALF_SMALLEST_NORMAL = 2**-14


def in_half(value: float) -> float:
    """The nearest fp16 number."""
    return struct.unpack("e", struct.pack("e", value))[0]


def in_bf16(value: float) -> float:
    """The nearest bf16 number, ties to even: the upper 16 bits of an fp32 number, rounded."""
    bits = int.from_bytes(struct.pack(">f", value), "big")
    bits += 0x7FFF + (bits >> 16 & 1)
    return struct.unpack(">f", (bits & 0xFFFF0000).to_bytes(4, "big"))[0]


def numbers() -> Iterator[Numbers]:
    weight, update = 1.0, 0.003
    bf16, fp16 = in_bf16(weight + update), in_half(weight + update)
    above = weight + BF16_EPS
    stored = each("{:.6g}".format, bf16=bf16, exact=weight + update, fp16=fp16, above=above)
    yield "vanishing_update", {"weight": weight, "update": update} | stored
    gradient = 1e-8
    scale = next(2**k for k in range(64) if in_half(gradient * 2**k))
    normal = next(2**k for k in range(64) if gradient * 2**k >= HALF_SMALLEST_NORMAL)
    yield "smallest_scale", {"scale": scale, "half": scale // 2, "normal": normal, "begin": 2**16}
    run = TrainingRun(MODEL, precision="amp-bf16")
    weights, gradients, states = parameter_bytes(run), gradient_bytes(run), optimizer_state_bytes(run)
    fp32 = weights + gradients + states
    copies = moments(run)["after loss"]["weight_copies"]
    half = (weights + gradients) // 2 + states
    sizes = each(gb, account=fp32 + copies, fp32=fp32, half=half, twice=fp32 + 2 * copies)
    yield "autocast_account", {"N": run.model.parameters} | sizes
    run = TrainingRun(MODEL, precision="bf16-master-fp32grad")
    N = run.model.parameters
    weights, gradients, states = (
        round(size(run) / N) for size in (parameter_bytes, gradient_bytes, optimizer_state_bytes)
    )
    half_gradients = round(gradient_bytes(run.replace(precision="bf16-master")) / N)
    zero = weights + half_gradients + states
    total = weights + gradients + states
    yield "main_gradients", {"sum": total, "zero": zero, "twice": total + half_gradients, "optimizer": states}
    run = TrainingRun(MODEL, precision="bf16-master", attention="efficient")
    token = run.seq_len * run.micro_batch * run.model.hidden
    half, single = (round(block_bytes(one) / token) for one in (run, run.replace(precision="fp32")))
    masks = 2 * half - single
    known = {"half": half, "masks": masks}
    yield "activations_in_half", known | {"single": single, "doubled": 2 * half, "no_masks": single - masks}
