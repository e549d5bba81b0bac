"""JupyterLab in a real browser, in full: sliders, cards, guesses, themes, a lesson from top to bottom."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import browser
import nbformat
import pytest

from course_utils.authoring.build import ROOT, committed_notebooks
from course_utils.figures import bars, lines
from course_utils.figures.style import WIDTH
from course_utils.interactive.explorer import complete, next_changes

PICTURE_BYTES = 200_000
"""What a key may draw. How long that takes is printed: `pytest -s`, on a machine with nothing else to do."""

LESSONS = [
    pytest.param(path, marks=() if path.stem[:2] == "04" else pytest.mark.sweep(0), id=path.stem)
    for path in committed_notebooks(ROOT, "notebooks")
]
"""All of them under --full: nbval executes each, and what a browser adds is the same in all. 04 is quick."""

WIDGETS, FIRST = "playground.ipynb", "notebooks/00_start_here.ipynb"
EXPLORER = "from course_utils.interactive.explorer_widget"
THEMES = ("Light", "Dark")
IN_SIGHT = "(at) => { const {top} = at.getBoundingClientRect(); return 0 <= top && top < innerHeight; }"
OUTPUTS = f"{browser.IN_FRONT} .jp-OutputArea"
SLIDERS = ("run_sliders", "walker", "activation_map")
CELLS = (
    (
        "from course_utils.interactive.widgets import run_sliders\n"
        "from course_utils.lessons.adam.widget import walker\n"
        "from course_utils.lessons.activations.widget import activation_map"
    ),
    "run_sliders()",
    "walker(beta2=0.99)",
    "activation_map()",
    "from course_utils.lessons import quiz\nquiz(1)",
    "from course_utils.interactive.explorer_widget import explore\nexplore()",
    (
        "from course_utils.lessons.recomputation.widget import schedule_player\nschedule_player('keep every"
        " k', 8, 2)"
    ),
    "from course_utils.interactive.guesses import predict\npredict('98.a', unit='GB', asks='stored')",
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[browser.Server]:
    """JupyterLab over a copy of the course, with a notebook of its widgets."""
    folder = tmp_path_factory.mktemp("course")
    for name in ("notebooks", "exercises", "solutions", "docs"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns(".ipynb_checkpoints"))
    with browser.jupyter_lab(folder) as running:
        write(running, WIDGETS, *map(nbformat.v4.new_code_cell, CELLS))
        yield running


def write(server: browser.Server, name: str, *cells: nbformat.NotebookNode) -> None:
    """Put a notebook of these cells into the folder that JupyterLab shows."""
    kernel = {"name": "python3", "display_name": "Python 3 (ipykernel)", "language": "python"}
    notebook = nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": kernel})
    nbformat.write(notebook, server.folder / name)


@pytest.fixture(scope="module")
def playground(server: browser.Server) -> Iterator[browser.Page]:
    """One page for all tests, on which the widgets have been run, each in a cell of its own."""
    with browser.browser_page() as page:
        browser.open_notebook(page, server, WIDGETS)
        browser.run_all(page)
        assert browser.cell_errors(page) == []
        yield page


def cell(page: browser.Page, source: str) -> browser.Locator:
    """The code cell that begins with `source`."""
    index = next(index for index, text in enumerate(CELLS) if text.startswith(source))
    return page.locator(browser.CODE_CELLS).nth(index)


@pytest.mark.parametrize("source", [*SLIDERS, EXPLORER])
def test_every_slider_moves_the_picture_by_key(playground: browser.Page, source: str) -> None:
    sliders = cell(playground, source).locator(browser.SLIDER)
    took: list[float] = []
    sliders.nth(1).wait_for()
    for slider in sliders.all():
        before = browser.picture(cell(playground, source))
        assert "course-figure" in before or "aria-label" in before
        assert len(before) < PICTURE_BYTES
        took.append(browser.redraw_milliseconds(playground, slider, "ArrowRight"))
        assert browser.picture(cell(playground, source)) != before
        browser.redraw_milliseconds(playground, slider, "ArrowLeft")
        assert becomes(cell(playground, source), before)
    print(f"from key to picture in {source}: {', '.join(f'{one:.0f} ms' for one in took)}")


@pytest.mark.parametrize("name", THEMES)
def test_outputs_are_accessible_in_both_themes(playground: browser.Page, name: str) -> None:
    """All widgets: what axe asks for of names, contrast and roles, in WCAG 2 A and AA."""
    with browser.theme(playground, name):
        assert browser.violations(playground, OUTPUTS) == []


def becomes(drawn: browser.Locator, before: str) -> bool:
    """True once the picture is what it was: the Explorer writes its words after its pictures."""
    for _ in range(3000):
        if browser.picture(drawn) == before:
            return True
        drawn.page.wait_for_timeout(20)
    return False


def test_the_explorer_is_used_by_keyboard_alone(playground: browser.Page) -> None:
    """Arrows move a slider, Tab goes to the changes in their order, Enter applies one, the focus stays."""
    page = cell(playground, EXPLORER)
    press = playground.keyboard.press
    here = "document.activeElement.innerText"
    page.get_by_role("button", name="Start over").click()
    page.get_by_role("status").filter(has_text="Does not fit an RTX5090-32GB by 100.77 GB").wait_for()
    page.locator(browser.SLIDER).first.focus()
    press("ArrowLeft")
    page.get_by_role("status").filter(has_text="micro_batch=16").wait_for()
    offered = next_changes(complete({"micro_batch": 16}))
    says = next(f"{one.words}: {one.effect}" for one in offered if one.words == "recompute: full")
    page.get_by_role("button", name=says).wait_for()  # until then the buttons are those of another choice
    for _ in range(40):
        press("Tab")
        if says in playground.evaluate(here):
            break
    assert says in playground.evaluate(here)
    press("Enter")
    page.get_by_role("status").filter(has_text="recompute='full'").wait_for()
    assert playground.evaluate("document.activeElement.tagName") == "BUTTON"
    assert browser.cell_errors(playground) == []


PICTURES = """outputs => Promise.all(outputs.flatMap(output => [...output.querySelectorAll('img')])
    .map(async image => { await image.decode(); return [image.naturalWidth, image.alt]; }))"""


def test_pictures_of_a_notebook_that_is_not_trusted_are_seen_and_described(
    server: browser.Server, playground: browser.Page
) -> None:
    """As in a fresh clone, where nothing has been run and JupyterLab shows only what cannot do harm."""
    figures = [
        bars({"AdamW": 16_000_000_000}, "Adam costs double"),
        lines({"b": ([1, 2], [3, 4])}, "Up", "x", "GB"),
    ]
    outputs = [nbformat.v4.new_output("display_data", {"text/html": figure.html}) for figure in figures]
    cells = [nbformat.v4.new_code_cell("figure", outputs=[output]) for output in outputs]
    write(server, "stored.ipynb", *cells)
    with browser.opened(playground, "stored.ipynb"):
        shown = playground.locator(f"{browser.IN_FRONT} .jp-OutputArea-output")
        shown.locator("img").nth(len(figures) - 1).wait_for()
        assert playground.locator(f"{browser.IN_FRONT} .jp-mod-trusted").count() == 0
        assert shown.evaluate_all(PICTURES) == [[WIDTH, figure.alt] for figure in figures]


@pytest.mark.parametrize("path", LESSONS)
def test_lesson_runs_in_the_browser(playground: browser.Page, path: Path) -> None:
    """From top to bottom without an error, and everybody can read its outputs."""
    with browser.opened(playground, path.relative_to(ROOT).as_posix(), own_kernel=True):
        browser.run_all(playground)
        assert browser.cell_errors(playground) == []
        with browser.theme(playground, "Dark"):
            assert browser.violations(playground, OUTPUTS) == []


BUSY = """import time
from pathlib import Path
while not Path("{}").exists():
    time.sleep(0.02)
