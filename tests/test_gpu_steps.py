"""What a GPU counted for scripts, small cards and times: the page's tables, the predictions next to them."""

import hashlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

GPU = Path(__file__).resolve().parent / "gpu"


def loaded(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A program of tests/gpu as a module."""
    monkeypatch.syspath_prepend(str(GPU))
    spec = importlib.util.spec_from_file_location(name, GPU / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return loaded("tables", monkeypatch)


def test_the_page_has_the_tables_of_what_was_recorded(tables):
    page = tables.PAGE.read_text(encoding="utf-8")
    assert page == tables.filled(page), "run `python tests/gpu/tables.py --write`"


def test_a_page_without_marks_is_refused(tables):
    with pytest.raises(ValueError, match="stands 0 times"):
        tables.filled("nothing here")


def test_every_line_of_a_recording_says_on_what_it_was_counted(tables):
    for name in ("scripts", "limits", "turns"):
        for row in tables.rows_of(name):
            assert row["device"] == "NVIDIA H200" and tables.origin(row).endswith("2026-11-27")


def test_recorded_scripts_are_those_of_the_tree(tables):
    """A script that changes is counted again: what the card counted belongs to other bytes."""
    for row in tables.rows_of("scripts"):
        path = tables.ROOT / "tests" / "scripts" / row["script"].split()[0]
        assert hashlib.sha256(path.read_bytes()).hexdigest().startswith(row["sha256"]), row["script"]


def test_more_is_reserved_than_allocated_and_a_smaller_card_is_a_smaller_card(tables):
    for row in tables.rows_of("scripts"):
        for step in row["steps"]:
            assert step["allocated"] <= step["peak_allocated"] <= step["peak_reserved"]
    for row in tables.rows_of("limits"):
        assert row["allocated"] - 1 <= row["too_small"] < row["works"] <= 1.05 * row["reserved"]
        assert [row["works"], True] in row["tries"]
    for row in tables.rows_of("turns"):
        assert row["at_rest"] <= row["kept"] <= row["peak_allocated"] <= row["peak_reserved"]


def test_the_replay_names_the_smallest_card_within_one_percent(tables):
    rows = tables.rows_of("limits")
    assert len(rows) == 20
    for row in rows:
        assert row["replayed"]["works"] == pytest.approx(row["works"], rel=0.01), row["run"]


def test_this_tree_predicts_the_smallest_card_as_it_was_written_down(tables, monkeypatch):
    """One run anew: the others would take minutes."""
    programs = loaded("near_the_limit", monkeypatch)
    run = programs.GPT2.replace(precision="bf16-master")
    (row,) = [row for row in tables.rows_of("limits") if row["run"] == run.code()]
    assert programs.replayed(run) == pytest.approx(row["works"], rel=0.01)
    assert programs.estimate(run).total == pytest.approx(row["closed_form"], rel=0.001)


def test_the_rule_of_five_percent_accepts_cards_that_are_too_small(tables):
    wrong = [row for row in tables.rows_of("limits") if 1.05 * row["closed_form"] <= row["too_small"]]
    assert f"wrong for {len(wrong)} of 20 runs" in " ".join(tables.limits()) and len(wrong) > 10
