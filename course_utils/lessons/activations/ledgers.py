"""What lesson 05 draws: a block's ledger beside what hooks found, variants of a block, sweeps over b and s."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from html import escape
from typing import TYPE_CHECKING

from course_utils.estimating.exact.activations import Saved, activation_bytes, block_saved
from course_utils.figures.canvas import INK, MARGIN, QUIET, RULE, WIDTH, Canvas, Figure, number, ticks, wrap
from course_utils.figures.curves import LINE_COLOURS
from course_utils.interactive.saved import Saved as Found
from course_utils.interactive.saved import saved_by
from course_utils.measuring import measure
from course_utils.run import TrainingRun
from course_utils.units import UNITS, aligned, format_bytes

if TYPE_CHECKING:
    import torch

LETTERS = {"c": "2", "r": "4", "sb": "s·b", "kv": "g·d", "qkv": "3·h", "s32": "s"}
"""How the estimate's letters are shown: c and r are bytes an element in 16 and 32 bits, g heads of d keys."""

EAGER, FLASH = LINE_COLOURS[3], LINE_COLOURS[2]
"""Two lines of activations: neither has the color of another kind of memory."""


# ------------------------------------------------------------------------------------------------ a block's ledger


@dataclass(frozen=True, repr=False)
class BlockLedger:
    """What one block keeps: tensor by tensor as the formulas have it, beside what saved-tensor hooks found.

    `rows` pairs each predicted tensor with the storage found for it; either is None where the other has no partner.
    `token` is s·b·h, the bytes that the last column is in units of.
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
        yield "kept by", "tensor", "bytes", "predicted", "found", "shape found", "dtype", "÷ s·b·h", "needed for"
        for saved, found in self.rows:
            first = (saved.operation, saved.name, spelled(saved.formula), f"{saved.size:,}") if saved else ("–",) * 4
            second = (f"{found.bytes:,}", str(found.shape), found.dtype) if found else ("–",) * 3
            size = saved.size if saved else found.bytes if found else 0
            yield *first, *second, f"{size / self.token:.3f}", saved.why if saved else ""
        total = f"{self.predicted / self.token:.3f}"
        yield "total", "", "", f"{self.predicted:,}", f"{self.found:,}", "", "", total, ""

    def __repr__(self) -> str:
        table = [line[:-1] for line in self.cells()]
        return aligned(table, words=len(table[0]))

    def _repr_html_(self) -> str:
        header, *body, total = self.cells()
        rows = [_html_row("th", header), *(_html_row("td", line) for line in body), _html_row("th", total)]
        return f"<table>{''.join(rows)}</table>"


def _html_row(tag: str, line: Sequence[str]) -> str:
    sides = ("left", "left", "left", "right", "right", "left", "left", "right", "left")
    cells = [f"<{tag} style='text-align:{side}'>{escape(c)}</{tag}>" for c, side in zip(line, sides, strict=True)]
    return f"<tr>{''.join(cells)}</tr>"


def block_ledger(run: TrainingRun) -> BlockLedger:
    """The tensors that one block of `run` keeps by the estimate, each beside the storage that hooks found.

    ValueError under autocast, whose copies of weights hooks cannot tell from activations; SimulationUnavailable where
    a GPU cannot be simulated.
    """
    saved, found = block_saved(run), found_in_block(run)
    pairs: list[tuple[Saved | None, Found | None]] = []
    for item in saved:
        match = min((other for other in found if other.bytes == item.size), key=partial(_distance, item), default=None)
        if match:
            found.remove(match)
        pairs.append((item, match))
    pairs += [(None, other) for other in found]
    return BlockLedger(pairs, run.seq_len * run.micro_batch * run.model.hidden)


def _distance(saved: Saved, found: Found) -> bool:
    """Whether the two differ in which factor of a product they are: autograd lists the second one first."""
    factors = {"first factor": "self", "second factor": "mat2"}
    return saved.name in factors and not found.name.endswith(factors[saved.name])


def found_in_block(run: TrainingRun) -> list[Found]:
    """What saved-tensor hooks find in one genuine block of `run` on the simulated GPU, weights left out.

    The causal mask and the angles of rotary positions are one for all blocks and are left out as well.
    """
    if run.precision.name.startswith("amp"):
        raise ValueError("hooks see autocast's copies of weights too: measure a step under autocast instead")
    if run.attention not in ("eager", "flash"):
        raise ValueError(f"hooks look at eager and flash attention here, not at {run.attention}")
    sides = {tuple(tensor.shape) for tensor in _shared(run)}
    block, inputs, dtype = block_and_inputs(run)
    return [item for item in saved_by(block, *inputs, dtype=dtype, device="gpu") if item.shape not in sides]


def block_and_inputs(run: TrainingRun) -> "tuple[torch.nn.Module, list[Sequence[int] | torch.Tensor], str]":
    """One block of `run`, the shape of its input and the tensors that blocks share, and the dtype it computes in."""
    import torch

    shape = (run.micro_batch, run.seq_len, run.model.hidden)
    shared = [torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in _shared(run)]
    return _block(run), [shape, *shared], "fp32" if run.precision.compute == 4 else "bf16"


def _block(run: TrainingRun) -> "torch.nn.Module":
    """One block that takes its input and whatever blocks share as plain tensors."""
    import torch

    from course_utils.networks.transformer import Block

    class Alone(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            with torch.device("meta"):
                block = Block(run.model, run.attention)
            self.block = block

        def extra_repr(self) -> str:
            return f"{run.attention} attention, {run.model!r}"  # what its parts' own words leave open

        def forward(self, x: torch.Tensor, *shared: torch.Tensor) -> torch.Tensor:
            angles = (shared[0], shared[1]) if run.model.positions == "rotary" else None
            return self.block(x, angles, shared[-1] if run.attention == "eager" else None)

    return Alone()


def _shared(run: TrainingRun) -> "list[torch.Tensor]":
    """Rotary angles and eager attention's mask, as torch makes them, without memory behind them."""
    import torch

    from course_utils.networks.attention import causal_mask
    from course_utils.networks.rotary import rotation

    tokens = torch.zeros(run.micro_batch, run.seq_len, dtype=torch.int64)
    shared: list[torch.Tensor] = []
    if run.model.positions == "rotary":
        dtype = torch.float32 if run.precision.compute == 4 else torch.bfloat16
        shared += rotation(tokens, run.model.head_size, run.model.rope_theta, dtype)
    return [*shared, causal_mask(tokens)] if run.attention == "eager" else shared


