"""Do slides say what their lesson says, carry all of its prose, and work by keys with no network?"""

import json
import re

import pytest
from browser import browser_page

from course_utils.authoring.slides import MOST_ROWS, Slide, page, slides, write
from course_utils.cli.main import main
from course_utils.interactive.course_files import ROOT, number_of, numbered

LESSONS = numbered(ROOT / "notebooks")
LESSON = next(path for path in LESSONS if path.name.startswith("05"))
SMALLEST = 18
"""Pixels: the smallest letters of prose and tables on a slide 720 pixels high."""


@pytest.fixture(params=LESSONS, ids=number_of)
def lesson(request: pytest.FixtureRequest) -> tuple[list[dict], list[Slide]]:
    """A lesson's cells and its slides."""
    content = json.loads(request.param.read_text(encoding="utf-8"))
    return content["cells"], slides(content)


def test_a_lesson_becomes_questions_figures_and_what_to_remember(lesson):
    _, steps = lesson
    kinds = [step.kind for step in steps]
    assert kinds[0] == "title" and kinds.count("closing") == 1
    assert {"question", "answer", "gap", "figure", "table", "closing"}.issuperset(kinds[1:])
    assert {"question", "answer", "figure"} <= set(kinds)
    closing = steps[kinds.index("closing")].body
    assert all(part in closing for part in ("Remember", "Breaks when", "Cheat-sheet line"))
    assert "locked no guess" not in "".join(step.body for step in steps)


def test_every_text_is_in_the_notes_once(lesson):
    cells, steps = lesson
    notes = [note for step in steps for note in step.notes]
    assert all(notes.count("".join(cell["source"])) == 1 for cell in cells if cell["cell_type"] == "markdown")


def test_every_picture_of_the_lesson_is_on_a_slide_and_one_of_sliders_says_so(lesson):
    cells, steps = lesson
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    drawn = [image for output in outputs for image in re.findall(r"<img\b[^>]*>", _html(output))]
    assert [step.body.partition("<p")[0] for step in steps if step.kind == "figure"] == drawn
    pictures = [output for output in outputs if "<img" in _html(output)]
    words = ["".join(output["data"].get("text/plain", "")) for output in pictures]
    controls = [text for text in words if ": run this cell to" in text]
    assert sum("A picture: the controls move" in step.body for step in steps) == len(controls)


def _html(output: dict) -> str:
    return "".join(output.get("data", {}).get("text/html", ""))


def test_a_page_fetches_nothing():
    for path in LESSONS:
        text = page(path)
        assert not re.search(r"""<(img|script|link|iframe)\b[^>]*\s(src|href)=["'](?!data:)""", text), (
            path.name
        )
        assert "{{" not in text and "@import" not in text, path.name


def text(source: str, *tags: str) -> dict:
    return {"cell_type": "markdown", "source": source, "metadata": {"tags": list(tags)}}


def code(source: str, *outputs: dict) -> dict:
    return {"cell_type": "code", "source": source, "outputs": list(outputs)}


def shown(html: str) -> dict:
    return {"data": {"text/html": html}}


def steps_of(*cells: dict) -> list[Slide]:
    """The slides of a lesson of one minute, but for its title."""
    title, *steps = slides(
        {"cells": [text("# 99 · Title\n\nWhy?"), *cells], "metadata": {"course": {"minutes": 1}}}
    )
    assert title.body == "<h1>99 · Title</h1><p class='small'>1 minutes</p><p>Why?</p>\n"
    return steps


def test_a_long_table_goes_on_with_its_header():
    rows = "".join(f"<tr><td>{number}</td></tr>" for number in range(2 * MOST_ROWS + 1))
    steps = steps_of(code("table", shown(f"<table><caption>c</caption><tr><th>n</th></tr>{rows}</table>")))
    assert [step.body.count("<td>") for step in steps] == [MOST_ROWS, MOST_ROWS, 1]
    assert all(step.body.count("<th>") == 1 and "<caption>c" in step.body for step in steps)


