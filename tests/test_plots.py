"""Figures: what is drawn is what was given, it can be seen by everyone, and it is told in words."""

import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from itertools import combinations, pairwise
from math import dist
from pathlib import Path

import pytest
from made_up import FULL, NONE, every_figure, training

from course_utils import TrainingRun, estimate
from course_utils import figures as plots
from course_utils.authoring.pages import gpt2_xl_stack
from course_utils.breakdown import KINDS, MemoryBreakdown
from course_utils.figures import COLOURS, Figure, Segment
from course_utils.figures.axes import OVER, UNDER
from course_utils.figures.canvas import contrast, ink_on
from course_utils.figures.curves import LINE_COLOURS
from course_utils.figures.themes import DARK, THIN
from course_utils.figures.timelines import MOST_POINTS, TIMELINE_ORDER, thin
from course_utils.gpus import GPUS
from course_utils.measurement import WORDS, Timeline
from course_utils.units import GB, MB, format_bytes

ROOT = Path(__file__).resolve().parent.parent
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


PAPER = DARK["#FFFFFF"]


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


def test_the_timeline_shows_only_the_steps_asked_for():
    figure = plots.timeline(training(steps=4), "Two of four", steps=[2, 3])
    assert {"step 2", "step 3"} <= set(texts(figure))
    assert not {"step 1", "step 4"} & set(texts(figure))
    with pytest.raises(ValueError, match=r"steps \[5\] asked for; measured were \[1, 2, 3, 4\]"):
        plots.timeline(training(steps=4), "No such step", steps=[5])
    with pytest.raises(ValueError, match="no events"):
        plots.timeline(replace(training(), timeline=Timeline([], [])), "Empty")


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


@pytest.mark.parametrize("name", every_figure())
def test_every_figure_says_in_words_what_it_shows_is_the_same_each_time_and_needs_nothing_but_itself(name):
    figure = every_figure()[name]
    root = ElementTree.fromstring(figure.svg)
    assert root.attrib["role"] == "img" and root.attrib["aria-label"] == figure.alt
    assert root.findtext(f"{SVG}desc") == figure.alt
    assert len(figure.alt) > len(root.findtext(f"{SVG}title") or "") + 20
    bundle = figure._repr_mimebundle_()
    assert bundle == {"text/html": figure.html, "text/plain": figure.alt}
    assert repr(figure) == figure.alt
    assert figure.svg == every_figure()[name].svg
    for svg in (figure.svg, figure.narrow):
        assert not re.search(r'<style|<script|url\(|href="[^#]|<image', svg), (
            "it would reach out, or be dropped"
        )
    assert shapes(figure, "rect")[0].attrib["fill"] == "#FFFFFF"
    assert not re.search(r"https?://(?!www.w3.org)", figure.html + figure.inline)


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
