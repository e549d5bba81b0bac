"""`python3 -m course_utils slides 05 --out slides`: a lesson as slides, from the notebook as it was executed.

A slide is one step of the lesson: a question, what a cell drew, an answer, the gap. Tags of cells, which
`sources` adds, say which text is which. The lesson's whole prose goes with them, as notes for the speaker.
"""

import html
import json
import re
from argparse import Namespace
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt

from ..errors import unknown
from ..interactive.course_files import ROOT, number_of, numbered
from .sources import SLIDE_TAGS

PAGE = Path(__file__).with_name("slides_page.html")
MARKDOWN = MarkdownIt("commonmark").enable("table")
for _rule in ("link_open", "link_close"):
    MARKDOWN.add_render_rule(_rule, lambda *_: "")  # a slide shows the words of a link alone

DRAWN = re.compile(r"<img\b[^>]*>|<table\b.*?</table>", re.DOTALL)
ANSWER = re.compile(r"<p>(It is .+?)</p>(?:</details>|$)", re.DOTALL)
PART = re.compile(r"(?P<row><tr\b.*?</tr>)|<caption\b.*?</caption>", re.DOTALL)
SENTENCE_END = re.compile(r"(?<=[.?!:])\s+(?=[A-Z“*`])")
INVITATION = ": run this cell to "
"""Part of the stored text of what has controls, as "Explorer of training runs: run this cell to use it"."""

LONGEST = 300
"""Characters of prose on a slide; at least one sentence is shown, however long. The rest is in the notes."""

MOST_ROWS, MOST_CHARACTERS = 11, 900
"""A slide's room for a table; a longer one goes on, under its header, on the next slide."""


@dataclass
class Slide:
    """One step: its kind, its section, the HTML that it shows, and the Markdown of its notes."""

    kind: str
    section: str
    body: str
    notes: list[str]


def run(chosen: Namespace) -> int:
    """Write the slides of the lessons named, or of all."""
    for path in write(chosen.out, chosen.lessons):
        keys = "Space or → goes on, N shows the notes, S opens them in a window."
        print(f"{path}: open it in a browser. {keys}")
    return 0


def write(out: Path, lessons: Iterable[str] = (), root: Path = ROOT) -> list[Path]:
    """Write a page of slides per lesson to `out` and return their paths. ValueError for an unknown lesson."""
    known = {number_of(path): path for path in numbered(root / "notebooks")}
    wanted = [name.zfill(2) for name in lessons] or list(known)
    if missing := [name for name in wanted if name not in known]:
        raise unknown("lesson", missing[0], known)
    pages = {out / f"{known[name].stem}.html": page(known[name]) for name in wanted}
    out.mkdir(parents=True, exist_ok=True)
    for path, text in pages.items():
        path.write_text(text, encoding="utf-8", newline="\n")
    return list(pages)


def page(notebook: Path) -> str:
    """The slides of a lesson as one page of HTML, with pictures, style and script: it needs no network."""
    content = json.loads(notebook.read_text(encoding="utf-8"))
    first, *_ = "".join(content["cells"][0]["source"]).splitlines()
    title = html.escape(first[2:])
    made = slides(content)
    shown = []
    for number, slide in enumerate(made, start=1):
        above = title if slide.kind == "title" else f"{title} — {html.escape(slide.section)}"
        notes = "".join(map(MARKDOWN.render, slide.notes))
        shown.append(
            f'<section class="{slide.kind}" id="s{number}" aria-label="{number} of {len(made)}">'
            f'<header>{above}</header><div class="body">{slide.body}</div>'
            f'<footer>{number} / {len(made)}</footer><aside class="notes">{notes}</aside></section>'
        )
    whole = PAGE.read_text(encoding="utf-8").replace("{{TITLE}}", title)
    return whole.replace("{{SLIDES}}", "\n".join(shown))


def slides(notebook: dict[str, Any]) -> list[Slide]:
    """The steps of a lesson in its own order. Every cell of text is in the notes of exactly one of them."""
    title, *cells = notebook["cells"]
    first = "".join(title["source"])
    minutes = f"<p class='small'>{notebook['metadata']['course']['minutes']} minutes</p>"
    heading = f"<h1>{MARKDOWN.renderInline(first.splitlines()[0][2:])}</h1>"
    made = [Slide("title", "", f"{heading}{minutes}{_lead(_blocks(first)[-1][1])}", [first])]
    section = ""
    guess = ""
    asked: dict[str, str] = {}  # the guess that each predict() asked for, for the slide with its answer
    for cell in cells:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            if source.startswith("## "):
                section = source.splitlines()[0][3:]
            guess = source.partition(SLIDE_TAGS["question"])[2].partition("**")[2].strip() or guess
            added = list(_from_text(cell, source, section))
            noted = added[0] if added else made[-1]
            noted.notes.append(source)
        else:
            predicted = _keys("predict", source)
            asked |= dict.fromkeys(predicted, MARKDOWN.render(guess))
            printed = _printed(cell)
            if predicted and made[-1].kind == "question":
                made[-1].body += _given(printed.splitlines())
            if printed:
                made[-1].notes.append(f"Printed:\n\n```\n{printed}\n```")
            questions = [asked.get(key, "") for key in _keys("reveal", source)]
            added = list(_from_outputs(cell, section, iter(questions)))
        made += added
    return made


