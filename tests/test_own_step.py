"""A step of a learner's own: what it takes, that it changes nothing, and what is said when it goes wrong."""

import copy
import gc
import re
import traceback
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine import tiny
from stand_in import LimitedMemory
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F

from course_utils import measure
from course_utils.errors import GpuOutOfMemory, StepError
from course_utils.estimating.workspaces import installed_torch
from course_utils.measurement import Measurement
from course_utils.measuring.live import KernelRefused
from course_utils.measuring.own_step import CELL_BY_CELL
from course_utils.networks import build_network, loss_of
from course_utils.run import TrainingRun
from course_utils.units import MB, round_up

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
        self.cells = nn.LSTM(32, 64, num_layers=2, batch_first=True)
        self.head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.cells(x)[0][:, -1])


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


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("accumulation_steps", [1, 2])
@pytest.mark.sweep(3)
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


@EVERYWHERE
@pytest.mark.parametrize("kind", MODELS)
def test_any_model_has_its_phases_and_its_kinds(kind, source):
    parts = made(kind)
    measured = measure(step=train_step, source=source, **parts)
    model = parts["model"]
    assert measured.source == source and phases(measured) == PHASES
    kept = [*model.parameters(), *model.buffers()]
    left = measured.moments["end of step 2"]
    assert left["parameters"] == sum(round_up(tensor.nbytes) for tensor in kept)
    counters = 512 * len(list(model.parameters())) if source == "cpu" else 0
    assert left["optimizer_states"] == 2 * sum(round_up(p.nbytes) for p in model.parameters()) + counters
    assert left["inputs"] == sum(round_up(tensor.nbytes) for tensor in parts["batch"])
    assert left["activations"] == left["gradients"] == 0 < measured.moments["end of forward"]["activations"]
    assert measured.moments["end of backward"]["gradients"] == sum(
        round_up(p.nbytes) for p in model.parameters()
    )
    assert measured.peak == sum(item.bytes for item in measured.alive_at(measured.peak_event))
    by_cells = (kind, source) == ("recurrent", "simulated")
    # nothing leaks; no value is read but the optimizer's own, which is known
    assert measured.provenance.note == (CELL_BY_CELL if by_cells else "")


def test_losses_are_real_on_the_cpu_and_there_are_none_in_a_simulation():
    on_cpu, simulated = (
        measure(step=train_step, source=source, steps=6, **made()) for source in ("cpu", "simulated")
    )
    assert len(on_cpu.losses) == 6 and on_cpu.losses[-1] < on_cpu.losses[0] == pytest.approx(2.3, abs=0.5)
    assert simulated.losses == []


@EVERYWHERE
def test_gradients_may_be_zeroed_first_or_between_and_clipped(source):
    def step(model, optimizer, batch):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch[0] * 2), batch[1])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    measured = measure(step=step, source=source, **made())
    assert phases(measured) == ["forward", "zero_grad", "forward", "loss", "backward", "optimizer"]
    assert (
        measured.moments["end of step 2"]["gradients"] == measured.moments["end of backward"]["gradients"] > 0
    )


@EVERYWHERE
def test_an_update_written_by_hand_needs_no_optimizer_and_a_batch_may_be_anything(source):
    def step(model, batch):
        loss = F.cross_entropy(model(batch.x["pixels"]), batch.y)
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
                parameter.grad = None

    parts = made()
    batch = SimpleNamespace(x={"pixels": parts["batch"][0]}, y=parts["batch"][1], name="train")
    measured = measure(step=step, model=parts["model"], batch=batch, source=source)
    assert phases(measured) == ["forward", "loss", "backward", "optimizer"]
    assert measured.breakdown["inputs"] > 0


@EVERYWHERE
def test_the_moments_are_those_of_training_although_the_step_looks_how_well_it_does_now(source):
    def step(model, optimizer, batch):
        train_step(model, optimizer, batch)
        with torch.no_grad():
            model(batch[0])

    plain, looking = (measure(step=one, source=source, **made()) for one in (train_step, step))
    assert phases(looking) == [*PHASES, "forward", "loss"]
    for name in ("end of forward", "after loss", "end of backward"):
        assert looking.moments[name] == plain.moments[name]


