"""Lesson 18: answers and their hints; answers of calculators cut without loss; what errata compute."""

import re
from typing import Any

import numpy as np
import pytest
import torch
from checking import Answers, JudgedAnswers
from edits import edited
from lesson_source import names_from_cells, printed_with
from matplotlib.collections import QuadMesh
from torch import nn
from torch.nn import functional as F

from course_utils.evidence.frozen_runs import changed
from course_utils.interactive.course_files import number_of
from course_utils.lessons.calculators import calculators, errata, recorded
from course_utils.lessons.calculators.calculators import BLOCKS, CALCULATORS, SCORES, STATES, TERMS
from course_utils.lessons.calculators.errata import ERRATA
from course_utils.lessons.calculators.figures import gap_map
from course_utils.measurement import Measurement
from course_utils.measuring.files import from_json, to_json
from course_utils.measuring.sources import measure
from course_utils.run import TrainingRun


# --------------------------------------------------------------------------------------------------
# 18.1: referee
def step_by_step(make_model: Any, make_batch: Any) -> dict[str, int]:
    """Each step is a call, so that nothing of it lives on."""
    before = torch.cuda.memory_allocated()
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> list[int]:
        torch.cuda.reset_peak_memory_stats()
        sizes = [torch.cuda.memory_allocated()]
        inputs, targets = make_batch()
        loss = F.cross_entropy(model(inputs), targets)
        sizes.append(torch.cuda.memory_allocated())
        loss.backward()
        sizes.append(torch.cuda.memory_allocated())
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return [*sizes, torch.cuda.max_memory_allocated()]

    sizes = [step() for _ in range(3)][-1]
    return dict(zip(("begin", "forward", "backward", "peak"), (size - before for size in sizes), strict=True))


LASTING = "inputs, targets = model.batch = make_batch()"

REFEREE = Answers(
    right=step_by_step,
    wrong=[
        (edited(step_by_step, "range(3)", "range(1)"), "You read the first step"),
        (edited(step_by_step, "(size - before for", "(size for"), "what was on the GPU before your function"),
        (edited(step_by_step, "inputs, targets = make_batch()", LASTING), "Which of your variables hold"),
    ],
)


# --------------------------------------------------------------------------------------------------
# 18.2: breaks
class Shift(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(size))

    def forward(self, x: Any) -> Any:
        return x + self.shift


def table() -> Any:
    return nn.Sequential(nn.Embedding(10**6, 16), nn.Flatten()), torch.arange(2**18)


def frozen_but_for_the_last() -> Any:
    frozen = [nn.Linear(512, 512).requires_grad_(False) for _ in range(6)]
    return nn.Sequential(*frozen, Shift(512)), torch.randn(1024, 512)


def deep(layers: int = 32, h: int = 512, rows: int = 1024) -> Any:
    pairs = [layer for _ in range(layers) for layer in (nn.Linear(h, h), nn.GELU())]
    return nn.Sequential(*pairs), torch.randn(rows, h)


def broken(batch: Any = table, layers: Any = frozen_but_for_the_last, gradients: Any = deep) -> Any:
    return lambda: {"batch": batch, "layers": layers, "gradients": gradients}


BREAKS = Answers(
    right=broken(),
    wrong=[
        (broken(batch=lambda: deep(4, 64, 8192)), "What does not grow with the batch?"),
        (broken(layers=lambda: deep(6)), "that are kept only once, or not at all"),
        (broken(gradients=lambda: deep(4, 512, 512)), "Then the optimizer adds temporaries"),
        (broken(gradients=deep()), "without parentheses"),
    ],
)


# --------------------------------------------------------------------------------------------------
# 18.3: bytes_a_token
def tensor_by_tensor(h: int, kv: int, ffn: int, a: int) -> int:
    fp32 = [h, 1, h, 1, a]
    bf16 = [h] * 4 + [kv, kv] + [ffn] * 4
    return 4 * sum(fp32) + 2 * sum(bf16)


BYTES_A_TOKEN = Answers(
    right=tensor_by_tensor,
    wrong=[
        (edited(tensor_by_tensor, "[h] * 4", "[h] * 7"), "You have the lesson's 22·h"),
        (edited(tensor_by_tensor, "[kv, kv]", "[h, h]"), "With grouped queries they have kv numbers"),
        (lambda h, kv, ffn, a: 6 * h + 2 * kv + 4 * ffn + a + 2, "You count elements, not bytes"),
        (lambda h, kv, ffn, a: 34 * h, "The part with h is off"),
    ],
)

ANSWERS = {"18.1": REFEREE, "18.2": BREAKS, "18.3": BYTES_A_TOKEN}


