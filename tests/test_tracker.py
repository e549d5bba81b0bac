"""The tracker: it sees what the allocator sees, it changes nothing, and it leaves nothing behind."""

import gc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import pytest
import torch
from engine import Unwatched, storage_of, tiny, trainable_shapes
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

from course_utils import MemoryBreakdown, measure
from course_utils.measuring.simulated import simulated_gpu
from course_utils.measuring.step import Training
from course_utils.measuring.tracker import Tracker
from course_utils.run import TrainingRun
from course_utils.units import round_up

SMALL = 512
"""Bytes: numbers of a few bytes that torch makes for itself are seen by the allocator alone."""


def cpu_run(family: str, **changes: Any) -> TrainingRun:
    choices: dict[str, Any] = {"precision": "fp32", "attention": "eager", "optimizer": "adamw-loop"}
    sizes = {"tied": False, "dropout": 0.1 if family == "gpt2" else 0.0}
    sizes |= {size: changes.pop(size) for size in sizes if size in changes}
    return TrainingRun(tiny(family, **sizes), micro_batch=2, seq_len=64, **(choices | changes))


@contextmanager
def tracked(training: Training) -> Iterator[Tracker]:
    with Tracker("cpu") as tracker:
        tracker.watch(training.network, training.named_states)
        tracker.bind("inputs", [training.tokens, training.targets])
        tracker.step = 1
        yield tracker


# Against the real allocator


def allocator_events(run: TrainingRun) -> list[int]:
    """Signed bytes of each allocation and free in the second step, as the CPU's allocator reports them."""
    torch.manual_seed(0)
    training = Training(run, "cpu", simulated=False)
    return allocated_in_the_second(lambda: training.step(Unwatched()))


def allocated_in_the_second(step: Callable[[], None]) -> list[int]:
    step()
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    assert profiler.profiler is not None and profiler.profiler.kineto_results is not None
    events: list[Any] = profiler.profiler.kineto_results.events()
    return blocks([event.nbytes() for event in events if event.name() == "[memory]"])


def tracker_events(run: TrainingRun) -> list[int]:
    """The same from the tracker."""
    torch.manual_seed(0)
    training = Training(run, "cpu", simulated=False)
    with tracked(training) as tracker:
        training.step(tracker)
        first = len(tracker.events)
        training.step(tracker)
        return blocks([size for size, _ in tracker.events[first:]])


def blocks(sizes: list[int]) -> list[int]:
    """Rounded up to blocks, keeping the sign; those of one block or less left out.

    So is the state of the CPU's random numbers, which checkpointing saves without an operator.
    """
    rounded = [round_up(abs(size)) * (1 if size > 0 else -1) for size in sizes]
    random_state = round_up(torch.get_rng_state().nbytes)
    return [size for size in rounded if abs(size) > SMALL and abs(size) != random_state]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("accumulation_steps", [1, 2])
@pytest.mark.sweep(3)
def test_every_allocation_of_a_llama_is_seen_in_order(tied, recompute, accumulation_steps):
    run = cpu_run("llama", tied=tied, recompute=recompute, accumulation_steps=accumulation_steps)
    assert tracker_events(run) == allocator_events(run)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.sweep(2)
def test_every_allocation_of_a_gpt_is_seen_but_scratch_within_one_cpu_kernel(tied, recompute):
    """The CPU's backward of LayerNorm sums weight gradients in two rows per thread, freed at once."""
    run = cpu_run("gpt2", tied=tied, recompute=recompute)
    scratch = round_up(4 * 2 * torch.get_num_threads() * run.model.hidden)
    real = allocator_events(run)
    seen = tracker_events(run)
    left = list(seen)
    unseen = []
    for size in real:
        # a scratch block is freed at once: its release is not the tracker's, even where the sizes agree
        frees_scratch = bool(unseen) and unseen[-1] == scratch and size == -scratch
        if left and left[0] == size and not frees_scratch:
            left.pop(0)
        else:
            unseen.append(size)
    norms = 2 * run.model.layers + 1
    assert left == []
    assert unseen == [scratch, -scratch] * norms
    assert max(accumulate(seen)) == max(accumulate(real))


# Any other model, against the allocator as well


