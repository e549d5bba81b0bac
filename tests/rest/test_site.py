"""Is the website made without a warning, complete, light, and usable by everybody, with no network?"""

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from browser import browser_page, violations
from explorer_page import need_pyodide
from needs import need
from playwright.sync_api import Page

from course_utils.authoring.site import make
from course_utils.interactive.course_files import numbered
from course_utils.lessons.shared.cheat_sheet import ROOT

need("furo", "latex2mathml", "myst_nb", "sphinx")

HEAVIEST = 2_000_000
LOADED = {"img": "src", "script": "src", "link": "href", "iframe": "src", "source": "src"}
LOOKED_AT = ["docs/index.html", "notebooks/00_start_here.html", "exercises/03_mixed_precision.html"]
"""One page of each kind, the smallest, for the accessibility checker: it reads each element of a page."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The website; making it fails for any warning of Sphinx, such as a link or anchor that leads nowhere."""
    need_pyodide()
    return make(tmp_path_factory.mktemp("site") / "pages")


class Read(HTMLParser):
    """What a page loads and links to, the names that links may end in, and its pictures without words."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.links: list[str] = []
        self.names: set[str] = set()
        self.mute = 0
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        address = found.get(LOADED.get(tag, ""))
        if address:
            self.loads.append(address)
        if tag == "a" and found.get("href"):
            self.links.append(found["href"] or "")
        self.names |= {name for name in (found.get("id"), found.get("name")) if name}
        if tag == "img" and len(found.get("alt") or "") < 20:
            self.mute += 1


@pytest.fixture(scope="module")
def read(site: Path) -> dict[Path, Read]:
    return {path.resolve(): Read(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")}


def test_every_lesson_and_its_exercises_have_a_page(site: Path) -> None:
    for folder in ("notebooks", "exercises"):
        for path in numbered(ROOT / folder):
            assert (site / folder / f"{path.stem}.html").exists()
    index = (site / "docs/index.html").read_text(encoding="utf-8")
    assert all(f"notebooks/{path.stem}.html" in index for path in numbered(ROOT / "notebooks"))
    assert "docs/index.html" in (site / "index.html").read_text(encoding="utf-8")


def test_no_page_loads_anything_from_elsewhere_or_is_heavy_with_all_that_it_loads(
    read: dict[Path, Read],
) -> None:
    for path, page in read.items():
        assert [address for address in page.loads if re.match(r"(https?:)?//", address)] == [], path.name
        files = {
            path,
            *(path.parent / load.split("?")[0] for load in page.loads if not load.startswith(("data:", "#"))),
        }
        assert sum(file.stat().st_size for file in files) < HEAVIEST, path.name


def test_no_link_within_the_site_leads_nowhere(read: dict[Path, Read]) -> None:
    broken = []
    followed = 0
    for path, page in read.items():
        for link in page.links:
            target, _, name = link.partition("#")
            if re.match(r"[a-z]+:|//", target):
                continue
            followed += 1
            file = (path.parent / unquote(target)).resolve() if target else path
            if not file.is_file() or (name and file in read and unquote(name) not in read[file].names):
                broken.append((path.name, link))
    assert broken == []
    assert followed > 1000


def test_every_picture_says_what_it_shows(read: dict[Path, Read]) -> None:
    assert {path.name: page.mute for path, page in read.items() if page.mute} == {}


@pytest.fixture(scope="module")
def tab() -> Iterator[Page]:
    """A page of a browser, which is opened once."""
    with browser_page() as page:
        yield page


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", LOOKED_AT)
def test_an_accessibility_checker_finds_nothing(site: Path, tab: Page, name: str, scheme: Any) -> None:
    """axe-core's rules of WCAG 2 A and AA, in a real browser."""
    tab.emulate_media(color_scheme=scheme)
    tab.goto((site / name).as_uri())
    assert violations(tab) == []


def test_every_table_has_headers_and_no_page_names_this_machine(site: Path) -> None:
    for path in site.rglob("*.html"):
        text = path.read_text(encoding="utf-8")
        assert str(ROOT) not in text, path.name
        if path.parent.name in ("notebooks", "exercises", "docs"):
            for table in re.findall(r"<table.*?</table>", text, re.DOTALL):
                assert "<th" in table, f"{path.name}: {table[:200]}"


def test_the_websites_own_search_finds_words_and_terms_without_a_network(site: Path, tab: Page) -> None:
    where = {
        "reserved": "docs/glossary",
        "Expandable segments": "docs/glossary",
        "checkpoint": "notebooks/06",
    }
    for asked, page in where.items():
        tab.goto(f"{(site / 'search.html').as_uri()}?q={asked}")
        tab.locator(f'#search-results a[href^="{page}"]').first.wait_for()


def test_each_lesson_leads_to_the_one_before_and_the_one_after(site: Path) -> None:
    stems = [path.stem for path in numbered(ROOT / "notebooks")]
    for before, here, after in zip(stems, stems[1:], stems[2:], strict=False):
        text = (site / "notebooks" / f"{here}.html").read_text(encoding="utf-8")
        assert re.search(rf'class="prev-page" href="{before}\.html"', text), here
        assert re.search(rf'class="next-page" href="{after}\.html"', text), here
