# ---
# jupyter:
#   course:
#     minutes: 95
#     cpu_seconds: 30
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 06 · Recomputation
#
# **95 minutes.** You should know what autograd keeps ([lesson 01](01_where_did_the_memory_go.ipynb)) and what a
# [transformer block](../docs/glossary.md#transformer-block) is. You need no GPU.
#
# What forward computed once, it can compute again. Keep fewer activations, and pay in arithmetic: this is [activation
# recomputation](../docs/glossary.md#activation-recomputation), or "activation checkpointing". Texts promise "about 8
# GB", or "50 %" less, for 25 to 40 % more time. When is each number true?

# %% [markdown]
# ## Keep everything, or nothing
# A network is a chain of n nodes f. Each node leaves one value for its backward b, and passes another on. The passed
# value and its gradient always exist, so count only what is *kept*. PyTorch's default is to keep everything: n values
# are kept, and f runs n times.
#
# The other extreme keeps only the chain's input. Then each b must run the chain again from the start.
#
# **Your guess.** How many runs of f does that take in a chain of 48 nodes, the first 48 included?

# %%
from course_utils.interactive.guesses import predict, reveal

predict("06.none", unit="runs")

# %% [markdown]
# Press play, and choose "keep none" when you have seen enough of "keep all".

# %%
from course_utils.lessons.recomputation.widget import schedule_player

schedule_player("keep all", nodes=8)  # change this

# %%
n = 48  # change this
runs = n  # forward
for node in range(n, 0, -1):
    runs += node  # before b of this node, the chain again up to here
print(f"counted: {runs:,} runs of f; n + n·(n + 1)/2 = {n + n * (n + 1) // 2:,}")
print(f"if b costs two f, {(runs + 2 * n) / (3 * n):.1f} times the work of keeping everything")
reveal("06.none", runs, unit="runs")

# %% [markdown]
# Memory is O(1): the input and one value. But work is O(n²), so nobody trains like that. Change 48 to 96: by what
# factor does the work grow?
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
# **Your turn.** At which tick are the most values kept? Write how many they are. `keep_every(n, k).memory` counts them
# tick by tick, as the player does.

# %%
from course_utils.lessons.recomputation.schedules import keep_every


def most_kept(n, k):
    """Return the most values kept at once in a chain of n nodes; k divides n."""
    return 0  # write this with n and k


cases = [(16, 2), (60, 5), (48, 48)]
off = {(n, k): most_kept(n, k) - keep_every(n, k).memory for n, k in cases}
wrong = [f"with n = {n} and k = {k} off by {off[n, k]:+}" for n, k in cases if off[n, k]]
print(f"Not yet: {', '.join(wrong)}." if wrong else "Right.")

# %% [markdown]
# <details><summary>The line</summary>
#
# All n/k checkpoints are there when the last stretch has run again and has left its k values: `n // k + k`.
#
# </details>

# %%
import matplotlib.pyplot as plt

from course_utils.figures import show

ks = [1, 2, 4, 8, 16, 32, 64]  # change this
kept = [keep_every(64, k).memory for k in ks]
reveal("06.k", ks[kept.index(min(kept))], unit="nodes")
fig, ax = plt.subplots(figsize=(7, 2.5))
ax.plot(ks, kept, marker="o", label="kept at most")
ax.plot(ks, [64 / k for k in ks], "--", label="checkpoints")
ax.plot(ks, ks, "--", label="values of a stretch")
ax.set_xscale("log", base=2)
ax.legend()
ax.set(title="Memory is lowest where both parts are equal", xlabel="k", ylabel="values")
show(fig, "The sum is lowest where the falling line of checkpoints meets the stretch's rising one.")
print(f"runs of f: {keep_every(64, 8).forwards}, and with k = 2: {keep_every(64, 2).forwards}")

# %% [markdown]
# The sum is lowest where its derivative is zero, at $k = \sqrt{n}$:
#
# $$\frac{n}{k} + k \qquad -\frac{n}{k^2} + 1 = 0$$
#
# Memory is $2 \sqrt{n}$, for one more forward pass, whatever k is. This is the *square root* that texts speak of. Can
# it be less? Let a stretch that runs again keep checkpoints of its own, and so on down to single nodes. Then memory is
# O(log n), for O(n log n) runs of f (Chen et al., abstract).

# %% [markdown]
# ## By hand
# Write it yourself, as a `torch.autograd.Function`. Forward keeps only the input. Backward runs the block again, now
# with a graph.

