# ---
# jupyter:
#   course:
#     minutes: 75
#     budget_seconds: 60
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 05 · What does each operation keep?
#
# **75 minutes.** You should know [lesson 01](01_where_did_the_memory_go.ipynb), what the parts of a
# [transformer block](../docs/glossary.md#transformer-block) are, and the derivative of a product. No GPU is needed:
# where a measurement is simulated, it says so.
#
# Lesson 01 left you with a formula for the bytes that a block keeps for its backward pass. Here you derive every unit
# of it, tensor by tensor, and ask autograd each time whether it agrees. Then you can do the same for a block that
# nobody has written a formula for. The letters: b sequences of s tokens, hidden size h, a heads, L layers,
# vocabulary V.

# %% [markdown]
# ## Operation by operation
# An operation keeps what its derivative asks for, and nothing else. Eight operations are enough for a GPT. Before you
# look: write down for each of them what its backward needs, given that the gradient of its output arrives by itself.
#
# Each one here works on a tensor of s·b·h numbers in [bf16](../docs/glossary.md#fp16-and-bf16). **Your guess.** How
# many MB do all eight keep together?

# %%
from course_utils import PRESETS, TrainingRun, format_bytes, measure
from course_utils.interactive.guesses import predict, reveal

s, b, h = 1024, 4, 1024
print(f"one tensor of s·b·h numbers in bf16: {format_bytes(2 * s * b * h, 'MB')}")
predict("05.operations", unit="MB")

# %% [markdown]
# ### Estimate
# | operation | derivative with respect to x | so backward asks for |
# |---|---|---|
# | x + y | 1 | nothing |
# | x / 8 | 1/8 | nothing: a number is no tensor |
# | x · Wᵀ | for W: dL/dy · x | its input |
# | GELU(x) | a function of x | its input |
# | softmax(x) = p | p·(dL/dp − Σ p·dL/dp) | its *output* |
# | dropout(x) | 0 or 1/(1−rate) | a mask, one byte an element |
# | LayerNorm(x) | a function of x, mean, deviation | its input, and two fp32 numbers a token |
# | x · y, both activations | y, and x | both |

# %%
n, token = s * b * h, s * b
wanted = {
    "addition": 0, "division by a number": 0, "linear layer": 2 * n, "GELU": 2 * n, "softmax": 2 * n,
    "dropout": n, "LayerNorm": 2 * n + 8 * token, "product of two": 4 * n,
}  # fmt: skip
print(f"{sum(wanted.values()) / n:.3f} bytes for each of the s·b·h numbers")

# %% [markdown]
# ### Measure
# `saved_by` runs an operation with PyTorch's saved-tensor hooks on, and lists each piece of memory that autograd holds
# on to. Weights are left out: they are there anyway. With `device="gpu"` the operation runs on the
# [simulated GPU](../docs/glossary.md#simulated-gpu).

# %%
from functools import partial

import torch
from torch import nn

from course_utils.interactive.saved import saved_by
from course_utils.interactive.ledgers import show_ledger

operations = {
    "addition": torch.add, "division by a number": partial(torch.div, other=8), "linear layer": nn.Linear(h, h),
    "GELU": nn.GELU(), "softmax": nn.Softmax(-1), "dropout": nn.Dropout(0.1), "LayerNorm": nn.LayerNorm(h),
    "product of two": torch.mul,
}  # fmt: skip
shapes = {name: [(b, s, h)] * (2 if name in ("addition", "product of two") else 1) for name in operations}
kept = {name: saved_by(run, *shapes[name], dtype="bf16", device="gpu") for name, run in operations.items()}
simulated = {name: sum(item.bytes for item in items) for name, items in kept.items()}
show_ledger(wanted, simulated, columns=("estimate", "simulated"))

# %%
reveal("05.operations", sum(simulated.values()), unit="MB")
for item in kept["LayerNorm"] + kept["dropout"]:
    print(f"{item.name:24s} {item.shape!s:17s} {item.dtype:5s} {item.bytes:>10,} bytes")

# %% [markdown]
# **The gap** is zero, in every row. Two rows deserve a second look. Dropout's [mask](../docs/glossary.md#dropout-mask)
# takes one byte an element, although one bit would do. And LayerNorm keeps its *statistics* in fp32 whatever its input
# is: small, but you will need them to close a [ledger](../docs/glossary.md#ledger) to the byte.
#
# Those are the kernels of a GPU. Your processor has others, and keeps other things:

# %%
for name in ("dropout", "LayerNorm"):
    on_cpu = sum(item.bytes for item in saved_by(operations[name], (b, s, h), dtype="bf16"))
    print(f"{name}: {format_bytes(on_cpu, 'MB')} on the CPU, {format_bytes(simulated[name], 'MB')} on a simulated GPU")

# %% [markdown]
# There the mask is a bf16 tensor that holds 0 or 1/(1−rate), and the statistics have the input's format.
#
# Why does softmax keep its output when GELU keeps its input? Because its derivative can be written with the output
# alone, as in the table. Check that with real numbers.

# %%
torch.manual_seed(0)
x = torch.randn(4, 16, requires_grad=True)
p = x.softmax(-1)
dp = torch.randn_like(p)
p.backward(dp)
by_hand = p * (dp - (p * dp).sum(-1, keepdim=True))
print("softmax's gradient from its output alone equals autograd's:", torch.allclose(by_hand, x.grad, atol=1e-6))

