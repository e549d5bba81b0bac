"""The memory map: every byte is drawn where it lies and told in words; each event stands by itself."""

import json
import os
import re
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from engine import GPT, shallow, simulate

from course_utils import TrainingRun
from course_utils.allocator.memory_map import FILLS, LOOKS, ROW_STEP, memory_map
from course_utils.allocator.memory_map_page import memory_map_page, page_data, without_tips
from course_utils.allocator.replay import Replay, replay
from course_utils.figures.canvas import MARGIN, WIDE, Figure
from course_utils.units import BLOCK, MiB

SVG = "{http://www.w3.org/2000/svg}"
RUN = TrainingRun(shallow(GPT, 2), micro_batch=4, seq_len=256, precision="amp-bf16", attention="flash")

HOLES = [
    *[(4 * MiB, index) for index in range(20)],
    *[(-4 * MiB, index) for index in range(20) if index % 5 in (1, 3)],
    (8 * MiB, "late"),
]
"""Four segments of five tensors, of which the second and fourth are freed: 40 % is free, and 8 MiB do not
fit.
"""


def drawn(figure: Figure) -> dict[str, float]:
    """Pixels of all rows together in each look."""
    pixels: dict[str, float] = defaultdict(float)
    for element in ElementTree.fromstring(figure.svg).iter(f"{SVG}rect"):
        if "data-look" in element.attrib:
            pixels[element.attrib["data-look"]] += float(element.attrib["width"])
    return pixels


def texts(figure: Figure) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(figure.svg).iter(f"{SVG}text")]


@pytest.fixture(scope="module")
def replayed() -> Replay:
    return replay(simulate(RUN))


def test_segments_that_are_alike_have_a_row_each_and_their_bytes_are_in_proportion():
    figure = memory_map(replay(HOLES, 80 * MiB))
    row = WIDE - 2 * MARGIN
    assert drawn(figure) == pytest.approx({"tensors": 4 * 0.6 * row, "stuck": 4 * 0.4 * row}, abs=2)
    rects = [e for e in ElementTree.fromstring(figure.svg).iter(f"{SVG}rect") if "data-look" in e.attrib]
    assert len(rects) == 20
    tops = sorted({float(rect.attrib["y"]) for rect in rects})
    assert tops == pytest.approx([tops[0] + ROW_STEP * index for index in range(4)], abs=0.2)
    assert "each row is 20.97 MB" in texts(figure)
    assert texts(figure).count("free 4.19 MB") == 8


def test_the_title_states_the_conclusion_and_the_description_why_it_failed():
    figure = memory_map(replay(HOLES, 80 * MiB))
    assert figure.alt.startswith(
        "83.9 MB reserved, 50.3 MB of it in use; 33.6 MB (40.0 %) is stuck between tensors, "
        "the largest free piece 4.19 MB. A map"
    )
    assert "after event 28: 4 segments" in figure.alt
    assert "Out of GPU memory (in a replay). Tried to allocate 20.00 MiB" in figure.alt


def test_what_is_free_is_told_apart_by_whether_it_could_be_given_back():
    events = [(12 * MiB, "a"), (-12 * MiB, "a"), (14 * MiB, "b")]
    whole = memory_map(replay(events, 100 * MiB), 3)
    assert set(drawn(whole)) == {"cached", "tensors", "beyond"}
    assert "all free memory could be returned to the driver" in whole.alt
    pages = [(5 * MiB, "a"), (30 * MiB, "b"), (-30 * MiB, "b")]
    pixels = drawn(memory_map(replay(pages, expandable_segments=True), 3))
    everything = sum(pixels.values())
    shares = {look: width / everything for look, width in pixels.items()}
    assert shares == pytest.approx({"tensors": 5 / 40, "stuck": 15 / 40, "cached": 20 / 40}, rel=0.01)


def test_a_measured_step_is_drawn_by_kind_at_its_peak(replayed):
    figure = memory_map(replayed)
    by_kind: dict[str, int] = defaultdict(int)
    for segment in replayed.blocks_at():
        for block in segment.blocks:
            by_kind[block.kind] += block.bytes
    pixels = drawn(figure)
    everything = sum(pixels.values())
    for kind in ("parameters", "optimizer_states", "activations"):
        assert pixels[kind] / everything == pytest.approx(
            by_kind[kind] / replayed.reserved[replayed.peak_event - 1], rel=0.03
        )
    assert "step 2, " in figure.alt and "simulated GPU" in " ".join(texts(figure))
    assert set(pixels) <= set(LOOKS) and set(LOOKS) <= set(FILLS)


