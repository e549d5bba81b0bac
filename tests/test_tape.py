"""The model of autograd behind the estimates: its own rules, and operation by operation against torch's."""

import math
import random
from collections import Counter
from itertools import groupby

import pytest
from engine import simulate, tiny

from course_utils.breakdown import KINDS
from course_utils.estimating import estimate, moments
from course_utils.estimating.exact.experts import shares_of, typed
from course_utils.estimating.exact.network import tape_of
from course_utils.estimating.exact.operations import Step
from course_utils.estimating.exact.program import Reading, compiled
from course_utils.estimating.exact.structure import groups_of, pieces_of_loss, structure, symbols
from course_utils.estimating.exact.tape import Gradient, Saving, Storage, Tape, Tensor, operation
from course_utils.models import TransformerConfig
from course_utils.run import TrainingRun
from course_utils.units import round_up

Event = tuple[int, str]


# Operation by operation


SEQUENCES = [
    TrainingRun("tiny-gpt", 3, 64),
    TrainingRun("tiny-gpt", 1, 64, "bf16-master", attention="eager"),
    TrainingRun("tiny-gpt", 2, 64, "fp32", attention="efficient", recompute="full", accumulation_steps=2),
    TrainingRun("tiny-gpt", 2, 64, "amp-fp16", recompute="selective"),
    TrainingRun("tiny-gpt", 2, 64, "amp-fp16", attention="eager"),
    TrainingRun("tiny-gpt", 2, 64, "bf16", attention="eager", recompute="selective-attention"),
    TrainingRun("tiny-gpt", 2, 64, "bf16-master-fp32grad", loss_chunks=2),
    TrainingRun("tiny-gpt", 2, 64, "fp16-master", attention="cudnn", recompute="offload"),
    TrainingRun("tiny-gpt", 2, 64, set_to_none=False, recompute="every-2"),
    TrainingRun("tiny-gpt", 2, 64, lora_rank=4, logits="fp32"),
    TrainingRun("tiny-gpt", 2, 64, "fp16-master", loss_chunks=3, logits="fp32"),
    TrainingRun("tiny-gpt", 2, 64, lora_rank=4, lora_targets="mlp", frozen_bits=4, recompute="full"),
    TrainingRun(
        tiny("gpt2", layers=1, experts=4, experts_per_token=2), 2, 64, "bf16-master", recompute="full"
    ),
]


@pytest.mark.parametrize("run", SEQUENCES, ids=str)
@pytest.mark.sweep(13)
def test_tape_and_torch_do_the_same_in_the_same_order(run):
    """Every birth and death from forward to the end of backward; what dies in one go is in no order."""
    numbers = symbols(run)
    estimated = [
        (sign * round_up(math.prod(numbers[symbol] for symbol in record.size.split("·"))), record.settled())
        for record, sign in tape_of(structure(run)).events
    ]
    assert in_order(estimated) == in_order(really(run))


def really(run: TrainingRun) -> list[Event]:
    """What a simulated step allocates and frees in forward, loss and backward of its last micro-batch."""
    timeline = simulate(run).timeline
    marks = [mark for mark in timeline.marks if mark.step == 2]
    start = [mark.event for mark in marks if mark.phase == "forward"][-1]
    end = next(mark.event for mark in marks if mark.phase == "optimizer")
    return list(timeline.changes[start:end])


def in_order(events: list[Event]) -> list[Event]:
    runs = groupby(events, lambda event: event[0] < 0)
    return [event for frees, some in runs for event in (sorted(some) if frees else some)]


# Every option of a model, with every choice of a run


def anything(seed: int) -> TrainingRun:
    """A small model of any options and a run of any choices that agree; the same for the same seed."""
    choose = random.Random(seed).choice
    while True:
        try:
            return TrainingRun(any_model(choose), choose([1, 2, 3]), choose([64, 100]), **any_choices(choose))
        except ValueError:  # choices that contradict each other: draw again
            continue


