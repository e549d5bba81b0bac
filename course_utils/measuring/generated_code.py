"""Names in generated code: the operators of the model behind a buffer of a compiled step, and their line."""

import re
from functools import cache
from linecache import getline

from .call_site import Place, is_machinery

FOLDER = "compiled-"
"""Beginning of the name of the temporary folder in which Inductor writes its code."""
IN_FOLDER = re.compile(rf"[\\/]{FOLDER}[^\\/]*[\\/]")
SAYS = re.compile(r"# Topologically Sorted Source Nodes: \[.*?\], Original ATen: \[(.*?)\]")
"""Inductor's comment above the call of each kernel, below the buffers that it allocates for that."""
LINES = 40  # from a buffer to the call that fills it
OPERATORS = 3  # that are named of a fused kernel: the last ones, as its result is theirs


@cache
def is_generated(filename: str) -> bool:
    """True for a file of code that Inductor has written in this process."""
    return IN_FOLDER.search(filename) is not None


@cache
def origin(filename: str, line: int) -> tuple[str, Place | None]:
    """The operators from which the kernel was fused for which this line allocates, and their line of code.

    Both are as Inductor has them: the names from its comment, the line from its table of lines.
    """
    from torch._inductor.codecache import PyCodeCache

    following = ((number, SAYS.search(getline(filename, number))) for number in range(line, line + LINES))
    found = next(((number, said[1]) for number, said in following if said), None)
    if found is None:
        return "", None
    number, names = found
    operators = [name.strip().removeprefix("aten.") for name in names.split(",")]
    fused = ("… + " if len(operators) > OPERATORS else "") + " + ".join(operators[-OPERATORS:])
    for frame in PyCodeCache.stack_frames_for_code(filename, number) or []:
        if not is_machinery(frame["filename"]):
            return fused, (frame["filename"], frame["line"])
    return fused, None
