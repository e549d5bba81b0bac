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
# # 06 · Recomputation
#
# **80 minutes.** You should know what autograd keeps ([lesson 01](01_where_did_the_memory_go.ipynb)) and what a
# [transformer block](../docs/glossary.md#transformer-block) is. You need no GPU.
#
# What forward computed once, it can compute again. Keep fewer activations, and pay in arithmetic: this is [activation
# recomputation](../docs/glossary.md#activation-recomputation), or "activation checkpointing". Texts promise that it
# leaves "the square root", "about 8 GB", "50 %", for 25 to 40 % more time. When is each number true?

# %% [markdown]
# ## A chain that keeps everything
# A network is a chain of n nodes f. Each node leaves one value for its backward b, and passes another on. The passed
# value and its gradient always exist, so count only what is *kept*.
#
# Press play. Then change 8 to 16.

# %%
from course_utils.lessons.recomputation.widget import schedule_player

schedule_player("keep all", nodes=8)  # change this

# %% [markdown]
# This is PyTorch's default. It keeps n values, and runs f n times.
#
# ## Keep none
# Keep only the chain's input. Then each b must run the chain again from the start.
#
# **Your guess.** How many runs of f does a chain of 48 nodes take, the first 48 included?

# %%
from course_utils.interactive.guesses import predict, reveal, waits_for

predict("06.none", unit="runs")

# %%
schedule_player("keep none", nodes=8)

# %% [markdown]
# Forward takes n runs, then b of node i takes another i:
#
# $$1 + 2 + \dots + n = \frac{n (n + 1)}{2}$$

# %%
from course_utils.lessons.recomputation.schedules import keep_every, keep_none

n = 48  # change this
none = keep_none(n)
print(f"formula: {n} + {n}·{n + 1}/2 = {n + n * (n + 1) // 2:,} runs; counted: {none.forwards:,}")
print(
    f"at most {none.memory} values kept; "
    f"if b costs two f, {(none.forwards + 2 * n) / (3 * n):.1f} times the work"
)
reveal("06.none", none.forwards, unit="runs")

# %% [markdown]
# Memory is O(1), the input and one value. But work is O(n²): nobody trains like that. Change 48 to 96: by what factor
# does the work grow?
#
# ## Keep every k-th
# Keep a [checkpoint](../docs/glossary.md#checkpoint), a node's input, at every k-th node. In backward, each stretch of
# k nodes runs *once* again and leaves its k values until they are used ([Chen et al.
# 2016](https://arxiv.org/abs/1604.06174)). Play it, then change k.

# %%
schedule_player("keep every k", nodes=16, k=2, tick=27)  # change this

# %% [markdown]
# **Your guess.** Which k keeps the fewest values at once in a chain of 64 nodes?

# %%
predict("06.k", unit="nodes")

# %% [markdown]
# Add n/k checkpoints and the k values of the stretch that runs again. The sum is lowest where its derivative is zero:
#
# $$\frac{n}{k} + k \qquad -\frac{n}{k^2} + 1 = 0$$

# %% tags=["hide-input"]
from course_utils.figures import lines
from course_utils.lessons.recomputation.schedules import best_interval, memory_every

waits_for("06.k")
ks = [1, 2, 4, 8, 16, 32, 64]
curves = {
    "total": (ks, [keep_every(64, k).memory for k in ks]),
    "checkpoints": (ks, [64 / k for k in ks]),
    "stretch": (ks, ks),
}
title = f"Memory is lowest where both parts are equal, at k = √64 = {best_interval(64)}"
lines(curves, title, "k, nodes per checkpoint", "values kept at most", log_x=True)

# %%
print(
    f"runs of f: {keep_every(64, 8).forwards} = 2·64, and the same for every k: "
    f"{keep_every(64, 2).forwards}"
)
print(f"values kept at most: {keep_every(64, 8).memory} = 2·√64")
reveal("06.k", best_interval(64), unit="nodes")

# %% [markdown]
# Memory is $2 \sqrt{n}$, for one more forward pass. This is "the square root".
#
# Can it be less? Let a stretch that runs again keep checkpoints of its own, and so on down to single nodes. Then memory
# is O(log n), for O(n log n) runs of f (Chen et al., abstract). Griewank and Walther's `revolve` (2000) has the best
# such schedule for a given number of checkpoints.
#
# And when does the square root not hold?

# %% [markdown]
# ## A block is not a node
# In a transformer the nodes are blocks. A checkpoint is a block's input: b sequences of s tokens with h numbers each,
# 2·s·b·h bytes in 16 bits. But a block that runs again leaves much more than one value. Here is [lesson
# 05](05_activations.ipynb)'s block.


