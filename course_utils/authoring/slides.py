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
"""Part of the stored text of something with controls, as "Explorer of training runs: run this cell to use
it".
"""

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
        print(
            f"{path}: open it in a browser. Space or → goes on, N shows the notes, S opens them in a window."
        )
    return 0


def write(out: Path, lessons: Iterable[str] = (), root: Path = ROOT) -> list[Path]:
    """Write a page of slides per lesson to `out` and return their paths. ValueError for a lesson that is not
    there.
    """
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
    """The slides of a lesson as one page of HTML, with its pictures, style and script inside: it needs no
    network.
    """
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
    return (
        PAGE.read_text(encoding="utf-8").replace("{{TITLE}}", title).replace("{{SLIDES}}", "\n".join(shown))
    )


def slides(notebook: dict[str, Any]) -> list[Slide]:
    """The steps of a lesson in its own order. Every cell of text is in the notes of one of them, and of one
    only.
    """
    title, *cells = notebook["cells"]
    first = "".join(title["source"])
    minutes = f"<p class='small'>{notebook['metadata']['course']['minutes']} minutes</p>"
    heading = f"<h1>{MARKDOWN.renderInline(first.splitlines()[0][2:])}</h1>"
    made = [Slide("title", "", f"{heading}{minutes}{_lead(_blocks(first)[-1][1])}", [first])]
    section, guess = "", ""
    asked: dict[str, str] = {}  # the guess that each predict() asked for, for the slide with its answer
    for cell in cells:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            section = source.splitlines()[0][3:] if source.startswith("## ") else section
            guess = source.partition(SLIDE_TAGS["question"])[2].partition("**")[2].strip() or guess
            added = list(_from_text(cell, source, section))
            (added or made)[0 if added else -1].notes.append(source)
        else:
            predicted, revealed = (
                re.findall(rf'\b{name}\(\s*"([^"]+)"', source) for name in ("predict", "reveal")
            )
            asked |= dict.fromkeys(predicted, MARKDOWN.render(guess))
            printed = "".join(
                "".join(one["text"]) for one in cell["outputs"] if one.get("name") == "stdout"
            ).rstrip()
            if predicted and made[-1].kind == "question":
                made[-1].body += _given(printed.splitlines())
            made[-1].notes += [f"Printed:\n\n```\n{printed}\n```"] * bool(printed)
            added = list(_from_outputs(cell, section, iter([asked.get(key, "") for key in revealed])))
        made += added
    return made


def _from_text(cell: dict[str, Any], source: str, section: str) -> Iterator[Slide]:
    """The slides of a cell of text: its heading or the guess that it asks for, tables, the gap, what to
    remember.
    """
    blocks = _blocks(source)
    tags = cell["metadata"].get("tags", ())
    bold = [text for kind, text in blocks if kind == "bold"]
    if "question" in tags or (source.startswith("## ") and "closing" not in tags):
        heading = next((text for kind, text in blocks if kind == "heading"), section)
        part = takewhile(lambda block: block[0] != "heading", blocks[1:])
        opening = [text for kind, text in part if kind == "text" and not text.startswith("$")][:1]
        body = MARKDOWN.render(blocks[-1][1]) if "question" in tags else "".join(map(_lead, opening))
        yield Slide("question", section, f"<h2>{MARKDOWN.renderInline(heading.lstrip('# '))}</h2>{body}", [])
    for kind, text in blocks:
        if kind == "table":
            yield from (Slide("table", section, piece, []) for piece in _pieces(MARKDOWN.render(text)))
    if "gap" in tags:
        yield Slide("gap", section, _lead(bold[0]), [])
    if "closing" in tags:
        yield Slide("closing", section, "".join(map(MARKDOWN.render, bold)), [])


def _blocks(source: str) -> list[tuple[str, str]]:
    """The parts of a Markdown text: "heading", "table", "text", and "bold" for a
    paragraph that begins bold.
    """
    lines = source.splitlines()
    found = []
    for token in MARKDOWN.parse(source):
        if token.level == 0 and token.map:
            text = "\n".join(lines[slice(*token.map)])
            kind = {"heading_open": "heading", "table_open": "table", "paragraph_open": "text"}.get(
                token.type, "other"
            )
            found.append(("bold" if kind == "text" and text.startswith("**") else kind, text))
    return found


def _from_outputs(cell: dict[str, Any], section: str, questions: Iterator[str]) -> Iterator[Slide]:
    """The slides of a cell of code: each picture and table that it drew, and the answers to `questions`."""
    for output in cell["outputs"]:
        text = "".join(output.get("data", {}).get("text/html", ""))
        has_controls = INVITATION in "".join(output.get("data", {}).get("text/plain", ""))
        caption = "<p class='small'>A picture: the controls move in the notebook.</p>" if has_controls else ""
        for drawn in DRAWN.findall(text):
            notes = [html.unescape(match[1])] if (match := re.search(r'alt="([^"]*)"', drawn)) else []
            kind = "figure" if drawn.startswith("<img") else "table"
            pieces = [drawn + caption] if kind == "figure" else _pieces(drawn)
            yield from (Slide(kind, section, piece, list(notes)) for piece in pieces)
        if answer := ANSWER.search(text):
            asked = f"<div class='small'>{next(questions, '')}</div>"
            yield Slide("answer", section, f"{asked}<p class='number'>{answer[1]}</p>", [])


def _pieces(table: str) -> list[str]:
    """A table in HTML, cut into as many as slides need: each has the caption, the header and some of the
    rows.
    """
    parts = list(PART.finditer(table))
    rows = [part[0] for part in parts if part["row"]]
    caption = "".join(part[0] for part in parts if not part["row"])
    head = rows.pop(0) if "<td" not in rows[0] else ""
    pieces: list[list[str]] = [[]]
    for row in rows:
        characters = sum(len(re.sub(r"<[^>]*>", "", kept)) for kept in [*pieces[-1], row])
        if pieces[-1] and (len(pieces[-1]) == MOST_ROWS or characters > MOST_CHARACTERS):
            pieces.append([])
        pieces[-1].append(row)
    return [
        f"<table>{caption}<thead>{head}</thead><tbody>{''.join(piece)}</tbody></table>" for piece in pieces
    ]


def _given(lines: Sequence[str]) -> str:
    """Output of a cell that asks for a guess, if it is short: it belongs to the question."""
    short = 0 < len(lines) <= 3 and max(map(len, lines)) <= 80
    return f"<p class='small'>{'<br>'.join(map(html.escape, lines))}</p>" if short else ""


def _lead(paragraph: str) -> str:
    """The first sentences of a paragraph, as HTML: as many as a slide has room for."""
    first, *others = SENTENCE_END.split(" ".join(paragraph.split()))
    for sentence in others:
        if len(first) + len(sentence) > LONGEST:
            break
        first = f"{first} {sentence}"
    return MARKDOWN.render(first)
