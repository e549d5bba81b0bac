"""Account for every byte of a training step: estimate it from formulas, measure it in a real step.

One noun, `TrainingRun`; two verbs, `estimate` and `measure`; one result to lay side by side,
`MemoryBreakdown`.
"""

import sys
from importlib import import_module

__version__ = "0.1.0"

# The same as in __init__.pyi, which type checkers and editors read.
# Nothing is imported before it is asked for.
_OFFERED = {
    "models": "TransformerConfig PRESETS",
    "gpus": "GPUS gpu",
    "run": "TrainingRun",
    "breakdown": "MemoryBreakdown KINDS",
    "measurement": "Measurement",
    "estimating": "estimate moments",
    "estimating.megatron": "rank_states",
    "measuring.sources": "measure card_here",
    "measuring.compare": "compare difference",
    "measuring.moments": "measure_moments",
    "measuring.verdict": "Verdict verdict",
    "measuring.files": "read_measurement save_measurement",
    "measuring.release": "expected_out_of_memory",
    "watching.on_gpu": "on_gpu",
    "measuring.recorded": "recordings",
    "planning.twin": "twin",
    "planning.fit": "fit arrange",
    "allocator.policy": "CachingAllocator",
    "allocator.replay": "replay",
    "allocator.counters": "counted",
    "allocator.snapshots": "read_snapshot save_snapshot compare_with_gpu",
    "figures.memory_maps": "memory_map",
    "errors": "StepError GpuOutOfMemory SimulationUnavailable",
    "lessons.shared.search": "find",
    "units": "format_bytes parse_bytes plus_minus",
}
_HOME = {name: module for module, names in _OFFERED.items() for name in names.split()}

__all__ = sorted(_HOME)


def __getattr__(name):
    # Imported when first asked for: `import course_utils` starts no torch, and works on a Python that is
    # too old for the rest.
    if name not in _HOME:
        raise AttributeError("course_utils has no " + repr(name) + "; it offers " + ", ".join(__all__))
    working = import_module(".pace", __name__).working
    with working("getting ready"):  # an interrupt in the middle of an import would leave modules half made
        value = getattr(import_module("." + _HOME[name], __name__), name)
    globals()[name] = value
    return value


def __dir__():
    return __all__


if sys.modules.get("IPython"):  # in a notebook a learner's mistake ends in one line
    import_module(".interactive.failed_cells", __name__).watch_cells()
