# ---
# jupyter:
#   course:
#     minutes: 55
#     cpu_seconds: 20
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 16 · LoRA
#
# **55 minutes.** You should know the 16 bytes per parameter ([lesson 02](02_adam.ipynb)) and what a linear layer keeps
# for backward ([lesson 05](05_activations.ipynb)). You need no GPU: `on_gpu()` simulates one, without values. What
# needs values runs on the CPU.
#
# You want to teach a trained model a little more. Must all of its weights learn? [LoRA](../docs/glossary.md#lora)
# freezes them and trains a few new ones. What does that save, and what not? Whether the frozen ones need 16 bits is
# [lesson 17](17_quantization.ipynb).

# %% [markdown]
# ## Two thin matrices
# LoRA freezes a weight matrix W and learns a *difference* ΔW, the product of two thin matrices. B has r columns, A has
# r rows, and the rank r is small ([Hu et al. 2022](https://arxiv.org/abs/2106.09685), section 4.1).
#
# $$\Delta W = B A$$

# %%
from course_utils.lessons.lora.figures import lora_picture

lora_picture(n_out=4096, n_in=4096, rank=64)

# %% [markdown]
# Only r·(n_out + n_in) numbers learn, not n_out·n_in. **Your guess.** Llama-3 8B, rank 16, on attention's four matrices
# in every block. What percentage of the model's parameters learns?

# %%
from course_utils.interactive.guesses import predict, reveal

predict("16.percent", unit="%")

# %%
import torch

from course_utils import TrainingRun, on_gpu

llama = TrainingRun("llama3-8b", micro_batch=1, seq_len=512).model
matrices = [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096)]  # change this
share = {}
for r in (2, 8, 16, 64):
    learn = 0
    for n_out, n_in in matrices:
        A, B = torch.empty(r, n_in), torch.empty(n_out, r)
        learn += llama.layers * (A.numel() + B.numel())
    share[r] = 100 * learn / llama.parameters
    size = 16 * learn / 1e9
    print(f"r = {r:2d}: {learn:10,} numbers, {share[r]:.2f} % of N, at most {size:.2f} GB")
reveal("16.percent", share[16], unit="%")

# %% [markdown]
# "At most" counts 16 bytes per number: the factor, its gradient and Adam's two moments in fp32. Ranks from 2 to 64 are
# usual: Hu et al. tried 1 to 64 for GPT-3 (section 7.2), and the QLoRA paper took 64.
#
# Which matrices? Hu et al. adapt only attention's, "both for simplicity and parameter-efficiency" (section 4.2), and
# many followed them. [Dettmers et al. 2023](https://arxiv.org/abs/2305.14314) needed LoRA on *all* linear layers of the
# blocks to match full fine-tuning (section 4). Add the MLP's matrices, two of (14336, 4096) and one of (4096, 14336),
# and predict the last line.

# %% [markdown]
# ## By hand
# The layer computes both paths: the frozen one, and x through A and then B, times a scale. (Why alpha/r? That comes
# later.)


# %%
from torch import nn
from torch.nn import functional as F


class Lora(nn.Module):
    def __init__(self, base, r, alpha):
        super().__init__()
        self.base, self.scale = base.requires_grad_(False), alpha / r
        self.A = nn.Parameter(base.weight.new_empty(r, base.in_features))
        self.B = nn.Parameter(base.weight.new_zeros(base.out_features, r))
        nn.init.normal_(self.A, std=base.in_features**-0.5)

    def forward(self, x):
        return self.base(x) + self.scale * (x @ self.A.T) @ self.B.T


# %% [markdown]
# At first, B is zero and A is random, so the layer is the old one. **Your guess.** After the first backward, how many
# of the two factors have a nonzero gradient?

# %%
predict("16.factors", unit="of two")

# %% [markdown]
# Estimate: with $G = \frac{dL}{d\Delta W}$, the chain rule gives
#
# $$\frac{dL}{dB} = G A^T \qquad \frac{dL}{dA} = B^T G$$
#
# Lecture slides write ΔW = A·Bᵀ, with B zero and on the *input's* side. Measure four ways to start:

# %%
torch.manual_seed(0)
starts = {"paper: B·A, B zero": (0, 1), "slides: A·Bᵀ, B zero": (1, 0)}
starts |= {"both zero": (0, 0), "both Gaussian": (1, 1)}
G = torch.randn(48, 64)
sizes = {}
for name, (out_side, in_side) in starts.items():
    left = (out_side * torch.randn(48, 4)).requires_grad_()  # the paper's B, the slides' A
    right = (in_side * torch.randn(4, 64)).requires_grad_()  # the paper's A, the slides' Bᵀ
    difference = left @ right
    (G * difference).sum().backward()
    sizes[name] = [left.grad.norm().item(), right.grad.norm().item()]
    both = "gradients: output side {:3.0f}, input side {:3.0f}".format(*sizes[name])
    print(f"{name:21s} |ΔW| {difference.norm():3.0f}, {both}")
reveal("16.factors", sum(size > 0 for size in sizes["paper: B·A, B zero"]), unit="of two")

# %% [markdown]
# If B is zero, so is dL/dA: A waits one step for B. Two zeros would wait for each other forever. Two Gaussians do not
# start from the given model.
#
# **Your turn.** After training, *merge*: one matrix that does what both paths do, so that LoRA costs nothing any more.
# Write it.

# %%
base, x = nn.Linear(64, 48), torch.randn(10, 64)
layer = Lora(base, r=4, alpha=8)  # change this
nn.init.normal_(layer.B)  # as if B had learned something
with torch.no_grad():
    merged = base.weight  # write this line again, with layer.A, layer.B and layer.scale
    off = (layer(x) - F.linear(x, merged, base.bias)).norm() / layer(x).norm()
    rank = torch.linalg.matrix_rank(merged - base.weight, rtol=1e-4).item()
if off < 0.001:
    print(f"Right: of W's size, and the difference has rank {rank}.")
else:
    print(f"Not yet: the outputs differ by {off:.0%}, the difference has rank {rank}.")

# %% [markdown]
# <details><summary>The line</summary>
#
# `merged = base.weight + layer.scale * layer.B @ layer.A`. Change r to 64: which rank?
#
# </details>

# %% [markdown]
# ## What LoRA saves
# Only parameters that learn have gradients and optimizer states. And activations? Weigh a step of GPT-2. Here is the
# growing script's model, its linear layers by name:


# %%
class Block(nn.Module):
    def __init__(self, h, a):
        super().__init__()
        self.norm1, self.norm2, self.a = nn.LayerNorm(h), nn.LayerNorm(h), a
        self.qkv, self.out = nn.Linear(h, 3 * h), nn.Linear(h, h)
        self.up, self.down = nn.Linear(h, 4 * h), nn.Linear(4 * h, h)

    def forward(self, x):
        b, s, h = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, s, 3 * self.a, -1).transpose(1, 2).chunk(3, 1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # flash, in bf16
        x = x + self.out(y.transpose(1, 2).reshape(b, s, h))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


# %%
class GPT(nn.Module):
    def __init__(self, h=768, L=12, a=12, V=50257):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(V, h), nn.Embedding(1024, h)
        self.blocks = nn.Sequential(*(Block(h, a) for _ in range(L)))
        self.norm, self.head = nn.LayerNorm(h), nn.Linear(h, V, bias=False)
        self.head.weight = self.tokens.weight
        for table in (self.tokens, self.positions):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, ids):
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        return self.head(self.norm(self.blocks(x)))


# %%
ATTENTION, ALL = ("qkv", "out"), ("qkv", "out", "up", "down")


def add_lora(model, names, r, alpha):
    model.requires_grad_(False)  # before the factors, which learn
    for block in model.blocks:
        for name in names:
            setattr(block, name, Lora(getattr(block, name), r, alpha))


def learned(model):
    return [weight for weight in model.parameters() if weight.requires_grad]


def loss_of(model, ids):
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


# %% [markdown]
# **Your guess.** 4 sequences of 512 tokens under [autocast](../docs/glossary.md#autocast): weights in fp32, products in
# bf16. By how many percent does LoRA of rank 8 on all matrices of the blocks reduce what forward keeps for backward?

