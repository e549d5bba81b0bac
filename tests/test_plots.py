"""Figures: what is drawn is what was given, it can be seen by everyone, and it is told in words."""

import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from itertools import accumulate, combinations, pairwise
from math import dist
from pathlib import Path
from urllib.parse import unquote

import pytest
from counting import calls

from course_utils import TrainingRun, estimate
from course_utils import figures as plots
from course_utils.authoring.pages import gpt2_xl_stack
from course_utils.breakdown import KINDS, MemoryBreakdown
from course_utils.figures import COLOURS, Figure, Segment
from course_utils.figures.axes import OVER, UNDER
from course_utils.figures.canvas import (
    NARROW,
    WIDE,
    Canvas,
    contrast,
    ink_on,
    number,
    spread,
    text_width,
    ticks,
    wrap,
)
from course_utils.figures.curves import LINE_COLOURS
from course_utils.figures.themes import DARK, THIN, UNREAD, themed
from course_utils.figures.timelines import MOST_POINTS, TIMELINE_ORDER, thin
from course_utils.gpus import GPUS
from course_utils.measurement import WORDS, Mark, Measurement, Provenance, Timeline
from course_utils.units import GB, MB, format_bytes

ROOT = Path(__file__).resolve().parent.parent
SVG = "{http://www.w3.org/2000/svg}"

NONE = MemoryBreakdown(
    {"parameters": 6 * GB, "weight_copies": 3 * GB, "optimizer_states": 12 * GB, "activations": 109 * GB},
    "backward",
)
FULL = MemoryBreakdown(
    {"parameters": 6 * GB, "optimizer_states": 12 * GB, "activations": 20 * GB, "inputs": 524_288}
)


def shapes(figure: Figure, tag: str, attribute: str = "") -> list[ElementTree.Element]:
    """The elements of a figure with that tag, and with that attribute where one is named."""
    found = ElementTree.fromstring(figure.svg).iter(SVG + tag)
    return [element for element in found if not attribute or attribute in element.attrib]


def at(shape: ElementTree.Element, name: str) -> float:
    return float(shape.attrib[name])


def texts(figure: Figure) -> list[str]:
    return [element.text or "" for element in shapes(figure, "text")]


def training(steps: int = 2, layers: int = 6, operations: int = 8) -> Measurement:
    """A made-up measurement with the shape of a real one: `steps` steps of a model of `layers` layers."""
    changes: list[tuple[int, str]] = [(70 * MB, "parameters")] * layers
    marks: list[Mark] = []
    for step in range(1, steps + 1):
        marks.append(Mark(len(changes), step, "forward"))
        one = [(25 * MB, "activations"), (40 * MB, "temporaries"), (-40 * MB, "temporaries")]
        changes += one * layers * operations
        marks.append(Mark(len(changes), step, "loss"))
        changes += [(900 * MB, "activations"), (700 * MB, "temporaries"), (-700 * MB, "temporaries")]
        marks.append(Mark(len(changes), step, "backward"))
        changes.append((-900 * MB, "activations"))
        changes += [*[(-25 * MB, "activations")] * operations, (70 * MB, "gradients")] * layers
        marks.append(Mark(len(changes), step, "optimizer"))
        changes += [(140 * MB, "optimizer_states")] * layers if step == 1 else []
        changes += [(30 * MB, "temporaries"), (-30 * MB, "temporaries")] * layers
        marks.append(Mark(len(changes), step, "zero_grad"))
        changes += [(-70 * MB, "gradients")] * layers
    timeline = Timeline(changes, marks)
    totals = timeline.totals()
    peak = max(range(len(totals)), key=totals.__getitem__) + 1
    at_peak = {kind: curve[peak - 1] for kind, curve in timeline.curves().items()}
    breakdown = MemoryBreakdown(at_peak, [mark.phase for mark in marks if mark.event < peak][-1])
    origin = Provenance("simulated", "fake", "2.13.0", "2026-11-21")
    return Measurement(
        breakdown, moments={}, phase_peaks={}, timeline=timeline, provenance=origin, peak_event=peak
    )


