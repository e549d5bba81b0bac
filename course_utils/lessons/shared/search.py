"""Search over the course: `find("reserved memory")` or, in a terminal, `python3 -m course_utils find`.

Lessons, exercises, quiz questions, glossary, cheat sheet, errata and the page of questions are read at each
search, so no index can go stale. Solutions, hints and the choices of a quiz are left out: a search must not
give an answer away.

SQLite's FTS5 was tried in place of `_score`, with the same rule for exact headings. Asked for each of 249
headings of lessons it puts 178 first, where this puts 191; for `max_memory_allocated` it names an exercise
before lesson 01.
"""

import html
import json
import os
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from urllib.parse import quote

from ...errors import nearest
from ...interactive.course_files import ROOT, notebooks, number_of
from .. import quiz

WORD = re.compile(r"\w+")
COMPOUND = re.compile(r"\w+(?:[-_]\w+)+")
HEADING = re.compile(r"^#{1,3} +(.+?) *$", re.MULTILINE)
QUESTION = re.compile(r"^### +(.+?) *$", re.MULTILINE)
HIDDEN = re.compile(r"^```.*?^```$|<details>.*?</details>", re.MULTILINE | re.DOTALL)
ANCHORED = re.compile(r'^<span id="([^"]+)"></span>\n\n## +(.+?) *$', re.MULTILINE)
PAGES = {"glossary": "docs/glossary.md", "cheat sheet": "docs/cheat_sheet.md", "errata": "docs/errata.md"}
QUESTIONS = "docs/questions.md"
SHOWN = 10

# JupyterLab 4.6 looks for the place before the notebook is there, unless it opens quickly.
AGAIN = "The first click may only open a notebook; the second one then goes to the place in it."

made_quiz = cache(quiz)


@dataclass(frozen=True)
class Place:
    """The text under one heading, or a question of a quiz.

    `kind` is "lesson", "exercises", "quiz", "question" or a page of docs/; `name` is "glossary: Peak", or
    "lesson 05 · Activations: The loss"; `fragment` is what JupyterLab scrolls to after a "#"; `code` is
    searched as well, and never shown; `line` is the text around what was asked, or how an answer begins.
    """

    kind: str
    name: str
    heading: str
    path: Path
    fragment: str
    text: str
    code: str = ""
    line: str = ""


@dataclass(frozen=True, repr=False)
class Findings:
    """Places found by a search, best first; drawn as a list of links, and in a terminal as lines."""

    asked: str
    places: Sequence[Place]
    hint: str = ""

    def __repr__(self) -> str:
        if not self.places:
            return f"Nothing has {self.asked!r}: {self.hint}"
        return f"Places with {self.asked!r}: {len(self.places)}, the best first."

    def __str__(self) -> str:
        parts = [
            f"{one.name}\n    {one.line}\n    {os.path.relpath(one.path)}" for one in self.places[:SHOWN]
        ]
        if parts:
            parts.append("Notebooks and pages open in JupyterLab: python3 -m course_utils lab.")
        return "\n\n".join([repr(self), *parts])

    def _repr_html_(self) -> str:
        """Links are relative to the folder that the kernel works in, which is the notebook's own."""
        rows = []
        for place in self.places[:SHOWN]:
            path = quote(Path(os.path.relpath(place.path)).as_posix())
            link = html.escape(f"{path}#{quote(place.fragment, safe='=')}")
            rows.append(
                f"<li><a href='{link}'>{html.escape(place.name)}</a><br>{html.escape(place.line)}</li>"
            )
        drawn = f"<p>{html.escape(repr(self))}</p>"
        if rows:
            drawn += f"<ol>{''.join(rows)}</ol><p>{AGAIN}</p>"
        return drawn


def find(*words: str, root: Path = ROOT) -> Findings:
    """Places in the course about `words`, best first; a word also finds longer ones and its plural.

    A place has all the words, but for those that over a quarter of the sections have, as "memory". Where
    nothing is found, the hint names the nearest words that the course knows. Raises ValueError if no word is
    given.
    """
    asked = " ".join(words)
    course = list(places(root))
    wanted = list(dict.fromkeys(WORD.findall(asked.lower())))
    if not wanted:
        raise ValueError("name what to look for, as in find('reserved memory')")
    patterns = [_pattern(word) for word in wanted]
    # for each place, word and text of the place: how often
    mentions = [
        [[len(pattern.findall(text)) for text in _texts(place)] for pattern in patterns] for place in course
    ]
    # for each word, the part of all places that have it
    shares = [sum(map(any, found)) / len(course) for found in zip(*mentions, strict=True)]
    required = [index for index, share in enumerate(shares) if share <= 0.25] or range(len(wanted))
    scores = {
        place: _score(place, found, shares)
        for place, found in zip(course, mentions, strict=True)
        if all(any(found[index]) for index in required)
    }
    if scores:
        # sections of equal score stay in the course's order
        best = sorted(scores, key=lambda place: -scores[place])
        return Findings(asked, [replace(one, line=one.line or _around(one.text, patterns)) for one in best])
    unknown = [word for word, share in zip(wanted, shares, strict=True) if not share]
    return Findings(asked, [], _hint(course, unknown))


def _hint(course: Sequence[Place], unknown: Sequence[str]) -> str:
    """A sentence on what to try instead of words that no place has."""
    known = dict.fromkeys(
        word for place in course for word in WORD.findall(f"{place.heading} {place.text}".lower())
    )
    meant = [nearest(word, known, 0.7) for word in unknown]
    likely = " and ".join(repr(word) for word in meant if word)
    return f"did you mean {likely}?" if likely else "try fewer words, or others."


