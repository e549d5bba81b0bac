"""Lesson 18's account: answers and measurements are cut without loss; errata compute what they claim."""

import dataclasses
import re
from functools import partial
from typing import Any

import pytest
import torch
from published_models.basics_transformer import Transformer
from published_models.language_models import ScratchGPT
from published_models.sharded_models import Llama

from course_utils.evidence.frozen_runs import changed
from course_utils.evidence.judged import COUNTS, ESTIMATE, FORM, OURS, SIMULATED, answers_to, nearest, ratios
from course_utils.evidence.published import Row, answered_rows
from course_utils.figures.canvas import text_width
from course_utils.interactive.course_files import number_of, numbered
from course_utils.lessons.calculators import calculators, errata
from course_utils.lessons.calculators.calculators import (
    CALCULATORS,
    COMPONENTS,
    OUTSIDE,
    SCORES,
    STATES,
    TERMS,
    Truth,
)
from course_utils.lessons.calculators.errata import ERRATA
from course_utils.lessons.calculators.figures import corrected, gap_map, side_by_side, strips
from course_utils.lessons.calculators.widget import mender
from course_utils.measurement import Measurement
from course_utils.measuring import measure
from course_utils.measuring.recorded import from_json, to_json
from course_utils.models import PRESETS
from course_utils.run import TrainingRun
from course_utils.units import BLOCK, GB

LLAMA = TrainingRun("llama3.1-8b", 2, 8192)
RUNS = (LLAMA, TrainingRun("gpt2-xl", 32, 1024), TrainingRun("gpt2", 4, 512, attention="eager"),
        TrainingRun("llama3-8b", 1, 4096))  # fmt: skip
SMALL = {
    "GPT-2": TrainingRun(changed("gpt2", layers=2), 4, 1024),
    "Llama": TrainingRun(changed("llama3.2-1b", layers=2), 2, 4096),
}


@pytest.fixture(scope="module")
def steps() -> dict[str, Measurement]:
    return {name: measure(run, source="simulated") for name, run in SMALL.items()}


@pytest.fixture(scope="module")
def real(steps: dict[str, Measurement]) -> dict[str, Truth]:
    return {name: calculators.truth(measured) for name, measured in steps.items()}


def test_llama_3_1_has_llama_3_s_shapes_and_a_longer_context() -> None:
    old, new = PRESETS["llama3-8b"], PRESETS["llama3.1-8b"]
    assert dataclasses.replace(new, name=old.name, max_positions=old.max_positions) == old


@pytest.mark.parametrize("run", RUNS, ids=str)
@pytest.mark.parametrize("one", CALCULATORS, ids=lambda one: one.name)
def test_the_parts_of_an_answer_are_the_answer(one: calculators.Calculator, run: TrainingRun) -> None:
    parts = one.parts(run)
    assert tuple(parts) == COMPONENTS
    assert sum(parts.values()) == one.total(run)
    assert all(size >= 0 for size in parts.values()), parts
    assert one.states(run) % one.counted(run) == 0, "states are whole bytes per parameter"
    held = {"states": parts[STATES] > 0, "activations": parts[SCORES] + parts[calculators.BLOCKS] > 0}
    assert held == {part: one.counts in (part, "a step") for part in held}
    assert one.label == (one.name if all(held.values()) else f"{one.name} ({one.counts} only)")


def test_public_answers_for_llama_3_1_are_14_fold_apart_and_those_to_the_same_question_5() -> None:
    said = list(calculators.answers(LLAMA).values())
    assert said == sorted(said) and len(said) == 9
    assert round(calculators.spread(LLAMA)) == 14
    assert len(calculators.answers(LLAMA, "a step")) == 6
    assert round(calculators.spread(LLAMA, "a step")) == 5


def test_scores_are_what_only_the_formulas_for_eager_attention_have() -> None:
    flash = {one.name for one in CALCULATORS if one.parts(LLAMA)[SCORES]}
    eager = {one.name for one in CALCULATORS if one.parts(LLAMA.replace(attention="eager"))[SCORES]}
    assert eager - flash == {"llm-analysis"}
    cookbook = calculators.calculator("EleutherAI cookbook")
    assert cookbook.parts(LLAMA)[SCORES] == 5 * 32 * 8192**2 * 2 * 32


def test_an_unknown_calculator_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"unknown calculator 'Zero'.*ZeRO"):
        calculators.calculator("Zero")


