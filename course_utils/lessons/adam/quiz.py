"""The numbers in the quiz of lesson 02, question by question; its words are in quiz.toml."""

from collections.abc import Iterator
from math import sqrt

from ... import TrainingRun, moments
from ...estimating.formula import update
from ...estimating.published import zero_state_bytes
from ...estimating.states import gradient_bytes, optimizer_state_bytes, parameter_bytes
from ...interactive.quiz import Numbers, gb
from ...units import each

MODEL = "gpt2-medium"


def numbers() -> Iterator[Numbers]:
    run = TrainingRun(MODEL, precision="fp32", optimizer="adamw", attention="efficient")
    N = run.model.parameters
    states = optimizer_state_bytes(run)
    everything = states + parameter_bytes(run) + gradient_bytes(run)
    # Kingma and Ba 2015, algorithm 1
    yield "two_states", {"N": N} | each(gb, states=states, one=states // 2, everything=everything)
    beta1, beta2 = 0.9, 0.999
    # after one step from zero, in units of g and of g²
    mean = 1 - beta1
    square = 1 - beta2
    # without corrections the first update is too long, not too short (Kingma and Ba 2015, section 3)
    updates = each("{:.3g}·η".format, both=mean / sqrt(square), mean=mean, reverse=sqrt(square) / mean)
    yield "first_update", {"beta1": beta1, "beta2": beta2} | updates
    run = run.replace(optimizer="adamw-foreach")
    loop = run.replace(optimizer="adamw-loop")
    made, one_by_one = (update(one)["temporaries"] for one in (run, loop))
    yield "foreach", {"N": N} | each(gb, made=made, loop=one_by_one, states=optimizer_state_bytes(run))
    run = TrainingRun(MODEL, precision="bf16-master", optimizer="adamw-foreach")
    peak = round(moments(run)["optimizer step"].total / N)
    rest = round(sum(zero_state_bytes(N).values()) / N)
    yield "upcast_at_once", {"peak": peak, "rest": rest, "no_foreach": peak - 4, "not_freed": peak + 2}
