"""DistributedDataParallel and ZeRO-1: on real processes of the CPU, each tracked, or as one simulated rank.

`course_utils.ranks.launch` runs this module once for each rank.
"""

import base64
import pickle
import sys
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from ..estimating.sharding import zero_1_shares
from ..measurement import Measurement
from ..models import parameter_shapes
from ..networks import Transformer
from ..ranks.launch import run_ranks
from ..ranks.worker import report_on_gloo
from ..run import TrainingRun
from .devices import Phases
from .files import from_json, to_json
from .optimizers import Named, make_optimizer, named_states_of
from .step import SEED, MasterOptimizer, Training, follow, provenance_of
from .tracker import States, Tracker

MOST_PROCESSES = 8


def measure_data_parallel(run: TrainingRun, steps: int) -> Measurement:
    """Rank 0's memory in `steps` steps of `run` on `world_size` processes; the peak is the last step's."""
    check_data_parallel(run)
    if run.world_size > MOST_PROCESSES:
        raise ValueError(
            f"{run.world_size} processes are too many for one computer. Up to {MOST_PROCESSES} run here;"
            " source='simulated' is for any number of ranks"
        )
    content = base64.b64encode(pickle.dumps((run, steps))).decode()
    found = run_ranks(__name__, run.world_size, [content])[0]
    provenance = provenance_of("cpu", f"rank 0 of {run.world_size} processes (gloo)")
    return replace(from_json(found, ""), provenance=provenance)


def check_data_parallel(run: TrainingRun) -> None:
    """Raise ValueError, naming what works, for a run that is not covered in data parallelism."""
    if run.loss_chunks > 1 or run.lora_rank:
        raise ValueError("several ranks run without LoRA and a chunked loss: set lora_rank=0, loss_chunks=1")


class MastersOfShares(MasterOptimizer):
    """ZeRO-1 with master weights: of its share of whole tensors alone, each then sent to every other rank."""

    def __init__(self, run: TrainingRun, named: Named, simulated: bool) -> None:
        self.shares = zero_1_shares(parameter_shapes(run.model), run.world_size)
        self.everything = dict(named)
        mine = self.shares[dist.get_rank()]
        super().__init__(run, [(name, self.everything[name]) for name in mine], simulated)

    def step(self) -> None:
        super().step()
        for rank, share in enumerate(self.shares):
            for name in share:
                dist.broadcast(self.everything[name].detach(), src=rank)

    @property
    def gradient_owners(self) -> list[torch.nn.Parameter]:
        return list(self.everything.values())


class ReplicatedTraining(Training):
    """The training step of `run` on one of several ranks: the weights of all, its own part of the batch."""

    # It is called as the network in it is.
    network: DistributedDataParallel  # pyrefly: ignore [bad-override-mutable-attribute]

    def __init__(self, run: TrainingRun, device: str = "cpu", simulated: bool = False) -> None:
        torch.manual_seed(SEED)
        super().__init__(run, device, simulated)
        if simulated:  # then one batch is as another
            return
        rank = dist.get_rank()
        b = run.micro_batch
        mine = whole_batch(run)[rank * b : (rank + 1) * b]
        self.tokens = mine[:, :-1].clone()
        self.targets = mine[:, 1:].clone()

    def _network(self) -> Transformer:
        replica = DistributedDataParallel(super()._network(), gradient_as_bucket_view=self.run.bucket_view)
        return replica  # pyrefly: ignore [bad-return]

    def _optimizer(self) -> torch.optim.Optimizer | MasterOptimizer:
        named = list(self.network.module.named_parameters())
        if self.run.precision.master and self.run.zero_stage:
            return MastersOfShares(self.run, named, self.simulated)
        if self.run.precision.master:
            return MasterOptimizer(self.run, named, self.simulated)
        if not self.run.zero_stage:
            return make_optimizer(self.run.optimizer, named)
        from torch.distributed.optim import ZeroRedundancyOptimizer

        names = {id(weight): name for name, weight in named}

        def of_share(groups: list[dict[str, Any]], **_: Any) -> torch.optim.Optimizer:
            share = [weight for group in groups for weight in group["params"]]
            return make_optimizer(self.run.optimizer, [(names[id(weight)], weight) for weight in share])

        weights = [weight for _, weight in named]
        return ZeroRedundancyOptimizer(weights, optimizer_class=of_share)  # pyrefly: ignore [bad-argument-type]

    def _optimizer_states(self) -> list[tuple[str, Any]]:
        names = {id(weight): name for name, weight in self.network.module.named_parameters()}
        if isinstance(self.optimizer, MasterOptimizer):
            return self.optimizer.named_states(names)
        optimizer: Any = self.optimizer
        if self.run.zero_stage:
            optimizer = optimizer.optim  # this rank's share
        return named_states_of(optimizer, names)

    def _forward_and_backward(self, tracker: Phases) -> None:
        """Gradients are reduced with the last micro-batch only."""
        last = tracker.micro_batch == self.run.accumulation_steps - 1
        with nullcontext() if last else self.network.no_sync():
            super()._forward_and_backward(tracker)


def whole_batch(run: TrainingRun) -> torch.Tensor:
    """Token ids (world_size · b, s + 1), the same on every rank: each takes b sequences of them."""
    generator = torch.Generator().manual_seed(SEED)
    shape = (run.world_size * run.micro_batch, run.seq_len + 1)
    return torch.randint(run.model.vocab, shape, generator=generator)


class ReplicaTracker(Tracker):
    """Sees the reducer's buckets when they are handed out to be reduced: they are communication."""

    def watch(self, network: torch.nn.Module, states: States) -> None:
        assert isinstance(network, DistributedDataParallel)
        network.register_comm_hook(self, _reduce_bucket)
        super().watch(network.module, states)


def _reduce_bucket(tracker: ReplicaTracker, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The mean of a bucket over all ranks, in place: what DistributedDataParallel does by itself."""
    tracker.bind("communication", [bucket.buffer()])
    work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
    assert work is not None, "every rank is in the group"
    return work.get_future().then(lambda reduced: reduced.value()[0])


def one_rank(run: TrainingRun, steps: int) -> dict[str, Any]:
    """The measurement of this rank's steps as JSON."""
    measured = follow(ReplicatedTraining(run), ReplicaTracker("cpu"), steps, provenance_of("cpu"))
    return to_json(measured) | {"losses": list(measured.losses)}


if __name__ == "__main__":
    run, steps = pickle.loads(base64.b64decode(sys.argv[1]))
    report_on_gloo(partial(one_rank, run, steps))
