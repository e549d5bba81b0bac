"""Measurements that only the GPU itself can make: the context, workspaces, kernels' scratch, times."""

import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..measuring.devices import Device, time_calls
from ..measuring.live import KERNELS
from ..measuring.release import is_out_of_memory
from ..measuring.tracker import Tracker
from ..run import ATTENTIONS

ALONE = {**KERNELS, "math": SDPBackend.MATH}
"""Backends of torch's attention: its kernels, and operator by operator, as where it has none."""

SECOND_PROGRAM = (
    "import torch; torch.cuda.init(); free, total = torch.cuda.mem_get_info(); print(total - free)"
)
"""A program that does nothing but make a context, and says what the driver then counts."""


def context_bytes(device: Device) -> dict[str, Any]:
    """Bytes that a context takes of the GPU before the first tensor, in three readings.

    Each is what a second program, which does nothing else, finds in use, less what this one found before.
    """
    device.synchronize()
    readings = []
    for _ in range(3):
        before = device.in_use()
        found = subprocess.check_output([sys.executable, "-c", SECOND_PROGRAM], text=True, timeout=60)
        readings.append(int(found) - before)
    return {"context": sorted(readings)[1], "readings": readings}


MOST_READINGS = 200  # until a counter that still changes is given up
BETWEEN = 0.01  # Seconds between two readings


class Unsettled(RuntimeError):
    """A counter that another thread keeps changing, so that a difference of two readings means nothing."""


def settled_bytes(device: Device) -> int:
    """Bytes allocated, once two successive readings agree. Raises Unsettled if no two do.

    `torch.autograd.grad` returns before autograd's thread has freed the last tensors that it holds.
    """
    device.synchronize()
    before = device.allocated()
    for _ in range(MOST_READINGS):
        time.sleep(BETWEEN)
        now = device.allocated()
        if now == before:
            return now
        before = now
    raise Unsettled(f"the bytes allocated still change after {MOST_READINGS} readings")


def workspace_bytes(device: Device) -> dict[str, Any]:
    """Bytes that stay allocated after a matrix product whose tensors are gone, by operation.

    torch gives cuBLAS a workspace for each handle and stream, and keeps it. Autograd's own thread has a
    handle of its own, so that a backward pass may add one. All of them together are the last figure.
    """
    x, weight = _normal(device.kind, (1024, 1024), (1024, 1024))
    bias = torch.randn(1024, device=device.kind, dtype=torch.float16)
    operations: dict[str, Callable[[], Any]] = {
        "mm": lambda: x @ weight,
        "addmm": lambda: F.linear(x, weight, bias),
        "bmm": lambda: x.view(4, 256, 1024) @ weight.view(4, 1024, 256),
        "fp32 mm": lambda: x.detach().float() @ weight.detach().float(),
        "backward": lambda: torch.autograd.grad((x @ weight).sum(), [x, weight]),
    }
    device.release()
    before = settled_bytes(device)
    held = before
    kept: dict[str, int] = {}
    for name, operation in operations.items():
        operation()
        now = settled_bytes(device)
        kept[name] = now - held
        held = now
    return {"kept_after": kept, "together": held - before}


class Prepared(NamedTuple):
    """An operation ready to run: `run` is given what `prepare` made, which is not counted."""

    name: str
    prepare: Callable[[], Any]
    run: Callable[[Any], Any]
    kernel: str = ""


def scratch_bytes(device: Device) -> list[dict[str, Any]]:
    """Measure each operation alone: the device's peak in bytes, the tracker's, and the scratch between."""
    return [_scratch_of(item, device) for item in prepared_operations(device.kind)]


def _scratch_of(item: Prepared, device: Device) -> dict[str, Any]:
    try:
        with kernel_alone(item.kernel):
            item.run(item.prepare())  # workspaces and modules are there from now on
            counted = _counted_peak(item, device)
            tracked = _tracked_peak(item, device)
        if counted < tracked:
            raise Unsettled(f"scratch cannot be negative, and {counted:,} bytes less {tracked:,} is")
        return {"operation": item.name, "counted": counted, "tracked": tracked, "scratch": counted - tracked}
    except RuntimeError as error:
        return {"operation": item.name, why_not(error): first_line(error)}


def _counted_peak(item: Prepared, device: Device) -> int:
    given = item.prepare()
    before = settled_bytes(device)
    device.reset_peaks()
    result = item.run(given)
    device.synchronize()
    peak = device.peaks()[0] - before
    del result
    return peak


def _tracked_peak(item: Prepared, device: Device) -> int:
    # Backward on this thread: the tracker sees operators on the thread that entered it.
    with torch.autograd.set_multithreading_enabled(False), Tracker(device.kind) as tracker:
        given = item.prepare()
        start = len(tracker.events)
        result = item.run(given)
        del result
    before = tracker.at(start).total
    peak = tracker.at(tracker.peak_event(since=start)).total
    return max(0, peak - before)


