"""How checks judge torch code: gradients and bytes that `forward_backward` finds, functions on real ranks."""

from functools import partial
from typing import Any

import pytest
import torch
from checking import written
from torch import nn

from course_utils.interactive.feedback import EXITS, CheckFailed
from course_utils.lessons.shared.judging import alive_during, forward_backward, same
from course_utils.lessons.shared.on_ranks import _outcome, _source_of

X = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
SIZE = X.nbytes
LINEAR = nn.Linear(16, 4)


class Holds(torch.autograd.Function):
    """Keeps its input on ctx and in a list, where no hook of autograd sees them."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.hidden = x
        ctx.more = [x * 2]
        return x * 3

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0] * 3


def test_bytes_are_counted_wherever_they_are_held() -> None:
    assert forward_backward(lambda x: x + 1, [X]).kept == 0
    assert forward_backward(LINEAR, [X], LINEAR.parameters()).kept == SIZE, "the input, for a weight"
    assert forward_backward(Holds.apply, [X]).kept == 2 * SIZE, "outside of autograd"


def test_a_loop_is_seen_as_each_forward_begins_at_its_end_and_at_its_peak() -> None:
    kept: list[torch.Tensor] = []

    def loop() -> str:
        for _ in range(3):
            kept.append(LINEAR(X).detach().clone())
            X.add_(0)  # known before, so it counts as nothing
        kept.pop()
        return "done"

    output = 8 * 4 * 4
    seen = alive_during(loop, [X, *LINEAR.parameters()], LINEAR)
    assert seen == ("done", [0, output, 2 * output], 2 * output, 4 * output)
    kept.clear()
    assert alive_during(loop, [X, *LINEAR.parameters()], block=512)[1:] == ([], 2 * 512, 4 * 512)
    assert not LINEAR._forward_pre_hooks


def test_a_known_tensor_counts_as_nothing_in_new_memory_too() -> None:
    weight = nn.Parameter(torch.zeros(8, 16))

    def move() -> None:
        weight.data = weight.data + 1

    assert alive_during(move, [weight]).end == 0


def test_gradients_are_those_of_inputs_then_weights_and_do_not_add_up() -> None:
    start = torch.linspace(-1, 2, 32).reshape(8, 4)
    for _ in range(2):
        found = forward_backward(LINEAR, [X], LINEAR.parameters())
        assert same(found.gradients, [start @ LINEAR.weight, start.T @ X, start.sum(0)])


def test_random_numbers_are_the_same_each_time_and_the_callers_own_stay() -> None:
    before = torch.get_rng_state()
    one, again, other = (forward_backward(nn.functional.dropout, [X], seed=seed) for seed in (0, 0, 1))
    assert torch.equal(one.output, again.output) and not torch.equal(one.output, other.output)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("compute", "message"),
    [
        (lambda x: x.detach(), "cuts the graph"),
        (lambda x: x.exp().mul_(2), "Backward through your output raised RuntimeError"),
    ],
)
def test_what_cannot_go_backward_is_named(compute: Any, message: str) -> None:
    with pytest.raises(CheckFailed, match=message):
        forward_backward(compute, [X])


def test_a_function_that_ends_a_rank_or_leaves_a_setting_spoils_no_other() -> None:
    raised = "On real ranks, your function raised KeyError: 'x'"
    lines = {"sys.exit(3)": EXITS, "raise KeyError('x')": raised, "torch.set_default_dtype(torch.half)": None}
    for line, said in lines.items():
        source = f"import sys, torch\ndef f():\n    {line}"
        found = _outcome(lambda f: {"value": f()}, source, "f")
        assert found.get("said") == said
        assert torch.get_default_dtype() == torch.float32


def test_imports_and_functions_of_other_cells_go_along_to_the_ranks() -> None:
    notebook = {"__name__": "__main__", "layers": nn, "randn": torch.randn, "partial": partial}
    notebook["wide"] = written(["def wide(h):", "    return layers.Linear(h, 4 * h)"], "wide", notebook)
    text, name = _source_of(written(["def f():", "    return partial(wide, 2)()"], "f", notebook))
    ranks: dict[str, Any] = {}
    exec(text, ranks)
    assert ranks[name]().out_features == 8
    assert "randn" not in ranks
