"""Snapshots: nothing in a file is run, a history replays as it was, and torch's own tools read ours."""

import copy
import os
import pickle
import pickletools
from pathlib import Path
from typing import Any

import pytest
from engine import GPT, shallow, simulate
from torch.cuda import _memory_viz

from course_utils import TrainingRun, networks
from course_utils.allocator.replay import Replay, replay
from course_utils.allocator.snapshots import compare_with_gpu, read_snapshot, save_snapshot, snapshot_of
from course_utils.evidence.history import packed, unpacked
from course_utils.units import MiB

RUN = TrainingRun(shallow(GPT, 2), micro_batch=4, seq_len=256, precision="amp-bf16", attention="flash")
CHOICES = ({}, {"expandable_segments": True}, {"max_split_size_mb": 40, "roundup_power2_divisions": 8})


@pytest.fixture(scope="module")
def replayed() -> Replay:
    return replay(simulate(RUN))


@pytest.mark.parametrize("choices", CHOICES, ids=str)
def test_a_history_replays_to_the_same_bytes_and_another_policy_is_noticed(choices, tmp_path):
    ours = replay(simulate(RUN), **choices)
    snapshot = read_snapshot(save_snapshot(ours, tmp_path / "step.pickle"))
    agreement = compare_with_gpu(snapshot)
    assert agreement.exact and agreement.first_difference is None
    assert list(agreement.replayed) == list(agreement.real) == list(ours.reserved)
    assert repr(agreement).startswith(f"equal at every one of {len(ours):,} moments")
    values_in_force = {"expandable_segments": "expandable_segments" not in choices, "max_split_size": -1}
    snapshot["allocator_settings"] = values_in_force
    agreement = compare_with_gpu(snapshot)
    assert not agreement.exact and agreement.first_difference and "differs by up to" in repr(agreement)


def tied_history(first: int, second: int) -> dict[str, Any]:
    """A history in which two free blocks of 8 MiB tie: the lower address is used, as in torch's allocator.

    Two segments of 20 MiB lie at `first` and `second`, each with two tensors of 8 MiB. The first tensor of
    both is freed, and another of 8 MiB comes. Where it lies decides whether 16 MiB have room later.
    """
    low = min(first, second)
    other = first + second - low
    actions = [
        ("segment_alloc", first, 20), ("alloc", first, 8), ("alloc", first + 8 * MiB, 8),
        ("segment_alloc", second, 20), ("alloc", second, 8), ("alloc", second + 8 * MiB, 8),
        ("free_completed", first, 8), ("free_completed", second, 8), ("alloc", low, 8),
        ("free_completed", other + 8 * MiB, 8), ("alloc", other, 16),
    ]  # fmt: skip
    trace = [
        {"action": action, "addr": addr, "size": mib * MiB, "stream": 0} for action, addr, mib in actions
    ]
    return {"segments": [{"device": 0, "total_size": 20 * MiB}] * 2, "device_traces": [trace]}


@pytest.mark.parametrize(("first", "second"), [(64 * MiB, 128 * MiB), (128 * MiB, 64 * MiB)])
def test_segments_lie_where_the_driver_placed_them(first, second):
    snapshot = tied_history(first, second)
    assert compare_with_gpu(snapshot).exact
    assert compare_with_gpu(unpacked(packed(snapshot))).exact
    for entry in snapshot["device_traces"][0]:
        if entry["action"] == "segment_alloc":
            entry["addr"] = None  # as in older recordings
    assert compare_with_gpu(snapshot).exact == (first < second)


class Malice:
    """Unpickling this would write a file."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self):
        return os.system, (f"touch {self.target}",)


def test_a_pickle_that_asks_for_anything_is_refused_and_runs_nothing(tmp_path):
    path = tmp_path / "a.pickle"
    target = tmp_path / "written"
    inside = {"segments": [Malice(target)], "device_traces": []}
    for content in (Malice(target), inside, {"segments": [], "device_traces": [], "path": Path("x")}):
        path.write_bytes(pickle.dumps(content))
        with pytest.raises(ValueError, match="a memory snapshot never needs"):
            read_snapshot(path)
        assert not target.exists()
    os.system(f"touch {target}")
    assert target.exists(), "the command that the test refuses would have worked"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"PK\x03\x04", "not a memory snapshot, or it is damaged"),
        (pickle.dumps({"segments": [], "device_traces": 5}), "two lists, 'segments' and 'device_traces'"),
    ],
)
def test_what_is_no_snapshot_is_refused_in_words(content, words, tmp_path):
    (tmp_path / "snapshot.pickle").write_bytes(content)
    with pytest.raises(ValueError, match=words):
        read_snapshot(tmp_path / "snapshot.pickle")


def unchanged(lines: str) -> str:
    """In the place of torch's flame graph, which it would fetch from the network."""
    return lines


