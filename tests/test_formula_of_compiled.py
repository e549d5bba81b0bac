"""The closed form of compiled steps: next to a simulation, next to what an H200 counted, and its limits."""

import json
from typing import Any

import pytest
from engine import simulate, tiny

from course_utils import TrainingRun, estimate
from course_utils.estimating.formula_of_compiled import lacking
from course_utils.interactive.course_files import ROOT
from course_utils.measuring.simulated import availability
from course_utils.measuring.sources import measure
from course_utils.models import TransformerConfig

BOUNDS = {"blocks": 0.001, "model": 0.01}
"""A block has one cheapest cut. Inductor orders a model's backward by sizes, and the form has one order."""

ON_H200 = TransformerConfig(
    "the recorded GPT", "gpt2", 8, hidden=1024, heads=16, vocab=50304, max_positions=2048, tied=False
)
WAYS = {"eager": "none", "blocks": "blocks", "default": "model"}


def recorded() -> dict[str, dict[str, Any]]:
    text = (ROOT / "tests/gpu/recorded/compiled_step.jsonl").read_text(encoding="utf-8")
    return {row["way"]: row for row in map(json.loads, text.splitlines()) if row["step"] == 3}


@pytest.mark.skipif(not availability()[0], reason="a GPU cannot be simulated here")
@pytest.mark.parametrize(
    "run",
    [
        TrainingRun(tiny("gpt2", dropout=0.1), 8, 128, compile="blocks"),
        TrainingRun(tiny("llama"), 8, 128, "bf16-master", compile="model"),
        TrainingRun(tiny("gpt2", layers=10), 8, 128, compile="blocks"),  # Dynamo's own limit is 8 graphs
    ],
    ids=str,
)
def test_an_estimate_is_near_the_simulated_step(run: TrainingRun) -> None:
    found = simulate(run)
    assert estimate(run).total == pytest.approx(found.peak, rel=BOUNDS[run.compile])
    assert estimate(run).phase == found.breakdown.phase


@pytest.mark.parametrize("way", WAYS)
def test_an_estimate_is_near_what_an_h200_counted(way: str) -> None:
    run = TrainingRun(ON_H200, 8, optimizer="adamw-fused", dropout=0.0, compile=WAYS[way], card="H200-141GB")
    # cuBLASLt's workspace of 1 MiB on torch 2.11 is the gap
    assert estimate(run).total == pytest.approx(recorded()[way]["peak"], rel=0.0002)


def test_a_compiled_loss_keeps_the_logits_alone():
    eager = TrainingRun("gpt2", 8, dropout=0.0)
    logits = 2 * 8 * 1024 * 50304  # rows of 50,257 numbers end at a multiple of 128 bytes
    compiled = estimate(eager.replace(compile="model"))
    assert lacking(eager.replace(compile="model")) == ""
    assert logits < compiled["activations"] < estimate(eager)["activations"] - 1.9 * logits


@pytest.mark.parametrize(
    "choices",
    [
        {"recompute": "full"},
        {"loss_chunks": 8},
        {"accumulation_steps": 2},
        {"attention": "eager"},
        {"lora_rank": 4},
        {"precision": "bf16-master-fp32grad"},
    ],
    ids=str,
)
@pytest.mark.parametrize("compile", ["model", "blocks"])
def test_what_it_does_not_cover_is_refused(choices: dict[str, Any], compile: str) -> None:
    run = TrainingRun(tiny("gpt2"), 2, 128, compile=compile, **choices)
    with pytest.raises(ValueError, match=r"use measure\(run\)"):
        estimate(run)


def test_choices_that_compile_nothing_are_refused():
    with pytest.raises(ValueError, match="model"):
        TrainingRun("gpt2", compile="modl")
    with pytest.raises(ValueError, match="world_size=1"):
        TrainingRun("gpt2", world_size=2, compile="model")
    with pytest.raises(ValueError, match="offload"):
        TrainingRun("gpt2", recompute="offload", compile="blocks")
    run = TrainingRun(tiny("gpt2"), 1, 16, "fp32", attention="eager", compile="blocks")
    with pytest.raises(ValueError, match="compiles nothing"):
        measure(run, "cpu")
