"""A learner's first minutes in a real browser: a guess is locked, a quiz answered, the Explorer moved."""

from collections.abc import Iterator

import browser
import nbformat
import pytest

from course_utils.lessons import quiz

CELLS = (
    "from course_utils.interactive.guesses import predict, reveal\npredict('98.gib', unit='GB')",
    "reveal('98.gib', 3e9)",
    "from course_utils.lessons import quiz\nquiz(1)",
    "from course_utils.interactive.explorer_widget import explore\nexplore()",
)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[browser.Page]:
    """A notebook whose cells have all been run."""
    folder = tmp_path_factory.mktemp("course")
    kernel = {"name": "python3", "display_name": "Python 3 (ipykernel)", "language": "python"}
    cells = [nbformat.v4.new_code_cell(source) for source in CELLS]
    nbformat.write(
        nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": kernel}), folder / "first.ipynb"
    )
    with browser.jupyter_lab(folder) as server, browser.browser_page() as opened:
        browser.open_notebook(opened, server, "first.ipynb")
        browser.run_all(opened)
        assert browser.cell_errors(opened) == []
        yield opened


def cell(page: browser.Page, place: int) -> browser.Locator:
    return page.locator(browser.CODE_CELLS).nth(place)


def test_a_locked_guess_is_laid_beside_its_answer(page: browser.Page) -> None:
    ask, answer = cell(page, 0), cell(page, 1)
    answer.get_by_text("Show me").wait_for()
    assert not answer.get_by_text("It is 3.0 GB").is_visible()
    field = ask.get_by_placeholder("your guess in GB")
    field.fill("two")
    field.press("Enter")
    ask.get_by_role("alert").filter(has_text="only the number").wait_for()
    field.fill("2")
    ask.get_by_role("alert").wait_for(state="detached")
    field.press("Enter")
    ask.get_by_text("Your guess is locked: 2 GB").wait_for()
    answer.get_by_text("You said 2 GB, it is 3.0 GB").wait_for()  # with no cell run again
    assert browser.cell_errors(page) == []


def test_a_quiz_is_taken_by_keyboard_and_answers_at_once(page: browser.Page) -> None:
    """Enter and the space bar choose, the focus stays, and a screen reader announces the verdict."""
    question = quiz(1).questions[0]
    order = [choice.text for choice in question.choices]
    buttons = cell(page, 2).locator("button.course-choice")
    said = cell(page, 2).get_by_role("status")
    wrong = next(text for text in order if text != question.right.text)
    for text, key, words in ((wrong, "Enter", "Not quite."), (question.right.text, "Space", "Right.")):
        buttons.nth(order.index(text)).focus()
        page.keyboard.press(key)
        said.filter(has_text=words).first.wait_for()
        assert text in page.evaluate("document.activeElement.innerText")
    said.filter(has_text="1 of 5 questions solved.").wait_for()


def test_a_key_on_the_explorers_slider_moves_the_picture(page: browser.Page) -> None:
    explorer = cell(page, 3)
    explorer.get_by_role("status").filter(has_text="Does not fit an RTX5090-32GB by 100.77 GB").wait_for()
    before = browser.picture(explorer)
    slider = explorer.locator(browser.SLIDER).first
    browser.redraw_milliseconds(page, slider, "ArrowLeft")
    explorer.get_by_role("status").filter(has_text="micro_batch=16").wait_for()
    assert "aria-label" in before
    assert browser.picture(explorer) != before
    assert browser.cell_errors(page) == []
