"""The exact engine: a model of autograd that executes a step's allocations, operation by operation, without torch."""
