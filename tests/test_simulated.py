"""The simulated GPU: which kernels run on it, what they keep, and that nothing of it is left behind."""

import sys
from typing import Any

import pytest
import torch
from engine import GPT, LLAMA, Operators, Unwatched, shallow, simulate, storage_of, tiny
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F

from course_utils.measuring import simulated
from course_utils.measuring.simulated import SimulationUnavailable, availability, self_test, simulated_gpu
from course_utils.measuring.step import Training
from course_utils.networks.attention import fused_attention
from course_utils.run import TrainingRun


def saved_within(attention: str, work: Any) -> tuple[list[torch.Tensor], list[str]]:
    """Distinct storages that autograd saves while `work()` runs on the simulated GPU, and the operators."""
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.setdefault(storage_of(tensor), tensor)
        return tensor

    with simulated_gpu(attention), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        with Operators() as operators:
            out = work()
        assert out.requires_grad
    return list(kept.values()), operators.names


def operators_of_a_step(run: TrainingRun) -> list[str]:
    with simulated_gpu(run.attention):
        training = Training(run, "cuda", simulated=True)
        with Operators() as operators:
            training.step(Unwatched())
    return operators.names


def test_a_gpu_is_simulated_here_and_says_on_which_build():
    """The expected build follows from the machine and from torch's own version, not from the tested code."""
    build = "CPU build of torch" if torch.version.cuda is None else "CUDA build of torch without a GPU"
    assert availability() == (True, "fake tensors next to a real GPU" if torch.cuda.is_available() else build)


@pytest.mark.parametrize(
    ("gradient", "words"),
    [
        (lambda: None, "gave no gradient"),
        (lambda: torch.ones(4, 8), "gave no gradient"),  # on the CPU
        (lambda: torch.ones(3) @ torch.ones(4), "a simulated step fails on torch .*size"),
    ],
)
def test_a_step_that_goes_wrong_makes_the_simulation_unavailable(monkeypatch, gradient, words):
    monkeypatch.setattr(simulated, "_gradient_of_a_small_step", gradient)
    with pytest.raises(SimulationUnavailable, match=words):
        self_test()


def test_tensors_have_a_device_and_a_shape_but_no_memory():
    with simulated_gpu("flash"):
        tensor = torch.empty(10**6, 10**6, device="cuda")  # four terabytes
    assert isinstance(tensor, FakeTensor)
    assert (tensor.device.type, tuple(tensor.shape)) == ("cuda", (10**6, 10**6))


def heads(count: int = 4, tokens: int = 48, size: int = 16) -> torch.Tensor:
    return torch.empty(2, count, tokens, size, dtype=torch.bfloat16, device="cuda", requires_grad=True)


def test_flash_keeps_its_output_the_logsumexp_and_two_numbers_of_random_state():
    def work() -> torch.Tensor:
        inputs.extend([heads(), heads(), heads()])
        return F.scaled_dot_product_attention(*inputs, dropout_p=0.1, is_causal=True)

    inputs: list[torch.Tensor] = []
    kept, operators = saved_within("flash", work)
    own = [tensor for tensor in kept if all(tensor is not given for given in inputs)]
    assert len(kept) - len(own) == 3
    described = sorted((tuple(tensor.shape), str(tensor.dtype)) for tensor in own)
    assert described == sorted(
        [
            ((2, 4, 48, 16), "torch.bfloat16"),
            ((2, 4, 48), "torch.float32"),
            ((2,), "torch.uint64"),
            ((), "torch.uint64"),
        ]
    )
    assert operators.count("_scaled_dot_product_flash_attention") == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rms_norm_is_one_operator_that_keeps_one_number_a_token(dtype):
    def work() -> torch.Tensor:
        x = torch.empty(2, 48, 64, dtype=dtype, device="cuda", requires_grad=True)
        weight = torch.empty(64, dtype=dtype, device="cuda", requires_grad=True)
        given.extend([x, weight])
        return F.rms_norm(x, (64,), weight)

    given: list[torch.Tensor] = []
    kept, operators = saved_within("flash", work)
    assert [
        name for name in operators if name.startswith(("_fused", "rms", "pow", "mean", "mul", "rsqrt"))
    ] == ["_fused_rms_norm"]
    (statistic,) = [tensor for tensor in kept if all(tensor is not one for one in given)]
    assert (tuple(statistic.shape), statistic.dtype) == ((2, 48, 1), torch.float32)


def test_silu_goes_back_in_one_operator():
    with simulated_gpu("flash"):
        x = torch.empty(8, device="cuda", requires_grad=True)
        with Operators() as operators:
            F.silu(x).sum().backward()
    assert "silu_backward" in operators.names and "sigmoid" not in operators.names


FUSED = {kernel: f"_scaled_dot_product_{kernel}_attention" for kernel in ("flash", "efficient", "cudnn")}


