"""Does a lesson keep its answers until the guess, in its code, its text and its stored outputs?"""

import json
import re
from typing import Any

import jupytext
import pytest

from course_utils.authoring.sources import PAGES
from course_utils.interactive.course_files import ROOT

SOURCES = sorted(
    path
    for path in (ROOT / "notebooks" / "src").glob("*.py")
    if "predict(" in path.read_text(encoding="utf-8")
)
ANSWER = re.compile(r"It is (?P<number>[\d.,]+)(?P<unit>[^.]*)\.")
CALL = r'\b{}\(\s*"([^"]+)"'
COMMANDS = re.compile(r"frac|sqrt|left|right|text|cdot|sum|dots|approx|qquad|nabla|leftarrow|hat|ast")
GIVEN = {"10.states"}  # the question gives what one GPU holds; that each of eight holds as much is the answer
LETTERS = re.compile(r"alpha|beta|gamma|eta|theta|mu|sigma|varepsilon|Delta|Psi|Sigma")


@pytest.fixture(params=SOURCES, ids=lambda path: path.stem)
def cells(request: pytest.FixtureRequest) -> list[Any]:
    notebook: Any = jupytext.read(request.param, fmt="py:percent")
    return notebook.cells


def keys(source: str, function: str) -> list[str]:
    return re.findall(CALL.format(function), source)


def test_what_waits_does_so_after_its_guess(cells: list[Any]) -> None:
    """Also after the answer's own cell: a later one may show the same number again, as `compare` does."""
    code = [cell.source for cell in cells if cell.cell_type == "code"]
    asked, answered = (
        {key: number for number, source in enumerate(code) for key in keys(source, name)}
        for name in ("predict", "reveal")
    )
    assert asked.keys() == answered.keys()
    for number, source in enumerate(code):
        for key in keys(source, "waits_for"):
            assert asked[key] < number, key


def test_guesses_in_one_cell_say_what_they_ask(cells: list[Any]) -> None:
    for cell in cells:
        asked = (
            re.findall(r"^ *predict\(.*\)$", cell.source, re.MULTILINE) if cell.cell_type == "code" else []
        )
        labels = [re.search(r'asks="([^"]{1,20})"', call) for call in asked]
        assert len(asked) < 2 or (
            all(labels) and len({label[1] for label in labels if label}) == len(asked)
        ), asked


def test_nothing_says_the_answer_before_it_is_asked_for(
    request: pytest.FixtureRequest, cells: list[Any]
) -> None:
    """An answer's own number, in a text or output that does not wait, between the question and the answer."""
    path = (ROOT / "notebooks" / request.node.callspec.id).with_suffix(".ipynb")
    built = json.loads(path.read_text(encoding="utf-8"))["cells"]
    assert len(built) == len(cells) + (path.stem not in PAGES)  # the ways on, which the build adds
    sources = ["".join(cell["source"]) for cell in built]
    seen = [_seen(cell) for cell in built]
    asked = {key: number for number, source in enumerate(sources) for key in keys(source, "predict")}
    for number, source in enumerate(sources):
        said = ANSWER.findall(seen[number])
        for key, (answer, unit) in zip(keys(source, "reveal"), said, strict=True):
            plain = re.compile(rf"(?<![\d.,]){re.escape(answer + unit)}(?!\w)")
            between = list(zip(seen, sources, strict=True))[asked[key] : number]
            open_texts = [text for text, code in between if not keys(code, "waits_for")]
            told = [text for text in open_texts if plain.search(text)]
            assert not told or key in GIVEN, f"{key} is {answer}{unit}: {told[0][:200]}"


def _seen(cell: dict[str, Any]) -> str:
    """What is read without opening anything: a text, or what outputs print, say and describe pictures by."""
    if cell["cell_type"] == "markdown":
        return "".join(cell["source"])
    texts = []
    for output in cell["outputs"]:
        data = output.get("data", {})
        texts += ["".join(output.get("text", "")), "".join(data.get("text/plain", ""))]
        texts += re.findall(r"\balt=(?:\"[^\"]*\"|'[^']*')", "".join(data.get("text/html", "")))
    return " ".join(texts)


def test_formulas_are_plain_and_where_they_are_set(cells: list[Any]) -> None:
    """Commands that MathJax and MathML know both; none in headings, tables and the lines that pages of text
    collect.
    """
    for cell in cells:
        if cell.cell_type != "markdown":
            continue
        text = re.sub(r"```.*?```|`[^`]*`|\\\$", "", cell.source, flags=re.DOTALL)
        for line in text.splitlines():
            assert "$" not in line or not line.startswith(("#", "|")), line
        assert "$" not in text.partition("**Cheat-sheet line**")[2], "the cheat sheet is plain text"
        formulas = re.findall(r"\$\$(.+?)\$\$", text, re.DOTALL)
        for line in (line for line in text.splitlines() if "$$" in line):
            assert line.startswith("$$") or line.endswith("$$"), line
        inline = re.sub(r"\$\$.+?\$\$", "", text, flags=re.DOTALL).split("$")
        assert len(inline) % 2 == 1, f"a dollar without a partner: {text[:80]}"
        for formula in formulas + inline[1::2]:
            for name in re.findall(r"\\([A-Za-z]+)", formula):
                assert COMMANDS.fullmatch(name) or LETTERS.fullmatch(name), formula
            assert formula == formula.strip() and formula.count("{") == formula.count("}"), formula
            assert not re.search(r"\\[^A-Za-z|]", formula), formula
