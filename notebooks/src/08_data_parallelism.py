# ---
# jupyter:
#   course:
#     minutes: 75
#     budget_seconds: 90
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 08 · Data parallelism
#
# **75 minutes.** You should know what a training step keeps ([lesson 01](01_where_did_the_memory_go.ipynb)) and what a
# micro-batch is. No GPU is needed: the processes of this lesson run on your processor, and they really talk to each
# other. (One experiment uses two GPUs if your machine has them.) The processes need Linux or macOS; on Windows, open
# the course in WSL2, or read the stored outputs.
#
# The simplest way to use many GPUs: each computes on a part of the batch of its own. That is data parallelism. Two
# questions follow. What does each GPU keep in memory? And what do they have to send one another?

# %% [markdown]
# ## What each rank holds
# Each process is called a [rank](../docs/glossary.md#rank), and D is the number of ranks. Every rank runs forward and
# backward on its own sequences, through all layers.
#
# **Your guess.** GPT-2 XL with Adam under [autocast](../docs/glossary.md#autocast) has 16 bytes of states per
# parameter: the line below says how much that is. With plain data parallelism on 8 ranks, how many GB of states does
# each one hold?

# %%
from course_utils import TrainingRun, estimate, format_bytes
from course_utils.estimating.sharding import rank_0_states
from course_utils.interactive.guesses import predict, reveal

xl = TrainingRun("gpt2-xl", micro_batch=4, seq_len=1024, precision="amp-bf16", recompute="full")
alone = sum(rank_0_states(xl).values())
print(f"one GPU alone: {format_bytes(alone, 'GB', 1)} of weights, gradients and optimizer states")
predict("08.states")

# %%
states = rank_0_states(xl.replace(world_size=8))
print({kind: format_bytes(size, "GB", 1) for kind, size in states.items()})
reveal("08.states", sum(states.values()))

# %% [markdown]
# Not a byte less. Each rank holds a [replica](../docs/glossary.md#replica) of the model: all weights, gradients and
# optimizer states. What the ranks share is the *batch*.

# %%
shared = xl.replace(world_size=8, accumulation_steps=2)
b, k, D = shared.micro_batch, shared.accumulation_steps, shared.world_size
print(f"{b} · {k} · {D} = {shared.global_batch} sequences per step, {shared.global_batch * shared.seq_len:,} tokens")

# %% [markdown]
# The global batch is **b · k · D**: micro-batch, accumulation steps, ranks. So another rank makes the batch larger,
# unless you cut b or k. Larger means that lesson 07's learning rates and critical batch come in. Cutting b saves
# activations, but one GPU could have taken the batch bit by bit, too. What does not fit one GPU with a single sequence
# does not fit a thousand. (To keep nothing twice is the next lesson.)

# %% [markdown]
# ## The mean of three gradients is the gradient of all
# The loss of a batch is the mean over its sequences. So is its gradient. Cut the batch into three equal parts and
# compute G1, G2 and G3: then (G1 + G2 + G3)/3 is the gradient of the whole batch. First as a loop, in one process.

# %%
import torch

from course_utils.lessons.data_parallelism.replicas import gradients, network, share, whole_batch

batch = whole_batch()
parts = [gradients(network(), share(batch, rank, ranks=3)) for rank in range(3)]
whole = gradients(network(), batch)
print(f"{len(whole)} numbers; the mean is that of the whole batch:", torch.allclose(sum(parts) / 3, whole, atol=1e-6))
print("and G1 alone is:", torch.allclose(parts[0], whole, atol=1e-6))

# %% [markdown]
# Now for real: three processes, which know nothing but their own third. `run_ranks` sends them the text of a function,
# starts them with `torchrun`, and returns what each one returned. Nothing else of this notebook reaches them, so the
# function imports what it needs.


