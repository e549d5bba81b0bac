"""Snapshots: nothing in a file is run, a history replays as it was, and torch's own tools read ours."""

import copy
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
from engine import GPT, shallow, simulate
from torch.cuda import _memory_viz

from course_utils import TrainingRun
from course_utils.allocator.policy import CachingAllocator
from course_utils.allocator.replay import Replay, replay
from course_utils.allocator.snapshots import compare_with_gpu, read_snapshot, save_snapshot, snapshot_of
from course_utils.recording.histories import packed, unpacked
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
    """A history in which two free blocks of 8 MiB tie: the one at the lower address is used, as torch's allocator does.

    Two segments of 20 MiB lie at `first` and `second`, each with two tensors of 8 MiB. The first tensor of both is
    freed, and another of 8 MiB comes. Where it lies decides whether 16 MiB have room later.
    """
    low = min(first, second)
    other = first + second - low
    actions = [
        ("segment_alloc", first, 20), ("alloc", first, 8), ("alloc", first + 8 * MiB, 8),
        ("segment_alloc", second, 20), ("alloc", second, 8), ("alloc", second + 8 * MiB, 8),
        ("free_completed", first, 8), ("free_completed", second, 8), ("alloc", low, 8),
        ("free_completed", other + 8 * MiB, 8), ("alloc", other, 16),
    ]  # fmt: skip
    trace = [{"action": action, "addr": addr, "size": mib * MiB, "stream": 0} for action, addr, mib in actions]
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
    with pytest.raises(ValueError, match="does not begin at the beginning: it accounts for"):
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
    path, target = tmp_path / "a.pickle", tmp_path / "written"
    inside = {"segments": [Malice(target)], "device_traces": []}
    for content in (Malice(target), inside, {"segments": [], "device_traces": [], "path": Path("x")}):
        path.write_bytes(pickle.dumps(content))
        with pytest.raises(ValueError, match="a memory snapshot never needs"):
            read_snapshot(path)
        assert not target.exists()
    os.system(f"touch {target}")
    assert target.exists(), "the command that the test refuses would have worked"


@pytest.mark.parametrize(("content", "words"), [
    (b"", "no memory snapshot, or a damaged one"), (b"PK\x03\x04", "no memory snapshot, or a damaged one"),
    (pickle.dumps({"segments": [], "device_traces": []})[:-3], "a damaged one"),
    (pickle.dumps([1, 2]), "two lists, 'segments' and 'device_traces'"),
    (pickle.dumps({"segments": [], "device_traces": 5}), "two lists, 'segments' and 'device_traces'"),
])  # fmt: skip
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
    assert report.count("cudaMalloc(") == sum(call.action == "segment_alloc" for call in replayed.driver_calls)
    assert report.count("\ndel ") == sum(request.bytes < 0 for request in replayed.requests)
    _memory_viz.compare(snapshot["segments"][:2], snapshot["segments"], format_flamegraph=unchanged)
    assert "only_before = []" in capsys.readouterr().out
    for plot in (_memory_viz.trace_plot, _memory_viz.segment_plot):
        assert "<html" in plot(copy.deepcopy(snapshot)).lower()


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
