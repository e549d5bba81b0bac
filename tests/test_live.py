"""Measuring on a real GPU, and what happens where there is none, an old one or a small one."""

import gc
import re
import weakref
from collections import namedtuple
from typing import Any

import pytest
import torch
from engine import tiny

from course_utils import compare, estimate, measure
from course_utils.gpus import Gpu
from course_utils.measuring import choose_source, live
from course_utils.measuring.live import (
    KERNELS,
    GpuOutOfMemory,
    KernelRefused,
    memory_released,
    only_kernel,
    release,
)
from course_utils.measuring.tracebacks import let_go
from course_utils.planning.twin import SAFETY, fits, largest_micro_batch, not_built, twin, unsupported
from course_utils.run import ATTENTIONS, TrainingRun
from course_utils.units import GB, MB, GiB

XL = TrainingRun("gpt2-xl", 32, 1024)
SMALL = TrainingRun("gpt2", 2, 256)

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

MESSAGE = (
    "CUDA out of memory. Tried to allocate 9.38 GiB. "
    "GPU 0 has a total capacity of 31.73 GiB of which 1.25 GiB is free. "
    "Process 4711 has 30.48 GiB memory in use. "
    "Of the allocated memory 29.90 GiB is allocated by PyTorch, "
    "and 12.00 MiB is reserved by PyTorch but unallocated. "
    "If reserved but unallocated memory is large "
    "try setting PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  "
    "See documentation for Memory Management"
)
"""torch's message on a card of 32 GB (c10/cuda/CUDACachingAllocator.cpp)."""


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (12, 0)])
def test_ampere_and_newer_run_everything(capability):
    assert unsupported(XL, capability) == ""


@pytest.mark.parametrize("capability", [(7, 0), (7, 5)])
def test_older_gpus_name_what_they_lack_and_what_would_do(capability):
    assert "does not compute in bf16: choose precision='amp-fp16'" in unsupported(XL, capability)
    assert "bf16" in unsupported(XL.replace(precision="bf16-master"), capability)
    half = XL.replace(precision="amp-fp16")
    assert "no flash kernel for it: choose attention='efficient' or 'eager'" in unsupported(half, capability)
    assert "no cudnn kernel" in unsupported(half.replace(attention="cudnn"), capability)
    assert unsupported(half.replace(attention="efficient"), capability) == ""
    assert unsupported(XL.replace(precision="fp32", attention="eager"), capability) == ""


@pytest.mark.parametrize("memory", [0, 2 * GB, 16 * GB, 25 * GB, 32 * GiB, 80 * GB, 10**12])
def test_the_largest_micro_batch_fits_and_the_next_does_not(memory):
    count = largest_micro_batch(XL, memory)
    assert 0 <= count <= XL.micro_batch
    if count:
        assert estimate(XL.replace(micro_batch=count)).total * SAFETY <= memory
    if count < XL.micro_batch:
        assert not fits(XL.replace(micro_batch=count + 1), memory)


Card = namedtuple("Card", "name capability free")


@pytest.fixture
def with_card(monkeypatch):
    """Pretend that torch sees a GPU."""

    def pretend(card: Card | None) -> None:
        monkeypatch.delenv("COURSE_SOURCE", raising=False)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: card is not None)
        if card is not None:
            monkeypatch.setattr(torch.cuda, "get_device_name", lambda: card.name)
            monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: card.capability)
            monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (card.free - 2 * GB, 2 * card.free))
            monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 3 * GB)
            monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 1 * GB)

    return pretend


@pytest.mark.parametrize(
    ("card", "run", "chosen"),
    [
        (None, SMALL, ("simulated", "")),
        (Card("A100", (8, 0), 40 * GB), SMALL, ("live", "")),
        (Card("A100", (8, 0), 80 * GB), XL, ("simulated", "needs 134.5 GB, A100 has 80.0 GB free")),
    ],
)
def test_auto_is_live_where_there_is_a_gpu_and_the_run_fits(with_card, card, run, chosen):
    with_card(card)
    assert choose_source(run) == chosen


def test_the_margin_counts(with_card):
    needed = estimate(SMALL).total
    with_card(Card("A100", (8, 0), round(needed * 1.04)))
    assert choose_source(SMALL)[0] == "simulated"
    with_card(Card("A100", (8, 0), round(needed * 1.06)))
    assert choose_source(SMALL)[0] == "live"


