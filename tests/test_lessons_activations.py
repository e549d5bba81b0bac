"""Lesson 05's figures: ledgers that close, variants that agree with measured steps, sweeps and the map."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from counting import calls
from torch.utils.checkpoint import checkpoint

from course_utils import PRESETS, TrainingRun, estimate, gpu
from course_utils.estimating.exact.activations import activation_bytes, loss_saved, sum_bytes
from course_utils.lessons.activations import ledgers
from course_utils.lessons.activations.heat_map import BATCHES, heat_map, kept_bytes, lengths, limits
from course_utils.lessons.activations.widget import activation_map
from course_utils.measuring import measure
from course_utils.networks import chunked_loss
from course_utils.planning.twin import fit_words
from course_utils.units import format_bytes

ROOT = Path(__file__).resolve().parent.parent
SOURCE = (ROOT / "notebooks/src/05_activations.py").read_text(encoding="utf-8")
SMALL = TrainingRun("gpt2", 2, 64, "bf16-master", attention="eager")
LLAMA = TrainingRun("llama3.2-1b", 1, 64, "bf16-master")


@pytest.mark.parametrize("run", [SMALL, SMALL.replace(attention="flash"), LLAMA, LLAMA.replace(attention="eager")])
def test_every_row_of_a_ledger_has_its_partner(run: TrainingRun) -> None:
    ledger = ledgers.block_ledger(run)
    assert all(saved and found and saved.size == found.bytes for saved, found in ledger.rows)
    assert ledger.predicted == ledger.found
    assert ledger.predicted / ledger.token == pytest.approx(ledgers.per_token(run))


def test_factors_of_a_product_are_paired_with_themselves() -> None:
    rows = [pair for pair in ledgers.block_ledger(SMALL).rows if pair[0] and pair[0].operation == "q·kᵀ"]
    found = {saved.name: other.name for saved, other in rows if saved and other}
    assert found["first factor"].endswith("self") and found["second factor"].endswith("mat2")


def test_a_ledger_prints_and_draws_the_same_figures_and_shows_what_has_no_partner() -> None:
    ledger = ledgers.block_ledger(SMALL)
    text, table = repr(ledger), ledger._repr_html_()
    for saved, found in ledger.rows:
        assert saved and found
        assert f"{saved.size:,}" in text and f"<td>{found.bytes:,}</td>" in table
    assert text.splitlines()[-1].startswith("total") and table.count("<tr>") == len(ledger.rows) + 2
    (saved, found), *rest = ledger.rows
    torn = replace(ledger, rows=[(saved, None), *rest, (None, found)])
    assert torn.predicted == torn.found == ledger.found
    assert "–" in repr(torn) and "–" not in text


def test_hooks_refuse_what_they_cannot_tell_apart() -> None:
    with pytest.raises(ValueError, match="copies of weights"):
        ledgers.found_in_block(SMALL.replace(precision="amp-bf16"))


def test_sizes_are_spelled_as_in_the_lesson() -> None:
    assert [ledgers.spelled(text) for text in ("c·sb·h", "4·b·a·s", "c·sb·kv")] == ["2·s·b·h", "4·b·a·s", "2·s·b·g·d"]


@pytest.mark.parametrize(
    "run", [SMALL, SMALL.replace(attention="flash"), SMALL.replace(attention="flash", precision="amp-bf16")]
)
def test_a_blocks_estimate_is_what_a_third_block_adds_to_a_step(run: TrainingRun) -> None:
    size = run.seq_len * run.micro_batch * run.model.hidden
    assert ledgers.per_token(run) <= ledgers.measured_per_token(run) <= ledgers.per_token(run) + 2 * 512 / size


def test_a_sweep_of_steps_is_the_sweep_of_estimates() -> None:
    run = TrainingRun("tiny-gpt", 2, 64, "bf16-master", attention="eager")
    assert ledgers.swept(run, "seq_len", (32, 64)) == ledgers.swept_in_steps(run, "seq_len", (32, 64))
    assert ledgers.swept(run, "micro_batch", [3])[3] == activation_bytes(run.replace(micro_batch=3))


def test_a_sweep_is_drawn_with_a_line_and_its_circles() -> None:
    curve = {1: 10**6, 2: 2 * 10**6}
    panel = {"eager": (curve, curve), "flash": (curve, {2: 10**6})}
    figure = ledgers.sweep_figure({"b": panel, "s": panel}, "It doubles", word="measured")
    assert figure.alt.startswith("It doubles. Lines of MB kept when forward ends") and "The same by s." in figure.alt
    assert figure.alt.count("eager goes from 1 at 1 to 2 at 2") == 2
    assert figure.alt.count("measured steps goes from 1 at 1 to 1 at 2") == 2


def lessons_chunked_loss(head: torch.nn.Module, targets: torch.Tensor) -> Any:
    """The function that lesson 05 writes, from its own text."""
    (text,) = re.findall(r"^def part\(.+?^    return sum\(.+?$", SOURCE, re.DOTALL | re.MULTILINE)
    names: dict[str, Any] = {"nn": torch.nn, "head": head, "targets": targets, "checkpoint": checkpoint}
    exec(text, names)
    return names["chunked_loss"]


@pytest.mark.parametrize("chunks", [1, 3, 8])
def test_the_lessons_loss_in_chunks_is_the_networks(chunks: int) -> None:
    torch.manual_seed(0)
    features = torch.randn(50, 16, dtype=torch.float64, requires_grad=True)
    head, targets = torch.nn.Linear(16, 40, bias=False, dtype=torch.float64), torch.randint(40, (50,))
    mine = lessons_chunked_loss(head, targets)(features, chunks)
    theirs = chunked_loss(features[None], head, targets[None], chunks)
    plain = torch.nn.functional.cross_entropy(head(features), targets)
    wanted = torch.autograd.grad(plain, [features, head.weight])
    for loss in (mine, theirs):
        torch.testing.assert_close(loss, plain, rtol=1e-14, atol=0)
        for one, other in zip(torch.autograd.grad(loss, [features, head.weight]), wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-15)


def test_what_chunks_save_is_the_closed_form_less_two_gradients() -> None:
    run = TrainingRun(replace(PRESETS["gpt2"], layers=1), 8, 1024, "bf16-master")
    s, b, h, V, chunks = run.seq_len, run.micro_batch, run.model.hidden, run.model.vocab, 8
    falls = measure(run).peak - measure(run.replace(loss_chunks=chunks)).peak
    closed = 3 * 2 * s * b * V * (chunks - 1) // chunks
    already = 2 * V * h + 2 * s * b * h * (chunks - 1) // chunks
    assert falls == pytest.approx(closed - already, abs=20 * 512)


@pytest.mark.parametrize(("model", "card"), [("llama3.2-1b", "A100-80GB"), ("llama3-8b", "H200-141GB")])
def test_the_map_has_every_cell_that_the_model_takes_and_a_line(model: str, card: str) -> None:
    run = TrainingRun(model)
    figure = heat_map(run, gpu(card), (4, 512))
    cells = [int(size) for size in re.findall(r'data-bytes="(\d+)"', figure.svg)]
    assert len(cells) == len(BATCHES) * len(lengths(run)) and max(lengths(run)) == min(2**15, run.model.max_positions)
    one = run.replace(micro_batch=BATCHES[0], seq_len=lengths(run)[0])
    assert cells[0] == kept_bytes(one) == activation_bytes(one) + sum_bytes(loss_saved(one))
    assert figure.svg.count("data-limit") == 1


@pytest.mark.parametrize("memory", [0, 16 * 10**9, 80 * 10**9, 10**15])
def test_the_line_is_where_one_more_does_not_fit(memory: int) -> None:
    run = TrainingRun("gpt2", 1, 512)
    count = limits(run, memory)[lengths(run).index(512)]
    peaks = [estimate(run.replace(micro_batch=b)).total for b in BATCHES]
    assert [peak <= memory for peak in peaks] == [True] * count + [False] * (len(BATCHES) - count)


def test_the_map_says_when_nothing_fits_and_keeps_to_learned_positions() -> None:
    run = TrainingRun("gpt2-xl", 1, 128)
    assert "T4-16GB fits no step of gpt2-xl" in heat_map(run, gpu("T4-16GB"), (1, 128)).alt
    assert max(lengths(run)) == 1024


def test_the_map_follows_its_sliders_at_once() -> None:
    shown = activation_map("gpt2", gpu="T4-16GB", seq_len=512)
    before = shown.picture.value
    shown.controls["attention"].value = "eager"

    def another_model() -> None:
        shown.controls["model"].value = "gpt2"
        shown.controls["model"].value = "llama3.2-1b"

    another_model()
    assert calls(another_model) < 120_000, "two controls, tens of milliseconds each"
    assert shown.run == TrainingRun("llama3.2-1b", 4, 512, "amp-bf16", attention="eager")
    assert shown.picture.value != before and shown.figure and "T4-16GB fits no step of llama3.2-1b" in shown.figure.alt
    assert "run this cell" in repr(shown) and gpu("T4-16GB").name in shown.figure.svg


def test_the_map_says_what_the_cell_looked_at_takes() -> None:
    shown = activation_map("llama3.2-1b", gpu="A100-80GB")
    shown.controls["micro_batch"].value, shown.controls["seq_len"].value = 8, 1024
    run = TrainingRun("llama3.2-1b", 8, 1024)
    assert shown.run == run and 'data-at="8,1024"' in shown.picture.value
    for size in (kept_bytes(run), estimate(run).total):
        assert format_bytes(size, "GB", 2) in shown.message
    assert fit_words(estimate(run).total, gpu("A100-80GB")) in shown.message and run.code() in shown.message


def test_a_length_that_the_model_does_not_have_is_brought_back() -> None:
    shown = activation_map("llama3.2-1b", seq_len=32768)
    shown.controls["model"].value = "gpt2-xl"
    assert shown.run.seq_len == 1024
    assert shown.message.startswith("gpt2-xl has no 32,768 positions, so: 4 × 1,024 tokens")
    shown.controls["model"].value = "llama3.2-1b"
    assert shown.run.seq_len == 32768 and "positions" not in shown.message
    with pytest.raises(ValueError, match="seq_len is 1000; the map has 128, 192"):
        activation_map(seq_len=1000)


def test_the_sliders_of_the_map_are_in_order() -> None:
    controls = activation_map().controls
    models, cards = (list(controls[name].options) for name in ("model", "gpu"))
    assert models == sorted(models, key=lambda name: PRESETS[name].parameters)
    assert cards == sorted(cards, key=lambda name: gpu(name).memory) and len(cards) > 5
