# ---
# jupyter:
#   course:
#     minutes: 85
#     cpu_seconds: 25
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 05 · What does each operation keep?
#
# **85 minutes.** You should know [lesson 01](01_where_did_the_memory_go.ipynb), the parts of a [transformer
# block](../docs/glossary.md#transformer-block), and the derivative of a product. You need no GPU.
#
# This lesson derives what a block keeps for backward, tensor by tensor, then what the loss keeps. Symbols: b sequences
# of s tokens, hidden size h, a heads, L layers, vocabulary V.

# %% [markdown]
# ## Operation by operation
# An operation keeps only the tensors that its derivative needs: its
# [activations](../docs/glossary.md#activations). A GPT has eight operations: addition, division by a number, a linear
# layer, GELU, softmax, dropout, LayerNorm, a product of two activations. Each one gets s·b·h numbers in
# [bf16](../docs/glossary.md#fp16-and-bf16). **Your guess.** How many MB do all eight keep together?

# %%
import torch
from torch import nn
from torch.nn import functional as F

from course_utils import on_gpu
from course_utils.interactive.guesses import predict, reveal

s, b, h = 1024, 4, 1024
n = s * b * h
print(f"one tensor of s·b·h numbers in bf16: {2 * n / 1e6:.2f} MB")
predict("05.operations", unit="MB")

# %% [markdown]
# ### Ask autograd
# Autograd passes each tensor that it saves to your hook, and keeps what the hook returns. In backward, a second
# function turns that into the tensor again. (`detach` gives the same storage without a graph. A hook that returns its
# tensor as it is can make a cycle that Python never frees.) Inside `on_gpu()`, "cuda" is your GPU or a [simulated
# one](../docs/glossary.md#simulated-gpu).


# %%
def keep(tensor):
    print(f"{tuple(tensor.shape)!s:16} {tensor.dtype!s:15} {tensor.nbytes:>10,} bytes")
    return tensor.detach()


with on_gpu():
    layer = nn.LayerNorm(h).to("cuda", torch.bfloat16)  # change this
    x = torch.randn(b, s, h, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda kept: kept):
        out = layer(x)

# %% [markdown]
# LayerNorm keeps its input, its two weights, and two fp32 numbers per token. Change the layer to `nn.Dropout(0.1)`,
# then to `nn.Linear(h, h).to("cuda", torch.bfloat16)`. Predict the lines first.
#
# `kept_by` lists each [storage](../docs/glossary.md#storage) once, even if two operations save it. It leaves out
# weights, which are in memory anyway.


# %%
def kept_by(operation, *inputs):
    """One tensor for each storage that autograd keeps for backward; weights left out."""
    kept = {}

    def keep(tensor):
        kept.setdefault(tensor.untyped_storage(), tensor.detach())
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        operation(*inputs)
    weights = operation.parameters() if isinstance(operation, nn.Module) else []
    own = [weight.untyped_storage() for weight in weights]
    return [tensor for storage, tensor in kept.items() if storage not in own]


def size(tensors):
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


# %% [markdown]
# **Your turn.** Four operations are filled in: additions and divisions have a constant derivative, a linear layer and
# GELU need their input. Think of the other four derivatives, and write how many bytes per number they keep. A dropout
# mask is stored as bool: one byte per number.

# %%
with on_gpu():
    y = torch.randn_like(x, requires_grad=True)
    linear, norm = nn.Linear(h, h).to("cuda", torch.bfloat16), nn.LayerNorm(h)
    found = {
        "addition": size(kept_by(torch.add, x, y)),
        "division by a number": size(kept_by(torch.div, x, 8)),
        "linear layer": size(kept_by(linear, x)),
        "GELU": size(kept_by(F.gelu, x)),
        "softmax": size(kept_by(torch.softmax, x, -1)),
        "dropout": size(kept_by(F.dropout, x, 0.1)),
        "LayerNorm": size(kept_by(norm.to("cuda", torch.bfloat16), x)),
        "product of two": size(kept_by(torch.mul, x, y)),
    }
