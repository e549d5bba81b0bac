"""What stays from step to step, to the byte: optimizers' own tensors, every precision's, what LoRA leaves."""

from math import prod

import pytest
from engine import GPT, Unwatched, shallow, tiny, trainable_shapes

from course_utils import measure, moments
from course_utils.estimating.exact.update import optimizer_step
from course_utils.estimating.states import (
    PAIRS_4BIT,
    frozen_matrix_bytes,
    gradient_bytes,
    optimizer_state_bytes,
    parameter_bytes,
    state_sizes,
)
from course_utils.measuring.simulated import simulated_gpu
from course_utils.measuring.step import Training
from course_utils.models import PRESETS, parameter_shapes
from course_utils.run import OPTIMIZERS, PRECISIONS, TrainingRun
from course_utils.units import round_up


def states_run(model: str, precision: str, optimizer: str = "adamw") -> int:
    """Bytes of weights, gradients and optimizer states."""
    run = TrainingRun(model, precision=precision, optimizer=optimizer, attention="efficient")
    return parameter_bytes(run) + gradient_bytes(run) + optimizer_state_bytes(run)


@pytest.mark.parametrize("model", [shallow(GPT, 2), tiny("llama")], ids=lambda model: model.name)
@pytest.mark.parametrize("optimizer", ["adamw", "adamw-loop", "adamw-foreach", "adamw-fused", "momentum"])
@pytest.mark.parametrize(
    ("precision", "attention"), [("fp32", "eager"), ("amp-fp16", "flash"), ("bf16-master", "flash")]
)
def test_states_are_the_optimizers_own_tensors(model, optimizer, precision, attention):
    run = TrainingRun(model, 1, 16, precision, optimizer, attention)
    with simulated_gpu(run.attention):
        training = Training(run, "cuda", simulated=True)
        training.step(Unwatched())
        states = [tensor for _, tensor in training.named_states() if tensor.device.type == "cuda"]
        sizes = [tensor.untyped_storage().nbytes() for tensor in states]
        weights = [parameter.untyped_storage().nbytes() for parameter in training.network.parameters()]
    assert optimizer_state_bytes(run) == sum(round_up(size) for size in sizes)
    assert parameter_bytes(run) == sum(round_up(size) for size in weights)
    assert gradient_bytes(run) == parameter_bytes(run)
    scalars = [size for size in sizes if size <= 4]
    copies = (1 if optimizer == "momentum" else 2) + bool(run.precision.master)
    assert sum(sizes) - sum(scalars) == 4 * copies * model.parameters


# Bytes a parameter


@pytest.mark.parametrize(
    ("precision", "bytes_each"),
    [
        ("fp32", 4 + 4 + 8),
        ("tf32", 4 + 4 + 8),
        ("amp-bf16", 4 + 4 + 8),
        ("amp-fp16", 4 + 4 + 8),
        ("bf16-master", 2 + 2 + 12),
        ("fp16-master", 2 + 2 + 12),
        ("bf16-master-fp32grad", 2 + 4 + 12),
        ("bf16", 2 + 2 + 4),
        ("fp8", 1 + 1 + 2 + 1 + 2),
    ],
)
def test_recipes_differ_in_where_adams_bytes_lie(precision, bytes_each):
    assert states_run("gpt2-xl", precision) == pytest.approx(
        bytes_each * PRESETS["gpt2-xl"].parameters, rel=1e-3
    )


@pytest.mark.parametrize(
    ("optimizer", "bytes_each"),
    [("sgd", 0), ("momentum", 4), ("lion", 4), ("adam", 8), ("adamw", 8), ("adam8bit", 2 + 2 * 4 / 256)],
)
def test_optimizers_differ_in_bytes_a_parameter(optimizer, bytes_each):
    run = TrainingRun("gpt2-xl", optimizer=optimizer)
    assert optimizer_state_bytes(run) == pytest.approx(bytes_each * run.model.parameters, rel=2e-3)


def test_adafactor_keeps_next_to_nothing():
    run = TrainingRun("gpt2-xl", optimizer="adafactor")
    assert 0 < optimizer_state_bytes(run) < 0.01 * run.model.parameters


@pytest.mark.parametrize(
    ("shape", "rows", "columns"), [((6, 8), 6, 8), ((4, 6, 8), 4 * 6, 4 * 8)], ids=["matrix", "experts"]
)
def test_adafactor_keeps_a_row_and_a_column_of_each_matrix(shape, rows, columns):
    assert state_sizes(PRECISIONS["fp32"], OPTIMIZERS["adafactor"], "weight", shape) == (
        4 * rows,
        4 * columns,
    )
    assert state_sizes(PRECISIONS["fp32"], OPTIMIZERS["adafactor"], "bias", shape[:1]) == (4 * shape[0],)


