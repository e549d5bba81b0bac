"""The Explorer in a notebook: a press applies a change and draws once."""

from course_utils.interactive.explorer import MOST, next_changes, run_of
from course_utils.interactive.explorer_widget import Explorer, explore


def offered(page: Explorer) -> list[str]:
    """What the buttons say that can be seen."""
    return [button.description for button in page.buttons if button.layout.display != "none"]


def test_a_press_applies_a_change_and_draws_once():
    page = explore()
    change = next(change for change in next_changes({}) if change.words.startswith("micro-batch: "))
    drawn: list[object] = []
    page.picture.observe(drawn.append, names="value")
    page.buttons[page.changes.index(change)].click()
    assert page.chosen == change.chosen and len(drawn) == 1
    assert "✓ Fits an RTX5090-32GB" in page.picture.value
    assert offered(page) == [] and "It fits." in page.heading.value
    page.choose(page.begin)
    assert page.run == run_of({}) and len(offered(page)) == MOST