def test_what_an_old_gpu_lacks_is_simulated_and_says_why(with_card):
    with_card(Card("Tesla T4", (7, 5), 15 * GB))
    source, reason = choose_source(SMALL)
    assert source == "simulated" and "7.5" in reason and "bf16" in reason
    assert choose_source(SMALL.replace(precision="amp-fp16", attention="efficient")) == ("live", "")


@pytest.mark.parametrize("source", ["live", "simulated", "cpu", "recorded"])
def test_the_environment_settles_auto(with_card, monkeypatch, source):
    with_card(Card("A100", (8, 0), 40 * GB))
    monkeypatch.setenv("COURSE_SOURCE", source)
    assert choose_source(SMALL) == (source, "")


def test_an_unknown_source_in_the_environment_names_the_nearest(monkeypatch):
    monkeypatch.setenv("COURSE_SOURCE", "simulate")
    with pytest.raises(ValueError, match="unknown COURSE_SOURCE 'simulate': did you mean 'simulated'"):
        measure(SMALL)


def test_live_without_a_gpu_says_what_to_choose(with_card):
    with_card(None)
    with pytest.raises(ValueError, match=r"no CUDA GPU .* source='simulated'"):
        measure(SMALL, "live")


def test_live_on_an_old_gpu_is_refused_by_name(with_card):
    with_card(Card("Tesla T4", (7, 5), 15 * GB))
    with pytest.raises(ValueError, match="does not compute in bf16"):
        measure(SMALL, "live")


TINY = TrainingRun(tiny("llama"), 2, 32, "fp32", attention="eager")
NO_IMAGE = (
    "CUDA error: no kernel image is available for execution on the device\nSearch for `cudaErrorNoKernelImage"
)


@pytest.mark.parametrize(
    ("capability", "architectures"),
    [
        ((8, 0), ["sm_75", "sm_80"]),
        ((8, 9), ["sm_75", "sm_86"]),  # machine code runs on later minor versions
        ((12, 1), ["sm_120"]),
        ((12, 0), ["sm_90", "compute_90"]),  # PTX is compiled for any newer GPU
        ((9, 0), ["sm_90a"]),
        ((10, 3), ["sm_100f"]),
        ((10, 3), ["compute_100f"]),
        ((5, 0), []),  # nothing is known
    ],
)
def test_a_gpu_executes_what_torch_was_built_for(capability, architectures):
    assert not_built(capability, architectures) == ""


@pytest.mark.parametrize(
    ("capability", "architectures"),
    [
        ((6, 1), ["sm_75", "sm_80", "sm_90"]),
        ((8, 0), ["sm_75", "sm_86"]),
        ((12, 0), ["sm_90", "sm_100"]),
        ((7, 0), ["compute_75"]),
    ],
)
def test_a_gpu_that_torch_was_not_built_for_is_named(capability, architectures):
    reason = not_built(capability, architectures)
    assert (
        f"built for {', '.join(architectures)}, and this GPU has compute capability {capability[0]}."
        in reason
    )


def cannot(monkeypatch, error: Exception) -> None:
    """Let every step on the GPU end in this error."""

    def ready(*_):
        raise error

    monkeypatch.setattr(live, "ready", ready)


FAILURES = pytest.mark.parametrize(
    ("error", "expected", "words"),
    [
        (
            torch.OutOfMemoryError(MESSAGE),
            GpuOutOfMemory,
            "It asked for 9.38 GiB more when 1.25 GiB was free",
        ),
        (RuntimeError(NO_IMAGE), KernelRefused, "has no code for this a stand-in (compute capability 8.0)"),
        (
            RuntimeError("No available kernel. Aborting execution."),
            KernelRefused,
            "has no eager kernel on this GPU",
        ),
    ],
    ids=["memory", "architecture", "kernel"],
)


@FAILURES
def test_auto_simulates_what_the_gpu_turns_out_not_to_do_and_says_why(
    card, monkeypatch, error, expected, words
):
    cannot(monkeypatch, error)
    measured = measure(TINY)
    assert measured.source == "simulated" and measured.peak == measure(TINY, "simulated").peak
    assert measured.provenance.note.startswith("not live: ") and words in measured.provenance.note


@FAILURES
@pytest.mark.parametrize("forced", [True, False])
def test_live_that_was_asked_for_is_never_simulated(card, monkeypatch, error, expected, words, forced):
    cannot(monkeypatch, error)
    if forced:
        monkeypatch.setenv("COURSE_SOURCE", "live")
    with pytest.raises(expected, match=re.escape(words)):
        measure(TINY, "auto" if forced else "live")