def test_muon_keeps_4_bytes_of_the_blocks_matrices_and_8_of_the_rest():
    run = TrainingRun("gpt2-xl", optimizer="muon")
    shapes = parameter_shapes(run.model)
    hidden = sum(
        prod(shape) for name, shape in shapes.items() if name.startswith("blocks") and len(shape) == 2
    )
    expected = 4 * hidden + 8 * (run.model.parameters - hidden)
    assert optimizer_state_bytes(run) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_loss_scaler_keeps_two_blocks(optimizer):
    run = TrainingRun("gpt2", precision="amp-fp16", optimizer=optimizer)
    assert optimizer_state_bytes(run) - optimizer_state_bytes(run.replace(precision="amp-bf16")) == 2 * 512


def test_fused_counters_take_a_block_a_tensor():
    run = TrainingRun("gpt2", optimizer="adamw-fused")
    foreach = optimizer_state_bytes(run.replace(optimizer="adamw-foreach"))
    assert optimizer_state_bytes(run) - foreach == 512 * trainable_shapes(run).tensors


def test_fp8_is_estimated_and_its_measurement_refused():
    run = TrainingRun("gpt2", precision="fp8", attention="flash")
    assert optimizer_step(run) == {}
    with pytest.raises(ValueError, match="in the format of the weights"):  # its buckets are nowhere measured
        moments(run.replace(world_size=4, zero_stage=1))
    with pytest.raises(ValueError, match=r"fp8 is not measured: .*estimate\(run\).*'bf16-master'"):
        measure(run, "simulated")


# LoRA


def test_lora_trains_two_thin_factors_for_each_target():
    run = TrainingRun("gpt2", precision="bf16", lora_rank=8)
    h, layers = run.model.hidden, run.model.layers
    trained = trainable_shapes(run)
    assert dict(trained.block) == {
        "blocks.attention.qkv.A": (8, h),
        "blocks.attention.qkv.B": (3 * h, 8),
        "blocks.attention.out.A": (8, h),
        "blocks.attention.out.B": (h, 8),
    }
    assert trained.tensors == 4 * layers and trained.parameters == layers * 8 * (h + 3 * h + h + h)
    assert gradient_bytes(run) == trained.bytes(2)
    assert optimizer_state_bytes(run) == 2 * trained.bytes(2)
    assert parameter_bytes(run) == parameter_bytes(run.replace(lora_rank=0, lora_targets=())) + trained.bytes(
        2
    )


def test_everything_is_trained_without_lora():
    for model in ("gpt2", "llama3.2-1b", "mixtral-8x7b"):
        trained = trainable_shapes(TrainingRun(model))
        assert trained.parameters == PRESETS[model].parameters
        assert trained.tensors == len(parameter_shapes(PRESETS[model]))


@pytest.mark.parametrize(("bits", "bytes_each"), [(16, 2), (8, 1), (4, 0.5 + 4 / 64)])
def test_frozen_matrices_take_their_bits_and_their_scales(bits, bytes_each):
    assert frozen_matrix_bytes((4096, 4096), bits) == pytest.approx(bytes_each * 4096**2, rel=1e-3)
    assert frozen_matrix_bytes((3, 5), bits) == {16: 512, 8: 1024, 4: 1024}[bits]
    run = TrainingRun("llama3-8b", precision="bf16", lora_rank=16, frozen_bits=bits)
    matrices = [
        shape for name, shape in parameter_shapes(run.model).items() if "blocks" in name and len(shape) == 2
    ]
    in_blocks = sum(frozen_matrix_bytes(shape, bits) for shape in matrices)
    others = [
        shape
        for name, shape in parameter_shapes(run.model).items()
        if "blocks" not in name or len(shape) == 1
    ]
    table = PAIRS_4BIT if bits == 4 else 0
    outside = sum(round_up(2 * prod(shape)) for shape in others)
    assert parameter_bytes(run) == in_blocks + outside + table + trainable_shapes(run).bytes(2)


def test_frozen_bits_do_not_touch_what_autocast_keeps_in_fp32():
    run = TrainingRun("gpt2", precision="amp-bf16", lora_rank=4, frozen_bits=16)
    thin = trainable_shapes(run)
    assert parameter_bytes(run) == parameter_bytes(TrainingRun("gpt2", precision="bf16")) + thin.bytes(4)