# ----------------------------------------------------------------------------------------------------
# color

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


def test_every_kind_has_a_color_of_its_own():
    assert set(COLOURS) == {*KINDS, "cached", "free"}
    assert len(set(COLOURS.values())) == len(COLOURS)
    assert sorted(TIMELINE_ORDER) == sorted(KINDS)


@pytest.mark.parametrize("vision", VISION)
def test_colors_are_told_apart_with_every_vision(vision):
    for (one, first), (other, second) in combinations(COLOURS.items(), 2):
        if {one, other} != {"cached", "free"}:  # hatched and plain
            assert dist(lab(first, vision), lab(second, vision)) > 14, (
                f"{one} looks like {other} with {vision}"
            )


@pytest.mark.parametrize("order", [KINDS, TIMELINE_ORDER[:3]])
def test_neighbors_differ_in_grey_print(order):
    for one, other in pairwise(order):
        assert abs(lab(COLOURS[one], "normal")[0] - lab(COLOURS[other], "normal")[0]) > 9, (
            f"{one} next to {other}"
        )


def test_text_on_every_color_and_on_paper_is_readable():
    for kind, fill in COLOURS.items():
        assert contrast(ink_on(fill), fill) >= 4.5, kind
    for color in (OVER, UNDER, plots.QUIET, *LINE_COLOURS):
        assert contrast(color, "#FFFFFF") >= 4.5, color
    assert contrast("#000000", "#FFFFFF") == pytest.approx(21)  # as WCAG has it
    assert contrast("#777777", "#FFFFFF") == pytest.approx(4.48, abs=0.01)


PAPER = DARK["#FFFFFF"]


def dark(color: str) -> str:
    return DARK.get(color, color)


def test_the_dark_theme_is_as_readable():
    for kind, fill in COLOURS.items():
        assert contrast(dark(ink_on(fill)), dark(fill)) >= 4.5, kind
        if kind not in ("cached", "free"):  # these two have an outline
            assert contrast(dark(fill), PAPER) >= 3, kind
    for color in (OVER, UNDER, plots.INK, plots.QUIET, *LINE_COLOURS):
        assert contrast(THIN.get(color) or dark(color), PAPER) >= 4.5, color
    assert contrast(dark(plots.RULE), PAPER) >= 3

    assert all(
        contrast(dark(ink_on(fill)), dark(fill)) >= 4.5
        for fill in ("#FFFFFF", "#FBE3B5", "#F2F2F2", "#332288")
    )


@pytest.mark.parametrize("vision", VISION)
def test_the_dark_colors_are_told_apart_with_every_vision(vision):
    for (one, first), (other, second) in combinations(COLOURS.items(), 2):
        assert {one, other} == {"cached", "free"} or dist(
            lab(dark(first), vision), lab(dark(second), vision)
        ) > 14, f"{one} looks like {other} with {vision}"


def test_a_themed_figure_replaces_its_colors_on_a_dark_page_alone():
    figure = plots.stack({"none": NONE}, "Themed", capacity=80 * GB)
    svg = themed(figure.svg, "wide")
    ElementTree.fromstring(svg)
    style = svg.partition("<style>")[2].partition("</style>")[0]
    assert f'.course-figure [fill="#111111"]{{fill:light-dark(#111111,{DARK["#111111"]})}}' in style
    assert "#662200" not in style, "no color that the figure does not have"
    assert svg.replace(f"<style>{style}</style>", "").replace(
        ' class="course-figure course-wide"', ""
    ) == re.sub("<desc>.*</desc>", "", figure.svg)
    lines = themed(plots.lines({"one": ([1, 2], [3, 4])}, "Lines", "x", "y").svg)
    assert '[style*="stroke: #0072b2"]{stroke:light-dark(#0072B2,#56B4E9)!important}' in lines


# ----------------------------------------------------------------------------------------------------
# stack


