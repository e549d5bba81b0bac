# ---
# jupyter:
#   course:
#     minutes: 80
#     cpu_seconds: 35
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
# keep in memory? What must they send one another? And what if one of them does not answer?

# %% [markdown]
# ## What each rank holds
# Each of D processes is a [rank](../docs/glossary.md#rank). It runs forward and backward through all layers, on its
# own sequences. PyTorch's `DistributedDataParallel` (DDP, [Li et al. 2020](https://arxiv.org/abs/2006.15704)) replaces
# every gradient by its mean over all ranks.
#
# Here is a network nearly as large as GPT-2 XL, in fp32. With `ranks=8`, `on_gpu` simulates rank 0 of 8. DDP itself is
# PyTorch's own there.

# %%
import torch
from torch.nn.parallel import DistributedDataParallel

from course_utils import on_gpu


def build(ranks, **choices):
    """48 square matrices on the GPU; for several ranks, in DDP."""
    layers = [torch.nn.Linear(5600, 5600, device="cuda") for _ in range(48)]
    model = torch.nn.Sequential(*layers)
    if ranks == 1:
        return model
    torch.distributed.init_process_group("nccl")
    return DistributedDataParallel(model, **choices)


# %%
def weigh(ranks, **choices):
    """Bytes on rank 0 after the second backward."""
    with on_gpu(ranks=ranks, needs="40 GB"):
        model = build(ranks, **choices)
        optimizer = torch.optim.AdamW(model.parameters())
        x = torch.randn(8, 5600, device="cuda")
        for _ in range(2):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            after = torch.cuda.memory_allocated()
            optimizer.step()
        return after


# %% [markdown]
# **Your guess.** One GPU holds 16 bytes per parameter: weights, gradients, and AdamW's two moments (below). How many GB
# does each of 8 ranks hold?

# %%
from course_utils.interactive.guesses import predict, reveal

N = 48 * (5600 * 5600 + 5600)
alone = weigh(1)
print(f"one GPU alone: 16·N = {16 * N / 1e9:.1f} GB, allocated {alone / 1e9:.1f} GB")
predict("10.states")

# %%
eight = weigh(8)  # change this
print(f"rank 0 of 8: {eight / 1e9:.1f} GB, {(eight - alone) / N:.1f} bytes per parameter more")
reveal("10.states", eight)

# %% [markdown]
# Not a byte less, and 6 GB *more*. Each rank holds a [replica](../docs/glossary.md#replica): all weights, gradients and
# optimizer states, 16 bytes per parameter. The other four come from the exchange: see *Buckets*.
#
# So what do the ranks share? Only the *batch*: **b · k · D** sequences, micro-batch times accumulation steps times
# ranks. Another rank makes the batch larger, unless you cut b or k. And a sequence that does not fit one GPU does not
# fit a thousand. (Weigh 64 ranks. Which number changes?)

# %% [markdown]
# ## A script for torchrun
# `torchrun` starts a script as several processes, and tells each its rank. `init_process_group` joins them through
# [gloo](../docs/glossary.md#gloo), torch's library for messages between CPUs. (On NVIDIA's GPUs that is *NCCL*.) DDP
# sends rank 0's weights to all at the start.


# %%
def train():
    import torch
    import torch.distributed as dist
    from torch import nn

    dist.init_process_group("gloo")
    rank, D = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    x = torch.randn(24, 16).tensor_split(D)[rank]
    y = torch.randint(4, (24,)).tensor_split(D)[rank]
    network = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
    model = nn.parallel.DistributedDataParallel(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for step in range(4):
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()  # also averages the gradients of all ranks
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.4f} on {len(x)} of 24 sequences")
    dist.destroy_process_group()


# %% [markdown]
# Write the function to a file, and start it as in a terminal. All ranks print; the filter shows rank 0 alone.

# %%
import inspect
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory


def torchrun(program, ranks):
    command = "-m torch.distributed.run --standalone --local-ranks-filter 0 --nproc-per-node"
    with TemporaryDirectory() as folder:
        script = Path(folder, "script.py")
        script.write_text(f"{inspect.getsource(program)}\n{program.__name__}()\n", encoding="utf-8")
        words = [sys.executable, *command.split(), str(ranks), str(script)]
        done = subprocess.run(words, capture_output=True, text=True)
    print(done.stdout or done.stderr)


