"""Snapshots: nothing in a file is run, a history replays as it was, and torch's own tools read ours."""

import copy
import os
import pickle
import pickletools
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from engine import GPT, shallow, simulate
from torch.cuda import _memory_viz

from course_utils import TrainingRun, networks
from course_utils.allocator import snapshots
from course_utils.allocator.policy import CachingAllocator
from course_utils.allocator.replay import Replay, replay
from course_utils.allocator.snapshots import compare_with_gpu, read_snapshot, save_snapshot, snapshot_of
from course_utils.evidence.history import packed, unpacked
from course_utils.units import MiB

RUN = TrainingRun(shallow(GPT, 2), micro_batch=4, seq_len=256, precision="amp-bf16", attention="flash")
CHOICES = (
    {}, {"expandable_segments": True}, {"max_split_size_mb": 40}, {"roundup_power2_divisions": 8},
    {"large_segment_size_mb": 40},
)  # fmt: skip


@pytest.fixture(scope="module")
def replayed() -> Replay:
    return replay(simulate(RUN))


@pytest.mark.parametrize("choices", CHOICES, ids=str)
def test_a_history_replays_to_the_same_bytes(choices, tmp_path):
    ours = replay(simulate(RUN), **choices)
    agreement = compare_with_gpu(read_snapshot(save_snapshot(ours, tmp_path / "step.pickle")))
    assert agreement.exact and agreement.first_difference is None
    assert list(agreement.replayed) == list(agreement.real) == list(ours.reserved)
    assert repr(agreement).startswith(f"equal at every one of {len(ours):,} moments")


def test_another_policy_is_noticed(replayed):
    snapshot = snapshot_of(replayed)
    snapshot["allocator_settings"] = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    agreement = compare_with_gpu(snapshot)
    assert not agreement.exact and agreement.largest_difference < 0 and agreement.first_difference
    assert "differs by up to" in repr(agreement)
    snapshot = snapshot_of(replay(simulate(RUN), max_split_size_mb=40))
    snapshot["allocator_settings"] = {"expandable_segments": False, "max_split_size": 40 * MiB}
    assert compare_with_gpu(snapshot).exact, "settings are also read from the values in force"
    snapshot["allocator_settings"]["max_split_size"] = -1
    assert not compare_with_gpu(snapshot).exact


def test_streams_do_not_share_blocks(replayed):
    snapshot = snapshot_of(replayed)
    for entry in snapshot["device_traces"][0]:
        entry["stream"] = 7
    assert compare_with_gpu(snapshot).exact
    one = {"action": "alloc", "addr": 1, "size": 4 * MiB, "stream": 0}
    other = {"action": "alloc", "addr": 2, "size": 4 * MiB, "stream": 1}
    taken = {"action": "segment_alloc", "addr": 1, "size": 20 * MiB, "stream": 0}
    segments = [{"device": 0, "total_size": 40 * MiB}]
    assert compare_with_gpu({"segments": segments, "device_traces": [[taken, one, taken, other]]}).exact


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


def test_a_segment_is_never_placed_where_another_lies():
    allocator = CachingAllocator()
    allocator.offered = [(20 * MiB, 64 * MiB), (20 * MiB, 70 * MiB), (14 * MiB, 1 << 50)]
    first, second, third, fourth = (allocator.malloc(size * MiB) for size in (8, 20, 14, 30))
    assert (first, third) == (64 * MiB, 1 << 50)
    assert second > first + 20 * MiB and fourth >= third + 14 * MiB


def test_a_history_that_was_cut_off_is_refused(replayed):
    snapshot = snapshot_of(replayed)
    late = copy.deepcopy(snapshot)
    del late["device_traces"][0][:2]
    with pytest.raises(
        ValueError, match="does not start with the program's first allocation: it accounts for"
    ):
        compare_with_gpu(late)
    freed = next(e for e in snapshot["device_traces"][0] if e["action"] == "free_completed")
    orphan = copy.deepcopy(snapshot)
    orphan["device_traces"][0] = [freed]
    with pytest.raises(ValueError, match="whose allocation it does not hold"):
        compare_with_gpu(orphan)


def test_no_history_and_private_pools_are_refused(replayed):
    snapshot = snapshot_of(replayed)
    with pytest.raises(ValueError, match="no history of GPU 1"):
        compare_with_gpu(snapshot, device=1)
    with pytest.raises(ValueError, match="no history of GPU 0"):
        compare_with_gpu(snapshot | {"device_traces": [[]]})
    snapshot["segments"][0]["segment_pool_id"] = (0, 1)
    with pytest.raises(ValueError, match=r"memory pool of its own \(0, 1\)"):
        compare_with_gpu(snapshot)


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
        (b"", "not a memory snapshot, or it is damaged"),
        (b"PK\x03\x04", "not a memory snapshot, or it is damaged"),
        (pickle.dumps({"segments": [], "device_traces": []})[:-3], "or it is damaged"),
        (pickle.dumps([1, 2]), "two lists, 'segments' and 'device_traces'"),
        (pickle.dumps({"segments": [], "device_traces": 5}), "two lists, 'segments' and 'device_traces'"),
    ],
)
def test_what_is_no_snapshot_is_refused_in_words(content, words, tmp_path):
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=words):
        read_snapshot(path)
    with pytest.raises(ValueError, match=r"no file 'none\.pickle'"):
        read_snapshot(tmp_path / "none.pickle")
    with pytest.raises(ValueError, match=r"end in \.pickle"):
        save_snapshot(replay([]), tmp_path / "snapshot.json")


def unchanged(lines: str) -> str:
    """In the place of torch's flame graph, which it would fetch from the network."""
    return lines


