"""Does a lesson keep its answers until the guess, in its code, its text and its stored outputs?"""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from lesson_source import SOURCES, cells

ASKING = [path for path in sorted(SOURCES.glob("*.py")) if "predict(" in path.read_text(encoding="utf-8")]
ANSWER = re.compile(r"It is (?P<number>[\d.,]+)(?P<unit>[^.]*)\.")
CALL = r'\b{}\(\s*"([^"]+)"'


def keys(source: str, function: str) -> list[str]:
    return re.findall(CALL.format(function), source)


@pytest.mark.parametrize("path", ASKING, ids=lambda path: path.stem)
def test_what_waits_does_so_after_its_guess(path: Path) -> None:
    """Also after the answer's own cell: a later one may show the same number again, as `compare` does."""
    asked, answered = (
        {key: number for number, source in enumerate(cells(path)) for key in keys(source, name)}
        for name in ("predict", "reveal")
    )
    assert asked.keys() == answered.keys()
    for number, source in enumerate(cells(path)):
        for key in keys(source, "waits_for"):
            assert asked[key] < number, key
        labels = re.findall(r'^ *predict\(.*?(asks="[^"]{1,20}")?\)$', source, re.MULTILINE)
        assert len(labels) < 2 or len(set(labels) - {""}) == len(labels), "say what each field asks"


@pytest.mark.parametrize("path", ASKING, ids=lambda path: path.stem)
def test_nothing_says_the_answer_before_it_is_asked_for(path: Path) -> None:
    """An answer's own number, in a text or output that does not wait, between the question and the answer."""
    notebook = (SOURCES.parent / path.stem).with_suffix(".ipynb")
    built = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    sources = ["".join(cell["source"]) for cell in built]
    seen = [seen_in(cell) for cell in built]
    asked = {key: number for number, source in enumerate(sources) for key in keys(source, "predict")}
    for number, source in enumerate(sources):
        said = ANSWER.findall(seen[number])
        for key, (answer, unit) in zip(keys(source, "reveal"), said, strict=True):
            plain = re.compile(rf"(?<![\d.,]){re.escape(answer + unit)}(?!\w)")
            between = list(zip(seen, sources, strict=True))[asked[key] : number]
            told = [text for text, code in between if plain.search(text) and not keys(code, "waits_for")]
            assert not told, f"{key} is {answer}{unit}: {told[0][:200]}"


def seen_in(cell: dict[str, Any]) -> str:
    """What is read without opening anything: a text, or what outputs print, say and describe pictures by."""
    if cell["cell_type"] == "markdown":
        return "".join(cell["source"])
    texts = []
    for output in cell["outputs"]:
        data = output.get("data", {})
        texts += ["".join(output.get("text", "")), "".join(data.get("text/plain", ""))]
        texts += re.findall(r"\balt=(?:\"[^\"]*\"|'[^']*')", "".join(data.get("text/html", "")))
    return " ".join(texts)
