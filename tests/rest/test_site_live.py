"""Do the website's pages answer: guesses, quizzes, sliders, the first page's explorer, formulas, cards?"""

import ast
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import nbformat
import pytest
from browser import browser_page, violations
from explorer_page import need_pyodide, served
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from needs import need
from playwright.sync_api import Browser, Page

from course_utils import TrainingRun, estimate
from course_utils.authoring import site
from course_utils.interactive import explorer_page
from course_utils.interactive.explorer import DEFAULTS
from course_utils.interactive.guesses import FOLD
from course_utils.units import format_bytes

need("furo", "latex2mathml", "myst_nb", "sphinx")

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
LIGHT = 2_000_000
ADDRESS = "https://example.org/course"
LIVE = {"01", "08", "11", "17", "explorer"}
STILL = {"02", "04", "05", "06", "09", "10", "12", "14"}
"""Where a lesson has a widget: those that move on the website, and those that matplotlib or torch draw."""

ASKED = (
    "<p class='course-ask' data-guess='06.x' data-unit='GB'>Your guess, in GB: "
    "run this cell and type it in.</p>"
)
INSIDE = "<summary>Show me, or lock a guess first</summary><p>It is 8.0 GB.</p>"
ANSWER = (
    f"{FOLD}<details class='course-answer' data-guess='06.x' data-unit='GB'"
    f" data-actual='8e9'>{INSIDE}</details>"
)


def hand_made() -> Any:
    """A notebook with formulas, a guess as its build stores one, and its answer next to another output."""
    asked = {
        "text/html": ASKED,
        "text/plain": "Your guess",
        "application/vnd.jupyter.widget-view+json": {"model_id": "x"},
    }
    shown = [
        new_output("stream", name="stdout", text="it is printed: 8\n"),
        new_output("display_data", {"text/html": ANSWER, "text/plain": "It is 8.0 GB."}),
    ]
    words = (
        "# 99 · A page\n\n"
        "Inline $34 \\cdot s b h$ and\n\n"
        "$$ \\frac{5 a s}{h} + 34 $$\n\n"
        "A card of $300 or $400."
    )
    cells = [new_markdown_cell(words), new_code_cell("predict('06.x')"), new_code_cell("reveal('06.x', 8e9)")]
    for cell, outputs in zip(cells[1:], ([new_output("display_data", asked)], shown), strict=True):
        cell.outputs, cell.execution_count = outputs, 1
    return new_notebook(cells=cells)


@pytest.fixture(scope="module")
def build() -> ModuleType:
    """docs/site_build.py, which Sphinx alone imports otherwise."""
    sys.path.insert(0, str(DOCS))
    try:
        return importlib.import_module("site_build")
    finally:
        sys.path.remove(str(DOCS))


def lightened(path: Path, build: ModuleType) -> Any:
    """A lesson of whose outputs only widgets and the quiz are left: a browser takes long for all figures."""
    notebook: Any = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [one for one in cell.outputs if answers(one, build)]
    return notebook


def answers(output: Any, build: ModuleType) -> bool:
    said = output.get("data", {}).get("text/plain", "")
    return said.startswith("Quiz of lesson") or build.shows_widget(output)


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory, build: ModuleType) -> Path:
    """A site of three pages: the first, one made by hand, and a lesson with sliders and quiz."""
    need_pyodide()
    stage = tmp_path_factory.mktemp("stage")
    out = tmp_path_factory.mktemp("out") / "site"
    shutil.copytree(DOCS / "_static", stage / "docs" / "_static")
    shutil.copytree(DOCS / "_extra", stage / "docs" / "_extra")
    for name in ("conf.py", "site_build.py", "story.py"):
        shutil.copy2(DOCS / name, stage / "docs" / name)
    (stage / "notebooks").mkdir()
    nbformat.write(hand_made(), stage / "notebooks" / "99_page.ipynb")
    lesson = lightened(ROOT / "notebooks" / "08_gradient_accumulation.ipynb", build)
    nbformat.write(lesson, stage / "notebooks" / "08_gradient_accumulation.ipynb")
    tree = "```{toctree}\n../notebooks/08_gradient_accumulation\n../notebooks/99_page\n```\n"
    (stage / "docs" / "index.md").write_text(
        f"# Home\n\n<!-- scene: batch -->\n\n<!-- the explorer -->\n\n{tree}", encoding="utf-8"
    )
    command = [sys.executable, "-m", "sphinx", "-q", "-b", "html", "-c", str(stage / "docs")]
    command += [str(stage), str(out)]
    environment = os.environ | {"COURSE_ROOT": str(ROOT), "COURSE_URL": ADDRESS}
    subprocess.run(command, env=environment, check=True, capture_output=True)
    site.make_explorer(out / site.EXPLORER)
    return out


