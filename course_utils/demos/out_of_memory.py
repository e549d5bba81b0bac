"""Demo: out of memory on purpose, and back: a batch too large for the card, its end, and the batch that fits."""

from .stage import DemoStep, Outcome, Stage, estimated


def plan(stage: Stage) -> Outcome:
    """The run that is too large, beside the card."""
    return Outcome(f"{stage.words}. {estimated(stage.too_large())} Where in the step will it fail?")


def failure(stage: Stage) -> Outcome:
    """It fails, for real; the message is shown."""
    return Outcome(stage.fails(stage.too_large()))


def recovery(stage: Stage) -> Outcome:
    """The same model in the same process, with a batch that fits even where the memory is fragmented."""
    return stage.attempt(stage.run_of(0.6))


OUT_OF_MEMORY = [
    DemoStep("Too large on purpose", "This batch needs more memory than the GPU has.", plan),
    DemoStep("Out of memory", "The allocator looks for room, gives back what it has cached, and gives up.", failure),
    DemoStep("And back", "The memory was given back: the same process trains on, with fewer sequences.", recovery),
]
