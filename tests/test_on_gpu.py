"""Plain torch code on "cuda" without a GPU: it runs, its memory is counted, torch is left as it was."""

from contextlib import nullcontext
from functools import cache

import pytest
import torch
from torch import nn

from course_utils import TrainingRun, compare_with_gpu, gpu, measure, on_gpu, read_snapshot
from course_utils.allocator.replay import replay
from course_utils.errors import StepError
from course_utils.estimating.workspaces import workspaces_of
from course_utils.measuring import live
from course_utils.measuring.cuda_answers import CARD, Memory, answers
from course_utils.measuring.reductions import partial_sums
from course_utils.measuring.verdict import CONTEXT
from course_utils.watching import on_gpu as cards
from course_utils.watching.script import watch_script

MiB = 1 << 20
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.fixture(autouse=True)
def simulated(monkeypatch):
    """A simulated GPU on which no other test has left anything."""
    monkeypatch.setenv("COURSE_SOURCE", "simulated")
    card = cards._new_card()
    monkeypatch.setattr(cards, "_card", lambda: card)
    monkeypatch.setattr(cards, "_named_card", cache(cards._new_card))


def trained(model, optimizer, x):
    with torch.autocast("cuda", torch.bfloat16):
        loss = model(x).float().pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def test_objects_live_on_from_block_to_block_and_each_byte_is_counted(capsys):
    with on_gpu():
        assert capsys.readouterr().out == f"simulated GPU · torch {torch.__version__.split('+')[0]}\n"
        model = nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 512)).to("cuda")
        optimizer = torch.optim.AdamW(model.parameters())
        N = sum(weight.numel() for weight in model.parameters())
        assert torch.cuda.memory_allocated() == 4 * N
    with on_gpu():
        x = torch.randn(256, 512, device="cuda")
        assert "shape=(256, 512)" in repr(x) and "no values here" in str(x)
        trained(model, optimizer, x)
        workspaces = torch.cuda.memory_allocated() - 3 * 4 * N - x.nbytes
        before = torch.cuda.memory_allocated()
        _ = torch.cuda.reset_peak_memory_stats()
        trained(model, optimizer, x)
        assert torch.cuda.memory_allocated() == before < torch.cuda.max_memory_allocated()
        assert torch.cuda.memory_reserved() >= torch.cuda.max_memory_allocated()
    given = workspaces_of(CARD.capability)
    assert workspaces == 2 * given.cublas + given.lt
    assert x.shape == (256, 512) and "cuda" in str(x.device)
    with pytest.raises(StepError, match=r"go on inside a block `with on_gpu\(\):`"):
        x + 1
    with cards.on_new_gpu(30 * MiB):
        assert torch.cuda.memory_reserved() == 0
    model = optimizer = x = None
    with on_gpu():
        assert torch.cuda.memory_allocated() == workspaces


def test_the_peak_is_that_of_a_measurement_of_the_same_step():
    """One's own loop and `measure(step=…)` count the same tensors."""

    def step(model, optimizer, x):
        return trained(model, optimizer, x)

    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    made = {"model": model, "optimizer": torch.optim.AdamW(model.parameters()), "batch": torch.ones(32, 64)}
    measured = measure(step=step, source="simulated", card="A100-80GB", **made)
    with on_gpu():
        nn.Linear(8, 8, device="cuda")(torch.ones(2, 8, device="cuda", requires_grad=True)).sum().backward()
        start = torch.cuda.memory_allocated()  # with cuBLAS's workspaces
        model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)).to("cuda")
        optimizer = torch.optim.AdamW(model.parameters())
        x = torch.ones(32, 64, device="cuda")
        trained(model, optimizer, x)
        torch.cuda.reset_peak_memory_stats()
        trained(model, optimizer, x)
        assert torch.cuda.max_memory_allocated() - start == measured.peak - measured.breakdown["workspaces"]


SCRIPT = """
import torch
from torch import nn

layer = nn.Linear(1024, 512).to("cuda")
optimizer = torch.optim.SGD(layer.parameters())
for step in range(2):
    optimizer.zero_grad()
    layer(torch.randn(8192, 1024, device="cuda")).backward(torch.ones(8192, 512, device="cuda"))
    optimizer.step()
"""