# %%
def on_each_rank():
    """What each of the processes runs: its own gradient, the sum of all, and three short trainings."""
    import torch.distributed as dist

    from course_utils.lessons.data_parallelism.replicas import SHARING, gradients, network, share, train, whole_batch

    dist.init_process_group("gloo")
    mine = share(whole_batch(), dist.get_rank(), dist.get_world_size())
    gradient = gradients(network(), mine)
    own = gradient.tolist()
    dist.all_reduce(gradient)  # from here on: the sum over all ranks, on every rank
    apart = {name: train(network(), mine, is_shared) for name, is_shared in SHARING.items()}
    dist.destroy_process_group()
    return {"own": own, "sum": gradient.tolist(), "apart": apart}


# %%
from course_utils.ranks.launch import run_ranks

ranks = run_ranks(on_each_rank, world_size=3)
own, sums = ([torch.tensor(rank[name]) for rank in ranks] for name in ("own", "sum"))
off = (sums[0] / 3 - whole).abs().max() / whole.abs().max()
print("each rank's own gradient is that of the loop:", all(map(torch.allclose, own, parts)))
print("all ranks have the same sum, bit by bit:", all(torch.equal(sums[0], other) for other in sums))
print("gap of its third to the whole batch's gradient, relative, below one in a million:", bool(off < 1e-6))

# %% [markdown]
# **The gap** is rounding: sums in another order. It is also why a run on 3 GPUs does not repeat a run on 1 bit by bit.

# %% [markdown]
# ## Equal, or drifting apart
# Replicas start equal and see the same averaged gradient, so they take the same step and stay equal. Nobody compares
# them, and nobody sends weights after the start. What if one gradient is forgotten? The three processes above also
# trained: once sharing all gradients, once none, and once all but those of the last bias, 4 numbers out of 676.
#
# **Your guess.** After 30 steps: the largest difference between any two replicas with the bias left out, in percent of
# that with nothing shared at all?

# %%
predict("08.drift", unit="%")

# %% tags=["nbval-ignore-output"]
from course_utils.figures import lines

apart = ranks[0]["apart"]
steps = list(range(1, len(apart["no gradient"]) + 1))
lines(
    {f"shared: {name}": (steps, values) for name, values in apart.items()},
    "One forgotten bias, and the replicas run away from each other",
    "step", "largest difference of a weight", markers=False,
    provenance="measured: 3 processes on this machine's CPU (gloo)",
)  # fmt: skip

# %%
left_out, nothing = apart["all but 2.bias"][-1], apart["no gradient"][-1]
print("largest difference with all gradients shared:", apart["all gradients"][-1])
reveal("08.drift", round(100 * left_out / nothing, -1), unit="%")

# %% [markdown]
# Exactly zero, or a drift that does not stop. One forgotten bias is even worse than sharing nothing: three independent
# trainings at least each find a minimum, but here each rank's bias chases its own data, while the other weights, which
# all share, answer to the mean. Such a run still learns *something*, and its loss looks like a loss. That is what
# makes the mistake expensive.

# %% [markdown]
# ## A server in the middle
# How does the mean come about? The oldest way is a [parameter server](../docs/glossary.md#parameter-server) ([Li et
# al. 2014](https://www.usenix.org/conference/osdi14/technical-sessions/presentation/li_mu)), in four steps.

# %%
from course_utils.lessons.data_parallelism.figures import server_figure

server_figure(workers=3)

# %% [markdown]
# Optimizer states sit on the server alone: the workers keep none. But all traffic passes through it: with D workers, D
# gradients come in and D sets of weights go out, S bytes each.
#
# ## Everybody sends to everybody
# Without a server, each rank could send its whole gradient to each other rank: D−1 times S bytes from every rank. The
# operation that leaves the sum on every rank is called [all-reduce](../docs/glossary.md#all-reduce), and this is its
# naive form.
#
# ## A ring
# Better: cut S into D parts, and let every rank talk to its right neighbor alone ([Patarasuk and Yuan
# 2009](https://doi.org/10.1016/j.jpdc.2008.09.002)). In D−1 steps the parts travel around, and everybody adds its own
# numbers to what comes by. Then each rank has one part that is complete, and in D−1 further steps the complete parts
# travel around once more. This is all of it, with nothing but send and receive:

# %%
import inspect

from course_utils.lessons.data_parallelism.collectives import ring_all_reduce

print(inspect.getsource(ring_all_reduce))

# %% [markdown]
# **Your guess.** Four ranks add up 480 KB each. How many KB does each rank send in this ring?

