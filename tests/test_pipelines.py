"""Lesson 14's own code: the simulator against closed forms, memory, plans, pictures."""

import math
from itertools import pairwise, product

import pytest

from course_utils import TrainingRun, estimate, gpu
from course_utils.breakdown import KINDS
from course_utils.estimating import moments
from course_utils.estimating.published import korthikanti_model_flops
from course_utils.estimating.states import gradient_bytes, optimizer_state_bytes, parameter_bytes
from course_utils.estimating.step_time import communicated
from course_utils.lessons.pipelines.cluster_plans import Cluster, Plan, account, cheapest, plans, step_flops
from course_utils.lessons.pipelines.figures import pipeline_figure
from course_utils.lessons.pipelines.memory import blocks_of, parameters_of, stage_memory, stage_shapes
from course_utils.lessons.pipelines.schedules import BACKWARD, FORWARD, SCHEDULES, bubble, most_kept, simulate
from course_utils.lessons.pipelines.widget import pipeline_player
from course_utils.model_files import model_config
from course_utils.models import parameter_shapes

SIZES = [(p, m) for p in (1, 2, 3, 4, 8) for m in (1, 2, 4, 9, 16)]


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_does_all_works_once_each_after_what_it_needs_and_keeps_the_closed_form(
    schedule, size
):
    p, m = size
    pipeline = simulate(schedule, p, m)
    done = {(work.kind, work.stage, work.micro): work for work in pipeline.works}
    micros = [-1] if schedule == "naive" else range(m)
    assert set(done) == set(product("FB", range(p), micros))
    assert len(done) == len(pipeline.works)
    for (kind, stage, micro), work in done.items():
        before = (FORWARD, stage - 1, micro) if kind == FORWARD else (BACKWARD, stage + 1, micro)
        if before in done:
            assert work.start >= done[before].end
        if kind == BACKWARD:
            assert work.start >= done[FORWARD, stage, micro].end
    for stage in range(p):
        mine = pipeline.of_stage(stage)
        assert all(one.end <= other.start for one, other in pairwise(mine))
        assert pipeline.most_kept(stage) == most_kept(schedule, p, m, stage)
        assert pipeline.kept(stage)[-1][1] == 0


@pytest.mark.parametrize("backward", [1.0, 2.0, 3.0])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_the_bubble_is_the_formula(size, backward):
    p, m = size
    for schedule in ("GPipe", "1F1B"):
        pipeline = simulate(schedule, p, m, backward=backward)
        assert pipeline.idle == pytest.approx(bubble(p, m), abs=1e-12)
        assert pipeline.span == pytest.approx((m + p - 1) * (1 + backward))
    assert simulate("naive", p, m, backward=backward).idle == pytest.approx(1 - 1 / p)


def test_pipedream_keeps_a_version_for_each_micro_batch_in_flight_and_is_as_late():
    pipeline = simulate("PipeDream", 4, 60)
    assert [pipeline.versions(stage) for stage in range(4)] == [4, 3, 2, 1]
    assert [pipeline.late(stage) for stage in range(4)] == [3, 2, 1, 0]
    assert simulate("PipeDream", 4, 500).idle < 0.01 < pipeline.idle
    flushed = simulate("1F1B", 4, 60)
    assert {flushed.versions(s) for s in range(4)} == {1} and {flushed.late(s) for s in range(4)} == {0}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("Gpipe", 2, 2), "unknown schedule 'Gpipe': did you mean 'GPipe'?"),
        (("GPipe", 0, 2), "stages is 0: a whole number from 1 to 64"),
        (("GPipe", 2, 1.5), "micro_batches is 1.5"),
    ],
)
def test_what_cannot_be_simulated_is_refused(arguments, words):
    for refuses in (simulate, pipeline_player):
        with pytest.raises(ValueError, match=words):
            refuses(*arguments)


XL = TrainingRun("gpt2-xl", 4, 1024, "bf16-master")


@pytest.mark.parametrize("name", ["gpt2", "llama3-8b"])
@pytest.mark.parametrize("stages", [1, 2, 5])
def test_stages_share_out_every_parameter_and_a_tied_head_twice(name, stages):
    model = model_config(name)
    counted = [name for stage in range(stages) for name in stage_shapes(model, stages, stage)]
    twice = ["embedding.weight"] if model.tied and stages > 1 else []
    assert sorted(counted) == sorted([*parameter_shapes(model), *twice])
    blocks = [block for stage in range(stages) for block in blocks_of(model.layers, stages, stage)]
    assert blocks == list(range(model.layers))