# %%
import torch
from torch import nn
from torch.nn import functional as F


def flash(q, k, v, rate):
    return F.scaled_dot_product_attention(q, k, v, dropout_p=rate, is_causal=True)


# %%
class Block(nn.Module):
    def __init__(self, h, a, attention=flash, rate=0.1):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(h), nn.LayerNorm(h)
        self.qkv, self.out = nn.Linear(h, 3 * h), nn.Linear(h, h)
        self.mlp = nn.Sequential(nn.Linear(h, 4 * h), nn.GELU(), nn.Linear(4 * h, h))
        self.a, self.attention, self.rate = a, attention, rate

    def forward(self, x):
        b, s, h = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, s, 3 * self.a, -1).transpose(1, 2).chunk(3, 1)
        x = x + F.dropout(
            self.out(self.attention(q, k, v, self.rate).transpose(1, 2).reshape(b, s, h)), self.rate
        )
        return x + F.dropout(self.mlp(self.norm2(x)), self.rate)


# %% [markdown]
# Run one of GPT-2 XL's blocks: how much more does PyTorch allocate? Inside `on_gpu()`, "cuda" is your GPU or a
# [simulated one](../docs/glossary.md#simulated-gpu). (Output and kept input are equally large, so the counter grows by
# what the block keeps.)

# %%
from course_utils import PRESETS, TrainingRun, compare, estimate, format_bytes, measure
from course_utils import on_gpu, plus_minus

with on_gpu():
    block = Block(1600, 25).to("cuda", torch.bfloat16)
    shape = (32, 1024, 1600)  # change this
    x = torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    block(x)  # the first product allocates cuBLAS's workspace, which persists
    before = torch.cuda.memory_allocated()
    y = block(x)
    checkpoint_size, kept = x.nbytes, torch.cuda.memory_allocated() - before
    del block, x, y
c = kept / checkpoint_size
print(f"one checkpoint: {format_bytes(checkpoint_size, 'MB', 1)}")
print(f"the block keeps {format_bytes(kept, 'MB', 1)}: c = {c:.2f}")

# %% [markdown]
# A block keeps as much as c checkpoints. (Change 1024 to 128: does c depend on s with a flash kernel?) Counted in
# checkpoints, L blocks now need
#
# $$\frac{L}{k} + c \cdot k$$
#
# **Your guess.** With how many of GPT-2 XL's 48 blocks per checkpoint is the peak of the whole training step lowest?

# %%
predict("06.blocks", unit="blocks")

# %%
waits_for("06.blocks")
xl = TrainingRun("gpt2-xl", micro_batch=32, seq_len=1024, precision="bf16-master")
L, ks = xl.model.layers, [1, 2, 3, 4, 6, 8, 12, 16]
by_k = {k: estimate(xl.replace(recompute=f"every-{k}")) for k in ks}
best = min(by_k, key=lambda k: by_k[k].total)
checkpoint_gb = 2 * 1024 * 32 * 1600 / 1e9
curves = {
    "estimated peak": (ks, [by_k[k].total / 1e9 for k in ks]),
    "(L/k + c·k) checkpoints": (ks, [checkpoint_gb * memory_every(L, k, c) for k in ks]),
}
lines(
    curves,
    f"Loss in one piece: the peak is lowest with {best} blocks per checkpoint, √48 ≈ 7 is too many",
    "k, blocks per checkpoint",
    "GB",
    log_x=True,
    provenance="estimated from formulas",
)

# %%
print(f"the formula is lowest at k = {best_interval(L, c)}, near √(L/c) = {(L / c) ** 0.5:.1f}")
for k in ks:
    peak = format_bytes(by_k[k].total, "GB", 1)
    in_8 = format_bytes(estimate(xl.replace(recompute=f"every-{k}", loss_chunks=8)).total, "GB", 1)
    where = by_k[k].label.split(":")[0]
    print(f"k = {k:2d}: {peak} at the peak, in {where}; loss in 8 chunks: {in_8}")
reveal("06.blocks", best, unit="blocks")

# %% [markdown]
# The square root holds for nodes that keep as little as a checkpoint. A block keeps c times that, so the optimum moves
# to $\sqrt{L/c}$, below 2: nearly one checkpoint per block. The whole step moves it back a little, because it has *two*
# high points:
#
# - In backward of the loss, all checkpoints exist, and lesson 05's tensors of s·b·V numbers: fewer checkpoints help.
# - When the first stretch runs again, the loss's tensors are gone: shorter stretches help.
#
# The best k balances both. It depends on the loss: in 8 chunks (lesson 05) its tensors are small, and the formula's k
# is best.

