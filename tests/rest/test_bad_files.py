"""Bad files and controls by the hundred: all are read or shown, or refused by an error that names why."""

import json
from functools import cache
from pathlib import Path
from typing import Any

from bad_input import ODD, broken, bytes_of, many, names
from engine import simulate
from hypothesis import given
from hypothesis import strategies as st

from course_utils.interactive.explorer import CONTROLS, dashboard
from course_utils.interactive.explorer_page import draw, link, linked
from course_utils.measuring.files import append, repair, thinned, to_json
from course_utils.measuring.recorded import key, read_folder
from course_utils.run import TrainingRun
from course_utils.teaching.check_cells import cells_to_run

EXERCISES = Path(__file__).resolve().parents[2] / "exercises" / "06_recomputation.ipynb"


# Files


@cache
def recording() -> dict[str, Any]:
    """A run's recording, with every kind of part."""
    run = TrainingRun("tiny-gpt", 2, 64, "fp32", attention="eager")
    measured = to_json(thinned(simulate(run), points=12))
    measured["allocations"] = measured["allocations"][:4]
    return {
        "task": key(run, 2),
        "kind": "run",
        "status": "measured",
        "torch": "2.13.0",
        "date": "2026-11-21",
        "commit": "abc",
        "steps": 2,
        "detail": "",
        "device": {"name": "NVIDIA H200", "capability": [9, 0], "memory": 1, "driver": "580"},
        "parts": {
            "counters": {"allocated": 5000, "reserved": 6000, "driver": 7000, "phases": {}},
            "measured": measured | {"losses": [8.5, 8.25]},
        },
    }


@many(100, 5_000)
@given(data=st.data())
def test_a_recording_is_read_or_refused_by_its_line(data: st.DataObject, tmp_path_factory: Any) -> None:
    folder = tmp_path_factory.getbasetemp() / "recordings"
    folder.mkdir(exist_ok=True)
    file = folder / "gpu.jsonl"
    file.unlink(missing_ok=True)
    append(file, recording())
    content, _ = broken(data.draw, {"schema": 1, **recording()})
    with file.open("ab") as lines:
        lines.write(bytes_of(data.draw, json.dumps(content)) + data.draw(st.sampled_from([b"", b"\n"])))
    try:
        found = read_folder(folder)
    except ValueError as refused:
        assert names(str(refused), "gpu.jsonl, line 2"), refused
    else:
        assert found[0].measurement().peak == recording_peak()
    before = file.read_bytes().partition(b"\n")[0]
    repair(file)
    assert file.read_bytes().endswith(b"\n")
    assert file.read_bytes().partition(b"\n")[0] == before


def recording_peak() -> int:
    return sum(recording()["parts"]["measured"]["breakdown"][0].values())


@many(60, 2_500)
@given(data=st.data())
def test_a_notebook_that_is_handed_in_has_cells_to_run_or_a_remark(
    data: st.DataObject, tmp_path_factory: Any
) -> None:
    handed_in = tmp_path_factory.getbasetemp() / "work.ipynb"
    content, _ = broken(data.draw, exercises(), most=4)
    handed_in.write_bytes(bytes_of(data.draw, json.dumps(content)))
    try:
        cells, _ = cells_to_run(handed_in)
    except ValueError as problem:
        assert str(problem).startswith(("is ", "has "))
    else:
        assert all(isinstance(cell["source"], str) for cell in cells) and json.dumps(cells).encode()
        assert {cell["exercise"][:2] for cell in cells if "exercise" in cell} == {"06"}


@cache
def exercises() -> Any:
    return json.loads(EXERCISES.read_text(encoding="utf-8"))


# Controls


OFFERED = {control.name: control.values for control in CONTROLS}


@many(60, 2_000)
@given(data=st.data())
def test_controls_show_a_run_or_say_why_not(data: st.DataObject) -> None:
    chosen = {
        name: data.draw(st.sampled_from(values))
        for name, values in OFFERED.items()
        if data.draw(st.booleans())
    }
    if data.draw(st.booleans()):
        name = data.draw(st.sampled_from([*OFFERED, "batch", "", "\ud800"]))
        chosen[name] = data.draw(st.sampled_from(ODD))
    try:
        drawn = dashboard(chosen)
    except ValueError as refused:
        assert len(str(refused)) > 20, refused
        return
    assert drawn.breakdown.total == sum(drawn.breakdown.values()) and drawn.verdict and drawn.stack.html
    assert drawn.run == TrainingRun(**chosen_of(drawn.run))


def chosen_of(run: TrainingRun) -> dict[str, Any]:
    return {name: getattr(run, name) for name in vars(run)}


TEXTS = st.one_of(st.text(max_size=12), st.sampled_from([*map(str, ODD[:8]), *OFFERED, "%ff", "a=b&c"]))


@many(40, 1_000)
@given(
    fragment=st.dictionaries(st.one_of(st.sampled_from(list(OFFERED)), TEXTS), TEXTS, max_size=4), raw=TEXTS
)
def test_a_link_to_the_explorer_is_followed_as_far_as_it_can_be(fragment: dict[str, str], raw: str) -> None:
    for text in (raw, "#" + "&".join(f"{name}={value}" for name, value in fragment.items())):
        found = json.loads(linked(text))
        assert all(len(words) > 20 for words in found["refused"])
        assert set(found["chosen"]) == set(OFFERED) and link(json.dumps(found["chosen"])) is not None
    shown = json.loads(draw(json.dumps({**json.loads(linked(""))["chosen"], **fragment})))
    assert "refused" in shown or shown["total"] > 0
