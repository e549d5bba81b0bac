"""Tables and figures of what GPUs recorded, here of a GPU that is made up, whose errors are known."""

import json
import lzma
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from engine import simulate

from course_utils.allocator.counters import counted
from course_utils.allocator.replay import replay
from course_utils.allocator.snapshots import snapshot_of
from course_utils.authoring.pages import gpu_page
from course_utils.breakdown import KINDS
from course_utils.estimating import workspaces
from course_utils.evidence.gpu import (
    GPU_TABLES,
    WANTED,
    gpu_allocator_tables,
    gpu_hardware_tables,
    gpu_live_tables,
    gpu_published_tables,
    gpu_tables,
    gpu_times_tables,
    runs_on_gpus,
    verdict,
)
from course_utils.evidence.history import packed, unpacked
from course_utils.evidence.tasks import EXPANDABLE, MOST_SEQUENCES, sized
from course_utils.gpus import GPUS
from course_utils.lessons.shared.recorded_times import TOPICS, recorded_times
from course_utils.measuring import recorded
from course_utils.measuring.recorded import COMPARISONS, key, read_folder, spread
from course_utils.measuring.recording_file import append
from course_utils.run import PRECISIONS, TrainingRun
from course_utils.units import GB, MB, MiB

RUNS = [TrainingRun("tiny-gpt", 2, 64), TrainingRun("tiny-llama", 4, 256), TrainingRun("tiny-gpt", 8, 128)]
WORKSPACES = 3 * MiB


