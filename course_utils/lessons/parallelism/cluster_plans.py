"""Plans of parallelism for a given model on a given cluster: memory, messages and idling of each, by formula.

Ranks are laid out as Megatron-LM does by default: tensor parallelism innermost, then data, then pipeline. A
group that fits into one node talks over the GPUs' own links, any other over the network. Times are at the
data sheets' peak rates.
"""

from collections.abc import Iterator
from itertools import product
from math import prod
from typing import NamedTuple

from ...estimating.sharding import all_reduce_bytes, zero_bytes
from ...estimating.step_time import data_parallel_bytes
from ...gpus import Gpu
from ...interactive.feedback import divisors
from ...models import block_shapes
from ...run import TrainingRun
from ..pipelines.schedules import bubble
from .memory import kept_activations, parameters_of

ELEMENT = 2  # bytes of a weight, a gradient and an activation that is sent, as ZeRO counts them


class Cluster(NamedTuple):
    """`nodes` machines of `per_node` equal GPUs; `network` is a GPU's bytes/s to other nodes, one way."""

    gpu: Gpu
    nodes: int
    per_node: int
    network: float

    @property
    def gpus(self) -> int:
        return self.nodes * self.per_node


class Plan(NamedTuple):
    """A use of the ranks: `data` · `tensor` · `pipeline` of them, with ZeRO of that `stage` over `data`."""

    data: int
    tensor: int = 1
    pipeline: int = 1
    stage: int = 0

    def __str__(self) -> str:
        parts = [f"{name} {count}" for name, count in self._asdict().items() if count > 1 and name != "stage"]
        words = " × ".join(parts or ["one GPU"])
        return f"{words}, ZeRO-{self.stage}" if self.stage else words


class Account(NamedTuple):
    """Costs of a plan: bytes on the fullest GPU, the part of the time that it idles, and seconds of a step.

    The seconds are those of compute, bubble, and the messages of tensor, data and pipeline parallelism.
    """

    plan: Plan
    micro_batch: int
    memory: int
    idle: float
    seconds: dict[str, float]

    @property
    def total(self) -> float:
        """Seconds of a step at peak rates when messages and arithmetic take turns."""
        return sum(self.seconds.values())

    @property
    def overlapped(self) -> float:
        """Seconds at best: messages hidden behind arithmetic, those of tensor parallelism excepted."""
        alone = self.seconds["compute"] + self.seconds["bubble"] + self.seconds["tensor"]
        return max(alone, self.seconds["data"] + self.seconds["pipeline"])

    @property
    def messages(self) -> float:
        """Seconds of all messages."""
        return sum(self.seconds[name] for name in ("tensor", "data", "pipeline"))


def account(run: TrainingRun, cluster: Cluster, plan: Plan, global_batch: int) -> Account:
    """The account of one plan for steps of `global_batch` sequences. ValueError unless the plan `divides`."""
    if not divides(run, cluster, plan, global_batch):
        raise ValueError(
            f"{plan} does not divide the model, a batch of {global_batch} or {cluster.gpus} GPUs"
        )
    if cluster.gpu.rates is None:
        raise ValueError(f"{cluster.gpu.name}: its rates are not known")
    micro_batches = global_batch // (plan.data * run.micro_batch)
    compute = step_flops(run, global_batch) / cluster.gpus / cluster.gpu.rates.tensor
    idle = bubble(plan.pipeline, micro_batches)
    seconds = {"compute": compute, "bubble": compute * idle / (1 - idle)}
    for name, (size, ranks) in _messages(run, plan, micro_batches).items():
        within = cluster.gpus <= cluster.per_node or ranks <= cluster.per_node
        rate = cluster.gpu.rates.link if within else cluster.network
        seconds[name] = size / rate
    return Account(plan, run.micro_batch, memory(run, plan, micro_batches), idle, seconds)


