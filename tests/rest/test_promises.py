"""Large models are simulated in little memory and as estimated, and a tracked step takes little more."""

import json
import sys

import pytest
from counting import calls
from speeds import fresh_process, step_times

from course_utils import estimate, moments
from course_utils.estimating.states import tensors_bytes
from course_utils.evidence.frozen_runs import changed
from course_utils.run import TrainingRun
from course_utils.units import GB, GiB

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="how much memory was used, Linux tells")

SIMULATED = """
import json
from course_utils import TrainingRun, measure
measured = measure(TrainingRun({arguments}), "simulated", steps={steps})
used = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
backward = dict(measured.phase_peaks["backward"])
print(json.dumps(dict(used=1024 * int(used.split()[1]), peak=measured.peak, backward=backward)))
"""


def test_two_steps_of_gpt2_xl_take_less_than_a_gigabyte_of_host_memory():
    found = json.loads(fresh_process(SIMULATED.format(arguments="'gpt2-xl', 32, 1024", steps=2)))
    assert found["used"] < 1 * GB
    assert found["peak"] == pytest.approx(estimate(TrainingRun("gpt2-xl", 32, 1024)).total, rel=1e-6)


def test_a_step_of_llama3_70b_is_simulated_in_full_and_as_estimated():
    """There are no moments before the first optimizer step: the states are the master weights alone."""
    arguments = "'llama3-70b', micro_batch=1, seq_len=8192, precision='bf16-master'"
    found = json.loads(fresh_process(SIMULATED.format(arguments=arguments, steps=1)))
    run = TrainingRun("llama3-70b", micro_batch=1, seq_len=8192, precision="bf16-master")
    master_weights = {"optimizer_states": tensors_bytes(run.model, 4)}
    expected = dict(moments(run)["backward of the loss"]) | master_weights
    assert found["backward"] == pytest.approx(expected, rel=1e-5)
    assert found["used"] < 24 * GiB


def test_tracking_adds_a_sixteenth_of_what_torch_s_own_tracker_adds():
    """With calls for seconds, of the second of two tries: the first one finds the kernels' shapes."""
    run = TrainingRun(changed("gpt2", layers=2), 2, 128)
    step_times(run, calls)
    counted = step_times(run, calls)
    plain = counted.pop("nobody")
    added = {name: count - plain for name, count in counted.items()}
    assert 0 < added["tracker"] < added["memtracker"] / 16
    assert added["tracker"] < plain / 2
