"""A step of a learner's own: what it takes, that it changes nothing, and what is said when it goes wrong."""

import copy
import gc
import traceback
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine import tiny
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F

from course_utils import measure
from course_utils.errors import StepError
from course_utils.estimating.workspaces import installed_torch
from course_utils.measurement import Measurement
from course_utils.measuring.live import KernelRefused
from course_utils.measuring.own_step import CELL_BY_CELL
from course_utils.networks import build_network, loss_of
from course_utils.run import TrainingRun
from course_utils.units import round_up

PHASES = ["forward", "loss", "backward", "optimizer", "zero_grad"]
EVERYWHERE = pytest.mark.parametrize("source", ["simulated", "cpu"])


class Classifier(nn.Module):
    """Convolutions, a norm with buffers, dropout, a module that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.norm = nn.BatchNorm2d(16)
        self.again = nn.Conv2d(16, 16, 3, padding=1)
        self.head = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.stem(x)).relu_()
        x = self.again(self.again(x)).relu()
        return self.head(F.dropout(x.mean((2, 3)), 0.1, self.training))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.LSTM(32, 10, num_layers=2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.cells(x)[0][:, -1]


MODELS = {
    "convolutions": (Classifier, (8, 3, 16, 16)),
    "recurrent": (Recurrent, (8, 12, 32)),
    "layers": (lambda: nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 10)), (8, 64)),
}


def made(kind: str = "layers") -> dict[str, Any]:
    """A model, an optimizer and a batch of one kind."""
    torch.manual_seed(1)
    make, shape = MODELS[kind]
    model = make()
    batch = (torch.randn(shape), torch.randint(10, shape[:1]))
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-3), "batch": batch}


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> torch.Tensor:
    x, y = batch
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def phases(measured: Measurement) -> list[str]:
    return [mark.phase for mark in measured.timeline.marks if mark.step == 2]


# The same as the course's own measurement


def course_parts(run: TrainingRun) -> dict[str, Any]:
    network = build_network(run.model, run.attention, run.recompute)
    tokens = torch.randint(run.model.vocab, (run.micro_batch, run.seq_len))
    return {
        "model": network,
        "optimizer": torch.optim.AdamW(network.parameters(), foreach=True),
        "batch": (tokens, tokens.clone()),
    }


@pytest.mark.parametrize(
    ("family", "recompute", "accumulation_steps"), [("gpt2", "none", 2), ("llama", "full", 1)]
)
def test_the_courses_network_in_ones_own_step_gives_the_courses_measurement(
    family, recompute, accumulation_steps
):
    """Phases are only noticed here, named there; weights were made on the CPU here, on the device there."""
    run = TrainingRun(tiny(family), 2, 64, recompute=recompute, accumulation_steps=accumulation_steps)

    def loss_from(model, batch):
        with torch.autocast("cuda", torch.bfloat16):
            logits = model(batch[0])
            return loss_of(logits, batch[1], run.model.logits == "fp32") / accumulation_steps

    def step(model, optimizer, batch):
        for _ in range(accumulation_steps):
            loss = loss_from(model, batch)
            loss.backward()
            del loss  # when the course's step lets go of it, too
        optimizer.step()
        optimizer.zero_grad()

    own = measure(step=step, source="simulated", attention="flash", **course_parts(run))
    course = measure(run, "simulated")
    assert own.breakdown == course.breakdown and own.peak_phase == course.peak_phase
    assert own.phase_peaks == course.phase_peaks
    for name, moment in course.moments.items():
        assert dict(own.moments[name]) == dict(moment), name
    assert [mark.phase for mark in own.timeline.marks] == [mark.phase for mark in course.timeline.marks]
    assert sorted(own.timeline.changes) == sorted(course.timeline.changes)


# What is found


@pytest.mark.parametrize(
    ("kind", "source", "note"),
    [
        ("convolutions", "simulated", ""),
        ("recurrent", "simulated", CELL_BY_CELL),
        ("recurrent", "cpu", ""),
        ("layers", "cpu", ""),
    ],
)
def test_any_model_has_its_phases_and_its_kinds(kind, source, note):
    parts = made(kind)
    measured = measure(step=train_step, source=source, **parts)
    model = parts["model"]
    assert measured.source == source and phases(measured) == PHASES
    kept = [*model.parameters(), *model.buffers()]
    left = measured.moments["end of step 2"]
    assert left["parameters"] == sum(round_up(tensor.nbytes) for tensor in kept)
    counters = 512 * len(list(model.parameters())) if source == "cpu" else 0
    gradients = sum(round_up(parameter.nbytes) for parameter in model.parameters())
    assert left["optimizer_states"] == 2 * gradients + counters
    assert left["inputs"] == sum(round_up(tensor.nbytes) for tensor in parts["batch"])
    assert left["activations"] == left["gradients"] == 0 < measured.moments["end of forward"]["activations"]
    assert measured.moments["end of backward"]["gradients"] == gradients
    assert measured.peak == sum(item.bytes for item in measured.alive_at(measured.peak_event))
    # nothing leaks; no value is read but the optimizer's own, which is known
    assert measured.provenance.note == note
    assert len(measured.losses) == (2 if source == "cpu" else 0)


def test_gradients_may_be_zeroed_first_or_between_and_clipped():
    def step(model, optimizer, batch):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch[0] * 2), batch[1])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    measured = measure(step=step, source="simulated", **made())
    assert phases(measured) == ["forward", "zero_grad", "forward", "loss", "backward", "optimizer"]
    at_end = measured.moments["end of step 2"]
    assert at_end["gradients"] == measured.moments["end of backward"]["gradients"] > 0


def test_an_update_written_by_hand_needs_no_optimizer_and_a_batch_may_be_anything():
    def step(model, batch):
        loss = F.cross_entropy(model(batch.x["pixels"]), batch.y)
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
                parameter.grad = None

    parts = made()
    batch = SimpleNamespace(x={"pixels": parts["batch"][0]}, y=parts["batch"][1], name="train")
    measured = measure(step=step, model=parts["model"], batch=batch, source="simulated")
    assert phases(measured) == ["forward", "loss", "backward", "optimizer"]
    assert measured.breakdown["inputs"] > 0


@EVERYWHERE
def test_a_scheduler_in_the_batch_follows_the_copy_of_the_optimizer(source):
    parts = made()
    scheduler = torch.optim.lr_scheduler.StepLR(parts["optimizer"], 1, 0.5)

    def step(model, optimizer, batch):
        train_step(model, optimizer, batch[0])
        batch[1].step()
        assert optimizer.param_groups[0]["lr"] < 1e-3

    parts["batch"] = (parts["batch"], scheduler)
    measured = measure(step=step, source=source, **parts)
    assert measured.peak > 0
    assert parts["optimizer"].param_groups[0]["lr"] == 1e-3
    assert scheduler.last_epoch == 0


@pytest.mark.parametrize(
    ("autocast", "attention", "kernel"),
    [(True, "auto", "flash"), (False, "auto", "efficient"), (True, "efficient", "efficient")],
)
def test_attention_of_16_bits_is_flash_and_of_32_efficient(autocast, attention, kernel):
    def step(model, batch):
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            q = model(batch).view(2, 8, 4, 16)
            F.scaled_dot_product_attention(q, q, q).float().sum().backward()

    given = {"model": nn.Linear(64, 64), "batch": torch.randn(2, 8, 64), "steps": 1}
    measured = measure(step=step, attention=attention, source="simulated", **given)
    assert f"_scaled_dot_product_{kernel}_attention" in {item.operation for item in measured.allocations}


# Nothing is changed


def snapshot(parts: dict[str, Any]) -> list[torch.Tensor]:
    model, optimizer = parts["model"], parts["optimizer"]
    states = [value for state in optimizer.state.values() for value in state.values()]
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return [tensor.clone() for tensor in [*model.state_dict().values(), *states, *gradients, *parts["batch"]]]


def trained(parts: dict[str, Any], steps: int = 3) -> list[torch.Tensor]:
    """The parts after ordinary training, dropout included."""
    torch.manual_seed(7)
    losses = [train_step(**parts).detach() for _ in range(steps)]
    return [*snapshot(parts), *losses, torch.get_rng_state()]


def assert_same(first: list[torch.Tensor], second: list[torch.Tensor]) -> None:
    assert len(first) == len(second)
    for one, other in zip(first, second, strict=True):
        assert type(one) is type(other) and torch.equal(one, other)


def raising(model, optimizer, batch):
    train_step(model, optimizer, batch)
    raise KeyError("on purpose")


@pytest.mark.parametrize(
    ("kind", "source", "step"),
    [
        ("convolutions", "simulated", train_step),
        ("convolutions", "cpu", train_step),
        ("recurrent", "cpu", raising),
        ("layers", "simulated", raising),
    ],
)
def test_training_goes_on_as_if_nothing_had_been_measured(kind, source, step):
    untouched = made(kind)
    measured_between = made(kind)
    assert_same(trained(untouched), trained(measured_between))
    before = snapshot(measured_between)
    random = torch.get_rng_state()
    ids = [id(parameter) for parameter in measured_between["model"].parameters()]
    with pytest.raises(KeyError, match="on purpose") if step is raising else nullcontext() as caught:
        measure(step=step, source=source, **measured_between)
    if caught is not None:
        shown = "".join(traceback.format_tb(caught.value.__traceback__))
        assert 'raise KeyError("on purpose")' in shown
    assert_same(before, snapshot(measured_between))
    assert torch.equal(random, torch.get_rng_state())
    assert ids == [id(parameter) for parameter in measured_between["model"].parameters()]
    assert_same(trained(untouched), trained(measured_between))


def test_a_model_with_states_and_gradients_takes_them_along():
    parts = made()
    train_step(**parts)
    F.cross_entropy(parts["model"](parts["batch"][0]), parts["batch"][1]).backward()
    measured = measure(step=train_step, source="simulated", steps=1, **parts)
    # the optimizer reads its count of steps, which is known
    assert "placeholder" not in str(measured.provenance)
    at_start = list(measured.alive_at(measured.timeline.marks[0].event))
    held = sum(round_up(p.nbytes) for p in parts["model"].parameters())
    assert sum(item.bytes for item in at_start if item.kind == "optimizer_states") == 2 * held
    assert sum(item.bytes for item in at_start if item.kind == "gradients") == held


def test_the_model_comes_to_the_gpu_in_the_order_of_to():
    """Module by module, inner ones first, buffers after parameters: it decides which segments they share."""
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    model.register_buffer("scale", torch.ones(3))
    wanted: list[tuple[int, ...]] = []
    copy.deepcopy(model)._apply(lambda tensor: wanted.append(tuple(tensor.shape)) or tensor)
    measured = measure(step=lambda model, x: model(x).sum().backward(), model=model, batch=torch.ones(2, 8))
    assert [item.shape for item in measured.allocations[: len(wanted)]] == wanted


def test_the_copies_are_gone_afterwards():
    """At once, without waiting for Python to look for cycles: on a GPU they are memory."""

    def alive() -> set[int]:
        return {id(thing) for thing in gc.get_objects() if type(thing) is nn.Linear}

    parts = made()
    gc.collect()
    gc.disable()
    try:
        before = alive()  # what other tests of this process keep, and the model itself
        measure(step=train_step, source="cpu", **parts)
        after = alive()
    finally:
        gc.enable()
    assert before and after == before


# What is noted


KEPT: list[torch.Tensor] = []


def never_updates(model, optimizer, batch):
    model(batch[0]).sum().backward()
    optimizer.zero_grad()


def leaks(model, optimizer, batch):
    train_step(model, optimizer, batch)
    KEPT.append(model(batch[0]))  # with its graph


def reads(model, optimizer, batch):
    loss = train_step(model, optimizer, batch).detach()
    assert (loss.item(), float(loss), f"{loss:.2f}") == (1.0, 1.0, "1.00")
    print(loss, model[0].weight)


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (never_updates, "the step never called optimizer.step()"),
        (leaks, "more after step 2 than after step 1; what stays: 1 × (8, 256) float32 from addmm at "),
        (reads, "placeholders of 1.0"),
    ],
)
def test_what_a_reader_should_know_is_noted(step, words):
    note = measure(step=step, source="simulated", **made()).provenance.note
    KEPT.clear()
    assert words in note


def test_a_card_adds_its_workspaces():
    plain = measure(step=train_step, source="simulated", **made())
    on_card = measure(step=train_step, card="H100-80GB", source="simulated", **made())
    with_a_bias = 2**20 if installed_torch() < (2, 12) else 0
    assert on_card.breakdown["workspaces"] == 2 * 32 * 2**20 + with_a_bias == on_card.peak - plain.peak
    with pytest.raises(ValueError, match="H100"):
        measure(step=train_step, card="H1000", source="simulated", **made())


# What is refused


ELSEWHERE = torch.ones(64)
OUTSIDE = nn.Linear(64, 64)


def without_backward(model, optimizer, batch):
    F.cross_entropy(model(batch[0]), batch[1])


def on_two_devices(model, optimizer, batch):
    model(batch[0] + ELSEWHERE).sum().backward()


def of_another_model(model, optimizer, batch):
    model(OUTSIDE(batch[0])).sum().backward()


def by_values(model, optimizer, batch):
    model(batch[0][batch[0] > 0].view(-1, 64)).sum().backward()


def through_numpy(model, optimizer, batch):
    (model(batch[0]).sum() * float(batch[0].cpu().numpy().mean())).backward()


def without_a_rule(model, optimizer, batch):
    """Neither torch 2.13 nor 2.15 has a shape rule for this loss's backward."""
    F.multi_margin_loss(model(batch[0]), batch[1]).backward()