def test_torch_sums_up_lists_compares_and_draws(replayed, capsys):
    snapshot = snapshot_of(replayed)
    report = _memory_viz.segsum(snapshot)
    assert f"total_reserved: {_memory_viz.Bytes(replayed.reserved[-1])}" in report
    assert f"total_allocated: {_memory_viz.Bytes(replayed.requested[-1])}" in report
    report = _memory_viz.trace(snapshot)
    assert report.count("cudaMalloc(") == sum(
        call.action == "segment_alloc" for call in replayed.driver_calls
    )
    assert report.count("\ndel ") == sum(request.bytes < 0 for request in replayed.requests)
    _memory_viz.compare(snapshot["segments"][:2], snapshot["segments"], format_flamegraph=unchanged)
    assert "only_before = []" in capsys.readouterr().out
    for plot in (_memory_viz.trace_plot, _memory_viz.segment_plot):
        assert "<html" in plot(copy.deepcopy(snapshot)).lower()


def as_the_viewer_draws(snapshot: dict[str, Any]) -> list[int]:
    """Bytes that torch's page draws as active after each entry: what it cannot see begin was there before."""
    trace = snapshot["device_traces"][0]
    known = set[int]()
    before = 0
    changes = list[int]()
    for entry in trace:
        if entry["action"] == "alloc":
            known.add(entry["addr"])
            changes.append(entry["size"])
        elif entry["action"] == "free_completed":
            before += 0 if entry["addr"] in known else entry["size"]
            known.discard(entry["addr"])
            changes.append(-entry["size"])
    blocks = [block for segment in snapshot["segments"] for block in segment["blocks"]]
    alive = [block for block in blocks if block["state"] == "active_allocated"]
    assert known <= {block["address"] for block in alive}, "what a history leaves alive is in the state"
    before += sum(block["requested_size"] for block in alive if block["address"] not in known)
    return list(accumulate(changes, initial=before))[1:]


def test_a_history_may_begin_with_a_step_and_leave_out_small_tensors_and_the_state_stays_what_it_is(
    tmp_path, capsys
):
    measured = simulate(RUN)
    ours = replay(measured)
    begins = next(mark.event for mark in measured.timeline.marks if mark.step == 2)
    whole = snapshot_of(ours)
    later = read_snapshot(save_snapshot(ours, tmp_path / "later.pickle", since=2))
    assert as_the_viewer_draws(whole) == list(ours.requested)
    assert as_the_viewer_draws(later) == list(ours.requested[begins:])
    said = capsys.readouterr().out
    assert said.startswith(f"Left out of {len(ours):,} allocations and frees: {begins:,} before step 2, 0 of")
    large = snapshot_of(ours, least="100 KB")
    assert later["segments"] == large["segments"] == whole["segments"]
    shown = as_the_viewer_draws(large)
    assert len(shown) < len(ours)
    assert shown[-1] == ours.requested[-1]
    assert 0 <= max(ours.requested) - max(shown) < 10**6
    freed = [entry["size"] for entry in large["device_traces"][0] if entry["action"] == "free_completed"]
    assert min(freed) >= 100_000 > min(-size for size, _ in measured.timeline.changes if size < 0)
    for plot in (_memory_viz.trace_plot, _memory_viz.segment_plot, _memory_viz.trace, _memory_viz.segsum):
        assert plot(copy.deepcopy(later))
    for part in (later, large):
        with pytest.raises(ValueError, match="is incomplete, so its history cannot be replayed: Left out of"):
            compare_with_gpu(part)


@pytest.mark.parametrize(
    ("since", "words"), [(3, "has steps 1 to 2"), (-1, "has steps 1 to 2"), ("2", "has steps")]
)
def test_a_step_that_is_not_there_is_refused(replayed, since, words):
    with pytest.raises(ValueError, match=f"since={since!r}: this replay {words}"):
        snapshot_of(replayed, since)
    with pytest.raises(ValueError, match="this replay knows no steps"):
        snapshot_of(replay([(512, "a")]), since)
    with pytest.raises(ValueError, match="not an amount of memory"):
        snapshot_of(replayed, least="little")


def test_what_would_crash_a_browser_is_refused_and_not_written(replayed, tmp_path, monkeypatch):
    path = save_snapshot(replayed, tmp_path / "a.pickle")
    monkeypatch.setattr(snapshots, "MOST", path.stat().st_size)
    save_snapshot(replayed, path)
    monkeypatch.setattr(snapshots, "MOST", path.stat().st_size - 1)
    with pytest.raises(
        ValueError, match=r"b\.pickle would take .*, and above 1 GB browsers crash: leave out"
    ):
        save_snapshot(replayed, tmp_path / "b.pickle")
    assert not (tmp_path / "b.pickle").exists()


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


def test_giving_back_and_running_out_of_memory_are_in_the_history(replayed):
    tight = replay(simulate(RUN), replayed.peak_reserved - 2 * MiB)
    assert tight.retries and compare_with_gpu(snapshot_of(tight)).exact
    failed = replay(simulate(RUN), replayed.peak_allocated // 2)
    last = snapshot_of(failed)["device_traces"][0][-1]
    assert (last["action"], last["size"]) == ("oom", failed.failure.requested if failed.failure else None)
    assert "raise OutOfMemoryError" in _memory_viz.trace(snapshot_of(failed))


@pytest.mark.parametrize("choices", CHOICES, ids=str)
def test_torch_finds_every_byte_of_the_blocks(choices):
    ours = replay(simulate(RUN), **choices)
    snapshot = snapshot_of(ours)
    for tool in (_memory_viz.segments, _memory_viz.memory):
        lines = tool(snapshot, format_flamegraph=unchanged).splitlines()
        assert sum(int(line.rpartition(" ")[2]) for line in lines) == ours.reserved[-1]
        assert any("parameters" in line for line in lines)
