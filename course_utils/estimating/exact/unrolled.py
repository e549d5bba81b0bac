"""A run unrolled: every tensor that it allocates, in order, so that an allocator can place them.

The engine reads a tape of at most three blocks, as all others do the same. An allocator must see them all:
what it reserves depends on the order of everything that came before.
"""

from collections.abc import Iterable, Mapping
from functools import cache
from math import prod
from typing import NamedTuple

from ...measurement import Mark
from ...run import TrainingRun
from ...units import round_up
from ..states import CODEBOOKS_8BIT, Trainable, state_sizes, trainable
from ..workspaces import workspaces_on
from .network import tape_of
from .peak import check
from .structure import pieces_of_loss, structure, symbols
from .tape import Storage
from .update import IN_PLACE, master_walk, plain_walk
from .walk import Walk

Event = tuple[int, int]
"""Signed bytes of a tensor, and its number."""


def unrolled(run: TrainingRun, steps: int = 2) -> tuple[list[Event], list[Mark]]:
    """The allocations and frees of a run from its set-up through `steps` steps, in order, and where each
    phase begins.

    Two micro-batches stand for all, as in a simulation; single numbers, as norms and loss scales, are left
    out. Raises ValueError for what `estimate` does not cover, for several ranks, and for LoRA, whose frozen
    weights are not listed one by one.
    """
    check(run)
    if run.world_size > 1 or run.lora_rank or run.precision.name == "fp8":
        raise ValueError(
            "the estimate of LoRA, of several ranks or of fp8 is not unrolled tensor by tensor: "
            "replay a measurement, replay(measure(run))"
        )
    work = _Unrolling(run)
    for step in range(1, steps + 1):
        for micro_batch in range(min(2, run.accumulation_steps)):
            left_from_before = step > 1 and not run.set_to_none
            work.forward_and_backward(step, adds=micro_batch > 0 or left_from_before)
        work.update(step)
    return work.events, work.marks


class _Pass(NamedTuple):
    """Forward and backward of a micro-batch.

    `changes` are bytes, or ~index of the tensor that is freed; then come the indices of gradients, and where
    backward begins.
    """

    changes: list[int]
    gradients: list[int]
    backward: int


