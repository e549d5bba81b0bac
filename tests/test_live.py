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
from course_utils.measuring import live
from course_utils.measuring.live import GpuOutOfMemory, KernelRefused, memory_released, only_kernel
from course_utils.measuring.release import let_go
from course_utils.measuring.sources import choose_source
from course_utils.planning.twin import largest_micro_batch, not_built, unsupported
from course_utils.run import TrainingRun
from course_utils.units import GB

XL = TrainingRun("gpt2-xl", 32, 1024)
SMALL = TrainingRun("gpt2", 2, 256)
TINY = TrainingRun(tiny("llama"), 2, 32, "fp32", attention="eager")

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

MESSAGE = (
    "CUDA out of memory. Tried to allocate 9.38 GiB. "
    "GPU 0 has a total capacity of 31.73 GiB of which 1.25 GiB is free. "
    "Process 4711 has 30.48 GiB memory in use. "
)
"""The beginning of torch's message on a card of 32 GB (c10/cuda/CUDACachingAllocator.cpp)."""

NO_IMAGE = "CUDA error: no kernel image is available for execution on the device\nSearch for `cudaError"


# Which runs a card can take


@pytest.mark.parametrize(
    ("capability", "changes", "words"),
    [
        ((8, 0), {}, ""),
        ((7, 5), {}, "does not compute in bf16: choose precision='amp-fp16'"),
        (
            (7, 5),
            {"precision": "amp-fp16"},
            "no flash kernel for it: choose attention='efficient' or 'eager'",
        ),
        ((7, 5), {"precision": "amp-fp16", "attention": "efficient"}, ""),
    ],
)
def test_a_gpu_names_what_it_lacks_and_what_would_do(capability, changes, words):
    said = unsupported(XL.replace(**changes), capability)
    assert words in said and bool(words) == bool(said)


@pytest.mark.parametrize(
    ("capability", "architectures", "runs"),
    [
        ((8, 9), ["sm_75", "sm_86"], True),  # machine code runs on later minor versions
        ((12, 0), ["sm_90", "compute_90"], True),  # PTX is compiled for any newer GPU
        ((10, 3), ["sm_100f"], True),
        ((5, 0), [], True),  # nothing is known
        ((8, 0), ["sm_75", "sm_86"], False),
        ((7, 0), ["compute_75"], False),
    ],
)
def test_a_gpu_executes_what_torch_was_built_for(capability, architectures, runs):
    reason = not_built(capability, architectures)
    built_for = f"built for {', '.join(architectures)}, and this GPU has compute capability {capability[0]}."
    assert (reason == "") if runs else (built_for in reason)


# Which source is chosen


Card = namedtuple("Card", "name capability free")
A100 = Card("A100", (8, 0), 40 * GB)
T4 = Card("Tesla T4", (7, 5), 15 * GB)


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
    ("card", "run", "source", "reason"),
    [
        (None, SMALL, "simulated", ""),
        (A100, SMALL, "live", ""),
        (A100, XL, "simulated", "needs 134.5 GB, A100 has 40.0 GB free"),
        (A100._replace(free=round(estimate(SMALL).total * 1.04)), SMALL, "simulated", "needs"),
        (A100._replace(free=round(estimate(SMALL).total * 1.06)), SMALL, "live", ""),
        (T4, SMALL, "simulated", "bf16"),
        (T4, SMALL.replace(precision="amp-fp16", attention="efficient"), "live", ""),
    ],
)
def test_auto_is_live_where_there_is_a_gpu_and_the_run_fits_with_a_margin(
    with_card, card, run, source, reason
):
    with_card(card)
    chosen, said = choose_source(run)
    assert chosen == source and reason in said and bool(reason) == bool(said)


def test_the_environment_settles_auto_and_an_unknown_source_names_the_nearest(with_card, monkeypatch):
    with_card(A100)
    monkeypatch.setenv("COURSE_SOURCE", "cpu")
    assert choose_source(SMALL) == ("cpu", "")
    monkeypatch.setenv("COURSE_SOURCE", "simulate")
    with pytest.raises(ValueError, match="unknown COURSE_SOURCE 'simulate': did you mean 'simulated'"):
        measure(SMALL)


@pytest.mark.parametrize(
    ("card", "words"), [(None, r"no CUDA GPU .* source='simulated'"), (T4, "does not compute in bf16")]
)
def test_live_is_refused_by_name_where_it_cannot_be(with_card, card, words):
    with_card(card)
    with pytest.raises(ValueError, match=words):
        measure(SMALL, "live")


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


@pytest.mark.parametrize(
    ("error", "expected", "words"),
    [
        (
            torch.OutOfMemoryError(MESSAGE),
            GpuOutOfMemory,
            "It asked for 9.38 GiB more when 1.25 GiB was free",
        ),
        (RuntimeError(NO_IMAGE), KernelRefused, "has no code for this a stand-in (compute capability 8.0)"),
        (RuntimeError("No available kernel. Abort."), KernelRefused, "has no eager kernel on this GPU"),
    ],
    ids=["memory", "architecture", "kernel"],
)
def test_auto_simulates_what_the_gpu_turns_out_not_to_do_and_live_raises(
    card, monkeypatch, error, expected, words
):
    def ready(*_: Any) -> None:
        raise error

    monkeypatch.setattr(live, "ready", ready)
    measured = measure(TINY)
    assert measured.source == "simulated" and measured.peak == measure(TINY, "simulated").peak
    assert measured.provenance.note.startswith("not live: ") and words in measured.provenance.note
    with pytest.raises(expected, match=re.escape(words)):
        measure(TINY, "live")
    monkeypatch.setenv("COURSE_SOURCE", "live")
    with pytest.raises(expected, match=re.escape(words)):
        measure(TINY)


def test_a_gpu_that_this_torch_was_not_built_for_is_simulated(card, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_86", "sm_90"])
    note = measure(TINY).provenance.note
    assert "built for sm_86, sm_90, and this GPU has compute capability 8.0: install a build" in note
    with pytest.raises(ValueError, match="was built for sm_86, sm_90"):
        measure(TINY, "live")


# When memory runs out


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


def test_other_errors_are_not_taken_for_out_of_memory():
    with pytest.raises(RuntimeError, match="mat1 and mat2"), memory_released(XL, lambda: GB):
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")


def test_memory_is_released_before_anyone_looks_at_what_is_free():
    """That of a whole chain of errors."""
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


# The kernel that a run names


def test_a_kernel_that_torch_refuses_is_named_with_what_it_was_given():
    q = torch.ones(1, 2, 8, 16)
    words = r"no cudnn kernel on this GPU for heads of 64 elements with dropout 0\.1"
    with pytest.raises(ValueError, match=words), only_kernel(SMALL.replace(attention="cudnn")):
        torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    with pytest.raises(RuntimeError, match="on purpose"), only_kernel(SMALL):
        raise RuntimeError("on purpose")


# On a GPU


@needs_gpu
@pytest.mark.parametrize(("family", "optimizer"), [("gpt2", "adamw"), ("llama", "adamw-fused")])
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
    assert measure(TINY, "live").peak > 0
