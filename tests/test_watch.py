"""A script that is watched as it is: what it takes, what it may not do, and that its folder is unchanged."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from course_utils import measure
from course_utils.cli.main import main
from course_utils.errors import ScriptError
from course_utils.estimating.workspaces import workspaces_of
from course_utils.gpus import GPUS, Gpu, gpu, recognized
from course_utils.interactive.course_files import ROOT
from course_utils.measuring import live
from course_utils.planning.twin import SAFETY
from course_utils.units import GB, MB, GiB, MiB, round_up
from course_utils.watching import apart, shield
from course_utils.watching.report import changed_peaks, lines_of_cards, peak_with, report
from course_utils.watching.script import place_for, watch_script
from course_utils.watching.which_cards import FITS, FROM_CACHE, TOO_SMALL, Answer, answer_on, answers

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


@pytest.fixture(autouse=True)
def the_same_everywhere(monkeypatch):
    monkeypatch.setenv("COURSE_SOURCE", "simulated")


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


def test_a_model_that_is_replaced_is_gone(written):
    again = "del model, optimizer\nmodel = nn.Linear(64, 8).cuda()\n"
    optimizer = "optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)\nstep()\nstep()\n"
    measured = watch_script(written(f"{SET_UP}step()\n{again}{optimizer}"))
    assert measured.moments["end of step 2"]["parameters"] == 4 * 64 * 8 + 512
    assert measured.moments["end of step 2"]["optimizer_states"] == 2 * (4 * 64 * 8 + 512)


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
    assert "torch.compile is skipped" not in note and "train.bin" in note and "ckpt.pt" in note
    assert any("gelu" in item.operation and item.kind == "activations" for item in measured.allocations)
    assert "inputs" in {item.kind for item in measured.allocations}
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


UNKNOWN = """
x = torch.randn(32, 64, device="cuda")
assert not (x > 3).any() and torch.isfinite(x).all() and torch.isnan(x).sum() == 0
assert not torch.isnan(model(x)).any(-1).tolist()[0]
policy = torch.distributions.Categorical(probs=model(x).softmax(-1), validate_args=True)
policy.log_prob(policy.sample())
torch.distributions.Normal(x, x.exp(), validate_args=True).rsample()
step(), step()
"""


def test_a_test_of_values_that_nobody_knows_finds_the_placeholder_and_is_noted(written):
    note = watch_script(written(SET_UP + UNKNOWN)).provenance.note
    assert "placeholders of 1.0: train.py:15  assert not (x > 3).any()" in note and "train.py:17" in note


KNOWN = """
labels, x = torch.tensor([1, 0, 2, 0]).cuda(), torch.randn(4, 64, device="cuda")
assert labels.nonzero().shape == (2, 1) and labels.unique().tolist() == [0, 1, 2]
assert x[labels > 0].shape == (2, 64) and labels[labels > 0].tolist() == [1, 2]
assert torch.masked_select(x[:, 0], labels == 0).shape == (2,)
model(x)[labels > 0, 0].sum().backward()
stride = torch.empty((), dtype=torch.int64, device="cuda").fill_(8)
assert (torch.arange(3, device="cuda") * stride).tolist() == [0, 8, 16]
step(), step()
"""


def test_shapes_follow_from_values_that_are_known(written):
    measured = watch_script(written(SET_UP + KNOWN))
    assert "placeholders" not in measured.provenance.note
    positions = [
        item for item in measured.allocations if "train.py:16" in item.line and item.dtype == "int64"
    ]
    assert (2, 1) in {item.shape for item in positions}, "a GPU makes a mask's positions, too"


SPEECH = """
said = torch.randn(50, 4, 64, device="cuda")
lengths = torch.tensor([12, 10, 8, 3], dtype=torch.{dtype}).to("{device}")
words = torch.randint(1, 10, {shape}, dtype=torch.{dtype}).cuda()
for _ in range(2):
    frames = torch.full((4,), 50, dtype=torch.{dtype}).to("{device}")
    nn.functional.ctc_loss(model(said).log_softmax(-1), words, frames, lengths).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize(("dtype", "shape"), [("int32", (33,)), ("int64", (33,)), ("int64", (4, 12))])
