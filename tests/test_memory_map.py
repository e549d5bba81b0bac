"""The memory map: every byte is drawn where it lies and told in words; each event stands by itself."""

from collections import defaultdict
from typing import Any

import numpy as np
import pytest
from engine import GPT, shallow, simulate
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch
from matplotlib.text import Text

from course_utils import TrainingRun
from course_utils.allocator.replay import EMPTY_CACHE, Replay, replay
from course_utils.figures.memory_maps import FILLS, LOOKS, memory_map
from course_utils.figures.style import CourseFigure
from course_utils.units import MiB

RUN = TrainingRun(shallow(GPT, 2), micro_batch=4, seq_len=256, precision="amp-bf16", attention="flash")

HOLES = [
    *[(4 * MiB, index) for index in range(20)],
    *[(-4 * MiB, index) for index in range(20) if index % 5 in (1, 3)],
    (8 * MiB, "late"),
]
"""Four segments of five tensors, of which the second and fourth are freed: 40 % is free, and 8 MiB do not
fit.
"""


def boxes(figure: CourseFigure) -> dict[str, Any]:
    """The corners of all boxes of each look, in its own color, and hatched where it is reserved and free."""
    found = {}
    for patch in figure.findobj(PathPatch):
        look = str(patch.get_label())
        assert to_hex(patch.get_facecolor()).upper() == FILLS[look].upper()
        assert bool(patch.get_hatch()) == (look in ("stuck", "cached"))
        found[look] = np.asarray(patch.get_path().vertices).reshape(-1, 5, 2)
    return found


def drawn(figure: CourseFigure) -> dict[str, float]:
    """Points of all rows together in each look."""
    return {look: (box[:, 1, 0] - box[:, 0, 0]).sum() for look, box in boxes(figure).items()}


@pytest.fixture(scope="module")
def replayed() -> Replay:
    return replay(simulate(RUN))


def test_the_title_states_the_conclusion_and_the_description_why_it_failed():
    own = Figure().add_subplot()
    assert memory_map(replay(HOLES, 80 * MiB), ax=own) is own
    assert own.get_title(loc="left").startswith("83.9 MB reserved") and own.patches
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
    points = drawn(memory_map(replay(pages, expandable_segments=True), 3))
    everything = sum(points.values())
    shares = {look: width / everything for look, width in points.items()}
    assert shares == pytest.approx({"tensors": 5 / 40, "stuck": 15 / 40, "cached": 20 / 40}, rel=0.01)


def test_a_block_lies_at_its_address_and_is_named_where_it_has_room():
    figure = memory_map(replay(HOLES, 80 * MiB))
    texts = {text.get_text() for text in figure.findobj(Text)}
    assert "tensors 4.19 MB" in texts and "free 4.19 MB" in texts
    stuck = boxes(figure)["stuck"]
    # Each of four rows is a segment of five blocks, the second and the fourth of them free.
    assert {(left, right) for left, right in stuck[:, :2, 0]} == {(106, 211), (317, 422)}
    assert len(stuck) == 8 and len(set(stuck[:, 0, 1])) == 4


def test_a_measured_step_is_drawn_by_kind_at_its_peak(replayed):
    figure = memory_map(replayed)
    by_kind: dict[str, int] = defaultdict(int)
    for segment in replayed.blocks_at():
        for block in segment.blocks:
            by_kind[block.kind] += block.bytes
    points = drawn(figure)
    for kind in ("parameters", "optimizer_states", "activations"):
        share = by_kind[kind] / replayed.reserved[replayed.peak_event - 1]
        assert points[kind] / sum(points.values()) == pytest.approx(share, rel=0.03)
    texts = [text.get_text() for text in figure.findobj(Text)]
    assert "step 2, " in figure.alt and any("simulated GPU" in text for text in texts)
    assert set(points) <= set(LOOKS) and set(LOOKS) <= set(FILLS)
