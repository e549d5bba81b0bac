"""A lesson as slides: nbconvert shows the cells that the build chose; other text is for the speaker."""

import json
import re

import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell
from needs import lacking

from course_utils.authoring.sources import slide_type
from course_utils.interactive.course_files import ROOT

try:
    from nbconvert import SlidesExporter
    from traitlets.config import Config
except ModuleNotFoundError as absent:
    lacking(absent.name)


def test_slides_show_the_chosen_cells_and_keep_prose_for_the_speaker() -> None:
    options = json.loads((ROOT / "docs" / "slides.json").read_text(encoding="utf-8"))
    page, _ = SlidesExporter(config=Config(options)).from_filename(
        str(ROOT / "notebooks" / "03_mixed_precision.ipynb")
    )
    noted = "".join(re.findall(r'<aside class="notes">.*?</aside>', page, re.DOTALL))
    shown = re.sub(r'<aside class="notes">.*?</aside>', "", page, flags=re.DOTALL)
    lesson = json.loads((ROOT / "notebooks" / "03_mixed_precision.ipynb").read_text(encoding="utf-8"))
    kinds = {cell["id"]: cell["metadata"]["slideshow"]["slide_type"] for cell in lesson["cells"]}
    assert set(kinds.values()) == {"slide", "subslide", "notes", "skip"}
    for cell, kind in kinds.items():
        mark = f'id="cell-id={cell}"'
        assert (mark in shown, mark in noted) == (kind in ("slide", "subslide"), kind == "notes"), cell
    pictures = [cell for cell in lesson["cells"] if "hide-input" in cell["metadata"].get("tags", ())]
    assert pictures
    for cell in pictures:
        _, _, after = shown.partition(f'id="cell-id={cell["id"]}"')
        one, _, _ = after.partition('id="cell-id=')
        assert "jp-OutputArea" in one and "jp-InputArea" not in one
    assert "<img" in shown


CODE = new_code_cell
TEXT = new_markdown_cell
CELLS = {
    "slide": [TEXT("## A section\nWords."), TEXT("The end.\n\n## The next section")],
    "subslide": [
        CODE("measure(run)"),
        TEXT("**Your guess.** How much?"),
        TEXT("Before.\n\n**The gap** is zero."),
        TEXT("| a | b |\n|---|---|\n| 1 | 2 |"),
    ],
    "notes": [TEXT("Words.\n\n### A detail"), TEXT("x", metadata={"tags": ["notes"]})],
    "skip": [
        CODE('print(1)\npredict("05.peak", unit="GB")'),
        CODE("quiz(5)"),
        TEXT("## A section", metadata={"tags": ["skip"]}),
    ],
}


@pytest.mark.parametrize("kind", CELLS)
def test_kind_words_and_tags_of_a_cell_choose_its_slide(kind: str) -> None:
    assert {slide_type(cell) for cell in CELLS[kind]} == {kind}
