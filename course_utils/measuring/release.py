"""Giving a GPU's memory back after an error.

`let_go` keeps a traceback that can be read and holds nothing; `release` drops it, and empties torch's caches.

A notebook keeps the last exception, and each frame of its traceback what it worked on: every tensor of a step
that failed.
"""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from types import CellType, CodeType, FrameType, FunctionType, TracebackType
from typing import Any

import torch

from ..errors import GpuOutOfMemory
from .devices import Cuda

# torch's and the libraries' words where memory has run out
OUT_OF_MEMORY_WORDS = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")

EndedFrame = tuple[CodeType, dict[str, Any], int, int]
"""Where a frame has ended, all that a traceback shows of it: code, globals, last instruction and line."""


@dataclass
class RanOut:
    """The words with which memory ran out; empty until then."""

    message: str = ""


@contextmanager
def expected_out_of_memory() -> Iterator[RanOut]:
    """Catch the GPU running out of memory, on purpose: the memory comes back, the message is kept.

    Every other exception passes. Raises RuntimeError if the memory suffices, as nothing has failed then.
    """
    failure = RanOut()
    try:
        yield failure
    except RuntimeError as error:
        if not isinstance(error, GpuOutOfMemory) and not is_out_of_memory(error):
            raise
        failure.message = str(error)
        release(error)
        return
    raise RuntimeError("this should have run out of GPU memory, but there was enough")


def is_out_of_memory(error: BaseException) -> bool:
    """True if torch, the driver or a library says so that memory has run out."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in OUT_OF_MEMORY_WORDS)


def release(error: BaseException | None) -> None:
    """Give memory back: what an exception keeps, what only cycles keep, and what torch caches on a GPU."""
    if error is not None:
        for each in chain(error):
            emptied(each.__traceback__)
            each.__traceback__ = None
    empty_queue()
    gc.collect()
    if torch.cuda.is_available():
        Cuda().release()


def empty_queue() -> None:
    """Run a backward of nothing, which clears this thread's autograd queue of what a failed one left."""
    torch.ones((), requires_grad=True).backward()


def let_go(error: BaseException) -> None:
    """Let an exception keep nothing alive; its traceback still shows every line.

    A frame also holds its function, and the function what it closes over: so frames that have ended are
    replaced by empty ones of the same code. Entries of those that still execute stay, as `contextlib` puts
    them back.
    """
    for each in chain(error):
        parts = emptied(each.__traceback__)
        entries = [part if isinstance(part, TracebackType) else _entry(*part) for part in parts]
        for entry, following in pairwise(entries):
            entry.tb_next = following
        each.__traceback__ = entries[0] if entries else None


def chain(error: BaseException) -> list[BaseException]:
    """An exception, those that it was raised from, and those that were being handled; each once."""
    found = [error]
    for each in found:
        for earlier in (each.__cause__, each.__context__):
            if earlier is not None and not any(earlier is known for known in found):
                found.append(earlier)
    return found


def emptied(traceback: TracebackType | None) -> list[TracebackType | EndedFrame]:
    """A traceback's entries, cut loose, where frames still execute; other frames are cleared and described.

    No frame is made in here: it would hold this one, and with it what is replaced.
    """
    parts: list[TracebackType | EndedFrame] = []
    while traceback is not None:
        frame = traceback.tb_frame
        following = traceback.tb_next
        try:
            frame.clear()
            # up to Python 3.12 a look at it (IPython takes one) left a copy: renewed, it is empty
            _ = frame.f_locals
            parts.append((frame.f_code, frame.f_globals, traceback.tb_lasti, traceback.tb_lineno))
        except RuntimeError:  # it still executes
            parts.append(traceback)
        traceback.tb_next = None  # a holder of one entry, as contextlib is, holds no other
        traceback = following
    return parts


class _Stopped(Exception):
    """Ends a function as soon as it is entered."""


def _entry(code: CodeType, namespace: dict[str, Any], instruction: int, line: int) -> TracebackType:
    """An entry whose frame is of this code and holds nothing: it is stopped before its first line."""
    frames: list[FrameType] = []

    def stop(frame: FrameType, *_: Any) -> None:
        if frame.f_code is code:  # not a callback of Python's garbage collector
            frames.append(frame)
            raise _Stopped

    function = FunctionType(code, namespace, closure=tuple(CellType() for _ in code.co_freevars))
    named = code.co_varnames[code.co_argcount : code.co_argcount + code.co_kwonlyargcount]
    before = sys.gettrace()
    sys.settrace(stop)
    try:
        made = function(*[None] * code.co_argcount, **dict.fromkeys(named))
        frames.append(made.gi_frame)  # a generator is entered only when it is asked for a value
    except _Stopped:
        pass
    finally:
        sys.settrace(before)
    frames[0].clear()
    return TracebackType(None, frames[0], instruction, line)
