"""Lesson 19's figures and tables say what `fit` found, the grade is fair, and the cases give nothing away."""

import pytest

from course_utils import GPUS, fit
from course_utils.interactive.guesses import Guess
from course_utils.lessons.will_it_fit.detective import CAUSES, ORDER, case
from course_utils.lessons.will_it_fit.fit_figures import Graded, catalog, grade, path_table, plan_figure
from course_utils.lessons.will_it_fit.widget import against, detective
from course_utils.units import GB

PLAN = fit("gpt2-medium", "T4-16GB", global_batch=32)


def test_the_figure_has_a_dot_for_every_estimate_and_says_what_the_path_does() -> None:
    figure = plan_figure(PLAN, "It fits")
    assert figure.svg.count('rx="3.5"') == len(PLAN.tried)
    assert f'data-limit="{round(PLAN.card.room / 1.05)}"' in figure.svg
    assert all(step.what in figure.alt for step in PLAN.path)
    assert f"{sum(one.fits(PLAN.card) for one in PLAN.tried)} of them fit" in figure.alt


def test_the_table_has_the_path_and_ends_in_what_fits() -> None:
    rows = path_table(PLAN).rows[1:]
    assert [row[0].split(" · ")[1] for row in rows] == [step.what for step in PLAN.path]
    assert rows[0][-1] == "no" and rows[-1][-1] == "yes"
    assert rows[1][2].startswith("−")


def test_the_catalog_invents_nothing() -> None:
    rows = {row[0]: row for row in catalog().rows[1:]}
    assert set(rows) == set(GPUS)
    for name, card in GPUS.items():
        assert ("unknown" in rows[name][2]) == (not card.usable) == (rows[name][-1] == "–")


@pytest.mark.parametrize(
    ("guess", "expected"), [(10.05, "A"), (9.6, "B"), (11.4, "C"), (6.0, "D"), (20.0, "E"), (3.0, "E")]
)
def test_a_prediction_is_graded_by_its_error(guess: float, expected: str) -> None:
    graded = repr(Graded(10 * GB, Guess(guess, "GB", "2026-01-01"), "simulated"))
    assert graded.startswith(f"Grade {expected}: prediction − simulated = {'+' if guess > 10 else '−'}")


def test_without_a_prediction_there_is_no_grade(capsys: pytest.CaptureFixture[str]) -> None:
    grade("19.nothing", 10 * GB, "measured")
    assert "nothing to grade" in capsys.readouterr().out


def test_a_case_ends_where_memory_did_and_names_no_tensor() -> None:
    for number in range(1, len(ORDER) + 1):
        found = case(number)
        assert "out of GPU memory" in found.message
        assert not found.measured.allocations
        assert not found.measured.moments
        assert not found.measured.provenance.note
        assert found.measured.peak == max(found.measured.timeline.totals())
        assert found.evidence.alive.total == found.measured.timeline.totals()[-1]
    assert case(2).evidence.step_starts[-1] > case(2).evidence.step_starts[1]
    with pytest.raises(ValueError, match="cases 1 to 6"):
        case(len(ORDER) + 1)


def test_the_detective_answers_and_keeps_score() -> None:
    widget = detective()
    assert "run this cell" in repr(widget)
    assert "Solved: 0 of 6" in widget.message
    widget.controls["cause"].value = "fragmentation"
    assert "No." in widget.message and "% of the card" in widget.message
    widget.controls["cause"].value = ORDER[0][0]
    assert "Yes" in widget.message and widget.solved == {1}
    widget.controls["case"].value = 3
    assert widget.controls["cause"].value == "" and "Solved: 1 of 6" in widget.message
    assert widget.figure is not None and "Case 3" in widget.figure.alt


def test_every_wrong_cause_gets_a_pointer_to_the_evidence() -> None:
    for words in (against(cause, case(1)) for cause in CAUSES):
        assert words.endswith(("?", ".")) and CAUSES[ORDER[0][0]] not in words