def test_a_stack_draws_every_byte_to_scale():
    figure = plots.stack(
        {"none": NONE, "full": FULL}, "Only full recomputation fits", capacity=GPUS["A100-80GB"]
    )
    drawn = shapes(figure, "rect", "data-bytes")
    assert sum(int(bar.attrib["data-bytes"]) for bar in drawn) == NONE.total + FULL.total
    scale = sum(at(bar, "width") for bar in drawn) / (NONE.total + FULL.total)
    for bar in drawn:
        assert at(bar, "width") == pytest.approx(at(bar, "data-bytes") * scale, abs=0.11)
        assert bar.attrib["fill"] == COLOURS[bar.attrib["data-kind"]]
    (line,) = shapes(figure, "line", "data-capacity")
    start = min(at(bar, "x") for bar in drawn)
    assert at(line, "x1") == pytest.approx(start + GPUS["A100-80GB"].memory * scale, abs=0.2)


def test_a_stack_takes_kinds_in_their_order_and_segments_in_theirs():
    figure = plots.stack({"": {"temporaries": 3, "free": 5, "parameters": 2, "cached": 4}}, "Order", unit="B")
    assert [bar.attrib["data-kind"] for bar in shapes(figure, "rect", "data-kind")][-4:] == [
        "parameters",
        "temporaries",
        "cached",
        "free",
    ]
    row = [
        Segment("fp32 momentum", 6 * GB, "optimizer_states"),
        Segment("fp16 parameters", 3 * GB, "parameters"),
    ]
    figure = plots.stack({"the slides": row}, "Named parts")
    assert [int(bar.attrib["data-bytes"]) for bar in shapes(figure, "rect", "data-bytes")] == [6 * GB, 3 * GB]
    assert "fp32 momentum" in " ".join(texts(figure))
    with pytest.raises(ValueError, match="at least one row"):
        plots.stack({}, "Nothing")
    with pytest.raises(ValueError, match="unknown kind of memory 'weights'"):
        plots.stack({"": {"weights": 3}}, "Unknown")


CROSSED = {
    "far below": {"parameters": 3.1, "optimizer_states": 18.7, "activations": 5.3, "temporaries": 3.3},
    "just below": {"parameters": 3.1, "optimizer_states": 18.7, "activations": 8.6, "temporaries": 3.3},
    "through the last": {"parameters": 3.1, "optimizer_states": 18.7, "activations": 8.6, "temporaries": 6.6},
    "at the very end": {"optimizer_states": 18.7, "temporaries": 12.5, "parameters": 3.1},
    "through the middle": {"optimizer_states": 60.0, "temporaries": 12.5},
    "through a narrow part": {"optimizer_states": 32.8, "parameters": 2.8, "temporaries": 30.0},
}


@pytest.mark.parametrize("name", CROSSED)
def test_the_capacity_line_runs_through_no_words(name):
    row = {kind: round(size * GB) for kind, size in CROSSED[name].items()}
    figure = plots.stack({"": row}, "Where the line is crossed", capacity=round(34.2 * GB))
    assert {f"{size:.1f}" for size in CROSSED[name].values()} <= set(texts(figure)), (
        "each part has its amount"
    )
    pieces = shapes(figure, "line", "data-capacity")
    assert len(pieces) == 1 or name == "through a narrow part", "a gap only where a text has no other place"
    near = [text for text in shapes(figure, "text") if 0 < at(text, "y") - at(pieces[0], "y1") < 60]
    assert any("34.2" not in (text.text or "") for text in near)
    for text in shapes(figure, "text"):
        left, right = extent(text)
        for line in pieces:
            above = at(text, "y") <= at(line, "y1")
            below = at(text, "y") - 9 >= at(line, "y2")
            assert above or below or not left < at(line, "x1") < right, text.text


def extent(text: ElementTree.Element) -> tuple[float, float]:
    """Left and right end of a text, in pixels, at the widest."""
    width = text_width(text.text or "", at(text, "font-size"), "font-weight" in text.attrib)
    x = at(text, "x")
    left = {"end": x - width, "middle": x - width / 2}.get(text.attrib.get("text-anchor", ""), x)
    return left, left + width


