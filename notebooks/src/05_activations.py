# ---
# jupyter:
#   course:
#     minutes: 90
#     cpu_seconds: 25
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 05 · What does each operation keep?
#
# **90 minutes.** You should know [lesson 01](01_where_did_the_memory_go.ipynb), the parts of a [transformer
# block](../docs/glossary.md#transformer-block), and the derivative of a product. You need no GPU.
#
# This lesson derives what a block keeps for backward, tensor by tensor. In the exercises you do the same for operations
# and modules that it does not show. Symbols: b sequences of s tokens, hidden size h, a heads, L layers, vocabulary V.

# %% [markdown]
# ## Operation by operation
# An operation keeps only the tensors that its derivative needs. A GPT has eight operations: addition, division by a
# number, a linear layer, GELU, softmax, dropout, LayerNorm, a product of two activations. Each one gets s·b·h numbers
# in [bf16](../docs/glossary.md#fp16-and-bf16). **Your guess.** How many MB do all eight keep together?

# %%
from course_utils import PRESETS, TrainingRun, estimate, format_bytes, measure, on_gpu, plus_minus
from course_utils.interactive.guesses import predict, reveal, waits_for

s, b, h = 1024, 4, 1024
n = s * b * h
print(f"one tensor of s·b·h numbers in bf16: {format_bytes(2 * n, 'MB')}")
predict("05.operations", unit="MB")

# %% [markdown]
# ### Estimate
# | operation | derivative with respect to x | backward needs |
# |---|---|---|
# | x + y | 1 | nothing |
# | x / 8 | 1/8 | nothing: 8 is not a tensor |
# | x · Wᵀ | for W: dL/dy · x | its input |
# | GELU(x) | a function of x | its input |
# | softmax(x) = p | p·(dL/dp − Σ p·dL/dp) | its *output* |
# | dropout(x) | 0 or 1/(1−rate) | a mask, one byte per element |
# | LayerNorm(x) | a function of x, mean, standard deviation | its input, and two fp32 numbers per token |
# | x · y, both activations | y, and x | both |

# %%
waits_for("05.operations")
wanted = {
    "addition": 0, "division by a number": 0, "linear layer": 2 * n, "GELU": 2 * n,
    "softmax": 2 * n, "dropout": n, "LayerNorm": 2 * n + 8 * s * b, "product of two": 4 * n,
}  # fmt: skip
print(f"{sum(wanted.values()) / n:.3f} bytes for each of the s·b·h numbers")

# %% [markdown]
# ### Measure
# Autograd passes each tensor that it saves to your hook, and keeps what the hook returns. In backward, a second
# function turns that into the tensor again. Inside `on_gpu()`, "cuda" is your GPU or a [simulated
# one](../docs/glossary.md#simulated-gpu).


# %%
import torch
from torch import nn
from torch.nn import functional as F


def keep(tensor):
    print(f"{tuple(tensor.shape)!s:16} {tensor.dtype!s:15} {tensor.nbytes:>10,} bytes")
    return tensor


with on_gpu():
    layer = nn.LayerNorm(h).to("cuda", torch.bfloat16)  # change this
    x = torch.randn(b, s, h, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda kept: kept):
        out = layer(x)

# %% [markdown]
# Change the layer to `nn.Dropout(0.1)`, then to `nn.Linear(h, h).to("cuda", torch.bfloat16)`. Predict the lines first.
#
# `kept_by` lists each [storage](../docs/glossary.md#storage) once, even if two operations save it. It leaves out
# weights, which are in memory anyway.


