"""The Explorer in a notebook: it shows the dashboard, applies changes by a press, and refuses in words."""

import re
from html import unescape

import pytest

from course_utils.interactive.explorer import CONTROLS, DEFAULTS, MOST, dashboard, next_changes, run_of
from course_utils.interactive.explorer_widget import Explorer, explore


def offered(page: Explorer) -> list[str]:
    """What the buttons say that can be seen."""
    return [button.description for button in page.buttons if button.layout.display != "none"]


def test_it_shows_the_dashboard_of_what_is_chosen():
    page = explore()
    said = dashboard({})
    assert page.chosen == DEFAULTS and page.run == said.run and page.breakdown == said.breakdown
    assert page.gpu is said.card
    assert said.verdict in page.picture.value and said.code in unescape(page.picture.value)
    for figure in (said.stack, said.timeline):
        assert figure.alt in page._repr_mimebundle_()["text/html"].replace("&#x27;", "'")
    assert page.figure is not None
    assert sum(map(int, re.findall(r'data-bytes="(\d+)"', page.figure.svg))) == said.breakdown.total
    for control in CONTROLS:
        widget = page.controls[control.name]
        assert widget.description == control.label and tuple(widget.options) == control.options
    with pytest.raises(ValueError, match="unknown control 'batch'"):
        explore(batch=1)
    with pytest.raises(ValueError, match="set world_size"):
        explore(zero_stage=1)


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
