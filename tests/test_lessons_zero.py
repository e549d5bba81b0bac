"""Lesson 09's closed forms and sliders: each number that the lesson shows is really so."""

import pytest

from course_utils import TrainingRun, estimate, gpu, measure
from course_utils.lessons.sharding.widget import shard_sliders
from course_utils.lessons.sharding.zero import formula, gathered_terms, gpt_of_six_blocks, tokens_to_hide


def test_the_formula_is_that_of_mixed_precision_adam() -> None:
    run = TrainingRun("gpt2", 1, 64, "bf16-master", world_size=4, zero_stage=2)
    N = run.model.parameters
    assert formula(run) == {"parameters": 2 * N, "gradients": 2 * N // 4, "optimizer_states": 12 * N // 4}


@pytest.mark.parametrize("precision", ["bf16-master", "fp32"])
def test_gathered_terms_are_the_measured_communication(precision: str) -> None:
    """In the middle of backward, where the run of six blocks peaks."""
    attention = "flash" if precision == "bf16-master" else "efficient"
    run = gpt_of_six_blocks(64).replace(precision=precision, attention=attention)
    communication = measure(run).breakdown["communication"]
    assert sum(gathered_terms(run).values()) == communication == estimate(run)["communication"]


def test_hiding_takes_as_long_as_it_computes() -> None:
    rates, N = gpu("A100-80GB").rates, 7e9
    assert rates is not None
    tokens = tokens_to_hide(6, rates.tensor, rates.link)
    assert 6 * N * tokens / rates.tensor == pytest.approx(6 * N / rates.link)


def test_sliders_follow_ranks_and_stage() -> None:
    sliders = shard_sliders("llama3-8b", ranks=8, stage=2, gpu="A100-40GB", seq_len=4096)
    assert repr(sliders) == "Sliders over ranks and stage: run this cell to use them."
    assert "Fits an A100-40GB" in sliders.message
    sliders.controls["zero_stage"].value = 1
    assert "Does not fit" in sliders.message and sliders.run.zero_stage == 1
    sliders.controls["precision"].value = "fp32"
    assert sliders.run.attention == "efficient" and sliders.figure is not None
    assert "44.2 GB by ZeRO" in sliders.figure.alt
    sliders.controls["model"].value = "gpt2-xl"
    assert sliders.run.seq_len == 1024 and "Not possible" not in sliders.message
