"""A script that is watched as it is: what it takes, what it may not do, and that its folder is unchanged."""

import re
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from course_utils import measure
from course_utils.cli import learn
from course_utils.cli.main import main
from course_utils.errors import ScriptError
from course_utils.estimating.workspaces import workspaces_of
from course_utils.gpus import GPUS
from course_utils.interactive.course_files import ROOT
from course_utils.units import GB, MB, round_up
from course_utils.watching import shield
from course_utils.watching.report import cards, changed_peaks, peak_with, report
from course_utils.watching.script import watch_script

SCRIPTS = ROOT / "tests" / "scripts"

SET_UP = """import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 10)).to("cuda")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
def step():
    x, y = torch.randn(32, 64).cuda(), torch.randint(10, (32,)).cuda()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss
"""
TRAINED = SET_UP + "for number in range(5):\n    print(number, step().item())\n"


@pytest.fixture
def written(tmp_path, monkeypatch):
    """Writes a script into a folder of its own, which is the current one, and returns its path."""
    monkeypatch.chdir(tmp_path)

    def write(text: str | bytes, name: str = "train.py") -> Path:
        (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
        return tmp_path / name

    return write


def test_a_script_takes_what_its_step_takes(written):
    def step(model, optimizer, batch):
        loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 10))
    batch = torch.randn(32, 64), torch.randint(10, (32,))
    own = measure(step=step, model=model, optimizer=torch.optim.AdamW(model.parameters()), batch=batch)
    measured = watch_script(written(TRAINED))
    with_bias = workspaces_of((8, 0)).lt  # of cuBLASLt, until torch 2.11
    workspaces = 2 * round_up(8192 * 1024 + 128 * 1024) + with_bias
    assert dict(measured.breakdown) == dict(own.breakdown) | {"workspaces": workspaces}
    assert measured.peak_phase == own.peak_phase
    assert "placeholders of 1.0: train.py:14" in measured.provenance.note


def test_two_optimizers_take_two_steps_each():
    measured = watch_script(SCRIPTS / "gan.py", ["--batch-size", "4", "--width", "32"])
    weights = [(32, 100), (32,), (784, 32), (784,), (32, 784), (32,), (1, 32), (1,)]
    expected = sum(round_up(4 * torch.Size(shape).numel()) for shape in weights)
    assert measured.moments["end of step 2"]["parameters"] == expected
    assert measured.moments["end of step 2"]["optimizer_states"] == 2 * expected
    assert "2 steps taken, the last one 2 of Adam" in measured.provenance.note
    assert {mark.step for mark in measured.timeline.marks} == {1, 2}


def test_a_step_has_ended_when_each_optimizer_that_steps_has(written):
    other = "critic = nn.Linear(8, 1).cuda()\nother = torch.optim.SGD(critic.parameters(), lr=0.1)\n"
    each_step = "for _ in range(3): critic(torch.randn(4, 8).cuda()).sum().backward(); other.step()"
    measured = watch_script(written(f"{SET_UP}{other}for _ in range(50):\n    {each_step}\n    step()\n"))
    assert "2 steps taken, the last one 3 of SGD and 1 of AdamW" in measured.provenance.note


def test_nanogpt_s_way():
    measured = watch_script(SCRIPTS / "nanogpt.py", ["2", "2", "32", "16", "2", "3"])
    note = measured.provenance.note
    embeddings = [
        item for item in measured.allocations if item.shape == (50304, 32) and item.kind == "parameters"
    ]
    assert len(embeddings) == 1, "tied weights are one tensor"
    assert "torch.compile is skipped" in note and "train.bin" in note and "ckpt.pt" in note
    assert {"weight_copies", "inputs"} <= {item.kind for item in measured.allocations}
    assert {item.phase for item in measured.allocations} >= {"forward", "backward", "optimizer"}


def test_a_model_larger_than_the_host(written):
    size = 400_000  # 640 GB of weights
    text = f"""
import torch
from torch import nn
model = nn.Linear({size}, {size}, bias=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
assert next(model.parameters()).device.type == "cpu"
model.cuda()
for _ in range(3):
    model(torch.randn(2, {size}).to("cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
    assert watch_script(written(text)).breakdown["parameters"] == 4 * size * size


def test_data_on_the_host_is_real_and_its_values_are_known_on_the_gpu(written):
    text = (
        SET_UP
        + """
