"""Text for a terminal: its width, and its colors."""

import json
import re

import pytest

from course_utils.breakdown import MemoryBreakdown
from course_utils.cli import main as front_door
from course_utils.measurement import Allocation, explained
from course_utils.terminal import stack, within
from course_utils.units import GB, MB

COLOR = re.compile(r"\x1b\[[0-9;]*m")


@pytest.mark.parametrize("width", [20, 40, 80])
def test_no_line_is_wider_than_the_terminal_and_no_word_is_lost(width):
    text = "a title of several words, which is long\n\n  · row     its last column has words, too\n"
    wrapped = within(text, width)
    assert max(map(len, wrapped.split("\n"))) <= width
    assert wrapped.split() == text.split()


def test_a_line_continues_below_its_last_column():
    assert within("  · row     one two three", 24).split("\n") == ["  · row     one two", "            three"]
    assert within("one two three", 8).split("\n") == ["one two", "  three"]


@pytest.mark.parametrize("width", [30, 60, 80])
def test_a_stack_has_a_bar_for_each_kind_as_long_as_its_bytes(width):
    sizes = {"parameters": 3 * GB, "activations": 6 * GB, "inputs": 0}
    drawn = stack(MemoryBreakdown(sizes, label="gpt2"), width).split("\n")
    bars = {line.split("  ")[0]: line.count("█") for line in drawn}
    assert max(map(len, drawn)) <= width and "inputs" not in bars
    assert bars["total"] == 0 and abs(bars["activations"] - 2 * bars["parameters"]) <= 1
    assert (bars["activations"] > 0) == (width > 40)
    painted = stack(MemoryBreakdown(sizes, label="gpt2"), width, colors=True)
    assert COLOR.sub("", painted).split("\n") == drawn and within(painted, width) == painted
    assert len(set(COLOR.findall(painted))) == (1 + 2 if width > 30 else 0)


def test_a_table_of_tensors_becomes_short_lines_where_it_is_too_wide():
    item = Allocation(
        bytes=3 * MB,
        kind="activations",
        phase="forward",
        step=1,
        module="GPT.blocks.0",
        operation="addmm",
        shape=(8, 1024),
        dtype="float32",
        line="train.py:12  x = self.up(x)",
        born=0,
        died=None,
    )
    table = explained([item], 5, "title")
    assert table.to_text(200) == repr(table)
    narrow = table.to_text(72)
    assert max(map(len, narrow.split("\n"))) <= 72
    for word in ("3.00 MB", "activations: addmm in GPT.blocks.0", "(8, 1024) float32", "train.py:12"):
        assert word in narrow


@pytest.mark.parametrize(
    "words",
    [
        ["estimate", "gpt2", "--micro-batch", "8"],
        ["compare", "gpt2", "--micro-batch", "1", "--seq-len", "64"],
        ["fit", "gpt2", "--gpu", "T4-16GB", "--global-batch", "8"],
        ["doctor"],
        ["progress"],
        ["find", "reserved", "memory"],
        ["--help"],
        ["fit", "--help"],
    ],
)
def test_every_command_keeps_to_80_columns(words, monkeypatch, capsys):
    pytest.importorskip("torch")
    monkeypatch.setenv("COLUMNS", "80")
    front_door.main([*words] if "--help" in words else [*words, "--here"])
    printed = capsys.readouterr().out
    assert printed and [line for line in printed.split("\n") if len(line) > 80] == []
    assert not COLOR.search(printed)  # it is no terminal


def test_an_estimate_and_a_comparison_as_json(capsys):
    pytest.importorskip("torch")
    words = ["gpt2", "--micro-batch", "1", "--seq-len", "64", "--json", "--here"]
    assert front_door.main(["estimate", *words]) == 0
    estimated = json.loads(capsys.readouterr().out)
    assert front_door.main(["compare", *words]) == 0
    compared = json.loads(capsys.readouterr().out)
    assert estimated["run"] == compared["run"] and estimated["estimate"] == compared["estimate"]
    assert estimated["counters"]["tensors"] == compared["measurement"]["peak"]
