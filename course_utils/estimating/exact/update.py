"""Allocations and frees of clipping and of the optimizer's step, in the order of torch's algorithms.

Every walk is over shapes, so a part of the parameters, such as one rank's, can be walked like the whole.
"""

from collections.abc import Callable, Iterable
from functools import lru_cache
from itertools import chain
from math import prod

from ...models import TransformerConfig, parameter_shapes
from ...run import OPTIMIZERS, PRECISIONS, Optimizer, Precision, TrainingRun
from ..sharding import zero_1_shares
from ..states import BLOCK_8BIT, PIECE_8BIT, SMALL_8BIT, Trainable, is_hidden_matrix, trainable
from .walk import Change, Totals, Walk, free, highest, make, net

Tensors = Iterable[tuple[str, tuple[int, ...]]]
"""Names and shapes of parameters, in the order of the step."""

IN_PLACE = ("sgd", "momentum")
"""Algorithms whose update needs no tensor besides the gradient and the states."""


def optimizer_step(run: TrainingRun) -> Totals:
    """Signed bytes by kind that the step adds at its highest point.

    With ZeRO-1, to step the parameters of rank 0.

    foreach makes one tensor for each parameter, 4N bytes in fp32; the for-loop makes two for one parameter at
    a time; fused makes none; momentum works in place. Master weights take their gradients in fp32: one at a
    time, or all at once. The memory that fp8's own kernels need is not known, and counts as nothing.
    """
    # as a view, a gradient set to None leaves its bucket where it is
    frees = run.set_to_none and not run.bucket_view
    names = (run.precision.name, run.optimizer.name)
    ranks = run.world_size if run.zero_stage == 1 else 1
    clips = run.clip_grad_norm is not None
    return dict(_optimizer_step(run.model, run.lora_rank, run.lora_targets, ranks, names, frees, clips))


def clipping(run: TrainingRun) -> Totals:
    """Signed bytes by kind that clipping adds at its highest point: a norm per gradient, and few more.

    Empty where gradients are not clipped.
    """
    if run.clip_grad_norm is None:
        return {}
    return dict(_clipping(run.model, run.lora_rank, run.lora_targets, run.precision.name))


@lru_cache(maxsize=1024)
def _optimizer_step(
    model: TransformerConfig,
    rank: int,
    targets: tuple[str, ...],
    ranks: int,
    names: tuple[str, str],
    set_to_none: bool,
    clips: bool,
) -> Totals:
    """The step with this precision and optimizer (`names`), on one of so many `ranks`.

    LoRA is given by its rank and targets.
    """
    if ranks > 1:
        share = Trainable(dict(zero_1_shares(parameter_shapes(model), ranks)[0]), {}, 0, {})
    else:
        share = trainable(model, rank, targets)
    return step_on(PRECISIONS[names[0]], OPTIMIZERS[names[1]], share, set_to_none, clips)


def step_on(
    precision: Precision, optimizer: Optimizer, trained: Trainable, set_to_none: bool, clips: bool
) -> Totals:
    """Signed bytes by kind that the step adds at its highest point if it steps only these parameters."""
    if precision.name == "fp8":
        return {}
    if precision.master:
        walk = master_walk(precision, optimizer, trained, set_to_none)
    else:
        walk = plain_walk(precision, optimizer, trained)
    return highest([*scaler_walk(precision, optimizer, clips), *walk])


def plain_walk(precision: Precision, optimizer: Optimizer, trained: Trainable) -> Walk:
    """The step on the weights themselves.

    Two blocks stand for all: what one leaves behind meets the next.
    """
    if optimizer.algorithm in IN_PLACE or optimizer.implementation == "fused":
        return []
    if optimizer.implementation == "foreach":
        return [Change("temporaries", trained.bytes(precision.weight))]
    blocks = [trained.block.items()] * min(2, trained.layers)
    tensors = chain(trained.before.items(), *blocks, trained.after.items())
    return LOOPS[optimizer.algorithm](tensors, precision.weight)


