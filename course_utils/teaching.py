"""What lessons say with one call: a guess that is stored, the guess beside the truth, ledgers, what autograd keeps."""

import html
import json
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .keeping import course_home, one_at_a_time, problems_in_words, write_whole
from .tables import aligned, html_table
from .units import UNITS, format_bytes, format_signed, percent

if TYPE_CHECKING:
    import torch

NUMBER = re.compile(r"\s*([0-9][0-9_]*(?:[.,][0-9]+)?|[.,][0-9]+)\s*")
THOUSANDS_OR_DECIMALS = re.compile(r"[1-9][0-9_]*,[0-9]{3}")


# ------------------------------------------------------------------------------------------------- guess, then look


@dataclass(frozen=True)
class Guess:
    """What a learner said before looking: `value` in `unit`, locked on `day` (ISO date)."""

    value: float
    unit: str
    day: str

    def __str__(self) -> str:
        return f"{self.value:,g} {self.unit}".strip()

    @property
    def amount(self) -> float:
        """In bytes where `unit` is one of memory, else `value` as it is."""
        return self.value * UNITS.get(self.unit, 1)


def stored_guesses() -> dict[str, Guess]:
    """Every guess locked on this machine, by key. ValueError for a file that is damaged or may not be read."""
    file = _guesses_file()
    with problems_in_words("Guesses", file.parent):
        text = file.read_text(encoding="utf-8") if file.exists() else "{}"
    try:
        return {key: Guess(**entry) for key, entry in json.loads(text).items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} is damaged ({error}); delete it to start over with your guesses") from error


def lock_guess(key: str, value: float, unit: str) -> Guess:
    """Store a guess and return it. The first one stays: with a guess locked already, that one is returned.

    ValueError where it cannot be kept: the message names the folder and how to choose another.
    """
    guesses = stored_guesses()
    if key not in guesses:
        with _alone():
            guesses = stored_guesses()  # another kernel may have locked some since
            guesses.setdefault(key, Guess(value, unit, date.today().isoformat()))
            _store(guesses)
    return guesses[key]


def forget_guess(key: str) -> None:
    """Remove the guess stored under `key`, so that another can be made. KeyError where there is none."""
    with _alone():
        guesses = stored_guesses()
        del guesses[key]
        _store(guesses)


def _guesses_file() -> Path:
    return course_home() / "guesses.json"


@contextmanager
def _alone() -> Iterator[None]:
    """Read, change and write the guesses in here: no other kernel does so at the same time, or one would be lost."""
    with problems_in_words("Guesses", course_home()), one_at_a_time(_guesses_file()):
        yield


def _store(guesses: Mapping[str, Guess]) -> None:
    """Write all guesses; a reader finds those before or these. Call it within `_alone`."""
    write_whole(_guesses_file(), json.dumps({key: vars(guess) for key, guess in guesses.items()}, indent=1))


def parse_guess(text: str, unit: str) -> float:
    """The number in "41", "41.5", "41,5" or, with the unit asked for, "41 GB". ValueError says what is taken.

    "1,000" is refused, being a thousand to some and one to others: a locked guess should not rest on a reading.
    """
    match = NUMBER.fullmatch(text.strip().removesuffix(unit))
    if match and THOUSANDS_OR_DECIMALS.fullmatch(match[1]):
        thousands, decimals = match[1].replace(",", "").replace("_", ""), match[1].replace(",", ".")
        raise ValueError(f"{match[1]} can be read in two ways: write {thousands} or {float(decimals)}.")
    guess = float(match[1].replace("_", "").replace(",", ".")) if match else math.inf
    if guess == math.inf:  # no number, or one of hundreds of digits
        raise ValueError(f"Write your guess in {unit}, as a number alone." if unit else "Write a number alone.")
    return guess


def predict(key: str, unit: str = "GB", guess: float | None = None) -> None:
    """Show a field for the learner's guess, in `unit`, and store it on this machine under `key` once it is locked.

    `unit` is "" for a number that has none; `guess` locks one without the field. A locked guess stays until
    `forget_guess(key)`.
    """
    if guess is not None:
        lock_guess(key, guess, unit)
    _show(Prediction(key, unit))


@dataclass(frozen=True, repr=False)
class Prediction:
    """A question for a guess: draws itself as a field and a button, or as the guess that has been locked."""

    key: str
    unit: str

    def __repr__(self) -> str:
        guess = stored_guesses().get(self.key)
        if guess:
            return f"Your guess is locked: {guess}"
        asked = f"Your guess, {_in(self.unit)}" if self.unit else "Your guess"
        return f"{asked}: run this cell and type it in."

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, Any]:
        """The field where widgets can be drawn and no guess is locked yet; always the text, the same on each run."""
        if self.key in stored_guesses():
            return {"text/plain": repr(self), "text/html": _locked(stored_guesses()[self.key])}
        return {**_guess_field(self.key, self.unit)._repr_mimebundle_(), "text/plain": repr(self)}


