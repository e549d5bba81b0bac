"""Figures: what is drawn is what was given, everyone can see it, and its alt text says it."""

import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from itertools import combinations, pairwise
from math import dist
from typing import Any

import matplotlib
import numpy as np
import pytest
from made_up import FIGURES, FULL, NONE, training
from matplotlib import pyplot
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.text import Text

from course_utils import figures as plots
from course_utils.breakdown import KINDS, MemoryBreakdown
from course_utils.figures import COLOURS
from course_utils.figures.curves import LINE_COLOURS
from course_utils.figures.timelines import MOST_POINTS, TIMELINE_ORDER, thin
from course_utils.gpus import GPUS
from course_utils.palette import OVER, QUIET, UNDER, contrast, ink_on
from course_utils.units import GB, MB, format_bytes

# Machado, Oliveira and Fernandes 2009: what full protanopia, deuteranopia and tritanopia make of linear RGB.
VISION = {
    "normal": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": ((0.1523, 1.0526, -0.2049), (0.1145, 0.7863, 0.0992), (-0.0039, -0.0481, 1.0520)),
    "deuteranopia": ((0.3673, 0.8606, -0.2280), (0.2801, 0.6725, 0.0474), (-0.0118, 0.0429, 0.9689)),
    "tritanopia": ((1.2555, -0.0767, -0.1788), (-0.0784, 0.9308, 0.1476), (0.0047, 0.6914, 0.3039)),
}


