"""Learners' functions on real processes: checks send their text, and a judge on each rank reports."""

import __future__

import ast
import inspect
import json
import linecache
import re
import sys
import tempfile
import textwrap
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ...interactive.feedback import EXITS, CheckFailed, expect, fail
from ...interactive.torch_settings import restore_defaults
from ...ranks.launch import RankFailed, run_ranks
from ...ranks.worker import report_on_gloo

STANDSTILL_SECONDS = 60.0  # for which an exchange waits, if some rank does not take part in it
WAITED = "On real ranks, your function waits for another rank that sends nothing, or has ended: for ever."
_outcomes: dict[tuple[str, int, str, str, str], list[dict[str, Any]]] = {}  # starting processes takes seconds


def outcomes(
    program: str, ranks: int, functions: Iterable[tuple[str, Callable[..., Any]]]
) -> list[list[dict]]:
    """The findings of the module `program`, which calls `report_judged`, on each function, rank by rank.

    Functions come with the name of their judge; the same processes run all of them. An outcome is the judge's
    dictionary, or {"said": what the learner should read} where the judge expected in vain, when no exchange
    is to come any more, or the function raised. Raises CheckFailed for a function without a text to send to
    the ranks, and for one that ends a process or never ends.
    """
    wanted = [(program, ranks, judge, *_source_of(function)) for judge, function in functions]
    new = [function for function in dict.fromkeys(wanted) if function not in _outcomes]
    if new:
        with tempfile.TemporaryDirectory(prefix="course-check-", ignore_cleanup_errors=True) as folder:
            file = Path(folder, "functions.json")
            file.write_text(json.dumps([function[2:] for function in new]), encoding="utf-8")
            try:
                by_rank = run_ranks(program, ranks, [str(file)])
            except RankFailed as error:
                raise CheckFailed(f"On real ranks your function did not come to its end: {error}") from error
        # by_rank has a list of findings for each rank; its columns are those of each function
        for function, *found in zip(new, *by_rank, strict=True):
            _outcomes[function] = found
    return [_outcomes[function] for function in wanted]


def found_on_ranks(
    program: str, ranks: int, judge: str, function: Callable[..., Any]
) -> list[dict[str, Any]]:
    """The outcomes of one learner's function, by rank. Raises CheckFailed with what one of them says."""
    (found,) = outcomes(program, ranks, [(judge, function)])
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


def report_judged(judges: Mapping[str, Callable[[Any], dict[str, Any]]], names: Mapping[str, Any]) -> None:
    """Be a rank that hands back the outcomes; a learner's function may use `names` without importing them."""
    functions = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))

    def judged() -> list[dict]:
        return [_outcome(judges[judge], names, *function) for judge, *function in functions]

    report_on_gloo(judged, STANDSTILL_SECONDS)


def _outcome(
    judge: Callable[[Any], dict[str, Any]], names: Mapping[str, Any], source: str, name: str
) -> dict:
    namespace = dict(names)
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
            said += " (Of other cells, real ranks know the imports alone.)"
        return {"said": said}
    finally:
        restore_defaults()  # the next function runs in the same process


def _source_of(function: Callable[..., Any]) -> tuple[str, str]:
    """The text of a learner's function or class, with that of its cell's helpers, and its name."""
    try:
        own = vars(function).values() if inspect.isclass(function) else (function,)
        file = next(one.__code__.co_filename for one in own if inspect.isfunction(one))
        in_a_cell = not Path(file).is_file()
        source = _definitions(file) if in_a_cell else textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError, StopIteration, SyntaxError) as error:
        lost = "The text of your function cannot be found: define it in a cell, with `def`."
        raise CheckFailed(lost) from error
    defined = re.search(rf"^(def|class) {function.__name__}\b", source, re.MULTILINE)
    expect(defined, "Define your function in a cell, with `def`: its text goes to other processes.")
    return source, function.__name__


def _definitions(cell: str) -> str:
    """The imports, definitions and constants of a notebook's cell: helpers too, but no calls of checks."""
    kinds = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef)
    body = ast.parse("".join(linecache.getlines(cell))).body
    chosen = [one for one in body if isinstance(one, kinds) or _is_constant(one)]
    return ast.unparse(ast.Module(chosen, []))


def _is_constant(statement: ast.stmt) -> bool:
    """True if it gives a name to a number, a text or another constant, as in `BETA = 0.9`."""
    if not isinstance(statement, (ast.Assign, ast.AnnAssign)) or statement.value is None:
        return False
    return not any(isinstance(one, (ast.Name, ast.Call)) for one in ast.walk(statement.value))
