"""A function made ready for other processes: by its name where it can be imported, else by its source."""

import builtins
import dis
import inspect
import json
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import CodeType
from typing import Any

HOW = "write it with def, at the top level of a cell or a file"


def packed(function: Callable[..., Any], keywords: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The place of `function` for another process, and its arguments, as JSON can hold them.

    A package's function is imported by its name. The source of any other is written to a file of its own in
    `folder`, with the functions of the same notebook or module that it calls. Raises TypeError for what is no
    plain function, needs more than its source, or cannot be called with `keywords`.
    """
    if not inspect.isfunction(function):
        raise TypeError(f"{function!r} is a {type(function).__name__}, not a plain function: {HOW}")
    name = function.__name__
    try:
        inspect.signature(function).bind(**keywords)
        json.dumps(keywords)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"{name}() cannot be called with {', '.join(keywords) or 'nothing'}: {error}. Send numbers,"
            " strings, lists or dictionaries, and make the rest of them there."
        ) from None
    if "." in (function.__module__ or "") and function.__qualname__ == name != "<lambda>":
        return {"file": "", "module": function.__module__, "name": name, "keywords": keywords}
    path = folder / f"{name}.py"
    path.write_text(_source(function), encoding="utf-8")
    return {"file": str(path), "name": name, "keywords": keywords}


def _source(function: Any) -> str:
    """The text of a file that defines `function` and the functions next to it that it calls, no more."""
    needed = [function]
    for one in needed:  # which grows meanwhile, until no function calls another one
        needed += [other for other in _called(one) if other not in needed]
    above = "\n" * (function.__code__.co_firstlineno - 1)  # so that errors name the lines of the cell
    return above + "\n\n".join(map(_text, needed))


def _called(function: Any) -> list[Any]:
    """The functions of the same module that `function` uses. TypeError for all else that it would need."""
    name = function.__name__
    if name == "<lambda>":
        raise TypeError(f"a lambda cannot be sent to another process: {HOW}")
    if function.__closure__:
        kept = ", ".join(function.__code__.co_freevars)
        raise TypeError(
            f"{name}() uses {kept} of the function around it: {HOW}, and pass {kept} as an argument"
        )
    foreign = sorted(globals_used(function.__code__) - {name} - set(dir(builtins)))
    own = [function.__globals__.get(used) for used in foreign]
    own = [one for one in own if inspect.isfunction(one) and one.__module__ == function.__module__]
    if names := ", ".join(used for used in foreign if function.__globals__.get(used) not in own):
        raise TypeError(
            f"{name}() uses {names}, which another process does not know: import or define it inside"
        )
    return own


def _text(function: Any) -> str:
    try:
        return textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError):
        raise TypeError(f"the source of {function.__name__}() cannot be read: {HOW}") from None


def globals_used(code: CodeType) -> set[str]:
    """The global names that a function looks up, those of functions inside it included."""
    steps = list(dis.get_instructions(code))
    looked_up = {step.argval for step in steps if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    found = looked_up - {step.argval for step in steps if step.opname == "STORE_NAME"}  # of a class inside
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return found.union(*map(globals_used, inner))
