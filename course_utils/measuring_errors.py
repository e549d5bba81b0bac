"""What can go wrong when a run is measured, as errors that import without torch."""


class GpuOutOfMemory(RuntimeError):
    """The GPU was too small for a run. Its memory has been released; the message says what would fit."""


class SimulationUnavailable(RuntimeError):
    """This build of torch, or this platform, cannot simulate a GPU; the message says why."""
