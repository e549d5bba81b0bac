"""A stand-in for triton where it is not installed: Inductor imports it to generate code for a GPU.

Nothing of it is executed: `compiling` replaces each kernel by one that does nothing. It goes when Inductor
generates code without importing triton.
"""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

VERSION = "3.6.0"  # of the triton that torch 2.11 brings
OLDER = ("AttrsDescriptor",)  # names that Inductor looks for to recognize an old triton
MODULES = (
    "autotuner",
    "backends",
    "cache",
    "code_generator",
    "compiler",
    "core",
    "cuda",
    "driver",
    "errors",
    "extra",
    "interpreter",
    "jit",
    "knobs",
    "language",
    "libdevice",
    "math",
    "nvidia",
    "runtime",
    "semantic",
    "standard",
    "testing",
    "tools",
)
"""Attributes that are modules; every other one is a class."""


class _Anything(type):
    """A class of triton's, whose attributes are decorators that change nothing."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _given


def _given(*arguments: Any, **_: Any) -> Any:
    """The decorated function, or for a decorator with options one that changes nothing."""
    return arguments[0] if arguments else _given


class _Stub(ModuleType):
    """A module of triton, which makes its names when they are asked for."""

    __version__ = VERSION

    def __call__(self, *arguments: Any, **_: Any) -> Any:
        return _given(*arguments)  # `triton.jit` is a decorator

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in OLDER:
            raise AttributeError(name)
        if name == "triton_key":
            return lambda: VERSION
        if name in MODULES:
            return importlib.import_module(f"{self.__name__}.{name}")
        made = _Anything(name, (), {"__init__": _no_state, "__class_getitem__": _given})
        setattr(self, name, made)
        return made


def _no_state(*_: Any, **__: Any) -> None:
    """Make an object without attributes."""


class _Finder(MetaPathFinder, Loader):
    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname.split(".")[0] == "triton" else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Stub(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Execute nothing."""


@contextmanager
def triton_there() -> Iterator[None]:
    """Inside, `import triton` finds the package or, where it is not installed, its stand-in."""
    if find_spec("triton") is not None:
        yield
        return
    finder = _Finder()
    sys.meta_path.append(finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.split(".")[0] == "triton"]:
            del sys.modules[name]