torchrun(train, ranks=2)  # change this

# %% [markdown]
# Change the last line to 1 rank, then to 3. Why does the loss differ already in step 0?

# %% [markdown]
# ## The mean of three gradients is the gradient of all
# The loss of a batch is the mean over its sequences, and so is its gradient G. With three equal parts, the mean of
# their gradients is G:
#
# $$G = \frac{G_1 + G_2 + G_3}{3}$$
#
# Check it on three real processes. `run_ranks` is a shortcut for `torchrun` that also returns each rank's result.


# %%
def one_part():
    """How far `average` leaves this rank from the gradient of all 24 samples."""
    import torch
    import torch.distributed as dist
    from torch import nn

    dist.init_process_group("gloo")
    rank, D = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model, inputs, classes = nn.Linear(16, 4), torch.randn(24, 16), torch.randint(4, (24,))

    def gradient(x, y):
        return torch.autograd.grad(nn.functional.cross_entropy(model(x), y), model.weight)[0]

    mine = gradient(inputs.tensor_split(D)[rank], classes.tensor_split(D)[rank])
    average(mine)
    whole = gradient(inputs, classes)
    return ((mine - whole).abs().max() / whole.abs().max()).item()


# %% [markdown]
# **Your turn.** `average` runs on every rank. It must leave the mean over all ranks in `gradient`. One call of
# [torch.distributed](https://docs.pytorch.org/docs/stable/distributed.html#collective-functions) is missing.

# %%
from course_utils.ranks.launch import run_ranks


def average(gradient):
    import torch.distributed as dist

    gradient.div_(dist.get_world_size())  # write one more line below this one


try:
    off = max(run_ranks(one_part, world_size=3, timeout_seconds=60))
    problem = f"a rank is off by {off:.0%} of the largest number" if off > 1e-5 else ""
except RuntimeError as error:
    problem = str(error).splitlines()[-1]
print(f"Not yet: {problem}." if problem else "Right.")

# %% [markdown]
# <details><summary>The line</summary>
#
# `dist.all_reduce(gradient)`. An [all-reduce](../docs/glossary.md#all-reduce) leaves the sum over all ranks on every
# rank.
#
# </details>
#
# "Right" allows for rounding: sums in another order. So 3 GPUs do not repeat a training on 1 GPU bit by bit. Now change
# 3 ranks to 5: parts of 5, 5, 5, 5 and 4 samples. Is their plain mean still right? (Exercise 3 corrects it.)

# %% [markdown]
# ## Equal, or drifting apart
# Replicas start equal and see the same mean gradient, so they stay equal. Nobody compares them or sends weights
# again. By hand, DDP's work is one all-reduce per gradient. What if you forget one?


# %%
def drift(kept_back):
    """All weights after each of 30 steps, and the last loss on all samples."""
    import torch
    import torch.distributed as dist

    torch.manual_seed(0)
    rank, D, path = dist.get_rank(), dist.get_world_size(), []
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))
    inputs, classes = torch.randn(24, 16), torch.randint(4, (24,))
    loss_of, optimizer = torch.nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.2)
    for _ in range(30):
        optimizer.zero_grad()
        x, y = inputs.tensor_split(D)[rank], classes.tensor_split(D)[rank]
        loss_of(model(x), y).backward()
        for name, weight in model.named_parameters():
            if name not in kept_back:
                dist.all_reduce(weight.grad.div_(D))
        optimizer.step()
        path.append(torch.nn.utils.parameters_to_vector(model.parameters()).tolist())
    return path, loss_of(model(inputs), classes).item()


# %% [markdown]
# Three processes train: with all gradients shared, with all but those of the last bias (4 of 676 numbers), and with
# none.
#
# **Your guess.** Leave the bias out for 30 steps. By how many percent does that raise the replicas' mean loss on all 24
# samples, compared with sharing all gradients?

# %%
predict("10.drift", unit="%")


# %%
def each_training(trainings):
    import torch.distributed as dist

    dist.init_process_group("gloo")
    return {name: drift(kept_back) for name, kept_back in trainings.items()}


