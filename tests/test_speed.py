"""Promises about work and memory, held by counts of calls and modules: the same on quiet and busy machines.

What the seconds are, tests/speeds.py and tests/step_speed.py show, which run alone; the latter compares with
a peer.
"""

import json
import sys

import pytest
import speeds as speed
import step_speed
from counting import calls
from engine import simulate

from course_utils import estimate, moments
from course_utils.estimating.states import tensors_bytes
from course_utils.evidence.frozen_runs import changed
from course_utils.run import TrainingRun
from course_utils.units import GiB

SIMULATED = pytest.mark.skipif(sys.platform == "win32", reason="nothing is simulated on Windows")

TWO_STEPS = """
import json, resource, sys
import course_utils as c
measured = c.measure(c.TrainingRun("gpt2-xl", 32, 1024, "amp-bf16"), "simulated", steps=2)
if sys.platform == "linux":  # ru_maxrss counts what the parent had when it forked
    rss = 1024 * int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])
else:
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps(dict(rss=rss, peak=measured.peak)))
"""

DEEP_RUN = TrainingRun("llama3-70b", micro_batch=1, seq_len=8192, precision="bf16-master")
DEEP_BYTES = 24 * GiB  # of host memory: a simulation in full must stay below

DEEP = f"""
import json, resource, sys
import course_utils as c
run = c.TrainingRun({DEEP_RUN.model.name!r}, micro_batch=1, seq_len=8192, precision="bf16-master")
measured = c.measure(run, "simulated", steps=1)
rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
print(json.dumps(dict(rss=rss, backward=dict(measured.phase_peaks["backward"]))))
"""

IMPORT = """
import sys
import course_utils
course_utils.estimate(course_utils.TrainingRun("gpt2"))
print(len(sys.modules), "torch" in sys.modules, "numpy" in sys.modules)
"""


@SIMULATED
def test_two_simulated_steps_of_gpt2_xl_take_less_than_a_gigabyte_of_host_memory():
    found = json.loads(speed._fresh_process(TWO_STEPS))
    assert found["rss"] < 10**9
    assert found["peak"] == estimate(TrainingRun("gpt2-xl", 32, 1024, "amp-bf16")).total


def test_importing_and_a_first_estimate_load_few_modules_and_neither_torch_nor_numpy():
    modules, *heavy = speed._fresh_process(IMPORT).split()
    assert heavy == ["False", "False"] and int(modules) < 300


@pytest.mark.parametrize("model", ["gpt2-xl", "llama3-8b"])
def test_an_estimate_takes_a_thousand_calls_however_large_the_model(model):
    """Of runs that nobody has asked for yet, so that no cache can answer; their kinds have been asked for."""
    known, fresh = ([run.replace(micro_batch=b) for run in speed.fresh_runs(model, 4)] for b in (76, 77))
    for run in known:
        estimate(run)
    assert max(calls(lambda run=run: estimate(run)) for run in fresh) < 1200
    assert calls(lambda: TrainingRun("llama3-8b", 77, 512)) < 160
    assert calls(lambda: known[0].replace(micro_batch=78)) < 240


def test_closed_forms_that_load_torch_are_refused(monkeypatch):
    monkeypatch.setattr(speed, "IMPORT", "import torch\n" + speed.IMPORT)
    with pytest.raises(RuntimeError, match="it has loaded torch"):
        speed.import_milliseconds()


@SIMULATED
def test_tracking_adds_a_fraction_to_a_step_and_torch_s_own_tracker_more_than_the_step_itself(monkeypatch):
    """Steps of frozen runs, with calls for seconds, second of two tries, which finds the first one's shapes.

    MemTracker adds more the more modules there are.
    """
    monkeypatch.setattr(step_speed, "seconds_of", calls)
    shorter, longer = (
        step_speed.step_times(TrainingRun(changed("gpt2", layers=layers), 2, 128), tries=2)
        for layers in (2, 4)
    )
    for counted in (shorter, longer):
        assert counted["nobody"] < counted["tracker"] < 1.4 * counted["nobody"]
        assert counted["memtracker"] > 1.8 * counted["tracker"]
    assert longer["memtracker"] / longer["tracker"] > shorter["memtracker"] / shorter["tracker"]


def first_step(run: TrainingRun) -> dict[str, int]:
    """The highest point of its backward, by estimate: the moments are made in the first optimizer step, so
    until then there are the master weights alone.
    """
    return dict(moments(run)["backward of the loss"]) | {"optimizer_states": tensors_bytes(run.model, 4)}


@SIMULATED
def test_one_step_of_llama3_70b_s_blocks_is_as_estimated():
    run = TrainingRun(changed(DEEP_RUN.model.name, layers=3), 1, 8192, "bf16-master")
    assert dict(simulate(run, steps=1).phase_peaks["backward"]) == first_step(run)


@SIMULATED
@pytest.mark.sweep(0)  # half a minute
def test_one_step_of_llama3_70b_is_simulated_in_full_and_as_estimated():
    found = json.loads(speed._fresh_process(DEEP))
    run = DEEP_RUN
    assert found["rss"] < DEEP_BYTES and found["backward"] == first_step(run)
    assert estimate(run) == moments(run)["backward of the loss"]  # which is the peak of later steps


# Rows that miss their promise


def test_a_row_says_whether_its_promise_is_kept():
    assert speed.row("a", 99.0, under=100) == ("a", 99.0, "under 100", "kept")
    assert speed.row("a", 100.0, under=100)[-1] == "missed"


def test_the_speed_table_says_what_is_promised_and_missed(monkeypatch):
    monkeypatch.setattr(speed, "best", lambda tries, once: 2.0 if once is speed.sweep_seconds else 0.001)
    table = speed.speed_table(True, lambda text: None)
    kept = {row[0]: row[1:] for row in table.rows}
    assert kept["a sweep of 10,000 runs, s"] == (2.0, "under 1", "missed")
    assert kept["importing the closed forms, ms"][-1] == "kept"
