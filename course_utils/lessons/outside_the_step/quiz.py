"""Numbers for the quiz of lesson 13, question by question. Its texts are in quiz.toml."""

from collections.abc import Iterator

from course_utils import PRESETS
from course_utils.interactive.quiz import Numbers, gb
from course_utils.units import each


def numbers() -> Iterator[Numbers]:
    N = PRESETS["gpt2"].parameters  # YOURS: compute choices, never type them
    yield "weights", {"N": N} | each(gb, fp32=4 * N, half=2 * N, double=8 * N)
    yield "states", each(gb, both=8 * N, one=4 * N, all_three=12 * N)
