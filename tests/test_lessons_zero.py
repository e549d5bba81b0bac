"""Lesson 09's closed forms, real ranks, units and sliders: each number that the lesson shows is really so."""

import pytest
from engine import tiny

from course_utils import TrainingRun, estimate, gpu, measure
from course_utils.lessons.sharding.real_ranks import Found, Rank, by_stage, on_real_ranks, small_run
from course_utils.lessons.sharding.units import Units, in_units, six_blocks
from course_utils.lessons.sharding.widget import shard_sliders
from course_utils.lessons.sharding.zero import (
    formula,
    gathered_terms,
    offload,
    own_rows,
    padded_elements,
    sent_elements,
    state_terms,
    tokens_to_hide,
)


def test_the_formula_uses_the_runs_own_bytes() -> None:
    run = TrainingRun("gpt2", 1, 64, "fp32", attention="eager", world_size=4, zero_stage=1)
    N = run.model.parameters
    assert formula(run) == {"parameters": 4 * N, "gradients": 4 * N, "optimizer_states": 8 * N // 4}
    assert sum(formula(run.replace(precision="bf16-master", zero_stage=2)).values()) == 2 * N + 2 * N // 4 + 12 * N // 4


def test_all_pieces_of_a_parameter_are_the_parameter() -> None:
    for rows in (1, 3, 10, 250):
        pieces = [own_rows((rows, 7), 4, rank) for rank in range(4)]
        assert sum(piece[0] for piece in pieces) == rows and all(piece[1] == 7 for piece in pieces)


def test_padding_is_what_the_shards_hold_beyond_the_model() -> None:
    run, even = small_run(4), TrainingRun(tiny("gpt2", hidden=64, vocab=512), 1, 64, world_size=4)
    shards, padding = padded_elements(run)
    assert shards - padding == run.model.parameters and 0 < padding < shards / 100
    assert padded_elements(even) == (even.model.parameters, 0)


@pytest.mark.parametrize("precision", ["bf16-master", "fp32"])
def test_gathered_terms_are_the_measured_communication(precision: str) -> None:
    """In the middle of backward, where the run of six blocks peaks."""
    attention = "flash" if precision == "bf16-master" else "efficient"
    run = six_blocks(64).replace(precision=precision, attention=attention)
    communication = measure(run).breakdown["communication"]
    assert sum(gathered_terms(run).values()) == communication == estimate(run)["communication"]


def test_hiding_takes_as_long_as_it_computes() -> None:
    rates, N = gpu("A100-80GB").rates, 7e9
    assert rates is not None
    tokens = tokens_to_hide(6, rates.tensor, rates.link)
    assert 6 * N * tokens / rates.tensor == pytest.approx(6 * N / rates.link)


def test_offloading_leaves_an_eighth_and_moves_two_bytes_each_way() -> None:
    one, eight = offload(8000), offload(8000, ranks=8)
    assert (one.gpu, one.host, one.link) == (16_000, 112_000, 32_000) and one.gpu * 8 == 16 * 8000
    assert (eight.gpu, eight.host, eight.link) == (16_000, 14_000, 4_000)
    assert one.seconds(1000.0) == 32.0


SMALL = small_run(2).replace(model=tiny("gpt2", hidden=50, heads=5, vocab=301))


@pytest.fixture(scope="module")
def found() -> Found:
    """Two real ranks, which take some seconds to start."""
    return on_real_ranks(by_stage(SMALL))


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("rank", range(2))
def test_every_byte_of_a_real_rank_has_a_name(found: Found, stage: int, rank: int) -> None:
    assert found.real and "2 processes" in found.provenance
    assert sum(state_terms(SMALL.replace(zero_stage=stage), rank).values()) == sum(
        found.ranks[f"stage {stage}"][rank].states.values()
    )


def test_what_real_ranks_send_and_learn(found: Found) -> None:
    for name, one in by_stage(SMALL).items():
        assert found.ranks[name][0].sent == sent_elements(one)
    assert found.lost_alike(*by_stage(SMALL)).endswith("True")
    ranks = {name: [Rank({}, {}, losses)] for name, losses in {"one": (1.0, 0.5), "two": (1.0, 0.6)}.items()}
    assert Found(ranks, "", real=True).lost_alike("one", "two").endswith("False")


def test_where_no_ranks_run_the_closed_forms_answer_and_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("course_utils.lessons.sharding.real_ranks.why_no_ranks", lambda: "no processes here")
    runs = by_stage(small_run(4))
    answer = on_real_ranks(runs)
    assert not answer.real and answer.provenance.endswith("instead: no processes here")
    for name, run in runs.items():
        kept = sum(answer.ranks[name][0].states.values())
        assert kept == sum(state_terms(run, rank=0, counters=False).values())
        assert answer.ranks[name][0].sent == sent_elements(run)
    assert "nothing was trained" in answer.lost_alike(*runs)
    assert answer.word == "computed"


def test_more_gathered_at_once_costs_what_it_weighs() -> None:
    run = six_blocks(64)
    found = in_units(run, {"ahead": Units(ahead=2), "whole": Units(whole=True)})
    usual, block = measure(run).breakdown["communication"], gathered_terms(run)["a block, gathered"]
    assert found["ahead"].breakdown["communication"] - usual == block
    flat_gradients = 4 * padded_elements(run)[0]
    assert found["whole"].breakdown["communication"] == pytest.approx(flat_gradients, rel=0.01)


def test_where_nothing_can_be_simulated_it_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("course_utils.lessons.sharding.units.availability", lambda: (False, "no CUDA hooks"))
    assert in_units(six_blocks(64), {"2 blocks ahead": Units(ahead=2)}) == {}
    assert "left out" in capsys.readouterr().out


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