def lab(color: str, vision: str) -> tuple[float, float, float]:
    """CIE L*a*b* (D65) of "#RRGGBB" as somebody with that vision sees it."""
    channels = [int(color[index : index + 2], 16) / 255 for index in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    red, green, blue = (
        min(1.0, max(0.0, sum(m * c for m, c in zip(row, linear, strict=True)))) for row in VISION[vision]
    )
    x = (0.4124 * red + 0.3576 * green + 0.1805 * blue) / 0.95047
    y = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    z = (0.0193 * red + 0.1192 * green + 0.9505 * blue) / 1.08883
    fx, fy, fz = (t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116 for t in (x, y, z))
    return 116 * fy - 16, 500 * (fx - fy), 200 * (fy - fz)


@pytest.mark.parametrize("vision", VISION)
def test_kinds_are_told_apart_with_every_vision(vision):
    assert set(COLOURS) == {*KINDS, "cached", "free"}
    for (one, first), (other, second) in combinations(COLOURS.items(), 2):
        if {one, other} != {"cached", "free"}:  # hatched and plain
            assert dist(lab(first, vision), lab(second, vision)) > 14, f"{one} and {other} with {vision}"


@pytest.mark.parametrize("order", [KINDS, TIMELINE_ORDER[:3]])
def test_neighbors_differ_in_grey_print(order):
    for one, other in pairwise(order):
        gap = abs(lab(COLOURS[one], "normal")[0] - lab(COLOURS[other], "normal")[0])
        assert gap > 9, f"{one} next to {other}"


def test_text_on_every_color_and_on_paper_is_readable():
    for kind, fill in COLOURS.items():
        assert contrast(ink_on(fill), fill) >= 4.5, kind
    for color in (OVER, UNDER, QUIET, *LINE_COLOURS):
        assert contrast(color, "#FFFFFF") >= 4.5, color
    assert contrast("#000000", "#FFFFFF") == pytest.approx(21)  # as WCAG has it
    assert contrast("#777777", "#FFFFFF") == pytest.approx(4.48, abs=0.01)


# What is drawn


def spans(bars: Any) -> list[tuple[float, float, str]]:
    """The left ends, widths and colors of pieces of bars."""
    return [(bar.get_x(), bar.get_width(), to_hex(bar.get_facecolor()).upper()) for bar in bars]


def words_in(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.findobj(Text)]


def test_a_stack_draws_every_byte_to_scale_in_its_kinds_color():
    rows = {"none": NONE, "full": FULL}
    figure = plots.stack(rows, "Only one fits", capacity=80 * GB, nominal=90 * GB, provenance="told")
    [ax] = figure.axes
    kinds = [COLOURS[kind] for kind in ("parameters", "weight_copies", "optimizer_states", "activations")]
    first, second = spans(ax.patches[:4]), spans(ax.patches[4:])
    assert first == [(0, 6, kinds[0]), (6, 3, kinds[1]), (9, 12, kinds[2]), (21, 109, kinds[3])]
    assert second[:3] == [(0, 6, kinds[0]), (6, 12, kinds[2]), (18, 20, kinds[3])]
    assert second[3][1] == pytest.approx(524_288 / GB)
    assert {line.get_xdata()[0]: line.get_linestyle() for line in ax.lines} == {80: "-", 90: "--"}
    assert {"none", "130.0 GB", "50.0 GB too much", "full", "42.0 GB free", "told"} <= set(words_in(figure))
    assert {"Only one fits", "80 GB GPU", "GB (1 GB = 10⁹ bytes)", "activations\n109.0"} <= set(
        words_in(figure)
    )
    assert figure.rows[1][1:] == ["6.0 GB", "3.0 GB", "12.0 GB", "109.0 GB", "0", "130.0"]


def test_bars_have_their_values_and_one_is_set_off():
    values = {"flash": GB, "eager": 2 * GB, "gradients": 3 * GB}
    figure = plots.bars(values, "Kept", kind="activations", highlight="eager")
    made = [(bar.get_width(), to_hex(bar.get_facecolor()).upper()) for bar in figure.axes[0].patches]
    colors = [COLOURS[kind] for kind in ("temporaries", "activations", "gradients")]
    assert made == list(zip((1, 2, 3), colors, strict=True))
    assert {"1.00 GB", "2.00 GB", "3.00 GB", "flash", "eager", "gradients"} <= set(words_in(figure))
    assert "24.0 ms" in plots.bars({"forward": 12.0, "backward": 24.0}, "Times", unit="ms").alt
    with pytest.raises(ValueError, match="none below zero"):
        plots.bars({"less": -1}, "Impossible")


def test_estimate_and_measurement_are_pairs_of_bars_with_signed_differences():
    run = training()
    parts = dict(run.breakdown) | {"activations": run.breakdown["activations"] + 100 * MB, "temporaries": 0}
    figure = plots.compare_bars(MemoryBreakdown(parts), run, "Two differences")
    widths = [bar.get_width() for bar in figure.axes[0].patches]
    kinds = len(widths) // 2
    assert sum(widths[:kinds]) == pytest.approx(sum(parts.values()) / GB)
    assert sum(widths[kinds:]) == pytest.approx(run.peak / GB)
    assert {"+0.100 GB, +4.8 %", "−0.700 GB, −100 %", "0", str(run.provenance)} <= set(words_in(figure))
    assert figure.rows[-1] == ["total", "3.460 GB", "4.060 GB", "−0.600 GB", "−15 %"]
    assert f"{format_bytes(run.peak, 'GB', 3)} {run.word}" in figure.alt


@pytest.mark.parametrize(
    ("source", "word"), [("live", "measured"), ("cpu", "measured"), ("simulated", "simulated")]
)
def test_bytes_are_called_measured_only_where_a_device_was_there(source, word):
    run = training()
    run = replace(run, provenance=replace(run.provenance, source=source))
    figure = plots.compare_bars(run.breakdown, run, "None")
    legend = [text.get_text().split()[0] for text in figure.axes[0].get_legend().get_texts()]
    assert legend == ["estimated", word] and figure.rows[0][2] == word
    assert ("measured" in figure.alt) == (word == "measured")


def test_a_timeline_draws_each_kinds_bytes_and_names_its_peak():
    run = training()
    figure = plots.timeline(run, "The loss owns the peak", letters={"A": 300}, capacity=5 * GB)
    [ax] = figure.axes
    curves = run.timeline.curves()
    shown = [kind for kind in TIMELINE_ORDER if any(curves.get(kind, ()))]
    tops = {to_hex(area.get_facecolor()).upper(): area.get_xy()[:, 1] for area in ax.patches}
    assert list(tops) == [COLOURS[kind] for kind in reversed(shown)], "the topmost is drawn first"
    running = [0] * len(run.timeline)
    for kind in shown:  # each area ends at the sum of its kind and of those below
        running = [below + size for below, size in zip(running, curves[kind], strict=True)]
        assert max(tops[COLOURS[kind]]) == pytest.approx(max(running) / GB)
    at = {text.get_text(): text.xy[1] for text in ax.texts if hasattr(text, "xy")}
    assert at["peak 4.06 GB in loss, step 2"] == pytest.approx(run.peak / GB)
    assert at["A"] == pytest.approx(run.timeline.totals()[299] / GB)
    named = {"forward", "backward", "step 1", "step 2", "parameters", "5 GB GPU", "GB allocated"}
    assert named <= set(words_in(figure))
    assert "step 1" not in words_in(plots.timeline(run, "One step", steps=[2]))
    assert [row[0] for row in figure.rows[1:4]] == ["set-up", "forward, step 1", "loss, step 1"]
    with pytest.raises(ValueError, match="A is at event 9999; shown are 0 to"):
        plots.timeline(run, "Beyond", letters={"A": 9999})


def test_thinning_keeps_every_peak_that_matters():
    totals = np.array([(7919 * k) % 1000 for k in range(30_000)])
    totals[12_345], totals[29_999] = 5_000, 4_000
    kept = thin(totals, keep=[77])
    assert len(kept) <= MOST_POINTS and kept == sorted(set(kept))
    assert {0, 77, 12_345, 29_999} <= set(kept)
    for start in range(0, 30_000, 120):
        near = [totals[k] for k in kept if start - 120 <= k < start + 240]
        assert max(near) >= totals[start : start + 120].max()


def test_lines_have_their_points_their_colors_and_their_scales():
    series = {"eager": ([1, 2, 64], [3.0, 6.0, 12.0]), "flash": ([1, 2, 4], [3.0, 6.0, 11.9])}
    bands = {"eager": ([2, 5, 10], [4, 7, 13])}
    look: dict[str, Any] = {"log_x": True, "circles": ["flash"], "bands": bands, "level": ("32 GB card", 32)}
    figure = plots.lines(series, "Two slopes", "sequences", "GB", **look)
    [ax] = figure.axes
    for line, color, (name, points) in zip(ax.lines, LINE_COLOURS, series.items(), strict=False):
        assert (list(line.get_xdata()), list(line.get_ydata())) == points and line.get_label() == name
        drawn = line.get_markeredgecolor() if name == "flash" else line.get_color()
        assert to_hex(drawn).upper() == color
    assert ax.lines[1].get_linestyle() == "None", "what was measured here and there is not joined"
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "linear")
    assert ax.get_ylim()[0] == 0 < 32 < ax.get_ylim()[1] and len(ax.collections) == 1
    assert {"32 GB card", "eager", "flash", "sequences", "GB"} <= set(words_in(figure))
    assert ax.xaxis.get_major_formatter()(1e-5) == "10⁻⁵"
    backward = plots.lines({"falling": ([4, 1], [9.0, 1.0])}, "From right to left", "x", "y")
    name = next(text for text in backward.axes[0].texts if text.get_text() == "falling")
    assert name.get_position()[1] > 0.9, "a name is where its line ends at the right, which is high here"
    with pytest.raises(ValueError, match="not above zero"):
        plots.lines({"none": ([0, 1], [1, 2])}, "No logarithm", "x", "y", log_x=True)


