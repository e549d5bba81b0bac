# ---
# jupyter:
#   course:
#     minutes: 80
#     cpu_seconds: 50
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 10 · Data parallelism
#
# **80 minutes.** You should know what a training step keeps ([lesson 01](01_where_did_the_memory_go.ipynb)) and what
# a micro-batch is. You need no GPU: real processes talk to each other on your processor. On Windows, use WSL2 or read
# the stored outputs.
#
# Data parallelism is the simplest way to use many GPUs: each computes on its own part of the batch. What does each
# keep in memory? What must they send one another?

# %% [markdown]
# ## What each rank holds
# Each of D processes is a [rank](../docs/glossary.md#rank). It runs forward and backward through all layers, on its
# own sequences.
#
# **Your guess.** GPT-2 XL with Adam under [autocast](../docs/glossary.md#autocast) has 16 bytes of states per
# parameter (total below). With plain data parallelism, how many GB of states does each of 8 ranks hold?

# %%
from course_utils import TrainingRun, estimate, format_bytes, plus_minus
from course_utils.estimating.formula_of_ranks import rank_0_states
from course_utils.interactive.guesses import predict, reveal, waits_for

xl = TrainingRun("gpt2-xl", micro_batch=4, seq_len=1024, precision="amp-bf16", recompute="full")
alone = sum(rank_0_states(xl).values())
print(f"one GPU alone: {format_bytes(alone, 'GB', 1)} of weights, gradients and optimizer states")
predict("10.states")

# %%
shared = xl.replace(accumulation_steps=2, world_size=8)  # change this
states = rank_0_states(shared)
b, k, D = shared.micro_batch, shared.accumulation_steps, shared.world_size
print({kind.replace("_", " "): format_bytes(size, "GB", 1) for kind, size in states.items()})
print(
    f"{b} · {k} · {D} = {shared.global_batch} sequences per step, "
    f"{shared.global_batch * shared.seq_len:,} tokens"
)
reveal("10.states", sum(states.values()))

# %% [markdown]
# Not a byte less. Each rank holds a [replica](../docs/glossary.md#replica): all weights, gradients and optimizer
# states. The ranks share only the *batch*: **b · k · D** sequences, micro-batch times accumulation steps times ranks.
# (Change `world_size` to 64. Which numbers change?)
#
# So another rank makes the batch larger, unless you cut b or k. And a sequence that does not fit one GPU does not fit
# a thousand.

# %% [markdown]
# ## A script for torchrun
# `torchrun` starts a script as several processes. `init_process_group` joins them through
# [gloo](../docs/glossary.md#gloo), torch's library for messages between CPUs. (On NVIDIA's GPUs that is *NCCL*.)
# `DistributedDataParallel` (DDP, [Li et al. 2020](https://arxiv.org/abs/2006.15704)) sends rank 0's weights to all at
# the start. In each backward, it replaces every gradient by its mean over all ranks.


# %%
def train():
    import torch
    import torch.distributed as dist
    from torch import nn

    # torchrun gave each process its rank and the address of the others
    dist.init_process_group("gloo")
    rank, D = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    inputs, classes = torch.randn(24, 16), torch.randint(4, (24,))
    x, y = inputs.tensor_split(D)[rank], classes.tensor_split(D)[rank]
    network = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
    model = nn.parallel.DistributedDataParallel(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for step in range(4):
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()  # also averages the gradients of all ranks
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / D
        dist.all_reduce(mean)  # the sum over all ranks, on every rank
        if rank == 0:
            print(f"step {step}: mean loss {mean:.4f}")
    dist.destroy_process_group()


# %% [markdown]
# Write the function to a script, and start it like `torchrun --standalone --nproc-per-node 2 script.py` in a terminal:

# %%
import inspect
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory


def torchrun(program, ranks):
    with TemporaryDirectory() as folder:
        script = Path(folder, "script.py")
        script.write_text(f"{inspect.getsource(program)}\n{program.__name__}()\n", encoding="utf-8")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(ranks), str(script)]
        done = subprocess.run(command, capture_output=True, text=True)
    print(done.stdout or done.stderr)


torchrun(train, ranks=2)  # change this

# %% [markdown]
# Two processes, with 12 sequences each. Change the last line to 1 rank with all 24, then to 3 ranks, then to 5. Predict
# each: which losses will differ?

