"""Ways in which training scripts are written, and what each of them needs while it is watched."""

import atexit
import re
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from course_utils.errors import ScriptError
from course_utils.measurement import Measurement
from course_utils.units import round_up
from course_utils.watching.script import watch_script

SET_UP = """import torch
from torch import nn
model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 10)).to("cuda")
optimizer = torch.optim.AdamW(model.parameters())
def step(forward=model):
    x, y = torch.randn(32, 64).cuda(), torch.randint(10, (32,)).cuda()
    nn.functional.cross_entropy(forward(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
TRAINED = SET_UP + "step(), step()\n"
WEIGHTS = [(256, 64), (256,), (10, 256), (10,)]


@pytest.fixture
def watched(tmp_path, monkeypatch) -> Callable[[str], Measurement]:
    """Watches a script of this text, in a folder of its own, and holds that the folder has nothing new."""
    monkeypatch.setenv("COURSE_SOURCE", "simulated")
    monkeypatch.chdir(tmp_path)

    def watch(text: str) -> Measurement:
        Path("train.py").write_text(text)
        before = sorted(tmp_path.rglob("*"))
        measured = watch_script("train.py")
        assert sorted(tmp_path.rglob("*")) == before and Path.cwd() == tmp_path
        return measured

    return watch


def test_anomaly_detection_finds_nothing_and_costs_what_it_costs(watched):
    plain = watched(TRAINED)
    measured = watched(f"{SET_UP}torch.autograd.set_detect_anomaly(True)\nstep(), step()\n")
    asked = [item for item in measured.allocations if item.operation == "isnan"]
    assert {item.shape for item in asked} > set(WEIGHTS) and {item.dtype for item in asked} == {"bool"}
    assert "anomaly detection" in measured.provenance.note and "anomaly" not in plain.provenance.note
    assert not torch.is_anomaly_enabled()


PER_SAMPLE = """
from torch.func import functional_call, grad, vmap
def loss(weights, x, y):
    return nn.functional.cross_entropy(functional_call(model, weights, (x[None],)), y[None])
for _ in range(2):
    weights = {name: weight.detach() for name, weight in model.named_parameters()}
    x, y = torch.randn(32, 64).cuda(), torch.randint(10, (32,)).cuda()
    found = vmap(grad(loss), in_dims=(None, 0, 0))(weights, x, y)
    for name, weight in model.named_parameters():
        weight.grad = found[name].mean(0)
    optimizer.step()
    optimizer.zero_grad()
"""


def test_each_sample_has_a_gradient_of_its_own(watched):
    measured = watched(SET_UP + PER_SAMPLE)
    gradients = [item for item in measured.allocations if item.kind == "gradients" and item.step == 2]
    samples = [item.shape for item in gradients if item.shape[0] == 32]
    assert sorted(torch.Size(shape).numel() for shape in samples) == sorted(
        32 * torch.Size(shape).numel() for shape in WEIGHTS
    )
    assert {item.phase for item in gradients if item.shape[0] == 32} == {"backward"}


PROFILED = """
from torch.profiler import ProfilerActivity, profile, schedule, tensorboard_trace_handler
cycle = schedule(wait=0, warmup=1, active=1)
both = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
with profile(activities=both, schedule=cycle, on_trace_ready=tensorboard_trace_handler("log")) as profiler:
    for _ in range(2):
        profiler.step()
profiler.key_averages().table(sort_by="cuda_time_total")
profiler.export_chrome_trace("trace.json")
with torch.autograd.profiler.emit_nvtx():
    step(), step()
"""


OF_A_TRAINER = """
from torch.utils.checkpoint import checkpoint
assert torch.cuda.is_available() and torch.cuda.device_count() == 1 and torch.cuda.current_device() == 0
torch.cuda.set_device(torch.device("cuda:0"))
torch.cuda.get_device_capability(), torch.cuda.get_device_properties(0).major, torch.cuda.is_bf16_supported()
torch.cuda.mem_get_info(), torch.cuda.reset_peak_memory_stats(), torch.cuda.empty_cache()
torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated(), torch.cuda.memory_reserved()
torch.manual_seed(1), torch.cuda.manual_seed_all(1)
kept = torch.cuda.random.get_rng_state_all(), torch.cuda.get_rng_state()
torch.cuda.random.set_rng_state_all(kept[0]), torch.cuda.set_rng_state(kept[1])
order = torch.randperm(64, generator=torch.Generator(device="cuda"), device="cuda")
with torch.random.fork_rng(), torch.cuda.device(0), torch.cuda.stream(torch.cuda.Stream()):
    torch.cuda.synchronize(), torch.cuda.current_stream().synchronize(), torch.cuda.Event().record()
