"""The numbers in the quiz of lesson 16, question by question; its words are in quiz.toml."""

from collections.abc import Iterator
from functools import partial

from ... import TrainingRun, estimate
from ...estimating.states import frozen_matrix_bytes, trainable
from ...interactive.quiz import Numbers, gb
from ...units import each, format_bytes, percent

RUN = TrainingRun("gpt2", 4, 512, lora_rank=8, lora_targets=("attention", "mlp"))
_mb = partial(format_bytes, unit="MB", digits=1)


def numbers() -> Iterator[Numbers]:
    n_out, n_in, r = 11008, 4096, 16
    counts = {"both": r * (n_out + n_in), "one": r * n_in, "product": r * r, "divided": n_out * n_in // r}
    yield "numbers_that_learn", {"n_out": n_out, "n_in": n_in, "r": r} | counts
    runs = RUN.replace(lora_rank=0, lora_targets=()), RUN, RUN.replace(lora_targets=("attention",))
    full, everywhere, attention = (estimate(run)["activations"] for run in runs)
    frozen = 1 - trainable(RUN.model, RUN.lora_rank, RUN.lora_targets).parameters / RUN.model.parameters
    learning = (4 + 8) / (4 + 4 + 8)  # gradients and moments, of these and the weights
    saved = {"activations": 1 - everywhere / full, "attention": 1 - attention / full}
    yield "activations", each(percent, **saved, parameters=frozen, learning=learning)
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
