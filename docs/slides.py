"""How nbconvert makes slides of a lesson, with its option `--config docs/slides.py`."""

import re
from typing import Any

from nbconvert.preprocessors import Preprocessor
from nbformat import NotebookNode
from nbformat.v4 import new_markdown_cell


class Titled(Preprocessor):  # type: ignore[misc]  # nbconvert has no types
    """Names on each slide its section, as a room forgets what was asked three slides ago."""

    def preprocess(self, notebook: NotebookNode, resources: Any) -> tuple[NotebookNode, Any]:
        """Put the title of the section before each slide below its first one."""
        title = ""
        cells = []
        for cell in notebook.cells:
            shown = cell.metadata.slideshow
            heading = re.search(r"^#+ (.+)$", cell.source, re.MULTILINE)
            if cell.cell_type == "markdown" and heading:
                title = heading[1]
            elif shown.slide_type == "subslide" and title:
                named = new_markdown_cell(f"*{title}*")
                named.metadata.slideshow = {"slide_type": "subslide"}
                cells.append(named)
                shown.slide_type = "-"  # it goes on with the slide that its title begins
            cells.append(cell)
        notebook.cells = cells
        return notebook, resources


c: Any = get_config()  # type: ignore[name-defined]  # noqa: F821  # traitlets calls this file with it
c.SlidesExporter.preprocessors = [Titled(enabled=True)]
c.SlidesExporter.reveal_width = "1300"
c.SlidesExporter.reveal_height = "800"
c.SlidesExporter.reveal_scroll = True
c.SlidesExporter.exclude_input_prompt = True
c.SlidesExporter.exclude_output_prompt = True
c.TagRemovePreprocessor.enabled = True
c.TagRemovePreprocessor.remove_input_tags = {"hide-input"}