def master_walk(precision: Precision, optimizer: Optimizer, trained: Trainable, set_to_none: bool) -> Walk:
    """The step on fp32 masters.

    The gradient goes to fp32, the 16-bit one is freed; then come the update's own tensors, and the fp32
    gradient is freed.

    Main gradients are fp32 before it begins. If 16-bit gradients are not set to none, they stay.
    """
    upcasts = precision.gradient < precision.master
    frees = upcasts and set_to_none
    if optimizer.forced and optimizer.implementation == "foreach":
        gone = -trained.bytes(precision.gradient) if frees else 0
        copies = 2 if upcasts else 1  # the fp32 gradients, and foreach's own
        return [Change("gradients", gone), Change("temporaries", copies * trained.bytes(precision.master))]

    def one_by_one(tensors: Tensors) -> Walk:
        walk: Walk = []
        for name, shape in tensors:
            if upcasts:
                walk.append(make(4 * prod(shape)))
            if frees:
                walk.append(free(precision.gradient * prod(shape), "gradients"))
            walk += _alone(optimizer, name, shape)
            if upcasts:
                walk.append(free(4 * prod(shape)))
        return walk

    # One block is walked; the others count by what is left of each.
    block = one_by_one(trained.block.items())
    others = [Change(kind, size * (trained.layers - 1)) for kind, size in net(block).items()]
    return [*one_by_one(trained.before.items()), *block, *others, *one_by_one(trained.after.items())]


def _alone(optimizer: Optimizer, name: str, shape: tuple[int, ...]) -> Walk:
    """The update of one fp32 parameter by an optimizer of its own."""
    if optimizer.algorithm in IN_PLACE or optimizer.implementation == "fused":
        return []
    if optimizer.implementation == "foreach":
        return [make(4 * prod(shape)), free(4 * prod(shape))]
    return LOOPS[optimizer.algorithm]([(name, shape)], 4)


# One algorithm after another, parameter by parameter. What a variable holds is freed when it gets its next
# value.


def adam_loop(tensors: Tensors, element: int) -> Walk:
    """Adam's denominator takes two tensors to compute; the one before is freed when the next is there."""
    walk: Walk = []
    before = 0
    for _, shape in tensors:
        size = element * prod(shape)
        walk += [make(size), make(size), free(size), free(before)]
        before = size
    return [*walk, free(before)]


def lion_loop(tensors: Tensors, element: int) -> Walk:
    """Lion's direction, one tensor."""
    sizes = [element * prod(shape) for _, shape in tensors]
    return [change for size in sizes for change in (make(size), free(size))]


def adafactor_loop(tensors: Tensors, element: int) -> Walk:
    """A matrix's variance is the product of its row and its column, and becomes the update.

    It is as large as the matrix; the one before it is freed only then. A vector's gradient is squared, and
    its variance copied.
    """
    walk: Walk = []
    # bytes of what each variable held after the tensor before
    row = 0
    column = 0
    square = 0
    update = 0
    for _, shape in tensors:
        size = element * prod(shape)
        walk += [make(element), free(element)]  # the weight's norm
        if len(shape) > 1:
            rows = size // shape[-1]
            columns = size // shape[-2]
            walk += [make(rows), free(row), make(columns), free(column)]
            walk += [make(size), make(element), free(element)]
            row = rows
            column = columns
        else:
            walk += [make(size), free(square), make(size)]
            square = size
        walk += [free(update), make(element), free(element)]  # the update's norm
        update = size
    return [*walk, free(row), free(column), free(square), free(update)]


def muon_loop(tensors: Tensors, element: int) -> Walk:
    """Muon on the blocks' matrices, then AdamW's loop on everything else."""
    known = list(tensors)
    matrices = [shape for name, shape in known if is_hidden_matrix(name, shape)]
    others = [(name, shape) for name, shape in known if not is_hidden_matrix(name, shape)]
    walk: Walk = []
    before = 0
    for rows, columns in matrices:
        walk += [make(element * rows * columns), free(before), *newton_schulz(rows, columns, element)]
        before = 2 * rows * columns
    return [*walk, free(before), *adam_loop(others, element)]


