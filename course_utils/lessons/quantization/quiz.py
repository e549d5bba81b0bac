"""The numbers in the quiz of lesson 17, question by question; its words are in quiz.toml."""

from collections.abc import Iterator
from functools import partial

from ... import TrainingRun, estimate
from ...estimating.states import frozen_matrix_bytes
from ...interactive.quiz import Numbers, gb
from ...units import each, format_bytes

_mb = partial(format_bytes, unit="MB", digits=1)


def numbers() -> Iterator[Numbers]:
    few, many = 4, 8
    before, after = (2 ** (bits - 1) - 1 for bits in (few, many))
    factors = {
        "factor": after / before,
        "ratio": many // few,
        "added": many - few,
        "squared": (after / before) ** 2,
    }
    yield "one_more_bit", {"few": few, "many": many, "before": before, "after": after} | factors
    rows, columns = 14336, 4096
    stored = frozen_matrix_bytes((rows, columns), 4)
    elements = rows * columns
    sizes = each(_mb, nf4=stored, codes=elements // 2, bytes=4 * elements, half=2 * elements)
    yield "four_bits", {"rows": rows, "columns": columns} | sizes
    kept = {"unpacked": 2 * elements, "codes": stored, "gradient": 4 * elements, "nothing": 0}
    yield "kept", {"rows": rows, "columns": columns} | each(_mb, **kept)
    run = TrainingRun(
        "llama3-8b",
        1,
        1024,
        "bf16",
        recompute="full",
        lora_rank=16,
        lora_targets=("attention", "mlp"),
        frozen_bits=4,
    )
    N = run.model.parameters
    peak = estimate(run).total
    in_16_bits = estimate(run.replace(frozen_bits=16)).total
    yield "the_account", each(gb, peak=peak, half_a_byte=N // 2, in_16_bits=in_16_bits, states=16 * N)