def test_a_block_counts_what_watch_predicts_of_a_script_and_a_sum_s_scratch_with_it(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    predicted = replay(watch_script(path)).peak_allocated
    with on_gpu():
        exec(SCRIPT, {})
        assert torch.cuda.max_memory_allocated() == predicted
    x = torch.empty(8192, 512, device="meta")
    assert partial_sums(x, [0], CARD)[0] > x.nbytes  # of the bias's gradient, at the peak


@pytest.mark.parametrize("end", [None, KeyboardInterrupt()])
def test_torch_is_untouched_outside(end):
    owners = [(owner, name) for owner, name, _ in answers(Memory(list))] + [
        (torch, "compile"),
        (torch, "load"),
        (torch.cuda.memory, "_snapshot"),
        (torch.Tensor, "__repr__"),
        (torch.distributed, "init_process_group"),
        (torch.utils, "swap_tensors"),
    ]
    before = [getattr(owner, name) for owner, name in owners]
    with pytest.raises(type(end)) if end else nullcontext(), on_gpu():
        torch.set_default_device("cuda")
        torch.set_default_dtype(torch.bfloat16)
        assert torch.cuda.is_available() and torch.cuda.get_device_name() == "simulated GPU"
        if end is not None:
            raise end
    assert all(getattr(owner, name) is old for (owner, name), old in zip(owners, before, strict=True))
    assert torch.ones(2).tolist() == [1.0, 1.0] and torch.ones(2).dtype == torch.float32


def test_a_default_device_is_what_it_was():
    torch.set_default_device("meta")
    try:
        with on_gpu():
            torch.set_default_device("cuda")
        assert torch.ones(2).is_meta
    finally:
        torch.set_default_device(None)


SAID = {
    "print(loss.item())": "no values",
    "f'{loss:.3f}'": "no values",
    "loss.cpu().numpy()": "no values",
    "1 if loss > 1 else 0": "a simulated GPU has no values",
    "x[x > 0]": "depends on the values",
    "model(torch.ones(2, 8))": "different devices",
    "outside.to('cuda')": "a weight of the host has values",
    "torch.cuda.memory_summary()": "no answer to torch.cuda.memory_summary",
    "measure(TrainingRun('tiny-gpt', seq_len=64))": "measure outside of",
    "on_gpu().__enter__()": "leave the inner on_gpu",
    "torch.distributed.init_process_group('gloo')": "asks for a process group",
}


@pytest.mark.parametrize("code", SAID)
def test_what_a_simulated_gpu_cannot_say_gets_one_sentence(code):
    outside = nn.Linear(8, 8)
    with on_gpu():
        model = nn.Linear(8, 8, device="cuda")
        x = torch.randn(2, 8, device="cuda")
        loss = model(x).sum()
    names = globals() | locals() | {"TrainingRun": TrainingRun}
    with pytest.raises((StepError, PermissionError)) as caught, on_gpu():
        eval(code, names)
    assert SAID[code] in str(caught.value) and "\n" not in str(caught.value)
    assert outside.weight.abs().sum() > 0


def test_it_runs_out_of_memory_where_one_says_and_goes_on_after_that():
    kept = []
    with on_gpu(100 * MiB):
        with pytest.raises(
            torch.cuda.OutOfMemoryError, match=r"CUDA out of memory\. Tried to allocate 20\.00 MiB"
        ):
            while True:
                kept.append(torch.empty(20 * MiB, dtype=torch.uint8, device="cuda"))
        assert len(kept) == 5 and torch.cuda.memory_allocated() == 20 * MiB * len(kept)
        free, total = torch.cuda.mem_get_info()
        assert total == 100 * MiB and free == 0
        assert torch.cuda.memory_stats()["num_ooms"] == 1
        kept.pop()
        kept.append(torch.empty(20 * MiB, dtype=torch.uint8, device="cuda"))
    kept.clear()
    with on_gpu():
        assert torch.cuda.memory_allocated() == 0


def test_a_named_card_is_a_gpu_of_its_own(capsys):
    with on_gpu():
        on_the_usual = torch.ones(4, 4, device="cuda")
    with on_gpu(card="h100-80gb"):
        release = torch.__version__.split("+")[0]
        assert capsys.readouterr().out.endswith(f"simulated GPU, as an H100-80GB · torch {release}\n")
        assert torch.cuda.get_device_capability() == (9, 0) and torch.cuda.memory_allocated() == 0
        kept = torch.ones(4, 4, device="cuda")
        kept = kept @ kept
        assert torch.cuda.memory_allocated() == 512 + workspaces_of((9, 0)).cublas
        assert torch.cuda.mem_get_info()[1] == gpu("H100-80GB").room
    with on_gpu():
        assert torch.cuda.memory_allocated() == 512, "only what was made on this one"
        for use in (lambda: kept + 1, lambda: on_the_usual @ kept, lambda: torch.cat([on_the_usual, kept])):
            with pytest.raises(StepError, match=r"test_on_gpu\.py:.*`with on_gpu\(card='H100-80GB'\):`"):
                use()
    with on_gpu(card="H100-80GB"):
        assert (kept @ kept).shape == (4, 4), "tensors live on"
        with pytest.raises(StepError, match=r"go on inside a block `with on_gpu\(\):`"):
            kept + on_the_usual
    with on_gpu(ranks=2, card="H100-80GB"):
        of_a_rank = torch.ones(4, device="cuda")
        assert torch.cuda.get_device_capability() == (9, 0)
    with on_gpu(), pytest.raises(StepError, match="simulated rank of a block that is over"):
        of_a_rank + 1
    with pytest.raises(ValueError, match="unknown GPU 'H300'"), on_gpu(card="H300"):
        pass


def test_a_named_card_has_the_room_that_cudas_context_leaves():
    with on_gpu("1 GB", card="T4-16GB"), pytest.raises(torch.OutOfMemoryError):
        torch.empty(1_100_000_000, dtype=torch.uint8, device="cuda")
    room = gpu("T4-16GB").room
    with on_gpu(card="T4-16GB"):
        assert torch.cuda.mem_get_info() == (room - CONTEXT, room)
        with pytest.raises(torch.OutOfMemoryError, match=r"total capacity of 14\.56 GiB of which 14\.05 GiB"):
            torch.empty(room - CONTEXT + 2 * MiB, dtype=torch.uint8, device="cuda")
        assert torch.empty(room - CONTEXT - 2 * MiB, dtype=torch.uint8, device="cuda").nbytes


def test_a_card_that_is_here_serves_only_if_it_is_the_one_named(monkeypatch, capsys):
    monkeypatch.delenv("COURSE_SOURCE")
    monkeypatch.setattr(live, "usable_gpu", lambda: (gpu("H200-141GB"), ""))
    monkeypatch.setattr(live, "card_there", lambda: gpu("H200-141GB"))
    with on_gpu(card="T4-16GB"):
        assert torch.cuda.get_device_name() == "T4-16GB"
    assert "the GPU of this machine is another one, H200-141GB" in capsys.readouterr().out
    monkeypatch.setattr(cards, "provenance_of", lambda source, *_, **__: source)
    with on_gpu(card="H200-141GB"):
        assert capsys.readouterr().out == "live\n"
    monkeypatch.setenv("COURSE_SOURCE", "live")
    with pytest.raises(ValueError, match="GPU is not a T4-16GB"), on_gpu(card="T4-16GB"):
        pass


def test_a_step_of_ones_own_is_measured_on_the_card_that_is_named():
    def step(model, optimizer, x):
        asked.append((torch.cuda.get_device_name(), torch.cuda.get_device_capability()))
        trained(model, optimizer, x)

    asked = []
    model = nn.Linear(64, 64)
    made = {"model": model, "optimizer": torch.optim.AdamW(model.parameters()), "batch": torch.ones(32, 64)}
    usual, hopper = (measure(step=step, source="simulated", card=card, **made) for card in CARDS)
    assert str(hopper.provenance).startswith("simulated GPU, as an H100-80GB ·")
    assert str(usual.provenance).startswith("simulated GPU ·")
    assert hopper.peak - usual.peak == 2 * (32 * MiB - 8192 * 1024 - 128 * 1024)
    assert asked == [(name, gpu(name).capability) for name in CARDS for _ in range(2)]
    with pytest.raises(ValueError, match="torch has no flash kernel for a T4-16GB"):
        measure(step=step, source="simulated", card="T4-16GB", attention="flash", **made)


CARDS = ("A100-80GB", "H100-80GB")


def test_a_snapshot_holds_what_happened_since_it_was_asked_for(tmp_path):
    with on_gpu():
        earlier = torch.empty(MiB, device="cuda")
        torch.cuda.memory._record_memory_history(max_entries=100_000)
        x = torch.empty(3 * MiB, dtype=torch.uint8, device="cuda")
        y = x + x
        del y
        torch.cuda.memory._dump_snapshot(str(tmp_path / "one.pickle"))
        torch.cuda.memory._record_memory_history(enabled=None)
        assert torch.cuda.memory._snapshot()["device_traces"] == [[]]
    snapshot = read_snapshot(tmp_path / "one.pickle")
    trace = [entry for entry in snapshot["device_traces"][0] if not entry["action"].startswith("segment")]
    assert [(entry["action"], entry["size"]) for entry in trace] == [
        ("alloc", 3 * MiB),
        ("alloc", 3 * MiB),
        ("free_requested", 3 * MiB),
        ("free_completed", 3 * MiB),
    ]
    assert trace[1]["frames"][-1]["name"] == "y = x + x"
    with pytest.raises(ValueError, match="does not start with the program's first allocation"):
        compare_with_gpu(snapshot)
    del earlier


def test_fully_shard_is_one_rank_of_many():
    import torch.distributed as dist
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    with on_gpu(ranks=4):
        dist.init_process_group("nccl")
        assert (dist.get_rank(), dist.get_world_size()) == (0, 4)
        model = nn.Sequential(*(nn.Linear(256, 256, bias=False, device="cuda") for _ in range(4)))
        N = sum(weight.numel() for weight in model.parameters())
        for layer in model:
            fully_shard(layer, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters())
        assert torch.cuda.memory_allocated() == 4 * N // 4
        for _ in range(2):
            model(torch.randn(8, 256, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert torch.cuda.memory_allocated() == 3 * 4 * N // 4
        dist.destroy_process_group()
    assert not dist.is_initialized()


@needs_gpu
def test_a_card_counts_what_the_simulation_does_and_runs_out_of_memory_where_one_says(monkeypatch):
    def counted(source):
        monkeypatch.setenv("COURSE_SOURCE", source)
        found = []
        for _ in range(2):  # the first one leaves cuBLAS's workspaces, whose size depends on the card
            with on_gpu():
                start = torch.cuda.memory_allocated()
                model = nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 512)).to("cuda")
                optimizer = torch.optim.AdamW(model.parameters())
                x = torch.ones(256, 512, device="cuda")
                trained(model, optimizer, x)
                torch.cuda.reset_peak_memory_stats()
                trained(model, optimizer, x)
                now, most = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
                found.append((now - start, most - start))
                del model, optimizer, x
        return found[1]

    assert counted("live") == counted("simulated")
    monkeypatch.setenv("COURSE_SOURCE", "live")
    with on_gpu("1 GB"), pytest.raises(torch.OutOfMemoryError):
        torch.empty(2 * 10**9, dtype=torch.uint8, device="cuda")
    with on_gpu():
        assert torch.empty(2 * 10**9, dtype=torch.uint8, device="cuda").nbytes == 2 * 10**9


def test_a_card_that_is_smaller_than_the_code_needs_is_simulated_and_says_so(monkeypatch, capsys):
    monkeypatch.delenv("COURSE_SOURCE", raising=False)
    monkeypatch.setattr(live, "usable_gpu", lambda: (gpu("T4-16GB"), ""))
    with on_gpu(needs="50 GB"):
        torch.ones(10, device="cuda")
    assert "simulated GPU" in (said := capsys.readouterr().out) and "a T4-16GB is too small for this" in said
    with pytest.raises(ValueError, match="needs is 0: it takes bytes, or a text"), on_gpu(needs=0):
        pass


def test_a_fraction_of_the_card_is_a_limit_until_it_is_lifted():
    with on_gpu(card="T4-16GB"):
        total = torch.cuda.get_device_properties(0).total_memory
        for wrong in (1.5, -0.1, 1):
            with pytest.raises(ValueError, match="Invalid fraction value"):
                torch.cuda.set_per_process_memory_fraction(wrong)
        torch.cuda.set_per_process_memory_fraction(0.5)
        half = torch.empty(int(0.45 * total), dtype=torch.uint8, device="cuda")
        assert torch.cuda.mem_get_info()[1] == total
    with on_gpu(card="T4-16GB"):  # it lasts, as on a GPU
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(int(0.1 * total), dtype=torch.uint8, device="cuda")
        torch.cuda.set_per_process_memory_fraction(1.0)
        assert torch.empty(int(0.1 * total), dtype=torch.uint8, device="cuda") is not half
