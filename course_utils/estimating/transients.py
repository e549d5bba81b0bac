"""What comes and goes within backward and within the optimizer step, and the moment at which most of it is there.

Backward is walked operation by operation: what each makes, and what it then lets go. Such a walk is a list of changes;
its highest point tells which operation needs the most, and of what.
"""

from math import prod

from ..models import outer_shapes
from ..run import TrainingRun
from ..units import round_up
from .activations import (
    block_saved,
    fused_saved,
    letters,
    loss_saved,
    norm_saved,
    shared_saved,
    sum_bytes,
    views_of_qkv,
)
from .states import block_copy_bytes
from .update import optimizer_step
from .walk import Change, Walk, free, highest, make, net

__all__ = ["Change", "Walk", "free", "highest", "make", "net", "optimizer_step"]


def forget(saved: int) -> Change:
    """Saved activations that are no longer needed go."""
    return Change("activations", -saved)


# Operations, backward


def weight_gradient(run: TrainingRun, elements: int, waits: bool = False) -> Walk:
    """The gradient of one weight, there in the compute type, becomes `.grad`: cast to fp32 first under autocast.

    From the second micro-batch on it is added to the one that is there, and goes. One that `waits` for another stays
    as it is.
    """
    made, kept = run.precision.compute * elements, run.precision.gradient * elements
    cast = [make(kept, gradient_kind(run, waits)), free(made)] if run.precision.autocast else []
    return cast if waits or run.accumulation_steps == 1 else [*cast, free(kept)]


def gradient_kind(run: TrainingRun, waits: bool = False) -> str:
    """What a weight's new gradient is from its birth: the one that `.grad` keeps, or one to be added to another.

    Of two that are joined in place, as under autocast, the one that waited is the one that stays.
    """
    joined_away = waits and not run.precision.autocast
    return "gradients" if run.accumulation_steps == 1 and not joined_away else "temporaries"


def linear(
    run: TrainingRun, n_in: int, n_out: int, saved_input: int, *, bias: bool = False, owns_gradient: bool = True,
    cast: bool = False, joined: bool = False, waits: bool = False,
) -> Walk:  # fmt: skip
    """Backward of y = x·Wᵀ + bias: dL/dx and dL/dW = dL/dyᵀ·x appear together; then dL/dy, x and autocast's copy of W
    go.

    `cast`: x was a 16-bit copy of an fp32 tensor, so dL/dx becomes fp32. `joined`: dL/dx is then added to another's.
    `owns_gradient`: dL/dy belongs to this branch alone. `waits`: dL/dW waits to be joined with another.
    `saved_input` is the bytes of x that nobody else needs any more.
    """
    w = letters(run)
    kind = "temporaries" if run.precision.autocast else gradient_kind(run, waits)
    walk = [make(w.c * w.sb * n_in), make(w.c * n_in * n_out, kind)]
    used_up = [forget(saved_input), *([free(2 * n_in * n_out, "weight_copies")] if run.precision.autocast else [])]
    bias_gradient = [make(w.c * n_out, kind)] if bias else []  # summed last; what was recomputed is gone by then
    walk += [*used_up, *bias_gradient] if run.recompute == "full" else [*bias_gradient, *used_up]
    walk += [free(w.c * w.sb * n_out)] if owns_gradient else []
    if cast and run.precision.autocast:
        walk += [make(4 * w.sb * n_in), free(2 * w.sb * n_in)]
    walk += [free(w.r * w.sb * n_in)] if joined else []
    return walk + weight_gradient(run, n_in * n_out, waits) + (weight_gradient(run, n_out) if bias else [])


def norm(run: TrainingRun, name: str) -> Walk:
    """Backward of a norm, its result joined into the residual stream's gradient; the stream kept for it goes."""
    w = letters(run)
    stream = w.r * w.sb * w.h
    walk = [
        make(stream),
        *norm_gradients(run),
        free(stream),
        forget(round_up(stream) + sum_bytes(norm_saved(run, name))),
    ]
    return [*walk, free(stream), *norm_gradients_added(run)]


def norm_gradients(run: TrainingRun) -> Walk:
    """Gradients of a norm's own weights: two vectors of length h for LayerNorm, one for RMSNorm."""
    size = run.precision.gradient * run.model.hidden
    return [make(size, gradient_kind(run))] * (2 if run.model.family == "gpt2" else 1)


def norm_gradients_added(run: TrainingRun) -> Walk:
    """From the second micro-batch on, they are added to those that are there, and go."""
    return [Change(kind, -size) for kind, size in norm_gradients(run)] if run.accumulation_steps > 1 else []


