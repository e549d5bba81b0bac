"""`record --verify`: what the course ships is taken in, and a file with any one fault is not."""

import copy
import gzip
import json
import lzma
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from course_utils.cli.main import main
from course_utils.measuring.recording_file import FOLDER, read_lines
from course_utils.recording import recorder, verifying
from course_utils.recording.verifying import names_here, verify

SHIPPED = sorted(FOLDER.glob("*.jsonl.xz"))
RUN = read_lines(FOLDER / "nvidia-h200-as-t4-16gb.jsonl.xz")[0].content
HISTORY = next(
    line.content for line in read_lines(FOLDER / "nvidia-h200.jsonl.xz") if line.content["kind"] == "history"
)
Content = dict[str, Any]


def written(path: Path, *contents: Content) -> Path:
    path.write_text("".join(json.dumps(content) + "\n" for content in contents), encoding="utf-8")
    return path


def changed(change: Callable[[Content], Any], content: Content = RUN) -> Content:
    content = copy.deepcopy(content)
    change(content)
    return content


def test_what_the_course_ships_is_taken_in_and_its_page_says_what_it_is():
    assert len(SHIPPED) == 2
    for path in SHIPPED:
        page, problems = verify(path)
        assert problems == [] and "torch: 2.11.0+cu130" in page and "commit: 2e8623c592a4" in page
        assert "0 differ by more than 5%" in page and len(page.splitlines()) < 40
    assert "81 run measured" in verify(FOLDER / "nvidia-h200.jsonl.xz")[0]


def counters(**new: Any) -> Callable[[Content], Any]:
    return lambda content: content["parts"]["counters"].update(new)


FAULTS: dict[str, tuple[Callable[[Content], Any], str]] = {
    "a task that is not in the list": (
        lambda c: c.update(task="TrainingRun('gpt9') steps=2"),
        "version's list",
    ),
    "a task of another kind": (lambda c: c.update(kind="history"), "version's list"),
    "an unknown status": (lambda c: c.update(status="splendid"), "version's list"),
    "a torch that is no version": (lambda c: c.update(torch="new"), "its torch is 'new'"),
    "a commit that is none": (lambda c: c.update(commit="main"), "its commit is 'main'"),
    "a date written otherwise": (lambda c: c.update(date="26.11.2026"), "its date is '26.11.2026'"),
    "a day that never was": (lambda c: c.update(date="2026-02-30"), "damaged"),
    "no driver": (lambda c: c["device"].pop("driver"), "damaged (KeyError: 'driver')"),
    "a card without memory": (lambda c: c["device"].update(memory="lots"), "no memory in bytes"),
    "negative bytes": (counters(driver=-1), "'counters' holds a value that is not a whole number of bytes"),
    "bytes with a fraction": (lambda c: c["parts"]["estimate"].update(total=1.5), "'estimate' holds a value"),
    "bytes that are true": (
        lambda c: c["parts"]["simulated"].update(allocated=True),
        "'simulated' holds a value",
    ),
    "no number at all": (lambda c: c["parts"].update(times={"step_ms": float("nan")}), "not finite"),
    "more allocated than reserved": (counters(reserved=1), "more allocated than reserved"),
    "more reserved than there is": (counters(reserved=10**12), "than the card's 150,109,880,320 bytes"),
    "published pairs that descend": (
        lambda c: c["parts"].update({"counted x": {"start": [0, 0], "peak": [2, 1]}}),
        "'counted x' has more",
    ),
    "an unknown kind of memory": (
        lambda c: c["parts"]["measured"].update(breakdown=[{"gold": 1}, "", ""]),
        "damaged",
    ),
    "no counters": (lambda c: c["parts"].pop("counters"), "damaged"),
    "parts that are numbers": (lambda c: c["parts"].update(counters=5), "damaged"),
    "a rehearsal": (lambda c: c.update(rehearsal=True), "is a rehearsal"),
    "a home folder": (
        lambda c: c.update(detail="no file /home/ada/x.py"),
        "a path may be in 'no file /home/ada/x.py'",
    ),
    "a folder of Windows": (lambda c: c.update(detail=r"in C:\Users\ada"), "a path may be in"),
    "a path as a key": (lambda c: c["parts"].update({"said /data/secret/x": {}}), "a path may be in"),
    "an address": (lambda c: c.update(detail="ask ada@example.org"), "an e-mail address may be in"),
    "a machine": (
        lambda c: c.update(detail="at 10.1.2.3 and http://box.corp/x"),
        "a network address may be in",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_file_with_one_fault_is_refused_and_the_line_is_named(fault, tmp_path):
    change, said = FAULTS[fault]
    file = written(tmp_path / "gpu.jsonl", HISTORY, changed(change))
    _, problems = verify(file)
    found = [problem for problem in problems if said in problem]
    assert found and all(problem.startswith("gpu.jsonl, line 2: ") for problem in found), problems


def test_without_a_fault_the_same_line_is_taken_in(tmp_path):
    assert verify(written(tmp_path / "gpu.jsonl", RUN))[1] == []


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("gpu.pkl", pickle.dumps(RUN), "not a recording: its name must end"),
        ("gpu.jsonl", pickle.dumps(RUN) + b"\n", "is not JSON"),
        ("gpu.jsonl", b"", "is empty"),
        ("gpu.jsonl", json.dumps(RUN).encode(), "cut off"),
        ("gpu.jsonl", b"{\n", "line 1 is not JSON"),
        ("gpu.jsonl", b"[" * 100_000 + b"\n", "recursion"),
        ("gpu.jsonl", json.dumps({**RUN, "schema": 2}).encode() + b"\n", "of schema 1"),
        ("gpu.jsonl", json.dumps({**RUN, "commit": None}).encode() + b"\n", "no usable 'commit'"),
        ("gpu.jsonl", b"\n" * 2_001, "longer than 2,000 lines"),
        ("gpu.jsonl", b" " * 20_000_001, "at most 20,000,000 bytes"),
        ("gpu.jsonl.gz", b"plain", "Not a gzipped file"),
        # Every process that runs the suite has to make the same bytes: pytest names the cases after them.
        ("gpu.jsonl.gz", gzip.compress(b"x" * 1000, mtime=0)[:-9], "end-of-stream"),
        ("gpu.jsonl.gz", gzip.compress(b" " * 100_001, mtime=0), "at most 100,000 bytes"),
        ("gpu.jsonl.xz", b"plain", "damaged"),
        ("gpu.jsonl.xz", lzma.compress(b" " * 100_001), "at most 100,000 bytes"),
    ],
)
def test_what_cannot_be_read_is_refused_in_one_sentence(name, content, said, tmp_path, monkeypatch):
    monkeypatch.setattr(verifying, "MOST_UNPACKED", 100_000)
    (tmp_path / name).write_bytes(content)
    page, (problem,) = verify(tmp_path / name)
    assert said in problem and page == f"{name} cannot be read: {problem}"