def test_torch_sums_up_lists_compares_and_draws(replayed, capsys):
    snapshot = snapshot_of(replayed)
    report = _memory_viz.segsum(snapshot)
    assert f"total_reserved: {_memory_viz.Bytes(replayed.reserved[-1])}" in report
    assert f"total_allocated: {_memory_viz.Bytes(replayed.requested[-1])}" in report
    report = _memory_viz.trace(snapshot)
    taken = sum(call.action == "segment_alloc" for call in replayed.driver_calls)
    assert report.count("cudaMalloc(") == taken
    assert report.count("\ndel ") == sum(request.bytes < 0 for request in replayed.requests)
    _memory_viz.compare(snapshot["segments"][:2], snapshot["segments"], format_flamegraph=unchanged)
    assert "only_before = []" in capsys.readouterr().out
    for tool in (_memory_viz.segments, _memory_viz.memory):
        lines = tool(snapshot, format_flamegraph=unchanged).splitlines()
        assert sum(int(line.rpartition(" ")[2]) for line in lines) == replayed.reserved[-1]
        assert any("parameters" in line for line in lines)


def left_alive(entries: list[dict[str, Any]]) -> int:
    signs = {"alloc": 1, "free_completed": -1}
    return sum(signs.get(entry["action"], 0) * entry["size"] for entry in entries)


def test_a_history_may_begin_with_a_step_and_leave_out_small_tensors_but_keeps_its_state(tmp_path, capsys):
    measured = simulate(RUN)
    ours = replay(measured)
    begins = next(mark.event for mark in measured.timeline.marks if mark.step == 2)
    whole = snapshot_of(ours)
    later = read_snapshot(save_snapshot(ours, tmp_path / "later.pickle", since=2))
    said = capsys.readouterr().out
    assert said.startswith(f"Left out of {len(ours):,} allocations and frees: {begins:,} before step 2, 0 of")
    large = snapshot_of(ours, least="100 KB")
    assert later["segments"] == large["segments"] == whole["segments"]
    entries, of_step_2, of_large = (part["device_traces"][0] for part in (whole, later, large))
    assert [one["addr"] for one in of_step_2] == [one["addr"] for one in entries[-len(of_step_2) :]]
    assert sum(entry["action"] in ("alloc", "free_completed") for entry in of_step_2) == len(ours) - begins
    (of_both,) = snapshot_of(ours, since=2, least="100 KB")["device_traces"]
    for part in (of_large, of_both):
        assert min(entry["size"] for entry in part if entry["action"] == "free_completed") >= 10**5
    assert left_alive(of_large) == left_alive(entries) == ours.requested[-1]
    assert left_alive(of_both) == ours.requested[-1] - ours.requested[begins - 1]
    for plot in (_memory_viz.trace_plot, _memory_viz.segment_plot, _memory_viz.trace, _memory_viz.segsum):
        assert plot(copy.deepcopy(later))
    with pytest.raises(ValueError, match="since=3: this replay has steps 1 to 2"):
        snapshot_of(ours, since=3)
    with pytest.raises(ValueError, match="not an amount of memory"):
        snapshot_of(ours, least="little")


VIEWERS_OPCODES = """
PROTO APPEND APPENDS LIST TUPLE NEWFALSE NEWTRUE NONE BINGET BININT BININT1 BININT2 EMPTY_DICT EMPTY_LIST
FRAME LONG1 LONG_BINGET MARK MEMOIZE BINPUT LONG_BINPUT SETITEMS SETITEM DICT SHORT_BINUNICODE BINUNICODE STOP
EMPTY_TUPLE TUPLE1 TUPLE2 TUPLE3 BINFLOAT
"""
"""What torch/utils/viz/MemoryViz.js unpickles, of protocols 2 to 4."""


def test_torchs_page_knows_every_opcode_and_each_line_of_code_is_a_frame(replayed, tmp_path):
    path = save_snapshot(replayed, tmp_path / "a.pickle")
    found = {opcode.name: argument for opcode, argument, _ in pickletools.genops(path.read_bytes())}
    assert set(found) <= set(VIEWERS_OPCODES.split()) and found["PROTO"] == 4
    entries = read_snapshot(path)["device_traces"][0]
    allocated = [one for one in entries if one["action"] == "alloc" and "blocks.1.mlp.up" in str(one)]
    in_forward = [one for one in allocated if "step 2 forward" in str(one)]
    (entry,) = (one for one in in_forward if one["frames"][0]["name"] == "addmm")
    made_by, kind, line = entry["frames"]
    assert made_by == {"name": "addmm", "filename": "blocks.1.mlp.up", "line": 0}
    assert kind == {"name": "activations", "filename": "step 2 forward", "line": 0}
    source = Path(networks.__file__).with_name(line["filename"]).read_text(encoding="utf-8").splitlines()
    assert source[line["line"] - 1].strip() == line["name"] and "self.up(x)" in line["name"]
