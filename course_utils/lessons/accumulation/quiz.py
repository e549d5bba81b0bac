"""Lesson 07, gradient accumulation: sums of gradients, what they cost, and when processes exchange them."""

from course_utils import TrainingRun, estimate, format_bytes
from course_utils.interactive.quiz import Question, question

RUN = TrainingRun("gpt2", 4, 1024, accumulation_steps=25)


def questions() -> tuple[Question, ...]:
    count, k = 103, 8
    last_group = question(
        f"An epoch has {count} micro-batches, and the optimizer steps once for every {k} of them. How many steps does "
        "an epoch take if none is left out?",
        (str(-(-count // k)), f"{count // k} whole groups, and one of {count % k}, divided by its own number."),
        (str(count // k), "That leaves the last, incomplete group out, and its gradients in `.grad`."),
        (str(count), "That is a step on each micro-batch: small batches, with their noise."),
        (str(count % k), "That is how many are left over."),
    )  # fmt: skip
    short, long = 100, 700
    a_long_sequence = question(
        f"Two micro-batches, one with {short} real tokens, one with {long}. By what do you multiply the mean loss of "
        "the first before its backward, to get the gradient of both as one batch?",
        (f"{short / (short + long):g}", "Its share of all tokens."),
        (f"{1 / 2:g}", "That gives every token of the short one more say than one of the long one."),
        (f"{short / long:.3g}", "That compares the two with each other. What do both weights add up to?"),
        (f"{long / (short + long):g}", "That is the other one's share."),
    )  # fmt: skip
    alone, at_once = (estimate(RUN.replace(micro_batch=b, accumulation_steps=1)).total for b in (4, 100))
    extra = estimate(RUN).total - alone
    what_stays = question(
        "GPT-2 under autocast: 25 micro-batches of 4 sequences. How much more does that take at its peak than one step "
        "on 4 sequences?",
        (format_bytes(extra, "MB", 0), "All gradients in fp32: they wait while the next micro-batch runs."),
        ("nothing", "Where are the gradients of the first micro-batch while the second goes forward?"),
        (format_bytes(25 * extra, "MB", 0), "Each micro-batch adds to the same gradients: there is one set."),
        (format_bytes(at_once - alone, "MB", 0), "That is what all 100 at once would cost more."),
    )  # fmt: skip
    k, N = 8, RUN.model.parameters
    without_no_sync = question(
        f"Two GPUs train GPT-2 with DistributedDataParallel, {k} micro-batches per step, gradients in fp32. How many "
        "bytes of gradients does each step average if nobody calls no_sync?",
        (format_bytes(4 * k * N, "GB", 2), "All gradients, in the backward of every micro-batch."),
        (format_bytes(4 * N, "GB", 2), "That is once per step. Which call makes it so?"),
        (format_bytes(2 * k * N, "GB", 2), "Each GPU has all gradients, not half of them."),
        (format_bytes(4 * N // k, "GB", 2), "A micro-batch has fewer tokens. Has it fewer gradients?"),
    )  # fmt: skip
    return last_group, a_long_sequence, what_stays, without_no_sync
