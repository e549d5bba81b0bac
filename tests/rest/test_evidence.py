"""The evidence draws what it should, hides nothing, tells right from wrong; its page says what is counted."""

import dataclasses
import hashlib
import re
import statistics
from pathlib import Path

import pytest
from engine import tiny

from course_utils.cli.learn import training_run
from course_utils.cli.main import main, parse
from course_utils.estimating import estimate
from course_utils.evidence import accuracy, frozen_runs
from course_utils.evidence.published import FILES, HERE, answered_rows, percent
from course_utils.evidence.published_tables import ten_rows
from course_utils.evidence.tables import Table, bias_of
from course_utils.gpus import GPUS
from course_utils.interactive.course_files import ROOT
from course_utils.measurement import Measurement
from course_utils.models import TransformerConfig
from course_utils.run import TrainingRun

SMALL = TrainingRun(tiny("gpt2"), 2, 64)
PAGE = (ROOT / "docs" / "evidence.md").read_text(encoding="utf-8")


# The frozen list


def test_at_least_300_runs_are_frozen_each_rebuilt_from_its_code_and_named_after_what_it_is():
    runs = frozen_runs.frozen_runs()
    assert len(set(runs)) == len(runs) >= 300
    for run in runs:
        assert eval(run.code(), {"TrainingRun": TrainingRun, "TransformerConfig": TransformerConfig}) == run
    changed = frozen_runs.changed
    assert changed("llama3.2-1b", layers=3, tied=False).name == "llama3.2-1b, 3 blocks, tied=False"
    assert changed("gpt2", layers=frozen_runs.PRESETS["gpt2"].layers) == frozen_runs.PRESETS["gpt2"]


# Comparing


def test_an_outcome_says_what_was_refused_what_broke_and_what_is_wrong(monkeypatch):
    found = accuracy.outcome(0, SMALL.replace(world_size=2, zero_stage=3, optimizer="muon"))
    assert found.refused and not (found.failed or found.compared or found.right)
    found = accuracy.outcome(0, SMALL)
    assert found.right and not dataclasses.replace(found, estimated=found.estimated * 2).right
    truth = accuracy.estimate
    with monkeypatch.context() as patch:
        patch.setattr(accuracy, "estimate", lambda run: truth(run.replace(optimizer="momentum")))
        found = accuracy.outcome(0, SMALL)
    assert found.compared and not found.right and found.percent < -accuracy.AT_MOST_PERCENT
    assert sum(found.kinds.values()) == found.estimated - found.simulated

    def broken(run: TrainingRun, source: str) -> Measurement:
        raise KeyError("momentum")

    monkeypatch.setattr(accuracy, "measure", broken)
    found = accuracy.outcome(0, SMALL)
    assert found.failed == "measure: KeyError: 'momentum'" and not found.compared


def test_the_tables_count_every_run_and_equal_refusals_together():
    several = SMALL.replace(world_size=2, loss_chunks=2)
    runs = [SMALL, SMALL.replace(precision="fp8"), several, several.replace(seq_len=32)]
    summary, by_kind, worst = accuracy.accuracy_tables(runs, "a test", lambda _: None)
    counted = {row[0]: row[1] for row in summary.rows}
    assert [counted[name] for name in ("runs", "compared", "refused", "failed")] == [4, 1, 3, 0]
    refused = [note.split(":")[0] for note in summary.notes if note.startswith("Not compared")]
    assert refused == ["Not compared, 2", "Not compared, 1"]
    assert [row[0] for row in worst.rows] == [0] and "Not listed: 0 runs" in worst.notes[0]
    ratio = estimate(SMALL).total / accuracy.measure(SMALL, "simulated").peak
    off = 100 * (ratio - 1)
    (row,) = [row for row in by_kind.rows if row[0] == "ranks"]
    assert row[1:3] == ("one", 1)
    assert row[3:] == pytest.approx((abs(off), abs(off), off, 100 if off < 0 else 0, ratio, ratio))


def test_bias_tells_an_estimate_that_is_always_low_from_one_that_scatters():
    assert bias_of([0.9, 0.8, 0.95]) == pytest.approx((-10, 100, 0.8, 0.95))
    assert bias_of([0.9, 1.2, 1.0, 1.1]) == pytest.approx((5, 25, 0.9, 1.2)), "1.0 is not below the truth"
    with pytest.raises(ValueError, match="no bias of no rows"):
        bias_of([])