@EVERYWHERE
def test_two_models_and_two_optimizers(source):
    pair = nn.ModuleDict({"make": nn.Linear(64, 64), "judge": nn.Linear(64, 1)})
    optimizers = [torch.optim.Adam(part.parameters()) for part in pair.values()]

    def step(model, optimizers, batch):
        for optimizer in optimizers:
            optimizer.zero_grad()
            model["judge"](model["make"](batch)).mean().backward()
            optimizer.step()

    measured = measure(step=step, model=pair, optimizer=optimizers, batch=torch.randn(8, 64), source=source)
    assert measured.breakdown["optimizer_states"] >= 2 * sum(round_up(p.nbytes) for p in pair.parameters())


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


def test_attention_of_16_bits_is_flash_and_of_32_efficient():
    def operations(**choices: Any) -> set[str]:
        def step(model, batch):
            with torch.autocast("cuda", torch.bfloat16, enabled=choices.pop("autocast", False)):
                q = model(batch).view(2, 8, 4, 16)
                loss = F.scaled_dot_product_attention(q, q, q, **choices.pop("how", {})).float().sum()
            loss.backward()

        given = {
            "model": nn.Linear(64, 64),
            "batch": torch.randn(2, 8, 64),
            "steps": 1,
            "source": "simulated",
        }
        measured = measure(step=step, attention=choices.pop("attention", "auto"), **given)
        return {item.operation for item in measured.allocations if "dot_product" in item.operation}

    flash, efficient = "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention"
    assert flash in operations(autocast=True)
    assert efficient in operations()
    assert efficient in operations(autocast=True, attention="efficient")
    assert flash in operations(autocast=True, how={"attn_mask": None})


def test_explain_points_at_the_learners_own_lines():
    measured = measure(step=train_step, source="simulated", **made("convolutions"))
    lines = {row.module: row.line for row in measured.explain(1000).rows if row.kind == "activations"}
    assert "x = self.norm(self.stem(x)).relu_()" in lines["stem"] and lines["stem"].startswith(
        "test_own_step.py:"
    )
    assert "self.again(self.again(x))" in lines["again"]


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


@EVERYWHERE
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("step", [train_step, raising])
def test_training_goes_on_as_if_nothing_had_been_measured(kind, source, step):
    untouched = made(kind)
    measured_between = made(kind)
    assert_same(trained(untouched), trained(measured_between))
    before = snapshot(measured_between)
    random = torch.get_rng_state()
    ids = [id(parameter) for parameter in measured_between["model"].parameters()]
    try:
        measure(step=step, source=source, **measured_between)
    except KeyError:
        assert step is raising
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


# Errors


@EVERYWHERE
def test_an_exception_of_the_step_passes_with_its_own_traceback(source):
    with pytest.raises(KeyError, match="on purpose") as caught:
        measure(step=raising, source=source, **made())
    assert 'raise KeyError("on purpose")' in "".join(traceback.format_tb(caught.value.__traceback__))


def test_an_optimizer_that_never_steps_is_noted():
    model = nn.Linear(8, 8)

    def step(model, optimizer, batch):
        model(batch).sum().backward()
        optimizer.zero_grad()

    optimizer = torch.optim.AdamW(model.parameters())
    measured = measure(step=step, model=model, optimizer=optimizer, batch=torch.randn(2, 8), source="cpu")
    assert "never called optimizer.step()" in measured.provenance.note
    assert measured.breakdown["optimizer_states"] == 0


@EVERYWHERE
def test_a_leak_is_named_with_what_stays(source):
    kept: list[torch.Tensor] = []

    def step(model, optimizer, batch):
        loss = train_step(model, optimizer, batch)
        kept.append(model(batch[0]))  # with its graph
        return loss

    parts = made()
    note = measure(step=step, source=source, **parts).provenance.note
    assert "more after step 2 than after step 1; what stays: " in note
    assert "(8, 256) float32 from addmm at " in note and "kept.append(model(batch[0]))" in note
    grows = measure(step=step, source=source, steps=3, **parts)
    ends = [grows.moments[f"end of step {step}"].total for step in (1, 2, 3)]
    assert ends[2] - ends[1] == ends[1] - ends[0] > 0


@EVERYWHERE
def test_a_step_without_backward_is_refused(source):
    def step(model, optimizer, batch):
        F.cross_entropy(model(batch[0]), batch[1])
        optimizer.step()

    with pytest.raises(StepError, match=r"gave no gradient to any parameter .* must call loss\.backward\(\)"):
        measure(step=step, source=source, **made())