@pytest.fixture(scope="module")
def address(pages: Path) -> Iterator[str]:
    with served(pages) as root:
        yield root


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with browser_page() as page:
        assert page.context.browser
        yield page.context.browser


@pytest.fixture
def tab(browser: Browser) -> Iterator[Page]:
    """A page that remembers nothing of the others."""
    with browser.new_context(viewport={"width": 1280, "height": 900}) as context:
        context.set_default_timeout(120_000)  # against hanging alone: a busy machine is slow
        yield context.new_page()


def clean(page: Page, part: str) -> None:
    """Fail for what the accessibility checker finds in a part of the page, in the light or in the dark.

    tests/rest/test_site.py has whole pages checked, before anything is done on them.
    """
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        assert violations(page, part) == [], scheme


# Guesses


def test_a_guess_is_locked_with_the_keyboard_alone_and_opens_its_answer(tab: Page, address: str) -> None:
    tab.goto(f"{address}notebooks/99_page.html")
    said = tab.locator(".course-told")
    answer = tab.locator("details.course-answer")
    printed = tab.get_by_text("it is printed: 8")
    assert not printed.is_visible()
    tab.get_by_label("Your guess, in GB").focus()
    tab.keyboard.type("many")
    tab.keyboard.press("Enter")  # which locks nothing that is no number
    tab.get_by_text("Write your guess in GB, only the number.").wait_for()
    clean(tab, "article")
    for _ in "many":
        tab.keyboard.press("Backspace")
    tab.keyboard.type("4")
    tab.wait_for_function("document.querySelector('.course-told').textContent === ''")
    assert answer.get_attribute("open") is None
    tab.keyboard.press("Enter")
    tab.get_by_text("You said 4 GB, it is 8.0 GB: 2.0 times too little.").wait_for()
    assert printed.is_visible()
    assert said.inner_text() == "Your guess is locked. Now look below."
    clean(tab, "article")
    tab.reload()
    assert tab.get_by_text("You said 4 GB, it is 8.0 GB").is_visible()
    tab.get_by_role("button", name="Guess again").focus()
    tab.keyboard.press("Enter")
    assert not printed.is_visible()
    assert tab.evaluate("localStorage.length") == 0


def test_without_a_script_an_answer_waits_for_a_click(browser: Browser, address: str) -> None:
    plain = browser.new_context(java_script_enabled=False).new_page()
    plain.goto(f"{address}notebooks/99_page.html")
    printed = plain.get_by_text("it is printed: 8")
    assert not printed.is_visible()
    plain.locator("details.course-answer summary").click()
    assert printed.is_visible()
    assert plain.get_by_text("It is 8.0 GB.").is_visible()
    plain.goto(f"{address}docs/index.html")
    assert plain.locator(".course-hero-picture [role=img]").first.is_visible()


# Quizzes and sliders


def test_a_quiz_counts_with_the_keyboard_alone(tab: Page, address: str) -> None:
    tab.goto(f"{address}notebooks/08_gradient_accumulation.html")
    score = tab.locator(".course-score")
    assert score.inner_text() == "0 of 4 questions solved."
    for index, choices in enumerate(_questions(tab)):
        wrong, right = (next(place for place, said in choices if said is true) for true in (False, True))
        for place in (wrong, right) if index == 0 else (right,):
            tab.locator(".course-quiz summary").nth(place).focus()
            tab.keyboard.press("Enter")
    tab.wait_for_function("document.querySelector('.course-score').textContent.startsWith('All')")
    assert score.inner_text() == "All solved, 3 of 4 at the first try."
    clean(tab, ".course-quiz")