@pytest.mark.parametrize("attention", ["eager", *FUSED])
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("model", [shallow(GPT, 2), shallow(LLAMA, 2)], ids=lambda model: model.name)
def test_the_chosen_attention_runs_and_no_other(model, recompute, attention):
    names = operators_of_a_step(
        TrainingRun(model, 1, 32, "bf16-master", attention=attention, recompute=recompute)
    )
    forwards = model.layers * (2 if recompute == "full" else 1)
    for kind, operator in FUSED.items():
        assert names.count(operator) == (forwards if kind == attention else 0)
        assert names.count(f"{operator}_backward") == (model.layers if kind == attention else 0)
    assert names.count("_softmax") == (forwards if attention == "eager" else 0)


def test_grouped_keys_stay_narrow_in_flash_and_are_repeated_for_the_efficient_kernel():
    def attention(kernel: str) -> torch.Tensor:
        return fused_attention(heads(4), heads(2), heads(2), kernel, 0.0)

    def sizes_kept(kernel: str) -> list[int]:
        kept, *_ = saved_within(kernel, lambda: attention(kernel))
        return sorted(tensor.numel() for tensor in kept if tensor.numel() >= 2 * 2 * 48 * 16)

    sizes = {kernel: sizes_kept(kernel) for kernel in FUSED}
    wide = 2 * 4 * 48 * 16
    narrow = 2 * 2 * 48 * 16
    grouped = [narrow, narrow, wide, wide]
    assert sizes == {"flash": grouped, "efficient": [wide, wide, wide, wide], "cudnn": grouped}


@pytest.mark.parametrize("model", [shallow(GPT, 2), shallow(LLAMA, 2)], ids=lambda model: model.name)
@pytest.mark.parametrize("precision", ["amp-bf16", "bf16-master", "amp-fp16"])
def test_cudnn_keeps_what_flash_keeps(model, precision):
    """Output, logsumexp, seed and offset: only the scratch inside differs, which no one sees."""
    flash, cudnn = (
        simulate(TrainingRun(model, 2, 64, precision, attention=kernel)) for kernel in ("flash", "cudnn")
    )
    assert cudnn.moments["end of forward"] == flash.moments["end of forward"]
    assert cudnn.peak == flash.peak


def test_the_efficient_kernel_refuses_grouped_keys_as_it_does_on_a_gpu():
    with simulated_gpu("efficient"), pytest.raises(ValueError, match="takes no grouped queries"):
        F.scaled_dot_product_attention(heads(4), heads(2), heads(2), is_causal=True, enable_gqa=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_really_casts(dtype):
    with simulated_gpu("flash"), torch.autocast("cuda", dtype):
        x = torch.empty(4, 4, device="cuda")
        assert (x @ x).dtype is dtype
        assert F.softmax(x @ x, dim=-1).dtype is torch.float32


def test_the_loss_scaler_stays_on_and_its_work_is_done():
    with simulated_gpu("flash"):
        assert torch.amp.GradScaler("cuda").is_enabled()
    names = operators_of_a_step(TrainingRun(tiny("gpt2"), 1, 16, "amp-fp16"))
    assert "_amp_foreach_non_finite_check_and_unscale_" in names and "_amp_update_scale_" in names


@pytest.mark.parametrize(
    ("optimizer", "operator"),
    [("adamw", "_foreach_addcdiv_"), ("adamw-loop", "addcdiv_"), ("adamw-fused", "_fused_adamw_")],
)
def test_the_optimizer_walks_as_it_was_told(optimizer, operator):
    names = operators_of_a_step(TrainingRun(tiny("gpt2"), 1, 16, "fp32", optimizer, "eager"))
    walks = ("_foreach_addcdiv_", "addcdiv_", "_fused_adamw_")
    assert [walk for walk in walks if walk in names] == [operator]


@pytest.fixture
def no_gpu(monkeypatch):
    """As on a machine without a GPU, whatever this one has."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return monkeypatch


def test_windows_is_refused_in_words(no_gpu):
    no_gpu.setattr(sys, "platform", "win32")
    with pytest.raises(SimulationUnavailable, match=r"Linux or macOS.*Windows"):
        simulated._enable.__wrapped__()


@pytest.mark.parametrize(
    "error", [OSError("no such library"), AttributeError("no such symbol"), ValueError("bad table")]
)
def test_an_unknown_layout_is_refused_in_words(no_gpu, error):
    def missing(name: str) -> Any:
        raise error

    no_gpu.setattr(simulated, "_library", missing)
    no_gpu.setattr(torch.backends.cuda, "is_built", lambda: False)
    with pytest.raises(SimulationUnavailable, match=f"laid out in a way this course does not know: {error}"):
        simulated._enable.__wrapped__()


@pytest.mark.parametrize(
    "error", [SimulationUnavailable("why"), RuntimeError("hasPrimaryContext expects a device index")]
)
def test_a_self_test_that_fails_makes_it_unavailable_with_the_reason(monkeypatch, error):
    def fails(attention: str) -> Any:
        raise error

    monkeypatch.setattr(simulated, "simulated_gpu", fails)
    works, reason = simulated._availability.__wrapped__()
    assert not works and str(error) in reason
