"""Lesson 12: answers to its exercises, traces and the reasons for each event, the picture, and the player."""

import json
from typing import Any

import pytest
import torch
from checking import Answers, JudgedAnswers
from edits import edited
from lesson_source import printed_with
from matplotlib.text import Text

from course_utils.allocator.replay import replay
from course_utils.evidence.history import recorded_twice
from course_utils.interactive.course_files import ROOT
from course_utils.lessons.allocator.figures import segments_figure, snapshot_panels
from course_utils.lessons.allocator.traces import RULES, reasons, trace_of
from course_utils.lessons.allocator.widget import allocator_player
from course_utils.measuring.recorded import newest
from course_utils.units import MiB


# --------------------------------------------------------------------------------------------------
# 12.1: peaks
def peaks(make: Any, draw: Any, batches: list[int]) -> dict[int, Any]:
    """The most ordinary loop: output and loss have names, and live through backward."""
    found = {}
    for batch in batches:
        model = make()
        optimizer = torch.optim.AdamW(model.parameters())
        torch.cuda.reset_peak_memory_stats()
        for _ in range(2):
            output = model(draw(batch))
            loss = output.square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        found[batch] = torch.cuda.max_memory_allocated()
    return found


PEAKS = Answers(
    right=peaks,
    wrong=[
        (
            edited(peaks, "torch.cuda.reset_peak_memory_stats()", "pass"),
            "one maximum since the process began",
        ),
        (edited(peaks, "max_memory_allocated", "memory_allocated"), "weights and states"),
        (edited(peaks, "max_memory_allocated", "max_memory_reserved"), "keeps what earlier trainings took"),
    ],
)


