"""Moments of a training run outside its step: the simulated GPU against what an H200 counted."""

import importlib.util
import json

import pytest
import torch

from course_utils import measure_moments
from course_utils.estimating.workspaces import workspaces_of
from course_utils.gpus import GPUS
from course_utils.interactive.course_files import ROOT
from course_utils.measuring.simulated import availability
from course_utils.units import MiB
from course_utils.watching.on_gpu import on_gpu

pytestmark = pytest.mark.skipif(not availability()[0], reason="a GPU cannot be simulated here")

ON_CARD = ROOT / "tests" / "gpu"
CARD = "H200-141GB"
FIRST, *COUNTED = map(json.loads, (ON_CARD / "recorded" / "outside_the_step.jsonl").read_text().splitlines())


def test_each_moment_takes_what_the_card_counted_to_the_byte(tmp_path):
    """With another torch than 2.11, all differ by what cuBLASLt keeps from the first step on."""
    specification = importlib.util.spec_from_file_location("outside", ON_CARD / "outside_the_step.py")
    assert specification and specification.loader
    on_card = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(on_card)
    with on_gpu(card=CARD):
        found = measure_moments(on_card.moments(tmp_path / "checkpoint.pt"))
    capability = GPUS[CARD].capability
    kept = workspaces_of(capability).lt - workspaces_of(capability, (2, 11)).lt
    differences = {
        one["moment"]: [
            getattr(found[one["moment"]], name) - one[name] for name in ("before", "after", "peak")
        ]
        for one in COUNTED
    }
    assert len(differences) == len(found.moments) == 19
    assert differences == {name: [kept] * 3 for name in differences} | {"step 1": [0, kept, kept]}


def test_the_helper_says_what_the_counters_say_by_hand():
    with on_gpu(card=CARD):
        torch.cuda.empty_cache()
        kept = torch.empty(8 * MiB, device="cuda")  # 32 MiB, which is a whole segment
        found = measure_moments([("twice", lambda: kept + kept.exp()), ("nothing", lambda: None)])
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        doubled = kept + kept.exp()
        by_hand = (before, torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated())
        del doubled
    twice = found["twice"]
    assert (twice.before, twice.after, twice.peak) == by_hand
    assert (twice.after - twice.before, twice.peak - twice.before) == (32 * MiB, 64 * MiB)
    assert found.largest is twice and found["nothing"].peak == twice.before
    assert "largest" in repr(found).splitlines()[1]


def test_it_says_what_is_missing():
    with pytest.raises(ValueError, match="on_gpu"):
        measure_moments([("step", lambda: None)])
    with on_gpu(card=CARD), pytest.raises(ValueError, match="empty"):
        measure_moments([])
    with on_gpu(card=CARD), pytest.raises(KeyError, match="known: step"):
        measure_moments([("step", lambda: None)])["evaluation"]
