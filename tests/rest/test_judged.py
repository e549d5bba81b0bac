"""Calculators, and the course's own methods, asked about steps that GPUs elsewhere have counted."""

import dataclasses
from functools import partial
from typing import Any

import pytest
import torch
from published_models.basics_transformer import Transformer
from published_models.language_models import ScratchGPT
from published_models.sharded_models import Llama

from course_utils.evidence.judged import COUNTS, FORM, OURS, SIMULATED, answers_to, nearest, table
from course_utils.evidence.published import Row, answered_rows
from course_utils.interactive.course_files import ROOT
from course_utils.lessons.calculators.calculators import CALCULATORS
from course_utils.run import TrainingRun
from course_utils.units import BLOCK

JUDGED = {row.id: row for row in answered_rows() if nearest(row)}
"""Rows that are put to the calculators."""

CS336 = JUDGED["cs336-shibuki-2.7b-bf16-train-step-ctx512"]


def run_of(row: Row) -> TrainingRun:
    run = nearest(row)
    assert run
    return run


def test_a_calculator_answers_a_row_by_its_run_or_refuses_it_and_gives_none() -> None:
    """For one row of each family, moment and counter."""
    sample = {(row.family, row.moment, row.counter): row for row in JUDGED.values()}
    given = 0
    for row in sample.values():
        run = run_of(row)
        said = answers_to(row)
        assert said[SIMULATED] == row.said.of(row)
        assert said.keys() <= {*(one.name for one in CALCULATORS), *OURS}
        for one in CALCULATORS:
            if one.name in said:
                assert said[one.name] == one.total(run) and one.counts == COUNTS[row.moment]
                given += 1
            elif one.counts == COUNTS[row.moment]:
                with pytest.raises(ValueError, match="does not cover"):
                    one.total(run)
    assert len(JUDGED) >= 28 and given > len(sample) > 3


def test_an_answer_comes_out_by_hand() -> None:
    """16 bytes per parameter, ZeRO's 12·h·b·s·L numbers of 2 bytes; of states alone fp32 Adam's 16 bytes."""
    N = 32 * (4 * 2560**2 + 3 * 2560 * 10240 + 2 * 2560) + 2560 + 2 * 10_000 * 2560
    answer = answers_to(CS336)["ZeRO"]
    assert answer == 16 * N + 24 * 2560 * 4 * 512 * 32
    assert round(100 * (answer / CS336.bytes - 1), 1) == -13.0
    states = JUDGED["cs336-damek-xl-ddp2-T512-full"]
    xl = 48 * (4 * 1600**2 + 3 * 1600 * 6400 + 2 * 1600) + 1600 + 2 * 10_000 * 1600
    said = {name: size for name, size in answers_to(states).items() if name != SIMULATED}
    norms = 2 * 48 + 1
    rounding = 4 * norms * (BLOCK - 4 * 1600 % BLOCK)  # weights, gradients and two moments of each
    assert said == {"accelerate": 16 * xl, FORM: 16 * xl + rounding}


def test_a_run_has_as_many_parameters_as_the_network_of_its_row() -> None:
    networks: dict[str, tuple[Any, str]] = {
        "train": (Transformer, "size T"),
        "scratch_gpt": (ScratchGPT, "L h a V s stage"),
        "titan": (partial(Llama, upcast=False), "L d heads kv_heads ffn V positions recompute"),
    }
    for row in {run_of(row).model.name: row for row in JUDGED.values()}.values():
        make, names = networks[row.family.partition(".")[2]]
        with torch.device("meta"):
            network = make(**{name: row.how[name] for name in names.split()})
        assert sum(one.numel() for one in network.parameters()) == run_of(row).model.parameters, row.id


def test_parts_of_a_step_first_peaks_and_unknown_options_get_no_answer() -> None:
    for option in ({"inference": True}, {"update": False}, {"steps": 1}, {"never heard of": 1}):
        assert answers_to(dataclasses.replace(CS336, how=CS336.how | option)) == {}, option
    assert answers_to(dataclasses.replace(CS336, family="basics_transformer.attention")) == {}
    assert answers_to(dataclasses.replace(CS336, moment="kept")) == {}
    assert nearest(dataclasses.replace(CS336, how=CS336.how | {"steps": 1}, moment="end"))


def test_the_simulation_answers_what_the_counter_of_the_row_is() -> None:
    """Free pieces are in the reserved; the closed form counts tensors for either, of several ranks, too."""
    allocated, reserved = (
        answers_to(dataclasses.replace(CS336, counter=name)) for name in ("allocated", "reserved")
    )
    assert allocated[FORM] == reserved[FORM]
    assert allocated[SIMULATED] < reserved[SIMULATED]
    assert FORM in answers_to(JUDGED["titan-pr165-fsdp2-ac-reserved"])


def test_the_page_has_the_table_of_the_nine() -> None:
    page = (ROOT / "docs" / "evidence.md").read_text(encoding="utf-8")
    assert "\n".join(table().page().splitlines()[2:]) in page
