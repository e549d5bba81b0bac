# ---
# jupyter:
#   course:
#     minutes: 75
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 06 · Recomputation
#
# **75 minutes.** You should know what autograd keeps for backward ([lesson
# 01](01_where_did_the_memory_go.ipynb)) and what a [transformer
# block](../docs/glossary.md#transformer-block) is. No GPU is needed: where a measurement is simulated, it says so.
#
# Activations are kept because backward asks for them. But whatever forward computed once, it can compute again. So keep
# less, and pay in arithmetic: that is [activation recomputation](../docs/glossary.md#activation-recomputation), or
# "activation checkpointing". Texts promise that it leaves "the square root", "about 8 GB", "50 %", for 25 to 40 % more
# time. You will find out what it leaves, what it costs, and when each of these numbers is true.

# %% [markdown]
# ## A chain, and all of it kept
# Forget transformers for a moment. A network is a chain of n nodes f. Each leaves one value that its backward b will
# ask for, and hands another to the next node. What is in hand, and the gradient on its way back, are there whatever you
# do; we count only what is *kept*.
#
# Step through it with the slider or the play button: backward starts when the last f is through.

# %%
from course_utils.lessons.recomputation.widget import schedule_player

schedule_player("keep all", nodes=8)

# %% [markdown]
# Memory n, and n runs of f. This is what PyTorch does unless told otherwise.
#
# ## Keep none
# The other extreme: keep the chain's input alone. Each time a b asks for its value, run the chain again from the start.
#
# **Your guess.** A chain of 48 nodes, as many as GPT-2 XL has blocks. How many runs of f does that take in all, the
# first 48 included?

# %%
from course_utils.interactive.guesses import predict, reveal

n = 48
predict("06.none", unit="runs")

# %%
schedule_player("keep none", nodes=8)

# %% [markdown]
# The closed form: n runs at first; then for b of node i another i runs, and 1 + 2 + … + n = n(n + 1)/2. And the
# schedule, node by node:

# %%
from course_utils.lessons.recomputation.schedules import keep_all, keep_every, keep_none

none = keep_none(n)
print(f"formula: {n} + {n}·{n + 1}/2 = {n + n * (n + 1) // 2:,} runs; counted: {none.forwards:,}")
print(f"values kept at most: {none.memory}, where keeping all takes {keep_all(n).memory}")
print(f"a b costs two f: {(none.forwards + 2 * n) / (3 * n):.1f} times the work of keeping all")
reveal("06.none", none.forwards, unit="runs")

# %% [markdown]
# Memory O(1), the input and one value, but work O(n²), and so nobody trains like that.
#
# ## Keep every k-th
# Between the two: keep a [checkpoint](../docs/glossary.md#checkpoint), a node's input, at every k-th node. In backward
# each stretch of k nodes runs *once* again, leaves its k values, and is done with ([Chen et al.
# 2016](https://arxiv.org/abs/1604.06174)). Play it, then change k: which k keeps the least at once?

# %%
schedule_player("keep every k", nodes=16, k=2, tick=27)

# %% [markdown]
# **Your guess.** For a chain of 64 nodes: with how many nodes per checkpoint is the least kept at once?

# %%
predict("06.k", unit="nodes")

# %% [markdown]
# The closed form has two parts: n/k checkpoints, and the k values of the stretch that is being run again. One falls
# with k, the other rises. Their sum n/k + k is least where its slope −n/k² + 1 is zero.

# %%
from course_utils.lessons.recomputation.schedules import best_interval, memory_every
from course_utils.figures import lines

ks = [1, 2, 4, 8, 16, 32, 64]
counted = [keep_every(64, k).memory for k in ks]
assert counted == [memory_every(64, k) for k in ks]
lines(
    {"in all": (ks, counted), "checkpoints": (ks, [64 / k for k in ks]), "stretch": (ks, ks)},
    f"The least memory is where both parts are equal: k = √64 = {best_interval(64)}",
    "k, nodes for each checkpoint", "values kept at most", log_x=True,
)  # fmt: skip

# %%
print(f"runs of f: {keep_every(64, 8).forwards} = 2·64, and the same for every k: {keep_every(64, 2).forwards}")
print(f"values kept: {keep_every(64, 8).memory} = 2·√64")
reveal("06.k", best_interval(64), unit="nodes")