def test_ctc_loss_is_cudnn_s_for_short_words_in_32_bits(written, dtype, shape):
    device = "cuda" if dtype == "int32" else "cpu"  # cuDNN takes lengths where the loss is
    measured = watch_script(written(SET_UP + SPEECH.format(dtype=dtype, shape=shape, device=device)))
    kept = {(item.operation, item.shape) for item in measured.allocations if item.kind == "activations"}
    own = {item.shape for item in measured.allocations if item.operation == "_ctc_loss_backward"}
    if dtype == "int32":
        assert ("_cudnn_ctc_loss", (50, 4, 10)) in kept and not own
    else:
        states = (4, 50, 2 * 12 + 1)
        assert ("_ctc_loss", states) in kept and own == {states, (50, 4, 10)}


def test_cudnn_s_ctc_loss_takes_lengths_on_the_host_but_its_mean_fails_as_on_a_gpu(written):
    """torch divides cuDNN's losses by the lengths as they were given: two devices, and a GPU refuses it, too.

    `get_clamped_target_length` in aten/src/ATen/native/LossCTC.cpp does not move them. A sum needs no
    division, and for it torch copies lengths to the GPU (pytorch's pull request 152745).
    """
    mean = SPEECH.format(dtype="int32", shape=(33,), device="cpu")
    with pytest.raises(ScriptError, match=r"the script itself fails: .* two( different)? devices"):
        watch_script(written(SET_UP + mean))
    total = mean.replace("lengths).backward()", "lengths, reduction='sum').backward()")
    measured = watch_script(written(SET_UP + total))
    assert ("_cudnn_ctc_loss", (50, 4, 10)) in {(one.operation, one.shape) for one in measured.allocations}


EXPERTS = """
experts = nn.Parameter(torch.randn(4, 64, 64, device="cuda"))
more = torch.optim.SGD([experts], lr=0.1)
ends = torch.tensor([8, 16, 24, 32], dtype=torch.int32).cuda()
for _ in range(2):
    mixed = nn.functional.grouped_mm(torch.randn(32, 64, device="cuda"), experts, offs=ends)
    model(mixed).sum().backward()
    optimizer.step(), more.step()
    optimizer.zero_grad(), more.zero_grad()
"""


def test_grouped_products_in_fp32_are_as_large_as_in_16_bits(written):
    measured = watch_script(written(SET_UP + EXPERTS))
    products = {(item.shape, item.dtype) for item in measured.allocations if item.operation == "_grouped_mm"}
    assert products == {((32, 64), "float32"), ((4, 64, 64), "float32")}


def test_a_transformer_layer_is_evaluated_operator_by_operator(written):
    layer = "nn.TransformerEncoderLayer(64, 4, batch_first=True).cuda().eval()"
    text = f"with torch.no_grad():\n    {layer}(torch.randn(2, 8, 64, device='cuda'))\nstep(), step()\n"
    assert (
        "Transformer layers run operator by operator" in watch_script(written(SET_UP + text)).provenance.note
    )


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


# The card


@pytest.mark.parametrize(("release", "more"), [((2, 11), MiB), ((2, 13), 0)])
def test_an_h100_adds_its_workspaces_and_nothing_else(written, monkeypatch, release, more):
    monkeypatch.setattr("course_utils.estimating.workspaces.installed_torch", lambda: release)
    path = written(TRAINED)
    usual, hopper = watch_script(path), watch_script(path, card="H100-80GB")
    each = 8192 * 1024 + 128 * 1024
    assert usual.breakdown["workspaces"] == 2 * each + more
    assert hopper.breakdown["workspaces"] == 2 * 32 * MiB + more
    difference = 2 * (32 * MiB - each)
    assert report(hopper).allocated - report(usual).allocated == difference
    assert dict(hopper.breakdown) == dict(usual.breakdown) | {"workspaces": 2 * 32 * MiB + more}
    assert str(hopper.provenance).startswith("simulated GPU, as an H100-80GB · torch")
    assert str(usual.provenance).startswith("simulated GPU · torch") and "80GB" not in str(usual.provenance)
    on_another = answer_on(gpu("H100-80GB"), report(usual).allocated, 0, was=gpu("A100-80GB"))
    assert on_another.allocated == report(hopper).allocated


