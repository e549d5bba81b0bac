"""The optimizers and precisions train: on the CPU, with real numbers, and the same whether watched or not."""

import pytest
import torch
from engine import Unwatched, tiny
from torch import nn

from course_utils.measuring.optimizers import Adam8bit, Lion, _decode, _encode, make_codebooks
from course_utils.measuring.step import MasterOptimizer, Training, clip
from course_utils.measuring.tracing import trace_on_cpu
from course_utils.run import OPTIMIZERS, TrainingRun

TINY = tiny("llama", hidden=64, heads=2, vocab=64)
ON_CPU = TrainingRun(TINY, 2, 16, "fp32", "adamw", "eager")
MASTERS = ("bf16-master", "fp16-master", "bf16-master-fp32grad")


def on_cpu(run: TrainingRun) -> Training:
    torch.manual_seed(0)
    return Training(run, "cpu", simulated=False)


def step(training: Training, steps: int = 1) -> None:
    for _ in range(steps):
        training.step(Unwatched())


def weights(training: Training) -> list[torch.Tensor]:
    return [weight.detach().clone() for weight in training.network.parameters()]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_learns_a_batch_by_heart(optimizer):
    training = on_cpu(ON_CPU.replace(optimizer=optimizer))
    step(training, 40)
    assert training.losses[-1] < 0.9 * training.losses[0]


@pytest.mark.parametrize("precision", ["tf32", "amp-bf16", "bf16", *MASTERS])
def test_every_precision_learns_a_batch_by_heart(precision):
    training = on_cpu(ON_CPU.replace(precision=precision, clip_grad_norm=1.0, accumulation_steps=2))
    step(training, 40)
    assert training.losses[-1] < 0.9 * training.losses[0]


def test_lions_first_step_is_the_gradients_sign():
    weight = nn.Parameter(torch.tensor([1.0, -2.0, 3.0]))
    weight.grad = torch.tensor([0.5, -1e-6, 0.0])
    optimizer = Lion([weight], rate=0.1, weight_decay=0.5)
    optimizer.step()
    expected = torch.tensor([1.0, -2.0, 3.0]) * (1 - 0.1 * 0.5) - 0.1 * torch.tensor([1.0, -1.0, 0.0])
    assert torch.equal(weight.detach(), expected)
    assert torch.allclose(optimizer.state[weight]["momentum"], 0.01 * weight.grad)


def test_lions_second_step_follows_its_momentum():
    weight = nn.Parameter(torch.zeros(2))
    optimizer = Lion([weight], rate=0.1, weight_decay=0.0)
    weight.grad = torch.tensor([1.0, 1.0])
    optimizer.step()
    # 0.9 · 0.01 − 0.1 · 0.01 is positive, 0.9 · 0.01 − 0.1 · 1 negative
    weight.grad = torch.tensor([-0.01, -1.0])
    optimizer.step()
    assert torch.allclose(weight.detach(), torch.tensor([-0.2, 0.0]))


def test_codebooks_have_256_values_in_order():
    for codebook, lowest in zip(make_codebooks("cpu"), (-0.993, 0.0), strict=True):
        values = codebook.values
        assert len(values) == 256 and len(codebook.borders) == 255
        assert bool((values[1:] > values[:-1]).all()) and 0.0 in values and values[-1] == 1
        assert values[0] == pytest.approx(lowest, abs=1e-3)


def test_eight_bits_keep_a_moment_to_a_hundredth_of_its_blocks_largest():
    moment = torch.randn(40, 256) * 10.0 ** torch.arange(-20, 20).unsqueeze(1)
    codes = torch.zeros(40, 256, dtype=torch.uint8)
    scales = torch.zeros(40, 1)
    _encode(moment.clone(), codes, scales, make_codebooks("cpu").signed)
    error = (_decode(codes, scales, make_codebooks("cpu").signed) - moment).abs()
    assert bool((error <= 0.0075 * moment.abs().amax(dim=1, keepdim=True)).all())