def into_branch(run: TrainingRun) -> Walk:
    """From the residual stream's gradient into a branch: cast to 16-bit under autocast, through dropout where there
    is any.
    """
    w = letters(run)
    cast = [make(w.c * w.sb * w.h)] if run.precision.autocast else []
    if not run.model.dropout:
        return cast
    dropped = [make(w.c * w.sb * w.h), *([free(w.c * w.sb * w.h)] if cast else [])]
    return [*cast, *dropped, forget(round_up(w.sb * w.h))]


def owns_branch_gradient(run: TrainingRun) -> bool:
    """Whether the branch got a gradient of its own, to be freed, and not the residual stream's itself."""
    return bool(run.precision.autocast) or run.model.dropout > 0


def mlp_backward(run: TrainingRun) -> Walk:
    """From the block's output gradient to the gradient of the MLP's normed input, fp32 under autocast."""
    w = letters(run)
    wide, narrow = round_up(w.c * w.sb * w.ffn), round_up(w.c * w.sb * w.h)
    bias = run.model.family == "gpt2"
    walk = [*into_branch(run), *linear(run, w.ffn, w.h, wide, bias=bias, owns_gradient=owns_branch_gradient(run))]
    if run.model.family == "gpt2":
        walk += [make(wide), free(wide), forget(wide)]  # GELU
        return walk + linear(run, w.h, w.ffn, narrow, bias=True, cast=True)
    walk += [make(wide), make(wide), free(wide), forget(2 * wide)]  # the product's two factors
    walk += linear(run, w.h, w.ffn, narrow if run.precision.autocast else 0, cast=True)
    walk += [make(wide), free(wide), forget(wide)]  # SiLU
    return walk + linear(run, w.h, w.ffn, narrow, cast=True, joined=True)


def attention_backward(run: TrainingRun) -> Walk:
    """From the middle of the block to the gradient of attention's normed input, fp32 under autocast."""
    w = letters(run)
    narrow = round_up(w.c * w.sb * w.h)
    out_input = narrow if run.attention == "eager" else 0  # a fused kernel keeps it for itself too
    bias = run.model.family == "gpt2"
    walk = [*into_branch(run), *linear(run, w.h, w.h, out_input, bias=bias, owns_gradient=owns_branch_gradient(run))]
    walk += eager_backward(run) if run.attention == "eager" else fused_backward(run)
    if run.model.family == "gpt2":
        return [*walk, *linear(run, w.h, 3 * w.h, narrow, bias=True, cast=True)]
    for layer, width in (("v", w.kv), ("k", w.kv), ("q", w.h)):
        last_reader = run.precision.autocast or layer == "q"
        walk += linear(run, w.h, width, narrow if last_reader else 0, cast=True, joined=layer != "v")
    return walk


def fused_backward(run: TrainingRun) -> Walk:
    """A fused kernel's three gradients; what it kept goes; then they become the gradients of the linear layers'
    outputs.
    """
    w = letters(run)
    q = w.c * w.sb * w.h
    repeated = run.model.family == "llama" and run.attention == "efficient" and w.kv < w.h
    kv = w.c * w.sb * (w.h if repeated else w.kv)
    operands = round_up(3 * q) if run.model.family == "gpt2" else round_up(q) + 2 * round_up(kv)
    kept = sum_bytes(fused_saved(run)) + operands
    walk = [make(q), make(kv), make(kv), free(q), forget(kept)]
    if run.model.family == "gpt2":
        return [*walk, make(3 * q), free(q), free(q), free(q)]
    narrow = w.c * w.sb * w.kv
    if repeated:
        walk += [make(narrow), free(kv), make(narrow), free(kv)]
    return walk + rotary_backward(narrow) + rotary_backward(q)