def test_no_text_of_a_stack_leaves_the_picture():
    rows = {
        "a label so long that it has to be broken into lines " * 2: {"parameters": 2_114 * GB},
        "small": FULL,
    }
    figure = plots.stack(rows, "Wide " * 60, capacity=34 * GB, provenance="simulated GPU " * 20)
    for text in shapes(figure, "text"):
        left, right = extent(text)
        assert left >= -1 and right <= WIDE + 1, text.text


# ----------------------------------------------------------------------------------------------------
# timeline


def test_the_timeline_names_its_peak_and_draws_it_exactly():
    run = training()
    figure = plots.timeline(run, "The loss owns the peak")
    (marker,) = shapes(figure, "path", "data-peak")
    assert int(marker.attrib["data-peak"]) == run.peak == max(run.timeline.totals())
    assert f"peak {run.peak / GB:.2f} GB in loss, step 2" in texts(figure)
    # each shows its own band
    painted = [area.attrib["data-kind"] for area in shapes(figure, "path", "data-kind")]
    assert painted == [kind for kind in reversed(TIMELINE_ORDER) if kind in painted]
    assert painted[-1] == "parameters"
    points = outline(figure)
    highest = max(y for _, y in points)
    assert highest == pytest.approx(y_of(figure, 0) - y_of(figure, run.peak), abs=0.2)
    at_peak = [x for x, y in points if y == highest]
    assert max(at_peak) - min(at_peak) >= 3.9, (
        "the event of the peak is as wide as can be seen, and not higher"
    )
    named = {"forward", "backward", "step 1", "step 2", "activations", "parameters", "optimizer states"}
    assert named <= set(texts(plots.timeline(run, "Named")))


def outline(figure: Figure) -> list[tuple[float, float]]:
    """The points of a timeline's uppermost edge, in pixels to the right and up from the axis."""
    area = shapes(figure, "path", "data-kind")[0].attrib["d"]
    steps = [int(number) for number in re.findall(r"-?\d+", area)]
    xs = accumulate(steps[::2])
    ys = accumulate(steps[1::2])
    return [(x / 10, y / 100) for x, y in zip(xs, ys, strict=True)]


def y_of(figure: Figure, size: float) -> float:
    """Where the figure's own axis puts `size` bytes: read from two of its labels."""
    ends = [text for text in shapes(figure, "text") if text.attrib.get("text-anchor") == "end"]
    labels = {
        float(end.text or ""): at(end, "y") - 4 for end in ends if re.fullmatch(r"[\d.]+", end.text or "")
    }
    low = min(labels)
    high = max(labels)
    return labels[low] + (labels[high] - labels[low]) * (size / GB - low) / (high - low)


@pytest.mark.parametrize("gb", [4.1, 4.3, 4.4, 4.6, 5.5])
def test_the_capacity_line_does_not_cross_the_name_of_the_peak(gb):
    figure = plots.timeline(training(), "Near", capacity=round(gb * GB))
    (line,) = shapes(figure, "line", "data-capacity")
    name = next(text for text in shapes(figure, "text") if (text.text or "").startswith("peak 4.06 GB"))
    over = at(name, "y") - at(line, "y1")
    assert not -3 < over < 12, "the line runs through the letters, which reach 11 pixels up"


def test_the_timeline_shows_only_the_steps_asked_for():
    figure = plots.timeline(training(steps=4), "Two of four", steps=[2, 3])
    assert {"step 2", "step 3"} <= set(texts(figure))
    assert not {"step 1", "step 4"} & set(texts(figure))
    with pytest.raises(ValueError, match=r"steps \[5\] asked for; measured were \[1, 2, 3, 4\]"):
        plots.timeline(training(steps=4), "No such step", steps=[5])
    with pytest.raises(ValueError, match="no events"):
        plots.timeline(replace(training(), timeline=Timeline([], [])), "Empty")


