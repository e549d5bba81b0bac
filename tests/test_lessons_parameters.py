"""Lesson 04's counts: formulas as they are shown give the numbers next to them, and real modules hold as many."""

import json
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import pytest

from course_utils.lessons import quiz
from course_utils.lessons.parameters.counting import (
    ATTENTION,
    CHECKPOINT_BYTES,
    GPT2_CORRECTED,
    GPT2_PAPER,
    block_terms,
    blocks_alone,
    counted_block,
    counted_model,
    counts,
    gpt_ladder,
    model_terms,
    network_without_memory,
    parts,
    rule_errors,
    total,
    with_embedding,
)
from course_utils.lessons.parameters.figures import percent, shares, spelled
from course_utils.lessons.parameters.widget import model_builder
from course_utils.models import PRESETS, TransformerConfig

ODD = TransformerConfig(
    "odd", "llama", 3, 48, 6, 97, 50, kv_heads=2, ffn=100, positions="learned", norm="layernorm", bias=True, tied=False
)
PLAIN = replace(PRESETS["tiny-gpt"], name="plain", bias=False, qkv_bias=False)
MODELS = [*PRESETS.values(), ODD, PLAIN]
BUILT = [model for model in MODELS if model.name not in ("gpt3-175b", "llama3-70b", "llama3.2-3b", "gpt2-large")]
"""Those whose modules are built here too: some seconds fewer, and the lesson itself builds the others."""


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_parts_add_up(model):
    assert sum(parts(model).values()) == model.parameters
    assert ("head" in parts(model)) != model.tied
    assert parts(model)["norms"] == (2 * model.layers + 1) * block_terms(model)[0].count


@pytest.mark.parametrize("model", BUILT, ids=lambda model: model.name)
def test_real_modules_hold_as_many_line_by_line(model):
    network = network_without_memory(model)
    assert {term.name: term.count for term in block_terms(model)} == counted_block(network)
    assert {term.name: term.count for term in model_terms(model)} == counted_model(network)
    assert total(model_terms(model)) == sum(p.numel() for p in network.parameters()) == model.parameters
    assert all(parameter.device.type == "meta" for parameter in network.parameters())


def test_checkpoints_of_others_hold_as_many():
    for name, size in CHECKPOINT_BYTES.items():
        assert size == 2 * PRESETS[name].parameters, name


def test_the_paper_is_wrong_and_the_correction_right():
    for name, millions in GPT2_CORRECTED.items():
        N = PRESETS[name].parameters
        assert round(N / 1e6) == millions
        assert round((N - (50257 - 40478) * PRESETS[name].hidden) / 1e6) == GPT2_PAPER[name]


def test_tables_show_every_term_and_signed_differences():
    terms = block_terms("tiny-gpt")
    right = {term.name: term.count for term in terms}
    assert str(counts(terms, right)).splitlines()[-1].split() == ["total", *[f"{total(terms):,}"] * 2, "0"]
    assert str(counts(terms, right)).count(" 0\n") == len(terms)
    off = counts(terms, right | {"MLP, up": right["MLP, up"] + 5})
    assert "−5" in str(off) and "−5" in off._repr_html_() and "3h² + 3h" in off._repr_html_()


def test_the_rule_gets_better_with_size():
    for rule in (blocks_alone, with_embedding):
        sizes, errors = rule_errors(rule, gpt_ladder())
        assert sizes == sorted(sizes) and errors == sorted(errors) and errors[-1] < 0
    for vocab in (50257, 128256):
        for model in gpt_ladder(vocab):
            error = rule_errors(blocks_alone, [model])[1][0] / 100
            assert error == pytest.approx(-vocab / (12 * model.layers * model.hidden + vocab), abs=0.02)


def test_nothing_before_their_guess_tells_how_many_parameters_the_experts_have():
    path = Path(__file__).resolve().parent.parent / "notebooks/04_counting_parameters.ipynb"
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    guess = next(number for number, cell in enumerate(cells) if 'predict("04.experts"' in "".join(cell["source"]))
    model = PRESETS["mixtral-8x7b"]
    before, after = json.dumps(cells[:guess]), json.dumps(cells[guess:])
    for count in (model.parameters, model.active_parameters):
        assert spelled(count).removesuffix(" B") in after
        assert not [text for text in (f"{count:,}", spelled(count)) if text in before]


def test_shares_draw_every_part_and_say_it():
    figure = shares({"one": parts("gpt2"), "two": parts("llama3-8b")}, "Words are a third of GPT-2")
    drawn = [int(count) for count in re.findall(r'data-parameters="(\d+)"', figure.svg)]
    assert drawn == [*parts("gpt2").values(), *parts("llama3-8b").values()]
    assert "embedding 31 %" in figure.alt and "8.03 B parameters" in figure.alt
    ElementTree.fromstring(figure.svg)


def test_bars_are_equally_wide_and_cut_in_proportion():
    figure = shares({"one": {"MLP": 100}, "half": {"MLP": 30, "head": 20}}, "Same.")
    whole, mlp, head = map(float, re.findall(r'width="([\d.]+)"[^>]*data-parameters', figure.svg))
    assert whole == pytest.approx(mlp + head, abs=0.2) and mlp == pytest.approx(1.5 * head, abs=0.4)


@pytest.mark.parametrize(
    ("count", "words"),
    [(7, "7"), (1_234, "1.23 K"), (124_439_808, "124 M"), (999_700_000, "1.00 B"), (46_702_792_704, "46.7 B")],
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
    for name, value in (("family", "gpt2"), ("layers", 4), ("hidden", 2048), ("vocab", 256), ("tied", "tied"),
                        ("ffn", "4"), ("group", 1), ("heads", 16), ("experts", 8)):  # fmt: skip
        before, picture = shown.model, shown.picture.value
        shown.controls[name].value = value
        assert (shown.model != before and shown.picture.value != picture) or name == "heads", name
    drawn = [int(count) for count in re.findall(r'data-parameters="(\d+)"', shown.picture.value)]
    assert sum(drawn) == shown.model.parameters and "of which a token uses" in shown.message


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
    one = counted_block(network_without_memory("gpt2-xl"))
    assert block == f"{100 * (one['MLP, up'] + one['MLP, down']) / sum(one.values()):.0f} %"
    small = network_without_memory("gpt2")
    sizes = [sum(t.numel() for t in each) / 1e6 for each in (small.state_dict().values(), small.parameters())]
    assert tied == f"{sizes[0]:.0f} million and {sizes[1]:.0f} million"
    twice = replace(PRESETS["gpt2"], hidden=1536, ffn=4 * 1536)
    assert wide == f"{twice.parameters / PRESETS['gpt2'].parameters:.1f} times"
    full = sum(counted_block(network_without_memory(replace(PRESETS["llama3-8b"], kv_heads=32)))[n] for n in ATTENTION)
    now = counted_block(network_without_memory("llama3-8b"))
    assert grouped == f"{100 * (1 - sum(now[n] for n in ATTENTION) / full):.0f} %"
    assert experts == f"{16 * PRESETS['mixtral-8x7b'].parameters / 1e9:.0f} GB"
