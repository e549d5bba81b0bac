"""Lesson 08, data parallelism: what replicas keep, what they send, and when it hides."""

from course_utils import TrainingRun, estimate, format_bytes
from course_utils.estimating.sharding import all_reduce_bytes, bucket_sizes, rank_0_states
from course_utils.interactive.quiz import Question, gb, question

RUN = TrainingRun("gpt2-medium", 4, 1024, "amp-bf16", world_size=8)


def questions() -> tuple[Question, ...]:
    whole = sum(rank_0_states(RUN).values())
    states_of_a_rank = question(
        f"GPT-2 medium with AdamW under autocast on {RUN.world_size} ranks with plain data parallelism. How much "
        "memory do weights, gradients and optimizer states take on one rank?",
        (gb(whole), "Sixteen bytes a parameter, on every rank: only the batch is shared out."),
        (gb(whole // RUN.world_size), "That shares the states out, which is what ZeRO does."),
        (gb(whole * 3 // 4), "That leaves the gradients out. They leave no rank: it is their mean that all get."),
        (gb(whole // 2), "That leaves Adam's two moments out. Each replica steps by itself."),
    )  # fmt: skip
    ranks, size = 5, 200_000_000
    sent = all_reduce_bytes(size, ranks)
    bytes_of_a_ring = question(
        f"{ranks} ranks all-reduce 200 MB each, in a ring. How much does each of them send?",
        (format_bytes(sent, "MB", 0), "2(D−1) messages of one D-th each."),
        (format_bytes(sent // 2, "MB", 0), "That is half of the way: complete parts have to be handed out, too."),
        (format_bytes((ranks - 1) * size, "MB", 0), "That is everybody sending everything to everybody."),
        (format_bytes(2 * size, "MB", 0), "That is what it comes near to with very many ranks."),
    )  # fmt: skip
    held = estimate(RUN)["communication"]
    buckets = question(
        "The same run, under DistributedDataParallel as it comes. How much memory do its buckets take on each rank?",
        (format_bytes(held, "GB", 2), "Each gradient has a place in a bucket, and buckets stay: "
         "`gradient_as_bucket_view=True` would make both one."),
        (format_bytes(max(bucket_sizes(RUN)), "GB", 2), "That is the largest one. They all stay."),
        (format_bytes(held // 2, "GB", 2), "That is for 16-bit gradients. Under autocast they have 32 bits."),
        (format_bytes(held // RUN.world_size, "GB", 2), "That is a share of them. Every rank reduces all gradients."),
    )  # fmt: skip
    micro_batches, size = 8, 300_000_000
    what_no_sync_saves = question(
        f"{micro_batches} micro-batches a step, 300 MB of gradients. How much less has to be all-reduced in a step if "
        "all but the last backward run under `no_sync`?",
        (format_bytes((micro_batches - 1) * size, "MB", 0), "One exchange is left, of gradients added up."),
        (format_bytes(micro_batches * size, "MB", 0), "Then nothing would be exchanged, and replicas drift apart."),
        (format_bytes(size, "MB", 0), "That is what remains to be exchanged."),
        (format_bytes(size // micro_batches, "MB", 0), "A micro-batch's gradients are as large as a whole batch's."),
    )  # fmt: skip
    few, many = 8, 64
    steps_of_a_ring = question(
        f"Tiny gradients: all that counts is α, the time to start a message. A ring grows from {few} to {many} ranks. "
        "How many times as long does its all-reduce take?",
        (f"{(many - 1) / (few - 1):g} times", "2(D−1) messages one after the other, in proportion to D−1."),
        ("as long as before", "That holds for the bytes of a large gradient, nearly. Messages are counted here."),
        (f"{many // few} times", "Close: but how many steps has a ring of D ranks?"),
        (f"{(many * (many - 1)) / (few * (few - 1)):.0f} times", "All messages of all ranks: but many travel at once."),
    )  # fmt: skip
    return states_of_a_rank, bytes_of_a_ring, buckets, what_no_sync_saves, steps_of_a_ring
