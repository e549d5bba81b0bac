"""Where every byte of a training step goes: estimated from formulas, measured from a step that really runs.

One noun, `TrainingRun`; two verbs, `estimate` and `measure`; one result to lay side by side, `MemoryBreakdown`.
"""

# ruff: noqa: F401
import sys
from importlib import import_module

__version__ = "0.1.0"

TYPE_CHECKING = False
if TYPE_CHECKING:  # the same as _OFFERED, for type checkers and editors: nothing here is imported at run time
    from .allocator.counters import counted
    from .allocator.memory_map import memory_map
    from .allocator.memory_map_page import memory_map_page
    from .allocator.policy import CachingAllocator
    from .allocator.replay import replay
    from .allocator.snapshots import compare_with_gpu, read_snapshot, save_snapshot
    from .breakdown import KINDS, MemoryBreakdown
    from .errors import GpuOutOfMemory, SimulationUnavailable, StepError
    from .estimating import estimate, moments
    from .estimating.megatron import rank_states
    from .gpus import GPUS, gpu
    from .lessons.shared.search import find
    from .measurement import Measurement
    from .measuring.comparing import compare
    from .measuring.differences import difference
    from .measuring.measurement_file import read_measurement, save_measurement
    from .measuring.on_gpu import on_gpu
    from .measuring.recorded import recordings
    from .measuring.sources import card_here, measure
    from .models import PRESETS, TransformerConfig
    from .planning.fit import arrange, fit
    from .planning.twin import twin
    from .run import TrainingRun
    from .units import format_bytes, parse_bytes, plus_minus

_OFFERED = {
    "models": "TransformerConfig PRESETS",
    "gpus": "GPUS gpu",
    "run": "TrainingRun",
    "breakdown": "MemoryBreakdown KINDS",
    "measurement": "Measurement",
    "estimating": "estimate moments",
    "estimating.megatron": "rank_states",
    "measuring.sources": "measure card_here",
    "measuring.comparing": "compare",
    "measuring.differences": "difference",
    "measuring.measurement_file": "read_measurement save_measurement",
    "measuring.on_gpu": "on_gpu",
    "measuring.recorded": "recordings",
    "planning.twin": "twin",
    "planning.fit": "fit arrange",
    "allocator.policy": "CachingAllocator",
    "allocator.replay": "replay",
    "allocator.counters": "counted",
    "allocator.memory_map": "memory_map",
    "allocator.memory_map_page": "memory_map_page",
    "allocator.snapshots": "read_snapshot save_snapshot compare_with_gpu",
    "errors": "StepError GpuOutOfMemory SimulationUnavailable",
    "lessons.shared.search": "find",
    "units": "format_bytes parse_bytes plus_minus",
}
_HOME = {name: module for module, names in _OFFERED.items() for name in names.split()}

__all__ = sorted(_HOME)


def __getattr__(name):
    # Imported when first asked for: `import course_utils` starts no torch, and runs on a Python too old for the rest.
    if name not in _HOME:
        raise AttributeError("course_utils has no " + repr(name) + "; it offers " + ", ".join(__all__))
    value = getattr(import_module("." + _HOME[name], __name__), name)
    globals()[name] = value
    return value


def __dir__():
    return __all__


if sys.modules.get("IPython"):  # in a notebook a learner's mistake ends in one line
    import_module(".interactive.failed_cells", __name__).watch_cells()
