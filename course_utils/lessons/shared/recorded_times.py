"""Times on GPUs for lessons: figures from recordings, or the command that records them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

from ...errors import check_known
from ...figures import CourseFigure, bars, lines
from ...measuring.recorded import COMPARISONS, Recording, newest, spread

TOPICS = (*COMPARISONS, "attention")


@dataclass(frozen=True, repr=False)
class RecordedTimes:
    """The recordings of a topic: `figures` and `words` about them; or the `command` that records it.

    `milliseconds` are the medians by variant, of the newest recording; none for attention.
    """

    figures: Sequence[CourseFigure]
    words: str
    command: str = ""
    milliseconds: Mapping[str, float] = field(default_factory=dict)

    def __repr__(self) -> str:
        return "\n".join(filter(None, [self.words, self.command]))

    def _repr_html_(self) -> str:
        command = f"<pre>{escape(self.command)}</pre>" if self.command else ""
        words = "<br>".join(map(escape, self.words.splitlines()))
        return "".join(figure.html for figure in self.figures) + f"<p>{words}</p>{command}"


def recorded_times(topic: str) -> RecordedTimes:
    """A topic's times on every GPU that has them recorded. Raises ValueError for one not in `TOPICS`."""
    check_known("topic", topic, TOPICS)
    medians: dict[str, float] = {}
    if topic == "attention":
        pattern = "attention alone"
        by_device = dict[str, list[Recording]]()
        for item in newest("kernels"):
            by_device.setdefault(item.device, []).append(item)
        drawn = [_by_length(device, items) for device, items in by_device.items()]
    else:
        pattern = f"times of {topic}"
        found = [item for item in newest("times") if item.task == pattern]
        drawn = [_by_variant(item) for item in found]
        medians = _medians(found[-1]) if found else {}
    if drawn:
        figures, words = zip(*drawn, strict=True)
        return RecordedTimes(figures, "\n".join(words), milliseconds=medians)
    waiting = (
        f"Times on a GPU ({topic}): none are recorded yet, and none are invented here. On a machine with one:"
    )
    command = f'python3 -m course_utils record --out course_utils/measuring/recordings --only "{pattern}"'
    return RecordedTimes((), waiting, command)


def _medians(item: Recording) -> dict[str, float]:
    variants = item.parts["times"]["variants"]
    return {one["label"]: one["step_ms"]["median"] for one in variants if "step_ms" in one}


def _by_variant(item: Recording) -> tuple[CourseFigure, str]:
    """A step's milliseconds by variant; as text, quartiles, ratio to the first, and what was refused."""
    variants = item.parts["times"]["variants"]
    steps = {one["label"]: one["step_ms"] for one in variants if "step_ms" in one}  # not what was refused
    medians = _medians(item)
    first = next(iter(steps))
    last = list(steps)[-1]
    title = f"A step with {last} takes {medians[last] / medians[first]:.2f} times as long as with {first}"
    said = [f"{item.device}, {item.date}, milliseconds of a step:"]
    for label, step in steps.items():
        half = f"half of {step['n']} repetitions within {step['q1']:,.1f} to {step['q3']:,.1f}"
        ratio = step["median"] / medians[first]
        said.append(f"{label}: {step['median']:,.1f} ({half}), {ratio:.3f} times the first")
    said += [f"{one['label']}: {one['refused']}" for one in variants if "refused" in one]
    said += filter(None, [item.busy])
    return bars(medians, title, unit="ms", provenance=f"a step, median · {item.provenance}"), "\n".join(said)


def _by_length(device: str, items: Sequence[Recording]) -> tuple[CourseFigure, str]:
    """Milliseconds of attention's forward plus backward, by kernel over s; as text, eager over flash."""
    series: dict[str, dict[float, float]] = {}
    for item in items:
        for one in item.parts["kernels"]["kernels"]:
            if "milliseconds" in one:
                both = zip(*one["milliseconds"].values(), strict=True)
                median = spread([sum(pair) for pair in both])["median"]
                series.setdefault(one["kernel"], {})[one["seq_len"]] = median
    points = {
        name: ([float(s) for s in sorted(found)], [found[s] for s in sorted(found)])
        for name, found in series.items()
    }
    fused = "flash" if "flash" in series else next((name for name in series if name != "eager"), "")
    said = []
    # the longest first: it is the title
    for s in sorted(set(series.get("eager", {})) & set(series.get(fused, {})), reverse=True):
        ratio = series["eager"][s] / series[fused][s]
        said.append(f"Eager attention takes {ratio:.1f} times as long as {fused} at s = {s:,}")
    if not said:
        said.append(f"Attention on {device}: {', '.join(series)}")
    title = said[0]
    said += filter(None, [items[0].busy])
    figure = lines(
        points,
        title,
        "tokens in the sequence",
        "ms, forward and backward",
        log_x=True,
        log_y=True,
        provenance=f"one sequence, 16 heads of 64, median · {items[0].provenance}",
    )
    return figure, "\n".join(said)
