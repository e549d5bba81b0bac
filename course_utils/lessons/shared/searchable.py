"""What can be searched: the sections of lessons, exercises, glossary, cheat sheet, errata, and questions of quizzes.

Read from the files as they are now, so that no index can go stale. Solutions, hints, and the choices of a quiz are left
out: a search must not give an answer away.
"""

import html
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from course_utils.interactive.course_files import notebooks

from .. import lessons as lessons_with_a_quiz
from .. import quiz

HEADING = re.compile(r"^#{1,3} +(.+?) *$", re.MULTILINE)
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
HINTS = re.compile(r"<details>.*?</details>", re.DOTALL)
ANCHORED = re.compile(r'^<span id="([^"]+)"></span>\n\n## +(.+?) *$', re.MULTILINE)
QUESTION = re.compile(r"<p><b>\d+\.</b> (.*?)</p>")
PAGES = (("glossary", "docs/glossary.md"), ("cheat sheet", "docs/cheat_sheet.md"), ("errata", "docs/errata.md"))


@dataclass(frozen=True)
class Section:
    """A stretch of text under one heading. `kind` is "lesson", "exercises", "quiz" or the name of a page of docs/.

    `path` is from the course's folder, `fragment` what JupyterLab scrolls to after a "#", `page` the name of the whole
    ("lesson 05 · Activations"). `code` is searched as well, and never shown.
    """

    kind: str
    page: str
    heading: str
    path: str
    fragment: str
    text: str
    code: str = ""


def sections(root: Path) -> Iterator[Section]:
    """Everything in the course at `root` that can be searched, in the course's order."""
    for kind, name in PAGES:
        if (root / name).exists():
            yield from _page(kind, name, (root / name).read_text(encoding="utf-8"))
    for kind, folder in (("lesson", "notebooks"), ("exercises", "exercises")):
        for path in notebooks(root / folder):
            cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
            yield from _notebook(kind, path.relative_to(root).as_posix(), cells)


def _page(kind: str, path: str, text: str) -> Iterator[Section]:
    """The sections of a page of docs/, its introduction left out. Each heading has its anchor above it."""
    parts = ANCHORED.split(text)
    for anchor, heading, body in zip(parts[1::3], parts[2::3], parts[3::3], strict=True):
        yield Section(kind, kind, plain(heading), path, anchor, plain(body))


def _notebook(kind: str, path: str, cells: list[dict[str, Any]]) -> Iterator[Section]:
    """A notebook's sections, one a heading; a lesson's code counts to the section that it stands in."""
    name = Path(path).stem
    number, found = name[:2] if re.match(r"\d\d_", name) else "", []
    for cell in cells:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            found += [[heading, cell.get("id", ""), body, ""] for heading, body in _headed(source, found)]
        elif found and kind == "lesson":
            found[-1][3] += f"\n{source}"
    title = found[0][0].split("·", 1)[-1].strip() if found else name
    page = f"{kind} {number} · {title}" if number else f"notebook · {title}"
    for heading, cell_id, body, code in found:
        yield Section(kind, page, heading, path, f"cell-id={cell_id}", body, code)
    if kind == "lesson" and number and int(number) in lessons_with_a_quiz():
        yield from _quiz(int(number), f"quiz {number} · {title}", path, cells)


def _headed(source: str, before: list[list[str]]) -> Iterator[tuple[str, str]]:
    """The headings of a Markdown cell with what follows each; text before the first goes to the heading before it."""
    source = HINTS.sub("", FENCE.sub("", source))
    parts = HEADING.split(source)
    if before and parts[0].strip():
        before[-1][2] += f" {plain(parts[0])}"
    for heading, body in zip(parts[1::2], parts[2::2], strict=True):
        yield plain(heading), plain(body)


def _quiz(lesson: int, page: str, path: str, cells: list[dict[str, Any]]) -> Iterator[Section]:
    """The questions of a lesson's quiz, without choices: as the notebook shows them, or computed if it shows none."""
    shown, cell_id = [], ""
    for cell in cells:
        if f"quiz({lesson})" in "".join(cell["source"]):
            cell_id = cell.get("id", "")
            outputs = [output.get("data", {}).get("text/html", "") for output in cell.get("outputs", [])]
            shown = [re.sub(r"<[^>]+>", "", text) for part in outputs for text in QUESTION.findall("".join(part))]
    questions = [html.unescape(text) for text in shown] or [asked.text for asked in quiz(lesson).questions]
    for number, text in enumerate(questions, start=1):
        yield Section("quiz", page, f"question {number}", path, f"cell-id={cell_id}", plain(text))


def plain(markdown: str) -> str:
    """Markdown as words on one line: no marks of emphasis, code, links, quotes or tables."""
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", markdown)
    text = re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", text)
    text = re.sub(r"^\|[-:| ]+\|$", "", text, flags=re.MULTILINE)
    text = re.sub(r"\*\*|`|(?<!\w)\*(?=\S)|(?<=\S)\*(?!\w)|^>+ ?|^\||\|$", "", text, flags=re.MULTILINE)
    return " ".join(text.split())