def line(task: str, kind: str, parts: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """What `record` would have left of a task on a GPU that is made up."""
    name = changes.pop("device", "NVIDIA H200")
    device = {"name": name, "capability": [9, 0], "memory": 1, "driver": "580"}
    return {
        "task": task,
        "kind": kind,
        "status": "measured",
        "device": device,
        "torch": "2.13.0+cu130",
        "date": "2026-11-21",
        "commit": "abc",
        "steps": 2,
        "detail": "",
        "parts": parts,
    } | changes


TENSORS = {
    "parameters": 400 * MB,
    "gradients": 300 * MB,
    "optimizer_states": 800 * MB,
    "activations": 500 * MB,
}
BLOCKS = 100 * MB
"""What is made up here: the tensors at the peak, and what the allocator takes beyond them."""

TENSORS = TENSORS | {"workspaces": WORKSPACES}
KNOWN = 2000 * MB + BLOCKS + WORKSPACES


def run_line(run: TrainingRun, off: float = 0.0, kinds_off: int = 0, **changes: Any) -> dict[str, Any]:
    """A run whose counted peak is `off` percent above all that is named.

    Its tracked activations are larger by `kinds_off` bytes than the simulated ones, and its estimate lacks
    20 MB of them.
    """
    counted = round(KNOWN * (1 + off / 100))
    reserved = 3 * GB
    estimated = TENSORS | {"activations": 480 * MB}
    parts = {
        "counters": {"allocated": counted, "reserved": reserved, "phases": {"backward": counted, "clip": 5}},
        "measured": {"breakdown": [TENSORS | {"activations": 500 * MB + kinds_off}, "backward", "peak"]},
        "estimate": {"total": 1980 * MB + WORKSPACES, "by_kind": estimated},
        "formula": {"total": 1970 * MB},
        "simulated": {
            "breakdown": [TENSORS, "backward", "peak"],
            "allocated": KNOWN,
            "reserved": reserved + 15 * MB,
            "phase_peaks": {
                "forward": [{"activations": 7}, "forward", ""],
                "backward": [TENSORS, "backward", ""],
            },
        },
    }
    return line(key(run, 2), "run", parts, **changes)


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Ship these lines and no others."""

    def ship(*lines: dict[str, Any]) -> None:
        for content in lines:
            append(tmp_path / "gpu.jsonl", content)
        monkeypatch.setattr(recorded, "_gpu_recordings", lambda: read_folder(tmp_path))

    return ship


def rows(tables: Any, name: str) -> dict[Any, tuple[Any, ...]]:
    """The rows of the table of that name, by their first cell."""
    return {row[0]: row[1:] for table in tables for row in table.rows if table.name == name}


# Estimate and simulation


def test_differences_that_were_planted_are_found_with_their_sign(shipped: Any) -> None:
    shipped(*(run_line(run, off) for run, off in zip(RUNS, (0.0, 1.0, -0.4), strict=True)))
    found = rows(gpu_tables(), "gpu")
    count, exact, signed, below, low, high, median, largest, _, kept = found["simulation and blocks"]
    assert (count, exact) == (3, 1)
    assert signed == pytest.approx(0.0, abs=1e-4)
    assert below == pytest.approx(100 / 3)
    assert (low, high) == pytest.approx((1 / 1.01, 1 / 0.996), abs=1e-6)
    assert median == pytest.approx(0.4016, abs=0.001) and largest == pytest.approx(0.990, abs=0.001)
    assert kept == "no: median"
    # Without blocks the simulation says too little by them, the estimate by 20 MB more, the closed form by
    # another 10 MB
    for by, said in (("simulation", 2000), ("estimate", 1980), ("closed form", 1970)):
        assert found[by][2] == pytest.approx(100 * ((said * MB + WORKSPACES) / KNOWN - 1))
    assert found["reserved"][2] == pytest.approx(0.5) and found["reserved"][-1] == "yes"


def test_a_bound_that_is_not_kept_is_named(shipped: Any) -> None:
    shipped(*(run_line(run, off) for run, off in zip(RUNS, (0.1, 2.0, 0.1), strict=True)))
    assert rows(gpu_tables(), "gpu")["simulation and blocks"][-1] == "no: largest"
    assert verdict((0.6, 1.6), (0.5, 1.5)) == "no: median and largest"
    assert verdict((0.5, 1.5), (0.5, 1.5)) == "yes"
    assert WANTED["simulation and blocks"] == (0.3, 1.0) and WANTED["reserved"][0] == 1.0


def test_a_kind_that_is_off_is_named_and_phases_that_both_know_show_what_is_beyond_the_tensors(
    shipped: Any,
) -> None:
    shipped(run_line(RUNS[0], kinds_off=5120))
    table = next(table for table in gpu_tables() if table.name == "gpu_by_kind")
    simulated = {row[0]: row for row in table.rows if row[1] == "simulation"}
    estimated = {row[0]: row for row in table.rows if row[1] == "estimate"}
    assert list(simulated) == [kind for kind in KINDS if kind != "workspaces"]
    assert {kind for kind, row in simulated.items() if row[2] == 0} == {"activations"}
    assert {kind for kind, row in simulated.items() if row[3] == 1} == {"activations"}
    assert simulated["activations"][4] == pytest.approx(-100 * 5120 / KNOWN)
    assert estimated["activations"][4] == pytest.approx(-100 * (20 * MB + 5120) / KNOWN)
    found = rows(gpu_tables(), "gpu_by_phase")
    assert list(found) == ["backward"] and found["backward"][1] == BLOCKS


def test_the_furthest_off_comes_first_and_only_the_newest_of_a_run_counts(shipped: Any) -> None:
    later = run_line(RUNS[0], 1.2, date="2026-12-01")
    shipped(run_line(RUNS[0], 50.0), run_line(RUNS[1], 0.3), later)
    table = next(table for table in gpu_tables() if table.name == "gpu_runs")
    assert [row[0] for row in table.rows] == [RUNS[0].code(), RUNS[1].code()]
    assert table.rows[0][5] == pytest.approx(-1.186, abs=0.01) and table.rows[0][-1] == round(0.012 * KNOWN)


def test_a_gpu_that_stood_for_a_smaller_card_is_left_out(shipped: Any) -> None:
    shipped(run_line(RUNS[0]), run_line(RUNS[1], 40.0, device="NVIDIA H200 as T4-16GB"))
    assert rows(gpu_tables(), "gpu")["estimate"][0] == 1
    assert not recorded.recordings("H200") == recorded.recordings("H200 as T4-16GB") != ()


# The allocator


def history_line(environment: dict[str, str], spoiled: bool = False) -> dict[str, Any]:
    replayed = replay(simulate(RUNS[0]), expandable_segments=bool(environment))
    snapshot = snapshot_of(replayed)
    if spoiled:
        taken = next(entry for entry in snapshot["device_traces"][0] if entry["action"] == "segment_alloc")
        segment = next(part for part in snapshot["segments"] if part["address"] == taken["addr"])
        taken["size"] += 2 * MiB
        segment["total_size"] += 2 * MiB
    part = {"history": packed(snapshot), "steps": [(len(replayed), replayed.reserved[-1])]}
    return line("history of a run, default settings", "history", {"history": part}, environment=environment)


@pytest.mark.parametrize(
    "content",
    ["", None, {}, {"entries": [["alloc"], [512, 512], [0], [0]]}, {"entries": [["alloc"], [512]]}],
    ids=["empty", "nothing", "no entries", "columns of two lengths", "too few columns"],
)
def test_a_damaged_history_is_refused(content: Any) -> None:
    with pytest.raises(ValueError, match="this allocation history is damaged"):
        unpacked(content)


def test_the_replay_is_made_anew_and_the_agreement_stated_by_setting(shipped: Any) -> None:
    shipped(history_line({}), history_line(EXPANDABLE) | {"task": "history of another run, expandable"})
    [table] = gpu_allocator_tables()
    (_, default, moments, equal, steps, _, gap), (_, expandable, *_) = table.rows
    assert (default, expandable) == ("default", "expandable segments")
    assert moments == equal != 0 and steps == "1 of 1" and gap == 0
    shipped_as = lzma.compress(json.dumps(history_line({})["parts"]["history"]).encode(), preset=9)
    assert len(shipped_as) < 8 * int(moments)  # bytes for each allocation and free
    assert table.notes[0].startswith("default: 1 of 1 histories equal throughout")
    shipped(history_line({}, spoiled=True) | {"date": "2026-12-01"})
    [table] = gpu_allocator_tables()
    gaps = {row[0]: row[-1] for row in table.rows}
    assert -2 * MiB in gaps.values() and table.notes[0].startswith("default: 0 of 1 histories equal")


# Times


STEPS = {"none": 100.0, "selective": 105.0, "full": 130.0}


def times_line(topic: str = "recomputation") -> dict[str, Any]:
    variants: list[dict[str, Any]] = [
        {"label": label, "step_ms": spread([time, time - 1, time + 1])} for label, time in STEPS.items()
    ]
    refused = {"label": "x", "refused": "no x"}
    return line(f"times of {topic}", "times", {"times": {"variants": [*variants, refused]}})


def test_recorded_times_have_a_table_a_figure_and_words_with_their_spread(shipped: Any) -> None:
    shipped(times_line())
    found = recorded_times("recomputation")
    assert "full: 130.0 (half of 3 repetitions within 129.5 to 130.5), 1.300 times the first" in found.words
    assert "x: no x" in found.words and "NVIDIA H200, 2026-11-21" in found.words
    assert "A step with full takes 1.30 times as long as with none" in found.figures[0].alt
    assert found._repr_html_().startswith("<img")
    assert [row[-1] for row in gpu_times_tables()[0].rows] == ["1.000", "1.050", "1.300", ""]
    assert found.milliseconds == STEPS
    assert spread([7.0]) == {"median": 7, "q1": 7, "q3": 7, "n": 1}


def kernels_line(seq_len: int, eager: float, flash: float) -> dict[str, Any]:
    kernels: list[dict[str, Any]] = []
    for name, ms in (("eager", eager), ("flash", flash)):
        times = {"forward": [ms, ms], "backward": [2 * ms, 2 * ms]}
        kernels.append({"kernel": name, "seq_len": seq_len, "milliseconds": times})
    refused = {"kernel": "cudnn", "seq_len": seq_len, "refused": "RuntimeError: none"}
    return line(f"attention alone at s={seq_len}", "kernels", {"kernels": {"kernels": [*kernels, refused]}})


def test_attention_is_shown_over_the_length_of_the_sequence(shipped: Any) -> None:
    shipped(kernels_line(4096, 16.0, 2.0), kernels_line(1024, 1.0, 0.5))
    found = recorded_times("attention")
    assert found.words.splitlines() == [
        "Eager attention takes 8.0 times as long as flash at s = 4,096",
        "Eager attention takes 2.0 times as long as flash at s = 1,024",
    ]
    assert "eager" in found.figures[0].alt and "flash" in found.figures[0].alt


@pytest.mark.parametrize("topic", TOPICS)
def test_what_is_not_recorded_waits_and_says_for_which_command(shipped: Any, topic: str) -> None:
    shipped()
    found = recorded_times(topic)
    assert found.figures == () and f"Times on a GPU ({topic}): none are recorded yet" in str(found)
    assert "course_utils record" in found._repr_html_()
    with pytest.raises(ValueError, match="did you mean 'precision'"):
        recorded_times("precisoin")


# Comparisons sized to a card


@pytest.mark.parametrize("topic", COMPARISONS)
@pytest.mark.parametrize("card", [GPUS["T4-16GB"], GPUS["A100-80GB"]], ids=str)
def test_every_variant_of_a_comparison_fits_and_trains_the_same_batch(topic: str, card: Any) -> None:
    from course_utils.planning.twin import fits, unsupported

    runs = [run for run in sized(topic, card.room, card.capability).values() if isinstance(run, TrainingRun)]
    assert len(runs) >= 2 and len({run.global_batch for run in runs}) == 1
    assert all(fits(run, card.room) and not unsupported(run, card.capability) for run in runs)
    if card.memory > 40 * GB:
        assert runs[0].global_batch == MOST_SEQUENCES


def test_an_old_card_is_told_which_precisions_it_lacks() -> None:
    found = sized("precision", GPUS["T4-16GB"].room, (7, 5))
    assert [label for label, run in found.items() if isinstance(run, TrainingRun)] == ["fp32", "amp-fp16"]
    assert "bf16" in str(found["amp-bf16"]) and set(found) < set(PRECISIONS)
    with pytest.raises(ValueError, match="not even one sequence"):
        sized("optimizer", GB, (8, 0))


# Lessons on a GPU, and the page


def test_lessons_say_what_passed_how_long_it_took_and_what_was_not_live(shipped: Any) -> None:
    part = {"seconds": 41.5, "cells": 30, "live": 7, "not_live": ["needs 134.5 GB, a card has 15.0 GB free"]}
    shipped(
        line("live: notebooks/01.ipynb", "notebook", {"notebook": part}, device="NVIDIA H200 as T4-16GB"),
        line(
            "live: notebooks/02.ipynb", "notebook", {"notebook": part}, status="failed", detail="1 cells fail"
        ),
        line("out of memory in a cell with demo", "cells", {"cells": {"times": 100}}),
        line("live: notebooks/03.ipynb", "notebook", {"notebook": part}) | {"jobs": 3},
    )
    tables = gpu_live_tables()
    first, second, _ = tables[0].rows
    assert tables[0].notes == ("Other lessons and runs took memory of the same card at the same time.",)
    assert first[1:6] == (
        "notebooks/01.ipynb",
        "all 30 cells",
        41.5,
        7,
        "needs 134.5 GB, a card has 15.0 GB free",
    )
    assert second[2] == "failed" and second[-1] == "1 cells fail"
    assert tables[1].rows[0][1:4] == ("out of memory in a cell with demo", "measured", 100)


def test_the_page_says_that_it_waits_and_with_recordings_shows_them(shipped: Any) -> None:
    shipped()
    tables = [table for made in GPU_TABLES.values() for table in made()]
    assert all("No recording of this kind from a real GPU exists yet" in table.markdown() for table in tables)
    for table in tables:
        assert "course_utils record --out" in table.markdown()
        assert table.page() in gpu_page()
    shipped(run_line(RUNS[0], 0.2), times_line())
    assert "simulation and blocks" in gpu_page() and gpu_page().count("exists yet") == 4


def test_published_steps_are_compared_by_the_moment_that_was_published_and_the_readmes_come_first(
    shipped: Any,
) -> None:
    live, ten = "rasbt-gpt124m-00-orig-live", "rasbt-gpt124m-00-orig"
    moments = {"start": [1, 1], "peak": [1000, 2000], "end": [100, 2000]}
    said = moments | {"peak": [990, 2020], "end": [100, 2000]}
    parts = {f"said {name}": said for name in (live, ten)}
    parts |= {f"counted {name}": moments for name in (live, ten)}
    failed = {"said ao-vitb-adam-torch": said, "counted ao-vitb-adam-torch": {"error": "RuntimeError: none"}}
    shipped(line("published: x", "published", parts | failed))
    [table] = gpu_published_tables()
    first, second = table.rows
    assert first[0] == ten and first[4:] == (990, 1000, 2000, pytest.approx(-1.0), pytest.approx(1.0))
    assert second[0] == live and second[4:] == (100, 100, 2000, 0.0, 0.0)
    assert table.notes[-1] == "Not counted: ao-vitb-adam-torch. RuntimeError: none."
    assert "2 steps" in table.notes[0] and "For 1 of them the simulation equals" in table.notes[0]


def test_what_no_simulation_sees_is_listed_where_there_is_any(shipped: Any) -> None:
    scratch = {"gelu": {"scratch": 0}, "sum": {"scratch": 512}, "x": {"refused": ""}}
    operations = [{"operation": name} | found for name, found in scratch.items()]
    shipped(
        line("context", "context", {"context": {"context": 500 * MB, "readings": []}}),
        line("workspaces", "workspaces", {"workspaces": {"kept_after": {}, "together": WORKSPACES}}),
        line("scratch", "scratch", {"scratch": {"operations": operations}}),
    )
    [table] = gpu_hardware_tables()
    assert [row[2] for row in table.rows] == [500 * MB, WORKSPACES, 512]


def test_times_that_were_taken_while_the_cpu_was_busy_say_so(shipped: Any) -> None:
    shipped(times_line() | {"jobs": 15}, times_line("precision"))
    [table] = gpu_times_tables()
    assert len(table.notes) == 1 and "up to 14 others used the CPU" in table.notes[0]
    assert "up to 14 others" in recorded_times("recomputation").words
    assert "others" not in recorded_times("precision").words


def test_the_shipped_recordings_keep_every_bound_that_is_wanted() -> None:
    found = rows(gpu_tables(), "gpu")
    assert list(found) == list(WANTED)
    kept = {by: row[-1] for by, row in found.items()}
    # The estimate has no blocks: with them it keeps its bounds (the next test)
    assert kept == {
        "closed form": "",
        "estimate": "no: largest",
        "simulation": "",
        "simulation and blocks": "yes",
        "reserved": "yes",
    }
    assert all(row[0] > 60 for row in found.values())


def test_the_estimate_in_blocks_keeps_the_bounds_of_the_simulation(monkeypatch: pytest.MonkeyPatch) -> None:
    """The estimate's own allocations in the allocator's model, by the rules of the torch that recorded."""
    monkeypatch.setattr(workspaces, "installed_torch", lambda: (2, 11))
    allocated = []
    reserved = []
    for item in [run for run in runs_on_gpus() if "TransformerConfig" not in run.recording.task][::3]:
        run: TrainingRun = eval(item.recording.task.rpartition(" steps=")[0], {"TrainingRun": TrainingRun})
        if not run.lora_rank:  # its estimate is not unrolled tensor by tensor
            found = counted(run.replace(card=item.recording.parts["simulated"]["card"]))
            allocated.append(abs(100 * (found.allocated / item.allocated - 1)))
            reserved.append(abs(100 * (found.reserved / item.counted["reserved"] - 1)))
    assert len(allocated) >= 20
    assert median(allocated) <= 0.3 and max(allocated) <= 1.0 and median(reserved) <= 1.0


def test_the_driver_laid_most_segments_below_all_earlier_ones_as_lesson_18_says() -> None:
    below = []
    for item in recorded.newest("history"):
        entries = unpacked(item.parts["history"]["history"])["device_traces"][0]
        addresses = [entry["addr"] for entry in entries if entry["action"] == "segment_alloc"]
        below += [address < min(addresses[:place]) for place, address in enumerate(addresses) if place]
    assert len(below) > 1000 and sum(below) > 0.6 * len(below)


def test_the_page_of_evidence_says_what_the_recordings_say() -> None:
    """The row of each kind of prediction, and the counts in the text below the table."""
    text = (Path(__file__).parent.parent / "docs" / "evidence.md").read_text(encoding="utf-8")
    found = rows(gpu_tables(), "gpu")
    for by, (count, exact, *_, middle, largest, _, _) in found.items():
        assert f"| {by} | {count} | {exact} | {middle:.3f} % | {largest:.2f} % |" in text
    runs, _, *_, middle, largest, _, _ = found["simulation"]
    readme = " ".join((Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8").split())
    assert f"an NVIDIA H200 ran {runs} of the course's own" in readme
    assert f"the simulation's median error is {middle:.3f} %, the largest {largest:.1f} %" in readme
    off = [row[-2] for row in gpu_published_tables()[0].rows]
    exact = sum(one == 0 for one in off)
    assert f"ran {len(off)} of the published steps\n  again, {exact} of them to the byte" in text
    for _, by, exact_runs, *_ in gpu_tables()[1].rows:
        if by == "simulation":
            assert exact_runs == runs
    assert all(row[2] == row[3] for row in gpu_allocator_tables()[0].rows)
    assert [row[3] for row in gpu_live_tables()[1].rows if row[3]] == 5 * [100]
