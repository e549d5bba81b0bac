"""Lesson 05, activations: what backward needs, what a fused kernel no longer keeps, and what the logits cost."""

from course_utils.estimating.exact.activations import activation_bytes, block_bytes, loss_saved, sum_bytes
from course_utils.estimating.published import korthikanti_block_bytes
from course_utils.interactive.quiz import Question, question
from course_utils.run import TrainingRun
from course_utils.units import format_bytes, percent

RUN = TrainingRun("gpt2-xl", 8, 1024, "bf16-master", attention="eager")


def questions() -> tuple[Question, ...]:
    what_addition_keeps = question(
        "What does the residual addition x + f(x) keep for its own backward?",
        ("nothing", "Its derivative is 1 whatever x is; the gradient is handed on as it is."),
        ("x", "A product would need its other factor; a sum does not. The norm that reads x keeps it."),
        ("x and f(x)", "Those would be needed if the two were multiplied, as in SwiGLU's gate."),
        ("their sum", "The sum is kept, but by the next norm, which needs its input."),
    )  # fmt: skip
    total = korthikanti_block_bytes(RUN)
    s, b, h, a = RUN.seq_len, RUN.micro_batch, RUN.model.hidden, RUN.model.heads
    scores_of_a_block = question(
        f"What part of a GPT-2 XL block's activations are attention's s·s tensors, in 16 bits, eager, at s = {s:,}?",
        (percent(5 * a * s * s * b / total), "5·a·s/h of 34 + 5·a·s/h."),
        (percent(2 * a * s * s * b / total), "The softmax's output alone: its mask and dropped weights are missing."),
        (percent(34 * s * b * h / total), "That is the rest: everything but the s·s tensors."),
        (percent(5 * s / (34 + 5 * s)), "That leaves out the heads and the width: the term is 5·a·s/h."),
    )  # fmt: skip
    runs = [RUN.replace(attention=kernel) for kernel in ("flash", "eager")]
    flash, eager = (block_bytes(run) / block_bytes(run.replace(seq_len=512)) for run in runs)
    twice_the_sequence = question(
        "With flash attention you train on sequences of 1,024 tokens instead of 512, with the same micro-batch. By "
        "what factor do a block's activations grow?",
        (f"{flash:.1f} ×", "Nothing that the kernel keeps has s·s elements: everything grows with the tokens."),
        (f"{eager:.1f} ×", "That is eager attention: a part of it grows with the square."),
        ("4.0 ×", "That would be so if all of it had s·s elements."),
        ("1.0 ×", "The kernel hides the s·s tensors, not the tokens."),
    )  # fmt: skip
    saved = 1 - block_bytes(RUN.replace(dropout=0.0)) / block_bytes(RUN)
    masks = (a * s * s * b + 2 * s * b * h) / block_bytes(RUN)
    without_dropout = question(
        "You set dropout to 0 in that block, attention still written out. What part of its activations goes?",
        (percent(saved), "Three masks of one byte an element, and the dropped copy of the attention weights: without "
         "dropout the product reads the softmax's own output."),
        (percent(masks), "Those are the masks. One more tensor goes: the weights after dropout."),
        (percent(masks / 2), "That counts half a byte an element; a mask is stored as bytes."),
        (percent(2 * masks), "That counts two bytes an element; a mask is no number of the compute type."),
    )  # fmt: skip
    run = TrainingRun("llama3.2-1b", 4, 2048, "amp-bf16")
    kept, inside = sum_bytes(loss_saved(run)), activation_bytes(run)
    V, tokens = run.model.vocab, run.micro_batch * run.seq_len
    share_of_the_loss = question(
        f"Llama-3.2 1B, autocast, {run.micro_batch} sequences of {run.seq_len:,} tokens: how many bytes does the loss "
        "alone keep until backward?",
        (format_bytes(kept, "GB", 2), "Its log-softmax, 4·V bytes a token: Llama's loss reads logits in fp32."),
        (format_bytes(2 * tokens * V, "GB", 2), "That is a log-softmax in 16 bits. What type does Llama's loss read?"),
        (format_bytes(8 * tokens * V, "GB", 2), "That counts the fp32 logits as well, which are let go by then."),
        (format_bytes(inside, "GB", 2), "That is what all blocks keep together before the loss."),
    )  # fmt: skip
    return what_addition_keeps, scores_of_a_block, twice_the_sequence, without_dropout, share_of_the_loss
