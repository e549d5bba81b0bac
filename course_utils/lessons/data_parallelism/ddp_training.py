"""Data-parallel training of a small network: on GPUs (NCCL) where each rank can have its own, or on CPUs.

    torchrun --standalone --nproc-per-node=2 -m course_utils.lessons.data_parallelism.ddp_training

prints how long a step takes with many buckets, one, and none; `run_ranks` returns all that `one_rank` finds.
"""

import os
import sys
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from ...measuring.devices import Cuda, Host
from ...measuring.sources import forced_source
from ...ranks.launch import RESULTS
from ...ranks.worker import report

LAYERS, WIDTH, SAMPLES = 12, 512, 256
BUCKET_MB, WARM_UP, TIMED = 2.0, 2, 5


def why_on_cpus() -> str:
    """The reason why ranks run on the CPU; "" where each has its own GPU. NCCL refuses two on one GPU."""
    source = forced_source()
    ranks = int(os.environ["LOCAL_WORLD_SIZE"])
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if source not in ("auto", "live"):
        return f"COURSE_SOURCE is {source}"
    if gpus < ranks:
        return f"{ranks} ranks need {ranks} GPUs, torch finds {gpus}"
    return ""


def device_of_rank() -> torch.device:
    """This rank's own GPU where each rank here can have one and COURSE_SOURCE allows it, else the CPU."""
    if why_on_cpus():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return device


def where(device: torch.device) -> str:
    """Provenance: number of processes, and their devices."""
    place = "each on its own GPU (NCCL)" if device.type == "cuda" else "on the CPU that ran this cell (gloo)"
    return f"{dist.get_world_size()} processes {place}"


def network(device: torch.device) -> nn.Sequential:
    """Twelve equal layers, with other weights on each rank until DistributedDataParallel sends rank 0's."""
    torch.manual_seed(dist.get_rank())
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS)]
    return nn.Sequential(*layers).to(device)


class Trace:
    """A DDP communication hook that averages as DDP does, and notes each bucket: bytes, ready, done.

    On a GPU, times are those of CUDA events, in the order of its own work; `since_begin` turns them into
    seconds.
    """

    def __init__(self, device: torch.device) -> None:
        self.clock = Cuda() if device.type == "cuda" else Host()
        self.begin()

    def begin(self) -> None:
        """Time zero, with nothing noted."""
        self.buckets: list[dict[str, Any]] = []
        self.zero = self.clock.stamp()

    def since_begin(self, stamp: Any) -> float:
        return self.clock.milliseconds(self.zero, stamp) / 1000

    def hook(self, _: None, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """The mean of a bucket over all ranks; DDP calls it as soon as all of its gradients are there."""
        noted = {"size": bucket.buffer().nbytes, "ready": self.clock.stamp()}
        self.buckets.append(noted)
        work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
        assert work is not None, "every rank is in the group"

        def note_the_end(reduced: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
            noted["done"] = self.clock.stamp()
            return reduced.value()[0]

        return work.get_future().then(note_the_end)


def traced_step(
    device: torch.device, bucket_mb: float = BUCKET_MB, synchronized: bool = True
) -> dict[str, Any]:
    """The fastest of a few steps: seconds until forward and backward ended, and its buckets."""
    model = DistributedDataParallel(network(device), bucket_cap_mb=bucket_mb)
    trace = Trace(device)
    model.register_comm_hook(None, trace.hook)
    batch = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank())).to(device)
    steps: list[dict[str, Any]] = []
    for _ in range(WARM_UP + TIMED):
        dist.barrier()
        trace.begin()
        with nullcontext() if synchronized else model.no_sync():
            loss = mse_loss(model(batch), batch)
            forward = trace.clock.stamp()
            loss.backward()
        end = trace.clock.stamp()
        trace.clock.synchronize()
        buckets = []
        for noted in trace.buckets:
            seconds = {at: trace.since_begin(noted[at]) for at in ("ready", "done")}
            buckets.append(noted | seconds)
        times = {"forward": trace.since_begin(forward), "end": trace.since_begin(end)}
        steps.append(times | {"buckets": buckets})
        model.zero_grad()
    return min(steps[WARM_UP:], key=lambda step: step["end"])


def one_rank(device: torch.device, bucket_mb: float = BUCKET_MB) -> dict[str, Any]:
    """This rank's steps with buckets of `bucket_mb`, one for all, and none; bytes of all `gradients`."""
    return {
        "where": where(device),
        "many": traced_step(device, bucket_mb),
        "one": traced_step(device, bucket_mb=1e6),
        "none": traced_step(device, synchronized=False),
        "gradients": sum(4 * weight.numel() for weight in network(device).parameters()),
    }


def main() -> None:
    """Run the steps on this rank, and report; without a notebook rank 0 prints them."""
    torch.set_num_threads(1)
    device = device_of_rank()
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    found = one_rank(device, *map(float, sys.argv[1:]))
    if RESULTS in os.environ:
        report(found)
    elif dist.get_rank() == 0:
        print(": ".join(filter(None, [found["where"], why_on_cpus()])))
        print(f"{found['gradients']:,} bytes of gradients")
        for name in ("many", "one", "none"):
            print(f"{name:5s} {1000 * found[name]['end']:8.2f} ms, {len(found[name]['buckets'])} buckets")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