"""
SPEEDS = (0, 60)
WAYS = [(speed, way) for speed in SPEEDS for way in ("Enter", "the button")]


def test_a_guess_typed_while_a_cell_runs_is_stored_as_it_is_shown(
    server: browser.Server, playground: browser.Page
) -> None:
    """At two speeds of typing, in milliseconds per key: Enter and clicks overtake what the field sends."""
    sources = ["from course_utils.interactive.guesses import predict, stored_guesses"]
    sources += [f"predict('97.{number}')" for number in range(len(WAYS))]
    sources += [BUSY.format(f"go{number}") for number in range(len(WAYS))]
    last = "print('stored', *(stored_guesses()[f'97.{number}'].value for number in range(4)))"
    write(server, "busy.ipynb", *map(nbformat.v4.new_code_cell, [*sources, last]))
    with browser.opened(playground, "busy.ipynb"):
        code = playground.locator(browser.CODE_CELLS)
        browser.start_cell(playground, 0)
        for number, (speed, way) in enumerate(WAYS):
            ask = code.nth(1 + number)
            busy = 1 + len(WAYS) + number
            browser.start_cell(playground, 1 + number)
            browser.start_cell(playground, busy)
            code.nth(busy).get_by_text("[*]").wait_for()
            ask.get_by_placeholder("your guess in GB").click()
            playground.keyboard.type("134.5", delay=speed)
            if way == "Enter":
                playground.keyboard.press("Enter")
            else:
                ask.get_by_role("button", name="Lock it in").click()
            (server.folder / f"go{number}").touch()
            locked = ask.get_by_role("status").filter(has_text="Your guess is locked: 134.5 GB.")
            locked.wait_for(timeout=60_000)
            assert ask.get_by_role("alert").count() == 0, (speed, way)
        browser.start_cell(playground, len(sources))
        code.last.get_by_text(f"stored{' 134.5' * len(WAYS)}").wait_for(timeout=60_000)


GUESS = """from course_utils.interactive.guesses import predict, reveal, waits_for
predict("99.a")
---
waits_for("99.a")
print("nearly the answer")
---
print("given away")
reveal("99.a", 3e9)"""


def test_show_me_opens_an_answer_and_its_neighbours_and_nothing_else(
    server: browser.Server, playground: browser.Page
) -> None:
    write(server, "guess.ipynb", *map(nbformat.v4.new_code_cell, GUESS.split("---\n")))
    with browser.opened(playground, "guess.ipynb"):
        browser.run_all(playground)
        code = playground.locator(browser.CODE_CELLS)
        first = code.filter(has_text="nearly").locator(".jp-OutputArea-output")
        second = code.filter(has_text="given away").locator(".jp-OutputArea-output")
        nearly = first.filter(has_text="nearly")
        given = second.filter(has_text="given")
        second.locator("summary").wait_for()
        assert not nearly.is_visible() and not given.is_visible()
        second.locator("summary").press("Enter")
        given.wait_for()
        assert second.get_by_text("It is 3.0 GB.").is_visible() and not nearly.is_visible()


def test_a_notebook_as_shipped_shows_no_answer_and_stays_unchanged(playground: browser.Page) -> None:
    """Opened, not yet run, not trusted: outputs that give answers away are closed, nothing is to be saved.

    A link to the glossary opens it at its term.
    """
    with browser.opened(playground, FIRST):
        code = playground.locator(browser.CODE_CELLS)
        assert not code.filter(has_text='reveal("00.scalar"').locator(".jp-OutputArea").is_visible()
        assert code.filter(has_text='predict("00.scalar"').get_by_text("Your guess, in B").is_visible()
        assert code.filter(has_text="report()").locator(".jp-OutputArea-output").count() == 0
        assert not playground.evaluate("jupyterapp.shell.currentWidget.context.model.dirty")
        playground.locator(f'{browser.IN_FRONT} .jp-RenderedMarkdown a[href$="#gb-and-gib"]').first.click()
        term = playground.locator(".jp-MarkdownViewer h2", has_text="GB and GiB")
        term.wait_for()
        playground.wait_for_function(IN_SIGHT, arg=term.element_handle())


def test_a_check_that_passes_is_a_card_that_leads_to_the_next_exercise(
    server: browser.Server, playground: browser.Page
) -> None:
    check = (
        "from course_utils.interactive.feedback import exercise\n"
        "exercise('01.1', 'Well done.')(lambda: None)()"
    )
    heading = nbformat.v4.new_markdown_cell('<span id="exercise-2"></span>\n\n## 2 · Weigh a training run')
    filler = nbformat.v4.new_markdown_cell("\n\n".join(["…"] * 60))
    write(server, "check.ipynb", nbformat.v4.new_code_cell(check), filler, heading)
    with browser.opened(playground, "check.ipynb"):
        browser.run_all(playground)
        said = playground.locator(browser.CODE_CELLS).get_by_role("status")
        card = said.filter(has_text="✓ 01.1 Well done.")
        card.get_by_role("link", name="01.2 · Weigh a training run").click()
        title = playground.get_by_role("heading", name="2 · Weigh a training run")
        playground.wait_for_function(IN_SIGHT, arg=title.element_handle())


@pytest.mark.parametrize(
    ("kind", "opening", "name"),
    [("NotSolved", "Not solved yet.", "Light"), ("CheckFailed", "Not quite.", "Dark")],
)
def test_what_a_check_says_is_a_quiet_card_and_stops_what_follows(
    server: browser.Server, playground: browser.Page, kind: str, opening: str, name: str
) -> None:
    """The cell fails as before: only the red line that says the same is not shown."""
    raises = (
        f"from course_utils.interactive.feedback import {kind}\nraise {kind}('Which copy is in `float32`?')"
    )
    sources = ["print('first')", raises, "print('next')"]
    write(server, f"{kind}.ipynb", *map(nbformat.v4.new_code_cell, sources))
    with browser.opened(playground, f"{kind}.ipynb", own_kernel=True), browser.theme(playground, name):
        browser.run_all(playground)
        first, told, following = playground.locator(browser.CODE_CELLS).all()
        assert told.get_by_role("status").inner_text() == f"{opening} Which copy is in float32?"
        red = told.locator('[data-mime-type="application/vnd.jupyter.stderr"]')
        assert red.count() == 1 and not red.is_visible()
        assert first.locator(".jp-OutputArea-output").is_visible()
        assert following.locator(".jp-OutputArea-output").count() == 0
        assert browser.violations(playground, OUTPUTS) == []


MISTAKES = {
    "from course_utils import TrainingRun, compare, estimate": "",
    'TrainingRun("gtp2")': "ValueError: unknown model 'gtp2': did you mean 'gpt2'?",
    'TrainingRun("gpt2", batch_size=8)': (
        "ValueError: unknown choice of a TrainingRun 'batch_size': did you mean 'micro_batch'?"
    ),
    'compare(TrainingRun("gpt2"), source="gpu")': "ValueError: unknown source 'gpu': did you mean 'cpu'?",
}


def test_a_learners_mistake_is_one_short_line_and_a_run_a_card(
    server: browser.Server, playground: browser.Page
) -> None:
    cells = [*MISTAKES, 'TrainingRun("gpt2-xl", micro_batch=32, recompute="full")']
    goes_on = {"tags": ["raises-exception"]}
    write(server, "mistakes.ipynb", *(nbformat.v4.new_code_cell(cell, metadata=goes_on) for cell in cells))
    with browser.opened(playground, "mistakes.ipynb"):
        browser.run_all(playground)
        card = playground.locator(browser.CODE_CELLS).last.locator(".jp-RenderedHTML")
        card.get_by_text("TrainingRun('gpt2-xl', micro_batch=32, seq_len=1024, recompute='full')").wait_for()
        assert card.locator("b").all_inner_texts() == ["gpt2-xl", "b=32", "full recomputation"]
        for text, said in zip(browser.cell_errors(playground), filter(None, MISTAKES.values()), strict=True):
            assert text.startswith(said) and len(text) < 200 and len(text.strip().splitlines()) == 1