def test_many_small_tensors_make_no_large_picture(replayed):
    assert len(memory_map(replay([(512, index) for index in range(20_000)])).svg) < 200_000
    assert memory_map(replayed).svg == memory_map(replayed).svg != memory_map(replayed, 100).svg


def test_where_there_is_nothing_to_draw_it_says_so(replayed):
    with pytest.raises(ValueError, match="nothing is reserved after event 0"):
        memory_map(replayed, 0)
    with pytest.raises(ValueError, match="this replay has events 0 to"):
        memory_map(replayed, len(replayed) + 1)
    with pytest.raises(ValueError, match="holds no events"):
        memory_map_page(replay([]))


@pytest.mark.parametrize("tight", [False, True])
@pytest.mark.parametrize("choices", [{}, {"expandable_segments": True}], ids=str)
def test_the_page_knows_every_event(choices, tight):
    ours = replay(simulate(RUN), **choices)
    if tight:
        ours = replay(simulate(RUN), int(0.97 * ours.peak_reserved), **choices)
    data = page_data(ours)
    assert data["left_out"] == 0 and data["events"] == len(ours)
    assert [sum(data["reserved"][:event]) * BLOCK for event in (1, 50, len(ours))] == [
        ours.reserved[event - 1] for event in (1, 50, len(ours))
    ]
    for event in range(1, len(ours) + 1, 37):
        there = [row for row in data["blocks"] if row[2] <= event <= row[3]]
        assert sum(row[1] for row in there) * BLOCK == ours.allocated[event - 1]
        ranges = [row for row in data["ranges"] if row[2] <= event <= row[3]]
        assert sum(row[1] for row in ranges) * BLOCK == ours.reserved[event - 1]
        for place, *_ in there:
            assert any(start <= place < start + room for start, room, *_ in ranges)
        ends = sorted((place, place + size) for place, size, *_ in there)
        assert all(end <= start for (_, end), (start, _) in pairwise(ends))
    assert max(row[0] + row[1] for row in data["ranges"]) <= data["total"]


def test_the_page_needs_nothing_else(replayed, tmp_path):
    page = memory_map_page(replayed)
    assert page.save(tmp_path / "map.html").read_text(encoding="utf-8") == page.html
    assert not re.search(r"https?://|src=|@import|url\(", page.html)
    assert repr(page) == page.alt and page.still.alt in page.alt
    with pytest.raises(ValueError, match=r"must end in \.html"):
        page.save(tmp_path / "map.svg")
    spiteful = memory_map_page(replay([(512, "</script><script>alert(1)</script>")])).html
    assert "alert(1)<\\/script>" in spiteful and "</script><script>" not in spiteful
    bundle = page._repr_mimebundle_()
    assert bundle == memory_map_page(replayed)._repr_mimebundle_() and bundle["text/plain"] == page.alt
    assert "<iframe" in bundle["text/html"] and 'sandbox="allow-scripts"' in bundle["text/html"]
    assert "<img alt=" in bundle["text/html"]


def test_the_still_picture_has_the_same_stretches_as_paths(replayed):
    svg = memory_map(replayed).svg
    pixels = defaultdict[str, float](float)
    drawn = defaultdict[str, float](float)
    for rect in ElementTree.fromstring(svg).iter(f"{SVG}rect"):
        if "data-look" in rect.attrib and "stroke" not in rect.attrib:
            pixels[rect.attrib["fill"]] += float(rect.attrib["width"])
    still = ElementTree.fromstring(without_tips(svg))
    for path in still.iter(f"{SVG}path"):
        widths = re.findall(r"M[\d.]+ [\d.]+h([\d.]+)v24h-\1z", path.attrib["d"])
        drawn[path.attrib.get("fill", "")] += sum(map(float, widths))
    assert {fill: drawn[fill] for fill in pixels} == pytest.approx(dict(pixels)) and len(pixels) > 4
    assert sum(drawn.values()) == pytest.approx(sum(pixels.values()))
    seams = sum(path.attrib["d"].count("V") for path in still.iter(f"{SVG}path"))
    assert seams == sum(1 for _ in ElementTree.fromstring(svg).iter(f"{SVG}line")) > 0
    words = [[text.text for text in root.iter(f"{SVG}text")] for root in (still, ElementTree.fromstring(svg))]
    assert words[0] == words[1] != []