ON_A_T4 = """
assert torch.cuda.get_device_name() == "T4-16GB" and torch.cuda.get_device_capability() == (7, 5)
assert torch.cuda.mem_get_info()[1] == torch.cuda.get_device_properties(0).total_memory
assert torch.cuda.is_bf16_supported() and not torch.cuda.is_bf16_supported(including_emulation=False)
assert not torch.cuda.is_tf32_supported()
q = torch.randn(2, 4, 64, 32, device="cuda", dtype=torch.bfloat16, requires_grad=True)
nn.functional.scaled_dot_product_attention(q, q, q).sum().backward()
with torch.autocast("cuda", torch.bfloat16):
    step(), step()
"""


def test_a_card_without_bf16_and_flash_does_what_torch_does_there(written):
    measured = watch_script(written(SET_UP + ON_A_T4), card="T4-16GB")
    operations = {item.operation for item in measured.allocations}
    # the efficient kernel takes no bf16 there (`less_than_sm80_mem_efficient_dtypes` in sdp_utils.cpp)
    assert any("softmax" in operation and "log" not in operation for operation in operations)
    assert not any("scaled_dot_product" in operation for operation in operations)
    assert "a T4-16GB does not compute in bf16: torch emulates it" in measured.provenance.note


def test_the_card_is_the_one_named_else_the_one_here_else_an_a100(monkeypatch):
    here: list[Gpu | None] = [None]
    monkeypatch.setattr(live, "card_there", lambda: here[0])
    monkeypatch.setattr(live, "demand_gpu", lambda: None)
    monkeypatch.delenv("COURSE_SOURCE")
    assert place_for().card == gpu("A100-80GB") and "simulated as an A100-80GB: --gpu" in place_for().why
    here[0] = gpu("H200-141GB")
    assert (place_for().card, place_for().simulated) == (gpu("H200-141GB"), True)
    assert "as the GPU of this machine, an H200-141GB" in place_for().why
    assert place_for("T4-16GB").card == gpu("T4-16GB") and place_for("T4-16GB", "auto").simulated
    assert not place_for("H200-141GB", "auto").simulated and not place_for(None, "live").simulated
    with pytest.raises(ValueError, match="the GPU of this machine is no T4-16GB"):
        place_for("T4-16GB", "live")
    with pytest.raises(ValueError, match="unknown GPU 'H300'"):
        place_for("H300")
    monkeypatch.setenv("COURSE_SOURCE", "simulated")
    assert place_for().card == gpu("A100-80GB")


DRIVERS = {
    ("NVIDIA A100-SXM4-80GB", 79.15, (8, 0)): "A100-80GB",
    ("NVIDIA A100-PCIE-40GB", 39.39, (8, 0)): "A100-40GB",
    ("NVIDIA H100 80GB HBM3", 79.11, (9, 0)): "H100-80GB",
    ("NVIDIA H200", 139.81, (9, 0)): "H200-141GB",
    ("Tesla T4", 14.74, (7, 5)): "T4-16GB",
    ("Tesla V100-SXM2-16GB", 15.77, (7, 0)): "V100-16GB",
    ("NVIDIA GeForce RTX 4090", 23.52, (8, 9)): "RTX4090-24GB",
    ("NVIDIA GeForce RTX 4090 D", 23.52, (8, 9)): None,
    ("NVIDIA GeForce RTX 4090 Laptop GPU", 15.70, (8, 9)): None,
    ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", 39.25, (8, 0)): None,
    ("NVIDIA H100 NVL", 93.1, (9, 0)): None,
}


