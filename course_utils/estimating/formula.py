"""The closed form of a training step's memory: plain arithmetic that a reader follows with a pencil.

Symbols: N parameters, V vocabulary, h hidden size, L blocks, a heads, k width of keys, f width of the MLP, s
tokens of a sequence, b sequences, t = b·s, D ranks. Bytes per element: c of matrix products, r of the
residual stream. The peak is the largest of a few moments of the step; all sizes are in bytes. Lesson 05 has
the activations as a table, lesson 19 the moments.

On one rank, over the frozen runs of GPT-2's and Llama's families, the peak is within 0.01 % of
the simulated one at the median and 1.1 % at most (`python3 -m course_utils evidence --table accuracy`). On
several ranks it is within 5 % for deep models and 13 % for models of 2 to 4 blocks, where FSDP2's buffers
overlap in ways that are left out; of runs that are not in the list, one of 3 blocks on 64 ranks was 34 % too
high. LoRA, experts, offloading, fp8, unfused GELU and RMSNorm, and tensor parallelism are not covered.
"""

from dataclasses import replace
from itertools import product
from math import prod

from ..breakdown import MemoryBreakdown
from ..models import block_shapes, parameter_shapes
from ..run import TrainingRun
from .workspaces import workspace_bytes

Bytes = dict[str, int]
"""Bytes by kind of memory."""


def estimate(run: TrainingRun) -> MemoryBreakdown:
    """Bytes by kind at the peak, the largest of the moments. Raises ValueError for a run not covered."""
    return max(moments(run).values(), key=lambda moment: moment.total)


# States: what persists from step to step


