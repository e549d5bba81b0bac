"""Where every byte of a training step goes: estimated from formulas, measured from a step that really runs.

One noun, `TrainingRun`; two verbs, `estimate` and `measure`; one result to lay side by side, `MemoryBreakdown`.
"""

__version__ = "0.1.0"

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