# %% [markdown]
# ## Every policy
# In this GPT, you choose how its blocks are called: `call(block, x)`.


# %%
class GPT(nn.Module):
    def __init__(self, layers, h, a, V, attention=flash):
        super().__init__()
        self.embed, self.head = nn.Embedding(V, h), nn.Linear(h, V, bias=False)
        self.blocks = nn.ModuleList(Block(h, a, attention) for _ in range(layers))

    def forward(self, tokens, call):
        x = self.embed(tokens)
        for block in self.blocks:
            x = call(block, x)
        return self.head(x)


def keep_everything(block, x):
    return block(x)


def loss_of(model, tokens, call):
    return F.cross_entropy(model(tokens, call).flatten(0, 1), tokens.flatten())


# %% [markdown]
# The model has GPT-2's blocks and words in 16 bits. But it has no positions, and a head of its own. It gets 8 sequences
# of 1,024 tokens, and has no optimizer. **Your guess.** How high is the peak if each block keeps only its input?


# %%
def show(name, call):
    torch.cuda.reset_peak_memory_stats()
    loss = loss_of(gpt, batch, call)
    kept = torch.cuda.memory_allocated()
    loss.backward()
    gpt.zero_grad()
    peak = torch.cuda.max_memory_allocated()
    left, most = format_bytes(kept, "GB", 2), format_bytes(peak, "GB", 2)
    print(f"{name:22s} {left} after the loss, {most} at the peak")
    return peak


with on_gpu():
    gpt = GPT(layers=12, h=768, a=12, V=50257).to("cuda", torch.bfloat16)
    N = sum(parameter.numel() for parameter in gpt.parameters())
    more = N / PRESETS["gpt2"].parameters - 1
    print(f"{N:,} parameters, {more:.0%} more than GPT-2 with its tied head")
    batch = torch.randint(50257, (8, 1024), device="cuda")
    loss_of(gpt, batch, keep_everything).backward()  # so that cuBLAS has allocated its workspaces
    gpt.zero_grad()
    show("keep everything", keep_everything)
predict("06.full", unit="GB")

# %% [markdown]
# `torch.utils.checkpoint.checkpoint` calls a function, keeps its inputs, and calls it again in backward.
# [`use_reentrant`](../docs/glossary.md#use_reentrant) chooses between two variants:
#
# - `True`, the older one: backward runs the block again with its own graph, and reenters autograd: backward *inside*
#   backward.
# - `False`, [which PyTorch recommends](https://docs.pytorch.org/docs/stable/checkpoint.html): forward leaves a
#   placeholder for each tensor that autograd would keep. When backward opens the first one, forward runs again and
#   fills them in order.

# %%
from functools import partial

from torch.utils.checkpoint import checkpoint

again = partial(checkpoint, use_reentrant=False)
with on_gpu():
    full = show("use_reentrant=False", again)
    show("use_reentrant=True", partial(checkpoint, use_reentrant=True))
reveal("06.full", full)

# %% [markdown]
# One trap of `True`: a block's weights get a gradient only if an *input* of the block requires one. After a frozen
# embedding, none does.
#
# For a checkpoint every k blocks, cut the list into stretches:


# %%
def in_stretches(model, k):
    """The model's blocks, with k consecutive blocks joined into one."""
    return nn.ModuleList(
        nn.Sequential(*model.blocks[i : i + k]) for i in range(0, len(model.blocks), k)
    )


with on_gpu():
    one_by_one = gpt.blocks
    gpt.blocks = in_stretches(gpt, 3)  # change this
    show("every third block", again)
    gpt.blocks = one_by_one

# %% [markdown]
# Change 3 to 2, 6 and 12. Predict both numbers.
#
# The *selective* policy keeps the results of matrix products and attention, and runs the cheap rest again. `context_fn`
# says which results to keep. PyTorch chooses one of several attention kernels: with a mask, in fp32 or on another GPU
# it may not be flash. So list them all. One that is not in the list runs again, without a word.

# %%
from torch.utils.checkpoint import create_selective_checkpoint_contexts

aten = torch.ops.aten
ATTENTION = [
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
]
KEPT = [aten.mm.default, aten.addmm.default, aten.bmm.default, *ATTENTION]
contexts = partial(create_selective_checkpoint_contexts, KEPT)  # change this
selective = partial(again, context_fn=contexts)
with on_gpu():
    show("selective", selective)

