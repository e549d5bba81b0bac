"""Samples of what the course's figures rest on: frozen runs, steps that GPUs executed, near the limit."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from course_utils.evidence import accuracy, frozen_runs
from course_utils.evidence.published import published_rows, simulated
from course_utils.evidence.sequence import hash_of, kept_hash, sequence_hash
from course_utils.measuring import recorded
from course_utils.measuring.recorded import Recording
from course_utils.models import TransformerConfig
from course_utils.run import TrainingRun

RUNS = frozen_runs.frozen_runs()


def measurable(run: TrainingRun) -> bool:
    """Whether one simulated GPU can run it: fp8 and tensor parallelism have closed forms only."""
    return run.world_size == run.tensor_parallel == 1 and run.precision.name != "fp8"


@pytest.mark.sweep(8)
@pytest.mark.parametrize("number", [number for number, run in enumerate(RUNS) if measurable(run)])
def test_a_frozen_run_is_right(number: int) -> None:
    found = accuracy.outcome(number, RUNS[number])
    assert found.compared, found.refused or found.failed
    assert found.right, f"{found.run}: {found.percent:+.3f} %, {found.kinds}"


# A recording belongs to what the GPU executed


def recorded_steps() -> Iterator[Any]:
    """Each step that a GPU executed: the hashes kept of it, and what hashes its simulation now."""
    for item in recorded._gpu_recordings():
        code = item.task.removesuffix(" steps=2").removeprefix("history of ")
        if item.kind in ("run", "history"):
            part = item.parts["simulated" if item.kind == "run" else "history"]
            run = run_of(code if item.kind == "run" else code.rpartition(", ")[0])
            now = partial(sequence_hash, run)
            name = f"{item.device} {item.task}"
            yield pytest.param(part["sequence"], now, id=name, marks=pytest.mark.sweep(3))
        elif item.kind == "published":
            for name, said in item.parts.items():
                if name.startswith("said "):
                    now = partial(published_hash, name.removeprefix("said "), item)
                    name = f"{item.device} {name}"
                    yield pytest.param(said["sequence"], now, id=name, marks=pytest.mark.sweep(1))


def run_of(code: str) -> TrainingRun:
    return eval(code, {"TrainingRun": TrainingRun, "TransformerConfig": TransformerConfig})


def published_hash(name: str, item: Recording) -> str:
    """The hash of a published step on such a card, with the workspaces of the torch that recorded it."""
    [row] = [row for row in published_rows() if row.id == name]
    content = item.line.content
    major, minor = map(int, content["torch"].split(".")[:2])
    capability = tuple(content["device"]["capability"])
    return hash_of(simulated(replace(row, capability=capability, torch=(major, minor)))[0].allocations)


@pytest.mark.parametrize(("hashes", "now"), list(recorded_steps()))
def test_the_course_still_takes_the_step_that_was_recorded(
    hashes: dict[str, str], now: Callable[[], str]
) -> None:
    """If it does not, delete the recording's line, and record it again."""
    assert now() == kept_hash(hashes)


def test_the_replay_still_predicts_the_smallest_card_on_which_a_run_worked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One run anew: the others would take minutes."""
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[1] / "gpu"))
    import near_the_limit
    import tables

    run = near_the_limit.GPT2.replace(precision="bf16-master")
    (row,) = [row for row in tables.rows_of("limits") if row["run"] == run.code()]
    assert near_the_limit.replayed(run) == pytest.approx(row["works"], rel=0.01)
    assert near_the_limit.estimate(run).total == pytest.approx(row["closed_form"], rel=0.001)