@pytest.mark.parametrize("shape", [(64, 65), (100, 1000), (63, 65)], ids=str)
def test_the_8_bit_adam_follows_adam(shape):
    torch.manual_seed(0)
    start = torch.randn(shape)
    target = torch.randn(shape)
    ours = nn.Parameter(start.clone())
    theirs = nn.Parameter(start.clone())
    eight = Adam8bit([ours], rate=1e-2)
    full = torch.optim.AdamW([theirs], lr=1e-2, weight_decay=0.01)
    for _ in range(30):
        for weight, optimizer in ((ours, eight), (theirs, full)):
            weight.grad = weight.detach() - target + 0.1 * torch.randn(shape)
            optimizer.step()
    apart = (ours - theirs).norm() / (theirs.detach() - start).norm()
    assert apart < 0.1
    in_8_bits = eight.state[ours]["first"].dtype == torch.uint8
    assert in_8_bits == (start.numel() >= 4096)


def test_a_large_parameter_is_updated_piece_by_piece_as_if_at_once(monkeypatch):
    torch.manual_seed(0)
    start = torch.randn(100, 100)
    gradient = torch.randn(100, 100)
    results = []
    for piece in (2**24, 1024):
        monkeypatch.setattr("course_utils.measuring.optimizers.PIECE_8BIT", piece)
        weight = nn.Parameter(start.clone())
        optimizer = Adam8bit([weight])
        for _ in range(3):
            weight.grad = gradient
            optimizer.step()
        results.append(weight.detach())
    assert torch.equal(*results)


def test_muon_takes_matrices_of_blocks_and_adamw_the_rest():
    training = on_cpu(ON_CPU.replace(optimizer="muon"))
    step(training)
    assert isinstance(training.optimizer, torch.optim.Optimizer)
    for name, weight in training.network.named_parameters():
        by_muon = name.startswith("blocks.") and weight.dim() == 2
        assert ("momentum_buffer" in training.optimizer.state[weight]) == by_muon, name


def test_a_step_that_overflows_is_left_out_and_halves_the_scale():
    training = on_cpu(ON_CPU.replace(precision="fp16-master"))
    step(training, 3)
    scaler, optimizer = training.scaler, training.optimizer
    assert scaler is not None and isinstance(optimizer, MasterOptimizer)
    before = weights(training)
    scale = scaler.get_scale()
    for weight in optimizer.weights:
        weight.grad = torch.full_like(weight, float("inf") if weight is optimizer.weights[-1] else 1.0)
    training._update()
    assert scaler.get_scale() == scale / 2
    assert all(torch.equal(*pair) for pair in zip(before, weights(training), strict=True))


def test_fp16_gradients_are_unscaled_in_fp32():
    training = on_cpu(ON_CPU.replace(precision="fp16-master", optimizer="sgd"))
    scaler, optimizer = training.scaler, training.optimizer
    assert scaler is not None and isinstance(optimizer, MasterOptimizer)
    scaler.scale(torch.zeros(()))  # the scaler makes its scale when it is first used
    masters = [master.detach().clone() for master in optimizer.masters]
    gradients = [torch.randn_like(weight) for weight in optimizer.weights]
    for weight, gradient in zip(optimizer.weights, gradients, strict=True):
        weight.grad = gradient.clone()
    scale = scaler.get_scale()
    training._update()
    for before, after, gradient in zip(masters, optimizer.masters, gradients, strict=True):
        torch.testing.assert_close(after.detach(), before - 1e-2 * gradient.float() / scale)


def test_main_gradients_add_in_fp32_what_bf16_would_lose():
    training = on_cpu(ON_CPU.replace(precision="bf16-master-fp32grad"))
    optimizer = training.optimizer
    assert isinstance(optimizer, MasterOptimizer)
    weight, master = optimizer.weights[0], optimizer.masters[0]
    for factor in (1.0, 2.0**-12):
        (weight * factor).sum().backward()
    assert weight.grad is None and master.grad is not None
    assert bool((master.grad == 1 + 2.0**-12).all())
    assert bool((torch.tensor(1.0, dtype=torch.bfloat16) + 2.0**-12 == 1).all())


