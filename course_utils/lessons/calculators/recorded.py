"""Steps of GPTs that a GPU counted, for lesson 18: peaks next to formulas and to the simulation."""

from collections.abc import Callable, Mapping
from itertools import product
from typing import NamedTuple

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


_ITEMS = {item.task: item for item in newest("run")}
_MODELS = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")

RECORDED: dict[tuple[str, int], Step] = {}
"""Steps of GPTs by model and number of sequences, which have 1,024 tokens.

bf16 autocast, AdamW, flash attention, nothing recomputed: what a TrainingRun is unless told otherwise.
"""

for _model, _sequences in product(_MODELS, (1, 2, 4, 8, 16, 32)):
    _run = TrainingRun(_model, _sequences, 1024)
    _item = _ITEMS.get(f"{_run.code()} steps=2")
    if _item:
        _simulated = _item.parts["simulated"]
        _tensors = sum(_simulated["breakdown"][0].values())
        _counted = _item.parts["counters"]["allocated"]
        RECORDED[_model, _sequences] = Step(_letters(_run), _counted, _tensors, _simulated["allocated"])
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