# %% [markdown]
# **The gap** between formula and schedule is nothing here, since all these k divide 64. If k does not divide n, the
# last stretch is shorter and takes less.
#
# Memory 2√n for one more forward pass. This is where "the square root" comes from. The next section shows when it does
# not hold.

# %% [markdown]
# ## A block is not a node
# In a transformer the nodes are blocks, and a checkpoint is a block's input: s·b·h numbers, in 16-bit 2·s·b·h bytes.
# But a block that runs again leaves much more than one value. Count it in checkpoints: c.

# %%
from course_utils import TrainingRun, estimate, format_bytes
from course_utils.estimating.exact.activations import block_bytes, block_input

xl = TrainingRun("gpt2-xl", micro_batch=32, seq_len=1024, precision="bf16-master")
checkpoint_size = block_input(xl).bytes
c = block_bytes(xl) / checkpoint_size
print(f"one checkpoint: {format_bytes(checkpoint_size, 'MB', 1)}")
print(f"one block that keeps everything: {format_bytes(block_bytes(xl), 'MB', 1)}: c = {c:.2f} checkpoints")

# %% [markdown]
# So now it is L/k + c·k. **Your guess.** One checkpoint for how many of GPT-2 XL's 48 blocks gives the lowest peak of
# the whole training step?

# %%
predict("06.blocks", unit="blocks")

# %%
L, ks = xl.model.layers, [1, 2, 3, 4, 6, 8, 12, 16]
by_formula = [checkpoint_size * memory_every(L, k, c) / 1e9 for k in ks]
by_k = {k: estimate(xl.replace(recompute=f"every-{k}")) for k in ks}
best = min(by_k, key=lambda k: by_k[k].total)
lines(
    {
        "estimated peak": (ks, [by_k[k].total / 1e9 for k in ks]),
        "(L/k + c·k) checkpoints": (ks, by_formula),
    },
    f"Best at {best} blocks a checkpoint: √48 ≈ 7 is already too many",
    "k, blocks for each checkpoint", "GB", log_x=True, provenance="estimated from formulas",
)  # fmt: skip

# %%
print(f"the formula alone is least at k = {best_interval(L, c)}, near √(L/c) = {(L / c) ** 0.5:.1f}")
for k in ks:
    print(f"k = {k:2d}: {format_bytes(by_k[k].total, 'GB', 1)}, fullest in {by_k[k].label}")
reveal("06.blocks", best, unit="blocks")

# %% [markdown]
# **The gap.** The square root belongs to a chain whose nodes keep as little as a checkpoint. A block keeps c times
# that, so the formula moves to √(L/c), below 2: nearly a checkpoint for every block. The whole step then moves it back
# a little, because a step has *two* full moments, and the peak is the larger one. When the loss goes backward, all
# checkpoints are there, and with them the tensors of s·b·V numbers from lesson 01: fewer checkpoints help. When the
# first stretch is run again, the loss is gone: shorter stretches help. The best k balances those two.

# %% [markdown]
# ## Every policy
# Besides whole blocks, PyTorch can recompute by operator. The course's runs know these policies:
#
# | policy | keeps for backward | runs again |
# |---|---|---|
# | none | everything | nothing |
# | full | each block's input | all blocks |
# | every-K, sqrt | the input of every K-th block; K ≈ √L | all blocks |
# | selective | results of matrix products and attention | everything else |
# | selective-attention | all but what is inside the attention core | q·kᵀ, softmax, dropout, weights·v |
# | offload | everything, in the *host's* memory | nothing: it copies |
#
# The fourth chooses by operator; the fifth is the "[selective](../docs/glossary.md#selective-recomputation)
# recomputation" of [Korthikanti et al. 2022](https://arxiv.org/abs/2205.05198), section 5. **Your guess.** GPT-2, 8
# sequences of 1,024 tokens, flash attention: the next cell prints its peak with everything kept. How high is the peak
# with full recomputation?

# %%
gpt2 = TrainingRun("gpt2", micro_batch=8, seq_len=1024, precision="bf16-master")
print(f"everything kept: {format_bytes(estimate(gpt2).total, 'GB', 1)} at the peak (estimated)")
predict("06.full", unit="GB")

# %%
from course_utils import measure
from course_utils.figures import stack

