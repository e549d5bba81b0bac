"""Lesson 07: answers to its exercises, the cut that it draws, and the recordings that it shows."""

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from checking import Answers, JudgedAnswers
from torch import nn
from torch.nn import functional as F

from course_utils.interactive.course_files import ROOT
from course_utils.lessons.torch_compile import checks as lesson_07
from course_utils.lessons.torch_compile.figures import draw_cuts
from course_utils.lessons.torch_compile.partition import partition
from course_utils.lessons.torch_compile.recorded import FRONT, WAYS, WHERE

# --------------------------------------------------------------------------------------------------
# exercises


def bytes_each(*each: int) -> Callable[[int], dict[str, int]]:
    return lambda n: dict(zip(lesson_07.EXPRESSIONS, (one * n for one in each), strict=True))


EXPRESSIONS = Answers(
    right=bytes_each(2, 4, 2, 5, 6),
    wrong=[
        (bytes_each(4, 6, 8, 8, 6), "From how many tensors can both be computed"),
        (bytes_each(2, 4, 4, 5, 6), "is there a place where one is"),
        (bytes_each(2, 4, 2, 4, 6), "the same random numbers again"),
        (bytes_each(2, 4, 2, 5, 4), "the matrix product would have to run again"),
        (bytes_each(1, 2, 1, 2, 3), "A bf16 number takes two"),
    ],
)


def with_where(x: torch.Tensor, limit: float) -> torch.Tensor:
    wide = torch.tanh(x / limit) * limit
    half = torch.where(wide.abs().max() > limit / 2, 0.5, 1.0)
    return wide * half * torch.sigmoid(x)


def element_by_element(x: torch.Tensor, limit: float) -> torch.Tensor:
    wide = torch.tanh(x / limit) * limit
    return torch.where(wide.abs() > limit / 2, wide * 0.5, wide) * torch.sigmoid(x)


def without_a_test(x: torch.Tensor, limit: float) -> torch.Tensor:
    return torch.tanh(x / limit) * limit * torch.sigmoid(x)


def asks_item(x: torch.Tensor, limit: float) -> torch.Tensor:
    wide = torch.tanh(x / limit) * limit
    large = wide.abs().max().item() > limit / 2
    return wide * (0.5 if large else 1.0) * torch.sigmoid(x)


ONE_GRAPH = Answers(
    right=with_where,
    wrong=[
        (asks_item, "Something still looks at a value in Python"),
        (element_by_element, "only where its largest value"),
        (without_a_test, "The result is off above the limit"),
        (lambda x, limit: with_where(x, limit).detach(), "No gradient can flow"),
    ],
)

Front = dict[str, tuple[int, float]]


def fastest(front: Front, room: int) -> str | None:
    return min((ms, name) for name, (peak, ms) in {"": (0, 1e9), **front}.items() if peak <= room)[1] or None


CHOOSE = Answers(
    right=fastest,
    wrong=[
        (lambda front, room: min(front, key=lambda name: front[name][1]), "nothing of"),
        (lambda front, room: min(front, key=lambda name: front[name][0]), "nothing of"),
        (lambda front, room: fastest(front, room - 1), "something of"),
        (lambda front, room: fastest(front, room) and min(front, key=front.__getitem__), "smallest peak"),
    ],
)

SIZES = {"float32": 4, "bfloat16": 2, "bool": 1}


def reads(code: str, sizes: dict[str, int] = SIZES, reuse: bool = True, frees: bool = True) -> int:
    live: dict[str, int] = {}
    peak = 0
    for line in code.splitlines():
        words = re.findall(r"\w+", line)
        if "empty_strided_cuda" in line:
            shape = [int(each) for each in re.findall(r"\d+", line.split("((")[1].split(")")[0])]
            live[words[0]] = sizes[words[-1]] * torch.Size(shape).numel()
        elif "# reuse" in line and reuse:
            live[words[0]] = live.pop(words[1])
        elif words[0] == "del" and frees:
            live.pop(words[1], None)
        peak = max(peak, sum(live.values()))
    return peak


WRAPPER = Answers(
    right=reads,
    wrong=[
        (lambda code: reads(code, frees=False), "You add up all buffers"),
        (lambda code: max(lesson_07._sizes(code)), "the largest buffer alone"),
        (lambda code: reads(code, dict.fromkeys(SIZES, 4)), "How many bytes has a number of"),
        (lambda code: reads(code, reuse=False), "nothing is freed"),
    ],
)


