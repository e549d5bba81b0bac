"""What of a run decides which operations it has, apart from its sizes; and the letters that stand for its sizes."""

from functools import lru_cache
from math import prod
from typing import NamedTuple

from course_utils.models import TransformerConfig
from course_utils.run import TrainingRun
from course_utils.units import round_up

SMALLEST_TO_OFFLOAD = 2**20
"""Bytes: below this a copy to the host is all latency (`networks/recompute.py` offloads the same)."""


class Structure(NamedTuple):
    """Runs of equal structure do the same operations, on tensors of other sizes. Equal structures share one tape.

    `larger_experts` is how many experts get one pair more than the rest; `narrow` says that weights and residual stream
    are of 16 bits, `main_gradients` that backward adds to fp32 gradients of the masters. Gradients are those of
    `accumulates`, or new and `copied_to_buckets`, or `unsynchronized`: beside the buckets until the last micro-batch.
    `factors_are_views`: eager products take q, k and v as they are, where there is one sequence or one head.
    `chunks` is the pieces of the loss, at most 4; `groups` the blocks under each checkpoint (see `groups_of`);
    `numbers` the run's letters, where the tape depends on them.
    """

    norm: str
    mlp: str
    positions: str
    bias: bool
    qkv_bias: bool
    fused_qkv: bool
    grouped: bool
    dropout: bool
    tied: bool
    experts: int
    larger_experts: int
    narrow: bool
    attention: str
    recompute: str
    autocast: bool
    main_gradients: bool
    loss_scaling: bool
    accumulates: bool
    copied_to_buckets: bool
    unsynchronized: bool
    factors_are_views: bool
    chunks: int
    lora: tuple[str, ...]
    frozen_bits: int
    groups: tuple[int, ...]
    numbers: tuple[tuple[str, int], ...] = ()

    def is_small(self, size: str) -> bool:
        """Whether a tensor is too small to be offloaded: the one thing for which the tape needs numbers."""
        numbers = dict(self.numbers)
        return prod(numbers[letter] for letter in size.split("·")) < SMALLEST_TO_OFFLOAD


@lru_cache(maxsize=1024)
def structure_of(
    model: TransformerConfig, precision: tuple[bool, bool, bool], attention: str, recompute: str,
    accumulates: tuple[bool, bool, bool],
    factors_are_views: bool, chunks: int, lora: tuple[str, ...], frozen_bits: int, blocks: int, larger_experts: int,
    narrow: bool,
) -> Structure:  # fmt: skip
    """The structure of a run with these choices; `blocks` of them make one checkpoint."""
    autocast, main_gradients, loss_scaling = precision
    return Structure(
        model.norm, model.mlp, model.positions, bool(model.bias), bool(model.qkv_bias), model.fused_qkv,
        model.kv_heads < model.heads, model.dropout > 0, model.tied, model.experts, larger_experts, narrow,
        attention, "blocks" if blocks else recompute, autocast, main_gradients, loss_scaling, *accumulates,
        factors_are_views, chunks, lora, frozen_bits, groups_of(model.layers, blocks or 1),
    )  # fmt: skip


def structure(run: TrainingRun) -> Structure:
    """The structure of `run`."""
    precision = run.precision
    recipe = (bool(precision.autocast), precision.gradient > precision.weight, precision.loss_scaling)
    new_each_time = run.accumulation_steps == 1 and run.set_to_none
    # With no_sync gradients are tensors of their own beside the buckets; the last micro-batch's backward frees them.
    unsynchronized = run.bucket_view and run.accumulation_steps == 2 and run.set_to_none
    gradients = (run.accumulates, run.bucket_view and new_each_time, unsynchronized)
    shape = structure_of(
        run.model, recipe, run.attention, run.recompute, gradients, 1 in (run.micro_batch, run.model.heads),
        min(pieces_of_loss(run)[0], 4), run.lora_targets, run.frozen_bits or 0, run.blocks_per_checkpoint,
        pairs_of_experts(run)[0], not precision.autocast and precision.compute == 2,
    )  # fmt: skip
    return shape._replace(numbers=tuple(letters(run).items())) if run.recompute == "offload" else shape


def groups_of(layers: int, blocks: int) -> tuple[int, ...]:
    """How many blocks each group of a tape has, at most three groups of at most three: what is in the middle repeats.

    >>> groups_of(48, 1), groups_of(48, 7), groups_of(2, 1)
    ((1, 1, 1), (3, 3, 3), (1, 1))
    """
    sizes = [blocks] * (layers // blocks) + ([layers % blocks] if layers % blocks else [])
    shown = sizes if len(sizes) <= 3 else [sizes[0], sizes[1], sizes[-1]]
    return tuple(min(size, 3) for size in shown)


def pieces_of_loss(run: TrainingRun) -> tuple[int, int, int]:
    """How many pieces the loss is cut into, the tokens of each, and those of the last."""
    tokens = run.micro_batch * run.seq_len
    size = -(-tokens // run.loss_chunks)
    count = -(-tokens // size)
    return count, size, tokens - (count - 1) * size


def pairs_of_experts(run: TrainingRun) -> tuple[int, int]:
    """How many experts get one pair more than the rest, and how many pairs of (token, choice) the rest gets."""
    if not run.model.experts:
        return 0, 0
    share, larger = divmod(run.micro_batch * run.seq_len * run.model.experts_per_token, run.model.experts)
    return larger, share


def letters(run: TrainingRun) -> dict[str, int]:
    """The numbers behind the letters of a tape's formulas.

    s, b, h, a, V as in the formulas; d = h/a; kv, ffn, qkv are widths; P positions; `c` is bytes an element of matrix
    products, `r` of the residual stream and the weights: under autocast r = 4 and c = 2. t is the tokens of a piece of
    the loss, u those of the last; an expert computes f tokens, or e.
    """
    model, precision, s, b = run.model, run.precision, run.seq_len, run.micro_batch
    d, kv = model.head_size, model.kv
    pieces, t, u = pieces_of_loss(run)
    share = pairs_of_experts(run)[1]
    return {
        "1": 1, "2": 2, "3": 3, "4": 4, "8": 8, "16": 16,
        "c": precision.compute, "r": 4 if precision.autocast else precision.compute,
        "s": s, "b": b, "sb": s * b, "h": model.hidden, "a": model.heads, "d": d, "d/2": d // 2, "kv": kv,
        "kv/2": kv // 2, "h/2": model.hidden // 2, "qkv": model.hidden + 2 * kv, "ffn": model.ffn,
        "V": model.vocab, "P": model.max_positions, "s32": round_up(s, 32), "R": run.lora_rank,
        "pieces": pieces, "t": t, "u": u,
        "E": model.experts, "K": model.experts_per_token, "f": share, "e": share + 1,
    }  # fmt: skip