@pytest.mark.parametrize("name", SMALL)
def test_every_tensor_at_the_peak_belongs_to_one_component(
    name: str, steps: dict[str, Measurement], real: dict[str, Truth]
) -> None:
    peak = steps[name].breakdown
    parts = real[name].parts
    assert real[name].peak == steps[name].peak
    assert sum(parts[part] for part in (SCORES, calculators.BLOCKS, OUTSIDE)) == peak["activations"]
    assert parts[STATES] == peak["parameters"] + peak["gradients"] + peak["optimizer_states"]
    assert parts[SCORES] == 0, "a flash kernel writes none"


def test_eager_scores_are_found_by_their_shape() -> None:
    """Under autocast: fp32 of softmax, its 16-bit copy, the mask; not q and k of 64 tokens, also squares."""
    for s in (64, 256):
        run = TrainingRun(changed("gpt2", layers=2), 16, s, attention="eager")
        a, b, L = run.model.heads, run.micro_batch, run.model.layers
        found = calculators.counted_at_peak(measure(run.replace(micro_batch=b), source="simulated"))[SCORES]
        assert found == (4 + 2 + 1) * a * s * s * b * L


def test_a_recording_that_keeps_only_what_is_alive_at_the_peak_is_enough(
    steps: dict[str, Measurement], real: dict[str, Truth]
) -> None:
    for name, measured in steps.items():
        recorded = from_json(to_json(measured), "a test")
        assert len(recorded.allocations) < len(measured.allocations)
        found = calculators.truth(recorded)
        assert found.word == "recorded"
        assert dataclasses.replace(found, provenance=real[name].provenance, word="simulated") == real[name]
        assert calculators.outside_blocks(recorded) == calculators.outside_blocks(measured)


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("one", CALCULATORS, ids=lambda one: one.name)
def test_eight_terms_add_up_to_the_whole_gap(
    one: calculators.Calculator, name: str, real: dict[str, Truth]
) -> None:
    run, truth = SMALL[name], real[name]
    found = calculators.gaps(one.name, run, truth)
    assert list(found) == [term.name for term in TERMS]
    assert sum(found.values()) == one.total(run) - truth.peak
    assert calculators.add_back(one.name, list(found), run, truth) == truth.peak
    assert calculators.add_back(one.name, [], run, truth) == one.total(run)


@pytest.mark.parametrize("name", SMALL)
def test_the_closed_form_is_off_by_vectors_and_rounding_alone(
    name: str, steps: dict[str, Measurement]
) -> None:
    run = SMALL[name]
    formula, counted, measured = calculators.sides(run, steps[name])
    assert counted == measured
    h = run.model.hidden
    sb = run.seq_len * run.micro_batch
    tensors = len(steps[name].allocations)
    mask_and_positions = sb * h + 8 * run.seq_len * run.model.head_size + 16 * sb
    for part, size in formula.items():
        assert 0 <= measured[part] - size <= mask_and_positions + BLOCK * tensors, part
    table = calculators.three_ways(run, steps[name])
    assert "closed form − simulated" in repr(table) and table._repr_html_().count("<tr>") == 6


def test_the_closed_form_refuses_what_it_does_not_describe() -> None:
    for change in ({"attention": "eager"}, {"precision": "bf16-master"}, {"recompute": "full"}):
        with pytest.raises(ValueError, match="this closed form is for"):
            calculators.autocast_formula(SMALL["GPT-2"].replace(**change))


def test_what_lies_outside_the_blocks_is_listed(
    steps: dict[str, Measurement], real: dict[str, Truth]
) -> None:
    found = calculators.outside_blocks(steps["GPT-2"])
    assert sum(found.values()) == real["GPT-2"].parts[OUTSIDE]
    assert any(name.startswith("(loss): _log_softmax") for name in found)


def test_figures_say_every_number_and_draw_the_bytes(real: dict[str, Truth]) -> None:
    names = [one.name for one in CALCULATORS]
    panels = {
        model: {name: calculators.calculator(name).parts(run) for name in names}
        for model, run in SMALL.items()
    }
    peaks = {model: truth.peak for model, truth in real.items()}
    figure = side_by_side(panels, "Nine answers", peaks)
    assert all(name in figure.alt for name in names) and figure.svg.count("data-peak") == 2
    table = {name: calculators.gaps(name, SMALL["Llama"], real["Llama"]) for name in names}
    svg = gap_map(table, peaks["Llama"], "Gaps").svg
    cells = [int(size) for size in re.findall(r'data-bytes="(-?\d+)"', svg)]
    assert cells == [size for found in table.values() for size in (*found.values(), sum(found.values()))]