# %%
import torch
from torch import nn
from torch.nn import functional as F


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
# `torch.utils.checkpoint.checkpoint` does the same for any function.
# [`use_reentrant`](../docs/glossary.md#use_reentrant) chooses between two variants. Call a chain of four linear layers
# each way, and note what runs. Before you run the cell: in which order do f1 to f4 and b4 to b1 appear?

# %%
import random
from functools import partial

from torch.utils.checkpoint import CheckpointError, checkpoint

again = partial(checkpoint, use_reentrant=False)


class Node(nn.Module):
    def __init__(self, number):
        super().__init__()
        self.layer, self.number = nn.Linear(8, 8), number

    def forward(self, x):
        y = self.layer(x)
        log.append(f"f{self.number}")
        if y.requires_grad:  # backward has reached this node when y's gradient is there
            y.register_hook(lambda dy: log.append(f"b{self.number}"))
        return y


# %%
def keep_everything(block, x):
    return block(x)


ways = {
    "everything kept": keep_everything,
    "by hand": Recomputed.apply,
    "use_reentrant=True": partial(checkpoint, use_reentrant=True),
    "use_reentrant=False": again,
}
for name, call in ways.items():
    log, chain = [], nn.Sequential(*(Node(number) for number in (1, 2, 3, 4)))
    y = call(chain, torch.randn(2, 8, requires_grad=True))  # change this
    log.append("|")
    y.sum().backward()
    print(f"{name:19s} {' '.join(log)}")

# %% [markdown]
# - `True`, the older variant, is the one by hand: backward runs the whole chain again with its own graph, and *reenters*
#   autograd, a backward inside backward. One trap: it needs an *input* that requires a gradient. After a frozen
#   embedding none does, and no weight of the block gets a gradient. Leave out `requires_grad=True`: what happens?
# - `False`, [which PyTorch recommends](https://docs.pytorch.org/docs/stable/checkpoint.html): forward leaves a
#   placeholder for each tensor that autograd would keep. When backward opens the first one, forward runs again and
#   fills them in order. It *stops early*, once the last one is filled. f4 does not run again: backward needs the last
#   layer's input, not its output.
#
# The second forward must *repeat* the first. But [dropout](../docs/glossary.md#dropout-mask) draws random masks, and
# backward runs outside of [autocast](../docs/glossary.md#autocast). Are the gradients still right?


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


def off_by(call, *case):
    """The largest difference from the true gradients, relative to a gradient's norm."""
    pairs = zip(gradients(keep_everything, *case), gradients(call, *case))
    return max(((right - found).norm() / right.norm()).item() for right, found in pairs)


# %%
ways["… False, random state not restored"] = partial(again, preserve_rng_state=False)
print(f"{'off by':36s} in fp32  with dropout  with autocast")
for name, call in ways.items():
    plain, dropout = off_by(call, 0.0, False), off_by(call, 0.5, False)  # change this
    print(f"{name:36s} {plain:7.1%} {dropout:13.1%} {off_by(call, 0.0, True):14.1%}")

# %% [markdown]
# Without its random state, dropout gives wrong gradients, and nothing crashes: training goes on with gradients of a
# network that never ran. `preserve_rng_state=False` is safe only in blocks without randomness. By hand, the block runs
# again outside of autocast, in fp32: gradients are off a little, and recomputed tensors take twice the bytes. (Exercise
# 4 restores everything.)

# %% [markdown]
# ## A block is not a node
# When does the square root not hold? In a transformer the nodes are blocks. A checkpoint is a block's input: b
# sequences of s tokens with h numbers each, 2·s·b·h bytes in 16 bits. But a block that runs again leaves much more than
# one value. Here are the block and the GPT of the course's script. Two things are new: *k* consecutive blocks are
# joined into one stretch, and *you* say how a stretch is called.


# %%
def flash(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Block(nn.Module):
    def __init__(self, h, a, attention=flash):
        super().__init__()
        self.norm1, self.norm2, self.a = nn.LayerNorm(h), nn.LayerNorm(h), a
        self.qkv, self.out, self.attention = nn.Linear(h, 3 * h), nn.Linear(h, h), attention
        self.mlp = nn.Sequential(nn.Linear(h, 4 * h), nn.GELU(), nn.Linear(4 * h, h))

    def forward(self, x):
        b, s, h = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, s, 3 * self.a, -1).transpose(1, 2).chunk(3, 1)
        y = self.attention(q, k, v)
        x = x + self.out(y.transpose(1, 2).reshape(b, s, h))
        return x + self.mlp(self.norm2(x))


