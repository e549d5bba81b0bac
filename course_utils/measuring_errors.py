"""What can go wrong when a run is measured, as errors that import without torch."""


class GpuOutOfMemory(RuntimeError):
    """The GPU was too small for a run. Its memory has been released; the message says what would fit."""


class StepError(RuntimeError):
    """A step of a learner's own cannot be measured as it is; the message says in which line, and what to write."""


class SimulationUnavailable(RuntimeError):
    """This build of torch, or this platform, cannot simulate a GPU; the message says why."""