@pytest.mark.parametrize("share", [0.05, 0.3, 0.5, 0.97, 1.0, 1.2])
def test_the_peak_is_named_at_its_line_by_what_it_is_and_no_label_stands_on_it(share: float) -> None:
    panel = {"short": {STATES: 50 * GB}, "long": {STATES: 100 * GB}}
    svg = side_by_side({"one": panel}, "Two", {"one": int(share * 100 * GB)}, word="measured").svg
    line = float(re.findall(r'<line x1="([\d.]+)"[^>]*data-peak', svg)[0])
    names = [float(x) for x in re.findall(r'<text x="([\d.]+)"[^>]*>measured', svg)]
    assert len(names) == 1 and abs(line - names[0]) < 60
    labels = [
        (float(x), text_width(words, 12, bold=True))
        for x, words in re.findall(r'<text x="([\d.]+)"[^>]*>(\d+ GB)<', svg)
    ]
    assert len(labels) == 2 and not any(x <= line <= x + width for x, width in labels)


def test_a_mended_answer_ends_at_the_truth_and_calls_it_simulated(real: dict[str, Truth]) -> None:
    figure = corrected("ZeRO", [term.name for term in TERMS], SMALL["GPT-2"], real["GPT-2"], "ZeRO mended")
    assert "Simulated: " in figure.alt and "easured" not in figure.svg
    ends = [int(end) for end in re.findall(r'data-to="(-?\d+)"', figure.svg)]
    assert len(ends) == len(TERMS) + 2 and ends[-1] == real["GPT-2"].peak


def test_the_widget_adds_back_what_is_ticked(real: dict[str, Truth]) -> None:
    widget = mender({name: (SMALL[name], real[name]) for name in SMALL}, "accelerate")
    worst = widget.controls[calculators.largest_gap("accelerate", SMALL["GPT-2"], real["GPT-2"])]
    worst.value = True
    assert "By size, this term is number 1 of the eight" in widget.message
    worst.value = False
    assert widget.terms == [] and repr(widget).endswith("run this cell to tick the terms.")
    for term in TERMS:
        widget.controls[term.name].value = True
    assert "now <b>exact</b>" in widget.message
    widget.controls["model"].value = "Llama"
    assert "now <b>exact</b>" in widget.message and widget.figure and "Llama" in widget.figure.alt


def test_the_page_is_built_from_the_list() -> None:
    assert errata.PAGE.read_text(encoding="utf-8") == errata.page(), "run python3 -m course_utils build"
    assert errata.page().count("**Computed:**") == len(ERRATA)
    assert max(map(len, errata.page().splitlines())) <= 120


def test_each_lesson_names_the_claims_that_it_corrects() -> None:
    for source in sorted((errata.ROOT / "notebooks" / "src").glob("[01]*.py")):
        number = number_of(source)
        named = re.search(r"corrects claims? ([\d, and]+) of\W+\[what", source.read_text(encoding="utf-8"))
        here = [str(one) for one, erratum in enumerate(ERRATA, 1) if erratum.lesson == number]
        if number == "18":  # which shows the whole list
            here = []
        assert re.findall(r"\d+", named[1] if named else "") == here, source.name


def test_claims_differ_and_each_has_a_lesson_and_numbers() -> None:
    assert len({one.claim for one in ERRATA}) == len(ERRATA)
    assert {one.lesson for one in ERRATA} <= set(map(number_of, numbered(errata.ROOT / "notebooks")))
    assert all(one.source and one.right.endswith(".") for one in ERRATA)
    assert all(re.search(r"\d", one.evidence) and "|" not in one.evidence for one in ERRATA)


