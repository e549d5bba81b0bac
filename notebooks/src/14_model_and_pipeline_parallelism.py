# ---
# jupyter:
#   course:
#     minutes: 70
#     cpu_seconds: 20
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 14 · Model and pipeline parallelism
#
# **70 minutes.** You should know what a training step keeps and when ([lesson 01](01_where_did_the_memory_go.ipynb)),
# and what a [micro-batch](../docs/glossary.md#micro-batch-and-global-batch) is. You need no GPU: CPU processes play the
# devices.
#
# Is a model too large for one device? Cut it between layers: the first ones here, the next ones there. Only activations
# cross the cut, but devices wait for one another. How long? And what does waiting less cost in memory? Other cuts, and
# which one to choose, are [lesson 15](15_which_cut_when.ipynb).

# %% [markdown]
# ## One stage after the other
# `.to` moves each part of the layers, and later the activations between them:

# %%
import torch
from torch import nn

two = ("cuda:0", "cuda:1") if torch.cuda.device_count() > 1 else ("cpu", "cpu")
torch.manual_seed(11)
layers = [nn.Linear(256, 256) for _ in range(8)]
cut = 4  # change this
first = nn.Sequential(*layers[:cut]).to(two[0])
last = nn.Sequential(*layers[cut:]).to(two[1])
between = first(torch.randn(32, 256).to(two[0]))
last(between.to(two[1])).square().mean().backward()  # and back again, by autograd
for name, half in (("first", first), ("last", last)):
    size = sum(weight.nbytes for weight in half.parameters())
    print(f"{name}: {size:,} bytes of weights, and as many of gradients")
print(f"across the cut: {between.nbytes:,} bytes, and a gradient of the same size on the way back")

# %% [markdown]
# Change the cut to 6: what changes, and what does not?
#
# Now four devices, each with a quarter of the layers: a [stage](../docs/glossary.md#pipeline-stage). One batch goes
# forward through all, then backward.
#
# **Your guess.** What percentage of the time does each device work?

# %%
from course_utils.interactive.guesses import predict, reveal, waits_for

predict("14.naive", unit="%")

# %%
from course_utils.lessons.pipelines.figures import pipeline_figure, schedules_figure
from course_utils.lessons.pipelines.schedules import follow, simulate

waits_for("14.naive")
naive = simulate("naive", stages=4, micro_batches=8)
pipeline_figure(naive)

# %%
print(
    f"formula: 1/p = {1 / naive.stages:.0%}; "
    f"in the schedule each stage works {1 - naive.idle:.0%} of the time"
)
reveal("14.naive", 100 * (1 - naive.idle), unit="%")

# %% [markdown]
# Of p stages, one works while p − 1 wait. Four devices are as slow as one, but have four times its memory. It is used
# unevenly (lower half): the first stage fills first and empties last.

# %% [markdown]
# ## Cut the batch, too
# [GPipe](https://arxiv.org/abs/1811.06965) (Huang et al. 2019) cuts the batch into m micro-batches. When the first
# leaves a stage, the second enters. Weights are updated once, at the end, so the gradients are those of the complete
# batch. Stages still wait while the pipeline fills and empties: the [bubble](../docs/glossary.md#bubble).
#
# **Your guess.** With how many micro-batches do four stages wait at most 10 % of the time?

# %%
predict("14.micro", unit="micro-batches")

# %% [markdown]
# Try it with sliders:

# %%
from course_utils.lessons.pipelines.widget import pipeline_player

waits_for("14.micro")
pipeline_player("GPipe", stages=4, micro_batches=8)

# %% [markdown]
# Where does the player's formula come from? Divide the time into columns, one micro-batch long. Each stage works in m
# of m + p − 1 columns, because the last stage waits p − 1 columns for its first micro-batch. So the fraction of time
# lost is (section 2.3)
#
# $$\frac{p - 1}{m + p - 1}$$

# %%
for p, m in ((2, 4), (4, 8), (4, 27), (8, 64), (16, 64)):  # change this
    formula, simulated = (p - 1) / (m + p - 1), simulate("GPipe", p, m).idle
    print(f"p = {p:2d}, m = {m:2d}: formula {formula:6.2%}, gap {abs(formula - simulated):.2%}")
enough = next(m for m in range(1, 1000) if 3 / (m + 3) <= 0.1)
print(f"4 stages: m = {enough} for 10 %. GPipe's own rule, m = 4·p, leaves {3 / (16 + 3):.0%}")
reveal("14.micro", enough, unit="micro-batches")

