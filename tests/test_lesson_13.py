"""Do the checks of lesson 13 pass a right answer, and give each planted wrong answer its own hint?"""

from contextlib import redirect_stdout
from io import StringIO
from typing import Any

import pytest
import torch
from checking import Answers, JudgedAnswers
from edits import edited
from lesson_source import SOURCES, cells, names_from_cells

from course_utils import on_gpu
from course_utils.lessons.outside_the_step.recorded import RECORDED, three_ways

# --------------------------------------------------------------------------------------------------
# 13.1: peaks_of_a_run


def closed_forms(N: int, step: int, graph: int, logits: int, batches: int) -> dict[str, int]:
    return {
        "careless evaluation": 12 * N + graph * batches,
        "logits kept": 12 * N + 4 * logits * batches,
        "resume on the GPU": 16 * N,
        "step with a copy": step + 4 * N,
    }


CARELESS, KEPT = "12 * N + graph * batches", "12 * N + 4 * logits * batches"

PEAKS_OF_A_RUN = Answers(
    right=closed_forms,
    wrong=[
        (edited(closed_forms, CARELESS, "12 * N + graph"), "who frees a batch's tensors"),
        (edited(closed_forms, CARELESS, "graph * batches"), "the weights and moments are there"),
        (edited(closed_forms, KEPT, "12 * N + 2 * logits * batches"), "a number in fp32"),
        (edited(closed_forms, KEPT, "16 * N + 4 * logits * batches"), "no gradients between two steps"),
        (edited(closed_forms, "16 * N", "24 * N"), "takes the loaded moments"),
        (edited(closed_forms, "16 * N", "12 * N"), "which part of it is copied"),
        (edited(closed_forms, "step + 4 * N", "step + 12 * N"), "an average has no moments"),
        (edited(closed_forms, "step + 4 * N", "step"), "there in every step"),
    ],
)

# --------------------------------------------------------------------------------------------------
# 13.2: resume


def resumed(path: Any, model: Any, optimizer: Any, where: Any = "cpu") -> int:
    checkpoint = torch.load(path, map_location=where)
    model.load_state_dict(checkpoint.pop("model"))
    optimizer.load_state_dict(checkpoint.pop("optimizer"))
    return checkpoint["step"]


def back_where_it_was(path: Any, model: Any, optimizer: Any) -> int:
    return resumed(path, model, optimizer, where=None)


def the_weights_alone(path: Any, model: Any, optimizer: Any) -> int:
    checkpoint = torch.load(path, map_location="cpu")
    model.load_state_dict(checkpoint["model"])
    return checkpoint["step"]


def the_moments_alone(path: Any, model: Any, optimizer: Any) -> int:
    checkpoint = torch.load(path, map_location="cpu")
    optimizer.load_state_dict(checkpoint["optimizer"])
    return checkpoint["step"]


def remembered(path: Any, model: Any, optimizer: Any) -> int:
    device = next(model.parameters()).device
    model.checkpoint = torch.load(path, map_location=device)
    model.load_state_dict(model.checkpoint["model"])
    optimizer.load_state_dict(model.checkpoint["optimizer"])
    return model.checkpoint["step"]


RESUME = Answers(
    right=resumed,
    wrong=[
        (back_where_it_was, "The whole checkpoint is on the GPU"),
        (the_weights_alone, "its next step starts from zero"),
        (the_moments_alone, "does not have the checkpoint's weights"),
        (remembered, "Something of the checkpoint stays"),
    ],
)

# --------------------------------------------------------------------------------------------------
# 13.3: evaluate


def classes(model: Any, batches: Any) -> Any:
    mode = model.training
    with torch.inference_mode():
        model.eval()
        found = torch.cat([model(batch).max(dim=-1).indices for batch in batches])
    model.train(mode)
    return found


def with_graphs(model: Any, batches: Any) -> Any:
    mode = model.training
    model.eval()
    logits = torch.cat([model(batch) for batch in batches])
    model.train(mode)
    return logits.argmax(-1)