@pytest.mark.parametrize(
    ("claim", "numbers"),
    {
        "One can barely train GPT-2 XL": ("37.0 GB", "29.3 GB", "45.8 GB", "34.0 GB", "26.8 GB", "33.7 GB"),
        "GPT-2 XL cannot be trained on a 32 GB GPU": ("= 41 GB;", "8.6 GB of activations", "37.0 GB"),
        "Activations of GPT-2 XL at batch 32": ("60.4 GB",),
        "With checkpointing about 8 GB": ("8.7 GB", "5.0 GB", "8.59 GB"),
        "Selective recomputation costs 2.7 % more": ("2.69 %", "0.90 %", "0.45 %"),
        "Selective recomputation saves up to 70 %": ("70 %", "82 %"),
        "Llama-3 8B keeps 97 GB of activations at 4,096 tokens, 17 GB with": (
            "97.0 GiB = 104.2 GB",
            "17.0 GiB = 18.3 GB",
        ),
        "With full recomputation it keeps 1 GB": ("1.0 GiB = 1.07 GB", "3.0 GiB"),
        "A 1B model takes 16 GB": ("9.1 GB = 25.1 GB", "1.24 · 10⁹", "19.8 GB"),
        "The states of an 8B model": ("128.5 GB",),
        "Activations are kept until the optimizer step": (" 0 B",),
        "400 sequences": ("409,600",),
        "8×7": ("46.7", "12.9"),
        "23.68 % top-1 error": ("0.20", "23.60"),
        "255·255 overflows": ("65,025", f"{torch.finfo(torch.float16).max:,.0f}", "256·256"),
        "Under autocast cross_entropy": ("2 of log-softmax, 4 of",),
        "GPT-2 has 117 M": ("117 M, with V = 40,478 117 M", "1542 M, with V = 40,478 1542 M"),
        "A tensor takes its size rounded up to 512": ("11.5 MiB", "12.0 MiB"),
        "ZeRO-2 with T5": ("15.93 GiB", "17.11 GB", "11.28 GiB"),
        "For large models most memory": ("1 sequence 97 %", "32 sequences 19 %", "59 %"),
        "Checkpointing is on by default": ("1 of 5",),
        "LoRA takes three times less": ("349.2 GB", "128 tokens 2.9 times", "1.2 times"),
        "Parameters with larger gradients": ("1.00, 1.00, 1.00",),
        "Training in fp8 needs": ("1 of first moment, 2 of second",),
    }.items(),
)
def test_evidence_comes_out_at_what_the_sources_print(claim: str, numbers: tuple[str, ...]) -> None:
    (found,) = (one.evidence for one in ERRATA if one.claim.startswith(claim))
    assert all(number in found for number in numbers), found


def test_every_text_that_a_claim_is_from_is_in_the_list_of_texts() -> None:
    listed = re.findall(r"\*(The \w+(?: \w+)?)\*", errata.page().replace("\n", " "))
    assert listed == ["The newsletter", "The slides", "The lecture", "The blog draft", "The note"]
    named = {one.source.split(" “")[0].split(",")[0] for one in ERRATA if one.source.startswith("the ")}
    assert {name for name in listed for source in named if source.startswith(name.lower())} == {*listed}
    assert not [one for one in ERRATA if "do not say" in one.source]


def test_the_table_draws_all_of_them() -> None:
    table = errata.ErrataTable()
    assert table._repr_html_().count("<tr>") == 1 + len(ERRATA) and "DeepSpeed" in repr(table)


def test_autocast_keeps_a_16_bit_log_softmax(steps: dict[str, Measurement]) -> None:
    second_step = [tensor for tensor in steps["GPT-2"].allocations if tensor.step == 2]
    kept = [tensor for tensor in second_step if tensor.operation == "_log_softmax"]
    assert [tensor.dtype for tensor in kept] == ["bfloat16"]


JUDGED = {row.id: row for row in answered_rows() if nearest(row)}
"""Rows that are put to the calculators."""


def run_of(row: Row) -> TrainingRun:
    run = nearest(row)
    assert run
    return run


def test_a_calculator_answers_a_row_by_the_row_s_run_or_refuses_it_and_gives_none() -> None:
    """On 28 rows nine calculators give 49 answers; more where rows are added."""
    given = 0
    for row in JUDGED.values():
        run = run_of(row)
        said = answers_to(row)
        assert said[SIMULATED] == row.said.of(row)
        assert said.keys() <= {*(one.name for one in CALCULATORS), *OURS}
        for one in CALCULATORS:
            if one.name in said:
                assert said[one.name] == one.total(run) and one.counts == COUNTS[row.moment]
                given += 1
            elif one.counts == COUNTS[row.moment]:
                with pytest.raises(ValueError, match="does not cover"):
                    one.total(run)
    assert len(JUDGED) >= 28 and given >= 49