# %% [markdown]
# ## The mean of three gradients is the gradient of all
# The loss of a batch is the mean over its sequences, and so is its gradient G. With three equal parts, the mean of
# their gradients is G:
#
# $$G = \frac{G_1 + G_2 + G_3}{3}$$
#
# In one process:

# %%
import torch
from torch import nn

torch.manual_seed(0)
inputs, classes = torch.randn(24, 16), torch.randint(4, (24,))
network = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))


def gradient(x, y):
    network.zero_grad()
    nn.functional.cross_entropy(network(x), y).backward()
    return torch.cat([weight.grad.flatten() for weight in network.parameters()])


# %%
ranks = 3  # change this
pairs = zip(inputs.tensor_split(ranks), classes.tensor_split(ranks), strict=True)
parts = [gradient(x, y) for x, y in pairs]
whole = gradient(inputs, classes)
for name, found in {"the mean of all parts": sum(parts) / ranks, "G1 alone": parts[0]}.items():
    off = (found - whole).abs().max() / whole.abs().max()
    print(f"{name}: off by {off:.4f} of the largest of {len(whole)} numbers")

# %% [markdown]
# The mean is off only by rounding: sums in another order. So 3 GPUs do not repeat a training on 1 GPU bit by bit. Now
# change 3 to 5: parts of 5, 5, 5, 5 and 4 sequences. Is their plain mean still right? (Exercise 3 corrects it.)

# %% [markdown]
# ## Equal, or drifting apart
# Replicas start equal and see the same mean gradient, so they stay equal. Nobody compares them or sends weights
# again. By hand, DDP's work is one [all-reduce](../docs/glossary.md#all-reduce) per gradient, which leaves the sum on
# every rank. What if you forget one?


# %%
def drift(kept_back):
    import torch
    import torch.distributed as dist
    from torch import nn

    rank, D = dist.get_rank(), dist.get_world_size()
    path = []
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
    inputs, classes = torch.randn(24, 16), torch.randint(4, (24,))
    x, y = inputs.tensor_split(D)[rank], classes.tensor_split(D)[rank]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for _ in range(30):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        for name, weight in model.named_parameters():
            if name not in kept_back:
                dist.all_reduce(weight.grad.div_(D))
        optimizer.step()
        path.append(nn.utils.parameters_to_vector(model.parameters()).tolist())
    # the loss on all 24 samples
    return path, nn.functional.cross_entropy(model(inputs), classes).item()


# %% [markdown]
# Three processes train: with all gradients shared, with all but those of the last bias (4 of 676 numbers), and with
# none. `run_ranks` is a shortcut for `torchrun` that also returns each rank's result.
#
# **Your guess.** Leave the bias out for 30 steps. By how many percent does that raise the replicas' mean loss on all 24
# samples, compared with sharing all gradients?

# %%
predict("10.drift", unit="%")

# %%
from course_utils.ranks.launch import run_ranks


def each_training(trainings):
    import torch.distributed as dist

    dist.init_process_group("gloo")
    return {name: drift(kept_back) for name, kept_back in trainings.items()}


everything = [name for name, _ in network.named_parameters()]
trainings = {"all": [], "all but 2.bias": ["2.bias"], "none": everything}  # change this
found = run_ranks(each_training, world_size=3, trainings=trainings)
apart, losses = {}, {}
for name in trainings:
    path = torch.tensor([rank[name][0] for rank in found])  # ranks, steps, weights
    apart[name] = (path.amax(0) - path.amin(0)).amax(1)
    losses[name] = sum(rank[name][1] for rank in found) / len(found)

# %% tags=["nbval-ignore-output", "hide-input"]
from course_utils.figures import lines

waits_for("10.drift")
steps = list(range(1, 31))
curves = {f"shared: {name}": (steps, values.tolist()) for name, values in apart.items()}
title = "One forgotten bias is enough: the replicas drift apart"
source = "measured: 3 processes on the CPU that ran this cell (gloo)"
lines(curves, title, "step", "largest difference of a weight", markers=False, provenance=source)

# %%
for name, values in apart.items():
    print(
        f"shared: {name:14s} largest difference {values[-1]:.2f}, "
        f"mean loss on all samples {losses[name]:.3f}"
    )