assert torch.cuda.get_allocator_backend() == "native" and not torch.cuda.is_current_stream_capturing()
torch.cuda.set_sync_debug_mode(torch.cuda.get_sync_debug_mode())
assert torch.accelerator.current_accelerator().type == "cuda"
torch.accelerator.synchronize(), torch.accelerator.current_device_index()
scaler = torch.amp.GradScaler("cuda")
rows = torch.utils.data.TensorDataset(torch.randn(64, 64))
for x, in torch.utils.data.DataLoader(rows, batch_size=32, num_workers=2, pin_memory=True):
    with torch.autocast("cuda", torch.float16):
        loss = checkpoint(model, x.pin_memory().cuda(non_blocking=True), use_reentrant=False).sum()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    if not torch.isnan(loss):
        torch.save({"cuda": torch.cuda.get_rng_state_all(), "scaler": scaler.state_dict()}, "rng.pth")
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="next to a GPU, torch's fake tensors make its context")
def test_what_a_trainer_asks_never_reaches_cuda_itself(watched, monkeypatch):
    """Calls that transformers' Trainer and accelerate make: a GPU that is there would answer them."""
    sources = (Path(torch.__file__).parent / "cuda").glob("*.py")
    names = {name for path in sources for name in re.findall(r"torch\._C\.(_cuda_\w+)", path.read_text())}
    names -= {"_cuda_getDeviceCount"}  # by which torch sees whether it was built for CUDA
    assert len(names) > 50
    reached = []
    for name in names:
        monkeypatch.setattr(torch._C, name, lambda *_, name=name: reached.append(name), raising=False)
    measured = watched(SET_UP + OF_A_TRAINER)
    assert measured.peak > 0 and not reached


def test_a_profiler_sees_the_host_alone_and_says_nothing_on_stderr(watched, capfd):
    measured = watched(SET_UP + PROFILED)
    assert "profiler sees the host alone" in measured.provenance.note
    assert "trace.json" in measured.provenance.note
    assert "Failed to record CUDA event" not in capfd.readouterr().err


def test_a_traced_model_keeps_what_the_model_keeps(watched):
    traced = "traced = torch.jit.trace(model, torch.randn(2, 64).cuda())\nstep(traced), step(traced)\n"
    measured = watched(SET_UP + traced)
    plain = watched(TRAINED).moments["end of step 2"]
    example = round_up(4 * 2 * 64)  # which torch.jit.trace stores
    assert dict(measured.moments["end of step 2"]) == dict(plain) | {"inputs": plain["inputs"] + example}
    assert "torch.jit.trace" in measured.provenance.note


SAVED = """
import copy, io, os, pickle
step()
def described(tensors):
    return {name: (one.shape, one.dtype, one.device, one.stride()) for name, one in tensors.items()}
model[0].half()
half = {"table": model.state_dict(), "step": 3, "order": torch.arange(4)}
half["tied"] = half["table"]["0.weight"]
half["flipped"] = half["tied"].t()
torch.save(half, "half.pt")
os.replace("half.pt", "last.pt")
before = torch.cuda.memory_allocated()
for how in ({}, {"map_location": "cuda"}, {"mmap": True}, {"weights_only": False}):
    found = torch.load("last.pt", **how)
    assert described(found["table"]) == described(half["table"])
    assert found["flipped"].data_ptr() == found["tied"].data_ptr() == found["table"]["0.weight"].data_ptr()
    assert found["flipped"].shape == (64, 256) and found["flipped"].stride() == (1, 64)
    assert found["step"] == 3 and found["order"].tolist() == [0, 1, 2, 3]
    weights = 2 * 256 * 64 + 2 * 256 + 4 * 10 * 256 + 512
    assert torch.cuda.memory_allocated() - before == weights + 512 * found["order"].is_cuda
    del found
for where in ("cpu", {"cuda:0": "cpu"}, lambda storage, _: storage):
    found = torch.load("last.pt", map_location=where)
    assert {one.device.type for one in found["table"].values()} == {"cpu"}
model[0].float()
buffer = io.BytesIO()
torch.save({"optimizer": optimizer.state_dict(), "model": model}, buffer)
buffer.seek(0)
found = torch.load(buffer, weights_only=False)
optimizer.load_state_dict(found["optimizer"])
for other in (found["model"], pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
    assert described(other.state_dict()) == described(model.state_dict())
    assert all(isinstance(one, nn.Parameter) and one.requires_grad for one in other.parameters())
buffer = io.BytesIO()
torch.save({"random": torch.get_rng_state()}, buffer)
drawn = torch.rand(3)
buffer.seek(0)
torch.set_rng_state(torch.load(buffer, map_location="cuda")["random"].cpu())
assert torch.equal(torch.rand(3), drawn)
same = copy.copy(model[0].weight)
assert same is not model[0].weight and same.data_ptr() == model[0].weight.data_ptr()
step()
"""