def test_an_answer_comes_out_by_hand() -> None:
    """16 bytes per parameter, ZeRO's 12·h·b·s·L numbers of 2 bytes; of states alone fp32 Adam's 16 bytes."""
    row = JUDGED["cs336-shibuki-2.7b-bf16-train-step-ctx512"]
    N = 32 * (4 * 2560**2 + 3 * 2560 * 10240 + 2 * 2560) + 2560 + 2 * 10_000 * 2560
    assert answers_to(row)["ZeRO"] == 16 * N + 24 * 2560 * 4 * 512 * 32
    assert round(100 * (ratios()["ZeRO"][row.id] - 1), 1) == -13.0
    states = JUDGED["cs336-damek-xl-ddp2-T512-full"]
    xl = 48 * (4 * 1600**2 + 3 * 1600 * 6400 + 2 * 1600) + 1600 + 2 * 10_000 * 1600
    said = {name: size for name, size in answers_to(states).items() if name != SIMULATED}
    assert said == {"accelerate": 16 * xl, FORM: 16 * xl}


def test_a_run_has_as_many_parameters_as_the_row_s_own_network() -> None:
    networks: dict[str, tuple[Any, str]] = {
        "train": (Transformer, "size T"),
        "scratch_gpt": (ScratchGPT, "L h a V s stage"),
        "titan": (partial(Llama, upcast=False), "L d heads kv_heads ffn V positions recompute"),
    }
    for row in JUDGED.values():
        make, names = networks[row.family.partition(".")[2]]
        with torch.device("meta"):
            network = make(**{name: row.how[name] for name in names.split()})
        assert sum(one.numel() for one in network.parameters()) == run_of(row).model.parameters, row.id


def test_parts_of_a_step_first_peaks_and_unknown_options_are_nobody_s() -> None:
    row = JUDGED["cs336-shibuki-2.7b-bf16-train-step-ctx512"]
    first = {"steps": 1}
    for option in ({"inference": True}, {"update": False}, {"shard": [0, 2]}, first, {"never heard of": 1}):
        assert answers_to(dataclasses.replace(row, how=row.how | option)) == {}, option
    assert answers_to(dataclasses.replace(row, family="basics_transformer.attention")) == {}
    for moment in ("start", "kept"):
        assert answers_to(dataclasses.replace(row, moment=moment)) == {}, moment
    assert nearest(dataclasses.replace(row, how=row.how | {"steps": 1}, moment="end"))


def test_our_estimate_answers_what_the_row_s_counter_is() -> None:
    """Unsplit blocks are in the allocator's counter, free pieces in the reserved; not of several ranks."""
    row = JUDGED["cs336-shibuki-2.7b-bf16-train-step-ctx512"]
    allocated, reserved = (
        answers_to(dataclasses.replace(row, counter=name)) for name in ("allocated", "reserved")
    )
    assert allocated[FORM] == reserved[FORM] < allocated[ESTIMATE] * 1.01 < reserved[ESTIMATE]
    assert ESTIMATE in answers_to(JUDGED["titan-pr165-fsdp2-ac-active"])
    assert ESTIMATE not in answers_to(JUDGED["titan-pr165-fsdp2-ac-reserved"])


def test_what_the_lesson_says_of_the_judgment_holds() -> None:
    off = {name: [abs(100 * (ratio - 1)) for ratio in found.values()] for name, found in ratios().items()}
    assert max(off["accelerate"]) < 5 and min(off["ZeRO"]) < 1 < 10 < max(off["ZeRO"])
    nearest_row, *other_rows = sorted(off["Megatron-LM"])
    assert nearest_row < 1 and min(other_rows) > 10
    assert max(off[FORM]) > 20 and max(off[ESTIMATE]) > 20 and max(off[SIMULATED]) < 5
    own_gelu = JUDGED["rasbt-gpt124m-00-orig"]
    closed, exact = (abs(answers_to(own_gelu)[name] / own_gelu.bytes - 1) for name in (FORM, ESTIMATE))
    assert run_of(own_gelu).model.unfused and exact < 0.06 < 0.15 < closed


def test_a_strip_has_a_dot_for_each_answer_and_a_ring_where_asked() -> None:
    figure = strips({"one": {"a": 0.5, "b": 2.0}, "other": {}}, "Two answers", "from a test", {"b"})
    assert [float(ratio) for ratio in re.findall(r'data-ratio="([\d.]+)"', figure.svg)] == [0.5, 2.0]
    assert figure.svg.count("<title>b</title>") == 1
    assert "one −50.0 to +100.0 %; other no answer" in figure.alt
    xs = [float(x) for x in re.findall(r'<rect x="([\d.]+)"[^>]*data-ratio', figure.svg)]
    zero = float(re.findall(r'<text x="([\d.]+)"[^>]*>0 %', figure.svg)[0])
    assert xs[0] + 5 == pytest.approx(2 * zero - xs[1] - 5, abs=0.2), (
        "half and double are as far from the truth"
    )
