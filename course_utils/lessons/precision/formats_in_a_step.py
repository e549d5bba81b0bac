"""Bytes of weights, gradients and optimizer states: from the closed forms, and as a step has them."""

from collections.abc import Mapping

from ... import Measurement, TrainingRun
from ...estimating.states import gradient_bytes, optimizer_state_bytes, parameter_bytes

STATES = ("parameters", "gradients", "optimizer_states")


def estimated_states(run: TrainingRun) -> dict[str, int]:
    """Return the bytes of parameters, gradients and optimizer states from the course's closed forms."""
    sizes = (parameter_bytes(run), gradient_bytes(run), optimizer_state_bytes(run))
    return dict(zip(STATES, sizes, strict=True))


def measured_states(measured: Measurement) -> dict[str, int]:
    """Return the bytes of the same three at the end of backward, when all of them are there."""
    return {kind: measured.moments["end of backward"][kind] for kind in STATES}


def per_parameter(states: Mapping[str, int], parameters: int) -> str:
    """Return states as bytes per parameter: "2 + 2 + 12 = 16"."""
    shares = [size / parameters for size in states.values()]
    return f"{' + '.join(f'{share:.3g}' for share in shares)} = {sum(shares):.3g}"
