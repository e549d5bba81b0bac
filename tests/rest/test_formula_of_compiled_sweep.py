"""The closed form of compiled steps against the simulation: families, formats, dropout, vocabularies."""

from itertools import product

import pytest
from engine import GPT, LLAMA, shallow, simulate, tiny

from course_utils import TrainingRun, estimate
from course_utils.measuring.simulated import availability

pytestmark = pytest.mark.skipif(not availability()[0], reason="a GPU cannot be simulated here")

BOUNDS = {"blocks": 0.001, "model": 0.02}
"""As in tests/test_formula_of_compiled.py; 2 % as one small block is among them: each tensor weighs more."""

FORMATS = (("fp32", "efficient"), ("amp-bf16", "flash"), ("bf16", "flash"), ("bf16-master", "flash"))
SMALL = [
    TrainingRun(tiny(family, layers=3, dropout=rate), 3, 128, precision, attention=attention, compile=what)
    for family, rate, (precision, attention), what in product(
        ("gpt2", "llama"), (0.0, 0.1), FORMATS, ("blocks", "model")
    )
]
LARGE = [
    TrainingRun(shallow(GPT, 4), 8, 1024, compile="model", dropout=0.0),
    TrainingRun(shallow(GPT, 4), 8, 1024, "bf16-master", compile="model"),
    TrainingRun(shallow(LLAMA, 3), 2, 1024, compile="blocks"),
    TrainingRun(shallow(LLAMA, 3), 2, 1024, "bf16-master", compile="model"),
    TrainingRun(tiny("gpt2", layers=1), 8, 128, "amp-fp16", compile="model", clip_grad_norm=1.0),
]


@pytest.mark.sweep(4)
@pytest.mark.parametrize("run", [*SMALL, *LARGE], ids=str)
def test_an_estimate_is_near_the_simulated_step(run: TrainingRun) -> None:
    assert estimate(run).total == pytest.approx(simulate(run).peak, rel=BOUNDS[run.compile])
