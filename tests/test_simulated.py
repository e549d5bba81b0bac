"""The simulated GPU: which kernels run on it, what they keep, and that nothing of it is left behind."""

import re
from typing import Any

import pytest
import torch
from engine import Operators, Unwatched, storage_of, tiny
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F

from course_utils.errors import SimulationUnavailable
from course_utils.measuring import simulated
from course_utils.measuring.patching import FOLLOWED, Inside, check_layout
from course_utils.measuring.simulated import availability, simulated_gpu
from course_utils.measuring.step import Training
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


def test_a_number_for_the_gpu_is_fake_where_torch_sees_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with simulated_gpu("auto"):
        assert isinstance(torch.tensor(0.0, device="cuda"), FakeTensor)


def test_a_scripted_function_is_not_compiled_for_fake_tensors():
    @torch.jit.script
    def scaled(x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(x * 2.0 + 1.0) * x

    with simulated_gpu("auto"), Operators() as operators:
        x = torch.ones(4, 8, device="cuda")
        for _ in range(4):
            scaled(x)
    assert sum("sigmoid" in name for name in operators.names) == 4


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


FUSED = {kernel: f"_scaled_dot_product_{kernel}_attention" for kernel in ("flash", "efficient", "cudnn")}


@pytest.mark.parametrize(
    ("family", "recompute", "attention"),
    [
        ("gpt2", "none", "eager"),
        ("gpt2", "full", "flash"),
        ("llama", "none", "efficient"),
        ("llama", "full", "cudnn"),
    ],
)
def test_the_chosen_attention_runs_and_no_other(family, recompute, attention):
    model = tiny(family)
    names = operators_of_a_step(
        TrainingRun(model, 1, 32, "bf16-master", attention=attention, recompute=recompute)
    )
    forwards = model.layers * (2 if recompute == "full" else 1)
    for kind, operator in FUSED.items():
        assert names.count(operator) == (forwards if kind == attention else 0)
        assert names.count(f"{operator}_backward") == (model.layers if kind == attention else 0)
    assert names.count("_softmax") == (forwards if attention == "eager" else 0)


def test_the_efficient_kernel_refuses_grouped_keys_as_it_does_on_a_gpu():
    with simulated_gpu("efficient"), pytest.raises(ValueError, match="takes no grouped queries"):
        F.scaled_dot_product_attention(heads(4), heads(2), heads(2), is_causal=True, enable_gqa=True)


def test_a_torch_that_is_laid_out_in_another_way_is_named_with_what_it_lacks(monkeypatch):
    check_layout.cache_clear()
    monkeypatch.delattr(torch.amp.GradScaler, "_maybe_opt_step")
    works, reason = simulated._availability.__wrapped__()
    assert not works and "there is no torch.amp.GradScaler._maybe_opt_step (it reads on the host" in reason
    with pytest.raises(SimulationUnavailable, match=r"no torch\.no_such\._part \(.*tried with torch 2\.11"):
        check_layout((Inside("torch.no_such:", ("_part",), "nothing", "ever"),))
    check_layout(FOLLOWED)  # what a real GPU and the CPU need is there


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (RuntimeError("hasPrimaryContext expects a device index"), "hasPrimaryContext expects"),
        (torch.OutOfMemoryError("CUDA out of memory."), "full.*set CUDA_VISIBLE_DEVICES= to hide that GPU"),
    ],
)
def test_a_self_test_that_fails_makes_it_unavailable_with_the_reason(monkeypatch, error, words):
    def fails(attention: str) -> Any:
        raise error

    monkeypatch.setattr(simulated, "simulated_gpu", fails)
    works, reason = simulated._availability.__wrapped__()
    assert not works and re.search(words, reason)
