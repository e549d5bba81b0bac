"""Lessons in a real browser: they run, each key on a slider moves the picture, a guess can be locked."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import browser
import nbformat
import pytest
from nbconvert import HTMLExporter

from course_utils.authoring.build import ROOT, committed_notebooks
from course_utils.figures import bars, lines
from course_utils.figures.canvas import WIDE
from course_utils.interactive.explorer import complete, next_changes
from course_utils.interactive.notebook_runs import read_notebook
from course_utils.lessons import quiz

ELEMENTS = 30_000
"""What the page of one notebook may have: one that takes seconds to open has several times as many."""

PICTURE_BYTES = 200_000
"""What a key may draw. How long that takes is printed: `pytest -s`, on a machine with nothing else to do."""

WIDGETS, FIRST = "playground.ipynb", "notebooks/00_start_here.ipynb"
EXPLORER = "from course_utils.interactive.explorer_widget"
THEMES = ("Light", "Dark")
OUTPUTS = f"{browser.IN_FRONT} .jp-OutputArea"
SLIDERS = ("run_sliders", "tensor_slider", "walker", "activation_map")
CELLS = (
    (
        "from course_utils.interactive.widgets import run_sliders, tensor_slider\n"
        "from course_utils.lessons.adam.widget import walker\n"
        "from course_utils.lessons.activations.widget import activation_map"
    ),
    "run_sliders()",
    "tensor_slider()",
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
        assert "<svg" in before and len(before) < PICTURE_BYTES
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


def run(code: browser.Locator) -> None:
    """As a learner does: a click into the cell, Shift and Enter."""
    code.locator(".cm-content").click()
    code.page.keyboard.press("Shift+Enter")


def test_a_quiz_is_taken_by_keyboard_and_answers_at_once(playground: browser.Page) -> None:
    """Enter and the space bar choose, the focus stays, and a screen reader announces the verdict."""
    cell_of_quiz = cell(playground, "from course_utils.lessons")
    question = quiz(1).questions[0]
    order = [choice.text for choice in question.choices]
    buttons = cell_of_quiz.locator("button.course-choice")
    said = cell_of_quiz.get_by_role("status")
    wrong = next(text for text in order if text != question.right.text)
    for text, key, words in ((wrong, "Enter", "Not quite."), (question.right.text, "Space", "Right.")):
        buttons.nth(order.index(text)).focus()
        playground.keyboard.press(key)
        said.filter(has_text=words).first.wait_for()
        assert text in playground.evaluate("document.activeElement.innerText")
    shown = [buttons.nth(order.index(text)).inner_text() for text in (wrong, question.right.text)]
    assert shown == [f"✗ {wrong}", f"✓ {question.right.text}"]
    said.filter(has_text="1 of 5 questions solved.").wait_for()
    buttons.nth(order.index(wrong)).focus()
    playground.keyboard.press("Tab")
    assert playground.evaluate("document.activeElement.innerText").endswith(order[order.index(wrong) + 1])
    assert browser.cell_errors(playground) == []


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


@pytest.fixture
def window(playground: browser.Page) -> Iterator[Callable[[int, int, bool], None]]:
    """A function that makes JupyterLab's window as wide and high, with its sidebar or without."""

    def show(width: int, height: int, sidebar: bool) -> None:
        playground.set_viewport_size({"width": width, "height": height})
        playground.evaluate("(open) => jupyterapp.shell[open ? 'expandLeft' : 'collapseLeft']()", sidebar)
        playground.wait_for_timeout(300)  # JupyterLab lays out afterwards

    yield show
    show(1280, 900, True)


SEEN = [(source, (1280, 800, sidebar)) for source in (*SLIDERS, EXPLORER) for sidebar in (True, False)]
SEEN += [(EXPLORER, (900, 800, False)), (EXPLORER, (390, 844, False))]


