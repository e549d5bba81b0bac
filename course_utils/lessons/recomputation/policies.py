"""Arithmetic that a policy of recomputation costs, in percent of the step's."""

from ... import TrainingRun
from ...estimating.step_time import model_flops, recomputed_flops


def added_percent(run: TrainingRun) -> float:
    """FLOPs that the policy runs again, in percent of the model's own, forward and backward."""
    return 100 * recomputed_flops(run) / model_flops(run)
