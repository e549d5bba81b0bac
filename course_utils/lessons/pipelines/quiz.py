"""Lesson 11, pipelines: the bubble, what each schedule keeps, versions and lateness, what crosses a cut."""

from course_utils.interactive.quiz import Question, question
from course_utils.run import TrainingRun
from course_utils.units import format_bytes, percent

from .schedules import bubble, most_kept, simulate

RUN = TrainingRun("gpt2-xl", 4, 1024, "bf16-master")
P, M, STAGE = 8, 24, 2


def questions() -> tuple[Question, ...]:
    """The questions in the order of the lesson."""
    the_bubble = question(
        f"GPipe with {P} equal stages and {M} micro-batches: which part of the time does each stage wait?",
        (percent(bubble(P, M)), "p − 1 columns of m + p − 1."),
        (percent((P - 1) / M), "That compares waiting with working: the whole time has both."),
        (percent(1 - 1 / P), "That is the naive cut, in which one stage works and all others wait."),
        (percent(P / (M + P)), "That counts a stage too many: the last one waits for p − 1 others."),
    )  # fmt: skip
    twice_the_stages = question(
        f"You go from {P} stages to {2 * P} and keep {M} micro-batches. Which part of the time is lost now?",
        (percent(bubble(2 * P, M)), "More stages to fill, no more work to fill them with."),
        (percent(bubble(P, M)), "That was the part before: the pipeline is longer now."),
        (percent(2 * bubble(P, M)), "That doubles the fraction, but m + p − 1 grows as well."),
        (percent(bubble(P, 2 * M)), "That would be twice the micro-batches, not twice the stages."),
    )  # fmt: skip
    right = most_kept("1F1B", P, M, STAGE)
    what_1f1b_keeps = question(
        f"1F1B, {P} stages counted from 0, {M} micro-batches: how many micro-batches does stage {STAGE} keep at most?",
        (str(right), "It sends p − stage forward before the first comes back; then one in, one out."),
        (str(most_kept("GPipe", P, M, STAGE)), "That is GPipe, which takes none back before all are forward."),
        (str(most_kept("1F1B", P, M, 0)), "That is the first stage, which waits longest for its first."),
        (str(STAGE + 1), "That counts the stages before it. It waits for those after it."),
    )  # fmt: skip
    pipeline = simulate("PipeDream", 5, 40)
    how_late = question(
        f"PipeDream with 5 stages counted from 0: how many updates have the weights of stage {STAGE} had between a "
        "micro-batch's forward and its backward?",
        (str(pipeline.late(STAGE)), "p − 1 − stage: the other micro-batches in flight come back first."),
        (str(pipeline.versions(STAGE)), "That is how many versions it keeps, the newest included."),
        (str(pipeline.late(0)), "That is the first stage, where the way to the end and back is longest."),
        (str(simulate("1F1B", 5, 40).late(STAGE)), "That holds with a flush, where all wait for the update."),
    )  # fmt: skip
    s, b, h, L = RUN.seq_len, RUN.micro_batch, RUN.model.hidden, RUN.model.layers
    sizes = (2 * s * b * h, 2 * s * b * h * L, 2 * RUN.model.parameters // 4)
    stream, streams, weights = (format_bytes(size, "MB", 1) for size in sizes)
    what_crosses_a_cut = question(
        f"GPT-2 XL in 16 bits, micro-batches of {b} sequences of {s:,} tokens. What crosses a cut for one micro-batch?",
        (f"{stream} in each direction", "The residual stream, 2·s·b·h bytes, and later its gradient, as large."),
        (f"{streams} in each direction", "That is a stream for every block. Only one leaves a stage."),
        (f"{stream} forward, nothing back", "The stage before cannot go backward without the gradient of what it has "
         "sent."),
        (weights, "Those are a stage's weights. They stay where they are."),
    )  # fmt: skip
    return the_bubble, twice_the_stages, what_1f1b_keeps, how_late, what_crosses_a_cut
