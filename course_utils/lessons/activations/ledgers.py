"""Ledgers and sweeps of lesson 05: a block's tensors next to those that hooks found, bytes as b and s grow."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from course_utils.estimating.exact.activations import Saved, activation_bytes, block_saved
from course_utils.figures import lines
from course_utils.figures.canvas import Figure, below_one_another
from course_utils.interactive.saved import Saved as Found
from course_utils.interactive.saved import saved_by
from course_utils.measuring import measure
from course_utils.networks.attention import causal_mask, rotation
from course_utils.networks.transformer import Block
from course_utils.run import TrainingRun
from course_utils.units import MB, aligned, html_table

LETTERS = {"c": "2", "r": "4", "sb": "s·b", "kv": "g·d", "qkv": "3·h", "s32": "s"}
"""The estimate's symbols as the lesson has them: c and r are bytes of a number in 16 and 32 bits, g heads of d keys."""


@dataclass(frozen=True, repr=False)
class BlockLedger:
    """The tensors that one block keeps: each as predicted, next to the storage that hooks found, or None for either.

    `token` is s·b·h, the unit of the last column in bytes.
    """

    rows: Sequence[tuple[Saved | None, Found | None]]
    token: int

    @property
    def predicted(self) -> int:
        """Bytes of all predicted tensors, before the allocator rounds them."""
        return sum(saved.size for saved, _ in self.rows if saved)

    @property
    def found(self) -> int:
        """Bytes of all storages that the hooks found."""
        return sum(found.bytes for _, found in self.rows if found)

    def cells(self) -> Iterator[tuple[str, ...]]:
        """The table as text: a header, the rows, a row of totals."""
        yield "kept by", "tensor", "needed for", "bytes", "shape found", "dtype", "predicted", "found", "÷ s·b·h"
        for saved, found in self.rows:
            first = (saved.operation, saved.name, saved.why, spelled(saved.formula)) if saved else ("–", "–", "", "–")
            second = (str(found.shape), found.dtype) if found else ("–", "–")
            sizes = saved.size if saved else None, found.bytes if found else None
            shown = ("–" if size is None else f"{size:,}" for size in sizes)
            yield *first, *second, *shown, f"{(sizes[0] or sizes[1] or 0) / self.token:.3f}"
        total = f"{self.predicted / self.token:.3f}"
        yield "total", *[""] * 5, f"{self.predicted:,}", f"{self.found:,}", total

    def __repr__(self) -> str:
        return aligned([[*line[:2], *line[3:]] for line in self.cells()], words=5)

    def _repr_html_(self) -> str:
        return html_table(self.cells(), words=6, totals=True)


def block_ledger(run: TrainingRun) -> BlockLedger:
    """The tensors that one block of `run` keeps by the estimate, each next to the storage that hooks found.

    ValueError under autocast, whose copies of weights hooks cannot distinguish from activations;
    SimulationUnavailable where a GPU cannot be simulated.
    """
    found, pairs = found_in_block(run), list[tuple[Saved | None, Found | None]]()
    for item in block_saved(run):
        match = min((other for other in found if other.bytes == item.size), key=partial(_differ, item), default=None)
        if match:
            found.remove(match)
        pairs.append((item, match))
    pairs += [(None, other) for other in found]
    return BlockLedger(pairs, run.seq_len * run.micro_batch * run.model.hidden)


def _differ(saved: Saved, found: Found) -> bool:
    """True if the two are different factors of a product."""
    factors = {"first factor": "self", "second factor": "mat2"}
    return saved.name in factors and not found.name.endswith(factors[saved.name])


def found_in_block(run: TrainingRun) -> list[Found]:
    """Storages that hooks find in one genuine block of `run` on the simulated GPU, without what all blocks share."""
    if run.precision.name.startswith("amp"):
        raise ValueError("hooks see autocast's copies of weights too: measure a step under autocast instead")
    block, (shape, *shared), dtype = block_and_inputs(run)
    sides = {tuple(tensor.shape) for tensor in shared if isinstance(tensor, torch.Tensor)}
    found = saved_by(block, shape, *shared, dtype=dtype, device="gpu")
    return [item for item in found if item.shape not in sides]


