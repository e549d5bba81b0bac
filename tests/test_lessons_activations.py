"""Lesson 05: its block against the estimate, its loss in chunks against the network's, and the map."""

import re
from dataclasses import replace
from itertools import product

import pytest
import torch
from counting import calls
from lesson_source import SOURCES, names_from_cells

from course_utils import GPUS, PRESETS, TrainingRun, estimate, gpu, on_gpu
from course_utils.estimating.exact.activations import activation_bytes, block_saved, loss_saved, sum_bytes
from course_utils.lessons.activations.heat_map import BATCHES, heat_map, kept_bytes, lengths, limits
from course_utils.lessons.activations.widget import activation_map
from course_utils.measuring import measure
from course_utils.networks import chunked_loss
from course_utils.planning.twin import fit_words
from course_utils.units import format_bytes

KERNELS = ("eager", "flash")
NOTEBOOK = (SOURCES.parent / "05_activations.ipynb").read_text(encoding="utf-8")
HOOKS = ("s, b, h = 1024", "layer = nn.LayerNorm(h)", "def kept_by(")
BLOCK = (*HOOKS, "def eager(", "class Block(", "s, b, h, a = 512", "def flash(", "class SwiGLU(")


@pytest.mark.parametrize(
    ("kernel", "rate", "mlp"), [*product(KERNELS, (0.1, 0.0), ["gelu"]), ("flash", 0.1, "swiglu")]
)
def test_the_lessons_block_keeps_each_tensor_of_the_estimate(kernel: str, rate: float, mlp: str) -> None:
    names = names_from_cells("05", *BLOCK)
    model = replace(PRESETS["gpt2"], dropout=rate, mlp=mlp, ffn=2048 if mlp == "swiglu" else 3072)
    with on_gpu():
        block = names["Block"](
            768, 12, names[kernel], names["SwiGLU"](768, 2048) if mlp == "swiglu" else None, rate=rate
        )
        x = torch.randn(2, 64, 768, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        kept = names["kept_by"](block.to("cuda", torch.bfloat16), x)
    wanted = block_saved(TrainingRun(model, 2, 64, "bf16-master", attention=kernel))
    assert sorted(tensor.untyped_storage().nbytes() for tensor in kept) == sorted(
        item.size for item in wanted
    )


@pytest.mark.parametrize("chunks", [1, 3, 8])
def test_the_lessons_loss_in_chunks_is_the_networks(chunks: int) -> None:
    torch.manual_seed(0)
    features = torch.randn(50, 16, dtype=torch.float64, requires_grad=True)
    head = torch.nn.Linear(16, 40, bias=False, dtype=torch.float64)
    targets = torch.randint(40, (50,))
    mine = names_from_cells("05", *HOOKS, "def chunked_loss(head, features, targets, chunks):")[
        "chunked_loss"
    ](head, features, targets, chunks)
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
    assert len(cells) == len(BATCHES) * len(lengths(run)) and max(lengths(run)) == min(
        2**15, run.model.max_positions
    )
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
    assert "No step of gpt2-xl fits on T4-16GB" in heat_map(run, gpu("T4-16GB"), (1, 128)).alt
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
    assert shown.picture.value != before
    assert shown.figure
    assert "No step of llama3.2-1b fits on T4-16GB" in shown.figure.alt
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
    assert shown.message.startswith("gpt2-xl has fewer than 32,768 positions, so: 4 × 1,024 tokens")
    shown.controls["model"].value = "llama3.2-1b"
    assert shown.run.seq_len == 32768 and "positions" not in shown.message
    with pytest.raises(ValueError, match="seq_len is 1000; the map has 128, 192"):
        activation_map(seq_len=1000)


def test_the_sliders_of_the_map_are_in_order() -> None:
    controls = activation_map().controls
    models, cards = (list(controls[name].options) for name in ("model", "gpu"))
    assert models == sorted(models, key=lambda name: PRESETS[name].parameters)
    assert cards == sorted(cards, key=lambda name: gpu(name).memory) and len(cards) > 5


def test_the_recipe_decides_whether_a_small_llama_takes_over_50_gb() -> None:
    run = TrainingRun("llama3.2-1b", 1, 4096)
    recipes = [*product(("fp32", "amp-bf16", "bf16-master"), ("eager", "efficient")), ("amp-bf16", "flash")]
    peaks = {
        (one, kernel): estimate(run.replace(precision=one, attention=kernel)).total for one, kernel in recipes
    }
    assert {recipe for recipe, peak in peaks.items() if peak > 50e9} == {
        ("fp32", "eager"),
        ("amp-bf16", "eager"),
    }


def test_the_answer_about_the_map_is_that_of_its_controls() -> None:
    shown = activation_map("llama3.2-1b", gpu="A100-80GB")
    takes = [name for name, card in GPUS.items() if estimate(shown.run).total <= card.room]
    assert takes and min(gpu(name).memory for name in takes) > 80e9
    for changes, least in (({"precision": "bf16-master"}, 0), ({"recompute": "full"}, 5e9)):
        assert gpu("A100-40GB").room - estimate(shown.run.replace(**changes)).total > least
    assert gpu("A100-40GB").room - estimate(shown.run.replace(precision="bf16-master")).total < 0.5e9


def test_on_24_gb_recomputation_moves_the_line_and_on_an_l4_the_precision_too() -> None:
    run = TrainingRun("llama3.2-1b", 1, 128)
    recipes = {"as it is": {}, "recompute": {"recompute": "full"}, "precision": {"precision": "bf16-master"}}
    lines = {
        (card, name): list(limits(run.replace(**changes), gpu(card).room))
        for card in ("RTX3090-24GB", "RTX4090-24GB", "L4-24GB", "T4-16GB")
        for name, changes in recipes.items()
    }
    for card in ("RTX3090-24GB", "RTX4090-24GB"):
        assert lines[card, "as it is"] == lines[card, "precision"] < lines[card, "recompute"]
    assert not any(lines["L4-24GB", "as it is"]) and any(lines["L4-24GB", "precision"])
    assert not any(any(lines["T4-16GB", name]) for name in recipes)


def test_up_to_1500_gb_is_the_formula_at_16384_tokens() -> None:
    s, b, h, a, L = 16_384, 1, 4096, 32, 32
    by_hand = L * (34 * s * b * h + 5 * a * s * s * b)
    assert by_hand == 1348 * 2**30 and round(by_hand / 1e9) == 1447
    assert "1,348.0 GiB = 1,447.4 GB" in NOTEBOOK and "30.2 · 10⁹ numbers" in NOTEBOOK