def spelled(formula: str) -> str:
    """The estimate's formula of a size as the lesson writes it: "c·sb·h" is "2·s·b·h"."""
    return "·".join(LETTERS.get(letter, letter) for letter in formula.split("·"))


# -------------------------------------------------------------------------------------------- one block in many guises


def per_token(run: TrainingRun) -> float:
    """What one block keeps by the estimate, in units of s·b·h bytes."""
    return sum(item.size for item in block_saved(run)) / (run.seq_len * run.micro_batch * run.model.hidden)


def measured_per_token(run: TrainingRun) -> float:
    """The same from steps that `measure` runs, of three blocks and of two: what the third added when forward ended."""
    two, three = (measure(run.replace(model=replace(run.model, layers=layers))) for layers in (2, 3))
    added = three.moments["end of forward"]["activations"] - two.moments["end of forward"]["activations"]
    return added / (run.seq_len * run.micro_batch * run.model.hidden)


# --------------------------------------------------------------------------------------------- linear in b, not in s


def swept(run: TrainingRun, field: str, sizes: Sequence[int]) -> dict[int, int]:
    """Bytes of activations at the end of forward by the estimate, for each value of `field`."""
    return {size: activation_bytes(run.replace(**{field: size})) for size in sizes}


def swept_in_steps(run: TrainingRun, field: str, sizes: Sequence[int]) -> dict[int, int]:
    """The same, from steps that `measure` runs."""
    steps = {size: measure(run.replace(**{field: size})) for size in sizes}
    return {size: step.moments["end of forward"]["activations"] for size, step in steps.items()}