def rotary_backward(size: int) -> Walk:
    """Turning a gradient of `size` bytes back: its product with the sine, halves negated, its product with the
    cosine, joined.
    """
    return [make(size), make(size // 2), make(size), free(size), make(size), free(size), free(size // 2), free(size)]


def eager_backward(run: TrainingRun) -> Walk:
    """Backward of softmax(q·kᵀ)·v written out: several s×s matrices at once, in fp32 under autocast."""
    w = letters(run)
    q, scores = w.c * w.sb * w.h, w.a * w.s * w.s * w.b
    low, full = w.c * scores, w.r * scores
    one = views_of_qkv(run)
    walk = [make(q), free(q), make(q), make(low), free(q), forget(0 if one else round_up(q))]
    if run.model.dropout or run.precision.autocast:
        walk.append(forget(round_up(low)))
    if run.precision.autocast:
        walk += [make(full), free(low)]
    if run.model.dropout:
        walk += [make(full), free(full), forget(round_up(scores))]
    walk += [make(full), free(full), forget(round_up(full))]  # softmax
    if run.precision.autocast:
        walk += [make(low), free(full)]
    walk += [make(low), free(low), make(low), free(low)]  # mask, then the scale
    walk += [make(q), make(q), free(low), forget(round_up(3 * q) if one else 2 * round_up(q))]
    return walk + eager_gradients_to_linears(run)


def eager_gradients_to_linears(run: TrainingRun) -> Walk:
    """The gradients of q, k and v become those of the linear layers' outputs."""
    w = letters(run)
    q, kv = w.c * w.sb * w.h, w.c * w.sb * w.kv
    if run.model.family == "gpt2":
        return [make(q), free(q), make(q), free(q), make(3 * q), free(q), free(q), free(q)]
    summed = [make(kv), free(q), make(kv), free(q)] if kv < q else []
    return [*summed, *rotary_backward(kv), *rotary_backward(q)]


def block_backward(run: TrainingRun) -> Walk:
    """Backward of one block; under full recomputation its forward is run first, which makes what it had not kept."""
    walk: Walk = []
    if run.recompute == "full":
        walk += [
            Change("activations", sum_bytes(block_saved(run)[:-1])),
            Change("weight_copies", block_copy_bytes(run)),
        ]
    return [*walk, *mlp_backward(run), *norm(run, "norm2"), *attention_backward(run), *norm(run, "norm1")]


def loss_backward(run: TrainingRun) -> Walk:
    """From the loss to the gradient of the logits: the loss's own gradient, then log-softmax's."""
    w = letters(run)
    logits, full = w.c * w.sb * w.V, 4 * w.sb * w.V
    log_softmax, *for_loss, _ = loss_saved(run)
    walk = [make(4), make(4)]  # dL/dL = 1, and that over the number of micro-batches
    walk += [make(4)] if run.precision.loss_scaling else []  # and that times the scale
    walk += [make(full if run.precision.autocast else logits), free(4), forget(sum_bytes(for_loss))]
    if run.precision.autocast:
        walk += [make(logits), free(full)]
    return [*walk, make(logits), free(logits), forget(log_softmax.bytes)]


def head_backward(run: TrainingRun) -> Walk:
    """From the gradient of the logits to that of the residual stream. A tied head's own gradient waits for the
    embedding's.
    """
    w = letters(run)
    narrow, stream = round_up(w.c * w.sb * w.h), w.r * w.sb * w.h
    walk = linear(run, w.h, w.V, narrow, cast=True, waits=run.model.tied)
    walk += [make(stream), *norm_gradients(run), free(stream)]
    return [*walk, forget(round_up(stream) + sum_bytes(norm_saved(run, "final norm"))), *norm_gradients_added(run)]


def embedding_backward(run: TrainingRun) -> Walk:
    """The embedding's gradient is dense, V·h, even though a batch touches few rows.

    A tied head's gradient has waited for it. Autocast's is a fresh copy, and the two are added in place; otherwise
    the head's is a transposed view, which torch adds out of place: three tensors of V·h at once.
    """
    w, first, stream = letters(run), run.accumulation_steps == 1, letters(run).r * letters(run).sb * letters(run).h
    table = run.precision.gradient * w.V * w.h
    walk: Walk = [forget(sum_bytes(shared_saved(run)))]  # the last block to read them is done
    if run.model.dropout:
        walk += [make(stream), free(stream), forget(round_up(w.sb * w.h))]
    if run.model.family == "gpt2":
        walk += _positions_backward(run, first)
    kind = "gradients" if first else "temporaries"
    if not run.model.tied:
        return [*walk, make(table, kind)]
    if run.precision.autocast:
        return [*walk, make(table)]
    return [*walk, make(table), free(stream), make(table, kind)]


def _positions_backward(run: TrainingRun, first: bool) -> Walk:
    w = letters(run)
    summed = w.r * w.s * w.h if w.b > 1 else 0
    table = run.precision.gradient * prod(outer_shapes(run.model)["positions.weight"])
    made = make(table, "gradients" if first else "temporaries")
    return [make(summed), made, free(summed), *([] if first else [free(table)]), forget(round_up(8 * w.s))]
