"""Lesson 15: answers and their hints; the plans for a cluster against closed forms."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from checking import Answers, JudgedAnswers
from edits import edited

from course_utils import TrainingRun, estimate, gpu
from course_utils.estimating import moments
from course_utils.estimating.step_time import communicated
from course_utils.lessons.parallelism.cluster_plans import Cluster, Plan, account, cheapest, plans, step_flops
from course_utils.lessons.parallelism.memory import blocks_of, kept_activations, stage_shapes
from course_utils.lessons.pipelines.schedules import bubble
from course_utils.model_files import model_config
from course_utils.models import parameter_shapes


# --------------------------------------------------------------------------------------------------
# 15.1: parallel_mlp
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


# --------------------------------------------------------------------------------------------------
# 15.2: ring_attention
def by_maxima(q: Any, rank: Any, keys: Any, values: Any) -> Any:
    """As flash attention does: a running maximum, sum and output; a mask of places."""
    s, d = q.shape
    most = torch.full((s, 1), -1e30, dtype=q.dtype)
    total = torch.zeros(s, 1, dtype=q.dtype)
    y = torch.zeros_like(q)
    own = rank * s + torch.arange(s)[:, None]
    for part in range(len(keys)):
        scores = q @ keys[part].T / d**0.5
        scores = scores.where(part * s + torch.arange(s) <= own, -torch.inf)
        new = torch.maximum(most, scores.amax(1, keepdim=True))
        weights = (scores - new).exp()
        total = total * (most - new).exp() + weights.sum(1, keepdim=True)
        y = y * (most - new).exp() + weights @ values[part]
        most = new
    return y / total


NO_MAXIMUM = "torch.zeros_like(most)"

RING = Answers(
    right=by_maxima,
    wrong=[
        (edited(by_maxima, "<= own", "<= own + 10**6"), "of parts after this rank's"),
        (edited(by_maxima, "range(len(keys))", "[rank]"), "own part alone"),
        (edited(by_maxima, " / d**0.5", ""), "root of the queries' width"),
        (edited(by_maxima, "torch.maximum(most, scores.amax(1, keepdim=True))", NO_MAXIMUM), "overflow"),
    ],
)


# --------------------------------------------------------------------------------------------------
# 15.3: within_capacity
def by_counting(choices: Any, experts: Any, factor: Any) -> Any:
    room = [int(factor * choices.numel() / experts)] * experts
    taken = torch.zeros_like(choices, dtype=torch.bool)
    for token, mine in enumerate(choices.tolist()):
        for place, expert in enumerate(mine):
            if room[expert] > 0:
                room[expert] -= 1
                taken[token, place] = True
    return taken


CAPACITY = Answers(
    right=by_counting,
    wrong=[
        (edited(by_counting, "choices.numel()", "len(choices)"), "counts tokens"),
        (edited(by_counting, "factor * ", ""), "no factor"),
        (edited(by_counting, "> 0", "> 1"), "one pair too few"),
        (edited(by_counting, "return taken", "return taken.int()"), "Return a mask"),
    ],
)


# --------------------------------------------------------------------------------------------------
# 15.4: choose
def over_replicas(N: Any, L: Any, sbh: Any, m: Any, gpus: Any, per_node: Any, card: Any) -> Any:
    best = None
    least = float("inf")
    for d in range(1, gpus + 1):
        for t in [t for t in range(1, per_node + 1) if per_node % t == 0]:
            p, rest = divmod(gpus, d * t)
            if rest or p == 0 or L % p or m % d:
                continue
            own = N / t / p
            states = 4 * own + 12 * own / d
            cost = (p - 1) / (m / d + p - 1) + 0.01 * (t - 1)
            if states + min(p, m // d) * L // p * 2 * sbh <= card and cost < least:
                best = (d, t, p)
                least = cost
    return best


CHOOSE = Answers(
    right=over_replicas,
    wrong=[
        (edited(over_replicas, "<= card and", "<= 1e18 and"), "First memory, then cost"),
        (edited(over_replicas, "N / t / p", "N"), "all parameters on each rank"),
        (
            edited(over_replicas, "range(1, per_node + 1) if per_node", "range(1, gpus + 1) if gpus"),
            "leaves the machine",
        ),
        (edited(over_replicas, "min(p, m // d) * ", ""), "one micro-batch's checkpoints"),
    ],
)

ANSWERS = {"15.1": PARALLEL_MLP, "15.2": RING, "15.3": CAPACITY, "15.4": CHOOSE}


class TestAnswers(JudgedAnswers):
    answers = ANSWERS


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


def test_one_stage_has_all_kept_activations() -> None:
    assert kept_activations(XL, 1, 8, 0) == pytest.approx(estimate(XL)["activations"], rel=0.01)


def test_recomputation_keeps_checkpoints_and_one_block() -> None:
    none, full = (kept_activations(XL.replace(recompute=how), 4, 8, 1) for how in ("none", "full"))
    block = none // 3 // 12
    # The checkpoint of the block that runs again is its input.
    assert full == (3 * 12 - 1) * BOUNDARY + block


@pytest.mark.parametrize("run", [XL.replace(precision="amp-bf16"), TrainingRun("llama3.2-1b", 1, 4096)])
def test_one_stage_that_recomputes_has_the_activations_of_the_estimate(run: TrainingRun) -> None:
    run = run.replace(recompute="full")
    of_a_step = max(moment["activations"] for moment in moments(run).values())
    assert kept_activations(run, 1, 1, 0) == pytest.approx(of_a_step, abs=1024)


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
    best = cheapest(LLAMA, CLUSTER, 512)
    assert best is not None and best.memory <= CLUSTER.gpu.room
    fitting = [one for one in plans(LLAMA, CLUSTER, 512) if one.memory <= CLUSTER.gpu.room]
    assert len(fitting) > 20 and min(one.total for one in fitting) == pytest.approx(best.total, abs=1e-6)
    assert cheapest(LLAMA, Cluster(gpu("T4-16GB"), 1, 2, 1e9), 512) is None
    assert str(best.plan) == "data 8 × pipeline 8, ZeRO-1" and str(Plan(1)) == "one GPU"
