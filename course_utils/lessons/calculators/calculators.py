"""Lesson 18: public calculators of training memory (`estimating.published`), and how far each is off a step.

Answers and peaks are cut into the same components: their difference is a sum of named terms, to the byte.
"""

from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import NamedTuple

from ...estimating import published
from ...measurement import Allocation, Measurement
from ...run import TrainingRun

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
    """One public formula or tool, and how its answer is cut.

    `formula` names its entry in `published.FORMULAS`; `counted` is its own number of parameters N; `states`,
    `scores` (eager attention's s×s matrices) and `outside` (the blocks) are its bytes for these. `counts` is
    "a step", or the part of it that it is about: "states", "activations".
    """

    name: str
    formula: str
    states: Callable[[TrainingRun], int]
    counted: Callable[[TrainingRun], int] = attrgetter("model.parameters")
    scores: Callable[[TrainingRun], int] = lambda run: 0
    outside: Callable[[TrainingRun], int] = lambda run: 0
    counts: str = "a step"

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
    Calculator("accelerate", "accelerate", published.accelerate_bytes, counts="states"),
    Calculator("ZeRO", "ZeRO: all", _states_of(published.zero_bytes)),
    Calculator("DeepSpeed ZeRO-2", "DeepSpeed ZeRO-2", published.deepspeed_zero2_run_bytes, counts="states"),
    Calculator(
        "Megatron-LM",
        "Megatron-LM",
        _states_of(published.megatron_parts),
        published.megatron_parameter_count,
        outside=_megatron_outside,
    ),
    Calculator(
        "llm-analysis",
        "llm-analysis",
        _states_of(published.llm_analysis_parts),
        scores=_llm_analysis_scores,
        outside=lambda run: run.seq_len * run.micro_batch * (2 * run.model.vocab + 4 * run.model.hidden),
    ),
    Calculator(
        "Korthikanti et al.",
        "Korthikanti: all",
        lambda run: 0,
        scores=_scores,
        outside=published.korthikanti_outer_bytes,
        counts="activations",
    ),
    Calculator(
        "Ultra-Scale Playbook, text",
        "Ultra-Scale Playbook: text",
        _states_of(published.playbook_parts),
        lambda run: published.playbook_parts(run)["parameters"] // 2,
        _scores,
    ),
    Calculator(
        "Ultra-Scale Playbook, figure",
        "Ultra-Scale Playbook: figure",
        _states_of(published.playbook_figure_parts),
        lambda run: published.playbook_figure_parts(run)["parameters"] // run.precision.compute,
        _scores,
        _figure_outside,
    ),
    Calculator(
        "EleutherAI cookbook",
        "EleutherAI cookbook",
        _states_of(published.cookbook_parts),
        published.cookbook_parameter_count,
        _scores,
    ),
)


def answers(run: TrainingRun) -> Parts:
    """Total of each calculator for a run, in bytes, smallest first."""
    said = {one.name: one.total(run) for one in CALCULATORS}
    return {name: said[name] for name in sorted(said, key=said.__getitem__)}


TERMS = (
    "number of parameters",
    "bytes per parameter",
    "gradients at the peak",
    SCORES,
    "linear part of a block",
    "logits and loss",
    "weight copies",
    "temporaries",
)
"""The closed list. For each calculator and run, the eight sum to answer minus the peak, to the byte."""


def gaps(run: TrainingRun, measured: Measurement) -> dict[str, Parts]:
    """Signed bytes of each of `TERMS` by calculator, answer minus peak, in the order of `answers`."""
    real = counted_at_peak(measured)
    in_full = states_of(measured.moments["end of backward"])
    named = {one.name: one for one in CALCULATORS}
    found = {}
    for name in answers(run):
        one = named[name]
        said = one.parts(run)
        # The states differ in three steps: N, then bytes per parameter, then gradients that are not there.
        recipe = said[STATES] // one.counted(run) * run.model.parameters
        states = (said[STATES] - recipe, recipe - in_full, in_full - real[STATES])
        others = (said[part] - real[part] for part in COMPONENTS[1:])
        found[name] = dict(zip(TERMS, (*states, *others), strict=True))
    return found


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
