"""Where no GPU can be simulated, what autograd keeps on one is answered from recordings, or refused in words."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from course_utils import SimulationUnavailable, TrainingRun
from course_utils.authoring.recordings import answers
from course_utils.interactive.saved import saved_by
from course_utils.lessons.activations.ledgers import block_ledger
from course_utils.measuring import saved_recordings, simulated
from course_utils.measuring.saved_recordings import load, spelled

SHAPE = (4, 1024, 1024)


@pytest.fixture
def windows(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A platform where no GPU can be simulated."""
    monkeypatch.setattr(simulated, "availability", lambda: (False, "simulating a GPU needs Linux or macOS"))
    saved_recordings._say_once.cache_clear()
    yield
    saved_recordings._say_once.cache_clear()


def test_what_is_shipped_is_what_the_lessons_ask_and_the_simulation_still_finds() -> None:
    shipped = {key: [(n, tuple(shape), *rest) for n, shape, *rest in rows] for key, rows in load()["found"].items()}
    assert shipped == answers()


def test_without_simulation_the_answer_is_the_same_and_says_that_it_is_recorded(
    windows: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded = saved_by(nn.LayerNorm(1024), SHAPE, dtype="bf16", device="gpu")
    assert len(saved_by(torch.mul, SHAPE, SHAPE, dtype="bf16", device="gpu")) == 2
    (line,) = capsys.readouterr().out.splitlines()
    assert "recorded on a simulated GPU · torch" in line and "not simulated here: simulating a GPU needs" in line
    monkeypatch.undo()
    assert recorded == saved_by(nn.LayerNorm(1024), SHAPE, dtype="bf16", device="gpu")
    assert capsys.readouterr().out == ""


def test_without_simulation_a_ledger_still_closes(windows: None) -> None:
    ledger = block_ledger(TrainingRun("gpt2", 2, 512, "bf16-master", attention="eager"))
    assert ledger.predicted == ledger.found > 0 and all(saved and found for saved, found in ledger.rows)


@pytest.mark.parametrize("operation", [lambda x: x / 8, nn.LayerNorm(512), nn.LayerNorm(1024).eval(), nn.SiLU()])
def test_what_is_not_recorded_is_refused_in_words(windows: None, operation: Callable[..., Any]) -> None:
    with pytest.raises(SimulationUnavailable, match=r"not recorded \(not simulated here.*device='cpu'"):
        saved_by(operation, SHAPE, dtype="bf16", device="gpu")


def test_only_operations_that_words_tell_apart_are_spelled() -> None:
    class Mine(nn.Module):
        """Its repr is the same whatever its forward does."""

    frozen = nn.Linear(2, 2).requires_grad_(False)
    assert [spelled(one) for one in (Mine(), nn.Sequential(Mine()), frozen, lambda x: x, len)] == [None] * 5
    assert spelled(partial(torch.div, other=8)) == "torch.div(other=8)" and spelled(partial(len)) is None
    assert spelled(nn.Dropout(0.1)) != spelled(nn.Dropout(0.2))


def test_a_file_of_another_schema_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    load.cache_clear()
    monkeypatch.setattr("course_utils.measuring.recording_file.SCHEMA", 99)
    with pytest.raises(ValueError, match="has schema 1; this version of the course reads 99"):
        load()