def test_a_gpu_that_this_torch_was_not_built_for_is_simulated(card, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_86", "sm_90"])
    note = measure(TINY).provenance.note
    assert "built for sm_86, sm_90, and this GPU has compute capability 8.0: install a build" in note
    with pytest.raises(ValueError, match="was built for sm_86, sm_90"):
        measure(TINY, "live")


def test_a_driver_that_fails_is_named_and_no_gpu_at_all_is_not(monkeypatch):
    said = ["The NVIDIA driver on your system is too old (found version 11040).\n"]

    def fails() -> None:
        raise RuntimeError(said[-1])

    monkeypatch.delenv("COURSE_SOURCE", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", fails)
    assert choose_source(TINY) == ("simulated", f"this GPU cannot be used: {said[0].strip()}")
    with pytest.raises(ValueError, match=r"driver on your system is too old .* choose source='simulated'"):
        measure(TINY, "live")
    for words in ("No CUDA GPUs are available", "Found no NVIDIA driver on your system. Please check"):
        said.append(words)
        assert choose_source(TINY) == ("simulated", "")


class Held:
    """Remembers weakly what a failing step had allocated, at the moment at which its message is written."""

    def __init__(self) -> None:
        self.references: list[weakref.ref[torch.UntypedStorage]] = []
        self.alive_when_asked = -1

    def step(self, depth: int = 3) -> torch.Tensor:
        tensor = torch.ones(1000)
        self.references.append(weakref.ref(tensor.untyped_storage()))
        if depth == 0:
            raise torch.OutOfMemoryError(MESSAGE)
        return self.step(depth - 1) + tensor

    def free(self) -> int:
        self.alive_when_asked = sum(reference() is not None for reference in self.references)
        return 60 * GB


def test_out_of_memory_says_what_was_asked_what_was_free_and_what_would_fit():
    with pytest.raises(GpuOutOfMemory) as caught, memory_released(XL, Held().free):
        Held().step()
    said = str(caught.value)
    assert said.startswith(f"{XL} does not fit this GPU. It asked for 9.38 GiB more when 1.25 GiB was free.")
    assert "needs about 134.5 GB; 60.0 GB is free now" in said
    assert f"micro_batch={largest_micro_batch(XL, 60 * GB)} would fit" in said


def test_out_of_memory_for_any_batch_says_what_else_to_try():
    no_other = pytest.raises(GpuOutOfMemory, match="no micro-batch fits: try recompute='full'")
    with no_other, memory_released(XL, lambda: MB):
        Held().step()


def test_words_that_torch_may_change_are_passed_on():
    with pytest.raises(GpuOutOfMemory, match=r"GPU\. Out of it\. The run"), memory_released(XL, lambda: GB):
        raise torch.OutOfMemoryError("Out of it. Sorry.")


def test_memory_is_released_before_anyone_looks_at_what_is_free():
    held = Held()
    with pytest.raises(GpuOutOfMemory), memory_released(XL, held.free):
        held.step()
    assert len(held.references) == 4 and held.alive_when_asked == 0


def test_a_chain_of_errors_is_released_too():
    held = Held()
    with pytest.raises(GpuOutOfMemory), memory_released(XL, held.free):
        try:
            held.step()
        except torch.OutOfMemoryError as error:
            raise torch.OutOfMemoryError(MESSAGE) from error
    assert len(held.references) == 4 and held.alive_when_asked == 0


def test_a_run_that_is_interrupted_lets_go_of_its_memory_and_keeps_its_traceback():
    """A notebook keeps the traceback, and with it every tensor of every frame."""
    held = Held()

    def interrupted() -> None:
        kept = torch.ones(1000)
        held.references.append(weakref.ref(kept.untyped_storage()))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught, memory_released(XL, held.free):
        interrupted()
    assert caught.traceback[-1].name == "interrupted"
    assert [reference() for reference in held.references] == [None]


def test_a_traceback_is_let_go_while_the_garbage_collector_calls_back():
    """Its callback is a function too, entered midway; no function of the traceback is ever run."""
    entered: list[int] = []

    def failing(number: int) -> None:
        entered.append(number)
        raise ValueError

    for _ in range(50):
        with pytest.raises(ValueError) as caught:
            failing(1)
        thresholds = gc.get_threshold()
        gc.callbacks.append(lambda *_: None)
        gc.set_threshold(1, 1, 1)
        try:
            let_go(caught.value)
        finally:
            gc.set_threshold(*thresholds)
            gc.callbacks.pop()
    assert entered == [1] * 50


def test_without_an_error_what_only_a_cycle_keeps_is_released_and_what_somebody_holds_stays():
    held = torch.ones(8)
    lost: list[Any] = [torch.ones(8)]
    gone = weakref.ref(lost[0])
    lost.append(lost)
    del lost
    assert gone() is not None
    release(None)
    assert gone() is None and held.sum() == 8


@needs_gpu
@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("optimizer", ["adamw", "adamw-loop", "adamw-fused", "momentum"])
def test_live_kinds_equal_the_simulated_ones(family, optimizer):
    run = TrainingRun(tiny(family, hidden=512, vocab=8192), 4, 128, "fp32", optimizer, "eager")
    live = measure(run, "live")
    simulated = measure(run, "simulated")
    assert live.breakdown == simulated.breakdown
    assert live.moments == simulated.moments
    assert live.source == "live" and torch.cuda.get_device_name() in str(live.provenance)


@needs_gpu
def test_the_devices_own_counters_are_near_the_estimate():
    run = TrainingRun("gpt2", 4, 512, "fp32", attention="efficient")
    compared = compare(run, "live")
    counters = compared.measurement.counters
    assert compared.estimate.total <= counters["allocated"] <= 1.05 * compared.estimate.total
    assert counters["allocated"] <= counters["reserved"] <= counters["driver"]
    assert "GPU itself counted" in compared.explanation()


@needs_gpu
def test_a_gpu_that_is_too_small_is_left_as_it_was():
    before = torch.cuda.memory_allocated()
    share = 1 * GB / torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(share)
    try:
        with pytest.raises(GpuOutOfMemory, match="does not fit this GPU"):
            measure(TrainingRun("gpt2", 4, 512, "fp32", attention="efficient"), "live")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert torch.cuda.memory_allocated() == before
    assert measure(TrainingRun(tiny("llama"), 1, 32, "fp32", attention="eager"), "live").peak > 0


@pytest.mark.parametrize(
    "words", ["CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"]
)
def test_libraries_that_get_no_memory_count_as_out_of_memory(words):
    with pytest.raises(GpuOutOfMemory), memory_released(XL, lambda: GB):
        raise RuntimeError(words)


def test_other_errors_are_not_taken_for_out_of_memory():
    with pytest.raises(RuntimeError, match="mat1 and mat2"), memory_released(XL, lambda: GB):
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")


def test_advice_never_offers_what_has_just_failed():
    with (
        pytest.raises(GpuOutOfMemory) as caught,
        memory_released(XL.replace(recompute="full"), lambda: 200 * GB),
    ):
        raise torch.OutOfMemoryError("Out of it.")
    assert "micro_batch=31 would fit" in str(caught.value) and "recompute='full'" not in str(caught.value)


def test_every_kernel_that_a_run_can_name_is_forced_but_the_one_written_out():
    assert set(KERNELS) == set(ATTENTIONS) - {"eager"}


def test_the_cudnn_kernel_needs_ampere_and_no_newer_gpu_than_torch_knows():
    run = XL.replace(attention="cudnn", precision="amp-fp16")
    assert "torch has no cudnn kernel" in unsupported(run, (7, 5))
    for capability in ((8, 0), (9, 0), (12, 1)):
        assert unsupported(run, capability) == ""
    assert "too new for torch's cuDNN kernel: choose attention='flash'" in unsupported(run, (13, 0))


def test_tf32_needs_ampere():
    run = XL.replace(precision="tf32", attention="efficient")
    assert "does not compute in tf32: choose precision='fp32'" in unsupported(run, (7, 5))
    assert unsupported(run, (8, 0)) == ""


@pytest.mark.parametrize("capability", [(7, 5), (13, 0)])
def test_a_twin_of_a_cudnn_run_takes_a_kernel_that_is_there(capability):
    found = twin(SMALL.replace(attention="cudnn"), Gpu("a card", 40 * GB, capability))
    assert unsupported(found, capability) == ""
    assert (found.attention, found.precision.name) == (
        ("efficient", "amp-fp16") if capability == (7, 5) else ("flash", "amp-bf16")
    )


def test_a_kernel_that_torch_refuses_is_named_with_what_it_was_given():
    run = TrainingRun("gpt2", 2, 256, attention="cudnn")
    q = torch.ones(1, 2, 8, 16)
    refused = pytest.raises(
        ValueError, match=r"no cudnn kernel on this GPU for heads of 64 elements with dropout 0\.1"
    )
    with refused, only_kernel(run):
        torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)


def test_other_errors_pass_the_choice_of_a_kernel_unchanged():
    with pytest.raises(RuntimeError, match="on purpose"), only_kernel(SMALL):
        raise RuntimeError("on purpose")