def _guess_field(key: str, unit: str) -> Any:
    """A text field, a button that locks what it holds, and a line that answers."""
    import ipywidgets

    asked = f"your guess {_in(unit)}".strip()
    wide = {"width": f"{max(18, 10 + len(asked) // 2)}em"}  # 10 for the word before the field and its frame
    field = ipywidgets.Text(placeholder=asked, description="Guess", layout=wide)
    button = ipywidgets.Button(
        description="Lock it in", tooltip=f"Store {asked.replace('your', 'this')}; then look at the answer"
    )
    answer = ipywidgets.HTML()

    def lock(_: object) -> None:
        try:
            guess = lock_guess(key, parse_guess(field.value, unit), unit)
        except ValueError as problem:
            answer.value = html.escape(str(problem))
            return
        field.disabled = button.disabled = True
        answer.value = _locked(guess)

    button.on_click(lock)
    return ipywidgets.VBox([ipywidgets.HBox([field, button]), answer])


def _in(unit: str) -> str:
    """ "in GB", but "of two", and nothing for a plain number."""
    return unit if not unit or unit.startswith("of ") else f"in {unit}"


def _locked(guess: Guess) -> str:
    return f"Your guess is locked: <b>{html.escape(str(guess))}</b>. Now look."


def reveal(key: str, actual: float, unit: str | None = None) -> None:
    """Show the guess stored under `key` beside `actual` (bytes, or whatever the guess's unit counts) and their ratio.

    `unit` is for the case that no guess was made; GB without it.
    """
    _show(Revelation(key, actual, stored_guesses().get(key), "GB" if unit is None else unit))


@dataclass(frozen=True, repr=False)
class Revelation:
    """A guess beside the truth: `actual` in bytes where the unit is one of memory, `guess` None if none was made."""

    key: str
    actual: float
    guess: Guess | None
    default_unit: str = "GB"

    @property
    def unit(self) -> str:
        """The unit of the guess, or the one that the lesson asks in."""
        return self.guess.unit if self.guess else self.default_unit

    @property
    def verdict(self) -> str:
        """One sentence: how far off the guess was, or an invitation where there is none."""
        if self.guess is None:
            return (
                f"It is {self._spell(self.actual)}. You locked no guess: the next one is worth making before you look."
            )
        return f"You said {self.guess}, it is {self._spell(self.actual)}: {self._distance(self.guess.amount)}"

    def _distance(self, amount: float) -> str:
        if not (amount and self.actual):
            return "right." if amount == self.actual else "one of the two is nothing at all."
        ratio = amount / self.actual
        if abs(ratio - 1) <= 0.05:
            return "spot on, within 5 %."
        word = "too much" if ratio > 1 else "too little"
        factor = max(ratio, 1 / ratio)
        return f"{percent(abs(ratio - 1))} {word}." if factor < 1.5 else f"{factor:,.1f} times {word}."

    def _spell(self, amount: float) -> str:
        if self.unit in UNITS:
            return format_bytes(round(amount), self.unit, 0 if self.unit == "B" else 1)
        return f"{amount:,.4g} {self.unit}".strip()

    def __repr__(self) -> str:
        return self.verdict

    def _repr_html_(self) -> str:
        return f"<p>{html.escape(self.verdict)}</p>{self._bars() if self.guess else ''}"

    def _bars(self) -> str:
        """Two bars on one scale: the guess above, the truth below."""
        assert self.guess is not None
        most = max(self.guess.amount, self.actual, 1e-300)
        rows = (("guess", self.guess.amount, "#c8c8c8"), ("answer", self.actual, "#56b4e9"))
        return "".join(
            f"<div style='display:flex;gap:.6em'><span style='width:4em'>{name}</span>"
            f"<span style='background:{colour};width:{amount / most * 60:.2f}%'>&nbsp;</span>"
            f"<span>{html.escape(self._spell(amount))}</span></div>"
            for name, amount, colour in rows
        )


# ---------------------------------------------------------------------------------------------------------- ledgers


