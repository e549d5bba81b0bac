"""The evidence draws what it should, hides nothing, tells right from wrong; a sample of runs is right."""

import contextlib
import dataclasses
import json
from functools import partial

import drawn_runs
import pytest
from engine import shallow, simulate, tiny
from speeds import CASES, explorer_table

from course_utils.cli.main import COMMANDS, main
from course_utils.estimating import estimate
from course_utils.estimating.published import FORMULAS
from course_utils.evidence import accuracy, command, frozen_runs, gpu, published_tables
from course_utils.evidence.tables import BIAS_HEADINGS, Table, bias_of
from course_utils.measurement import Measurement
from course_utils.models import TransformerConfig
from course_utils.run import ATTENTIONS, OPTIMIZERS, OVERRIDES, PRECISIONS, RECOMPUTES, TrainingRun

STRIDE = 15
"""Of the frozen runs that one GPU can run every fifteenth is compared, about twenty."""

SMALL = TrainingRun(tiny("gpt2"), 2, 64)


# Drawing


def test_a_seed_gives_the_same_run_again_and_every_choice_of_a_run_and_of_a_model_is_drawn():
    runs = [drawn_runs.random_run(seed) for seed in range(1000)]
    assert runs[:40] == [drawn_runs.random_run(seed) for seed in range(40)] and len({*runs[:200]}) == 200
    for field in dataclasses.fields(TrainingRun):
        assert len({getattr(run, field.name) for run in runs}) > 1, f"{field.name} is the same in every run"
    assert {run.precision.name for run in runs} == set(PRECISIONS)
    assert {run.optimizer.name for run in runs} == set(OPTIMIZERS)
    assert {run.attention for run in runs} == set(ATTENTIONS)
    assert {run.recompute for run in runs} >= {*RECOMPUTES, "every-2", "every-3"}
    options = ("family", "positions", "norm", "mlp", "bias", "qkv_bias", "tied", "experts", "kv_heads")
    for option in (*options, *OVERRIDES):
        assert len({getattr(run.model, option) for run in runs}) > 1, f"{option} is the same in every model"


def test_freezing_writes_what_is_read_back(tmp_path, monkeypatch):
    for module in (frozen_runs, drawn_runs):
        monkeypatch.setattr(module, "FROZEN", tmp_path / "runs.json")
    drawn_runs.freeze(first_seed=7, count=5)
    kept = json.loads((tmp_path / "runs.json").read_text(encoding="utf-8"))["runs"]
    drawn = [drawn_runs.random_run(seed) for seed in range(7, 12)]
    assert [frozen_runs.run_of(choices) for choices in kept] == drawn


def test_a_model_with_fewer_blocks_says_so_in_its_name_and_is_rebuilt_from_its_code():
    changed = frozen_runs.changed
    assert changed("gpt2", layers=2).name == "gpt2, 2 blocks"
    assert changed("gpt2", layers=1).name == "gpt2, 1 block"
    assert changed("llama3.2-1b", layers=3, tied=False).name == "llama3.2-1b, 3 blocks, tied=False"
    assert changed("gpt2", layers=frozen_runs.PRESETS["gpt2"].layers) == frozen_runs.PRESETS["gpt2"]
    run = TrainingRun(changed("gpt2", layers=2), 4, 512)
    assert str(run).startswith("gpt2, 2 blocks · ")
    assert rebuilt(run) == run


def rebuilt(run: TrainingRun) -> TrainingRun:
    return eval(run.code(), {"TrainingRun": TrainingRun, "TransformerConfig": TransformerConfig})


def test_at_least_300_runs_are_frozen_as_the_list_says_named_after_what_they_are():
    kept = json.loads(frozen_runs.FROZEN.read_text(encoding="utf-8"))["runs"]
    runs = frozen_runs.frozen_runs()
    assert len(set(runs)) == len(runs) >= 300
    for choices, run in zip(kept, runs, strict=True):
        assert rebuilt(run) == run
        plain = dataclasses.replace(frozen_runs.PRESETS[choices["preset"]], **choices.get("changes", {}))
        assert as_chosen(run.model, plain) == dataclasses.replace(plain, name=run.model.name)
        preset = frozen_runs.PRESETS.get(run.model.name)
        assert preset is None or as_chosen(run.model, preset) == preset, run.model.name


