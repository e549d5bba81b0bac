"""The memory map: every byte is drawn where it lies and told in words; each event stands by itself."""

import xml.etree.ElementTree as ElementTree
from collections import defaultdict

import pytest
from engine import GPT, shallow, simulate

from course_utils import TrainingRun
from course_utils.allocator.memory_map import FILLS, LOOKS, memory_map
from course_utils.allocator.replay import EMPTY_CACHE, Replay, replay
from course_utils.figures.canvas import Figure
from course_utils.units import MiB

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


@pytest.fixture(scope="module")
def replayed() -> Replay:
    return replay(simulate(RUN))


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
    emptied = replay([*events[:2], EMPTY_CACHE, events[2]])
    assert set(drawn(memory_map(emptied))) == {"tensors"}
    with pytest.raises(ValueError, match="nothing is reserved after event 3"):
        memory_map(emptied, 3)
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
    for kind in ("parameters", "optimizer_states", "activations"):
        share = by_kind[kind] / replayed.reserved[replayed.peak_event - 1]
        assert pixels[kind] / sum(pixels.values()) == pytest.approx(share, rel=0.03)
    assert "step 2, " in figure.alt and "simulated GPU" in figure.svg
    assert set(pixels) <= set(LOOKS) and set(LOOKS) <= set(FILLS)