# %%
V = 50257


class GPT(nn.Module):
    def __init__(self, h, L, a, k=1, attention=flash):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(V, h), nn.Embedding(1024, h)
        blocks = [Block(h, a, attention) for _ in range(L)]
        self.stretches = nn.ModuleList(nn.Sequential(*blocks[i : i + k]) for i in range(0, L, k))
        self.norm = nn.LayerNorm(h)

    def forward(self, ids, call):
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        for stretch in self.stretches:
            x = call(stretch, x)
        return self.norm(x)

    def loss(self, x, targets):  # the head shares the embedding's weights
        return F.cross_entropy(F.linear(x, self.tokens.weight).flatten(0, 1), targets.flatten())


# %% [markdown]
# Run one of GPT-2 XL's blocks: how much more does PyTorch allocate? (Output and kept input are equally large, so the
# counter grows by what the block keeps.) Inside `on_gpu()`, "cuda" is your GPU or a [simulated
# one](../docs/glossary.md#simulated-gpu).

# %%
from course_utils import on_gpu

b, s, h, L = 32, 1024, 1600, 48  # change this
with on_gpu(needs="4 GB"):
    block = Block(h, 25).to("cuda", torch.bfloat16)
    x = torch.randn(b, s, h, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    block(x)  # the first product allocates cuBLAS's workspace, which persists
    before = torch.cuda.memory_allocated()
    y = block(x)
    input_size, kept = x.nbytes, torch.cuda.memory_allocated() - before
    del block, x, y
c = kept / input_size
print(f"one checkpoint {input_size / 1e6:.1f} MB, a block keeps {kept / 1e6:.1f} MB: c = {c:.2f}")

# %% [markdown]
# A block keeps as much as c checkpoints. (Change 1024 to 128: does c depend on s with a flash kernel?) Counted in
# checkpoints, L blocks now need
#
# $$\frac{L}{k} + c \cdot k$$
#
# **Your guess.** With how many of GPT-2 XL's 48 blocks per checkpoint is the peak of forward and backward lowest? The
# loss takes all 32 sequences at once.

# %%
predict("06.blocks", unit="blocks")


# %%
def forward_backward(model, text, call, chunks=1, autocast=False):
    """Bytes that forward and loss keep for backward, and the most that all allocate."""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        x, targets = model(text[:, :-1], call), text[:, 1:]
        if chunks == 1:
            loss = model.loss(x, targets)
        else:  # lesson 05: an eighth of the logits at a time
            parts = zip(x.chunk(chunks, 1), targets.chunk(chunks, 1))
            loss = sum(again(model.loss, *part) for part in parts) / chunks
    kept = torch.cuda.memory_allocated() - before
    loss.backward()
    return kept, torch.cuda.max_memory_allocated()


# %%
ks = [1, 2, 4, 8]  # change this
kept, peaks = {}, {}
with on_gpu(needs="30 GB"):
    text = torch.randint(V, (b, s + 1), device="cuda")
    for k in ks:
        model = GPT(h, L, 25, k).to("cuda", torch.bfloat16)
        for chunks in (1, 8):
            model.zero_grad()
            kept[k, chunks], peaks[k, chunks] = forward_backward(model, text, again, chunks)
    del model, text
best = min(ks, key=lambda k: peaks[k, 1])
reveal("06.blocks", best, unit="blocks")

# %%
fig, ax = plt.subplots(figsize=(7, 3))
for chunks, words in {1: "loss in one piece", 8: "loss in 8 chunks"}.items():
    ax.plot(ks, [peaks[k, chunks] / 1e9 for k in ks], marker="o", label=words)
formula = [input_size * (L / k + c * k) / 1e9 for k in ks]
ax.plot(ks, formula, "--", label="(L/k + c·k) checkpoints")
ax.legend()
ax.set(xlabel="k, blocks per checkpoint", ylabel="GB at the peak", ylim=0)
ax.set(title=f"√48 ≈ 7 blocks per checkpoint are too many; {best} are best with a whole loss")
show(fig, "All three curves rise to the right; the whole loss's has its minimum further right.")

# %% [markdown]
# The square root holds for nodes that keep as little as a checkpoint. A block keeps c times that, so the formula's
# optimum moves to $\sqrt{L/c}$, below 2: nearly one checkpoint per block. With the loss in 8 chunks, the simulation
# agrees. With the loss in one piece, the best k is larger, because forward and backward have *two* high points:
#
# - In backward of the loss, all checkpoints exist, and three tensors of s·b·V numbers ([lesson
#   05](05_activations.ipynb)): fewer checkpoints help.
# - When the first stretch runs again, the loss's tensors are gone: shorter stretches help.
#
# The best k balances both. (The weights, 3 GB, lie below the two upper curves. An optimizer's states would, too.)

# %% [markdown]
# ## "About 8 GB" and "50 %": are they right?
# Three claims about GPT-2 XL with 32 sequences. [ZeRO](../docs/glossary.md#zero): about 60 GB of activations, "about 8
# GB" with checkpointing, [*the square root of the total*](https://arxiv.org/abs/1910.02054) (section 3.2). A
# newsletter: 8–9 GB. Slides: checkpointing "reduces activations by about 50 %".
#
# **Your guess.** By how many percent does full recomputation, k = 1, reduce what is kept when the blocks' forward has
# ended, before the loss?

# %%
predict("06.percent", unit="%")

# %%
with on_gpu(needs="100 GB"):
    model = GPT(h, L, 25).to("cuda", torch.bfloat16)
    text = torch.randint(V, (b, s + 1), device="cuda")
    everything, _ = forward_backward(model, text, keep_everything)
    del model, text
zero, one_each = 12 * 2 * h * b * s * L, 2 * s * b * h * L
outside, log_softmax = 2 * 2 * s * b * h, 2 * s * b * V  # what norm, head and loss keep
sizes = {
    "ZeRO's total, 12·h·b·s·L numbers": zero,
    "divided by √48: ZeRO's “about 8 GB”": zero / L**0.5,
    "one checkpoint per block": one_each,
    "… plus inputs of last norm and head": one_each + outside,
    "… plus the loss's log-softmax": one_each + outside + log_softmax,
    "kept after the loss": kept[1, 1],
    "the same, nothing recomputed": everything,
}
for name, size in sizes.items():
    print(f"{name:37s} {size / 1e9:5.2f} GB")
left = (kept[1, 1] - log_softmax) / (everything - log_softmax)
reveal("06.percent", 100 * (1 - left), unit="%")

# %% [markdown]
# 60/√48 and 8–9 GB are close to what exists after the loss: checkpoints and
# [log-softmax](../docs/glossary.md#log-softmax). That is chance: neither is a square root of anything. Change 1024 to
# 512 in the cell of `Block`'s bytes, and run from there: which rows halve? And 50 % is far off.
#
# **The gap** between the sum and what is kept is too small for these digits: a workspace of cuBLAS, and what blocks have
# beyond their tensors. A `TrainingRun` says the same in one line:

# %%
from course_utils import TrainingRun, estimate

xl = TrainingRun("gpt2-xl", micro_batch=32, precision="bf16", dropout=0.0)
for policy in ("full", "selective", "none"):  # change this
    activations = estimate(xl.replace(recompute=policy))["activations"]
    print(f"recompute={policy:9s} {activations / 1e9:5.2f} GB kept after the loss, estimated")

# %% [markdown]
# Not even the *selective* policy comes near 50 %. Here it is, with all others.

# %% [markdown]
# ## Every policy
# Now a whole training step: GPT-2, 16 sequences of 1,024 tokens, autocast to bf16, fused AdamW. Under autocast the
# stream between blocks is in fp32, so checkpoints are twice as large.

# %%
with on_gpu():
    block, start = Block(768, 12).to("cuda"), torch.cuda.memory_allocated()
    x = torch.randn(16, 1024, 768, device="cuda", requires_grad=True)
    with torch.autocast("cuda", torch.bfloat16):
        y = block(x)
    print(f"one checkpoint {x.nbytes / 1e9:.2f} GB", end=", ")
    print(f"a block keeps {(torch.cuda.memory_allocated() - start - y.nbytes) / 1e9:.2f} GB")
    del block, x, y


# %%
def weigh(call, k=1, chunks=1, b=16):
    """The peak of the second step, by torch.cuda's counter."""
    start = torch.cuda.memory_allocated()  # what earlier cells have left
    model = GPT(768, 12, 12, k).to("cuda")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    text = torch.randint(V, (b, 1025), device="cuda")
    for _ in range(2):
        forward_backward(model, text, call, chunks, autocast=True)
        optimizer.step()
        optimizer.zero_grad()
    return torch.cuda.max_memory_allocated() - start


with on_gpu(needs="20 GB"):
    print(f"nothing recomputed: the peak is {weigh(keep_everything) / 1e9:.2f} GB")

# %% [markdown]
# **Your guess.** There are 12 blocks. How high is the peak if each keeps only its input?

# %%
predict("06.full", unit="GB")

# %% [markdown]
# The *selective* policy keeps the results of matrix products and attention, and runs the cheap rest again. `context_fn`
# says which results to keep. PyTorch chooses one of several attention kernels: with a mask, in fp32 or on another GPU
# it may not be flash. So list them all. One that is not in the list runs again, without a word.

# %%
from torch.utils.checkpoint import create_selective_checkpoint_contexts

aten = torch.ops.aten
KEPT = [
    aten.mm.default,
    aten.addmm.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
]
selective = partial(again, context_fn=partial(create_selective_checkpoint_contexts, KEPT))

# %% [markdown]
# Or keep tensors in the *host's* memory: [offloading](../docs/glossary.md#offloading). `save_on_cpu` copies there what
# autograd saves, and back in backward. Around a checkpoint, that is the block's input alone. Around `block(x)`, it would
# be all that the block keeps (and the weights, which hooks of your own can skip: see `Offloading` in
# [recompute.py](../course_utils/networks/recompute.py)).


# %%
def offload(block, x):
    with torch.autograd.graph.save_on_cpu(pin_memory=True):
        return again(block, x)


# %%
from course_utils.lessons.shared.recorded_front import FRONT, PROVENANCE

policies = {"none": (keep_everything, 1), "full": (again, 1), "every-3": (again, 3)}
policies |= {"selective": (selective, 1), "offload": (offload, 1)}
# change this: policies["every-2"] = again, 2
with on_gpu(needs="20 GB"):
    weighed = {name: weigh(*policy) for name, policy in policies.items()}
print(f"the peak in GB; counted: {PROVENANCE}")
for name, peak in weighed.items():
    counted = FRONT["eager"][name].peak
    gap = 100 * (peak / counted - 1)
    print(f"{name:11s} {peak / 1e9:5.2f} weighed here, {counted / 1e9:5.2f} counted, {gap:+.2f} %")
reveal("06.full", weighed["full"])

# %% [markdown]
# A real GPU has taken these very steps, and its counter nearly agrees. (**The gap**: cuBLAS's workspaces are larger on an
# H200, and the allocator's blocks lie differently.) Then add "every-2": predict its peak.
#
# Full recomputation frees 5 GB, and the other policies for blocks hardly more. At this peak, in backward of the loss,
# states and the loss's tensors exist, and none of them touches those. So combine it with the loss in chunks. To see
# *when* memory is used, note `memory_allocated()` whenever a module's forward ends, and whenever backward reaches its
# output:


# %%
def note(module, inputs, y):
    curve.append(torch.cuda.memory_allocated() / 1e9)
    if y.requires_grad:
        y.register_hook(lambda dy: curve.append(torch.cuda.memory_allocated() / 1e9))


# %%
fig, axes = plt.subplots(1, 4, figsize=(10, 2.8), sharey=True)
in_chunks, counted = {}, FRONT["loss in 8 chunks"]
with on_gpu(needs="20 GB"):
    hook = nn.modules.module.register_module_forward_hook(note)
    for ax, name in zip(axes, ("none", "selective", "full", "every-3")):  # change this
        curve = []
        in_chunks[name] = weigh(*policies[name], chunks=8)
        second = curve[len(curve) // 2 :]  # of two steps
        ax.fill_between(range(len(second)), second)
        ax.set(title=f"{name}, peak {in_chunks[name] / 1e9:.2f} GB", ylim=0)
        ax.set_xlabel(f"counted {counted[name].peak / 1e9:.2f} GB")
    hook.remove()
axes[0].set_ylabel("GB allocated")
show(fig, "none: one mountain. full: 12 small teeth in backward. every-3: four larger teeth.")

# %% [markdown]
# Each curve is a step, module by module. (The peak may lie between two notes, as in the loss.) Count the teeth: one for
# each stretch that runs again. Now *full* needs less than half of *none*. It even needs less than *every-3*, which has
# the highest teeth.
#
# There is another [selective recomputation](../docs/glossary.md#selective-recomputation), the one of [Korthikanti et
# al. 2022](https://arxiv.org/abs/2205.05198), section 5. It recomputes only attention's core, from q·kᵀ to weights·v.
# A [flash](../docs/glossary.md#flashattention) kernel does that anyway.

# %% [markdown]
# ## What does it cost in arithmetic?
# Nearly all arithmetic is matrix products. Backward takes twice as much as forward: for y = x·Wᵀ it computes dL/dx
# *and* dL/dW. So a step is three units, and one more forward would be a third. But the head is outside of the blocks,
# and `checkpoint` stops early.
#
# **Your guess.** By how many percent does full recomputation raise the arithmetic of this GPT-2's step?

# %%
predict("06.third", unit="%")

# %% [markdown]
# **Estimate**: equation 7 of Korthikanti et al. gives a step's [FLOPs](../docs/glossary.md#flops).
#
# $$72 b L s h^2 \left(1 + \frac{s}{6h} + \frac{V}{12 h L}\right)$$
#
# **Measure**: PyTorch counts the FLOPs of its matrix products. The eager attention is lesson 05's.

# %%
from torch.utils.flop_counter import FlopCounterMode


def eager(q, k, v):
    s = q.shape[-2]
    mask = torch.full((s, s), float("-inf"), dtype=q.dtype, device=q.device).triu(1)
    return ((q / q.shape[-1] ** 0.5) @ k.mT + mask).softmax(-1) @ v


def flops(call, attention=flash):
    """FLOPs of matrix products in one step of GPT-2 with one sequence."""
    model = GPT(768, 12, 12, 1, attention).to("cuda", torch.bfloat16)
    with FlopCounterMode(display=False) as counter:
        forward_backward(model, torch.randint(V, (1, 1025), device="cuda"), call)
    return counter.get_total_flops()


# %%
s, h, L = 1024, 768, 12
published = 72 * L * s * h * h + 12 * L * s * s * h + 6 * s * h * V
core = 4 * L * s * s * h  # the attention core's forward, two products
with on_gpu(needs="20 GB"):
    plain = flops(keep_everything, eager)
    whole, full = flops(keep_everything), flops(again)
    print(f"eager attention: counted − eq. 7 = {plain - published:+,}")
    print(f"flash attention: counted − eq. 7 = {whole - published:+,}; half a core {core // 2:,}")
    print(f"full recomputation: {full - whole:+,} FLOPs; selective: {flops(selective) - whole:+,}")
forward = 24 * L * s * h * h + core
print(f"one more forward: {forward:,}; without its last product {forward - 8 * L * s * h * h:,}")
reveal("06.third", 100 * (full / whole - 1), unit="%")

# %% [markdown]
# **The gap.** Flash attention's backward computes q·kᵀ again: one of the core's two products. And full recomputation
# leaves out the MLP's second product, 8·s·h² per block. Its output is only added to the stream, and backward never
# needs it. (With dropout behind it, as in the published GPT-2, it runs again.) So "one third" is a limit: the cost
# depends on the head, and on how a block ends. Put 3 for k, the 1 in `flops`: why does it repeat more?

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
def core_again(L, h, a, s, V=51_200):
    """What the core is of the activations, and what eq. 8 and two products add to a step."""
    step = 72 * L * s * h * h * (1 + s / (6 * h) + V / (12 * h * L))  # eq. 7, one sequence
    saves = 5 * a * s / h / (34 + 5 * a * s / h)
    return saves, 12 * L * s * s * h / step, 4 * L * s * s * h / step


sizes = {"GPT-3": (96, 12_288, 96, 2048), "MT-NLG 530B": (105, 20_480, 128, 2048)}
sizes["Llama-3 8B"] = 32, 4096, 32, 4096  # the lecture's example, with its 97 and 17 GB
with on_gpu(needs="20 GB"):
    more = flops(keep_everything, partial(again, eager)) - plain
for name, letters in sizes.items():  # change this
    saves, paper, products = core_again(*letters)
    print(f"{name:11s} saves {saves:.0%}; eq. 8 adds {paper:.1%}, two products {products:.2%}")
reveal("06.core", 100 * core_again(*sizes["GPT-3"])[2], unit="%")
print(f"GPT-2, counted: {more:+,} FLOPs, {more / core:.1f} of the core's two products")

# %% [markdown]
# Memory holds for GPT-3: 70 %. It is not an upper limit: the lecture's own example saves more. The 2.7 % follow from
# equation 8, where $\frac{s}{6h}$ becomes $\frac{s}{3h}$. That adds the core's *whole* share of a step, all three
# units. But recomputation runs only forward, so it costs less than its authors say, for every model. And PyTorch stops
# early: it repeats only q·kᵀ.

# %% [markdown]
# ## Memory against time
# Arithmetic is not time. For time, one needs a real GPU that does nothing else. Here are the steps of *Every policy*,
# [recorded](../docs/evidence.md#memory-against-time): executed operator by operator ("eager"), and compiled by
# `torch.compile`, which is lesson 07's subject. With a *budget*, `torch._functorch.config.activation_memory_budget`, the
# compiler itself chooses what to recompute.
#
# A step is on the *front* (dashed) if no other needs both less memory and less time. Predict: which of the eager steps
# are on it?

# %%
every = {(how, name): step for how in FRONT for name, step in FRONT[how].items()}


def beaten(one):
    """Does another step need no more memory and no more time?"""
    others = [other for other in every.values() if other != one]
    return any(other.peak <= one.peak and other.ms <= one.ms for other in others)


# %% tags=["hide-input"]
front = sorted(one for one in every.values() if not beaten(one))
fig, ax = plt.subplots(figsize=(8, 4))
ax.plot([one.peak / 1e9 for one in front], [one.ms for one in front], "--", color="gray")
for how, marker in zip(FRONT, ("o", "s", "^", "x")):
    xs = [one.peak / 1e9 for one in FRONT[how].values()]
    ax.scatter(xs, [one.ms for one in FRONT[how].values()], marker=marker, label=how)
    for name in {"none", "full", "selective", "offload"} & set(FRONT[how]):
        peak, ms, _ = FRONT[how][name]
        ax.annotate(name, (peak / 1e9 + 0.2, ms - 9 if how == "compiled" else ms + 2))
ax.legend(loc="lower right")
ax.set(xlabel="GB at the peak", ylabel="ms per step", xlim=(0, 18), ylim=(0, 140))
ax.set(title="Compiled steps need half the time of eager ones, whatever is recomputed")
show(fig, f"Compiled steps and one eager one are on the front; {PROVENANCE}.")

# %%
places = {step: place for place, step in every.items()}
print(f"On the front, {PROVENANCE}:")
for one in front:
    print(f"{one.peak / 1e9:6.2f} GB {one.ms:6.1f} ms  {', '.join(places[one])}")
for how in ("eager", "loss in 8 chunks", "compiled"):
    none, full, some = (FRONT[how][name].ms for name in ("none", "full", "selective"))
    print(f"{how}, time over none: full {full / none - 1:+.0%}, selective {some / none - 1:+.0%}")

# %% [markdown]
# Texts say that checkpointing costs 25–30 % (a newsletter), 33 % (ZeRO), 30–40 % (a lecture), 39 % for a layer split
# over 8 GPUs (Korthikanti et al., table 4). Arithmetic explains at most a third, and this GPT-2 pays less. Time can be
# more where backward takes less than twice as long as forward: their layer takes 7.7 ms forward and 11.9 backward,
# because backward overlaps its communication.
#
# **Selective** repeats no product. Compiled, it is nearly free. Eager, it takes *longer* than full: its policy is
# Python, called for each operator, and the GPU probably waits for it. The compiler's **budget** is never on the front
# here: *full* or *selective* under the compiler need less memory in less time, and budget 0 needs more memory than 0.1.
# One recording of one model: measure yours.
#
# ### Offloading: does the copy hide?
# Offloading costs no arithmetic, but time on the link to the host. Copies leave during forward and return during
# backward. So one way must fit into forward, a third of the step's arithmetic. How many forwards long is it? An
# *estimate* for GPT-2 XL and 32 sequences, with peak rates of data sheets ([gpus.toml](../course_utils/gpus.toml)):

# %%
cards = {"A100, PCIe 4": (312e12, 31.5e9), "H100, PCIe 5": (989e12, 63e9)}
cards["Grace Hopper, NVLink"] = 989e12, 450e9  # change this
b, s, h, L = 32, 1024, 1600, 48
work = 24 * b * L * s * h * h + 4 * b * L * s * s * h + 2 * b * s * h * V
for card, (rate, link) in cards.items():
    both = [size / link / (work / rate) for size in (everything - log_softmax, one_each)]
    print(f"{card:20s} all activations {both[0]:4.1f} forwards, checkpoints {both[1]:.1f}")
moved = 2 * 12 * 4 * 16 * 1024 * 768  # GPT-2: inputs of 12 blocks in fp32, there and back
longer = FRONT["eager"]["offload"].ms - FRONT["eager"]["full"].ms
print(f"recorded, GPT-2: {moved / 1e9:.2f} GB in {longer:.1f} ms, {moved / longer / 1e6:.0f} GB/s")
times = FRONT["eager"]["offload-all"].ms / FRONT["eager"]["none"].ms
print(f"recorded, all activations offloaded: {times:.1f} times as long as with none")

# %% [markdown]
# Real trainings reach about half of the peak (Korthikanti et al.: 54.2 %), so a forward lasts twice as long. Even then,
# over PCIe the copies of *all* activations cannot hide. Over
# [NVLink-C2C](https://developer.nvidia.com/blog/nvidia-grace-hopper-superchip-architecture-in-depth/) they can. The
# checkpoints, 5 GB, hide over PCIe even at the peak.
#
# All of it holds only for copies on a *stream of their own*. `save_on_cpu` copies on the stream that computes, so times
# add up. The *recording* shows it: *offload* takes as long as PCIe 5 needs for its bytes, on top of *full*. Nothing
# hides. With streams, [DeepSpeed](https://deepspeed.readthedocs.io/en/latest/activation-checkpointing.html) has *CPU
# checkpointing*, and TRL [a context for any model](https://huggingface.co/docs/trl/main/en/model_utils).

# %% [markdown]
# ## When it fails
# **Your turn.** Stochastic depth leaves out a layer in half of the steps. In some steps, backward of this module raises
# a `CheckpointError`: the second run saved other tensors than the first. Change one line, and keep the randomness.


# %%
class Sometimes(nn.Module):
    def forward(self, x):
        skip = random.random() < 0.5  # write this line again, in another way
        return x if skip else x.sin() * x


random.seed(0)
torch.manual_seed(0)
skipped, problem = 0, ""
try:
    for _ in range(40):
        x = torch.randn(8, requires_grad=True)
        y = again(Sometimes(), x)
        y.sum().backward()
        skipped += torch.equal(x, y)
except CheckpointError:
    problem = "backward raised a CheckpointError"
if not problem and not 10 <= skipped <= 30:
    problem = f"the layer is left out in {skipped} of 40 steps"
print(f"Not yet: {problem}." if problem else "Right.")

# %% [markdown]
# <details><summary>The line</summary>
#
# `skip = torch.rand(()) < 0.5`. `checkpoint` restores torch's random state, not Python's or NumPy's.
#
# </details>
#
# You get this error if the second run saves tensors of another number, shape or format. Usual causes: a counter or cache
# that the first run changed, a closure over a loop's variable (exercise 2), a switch to `eval()` between forward and
# backward. If only *values* differ, nobody notices. `torch.utils.checkpoint.set_checkpoint_debug_enabled(True)` lists
# the operators of both runs.
#
# And sometimes checkpointing changes nothing, or little:

# %%
with on_gpu(needs="20 GB"):
    in_one = weigh(again, k=12, chunks=8)
    alone = [weigh(call, chunks=8, b=1) for call in (keep_everything, again)]  # change this
print(f"one for all blocks: {in_chunks['none'] / 1e9:.2f} GB without, {in_one / 1e9:.2f} with")
print(f"one sequence: {alone[0] / 1e9:.2f} GB without, {alone[1] / 1e9:.2f} with")

# %% [markdown]
# One checkpoint around all blocks runs them again in one piece, and all their activations are back at the same time.
# With one sequence, the peak is weights, states and gradients, and hardly an activation. A third reason:
# [transformers](https://github.com/huggingface/transformers/blob/main/src/transformers/modeling_layers.py) recomputes a
# layer only in training mode, after `model.train()`.
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
# ## The script's next line
# Your script computes its loss in chunks since [lesson 05](05_activations.ipynb). Now checkpoint each block: one line.
# **Predict** the peak. Then make the change in `my_train.py`, save, and run the cell again.

# %%
from course_utils.lessons.shared.growing_script import script

script(6)

# %% [markdown]
# The peak halves. What is left: weights and states at 12 bytes per parameter, an eighth of the loss's tensors, the
# checkpoints, and autocast's 16-bit copies of the weights. The order of these two lessons' lines does not matter for
# the result. But alone, neither halves the peak of lesson 03's script.

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
# **Cheat-sheet line** every k blocks: (L/k + c·k) · 2·s·b·h bytes, c ≈ 16 with flash attention, 17 with dropout, eager
# 17 + 5·a·s/2h · cost: at most ⅓ of a step's FLOPs · *selective*
# in eager attention saves 5·a·s²·b per block, for at most 4·b·s²·h FLOPs.
#
# This lesson corrects claims 4, 5, 6, 7, 8 and 27 of [what the sources got wrong](../docs/errata.md).
#
# Now solve the [exercises of this lesson](../exercises/06_recomputation.ipynb).