def test_tags_choose_what_a_text_shows_and_a_heading_has_no_table_of_its_own():
    table = "| a | b |\n|---|---|\n| 1 | 2 |"
    asks = text("## A\nSo [far](x.md).\n\n**Your guess.** How *far*?", "question")
    gap = text("Before.\n\n**The gap** is small.\n\nAfter.", "gap")
    closing = text(f"## B\n{table}\n\n## Home\n**Remember** a\n\n**Breaks when** b\n\nGo on.", "closing")
    plain = text(f"## C\n{table}\n\n## D\nMore.")
    steps = steps_of(asks, gap, text("Nothing."), closing, plain)
    assert [(step.kind, step.section) for step in steps] == [
        ("question", "A"),
        ("gap", "A"),
        ("table", "B"),
        ("closing", "B"),
        ("question", "C"),
        ("table", "C"),
    ]
    bodies = [re.sub(r"<[^>]+>|\n", "", step.body) for step in steps]
    assert bodies == [
        "AYour guess. How far?",
        "The gap is small.",
        "ab12",
        "Remember aBreaks when b",
        "C",
        "ab12",
    ]
    assert steps[1].notes[1] == "Nothing."


def test_an_answer_stands_under_the_guess_that_it_answers():
    far, near = (text(f"## A\nSo far. **Your guess.** How {what}?", "question") for what in ("far", "near"))
    answer = shown(
        "<style>p</style><details class='course-answer'><summary>Show me</summary><p>It is 1"
        " km.</p></details>"
    )
    *_, last = steps_of(
        far, code('predict("99.a")'), near, code('predict("99.b")'), code('reveal("99.a", 1)', answer)
    )
    assert (last.kind, "How far?" in last.body, "How near?" in last.body) == ("answer", True, False)
    assert "It is 1 km.<" in last.body


def test_what_a_guess_starts_from_is_on_its_slide_and_each_answer_has_one():
    far = text("## A\n**Your guess.** How far, and how near?", "question")
    given = code('predict("99.a")\npredict("99.b")', {"name": "stdout", "text": ["s < 3\n"]})
    answers = code(
        'reveal("99.a", 1)\nreveal("99.b", 2)', *(shown(f"<p>It is {number} km.</p>") for number in (1, 2))
    )
    question, *said = steps_of(far, given, answers)
    assert "s &lt; 3" in question.body and question.notes[-1].count("s < 3") == 1
    assert [re.findall("How far, and how near.|It is .", one.body)[1] for one in said] == [
        "It is 1",
        "It is 2",
    ]


def test_the_command_writes_the_lessons_named(tmp_path, capsys):
    assert main(["slides", "--here", "5", "--out", str(tmp_path / "out")]) == 0
    assert [path.name for path in (tmp_path / "out").iterdir()] == [f"{LESSON.stem}.html"]
    assert main(["slides", "--here", "77", "--out", str(tmp_path / "none")]) == 1
    assert "unknown lesson '77'" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


ROOM = f"""() => [...document.querySelectorAll('section')].filter(section => {{
    const body = section.querySelector('.body');
    const small = section.className !== 'figure' && parseFloat(body.style.fontSize) < {SMALLEST};
    return small || body.scrollHeight > body.clientHeight || body.scrollWidth > body.clientWidth;
}}).map(section => section.id)"""
"""The slides whose contents have no room, or too small letters."""


def test_keys_turn_the_slides_and_show_the_notes(tmp_path):
    (path,) = write(tmp_path, ["05"])
    count = len(slides(json.loads(LESSON.read_text(encoding="utf-8"))))
    with browser_page(width=1280, height=720) as tab:
        problems: list[str] = []
        tab.on("pageerror", lambda error: problems.append(str(error)))
        tab.goto(path.as_uri())
        assert tab.evaluate(ROOM) == []
        seen = []
        for press in ("ArrowRight", " ", "PageUp", "End", "ArrowRight", "Home", "ArrowLeft"):
            tab.keyboard.press(press)
            seen.append(tab.evaluate("Number(document.querySelector('section.now').id.slice(1))"))
        assert seen == [2, 3, 2, count, count, 1, 1]
        assert not tab.locator("#notes").is_visible()
        tab.keyboard.press("n")
        assert "You should know lesson 01" in tab.locator("#notes").inner_text()
        with tab.expect_popup() as popup:
            tab.keyboard.press("s")
        popup.value.keyboard.press("ArrowRight")
        assert tab.locator("section.now").get_attribute("id") == "s2"
        assert f"2 / {count}" in popup.value.locator("body").inner_text()
        tab.keyboard.press("n")
        pages = re.findall(rb"/Type\s*/Page\b", tab.pdf(prefer_css_page_size=True))
        assert (len(pages), problems) == (count, [])