print(f"(four classes by chance: a loss of {torch.tensor(4.0).log():.3f})")
shared, left_out, nothing = losses.values()
reveal("10.drift", round(100 * (left_out / shared - 1)), unit="%")

# %% [markdown]
# With nothing shared, each replica fits its own 8 samples. On all 24 it is hardly better than chance, and everybody
# would notice. With one forgotten bias, the weights are as far apart, but the loss is nearly the right one. So you do
# not notice. That makes the mistake expensive. (Keep `"0.bias"` back instead, 32 numbers. More drift, or less?)

# %% [markdown]
# ## A server in the middle
# Where does the mean come from? The oldest way is a [parameter server](../docs/glossary.md#parameter-server) ([Li et
# al. 2014](https://www.usenix.org/conference/osdi14/technical-sessions/presentation/li_mu)), in four steps.

# %%
from course_utils.lessons.data_parallelism.figures import server_figure

server_figure(workers=3)  # change this

# %% [markdown]
# Only the server has optimizer states. But it receives D gradients and sends D sets of weights, S bytes each. (Change
# 3 to 5 workers. How many messages reach the server?)
#
# Within one machine, the meeting place can be the host's memory, or one of the GPUs. It is a server all the same: D
# gradients go through one place.
#
# Without a server, each rank could send its whole gradient to every other: D−1 times S bytes. That is the naive
# all-reduce.
#
# ## A ring
# Better: cut S into D parts, and let every rank send only to its right neighbor ([Patarasuk and Yuan
# 2009](https://doi.org/10.1016/j.jpdc.2008.09.002)). In D−1 steps the parts travel around, and each rank adds its own
# numbers to what arrives. After this first half, each rank has one complete part.
#
# In the second half, the complete parts travel around once more, here by torch's *all-gather*: every rank collects all
# parts. (Exercise 2 asks for that half.)


# %%
def ring():
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    me, D = dist.get_rank(), dist.get_world_size()
    # 1, 10, 100, …: each digit shows one contribution
    tensor = torch.full((120_000,), 10**me, dtype=torch.int32)
    parts = tensor.tensor_split(D)  # views: adding to a part adds to the tensor
    held = [[part[0].item() for part in parts]]
    sent = 0
    for step in range(D - 1):
        leaves, comes = parts[(me - step) % D], parts[(me - step - 1) % D]
        sending = dist.isend(leaves, (me + 1) % D)  # returns at once
        arrived = torch.empty_like(comes)
        dist.recv(arrived, (me - 1) % D)
        sending.wait()
        comes += arrived
        sent += leaves.nbytes
        held.append([part[0].item() for part in parts])
    dist.all_gather([parts[(rank + 1) % D] for rank in range(D)], parts[(me + 1) % D].clone())
    return {"sent": sent, "held": held, "end": [part[0].item() for part in parts]}


# %% [markdown]
# **Your guess.** Four ranks add up 480 KB each. How many KB does each rank send in both halves of this ring?

# %%
predict("10.ring", unit="KB")

# %% [markdown]
# The closed form: D−1 steps in each half, S/D bytes per step.

# %%
D, S = 4, 480_000  # change this
found = run_ranks(ring, world_size=D)
estimated, counted = (D - 1) * S // D, found[0]["sent"]
gap = plus_minus(estimated - counted)
print(f"first half: estimated {estimated:,} bytes, sent {counted:,}; the gap {gap} bytes")
print(
    f"rank 0's parts: {found[0]['held'][0]}, "
    f"half way {found[0]['held'][-1]}, at the end {found[0]['end']}"
)
reveal("10.ring", 2 * counted, unit="KB")

# %% [markdown]
# At the end every part is 1 + 10 + 100 + 1,000. (Change D to 5. How many KB are sent, and what do the parts hold?)
# The second half sends as much. So each rank sends in total
#
# $$\frac{2 (D - 1)}{D} \cdot S$$
#
# The first half:

# %%
from course_utils.lessons.data_parallelism.widget import ring_player

ring_player([rank["held"] for rank in found], step=3)

# %% [markdown]
# In the naive way, a rank's bytes grow with D, and a server's link carries still more. The ring stays below 2·S:

# %%
from course_utils.estimating.sharding import all_reduce_bytes