def as_chosen(model: TransformerConfig, other: TransformerConfig) -> TransformerConfig:
    """`model` with what a run may override taken from `other`."""
    return dataclasses.replace(model, **{name: getattr(other, name) for name in OVERRIDES})


def test_nothing_but_names_depends_on_what_a_model_is_called():
    run = TrainingRun(frozen_runs.changed("gpt2", layers=2), 4, 512)
    renamed = run.replace(model=dataclasses.replace(run.model, name="another"))
    assert dict(estimate(run)) == dict(estimate(renamed))


# Comparing


def measurable(run: TrainingRun) -> bool:
    """Whether a simulated GPU can run it: fp8 and tensor parallelism have closed forms only.

    Ranks have their own tests.
    """
    return run.world_size == run.tensor_parallel == 1 and run.precision.name != "fp8"


MEASURABLE = [number for number, run in enumerate(frozen_runs.frozen_runs()) if measurable(run)]


@pytest.mark.parametrize("number", MEASURABLE[::STRIDE])
def test_a_sample_of_the_frozen_runs_is_right(number):
    found = accuracy.outcome(number, frozen_runs.frozen_runs()[number])
    assert found.compared, found.refused or found.failed
    off = f"{found.percent:+.3f} %, activations {found.activations:+,}, {found.kinds}"
    assert found.right, f"{found.run}: {off}"


def test_an_outcome_says_what_was_refused_and_writes_down_what_broke(monkeypatch):
    found = accuracy.outcome(0, SMALL.replace(world_size=2, zero_stage=3, optimizer="muon"))
    assert found.refused and not (found.failed or found.compared or found.right)

    def broken(run: TrainingRun, source: str) -> Measurement:
        raise KeyError("momentum")

    monkeypatch.setattr(accuracy, "measure", broken)
    found = accuracy.outcome(0, SMALL)
    assert found.failed == "measure: KeyError: 'momentum'" and not found.compared


def test_a_wrong_estimate_is_not_right_nor_are_wrong_activations_where_the_peak_is(monkeypatch):
    found = accuracy.outcome(0, SMALL)
    assert found.right and not dataclasses.replace(found, activations=512).right
    truth = accuracy.estimate
    monkeypatch.setattr(accuracy, "estimate", lambda run: truth(run.replace(optimizer="momentum")))
    found = accuracy.outcome(0, SMALL)
    assert found.compared and not found.right and found.percent < -accuracy.AT_MOST_PERCENT
    assert sum(found.kinds.values()) == found.estimated - found.simulated


def test_the_tables_count_every_run_and_equal_refusals_together():
    runs = [
        SMALL,
        SMALL.replace(precision="fp8"),
        SMALL.replace(world_size=2),
        SMALL.replace(world_size=2, seq_len=32),
    ]
    summary, worst, closed = accuracy.accuracy_tables(runs, "a test", lambda _: None)
    counted = {row[0]: row[1] for row in summary.rows}
    assert [counted[name] for name in ("runs", "compared", "refused", "failed")] == [4, 1, 3, 0]
    refused = [note for note in summary.notes if note.startswith("Not compared")]
    assert [note.split(":")[0] for note in refused] == ["Not compared, 2", "Not compared, 1"]
    assert refused[0].endswith("a small model in fp32 with eager attention")  # to its last word
    assert [row[0] for row in worst.rows] == ["none"] and "Not listed: 1 runs" in worst.notes[0]
    assert [row[:2] for row in closed.rows] == [("one rank", 1)]
    assert closed.notes[0] == "No run with several ranks was compared."
    ratio = estimate(SMALL, "formula").total / accuracy.measure(SMALL, "simulated").peak
    off = 100 * (ratio - 1)
    assert closed.rows[0][2:] == pytest.approx((abs(off), abs(off), off, 100 if off < 0 else 0, ratio, ratio))
    bias = "Bias of the peak: signed median +0.0000 %, 0 % of the rows"
    assert any(note.startswith(bias) for note in summary.notes)


