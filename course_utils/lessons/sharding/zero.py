"""Lesson 09's closed forms: bytes that a rank keeps and sends by ZeRO's formulas, and terms by which torch differs."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from course_utils.estimating.published import zero_sharded_state_bytes
from course_utils.estimating.sharding import (
    check_fsdp,
    ddp_communication,
    fsdp_groups,
    rank_0_states,
    shard_shape,
    zero_1_shares,
)
from course_utils.estimating.states import states_of
from course_utils.models import parameter_shapes
from course_utils.run import Precision, TrainingRun
from course_utils.units import BLOCK


def formula(run: TrainingRun) -> dict[str, int]:
    """Bytes of states of one rank by ZeRO's formula, by kind, with the run's own bytes per parameter.

    Weights, gradients and K of Adam: 2 + 2 + 12 in the paper, 4 + 4 + 8 in fp32. Stage 1 divides K by the number of
    ranks, stage 2 the gradients too, stage 3 all (Rajbhandari et al. 2020, section 5). ValueError unless it is Adam.
    """
    if run.optimizer.algorithm not in ("adam", "adamw"):
        raise ValueError(f"ZeRO's formula is written here for Adam's two moments, not for {run.optimizer.name}")
    N, D, stage, precision = run.model.parameters, run.world_size, run.zero_stage, run.precision
    K = precision.master + _moments(precision)
    return {
        "parameters": precision.weight * N // (D if stage == 3 else 1),
        "gradients": precision.gradient * N // (D if stage >= 2 else 1),
        "optimizer_states": K * N // (D if stage >= 1 else 1),
    }


def _moments(precision: Precision) -> int:
    """Bytes per parameter of Adam's two moments."""
    return (precision.first_moment or precision.state) + precision.state


def cut_three_ways(parameters: int, ranks: int) -> dict[str, dict[str, int]]:
    """Bytes by kind of one rank with mixed-precision Adam, for no sharding and ZeRO's three stages, by name."""
    names = ("nothing cut", "stage 1: optimizer", "stage 2: + gradients", "stage 3: + parameters")
    return {name: zero_sharded_state_bytes(parameters, stage, ranks) for stage, name in enumerate(names)}


def state_terms(run: TrainingRun, rank: int = 0, counters: bool = True) -> dict[str, int]:
    """Bytes of `rank` between backward and the step: ZeRO's formula, then signed terms by which torch differs.

    `counters` are Adam's counts of steps, a block of 512 bytes for each tensor, in traced memory of a CPU only. Stages
    2 and 3 are FSDP2, which keeps no whole parameter between steps. Raises ValueError for a run that it cannot shard.
    """
    shares = run.zero_stage == 1
    stepped = zero_1_shares(run.model, run.world_size)[rank] if shares else parameter_shapes(run.model)
    terms = {"ZeRO's formula": sum(formula(run).values())}
    terms |= _sharded_terms(run, rank) if run.zero_stage >= 2 else _replicated_terms(run, stepped)
    if counters:
        terms["step counters, on a CPU"] = BLOCK * len(stepped)
    return {name: size for name, size in terms.items() if size}


