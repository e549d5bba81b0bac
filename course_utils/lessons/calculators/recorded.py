"""Steps of GPTs that a GPU counted, for lesson 18: peaks next to formulas and to the simulation."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from ...evidence.gpu import run_of
from ...measuring.recorded import newest
from ...run import TrainingRun
from ...units import Table


class Step(NamedTuple):
    """The peak of a step, counted by a GPU, and simulated: its tensors, and the allocator's blocks.

    `letters` are the sizes by the letters of the lesson's formulas.
    """

    letters: dict[str, int]
    counted: int
    tensors: int
    blocks: int


def _letters(run: TrainingRun) -> dict[str, int]:
    model = run.model
    sizes = {"N": model.parameters, "L": model.layers, "h": model.hidden, "a": model.heads}
    return sizes | {"V": model.vocab, "s": run.seq_len, "b": run.micro_batch}


RECORDED: dict[tuple[str, int], Step] = {}
"""Steps of GPTs by model and number of sequences, which have 1,024 tokens.

bf16 autocast, AdamW, flash attention, nothing recomputed: what a TrainingRun is unless told otherwise.
"""

for _item in newest("run"):
    _run = run_of(_item.task.removesuffix(" steps=2"))
    _plain = _run == TrainingRun(_run.model, _run.micro_batch, 1024)
    if _plain and _run.model.family == "gpt2" and _run.model.logits == "compute":
        _simulated = _item.parts["simulated"]
        RECORDED[_run.model.name, _run.micro_batch] = Step(
            _letters(_run),
            _item.parts["counters"]["allocated"],
            sum(_simulated["breakdown"][0].values()),
            _simulated["allocated"],
        )
        PROVENANCE = str(_item.provenance)


def judged(formulas: Mapping[str, Callable[..., float]]) -> Table:
    """Errors of formulas and of the simulation, in percent of what the GPU counted, by size of the step.

    The simulations were in the file before the GPU was asked.
    """
    rows = [["model, sequences", "counted, GB", *formulas, "simulated tensors", "… in blocks"]]
    for (name, sequences), step in sorted(RECORDED.items(), key=lambda one: one[1].counted):
        answers = [formula(**step.letters) for formula in formulas.values()]
        errors = [f"{answer / step.counted - 1:+.1%}" for answer in answers]
        errors += [f"{size / step.counted - 1:+.3%}" for size in (step.tensors, step.blocks)]
        rows.append([f"{name}, {sequences}", f"{step.counted / 1e9:.2f}", *errors])
    return Table(rows)