def kernel_alone(kernel: str) -> AbstractContextManager[Any]:
    """Inside, this attention kernel is the only one allowed; any, where none is named."""
    return sdpa_kernel(ALONE[kernel]) if kernel in ALONE else nullcontext()


def prepared_operations(device: str) -> list[Prepared]:
    """A training step's operations one by one, at GPT-2's sizes: b=8, s=1024, h=768, 16 bits unless said."""
    rows = 8 * 1024
    hidden = 768
    vocab = 50257
    normal = partial(_normal, device)
    tokens = partial(torch.randint, vocab, (rows,), device=device)
    x = (rows, hidden)
    vector = (hidden,)
    operations = [
        ("linear", lambda: normal(x, (hidden, hidden), vector), F.linear),
        ("layer_norm", lambda: normal(x, vector, vector), lambda x, w, b: F.layer_norm(x, (hidden,), w, b)),
        ("rms_norm", lambda: normal(x, vector), lambda x, w: F.rms_norm(x, (hidden,), w)),
        ("gelu", lambda: normal(x), F.gelu),
        ("dropout", lambda: normal(x), lambda x: F.dropout(x, 0.1)),
        ("embedding", lambda: (tokens(), *normal((vocab, hidden))), F.embedding),
        (
            "cross_entropy",
            lambda: (*normal((rows, vocab)), tokens()),
            lambda x, y: F.cross_entropy(x.float(), y),
        ),
    ]
    found: list[Prepared] = []
    for name, make, operation in operations:
        found += _both_ways(name, make, operation)
    for kernel in KERNELS:
        for seq_len in (1024, 4096):
            name = f"attention, {kernel}, s={seq_len:,}"
            found += _both_ways(name, partial(attention_inputs, device, seq_len), causal_attention, kernel)
    return found


def _both_ways(
    name: str, make: Callable[[], tuple[Any, ...]], operation: Callable[..., torch.Tensor], kernel: str = ""
) -> list[Prepared]:
    def forward_done() -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
        given = make()
        result = operation(*given)
        wanted = [tensor for tensor in given if tensor.requires_grad]
        return result, wanted, torch.ones_like(result)

    return [
        Prepared(f"{name}, forward", make, lambda given: operation(*given), kernel),
        Prepared(f"{name}, backward", forward_done, lambda given: torch.autograd.grad(*given), kernel),
    ]


def attention_inputs(device: str, seq_len: int) -> tuple[torch.Tensor, ...]:
    """Queries, keys and values of one sequence (1, a, s, h/a) in 16 bits."""
    return _normal(device, *[(1, 16, seq_len, 64)] * 3)


def _normal(device: str, *shapes: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    half = partial(torch.randn, device=device, dtype=torch.float16, requires_grad=True)
    return tuple(half(shape) for shape in shapes)


def causal_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def eager_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    mask = torch.ones(q.size(2), q.size(2), dtype=torch.bool, device=q.device).triu(1)
    scores = (q @ k.transpose(-2, -1)) / q.size(-1) ** 0.5
    return F.softmax(scores.masked_fill(mask, float("-inf")), dim=-1) @ v


def kernel_times(device: Device, seq_len: int, repetitions: int = 10) -> list[dict[str, Any]]:
    """Time each kind of attention at this length: milliseconds of forward and backward."""
    found: list[dict[str, Any]] = []
    for kernel in (*ATTENTIONS, "math"):
        device.release()
        try:
            with kernel_alone(kernel):
                result = {"milliseconds": _forward_and_backward(device, kernel, seq_len, repetitions)}
        except RuntimeError as error:
            result = {why_not(error): first_line(error)}
        found.append({"kernel": kernel, "seq_len": seq_len, **result})
    return found


def _forward_and_backward(
    device: Device, kernel: str, seq_len: int, repetitions: int
) -> dict[str, list[float]]:
    attend = eager_attention if kernel == "eager" else causal_attention
    given = attention_inputs(device.kind, seq_len)

    def forward() -> torch.Tensor:
        return attend(*given)

    torch.autograd.grad(forward().sum(), given)  # the first is slower: kernels are loaded
    times = {"forward": time_calls(forward, device, repetitions, seconds=60)}
    result = forward()
    gradient = torch.ones_like(result)

    def backward() -> Any:
        return torch.autograd.grad(result, given, gradient, retain_graph=True)

    times["backward"] = time_calls(backward, device, repetitions, seconds=60)
    return times


def why_not(error: RuntimeError) -> str:
    """The kind of an error: "out_of_memory", "unsettled" (counters moved) or "refused" (by the GPU)."""
    if isinstance(error, Unsettled):
        return "unsettled"
    if is_out_of_memory(error):
        return "out_of_memory"
    return "refused"


def first_line(error: BaseException) -> str:
    line = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {line[:300]}"
