"""What the checks of lesson 05 compare with: right answers, asked of autograd where it can be, and planted mistakes."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from math import isqrt
from typing import NamedTuple

import torch
from torch import nn

from course_utils.estimating.exact.activations import activation_bytes
from course_utils.figures import timeline
from course_utils.figures.canvas import Figure
from course_utils.interactive.saved import saved_by
from course_utils.measurement import Measurement
from course_utils.measuring import measure
from course_utils.models import PRESETS
from course_utils.run import TrainingRun

from ..recomputation.policies import small_gpt

# ---------------------------------------------------------------------------------------------------- 05.1: expressions

EXPRESSIONS: dict[str, Callable[..., torch.Tensor]] = {
    "tanh(x + y)": lambda x, y: torch.tanh(x + y),
    "relu(x) ** 2": lambda x, y: torch.relu(x) ** 2,
    "x * sigmoid(x)": lambda x, y: x * torch.sigmoid(x),
    "exp(x) + sin(x)": lambda x, y: torch.exp(x) + torch.sin(x),
    "sigmoid(x) / 3 + y": lambda x, y: torch.sigmoid(x) / 3 + y,
}
"""Operations that the lesson has not shown, of two tensors alike."""

EXPRESSION_MISTAKES: dict[str, dict[str, int]] = {
    "tanh(x + y)": {
        "an addition asks for neither of its terms; and tanh?": 3,
        "tanh's slope is 1 − tanh², so its output is enough; what else did you count?": 2,
        "nothing at all? The addition keeps nothing, but tanh is not a straight line.": 0,
    },
    "relu(x) ** 2": {
        "ReLU keeps its output and the square keeps its input: how many storages are these two?": 2,
        "nothing at all? The slope of a square depends on what was squared.": 0,
    },
    "x * sigmoid(x)": {
        "the sigmoid keeps its output, which the product needs too: it is stored once.": 3,
        "a product of two activations asks for both of its factors.": 1,
    },
    "exp(x) + sin(x)": {
        "sin's slope is cos(x), which its output does not tell without its sign; exp's slope is exp itself. "
        "Are these the same storage?": 1,
        "exp needs its output alone: its slope is its value.": 3,
        "the addition keeps nothing; each of the other two keeps one tensor.": 4,
    },
    "sigmoid(x) / 3 + y": {
        "a division by a number keeps nothing, and neither does an addition.": 2,
        "a division by a number and an addition keep nothing at all.": 3,
        "nothing at all? The sigmoid is not a straight line.": 0,
    },
}
"""For each expression: what to say to whom counted that many tensors of n numbers."""


@cache
def expression_bytes_of(name: str, n: int) -> int:
    """What autograd really keeps of this expression on the CPU, in bytes."""
    return sum(item.bytes for item in saved_by(EXPRESSIONS[name], (n,), (n,), dtype="bf16"))


# ------------------------------------------------------------------------------------------------------ 05.2: mlp_bytes


class BilinearMLP(nn.Module):
    """dropout((GELU(x·W1) · (x·W2))·W3): GEGLU (Shazeer 2020), without biases."""

    def __init__(self, h: int, ffn: int) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(*sizes, bias=False) for sizes in ((h, ffn), (h, ffn), (ffn, h)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = nn.functional.gelu(self.gate(x)) * self.up(x)
        return nn.functional.dropout(self.down(wide), 0.1)


def bilinear_mlp(h: int, ffn: int) -> BilinearMLP:
    """The layer of exercise 2, to look at with `saved_by`."""
    return BilinearMLP(h, ffn)


MLP_CASES = ((512, 2, 256, 1024), (128, 8, 512, 1365), (64, 3, 128, 200))
"""s, b, h and ffn."""


def mlp_bytes_of(s: int, b: int, h: int, ffn: int) -> int:
    """Input, GELU's input and output, the other factor, the product, and the mask."""
    return s * b * (2 * h + 8 * ffn + h)


