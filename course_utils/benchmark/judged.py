"""Nine calculators and the course's own methods, asked about transformers whose training GPUs have counted
elsewhere.

Each is asked about the `TrainingRun` nearest to a row, whose code may be of other operations:
docs/reference_code.md.
"""

from contextlib import suppress

from ..allocator.counters import counted
from ..estimating import estimate, formula
from ..lessons.calculators.calculators import CALCULATORS
from ..models import TransformerConfig
from ..recording.published import Row, Said, answered_rows
from ..run import TrainingRun

COUNTS = {"peak": "a step", "end": "states"}  # by a row's moment; none has the activations of a whole model
OURS = FORM, ESTIMATE, SIMULATED = "our closed form", "our estimate", "simulated"
SIZES = {"xl": (48, 1600, 25), "2.7b": (32, 2560, 32)}  # layers, hidden size and heads by the names of CS336
KNOWN = {
    "size",
    "T",
    "batch",
    "autocast",
    "named",
    "steps",
    "stage",
    "s",
    "L",
    "h",
    "a",
    "V",
    "d",
    "heads",
    "kv_heads",
    "ffn",
    "positions",
    "ranks",
    "b",
    "recompute",
    "upcast",
    "stay",
    "implementation",
}


def nearest(row: Row) -> TrainingRun | None:
    """The run nearest to a row; None for other models and options, parts of a step, and the peak of a first
    step.
    """
    first = (row.moment, row.how.get("steps")) == ("peak", 1)  # it has no states before its update
    if row.moment not in COUNTS or first or row.how.keys() - KNOWN:
        return None
    match row.family, row.how:
        case "basics_transformer.train", {"size": size, "T": s}:
            model = TransformerConfig(
                f"CS336 {size}", "llama", *SIZES[size], 10_000, s, tied=False, logits="compute"
            )
            precision = "amp-bf16" if row.how.get("autocast") else "fp32"
            return TrainingRun(
                model, row.how.get("batch", 4), s, precision, "adamw-loop", "eager", unfused=True
            )
        case "language_models.scratch_gpt", {
            "stage": stage,
            "batch": b,
            "s": s,
            "L": L,
            "h": h,
            "a": a,
            "V": V,
        }:
            model = TransformerConfig("GPT-2", "gpt2", L, h, a, V, s, dropout=0.1, tied=False, qkv_bias=False)
            recipe = ("bf16" if stage >= 5 else "fp32"), ("adamw-fused" if stage >= 3 else "adamw")
            return TrainingRun(model, b, s, *recipe, "flash" if stage >= 7 else "eager", unfused=stage < 6)
        case "sharded_models.titan", {"ranks": D, "b": b, "s": s, "L": L, "recompute": [again], **more}:
            sizes = (more[name] for name in ("d", "heads", "V", "positions", "kv_heads", "ffn"))
            model = TransformerConfig("Llama", "llama", L, *sizes, tied=False)
            stage = 2 if more.get("stay") == L else 3
            recipe = "bf16-master", f"adamw-{more.get('implementation', 'foreach')}", "flash", again
            return TrainingRun(model, b, s, *recipe, None, D, stage, clip_grad_norm=1.0, unfused=True)
    return None


def answers_to(row: Row) -> dict[str, int]:
    """Bytes by the name of each that answers a row: none that refuses its run, or counts something else."""
    if (run := nearest(row)) is None:
        return {}
    said = {SIMULATED: row.said.of(row)}
    for one in CALCULATORS:
        if one.counts == COUNTS[row.moment]:
            with suppress(ValueError):  # its refusal
                said[one.name] = one.total(run)
    if row.moment == "end":
        return said | {FORM: sum(formula.states(run).values())}
    said[FORM] = formula.estimate(run.replace(unfused=False)).total  # it covers no other
    if run.world_size == 1:
        found = counted(run)
        said[ESTIMATE] = Said(found.tensors, found.allocated, found.reserved).of(row)
    elif row.counter == "allocated":  # what several ranks reserve is not estimated
        said[ESTIMATE] = estimate(run).total
    return said


def ratios() -> dict[str, dict[str, float]]:
    """Answer over published figure by calculator, ours last, and by row; empty for one
    that answers no row.
    """
    rows = [(row, answers_to(row)) for row in answered_rows()]
    names = [*(one.name for one in CALCULATORS), *OURS]
    return {name: {row.id: said[name] / row.bytes for row, said in rows if name in said} for name in names}
