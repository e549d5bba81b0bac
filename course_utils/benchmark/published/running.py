"""How the families' steps are run: on the simulated GPU, their models made without memory."""

from collections.abc import Callable
from typing import Any

import torch

from ...estimating.workspaces import Workspaces
from ...measurement import Measurement
from ...measuring.own import measure_own


def measured(
    step: Callable[..., Any], model: torch.nn.Module, optimizer: Any = None, batch: Any = None,
    workspaces: Workspaces | None = None, steps: int = 2, attention: str = "auto",
) -> Measurement:  # fmt: skip
    """The last of `steps` simulated steps. Models are best made under `torch.device("meta")`."""
    how: dict[str, Any] = {"source": "simulated", "steps": steps, "attention": attention, "workspaces": workspaces}
    return measure_own(step, model, optimizer, batch, **how)
