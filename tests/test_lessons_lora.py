"""Lesson 12's modules: fine-tuning, rounding, two factors, pictures and controls."""

import re

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from course_utils import estimate
from course_utils.benchmark.draw import shallow
from course_utils.estimating.states import frozen_matrix_bytes
from course_utils.estimating.step_time import model_flops
from course_utils.lessons.lora import by_hand as lora_by_hand
from course_utils.lessons.lora import quantization as q
from course_utils.lessons.lora.by_hand import adapter_parameters, fine_tune, merged, sonnets
from course_utils.lessons.lora.factored import orthogonal, split
from course_utils.lessons.lora.figures import code_picture, counts, histograms, lora_picture
from course_utils.lessons.shared.language_model import corpus, encode, language_model, mean_loss, vocabulary
from course_utils.networks import network_for
from course_utils.networks.frozen import FrozenLinear, nf4_code, nf4_pairs
from course_utils.networks.lora import LoraLinear
from course_utils.run import TrainingRun


def test_the_second_text_is_written_in_the_first_ones_characters() -> None:
    assert 2_500 < len(sonnets()) < 4_000 and set(sonnets()) <= set(vocabulary())
    assert sonnets().startswith("shall i compare thee to a summers day.")


def test_mean_loss_is_that_of_every_whole_window() -> None:
    model, text = language_model(), corpus()[:100]
    tokens = encode(text)
    windows = [nn.functional.cross_entropy(model(tokens[None, k : k + 32])[0], tokens[k + 1 : k + 33])
               for k in (0, 32, 64)]  # fmt: skip
    assert mean_loss(model, text) == pytest.approx(torch.stack(windows).mean().item(), rel=1e-5)


def test_lora_learns_its_factors_alone_and_merges() -> None:
    base = language_model()
    done = fine_tune(4, steps=20, model=base)
    assert done.trained == 2 * 4 * ((64 + 3 * 64) + (64 + 64) + 2 * (64 + 256))
    assert done.new < mean_loss(base, sonnets()) - 0.1
    plain = merged(done.model)
    assert mean_loss(plain, sonnets()) == pytest.approx(done.new, abs=1e-4)
    assert [name for name, _ in plain.named_parameters()] == [name for name, _ in base.named_parameters()]
    assert mean_loss(base, sonnets()) == pytest.approx(mean_loss(language_model(), sonnets()))  # it was copied


def test_full_fine_tuning_moves_everything_and_each_way_has_a_rate_of_its_own() -> None:
    whole, factors = (fine_tune(rank, steps=1, model=language_model()) for rank in (0, 2))
    assert (whole.rate, factors.rate) == (lora_by_hand.FULL_RATE, lora_by_hand.FACTOR_RATE)
    assert whole.trained == sum(weight.numel() for weight in language_model().parameters())


@pytest.mark.parametrize("rank", [2, 8, 32])
def test_a_first_step_of_factors_moves_the_matrix_by_less_than_the_rate(rank: int) -> None:
    """About η·√(r/n_in), which is why factors take a larger rate."""
    learner = fine_tune(rank, steps=1, model=language_model(), rate=1e-3).model
    layers = [layer for layer in learner.modules() if isinstance(layer, LoraLinear) and layer.base.in_features == 64]
    moved = [(layer.B @ layer.A).detach().square().mean().sqrt().item() / 1e-3 for layer in layers]
    assert moved == pytest.approx([(rank / 64) ** 0.5] * 6, rel=0.35)


def test_lora_takes_two_units_of_work_and_the_formula_knows() -> None:
    """Counted on the meta device: backward makes no dL/dW for a frozen matrix."""
    run = TrainingRun(shallow("gpt2", 2), 1, 64, "fp32", attention="eager")
    units = []
    for rank, targets in ((0, ()), (1, ("attention", "mlp"))):
        adapted = run.replace(lora_rank=rank, lora_targets=targets)
        with torch.device("meta"):
            network, tokens = network_for(adapted), torch.zeros(1, 64, dtype=torch.long)
        with FlopCounterMode(display=False) as counter:
            network(tokens).sum().backward()
        units.append(counter.get_total_flops())
        assert model_flops(adapted) == pytest.approx(units[-1], rel=0.03)
    assert units[1] / units[0] == pytest.approx(2 / 3, rel=0.03)


def test_the_pretrained_model_comes_as_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    model = language_model()
    monkeypatch.setattr(lora_by_hand, "_pretrained", lambda: model)
    first = lora_by_hand.pretrained()
    nn.init.zeros_(first.embedding.weight)
    assert lora_by_hand.pretrained().embedding.weight.any()