@pytest.mark.parametrize(("source", "size"), SEEN, ids=str)
def test_controls_and_picture_are_seen_together(
    playground: browser.Page,
    window: Callable[[int, int, bool], None],
    source: str,
    size: tuple[int, int, bool],
) -> None:
    """Without scrolling: all controls and the first picture, in a narrow window the first control alone."""
    window(*size)
    widget = cell(playground, source).locator(".course-explorable")
    widget.evaluate("(widget) => widget.scrollIntoView()")
    panel = playground.locator(f"{browser.IN_FRONT} .jp-WindowedPanel-outer").first.bounding_box()
    handles = widget.locator("select:visible, .noUi-handle:visible")
    last = handles.count() - 1 if size[0] == 1280 else 0
    for part in (handles.first, handles.nth(last), widget.locator("svg:visible").first):
        box = part.bounding_box()
        assert panel and box and panel["y"] - 6 <= box["y"], part
        assert box["y"] + box["height"] <= panel["y"] + panel["height"] + 1, box
        assert box["x"] + box["width"] <= size[0], box


def test_handles_of_sliders_say_what_they_set(playground: browser.Page) -> None:
    page = cell(playground, EXPLORER)
    page.get_by_role("button", name="Start over").click()
    handle = page.get_by_role("slider", name="micro-batch", exact=True)
    for key, value in (("", "32"), ("ArrowLeft", "16"), ("ArrowRight", "32")):
        if key:
            handle.press(key)
        moved = page.locator(f'.noUi-handle[aria-label="micro-batch"][aria-valuetext="{value}"]')
        moved.wait_for(timeout=8_000)
    for source in SLIDERS:
        names = (
            cell(playground, source)
            .locator(".noUi-handle")
            .evaluate_all("all => all.map(one => one.ariaLabel)")
        )
        assert names and all(names) and len(set(names)) == len(names)


@pytest.mark.parametrize("theme", ["Dark", "Light"])
def test_everybody_can_use_the_widgets(playground: browser.Page, theme: str) -> None:
    change = "(theme) => jupyterapp.commands.execute('apputils:change-theme', {theme})"
    try:
        playground.evaluate(change, f"JupyterLab {theme}")
        playground.wait_for_function(f"document.body.dataset.jpThemeName === 'JupyterLab {theme}'")
        assert browser.violations(playground, ".course-explorable") == []
    finally:
        playground.evaluate(change, "JupyterLab Light")


def test_a_lessons_link_opens_the_glossary_at_its_term(playground: browser.Page) -> None:
    with browser.opened(playground, FIRST):
        playground.locator(f'{browser.IN_FRONT} .jp-RenderedMarkdown a[href$="#gb-and-gib"]').first.click()
        term = playground.locator(".jp-MarkdownViewer h2", has_text="GB and GiB")
        term.wait_for()
        place = (
            "(term) => { const {top} = term.getBoundingClientRect(); return 0 < top && top < innerHeight; }"
        )
        playground.wait_for_function(place, arg=term.element_handle())


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
    outputs = [nbformat.v4.new_output("execute_result", figure._repr_mimebundle_()) for figure in figures]
    cells = [nbformat.v4.new_code_cell("figure", outputs=[output]) for output in outputs]
    write(server, "stored.ipynb", *cells)
    with browser.opened(playground, "stored.ipynb"):
        shown = playground.locator(f"{browser.IN_FRONT} .jp-OutputArea-output")
        shown.locator("img").nth(len(figures) - 1).wait_for()
        assert playground.locator(f"{browser.IN_FRONT} .jp-mod-trusted").count() == 0
        assert shown.evaluate_all(PICTURES) == [[WIDE, figure.alt] for figure in figures]


