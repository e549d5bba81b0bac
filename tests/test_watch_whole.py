"""A script that is watched to its end: the peak of each part, loops that end, and the host's memory."""

import json

import pytest

from course_utils.cli.main import main
from course_utils.measurement import Measurement, RunPart
from course_utils.measuring.files import read_measurement, save_measurement
from course_utils.units import MiB, round_up
from course_utils.watching.report import report
from course_utils.watching.script import watch_script
from course_utils.watching.whole import MOST_BATCHES, MOST_MORE

WIDTH = 1024
LAYER = 4 * WIDTH * WIDTH  # bytes of the only weight, and of a batch as well
SET_UP = f"""import copy
import torch
from torch import nn
from torch.utils.data import DataLoader

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear({WIDTH}, {WIDTH}, bias=False)

    def forward(self, x):
        for layer in [self.layer]:
            x = layer(x)
        return x

    @torch.no_grad()
    def generate(self, x):
        kept = []
        while len(kept) < 3:
            kept.append(self(x))
        return kept

model = Model().to("cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
data = [torch.zeros({WIDTH}, {WIDTH})] * 40

def step(x):
    model(x.to("cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture(autouse=True)
def the_same_everywhere(monkeypatch):
    monkeypatch.setenv("COURSE_SOURCE", "simulated")
    monkeypatch.setenv("COLUMNS", "400")


@pytest.fixture
def watched(tmp_path, monkeypatch):
    """Watches a script after its set-up, as a whole."""
    monkeypatch.chdir(tmp_path)

    def watch(text: str) -> Measurement:
        path = tmp_path / "train.py"
        path.write_text(SET_UP + text)
        return watch_script(path, whole=True)

    return watch


def parts_of(measured: Measurement) -> dict[str, RunPart]:
    """The parts by name; of several with one name the last."""
    return {part.name: part for part in measured.parts}


EVERYTHING = f"""
for epoch in range(100):
    for x in DataLoader(data, batch_size=None):
        step(x)
    model.eval()
    kept = []
    with torch.no_grad():
        for x in DataLoader(data[:3], batch_size=None):
            kept.append(model(x.to("cuda")))
    model.train()
    del x, kept
    states = {{name: one.clone() for name, one in model.state_dict().items()}}
    torch.save(states, "checkpoint.pt")
    del states
print("epochs", epoch + 1)
checkpoint = torch.load("checkpoint.pt", map_location="cuda")
model.load_state_dict(checkpoint)
kept = model.generate(torch.zeros({WIDTH}, {WIDTH}, device="cuda"))
"""


def test_each_part_has_its_peak_and_its_line(watched, capsys):
    measured = watched(EVERYTHING)
    assert "epochs 1\n" in capsys.readouterr().err, "the loop over epochs has trained, so it ends"
    parts = parts_of(measured)
    assert [part.name for part in measured.parts] == [
        "set-up", "first step", "later steps", "evaluation", "saving", "loading", "loading", "generation",
    ]  # fmt: skip
    weight, momentum, gradient, copy, batch, result = [LAYER] * 6
    loss = 2 * 512  # and its gradient
    assert {name: part.breakdown.total - part.breakdown["workspaces"] for name, part in parts.items()} == {
        "set-up": weight + batch,  # which comes to the GPU before the model is called
        "first step": weight + batch + result + gradient + loss,
        "later steps": weight + momentum + batch + result + gradient + loss,
        "evaluation": weight + momentum + batch + 3 * result,
        "saving": weight + momentum + copy,
        "loading": weight + momentum + copy,
        "generation": weight + momentum + copy + batch + 3 * result,
    }
    lines = (measured.parts[3].line, parts["saving"].line, parts["generation"].line)
    assert [line.partition("  ")[2] for line in lines] == [
        'kept.append(model(x.to("cuda")))',
        'torch.save(states, "checkpoint.pt")',
        f'kept = model.generate(torch.zeros({WIDTH}, {WIDTH}, device="cuda"))',
    ]


def test_what_it_finds_is_saved_printed_and_decides_which_card_fits(watched, tmp_path, capsys):
    measured = watched(EVERYTHING)
    assert read_measurement(save_measurement(measured, tmp_path / "kept")).parts == measured.parts
    found = report(measured)
    largest = parts_of(measured)["generation"]
    assert found.allocated == largest.allocated == max(part.allocated for part in measured.parts)
    [line] = [line for line in str(found).splitlines() if "largest  " in line and "generation" in line]
    assert "model.generate(" in line
    assert max(map(len, found.to_text(80).splitlines())) <= 80
    assert main(["watch", "--whole", "--json", "train.py"]) == 0
    assert json.loads(capsys.readouterr().out)["parts"] == [part.to_dict() for part in measured.parts]


def test_the_last_step_is_the_same_as_without_the_rest(watched, tmp_path):
    measured = watched(EVERYTHING)
    alone = watch_script(tmp_path / "train.py")
    assert not alone.parts and alone.host is None
    assert (alone.breakdown, alone.timeline) == (measured.breakdown, measured.timeline)
    assert report(alone).allocated == max(part.allocated for part in measured.parts[:3])


@pytest.mark.parametrize(
    "loop",
    [
        "for number in range(1000):\n    step(x)\n",
        "number = 0\nwhile True:\n    step(x)\n    number += 1\n",
        "def batches():\n    while True:\n        yield from [x, x]\nfor x in batches():\n    step(x)\n",
        "for _ in [0]:\n    for _ in range(9):\n        for number in range(3):\n            step(x)\n",
    ],
)
def test_a_loop_that_trains_ends_and_another_goes_on(watched, loop):
    more = "for number in range(50):\n    kept = [model.generate(x), number]\nassert number == 49\n"
    measured = watched(f"x = torch.zeros({WIDTH}, {WIDTH})\n{loop}x = x.cuda()\n{more}")
    assert "generation" in parts_of(measured)
    assert "2 steps taken" in measured.provenance.note and "not reached" not in measured.provenance.note


def test_a_loop_that_begins_later_takes_one_step(watched):
    loop = "for x in DataLoader(data, batch_size=None):\n    step(x)\n    taken += 1\n"
    measured = watched(f"taken = 0\n{loop}assert taken == 2\n{loop}assert taken == 3\ntorch.save([], 'a.pt')")
    assert "saving" in parts_of(measured)


def test_what_is_not_reached_is_named(watched, tmp_path):
    (tmp_path / "own_loops.py").write_text("def train(step, x):\n    for _ in range(999):\n        step(x)\n")
    call = f"import own_loops\nown_loops.train(step, torch.zeros({WIDTH}, {WIDTH}))\ntorch.save([], 'a.pt')\n"
    note = watched(call).provenance.note
    assert f"ended after {MOST_MORE} more steps" in note
    assert "not reached, or not recognized: saving, train.py:33  torch.save([], 'a.pt')" in note
    fails = f"for _ in range(9): step(torch.zeros({WIDTH}, {WIDTH}))\nraise KeyError('epoch')\n"
    assert "was not reached: train.py:32  raise KeyError('epoch')" in watched(fails).provenance.note


def test_an_evaluation_is_cut_and_says_what_it_leaves_per_batch(watched):
    measured = watched(f"""
