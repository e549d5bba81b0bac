# ---
# jupyter:
#   course:
#     minutes: 90
#     cpu_seconds: 35
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 16 · LoRA and quantization
#
# **90 minutes.** You should know the 16 bytes per parameter ([lesson 02](02_adam.ipynb)) and what a linear layer keeps
# for backward ([lesson 05](05_activations.ipynb)). You need no GPU: `on_gpu()` simulates one, without values. What
# needs values runs on the CPU.
#
# You want to teach a trained model a little more. Must all of its weights learn? Do the others need 16 bits?
# [LoRA](../docs/glossary.md#lora) answers the first question, [quantization](../docs/glossary.md#quantization) the
# second, [QLoRA](../docs/glossary.md#qlora) both.

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
from course_utils.interactive.guesses import predict, reveal, waits_for

predict("16.percent", unit="%")

# %%
import torch

from course_utils import format_bytes, on_gpu, plus_minus
from course_utils.models import PRESETS

llama = PRESETS["llama3-8b"]
h, kv = llama.hidden, llama.kv_heads * llama.head_size
share = {}
for r in (2, 4, 8, 16, 32, 64):
    learn = 0
    for n_out, n_in in ((h, h), (kv, h), (kv, h), (h, h)):  # change this
        A, B = torch.empty(r, n_in), torch.empty(n_out, r)
        learn += llama.layers * (A.numel() + B.numel())
    share[r] = 100 * learn / llama.parameters
    print(
        f"r = {r:2d}: {learn:11,} numbers, "
        f"{share[r]:.3f} % of N, at most {format_bytes(16 * learn, 'MB', 0):>7s}"
    )
reveal("16.percent", share[16], unit="%")

# %% [markdown]
# "At most" counts 16 bytes per number: the factor, its gradient and Adam's two moments in fp32. Ranks from 2 to 64 are
# usual: Hu et al. tried 1 to 64 for GPT-3 (section 7.2), and the QLoRA paper took 64.
#
# Which matrices? Hu et al. adapt only attention's, "both for simplicity and parameter-efficiency" (section 4.2), and
# many followed them. [Dettmers et al. 2023](https://arxiv.org/abs/2305.14314) needed LoRA on *all* linear layers of the
# blocks to match full fine-tuning (section 4). Add the MLP's matrices, two of (14336, h) and one of (h, 14336), and
# predict the last line.

# %% [markdown]
# ## By hand
# The scale alpha/r "helps to reduce the need" for a new learning rate if r changes (Hu et al., section 4.1). How
# well, we will see.

# %%
from torch import nn


class Lora(nn.Module):
    def __init__(self, base, r, alpha):
        super().__init__()
        self.base, self.scale = base.requires_grad_(False), alpha / r
        at = {"device": base.weight.device, "dtype": base.weight.dtype}
        self.A = nn.Parameter(torch.randn(r, base.in_features, **at) / base.in_features**0.5)
        self.B = nn.Parameter(torch.zeros(base.out_features, r, **at))

    def forward(self, x):
        return self.base(x) + self.scale * (x @ self.A.T) @ self.B.T


# %%
torch.manual_seed(0)
base = nn.Linear(64, 48)
x = torch.randn(10, 64)
layer = Lora(base, r=4, alpha=8)  # change this
off = (layer(x) - base(x)).abs().max()
print(f"before the first step: {off:.5f} away from the old layer, expected 0")

nn.init.normal_(layer.B)  # as if B had learned something
merged = base.weight + layer.scale * layer.B @ layer.A
off = (layer(x) - nn.functional.linear(x, merged, base.bias)).abs().max()
print(f"merged into one weight: {off:.4f} away from the two paths, expected 0")
rank = torch.linalg.matrix_rank((merged - base.weight).detach(), rtol=1e-4)
print("rank of the difference:", rank.item())

# %% [markdown]
# *Merging* replaces W by W + B·A·alpha/r, of the same size. So LoRA costs nothing after training. Change r to 64: which
# rank?
#
# At first, B is zero and A is random. **Your guess.** After the first backward, how many of the two factors have a
# nonzero gradient?

# %%
predict("16.factors", unit="of two")

# %% [markdown]
# Estimate: with $G = \frac{dL}{d\Delta W}$, the chain rule gives
#
# $$\frac{dL}{dB} = G A^T \qquad \frac{dL}{dA} = B^T G$$
#
# Lecture slides write ΔW = A·Bᵀ, with B zero and on the *input's* side. Measure four ways to start:

# %%
starts = {"paper: B·A, B zero": (0, 1), "slides: A·Bᵀ, B zero": (1, 0)}
starts |= {"both zero": (0, 0), "both Gaussian": (1, 1)}
G = torch.randn(48, 64)
sizes = {}
for name, (out_side, in_side) in starts.items():
    # on the output side: the paper's B, the slides' A
    left = (out_side * torch.randn(48, 4)).requires_grad_()
    # on the input side: the paper's A, the slides' Bᵀ
    right = (in_side * torch.randn(4, 64)).requires_grad_()
    difference = left @ right
    (G * difference).sum().backward()
    sizes[name] = [left.grad.norm().item(), right.grad.norm().item()]
    print(
        f"{name:21s} |ΔW| {difference.norm():4.0f}, gradients: output side {sizes[name][0]:4.0f}, "
        f"input side {sizes[name][1]:4.0f}"
    )
reveal("16.factors", sum(size > 0 for size in sizes["paper: B·A, B zero"]), unit="of two")

# %% [markdown]
# If B is zero, so is dL/dA: A waits one step for B. Two zeros would wait for each other forever. Two Gaussians do not
# start from the given model.
#
# In a model, wrap each linear layer:


# %%
def add_lora(model, r, alpha):
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, nn.Linear):
                setattr(parent, name, Lora(layer, r, alpha))


# %% [markdown]
# ## What LoRA saves
# Only parameters that learn have gradients and optimizer states. And activations? **Your guess.** GPT-2, 4 sequences of
# 512 tokens, [autocast](../docs/glossary.md#autocast) (weights in fp32, products in bf16). By how many percent does
# LoRA of rank 8 on all matrices of the blocks reduce the activations that forward keeps?

# %%
predict("16.activations", unit="%")

# %% [markdown]
# First four layers: train all weights, or only LoRA. (The first line allocates cuBLAS's
# [workspaces](../docs/glossary.md#workspace) beforehand, 8.5 MB each for forward and backward.)

# %%
waits_for("16.activations")
tokens, r = 4096, 8  # change this
with on_gpu():
    nn.Linear(8, 8, device="cuda")(torch.ones(8, 8, device="cuda")).sum().backward()
    x = torch.randn(tokens, 2048, device="cuda")
    for name in ("all weights", "LoRA"):
        empty = torch.cuda.memory_allocated()
        layers = nn.Sequential(*[nn.Linear(2048, 2048, device="cuda") for _ in range(4)])
        if name == "LoRA":
            add_lora(layers, r, alpha=r)
        learned = [weight for weight in layers.parameters() if weight.requires_grad]
        optimizer = torch.optim.AdamW(learned, lr=1e-4)
        weights = torch.cuda.memory_allocated() - empty
        loss = layers(x).square().mean()
        kept = torch.cuda.memory_allocated() - empty - weights
        loss.backward()
        optimizer.step()
        held = torch.cuda.memory_allocated() - empty - weights
        print(
            f"{name:11s} weights {weights / 1e6:.0f} MB, activations {kept / 1e6:.0f} MB, "
            f"gradients and states {held / 1e6:.0f} MB"
        )
        del layers, learned, optimizer, loss

# %% [markdown]
# Change 4096 to 256: which of the three is largest? Now GPT-2, with `measure`:

# %%
from course_utils import TrainingRun, estimate, measure
from course_utils.figures import stack

waits_for("16.activations")
full = TrainingRun("gpt2", micro_batch=4, seq_len=512, precision="amp-bf16")
runs = {
    "all weights": full,
    "LoRA on attention": full.replace(lora_rank=8),
    "LoRA on all matrices": full.replace(lora_rank=8, lora_targets=("attention", "mlp")),
}
measured = {name: measure(run) for name, run in runs.items()}
provenance = str(measured["all weights"].provenance)
stack(measured, "LoRA removes the optimizer states; the activations stay", provenance=provenance)

# %%
from course_utils.measuring.compare import Comparison

kept = {name: one.moments["after loss"]["activations"] for name, one in measured.items()}
for name, run in runs.items():
    peak = measured[name].peak
    gap = plus_minus(estimate(run).total - peak)
    print(
        f"{name:21s} activations {format_bytes(kept[name], 'MB', 0)}, "
        f"peak {format_bytes(peak, 'GB', 2)}, estimate − {measured[name].word}: {gap} bytes"
    )
print(f"the last gap ({name}), term by term:")
for term, size in Comparison(run, estimate(run), measured[name]).terms.items():
    print(f"    {term:46s} {plus_minus(size):>7s}")
reveal("16.activations", 100 * (1 - kept["LoRA on all matrices"] / kept["all weights"]), unit="%")

# %% [markdown]
# **The gap**: the estimate leaves out rounding and tiny tensors. *Elsewhere* is one 16-bit copy that it counts too much,
# of the first A in the first block: no gradient goes further back, so nothing keeps that copy. But why do the
# activations stay? Ask a layer, with lesson 05's hooks.

# %%
x = torch.randn(2048, 768, requires_grad=True)
layers = {"plain": nn.Linear(768, 768)}
layers["frozen"] = nn.Linear(768, 768).requires_grad_(False)
layers["frozen, with LoRA"] = Lora(nn.Linear(768, 768), r=8, alpha=8)


def note(tensor):
    shapes.append(tuple(tensor.shape))
    return tensor.detach()


for name, layer in layers.items():
    shapes = []
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        y = layer(x)
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
    whole = estimate(run).total
    thin = estimate(run.replace(lora_rank=rank)).total
    print(
        f"GPT-2, {b:2d} × {s:5,} tokens: all weights {whole / 1e9:5.2f} GB, "
        f"LoRA {thin / 1e9:5.2f} GB: {whole / thin:.1f} times less"
    )

# %% [markdown]
# The paper's abstract says three times less, *for GPT-3*: 1.2 TB against 350 GB (section 4.2). What could those be?

# %%
gpt3 = PRESETS["gpt3-175b"].parameters
recipes = {"only 16-bit weights": 2, "all four in 16 bits": 8, "with fp32 copy and moments": 16}
for recipe, each in recipes.items():
    print(
        f"{recipe:26s} {each:2d} bytes: "
        f"{each * gpt3 / 1e9:5,.0f} GB = {each * gpt3 / 2**40:.2f} TiB"
    )

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

from course_utils.networks import build_network

flops = {}
for rank in (0, 8):  # change this
    with torch.device("meta"):
        network = build_network(full.model, "eager")
        tokens = torch.zeros(1, 512, dtype=torch.long)
    if rank:
        network.requires_grad_(False)
        add_lora(network.blocks, rank, alpha=rank)
    with FlopCounterMode(display=False) as forward:
        loss = network(tokens).logsumexp(-1).sum()
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    flops[rank] = forward.get_total_flops(), backward.get_total_flops()
    # units: one forward of the plain model
    ahead, back = (count / flops[0][0] for count in flops[rank])
    print(
        f"rank {rank:2d}: forward {ahead:.2f}, "
        f"backward {back:.2f}, together {ahead + back:.2f} units"
    )