def frozen(parts):
    parts["model"].requires_grad_(False)
    return parts


@EVERYWHERE
def test_a_model_of_which_nothing_is_trained_needs_no_optimizer(source):
    with pytest.raises(ValueError, match="Sequential has no trained parameter"):
        measure(step=train_step, source=source, **frozen(made()))

    def forward(model, batch):
        model(batch[0])

    parts = frozen(made()) | {"optimizer": None}
    measured = measure(step=forward, source=source, **parts)
    x = parts["batch"][0]
    wide = parts["model"](parts["batch"][0])
    assert measured.peak_phase == "forward" and "had no backward" in measured.provenance.note
    assert measured.breakdown["activations"] == 0 and measured.breakdown["temporaries"] >= wide.nbytes
    assert measured.moments["end of step 2"].total == measured.peak - measured.breakdown["temporaries"]
    assert x.grad is None


@EVERYWHERE
def test_without_no_grad_a_forward_keeps_what_a_backward_would_need(source):
    def forward(model, batch):
        with torch.set_grad_enabled(batch[1]):
            model(batch[0])

    parts = made() | {"optimizer": None}
    peaks = [
        measure(step=forward, source=source, **parts | {"batch": (parts["batch"][0], on)}).peak
        for on in (False, True)
    ]
    assert peaks[0] < peaks[1]


