"""The second verb and the comparison: sources, refusals, fallbacks, and what a measurement says of itself."""

import dataclasses
import gc
import json
import re

import pytest
import torch
from engine import GPT, shallow, simulate, tiny

from course_utils import compare, estimate, measure, replay
from course_utils.breakdown import KINDS
from course_utils.measuring import Comparison, recorded, tracing
from course_utils.models import TransformerConfig
from course_utils.run import TrainingRun
from course_utils.units import GB

RUN = TrainingRun(tiny("gpt2", dropout=0.1), 2, 64)
ON_CPU = RUN.replace(precision="fp32", attention="eager")
PHASES = ["forward", "loss", "backward", "optimizer", "zero_grad"]


@pytest.mark.parametrize("steps", [0, -1, 1.5, "2", None, True, 10_000])
def test_steps_are_a_whole_number_of_at_least_1(steps):
    with pytest.raises(ValueError, match=f"steps is {steps!r}: a whole number from 1 to 1000"):
        measure(RUN, "simulated", steps)


def test_unknown_source_names_the_nearest():
    with pytest.raises(ValueError, match=r"unknown source 'simulation': did you mean 'simulated'.*recorded"):
        measure(RUN, "simulation")


@pytest.mark.parametrize(
    "changes",
    [
        {"attention": "flash", "precision": "amp-bf16"},
        {"attention": "efficient"},
        {"precision": "bf16-master"},
    ],
)
def test_on_the_cpu_only_what_a_gpu_does_too(changes):
    with pytest.raises(ValueError, match=r"precision='fp32' with attention='eager' .* simulate it instead"):
        measure(ON_CPU.replace(**changes), "cpu")


def test_too_large_for_a_laptop_says_how_large_and_what_to_choose():
    run = TrainingRun("gpt2-medium", 1, 128, "fp32", attention="eager")
    needed = estimate(run).total / GB
    with pytest.raises(
        ValueError, match=rf"needs about {needed:.1f} GB of host memory; .* up to 4 GB: .*'tiny-gpt'"
    ):
        measure(run, "cpu")


@pytest.mark.parametrize("steps", [1, 3])
def test_every_step_has_its_phases_in_order(steps):
    marks = simulate(RUN, steps).timeline.marks
    assert [(mark.step, mark.phase) for mark in marks] == [
        (s, phase) for s in range(1, steps + 1) for phase in PHASES
    ]
    assert [mark.event for mark in marks] == sorted(mark.event for mark in marks)


@pytest.mark.parametrize("source", ["simulated", "cpu"])
def test_peak_moments_timeline_and_allocations_agree(source):
    found = measure(ON_CPU, source)
    totals = found.timeline.totals()
    last_step = next(mark.event for mark in found.timeline.marks if mark.step == 2)
    assert found.peak == max(totals[last_step:]) == totals[found.peak_event - 1]
    assert found.peak == sum(item.bytes for item in found.alive_at(found.peak_event))
    for kind in KINDS:
        alive = [item.bytes for item in found.alive_at(found.peak_event) if item.kind == kind]
        assert sum(alive) == found.breakdown[kind]
    curves = found.timeline.curves()
    assert {kind: curve[found.peak_event - 1] for kind, curve in curves.items()} == {
        kind: found.breakdown[kind] for kind in curves
    }
    assert found.moments["end of step 2"].total == totals[-1]


def test_the_first_step_differs_the_second_repeats():
    found = simulate(TrainingRun(tiny("llama"), 16, 128, optimizer="momentum"), 3)
    assert found.peak_phase == "backward"  # before the first step ends there are no states
    peaks = found.timeline.step_peaks()
    assert peaks[1] < peaks[2] == peaks[3] == found.peak
    first, second, third = (found.moments[f"end of step {step}"] for step in (1, 2, 3))
    assert dict(first) == dict(second) == dict(third)


def test_after_a_step_only_weights_states_and_the_batch_stay():
    left = simulate(RUN).moments["end of step 2"]
    assert {kind for kind, size in left.items() if size} == {"parameters", "optimizer_states", "inputs"}


def test_the_highest_phase_is_the_peak():
    found = simulate(RUN)
    assert set(found.phase_peaks) <= set(PHASES)
    highest = max(found.phase_peaks.values(), key=lambda moment: moment.total)
    assert (highest.total, highest.phase) == (found.peak, found.peak_phase)


@pytest.mark.parametrize("source", ["cpu", "simulated"])
def test_random_numbers_go_on_as_if_nothing_had_been_measured(source):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = measure(ON_CPU, source, steps=1)
    assert torch.equal(torch.get_rng_state(), before)
    assert measure(ON_CPU, source, steps=1).losses == first.losses


@pytest.mark.parametrize("collecting", [True, False])
def test_python_looks_for_cycles_afterwards_as_before(collecting):
    (gc.enable if collecting else gc.disable)()
    try:
        with pytest.raises(RuntimeError, match="on purpose"), tracing.cycles_left_alone():
            assert not gc.isenabled()
            raise RuntimeError("on purpose")
        assert gc.isenabled() is collecting
    finally:
        gc.enable()