policies = ("none", "selective-attention", "selective", "full", "every-3", "offload")
steps = {name: measure(gpt2.replace(recompute=name)) for name in policies}
provenance = str(steps["none"].provenance)
stack(steps, "The states stay; recomputation takes away most activations", provenance=provenance)

# %%
reveal("06.full", steps["full"].peak)
for name, real in steps.items():
    gap = estimate(gpt2.replace(recompute=name)).total - real.peak
    kept = real.moments["after loss"]["activations"]
    print(f"{name:20s} peak {format_bytes(real.peak, 'GB', 2)}, estimate − {real.word} {gap:+,} bytes; "
          f"kept after the loss {format_bytes(kept, 'GB', 2)}")  # fmt: skip

# %% [markdown]
# The estimate leaves no gap. Now compare the policies. Full recomputation removes most activations, but the peak falls
# less: weights, optimizer states and the loss's own tensors are still there, and recomputing blocks cannot touch them.
# And "selective-attention" saves nearly nothing here: a [flash](../docs/glossary.md#flashattention) kernel recomputes
# the core in backward by itself. With attention written out it is another matter.

# %%
eager = {name: estimate(gpt2.replace(recompute=name, attention="eager")) for name in ("none", "selective-attention")}
for name, peak in eager.items():
    print(f"eager, {name:20s} {format_bytes(peak.total, 'GB', 2)} at the peak (estimated)")

# %% [markdown]
# In the timeline full recomputation leaves its signature: one tooth for each block. Count them.

# %%
from course_utils.figures import timeline

timeline(steps["full"], "Backward has a tooth for each of the 12 blocks", steps=[2])

# %% [markdown]
# ## What does it cost in arithmetic?
# Matrix products are nearly all of the arithmetic. Backward takes twice forward's: for y = x·Wᵀ it computes dL/dx
# *and* dL/dW. Full recomputation runs the forward pass of all blocks once more.
#
# **Your guess.** By how many percent does that raise the arithmetic of a whole step of this small GPT?

# %%
from course_utils.lessons.recomputation.policies import small_gpt

small = TrainingRun(small_gpt(), micro_batch=2, seq_len=128, precision="fp32", attention="eager")
print(small, "·", small.model.layers, "blocks of width", small.model.hidden, "· vocabulary of", small.model.vocab)
predict("06.third", unit="%")

# %% [markdown]
# Estimate: Korthikanti et al.'s eq. 7 has a step's [FLOPs](../docs/glossary.md#flops), 72·b·L·s·h²(1 + s/6h + V/12hL).
# Measure: PyTorch can count the FLOPs of each matrix product that it runs. The small GPT, with [eager
# attention](../docs/glossary.md#eager-attention), really runs on your processor.

# %%
from course_utils.estimating.published import korthikanti_model_flops
from course_utils.lessons.recomputation.policies import counted_flops, recomputed_flops

forward, backward = counted_flops(small)
print(f"counted: forward {forward:,}, backward {backward:,}: {backward / forward:g} times forward")
print(f"eq. 7 minus counted: {korthikanti_model_flops(small) - forward - backward:,}")

# %%
whole = forward + backward
for name in ("none", "full", "every-2", "selective", "selective-attention"):
    run = small.replace(recompute=name)
    again = sum(counted_flops(run)) - whole
    gap = recomputed_flops(run) - again
    print(f"{name:20s} runs again {again:12,} FLOPs, {again / whole:6.2%}; formula − counted {gap:+,}")
    if name == "full":
        reveal("06.third", 100 * again / whole, unit="%")

# %% [markdown]
# **The gap**, line by line. A step is three units, forward one and backward two, so one more forward would be a third.
# Full recomputation stays below that since the head, h·V products for each token, lies outside the blocks and is not
# run again; in a large model the head is small and the third is nearly exact. "every-2"
# costs the same as "full": how long a stretch is changes memory, not work. "selective" costs no matrix product at all,
# only the cheap operations between them.
#
# In the last line, half of what the formula says is missing. PyTorch's `checkpoint` *stops early*: as soon as the
# last tensor that backward needs is there, it leaves. The attention core ends in weights·v, whose inputs backward
# needs and whose output it does not. So that product is never run again.