# %%
predict("16.activations", unit="%")

# %% [markdown]
# Read the counter four times: with the weights, after the loss, after the optimizer, and at the peak. A first step
# makes the optimizer's states and cuBLAS's [workspaces](../docs/glossary.md#workspace).


# %%
def weigh(names, b=4, s=512, r=8):
    """What a training step of GPT-2 takes, by the GPU's own counter."""
    with on_gpu(), torch.device("cuda"):
        model, ids = GPT(), torch.randint(50257, (b, s + 1))
        if names:
            add_lora(model, names, r, alpha=r)
        weights, optimizer = torch.cuda.memory_allocated(), torch.optim.AdamW(learned(model))
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            with torch.autocast("cuda", torch.bfloat16):
                loss = loss_of(model, ids)
            kept = torch.cuda.memory_allocated() - before
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        peak = torch.cuda.max_memory_allocated()
    parts = {"parameters": weights, "optimizer_states": before - weights, "activations": kept}
    return parts | {"temporaries": peak - sum(parts.values())}


# %%
from course_utils.figures import stack

step = {"all weights": weigh(()), "LoRA on attention": weigh(ATTENTION)}
step["LoRA on all matrices"] = weigh(ALL)
kept = {name: parts["activations"] for name, parts in step.items()}
reveal("16.activations", 100 * (1 - kept["LoRA on all matrices"] / kept["all weights"]), unit="%")
title = "LoRA removes the optimizer states; what forward keeps stays"
stack(step, title, provenance=f"torch.cuda's counters, second step · torch {torch.__version__}")

# %% [markdown]
# (*Activations* are all that forward keeps, with autocast's 16-bit copies of weights. *Optimizer states* include 17 MB
# of workspaces. *Temporaries* are what the peak has beyond all that: gradients, above all the logits'.)
#
# `TrainingRun` says the same in a line. Does it agree?

# %%
from course_utils import estimate

full = TrainingRun("gpt2", micro_batch=4, seq_len=512, precision="amp-bf16", dropout=0.0)
runs = [full, full.replace(lora_rank=8)]
runs.append(full.replace(lora_rank=8, lora_targets=("attention", "mlp")))  # change this
for (name, parts), run in zip(step.items(), runs):
    counted, total = sum(parts.values()), estimate(run).total
    both = f"counted {counted / 1e9:.3f} GB, estimated {total / 1e9:.3f} GB"
    print(f"{name:21s} {both}, gap {(total - counted) / 1e6:.1f} MB")

# %% [markdown]
# **The gap**: 17 MB are workspaces. And the counter sees the allocator's blocks, which are a little larger than the
# tensors in them (lesson 12).
#
# But why do activations stay? Ask a layer, with lesson 05's hooks.

# %%
x = torch.randn(2048, 768, requires_grad=True)
layers = {"plain": nn.Linear(768, 768)}
layers["frozen"] = nn.Linear(768, 768).requires_grad_(False)
layers["frozen, with LoRA"] = Lora(nn.Linear(768, 768), r=8, alpha=8)  # change this


def note(tensor):
    shapes.append(tuple(tensor.shape))
    return tensor


for name, layer in layers.items():
    shapes = []
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        layer(x)
    print(f"{name:18s} keeps", *shapes)

# %% [markdown]
# W of (768, 768) exists anyway, and dL/dx needs it. A frozen layer keeps nothing else: its input was for dL/dW. A LoRA
# layer needs this input for dL/dA, and keeps x·Aᵀ too. So LoRA on *every* matrix saves almost no activations. With LoRA
# on attention, the MLP's matrices keep no inputs. The rest stays (GELU's input, attention's own tensors, the loss),
# because the gradient passes through it. Lesson 06's [recomputation](../docs/glossary.md#activation-recomputation)
# still helps.
#
# So what LoRA saves depends on what fills the step. Does it depend on the rank? Change 8 to 64.

