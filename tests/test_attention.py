"""Attention as torch chooses it: what an H200 counted, and torch's rule on other cards."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from course_utils.estimating.workspaces import workspaces_of
from course_utils.measuring import attention
from course_utils.measuring.attention import Call, Card, attending, chosen
from course_utils.measuring.simulated import simulated_gpu
from course_utils.measuring.tracker import Tracker
from course_utils.units import round_up

RECORDED = Path(__file__).with_name("gpu") / "recorded" / "attention_choice.jsonl"
FIRST, *CASES = [json.loads(line) for line in RECORDED.read_text().splitlines()]
HOPPER = Card(tuple(FIRST["capability"]), (2, 11), FIRST["cudnn"])
A100 = Card((8, 0), (2, 13), 92000)
TURING = Card((7, 5), (2, 13), 92000)


def named(case: dict[str, Any]) -> str:
    asked = ("dtype", "head_dim", "heads", "kv_heads", "s", "sk", "mask", "causal", "dropout", "layout")
    more = [name for name in ("grad", "enable_gqa") if case[name]]
    return "-".join([*(str(case[name]) for name in asked), *more])


Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Found(NamedTuple):
    """What the simulation gives for a recorded case; bytes are above those before."""

    choice: str
    kept: int = 0
    peak: int = 0
    backward_peak: int = 0
    error: str = ""


def inputs(case: dict[str, Any]) -> tuple[Three, torch.Tensor | None]:
    """q, k, v and the mask of a recorded case."""
    dtype, size, wanted = getattr(torch, case["dtype"]), case["head_dim"], case["grad"]
    made: dict[str, Any] = {"device": "cuda", "dtype": dtype}
    shapes = [(case["heads"], case["s"]), (case["kv_heads"], case["sk"]), (case["kv_heads"], case["sk"])]

    def one(heads: int, tokens: int) -> torch.Tensor:
        if case["layout"] == "bshd":
            return torch.empty(2, tokens, heads, size, **made).transpose(1, 2).requires_grad_(wanted)
        if case["layout"] == "odd":
            return torch.empty(2, heads, tokens, size + 1, requires_grad=wanted, **made)[..., :size]
        return torch.empty(2, heads, tokens, size, requires_grad=wanted, **made)

    q, k, v = (one(*shape) for shape in shapes)
    if case["layout"] == "expand":
        repeated = (torch.empty(2, 1, case["sk"], size, requires_grad=wanted, **made) for _ in "kv")
        k, v = (tensor.expand(2, case["heads"], -1, -1) for tensor in repeated)
    return (q, k, v), mask_of(case, dtype)


def mask_of(case: dict[str, Any], dtype: torch.dtype) -> torch.Tensor | None:
    pairs = case["s"], case["sk"]
    masks = {
        None: lambda: None,
        "bool": lambda: torch.empty(2, 1, *pairs, dtype=torch.bool, device="cuda"),
        "float": lambda: torch.empty(2, 1, *pairs, dtype=dtype, device="cuda"),
        "float32": lambda: torch.empty(2, 1, *pairs, device="cuda"),
        "2d": lambda: torch.empty(*pairs, dtype=torch.bool, device="cuda"),
        "grad": lambda: torch.empty(2, case["heads"], *pairs, dtype=dtype, device="cuda", requires_grad=True),
    }
    return masks[case["mask"]]()


def most(events: list[tuple[int, Any]]) -> int:
    """The most bytes at once above those before, of a tracker's events."""
    now = highest = 0
    for size, _ in events:
        now += size
        highest = max(highest, now)
    return highest


def simulated(case: dict[str, Any], tracker: Tracker) -> Found:
    tensors, mask = inputs(case)
    options = {"dropout_p": case["dropout"], "is_causal": case["causal"], "enable_gqa": case["enable_gqa"]}
    call = Call(*tensors, mask, case["dropout"], case["causal"], None, case["enable_gqa"])
    choice = chosen(call, HOPPER)
    start = len(tracker.events)
    try:
        out = F.scaled_dot_product_attention(*tensors, attn_mask=mask, **options)
    except RuntimeError as error:
        return Found(choice, error=str(error))
    forward = tracker.events[start:]
    if case["grad"]:
        out.sum().backward()
    backward = tracker.events[start + len(forward) :]
    return Found(choice, sum(size for size, _ in forward), most(forward), most(backward))


