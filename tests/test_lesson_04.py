"""Lesson 04: answers to its exercises; its modules and pictures have the models' parameters, all of them."""

from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
import torch
from checking import Answers, JudgedAnswers
from lesson_source import names_from_cells, printed_with
from matplotlib.colors import to_hex
from matplotlib.text import Text
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from course_utils.lessons.parameters.counting import GPT2_PAPER, parts_of
from course_utils.lessons.parameters.figures import (
    PART_COLOURS,
    TABLES,
    matrix_rows,
    shares,
    tables,
    to_scale,
)
from course_utils.lessons.parameters.widget import model_builder
from course_utils.models import PRESETS, TransformerConfig

# --------------------------------------------------------------------------------------------------
# 04.1: count


def by_identity(build: Any) -> dict[str, int]:
    """From module to module, on fake tensors, which allocate nothing, though their device is the CPU."""
    with FakeTensorMode():
        network = build()
    parameters = {id(p): p for one in network.modules() for p in one._parameters.values() if p is not None}
    buffers = {id(b): b for one in network.modules() for b in one._buffers.values()}
    return {
        "trained": sum(p.numel() for p in parameters.values() if p.requires_grad),
        "frozen": sum(p.numel() for p in parameters.values() if not p.requires_grad),
        "bytes": sum(one.untyped_storage().nbytes() for one in [*parameters.values(), *buffers.values()]),
    }


def on_meta(build: Any) -> nn.Module:
    with torch.device("meta"):
        return build()


def by_name(build: Any) -> dict[str, int]:
    named = on_meta(build).named_parameters(remove_duplicate=False)
    return by_identity(build) | {"trained": sum(p.numel() for _, p in named if p.requires_grad)}


def as_if_trained(build: Any) -> dict[str, int]:
    return by_identity(build) | {"trained": sum(p.numel() for p in on_meta(build).parameters())}


def as_it_is_saved(build: Any) -> dict[str, int]:
    return by_identity(build) | {"bytes": sum(one.nbytes for one in on_meta(build).state_dict().values())}


COUNT = Answers(
    right=by_identity,
    wrong=[
        (by_name, "with one gradient"),
        (as_if_trained, "Frozen parameters get no gradient"),
        (as_it_is_saved, "A state dict leaves out some"),
    ],
)

# --------------------------------------------------------------------------------------------------
# 04.2: block


