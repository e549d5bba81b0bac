"""Does each term say what it is and where it is taught, and does each lesson link the terms that it uses?"""

import json
import re
from pathlib import Path

import pytest

from course_utils.authoring.build import ROOT, committed_notebooks

ENTRY = re.compile(
    r'^<span id="([^"]+)"></span>\n\n## (.+)\n((?:.+\n)+)\n((?:Symbols? .+ · )?)\[lesson'
    r" (\d\d)\]\((.+)\)$",
    re.M,
)
TEXT = (ROOT / "docs/glossary.md").read_text(encoding="utf-8")
ENTRIES = {anchor: entry for anchor, *entry in ENTRY.findall(TEXT)}
"""By anchor: heading, definition, symbols, number and path of the lesson."""

LINK = re.compile(r"\((?:\.\./)?(?:docs/)?glossary\.md#([^)]+)\)")
LESSONS = [path for path in committed_notebooks(ROOT, "notebooks") if path.name[:2].isdigit()]

ORDINARY = {
    *(
        "bias",
        "block",
        "bucket",
        "calibration",
        "checkpoint",
        "context",
        "data-sheet rate",
        "embedding",
        "for-loop",
    ),
    *(
        "fused",
        "gap",
        "gloo",
        "learned",
        "ledger",
        "nvlink",
        "peak",
        "plan",
        "quantization",
        "rank",
        "replica",
    ),
    *("reserve", "run", "segment", "shard", "storage", "temporaries", "vocabulary"),
}
"""Words that also mean something else, or that stand everywhere: linked in the lesson that teaches them."""

FROM_THE_START = {
    "activations",
    "gradients",
    "adam",
    "adamw",
    "gib",
    "optimizer states",
    "simulated gpu",
    "provenance",
}
"""Terms that lessons 00 and 01 link and that every later lesson takes for known."""


def markdown(path: Path) -> str:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")


def prose(text: str) -> str:
    """The paragraphs, without headings, tables, lists, code and links."""
    unread = re.compile(r"#|\||[-*+] |\d+\. |<|!\[|\*\*(Rem|Bre|Che)")
    blocks = [block for block in re.split(r"\n\s*\n", text) if not unread.match(block)]
    return re.sub(r"`[^`]*`|\[[^\]]*\]\([^)]*\)", "·", "\n\n".join(blocks))


def names(heading: str) -> list[str]:
    """The words that stand for a term: "Adam, AdamW" has two."""
    return [name for name in re.split(r", | and ", re.sub(r" \(.*\)", "", heading)) if len(name) > 2]


def test_every_entry_has_anchor_definition_and_lesson() -> None:
    assert len(ENTRIES) == len(re.findall(r"^## ", TEXT, re.MULTILINE)) >= 100
    for anchor, (heading, said, _, number, path) in ENTRIES.items():
        assert anchor == re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-"), "as the website calls it"
        assert said.strip().endswith((".", ")")), heading
        assert path.startswith(f"../notebooks/{number}_") and (ROOT / "docs" / path).exists(), heading
    headings = [heading.lower() for heading, *_ in ENTRIES.values()]
    assert headings == sorted(headings), "terms are in alphabetical order"


@pytest.mark.parametrize("anchor", ENTRIES)
def test_the_lesson_that_teaches_a_term_links_back_to_it(anchor: str) -> None:
    heading, _, symbol, number, path = ENTRIES[anchor]
    text = markdown(ROOT / "docs" / path)
    assert anchor in LINK.findall(text), f"lesson {number} does not link {heading}"
    for name in re.split(r", |·", symbol.removesuffix(" · ").partition(" ")[2]):
        assert name in text + TEXT, f"{heading} has a symbol {name} that nobody uses"


@pytest.mark.parametrize(
    "path", [*LESSONS, *sorted((ROOT / "docs").glob("*.md"))], ids=lambda path: path.stem
)
def test_every_link_leads_to_a_term(path: Path) -> None:
    text = markdown(path) if path.suffix == ".ipynb" else path.read_text(encoding="utf-8")
    assert set(LINK.findall(text)) <= set(ENTRIES)


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_a_lesson_links_the_terms_that_it_uses(path: Path) -> None:
    """Write `[term](../docs/glossary.md#anchor)`, the glossary's anchor, where the lesson first uses it."""
    text = markdown(path)
    linked = set(LINK.findall(text))
    words = prose(text)
    missing: list[str] = []
    for anchor, (heading, *_) in ENTRIES.items():
        if anchor in linked:
            continue
        for name in names(heading):
            if name.lower() in ORDINARY | FROM_THE_START:
                continue
            case = 0 if name == "ZeRO" else re.IGNORECASE  # "zero" is a word, too
            if re.search(rf"(?<![\w/-]){re.escape(name)}(?![\w-])", words, case):
                missing.append(f"#{anchor}")
    assert missing == []
