"""Lesson 04's counts: its modules have the published models' parameters, and its pictures show them all."""

import json
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from lesson_source import names_from_cells
from torch import nn

from course_utils.lessons import quiz
from course_utils.lessons.parameters.counting import GPT2_PAPER, parts_of
from course_utils.lessons.parameters.figures import percent, shares, spelled
from course_utils.lessons.parameters.widget import model_builder
from course_utils.models import PRESETS, TransformerConfig

ODD = TransformerConfig(
    "odd",
    "llama",
    3,
    48,
    6,
    97,
    50,
    kv_heads=2,
    ffn=100,
    positions="learned",
    norm="layernorm",
    bias=True,
    tied=False,
)
PLAIN = replace(PRESETS["tiny-gpt"], name="plain", bias=False, qkv_bias=False)
MODELS = [*PRESETS.values(), ODD, PLAIN]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_parts_add_up(model):
    assert sum(parts_of(model).values()) == model.parameters
    assert ("head" in parts_of(model)) != model.tied
    assert parts_of(model)["norms"] % (2 * model.layers + 1) == 0


def size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize("name", [name for name in PRESETS if "mixtral" not in name])
def test_the_lessons_modules_are_the_presets_to_the_unit(name):
    model = PRESETS[name]
    cells = names_from_cells("04", "class GPT", "class Llama")
    with torch.device("meta"):
        if model.family == "gpt2":
            built = cells["GPT"](model.vocab, model.max_positions, model.hidden, model.layers, model.heads)
        else:
            sizes = (model.vocab, model.hidden, model.layers, model.kv, model.ffn)
            built = cells["Llama"](*sizes, bool(model.qkv_bias))
    more = 0
    if model.family == "llama" and model.tied:  # the lesson's module has a head of its own
        more = model.vocab * model.hidden
    assert size(built) - more == model.parameters
    assert all(parameter.is_meta for parameter in built.parameters())


def test_the_paper_is_wrong_by_the_words_that_it_leaves_out():
    for name, millions in GPT2_PAPER.items():
        assert round((PRESETS[name].parameters - (50257 - 40478) * PRESETS[name].hidden) / 1e6) == millions


def test_all_four_rows_of_the_paper_fit_the_first_gpts_words_and_few_others() -> None:
    gpt = names_from_cells("04", "import predict, reveal", "class GPT", "def gpt(")["gpt"]
    rows = {(768, 12): 117, (1024, 24): 345, (1280, 36): 762, (1600, 48): 1542}

    def fitting(words: int) -> int:
        return sum(round(gpt(words, 1024, *sizes) / 1e6) == millions for sizes, millions in rows.items())

    assert [fitting(words) for words in (40_467, 40_468, 40_478, 40_812, 40_813)] == [3, 4, 4, 4, 3]
    assert fitting(50_257) == 0 and fitting(41_000) == 3


def test_experts_multiply_a_token_with_a_quarter_of_what_is_stored() -> None:
    """By hand: 2 FLOPs per number, of all but the words, which are looked up."""
    V, h, L, k, f = 32000, 4096, 32, 1024, 14336
    attention = 2 * h * h + 2 * h * k
    expert = 3 * f * h
    dense, sparse = (2 * (L * (attention + n * expert + 2 * h + 8 * h) + V * h + h) for n in (8, 2))
    text = (Path(__file__).resolve().parent.parent / "notebooks/04_counting_parameters.ipynb").read_text(
        "utf-8"
    )
    assert f"dense {dense / 1e9:.1f} · 10⁹, Mixtral {sparse / 1e9:.1f} · 10⁹" in text
    assert f"{dense / sparse:.2f} times fewer" in text


def test_nothing_before_their_guess_tells_how_many_parameters_the_experts_have():
    path = Path(__file__).resolve().parent.parent / "notebooks/04_counting_parameters.ipynb"
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    guess = next(
        number for number, cell in enumerate(cells) if 'predict("04.experts"' in "".join(cell["source"])
    )
    model = PRESETS["mixtral-8x7b"]
    before = json.dumps(cells[:guess])
    after = json.dumps(cells[guess:])
    for count in (model.parameters, model.active_parameters):
        assert spelled(count).removesuffix(" B") in after
        assert not [text for text in (f"{count:,}", spelled(count)) if text in before]


