"""Lesson 07: answers to its exercises, the cut that it draws, and the recordings that it shows."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from checking import Answers, JudgedAnswers
from engine import simulate
from torch import nn
from torch.nn import functional as F

from course_utils.interactive.course_files import ROOT
from course_utils.lessons.shared.block_picture import draw_block
from course_utils.lessons.shared.compiled_trace import compiled_trace
from course_utils.lessons.shared.living_block import Choices, ExampleBlock, living_block
from course_utils.lessons.shared.recorded_front import PROVENANCE
from course_utils.lessons.torch_compile import checks as lesson_07
from course_utils.lessons.torch_compile.figures import draw_cuts
from course_utils.lessons.torch_compile.partition import partition
from course_utils.lessons.torch_compile.recorded import WAYS
from course_utils.units import round_up
from course_utils.watching.on_gpu import on_new_gpu

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
# the picture of a compiled block

IN_PIECES = {"norm": "LayerNorm, in single operations", "mlp": "GELU, in single operations"}


@pytest.mark.parametrize(
    "choices",
    [
        Choices(2, 64, autocast=True),
        Choices(2, 64, "eager", **IN_PIECES),
        Choices(1, 32, mlp="SwiGLU of 8/3·h"),
    ],
)
def test_the_picture_of_a_compiled_block_has_each_byte_that_hooks_find(choices: Choices) -> None:
    dtype = torch.float32 if choices.autocast else torch.bfloat16
    kept: dict[Any, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.setdefault(tensor.untyped_storage(), tensor.detach())
        return tensor.detach()

    with on_new_gpu(), torch.autocast("cuda", torch.bfloat16, enabled=choices.autocast):
        parts = (choices.attention, choices.dropout, choices.norm, choices.mlp)
        block = ExampleBlock(768, 12, *parts).to("cuda", dtype)
        x = torch.empty(
            choices.micro_batch, choices.seq_len, 768, device="cuda", dtype=dtype, requires_grad=True
        )
        torch.compile(lambda: None)  # tries a small step, without the hooks
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            traced = compiled_trace(block, x)
        weights = list(block.parameters())
    copies = 2 * sum(one.numel() for one in weights if one.ndim == 2) if choices.autocast else 0
    own = [one.untyped_storage() for one in weights]
    found = sum(storage.nbytes() for storage in kept if storage not in own) - copies
    assert traced.kept == found


def test_the_picture_of_a_compiled_block_has_what_a_block_of_a_step_keeps() -> None:
    choices = Choices(2, 64, autocast=True, compile=True)
    run = choices.run()
    assert run is not None
    two, three = (replace(run.model, layers=layers, vocab=512) for layers in (2, 3))
    less, more = (simulate(run.replace(model=model)).moments["end of forward"] for model in (two, three))
    copies = 2 * 12 * run.model.hidden**2  # of weights, which a compiled step keeps as activations
    kept = [made.bytes for step in choices.traced().operations for made in step.makes if made.kept]
    assert sum(map(round_up, kept)) == more["activations"] - less["activations"] - copies


def test_a_compiled_kernel_writes_one_tensor_for_several_operators() -> None:
    traced = Choices(2, 64, **IN_PIECES, compile=True).traced()
    found = [(step.module, step.name, [*step.reads]) for step in traced.operations]
    assert found[2:5] == [
        ("qkv", "linear layer", [1]),
        ("", "flash attention", [2]),
        ("out", "linear layer", [3]),
    ]
    assert found[7] == ("mlp.1", "product + power + addition + tanh", [6])
    assert [made.dtype for made in traced.operations[-1].makes] == ["bf16", "bool"]  # the sum, and its mask


def test_the_living_block_compiles_or_says_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = living_block(attention="flash", seq_len=128, mlp="GELU, in single operations")
    eager = shown.message
    shown.controls["compile"].value = True
    assert "By the compiler's graph, the block keeps <b>6.70 MB</b>" in shown.message
    monkeypatch.setattr("course_utils.lessons.shared.living_block.unavailable", lambda card: "no Windows")
    shown.controls["seq_len"].value = 256
    shown.controls["seq_len"].value = 128
    assert shown.message == f"It cannot be compiled here (no Windows), so it is eager. {eager}"


def test_a_block_that_torch_cannot_compile_is_not_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda block, **choices: block)
    with pytest.raises(ValueError, match="compiles nothing here"):
        draw_block(torch.relu, torch.ones(4, requires_grad=True), compile=True)


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
        assert last[way]["device"] in PROVENANCE and last[way]["torch"].split("+")[0] in PROVENANCE