# --------------------------------------------------------------------------------------------------
# 12.2: fragmented
def fragmented(capacity: int) -> list[tuple[int, str]]:
    """Tensors of 2 MiB fill the GPU, one of each segment's ten stays."""
    events = [(2 * MiB, f"t{index}") for index in range(capacity // (2 * MiB))]
    events += [(-2 * MiB, name) for index, (_, name) in enumerate(events) if index % 10]
    return [*events, (20 * MiB, "late")]


FRAGMENTED = Answers(
    right=fragmented,
    wrong=[
        (edited(fragmented, "(20 * MiB,", "(18 * MiB,"), "everything fits"),
        (edited(fragmented, "if index % 10]", "if index % 2]"), "not more than half"),
        (edited(fragmented, "(20 * MiB,", "(capacity,"), "for more than all that is free"),
    ],
)


# --------------------------------------------------------------------------------------------------
# 12.3: embed
@torch.no_grad()
def embed(model: Any, documents: list[Any]) -> list[Any]:
    """Room for all features first."""
    sizes = [len(tokens) for tokens in documents]
    features = torch.empty(sum(sizes), model[-1].out_features, device=documents[0].device).split(sizes)
    for room, tokens in zip(features, documents, strict=True):
        room.copy_(model(tokens))
    return list(features)


def with_graphs(model: Any, documents: list[Any]) -> list[Any]:
    return [model(tokens) for tokens in documents]


@torch.no_grad()
def from_behind(model: Any, documents: list[Any]) -> list[Any]:
    return [model(tokens) for tokens in documents[::-1]][::-1]


@torch.no_grad()
def unsorted_again(model: Any, documents: list[Any]) -> list[Any]:
    return [model(tokens) for tokens in sorted(documents, key=len, reverse=True)]


EMBED = Answers(
    right=embed,
    wrong=[
        (torch.no_grad()(with_graphs), "too small for the next document"),
        (from_behind, "you rely on their order"),
        (unsorted_again, "in the order that you made them"),
    ],
)


# --------------------------------------------------------------------------------------------------
# 12.4: leak
def living(snapshot: Any) -> dict[str, int]:
    """Bytes of the living blocks by the line that made them."""
    found: dict[str, int] = {}
    for segment in snapshot["segments"]:
        for block in segment["blocks"]:
            if block["state"] == "active_allocated":
                line = block["frames"][-1]["name"]
                found[line] = found.get(line, 0) + block["size"]
    return found


def leak(snapshots: Any) -> str | None:
    """The line whose bytes have grown every time."""
    sizes = [living(snapshot) for snapshot in snapshots]
    for line in sizes[-1]:
        curve = [each.get(line, 0) for each in sizes]
        if sorted(set(curve)) == curve:
            return line
    return None


def largest(snapshots: Any) -> str:
    held = living(snapshots[-1])
    return max(held, key=lambda line: held[line])


LEAK = Answers(
    right=leak,
    wrong=[
        (largest, "You find a leak where there is none"),
        (edited(leak, "if sorted(set(curve)) == curve", "if curve[-1] > curve[0]"), "from *each* snapshot"),
        (edited(leak, "return line", "pass"), "You find nothing"),
    ],
)


# --------------------------------------------------------------------------------------------------
# 12.5: allocator
class Plain:
    """Blocks as lists of [size, name], in segments of both pools; each class below has one mistake."""

    def __init__(self) -> None:
        self.segments: list[list[list[Any]]] = []
        self.pools: list[bool] = []

    reserved = property(lambda self: sum(size for blocks in self.segments for size, _ in blocks))
    allocated = property(lambda self: sum(size for blocks in self.segments for size, name in blocks if name))

    def segment(self, size: int) -> int:
        if size <= MiB:
            return 2 * MiB
        return 20 * MiB if size < 10 * MiB else -(-size // (2 * MiB)) * 2 * MiB

    def choose(self, free: list[list[Any]]) -> list[Any]:
        return min(free, key=lambda one: one[0])

    def allocate(self, name: Any, size: int) -> None:
        size = -(-size // 512) * 512
        small = size <= MiB
        pool = [blocks for blocks, kind in zip(self.segments, self.pools, strict=True) if kind == small]
        free = [one for blocks in pool for one in blocks if one[1] is None and one[0] >= size]
        if not free:
            self.segments.append([[self.segment(size), None]])
            self.pools.append(small)
            free = self.segments[-1]
        chosen = self.choose(free)
        chosen[1] = name
        if chosen[0] - size >= (512 if small else MiB + 512):
            blocks = next(blocks for blocks in self.segments if any(one is chosen for one in blocks))
            at = next(at for at, one in enumerate(blocks) if one is chosen)
            blocks.insert(at + 1, [chosen[0] - size, None])
            chosen[0] = size

    def free(self, name: Any) -> None:
        for blocks in self.segments:
            for at, one in enumerate(blocks):
                if one[1] == name:
                    one[1] = None
                    self.join(blocks, at)
                    self.join(blocks, at - 1)
                    return

    def join(self, blocks: list[list[Any]], at: int) -> None:
        """Join a free block with a free one behind it."""
        if 0 <= at < len(blocks) - 1 and blocks[at][1] is blocks[at + 1][1] is None:
            blocks[at][0] += blocks.pop(at + 1)[0]


ALLOCATOR = Answers(
    right=Plain,
    wrong=[
        (edited(Plain, "min(free, key=lambda one: one[0])", "free[0]"), "Best fit, not first fit"),
        (edited(Plain, "self.join(blocks, at - 1)", "pass"), "the free neighbor before"),
        (edited(Plain, "MiB + 512)", "512)"), "You always split"),
    ],
)


ANSWERS = {"12.1": PEAKS, "12.2": FRAGMENTED, "12.3": EMBED, "12.4": LEAK, "12.5": ALLOCATOR}


class TestAnswers(JudgedAnswers):
    answers = ANSWERS


# --------------------------------------------------------------------------------------------------
# The lesson's own code
def test_the_rules_show_each_rule_and_every_event_has_its_reason() -> None:
    told = reasons(replay(trace_of(RULES)))
    assert len(told) == len(RULES.split())
    for words in (
        "the driver gives 20 MiB",
        "the driver gives 2 MiB",
        "which it fills",
        "too small for a block",
        "whole segment is empty",
    ):
        assert any(words in line for line in told), words
    assert "best fit: a free block of 16 MiB is there, and 12 MiB stay free" in told[1]
    assert "joined" not in told[5] and "joined with free neighbors" in told[8]
    told = reasons(replay(trace_of("a=20 -a b=30"), 40 * MiB))
    assert "20 MiB of empty segments go back to the driver, then no free block holds it" in told[-1]


def test_a_picture_has_every_block_and_says_so_in_words() -> None:
    figure = segments_figure(replay(trace_of("a=4 b=18 -a")), 2)
    drawn: Any = figure.axes[0].containers
    bars = [(bar.get_label(), bar[0].get_x() / MiB, bar[0].get_width() / MiB) for bar in drawn]
    named = [bar for bar in bars if not bar[0].startswith("_")]  # the outline of a segment has no name
    assert named == [("a", 0, 4), ("free", 4, 16), ("b", 0, 18)]
    assert {"a 4 MiB", "free 16 MiB", "b 18 MiB"} < {text.get_text() for text in figure.findobj(Text)}
    assert "Segment 1, 20 MiB: a 4 MiB, free 16 MiB. Segment 2, 18 MiB: b 18 MiB." in figure.alt


def test_panels_know_tensors_by_their_bytes_and_join_the_others() -> None:
    sizes = [(2, "active_allocated"), (3, "active_allocated"), (5, "active_allocated"), (6, "inactive")]
    blocks = [{"size": size * MiB, "requested_size": size * MiB - 9, "state": state} for size, state in sizes]
    small = {"total_size": 2 * MiB, "active_size": 0, "blocks": [{"size": 2 * MiB, "state": "inactive"}]}
    snapshot = {"segments": [small, {"total_size": 16 * MiB, "active_size": 10 * MiB, "blocks": blocks}]}
    names = {5 * MiB - 9: ("logits", "temporaries")}
    figure = snapshot_panels({"then": snapshot, "now": snapshot}, names, "A title", 3 * MiB)
    panel = "Segment 1, 16 MiB: others 5 MiB, logits 5 MiB, free 6 MiB."
    assert figure.alt == f"A title. then. {panel} now. {panel}"
    with pytest.raises(ValueError, match="segment of 20 MiB"):
        snapshot_panels({"now": snapshot}, names, "A title", 20 * MiB)


def test_the_lesson_states_what_an_h200_counted() -> None:
    recorded = ROOT / "tests" / "gpu" / "recorded" / "limits.jsonl"
    row = json.loads(recorded.read_text(encoding="utf-8").splitlines()[0])
    assert row["run"] == "TrainingRun('gpt2', micro_batch=8, seq_len=512)"
    lesson = (ROOT / "notebooks" / "src" / "12_allocator_and_fragmentation.py").read_text(encoding="utf-8")
    assert f"fails, works = {row['too_small']:_}, {row['works']:_}" in lesson
    assert f"# recorded: {row['device']}, torch {row['torch'][:4]}, {row['date']}" in lesson


CELLS = ("import TrainingRun, on_gpu", "def train(", "import predict")


def test_an_order_of_tensors_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COURSE_SOURCE", "simulated")
    for order, said in {
        '"LssLL" * 4': "Right.",
        '"L" * 12 + "s" * 8': "Right.",
        '"sLLLs" * 4': "Not yet: CUDA out of memory",
        '"s" * 20': "Not yet: twelve L",
    }.items():
        told = printed_with("12", 'order = "LsLsL" * 4', f"order = {order}", *CELLS)
        assert told.splitlines()[-1].startswith(said), order


STATES_FIRST = """for weight in model.parameters():
        weight.grad = torch.zeros_like(weight)
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 3e-4
    optimizer.zero_grad()
"""


def test_states_before_the_first_forward_are_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COURSE_SOURCE", "simulated")
    for answer, said in {
        STATES_FIRST: "Right: ",
        STATES_FIRST.replace("0.0", "0.1"): "Not yet: a weight or the learning rate has changed.",
        STATES_FIRST.replace("3e-4", "0.0"): "Not yet: a weight or the learning rate has changed.",
        "optimizer.step()": "Not yet: Adam has no states.",
    }.items():
        told = printed_with("12", "pass  # gradients of zero", f"{answer}  # ", *CELLS)
        assert told.splitlines()[-1].startswith(said), answer


def test_an_h200_reserved_with_expandable_segments_what_its_other_history_says() -> None:
    found = recorded_twice()
    assert len(found) == 12 and all(one.device == "NVIDIA H200" for one in newest("history"))
    for twice in found.values():
        trace = [one for one in twice.snapshot["device_traces"][0] if "segment" not in one["action"]]
        sizes = [(one["size"] * (1 if one["action"] == "alloc" else -1), one["addr"]) for one in trace]
        assert replay(sizes, expandable_segments=True).peak_reserved == twice.expandable < twice.without
    for run, without, expandable in (
        ("'gpt2', micro_batch=8, seq_len=1024, accumulation_steps=2", 10_452_205_568, 10_244_587_520),
        ("'gpt2', micro_batch=4, seq_len=512, attention='eager'", 4_915_724_288, 4_848_615_424),
    ):
        assert found[f"TrainingRun({run})"][1:] == (without, expandable)  # docs/gpu_results.md


def test_the_player_plays_what_is_typed() -> None:
    player = allocator_player(event=1)
    assert "Event 1 of 13: a asks for 4 MiB" in player.message
    player.controls["trace"].value = "a=30 b=12"
    assert player.controls["event"].max == 2 and len(player.replayed) == 2
    player.controls["gpu"].value = "40 MiB"
    assert player.controls["event"].max == 1 and "The next event fails:" in player.message
    player.controls["segments"].value = "expandable segments"
    assert player.replayed.choices == {"expandable_segments": True}
    for trace, words in {
        "a": "is not an event",
        "": "no requests",
        "a=100": "first request already fails",
    }.items():
        player.controls["trace"].value = trace
        assert "Not possible" in player.message and words in player.message
