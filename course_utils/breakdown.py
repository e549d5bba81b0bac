"""The one result: bytes by kind of memory, whose parts sum exactly to its total."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from .units import formatter, html_table

KIND_NOTES = {
    "parameters": "the weights that forward and backward use",
    "weight_copies": "16-bit copies of the weights that autocast keeps",
    "gradients": "dL/dW, one element a parameter",
    "optimizer_states": "Adam's two moments, and fp32 master weights where there are any",
    "activations": "what forward keeps for backward",
    "inputs": "token ids and targets",
    "communication": "buckets and gathered shards",
    "workspaces": "what cuBLAS keeps for its matrix products",
    "temporaries": "made and freed within one phase of the step",
}

KINDS = tuple(KIND_NOTES)
"""Every kind of memory in the order in which figures stack them. `figures.COLOURS` has a colour for each."""


@dataclass(frozen=True)
class MemoryBreakdown(Mapping[str, int]):
    """Bytes by kind at one moment of a training step: a flat, ordered, read-only mapping.

    `parts` maps each kind to `int` bytes (kinds that are missing count zero), `phase` names the phase of the
    step that the moment belongs to, `label` says what this is a breakdown of. Raises ValueError for a kind
    that is not in `KINDS`, TypeError for a size that is not an int.
    """

    parts: Mapping[str, int] = field(compare=False)
    phase: str = ""
    label: str = ""
    _by_kind: dict[str, int] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        for kind, size in self.parts.items():
            if kind not in KINDS:
                raise ValueError(f"unknown kind of memory {kind!r}; known: {', '.join(KINDS)}")
            if not isinstance(size, int) or isinstance(size, bool):
                raise TypeError(f"{kind} is {size!r}: a breakdown holds whole bytes")
        self._by_kind.update({kind: self.parts.get(kind, 0) for kind in KINDS})

    @property
    def total(self) -> int:
        """Bytes of all kinds together."""
        return sum(self._by_kind.values())

    def to_dict(self) -> dict[str, Any]:
        """One flat row for JSON or a table: "label", "phase", "total", and the bytes of each kind by name."""
        return {"label": self.label, "phase": self.phase, "total": self.total, **self}

    def to_json(self) -> str:
        """`to_dict` as JSON."""
        return json.dumps(self.to_dict())

    def __getitem__(self, kind: str) -> int:
        return self._by_kind[kind]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_kind)

    def __len__(self) -> int:
        return len(self._by_kind)

    def __str__(self) -> str:
        shown = formatter(self.total)
        width = max(len(kind) for kind in KINDS)
        rows = [
            f"{kind.replace('_', ' '):<{width}}  {shown(size):>12}" for kind, size in self.items() if size
        ]
        lines = [*rows, f"{'total':<{width}}  {shown(self.total):>12}"]
        if self.title:
            lines.insert(0, self.title)
        return "\n".join(lines)

    @property
    def title(self) -> str:
        """Its label, and the phase that it is the peak of; empty without either."""
        if self.phase in self.label:
            return self.label
        return f"{self.label}, in {self.phase}" if self.label else f"in {self.phase}"

    def _repr_html_(self) -> str:
        shown = formatter(self.total)
        present = {kind: size for kind, size in self.items() if size}
        rows = [(kind.replace("_", " "), shown(size)) for kind, size in present.items()]
        hints = [KIND_NOTES[kind] for kind in present]
        table = [*rows, ("total", shown(self.total))]
        return html_table(table, header=False, totals=True, caption=self.title, hints=hints)
