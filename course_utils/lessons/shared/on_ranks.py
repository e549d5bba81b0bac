"""Learners' functions on real processes: checks send their text, and a judge on each rank reports."""

import __future__

import ast
import importlib
import inspect
import linecache
import re
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from ...interactive.feedback import EXITS, CheckFailed, expect, fail
from ...interactive.torch_settings import restore_defaults
from ...ranks.launch import RankFailed, run_ranks

STANDSTILL_SECONDS = 60.0  # for which an exchange waits, if some rank does not take part in it
WAITED = "On real ranks, your function waits for another rank that sends nothing, or has ended: for ever."

DEFINITIONS = (ast.FunctionDef, ast.ClassDef)

Judge = Callable[[Any], dict[str, Any]]
"""A function of a lesson's checks: what it finds on its rank about a learner's function, as JSON can hold."""

_outcomes: dict[tuple[int, str, str, str, str], list[dict[str, Any]]] = {}  # starting processes takes seconds


def outcomes(ranks: int, functions: Iterable[tuple[Judge, Callable[..., Any]]]) -> list[list[dict]]:
    """The findings of judges on learners' functions, rank by rank; the same processes run all of them.

    An outcome is the judge's dictionary, or {"said": what the learner should read} where the judge expected
    in vain, when no exchange is to come any more, or the function raised. Raises CheckFailed for a function
    without a text to send to the ranks, and for one that ends a process or never ends.
    """
    wanted = [
        (ranks, judge.__module__, judge.__name__, *_source_of(function)) for judge, function in functions
    ]
    new = [function for function in dict.fromkeys(wanted) if function not in _outcomes]
    if new:
        try:
            by_rank = run_ranks(judged, ranks, functions=[function[1:] for function in new])
        except RankFailed as error:
            raise CheckFailed(f"On real ranks your function did not come to its end: {error}") from error
        # by_rank has a list of findings for each rank; its columns are those of each function
        for function, *found in zip(new, *by_rank, strict=True):
            _outcomes[function] = found
    return [_outcomes[function] for function in wanted]


def found_on_ranks(judge: Judge, ranks: int, function: Callable[..., Any]) -> list[dict[str, Any]]:
    """The outcomes of one learner's function, by rank. Raises CheckFailed with what one of them says."""
    (found,) = outcomes(ranks, [(judge, function)])
    said = [one["said"] for one in found if "said" in one]
    if said:
        # when a rank raises, others wait for it: what it said comes first
        causes = [text for text in said if text != WAITED]
        fail(causes[0] if causes else WAITED)
    return found


@contextmanager
def pretended(rank: int, ranks: int) -> Iterator[None]:
    """Inside, this process is one of `ranks` ranks whose exchanges send nothing, as in torch's own tests.

    For what a function does by itself: it runs at once, and no exchange waits. Raises CheckFailed if a group
    is open.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    open_group = (
        "A process group is open in this notebook. Call `torch.distributed.destroy_process_group()` first."
    )
    expect(not dist.is_initialized(), open_group)
    hook = sys.excepthook  # a group puts its rank before errors
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook


def expect_together(run: Callable[[], Any], ranks: int) -> None:
    """Raise CheckFailed unless the first and the last of `ranks` make the same exchanges in `run`."""
    from torch.distributed.tensor.debug import CommDebugMode

    counts = []
    for rank in (0, ranks - 1):
        with warnings.catch_warnings(), pretended(rank, ranks), CommDebugMode() as sent:
            warnings.simplefilter("ignore")  # new versions of torch have new names for exchanges
            run()
        counts.append(sent.get_comm_counts())
    apart = (
        "Rank 0 and the last rank do not make the same exchanges. "
        "Real ranks would wait for each other for ever."
    )
    expect(counts[0] == counts[1], apart)


@contextmanager
def sending() -> Iterator[Callable[[torch.Tensor, int], None]]:
    """Gives a function that sends a copy of a tensor to a rank and returns at once.

    The end of the context waits for what is still on its way.
    """
    works = list[Any]()

    def send(tensor: torch.Tensor, to: int) -> None:
        copied = tensor.detach().clone()
        works.append((copied, dist.isend(copied, to)))  # keeps the copy until it has been sent

    yield send
    for _, work in works:
        work.wait()


def judged(functions: list[tuple[str, str, str, str]]) -> list[dict[str, Any]]:
    """Be a rank that finds the outcomes: of functions by their judge's module and name, text, and name."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=STANDSTILL_SECONDS))
    found = [
        _outcome(getattr(importlib.import_module(module), judge), source, name)
        for module, judge, source, name in functions
    ]
    dist.destroy_process_group()
    return found


