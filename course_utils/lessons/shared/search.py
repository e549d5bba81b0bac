"""Search over the course: `find("reserved memory")` in a notebook, `python3 -m course_utils find` in a terminal.

Lessons, exercises, glossary, cheat sheet, errata and quiz questions are read at each search, so no index can go stale.
Solutions, hints and the choices of a quiz are left out: a search must not give an answer away.
"""

import html
import json
import os
import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from urllib.parse import quote

from course_utils.errors import nearest
from course_utils.interactive.course_files import ROOT, notebooks

from .. import quiz

WORD = re.compile(r"\w+")
COMPOUND = re.compile(r"\w+(?:[-_]\w+)+")
HEADING = re.compile(r"^#{1,3} +(.+?) *$", re.MULTILINE)
HIDDEN = re.compile(r"^```.*?^```$|<details>.*?</details>", re.MULTILINE | re.DOTALL)
ANCHORED = re.compile(r'^<span id="([^"]+)"></span>\n\n## +(.+?) *$', re.MULTILINE)
PAGES = {"glossary": "docs/glossary.md", "cheat sheet": "docs/cheat_sheet.md", "errata": "docs/errata.md"}
SHOWN = 10
AROUND = 120
"""Characters of the line that is shown of each place."""

EVERYWHERE = 0.25
"""A word that a larger share of all sections has need not be in each place that is found."""

AGAIN = "The first click may only open a notebook; the second one then goes to the place in it."
"""JupyterLab 4.6 looks for the place before the notebook is there, unless it opens quickly. Drop this when it waits."""

made_quiz = cache(quiz)


@dataclass(frozen=True)
class Place:
    """The text under one heading. `kind` is "lesson", "exercises", "quiz" or the name of a page of docs/.

    `path` is from the course's folder, `fragment` what JupyterLab scrolls to after a "#", `page` the name of the whole
    ("lesson 05 · Activations"). `code` is searched as well, and never shown; `line` is the text around what was asked.
    """

    kind: str
    page: str
    heading: str
    path: str
    fragment: str
    text: str
    code: str = ""
    line: str = ""

    @property
    def name(self) -> str:
        """ "lesson 05 · Activations: The loss", or "glossary: Peak"."""
        same = self.page.endswith(f"· {self.heading.split('·', 1)[-1].strip()}")
        return self.page if same else f"{self.page}: {self.heading}"

    @property
    def opens(self) -> str:
        """The command or the file that leads there from a terminal."""
        return f"python3 -m course_utils quiz {int(Path(self.path).name[:2])}" if self.kind == "quiz" else self.path


@dataclass(frozen=True, repr=False)
class Findings:
    """Places found by a search, best first; drawn as a list of links, and in a terminal as lines."""

    asked: str
    places: Sequence[Place]
    root: Path
    hint: str = ""

    def __repr__(self) -> str:
        if not self.places:
            return f"Nothing has {self.asked!r}{self.hint}"
        count = "1 place has" if len(self.places) == 1 else f"{len(self.places)} places have"
        best = f", the best {SHOWN} first" if len(self.places) > SHOWN else ", the best first" * (len(self.places) > 1)
        return f"{count} {self.asked!r}{best}."

    def __str__(self) -> str:
        parts = [f"{place.name}\n    {place.line}\n    {place.opens}" for place in self.places[:SHOWN]]
        how = "Notebooks and pages open in JupyterLab, by its file browser: python3 -m course_utils lab."
        return "\n\n".join([repr(self), *parts, how] if parts else [repr(self)])

    def _repr_html_(self) -> str:
        """Links are relative to the folder that the kernel works in, which is the notebook's own."""
        rows = []
        for place in self.places[:SHOWN]:
            path = quote(Path(os.path.relpath(self.root / place.path)).as_posix())
            link = html.escape(f"{path}#{quote(place.fragment, safe='=')}")
            rows.append(f"<li><a href='{link}'>{html.escape(place.name)}</a><br>{html.escape(place.line)}</li>")
        return f"<p>{html.escape(repr(self))}</p>" + (f"<ol>{''.join(rows)}</ol><p>{AGAIN}</p>" if rows else "")


def find(*words: str, root: Path = ROOT) -> Findings:
    """Places in the course about `words`, best first; a word also finds those that begin with it, and its plural.

    A place has all the words, but for those that are nearly everywhere, as "memory" is in this course. Where nothing
    has a word, the finding names the nearest one that the course knows. Raises ValueError if no word is given.
    """
    asked = " ".join(words)
    wanted = list(dict.fromkeys(map(_stem, WORD.findall(asked.lower()))))
    if not wanted:
        raise ValueError("name what to look for, as in find('reserved memory')")
    patterns = [_pattern(word) for word in wanted]
    hits = {}
    for place in places(root):
        texts = [_lowered(text) for text in (place.heading, place.page, place.text, place.code)]
        hits[place] = [[_hits(pattern, text) for text in texts] for pattern in patterns]
    shares = [sum(map(any, found)) / len(hits) for found in zip(*hits.values(), strict=True)]
    required = [index for index, share in enumerate(shares) if share <= EVERYWHERE] or range(len(wanted))
    scores = {place: _score(place, found, shares) for place, found in hits.items()
              if all(any(found[index]) for index in required)}  # fmt: skip
    best = sorted(scores, key=lambda place: -scores[place])  # sections of equal score stay in the course's order
    found = [replace(place, line=_around(place.text, patterns)) for place in best]
    unknown = [word for word, share in zip(wanted, shares, strict=True) if not share]
    return Findings(asked, found, root, "" if found else _hint(unknown, len(wanted), hits))


