"""Lesson 13, who is right: formulas outside their range, parts that are never there at once, units, lucky totals."""

from course_utils.interactive.quiz import Question, gb, question
from course_utils.run import TrainingRun
from course_utils.units import GB, GiB, format_bytes

from .calculators import COPIES, autocast_formula

LLAMA = TrainingRun("llama3.1-8b", 1, 8192)
XL = TrainingRun("gpt2-xl", 32, 1024)


def questions() -> tuple[Question, ...]:
    """The questions in the order of the lesson."""
    a, s, L = LLAMA.model.heads, LLAMA.seq_len, LLAMA.model.layers
    scores = a * s * s
    not_there = question(
        f"A formula for GPTs adds 5·a·s² bytes a block. Llama 3.1 8B has a = {a} and L = {L}; with one sequence of "
        f"{s:,} tokens and flash attention, how much of the answer is not there?",
        (gb(5 * scores * L), "All of that term: a flash kernel writes no s×s matrix."),
        (gb(5 * scores), "That is one block's. The model has more of them."),
        (gb(3 * scores * L), "That lets the scores of an attention without dropout stand. A flash kernel keeps none."),
        (gb(0), "That would be so if the kernel wrote its matrix of scores to memory."),
    )  # fmt: skip
    N = LLAMA.model.parameters
    at_once = question(
        "The same model under autocast. Its step peaks where the loss goes backward. How much do weights, gradients "
        "and Adam's moments take there?",
        (gb(12 * N), "4 + 8 bytes a parameter: backward has made no gradients yet."),
        (gb(16 * N), "That adds up what is never there at once: which of the three comes later?"),
        (gb(18 * N), "That is the recipe with 16-bit weights, master weights and fp32 gradients."),
        (gb(8 * N), "Those are the moments alone. The weights are there, too."),
    )  # fmt: skip
    unit = question(
        "A card's “80 GB” are 80 GiB. How many GB is that?",
        (gb(80 * GiB), "2³⁰ / 10⁹ for each of them."),
        (gb(80 * GB), "That takes the letter i for decoration."),
        (f"{80 * GB / GiB:.1f} GB", "You went the other way: a GiB is the larger of the two."),
        (f"{80 * 1.024:.1f} GB", "1.024 is the factor between KiB and KB. It grows with the prefix."),
    )  # fmt: skip
    states, blocks, loss = 6, 5, -10
    by_chance = question(
        f"A calculator is {states:+d} GB off in the states, {blocks:+d} GB in the blocks, −{-loss} GB in the loss: "
        f"{states + blocks + loss:+d} GB in all. How far is it off with twice the batch?",
        (_off(states + 2 * (blocks + loss)), "Activations and loss double, and so do their errors; the states stay."),
        (_off(states + blocks + loss), "That would be so if no part grew with the batch."),
        (_off(2 * (states + blocks + loss)), "That doubles the states' error, too, and they do not see the batch."),
        (_off(states + blocks + 2 * loss), "The blocks grow with the batch as well as the loss."),
    )  # fmt: skip
    kept = autocast_formula(XL)[COPIES]
    copies = question(
        "None of the nine calculators has autocast's weight copies. How much are they for GPT-2 XL?",
        (gb(kept), "Two bytes for each number in a matrix, the tied head's included."),
        (gb(0), "That would be so if matrices were converted in place: but the fp32 ones stay."),
        (gb(2 * kept), "Those would be fp32 copies. What do the products read?"),
        (format_bytes(kept // XL.model.layers, "GB", 2), "That is one block's share. Copies are kept until the region "
         "ends."),
    )  # fmt: skip
    return not_there, at_once, unit, by_chance, copies


def _off(amount: int) -> str:
    return f"{'+' if amount > 0 else '−'}{abs(amount)} GB"