gradient_size = 4 * xl.model.parameters
for D in (2, 8, 64):
    naive, ring_sends = (D - 1) * gradient_size, all_reduce_bytes(gradient_size, D)
    print(
        f"GPT-2 XL's fp32 gradients on {D:2d} ranks: naive {format_bytes(naive, 'GB', 1):>8s}, "
        f"ring {format_bytes(ring_sends, 'GB', 1):>7s}"
    )

# %% [markdown]
# No exchange among ranks alone needs fewer bytes. A switch that adds can halve them: with [NVLink
# SHARP](https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html#nccl-nvls-enable), a rank sends about S. In
# *messages* the ring is not optimal: it sends 2(D−1), one after the other.

# %% [markdown]
# ## Buckets
# Each message takes time to start, so DDP does not send gradients one by one. It copies them into
# [buckets](../docs/glossary.md#bucket) of about 25 MiB: flat buffers, reduced as a whole and copied back.
#
# **Your guess.** How many GB do the buckets for GPT-2 XL's fp32 gradients take on each rank?

# %%
predict("10.buckets")

# %% [markdown]
# Each gradient is in one bucket, and buckets persist. A *communication hook* can measure them: DDP calls it with each
# full bucket, and it returns a future with the mean.


# %%
def buckets(views, mib):
    import torch
    from torch import nn
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    def hook(group, bucket):
        seen.append(bucket.buffer())
        return allreduce_hook(group, bucket)

    network = nn.Sequential(*(nn.Linear(512, 512) for _ in range(12)))
    options = {"bucket_cap_mb": mib, "gradient_as_bucket_view": views}
    model = nn.parallel.DistributedDataParallel(network, **options)
    model.register_comm_hook(None, hook)
    for _ in range(2):  # after the first step, DDP arranges its buckets again
        seen = []
        model(torch.randn(8, 512)).square().mean().backward()
    places = {buffer.untyped_storage().data_ptr() for buffer in seen}
    outside = 0
    for weight in model.parameters():
        if weight.grad.untyped_storage().data_ptr() not in places:
            outside += weight.grad.nbytes
    return {"buckets": [buffer.nbytes for buffer in seen], "gradients outside": outside}


# %%
def both_ways(mib):
    import torch.distributed as dist

    dist.init_process_group("gloo")
    return [buckets(views, mib) for views in (False, True)]


mib = 2  # change this
results = run_ranks(both_ways, world_size=2, mib=mib)[0]
for views, found in zip((False, True), results, strict=True):
    count, total = len(found["buckets"]), sum(found["buckets"])
    gap = plus_minus(12 * 513 * 512 * 4 - total)
    print(
        f"views {views!s:5}: {count} buckets, {total:,} bytes, the gap {gap} bytes; "
        f"gradients outside of buckets {found['gradients outside']:,} bytes"
    )
kept = estimate(xl.replace(world_size=8))["communication"]
reveal("10.buckets", kept)

# %% [markdown]
# The buckets take as many bytes as the gradients. With `gradient_as_bucket_view=True` each `.grad` is a view of a
# bucket, and the bytes exist once. (Buckets of 4 MiB: more bytes, or fewer buckets?)

# %%
from course_utils.figures import stack

columns = {
    "one GPU": xl,
    "DDP, 8 GPUs": xl.replace(world_size=8),
    "DDP, gradients as views": xl.replace(world_size=8, bucket_view=True),
}
estimates = {name: estimate(run) for name, run in columns.items()}
title = "DDP holds the gradients twice, unless they are views of its buckets"
source = "GPT-2 XL, b = 4, full recomputation, autocast; estimated"
stack(estimates, title, provenance=source)

# %% [markdown]
# The [ZeRO](../docs/glossary.md#zero) paper has a buffer of the same size for another reason: one flat fp32 copy of
# *all* gradients, 6 GB for 1.5 billion parameters, which some implementations make for an all-reduce or a norm
# ([section 3.2](https://arxiv.org/abs/1910.02054)). [Lesson 12](12_allocator_and_fragmentation.ipynb) looks for it.
#
# The gaps above are 0 bytes, but a GPU also has *NCCL's buffers*: several for each pair of GPUs that talks, 4 MiB each
# by default ([`NCCL_BUFFSIZE`](https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html)). They lie outside
# PyTorch's allocator: `nvidia-smi` shows them, `memory_allocated()` never. This course has not measured them, because
# it takes two GPUs.

