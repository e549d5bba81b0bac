"""The explorer's page: made of the course's modules, right to the byte in a browser, quick, open to all."""

import hashlib
import io
import json
import os
import random
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import browser_page, find_browser, violations
from explorer_page import READY, key_times, need_pyodide, opened, pyodide_module, served
from playwright.sync_api import Page

from course_utils.authoring import site
from course_utils.cli.main import main
from course_utils.interactive import explorer_page as dashboard_page
from course_utils.interactive.explorer import CONTROLS, DEFAULTS, next_changes

ROOT = Path(__file__).resolve().parents[2]
PYODIDE = pyodide_module()
FIRST = json.dumps(dashboard_page.texts(DEFAULTS))
SIZES = ((1280, 900, "light"), (1280, 900, "dark"), (640, 450, "light"), (360, 780, "dark"))
"""A desk, at night, the same desk at 200 %, a phone: pixels of the page, and the scheme."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page as a folder, made by the command."""
    need_pyodide()
    out = tmp_path_factory.mktemp("site")
    assert main(["site", "--here", "--explorer", "--out", str(out)]) == 0
    return out / "explorer"


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    with served(folder.parent) as root:
        yield f"{root}explorer/"


@pytest.fixture(scope="module")
def page(address: str) -> Iterator[Page]:
    """The page, started once for all tests; what it asked of any server is in `page.asked`."""
    browser = find_browser()
    if browser is None and os.environ.get("COURSE_REQUIRE_BROWSER") != "1":
        pytest.skip("no Chromium or Chrome here")
    assert browser, "no Chromium or Chrome here, and COURSE_REQUIRE_BROWSER asks for one"
    with browser_page() as tab:
        asked: list[str] = []
        tab.context.on("request", lambda request: asked.append(request.url))
        vars(tab)["asked"] = asked
        yield opened(tab, address)


@pytest.fixture
def fresh(page: Page) -> Page:
    """The page with its first choices."""
    page.locator("#reset").click()
    return page


def verdict(page: Page) -> str:
    return page.locator("#words").inner_text()


def chosen(page: Page) -> dict[str, str]:
    return page.evaluate("explorer.chosen")


# What the page is made of


def test_a_file_that_differs_from_its_listed_checksum_is_refused(tmp_path: Path) -> None:
    listed = tmp_path / "pyodide.json"
    checksum = hashlib.sha256(b"one").hexdigest()
    package = {"package": "pyodide", "version": "1.2.3", "files": {"one.mjs": checksum}}
    listed.write_text(json.dumps(package), encoding="utf-8")
    file = tmp_path / "build" / "pyodide-1.2.3" / "one.mjs"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"one")
    assert PYODIDE.files(listed, tmp_path / "build") == [file]
    file.write_bytes(b"two")
    with pytest.raises(PYODIDE.Mismatch, match=r"delete .*pyodide-1\.2\.3 and build again"):
        PYODIDE.files(listed, tmp_path / "build")


def test_without_npm_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(PYODIDE.NotBrought, match=r"npm is not here: install Node\.js"):
        PYODIDE.files(build=tmp_path)


