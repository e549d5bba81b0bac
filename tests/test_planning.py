"""`fit` finds what a search of everything finds, and the way there; the seconds that choices lose; `twin`."""

from itertools import product
from math import prod
from typing import Any

import pytest
from counting import calls

from course_utils import GPUS, TrainingRun, estimate, fit, moments
from course_utils.estimating.published import korthikanti_model_flops
from course_utils.estimating.step_time import (
    communicated,
    lost_seconds,
    model_flops,
    recomputed_flops,
    step_seconds,
)
from course_utils.gpus import Gpu, Rates
from course_utils.models import TransformerConfig, outer_shapes
from course_utils.planning.fit import FREE, Plan, arrange
from course_utils.planning.twin import SAFETY, twin
from course_utils.units import GB

RTX5090 = GPUS["RTX5090-32GB"]


@pytest.mark.parametrize("batch, memory", [(8, 8), (16, 20)])
def test_nothing_that_fits_loses_less(batch: int, memory: int) -> None:
    """Of all that one rank could choose on a card that has a flash kernel."""
    card = Gpu("a card", memory * GB, (9, 0), rates=RTX5090.rates)
    start = TrainingRun("gpt2-medium", micro_batch=batch)
    plan = arrange(start, card)
    sizes = [size for size in range(1, batch + 1) if batch % size == 0]
    free = product(sizes, FREE["recompute"], FREE["implementation"], FREE["loss_chunks"])
    runs = [
        start.replace(
            micro_batch=b, global_batch=batch, recompute=policy, optimizer=f"adamw-{how}", loss_chunks=n
        )
        for b, policy, how, n in free
    ]
    lost = [lost_seconds(run, card) for run in runs if estimate(run).total * SAFETY <= card.room]
    assert plan.best is not None
    assert plan.best.lost == pytest.approx(min(lost))
    assert estimate(plan.best.run).total == plan.best.peak <= card.room / SAFETY
    assert plan.best.run.global_batch == batch


def test_each_card_gets_the_fastest_kernel_that_runs_there() -> None:
    """The efficient kernel keeps 1,024 bytes a layer less, but nobody should leave the faster flash kernel
    for that.
    """
    run = TrainingRun("gpt2", 8)
    assert {plan.run.attention for plan in arrange(run, RTX5090).tried} == {"flash"}
    old = arrange(run.replace(precision="amp-fp16", attention="efficient"), GPUS["V100-16GB"]).tried
    assert {plan.run.attention for plan in old} == {"efficient"}
    best = fit("gpt2", "T4-16GB", global_batch=8).best
    assert best is not None and (best.run.precision.name, best.run.attention) == ("amp-fp16", "efficient")
    odd = TransformerConfig("odd heads", "gpt2", layers=2, hidden=60, heads=5, vocab=300, max_positions=128)
    best = fit(odd, "T4-16GB", global_batch=4, seq_len=64, attention="eager").best
    assert best is not None and best.run.attention == "eager", "no fused kernel takes such heads"


def test_the_first_question_of_the_course_has_an_answer() -> None:
    plan = fit("gpt2-xl", "RTX5090-32GB", global_batch=32)
    assert plan.best is not None and plan.best.run.global_batch == 32
    assert plan.path[0].run.micro_batch == 32 and plan.path[0].peak > RTX5090.room
    assert plan.path[-1].run == plan.best.run and plan.best.run.code() in str(plan)
    back = arrange(TrainingRun("gpt2", accumulation_steps=8), GPUS["A100-80GB"])
    assert "micro-batches: 1 of 8 instead of 8 of 1" in str(back)


def test_what_cannot_fit_says_what_is_nearest() -> None:
    plan = fit("llama3-8b", "H100-80GB", global_batch=1)
    assert plan.best is None and plan.path[-1].run == plan.nearest.run and "nothing fits" in str(plan)
    assert plan.nearest.peak == min(candidate.peak for candidate in plan.tried) > 16 * 8e9