def _keys(name: str, source: str) -> list[str]:
    """The keys of the guesses for which a cell calls `predict` or `reveal`."""
    return re.findall(rf'\b{name}\(\s*"([^"]+)"', source)


def _printed(cell: dict[str, Any]) -> str:
    texts = ["".join(output["text"]) for output in cell["outputs"] if output.get("name") == "stdout"]
    return "".join(texts).rstrip()


def _from_text(cell: dict[str, Any], source: str, section: str) -> Iterator[Slide]:
    """The slides of a cell of text: its heading or the guess it asks for, tables, the gap, the closing."""
    blocks = _blocks(source)
    tags = cell["metadata"].get("tags", ())
    bold = [text for kind, text in blocks if kind == "bold"]
    begins_section = source.startswith("## ") and "closing" not in tags
    if "question" in tags or begins_section:
        heading = next((text for kind, text in blocks if kind == "heading"), section)
        if "question" in tags:
            body = MARKDOWN.render(blocks[-1][1])
        else:
            part = takewhile(lambda block: block[0] != "heading", blocks[1:])
            opening = [text for kind, text in part if kind == "text" and not text.startswith("$")]
            body = _lead(opening[0]) if opening else ""
        yield Slide("question", section, f"<h2>{MARKDOWN.renderInline(heading.lstrip('# '))}</h2>{body}", [])
    for kind, text in blocks:
        if kind == "table":
            yield from (Slide("table", section, piece, []) for piece in _pieces(MARKDOWN.render(text)))
    if "gap" in tags:
        yield Slide("gap", section, _lead(bold[0]), [])
    if "closing" in tags:
        yield Slide("closing", section, "".join(map(MARKDOWN.render, bold)), [])


def _blocks(source: str) -> list[tuple[str, str]]:
    """The parts of a Markdown text: "heading", "table", "text", "bold" (text that begins bold) or "other"."""
    kinds = {"heading_open": "heading", "table_open": "table", "paragraph_open": "text"}
    lines = source.splitlines()
    found = []
    for token in MARKDOWN.parse(source):
        if token.level == 0 and token.map:
            first, end = token.map
            text = "\n".join(lines[first:end])
            kind = kinds.get(token.type, "other")
            if kind == "text" and text.startswith("**"):
                kind = "bold"
            found.append((kind, text))
    return found


def _from_outputs(cell: dict[str, Any], section: str, questions: Iterator[str]) -> Iterator[Slide]:
    """The slides of a cell of code: each picture and table that it drew, and the answers to `questions`."""
    for output in cell["outputs"]:
        text = "".join(output.get("data", {}).get("text/html", ""))
        has_controls = INVITATION in "".join(output.get("data", {}).get("text/plain", ""))
        caption = "<p class='small'>A picture: the controls move in the notebook.</p>" if has_controls else ""
        for drawn in DRAWN.findall(text):
            alt = re.search(r'alt="([^"]*)"', drawn)
            notes = [html.unescape(alt[1])] if alt else []
            if drawn.startswith("<img"):
                kind = "figure"
                pieces = [drawn + caption]
            else:
                kind = "table"
                pieces = _pieces(drawn)
            yield from (Slide(kind, section, piece, list(notes)) for piece in pieces)
        if answer := ANSWER.search(text):
            asked = f"<div class='small'>{next(questions, '')}</div>"
            yield Slide("answer", section, f"{asked}<p class='number'>{answer[1]}</p>", [])


def _pieces(table: str) -> list[str]:
    """A table in HTML, cut into as many as slides need, each with the caption, the header and some rows."""
    parts = list(PART.finditer(table))
    rows = [part[0] for part in parts if part["row"]]
    caption = "".join(part[0] for part in parts if not part["row"])
    head = ""
    if "<td" not in rows[0]:
        head = rows.pop(0)
    pieces: list[list[str]] = [[]]
    for row in rows:
        piece = pieces[-1]
        characters = sum(len(re.sub(r"<[^>]*>", "", kept)) for kept in [*piece, row])
        is_full = len(piece) == MOST_ROWS or characters > MOST_CHARACTERS
        if piece and is_full:
            pieces.append([])
        pieces[-1].append(row)
    bodies = ["".join(piece) for piece in pieces]
    return [f"<table>{caption}<thead>{head}</thead><tbody>{body}</tbody></table>" for body in bodies]


def _given(lines: Sequence[str]) -> str:
    """Output of a cell that asks for a guess, if it is short: it belongs to the question."""
    is_short = 0 < len(lines) <= 3 and max(map(len, lines)) <= 80
    if not is_short:
        return ""
    return f"<p class='small'>{'<br>'.join(map(html.escape, lines))}</p>"


def _lead(paragraph: str) -> str:
    """The first sentences of a paragraph, as HTML: as many as a slide has room for."""
    first, *others = SENTENCE_END.split(" ".join(paragraph.split()))
    for sentence in others:
        if len(first) + len(sentence) > LONGEST:
            break
        first = f"{first} {sentence}"
    return MARKDOWN.render(first)
