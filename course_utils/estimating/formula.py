"""The closed form of a training step's memory: plain arithmetic that a reader follows with a pencil.

Symbols: N parameters, V vocabulary, h hidden size, L blocks, a heads, f width of the MLP, s tokens of a
sequence, b sequences, t = b·s, D ranks, K blocks under a checkpoint, n pieces of the loss. Bytes per element:
c of matrix products, r of the residual stream. X = r·t·h is one tensor of the residual stream. The peak is
the largest of a few moments of the step: run → states → activations → moments → max. All sizes are in bytes.

What a block keeps and what its backward makes is a table in `formula_of_blocks.py`; what ranks share and send
is in `formula_of_ranks.py`. The allocator's rounding of each tensor to 512 bytes is counted for states alone.
"""

from collections.abc import Iterator
from itertools import chain
from math import prod
from typing import NamedTuple

from ..breakdown import MemoryBreakdown
from ..run import TrainingRun
from . import formula_of_blocks as of_blocks
from . import formula_of_compiled as of_compiled
from . import formula_of_ranks as of_ranks
from .formula_of_blocks import Bytes, Letters, Row, block, kept, letters, norm
from .formula_of_ranks import Buffers, buffers, local
from .states import PIECE_8BIT, SMALL_8BIT, Trainable, is_hidden_matrix
from .workspaces import workspace_bytes

SMALLEST_TO_OFFLOAD = 2**20
"""Bytes: smaller tensors stay on the GPU, where a copy to the host would be all latency."""

READ_TOGETHER = (("qkv", "q", "k", "v"), ("out",), ("gate", "up"), ("down",))
"""Matrices that read one input, in the order of the network."""

IN_PLACE = ("sgd", "momentum")
"""Algorithms whose update needs no tensor besides the gradient and the states."""


class Block(NamedTuple):
    """The rows of a block, the bytes that they keep for backward, and those of autocast's weight copies."""

    rows: list[Row]
    kept: int
    copies: int


class Step(NamedTuple):
    """A run with what its moments are made of: letters, a block and the first one, FSDP2's buffers.

    `V` is the vocabulary, or a tensor-parallel rank's part of it. `alone` is the run, or with FSDP2 the one
    whose backward each rank has: whole gradients, new in each micro-batch.
    """

    run: TrainingRun
    alone: TrainingRun
    x: Letters
    block: Block
    first: Block
    buffers: Buffers
    V: int


class Moment(NamedTuple):
    """A moment's name and phase, bytes by kind, and what happens at it."""

    name: str
    phase: str
    parts: Bytes
    happens: str = ""


def estimate(run: TrainingRun) -> MemoryBreakdown:
    """Bytes by kind at the peak, the largest of the moments, on rank 0."""
    return breakdown(max(all_moments(run), key=lambda moment: sum(moment.parts.values())))


def moments(run: TrainingRun) -> dict[str, MemoryBreakdown]:
    """Bytes by kind at the moments of a step at which memory may peak, in order, by name.

    Where a moment is looked at in several ways, the highest has its name.
    """
    found: dict[str, MemoryBreakdown] = {}
    for moment in all_moments(run):
        new = breakdown(moment)
        if moment.name not in found or new.total > found[moment.name].total:
            found[moment.name] = new
    return found


def breakdown(moment: Moment) -> MemoryBreakdown:
    """A moment as the breakdown that lessons show."""
    label = f"{moment.name}: {moment.happens}" if moment.happens else moment.name
    return MemoryBreakdown(moment.parts, moment.phase, label)


def all_moments(run: TrainingRun) -> Iterator[Moment]:
    """The moments in order, each with what was there before."""
    step = step_of(run)
    full = persistent(run)
    during = (forward_moments(step), loss_moments(step), block_moments(step), stem_moments(step, full))
    if run.compile == "model":
        during = (moments_of_compiled_loss(step), block_moments(step), compiled_stem_moments(step, full))
    if old := of_ranks.old_buckets(run):
        yield Moment(
            "rebuilding of buckets", "forward", plus(full, {"gradients": old}), "once, as step 2 begins"
        )
    for name, phase, parts, happens in chain(*during):
        yield Moment(name, phase, plus(before_forward(run, full, name), parts), happens)
    for name, phase, parts, happens in after_backward(run, full):
        yield Moment(name, phase, plus(full, parts), happens)