def decorated(backend: Any) -> Any:
    return torch.compile(lambda head, x, y: F.cross_entropy(head(x).float(), y), backend=backend)


def without_the_head(backend: Any) -> Any:
    inner = torch.compile(lambda logits, y: F.cross_entropy(logits.float(), y), backend=backend)
    return lambda head, x, y: inner(head(x).float(), y)


def added_up(backend: Any) -> Any:
    def loss(head: nn.Linear, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(head(x).float(), y, reduction="sum")

    return torch.compile(loss, backend=backend)


LOSS = Answers(
    right=decorated,
    wrong=[
        (without_the_head, "Is the head compiled together with the loss"),
        (added_up, "the mean over all tokens"),
        (lambda backend: lesson_07.eager_loss, "Nothing was compiled"),
        (
            lambda backend: torch.compile(lambda head, x, y: F.cross_entropy(head(x), y), backend=backend),
            "Is the cross-entropy in fp32",
        ),
    ],
)

ANSWERS = {"07.1": EXPRESSIONS, "07.2": ONE_GRAPH, "07.3": CHOOSE, "07.4": WRAPPER, "07.5": LOSS}


class TestAnswers(JudgedAnswers):
    answers = ANSWERS


# --------------------------------------------------------------------------------------------------
# the cut


def swiglu(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    return (F.silu(x @ gate) * (x @ up)) @ down


def swiglu_inputs() -> list[torch.Tensor]:
    shapes = ((16, 8), (8, 24), (8, 24), (24, 8))
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize(("compiled", "wide", "again"), [(False, 4, []), (True, 3, ["SiLU"])])
def test_a_swiglu_is_cut_where_autograd_or_the_compiler_cuts_it(compiled, wide, again):
    cut = partition(swiglu, *swiglu_inputs(), compiled=compiled)
    assert cut.bytes == 4 * 16 * 8 + wide * 4 * 16 * 24
    assert [cut.nodes[number].name for number in cut.again] == again
    assert cut.nodes[cut.turn].name == "gradient"


def test_the_figure_says_what_the_hooks_count():
    kept = [lesson_07.run(swiglu, swiglu_inputs()), lesson_07.run_compiled(swiglu, swiglu_inputs())]
    weights = 3 * 4 * 8 * 24  # hooks see them, too
    figure = draw_cuts(swiglu, *swiglu_inputs())
    head, *rows = figure.rows
    for column, ran in zip((2, 3), kept, strict=True):
        drawn = sum(int(row[1].replace(",", "")) for row in rows if row[column] == "kept")
        assert drawn == ran.kept - weights, head[column]


# --------------------------------------------------------------------------------------------------
# recordings


def rows_of(name: str) -> list[dict[str, Any]]:
    text = (ROOT / "tests" / "gpu" / "recorded" / name).read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def test_what_the_lesson_shows_of_the_compiled_gpt_was_counted():
    last = {row["way"]: row for row in rows_of("compiled_step.jsonl") if row["step"] == 4}
    ways = ("eager", "blocks", "default", "checkpoint", "dropout", "cudagraphs")
    for shown, way in zip(WAYS.values(), ways, strict=True):
        assert shown == {key: last[way][key] for key in shown}
        assert last[way]["device"] in WHERE and last[way]["torch"].split("+")[0] in WHERE


def test_the_front_was_counted_and_timed():
    rows = {row["label"]: row for row in rows_of("turns.jsonl") if row["group"] == "front"}
    labels = {
        "eager": "as it is",
        "eager, each block again": "recompute=full",
        "compiled": "compiled=model",
        "compiled, each block again": "recompute=full, compiled=model",
        "compiled, products kept": "recompute=selective, compiled=model",
        "compiled blocks": "compiled=blocks",
    }
    for name, shown in FRONT.items():
        row = rows[labels.get(name, f"compiled=model, {name}")]
        counted = {"kept": row["kept"], "peak": row["peak_allocated"], "ms": row["step_ms"]["median"]}
        assert shown == counted
        assert (row["device"] in WHERE, row["date"] in WHERE) == (True, True)