def with_a_sparse_gradient(model, optimizer, batch):
    weight = model[0].weight
    F.embedding(batch[1], weight, sparse=True).sum().backward()


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (without_backward, r"gave no gradient to any parameter .* must call loss\.backward\(\)"),
        (
            on_two_devices,
            r"add got tensors on different devices: \(8, 64\) on cuda and \(64,\) on cpu.*batch=…",
        ),
        (of_another_model, r"uses a weight of shape \(64, 64\) that is not of the model that the step was"),
        (by_values, r"^test_own_step\.py:\d+  .*> 0\].*has a shape but no values"),
        (through_numpy, r"^test_own_step\.py:\d+  .*numpy\(\).*has a shape but no values"),
        (with_a_sparse_gradient, "makes a tensor of layout torch.sparse_coo.*leave out sparse=True"),
        (without_a_rule, r"^test_own_step\.py:\d+  .*multi_margin_loss_backward cannot be simulated.*'cpu'"),
    ],
)
def test_a_step_that_cannot_be_simulated_is_refused_with_its_line(step, words):
    parts = made()
    before = snapshot(parts)
    with pytest.raises(StepError, match=words):
        measure(step=step, source="simulated", **parts)
    assert_same(before, snapshot(parts))


def compiled() -> nn.Module:
    """As `model[0].compile()` leaves it, which would take seconds to load torch's compiler."""
    model = nn.Sequential(nn.Linear(64, 10))
    model[0]._compiled_call_impl = print
    return model


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"step": 3}, TypeError, r"step is 3, which cannot be called: write it as def step\(model, opt"),
        ({"model": nn.Linear}, TypeError, r"the class Linear, not .*: make one first, model=Linear\(…\)"),
        ({"model": nn.Linear(64, 10)}, ValueError, "the AdamW updates no parameter of this model"),
        ({"model": compiled(), "optimizer": None}, ValueError, "^part 0 of the model is compiled"),
        ({"batch": (pair for pair in ())}, ValueError, r"batch is a generator .*next\(iter\(loader\)\)"),
        ({"run": TrainingRun("gpt2")}, TypeError, "leave out step, model, optimizer, batch, or the run"),
        ({"model": None}, TypeError, r"measure takes a TrainingRun, measure\(run\), or a step of your own"),
    ],
    ids=lambda value: str(value).split(" at 0x")[0],  # the same in every process
)
def test_what_cannot_be_measured_is_refused_in_words(changes, error, words):
    given: dict[str, Any] = {"step": train_step, "source": "simulated", **made(), **changes}
    with pytest.raises(error, match=words):
        measure(given.pop("run", None), **given)


