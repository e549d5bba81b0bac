"""Findings of saved-tensor hooks on a simulated GPU, shipped for platforms without one; exact matches only."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch

from ..errors import SimulationUnavailable
from ..measurement import Provenance
from .recording_file import SIMULATED_GPU, packed, unpacked
from .sources import forced_source

FILE = "saved.json.gz"

KNOWN = ("torch.nn.", "course_utils.")  # A learner's own class may not say in its repr all that decides what it keeps
Row = tuple[str, tuple[int, ...], str, int]  # Name, shape, dtype and bytes of one storage


@dataclass(frozen=True)
class Question:
    """A question to the hooks: an operation, its inputs (shapes or tensors) and the dtype of its weights."""

    operation: Callable[..., Any]
    inputs: Sequence[Sequence[int] | torch.Tensor]
    dtype: str

    @property
    def key(self) -> str | None:
        """The question as text, the same on every machine; None for an operation that text cannot describe."""
        name = spelled(self.operation)
        return name and f"{name} of {', '.join(map(_spelled_input, self.inputs))} in {self.dtype}"


def spelled(operation: Callable[..., Any]) -> str | None:
    """The operation as text if it is a module of torch or the course, or a (partial) function of torch; else None."""
    if isinstance(operation, torch.nn.Module):
        alike = all(type(part).__module__.startswith(KNOWN) and part.training for part in operation.modules())
        trained = all(weight.requires_grad for weight in operation.parameters())
        return " ".join(repr(operation).split()) if alike and trained else None
    if isinstance(operation, partial):
        name = spelled(operation.func)
        given = [*map(repr, operation.args), *(f"{key}={value!r}" for key, value in operation.keywords.items())]
        return name and f"{name}({', '.join(given)})"
    name = getattr(operation, "__name__", "")
    return f"torch.{name}" if getattr(torch, name, None) is operation else None


def _spelled_input(item: Sequence[int] | torch.Tensor) -> str:
    if isinstance(item, torch.Tensor):
        return f"{tuple(item.shape)} {item.dtype}{' with gradient' if item.requires_grad else ''}"
    return f"{tuple(item)}"


def why_recorded() -> str:
    """The reason that recordings answer in place of a simulated GPU, or nothing where one can be simulated."""
    from .simulated import availability

    if forced_source() == "recorded":
        return "COURSE_SOURCE is recorded"
    works, how = availability()
    return "" if works else f"not simulated here: {how}"


def find(question: Question, why: str) -> list[Row]:
    """The storages found for exactly this question, and once a line that says where. Raises SimulationUnavailable."""
    content = load()
    rows = content["found"].get(question.key or "")
    if rows is None:
        raise SimulationUnavailable(
            f"what this keeps on a GPU is not recorded ({why}); the lesson's own questions are. "
            "device='cpu' asks your processor, whose kernels may keep other things"
        )
    _say_once(str(Provenance("recorded", f"a {SIMULATED_GPU}", content["torch"], content["date"], why)))
    return [(name, tuple(shape), dtype, size) for name, shape, dtype, size in rows]


@cache
def _say_once(line: str) -> None:
    print(f"What autograd keeps on a GPU is {line}")


@cache
def load() -> Mapping[str, Any]:
    return unpacked(FILE)


def save(found: Mapping[str, Sequence[Row]], date: str) -> bytes:
    """The bytes of a file that holds these answers by key, found on this torch on that day."""
    return packed({"torch": torch.__version__.split("+")[0], "date": date, "found": dict(found)})