MLP_MISTAKES: Mapping[str, Callable[[int, int, int, int], int]] = {
    "The input of the two first matrices is one storage: you count it twice.": lambda s, b, h, ffn: (
        s * b * (5 * h + 8 * ffn)
    ),
    "Dropout's mask takes one byte an element, not two.": lambda s, b, h, ffn: s * b * (4 * h + 8 * ffn),
    "The mask of dropout is missing.": lambda s, b, h, ffn: s * b * (2 * h + 8 * ffn),
    "A mask of width ffn? Dropout comes last, where the width is h again.": lambda s, b, h, ffn: (
        s * b * (2 * h + 9 * ffn)
    ),
    "One wide tensor short: a product keeps both factors, the last matrix keeps the product.": lambda s, b, h, ffn: (
        s * b * (3 * h + 6 * ffn)
    ),
    "That is right for one sequence. There are b of them.": lambda s, b, h, ffn: s * (3 * h + 8 * ffn),
    "That is a GELU MLP without a gate. The product of two branches asks for more.": lambda s, b, h, ffn: (
        s * b * (3 * h + 4 * ffn)
    ),
    "One wide tensor too many: GELU's output and the factor are one storage.": lambda s, b, h, ffn: (
        s * b * (3 * h + 10 * ffn)
    ),
    "You count numbers, or one byte each: 16-bit numbers take two, only the mask takes one.": lambda s, b, h, ffn: (
        s * b * (2 * h + 4 * ffn)
    ),
}

# ---------------------------------------------------------------------------------------------------- 05.3: block_bytes

BLOCK_CASES = ((512, 2, 768, 12), (1024, 4, 1600, 25), (256, 1, 512, 4))
"""s, b, h and a."""


def block_bytes_of(s: int, b: int, h: int, a: int, attention: str, dropout: bool) -> int:
    """34 or 32 bytes of s·b·h, both norms' statistics, and what the kernel of attention adds."""
    core = (5 if dropout else 2) * a * s * s * b if attention == "eager" else 4 * a * s * b
    return (34 if dropout else 32) * s * b * h + 16 * s * b + core


def _without_statistics(s: int, b: int, h: int, a: int, attention: str, dropout: bool) -> int:
    return block_bytes_of(s, b, h, a, attention, dropout) - 16 * s * b


def _paper(s: int, b: int, h: int, a: int, attention: str, dropout: bool) -> int:
    return 34 * s * b * h + 16 * s * b + 5 * a * s * s * b


def _core_as_published(s: int, b: int, h: int, a: int, attention: str, dropout: bool) -> int:
    return block_bytes_of(s, b, h, a, attention, dropout) + (5 - (5 if dropout else 2)) * a * s * s * b


BLOCK_MISTAKES: Mapping[str, Callable[[int, int, int, int, str, bool], int]] = {
    "the published formula, whatever kernel and dropout are. What does each of them change?": (
        lambda s, b, h, a, attention, dropout: (
            -1 if (attention, dropout) == ("eager", True) else _paper(s, b, h, a, attention, dropout)
        )
    ),
    "all there but the statistics of the norms: two norms, two fp32 numbers a token.": _without_statistics,
    "half of the statistics is missing: a block has two norms, and their numbers are fp32.": (
        lambda s, b, h, a, attention, dropout: block_bytes_of(s, b, h, a, attention, dropout) - 8 * s * b
    ),
    "the masks are still in your 34.": (
        lambda s, b, h, a, attention, dropout: block_bytes_of(s, b, h, a, attention, dropout) + 2 * s * b * h
    ),
    "only one of the masks has gone: attention's output and the MLP's each have one.": (
        lambda s, b, h, a, attention, dropout: block_bytes_of(s, b, h, a, attention, dropout) + s * b * h
    ),
    "a·s² still counts as with dropout. Its mask goes, and what does the last product keep then?": _core_as_published,
    "a·s²: the mask has gone from your count, but softmax's output and the factor of the next product are one.": (
        lambda s, b, h, a, attention, dropout: (
            -1 if dropout else block_bytes_of(s, b, h, a, attention, dropout) + 2 * a * s**2 * b
        )
    ),
    "that is right for one sequence. There are b of them.": (
        lambda s, b, h, a, attention, dropout: block_bytes_of(s, 1, h, a, attention, dropout)
    ),
    "the kernel keeps something small that you lack: one fp32 number for each row of each head.": (
        lambda s, b, h, a, attention, dropout: (
            block_bytes_of(s, b, h, a, attention, dropout) - (4 * a * s * b if attention == "flash" else 0)
        )
    ),
}