def test_eight_cards_shard_in_fsdps_own_mixed_precision() -> None:
    plan = fit("llama3-8b", "H100-80GB", global_batch=64, seq_len=4096, world_size=8)
    assert plan.best is not None and plan.best.run.zero_stage >= 2
    assert plan.best.run.global_batch == 64
    assert plan.start.precision.name == "amp-bf16" and plan.best.run.precision.name == "bf16-master"
    assert "FSDP2's mixed precision" in str(plan) and not any("precision:" in step.what for step in plan.path)
    again = arrange(plan.best.run, plan.card)
    assert again.best == plan.best, "it begins as autocast or as the policy"
    other = fit("gpt2", "T4-16GB", global_batch=8, world_size=4)
    assert {one.run.precision.name for one in other.tried if one.run.zero_stage > 1} <= {"fp16-master"}


def test_a_thousand_configurations_take_a_few_hundred_calls_each() -> None:
    fit("gpt2-xl", "RTX5090-32GB", global_batch=32, may_change=("optimizer",))  # formulas are compiled
    plans: list[Plan] = []
    allowed = ("precision", "optimizer", "lora")
    counted = calls(lambda: plans.append(fit("gpt2-xl", "RTX5090-32GB", global_batch=30, may_change=allowed)))
    assert plans[0].covered > 1000 and counted < 400 * plans[0].covered


def test_flops_are_the_papers() -> None:
    run = TrainingRun("gpt3-175b", micro_batch=2, seq_len=2048)
    assert model_flops(run) == korthikanti_model_flops(run)
    core = run.replace(recompute="selective-attention")
    # two products of 2·b·s²·h in each block
    assert recomputed_flops(core) == 2 * 96 * 2 * 2 * 2048**2 * 12288
    blocks = model_flops(run) - 6 * 2 * 2048 * run.model.hidden * run.model.vocab
    assert recomputed_flops(run.replace(recompute="full")) == blocks // 3
    assert recomputed_flops(run) == recomputed_flops(run.replace(recompute="offload")) == 0
    mixture = TrainingRun("mixtral-8x7b")  # multiplies with its active experts only
    assert model_flops(mixture) < 6 * mixture.model.parameters * mixture.seq_len / 3


def test_communication_is_the_papers() -> None:
    run = TrainingRun("gpt2", precision="bf16", world_size=8)
    size = 2 * run.model.parameters * 7 / 8
    for stage, once, five_times in ((0, 2, 2), (1, 2, 2), (2, 2, 1 + 5), (3, 3, 3 * 5)):
        for count, times in ((1, once), (5, five_times)):
            sharded = run.replace(zero_stage=stage, accumulation_steps=count)
            assert communicated(sharded) == pytest.approx(times * size, rel=1e-3)
    assert communicated(run.replace(world_size=1)) == 0


