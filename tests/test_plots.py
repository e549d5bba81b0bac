"""Figures: what is drawn is what was given, it can be seen by everyone, and it is told in words."""

import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from itertools import combinations, pairwise
from math import dist

import pytest
from made_up import FIGURES, FULL, NONE, training

from course_utils import figures as plots
from course_utils.breakdown import KINDS, MemoryBreakdown
from course_utils.figures import COLOURS, Figure
from course_utils.figures.axes import OVER, UNDER
from course_utils.figures.canvas import contrast, ink_on
from course_utils.figures.curves import LINE_COLOURS
from course_utils.figures.themes import DARK
from course_utils.figures.timelines import MOST_POINTS, TIMELINE_ORDER, thin
from course_utils.gpus import GPUS
from course_utils.measurement import WORDS
from course_utils.units import GB, MB, format_bytes

SVG = "{http://www.w3.org/2000/svg}"


def shapes(figure: Figure, tag: str, attribute: str = "") -> list[ElementTree.Element]:
    """The elements of a figure with that tag, and with that attribute where one is named."""
    found = ElementTree.fromstring(figure.svg).iter(SVG + tag)
    return [element for element in found if not attribute or attribute in element.attrib]


def at(shape: ElementTree.Element, name: str) -> float:
    return float(shape.attrib[name])


def texts(figure: Figure) -> list[str]:
    return [element.text or "" for element in shapes(figure, "text")]


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


def dark(color: str) -> str:
    return DARK.get(color, color)


@pytest.mark.parametrize("vision", VISION)
def test_kinds_are_told_apart_with_every_vision_in_both_themes(vision):
    assert set(COLOURS) == {*KINDS, "cached", "free"}
    for (one, first), (other, second) in combinations(COLOURS.items(), 2):
        if {one, other} == {"cached", "free"}:  # hatched and plain
            continue
        assert dist(lab(first, vision), lab(second, vision)) > 14, f"{one} and {other} with {vision}"
        assert dist(lab(dark(first), vision), lab(dark(second), vision)) > 14, f"dark {one} and {other}"


def test_text_on_every_color_and_on_paper_is_readable():
    for kind, fill in COLOURS.items():
        assert contrast(ink_on(fill), fill) >= 4.5, kind
    for color in (OVER, UNDER, plots.QUIET, *LINE_COLOURS):
        assert contrast(color, "#FFFFFF") >= 4.5, color
    assert contrast("#000000", "#FFFFFF") == pytest.approx(21)  # as WCAG has it
    assert contrast("#777777", "#FFFFFF") == pytest.approx(4.48, abs=0.01)


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


# ----------------------------------------------------------------------------------------------------
# timeline


def test_the_timeline_names_its_peak_and_draws_it_exactly():
    run = training()
    figure = plots.timeline(run, "The loss owns the peak")
    (marker,) = shapes(figure, "path", "data-peak")
    assert int(marker.attrib["data-peak"]) == run.peak == max(run.timeline.totals())
    assert f"peak {run.peak / GB:.2f} GB in loss, step 2" in texts(figure)
    named = {"forward", "backward", "step 1", "step 2", "activations", "parameters", "optimizer states"}
    assert named <= set(texts(plots.timeline(run, "Named")))


def test_thinning_keeps_every_peak_that_matters():
    totals = [(7919 * k) % 1000 for k in range(30_000)]
    totals[12_345], totals[29_999] = 5_000, 4_000
    kept = thin(totals, 0, 29_999, keep=[77])
    assert len(kept) <= MOST_POINTS and kept == sorted(set(kept))
    assert {0, 77, 12_345, 29_999} <= set(kept)
    for start in range(0, 30_000, 60):
        near = [totals[k] for k in kept if start - 60 <= k < start + 120]
        assert max(near) >= max(totals[start : start + 60])


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


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_says_in_words_what_it_shows_is_the_same_each_time_and_needs_nothing_but_itself(name):
    figure = FIGURES[name]()
    root = ElementTree.fromstring(figure.svg)
    assert root.attrib["role"] == "img" and root.attrib["aria-label"] == figure.alt
    assert root.findtext(f"{SVG}desc") == figure.alt
    assert len(figure.alt) > len(root.findtext(f"{SVG}title") or "") + 20
    bundle = figure._repr_mimebundle_()
    assert bundle == {"text/html": figure.html, "text/plain": figure.alt}
    assert repr(figure) == figure.alt
    assert figure.svg == FIGURES[name]().svg
    for svg in (figure.svg, figure.narrow):
        assert not re.search(r'<style|<script|url\(|href="[^#]|<image', svg), (
            "it would reach out, or be dropped"
        )
    assert shapes(figure, "rect")[0].attrib["fill"] == "#FFFFFF"
    assert not re.search(r"https?://(?!www.w3.org)", figure.html + figure.inline)


@pytest.mark.parametrize("order", [KINDS, TIMELINE_ORDER[:3]])
def test_neighbors_differ_in_grey_print(order):
    for one, other in pairwise(order):
        assert abs(lab(COLOURS[one], "normal")[0] - lab(COLOURS[other], "normal")[0]) > 9, (
            f"{one} next to {other}"
        )