# %%
rank = 8  # change this
for b, s in ((1, 128), (4, 512), (32, 1024)):
    run = full.replace(micro_batch=b, seq_len=s)
    whole, thin = estimate(run).total, estimate(run.replace(lora_rank=rank)).total
    times = f"{whole / 1e9:5.2f} GB by {thin / 1e9:5.2f} GB, {whole / thin:.1f} times less"
    print(f"GPT-2, {b:2d} × {s:5,} tokens: {times}")

# %% [markdown]
# The paper's abstract says three times less, *for GPT-3*: 1.2 TB against 350 GB (section 4.2). What could those be?

# %%
gpt3 = full.replace(model="gpt3-175b").model.parameters
recipes = {"only 16-bit weights": 2, "all four in 16 bits": 8, "with fp32 copy and moments": 16}
for recipe, each in recipes.items():
    size = each * gpt3
    print(f"{recipe:26s} {each:2d} bytes: {size / 1e9:5,.0f} GB = {size / 2**40:.2f} TiB")

# %% [markdown]
# 350 GB is the 16-bit weights alone. 1.2 TB is near weights, gradients and Adam's states in 16 bits, if TB means TiB.
# The paper does not say.
#
# ### And the arithmetic?
# Backward of y = x·Wᵀ computes two products as large as forward's: dL/dx and dL/dW. So a step is three units: one
# forward, two backward.
#
# **Your guess.** By how many percent does LoRA of rank 8 on all matrices of GPT-2's blocks reduce a step's arithmetic?

# %%
predict("16.flops", unit="%")

# %% [markdown]
# Estimate: a frozen W needs no dL/dW, and the thin factors add a little. torch counts each product's
# [FLOPs](../docs/glossary.md#flops), even on the meta device, where tensors have no numbers.

# %%
from torch.utils.flop_counter import FlopCounterMode

flops = {}
for rank in (0, 8):  # change this
    with torch.device("meta"):
        model, ids = GPT(), torch.zeros(1, 513, dtype=torch.long)
        if rank:
            add_lora(model, ALL, rank, alpha=rank)
    with FlopCounterMode(display=False) as forward:
        loss = loss_of(model, ids)
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    flops[rank] = forward.get_total_flops(), backward.get_total_flops()
    ahead, back = (count / flops[0][0] for count in flops[rank])  # of the plain forward
    print(
        f"rank {rank}: forward {ahead:.2f}, backward {back:.2f}, together {ahead + back:.2f} units"
    )
reveal("16.flops", 100 * (1 - sum(flops[8]) / sum(flops[0])), unit="%")

# %% [markdown]
# Two of three units remain, plus the factors. Hu et al. measured 43.1 instead of 32.5 tokens per second and GPU for
# GPT-3: a quarter less time (section 4.2, footnote 5). Full recomputation adds one unit to both steps: three of four
# remain.

# %% [markdown]
# ## A real fine-tuning
# A small GPT learns a text about a harbor, character by character, on the CPU. Then it learns five of Shakespeare's
# sonnets, with all weights or with LoRA.

# %%
from course_utils.lessons.lora.texts import sonnets
from course_utils.lessons.shared.language_model import corpus

characters = sorted(set(corpus()))


def windows(text, step):
    """Rows of 33 characters, as numbers; one begins at every `step`."""
    return torch.tensor([characters.index(one) for one in text]).unfold(0, 33, step)


# %%
def train(model, text, rate, steps=60):
    optimizer = torch.optim.AdamW(learned(model), lr=rate, fused=True)
    rows, dice = windows(text, step=1), torch.Generator().manual_seed(0)
    for _ in range(steps):
        loss_of(model, rows[torch.randint(len(rows), (16,), generator=dice)]).backward()
        optimizer.step()
        optimizer.zero_grad()


@torch.no_grad()
def mean_loss(model, text):
    return loss_of(model, windows(text, step=32)).item()


# %% [markdown]
# **Your guess.** Call what full fine-tuning takes off the sonnets' loss 100 %. How much of that does rank 8 win, with
# about a tenth of the numbers?

# %%
predict("16.won", unit="%")

# %% tags=["nbval-ignore-output"]
from copy import deepcopy