@EVERYWHERE
def test_gradients_may_be_asked_for_without_backward(source):
    def asking(model, batch):
        loss = F.cross_entropy(model(batch[0]), batch[1])
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        del loss, gradients

    parts = made() | {"optimizer": None}
    measured = measure(step=asking, source=source, **parts)
    weights = sum(-(-one.nbytes // 512) * 512 for one in parts["model"].parameters())
    assert max(part["gradients"] for part in measured.phase_peaks.values()) == weights


def test_a_scaler_that_torch_switched_off_is_named():
    def scaled(model, optimizer, batch):
        x, y, scaler = batch
        scaler.scale(F.cross_entropy(model(x), y)).backward()
        scaler.step(optimizer)
        scaler.update()

    parts = made()
    with pytest.warns(UserWarning) if not torch.cuda.is_available() else nullcontext():
        off = torch.amp.GradScaler("cuda", enabled=not torch.cuda.is_available())
    notes = []
    for scaler in (off, torch.amp.GradScaler("cpu")):
        given = parts | {"batch": (*parts["batch"], scaler)}
        notes.append(measure(step=scaled, source="simulated", **given).provenance.note)
    assert ["the GradScaler is off" in note for note in notes] == [True, False]


def test_a_card_adds_its_workspaces():
    peaks = {
        card: measure(step=train_step, card=card, source="simulated", **made())
        for card in (None, "H100-80GB")
    }
    workspaces = peaks["H100-80GB"].breakdown["workspaces"]
    with_a_bias = 2**20 if installed_torch() < (2, 12) else 0
    assert workspaces == 2 * 32 * 2**20 + with_a_bias == peaks["H100-80GB"].peak - peaks[None].peak
    with pytest.raises(ValueError, match="H100"):
        measure(step=train_step, card="H1000", source="simulated", **made())


def test_a_step_that_uses_the_model_outside_of_it_is_told_so():
    parts = made()

    def step(model, optimizer, batch):
        train_step(parts["model"], optimizer, batch)

    before = snapshot(parts)
    with pytest.raises(
        StepError, match=r"uses a weight of shape \(256, 64\) that is not of the model that the step was"
    ):
        measure(step=step, source="simulated", **parts)
    assert_same(before, snapshot(parts))


@pytest.mark.parametrize("where", ["outside", "inside", "attribute"])
def test_a_tensor_on_the_wrong_device_is_named_with_its_line(where):
    outside = torch.ones(64)
    parts = made()
    parts["model"].shift = torch.ones(64)  # neither a parameter nor a buffer

    def step(model, optimizer, batch):
        shift = {"outside": outside, "inside": torch.ones(64), "attribute": model.shift}[where]
        train_step(model, optimizer, (batch[0] + shift, batch[1]))

    with pytest.raises(StepError) as caught:
        measure(step=step, source="simulated", **parts)
    said = str(caught.value)
    assert said.startswith("test_own_step.py:")
    assert "train_step(model, optimizer, (batch[0] + shift, batch[1]))" in said
    assert "add got tensors on different devices: (8, 64) on cuda and (64,) on cpu" in said
    assert "batch=…" in said and "device=x.device" in said and "buffer" in said
    assert measure(step=step, source="cpu", **parts).peak > 0


def test_what_is_moved_to_the_gpu_inside_the_step_is_fine():
    outside = torch.ones(64)

    def step(model, optimizer, batch):
        x = batch[0] + outside.to("cuda") * torch.tensor(2.0) + torch.tensor([1.0] * 64).cuda()
        train_step(model, optimizer, (x, batch[1]))

    measured = measure(step=step, source="simulated", **made())
    assert measured.peak > 0 and type(outside) is torch.Tensor


def test_a_value_read_in_a_simulation_is_a_placeholder_and_said_to_be():
    read: list[Any] = []

    def step(model, optimizer, batch):
        loss = train_step(model, optimizer, batch).detach()
        read.extend([loss.item(), float(loss), f"{loss:.2f}", repr(loss)])
        print(loss, model[0].weight)

    measured = measure(step=step, source="simulated", steps=1, **made())
    assert read[:3] == [1.0, 1.0, "1.00"] and "FakeTensor" in read[3]
    assert "placeholders of 1.0" in str(measured.provenance)
    assert "placeholder" not in str(measure(step=step, source="cpu", **made()).provenance)


READERS = {
    "mask": lambda x: x[x > 0].sum(),
    "nonzero": lambda x: x * len(x.nonzero()),
    "count": lambda x: x / (x > 0).sum().item(),
    "if": lambda x: x if (x > 0).all() else -x,
    "numpy": lambda x: x * float(x.detach().cpu().numpy().mean()),
}


@pytest.mark.parametrize("how", READERS)
def test_what_depends_on_values_is_named_with_its_line(how):
    def step(model, optimizer, batch):
        READERS[how](model(batch[0])).sum().backward()

    with pytest.raises(StepError, match=r"^test_own_step\.py:\d+ .*has a shape but no values") as caught:
        measure(step=step, source="simulated", **made())
    assert f'"{how}": lambda x' in str(caught.value)
    assert measure(step=step, source="cpu", **made()).peak > 0


class Lazy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LazyLinear(4)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        (
            {"step": 3},
            TypeError,
            r"step is 3, which cannot be called: write it as def step\(model, optimizer, batch\)",
        ),
        ({"step": lambda: None}, TypeError, r"\(\) cannot be called as .*\(model, optimizer, batch\)"),
        ({"step": lambda model, optimizer: None}, TypeError, "too many positional arguments"),
        (
            {"model": nn.Linear},
            TypeError,
            r"the class Linear, not a torch.nn.Module: make one first, model=Linear\(…\)",
        ),
        ({"model": "gpt2"}, TypeError, "model is a str, not a torch.nn.Module"),
        ({"model": nn.Linear(64, 10)}, ValueError, "the AdamW updates no parameter of this model"),
        (
            {"model": Lazy(), "optimizer": None},
            ValueError,
            "layer.weight has no shape yet: run the model once",
        ),
        ({"optimizer": 1e-3}, TypeError, "optimizer is a float, not a torch.optim.Optimizer"),
        (
            {"batch": (pair for pair in ())},
            ValueError,
            r"batch is a generator that cannot be .*next\(iter\(loader\)\)",
        ),
        ({"source": "recorded"}, ValueError, "a step of your own is never recorded"),
        ({"source": "simulation"}, ValueError, "did you mean 'simulated'"),
        ({"attention": "flesh"}, ValueError, "did you mean 'flash'"),
        ({"steps": 0}, ValueError, "steps is 0: a whole number"),
        ({"run": TrainingRun("gpt2")}, TypeError, "leave out step, model, optimizer, batch, or the run"),
        ({"run": nn.Linear(2, 2)}, TypeError, "measure takes a TrainingRun"),
        ({"model": None}, TypeError, r"measure takes a TrainingRun, measure\(run\), or a step of your own"),
    ],
    ids=lambda value: str(value).split(" at 0x")[0],  # the same in every process
)
def test_what_cannot_be_measured_is_refused_in_words(changes, error, words):
    given: dict[str, Any] = {"step": train_step, "source": "simulated", **made(), **changes}
    with pytest.raises(error, match=words):
        measure(given.pop("run", None), **given)