# %% [markdown]
# Change `KEPT` to `ATTENTION`, to keep only attention's results. Where does this lie between selective and full?
#
# Or keep everything in the *host's* memory: [offloading](../docs/glossary.md#offloading). `save_on_cpu` copies there
# what autograd saves, and back in backward. The GPU reads the host's pinned pages directly.


# %%
def offload(block, x):
    with torch.autograd.graph.save_on_cpu(pin_memory=True):
        return block(x)


with on_gpu():
    show("save_on_cpu", offload)

# %% [markdown]
# `save_on_cpu` copies the weights, too. Your own hooks can skip them: see `Offloading` in
# [recompute.py](../course_utils/networks/recompute.py).
#
# A `TrainingRun` has all of these as `recompute=`, for a whole step with its states. Here it is GPT-2 with half of its
# blocks: compare its rows with each other, not with those above. "selective-attention" recomputes only attention's
# core, from q·kᵀ to weights·v: the "[selective](../docs/glossary.md#selective-recomputation) recomputation" of
# [Korthikanti et al. 2022](https://arxiv.org/abs/2205.05198), section 5.

# %%
from dataclasses import replace

from course_utils.figures import stack

half = replace(PRESETS["gpt2"], layers=6)  # change this
run = TrainingRun(half, micro_batch=8, seq_len=1024, precision="bf16-master")
run = run.replace(optimizer="adamw-foreach")
policies = ("none", "selective-attention", "selective", "full", "every-3", "offload")
compared = {name: compare(run.replace(recompute=name)) for name in policies}
steps = {name: one.measurement for name, one in compared.items()}
stack(
    steps,
    "Recomputation removes most activations; the states stay",
    provenance=str(steps["none"].provenance),
)

# %%
for name, real in steps.items():
    gap = plus_minus(compared[name].estimate.total - real.peak)
    kept = format_bytes(real.moments["after loss"]["activations"], "GB", 2)
    print(
        f"{name:20s} peak {format_bytes(real.peak, 'GB', 2)}, estimate − {real.word}: "
        f"{gap} bytes; kept {kept}"
    )
for name in ("none", "selective-attention"):
    peak = estimate(run.replace(recompute=name, attention="eager")).total
    print(f"{name:20s} with eager attention: {format_bytes(peak, 'GB', 2)} at the peak, estimated")
for term, size in compared["none"].terms.items():
    print(f"gap of “none”, {term}: {plus_minus(size)} bytes")

# %% [markdown]
# **The gap** is small, and the last lines name it. The formula adds up tensors. The allocator gives each tensor whole
# blocks of 512 bytes, even the loss and the random state of each block's attention, which the formula leaves out. On a
# real GPU, cuBLAS's workspaces (`show` counts them), CUDA's context and
# [reserved](../docs/glossary.md#allocated-and-reserved) memory without a tensor come on top.
#
# Full recomputation lowers the peak less than the activations: weights, optimizer states and the loss's own tensors
# stay. "selective-attention" saves almost nothing here, because a [flash](../docs/glossary.md#flashattention) kernel
# recomputes the core anyway.
#
# Full recomputation leaves one tooth per block. Count them.

# %%
from course_utils.figures import timeline

timeline(steps["full"], f"Backward has one tooth for each of the {half.layers} blocks", steps=[2])

# %% [markdown]
# ## What does it cost in arithmetic?
# Nearly all arithmetic is matrix products. Backward takes twice as much as forward: for y = x·Wᵀ it computes dL/dx
# *and* dL/dW. Full recomputation adds one forward of all blocks.
#
# **Your guess.** A small GPT with [eager attention](../docs/glossary.md#eager-attention) runs on your processor. By how
# many percent does full recomputation raise its step's arithmetic?


# %%
def eager(q, k, v, rate):
    s = q.shape[-2]
    mask = torch.full((s, s), float("-inf"), dtype=q.dtype, device=q.device).triu(1)
    return F.dropout(((q / q.shape[-1] ** 0.5) @ k.mT + mask).softmax(-1), rate) @ v


s, b, h, a, L, V = 128, 2, 128, 4, 6, 1000  # change this
torch.manual_seed(0)
small = GPT(L, h, a, V, eager)
tokens = torch.randint(V, (b, s))
predict("06.third", unit="%")

# %% [markdown]
# Estimate: equation 7 of Korthikanti et al. gives a step's [FLOPs](../docs/glossary.md#flops).
#
# $$72 b L s h^2 \left(1 + \frac{s}{6h} + \frac{V}{12 h L}\right)$$
#
# Measure: PyTorch counts the FLOPs of its matrix products.

