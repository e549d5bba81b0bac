"""The allocator's counters: of a measurement, and of an estimate that torch has no part in."""

from typing import Any

import pytest
from engine import GPT, LLAMA, shallow, simulate

from course_utils import TrainingRun, counted, estimate, measure
from course_utils.models import TransformerConfig
from course_utils.units import MiB

EXACT: list[tuple[TransformerConfig, dict[str, Any]]] = [
    (GPT, {}),
    (LLAMA, {"recompute": "full", "micro_batch": 3}),
    (GPT, {"precision": "bf16", "optimizer": "adam8bit", "accumulation_steps": 4}),
]


@pytest.mark.parametrize(("model", "choices"), EXACT)
def test_an_estimate_unrolled_is_placed_as_the_simulated_step_is(model, choices):
    """Single numbers, as loss scales, are left out."""
    run = TrainingRun(shallow(model, 3), **{"micro_batch": 2, "seq_len": 512} | choices)
    ours = counted(run)
    truth = counted(simulate(run))
    assert ours.tensors == pytest.approx(estimate(run).total, abs=4096)
    assert ours.tensors == pytest.approx(truth.tensors, abs=4096)
    assert ours.allocated == pytest.approx(truth.allocated, rel=1e-5)
    assert ours.reserved == pytest.approx(truth.reserved, rel=0.02)
    assert ours.reserved >= ours.allocated >= ours.tensors


def test_a_weight_of_25_mib_takes_a_block_of_26():
    run = TrainingRun("gpt2-xl", micro_batch=1, seq_len=64, precision="fp32", attention="efficient")
    weight = 1600 * 6400 * 4
    assert weight % (2 * MiB) and counted(run).unsplit > 48 * 2 * (40 * MiB - weight)


def test_a_card_adds_workspaces_to_both():
    run = TrainingRun(shallow(GPT, 2), micro_batch=2, seq_len=128)
    for one in (run, measure(run, "simulated")):
        assert counted(one).workspaces == 0
    on_card = run.replace(card="H100-80GB")
    for one in (on_card, measure(on_card, "simulated")):
        assert counted(one).workspaces == 64 * MiB
        assert counted(one).tensors == counted(measure(run, "simulated")).tensors