@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
def test_no_tensor_of_a_step_waits_for_python_to_find_a_cycle(recompute):
    gc.collect()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        tracing.trace_simulated.__wrapped__(RUN.replace(recompute=recompute), 2, "")
        gc.collect()
        assert not [one for one in gc.garbage if isinstance(one, torch.Tensor)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()


def test_provenance_says_where_it_ran():
    assert str(simulate(RUN).provenance).startswith("simulated GPU · torch 2.")
    assert str(measure(ON_CPU, "cpu").provenance).startswith("traced on the CPU · torch 2.")
    assert " MB at the peak" in simulate(RUN).summary() and "simulated GPU" in simulate(RUN).summary()


def test_a_comparison_shows_each_difference_and_explains_that_there_is_none():
    compared = compare(RUN, "simulated")
    assert compared.ratio == 1 and set(compared.differences.values()) == {0}
    assert "The gap is 0 bytes" in compared.explanation()
    sums = {row["name"]: [row["estimated"], row["simulated"]] for row in compared.rows()}
    assert sums["tensors"] == [compared.estimate.total, compared.measurement.peak]
    assert sums["allocator's counter"] == [one and one.allocated for one in compared.counters]
    for shown in (str(compared), compared._repr_html_()):
        assert str(RUN) in shown and "simulated GPU" in shown and "+0" not in shown


def test_a_comparison_names_what_is_off():
    parts = dict(estimate(RUN)) | {"activations": estimate(RUN)["activations"] + 512 * 10}
    off = dataclasses.replace(estimate(RUN), parts=parts)
    compared = Comparison(RUN, off, simulate(RUN))
    assert compared.differences["activations"] == 5120
    assert "+5,120 bytes are left" in compared.explanation()
    assert "activations (+5,120)" in compared.explanation()
    assert compared.ratio > 1


def test_a_comparison_names_scratch_that_the_device_counted():
    counted = dataclasses.replace(simulate(RUN), counters={"allocated": simulate(RUN).peak + 1_000_000})
    assert "+1,000,000 bytes are scratch space" in Comparison(RUN, estimate(RUN), counted).explanation()


def test_a_comparison_tells_scratch_from_blocks_that_were_not_split():
    run = TrainingRun(shallow(GPT, 3), 4, 256)
    measured = simulate(run)
    rounded = replay(measured).step_peaks()[2] - measured.peak
    assert rounded > 0
    counted = dataclasses.replace(measured, counters={"allocated": measured.peak + rounded + 1_000_000})
    said = Comparison(run, estimate(run), counted).explanation()
    assert (
        f"{rounded:+,} bytes are rounding to blocks that were not split, +1,000,000 bytes scratch space"
        in said
    )


def test_a_comparison_does_not_guess_how_blocks_were_rounded(monkeypatch):
    counted = dataclasses.replace(simulate(RUN), counters={"allocated": simulate(RUN).peak + 1_000_000})
    together = r"\+1,000,000 bytes are rounding to blocks that were not split and scratch space"
    partial = dataclasses.replace(counted, allocations=counted.largest(5))
    assert re.search(together, Comparison(RUN, estimate(RUN), partial).explanation())
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    assert re.search(together, Comparison(RUN, estimate(RUN), counted).explanation())


@pytest.fixture
def no_simulation(monkeypatch):
    monkeypatch.setattr(
        "course_utils.measuring.simulated.availability", lambda: (False, "on this platform it cannot")
    )
    monkeypatch.setenv("COURSE_SOURCE", "auto")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    return monkeypatch


@pytest.mark.parametrize("source", ["auto", "simulated"])
def test_a_recording_takes_its_place_and_says_why(no_simulation, source):
    text = recorded.save({recorded.key(RUN, 2): simulate(RUN)})
    no_simulation.setattr(recorded, "load", lambda: json.loads(text)["runs"])
    found = measure(RUN, source)
    assert found.source == "recorded" and found.breakdown == simulate(RUN).breakdown
    assert "recorded on a simulated GPU" in str(found.provenance)
    assert "not simulated here: on this platform it cannot" in str(found.provenance)


def test_shipped_recordings_equal_the_estimate():
    shipped = recorded.load()
    assert shipped
    for name in shipped:
        run = eval(
            name.partition(" steps=")[0], {"TrainingRun": TrainingRun, "TransformerConfig": TransformerConfig}
        )
        assert dict(recorded.from_json(shipped[name], "").breakdown) == dict(estimate(run)), name


def test_a_comparison_of_small_runs_has_a_unit_that_shows_them():
    small = compare(TrainingRun(tiny("gpt2"), 1, 16), "simulated")
    assert small.measurement.peak < 1e9
    assert " MB" in repr(small) and "GB" not in repr(small)
    assert " MB</td>" in small._repr_html_() and "GB" not in small._repr_html_()


def test_experts_are_balanced_and_that_is_said():
    model = tiny("llama", experts=4, experts_per_token=2)
    assert "balanced experts" in measure(TrainingRun(model, 1, 16), "simulated").provenance.note
    assert "balanced" not in measure(TrainingRun(tiny("llama"), 1, 16), "simulated").provenance.note


def test_a_run_says_its_own_attention():
    with pytest.raises(TypeError, match="leave out attention, or the run"):
        measure(TrainingRun("tiny-gpt", 1, 16), "simulated", attention="efficient")


def test_a_first_step_alone_is_said_to_be_one():
    assert (
        "Only the first step was simulated"
        in compare(TrainingRun("tiny-gpt", 1, 16), "simulated", 1).explanation()
    )
