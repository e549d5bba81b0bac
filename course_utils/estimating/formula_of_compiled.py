"""A compiled block as a table of rows, and what a compiled model keeps besides its blocks.

torch.compile cuts the graph of forward and backward where the fewest bytes cross, a minimum cut
(`min_cut_rematerialization_partition` in torch/_functorch/partitioners.py; He 2022, "Min-cut optimal(*)
recomputation (i.e. activation checkpointing) with AOTAutograd"). What matrix products read and make is kept,
and statistics, masks of dropout, and the results of attention's kernel. All else is computed again in the
kernel that needs it. So nothing between fused operations is kept, and few gradients need memory of their
own: a kernel writes them over what nobody reads again.

A block by itself has one cut. A whole model may have several of one size, and torch takes any of them. In
which order its backward makes gradients, and whose memory it uses again, is decided by sizes
(torch/_inductor/memory.py): the rows have the order that small and large models mostly had. `lacking` says
what this form does not cover.
"""

from ..run import TrainingRun
from ..units import round_up
from .formula_of_blocks import Bytes, Letters, Row, kernel, letters, repeats

KERNELS = ("flash", "efficient")
"""The attention kernels that are covered: written out, a compiled attention keeps other tensors."""

FORMATS = ("fp32", "tf32", "amp-bf16", "amp-fp16", "bf16", "bf16-master", "fp16-master")


def lacking(run: TrainingRun) -> str:
    """The reason why the closed form does not cover a compiled `run`, with what to do; or ""."""
    m = run.model
    found = {
        f"recompute={run.recompute!r}": run.recompute != "none",
        f"loss_chunks={run.loss_chunks}": run.loss_chunks > 1,
        "gradients that accumulate": run.accumulates,
        f"lora_rank={run.lora_rank}": run.lora_rank > 0,
        f"attention={run.attention!r}": run.attention not in KERNELS,
        f"precision={run.precision.name!r}": run.precision.name not in FORMATS,
        "experts": m.experts > 0,
        "unfused=True": m.unfused,
        "one matrix for q, k and v with rotary positions": m.fused_qkv and m.positions == "rotary",
        "learned positions with a matrix each for q, k and v": not m.fused_qkv and m.positions != "rotary",
    }
    not_covered = [name for name, there in found.items() if there]
    if run.compile == "none" or not not_covered:
        return ""
    return (
        f"the closed form of compile={run.compile!r} does not cover {', '.join(not_covered)}:"
        " use measure(run), or set compile='none'"
    )


def casts(run: TrainingRun, x: Letters) -> bool:
    """True where a compiled block casts gradients at once: autocast's; a whole model does so in the end."""
    return run.compile == "blocks" and x.r != x.c


def block(run: TrainingRun) -> list[Row]:
    """The rows of one compiled block in the order of forward."""
    x = letters(run)
    later = [row._replace(left=row.left + reused(run, x)) for row in first_half(run, x)]
    return [*later, *second_half(run, x)]


def reused(run: TrainingRun, x: Letters) -> int:
    """Bytes of gradients in the last block's MLP whose memory waits for the other blocks of a whole model.

    The compiler gives the same memory to tensors of one size in its graph (`# reuse` in its code). These
    are GELU's gradient, or those of gate and up, and of their input.
    """
    if run.compile == "blocks" or run.model.layers == 1:
        return 0
    return x.F if run.model.mlp == "gelu" else 2 * x.F + x.H


def flow(run: TrainingRun, x: Letters) -> int:
    """Bytes of the residual stream's gradient: within a whole model it stays in the type of the products."""
    return x.X if run.compile == "blocks" else x.H


def norm(run: TrainingRun, x: Letters, name: str, keeps: Bytes) -> Row:
    """A norm computes its input again from what is kept before it, and keeps fp32 statistics."""
    statistics = ("mean", "deviation") if run.model.norm == "layernorm" else ("root",)
    kept_too = keeps | dict.fromkeys(statistics, 4 * x.t)
    makes = x.X if casts(run, x) else 0
    return Row(name, kept_too, makes, flow(run, x))


def mask(run: TrainingRun, x: Letters) -> Bytes:
    """Dropout's mask of a byte per element."""
    return {"mask": x.t * x.h} if run.model.dropout else {}


def product(
    run: TrainingRun,
    x: Letters,
    name: str,
    weights: int,
    keeps: Bytes,
    makes: int,
    left: int,
    before: int = 0,
) -> list[Row]:
    """A product with the gradient of its input, which it `makes`, and of its weights, cast if need be.

    Afterwards gradients of activations of `left` bytes are on their way. Gradients of so many weights that
    came `before` wait to be cast as well.
    """
    copy = x.c * weights if run.precision.autocast else 0
    if not casts(run, x):
        return [Row(name, keeps, makes, left, weights, copy=copy)]
    made, waiting = x.c * weights, x.c * before
    rows = [
        Row(f"{name}, its weights' gradient cast", {}, 0, left, weights),
        Row(name, keeps, makes + made, left + made, copy=copy),
    ]
    if before:
        rows[0] = rows[0]._replace(left=left + waiting)
        rows[1] = rows[1]._replace(left=left + made + waiting)
        rows.insert(0, Row(f"{name}, another cast", {}, 0, left, before))
    return rows


