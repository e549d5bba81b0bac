"""Lesson 18: public calculators of training memory (`estimating.published`), and how far each is off a step.

Answers and peaks are cut into the same components: their difference is a sum of named terms, to the byte.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

from ...errors import check_known
from ...estimating import formula, published
from ...measurement import Allocation, Measurement
from ...run import TrainingRun
from ...units import Table, format_bytes, format_signed

Parts = dict[str, int]
STATES = "states"
SCORES = "attention scores"
BLOCKS = "rest of the blocks"
OUTSIDE = "embedding, logits, loss"
COPIES = "weight copies"
PASSING = "temporaries, inputs"
COMPONENTS = (STATES, SCORES, BLOCKS, OUTSIDE, COPIES, PASSING)
"""The parts of every answer and every measurement: all of it, nothing twice."""

KINDS = {"parameters": STATES, "gradients": STATES, "optimizer_states": STATES, "weight_copies": COPIES}


class Calculator(NamedTuple):
    """One public formula or tool: its purpose, its source, and how its answer is cut.

    `formula` names its entry in `published.FORMULAS`; `counted` is its own number of parameters N; `states`,
    `scores` (eager attention's s×s matrices) and `outside` (the blocks) are its bytes for these. `counts` is
    "a step", or the part of it that it is about: "states", "activations".
    """

    name: str
    formula: str
    made_for: str
    source: str
    states: Callable[[TrainingRun], int]
    counted: Callable[[TrainingRun], int] = attrgetter("model.parameters")
    scores: Callable[[TrainingRun], int] = lambda run: 0
    outside: Callable[[TrainingRun], int] = lambda run: 0
    counts: str = "a step"

    @property
    def label(self) -> str:
        """The name, and the part that it counts if that is not a whole step."""
        if self.counts == "a step":
            return self.name
        return f"{self.name} ({self.counts} only)"

    def total(self, run: TrainingRun) -> int:
        """The answer for a run, in bytes. Raises ValueError for runs that it does not cover."""
        return next(one.bytes(run) for one in published.FORMULAS if one.name == self.formula)

    def parts(self, run: TrainingRun) -> Parts:
        """The same cut into `COMPONENTS`; none of these calculators knows of weight copies or temporaries."""
        states = self.states(run)
        scores = self.scores(run)
        outside = self.outside(run)
        blocks = self.total(run) - states - scores - outside
        return {STATES: states, SCORES: scores, BLOCKS: blocks, OUTSIDE: outside, COPIES: 0, PASSING: 0}


def _states_of(parts: Callable[[TrainingRun], Parts]) -> Callable[[TrainingRun], int]:
    names = ("parameters", "gradients", "optimizer_states", "weights and optimizer")
    return lambda run: sum(parts(run).get(name, 0) for name in names)


def _scores(run: TrainingRun, each: int = 5) -> int:
    """5·a·s²·b in every block, for any kernel (Korthikanti et al. 2022, eq. 1); 0 where it is recomputed."""
    if run.recompute != "none":
        return 0
    a, s, b, L = run.model.heads, run.seq_len, run.micro_batch, run.model.layers
    return each * a * s**2 * b * L


def _llm_analysis_scores(run: TrainingRun) -> int:
    return _scores(run, 4) if run.attention == "eager" else 0


def _megatron_outside(run: TrainingRun) -> int:
    """All but 34·s·b·h a block, with the 5 % that Megatron-LM's report puts on top of everything."""
    blocks = 34 * run.seq_len * run.micro_batch * run.model.hidden * run.model.layers
    return published.megatron_parts(run)["activations"] - blocks * 105 // 100


def _figure_outside(run: TrainingRun) -> int:
    sb = run.seq_len * run.micro_batch
    h = run.model.hidden
    c = run.precision.compute
    return sb * h + 2 * c * sb * h + 4 * sb * run.model.vocab


CALCULATORS = (
    Calculator(
        "accelerate",
        "accelerate",
        "the size of a checkpoint, and what loading and Adam add to it",
        "Hugging Face accelerate, commands/estimate.py",
        published.accelerate_bytes,
        counts="states",
    ),
    Calculator(
        "ZeRO",
        "ZeRO: all",
        "showing where the memory goes, to shard it",
        "Rajbhandari et al. 2020, section 3",
        _states_of(published.zero_bytes),
    ),
    Calculator(
        "DeepSpeed ZeRO-2",
        "DeepSpeed ZeRO-2",
        "model states under ZeRO, explicitly without activations",
        "DeepSpeed's documentation, Memory Requirements",
        published.deepspeed_zero2_run_bytes,
        counts="states",
    ),
    Calculator(
        "Megatron-LM",
        "Megatron-LM",
        "a line in the log before training starts",
        "Megatron-LM, theoretical_memory_usage.py",
        _states_of(published.megatron_parts),
        published.megatron_parameter_count,
        outside=_megatron_outside,
    ),
    Calculator(
        "llm-analysis",
        "llm-analysis",
        "latency and memory of many configurations without running one",
        "llm-analysis, analysis.py",
        _states_of(published.llm_analysis_parts),
        scores=_llm_analysis_scores,
        outside=lambda run: run.seq_len * run.micro_batch * (2 * run.model.vocab + 4 * run.model.hidden),
    ),
    Calculator(
        "Korthikanti et al.",
        "Korthikanti: all",
        "activations of GPTs in 2022, to recompute fewer of them",
        "Korthikanti et al. 2022, sections 4.1 and 4.3",
        lambda run: 0,
        scores=_scores,
        outside=published.korthikanti_outer_bytes,
        counts="activations",
    ),
    Calculator(
        "Ultra-Scale Playbook, text",
        "Ultra-Scale Playbook: text",
        "teaching the formulas of a GPT",
        "Tazi et al. 2025",
        _states_of(published.playbook_parts),
        lambda run: published.playbook_parts(run)["parameters"] // 2,
        _scores,
    ),
    Calculator(
        "Ultra-Scale Playbook, figure",
        "Ultra-Scale Playbook: figure",
        "trying the Playbook's settings in a browser",
        "Tazi et al. 2025, src/memory.js",
        _states_of(published.playbook_figure_parts),
        lambda run: published.playbook_figure_parts(run)["parameters"] // run.precision.compute,
        _scores,
        _figure_outside,
    ),
    Calculator(
        "EleutherAI cookbook",
        "EleutherAI cookbook",
        "planning GPT-NeoX trainings on a cluster",
        "EleutherAI cookbook, calc_transformer_mem.py",
        _states_of(published.cookbook_parts),
        published.cookbook_parameter_count,
        _scores,
    ),
)


def calculator(name: str) -> Calculator:
    """The calculator of that name. Raises ValueError listing those that are known, and the nearest."""
    named = {one.name: one for one in CALCULATORS}
    check_known("calculator", name, named)
    return named[name]


def answers(run: TrainingRun, counts: str = "") -> Parts:
    """Total of each calculator for a run, in bytes, smallest first; with `counts`, of those that count it."""
    said = {one.name: one.total(run) for one in CALCULATORS if counts in ("", one.counts)}
    return {name: said[name] for name in sorted(said, key=said.__getitem__)}


def spread(run: TrainingRun, counts: str = "") -> float:
    """The largest of these answers over the smallest."""
    said = answers(run, counts).values()
    return max(said) / min(said)


@dataclass(frozen=True)
class Truth:
    """Bytes of a step by `COMPONENTS` at its peak, and its states in full, at the end of backward."""

    parts: Mapping[str, int]
    states_in_full: int
    provenance: str
    word: str

    @property
    def peak(self) -> int:
        """Bytes at the peak: all parts."""
        return sum(self.parts.values())


def truth(measured: Measurement) -> Truth:
    """Count the tensors that are alive at the step's peak."""
    in_full = states_of(measured.moments["end of backward"])
    return Truth(counted_at_peak(measured), in_full, str(measured.provenance), measured.word)


def states_of(there: Mapping[str, int]) -> int:
    """Bytes of weights, gradients and optimizer states in a breakdown."""
    return sum(size for kind, size in there.items() if KINDS.get(kind) == STATES)


def counted_at_peak(measured: Measurement) -> Parts:
    """Bytes of all tensors alive at the peak, by component, tensor by tensor."""
    parts: Parts = dict.fromkeys(COMPONENTS, 0)
    for tensor in measured.alive_at(measured.peak_event):
        parts[component_of(tensor)] += tensor.bytes
    return parts


def component_of(tensor: Allocation) -> str:
    """The component of a tensor. Scores have the sequence twice at the end of their shape.

    So have q and k of as many tokens as a head has elements, which come from other operations.
    """
    if tensor.kind != "activations":
        return KINDS.get(tensor.kind, PASSING)
    if not tensor.module.startswith("blocks."):
        return OUTSIDE
    square = len(tensor.shape) == 4 and tensor.shape[-1] == tensor.shape[-2]
    if square and tensor.operation in ("_softmax", "native_dropout", "_to_copy"):
        return SCORES
    return BLOCKS


class Term(NamedTuple):
    name: str
    why: str


TERMS = (
    Term("number of parameters", "N is the number for another architecture"),
    Term("bytes per parameter", "weights, gradients and states of another recipe, or none of them"),
    Term("gradients at the peak", "at the peak of the step, backward has made no gradients yet"),
    Term(SCORES, "5·a·s² per block, which a flash kernel never writes"),
    Term("linear part of a block", "dropout, norms, MLP and queries of another model, or none of them"),
    Term("logits and loss", "what the embedding, the head and the loss keep"),
    Term("weight copies", "autocast keeps a 16-bit copy of the weights"),
    Term("temporaries", "the gradient of the loss, which exists only for a moment: at the peak"),
)
"""The closed list. For each calculator and run, the eight sum to answer minus the peak, to the byte."""


def gaps(name: str, run: TrainingRun, real: Truth) -> Parts:
    """Signed bytes of each term, a calculator's answer minus truth, in the order of `TERMS`."""
    one = calculator(name)
    said = one.parts(run)
    # The states differ in three steps: N, then bytes per parameter, then gradients that are not there yet.
    recipe = said[STATES] // one.counted(run) * run.model.parameters
    in_full = real.states_in_full
    states = (said[STATES] - recipe, recipe - in_full, in_full - real.parts[STATES])
    others = (said[part] - real.parts[part] for part in COMPONENTS[1:])
    return {term.name: size for term, size in zip(TERMS, (*states, *others), strict=True)}


def largest_gap(name: str, run: TrainingRun, real: Truth) -> str:
    """The name of the term that counts most, whatever its sign."""
    found = gaps(name, run, real)
    return max(found, key=lambda term: abs(found[term]))


def add_back(name: str, terms: Sequence[str], run: TrainingRun, real: Truth) -> int:
    """A calculator's answer in bytes if these terms were right."""
    found = gaps(name, run, real)
    return calculator(name).total(run) - sum(found[term] for term in terms)


def percent_off(said: int, peak: int) -> float:
    """Signed error of an answer, in percent of the peak."""
    return 100 * (said / peak - 1)


def autocast_formula(run: TrainingRun) -> Parts:
    """The peak of a bf16-autocast step with a flash kernel in closed form, by component, bytes not rounded.

    At the start of the loss's backward: 4 + 8 bytes per parameter, what blocks keep, 6·s·b·V of the loss (4
    of fp32 logits), 4·s·b·V of its gradient (8), and the copies of matrices. Norms' weights and biases'
    copies are left out, so the residual has a name. Raises ValueError for runs that it does not describe.
    """
    kernels = run.precision.name == "amp-bf16" and run.attention == "flash"
    if not kernels or run.recompute != "none" or run.world_size > 1:
        raise ValueError(
            "this closed form is for bf16 autocast with flash attention, nothing recomputed, on one GPU"
        )
    sb, h, V = run.seq_len * run.micro_batch, run.model.hidden, run.model.vocab
    after_loss = formula.moments(run)["after loss"]
    kept, passing = (4, 8) if run.model.logits == "fp32" else (6, 4)
    return {
        STATES: 12 * run.model.parameters,
        SCORES: 0,
        BLOCKS: formula.blocks_bytes(run),
        OUTSIDE: sb * (6 * h + kept * V),
        COPIES: after_loss["weight_copies"],
        PASSING: passing * sb * V,
    }


def sides(run: TrainingRun, measured: Measurement) -> list[Parts]:
    """The peak in bytes three ways: `autocast_formula`, the tensors alive then, and the breakdown by kind.

    A breakdown has one entry for all activations, so those components are joined.
    """
    there = measured.breakdown
    accounts = []
    for parts in (autocast_formula(run), counted_at_peak(measured)):
        activations = parts[SCORES] + parts[BLOCKS] + parts[OUTSIDE]
        accounts.append((parts[STATES], activations, parts[COPIES], parts[PASSING]))
    known = (states_of(there), there["activations"], there["weight_copies"])
    accounts.append((*known, there.total - sum(known)))
    return [dict(zip((STATES, "activations", COPIES, PASSING), sizes, strict=True)) for sizes in accounts]


def three_ways(run: TrainingRun, measured: Measurement) -> Table:
    """`sides` as a table, with totals; the last column is the closed form minus the step."""
    rows = [["", "closed form", "counted tensors", measured.word, f"closed form − {measured.word}"]]
    accounts = [account | {"total": sum(account.values())} for account in sides(run, measured)]
    for name in accounts[0]:
        closed, counted, real = (account[name] for account in accounts)
        shown = [format_bytes(size, "GB", 3) for size in (closed, counted, real)]
        rows.append([name, *shown, format_signed(closed - real)])
    return Table(rows, totals=True)


def outside_blocks(measured: Measurement) -> Parts:
    """Bytes of the activations alive at the peak that no block owns, by module and operation."""
    found = Counter[str]()
    for tensor in measured.alive_at(measured.peak_event):
        if component_of(tensor) == OUTSIDE:
            found[f"{tensor.module}: {tensor.operation}, {tensor.dtype}"] += tensor.bytes
    return found