# %% [markdown]
# ## Seventy percent for 2.7?
# Korthikanti et al. recompute the attention core of GPT-3 (175 B parameters, s = 2,048) and report 70 % less activation
# memory for 2.7 % more FLOPs. First the memory, from their eq. 1: 34 + 5·a·s/h.
#
# **Your guess.** By how many percent does running the core's two products, q·kᵀ and weights·v, once more raise the
# FLOPs?

# %%
gpt3 = TrainingRun("gpt3-175b", micro_batch=1, seq_len=2048, precision="bf16-master", attention="eager")
predict("06.core", unit="%")

# %%
from course_utils.estimating.published import korthikanti_hardware_flops, selective_recomputation_flops

s, h, a = gpt3.seq_len, gpt3.model.hidden, gpt3.model.heads
scores = 5 * a * s // h
print(f"5·a·s/h = {scores} of 34 + {scores}: {scores / (34 + scores):.1%} of a block's activations")
step = korthikanti_model_flops(gpt3)
paper, core = korthikanti_hardware_flops(gpt3) - step, selective_recomputation_flops(gpt3)
print(f"eq. 8 − eq. 7 = 12·b·L·s²·h: {paper / step:.2%} of the step")
print(f"two products, 2·b·s²·h each, in L layers: {core / step:.2%}; the paper adds {paper / core:g} times that")
print(f"q·kᵀ alone, as PyTorch stops early: {core / 2 / step:.2%}")
reveal("06.core", 100 * core / step, unit="%")

# %% [markdown]
# The same for all four models of the paper (its section 6); of the third, MT-NLG, it says 65 % and 1.6 %.

# %%
from course_utils import TransformerConfig

sizes = {"22B": (48, 6144, 64), "GPT-3": (96, 12_288, 96), "MT-NLG 530B": (105, 20_480, 128), "1T": (128, 25_600, 160)}
for name, (layers, hidden, heads) in sizes.items():
    of_paper = gpt3.replace(model=TransformerConfig(name, "gpt2", layers, hidden, heads, 51_200, 2048))
    saves = 5 * heads * s / hidden / (34 + 5 * heads * s / hidden)
    step = korthikanti_model_flops(of_paper)
    paper, core = korthikanti_hardware_flops(of_paper) - step, selective_recomputation_flops(of_paper)
    print(f"{name:12s} saves {saves:.0%}; by eq. 8 for {paper / step:.1%} more, by count for {core / step:.2%}")

# %% [markdown]
# **The gap.** Memory holds: 70 %. The 2.7 % follow from the paper's eq. 8, where s/6h becomes s/3h: that adds the
# core's *whole* share of a step, forward and backward, three units, where recomputation runs forward alone. It is
# cheaper than its authors say, for every model. And the count of the small model, above, stays even below our formula.

# %% [markdown]
# ## The front
# Now put memory and arithmetic in one picture. A policy is worth considering if no other has both a lower peak and less
# to run again.

# %%
from course_utils.lessons.recomputation.policies import added_percent
from course_utils.lessons.recomputation.figures import pareto

names = ("none", "selective", "full", f"every-{best}", "sqrt")
points = {name: (added_percent(run := xl.replace(recompute=name)), estimate(run).total) for name in names}
title = f"GPT-2 XL: a checkpoint every {best} blocks beats full recomputation, and √48 loses to both"
pareto(points, title, provenance="estimated peaks, FLOPs of matrix products by formula")

# %% [markdown]
# [Offloading](../docs/glossary.md#offloading) is not in the picture: it costs no arithmetic, but time on the link to
# the host. Can the copies hide behind the arithmetic? They leave while forward runs and come back while backward runs,
# so one way has to fit into forward, a third of the step's arithmetic.

# %%
from course_utils import gpu
from course_utils.estimating.step_time import step_seconds

a100, h100 = gpu("A100-80GB"), gpu("H100-80GB")
links = {
    "A100, PCIe 4": (a100, a100.rates.host),
    "H100, PCIe 5": (h100, h100.rates.host),
    "H100 and Grace, NVLink-C2C": (h100, 900e9 / 2),
}
on_host = xl.replace(recompute="offload")
moved = estimate(xl)["activations"] - estimate(on_host)["activations"]
print(f"offload: {format_bytes(estimate(on_host).total, 'GB', 1)} at the peak, nothing run again,")
print(f"but {format_bytes(moved, 'GB', 1)} leave for the host and come back in every step\n")
print(f"{'':26s}       GB/s  one way  forward     step  one way fits into forward at")
for name, (card, rate) in links.items():
    copy, step = moved / rate, step_seconds(xl, card)["model"]
    print(
        f"{name:26s} {rate / 1e9:10.1f}{copy:7.2f} s{step / 3:7.2f} s{step:7.2f} s  {step / 3 / copy:.0%} of the peak"
    )

