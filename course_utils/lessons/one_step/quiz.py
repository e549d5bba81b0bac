"""Lesson 01, where did the memory go: what a step keeps, for how long, and what of it is there at the same time."""

from functools import partial

from course_utils import PRESETS, TrainingRun, moments
from course_utils.estimating.exact.activations import block_saved
from course_utils.estimating.published import zero_state_bytes
from course_utils.interactive.quiz import Question, gb, question
from course_utils.units import UNITS, format_bytes

_mb = partial(format_bytes, unit="MB", digits=1)
_tenths = partial(round, ndigits=-8)  # as it is shown, so that what a learner adds up is what a choice says


def questions() -> tuple[Question, ...]:
    # Sixteen bytes a parameter (Rajbhandari et al. 2020, section 3.1).
    N = PRESETS["gpt2-large"].parameters
    parts = zero_state_bytes(N)
    total, optimizer = sum(parts.values()), sum(size for name, size in parts.items() if "fp32" in name)
    states = question(
        f"GPT-2 large has {N:,} parameters. You train it with mixed-precision Adam as the ZeRO paper counts it: "
        "weights and gradients in 16-bit, an optimizer that computes in fp32. How much do weights, gradients and "
        "optimizer states take together?",
        (gb(total), "Weights and gradients take 2 bytes a parameter each, and the optimizer's three fp32 numbers take "
         "4 each: master weights, momentum, variance."),
        (gb(optimizer), "That is the optimizer's share alone. Forward reads weights, and backward writes gradients, "
         "that are not the optimizer's."),
        (gb(total - optimizer), "Those are weights and gradients. What does Adam remember from one step to the next?"),
        (f"{total / UNITS['GiB']:.1f} GB", "The right bytes, divided by 2³⁰: that gives GiB, not GB."),
    )  # fmt: skip
    run = TrainingRun("tinyllama-1.1b", micro_batch=2, seq_len=1024)
    by_name = moments(run)
    left, full = by_name["end of step"], by_name["optimizer step"]
    after_a_step = question(
        f"TinyLlama, {run.model.parameters:,} parameters, trained under autocast with AdamW: weights, gradients and "
        "both of Adam's states are in fp32. A step has just ended with `optimizer.zero_grad()`. How much is allocated "
        "now?",
        (gb(left.total), "Weights and Adam's two states: 4 + 8 bytes a parameter. They stay for the whole training."),
        (gb(left["parameters"]), "Those are the weights alone. Adam's states arrive in step 1 and never leave."),
        (gb(sum(full[kind] for kind in ("parameters", "gradients", "optimizer_states"))), "That counts the gradients. "
         "`zero_grad` sets them to `None`, which frees them."),
        (gb(max(moment.total for moment in by_name.values())), "That is the peak. Activations were freed in backward, "
         "from the last layer to the first; nothing of them is left when the step is over."),
    )  # fmt: skip
    run = TrainingRun("gpt2-large", micro_batch=1, seq_len=1024, precision="bf16-master")
    (kept,) = (item.size for item in block_saved(run) if item.operation == "gelu")
    h, wide = run.model.hidden, run.model.ffn
    kept_by_gelu = question(
        f"In GPT-2 large's MLP a matrix widens each token's vector from {h:,} to {wide:,} numbers, then comes GELU, "
        f"then a matrix back to {h:,}. One sequence of {run.seq_len:,} tokens, everything in bf16. How much does GELU "
        "itself keep for backward?",
        (_mb(kept), "Its input, 2 bytes for each of s · 4h numbers: how steep GELU is depends on where it was."),
        ("nothing", "An addition keeps nothing, because its slope is the same everywhere. GELU's is not."),
        (_mb(kept * h // wide), "That is a tensor of width h. GELU stands between the two matrices, where vectors are "
         "at their widest."),
        (_mb(2 * kept), "That is its input and its output. The output is kept too, but by the next matrix, whose input "
         "it is; GELU's own backward does not ask for it."),
    )  # fmt: skip
    run = TrainingRun("gpt2-large", micro_batch=8, seq_len=1024, precision="bf16-master")
    by_name = moments(run)
    stays = _tenths(by_name["end of step"].total)
    activations = _tenths(by_name["end of forward"]["activations"])
    gradients = _tenths(max(moment["gradients"] for moment in by_name.values()))
    never_at_once = question(
        f"A step of GPT-2 large keeps {gb(stays)} all the time. At the end of forward there are {gb(activations)} of "
        f"activations besides, and no gradients. At the end of backward there are {gb(gradients)} of gradients, and no "
        "activations. How much must the card have for these two moments?",
        (gb(stays + max(activations, gradients)), "The larger of two sums: what stays, and the larger of two that take "
         "turns."),
        (gb(stays + activations + gradients), "That adds up things that are never alive together. It is the slides' "
         "mistake."),
        (gb(stays + min(activations, gradients)), "That is the lower one of the two moments. The card has to survive "
         "both."),
        (gb(max(activations, gradients)), "What stays is there at both moments: it comes on top."),
    )  # fmt: skip
    what_micro_batches_shrink = question(
        "16 sequences do not fit your card. So you take them as 4 micro-batches of 4, add up their gradients, and step "
        "once. Which kind of memory, at its fullest, falls to a quarter?",
        ("activations", "They belong to the tokens that are under way, and now only a quarter of them are."),
        ("parameters", "The model is the same, whatever it reads."),
        ("gradients", "There is one set, as large as the weights. Each micro-batch adds to it, so it has to be there "
         "even longer than before."),
        ("optimizer states", "Adam keeps two numbers a parameter. How many sequences went into a gradient, it never "
         "learns."),
    )  # fmt: skip
    return states, after_a_step, kept_by_gelu, never_at_once, what_micro_batches_shrink
