"""The optimizer's phase, and clipping's: what runs on a simulated GPU against the walks, kind by kind."""

from typing import Any

import pytest
from engine import simulate, tiny

from course_utils.breakdown import KINDS
from course_utils.estimating.exact.update import adam8bit_loop, clipping, newton_schulz, optimizer_step
from course_utils.estimating.exact.walk import highest, make, net
from course_utils.estimating.states import gradient_bytes, optimizer_state_bytes, parameter_bytes
from course_utils.measurement import Measurement
from course_utils.run import OPTIMIZERS, PRECISIONS, TrainingRun

MEASURED = [name for name in PRECISIONS if name != "fp8"]
STEPPERS = [name for name in OPTIMIZERS if name not in ("adam-foreach", "adam-fused", "adam-loop")]
"""Adam and AdamW make the same tensors; one of them is enough for each implementation."""

VARIATIONS: list[dict[str, Any]] = [
    {},
    {"clip_grad_norm": 1.0},
    {"set_to_none": False},
    {"clip_grad_norm": 1.0, "set_to_none": False, "accumulation_steps": 2},
]


def tiny_run(precision: str, optimizer: str) -> TrainingRun:
    """A run of one of both families, with or without clipping; the same for the same names."""
    place = MEASURED.index(precision) + 3 * STEPPERS.index(optimizer)
    family = "gpt2" if place % 2 == 0 else "llama"
    model = tiny(family, hidden=64, heads=2, layers=3)
    if place % 3 == 0:
        model = tiny("llama", hidden=64, heads=2, layers=1, tied=True, qkv_bias=True)
    return TrainingRun(model, 1, 16, precision, optimizer, "eager", **VARIATIONS[place // 2 % 4])


ALL = [tiny_run(precision, optimizer) for precision in MEASURED for optimizer in STEPPERS]


def name(run: TrainingRun) -> str:
    clipped = "clip-" if run.clip_grad_norm else ""
    zeroed = "" if run.set_to_none else "zeroed-"
    how = f"{clipped}{zeroed}{run.accumulation_steps}"
    lora = f"-lora-{run.frozen_bits}" if run.lora_rank else ""
    return f"{run.precision.name}-{run.optimizer.name}-{run.model.family}-{how}{lora}"


def highest_in(measured: Measurement, phase: str) -> dict[str, int]:
    """Bytes by kind where a phase of the second step stands highest, including the moment it begins."""
    marks = measured.timeline.marks
    at = next(index for index, mark in enumerate(marks) if (mark.step, mark.phase) == (2, phase))
    totals = measured.timeline.totals()
    curves = measured.timeline.curves()
    event = max(range(marks[at].event - 1, marks[at + 1].event), key=lambda index: totals[index])
    return {kind: curves[kind][event] if kind in curves else 0 for kind in KINDS}


def plus(standing: dict[str, int], added: dict[str, int]) -> dict[str, int]:
    return {kind: standing[kind] + added.get(kind, 0) for kind in KINDS}


def lora_run(family: str, precision: str, optimizer: str, targets: Any, bits: int | None) -> TrainingRun:
    model = tiny(family, hidden=64, heads=2)
    lora: dict[str, Any] = {"lora_rank": 4, "lora_targets": targets, "frozen_bits": bits}
    return TrainingRun(model, 1, 16, precision, optimizer, "eager", clip_grad_norm=1.0, **lora)


LORA = [
    lora_run("gpt2", "fp32", "adafactor", "attention", None),
    lora_run("gpt2", "amp-bf16", "adamw", ("out",), 8),
    lora_run("gpt2", "bf16-master-fp32grad", "muon", ("attention", "mlp"), 4),
    lora_run("llama", "amp-fp16", "adam8bit", ("attention", "mlp"), 4),
    lora_run("llama", "bf16", "muon", "mlp", 16),
    lora_run("llama", "fp16-master", "adamw-loop", ("q", "v"), 8),
]
"""Of which only LoRA's factors step; what is frozen counts among the parameters."""


@pytest.mark.parametrize("run", [*ALL, *LORA], ids=name)
@pytest.mark.sweep(25)
def test_states_and_the_step_are_exact(run):
    measured = simulate(run)
    standing = dict(measured.moments["end of backward"])
    left = measured.moments["end of step 2"]
    assert standing["gradients"] == gradient_bytes(run)
    assert left["parameters"] == parameter_bytes(run)
    assert left["optimizer_states"] == optimizer_state_bytes(run)
    assert left["gradients"] == (0 if run.set_to_none else gradient_bytes(run))
    assert left["temporaries"] == 0
    assert highest_in(measured, "optimizer") == plus(standing, optimizer_step(run))
    if run.clip_grad_norm is not None:
        assert highest_in(measured, "clip") == plus(standing, clipping(run))
    else:
        assert clipping(run) == {}


def test_every_variation_meets_every_precision_and_optimizer():
    assert {(run.precision.name, run.clip_grad_norm) for run in ALL} == {
        (p, c) for p in MEASURED for c in (None, 1.0)
    }
    assert {(run.optimizer.name, run.model.family) for run in ALL} == {
        (o, f) for o in STEPPERS for f in ("gpt2", "llama")
    }


@pytest.mark.parametrize("optimizer", ["adafactor", "adam8bit", "muon", "adamw-loop"])
def test_the_step_is_exact_where_the_vocabulary_is_large(optimizer):
    # 77 million elements: more than the 8-bit Adam updates at once
    model = tiny("gpt2", vocab=300_000, layers=1)
    run = TrainingRun(model, 1, 16, "bf16-master", optimizer, "eager")
    measured = simulate(run)
    standing = dict(measured.moments["end of backward"])
    assert highest_in(measured, "optimizer") == plus(standing, optimizer_step(run))
    assert measured.phase_peaks["optimizer"]["temporaries"] == optimizer_step(run)["temporaries"]


def test_a_mixture_of_experts_steps_as_estimated():
    run = TrainingRun(tiny("llama", experts=4, experts_per_token=2), 1, 16, "fp32", "muon", "eager")
    measured = simulate(run)
    standing = dict(measured.moments["end of backward"])
    assert highest_in(measured, "optimizer") == plus(standing, optimizer_step(run))


def test_foreach_adds_4_bytes_a_parameter_and_fused_nothing():
    run = TrainingRun("gpt2-xl", 1, 1024)
    assert optimizer_step(run)["temporaries"] == pytest.approx(4 * run.model.parameters, rel=1e-3)
    assert optimizer_step(run.replace(optimizer="adamw-fused")) == {}
    masters = run.replace(precision="bf16-master")
    largest = run.model.vocab * run.model.hidden
    assert sum(optimizer_step(masters).values()) == pytest.approx((4 + 4 - 2) * largest, rel=1e-3)
    together = optimizer_step(masters.replace(optimizer="adamw-foreach"))
    assert sum(together.values()) == pytest.approx((4 + 4 - 2) * run.model.parameters, rel=1e-3)
    main_gradients = masters.replace(precision="bf16-master-fp32grad")
    assert optimizer_step(main_gradients)["temporaries"] == pytest.approx(4 * largest, rel=1e-3)


@pytest.mark.parametrize(("element", "copies"), [(2, 0), (4, 1)])
def test_muon_starts_from_the_update_itself_if_that_is_in_bf16(element, copies):
    """One step: X·Xᵀ and its polynomial, each 2 bytes times the shorter side squared, and the next X."""
    walk = newton_schulz(512, 1024, element, steps=1)
    x = 2 * 512 * 1024
    gram = 2 * 512 * 512
    assert highest(walk) == {"temporaries": copies * x + 2 * gram + x}
    assert net(walk) == {"temporaries": x - element * 512 * 1024}


def test_the_8_bit_adam_updates_2_to_the_24_elements_at_once():
    """At most three fp32 tensors of them; a scale per 256. Fewer than 4,096 elements take one fp32 tensor."""
    large = adam8bit_loop([("large", (300_000, 256))], 4)
    small = adam8bit_loop([("small", (4095,))], 4)
    assert highest(large) == {"temporaries": 3 * 4 * 2**24} and highest(small) == {"temporaries": 4 * 4096}
    assert make(4 * 2**24 // 256) in large and net([*large, *small]) == {"temporaries": 0}


def test_clipping_makes_a_block_for_each_gradient():
    run = TrainingRun("gpt2", clip_grad_norm=1.0)
    tensors = 12 * 12 + 4
    assert 512 * tensors < clipping(run)["temporaries"] < 512 * (tensors + 6)