# %% [markdown]
# ## Overlap
# Backward computes the last layers' gradients first, so their bucket can leave while backward goes on.
#
# **Your guess.** Twelve equal layers, six equal buckets. At best, what percentage of the gradients' bytes can leave
# before backward ends?

# %%
predict("10.overlap", unit="%")

# %% [markdown]
# Count the buckets that are ready before backward ends.
# [ddp_training.py](../course_utils/lessons/data_parallelism/ddp_training.py) adds a clock to the network and hook from
# above. It trains with six buckets, with one, and without exchange. If there are two GPUs, each process takes one.
# Otherwise both use the processor, because NCCL refuses two ranks on one GPU.

# %%
bucket_mib = 2  # change this
trained = run_ranks("course_utils.lessons.data_parallelism.ddp_training", 2, [str(bucket_mib)])
step = trained[0]["many"]
early = [bucket for bucket in step["buckets"] if bucket["ready"] < step["buckets"][-1]["ready"]]
print(f"{len(step['buckets'])} buckets, {trained[0]['gradients']:,} bytes of gradients in all")
print(f"{len(early)} of them were handed over before backward computed its last gradient")
print(trained[0]["where"])
reveal("10.overlap", 100 * len(early) / len(step["buckets"]), unit="%")

# %% tags=["nbval-ignore-output"]
from course_utils.lessons.data_parallelism.figures import overlap_figure

many, one, none = (trained[0][name] for name in ("many", "one", "none"))
exposed = [1000 * (step["end"] - none["end"]) for step in (many, one)]
title = (
    f"The exchange adds {exposed[0]:.0f} ms to a step with many buckets, "
    f"{exposed[1]:.0f} ms with one"
)
shown = {"many buckets": many, "one bucket": one, "no exchange": none}
overlap_figure(shown, title, f"measured: rank 0 of {trained[0]['where']}")

# %% [markdown]
# What counts is the *exposed* time: a step's length, minus that of a step without exchange. The last bucket is ready
# only when backward ends, so its transfer is always exposed.
#
# Is your step with many buckets no faster than that with one? Then overlap did not pay here. An exchange takes cores
# from backward on a CPU, and multiprocessors and memory bandwidth on a GPU. Two processes on a busy processor show that
# price more than the gain. (Buckets of 1 MiB: what part of the bytes can leave early?)

# %% [markdown]
# ## Do not sync what you accumulate
# DDP does not know that you add up the gradients of
# [micro-batches](../docs/glossary.md#micro-batch-and-global-batch): each backward all-reduces, though only the sum of
# all is needed. `model.no_sync()` leaves the gradients on the rank.
#
# **Your guess.** Four micro-batches per step, with DDP's defaults. How many times the necessary bytes does a rank
# exchange?

# %%
predict("10.no_sync", unit="times")


# %%
def accumulate(k, waits):
    from contextlib import nullcontext
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    def hook(group, bucket):
        sent.append(bucket.buffer().nbytes)
        return allreduce_hook(group, bucket)

    torch.manual_seed(0)
    network = nn.Sequential(*(nn.Linear(512, 512) for _ in range(12)))
    model = nn.parallel.DistributedDataParallel(network)
    model.register_comm_hook(None, hook)
    micro_batches = torch.randn(2, 8, 512)[dist.get_rank()].chunk(k)
    sent = []
    for index, x in enumerate(micro_batches):
        waiting = waits and index < len(micro_batches) - 1
        with model.no_sync() if waiting else nullcontext():  # forward must be inside, too
            ((model(x) - x).square().mean() / len(micro_batches)).backward()
    return sum(sent), nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()


# %%
def each_and_once(k):
    import torch.distributed as dist

    dist.init_process_group("gloo")
    return [accumulate(k, waits) for waits in (False, True)]


k = 4  # change this
(each, norm), (once, same) = run_ranks(each_and_once, world_size=2, k=k)[0]
print(
    f"each micro-batch: {format_bytes(each, 'MB', 1)} handed over to be reduced; "
    f"the gradient's norm is {norm:.5f}"
)
print(
    f"no_sync:          {format_bytes(once, 'MB', 1)} handed over to be reduced; "
    f"the gradient's norm is {same:.5f}"
)
reveal("10.no_sync", each / once, unit="times")