everything = ["0.weight", "0.bias", "2.weight", "2.bias"]
trainings = {"all": [], "all but 2.bias": ["2.bias"], "none": everything}  # change this
found = run_ranks(each_training, world_size=3, trainings=trainings)
apart, losses = {}, {}
for name in trainings:
    path = torch.tensor([rank[name][0] for rank in found])  # ranks, steps, weights
    apart[f"shared: {name}"] = (path.amax(0) - path.amin(0)).amax(1).tolist()
    losses[name] = sum(rank[name][1] for rank in found) / len(found)

# %% tags=["nbval-ignore-output"]
from course_utils.figures import lines

print("mean loss on all samples:", {name: round(loss, 3) for name, loss in losses.items()})
shared, left_out, nothing = losses.values()
reveal("10.drift", round(100 * (left_out / shared - 1)), unit="%")
curves = {name: (list(range(1, 31)), values) for name, values in apart.items()}
title = "One forgotten bias is enough: the replicas drift apart"
source = "3 processes on the CPU that ran this cell (gloo)"
lines(curves, title, "step", "largest difference of a weight", markers=False, provenance=source)

# %% [markdown]
# With nothing shared, each replica fits its own 8 samples. On all 24 it is hardly better than chance, and everybody
# would notice. (Chance is log 4 = 1.386.) With one forgotten bias, the weights are as far apart, but the loss is nearly
# the right one. So you do not notice. That makes the mistake expensive. (Keep `"0.bias"` back instead, 32 numbers. More
# drift, or less?)

# %% [markdown]
# ## A server in the middle
# Where does the mean come from? The oldest way is a [parameter server](../docs/glossary.md#parameter-server) ([Li et
# al. 2014](https://www.usenix.org/conference/osdi14/technical-sessions/presentation/li_mu)). It alone has the optimizer
# states. D workers have S bytes of gradients each. One step:
#
# | | what happens | bytes through the server's link |
# |---|---|---|
# | 1 · compute | each worker computes the gradient of its own batch | 0 |
# | 2 · push | every worker sends its gradient to the server | D·S |
# | 3 · update | the server averages, and its optimizer steps | 0 |
# | 4 · pull | every worker fetches the new weights | D·S |
#
# Within one machine, the meeting place can be the host's memory, or one of the GPUs. It is a server all the same.
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
    parts = torch.full((120_000,), 10**me, dtype=torch.int32).tensor_split(D)  # 1, 10, 100, …
    held, sent = [[part[0].item() for part in parts]], 0
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

# %%
from course_utils.lessons.data_parallelism.widget import ring_player

D, S = 4, 480_000  # change this
found = run_ranks(ring, world_size=D)
sent = found[0]["sent"]
print(f"first half: estimated (D−1)·S/D = {(D - 1) * S // D:,} bytes, sent {sent:,} bytes")
print(f"rank 0's parts at the end: {found[0]['end']}")
reveal("10.ring", 2 * sent, unit="KB")
ring_player([rank["held"] for rank in found], step=3)

# %% [markdown]
# Each digit shows one rank's contribution. At the end every part is 1 + 10 + 100 + 1,000. (Change D to 5. How many KB
# are sent, and what do the parts hold?) The second half sends as much. So each rank sends in total
#
# $$\frac{2 (D - 1)}{D} \cdot S$$
#
# In the naive way, a rank's bytes grow with D, and a server's link carries still more. The ring stays below 2·S. For
# the fp32 gradients of GPT-2 XL:

# %%
from course_utils import TrainingRun

xl = TrainingRun("gpt2-xl", 4, 1024, "amp-bf16", recompute="full", world_size=8)
S = 4 * xl.model.parameters
for D in (2, 8, 64):  # change this
    naive, in_ring = (D - 1) * S, 2 * (D - 1) / D * S
    print(f"{D:2d} ranks: naive {naive / 1e9:6.1f} GB, ring {in_ring / 1e9:5.1f} GB")

# %% [markdown]
# No exchange among ranks alone needs fewer bytes. A switch that adds can halve them: with [NVLink
# SHARP](https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html#nccl-nvls-enable), a rank sends about S. In
# *messages* the ring is not optimal: it sends 2(D−1), one after the other.