# %% [markdown]
# Forward and step are the arithmetic alone, at the card's peak. Over PCIe the copies cannot hide: one way takes longer
# than the whole step computes. It would fit into forward only if forward ran at the small share of the peak in the last
# column. Real trainings are faster: Korthikanti et al. reach 54.2 % of the peak with a model of 530 B parameters.
# Between NVIDIA's Grace processor and its Hopper GPU,
# [NVLink-C2C](https://developer.nvidia.com/blog/nvidia-grace-hopper-superchip-architecture-in-depth/) carries up to
# 900 GB/s in both directions together, half of it each way. There the copies could hide, with little to spare.
#
# They could, if they are allowed to overlap. The course's own `HostCopy` (`course_utils/networks/recompute.py`) copies
# on the stream that computes: kernels wait for each copy, and the times add up. A second stream for the copies would
# let both run at once. That hides as many bytes as the link carries in the meantime. It does not make the link faster.

# %% [markdown]
# ## "About 8 GB", "50 %"
# Now judge the claims about GPT-2 XL with 32 sequences. [ZeRO](../docs/glossary.md#zero): about 60 GB of activations,
# "about 8 GB" with checkpointing, [*the square root of the total*](https://arxiv.org/abs/1910.02054) (section 3.2). A
# newsletter: 8–9 GB. Slides: checkpointing "reduces activations by about 50 %".
#
# **Your guess.** By how many percent does full recomputation reduce what GPT-2 XL keeps when forward ends?

# %%
predict("06.percent", unit="%")

# %%
from course_utils.estimating.exact.activations import activation_bytes, loss_saved, sum_bytes
from course_utils.estimating.published import (
    checkpoints_bytes,
    korthikanti_block_bytes,
    zero_activation_bytes,
    zero_checkpointed_bytes,
)


# %%
def claimed(run):
    checkpoints, layer = checkpoints_bytes(run), zero_activation_bytes(run) // L
    return {
        "ZeRO's total, 12·h·b·s·L elements": zero_activation_bytes(run),
        "over √48, ZeRO's “about 8 GB”": zero_checkpointed_bytes(run),
        "one checkpoint a block": checkpoints,
        "… and a block of ZeRO's 12 elements run again": checkpoints + layer,
        "… or one of 34 bytes, flash attention": checkpoints + block_bytes(run),
        "… or one with eager attention": checkpoints + korthikanti_block_bytes(run),
        "kept when forward ends, all blocks": activation_bytes(run),
        "… and log-softmax, kept by the loss": activation_bytes(run) + sum_bytes(loss_saved(run)),
    }


# %%
full = xl.replace(recompute="full")
sizes = {s: claimed(full.replace(seq_len=s)) for s in (1000, 1024)}
print(f"{'':46s} s = 1,000  s = 1,024")
for words, size in sizes[1024].items():
    print(f"{words:46s} {format_bytes(sizes[1000][words], 'GB', 2):>9s}  {format_bytes(size, 'GB', 2):>9s}")
real = measure(full)
after_loss = real.moments["after loss"]["activations"]
print(f"{f'the same, {real.provenance}':57s} {format_bytes(after_loss, 'GB', 2):>9s}; "
      f"estimate − {real.word} {size - after_loss:+,} bytes")  # fmt: skip

# %%
before, after = activation_bytes(xl), activation_bytes(full)
reveal("06.percent", 100 * (1 - after / before), unit="%")
for name in ("none", "selective", "full"):
    kept = activation_bytes(xl.replace(recompute=name))
    print(f"{name:10s} keeps {format_bytes(kept, 'GB', 1):>8s} when forward ends, {kept / before:4.0%} of everything")

