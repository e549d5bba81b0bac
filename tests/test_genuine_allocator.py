"""Our allocator against torch's own, compiled: the same bytes, retries and failures all along 80 traces."""

import json

import pytest
from genuine_allocator import (
    ANSWERS,
    CASES,
    DESCENDING,
    compiled,
    digest,
    genuine_answers,
    our_answers,
    why_not,
)

KEPT = json.loads(ANSWERS.read_text(encoding="utf-8"))


@pytest.mark.parametrize("case", CASES)
def test_it_does_what_torchs_own_allocator_did(case):
    assert digest(our_answers(case)) == KEPT["answers"][case]


@pytest.mark.parametrize("case", DESCENDING)
def test_it_does_the_same_where_each_segment_lies_below_the_last(case):
    assert set(KEPT["descending"]["answers"]) == set(DESCENDING)
    answer = digest(our_answers(case, descending=True))
    assert answer == KEPT["descending"]["answers"][case] != KEPT["answers"][case]


def test_the_traces_run_out_of_memory_and_try_again():
    answers = our_answers(f"{CASES[-1].split()[0]} 0")
    assert sum(answer.endswith(" 1") for answer in answers) > 10, "allocations that fail"
    assert int(answers[-1].split()[3]) > 10, "retries"


@pytest.mark.skipif(bool(why_not()), reason=f"torch's own allocator cannot be asked here: {why_not()}")
def test_torchs_own_allocator_here_answers_the_same(tmp_path):
    program = compiled(tmp_path)
    for case in CASES[::3]:
        assert genuine_answers(program, case) == our_answers(case)
    for case in DESCENDING[::3]:
        ours = (our_answers(case, descending=True), our_answers(case))
        assert genuine_answers(program, case, descending=True) in ours