@dataclass(frozen=True, repr=False)
class Ledger:
    """Named bytes, each with what was measured where there is a measurement, and totals; draws itself as a table.

    `rows` holds (name, estimated bytes or None, measured bytes or None), `unit` is one for the whole table. `columns`
    names the two sides; the third column is the first minus the second, as everywhere in the course.
    """

    rows: Sequence[tuple[str, int | None, int | None]]
    unit: str
    measured: bool
    columns: tuple[str, str] = ("estimate", "measured")

    def totals(self) -> tuple[int, int]:
        """Bytes estimated and bytes measured, all rows together."""
        return sum(row[1] or 0 for row in self.rows), sum(row[2] or 0 for row in self.rows)

    def cells(self) -> Iterator[tuple[str, ...]]:
        """The table as text: a header, the rows, a row of totals."""
        yield ("", *self.columns, " − ".join(self.columns)) if self.measured else ("", "bytes")
        for name, estimate, measured in [*self.rows, ("total", *self.totals())]:
            yield (name, *self._amounts(estimate, measured))

    def _amounts(self, estimate: int | None, measured: int | None) -> tuple[str, ...]:
        if not self.measured:
            return (self._spell(estimate),)
        difference = "–" if estimate is None or measured is None else format_signed(estimate - measured)
        return self._spell(estimate), self._spell(measured), difference

    def _spell(self, size: int | None) -> str:
        return "–" if size is None else format_bytes(size, self.unit, 0 if self.unit == "B" else 3)

    def __repr__(self) -> str:
        return aligned(self.cells())

    def _repr_html_(self) -> str:
        return html_table(self.cells(), totals=True)


Rows = Mapping[str, int] | Sequence["Saved"]


def ledger(
    estimate: Rows,
    measured: Rows | None = None,
    unit: str | None = None,
    columns: tuple[str, str] = ("estimate", "measured"),
) -> Ledger:
    """A table of named bytes, and beside them what was measured, row by row in the order of `estimate`.

    Each side is a mapping from name to bytes, or what `saved_by` returns. `unit` is the largest that the total fills
    unless given; `columns` names the sides if they are not an estimate and a measurement. Raises ValueError for a
    unit that is not known.
    """
    left, right = _as_mapping(estimate), _as_mapping(measured or {})
    names = [*left, *(name for name in right if name not in left)]
    total = max(sum(left.values()), sum(right.values()))
    unit = unit or next((name for name in ("GB", "MB", "KB") if total >= UNITS[name]), "B")
    if unit not in UNITS:
        raise ValueError(f"unknown unit {unit!r}; known: {', '.join(UNITS)}")
    return Ledger([(name, left.get(name), right.get(name)) for name in names], unit, measured is not None, columns)


def show_ledger(
    estimate: Rows,
    measured: Rows | None = None,
    unit: str | None = None,
    columns: tuple[str, str] = ("estimate", "measured"),
) -> None:
    """Show `ledger(estimate, measured, unit, columns)` in the notebook, or print it in a terminal."""
    _show(ledger(estimate, measured, unit, columns))


def _as_mapping(rows: Rows) -> dict[str, int]:
    """Name to bytes; saved tensors that share a name are added up."""
    if isinstance(rows, Mapping):
        return dict(rows)
    named: dict[str, int] = {}
    for row in rows:
        named[row.name] = named.get(row.name, 0) + row.bytes
    return named


def _show(thing: object) -> None:
    """Draw in a notebook, print in a terminal."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if shell is None:
        print(thing)
    else:
        sys.modules["IPython"].display.display(thing)


# -------------------------------------------------------------------------------------------- what autograd keeps


@dataclass(frozen=True)
class Saved:
    """One storage that autograd keeps for backward: which operation keeps it, its shape, its dtype, its bytes."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int