# %%
from torch.utils.flop_counter import FlopCounterMode


def flops(model, call):
    """FLOPs of matrix products in forward and in backward."""
    with FlopCounterMode(display=False) as counter:
        loss = loss_of(model, tokens, call)
        forward = counter.get_total_flops()
        loss.backward()
    return forward, counter.get_total_flops() - forward


forward, backward = flops(small, keep_everything)
whole = forward + backward
published = 72 * b * L * s * h * h + 12 * b * L * s * s * h + 6 * b * s * h * V
print(f"counted: forward {forward:,}, backward {backward:,}: {backward / forward:g} times forward")
print(f"eq. 7 − counted: {plus_minus(published - whole)}")


# %%
def core_again(q, k, v, rate):
    return again(eager, q, k, v, rate)


blocks, core = 24 * b * L * s * h * h + 4 * b * L * s * s * h, 4 * b * L * s * s * h
ways = {"full": (small, again, blocks), "selective": (small, selective, 0)}
ways["selective-attention"] = GPT(L, h, a, V, core_again), keep_everything, core
for name, (one, call, wanted) in ways.items():
    more = sum(flops(one, call)) - whole
    gap = plus_minus(wanted - more)
    print(f"{name:20s} repeats {more:11,} FLOPs, {more / whole:6.2%}; formula − counted: {gap}")
    if name == "full":
        reveal("06.third", 100 * more / whole, unit="%")

# %% [markdown]
# A step is three units, one forward and two backward. One more forward would be a third, but the head lies outside the
# blocks. (Change V to 50257: how much is it then?) The number of blocks per checkpoint changes memory, not work.
#
# **The gap.** In the last line, half of the formula's FLOPs are missing. `checkpoint` *stops early*, once the last
# placeholder is filled. The core ends in weights·v. Backward needs that product's inputs but not its output, so it
# never runs again.

# %% [markdown]
# ## 70 % less memory for 2.7 % more FLOPs?
# Korthikanti et al. (section 5) report this for GPT-3's activations (175 B parameters, s = 2,048) if the attention core
# is recomputed. For MT-NLG they report 65 % and 1.6 %. A lecture makes it "up to 70 %".
#
# **Your guess.** Run the core's two products, q·kᵀ and weights·v, once more. By how many percent do the FLOPs of
# GPT-3's step rise?

# %%
predict("06.core", unit="%")

# %%
sizes = {
    "22B": (48, 6144, 64),
    "GPT-3": (96, 12_288, 96),
    "MT-NLG 530B": (105, 20_480, 128),
    "1T": (128, 25_600, 160),
}
s, V = 2048, 51_200  # change this
added = {}
for name, (L, h, a) in sizes.items():
    step = 72 * L * s * h * h * (1 + s / (6 * h) + V / (12 * h * L))  # eq. 7, one sequence
    paper = 12 * L * s * s * h / step  # eq. 8 − eq. 7
    added[name] = 4 * L * s * s * h / step  # two products
    saves = 5 * a * s / h / (34 + 5 * a * s / h)
    print(
        f"{name:12s} saves {saves:.0%}; eq. 8 adds {paper:.1%}, two products add {added[name]:.2%}"
    )
reveal("06.core", 100 * added["GPT-3"], unit="%")
long, h, a = 4096, 4096, 32  # the lecture's example, Llama-3 8B with its 97 and 17 GB
print(f"{'Llama-3 8B':12s} saves {5 * a * long / h / (34 + 5 * a * long / h):.0%} at s = {long:,}")

# %% [markdown]
# Memory holds for GPT-3: 70 %. It is not an upper limit: the lecture's own example saves more. The 2.7 % follow from
# equation 8, where $\frac{s}{6h}$ becomes $\frac{s}{3h}$. That adds the
# core's *whole* share of a step, all three units. But recomputation runs only forward, so it costs less than its
# authors say, for every model. PyTorch stops early and repeats only q·kᵀ: half of that. Change s to 8192: which columns
# grow?

# %% [markdown]
# ## Memory against arithmetic
# Consider only policies on the *front*: no other has both a lower peak and less to run again. This is a front in FLOPs.
# "selective" repeats no product, and still took longer than "full" on a real GPU: see the front in time below.

# %%
from course_utils.lessons.recomputation.figures import pareto
from course_utils.lessons.recomputation.policies import added_percent