# %% [markdown]
# ## Buckets
# Each message takes time to start, so DDP does not send gradients one by one. It copies them into
# [buckets](../docs/glossary.md#bucket) of about 25 MiB: flat buffers, reduced as a whole and copied back. A
# *communication hook* sees them: DDP calls it with each full bucket, and it returns a future with the mean.


# %%
def buckets(mib):
    """Bytes of the buckets in two steps, in the order of their exchange."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    def hook(group, bucket):
        sizes[-1].append(bucket.buffer().nbytes)
        return allreduce_hook(group, bucket)

    dist.init_process_group("gloo")
    network = nn.Sequential(*(nn.Linear(512, 512) for _ in range(12)))
    model = nn.parallel.DistributedDataParallel(network, bucket_cap_mb=mib)
    model.register_comm_hook(None, hook)
    sizes = []
    for _ in range(2):
        sizes.append([])
        model(torch.randn(8, 512)).square().mean().backward()
    return sizes


# %%
first, second = run_ranks(buckets, world_size=2, mib=2)[0]  # change this
print(f"step 1: {len(first)} bucket(s), {sum(first):,} bytes")
print(f"step 2: {len(second)} buckets, {sum(second):,} bytes, each {second[0]:,}")
print(f"all gradients, estimated: {12 * 513 * 512 * 4:,} bytes")

# %% [markdown]
# Each gradient has its place in one bucket, and buckets persist: the gradients once more. After the first step DDP makes
# them anew, in the order in which gradients really came. These are the 6 GB of the first section. Can they be saved?
# With `gradient_as_bucket_view=True` each `.grad` is a view of a bucket, and the bytes exist once.

# %%
from course_utils.figures import bars

views = weigh(8, gradient_as_bucket_view=True)  # change this
weighed = {"one GPU": alone, "DDP, 8 GPUs": eight, "DDP, gradients as views": views}
title = "DDP holds the gradients twice, unless they are views of its buckets"
bars(weighed, title, provenance="memory_allocated() after backward; ranks are simulated")

# %% [markdown]
# The [ZeRO](../docs/glossary.md#zero) paper has a buffer of the same size for another reason: one flat fp32 copy of
# *all* gradients, 6 GB for 1.5 billion parameters, which some implementations make for an all-reduce or a norm
# ([section 3.2](https://arxiv.org/abs/1910.02054)). [Lesson 12](12_allocator_and_fragmentation.ipynb) looks for it.
#
# A GPU also has *NCCL's buffers*: several for each pair of GPUs that talks, 4 MiB each by default
# ([`NCCL_BUFFSIZE`](https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html)). They lie outside PyTorch's
# allocator: `nvidia-smi` shows them, `memory_allocated()` never. This course has not measured them, because it takes two
# GPUs.

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
print(f"{len(step['buckets'])} buckets, {len(early)} of them full before backward ended")
print(trained[0]["where"])
reveal("10.overlap", 100 * len(early) / len(step["buckets"]), unit="%")

# %% tags=["nbval-ignore-output"]
from course_utils.lessons.shared.time_axis import time_axis

labels = {"many": f"buckets of {bucket_mib} MiB", "one": "one bucket", "none": "no exchange"}
rows = {}
for name, label in labels.items():
    step, free = trained[0][name], 0
    forward, end = step["forward"], step["end"]
    rows[label] = [("forward", 0, forward, "activations"), ("backward", forward, end, "gradients")]
    for number, bucket in enumerate(step["buckets"], 1):
        sent = rows.setdefault(f"{label}, sent", [])
        sent.append((str(number), max(free, bucket["ready"]), bucket["done"], "communication"))
        free = bucket["done"]
title = "Buckets leave during backward, but one bucket for all only at its end"
source = f"measured: the fastest step of rank 0, {trained[0]['where']}"
time_axis(rows, {}, [], title, xlabel="seconds", provenance=source)

# %% [markdown]
# What counts is the *exposed* time: a step's length, minus that of a step without exchange. The last bucket is ready
# only when backward ends, so its transfer is always exposed. (Exercise 1 computes it for any buckets.)
#
# Is your step with small buckets no faster than that with one? Then overlap did not pay here. An exchange takes cores
# from backward on a CPU, and multiprocessors and memory bandwidth on a GPU. Two processes on a busy processor show that
# price more than the gain. (Buckets of 1 MiB: what part of the bytes can leave early?)

# %% [markdown]
# ## Do not sync what you accumulate
# DDP does not know that you add up the gradients of
# [micro-batches](../docs/glossary.md#micro-batch-and-global-batch): each backward all-reduces, though only the sum of
# all is needed. `model.no_sync()` leaves the gradients on the rank ([lesson 08](08_gradient_accumulation.ipynb)). The
# result is the same: a mean of sums is the sum of means. Forward must be inside, too.


# %%
from contextlib import nullcontext


def accumulate(k, to_none=True, waits=True):
    """Most bytes on rank 0 of 8 in forward and backward, with gradients as views."""
    with on_gpu(ranks=8):
        model = build(8, gradient_as_bucket_view=True)
        optimizer = torch.optim.AdamW(model.parameters())
        x = torch.randn(8, 5600, device="cuda")
        for _ in range(3):  # change this: 2
            optimizer.zero_grad(set_to_none=to_none)
            torch.cuda.reset_peak_memory_stats()
            for index in range(k):
                last = index == k - 1
                with model.no_sync() if waits and not last else nullcontext():
                    (model(x).square().mean() / k).backward()
            peak = torch.cuda.max_memory_allocated()
            optimizer.step()
        return peak


# %% [markdown]
# **Your guess.** With views and one micro-batch, rank 0 needs about 24 GB. How many GB with two micro-batches, the first
# under `no_sync`?

# %%
once = accumulate(1)
print(f"one micro-batch: {once / 1e9:.1f} GB")
predict("10.views")

# %%
ways = {
    "one micro-batch": once,
    "two, no_sync": accumulate(2),
    "two, no_sync, set_to_none=False": accumulate(2, to_none=False),
    "two, each of them reduced": accumulate(2, waits=False),  # change this
}
reveal("10.views", ways["two, no_sync"])
title = "Views and no_sync: clear the gradients with set_to_none=False"
bars(ways, title, provenance="max_memory_allocated() until backward ends, rank 0 of 8; simulated")

# %% [markdown]
# Views have a trap. `zero_grad()` sets every `.grad` to None, and the view is gone. The next backward under `no_sync`
# makes a new tensor next to the bucket, so views save nothing until the last micro-batch.
# `zero_grad(set_to_none=False)` writes zeros into the view instead, and gradients add up *in* the bucket. So with views
# *and* accumulation, clear that way. (Does a third micro-batch cost more than the second? And look at step 2 instead of
# step 3: as it begins, DDP makes its buckets anew, next to the old ones with the gradients that it copies.)
#
# Without `no_sync`, memory is as low, but each micro-batch is sent: k times the bytes.

# %% [markdown]
# ## When a rank waits for ever
# A collective ends when *every* rank has called it. If one does not, the others wait: the GPUs show 100 % load, no error
# is raised, and nothing moves. By default they wait [10 minutes with NCCL, and 30 with
# gloo](https://docs.pytorch.org/docs/stable/distributed.html#torch.distributed.init_process_group).
#
# Usual causes: something that only rank 0 does, such as a validation or a mean for the log; one batch more on one rank;
# an exception on one rank that is caught; a layer that some ranks skip. Here is the first. Rank 0 wants the mean loss.


# %%
def waiting(debug):
    """What `mean_loss` returns on this rank, or the error that ends it."""
    import os
    from datetime import timedelta
    import torch
    import torch.distributed as dist

    os.environ["TORCH_DISTRIBUTED_DEBUG"] = debug
    dist.set_debug_level_from_env()  # torchrun's processes do that by themselves
    dist.init_process_group("gloo", timeout=timedelta(seconds=2))
    rank, D = dist.get_rank(), dist.get_world_size()
    try:
        mean = mean_loss(torch.tensor(float(rank)), rank, D)
        dist.barrier()  # in a real step, the next all-reduce
        return mean.item()
    except RuntimeError as error:
        return str(error).split("] ")[-1].split(", TensorDtypes")[0]


# %% [markdown]
# **Your turn.** Run the cell, read both errors, and change `mean_loss` so that both ranks come to their end.


# %%
def mean_loss(loss, rank, D):
    """Return the mean of all ranks' losses."""
    import torch.distributed as dist

    if rank == 0:
        dist.all_reduce(loss)
    return loss / D


