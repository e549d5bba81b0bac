"""Does each term say what it is and where it is taught, and does each link lead to a term?"""

import re

from course_utils.authoring.build import ROOT, committed_notebooks
from course_utils.interactive.course_files import text_of

ENTRY = re.compile(
    r'^<span id="([^"]+)"></span>\n\n## (.+)\n(?:.+\n)+\n(?:Symbols? .+ · )?\[lesson (\d\d)\]\((.+)\)$', re.M
)
LINK = re.compile(r"\((?:\.\./)?(?:docs/)?glossary\.md#([^)]+)\)")
TEXT = (ROOT / "docs/glossary.md").read_text(encoding="utf-8")
ENTRIES = ENTRY.findall(TEXT)


def test_every_entry_has_an_anchor_and_a_lesson_that_links_back_to_it() -> None:
    assert len(ENTRIES) == len(re.findall(r"^## ", TEXT, re.MULTILINE)) >= 100
    for anchor, heading, number, path in ENTRIES:
        assert anchor == re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-"), "as the website calls it"
        assert path.startswith(f"../notebooks/{number}_"), heading
        linked = LINK.findall(text_of(ROOT / "docs" / path))
        assert anchor in linked, f"lesson {number} does not link {heading}"
    headings = [heading.lower() for _, heading, *_ in ENTRIES]
    assert headings == sorted(headings), "terms are in alphabetical order"


def test_every_link_leads_to_a_term() -> None:
    texts = [text_of(path) for path in committed_notebooks(ROOT, "notebooks")]
    texts += [path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md")]
    linked = {anchor for text in texts for anchor in LINK.findall(text)}
    assert linked <= {anchor for anchor, *_ in ENTRIES}
