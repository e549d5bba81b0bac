"""A lesson as slides: nbconvert shows the cells that the build chose; other text is for the speaker."""

import json
import re

from needs import need

from course_utils.interactive.course_files import ROOT

need("nbconvert")


def test_slides_show_the_chosen_cells_and_keep_prose_for_the_speaker() -> None:
    from nbconvert import SlidesExporter
    from traitlets.config import PyFileConfigLoader

    path = ROOT / "notebooks" / "01_where_did_the_memory_go.ipynb"
    options = PyFileConfigLoader("slides.py", str(ROOT / "docs")).load_config()
    page, _ = SlidesExporter(config=options).from_filename(str(path))
    noted = "".join(re.findall(r'<aside class="notes">.*?</aside>', page, re.DOTALL))
    shown = re.sub(r'<aside class="notes">.*?</aside>', "", page, flags=re.DOTALL)
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    kinds = {cell["id"]: cell["metadata"]["slideshow"]["slide_type"] for cell in cells}
    assert set(kinds.values()) == {"slide", "subslide", "notes", "skip"}
    for cell, kind in kinds.items():
        mark = f'id="cell-id={cell}"'
        assert (mark in shown, mark in noted) == (kind in ("slide", "subslide"), kind == "notes"), cell
    pictures = [cell["id"] for cell in cells if "hide-input" in cell["metadata"].get("tags", ())]
    for cell in pictures:
        one = shown.partition(f'id="cell-id={cell}"')[2].partition('id="cell-id=')[0]
        assert "jp-OutputArea" in one and "jp-InputArea" not in one
    assert pictures and "<img" in shown
    assert page.count("<p><em>The puzzle</em></p>") > 1