plain, detail = (run_ranks(waiting, 2, debug=level)[0] for level in ("OFF", "DETAIL"))
if plain == detail == 0.5:
    print("Right.")
else:
    print(f"Not yet. Rank 0 says: {plain}\nand with DETAIL: {detail}")

# %% [markdown]
# <details><summary>The change</summary>
#
# Remove the `if`: each rank calls `all_reduce`, and only rank 0 prints what it returns.
#
# </details>
#
# The plain error comes after the time limit, and does not say what the other rank did. With
# `TORCH_DISTRIBUTED_DEBUG=DETAIL`, ranks compare each call before they make it. That is slow, but names the call. What
# to do about a hang:
#
# 1. Set a limit that you can wait for: `init_process_group("nccl", timeout=timedelta(minutes=2))`.
# 2. See where each rank is: `py-spy dump --pid PID` prints a process's stack, and needs no change of the script.
# 3. Run a few steps again with `TORCH_DISTRIBUTED_DEBUG=DETAIL`.
# 4. With NCCL, let a rank write its last collectives to a file when the limit is over: `TORCH_NCCL_DUMP_ON_TIMEOUT=1`,
#    `TORCH_FR_BUFFER_SIZE=2000` and `TORCH_FR_DUMP_TEMP_FILE=trace_`. `torchfrtrace` compares the ranks' files, and
#    names the collective and the rank that is missing. (In older versions: `TORCH_NCCL_TRACE_BUFFER_SIZE`,
#    `TORCH_NCCL_DEBUG_INFO_TEMP_FILE`.)
# 5. Keep `TORCH_NCCL_ASYNC_ERROR_HANDLING` on, which is the default: it ends the process at the limit. With 0, a rank
#    waits for ever.
#
# If ranks have different numbers of batches, `with model.join():` lets those that are done take part until all are. If
# a step leaves out some parameters, DDP waits for their gradients: `find_unused_parameters=True`.

