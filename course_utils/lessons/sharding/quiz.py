"""Lesson 09, ZeRO and FSDP: what is cut, what is sent, what is whole for a moment."""

from course_utils import TrainingRun, format_bytes
from course_utils.estimating.sharding import fsdp_groups, shard_shape, zero_bytes, zero_communication_elements
from course_utils.interactive.quiz import Question, gb, question

N, D = 7_500_000_000, 64
LLAMA = TrainingRun("llama3-8b", 1, 4096, "bf16-master", recompute="full", world_size=D, zero_stage=3)


def questions() -> tuple[Question, ...]:
    """The questions in the order of the lesson."""
    the_floor = question(
        f"ZeRO's stage 2, mixed-precision Adam, {N / 1e9:.1f} billion parameters: below what can no D go?",
        (format_bytes(2 * N, "GB", 0), "2Ψ: each rank keeps the 16-bit weights whole."),
        (format_bytes(4 * N, "GB", 0), "4Ψ is the floor of stage 1, which keeps whole gradients as well."),
        (gb(zero_bytes(N, D, 3)), f"That is stage 3's share on {D} ranks. It has no floor."),
        (format_bytes(14 * N, "GB", 0), "That is what stage 2 divides, 2 + K bytes a parameter."),
    )  # fmt: skip
    plain, three = (zero_communication_elements(N, stage) for stage in (0, 3))
    half_as_much_again = question(
        "Stage 3 divides all states by the number of ranks. How much more than plain data parallelism does it send, by "
        "ZeRO's count?",
        (f"{100 * (three / plain - 1):.0f} %", "3Ψ in place of 2Ψ: weights are gathered twice, for forward and for "
         "backward, and gradients reduce-scattered."),
        ("0 %", "That is true of stages 1 and 2. Stage 3 has no whole weights left for backward."),
        (f"{100 * (three / N - 1):.0f} %", "That compares 3Ψ with Ψ. An all-reduce is 2Ψ."),
        (f"{D} times", "Each rank sends its own share alone, however many ranks there are."),
    )  # fmt: skip
    rows, columns, ranks = 50, 3, 8
    padding = ranks * shard_shape((rows, columns), ranks)[0] * columns - rows * columns
    padded_rows = question(
        f"FSDP2 cuts a matrix of {rows} rows and {columns} columns into shards for {ranks} ranks. How many numbers in "
        "all shards together are padding?",
        (str(padding), "Each rank gets the same number of rows, rounded up, and rows have three numbers."),
        ("0", "The ranks do not divide the rows, and every shard has the same size."),
        (str(-rows * columns % ranks), "That cuts the numbers one by one. FSDP2 cuts whole rows."),
        (str(padding // columns), "Those are rows. Each has three numbers."),
    )  # fmt: skip
    (outer, block), whole = fsdp_groups(LLAMA)[:2], 2 * LLAMA.model.parameters
    the_largest_unit = question(
        f"Llama-3 8B on {D} ranks at stage 3, each block a unit of its own, gathered in bf16. How large is the largest "
        "unit while it is whole?",
        (format_bytes(outer.unsharded, "GB", 2), "What is outside the blocks is one unit: the embedding and the head, "
         "two matrices of h·V numbers."),
        (format_bytes(block.unsharded, "GB", 2), "That is a block. What is outside of them is a unit, too."),
        (format_bytes(whole, "GB", 2), "That would be the whole model as one unit."),
        (format_bytes(whole // D, "GB", 2), "That is a rank's shard of everything, before anything is gathered."),
    )  # fmt: skip
    sent = plain // N + 1
    stage_1_of_torch = question(
        "By the paper, stage 1 sends as much as plain data parallelism. How many numbers per parameter does a rank "
        "send with PyTorch's `ZeroRedundancyOptimizer` behind `DistributedDataParallel`?",
        (str(sent), "DDP all-reduces whole gradients, and then each rank broadcasts the weights that it stepped."),
        (str(plain // N), "That is the paper's way: a reduce-scatter of gradients, then an all-gather of weights."),
        ("1", "That is handing out the new weights alone. How did the gradients come together?"),
        (str(sent + 1), "That counts the handing out like an all-reduce. Nothing is summed there."),
    )  # fmt: skip
    return the_floor, half_as_much_again, padded_rows, the_largest_unit, stage_1_of_torch