def newton_schulz(rows: int, columns: int, element: int, steps: int = 5) -> Walk:
    """Orthogonalize an update of `element` bytes per element, which is freed in the end.

    Its result, in bf16, stays.

    Each step makes X·Xᵀ, a polynomial of it, and the next X (Jordan et al. 2024); as new ones come the last
    are freed.
    """
    x = 2 * rows * columns
    gram = 2 * min(rows, columns) ** 2
    copied = element != 2  # an update in bf16 is the first X itself
    walk: Walk = []
    if copied:
        walk.append(make(x))
    walk += [make(2), make(2), free(2), free(2)]  # its norm
    walk += [make(gram), make(gram), make(x)]
    if copied:
        walk.append(free(x))
    walk += [make(gram), free(gram), make(gram), free(gram), make(x), free(x)] * (steps - 1)
    return [*walk, free(gram), free(gram), free(element * rows * columns)]


def adam8bit_loop(tensors: Tensors, element: int) -> Walk:
    """The course's own 8-bit Adam: both moments of a piece in fp32, and one tensor more, at a time."""
    walk: Walk = []
    for _, shape in tensors:
        elements = prod(shape)
        if elements < SMALL_8BIT:
            walk += [make(4 * elements), free(4 * elements)]
            continue
        walk += adam8bit_piece(min(elements, PIECE_8BIT))  # the first piece is the largest
    return walk


def adam8bit_piece(elements: int) -> Walk:
    """Codes to indices to fp32 for both moments; Adam's root; then each moment's scale and its new codes."""
    blocks = -(-elements // BLOCK_8BIT)
    moment = 4 * BLOCK_8BIT * blocks
    scales = 4 * blocks
    decode = [make(moment), make(moment), free(moment)]
    encode = [make(scales), free(scales), make(moment), free(moment)]
    root = [make(4 * elements), free(4 * elements)]
    return [*decode, *decode, *root, *encode, *encode, free(moment), free(moment)]


LOOPS: dict[str, Callable[[Tensors, int], Walk]] = {
    "adam": adam_loop,
    "adamw": adam_loop,
    "lion": lion_loop,
    "adafactor": adafactor_loop,
    "muon": muon_loop,
    "adam8bit": adam8bit_loop,
}


# The loss scaler, and clipping


def scaler_walk(precision: Precision, optimizer: Optimizer, clips: bool) -> Walk:
    """A loss scaler's numbers before the step, a block for each.

    The one that says if a gradient overflowed stays.

    Fused steps and master weights take the scale instead of unscaled gradients. Where gradients are clipped
    they were unscaled before.
    """
    if not precision.loss_scaling:
        return []
    takes_scale = bool(precision.master) or optimizer.implementation == "fused"
    if clips and not precision.master:
        return [make(4)] * (2 if takes_scale else 1)
    walk: Walk = [*[make(4)] * 4, *[free(4)] * 3]  # the checks for overflow
    if takes_scale:
        walk += [make(4)] * 2
    if precision.master:  # the inverse of the scale
        walk += [make(8), make(8), free(8), make(4), free(8)]
    return walk


@lru_cache(maxsize=1024)
def _clipping(model: TransformerConfig, rank: int, targets: tuple[str, ...], precision_name: str) -> Totals:
    precision = PRECISIONS[precision_name]
    count = trainable(model, rank, targets).tensors
    if precision.loss_scaling and precision.master:
        return highest(clip_walk(count, 4, keeps_norms=True))
    unscaled = scaler_walk(precision, OPTIMIZERS["sgd"], clips=False)  # nothing where losses are not scaled
    return highest([*unscaled, *clip_walk(count, precision.gradient)])


def clip_walk(count: int, element: int, keeps_norms: bool = False) -> Walk:
    """The norm of each of `count` gradients, a block each; all in one tensor; their norm; the factor.

    The scratch space of the GPU's own kernel is not among it.
    """
    norms = [make(element)] * count
    together = make(element * count)
    gone = [free(element)] * count
    total = make(element)
    factor = [make(element)] * 3 + [free(element)] * 2 + [make(element)]
    if keeps_norms:
        return [*norms, together, *gone, total, *factor]
    return [*norms, together, total, *gone, free(element * count), *factor]