# %%
def kept_by(operation, *inputs):
    """One tensor for each storage that autograd keeps for backward; weights left out."""
    kept = {}

    def keep(tensor):
        kept.setdefault(tensor.untyped_storage(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        operation(*inputs)
    weights = operation.parameters() if isinstance(operation, nn.Module) else []
    own = [weight.untyped_storage() for weight in weights]
    return [tensor for storage, tensor in kept.items() if storage not in own]


def size(tensors):
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


# %%
from course_utils.interactive.ledgers import show_ledger

with on_gpu():
    y = torch.randn_like(x, requires_grad=True)
    matrix = nn.Linear(h, h).to("cuda", torch.bfloat16)
    norm = nn.LayerNorm(h).to("cuda", torch.bfloat16)
    kept = {
        "addition": kept_by(torch.add, x, y), "division by a number": kept_by(torch.div, x, 8),
        "linear layer": kept_by(matrix, x), "GELU": kept_by(F.gelu, x),
        "softmax": kept_by(torch.softmax, x, -1), "dropout": kept_by(F.dropout, x, 0.1),
        "LayerNorm": kept_by(norm, x), "product of two": kept_by(torch.mul, x, y),
    }  # fmt: skip
found = {name: size(tensors) for name, tensors in kept.items()}
reveal("05.operations", sum(found.values()), unit="MB")
show_ledger(wanted, found, columns=("estimate", "by hooks"))

# %% [markdown]
# **The gap** is zero in every row. One bit per element would do for dropout's [mask](../docs/glossary.md#dropout-mask).
# LayerNorm's fp32 *statistics* are small, but without them no [ledger](../docs/glossary.md#ledger) closes to the byte.
#
# CPU kernels differ (put "cpu" for "cuda" in the cell with the hook): dropout keeps a bf16 tensor of 0 or 1/(1−rate),
# and LayerNorm's statistics have the input's format.
#
# Does softmax's derivative need only its output? Check with real numbers:

# %%
torch.manual_seed(0)
x = torch.randn(4, 16, requires_grad=True)
p = x.softmax(-1)
dp = torch.randn_like(p)
p.backward(dp)
by_hand = p * (dp - (p * dp).sum(-1, keepdim=True))
print(
    f"largest gradient {x.grad.abs().max():.4f}, "
    f"largest difference {(by_hand - x.grad).abs().max():.4f}"
)

# %% [markdown]
# ### What LayerNorm computes
# LayerNorm takes the mean μ and variance σ² of each token's h numbers. ε prevents a division by zero, γ is the gain, β
# the bias ([Ba et al. 2016](https://arxiv.org/abs/1607.06450)).
#
# $$\hat x = \frac{x - \mu}{\sqrt{\sigma^2 + \varepsilon}} \qquad y = \gamma \hat x + \beta$$
#
# With $g = \gamma \cdot \frac{dL}{dy}$, and means over a token's numbers, the gradients are
#
# $$\frac{dL}{dx} = \frac{g - \text{mean}(g) - \hat x \cdot \text{mean}(g \hat x)}{\sqrt{\sigma^2 + \varepsilon}}
# \qquad \frac{dL}{d\gamma} = \sum \hat x \cdot \frac{dL}{dy}$$
#
# So PyTorch keeps x, μ and $1 / \sqrt{\sigma^2 + \varepsilon}$, and computes $\hat x$ again:

# %%
gain, bias = (torch.randn(16, requires_grad=True) for _ in range(2))
x = torch.randn(4, 16, requires_grad=True)
y = F.layer_norm(x, [16], gain, bias, eps=1e-5)
dy = torch.randn_like(y)
y.backward(dy)
mean = x.mean(-1, keepdim=True)
root = (x.var(-1, correction=0, keepdim=True) + 1e-5).sqrt()
normal, g = (x - mean) / root, gain * dy
dx = (g - g.mean(-1, keepdim=True) - normal * (g * normal).mean(-1, keepdim=True)) / root
for name, mine, torchs in [("dL/dx", dx, x.grad), ("dL/dγ", (normal * dy).sum(0), gain.grad)]:
    print(
        f"{name}: largest {torchs.abs().max():.4f}, "
        f"largest difference {(mine - torchs).abs().max():.4f}"
    )

# %% [markdown]
# ## An MLP with another nonlinearity
# An MLP's nonlinearity and its second matrix each keep a wide tensor: 4h numbers per token. GELU needs its *input*,
# ReLU only its *output*: where that is zero, so is the derivative.
#
# **Your guess.** How many MB does the MLP keep with ReLU instead of GELU?

# %%
with on_gpu():
    narrow = torch.randn(b, s, h, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    mlp = nn.Sequential(nn.Linear(h, 4 * h), nn.GELU(), nn.Linear(4 * h, h))
    mlp.to("cuda", torch.bfloat16)
    with_gelu = size(kept_by(mlp, narrow))
print(f"with GELU: {format_bytes(with_gelu, 'MB')}, that is 2·s·b·h + 2 · 2·s·b·4h")
predict("05.relu", unit="MB")

# %%
with on_gpu():
    mlp[1] = nn.ReLU()  # change this
    kept = kept_by(mlp, narrow)
for tensor in kept:
    print(tuple(tensor.shape), format_bytes(size([tensor]), "MB"))
reveal("05.relu", size(kept), unit="MB")

# %% [markdown]
# The estimate is 2·s·b·h for the first matrix's input plus 8·s·b·h for ReLU's output. The second matrix keeps the
# *same* tensor: count storages, not operations. Change the line to `nn.SiLU()` or `nn.Sigmoid()`: does it keep its
# input or its output?
#
# ## The ledger of one block
# Now take a complete block of GPT-2 small: two sequences of 512 tokens, 16-bit, dropout as published. Attention is
# [eager](../docs/glossary.md#eager-attention): written out in PyTorch's own operators.


# %%
def eager(q, k, v, rate):
    s = q.shape[-2]
    mask = torch.full((s, s), float("-inf"), dtype=q.dtype, device=q.device).triu(1)
    scores = (q / q.shape[-1] ** 0.5) @ k.mT + mask
    return F.dropout(scores.softmax(-1), rate) @ v


# %%
class Block(nn.Module):
    def __init__(self, h, a, attention, mlp=None, norm=nn.LayerNorm, rate=0.1):
        super().__init__()
        self.norm1, self.norm2 = norm(h), norm(h)
        self.qkv, self.out = nn.Linear(h, 3 * h), nn.Linear(h, h)
        self.mlp = mlp or nn.Sequential(nn.Linear(h, 4 * h), nn.GELU(), nn.Linear(4 * h, h))
        self.a, self.attention, self.rate = a, attention, rate

    def forward(self, x):
        b, s, h = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, s, 3 * self.a, -1).transpose(1, 2).chunk(3, 1)
        mixed = self.attention(q, k, v, self.rate).transpose(1, 2).reshape(b, s, h)
        x = x + F.dropout(self.out(mixed), self.rate)
        return x + F.dropout(self.mlp(self.norm2(x)), self.rate)


# %% [markdown]
# **Your guess.** What does the block keep, in units of s·b·h bytes?

# %%
s, b, h, a = 512, 2, 768, 12
print(
    f"h = {h}, a = {a}: "
    f"with s = {s}, one s×s matrix in each head is a·s/h = {a * s / h:g} numbers per s·b·h"
)
predict("05.block", unit="s·b·h")

# %%
with on_gpu():
    x = torch.randn(b, s, h, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    block = Block(h, a, eager, rate=0.1).to("cuda", torch.bfloat16)  # change this
    before = torch.cuda.memory_allocated()
    y = block(x)
    grown = torch.cuda.memory_allocated() - before
    by_hooks = size(kept_by(block, x))
reveal("05.block", by_hooks / (s * b * h), unit="s·b·h")
print(f"hooks: {by_hooks:,} bytes; memory_allocated() grew by {grown:,}")

# %% [markdown]
# Both nearly agree. Hooks count the input x, the allocator counts the output y, equally large. The allocator adds
# remainders too small to split off ([lesson 12](12_allocator_and_fragmentation.ipynb)).
#
# A real GPU also holds cuBLAS's workspaces, [reserved](../docs/glossary.md#allocated-and-reserved) memory without a
# tensor, and CUDA's context, which no counter of PyTorch includes.
#
# `saved_by` does this for any layer, and names the operation whose backward needs the tensor:

# %%
from course_utils.interactive.saved_tensors import saved_by

for item in saved_by(Block(h, a, eager), (b, s, h), dtype="bf16", device="gpu"):
    in_units = item.bytes / (s * b * h)
    print(f"{item.name:34s} {item.shape!s:18s} {item.dtype:5s} {in_units:7.3f} · s·b·h")

# %% [markdown]
# ### The formula, term by term
# The terms without s² add up to 34 bytes per s·b·h. The rest has one number per head for each *pair* of tokens:
# 5·a·s²·b.
#
# $$34 \cdot s b h + 5 a s^2 b = s b h \left(34 + \frac{5 a s}{h}\right)$$
#
# This is equation 1 of [Korthikanti et al. 2022](https://arxiv.org/abs/2205.05198).

# %%
unit = s * b * h
terms = {
    "inputs of four matrices: 2 + 2 + 2 + 8": 14 * unit,
    "queries, keys, values: 2 + 2 + 2": 6 * unit,
    "GELU's input: 8": 8 * unit,
    "inputs of two norms: 2 + 2": 4 * unit,
    "two dropout masks: 1 + 1": 2 * unit,
    "5·a·s²·b: softmax's output 2, its mask 1, dropout's result 2": 5 * a * s * s * b,
}
show_ledger(terms, {"all that hooks found": by_hooks}, unit="MB", columns=("estimate", "by hooks"))
print(
    f"left over: {by_hooks - sum(terms.values()):,} bytes; "
    f"2 norms, 2 fp32 numbers per token: {16 * s * b:,}"
)

# %% [markdown]
# **The gap** is the norms' statistics, 16 bytes per token.
#
# The course's estimate has the same block as a table: for each operation, the tensors that it keeps
# ([formula_of_blocks.py](../course_utils/estimating/formula_of_blocks.py)). It knows every kernel, norm and MLP. Let
# torch judge it. Sort the rows and the storages that hooks found by size, and pair them:

# %%
from course_utils.estimating.formula import block_table

gpt2 = TrainingRun("gpt2", micro_batch=b, seq_len=s, precision="bf16-master")
rows = block_table(gpt2.replace(attention="eager", dropout=block.rate))
rows = {f"{name}, {kept_bytes / unit:.3g}·s·b·h": kept_bytes for name, kept_bytes in rows.items()}
with on_gpu():
    judged = sorted(size([tensor]) for tensor in kept_by(block, x))
pairs = dict(zip(sorted(rows, key=rows.get), judged, strict=False))
show_ledger(rows, pairs, unit="MB", columns=("formula", "by hooks"))
print(f"{len(rows)} rows, {len(judged)} storages")

# %% [markdown]
# Each row is one storage, and none is left over.
#
# Change `rate` to 0.0 where the block is made, and predict which terms disappear.

# %% [markdown]
# ## Flash attention
# A [flash](../docs/glossary.md#flashattention) kernel computes the same attention piece by piece and never writes an
# s×s matrix. In backward it computes softmax again, from queries and keys. **Your guess.** What does the block keep
# now, in s·b·h?

# %%
predict("05.flash", unit="s·b·h")


# %%
def flash(q, k, v, rate):
    return F.scaled_dot_product_attention(q, k, v, dropout_p=rate, is_causal=True)


tokens = 512  # change this
with on_gpu():
    x = torch.randn(b, tokens, h, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    sizes = {}
    for one in (eager, flash):
        sizes[one.__name__] = size(kept_by(Block(h, a, one).to("cuda", torch.bfloat16), x))
for name, kept_bytes in sizes.items():
    print(
        f"{name:5s} attention: {kept_bytes:>10,} bytes, "
        f"{kept_bytes / (tokens * b * h):6.3f} · s·b·h"
    )
reveal("05.flash", sizes["flash"] / (tokens * b * h), unit="s·b·h")
wanted_flash = sizes["eager"] - 5 * a * tokens**2 * b + 4 * a * tokens * b + 24
print(f"eager − 5·a·s²·b + 4·a·s·b + 24: {wanted_flash:,} bytes")

# %% [markdown]
# The term 5·a·s²·b is gone. Flash attention keeps one fp32 number per row and head, its
# [logsumexp](../docs/glossary.md#logsumexp), plus 24 bytes of random state to regenerate the dropout mask. The 34
# stays: the kernel's output and the next matrix's input are one storage. Change 512 to 2048: predict both lines.
#
# It computes softmax twice. Is it slower? Its authors found it faster: no s×s matrix travels through the GPU's memory
# (Dao et al. 2022). On real GPUs ("efficient" and "cudnn" are two more fused kernels, "math" is PyTorch's own version
# without one):

# %%
from course_utils.lessons.shared.recorded_times import recorded_times

recorded_times("attention")

# %% [markdown]
# Compare kernels at the right end only. From 512 to 16,384 tokens the arithmetic grows 32² times. The left end shows
# how long the CPU takes to launch kernels: flash attention even takes longer at 512 tokens than at 1,024.

# %% [markdown]
# ## What else changes the bill?
# Llama's MLP, [SwiGLU](../docs/glossary.md#swiglu), multiplies two branches and has three matrices. At width 8/3·h it
# has as many parameters as GELU's MLP. **Your guess.** What does the block with flash attention keep then?

# %%
predict("05.swiglu", unit="s·b·h")


# %%
class SwiGLU(nn.Module):
    def __init__(self, h, ffn):
        super().__init__()
        self.gate, self.up = nn.Linear(h, ffn, bias=False), nn.Linear(h, ffn, bias=False)
        self.down = nn.Linear(ffn, h, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class WrittenOut(nn.Module):
    def forward(self, x):
        return 0.5 * x * (1 + torch.tanh(0.797885 * (x + 0.044715 * x**3)))


# %%
from course_utils.figures import bars

with on_gpu():
    x = torch.randn(b, s, h, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    written_out = nn.Sequential(nn.Linear(h, 4 * h), WrittenOut(), nn.Linear(4 * h, h))
    variants = {
        "eager": Block(h, a, eager),
        "flash": Block(h, a, flash),
        "flash, no dropout": Block(h, a, flash, rate=0.0),
        "flash, GELU written out": Block(h, a, flash, written_out),
        "flash, RMSNorm": Block(h, a, flash, norm=nn.RMSNorm),
        "flash, SwiGLU of 8/3·h": Block(h, a, flash, SwiGLU(h, 8 * h // 3)),  # change this
    }
    per_unit = {}
    for name, one in variants.items():
        per_unit[name] = size(kept_by(one.to("cuda", torch.bfloat16), x)) / x.numel()
reveal("05.swiglu", list(per_unit.values())[-1], unit="s·b·h")
title = "Eager attention costs a block the most memory, a written-out GELU comes second"
source = "found by hooks, s = 512"
bars(per_unit, title, unit="s·b·h", kind="activations", highlight="eager", provenance=source)

# %% [markdown]
# Or with matplotlib alone, as in a script of your own:

# %%
import matplotlib.pyplot as plt

from course_utils.figures import COLOURS, show

fig, ax = plt.subplots(figsize=(7, 3))
extra = {name: value - per_unit["flash"] for name, value in per_unit.items()}
drawn = ax.barh(list(extra), extra.values(), color=COLOURS["activations"])  # change this: per_unit
ax.bar_label(drawn, fmt="%+.1f", padding=4)
ax.set(title="What each change adds to the block with flash attention", xlabel="s·b·h")
ax.margins(x=0.15)
show(fig, "Eager attention adds most, a written-out GELU comes second; no dropout takes 2 away.")

# %% [markdown]
# Row by row:
#
# - *No dropout*: the two masks disappear: 34 − 2. (Eager attention also loses its mask and dropout's result: the
#   product then reads softmax's output.)
# - *GELU written out*, as in the transformers library's GPT-2, keeps more wide tensors, 8 units each: half the input,
#   the tanh, and what lies between. `nn.GELU` is one kernel.
# - *RMSNorm*: one statistic per token instead of two. The input stays.
# - *SwiGLU*: four wide tensors instead of two: 34 − 2 · 2 · 4 + 4 · 2 · 8/3. Change 8 // 3 to 4: how many more?
#
# Two more: *grouped queries* shrink keys and values, not queries. Under [autocast](../docs/glossary.md#autocast),
# matrices take 16-bit inputs, but the residual stream is fp32, so both norms keep 4 bytes per number, not 2.

# %%
from dataclasses import replace

from course_utils.estimating.formula import activation_bytes, block_bytes

changed = {
    "4 key-value heads": gpt2.replace(model=replace(gpt2.model, kv_heads=4)),
    "autocast": gpt2.replace(precision="amp-bf16"),
}
for name, run in changed.items():
    kept_units = block_bytes(run) / (s * b * gpt2.model.hidden)
    print(f"flash, {name}: {kept_units:.3f} · s·b·h, estimated")

# %% [markdown]
# ### A fused kernel
# A [fused](../docs/glossary.md#kernel-fusion) kernel does several operations as one, and its backward recomputes what
# lies between them. Flash attention is one. Written out, SwiGLU's SiLU(gate) · up keeps SiLU's input and both factors.
# How many wide tensors remain if it is one operation?


# %%
class FusedSwiGLU(torch.autograd.Function):
    """Compute SiLU(gate) · up as one operation; keep only its inputs, redo SiLU in backward."""

    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        return F.silu(gate) * up

    @staticmethod
    def backward(ctx, dy):
        gate, up = ctx.saved_tensors
        sigmoid = gate.sigmoid()
        return dy * up * sigmoid * (1 + gate * (1 - sigmoid)), dy * gate * sigmoid


# %%
gate, up = (torch.randn(64, 256, requires_grad=True) for _ in range(2))
slopes = []
for product in (lambda gate, up: F.silu(gate) * up, FusedSwiGLU.apply):
    slopes += torch.autograd.grad(product(gate, up).sum(), [gate, up])
    print(f"{size(kept_by(product, gate, up)) / gate.nbytes:.0f} wide tensors kept")
print(f"largest difference of the gradients: {(slopes[0] - slopes[2]).abs().max():.4f}")

# %% [markdown]
# Only what lies *inside* the kernel goes away. The product is its output, and the next matrix reads that. So fusion
# saves one of SwiGLU's four wide tensors.

# %% [markdown]
# ## Logits and loss
# The blocks' formula lacks the [logits](../docs/glossary.md#logits), V numbers per token: 128,256 in Llama 3.2 1B. Take
# four sequences of 1,024 tokens under autocast. As in Meta's code, the loss reads an fp32 copy of the logits. **Your
# guess.** How many GB does the *loss* keep for its backward?

# %%
llama1b = TrainingRun("llama3.2-1b", micro_batch=4, seq_len=1024)
V = llama1b.model.vocab  # change this
number = 4 * 1024 * V
print(f"one tensor of s·b·V numbers in bf16: {format_bytes(2 * number, 'GB')}")
predict("05.loss", unit="GB")


# %%
waits_for("05.loss")


def loss_of(logits, targets, upcast):
    return F.cross_entropy(logits.float() if upcast else logits, targets)


keeps = {}
with on_gpu():
    logits = torch.randn(4 * 1024, V, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(V, (4 * 1024,), device="cuda")
    for autocast, upcast in [(True, True), (True, False), (False, True), (False, False)]:
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            keeps[autocast, upcast] = size(kept_by(loss_of, logits, targets, upcast)) / number
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            loss_of(logits, targets, upcast).backward()
            logits.grad = None
        kept = keeps[autocast, upcast]
        most = (torch.cuda.max_memory_allocated() - before) / number
        print(
            f"autocast {autocast!s:5}, fp32 copy {upcast!s:5}: "
            f"bytes per logit {kept:.2f} kept, {most:.2f} at peak"
        )

# %%
by_loss, one_block = keeps[True, True] * number, block_bytes(llama1b)
reveal("05.loss", by_loss)
print(f"estimate 4·s·b·V − by hooks: {4 * number - by_loss:,.0f} bytes, the targets and a sum")
ratio = by_loss / one_block
print(f"the loss keeps {ratio:.1f} times as much as one of {llama1b.model.layers} blocks")

# %% [markdown]
# The first row is Llama's loss. It keeps the [log-softmax](../docs/glossary.md#log-softmax) in fp32, but neither the
# logits nor their copy: log-softmax's backward needs only its output.
#
# ### 16 bits or 32?
# nanoGPT and litgpt read 16-bit logits. Meta's Llama 3, torchtitan and transformers copy them to fp32, torchtune and
# Megatron-LM in [ways that need less](../docs/reference_code.md). A `TrainingRun` takes `logits="compute"` or
# `logits="fp32"`.
#
# Under autocast the copy *saves* two bytes. Without it, log-softmax stays in bf16 and autocast copies that to fp32:
# 2 + 4. Change V to 32_000, Llama 2's vocabulary: predict what the loss keeps, in blocks.
#
# ### Negligible?
# Korthikanti et al. (section 4.3) also count bytes outside the blocks:
#
# $$s b h \left(1 + 4 \left(1 + \frac{V}{h}\right)\right)$$
#
# For their 22B model (table 3), they call that "less than 0.01% of the total activation memory requirements". Put in
# the sizes.


# %%
def outside(h, a, L, V, s, flash=False):
    """Share of activations of embeddings, last norm, head and loss, by the paper's formulas."""
    scores = 0 if flash else 5 * a * s / h
    ends, blocks = 1 + 4 * (1 + V / h), L * (34 + scores)
    return ends / (ends + blocks)


letters = {"22B": (6144, 64, 48, 51200, 2048)}
for name in ("gpt3-175b", "gpt2-xl", "llama3.2-1b"):
    model = PRESETS[name]
    letters[model.name] = (model.hidden, model.heads, model.layers, model.vocab, 1024)
for name, of_model in letters.items():
    print(
        f"{name:12s} s = {of_model[-1]:,}: {outside(*of_model):7.2%} eager, "
        f"{outside(*of_model, flash=True):7.2%} flash"
    )

# %% [markdown]
# The paper's own formula gives over half a percent, and far more for a small model with a large vocabulary and flash
# attention.
#
# ## The loss in chunks
# Each token's loss needs only its own V logits. So take the tokens chunk by chunk: a [chunked
# loss](../docs/glossary.md#chunked-loss).
#
# GPT-2 XL, 32 sequences of 1,024 tokens, all in 16 bits. The loss's backward needs three tensors of s·b·V numbers at
# once: the kept log-softmax, its gradient, and the logits' gradient. **Your guess.** By how many GB does the peak fall
# with 8 chunks?

# %%
xl = TrainingRun("gpt2-xl", micro_batch=32, seq_len=1024, precision="bf16-master")
s, b, h, V = xl.seq_len, xl.micro_batch, xl.model.hidden, xl.model.vocab
print(f"one tensor of s·b·V numbers in bf16: {format_bytes(2 * s * b * V, 'GB')}")
predict("05.chunks", unit="GB")

# %% [markdown]
# Chunks by themselves save nothing: autograd keeps the log-softmax of each. So call each chunk through `checkpoint`,
# which keeps only a function's inputs and calls it again in backward ([lesson 06](06_recomputation.ipynb), also for
# `use_reentrant`). Chunks may differ in length, so add sums and divide by the number of tokens.


# %%
def chunked_loss(head, features, targets, chunks):
    """The mean loss of all tokens; only one chunk's logits exist at a time."""

    def part(piece, wanted):
        return F.cross_entropy(head(piece), wanted, reduction="sum") / len(targets)

    pieces = zip(features.chunk(chunks), targets.chunk(chunks), strict=True)
    again = torch.utils.checkpoint.checkpoint
    return sum(again(part, piece, wanted, use_reentrant=False) for piece, wanted in pieces)


# %% [markdown]
# Are loss and gradients the same? First ask a small head on the CPU.

# %%
features = torch.randn(1000, 64, requires_grad=True)
head = nn.Linear(64, 4096, bias=False)
targets = torch.randint(4096, (1000,))
whole = F.cross_entropy(head(features), targets)
chunked = chunked_loss(head, features, targets, 8)
print(f"loss {whole.item():.4f} in one piece, {chunked.item():.4f} in 8 chunks")
slopes = [torch.autograd.grad(loss, [features, head.weight]) for loss in (whole, chunked)]
for name, one, other in zip(("features", "head"), *slopes, strict=True):
    apart = (one - other).norm()
    print(f"gradient of {name}: norm {one.norm():.4f}, of the difference {apart:.4f}")

# %%
chunks = 8  # change this
peaks = []
with on_gpu():
    features = torch.randn(s * b, h, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    head = nn.Linear(h, V, bias=False).to("cuda", torch.bfloat16)
    targets = torch.randint(V, (s * b,), device="cuda")
    for count in (1, chunks):
        features.grad = head.weight.grad = None
        torch.cuda.reset_peak_memory_stats()
        if count > 1:
            loss = chunked_loss(head, features, targets, count)
        else:
            loss = F.cross_entropy(head(features), targets)
        loss.backward()
        peaks.append(torch.cuda.max_memory_allocated())
    del features, head, targets, loss
falls = peaks[0] - peaks[1]
reveal("05.chunks", falls)

# %% [markdown]
# **Estimate.** With c chunks, each of the three tensors is c times smaller. The peak falls by
#
# $$3 \cdot 2 \cdot s b V \left(1 - \frac{1}{c}\right)$$
#
# But at backward's last chunk, the others have already left gradients behind.

# %%
closed = {
    "three tensors of s·b·V": 3 * 2 * s * b * V * (chunks - 1) // chunks,
    "new: the head's gradient": -2 * V * h,
    "new: gradients of the other chunks' features": -2 * s * b * h * (chunks - 1) // chunks,
}
show_ledger(closed, {"the peak falls by": falls}, columns=("estimate", "by counter"))
for run in (xl.replace(recompute="full", loss_chunks=count) for count in (1, 8)):
    peak = format_bytes(estimate(run).total, "GB", 1)
    print(
        f"a step with full recomputation, loss_chunks={run.loss_chunks}: "
        f"{peak} at the peak, estimated"
    )

# %% [markdown]
# **The gap**, less than a thousandth, is the allocator's: it rounds large requests up and leaves small remainders.
# In arithmetic, chunks cost one more product with the head, 2·s·b·h·V [FLOPs](../docs/glossary.md#flops). A fused
# kernel never even writes the logits to memory ([Wijmans et al. 2024](https://arxiv.org/abs/2411.09009)). Change 8 to
# 2, then to 64: how much of 3·2·s·b·V is left to gain?
#
# With full recomputation (lesson 06), the loss decides what fits 32 GB: see the last two lines.
#
# What do chunks cost in time? Take GPT-2, whose head is nearly a third of its weights:

# %%
small = PRESETS["gpt2"]
again = 2 * small.hidden * small.vocab / (6 * small.parameters)
print(f"one more product with the head: 2·h·V of a step's 6·N FLOPs per token, {again:.0%}")
recorded_times("loss")

# %% [markdown]
# The recorded step grows by much more than its arithmetic. The log-softmax runs again, too, and waits for memory. Each
# chunk makes a gradient of the whole head, V·h numbers, and adds it to the others. And more and shorter kernels are
# launched. This recording cannot say which share each has. Take few chunks.

# %% [markdown]
# ## Twice the batch, twice the length
# Doubling b doubles a block's activations. **Your guess.** By what factor do they grow in a tiny GPT with eager
# attention, when s grows from 128 to 256?

# %%
tiny = PRESETS["tiny-gpt"]
h, a = tiny.hidden, tiny.heads
print(f"h = {h}, a = {a}: at s = 128, 5·a·s/h = {5 * a * 128 / h}")
predict("05.double", unit="times")

# %%
from course_utils.figures import lines

longest = 256  # change this
lengths = list(range(64, longest + 1, 64))
curves = {"eager": [], "flash": []}
with on_gpu():
    for attention in (eager, flash):
        block = Block(h, a, attention).to("cuda", torch.bfloat16)
        for s in lengths:
            x = torch.randn(4, s, h, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            curves[attention.__name__].append(size(kept_by(block, x)))
for s, kept_bytes in list(zip(lengths, curves["eager"], strict=True))[-3:]:
    gap = plus_minus(4 * s * (34 * h + 5 * a * s + 16) - kept_bytes)
    print(f"s = {s}: estimate − by hooks: {gap} bytes")
reveal("05.double", curves["eager"][3] / curves["eager"][1], unit="times")

# %%
series = {
    name: (lengths, [kept_bytes / 1e6 for kept_bytes in curve]) for name, curve in curves.items()
}
title = "Eager attention's curve bends upward with s², flash attention's stays a straight line"
lines(series, title, "sequence length s, b = 4", "MB kept by a block", provenance="found by hooks")

# %% [markdown]
# Neither 2 nor 4: the linear part doubles, the quadratic part quadruples. "Twice the length, four times the memory"
# holds only where 5·a·s/h is far above 34. Change 256 to 1024: predict where eager attention's curve ends.

# %% [markdown]
# ## Llama-3 8B: 97, 17 and 1 GB
# A lecture, after the [Ultra-Scale Playbook](https://huggingface.co/spaces/nanotron/ultrascale-playbook), gives three
# numbers for one sequence of 4,096 tokens: 97 GB of [activations](../docs/glossary.md#activations), 17 GB with
# selective [recomputation](../docs/glossary.md#activation-recomputation), 1 GB with full. **Your guess.** How many GiB
# does a real Llama-3 8B keep at the end of forward, with flash attention, nothing recomputed?

# %%
predict("05.llama", unit="GiB")

# %%
from course_utils.estimating.formula import loss_bytes
from course_utils.estimating.published import (
    checkpoints_bytes,
    korthikanti_activation_bytes,
    korthikanti_block_bytes,
)

llama = TrainingRun("llama3-8b", micro_batch=1, seq_len=4096, attention="eager")  # change this
llama = llama.replace(precision="bf16-master")
s, b, h, L = llama.seq_len, llama.micro_batch, llama.model.hidden, llama.model.layers
lecture = {
    "all: L·s·b·h·(34 + 5·a·s/h)": korthikanti_activation_bytes(llama),
    "selective: L·s·b·h·34": 34 * s * b * h * L,
    "full: one input per block, 2·s·b·h·L": checkpoints_bytes(llama),
    "left out: the block being recomputed": korthikanti_block_bytes(llama),
    "left out: what the loss keeps": loss_bytes(llama),
}
a, long = llama.model.heads, 16_384
lecture["all, at s = 16,384"] = L * long * b * (34 * h + 5 * a * long)
for name, kept_bytes in lecture.items():
    gib, gb = format_bytes(kept_bytes, "GiB", 1), format_bytes(kept_bytes, "GB", 1)
    print(f"{name:38s} {gib:>12s} = {gb}")

# %% [markdown]
# The lecture's numbers are all here, but in GiB, and by the formula of a *GPT* with eager attention. Its "up to 1,500
# GB" for long sequences fits the same formula at s = 16,384, twice the positions that Llama-3 8B has. Nearly all of it
# is 5·a·s²·b, which a flash kernel never keeps. Llama has no dropout, [RMSNorm](../docs/glossary.md#rmsnorm) instead of
# LayerNorm, SwiGLU instead of GELU, and [grouped queries](../docs/glossary.md#grouped-queries). Change first the model,
# then the kernel:

# %%
waits_for("05.llama")
with_flash = llama.replace(attention="flash", optimizer="sgd")  # forward is the same with Adam
real = measure(with_flash, steps=1)
kinds = {
    "the lecture: GPT's formula": korthikanti_activation_bytes(llama),
    "a Llama with eager attention": activation_bytes(llama),
    "the lecture: selective": 34 * s * b * h * L,
    f"a Llama with flash attention, {real.word}": real.moments["end of forward"]["activations"],
}
title = "A real Llama keeps a fifth of the lecture's figure, without recomputing anything"
last, source = list(kinds)[-1], str(real.provenance)
bars(kinds, title, unit="GiB", kind="activations", highlight=last, provenance=source)

# %%
reveal("05.llama", kinds[f"a Llama with flash attention, {real.word}"], unit="GiB")
for name, kept_bytes in block_table(with_flash).items():
    print(f"{name:24s} {kept_bytes / (s * b * h):6.3f} · s·b·h, estimated")
left = real.moments["end of forward"]["activations"] - activation_bytes(with_flash)
print(f"{real.word} − estimate: {left:,} bytes = {L} layers × 2 blocks of 512 bytes")

# %% [markdown]
# **The gap** is the kernel's random state again: two tensors of a few numbers per layer, each in a block of 512 bytes.
#
# Flash attention removes the s² term, the reason for [selective
# recomputation](../docs/glossary.md#selective-recomputation). The rest is above the lecture's 17 GiB: SwiGLU's four
# wide tensors are most of a block. Change `seq_len` to 2048: which of the lecture's numbers halve?
#
# The lecture also says of a small Llama, states included: "over 50 GB" for one sequence of 4,096 tokens, and, for 1
# billion parameters, 25 GB at s = 8,192 with selective recomputation.

# %%
billion = TrainingRun("llama3.2-1b", micro_batch=1, seq_len=8192, precision="bf16-master")
half = billion.replace(seq_len=4096)
kept_1b = 34 * 8192 * billion.model.hidden * billion.model.layers
sums = {
    "s = 4,096: 16 bytes · 10⁹ and GPT's formula": 16 * 10**9 + korthikanti_activation_bytes(half),
    "s = 8,192: 16 bytes · 10⁹ and 34·s·b·h·L": 16 * 10**9 + kept_1b,
}
for precision, fused in [("fp32", "efficient"), ("amp-bf16", "flash"), ("bf16-master", "flash")]:
    for kernel in ("eager", fused):
        step = half.replace(precision=precision, attention=kernel)
        sums[f"a step of Llama 3.2 1B, {precision}, {kernel}"] = estimate(step).total
for name, total in sums.items():
    print(f"{name:45s} {format_bytes(total, 'GB', 1)}")

# %% [markdown]
# "Over 50 GB" depends on the recipe, which the lecture does not say: in fp32 or under autocast a step with eager
# attention takes more. With 16-bit weights, or with a fused kernel, it takes less. The sum for 8,192 tokens mixes two
# models: states of 10⁹ parameters, and activations of a larger one.
#
# ## The 60 GB question
# For GPT-2 XL and 32 sequences of 1,024 tokens, a footnote of the [ZeRO](../docs/glossary.md#zero) paper says
# 12·h·b·s·L numbers, the "60 GB" that so many texts repeat ([Rajbhandari et al.
# 2020](https://arxiv.org/abs/1910.02054), section 3.2). It does not say which twelve. **Your guess.** How many GB does
# ZeRO's number leave out, with flash attention?

# %%
from course_utils.estimating.formula import head_bytes, stem_bytes
from course_utils.estimating.published import zero_activation_bytes

numbers = 12 * xl.model.hidden * xl.micro_batch * xl.seq_len * xl.model.layers
print(f"ZeRO's formula: {numbers / 1e9:.1f} · 10⁹ numbers (“about 30 B activations”: a count)")
print(f"in 16 bits: {format_bytes(zero_activation_bytes(xl), 'GB', 1)}")
predict("05.sixty", unit="GB")

# %%
waits_for("05.sixty")
one_pass = xl.replace(optimizer="sgd")  # forward is the same with Adam, and in each step
flash_step = measure(one_pass, steps=1)
eager_step = measure(one_pass.replace(attention="eager"), steps=1)
kept_flash = flash_step.moments["end of forward"]["activations"]
three = {
    "ZeRO: 12·h·b·s·L": zero_activation_bytes(xl),
    f"{flash_step.word}, flash": kept_flash,
    "34 + 5·a·s/h": korthikanti_activation_bytes(xl),
    f"{eager_step.word}, eager": eager_step.moments["end of forward"]["activations"],
}
title = "Neither flash nor eager attention keeps ZeRO's sixty gigabytes"
source = str(flash_step.provenance)
bars(three, title, kind="activations", highlight="ZeRO: 12·h·b·s·L", provenance=source)

# %% [markdown]
# One choice of tensors from the ledger gives exactly ZeRO's 24 bytes. What is missing? Add terms to `mine` and run the
# cell, until less than a tenth of a GB is left over.

# %%
reveal("05.sixty", kept_flash - zero_activation_bytes(xl))
s, b, h, a, L = xl.seq_len, xl.micro_batch, xl.model.hidden, xl.model.heads, xl.model.layers
unit, token = s * b * h * L, s * b
zero_terms = {
    "inputs of four matrices": 14 * unit,
    "queries, keys, values": 6 * unit,
    "inputs of two norms": 4 * unit,
}
mine = {"your term": 0 * unit}  # change this
found, columns = {"with flash attention": kept_flash}, ("estimate", flash_step.word)
show_ledger(zero_terms | mine, found, columns=columns)

# %% [markdown]
# Did you find them all?

# %%
missing = {
    "GELU's input: 8": 8 * unit,
    "dropout masks: 2": 2 * unit,
    "norms' statistics": 16 * token * L,
    "flash's logsumexp": 4 * a * token * L,
    "outside the blocks": stem_bytes(xl) + head_bytes(xl),
}
show_ledger(zero_terms | missing, found, columns=columns)
rest = kept_flash - sum((zero_terms | missing).values())
print(f"left over: {rest:,} bytes = {L} layers × 2 blocks of 512 bytes for the random state")

# %% [markdown]
# **The gap** is closed. "60 GB" counts twelve tensors of equal width. A block keeps 34 bytes per s·b·h. Eager attention
# adds 5·a·s/h, here by far the larger part.

# %% [markdown]
# ## A map of what fits
# Which is the smallest card that takes the *whole* step, states included, of 4 sequences of 2,048 tokens? With which
# kernel does the map's line fall faster? On a small card, what moves it more, precision or recomputation? Then change
# the model to "gpt2-xl": where is the line?

# %%
from course_utils.lessons.activations.widget import activation_map

activation_map("llama3.2-1b", gpu="A100-80GB")  # change this

# %% [markdown]
# <details><summary>An answer</summary>
#
# As the map opens, no card below 80 GB takes them. With bf16-master, their tensors fit an A100 with 40 GB by so little
# that the allocator decides: see the next cell. With full recomputation it takes them easily. With eager attention the
# line falls faster to the right, where s² dominates. With an RTX 3090's or 4090's 24 GB, recomputation doubles the
# batch at most lengths, and bf16-master changes nothing. An L4 gives a program less: there bf16-master decides whether
# anything fits. With 16 GB nothing fits: all precisions keep 16 bytes per parameter, more than the card has. GPT-2 XL's
# line on 80 GB ends at 1,024 tokens, its last position.
#
# </details>
#
# The map's line is the estimate. Where little room is left, ask the allocator: `verdict` sends each allocation of a
# simulated step through it.

# %%
from course_utils import verdict

near = TrainingRun("llama3.2-1b", 4, 2048, precision="bf16-master")  # change this
print(verdict(near, "A100-40GB"))

# %% [markdown]
# ## In your own script
# Compute the loss of a large vocabulary in chunks, so that only one chunk's logits exist at a time.

# %%
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


def chunked_loss(head, features, targets, chunks=8, ignore=-100):
    """The mean cross-entropy of `head(features)`; features are (tokens, h), targets (tokens,)."""

    def part(piece, wanted):
        return F.cross_entropy(head(piece).float(), wanted, reduction="sum", ignore_index=ignore)

    pieces = zip(features.chunk(chunks), targets.chunk(chunks), strict=True)
    total = sum(checkpoint(part, *piece, use_reentrant=False) for piece in pieces)
    return total / (targets != ignore).sum()


device = "cuda" if torch.cuda.is_available() else "cpu"
head = torch.nn.Linear(64, 50_000, bias=False, device=device)  # in your script, the model's own
# the last block's output, after its norm
features = torch.randn(1024, 64, device=device, requires_grad=True)
loss = chunked_loss(head, features, torch.randint(50_000, (1024,), device=device))
loss.backward()

# %% [markdown]
# ## Five questions

# %%
from course_utils.lessons import quiz

quiz(5)

# %% [markdown]
# ## Take home
# **Remember** An operation keeps what its derivative needs. A storage counts once. An estimate is done when its
# residual has a name.
#
# **Breaks when** you use GPT's 34 + 5·a·s/h for a Llama, for a flash kernel, or under autocast; or when you leave out
# what the loss keeps.
#
# **Cheat-sheet line** a block, 16-bit: GPT with dropout 34·s·b·h, eager + 5·a·s²·b · without dropout 32 and 2 · Llama
# with flash: s·b·(12·h + 4·kv + 8·ffn) · loss: 2·s·b·V, autocast 6, fp32 logits 4; in c chunks none of it stays, for
# 2·s·b·h·V FLOPs.
#
# This lesson corrects claims 3, 9, 10, 11 and 28 of [what the sources got wrong](../docs/errata.md).
#
# Now solve the [exercises of this lesson](../exercises/05_activations.ipynb).
