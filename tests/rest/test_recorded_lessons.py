"""Lessons from shipped recordings alone, as a machine shows them that cannot simulate a GPU."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from course_utils.interactive.course_files import ROOT

WITHOUT_BLOCKS = (
    "import runpy, sys; from course_utils.watching import on_gpu; on_gpu.print = lambda *_: None; "
    "runpy.run_path(sys.argv[1], run_name='__main__')"
)
"""Runs a lesson; blocks of plain code, for which there are no recordings, do not say where they ran."""

OF_SCRIPTS = r"\(simulated GPU · torch [^)]+\):|→ simulated GPU · torch .+"
"""Lines of scripts which `watch` runs, and compares."""

QUICK = ("04_counting_parameters", "18_who_is_right")
LESSONS = [
    pytest.param(path, marks=() if path.stem in QUICK else pytest.mark.sweep(0), id=path.stem)
    for path in sorted(ROOT.glob("notebooks/src/*.py"))
]
"""All of them under --full: a run that nobody has listed shows there alone, as it takes minutes."""


@pytest.mark.parametrize("source", LESSONS)
def test_a_lesson_measures_no_run_by_simulation_where_recordings_are_shipped(
    source: Path, tmp_path: Path
) -> None:
    variables = {"COURSE_SOURCE": "recorded", "COURSE_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_BLOCKS, source],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    here = done.stdout.replace("recorded on a simulated GPU · torch", "")
    # where a lesson says where it measured, it was a recording
    assert "simulated GPU · torch" not in re.sub(OF_SCRIPTS, "", here)
