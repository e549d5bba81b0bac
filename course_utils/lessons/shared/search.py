"""Search over the course: `find("reserved memory")` in a notebook, `python3 -m course_utils find` in a terminal."""

import html
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from course_utils.errors import nearest
from course_utils.interactive.course_files import ROOT

from .searchable import Section, sections

WORD = re.compile(r"\w+")
COMPOUND = re.compile(r"\w+(?:[-_]\w+)+")
SHOWN = 10
EVERYWHERE = 0.25
"""The share of all sections beyond which a word need not be in each place that is found."""

AGAIN = "The first click may only open a notebook; the second one then goes to the place in it."
"""JupyterLab 4.6 looks for the place before the notebook is there, unless it opens quickly. Drop this when it waits."""

ALIKE = 0.7
"""How much a word that the course has must be like one that it has not, to be suggested for it."""

AROUND = 120
"""Characters of the line that is shown of each place."""

IN_TERM, IN_HEADING, IN_PAGE, IN_TEXT, IN_CODE = 16.0, 12.0, 4.0, 1.0, 0.5
"""What a word counts for where it stands: a term of the glossary or a heading outweighs any number of mentions."""


@dataclass(frozen=True)
class Place:
    """A section that answers, how well (more is better), and its text around the words asked for."""

    section: Section
    score: float
    line: str

    @property
    def name(self) -> str:
        """ "lesson 05 · Activations: The loss", or "glossary: Peak"."""
        same = self.section.page.endswith(f"· {self.section.heading.split('·', 1)[-1].strip()}")
        return self.section.page if same else f"{self.section.page}: {self.section.heading}"

    @property
    def opens(self) -> str:
        """How to get there from a terminal."""
        if self.section.kind == "quiz":
            return f"python3 -m course_utils quiz {int(Path(self.section.path).name[:2])}"
        return self.section.path


@dataclass(frozen=True, repr=False)
class Findings:
    """What a search found, best first; shows itself as a list of links, and in a terminal as lines."""

    asked: str
    places: tuple[Place, ...]
    root: Path
    hint: str = ""

    @property
    def summary(self) -> str:
        """One sentence: how many places, or what to ask for instead."""
        if not self.places:
            return f"Nothing has {self.asked!r}{self.hint}"
        count = "1 place has" if len(self.places) == 1 else f"{len(self.places)} places have"
        best = f", the best {SHOWN} first" if len(self.places) > SHOWN else ", the best first" * (len(self.places) > 1)
        return f"{count} {self.asked!r}{best}."

    def __str__(self) -> str:
        if not self.places:
            return self.summary
        parts = [f"{place.name}\n    {place.line}\n    {place.opens}" for place in self.places[:SHOWN]]
        how = "Notebooks and pages open in JupyterLab, by its file browser: python3 -m course_utils lab."
        return "\n\n".join([self.summary, *parts, how])

    def __repr__(self) -> str:
        return self.summary

    def _repr_html_(self) -> str:
        """Links are relative to the folder that the kernel works in, which is the notebook's own."""
        rows = "".join(
            f"<li><a href='{html.escape(self._link(place), quote=True)}'>{html.escape(place.name)}</a><br>"
            f"{html.escape(place.line)}</li>"
            for place in self.places[:SHOWN]
        )
        listed = f"<ol>{rows}</ol><p>{AGAIN}</p>" if rows else ""
        return f"<p>{html.escape(self.summary)}</p>{listed}"

    def _link(self, place: Place) -> str:
        path = Path(os.path.relpath(self.root / place.section.path)).as_posix()
        return f"{quote(path)}#{quote(place.section.fragment, safe='=')}"


def find(*words: str, root: Path = ROOT) -> Findings:
    """Where the course speaks of `words`; a word also stands for those that begin with it, and for its plural.

    Lessons, exercises, glossary, cheat sheet, errata and the questions of quizzes are searched; no solution, hint or
    answer is. A place has all the words, but for those that are nearly everywhere, as "memory" is in this course. Where
    nothing has a word, the finding names the nearest one that the course knows. Raises ValueError if no word is given.
    """
    asked = " ".join(words)
    wanted = list(dict.fromkeys(_stem(word) for word in WORD.findall(asked.lower())))
    if not wanted:
        raise ValueError("name what to look for, as in find('reserved memory')")
    pages = [_Page(section) for section in sections(root)]
    terms = [_Term(word, pages) for word in wanted]
    required = [term for term in terms if not term.is_everywhere] or terms
    found = [page for page in pages if all(term.begun.search(page.everything) for term in required)]
    places = [Place(page.section, page.score(terms), _around(page.section.text, terms)) for page in found]
    places.sort(key=lambda place: -place.score)  # sections of equal score stay in the course's order
    return Findings(asked, tuple(places), root, "" if places else _hint(terms, pages))