# %% [markdown]
# The gradients agree: a mean of sums is the sum of means. (Cut the same batch into 8 micro-batches. Which numbers
# change?)
#
# Views have a trap. `zero_grad()` sets every `.grad` to None, and the view is gone. The next backward under `no_sync`
# makes a new tensor next to the bucket, so views save nothing until the last micro-batch.
# `zero_grad(set_to_none=False)` writes zeros into the view instead, and gradients add up *in* the bucket. Estimated
# for GPT-2 XL:

# %%
views = xl.replace(world_size=8, bucket_view=True)
for count, to_none in ((1, True), (2, True), (2, False)):  # change this
    peak = estimate(views.replace(accumulation_steps=count, set_to_none=to_none))
    total, held = (format_bytes(size, "GB", 1) for size in (peak.total, peak["gradients"]))
    print(
        f"micro-batches {count}, set_to_none={to_none!s:5}: "
        f"{total} at the peak ({peak.label}), gradients {held}"
    )

# %% [markdown]
# So with views *and* accumulation, clear with `set_to_none=False`. (Does a third micro-batch cost more than the
# second?)

# %% [markdown]
# ## DataParallel and DistributedDataParallel
# PyTorch's other class, `DataParallel`, looks simpler, but its own documentation advises against it. Why?
#
# | | `DataParallel` | `DistributedDataParallel` |
# |---|---|---|
# | processes | one, with a thread per GPU | one per GPU |
# | Python's lock (GIL) | shared by all threads | one per process |
# | machines | one | one or many |
# | weights are copied | in **each forward**, to every other GPU | once, at the start |
# | gradients | added up on the first GPU | all-reduced |
# | outputs | gathered on the first GPU | stay where they are |
# | optimizer | steps on the first GPU | steps on every rank, on equal gradients |
#
# The loop below takes the four steps of `DataParallel`'s forward on the CPU.
#
# **Your guess.** A network with 12.6 MB of weights, 4 devices, 10 training steps. How many MB of weights are copied?

# %%
predict("10.replicate", unit="MB")

# %%
import copy

D = 4  # change this
copied = 0
network = nn.Sequential(*(nn.Linear(512, 512) for _ in range(12)))
weights = sum(weight.nbytes for weight in network.parameters())
for _ in range(10):
    inputs = torch.randn(64, 512).tensor_split(D)  # scatter
    copies = [copy.deepcopy(network) for _ in range(D - 1)]  # replicate: to each other GPU
    replicas = [network, *copies]
    outputs = [replica(x) for replica, x in zip(replicas, inputs, strict=True)]  # parallel apply
    torch.cat(outputs).mean().backward()  # gather
    copied += sum(weight.nbytes for replica in copies for weight in replica.parameters())
print(f"copied to other devices: 10 · {D - 1} · {weights:,} = {copied:,} bytes")
reveal("10.replicate", copied, unit="MB")

# %% [markdown]
# Every forward copies the weights to all other devices, D−1 times in all. (8 devices: how many MB?) On GPUs, torch
# calls NCCL's broadcast if it can
# ([comm.cpp](https://github.com/pytorch/pytorch/blob/v2.13.0/torch/csrc/cuda/comm.cpp)). Then GPUs pass the weights on,
# and not all bytes leave from the first one.
#
# Hugging Face's `Accelerate` is not a third way. In several processes, its `prepare(model)` returns a
# `DistributedDataParallel`, and its `accumulate` uses `no_sync`
# ([accelerator.py](https://github.com/huggingface/accelerate/blob/main/src/accelerate/accelerator.py)).
#
# The other difference is the lock. Python runs between the kernels, in only one thread of a process at a time:

# %% tags=["nbval-ignore-output"]
from course_utils.figures import bars
from course_utils.lessons.data_parallelism.threads import in_processes, in_threads

milliseconds = {
    "1 thread": 1000 * in_threads(1),
    "2 threads": 1000 * in_threads(2),
    "1 process": 1000 * in_processes(1),
    "2 processes": 1000 * in_processes(2),
}
title = "Two threads take turns; two processes run at the same time, if cores are free"
source = "measured: each runs the same loop, best of 5, on the CPU that ran this cell"
bars(milliseconds, title, unit="ms", provenance=source)

# %% [markdown]
# More cores help the processes, never the threads. (Are your two processes no faster? Then your cores were busy: run
# the cell again.)

