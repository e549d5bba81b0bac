"""The way to matplotlib: Axes hold the given numbers, in their colors, and can be restyled and saved."""

import sys
from typing import Any

import matplotlib
import pytest
from made_up import FULL, NONE, every_figure, training
from matplotlib import pyplot
from matplotlib.colors import to_hex
from matplotlib.figure import Figure as Drawing

from course_utils import figures as plots
from course_utils.breakdown import MemoryBreakdown
from course_utils.figures import COLOURS, Figure
from course_utils.figures.canvas import below_one_another
from course_utils.figures.curves import LINE_COLOURS
from course_utils.units import GB, MB


@pytest.fixture
def ax() -> Any:  # matplotlib's own hints do not say what its artists hold
    """Axes of a learner's own, which pyplot knows nothing of."""
    return Drawing(figsize=(6, 3)).add_subplot()


def bars_of(ax: Any) -> list[tuple[int, float, float, str]]:
    """Row (0 is on top), left end, length and color of each bar that has a length."""
    found = [(bar, to_hex(bar.get_facecolor()).upper()) for bar in ax.patches if bar.get_width()]
    return [
        (round(bar.get_y() + bar.get_height() / 2), bar.get_x(), bar.get_width(), color)
        for bar, color in found
    ]


def rows_of(ax: Any) -> list[str]:
    return [label.get_text() for label in ax.get_yticklabels()]


def legend_of(ax: Any) -> list[str]:
    legend = ax.get_legend()
    return [] if legend is None else [text.get_text().replace("\n", " ") for text in legend.get_texts()]


def words_in(ax: Any) -> list[str]:
    return [text.get_text() for text in ax.texts]


def test_a_stack_has_each_kinds_bytes_one_after_the_other(ax: Any) -> None:
    figure = plots.stack(
        {"none": NONE, "full": FULL}, "Only one fits", capacity=80 * GB, nominal=90 * GB, provenance="told"
    )
    assert figure.plot(ax) is ax
    kinds = [COLOURS[kind] for kind in ("parameters", "weight_copies", "optimizer_states", "activations")]
    first = [(0, 0, 6, kinds[0]), (0, 6, 3, kinds[1]), (0, 9, 12, kinds[2]), (0, 21, 109, kinds[3])]
    second = [(1, 0, 6, kinds[0]), (1, 6, 12, kinds[2]), (1, 18, 20, kinds[3])]
    assert bars_of(ax)[:7] == first + second and bars_of(ax)[7][2] == pytest.approx(524_288 / GB)
    assert rows_of(ax) == ["none", "full"] and ax.get_ylim()[0] > ax.get_ylim()[1], "the first is on top"
    assert (ax.get_title(), ax.get_xlabel()) == ("Only one fits", "GB (1 GB = 10⁹ bytes)")
    assert [line.get_xdata()[0] for line in ax.lines] == [80, 90]
    kinds_named = ["parameters", "weight copies", "optimizer states", "activations", "inputs"]
    assert legend_of(ax) == [*kinds_named, "80 GB GPU"]
    assert words_in(ax) == ["130.0 GB\n50.0 GB too much", "38.0 GB\n42.0 GB free", "told"]


def test_bars_have_their_values_and_one_is_set_off(ax: Any) -> None:
    plots.bars(
        {"flash": GB, "eager": 2 * GB, "gradients": 3 * GB}, "Kept", kind="activations", highlight="eager"
    ).plot(ax)
    colors = [COLOURS[kind] for kind in ("temporaries", "activations", "gradients")]
    assert bars_of(ax) == [(0, 0, 1, colors[0]), (1, 0, 2, colors[1]), (2, 0, 3, colors[2])]
    assert words_in(ax) == ["1.00 GB", "2.00 GB", "3.00 GB"] and legend_of(ax) == []
    other = plots.bars({"forward": 12.0, "backward": 24.0}, "Times", unit="ms").plot(Drawing().add_subplot())
    assert [bar[2] for bar in bars_of(other)] == [12, 24] and other.get_xlabel() == "ms"
    assert plots.bars({"nothing": 0}, "None").plot(Drawing().add_subplot()).get_xlim() == (0, 1)