@pytest.fixture(scope="module")
def all_found() -> dict[str, Found]:
    """Every recorded case, in one process and in the recorded order, as cuBLAS's workspaces come once."""
    found: dict[str, Found] = {}
    with pytest.MonkeyPatch.context() as patch, simulated_gpu("auto"):
        patch.setattr(attention, "installed_torch", lambda: HOPPER.torch)
        patch.setattr(attention, "cudnn_version", lambda: HOPPER.cudnn)
        workspaces = workspaces_of(HOPPER.capability, HOPPER.torch)
        with attending("auto", HOPPER.capability), Tracker("cuda", workspaces) as tracker:
            _ = torch.empty(256, 256, device="cuda") @ torch.empty(256, 256, device="cuda")
            for case in CASES:
                found[named(case)] = simulated(case, tracker)
    return found


def test_all_60_recorded_cases_are_different_ones_but_one_that_was_counted_twice():
    assert FIRST["device"] == "NVIDIA H200" and FIRST["torch"].startswith("2.11")
    assert len(CASES) == 60
    names = [named(case) for case in CASES]
    repeated = {name for name in names if names.count(name) > 1}
    assert repeated == {
        "bfloat16-64-8-8-512-512-bool-False-0.0-bhsd-grad",
        "bfloat16-64-8-8-512-512-bool-False-0.0-bshd-grad",
    }


@pytest.mark.parametrize("case", CASES, ids=named)
def test_the_choice_and_what_is_kept_are_those_that_an_h200_counted(case, all_found):
    found = all_found[named(case)]
    assert found.choice == case["choice"]
    assert found.error == case.get("error", "")
    assert found.kept == case.get("kept", 0)


CUDNN_PLAN = 512
"""Bytes that cuDNN's plans ask torch for: the library's own, which no source shows, and up to 512 here."""


def plan_of_forward(case: dict[str, Any]) -> int:
    """Bytes of cuDNN's plan in forward; for a single query it asks for none."""
    return CUDNN_PLAN if case["choice"] == "cudnn" and case["s"] > 1 else 0


def plan_of_backward(case: dict[str, Any]) -> int:
    """Bytes of cuDNN's plan in backward, where rounding the whole workspace to 512 does not hide them."""
    hidden = case["s"] in (1, 513)
    return CUDNN_PLAN if case["choice"] == "cudnn" and not hidden else 0


NOT_SPLIT = {500: 360_448}
"""Bytes by tokens that torch's allocator counted and nobody asked for: a block whose rest was below 1 MiB."""


@pytest.mark.parametrize("case", [case for case in CASES if "peak" in case], ids=named)
def test_forwards_peak_is_what_an_h200_counted_but_for_cudnns_own_plan(case, all_found):
    assert case["peak"] - all_found[named(case)].peak == plan_of_forward(case)


@pytest.mark.parametrize("case", [case for case in CASES if "backward_peak" in case], ids=named)
def test_backwards_peak_is_what_an_h200_counted_but_for_what_is_named(case, all_found):
    found = all_found[named(case)].backward_peak
    assert case["backward_peak"] - found == plan_of_backward(case) + NOT_SPLIT.get(case["s"], 0)


# The rule on other cards, and what a program switches


def qkv(
    size: int = 64, heads: int = 8, kv_heads: int | None = None, dtype: Any = torch.bfloat16, tokens: int = 32
) -> Three:
    counts = heads, kv_heads or heads, kv_heads or heads
    made: dict[str, Any] = {"dtype": dtype, "device": "cuda", "requires_grad": True}
    q, k, v = (torch.empty(2, count, tokens, size, **made) for count in counts)
    return q, k, v


@pytest.fixture
def gpu() -> Iterator[None]:
    with simulated_gpu("auto"):
        yield


@pytest.mark.usefixtures("gpu")
def test_on_an_a100_flash_comes_first_and_what_it_refuses_is_efficient_or_math():
    mask = torch.empty(32, 32, dtype=torch.bool, device="cuda")
    _, k, v = qkv()
    one_query = torch.empty(2, 8, 1, 64, dtype=torch.bfloat16, device="cuda"), k, v
    expected = {
        "flash": [
            Call(*qkv()),
            Call(*qkv(256), causal=True, dropout=0.1),
            Call(*qkv(20)),
            Call(*qkv(kv_heads=2), grouped=True),
            Call(*one_query),
        ],
        "efficient": [
            Call(*qkv(), mask=mask),
            Call(*qkv(264)),
            Call(*qkv(dtype=torch.float32)),
            Call(*one_query, causal=True),
        ],
        "math": [
            Call(*qkv(kv_heads=1)),
            Call(*qkv(kv_heads=2), mask=mask, grouped=True),
            Call(*qkv(kv_heads=2, dtype=torch.float32), grouped=True),
            Call(*qkv(dtype=torch.float64)),
            Call(*qkv(20), mask=mask),
            Call(k[0], k[0], v[0]),
            Call(k.transpose(-1, -2), k.transpose(-1, -2), v.transpose(-1, -2)),
        ],
    }
    for kernel, calls in expected.items():
        for number, call in enumerate(calls):
            assert chosen(call, A100) == kernel, number