# %% [markdown]
# ## DataParallel and DistributedDataParallel
# PyTorch's other class, `DataParallel`, looks simpler, but its own documentation advises against it. Why?
#
# | | `DataParallel` | `DistributedDataParallel` |
# |---|---|---|
# | processes | one, with a thread per GPU | one per GPU |
# | Python's lock (GIL) | shared by all threads, so they take turns | one per process |
# | machines | one | one or many |
# | weights are copied | in **each forward**, to every other GPU | once, at the start |
# | gradients | added up on the first GPU | all-reduced |
# | outputs | gathered on the first GPU | stay where they are |
# | optimizer | steps on the first GPU | steps on every rank, on equal gradients |
#
# So 10 steps on 4 GPUs copy the weights 10 · 3 times, with NCCL's broadcast if torch can call it
# ([comm.cpp](https://github.com/pytorch/pytorch/blob/v2.13.0/torch/csrc/cuda/comm.cpp)). Python runs between the
# kernels, in only one thread of a process at a time.
#
# Hugging Face's `Accelerate` is not a third way. In several processes, its `prepare(model)` returns a
# `DistributedDataParallel`, and its `accumulate` uses `no_sync`
# ([accelerator.py](https://github.com/huggingface/accelerate/blob/main/src/accelerate/accelerator.py)).

# %% [markdown]
# ## How far does it scale?
# A message of n bytes costs α seconds to start, and β seconds per byte: t = α + β·n. Two processes exchange messages:


# %%
def ping(sizes):
    """Seconds of the fastest message of each size, between two ranks."""
    from time import perf_counter
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    me, times = dist.get_rank(), {size: [] for size in sizes}
    for size in sizes * 15:
        message = torch.zeros(size, dtype=torch.uint8)
        dist.barrier()
        began = perf_counter()
        for sender in (0, 1):  # there and back
            work = dist.isend(message, 1 - me) if sender == me else dist.irecv(message, 1 - me)
            work.wait()
        times[size].append((perf_counter() - began) / 2)
    return [min(each) for each in times.values()]


