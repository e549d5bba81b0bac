"""What lesson 10 runs and draws: collectives and DDP on real ranks, the fitted link, the ring's pictures."""

import copy
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from course_utils.lessons.data_parallelism import ddp_training, figures
from course_utils.lessons.data_parallelism.links import Link, fit_link
from course_utils.lessons.data_parallelism.threads import in_processes, in_threads
from course_utils.lessons.data_parallelism.widget import ring_player
from course_utils.ranks.launch import run_ranks

RANKS = 3
GRADIENTS = 6 * (512 * 512 + 512) * 4


def on_each_rank() -> dict[str, Any]:
    """A small network's steps, in one start of processes."""
    import torch
    import torch.distributed as dist

    from course_utils.lessons.data_parallelism import ddp_training

    dist.init_process_group("gloo")
    vars(ddp_training).update(LAYERS=6)
    found = ddp_training.one_rank(torch.device("cpu"))
    found["places"] = [ddp_training.where(torch.device(kind)) for kind in ("cpu", "cuda")]
    dist.destroy_process_group()
    return found


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return run_ranks(on_each_rank, RANKS)


@pytest.mark.parametrize(
    ("gpus", "source", "device", "why"),
    [
        (0, "", "cpu", "2 ranks need 2 GPUs, torch finds 0"),
        (1, "live", "cpu", "2 ranks need 2 GPUs, torch finds 1"),
        (2, "", "cuda:1", ""),
        (2, "live", "cuda:1", ""),
        (2, "simulated", "cpu", "COURSE_SOURCE is simulated"),
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


def test_ranks_say_where_they_ran(found: list[dict[str, Any]]) -> None:
    for one in found:
        cpu, gpu = one["places"]
        assert cpu == "3 processes on the CPU that ran this cell (gloo)"
        assert gpu == "3 processes each on its own GPU (NCCL)"


def test_a_traced_step_has_its_buckets_in_order_and_some_before_backward_ends(
    found: list[dict[str, Any]],
) -> None:
    step = found[0]["many"]
    ready = [bucket["ready"] for bucket in step["buckets"]]
    assert len(ready) > 1 and ready == sorted(ready)
    assert sum(bucket["size"] for bucket in step["buckets"]) == found[0]["gradients"] == GRADIENTS
    assert len(found[0]["one"]["buckets"]) == 1 and not found[0]["none"]["buckets"]
    assert all(step["forward"] < b["ready"] <= b["done"] <= step["end"] for b in step["buckets"])


def test_the_fit_is_the_weighted_least_squares_of_numpy_and_its_covariance() -> None:
    dice = random.Random(3)
    points = [(4.0**power, (2e-5 + 1e-9 * 4**power) * dice.uniform(0.7, 1.4)) for power in range(11)]
    link = fit_link([(size, [seconds]) for size, seconds in points])
    sizes, seconds = (np.array(column) for column in zip(*points, strict=True))
    expected = link.alpha + link.beta * sizes
    design = np.stack([1 / expected, sizes / expected], axis=1)  # errors relative to the line
    design *= [1.0, 1e-9]  # keeps the matrix well conditioned
    solution, residuals, *_ = np.linalg.lstsq(design, seconds / expected, rcond=None)
    covariance = np.linalg.inv(design.T @ design) * residuals[0] / (len(points) - 2)
    assert [link.alpha, link.beta] == pytest.approx(list(solution * [1.0, 1e-9]))
    assert link.alpha_variance == pytest.approx(covariance[0, 0])
    assert link.beta_variance == pytest.approx(covariance[1, 1] * 1e-18)
    assert link.covariance == pytest.approx(covariance[0, 1] * 1e-9)


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


def test_the_same_python_is_timed_in_threads_and_in_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("course_utils.lessons.data_parallelism.threads.ROUNDS", 1000)
    assert 0 < in_threads(2) < 30 and 0 < in_processes(2) < 30


RING = [
    [[1, 1, 1], [1, 1, 101], [1, 111, 101], [111, 111, 101], [111, 111, 111]],
    [[10, 10, 10], [11, 10, 10], [11, 10, 111], [11, 111, 111], [111, 111, 111]],
    [[100, 100, 100], [100, 110, 100], [111, 110, 100], [111, 110, 111], [111, 111, 111]],
]
"""The parts of three ranks after each step; rank r begins with 10^r."""


def test_a_ring_is_drawn_step_by_step() -> None:
    assert "9 of 9 parts are complete" in figures.ring_figure(RING, 4).alt
    half = figures.ring_figure(RING, 2)
    assert "adding up: 3 of 9 parts" in half.alt and half.svg.count("data-sum") == 9
    assert "rank 0 sends part 2 to rank 1" in half.alt.replace("Rank", "rank")
    assert "each with" in figures.ring_figure(RING, 0).alt


def test_the_player_follows_its_slider_and_its_button() -> None:
    player = ring_player(RING, step=2)
    assert "Step 2 of 4" in player.picture.value
    assert repr(player) == "A ring to step through: run this cell to play it."
    player.controls["step"].value = 4
    assert "9 of 9 parts" in player.picture.value
    player.play.value = 1
    assert "Step 1 of 4" in player.picture.value and "3 messages at once" in player.picture.value
    player.controls["step"].value = 0
    assert "Nothing sent yet" in player.picture.value
    with pytest.raises(ValueError, match="steps 0 to 4"):
        ring_player(RING, step=5)


def test_a_server_s_picture_tells_its_four_steps() -> None:
    figure = figures.server_figure(4)
    assert "4 messages" in figure.alt and figure.alt.count(";") == 3


def replicas(kept_back: Sequence[str], seed: int) -> tuple[float, float]:
    """The largest difference of a weight, and the mean loss on all samples, as in lesson 10."""
    torch.manual_seed(seed)
    first = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
    inputs = torch.randn(24, 16)
    classes = torch.randint(4, (24,))
    models = [copy.deepcopy(first) for _ in range(3)]
    parts = list(zip(models, inputs.tensor_split(3), classes.tensor_split(3), strict=True))
    for _ in range(30):
        for model, x, y in parts:
            model.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
        for name, _ in first.named_parameters():
            weights = [model.get_parameter(name) for model in models]
            gradients = [one.grad for one in weights if one.grad is not None]
            if name not in kept_back:
                gradients = [torch.stack(gradients).mean(0)] * len(models)
            with torch.no_grad():
                for one, gradient in zip(weights, gradients, strict=True):
                    one -= 0.2 * gradient
    vectors = torch.stack([nn.utils.parameters_to_vector(model.parameters()) for model in models])
    losses = [nn.functional.cross_entropy(model(inputs), classes).item() for model in models]
    return (vectors.amax(0) - vectors.amin(0)).max().item(), sum(losses) / 3


@pytest.mark.parametrize("seed", range(3))
def test_one_forgotten_bias_drives_replicas_apart_and_hardly_shows_in_the_loss(seed: int) -> None:
    everything = ["0.weight", "0.bias", "2.weight", "2.bias"]
    (together, right), (apart, hidden), (alone, wrong) = (
        replicas(kept, seed) for kept in ([], ["2.bias"], everything)
    )
    assert together == 0 and min(apart, alone) > 0.5
    assert right < hidden < 1.25 * right < 2 * right < wrong
    assert abs(wrong - torch.tensor(4.0).log().item()) < 0.3


def step(*buckets: tuple[float, float]) -> dict[str, Any]:
    return {
        "forward": 0.1,
        "end": 0.35,
        "buckets": [{"ready": ready, "done": done} for ready, done in buckets],
    }


def test_pictures_of_steps_and_bands_say_their_numbers() -> None:
    figure = figures.overlap_figure({"two": step((0.15, 0.25), (0.3, 0.35)), "none": step()}, "A title")
    assert "from 150 to 250, 300 to 350 ms" in figure.alt and "nothing exchanged" in figure.alt
    band = {1.0: (0.0, 2.0, 3.0), 100.0: (2.0, 4.0, 8.0)}
    figure = figures.band_figure({"model": band}, {10: 5.0}, "A title", "bytes", "µs", log_y=True)
    assert "measured is 5 at 10; model goes from 2 at 1 to 4 at 100" in figure.alt
    assert figure.svg.count("PolyCollection") == 1
    unsure = figures.band_figure(
        {"model": {1.0: (-3.0, 2.0, 7.0)}}, {10: 5.0}, "A title", "bytes", "µs", log_y=True
    )
    assert "measured is 5 at 10" in unsure.alt
