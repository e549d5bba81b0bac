"""How the families' steps are run: on the simulated GPU, their models made without memory, or on a GPU that
is here.
"""

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from course_utils.estimating.workspaces import Workspaces
from course_utils.measurement import Measurement
from course_utils.measuring.copy_to_device import carried_over, checked, tensors_in
from course_utils.measuring.devices import Cuda
from course_utils.measuring.own_step import measure_own

LIVE = False
"""Whether steps are run on the GPU that is here, and what it counts is returned."""

NOT_CUDNN = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""The kernels of attention that the published steps had; on newer cards torch prefers cuDNN's."""


def measured(
    step: Callable[..., Any],
    model: torch.nn.Module,
    optimizer: Any = None,
    batch: Any = None,
    workspaces: Workspaces | None = None,
    steps: int = 2,
    attention: str = "auto",
) -> Measurement:
    """The last of `steps` simulated steps. Models are best made under `torch.device("meta")`."""
    if LIVE:
        return counted(step, model, optimizer, batch, steps)
    how: dict[str, Any] = {
        "source": "simulated",
        "steps": steps,
        "attention": attention,
        "workspaces": workspaces,
    }
    return measure_own(step, model, optimizer, batch, **how)


def counted(step: Callable[..., Any], model: Any, optimizer: Any, batch: Any, steps: int) -> Any:
    """Bytes allocated and reserved on this GPU before the first step, at the last step's peak, and after it.

    Weights and data are zeros: no size depends on a value.
    """
    device = Cuda()
    found = {}
    device.release()
    before = device.allocated(), device.reserved()

    def note(moment: str, counters: tuple[int, int]) -> None:
        device.synchronize()
        found[moment] = [counter - there for counter, there in zip(counters, before, strict=True)]

    # laid out, not copied
    work = carried_over(checked(step, model, optimizer, batch), "cuda", simulated=True)
    with torch.no_grad():
        for tensor in tensors_in(work.arguments, set()):
            tensor.zero_()
    note("start", (device.allocated(), device.reserved()))
    with sdpa_kernel(NOT_CUDNN):
        for _ in range(steps):
            torch.cuda.reset_peak_memory_stats()
            work.advance()
            note("peak", device.peaks())
            note("end", (device.allocated(), device.reserved()))
    return found


def script(make: Callable[..., Callable[[], Any]]) -> Callable[..., Measurement]:
    """Measure the second call of what `make` returns; with `products` both threads have cuBLAS's workspace
    anyway.
    """

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
    return (torch.zeros if LIVE else torch.empty)(
        shape, dtype=dtype, device="cuda", requires_grad=wants_gradient
    )


data = partial(leaf, wants_gradient=False)