class TestAnswers(JudgedAnswers):
    answers = ANSWERS


# --------------------------------------------------------------------------------------------------
# calculators
LLAMA = TrainingRun("llama3.1-8b", 2, 8192)
SMALL = {
    "GPT-2": TrainingRun(changed("gpt2", layers=2), 4, 1024),
    "Llama": TrainingRun(changed("llama3.2-1b", layers=2), 2, 4096),
}


@pytest.fixture(scope="module")
def steps() -> dict[str, Measurement]:
    return {name: measure(run, source="simulated") for name, run in SMALL.items()}


@pytest.mark.parametrize("run", [LLAMA, TrainingRun("gpt2", 4, 512, attention="eager")], ids=str)
def test_the_parts_of_an_answer_are_the_answer(run: TrainingRun) -> None:
    for one in CALCULATORS:
        parts = one.parts(run)
        assert tuple(parts) == calculators.COMPONENTS
        assert sum(parts.values()) == one.total(run)
        assert all(size >= 0 for size in parts.values()), parts
        assert one.states(run) % one.counted(run) == 0, "states are whole bytes per parameter"
        held = {"states": parts[STATES] > 0, "activations": parts[SCORES] + parts[BLOCKS] > 0}
        assert held == {part: one.counts in (part, "a step") for part in held}


def test_scores_are_what_only_the_formulas_for_eager_attention_have() -> None:
    flash = {one.name for one in CALCULATORS if one.parts(LLAMA)[SCORES]}
    eager = {one.name for one in CALCULATORS if one.parts(LLAMA.replace(attention="eager"))[SCORES]}
    assert eager - flash == {"llm-analysis"}
    cookbook = next(one for one in CALCULATORS if one.name == "EleutherAI cookbook")
    assert cookbook.parts(LLAMA)[SCORES] == 5 * 32 * 8192**2 * 2 * 32


@pytest.mark.parametrize("name", SMALL)
def test_every_tensor_at_the_peak_belongs_to_one_component(name: str, steps: dict[str, Measurement]) -> None:
    peak = steps[name].breakdown
    parts = calculators.counted_at_peak(steps[name])
    assert sum(parts.values()) == steps[name].peak
    assert parts[SCORES] + parts[BLOCKS] + parts[calculators.OUTSIDE] == peak["activations"]
    assert parts[STATES] == peak["parameters"] + peak["gradients"] + peak["optimizer_states"]
    assert parts[SCORES] == 0, "a flash kernel writes none"


def test_eager_scores_are_found_by_their_shape() -> None:
    """Under autocast: fp32 of softmax, its 16-bit copy, the mask; not q and k of 64 tokens, also squares."""
    run = TrainingRun(changed("gpt2", layers=2), 16, 64, attention="eager")
    a, b, L = run.model.heads, run.micro_batch, run.model.layers
    found = calculators.counted_at_peak(measure(run, source="simulated"))[SCORES]
    assert found == (4 + 2 + 1) * a * 64 * 64 * b * L


def test_a_recording_that_keeps_only_what_is_alive_at_the_peak_is_enough(
    steps: dict[str, Measurement],
) -> None:
    thin = from_json(to_json(steps["GPT-2"]), "a test")
    assert len(thin.allocations) < len(steps["GPT-2"].allocations)
    assert calculators.gaps(SMALL["GPT-2"], thin) == calculators.gaps(SMALL["GPT-2"], steps["GPT-2"])


@pytest.mark.parametrize("name", SMALL)
def test_eight_terms_add_up_to_the_whole_gap(name: str, steps: dict[str, Measurement]) -> None:
    found = calculators.gaps(SMALL[name], steps[name])
    assert list(found) == list(calculators.answers(SMALL[name])) and len(found) == len(CALCULATORS) == 9
    for one in CALCULATORS:
        assert tuple(found[one.name]) == TERMS
        assert sum(found[one.name].values()) == one.total(SMALL[name]) - steps[name].peak


def test_a_map_draws_the_gaps(steps: dict[str, Measurement]) -> None:
    run, step = SMALL["GPT-2"], steps["GPT-2"]
    cells: Any = gap_map(run, step, "Gaps")
    table = calculators.gaps(run, step)
    given = np.array([[*found.values(), sum(found.values())] for found in table.values()])
    shares = np.clip(given.ravel() / step.peak, -1, 1)
    (mesh,) = cells.findobj(QuadMesh)
    depths = np.asarray(mesh.get_array()).ravel()
    assert depths * abs(depths) == pytest.approx(shares)
    shown = [float(text.get_text().replace("−", "-").replace(",", "")) for text in cells.axes[0].texts]
    assert shown == pytest.approx(list(given.ravel() / 1e9), abs=0.051)


