"""ZeRO's stages on real processes of the CPU: bytes that each rank keeps, by kind, and elements that it sends.

Stages 0 and 1 are DistributedDataParallel without and with ZeroRedundancyOptimizer, stages 2 and 3 `fully_shard` with
reshard_after_forward False and True. Run as a module by `course_utils.ranks.launch`, once for each rank.
"""

import base64
import pickle
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._pytree import tree_leaves

from course_utils.estimating.sharding import ddp_communication, rank_0_states, zero_1_shares
from course_utils.estimating.states import states_of
from course_utils.measuring.data_parallel import ReplicatedTraining, ReplicaTracker, whole_batch
from course_utils.measuring.sharded import ShardedTraining, ShardTracker
from course_utils.measuring.step import Training
from course_utils.measuring.tracing import SEED, follow, provenance_of, torch_release
from course_utils.measuring.tracker import Tracker
from course_utils.models import TransformerConfig
from course_utils.ranks.launch import run_ranks, why_no_ranks
from course_utils.ranks.worker import report_on_gloo
from course_utils.run import TrainingRun

from .zero import sent_elements

STEPS = 3  # the third is looked at: in the first there are no states yet, in the second buckets are made anew

COLLECTIVES = {
    "allreduce_": ("all-reduce", 2, 0),
    "_allgather_base_": ("all-gather", 1, 0),
    "_reduce_scatter_base_": ("reduce-scatter", 1, 1),
    "broadcast_": ("broadcast", 1, 0),
}
"""For each of torch's operations its name, how many elements a rank sends for each element, (D−1)/D left out, and the
place of the whole tensor among its arguments. An all-reduce counts as two (Rajbhandari et al. 2020, section 7.1).
"""


def small_run(ranks: int = 4) -> TrainingRun:
    """A GPT that every laptop trains on several processes; 4 does not divide its sizes, so that shards are padded."""
    model = TransformerConfig("small GPT", "gpt2", layers=4, hidden=250, heads=5, vocab=4001, max_positions=64)
    return TrainingRun(model, 1, 64, "fp32", attention="eager", world_size=ranks)


def by_stage(run: TrainingRun) -> dict[str, TrainingRun]:
    """The run at each of ZeRO's stages, by name."""
    return {f"stage {stage}": run.replace(zero_stage=stage) for stage in range(4)}


class Rank(NamedTuple):
    """One process in its last step: bytes by kind between backward and the optimizer's step, elements sent by
    collective as ZeRO counts them, and the loss of each step.
    """

    states: Mapping[str, int]
    sent: Mapping[str, int]
    losses: Sequence[float]


class Found(NamedTuple):
    """Every rank of several runs, by the run's name and the rank; `provenance` says where and how."""

    ranks: Mapping[str, Sequence[Rank]]
    provenance: str
    real: bool

    @property
    def word(self) -> str:
        """A heading's word for these bytes: "measured", or "computed" where closed forms answered."""
        return "measured" if self.real else "computed"

    def lost_alike(self, *names: str) -> str:
        """A sentence that says whether these runs had the same losses, to rounding, on every rank and in every step."""
        if not self.real:
            return "no losses to compare, as nothing was trained"
        runs = [[loss for rank in ranks for loss in rank.losses] for ranks in map(self.ranks.__getitem__, names)]
        apart = max(abs(one - other) for losses in runs for one, other in zip(losses, runs[0], strict=True))
        return f"losses differ by less than a ten-thousandth, in every step, on every rank: {apart < 1e-4}"


def on_real_ranks(runs: Mapping[str, TrainingRun]) -> Found:
    """Train each of `runs`, all of one world size, for three steps in real processes that talk through gloo.

    The processes start once. Where torchrun does not work, as on Windows, the closed forms answer instead, and the
    provenance says so. Raises `ranks.RankFailed` for a rank that fails.
    """
    ranks = next(iter(runs.values())).world_size
    why = why_no_ranks()
    if why:
        answers = {name: [_by_formula(run, rank) for rank in range(ranks)] for name, run in runs.items()}
        return Found(answers, f"NOT MEASURED, the closed forms instead: {why}", False)
    content = base64.b64encode(pickle.dumps(list(runs.values()))).decode()
    results = run_ranks(__name__, ranks, [content])
    found = {name: [Rank(**of_rank[index]) for of_rank in results] for index, name in enumerate(runs)}
    return Found(found, f"{ranks} processes on a CPU (gloo) · torch {torch_release()}", True)


def _by_formula(run: TrainingRun, rank: int) -> Rank:
    states = rank_0_states(run)
    if run.zero_stage == 1:
        share = zero_1_shares(run.model, run.world_size)[rank]
        states["optimizer_states"] = states_of(run.precision, run.optimizer, share)
    buckets = ddp_communication(run) if run.zero_stage < 2 else 0
    return Rank(states | {"communication": buckets}, sent_elements(run), ())


class RealShards(ShardedTraining):
    """FSDP2's step on one of several real ranks of the CPU, on its own part of the batch."""

    def __init__(self, run: TrainingRun, mesh: Any) -> None:
        self.mesh = mesh
        torch.manual_seed(SEED)
        Training.__init__(self, run, "cpu", simulated=False)
        rank, b = dist.get_rank(), run.micro_batch
        mine = whole_batch(run)[rank * b : (rank + 1) * b]
        self.tokens, self.targets = mine[:, :-1].clone(), mine[:, 1:].clone()


class Counting(Tracker):
    """Counts the elements of each collective by step."""

    def __init__(self, device: str) -> None:
        super().__init__(device)
        self.sent: dict[int, Counter[str]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            operation = func._schema.name.removeprefix("c10d::")
            if operation in COLLECTIVES:
                name, passes, place = COLLECTIVES[operation]
                elements = sum(tensor.numel() for tensor in tree_leaves(args[place]))
                self.sent.setdefault(self.step, Counter())[name] += passes * elements
        return super().__torch_dispatch__(func, types, args, kwargs)


class CountingShards(Counting, ShardTracker): ...


class CountingReplicas(Counting, ReplicaTracker): ...


def trained(run: TrainingRun) -> dict[str, Any]:
    """This rank's steps of `run`, as `Rank` takes them."""
    provenance = provenance_of("cpu")
    if run.zero_stage < 2:
        training, tracker = ReplicatedTraining(run), CountingReplicas("cpu")
    else:
        training, tracker = RealShards(run, init_device_mesh("cpu", (run.world_size,))), CountingShards("cpu")
    measured = follow(training, tracker, STEPS, provenance)
    kept = measured.moments["end of backward"]
    return {
        "states": {kind: kept[kind] for kind in ("parameters", "gradients", "optimizer_states", "communication")},
        "sent": dict(tracker.sent[STEPS]),
        "losses": list(measured.losses),
    }


if __name__ == "__main__":
    all_runs = pickle.loads(base64.b64decode(sys.argv[1]))
    report_on_gloo(lambda: [trained(run) for run in all_runs])