step(torch.zeros({WIDTH}, {WIDTH}))
step(torch.zeros({WIDTH}, {WIDTH}))
kept = []
model.eval()
for x in DataLoader(data, batch_size=None):
    kept.append(model(x.cuda()))
assert len(kept) == {MOST_BATCHES}
""")
    part = parts_of(measured)["evaluation with gradients"]
    kept = 2 * MOST_BATCHES * LAYER  # results, and as gradients are on, batches, too
    assert part.after - part.before == kept - LAYER, "the first batch was there before"
    assert "evaluation got 32 of 40 batches, in train.py:37" in measured.provenance.note
    assert "each leaves 8.39 MB: the others add 67.1 MB" in measured.provenance.note


def test_a_teacher_is_part_of_the_step_and_an_average_is_evaluated_after_the_loop(watched):
    measured = watched(f"""
model.eval()  # as `from_pretrained` leaves it: its steps are steps nevertheless
other = copy.deepcopy(model).requires_grad_(False)
for x in DataLoader(data, batch_size=None):
    with torch.no_grad():
        other(x.cuda())
    step(x)
with torch.no_grad():
    other(torch.zeros({WIDTH}, {WIDTH}).cuda())
""")
    assert [part.name for part in measured.parts] == ["set-up", "first step", "later steps", "evaluation"]
    assert measured.parts[3].line.startswith("train.py:39  other(")


ON_THE_HOST = f"""
torch.save(model.state_dict(), "checkpoint.pt")
checkpoint = torch.load("checkpoint.pt", map_location="cpu")
buffers = [torch.empty(3 * 1024 * 1024, dtype=torch.uint8, pin_memory=True)]
buffers += [torch.empty(3 * 1024 * 1024, dtype=torch.uint8).pin_memory()]
for _ in range(9): step(torch.zeros({WIDTH}, {WIDTH}))
"""


def test_the_host_s_tensors_are_counted_for_each_rank_of_a_node(watched, tmp_path, capsys):
    few = SET_UP.replace("* 40", "* 0")
    (tmp_path / "train.py").write_text(few + ON_THE_HOST)
    host = watch_script(tmp_path / "train.py", ranks=16).host
    checkpoint, pageable, batch = LAYER, 3 * MiB, LAYER
    assert host is not None and host.ranks == 8
    assert host.pinned == 2 * round_up(3 * MiB, 4 * MiB)
    assert host.peak == checkpoint + host.pinned + max(pageable, batch)
    assert main(["watch", "--ranks", "16", "train.py"]) == 0
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("host memory")]
    assert f"each of 8 ranks on a node takes as much: {8 * host.peak / 1e9:.3f} GB" in line
