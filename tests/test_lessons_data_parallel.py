"""What lesson 08 runs and draws: collectives and DDP on real ranks, the fitted link, the ring's pictures."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from course_utils.estimating import estimate
from course_utils.estimating.sharding import all_reduce_bytes
from course_utils.lessons.data_parallelism import ddp_training, replicas
from course_utils.lessons.data_parallelism.data_parallel_module import WatchedDataParallel, in_processes, in_threads
from course_utils.lessons.data_parallelism.figures import (
    band_figure,
    hidden_part,
    overlap_figure,
    ring_figure,
    server_figure,
)
from course_utils.lessons.data_parallelism.links import Link, fit_link
from course_utils.lessons.data_parallelism.widget import ring_player
from course_utils.ranks.launch import run_ranks
from course_utils.run import TrainingRun

RANKS = 3


def on_each_rank() -> dict[str, Any]:
    """Everything that needs ranks, in one start of processes."""
    import torch
    import torch.distributed as dist

    from course_utils.lessons.data_parallelism import collectives, ddp_training, links, replicas

    dist.init_process_group("gloo")
    uneven = torch.arange(7, dtype=torch.float64) + dist.get_rank()  # parts of 3, 2 and 2 numbers
    collectives.ring_all_reduce(uneven, collectives.Wire())
    mine = replicas.share(replicas.whole_batch(), dist.get_rank(), dist.get_world_size())
    vars(ddp_training).update(LAYERS=6, WIDTH=256, SAMPLES=16, WARM_UP=2)
    found = {
        "collectives": collectives.one_rank(),
        "uneven": uneven.tolist(),
        "where": [ddp_training.where(torch.device(kind)) for kind in ("cpu", "cuda")],
        "apart": {name: replicas.train(replicas.network(), mine, s)[:3] for name, s in replicas.SHARING.items()},
        "ddp": {"many": ddp_training.traced_step(torch.device("cpu"), 0.5)},
    }
    each, every = ddp_training.accumulated(torch.device("cpu"), with_no_sync=False)
    once, last = ddp_training.accumulated(torch.device("cpu"), with_no_sync=True)
    found["accumulated"] = [each, once, (every - last).abs().max().item() / every.abs().max().item()]
    found["beside"] = {str(none): ddp_training.beside_buckets(torch.device("cpu"), none) for none in (True, False)}
    if dist.get_rank() < 2:
        found["seconds"] = [links.there_and_back(torch.zeros(16)) for _ in range(3)]
    dist.destroy_process_group()
    return found


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return run_ranks(on_each_rank, RANKS)


@pytest.mark.parametrize(
    ("gpus", "source", "device", "why"),
    [
        (0, "", "cpu", "2 ranks need 2 GPUs, torch finds 0"),
        (1, "", "cpu", "2 ranks need 2 GPUs, torch finds 1"),
        (1, "live", "cpu", "2 ranks need 2 GPUs, torch finds 1"),
        (2, "", "cuda:1", ""),
        (2, "live", "cuda:1", ""),
        (2, "simulated", "cpu", "COURSE_SOURCE is simulated"),
        (2, "cpu", "cpu", "COURSE_SOURCE is cpu"),
    ],
)
def test_ranks_take_gpus_where_each_can_have_its_own(
    gpus: int, source: str, device: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "COURSE_SOURCE": source}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    taken: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    assert ddp_training.device_of_rank() == torch.device(device)
    assert taken == ([torch.device(device)] if device != "cpu" else [])
    assert ddp_training.why_on_cpus() == why


def test_all_ways_give_torch_s_sum_and_send_what_their_formulas_say(found: list[dict[str, Any]]) -> None:
    for rank, one in enumerate(found):
        size = one["collectives"]["size"]
        sent = {way: one["collectives"][way]["sent"] for way in ("server", "naive", "ring")}
        assert all(one["collectives"][way]["equal"] for way in sent)
        assert sent["ring"] == all_reduce_bytes(size, RANKS) == 2 * (RANKS - 1) * size // RANKS
        assert sent["naive"] == (RANKS - 1) * size
        assert sent["server"] == (size if rank else (RANKS - 1) * size)


def test_a_ring_adds_up_what_does_not_divide_evenly(found: list[dict[str, Any]]) -> None:
    assert [one["uneven"] for one in found] == [[3.0 * k + 3 for k in range(7)]] * RANKS


def test_where_the_ranks_ran_is_said(found: list[dict[str, Any]]) -> None:
    on_cpu, on_gpus = found[0]["where"]
    assert on_cpu == "3 processes on this machine's CPU (gloo)" and on_gpus == "3 processes each on its own GPU (NCCL)"


def test_replicas_stay_equal_only_if_all_gradients_are_shared(found: list[dict[str, Any]]) -> None:
    apart = found[0]["apart"]
    assert apart["all gradients"] == [0, 0, 0]
    assert 0 < apart["no gradient"][0] < apart["no gradient"][2]
    assert apart[f"all but {replicas.LEFT_OUT}"][0] > 0
    assert [one["apart"] for one in found] == [apart] * RANKS


def test_a_traced_step_has_its_buckets_in_order_and_some_before_backward_ends(found: list[dict[str, Any]]) -> None:
    step = found[0]["ddp"]["many"]
    ready = [bucket["ready"] for bucket in step["buckets"]]
    assert len(ready) > 1 and ready == sorted(ready)
    assert sum(bucket["size"] for bucket in step["buckets"]) == 6 * (256 * 256 + 256) * 4
    assert all(step["forward"] < b["ready"] <= b["done"] <= step["end"] for b in step["buckets"])
    assert 0 <= hidden_part(step) < 1
    assert all(0 < seconds < 10 for one in found[:2] for seconds in one["seconds"])  # of a message


def test_no_sync_exchanges_once_and_gives_the_same_gradient(found: list[dict[str, Any]]) -> None:
    for one in found:
        each, once, gap = one["accumulated"]
        assert each == 4 * once > 0
        assert gap < 1e-5


def test_gradients_that_accumulate_leave_the_buckets_only_if_they_are_set_to_none(found: list[dict[str, Any]]) -> None:
    weights = 6 * (256 * 256 + 256) * 4
    assert all(one["beside"] == {"True": weights, "False": 0} for one in found)


def test_the_estimate_knows_where_gradients_accumulate() -> None:
    views = TrainingRun("gpt2", 4, 1024, "amp-bf16", world_size=8, bucket_view=True, accumulation_steps=2)
    gradients = {none: estimate(views.replace(set_to_none=none))["gradients"] for none in (True, False)}
    assert gradients[False] == estimate(views.replace(accumulation_steps=1))["gradients"]
    assert gradients[True] == pytest.approx(2 * gradients[False], rel=0.01)


def test_the_mean_of_shares_is_the_gradient_of_the_batch() -> None:
    batch = replicas.whole_batch()
    shares = [replicas.gradients(replicas.network(), replicas.share(batch, rank, 4)) for rank in range(4)]
    whole = replicas.gradients(replicas.network(), batch)
    torch.testing.assert_close(sum(shares) / 4, whole, rtol=1e-4, atol=1e-7)
    with pytest.raises(ValueError, match="cannot be shared out evenly among 5"):
        replicas.share(batch, 0, 5)


def test_the_fit_is_the_weighted_least_squares_of_numpy_and_its_covariance() -> None:
    dice = random.Random(3)
    points = [(4.0**power, (2e-5 + 1e-9 * 4**power) * dice.uniform(0.7, 1.4)) for power in range(11)]
    link = fit_link([(size, [seconds]) for size, seconds in points])
    sizes, seconds = (np.array(column) for column in zip(*points, strict=True))
    expected = link.alpha + link.beta * sizes
    design = np.stack([1 / expected, sizes / expected], axis=1)  # errors relative to the line
    scale = np.array([1.0, 1e9])  # keeps the matrix well conditioned
    solution, residuals, *_ = np.linalg.lstsq(design * [1.0, 1e-9], seconds / expected, rcond=None)
    covariance = np.linalg.inv((design * [1.0, 1e-9]).T @ (design * [1.0, 1e-9])) * residuals[0] / (len(points) - 2)
    assert [link.alpha, link.beta] == pytest.approx(list(solution / scale))
    assert link.alpha_variance == pytest.approx(covariance[0, 0])
    assert link.beta_variance == pytest.approx(covariance[1, 1] * 1e-18)
    assert link.covariance == pytest.approx(covariance[0, 1] * 1e-9)


def test_the_band_holds_the_truth_about_as_often_as_it_says() -> None:
    dice, hits = random.Random(0), 0
    for _ in range(200):
        measured = [(4.0**p, [(2e-5 + 1e-9 * 4**p) * dice.gauss(1, 0.1)]) for p in range(12)]
        low, _, high = fit_link(measured).all_reduce(1e8, 64)
        hits += low <= 2 * 63 * (2e-5 + 1e-9 * 1e8 / 64) <= high
    assert 170 <= hits < 200


def test_two_sizes_tell_nothing_of_uncertainty() -> None:
    with pytest.raises(ValueError, match="three different sizes"):
        fit_link([(4, [1e-5]), (8, [1e-5]), (8, [2e-5])])


def test_a_ring_costs_its_messages_and_its_bytes_and_one_rank_nothing() -> None:
    link = Link(alpha=1e-3, beta=1e-9)
    assert link.all_reduce(8e6, 4)[1] == pytest.approx(6 * (1e-3 + 2e-3))
    assert link.all_reduce(8e6, 1) == (0, 0, 0)
    assert link.efficiency(8e6, 4, compute=0.018)[1] == pytest.approx(0.5)
    assert link.efficiency(8e6, 4, compute=0.018, hidden=0.009)[1] == pytest.approx(2 / 3)
    assert link.efficiency(8e6, 4, compute=0.018, hidden=1)[1] == 1
    link = Link(1e-4, 1e-9, alpha_variance=1e-10, beta_variance=1e-21)
    for low, expected, high in (link.message(1e5), link.all_reduce(1e7, 64), link.efficiency(1e7, 64, 0.1)):
        assert 0 <= low < expected < high


def test_data_parallel_s_own_forward_replicates_each_time_and_computes_the_same() -> None:
    torch.manual_seed(0)
    network, inputs = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), torch.randn(12, 8)
    model = WatchedDataParallel(network, devices=3)
    for _ in range(2):
        torch.testing.assert_close(model(inputs), network(inputs))
    weights = sum(weight.nbytes for weight in network.parameters())
    assert model.calls == {"scatter": 2, "replicate": 2, "parallel_apply": 2, "gather": 2}
    assert model.bytes["replicate"] == 2 * 2 * weights
    assert model.bytes["scatter"] == 2 * inputs.nbytes * 2 // 3
    assert model.bytes["gather"] == 2 * (12 * 4 * 4) * 2 // 3


def test_the_same_python_is_timed_in_threads_and_in_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("course_utils.lessons.data_parallelism.data_parallel_module.ROUNDS", 1000)
    assert 0 < in_threads(2) < 30 and 0 < in_processes(2) < 30


def recorded(ranks: int) -> list[dict[str, Any]]:
    """What a ring of `ranks` records, computed by hand: which contributions are where after each step."""
    held = [[{rank} for _ in range(ranks)] for rank in range(ranks)]
    reports: list[dict[str, Any]] = [{"parts": [], "steps": []} for _ in range(ranks)]
    for step in range(2 * ranks - 1):
        for rank in range(ranks):
            reports[rank]["parts"].append([sum(10**other for other in part) for part in held[rank]])
        if step < 2 * (ranks - 1):
            leaving = [set(held[rank][(rank - step) % ranks]) for rank in range(ranks)]
            for rank, part in enumerate(leaving):
                chunk, right = (rank - step) % ranks, (rank + 1) % ranks
                held[right][chunk] = held[right][chunk] | part if step < ranks - 1 else part
                message = {"step": step + 1, "sender": rank, "receiver": right, "chunk": chunk, "size": 8}
                reports[rank]["steps"].append(message)
    return reports


def test_what_is_recorded_on_real_ranks_is_what_follows_by_hand(found: list[dict[str, Any]]) -> None:
    real = [{name: one["collectives"][name] for name in ("parts", "steps")} for one in found]
    assert real == recorded(RANKS)


@pytest.mark.parametrize("ranks", [2, 4, 6])
def test_a_ring_s_picture_says_what_is_complete(ranks: int) -> None:
    reports = recorded(ranks)
    last = 2 * (ranks - 1)
    assert f"{ranks * ranks} of {ranks * ranks} parts are complete" in ring_figure(reports, last).alt
    half = ring_figure(reports, ranks - 1)
    assert f"adding up: {ranks} of {ranks * ranks} parts" in half.alt
    assert half.svg.count("data-sum") == ranks * ranks
    assert "each with" in ring_figure(reports, 0).alt
    with pytest.raises(ValueError, match=f"steps 0 to {last}"):
        ring_figure(reports, last + 1)


def test_the_player_follows_its_slider_and_its_button() -> None:
    player = ring_player(recorded(4), step=2)
    assert "Step 2 of 6" in player.picture.value and repr(player) == "A ring to step through: run this cell to play it."
    player.controls["step"].value = 6
    assert "16 of 16 parts" in player.picture.value
    player.play.value = 1
    assert "Step 1 of 6" in player.picture.value and "4 messages at once" in player.picture.value
    player.controls["step"].value = 0
    assert "Nothing sent yet" in player.picture.value
    with pytest.raises(ValueError, match="steps 0 to 6"):
        ring_player(recorded(4), step=7)


def test_a_server_s_picture_tells_its_four_steps() -> None:
    figure = server_figure(4)
    assert "4 messages" in figure.alt and figure.alt.count(";") == 3


STEP = {
    "forward": 0.1,
    "end": 0.35,
    "buckets": [{"size": 8, "ready": 0.15, "done": 0.25}, {"size": 8, "ready": 0.3, "done": 0.35}],
}


def test_hidden_is_what_lies_before_backward_s_end() -> None:
    assert hidden_part(STEP) == pytest.approx(0.1 / 0.15)
    one = {**STEP, "buckets": [{"size": 16, "ready": 0.3, "done": 0.35}]}
    assert hidden_part(one) == pytest.approx(0)
    late = {**STEP, "buckets": [{"size": 8, "ready": 0.2, "done": 0.35}, {"size": 8, "ready": 0.3, "done": 0.35}]}
    assert hidden_part(late) == pytest.approx(0.5)


def test_pictures_of_steps_and_bands_say_their_numbers() -> None:
    figure = overlap_figure({"two": STEP, "none": {**STEP, "buckets": []}}, "A title")
    assert "from 150 to 250, 300 to 350 ms" in figure.alt and "nothing exchanged" in figure.alt
    band = {1.0: (0.0, 2.0, 3.0), 100.0: (2.0, 4.0, 8.0)}
    figure = band_figure({"model": band}, {10: 5.0}, "A title", "bytes", "µs", log_y=True)
    assert "measured goes from 5 at 10 to 5 at 10; model goes from 2 at 1 to 4 at 100" in figure.alt
    assert figure.svg.count("PolyCollection") == 1