# %% tags=["nbval-ignore-output"]
small, large = run_ranks(ping, world_size=2, sizes=[4, 2**24])[0]  # change this
alpha, beta = small, (large - small) / 2**24
print(f"α = {1e6 * alpha:.0f} µs per message, 1/β = {1e-9 / beta:.1f} GB/s")

# %% [markdown]
# A ring needs 2(D−1) messages of S/D bytes, one after the other:
#
# $$2 (D - 1) \left(\alpha + \frac{\beta S}{D}\right)$$
#
# Add a rank's compute time, and you get an [efficiency](../docs/glossary.md#scaling-efficiency): the throughput of D
# ranks over D times that of one. For the small network of the overlap, **extrapolated** from two processes to 1,024
# ranks:

# %% tags=["nbval-ignore-output", "hide-input"]
none, S = trained[0]["none"], trained[0]["gradients"]
compute = none["end"]
behind = compute - none["forward"]  # backward, behind which an exchange may hide
ranks = [2**power for power in range(1, 11)]
ring_of = {D: 2 * (D - 1) * (alpha + beta * S / D) for D in ranks}
curves = {"measured": ([2], [100 * compute / trained[0]["one"]["end"]])}
for name, hidden in {"nothing hidden": 0.0, "hidden in backward": behind}.items():
    added = [max(0.0, ring_of[D] - hidden) for D in ranks]
    curves[name] = (ranks, [100 * compute / (compute + each) for each in added])
plain = curves["nothing hidden"][1]
title = f"Extrapolated: {plain[0]:.0f} % on 2 ranks, {plain[-1]:.0f} % on 1,024, nothing hidden"
source = "closed form with α and β of messages between 2 processes; circle: measured, one bucket"
marks = {"log_x": True, "markers": False, "circles": ["measured"], "provenance": source}
lines(curves, title, "ranks D", "efficiency in %", **marks)

# %% [markdown]
# Only the circle is measured: two ranks. There you can see how far off the formula is. It has only messages, but gloo
# also adds up numbers, and both ranks share this machine's cores. All else is an *extrapolation*, and not a forecast of
# 1,024 machines: they share switches and wait for the slowest rank, and libraries change from rings to trees when α
# begins to count. Read the curve for its shape. A ring's messages, not its bytes, limit many ranks.
#
# Now real links, with β from the [data-sheet rate](../docs/glossary.md#data-sheet-rate), which no transfer exceeds, and
# without α. [NVLink](../docs/glossary.md#nvlink) joins GPUs within a machine, at 300 GB/s in each direction on an A100.
# Between machines:

# %%
links = {"Ethernet, 10 Gbit/s": 10, "Ethernet, 100 Gbit/s": 100, "InfiniBand NDR, 400 Gbit/s": 400}
S = 4 * xl.model.parameters
seconds = {name: 2 * 63 / 64 * S * 8 / (1e9 * speed) for name, speed in links.items()}
title = f"GPT-2 XL on 64 ranks: {S / 1e9:.1f} GB of gradients need a fast network"
source = "closed form: 2(D−1)/D · bytes over the link's data-sheet rate, in each step"
bars(seconds, title, unit="s", provenance=source)

# %% [markdown]
# 16-bit gradients halve the time, `no_sync` divides it by k, and overlap hides it if backward is long enough.

# %% [markdown]
# ## One rank, weighed three ways
# Back to memory, with a whole small GPT. `compare` lays the closed form next to a measurement, kind
# by kind. Here is rank 0 of 2, on the simulated GPU, then counted in two real processes on your processor.

# %%
from dataclasses import replace

from course_utils import compare

sizes = {"layers": 6, "hidden": 256, "heads": 4, "ffn": 1024, "vocab": 512, "max_positions": 128}
small = replace(xl.model, name="small", kv_heads=4, dropout=0.0, **sizes)
run = TrainingRun(small, 1, 128, "fp32", attention="eager", world_size=2)
compare(run, "simulated")

