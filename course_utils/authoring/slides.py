"""`python3 -m course_utils slides 05 --out slides`: a lesson as slides, from the notebook as it was executed.

One file a lesson, with its pictures, style and script inside: it needs no network. A slide is one step of the lesson:
a question, what a cell drew, an answer, the gap. The lesson's whole prose goes with them, as notes for whoever speaks.
"""

import argparse
import ast
import html
import json
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt

from ..interactive.course_files import ROOT, numbered
from ..recording.notebooks import BuildError

PAGE = Path(__file__).with_name("slides_page.html")
MARKDOWN = MarkdownIt("commonmark").enable("table")

TITLE = re.compile(r"# (\d\d · .+)")
MINUTES = re.compile(r"\*\*(\d+ minutes)\.?\*\*")
HEADING = re.compile(r"^##+ (.+)$", re.MULTILINE)
GUESS = re.compile(r"\*\*Your guess")
GAP = re.compile(r"\*\*The gap")
CLOSING = re.compile(r"\*\*(?:Remember|Breaks when|Cheat-sheet line)\*\*")
TABLE = re.compile(r"^\|.+(?:\n\|.+)+", re.MULTILINE)
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\([^)]+\)")
DRAWN = re.compile(r"<img\b[^>]*>|<table\b.*?</table>", re.DOTALL)
ANSWER = re.compile(r"<p>(It is .+?)(?: You locked no guess.*)?</p>", re.DOTALL)
SENTENCE_END = re.compile(r"(?<=[.?!:])\s+(?=[A-Z“*`])")

TAG = re.compile(r"<[^>]*>")
ROW = re.compile(r"<tr\b.*?</tr>", re.DOTALL)
CAPTION = re.compile(r"<caption\b.*?</caption>", re.DOTALL)
KEY = r'\(\s*"([^"]+)"'

INVITATION = ": run this cell to "
"""What the stored text of something with controls says, as "Explorer of training runs: run this cell to use it"."""

NUMBER = "<p class='number'>"

LONGEST = 300
"""Letters of prose on a slide; at least one sentence is shown, however long. The rest is in the notes."""

MOST_ROWS = 11
MOST_LETTERS = 900
"""What a slide has room for of a table; a longer one goes on, under its header, on the next slide."""


@dataclass
class Slide:
    """One step: its kind, the section that it is in, what it shows (HTML), and what is said meanwhile (Markdown)."""

    kind: str
    section: str
    body: str
    notes: list[str]


def main(arguments: Sequence[str]) -> int:
    """Write the slides of the lessons named, or of all; 1, in words, for a lesson that is not there."""
    told = "A lesson as slides, from the notebook as it was executed: one file a lesson, which needs no network."
    parser = argparse.ArgumentParser(prog="python3 -m course_utils slides", description=told)
    parser.add_argument("lessons", nargs="*", help="lessons by number, as 05; all of them without")
    parser.add_argument("--out", type=Path, default=Path("slides"), help="folder for the slides (default: slides)")
    options = parser.parse_args(arguments)
    try:
        for path in write(options.out, options.lessons):
            print(f"{path}: open it in a browser. Space or → goes on, N shows the notes, S opens them in a window.")
    except (BuildError, OSError) as problem:
        print(problem, file=sys.stderr)
        return 1
    return 0


def write(out: Path, lessons: Iterable[str] = (), root: Path = ROOT) -> list[Path]:
    """Write one page of slides a lesson to `out` and return their paths. BuildError for a lesson that is not there."""
    known = {path.name[:2]: path for path in numbered(root / "notebooks")}
    wanted = [name.zfill(2) for name in lessons] or list(known)
    missing = [name for name in wanted if name not in known]
    if missing:
        raise BuildError(f"no lesson is called {missing[0]!r}; known: {', '.join(known)}")
    pages = {out / f"{known[name].stem}.html": page(known[name]) for name in wanted}
    out.mkdir(parents=True, exist_ok=True)
    for path, text in pages.items():
        path.write_text(text, encoding="utf-8", newline="\n")
    return list(pages)