def test_a_file_that_is_not_there_is_refused(tmp_path):
    assert "No such file" in verify(tmp_path / "gpu.jsonl")[1][0]


def history(**new: Any) -> Content:
    columns = {"allocator_settings": {}, "segments": [], "entries": [["alloc"], [512], [0], [1]]} | new
    return changed(lambda content: content["parts"]["history"].update(history=columns), HISTORY)


def test_a_history_is_opened_and_every_entry_is_an_allocation(tmp_path):
    assert verify(written(tmp_path / "gpu.jsonl", history()))[1] == []
    for entries in ([["exec"], [512], [0], [1]], [["alloc"], [-1], [0], [1]], [["alloc"], [None], [0], [1]]):
        (problem,) = verify(written(tmp_path / "gpu.jsonl", history(entries=entries)))[1]
        assert "not an allocation" in problem


def test_a_task_is_settled_once_but_may_fail_before_that_or_be_settled_by_another_commit(tmp_path):
    failed = changed(lambda c: c.update(status="failed", parts={}))
    other = changed(lambda c: c.update(commit="0123456789ab"))
    assert verify(written(tmp_path / "gpu.jsonl", failed, failed, RUN, other))[1] == []
    (problem,) = verify(written(tmp_path / "gpu.jsonl", RUN, other, RUN))[1]
    assert problem == f"{RUN['task']!r} is settled 2 times, not once"


def test_a_file_is_of_one_card_whose_driver_may_be_renewed(tmp_path):
    renewed = changed(lambda c: c["device"].update(driver="590.1"), HISTORY) | {
        "device": {**RUN["device"], "driver": "590.1"}
    }
    page, problems = verify(written(tmp_path / "gpu.jsonl", RUN, renewed))
    assert problems == [] and "driver: 580.159.04, 590.1" in page
    assert verify(written(tmp_path / "gpu.jsonl", RUN, HISTORY))[1] == [
        "it holds results of 2 cards: `record` writes a file for each"
    ]


def test_a_machine_without_nvidia_smi_has_no_driver_to_name(tmp_path):
    nameless = changed(lambda content: content["device"].update(driver=""))
    page, problems = verify(written(tmp_path / "gpu.jsonl", nameless))
    assert problems == [] and "driver: unknown" in page


def test_a_simulation_far_from_the_counter_is_shown_and_not_refused(tmp_path):
    far = changed(lambda c: c["parts"]["simulated"].update(allocated=2 * c["parts"]["counters"]["allocated"]))
    page, problems = verify(written(tmp_path / "gpu.jsonl", far))
    assert problems == []
    assert "1 differ by more than 5%" in page
    assert "+100.0% allocated in TrainingRun('gpt2'" in page


def test_the_names_of_this_machine_and_user_are_looked_for_and_torchs_own_pages_are_public(
    tmp_path, monkeypatch
):
    said = "see https://docs.pytorch.org/docs/stable/notes/cuda.html on wonderbox"
    file = written(tmp_path / "gpu.jsonl", changed(lambda c: c.update(detail=said)))
    assert verify(file)[1] == [] and said in verify(file)[0]
    monkeypatch.setattr(verifying.socket, "gethostname", lambda: "wonderbox.example")
    monkeypatch.setenv("USER", "ada")  # too short to be told from other words
    assert names_here() == {"wonderbox"}
    (problem,) = verify(file, names_here())[1]
    assert "a name of this machine or user may be in" in problem


def test_the_command_prints_the_page_and_exits_with_one_for_a_problem(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(recorder, "names_here", set)
    assert main(["record", "--verify", str(written(tmp_path / "gpu.jsonl", RUN))]) == 0
    assert capsys.readouterr().out.endswith("Problems: 0. It can be taken in.\n")
    assert main(["record", "--verify", str(written(tmp_path / "gpu.jsonl", RUN, RUN))]) == 1
    said = capsys.readouterr().out
    assert "Problems: 1. Do not take it in:\n" in said and said.endswith("is settled 2 times, not once\n")
    assert main(["record"]) == 1 and "or --verify and a file." in capsys.readouterr().err