def _outcome(judge: Judge, source: str, name: str) -> dict[str, Any]:
    namespace: dict[str, Any] = {}
    try:
        exec(compile(source, "<your function>", "exec", __future__.annotations.compiler_flag), namespace)
        return judge(namespace[name])
    except CheckFailed as error:
        return {"said": str(error)}
    except SystemExit:
        return {"said": EXITS}
    except Exception as error:  # a learner's code may raise anything; the check reports it
        if "gloo" in str(error):
            return {"said": WAITED}
        said = f"On real ranks, your function raised {type(error).__name__}: {error}"
        if isinstance(error, NameError):
            said += " (Of other cells, real ranks know only imports and functions.)"
        return {"said": said}
    finally:
        restore_defaults()  # the next function runs in the same process


def _source_of(function: Callable[..., Any]) -> tuple[str, str]:
    """The text of a learner's function or class, with what it uses of its cell and others, and its name."""
    try:
        own = vars(function).values() if inspect.isclass(function) else (function,)
        first = next(one for one in own if inspect.isfunction(one))
        file = first.__code__.co_filename
        in_a_cell = not Path(file).is_file()
        source = _definitions(file) if in_a_cell else textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError, StopIteration, SyntaxError) as error:
        lost = "The text of your function cannot be found: define it in a cell, with `def`."
        raise CheckFailed(lost) from error
    defined = re.search(rf"^(def|class) {function.__name__}\b", source, re.MULTILINE)
    expect(defined, "Define your function in a cell, with `def`: its text goes to other processes.")
    here = {node.name for node in ast.walk(ast.parse(source)) if isinstance(node, DEFINITIONS)}
    return "\n".join([*_of_other_cells(source, first.__globals__, here), source]), function.__name__


def _of_other_cells(source: str, known: Mapping[str, Any], sent: set[str]) -> Iterator[str]:
    """Lines that import what `source` uses of a notebook's imports, and the functions of its other cells."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Name) or node.id not in known or node.id in sent:
            continue
        sent.add(node.id)
        value = known[node.id]
        name, module = (getattr(value, what, None) or "" for what in ("__name__", "__module__"))
        if isinstance(value, ModuleType):
            yield f"import {name} as {node.id}"
        elif inspect.isfunction(value) and module == known["__name__"]:
            text = textwrap.dedent(inspect.getsource(value))
            yield from _of_other_cells(text, known, sent)
            yield text
        elif name and getattr(sys.modules.get(module), name, None) is value and module != "__main__":
            yield f"from {module} import {name} as {node.id}"


def _definitions(cell: str) -> str:
    """The imports, definitions and constants of a notebook's cell: helpers too, but no calls of checks."""
    kinds = (ast.Import, ast.ImportFrom, *DEFINITIONS)
    body = ast.parse("".join(linecache.getlines(cell))).body
    chosen = [one for one in body if isinstance(one, kinds) or _is_constant(one)]
    return ast.unparse(ast.Module(chosen, []))


def _is_constant(statement: ast.stmt) -> bool:
    """True if it gives a name to a number, a text or another constant, as in `BETA = 0.9`."""
    if not isinstance(statement, (ast.Assign, ast.AnnAssign)) or statement.value is None:
        return False
    return not any(isinstance(one, (ast.Name, ast.Call)) for one in ast.walk(statement.value))