@torch.no_grad()
def all_logits(model: Any, batches: Any) -> Any:
    mode = model.training
    model.eval()
    logits = [model(batch) for batch in batches]
    model.train(mode)
    return torch.cat([each.argmax(-1) for each in logits])


@torch.no_grad()
def the_last_ones_name(model: Any, batches: Any) -> Any:
    mode = model.training
    model.eval()
    found = []
    for batch in batches:
        logits = model(batch)
        found.append(logits.argmax(-1))
    model.train(mode)
    return torch.cat(found)


@torch.no_grad()
def with_dropout(model: Any, batches: Any) -> Any:
    return torch.cat([model(batch).argmax(-1) for batch in batches])


@torch.no_grad()
def always_training(model: Any, batches: Any) -> Any:
    model.eval()
    found = torch.cat([model(batch).argmax(-1) for batch in batches])
    model.train()
    return found


EVALUATE = Answers(
    right=classes,
    wrong=[
        (with_graphs, "leaves a graph"),
        (all_logits, "You collect all logits"),
        (the_last_ones_name, "the last one's logits are still alive"),
        (with_dropout, "Is dropout on"),
        (always_training, "Leave the model as you found it"),
    ],
)

# --------------------------------------------------------------------------------------------------
# 13.4: peaks


def weighed(ways: Any, warm_up: Any) -> dict[str, int]:
    def one(way: Any) -> int:
        warm_up()
        there = torch.cuda.memory_allocated()
        torch.cuda.reset_max_memory_allocated()
        way()
        return torch.cuda.memory_stats()["allocated_bytes.all.peak"] - there

    return {name: one(way) for name, way in ways.items()}


def without_a_reset(ways: Any, warm_up: Any) -> dict[str, int]:
    found = {}
    for name, way in ways.items():
        warm_up()
        there = torch.cuda.memory_allocated()
        way()
        found[name] = torch.cuda.max_memory_allocated() - there
    return found


def reset_too_early(ways: Any, warm_up: Any) -> dict[str, int]:
    found = {}
    for name, way in ways.items():
        torch.cuda.reset_peak_memory_stats()
        warm_up()
        there = torch.cuda.memory_allocated()
        way()
        found[name] = torch.cuda.max_memory_allocated() - there
    return found


def before_the_warm_up(ways: Any, warm_up: Any) -> dict[str, int]:
    found = {}
    for name, way in ways.items():
        there = torch.cuda.memory_allocated()
        warm_up()
        torch.cuda.reset_peak_memory_stats()
        way()
        found[name] = torch.cuda.max_memory_allocated() - there
    return found


def everything(ways: Any, warm_up: Any) -> dict[str, int]:
    found = {}
    for name, way in ways.items():
        warm_up()
        torch.cuda.reset_peak_memory_stats()
        way()
        found[name] = torch.cuda.max_memory_allocated()
    return found


PEAKS = Answers(
    right=weighed,
    wrong=[
        (without_a_reset, "the largest peak so far"),
        (reset_too_early, "Your reset comes too early"),
        (before_the_warm_up, "What does a warm-up leave"),
        (everything, "what was there before the way began"),
    ],
)

# --------------------------------------------------------------------------------------------------
# 13.5: weigh_models


def in_a_function(makers: Any, train: Any) -> dict[str, int]:
    def one(make: Any) -> int:
        torch.cuda.reset_peak_memory_stats()
        there = torch.cuda.memory_allocated()
        train(*make())
        return torch.cuda.max_memory_allocated() - there

    return {name: one(make) for name, make in makers.items()}


def still_named(makers: Any, train: Any) -> dict[str, int]:
    found = {}
    for name, make in makers.items():
        there = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        training = make()
        train(*training)
        found[name] = torch.cuda.max_memory_allocated() - there
    return found


def in_a_list(makers: Any, train: Any) -> dict[str, int]:
    there, kept, found = torch.cuda.memory_allocated(), [], {}
    for name, make in makers.items():
        torch.cuda.reset_peak_memory_stats()
        kept.append(make())
        train(*kept[-1])
        found[name] = torch.cuda.max_memory_allocated() - there
    return found


LAST: list[Any] = []


