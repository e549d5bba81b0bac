"""The line of code that made a tensor.

It is that of the innermost frame that is neither torch's nor of measuring and watching. A backward runs no
code of the model, so what it makes is shown with the line of the forward operation.
"""

import linecache
import re
import sys
import sysconfig
from functools import cache
from pathlib import Path

import torch
import torch.autograd.graph

Place = tuple[str, int]  # A file and a line in it

# None on a torch that is laid out in another way, which `patching` refuses
ENGINE = getattr(getattr(torch.autograd.graph, "_engine_run_backward", None), "__code__", None)
STEP_FILES = ("step.py", "optimizers.py")  # of those two rooms, what is part of a training step
ROOMS = [Path(__file__).parents[1] / name for name in ("measuring", "watching")]
TORCH = str(Path(torch.__file__).parent) + "/"
DISPATCH = (TORCH + "_subclasses/", TORCH + "utils/_python_dispatch.py", TORCH + "_ops.py")
STANDARD_LIBRARY = sysconfig.get_paths()["stdlib"] + "/"
INSTALLED = re.compile(r"[\\/](site|dist)-packages[\\/]")
NOTEBOOK_CELL = re.compile(r"[\\/]ipykernel_\d+[\\/]|^<ipython-input")


@cache
def is_machinery(filename: str) -> bool:
    """True if code in this file is torch's, Python's or of these rooms, and not part of what is measured."""
    path = Path(filename)
    if filename.startswith((TORCH, "<frozen ")):
        return True
    if path.parent in ROOMS:
        return path.name not in STEP_FILES
    return filename.startswith(STANDARD_LIBRARY) and not INSTALLED.search(filename)


def calling_place() -> tuple[Place | None, bool]:
    """The innermost place in the measured code, and whether this is backward.

    In backward only a place inside of it counts, as in a hook or a checkpoint's second forward.
    """
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code is ENGINE:
            return None, True
        if not is_machinery(code.co_filename):
            return (code.co_filename, frame.f_lineno), False
        frame = frame.f_back
    return None, False


def calling_instruction() -> tuple[int, int]:
    """The instruction of Python that called what runs now, of the user's or of torch's own modules.

    Two operators of one instruction are one function's in C++, which calls both.
    """
    frame = sys._getframe(1)
    while frame is not None and _is_dispatch(frame.f_code.co_filename):
        frame = frame.f_back
    return (0, 0) if frame is None else (id(frame), frame.f_lasti)


@cache
def _is_dispatch(filename: str) -> bool:
    """True if code in this file only hands an operator on."""
    return Path(filename).parent in ROOMS or filename.startswith(DISPATCH)


def described(place: Place | None) -> str:
    """A place as text, "model.py:42  x = self.up(x)", without the line where its source cannot be read."""
    if place is None:
        return ""
    filename, number = place
    name = "cell" if NOTEBOOK_CELL.search(filename) else re.split(r"[\\/]", filename)[-1]
    source = linecache.getline(filename, number).strip()
    return f"{name}:{number}  {source}".rstrip()