mine = {"addition": 0, "division by a number": 0, "linear layer": 2, "GELU": 2}
mine |= {"softmax": 0, "dropout": 0, "LayerNorm": 0, "product of two": 0}  # write these four
wrong = [name for name, each in mine.items() if each != found[name] // n]
print(f"Not yet: {', '.join(wrong)}." if wrong else "Right.")

# %% [markdown]
# <details><summary>The derivatives</summary>
#
# | operation | derivative with respect to x | backward needs |
# |---|---|---|
# | x + y | 1 | nothing |
# | x / 8 | 1/8 | nothing: 8 is not a tensor |
# | x · Wᵀ | for W: dL/dy · x | its input |
# | GELU(x) | a function of x | its input |
# | softmax(x) = p | p·(dL/dp − Σ p·dL/dp) | its *output* |
# | dropout(x) | 0 or 1/(1−rate) | a mask, one byte per number |
# | LayerNorm(x) | a function of x, mean, standard deviation | its input, and two fp32 numbers per token |
# | x · y, both activations | y, and x | both |
#
# </details>

# %%
estimated = sum([0, 0, 2 * n, 2 * n, 2 * n, n, 2 * n + 8 * s * b, 4 * n])
for name, kept in found.items():
    print(f"{name:21s} {kept / 1e6:6.2f} MB = {kept / n:.3f} bytes per number")
print(f"the gap: estimated − kept = {estimated - sum(found.values())} bytes")
reveal("05.operations", sum(found.values()), unit="MB")

# %% [markdown]
# **The gap** is zero. One bit per number would do for dropout's [mask](../docs/glossary.md#dropout-mask). LayerNorm's
# fp32 *statistics* are small, but without them no [ledger](../docs/glossary.md#ledger) closes to the byte. (CPU kernels
# differ: put "cpu" for "cuda" in the cell with the hook. Dropout's mask is then bf16, and so are the statistics.)
#
# Does softmax's derivative need only its output? And LayerNorm ([Ba et al. 2016](https://arxiv.org/abs/1607.06450))
# takes the mean μ and variance σ² of each token's h numbers:
#
# $$\hat x = \frac{x - \mu}{\sqrt{\sigma^2 + \varepsilon}} \qquad y = \gamma \hat x + \beta \qquad
# \frac{dL}{dx} = \frac{g - \text{mean}(g) - \hat x \cdot \text{mean}(g \hat x)}{\sqrt{\sigma^2 + \varepsilon}}
# \quad \text{with} \quad g = \gamma \cdot \frac{dL}{dy}$$
#
# So x, μ and $1 / \sqrt{\sigma^2 + \varepsilon}$ are enough: backward computes $\hat x$ again. Check both with values.

# %%
torch.manual_seed(0)
x = torch.randn(4, 16, requires_grad=True)
dy, gain = torch.randn(4, 16), torch.randn(16)

p = x.softmax(-1)
by_hand = p * (dy - (p * dy).sum(-1, keepdim=True))
by_torch = torch.autograd.grad(p, x, dy)[0]
print(f"softmax: largest difference {(by_hand - by_torch).abs().max():.4f}")

mean, root = x.mean(-1, keepdim=True), (x.var(-1, correction=0, keepdim=True) + 1e-5).sqrt()
normal, g = (x - mean) / root, gain * dy
by_hand = (g - g.mean(-1, keepdim=True) - normal * (g * normal).mean(-1, keepdim=True)) / root
by_torch = torch.autograd.grad(F.layer_norm(x, [16], gain), x, dy)[0]
print(f"LayerNorm: largest difference {(by_hand - by_torch).abs().max():.4f}")

# %% [markdown]
# ### An MLP with another nonlinearity
# An MLP's nonlinearity and its second matrix each keep a wide tensor: 4h numbers per token. GELU needs its *input*,
# ReLU only its *output*: where that is zero, so is the derivative.
#
# **Your guess.** How many MB does the MLP keep with ReLU instead of GELU?

# %%
with on_gpu():
    narrow = torch.randn(b, s, h, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    mlp = nn.Sequential(nn.Linear(h, 4 * h), nn.GELU(), nn.Linear(4 * h, h))
    with_gelu = size(kept_by(mlp.to("cuda", torch.bfloat16), narrow))
print(f"with GELU: {with_gelu / 1e6:.1f} MB, that is 2·s·b·h + 2 · 2·s·b·4h")
predict("05.relu", unit="MB")

# %%
with on_gpu():
    mlp[1] = nn.ReLU()  # change this
    kept = kept_by(mlp, narrow)
print([tuple(tensor.shape) for tensor in kept])
reveal("05.relu", size(kept), unit="MB")

# %% [markdown]
# The estimate is 2·s·b·h for the first matrix's input plus 8·s·b·h for ReLU's output. The second matrix keeps the
# *same* tensor: count storages, not operations. Change the line to `nn.SiLU()` or `nn.Sigmoid()`: does it keep its
# input or its output?

# %% [markdown]
# ## A picture of a block
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
    def __init__(self, h, a, attention, mlp=None, rate=0.1):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(h), nn.LayerNorm(h)
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
print(f"one s×s matrix in each head is a·s/h = {a * s / h:g} numbers per s·b·h")
predict("05.block", unit="s·b·h")

# %% [markdown]
# `draw_block` executes any block once, and draws what torch did. A circle is an operation, an arrow a tensor that the
# next one reads. A bar is as long as the tensor that the operation makes. It is filled if autograd keeps it.
# The numbers are its bytes per s·b·h, and its MB.

# %%
from course_utils.lessons.shared.block_picture import draw_block

with on_gpu():
    x = torch.randn(b, s, h, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    block = Block(h, a, eager, rate=0.1).to("cuda", torch.bfloat16)
    before = torch.cuda.memory_allocated()
    y = block(x)
    grown = torch.cuda.memory_allocated() - before
    by_hooks = size(kept_by(block, x))
    picture = draw_block(block, x)
reveal("05.block", by_hooks / (s * b * h), unit="s·b·h")
print(f"hooks: {by_hooks:,} bytes; memory_allocated() grew by {grown:,}")
picture

# %% [markdown]
# Hooks and allocator nearly agree. Hooks count the input x, the allocator counts the output y, equally large. The
# allocator adds remainders too small to split off ([lesson 12](12_allocator_and_fragmentation.ipynb)).
#
# Read the white bars first. No derivative needs the scores before softmax, or what only goes into an addition. Each
# *copy* brings queries, keys, values or their mixture into one piece for a matrix product.
#
# Add the filled bars. Those without s² come to 34 bytes per s·b·h: inputs of four matrices 2 + 2 + 2 + 8, queries, keys
# and values 6, GELU's input 8, inputs of two norms 2 + 2, two dropout masks 1 + 1. The three widest have one number per
# head for each *pair* of tokens: softmax's output 2, its mask 1, dropout's result 2. This is equation 1 of [Korthikanti
# et al. 2022](https://arxiv.org/abs/2205.05198):
#
# $$34 \cdot s b h + 5 a s^2 b = s b h \left(34 + \frac{5 a s}{h}\right)$$

# %%
closed = 34 * s * b * h + 5 * a * s**2 * b
print(f"estimated − by hooks: {closed - by_hooks:,} bytes")
print(f"the norms' statistics, 2 fp32 numbers per token and norm: {2 * 2 * 4 * s * b:,} bytes")

# %% [markdown]
# **The gap** is the norms' statistics, 16 bytes per token, too small for a row of the picture.

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


# %%
lengths = [256, 512, 768, 1024]  # change this
curves = {"eager": [], "flash": []}
with on_gpu():
    for attention in (eager, flash):
        block = Block(h, a, attention).to("cuda", torch.bfloat16)
        for tokens in lengths:
            x = torch.randn(b, tokens, h, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            curves[attention.__name__].append(size(kept_by(block, x)))
by_flash = curves["flash"][1]
closed = curves["eager"][1] - 5 * a * s**2 * b + 4 * a * s * b + 24
print(f"flash: {by_flash:,} bytes; eager − 5·a·s²·b + 4·a·s·b + 24 = {closed:,}")
reveal("05.flash", by_flash / (s * b * h), unit="s·b·h")

# %% [markdown]
# The term 5·a·s²·b is gone. Flash attention keeps one fp32 number per row and head, its
# [logsumexp](../docs/glossary.md#logsumexp), plus 24 bytes of random state to regenerate the dropout mask. The 34
# stays: the kernel's output and the next matrix's input are one storage.
#
# It computes softmax twice. Is it slower? Its authors found it faster: no s×s matrix travels through the GPU's memory
# ([Dao et al. 2022](https://arxiv.org/abs/2205.14135)). Recorded on a real GPU ("efficient" and "cudnn" are two more
# fused kernels, "math" is PyTorch's own version without one):

# %%
from course_utils.lessons.shared.recorded_times import recorded_times

recorded_times("attention")

# %% [markdown]
# Compare kernels at the right end only. From 512 to 16,384 tokens the arithmetic grows 32² times. The left end shows
# how long the CPU takes to launch kernels: flash attention even takes longer at 512 tokens than at 1,024.
#
# ### Twice the length
# Doubling b doubles a block's activations. **Your guess.** By what factor do they grow in this block with eager
# attention, when s grows from 512 to 1,024?

# %%
predict("05.double", unit="times")

# %%
import matplotlib.pyplot as plt

from course_utils.figures import show

reveal("05.double", curves["eager"][3] / curves["eager"][1], unit="times")
fig, ax = plt.subplots(figsize=(7, 2.5))
for name, curve in curves.items():
    ax.plot(lengths, [kept / 1e6 for kept in curve], marker="o", label=name)
ax.legend()
ax.set(xlabel="sequence length s", ylabel="MB", ylim=0)
ax.set(title="Eager attention bends upward with s², flash attention does not")
show(fig, "Eager attention's curve bends upward with s², flash attention's is a straight line.")

# %% [markdown]
# Neither 2 nor 4: the linear part doubles, the quadratic part quadruples. "Twice the length, four times the memory"
# holds only where 5·a·s/h is far above 34. Put 2048 at the end of `lengths`: predict where eager attention's curve
# ends.

# %% [markdown]
# ### Llama's MLP
# [SwiGLU](../docs/glossary.md#swiglu) multiplies two branches and has three matrices. At width 8/3·h it has as many
# parameters as GELU's MLP. **Your guess.** What does the block with flash attention keep then?

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


# %%
with on_gpu():
    x = torch.randn(b, s, h, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    variants = {
        "eager": Block(h, a, eager),
        "flash": Block(h, a, flash),
        "flash, no dropout": Block(h, a, flash, rate=0.0),
        "flash, SwiGLU": Block(h, a, flash, SwiGLU(h, 8 * h // 3)),  # change this
    }
    for name, one in variants.items():
        variants[name] = size(kept_by(one.to("cuda", torch.bfloat16), x)) / x.numel()

# %%
reveal("05.swiglu", variants["flash, SwiGLU"], unit="s·b·h")
fig, ax = plt.subplots(figsize=(7, 2.5))
extra = {name: each - variants["flash"] for name, each in variants.items()}
drawn = ax.barh(list(extra), extra.values(), color="tab:green")  # change this: variants
ax.bar_label(drawn, fmt="%+.1f", padding=4)
ax.set(title="What each change adds to the block with flash attention", xlabel="s·b·h")
ax.margins(x=0.15)
show(fig, "Eager attention adds most, SwiGLU comes second; no dropout takes 2 away.")

# %% [markdown]
# SwiGLU keeps four wide tensors instead of two: 34 − 2 · 2 · 4 + 4 · 2 · 8/3. Change 8 // 3 to 4: how many more?
# [Grouped queries](../docs/glossary.md#grouped-queries) shrink keys and values, not queries. So with 16-bit weights
# and flash attention, a Llama keeps s·b·(12·h + 4·kv + 8·ffn) bytes in each block, and little more.

# %% [markdown]
# ## Change a part
# Here is the picture with controls. Each choice executes the block again. The line above it compares torch's hooks with
# the course's closed form, a table of what each operation keeps
# ([formula_of_blocks.py](../course_utils/estimating/formula_of_blocks.py)). With flash attention the gap is the 24
# bytes of random state, which the form leaves out.
#
# Predict each number before you choose: flash attention without dropout; autocast; GELU in single operations, as the
# transformers library's GPT-2 writes it; both norms in single operations. (*torch.compile* is for [lesson
# 07](07_torch_compile.ipynb).)

# %%
from course_utils.lessons.shared.living_block import living_block

living_block(attention="flash")

# %% [markdown]
# <details><summary>What you saw</summary>
#
# Under [autocast](../docs/glossary.md#autocast), matrices take 16-bit inputs, but the residual stream is fp32. So both
# norms keep 4 bytes per number, not 2, and their fp32 outputs are copied to bf16: 38 instead of 34. Without dropout the
# two masks disappear: 34 − 2. With eager attention that also removes the mask of the weights and dropout's result: the
# product then reads softmax's output.
#
# GELU in single operations adds three wide tensors, of 8 bytes per s·b·h each: every operation keeps what it alone
# needs. (Under autocast they take twice that, because powers are computed in fp32.) `nn.GELU` is one kernel. Two norms
# in single operations add 4 bytes per s·b·h.
#
# </details>

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
tokens, V = 4 * 1024, 128_256  # change this
print(f"one tensor of s·b·V numbers in bf16: {2 * tokens * V / 1e9:.2f} GB")
predict("05.loss", unit="GB")


# %%
def loss_of(logits, targets, upcast):
    return F.cross_entropy(logits.float() if upcast else logits, targets)


with on_gpu(needs="8 GB"):  # a smaller card than that is simulated
    logits = torch.randn(tokens, V, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(V, (tokens,), device="cuda")
    for autocast, upcast in [(False, False), (False, True), (True, False), (True, True)]:
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            kept = size(kept_by(loss_of, logits, targets, upcast))
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            loss_of(logits, targets, upcast).backward()
        logits.grad = None
        most = (torch.cuda.max_memory_allocated() - before) / logits.numel()
        each = kept / logits.numel()
        print(f"{autocast=!s:5} {upcast=!s:5}: bytes per logit {each:.2f} kept, {most:.2f} at peak")
reveal("05.loss", kept)
del logits, targets

# %% [markdown]
# The last row is Llama's loss: 4·s·b·V bytes. It keeps the [log-softmax](../docs/glossary.md#log-softmax) in fp32, but
# neither the logits nor their copy: log-softmax's backward needs only its output. Under autocast the copy *saves* two
# bytes. Without it, log-softmax stays in bf16 and autocast copies that to fp32: 2 + 4.
#
# nanoGPT and litgpt read 16-bit logits. Meta's Llama 3, torchtitan and transformers copy them to fp32, torchtune and
# Megatron-LM in [ways that need less](../docs/reference_code.md).
#
# ### Negligible?
# Korthikanti et al. (section 4.3) also count what is outside the blocks: s·b·h·(1 + 4·(1 + V/h)) bytes. For their 22B
# model (table 3), they call that "less than 0.01% of the total activation memory requirements". Put in the sizes.


# %%
def outside(h, a, L, V, s):
    """Share of activations of embeddings, last norm, head and loss: eager, flash attention."""
    ends = 1 + 4 * (1 + V / h)
    return [ends / (ends + L * (34 + scores)) for scores in (5 * a * s / h, 0)]


sizes = {"22B": (6144, 64, 48, 51_200, 2048), "GPT-2 XL": (1600, 25, 48, 50_257, 1024)}
sizes["Llama 3.2 1B"] = (2048, 32, 16, 128_256, 1024)
for name, letters in sizes.items():
    with_eager, with_flash = outside(*letters)
    print(f"{name:12s} {with_eager:6.2%} with eager attention, {with_flash:6.2%} with flash")

# %% [markdown]
# The paper's own formula gives over half a percent, and far more for a small model with a large vocabulary and flash
# attention.

# %% [markdown]
# ## The loss in chunks
# Each token's loss needs only its own V logits. So take the tokens chunk by chunk: a [chunked
# loss](../docs/glossary.md#chunked-loss).
#
# GPT-2 XL, 32 sequences of 1,024 tokens, all in 16 bits. The loss's backward needs three tensors of s·b·V numbers at
# once: the kept log-softmax, its gradient, and the logits' gradient. **Your guess.** By how many GB does the peak fall
# with 8 chunks?

# %%
s, b, h, V = 1024, 32, 1600, 50_257
print(f"one tensor of s·b·V numbers in bf16: {2 * s * b * V / 1e9:.1f} GB")
predict("05.chunks", unit="GB")

# %% [markdown]
# Chunks by themselves save nothing: autograd keeps the log-softmax of each. So call each chunk through `checkpoint`,
# which keeps only a function's inputs and calls it again in backward ([lesson 06](06_recomputation.ipynb), also for
# `use_reentrant`). Chunks may differ in length, so add sums and divide by the number of tokens.


# %%
def chunked_loss(head, x, targets, chunks):
    """The mean loss of all tokens, x is (tokens, h); only one chunk's logits exist at a time."""

    def part(piece, wanted):
        return F.cross_entropy(head(piece), wanted, reduction="sum") / len(targets)

    if chunks == 1:
        return part(x, targets)
    pieces = zip(x.chunk(chunks), targets.chunk(chunks))
    again = torch.utils.checkpoint.checkpoint
    return sum(again(part, *piece, use_reentrant=False) for piece in pieces)


# %% [markdown]
# Are loss and gradients the same? Ask a small head on the CPU. Then weigh GPT-2 XL's.

# %%
x, head = torch.randn(1000, 64, requires_grad=True), nn.Linear(64, 4096, bias=False)
targets = torch.randint(4096, (1000,))
whole, pieces = (chunked_loss(head, x, targets, chunks) for chunks in (1, 8))
slopes = [torch.autograd.grad(loss, [x, head.weight]) for loss in (whole, pieces)]
same = all(torch.allclose(one, other, atol=1e-6) for one, other in zip(*slopes))
print(f"to rounding, loss equal: {torch.allclose(whole, pieces)}, gradients equal: {same}")

# %%
peaks = {}
with on_gpu(needs="14 GB"):
    x = torch.randn(s * b, h, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    head = nn.Linear(h, V, bias=False).to("cuda", torch.bfloat16)
    targets = torch.randint(V, (s * b,), device="cuda")
    for chunks in (1, 2, 8):  # change this
        x.grad = head.weight.grad = None
        torch.cuda.reset_peak_memory_stats()
        chunked_loss(head, x, targets, chunks).backward()
        peaks[chunks] = torch.cuda.max_memory_allocated()
    del x, head, targets
reveal("05.chunks", peaks[1] - peaks[8])

# %% [markdown]
# **Your turn.** Write the closed form: by how many bytes does the peak fall with c chunks? Within 5 % counts as right.


# %%
def falls(c):
    """Return how many bytes lower the peak is with c chunks instead of one."""
    return 0  # write this with s, b and V


off = {c: falls(c) - (peaks[1] - peaks[c]) for c in peaks}
done = all(abs(off[c]) <= 0.05 * (peaks[1] - peaks[c]) for c in peaks)
share = abs(off[8]) / (peaks[1] - peaks[8])
print("Right." if done else f"Not yet: for 8 chunks you are off by {share:.0%}.")

# %% [markdown]
# <details><summary>The closed form</summary>
#
# Each of the three tensors is c times smaller: `3 * 2 * s * b * V * (1 - 1 / c)`.
#
# </details>

# %%
closed = {
    "three tensors of s·b·V, 7/8 of them": 3 * 2 * s * b * V * 7 // 8,
    "new: the head's gradient": -2 * V * h,
    "new: gradients of the other chunks' inputs": -2 * s * b * h * 7 // 8,
}
closed["left over"] = peaks[1] - peaks[8] - sum(closed.values())
for name, change in closed.items():
    print(f"{name:43s} {change / 1e9:+.3f} GB")

# %% [markdown]
# **The gap.** At backward's last chunk, the others have already left gradients behind. The rest, less than a
# thousandth, is the allocator's: it rounds large requests up and leaves small remainders. A fused kernel never even
# writes the logits to memory ([Wijmans et al. 2024](https://arxiv.org/abs/2411.09009)). Change 2 to 64 in the loop: how
# much is left to gain?
#
# What do chunks cost in time? In arithmetic, one more product with the head. Take GPT-2, whose head is nearly a third
# of its weights:

# %%
print(f"2·h·V of a step's 6·N FLOPs per token: {2 * 768 * 50_257 / (6 * 124.4e6):.0%}")
recorded_times("loss")

# %% [markdown]
# The recorded step grows by much more than its arithmetic. The log-softmax is computed again, too, and waits for
# memory. Each chunk makes a gradient of the whole head, V·h numbers, and adds it to the others. And more and shorter
# kernels are launched. This recording cannot say which share each has. Take few chunks.

# %% [markdown]
# ## The script's next lines
# The script of lesson 01 has been in autocast since [lesson 03](03_mixed_precision.ipynb). Now compute its loss in 8
# chunks. **Predict** the peak. Then make the change in `my_train.py`, save, and run the cell again.

# %%
from course_utils.lessons.shared.growing_script import script

script(5)

# %% [markdown]
# Under autocast the loss takes 10 bytes per logit at its peak, as you saw: 10 · 8,192 tokens · 50,257 words are 4.1 GB.
# In 8 chunks an eighth of that is left. No change so far has saved as much.

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
# that the allocator decides ([lesson 19](19_will_it_fit.ipynb)). With full recomputation it takes them easily. With
# eager attention the line falls faster to the right, where s² dominates. With an RTX 3090's or 4090's 24 GB,
# recomputation doubles the batch at most lengths, and bf16-master changes nothing. An L4 gives a program less: there
# bf16-master decides whether anything fits. With 16 GB nothing fits: all precisions keep 16 bytes per parameter, more
# than the card has. GPT-2 XL's line on 80 GB ends at 1,024 tokens, its last position.
#
# </details>

# %% [markdown]
# ## In your own script
# Compute the loss of a large vocabulary in chunks, so that only one chunk's logits exist at a time. `features` are what
# your head reads: the last block's output, after its norm.

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

# %%
head = torch.nn.Linear(64, 50_000, bias=False, device=device)  # yours
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
# This lesson corrects claim 28 of [what the sources got wrong](../docs/errata.md). [Lesson 18](18_who_is_right.ipynb)
# asks whether GPT-2 XL keeps 60 GB.
#
# Now solve the [exercises of this lesson](../exercises/05_activations.ipynb).
