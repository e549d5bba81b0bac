"""torch.compile on a simulated GPU: bytes by hand, names, graph breaks, and a torch that cannot do it."""

import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from course_utils.measuring import compiling
from course_utils.measuring.simulated import availability
from course_utils.measuring.sources import measure
from course_utils.units import BLOCK
from course_utils.watching.on_gpu import on_new_gpu

pytestmark = pytest.mark.skipif(not availability()[0], reason="a GPU cannot be simulated here")

SIZE = 1 << 20
FP32 = 4


def chain(x: torch.Tensor) -> torch.Tensor:
    return ((x * 2).cos().exp() + 1).sum()


class Chain(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return chain(x)


def kept(function, x: torch.Tensor) -> int:
    """Bytes that a forward leaves allocated, its result included."""
    before = torch.cuda.memory_allocated()
    result = function(x)
    after = torch.cuda.memory_allocated()
    result.backward()
    return after - before


def test_a_fused_chain_keeps_nothing_but_its_input():
    with on_new_gpu():
        x = torch.empty(SIZE, device="cuda", requires_grad=True)
        # eager: the argument of cos, and the result of exp
        assert kept(chain, x) == 2 * FP32 * SIZE + BLOCK
        assert kept(torch.compile(chain), x) == BLOCK


def test_what_was_compiled_before_the_block_runs_eagerly_and_says_so(capsys, monkeypatch):
    monkeypatch.setattr(compiling, "_tried", {})  # as in a process that has compiled nothing in a block

    def fresh(x: torch.Tensor) -> torch.Tensor:
        return (x.sin() * 2).exp().sum()

    before = torch.compile(fresh)
    with on_new_gpu():
        x = torch.empty(SIZE, device="cuda", requires_grad=True)
        assert kept(before, x) == kept(fresh, x)
    assert capsys.readouterr().out.strip() == compiling.EARLIER


def test_other_ways_to_ask_for_it_compile_as_well():
    with on_new_gpu():
        x = torch.empty(SIZE, device="cuda", requires_grad=True)
        ways = (
            torch.compile(chain, dynamic=True),
            torch.compile(chain, fullgraph=True),
            torch.compile(chain, mode="max-autotune-no-cudagraphs"),
        )
        assert [kept(way, x) for way in ways] == [BLOCK] * 3
        module = Chain()
        module.compile()
        assert kept(module, x) == BLOCK


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.gelu(self.up(x))
        return self.down(hidden)


def compiled_step(model, optimizer, x):
    torch.compile(model)(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def broken_step(model, optimizer, x):
    def forward(x):
        hidden = F.gelu(model.up(x))
        torch._dynamo.graph_break()
        return model.down(hidden)

    torch.compile(forward)(x).sum().backward()
    optimizer.step()


def measured(step):
    model = Mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    return measure(
        step=step, model=model, optimizer=optimizer, batch=torch.zeros(512, 64), source="simulated"
    )


def test_buffers_have_the_names_and_lines_of_the_model():
    found = measured(compiled_step)
    fused = [item for item in found.allocations if item.operation.endswith("gelu") and item.step == 2]
    # the input of the second product; backward has the gradient in front of it
    made = [(item.kind, item.shape) for item in fused if item.phase == "forward"]
    assert made == [("activations", (512, 256))]
    assert all("hidden = F.gelu(self.up(x))" in item.line for item in fused)
    assert {mark.phase for mark in found.timeline.marks} >= {"forward", "loss", "backward", "optimizer"}
    assert "graph break" not in found.provenance.note


def test_graph_breaks_are_counted_with_their_lines():
    note = measured(broken_step).provenance.note
    assert "1 graph break" in note
    assert "torch._dynamo.graph_break()" in note and "test_compiling.py" in note


def test_a_graph_that_is_captured_is_named_as_not_predicted():
    def step(model, optimizer, x):
        torch.compile(model, mode="reduce-overhead")(x).sum().backward()
        optimizer.step()

    assert compiling.CUDA_GRAPHS in measured(step).provenance.note


def test_another_torch_runs_eagerly_and_says_so(monkeypatch):
    def step(model, optimizer, x):
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    monkeypatch.setattr(compiling, "_tried", {})
    monkeypatch.setattr(compiling, "_of_generated_code", lambda: iter([(torch, "no_such_name", None)]))
    found = measured(compiled_step)
    assert compiling.SKIPPED in found.provenance.note and "no_such_name" in found.provenance.note
    assert found.peak == measured(step).peak


def test_torch_is_as_it_was_afterwards():
    before = (torch.compile, F.scaled_dot_product_attention, torch.cuda.default_generators)
    had_triton = "triton" in sys.modules
    measured(compiled_step)
    assert (torch.compile, F.scaled_dot_product_attention, torch.cuda.default_generators) == before
    assert ("triton" in sys.modules) >= had_triton
    assert compiling.Kernel.executed > 0
    assert torch.ones(2).tolist() == [1.0, 1.0]
