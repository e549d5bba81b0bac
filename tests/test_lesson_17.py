"""Lesson 17: answers and their hints; its layer against another route; its figure and controls."""

from typing import Any

import torch
from checking import Answers, JudgedAnswers
from edits import edited
from lesson_source import SOURCES, cells
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from course_utils import estimate
from course_utils.lessons.quantization.figures import code_picture
from course_utils.lessons.quantization.widget import lora_sliders
from course_utils.networks.frozen import FrozenLinear, nf4_code, nf4_pairs


# --------------------------------------------------------------------------------------------------
# 17.1: packed
class Packed(nn.Module):
    """With buffers, and row by row."""

    def __init__(self, values: torch.Tensor, block: int) -> None:
        super().__init__()
        self.block, self.size = block, values.shape
        rows = values.reshape(-1).split(block)
        scales = torch.stack([row.abs().max() / 7 for row in rows])
        codes = torch.cat([(row / (scale + 1e-20)).round() for row, scale in zip(rows, scales, strict=True)])
        codes = F.pad((codes.to(torch.int8) & 15).to(torch.uint8), (0, len(codes) % 2))
        self.register_buffer("codes", codes[::2] * 16 + codes[1::2])
        self.register_buffer("scales", scales)

    def unpack(self) -> torch.Tensor:
        codes = torch.stack((self.codes // 16, self.codes % 16), 1).flatten()[: self.size.numel()].float()
        codes = torch.where(codes > 7, codes - 16, codes)
        rows = zip(codes.split(self.block), self.scales, strict=True)
        return torch.cat([row * scale for row, scale in rows]).reshape(self.size)


PACKED = Answers(
    right=Packed,
    wrong=[
        (edited(Packed, "row.abs().max()", "row.max()"), "its largest *magnitude* below"),
        (edited(Packed, "(scale + 1e-20)", "scale"), "you divide 0 by 0"),
        (edited(Packed, ".round()", ".floor()"), "to the *nearest* code"),
        (edited(Packed, "torch.where(codes > 7, codes - 16, codes)", "codes"), "Negative codes come"),
        (edited(Packed, '"scales", scales', '"scales", values'), "The original numbers are among them"),
    ],
)


# --------------------------------------------------------------------------------------------------
# 17.2: product
def in_a_closure(x: torch.Tensor, packed: Any, bias: Any) -> torch.Tensor:
    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x @ packed.unpack().to(x).T

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            return gradients[0] @ packed.unpack().to(gradients[0])

    return Function.apply(x) + (0 if bias is None else bias)


def plain(x: torch.Tensor, packed: Any, bias: Any) -> torch.Tensor:
    return F.linear(x, packed.unpack().to(x.dtype), bias)


def by_checkpoint(x: torch.Tensor, packed: Any, bias: Any) -> torch.Tensor:
    return checkpoint(plain, x, packed, bias, use_reentrant=False)


PRODUCT = Answers(
    right=in_a_closure,
    wrong=[
        (plain, "W is kept for backward, unpacked"),
        (by_checkpoint, "x is kept for backward"),
        (edited(in_a_closure, "(x)", "(x.float())"), "but the output is not: the unpacked W is fp32"),
        (edited(in_a_closure, "(0 if bias is None else bias)", "0"), "The bias is missing"),
    ],
)


# --------------------------------------------------------------------------------------------------
# 17.3: product8
def row_by_row(x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """One token after the other, in floats that hold whole numbers."""
    found = []
    for token in x.reshape(-1, x.shape[-1]):
        each = token.abs().max() / 127
        whole = (token / each).round() if each > 0 else torch.zeros_like(token)
        found.append(codes.float() @ whole * each * scale[:, 0])
    return torch.stack(found).view(*x.shape[:-1], -1)


PRODUCT8 = Answers(
    right=row_by_row,
    wrong=[
        (edited(row_by_row, ".round()", ""), "You round nothing"),
        (edited(row_by_row, "token.abs().max()", "x.abs().max()"), "All tokens share one scale"),
        (edited(row_by_row, "codes.float() @ whole", "codes @ whole.to(torch.int8)"), "fit into int8"),
        (edited(row_by_row, " if each > 0 else torch.zeros_like(token)", ""), "a token may be all zeros"),
    ],
)


# --------------------------------------------------------------------------------------------------
# 17.4: largest_rank
def by_trying(shapes: list[tuple[int, int]], bits: int, room: int) -> int:
    held = 0
    for n_out, n_in in shapes:
        scales = {16: 0, 8: n_out, 4: n_out * n_in / 64}[bits]
        held += n_out * n_in * bits / 8 + 4 * scales
    rank = 0
    while held + 8 * (rank + 1) * sum(n_out + n_in for n_out, n_in in shapes) <= room:
        rank += 1
    return rank


LARGEST_RANK = Answers(
    right=by_trying,
    wrong=[
        (edited(by_trying, " + 4 * scales", ""), "You forget the scales"),
        (edited(by_trying, "+ 8 *", "+ 2 *"), "They also have gradients"),
        (edited(by_trying, "+ 8 *", "+ 16 *"), "in 16 *bits*"),
        (edited(by_trying, "n_out + n_in for", "n_in for"), "You count one factor"),
    ],
)

ANSWERS = {"17.1": PACKED, "17.2": PRODUCT, "17.3": PRODUCT8, "17.4": LARGEST_RANK}


class TestAnswers(JudgedAnswers):
    answers = ANSWERS


# --------------------------------------------------------------------------------------------------
# the lesson's own code
def test_the_lessons_layer_stores_and_computes_what_the_courses_does() -> None:
    lesson: dict[str, Any] = {"torch": torch}
    source = list(cells(SOURCES / "17_quantization.py"))
    for part in ("nf4 = ", "class Nf4Linear"):
        exec(next(code for code in source if part in code), lesson)
    torch.manual_seed(0)
    linear, x = nn.Linear(128, 16, bias=False), torch.randn(4, 128)
    frozen = FrozenLinear(linear, 4, torch.float32, nf4_pairs(torch.float32, torch.device("cpu")))
    four = lesson["Nf4Linear"](linear.weight)
    assert torch.allclose(lesson["nf4"], torch.tensor(nf4_code()), atol=1e-6)
    assert torch.allclose(four(x), F.linear(x, frozen.dense_weight()), atol=1e-5)
    assert four.packed.nbytes == frozen.weight.nbytes


def test_the_figure_shows_what_it_was_given() -> None:
    codes = {"three": (-1.0, 0.0, 1.0), "two": (-1.0, 1.0)}
    figure: Any = code_picture([-1.0, 0.0, 0.1, 1.0], codes, "Few values")
    weights, strokes = figure.axes
    assert [bar.get_height() for bar in weights.patches if bar.get_height()] == [1, 1, 1, 1]
    assert [tuple(row.get_positions()) for row in strokes.collections] == [*codes.values()]
    assert weights.get_xlim() == strokes.get_xlim() and "three: 3 values" in figure.alt


def test_controls_show_the_estimate_of_what_they_choose() -> None:
    chosen: dict[str, Any] = {"micro_batch": 1, "seq_len": 512, "precision": "bf16", "lora_rank": 16}
    shown = lora_sliders("llama3-8b", frozen_bits=4, **chosen)
    four = estimate(shown.run).total
    assert f"{four / 1e9:.2f} GB" in shown.picture.value and "Fits" in shown.picture.value
    shown.controls["frozen_bits"].value = 16
    assert estimate(shown.run).total > four + 10**10
    shown.controls["lora_targets"].value = ("attention", "mlp")
    assert shown.run.lora_targets == ("q", "k", "v", "out", "gate", "up", "down")
    shown.controls["lora_rank"].value = 0
    assert "Not possible" in shown.message and "freeze them with lora_rank" in shown.message
