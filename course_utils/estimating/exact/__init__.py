"""The exact engine: a model of autograd that executes a step's allocations one by one, without torch.

It mirrors `networks/` (see `network.py`): `tape` has storages and backward, `operations` to `network` the
operations, `program` repeats a tape's blocks and reads it with a run's numbers, and `peak` finds the largest
moment of the step.
"""