def _pattern(word: str) -> re.Pattern[str]:
    """Matches the word, with group 1 if it is whole. A letter or two (h, K, GB) match themselves alone."""
    optional = "?" if len(word) > 2 else ""
    return re.compile(rf"(?<![^\W_]){re.escape(word)}(s?(?![^\W_])){optional}")


def _hits(pattern: re.Pattern[str], text: str) -> float:
    """1 for the word itself, less for one that begins with it, and a little more for each further mention."""
    found = [match[1] is not None for match in pattern.finditer(text)]
    return (1.0 if any(found) else 0.6 if found else 0.0) + 0.1 * min(len(found), 5)


def _score(place: Place, hits: Sequence[Sequence[float]], shares: Sequence[float]) -> float:
    """Points for each word, more for a rare one and in a heading; most for a heading that has what was asked alone."""
    weights = (16.0 if place.kind == "glossary" else 12.0, 4.0, 1.0, 0.5)  # heading, page, text, code
    points = sum((1 - share) * weight * hit for share, found in zip(shares, hits, strict=True)
                 for weight, hit in zip(weights, found, strict=True))  # fmt: skip
    exact = len(WORD.findall(place.heading)) <= len(hits) and all(found[0] for found in hits)
    return points + 24.0 * exact


def _lowered(text: str) -> str:
    """The text in lower case, with "micro-batch" also as "microbatch"."""
    lower = text.lower()
    return " ".join([lower, *(re.sub("[-_]", "", word) for word in COMPOUND.findall(lower))])


def _stem(word: str) -> str:
    """The word without its plural's ending, so that "gradients" finds "gradient accumulation"."""
    return re.sub(r"(?<=ch|sh|ss|.x)es$|(?<=\w\w\w)(?<!s)s$", "", word)


def _around(text: str, patterns: Sequence[re.Pattern[str]]) -> str:
    """About AROUND characters of `text`, where most of the words are close together."""
    lower, near = text.lower(), AROUND * 2 // 3
    starts = sorted(match.start() for pattern in patterns for match in pattern.finditer(lower))
    most = max(starts, key=lambda at: sum(bool(one.search(lower, at, at + near)) for one in patterns), default=0)
    start = text.find(" ", most - AROUND // 3) + 1 if most > AROUND // 3 else 0
    return "… " * (start > 0) + textwrap.shorten(text[start:], AROUND, placeholder=" …")


def _hint(unknown: Sequence[str], asked: int, pages: Iterable[Place]) -> str:
    """The words that the course has instead of unknown ones, or that the known ones never meet."""
    if not unknown:
        return " in one place: ask for fewer words."
    known = dict.fromkeys(word for text in ("heading", "text") for page in pages
                          for word in WORD.findall(getattr(page, text).lower()))  # fmt: skip
    meant = {word: nearest(word, known, 0.7) for word in unknown}
    said = [f"{other!r} for {word!r}" if asked > 1 else repr(other) for word, other in meant.items() if other]
    return f": did you mean {', '.join(said)}?" if said else ": try another word for it, or its first letters."


def places(root: Path) -> Iterator[Place]:
    """Everything in the course at `root` that can be searched, in the course's order."""
    for kind, name in PAGES.items():
        if (root / name).exists():
            _, *parts = ANCHORED.split((root / name).read_text(encoding="utf-8"))
            for anchor, heading, body in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
                yield Place(kind, kind, plain(heading), name, anchor, plain(body))
    for kind, folder in (("lesson", "notebooks"), ("exercises", "exercises")):
        for path in notebooks(root / folder):
            yield from _notebook(kind, path, root)


def _notebook(kind: str, path: Path, root: Path) -> Iterator[Place]:
    """A notebook's sections, one per heading; a lesson's code counts to the section that it is in."""
    number = int(path.name[:2]) if re.match(r"\d\d_", path.name) else 0
    name, found, title, page = path.relative_to(root).as_posix(), list[Place](), "", ""
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source, fragment = "".join(cell["source"]), f"cell-id={cell.get('id', '')}"
        if cell["cell_type"] == "markdown":
            before, *parts = HEADING.split(HIDDEN.sub("", source))
            if found:
                found[-1] = replace(found[-1], text=f"{found[-1].text} {plain(before)}")
            elif parts:
                title = plain(parts[0]).split("·", 1)[-1].strip()
                page = f"{kind} {path.name[:2]} · {title}" if path.name[0].isdigit() else f"notebook · {title}"
            for heading, body in zip(parts[::2], parts[1::2], strict=True):
                found.append(Place(kind, page, plain(heading), name, fragment, plain(body)))
        elif found and kind == "lesson":
            found[-1] = replace(found[-1], code=f"{found[-1].code}\n{source}")
            for count, one in enumerate(made_quiz(number).questions if f"quiz({number})" in source else (), start=1):
                yield Place(
                    "quiz", f"quiz {number:02d} · {title}", f"question {count}", name, fragment, plain(one.text)
                )
    yield from found


def plain(markdown: str) -> str:
    """Markdown as words on one line: no marks of emphasis, code, links, quotes or tables."""
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", markdown)
    text = re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", text)
    text = re.sub(r"^\|[-:| ]+\|$", "", text, flags=re.MULTILINE)
    text = re.sub(r"\*\*|`|(?<!\w)\*(?=\S)|(?<=\S)\*(?!\w)|^>+ ?|^\||\|$", "", text, flags=re.MULTILINE)
    return " ".join(text.split())
