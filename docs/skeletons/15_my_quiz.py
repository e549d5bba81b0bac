"""Lesson 15: YOURS: what its questions are about."""

from course_utils import PRESETS
from course_utils.interactive.quiz import Question, gb, question


def questions() -> tuple[Question, ...]:
    N = PRESETS["gpt2"].parameters  # YOURS: choices are computed, never typed
    weights = question(
        f"GPT-2 has {N:,} parameters in fp32. How much do they take?",
        (gb(4 * N), "Four bytes each."),
        (gb(2 * N), "That is what they take in 16 bits."),
        (gb(8 * N), "That is what they take in 64 bits."),
    )
    states = question(
        "Adam trains them. How much do its two fp32 states take?",
        (gb(8 * N), "Two numbers of four bytes for each parameter."),
        (gb(4 * N), "That is one state. Adam has momentum and variance."),
        (gb(12 * N), "That counts the weights as well."),
    )
    gradients = question(
        "When are fp32 gradients as large as the weights?",
        ("always", "There is one number for each parameter that is trained."),
        ("with large batches", "Gradients of all sequences are added up in the same place."),
        ("never", "Count them: which parameter has none?"),
    )
    return weights, states, gradients