# %% [markdown]
# Add (8, 8), predict, run.
#
# **Your turn.** `simulate` is simple. A stage does its works in order. A work starts when its stage is free *and* the
# result that it needs has arrived: a forward needs the stage before, a backward the stage after. Write two lines.


# %%
def simulator(orders, backward=2):
    """Return how long one batch takes; orders has one list of works per stage: F0, F1, B0, …"""
    ends, free, places = {}, [0] * len(orders), [0] * len(orders)
    for _ in range(sum(map(len, orders))):  # in each round, at least one stage can go on
        for stage, order in enumerate(orders):
            if places[stage] == len(order):
                continue
            kind, micro = order[places[stage]][0], order[places[stage]][1:]
            sender = stage - 1  # write this line again
            outside = sender < 0 or sender == len(orders)  # nothing to wait for
            ready = 0 if outside else ends.get((kind, sender, micro))
            if ready is None:
                continue  # not yet: try again in the next round
            start = free[stage]  # and this one
            free[stage] = start + (1 if kind == "F" else backward)
            ends[kind, stage, micro] = free[stage]
            places[stage] += 1
    return max(free)


# %%
def orders_of(schedule, p, m):
    return [simulate(schedule, p, m).order(stage) for stage in range(p)]


for schedule, p, m in (("GPipe", 4, 8), ("1F1B", 3, 5), ("GPipe", 2, 1)):  # change this
    mine, formula = simulator(orders_of(schedule, p, m)), 3 * (m + p - 1)
    right = "Right" if mine == formula else "Not yet"
    print(f"{right}: {schedule}, p = {p}, m = {m}: {mine} units, 3·(m + p − 1) = {formula}")

# %% [markdown]
# <details><summary>The two lines</summary>
#
# `sender = stage - 1 if kind == "F" else stage + 1` and `start = max(free[stage], ready)`. The course's `simulate` does
# the same, and notes who keeps what.
#
# </details>
#
# There is no gap while stages are equally fast. If one is slower, all wait for it:

# %%
slow = simulate("GPipe", stages=4, micro_batches=8, slow={1: 1.5})  # change this
title = f"One stage takes 1.5 times as long: stages wait {slow.idle:.0%} of the time"
pipeline_figure(slow, title.replace("%", " %"))

# %% [markdown]
# So cut by time, not by number of layers: the last stage also has the head. PipeDream (below) times each layer, and
# searches for the cut whose slowest stage is fastest.

# %% [markdown]
# ## Who keeps what
# A stage keeps a micro-batch's activations from its forward to its backward: under GPipe, all m at once. The
# [1F1B](../docs/glossary.md#1f1b) schedule goes backward as soon as it can. Once the pipeline is full, each stage
# alternates one forward and one backward ([Narayanan et al. 2021](https://arxiv.org/abs/2104.04473), section 2.2).
#
# **Your guess.** Four stages, 16 micro-batches, 1F1B. How many micro-batches' activations does the *first* stage keep?

# %%
predict("14.kept", unit="micro-batches")

# %%
waits_for("14.kept")
one_one = simulate("1F1B", stages=4, micro_batches=16)  # change this
pipeline_figure(one_one)

# %%
gpipe = simulate("GPipe", stages=4, micro_batches=one_one.micro_batches)
print("stage  GPipe keeps  1F1B keeps  p − stage")
for stage in range(4):
    kept = gpipe.most_kept(stage), one_one.most_kept(stage)
    print(f"{stage:5d}  {kept[0]:11.0f}  {kept[1]:10.0f}  {4 - stage:9d}")
print(f"idle: GPipe {gpipe.idle:.1%}, 1F1B {one_one.idle:.1%}")
reveal("14.kept", one_one.most_kept(0), unit="micro-batches")

# %% [markdown]
# The bubble is the same, but each stage, counted from 0, keeps at most p − stage micro-batches. Change 16 to 32,
# predict both, run. So m can grow until the bubble is small. Megatron-LM chose 1F1B over GPipe for that (section 2.2).
#
# Now weigh it in bytes. Here is a stage of GPT-2 in plain PyTorch: three of its twelve blocks.