def _questions(page: Page) -> list[list[tuple[int, bool]]]:
    """For each question, each choice's place among all and whether it is right, read from its verdict."""
    verdicts = page.locator(".course-quiz details > p").all_text_contents()
    texts = page.locator(".course-quiz details").evaluate_all("""found => found.map((one) => {
            while (one.matches('details')) one = one.previousElementSibling;
            return one.textContent;
        })""")
    questions: dict[str, list[tuple[int, bool]]] = {}
    for place, (text, said) in enumerate(zip(texts, verdicts, strict=True)):
        questions.setdefault(text, []).append((place, said.startswith("Right.")))
    return list(questions.values())


def test_a_lessons_slider_moves_its_picture_with_the_keyboard_alone(tab: Page, address: str) -> None:
    asked: list[str] = []
    tab.on("request", lambda request: asked.append(request.url))
    tab.goto(f"{address}notebooks/08_gradient_accumulation.html")
    assert tab.locator(".course-live .course-still [role=img]").count() == 1
    assert not [url for url in asked if "pyodide" in url]
    tab.get_by_role("button", name="Use the controls").first.focus()
    tab.keyboard.press("Enter")
    live = tab.locator(".course-moves")
    live.get_by_role("status").get_by_text("micro_batch=4").wait_for()
    batch = live.get_by_label("micro-batch").first
    batch.focus()
    tab.keyboard.press("ArrowRight")
    live.get_by_role("status").get_by_text("micro_batch=8").wait_for()
    assert "8 micro-batches of 8 × 1,024 tokens" in (live.locator("[role=img]").text_content() or "")
    assert batch.get_attribute("aria-valuetext") == "8"
    live.get_by_label("recompute").select_option("sqrt")
    live.get_by_role("status").get_by_text("recompute='sqrt'").wait_for()
    assert [url for url in asked if not url.startswith((address, "data:"))] == []
    clean(tab, ".course-moves")


@pytest.fixture(scope="module")
def slices(build: ModuleType) -> dict[str, str]:
    """By cell with a widget, the code that the website would run."""
    paths = sorted((ROOT / "notebooks").glob("*.ipynb"))
    found: dict[str, str] = {}
    for path in paths:
        found |= build.slices(json.loads(path.read_text(encoding="utf-8")))
    return found


def number(cell: str) -> str:
    return re.split("[_-]", cell)[0]


def test_each_widget_moves_on_the_website_or_is_known_not_to(
    build: ModuleType, slices: dict[str, str]
) -> None:
    live = build.runnable(slices)
    assert {number(cell) for cell in live} == LIVE
    assert {number(cell) for cell in slices if cell not in live} == STILL
    assert all(size > 3000 for size in live.values())


MOVED = """
import sys, json
sys.path.insert(0, sys.argv[1])
import course_page, ipywidgets

def values(widget):
    if hasattr(widget, "options"):
        return 0, len(widget.options) - 1
    if hasattr(widget, "min"):
        return widget.min, widget.max
    return (True, False) if type(getattr(widget, "value", None)) is bool else ()

drawn = {}
for name, code in json.load(sys.stdin).items():
    first = len(ipywidgets.WIDGETS)
    course_page.show(code)
    own = ipywidgets.WIDGETS[first:]
    drawn[name] = [widget.value for widget in own if type(widget) is ipywidgets.HTML]
    seen = set()
    for widget in own:
        before = getattr(widget, "value", None)
        for value in values(widget):
            course_page.set_value(widget.number, json.dumps(value))
            seen.add(course_page.changes())
        if values(widget):
            widget.value = before
    for widget in own:
        if widget.pressed and widget.layout.display != "none":
            course_page.press(widget.number)
    drawn[name].append(len(seen))
print(json.dumps(drawn))
"""
"""Shows each cell's widget, gives its controls their first and last value, presses its buttons; counts how
often it looked new.
"""