# What a page, and a learner, gets of a figure


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_says_what_it_shows_is_the_same_each_time_and_needs_nothing_but_itself(name):
    figure = FIGURES[name]()
    root = ElementTree.fromstring(figure.svg)
    assert root.attrib["role"] == "img" and root.attrib["aria-label"] == figure.alt == repr(figure)
    assert root.findtext("{http://www.w3.org/2000/svg}title") == figure.alt
    assert figure.alt.startswith(figure.texts[0].get_text()), "the title's conclusion comes first"
    assert figure.svg == FIGURES[name]().svg
    assert not re.search(r'<style|<script|href="[^#]|<image|https?://(?!www.w3.org)', figure.svg)
    assert re.match(r'<img alt="[^"]{30,}" class="course-figure"', figure.html)
    texts = {element.text for element in root.iter("{http://www.w3.org/2000/svg}text")}
    assert len(texts) > 4, "text is text, which a reader can select"


@pytest.mark.parametrize("name", FIGURES)
def test_nothing_is_cut_off_or_written_over_something_else(name):
    figure = FIGURES[name]()
    drawn = set(ElementTree.fromstring(figure.svg).itertext())  # without numbers beyond an axis
    size = figure.bbox
    texts = [
        text for text in figure.findobj(Text) if text.get_visible() and drawn & {*text.get_text().split("\n")}
    ]
    boxes = [(text.get_text(), text.get_window_extent()) for text in texts]
    for said, box in boxes:
        assert box.x0 > 0 and box.x1 < size.width + 1 and box.y0 > 0 and box.y1 < size.height, said
    for (one, first), (other, second) in combinations(boxes, 2):
        across = min(first.x1, second.x1) - max(first.x0, second.x0)
        along = min(first.y1, second.y1) - max(first.y0, second.y0)
        assert across < 2 or along < 4, f"{one!r} over {other!r}"


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_is_drawn_on_a_learners_axes_and_leaves_settings_alone(name, tmp_path):
    with matplotlib.rc_context({"font.size": 30, "axes.facecolor": "red"}):
        before = dict(matplotlib.rcParams)
        figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 5))
        left.plot([0, 1], [5, 5])
        assert FIGURES[name](ax=right) is right
        assert dict(matplotlib.rcParams) == before
    drawn = len(right.collections) + len(right.patches) + len(right.lines)
    assert drawn and len(left.lines) == 1 and right.get_title(loc="left")
    right.set_title("My own conclusion")
    figure.savefig(tmp_path / "mine.png")
    pyplot.close(figure)


def test_a_learners_own_figure_is_shown_once_with_its_words(capsys):
    from IPython.testing.globalipapp import start_ipython

    start_ipython()
    figure, ax = pyplot.subplots()
    ax.barh(["AdamW"], [16])
    plots.show(figure, "AdamW takes 16 GB.")
    assert "AdamW takes 16 GB." in capsys.readouterr().out
    assert figure.number not in pyplot.get_fignums(), "or it would be shown twice"
    with pytest.raises(ValueError, match="one sentence that says what it shows"):
        plots.show(Figure())


def test_a_gpu_from_the_catalog_names_its_line():
    figure = plots.stack({"full": FULL}, "It fits", capacity=GPUS["A100-80GB"])
    memory = GPUS["A100-80GB"].memory
    assert figure.axes[0].lines[0].get_xdata()[0] == memory / GB
    assert f"A100-80GB: {format_bytes(memory, 'GB', 1)}" in words_in(figure)
