"""Lesson 14: answers and their hints; the simulator and the plans against closed forms; its figures."""

from itertools import accumulate, pairwise, product
from typing import Any

import pytest
import torch.nn.functional as F
from checking import Answers, JudgedAnswers
from edits import edited
from matplotlib.colors import to_hex
from torch.nn.functional import mse_loss

from course_utils import TrainingRun, estimate, gpu
from course_utils.breakdown import KINDS
from course_utils.estimating import moments
from course_utils.estimating.states import gradient_bytes, optimizer_state_bytes, parameter_bytes
from course_utils.estimating.step_time import communicated
from course_utils.lessons.pipelines.check_ranks import difference
from course_utils.lessons.pipelines.cluster_plans import Cluster, Plan, account, cheapest, plans, step_flops
from course_utils.lessons.pipelines.figures import COLOUR, pipeline_figure
from course_utils.lessons.pipelines.memory import blocks_of, stage_memory, stage_shapes
from course_utils.lessons.pipelines.schedules import BACKWARD, FORWARD, SCHEDULES, bubble, most_kept, simulate
from course_utils.lessons.pipelines.widget import pipeline_player
from course_utils.lessons.shared.on_ranks import outcomes
from course_utils.model_files import model_config
from course_utils.models import parameter_shapes


# --------------------------------------------------------------------------------------------------
# 14.1: cut
def trying_all(times: Any, states: Any, kept: Any, p: int, m: int, capacity: int) -> list[int] | None:
    """Goes from long first stages to short ones, the check from short to long.

    So they agree only if no two cuts of a case are equally fast.
    """
    best = None
    least = float("inf")
    for counts in product(range(len(times), 0, -1), repeat=p):
        if sum(counts) != len(times):
            continue
        spans = [slice(end - count, end) for count, end in zip(counts, accumulate(counts), strict=True)]
        full = [sum(states[span]) + min(m, p - stage) * sum(kept[span]) for stage, span in enumerate(spans)]
        slowest = max(sum(times[span]) for span in spans)
        if max(full) <= capacity and slowest < least:
            best = list(counts)
            least = slowest
    return best