def test_the_largest_notebook_shows_all_its_cells_and_no_more_than_a_page_can_hold(
    playground: browser.Page,
) -> None:
    largest = max((ROOT / "notebooks").glob("*.ipynb"), key=lambda path: path.stat().st_size)
    with browser.opened(playground, f"notebooks/{largest.name}"):
        playground.wait_for_function(browser.DRAWN, arg=len(read_notebook(largest).cells))
        elements = playground.locator(f"{browser.IN_FRONT} .jp-Notebook *").count()
    assert 1000 < elements < ELEMENTS


@pytest.mark.sweep(0)
@pytest.mark.parametrize("path", committed_notebooks(ROOT, "notebooks"), ids=lambda path: path.stem)
def test_lesson_runs_in_the_browser(playground: browser.Page, path: Path) -> None:
    """From top to bottom without an error, as the first lesson does below."""
    with browser.opened(playground, path.relative_to(ROOT).as_posix(), own_kernel=True):
        browser.run_all(playground)
        assert browser.cell_errors(playground) == []
        for name in THEMES:
            with browser.theme(playground, name):
                assert browser.violations(playground, OUTPUTS) == [], name


def test_guess_locked_in_the_first_lesson_is_laid_beside_its_answer(playground: browser.Page) -> None:
    """A learner's first minutes: run the whole lesson, lock a guess in its field, run that field again."""
    with browser.opened(playground, FIRST, own_kernel=True):
        browser.run_all(playground)
        code = playground.locator(browser.CODE_CELLS)
        ask = code.filter(has_text='predict("00.gib"')
        answer = code.filter(has_text='reveal("00.gib"')
        field = ask.get_by_placeholder("your guess in GB")
        figure = answer.locator("img, svg").first
        answer.get_by_text("Show me").wait_for()
        assert not figure.is_visible() and not answer.get_by_text("It is 85.9 GB").is_visible()
        field.fill("eighty")
        field.press("Enter")
        ask.get_by_role("alert").filter(has_text="only the number").wait_for()
        field.fill("80")
        ask.get_by_role("alert").wait_for(state="detached")
        field.press("Enter")
        ask.get_by_text("Your guess is locked: 80 GB").wait_for()
        answer.get_by_text("You said 80 GB, it is 85.9 GB").wait_for()  # with no cell run again
        assert figure.is_visible() and answer.locator("details.course-answer").count() == 0
        run(ask)
        ask.get_by_text("Your guess is locked: 80 GB").wait_for()
        assert browser.cell_errors(playground) == []


BUSY = """import time
from pathlib import Path
while not Path("{}").exists():
    time.sleep(0.02)
"""
SPEEDS = (0, 20, 60, 200)
WAYS = [(speed, way) for speed in SPEEDS for way in ("Enter", "the button")]


def test_a_guess_typed_while_a_cell_runs_is_stored_as_it_is_shown(
    server: browser.Server, playground: browser.Page
) -> None:
    """At four speeds of typing, in milliseconds per key: Enter and clicks overtake what the field sends."""
    sources = ["from course_utils.interactive.guesses import predict, stored_guesses"]
    sources += [f"predict('97.{number}')" for number in range(len(WAYS))]
    sources += [BUSY.format(f"go{number}") for number in range(len(WAYS))]
    last = "print('stored', *(stored_guesses()[f'97.{number}'].value for number in range(8)))"
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