# %%
counted = compare(run, "cpu")  # change this
counted

# %% [markdown]
# Six times the same number: weights, gradients, two moments, the buckets ("communication"), and a temporary of AdamW's
# step. **The gap** is 0 bytes on the simulated GPU, where the reducer is PyTorch's own, too. On the CPU, AdamW's step
# counters are in the same memory, 512 bytes per tensor. (Set `bucket_view=True`: which rows change?)
#
# At this peak, views save a whole number. Now 8 sequences per rank instead of 1: the peak moves to the end of forward.
# **Your guess.** How many MB do views save at that peak?

# %%
larger = run.replace(micro_batch=8)  # change this
without = compare(larger, "simulated").measurement.peak
print(f"without views: {without / 1e6:.1f} MB; all gradients: {4 * small.parameters / 1e6:.1f} MB")
predict("10.peak", unit="MB")

# %%
with_views = compare(larger.replace(bucket_view=True), "simulated")
reveal("10.peak", round((without - with_views.measurement.peak) / 1e6, 1), unit="MB")
with_views

# %% [markdown]
# Nothing. At the end of forward there are no gradients yet, and the buckets are there either way. They persist. So DDP
# with views costs nothing if the peak is at the end of backward or in the optimizer, and the bytes of all gradients if
# it is earlier. `zero_grad()` frees gradients, but never buckets.

# %% [markdown]
# ## The script's next line
# Now your script trains on several GPUs. **Predict** its peak on one of 8 before you apply the change to `my_train.py`.
# (The table simulates rank 0 of 8. On GPUs, start it with `torchrun --standalone --nproc-per-node 8 my_train.py`.)

# %%
from course_utils.lessons.shared.growing_script import script

script(10)

# %% [markdown]
# A rank takes no more than a single GPU did: with four micro-batches, gradients are there all the time, and here they
# are views of the buckets. What do you get for it? Eight times the tokens per step. (Leave `set_to_none=False` out.
# Which number do you expect?)
#
# `require_backward_grad_sync` is what `no_sync()` switches; as a line of its own it fits a loop. By default,
# `torch.compile` cuts its graph where a bucket is full, so that the bucket can leave during backward. Each part then
# chooses by itself what to keep, and the simulated GPU cannot follow that. So the script sets `optimize_ddp = False`. On
# real GPUs, compare both.

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
device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else "cpu"
if cuda:
    torch.cuda.set_device(device)
model = nn.Linear(64, 4).to(device)
model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
x = torch.randn(8, 64, device=device)  # this rank's part: let a DistributedSampler choose it
model(x).square().mean().backward()  # the gradients are the mean over all ranks
optimizer.step()
print(f"rank {dist.get_rank()} of {dist.get_world_size()}: a step is done")
del model  # before the group that it uses
dist.destroy_process_group()

# %% [markdown]
# On two machines with 8 GPUs each, run this on both. HOST is the first machine's name:
#
# ```
# torchrun --nnodes=2 --nproc-per-node=8 --rdzv-id=lesson10 \
#     --rdzv-backend=c10d --rdzv-endpoint=HOST:29500 script.py
# ```
#
# With GPUs, `torchrun --standalone --nproc-per-node=4 -m course_utils.lessons.data_parallelism.ddp_training` times the
# steps of *Overlap* with NCCL.

# %% [markdown]
# ## Five questions

# %%
from course_utils.lessons import quiz

quiz(10)

# %% [markdown]
# ## Take home
# **Remember** Every rank keeps everything and sees the same mean gradient. Replicas stay equal because they take
# equal steps, and nobody checks it.
#
# **Breaks when** any gradient is not shared, a rank leaves out a call, the model does not fit one GPU, or the exchange
# takes longer than what it can hide behind.
#
# **Cheat-sheet line** ring all-reduce: 2(D−1)/D · S bytes per rank, 2(D−1) messages · DDP's buckets: the gradients
# once more, nothing with `gradient_as_bucket_view` at the end of backward · `no_sync` for all but the last micro-batch,
# forward included.
#
# Now solve the [exercises of this lesson](../exercises/10_data_parallelism.ipynb).
