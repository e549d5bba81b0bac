"""Figures on a page, in a real browser: they follow its theme and width, and read out what is pointed at."""

import io
import os
from collections.abc import Iterator
from typing import Any

import pytest
from made_up import NONE, training

from course_utils import figures as plots
from course_utils.figures.themes import DARK
from course_utils.units import GB

REQUIRED = os.environ.get("COURSE_REQUIRE_BROWSER") == "1"
STACK = plots.stack({"none": NONE, "half": {"parameters": 3 * GB}}, "Two bars", capacity=80 * GB)
STEPS = plots.timeline(training(steps=4, layers=24, operations=20), "A timeline")
SHOWN = "[...document.querySelectorAll('.course-picture svg')].filter(svg => svg.getClientRects().length)"


@pytest.fixture(scope="module")
def tab() -> Iterator[Any]:
    if not REQUIRED:
        pytest.importorskip("playwright", reason="playwright is not installed")
    import browser

    if browser.find_browser() is None and not REQUIRED:
        pytest.skip("no Chromium or Chrome found: install one to see figures as learners do")
    with browser.browser_page() as page:
        yield page


def show(tab: Any, body: str, scheme: str = "light", width: int = 820) -> None:
    tab.set_viewport_size({"width": width, "height": 900})
    tab.set_content(f"<!doctype html><body style='margin:0;color-scheme:{scheme}'>{body}</body>")


def said(tab: Any) -> str:
    return tab.locator(".course-said").first.text_content()


@pytest.mark.parametrize(("scheme", "color"), [("light", "#FFFFFF"), ("dark", DARK["#FFFFFF"])])
def test_an_image_where_no_script_runs_and_a_picture_in_a_page_follow_the_theme(tab, scheme, color):
    from PIL import Image

    image = STACK.html.partition(">")[0] + ">"
    show(tab, image, scheme)
    painted = Image.open(io.BytesIO(tab.screenshot())).convert("RGB").crop((3, 3, 4, 4)).tobytes()
    assert f"#{painted.hex().upper()}" == color
    show(tab, STACK.inline, scheme)
    fills = tab.evaluate(f"{SHOWN}.map(svg => getComputedStyle(svg.querySelector('rect')).fill)")
    assert fills == [f"rgb({', '.join(str(channel) for channel in painted)})"]


def test_pointer_and_keys_read_out_a_timelines_moments(tab):
    show(tab, STEPS.html)
    picture = tab.locator(".course-picture")
    picture.hover(position={"x": 400, "y": 200})
    picture.hover(position={"x": 402, "y": 200})
    assert "GB = parameters 1.68 GB + optimizer states 3.36 GB" in said(tab)
    show(tab, STEPS.html)
    tab.keyboard.press("Tab")
    peak = said(tab)
    assert peak.startswith("loss, event ") and "temporaries 0.70 GB" in peak, "it begins at the peak"
    tab.keyboard.press("ArrowRight")
    assert said(tab) != peak and "temporaries" not in said(tab)
    tab.keyboard.press("Home")
    assert said(tab) == "set-up, event 0: 0.00 GB"
    assert tab.locator(".course-said").get_attribute("role") == "status"


def test_pointer_and_keys_read_out_the_parts_of_a_stack(tab):
    show(tab, STACK.html)
    tab.keyboard.press("Tab")
    assert said(tab) == "none · parameters: 6.000 GB"
    tab.keyboard.press("ArrowRight")
    assert said(tab) == "none · weight copies: 3.000 GB"
    tab.keyboard.press("End")
    assert said(tab) == "half · parameters: 3.000 GB"
    tab.locator("svg.course-wide rect[data-kind=activations]").first.hover()
    assert said(tab) == "none · activations: 109.000 GB"
