"""Accuracy: estimates and the closed form against simulations, run by run."""

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..breakdown import KINDS
from ..estimating import estimate, moments
from ..estimating.formula import estimate as closed_form
from ..measurement import Measurement
from ..measuring.sources import measure
from ..run import TrainingRun
from .frozen_runs import frozen_runs
from .tables import BIAS_HEADINGS, Cell, Table, bias_of

# the promised error of a peak; the looser for FSDP2, offloading, clipping
AT_MOST_PERCENT = 0.5
LOOSER_PERCENT = 2.0

WORST = 20  # rows of the table of runs that are furthest off


@dataclass(frozen=True)
class Comparison:
    """The result for one run: its estimate and its simulation, or why one of them is missing.

    `refused` is the sentence with which `estimate` or `measure` declined the run, `failed` what one of them
    raised that it should not have. `activations` is estimate minus simulation at the end of forward in bytes,
    `kinds` the same at the peak by kind.
    """

    number: int
    run: TrainingRun
    refused: str = ""
    failed: str = ""
    estimated: int = 0
    simulated: int = 0
    phases: tuple[str, str] = ("", "")
    activations: int = 0
    kinds: dict[str, int] = field(default_factory=dict)

    @property
    def compared(self) -> bool:
        """True if there are both an estimate and a simulation."""
        return not self.refused and not self.failed

    @property
    def percent(self) -> float:
        """Estimated over simulated peak, less one, in percent."""
        return 100 * (self.estimated / self.simulated - 1)

    @property
    def loose(self) -> bool:
        """True for a run for which the course promises less."""
        run = self.run
        return run.zero_stage > 0 or run.recompute == "offload" or run.clip_grad_norm is not None

    @property
    def right(self) -> bool:
        """True if the run was compared and is as near as the course promises."""
        if not self.compared:
            return False
        bound = LOOSER_PERCENT if self.loose else AT_MOST_PERCENT
        return self.activations == 0 and abs(self.percent) <= bound


def outcome(number: int, run: TrainingRun) -> Comparison:
    """Estimate and simulate one run. What either raises is written down: no run is dropped silently."""
    asked = "estimate"
    try:
        found = estimate(run)
        expected = moments(run)["end of forward"]["activations"]
        asked = "measure"
        truth = measure(run, "simulated")
    except ValueError as error:
        return Comparison(number, run, refused=f"{asked}: {_one_line(error)}")
    except Exception as error:
        return Comparison(number, run, failed=f"{asked}: {type(error).__name__}: {_one_line(error)}")
    return Comparison(
        number,
        run,
        estimated=found.total,
        simulated=truth.peak,
        phases=(found.phase, truth.peak_phase),
        activations=expected - truth.moments["end of forward"]["activations"],
        kinds={kind: found[kind] - truth.breakdown[kind] for kind in KINDS},
    )


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def accuracy_tables(runs: Sequence[TrainingRun], source: str, report: Callable[[str], None]) -> list[Table]:
    """The outcome of each of `runs` in tables: a summary, the runs furthest off, the closed form.

    `report` is called with the progress.
    """
    outcomes = []
    for number, run in enumerate(runs):
        outcomes.append(outcome(number, run))
        if number % 20 == 19:
            report(f"{number + 1} of {len(runs)} runs")
    return [table(outcomes, source) for table in (_summary, _worst, _formula)]