def _replicated_terms(run: TrainingRun, stepped: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """DistributedDataParallel: shares of whole tensors are not even, and buckets hold all gradients again."""
    kept, exact, precision = rank_0_states(run), formula(run), run.precision
    share = (precision.master + _moments(precision)) * sum(map(prod, stepped.values()))
    blocks = sum(kept[kind] - exact[kind] for kind in ("parameters", "gradients"))
    return {
        "uneven shares": share - exact["optimizer_states"],
        "blocks of 512 bytes": blocks + states_of(precision, run.optimizer, stepped) - share,
        "buckets": ddp_communication(run),
    }


def _sharded_terms(run: TrainingRun, rank: int) -> dict[str, int]:
    """FSDP2: rows of weights and gradients are padded to a multiple of D, Adam's moments are not."""
    check_fsdp(run)
    D = run.world_size
    precision = dataclasses.replace(run.precision, master=0)  # the shard is the master weight
    stored = run.precision.master or run.precision.weight
    padded = sum(sum(group.shards) for group in fsdp_groups(run))
    own = {name: own_rows(shape, D, rank) for name, shape in parameter_shapes(run.model).items()}
    exact = 2 * stored * padded + _moments(precision) * sum(map(prod, own.values()))
    kept = rank_0_states(run)
    blocks = kept["parameters"] + kept["gradients"] + states_of(precision, run.optimizer, own)
    third = sum(formula(run.replace(zero_stage=3)).values())
    return {
        "parameters sharded, too": third - sum(formula(run).values()),
        "padding": exact - third,
        "blocks of 512 bytes": blocks - exact,
    }


def own_rows(shape: tuple[int, ...], ranks: int, rank: int) -> tuple[int, ...]:
    """The piece of a parameter that `rank` owns: ⌈rows / D⌉ rows; the last ranks may have fewer, or none."""
    each = shard_shape(shape, ranks)[0]
    return (max(0, min(each, shape[0] - rank * each)), *shape[1:])


def padded_elements(run: TrainingRun) -> tuple[int, int]:
    """Elements of all ranks' shards together, and how many of them are padding."""
    shapes = parameter_shapes(run.model).values()
    all_shards = run.world_size * sum(prod(shard_shape(shape, run.world_size)) for shape in shapes)
    return all_shards, all_shards - run.model.parameters


def gathered_terms(run: TrainingRun) -> dict[str, int]:
    """Bytes of communication while a block goes backward at stage 3 of FSDP2, by name: that kind at the peak."""
    outer, block = fsdp_groups(run)[:2]
    return {
        "embedding and head, gathered": outer.unsharded,
        "a block, gathered": block.unsharded,
        "the next block, on its way": block.gather_output,
        "the last block's gradients, flat": block.reduce_input,
    }


def sent_elements(run: TrainingRun) -> dict[str, int]:
    """Elements that each rank sends in a step of one micro-batch, by collective, (D−1)/D left out as ZeRO does.

    DistributedDataParallel all-reduces, two elements for each; ZeroRedundancyOptimizer's ranks then broadcast their
    new weights. FSDP2 gathers each unit for forward and, at stage 3, each block again for backward, and reduce-scatters
    it once, all with padding.
    """
    N = run.model.parameters
    if run.zero_stage < 2:
        return {"all-reduce": 2 * N} | ({"broadcast": N} if run.zero_stage else {})
    outer, *blocks = (group.ranks * sum(group.shards) for group in fsdp_groups(run))
    again = sum(blocks) if run.zero_stage == 3 else 0
    return {"all-gather": outer + sum(blocks) + again, "reduce-scatter": outer + sum(blocks)}


def tokens_to_hide(bytes_each: float, flops_per_second: float, bytes_per_second: float) -> float:
    """Tokens that a rank has to work on in a step until arithmetic takes as long as sending `bytes_each` per parameter.

    A token takes 6 FLOPs per parameter, forward and backward (Kaplan et al. 2020, section 2.1): N cancels.
    """
    return bytes_each / bytes_per_second * flops_per_second / 6


@dataclass(frozen=True)
class Offload:
    """ZeRO-Offload, bytes per GPU: on the GPU, in the host's memory, and over the link in a step, both directions."""

    gpu: int
    host: int
    link: int

    def seconds(self, bytes_per_second: float) -> float:
        """Seconds that the link takes if one direction waits for the other."""
        return self.link / bytes_per_second


def offload(parameters: int, ranks: int = 1) -> Offload:
    """16-bit weights stay; gradients leave as they come, 2 bytes; the host steps; new weights come back, 2 bytes.

    Each of several ranks moves its share alone, as in ZeRO-2 (Ren et al. 2021, ZeRO-Offload).
    """
    share = -(-parameters // ranks)
    return Offload(gpu=2 * parameters, host=14 * share, link=4 * share)


def reduce_scatter(gradients: Sequence[Sequence[float]]) -> list[list[float]]:
    """Each rank's slice of the mean after a reduce-scatter of these lists, one per rank."""
    D, n = len(gradients), len(gradients[0])
    mean = [sum(column) / D for column in zip(*gradients, strict=True)]
    return [mean[rank * n // D : (rank + 1) * n // D] for rank in range(D)]


def all_gather(slices: Sequence[Sequence[float]]) -> list[list[float]]:
    """Each rank's list after an all-gather: all slices in the order of ranks."""
    whole = [value for part in slices for value in part]
    return [list(whole) for _ in slices]