def test_a_guess_is_made_and_replaced_by_keyboard(server: browser.Server, playground: browser.Page) -> None:
    """The keyboard stays in the cell: from its buttons, Shift and Enter run it and go on to the next one."""
    sources = (
        "from course_utils.interactive.guesses import predict, reveal",
        "predict('96.a')",
        "reveal('96.a', 3e9)",
    )
    write(server, "again.ipynb", *map(nbformat.v4.new_code_cell, sources))
    with browser.opened(playground, "again.ipynb"):
        page = playground
        code = playground.locator(browser.CODE_CELLS)
        ask = code.nth(1)
        answer = code.nth(2)
        for index in (0, 1):
            browser.start_cell(page, index)
        field = ask.get_by_placeholder("your guess in GB")
        here = "document.activeElement"
        status = ask.get_by_role("status")
        field.fill("two")
        field.press("Enter")
        ask.get_by_role("alert").filter(has_text="only the number").wait_for()
        page.wait_for_function(f"{here}.tagName === 'INPUT'")
        for typed in ("2", "2.5"):
            field.fill(typed)
            ask.get_by_role("alert").wait_for(state="detached")
            field.press("Enter")
            status.filter(has_text=f"Your guess is locked: {typed} GB.").wait_for()
            page.wait_for_function(f"{here}.innerText === '✓ Locked'")  # a busy page moves its focus late
        page.keyboard.press("Shift+Enter")
        page.keyboard.press("Shift+Enter")
        answer.get_by_text("You said 2.5 GB, it is 3.0 GB").wait_for()
        status.filter(has_text="Your guess is locked: 2.5 GB.").wait_for()
        browser.start_cell(page, 1)
        ask.locator("input").wait_for(state="detached")
        status.filter(has_text="Your guess is locked: 2.5 GB.").wait_for()
        assert browser.cell_errors(page) == []


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


@pytest.mark.parametrize("template", ["lab", "classic"])
def test_an_answer_is_folded_on_a_page_that_nbconvert_makes(
    playground: browser.Page, tmp_path: Path, template: str
) -> None:
    page, _ = HTMLExporter(template_name=template).from_filename(str(ROOT / FIRST))
    (tmp_path / "page.html").write_text(page, encoding="utf-8")
    with playground.context.new_page() as tab:
        tab.route("http*://**", lambda route: route.abort())  # what the page would like from elsewhere
        tab.goto((tmp_path / "page.html").as_uri())
        answer = tab.locator("details.course-answer[data-guess='00.gib']")
        figure = tab.get_by_role("img", name="A GiB is 7.4 % more than a GB")  # of those that are seen
        assert answer.is_visible() and not answer.get_by_text("85.9 GB").is_visible() and figure.count() == 0
        answer.locator("summary").click()
        figure.wait_for()
        assert answer.get_by_text("85.9 GB").is_visible()


def test_a_notebook_as_shipped_shows_no_answer_and_stays_unchanged(playground: browser.Page) -> None:
    """Opened, not yet run, not trusted: outputs that give answers away are closed, nothing is to be saved."""
    with browser.opened(playground, FIRST):
        code = playground.locator(browser.CODE_CELLS)
        assert not code.filter(has_text='reveal("00.gib"').locator(".jp-OutputArea").is_visible()
        assert code.filter(has_text='predict("00.gib"').get_by_text("Your guess, in GB").is_visible()
        assert code.filter(has_text="report()").locator(".jp-OutputArea-output").count() == 0
        assert not playground.evaluate("jupyterapp.shell.currentWidget.context.model.dirty")
        playground.get_by_role("link", name="01 Where did the memory go? →").first.click()
        playground.get_by_role("heading", name="01 · Where did the memory go?").wait_for()


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
        place = "(at) => { const {top} = at.getBoundingClientRect(); return 0 <= top && top < innerHeight; }"
        title = playground.get_by_role("heading", name="2 · Weigh a training run")
        playground.wait_for_function(place, arg=title.element_handle())


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
    with browser.opened(playground, "mistakes.ipynb", own_kernel=True):
        browser.run_all(playground)
        card = playground.locator(browser.CODE_CELLS).last.locator(".jp-RenderedHTML")
        card.get_by_text("TrainingRun('gpt2-xl', micro_batch=32, seq_len=1024, recompute='full')").wait_for()
        assert card.locator("b").all_inner_texts() == ["gpt2-xl", "b=32", "full recomputation"]
        for text, said in zip(browser.cell_errors(playground), filter(None, MISTAKES.values()), strict=True):
            assert text.startswith(said) and len(text) < 200 and len(text.strip().splitlines()) == 1