# --------------------------------------------------------------------------------------------------
# what the lesson shows, and asks the learner to write
BEFORE = (
    "def zero(", "import predict, reveal", "xl = {", "class Attention(", "class Block(", "class GPT(",
    "def note(moment", "def weigh(", "notes = {}", "def kept(", "zeros = 2", "V = 50257  #",
)  # fmt: skip
"""The cells before the ledger's that compute."""


def test_the_three_formulas_that_the_lesson_shows_are_those_of_their_authors() -> None:
    shown = names_from_cells("18", "def zero(")
    names = ("ZeRO", "Ultra-Scale Playbook, text", "llm-analysis")
    authors = {one.name: one for one in CALCULATORS}
    for (model, sequences), step in recorded.RECORDED.items():
        run = TrainingRun(model, sequences, 1024)
        for name, formula in zip(names, ("zero", "playbook", "llm_analysis"), strict=True):
            one = authors[name]
            assert shown[formula](**step.letters | {"N": one.counted(run)}) == one.total(run)


BLOCK_LINE = "return L * s * b * h * (34 + 5 * a * s / h)  # write"
LOSS_LINE = "return s * b * (2 * V + 4 * h)"
STATES_LINE = "return 2 * N + 4 * N + 12 * N  # and this one"
BETWEEN = "  # write this line again\n\n\ndef corrected_states(N):\n    "


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (BLOCK_LINE, BLOCK_LINE, "Not yet: +199"),
        (BLOCK_LINE, "return L * s * b * h * 34  # write", "Not yet: -10"),
        (BLOCK_LINE, "return L * s * b * (38 * h + 4 * a + 16)  # write", "Right."),
        (LOSS_LINE, LOSS_LINE, "Not yet: the loss is -79"),
        (LOSS_LINE, "return s * b * (10 * V + 6 * h)", "Not yet: the loss is -0.0% off, states +4"),
        (STATES_LINE, "return 12 * N", "Not yet: the loss is -79"),
        (
            f"{LOSS_LINE}{BETWEEN}{STATES_LINE}",
            f"return s * b * (10 * V + 6 * h){BETWEEN}return 12 * N",
            "Right.",
        ),
    ],
)
def test_a_learners_line_is_judged_by_what_was_weighed(old: str, new: str, said: str) -> None:
    assert printed_with("18", old, new, *BEFORE).startswith(said)


def test_the_ledger_and_the_simulation_are_as_near_to_the_card_as_the_lesson_says() -> None:
    more = ("from course_utils.figures import bars", "def ledger(")
    ledger = names_from_cells("18", *BEFORE, *more)["ledger"]
    assert len(recorded.RECORDED) >= 9 and len({model for model, _ in recorded.RECORDED}) == 4
    for step in recorded.RECORDED.values():
        assert -0.04 < ledger(**step.letters) / step.counted - 1 < 0
        assert abs(step.blocks / step.counted - 1) < 0.003
    rows = recorded.judged({"ledger": ledger}).rows
    assert len(rows) == len(recorded.RECORDED) + 1 and {len(row) for row in rows} == {5}


# --------------------------------------------------------------------------------------------------
# errata
def test_each_lesson_names_the_claims_that_it_corrects() -> None:
    for source in sorted((errata.ROOT / "notebooks" / "src").glob("[01]*.py")):
        number = number_of(source)
        named = re.search(r"corrects claims? ([\d, and]+) of\W+\[what", source.read_text(encoding="utf-8"))
        here = [str(one) for one, erratum in enumerate(ERRATA, 1) if erratum.lesson == number]
        if number == "18":  # which shows the whole list
            here = []
        assert re.findall(r"\d+", named[1] if named else "") == here, source.name


@pytest.mark.parametrize(
    ("claim", "numbers"),
    [
        ("Activations of GPT-2 XL at batch 32", ["60.4 GB"]),
        ("Llama-3 8B keeps 97 GB of activations", ["97.0 GiB = 104.2 GB", "17.0 GiB = 18.3 GB"]),
        ("A 1B model takes 16 GB", ["9.1 GB = 25.1 GB", "1.24 · 10⁹"]),
        ("GPT-2 has 117 M", ["117 M, with V = 40,478 117 M", "1542 M, with V = 40,478 1542 M"]),
        ("ZeRO-2 with T5", ["15.93 GiB", "17.11 GB", "11.28 GiB"]),
    ],
)
def test_evidence_comes_out_at_what_the_sources_print(claim: str, numbers: list[str]) -> None:
    (found,) = (one.evidence for one in ERRATA if one.claim.startswith(claim))
    assert all(number in found for number in numbers), found
