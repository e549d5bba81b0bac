"""How the families' steps are run: on the simulated GPU, their models made without memory."""

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch

from course_utils.estimating.workspaces import Workspaces
from course_utils.measurement import Measurement
from course_utils.measuring.own import measure_own


def measured(
    step: Callable[..., Any], model: torch.nn.Module, optimizer: Any = None, batch: Any = None,
    workspaces: Workspaces | None = None, steps: int = 2, attention: str = "auto",
) -> Measurement:  # fmt: skip
    """The last of `steps` simulated steps. Models are best made under `torch.device("meta")`."""
    how: dict[str, Any] = {"source": "simulated", "steps": steps, "attention": attention, "workspaces": workspaces}
    return measure_own(step, model, optimizer, batch, **how)


def script(make: Callable[..., Callable[[], Any]]) -> Callable[..., Measurement]:
    """Measure the second call of what `make` returns; with `products` both threads have cuBLAS's workspace anyway."""

    @wraps(make)
    def measure(workspaces: Workspaces, products: bool = False, **how: Any) -> Measurement:
        made: list[Callable[[], Any]] = []

        def step(_: torch.nn.Module) -> None:
            if not made:
                one = leaf(1, 1)
                torch.autograd.grad(((one @ one) if products else one).sum(), one)
                made.append(make(**how))
            made[0]()

        return measured(step, torch.nn.Module(), workspaces=workspaces)

    return measure


def leaf(*shape: int, dtype: torch.dtype = torch.float32, wants_gradient: bool = True) -> torch.Tensor:
    """A tensor of a script."""
    return torch.empty(shape, dtype=dtype, device="cuda", requires_grad=wants_gradient)


data = partial(leaf, wants_gradient=False)