@pytest.mark.parametrize(("path", "name"), [("", "the model"), ("0", "part 0 of the model")])
def test_a_compiled_model_is_refused_as_nobody_sees_what_it_keeps(path, name):
    parts = made()
    parts["model"].get_submodule(path).compile()
    with pytest.raises(ValueError, match=f"^{name} is compiled"):
        measure(step=train_step, source="simulated", **parts)


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


@EVERYWHERE
def test_a_sparse_gradient_is_named_with_its_line(source):
    model = nn.Sequential(nn.Embedding(100, 8, sparse=True), nn.Flatten(), nn.Linear(32, 10))
    batch = (torch.randint(100, (2, 4)), torch.randint(10, (2,)))
    with pytest.raises(
        StepError, match=r"model\(x\).*makes a tensor of layout torch.sparse_coo.*leave out sparse=True"
    ):
        measure(
            step=train_step,
            model=model,
            optimizer=torch.optim.SGD(model.parameters()),
            batch=batch,
            source=source,
        )


def test_what_torch_cannot_simulate_is_named_with_its_line():
    """Neither torch 2.13 nor 2.15 has a shape rule for this loss's backward; a GRU got one in 2.15."""
    parts = made() | {"optimizer": None}

    def step(model, batch):
        F.multi_margin_loss(model(batch[0]), batch[1]).backward()

    words = (
        r"multi_margin_loss\(model\(batch\[0\]\).*multi_margin_loss_backward cannot be"
        r" simulated.*source='cpu'"
    )
    with pytest.raises(StepError, match=words):
        measure(step=step, source="simulated", **parts)
    assert measure(step=step, source="cpu", **parts).peak > 0


def test_weights_of_an_lstm_are_laid_in_one_piece_as_the_move_to_a_gpu_does(monkeypatch):
    flattened = []
    monkeypatch.setattr(nn.LSTM, "flatten_parameters", lambda layer: flattened.append(layer))
    parts = made("recurrent")
    flattened.clear()  # of its making
    measure(step=train_step, source="simulated", **parts)
    assert not flattened and torch.backends.cudnn.enabled
    measure(step=train_step, source="cpu", **parts)
    assert len(flattened) == 1 and flattened[0] is not parts["model"].cells


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


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_live_kinds_equal_the_simulated_ones():
    parts = made()
    live, simulated = (
        measure(step=train_step, source=source, **copy.deepcopy(parts)) for source in ("live", "simulated")
    )
    assert live.breakdown == simulated.breakdown and live.counters["allocated"] >= live.peak


def test_a_live_step_is_counted_without_the_tracker_too(card):
    def step(model, batch):  # without an optimizer, which would ask the CUDA that is not there
        F.cross_entropy(model(batch[0]), batch[1]).backward()

    measured = measure(step=step, source="live", **made() | {"optimizer": None})
    assert measured.counters["allocated"] == measured.counters["reserved"] == measured.peak
    assert str(measured.provenance).startswith("live on a stand-in")


def test_a_step_that_fails_when_it_is_counted_leaves_nothing_either(card):
    calls: list[int] = []

    def step(model, batch):
        calls.append(len(calls))
        F.cross_entropy(model(batch[0]), batch[1]).backward()
        if len(calls) > 2:  # two steps were followed by the tracker
            raise KeyError("when counted")

    parts = made() | {"optimizer": None}
    before = card.allocated
    with pytest.raises(KeyError) as caught:
        measure(step=step, source="live", **parts)
    assert caught.value.args and len(calls) == 3 and card.allocated == before


# What a GPU turns out not to do, and what a step that fails leaves there


CANNOT = pytest.mark.parametrize(
    ("failure", "expected", "words"),
    [
        (
            torch.OutOfMemoryError("Out of it. Sorry."),
            GpuOutOfMemory,
            "your step does not fit this GPU. Out of it",
        ),
        (
            RuntimeError("No available kernel. Aborting."),
            KernelRefused,
            "has no attention kernel on this GPU for what",
        ),
        (
            RuntimeError("CUDA error: no kernel image is available"),
            KernelRefused,
            "has no code for this a stand-in",
        ),
    ],
    ids=["memory", "kernel", "architecture"],
)