def plans(run: TrainingRun, cluster: Cluster, global_batch: int) -> Iterator[Account]:
    """Accounts of plans that divide model, batch and cluster; micro-batches have 1, 2, 4 or 8 sequences."""
    for tensor, micro_batch in product(divisors(cluster.per_node), (1, 2, 4, 8)):
        sized = run.replace(micro_batch=micro_batch)
        for pipeline, stage in product(divisors(cluster.gpus // tensor), (0, 1, 2, 3)):
            plan = Plan(cluster.gpus // tensor // pipeline, tensor, pipeline, stage)
            if divides(sized, cluster, plan, global_batch):
                yield account(sized, cluster, plan, global_batch)


def cheapest(
    run: TrainingRun, cluster: Cluster, global_batch: int, overlapped: bool = False
) -> Account | None:
    """The plan that fits with the fewest seconds, `overlapped` or not, then bytes; None if none fits."""

    def costs(one: Account) -> tuple[float, float, int]:
        at_best = round(one.overlapped, 6) if overlapped else 0
        return at_best, round(one.total, 6), one.memory

    room = cluster.gpu.room
    found = [one for one in plans(run, cluster, global_batch) if one.memory <= room]
    return min(found, key=costs, default=None)


def memory(run: TrainingRun, plan: Plan, micro_batches: int) -> int:
    """Bytes on the fullest GPU: 16 per parameter, sharded as ZeRO has it, kept activations, and temporaries.

    Temporaries are the two tensors of s·b·V numbers that the loss's backward makes on the last stage, and the
    block that is gathered with ZeRO's stage 3.

    Tensor parallelism with sequence parallelism divides all of it by t (Korthikanti et al. 2022, section
    4.2.2).
    """
    p = plan.pipeline
    found = list[int]()
    logit = 4 if run.model.logits == "fp32" else ELEMENT
    gathered = ELEMENT * sum(map(prod, block_shapes(run.model).values())) if plan.stage == 3 else 0
    for stage in {0, p // 2, p - 1}:
        own = zero_bytes(parameters_of(run.model, p, stage) // plan.tensor, plan.data, plan.stage)
        kept = kept_activations(run, p, micro_batches, stage)
        passing = 2 * logit * run.seq_len * run.micro_batch * run.model.vocab if stage == p - 1 else 0
        found.append(own + (kept + passing + gathered) // plan.tensor)
    return max(found)


def step_flops(run: TrainingRun, sequences: int) -> float:
    """6·N per token (Kaplan et al. 2020, section 2.1), 12·s·h·L for attention; a third more if recomputed."""
    s, h, L = run.seq_len, run.model.hidden, run.model.layers
    step = sequences * s * (6 * run.model.active_parameters + 12 * s * h * L)
    return step * 4 / 3 if run.recompute == "full" else step


def divides(run: TrainingRun, cluster: Cluster, plan: Plan, global_batch: int) -> bool:
    """True if a plan uses all GPUs, divides model and batch, and shards over several ranks."""
    model, t, p = run.model, plan.tensor, plan.pipeline
    if plan.data == 1:
        highest_stage = 0
    elif p > 1:  # stages 2 and 3 would send for every micro-batch of a pipeline
        highest_stage = 1
    else:
        highest_stage = 3
    return (
        plan.data * t * p == cluster.gpus
        and not (model.kv_heads % t or model.heads % t or model.ffn % t or model.layers % p)
        and global_batch % (plan.data * run.micro_batch) == 0
        and plan.stage <= highest_stage
    )


def _messages(run: TrainingRun, plan: Plan, micro_batches: int) -> dict[str, tuple[float, int]]:
    """Bytes of the busiest GPU's messages and the span of ranks that they cross, by what they are for."""
    passed = ELEMENT * run.seq_len * run.micro_batch * run.model.hidden
    # a block's all-reduces: 2 forward, 2 backward, 2 if run again
    joins = 6 if run.recompute == "full" else 4
    blocks = run.model.layers // plan.pipeline
    tensor = micro_batches * blocks * joins * all_reduce_bytes(passed, plan.tensor)
    weights = ELEMENT * parameters_of(run.model, plan.pipeline, 0) // plan.tensor
    data = data_parallel_bytes(weights, weights, plan.data, plan.stage, micro_batches)
    pipeline = 2 * micro_batches * passed // plan.tensor if plan.pipeline > 1 else 0
    return {
        "tensor": (tensor, plan.tensor),
        "data": (data, plan.tensor * plan.data),
        "pipeline": (pipeline, 10**9),  # between nodes, wherever there are several
    }