SCALER = torch.amp.GradScaler("cpu")


def test_what_the_step_would_change_outside_of_it_is_to_be_handed_over():
    parts = made()
    scheduler = torch.optim.lr_scheduler.StepLR(parts["optimizer"], 1, 0.5)

    def scheduled(model, optimizer, batch):
        train_step(model, optimizer, batch)
        scheduler.step()

    def scaled(model, optimizer, batch):
        SCALER.scale(model(batch[0]).mean()).backward()

    for step, name in ((scheduled, "scheduler, a StepLR"), (scaled, "SCALER, a GradScaler")):
        with pytest.raises(ValueError, match=f"uses {name} from outside.*batch=.x, y, {name.split(',')[0]}"):
            measure(step=step, source="cpu", **parts)
    assert scheduler.last_epoch == 0 and SCALER._scale is None


# What a GPU turns out not to do, and what a step that fails leaves there


def test_auto_simulates_what_the_gpu_turns_out_not_to_do_and_live_says_why(card):
    def step(model, optimizer, batch):
        if not isinstance(batch[0], FakeTensor):
            raise RuntimeError("No available kernel.")
        train_step(model, optimizer, batch)

    words = "has no attention kernel on this GPU for what"
    measured = measure(step=step, **made())
    assert measured.source == "simulated" and measured.peak > 0
    assert measured.provenance.note.startswith("not live: ") and words in measured.provenance.note
    with pytest.raises(KernelRefused, match=f"{words}.*source='simulated' tells what it would need"):
        measure(step=step, source="live", **made())


