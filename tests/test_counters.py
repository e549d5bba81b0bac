"""The allocator's counters of a measurement: tensors, workspaces, blocks that were not split, reserved."""

from engine import GPT, shallow, simulate

from course_utils import PRESETS, TrainingRun, counted, measure
from course_utils.units import MiB


def test_counters_are_the_sum_of_their_terms():
    run = TrainingRun(shallow(GPT, 3), 2, 512)
    found = counted(simulate(run))
    assert found.tensors == simulate(run).peak and found.scratch == 0
    assert found.reserved >= found.allocated == found.tensors + found.unsplit


def test_a_weight_of_25_mib_takes_a_block_of_26():
    run = TrainingRun(shallow(PRESETS["gpt2-xl"], 4), 1, 64, "fp32", attention="efficient")
    weight = 1600 * 6400 * 4
    assert weight % (2 * MiB) and counted(simulate(run)).unsplit > 4 * 2 * (40 * MiB - weight)


def test_a_card_adds_workspaces():
    run = TrainingRun(shallow(GPT, 2), micro_batch=2, seq_len=128)
    assert counted(measure(run, "simulated")).workspaces == 0
    on_card = measure(run.replace(card="H100-80GB"), "simulated")
    assert counted(on_card).workspaces == 64 * MiB
    assert counted(on_card).tensors == counted(measure(run, "simulated")).tensors