def page(notebook: Path) -> str:
    """The slides of a lesson as one page of HTML. BuildError for a notebook that begins without number and title."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    title = TITLE.match("".join(cells[0]["source"]))
    if title is None:
        raise BuildError(f"{notebook.name} does not begin with its number and title")
    made = slides(cells)
    shown = "\n".join(_section(slide, title[1], number, len(made)) for number, slide in enumerate(made, start=1))
    return PAGE.read_text(encoding="utf-8").replace("{{TITLE}}", html.escape(title[1])).replace("{{SLIDES}}", shown)


def _section(slide: Slide, title: str, number: int, count: int) -> str:
    above = html.escape(title if slide.kind == "title" else f"{title} — {slide.section}")
    notes = "".join(MARKDOWN.render(_unlinked(text)) for text in slide.notes)
    return (
        f'<section class="{slide.kind}" id="s{number}" aria-label="{number} of {count}">'
        f'<header>{above}</header><div class="body">{slide.body}</div>'
        f'<footer>{number} / {count}</footer><aside class="notes">{notes}</aside></section>'
    )


def slides(cells: Iterable[dict[str, Any]]) -> list[Slide]:
    """The steps of a lesson in its own order. Every cell of text is in the notes of one of them, and of one only."""
    made: list[Slide] = []
    section, guess = "", ""
    asked: dict[str, str] = {}  # the guess that each predict() asked for, for the slide with its answer
    for cell in cells:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            heading = re.match(r"## (.+)", source)
            section = heading[1] if heading else section
            guess = _guess(source) or guess
            added = list(_from_text(source, section, first=not made))
            (added or made)[0 if added else -1].notes.append(source)
        else:
            predicted = re.findall(rf"\bpredict{KEY}", source)
            asked |= dict.fromkeys(predicted, guess)
            if predicted and made[-1].kind == "question":
                made[-1].body += _given(cell)
            questions = [asked.get(key, "") for key in re.findall(rf"\breveal{KEY}", source)]
            added = list(_from_outputs(cell, section, iter(questions)))
            made[-1].notes += _printed(cell)
        made += added
    return _joined(made)


def _joined(made: Iterable[Slide]) -> list[Slide]:
    """The same steps, with answers to one question on one slide."""
    joined: list[Slide] = []
    for slide in made:
        question, mark, answer = slide.body.partition(NUMBER)
        if slide.kind == "answer" and joined and joined[-1].body.startswith(question + mark):
            joined[-1].body += mark + answer
            joined[-1].notes += slide.notes
        else:
            joined.append(slide)
    return joined


def _from_text(source: str, section: str, first: bool) -> Iterator[Slide]:
    """What a cell of text puts on the screen: the title, a heading or a guess, a table, the gap, what to remember."""
    prose = [part for part in re.split(r"\n\s*\n", HEADING.sub("", source)) if part.strip()]
    heading = HEADING.search(source)
    guess = next((part for part in prose if GUESS.search(part)), "")
    if first:
        minutes = MINUTES.search(source)
        note = f"<p class='small'>{minutes[1]}</p>" if minutes else ""
        yield Slide("title", section, f"<h1>{_inline(source.splitlines()[0][2:])}</h1>{note}{_lead(prose[-1])}", [])
    elif guess or source.startswith("## "):
        body = _rendered(guess) if guess else _lead(_opening(prose))
        yield Slide("question", section, f"<h2>{_inline(heading[1] if heading else section)}</h2>{body}", [])
    for table in TABLE.finditer(source):
        yield from (Slide("table", section, piece, []) for piece in _pieces(_rendered(table[0])))
    for part in prose:
        if GAP.match(part):
            yield Slide("gap", section, _lead(part), [])
    closing = "".join(_rendered(part) for part in prose if CLOSING.match(part))
    if closing:
        yield Slide("closing", section, closing, [])


def _opening(prose: list[str]) -> str:
    """The first paragraph of plain text, if there is one."""
    return next((part for part in prose if not re.match(r"[|`$<\-]|\*\*The gap", part)), "")


def _guess(source: str) -> str:
    """The guess that a text asks for, without what stands before it, as HTML; empty where it asks for none."""
    match = re.search(r"\*\*Your guess.*?\*\*(.+?)(?:\n\s*\n|\Z)", source, re.DOTALL)
    return _rendered(match[1].strip()) if match else ""


def _from_outputs(cell: dict[str, Any], section: str, questions: Iterator[str]) -> Iterator[Slide]:
    """What a cell of code puts on the screen: each picture and table that it drew, and the answers to `questions`."""
    for output in cell["outputs"]:
        text = "".join(output.get("data", {}).get("text/html", ""))
        has_controls = INVITATION in "".join(output.get("data", {}).get("text/plain", ""))
        caption = _chosen("".join(cell["source"])) if has_controls else ""
        for drawn in DRAWN.findall(text):
            notes = [html.unescape(match[1])] if (match := re.search(r'alt="([^"]*)"', drawn)) else []
            kind = "figure" if drawn.startswith("<img") else "table"
            pieces = [drawn + caption] if kind == "figure" else _pieces(drawn)
            yield from (Slide(kind, section, piece, list(notes)) for piece in pieces)
        answer = ANSWER.fullmatch(text)
        if answer:
            asked = f"<div class='small'>{next(questions, '')}</div>"
            yield Slide("answer", section, f"{asked}{NUMBER}{answer[1]}</p>", [])


def _chosen(source: str) -> str:
    """One line under the picture of something with controls: that it is a picture, and what was chosen for it."""
    call = ast.get_source_segment(source, ast.parse(source).body[-1]) or ""
    chosen = html.escape(" ".join(call.split()))
    return f"<p class='small'>A picture: the controls move in the notebook. Chosen: <code>{chosen}</code></p>"


def _pieces(table: str) -> list[str]:
    """A table in HTML, cut into as many as slides need: each has the caption, the header and some of the rows."""
    rows = ROW.findall(table)
    head = rows.pop(0) if "<td" not in rows[0] else ""
    pieces: list[list[str]] = [[]]
    for row in rows:
        letters = sum(len(TAG.sub("", kept)) for kept in [*pieces[-1], row])
        if pieces[-1] and (len(pieces[-1]) == MOST_ROWS or letters > MOST_LETTERS):
            pieces.append([])
        pieces[-1].append(row)
    caption = "".join(CAPTION.findall(table))
    return [f"<table>{caption}<thead>{head}</thead><tbody>{''.join(piece)}</tbody></table>" for piece in pieces]


def _printed(cell: dict[str, Any]) -> list[str]:
    """What a cell printed, for the notes."""
    text = _stdout(cell)
    return [f"Printed:\n\n```\n{text}\n```"] if text.strip() else []


def _given(cell: dict[str, Any]) -> str:
    """What a cell that asks for a guess printed to start from, if it is short: it belongs to the question."""
    lines = _stdout(cell).splitlines()
    short = 0 < len(lines) <= 3 and max(map(len, lines)) <= 80
    return f"<p class='small'>{'<br>'.join(map(html.escape, lines))}</p>" if short else ""


def _stdout(cell: dict[str, Any]) -> str:
    return "".join(
        "".join(output.get("text", "")) for output in cell["outputs"] if output.get("name") == "stdout"
    ).rstrip()


def _lead(paragraph: str) -> str:
    """The first sentences of a paragraph, as HTML: as many as a slide has room for."""
    first, *others = SENTENCE_END.split(" ".join(paragraph.split()))
    for sentence in others:
        if len(first) + len(sentence) > LONGEST:
            break
        first = f"{first} {sentence}"
    return _rendered(first)


def _rendered(text: str) -> str:
    return MARKDOWN.render(_unlinked(text))


def _inline(text: str) -> str:
    return MARKDOWN.renderInline(_unlinked(text))


def _unlinked(text: str) -> str:
    """The text with the words of its links alone: what they lead to is not on a stage."""
    return LINK.sub(r"\1", text)