# %%
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, h, a):
        super().__init__()
        self.norm1, self.norm2, self.a = nn.LayerNorm(h), nn.LayerNorm(h), a
        self.qkv, self.out = nn.Linear(h, 3 * h), nn.Linear(h, h)
        self.mlp = nn.Sequential(nn.Linear(h, 4 * h), nn.GELU(), nn.Linear(4 * h, h))

    def forward(self, x):
        b, s, h = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, s, 3 * self.a, -1).transpose(1, 2).chunk(3, 1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # flash, in bf16
        x = x + self.out(y.transpose(1, 2).reshape(b, s, h))
        return x + self.mlp(self.norm2(x))


# %% [markdown]
# A stage goes through its order: a forward keeps, a backward frees. `torch.cuda`'s own counters weigh.


# %%
def batch():
    return torch.randn(4, 1024, 768, device="cuda", dtype=torch.bfloat16, requires_grad=True)


def weigh(stage, order):
    """Return the most bytes that are kept after a forward, and the peak, beyond the weights."""
    stage(batch())  # the first product allocates cuBLAS's workspace
    torch.cuda.reset_peak_memory_stats()
    before, kept, most = torch.cuda.memory_allocated(), {}, 0
    for work in order:
        if work[0] == "F":
            kept[work[1:]] = stage(batch())
            most = max(most, torch.cuda.memory_allocated() - before)
        else:
            y = kept.pop(work[1:])
            y.backward(torch.ones_like(y))
            del y
            stage.zero_grad()
    return most, torch.cuda.max_memory_allocated() - before


# %%
from course_utils import on_gpu
from course_utils.figures import bars

p, m, sbh = 4, 8, 1024 * 4 * 768  # change this
with on_gpu():
    blocks = nn.Sequential(*(Block(768, 12) for _ in range(12 // p))).to("cuda", torch.bfloat16)
    sizes = {"GPipe, each stage": weigh(blocks, orders_of("GPipe", p, m)[0])[0]}
    for stage, order in enumerate(orders_of("1F1B", p, m)):
        sizes[f"1F1B, stage {stage}"] = weigh(blocks, order)[0]
for stage in range(p):
    formula = min(m, p - stage) * (12 // p * 32 + 2) * sbh / 1e9
    gap = formula - sizes[f"1F1B, stage {stage}"] / 1e9
    print(f"stage {stage}: (p − stage)·(3·32 + 2)·s·b·h = {formula:.2f} GB, gap {gap:.3f} GB")
title = "1F1B keeps half of GPipe's activations on the first stage, an eighth on the last"
bars(sizes, title, kind="activations", provenance="memory_allocated() after forwards; simulated")

# %% [markdown]
# A block without dropout keeps 32·s·b·h bytes ([lesson 05](05_activations.ipynb)), and this stage holds its output, 2
# more. The gap is the fp32 numbers of norms and attention, a few per token. So the table's 4, 3, 2, 1 are real bytes.
#
# States are divided by p: each stage has 16 bytes for each parameter of its layers. Activations are not: the first
# stage keeps p micro-batches, in 1/p of the layers, as much as one device keeps for one micro-batch. GPipe's stages keep
# m/p times that. In a real model, the last stage also has the head, and the loss's s·b·V numbers per kept micro-batch.
#
# GPipe's authors knew. Their stages keep one input per micro-batch and
# [recompute](../docs/glossary.md#activation-recomputation) the rest in backward (section 2.3):

# %%
from torch.utils.checkpoint import checkpoint


class Recomputed(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = layers

    def forward(self, x):
        return checkpoint(self.layers, x, use_reentrant=False)


with on_gpu():
    ways = {"keeps everything": blocks, "recomputes its 3 blocks": Recomputed(blocks)}
    for name in ("GPipe", "1F1B"):
        for how, stage in ways.items():
            peak = weigh(stage, orders_of(name, p, m)[0])[1]  # change this
            print(
                f"{name:5s} the first stage {how:23s} peak {peak / 1e9:.2f} GB beyond its weights"
            )

# %% [markdown]
# With recomputation, the schedules hardly differ in memory: what is left is mostly one micro-batch of one stage, and
# the gradients. 1F1B halves the first stage's activations without a second forward.

# %% [markdown]
# ## A stage of your own
# Now real processes, one per stage. A process's number is its [rank](../docs/glossary.md#rank). They send through
# [gloo](../docs/glossary.md#gloo), torch's library for CPUs (GPUs use NCCL). Each makes the same network of eight
# layers and takes its own:


# %%
def part(stage, stages):
    """A stage's layers, and the complete batch, which is the same on every rank."""
    import torch
    from torch import nn

    torch.manual_seed(11)
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(8)))
    each = len(layers) // stages
    data, target = torch.randn(2, 32, 16)
    return layers[stage * each : (stage + 1) * each], data, target


def squares(parts):
    return sum(weight.grad.square().sum().item() for one in parts for weight in one.parameters())


# %% [markdown]
# A forward receives, computes and sends. A backward does the same in the other direction:


# %%
def forward(layers, x, rank, ranks):
    import torch.distributed as dist

    if rank > 0:
        dist.recv(x, rank - 1)  # wait for the previous stage's output, and put it into x
    y = layers(x.requires_grad_())
    return x, y, [dist.isend(y.detach(), rank + 1)] if rank < ranks - 1 else []


def backward(x, y, rank, ranks):
    import torch
    import torch.distributed as dist

    gradient = None  # the last stage's y is the loss
    if rank < ranks - 1:
        gradient = torch.empty_like(y)
        dist.recv(gradient, rank + 1)
    y.backward(gradient)
    return [dist.isend(x.grad, rank - 1)] if rank > 0 else []


# %% [markdown]
# `recv` waits for a message, but `isend` returns at once. (With a `send` that waits, two neighbors under 1F1B could
# wait for each other forever.) A schedule is only an order of forwards and backwards:


# %%
def by_hand(order, layers, batches, targets, rank, ranks):
    """Execute F0, F1, B0, … in order; return the most micro-batches kept at once."""
    from torch.nn.functional import mse_loss

    kept, messages, most = {}, [], 0
    for work in order:
        i = int(work[1:])
        if work[0] == "F":
            x, y, sent = forward(layers, batches[i].clone(), rank, ranks)
            if rank == ranks - 1:
                y = mse_loss(y, targets[i]) / len(targets)
            kept[i] = x, y
            most = max(most, len(kept))
        else:
            sent = backward(*kept.pop(i), rank, ranks)
        messages += sent
    for message in messages:
        message.wait()
    return most


# %% [markdown]
# ## torch's own schedules
# `torch.distributed.pipelining` does all of that for you. Its `PipelineStage` has the layers and sends; a schedule
# calls it. Two schedules shrink the bubble, and their gradients stay exact:
#
# - *Interleaved* 1F1B gives each rank v short stages instead of a long one. Then stages fill v times as fast (Narayanan
#   et al. 2021, section 2.2.2).
# - *Zero bubble* cuts each backward in two, I and W. The previous stage waits only for the input's gradient, I. The
#   weights' gradients, W, can wait, and fill the gaps ([Qi et al. 2023](https://arxiv.org/abs/2401.10241)).
#
# **Your guess.** Four ranks, 8 micro-batches: 1F1B waits 3/11 of the time. What percentage does interleaved 1F1B wait,
# with two stages per rank?

# %%
predict("14.interleaved", unit="%")

# %% [markdown]
# What does a rank really do, and in which order? Put your own function before a stage's methods, and note each call as
# torch writes it: stage, work, micro-batch.


# %%
def watched(stage, log):
    """The stage, whose forwards and backwards are noted in log from now on: 0F3, 0B3, 0I3, 0W3."""
    names = {"forward": "F", "backward": "B", "backward_weight": "W"}
    for name, kind in names.items():
        method = getattr(stage, f"{name}_one_chunk")

        def noted(micro, *given, method=method, kind=kind, **named):
            whole = named.get("full_backward", True)
            log.append(f"{stage.stage_index}{kind if whole else 'I'}{micro}")
            return method(micro, *given, **named)

        setattr(stage, f"{name}_one_chunk", noted)
    return stage


# %%
def by_torch(schedule, mine, m, ranks):
    """Take one step by a schedule of torch on this rank's stages, `mine`: order, squares."""
    import torch
    from torch.distributed import pipelining
    from torch.nn.functional import mse_loss

    log, stages = [], ranks * len(mine)
    parts = {each: part(each, stages)[0] for each in mine}
    _, data, target = part(0, stages)
    made = [
        watched(pipelining.PipelineStage(layers, each, stages, torch.device("cpu")), log)
        for each, layers in parts.items()
    ]
    step = getattr(pipelining, schedule)(made if mine[1:] else made[0], m, loss_fn=mse_loss).step
    last = {"target": target, "losses": []} if stages - 1 in mine else {}
    step(*([data] if 0 in mine else []), **last)
    return log, squares(parts.values())


# %% [markdown]
# All schedules, yours first, in one start of four processes. Under the last two, rank 0 has stages 0 and 4.


# %%
def every_schedule(orders, m):
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank, p = dist.get_rank(), dist.get_world_size()
    layers, data, target = part(rank, p)
    kept = by_hand(orders[rank], layers, data.chunk(m), target.chunk(m), rank, p)
    found = {"your own 1F1B": (orders[rank], squares([layers]))}
    found["naive"] = by_torch("ScheduleGPipe", [rank], 1, p)
    found["GPipe"] = by_torch("ScheduleGPipe", [rank], m, p)
    found["1F1B"] = by_torch("Schedule1F1B", [rank], m, p)
    found["interleaved 1F1B"] = by_torch("ScheduleInterleaved1F1B", [rank, rank + p], m, p)
    found["zero bubble"] = by_torch("ScheduleInterleavedZeroBubble", [rank, rank + p], m, p)
    dist.destroy_process_group()
    return found, kept


# %%
from course_utils.ranks.launch import run_ranks

p, m = 4, 8  # change this
ranks, kept = zip(*run_ranks(every_schedule, p, orders=orders_of("1F1B", p, m), m=m))
layers, data, target = part(0, 1)
F.mse_loss(layers(data), target).backward()
print(f"one process: norm of all gradients {squares([layers]) ** 0.5:.5f}")
for name in ranks[0]:
    norm = sum(rank[name][1] for rank in ranks) ** 0.5
    print(f"{name:17s} norm of all gradients {norm:.5f}; rank 1:", *ranks[1][name][0][:7], "…")
print("micro-batches that your own stages keep:", *kept)

# %% [markdown]
# A synchronous pipeline approximates nothing: every schedule leaves the gradients of one process. The orders are those
# that the ranks really executed. Now let the simulator time them. Each rank has the same work in all four:

# %%
followed = [follow(name, [rank[name][0] for rank in ranks]) for name in list(ranks[0])[2:]]
waits = [f"{100 * each.idle:.0f} %" for each in followed]
title = f"torch's schedules: from waiting {waits[0]} of the time to {waits[-1]}"
reveal("14.interleaved", 100 * followed[2].idle, unit="%")
schedules_figure(followed, title)

# %%
waits_for("14.interleaved")
formulas = {"GPipe": (p - 1) / (m + p - 1), "1F1B": (p - 1) / (m + p - 1)}
formulas["interleaved 1F1B"] = (p - 1) / (2 * m + p - 1)
formulas["zero bubble"] = (p - 1) / (6 * m + p - 1)
for each in followed:
    formula, kept = formulas[each.schedule], each.most_kept(0)
    print(
        f"{each.schedule:17s} formula {formula:5.1%}, gap {abs(formula - each.idle):.1%}; "
        f"rank 0 keeps {kept:3.1f} micro-batches; {each.messages} messages for each"
    )

# %% [markdown]
# - Two short stages per rank: a rank has 2·m works of half the length, and still waits p − 1 of them. The price: about
#   twice as many messages, and more kept micro-batches on rank 0, p·(1 + (p − 1)/(p·v)) instead of p ([Korthikanti et
#   al. 2022](https://arxiv.org/abs/2205.05198), section 4.2.3).
# - Zero bubble: if F, I and W take equally long, only the p − 1 short forwards before the last rank's first work remain.
#   A rank has 6·m works of that length. The price: all ranks keep as much as 1F1B's first stage. (Real works are not
#   equally long, and messages take time.)
#
# A third, *DualPipe*, feeds micro-batches from both ends of the pipeline, for a second copy of the weights, and computes
# while its messages travel ([DeepSeek-AI 2024](https://arxiv.org/abs/2412.19437), section 3.2.1). torch has a variant,
# `ScheduleDualPipeV`. Set m to 16: which waits shrink to about half?

# %% [markdown]
# ## No bubble at all?
# Why wait at the end of a batch at all? In PipeDream ([Narayanan et al.
# 2019](https://doi.org/10.1145/3341301.3359646)), micro-batches follow one another without end, and each stage
# updates its weights after each backward. But then weights change between a micro-batch's forward and its backward:

# %%
torch.manual_seed(11)
stage = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
first, second = (stage(torch.randn(2, 4)) for _ in range(2))  # two micro-batches in flight
first.sum().backward()
optimizer.step()  # change this: what happens without this line?
try:
    second.sum().backward()
except RuntimeError as error:
    print(str(error).partition(":")[0])

# %% [markdown]
# torch refuses. With other weights, backward computes the gradient of nothing. So each stage keeps the *version* that a
# micro-batch has seen until it comes back: weight stashing (section 3.3).
#
# **Your guess.** How many versions of its weights does the first of four stages keep?

# %%
predict("14.versions", unit="versions")

# %%
waits_for("14.versions")
pipeline_figure(simulate("PipeDream", stages=4, micro_batches=20))

# %%
endless = simulate("PipeDream", stages=4, micro_batches=200)
print(f"idle in 200 micro-batches: {endless.idle:.1%}")
print("stage  versions  updates late  p − stage  16-bit weights that GPT-2 XL's stage keeps")
for stage in range(4):
    versions, late = endless.versions(stage), endless.late(stage)
    weights = versions * 2 * 1_557_611_200 / 4 / 1e9  # lesson 04 counts them
    print(f"{stage:5d}  {versions:8d}  {late:12d}  {4 - stage:9d}  {weights:41.1f} GB")
reveal("14.versions", endless.versions(0), unit="versions")

# %% [markdown]
# A stage keeps p − stage versions, one per micro-batch in flight. Memory is one price. The other is
# [staleness](../docs/glossary.md#staleness): the first stage's gradient is p − 1 updates late. What does that do in the
# simplest valley, $\frac{1}{2} w^2$, whose gradient is w? Here gradients are `late` updates old:


# %%
def late_descent(rate, late, updates):
    """w after each update, starting at 1; each update uses the gradient from `late` updates ago."""
    w = torch.ones(late + 1 + updates, dtype=torch.float64)
    for t in range(late, late + updates):
        w[t + 1] = w[t] - rate * w[t - late]
    return w[late:]


print("late  largest rate that settles   |w| after 2,000 updates: 2 % below it, 2 % above it")
for late in (0, 1, 3, 7):
    largest = 2 * torch.tensor(late * torch.pi / (2 * late + 1)).cos().item()
    below = late_descent(0.98 * largest, late, 2000)[-50:].abs().max()
    above = late_descent(1.02 * largest, late, 2000)[-50:].abs().max()
    print(f"{late:4d}  2·cos(d·π/(2d + 1)) = {largest:.2f} {below:31.0e} {above:14.0e}")

# %% [markdown]
# The later the gradient, the smaller the learning rate must be (formula: Levin and May 1976). This is one reason why
# large models are trained with synchronous schedules despite the bubble: their gradients equal those of one process.

# %% [markdown]
# ## Five questions

# %%
from course_utils.lessons import quiz

quiz(14)

# %% [markdown]
# ## In your own script
# A pipeline by torch. It runs alone, and with `torchrun --standalone --nproc-per-node 4 script.py` on four ranks.

# %%
import os

import torch
from torch import distributed as dist, nn
from torch.distributed import pipelining

cuda = torch.cuda.is_available()
alone = {} if "RANK" in os.environ else {"rank": 0, "world_size": 1, "store": dist.HashStore()}
dist.init_process_group("nccl" if cuda else "gloo", **alone)
rank, ranks = dist.get_rank(), dist.get_world_size()
device = torch.device(f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if cuda else "cpu")
layers = [nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(8)]
each = len(layers) // ranks
own = nn.Sequential(*layers[rank * each : (rank + 1) * each]).to(device)

# %%
stage = pipelining.PipelineStage(own, rank, ranks, device)
schedule = pipelining.Schedule1F1B(stage, n_microbatches=8, loss_fn=nn.functional.mse_loss)
optimizer = torch.optim.AdamW(own.parameters(), lr=1e-3)
x, target = torch.randn(2, 32, 64, device=device)  # let the first rank load x, the last the targets
last = {"target": target, "losses": []} if rank == ranks - 1 else {}
schedule.step(*([x] if rank == 0 else []), **last)
optimizer.step()
print(f"stage {rank} of {ranks} has stepped")
dist.destroy_process_group()

# %% [markdown]
# ## Take home
# **Remember** A pipeline waits (p − 1)/(m + p − 1) of the time. More micro-batches shrink that, and under 1F1B they
# take no more memory.
#
# **Breaks when** stages are unequal, when there are few micro-batches, or when gradients are late: then it trains
# something else.
#
# **Cheat-sheet line** bubble: 1F1B and GPipe (p − 1)/(m + p − 1), interleaved (p − 1)/(v·m + p − 1) · kept
# micro-batches: GPipe m, 1F1B p − stage, zero bubble p · PipeDream: p − stage weight versions, p − 1 − stage updates
# late · sends 2·s·b·h bytes per cut and direction.
#
# Now solve the [exercises of this lesson](../exercises/14_model_and_pipeline_parallelism.ipynb).
