"""Lesson 16: answers and their hints; its layers against other routes; its figures and controls."""

from typing import Any

import pytest
import torch
from checking import Answers, JudgedAnswers
from edits import edited
from lesson_source import SOURCES, cells
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from course_utils import estimate
from course_utils.estimating.step_time import model_flops
from course_utils.evidence.frozen_runs import changed
from course_utils.lessons.lora.figures import code_picture, lora_picture
from course_utils.lessons.lora.widget import lora_sliders
from course_utils.lessons.shared.language_model import corpus, encode, language_model, mean_loss
from course_utils.networks import network_for
from course_utils.networks.frozen import FrozenLinear, nf4_code, nf4_pairs
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
# 16.2: packed
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
# 16.3: product
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
# 16.4: product8
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

ANSWERS = {"16.1": LORA_LINEAR, "16.2": PACKED, "16.3": PRODUCT, "16.4": PRODUCT8}


class TestAnswers(JudgedAnswers):
    answers = ANSWERS


# --------------------------------------------------------------------------------------------------
# the lesson's own code
def test_mean_loss_is_that_of_every_whole_window() -> None:
    model = language_model()
    text = corpus()[:100]
    tokens = encode(text)
    windows = [
        F.cross_entropy(model(tokens[None, k : k + 32])[0], tokens[k + 1 : k + 33]) for k in (0, 32, 64)
    ]
    assert mean_loss(model, text) == pytest.approx(torch.stack(windows).mean().item(), rel=1e-5)


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


def test_layers_in_the_lesson_store_and_compute_what_the_course_layers_do() -> None:
    lesson: dict[str, Any] = {"torch": torch}
    source = list(cells(SOURCES / "16_lora_and_quantization.py"))
    for part in ("class Lora(nn.Module)", "nf4 = ", "class Nf4Linear"):
        exec(next(code for code in source if part in code), lesson)
    torch.manual_seed(0)
    linear = nn.Linear(128, 16)
    x = torch.randn(4, 128)
    frozen = FrozenLinear(linear, 4, torch.float32, nf4_pairs(torch.float32, torch.device("cpu")))
    four = lesson["Nf4Linear"](linear)
    assert torch.allclose(lesson["nf4"], torch.tensor(nf4_code()), atol=1e-6)
    assert torch.allclose(four(x), F.linear(x, frozen.dense_weight(), linear.bias), atol=1e-5)
    assert four.packed.nbytes == frozen.weight.nbytes
    ours = lesson["Lora"](linear, 4, 4)
    theirs = LoraLinear(linear, 4, torch.float32)
    nn.init.normal_(ours.B)
    theirs.load_state_dict(ours.state_dict())
    assert torch.allclose(ours(x), theirs(x), atol=1e-5)


def test_figures_show_what_they_were_given() -> None:
    drawn: Any = lora_picture(4096, 2048, 64)
    matrices = drawn.axes[0]
    assert f"{64 * (4096 + 2048):,} numbers learn" in drawn.alt
    sizes = [(matrix.get_height(), matrix.get_width()) for matrix in matrices.patches]
    assert sizes == [pytest.approx(size) for size in ((4096, 2048), (4096, 64), (64, 2048))]
    drawn.draw_without_rendering()
    box = matrices.get_window_extent()
    assert box.width / matrices.get_xlim()[1] == pytest.approx(box.height / 4096), "one scale"
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
