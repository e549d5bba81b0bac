"""What the checks of lesson 08 run: right answers, ranks in threads that send each other parts, and real ranks."""

import inspect
import json
import tempfile
import textwrap
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from course_utils.interactive.feedback import CheckFailed, fail
from course_utils.ranks.launch import run_ranks

# ------------------------------------------------------------------------------------------------------ 08.1: traffic


def traffic_right(D: int, S: int) -> dict[str, float]:
    """Bytes through the server's connection, and bytes that a rank sends in the naive way and in a ring."""
    return {"server": 2 * D * S, "naive": (D - 1) * S, "ring": 2 * (D - 1) * S / D}


# --------------------------------------------------------------------------------------------------------- 08.2: ring


class Network:
    """Ranks that are threads, with a queue from each to each: messages are kept, a standstill is noticed at once."""

    def __init__(self, ranks: int, part_bytes: int) -> None:
        self.ranks, self.part_bytes = ranks, part_bytes
        self.sent: list[tuple[int, int, int]] = []
        self._queues: dict[tuple[int, int], deque[torch.Tensor]] = {}
        self._waiting: dict[int, int] = {}
        self._finished: set[int] = set()
        self._changed = threading.Condition()
        self._stuck = ""

    def send(self, sender: int, tensor: torch.Tensor, to: int) -> None:
        """Put a copy of `tensor` on its way. CheckFailed for what is no tensor, or for a rank that is not there."""
        if not isinstance(tensor, torch.Tensor):
            fail(f"`send` takes one tensor, a part, not a {type(tensor).__name__}.")
        if isinstance(to, bool) or to not in range(self.ranks):
            fail(f"A message goes to rank {to}, and the ranks are 0 to {self.ranks - 1}: a ring closes with `% ranks`.")
        with self._changed:
            self.sent.append((sender, to, tensor.nbytes))
            self._queues.setdefault((sender, to), deque()).append(tensor.detach().clone())
            self._changed.notify_all()

    def receive(self, receiver: int, source: int) -> torch.Tensor:
        """The next tensor from `source`, waited for. CheckFailed where none can come any more."""
        if isinstance(source, bool) or source not in range(self.ranks):
            fail(
                f"Rank {source} is asked for a message; ranks are 0 to {self.ranks - 1}: a ring closes with `% ranks`."
            )
        with self._changed:
            self._waiting[receiver] = source
            while not self._queues.get((source, receiver)):
                self._look_for_a_standstill()
                if self._stuck:
                    fail(self._stuck)
                self._changed.wait()
            del self._waiting[receiver]
            return self._queues[source, receiver].popleft()

    def finish(self, rank: int) -> None:
        """Say that a rank sends nothing more."""
        with self._changed:
            self._finished.add(rank)
            self._look_for_a_standstill()

    def left_over(self) -> int:
        """Messages that nobody has fetched."""
        return sum(map(len, self._queues.values()))

    def _look_for_a_standstill(self) -> None:
        """Nothing can move once everybody who has not finished waits for a message that nobody has sent."""
        alive = set(range(self.ranks)) - self._finished
        idle = {rank for rank, source in self._waiting.items() if not self._queues.get((source, rank))}
        if alive and alive <= idle and not self._stuck:
            rank = min(alive)
            self._stuck = (
                f"Standstill: rank {rank} waits for a message from rank {self._waiting[rank]}, and nobody is left to "
                "send one. Does each rank send before it receives, and as often as it receives?"
            )
            self._changed.notify_all()


