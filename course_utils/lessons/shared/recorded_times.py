"""What lessons say of a GPU's time: figures from recordings, and where there are none, that they wait, and for what."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from course_utils.errors import unknown
from course_utils.figures import bars, lines
from course_utils.figures.canvas import Figure
from course_utils.measuring.recorded import Recording, newest
from course_utils.recording.comparisons import COMPARISONS, spread

TOPICS = (*COMPARISONS, "attention")

COMMAND = "python3 -m course_utils record --out course_utils/recordings --only {}"


@dataclass(frozen=True)
class RecordedTimes:
    """What is recorded of a topic: `figures` to look at and `words` that say what they show; or, where nothing is, the
    `command` that records it. Draws itself.
    """

    topic: str
    figures: Sequence[Figure]
    words: str
    command: str = ""

    def __str__(self) -> str:
        return "\n".join(filter(None, [self.words, self.command]))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        command = f"<pre>{escape(self.command)}</pre>" if self.command else ""
        return "".join(figure.html for figure in self.figures) + f"<p>{escape(self.words)}</p>{command}"


def recorded_times(topic: str) -> RecordedTimes:
    """A topic's times on every GPU that has them recorded: "attention", "recomputation", "precision", "optimizer" or
    "accumulation". Raises ValueError naming the nearest for another.
    """
    if topic not in TOPICS:
        raise unknown("topic", topic, TOPICS)
    if topic == "attention":
        return _attention()
    found = [item for item in newest("times") if item.task == f"times of {topic}"]
    if not found:
        return _waiting(topic, f'"times of {topic}"')
    return RecordedTimes(topic, [_bars(item) for item in found], "\n".join(_said(item) for item in found))


def _waiting(topic: str, pattern: str) -> RecordedTimes:
    return RecordedTimes(
        topic, (),
        f"Times on a GPU ({topic}): none are recorded yet, and none are invented here. On a machine with one:",
        COMMAND.format(pattern),
    )  # fmt: skip


def _measured(item: Recording) -> dict[str, Mapping[str, Any]]:
    """The spread of a step's milliseconds, by variant; those that the GPU cannot compute left out."""
    return {one["label"]: one["step_ms"] for one in item.parts["times"]["variants"] if "step_ms" in one}


def _bars(item: Recording) -> Figure:
    steps = _measured(item)
    first, last = next(iter(steps)), list(steps)[-1]
    ratio = steps[last]["median"] / steps[first]["median"]
    title = f"{last} takes {ratio:.2f} times as long as {first}"
    return bars(
        {label: step["median"] for label, step in steps.items()},
        title,
        unit="ms",
        provenance=f"a step, median · {item}",
    )


def _said(item: Recording) -> str:
    """Median, quartiles and ratio to the first of each variant, and what was refused, a line each."""
    steps = _measured(item)
    first = next(iter(steps.values()))["median"]
    lines_ = [f"{item.device}, {item.date}, milliseconds of a step:"]
    for label, step in steps.items():
        half = f"{step['q1']:,.1f} to {step['q3']:,.1f}"
        lines_.append(
            f"{label}: {step['median']:,.1f} (half of {step['n']} repetitions within {half}), "
            f"{step['median'] / first:.3f} times the first"
        )
    lines_ += [f"{one['label']}: {one['refused']}" for one in item.parts["times"]["variants"] if "refused" in one]
    return "\n".join(lines_)


# Attention by the length of the sequence


def _attention() -> RecordedTimes:
    by_device: dict[str, list[Recording]] = {}
    for item in newest("kernels"):
        by_device.setdefault(item.device, []).append(item)
    if not by_device:
        return _waiting("attention", '"attention alone"')
    drawn = [_by_length(device, items) for device, items in by_device.items()]
    return RecordedTimes("attention", [figure for figure, _ in drawn], "\n".join(words for _, words in drawn))


def _by_length(device: str, items: Sequence[Recording]) -> tuple[Figure, str]:
    """Forward and backward together, in milliseconds, by kernel over s."""
    series: dict[str, dict[int, float]] = {}
    for item in items:
        for one in item.parts["kernels"]["kernels"]:
            if "milliseconds" in one:
                both = zip(*one["milliseconds"].values(), strict=True)
                series.setdefault(one["kernel"], {})[one["seq_len"]] = spread([sum(pair) for pair in both])["median"]
    points = {
        name: ([float(s) for s in sorted(found)], [found[s] for s in sorted(found)]) for name, found in series.items()
    }
    words = _ratios(device, series)
    figure = lines(
        points, words.partition("\n")[0], "tokens in the sequence", "ms, forward and backward", log_x=True, log_y=True,
        provenance=f"one sequence, 16 heads of 64, median · {device}, {items[0].date}",
    )  # fmt: skip
    return figure, words


def _ratios(device: str, series: Mapping[str, Mapping[int, float]]) -> str:
    """How much longer eager attention takes than flash (or what is there in its place), by length, longest first."""
    fused = "flash" if "flash" in series else next((name for name in series if name != "eager"), "")
    both = sorted(set(series.get("eager", {})) & set(series.get(fused, {})), reverse=True)
    said = [
        f"Eager attention takes {series['eager'][s] / series[fused][s]:.1f} times as long as {fused} at s={s:,}"
        for s in both
    ]
    return "\n".join(said or [f"Attention on {device}: {', '.join(series)}"])