# ----------------------------------------------------------------------------------------------- 05.4: longest_sequence

BUDGET_CASES = (
    (40 * 10**9, 1, 1600, 25, 48),
    (8 * 2**30, 4, 768, 12, 12),
    (200 * 10**9, 2, 4096, 32, 32),
    (10**6, 8, 1600, 25, 48),
    (12 * 2 * 1000 * (34 * 768 + 5 * 12 * 1000), 2, 768, 12, 12),
)
"""budget in bytes, b, h, a and L; 1,000 tokens fill the last one to the byte."""


def longest_of(budget: int, b: int, h: int, a: int, L: int) -> int:
    """The largest s with L·b·(34·h·s + 5·a·s²) ≤ budget: a quadratic equation, exact in whole numbers."""
    per_layer = budget // (L * b)
    root = isqrt((34 * h) ** 2 + 4 * 5 * a * per_layer)
    s = (root - 34 * h) // (10 * a)
    while 34 * h * (s + 1) + 5 * a * (s + 1) ** 2 <= per_layer:
        s += 1
    return s


LENGTH_MISTAKES: Mapping[str, Callable[[int, int, int, int, int], int]] = {
    "What fills the budget to the last byte still fits: “no more than” includes the budget itself.": (
        lambda budget, b, h, a, L: longest_of(budget - 1, b, h, a, L)
    ),
    "You take only the part that is linear in s. That is flash attention's length.": lambda budget, b, h, a, L: (
        budget // (L * b * 34 * h)
    ),
    "You take only the part in s². At these lengths the linear part is far from nothing.": lambda budget, b, h, a, L: (
        isqrt(budget // (L * b * 5 * a))
    ),
    "One block fills your budget, but all L blocks keep their share at once.": lambda budget, b, h, a, L: longest_of(
        budget, b, h, a, 1
    ),
    "That is right for one sequence. There are b of them at once.": lambda budget, b, h, a, L: longest_of(
        budget, 1, h, a, L
    ),
    "GB for GiB, or the reverse: the budget is given in bytes, take it as it is.": lambda budget, b, h, a, L: (
        longest_of(budget * 10**9 // 2**30, b, h, a, L)
    ),
}

# ----------------------------------------------------------------------------------------------------- 05.5: read_sweep


class Sweep(NamedTuple):
    """A hidden run: bytes at the end of forward for some lengths, its kernel, and bytes at twice the longest."""

    sweep: dict[int, int]
    attention: str
    next: int


def _sweep(run: TrainingRun, *lengths: int) -> Sweep:
    """What a run of this kind keeps at these lengths: the estimate, which is the simulated step's to the byte."""
    sizes = {s: activation_bytes(run.replace(seq_len=s)) for s in lengths}
    return Sweep(sizes, run.attention, activation_bytes(run.replace(seq_len=2 * max(lengths))))


@cache
def hidden_sweeps() -> tuple[Sweep, ...]:
    """Four models of which neither size nor order of the lengths gives the kernel away."""
    small = TrainingRun("gpt2", 2, 128, "bf16-master")
    large = TrainingRun(replace(PRESETS["llama3.2-1b"], layers=4), 8, 512, "bf16-master")
    return (
        _sweep(large, 512, 1024, 2048),
        _sweep(small.replace(attention="eager"), 128, 256, 512),
        _sweep(large.replace(attention="eager", micro_batch=1), 256, 512, 768),
        _sweep(small.replace(precision="amp-bf16", micro_batch=1), 384, 128, 256),
    )


def example_sweep() -> dict[int, int]:
    """A sweep to try `read_sweep` on: a tiny GPT with eager attention, bytes by length."""
    return _sweep(TrainingRun("tiny-gpt", 4, 32, "bf16-master", attention="eager"), 32, 64, 128).sweep


NEXT_MISTAKES: Mapping[str, Callable[[Mapping[int, int]], float]] = {
    "You double the last size. With s×s matrices that is too little.": lambda sweep: 2 * sweep[max(sweep)],
    "You take four times the last size. Only a part of it grows with s².": lambda sweep: 4 * sweep[max(sweep)],
}

# -------------------------------------------------------------------------------------------- 05.6: explain a timeline

STORY = TrainingRun(small_gpt(layers=3), 8, 128, "amp-bf16", attention="eager", accumulation_steps=2)
"""Two micro-batches a step, so that gradients wait for more."""

STATEMENTS = {
    1: "Backward is half way through: what a block has kept goes as soon as it has been used.",
    2: "The optimizer has stepped for the first time: its two states have just been made.",
    3: "A leak: memory of the step before was not given back.",
    4: "Forward is through: each block keeps what its backward will ask for.",
    5: "Weights and tokens alone: nothing has been computed yet.",
    6: "Activations wait here until the optimizer has used them.",
    7: "One micro-batch is done: its activations have gone, its gradients wait for those of the next.",
    8: "The weights are loaded a second and a third time, so that the optimizer can work on copies.",
    9: "A step begins: gradients have been set to none, the optimizer's states stay.",
}
"""What can be said of a moment, in no order; three are wrong of any."""

EXPLAINED = {"A": 5, "B": 4, "C": 7, "D": 2, "E": 9, "F": 1}
"""The right statement of each moment."""

STORY_MISTAKES: Mapping[tuple[str, int], str] = {
    ("E", 3): "E: is it a leak if every later step begins at this height? See what it is that stays.",
    ("C", 3): "C: what is left there is one kind of memory. Who will want it when the next micro-batch is through?",
    ("F", 6): "F: the curve falls right there, before the optimizer has run. Who has used what has gone?",
    ("B", 6): "B: does any formula of an optimizer ask for an activation? Look when they go.",
    ("D", 8): "D: two tensors for each weight have come, in fp32. They are no copies: what does Adam remember?",
    ("C", 9): "C lies inside a step. Are there gradients at C, and states of the optimizer?",
    ("E", 7): "E lies between two steps. Are there gradients at E, and states of the optimizer?",
    ("D", 9): "D: gradients are still there. What has just come?",
    ("E", 2): "E: something has gone since D. The states were there before.",
    ("A", 9): "A is in the very first step. Which states could there be?",
    ("E", 5): "E: more is there than at A. What has the first step left behind?",
    ("F", 4): "F: gradients have come and the curve is on its way down. Forward is long through.",
    ("B", 1): "B: look at the phases' names above the picture. Has backward begun?",
}
"""What to say to somebody who gives a moment that statement."""


@cache
def story_measured() -> Measurement:
    """The run of exercise 6."""
    return measure(STORY, source="simulated")


def story_letters() -> dict[str, int]:
    """The moments of exercise 6, as counts of events: where phases of the two steps begin, and one within backward."""
    measured = story_measured()
    starts: dict[tuple[int, str], list[int]] = {}
    for mark in measured.timeline.marks:
        starts.setdefault((mark.step, mark.phase), []).append(mark.event)
    last_backward, optimizer = starts[2, "backward"][-1], starts[2, "optimizer"][0]
    return {
        "A": starts[1, "forward"][0],
        "B": starts[1, "loss"][0],
        "C": starts[1, "forward"][1],
        "D": starts[1, "zero_grad"][0],
        "E": starts[2, "forward"][0],
        "F": (last_backward + optimizer) // 2,
    }


def story_figure() -> Figure:
    """The timeline of exercise 6, with its moments as letters."""
    title = "Two steps of a small GPT, two micro-batches each: what happens at A to F?"
    return timeline(story_measured(), title, unit="MB", steps=[1, 2], letters=story_letters())
