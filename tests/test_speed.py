"""Promises about work, held by counts of calls: the same on quiet and busy machines.

What the seconds are, `python tests/speeds.py` prints.
"""

import pytest
from counting import calls
from speeds import fresh_runs

from course_utils import estimate
from course_utils.run import TrainingRun


@pytest.mark.parametrize("model", ["gpt2-xl", "llama3-8b"])
def test_an_estimate_takes_a_thousand_calls_however_large_the_model(model):
    """Of runs that nobody has asked for yet, so that no cache can answer; their kinds have been asked for."""
    known, fresh = ([run.replace(micro_batch=b) for run in fresh_runs(model, 4)] for b in (76, 77))
    for run in known:
        estimate(run)
    assert max(calls(lambda run=run: estimate(run)) for run in fresh) < 1200
    compiled = TrainingRun(model, 76, 512, compile="model")
    estimate(compiled)
    assert calls(lambda: estimate(compiled.replace(micro_batch=77))) < 1200
    assert calls(lambda: TrainingRun("llama3-8b", 77, 512)) < 160
    assert calls(lambda: known[0].replace(micro_batch=78)) < 240
