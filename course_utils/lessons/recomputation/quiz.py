"""Lesson 06, recomputation: what checkpoints keep, what they cost, and what they cannot free."""

from math import isqrt

from course_utils import TrainingRun, estimate
from course_utils.estimating.exact.activations import block_bytes, block_input
from course_utils.estimating.published import checkpoints_bytes, zero_activation_bytes, zero_checkpointed_bytes
from course_utils.interactive.quiz import Question, gb, question
from course_utils.units import format_bytes, percent

RUN = TrainingRun("gpt2-xl", 32, 1024, recompute="full")


def questions() -> tuple[Question, ...]:
    n = 64
    best = isqrt(n)
    square_root = question(
        f"A chain of {n} equal nodes, a checkpoint every k-th: how many tensors are alive at most if k is chosen best?",
        (str(n // best + best), f"n/k + k with k = {best}: the checkpoints, and the stretch that is run again."),
        (str(best), "That counts the checkpoints alone. The stretch that is run again is there as well."),
        (str(n), "That is keeping everything."),
        (str(n // 2 + 2), "That is a checkpoint at every second node: few to run again, many to keep."),
    )  # fmt: skip
    forward, backward = 1, 2
    a_third_more = question(
        "Backward costs twice as much arithmetic as forward. How much more does a step cost with full recomputation?",
        (percent(forward / (forward + backward)), "One more forward, on three units."),
        (percent(forward / backward), "That compares the second forward with backward alone."),
        (percent(1.0), "That would be a second step. Only forward is run again."),
        (percent(forward / (2 * forward + backward)), "That divides by the new total, second forward included."),
    )  # fmt: skip
    sixty = TrainingRun("gpt2-xl", 32, 1000, attention="eager")
    where_8_gb_come_from = question(
        "GPT-2 XL, 32 sequences of about 1,000 tokens, 16 bits: how much are all blocks' checkpoints, one for each?",
        (gb(checkpoints_bytes(sixty)), "2·s·b·h bytes for each of 48 blocks."),
        (gb(zero_checkpointed_bytes(sixty)), "That is ZeRO's figure, the total over √L, not a checkpoint per block."),
        (gb(zero_activation_bytes(sixty)), "That is everything kept, as ZeRO counts it."),
        (gb(checkpoints_bytes(sixty) // sixty.model.layers), "That is one block's."),
    )  # fmt: skip
    keep = RUN.replace(recompute="none")
    live, stream = block_bytes(keep), block_input(keep).bytes
    what_stays_alive = question(
        "GPT-2 XL under autocast with flash attention, 32 sequences, full recomputation. How much of a block is alive "
        "while its backward begins?",
        (format_bytes(live, "GB", 2), "All that it would have kept: recomputing makes it again, one block at a time."),
        (format_bytes(stream, "GB", 2), "That is its checkpoint, before it is run again."),
        (format_bytes(live - 2 * stream, "GB", 2), "That leaves out the residual stream, which the norms keep."),
        (format_bytes(live * keep.model.layers, "GB", 2), "That would be all blocks at once."),
    )  # fmt: skip
    states = sum(estimate(RUN)[kind] for kind in ("parameters", "gradients", "optimizer_states"))
    what_stays_anyway = question(
        "At the peak of that run with full recomputation, how much is there that recomputation cannot free: weights, "
        "gradients and optimizer states?",
        (gb(states), "At this peak, in the loss's backward, there are no gradients yet: 4 bytes a "
         "parameter of weights and 8 of Adam's moments."),
        (gb(16 * RUN.model.parameters), "At 16 bytes a parameter: but at this peak there are no gradients yet."),
        (gb(2 * RUN.model.parameters), "That is the weights in 16 bits alone."),
        (gb(estimate(keep).total), "That is the whole peak without recomputation."),
    )  # fmt: skip
    return square_root, a_third_more, where_8_gb_come_from, what_stays_alive, what_stays_anyway
