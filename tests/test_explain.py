"""The table of the largest tensors at the peak: every byte in it, each tensor's line of code, its groups."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from engine import simulate, tiny

from course_utils import measure
from course_utils.measurement import explained
from course_utils.measuring.files import to_json
from course_utils.measuring.tracker import Tracker
from course_utils.run import TrainingRun

RUN = TrainingRun(tiny("gpt2", dropout=0.1, layers=3), 2, 64)
EVERYTHING = 10_000


@pytest.mark.parametrize(("source", "recompute"), [("simulated", "full"), ("cpu", "none")])
def test_all_rows_together_are_the_peak(source, recompute):
    measured = measure(RUN.replace(precision="fp32", attention="eager", recompute=recompute), source)
    found = measured.explain(EVERYTHING)
    assert sum(row.total for row in found.rows) == found.peak == measured.peak and found.rest == 0
    kinds = {kind: sum(row.total for row in found.rows if row.kind == kind) for kind in measured.breakdown}
    assert kinds == dict(measured.breakdown)
    assert [row.total for row in found.rows] == sorted((row.total for row in found.rows), reverse=True)


def test_every_tensor_says_what_it_is_of():
    """States their parameter, what the network does itself its class, and what no module does the phase."""
    measured = simulate(RUN)
    rows = measured.explain(EVERYTHING).rows
    assert all(row.module for row in rows if row.kind != "inputs")
    weights = [row for row in rows if row.kind == "parameters"]
    assert [row.count for row in weights if row.module == "blocks.*.mlp.up.weight"] == [3]
    states = {row.module: row.count for row in rows if row.kind == "optimizer_states"}
    assert states["exp_avg of blocks.*.mlp.up.weight"] == states["exp_avg_sq of blocks.*.mlp.up.weight"] == 3
    assert {item.module for item in measured.allocations if item.phase == "loss"} == {"(loss)"}
    assert "(loss)" in {item.module for item in measured.allocations if item.phase == "backward"}
    assert "Transformer" in {item.module for item in measured.allocations if item.phase == "forward"}
    assert "exp_avg of blocks.*" in repr(measured.explain(EVERYTHING))


def test_backward_is_traced_to_the_line_and_module_of_its_forward():
    class Doubling(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x.tanh()  # its gradient first
            return y.exp()  # its gradient second

    model = torch.nn.Sequential(torch.nn.Linear(200, 200), Doubling())
    with Tracker("cpu") as tracker:
        tracker.watch(model, list)
        with tracker.in_phase("forward"):
            loss = model(torch.ones(100, 200)).sum()
        with tracker.in_phase("backward"):
            loss.backward()
    made = {item.operation: item for item in tracker.allocations() if item.phase == "backward" and item.line}
    assert made["tanh_backward"].line.endswith("y = x.tanh()  # its gradient first")
    assert made["mul"].line.endswith("return y.exp()  # its gradient second")
    assert made["tanh_backward"].module == made["mul"].module == "1"
    assert made["mm"].kind == "gradients" and made["mm"].module == "0.weight"


def test_what_is_recorded_of_a_line_names_no_folder_of_this_machine():
    run = RUN.replace(precision="fp32", attention="eager", recompute="full", clip_grad_norm=1.0)
    measured = measure(run, "cpu")
    recorded = to_json(measured)
    lines = {item.line for item in measured.allocations} - {""}
    assert len(lines) > 10
    for line in lines:
        assert re.match(r"[\w.]+\.py:\d+(  \S|$)", line), line
    root = str(Path(__file__).resolve().parent.parent)
    assert root not in json.dumps(recorded) and sys.prefix not in json.dumps(recorded)


def test_it_draws_itself_without_letting_code_become_markup():
    with Tracker("cpu") as tracker, tracker.in_phase("forward"):
        kept = torch.ones(1000) if 1 < 2 else None
    (made,) = tracker.allocations()
    assert kept is not None and "if 1 < 2 else None" in made.line
    html = simulate(RUN).explain(3)._repr_html_()
    assert html.count("<tr>") == 4 and "zeros_like" in html
    assert "1 &lt; 2" in explained([made], 1, "title")._repr_html_()