# %% [markdown]
# **The gap** of 512 bytes is the loss itself. 60/√48, and the newsletter's 8–9 GB, are near what is really there after
# the loss, checkpoints and [log-softmax](../docs/glossary.md#log-softmax). But that is chance: neither of these two is
# the square root of anything. (The block that runs again does not come on top: by then the log-softmax has been used
# and freed.) And 50 % is far off for full recomputation; perhaps somebody read "square root" as "half". What comes
# nearest to it is the *selective* policy.

# %% [markdown]
# ## By hand
# PyTorch's `checkpoint` is two functions in one, and `use_reentrant` chooses. The older one, `use_reentrant=True`, is
# easily written by hand. Forward runs without a graph and keeps only the input. Backward runs forward again with a
# graph, then calls backward on that: autograd enters itself a second time, hence the name.
#
# One thing is easily forgotten: the second forward has to *repeat* the first.
# [Dropout](../docs/glossary.md#dropout-mask) draws random masks, on a GPU from that GPU's own random numbers. And
# backward runs outside of [autocast](../docs/glossary.md#autocast), where the same block computes in fp32. So restore
# both random states, and autocast.

# %%
from contextlib import contextmanager

import torch


def state(x):
    """What the second forward has to find: random numbers of the CPU and of x's GPU, and what autocast does."""
    on_gpu = torch.cuda.get_rng_state(x.device) if x.is_cuda else None
    device = x.device.type
    return torch.get_rng_state(), on_gpu, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)


@contextmanager
def restored(x, cpu, on_gpu, dtype, autocast):
    """Inside, `state` is as it was; fork_rng puts back what it finds, so that no one notices."""
    with torch.random.fork_rng([x.device] if x.is_cuda else []), torch.autocast(x.device.type, dtype, autocast):
        torch.set_rng_state(cpu)
        if x.is_cuda:
            torch.cuda.set_rng_state(on_gpu, x.device)
        yield


# %%
class Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, block, x):
        ctx.block, ctx.state = block, state(x)
        ctx.save_for_backward(x)
        return block(x)  # inside a Function nothing is recorded

    @staticmethod
    def backward(ctx, dy):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad(), restored(x, *ctx.state):
            y = ctx.block(x)
        y.backward(dy)
        return None, x.grad