def failing_live(failure: Exception, before: Any = lambda x: x) -> Any:
    """A step that fails on real tensors alone, after `before` has looked at its input."""

    def step(model, optimizer, batch):
        before(batch[0])
        if not isinstance(batch[0], FakeTensor):
            raise failure
        train_step(model, optimizer, batch)

    return step


@CANNOT
def test_auto_simulates_what_the_gpu_turns_out_not_to_do_and_says_why(card, failure, expected, words):
    measured = measure(step=failing_live(failure), **made())
    assert measured.source == "simulated" and measured.peak > 0
    assert measured.provenance.note.startswith("not live: ") and words in measured.provenance.note


@CANNOT
@pytest.mark.parametrize("forced", [True, False])
def test_live_that_was_asked_for_is_never_simulated(card, monkeypatch, failure, expected, words, forced):
    if forced:
        monkeypatch.setenv("COURSE_SOURCE", "live")
    with pytest.raises(expected, match=re.escape(words)) as caught:
        measure(step=failing_live(failure), source="auto" if forced else "live", **made())
    assert "source='simulated' tells what it would need" in str(caught.value)


@CANNOT
def test_what_can_neither_be_simulated_nor_run_says_both(card, failure, expected, words):
    step = failing_live(failure, lambda x: x[x > 0])
    with pytest.raises(expected, match=re.escape(words)) as caught:
        measure(step=step, **made())
    assert "Nor can it be simulated: test_own_step.py:" in str(caught.value)
    assert "has a shape but no values" in str(caught.value) and "source='simulated' tells" not in str(
        caught.value
    )


def fails_in_step(model, optimizer, batch):
    F.cross_entropy(model(batch[0]), batch[1]).backward()
    kept = [batch[0] + 1]
    raise ValueError(f"in the step, with {len(kept)}")


def fails_in_forward(model, optimizer, batch):
    def fails(*_, kept=batch[0] + 1):
        raise ValueError("in forward")

    model[2].forward = fails
    train_step(model, optimizer, batch)


def fails_in_hook(model, optimizer, batch):
    hidden = model[0](batch[0])

    def fails(gradient, kept=batch[0] + 1):
        raise ValueError("in a hook")

    hidden.register_hook(fails)
    (model(batch[0]).sum() + hidden.sum()).backward()


def fails_in_operator(model, optimizer, batch):
    hidden = model[0](batch[0])
    _ = hidden @ hidden


def is_interrupted(model, optimizer, batch):
    F.cross_entropy(model(batch[0]), batch[1]).backward()
    raise KeyboardInterrupt


ENDS = pytest.mark.parametrize(
    ("step", "last"),
    [
        (fails_in_step, 'raise ValueError(f"in the step, with {len(kept)}")'),
        (fails_in_forward, 'raise ValueError("in forward")'),
        (fails_in_hook, 'raise ValueError("in a hook")'),
        (fails_in_operator, "hidden @ hidden"),
        (is_interrupted, "raise KeyboardInterrupt"),
    ],
)


def left_by(step: Any, source: str, allocated: Any, times: int) -> tuple[set[int], str]:
    """Bytes that each of many failures leaves while all exceptions are kept, and the last traceback."""
    parts = made()
    kept = []
    left = set()
    gc.collect()
    before = allocated()
    for _ in range(times):
        with pytest.raises((ValueError, RuntimeError, KeyboardInterrupt)) as caught:
            measure(step=step, source=source, **parts)
        kept.append(caught.value)
        left.add(allocated() - before)
    return left, "".join(traceback.format_tb(kept[-1].__traceback__))


@ENDS
def test_a_step_that_fails_on_a_gpu_leaves_nothing_there_while_its_exception_is_kept(card, step, last):
    left, shown = left_by(step, "live", lambda: card.allocated, 3)
    assert left == {0}
    assert last in shown


@ENDS
def test_a_step_that_fails_on_the_cpu_leaves_nothing_either(step, last):
    with LimitedMemory(200 * MB) as memory:
        left, shown = left_by(step, "cpu", lambda: memory.allocated, 3)
    assert left == {0}
    assert last in shown


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@ENDS
def test_a_step_that_fails_leaves_nothing_on_a_real_gpu(step, last):
    left, shown = left_by(step, "live", torch.cuda.memory_allocated, 20)
    assert left == {0}
    assert last in shown