REQUIRED = os.environ.get("COURSE_REQUIRE_BROWSER") == "1"


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    if not REQUIRED:
        pytest.importorskip("playwright", reason="playwright is not installed")
    import browser

    if browser.find_browser() is None and not REQUIRED:
        pytest.skip("no Chromium or Chrome found: install one to see the page as learners do")
    with browser.browser_page() as page:
        yield page


def opened(chromium: Any, path: Path) -> tuple[Any, list[str]]:
    """The page in a browser, and everything that it complained of or asked the network for."""
    page = chromium.context.new_page()
    trouble = []
    page.on("pageerror", lambda error: trouble.append(str(error)))
    page.on("request", lambda request: request.url.startswith("file:") or trouble.append(request.url))
    page.goto(path.as_uri())
    return page, trouble


def test_arrow_keys_step_through_the_events(chromium, replayed, tmp_path):
    page, trouble = opened(chromium, memory_map_page(replayed).save(tmp_path / "map.html"))
    status = page.locator("#status")
    slider = page.locator("#event")
    assert status.inner_text().startswith(f"Event {replayed.peak_event:,} of {len(replayed):,} (step 2, ")
    before = page.evaluate("map.toDataURL()")
    slider.focus()
    page.keyboard.press("ArrowRight")
    assert status.inner_text().startswith(f"Event {replayed.peak_event + 1:,} of")
    page.keyboard.press("Home")
    assert "0.00 KB allocated, 0.00 KB reserved" in status.inner_text()
    assert page.evaluate("map.toDataURL()") != before
    page.keyboard.press("PageUp")
    assert status.inner_text().startswith(f"Event {round(len(replayed) / 50):,} of")
    page.click("#peak")
    assert page.evaluate("map.toDataURL()") == before
    page.click("#before")
    assert status.inner_text() != "" and not trouble
    page.close()


def test_the_page_reads_its_short_data_in_full(chromium, replayed, tmp_path):
    page, trouble = opened(chromium, memory_map_page(replayed).save(tmp_path / "map.html"))
    there = page.evaluate("({blocks: data.blocks, labels: data.labels, allocated, reserved})")
    assert sorted(there["blocks"]) == sorted(page_data(replayed)["blocks"])
    assert there["allocated"] == [0, *(size // BLOCK for size in replayed.allocated)]
    assert there["reserved"] == [0, *(size // BLOCK for size in replayed.reserved)]
    expected = set()
    for item in replayed.allocations:
        where, shape = item.module or "the network", "×".join(map(str, item.shape))
        expected.add((item.kind, f"{item.operation} in {where}, {shape} {item.dtype}"))
    assert {(kind, text) for kind, text in there["labels"]} == expected
    assert not trouble
    page.close()


def test_in_a_frame_that_had_no_size_the_map_is_drawn_when_it_gets_one(chromium, replayed, tmp_path):
    bundle = memory_map_page(replayed)._repr_mimebundle_()
    notebook = tmp_path / "notebook.html"
    notebook.write_text(
        f"<div id='output' style='display:none'>{bundle['text/html']}</div>", encoding="utf-8"
    )
    page, trouble = opened(chromium, notebook)
    page.evaluate("document.getElementById('output').style.display = 'block'")
    frame = page.frames[1]
    frame.wait_for_function("map.width > 300 && curve.width > 300")
    painted = "[...map.getContext('2d').getImageData(0, 0, map.width, 20).data].some(value => value > 0)"
    assert frame.evaluate(painted) and not trouble
    page.close()


def test_the_page_of_a_failure_opens_where_it_failed(chromium, tmp_path):
    failed = replay(HOLES, 80 * MiB)
    page, trouble = opened(chromium, memory_map_page(failed).save(tmp_path / "map.html"))
    assert "Then: out of GPU memory" in page.locator("#status").inner_text()
    assert json.loads(page.evaluate("JSON.stringify(emptyRanges(data.ranges, shown))")) == []
    page.evaluate("go(0)")
    assert not trouble
    page.close()