step = xl.replace(loss_chunks=1)  # change this
names = ("none", "selective", "full", f"every-{best}", "sqrt")
runs = {name: step.replace(recompute=name) for name in names}
points = {name: (added_percent(run), estimate(run).total) for name, run in runs.items()}
lowest = min(points, key=lambda name: points[name][1])
title = f"GPT-2 XL, loss_chunks={step.loss_chunks}: the peak is lowest with recompute={lowest}"
pareto(points, title, provenance="estimated peaks, FLOPs of matrix products by formula")

# %% [markdown]
# Change `loss_chunks` to 8: which policy wins then, and why? Then replace "sqrt" by "every-12": where does it lie?
#
# Offloading costs no arithmetic, but time on the link to the host. Can the copies hide? They leave during forward and
# return during backward, so one way must fit into forward, a third of the step's arithmetic. The third link, NVLink,
# joins NVIDIA's Grace processor to its Hopper GPU
# ([NVLink-C2C](https://developer.nvidia.com/blog/nvidia-grace-hopper-superchip-architecture-in-depth/), 900 GB/s in
# both directions together).

# %%
from course_utils import gpu
from course_utils.estimating.step_time import step_seconds

a100, h100 = gpu("A100-80GB"), gpu("H100-80GB")
links = {
    "A100, PCIe 4": (a100, a100.rates.host),
    "H100, PCIe 5": (h100, h100.rates.host),
    "Grace, NVLink": (h100, 450e9),
}
moved = estimate(xl)["activations"] - estimate(xl.replace(recompute="offload"))["activations"]
checkpoints = 2 * xl.seq_len * xl.micro_batch * xl.model.hidden * xl.model.layers
for what, size in {"all activations": moved, "only checkpoints": checkpoints}.items():
    print(f"{what}: {format_bytes(size, 'GB', 1)} go to the host and come back in every step")
    for name, (card, rate) in links.items():
        copy, forward = size / rate, step_seconds(xl, card)["model"] / 3
        slower = f"at {forward / copy:.0%} of the peak or slower"
        speed = "even at the card's peak" if copy <= forward else slower
        print(
            f"  {name:13s} one way {copy:.2f} s, "
            f"forward at the peak {forward:.2f} s: it hides {speed}"
        )

# %% [markdown]
# Over PCIe, the copies of *all* activations cannot hide behind forward: real trainings reach about half of the peak
# (Korthikanti et al.: 54.2 %). Over NVLink they could, with little to spare. The checkpoints of full recomputation are
# far fewer bytes: they hide over PCIe even at the peak.
# [DeepSpeed](https://deepspeed.readthedocs.io/en/latest/activation-checkpointing.html) has this as *CPU checkpointing*.
# All of it holds only for copies on a stream of their own. `save_on_cpu` copies on the stream that computes, so the
# times add up.

# %% [markdown]
# ## "About 8 GB" and "50 %": are they right?
# Three claims about GPT-2 XL with 32 sequences. [ZeRO](../docs/glossary.md#zero): about 60 GB of activations, "about 8
# GB" with checkpointing, [*the square root of the total*](https://arxiv.org/abs/1910.02054) (section 3.2). A
# newsletter: 8–9 GB. Slides: checkpointing "reduces activations by about 50 %".
#
# **Your guess.** By how many percent does full recomputation reduce what is kept at the end of forward?

# %%
predict("06.percent", unit="%")

# %%
from course_utils.estimating.formula import activation_bytes, block_bytes, loss_bytes

waits_for("06.percent")
full = xl.replace(recompute="full")  # change this
s, b, h, L = full.seq_len, full.micro_batch, full.model.hidden, full.model.layers
zero, one_each = 12 * 2 * h * b * s * L, 2 * s * b * h * L
real = measure(full.replace(optimizer="sgd"), steps=1)  # forward is the same with Adam
claims = {
    "ZeRO's total, 12·h·b·s·L numbers": zero,
    "divided by √48: ZeRO's “about 8 GB”": zero / L**0.5,
    "one checkpoint per block": one_each,
    "… plus one block run again, 34·s·b·h": one_each + block_bytes(full),
    "kept at the end of forward": activation_bytes(full),
    "… plus log-softmax, kept by the loss": activation_bytes(full) + loss_bytes(full),
    f"the same, {real.word}": real.moments["after loss"]["activations"],
}
for claim, size in claims.items():
    print(f"{claim:36s} {format_bytes(size, 'GB', 2):>9s}")