def any_model(choose) -> TransformerConfig:
    heads = choose([4, 8])
    experts = choose([{}, {}, {"experts": 4, "experts_per_token": 2}])
    return TransformerConfig(
        "any",
        choose(["gpt2", "llama"]),
        choose([1, 2, 3, 5]),
        256,
        heads,
        choose([1000, 8192]),
        512,
        kv_heads=choose([heads, heads // 2]),
        ffn=choose([0, 1000]),
        dropout=choose([0.0, 0.1]),
        tied=choose([True, False]),
        positions=choose(["learned", "rotary", "none"]),
        norm=choose(["layernorm", "rmsnorm"]),
        mlp=choose(["gelu", "swiglu"]),
        bias=choose([True, False]),
        qkv_bias=choose([True, False]),
        logits=choose(["fp32", "compute"]),
        **experts,
    )


def any_choices(choose) -> dict:
    lora = {
        "lora_rank": 4,
        "lora_targets": choose(["attention", "mlp"]),
        "frozen_bits": choose([None, 16, 8, 4]),
    }
    return {
        "precision": choose(["fp32", "amp-bf16", "amp-fp16", "bf16-master", "bf16", "bf16-master-fp32grad"]),
        "attention": choose(["eager", "flash", "efficient", "cudnn"]),
        "optimizer": choose(["adamw", "sgd", "adamw-fused", "adamw-loop"]),
        "recompute": choose(
            ["none", "full", "selective", "selective-attention", "sqrt", "every-2", "offload"]
        ),
        "accumulation_steps": choose([1, 1, 2]),
        "loss_chunks": choose([1, 1, 3, 5]),
        "set_to_none": choose([True, True, False]),
        **choose([{}, {}, lora]),
    }


@pytest.mark.parametrize("seed", range(24))
@pytest.mark.sweep(8)
def test_any_model_and_any_run_is_exact(seed):
    run = anything(seed)
    measured = simulate(run)
    expected = moments(run)
    assert differences(estimate(run), measured.breakdown) == {}, run.code()
    assert differences(expected["end of forward"], measured.moments["end of forward"]) == {}, run.code()


def test_eager_attention_of_one_head_copies_no_factors():
    """So narrow that q, k and v by one matrix are another number of blocks than each by itself."""
    model = TransformerConfig("one head", "gpt2", 2, 8, 1, 31, 256, dropout=0.1)
    run = TrainingRun(model, 2, 100, "bf16", "sgd", "eager")
    measured = simulate(run)
    expected = moments(run)
    assert differences(expected["end of forward"], measured.moments["end of forward"]) == {}
    for phase in ("forward", "loss", "backward"):
        highest = max(moment.total for moment in expected.values() if moment.phase == phase)
        assert highest == measured.phase_peaks[phase].total, phase


def differences(estimated, measured) -> dict[str, int]:
    return {kind: estimated[kind] - measured[kind] for kind in KINDS if estimated[kind] != measured[kind]}


# What repeats


@pytest.mark.parametrize(
    ("layers", "blocks", "groups"),
    [
        (48, 1, (1, 1, 1)),
        (48, 7, (3, 3, 3)),
        (2, 1, (1, 1)),
        (5, 4, (3, 1)),
        (6, 3, (3, 3)),
        (1, 1, (1,)),
        (7, 2, (2, 2, 1)),
    ],
)
def test_groups_of_a_tape(layers, blocks, groups):
    assert groups_of(layers, blocks) == groups


@pytest.mark.parametrize("recompute", ["none", "full", "every-3", "every-4", "sqrt", "selective", "offload"])
@pytest.mark.parametrize("layers", [4, 9, 10, 13])
@pytest.mark.sweep(7)
def test_a_deep_model_is_read_as_if_every_block_were_on_the_tape(layers, recompute):
    """Against simulations of every depth, so that remainders and repetitions of every kind occur."""
    model = TransformerConfig("deep", "gpt2", layers, 128, 4, 512, 128, dropout=0.1)
    run = TrainingRun(model, 4, 128, recompute=recompute, loss_chunks=layers)
    assert differences(estimate(run), simulate(run).breakdown) == {}


@pytest.mark.parametrize("recompute", ["none", "full", "every-2", "every-3", "every-4", "sqrt"])
@pytest.mark.parametrize("layers", [4, 5, 9, 10, 13, 48])
def test_each_block_and_each_piece_of_the_loss_is_counted_once(layers, recompute):
    model = TransformerConfig("deep", "gpt2", layers, 128, 4, 512, 128)
    run = TrainingRun(model, 4, 128, recompute=recompute, loss_chunks=layers)
    reading = Reading(run)
    counted = Counter()
    for piece, times in zip(reading.pieces, reading.times, strict=True):
        counted[piece.phase, piece.place.part] += times
    assert counted["forward", "block"] == layers
    assert counted["loss", "piece"] == pieces_of_loss(run)[0]


def test_symbols_are_the_numbers_of_a_run():
    """Llama 3 8B: 32 heads of 128 elements, 8 heads of keys and of values."""
    found = symbols(TrainingRun("llama3-8b", 2, 100, "amp-bf16"))
    expected = {"kv": 1024, "kv/2": 512, "h": 4096, "h/2": 2048, "d": 128, "d/2": 64, "qkv": 4096 + 2048}
    expected |= {"sb": 200, "s32": 128, "c": 2, "r": 4} | {
        name: int(name) for name in found if name.isdecimal()
    }
    assert {name: found[name] for name in expected} == expected


def test_runs_that_differ_in_numbers_alone_share_a_program():
    small = TrainingRun("gpt2", 2, 128)
    large = TrainingRun("gpt2-xl", 32, 1024)
    assert compiled(structure(small)) is compiled(structure(large))
    assert compiled(structure(small)) is not compiled(structure(small.replace(attention="eager")))


# The tape itself


def sizes(tape: Tape) -> list[tuple[str, int]]:
    return [(record.size, sign) for record, sign in tape.events]


def test_a_storage_is_freed_by_its_last_holder():
    tape = Tape()
    storage = tape.make("a").retain()
    storage.release()
    assert sizes(tape) == [("a", 1)]
    storage.release()
    assert sizes(tape) == [("a", 1), ("a", -1)]
    with pytest.raises(AssertionError, match="after it had been freed"):
        storage.retain()
    with pytest.raises(AssertionError, match="more often than it was retained"):
        storage.release()


class Owner:
    """What an operation's first argument has to have."""

    def __init__(self) -> None:
        self.tape = Tape()


@operation
def made(owner: Owner, size: str, *_: Tensor) -> Tensor:
    owner.tape.tensor("1", f"scratch of {size}")
    return owner.tape.tensor("1", size)


def test_an_operation_releases_what_it_made_and_the_values_that_it_was_passed():
    """As in y = g(f()): f's result is freed when g has returned; a variable when the function returns."""

    @operation
    def function(owner: Owner) -> Tensor:
        x = owner.tape.hold(made(owner, "x"))
        made(owner, "y", made(owner, "value"), x)
        assert ("1·value", -1) in sizes(owner.tape) and ("1·x", -1) not in sizes(owner.tape)
        return made(owner, "out", x)

    owner = Owner()
    out = function(owner)
    freed = [size for size, sign in sizes(owner.tape) if sign < 0]
    assert Counter(freed) == Counter(
        [
            "1·scratch of x",
            "1·scratch of value",
            "1·value",
            "1·scratch of y",
            "1·scratch of out",
            "1·x",
            "1·y",
        ]
    )
    assert out.storage.holders == 1


def test_an_operation_that_is_stopped_releases_what_it_holds():
    @operation
    def stopped(owner: Owner, x: Tensor) -> Tensor:
        owner.tape.hold(owner.tape.view(x))
        made(owner, "y")
        raise KeyError

    owner = Owner()
    x = owner.tape.tensor("1", "x")
    with pytest.raises(KeyError):
        stopped(owner, x)
    assert x.storage.holders == 1 and sizes(owner.tape)[-1] == ("1·y", -1)


@pytest.mark.parametrize("run", SEQUENCES, ids=str)
def test_only_gradients_are_left_on_a_tape(run):
    tape = tape_of(structure(run))
    left = Counter(id(record) for record, _ in tape.events)
    assert set(left.values()) <= {1, 2}
    assert {record.kind for record, _ in tape.events if left[id(record)] == 1} <= {"gradients"}


def test_gradients_that_meet_are_added_in_place_unless_one_is_a_view_or_somebody_else_s():
    def meet(view: bool, shared: bool = False) -> list[tuple[str, int]]:
        tape = Tape()
        others: list[Storage] = []

        def backward(_: list[Gradient]) -> list[Gradient | None]:
            made = tape.make("4·n")
            if shared:
                others.append(made.retain())
            return [Gradient(made, "4·n", view)]

        leaf = tape.leaf("4", "n", lambda gradient: others.append(gradient.storage.retain()))
        x = tape.tensor("4", "x")
        y = tape.tensor("4", "y")
        for out in (x, y):
            tape.apply(out, [leaf], backward)
        top = tape.tensor("4", "1")
        tape.apply(top, [x, y], lambda came: [came[0].again(), came[0].again()])
        tape.events.clear()
        tape.backward(top, tape.gradient("4·1"))
        return [event for event in sizes(tape) if event[0] == "4·n"]

    assert meet(view=False) == [("4·n", 1), ("4·n", 1), ("4·n", -1)]
    assert sorted(meet(view=True)) == sorted([("4·n", 1)] * 3 + [("4·n", -1)] * 2)
    assert meet(view=False, shared=True) == [("4·n", 1)] * 3


def test_what_no_gradient_needs_is_not_kept():
    tape = Tape()
    x = tape.tensor("4", "x")
    out = tape.tensor("4", "x")
    tape.apply(out, [x], lambda _: [None], [Saving(x, "f", "input", "gradient")])
    assert out.edge is None and tape.ledger == {} and x.storage.holders == 1


def test_an_input_is_kept_before_an_operation_only_where_backward_comes():
    tape = Tape()
    leaf = tape.leaf("4", "n", lambda _: None)
    x = tape.tensor("4", "x")
    saving = [Saving(x, "f", "input", "gradient")]
    assert tape.save([x], saving) == []
    tape.grad_enabled = False
    assert tape.save([leaf], saving) == [] and tape.ledger == {}
    tape.grad_enabled = True
    (saved,) = tape.save([leaf], saving)
    assert saved.unpack() is x.storage and x.storage.holders == 3 and len(tape.ledger) == 1


def test_a_type_that_stays_copies_nothing():
    step = Step(structure(TrainingRun("gpt2")))
    x = step.tape.tensor("4", "sb·E")
    same = typed(step, x, "c", changes=False)
    copy = typed(step, x, "c", changes=True)
    assert same.storage is x.storage is not copy.storage
    assert same.size == copy.size == "c·sb·E"


def test_a_router_s_quotient_makes_three_tensors_on_the_way_to_its_gradients():
    """d(x/y) = dx/y − (x/y)/y · dy: the quotient, that over y, minus the gradient; y's is summed last."""
    step = Step(structure(TrainingRun("gpt2")))
    x = step.tape.leaf("4", "sb·K", lambda _: None)
    y = step.tape.leaf("4", "sb", lambda _: None)
    quotient = shares_of(step, x, y)
    step.tape.events.clear()
    step.tape.backward(quotient, step.tape.gradient("4·sb·K"))
    births = Counter(size for size, sign in sizes(step.tape) if sign > 0)
    assert births == {"4·sb·K": 1 + 3 + 2, "4·sb": 1}


def test_an_operation_owes_a_gradient_to_each_input():
    tape = Tape()
    leaf = tape.leaf("4", "n", lambda _: None)
    out = tape.tensor("4", "1")
    tape.apply(out, [leaf], lambda came: [came[0].again(), came[0].again()])
    with pytest.raises(AssertionError, match="one gradient for each input"):
        tape.backward(out, tape.gradient("4·1"))
