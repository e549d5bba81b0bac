"""cuBLAS's workspaces: torch's rule, and that estimate and simulation agree where a run names its card."""

import pytest

from course_utils import compare
from course_utils.estimating.workspaces import VARIABLE, Workspaces, asked_for, workspaces_of
from course_utils.measuring import sources
from course_utils.run import TrainingRun
from course_utils.units import KiB, MiB

USUAL = 8192 * KiB + 128 * KiB
TINY = TrainingRun("tiny-gpt", 1, 32)

COUNTED = {
    (2, 11): {(7, 5): USUAL, (8, 0): USUAL, (9, 0): 32 * MiB, (10, 0): USUAL, (12, 0): USUAL},
    (2, 12): {(8, 0): USUAL, (9, 0): 32 * MiB, (10, 0): 32 * MiB, (12, 0): 32 * MiB},
    (2, 13): {(8, 0): USUAL, (9, 0): 32 * MiB, (10, 3): 32 * MiB, (11, 0): USUAL, (12, 0): 32 * MiB},
}
"""What each release's own counters said after one matrix product, when it was asked as a card of that
capability.
"""


@pytest.fixture
def forgetting(monkeypatch):
    """Change the surroundings for this test alone: forget before and after what was read and simulated."""
    forget()
    yield monkeypatch
    monkeypatch.undo()
    forget()


def forget() -> None:
    for kept in (asked_for, sources.simulated_run, sources.simulated_rank):
        kept.cache_clear()


@pytest.mark.parametrize("release", COUNTED)
def test_the_rule_is_what_torch_took(release):
    with_a_bias = MiB if release == (2, 11) else 0
    for capability, size in COUNTED[release].items():
        assert workspaces_of(capability, release) == Workspaces(size, with_a_bias), capability


@pytest.mark.parametrize(
    ("text", "size"), [(":4096:2:16:8", USUAL), (":16:8", 128 * KiB), ("nonsense", USUAL)]
)
def test_the_variable_is_read_as_torch_reads_it(forgetting, text, size):
    forgetting.setenv(VARIABLE, text)
    assert workspaces_of((8, 0)).cublas == size


@pytest.mark.parametrize(
    ("release", "choices"),
    [((2, 11), {"recompute": "full"}), ((2, 13), {"precision": "bf16", "world_size": 2, "zero_stage": 3})],
    ids=str,
)
def test_estimate_and_simulation_agree_to_the_byte(forgetting, release, choices):
    forgetting.setattr("course_utils.estimating.workspaces.installed_torch", lambda: release)
    run = TINY.replace(card="H100-80GB", **choices)
    compared = compare(run, "simulated")
    assert compared.differences["workspaces"] == 0
    expected = 2 * 32 * MiB
    if release == (2, 11) and run.model.bias:
        expected += MiB * (2 if run.recompute == "full" else 1)
    assert compared.estimate["workspaces"] == expected