# %%
before, after = activation_bytes(xl), activation_bytes(xl.replace(recompute="full"))
reveal("06.percent", 100 * (1 - after / before), unit="%")
for name in ("none", "selective", "full"):
    kept = activation_bytes(xl.replace(recompute=name))
    print(
        f"{name:10s} keeps {format_bytes(kept, 'GB', 1):>8s} at forward's end, "
        f"{kept / before:4.0%} of everything"
    )

# %% [markdown]
# 60/√48 and 8–9 GB are close to what exists after the loss: checkpoints and
# [log-softmax](../docs/glossary.md#log-softmax). That is chance: neither is a square root of anything. Change `xl` to
# `xl.replace(seq_len=512)` in the first cell: which rows halve? 50 % is far off for full recomputation. The *selective*
# policy comes nearest.

# %% [markdown]
# ## By hand
# Write `use_reentrant=True` yourself, as a `torch.autograd.Function`. Forward keeps only the input. Backward runs the
# block again, now with a graph.


# %%
class Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, block, x):
        ctx.block = block
        ctx.save_for_backward(x)
        return block(x)  # inside a Function nothing is recorded

    @staticmethod
    def backward(ctx, dy):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.block(x)
        y.backward(dy)  # the weights get their gradients here
        return None, x.grad


# %% [markdown]
# The second forward must *repeat* the first. But [dropout](../docs/glossary.md#dropout-mask) draws random masks (on a
# GPU, from its own random numbers), and backward runs outside of [autocast](../docs/glossary.md#autocast). Are the
# gradients still right?