class _Page:
    """A section in lower case, by where it stands and as a whole; "micro-batch" is there as "microbatch", too."""

    def __init__(self, section: Section) -> None:
        self.section = section
        texts = [_lowered(text) for text in (section.heading, section.page, section.text, section.code)]
        in_heading = IN_TERM if section.kind == "glossary" else IN_HEADING
        self.fields = tuple(zip((in_heading, IN_PAGE, IN_TEXT, IN_CODE), texts, strict=True))
        self.everything = "\n".join(texts)

    def score(self, terms: list["_Term"]) -> float:
        """What each word counts for where it stands, more if it is rare; and more still for a heading that says what
        was asked and no more, and for words that stand side by side.
        """
        score = sum(weight * term.rarity * term.hits(text) for term in terms for weight, text in self.fields)
        heading, text = self.section.heading.lower(), self.section.text.lower()
        if len(WORD.findall(heading)) <= len(terms) and all(term.begun.search(heading) for term in terms):
            score += 2 * IN_HEADING
        together = r"\w*\W+".join(re.escape(term.word) for term in terms)
        return score + (IN_PAGE if len(terms) > 1 and re.search(together, text) else 0.0)


def _lowered(text: str) -> str:
    """The text in lower case, and once more what a hyphen or an underscore joins, without it."""
    lower = text.lower()
    return " ".join([lower, *(re.sub("[-_]", "", match[0]) for match in COMPOUND.finditer(lower))])


class _Term:
    """A word that is looked for. A letter or two (h, K, GB) stand for themselves alone, longer ones for beginnings."""

    def __init__(self, word: str, pages: Sequence[_Page]) -> None:
        self.word = word
        start, end = r"(?<![^\W_])", r"(?![^\W_])"
        self.whole = re.compile(f"{start}{re.escape(word)}s?{end}")
        self.begun = re.compile(f"{start}{re.escape(word)}") if len(word) > 2 else self.whole
        self.share = sum(self.begun.search(page.everything) is not None for page in pages) / len(pages)

    @property
    def is_everywhere(self) -> bool:
        """Whether so many sections have the word that it tells little."""
        return self.share > EVERYWHERE

    @property
    def rarity(self) -> float:
        """1 for a word that hardly any section has, towards 0 for one that all have."""
        return 1 - self.share

    def hits(self, text: str) -> float:
        """1 for the word itself, less for one that begins with it, and a little more for each further mention."""
        begun = len(self.begun.findall(text))
        return (1.0 if begun and self.whole.search(text) else 0.6 if begun else 0.0) + 0.1 * min(begun, 5)


def _around(text: str, terms: list[_Term]) -> str:
    """The stretch of `text` that has most of the words, the earliest such."""
    lower = text.lower()
    starts = sorted((match.start(), term.word) for term in terms for match in term.begun.finditer(lower))
    if not starts:
        return _shortened(text, 0)
    near = AROUND * 2 // 3
    kinds = [len({word for other, word in starts if start <= other < start + near}) for start, _ in starts]
    return _shortened(text, max(starts[kinds.index(max(kinds))][0] - AROUND // 3, 0))


def _shortened(text: str, start: int) -> str:
    """About AROUND characters of `text` from `start` on, whole words, with … where something is left out."""
    start = text.find(" ", start) + 1 if start else 0
    end = len(text) if len(text) <= start + AROUND else text.rfind(" ", start, start + AROUND)
    return ("… " if start else "") + text[start:end] + (" …" if end < len(text) else "")


def _stem(word: str) -> str:
    """The word without its plural's ending, so that "gradients" finds "gradient accumulation"."""
    if len(word) > 5 and word.endswith(("ches", "shes", "sses", "xes")):
        return word[:-2]
    return word[:-1] if len(word) > 3 and word.endswith("s") and not word.endswith("ss") else word


def _hint(terms: list[_Term], pages: list[_Page]) -> str:
    """The words that the course has instead of unknown ones, or that the known ones never meet."""
    unknown = [term.word for term in terms if not term.share]
    if not unknown:
        return " in one place: ask for fewer words."
    heads = sorted({word for page in pages for word in WORD.findall(page.section.heading.lower())})
    known = sorted({word for page in pages for word in WORD.findall(page.everything)})
    meant = [nearest(word, heads, ALIKE) or nearest(word, known, ALIKE) for word in unknown]
    said = [f"{other!r} for {word!r}" if len(terms) > 1 else repr(other)
            for word, other in zip(unknown, meant, strict=True) if other]  # fmt: skip
    return f": did you mean {', '.join(said)}?" if said else ": try another word for it, or its first letters."
