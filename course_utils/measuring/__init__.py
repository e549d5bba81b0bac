"""The second verb: the memory that a training step really takes, on a GPU, a simulated GPU or the CPU.

Begin with `sources.measure`. Nothing is imported here, so that `files` and `recorded` load without torch.
"""
