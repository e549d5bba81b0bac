"""What stays from step to step: bytes per parameter of every precision and optimizer, and what LoRA leaves.

`test_estimate.py` compares the states with simulated ones, to the byte.
"""

from math import prod

import pytest
from engine import trainable_shapes

from course_utils import measure
from course_utils.estimating.states import (
    PAIRS_4BIT,
    frozen_matrix_bytes,
    gradient_bytes,
    optimizer_state_bytes,
    parameter_bytes,
)
from course_utils.models import parameter_shapes
from course_utils.run import PRECISIONS, TrainingRun
from course_utils.units import round_up

PER_PARAMETER = {
    "fp32": 4 + 4 + 8,
    "tf32": 4 + 4 + 8,
    "amp-bf16": 4 + 4 + 8,
    "amp-fp16": 4 + 4 + 8,
    "bf16-master": 2 + 2 + 12,
    "fp16-master": 2 + 2 + 12,
    "bf16-master-fp32grad": 2 + 4 + 12,
    "bf16": 2 + 2 + 4,
    "fp8": 1 + 1 + 2 + 1 + 2,
}
"""Bytes of weights, gradients and Adam's states in each recipe."""


def test_recipes_differ_in_where_adams_bytes_lie():
    assert set(PER_PARAMETER) == set(PRECISIONS)
    for precision, each in PER_PARAMETER.items():
        run = TrainingRun("gpt2-xl", precision=precision, attention="efficient")
        states = parameter_bytes(run) + gradient_bytes(run) + optimizer_state_bytes(run)
        assert states == pytest.approx(each * run.model.parameters, rel=1e-3), precision


@pytest.mark.parametrize(
    ("optimizer", "each"),
    [("sgd", 0), ("momentum", 4), ("lion", 4), ("adam", 8), ("adamw", 8), ("adam8bit", 2 + 2 * 4 / 256)],
)
def test_optimizers_differ_in_bytes_per_parameter(optimizer, each):
    run = TrainingRun("gpt2-xl", optimizer=optimizer)
    assert optimizer_state_bytes(run) == pytest.approx(each * run.model.parameters, rel=2e-3)


def test_fp8_is_estimated_and_its_measurement_refused():
    run = TrainingRun("gpt2", precision="fp8", attention="flash")
    with pytest.raises(ValueError, match=r"fp8 is not measured: .*estimate\(run\).*'bf16-master'"):
        measure(run, "simulated")


# LoRA


@pytest.mark.parametrize(("bits", "each"), [(16, 2), (8, 1), (4, 0.5 + 4 / 64)])
def test_frozen_matrices_take_their_bits_and_their_scales(bits, each):
    assert frozen_matrix_bytes((4096, 4096), bits) == pytest.approx(each * 4096**2, rel=1e-3)
    assert frozen_matrix_bytes((3, 5), bits) == {16: 512, 8: 1024, 4: 1024}[bits]
    run = TrainingRun("llama3-8b", precision="bf16", lora_rank=16, frozen_bits=bits)
    expected = trainable_shapes(run).bytes(2) + (PAIRS_4BIT if bits == 4 else 0)
    for name, shape in parameter_shapes(run.model).items():
        in_block = "blocks" in name and len(shape) == 2
        expected += frozen_matrix_bytes(shape, bits) if in_block else round_up(2 * prod(shape))
    assert parameter_bytes(run) == expected