# %% [markdown]
# ### What LayerNorm computes
# For each token, LayerNorm takes the mean μ and the variance σ² of its h numbers and shifts and scales them: x̂ = (x −
# μ)/√(σ² + ε). The small ε only prevents a division by zero. Then two vectors of h parameters, the gain γ and the bias
# β, set scale and shift anew: y = γ·x̂ + β ([Ba et al. 2016](https://arxiv.org/abs/1607.06450)).
#
# Backward needs x̂ and the root: with g = γ·dL/dy, and means over the h numbers of a token,
#
# dL/dx = (g − mean(g) − x̂·mean(g·x̂))/√(σ² + ε), dL/dγ = Σ x̂·dL/dy, dL/dβ = Σ dL/dy, summed over tokens.
#
# So PyTorch keeps x, μ and 1/√(σ² + ε), and makes x̂ from them again. Check that, too.

# %%
gain, bias = (torch.randn(16, requires_grad=True) for _ in range(2))
x = torch.randn(4, 16, requires_grad=True)
y = nn.functional.layer_norm(x, [16], gain, bias, eps=1e-5)
dy = torch.randn_like(y)
y.backward(dy)
mean, root = x.mean(-1, keepdim=True), (x.var(-1, correction=0, keepdim=True) + 1e-5).sqrt()
normal, g = (x - mean) / root, gain * dy
dx = (g - g.mean(-1, keepdim=True) - normal * (g * normal).mean(-1, keepdim=True)) / root
pairs = {"y": (gain * normal + bias, y), "dL/dx": (dx, x.grad), "dL/dγ": ((normal * dy).sum(0), gain.grad)}
for name, (mine, torchs) in pairs.items():
    print(f"{name} by hand equals PyTorch's: {torch.allclose(mine, torchs, atol=1e-5)}")

# %% [markdown]
# ## An MLP with another nonlinearity
# An MLP widens h to 4h, applies a nonlinearity, and comes back. Both the nonlinearity and the second matrix keep a wide
# tensor. GELU needs its *input*. ReLU can do with its *output*: where that is zero, so is the slope.
#
# **Your guess.** Same shapes, ReLU in place of GELU. How many MB does the MLP keep then?

# %%
gelu_mlp = nn.Sequential(nn.Linear(h, 4 * h), nn.GELU(), nn.Linear(4 * h, h))
with_gelu = saved_by(gelu_mlp, (b, s, h), dtype="bf16", device="gpu")
print(f"with GELU: {format_bytes(sum(item.bytes for item in with_gelu), 'MB')}, that is 2·s·b·h + 2 · 2·s·b·4h")
predict("05.relu", unit="MB")

# %%
relu_mlp = nn.Sequential(nn.Linear(h, 4 * h), nn.ReLU(), nn.Linear(4 * h, h))
with_relu = saved_by(relu_mlp, (b, s, h), dtype="bf16", device="gpu")
tensors = {"input of the first linear": 2 * n, "ReLU's output, input of the second": 8 * n}
found = dict(zip(tensors, (item.bytes for item in with_relu), strict=True))
show_ledger(tensors, found, columns=("estimate", "simulated"))
reveal("05.relu", sum(item.bytes for item in with_relu), unit="MB")

# %% [markdown]
# **The gap.** What ReLU keeps and what the next matrix keeps is *one* tensor, and memory is counted by
# storage, not by how many operations point at it. Whoever adds up operations one by one counts too much. In a block
# this happens at every seam, so the ledger below lists storages.

# %% [markdown]
# ## The ledger of one block
# Now put them together: norm, attention, norm, MLP, with two residual additions. GPT-2 small, two sequences of 512
# tokens, 16-bit, dropout as published, attention written out in PyTorch's own operators
# ([eager](../docs/glossary.md#eager-attention)).
#
# **Your guess.** In units of s·b·h bytes: what does the block keep?

# %%
eager = TrainingRun("gpt2", micro_batch=2, seq_len=512, precision="bf16-master", attention="eager")
print(eager, f"· h={eager.model.hidden} · a={eager.model.heads}")
predict("05.block", unit="s·b·h")

# %% [markdown]
# Predicted from formulas on the left, found by hooks in a genuine block on the right. (Keys and values have g·d
# numbers, g heads of d; in GPT-2 that is h. ffn is 4h.)

# %%
from course_utils.lessons.activations.ledgers import block_ledger

ledger = block_ledger(eager)
ledger

# %%
s, b, h, a = eager.seq_len, eager.micro_batch, eager.model.hidden, eager.model.heads
reveal("05.block", ledger.found / (s * b * h), unit="s·b·h")
print(f"predicted minus found: {ledger.predicted - ledger.found:,} bytes")

# %% [markdown]
# ### The formula, and its residual
# Add up the column. Everything without s² makes 34: the four inputs of matrices 2 + 2 + 2 + 8, queries, keys and values
# 6, GELU's input 8, two norms' inputs 4, two masks 2. The rest has one number for each *pair* of tokens in each head:
# softmax's output 2, its mask 1, the result of dropout 2. So s·b·h·34 + 5·a·s²·b, which is equation 1 of [Korthikanti
# et al. 2022](https://arxiv.org/abs/2205.05198), section 4.1.
# The course's own closed form adds up the same terms for every kernel, norm and MLP: `block` in
# [formula.py](../course_utils/estimating/formula.py).

