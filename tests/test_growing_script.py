"""The growing script: small changes, numbers that hold, and a learner's copy that nothing overwrites."""

import ast
import json
from difflib import unified_diff
from hashlib import sha256

import pytest

from course_utils import estimate
from course_utils.interactive.course_files import ROOT
from course_utils.lessons.shared import growing_script
from course_utils.lessons.shared.growing_script import OWN, Script, Stage, all_stages, script, stages, watched
from course_utils.measuring.files import Line
from course_utils.measuring.recorded import Recording

STAGES = {stage.lesson: stage for stage in stages()}


@pytest.fixture
def own(tmp_path, monkeypatch):
    monkeypatch.setattr(growing_script, "HAS_FOLDER", False)
    monkeypatch.setenv("COURSE_HOME", str(tmp_path))
    monkeypatch.delenv("COURSE_SCRIPTS", raising=False)
    return tmp_path / OWN


def text_of(stage: Stage) -> str:
    return stage.file.read_text(encoding="utf-8")


def test_the_first_script_is_short_and_each_lesson_changes_a_few_lines():
    assert len(text_of(STAGES["01"]).splitlines()) <= 64
    for before, after in zip(stages(), stages()[1:], strict=False):
        lines = unified_diff(text_of(before).splitlines(), text_of(after).splitlines(), n=0, lineterm="")
        changed = [line for line in lines if line[0] in "+-" and line[:3] not in ("+++", "---")]
        assert 0 < len(changed) <= 15, after.lesson


@pytest.mark.parametrize("lesson", STAGES)
def test_what_the_table_calls_simulated_is_what_watch_finds_and_near_the_formula(lesson):
    stage = STAGES[lesson]
    assert watched(stage.file, stage.ranks) == stage.simulated
    # The gap is cuBLAS's workspaces of 17 MB, and what blocks have beyond their tensors.
    if stage.run:
        assert 17_000_000 < stage.simulated - estimate(stage.run).total < 50_000_000


def test_a_learners_copy_is_the_stage_before_and_stays_as_it_is(own):
    shown = script(3)
    assert own.read_text(encoding="utf-8") == text_of(STAGES["02"])
    assert shown.peak == STAGES["02"].simulated and "yours" in repr(shown)
    own.write_text("import torch\ntorch.ones(1).sum()\n", encoding="utf-8")
    shown = script(1)
    assert own.read_text(encoding="utf-8") == "import torch\ntorch.ones(1).sum()\n"
    assert shown.peak is None and f"{OWN} could not be watched: " in repr(shown)
    assert "yours" not in repr(shown)
    with pytest.raises(ValueError, match="04"):
        script(4)


def test_lessons_that_are_tested_side_by_side_share_no_copy(tmp_path, monkeypatch):
    monkeypatch.setenv("COURSE_SCRIPTS", str(tmp_path))
    for lesson, before in ((1, "01"), (3, "02"), (5, "03")):
        assert script(lesson).peak == STAGES[before].simulated


def test_somebody_who_comes_back_from_a_later_lesson_has_a_script_for_ranks(tmp_path, monkeypatch):
    monkeypatch.setenv("COURSE_SCRIPTS", str(tmp_path))
    own = script(1).own
    own.write_bytes(STAGES["10"].file.read_bytes())
    assert script(1).peak == STAGES["10"].simulated
    own.write_text(
        "import torch.distributed\ntorch.distributed.init_process_group('nccl')\n", encoding="utf-8"
    )
    assert "--ranks" not in repr(script(1)), "it is watched as a rank, and takes no step"


def test_the_change_is_shown_with_signs_and_what_is_not_recorded_is_called_so():
    shown = Script(stages()[:3], growing_script.ROOT / OWN, STAGES["03"].simulated)
    assert '+        with torch.autocast("cuda", torch.bfloat16):' in shown.change()
    assert "<span style='color:#00624A'>+        with torch.autocast" in shown._repr_html_()
    rows = shown.table().rows
    assert [row[0] for row in rows] == ["lesson", "01", "02", "03", ""]
    for stage, row in zip(shown.stages, rows[1:], strict=False):
        assert row[3] == f"{stage.simulated / 1e9:.2f} GB"
        assert ("not recorded" in row) == (stage.recording is None)


def test_the_whole_table_has_every_stage_and_no_copy():
    assert [row[0] for row in all_stages().rows] == ["lesson", *STAGES]


def test_a_recording_is_shown_for_the_text_that_ran_alone(monkeypatch):
    stage = STAGES["01"]
    counts = {"allocated": 11_390_000_000, "tokens_per_second": 54321.0}
    facts = {"device": "NVIDIA T4", "date": "2026-11-30", "kind": "script", "status": "measured"}
    line = Line(stage.file, 1, {"torch": "2.13.0"})

    def recorded(text: bytes) -> Recording:
        parts = {"script": counts | {"sha256": sha256(text).hexdigest()}}
        return Recording(line, "script: train_01.py", parts=parts, **facts)

    monkeypatch.setattr(growing_script, "newest", lambda kind: [recorded(b"an older text")])
    assert stage.recording is None
    monkeypatch.setattr(growing_script, "newest", lambda kind: [recorded(stage.file.read_bytes())])
    shown = Script([stage], stage.file, None)
    assert shown.table().rows[1][-2:] == ("11.39 GB", "54,321")
    assert "recorded on NVIDIA T4 · torch 2.13.0 · 2026-11-30" in repr(shown)


def test_lesson_01_shows_every_class_and_function_of_its_script():
    notebook = json.loads((ROOT / "notebooks/01_where_did_the_memory_go.ipynb").read_text(encoding="utf-8"))
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    text = text_of(STAGES["01"])
    parts = [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef | ast.FunctionDef)]
    assert [part.name for part in parts] == ["Block", "GPT", "train"]
    for part in parts:
        assert any(str(ast.get_source_segment(text, part)) in cell for cell in cells), part.name