def states(run: TrainingRun) -> Bytes:
    """Weights, gradients and optimizer states of rank 0, (w + g + K)·N; K is master weights and moments.

    Rajbhandari et al. 2020 (ZeRO), sections 3.1 and 5: stages 1, 2 and 3 divide K, then g, then w by D. FSDP2
    shards all three in stages 2 and 3, and its shards are the master weights; ZeRO-1 gives each rank whole
    tensors.
    """
    N, D, p = run.model.parameters, run.world_size, run.precision
    moments = p.state * moment_numbers(run)
    if run.zero_stage >= 2:
        shard = (p.master or p.weight) * N // D
        return {"parameters": shard, "gradients": shard, "optimizer_states": moments // D}
    share = max(N // D, largest(run)) if run.zero_stage else N
    K = (p.master * N + moments) * share // N
    return {"parameters": p.weight * N, "gradients": p.gradient * N, "optimizer_states": K}


def moment_numbers(run: TrainingRun) -> int:
    """Numbers that the optimizer keeps: 2N for Adam (Kingma and Ba 2015), N for momentum and Lion (Chen et
    al. 2023).

    Adafactor keeps the rows and columns of a matrix (Shazeer and Stern 2018), Muon one number for each weight
    of the blocks' matrices and two for all others (Jordan et al. 2024), 8-bit Adam two bytes for each weight
    and two fp32 scales for 256 of them (Dettmers et al. 2022).
    """
    N = run.model.parameters
    match run.optimizer.algorithm:
        case "sgd":
            return 0
        case "momentum" | "lion":
            return N
        case "adafactor":
            return sum(map(sum, parameter_shapes(run.model).values()))
        case "muon":
            return 2 * N - run.model.layers * block_matrices(run)
        case "adam8bit":
            return (2 * N + 8 * N // 256) // run.precision.state
    return 2 * N


def update_bytes(run: TrainingRun) -> int:
    """Temporaries of the optimizer step.

    Fused: none. Foreach: a tensor for each parameter, 4N in fp32. For-loop: two for one parameter at a time.
    With master weights one parameter at a time, its gradient copied to fp32 first.
    """
    p = run.precision
    D = run.world_size if run.zero_stage else 1
    elements = largest(run)
    if run.zero_stage >= 2:  # FSDP2 cuts each parameter, ZeRO-1 none; its shards are the master weights
        elements //= D
        if p.master:
            p = replace(p, weight=p.master, master=0)
    if run.optimizer.implementation == "foreach" and (run.optimizer.forced or not p.master):
        elements = max(run.model.parameters // D, elements)
    tensors = update_tensors(run)
    upcast = p.master * elements if p.gradient < p.master else 0
    freed = 0
    if upcast and run.set_to_none and tensors:
        freed = upcast * p.gradient // p.master
    at_once = min(elements, 2**24) if run.optimizer.algorithm == "adam8bit" else elements
    element = p.master or p.weight
    new = tensors * element * at_once
    if run.optimizer.algorithm == "muon":  # X in bf16 twice and two Gram matrices of it (Jordan et al. 2024)
        h, f = run.model.hidden, run.model.ffn
        new = max(new, (element + 4) * h * f + 4 * min(h, f) ** 2)
    return new + upcast - freed


def update_tensors(run: TrainingRun) -> int:
    """The number of temporaries, each as large as what is updated at once."""
    match run.optimizer.algorithm:
        case "sgd" | "momentum":
            return 0
        case "lion" | "adafactor":
            return 1
        case "adam8bit":
            return 3
    return {"fused": 0, "foreach": 1, "loop": 2}[run.optimizer.implementation]


# Activations: what forward keeps for backward, per block


def block(run: TrainingRun) -> int:
    """One block: in 16 bits s·b·h·(34 + 5·a·s/h) for GPT-2, plus norms' statistics.

    Korthikanti et al. 2022, table 2.

    Two norms keep their inputs; the projection to q, k and v, attention's output and the MLP keep theirs, and
    under autocast each of their matrices its own 16-bit copy; two dropouts keep a byte per element.
    """
    m = run.model
    t = run.micro_batch * run.seq_len
    c = run.precision.compute
    r = residual(run)
    norms = 2 * t * (r * m.hidden + statistics(run))
    # Three inputs, which matrices share; autocast casts one for each matrix that reads it.
    copies = 3
    if run.precision.autocast:
        projections = 1 if m.fused_qkv else 3
        ups = 2 if m.mlp == "swiglu" else 1
        copies = projections + 1 + ups
    inputs = copies * c * t * m.hidden
    masks = 2 * t * m.hidden if m.dropout else 0
    return norms + inputs + masks + sum(attention(run).values()) + mlp(run)


def attention(run: TrainingRun) -> Bytes:
    """Attention between its projections: q, k, v, and what comes of the scores.

    Fused kernels keep one fp32 logsumexp per row and head (Dao et al. 2022). Eager attention keeps the
    softmax, the dropout mask and the weights after dropout: 5·a·s²·b in 16 bits (Korthikanti et al. 2022,
    section 4.1), 7·a·s²·b under autocast, whose softmax is in fp32.
    """
    m = run.model
    t = run.micro_batch * run.seq_len
    c = run.precision.compute
    r = residual(run)
    repeated = run.attention in ("eager", "efficient") or m.repeat_kv  # keys and values, for every query head
    qkv = c * t * (3 * m.hidden if repeated else m.hidden + 2 * m.kv)
    if run.attention != "eager":
        return {"qkv": qkv, "logsumexp": 4 * t * m.heads}
    softmax = r
    mask = 1 if m.dropout else 0
    weights = c if m.dropout or r != c else 0  # as the product with v takes them
    return {"qkv": qkv, "scores": t * m.heads * run.seq_len * (softmax + mask + weights)}


def mlp(run: TrainingRun) -> int:
    """GELU keeps two tensors of width f, SwiGLU four: its gate before and after SiLU, up, their product."""
    tensors = 4 if run.model.mlp == "swiglu" else 2
    return tensors * run.precision.compute * run.micro_batch * run.seq_len * run.model.ffn


def all_blocks(run: TrainingRun) -> int:
    """L blocks, or the input of every K-th (Chen et al. 2016).

    With "selective" also the results of matrix products; with "selective-attention" all but attention's core
    (Korthikanti et al. 2022, section 5).
    """
    m = run.model
    K = blocks_together(run)
    if K:
        checkpoints = -(-m.layers // K)
        return checkpoints * checkpoint_bytes(run) + m.layers * products(run)
    return m.layers * (block(run) - recomputed_core(run))


def blocks_together(run: TrainingRun) -> int:
    """K, the blocks under one checkpoint; 0 if none is recomputed as a whole."""
    if run.recompute == "selective":
        return 1
    return run.blocks_per_checkpoint


def products(run: TrainingRun) -> int:
    """Bytes that "selective" keeps of a block beyond its input: results of matrix products and attention."""
    if run.recompute != "selective":
        return 0
    m = run.model
    t = run.micro_batch * run.seq_len
    c = run.precision.compute
    wide = (2 if m.mlp == "swiglu" else 1) * m.ffn
    scores = c * t * m.heads * run.seq_len if run.attention == "eager" else 4 * t * m.heads
    return c * t * (4 * m.hidden + 2 * m.kv + wide) + scores


def recomputed_core(run: TrainingRun) -> int:
    """Bytes that "selective-attention" does not keep of a block.

    That is attention without q, k and v as projected.
    """
    if run.recompute != "selective-attention":
        return 0
    kept = run.precision.compute * run.micro_batch * run.seq_len * (run.model.hidden + 2 * run.model.kv)
    return sum(attention(run).values()) - kept


def outside_blocks(run: TrainingRun) -> int:
    """The embedding's dropout mask, inputs of the last norm and of the head, and what all blocks share."""
    m = run.model
    s = run.seq_len
    t = run.micro_batch * run.seq_len
    c = run.precision.compute
    positions = 2 * c * s * m.head_size if m.positions == "rotary" else 8 * s
    mask = s * s if run.attention == "eager" else 0
    dropout = t * m.hidden if m.dropout else 0
    return dropout + t * ((residual(run) + c) * m.hidden + statistics(run)) + positions + mask


def residual(run: TrainingRun) -> int:
    """r, bytes per element of the residual stream: fp32 under autocast."""
    return 4 if run.precision.autocast else run.precision.compute


def statistics(run: TrainingRun) -> int:
    """Bytes per token of a norm's fp32 statistics: mean and deviation, or RMSNorm's one number."""
    return 8 if run.model.norm == "layernorm" else 4


def weight_copies(run: TrainingRun) -> tuple[int, int]:
    """Bytes of autocast's 16-bit copies until backward: of one block's matrices, and of the head."""
    c = run.precision.compute if run.precision.autocast else 0
    return c * block_matrices(run), c * run.model.vocab * run.model.hidden


# The moments of a step


def moments(run: TrainingRun) -> dict[str, MemoryBreakdown]:
    """Bytes by kind at the moments at which memory may peak, by name.

    Raises ValueError for a run not covered.
    """
    check(run)
    full = states(run) | {"inputs": 16 * run.micro_batch * run.seq_len, "workspaces": workspace_bytes(run)}
    if run.world_size > 1 and run.zero_stage < 2 and not run.bucket_view:
        # DistributedDataParallel's buckets
        full["communication"] = run.precision.gradient * run.model.parameters
    # gradients of the micro-batch before, or the buckets that hold them
    there = run.accumulates or run.bucket_view
    start = full if there else full | {"gradients": 0}
    if run.zero_stage >= 2:
        return sharded_moments(run, start, full)
    during = [*loss_moments(run), *block_moments(run, there)]
    found = {name: plus(name, start, parts) for name, parts in during}
    after = {"backward of the embedding": embedding_backward(run), "optimizer step": update_bytes(run)}
    for name, size in after.items():
        found[name] = plus(name, full, {"temporaries": size})
    return found


def loss_moments(run: TrainingRun) -> list[tuple[str, Bytes]]:
    """The t·V logits: c bytes each, and as much for their log-softmax.

    Under autocast it has 4 more for its fp32 copy. In backward come gradients, of twice the loss's type.
    Upcast logits are copied to 4 bytes each and their log-softmax is of 4, too. A loss in n chunks has t·V/n
    at a time, and sums the head's gradient.
    """
    m = run.model
    t = run.micro_batch * run.seq_len
    n = run.loss_chunks
    c = run.precision.compute
    logits = t * m.vocab // n
    Vh = m.vocab * m.hidden
    autocast = bool(run.precision.autocast)
    block_copies, head_copy = weight_copies(run)
    all_copies = m.layers * block_copies
    held = 0 if blocks_together(run) else all_copies  # recomputed blocks cast their weights again
    kept = all_blocks(run) + outside_blocks(run)
    softmax, read, gradients = (size * logits for size in bytes_per_logit(run))
    if n > 1:
        gradients += c * Vh
    loss = {"weight_copies": all_copies + head_copy, "activations": kept + softmax, "temporaries": read}
    head = {"weight_copies": held + head_copy, "activations": kept}
    found = [
        ("loss", loss),
        ("backward of the loss", head | {"activations": kept + softmax, "temporaries": gradients}),
    ]
    if n > 1:
        summed = 2 * c * Vh + c * logits if autocast else 3 * c * Vh
        return [*found, ("backward of the head", head | {"temporaries": summed})]
    found.append(("backward of the head", head | {"temporaries": c * (t * m.hidden + logits + Vh)}))
    if autocast:
        cast = {"weight_copies": held, "activations": kept, "temporaries": c * t * m.hidden + (c + 4) * Vh}
        found.append(("head's gradient in fp32", cast))
    return found


def bytes_per_logit(run: TrainingRun) -> tuple[int, int, int]:
    """Bytes per logit of the log-softmax, of what the loss reads, and of the gradients in backward."""
    c = run.precision.compute
    if run.model.logits == "fp32" and c == 2:
        # An upcast piece's own logits are freed once it is copied; whole ones stay until the loss is done.
        read = 4 + c if run.loss_chunks == 1 else 4
        return 4, read, 8
    if run.precision.autocast:
        return c + 4, c, 4
    return c, c, 2 * c


def block_moments(run: TrainingRun, there: bool) -> list[tuple[str, Bytes]]:
    """Backward of the last block and of the first, each within the MLP and within attention.

    In the last all activations are kept, in the first nearly all gradients are there. A recomputed block
    keeps everything during its own backward.
    """
    m = run.model
    p = run.precision
    K = blocks_together(run)
    block_copies = weight_copies(run)[0]
    own = block_weights(run)
    Vh = m.vocab * m.hidden
    checkpoint = checkpoint_bytes(run)
    waiting = p.compute * Vh if there and m.tied and not p.autocast else 0  # the head's, for the embedding's
    tops = {"MLP": mlp_backward(run, there), "attention": attention_backward(run, there)}
    # Of the products kept, those that backward needs count in `block`; the outputs of attention and of the
    # MLP do not.
    found_again = max(0, products(run) - 2 * p.compute * run.micro_batch * run.seq_len * m.hidden)
    found = []
    for (which, together, kept, copies, done), (part, top) in product(ends_of_backward(run), tops.items()):
        for left in {together, 1}:  # of the blocks under this checkpoint
            name = f"backward of the {which} block, {part}"
            if together > 1:
                name += f", {left} of {together} recomputed blocks left"
            again = left * block(run) - checkpoint - found_again if K else 0
            sizes = {
                "weight_copies": left * block_copies if K else copies,
                "gradients": 0 if there else p.gradient * (Vh + done + (together - left) * own),
                "activations": kept + again,
                "temporaries": top + waiting,
            }
            found.append((name, sizes))
    return found


def checkpoint_bytes(run: TrainingRun) -> int:
    """One input of a block, r·t·h."""
    return residual(run) * run.micro_batch * run.seq_len * run.model.hidden


def ends_of_backward(run: TrainingRun) -> tuple[tuple[str, int, int, int, int], ...]:
    """The last block and the first, with what is there when their backward begins.

    Of each: its name, the blocks under its checkpoint, bytes kept, bytes of weight copies, and weights whose
    gradients have arrived.
    """
    K = blocks_together(run)
    L = run.model.layers
    copies = weight_copies(run)[0]
    kept = all_blocks(run)
    if K:
        last = (L - 1) % K + 1
        first = min(K, L)
        kept_by_first = checkpoint_bytes(run) + products(run)
    else:
        last = 1
        first = 1
        kept_by_first = kept // L
    done = (L - first) * block_weights(run)
    return ("last", last, kept, L * copies, 0), ("first", first, kept_by_first, copies, done)


def mlp_backward(run: TrainingRun, there: bool) -> int:
    """Added when backward has passed the MLP's last matrix.

    These are the gradients of the residual stream, of the wide tensor (for SwiGLU of both its factors, when
    their product is gone) and of the matrix.
    """
    m = run.model
    t = run.micro_batch * run.seq_len
    c = run.precision.compute
    wide = c * t * m.ffn
    matrix = m.hidden * m.ffn
    narrow = c * t * m.hidden if m.dropout or run.precision.autocast else 0
    down = narrow + wide + c * matrix
    factors = 0
    if m.mlp == "swiglu":
        arrived = 0 if there else run.precision.gradient * matrix
        factors = 2 * wide + arrived
    return residual(run) * t * m.hidden + max(down, factors)


def attention_backward(run: TrainingRun, there: bool) -> int:
    """The same within attention.

    Softmax's backward has its output, two gradients and a product, all in its type: the MLP's activations are
    gone, the gradients of its matrices and of attention's output have arrived.
    """
    m = run.model
    t = run.micro_batch * run.seq_len
    c = run.precision.compute
    r = residual(run)
    gone = mlp(run) + t * ((r + c) * m.hidden + statistics(run) + (m.hidden if m.dropout else 0))
    matrices = (3 if m.mlp == "swiglu" else 2) * m.hidden * m.ffn + m.hidden**2
    arrived = 0 if there else run.precision.gradient * matrices
    core = attention(run)
    added = r * t * m.hidden + recomputed_core(run) + arrived - gone
    if run.attention != "eager":
        return added + core["qkv"]
    scores = t * m.heads * run.seq_len
    given = c if run.precision.autocast == "float16" else r  # fp16 is not cast back
    return added + max(c * scores, (3 * r + given) * scores - core["scores"])


def embedding_backward(run: TrainingRun) -> int:
    """The embedding's gradient is dense.

    A tied one meets the head's, in a third tensor unless autocast cast that.
    """
    m, p = run.model, run.precision
    tensors = 0
    if m.tied:
        tensors += 1
    if run.accumulates:
        tensors += 1
    if m.tied and not p.autocast and run.loss_chunks == 1:
        tensors += 1
    size = tensors * p.weight
    if p.gradient > p.weight and not run.accumulates:  # into the fp32 gradient, which counts already
        size = max(size + p.weight - p.gradient, p.weight)
    return size * m.vocab * m.hidden + checkpoint_bytes(run)


def sharded_moments(run: TrainingRun, start: Bytes, full: Bytes) -> dict[str, MemoryBreakdown]:
    """The moments with FSDP2's whole weights and gradients.

    Weights outside the blocks are whole all the time; of the blocks, the one that runs and the next (stage 2:
    all). Whole gradients are summed in the shards' type, then scattered (Zhao et al. 2023).
    """
    m = run.model
    p = run.precision
    own = block_weights(run)
    stage_2 = run.zero_stage == 2
    stored = p.master or p.weight
    outer = m.parameters - m.layers * own
    whole = p.weight * (m.parameters if stage_2 else outer)
    found = {name: plus(name, start, parts | {"communication": whole}) for name, parts in loss_moments(run)}
    for name, parts in block_moments(run, True):
        arrived = p.weight * (m.vocab * m.hidden + own)
        if "last" in name:
            there = start
            gathered = whole if stage_2 else whole + 2 * p.weight * own
        else:
            there = full
            gathered = p.weight * (outer + own)
            arrived -= stored * outer // run.world_size  # shards that `full` has, but that come only later
        parts |= {"communication": gathered + stored * own, "gradients": arrived}
        found[name] = plus(name, there, parts)
    stem = {"communication": whole + p.weight * own if stage_2 else 2 * p.weight * (outer + own)}
    scattered = {"communication": stored * outer, "gradients": p.weight * (outer + own)}
    update = {"temporaries": update_bytes(run)}
    found["stem"] = plus("stem", start, stem)
    found["backward of the embedding"] = plus("backward of the embedding", full, scattered)
    found["optimizer step"] = plus("optimizer step", full, update)
    return found


def plus(name: str, start: Bytes, parts: Bytes) -> MemoryBreakdown:
    """A moment: what was there, and what it adds."""
    phase = next((phase for phase in ("backward", "optimizer", "loss") if phase in name), "backward")
    total = {kind: start.get(kind, 0) + parts.get(kind, 0) for kind in start | parts}
    return MemoryBreakdown(total, phase, name)


def largest(run: TrainingRun) -> int:
    """Weights of the largest parameter."""
    return max(map(prod, parameter_shapes(run.model).values()))


def block_weights(run: TrainingRun) -> int:
    """Weights of one block."""
    return sum(map(prod, block_shapes(run.model).values()))


def block_matrices(run: TrainingRun) -> int:
    """Weights of one block's matrices."""
    return sum(prod(shape) for shape in block_shapes(run.model).values() if len(shape) == 2)


def check(run: TrainingRun) -> None:
    """Raise ValueError for a run that the closed form does not cover."""
    outside = {
        "LoRA": run.lora_rank,
        "a mixture of experts": run.model.experts,
        "GELU or RMSNorm in single operations": run.model.unfused,
        "offloading": run.recompute == "offload",
        "fp8": run.precision.name == "fp8",
        "tensor parallelism": run.tensor_parallel > 1,
    }
    for choice, chosen in outside.items():
        if chosen:
            raise ValueError(f"the closed form does not cover {choice}: leave out method='formula'")