def test_letters_pin_moments_to_the_axis():
    run = training()
    begins = {mark.phase: mark.event for mark in run.timeline.marks if mark.step == 2}
    letters = {"A": begins["forward"], "B": begins["loss"]}
    figure = plots.timeline(run, "What happens at A and B?", steps=[2], letters=letters)
    starts = {line.attrib["data-phase"]: at(line, "x1") for line in shapes(figure, "line", "data-phase")}
    assert starts["backward"] - starts["loss"] >= 25, "three events long, and still wide enough to see"
    pins = {pin.attrib["data-letter"]: at(pin, "x") + 9 for pin in shapes(figure, "rect", "data-letter")}
    assert pins == {
        "A": pytest.approx(starts["forward"], abs=0.2),
        "B": pytest.approx(starts["loss"], abs=0.2),
    }
    assert {"A", "B", "loss"} <= set(texts(figure))
    axis = next(at(text, "y") for text in shapes(figure, "text") if text.text == "0")
    lowest = max(at(pin, "y") + 18 for pin in shapes(figure, "rect", "data-letter"))
    assert lowest <= axis, "a letter hides no number of the axis"
    with pytest.raises(ValueError, match=r"C is at event 0; shown are \d+ to \d+"):
        plots.timeline(run, "Not shown", steps=[2], letters={"C": 0})


def test_thinning_keeps_every_peak_that_matters():
    totals = [(7919 * k) % 1000 for k in range(30_000)]
    totals[12_345], totals[29_999] = 5_000, 4_000
    kept = thin(totals, 0, 29_999, keep=[77])
    assert len(kept) <= MOST_POINTS and kept == sorted(set(kept))
    assert {0, 77, 12_345, 29_999} <= set(kept)
    for start in range(0, 30_000, 60):
        near = [totals[k] for k in kept if start - 60 <= k < start + 120]
        assert max(near) >= max(totals[start : start + 60])


def test_a_long_timeline_is_drawn_quickly_and_small():
    run = training(steps=4, layers=48, operations=52)
    assert len(run.timeline) > 30_000
    assert calls(lambda: plots.timeline(run, "Long")) < 40 * len(run.timeline)
    assert len(plots.timeline(run, "Long").svg.encode()) < 200_000


# ----------------------------------------------------------------------------------------------------
# others


def test_estimate_and_measurement_side_by_side_with_signed_differences():
    run = training()
    parts = dict(run.breakdown) | {"activations": run.breakdown["activations"] + 100 * MB, "temporaries": 0}
    figure = plots.compare_bars(MemoryBreakdown(parts), run, "Two differences")
    drawn = [
        sum(at(bar, name) for bar in shapes(figure, "rect", name))
        for name in ("data-estimated", "data-measured")
    ]
    assert drawn == [sum(parts.values()), run.peak]
    assert {"+0.100 GB", "−0.700 GB", "−100 %", "0", "−0.600 GB"} <= set(texts(figure))
    assert {run.word, str(run.provenance)} <= set(
        texts(figure)
    ) and f"{format_bytes(run.peak, 'GB', 3)} {run.word}" in figure.alt


@pytest.mark.parametrize(
    ("source", "word"), [("live", "measured"), ("cpu", "measured"), ("simulated", "simulated")]
)
def test_bytes_are_called_measured_only_where_a_device_was_there(source, word):
    run = training()
    run = replace(run, provenance=replace(run.provenance, source=source))
    figure = plots.compare_bars(run.breakdown, run, "None")
    assert [text for text in texts(figure) if text in WORDS.values()] == [word, word]
    assert ("measured" in figure.alt) == (word == "measured")


def test_bars_print_bytes_and_plain_numbers():
    assert {"16.0 GB", "AdamW"} <= set(texts(plots.bars({"AdamW": 16 * GB, "SGD": 8 * GB}, "Bytes")))
    figure = plots.bars({"forward": 12.0, "backward": 24.0}, "Milliseconds", unit="ms")
    assert {"12.0 ms", "24.0 ms"} <= set(texts(figure))
    one, two = (at(bar, "width") for bar in shapes(figure, "rect", "data-value"))
    assert two == pytest.approx(2 * one, abs=0.11)
    with pytest.raises(ValueError, match="none below zero"):
        plots.bars({"lost": -1}, "Negative")
    figure = plots.bars({"flash": GB, "eager": 2 * GB}, "Kept", kind="activations", highlight="eager")
    colors = [bar.attrib["fill"] for bar in shapes(figure, "rect", "data-value")]
    assert colors == [COLOURS["temporaries"], COLOURS["activations"]]


