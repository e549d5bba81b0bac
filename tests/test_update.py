"""The optimizer's phase, and clipping's: what runs on a simulated GPU against the estimate, kind by kind."""

from typing import Any

import pytest
from engine import simulate, tiny

from course_utils.breakdown import KINDS
from course_utils.estimating.exact.update import clipping, optimizer_step
from course_utils.estimating.states import gradient_bytes, optimizer_state_bytes, parameter_bytes
from course_utils.measurement import Measurement
from course_utils.run import TrainingRun


def small(family: str, precision: str, optimizer: str, **choices: Any) -> TrainingRun:
    model = tiny(family, hidden=64, heads=2)
    return TrainingRun(model, 1, 16, precision, optimizer, "eager", **choices)


CLIPPED_AND_ZEROED: dict[str, Any] = {"clip_grad_norm": 1.0, "set_to_none": False}

RUNS = [
    small("gpt2", "fp32", "adamw", clip_grad_norm=1.0),
    small("llama", "amp-bf16", "adamw-foreach", **CLIPPED_AND_ZEROED),
    small("gpt2", "amp-fp16", "adamw-fused"),
    small("llama", "bf16-master", "adamw-loop", clip_grad_norm=1.0, accumulation_steps=2),
    small("gpt2", "bf16-master-fp32grad", "adafactor", **CLIPPED_AND_ZEROED),
    small("llama", "bf16", "adam8bit"),
    small("gpt2", "fp16-master", "muon", **CLIPPED_AND_ZEROED),
    small("llama", "amp-fp16", "lion"),
    # of LoRA only the factors step; what is frozen counts among the parameters
    small(
        "llama", "amp-fp16", "adam8bit", lora_rank=4, lora_targets="mlp", frozen_bits=4, clip_grad_norm=1.0
    ),
    # 77 million elements: more than the 8-bit Adam updates at once
    TrainingRun(tiny("gpt2", vocab=300_000, layers=1), 1, 16, "bf16-master", "adam8bit", "eager"),
]


def highest_in(measured: Measurement, phase: str) -> dict[str, int]:
    """Bytes by kind where a phase of the second step stands highest, including the moment it begins."""
    marks = measured.timeline.marks
    at = next(index for index, mark in enumerate(marks) if (mark.step, mark.phase) == (2, phase))
    totals = measured.timeline.totals()
    curves = measured.timeline.curves()
    event = max(range(marks[at].event - 1, marks[at + 1].event), key=lambda index: totals[index])
    return {kind: curves[kind][event] if kind in curves else 0 for kind in KINDS}


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_states_and_the_step_are_exact(run):
    measured = simulate(run)
    before = dict(measured.moments["end of backward"])
    left = measured.moments["end of step 2"]
    assert before["gradients"] == gradient_bytes(run)
    assert left["parameters"] == parameter_bytes(run)
    assert left["optimizer_states"] == optimizer_state_bytes(run)
    assert left["gradients"] == (0 if run.set_to_none else gradient_bytes(run))
    assert left["temporaries"] == 0
    assert highest_in(measured, "optimizer") == plus(before, optimizer_step(run))
    if run.clip_grad_norm is not None:
        assert highest_in(measured, "clip") == plus(before, clipping(run))
    else:
        assert clipping(run) == {}


def plus(before: dict[str, int], added: dict[str, int]) -> dict[str, int]:
    return {kind: before[kind] + added.get(kind, 0) for kind in KINDS}


def test_foreach_adds_4_bytes_per_parameter_and_fused_nothing():
    run = TrainingRun("gpt2-xl", 1, 1024)
    assert optimizer_step(run)["temporaries"] == pytest.approx(4 * run.model.parameters, rel=1e-3)
    assert optimizer_step(run.replace(optimizer="adamw-fused")) == {}
    masters = run.replace(precision="bf16-master")
    largest = run.model.vocab * run.model.hidden
    assert sum(optimizer_step(masters).values()) == pytest.approx((4 + 4 - 2) * largest, rel=1e-3)
    together = optimizer_step(masters.replace(optimizer="adamw-foreach"))
    assert sum(together.values()) == pytest.approx((4 + 4 - 2) * run.model.parameters, rel=1e-3)