reveal("16.flops", 100 * (1 - sum(flops[8]) / sum(flops[0])), unit="%")

# %% [markdown]
# Two of three units remain, plus the factors. Hu et al. measured 43.1 instead of 32.5 tokens per second and GPU for
# GPT-3: a quarter less time (section 4.2, footnote 5). Full recomputation adds one unit to both steps: three of four
# remain.

# %% [markdown]
# ## A real fine-tuning
# The course's small language model learns a text about a harbor, character by character. Then it learns five of
# Shakespeare's sonnets, with all weights or with LoRA on all matrices of the blocks.
#
# **Your guess.** Call what full fine-tuning takes off the sonnets' loss 100 %. How much of that does rank 8 win, with
# about 15 % of the numbers?

# %%
predict("16.won", unit="%")

# %%
from copy import deepcopy

from course_utils.lessons.lora.texts import sonnets
from course_utils.lessons.shared.language_model import batches, corpus, language_model, mean_loss


def train(model, text, rate, steps=60, after_step=None):
    learned = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(learned, lr=rate, fused=True)
    if after_step:
        optimizer.register_step_post_hook(after_step)
    for tokens, targets in batches(steps, seed=0, text=text):
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


# %% tags=["nbval-ignore-output"]
pretrained = language_model(seed=0, attention="flash")
train(pretrained, corpus(), rate=3e-3, steps=300)
before = {"new": mean_loss(pretrained, sonnets()), "old": mean_loss(pretrained, corpus())}
print(f"pretrained: loss {before['old']:.2f} on the harbor, {before['new']:.2f} on the sonnets")


def fine_tune(rank, rate, base=pretrained):
    tuned = deepcopy(base)
    if rank:
        torch.manual_seed(0)
        tuned.requires_grad_(False)
        add_lora(tuned.blocks, rank, alpha=rank)
    train(tuned, sonnets(), rate)
    return tuned


# %% tags=["nbval-ignore-output"]
waits_for("16.won")
rates = {0: 3e-3, 2: 1e-2, 8: 1e-2, 32: 1e-2}  # change this
tuned = {rank: fine_tune(rank, rate) for rank, rate in rates.items()}
new = {rank: mean_loss(one, sonnets()) for rank, one in tuned.items()}
old = {rank: mean_loss(one, corpus()) for rank, one in tuned.items()}
won = {rank: 100 * (before["new"] - new[rank]) / (before["new"] - new[0]) for rank in tuned}
for rank, one in tuned.items():
    learn = sum(weight.numel() for weight in one.parameters() if weight.requires_grad)
    forgot = 100 * (old[rank] - before["old"]) / (old[0] - before["old"])
    print(
        f"rank {rank:2d}: {learn:7,} numbers learn; "
        f"sonnets {new[rank]:.2f}, {won[rank]:3.0f} % of the gain with all weights; "
        f"harbor {old[rank]:.2f}, {forgot:3.0f} % of the forgetting"
    )

# %%
reveal("16.won", round(won[8], -1), unit="%")

# %% [markdown]
# (Rank 0 means all weights.) **All weights learn at a rate of 0.003, LoRA at 0.01: is that fair?** Adam's first step
# moves every number by the rate η. B starts at zero, so B·A moves by η times a sum over r entries of A, each of size
# $1 / \sqrt{n_{\text{in}}}$. That is about $\eta \sqrt{r / n_{\text{in}}}$, so factors need a larger rate to get as
# far. (Here alpha = r: the scale is 1.) Give each the other's rate:

# %% tags=["nbval-ignore-output"]
print(f"η·√(r/n_in) for rank 8, 64 inputs: {(8 / 64) ** 0.5:.2f} · η")
for rank, others in ((0, [1e-2]), (8, [3e-3])):  # change this
    losses = {rates[rank]: new[rank]}
    losses |= {rate: mean_loss(fine_tune(rank, rate), sonnets()) for rate in others}
    shown = ", ".join(f"{losses[rate]:.2f} at a rate of {rate:g}" for rate in sorted(losses))
    print(f"rank {rank}:", shown)

# %% [markdown]
# Each is better at its own rate. Add 0.001 to rank 0's other rates, and 0.03 to rank 8's. Is one of them better still?
#
# And with a fixed alpha, as Hu et al. have it? Then the first step moves ΔW by
#
# $$\eta \cdot \frac{\text{alpha}}{r} \cdot \sqrt{r / n_{\text{in}}}$$
#
# The larger the rank, the less. With alpha/√r, r cancels. That is *rank-stabilized* LoRA ([Kalajdzievski
# 2023](https://arxiv.org/abs/2312.03732)). Measure the first step:

# %%
torch.manual_seed(0)
eta, alpha = 1e-4, 16
x = torch.randn(512, 1024)
for r in (4, 16, 64, 256):  # change this
    moved = []
    for scale in (alpha / r, alpha / r**0.5):
        layer = Lora(nn.Linear(1024, 256), r, alpha)
        layer.scale = scale
        optimizer = torch.optim.Adam([layer.A, layer.B], lr=eta)
        (layer(x) - torch.randn(512, 256)).square().mean().backward()
        optimizer.step()
        moved.append((scale * layer.B @ layer.A).square().mean().sqrt().item())
    expected = eta * alpha / (r * 1024) ** 0.5
    print(
        f"r = {r:3d}: ΔW moves by {moved[0]:.1e} with alpha/r, expected {expected:.1e}; "
        f"by {moved[1]:.1e} with alpha/√r, expected {eta * alpha / 1024**0.5:.1e}"
    )