DTYPES = {"fp64": "float64", "fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


def saved_by(
    operation: Callable[..., Any],
    *inputs: "Sequence[int] | torch.Tensor",
    dtype: str = "fp32",
    device: str = "cpu",
    names: Sequence[str] | None = None,
) -> list[Saved]:
    """Run `operation` (a module or a function) and list each storage that autograd keeps for backward, once each.

    `inputs` are tensors, or shapes of random tensors of `dtype` that need gradients, as a layer in the middle of a
    network gets them; a module runs with its weights in `dtype`. Those weights are left out: they are there anyway.
    `device` is "cpu", or "gpu" for a simulated one, whose kernels may keep other things (statistics in fp32, masks of
    one byte). Where no GPU can be simulated, shipped recordings answer the lessons' own questions, and a line says so.
    `names` replaces the names in order. Raises ValueError for an unknown dtype or device, and for names that don't
    pair up; SimulationUnavailable for what is neither simulated here nor recorded.
    """
    for value, known, what in ((dtype, DTYPES, "dtype"), (device, ("cpu", "gpu"), "device")):
        if value not in known:
            raise ValueError(f"unknown {what} {value!r}; known: {', '.join(known)}")
    saved = (
        _recorded_or_now(operation, inputs, dtype) if device == "gpu" else _saved_now(operation, inputs, dtype, device)
    )
    if names is None:
        return saved
    if len(names) != len(saved):
        raise ValueError(f"{len(names)} names for {len(saved)} storages: {', '.join(item.name for item in saved)}")
    return [replace(item, name=name) for name, item in zip(names, saved, strict=True)]


def _recorded_or_now(
    operation: Callable[..., Any], inputs: "Sequence[Sequence[int] | torch.Tensor]", dtype: str
) -> list[Saved]:
    """On a simulated GPU where there can be one, else as it was recorded."""
    from .measuring.saved_recordings import Question, find, why_recorded
    from .measuring.simulated import simulated_gpu

    why = why_recorded()
    if why:
        return [Saved(*row) for row in find(Question(operation, inputs, dtype), why)]
    with simulated_gpu("flash" if dtype in ("fp16", "bf16") else "efficient"):
        return _saved_now(operation, inputs, dtype, "gpu")


def _saved_now(
    operation: Callable[..., Any], inputs: "Sequence[Sequence[int] | torch.Tensor]", dtype: str, device: str
) -> list[Saved]:
    import torch

    tensors = [_tensor(item, dtype, device) for item in inputs]
    weights: dict[str, torch.Tensor] = {}
    run = operation
    if isinstance(operation, torch.nn.Module):
        module, state = operation, {**dict(operation.named_parameters()), **dict(operation.named_buffers())}
        weights = {name: _moved(tensor, dtype, device) for name, tensor in state.items()}
        run = lambda *arguments: torch.func.functional_call(module, weights, arguments)  # noqa: E731
    kept, result = _kept_by(run, tensors)
    own = {_storage(tensor) for tensor in weights.values()}
    labels = _labels(result)
    return [_saved(labels.get(key, "saved"), tensor) for key, tensor in kept.items() if key not in own]


def _tensor(item: "Sequence[int] | torch.Tensor", dtype: str, device: str) -> "torch.Tensor":
    """A given tensor, or a random one of the given shape that needs a gradient."""
    import torch

    if isinstance(item, torch.Tensor):
        return _moved(item, None, device)
    shape, kind = tuple(item), getattr(torch, DTYPES[dtype])
    if device == "gpu":
        return torch.empty(shape, dtype=kind, device="cuda", requires_grad=True)
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(kind).requires_grad_()


def _moved(tensor: "torch.Tensor", dtype: str | None, device: str) -> "torch.Tensor":
    """`tensor` in `dtype` (None, or one that holds no fractions, keeps its own) on the CPU or on the simulated GPU."""
    import torch

    kind = getattr(torch, DTYPES[dtype]) if dtype and tensor.is_floating_point() else tensor.dtype
    if device == "gpu":
        return torch.empty(tensor.shape, dtype=kind, device="cuda", requires_grad=tensor.requires_grad)
    return tensor if tensor.dtype == kind else tensor.detach().to(kind).requires_grad_(tensor.requires_grad)


def _kept_by(operation: Callable[..., Any], tensors: list["torch.Tensor"]) -> tuple[dict[int, "torch.Tensor"], Any]:
    """The tensors kept, by storage and in order, and the result that keeps them alive."""
    import torch

    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.setdefault(_storage(tensor), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = operation(*tensors)
    return kept, result


def _storage(tensor: "torch.Tensor") -> int:
    """What tells one storage from another while both are alive."""
    return tensor.untyped_storage()._cdata


def _saved(name: str, tensor: "torch.Tensor") -> Saved:
    short = {long: short for short, long in DTYPES.items()}
    dtype = str(tensor.dtype).removeprefix("torch.")
    return Saved(name, tuple(tensor.shape), short.get(dtype, dtype), tensor.untyped_storage().nbytes())


def _labels(result: Any) -> dict[int, str]:
    """A name for each storage kept: the operation in whose backward it is used first, and what it is there."""
    labels: dict[int, str] = {}
    for node in _nodes(result):
        operation = node.name().rstrip("0123456789").removesuffix("Backward")
        for attribute in sorted(name for name in dir(node) if name.startswith("_saved_")):
            tensor = getattr(node, attribute)
            if hasattr(tensor, "untyped_storage"):
                labels.setdefault(_storage(tensor), f"{operation}: {attribute.removeprefix('_saved_')}")
    return labels


def _nodes(result: Any) -> Iterator[Any]:
    """Every node of the graph behind `result` (a tensor or several), last operation first."""
    outputs = result if isinstance(result, tuple | list) else [result]
    waiting = [output.grad_fn for output in outputs if getattr(output, "grad_fn", None) is not None]
    seen = set()
    while waiting:
        node = waiting.pop(0)
        if node not in seen:
            seen.add(node)
            yield node
            waiting += [parent for parent, _ in node.next_functions if parent is not None]