def _pattern(word: str) -> re.Pattern[str]:
    """Matches words that begin with this one, or its singular; a letter or two (h, K, GB) only themselves."""
    singular = re.sub(r"(?<=ch|sh|ss|.x)es$|(?<=\w\w\w)(?<!s)s$", "", word)
    # `[^\W_]` is a letter or digit: an underscore ends a word here, so that "cuda" finds `torch_cuda`
    pattern = rf"(?<![^\W_]){singular}"
    if len(word) <= 2:
        pattern += r"(?![^\W_])"
    return re.compile(pattern)


def _texts(place: Place) -> list[str]:
    """The searched texts of a place, in lower case, with "micro-batch" also as "microbatch"."""
    lower = [text.lower() for text in (place.heading, place.name, place.text, place.code)]
    searched = []
    for text in lower:
        joined = [re.sub("[-_]", "", word) for word in COMPOUND.findall(text)]
        searched.append(" ".join([text, *joined]))
    return searched


def _score(place: Place, mentions: Sequence[Sequence[int]], shares: Sequence[float]) -> float:
    """Points for each word, more for a rare one and in a heading; most for a heading of just these words."""
    weights = (16.0 if place.kind == "glossary" else 12.0, 4.0, 1.0, 0.5)  # heading, name, text, code
    points = sum(
        (1 - share) * weight * (1 + 0.1 * min(count, 5))
        for share, found in zip(shares, mentions, strict=True)
        for weight, count in zip(weights, found, strict=True)
        if count
    )
    if len(WORD.findall(place.heading)) <= len(mentions) and all(found[0] for found in mentions):
        points += 24.0
    return points


def _around(text: str, patterns: Sequence[re.Pattern[str]]) -> str:
    """About 120 characters of `text`, from a little before the first of the words on."""
    found = min((match.start() for one in patterns for match in one.finditer(text.lower())), default=0)
    start = text.find(" ", found - 40) + 1 if found > 40 else 0
    shortened = textwrap.shorten(text[start:], 120, placeholder=" …")
    return f"… {shortened}" if start > 0 else shortened


def places(root: Path) -> Iterator[Place]:
    """Everything in the course at `root` that can be searched, in the course's order."""
    for kind, name in PAGES.items():
        if (root / name).exists():
            _, *parts = ANCHORED.split((root / name).read_text(encoding="utf-8"))
            # split gives, after what is before the first heading, anchor, heading and body by turns
            for anchor, marked, body in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
                heading = plain(marked)
                yield Place(kind, f"{kind}: {heading}", heading, root / name, anchor, plain(body))
    yield from _questions(root / QUESTIONS)
    for kind, folder in (("lesson", "notebooks"), ("exercises", "exercises")):
        for path in notebooks(root / folder):
            yield from _notebook(kind, path)


def _questions(path: Path) -> Iterator[Place]:
    """The questions that people ask, with their answers; none if there is no such page."""
    if not path.exists():
        return
    _, *parts = QUESTION.split(path.read_text(encoding="utf-8"))
    for asked, body in zip(parts[::2], parts[1::2], strict=True):
        answer, _, _ = body.partition("\n## ")  # the next group of questions
        text = plain(HIDDEN.sub("", answer))
        fragment = asked.replace(" ", "-")  # as JupyterLab makes it from a heading
        begins = textwrap.shorten(text, 120, placeholder=" …")
        yield Place("question", f"question: {asked}", asked, path, fragment, text, line=begins)


def _notebook(kind: str, path: Path) -> Iterator[Place]:
    """A notebook's sections, one per heading, a lesson's with their code; and the questions of its quiz."""
    label = f"{kind} {number_of(path)}" if path.name[0].isdigit() else "notebook"
    page = ""
    found = list[Place]()
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        fragment = f"cell-id={cell.get('id', '')}"
        if cell["cell_type"] == "markdown":
            before, *parts = HEADING.split(HIDDEN.sub("", source))
            if found:  # a cell without a heading, or with text above it, goes on with the last section
                found[-1] = replace(found[-1], text=f"{found[-1].text} {plain(before)}")
            for heading, body in zip(map(plain, parts[::2]), map(plain, parts[1::2]), strict=True):
                name = f"{page}: {heading}" if page else f"{label} · {heading.split('·', 1)[-1].strip()}"
                page = page or name
                found.append(Place(kind, name, heading, path, fragment, body))
        elif found and kind == "lesson":
            found[-1] = replace(found[-1], code=f"{found[-1].code}\n{source}")
            asked = re.search(r"^quiz\((\d+)\)$", source, re.MULTILINE)
            questions = made_quiz(int(asked[1])).questions if asked else ()
            for count, one in enumerate(questions, start=1):
                name = f"{page.replace('lesson', 'quiz', 1)}: question {count}"
                yield Place("quiz", name, "", path, fragment, plain(one.text))
    yield from found


def plain(markdown: str) -> str:
    """Markdown as words on one line: no images, and no marks of emphasis, code, links, quotes or tables."""
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)|\[([^\]]+)\]\([^)]+\)", r"\1", markdown)
    marks = r"^\|[-:| ]+\|$|\*\*|`|(?<!\w)\*(?=\S)|(?<=\S)\*(?!\w)|^>+ ?|^\||\|$"
    return " ".join(re.sub(marks, "", text, flags=re.MULTILINE).split())