import copy
assert abs(torch.ones(3).sum().item() - 3) < 1e-6 and torch.arange(4).numpy().sum() == 6
mask = torch.ones(4, 8, dtype=torch.bool).to("cuda")
mask[1, 2] = False
assert not mask.all() and mask.sum().item() == 31 and mask[0].tolist() == [True] * 8
assert torch.arange(8, device="cuda").cpu().numpy().sum() == 28
unknown = torch.zeros(3, device="cuda")
view = unknown[1:]
unknown += torch.randn(3, device="cuda")
assert view.sum().item() == 1.0, "a placeholder: nobody knows it any more"
average = copy.deepcopy(model)
assert average[0].weight is not model[0].weight
loss = step()
if torch.isnan(loss) or not torch.isfinite(loss) or loss > 1000:
    raise SystemExit("a loss that is no number")
step()
"""
    )
    measured = watch_script(written(text))
    assert measured.breakdown["parameters"] == 2 * sum(round_up(4 * n) for n in (64 * 256, 256, 256 * 10, 10))


def test_nothing_of_the_user_s_is_written_or_deleted(written, tmp_path):
    text = (
        SET_UP
        + """
import logging, os, pathlib, shutil, tempfile
import numpy as np
open("new.txt", "w").write("new")
assert open("new.txt").read() == "new" and os.path.exists("new.txt") and "new.txt" not in os.listdir("kept")
with open("kept.txt", "a") as file:
    file.write(" and more")
assert open("kept.txt").read() == "old and more"
os.makedirs("a/b", exist_ok=True)
pathlib.Path("a/b/c").write_text("c")
assert pathlib.Path("a/b/c").read_text() == "c" and os.listdir("a") == ["b"]
os.remove("a/b/c")
assert not os.path.exists("a/b/c")
os.remove("gone.txt")
shutil.rmtree("kept")
os.replace("moved.txt", "target.txt")
assert open("target.txt").read() == "old"
np.save("array.npy", np.zeros(3))
assert np.load("array.npy").sum() == 0
with tempfile.TemporaryDirectory() as folder, tempfile.NamedTemporaryFile() as file:
    pathlib.Path(folder, "x").write_text("x")
logging.FileHandler("log.txt").emit(logging.makeLogRecord({"msg": "x"}))
torch.save(model.state_dict(), "a/model.pt")
import helper
step(), step()
"""
    )
    path = written(text)
    for name in ("kept.txt", "gone.txt", "moved.txt"):
        (tmp_path / name).write_text("old")
    (tmp_path / "helper.py").write_text("value = 1\n")
    (tmp_path / "kept").mkdir()
    before = {file: file.read_bytes() if file.is_file() else b"" for file in tmp_path.rglob("*")}
    note = watch_script(path).provenance.note
    assert {file: file.read_bytes() if file.is_file() else b"" for file in tmp_path.rglob("*")} == before
    assert "written to a temporary folder, now deleted: new.txt" in note
    assert "not deleted: gone.txt, kept, moved.txt" in note


REFUSED = {
    "no Python": (b"\x00\x01\xff", r"train.py: this interpreter cannot read it as Python: .*null bytes"),
    "no syntax": ("x = (1,\nprint(x\n", r"train.py:2  print\(x: this interpreter cannot read it as Python"),
    "trains nothing": ("print('hello')\n", "train.py ends without a step of a torch optimizer"),
    "on the CPU": (TRAINED.replace(".cuda()", "").replace('"cuda"', '"cpu"'), "but not on the GPU"),
    "forks": ("import os\nos.fork()\n", r"train.py:2  os.fork\(\): starts a process"),
    "several ranks": (
        "import torch.distributed as dist\ndist.init_process_group('nccl', rank=0, world_size=2)\n",
        "train.py:2 .*process group",
    ),
    "the network": (
        "import urllib.request\nurllib.request.urlopen('http://example.com')\n",
        "train.py:2 .*asks the network for example.com",
    ),
    "a second GPU": (f"{SET_UP}model.to('cuda:1')\n", "train.py:13 .*'cuda:1' does not exist"),
    "shapes by values": (
        f"{SET_UP}x = torch.randn(4, device='cuda')\nx[x > 0]\n",
        r"train.py:14  x\[x > 0\]: index needs the values of its input",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_followed_is_one_sentence(case, written):
    text, words = REFUSED[case]
    with pytest.raises(ScriptError, match=words) as refused:
        watch_script(written(text))
    assert "\n" not in str(refused.value)


def test_an_error_of_its_own_is_shown_with_its_own_frames(written):
    (written("def fails():\n    raise KeyError('mine')\n", "other.py"))
    with pytest.raises(ScriptError) as refused:
        watch_script(written("import other\nother.fails()\n"))
    said = str(refused.value)
    assert said.startswith("other.py:2  raise KeyError('mine'): the script itself fails: KeyError: 'mine'\n")
    assert re.findall(r"line (\d+), in (\S+)", said) == [("2", "<module>"), ("2", "fails")]
    assert "course_utils" not in said and "runpy" not in said


@pytest.mark.skipif(sys.platform != "linux", reason="the system does not limit a process's memory")
def test_the_host_s_memory_is_not_used_up(written, monkeypatch):
    monkeypatch.setattr(shield, "free_bytes", lambda: 400 * MB)
    with pytest.raises(ScriptError, match=r"train.py:2  .*ran out of host memory") as refused:
        watch_script(written("import torch\nkept = [torch.ones(10_000_000) for _ in range(1000)]\n"))
    assert "\n" not in str(refused.value)
    assert torch.ones(120_000_000).sum() > 0, "afterwards there is no limit"


def test_a_script_that_is_not_there_and_torchrun_are_refused(written, monkeypatch):
    with pytest.raises(ValueError, match=r"there is no script 'missing\.py'"):
        watch_script("missing.py")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ScriptError, match="without torchrun"):
        watch_script(written(TRAINED))


BLOCKS = """import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(256), nn.Linear(256, 1024), nn.Linear(1024, 256)
    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(6)), nn.Linear(256, 5000)
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x
def piece(x, y):
    return nn.functional.cross_entropy(model.head(x), y)