# %% [markdown]
# ## How far does it scale?
# A message of n bytes costs α seconds to start, and β seconds per byte:
#
# $$t = \alpha + \beta n$$
#
# Two processes exchange messages of 4 bytes to 16 MiB:


# %%
def ping(most):
    from time import perf_counter

    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    me = dist.get_rank()
    times = {4 * 4**power: [] for power in range(most)}
    for size in times:
        message = torch.zeros(size, dtype=torch.uint8)
        for _ in range(18):
            dist.barrier()
            began = perf_counter()
            for sender in (0, 1):  # there and back
                work = dist.isend(message, 1 - me) if sender == me else dist.irecv(message, 1 - me)
                work.wait()
            times[size].append((perf_counter() - began) / 2)
    # without the first three: warm-up
    return [[size, seconds[3:]] for size, seconds in times.items()]


# %%
timed = run_ranks(ping, world_size=2, most=12)[0]  # change this
print(
    f"{len(timed)} sizes from {timed[0][0]} to {timed[-1][0]:,} bytes, "
    f"{len(timed[0][1])} messages each"
)

# %% [markdown]
# Fit a line to the medians by least squares, with errors relative to the line, so that small messages count as much
# as large ones. The band is the uncertainty of the fit. (With `most=6` all messages are small. Which of α and β is
# then uncertain?)

# %% tags=["nbval-ignore-output", "hide-input"]
from statistics import median

from course_utils.lessons.data_parallelism.figures import band_figure
from course_utils.lessons.data_parallelism.links import fit_link

link = fit_link(timed)
band = {"α + β·n": {size: tuple(1e6 * s for s in link.message(size)) for size, _ in timed}}
dots = {size: 1e6 * median(times) for size, times in timed}
title = (
    f"A message costs {1e6 * link.alpha:.0f} µs to start, "
    f"then it moves {1 / link.beta / 1e9:.1f} GB per second"
)
source = "dots: medians measured between 2 processes (gloo)"
band_figure(band, dots, title, "bytes of the message", "µs", log_y=True, provenance=source)

# %% [markdown]
# A ring needs 2(D−1) messages of S/D bytes, one after the other:
#
# $$2 (D - 1) \left(\alpha + \frac{\beta S}{D}\right)$$
#
# Add a rank's compute time, and you get an [efficiency](../docs/glossary.md#scaling-efficiency): the throughput of D
# ranks over D times that of one. For the small network of the overlap:

# %% tags=["nbval-ignore-output"]
step, size = trained[0]["none"], trained[0]["gradients"]
compute, behind = step["end"], step["end"] - step["forward"]
S = format_bytes(size, "MB", 1)
print(f"a rank computes {1000 * compute:.0f} ms per step and has S = {S} of gradients")
print(f"α = {1e6 * link.alpha:.0f} µs per message, β·S = {1000 * link.beta * size:.1f} ms")

# %% [markdown]
# **Your guess.** Put these into 2(D−1)·(α + β·S/D), with nothing hidden behind backward. What efficiency does the
# formula give for D = 1,024, in percent?

# %%
predict("10.efficiency", unit="%")

# %% tags=["nbval-ignore-output", "hide-input"]
waits_for("10.efficiency")
ranks = [2**power for power in range(1, 11)]
percent = {}
for name, hidden in {"nothing hidden": 0.0, "hidden in backward": behind}.items():
    percent[name] = [100 * link.efficiency(size, D, compute, hidden)[1] for D in ranks]
real = 100 * compute / trained[0]["one"]["end"]
plain = dict(zip(ranks, percent["nothing hidden"], strict=True))
curves = {name: (ranks, values) for name, values in percent.items()}
curves["measured"] = ([2], [real])
lines(
    curves,
    f"If only messages cost time, nothing hidden: {plain[64]:.0f} % on 64 ranks, "
    f"{plain[1024]:.0f} % on 1,024",
    "ranks D",
    "efficiency in %",
    log_x=True,
    markers=False,
    circles=["measured"],
    provenance="closed form with α and β of messages between 2 processes; "
    "circle: measured with one bucket on 2",
)

