"""The loss piece by piece: the same number and the same gradients, and one piece of the logits at a time."""

import pytest
import torch
from engine import tiny
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from course_utils.estimating.step_time import chunked_loss_flops
from course_utils.measuring.simulated import simulated_gpu
from course_utils.measuring.tracker import Tracker
from course_utils.networks import chunked_loss, loss_of
from course_utils.run import TrainingRun
from course_utils.units import round_up

CHUNKS = [1, 2, 3, 7, 48]


def features_head_targets(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, nn.Linear, torch.Tensor]:
    torch.manual_seed(0)
    features = torch.randn(2, 24, 16, dtype=dtype, requires_grad=True)
    return features, nn.Linear(16, 50, bias=False, dtype=dtype), torch.randint(50, (2, 24))


@pytest.mark.parametrize("chunks", CHUNKS)
def test_loss_and_gradients_equal_the_plain_ones_to_rounding(chunks):
    features, head, targets = features_head_targets()
    plain = loss_of(head(features), targets)
    expected = torch.autograd.grad(plain, [features, head.weight])
    loss = chunked_loss(features, head, targets, chunks)
    torch.testing.assert_close(loss, plain, rtol=1e-14, atol=0)
    for found, gradient in zip(torch.autograd.grad(loss, [features, head.weight]), expected, strict=True):
        torch.testing.assert_close(found, gradient, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("chunks", CHUNKS)
def test_pieces_cost_one_more_product_with_the_head(chunks):
    features, head, targets = features_head_targets()
    counted = []
    for pieces in (1, chunks):
        with FlopCounterMode(display=False) as counter:
            loss = chunked_loss(features, head, targets, pieces) if pieces > 1 else loss_of(head(features), targets)
            loss.backward()
        counted.append(counter.get_total_flops())
    run = TrainingRun(tiny("gpt2", hidden=16, vocab=50), 2, 24, loss_chunks=chunks, attention="eager")
    assert counted[1] - counted[0] == chunked_loss_flops(run)


def test_a_last_piece_that_is_smaller_counts_for_less():
    features, head, targets = features_head_targets()
    with torch.no_grad():
        head.weight[targets[-1, -1]] = -100 * features[-1, -1]  # very wrong, alone with 7 others at the end
    plain = loss_of(head(features), targets)
    assert targets.numel() % 10 == 8
    torch.testing.assert_close(chunked_loss(features, head, targets, 5), plain, rtol=1e-14, atol=0)


def test_half_precision_does_not_overflow():
    features, _, _ = features_head_targets()
    wide = features.detach().half().repeat(64, 8, 1)  # 24,576 tokens: their losses add up to more than fp16 can hold
    targets = torch.zeros(wide.shape[:2], dtype=torch.long)
    loss = chunked_loss(wide, lambda x: 4 * x, targets, 64)
    assert torch.isfinite(loss)
    assert float(loss) * targets.numel() > torch.finfo(torch.float16).max


@pytest.mark.parametrize("chunks", [1, 4])
def test_the_logits_of_one_piece_live_at_a_time(chunks):
    """bf16 on a simulated GPU: the logits, their log-softmax and its gradient are all of one piece."""
    b, s, h, V = 4, 256, 64, 1024
    with simulated_gpu("flash"):
        features = torch.empty(b, s, h, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        head = nn.Linear(h, V, bias=False, dtype=torch.bfloat16, device="cuda")
        targets = torch.randint(V, (b, s), device="cuda")
        with Tracker("cuda") as tracker:
            tracker.bind("parameters", head.parameters())
            tracker.bind("inputs", [features, targets])
            with tracker.in_phase("loss"):
                loss = chunked_loss(features, head, targets, chunks)
            kept = tracker.at(len(tracker.events))["activations"]
            with tracker.in_phase("backward"):
                loss.backward()
        piece = round_up(2 * b * s * V // chunks)
        largest = max(item.bytes for item in tracker.allocations())
    assert largest == max(piece, round_up(2 * V * h))
    assert kept < piece
