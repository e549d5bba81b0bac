# ---
# jupyter:
#   course:
#     minutes: 75
#     cpu_seconds: 20
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 14 · Model and pipeline parallelism
#
# **75 minutes.** You should know what a training step keeps and when ([lesson 01](01_where_did_the_memory_go.ipynb)),
# and what a [micro-batch](../docs/glossary.md#micro-batch-and-global-batch) is. You need no GPU: CPU processes play the
# devices.
#
# Is a model too large for one device? Cut it: the first layers here, the next ones there. Only activations cross the
# cut, but devices wait for one another. How long? And what does waiting less cost in memory?

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
from course_utils.lessons.pipelines.figures import pipeline_figure
from course_utils.lessons.pipelines.schedules import simulate

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
from course_utils.lessons.pipelines.schedules import bubble, micro_batches_for

for p, m in ((2, 4), (4, 8), (4, 27), (8, 64), (16, 64)):  # change this
    gap = bubble(p, m) - simulate("GPipe", p, m).idle
    print(
        f"p = {p:2d}, m = {m:2d}: formula {bubble(p, m):6.2%}, formula − simulated {abs(gap):.2%}"
    )
enough = micro_batches_for(4, 0.10)
print(
    f"at most 10 % with 4 stages: m = {enough}. "
    f"GPipe's own rule, m = 4·p, leaves {bubble(4, 16):.0%}"
)
reveal("14.micro", enough, unit="micro-batches")

# %% [markdown]
# Add (8, 8), predict, run. There is no gap while stages are equally fast. If one is slower, all wait for it:

# %%
slow = simulate("GPipe", stages=4, micro_batches=8, slow={1: 1.5})
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
    print(
        f"{stage:5d}  {gpipe.most_kept(stage):11d}  {one_one.most_kept(stage):10d}  {4 - stage:9d}"
    )
print(f"idle: GPipe {gpipe.idle:.1%}, 1F1B {one_one.idle:.1%}")
reveal("14.kept", one_one.most_kept(0), unit="micro-batches")

# %% [markdown]
# The bubble is the same, but each stage, counted from 0, keeps at most p − stage micro-batches. Change 16 to 32,
# predict both, run. So m can grow until the bubble is small. Megatron-LM chose 1F1B over GPipe for that (section 2.2).
#
# In bytes: GPT-2 XL with 32 sequences, as 8 micro-batches of 4, on four devices.

# %% tags=["hide-input"]
from course_utils import TrainingRun, format_bytes, gpu, plus_minus
from course_utils.figures import stack
from course_utils.lessons.pipelines.memory import stage_memory

run = TrainingRun("gpt2-xl", micro_batch=4, seq_len=1024, precision="bf16-master")
rows = {}
for name in ("GPipe", "1F1B"):
    for stage in range(4):
        rows[f"{name}, stage {stage}"] = stage_memory(run, name, 4, 8, stage)
rows["one device"] = stage_memory(run, "1F1B", 1, 8, 0)
title = "1F1B keeps half of GPipe's activations on the first stage, an eighth on the last"
stack(rows, title, provenance="estimated: states and kept activations")

# %% [markdown]
# One device that cuts its batch in the same way needs 36.1 GB. Under 1F1B, the fullest of four needs half of that, not
# a quarter: only the states are divided by four. The first stage keeps p micro-batches, in 1/p of the layers: as much
# as one device keeps for one micro-batch. GPipe's fullest stage keeps all m, and saves little. The last stage also has
# the head, and the loss's s·b·V numbers per kept micro-batch. (Left out: temporaries of backward and the optimizer,
# message buffers, the CUDA context.)
#
# GPipe's authors knew. Their stages keep one input per micro-batch and
# [recompute](../docs/glossary.md#activation-recomputation) the rest in backward (section 2.3).

# %%
ways = {"none": "keeps everything", "every-12": "recomputes its 12 blocks"}
for name in ("GPipe", "1F1B"):
    for recompute, how in ways.items():
        kept = stage_memory(run.replace(recompute=recompute), name, 4, 8, 0)["activations"]
        size = format_bytes(kept, "GB", 1)
        print(f"{name:5s} the first stage {how:24s} {size:>7s} of activations")

# %% [markdown]
# With recomputation, the schedules hardly differ in memory: what is left is mostly one micro-batch of one stage. 1F1B
# halves the first stage's activations without a second forward.