def first_half(run: TrainingRun, x: Letters) -> list[Row]:
    """Norm, attention, and the product of its output; this product's result is kept for the second norm."""
    S = flow(run, x)
    D = x.H if casts(run, x) or run.model.dropout else 0  # the stream's gradient in 16 bits, or masked
    qkv = x.Q + 2 * x.K
    core = kernel(run, x)[-1]
    wide = x.Q + 2 * (x.Q if repeats(run) else x.K)
    if run.model.fused_qkv:
        keeps = {"input": x.H}
        project = product(run, x, "qkv", x.h * (x.q + 2 * x.kv), keeps, qkv, S + x.H)
    else:
        project = [
            *product(run, x, "q", x.h * x.q, {"input": x.H}, x.H, S + x.H),
            *product(run, x, "k", x.h * x.kv, {}, x.H, S + x.H + x.Q),
            *product(run, x, "v", x.h * x.kv, {}, x.H, S + x.H + x.Q + x.K),
        ]
    inputs = {name: size for name, size in core.keeps.items() if name != "output"}
    made = x.c * x.h * x.q
    copy = made if run.precision.autocast else 0
    out = [Row("attention", inputs, core.makes, S + D + wide), Row("out", {}, x.Q, S + D + x.Q, copy=copy)]
    weights = Row(
        "out, its weights' gradient", {"input": x.Q}, made if casts(run, x) else 0, S + wide, x.h * x.q
    )
    return [norm(run, x, "norm1", {"input": x.X}), *project, weights, *out]


def second_half(run: TrainingRun, x: Letters) -> list[Row]:
    """Norm and MLP. GELU is computed again from the product before it, and so are SiLU and gate · up."""
    S = flow(run, x)
    D = x.H if casts(run, x) or run.model.dropout else 0
    # the stream before the second norm is a sum, which is computed again from the product that was added
    middle = x.X if run.compile == "model" and x.r != x.c else x.H
    R = reused(run, x)
    norm2 = norm(run, x, "norm2", {"product before": middle} | mask(run, x))
    norm2 = norm2._replace(left=norm2.left + R)
    w = x.h * x.f
    made = x.c * w
    copy = made if run.precision.autocast else 0
    waits = made if casts(run, x) else 0  # of GELU's MLP until both gradients are there
    if run.model.mlp == "gelu":
        between = Row("GELU", {"input": x.F}, 0, S + x.F + waits)
        up = product(run, x, "up", w, {"input": x.H}, x.H, S + x.H + R, before=w if waits else 0)
        arrives = 0 if waits else w
    else:
        arrives = w
        between = Row("SiLU · up", {"gate": x.F}, x.F, S + x.F)
        gate = product(run, x, "gate", w, {"input": x.H}, x.H, S + x.H + R)
        up = [*gate, *product(run, x, "up", w, {"up": x.F}, x.H, S + x.H + R)]
    held = 0 if arrives else waits
    reads_stream = run.compile == "model" or not D
    if run.model.mlp == "gelu" and reads_stream:  # then the input's gradient is made first
        down = [Row("down", {"input": x.F}, D + x.F, S + x.F, w, copy=copy)]
        return [norm2, *up, between, *down, Row("MLP, dropout", mask(run, x), 0, S)]
    down = [
        Row("down", {}, x.F, S + D + x.F + held, copy=copy),
        Row("down, its weights' gradient", {"input": x.F}, D + waits, S + D + held, arrives),
    ]
    return [norm2, *up, between, *down, Row("MLP, dropout", mask(run, x), 0, S)]


def kept_besides(run: TrainingRun) -> int:
    """Bytes that a compiled model keeps once before its blocks: positions' rows, the embedding's mask."""
    x = letters(run)
    learned = (x.r * x.h + 8) * run.seq_len if run.model.positions == "learned" else 0
    return learned + (x.t * x.h if run.model.dropout else 0)


def kept_by_head(run: TrainingRun) -> int:
    """Bytes that a compiled model keeps after its blocks, but for the logits and their statistics."""
    x = letters(run)
    return sum(norm(run, x, "final norm", {"input": x.X}).keeps.values()) + x.H


def logits(run: TrainingRun) -> int:
    """Bytes of the logits, all that a compiled loss keeps but two fp32 numbers per token.

    Softmax is computed again from them, and their gradient is written over them. Long rows begin at multiples
    of 128 bytes (`comprehensive_padding` in torch/_inductor/config.py). Not counted is a padded copy of their
    gradient: where V is no multiple of 8, the card may find it faster (torch/_inductor/fx_passes/pad_mm.py).
    """
    x = letters(run)
    V = run.model.vocab
    return x.t * (round_up(x.c * V, 128) if V > 1024 else x.c * V)


def waiting(run: TrainingRun) -> int:
    """Bytes that wait for a tied head's gradient, which is made last and added to the embedding's.

    These are the gradient of the logits and the head's input. Autocast's is cast to fp32, and made at once.
    """
    if run.precision.autocast or not run.model.tied:
        return 0
    return logits(run) + letters(run).H