# The command


TABLE = Table(
    "a_name",
    "A title",
    ("what", "bytes", "%"),
    (("a | b", 1_234_567, 0.5), ("c", 12, -1.25)),
    ("a note",),
    "x",
)


def test_the_command_prints_and_saves_a_table_that_says_date_machine_and_source(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(accuracy, "frozen_accuracy", lambda quick, report: [TABLE])
    assert main(["evidence", "--here", "--table", "accuracy", "--out", str(tmp_path)]) == 0
    text = (tmp_path / "a_name.md").read_text(encoding="utf-8")
    assert text == TABLE.markdown() + "\n" and text in capsys.readouterr().out
    for word in ("## A title", "cores", "Python", "torch", "· x", "1,234,567", "-1.250", "a / b", "- a note"):
        assert word in text
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert len({len(line) for line in lines}) == 1 and {line.count("|") for line in lines} == {4}
    assert main(["evidence", "--here", "--table", "accurate"]) == 2
    assert "did you mean 'accuracy'" in capsys.readouterr().err


# What the page says


def test_the_page_shows_published_steps_as_their_rows_say_and_the_bounds_are_kept():
    """Wanted over certain rows: a median of 0.00 %, at most 0.5 %. A larger difference has its reason."""
    assert {path.stem for path in HERE.glob("*.jsonl")} == set(FILES)
    for line in ten_rows().page().splitlines()[2:]:
        assert line in PAGE
    rows = answered_rows()
    assert f"{len(rows)} of these steps" in PAGE and len({row.id for row in rows}) == len(rows)
    assert all(row.source and row.printed and row.gpu for row in rows)
    assert not [row.id for row in rows if abs(percent(row, row.said)) > 1 and not row.gap]
    errors = [abs(percent(row, row.said)) for row in rows if row.certain and row.counter == "allocated"]
    assert len(errors) > 60 and statistics.median(errors) < 0.005 and max(errors) < 0.5


ESTIMATE = re.compile(r"`([a-z0-9.-]+(?: --[a-z-]+ [a-z0-9-]+)+)`[^|\n]*\| ([\d.]+) GB \|")


def test_figures_of_the_page_are_what_the_course_estimates_and_fit_their_gpu_or_not():
    def peak_of(words: str) -> int:
        return estimate(training_run(parse(["estimate", *words.split()]))).total

    figure, words = re.findall(r"takes ([\d.]+) GB\s+by\s+estimate \(`([^`]+)`\)", PAGE)[0]
    assert f"{peak_of(words) / 1e9:.1f}" == figure and peak_of(words) > GPUS["A100-80GB"].memory
    cards = {"T4": "T4-16GB", "A100": "A100-80GB"}
    smallest = ""
    rows = [line for line in PAGE.splitlines() if ESTIMATE.search(line)]
    assert len(rows) == 5
    for row in rows:
        smallest = next((name for mark, name in cards.items() if mark in row), smallest)
        words, figure = ESTIMATE.findall(row)[0]
        assert f"{peak_of(words) / 1e9:.1f}" == figure and peak_of(words) < 0.9 * GPUS[smallest].memory, row


def test_what_a_gpu_counted_for_scripts_is_on_the_page_and_of_the_scripts_of_the_tree(monkeypatch):
    """A script that changes is counted again: what the card counted belongs to other bytes."""
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[1] / "gpu"))
    import peers
    import tables

    assert tables.filled(PAGE) == PAGE, "run `python tests/gpu/tables.py --write`"
    for row in tables.rows_of("scripts"):
        path = ROOT / "tests" / "scripts" / row["script"].split()[0]
        assert hashlib.sha256(path.read_bytes()).hexdigest().startswith(row["sha256"]), row["script"]
    for name in ("scripts", "limits", "turns"):
        assert all(
            tables.origin(row).startswith("recorded on NVIDIA H200, torch ") for row in tables.rows_of(name)
        )
    assert {row["script"]: row["counted"] for row in tables.rows_of("peers")} == peers.chosen()
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert tables.lines_of_readme() in readme, tables.lines_of_readme()