def test_one_stage_has_all_states_and_all_kept_activations():
    whole = stage_memory(XL, "1F1B", 1, 8, 0)
    assert whole["parameters"] == parameter_bytes(XL) and whole["gradients"] == gradient_bytes(XL)
    assert whole["optimizer_states"] == optimizer_state_bytes(XL)
    after_loss = estimate(XL)["activations"]
    assert whole["activations"] == pytest.approx(after_loss, rel=0.01)
    assert stage_memory(XL, "GPipe", 1, 8, 0)["activations"] == 8 * whole["activations"]
    assert set(whole) == set(KINDS)


def test_recomputation_keeps_checkpoints_and_one_block():
    none, full = (
        stage_memory(XL.replace(recompute=how), "1F1B", 4, 8, 1)["activations"] for how in ("none", "full")
    )
    block = none // 3 // 12
    checkpoint = 2 * 1024 * 4 * 1600
    # The checkpoint of the block that runs again is its input.
    assert full == (3 * 12 - 1) * checkpoint + block
    with pytest.raises(ValueError, match="'none' or 'full'"):
        stage_memory(XL.replace(recompute="selective"), "1F1B", 4, 8, 1)


@pytest.mark.parametrize("m", [1, 8, 32])
def test_gpipe_that_recomputes_its_stages_keeps_boundaries_and_one_micro_batch(m):
    """Huang et al. 2019, section 2.3: N + L/K · N/M, boundaries of N samples, L/K layers of a micro-batch."""
    own = stage_memory(XL.replace(recompute="every-12"), "GPipe", 4, m, 1)["activations"]
    boundary = 2 * 1024 * 4 * 1600
    one = stage_memory(XL, "GPipe", 4, 1, 1)["activations"]
    assert own == (m - 1) * boundary + one
    # A stretch is no longer than the stage.
    assert own == stage_memory(XL.replace(recompute="every-20"), "GPipe", 4, m, 1)["activations"]
    every_1, full = (stage_memory(XL.replace(recompute=how), "GPipe", 4, m, 1) for how in ("every-1", "full"))
    assert every_1 == full


@pytest.mark.parametrize("run", [XL, XL.replace(precision="amp-bf16"), TrainingRun("llama3.2-1b", 1, 4096)])
def test_one_stage_that_recomputes_has_the_activations_of_the_estimate(run: TrainingRun):
    run = run.replace(recompute="full")
    of_a_step = max(moment["activations"] for moment in moments(run).values())
    assert stage_memory(run, "1F1B", 1, 1, 0)["activations"] == pytest.approx(of_a_step, abs=1024)