# %% [markdown]
# So with alpha/r, a new rank needs a new learning rate after all. (At large ranks, the entries of the sum are no longer
# independent: ΔW moves a little more than expected.)
#
# LoRA "learns less and forgets less", as [Biderman et al. 2024](https://arxiv.org/abs/2405.09673) found in large
# models. Merged, ours is one plain model again:

# %%
plain = deepcopy(tuned[8])
with torch.no_grad():
    for parent in list(plain.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, Lora):
                layer.base.weight += layer.scale * layer.B @ layer.A
                setattr(parent, name, layer.base)
models = (pretrained, tuned[8], plain)
count = [sum(weight.numel() for weight in one.parameters()) for one in models]
print("parameters of the model, with LoRA, merged:", *count)
apart = abs(mean_loss(plain, sonnets()) - new[8])
print(f"loss on the sonnets, merged minus LoRA: {apart:.3f}, expected 0")

# %% [markdown]
# ## Round to a grid
# *[Absmax](../docs/glossary.md#absmax-quantization)* quantization shrinks the frozen weights. For 4 bits, divide by a
# scale that maps the largest magnitude to 7, round to whole numbers, store those and the scale.


# %%
def absmax(values, bits, group=None):  # `group` neighbors share a scale
    rows = values.reshape(-1, group or values.numel())
    scale = rows.abs().amax(dim=1, keepdim=True) / (2 ** (bits - 1) - 1)
    codes = (rows / scale).round()
    return (codes * scale).view(values.shape)


w = torch.tensor([0.31, -0.04, 0.12, -0.70, 0.07, 0.45])
print("weights: ", *(f"{value:6.2f}" for value in w))
print("in 4 bits", *(f"{value:6.2f}" for value in absmax(w, bits=4) + 0.0))

# %% [markdown]
# **Your guess.** By what factor does each extra bit shrink the error?

# %%
predict("16.bit", unit="times")

# %% [markdown]
# Estimate: the grid has steps of Δ. Errors that spread evenly over a step have a root mean square of
# $\Delta / \sqrt{12}$.
#
# $$\Delta = \frac{\text{max}}{2^{\text{bits} - 1} - 1}$$
#
# Measure on a matrix of the small model: one scale for all, one per row (*per channel*), one per block of 32.

# %% tags=["nbval-ignore-output"]
waits_for("16.bit")
weight = pretrained.blocks[0].mlp.up.weight.detach()


def error(values, rounded):
    return 100 * ((rounded - values).norm() / values.norm()).item()


group = 32  # change this
for bits in (2, 3, 4, 5, 6, 8):
    step = weight.abs().max() / (2 ** (bits - 1) - 1)
    expected = 100 * step / 12**0.5 / weight.square().mean().sqrt()
    print(
        f"{bits} bits: {error(weight, absmax(weight, bits)):5.1f} % with one scale, "
        f"{expected:5.1f} % expected, "
        f"{error(weight, absmax(weight, bits, 64)):5.1f} % by row, "
        f"{error(weight, absmax(weight, bits, group)):5.1f} % by blocks of {group}"
    )

# %%
four_bits = error(weight, absmax(weight, 4))
eight_bits = error(weight, absmax(weight, 8))
reveal("16.bit", round((four_bits / eight_bits) ** (1 / 4), 1), unit="times")

# %% [markdown]
# A step shrinks by 127/63, 63/31, 31/15, 15/7: a little more than two. With two bits nearly all weights round to
# zero, and errors no longer spread evenly. An fp32 scale per 32 numbers costs one bit per number. Change 32 to 8: is
# it worth four? One per row of 64 costs half a bit, and here it is worth a whole one: rows differ in their largest
# weight. Scales help most against outliers. Make one weight 30 times as large:

# %% tags=["nbval-ignore-output"]
spoiled = weight.clone()
spoiled[5, 5] = 30 * weight.abs().max()
others = torch.ones_like(weight, dtype=torch.bool)
others[5, 5] = False
for name, group in {"one scale": None, "each row": 64, "blocks of 32": 32}.items():
    zeros = (absmax(spoiled, 8, group)[others] == 0).float().mean().item()
    print(f"{name:13s} {zeros:3.0%} of the other weights become zero in 8 bits")

# %% [markdown]
# ### As a layer
# A quantized layer stores codes and scales, and computes W from them in forward. Both are *buffers*: they move and are
# saved with the model, but no optimizer sees them. Expected: 1 byte per weight.