class Encoder(torch.nn.Module):
    """Attention of torch's own, a module called twice, operators in place, views, a slice that is written."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True)
        self.head = torch.nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(self.layer(x))
        y = self.head(x).mul_(0.5)
        y = y.clone()
        y[:, ::2] = x[:, ::2].sin()
        return y.transpose(1, 2).reshape(x.size(0), -1)


class Pictures(torch.nn.Module):
    """Convolutions, a norm that has buffers, a branch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (torch.nn.Conv2d(size, 16, 3, padding=1, bias=False) for size in (3, 16))
        self.norm = torch.nn.BatchNorm2d(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return torch.nn.functional.max_pool2d(x + self.norm(self.second(x)).relu(), 2).flatten(1)


class Recomputing(torch.nn.Module):
    """A perceptron of which a part is computed again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(lambda y, layer=layer: layer(y).tanh().exp(), x, use_reentrant=False)
        return x.flatten(1)


OTHERS = {
    "encoder": (Encoder, (4, 32, 64)),
    "pictures": (Pictures, (4, 3, 16, 16)),
    "again": (Recomputing, (4, 32, 64)),
}


def steps_of_another(kind: str) -> Callable[[], None]:
    torch.manual_seed(0)
    make, shape = OTHERS[kind]
    model = make()
    x = torch.randn(shape)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)

    def step() -> None:
        model(x).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False)
        optimizer.step()
        optimizer.zero_grad()

    return step


@pytest.mark.parametrize("kind", OTHERS)
def test_of_any_other_model_every_allocation_is_seen_and_so_is_its_peak(kind):
    """But for scratch within one kernel, which no operator shows."""
    real = allocated_in_the_second(steps_of_another(kind))
    again = steps_of_another(kind)
    with Tracker("cpu") as tracker:
        again()
        gc.collect()
        first = len(tracker.events)
        with tracker.in_phase("backward"):  # joins of gradients are recognized there
            again()
    seen = blocks([size for size, _ in tracker.events[first:]])
    assert not Counter(seen) - Counter(real)  # nothing is seen that is not there
    scratch = Counter(real) - Counter(seen)
    assert all(count == scratch[-size] for size, count in scratch.items())
    difference = max(accumulate(real)) - max(accumulate(seen))
    # the library that computes convolutions on a CPU puts its factors in another order first
    if kind == "pictures":
        assert 0 <= difference <= sum(size for size in scratch if size > 0)
    else:
        assert difference == 0


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_what_is_left_when_a_step_has_ended_is_what_torch_holds(family):
    training = Training(cpu_run(family), "cpu", simulated=False)
    with tracked(training) as tracker:
        training.step(tracker)
    states = (kept for _, kept in training.named_states())
    held = {storage_of(tensor): tensor for tensor in (*training.network.parameters(), *states)}
    held |= {storage_of(tensor): tensor for tensor in (training.tokens, training.targets)}
    expected = sum(round_up(tensor.untyped_storage().nbytes()) for tensor in held.values())
    assert tracker.at(len(tracker.events)).total == expected


# The observer changes nothing


class Gradients(Unwatched):
    """Copies every gradient when backward is done."""

    def __init__(self, network: torch.nn.Module) -> None:
        self.network = network
        self.copies = list[torch.Tensor]()

    @contextmanager
    def in_phase(self, phase: str) -> Iterator[None]:
        if phase == "optimizer":
            self.copies += [p.grad.clone() for p in self.network.parameters() if p.grad is not None]
        yield


def train(run: TrainingRun, watched: bool) -> tuple[list[torch.Tensor], list[torch.Tensor], list[float]]:
    """Gradients of two steps, the final weights, and the losses."""
    torch.manual_seed(0)
    training = Training(run, "cpu", simulated=False)
    gradients = Gradients(training.network)

    def two_steps() -> None:
        for _ in range(2):
            training.step(gradients)

    if watched:
        with tracked(training):
            two_steps()
    else:
        two_steps()
    return gradients.copies, [p.detach() for p in training.network.parameters()], training.losses


def assert_same_training(first: Any, second: Any) -> None:
    for one, other in zip(first[0] + first[1], second[0] + second[1], strict=True):
        assert torch.equal(one, other)
    assert first[2] == second[2]


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize(
    "choices",
    [{"tied": True}, {"recompute": "full", "accumulation_steps": 2}, {"optimizer": "adafactor"}],
    ids=str,
)
def test_watching_changes_no_bit_of_a_training(family, choices):
    run = cpu_run(family, **choices)
    assert_same_training(train(run, watched=True), train(run, watched=False))


def hooks_of(network: torch.nn.Module) -> int:
    on_modules = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in network.modules())
    return on_modules + sum(len(p._post_accumulate_grad_hooks or ()) for p in network.parameters())


def test_hooks_are_there_while_watching_and_gone_afterwards():
    training = Training(cpu_run("gpt2"), "cpu", simulated=False)
    with tracked(training) as tracker:
        assert hooks_of(training.network) > 0
        training.step(tracker)
    assert hooks_of(training.network) == 0
    events = len(tracker.events)
    training.step(Unwatched())
    assert len(tracker.events) == events  # nothing that happens later is written down


def test_a_step_that_fails_leaves_nothing_behind():
    training = Training(cpu_run("gpt2"), "cpu", simulated=False)
    depth = torch._C._len_torch_dispatch_stack()
    training.tokens = training.tokens + training.run.model.vocab  # no such token: the embedding raises
    with pytest.raises(IndexError), tracked(training) as tracker:
        training.step(tracker)
    assert hooks_of(training.network) == 0
    assert torch._C._len_torch_dispatch_stack() == depth


# What is what


def test_kinds_come_from_what_a_tensor_is_for():
    with Tracker("cpu") as tracker:
        weight = torch.nn.Parameter(torch.empty(1000))
        tracker.bind("parameters", [weight])
        with tracker.in_phase("forward"):
            kept = torch.nn.functional.gelu(weight * 2)  # gelu keeps its input; its output is held by us
            brief = torch.empty(1000)
            del brief
        with tracker.in_phase("backward"):
            kept.sum().backward()
    found = {(item.operation, item.kind) for item in tracker.allocations() if item.phase == "forward"}
    assert found == {("mul", "activations"), ("gelu", "activations"), ("empty", "temporaries")}


def test_views_and_empty_tensors_take_nothing():
    with Tracker("cpu") as tracker:
        base = torch.empty(100, 100)
        views = (base.t(), base[3:], base.view(-1), torch.empty(0))
    assert len(views) == 4 and [size for size, _ in tracker.events] == [round_up(40_000)]


def test_what_python_frees_while_a_birth_is_written_down_is_seen_in_its_place():
    """It looks for cycles of references whenever it likes."""

    class Collecting(list):
        def append(self, item: Any) -> None:
            super().append(item)
            gc.collect()

    with Tracker("cpu") as tracker:
        tracker.storages = Collecting()
        cycle: list[Any] = [torch.ones(1000)]
        cycle.append(cycle)
        del cycle
        kept = torch.ones(2000)
    first, second = tracker.allocations()
    assert (first.born, first.died, second.born, second.died) == (0, 1, 2, None) and len(kept) == 2000


def test_a_storage_that_is_resized_is_freed_and_allocated_anew():
    """As FSDP2 does with the weights that it gathers; what it was for is remembered."""
    with Tracker("cpu") as tracker:
        weight = torch.nn.Parameter(torch.empty(1000))
        tracker.bind("parameters", [weight], "weight")
        for size in (0, 4000, 8000, 8000, 0):
            weight.untyped_storage().resize_(size)
        grown = torch.empty(100)
        grown.resize_(1000)
        torch.add(torch.ones(2000), 1, out=grown.resize_(0))
    blocks_of = {size: round_up(size) for size in (400, 4000, 8000)}
    assert [size for size, _ in tracker.events] == [
        blocks_of[4000],
        -blocks_of[4000],
        blocks_of[4000],
        -blocks_of[4000],
        blocks_of[8000],
        -blocks_of[8000],
        blocks_of[400],
        -blocks_of[400],
        blocks_of[4000],
        blocks_of[8000],
        -blocks_of[4000],
        blocks_of[8000],
        -blocks_of[8000],
    ]
    assert [item.kind for item in tracker.allocations()[:3]] == ["parameters"] * 3
    assert tracker.at(len(tracker.events)).total == blocks_of[8000]


def test_of_a_tensor_made_of_others_those_are_counted():
    with Tracker("cpu") as tracker:
        pair = TwoTensor(torch.ones(1000), torch.ones(1000))
        tracker.bind("inputs", [pair])
        double = pair * 2
    assert isinstance(double, TwoTensor)
    assert [item.kind for item in tracker.allocations()] == ["inputs", "inputs", "temporaries", "temporaries"]
    assert tracker.at(len(tracker.events)).total == 4 * round_up(4000)


def test_an_operator_that_raises_is_remembered():
    with Tracker("cpu") as tracker, pytest.raises(RuntimeError, match="cannot be multiplied") as caught:
        torch.mm(torch.ones(3, 4), torch.ones(5, 6))
    failure = tracker.failure
    assert failure is not None and failure.error == id(caught.value) and failure.operation == "mm"
    assert failure.tensors == (((3, 4), "cpu"), ((5, 6), "cpu"))
    assert "torch.mm(torch.ones(3, 4)" in failure.line


def test_other_devices_are_not_counted():
    with Tracker("cpu") as tracker:
        elsewhere = torch.empty(100, device="meta")
    assert elsewhere.device.type == "meta" and tracker.events == []


def test_recomputed_tensors_are_activations_that_live_in_backward():
    measured = measure(cpu_run("llama", recompute="full"), "cpu")
    again = [item for item in measured.allocations if item.phase == "backward" and item.kind == "activations"]
    assert {item.module.partition(".")[0] for item in again} == {"blocks"}
    assert all(item.died is not None for item in again)


# On the CPU


def end_of_forward(run: TrainingRun) -> tuple[MemoryBreakdown, MemoryBreakdown]:
    """On the CPU, and on the simulated GPU."""
    on_cpu = measure(run, "cpu")
    simulated = measure(run, "simulated")
    return on_cpu.moments["end of forward"], simulated.moments["end of forward"]


def test_without_dropout_a_gpt_keeps_the_same_on_cpu_and_gpu():
    """But for AdamW's counters of steps, one a parameter tensor, which are on the host in either case."""
    run = cpu_run("gpt2", dropout=0.0)
    on_cpu, simulated = end_of_forward(run)
    counters = 512 * trainable_shapes(run).tensors
    assert dict(on_cpu) == dict(simulated) | {"optimizer_states": simulated["optimizer_states"] + counters}


def test_dropout_masks_are_as_wide_as_their_tensors_on_the_cpu():
    run = cpu_run("gpt2")
    on_cpu, simulated = end_of_forward(run)
    tokens = run.micro_batch * run.seq_len
    scores = run.micro_batch * run.model.heads * run.seq_len**2
    dropped = tokens * run.model.hidden + run.model.layers * (2 * tokens * run.model.hidden + scores)
    assert on_cpu["activations"] - simulated["activations"] == (4 - 1) * dropped


def test_rms_norm_keeps_a_normalized_copy_on_the_cpu():
    run = cpu_run("llama")
    on_cpu, simulated = end_of_forward(run)
    stream = 4 * run.micro_batch * run.seq_len * run.model.hidden
    assert on_cpu["activations"] - simulated["activations"] == (2 * run.model.layers + 1) * stream


# What CUDA kernels do inside


N = 64 * 256
"""Elements of each result below."""

EXPANDED: dict[str, tuple[Callable[[], list[torch.Tensor]], Callable[..., torch.Tensor]]] = {
    "mm": (lambda: [half(64, 32), half(32, 256)], torch.mm),
    "bmm": (lambda: [half(4, 16, 32), half(4, 32, 256)], torch.bmm),
    "layer norm": (
        lambda: [half(64, 256), half(256), half(256)],
        lambda x, w, b: torch.nn.functional.layer_norm(x, (256,), w, b),
    ),
    "RMSNorm": (lambda: [half(64, 256), half(256)], lambda x, w: torch.nn.functional.rms_norm(x, (256,), w)),
    "log-softmax": (lambda: [half(64, 256)], lambda x: torch.log_softmax(x, -1)),
    "GELU": (lambda: [half(64, 256)], torch.nn.functional.gelu),
}


def half(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, dtype=torch.float16, device="cuda", requires_grad=True)


WITH_SCRATCH: dict[str, tuple[Callable[[], list[torch.Tensor]], Callable[..., torch.Tensor]]] = {
    "softmax": (lambda: [half(64, 256)], lambda x: torch.softmax(x, -1)),
    "group norm": (
        lambda: [half(16, 256, 8), half(256), half(256)],
        lambda x, w, b: torch.nn.functional.group_norm(x, 64, w, b),
    ),
    "group norm without weights": (
        lambda: [half(16, 256, 8)],
        lambda x: torch.nn.functional.group_norm(x, 64),
    ),
}


def peak_of_backward(name: str, gradient: Callable[[torch.Tensor], torch.Tensor]) -> int:
    make, operation = (EXPANDED | WITH_SCRATCH)[name]
    with simulated_gpu("flash"), Tracker("cuda") as tracker:
        given = make()
        result = operation(*given)
        whole = gradient(result)
        start = len(tracker.events)
        found = torch.autograd.grad(result, given, whole)
        del found
    return tracker.at(tracker.peak_event(since=start)).total - tracker.at(start).total


def test_a_logsumexp_takes_a_tensor_as_large_as_its_input_for_its_exponentials():
    with simulated_gpu("flash"), Tracker("cuda") as tracker, torch.no_grad():
        given = half(64, 256)
        start = sum(size for size, _ in tracker.events)
        given.logsumexp(-1)
    assert tracker.at(tracker.peak_event()).total - start == given.nbytes + 512  # and the result's block


@pytest.mark.parametrize("name", EXPANDED)
def test_a_kernel_that_needs_a_whole_gradient_copies_an_expanded_one(name):
    def expanded(y: torch.Tensor) -> torch.Tensor:
        return y.new_empty(()).expand_as(y)  # what y.sum() hands to backward

    more = peak_of_backward(name, expanded) - peak_of_backward(name, torch.ones_like)
    assert more == (0 if name == "GELU" else 2 * N)


@pytest.mark.parametrize(("first_dimension", "copied"), [(0, 0), (1, 2 * N)])
def test_a_batched_product_takes_the_same_matrix_for_all_but_no_repeated_row(first_dimension, copied):
    """As a frozen weight is expanded for a batch that is not contiguous."""
    with simulated_gpu("flash"), Tracker("cuda") as tracker:
        shape = [4, 64, 64]
        shape[first_dimension] = 1
        other = half(*shape).detach().expand(4, 64, 64)
        found = torch.bmm(half(4, 64, 64), other)
        del found
    assert sum(item.bytes for item in tracker.storages if item.operation == "bmm") == 2 * N + copied


@pytest.mark.parametrize(
    ("name", "gradients", "scratch"),
    [
        ("softmax", 64 * 256 * 2, 64 * 256 * 2),
        ("group norm", 16 * 256 * 8 * 2 + 2 * 256 * 2, 3 * 16 * 256 * 4 + 2 * 16 * 64 * 4),
        ("group norm without weights", 16 * 256 * 8 * 2, 2 * 16 * 256 * 4 + 2 * 16 * 64 * 4),
    ],
)
def test_scratch_within_kernels_counts_while_they_run(name, gradients, scratch):
    assert peak_of_backward(name, torch.ones_like) == gradients + scratch


def test_a_gradient_in_another_order_is_copied_by_norms_alone():
    def turned(y: torch.Tensor) -> torch.Tensor:
        return y.new_empty(y.shape[::-1]).t()

    assert peak_of_backward("mm", turned) == peak_of_backward("mm", torch.ones_like)
    assert peak_of_backward("RMSNorm", turned) == peak_of_backward("RMSNorm", torch.ones_like) + 2 * N


def test_the_efficient_kernel_keeps_its_random_state_on_the_host():
    run = TrainingRun("tiny-gpt", 1, 64, "fp32", attention="efficient", dropout=0.1)
    kept = [item for item in measure(run, "simulated").allocations if "efficient_attention" in item.operation]
    forward = [item.shape for item in kept if item.phase == "forward" and item.step == 1]
    layers, heads, size = run.model.layers, run.model.heads, run.model.head_size
    assert sorted(forward) == sorted([(1, heads, 64, size), (1, heads, 64)] * layers)