def test_lines_are_named_at_their_ends():
    series = {"eager": ([1, 2, 4], [3.0, 6.0, 12.0]), "flash": ([1, 2, 4], [3.0, 6.0, 11.9])}
    figure = plots.lines(series, "Two slopes", "sequences", "GB", level=("32 GB card", 32))
    ends = [at(t, "y") for t in shapes(figure, "text") if t.text in series]
    assert abs(ends[0] - ends[1]) >= 16, "names of lines that end together must not overlap"
    assert {"32 GB card", "sequences", "GB", "1", "2", "4"} <= set(texts(figure))
    figure = plots.lines({"b < 2 & $s^2$": ([1, 2], [1.3374e-9, 134_512.0])}, "Costs $5_000$ > all", "x", "y")
    assert {"b < 2 & $s^2$", "Costs $5_000$ > all"} <= set(texts(figure)), "words are taken as they are"
    assert "$ goes from 1.337·10⁻⁹ at 1 to 134,500 at 2" in figure.alt


@pytest.mark.parametrize(
    ("line", "log", "said"),
    [
        (None, False, "0 lines"),
        (([1, 2], [1]), False, "2 x values and 1 y"),
        (([0, 2], [1, 2]), True, "logarithmic"),
    ],
)
def test_lines_that_cannot_be_drawn_are_refused(line, log, said):
    with pytest.raises(ValueError, match=said):
        plots.lines({"one": line} if line else {}, "None", "x", "y", log_x=log)


def test_circles_are_not_joined():
    series = {"measured": ([1, 2, 4], [1, 3, 5])}
    joined = plots.lines(series, "A few", "x", "y", markers=False).svg.count("stroke-width: 2.2")
    apart = plots.lines(series, "A few", "x", "y", circles=["measured"]).svg.count("stroke-width: 2.2")
    assert (joined, apart) == (1, 4), "one line; three circles and the shape that they repeat"


@pytest.mark.parametrize(("ys", "side"), [([20, 15, 10], None), ([74, 30, 10], "end")])
def test_a_levels_name_hides_no_line(ys: list[float], side: str | None):
    figure = plots.lines(
        {"falling": ([1, 2, 3], ys), "high": ([1, 2, 3], [90] * 3)}, "t", "x", "y", level=("card", 70)
    )
    (name,) = (text for text in shapes(figure, "text") if text.text == "card")
    found = re.search("text-anchor: (end)", name.attrib["style"])
    assert (found and found[1]) == side


def test_lines_are_drawn_where_their_values_are():
    figure = plots.lines({"one": ([1, 2, 4], [30, 60, 120])}, "To scale", "x", "y", log_x=True)
    (line,) = (
        shape for shape in shapes(figure, "path") if "stroke: #0072b2" in shape.attrib["style"].lower()
    )
    numbers = [float(number) for number in re.findall(r"-?[\d.]+", line.attrib["d"])]
    across = numbers[::2]
    down = numbers[1::2]
    assert across[1] - across[0] == pytest.approx(across[2] - across[1]), (
        "doubling is one step on a logarithmic axis"
    )
    assert down[1] - down[2] == pytest.approx(2 * (down[0] - down[1]))
    labels = {text.text: at(text, "x") for text in shapes(figure, "text")}
    assert [labels[name] for name in ("1", "2", "4")] == pytest.approx(across)


def test_lines_leave_matplotlib_as_it_was_and_do_not_heed_its_settings():
    import matplotlib

    series = {"one": ([1, 2], [3, 4])}
    plain = plots.lines(series, "Settings", "x", "y").svg
    with matplotlib.rc_context(
        {"font.size": 30, "axes.grid": True, "lines.marker": "s", "svg.fonttype": "path"}
    ):
        before = dict(matplotlib.rcParams)
        assert plots.lines(series, "Settings", "x", "y").svg == plain
        assert dict(matplotlib.rcParams) == before