def test_what_is_loaded_is_what_was_saved(watched):
    assert "written to a temporary folder" in watched(SET_UP + SAVED).provenance.note


ENTERED = """
import json, os, pathlib, shutil
start = os.getcwd()
os.makedirs("outputs/first")
os.chdir("outputs/first")
assert os.getcwd() == str(pathlib.Path.cwd()) == os.path.join(start, "outputs", "first")
pathlib.Path("log.txt").write_text("log")
assert os.listdir() == ["log.txt"] and os.path.exists("../first/log.txt")
assert json.load(open("../../config.json")) == {"lr": 0.1} and os.path.exists(__file__)
torch.save(model.state_dict(), "model.pt")
model.load_state_dict(torch.load("model.pt"))
os.makedirs("old/deep")
pathlib.Path("old/deep/file").touch()
shutil.rmtree("old")
assert sorted(os.listdir()) == ["log.txt", "model.pt"]
os.chdir("../..")
assert os.getcwd() == start and os.path.exists("outputs/first/log.txt")
os.chdir("outputs")
step(), step()
"""


def test_a_script_works_in_a_folder_that_it_has_made(watched):
    Path("config.json").write_text('{"lr": 0.1}')
    assert "outputs/first" in watched(SET_UP + ENTERED).provenance.note


IN_A_THREAD = """
import threading
thread = threading.Thread(target=step)
thread.start()
thread.join()
"""


ON_THE_HOST = SET_UP.replace('.to("cuda")', "").replace(".cuda()", "")


@pytest.mark.parametrize(("text", "line"), [(SET_UP, 6), (ON_THE_HOST, 7)])
def test_training_in_another_thread_is_one_sentence(watched, monkeypatch, text, line):
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    words = f"^train.py:{line} .*: runs in another thread, but only the main thread is followed"
    with pytest.raises(ScriptError, match=words) as refused:
        watched(text + IN_A_THREAD)
    assert "\n" not in str(refused.value)


PREPARED = """
import queue, threading
class Augmented(nn.Module):
    def __init__(self):
        super().__init__()
        self.mixed = nn.Linear(64, 64)
    def forward(self, x):
        return self.mixed(x)
def prepare():
    augmented = Augmented()
    for _ in range(2):
        ready.put(augmented(torch.randn(32, 64)).detach())
ready = queue.Queue(1)
threading.Thread(target=prepare).start()
for _ in range(2):
    x = ready.get()
    assert x.std() > 0
    model(x.cuda()).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_thread_may_prepare_data_with_real_values(watched):
    measured = watched(SET_UP + PREPARED)
    assert "2 steps taken" in measured.provenance.note
    assert not [item for item in measured.allocations if "Augmented" in item.module]


def test_handlers_of_the_script_s_for_the_end_of_python_do_not_run(watched):
    registered = atexit._ncallbacks()
    watched("import atexit\n@atexit.register\ndef late():\n    open('late.txt', 'w')\n" + TRAINED)
    assert atexit._ncallbacks() == registered


PROJECT = {
    "config.json": '{"width": 256}',
    "settings.ini": "[optimizer]\nlr = 0.1\n",
    "network.py": "from torch import nn\ndef made(width):\n    return nn.Linear(64, width)\n",
    "data/__init__.py": "from .sizes import BATCH\n",
    "data/sizes.py": "BATCH = 32\n",
}
MAIN = """
import argparse, configparser, json, os
from dataclasses import dataclass
from pathlib import Path
import torch
from data import BATCH
from network import made
@dataclass
class Config:
    width: int
def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    chosen = parser.parse_args()
    config = Config(**json.loads((Path(__file__).parent / "config.json").read_text()))
    with open("settings.ini") as file:
        settings = configparser.ConfigParser()
        settings.read_file(file)
    assert os.path.isabs(__file__)
    model = made(config.width).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=settings.getfloat("optimizer", "lr"))
    for _ in range(chosen.epochs):
        model(torch.randn(BATCH, 64, device="cuda")).sum().backward()
        optimizer.step()
if __name__ == "__main__":
    main()
"""


def test_a_project_has_its_modules_arguments_and_settings(watched, tmp_path):
    for name, text in PROJECT.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    measured = watched(MAIN)
    assert measured.breakdown["parameters"] == round_up(4 * 256 * 64) + round_up(4 * 256)