def fails_in_step(model, optimizer, batch):
    F.cross_entropy(model(batch[0]), batch[1]).backward()
    kept = [batch[0] + 1]
    raise ValueError(f"in the step, with {len(kept)}")


def fails_in_hook(model, optimizer, batch):
    hidden = model[0](batch[0])

    def fails(gradient, *, kept=batch[0] + 1):
        raise ValueError("in a hook")

    hidden.register_hook(fails)
    (model(batch[0]).sum() + hidden.sum()).backward()


def is_interrupted(model, optimizer, batch):
    F.cross_entropy(model(batch[0]), batch[1]).backward()
    raise KeyboardInterrupt


@pytest.mark.parametrize("source", ["live", "cpu"])
@pytest.mark.parametrize(
    ("step", "last"),
    [
        (fails_in_step, 'raise ValueError(f"in the step, with {len(kept)}")'),
        (fails_in_hook, 'raise ValueError("in a hook")'),
        (is_interrupted, "raise KeyboardInterrupt"),
    ],
)
def test_a_step_that_fails_leaves_nothing_while_its_exception_is_kept(card, step, last, source):
    parts = made()
    kept = []
    gc.collect()
    before = card.allocated
    for _ in range(2):
        with pytest.raises((ValueError, KeyboardInterrupt)) as caught:
            measure(step=step, source=source, **parts)
        kept.append(caught.value)
        assert card.allocated == before
    assert last in "".join(traceback.format_tb(kept[-1].__traceback__))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_real_gpu_counts_what_is_simulated_and_a_step_that_fails_leaves_nothing_there():
    live = measure(step=train_step, source="live", **made())
    assert live.breakdown == measure(step=train_step, source="simulated", **made()).breakdown
    assert live.counters["allocated"] >= live.peak
    before = torch.cuda.memory_allocated()
    for step in (fails_in_step, fails_in_hook, is_interrupted):
        with pytest.raises((ValueError, KeyboardInterrupt)) as caught:
            measure(step=step, source="live", **made())
        assert torch.cuda.memory_allocated() == before and caught.value is not None


def test_auto_without_a_gpu_simulates(monkeypatch):
    monkeypatch.delenv("COURSE_SOURCE", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert measure(step=train_step, **made()).source == "simulated"
    monkeypatch.setenv("COURSE_SOURCE", "cpu")
    assert measure(step=train_step, **made()).source == "cpu"
    with pytest.raises(ValueError, match="no CUDA GPU"):
        measure(step=train_step, source="live", **made())
    monkeypatch.setenv("COURSE_SOURCE", "recorded")
    assert measure(step=train_step, **made()).source == "simulated", "nobody has recorded it"