def test_lines_are_silent_and_the_same_on_a_machine_where_matplotlib_is_new(tmp_path):
    script = """
import sys, course_utils.figures as figures
assert not {'torch', 'matplotlib', 'ipywidgets', 'numpy'} & set(sys.modules), 'drawing needs none of them'
print(figures.lines({'one': ([1, 2], [3, 4])}, 'New', 'x', 'y').svg)
assert 'matplotlib.pyplot' not in sys.modules
"""
    fresh = {**os.environ, "MPLCONFIGDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, env=fresh
    )
    assert done.stderr == ""
    assert done.stdout.strip() == plots.lines({"one": ([1, 2], [3, 4])}, "New", "x", "y").svg


def elements(svg: str) -> list[tuple[str, dict[str, str], str]]:
    """Everything in a picture but its theme and its description."""
    found = [
        one for one in ElementTree.fromstring(svg).iter() if one.tag not in (f"{SVG}style", f"{SVG}desc")
    ]
    looks = [{name: value for name, value in one.attrib.items() if name != "class"} for one in found]
    return [
        (one.tag, look, " ".join((one.text or "").split())) for one, look in zip(found, looks, strict=True)
    ]


def every_figure() -> dict[str, Figure]:
    return {
        "stack": plots.stack(
            {"none": NONE, "full": FULL}, "Only <full> & nothing else fits", capacity=80 * GB
        ),
        "timeline": plots.timeline(training(), "The loss owns the peak", capacity=16 * GB),
        "compare": plots.compare_bars(NONE, training(), "Far apart"),
        "bars": plots.bars({"AdamW": 16 * GB, "SGD": 8 * GB}, "Adam costs double"),
        "lines": plots.lines(
            {"eager": ([1, 2], [3, 4])}, "Rising", "sequences", "GB", log_x=True, log_y=True
        ),
    }


@pytest.mark.parametrize("name", every_figure())
def test_every_figure_says_in_words_what_it_shows_is_the_same_each_time_and_needs_nothing_but_itself(name):
    figure = every_figure()[name]
    root = ElementTree.fromstring(figure.svg)
    assert root.attrib["role"] == "img" and root.attrib["aria-label"] == figure.alt
    assert root.findtext(f"{SVG}desc") == figure.alt
    assert len(figure.alt) > len(root.findtext(f"{SVG}title") or "") + 20
    bundle = figure._repr_mimebundle_()
    assert bundle == {"text/html": figure.html, "text/plain": figure.alt}
    image = ElementTree.fromstring(bundle["text/html"].partition(">")[0] + "/>")
    assert image.tag == "img" and image.attrib["alt"] == figure.alt
    kind, _, data = image.attrib["src"].partition(",")
    assert kind == "data:image/svg+xml"
    narrow = bundle["text/html"].partition('<script type="image/svg+xml">')[2].partition("</script>")[0]
    for stored, svg in ((unquote(data), figure.svg), (narrow, figure.narrow)):
        assert "</script>" not in svg
        assert elements(stored) == elements(UNREAD.sub("", svg))
    assert repr(figure) == figure.alt
    assert figure.svg == every_figure()[name].svg
    for svg in (figure.svg, figure.narrow):
        assert not re.search(r'<style|<script|url\(|href="[^#]|<image', svg), (
            "it would reach out, or be dropped"
        )
    assert shapes(figure, "rect")[0].attrib["fill"] == "#FFFFFF"
    assert not re.search(r"https?://(?!www.w3.org)", figure.html + figure.inline)


@pytest.mark.parametrize("name", every_figure())
def test_the_narrow_layout_has_the_same_content_and_no_small_or_cut_text(name):
    figure = every_figure()[name]
    narrow = Figure(figure.narrow, figure.alt)
    assert ElementTree.fromstring(narrow.svg).attrib["viewBox"].startswith(f"0 0 {NARROW} ")
    for data in ("data-bytes", "data-value", "data-peak", "data-capacity"):
        wide, other = (
            [shape.attrib[data] for shape in ElementTree.fromstring(svg).iter() if data in shape.attrib]
            for svg in (figure.svg, figure.narrow)
        )
        if data == "data-capacity":
            # a line has gaps where words are
            wide = set(wide)
            other = set(other)
        assert sorted(wide) == sorted(other) or name == "compare", data
    for text in shapes(narrow, "text", "font-size"):
        left, right = extent(text)
        upright = "transform" in text.attrib
        assert at(text, "font-size") >= 11 and (upright or (left >= -1 and right <= NARROW + 1)), text.text
    assert Figure("<svg>", "one layout").narrow == ""