def test_bias_tells_an_estimate_that_is_always_low_from_one_that_scatters():
    assert bias_of([0.9, 0.8, 0.95]) == pytest.approx((-10, 100, 0.8, 0.95))
    assert bias_of([0.9, 1.2, 1.0, 1.1]) == pytest.approx((5, 25, 0.9, 1.2)), "1.0 is not below the truth"
    assert bias_of(iter([1.0])) == (0, 0, 1, 1) and len(BIAS_HEADINGS) == 4
    assert "signed median -10.0000 %, 100 % of the rows below the truth" in str(bias_of([0.9]))
    with pytest.raises(ValueError, match="no bias of no rows"):
        bias_of([])


# Published formulas


def test_published_formulas_are_off_by_what_they_leave_out_of_what_each_counts():
    run = TrainingRun(shallow(frozen_runs.PRESETS["gpt2"], 1), 2, 128, "bf16-master", attention="eager")
    step = simulate(run)
    errors = {}
    for formula in FORMULAS:
        with contextlib.suppress(ValueError):
            errors[formula.name] = 100 * (formula.bytes(run) / accuracy.truth_of(formula.counts, step) - 1)
    assert errors.keys() < {formula.name for formula in FORMULAS} and "accelerate" not in errors
    assert abs(errors["ZeRO: states"]) < 0.1  # sixteen bytes a parameter, but for rounding up to 512
    # twenty bytes, of which sixteen are there
    assert errors["DeepSpeed ZeRO-2"] == pytest.approx(25, abs=0.1)
    assert errors["ZeRO: 12hbsL"] < -30
    assert accuracy.truth_of("activations and loss", step) > accuracy.truth_of("activations", step)
    assert accuracy.truth_of("total", step) == step.peak


# Tables and the command


TABLE = Table(
    "a_name",
    "A title",
    ("what", "bytes", "%"),
    (("a | b", 1_234_567, 0.5), ("c", 12, -1.25)),
    ("a note",),
    "x",
)


def test_the_explorers_table_times_every_case():
    table = explorer_table(True, lambda _: None)
    assert [row[0] for row in table.rows] == list(CASES)
    for row in table.rows:
        median, slowest, size, changes = (float(cell) for cell in row[1:])
        assert 0 < median <= slowest and size > 10 and changes > 0


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


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--table", "accurate"], "did you mean 'accuracy'"),
        (["--table"], "expected one argument"),
        (["--fast"], "Unknown option --fast. See `python3 -m course_utils evidence --help`."),
    ],
    ids=str,
)
def test_an_option_that_is_wrong_is_refused_in_one_line(arguments, words, capsys):
    assert main(["evidence", "--here", *arguments]) == 2
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1


def test_the_command_is_listed_and_explains_itself(capsys):
    assert list(command.TABLES) == ["accuracy", "published-gpus", *gpu.GPU_TABLES]
    assert "evidence" in COMMANDS and main(["evidence", "--help"]) == 0
    said = capsys.readouterr().out
    assert all(name in said for name in command.TABLES)


def test_all_tables_are_made_or_those_that_are_named(monkeypatch):
    made = []

    def make(name, quick=None, report=None):
        made.append((name, quick))
        return []

    monkeypatch.setattr(accuracy, "frozen_accuracy", partial(make, "accuracy"))
    monkeypatch.setattr(published_tables, "tables", partial(make, "published-gpus"))
    monkeypatch.setattr(gpu, "GPU_TABLES", {name: partial(make, name) for name in gpu.GPU_TABLES})
    assert main(["evidence", "--here", "--quick"]) == 0
    ours = [("accuracy", True), ("published-gpus", True)]
    assert made == [*ours, *((name, None) for name in gpu.GPU_TABLES)]
    made.clear()
    assert main(["evidence", "--here", "--table", "gpu", "--table", "accuracy"]) == 0
    assert made == [("gpu", None), ("accuracy", False)]