def _summary(outcomes: Sequence[Comparison], source: str) -> Table:
    compared = [one for one in outcomes if one.compared]
    off = sorted(abs(one.percent) for one in compared)
    exact_activations = sum(one.activations == 0 for one in compared)
    exact_peak = sum(one.estimated == one.simulated for one in compared)
    as_promised = sum(one.right for one in compared)
    rows: tuple[tuple[Cell, ...], ...] = (
        ("runs", len(outcomes)),
        ("compared", len(compared)),
        ("refused", sum(bool(one.refused) for one in outcomes)),
        ("failed", sum(bool(one.failed) for one in outcomes)),
        ("activations at the end of forward exact to the byte", exact_activations),
        ("peak exact to the byte", exact_peak),
        ("as near as promised (activations exact, peak within its bound)", as_promised),
    )
    notes: list[str] = []
    if compared:
        bias = bias_of(one.estimated / one.simulated for one in compared)
        notes.append(f"Error of the peak: median {statistics.median(off):.4f} %, maximum {off[-1]:.4f} %.")
        notes.append(f"Bias of the peak: {bias}.")
    notes.append(f"Bound: {AT_MOST_PERCENT} %; with ZeRO, offloading or clipping {LOOSER_PERCENT} %.")
    reasons = Counter(one.refused or one.failed for one in outcomes if not one.compared)
    notes += [f"Not compared, {count}: {reason}" for reason, count in reasons.most_common()]
    title = "Estimate against simulation"
    return Table("accuracy", title, ("", "runs of them"), rows, tuple(notes), source)


def _worst(outcomes: Sequence[Comparison], source: str) -> Table:
    compared = [one for one in outcomes if one.compared]
    wrong = [one for one in compared if one.estimated != one.simulated or one.activations]
    wrong.sort(key=_largest_percent, reverse=True)
    rows: list[tuple[Cell, ...]] = []
    for one in wrong[:WORST]:
        off = one.estimated - one.simulated
        rows.append((one.number, str(one.run), one.percent, off, one.activations, " / ".join(one.phases)))
    if not rows:
        rows.append(("none", "every run that was compared is exact", "", "", "", ""))
    headings = ("run", "what", "peak, %", "peak, bytes", "activations, bytes", "phase: estimated / simulated")
    exact = len(compared) - len(wrong)
    notes = (f"Not listed: {exact} runs whose peak and activations are exact to the byte.",)
    title = "The runs with the largest errors"
    return Table("accuracy_worst", title, headings, tuple(rows), notes, source)


def _largest_percent(one: Comparison) -> float:
    """The error of the peak or of the activations, whichever is larger, in percent of the simulated peak."""
    return max(abs(one.percent), 100 * abs(one.activations) / one.simulated)


def _formula(outcomes: Sequence[Comparison], source: str) -> Table:
    """The closed form, `estimate(run, method="formula")`, for one rank and for several."""
    ratios: dict[str, list[float]] = {"one rank": [], "several ranks": []}
    uncovered = 0
    for one in outcomes:
        if not one.compared:
            continue
        name = "several ranks" if one.run.world_size > 1 else "one rank"
        try:
            ratios[name].append(closed_form(one.run).total / one.simulated)
        except ValueError:
            uncovered += 1
    rows = tuple((name, *_errors(found)) for name, found in ratios.items() if found)
    notes = [f"No run with {name} was compared." for name, found in ratios.items() if not found]
    notes += [
        f"Not covered by the closed form: {uncovered} runs.",
        "Errors are in percent of the simulated peak.",
    ]
    headings = ("closed form", *ERRORS)
    title = "The closed form against simulation"
    return Table("accuracy_formula", title, headings, rows, tuple(notes), source)


ERRORS = ("runs", "median, %", "maximum, %", *BIAS_HEADINGS)


def _errors(ratios: Sequence[float]) -> tuple[Cell, ...]:
    """The cells under `ERRORS` for answers over truths, at least one."""
    off = [100 * abs(ratio - 1) for ratio in ratios]
    return len(off), statistics.median(off), max(off), *bias_of(ratios)


def truth_of(counts: str, measured: Measurement) -> int:
    """The measured bytes of what a formula counts (see `published.Formula`)."""
    if counts == "total":
        return measured.peak
    if counts == "states":
        after = measured.moments["end of backward"]
        return after["parameters"] + after["gradients"] + after["optimizer_states"]
    moment = {"activations": "end of forward", "activations and loss": "after loss"}[counts]
    return measured.moments[moment]["activations"]


def frozen_accuracy(quick: bool, report: Callable[[str], None]) -> list[Table]:
    """The accuracy tables of the frozen list, or of every twentieth run of it."""
    runs = frozen_runs()
    source = "simulated GPU, frozen list"
    if quick:
        runs = runs[::20]
        source += ", every 20th run"
    return accuracy_tables(runs, source, report)
