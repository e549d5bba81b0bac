"""The character model that lessons train for real: repeatable and quick."""

import math

import pytest
import torch
from torch.nn.functional import cross_entropy, linear

from course_utils.lessons.shared import language_model as lm
from course_utils.lessons.shared.language_model import train_language_model
from course_utils.measuring.optimizers import make_optimizer
from course_utils.run import OPTIMIZERS


def test_the_same_seed_gives_the_same_training_and_the_global_dice_are_left_alone() -> None:
    before = torch.random.get_rng_state()
    models = (lm.language_model(seed=seed) for seed in (0, 0, 1))
    one, other, seeded = (train_language_model(steps=3, model=model).losses for model in models)
    assert one == other != seeded
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.parametrize(("optimizer", "rate"), [("sgd", 0.3), ("adamw", 3e-3)])
def test_it_learns(optimizer: str, rate: float) -> None:
    model = lm.language_model()
    made = make_optimizer(OPTIMIZERS[optimizer], list(model.named_parameters()))
    for part in (made, *getattr(made, "parts", ())):
        for group in part.param_groups:
            group["lr"] = rate
    trained = train_language_model(lambda _: made, steps=25, model=model)
    assert trained.losses[0] == pytest.approx(math.log(len(lm.vocabulary())), abs=0.3)  # knows nothing yet
    assert trained.final < 0.9 * trained.losses[0]


def test_mean_loss_is_that_of_every_whole_window() -> None:
    model = lm.language_model()
    tokens = lm.encode(lm.corpus())
    starts = range(0, len(tokens) - 100, 100)
    windows = [cross_entropy(model(tokens[None, k : k + 100])[0], tokens[k + 1 : k + 101]) for k in starts]
    assert lm.mean_loss(model, 100) == pytest.approx(torch.stack(windows).mean().item(), rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_products_are_torchs_own_to_the_last_bit_or_one_beside_it(dtype: torch.dtype) -> None:
    dice = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(8, 32, generator=dice).to(dtype).requires_grad_() for _ in range(2))
    plain = linear(x, weight)
    with lm.HalfProducts():
        widened = linear(x, weight)
    assert widened.dtype == dtype
    epsilon = torch.finfo(dtype).eps
    torch.testing.assert_close(widened, plain, rtol=epsilon, atol=epsilon)
    widened.sum().backward()
    assert x.grad is not None and x.grad.dtype == dtype
    with torch.autocast("cpu", dtype=dtype), lm.HalfProducts():
        from_fp32 = linear(x.float(), weight.float())
    assert torch.equal(from_fp32, widened)
