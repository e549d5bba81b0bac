"""cuDNN's workspaces, which are not predicted: the range that an H200 recorded, and where it is told."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from course_utils import measure
from course_utils.measuring.convolutions import SEEN
from course_utils.measuring.files import read_measurement, save_measurement
from course_utils.watching.report import report
from course_utils.watching.script import watch_script

RECORDED = Path(__file__).with_name("gpu") / "recorded" / "convolution_workspace.jsonl"


def kind_of(case: dict[str, Any]) -> str:
    name = case["dtype"] if case["tf32"] else f"{case['dtype']} without TF32"
    return f"{name}, {'channels last' if case['channels_last'] else 'contiguous'}"


def bytes_of(case: dict[str, Any]) -> int:
    """Input, weight and output of a recorded convolution."""
    kind = torch.nn.ConvTranspose2d if case["transposed"] else torch.nn.Conv2d
    padding = 1 if case["transposed"] else case["kernel"] // 2
    names = ("cin", "cout", "kernel", "stride")
    dtype = getattr(torch, case["dtype"])
    with torch.device("meta"):
        cin, cout, kernel, stride = (case[name] for name in names)
        layer = kind(cin, cout, kernel, stride, padding, groups=case["groups"], bias=False, dtype=dtype)
        x = torch.empty(case["batch"], case["cin"], case["size"], case["size"], dtype=dtype)
    return x.nbytes + layer.weight.nbytes + layer(x).nbytes


def test_the_ranges_are_what_the_card_took():
    cases = [json.loads(line) for line in RECORDED.read_text(encoding="utf-8").splitlines()[1:]]
    assert len(cases) == 59
    largest = {kind: [0.0, 0.0] for kind in map(kind_of, cases)}
    for case in cases:
        for number, name in enumerate(("forward_extra", "backward_extra")):
            part = math.ceil(100 * case[name] / bytes_of(case)) / 100
            largest[kind_of(case)][number] = max(part, largest[kind_of(case)][number])
    assert {kind: tuple(parts) for kind, parts in largest.items()} == SEEN


CONVOLVED = """import torch
model = torch.nn.Conv2d(64, 64, 3, padding=1, bias=False).cuda().to(FORMAT)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    model(torch.randn(16, 64, 32, 32, device="cuda").to(FORMAT)).sum().backward()
    optimizer.step()
"""
TENSORS = 4 * (2 * 16 * 64 * 32 * 32 + 64 * 64 * 9)


@pytest.mark.parametrize(
    ("layout", "kind", "most"),
    [
        ("torch.float32", "float32, contiguous", int(1.42 * TENSORS)),
        ("torch.bfloat16, memory_format=torch.channels_last", "bfloat16, channels last", int(0.24 * TENSORS)),
        ("torch.bfloat16", "bfloat16, contiguous", None),
    ],
)
def test_the_range_is_beside_the_peak_and_not_in_it(layout, kind, most, tmp_path):
    path = tmp_path / "train.py"
    path.write_text(CONVOLVED.replace("FORMAT", layout))
    measured = watch_script(path)
    assert measured.not_predicted == {kind: most}
    assert read_measurement(save_measurement(measured, tmp_path / "kept")).not_predicted == {kind: most}
    found = report(measured)
    assert found.to_dict()["not_predicted"] == {kind: most}
    [line] = [line for line in str(found).splitlines() if line.startswith("not predicted")]
    assert kind in line and ("never recorded" if most is None else f"up to {most / 1e9:.3f} GB") in line
    assert "cudnn" not in {item.operation for item in measured.allocations}


def test_a_step_of_one_s_own_has_it_too_and_one_without_convolutions_has_none():
    def step(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).square().mean()

    x = torch.randn(4, 8, 8, 8)
    convolved = measure(step=step, model=torch.nn.Conv2d(8, 8, 3), batch=x, source="simulated")
    assert list(convolved.not_predicted) == ["float32, contiguous"]
    flat = measure(step=step, model=torch.nn.Linear(8, 8), batch=x, source="simulated")
    assert not flat.not_predicted