Curve = Mapping[int, int]


def sweep_figure(
    panels: Mapping[str, Mapping[str, tuple[Curve, Curve]]], title: str, provenance: str = "", word: str = "simulated"
) -> Figure:
    """Panels side by side, named by their x axis; in each, a line of estimates and circles of steps for each kernel.

    Values are bytes, shown in MB on one scale for all panels; `word` says what the steps are, as `Measurement.word`.
    Raises ValueError without panels.
    """
    if not panels:
        raise ValueError("a sweep needs at least one panel")
    canvas = Canvas()
    top, unit = canvas.title(title) + 26, UNITS["MB"]
    most = max(max(curve.values()) for panel in panels.values() for pair in panel.values() for curve in pair) / unit
    width, height = (WIDTH - 2 * MARGIN - 40) / len(panels), 250.0
    for index, (label, panel) in enumerate(panels.items()):
        _panel(canvas, label, panel, MARGIN + 50 + index * width, top, width - 90, height, most)
    canvas.text(MARGIN, top - 10, f"MB kept when forward ends; line: estimate, circles: {word} steps", 12, QUIET)
    end = canvas.note(provenance, top + height + 58)
    said = "; ".join(
        f"{name} from {_mb(low)} to {_mb(high)} against {label}"
        for label, panel in panels.items()
        for name, (_, curve) in panel.items()
        for low, high in [(min(curve.values()), max(curve.values()))]
    )
    alt = f"{title}. Lines of estimates pass through circles of {word} steps: {said}."
    return Figure(canvas.svg(end + 4, title, alt), alt)


def _mb(size: int) -> str:
    return format_bytes(size, "MB", 0)


def _panel(
    canvas: Canvas, label: str, panel: Mapping[str, tuple[Curve, Curve]],
    left: float, top: float, width: float, height: float, most: float,
) -> None:  # fmt: skip
    """One panel: axes from zero, then each kernel's line, circles and name."""
    largest = max(max(pair[0]) for pair in panel.values())
    unit = UNITS["MB"]

    def spot(size: float, value: float) -> tuple[float, float]:
        return left + width * size / largest, top + height * (1 - value / unit / most)

    for tick in ticks(0, most, 5):
        y = spot(0, tick * unit)[1]
        canvas.line(left, y, left + width, y)
        canvas.text(left - 8, y + 4, number(tick), 12, QUIET, text_anchor="end")
    for tick in ticks(0, largest, 5):
        canvas.text(spot(tick, 0)[0], top + height + 18, number(tick), 12, QUIET, text_anchor="middle")
    canvas.line(left, top + height, left + width, top + height, RULE)
    canvas.text(left + width / 2, top + height + 38, label, 12, INK, text_anchor="middle")
    for (name, (estimated, measured)), color in zip(panel.items(), (EAGER, FLASH), strict=False):
        points = [spot(size, value) for size, value in estimated.items()]
        data = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        canvas.path(data, stroke=color, stroke_width=2.5, fill="none")
        for size, value in measured.items():
            x, y = spot(size, value)
            circle = f"M{x - 5:.1f} {y:.1f}a5 5 0 1 0 10 0a5 5 0 1 0 -10 0"
            canvas.path(circle, stroke=color, stroke_width=1.8, fill="#FFFFFF", data_value=value)
        for row, word in enumerate(wrap(name, 12, 60)):
            canvas.text(points[-1][0] + 9, points[-1][1] + 4 + 14 * row, word, 12, color, font_weight="bold")