# %%
formula = {"34·s·b·h": 34 * s * b * h, "5·a·s²·b": 5 * a * s * s * b}
residual = {"two norms, mean and deviation, fp32": 2 * 2 * 4 * s * b}
hooks = {"all that hooks found": ledger.found}
show_ledger(formula | residual, hooks, unit="MB", columns=("estimate", "simulated"))
left = ledger.found - sum(formula.values())
print(f"the formula leaves {left:,} bytes; the norms' statistics are {sum(residual.values()):,}")

# %% [markdown]
# The formula is short by the statistics of the norms, sixteen bytes a token, and by nothing else. That is a residual
# with a name. An estimate is finished when what is left over has one.

# %% [markdown]
# ## Flash attention
# A [flash](../docs/glossary.md#flashattention) kernel computes the same attention block by block and never writes an
# s×s matrix. For backward it computes softmax again, from queries and keys. **Your guess.** What is left, in s·b·h?

# %%
predict("05.flash", unit="s·b·h")

# %%
flash = block_ledger(eager.replace(attention="flash"))
flash

# %%
reveal("05.flash", flash.found / (s * b * h), unit="s·b·h")
gone = 5 * a * s * s * b
come = {"logsumexp, fp32": 4 * a * s * b, "state of the random numbers": 24}
print(f"gone: 5·a·s²·b = {gone:,} bytes; come: {come}")
print(f"eager − gone + come − flash: {ledger.found - gone + sum(come.values()) - flash.found:,} bytes")

# %% [markdown]
# **The gap.** All of 5·a·s²·b is gone. Flash attention keeps one fp32 number per row and head, plus 24 bytes of random
# state, from which it makes the same dropout mask again. Note that 34 stayed 34: the kernel's output and the input of
# the next matrix are one storage.
#
# Is it slower, as it computes softmax twice? Its authors found it quicker: no s×s matrix travels through the GPU's
# memory (Dao et al. 2022). Real GPUs, by the length of the sequence:

# %%
from course_utils.lessons.shared.recorded_times import recorded_times

recorded_times("attention")

# %% [markdown]
# ## What else changes the bill?
# Change one thing at a time, from the block with flash attention. **Your guess.** Llama's MLP,
# [SwiGLU](../docs/glossary.md#swiglu), has three matrices. Made as narrow as needed to have GELU's number of parameters
# (8/3·h in place of 4h), it multiplies two branches. What does the block keep then?

# %%
predict("05.swiglu", unit="s·b·h")

# %%
from dataclasses import replace