def outlives(makers: Any, train: Any) -> dict[str, int]:
    found = in_a_function(makers, train)
    LAST[:] = [make() for make in makers.values()]
    return found


def after_making(makers: Any, train: Any) -> dict[str, int]:
    found = {}
    for name, make in makers.items():
        training = make()
        there = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        train(*training)
        found[name] = torch.cuda.max_memory_allocated() - there
        del training
    return found


WEIGH_MODELS = Answers(
    right=in_a_function,
    wrong=[
        (still_named, "A later model looks too small"),
        (in_a_list, "All earlier models still count"),
        (outlives, "a model is still alive"),
        (after_making, "begin before the model is made"),
    ],
)

# --------------------------------------------------------------------------------------------------
# 13.6: run_all


def bare(error: Any) -> Any:
    if error is not None:
        error.__traceback__ = None
        bare(error.__cause__)
        bare(error.__context__)
    return error


def all_of(jobs: Any, made: Any = bare, caught: Any = Exception) -> list[Any]:
    results = []
    for job in jobs:
        try:
            results.append(job())
        except caught as error:
            results.append(made(error))
    return results


RUN_ALL = Answers(
    right=all_of,
    wrong=[
        (lambda jobs: all_of(jobs, lambda error: error), "After the first error"),
        (lambda jobs: all_of(jobs, lambda error: error.with_traceback(None)), "An error may have a cause"),
        (lambda jobs: all_of(jobs, str), "return the error itself"),
        (lambda jobs: all_of(jobs, lambda error: type(error)()), "lost its message"),
        (lambda jobs: all_of(jobs, caught=BaseException), "your function goes on"),
    ],
)

ANSWERS = {
    "13.1": PEAKS_OF_A_RUN,
    "13.2": RESUME,
    "13.3": EVALUATE,
    "13.4": PEAKS,
    "13.5": WEIGH_MODELS,
    "13.6": RUN_ALL,
}


class TestAnswers(JudgedAnswers):
    answers = ANSWERS


# --------------------------------------------------------------------------------------------------
# The lesson's own code


def printed(old: str, new: str, batches: int = 0) -> str:
    """Return what a cell prints if a learner writes `new` for `old`, on a card that nothing else is on."""
    names = names_from_cells("13", "class Block", "class GPT", "def batch(", "def weigh(")
    names |= {"card": "H100-80GB", "on_gpu": on_gpu, "held_out": []}
    said = StringIO()
    [cell] = [cell for cell in cells(next(SOURCES.glob("13_*.py"))) if old in cell]
    with redirect_stdout(said):
        if batches:
            with on_gpu(card=names["card"]):
                names["model"], names["optimizer"] = names["make"]()
                names["train"]()  # from then on there are moments
                names["held_out"] = [names["batch"]() for _ in range(batches)]
        exec(cell.replace(old, new), names)
    return said.getvalue()


@pytest.mark.parametrize(
    ("line", "said"), [("del logits", "Right."), ("logits = None", "Right."), ("pass", "Not yet:")]
)
def test_the_line_that_frees_the_last_logits_is_judged(line: str, said: str) -> None:
    assert said in printed("# write one line", line, batches=4)


@pytest.mark.parametrize(
    ("handler", "said"),
    [
        ("pass\n    return fitting(b // 2)", "Right."),
        ("optimizer.zero_grad()\n    return fitting(b // 2)", "Right."),
        ("torch.cuda.empty_cache()\n        return fitting(b // 2)", "Not yet: it says that 0"),
        ("return b // 2", "Not yet: it says that 4"),
    ],
)
def test_the_line_that_leaves_the_error_is_judged(handler: str, said: str) -> None:
    assert said in printed("return fitting(b // 2)  # move this line", handler)


def test_the_table_compares_with_what_the_card_counted() -> None:
    peak = RECORDED["step 3"].peak
    header, row = three_ways({"step 3": (peak, peak + 10**9)}).rows
    assert header[-1] == "gap" and row == ["step 3", "9.42", "10.42", "9.42", "+0.00%"]
    with pytest.raises(ValueError, match="moment"):
        three_ways({"step 4": (1, 1)})
