"""cuBLAS's workspaces: torch's rule, and that estimate and simulation agree where a run names its card."""

from typing import Any

import pytest
import torch

from course_utils import compare, estimate, measure
from course_utils.estimating import moments
from course_utils.estimating.workspaces import (
    VARIABLE,
    Workspaces,
    asked_for,
    installed_torch,
    workspace_bytes,
    workspaces_of,
)
from course_utils.gpus import GPUS
from course_utils.measuring import tracing
from course_utils.measuring.own_step import measure_own
from course_utils.run import TrainingRun
from course_utils.units import KiB, MiB

USUAL = 8192 * KiB + 128 * KiB
TINY = TrainingRun("tiny-gpt", 1, 32)

COUNTED = {
    (2, 11): {
        (7, 0): USUAL,
        (7, 5): USUAL,
        (8, 0): USUAL,
        (8, 6): USUAL,
        (8, 9): USUAL,
        (9, 0): 32 * MiB,
        (10, 0): USUAL,
        (12, 0): USUAL,
    },
    (2, 12): {(8, 0): USUAL, (9, 0): 32 * MiB, (10, 0): 32 * MiB, (12, 0): 32 * MiB},
    (2, 13): {
        (8, 0): USUAL,
        (9, 0): 32 * MiB,
        (10, 0): 32 * MiB,
        (10, 3): 32 * MiB,
        (11, 0): USUAL,
        (12, 0): 32 * MiB,
    },
}
"""What each release's own counters said after one matrix product, when it was asked as a card of that
capability.
"""


@pytest.fixture
def told(monkeypatch):
    """Set CUBLAS_WORKSPACE_CONFIG for this test alone."""

    def tell(text: str) -> None:
        monkeypatch.setenv(VARIABLE, text)
        asked_for.cache_clear()

    yield tell
    monkeypatch.undo()
    asked_for.cache_clear()
    tracing.trace_simulated.cache_clear()


@pytest.mark.parametrize("release", COUNTED)
def test_the_rule_is_what_torch_took(release):
    for capability, size in COUNTED[release].items():
        assert workspaces_of(capability, release) == Workspaces(size, MiB if release == (2, 11) else 0), (
            capability
        )


@pytest.mark.parametrize(("release", "times"), [((2, 8), 2), ((2, 9), 1), ((2, 12), 0)])
def test_products_with_a_bias_took_a_workspace_each_until_torch_2_8_then_one_until_2_11(release, times):
    def step(model, x):
        model(x).sum().backward()

    two = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    how: Any = {
        "source": "simulated",
        "steps": 1,
        "attention": "auto",
        "workspaces": workspaces_of((8, 0), release),
    }
    measured = measure_own(step, two, None, torch.empty(4, 8), **how)
    taken = [item for item in measured.allocations if item.bytes == MiB]
    assert len(taken) == times
    assert [item.died is None for item in taken] == [release == (2, 9)] * times


def test_every_card_of_the_catalog_has_workspaces():
    for name in GPUS:
        assert workspace_bytes(TINY.replace(card=name)) >= 2 * USUAL


def test_a_run_without_a_card_has_none():
    assert workspace_bytes(TINY) == 0
    assert estimate(TINY)["workspaces"] == 0
    assert measure(TINY, "simulated").breakdown["workspaces"] == 0


@pytest.mark.parametrize(
    ("text", "size"),
    [(":4096:2:16:8", USUAL), (":16:8", 128 * KiB), (":4096:8", 32 * MiB), ("nonsense", USUAL)],
)
def test_the_variable_is_read_as_torch_reads_it(told, text, size):
    told(text)
    assert workspaces_of((8, 0)).cublas == size


@pytest.mark.parametrize("release", [(2, 11), (2, 13)])
@pytest.mark.parametrize(
    "choices",
    [
        {},
        {"recompute": "full"},
        {"recompute": "selective", "attention": "eager"},
        {"model": "tiny-llama"},
        {"precision": "bf16-master", "loss_chunks": 2},
        {"precision": "bf16", "world_size": 2, "zero_stage": 3},
    ],
)
def test_estimate_and_simulation_agree_to_the_byte(monkeypatch, release, choices):
    monkeypatch.setattr("course_utils.estimating.workspaces.installed_torch", lambda: release)
    run = TINY.replace(card="H100-80GB", **choices)
    tracing.trace_simulated.cache_clear()
    compared = compare(run, "simulated")
    assert compared.differences["workspaces"] == 0
    expected = 2 * 32 * MiB
    if release == (2, 11) and run.model.bias:
        expected += MiB * (2 if run.recompute == "full" else 1)
    assert compared.estimate["workspaces"] == expected
    tracing.trace_simulated.cache_clear()
    if run.world_size > 1:
        from course_utils.measuring import sharded

        sharded.measure_sharded.cache_clear()


def test_they_are_taken_in_the_first_step_and_stay(monkeypatch):
    monkeypatch.setattr("course_utils.estimating.workspaces.installed_torch", lambda: (2, 13))
    tracing.trace_simulated.cache_clear()
    measured = measure(TINY.replace(card="A100-40GB"), "simulated")
    tracing.trace_simulated.cache_clear()
    taken = [item for item in measured.allocations if item.kind == "workspaces"]
    assert [(item.phase, item.step, item.bytes, item.died) for item in taken][:2] == [
        ("forward", 1, USUAL, None),
        ("backward", 1, USUAL, None),
    ]
    assert {moment["workspaces"] for moment in moments(TINY.replace(card="A100-40GB")).values()} == {
        2 * USUAL
    }


def test_an_unknown_card_is_refused_with_the_nearest():
    with pytest.raises(ValueError, match="H100-80GB"):
        TINY.replace(card="H100")


def test_a_card_is_named_wherever_the_run_is():
    run = TINY.replace(card="rtx4090-24gb")
    assert run.card == "RTX4090-24GB"
    assert str(run).endswith("on RTX4090-24GB")
    assert "card='RTX4090-24GB'" in run.code()


def test_the_installed_torch_decides():
    assert installed_torch() == tuple(int(part) for part in torch.__version__.split(".")[:2])