def test_tf32_is_allowed_within_the_step_alone(monkeypatch):
    training = on_cpu(ON_CPU.replace(precision="tf32"))
    seen = []
    monkeypatch.setattr(
        training, "_forward_and_backward", lambda _: seen.append(torch.backends.cuda.matmul.allow_tf32)
    )
    step(training)
    assert seen == [True] and not torch.backends.cuda.matmul.allow_tf32

    def fails(_):
        raise KeyError("of a network of one's own")

    monkeypatch.setattr(training, "_forward_and_backward", fails)
    with pytest.raises(KeyError):
        step(training)
    assert not torch.backends.cuda.matmul.allow_tf32


@pytest.mark.parametrize("precision", ["fp32", "tf32"])
@pytest.mark.parametrize("chosen", ["none", "ieee", "tf32"])
def test_what_a_learner_has_chosen_for_fp32_products_stays(precision, chosen):
    """By torch's newer setting, beside which its older one cannot even be read."""
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = chosen
    try:
        step(on_cpu(ON_CPU.replace(precision=precision)))
        assert matmul.fp32_precision == chosen
    finally:
        matmul.fp32_precision = before


@pytest.mark.parametrize("precision", ["fp32", "amp-bf16", "bf16", "bf16-master", "bf16-master-fp32grad"])
def test_gradients_are_clipped_to_the_norm(precision):
    training = on_cpu(ON_CPU.replace(precision=precision, clip_grad_norm=0.01))
    training._forward_and_backward(Unwatched())
    gradients = [owner.grad for owner in training.gradient_owners() if owner.grad is not None]
    assert torch.nn.utils.get_total_norm([gradient.float() for gradient in gradients]) > 0.05
    training._clip(0.01)
    norm = torch.nn.utils.get_total_norm([gradient.float() for gradient in gradients])
    assert norm.item() == pytest.approx(0.01, rel=0.02)


def test_scaled_gradients_are_clipped_as_if_they_were_not():
    owners = [nn.Parameter(torch.zeros(64, 64, dtype=torch.float16)) for _ in range(3)]
    for owner in owners:
        owner.grad = torch.full_like(owner, 1000.0)  # a norm of 110,851: beyond fp16's 65,504
    clip(owners, 0.5, scale=torch.tensor(4096.0))
    gradients = [owner.grad.float() / 4096 for owner in owners if owner.grad is not None]
    assert torch.nn.utils.get_total_norm(gradients).item() == pytest.approx(0.5, rel=0.01)


@pytest.mark.parametrize("precision", ["fp32", *MASTERS])
def test_gradients_that_are_not_set_to_none_are_zero(precision):
    run = ON_CPU.replace(precision=precision, set_to_none=False)
    training = on_cpu(run)
    other = on_cpu(run.replace(set_to_none=True))
    step(training, 2)
    step(other, 2)
    for owner in training.gradient_owners():
        assert owner.grad is not None and not owner.grad.any()
    assert all(owner.grad is None for owner in other.gradient_owners())
    assert all(torch.equal(*pair) for pair in zip(weights(training), weights(other), strict=True))


@pytest.mark.parametrize("precision", ["fp16-master", "amp-fp16"])
def test_with_loss_scaling_the_first_update_is_done(precision):
    run = TrainingRun(tiny("gpt2"), 1, 16, precision, attention="eager")
    training = Training(run, "cpu", simulated=False)
    training.step(Unwatched())
    names = {name.split(" of ")[0] for name, _ in training.named_states()}
    assert {"exp_avg", "exp_avg_sq"} <= names and not training.skipped_an_update


def test_an_update_that_was_skipped_is_said(monkeypatch):
    monkeypatch.setattr("course_utils.measuring.step.LOSS_SCALE", 2.0**16)
    run = TrainingRun(tiny("gpt2"), 1, 16, "fp16-master", attention="eager")
    assert "an update was skipped" in str(trace_on_cpu(run, 1, "").provenance)