def block_and_inputs(run: TrainingRun) -> tuple[torch.nn.Module, list[Sequence[int] | torch.Tensor], str]:
    """One block of `run`, its input's shape, the tensors that blocks share (shapes without values), and its dtype."""
    shape, fp32 = (run.micro_batch, run.seq_len, run.model.hidden), run.precision.compute == 4
    tokens, shared = torch.zeros(shape[:2], dtype=torch.int64), []
    if run.model.positions == "rotary":
        dtype = torch.float32 if fp32 else torch.bfloat16
        shared += rotation(tokens, run.model.head_size, run.model.rope_theta, dtype)
    if run.attention == "eager":
        shared.append(causal_mask(tokens))
    return Alone(run), [shape, *map(torch.empty_like, shared)], "fp32" if fp32 else "bf16"


class Alone(torch.nn.Module):
    def __init__(self, run: TrainingRun) -> None:
        super().__init__()
        self.run = run
        with torch.device("meta"):
            self.block = Block(run.model, run.attention)

    def extra_repr(self) -> str:
        return f"{self.run.attention} attention, {self.run.model!r}"  # recordings are found by this text

    def forward(self, x: torch.Tensor, *shared: torch.Tensor) -> torch.Tensor:
        angles = (shared[0], shared[1]) if self.run.model.positions == "rotary" else None
        return self.block(x, angles, shared[-1] if self.run.attention == "eager" else None)


def spelled(formula: str) -> str:
    """The estimate's formula of a size as the lesson writes it: "c·sb·h" is "2·s·b·h"."""
    return "·".join(LETTERS.get(symbol, symbol) for symbol in formula.split("·"))


def per_token(run: TrainingRun) -> float:
    """Bytes that one block keeps by the estimate, per s·b·h."""
    return sum(item.size for item in block_saved(run)) / (run.seq_len * run.micro_batch * run.model.hidden)


def measured_per_token(run: TrainingRun) -> float:
    """Bytes per s·b·h that a third block adds at the end of forward, from two steps that `measure` runs."""
    two, three = (measure(run.replace(model=replace(run.model, layers=layers))) for layers in (2, 3))
    added = three.moments["end of forward"]["activations"] - two.moments["end of forward"]["activations"]
    return added / (run.seq_len * run.micro_batch * run.model.hidden)


def swept(run: TrainingRun, field: str, sizes: Sequence[int]) -> dict[int, int]:
    """Bytes of activations at the end of forward by the estimate, for each value of `field`."""
    return {size: activation_bytes(run.replace(**{field: size})) for size in sizes}


def swept_in_steps(run: TrainingRun, field: str, sizes: Sequence[int]) -> dict[int, int]:
    """Bytes of activations at the end of forward for each value of `field`, from steps that `measure` runs."""
    steps = {size: measure(run.replace(**{field: size})) for size in sizes}
    return {size: step.moments["end of forward"]["activations"] for size, step in steps.items()}


Panel = Mapping[str, tuple[Mapping[int, int], Mapping[int, int]]]  # By kernel: bytes by size, estimated and from steps


def sweep_figure(panels: Mapping[str, Panel], title: str, provenance: str = "", word: str = "simulated") -> Figure:
    """Panels one below the other, by x axis: bytes of each kernel in MB, a line of estimates and circles of steps.

    `word` says what the steps are, as `Measurement.word`.
    """
    drawn, circles = [], f"{word} steps"
    for label, panel in panels.items():
        series = {name: (list(curve), [size / MB for size in curve.values()]) for name, (curve, _) in panel.items()}
        steps = [(at, size / MB) for _, curve in panel.values() for at, size in curve.items()]
        series[circles] = [at for at, _ in steps], [size for _, size in steps]
        heading, note = (f"The same by {label}", provenance) if drawn else (title, "")
        look = {"markers": False, "circles": [circles], "provenance": note}
        drawn.append(lines(series, heading, label, "MB kept when forward ends; lines: estimated", **look))
    return below_one_another(drawn, title)