def test_the_count_is_that_of_the_modules() -> None:
    run = TrainingRun("tiny-llama", 1, 64, lora_rank=8, lora_targets=("attention", "mlp"))
    learning = sum(weight.numel() for weight in network_for(run).parameters() if weight.requires_grad)
    assert adapter_parameters(run.model, 8, run.lora_targets) == learning


def test_absmax_keeps_zero_and_the_largest_and_is_off_by_half_a_step() -> None:
    values = torch.tensor([0.7, -0.04, 0.0, 0.33])
    assert torch.allclose(q.absmax(values, 4), torch.tensor([0.7, 0.0, 0.0, 0.3]))
    normal = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    for group in (None, 64, 16):
        step = q.grouped(normal, group).abs().amax(dim=1, keepdim=True) / 7
        off = q.grouped(q.absmax(normal, 4, group) - normal, group).abs()
        assert bool((off <= step * 0.5001).all()) and off.max() > 0.4 * step.min()
    assert not q.absmax(torch.zeros(8), 4).any()
    even = torch.linspace(-1, 1, 10_001)
    assert q.uniform_error(even, 6) == pytest.approx(q.relative_error(even, q.absmax(even, 6)), rel=0.05)


def test_what_cannot_be_cut_evenly_is_refused() -> None:
    with pytest.raises(ValueError, match="groups of 7"):
        q.absmax(torch.ones(16), 4, 7)


def test_a_zero_point_uses_the_whole_grid() -> None:
    values = torch.linspace(-0.17, 4, 1000)
    rounded = q.zero_point(values, 4)
    assert len(rounded.unique()) == 16 and 0.0 in rounded
    assert q.relative_error(values, rounded) < 0.6 * q.relative_error(values, q.absmax(values, 4))
    assert not q.zero_point(torch.zeros(4), 4).any()
    assert q.zero_point(torch.full((4,), 2.0), 4) == pytest.approx([2.0] * 4)


def test_nearest_is_what_frozen_layers_store() -> None:
    torch.manual_seed(0)
    linear = nn.Linear(128, 16, bias=False)
    stored = FrozenLinear(linear, 4, torch.float32, nf4_pairs(torch.float32, torch.device("cpu"))).dense_weight()
    assert torch.allclose(q.nearest(linear.weight.detach(), nf4_code(), 64), stored, atol=1e-7)
    assert q.bits_per_number(4, 64) * 4096 * 4096 / 8 == frozen_matrix_bytes((4096, 4096), 4)


def test_clusters_find_the_values_that_are_there_and_never_lose_to_a_grid() -> None:
    dice = torch.Generator().manual_seed(0)
    few = torch.tensor([-3.0, 0.5, 1.0, 7.0])[torch.randint(4, (500,), generator=dice)]
    assert torch.allclose(q.clusters(few, 4), few)
    normal = torch.randn(5000, generator=dice)
    assert q.relative_error(normal, q.clusters(normal, 16)) < q.relative_error(normal, q.absmax(normal, 4))


def test_only_the_blocks_matrices_are_rounded_and_in_a_copy() -> None:
    model = language_model()
    zeroed = q.with_rounded_blocks(model, torch.zeros_like)
    changed = {name for (name, one), other in zip(model.named_parameters(), zeroed.parameters(), strict=True)
               if not torch.equal(one, other)}  # fmt: skip
    assert changed == set(q.block_matrices(model)) and len(changed) == 8


def test_calibration_finds_the_largest_inputs_and_leaves_no_hook() -> None:
    model = language_model()
    largest = q.calibrate(model, corpus()[:200])
    assert len(largest) == 8 and min(largest.values()) > 0
    assert not any(layer._forward_pre_hooks for layer in model.modules())
    exact = mean_loss(model, corpus())
    near, far = (mean_loss(q.with_rounded_inputs(model, largest, bits), corpus()) for bits in (8, 2))
    assert abs(near - exact) < 0.01 and near != exact
    assert abs(far - exact) > abs(near - exact)
    assert mean_loss(model, corpus()) == exact


def test_even_values_lose_small_moments_and_dynamic_ones_do_not() -> None:
    weight = nn.Parameter(torch.zeros(64, 64))
    optimizer = torch.optim.AdamW([weight, nn.Parameter(torch.zeros(3))])
    optimizer.state[weight]["exp_avg_sq"] = torch.logspace(-6, 0, 4096).view(64, 64)
    tiny = torch.full((64, 64), 1e-3)
    tiny.view(-1, 256)[:, 0] = 1.0
    optimizer.state[optimizer.param_groups[0]["params"][1]]["exp_avg_sq"] = torch.ones(3)  # too small to be quantized
    assert q.zeros_in_second_moment(optimizer) == (0.0, 0.0)  # a block spans less than three powers of ten
    optimizer.state[weight]["exp_avg_sq"] = tiny
    assert q.zeros_in_second_moment(optimizer) == (255 / 256, 0.0)