model = Model().cuda()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(2):
    with torch.autocast("cuda", torch.bfloat16):
        x, y = torch.randn(4096, 256, device="cuda"), torch.randint(5000, (4096,), device="cuda")
        loss = piece(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
IN_CHUNKS = "sum(checkpoint(piece, *ab, use_reentrant=False) for ab in zip(model(x).chunk(8), y.chunk(8)))"


def test_what_would_help_helps_as_much_in_the_changed_script(written):
    measured = watch_script(written(BLOCKS))
    assert peak_with(measured, lambda _: 1) == measured.peak
    predicted = dict(changed_peaks(measured))
    recomputed = BLOCKS.replace("x = block(x)", "x = checkpoint(block, x, use_reentrant=False)")
    peak = predicted["each of the 6 blocks recomputed in backward (torch.utils.checkpoint)"]
    assert peak == pytest.approx(watch_script(written(recomputed)).peak, rel=0.002)
    chunked = BLOCKS.replace("piece(model(x), y)", IN_CHUNKS)
    peak = predicted["the loss in 8 chunks, with the layer before it"]
    assert peak == pytest.approx(watch_script(written(chunked)).peak, rel=0.04)


def test_cards_are_told_by_reserved_memory(written):
    measured = watch_script(written(TRAINED))
    lines = list(cards(measured, 15 * GB, 100 * GB))
    assert lines[0].startswith("Fits: H200")
    assert "A100-80GB" in lines[1]
    assert "returns what it caches" in lines[1]
    assert "T4-16GB (by " in lines[2]
    assert sum(name in line for name in GPUS for line in lines[:3]) >= len(GPUS)
    assert "max_memory_reserved" in report(measured)


def test_the_command_line(written, tmp_path, capsys, monkeypatch):
    codes = list[int]()
    monkeypatch.setattr(learn.os, "_exit", codes.append)
    written("import sys\nprint(sys.argv[1:])\n" + TRAINED)
    main(["watch", "--here", "--save", "kept.measurement", "train.py", "--lr", "3"])
    assert codes == [0]
    out, err = capsys.readouterr()
    assert "peak " in out and "Fits: " in out and "train.py:6" in out
    assert "['--lr', '3']\n0 1.0\n" in err, "what the script prints"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["kept.measurement", "train.py"]
