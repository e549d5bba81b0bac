"""Lesson 03, number formats and mixed precision: what 16 bits lose, what they save, and what they do not."""

from course_utils import TrainingRun, moments
from course_utils.estimating.exact.activations import block_bytes
from course_utils.interactive.quiz import Question, gb, question

from .formats_in_a_step import estimated_states
from .number_formats import FORMATS, rounded

MODEL, _bytes, _digits = "gpt2-medium", "{} bytes".format, "{:.6g}".format


def questions() -> tuple[Question, ...]:
    weight, update = 1.0, 0.003
    vanishing_update = question(
        f"A weight is exactly {weight}, and is stored in bf16. The optimizer adds {update} to it. What is stored "
        "afterwards?",
        (_digits(rounded("bf16", weight + update)), "Near one, bf16's numbers are 2⁻⁷ apart. The update is less than "
         "half of that, so the weight rounds back to where it was. An fp32 master weight would have kept it."),
        (_digits(weight + update), "That takes more digits than bf16 has: 8 bits are two to three decimals."),
        (_digits(rounded("fp16", weight + update)), "That is what fp16 stores, with 3 more bits than bf16."),
        (_digits(weight + FORMATS["bf16"].epsilon), "That is the next number above. But rounding goes to the nearest, "
         "and the old value is nearer."),
    )  # fmt: skip
    gradient = 1e-8
    scale = next(2**k for k in range(64) if rounded("fp16", gradient * 2**k))
    normal = next(2**k for k in range(64) if gradient * 2**k >= FORMATS["fp16"].smallest_normal)
    smallest_scale = question(
        "The smallest number that fp16 has is 2⁻²⁴, about 6·10⁻⁸; what is nearer to zero than half of that becomes "
        "zero. A gradient is 10⁻⁸. By which power of two must the loss be multiplied, at least, so that "
        "this gradient is not zero in fp16?",
        (f"{scale:,}", "Scaled, the gradient is more than half of the smallest number, so it rounds to that. It has "
         "lost most of its digits, but it is there."),
        (f"{scale // 2:,}", "Scaled so, it is still less than half of the smallest number, and rounds to zero."),
        (f"{normal:,}", "This makes it a normal number, with all of its digits: better, but more than was asked for."),
        (f"{2**16:,}", "GradScaler begins there, and it works. It is far more than this gradient needs, though, "
         "and large gradients overflow sooner."),
    )  # fmt: skip
    run = TrainingRun(MODEL, precision="amp-bf16")
    weights, gradients, states = estimated_states(run).values()
    fp32, copies = weights + gradients + states, moments(run)["after loss"]["weight_copies"]
    autocast_account = question(
        f"GPT-2 medium, {run.model.parameters:,} parameters, under autocast to bf16 with AdamW. Add up weights, "
        "gradients and Adam's states, and what autocast keeps of the weights from forward to backward.",
        (gb(fp32 + copies), "Everything stays in fp32, 4 + 4 + 8 bytes a parameter. On top comes a 16-bit copy of "
         "every matrix that is multiplied."),
        (gb(fp32), "That is fp32's account, and autocast has all of it. What do its matrix products read?"),
        (gb((weights + gradients) // 2 + states), "Weights and gradients stay in fp32 under autocast; 16-bit ones "
         "belong to recipes with master weights."),
        (gb(fp32 + 2 * copies), "The copies are 16-bit, half as large as the matrices that they stand for."),
    )  # fmt: skip
    run = TrainingRun(MODEL, precision="bf16-master-fp32grad")
    weights, gradients, states = (round(size / run.model.parameters) for size in estimated_states(run).values())
    half_gradients = round(estimated_states(run.replace(precision="bf16-master"))["gradients"] / run.model.parameters)
    main_gradients = question(
        "A recipe keeps bf16 weights, adds up its gradients in fp32 (and keeps no others), and has fp32 master weights "
        "and Adam's two moments in fp32. How many bytes a parameter is that?",
        (_bytes(weights + gradients + states), "2 for the weights, 4 for the gradients, and 4 + 8 for the optimizer."),
        (_bytes(weights + half_gradients + states), "That has 16-bit gradients, as the ZeRO paper counts. Here they "
         "are fp32, because many micro-batches are added up in them."),
        (_bytes(weights + gradients + half_gradients + states), "That has gradients twice, in bf16 and in fp32. Some "
         "recipes do keep both; this one does not."),
        (_bytes(states), "That is the optimizer's share alone: its copy of the weights, and its moments."),
    )  # fmt: skip
    half = TrainingRun(MODEL, precision="bf16-master", attention="efficient")
    token = half.seq_len * half.micro_batch * half.model.hidden
    in_half, in_single = (round(block_bytes(run) / token) for run in (half, half.replace(precision="fp32")))
    masks = 2 * in_half - in_single
    activations_in_half = question(
        f"In 16-bit, and with an attention kernel that keeps no scores, a block of GPT-2 keeps {in_half}·s·b·h bytes "
        f"for backward. Dropout's two masks are {masks} of the {in_half}. What does the block keep in fp32?",
        (f"{in_single}·s·b·h", "Every number doubles, and the masks do not: they are one byte an element in either "
         "format."),
        (f"{2 * in_half}·s·b·h", "That doubles everything. A mask says only whether an element was dropped."),
        (f"{in_half}·s·b·h", "That is the 16-bit figure. Activations are what 16 bits save."),
        (f"{in_single - masks}·s·b·h", "The numbers are right, the masks are missing."),
    )  # fmt: skip
    return vanishing_update, smallest_scale, autocast_account, main_gradients, activations_in_half