def test_picture_and_description_tell_totals_what_is_missing_or_free_and_the_largest_kind():
    figure = every_figure()["stack"]
    assert {"130.0 GB", "50.0 GB too much", "38.0 GB", "42.0 GB free", "80 GB GPU"} <= set(texts(figure))
    alt = figure.alt
    assert "none: 130.0 GB, most of it activations (109.0), 50.0 GB too much" in alt
    assert plots.stack({"": FULL}, "Own words", alt="My own words").alt == "My own words"
    told = every_figure()["timeline"].alt
    assert "The peak is 4.06 GB in loss, step 2" in told and "activations 2.10" in told


def test_a_figure_is_saved_as_svg(tmp_path):
    figure = every_figure()["bars"]
    assert figure.save(tmp_path / "bars.svg").read_text(encoding="utf-8") == figure.svg
    with pytest.raises(ValueError, match=r"'bars\.gif' must end in \.svg, \.png or \.pdf"):
        figure.save(tmp_path / "bars.gif")


def test_the_front_picture_shows_the_estimates_beside_a_card_of_32_gb():
    run = TrainingRun("gpt2-xl", micro_batch=32, seq_len=1024)
    ways = [{}, {"recompute": "full"}, {"recompute": "full", "precision": "bf16-master"}]
    ways += [{**ways[-1], "loss_chunks": 8}, {**ways[-1], "micro_batch": 4, "accumulation_steps": 8}]
    figure = gpt2_xl_stack()
    assert (ROOT / "docs/images/gpt2-xl-stack.svg").read_text(encoding="utf-8") == figure.svg
    drawn = sum(at(bar, "data-bytes") for bar in shapes(figure, "rect", "data-bytes"))
    assert drawn == sum(estimate(run.replace(**way)).total for way in ways)
    verdicts = {text for text in texts(figure) if text.endswith((" free", " too much"))}
    assert verdicts == {
        "7.4 GB free",
        "4.9 GB free",
        "2.8 GB too much",
        "11.6 GB too much",
        "100.3 GB too much",
    }
    (alt,) = re.findall(
        r"!\[([^\]]+)\]\(docs/images/gpt2-xl-stack\.svg\)", (ROOT / "README.md").read_text("utf-8")
    )
    totals = dict.fromkeys(text for text in texts(figure) if re.fullmatch(r"\d+\.\d GB", text))
    assert len(totals) == 5 and re.findall(r"\d+\.\d GB", alt) == list(totals), (
        "the description says each total"
    )


def test_drawing_helpers():
    assert ticks(0, 134.4) == [0, 20, 40, 60, 80, 100, 120]
    assert ticks(0, 0.07) == pytest.approx([0, 0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.07])
    assert spread([5, 5, 6], 10, 0, 100) == [5, 15, 25]
    assert spread([98, 99], 10, 0, 100) == [90, 100]
    assert all(text_width(line, 12) <= 100 for line in wrap("several words to be broken into lines", 12, 100))
    canvas = Canvas()
    canvas.hatch(10, 20, 37, 12, "#000000")
    numbers = [float(n) for n in re.findall(r"-?[\d.]+", canvas.shapes[0].split('"')[1])]
    for x, y, right, down in zip(*(iter(numbers),) * 4, strict=True):
        assert 10 <= x + right <= x <= 47 and 20 <= y <= y + down <= 32


NUMBERS = {
    0: "0",
    1e-5: "10⁻⁵",
    -3e-6: "−3·10⁻⁶",
    2.5e-7: "2.5·10⁻⁷",
    0.0001: "0.0001",
    0.25: "0.25",
    65536: "65,536",
}


@pytest.mark.parametrize(("value", "shown"), NUMBERS.items())
def test_numbers_on_axes_need_no_letter_e(value: float, shown: str):
    assert number(value) == shown
