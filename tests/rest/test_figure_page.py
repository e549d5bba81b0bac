"""Figures on a page, in a real browser: they follow its theme and width, and read out what is pointed at."""

import io
import os
from collections.abc import Iterator
from typing import Any

import pytest
from test_plots import NONE, training

from course_utils import figures as plots
from course_utils.authoring.build import ROOT, committed_notebooks
from course_utils.figures.canvas import Canvas, Figure
from course_utils.figures.themes import DARK, READING
from course_utils.interactive.notebook_runs import read_notebook
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


def widget(tab: Any, figure: Figure) -> None:
    """The figure as a widget shows it: set into the page, which runs no script in it."""
    show(tab, "")
    tab.evaluate("html => { document.body.innerHTML = html; }", figure.inline)


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


def test_a_printed_figure_is_white(tab):
    show(tab, STACK.inline, "dark")
    tab.emulate_media(media="print")
    fills = tab.evaluate(f"{SHOWN}.map(svg => getComputedStyle(svg.querySelector('rect')).fill)")
    assert fills == ["rgb(255, 255, 255)"]
    tab.emulate_media(media="screen")


@pytest.mark.parametrize(
    ("width", "layout"), [(880, "wide"), (730, "wide"), (500, "narrow"), (390, "narrow")]
)
@pytest.mark.parametrize("figure", [STACK, STEPS], ids=["stack", "timeline"])
def test_the_layout_that_fits_is_shown_with_letters_of_11_pixels_or_so(tab, figure, width, layout):
    show(tab, figure.html, width=width)
    assert tab.locator("img").count() == 0, "the script has put the picture in the place of the image"
    classes = tab.evaluate(f"{SHOWN}.map(svg => svg.getAttribute('class'))")
    assert classes == [f"course-figure course-{layout}"]
    assert tab.evaluate("document.documentElement.scrollWidth") <= width, "nothing is cut off"
    sizes = "[...svg.querySelectorAll('text')].map(text => parseFloat(getComputedStyle(text).fontSize))"
    scale = "svg.getBoundingClientRect().width / svg.viewBox.baseVal.width"
    smallest = tab.evaluate(f"(() => {{ const [svg] = {SHOWN}; return Math.min(...{sizes}) * {scale}; }})()")
    assert smallest >= (11 if width > 400 else 10.5)


def test_every_stored_figure_has_a_layout_for_a_phone():
    outputs: list[str] = []
    for path in committed_notebooks(ROOT):
        code = [cell for cell in read_notebook(path).cells if cell.cell_type == "code"]
        data = [output["data"] for cell in code for output in cell.outputs if "data" in output]
        outputs += ["".join(content.get("text/html", "")) for content in data]
    figures = [html for html in outputs if html.startswith("<img") and 'class="course-figure"' in html]
    assert len(figures) > 80
    assert [html[:100] for html in figures if '<script type="image/svg+xml">' not in html] == []


def test_a_figure_with_one_layout_scrolls_instead_of_shrinking(tab):
    canvas = Canvas()
    canvas.text(16, 40, "one layout", 11)
    show(tab, Figure(canvas.svg(60, "One", "One layout"), "One layout").html, width=390)
    assert tab.evaluate("document.querySelector('.course-picture').scrollWidth") >= 860
    assert tab.evaluate("document.documentElement.scrollWidth") <= 390


@pytest.mark.parametrize("place", ["output", "widget"])
def test_pointer_and_keys_read_out_a_timelines_moments(tab, place):

    def show_steps() -> None:
        if place == "output":
            show(tab, STEPS.html)
        else:
            widget(tab, STEPS)

    show_steps()
    picture = tab.locator(".course-picture")
    picture.hover(position={"x": 400, "y": 200})
    picture.hover(position={"x": 402, "y": 200})
    assert "GB = parameters 1.68 GB + optimizer states 3.36 GB" in said(tab)
    show_steps()
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


def test_one_figures_script_reads_out_every_other(tab):
    """As in a notebook that `build` made, where only the first figure has it."""
    show(tab, f"<div>{STEPS.html}</div><div id='second'>{STACK.html.replace(READING, '')}</div>")
    assert tab.locator("#second .course-picture").count() == 1
    tab.locator("#second svg.course-wide rect[data-kind=activations]").first.hover()
    assert tab.locator("#second .course-said").text_content() == "none · activations: 109.000 GB"
    names = tab.evaluate(f"{SHOWN}.map(svg => svg.getAttribute('aria-label'))")
    assert names == [STEPS.alt, STACK.alt]


def test_the_script_of_one_figure_leaves_other_images_alone(tab):
    """They may be of a notebook that nobody trusts."""
    image = STACK.html.partition(">")[0] + ">"
    show(tab, f"<div id='untrusted'>{image}</div><div>{STEPS.html}</div>")
    assert tab.locator("#untrusted img").count() == 1 and tab.locator(".course-picture").count() == 1
