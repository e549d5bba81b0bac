"""FSDP2 in other units, and gathering further ahead than torch does by itself: rank 0 of many simulated ranks."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from course_utils.measurement import Measurement
from course_utils.measuring.sharded import ShardedTraining, ShardTracker, simulated_ranks
from course_utils.measuring.simulated import availability, simulated_gpu
from course_utils.measuring.tracing import follow, provenance_of
from course_utils.models import TransformerConfig
from course_utils.networks import Transformer
from course_utils.run import TrainingRun


def six_blocks(ranks: int = 64) -> TrainingRun:
    """A GPT of six wide blocks and few words, at stage 3: small to simulate, and nearly all of it is in blocks."""
    model = TransformerConfig("GPT of six blocks", "gpt2", 6, 1024, heads=16, vocab=1000, max_positions=128)
    return TrainingRun(model, 1, 128, "bf16-master", world_size=ranks, zero_stage=3)


class Units(NamedTuple):
    """Units that are gathered at once: with `whole` the whole network, else each block, `ahead` of them before they are
    needed, in forward and in backward.
    """

    ahead: int = 1
    whole: bool = False


def in_units(run: TrainingRun, choices: Mapping[str, Units]) -> dict[str, Measurement]:
    """Measure `run` for each of the choices, by name. Prints why and returns {} where this computer cannot simulate."""
    works, why = availability()
    if not works:
        print(f"left out, as this computer cannot simulate them ({why}): {', '.join(choices)}")
        return {}
    provenance = provenance_of("simulated", f"rank 0 of {run.world_size} simulated ranks")
    found = {}
    for name, units in choices.items():
        with simulated_ranks(run.world_size) as mesh, simulated_gpu(run.attention):
            found[name] = follow(TrainingInUnits(run, mesh, units), ShardTracker("cuda"), 2, provenance)
    return found


class TrainingInUnits(ShardedTraining):
    """The sharded step with other units, or other prefetching."""

    def __init__(self, run: TrainingRun, mesh: Any, units: Units) -> None:
        self.units = units
        super().__init__(run, mesh)

    def _network(self) -> Transformer:
        from torch.distributed.fsdp import fully_shard

        if self.units.whole:
            network, policy = self._whole()
            fully_shard(network, mesh=self.mesh, mp_policy=policy)
            return network
        network, ahead = super()._network(), self.units.ahead
        blocks: list[Any] = list(network.blocks)
        for index, block in enumerate(blocks):
            block.set_modules_to_forward_prefetch(blocks[index + 1 : index + 1 + ahead])
            block.set_modules_to_backward_prefetch(blocks[max(0, index - ahead) : index][::-1])
        return network
