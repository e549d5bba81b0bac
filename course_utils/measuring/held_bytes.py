"""Bytes that a training holds by kind, counted without watching its operations.

That is cheap enough for a loop on a stage.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch

from ..units import round_up
from .optimizers import named_states_of


class Holdings:
    """The bytes of a network's weights, gradients and optimizer states, as a training goes on.

    They are counted on the training's own threads, so that any thread may ask `by_kind`. An update begins
    with the first of `optimizers` and ends with the last. `states` lists what they keep, where that is more
    than their `state`, and `gradient_owners` whose `.grad` backward fills, where those are not the trained
    weights, in the same order.
    """

    def __init__(
        self,
        network: torch.nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        states: Callable[[], Iterable[tuple[str, Any]]] | None = None,
        gradient_owners: Sequence[torch.Tensor] | None = None,
    ) -> None:
        self._network = network
        self._optimizers = optimizers
        self._weights = list(network.parameters())
        self._states = states or partial(_all_states, optimizers)
        trained = [weight for weight in self._weights if weight.requires_grad]
        owners = trained if gradient_owners is None else gradient_owners
        self._owners: Mapping[torch.Tensor, torch.Tensor] = dict(zip(trained, owners, strict=True))
        self._held = {"parameters": 0, "gradients": 0, "optimizer_states": 0}
        self._gradients: dict[torch.Tensor, int] = {}
        self._updating = self._filling = False
        self._hooks: list[Any] = []

    def start(self) -> None:
        """Count, and follow the training until `stop`."""
        self._hooks = [
            self._network.register_forward_pre_hook(self._called),
            *(weight.register_post_accumulate_grad_hook(self._filled) for weight in self._owners),
            self._optimizers[0].register_step_pre_hook(self._update_begins),
            self._optimizers[-1].register_step_post_hook(self.count),
        ]
        self.count()

    def stop(self) -> None:
        """Take the hooks back; what was counted last stays."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def count(self, *_: Any) -> None:
        """Count everything anew.

        For the thread that trains: another could meet a gradient that is being replaced.
        """
        self._gradients = {weight: _bytes([owner.grad]) for weight, owner in self._owners.items()}
        kept = (one for _, one in self._states() if isinstance(one, torch.Tensor))
        self._held = {
            "parameters": _bytes(self._weights),
            "gradients": sum(self._gradients.values()),
            "optimizer_states": _bytes(one for one in kept if one.device == self._weights[0].device),
        }

    def by_kind(self, allocated: int) -> dict[str, int]:
        """So many allocated bytes by kind, as last counted.

        The rest is activations, or during an update temporaries.
        """
        held = self._held
        rest = "temporaries" if self._updating else "activations"
        return {**held, rest: max(0, allocated - sum(held.values()))}

    def _called(self, *_: Any) -> None:
        self._updating = self._filling = False
        self.count()

    def _filled(self, weight: torch.Tensor) -> None:
        if not self._filling:
            self._filling = True
            self.count()
            return
        more = _bytes([self._owners[weight].grad]) - self._gradients[weight]
        self._gradients[weight] += more
        self._held = {**self._held, "gradients": self._held["gradients"] + more}

    def _update_begins(self, *_: Any) -> None:
        self._updating = True


def _all_states(optimizers: Sequence[torch.optim.Optimizer]) -> Iterable[tuple[str, Any]]:
    return chain(*(named_states_of(one, {}) for one in optimizers))


def _bytes(tensors: Iterable[torch.Tensor | None]) -> int:
    """Bytes in blocks, as the allocator counts."""
    return sum(round_up(tensor.nbytes) for tensor in tensors if tensor is not None)
