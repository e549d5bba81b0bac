"""Nine calculators and the course's own methods, asked about transformers that GPUs elsewhere have trained.

Each is asked about the `TrainingRun` nearest to a row, whose code may be of other operations:
docs/reference_code.md.
"""

from contextlib import suppress
from typing import Any

from ..estimating import estimate
from ..estimating.formula_of_ranks import rank_0_states
from ..lessons.calculators.calculators import CALCULATORS
from ..models import TransformerConfig
from ..run import TrainingRun
from .published import Row, answered_rows
from .tables import BIAS_HEADINGS, Cell, Table, bias_of

COUNTS = {"peak": "a step", "end": "states"}  # by a row's moment; none has the activations of a whole model
FORM, SIMULATED = "our closed form", "simulated"
OURS = (FORM, SIMULATED)
SIZES = {"xl": (48, 1600, 25), "2.7b": (32, 2560, 32)}  # layers, hidden size and heads by the names of CS336
KNOWN = {
    "size", "T", "batch", "autocast", "named", "steps", "stage", "s", "L", "h", "a", "V", "d", "heads",
    "kv_heads", "ffn", "positions", "ranks", "b", "recompute", "upcast", "stay", "implementation",
}  # fmt: skip
"""The details of a step that a TrainingRun can express."""


def nearest(row: Row) -> TrainingRun | None:
    """The run nearest to a row; None for other models and options, parts of a step, a first step's peak."""
    is_first = row.moment == "peak" and row.how.get("steps") == 1  # it has no states before its update
    if row.moment not in COUNTS or is_first or row.how.keys() - KNOWN:
        return None
    match row.family, row.how:
        case "basics_transformer.train", {"size": size, "T": s}:
            L, h, a = SIZES[size]
            name = f"CS336 {size}"
            model = TransformerConfig(name, "llama", L, h, a, 10_000, s, tied=False, logits="compute")
            b = row.how.get("batch", 4)
            precision = "amp-bf16" if row.how.get("autocast") else "fp32"
            return TrainingRun(model, b, s, precision, "adamw-loop", "eager", unfused=True)
        case "language_models.scratch_gpt", {"stage": stage, "batch": b, "s": s, "L": L, "h": h, **more}:
            model = TransformerConfig(
                "GPT-2", "gpt2", L, h, more["a"], more["V"], s, dropout=0.1, tied=False, qkv_bias=False
            )
            # each stage of the series adds one improvement to those before it
            precision = "bf16" if stage >= 5 else "fp32"
            optimizer = "adamw-fused" if stage >= 3 else "adamw"
            attention = "flash" if stage >= 7 else "eager"
            return TrainingRun(model, b, s, precision, optimizer, attention, unfused=stage < 6)
        case "sharded_models.titan", {"ranks": D, "b": b, "s": s, "L": L, "recompute": [again], **more}:
            return _titan_run(b, s, L, D, again, more)
    return None


def _titan_run(b: int, s: int, L: int, D: int, recompute: str, more: dict[str, Any]) -> TrainingRun:
    """A run of torchtitan's Llama on D ranks, with FSDP2."""
    model = TransformerConfig(
        "Llama",
        "llama",
        layers=L,
        hidden=more["d"],
        heads=more["heads"],
        vocab=more["V"],
        max_positions=more["positions"],
        kv_heads=more["kv_heads"],
        ffn=more["ffn"],
        tied=False,
    )
    return TrainingRun(
        model,
        b,
        s,
        "bf16-master",
        f"adamw-{more.get('implementation', 'foreach')}",
        "flash",
        recompute,
        world_size=D,
        zero_stage=2 if more.get("stay") == L else 3,
        clip_grad_norm=1.0,
        unfused=True,
    )


def answers_to(row: Row) -> dict[str, int]:
    """Bytes by the name of each that answers a row: none that refuses its run, or counts something else."""
    run = nearest(row)
    if run is None:
        return {}
    said = {SIMULATED: row.said.of(row)}
    for one in CALCULATORS:
        if one.counts == COUNTS[row.moment]:
            with suppress(ValueError):  # its refusal
                said[one.name] = one.total(run)
    if row.moment == "end":
        said[FORM] = sum(rank_0_states(run).values())
        return said
    said[FORM] = estimate(run).total
    return said


def ratios() -> dict[str, dict[str, float]]:
    """Answer over published figure by calculator, ours last, and by row; empty for one that answers none."""
    found: dict[str, dict[str, float]] = {name: {} for name in (*(one.name for one in CALCULATORS), *OURS)}
    for row in answered_rows():
        for name, answer in answers_to(row).items():
            found[name][row.id] = answer / row.bytes
    return found


def table() -> Table:
    """The ratios as a row for each calculator, with their bias."""
    rows: list[tuple[Cell, ...]] = []
    for name, found in ratios().items():
        bias = bias_of(found.values()) if found else ("–",) * len(BIAS_HEADINGS)
        rows.append((name, len(found), *bias))
    title = "Calculators, asked about steps that GPUs counted elsewhere: answer / measured"
    return Table("calculators", title, ("calculator", "rows answered", *BIAS_HEADINGS), tuple(rows))