torch.manual_seed(0)
pretrained = GPT(h=64, L=2, a=4, V=len(characters))
train(pretrained, corpus(), rate=3e-3, steps=300)
before = {"new": mean_loss(pretrained, sonnets()), "old": mean_loss(pretrained, corpus())}
print(f"pretrained: loss {before['old']:.2f} on the harbor, {before['new']:.2f} on the sonnets")


def fine_tune(rank, rate):
    model = deepcopy(pretrained)
    torch.manual_seed(0)
    if rank:
        add_lora(model, ALL, rank, alpha=rank)
    train(model, sonnets(), rate)
    return model


# %% tags=["nbval-ignore-output"]
rates = {0: 3e-3, 2: 1e-2, 8: 1e-2, 32: 1e-2}  # change this; rank 0 trains all weights
tuned = {rank: fine_tune(rank, rate) for rank, rate in rates.items()}
new = {rank: mean_loss(model, sonnets()) for rank, model in tuned.items()}
old = {rank: mean_loss(model, corpus()) for rank, model in tuned.items()}
won = {rank: 100 * (before["new"] - new[rank]) / (before["new"] - new[0]) for rank in tuned}
for rank, model in tuned.items():
    numbers = sum(weight.numel() for weight in learned(model))
    forgot = 100 * (old[rank] - before["old"]) / (old[0] - before["old"])
    print(f"rank {rank:2d}: {numbers:7,} numbers win {won[rank]:3.0f} %, forget {forgot:3.0f} %")
reveal("16.won", round(won[8], -1), unit="%")

# %% [markdown]
# *Forget*: how much worse the model has become on the harbor, where 100 % is full fine-tuning. LoRA "learns less and
# forgets less", as [Biderman et al. 2024](https://arxiv.org/abs/2405.09673) found in large models.
#
# **All weights learn at a rate of 0.003, LoRA at 0.01: is that fair?** Give each the other's rate:

# %% tags=["nbval-ignore-output"]
for rank, other in ((0, 1e-2), (8, 3e-3)):  # change this
    swapped = mean_loss(fine_tune(rank, other), sonnets())
    print(f"rank {rank}: loss {new[rank]:.2f} at {rates[rank]:g}, {swapped:.2f} at {other:g}")

# %% [markdown]
# Each is better at its own rate. Why do factors need a larger one?
#
# ## A scale for every rank
# Adam's first step moves every number by the rate η. B starts at zero, so scale·B·A moves by η times a sum over r
# entries of A, each of size $1 / \sqrt{n_{\text{in}}}$. Such a sum grows with √r:
#
# $$\Delta W \text{ moves by } \eta \cdot \text{scale} \cdot \sqrt{r / n_{\text{in}}}$$
#
# With scale 1 and a small rank, that is less than η. The paper's scale is alpha/r with a fixed alpha. It "helps to
# reduce the need" for a new learning rate if r changes (section 4.1).
#
# **Your turn.** Does it? The cell measures the first step for four ranks. Write a scale that lets all of them move
# equally far.


# %%
def scale(alpha, r):
    return alpha / r  # correct this line


torch.manual_seed(0)
eta, alpha, moved = 1e-4, 16, {}
x, wanted = torch.randn(512, 1024), torch.randn(512, 256)
for r in (4, 16, 64, 256):
    layer = Lora(nn.Linear(1024, 256), r, alpha)
    layer.scale = scale(alpha, r)
    optimizer = torch.optim.Adam([layer.A, layer.B], lr=eta)
    (layer(x) - wanted).square().mean().backward()
    optimizer.step()
    moved[r] = (layer.scale * layer.B @ layer.A).square().mean().sqrt().item() / eta
print("ΔW moves, in η:", {r: f"{far:.2f}" for r, far in moved.items()})
print("expected:      ", {r: f"{scale(alpha, r) * (r / 1024) ** 0.5:.2f}" for r in moved})
far = max(moved.values()) / min(moved.values())
print("Right." if far < 1.3 else f"Not yet: one rank moves {far:.0f} times as far as another.")