# %%
def gradients(call, dropout, autocast):
    """Gradients of a block and of its input, with `call(block, x)` as the forward pass."""
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Dropout(dropout), nn.Linear(256, 64))
    x = torch.randn(32, 64, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = call(block, x)
    y.float().square().sum().backward()
    return [x.grad, *(weight.grad for weight in block.parameters())]


# %%
variants = {
    "by hand": Recomputed.apply,
    "use_reentrant=True": partial(checkpoint, use_reentrant=True),
    "use_reentrant=False": again,
    "the same, random state not restored": partial(again, preserve_rng_state=False),
}
# change this
cases = {"in fp32": (0.0, False), "with dropout": (0.5, False), "with autocast": (0.0, True)}
for words, case in cases.items():
    right = gradients(keep_everything, *case)
    print(words)
    for name, call in variants.items():
        with FlopCounterMode(display=False) as counter:
            found = gradients(call, *case)
        pairs = zip(right, found, strict=True)
        off = max((one - other).norm() / one.norm() for one, other in pairs)
        print(f"  {name:35s} {counter.get_total_flops():,} FLOPs, off by {off:.1%}")

# %% [markdown]
# The last column is the difference's norm, relative to the gradient's. Without its random state, dropout gives wrong
# gradients, and nothing crashes: training goes on with gradients of a network that never ran.
# `preserve_rng_state=False` is safe only in blocks without randomness. By hand, the block runs again outside of
# autocast, in fp32: gradients are off a little, and recomputed tensors take twice the bytes. (Exercise 4 restores
# everything.) The FLOPs show the early stop: only `use_reentrant=False` leaves out the last linear layer.
#
# Is checkpointing "on by default in most libraries", as a lecture says? No. PyTorch recomputes only what you pass to
# `checkpoint`, as does [DeepSpeed](https://deepspeed.readthedocs.io/en/latest/activation-checkpointing.html).
# [transformers](https://github.com/huggingface/transformers/blob/main/src/transformers/training_args.py) defaults to
# `gradient_checkpointing = False`,
# [Megatron-LM](https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/core/transformer/transformer_config.py) to
# `recompute_granularity = None`. Of these five, only
# [torchtitan](https://github.com/pytorch/torchtitan/blob/0014ac2ca45ae15db6706b4f5cc3e67546c98885/torchtitan/config/configs.py)
# starts with a selective policy: `mode = "selective"` (sources of 2025 and 2026).

# %% [markdown]
# ## And the time?
# Arithmetic is not time. Processor time on one core, in fp32, the fastest of three passes (it varies a little):

# %% tags=["nbval-ignore-output"]
from time import process_time

L, h, s = 2, 256, 128  # change this
models = {False: GPT(L, h, 4, 1000, eager), True: GPT(L, h, 4, 1000, core_again)}
tokens = torch.randint(1000, (4, s))
passes = {
    "none": (False, keep_everything),
    "selective": (False, selective),
    "selective-attention": (True, keep_everything),
    "full": (False, again),
}
threads = torch.get_num_threads()
torch.set_num_threads(1)
for name, (core, call) in passes.items():
    times = []
    for _ in range(4):
        begin = process_time()
        loss_of(models[core], tokens, call).backward()
        times.append(process_time() - begin)
    print(f"{name:20s} {1e3 * min(times[1:]):6.1f} ms")
torch.set_num_threads(threads)

# %% [markdown]
# Published for GPUs: a newsletter has 25–30 %, ZeRO 33 %, a lecture 30–40 %, Korthikanti et al. 39 % for a layer split
# over 8 GPUs (table 4). Arithmetic explains at most one third. (25 % is one unit of the *new* four.) Time can be more
# where backward takes less than twice as long as forward. Their layer takes 7.7 ms forward and 11.9 backward, because
# backward overlaps its communication. The Python of `checkpoint` comes on top. Change h to 64: does a small model pay
# more or less? A real GPU says:

# %%
from course_utils.lessons.shared.recorded_times import recorded_times

times = recorded_times("recomputation")
times

# %% [markdown]
# How much memory does that time buy? Recorded on that GPU, the front in time:

# %%
medium = TrainingRun("gpt2-medium", micro_batch=8, seq_len=1024)
none = times.milliseconds["none"]
peaks = {}
for name in times.milliseconds:
    real = measure(medium.replace(recompute=name), source="recorded", device="NVIDIA H200")
    peaks[name] = real.counters["allocated"]
for name, peak in peaks.items():
    saved, longer = peaks["none"] - peak, times.milliseconds[name] - none
    print(
        f"{name:9s} {peak / 1e9:5.2f} GB allocated, {saved / 1e9:4.2f} GB less, "
        f"{longer:5.1f} ms more"
    )
moved, took = 2 * (peaks["none"] - peaks["offload"]), times.milliseconds["offload"] - none
print(f"offload: {moved / 1e9:.1f} GB to the host and back, {moved / took / 1e6:.0f} GB/s")

# %%
from course_utils.lessons.recomputation.figures import pareto_front

points = {name: (100 * (ms / none - 1), peaks[name]) for name, ms in times.milliseconds.items()}
title = f"GPT-2 medium, recorded: the front in time is {', '.join(pareto_front(points))}"
pareto(
    points, title, cost="time added, in percent of the step's", provenance="recorded on NVIDIA H200"
)

# %% [markdown]
# **Full** repeats less than a third of the arithmetic: the head, the loss and the update do not run again. Yet it
# costs more than a third here. **Selective** computes less than full and takes longer, although nothing else used the
# host's CPU. Its policy is Python, called for each operator, and the GPU probably waits for it. Under `torch.compile`
# no policy runs during the step. There *selective* is nearly free, and *full* costs more ([both
# recorded](../docs/evidence.md#memory-against-time)). **Offload** moves what it saves over the PCIe bus twice.
# Compare its speed with the most that generation 5 can carry, 64 GB/s.

# %% [markdown]
# ## In your own script
# Checkpoint each block of somebody else's model: name the class of its blocks.

# %%
from functools import partial

import torch
from torch.utils.checkpoint import checkpoint


def checkpoint_blocks(model, kind):
    """From now on, each module of class `kind` keeps its inputs and runs again in backward."""
    blocks = [module for module in model.modules() if isinstance(module, kind)]
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    print(len(blocks), "blocks run again in backward")


device = "cuda" if torch.cuda.is_available() else "cpu"
layer = torch.nn.TransformerEncoderLayer(64, 4, batch_first=True)
model = torch.nn.TransformerEncoder(layer, num_layers=6).to(device)  # in your script, your model
checkpoint_blocks(model, torch.nn.TransformerEncoderLayer)
model(torch.randn(8, 128, 64, device=device)).square().mean().backward()

# %% [markdown]
# ## Five questions

# %%
from course_utils.lessons import quiz

quiz(6)

# %% [markdown]
# ## Take home
# **Remember** Recomputation trades memory for one more forward. Checkpoints, one live stretch and the loss's tensors
# stay.
#
# **Breaks when** the peak is elsewhere, in the loss or the optimizer; or when random state or autocast is not restored.
#
# **Cheat-sheet line** every k blocks: (L/k + c·k) · 2·s·b·h bytes, c ≈ 17 + 5·a·s/2h eager, 17 flash · cost: at most ⅓
# of a step's FLOPs · selective in eager attention saves 5·a·s²·b per block, for at most 4·b·s²·h FLOPs.
#
# This lesson corrects claims 4, 5, 6, 7, 8 and 27 of [what the sources got wrong](../docs/errata.md).
#
# Now solve the [exercises of this lesson](../exercises/06_recomputation.ipynb).