def test_the_archive_runs_by_itself(tmp_path: Path) -> None:
    """Unpacked, as the page does it: style sheets are next to the modules."""
    with zipfile.ZipFile(io.BytesIO(site.archive())) as packed:
        packed.extractall(tmp_path)
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r});"
        " from course_utils.interactive import explorer_page as page;"
        " print(page.draw('{}'), page.plan('{}'))"
    )
    command = [sys.executable, "-I", "-S", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert '"stack"' in done.stdout


def test_a_link_says_what_differs_and_is_read_again_but_for_what_is_not_offered() -> None:
    assert dashboard_page.link(FIRST) == ""
    other = json.dumps(json.loads(FIRST) | {"seq_len": "2048", "micro_batch": "4", "model": "gpt2"})
    read = json.loads(dashboard_page.linked(f"#{dashboard_page.link(other)}"))
    assert read == {"chosen": json.loads(other), "refused": []}
    read = json.loads(dashboard_page.linked("micro_batch=33&gpu=&colour=red&seq_len=2048"))
    assert read["chosen"] == json.loads(FIRST) | {"seq_len": "2048"}
    refused = [re.split("[:.] ", words)[0] for words in read["refused"]]
    assert refused == ["unknown micro-batch '33'", "unknown GPU ''", "unknown control 'colour'"]


# In a browser


def test_the_browser_computes_the_same_to_the_byte(page: Page) -> None:
    dice = random.Random(9)
    runs: list[str] = []
    not_runs: list[str] = []
    sharded = [{"world_size": "8", "zero_stage": stage, "precision": "bf16"} for stage in "123"]
    while len(runs) < 28:
        drawn = {control.name: str(dice.choice(control.values)) for control in dice.sample(CONTROLS, 5)}
        kinds = ({}, *sharded, {"trained": "lora-16"}, {"trained": "lora-8"}, {"trained": "lora-4"})
        choice = json.dumps(json.loads(FIRST) | drawn | kinds[len(runs) % 7])
        if "stack" in json.loads(dashboard_page.draw(choice)):
            runs.append(choice)
        else:
            not_runs.append(choice)
    asked = runs + not_runs[:4]
    there = page.evaluate("(asked) => asked.map((chosen) => explorer.formulas.draw(chosen))", asked)
    assert there == [dashboard_page.draw(one) for one in asked]
    totals = [json.loads(one).get("total") for one in there]
    assert len(set(totals[:-4])) > 20 and totals[-4:] == 4 * [None]


def test_keys_alone_are_enough_and_the_picture_follows_at_once(fresh: Page) -> None:
    assert verdict(fresh).startswith("Does not fit an RTX5090-32GB by")
    before = fresh.locator("#stack").inner_html()
    times = [key_times(fresh, "micro_batch", key) for key in 5 * ("ArrowLeft", "ArrowRight")]
    clock = min(one for one, _ in times)
    processor = min(one for _, one in times)
    print(f"key to picture: {clock:.0f} ms, of them the page's own processor time {processor:.0f} ms")
    assert fresh.locator("#stack").inner_html() == before
    fresh.keyboard.press("Home")
    assert chosen(fresh)["micro_batch"] == "1" and fresh.locator("#stack").inner_html() != before
    assert fresh.locator("#choice-micro_batch").get_attribute("aria-valuetext") == "1"
    assert "Redrawn in" in fresh.locator("#took").inner_text()


def test_a_change_makes_itself(fresh: Page) -> None:
    fresh.wait_for_function(READY)
    offered = fresh.locator("#changes li button")
    assert offered.count() == len(next_changes(DEFAULTS))
    fitting = offered.filter(has_text=", fits").first
    fitting.focus()
    fresh.keyboard.press("Enter")
    assert verdict(fresh).startswith("Fits")
    assert chosen(fresh) == dashboard_page.texts(next_changes(DEFAULTS)[0].chosen)
    assert fresh.evaluate("document.activeElement.id") == "changes-title"


def test_a_link_restores_what_was_chosen(fresh: Page) -> None:
    link = "model=gpt2&zero_stage=3&world_size=8&micro_batch=33"
    fresh.evaluate("(hash) => { location.hash = hash; }", link)
    fresh.wait_for_function("explorer.chosen.model === 'gpt2'")
    zero_stage = fresh.locator("#choice-zero_stage")
    assert zero_stage.input_value() == "3" and zero_stage.is_visible()
    assert "unknown micro-batch '33'" in fresh.locator("#refused").inner_text()
    fresh.locator("#choice-seq_len").press("ArrowRight")
    assert not fresh.locator("#refused").is_visible()
    fresh.wait_for_function("location.hash.includes('seq_len=2048')")
    fresh.locator("#reset").click()
    fresh.wait_for_function("location.hash === ''")


def test_impossible_choices_are_explained_and_the_last_picture_stays(fresh: Page) -> None:
    closed = fresh.locator("#controls details:not([open]) summary")
    closed.evaluate_all("all => all.forEach(one => one.click())")
    fresh.locator("#choice-zero_stage").press("End")
    assert verdict(fresh).startswith("Not possible:")
    refused = json.loads(dashboard_page.draw(json.dumps(chosen(fresh))))["refused"]
    assert verdict(fresh).removeprefix("Not possible: ") == f"{refused}."
    assert "stale" in (fresh.locator("#stack").get_attribute("class") or "")
    assert fresh.locator("#stack [role=img]:visible").count() == 1 and fresh.locator("#copy").is_disabled()
    fresh.get_by_text("First choose what is possible.").wait_for()
    fresh.locator("#choice-world_size").press("ArrowRight")
    assert not verdict(fresh).startswith("Not possible") and fresh.locator(".stale").count() == 0


def test_everybody_can_read_it(fresh: Page) -> None:
    for width, height, scheme in SIZES:
        fresh.set_viewport_size({"width": width, "height": height})
        fresh.emulate_media(color_scheme=scheme)
        assert fresh.evaluate("document.documentElement.scrollWidth") <= width, "it scrolls sideways"
        assert violations(fresh) == []
    fresh.set_viewport_size({"width": 1280, "height": 900})
    fresh.emulate_media(color_scheme="light")


def test_nothing_is_asked_of_anybody_else(page: Page, address: str) -> None:
    asked = vars(page)["asked"]
    assert len(asked) > 6
    assert [url for url in asked if not url.startswith((address, "data:", "blob:"))] == []


def test_it_says_in_words_why_it_cannot_start(page: Page, address: str, folder: Path) -> None:
    context = page.context
    tab = context.new_page()
    tab.goto((folder / "index.html").as_uri())
    assert "python3 -m http.server" in tab.locator("#verdict").inner_text()
    tab.add_init_script("delete window.WebAssembly")
    tab.goto(address)
    assert "needs WebAssembly" in tab.locator("#verdict").inner_text()
    tab.close()
    lacking = context.new_page()
    lacking.route("**/pyodide.asm.wasm", lambda route: route.abort())
    lacking.route("**/pyodide.mjs", lambda route: route.fulfill(status=404))
    lacking.goto(address)
    lacking.get_by_text("The page could not start").wait_for()
    lacking.close()
    assert context.browser
    silent = context.browser.new_context(java_script_enabled=False).new_page()
    silent.goto(address)
    assert "needs JavaScript" in silent.locator("noscript").inner_text()
    assert not silent.locator("#verdict").is_visible()
    silent.context.close()