# %% [markdown]
# <details><summary>The line</summary>
#
# `return alpha / r**0.5`. Then r cancels. That is *rank-stabilized* LoRA, rsLoRA ([Kalajdzievski
# 2023](https://arxiv.org/abs/2312.03732)). (At large ranks, the entries of the sum are no longer independent: ΔW moves
# a little more than expected.)
#
# </details>
#
# With alpha/r, ΔW moves half as far for each factor of 4 in the rank. So a new rank needs a new learning rate after
# all.

# %% [markdown]
# ## The script's next line
# Your script fine-tunes now: its weights are frozen, and each linear layer of a block gets factors of rank 8. **Predict** its
# peak on one of 8 ranks before you apply the change to `my_train.py`.

# %%
from course_utils.lessons.shared.growing_script import script

script(16)

# %% [markdown]
# From 0.92 to 0.63 GB. Adam's moments are gone, 8Ψ/8 = 0.12 GB, and 0.14 GB of gradients: this rank's shards, and the
# embedding's, which was whole for a moment. What stays is what LoRA cannot touch: checkpoints, gathered weights, and the
# activations of the block that goes backward.

# %% [markdown]
# ## With a library
# People rarely write LoRA themselves. The most used library is [peft](https://huggingface.co/docs/peft). The course does
# not install it: after `pip install peft`, this cell trains your model with it.

# %% tags=["nbval-ignore-output"]
try:
    from peft import LoraConfig, get_peft_model
except ImportError:
    print("peft is not installed here, so nothing was trained.")
else:
    config = LoraConfig(r=8, lora_alpha=8, target_modules=["qkv", "out", "up", "down"])
    model = get_peft_model(deepcopy(pretrained), config)  # use_rslora=True: alpha/√r
    model.print_trainable_parameters()
    train(model, sonnets(), rate=1e-2)
    print(f"peft {mean_loss(model, sonnets()):.2f}, by hand {new[8]:.2f}")
    plain = model.merge_and_unload()  # one plain GPT again
    print(f"merged {mean_loss(plain, sonnets()):.2f}")

# %% [markdown]
# As many numbers learn as in yours. peft draws A evenly, not from a Gaussian, so the two losses differ a little.
# `model.save_pretrained("adapter")` writes the factors alone.

# %% [markdown]
# ## In your own script
# Freeze a model, wrap each linear layer in LoRA, and train what is left. The optimizer skips weights without a
# gradient.

# %%
from torch import nn, optim


class LoraLinear(nn.Module):
    def __init__(self, base, r=8, alpha=16):
        super().__init__()
        self.base, self.scale, n_in = base, alpha / r**0.5, base.in_features  # as in rsLoRA
        self.A = nn.Parameter(base.weight.new_empty(r, n_in).normal_(std=n_in**-0.5))
        self.B = nn.Parameter(base.weight.new_zeros(base.out_features, r))

    def forward(self, x):
        return self.base(x) + self.scale * (x @ self.A.T) @ self.B.T


model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)).requires_grad_(False)
for parent in list(model.modules()):
    for name in [name for name, layer in parent.named_children() if isinstance(layer, nn.Linear)]:
        setattr(parent, name, LoraLinear(getattr(parent, name)))
optimizer = optim.AdamW(model.parameters(), lr=1e-3)
print(sum(weight.numel() for weight in model.parameters() if weight.requires_grad), "learn")

# %% [markdown]
# ## Four questions

# %%
from course_utils.lessons import quiz

quiz(16)

# %% [markdown]
# ## Take home
# **Remember** LoRA removes the gradients and states of what does not learn. It does little for the activations.
#
# **Breaks when** activations fill the step; when a new rank keeps the old learning rate.
#
# **Cheat-sheet line** LoRA: r·(n_in + n_out) numbers per matrix, at most 16 bytes each; two units of work, not three ·
# the first step of ΔW moves by η·scale·√(r/n_in): scale alpha/√r makes it independent of r.
#
# This lesson corrects claim 29 of [what the sources got wrong](../docs/errata.md).
#
# Now solve the [exercises of this lesson](../exercises/16_lora.ipynb).