def test_pipedream_pays_for_versions():
    kept = [stage_memory(XL, "PipeDream", 4, 8, stage) for stage in range(4)]
    assert [found["weight_copies"] // found["parameters"] for found in kept] == [3, 2, 1, 0]
    assert stage_memory(XL, "1F1B", 4, 8, 0)["weight_copies"] == 0


@pytest.mark.parametrize(
    ("stages", "stage", "words"), [(49, 0, "cannot be cut"), (4, 4, "count from 0 to 3")]
)
def test_stages_that_cannot_be(stages, stage, words):
    with pytest.raises(ValueError, match=words):
        parameters_of(XL.model, stages, stage)


LLAMA = TrainingRun("llama3-70b", 1, 4096, "bf16-master", recompute="full")
CLUSTER = Cluster(gpu("H100-80GB"), 8, 8, 50e9)


def test_replicas_take_16_bytes_a_parameter():
    found = account(LLAMA, CLUSTER, Plan(64), 512)
    assert found.memory > 16 * LLAMA.model.parameters and found.idle == 0
    assert found.seconds["tensor"] == found.seconds["pipeline"] == found.seconds["bubble"] == 0
    assert found.seconds["compute"] == pytest.approx(step_flops(LLAMA, 512) / 64 / 989e12)
    assert found.total == pytest.approx(sum(found.seconds.values()))


@pytest.mark.parametrize("micro_batch", [1, 4, 8])
@pytest.mark.parametrize("stage", range(4))
def test_a_plans_messages_are_those_of_step_time(stage: int, micro_batch: int):
    """For the same run in 16 bits; with tensor parallelism each rank has its part of every matrix."""
    run = LLAMA.replace(micro_batch=micro_batch, precision="bf16")
    same = run.replace(world_size=64, zero_stage=stage, global_batch=512)
    found = account(run, CLUSTER, Plan(64, stage=stage), 512)
    assert found.seconds["data"] == pytest.approx(communicated(same) / CLUSTER.network, rel=1e-6)
    ranks16 = run.replace(world_size=16, zero_stage=stage, global_batch=512)
    cut = account(run, CLUSTER, Plan(16, tensor=4, stage=stage), 512)
    assert cut.seconds["data"] == pytest.approx(communicated(ranks16) / 4 / CLUSTER.network, rel=1e-6)


def test_what_cannot_hide_is_waited_for():
    for one in plans(LLAMA, CLUSTER, 512):
        s = one.seconds
        assert s["compute"] + s["bubble"] + s["tensor"] <= one.overlapped <= one.total
        assert s["data"] + s["pipeline"] <= one.overlapped
    slow = Cluster(CLUSTER.gpu, 8, 8, 1e9)
    found = account(LLAMA, slow, Plan(64, stage=3), 512)
    assert found.overlapped == pytest.approx(found.seconds["data"])
    assert found.overlapped > found.seconds["compute"]


def test_tensor_parallelism_talks_within_a_node_and_pipelines_between():
    found = account(LLAMA, CLUSTER, Plan(1, tensor=8, pipeline=8), 512)
    h, L, t = LLAMA.model.hidden, LLAMA.model.layers, 8
    stream = 2 * 4096 * h
    assert found.seconds["tensor"] == pytest.approx(
        512 * L / 8 * 6 * 2 * (t - 1) / t * stream / 450e9, rel=1e-6
    )
    assert found.seconds["pipeline"] == pytest.approx(2 * 512 * stream / t / 50e9, rel=1e-6)
    assert found.idle == bubble(8, 512)
    alone = account(LLAMA, Cluster(gpu("H100-80GB"), 1, 8, 50e9), Plan(2, pipeline=4), 512)
    assert alone.seconds["pipeline"] == pytest.approx(2 * 256 * stream / 450e9, rel=1e-6)


def test_the_cheapest_plan_fits_and_no_other_that_fits_is_quicker():
    best = cheapest(LLAMA, CLUSTER, 512, lambda plan: True)
    assert best is not None and best.memory <= CLUSTER.gpu.room
    fitting = [one for one in plans(LLAMA, CLUSTER, 512) if one.memory <= CLUSTER.gpu.room]
    assert len(fitting) > 20 and min(one.total for one in fitting) == pytest.approx(best.total, abs=1e-6)
    assert cheapest(LLAMA, Cluster(gpu("T4-16GB"), 1, 2, 1e9), 512, lambda plan: True) is None
    assert str(best.plan) == "data 8 × pipeline 8, ZeRO-1" and str(Plan(1)) == "one GPU"


@pytest.mark.parametrize(
    "plan",
    [Plan(8), Plan(4, 16), Plan(2, 1, 32), Plan(64), Plan(8, 1, 8, stage=3), Plan(1, 8, 8, stage=1)],
    ids=str,
)
def test_plans_that_cannot_be(plan):
    with pytest.raises(ValueError, match=f"{plan} does not divide"):
        account(LLAMA, CLUSTER, plan, 100 if plan == Plan(64) else 512)


def test_the_flops_are_those_of_the_formulas_for_a_gpt():
    run = TrainingRun("gpt3-175b", 1, 2048, "bf16-master")
    assert step_flops(run, 1) == pytest.approx(korthikanti_model_flops(run), rel=0.01)
    assert step_flops(run.replace(recompute="full"), 3) == pytest.approx(4 * step_flops(run, 1))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_picture_has_every_work_and_says_what_it_shows(schedule):
    pipeline = simulate(schedule, 4, 8)
    figure = pipeline_figure(pipeline)
    assert figure.svg.count("data-work=") == len(pipeline.works)
    assert f"{100 * pipeline.idle:.0f} %" in figure.alt and "from the first stage to the last: " in figure.alt
    assert ("4 versions" in figure.alt) == (schedule == "PipeDream")


def test_the_player_follows_its_sliders():
    player = pipeline_player("GPipe", 4, 8)
    assert repr(player).startswith("A pipeline to drive") and "27.3 %" in player.message
    player.controls["schedule"].value = "1F1B"
    player.controls["stages"].value = 2
    assert player.pipeline.stages == 2 and player.pipeline.schedule == "1F1B"
    assert player.figure is not None and player.figure.alt.startswith("1F1B: stages wait 11 %")
    player.controls["schedule"].value = "naive"
    assert "1 − 1/p = 50.0 %" in player.message
    player.controls["backward"].value = 1
    assert math.isclose(player.pipeline.span, 2 * 2 * 8)
    assert player._repr_mimebundle_()["text/plain"] == repr(player)


@pytest.mark.parametrize("t", [2, 8])
def test_tensor_parallelisms_messages_are_those_of_the_cheat_sheet(t: int):
    """Each rank sends 16·s·b·h·(t − 1)/t bytes per block: four all-reduces of s·b·h 16-bit numbers."""
    run = LLAMA.replace(recompute="none", micro_batch=2)
    found = account(run, CLUSTER, Plan(64 // t, tensor=t), 512)
    s, b, h, blocks = run.seq_len, run.micro_batch, run.model.hidden, run.model.layers
    micro_batches = 512 // (64 // t * b)
    per_block = 16 * s * b * h * (t - 1) / t
    assert found.seconds["tensor"] * 450e9 == pytest.approx(micro_batches * blocks * per_block, rel=1e-6)
