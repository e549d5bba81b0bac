"""Moments of a training run outside its step: the simulated GPU against what an H200 counted."""

import json

import pytest
import torch
from gpu.outside_the_step import moments

from course_utils import measure_moments
from course_utils.estimating.workspaces import workspaces_of
from course_utils.gpus import GPUS
from course_utils.interactive.course_files import ROOT
from course_utils.measuring.simulated import availability
from course_utils.units import MiB
from course_utils.watching.on_gpu import on_gpu
from course_utils.watching.script import watch_script

pytestmark = pytest.mark.skipif(not availability()[0], reason="a GPU cannot be simulated here")

ON_CARD = ROOT / "tests" / "gpu"
CARD = "H200-141GB"
KEPT = workspaces_of(GPUS[CARD].capability).lt - workspaces_of(GPUS[CARD].capability, (2, 11)).lt
"""Bytes that cuBLASLt keeps from the first step on, above those with the torch that counted."""

_, *COUNTED = map(json.loads, (ON_CARD / "recorded" / "outside_the_step.jsonl").read_text().splitlines())


def test_each_moment_takes_what_the_card_counted_to_the_byte(tmp_path):
    with on_gpu(card=CARD):
        found = measure_moments(moments(tmp_path / "checkpoint.pt")).moments
    differences = {}
    for simulated, counted in zip(found, COUNTED, strict=True):
        assert simulated.name == counted["moment"]
        gap = [getattr(simulated, name) - counted[name] for name in ("before", "after", "peak")]
        differences[simulated.name] = gap
    assert len(differences) == 19
    assert differences == {name: [KEPT] * 3 for name in differences} | {"step 1": [0, KEPT, KEPT]}


SCRIPT = f"""import sys
from pathlib import Path
import torch
sys.path.insert(0, {str(ON_CARD)!r})
from outside_the_step import Training, batch

run = Training(Path("checkpoint.pt"))
for _ in range(2):
    run.step()
run.save()
run.begin()
run.resume("cuda")
for _ in range(1000):
    run.step()
run.kept = None
run.kept = [batch() for _ in range(4)]
run.evaluate(lambda logits: logits.float())
run.save()
run.kept = None
run.generate()
print("counters", torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
"""


def test_the_parts_of_a_whole_script_take_what_the_card_counted(tmp_path, monkeypatch, capsys):
    """The script resumes with its checkpoint on the GPU, trains, evaluates, saves and generates.

    The card did the last three without having resumed so, which leaves Adam's counters of steps on the GPU.
    """
    monkeypatch.setenv("COURSE_SOURCE", "simulated")
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    counted = {one["moment"]: one["peak"] for one in COUNTED}
    before = {one["moment"]: one["before"] for one in COUNTED}
    counters = before["step after it, checkpoint deleted"] - before["step after it"]
    parts = watch_script(path, card=CARD, steps=4, whole=True).parts
    found = {part.name: part.allocated for part in parts}
    expected = {
        "loading": counted["resume, map_location cuda, checkpoint kept"],
        "later steps": counted["step after it, checkpoint still named"],
        "evaluation": counted["evaluation, no_grad, fp32 logits kept on the GPU"] + counters,
        "saving": counted["torch.save of both state dicts"] + counters,
        "generation": counted["generation without a cache, 64 tokens, in the middle of training"] + counters,
    }
    assert {part: found[part] - peak for part, peak in expected.items()} == dict.fromkeys(expected, KEPT)
    allocated, reserved = (max(getattr(part, name) for part in parts) for name in ("allocated", "reserved"))
    assert f"counters {allocated} {reserved}\n" in capsys.readouterr().err


def test_the_helper_marks_the_largest_and_says_what_is_missing():
    with on_gpu(card=CARD):
        made = lambda: torch.empty(32 * MiB, dtype=torch.uint8, device="cuda")  # noqa: E731
        found = measure_moments([("made", made), ("nothing", lambda: None)])
        with pytest.raises(ValueError, match="empty"):
            measure_moments([])
    first, second = found.moments
    assert first.after - first.before == 32 * MiB and second.peak == first.before, "what it returned is gone"
    assert ["largest" in line for line in repr(found).splitlines()] == [False, True, False, False]
    with pytest.raises(ValueError, match="on_gpu"):
        measure_moments([("step", lambda: None)])