base = eager.replace(attention="flash")
variants = {
    "eager": {},
    "flash": {},
    "flash, no dropout": {"dropout": 0.0},
    "flash, unfused GELU": {"unfused": True},
    "flash, RMSNorm": {"norm": "rmsnorm"},
    "flash, SwiGLU of 8/3·h": {"mlp": "swiglu", "ffn": 8 * h // 3},
    "flash, 4 key-value heads": {"kv_heads": 4},
    "flash, autocast": {},
}
runs = {name: base.replace(model=replace(base.model, **change)) for name, change in variants.items()}
runs["eager"], runs["flash, autocast"] = eager, base.replace(precision="amp-bf16")

# %% [markdown]
# The simulation runs two genuine steps of each, with two blocks and with three: the difference is one block.

# %%
from course_utils.lessons.activations.ledgers import measured_per_token, per_token
from course_utils.figures import bars

found = {name: measured_per_token(run) for name, run in runs.items()}
title = "Kernels decide; no other choice moves a block by more than a fifth"
shallow = measure(eager.replace(model=replace(eager.model, layers=2)))
bars(found, title, unit="s·b·h", kind="activations", highlight="eager",
     provenance=f"one block of GPT-2 small, s = 512, from genuine steps · {shallow.provenance}")  # fmt: skip

# %%
reveal("05.swiglu", found["flash, SwiGLU of 8/3·h"], unit="s·b·h")
for name, run in runs.items():
    print(f"{name:25s} {per_token(run):7.3f} estimated, {found[name]:7.3f} {shallow.word}, in units of s·b·h")
print(f"{'eager, no dropout':25s} {per_token(eager.replace(dropout=0.0)):7.3f} estimated; exercise 3 asks you why")

# %% [markdown]
# **The gap**, row by row.
#
# - *No dropout*: the two masks of one byte go. (With eager attention, three of the five units of a·s²·b go as well:
#   its mask, and dropout's result, which is then softmax's own output.)
# - *Unfused GELU*: GPT-2 in the transformers library writes GELU out, ½·x·(1 + tanh(…)). Three more wide tensors stay:
#   half the input, the tanh, and 1 + tanh. To PyTorch's `nn.GELU` they are steps inside one kernel. A run has it by
#   `unfused=True`.
# - *RMSNorm*: one statistic a token in place of two. Its input stays, so hardly anything changes.
# - *SwiGLU*: four wide tensors, SiLU's input, both factors, and their product, where GELU has two. At equal parameters
#   it keeps more: 4 · 2 · 8/3 against 2 · 2 · 4.
# - *Grouped queries*: keys and values shrink. Queries do not.
# - *Autocast*: matrices take 16-bit inputs, but the residual stream and the norms are fp32. Both norms keep 4 bytes a
#   number where they kept 2. Mixed precision by autocast costs activations here, compared with a model all in 16-bit.
#
# ### A fused kernel
# A [fused](../docs/glossary.md#kernel-fusion) kernel does several operations as one, and its backward computes again
# what lay between them. Flash attention is one. SwiGLU's SiLU(gate) · up is another candidate: written out it keeps
# SiLU's input and both factors. Here it is as one operation of yours. How many wide tensors does it keep, and does the
# gradient survive?


# %%
class FusedSwiGLU(torch.autograd.Function):
    """SiLU(gate) · up as one operation: it keeps its two inputs, and computes SiLU again in backward."""

    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        return nn.functional.silu(gate) * up

    @staticmethod
    def backward(ctx, dy):
        gate, up = ctx.saved_tensors
        sigmoid = gate.sigmoid()
        return dy * up * sigmoid * (1 + gate * (1 - sigmoid)), dy * gate * sigmoid


# %%
def written_out(gate, up):
    return nn.functional.silu(gate) * up


wide = (b, s, 8 * h // 3)
for name, product in {"written out": written_out, "fused": FusedSwiGLU.apply}.items():
    kept_wide = sum(item.bytes for item in saved_by(product, wide, wide, dtype="bf16"))
    print(f"{name:12s} {kept_wide / (2 * s * b * wide[-1]):.0f} wide tensors")

gate, up = (torch.randn(4, 16, dtype=torch.float64, requires_grad=True) for _ in range(2))
print("its gradient agrees with finite differences:", torch.autograd.gradcheck(FusedSwiGLU.apply, (gate, up)))

# %% [markdown]
# What is not written cannot be kept. But only what lies *inside* the kernel goes: the product is its output, the next
# matrix reads it, and so it stays. Of SwiGLU's four wide tensors a fused kernel saves one.

# %% [markdown]
# ## Logits and loss
# At the end stands a tensor that no formula of blocks has: the [logits](../docs/glossary.md#logits), V numbers for each
# token. Llama 3.2 with 1 billion parameters has V = 128,256. Take four sequences of 1,024 tokens under
# [autocast](../docs/glossary.md#autocast). Its loss reads a copy of the logits in fp32, as in Meta's own code. **Your
# guess.** How many GB does the *loss* keep for its backward?

# %%
small = TrainingRun("llama3.2-1b", micro_batch=4, seq_len=1024)
print(f"one tensor of s·b·V numbers in bf16: {format_bytes(2 * small.seq_len * small.micro_batch * 128256, 'GB')}")
predict("05.loss", unit="GB")

# %%
from course_utils.estimating.exact.activations import block_bytes, loss_saved

step = measure(small, steps=4)
end, after = step.moments["end of forward"], step.moments["after loss"]
expected = {f"{item.operation}: {item.name}": item.bytes for item in loss_saved(small)}
more = {"kept more after the loss than before": after["activations"] - end["activations"]}
show_ledger(expected, more, columns=("estimate", step.word))
reveal("05.loss", after["activations"] - end["activations"])

# %%
one_block = block_bytes(small)
ratio = (after["activations"] - end["activations"]) / one_block
print(
    f"one block keeps {format_bytes(one_block, 'GB', 3)}: the loss keeps as much as {ratio:.1f} of {small.model.layers}"
)

# %% [markdown]
# **The gap** of 512 bytes is the loss itself, one number in the smallest block that the allocator hands out. What it
# keeps is its [log-softmax](../docs/glossary.md#log-softmax) in fp32, four bytes per token and word. With a large
# vocabulary and a small model, the loss keeps as much as several blocks. The logits are not kept, and neither is their
# copy: log-softmax's backward needs its output alone.
#
# ### 16 bits or 32?
# Frameworks differ here, and for a large vocabulary it is the largest difference between them:
#
# | code | the loss reads |
# |---|---|
# | nanoGPT (`model.py`), litgpt (`chunked_cross_entropy`) | the logits in the head's 16 bits |
# | Meta's Llama 3 (`llama/model.py`), torchtitan (`cross_entropy_loss`) | a copy in fp32 |
# | transformers (`ForCausalLMLoss`), for GPT-2 as well | a copy in fp32 |
# | torchtune (`CEWithChunkedOutputLoss`) | a copy in fp32, one chunk at a time |
# | Megatron-LM (`vocab_parallel_cross_entropy`) | a copy in fp32, which softmax and gradient then overwrite |
#
# The course follows nanoGPT for GPT-2 and Meta's code for Llama. A run can choose: `logits="fp32"` or
# `logits="compute"`, the type that the head computes in.

# %%
from course_utils import moments

number = small.seq_len * small.micro_batch * small.model.vocab
for precision in ("amp-bf16", "bf16-master"):
    for logits in ("compute", "fp32"):
        of_step = moments(small.replace(precision=precision, logits=logits))
        kept = of_step["after loss"]["activations"] - of_step["end of forward"]["activations"]
        highest = of_step["loss's backward"]
        print(f"{precision:11s} logits={logits:9s} kept: {kept / number:.0f} bytes per token and word; "
              f"in backward the step reaches {format_bytes(highest.total, 'GB', 2)}")  # fmt: skip

# %% [markdown]
# Under autocast the fp32 copy *saves* two bytes of what is kept. Without it, log-softmax stays in bf16 and autocast
# copies that to fp32, which makes 2 + 4. But backward then has two fp32 gradients at once, of the log-softmax and of
# the copied logits: 4 + 4 + 4 bytes, where it was 2 + 4 + 4. With 16-bit weights it is 12 instead of 6. What else the
# frameworks do in their own way is [a page of its own](../docs/reference_code.md).
#
# ### Negligible?
# The paper behind 34 + 5·a·s/h also counts what lies outside the blocks, s·b·h·(1 + 4·(1 + V/h)) bytes, and calls it
# negligible. For its model of 22 billion parameters it says "less than 0.01% of the total activation memory
# requirements" (Korthikanti et al. 2022, section 4.3). Put the sizes in. (22B is the first row of its table 3; the last
# column leaves out 5·a·s/h, as a flash kernel does.)


# %%
def outside(h, a, L, V, s, flash=False):
    """What embeddings, last norm, head and loss keep, as a part of all activations, by the paper's formulas."""
    ends, blocks = 1 + 4 * (1 + V / h), L * (34 + (0 if flash else 5 * a * s / h))
    return ends / (ends + blocks)


models = [PRESETS[name] for name in ("gpt3-175b", "gpt2-xl", "llama3.2-1b")]
sizes = {model.name: (model.hidden, model.heads, model.layers, model.vocab, 1024) for model in models}
for name, letters in {"22B": (6144, 64, 48, 51200, 2048), **sizes}.items():
    print(f"{name:12s} s = {letters[-1]:,}: {outside(*letters):7.2%} eager, {outside(*letters, flash=True):7.2%} flash")
kept_by_loss = after["activations"] - end["activations"]
print(f"{step.word}, {small.model.name}, flash: the loss keeps {kept_by_loss / after['activations']:.0%} of all")

# %% [markdown]
# The paper's own formula gives over half a percent for its model, not a hundredth of one. That is still little. For a
# small model with a large vocabulary and flash attention it no longer is.
#
# ## The loss in chunks
# Does anything need all logits at once? The loss is a mean over tokens, and a token's loss needs its own V logits
# alone. So take the tokens chunk by chunk: head, loss, next chunk. This is a [chunked
# loss](../docs/glossary.md#chunked-loss).
#
# GPT-2 XL again, 32 sequences of 1,024 tokens, weights in 16 bits with fp32 masters. Its peak lies in the loss's
# backward. **Your guess.** By how many GB does the peak fall with 8 chunks?

# %%
xl = TrainingRun("gpt2-xl", micro_batch=32, seq_len=1024, precision="bf16-master")
s, b, h, V = xl.seq_len, xl.micro_batch, xl.model.hidden, xl.model.vocab
print(f"one tensor of s·b·V numbers in bf16: {format_bytes(2 * s * b * V, 'GB')}")
predict("05.chunks", unit="GB")

# %% [markdown]
# Chunks alone save nothing: autograd keeps the log-softmax of each. So call each chunk through `checkpoint`. It keeps
# only the inputs of a function and calls the function again in backward (lesson 06 is about it). A chunk's mean counts
# by its part of the tokens, since the last chunk may be smaller; if some targets are ignored, count the others. The
# course's own network does the same (`course_utils/networks/loss.py`).

# %%
from torch.utils.checkpoint import checkpoint


def part(piece, wanted):
    """What one chunk adds to the mean over all tokens."""
    return nn.functional.cross_entropy(head(piece), wanted) * (len(wanted) / len(targets))


def chunked_loss(features, chunks):
    """The mean loss of all tokens; logits exist for one chunk at a time."""
    pieces = zip(features.chunk(chunks), targets.chunk(chunks), strict=True)
    return sum(checkpoint(part, piece, wanted, use_reentrant=False) for piece, wanted in pieces)


# %% [markdown]
# Is it the same loss, with the same gradients? And what does autograd keep? A small head on the CPU answers both.

# %%
features, head = torch.randn(1000, 64, requires_grad=True), nn.Linear(64, 4096, bias=False)
targets = torch.randint(4096, (1000,))
ways = {"whole": lambda x: nn.functional.cross_entropy(head(x), targets), "8 chunks": partial(chunked_loss, chunks=8)}
losses = {name: way(features) for name, way in ways.items()}
gradients = {name: torch.autograd.grad(loss, [features, head.weight]) for name, loss in losses.items()}
for one, other in zip(*gradients.values(), strict=True):
    print("gradients agree to rounding:", torch.allclose(one, other, rtol=1e-4, atol=1e-8))
for name, way in ways.items():
    items = [item for item in saved_by(way, features) if item.shape != head.weight.shape]
    print(f"{name:8s} loss {losses[name].item():.3f}, kept: {sum(item.bytes for item in items):>10,} bytes")

# %% [markdown]
# What is left are the features and the targets, and both are there anyway.
#
# **Estimate.** In the loss's backward, three tensors of s·b·V numbers are there at once: the log-softmax that was kept,
# its gradient, and the logits' gradient. With c chunks each is c times smaller. So the peak falls by 3·2·s·b·V·(1 −
# 1/c). **Measure.**

# %%
whole, chunked = measure(xl), measure(xl.replace(loss_chunks=8))
falls = whole.peak - chunked.peak
logits = 3 * 2 * s * b * V
show_ledger({"three tensors": logits - logits // 8}, {"three tensors": falls}, columns=("estimate", whole.word))
reveal("05.chunks", falls)
new = {"the head's gradient": 2 * V * h, "7 of 8 pieces of the features' gradient": 2 * s * b * h * 7 // 8}
for name, size in new.items():
    print(f"new at the peak: {name}, {format_bytes(size, 'GB', 3)}")
print(f"the estimate without them: {format_bytes(logits - logits // 8 - sum(new.values()), 'GB', 3)}")

# %% [markdown]
# **The gap** has a name: when backward reaches its last chunk, the others have already left gradients behind. And the
# price? Backward multiplies with the head once more, 2·s·b·h·V [FLOPs](../docs/glossary.md#flops). A fused kernel goes
# further and never writes the logits to memory ([Wijmans et al. 2024](https://arxiv.org/abs/2411.09009)).
#
# The last two lines anticipate lesson 06: with full recomputation the blocks keep little, and the loss decides what
# fits 32 GB.

# %%
from course_utils import estimate
from course_utils.estimating.step_time import model_flops

for run in (xl, small):
    extra = 2 * run.seq_len * run.micro_batch * run.model.hidden * run.model.vocab
    print(f"{run.model.name:12s} one more product with the head: {extra / model_flops(run):.1%} of the step's FLOPs")
for chunks in (1, 8):
    peak = estimate(xl.replace(recompute="full", loss_chunks=chunks)).total
    print(f"GPT-2 XL, full recomputation, loss_chunks={chunks}: {format_bytes(peak, 'GB', 1)} at the peak, estimated")

# %% [markdown]
# ## Twice the batch, twice the length
# Only two letters of the formula are yours to turn from run to run: b and s. **Your guess.** A tiny GPT with eager
# attention, s from 128 to 256. By what factor does what forward keeps grow?

# %%
tiny = TrainingRun("tiny-gpt", micro_batch=4, seq_len=128, precision="bf16-master", attention="eager")
print(
    tiny, f"· h={tiny.model.hidden} · a={tiny.model.heads}: 5·a·s/h = {5 * tiny.model.heads * 128 / tiny.model.hidden}"
)
predict("05.double", unit="times")

# %%
from course_utils.lessons.activations.ledgers import sweep_figure, swept, swept_in_steps

axes = {"micro-batch b, s = 128": ("micro_batch", range(1, 17), (2, 6, 10, 16)),
        "sequence length s, b = 4": ("seq_len", range(16, 257, 16), (64, 128, 192, 256))}  # fmt: skip
panels = {
    label: {kernel: (swept(tiny.replace(attention=kernel), field, fine),
                     swept_in_steps(tiny.replace(attention=kernel), field, coarse)) for kernel in ("eager", "flash")}
    for label, (field, fine, coarse) in axes.items()
}  # fmt: skip
title = "Every kernel is linear in b; only eager attention is quadratic in s"
sweep_figure(panels, title, provenance=str(measure(tiny).provenance), word=measure(tiny).word)

# %%
growing = panels["sequence length s, b = 4"]["eager"][1]
reveal("05.double", growing[256] / growing[128], unit="times")
gaps = {line[size] - steps[size] for panel in panels.values() for line, steps in panel.values() for size in steps}
print(f"estimate − {measure(tiny).word}, at every circle: {gaps} bytes")

# %% [markdown]
# **The gap.** Neither 2 nor 4: the linear part doubles, the quadratic part grows fourfold, and the factor lies between,
# by how much of each there is. A rule such as "twice the length, four times the memory" holds only where 5·a·s/h is
# far above 34.

# %% [markdown]
# ## Llama-3 8B: 97, 17 and 1
# A lecture, after the [Ultra-Scale Playbook](https://huggingface.co/spaces/nanotron/ultrascale-playbook), gives for one
# sequence of 4,096 tokens: 97 GB of [activations](../docs/glossary.md#activations), 17 GB with selective
# [recomputation](../docs/glossary.md#activation-recomputation), 1 GB with full. You can make those three numbers, and
# see that their unit is the GiB. **Your guess.** How many GiB does a real Llama-3 8B keep when its forward pass ends,
# with flash attention, nothing recomputed?

# %%
predict("05.llama", unit="GiB")

# %%
from course_utils.estimating.exact.activations import activation_bytes, sum_bytes
from course_utils.estimating.published import checkpoints_bytes, korthikanti_activation_bytes, korthikanti_block_bytes

llama = TrainingRun("llama3-8b", micro_batch=1, seq_len=4096, precision="bf16-master", attention="eager")
long = llama.replace(model=replace(llama.model, max_positions=16_384), seq_len=16_384)
s, h, L = llama.seq_len, llama.model.hidden, llama.model.layers
lecture = {
    "all: L·s·b·h·(34 + 5·a·s/h)": korthikanti_activation_bytes(llama),
    "selective: L·s·b·h·34": 34 * s * h * L,
    "full: one input a block, 2·s·b·h·L": checkpoints_bytes(llama),
    "left out: the block being recomputed": korthikanti_block_bytes(llama),
    "left out: what the loss keeps": sum_bytes(loss_saved(llama)),
    "all, at 16,384 tokens": korthikanti_activation_bytes(long),
}
for name, size in lecture.items():
    print(f"{name:38s} {format_bytes(size, 'GiB', 1):>12s} = {format_bytes(size, 'GB', 1)}")
print(f"selective saves {1 - 34 * s * h * L / korthikanti_activation_bytes(llama):.0%} here")

# %% [markdown]
# Every number of the lecture is there, in GiB, and even the "up to 1,500 GB for long sequences". And every one is the
# formula of a *GPT* with eager attention. Llama has no dropout, [RMSNorm](../docs/glossary.md#rmsnorm) for LayerNorm,
# SwiGLU for GELU, and [grouped queries](../docs/glossary.md#grouped-queries). The kernel of attention is no part of the
# model: whoever trains chooses it. So change one at a time: first the model, then the kernel.

# %%
real = measure(llama.replace(attention="flash"))
kinds = {
    "the lecture: GPT's formula": korthikanti_activation_bytes(llama),
    "a Llama with eager attention": activation_bytes(llama),
    "the lecture: selective": 34 * s * h * L,
    f"a Llama with flash attention, {real.word}": real.moments["end of forward"]["activations"],
}
title = "A real Llama keeps a fifth of the lecture's figure, without recomputing anything"
bars(kinds, title, unit="GiB", kind="activations", highlight=list(kinds)[-1], provenance=str(real.provenance))

# %%
reveal("05.llama", real.moments["end of forward"]["activations"], unit="GiB")
block_ledger(llama.replace(attention="flash"))

# %% [markdown]
# **The gap.** Flash attention has taken the s² away, and with it what [selective
# recomputation](../docs/glossary.md#selective-recomputation) was invented for. What is left is above the lecture's 17
# GiB, not below it: SwiGLU's four tensors of width 14,336 are most of a block, more than GELU's two would be. Look at
# the last four rows.
#
# Two more sentences of that lecture are about a small Llama, states included. One sequence of 4,096 tokens takes "over
# 50 GB". And a model of 1 billion parameters needs 16 GB of states and, in all, 25 GB at s = 8,192 with selective
# recomputation.

# %%
billion = TrainingRun("llama3.2-1b", micro_batch=1, seq_len=8192, precision="bf16-master")
kept_1b = 34 * billion.seq_len * billion.model.hidden * billion.model.layers
half = billion.replace(seq_len=4096)
by_gpt = korthikanti_activation_bytes(half)
print(f"s = 4,096: 16 bytes · 10⁹ + GPT's formula, {format_bytes(by_gpt, 'GB', 1)}: "
      f"{format_bytes(16 * 10**9 + by_gpt, 'GB', 1)}")  # fmt: skip
for kernel in ("eager", "flash"):
    step = format_bytes(estimate(half.replace(attention=kernel)).total, "GB", 1)
    print(f"s = 4,096: the whole step of Llama 3.2 1B itself, {kernel} attention: {step} estimated")
print(f"s = 8,192: 34·s·b·h·L is {format_bytes(kept_1b, 'GiB', 1)} = {format_bytes(kept_1b, 'GB', 1)}, "
      f"together {format_bytes(16 * 10**9 + kept_1b, 'GB', 1)}; "
      f"that model has {billion.model.parameters / 10**9:.2f} · 10⁹ parameters")  # fmt: skip

# %% [markdown]
# Both sums can be made, if you know what they leave unsaid. The first takes GPT's formula with eager attention. A small
# Llama itself stays below 50 GB, and with flash attention below 30. The second adds up two models: the states are those
# of 10⁹ parameters, the activations those of a model that has more.
#
# ## The 60 GB question
# GPT-2 XL, 32 sequences of 1,024 tokens. [ZeRO](../docs/glossary.md#zero)'s footnote says 12·h·b·s·L numbers, the "60
# GB" that so many texts repeat ([Rajbhandari et al. 2020](https://arxiv.org/abs/1910.02054), section 3.2). It does not
# say which twelve.
#
# Your turn: in the ledger above, choose tensors that make 24 bytes. One choice that makes exactly 24 comes after your
# guess, and then what it lacks. **Your guess first.** How many GB does ZeRO's number lack, with flash attention?

# %%
from course_utils.estimating.exact.activations import head_saved, stem_saved
from course_utils.estimating.published import zero_activation_bytes

print(f"ZeRO's formula: {format_bytes(zero_activation_bytes(xl), 'GB', 1)}")
thousand = xl.replace(seq_len=1000)
print(f"with s = 1,000: {zero_activation_bytes(thousand) / 2:.3g} numbers, "
      f"{format_bytes(zero_activation_bytes(thousand), 'GB', 1)}; "
      f"34 + 5·a·s/h gives {format_bytes(korthikanti_activation_bytes(thousand), 'GB', 1)} there")  # fmt: skip
predict("05.sixty", unit="GB")

# %%
flash_step = measure(xl)
with_flash = flash_step.moments["end of forward"]["activations"]
with_eager = measure(xl.replace(attention="eager")).moments["end of forward"]["activations"]
three = {
    "ZeRO: 12·h·b·s·L": zero_activation_bytes(xl),
    f"{flash_step.word}, flash": with_flash,
    "34 + 5·a·s/h": korthikanti_activation_bytes(xl),
    f"{flash_step.word}, eager": with_eager,
}
of_flash, of_eager = (zero_activation_bytes(xl) / size for size in (with_flash, with_eager))
title = f"Sixty gigabytes is neither: {of_flash:.0%} of what flash keeps, {of_eager:.0%} of eager's"
bars(three, title, kind="activations", highlight="ZeRO: 12·h·b·s·L", provenance=str(flash_step.provenance))

# %%
reveal("05.sixty", with_flash - zero_activation_bytes(xl))
s, b, h, a, L = xl.seq_len, xl.micro_batch, xl.model.hidden, xl.model.heads, xl.model.layers
unit, token = s * b * h * L, s * b
zero_terms = {
    "inputs of four matrices: 2+2+2+8": 14 * unit,
    "queries, keys, values: 6": 6 * unit,
    "inputs of two norms: 4": 4 * unit,
}
print(f"these make ZeRO's number: {sum(zero_terms.values()) == zero_activation_bytes(xl)}")

# %% [markdown]
# What is missing? Go down the ledger of the block, and strike out what you have. Add your terms here, run the cell, and
# go on until less than a tenth of a GB is left over. (`unit` is s·b·h·L, `token` is s·b.)

# %%
mine = {
    # "what it is": 2 * unit,
}
show_ledger(zero_terms | mine, {"with flash attention": with_flash}, columns=("estimate", flash_step.word))

# %% [markdown]
# Got them? These are all, the last bytes included.

# %%
missing = {
    "GELU's input: 8": 8 * unit,
    "dropout masks: 2": 2 * unit,
    "norms' statistics": 16 * token * L,
    "flash's logsumexp": 4 * a * token * L,
    "outside the blocks": sum_bytes(stem_saved(xl) + head_saved(xl)),
}
show_ledger(zero_terms | missing, {"with flash attention": with_flash}, columns=("estimate", flash_step.word))
rest = with_flash - sum((zero_terms | missing).values())
print(f"left over: {rest:,} bytes = {L} layers × 2 blocks of 512 bytes for the random numbers' state")

# %%
outside = sum_bytes(stem_saved(xl.replace(attention="eager")) + head_saved(xl))
scores = {"5·a·s²·b": 5 * a * s * s * b * L}
eager_terms = zero_terms | missing | scores
del eager_terms["flash's logsumexp"]
eager_terms["outside the blocks"] = outside
show_ledger(eager_terms, {"with eager attention": with_eager}, columns=("estimate", flash_step.word))
print(f"left over: {with_eager - sum(eager_terms.values()):,} bytes")

# %% [markdown]
# **The gap** is closed, for both kernels, with every byte under a name; the smallest are flash's
# [logsumexp](../docs/glossary.md#logsumexp), one number a row and head. "60 GB" was a count of twelve tensors of equal
# width. A block keeps 34 bytes · s·b·h, and eager attention 5·a·s/h more, which for this model is the larger part by
# far. The sources that repeat 60 GB repeat a footnote.

# %% [markdown]
# ## A map
# Activations over all b and s, and the line where the *whole* step, states included, no longer fits the card. The
# sliders for b and s move the framed cell, and what it takes stands above the picture. The others change model and
# card.
#
# Find out: which is the smallest card that takes 4 sequences of 2,048 tokens? Where does the line fall faster than
# elsewhere, and with which kernel? What moves it more on a small card, the precision or the recomputation?

# %%
from course_utils.lessons.activations.widget import activation_map

activation_map("llama3.2-1b", gpu="A100-80GB")

# %% [markdown]
# <details><summary>An answer</summary>
#
# An A100 with 40 GB takes them, by so little that CUDA's own share, which is not counted here, decides. With flash
# attention, twice the length costs half the batch everywhere: the colors depend on s·b alone. With eager attention the
# line falls faster to the right, where s² rules. On a card of 24 GB recomputation moves the line much further than the
# precision does: activations fill it. With 16 GB nothing moves it: the states alone take more than the card has, and
# both precisions keep 16 bytes a parameter.
#
# </details>

# %% [markdown]
# ## What the sources got wrong
# | claim | what you computed here |
# |---|---|
# | activations are 12·h·b·s·L numbers (ZeRO) | it lacks GELU's input, the masks, and eager attention's s² |
# | Llama-3 8B keeps 97 GB at 4,096 tokens (lecture) | a GPT of its size would; a Llama keeps far less |
# | selective recomputation brings it to 17 GB (lecture) | 34·s·b·h·L; flash attention alone does the same |
# | full recomputation leaves 1 GB (lecture) | the checkpoints alone; the live block and the loss come on top |
# | outside the blocks: less than 0.01 % for 22B (Korthikanti et al. 2022) | over half a percent by its own formula |
# | a small Llama takes over 50 GB at 4,096 tokens (lecture) | by GPT's formula; a small Llama itself takes less |
#
# ## Five questions
# The next cell asks what you have understood. Each choice answers at once, and tells you why it is right or which
# mistake leads to it.

# %%
from course_utils.lessons import quiz

quiz(5)

# %% [markdown]
# ## Take home
# **Remember** An operation keeps what its derivative asks for, a storage is counted once, and an estimate is done when
# its residual has a name.
#
# **Breaks when** you use GPT's 34 + 5·a·s/h for a Llama, for a flash kernel, or under autocast; or when you leave out
# what the loss keeps.
#
# **Cheat-sheet line** a block, 16-bit: GPT with dropout 34·s·b·h, eager + 5·a·s²·b · without dropout 32 and 2 · Llama
# with flash: s·b·(12·h + 4·kv + 8·ffn) · loss: 2·s·b·V, autocast 6, fp32 logits 4; in c chunks none of it stays, for
# 2·s·b·h·V FLOPs.
#
# Now solve the [exercises of this lesson](../exercises/05_activations.ipynb).