def _pass_of(run: TrainingRun, adds: bool) -> _Pass:
    size = run.blocks_per_checkpoint or 1
    layers = run.model.layers
    groups = [size] * (layers // size)
    if layers % size:
        groups.append(layers % size)
    chunks = pieces_of_loss(run)[0]
    tape = tape_of(structure(run)._replace(groups=tuple(groups), chunks=chunks, accumulates=adds))
    numbers = symbols(run)
    made = dict[Storage, int]()
    changes = list[int]()
    for storage, sign in tape.events:
        if sign > 0:
            made[storage] = len(changes)
            changes.append(prod(numbers[symbol] for symbol in storage.size.split("·")))
        else:
            changes.append(~made.pop(storage))
    backward = next(mark.event for mark in tape.marks if mark.phase == "backward")
    gradients = [index for one, index in made.items() if one.settled() == "gradients"]
    return _Pass(changes, gradients, backward)


class _Unrolling:
    """A run on its way: the events so far, and the gradients that are there.

    These are (bytes, number) in order of birth.
    """

    def __init__(self, run: TrainingRun) -> None:
        self.run = run
        self.events = list[Event]()
        self.marks = list[Mark]()
        self.gradients: list[Event] = []
        self._pass_of = cache(_pass_of)
        self._count = 0
        self._with_workspaces = set[str]()
        trained = trainable(run.model, 0, ())
        layers = range(trained.layers)
        blocks = {f"{name} {layer}": shape for layer in layers for name, shape in trained.block.items()}
        self.shapes = {**trained.before, **blocks, **trained.after}
        for element in filter(None, (run.precision.weight, run.precision.master)):
            self._make_all(element * prod(shape) for shape in self.shapes.values())
        if run.optimizer.algorithm == "adam8bit":
            self._make_all(CODEBOOKS_8BIT)
        text = self._make(8 * run.micro_batch * (run.seq_len + 1))
        self._make_all([8 * run.micro_batch * run.seq_len] * 2)
        self._free(text)

    def forward_and_backward(self, step: int, adds: bool) -> None:
        """One micro-batch, whose gradients `adds` to those that are there."""
        once = self._pass_of(self.run, adds)
        made = dict[int, Event]()
        self._begin(step, "forward")
        for event, change in enumerate(once.changes):
            if event == once.backward:
                self._begin(step, "backward")
            if change >= 0:
                made[event] = self._make(change)
            else:
                self._free(made[~change])
        self.gradients += [made[index] for index in once.gradients]

    def update(self, step: int) -> None:
        """The optimizer's step, which makes its states when it is the first; then gradients are freed."""
        run = self.run
        first = step == 1
        self._begin(step, "optimizer")
        all_at_once = run.optimizer.forced and run.optimizer.implementation == "foreach"
        if run.precision.master and not all_at_once:
            for name, shape in self.shapes.items():
                one = Trainable({name: shape}, {}, 0, {})
                walk = master_walk(run.precision, run.optimizer, one, run.set_to_none)
                # The walk begins with the fp32 gradient, and the free of the 16-bit one; then come states.
                upcast = 0
                if run.precision.gradient < run.precision.master:
                    upcast = 2 if run.set_to_none else 1
                self._walk([*walk[:upcast], *self._states(one.before, first), *walk[upcast:]])
        else:
            self._walk([*self._upcasts(), *self._states(self.shapes, first), *self._together()])
        if run.set_to_none:
            for gradient in self.gradients:
                self._free(gradient)
            self.gradients = []

    def _together(self) -> Walk:
        """The update of all parameters by one optimizer; foreach first makes what it needs for all."""
        run = self.run
        if run.optimizer.implementation != "foreach" or run.optimizer.algorithm in IN_PLACE:
            return plain_walk(run.precision, run.optimizer, Trainable(self.shapes, {}, 0, {}))
        element = run.precision.master or run.precision.weight
        return [("temporaries", element * prod(shape)) for shape in self.shapes.values()]

    def _upcasts(self) -> Walk:
        """All gradients in fp32 for the master weights, one after another."""
        run = self.run
        walk = list[tuple[str, int]]()
        if run.precision.gradient < run.precision.master:
            for elements in map(prod, self.shapes.values()):
                walk.append(("temporaries", run.precision.master * elements))
                if run.set_to_none:
                    walk.append(("gradients", -run.precision.gradient * elements))
        return walk

    def _states(self, shapes: Mapping[str, tuple[int, ...]], first: bool) -> Walk:
        """The states of these parameters, if the step is the `first`."""
        if not first:
            return []
        masters = 1 if self.run.precision.master else 0  # they are there from the beginning
        walk = list[tuple[str, int]]()
        for name, shape in shapes.items():
            sizes = state_sizes(self.run.precision, self.run.optimizer, name, shape)
            walk += [("optimizer_states", size) for size in sizes[masters:]]
        return walk

    def _walk(self, walk: Walk) -> None:
        """Changes without names: what is freed is the newest of its size.

        That holds for gradients too, as backward goes from the last parameter to the first. What is left of
        them in the end is freed.
        """
        made: list[Event] = []
        for kind, size in walk:
            if kind == "optimizer_states":
                self._make(size)
            elif size > 0:
                made.append(self._make(size))
            elif size < 0:
                alive = self.gradients if kind == "gradients" else made
                gone = next(one for one in reversed(alive) if one[0] == round_up(-size))
                alive.remove(gone)
                self._free(gone)
        for one in made:
            self._free(one)

    def _begin(self, step: int, phase: str) -> None:
        """A phase begins; forward's thread and backward's get cuBLAS's workspace the first time."""
        self.marks.append(Mark(len(self.events), step, phase))
        kept = workspaces_on(self.run.card)
        if kept and phase != "optimizer" and phase not in self._with_workspaces:
            self._with_workspaces.add(phase)
            self._make(kept.cublas)

    def _make(self, size: int) -> Event:
        self._count += 1
        made = (round_up(size), self._count)
        self.events.append(made)
        return made

    def _make_all(self, sizes: Iterable[int]) -> None:
        for size in sizes:
            self._make(size)

    def _free(self, made: Event) -> None:
        size, number = made
        self.events.append((-size, number))