@pytest.mark.parametrize(("precision", "micro_batches"), [("amp-bf16", 2), ("bf16-master", 1)])
def test_fsdp_sends_what_is_charged(
    precision: str, micro_batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The genuine fully_shard on simulated ranks: the bytes of every collective that it starts."""
    from course_utils.measuring.sharded import ShardTracker
    from course_utils.measuring.sources import simulated_rank

    # which of the two tensors has all ranks' parts
    whole = {"_allgather_base_": 0, "_reduce_scatter_base_": 1}
    sent = dict.fromkeys(whole, 0)
    follow = ShardTracker.__torch_dispatch__

    def count(self: ShardTracker, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("c10d::")
        if name in whole:
            sent[name] += args[whole[name]].nbytes * 3 // 4
        return follow(self, func, types, args, kwargs)

    monkeypatch.setattr(ShardTracker, "__torch_dispatch__", count)
    model = TransformerConfig("small", "gpt2", layers=3, hidden=256, heads=4, vocab=512, max_positions=64)
    run = TrainingRun(model, 2, 64, precision, world_size=4, zero_stage=3, accumulation_steps=micro_batches)
    simulated_rank(run, 1, "")
    # gathered once: they stay until backward
    outside = sum(prod(shape) for shape in outer_shapes(model).values())
    kept = micro_batches * outside * run.precision.weight * 3 / 4
    assert sum(sent.values()) == pytest.approx(communicated(run) - kept, rel=1e-3)


MEDIUM = TrainingRun("gpt2-medium", micro_batch=4)
UNIT_RATES = Gpu("a card", 1, (9, 0), rates=Rates(2.0, 3.0, 5.0, 7.0, 11.0, 13.0, ""))
"""16-bit, tf32, fp32, memory, link, host: a number of its own for each."""


@pytest.mark.parametrize(
    ("part", "changes", "bytes_each"),
    [
        # read twice; read and written as a copy of 16 bits; the gradients written
        ("weights", {}, 2 * 4 + (4 + 2) + 4),
        # where gradients add up, read, read and written
        ("weights", {"accumulation_steps": 2}, 2 * (2 * 4 + (4 + 2) + 3 * 4)),
        ("weights", {"precision": "bf16-master"}, 2 * 2 + 2),
        # weights and states read and written, gradients read
        ("optimizer", {"optimizer": "adamw-fused"}, 2 * (4 + 8) + 4),
        ("optimizer", {"optimizer": "adamw"}, (2 * (4 + 8) + 4) * 20 / 7),
        ("optimizer", {"optimizer": "sgd", "world_size": 4, "zero_stage": 1}, (2 * 4 + 4) / 4),
    ],
    ids=str,
)
def test_each_parameter_moves_the_bytes_that_are_read_and_written(
    part: str, changes: dict[str, Any], bytes_each: float
) -> None:
    run = MEDIUM.replace(**changes)
    moved = step_seconds(run, UNIT_RATES)[part] * 7
    assert moved == pytest.approx(bytes_each * run.model.parameters, rel=2e-3)


def test_activations_are_written_and_read_and_what_is_recomputed_written_again() -> None:
    run = MEDIUM.replace(accumulation_steps=2)
    kept, recomputed, selective = (
        moments(MEDIUM.replace(recompute=how))["end of forward"]["activations"]
        for how in ("none", "full", "selective-attention")
    )
    made_again = {"none": 0, "offload": 0, "full": kept - recomputed, "selective-attention": kept - selective}
    for how, again in made_again.items():
        seconds = step_seconds(run.replace(recompute=how), UNIT_RATES)
        assert seconds["activations"] == pytest.approx(2 * (2 * kept + again) / 7, rel=1e-2), how
        offloaded = 2 * 2 * kept / 13 if how == "offload" else 0
        assert seconds["offload"] == pytest.approx(offloaded, rel=1e-2), how


@pytest.mark.parametrize(("precision", "speed"), [("fp32", 5), ("amp-bf16", 2)])
def test_flops_take_the_rate_of_their_format(precision: str, speed: int) -> None:
    run = MEDIUM.replace(
        precision=precision, attention="efficient", recompute="full", accumulation_steps=2, loss_chunks=4
    )
    seconds = step_seconds(run, UNIT_RATES)
    again = 2 * 1024 * 4 * 1024 * 50257
    assert seconds["model"] == pytest.approx(2 * korthikanti_model_flops(run) / speed)
    assert seconds["recomputation"] == pytest.approx(2 * (recomputed_flops(run) + again) / speed)
    assert lost_seconds(run, UNIT_RATES) == pytest.approx(
        sum(seconds.values()) - 2 * korthikanti_model_flops(run) / 2
    )


def test_a_twin_is_the_same_step_in_what_the_card_can_run_and_as_large_as_fits() -> None:
    run = TrainingRun("gpt2-xl", 32, 1024)
    assert twin(run, GPUS["H200-141GB"]) == run
    old = GPUS["V100-16GB"]
    found = twin(run, old)
    assert (found.precision.name, found.attention, found.seq_len) == ("amp-fp16", "efficient", 1024)
    assert estimate(found).total * SAFETY <= old.memory
    assert estimate(found.replace(micro_batch=found.micro_batch + 1)).total * SAFETY > old.memory
    whole = found.replace(model="gpt2-xl", micro_batch=1)
    assert found.model.name == "gpt2-large" and estimate(whole).total * SAFETY > old.memory