def test_every_control_of_every_live_widget_moves_and_begins_as_in_a_notebook(
    build: ModuleType, slices: dict[str, str], tmp_path: Path
) -> None:
    live = {name: code for name, code in slices.items() if number(name) in LIVE}
    archive = tmp_path / "lessons.zip"
    archive.write_bytes(build.archive())
    shutil.unpack_archive(archive, tmp_path / "unpacked")
    command = [sys.executable, "-I", "-c", MOVED, str(tmp_path / "unpacked")]
    done = subprocess.run(command, input=json.dumps(live), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for name, (*texts, looks) in json.loads(done.stdout).items():
        *before, shown = ast.parse(live[name]).body
        names: dict[str, Any] = {}
        exec(compile(ast.Module(before, []), name, "exec"), names)
        assert isinstance(shown, ast.Expr)
        widget = eval(compile(ast.Expression(shown.value), name, "eval"), names)
        assert widget.picture.value in texts, name
        assert looks > 5, name


# The first page


def test_the_first_page_shows_a_picture_before_anything_is_touched_and_then_answers(
    tab: Page, address: str
) -> None:
    answers: list[Any] = []
    tab.on("response", lambda answer: answers.append(answer))
    tab.goto(f"{address}docs/index.html", wait_until="networkidle")
    arrived = sum(len(answer.body()) for answer in answers if answer.status == 200)
    assert 50_000 < arrived < LIGHT
    assert not [answer.url for answer in answers if "pyodide" in answer.url or answer.url.endswith(".zip")]
    assert tab.locator(".course-hero-picture [role=img]").first.is_visible()
    chosen = explorer_page.texts(DEFAULTS)
    assert _told(tab) == _drawn(chosen)
    tab.get_by_label("micro-batch").select_option("1")
    tab.wait_for_function("document.querySelector('.course-verdict').dataset.state === 'fits'")
    chosen["micro_batch"] = "1"
    assert _told(tab) == _drawn(chosen)
    assert (tab.locator(".course-all").get_attribute("href") or "").endswith(
        "/explorer/index.html#micro_batch=1"
    )
    clean(tab, ".course-hero")


def _told(page: Page) -> str:
    return page.locator(".course-verdict").inner_text()


def _drawn(chosen: dict[str, str]) -> str:
    drawn = json.loads(explorer_page.draw(json.dumps(chosen)))
    return f"{drawn['verdict']} {drawn['title']}."


def test_a_picture_of_the_story_answers_to_a_choice_without_a_script(browser: Browser, address: str) -> None:
    plain = browser.new_context(java_script_enabled=False).new_page()
    plain.goto(f"{address}docs/index.html")
    scene = plain.locator(".course-scene")
    for b in (4, 32):
        scene.get_by_text(str(b), exact=True).click()
        run = TrainingRun("gpt2-xl", micro_batch=b, seq_len=1024, precision="amp-bf16")
        shown = scene.locator("[role=img]:visible")
        assert shown.count() == 1
        assert format_bytes(estimate(run).total, "GB", 1) in (shown.get_attribute("aria-label") or "")
    plain.close()


# Formulas, and cards for sharing


def test_pages_have_cards_for_sharing(pages: Path) -> None:
    text = (pages / "notebooks" / "08_gradient_accumulation.html").read_text(encoding="utf-8")
    tags = dict(re.findall(r'<meta (?:property|name)="((?:og|twitter):[^"]+)" content="([^"]*)"', text))
    assert tags["og:title"] == "08 · Gradient accumulation"
    assert tags["og:description"].endswith("?")
    assert tags["og:image"] == f"{ADDRESS}/_static/cards/08.png"
    assert tags["twitter:card"] == "summary_large_image"
    card = (pages / "_static" / "cards" / "08.png").read_bytes()
    assert (int.from_bytes(card[16:20]), int.from_bytes(card[20:24])) == (1200, 630)
    assert len(card) < 100_000
