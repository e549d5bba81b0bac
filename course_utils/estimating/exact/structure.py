"""The choices of a run that decide which operations it has, and the symbols for its sizes."""

from functools import lru_cache
from typing import NamedTuple

from ...run import TrainingRun
from ...units import round_up


class Structure(NamedTuple):
    """Runs of equal structure do the same operations, on tensors of other sizes.

    Equal structures share one tape.
    """

    norm: str
    mlp: str
    positions: str
    bias: bool
    qkv_bias: bool
    fused_qkv: bool
    grouped: bool
    repeats: bool  # keys and values, for a fused kernel
    dropout: bool
    tied: bool
    experts: int
    larger_experts: int  # experts that get one pair more than the rest
    narrow: bool  # weights and residual stream are of 16 bits
    attention: str
    recompute: str
    autocast: bool
    main_gradients: bool  # backward adds to fp32 gradients of the master weights
    loss_scaling: bool
    accumulates: bool  # gradients are added to those that are there; else they are new
    copied_to_buckets: bool  # new, and freed once they are in their bucket
    unsynchronized: bool  # besides the buckets until the last micro-batch
    factors_are_views: bool  # eager products take q, k and v as they are: there is one sequence, or one head
    chunks: int  # pieces of the loss, at most 4
    upcast_logits: bool  # 16-bit logits are copied to fp32 for the loss
    unfused: bool
    lora: tuple[str, ...]
    frozen_bits: int
    groups: tuple[int, ...]  # blocks under each checkpoint: see `groups_of`
    # the run's symbols where the tape needs them: to offload what is large
    numbers: tuple[tuple[str, int], ...] = ()


def structure(run: TrainingRun) -> Structure:
    """The structure of `run`."""
    model, precision, blocks = run.model, run.precision, run.blocks_per_checkpoint
    new_each_time = run.accumulation_steps == 1 and run.set_to_none
    return Structure(
        norm=model.norm,
        mlp=model.mlp,
        positions=model.positions,
        bias=bool(model.bias),
        qkv_bias=bool(model.qkv_bias),
        fused_qkv=bool(model.fused_qkv),
        grouped=model.kv_heads < model.heads,
        repeats=run.attention == "efficient" or model.repeat_kv,
        dropout=model.dropout > 0,
        tied=model.tied,
        experts=model.experts,
        larger_experts=pairs_of_experts(run)[0],
        narrow=not precision.autocast and precision.compute == 2,
        attention=run.attention,
        recompute="blocks" if blocks else run.recompute,
        autocast=bool(precision.autocast),
        main_gradients=precision.gradient > precision.weight,
        loss_scaling=precision.loss_scaling,
        accumulates=run.accumulates,
        copied_to_buckets=run.bucket_view and new_each_time,
        unsynchronized=run.bucket_view and run.accumulation_steps == 2 and run.set_to_none,
        factors_are_views=1 in (run.micro_batch, model.heads),
        chunks=min(pieces_of_loss(run)[0], 4),
        upcast_logits=model.logits == "fp32" and precision.compute == 2,
        unfused=model.unfused,
        lora=run.lora_targets,
        frozen_bits=run.frozen_bits or 0,
        groups=groups_of(model.layers, blocks or 1),
        numbers=tuple(symbols(run).items()) if run.recompute == "offload" else (),
    )


@lru_cache(maxsize=1024)
def groups_of(layers: int, blocks: int) -> tuple[int, ...]:
    """The number of blocks of each group of a tape: at most three groups of at most three.

    The middle repeats.

    >>> groups_of(48, 1), groups_of(48, 7), groups_of(2, 1)
    ((1, 1, 1), (3, 3, 3), (1, 1))
    """
    sizes = [blocks] * (layers // blocks)
    if layers % blocks:
        sizes.append(layers % blocks)
    if len(sizes) > 3:
        sizes = [sizes[0], sizes[1], sizes[-1]]
    return tuple(min(size, 3) for size in sizes)


def pieces_of_loss(run: TrainingRun) -> tuple[int, int, int]:
    """The number of pieces of the loss, the tokens of each, and those of the last."""
    tokens = run.micro_batch * run.seq_len
    size = -(-tokens // run.loss_chunks)
    count = -(-tokens // size)
    return count, size, tokens - (count - 1) * size


def pairs_of_experts(run: TrainingRun) -> tuple[int, int]:
    """The number of experts that get one pair more than the rest, and of (token, choice) pairs of each of the
    rest.
    """
    if not run.model.experts:
        return 0, 0
    share, larger = divmod(run.micro_batch * run.seq_len * run.model.experts_per_token, run.model.experts)
    return larger, share


def symbols(run: TrainingRun) -> dict[str, int]:
    """The numbers behind the symbols of a tape's formulas.

    s, b, h, a, V as in the formulas; d = h/a; kv, ffn, qkv are widths; P positions; `c` is bytes per element
    of matrix products, `r` of the residual stream and the weights: under autocast r = 4 and c = 2. t is the
    tokens of a piece of the loss, u those of the last; an expert computes f tokens, or e.
    """
    model, precision, s, b = run.model, run.precision, run.seq_len, run.micro_batch
    d, kv = model.head_size, model.kv
    pieces, t, u = pieces_of_loss(run)
    share = pairs_of_experts(run)[1]
    return {
        "1": 1,
        "2": 2,
        "3": 3,
        "4": 4,
        "8": 8,
        "16": 16,
        "c": precision.compute,
        "r": 4 if precision.autocast else precision.compute,
        "s": s,
        "b": b,
        "sb": s * b,
        "h": model.hidden,
        "a": model.heads,
        "d": d,
        "d/2": d // 2,
        "kv": kv,
        "kv/2": kv // 2,
        "h/2": model.hidden // 2,
        "qkv": model.hidden + 2 * kv,
        "ffn": model.ffn,
        "V": model.vocab,
        "P": model.max_positions,
        "s32": round_up(s, 32),
        "s128": round_up(s, 128),
        "d32": round_up(d, 32 if d <= 128 else 64),
        "R": run.lora_rank,
        "pieces": pieces,
        "t": t,
        "u": u,
        "E": model.experts,
        "K": model.experts_per_token,
        "f": share,
        "e": share + 1,
    }