# %%
def gradients(run, autocast=False):
    """Those of two linear layers with dropout, and of their input, when `run(block, x)` is the forward pass."""
    torch.manual_seed(0)
    block = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Dropout(0.5),
                                torch.nn.Linear(256, 64))  # fmt: skip
    x = torch.randn(32, 64, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = run(block, x)
    y.float().square().sum().backward()
    return [x.grad, *(weight.grad for weight in block.parameters())]


def keep_everything(block, x):
    return block(x)


def same(one, other):
    return all(map(torch.equal, one, other))


# %%
for autocast in (False, True):
    equal = same(gradients(keep_everything, autocast), gradients(Recomputed.apply, autocast))
    print(f"by hand, autocast {'on' if autocast else 'off'}: equal to the last bit: {equal}")

# %% [markdown]
# Every other checkpoint of this course says `use_reentrant=False`, as PyTorch
# [recommends](https://docs.pytorch.org/docs/stable/checkpoint.html). That one does not run a second backward inside the
# first. Forward records its graph as ever, but each tensor that autograd would save is replaced by an empty
# placeholder. When backward opens the first placeholder, forward runs again and fills them in order. It stops as soon
# as the last one is full: that is the early stop that you met above. The older variant always runs to the end.

# %%
from functools import partial

from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

kept, flops = gradients(keep_everything), {}
for name, run in {
    "keep everything": keep_everything,
    "by hand": Recomputed.apply,
    "use_reentrant=True": partial(checkpoint, use_reentrant=True),
    "use_reentrant=False": partial(checkpoint, use_reentrant=False),
}.items():
    with FlopCounterMode(display=False) as counter:
        equal = same(kept, gradients(run))
    flops[name] = counter.get_total_flops()
    print(f"{name:20s} equal: {equal}; arithmetic {flops[name] / flops['keep everything'] - 1:+.1%}")

# %% [markdown]
# The early stop skips the last linear layer: backward needs its input, and nobody its output. The variants differ in
# one more trap. With `use_reentrant=True`, no weight of the block gets a gradient unless an *input* of the block
# requires one, as after a frozen embedding. And without care for the random state?

# %%
careless = gradients(partial(checkpoint, use_reentrant=False, preserve_rng_state=False))
print("random state not restored, equal:", same(kept, careless))
size = (careless[1] - kept[1]).norm() / kept[1].norm()
print(f"off by more than a tenth of the gradient's length: {size.item() > 0.1}, and no error was raised")

# %% [markdown]
# Nothing crashes. Training goes on with gradients of a network that never ran: other masks in backward than in forward.
# `preserve_rng_state=False` is safe only without randomness in the block.
#
# Is checkpointing "on by default in most libraries", as one text has it? No. PyTorch recomputes what you hand to
# `checkpoint`, and nothing else; DeepSpeed's
# [checkpointing](https://deepspeed.readthedocs.io/en/latest/activation-checkpointing.html) waits for such a call, too.
# The sources of [transformers](https://github.com/huggingface/transformers/blob/main/src/transformers/training_args.py)
# say `gradient_checkpointing = False`, those of
# [Megatron-LM](https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/core/transformer/transformer_config.py)
# `recompute_granularity = None`. Of these five,
# [torchtitan](https://github.com/pytorch/torchtitan/blob/main/torchtitan/trainer.py) alone begins with a selective one
# (sources of 2025 and 2026).

# %% [markdown]
# ## And the time?
# Arithmetic is not time. On one core of your processor, in fp32, the quickest of five passes each, in processor time,
# so that what else it does hardly counts (they still vary a little from run to run):

# %% tags=["nbval-ignore-output"]
from course_utils.lessons.recomputation.policies import seconds

timed = TrainingRun(small_gpt(layers=4, hidden=256), micro_batch=4, seq_len=128, precision="fp32", attention="eager")
runs = {name: timed.replace(recompute=name) for name in ("none", "selective", "selective-attention", "full", "every-2")}
took = seconds(runs)
for name, run in runs.items():
    more = took[name] / took["none"] - 1
    print(f"{name:20s} {1e3 * took[name]:6.1f} ms, {more:+.0%}; by arithmetic {added_percent(run):+.1f} %")

# %% [markdown]
# Published figures for a GPU lie between 25 and 40 %: a newsletter has 25–30 %, ZeRO 33 %, a lecture 30–40 %.
# Korthikanti et al. measured 39 % for a layer split over 8 GPUs, whose forward waits for messages that backward hides
# (their table 4). More arithmetic alone explains at most one third. (25 % is one unit of the *new* four.) Dropout,
# norms and GELU run again too, and they wait for memory, not for arithmetic; copies and the Python of `checkpoint` come
# on top. Real GPUs say:

# %%
from course_utils.lessons.shared.recorded_times import recorded_times

recorded_times("recomputation")

# %% [markdown]
# ## What the sources got wrong
# | claim | what you computed here |
# |---|---|
# | checkpointing leaves the square root | for equal nodes; a block keeps c times its checkpoint: √(L/c) |
# | about 8 GB for GPT-2 XL | checkpoints, and the loss's log-softmax: near it by chance |
# | it reduces activations by about 50 % | full recomputation leaves a few percent of what forward keeps |
# | 2.7 % more compute for the attention core | three times one forward of it; PyTorch runs half of one |
# | 33 % more time | an upper bound for arithmetic: the head is not run again; time is another matter |
# | on by default in most libraries | off in PyTorch, DeepSpeed, transformers and Megatron-LM; on in torchtitan |
#
# ## Five questions
# The next cell asks what you have understood. Each choice answers at once, and tells you why it is right or which
# mistake leads to it.

# %%
from course_utils.lessons import quiz

quiz(6)

# %% [markdown]
# ## Take home
# **Remember** Recomputation trades memory for one more forward. What stays is checkpoints, one live stretch, and the
# loss.
#
# **Breaks when** the peak is elsewhere: in the loss or the optimizer; or when random state or autocast is not restored.
#
# **Cheat-sheet line** every k blocks: (L/k + c·k) · 2·s·b·h bytes, c ≈ 17 + 5·a·s/2h eager, 17 flash · cost: at most
# ⅓ of a step · selective in eager attention saves 5·a·s²·b a block, for at most 4·b·s²·h FLOPs.
#
# Now solve the [exercises of this lesson](../exercises/06_recomputation.ipynb).
