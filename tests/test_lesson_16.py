"""Lesson 16: answers and their hints; its layer against another route; its figure."""

from typing import Any

import pytest
import torch
from checking import Answers, JudgedAnswers
from edits import edited
from lesson_source import SOURCES, cells
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from course_utils.estimating.step_time import model_flops
from course_utils.evidence.frozen_runs import changed
from course_utils.lessons.lora.figures import lora_picture
from course_utils.networks import network_for
from course_utils.networks.lora import LoraLinear
from course_utils.run import TrainingRun


# --------------------------------------------------------------------------------------------------
# 16.1: lora_linear
class Adapter(nn.Module):
    """What the exercise gives."""

    def __init__(self, base: nn.Linear, r: int, alpha: float, dropout: float = 0.0) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.scale, self.merged = alpha / r, False
        self.A = nn.Parameter(torch.randn(r, base.in_features) / base.in_features**0.5)
        self.B = nn.Parameter(torch.zeros(base.out_features, r))
        self.dropout = nn.Dropout(dropout)


class ByFunctions(Adapter):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.linear(x, self.base.weight, self.base.bias)
        if not self.merged:
            thin = F.linear(F.dropout(x, self.dropout.p, self.training), self.A)
            y = y + F.linear(thin, self.scale * self.B)
        return y

    def merge(self) -> None:
        self.change(1)

    def unmerge(self) -> None:
        self.change(-1)

    def change(self, sign: int) -> None:
        if self.merged != (sign == 1):
            self.base.weight.data.addmm_(self.B.detach(), self.A.detach(), alpha=sign * self.scale)
            self.merged = sign == 1


DATA = "self.base.weight.data.addmm_(self.B.detach(), self.A.detach(),"
THIN = "F.linear(thin, self.scale * self.B)"
COPIED = "self.merged, self.old = sign == 1, self.base.weight.clone()"

LORA_LINEAR = Answers(
    right=ByFunctions,
    wrong=[
        (edited(ByFunctions, "self.training", "True"), "In eval mode numbers are still dropped"),
        (edited(ByFunctions, THIN, "F.linear(x, self.scale * self.B @ self.A)"), "in which order do you"),
        (edited(ByFunctions, "self.merged = sign == 1", COPIED), "W's copy, a new W, or B·A"),
        (edited(ByFunctions, DATA, "self.base.weight.addmm_(self.B, self.A,"), "What is `no_grad` for"),
        (edited(ByFunctions, "if self.merged != (sign == 1):", "if True:"), "adds the adapter twice"),
    ],
)


# --------------------------------------------------------------------------------------------------
# 16.2: lora_embedding
def row_by_row(ids: torch.Tensor, W: Any, A: Any, B: Any, scale: float) -> torch.Tensor:
    rows = [W[token] + scale * (B.T @ A[token]) for token in ids.flatten()]
    return torch.stack(rows).view(*ids.shape, -1)


LORA_EMBEDDING = Answers(
    right=row_by_row,
    wrong=[
        (edited(row_by_row, "scale * ", ""), "You leave out the scale"),
        (edited(row_by_row, "W[token] + ", ""), "that is only the adapter"),
        (edited(row_by_row, ".view(*ids.shape, -1)", ""), "give (10, 32), not (2, 5, 32)"),
        (lambda ids, W, A, B, scale: (W + scale * A @ B)[ids], "rows of A *before* you multiply"),
    ],
)


# --------------------------------------------------------------------------------------------------
# 16.3: two_factors
def by_roots(difference: torch.Tensor, r: int) -> tuple[torch.Tensor, torch.Tensor]:
    left, sizes, right = torch.svd(difference)
    roots = sizes[:r].sqrt()
    return left[:, :r] @ roots.diag(), roots.diag() @ right[:, :r].T


TWO_FACTORS = Answers(
    right=by_roots,
    wrong=[
        (edited(by_roots, ".sqrt()", ""), "the squares"),
        (edited(by_roots, "roots.diag() @ right", "right"), "one factor lacks its half"),
        (lambda difference, r: by_roots(difference, r)[::-1], "B comes first"),
        (lambda difference, r: by_roots(difference, r - 1), "B is (9, 1) and A (1, 6)"),
    ],
)

ANSWERS = {"16.1": LORA_LINEAR, "16.2": LORA_EMBEDDING, "16.3": TWO_FACTORS}


class TestAnswers(JudgedAnswers):
    answers = ANSWERS


# --------------------------------------------------------------------------------------------------
# the lesson's own code
def test_lora_takes_two_units_of_work_and_the_formula_knows() -> None:
    """Counted on the meta device: backward makes no dL/dW for a frozen matrix."""
    run = TrainingRun(changed("gpt2", layers=2), 1, 64, "fp32", attention="eager")
    units = []
    for rank, targets in ((0, ()), (1, ("attention", "mlp"))):
        adapted = run.replace(lora_rank=rank, lora_targets=targets)
        with torch.device("meta"):
            network = network_for(adapted)
            tokens = torch.zeros(1, 64, dtype=torch.long)
        with FlopCounterMode(display=False) as counter:
            network(tokens).sum().backward()
        units.append(counter.get_total_flops())
        assert model_flops(adapted) == pytest.approx(units[-1], rel=0.03)
    assert units[1] / units[0] == pytest.approx(2 / 3, rel=0.03)


def test_the_lessons_layer_computes_what_the_courses_does() -> None:
    lesson: dict[str, Any] = {"torch": torch}
    exec(next(code for code in cells(SOURCES / "16_lora.py") if "class Lora(nn.Module)" in code), lesson)
    torch.manual_seed(0)
    linear, x = nn.Linear(128, 16), torch.randn(4, 128)
    ours, theirs = lesson["Lora"](linear, 4, 4), LoraLinear(linear, 4, torch.float32)
    nn.init.normal_(ours.B)
    theirs.load_state_dict(ours.state_dict())
    assert torch.allclose(ours(x), theirs(x), atol=1e-5)


def test_the_figure_shows_matrices_to_one_scale() -> None:
    drawn: Any = lora_picture(4096, 2048, 64)
    matrices = drawn.axes[0]
    assert f"{64 * (4096 + 2048):,} numbers learn" in drawn.alt
    sizes = [(matrix.get_height(), matrix.get_width()) for matrix in matrices.patches]
    assert sizes == [pytest.approx(size) for size in ((4096, 2048), (4096, 64), (64, 2048))]
    drawn.draw_without_rendering()
    box = matrices.get_window_extent()
    assert box.width / matrices.get_xlim()[1] == pytest.approx(box.height / 4096), "one scale"
