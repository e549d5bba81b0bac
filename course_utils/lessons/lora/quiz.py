"""Lesson 12, LoRA and quantization: which bytes go, which stay, and what a bit is worth."""

from course_utils import TrainingRun, estimate
from course_utils.estimating.states import frozen_matrix_bytes, trainable
from course_utils.interactive.quiz import Question, gb, question
from course_utils.units import format_bytes, percent

RUN = TrainingRun("gpt2", 4, 512, lora_rank=8, lora_targets=("attention", "mlp"))


def questions() -> tuple[Question, ...]:
    """The questions in the order of the lesson."""
    n_out, n_in, r = 11008, 4096, 16
    numbers_that_learn = question(
        f"A matrix of {n_out:,} × {n_in:,}, LoRA of rank {r}: how many numbers learn?",
        (f"{r * (n_out + n_in):,}", "Each factor has r lines, one as long as the input, one as the output."),
        (f"{r * n_in:,}", "That is one of the two factors."),
        (f"{r * r:,}", "That is r × r, the size of A·B. The factors meet in W's shape: B·A."),
        (f"{n_out * n_in // r:,}", "That divides W by r. More rank means more numbers, not fewer."),
    )  # fmt: skip
    runs = RUN.replace(lora_rank=0, lora_targets=()), RUN, RUN.replace(lora_targets=("attention",))
    full, everywhere, attention = (estimate(run)["activations"] for run in runs)
    frozen = percent(1 - trainable(RUN.model, RUN.lora_rank, RUN.lora_targets).parameters / RUN.model.parameters)
    learning = percent((4 + 8) / (4 + 4 + 8))  # gradients and moments, of these and the weights
    activations = question(
        "GPT-2 with LoRA of rank 8 on all matrices of the blocks. By how much do the activations that forward keeps "
        "shrink, compared with training every weight?",
        (percent(1 - everywhere / full), "The factor A learns from the very input that W would learn from."),
        (frozen, "That is the part of the parameters that no longer learns: it holds for gradients and states."),
        (percent(1 - attention / full), "That is LoRA on attention alone, which spares the MLP's inputs."),
        (learning, "That is what gradients and moments are of fp32 Adam's 16 bytes. Activations are not among those."),
    )  # fmt: skip
    few, many = 4, 8
    before, after = (2 ** (bits - 1) - 1 for bits in (few, many))
    one_more_bit = question(
        f"From {few} bits to {many}, rounding by absmax with as many scales: by what factor does the error shrink?",
        (f"{after / before:.0f}", f"The largest code goes from {before} to {after}, and the step shrinks with it."),
        (f"{many // few}", "That is the ratio of the bits. Each single bit doubles the number of codes."),
        (f"{many - few}", "That is the number of bits added."),
        (f"{(after / before) ** 2:.0f}", "That is by how much the *square* of the error shrinks."),
    )  # fmt: skip
    shape = (14336, 4096)
    stored, elements = frozen_matrix_bytes(shape, 4), shape[0] * shape[1]
    four_bits = question(
        f"A matrix of {shape[0]:,} × {shape[1]:,} in NF4, an fp32 scale for each 64 numbers: how much memory?",
        (format_bytes(stored, "MB", 1), "Half a byte a number, and 4 bytes for 64 of them."),
        (format_bytes(elements // 2, "MB", 1), "Those are the codes. What maps them back to weights?"),
        (format_bytes(4 * elements, "MB", 1), "That takes four bits for four bytes."),
        (format_bytes(2 * elements, "MB", 1), "That is the matrix in 16 bits, as it is for a moment while it is used."),
    )  # fmt: skip
    run = TrainingRun("llama3-8b", 1, 1024, "bf16", recompute="full", lora_rank=16, lora_targets=("attention", "mlp"),
                      frozen_bits=4)  # fmt: skip
    the_account = question(
        "Llama-3 8B, QLoRA of rank 16 on all matrices, one sequence of 1,024 tokens, full recomputation. Which is "
        "nearest to the peak?",
        (gb(estimate(run).total), "Blocks in 4.5 bits, embedding and head in 16, little that "
         "learns, and the loss over a large vocabulary."),
        (gb(run.model.parameters // 2), "Half a byte for every parameter: but embedding and head stay in 16 bits, and "
         "a step has more than weights."),
        (gb(estimate(run.replace(frozen_bits=16)).total), "That is LoRA with the weights in 16 bits."),
        (gb(16 * run.model.parameters), "That is full training's states."),
    )  # fmt: skip
    return numbers_that_learn, activations, one_more_bit, four_bits, the_account
