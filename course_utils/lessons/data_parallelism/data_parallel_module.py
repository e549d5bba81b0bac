"""torch.nn.DataParallel, watched: bytes that its forward copies, and the speed of its threads."""

import copy
import inspect
import subprocess
import sys
import timeit
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import nn


class WatchedDataParallel(nn.DataParallel):
    """DataParallel with its own `forward`, on the CPU: its four helpers copy and count, as they would for GPUs.

    `bytes` holds what each helper would send from the first device to others, `calls` how often it was called.
    """

    def __init__(self, module: nn.Module, devices: int) -> None:
        nn.Module.__init__(self)  # DataParallel's own would look for GPUs, and without any do nothing at all
        self.module, self.dim = module, 0
        self.device_ids, self.output_device = list(range(devices)), 0
        self.src_device_obj = torch.device("cpu")
        self.bytes, self.calls = Counter[str](), Counter[str]()

    def scatter(self, inputs: Any, kwargs: Any, device_ids: Sequence[Any]) -> Any:
        parts = [tensor.chunk(len(device_ids)) for tensor in inputs]
        self._count("scatter", [part for split in parts for part in split[1:]])
        return list(zip(*parts, strict=True)), [kwargs] * len(device_ids)

    def replicate(self, module: Any, device_ids: Sequence[Any]) -> list[Any]:
        copies = [copy.deepcopy(module) for _ in device_ids[1:]]
        self._count("replicate", [weight for one in copies for weight in one.parameters()])
        return [module, *copies]

    def parallel_apply(self, replicas: Any, inputs: Any, kwargs: Any) -> list[Any]:
        # one after the other here, in threads with GPUs
        self._count("parallel_apply", [])
        return [replica(*part, **more) for replica, part, more in zip(replicas, inputs, kwargs, strict=True)]

    def gather(self, outputs: Any, output_device: Any) -> torch.Tensor:
        self._count("gather", outputs[1:])
        return torch.cat(outputs)

    def _count(self, helper: str, sent: Sequence[torch.Tensor]) -> None:
        self.calls[helper] += 1
        self.bytes[helper] += sum(tensor.nbytes for tensor in sent)


ROUNDS, TRIES = 1_000_000, 15


def python_work() -> None:
    total = 0
    for number in range(ROUNDS):
        total += number


def in_threads(count: int) -> float:
    """Seconds until `count` threads have each done `python_work`; the best of a few tries."""

    def work() -> None:
        with ThreadPoolExecutor(count) as pool:
            for _ in range(count):
                pool.submit(python_work)

    return min(timeit.repeat(work, number=1, repeat=TRIES))


def in_processes(count: int) -> float:
    """Seconds that the slowest of `count` processes took for the same work, starts not counted; the best of a few."""
    timed = "import timeit; print(timeit.timeit(python_work, number=1))"
    command = [sys.executable, "-c", f"ROUNDS = {ROUNDS}\n{inspect.getsource(python_work)}\n{timed}"]
    times = []
    for _ in range(TRIES):
        processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(count)]
        times.append(max(float(process.communicate()[0]) for process in processes))
    return min(times)