def plus(start: Bytes, parts: Bytes) -> Bytes:
    """Bytes by kind of both."""
    return start | {kind: start.get(kind, 0) + size for kind, size in parts.items()}


def step_of(run: TrainingRun) -> Step:
    """The parts that the moments of `run` are made of."""
    alone = run
    if run.zero_stage >= 2:  # the shards are the master weights
        recipe = "bf16-master" if run.precision.name == "bf16-master-fp32grad" else run.precision
        alone = run.replace(
            world_size=1, zero_stage=0, accumulation_steps=1, set_to_none=True, precision=recipe
        )
    every = summed(rows_of_block(alone))
    first = summed(rows_of_first_block(run, every.rows)) if run.lora_rank else every
    V = -(-run.model.vocab // run.tensor_parallel)
    return Step(run, alone, letters(run), every, first, buffers(run), V)


def rows_of_block(run: TrainingRun) -> list[Row]:
    """The rows of a block. Raises ValueError for a compiled run that the closed form does not cover."""
    if run.compile == "none":
        return block(run)
    if reason := of_compiled.lacking(run):
        raise ValueError(reason)
    return of_compiled.block(run)


def summed(rows: list[Row]) -> Block:
    """Rows with their sums."""
    return Block(rows, kept(rows), sum([row.copy for row in rows]))


# What persists


def persistent(run: TrainingRun) -> Bytes:
    """Bytes by kind between backward and the optimizer's step, when all gradients are there."""
    found = of_ranks.rank_0_states(run)
    found["inputs"] = 2 * 8 * run.micro_batch * run.seq_len  # token ids and targets, int64
    found["workspaces"] = workspace_bytes(run)
    found["communication"] = of_ranks.buckets(run, found["gradients"])
    return found


def before_forward(run: TrainingRun, full: Bytes, name: str) -> Bytes:
    """Bytes there when the micro-batch that needs most begins, the gradients of those before it included.

    As views of buckets gradients are there twice until the last micro-batch: those that no_sync left besides
    the buckets go in its backward, layer by layer. Of two micro-batches it needs most.
    """
    if not run.accumulates:
        return full | {"gradients": 0}
    if not (run.bucket_view and run.set_to_none and run.accumulation_steps > 1):
        return full
    besides = full["gradients"]
    if run.accumulation_steps == 2:
        stem = sum(map(prod, local(run).before.values()))
        block = sum(map(prod, local(run).block.values()))
        left = {"backward of the embedding": stem, "backward of the first block": stem + block}
        if name in left:
            besides = run.precision.gradient * left[name]
    return full | {"gradients": full["gradients"] + besides}


# Activations: what forward keeps for backward


def activation_bytes(run: TrainingRun) -> int:
    """Bytes that are kept when forward ends, the loss not yet computed, whatever is recomputed later."""
    step = step_of(run)
    return kept_of_blocks(step, run.model.layers) + shared_by_blocks(step) + kept_by_head(step)


def blocks_bytes(run: TrainingRun) -> int:
    """Bytes that all blocks together keep between forward and backward."""
    return kept_of_blocks(step_of(run), run.model.layers)


def block_table(run: TrainingRun) -> Bytes:
    """The tensors that one block keeps for backward, in bytes by "operation: name", in the order of forward.

    A block that recomputes nothing: the first is its input.
    """
    return of_blocks.table(rows_of_block(run.replace(recompute="none")))


def block_bytes(run: TrainingRun) -> int:
    """Bytes that one block keeps for backward if it recomputes nothing, its input included."""
    return sum(block_table(run).values())


def input_bytes(run: TrainingRun) -> int:
    """X = r·t·h, the residual stream before a block: all that full recomputation keeps of it."""
    return letters(run).X


def stem_bytes(run: TrainingRun) -> int:
    """Bytes kept once, before the blocks and for all of them."""
    return shared_by_blocks(step_of(run))


def head_bytes(run: TrainingRun) -> int:
    """Bytes that the last norm and the head keep."""
    return kept_by_head(step_of(run))


def loss_bytes(run: TrainingRun) -> int:
    """Bytes that cross-entropy keeps: the log-softmax of all t·V logits."""
    whole = step_of(run.replace(loss_chunks=1))
    return bytes_per_logit(whole.run)[0] * whole.x.t * whole.V


def kept_of_blocks(step: Step, count: int) -> int:
    """Bytes that the first `count` blocks keep: all of it, or the input of every K-th (Chen et al. 2016).

    With "selective" also the results of matrix products; offloaded, what is too small to go.
    """
    K = blocks_together(step.run)
    if K:
        return -(-count // K) * step.x.X + count * products(step)
    if step.run.recompute == "offload":
        sizes = (size for row in step.block.rows for size in row.keeps.values())
        return count * sum(size for size in sizes if size < SMALLEST_TO_OFFLOAD)
    return (count - 1) * step.block.kept + step.first.kept if count else 0


def blocks_together(run: TrainingRun) -> int:
    """K, the blocks under one checkpoint; 0 if none is recomputed as a whole."""
    return 1 if run.recompute == "selective" else run.blocks_per_checkpoint


def products(step: Step) -> int:
    """Bytes of a block's matrix products and attention, which "selective" keeps next to the block's input."""
    run, x = step.run, step.x
    if run.recompute != "selective":
        return 0
    m = run.model
    pairs = x.t * (m.experts_per_token or 1)
    core = x.c * x.t * x.a * run.seq_len if run.attention == "eager" else 4 * x.t * x.a
    wide = x.c * pairs * x.f * (2 if m.mlp == "swiglu" else 1)
    outputs = x.Q + x.H + x.c * pairs * x.h  # of attention, its matrix, and the MLP
    router = x.c * x.t * m.experts
    lora = x.c * x.t * sum(rows for rows, _ in of_ranks.factors(run).values())
    return x.Q + 2 * x.K + core + wide + outputs + router + lora


def rows_of_first_block(run: TrainingRun, rows: list[Row]) -> list[Row]:
    """LoRA's rows of the first block: those from the first matrix that it adapts on.

    Before it nothing is trained, so nothing is kept, nor do gradients go back through matrices that read the
    same input. What its A reads is kept for it alone.
    """
    together = next(names for names in READ_TOGETHER if set(names) & set(run.lora_targets))
    factors = tuple(f"{name}, {factor}" for name in run.lora_targets for factor in ("A", "B"))
    begin = next(number for number, row in enumerate(rows) if row.name.startswith(factors))
    found = [row for row in rows[begin:] if row.name.split(",")[0] not in together or row.name in factors]
    A = found[0]
    return [A._replace(keeps={"input": A.reads}, reads=0), *found[1:]] if A.reads else found


def shared_by_blocks(step: Step) -> int:
    """Kept once: positions' angles or indices, eager attention's mask, the embedding's dropout mask."""
    run, x = step.run, step.x
    if run.compile == "model":
        return of_compiled.kept_besides(run)
    s = run.seq_len
    trained = not run.lora_rank
    shared = s * s if run.attention == "eager" else 0
    if run.model.positions == "rotary":
        shared += 2 * x.c * s * run.model.head_size
    if run.model.positions == "learned" and trained:
        shared += 8 * s
    if run.model.dropout and trained:
        shared += x.u * x.h
    return shared


def kept_by_head(step: Step) -> int:
    """The last norm's input and the head's, which a frozen head does not need; a loss in pieces holds it."""
    run, x = step.run, step.x
    if run.compile == "model":
        return of_compiled.kept_by_head(run)
    last = kept(norm(run, x, "final norm"))
    if run.loss_chunks > 1:
        return last + x.N
    return last if run.lora_rank else last + x.H


def copies_of_blocks(step: Step, count: int) -> int:
    """Bytes of autocast's 16-bit copies of the weights of the first `count` blocks."""
    return (count - 1) * step.block.copies + step.first.copies if count else 0


# The moments of a step


def forward_moments(step: Step) -> Iterator[Moment]:
    """Forward's end, and what may be higher before it: frozen matrices made 16-bit, and FSDP2's gathering."""
    run, x = step.run, step.x
    L = run.model.layers
    copied = all_copies(step)
    kept_by_all = kept_of_blocks(step, L) + shared_by_blocks(step)
    if run.frozen_bits in (4, 8):
        parts = {"weight_copies": copied, "activations": kept_by_all, "temporaries": made_dense(step)}
        yield Moment("forward", "forward", parts, "down, made 16-bit")
    if run.zero_stage >= 2:
        yield Moment("forward", "forward", {"communication": step.buffers.in_stem}, "embedding")
        held = copied - step.block.copies if copied and L > 1 else 0
        parts = {"weight_copies": held, "activations": kept_of_blocks(step, L - 1) + x.X}
        parts["communication"] = step.buffers.in_forward
        yield Moment("forward", "forward", parts, "gathering")
    is_whole = run.loss_chunks == 1
    yield Moment("end of forward", "forward", {
        "weight_copies": copied + (head_copy(step) if is_whole else 0),
        "activations": kept_by_all + kept_by_head(step),
        "communication": step.buffers.at_head,
        "temporaries": x.c * x.t * step.V if is_whole else 0,
    })  # fmt: skip


def made_dense(step: Step) -> int:
    """Temporaries at the last block's last matrix, made 16-bit, from 4 bits by way of an index as large.

    Its input is there, LoRA's part of its result, and what the norm gave. Variables hold the first block's
    input, and two more tensors of the stream where norms keep a copy of it.
    """
    run, x = step.run, step.x
    targets = set(run.lora_targets)
    dense = x.c * x.f * x.h
    given = 0 if targets & {"gate", "up"} and x.n == x.c else x.N
    wide = 0 if "down" in targets else x.F
    stream = x.X if keeps_stream(step) else 3 * x.X
    learned = x.H if "down" in targets else 0
    return dense + max(dense if run.frozen_bits == 4 else 0, x.H) + given + wide + learned + stream


def all_copies(step: Step) -> int:
    """Bytes of all blocks' 16-bit copies, which autocast holds until the loss if weights are trained.

    Of frozen weights a recomputed block holds none; LoRA's factors are trained.
    """
    run = step.run
    if run.lora_rank and blocks_together(run):
        factors = sum(map(prod, of_ranks.factors(run).values()))
        return step.x.c * run.model.layers * factors if run.precision.autocast else 0
    return copies_of_blocks(step, run.model.layers)


def head_copy(step: Step) -> int:
    """Bytes of autocast's 16-bit copy of the head's weights; frozen ones may be 16-bit themselves."""
    return step.x.c * step.V * step.x.h if step.x.r != step.x.c else 0


def loss_moments(step: Step) -> Iterator[Moment]:
    """The t·V logits, or a piece of t·V/n: their log-softmax, and in backward their gradients.

    The head's gradient is V·h; a loss in pieces adds up that of all pieces, and the gradient of their input.
    """
    run, x = step.run, step.x
    n = run.loss_chunks
    logits = -(-x.t // n) * step.V
    softmax, read, gradients = (size * logits for size in bytes_per_logit(run))
    Vh = 0 if run.lora_rank else step.V * x.h
    before = kept_of_blocks(step, run.model.layers) + shared_by_blocks(step) + kept_by_head(step)
    copied = head_copy(step)
    held = 0 if blocks_together(run) else copies_of_blocks(step, run.model.layers)
    start = {"activations": before, "weight_copies": held + copied, "communication": step.buffers.at_head}

    loss = {"activations": before + softmax, "weight_copies": all_copies(step) + copied, "temporaries": read}
    yield Moment("loss", "loss", start | loss)
    name = "backward of the loss"
    backward = {"activations": before + softmax, "temporaries": gradients}
    if n == 1:
        yield Moment("after loss", "loss", start | {"activations": before + softmax})
        yield Moment(name, "backward", start | backward)
        yield from head_moments(step, start | {"communication": step.buffers.at_head_backward}, logits, Vh)
        return
    yield Moment("after loss", "loss", start | {"weight_copies": held})
    cast = x.H // n if x.n != x.c else 0  # of a piece of the head's input, which is made again
    every = x.N * (n - 1) // n  # gradients of all other pieces of the input
    added = {"gradients": 0, "temporaries": x.c * Vh}
    if not step.alone.accumulates and not run.model.tied and run.precision.gradient == x.c:
        added = {"gradients": x.c * Vh, "temporaries": 0}  # the sum is the head's gradient itself
    backward["activations"] += cast
    yield Moment(name, "backward", start | backward | add(added, gradients + every))
    # The first two gradients of the head are added in a third tensor, unless autocast casts them.
    # Where they are all, the input has gone by then.
    summed = x.c * (logits + Vh) + every if run.precision.autocast else 2 * x.c * Vh + 2 * x.N // n
    if n == 2 and not run.precision.autocast:
        start["activations"] -= x.N
    yield Moment(name, "backward", start | add(added, summed), "sum of the head's gradients")


def moments_of_compiled_loss(step: Step) -> Iterator[Moment]:
    """A compiled model's loss: the gradient of the logits takes their place, then goes back through the head.

    New are the gradients of the head and of its input, one after the other.
    """
    run, x = step.run, step.x
    before = kept_of_blocks(step, run.model.layers) + shared_by_blocks(step) + kept_by_head(step)
    copied = all_copies(step) + head_copy(step)
    logits = of_compiled.logits(run)
    there = {"activations": before + logits, "weight_copies": copied}
    yield Moment("after loss", "forward", there | {"activations": before + logits + 8 * x.t})
    Vh = step.V * x.h
    made = x.H if of_compiled.waiting(run) else max(x.H, x.c * Vh)
    yield Moment("backward of the head", "backward", there | {"temporaries": made})


def compiled_stem_moments(step: Step, full: Bytes) -> Iterator[Moment]:
    """Backward of a compiled model's embedding: its dense gradient is in fp32 first.

    A tied head's is made then, from the gradient of the logits.
    """
    run, x = step.run, step.x
    Vh = step.V * x.h
    own = max(4 * Vh, run.precision.gradient * Vh)
    head = of_compiled.waiting(run) + (x.c * Vh if run.model.tied else 0)
    yield Moment("backward of the embedding", "backward", {
        "gradients": full["gradients"],
        "temporaries": own - run.precision.gradient * Vh + head + x.H,
    })  # fmt: skip


def add(parts: Bytes, temporaries: int) -> Bytes:
    """The parts with more temporaries."""
    return parts | {"temporaries": parts["temporaries"] + temporaries}


def bytes_per_logit(run: TrainingRun) -> tuple[int, int, int]:
    """Bytes per logit of the log-softmax, of what the loss reads, and of the gradients in backward.

    These are c, c and 2c. Under autocast the log-softmax has a copy in fp32. Upcast logits are of 4 bytes; a
    piece's own are freed once copied, whole ones stay until the loss is done.
    """
    c = run.precision.compute
    if run.model.logits == "fp32" and c == 2:
        return 4, 4 + (c if run.loss_chunks == 1 else 0), 8
    if run.precision.autocast:
        return c + 4, c, 4
    return c, c, 2 * c


def head_moments(step: Step, start: Bytes, logits: int, Vh: int) -> Iterator[Moment]:
    """Backward of the whole head: gradients of its input and its matrix, which autocast casts to fp32."""
    x, autocast = step.x, step.run.precision.autocast
    name = "backward of the head"
    yield Moment(name, "backward", start | {"temporaries": x.H + x.c * (logits + Vh)})
    if autocast and Vh:
        held = start["weight_copies"] - head_copy(step)
        cast = {"weight_copies": held, "temporaries": x.H + (x.c + 4) * Vh}
        yield Moment(name, "backward", start | cast, "its gradient cast")


def block_moments(step: Step) -> Iterator[Moment]:
    """Backward of the blocks at which memory may be highest: the ends of the first and last checkpoint.

    In the last block all activations are kept, in the first nearly all gradients are there. A recomputed
    block keeps everything during its own backward.
    """
    run, x = step.run, step.x
    K = blocks_together(run)
    shared = shared_by_blocks(step)
    for index in ends_of_backward(run):
        left = index % K + 1 if K else 0  # blocks of this checkpoint that are there again
        held = copies_of_blocks(step, index + 1)
        start = {
            "weight_copies": held - copies_of_blocks(step, index + 1 - left) if K else held,
            "gradients": gradients_before(step, index),
            "activations": kept_of_blocks(step, index + 1) + again(step, index, left) + shared,
            "communication": step.buffers.in_block(index),
            "temporaries": waiting(step),
        }
        top = highest(step, step.block.rows if index else step.first.rows, start)
        yield top._replace(name=name_of(run, index))
        if run.zero_stage >= 2:
            whole = start["gradients"] + step.buffers.block.most
            parts = {"activations": kept_of_blocks(step, index), "communication": step.buffers.at_sum(index)}
            parts |= {"gradients": whole, "temporaries": start["temporaries"] + x.X}
            yield Moment(name_of(run, index), "backward", parts, "reduce-scatter")


def ends_of_backward(run: TrainingRun) -> list[int]:
    """The blocks to look at, counted from the first: between them memory runs along straight lines."""
    L = run.model.layers
    K = blocks_together(run) or 1
    ends = {L - 1, (L - 1) // K * K, min(K, L) - 1, 0}
    if run.zero_stage >= 2:  # whose neighbours have other buffers
        ends |= {max(L - 2, 0), min(1, L - 1)}
    return sorted(ends, reverse=True)


def name_of(run: TrainingRun, index: int) -> str:
    """The name of a block's backward; blocks under one checkpoint share theirs."""
    K = blocks_together(run) or 1
    if index // K == (run.model.layers - 1) // K:
        return "backward of the last block"
    return "backward of the first block" if index < K else "backward of the middle block"


def again(step: Step, index: int, left: int) -> int:
    """Bytes that a recomputed block keeps again, besides its checkpoint, and those left of its neighbours.

    Products that were kept take their places, the others go.
    """
    if not left:
        return 0
    x = step.x
    found = left * step.block.kept - products(step)
    if index - left < 0:
        found += step.first.kept - step.block.kept
    return found - x.X if keeps_stream(step) else found


def keeps_stream(step: Step) -> bool:
    """True if a norm keeps the residual stream itself, and not a copy in another type."""
    return step.block.rows[0].keeps.get("input") == step.x.X


def gradients_before(step: Step, index: int) -> int:
    """Bytes of new gradients when backward of a block begins: of the head, and of all blocks after it.

    LoRA's head has none.
    """
    run = step.run
    Vh = 0 if run.lora_rank else step.V * step.x.h
    done = run.model.layers - 1 - index
    if run.zero_stage >= 2:
        shares = 0 if run.accumulates else done * step.buffers.block.share
        return run.precision.weight * Vh + shares
    if run.accumulates:
        return 0
    of_block = sum(map(prod, local(run).block.values()))
    if run.compile == "model":
        return step.x.c * (done * of_block + (0 if of_compiled.waiting(run) else Vh))
    of_head = step.x.r if run.model.tied else run.precision.gradient  # a tied one waits as it was made
    return of_head * Vh + run.precision.gradient * done * of_block


def waiting(step: Step) -> int:
    """Bytes of the head's gradient while it waits for the embedding's, to which it is tied."""
    run = step.run
    if run.compile == "model":
        return of_compiled.waiting(run)
    waits = run.accumulates and run.zero_stage < 2 and run.model.tied and not run.lora_rank
    return step.x.r * step.V * step.x.h if waits else 0


def highest(step: Step, rows: list[Row], start: Bytes) -> Moment:
    """The highest point of a block's backward, which visits its rows from the last to the first.

    What comes to the block is one gradient of the residual stream.
    """
    run = step.alone
    offloads = run.recompute == "offload"
    new = not run.accumulates
    element = step.x.c if run.compile == "model" else run.precision.gradient
    copied, kept_now, arrived, flow = 0, 0, 0, step.x.X  # what has changed since the start
    top, best, where = 0, (0, 0, 0, 0), ""
    for row in reversed(rows):
        own = element * row.weights
        sizes = row.keeps.values()
        back = 0
        if offloads:  # a row's own tensors come back for as long as its backward runs
            back = sum(size for size in (*sizes, row.reads) if size >= SMALLEST_TO_OFFLOAD)
            sizes = [size for size in sizes if size < SMALLEST_TO_OFFLOAD]
        now = copied + kept_now + back + arrived + own + flow + row.makes
        if (now > top or not where) and not row.stands_for_many:
            top, where = now, row.name
            best = (copied, kept_now + back, arrived + own, flow + row.makes)
            if not new:
                best = (copied, kept_now + back, 0, flow + row.makes + own)
        copied -= row.copy
        kept_now -= sum(sizes)
        arrived += own if new else 0
        flow = row.left
    kinds = ("weight_copies", "activations", "gradients", "temporaries")
    return Moment("", "backward", plus(start, dict(zip(kinds, best, strict=True))), where)


def stem_moments(step: Step, full: Bytes) -> Iterator[Moment]:
    """Backward of the embedding, whose gradient is dense: r·V·h.

    A tied one meets the head's. Both are there with the gradient of what the embedding gave, then their sum
    in a third tensor, unless autocast cast the head's. A gradient of another type is a copy.
    """
    run, x = step.run, step.x
    if run.lora_rank:
        return
    name = "backward of the embedding"
    tied = int(run.model.tied)
    third = int(run.model.tied and not run.precision.autocast and run.loss_chunks == 1)
    Vh = step.V * x.h
    g = step.alone.precision.gradient
    size = max((1 + tied) * x.r * Vh + x.X, (1 + tied + third) * x.r * Vh)
    if run.zero_stage >= 2:
        outer, block = step.buffers.outer, step.buffers.block
        shares = 0 if run.accumulates else run.model.layers * block.share
        parts = {"gradients": shares + outer.gradients, "temporaries": size - x.r * Vh}
        yield Moment(name, "backward", parts | {"communication": outer.whole + block.summed})
        parts = {"gradients": shares + outer.most, "communication": outer.summed}
        yield Moment(name, "backward", parts, "reduce-scatter")
    elif run.accumulates:
        yield Moment(name, "backward", {"temporaries": size})
    else:
        if g != x.r:
            size = max(size, (x.r + g) * Vh)
        yield Moment(name, "backward", {"gradients": full["gradients"], "temporaries": size - g * Vh})


# After backward


def after_backward(run: TrainingRun, full: Bytes) -> Iterator[Moment]:
    """Clipping, with a norm for each gradient, the optimizer's step, and what is left at the end."""
    if run.clip_grad_norm is not None:
        yield Moment("clipping", "clip", {"temporaries": 512 * local(run).tensors})
    yield Moment("optimizer step", "optimizer", update(run))
    goes = run.set_to_none and not run.bucket_view
    yield Moment("end of step", "zero_grad", {"gradients": -full["gradients"] if goes else 0})


def update(run: TrainingRun) -> Bytes:
    """Temporaries of the optimizer's step, less the gradients that it has freed by then.

    Fused: none. Foreach: a tensor for each parameter, 4N in fp32. Otherwise one parameter after another: with
    master weights its gradient goes to fp32 first, and the 16-bit one is freed.
    """
    p = of_ranks.stored(run)
    if p.name == "fp8":  # nothing here computes in fp8
        return {}
    trained = of_ranks.stepped(run)
    element = p.master or p.weight
    upcasts = p.gradient < p.master
    frees = upcasts and run.set_to_none and not run.bucket_view
    optimizer = run.optimizer
    at_once = optimizer.implementation == "foreach" and (optimizer.forced or not p.master)
    if at_once and optimizer.algorithm not in IN_PLACE:
        gone = p.gradient * trained.parameters if frees else 0
        added = (2 if upcasts else 1) * element * trained.parameters
        return {"temporaries": added, "gradients": -gone}
    best: Bytes = {}
    gone, before = 0, 0
    for name, shape in in_order(trained):
        size = prod(shape)
        upcast = p.master * size if upcasts else 0
        now = {"temporaries": upcast, "gradients": -gone}
        gone += p.gradient * size if frees else 0
        then = {"temporaries": upcast + before + one_update(run, name, shape, element), "gradients": -gone}
        best = max(best, now, then, key=lambda parts: sum(parts.values()))
        if optimizer.implementation == "loop" and optimizer.algorithm in STAYS and not p.master:
            before = element * size
    return best


STAYS = ("adam", "adamw", "adafactor")
"""Algorithms whose loop frees a parameter's last tensor only when the next one's is there."""


def in_order(trained: Trainable) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The names and shapes of the parameters in the order of the step; two blocks stand for all."""
    yield from trained.before.items()
    for _ in range(min(2, trained.layers)):
        yield from trained.block.items()
    yield from trained.after.items()


def one_update(run: TrainingRun, name: str, shape: tuple[int, ...], element: int) -> int:
    """Bytes that the update of one parameter adds at its highest point.

    Adam's for-loop has two tensors, foreach one, fused none. Muon orthogonalizes X in bf16, which is there
    twice, with two products X·Xᵀ (Jordan et al. 2024).
    """
    size = element * prod(shape)
    match run.optimizer.algorithm:
        case "sgd" | "momentum":
            return 0
        case "lion" | "adafactor":
            return size
        case "adam8bit" if prod(shape) < SMALL_8BIT:
            return 4 * prod(shape)
        case "adam8bit":  # both moments of a piece in fp32, and one tensor more
            return 3 * 4 * min(prod(shape), PIECE_8BIT)
        case "muon" if is_hidden_matrix(name, shape):
            return size + 4 * prod(shape) + 4 * min(shape) ** 2
        case "muon":
            return 2 * size
    return {"fused": 0, "foreach": 1, "loop": 2}[run.optimizer.implementation] * size