def run_in_threads(program: Callable[..., Any], inputs: Sequence[list[torch.Tensor]], network: Network) -> list[Any]:
    """What `program(parts, rank, ranks, send, receive)` returns on each rank; what one of them raises is raised."""
    results: list[Any] = [None] * network.ranks
    raised: list[BaseException] = []

    def one(rank: int) -> None:
        try:
            results[rank] = program(
                inputs[rank],
                rank,
                network.ranks,
                lambda tensor, to: network.send(rank, tensor, to),
                lambda source: network.receive(rank, source),
            )
        except BaseException as error:  # whatever it is, it belongs to the thread that runs the check
            raised.append(error)
        finally:
            network.finish(rank)

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(network.ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if raised:
        raise min(raised, key=lambda error: "Standstill" in str(error))  # a standstill is often but the consequence
    return results


def parts_of(ranks: int, elements: int = 3) -> list[list[torch.Tensor]]:
    """For each rank its parts: on rank r part p is full of 10^r + p."""
    return [[torch.full((elements,), float(10**rank + part)) for part in range(ranks)] for rank in range(ranks)]


def sums_of(inputs: Sequence[list[torch.Tensor]]) -> list[torch.Tensor]:
    """Each part, added up over all ranks."""
    return [torch.stack(parts).sum(dim=0) for parts in zip(*inputs, strict=True)]


# --------------------------------------------------------------------------------------------------- 08.3: loss_factor


def factor_right(counts: Sequence[int], rank: int) -> float:
    """By what rank `rank` multiplies its mean loss, so that DDP's mean of gradients is that over all tokens."""
    return len(counts) * counts[rank] / sum(counts)


# ----------------------------------------------------------------------------------------------- 08.4: on real ranks

RANKS = 3
_outcomes: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
"""What has been tried: starting processes takes seconds."""


def outcomes(functions: Iterable[tuple[str, Callable[..., Any]]]) -> list[list[dict[str, Any]]]:
    """What each function comes to on each of some real ranks; all functions are run by the same processes.

    They come with their kind: "ring" for a ring all-reduce, "step" for a training step under DDP. Raises CheckFailed
    for a function whose text cannot be found, which is what is sent to the ranks.
    """
    wanted = [(kind, *_text_of(function)) for kind, function in functions]
    new = [function for function in dict.fromkeys(wanted) if function not in _outcomes]
    if new:
        with tempfile.TemporaryDirectory(prefix="course-check-", ignore_cleanup_errors=True) as folder:
            file = Path(folder, "functions.json")
            file.write_text(json.dumps(new), encoding="utf-8")
            by_rank = run_ranks("course_utils.lessons.data_parallelism.check_ranks", RANKS, [str(file)])
        _outcomes.update({function: list(found) for function, *found in zip(new, *by_rank, strict=True)})
    return [_outcomes[function] for function in wanted]


def _text_of(step: Callable[..., Any]) -> tuple[str, str]:
    """The source of a function and its name."""
    try:
        source = textwrap.dedent(inspect.getsource(step))
    except (OSError, TypeError) as error:
        raise CheckFailed("The text of your function cannot be found: define it in a cell, with `def`.") from error
    if not source.startswith("def "):
        fail("Define your function in a cell, with `def`: its text is sent to other processes.")
    return source, step.__name__


class DryModel(torch.nn.Module):
    """Stands for a DDP model in one process: sees whether a training step runs at all, and in which order.

    `events` are "forward", "backward" and "step"; `largest` is the most sequences that went forward at once, and
    `stepped_on` says of each step whether there was a gradient.
    """

    def __init__(self) -> None:
        super().__init__()
        self.module = torch.nn.Linear(8, 8)
        self.events: list[str] = []
        self.largest = 0
        self.stepped_on: list[bool] = []
        self.module.register_forward_pre_hook(lambda _, inputs: self._goes_forward(inputs[0]))
        self.module.weight.register_hook(lambda _: self.events.append("backward"))

    def _goes_forward(self, inputs: torch.Tensor) -> None:
        self.events.append("forward")
        self.largest = max(self.largest, len(inputs))

    def optimizer(self) -> torch.optim.Optimizer:
        """SGD on its weights, whose steps it notes."""

        def steps(*_: Any) -> None:
            self.events.append("step")
            self.stepped_on.append(self.module.weight.grad is not None and bool(self.module.weight.grad.any()))

        made = torch.optim.SGD(self.parameters(), lr=0.1)
        made.register_step_pre_hook(steps)
        return made

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.module(inputs)

    def no_sync(self) -> Any:
        """As DDP's, without anything to leave out."""
        return torch.enable_grad()


# ------------------------------------------------------------------------------------------------------- 08.5: exposed


def exposed_right(buckets: Sequence[tuple[float, float]], computed: float) -> float:
    """Seconds that a step waits for the exchange after backward has computed."""
    end = 0.0
    for ready, seconds in buckets:
        end = max(end, ready) + seconds
    return max(0.0, end - computed)


# ---------------------------------------------------------------------------------------------------- 08.6: most_ranks


def ranks_right(alpha: float, beta: float, size: int, compute: float, floor: float, limit: int) -> int:
    """The largest number of ranks up to `limit` whose efficiency is `floor` or better."""
    return max(D for D in range(1, limit + 1) if compute >= floor * (compute + ring_seconds(alpha, beta, size, D)))


def ring_seconds(alpha: float, beta: float, size: float, D: int) -> float:
    """Seconds of a ring all-reduce."""
    return 2 * (D - 1) * (alpha + beta * size / D)
