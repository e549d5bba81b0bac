"""The numbers in the quiz of lesson 01, question by question; its words are in quiz.toml."""

from collections.abc import Iterator
from functools import partial

from ... import PRESETS, TrainingRun, moments
from ...estimating.formula import block_table
from ...estimating.published import zero_state_bytes
from ...interactive.quiz import Numbers, gb
from ...units import UNITS, each, format_bytes

_mb = partial(format_bytes, unit="MB", digits=1)
_tenths = partial(round, ndigits=-8)  # as it is shown, so that what a learner adds up is what a choice says


def numbers() -> Iterator[Numbers]:
    # Sixteen bytes per parameter (Rajbhandari et al. 2020, section 3.1).
    N = PRESETS["gpt2-large"].parameters
    parts = zero_state_bytes(N)
    total = sum(parts.values())
    optimizer = sum(size for name, size in parts.items() if "fp32" in name)
    sizes = each(gb, total=total, optimizer=optimizer, model=total - optimizer)
    yield "states", {"N": N, "gib": total / UNITS["GiB"]} | sizes
    run = TrainingRun("tinyllama-1.1b", micro_batch=2, seq_len=1024)
    by_name = moments(run)
    left, full = by_name["end of step"], by_name["optimizer step"]
    gradients = sum(full[kind] for kind in ("parameters", "gradients", "optimizer_states"))
    peak = max(moment.total for moment in by_name.values())
    sizes = each(gb, left=left.total, weights=left["parameters"], gradients=gradients, peak=peak)
    yield "after_a_step", {"N": run.model.parameters} | sizes
    run = TrainingRun("gpt2-large", micro_batch=1, seq_len=1024, precision="bf16-master")
    kept = block_table(run)["GELU: input"]
    h, wide = run.model.hidden, run.model.ffn
    sizes = each(_mb, kept=kept, narrow=kept * h // wide, both=2 * kept)
    yield "kept_by_gelu", {"h": h, "wide": wide, "s": run.seq_len} | sizes
    run = TrainingRun("gpt2-large", micro_batch=8, seq_len=1024, precision="bf16-master")
    by_name = moments(run)
    stays = _tenths(by_name["end of step"].total)
    activations = _tenths(by_name["end of forward"]["activations"])
    gradients = _tenths(max(moment["gradients"] for moment in by_name.values()))
    more = max(activations, gradients)
    less = min(activations, gradients)
    sums = each(gb, larger=stays + more, sum=stays + more + less, lower=stays + less, without=more)
    yield "never_at_once", each(gb, stays=stays, activations=activations, gradients=gradients) | sums
