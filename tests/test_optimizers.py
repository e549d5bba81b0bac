"""The optimizers and precisions train: on the CPU, with real numbers, and the same whether watched or not."""

import pytest
import torch
from engine import Unwatched, tiny
from torch import nn

from course_utils.measuring.optimizers import Adam8bit, Lion
from course_utils.measuring.step import MasterOptimizer, Training, clip
from course_utils.run import OPTIMIZERS, TrainingRun

TINY = tiny("llama", layers=1, hidden=64, heads=2, ffn=96, vocab=64)
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


@pytest.mark.parametrize(
    "choices",
    [
        *({"optimizer": name} for name in OPTIMIZERS if "-" not in name),  # not each implementation
        {"precision": "tf32"},
        {"precision": "amp-bf16"},
        {"precision": "bf16"},
        *({"precision": name, "clip_grad_norm": 1.0, "accumulation_steps": 2} for name in MASTERS),
    ],
    ids=str,
)
def test_every_optimizer_and_precision_learns(choices):
    training = on_cpu(ON_CPU.replace(**choices))
    step(training, 12)
    assert training.losses == sorted(training.losses, reverse=True)
    assert training.losses[-1] < 0.96 * training.losses[0]


def test_lion_follows_the_sign_of_its_momentum():
    weight = nn.Parameter(torch.tensor([1.0, -2.0, 3.0]))
    weight.grad = torch.tensor([1.0, 1.0, 0.0])
    optimizer = Lion([weight], rate=0.1, weight_decay=0.5)
    optimizer.step()
    expected = torch.tensor([1.0, -2.0, 3.0]) * (1 - 0.1 * 0.5) - 0.1 * torch.tensor([1.0, 1.0, 0.0])
    assert torch.equal(weight.detach(), expected)
    # 0.9 · 0.01 − 0.1 · 0.01 is positive, 0.9 · 0.01 − 0.1 · 1 negative
    weight.grad = torch.tensor([-0.01, -1.0, 0.0])
    optimizer.step()
    expected = expected * (1 - 0.1 * 0.5) - 0.1 * torch.tensor([1.0, -1.0, 0.0])
    torch.testing.assert_close(weight.detach(), expected)


def test_the_8_bit_adam_follows_adam():
    torch.manual_seed(0)
    start = torch.randn(64, 65)
    target = torch.randn(64, 65)
    ours = nn.Parameter(start.clone())
    theirs = nn.Parameter(start.clone())
    eight = Adam8bit([ours], rate=1e-2)
    full = torch.optim.AdamW([theirs], lr=1e-2, weight_decay=0.01)
    for _ in range(30):
        for weight, optimizer in ((ours, eight), (theirs, full)):
            weight.grad = weight.detach() - target + 0.1 * torch.randn(64, 65)
            optimizer.step()
    assert (ours - theirs).norm() / (theirs.detach() - start).norm() < 0.1
    assert eight.state[ours]["first"].dtype == torch.uint8


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

    monkeypatch.setattr(training, "_forward_and_backward", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        step(training)
    assert not torch.backends.cuda.matmul.allow_tf32


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-master-fp32grad"])
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
