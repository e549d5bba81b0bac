"""Demo: a model whose states no single card holds, on several: ZeRO's three stages. By estimate alone: the cards
are not here, so that nothing is sent and nothing is measured.
"""

from ..estimating import estimate
from ..figures.canvas import sentence
from ..models import PRESETS
from ..planning.twin import fits
from ..run import TrainingRun
from ..units import format_bytes
from .stage import Demo, DemoStep, Foreseen, Outcome, Stage
from .stage_figures import stage_bars

RANKS = (8, 16, 32, 64)
STAGES = {"replicas": 0, "ZeRO-1": 1, "ZeRO-2": 2, "ZeRO-3": 3}


def runs(stage: Stage) -> dict[str, TrainingRun]:
    """The run at each of ZeRO's stages, on as few cards as the third needs. ValueError where none of `RANKS` do."""
    base = _base(stage)
    for ranks in RANKS:
        made = {name: base.replace(world_size=ranks, zero_stage=number) for name, number in STAGES.items()}
        if fits(made["ZeRO-3"], stage.card.room):
            return made
    raise ValueError(f"{base.model.name} does not fit {RANKS[-1]} of {stage.words}: nothing to show")


def _base(stage: Stage) -> TrainingRun:
    """One sequence of the smallest dense model whose 16 bytes a parameter are more than the card holds.

    Its precision is ZeRO's own, 2 + 2 + 12 bytes: autocast would keep a whole 16-bit copy of the weights on each card.
    """
    large = [one for one in PRESETS.values() if not one.experts and 16 * one.parameters > stage.card.room]
    if not large:
        raise ValueError(f"no preset is too large for {stage.words}: nothing to show")
    model = min(large, key=lambda one: one.parameters)
    precision, attention = ("bf16-master", "flash") if stage.card.has_bf16 else ("fp16-master", "efficient")
    return TrainingRun(model, 1, min(512, model.max_positions), precision, attention=attention, recompute="full")


def question(stage: Stage) -> Outcome:
    """What is asked."""
    run = _base(stage)
    return Outcome(
        f"{run.model.name} on {stage.words}: at 16 bytes a parameter its states take "
        f"{format_bytes(16 * run.model.parameters)}. How many such cards does it take, if each keeps a copy?"
    )


def replicas(stage: Stage) -> Outcome:
    """More replicas do not help."""
    made = runs(stage)["replicas"]
    few, many = RANKS[0], made.world_size * 8
    rows = {f"{ranks} cards": estimate(made.replace(world_size=ranks)) for ranks in (few, many)}
    figure = stage_bars(rows, f"A replica is as large on {many} cards as on {few}, by estimate", stage.card.room)
    return Outcome("Each card holds everything. What need not be there twice?", figure=figure)


def stages(stage: Stage) -> Outcome:
    """The three stages."""
    made = runs(stage)
    ranks = made["ZeRO-3"].world_size
    rows = {name: estimate(run) for name, run in made.items()}
    fitting = [name for name, run in made.items() if fits(run, stage.card.room)]
    figure = stage_bars(rows, f"On {ranks} cards {sentence(fitting)} fit, by estimate", stage.card.room)
    return Outcome(f"Bytes of one of {ranks} cards. Nothing was measured: those cards are not here.", figure=figure)


def foresee(stage: Stage) -> list[Foreseen]:
    """What is too large, and what fits."""
    made = runs(stage)
    return [stage.foresee(made["replicas"], fails=True), stage.foresee(made["ZeRO-3"])]


SHARDING = Demo(
    "ZeRO, by estimate",
    "A model that no single card trains: what replicas keep, and what ZeRO's stages leave.",
    (
        DemoStep("Guess first", "A model that is too large.", question),
        DemoStep("More replicas", "The batch is shared. The model is not.", replicas),
        DemoStep("ZeRO", "Shard the states, then the gradients, then the weights.", stages),
    ),
    foresee,
    runs=False,
)