# %% [markdown]
# ## No bubble at all?
# Other synchronous schedules shrink it further, and their gradients stay exact:
#
# - *Interleaved* 1F1B gives each device v short stretches of layers instead of one long one. The bubble becomes v times
#   shorter, for v times as many messages (Narayanan et al. 2021, section 2.2.2).
# - *Zero bubble* cuts each backward in two. The previous stage waits only for the input's gradient. The weights'
#   gradients can wait, and fill the gaps ([Qi et al. 2023](https://arxiv.org/abs/2401.10241)).
# - *DualPipe* feeds micro-batches from both ends of the pipeline, for a second copy of the weights, and computes while
#   its messages travel ([DeepSeek-AI 2024](https://arxiv.org/abs/2412.19437), section 3.2.1).
#
# `torch.distributed.pipelining` has `ScheduleInterleaved1F1B`, `ScheduleZBVZeroBubble`, and `ScheduleDualPipeV`, a
# variant of the third.
#
# Or why wait at the end of a batch at all? In PipeDream ([Narayanan et al.
# 2019](https://doi.org/10.1145/3341301.3359646)), micro-batches follow one another without end, and each stage
# updates its weights after each backward.
#
# But the weights change between a micro-batch's forward and its backward. With other weights, backward computes the
# gradient of nothing. So each stage keeps the *version* that a micro-batch has seen until it comes back: weight
# stashing (section 3.3).
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
print("stage  versions  updates late  kept weights")
for stage in range(4):
    memory = stage_memory(run, "PipeDream", 4, 8, stage)
    weights = format_bytes(memory["parameters"] + memory["weight_copies"], "GB", 1)
    print(f"{stage:5d}  {endless.versions(stage):8d}  {endless.late(stage):12d}  {weights:>12s}")
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

# %%
from course_utils.figures import lines

rate = 0.4  # change this
curves = {}
for late in (0, 1, 3):
    curves[f"{late} late"] = (list(range(41)), late_descent(rate, late, 40).tolist())
title = f"The later the gradient, the more w swings (learning rate {rate})"
source = "computed: w ← w − rate · w(d updates ago)"
lines(curves, title, "updates", "w", markers=False, provenance=source)

# %% [markdown]
# The later the gradient, the smaller the learning rate must be (formula: Levin and May 1976). Change the rate to 0.5:
# which curve no longer settles? This is one reason why large models are trained with synchronous schedules, such as
# 1F1B, despite the bubble: their gradients equal those of one process.

# %% [markdown]
# ## A stage of your own
# Now real processes, one per stage. A process's number is its [rank](../docs/glossary.md#rank). They send through
# [gloo](../docs/glossary.md#gloo), torch's library for CPUs (GPUs use NCCL). Each makes the same network of eight
# layers and takes its own:


# %%
def part(rank, ranks):
    """This rank's layers, and the complete batch, which is the same on every rank."""
    import torch
    from torch import nn

    torch.manual_seed(11)
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(8)))
    each = len(layers) // ranks
    data, target = torch.randn(2, 32, 16)
    return layers[rank * each : (rank + 1) * each], data, target


# %% [markdown]
# A forward receives, computes and sends. A backward does the same in the other direction. (Both pause in place of a
# GPU's computation, so that four stages can run at once on fewer cores.)


# %%
def forward(layers, x, rank, ranks, pause):
    import time
    import torch.distributed as dist

    if rank > 0:
        dist.recv(x, rank - 1)  # wait for the previous stage's output, and put it into x
    y = layers(x.requires_grad_())
    time.sleep(pause)
    sent = [dist.isend(y.detach(), rank + 1)] if rank < ranks - 1 else []
    return x, y, sent


# %%
def backward(x, y, rank, ranks, pause):
    import time
    import torch
    import torch.distributed as dist

    gradient = None  # the last stage's y is the loss
    if rank < ranks - 1:
        gradient = torch.empty_like(y)
        dist.recv(gradient, rank + 1)
    y.backward(gradient)
    time.sleep(2 * pause)
    return [dist.isend(x.grad, rank - 1)] if rank > 0 else []


# %% [markdown]
# `recv` waits for a message, but `isend` returns at once. (With a `send` that waits, two neighbors under 1F1B could
# wait for each other forever.) A schedule is only an order of forwards and backwards:


# %%
def do_works(order, layers, batches, targets, rank, ranks, pause):
    """Execute F0, F1, B0, … in order; return the loss and the most micro-batches kept at once."""
    from torch.nn.functional import mse_loss

    kept, messages = {}, []
    most, loss = 0, 0.0
    for work in order:
        kind, i = work[0], int(work[1:])
        if kind == "F":
            x, y, sent = forward(layers, batches[i], rank, ranks, pause)
            if rank == ranks - 1:
                y = mse_loss(y, targets[i]) / len(targets)
                loss += y.item()
            kept[i] = x, y
            most = max(most, len(kept))
        else:
            sent = backward(*kept.pop(i), rank, ranks, pause)
        messages += sent
    for message in messages:
        message.wait()
    return loss, most


# %%
def one_stage(schedules, pause):
    """A rank's step under each schedule: loss, gradient norm over all ranks, most kept, seconds."""
    import time
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    found = {}
    runs = {"warm-up": schedules["GPipe"], **schedules}  # first messages are slow
    for name, orders in runs.items():
        layers, data, target = part(rank, ranks)
        m = len(orders[rank]) // 2
        batches, targets = data.chunk(m), target.chunk(m)
        wait = 0.0 if name == "warm-up" else pause
        dist.barrier()  # all ranks start together
        start = time.monotonic()
        loss, most = do_works(orders[rank], layers, batches, targets, rank, ranks, wait)
        took = time.monotonic() - start
        square = torch.stack([weight.grad.square().sum() for weight in layers.parameters()]).sum()
        dist.all_reduce(square)
        found[name] = loss, square.sqrt().item(), most, took
    dist.destroy_process_group()
    return found


# %% [markdown]
# **Your guess.** Four stages, eight micro-batches, 50 ms forward and 100 ms backward each: how many milliseconds does
# the step take if nothing else takes time?

# %%
predict("14.time", unit="ms")

# %%
from course_utils.ranks.launch import run_ranks, why_no_ranks

p, m, pause = 4, 8, 0.05  # change this
schedules = {
    name: [simulate(name, p, m).order(stage) for stage in range(p)] for name in ("GPipe", "1F1B")
}
ranks = [] if why_no_ranks() else run_ranks(one_stage, p, schedules=schedules, pause=pause)
print(why_no_ranks() or f"{len(ranks)} processes have trained one step under each schedule")
print("what the second stage does under 1F1B:", *schedules["1F1B"][1])
reveal("14.time", simulate("GPipe", 4, 8).span * 50, unit="ms")

# %% [markdown]
# Is the result that of one process with all layers and the complete batch? Do the stages keep what the simulator says?

# %%
layers, data, target = part(0, 1)
loss = nn.functional.mse_loss(layers(data), target)
loss.backward()
norm = torch.stack([weight.grad.norm() for weight in layers.parameters()]).norm()
print(f"one process: loss {loss.item():.5f}, norm of all gradients {norm.item():.5f}")
trained = schedules if ranks else ()
for name in trained:
    losses, norms, most, _ = zip(*(rank[name] for rank in ranks), strict=True)
    simulated = [simulate(name, p, m).most_kept(stage) for stage in range(p)]
    print(
        f"{name:5s}        loss {losses[-1]:.5f}, norm of all gradients {norms[0]:.5f}; "
        f"micro-batches kept {list(most)}, simulated {simulated}"
    )

# %% [markdown]
# A synchronous pipeline approximates nothing. Its times vary with your machine:

# %% tags=["nbval-ignore-output"]
for name in trained:
    took = max(rank[name][3] for rank in ranks)
    formula = (m + p - 1) * 3 * pause
    print(
        f"{name:5s} formula (m + p − 1)·3·pause = {1e3 * formula:.0f} ms, "
        f"measured {1e3 * took:.0f} ms, the gap {plus_minus(1e3 * (formula - took))} ms"
    )

# %% [markdown]
# The gap: sending takes time, and processes wake up late, more so on a busy machine. Both schedules have the same
# formula, so a difference between their times is mostly chance. (A first step of their own, without a pause, came
# before: it connects the processes.) On GPUs, messages take time, too: they have 2·s·b·h bytes. And stages are never
# quite equal. Change m to 16, predict loss, kept and time, and run from that cell.

# %% [markdown]
# ## torch's own schedules
# `torch.distributed.pipelining` provides forwards, backwards, order and messages for a stage's layers and a loss:


# %%
def torchs_stage(m):
    import torch
    import torch.distributed as dist
    from torch.distributed import pipelining
    from torch.nn.functional import mse_loss

    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    found = {}
    for schedule in (pipelining.ScheduleGPipe, pipelining.Schedule1F1B):
        layers, data, target = part(rank, ranks)
        stage = pipelining.PipelineStage(layers, rank, ranks, torch.device("cpu"))
        plan = schedule(stage, m, loss_fn=mse_loss)
        losses = []
        if rank == 0:
            plan.step(data)  # the first stage gets the batch, the last the targets
        else:
            plan.step(target=target, losses=losses)
        found[schedule.__name__] = [loss.item() for loss in losses]
    dist.destroy_process_group()
    return found


# %%
m = 8  # change this
last_stage = {} if why_no_ranks() else run_ranks(torchs_stage, 2, m=m)[-1]
for name, losses in last_stage.items():
    print(
        f"{name}, two processes: {len(losses)} losses, their mean {sum(losses) / len(losses):.5f}"
    )

# %% [markdown]
# Two stages of four layers give the same loss. Change m to 4: how many losses, and which mean?

# %% [markdown]
# ## Cut every matrix: tensor parallelism
# In [tensor parallelism](../docs/glossary.md#tensor-parallelism), each of t ranks has a part of *every* matrix. The
# MLP's first matrix is cut by its outputs (*column-parallel*), the second by its inputs (*row-parallel*). Nothing is
# sent between the two. After them, each rank has a part of a sum, so one
# [all-reduce](../docs/glossary.md#all-reduce) follows. By hand, then with torch's `parallelize_module`:


# %%
def parallel_mlp(h):
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.tensor import parallel

    dist.init_process_group("gloo")
    rank, t = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(11)
    x = torch.randn(8, h)
    mlp = nn.Sequential(nn.Linear(h, 4 * h, bias=False), nn.GELU(), nn.Linear(4 * h, h, bias=False))
    up = mlp[0].weight.chunk(t, dim=0)[rank]
    down = mlp[2].weight.chunk(t, dim=1)[rank]
    hidden = nn.functional.gelu(x @ up.T)  # 4h/t columns: the other ranks have the rest
    y = (hidden @ down.T).detach()  # a part of the sum
    dist.all_reduce(y)
    whole = mlp(x)
    plan = {"0": parallel.ColwiseParallel(), "2": parallel.RowwiseParallel()}
    parallel.parallelize_module(mlp, dist.init_device_mesh("cpu", (t,)), plan)
    found = [hidden.nbytes, *(outcome.norm().item() for outcome in (whole, y, mlp(x)))]
    dist.destroy_process_group()
    return found


# %%
t = 2  # change this
bytes_kept, *norms = [0] if why_no_ranks() else run_ranks(parallel_mlp, t, h=64)[0]
print(
    f"t = {t}: each rank keeps {bytes_kept:,} bytes between the matrices, "
    f"8 · 4 · 64 · 4 / t = {8192 // t:,}"
)
for name, norm in zip(("complete MLP", "cut by hand", "cut by torch"), norms, strict=False):
    print(f"{name:13s} norm of the output {norm:.4f}")

# %% [markdown]
# Change t to 4: predict the bytes. Weights, and activations between the matrices, are divided by t. Norms, their
# dropout, and the inputs of attention and MLP stay complete on every rank. *[Sequence
# parallelism](../docs/glossary.md#sequence-parallelism)* cuts those along the sequence.
#
# **Your guess.** GPT-3, one sequence, [eager attention](../docs/glossary.md#eager-attention). By what factor does
# tensor parallelism of 8 reduce what all blocks keep (total below)?

# %%
from course_utils import estimate
from course_utils.estimating.megatron import activation_bytes

gpt3 = TrainingRun("gpt3-175b", 1, 2048, "bf16-master", attention="eager")
print(f"one GPU: {format_bytes(activation_bytes(gpt3), 'GB', 0)}")
predict("14.tensor", unit="times")

# %% [markdown]
# | bytes per block, in units of s·b·h ([Korthikanti et al. 2022](https://arxiv.org/abs/2205.05198), table 2) | |
# |---|---|
# | one GPU | 34 + 5·a·s/h |
# | tensor parallel | 10 + 24/t + 5·a·s/(h·t) |
# | and sequence parallel | (34 + 5·a·s/h) / t |