@pytest.mark.usefixtures("gpu")
def test_below_compute_capability_8_there_is_neither_flash_nor_bf16():
    assert chosen(Call(*qkv(dtype=torch.float16)), TURING) == "efficient"
    assert chosen(Call(*qkv(dtype=torch.float32)), TURING) == "efficient"
    assert chosen(Call(*qkv(33, dtype=torch.float32)), TURING) == "efficient"
    assert chosen(Call(*qkv(33, dtype=torch.float32)), A100) == "math"
    assert chosen(Call(*qkv()), TURING) == "math"


@pytest.mark.usefixtures("gpu")
def test_cards_with_little_shared_memory_train_no_heads_of_193_to_224_by_flash():
    ada = Card((8, 9), (2, 13), 92000)
    assert [chosen(Call(*qkv(size)), ada) for size in (192, 200, 224, 256)] == [
        "flash",
        "efficient",
        "efficient",
        "flash",
    ]
    assert chosen(Call(*qkv(256), dropout=0.5), ada) == "efficient"
    with torch.no_grad():
        assert chosen(Call(*qkv(200)), ada) == "flash"


def kernel_now() -> str:
    """The name of the autograd node of attention's output."""
    made_by = F.scaled_dot_product_attention(*qkv()).grad_fn
    assert made_by is not None
    return made_by.name()


def kernel_on(capability: tuple[int, int]) -> str:
    with attending("auto", capability):
        return kernel_now()


@pytest.mark.usefixtures("gpu")
def test_on_hopper_and_blackwell_cudnn_comes_first_and_afterwards_torchs_order_is_as_before():
    before = torch._C._get_sdp_priority_order()
    for capability, kernel in {
        (8, 0): "Flash",
        (8, 9): "Flash",
        (9, 0): "Cudnn",
        (10, 0): "Cudnn",
        (12, 0): "Flash",
    }.items():
        assert kernel_on(capability) == f"ScaledDotProduct{kernel}AttentionBackward0"
        assert torch._C._get_sdp_priority_order() == before


@pytest.mark.usefixtures("gpu")
def test_sdpa_kernel_switches_kernels_off_and_its_order_counts():
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        assert kernel_on((9, 0)) == "ScaledDotProductEfficientAttentionBackward0"
    with sdpa_kernel(SDPBackend.MATH):
        assert kernel_on((8, 0)) == "ToCopyBackward0"
    with attending("auto", (9, 0)):
        backends = [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION]
        with sdpa_kernel(backends, set_priority=True):
            assert kernel_now() == "ScaledDotProductFlashAttentionBackward0"
        assert kernel_now() == "ScaledDotProductCudnnAttentionBackward0"


@pytest.mark.usefixtures("gpu")
def test_where_no_kernel_is_left_the_error_is_torchs_with_the_reasons():
    mask = torch.empty(32, 32, dtype=torch.bool, device="cuda")
    with (
        sdpa_kernel(SDPBackend.FLASH_ATTENTION),
        pytest.raises(RuntimeError, match=r"^No available kernel\. Aborting.*flash: it takes no mask"),
    ):
        F.scaled_dot_product_attention(*qkv(), attn_mask=mask)
    with sdpa_kernel([]), pytest.raises(RuntimeError, match="No viable backend for scaled_dot_product"):
        F.scaled_dot_product_attention(*qkv())


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("gpu", "deterministic")
def test_in_deterministic_mode_cudnn_is_left_out_unless_it_only_warns():
    assert kernel_on((9, 0)) == "ScaledDotProductFlashAttentionBackward0"
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert kernel_on((9, 0)) == "ScaledDotProductCudnnAttentionBackward0"