def equal_layers(times: Any, states: Any, kept: Any, p: int, m: int, capacity: int) -> list[int]:
    return [len(times) // p + (stage < len(times) % p) for stage in range(p)]


CUT = Answers(
    right=trying_all,
    wrong=[
        (edited(trying_all, "min(m, p - stage)", "m"), "That is GPipe"),
        (equal_layers, "the same number of layers"),
        (lambda *given: trying_all(*given) or equal_layers(*given), "does not fit: add its states"),
    ],
)


# --------------------------------------------------------------------------------------------------
# 14.2: order
def by_counting(p: int, m: int, stage: int) -> list[str]:
    """Forward while fewer are kept than may be, else backward."""
    works = []
    forward = 0
    backward = 0
    while backward < m:
        if forward < m and forward - backward < p - stage:
            works.append(f"F{forward}")
            forward += 1
        else:
            works.append(f"B{backward}")
            backward += 1
    return works


ORDER = Answers(
    right=by_counting,
    wrong=[
        (edited(by_counting, "p - stage", "m"), "that is GPipe"),
        (edited(by_counting, "p - stage", "stage + 1"), "Too few forwards"),
        (edited(by_counting, "p - stage", "p - stage + 1"), "Too many forwards"),
    ],
)


# --------------------------------------------------------------------------------------------------
# 14.3: two_stages
def in_one_loop(layers: Any, rank: Any, data: Any, send: Any, receive: Any) -> None:
    """Rank 0 frees the numbers of what it has sent, and keeps the output itself."""
    waiting = []
    for part in data:
        if rank == 1:
            x = receive((len(part), layers[0].in_features)).requires_grad_()
            loss = mse_loss(layers(x), part, reduction="sum") / sum(one.numel() for one in data)
            loss.backward()
            send(x.grad)
            continue
        y = layers(part)
        send(y.detach().clone())
        y.untyped_storage().resize_(0)
        waiting.append(y)
        if len(waiting) == 2:
            waiting[0].backward(receive(waiting[0].shape))
            waiting.pop(0)
    for y in waiting:
        y.backward(receive(y.shape))


NOTHING: list[Any] = []  # which real ranks do not know

unweighted = edited(in_one_loop, "/ sum(one.numel() for one in data)", "/ part.numel() / len(data)")
all_first = edited(in_one_loop, "len(waiting) == 2", "len(waiting) > len(data)")
holding = edited(in_one_loop, "y.untyped_storage().resize_(0)", "pass")
only_here = edited(in_one_loop, "waiting = []", "waiting = [*NOTHING]")

TWO_STAGES = Answers(
    right=in_one_loop,
    wrong=[
        (unweighted, "also the smaller one"),
        (all_first, "Under 1F1B it goes backward sooner"),
        (holding, "Who holds y?"),
        (only_here, "raised NameError"),
    ],
)


@pytest.fixture(scope="module", autouse=True)
def tried() -> None:
    """Both that reach real ranks, by the same processes: a start takes seconds, and outcomes are kept."""
    outcomes(2, [(difference, in_one_loop), (difference, only_here)])


# --------------------------------------------------------------------------------------------------
# 14.4: parallel_mlp
def by_hooks(x: Any, up: Any, up_bias: Any, down: Any, down_bias: Any, all_reduce: Any) -> Any:
    """A hook instead of `Shared`, and a constant added instead of `Summed`."""

    def summed(tensor: Any) -> Any:
        whole = tensor.detach().clone()
        all_reduce(whole)
        return whole

    x = x.view_as(x)
    x.register_hook(summed)
    part = F.gelu(x @ up.T + up_bias) @ down.T
    return part + (summed(part) - part).detach() + down_bias


PARALLEL_MLP = Answers(
    right=by_hooks,
    wrong=[
        (edited(by_hooks, "x.register_hook(summed)", "pass"), "1 × in forward and 0 × in backward"),
        (edited(by_hooks, "@ down.T", "@ down.T + down_bias"), "the bias, too"),
        (edited(by_hooks, "tensor.detach().clone()", "tensor"), "autograd does not see that"),
    ],
)

ANSWERS = {"14.1": CUT, "14.2": ORDER, "14.3": TWO_STAGES, "14.4": PARALLEL_MLP}


class TestAnswers(JudgedAnswers):
    answers = ANSWERS


# --------------------------------------------------------------------------------------------------
# schedules
SIZES = ((1, 4), (4, 2), (4, 9))
"""Stages and micro-batches: one stage, fewer micro-batches than stages, more."""


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_does_all_works_once_each_after_what_it_needs_and_keeps_the_closed_form(
    schedule: str, size: tuple[int, int]
) -> None:
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


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_the_bubble_is_the_formula_however_long_a_backward_takes(size: tuple[int, int]) -> None:
    p, m = size
    for schedule in ("GPipe", "1F1B"):
        pipeline = simulate(schedule, p, m, backward=3.0)
        assert pipeline.idle == pytest.approx(bubble(p, m), abs=1e-12)
        assert pipeline.span == pytest.approx((m + p - 1) * (1 + 3))
    assert simulate("naive", p, m).idle == pytest.approx(1 - 1 / p)


def test_pipedream_keeps_a_version_for_each_micro_batch_in_flight_and_is_as_late() -> None:
    pipeline = simulate("PipeDream", 4, 60)
    assert [pipeline.versions(stage) for stage in range(4)] == [4, 3, 2, 1]
    assert [pipeline.late(stage) for stage in range(4)] == [3, 2, 1, 0]
    assert simulate("PipeDream", 4, 500).idle < 0.01 < pipeline.idle
    flushed = simulate("1F1B", 4, 60)
    assert {flushed.versions(stage) for stage in range(4)} == {1}
    assert {flushed.late(stage) for stage in range(4)} == {0}


# --------------------------------------------------------------------------------------------------
# memory of a stage
XL = TrainingRun("gpt2-xl", 4, 1024, "bf16-master")
BOUNDARY = 2 * 1024 * 4 * 1600
"""Bytes of a block's input."""


@pytest.mark.parametrize(("name", "stages"), [("gpt2", 1), ("gpt2", 5), ("llama3-8b", 5)])
def test_stages_share_out_every_parameter_and_a_tied_head_twice(name: str, stages: int) -> None:
    model = model_config(name)
    counted = [name for stage in range(stages) for name in stage_shapes(model, stages, stage)]
    twice = ["embedding.weight"] if model.tied and stages > 1 else []
    assert sorted(counted) == sorted([*parameter_shapes(model), *twice])
    blocks = [block for stage in range(stages) for block in blocks_of(model.layers, stages, stage)]
    assert blocks == list(range(model.layers))


def test_one_stage_has_all_states_and_all_kept_activations() -> None:
    whole = stage_memory(XL, "1F1B", 1, 8, 0)
    assert whole["parameters"] == parameter_bytes(XL)
    assert whole["gradients"] == gradient_bytes(XL)
    assert whole["optimizer_states"] == optimizer_state_bytes(XL)
    assert whole["activations"] == pytest.approx(estimate(XL)["activations"], rel=0.01)
    assert stage_memory(XL, "GPipe", 1, 8, 0)["activations"] == 8 * whole["activations"]
    assert set(whole) == set(KINDS)


def test_recomputation_keeps_checkpoints_and_one_block() -> None:
    none, full = (
        stage_memory(XL.replace(recompute=how), "1F1B", 4, 8, 1)["activations"] for how in ("none", "full")
    )
    block = none // 3 // 12
    # The checkpoint of the block that runs again is its input.
    assert full == (3 * 12 - 1) * BOUNDARY + block


def test_gpipe_that_recomputes_its_stages_keeps_boundaries_and_one_micro_batch() -> None:
    """Huang et al. 2019, section 2.3: N + L/K · N/M, boundaries of N samples, L/K layers of a micro-batch."""
    own = stage_memory(XL.replace(recompute="every-12"), "GPipe", 4, 8, 1)["activations"]
    assert own == (8 - 1) * BOUNDARY + stage_memory(XL, "GPipe", 4, 1, 1)["activations"]


@pytest.mark.parametrize("run", [XL.replace(precision="amp-bf16"), TrainingRun("llama3.2-1b", 1, 4096)])
def test_one_stage_that_recomputes_has_the_activations_of_the_estimate(run: TrainingRun) -> None:
    run = run.replace(recompute="full")
    of_a_step = max(moment["activations"] for moment in moments(run).values())
    assert stage_memory(run, "1F1B", 1, 1, 0)["activations"] == pytest.approx(of_a_step, abs=1024)


# --------------------------------------------------------------------------------------------------
# plans for a cluster
LLAMA = TrainingRun("llama3-70b", 1, 4096, "bf16-master", recompute="full")
CLUSTER = Cluster(gpu("H100-80GB"), 8, 8, 50e9)


def test_replicas_take_16_bytes_per_parameter_and_share_the_work() -> None:
    found = account(LLAMA, CLUSTER, Plan(64), 512)
    assert found.memory > 16 * LLAMA.model.parameters
    assert found.seconds["compute"] == pytest.approx(step_flops(LLAMA, 512) / 64 / 989e12)
    assert found.total == pytest.approx(found.seconds["compute"] + found.seconds["data"])


@pytest.mark.parametrize("stage", range(4))
def test_messages_of_a_plan_are_those_of_step_time(stage: int) -> None:
    """For the same run in 16 bits; with tensor parallelism each rank has its part of every matrix."""
    run = LLAMA.replace(micro_batch=4, precision="bf16")
    for ranks, tensor in ((64, 1), (16, 4)):
        same = run.replace(world_size=ranks, zero_stage=stage, global_batch=512)
        found = account(run, CLUSTER, Plan(ranks, tensor=tensor, stage=stage), 512)
        expected = communicated(same) / tensor / CLUSTER.network
        assert found.seconds["data"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("recompute", "joins"), [("none", 4), ("full", 6)])
def test_tensor_parallelism_talks_within_a_node_and_pipelines_between(recompute: str, joins: int) -> None:
    """Each block all-reduces s·b·h 16-bit numbers four times per micro-batch, six if it runs again."""
    run = LLAMA.replace(recompute=recompute)
    found = account(run, CLUSTER, Plan(1, tensor=8, pipeline=8), 512)
    stream = 2 * run.seq_len * run.model.hidden
    in_a_block = joins * 2 * (8 - 1) / 8 * stream
    blocks = run.model.layers / 8
    assert found.seconds["tensor"] == pytest.approx(512 * blocks * in_a_block / 450e9, rel=1e-6)
    assert found.seconds["pipeline"] == pytest.approx(2 * 512 * stream / 8 / 50e9, rel=1e-6)
    assert found.idle == bubble(8, 512)
    alone = account(run, Cluster(gpu("H100-80GB"), 1, 8, 50e9), Plan(2, pipeline=4), 512)
    assert alone.seconds["pipeline"] == pytest.approx(2 * 256 * stream / 450e9, rel=1e-6)


def test_the_cheapest_plan_fits_and_no_other_that_fits_is_quicker() -> None:
    best = cheapest(LLAMA, CLUSTER, 512, lambda plan: True)
    assert best is not None and best.memory <= CLUSTER.gpu.room
    fitting = [one for one in plans(LLAMA, CLUSTER, 512) if one.memory <= CLUSTER.gpu.room]
    assert len(fitting) > 20 and min(one.total for one in fitting) == pytest.approx(best.total, abs=1e-6)
    assert cheapest(LLAMA, Cluster(gpu("T4-16GB"), 1, 2, 1e9), 512, lambda plan: True) is None
    assert str(best.plan) == "data 8 × pipeline 8, ZeRO-1" and str(Plan(1)) == "one GPU"


# --------------------------------------------------------------------------------------------------
# figure and player
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_picture_has_every_work_where_it_is_and_what_each_stage_keeps(schedule: str) -> None:
    pipeline = simulate(schedule, 4, 8)
    figure: Any = pipeline_figure(pipeline)
    assert f"{100 * pipeline.idle:.0f} %" in figure.alt
    works, memory = figure.axes
    most = max(pipeline.most_kept(stage) for stage in range(4))
    for stage, row, hill in zip(range(4), works.collections, memory.patches, strict=True):
        mine = pipeline.of_stage(stage)
        boxes = [path.get_extents() for path in row.get_paths()]
        assert [(box.x0, box.x1) for box in boxes] == [(work.start, work.end) for work in mine]
        assert {(box.y0, box.y1) for box in boxes} == {(stage + 0.06, stage + 0.94)}
        fills = [to_hex(color) for color in row.get_facecolors()]
        assert fills == [COLOUR[work.kind].lower() for work in mine]
        tops, times, base = hill.get_data()
        counts = [round((base - top) / 0.88 * most, 6) for top in tops]
        assert dict(zip(times, counts, strict=False)) == dict(pipeline.kept(stage)[:-1])
        versions = f" and {pipeline.versions(stage)}" if schedule == "PipeDream" else ""
        assert memory.texts[stage].get_text() == f"at most {pipeline.most_kept(stage)}{versions}"
    assert ("4 versions" in figure.alt) == (schedule == "PipeDream")


def test_a_box_has_the_number_of_its_micro_batch() -> None:
    pipeline = simulate("GPipe", 2, 3)
    works = pipeline_figure(pipeline).axes[0]
    told = {(*text.get_position(), text.get_text()) for text in works.texts}
    assert told == {
        ((work.start + work.end) / 2, work.stage + 0.5, str(work.micro)) for work in pipeline.works
    }


def test_the_player_follows_its_sliders() -> None:
    player = pipeline_player("GPipe", 4, 8)
    assert "27.3 %" in player.message
    player.controls["schedule"].value = "1F1B"
    player.controls["stages"].value = 2
    assert player.pipeline.stages == 2 and player.pipeline.schedule == "1F1B"
    assert player.figure is not None and player.figure.alt.startswith("1F1B: stages wait 11 %")
    player.controls["backward"].value = 1
    assert player.pipeline.span == pytest.approx((8 + 2 - 1) * 2)