# %%
s, h, a = 2048, gpt3.model.hidden, gpt3.model.heads
for t in (2, 4, 8, 16):
    formula = (10 + 24 / t + 5 * a * s / (h * t)) * s * h * gpt3.model.layers
    counted = activation_bytes(gpt3.replace(tensor_parallel=t))
    factor = activation_bytes(gpt3) / counted
    print(
        f"t = {t:2d}: {format_bytes(counted, 'GB', 1):>8s}, formula − code: "
        f"{plus_minus(formula - counted)} bytes; "
        f"{factor:.1f} times less, {t} with sequence parallelism; "
        f"each rank sends {4 * 2 * (t - 1) / t:.1f}·s·b·h numbers per block"
    )
with_8 = activation_bytes(gpt3.replace(tensor_parallel=8))
reveal("14.tensor", activation_bytes(gpt3) / with_8, unit="times")
one_of_8 = estimate(gpt3.replace(tensor_parallel=8))
print(f"one of 8 ranks, whole step: estimated peak {format_bytes(one_of_8.total, 'GB', 0)}")

# %% [markdown]
# The factor stays below t because the 10 is not divided. Messages differ, too: ZeRO sends weights, the same bytes for
# any number of tokens. Tensor parallelism sends activations, and waits for them: per block four all-reduces of s·b·h
# numbers, two forward and two backward. In a ring, each rank sends 2(t − 1)/t times that ([lesson
# 10](10_data_parallelism.ipynb)), so 8(t − 1)/t · s·b·h numbers per block (printed for each t). So it stays within a
# machine, where links are fast. The last line is `estimate`'s closed form for one rank: states and the loss, too.
# No simulated step checks it.

# %% [markdown]
# ## Which parallelism, when?
# Many GPUs can be [replicas](../docs/glossary.md#replica), use [ZeRO](../docs/glossary.md#zero), cut every matrix, or
# cut between layers. The costs depend on model and cluster, so compute them: Llama-3 70B, 4,096 tokens, 512 sequences
# per step, on 8 nodes of 8 H100s. Within a node, GPUs talk over [NVLink](../docs/glossary.md#nvlink) at 450 GB/s.
# Between nodes, each GPU has 50 GB/s (400 Gb/s). These are [data-sheet rates](../docs/glossary.md#data-sheet-rate),
# which no program reaches.
#
# **Your guess.** Take the best plan that fits. How many percent longer than its arithmetic alone does a step take, if
# stages wait, and messages and arithmetic take turns?

# %%
predict("14.plan", unit="%")

# %%
from course_utils.lessons.pipelines.cluster_plans import Cluster, cheapest

waits_for("14.plan")
llama = TrainingRun(
    "llama3-70b", micro_batch=1, seq_len=4096, precision="bf16-master", recompute="full"
)
cluster = Cluster(gpu("H100-80GB"), nodes=8, per_node=8, network=50e9)  # change this
wanted = {
    "only ZeRO-1": lambda plan: plan.tensor == plan.pipeline == 1 and plan.stage == 1,
    "only ZeRO-3": lambda plan: plan.tensor == plan.pipeline == 1 and plan.stage == 3,
    "tensor and data": lambda plan: plan.tensor > 1 and plan.pipeline == 1 and plan.stage < 3,
    "tensor and pipeline": lambda plan: plan.tensor > 1 and plan.pipeline > 1 and plan.stage == 0,
    "pipeline and data": lambda plan: plan.tensor == 1 and plan.pipeline > 1,
}
print(
    f"{'':20s} {'best that fits':38s} {'GB':>5s} {'idle':>5s} "
    f"{'messages':>9s} {'in turn':>8s} {'hidden':>7s}"
)
for name, allowed in wanted.items():
    best = cheapest(llama, cluster, 512, allowed)
    if best is None:
        print(f"{name:20s} none")
        continue
    plan = f"{best.plan}, b = {best.micro_batch}"
    print(
        f"{name:20s} {plan:38s} {best.memory / 1e9:5.1f} {best.idle:5.0%} "
        f"{best.messages:8.1f}s {best.total:7.1f}s {best.overlapped:6.1f}s"
    )

# %%
in_turn = cheapest(llama, cluster, 512, lambda plan: True)
hidden = cheapest(llama, cluster, 512, lambda plan: True, overlapped=True)
for words, best in (("no message hides", in_turn), ("all hide that can", hidden)):
    plan = f"{best.plan}, b = {best.micro_batch}" if best else "nothing fits"
    print(f"fastest if {words}: {plan}")
if in_turn:
    reveal("14.plan", 100 * (in_turn.total / in_turn.seconds["compute"] - 1), unit="%")