@pytest.mark.parametrize("seen", DRIVERS)
def test_a_card_that_is_there_is_found_in_the_catalog_or_is_itself(seen):
    name, gibibytes, capability = seen
    found = recognized(name, int(gibibytes * GiB), capability, 100)
    assert found.name == (DRIVERS[seen] or name)
    assert found.capability == capability and abs(found.room / GiB - gibibytes) < 0.5


def test_steps_are_as_many_as_one_asks_for(written):
    path = written(TRAINED)
    three = watch_script(path, steps=3)
    assert list(three.timeline.step_peaks()) == [1, 2, 3] and "3 steps taken" in three.provenance.note
    one = watch_script(path, steps=1)
    assert "1 step taken" in one.provenance.note and "this is the first step" in one.provenance.note
    assert "the script ended after step 5 of 6" in watch_script(path, steps=6).provenance.note
    with pytest.raises(ValueError, match="steps is 0: a number from 1 to 1000"):
        watch_script(path, steps=0)


# What fits, and the command


def test_cards_are_told_by_reserved_memory(written):
    measured = watch_script(written(TRAINED))
    lines = list(lines_of_cards(measured, list(answers(15 * GB, 100 * GB, gpu("A100-80GB")))))
    assert lines[0].startswith("Fits: H200")
    assert "A100-80GB" in lines[1]
    assert "returns what it caches" in lines[1]
    assert "T4-16GB (by " in lines[2]
    assert sum(name in line for name in GPUS for line in lines[:3]) >= len(GPUS)
    assert "max_memory_reserved" in str(report(measured))


def test_what_fits_is_judged_with_five_percent_in_reserve():
    card = gpu("T4-16GB")
    most = int(card.room / SAFETY)
    for allocated, reserved, words in [
        (most, most, FITS),
        (most, most + 2, FROM_CACHE),
        (most + 2, most + 2, TOO_SMALL),
    ]:
        answer = Answer(card, allocated, reserved)
        assert answer.words == words and answer.fits == (words != TOO_SMALL)


@pytest.fixture
def command(written, capfd):
    """Runs `watch` with these words; returns its exit code, stdout and stderr."""

    def run(*words: str) -> tuple[int, str, str]:
        code = main(["watch", "--here", *words])
        return code, *capfd.readouterr()

    return run


@pytest.fixture
def without_a_process(monkeypatch):
    """Has `watch` execute scripts in this process, as starting one for each takes seconds."""

    def watch(path, arguments, source, **choices):
        measured = watch_script(path, arguments, source, **choices)
        return measured, place_for(choices["card"], source).card

    monkeypatch.setattr(apart, "watch_apart", watch)


def test_the_command_line(written, tmp_path, command):
    written("import sys\nprint(sys.argv[1:])\n" + TRAINED)
    code, out, err = command("--save", "kept.measurement", "train.py", "--lr", "3")
    assert code == 0
    assert "peak " in out and "Fits: " in out and "train.py:6" in out
    assert "['--lr', '3']\n0 1.0\n" in err, "what the script prints"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["kept.measurement", "train.py"]


