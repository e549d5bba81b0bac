"""The tracker: it sees what the allocator sees, it changes nothing, and it leaves nothing behind."""

import gc
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import pytest
import torch
from engine import Unwatched, tiny, trainable_shapes
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from course_utils import measure
from course_utils.measuring.simulated import simulated_gpu
from course_utils.measuring.step import Training
from course_utils.measuring.tracker import Tracker, newest_node
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


@pytest.mark.parametrize(("tied", "recompute", "accumulation_steps"), [(True, "none", 1), (False, "full", 2)])
def test_every_allocation_of_a_llama_is_seen_in_order(tied, recompute, accumulation_steps):
    run = cpu_run("llama", tied=tied, recompute=recompute, accumulation_steps=accumulation_steps)
    assert tracker_events(run) == allocator_events(run)


def test_every_allocation_of_a_gpt_is_seen_but_scratch_within_one_cpu_kernel():
    """The CPU's backward of LayerNorm sums weight gradients in two rows per thread, freed at once."""
    run = cpu_run("gpt2", tied=True, recompute="full")
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


def steps_of_an_encoder() -> Callable[[], None]:
    torch.manual_seed(0)
    model = Encoder()
    x = torch.randn(4, 32, 64)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)

    def step() -> None:
        model(x).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False)
        optimizer.step()
        optimizer.zero_grad()

    return step


def test_of_any_other_model_every_allocation_is_seen_and_so_is_its_peak():
    """But for scratch within one kernel, which no operator shows."""
    real = allocated_in_the_second(steps_of_an_encoder())
    again = steps_of_an_encoder()
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
    assert max(accumulate(real)) == max(accumulate(seen))


def products_with_sums() -> None:
    """A bias and a mask that torch adds in place, and sums of the program's own, which take a tensor more."""
    x = torch.randn(64, 32, 48).transpose(0, 1)
    layer = torch.nn.Linear(48, 96)
    layer(x)
    q = torch.randn(2, 4, 64, 32)
    mask = torch.zeros(64, 64)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        torch.nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=mask)
    for _ in range(2):
        x = x @ torch.ones(48, 48) + torch.ones(48)


def test_what_torch_adds_in_place_takes_no_tensor_more_and_what_the_program_adds_does():
    real = allocated_in_the_second(products_with_sums)
    with Tracker("cpu") as tracker, tracker.in_phase("forward"):
        products_with_sums()
        gc.collect()
    seen = Counter(blocks([size for size, _ in tracker.events]))
    assert not seen - Counter(real)
    own_sum = 4 * 64 * 32 * 48
    assert seen[own_sum] == Counter(real)[own_sum]


class Order(TorchDispatchMode):
    """Notes every operator and the shapes of its tensors, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        shapes = [tuple(one.shape) for one in args if isinstance(one, torch.Tensor)]
        self.seen.append((str(func), shapes))
        return func(*args, **(kwargs or {}))


def order_of_a_penalty(grad: Callable[..., Any]) -> list[Any]:
    """The order of backward's operators where `grad` gives a gradient that the loss depends on."""
    torch.manual_seed(0)
    x = torch.randn(8, 12, requires_grad=True)
    y = x
    for width in (16, 20):
        y = torch.nn.Linear(y.shape[1], width)(y).tanh()
    said = y.exp().mean()
    (gradient,) = grad(y.sum(), x, create_graph=True)
    loss = gradient.square().sum() + said
    with Order() as order:
        loss.backward()
    return order.seen