def test_shares_draw_every_part_and_say_it():
    figure = shares({"one": parts_of("gpt2"), "two": parts_of("llama3-8b")}, "Words are a third of GPT-2")
    drawn = [int(count) for count in re.findall(r'data-parameters="(\d+)"', figure.svg)]
    assert drawn == [*parts_of("gpt2").values(), *parts_of("llama3-8b").values()]
    assert "embedding 31 %" in figure.alt and "8.03 B parameters" in figure.alt
    ElementTree.fromstring(figure.svg)


def test_bars_are_equally_wide_and_cut_in_proportion():
    figure = shares({"one": {"MLP": 100}, "half": {"MLP": 30, "head": 20}}, "Same.")
    whole, mlp, head = map(float, re.findall(r'width="([\d.]+)"[^>]*data-parameters', figure.svg))
    assert whole == pytest.approx(mlp + head, abs=0.2) and mlp == pytest.approx(1.5 * head, abs=0.4)


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (7, "7"),
        (1_234, "1.23 K"),
        (124_439_808, "124 M"),
        (999_700_000, "1.00 B"),
        (46_702_792_704, "46.7 B"),
    ],
)
def test_counts_are_spelled_as_people_say_them(count, words):
    assert spelled(count) == words
    assert [percent(part, 1000) for part in (314, 52, 9, 0)] == ["31 %", "5.2 %", "0.9 %", "0 %"]


@pytest.mark.parametrize("name", PRESETS)
def test_the_builder_begins_with_a_preset_to_the_unit(name):
    shown = model_builder(name)
    assert shown.model.parameters == PRESETS[name].parameters
    assert f"N = {PRESETS[name].parameters:,}" in shown.message


def test_moving_a_control_builds_another_model():
    shown = model_builder("llama3-8b")
    for name, value in (
        ("family", "gpt2"),
        ("layers", 4),
        ("hidden", 2048),
        ("vocab", 256),
        ("tied", "tied"),
        ("ffn", "4"),
        ("group", 1),
        ("heads", 16),
        ("experts", 8),
    ):
        before, picture = shown.model, shown.picture.value
        shown.controls[name].value = value
        assert (shown.model != before and shown.picture.value != picture) or name == "heads", name
    assert shown.figure is not None
    drawn = [int(count) for count in re.findall(r'data-parameters="(\d+)"', shown.figure.svg)]
    assert sum(drawn) == shown.model.parameters and "; a token uses" in shown.message


def test_what_makes_no_transformer_is_said_in_words():
    shown = model_builder("llama3-8b")
    shown.controls["group"].value = 7
    assert "Not possible" in shown.message and "groups of 7" in shown.message
    shown.controls["group"].value = 4
    shown.controls["hidden"].value = 1600
    shown.controls["heads"].value = 48
    assert "do not divide a hidden size" in shown.message
    with pytest.raises(ValueError, match="gpt-9"):
        model_builder("gpt-9")


def test_the_quiz_counts_as_the_modules_do():
    block, tied, wide, grouped, experts = (question.right.text for question in quiz(4).questions)
    cells = names_from_cells("04", "class GPT", "class Llama")
    with torch.device("meta"):
        small = cells["GPT"]()
        one = nn.TransformerEncoderLayer(1600, 25, 6400)
        full = cells["Block"](4096, 4096, 14336)
        now = cells["Block"](4096, 1024, 14336)
    assert block == f"{100 * (size(one.linear1) + size(one.linear2)) / size(one):.0f} %"
    saved = sum(tensor.numel() for tensor in small.state_dict().values())
    assert tied == f"{saved / 1e6:.0f} million and {size(small) / 1e6:.0f} million"
    twice = replace(PRESETS["gpt2"], hidden=1536, ffn=4 * 1536)
    assert wide == f"{twice.parameters / PRESETS['gpt2'].parameters:.1f} times"
    full, now = (size(block) - size(block.mlp) - 2 * 4096 for block in (full, now))
    assert grouped == f"{100 * (1 - now / full):.0f} %"
    assert experts == f"{16 * PRESETS['mixtral-8x7b'].parameters / 1e9:.0f} GB"
