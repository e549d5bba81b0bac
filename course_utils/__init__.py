"""Where every byte of a training step goes: estimated from formulas, measured from a step that really runs.

One noun, `TrainingRun`; two verbs, `estimate` and `measure`; one result to lay side by side, `MemoryBreakdown`.
"""

# ruff: noqa: F401
__version__ = "0.1.0"

TYPE_CHECKING = False
if TYPE_CHECKING:  # the same as _HOME, for type checkers and editors: nothing here is imported at run time
    from .allocator.memory_map import memory_map, memory_map_page
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
    from .measuring.recorded import recordings
    from .measuring.sources import card_here, measure
    from .models import PRESETS, TransformerConfig
    from .planning.fit import arrange, fit
    from .planning.twin import twin
    from .run import TrainingRun
    from .units import format_bytes, parse_bytes

_HOME = {
    "TransformerConfig": "models",
    "PRESETS": "models",
    "GPUS": "gpus",
    "gpu": "gpus",
    "TrainingRun": "run",
    "MemoryBreakdown": "breakdown",
    "KINDS": "breakdown",
    "Measurement": "measurement",
    "estimate": "estimating",
    "moments": "estimating",
    "rank_states": "estimating.megatron",
    "measure": "measuring.sources",
    "compare": "measuring.comparing",
    "card_here": "measuring.sources",
    "recordings": "measuring.recorded",
    "twin": "planning.twin",
    "fit": "planning.fit",
    "arrange": "planning.fit",
    "CachingAllocator": "allocator.policy",
    "replay": "allocator.replay",
    "memory_map": "allocator.memory_map",
    "memory_map_page": "allocator.memory_map",
    "read_snapshot": "allocator.snapshots",
    "save_snapshot": "allocator.snapshots",
    "compare_with_gpu": "allocator.snapshots",
    "StepError": "errors",
    "GpuOutOfMemory": "errors",
    "SimulationUnavailable": "errors",
    "find": "lessons.shared.search",
    "format_bytes": "units",
    "parse_bytes": "units",
}

__all__ = sorted(_HOME)


def __getattr__(name):
    # Imported when first asked for: `import course_utils` starts no torch, and runs on a Python too old for the rest.
    if name not in _HOME:
        raise AttributeError("course_utils has no " + repr(name) + "; it offers " + ", ".join(__all__))
    from importlib import import_module

    value = getattr(import_module("." + _HOME[name], __name__), name)
    globals()[name] = value
    return value


def __dir__():
    return __all__