def on_a_thread(*args: Any, **kwargs: Any) -> Any:
    """`torch.autograd.grad` as a GPU's thread runs it: a thread counts the nodes that it makes for itself."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(torch.autograd.grad, *args, **kwargs).result()


def numbered_anew(*args: Any, **kwargs: Any) -> Any:
    first = newest_node()
    found = torch.autograd.grad(*args, **kwargs)
    Tracker("cpu").number_anew(found, first)
    return found


def test_a_gradient_of_a_gradient_is_taken_in_the_order_of_a_thread_of_backward_s_own():
    assert order_of_a_penalty(numbered_anew) == order_of_a_penalty(on_a_thread)
    assert order_of_a_penalty(torch.autograd.grad) != order_of_a_penalty(on_a_thread)


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


def train(run: TrainingRun, watched: bool) -> tuple[list[torch.Tensor], list[float]]:
    """Gradients of two steps with the final weights, and the losses."""
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
    weights = [parameter.detach() for parameter in training.network.parameters()]
    return gradients.copies + weights, training.losses


@pytest.mark.parametrize(
    ("family", "choices"),
    [
        ("gpt2", {"tied": True, "recompute": "full", "accumulation_steps": 2}),
        ("llama", {"optimizer": "adafactor"}),
    ],
)
def test_watching_changes_no_bit_of_a_training(family, choices):
    run = cpu_run(family, **choices)
    tensors, losses = train(run, watched=True)
    expected, same_losses = train(run, watched=False)
    assert losses == same_losses
    for tensor, untouched in zip(tensors, expected, strict=True):
        assert torch.equal(tensor, untouched)


def hooks_of(network: torch.nn.Module) -> int:
    on_modules = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in network.modules())
    return on_modules + sum(len(p._post_accumulate_grad_hooks or ()) for p in network.parameters())


def test_a_step_that_fails_leaves_nothing_behind():
    training = Training(cpu_run("gpt2"), "cpu", simulated=False)
    depth = torch._C._len_torch_dispatch_stack()
    training.tokens = training.tokens + training.run.model.vocab  # no such token: the embedding raises
    with pytest.raises(IndexError), tracked(training) as tracker:
        training.step(tracker)
    assert hooks_of(training.network) == 0
    assert torch._C._len_torch_dispatch_stack() == depth


# What is what


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


# On the CPU


def test_a_gpt_keeps_the_same_on_cpu_and_gpu_but_for_wider_dropout_masks():
    """And but for AdamW's counters of steps, one a parameter tensor, which are on the host in either case."""
    run = cpu_run("gpt2")
    tokens = run.micro_batch * run.seq_len
    scores = run.micro_batch * run.model.heads * run.seq_len**2
    dropped = tokens * run.model.hidden + run.model.layers * (2 * tokens * run.model.hidden + scores)
    expected = dict(measure(run, "simulated").moments["end of forward"])
    expected["optimizer_states"] += 512 * trainable_shapes(run).tensors
    expected["activations"] += (4 - 1) * dropped
    assert dict(measure(run, "cpu").moments["end of forward"]) == expected


# What CUDA kernels do inside


N = 64 * 256
"""Elements of each result below."""

Case = tuple[Callable[[], list[torch.Tensor]], Callable[..., torch.Tensor]]

OPERATIONS: dict[str, Case] = {
    "mm": (lambda: [half(64, 32), half(32, 256)], torch.mm),
    "layer norm": (
        lambda: [half(64, 256), half(256), half(256)],
        lambda x, w, b: torch.nn.functional.layer_norm(x, (256,), w, b),
    ),
    "GELU": (lambda: [half(64, 256)], torch.nn.functional.gelu),
    "softmax": (lambda: [half(64, 256)], lambda x: torch.softmax(x, -1)),
    "group norm": (
        lambda: [half(16, 256, 8), half(256), half(256)],
        lambda x, w, b: torch.nn.functional.group_norm(x, 64, w, b),
    ),
}


def half(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, dtype=torch.float16, device="cuda", requires_grad=True)


def peak_of_backward(name: str, gradient: Callable[[torch.Tensor], torch.Tensor]) -> int:
    make, operation = OPERATIONS[name]
    with simulated_gpu("flash"), Tracker("cuda") as tracker:
        given = make()
        result = operation(*given)
        whole = gradient(result)
        start = len(tracker.events)
        found = torch.autograd.grad(result, given, whole)
        del found
    return tracker.at(tracker.peak_event(since=start)).total - tracker.at(start).total


@pytest.mark.parametrize(("name", "copied"), [("mm", 2 * N), ("layer norm", 2 * N), ("GELU", 0)])
def test_a_kernel_that_needs_a_whole_gradient_copies_an_expanded_one(name, copied):
    def expanded(y: torch.Tensor) -> torch.Tensor:
        return y.new_empty(()).expand_as(y)  # what y.sum() hands to backward

    assert peak_of_backward(name, expanded) - peak_of_backward(name, torch.ones_like) == copied


@pytest.mark.parametrize(
    ("name", "gradients", "scratch"),
    [
        ("softmax", 64 * 256 * 2, 64 * 256 * 2),
        ("group norm", 16 * 256 * 8 * 2 + 2 * 256 * 2, 3 * 16 * 256 * 4 + 2 * 16 * 64 * 4),
    ],
)
def test_scratch_within_kernels_counts_while_they_run(name, gradients, scratch):
    assert peak_of_backward(name, torch.ones_like) == gradients + scratch