@pytest.mark.usefixtures("gpu")
def test_from_torch_2_13_on_the_efficient_kernel_takes_no_tensor_that_begins_in_between():
    q = torch.empty(2 * 8 * 32 * 64 + 2, device="cuda")[2:].view(2, 8, 32, 64)
    assert [chosen(Call(q, q, q), A100._replace(torch=release)) for release in ((2, 12), (2, 13))] == [
        "efficient",
        "math",
    ]


@pytest.mark.usefixtures("gpu")
def test_from_torch_2_12_on_cudnn_takes_a_dropout_in_sixteenths_only():
    for release, dropout, kernel in [
        ((2, 11), 0.1, "cudnn"),
        ((2, 12), 0.1, "flash"),
        ((2, 12), 0.125, "cudnn"),
    ]:
        with attending("auto", (9, 0)):
            call = Call(*qkv(), dropout=dropout)
            assert chosen(call, HOPPER._replace(torch=release)) == kernel


def operators_of(work: Any) -> list[tuple[str, int]]:
    """What the tracker sees: operators and bytes that they allocate."""
    with Tracker("cuda") as tracker:
        work()
    return [(storage.operation, size) for size, storage in tracker.events if size > 0]


@pytest.mark.usefixtures("gpu")
def test_under_autocast_a_mask_is_cast_as_query_key_and_value_are():
    tensors = qkv(dtype=torch.float32)
    mask = torch.empty(32, 32, device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        seen = operators_of(lambda: F.scaled_dot_product_attention(*tensors, attn_mask=mask))
    assert ("_to_copy", 32 * 32 * 2) in seen
    assert "_scaled_dot_product_efficient_attention" in dict(seen)
    with pytest.raises(RuntimeError, match="invalid dtype for bias"):
        F.scaled_dot_product_attention(*qkv(), attn_mask=mask)


@pytest.mark.usefixtures("gpu")
def test_a_mask_is_not_copied_for_every_head_when_the_efficient_kernel_goes_back():
    mask = torch.empty(32, 32, dtype=torch.bfloat16, device="cuda")
    out = F.scaled_dot_product_attention(*qkv(), attn_mask=mask).transpose(1, 2)
    seen = operators_of(lambda: out.sum().backward())
    taken = [size for name, size in seen if name == "_scaled_dot_product_efficient_attention_backward"]
    of_one_tensor, rows, workspace = 2 * 8 * 32 * 64 * 2, 4 * 2 * 8 * 32, 4 * 2 * 8 * (64 * 64 + 4)
    # the expanded gradient of the output, three results, and the kernel's own
    assert taken == [*[of_one_tensor] * 4, rows, round_up(workspace)]


@pytest.mark.usefixtures("gpu")
def test_flash_pads_head_sizes_to_multiples_of_8_and_a_mask_of_odd_rows_gets_room():
    tensors = qkv(20)
    padded = 2 * 8 * 32 * 24 * 2
    seen = operators_of(lambda: F.scaled_dot_product_attention(*tensors))
    assert [size for name, size in seen if name == "constant_pad_nd"] == [padded] * 3
    odd = qkv(tokens=33)
    mask = torch.empty(33, 33, dtype=torch.bfloat16, device="cuda")
    seen = operators_of(lambda: F.scaled_dot_product_attention(*odd, attn_mask=mask))
    assert [size for name, size in seen if name == "constant_pad_nd"] == [round_up(33 * 40 * 2)]


@pytest.mark.usefixtures("gpu")
def test_math_is_seen_operator_by_operator_in_inference_mode_too():
    with torch.inference_mode():
        seen = operators_of(lambda: F.scaled_dot_product_attention(*qkv(kv_heads=1)))
    assert "_safe_softmax" in dict(seen)


@pytest.mark.usefixtures("gpu")
def test_arguments_that_do_not_fit_together_raise_torchs_own_errors():
    q, k, v = qkv()
    with pytest.raises(RuntimeError, match="to have the same dtype"):
        F.scaled_dot_product_attention(q, k.float(), v)
    with pytest.raises(RuntimeError, match="attn_mask dtype to be bool or float"):
        F.scaled_dot_product_attention(
            q, k, v, attn_mask=torch.empty(32, 32, dtype=torch.int64, device="cuda")
        )


def test_on_the_cpu_inside_a_simulation_attention_is_torchs_own():
    with simulated_gpu("auto"):
        q = torch.empty(1, 2, 8, 16, requires_grad=True)
        out = F.scaled_dot_product_attention(q, q, q)
    assert out.device.type == "cpu" and out.shape == (1, 2, 8, 16)