# %%
class Int8Linear(nn.Module):
    def __init__(self, base):
        super().__init__()
        weight = base.weight.detach()
        scale = weight.abs().amax(dim=1, keepdim=True) / 127
        self.register_buffer("codes", (weight / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)
        self.register_buffer("bias", base.bias.detach())

    def forward(self, x):
        return nn.functional.linear(x, self.codes * self.scale, self.bias)


with on_gpu():
    linear = nn.Linear(4096, 4096, device="cuda", dtype=torch.bfloat16)
    before_it = torch.cuda.memory_allocated()
    in_int8 = Int8Linear(linear)
    held = torch.cuda.memory_allocated() - before_it
    print(f"in bf16 {linear.weight.nbytes / 1e6:.2f} MB, in int8 {held / 1e6:.2f}")

# %% [markdown]
# In training, the saving is gone: backward needs W for dL/dx, so autograd keeps the 16-bit W that forward made. Lesson
# 06's `checkpoint` computes W again in backward. So does bitsandbytes.

# %%
from torch.utils.checkpoint import checkpoint

with on_gpu():
    x = torch.randn(512, 4096, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    ways = {"plain": in_int8}
    ways["checkpoint"] = lambda x: checkpoint(in_int8, x, use_reentrant=False)
    for name, run in ways.items():
        before_it = torch.cuda.memory_allocated()
        y = run(x)
        held = torch.cuda.memory_allocated() - before_it - y.nbytes
        print(f"{name:10s} keeps {held / 1e6:.1f} MB for backward")
        del y

# %% [markdown]
# ### The zero point
# Absmax suits numbers around zero. A GELU's output is never below −0.17, so half of the grid is unused. A *[zero
# point](../docs/glossary.md#zero-point)* z moves the grid ([Jacob et al. 2018](https://arxiv.org/abs/1712.05877), eq.
# 1):
#
# $$x \approx (\text{code} - z) \cdot \text{scale}$$
#
# The steps about halve. That should be worth one bit: half the error.

# %%
torch.manual_seed(0)
activation = nn.functional.gelu(torch.randn(100_000))
for bits in (4, 8):
    scale = (activation.max() - activation.min()) / (2**bits - 1)
    z = (-activation.min() / scale).round()
    codes = (activation / scale + z).round().clamp(0, 2**bits - 1)
    one = error(activation, absmax(activation, bits))
    other = error(activation, (codes - z) * scale)
    step = activation.abs().max() / (2 ** (bits - 1) - 1)
    small = (activation.abs() < step / 2).float().mean().item()
    print(
        f"{bits} bits: error {one:.1f} % with absmax, {other:.1f} % with a zero point: "
        f"{one / other:.1f} times less; "
        f"{small:.0%} of the numbers are within half an absmax step of zero"
    )

# %% [markdown]
# With 4 bits, it is worth less. Most numbers lie within half an absmax step of zero and become zero. Their error is
# only their own size, less than errors that spread over a step. So a finer grid has less to gain.

# %% [markdown]
# ## Sixteen values of your choice
# The 16 values of four bits need not be evenly spaced. Trained weights crowd around zero, so put more values there.
# [NF4](../docs/glossary.md#nf4) takes quantiles of the normal distribution ([Dettmers et al.
# 2023](https://arxiv.org/abs/2305.14314), section 3).

# %%
# half a step from the end: the mean of 1/32 (16 values) and 1/30 (15 values)
end = (1 / 32 + 1 / 30) / 2
below, above = torch.linspace(end, 0.5, 8), torch.linspace(0.5, 1 - end, 9)[1:]
quantiles = torch.special.ndtri(torch.cat([below, above]))
nf4 = quantiles / quantiles[-1]
print(" ".join(f"{value:.4f}" for value in nf4))

# %% tags=["nbval-ignore-output", "hide-input"]
from course_utils.lessons.lora.figures import code_picture

blocks = weight.reshape(-1, 64)
scaled = (blocks / blocks.abs().amax(dim=1, keepdim=True)).flatten().tolist()
codes = {"absmax, 4 bits": [k / 7 for k in range(-7, 8)], "NF4": nf4.tolist()}
title = "NF4 puts its values where the weights are"
source = "a matrix of a model trained on this CPU, in blocks of 64"
code_picture(scaled, codes, title, provenance=source)

# %% [markdown]
# **Your guess.** Same [blocks of 64](../docs/glossary.md#block-wise-quantization), same bits: by how many percent is
# NF4's error smaller than absmax's?

# %%
predict("16.nf4", unit="%")


# %%
def nearest(values, code, group=64):  # `code` rises from −1 or 0 to 1
    rows = values.reshape(-1, group)
    scale = rows.abs().amax(dim=1, keepdim=True).clamp_min(1e-38)
    codes = torch.bucketize(rows / scale, (code[1:] + code[:-1]) / 2)
    return (code[codes] * scale).view(values.shape)


less = 100 * (1 - error(weight, nearest(weight, nf4)) / error(weight, absmax(weight, 4, 64)))
reveal("16.nf4", round(less, -1), unit="%")

# %% [markdown]
# The paper calls NF4 "information theoretically optimal" for normal weights. That means using each value equally often,
# not the smallest error. And numbers divided by their block's largest are no longer normal ([Yoshida
# 2023](https://arxiv.org/abs/2306.06965)). Test it on normal numbers: move 16 centroids until the squared error is
# smallest (Lloyd's algorithm). Change 64 to 16, and predict.

# %%
torch.manual_seed(0)
block = 64  # change this
normal = torch.randn(4096, 64)
rows = normal.reshape(-1, block)
scaled = rows / rows.abs().amax(dim=1, keepdim=True)
centers = torch.quantile(scaled, (torch.arange(16) + 0.5) / 16)
for _ in range(40):
    owner = torch.bucketize(scaled.flatten(), (centers[1:] + centers[:-1]) / 2)
    centers = torch.zeros(16).index_add(0, owner, scaled.flatten()) / owner.bincount(minlength=16)
codes = {"absmax": torch.arange(-7, 8) / 7, "NF4": nf4, "Lloyd's centroids": centers}
for name, code in codes.items():
    print(f"{name:18s} error {error(normal, nearest(normal, code, block)):.1f} %")

# %% [markdown]
# In a layer, two codes share a byte, and each block of 64 has a scale: 4 + 32/64 = 4.5 bits per number. (QLoRA rounds
# the scales to 8 bits, too: $4 + \frac{8}{64} + \frac{32}{64 \cdot 256} = 4.127$.)


# %%
class Nf4Linear(nn.Module):
    def __init__(self, base, block=64):
        super().__init__()
        self.shape = base.weight.shape
        code = nf4.to(base.weight.device)
        rows = base.weight.detach().float().reshape(-1, block)
        scale = rows.abs().amax(dim=1, keepdim=True)
        codes = torch.bucketize(rows / scale, (code[1:] + code[:-1]) / 2).flatten().to(torch.uint8)
        self.register_buffer("packed", codes[::2] * 16 + codes[1::2])
        self.register_buffer("scale", scale)
        self.register_buffer("code", code)
        self.register_buffer("bias", base.bias.detach())

    def forward(self, x):
        codes = torch.stack([self.packed // 16, self.packed % 16], dim=1).int()
        weight = self.code[codes].view(len(self.scale), -1) * self.scale
        return nn.functional.linear(x, weight.view(self.shape).to(x.dtype), self.bias)


# %%
linear = nn.Linear(256, 128)
x = torch.randn(10, 256)
four = Nf4Linear(linear)
rounded = nearest(linear.weight.detach(), nf4)
off = (four(x) - nn.functional.linear(x, rounded, linear.bias)).abs().max()
print(f"packed and unpacked: {off:.4f} away from the rounded weight's output, expected 0")
each = 8 * (four.packed.nbytes + four.scale.nbytes) / linear.weight.numel()
print(f"{each:.2f} bits per number, expected 4.50")

# %% [markdown]
# ## After training
# *[Post-training](../docs/glossary.md#post-training-quantization) quantization* rounds a trained model without another
# step. What counts is its loss. **Your guess.** Round all matrices of the language model's blocks by absmax, with one
# scale per row. What is the smallest number of bits that raises the loss by less than 2 %?

# %%
predict("16.enough", unit="bits")


# %% tags=["nbval-ignore-output"]
from functools import partial

waits_for("16.enough")


def by_row(weight, bits):
    return absmax(weight, bits, group=weight.shape[1])


def rounded_model(rounding):
    copied = deepcopy(pretrained)
    with torch.no_grad():
        for weight in copied.blocks.parameters():
            if weight.dim() == 2:
                weight.copy_(rounding(weight))
    return copied


group = 32  # change this
start = mean_loss(pretrained, corpus())
risen = {}
for bits in (8, 6, 5, 4, 3, 2):
    in_rows = mean_loss(rounded_model(partial(by_row, bits=bits)), corpus())
    in_blocks = mean_loss(rounded_model(partial(absmax, bits=bits, group=group)), corpus())
    risen[bits] = round(100 * (in_rows / start - 1), 1) + 0.0  # not −0.0
    more = round(100 * (in_blocks / start - 1), 1) + 0.0
    print(f"{bits} bits: loss up {risen[bits]:5.1f} % by row, {more:5.1f} % by {group}")

# %%
reveal("16.enough", min(bits for bits, percent in risen.items() if percent < 2), unit="bits")

# %% [markdown]
# Change 32 to 8: are 3 bits enough then? To *compute* in 8 bits, you must also round each matrix's inputs. Where do
# their scales come from? *Dynamic* quantization computes them while the model runs, one per token, as in LLM.int8()
# ([Dettmers et al. 2022](https://arxiv.org/abs/2208.07339), section 3.1). *Static* quantization fixes one per layer
# in advance. For that it needs *[calibration](../docs/glossary.md#calibration)*: the model reads some text, and a
# hook notes each layer's largest input.

# %%
eight = rounded_model(partial(by_row, bits=8))
linears = [layer for layer in eight.blocks.modules() if isinstance(layer, nn.Linear)]
largest = {}


def read(text, hook):
    handles = [layer.register_forward_pre_hook(hook) for layer in linears]
    loss = mean_loss(eight, text)
    for handle in handles:
        handle.remove()
    return loss


def look(layer, inputs):
    largest[layer] = max(largest.get(layer, 0.0), inputs[0].abs().max().item())


read(corpus()[:1000], look)
print(f"found the largest input of {len(largest)} layers")


# %% tags=["nbval-ignore-output"]
def round_inputs(layer, inputs):
    limit, x = 2 ** (bits - 1) - 1, inputs[0]
    most = x.abs().amax(dim=-1, keepdim=True) if dynamic else largest[layer]
    return (x / most * limit).round().clamp(-limit, limit) * most / limit


for bits in (8, 6, 4):
    dynamic = False
    fixed = round(100 * (read(corpus(), round_inputs) / start - 1), 1) + 0.0
    dynamic = True
    per_token = round(100 * (read(corpus(), round_inputs) / start - 1), 1) + 0.0
    print(
        f"8-bit weights, {bits}-bit inputs: loss up {fixed:.1f} % static, {per_token:.1f} % dynamic"
    )

# %% [markdown]
# With one fixed scale for all tokens, inputs are harder to round than weights. A scale per token costs a maximum at run
# time, and needs no calibration.
#
# ## Two factors that cluster
# Write W as a sum U + V·Q with Q orthogonal. In two bases at once (an
# *[overdetermined](../docs/glossary.md#overdetermined-basis)* basis), a matrix can be written in many ways. [Merkulov
# et al. 2024](https://arxiv.org/abs/2404.09737) choose one whose entries in U and V gather around a few peaks, and
# replace each entry by the nearest peak. In our simple version, each step adds ±c to every entry of one factor: the one
# that lowers the remainder more. A step costs one bit per number.

# %%
Q = torch.linalg.qr(torch.randn(64, 64, generator=torch.Generator().manual_seed(0)))[0]


def split(weight, steps, bases=2):
    U, V = torch.zeros_like(weight), torch.zeros_like(weight)
    for _ in range(steps):
        rest = weight - U - V @ Q
        seen = rest @ Q.T
        if bases == 2 and seen.abs().mean() > rest.abs().mean():
            V = V + seen.abs().mean() * seen.sign()
        else:
            U = U + rest.abs().mean() * rest.sign()
    return U + V @ Q


# %% [markdown]
# **Your guess.** Four steps cost four bits. How large is the factors' error, in percent of 4-bit absmax's with one
# scale per row?

# %%
predict("16.split", unit="%")

# %% tags=["nbval-ignore-output"]
for bits in (2, 3, 4, 6):  # change this
    two = error(weight, split(weight, bits))
    one = error(weight, split(weight, bits, bases=1))
    in_rows = error(weight, by_row(weight, bits))
    print(
        f"{bits} bits: error {two:4.1f} % in two bases, {one:4.1f} % in one, "
        f"{in_rows:4.1f} % with absmax by row"
    )
left = 100 * error(weight, split(weight, 4)) / error(weight, by_row(weight, 4))
reveal("16.split", left, unit="%")

# %% [markdown]
# The second basis lowers the error. With two bits, the factors are far better than a grid. With three they are level.
# From four on, plain rounding is better, because our steps only use ±c. (Change 6 to 12: do they catch up?) The
# authors' version is finer, and they call its results competitive or superior. A product with W becomes three: with
# U, with Q, and with V. The authors also take a Q that is as cheap as a Fourier transform; then two full products are
# left.

# %% [markdown]
# ## States in 8 bits
# [8-bit Adam](../docs/glossary.md#8-bit-adam) stores each of the two moments in a byte, not four ([Dettmers et al.
# 2022](https://arxiv.org/abs/2110.02861)), with a scale per 256 numbers in today's bitsandbytes. But the second moment
# v holds squares over many powers of ten. **Your guess.** Round v to 256 evenly spaced values in blocks of 256. How
# many of 1,000 numbers become zero, so that Adam divides by nearly nothing?

# %%
predict("16.zeros", unit="of 1,000")

# %% tags=["nbval-ignore-output"]
from course_utils.measuring.optimizers import make_codebooks

waits_for("16.zeros")
powers = make_codebooks("cpu").unsigned.values  # 256 values spaced by powers of ten
learner = language_model(seed=0, attention="flash")
optimizer = train(learner, corpus(), rate=3e-3)
adam_ends = mean_loss(learner, corpus())
second = [state["exp_avg_sq"].flatten() for state in optimizer.state.values()]
v = torch.cat([moment for moment in second if moment.numel() >= 4096])
zeros = {}
for name, code in {"evenly spaced": torch.arange(256) / 255, "by powers of ten": powers}.items():
    zeros[name] = (nearest(v, code, 256)[v > 0] == 0).float().mean().item()
    print(f"{name:16s} {1000 * zeros[name]:.1f} of 1,000 second moments become zero")

# %%
reveal("16.zeros", round(1000 * zeros["evenly spaced"], -1), unit="of 1,000")

# %% [markdown]
# Do so few matter? Train with each. A hook rounds v after each optimizer step.


# %% tags=["nbval-ignore-output"]
def rounding(code):
    def after_step(optimizer, *_):
        for state in optimizer.state.values():
            if state["exp_avg_sq"].numel() >= 4096:
                state["exp_avg_sq"].copy_(nearest(state["exp_avg_sq"], code, 256))

    return after_step


print(f"Adam ends at a loss of {adam_ends:.2f}")
for name, code in {"powers of ten": powers, "evenly spaced": torch.arange(256) / 255}.items():
    learner = language_model(seed=0, attention="flash")
    train(learner, corpus(), rate=3e-3, after_step=rounding(code))  # change this
    print(f"with v in 8 bits, {name}: {mean_loss(learner, corpus()):.2f}")

# %% [markdown]
# Change the rate to 0.0003: does the even grid still do harm? Now in bytes, for GPT-2 XL with fp32 [master
# weights](../docs/glossary.md#master-weights) (4 more bytes each):

# %%
xl = TrainingRun("gpt2-xl", 1, 512, "bf16-master", recompute="full")
for name, expected in (("adamw", 4 + 4 + 4), ("adam8bit", 4 + 1 + 1 + 2 * 4 / 256)):
    states = estimate(xl.replace(optimizer=name))["optimizer_states"]
    each = states / xl.model.parameters
    print(
        f"{name:8s} {states / 1e9:.1f} GB, {each:.3f} bytes per parameter, expected {expected:.3f}"
    )

# %% [markdown]
# The rest of the gap: as in bitsandbytes, tensors under 4,096 numbers (biases and norms) keep their moments in fp32.

# %% [markdown]
# ## QLoRA's account
# Now combine frozen weights in NF4, LoRA on every matrix, 16 bits for all that learns, and recomputation. First one
# layer, from your two classes. 4.5 bits are 0.5625 bytes per weight. Change r and predict.

# %%
r = 64  # change this
with on_gpu():
    empty = torch.cuda.memory_allocated()
    layer = Lora(nn.Linear(4096, 4096, device="cuda", dtype=torch.bfloat16), r, alpha=r)
    factors = layer.A.nbytes + layer.B.nbytes
    held = torch.cuda.memory_allocated() - empty
    print(f"frozen in bf16: {held / 1e6:.2f} MB, factors {factors / 1e6:.2f}")
    layer.base = Nf4Linear(layer.base)
    held = torch.cuda.memory_allocated() - empty
    expected = 0.5625 * 4096**2 + factors
    print(f"frozen in NF4:  {held / 1e6:.2f} MB, expected {expected / 1e6:.2f} plus the bias")

# %% [markdown]
# **Your guess.** A Llama with 65 billion parameters, rank 64 on all matrices, one sequence of 512 tokens: what is the
# peak?

# %%
predict("16.qlora", unit="GB")

# %% [markdown]
# Dettmers et al. 2023 fine-tuned this model on "a single 48GB GPU", which they do not name. Regular 16-bit fine-tuning,
# they say, takes more than 780 GB (section 1). A program gets [47.54
# GiB](https://github.com/vllm-project/vllm/issues/4417) of an RTX A6000, and [44.40
# GiB](https://github.com/QwenLM/Qwen3-VL/issues/2097) of an L40, where error correction takes its share.

# %%
from course_utils.models import TransformerConfig

waits_for("16.qlora")
sizes = {"layers": 80, "hidden": 8192, "heads": 64, "ffn": 22016, "max_positions": 2048}
big = TransformerConfig("llama-65b", "llama", vocab=32000, tied=False, **sizes)
options = {"lora_rank": 64, "lora_targets": ("attention", "mlp"), "frozen_bits": 4}
qlora = TrainingRun(big, 1, 512, "bf16", recompute="full", **options)
rows = {
    "LoRA, 16 bits": qlora.replace(frozen_bits=16),
    "8 bits": qlora.replace(frozen_bits=8),
    "QLoRA": qlora,
    "with 8-bit Adam": qlora.replace(optimizer="adam8bit"),
}
cards = {"RTX A6000": round(47.54 * 2**30), "L40": round(44.40 * 2**30)}
smallest = min(cards.values())
estimates = {name: estimate(run) for name, run in rows.items()}
title = "65 billion parameters fit a 48 GB card only in 4 bits"
line, source = f"L40: {format_bytes(smallest, 'GB', 1)}", "estimated from formulas"
stack(estimates, title, capacity=smallest, capacity_label=line, provenance=source)

# %%
N = big.parameters / 1e9
print(f"{N:.1f} billion · (2 + 2 + 8) bytes = {12 * big.parameters / 1e9:.0f} GB: the paper's 780")
for b, s in ((1, 512), (1, 2048), (8, 512), (16, 512)):
    peak = estimate(qlora.replace(micro_batch=b, seq_len=s)).total
    fits = " and ".join(name for name, room in cards.items() if peak <= room) or "neither"
    print(f"QLoRA, {b:2d} × {s:5,} tokens: {format_bytes(peak, 'GB', 1)}, fits {fits}")
reveal("16.qlora", estimate(qlora).total)

# %% [markdown]
# Both of the paper's numbers hold with few tokens. With 8 sequences, *which* 48 GB card matters. Test the estimate on a
# model that you can run:

# %%
from course_utils.figures import compare_bars

options = {"lora_rank": 16, "lora_targets": ("attention", "mlp"), "frozen_bits": 4}
small = TrainingRun("tiny-llama", 4, 256, "bf16", recompute="full", **options)
small = small.replace(optimizer="adam8bit")
step = measure(small)
gap = format_bytes(abs(estimate(small).total - step.peak))
title = f"A small QLoRA step: the estimate and the {step.word} peak differ by {gap}"
compare_bars(estimate(small), step, title, unit="MB")

# %% [markdown]
# **Your guess.** Rank 8 learns the sonnets again, but the language model's blocks are in NF4. What percentage of its
# gain on exact weights does it win now?

# %%
predict("16.beside", unit="%")

# %% tags=["nbval-ignore-output"]
bases = {"NF4": partial(nearest, code=nf4), "2 bits by row": partial(by_row, bits=2)}
now = {}
for name, way in bases.items():
    now[name] = mean_loss(fine_tune(8, 1e-2, rounded_model(way)), sonnets())
part = {name: 100 * (before["new"] - loss) / (before["new"] - new[8]) for name, loss in now.items()}
for name, percent in part.items():
    print(f"rank 8 on {name}: loss {now[name]:.2f}, {percent:.0f} % of its gain on exact weights")
reveal("16.beside", part["NF4"], unit="%")

# %% [markdown]
# While they learn, the factors also repair what rounding has broken. Dettmers et al. report the same for 4 bits on
# large models (section 4).
#
# Which is the largest Llama that you can fine-tune on an RTX 4090 in 16 bits? In 4?

# %%
from course_utils.lessons.lora.widget import lora_sliders

lora_sliders(
    "llama3-8b",
    micro_batch=1,
    seq_len=1024,
    precision="bf16",
    lora_rank=16,
    frozen_bits=4,
    recompute="full",
)

# %% [markdown]
# ## In your own script
# Freeze a model, wrap each linear layer in LoRA, and train what is left. The optimizer skips weights without a
# gradient.

# %%
from torch import nn, optim


class LoraLinear(nn.Module):
    def __init__(self, base, r=8, alpha=16):
        super().__init__()
        self.base, self.scale = base, alpha / r
        weight, n_in = base.weight, base.in_features
        self.A = nn.Parameter(weight.new_empty(r, n_in).normal_(std=n_in**-0.5))
        self.B = nn.Parameter(weight.new_zeros(base.out_features, r))

    def forward(self, x):
        return self.base(x) + self.scale * (x @ self.A.T) @ self.B.T


model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)).requires_grad_(False)
for parent in list(model.modules()):
    for name in [name for name, layer in parent.named_children() if isinstance(layer, nn.Linear)]:
        setattr(parent, name, LoraLinear(getattr(parent, name)))
optimizer = optim.AdamW(model.parameters(), lr=1e-3)
trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
print("trained parameters:", trained)

# %% [markdown]
# ## Five questions

# %%
from course_utils.lessons import quiz

quiz(16)

# %% [markdown]
# ## Take home
# **Remember** LoRA removes the gradients and states of what does not learn. Quantization shrinks the weights that stay.
# Neither does much for the activations.
#
# **Breaks when** activations fill the step; when one outlier sets the scale for all; below four bits.
#
# **Cheat-sheet line** LoRA: r·(n_in + n_out) numbers per matrix, at most 16 bytes each; two units of work, not three ·
# frozen weights: 2 bytes, or 4.5 bits in NF4 · each bit halves the error · 8-bit Adam: 2 bytes per parameter, not 8.
#
# This lesson corrects claim 29 of [what the sources got wrong](../docs/errata.md).
#
# Now solve the [exercises of this lesson](../exercises/16_lora_and_quantization.ipynb).