# %%
predict("08.ring", unit="KB")

# %% [markdown]
# The closed form: 2(D−1) steps, S/D bytes in each. Four real processes now add up the same numbers in all three ways,
# and count what they hand to `isend`.

# %%
from course_utils.estimating.sharding import all_reduce_bytes

found = run_ranks("course_utils.lessons.data_parallelism.collectives", world_size=4)
S, D = found[0]["size"], len(found)
formula = {"server": (D - 1) * S, "naive": (D - 1) * S, "ring": 2 * (D - 1) * S // D}
for way, expected in formula.items():
    busiest = max(rank[way]["sent"] for rank in found)
    equal = all(rank[way]["equal"] for rank in found)
    print(f"{way:7s} equal to torch's all_reduce: {equal}; busiest rank sent {busiest:,} bytes, "
          f"formula − counted {expected - busiest:+,}")  # fmt: skip

# %%
print(f"the ring by the engine's formula: {all_reduce_bytes(S, D):,} bytes, {all_reduce_bytes(S, D) / S:g} times S")
reveal("08.ring", found[0]["ring"]["sent"], unit="KB")

# %% [markdown]
# **The gap** is none: 2(D−1)/D · S. (Here the server is one of the four ranks, so it sends to D−1.) Now watch the ring
# that these processes ran, with one number for each part.

# %%
from course_utils.lessons.data_parallelism.widget import ring_player

ring_player(found, step=3)

# %% [markdown]
# The larger D, the clearer the difference. With a server, or naively, the busiest rank sends more with every rank; in
# the ring it stays below 2·S.

# %%
Ds = [2, 4, 8, 16, 32, 64]
GB = xl.model.parameters * 4 / 1e9
lines(
    {"server, naive": (Ds, [(D - 1) * GB for D in Ds]),
     "ring": (Ds, [all_reduce_bytes(4 * xl.model.parameters, D) / 1e9 for D in Ds])},
    f"GPT-2 XL in fp32, {GB:.1f} GB of gradients: the ring sends twice that at most, however many ranks",
    "ranks D", "GB sent by the busiest rank, in each step", log_x=True, log_y=True, provenance="closed forms",
)  # fmt: skip

# %% [markdown]
# No exchange among ranks can do it with less than 2(D−1)/D · S: the ring is optimal in bytes. In *messages* it is not.
# It sends 2(D−1) one after the other, and each has to be started. Keep that for the end.

# %% [markdown]
# ## Buckets
# In PyTorch you write `DistributedDataParallel(model)`, DDP for short ([Li et al.
# 2020](https://arxiv.org/abs/2006.15704)). It sends rank 0's weights to all at the start, and in each backward it
# all-reduces the gradients. Not one by one, since each message has to be started, but in
# [buckets](../docs/glossary.md#bucket) of about 25 MiB: gradients are copied into one flat buffer, reduced, copied
# back.
#
# **Your guess.** GPT-2 XL again, fp32 gradients, all other things as before. How many GB do the buckets take on each
# rank?

# %%
predict("08.buckets")

# %% [markdown]
# The estimate is easy: each gradient is in one bucket, and buckets stay. So it is the gradients once more. Whether
# that is true, two real processes can say. A small GPT, DDP around it, and every allocation of rank 0 traced:

# %%
from course_utils import measure

small = TrainingRun("tiny-gpt", micro_batch=2, seq_len=64, precision="fp32", attention="eager", world_size=2)
runs = {"buckets": small, "gradients as views": small.replace(bucket_view=True)}
measured = {name: measure(run, source="cpu") for name, run in runs.items()}
for name in runs:
    at_end = measured[name].moments["end of backward"]
    shown = {kind: format_bytes(at_end[kind], "MB", 2) for kind in ("parameters", "gradients", "communication")}
    print(f"{name:20s} {shown}")

# %% [markdown]
# So it is: as much `communication` as there are gradients. With `gradient_as_bucket_view=True` each `.grad` is a
# window into a bucket instead of a tensor of its own, and the bytes are there once.

# %%
from course_utils.figures import stack

columns = {"one GPU": xl, "DDP, 8 GPUs": xl.replace(world_size=8),
           "DDP, gradients as views": xl.replace(world_size=8, bucket_view=True)}  # fmt: skip
at_peak = {name: estimate(run) for name, run in columns.items()}
stack(at_peak, "DDP costs the gradients once more, unless they are views of its buckets",
      provenance="GPT-2 XL, b = 4, full recomputation, autocast; estimated")  # fmt: skip

# %%
kept = at_peak["DDP, 8 GPUs"]["communication"]
print(f"buckets: {format_bytes(kept, 'GB', 2)}; gradients: {format_bytes(states['gradients'], 'GB', 2)}")
for name, run in runs.items():
    gap = {kind: estimate(run)[kind] - measured[name].breakdown[kind] for kind in ("gradients", "communication")}
    print(f"{name:20s} at the peak, estimate − measured: {gap} bytes")
reveal("08.buckets", kept)

# %% [markdown]
# This is one of the places where [ZeRO](../docs/glossary.md#zero)'s "flat fp32 buffer", 6 GB for 1.5 billion
# parameters, comes from. It is no law: it is a default, and one word switches it off.

# %% [markdown]
# ## Overlap
# Buckets have a second use. Backward computes the last layers' gradients first. Their bucket can leave while backward
# is still at work on the others. DDP lets you see this: a communication hook is called when a bucket is ready, and
# what it returns says when the mean is there.
#
# **Your guess.** Twelve equal layers, six buckets of equal size. What part of all transfer time can hide behind
# backward, at best? Count it in percent.

# %%
predict("08.overlap", unit="%")

# %% [markdown]
# At best five of six buckets travel while backward still computes; the last one is ready only when backward is
# through. That makes 5/6. Now two processes train under DDP and note real times: with six buckets, with a single one,
# and without any exchange. Each takes a GPU of its own if torch finds two. On a machine with one GPU, or none, both
# run on the processor: NCCL refuses two ranks on one GPU.

# %%
trained = run_ranks("course_utils.lessons.data_parallelism.ddp_training", world_size=2)
step = trained[0]["many"]
sizes = {bucket["size"] for bucket in step["buckets"]}
early = [bucket for bucket in step["buckets"] if bucket["ready"] < step["buckets"][-1]["ready"]]
print(f"{len(step['buckets'])} buckets of {sizes} bytes, {trained[0]['gradients']:,} bytes of gradients in all")
print(f"{len(early)} of them were handed over before backward had computed its last gradient")
print(trained[0]["where"])
reveal("08.overlap", 100 * len(early) / len(step["buckets"]), unit="%")

# %% tags=["nbval-ignore-output"]
from course_utils.lessons.data_parallelism.figures import hidden_part, overlap_figure

hidden = {name: 100 * hidden_part(trained[0][name]) for name in ("many", "one")}
overlap_figure(
    {"six buckets": trained[0]["many"], "one bucket": trained[0]["one"], "no exchange": trained[0]["none"]},
    f"With six buckets {hidden['many']:.0f} % of the exchange hides behind backward, with one {hidden['one']:.0f} %",
    f"measured: rank 0 of {trained[0]['where']}",
)

# %% [markdown]
# Compare the ends of the three steps. Hidden is not free here: on a CPU, the exchange needs the same cores as backward
# does, and so backward itself takes longer. On GPUs it takes some of their multiprocessors and of their memory's
# bandwidth; the effect is of the same kind. The picture's percentage is of time, not of bytes. It is above 5/6 where
# the last bucket, with the cores to itself, travels faster than the others. It is below where a bucket waits for the
# one before, or a rank for the slower one.

# %% [markdown]
# ## Do not sync what you accumulate
# Lesson 07 cut a batch into [micro-batches](../docs/glossary.md#micro-batch-and-global-batch) and added up their
# gradients. DDP knows nothing of that.
#
# **Your guess.** Four micro-batches per step, with DDP as it comes. How many times as many bytes as necessary does a
# rank exchange?

# %%
predict("08.no_sync", unit="times")

# %% [markdown]
# Each backward all-reduces, though only the sum of all is needed. `model.no_sync()` leaves the gradients on the rank:
#
# ```python
# for i, (x, y) in enumerate(micro_batches):
#     last = i == len(micro_batches) - 1
#     with nullcontext() if last else model.no_sync():
#         loss = loss_of(model(x), y) / len(micro_batches)  # forward belongs inside, too
#         loss.backward()
# optimizer.step()
# ```

# %%
sent, equal = trained[0]["sent"], trained[0]["equal"]
for name, size in sent.items():
    print(f"{name:17s} {format_bytes(size, 'MB', 1)} handed over to be reduced")
print("the same gradients in the end:", equal)
reveal("08.no_sync", sent["each micro-batch"] / sent["no_sync"], unit="times")

# %% [markdown]
# The gradients agree, as a mean of sums is the sum of means. But look at gradients that are views of buckets. After a
# step `zero_grad()` sets every `.grad` to None, and so it lets go of the view. The next backward under `no_sync` makes
# a new tensor next to the bucket, and what the views saved is gone until the last micro-batch.
# `zero_grad(set_to_none=False)` writes zeros into the view instead, and gradients then add up *in* the bucket. Here is
# where the two processes found them, and what the estimate says for GPT-2 XL:

# %%
for choice, size in trained[0]["outside"].items():
    outside = format_bytes(size, "MB", 1)
    print(f"{choice:17s} {outside} of {format_bytes(trained[0]['gradients'], 'MB', 1)} lie outside of the buckets")
views = xl.replace(world_size=8, bucket_view=True)
for count, to_none in ((1, True), (2, True), (2, False)):
    peak = estimate(views.replace(accumulation_steps=count, set_to_none=to_none))
    total, held = (format_bytes(size, "GB", 1) for size in (peak.total, peak["gradients"]))
    print(f"micro-batches {count}, set_to_none={to_none!s:5}: {total} at the peak ({peak.label}), gradients {held}")

# %% [markdown]
# So with views *and* accumulation, clear with `set_to_none=False`. It costs no memory here, because the buckets stay
# anyway.

# %% [markdown]
# ## DataParallel and DistributedDataParallel
# PyTorch has another class with a similar name. `DataParallel` is one process that drives all GPUs of one machine. It
# looks simpler, and its own documentation advises against it. Why? Point by point:
#
# | | `DataParallel` | `DistributedDataParallel` |
# |---|---|---|
# | processes | one, with a thread for each GPU | one for each GPU |
# | Python's lock (GIL) | shared by all threads | each process has its own |
# | machines | one | one or many |
# | weights are copied | in **each forward**, from the first GPU | once, at the start |
# | gradients | added up on the first GPU | all-reduced |
# | outputs | gathered on the first GPU | stay where they are |
# | optimizer | steps once, on the first GPU | steps on every rank, on equal gradients |
#
# It needs two GPUs to run. But its forward is Python, and calls four helpers; give it helpers that copy on the CPU,
# and you can count.
#
# **Your guess.** A network with 12.6 MB of weights, 4 devices, 10 training steps. How many MB of weights are copied?

# %%
predict("08.replicate", unit="MB")

# %%
from course_utils.lessons.data_parallelism.data_parallel_module import WatchedDataParallel

layers = [torch.nn.Linear(512, 512) for _ in range(12)]
model = WatchedDataParallel(torch.nn.Sequential(*layers), devices=4)
for _ in range(10):
    model(torch.randn(64, 512)).mean().backward()
weights = sum(weight.nbytes for weight in model.module.parameters())
print(f"called: {dict(model.calls)}")
print(f"from the first device: {format_bytes(model.bytes['replicate'], 'MB', 1)} of weights; formula − counted "
      f"{10 * 3 * weights - model.bytes['replicate']:+,} bytes")  # fmt: skip
reveal("08.replicate", model.bytes["replicate"], unit="MB")

# %% [markdown]
# (D−1) times the weights, in every forward, all from one device; DDP sends them once. Hugging Face's `Accelerate` is no
# third way. Started as several processes, its `prepare(model)` returns the model in a `DistributedDataParallel`, unless
# you configure something else (see its
# [accelerator.py](https://github.com/huggingface/accelerate/blob/main/src/accelerate/accelerator.py)). Its `accumulate`
# uses `no_sync`.
#
# The other difference is the lock. What runs between kernels is Python, and of the threads in one process only one runs
# Python at a time:

# %% tags=["nbval-ignore-output"]
from course_utils.lessons.data_parallelism.data_parallel_module import in_processes, in_threads
from course_utils.figures import bars

seconds = {"1 thread": in_threads(1), "2 threads": in_threads(2),
           "1 process": in_processes(1), "2 processes": in_processes(2)}  # fmt: skip
threads, processes = seconds["2 threads"] / seconds["1 thread"], seconds["2 processes"] / seconds["1 process"]
bars({name: 1000 * value for name, value in seconds.items()},
     f"Two threads need {threads:.1f} times as long as one; two processes {processes:.1f} times", unit="ms",
     provenance="measured: each thread or process runs the same loop, best of 15, on this machine's CPU")  # fmt: skip

# %% [markdown]
# More cores help the processes, never the threads. (If your two processes are no faster than the threads, your cores
# were busy with something else: run the cell again.) What cannot be shown here: how long the copies take between real
# GPUs, and how much more memory the first one needs. That takes two GPUs.

# %% [markdown]
# ## How far does it scale?
# A message costs α seconds to start, and β seconds for each byte: t = α + β·n. Two processes send each other messages
# of 4 bytes to 16 MiB. A line is fitted by least squares to the medians, with errors relative to the line, so that
# small messages count as much as large ones. Its uncertainty is the band.

# %%
timed = run_ranks("course_utils.lessons.data_parallelism.links", world_size=2)[0]["seconds"]
print(f"{len(timed)} sizes from {timed[0][0]} to {timed[-1][0]:,} bytes, {len(timed[0][1])} messages each")

# %% tags=["nbval-ignore-output"]
from statistics import median

from course_utils.lessons.data_parallelism.figures import band_figure
from course_utils.lessons.data_parallelism.links import fit_link

link = fit_link(timed)
band_figure(
    {"α + β·n": {size: tuple(1e6 * s for s in link.message(size)) for size, _ in timed}},
    {size: 1e6 * median(times) for size, times in timed},
    f"A message costs {1e6 * link.alpha:.0f} µs to start, then {1 / link.beta / 1e9:.1f} GB pass in a second",
    "bytes of the message", "µs", log_y=True, provenance="dots: medians measured between 2 processes (gloo)",
)  # fmt: skip

# %% [markdown]
# A ring needs 2(D−1) messages of S/D bytes, one after the other: 2(D−1)·(α + β·S/D). With the time that a rank
# computes for one step, that gives an [efficiency](../docs/glossary.md#scaling-efficiency): throughput of D ranks over
# D times that of one. Nothing is hidden in one line, all that fits behind backward in the other.
#
# The next figure extrapolates: from messages between *two* processes on this computer to 1,024 ranks on machines of
# their own, joined by links just as fast. Nobody has run them. What goes in, for the small network of the overlap:

# %% tags=["nbval-ignore-output"]
step, size = trained[0]["none"], trained[0]["gradients"]
compute, behind = step["end"], step["end"] - step["forward"]
print(f"a rank computes {1000 * compute:.0f} ms per step and has S = {format_bytes(size, 'MB', 1)} of gradients")
print(f"α = {1e6 * link.alpha:.0f} µs per message, β·S = {1000 * link.beta * size:.1f} ms")

# %% [markdown]
# **Your guess.** Put these into 2(D−1)·(α + β·S/D), nothing hidden. What efficiency does the formula extrapolate to for
# D = 1,024, in percent?

# %%
predict("08.efficiency", unit="%")

# %% tags=["nbval-ignore-output"]
D = [2**power for power in range(1, 11)]
percent = {
    name: {d: tuple(100 * share for share in link.efficiency(size, d, compute, hidden)) for d in D}
    for name, hidden in {"nothing hidden": 0.0, "hidden in backward": behind}.items()
}
exchanged = {2: 100 * compute / trained[0]["one"]["end"]}
band_figure(percent, exchanged, f"Extrapolated from 2 ranks, nothing hidden: {percent['nothing hidden'][64][1]:.0f} % "
            f"on 64, {percent['nothing hidden'][1024][1]:.0f} % on 1,024", "ranks D", "efficiency in %",
            provenance="extrapolated from messages between 2 ranks; dot: measured with one bucket on 2")  # fmt: skip

# %% tags=["nbval-ignore-output"]
expected, seen = round(percent["nothing hidden"][2][1]), round(exchanged[2])
print(f"2 ranks: estimated {expected} %, measured {seen} %; estimate − measured {expected - seen:+d} points")
low, expected, high = percent["nothing hidden"][1024]
print(f"1,024 ranks: extrapolated {expected:.0f} %, and {low:.0f} to {high:.0f} % if only the fit were uncertain")
reveal("08.efficiency", round(expected), unit="%")

# %% [markdown]
# **The gap** at two ranks: the model has messages alone. gloo also adds numbers up, and both ranks share this
# machine's cores. And where dots leave the line of messages, α + β·n is too simple. The right end is no measurement at
# all: it is two processes' messages, carried on to 1,024. The band knows how well α and β fit *these* messages. It
# knows nothing of a switch that 1,024 machines share, of the slowest of 1,024 ranks, for which all others wait, or of a
# second algorithm: libraries change from rings to trees when α begins to count.
#
# For real links the same formula, with β from the speed that a link is named after and α left out:

# %%
gigabits = {"Ethernet, 10 Gbit/s": 10, "Ethernet, 100 Gbit/s": 100, "InfiniBand NDR, 400 Gbit/s": 400}
gradient = 4 * xl.model.parameters
seconds = {name: all_reduce_bytes(gradient, 64) * 8 / (1e9 * speed) for name, speed in gigabits.items()}
bars(seconds, f"GPT-2 XL on 64 ranks: {format_bytes(gradient, 'GB', 1)} of gradients need seconds, or a fast network",
     unit="s", provenance="closed form: 2(D−1)/D · bytes over the link's nominal speed, in each step")  # fmt: skip

# %% [markdown]
# 16-bit gradients halve it, `no_sync` divides it by the number of micro-batches, and overlap hides it, if backward is
# long enough.

# %% [markdown]
# ## The same script on GPUs, and on many machines
# [ddp_training.py](../course_utils/lessons/data_parallelism/ddp_training.py), which drew the overlap, takes NCCL
# and a GPU for each rank where the machine has as many GPUs as ranks, and gloo on CPUs otherwise. It prints which.
# Nothing else differs. On one machine:
#
# ```
# torchrun --standalone --nproc-per-node=4 -m course_utils.lessons.data_parallelism.ddp_training
# ```
#
# On two machines with 8 GPUs each, run this on both, with the first machine's name for HOST. `torchrun` gives each
# process its `RANK`, `LOCAL_RANK` and `WORLD_SIZE`:
#
# ```
# torchrun --nnodes=2 --nproc-per-node=8 --rdzv-id=lesson08 \
#     --rdzv-backend=c10d --rdzv-endpoint=HOST:29500 \
#     -m course_utils.lessons.data_parallelism.ddp_training
# ```
#
# Both want the course installed, or to be started from its folder. `NCCL_DEBUG=INFO` in front says which links are
# used.

# %% [markdown]
# ## Five questions
# The next cell asks what you have understood. Each choice answers at once, and tells you why it is right or which
# mistake leads to it.

# %%
from course_utils.lessons import quiz

quiz(8)

# %% [markdown]
# ## Take home
# **Remember** Every rank keeps everything and sees the same mean gradient: replicas stay equal because they take equal
# steps, and nobody checks it.
#
# **Breaks when** any gradient is not shared; when the model does not fit one GPU; when the exchange takes longer than
# what it can hide behind.
#
# **Cheat-sheet line** ring all-reduce: 2(D−1)/D · S bytes a rank, 2(D−1) messages · DDP's buckets: the gradients once
# more, nothing with `gradient_as_bucket_view` · `no_sync` for all but the last micro-batch, forward included.
#
# Now solve the [exercises of this lesson](../exercises/08_data_parallelism.ipynb).