# %% tags=["nbval-ignore-output"]
print(f"2 ranks: estimated {plain[2]:.0f} %, measured {real:.0f} %")
print(f"the gap {plus_minus(round(plain[2]) - round(real))} points")
print(f"1,024 ranks: {plain[1024]:.0f} % by the formula, with nothing to compare it with")
reveal("10.efficiency", round(plain[1024]), unit="%")

# %% [markdown]
# **The gap** at two ranks: the model has only messages. But gloo also adds up numbers, and both ranks share this
# machine's cores. At the only point that can be checked, the formula is off by that much. So read the curve for its
# shape: a ring's messages, not its bytes, limit many ranks. It does not forecast 1,024 machines. They share switches
# and wait for the slowest rank, and libraries change from rings to trees when α begins to count.
#
# Now real links, with β from the [data-sheet rate](../docs/glossary.md#data-sheet-rate), which no transfer exceeds, and
# without α. [NVLink](../docs/glossary.md#nvlink) joins GPUs within a machine, at 300 GB/s in each direction on an A100.
# Between machines:

# %%
gigabits = {
    "Ethernet, 10 Gbit/s": 10,
    "Ethernet, 100 Gbit/s": 100,
    "InfiniBand NDR, 400 Gbit/s": 400,
}
seconds = {}
for name, speed in gigabits.items():
    seconds[name] = all_reduce_bytes(gradient_size, 64) * 8 / (1e9 * speed)
size = format_bytes(gradient_size, "GB", 1)
title = f"GPT-2 XL on 64 ranks: {size} of gradients need a fast network"
source = "closed form: 2(D−1)/D · bytes over the link's data-sheet rate, in each step"
bars(seconds, title, unit="s", provenance=source)

# %% [markdown]
# 16-bit gradients halve the time, `no_sync` divides it by k, and overlap hides it if backward is long enough.

# %% [markdown]
# ## On GPUs, and on many machines
# On GPUs a script changes in two places: `init_process_group("nccl")`, and the device `cuda:LOCAL_RANK`, from the
# environment that torchrun sets. `ddp_training.py` chooses by itself, and prints its choice:
#
# ```
# torchrun --standalone --nproc-per-node=4 -m course_utils.lessons.data_parallelism.ddp_training
# ```
#
# On two machines with 8 GPUs each, run this on both. HOST is the first machine's name:
#
# ```
# torchrun --nnodes=2 --nproc-per-node=8 --rdzv-id=lesson10 \
#     --rdzv-backend=c10d --rdzv-endpoint=HOST:29500 \
#     -m course_utils.lessons.data_parallelism.ddp_training
# ```
#
# Install the course on both, or start from its folder.

# %% [markdown]
# ## Five questions

# %%
from course_utils.lessons import quiz

quiz(10)

# %% [markdown]
# ## In your own script
# Wrap your model in DDP. `torchrun` starts this script on any number of GPUs or CPUs, and it also works alone.

# %%
import os

import torch
from torch import distributed as dist, nn

cuda = torch.cuda.is_available()
alone = {} if "RANK" in os.environ else {"rank": 0, "world_size": 1, "store": dist.HashStore()}
dist.init_process_group("nccl" if cuda else "gloo", **alone)
device = torch.device("cpu")
if cuda:
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    torch.cuda.set_device(device)
model = nn.Linear(64, 4).to(device)
model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
x = torch.randn(8, 64, device=device)  # this rank's part: let a DistributedSampler choose it
model(x).square().mean().backward()  # the gradients are the mean over all ranks
optimizer.step()
optimizer.zero_grad()
print(f"rank {dist.get_rank()} of {dist.get_world_size()}: a step is done")
del model  # before the group that it uses: torch 2.13 may otherwise wait for ever
dist.destroy_process_group()

# %% [markdown]
# ## Take home
# **Remember** Every rank keeps everything and sees the same mean gradient. Replicas stay equal because they take
# equal steps, and nobody checks it.
#
# **Breaks when** any gradient is not shared, the model does not fit one GPU, or the exchange takes longer than what
# it can hide behind.
#
# **Cheat-sheet line** ring all-reduce: 2(D−1)/D · S bytes per rank, 2(D−1) messages · DDP's buckets: the gradients
# once more, nothing with `gradient_as_bucket_view` · `no_sync` for all but the last micro-batch, forward included.
#
# Now solve the [exercises of this lesson](../exercises/10_data_parallelism.ipynb).