# %% [markdown]
# Two columns, two rankings. *In turn* adds up arithmetic, bubble and messages. *Hidden* is the best case: messages
# travel during the arithmetic, and only the rest counts. ZeRO-3 goes from last to first. It sends most, but all of it
# can hide: while one block computes, the next is gathered. Tensor parallelism's messages cannot hide, because the next
# product needs their sum. Nor can a bubble: a waiting stage has nothing to compute.
#
# | | cuts | sends | can it hide? | choose it when |
# |---|---|---|---|---|
# | replicas | nothing | gradients, once per step | behind the last backward | everything fits on one GPU |
# | ZeRO-2 | optimizer states, gradients | gradients, once per micro-batch | yes | weights fit on one GPU |
# | ZeRO-3, FSDP | also weights | weights twice and gradients once, per micro-batch | yes | micro-batches are large |
# | tensor | each matrix, activations | 4 all-reduces of activations per block, 6 if recomputed | no | within a node |
# | pipeline | layers | activations and their gradients, once per cut | yes, the bubble not | links are slow; m ≫ p |
#
# Change the network to `5e9`, predict the fastest plan, and run both cells. Then try `gpu("A100-80GB")`, or `nodes=4`.
#
# How far from data-sheet rates is a real training? Llama 3.1 70B saw about 15 trillion tokens in 7.0 million H100 hours
# ([Meta's model card](https://github.com/meta-llama/llama-models/blob/main/models/llama3_1/MODEL_CARD.md)). MFU is
# model [FLOPs](../docs/glossary.md#flops) utilization ([Chowdhery et al. 2022](https://arxiv.org/abs/2204.02311),
# section 4.1, here without attention's own products):
#
# $$\text{MFU} = \frac{6 N \cdot \text{tokens}}{\text{GPU seconds} \cdot \text{data-sheet rate}}$$

# %%
gpu_seconds, rate = 7.0e6 * 3600, gpu("H100-80GB").rates.tensor
print(
    f"MFU {6 * llama.model.parameters * 15e12 / (gpu_seconds * rate):.0%}; "
    f"a step like ours on 64 such GPUs takes {gpu_seconds / 15e12 * 512 * 4096 / 64:.0f} s"
)

# %% [markdown]
# That step is longer than any in the table: no kernel reaches the data-sheet rate, sequences grew longer late in that
# training, and the hours include failures. So rank plans by the table's seconds, but promise nothing.

# %% [markdown]
# ## Five questions

# %%
from course_utils.lessons import quiz

quiz(14)

# %% [markdown]
# ## In your own script
# Cut a model over two GPUs and train it as before: each keeps the weights, gradients, states and activations of its own
# layers.

# %%
import torch
from torch import nn


class CutInTwo(nn.Module):
    def __init__(self, first, last, devices):
        super().__init__()
        self.first, self.last = first.to(devices[0]), last.to(devices[1])
        self.devices = devices

    def forward(self, x):
        return self.last(self.first(x.to(self.devices[0])).to(self.devices[1]))


devices = ("cuda:0", "cuda:1") if torch.cuda.device_count() > 1 else ("cpu", "cpu")
model = CutInTwo(nn.Linear(64, 256), nn.Linear(256, 8), devices)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
# targets, if there are any, belong on the last device
loss = model(torch.randn(32, 64)).square().mean()
loss.backward()
optimizer.step()
print([f"{weight.shape} on {weight.device}" for weight in model.parameters()])

# %% [markdown]
# ## Take home
# **Remember** A pipeline waits (p − 1)/(m + p − 1) of the time. More micro-batches shrink that, and under 1F1B they
# take no more memory.
#
# **Breaks when** stages are unequal, when there are few micro-batches, or when gradients are late: then it trains
# something else.
#
# **Cheat-sheet line** bubble (p − 1)/(m + p − 1) · kept micro-batches: GPipe m, 1F1B p − stage · PipeDream: p − stage
# weight versions, p − 1 − stage updates late · sends 2·s·b·h bytes per cut and direction · tensor parallel activations:
# (10 + 24/t + 5as/ht)·sbh, with sequence parallelism (34 + 5as/h)·sbh/t · tensor parallel messages: each rank sends
# 16·s·b·h·(t − 1)/t bytes per block.
#
# Now solve the [exercises of this lesson](../exercises/14_model_and_pipeline_parallelism.ipynb).
