"""Accuracy: the closed form against simulations, run by run and by kind of run."""

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..breakdown import KINDS
from ..estimating import estimate, moments
from ..measurement import Measurement
from ..measuring.sources import measure
from ..run import TrainingRun
from .frozen_runs import frozen_runs
from .tables import BIAS_HEADINGS, Cell, Table, bias_of

AT_MOST_PERCENT = 1.0
SEVERAL_RANKS_PERCENT = 3.0
"""The promised error of a peak: on one rank, and on one of several."""

MEDIAN_PERCENT = 0.01
SEVERAL_RANKS_MEDIAN_PERCENT = 0.5
SAME_PHASE_PERCENT = 97
"""The promised medians, and the share of runs whose peak is in the phase that the formula names."""

WORST = 20  # rows of the table of runs that are furthest off


@dataclass(frozen=True)
class Comparison:
    """The result for one run: its estimate and its simulation, or why one of them is missing.

    `refused` is the sentence with which `measure` declined the run, `failed` what was raised that should not
    have been. `activations` is estimate minus simulation at the end of forward in bytes, `kinds` the same at
    the peak by kind.
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
    def right(self) -> bool:
        """True if the run was compared and its peak is as near as the course promises."""
        bound = AT_MOST_PERCENT if self.run.world_size == 1 else SEVERAL_RANKS_PERCENT
        return self.compared and abs(self.percent) <= bound


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
    """The outcome of each of `runs` in tables: a summary, errors by kind of run, the runs furthest off.

    `report` is called with the progress.
    """
    outcomes = []
    for number, run in enumerate(runs):
        outcomes.append(outcome(number, run))
        if number % 20 == 19:
            report(f"{number + 1} of {len(runs)} runs")
    return [table(outcomes, source) for table in (_summary, _by_kind, _worst)]


def _summary(outcomes: Sequence[Comparison], source: str) -> Table:
    compared = [one for one in outcomes if one.compared]
    rows: tuple[tuple[Cell, ...], ...] = (
        ("runs", len(outcomes)),
        ("compared", len(compared)),
        ("refused", sum(bool(one.refused) for one in outcomes)),
        ("failed", sum(bool(one.failed) for one in outcomes)),
        ("as near as promised", sum(one.right for one in compared)),
        ("peak in the phase that the closed form names", sum(same_phase(one) for one in compared)),
    )
    bounds = f"{AT_MOST_PERCENT} % on one rank, {SEVERAL_RANKS_PERCENT} % on one of several"
    medians = f"{MEDIAN_PERCENT} % and {SEVERAL_RANKS_MEDIAN_PERCENT} %"
    notes = [f"Promised: an error of at most {bounds}, at the median {medians}."]
    reasons = Counter(one.refused or one.failed for one in outcomes if not one.compared)
    notes += [f"Not compared, {count}: {reason}" for reason, count in reasons.most_common()]
    title = "The closed form against simulation"
    return Table("accuracy", title, ("", "runs of them"), rows, tuple(notes), source)


def same_phase(one: Comparison) -> bool:
    """True if the peak is in the phase that the closed form names."""
    return one.phases[0] == one.phases[1]


ERRORS = ("runs", "median, %", "maximum, %", *BIAS_HEADINGS)


def _by_kind(outcomes: Sequence[Comparison], source: str) -> Table:
    """Errors of the peak by what is chosen in the runs."""
    groups: dict[tuple[str, str], list[float]] = {}
    for one in outcomes:
        if one.compared:
            for kind in kinds_of(one.run):
                groups.setdefault(kind, []).append(one.estimated / one.simulated)
    rows = tuple((*kind, *_errors(found)) for kind, found in sorted(groups.items()))
    notes = ("Errors are in percent of the simulated peak.",)
    title = "The closed form's error by kind of run"
    return Table("accuracy_by_kind", title, ("choice", "of", *ERRORS), rows, notes, source)


def kinds_of(run: TrainingRun) -> list[tuple[str, str]]:
    """Pairs of a choice's name and what is chosen in a run."""
    parts = {
        "experts": run.model.experts > 0,
        "unfused GELU and RMSNorm": run.model.unfused,
        "LoRA": run.lora_rank > 0,
        "loss in chunks": run.loss_chunks > 1,
    }
    kinds = [
        ("ranks", "one" if run.world_size == 1 else f"several, ZeRO-{run.zero_stage}"),
        ("family", run.model.family),
        ("precision", run.precision.name),
        ("attention", run.attention),
        ("recomputation", run.recompute),
        ("optimizer", run.optimizer.name),
    ]
    return kinds + [("part", name) for name, there in parts.items() if there]


def _errors(ratios: Sequence[float]) -> tuple[Cell, ...]:
    """The cells under `ERRORS` for answers over truths, at least one."""
    off = [100 * abs(ratio - 1) for ratio in ratios]
    return len(off), statistics.median(off), max(off), *bias_of(ratios)


def _worst(outcomes: Sequence[Comparison], source: str) -> Table:
    compared = sorted((one for one in outcomes if one.compared), key=lambda one: -abs(one.percent))
    rows: list[tuple[Cell, ...]] = []
    for one in compared[:WORST]:
        off = one.estimated - one.simulated
        rows.append((one.number, str(one.run), one.percent, off, one.activations, " / ".join(one.phases)))
    if not rows:
        rows.append(("none", "no run was compared", "", "", "", ""))
    headings = ("run", "what", "peak, %", "peak, bytes", "activations, bytes", "phase: estimated / simulated")
    notes = (f"Not listed: {max(0, len(compared) - WORST)} runs with smaller errors.",)
    title = "The runs with the largest errors"
    return Table("accuracy_worst", title, headings, tuple(rows), notes, source)


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
