"""Lesson 16's modules: its texts, pictures and controls; and what its lines of torch rely on."""

import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from torch_statements import SOURCES, cells

from course_utils import estimate
from course_utils.estimating.step_time import model_flops
from course_utils.evidence.frozen_runs import changed
from course_utils.lessons.lora.figures import code_picture, lora_picture
from course_utils.lessons.lora.texts import sonnets
from course_utils.lessons.shared.language_model import corpus, encode, language_model, mean_loss, vocabulary
from course_utils.networks import network_for
from course_utils.networks.frozen import FrozenLinear, nf4_code, nf4_pairs
from course_utils.networks.lora import LoraLinear
from course_utils.run import TrainingRun


def test_the_second_text_is_written_in_the_first_ones_characters() -> None:
    assert 2_500 < len(sonnets()) < 4_000 and set(sonnets()) <= set(vocabulary())
    assert sonnets().startswith("shall i compare thee to a summers day.")


def test_mean_loss_is_that_of_every_whole_window() -> None:
    model = language_model()
    text = corpus()[:100]
    tokens = encode(text)
    windows = [
        nn.functional.cross_entropy(model(tokens[None, k : k + 32])[0], tokens[k + 1 : k + 33])
        for k in (0, 32, 64)
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


def test_the_picture_of_lora_is_to_scale_andcounts() -> None:
    figure = lora_picture(4096, 2048, 64)
    sides = {
        name: (float(width), float(height))
        for width, height, name in re.findall(
            r'width="([\d.]+)" height="([\d.]+)"[^>]*data-name="([^"]+)"', figure.svg
        )
    }
    assert sides["W, frozen"] == (90.0, 180.0)
    assert sides["B, zero at first"] == (pytest.approx(2.8, abs=0.1), 180.0)
    assert sides["A, Gaussian"] == (90.0, pytest.approx(2.8, abs=0.1))
    assert f"{64 * (4096 + 2048):,} numbers learn" in figure.alt


def test_a_code_is_drawn_stroke_by_stroke() -> None:
    figure = code_picture(
        [-1.0, 0.0, 0.1, 1.0], {"three": (-1.0, 0.0, 1.0), "two": (-1.0, 1.0)}, "Few values"
    )
    assert figure.svg.count("data-code=") == 5 and "three: 3 values" in figure.alt


def test_the_controls_draw_what_they_say() -> None:
    from course_utils.lessons.lora.widget import lora_sliders

    shown = lora_sliders(
        "llama3-8b", micro_batch=1, seq_len=512, precision="bf16", lora_rank=16, frozen_bits=4
    )
    assert f"{estimate(shown.run).total / 1e9:.1f} GB" in shown.picture.value
    assert "Fits" in shown.picture.value
    four = estimate(shown.run).total
    shown.controls["frozen_bits"].value = 16
    assert estimate(shown.run).total > four + 10**10
    shown.controls["lora_targets"].value = ("attention", "mlp")
    assert shown.run.lora_targets == ("q", "k", "v", "out", "gate", "up", "down")
    shown.controls["lora_rank"].value = 0
    assert "Not possible" in shown.message and "freeze them with lora_rank" in shown.message
    shown.controls["frozen_bits"].value = None
    assert "Does not fit" in shown.message and not shown.run.lora_rank


def test_the_quizcounts_as_tensors_do() -> None:
    from course_utils.lessons import quiz

    learn, _, bit, four, _ = (question.right.text for question in quiz(16).questions)
    layer = LoraLinear(nn.Linear(4096, 11008, device="meta"), 16, torch.float32)
    assert learn == f"{layer.A.numel() + layer.B.numel():,}"
    values = torch.linspace(-1, 1, 100_001)
    off = [((values * limit).round() / limit - values).norm().item() for limit in (2**3 - 1, 2**7 - 1)]
    assert float(bit) == pytest.approx(off[0] / off[1], rel=0.05)
    stored = FrozenLinear(nn.Linear(4096, 14336, bias=False), 4, torch.bfloat16)
    assert four == f"{(stored.weight.nbytes + stored.scale.nbytes) / 1e6:.1f} MB"


def test_the_lessons_own_layers_store_what_the_courses_do() -> None:
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
    assert torch.allclose(four(x), nn.functional.linear(x, frozen.dense_weight(), linear.bias), atol=1e-5)
    assert four.packed.nbytes == frozen.weight.nbytes
    ours = lesson["Lora"](linear, 4, 4)
    theirs = LoraLinear(linear, 4, torch.float32)
    nn.init.normal_(ours.B)
    theirs.load_state_dict(ours.state_dict())
    assert torch.allclose(ours(x), theirs(x), atol=1e-5)


def test_with_a_fixed_alpha_a_first_step_shrinks_with_the_root_of_the_rank() -> None:
    """The lesson's alpha/r and alpha/√r, with its own layer: 16 times the rank, a quarter of the step."""
    lesson: dict[str, Any] = {"torch": torch, "nn": nn}
    source = cells(SOURCES / "16_lora_and_quantization.py")
    exec(next(code for code in source if "class Lora(nn.Module)" in code), lesson)
    torch.manual_seed(0)
    x = torch.randn(256, 1024)
    moved = dict[tuple[int, float], float]()
    for r in (4, 64):
        for power in (1.0, 0.5):
            layer = lesson["Lora"](nn.Linear(1024, 64), r, 16)
            layer.scale = 16 / r**power
            optimizer = torch.optim.Adam([layer.A, layer.B], lr=1e-4)
            (layer(x) - torch.randn(256, 64)).square().mean().backward()
            optimizer.step()
            moved[r, power] = (layer.scale * layer.B @ layer.A).square().mean().sqrt().item()
    assert moved[4, 1.0] / moved[64, 1.0] == pytest.approx(4, rel=0.1)
    assert moved[4, 0.5] / moved[64, 0.5] == pytest.approx(1, rel=0.1)
    assert moved[4, 1.0] == pytest.approx(1e-4 * 16 / (4 * 1024) ** 0.5, rel=0.1)