def test_the_even_adam_is_the_8_bit_adam_with_other_values() -> None:
    optimizer = q.even_adam([nn.Parameter(torch.ones(64, 64))])
    signed, unsigned = optimizer.codebooks
    assert signed.values.diff() == pytest.approx([1 / 127] * 254, abs=1e-6) and 0.0 in signed.values
    assert len(unsigned.values) == 256 and unsigned.values[0] == 0 and unsigned.values[-1] == 1


def test_q_is_orthogonal_and_repeatable() -> None:
    Q = orthogonal(32)
    assert torch.allclose(Q @ Q.T, torch.eye(32), atol=1e-5) and torch.equal(Q, orthogonal(32))


WEIGHT = torch.randn(96, 64, generator=torch.Generator().manual_seed(0))


def test_a_split_has_as_many_values_as_its_bits_say_and_each_step_helps() -> None:
    errors = []
    for steps in (1, 2, 4, 8):
        found = split(WEIGHT, steps)
        assert len(found.U.unique()) * len(found.V.unique()) <= 2**steps
        errors.append(q.relative_error(WEIGHT, found.dense))
    assert errors == sorted(errors, reverse=True) and errors[-1] < 0.15


def test_a_second_basis_leaves_less_and_one_step_is_the_best_of_its_kind() -> None:
    assert not split(WEIGHT, 4, one_basis=True).V.any()
    two, one = (q.relative_error(WEIGHT, split(WEIGHT, 4, one_basis=alone).dense) for alone in (False, True))
    assert two < 0.9 * one
    size = split(WEIGHT, 1, one_basis=True).U.abs().max()
    off = [(WEIGHT - c * WEIGHT.sign()).norm().item() for c in (0.9 * size, size, 1.1 * size)]
    assert off[1] == min(off)


def test_the_picture_of_lora_is_to_scale_andcounts() -> None:
    figure = lora_picture(4096, 2048, 64)
    sides = {name: (float(width), float(height)) for width, height, name in
             re.findall(r'width="([\d.]+)" height="([\d.]+)"[^>]*data-name="([^"]+)"', figure.svg)}  # fmt: skip
    assert sides["W, frozen"] == (110.0, 220.0)
    assert sides["B, zero at first"] == (pytest.approx(3.4, abs=0.1), 220.0)
    assert sides["A, Gaussian"] == (110.0, pytest.approx(3.4, abs=0.1))
    assert f"{64 * (4096 + 2048):,} numbers learn" in figure.alt


def test_a_code_is_drawn_stroke_by_stroke() -> None:
    figure = code_picture([-1.0, 0.0, 0.1, 1.0], {"three": (-1.0, 0.0, 1.0), "two": (-1.0, 1.0)}, "Few values")
    assert figure.svg.count("data-code=") == 5 and "three: 3 values" in figure.alt


def test_histograms_count_every_value_within_reach() -> None:
    assert counts([0.0, 0.1, 9.0, -1.0, 1.0, -1.4, -9.0], reach=1.0, bins=2) == [1, 3]
    assert "Peaks." in histograms({"W": [0.0, 0.1, 9.0], "U": [0.05] * 3}, "Peaks", reach=1.0).alt


def test_the_controls_draw_what_they_say() -> None:
    from course_utils.lessons.lora.widget import lora_explorer

    shown = lora_explorer("llama3-8b", micro_batch=1, seq_len=512, precision="bf16", lora_rank=16, frozen_bits=4)
    assert f"{estimate(shown.run).total / 1e9:.1f} GB" in shown.picture.value and "Fits" in shown.picture.value
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

    learn, _, bit, four, _ = (question.right.text for question in quiz(12).questions)
    layer = LoraLinear(nn.Linear(4096, 11008, device="meta"), 16, torch.float32)
    assert learn == f"{layer.A.numel() + layer.B.numel():,}"
    values = torch.linspace(-1, 1, 100_001)
    four_bits, eight_bits = (q.relative_error(values, q.absmax(values, bits)) for bits in (4, 8))
    assert float(bit) == pytest.approx(four_bits / eight_bits, rel=0.05)
    stored = FrozenLinear(nn.Linear(4096, 14336, bias=False), 4, torch.bfloat16)
    assert four == f"{(stored.weight.nbytes + stored.scale.nbytes) / 1e6:.1f} MB"