def test_estimate_and_measurement_are_pairs_of_bars(ax: Any) -> None:
    run = training()
    parts = dict(run.breakdown) | {"activations": run.breakdown["activations"] + 100 * MB, "temporaries": 0}
    plots.compare_bars(MemoryBreakdown(parts), run, "Two differences").plot(ax)
    lengths = {
        round(bar.get_y() + bar.get_height() / 2, 2): bar.get_width() for bar in ax.patches if bar.get_width()
    }
    drawn = [name.replace(" ", "_") for name in rows_of(ax)]
    assert drawn == ["parameters", "optimizer_states", "activations", "temporaries"]
    for place, kind in enumerate(drawn):
        pair = [lengths.get(round(place + side, 2), 0) for side in (-0.19, 0.19)]
        assert pair == [parts[kind] / GB, run.breakdown[kind] / GB]
    assert {"+0.100 GB +4.8 %", "−0.700 GB −100 %", "0"} <= set(words_in(ax)) and str(
        run.provenance
    ) in words_in(ax)
    assert legend_of(ax) == ["estimated 3.460 GB", "simulated 4.060 GB"]


def upper_edge(area, count: int) -> float:
    """The height of an area just after an event."""
    [path] = area.get_paths()
    upper = path.vertices[1 : len(path.vertices) // 2]  # the lower edge comes back
    lower = path.vertices[len(path.vertices) // 2 :]
    ys = [{y for x, y in edge if x == count} for edge in (upper, lower)]
    return max(ys[0] | ys[1])


def test_a_timeline_has_each_kinds_bytes_after_each_event(ax: Any) -> None:
    run = training()
    plots.timeline(run, "The loss owns the peak", steps=[2], letters={"A": 300}, capacity=5 * GB).plot(ax)
    order = ["parameters", "optimizer states", "gradients", "activations", "temporaries"]
    assert [area.get_label() for area in ax.collections] == order
    assert [to_hex(area.get_facecolor()[0]).upper() for area in ax.collections] == [
        COLOURS[kind.replace(" ", "_")] for kind in order
    ]
    first = next(mark.event for mark in run.timeline.marks if mark.step == 2)
    assert ax.get_xlim() == (first, len(run.timeline))
    totals = run.timeline.totals()
    top = ax.collections[-1]
    peak = max(vertex[1] for vertex in top.get_paths()[0].vertices)
    assert peak == pytest.approx(run.peak / GB)
    assert upper_edge(top, 300) == pytest.approx(max(totals[298], totals[299]) / GB)
    at_peak = {text.get_text(): text.xy for text in ax.texts if hasattr(text, "xy")}
    assert at_peak["peak 4.06 GB in loss"] == (run.peak_event, pytest.approx(4.06))
    assert at_peak["A"] == (300, pytest.approx(totals[299] / GB))
    assert {"step 2", "forward", "backward"} <= set(words_in(ax)) and "step 1" not in words_in(ax)
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("allocations and frees, in order", "GB allocated")
    assert legend_of(ax) == [*reversed(order), "5 GB GPU"]


def test_lines_have_their_points_their_colors_and_their_scales(ax: Any) -> None:
    ax.plot([0, 1], [5, 5], label="the learner's")
    series = {"eager": ([1, 2, 64], [3.0, 6.0, 12.0]), "flash": ([1, 2, 4], [3.0, 6.0, 11.9])}
    look = {
        "log_x": True,
        "circles": ["flash"],
        "bands": {"eager": ([2, 5, 10], [4, 7, 13])},
        "level": ("32 GB card", 32),
    }
    plots.lines(series, "Two slopes", "sequences", "GB", **look).plot(ax)
    for line, color, (name, points) in zip(ax.lines[1:], LINE_COLOURS, series.items(), strict=False):
        assert (list(line.get_xdata()), list(line.get_ydata())) == points and line.get_label() == name
        assert to_hex(line.get_markeredgecolor() if name == "flash" else line.get_color()).upper() == color
        assert line.get_clip_on(), "a learner may zoom in"
    assert ax.lines[2].get_linestyle() == "None", "what was measured here and there is not joined"
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "linear") and ax.get_ylim()[
        0
    ] == 0 < 32 < ax.get_ylim()[1]
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("sequences", "GB") and legend_of(ax)[1:] == [
        "eager",
        "flash",
    ]
    # the band
    assert ax.lines[3].get_ydata() == [32, 32] and "32 GB card" in words_in(ax) and len(ax.collections) == 1
    assert ax.xaxis.get_major_formatter()(65536) == "65,536"
    assert ax.xaxis.get_major_formatter()(1e-5) == "10⁻⁵"


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", every_figure())
def test_every_form_is_saved_as_png_and_pdf_on_white_and_leaves_nothing_behind(name: str, tmp_path) -> None:
    figure = every_figure()[name]
    with matplotlib.rc_context({"font.size": 30, "axes.facecolor": "red", "savefig.facecolor": "red"}):
        before = dict(matplotlib.rcParams)
        open_before = pyplot.get_fignums()
        paths = [figure.save(str(tmp_path / f"figure{ending}")) for ending in (".png", ".pdf", ".svg")]
        assert dict(matplotlib.rcParams) == before and pyplot.get_fignums() == open_before
    assert [path.read_bytes()[:4] for path in paths] == [b"\x89PNG", b"%PDF", b"<svg"]
    assert paths[2].read_text(encoding="utf-8") == figure.svg, "lessons' own picture"
    picture = pyplot.imread(paths[0])
    assert picture.shape[:2] == (1000, 2000)
    assert all((picture[row, column] == 1).all() for row in (0, -1) for column in (0, -1))
    assert picture[:, :, :3].min() < 0.2 and (picture[0] == 1).all(), (
        "drawn, and nothing is cut off at the top"
    )


def test_a_new_figure_is_shown_by_a_notebook_and_restyled_by_a_learner(tmp_path) -> None:
    with matplotlib.rc_context({"font.size": 30, "axes.grid": True}):
        ax: Any = every_figure()["stack"].plot()
    try:
        assert ax.figure.number in pyplot.get_fignums() and ax.title.get_fontsize() == pytest.approx(14.4)
        assert ax.get_title() == "Only <full> & nothing else fits"
        assert to_hex(ax.figure.get_facecolor()) == "#ffffff"
        ax.set_title("My own conclusion")
        ax.figure.set_size_inches(5, 3)
        ax.figure.savefig(tmp_path / "mine.png", dpi=100)
        assert pyplot.imread(tmp_path / "mine.png").shape[:2] == (300, 500)
        assert ax.get_title() == "My own conclusion" and bars_of(ax)[0][3] == COLOURS["parameters"]
    finally:
        pyplot.close(ax.figure)


def test_what_cannot_be_drawn_by_matplotlib_says_so(tmp_path, monkeypatch) -> None:
    figure = every_figure()["bars"]
    for other in (Figure("<svg>", "by hand"), below_one_another([figure, figure], "Two")):
        for use in (lambda one: one.plot(), lambda one: one.save(tmp_path / "one.png")):
            with pytest.raises(
                ValueError, match=r"drawn by the course alone, not by matplotlib: save it as \.svg"
            ):
                use(other)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "matplotlib", None)
        for use in (lambda: figure.plot(), lambda: figure.save(tmp_path / "one.pdf")):
            with pytest.raises(
                ImportError, match="matplotlib, which is missing: run `python3 -m pip install mat"
            ):
                use()
        assert figure.save(tmp_path / "one.svg").exists()
    assert {path.name for path in tmp_path.iterdir()} == {"one.svg"}