class Block(nn.Module):
    """Attention written out, with keys repeated; subclasses have one mistake each."""

    causal = True

    def __init__(self, h: int, heads: int, kv_heads: int, f: int) -> None:
        super().__init__()
        self.width, self.group = h // heads, heads // kv_heads
        self.sizes = [h, self.width * kv_heads, self.width * kv_heads]
        self.norm1 = nn.RMSNorm(h)
        self.norm2 = nn.RMSNorm(h)
        self.qkv = nn.Linear(h, sum(self.sizes), bias=False)
        self.output = nn.Linear(h, h, bias=False)
        self.gate_up = nn.Linear(h, 2 * f, bias=False)
        self.down = nn.Linear(f, h, bias=False)

    def repeated(self, one: torch.Tensor) -> torch.Tensor:
        return one.repeat_interleave(self.group, dim=2)

    def attended(self, x: torch.Tensor) -> torch.Tensor:
        b, s, _ = x.shape
        q, k, v = (part.view(b, s, -1, self.width) for part in self.qkv(x).split(self.sizes, dim=2))
        q, k, v = (one.transpose(1, 2) for one in (q, self.repeated(k), self.repeated(v)))
        scores = q @ k.mT / self.width**0.5
        mask = torch.ones(s, s, dtype=torch.bool).triu(1) & self.causal
        y = scores.masked_fill(mask, float("-inf")).softmax(-1) @ v
        return self.output(y.permute(0, 2, 1, 3).flatten(2))

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x).tensor_split(2, dim=-1)
        return self.down(F.silu(gate) * up)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attended(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class InTurns(Block):
    def repeated(self, one: torch.Tensor) -> torch.Tensor:
        return one.repeat(1, 1, self.group, 1)


class Hurried(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.attended(self.norm1(x)) + self.mlp(self.norm2(x))


class GateAfterUp(Block):
    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        up, gate = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


BLOCK = Answers(
    right=Block,
    wrong=[
        (type("Seeing", (Block,), {"causal": False}), "A token sees the tokens after it"),
        (InTurns, "Yours take turns"),
        (Hurried, "from before attention"),
        (GateAfterUp, "The half with the MLP is off"),
    ],
)

# --------------------------------------------------------------------------------------------------
# 04.3: experts


class Expert(nn.Module):
    def __init__(self, h: int, f: int) -> None:
        super().__init__()
        self.gate = nn.Linear(h, f, bias=False)
        self.up = nn.Linear(h, f, bias=False)
        self.down = nn.Linear(f, h, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class TokenByToken(nn.Module):
    """Slow; subclasses have one mistake each."""

    def __init__(self, h: int, f: int, E: int, chosen: int) -> None:
        super().__init__()
        self.router = nn.Linear(h, E, bias=False)
        self.chosen = chosen
        self.experts = nn.ModuleList(Expert(h, f) for _ in range(E))

    def shares(self, scores: torch.Tensor, top: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
        return top.softmax(-1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = []
        for token in x.flatten(0, -2):
            scores = self.router(token)
            top, where = scores.topk(self.chosen)
            made = torch.stack([self.experts[n](token) for n in where.tolist()])
            rows.append(self.shares(scores, top, where) @ made)
        return torch.stack(rows).view(x.shape)


class OfAll(TokenByToken):
    def shares(self, scores: torch.Tensor, top: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
        return scores.softmax(-1)[where]


class Wasteful(TokenByToken):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        top, where = self.router(x).topk(self.chosen)
        every = torch.stack([expert(x) for expert in self.experts], -2)
        shares = torch.zeros(every.shape[:-1]).scatter(-1, where, top.softmax(-1))
        return (shares[..., None] * every).sum(-2)


class Overwriting(TokenByToken):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, -2)
        top, where = self.router(tokens).topk(self.chosen)
        y = torch.zeros_like(tokens)
        for n, expert in enumerate(self.experts):
            rows, places = (where == n).nonzero(as_tuple=True)
            y[rows] = top.softmax(-1)[rows, places, None] * expert(tokens[rows])
        return y.view(x.shape)


EXPERTS = Answers(
    right=TokenByToken,
    wrong=[
        (OfAll, "do not add up to 1"),
        (Wasteful, "experts compute tokens that are not theirs"),
        (Overwriting, "Only one of a token's experts arrives"),
    ],
)

# --------------------------------------------------------------------------------------------------
# 04.4: read_shapes


def read(shapes: Any) -> dict[str, Any]:
    """From how often each shape occurs."""
    often = {shape: shapes.count(shape) for shape in shapes}
    (h,) = next(shape for shape in often if len(shape) == 1)
    L = (often[(h,)] - 1) // 2
    V = next(shape[0] for shape, times in often.items() if times < L and shape[1:] == (h,))
    f = next(shape[1] for shape in often if len(shape) == 2 and shape[1] != h)
    k = next((shape[0] for shape in often if shape[1:] == (h,) and shape[0] not in (h, f, V)), h)
    return {"hidden": h, "layers": L, "vocab": V, "ffn": f, "kv": k, "tied": often[(V, h)] == 1}


def four_times_as_wide(shapes: Any) -> dict[str, Any]:
    return read(shapes) | {"ffn": 4 * read(shapes)["hidden"]}


def always_narrower(shapes: Any) -> dict[str, Any]:
    sizes = read(shapes)
    known = (sizes["hidden"], sizes["vocab"], sizes["ffn"])
    return sizes | {"kv": next(size for size, *_ in shapes if size not in known)}


READ_SHAPES = Answers(
    right=read,
    wrong=[
        (four_times_as_wide, "it follows from no other size"),
        (always_narrower, "where keys are as wide as queries"),
        (lambda shapes: read(shapes) | {"vocab": max(shapes)[0]}, "need not be the largest size"),
    ],
)


ANSWERS = {"04.1": COUNT, "04.2": BLOCK, "04.3": EXPERTS, "04.4": READ_SHAPES}


class TestAnswers(JudgedAnswers):
    answers = ANSWERS


# --------------------------------------------------------------------------------------------------
# The lesson's own counts and pictures

ODD = replace(PRESETS["tiny-gpt"], name="odd", mlp="swiglu", qkv_bias=False, tied=False)


@pytest.mark.parametrize("model", [PRESETS["gpt2"], PRESETS["mixtral-8x7b"], ODD], ids=str)
def test_parts_add_up(model: TransformerConfig) -> None:
    assert sum(parts_of(model).values()) == model.parameters
    assert ("head" in parts_of(model)) != model.tied
    assert parts_of(model)["norms"] % (2 * model.layers + 1) == 0


@pytest.mark.parametrize("name", ["gpt2-xl", "llama3.2-1b", "llama3-8b", "qwen2.5-0.5b"])
def test_the_lessons_modules_are_the_presets_to_the_unit(name: str) -> None:
    model = PRESETS[name]
    cells = names_from_cells("04", "class GPT", "def swiglu", "class Llama")
    with torch.device("meta"):
        if model.family == "gpt2":
            built = cells["GPT"](model.vocab, model.max_positions, model.hidden, model.layers, model.heads)
        else:
            sizes = (model.vocab, model.hidden, model.layers, model.kv, model.ffn)
            built = cells["Llama"](*sizes, bool(model.qkv_bias))
    counted = sum(parameter.numel() for parameter in built.parameters())
    if model.family == "llama" and model.tied:  # the lesson's module has a head of its own
        counted -= model.vocab * model.hidden
    assert counted == model.parameters


BLOCK_LINE, WORDS_LINE = "block = 0  # write this line", '"V": 50257},  # write the number'


@pytest.mark.parametrize(
    ("line", "said"),
    [("block = 12 * h**2 + 13 * h", ["Right.", "Right."]), ("block = 12 * h**2", ["-9,984.", "-20,800."])],
)
def test_the_learners_count_is_right_to_the_unit_or_told_by_how_much_not(line: str, said: list[str]) -> None:
    printed = printed_with("04", BLOCK_LINE, line, "class GPT").splitlines()
    assert [text.split()[-1] for text in printed] == said
    assert all(("Not yet" in text) == ("Right" not in text) for text in printed)


@pytest.mark.parametrize(
    ("words", "fits"), [(40_478, "4 of 4 rows. Guilty."), (41_000, "3 of 4 rows. Not yet.")]
)
def test_the_case_is_solved_by_a_number_of_words(words: int, fits: str) -> None:
    before = "class GPT", "import predict, reveal", BLOCK_LINE, "paper = {"
    *cleared, third = printed_with("04", WORDS_LINE, f'"V": {words}}},', *before).splitlines()
    assert third.endswith(fits) and all(text.endswith("0 of 4 rows. Cleared.") for text in cleared)


def test_the_paper_is_wrong_by_the_words_that_it_leaves_out() -> None:
    for name, millions in GPT2_PAPER.items():
        assert round((PRESETS[name].parameters - (50257 - 40478) * PRESETS[name].hidden) / 1e6) == millions


def drawn_in(figure: Any, row: int, whole: int) -> dict[str, int]:
    """The parameters that a bar shows by the colors of its parts, which touch, if all of it are `whole`."""
    names = {color: part for part, color in PART_COLOURS.items()}
    bars = [bar for bar in figure.axes[0].patches if int(bar.get_y() + 0.5) == row and bar.get_width()]
    ends = accumulate((bar.get_width() for bar in bars), initial=0)
    assert [bar.get_x() for bar in bars] == pytest.approx([*ends][:-1])
    return {names[to_hex(bar.get_facecolor()).upper()]: round(bar.get_width() * whole) for bar in bars}


def test_shares_draw_every_part_and_say_it() -> None:
    shown = "gpt2", "llama3-8b"
    figure = shares({name: parts_of(name) for name in shown}, "Words are a third of GPT-2")
    for row, name in enumerate(shown):
        assert drawn_in(figure, row, PRESETS[name].parameters) == parts_of(name)
    figure.draw_without_rendering()
    texts = [text.get_text() for text in figure.findobj(Text)]
    assert "31 %" in texts and "llama3-8b: 8.03 B" in texts and "0.04 %" not in texts
    embedding = [row[figure.rows[0].index("embedding")] for row in figure.rows]
    assert embedding == ["embedding", "38,597,376", "525,336,576"] and "8.03 B" in figure.alt


@pytest.mark.parametrize("name", ["gpt2", "gpt2-xl", "llama3-8b"])
def test_a_model_to_scale_has_every_matrix_as_large_as_it_is(name: str) -> None:
    model = PRESETS[name]
    in_block = sum(sum(row.values()) for row in matrix_rows(model))
    whole = model.layers * in_block + sum(tables(model).values())
    vectors = model.parameters - whole
    assert 0 < vectors < model.parameters / 500
    figure = to_scale(name, "A third of it is words")
    halves: list[Any] = [ax.patches for ax in figure.axes]
    drawn = [sum(bar.get_width() * bar.get_height() for bar in bars) for bars in halves]
    assert [area * model.hidden**2 for area in drawn] == pytest.approx([in_block, whole])
    assert all(TABLES[part] in figure.alt for part in tables(model))
    assert ["queries" in text.get_text() for text in figure.axes[0].texts].count(True) == 1


def test_experts_are_too_many_for_a_picture_to_scale() -> None:
    with pytest.raises(ValueError, match="has experts"):
        to_scale("mixtral-8x7b", "Experts")


def test_the_builder_begins_with_a_preset_and_follows_its_controls_or_says_what_is_impossible() -> None:
    shown = model_builder("qwen2.5-0.5b")
    assert shown.model.parameters == PRESETS["qwen2.5-0.5b"].parameters
    assert f"N = {shown.model.parameters:,}" in shown.message
    shown = model_builder("llama3-8b")
    moves = {"family": "gpt2", "layers": 4, "hidden": 2048, "vocab": 256, "tied": "tied", "ffn": "4"}
    for name, value in (moves | {"group": 1, "experts": 8}).items():
        before = shown.model, shown.picture.value
        shown.controls[name].value = value
        assert shown.model != before[0] and shown.picture.value != before[1], name
    assert drawn_in(shown.figure, 0, shown.model.parameters) == parts_of(shown.model)
    assert "; a token uses" in shown.message
    shown.controls["heads"].value = 28
    assert "do not divide a hidden size" in shown.message
    shown.controls["group"].value = 8
    assert "28 query heads do not come in groups of 8" in shown.message