LARGE = TRAINED.replace("256", "2_000_000")  # 4 times 568 MB
CODES = {
    "no card named": ([], LARGE, 0, ""),
    "fits a card": (["--gpu", "T4-16GB"], TRAINED, 0, ""),
    "fits a budget": (["--budget", "6GB"], LARGE, 0, ""),
    "does not fit a budget": (["--budget", "2GB"], LARGE, 1, ""),
    "does not fit a budget on a card": (["--gpu", "H100-80GB", "--budget", "60 MiB"], TRAINED, 1, ""),
    "does not fit a card": (["--gpu", "T4-16GB"], TRAINED.replace("256", "20_000_000"), 1, ""),
    "the script fails": (["--gpu", "T4-16GB"], "1 / 0\n", 2, "ZeroDivisionError"),
    "the script exits": (["--gpu", "T4-16GB"], "import sys\nsys.exit(0)\n", 2, "nothing was trained"),
    "the script leaves at once": (["--gpu", "T4-16GB"], "import os\nos._exit(0)\n", 2, "nothing was trained"),
    "an unknown card": (["--gpu", "H300"], TRAINED, 2, "unknown GPU 'H300'"),
    "an unknown budget": (["--budget", "much"], TRAINED, 2, "is not an amount of memory"),
    "an unknown option": (["--gup", "T4-16GB"], TRAINED, 2, "Unknown option --gup"),
}


@pytest.mark.parametrize("case", CODES)
@pytest.mark.usefixtures("without_a_process")
def test_the_exit_code_says_if_it_fits_and_whether_that_is_known(case, written, command):
    words, text, code, said = CODES[case]
    written(text)
    for form in ([], ["--json"]):
        found, out, err = command(*form, *words, "train.py")
        assert found == code and said in err
        assert bool(out) == (code < 2)


@pytest.mark.usefixtures("without_a_process")
def test_an_error_of_ours_is_no_answer(written, command, monkeypatch):
    monkeypatch.setattr("course_utils.watching.report.replay", lambda *_, **__: 1 / 0)
    written(TRAINED)
    code, out, err = command("--gpu", "T4-16GB", "train.py")
    assert (code, out) == (2, "") and "ZeroDivisionError" in err


def test_json_is_all_of_stdout_and_agrees_with_the_text(written, command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "1000")
    written("import os\nos.write(1, b'written to the file, not by print')\n" + LARGE)
    words = ("--gpu", "V100-16GB", "--budget", "2.2 GB", "train.py")
    code, text, _ = command("--save", "before", *words)
    again, out, err = command("--json", "--against", "before", *words)
    data = json.loads(out)
    assert code == again == 1 and "written to the file" in err and out.count("\n") == 1
    assert (data["format"], data["version"]) == ("course_utils watch", 1)
    for name in ("peak", "allocated", "reserved"):
        assert re.search(rf"^{name} +{data[name] / 1e9:.3f} GB", text, re.MULTILINE)
    assert f"peak, in {data['peak_phase']}" in text and "(simulated GPU, as a V100-16GB · torch" in text
    parts = {
        kind: size for kind, size in data["breakdown"].items() if kind not in ("label", "phase", "total")
    }
    assert sum(parts.values()) == data["breakdown"]["total"] == data["peak"]
    assert all(kind.replace("_", " ") in text for kind, size in parts.items() if size)
    assert len(data["largest"]) == 10 and all(row["line"] in text for row in data["largest"])
    assert f"{data['rest']['count']:,} more tensors" in text
    for card in data["cards"]:
        line = next(line for line in text.splitlines() if line.startswith(f"{card['answer']}: "))
        assert card["name"] in line and card["fits"] == (card["answer"] != TOO_SMALL)
    assert data["card"] == "V100-16GB" and data["wanted"]["name"] == "Budget of 2.20 GB"
    assert data["wanted"]["room"] == 2_200_000_000 and not data["wanted"]["fits"]
    assert "Budget of 2.20 GB (by " in text
    assert [change["what"] in text for change in data["changes"]] == [True] * len(data["changes"])
    assert all(f"- {note}" in text for note in data["notes"])
    assert data["difference"]["bytes"] == 0 and data["script"] == "train.py"


def test_a_scripts_own_limit_is_left_out_and_named(written):
    limited = written(
        TRAINED.replace(
            "import torch\n", "import torch\ntorch.cuda.set_per_process_memory_fraction(0.25)\n", 1
        )
    )
    assert "limit, 0.25 of the card, is not applied" in watch_script(limited).provenance.note
