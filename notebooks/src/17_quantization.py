# ---
# jupyter:
#   course:
#     minutes: 60
#     cpu_seconds: 20
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 17 · Quantization
#
# **60 minutes.** You should know what a linear layer keeps for backward ([lesson 05](05_activations.ipynb)), and LoRA
# ([lesson 16](16_lora.ipynb)). You need no GPU: `on_gpu()` simulates one, without values. What needs values runs on the
# CPU.
#
# Frozen weights never change. Do they need 16 bits? [Quantization](../docs/glossary.md#quantization) stores them in 8
# or 4, and [QLoRA](../docs/glossary.md#qlora) trains LoRA on top: 65 billion parameters on one card of 48 GB. What does
# a bit less cost, and which bytes stay?

# %% [markdown]
# ## Round to a grid
# *[Absmax](../docs/glossary.md#absmax-quantization)* quantization: for 4 bits, divide by a scale that maps the largest
# magnitude to 7, round to whole numbers, store those and the scale.

# %%
import torch


def absmax(values, bits, group=None):  # `group` neighbors share a scale
    rows = values.reshape(-1, group or values.numel())
    scale = rows.abs().amax(dim=1, keepdim=True) / (2 ** (bits - 1) - 1)
    codes = (rows / scale).round()
    return (codes * scale).view(values.shape)


w = torch.tensor([0.31, -0.04, 0.12, -0.70, 0.07, 0.45])  # change this
print("weights: ", *(f"{value:6.2f}" for value in w))
print("in 4 bits", *(f"{value:6.2f}" for value in absmax(w, bits=4) + 0.0))

# %% [markdown]
# **Your guess.** By what factor does each extra bit shrink the error?

# %%
from course_utils.interactive.guesses import predict, reveal

predict("17.bit", unit="times")

# %% [markdown]
# Estimate: the grid has steps of Δ. Errors that spread evenly over a step have a root mean square of
# $\Delta / \sqrt{12}$.
#
# $$\Delta = \frac{\text{max}}{2^{\text{bits} - 1} - 1}$$
#
# Measure on a matrix of a small model that was trained on this CPU: one scale for all, one per row (*per channel*), one
# per block of 32. The error is in percent of the weights.

# %% tags=["nbval-ignore-output"]
from course_utils.lessons.shared.language_model import mean_loss, train_language_model

model = train_language_model(steps=300).model
weight = model.blocks[0].mlp.up.weight.detach()


def error(values, rounded):
    return 100 * ((rounded - values).norm() / values.norm()).item()


group = 32  # change this
for bits in (2, 3, 4, 5, 6, 8):
    step = weight.abs().max() / (2 ** (bits - 1) - 1)
    expected = 100 * step / 12**0.5 / weight.square().mean().sqrt()
    ways = [error(weight, absmax(weight, bits, of)) for of in (None, 64, group)]
    shown = "one scale {:4.1f} %, by row {:4.1f} %, by blocks {:4.1f} %".format(*ways)
    print(f"{bits} bits: expected {expected:5.1f} %; {shown}")

# %%
four_bits, eight_bits = (error(weight, absmax(weight, bits)) for bits in (4, 8))
reveal("17.bit", round((four_bits / eight_bits) ** (1 / 4), 1), unit="times")

# %% [markdown]
# A step shrinks by 127/63, 63/31, 31/15, 15/7: a little more than two. With two bits nearly all weights round to
# zero, and errors no longer spread evenly. An fp32 scale per 32 numbers costs one bit per number. Change 32 to 8: is
# it worth four? One per row of 64 costs half a bit, and here it is worth a whole one: rows differ in their largest
# weight. Scales help most against outliers. Make one weight 30 times as large:

# %% tags=["nbval-ignore-output"]
spoiled = weight.clone()
spoiled[5, 5] = 30 * weight.abs().max()  # change this
others = torch.ones_like(weight, dtype=torch.bool)
others[5, 5] = False
for name, group in {"one scale": None, "each row": 64, "blocks of 32": 32}.items():
    zeros = (absmax(spoiled, 8, group)[others] == 0).float().mean().item()
    print(f"{name:13s} {zeros:3.0%} of the other weights become zero in 8 bits")

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
activation = torch.nn.functional.gelu(torch.randn(100_000))  # change this
for bits in (4, 8):
    scale = (activation.max() - activation.min()) / (2**bits - 1)
    z = (-activation.min() / scale).round()
    codes = (activation / scale + z).round().clamp(0, 2**bits - 1)
    one, other = error(activation, absmax(activation, bits)), error(activation, (codes - z) * scale)
    step = activation.abs().max() / (2 ** (bits - 1) - 1)
    small = (activation.abs() < step / 2).float().mean().item()
    print(f"{bits} bits: error {one:.1f} % with absmax, {other:.1f} % with a zero point")
    print(f"    {one / other:.1f} times less; {small:.0%} are within half an absmax step of zero")

# %% [markdown]
# With 4 bits, it is worth less. Most numbers lie within half an absmax step of zero and become zero. Their error is
# only their own size, less than errors that spread over a step. So a finer grid has less to gain.

# %% [markdown]
# ## Sixteen values of your choice
# The 16 values of four bits need not be evenly spaced. Trained weights crowd around zero, so put more values there.
# [NF4](../docs/glossary.md#nf4) takes quantiles of the normal distribution ([Dettmers et al.
# 2023](https://arxiv.org/abs/2305.14314), section 3).

# %%
end = (1 / 32 + 1 / 30) / 2  # half a step from the end, for 16 and for 15 values
below, above = torch.linspace(end, 0.5, 8), torch.linspace(0.5, 1 - end, 9)[1:]
quantiles = torch.special.ndtri(torch.cat([below, above]))
nf4 = quantiles / quantiles[-1]
print(" ".join(f"{value:.4f}" for value in nf4))

# %% tags=["nbval-ignore-output", "hide-input"]
from course_utils.lessons.quantization.figures import code_picture

blocks = weight.reshape(-1, 64)
scaled = (blocks / blocks.abs().amax(dim=1, keepdim=True)).flatten().tolist()
grids = {"absmax, 4 bits": [k / 7 for k in range(-7, 8)], "NF4": nf4.tolist()}
source = "a matrix of a model trained on this CPU, in blocks of 64"
code_picture(scaled, grids, "NF4 puts its values where the weights are", provenance=source)

# %% [markdown]
# **Your guess.** Same [blocks of 64](../docs/glossary.md#block-wise-quantization), same bits: by how many percent is
# NF4's error smaller than absmax's?

# %%
predict("17.nf4", unit="%")


# %%
def nearest(values, code, group=64):  # `code` rises from −1 to 1
    rows = values.reshape(-1, group)
    scale = rows.abs().amax(dim=1, keepdim=True)
    codes = torch.bucketize(rows / scale, (code[1:] + code[:-1]) / 2)
    return (code[codes] * scale).view(values.shape)


less = 100 * (1 - error(weight, nearest(weight, nf4)) / error(weight, absmax(weight, 4, 64)))
reveal("17.nf4", round(less, -1), unit="%")

# %% [markdown]
# The paper calls NF4 "information theoretically optimal" for normal weights. That means using each value equally often,
# not the smallest error. And numbers divided by their block's largest are no longer normal ([Yoshida
# 2023](https://arxiv.org/abs/2306.06965)).
#
# ### As a layer
# A quantized layer stores codes and scales, and computes W from them for each product. Both are *buffers*: they move
# and are saved with the model, but no optimizer sees them. Two codes share a byte.

# %%
from torch import nn


class Nf4Linear(nn.Module):
    def __init__(self, weight, block=64):
        super().__init__()
        self.shape, code = weight.shape, nf4.to(weight.device)
        rows = weight.detach().float().reshape(-1, block)
        scale = rows.abs().amax(dim=1, keepdim=True)
        codes = torch.bucketize(rows / scale, (code[1:] + code[:-1]) / 2).flatten().to(torch.uint8)
        self.register_buffer("packed", codes[::2] * 16 + codes[1::2])
        self.register_buffer("scale", scale)
        self.register_buffer("pairs", torch.cartesian_prod(code, code))  # the values of each byte

    def unpacked(self, dtype):
        values = self.pairs.to(dtype)[self.packed.int()].view(len(self.scale), -1)
        return values.mul_(self.scale).view(self.shape)

    def forward(self, x):
        return nn.functional.linear(x, self.unpacked(x.dtype))


# %% [markdown]
# **Your turn.** How many bits per number is that, with the fp32 scales? Write it for any block.


# %%
def bits_per_number(block):
    return 4  # correct this line


W, wrong = torch.randn(256, 512), []
for block in (32, 64, 256):
    layer = Nf4Linear(W, block)
    stored = 8 * (layer.packed.nbytes + layer.scale.nbytes) / W.numel()
    if abs(bits_per_number(block) - stored) > 0.001:
        wrong.append(block)
off = (Nf4Linear(W)(W) - W @ nearest(W, nf4).T).abs().max()
print(f"packed and unpacked: {off:.3f} away from the rounded weight's product, expected 0")
print(f"Not yet: another number for blocks of {wrong}." if wrong else "Right.")

# %% [markdown]
# <details><summary>The line</summary>
#
# `return 4 + 32 / block`. With blocks of 64: 4.5 bits. QLoRA also rounds the scales to 8 bits, in groups of 256, which
# makes $4 + \frac{8}{64} + \frac{32}{64 \cdot 256} = 4.127$.
#
# </details>

# %% [markdown]
# ## Four bits, as a layer runs
# In training, backward needs W again, for dL/dx. Plain autograd keeps the 16-bit W that forward made: the saving is
# gone. Lesson 06's `checkpoint` computes W again in backward. bitsandbytes does it in a function of its own. LoRA's
# factors are in 16 bits. (Only bytes count here, so W and A stay empty.)

# %%
from torch.utils.checkpoint import checkpoint

from course_utils import TrainingRun, estimate, on_gpu


class QLora(nn.Module):
    def __init__(self, n_in, n_out, r=64, again=True):
        super().__init__()
        self.base, self.again = Nf4Linear(torch.empty(n_out, n_in, dtype=torch.bfloat16)), again
        self.A = nn.Parameter(torch.empty(r, n_in, dtype=torch.bfloat16))
        self.B = nn.Parameter(torch.zeros(n_out, r, dtype=torch.bfloat16))

    def forward(self, x):
        y = checkpoint(self.base, x, use_reentrant=False) if self.again else self.base(x)
        return y + x @ self.A.T @ self.B.T


# %%
def as_it_runs(again, tokens=512):  # change this
    """What is allocated while one layer of 4096 × 4096 runs, by the GPU's own counter."""
    seen = {}
    with on_gpu(), torch.device("cuda"):
        torch.ones(8, 8, requires_grad=True).mm(torch.ones(8, 8)).sum().backward()  # workspaces
        x = torch.randn(tokens, 4096, dtype=torch.bfloat16, requires_grad=True)
        empty, layer = torch.cuda.memory_allocated(), QLora(4096, 4096, again=again)
        plain = layer.base.unpacked

        def note(when, result=None):
            seen[when] = torch.cuda.memory_allocated() - empty
            return result

        layer.base.unpacked = lambda dtype: note(f"{len(seen)}: W is unpacked", plain(dtype))
        note("0: before")
        y = layer(x)
        note("2: after forward")
        y.backward(torch.ones_like(y))
        note("4: after backward")
    return seen


# %%
from course_utils.figures import stack

W, seen = 2 * 4096**2, as_it_runs(again=True)
fixed, kept = seen["0: before"], seen["2: after forward"] - seen["0: before"]
rows = {}
for when, size in seen.items():
    unpacked = W if "unpacked" in when else 0
    rest = size - fixed - unpacked  # what forward keeps, then what backward makes
    parts = {"parameters": fixed, "weight_copies": unpacked, "activations": min(rest, kept)}
    rows[when] = parts | {"gradients": rest - parts["activations"]}
plain = as_it_runs(again=False)["2: after forward"]
print(f"after forward, without checkpoint: {plain / 1e6:.1f} MB")
title = "The 16-bit W is there for two moments; four bits and factors stay"
stack(rows, title, unit="MB", provenance=f"memory_allocated() · torch {torch.__version__}")

# %% [markdown]
# *Parameters* are codes, scales and factors. *Weight copies* are the unpacked W, once in forward and once in backward.
# *Activations* are the output and x·Aᵀ. The input x existed before, and LoRA keeps it. (Change 512 to 8192: which part
# is largest?) Our unpacking, in plain PyTorch, also needs temporaries between two notes. bitsandbytes has a kernel that
# needs none.

# %% [markdown]
# ## After training
# *[Post-training](../docs/glossary.md#post-training-quantization) quantization* rounds a trained model without another
# step. What counts is its loss. **Your guess.** Round all matrices of the language model's blocks by absmax, with one
# scale per row. What is the smallest number of bits that raises the loss by less than 2 %?

# %%
predict("17.enough", unit="bits")


# %%
from copy import deepcopy


def rounded_model(rounding, *how):
    copied = deepcopy(model)
    with torch.no_grad():
        for weight in copied.blocks.parameters():
            if weight.dim() == 2:
                weight.copy_(rounding(weight, *how))
    return copied


def by_row(weight, bits):
    return absmax(weight, bits, group=weight.shape[1])


# %% tags=["nbval-ignore-output"]
start, risen = mean_loss(model), {}
for bits in (8, 6, 5, 4, 3, 2):
    loss = mean_loss(rounded_model(by_row, bits))  # change this
    risen[bits] = 100 * (loss / start - 1)
    print(f"{bits} bits: loss up {abs(risen[bits]):.1f} %")
reveal("17.enough", min(bits for bits, percent in risen.items() if percent < 2), unit="bits")

# %% [markdown]
# (Put `absmax, bits, 8` there: one scale per 8 numbers. Are 3 bits enough then?)
#
# To *compute* in 8 bits, you must also round each matrix's inputs. Where do their scales come from? *Static*
# quantization fixes one per layer in advance. That needs *[calibration](../docs/glossary.md#calibration)*: the model
# reads some text, and a hook notes each layer's largest input.

# %%
eight = rounded_model(by_row, 8)
linears = [layer for layer in eight.blocks.modules() if isinstance(layer, nn.Linear)]
largest = {}


def read(hook):
    handles = [layer.register_forward_pre_hook(hook) for layer in linears]
    loss = mean_loss(eight)
    for handle in handles:
        handle.remove()
    return loss


def look(layer, inputs):
    largest[layer] = max(largest.get(layer, 0.0), inputs[0].abs().max().item())


read(look)
print(f"found the largest input of {len(largest)} layers")

# %% [markdown]
# **Your turn.** *Dynamic* quantization computes scales while the model runs, one per token, as in LLM.int8() ([Dettmers
# et al. 2022](https://arxiv.org/abs/2208.07339), section 3.1). x is (b, s, n_in). Write the largest magnitude of each
# token.


# %%
def most_of_each_token(x):
    return x.abs().max()  # correct this line


x = torch.randn(2, 3, 8)
right = most_of_each_token(x).shape == (2, 3, 1) and (x.abs() <= most_of_each_token(x)).all()
print("Right." if right else f"Not yet: {most_of_each_token(x).numel()} scales for 6 tokens.")

# %% [markdown]
# <details><summary>The line</summary>
#
# `return x.abs().amax(dim=-1, keepdim=True)`.
#
# </details>


# %% tags=["nbval-ignore-output"]
def in_bits(x, most, bits):
    limit = 2 ** (bits - 1) - 1
    return (x / most * limit).round().clamp(-limit, limit) * most / limit


for bits in (8, 6, 4):

    def static(layer, inputs, bits=bits):
        return in_bits(inputs[0], largest[layer], bits)

    def dynamic(layer, inputs, bits=bits):
        return in_bits(inputs[0], most_of_each_token(inputs[0]), bits)

    ways = [abs(100 * (loss / start - 1)) for loss in (read(static), read(dynamic))]
    print("{}-bit inputs: loss up {:.1f} % static, {:.1f} % yours".format(bits, *ways))

# %% [markdown]
# With one fixed scale for all tokens, inputs are harder to round than weights. A scale per token costs a maximum at run
# time, and needs no calibration.

# %% [markdown]
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
predict("17.split", unit="%")

# %% tags=["nbval-ignore-output"]
for bits in (2, 3, 4, 6):  # change this
    ways = split(weight, bits), split(weight, bits, bases=1), by_row(weight, bits)
    errors = [error(weight, rounded) for rounded in ways]
    print("{} bits: in two bases {:.1f} %, in one {:.1f} %, absmax {:.1f} %".format(bits, *errors))
left = 100 * error(weight, split(weight, 4)) / error(weight, by_row(weight, 4))
reveal("17.split", left, unit="%")

# %% [markdown]
# The second basis lowers the error. With two bits, the factors are far better than a grid. With three they are level.
# From four on, plain rounding is better, because our steps only use ±c. (Change 6 to 12: do they catch up?) The
# authors' version is finer, and they call its results competitive or superior. A product with W becomes three: with
# U, with Q, and with V. The authors also take a Q that is as cheap as a Fourier transform; then two full products are
# left.

# %% [markdown]
# ## QLoRA's account
# Dettmers et al. 2023 fine-tuned a Llama with 65 billion parameters on "a single 48GB GPU", which they do not name.
# Regular 16-bit fine-tuning, they say, takes more than 780 GB (section 1). Is that so? Here is a block of this Llama,
# from your layers:


# %%
class Block(nn.Module):
    def __init__(self, h=8192, ffn=22016, a=64):
        super().__init__()
        self.norm1, self.norm2 = (nn.RMSNorm(h, elementwise_affine=False) for _ in "12")
        self.q, self.k, self.v, self.out = (QLora(h, h) for _ in range(4))
        self.gate, self.up, self.down, self.a = QLora(h, ffn), QLora(h, ffn), QLora(ffn, h), a

    def forward(self, x):
        n = self.norm1(x)
        q, k, v = (one(n).unflatten(-1, (self.a, -1)) for one in (self.q, self.k, self.v))
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)  # flash
        x = x + self.out(y.transpose(1, 2).flatten(2))
        n = self.norm2(x)
        return x + self.down(nn.functional.silu(self.gate(n)) * self.up(n))


# %% [markdown]
# (It lacks the positions and the norms' weights: they take next to nothing.) **Your guess.** 80 blocks, rank 64 on all
# matrices, one sequence of 512 tokens, a checkpoint per block: what is the peak?

# %%
predict("17.qlora", unit="GB")


# %%
def peaks(L, tokens=512, V=32000, h=8192):  # change this
    """The most that is allocated in forward and backward, and in the optimizer's step."""
    with on_gpu(needs="8 GB"), torch.device("cuda"):
        embedding, head = (torch.empty(V, h, dtype=torch.bfloat16) for _ in range(2))  # frozen
        blocks = nn.ModuleList(Block() for _ in range(L))
        optimizer, ids = torch.optim.AdamW(blocks.parameters()), torch.randint(V, (tokens + 1,))
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats()
            x = embedding[ids[None, :-1]]
            for block in blocks:
                x = checkpoint(block, x, use_reentrant=False)
            nn.functional.cross_entropy((x @ head.T)[0], ids[1:]).backward()
            most = [torch.cuda.max_memory_allocated()]
            torch.cuda.reset_peak_memory_stats()
            optimizer.step()
            most.append(torch.cuda.max_memory_allocated())
            optimizer.zero_grad()
    return most


# %% [markdown]
# To unpack 560 matrices is slow without a GPU. But all blocks are alike, so each adds the same to either peak. Weigh
# two blocks and three, and add 77 more:

# %%
two, three = peaks(2), peaks(3)
each = [more - less for less, more in zip(two, three)]
step = {"backward": two[0] + 78 * each[0], "optimizer": two[1] + 78 * each[1]}
for when, size in step.items():
    print(f"80 blocks, the peak in {when}: {size / 1e9:.1f} GB")
reveal("17.qlora", max(step.values()))

# %% [markdown]
# The peak is in the optimizer's step, whose temporaries are larger than what backward unpacks. `TrainingRun` says all
# of this in a line, and what other bits would take. An L40 of 48 GB gives a program [44.40
# GiB](https://github.com/QwenLM/Qwen3-VL/issues/2097), as error correction takes its share. An RTX A6000 gives [47.54
# GiB](https://github.com/vllm-project/vllm/issues/4417). CUDA's context comes out of that (lesson 12).

# %%
from course_utils.models import TransformerConfig

sizes = {"layers": 80, "hidden": 8192, "heads": 64, "ffn": 22016, "max_positions": 2048}
big = TransformerConfig("llama-65b", "llama", vocab=32000, tied=False, **sizes)
options = {"recompute": "full", "lora_rank": 64, "lora_targets": ("attention", "mlp")}
sixteen = TrainingRun(big, 1, 512, "bf16", **options)
qlora = sixteen.replace(frozen_bits=4)
runs = {"LoRA, 16 bits": sixteen, "8 bits": sixteen.replace(frozen_bits=8), "QLoRA": qlora}
runs["with 8-bit Adam"] = qlora.replace(optimizer="adam8bit")
gap = estimate(qlora).total - max(step.values())
print(f"QLoRA: {estimate(qlora).total / 1e9:.1f} GB by the formula, {gap / 1e6:+.0f} MB from yours")
title = "65 billion parameters fit a 48 GB card only in 4 bits"
rows, L40 = {name: estimate(run) for name, run in runs.items()}, round(44.40 * 2**30)
stack(rows, title, capacity=L40, capacity_label="L40: 47.7 GB", provenance="estimated")

# %% [markdown]
# **The gap**: your counter also has cuBLAS's workspaces of 17 MB, and the allocator's blocks are a little larger than the
# tensors in them. Regular training, and more tokens:

# %%
N = big.parameters
print(f"{N / 1e9:.1f} billion · (2 + 2 + 8) bytes = {12 * N / 1e9:.0f} GB: the paper's 780")
for b, s in ((1, 512), (1, 2048), (8, 512), (16, 512)):
    peak = estimate(qlora.replace(micro_batch=b, seq_len=s)).total  # change this
    fits = "fits an L40" if peak <= L40 else "does not fit an L40"
    print(f"QLoRA, {b:2d} × {s:5,} tokens: {peak / 1e9:.1f} GB, {fits}")

# %% [markdown]
# Both of the paper's numbers hold with few tokens. And the loss? Dettmers et al. found that 4-bit QLoRA matches 16-bit
# fine-tuning (section 4): while they learn, the factors also repair what rounding has broken.
#
# Which is the largest Llama that you can fine-tune on an RTX 4090 in 16 bits? In 4?

# %%
from course_utils.lessons.quantization.widget import lora_sliders

options = {"precision": "bf16", "lora_rank": 16, "frozen_bits": 4, "recompute": "full"}
lora_sliders("llama3-8b", micro_batch=1, seq_len=1024, **options)

# %% [markdown]
# ## With a library
# Real 4-bit kernels are in [bitsandbytes](https://huggingface.co/docs/bitsandbytes) and
# [torchao](https://docs.pytorch.org/ao/stable/). The course installs neither. These lines make QLoRA of a model from
# `transformers`:
#
# ```python
# import torch
# from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
# from transformers import AutoModelForCausalLM, BitsAndBytesConfig
#
# four_bits = BitsAndBytesConfig(
#     load_in_4bit=True,
#     bnb_4bit_quant_type="nf4",
#     bnb_4bit_use_double_quant=True,  # scales in 8 bits: 4.127 bits per number
#     bnb_4bit_compute_dtype=torch.bfloat16,
# )
# model = AutoModelForCausalLM.from_pretrained("meta-llama/Llama-3.1-8B", quantization_config=four_bits)
# model = prepare_model_for_kbit_training(model)  # recomputation on; what is not in 4 bits to fp32
# model = get_peft_model(model, LoraConfig(r=16, lora_alpha=16, target_modules="all-linear"))
# ```
#
# And these round a trained model's weights to 8 bits with torchao, for inference (or its inputs too, dynamically):
#
# ```python
# from torchao.quantization import Int8WeightOnlyConfig, quantize_
#
# quantize_(model, Int8WeightOnlyConfig())  # or Int8DynamicActivationInt8WeightConfig()
# ```

# %% [markdown]
# ## In your own script
# Store a frozen matrix in one byte per number, in plain PyTorch, and unpack it in forward and again in backward.

# %%
import torch
from torch import nn


class Int8Linear(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.scale = nn.Buffer(base.weight.detach().abs().amax(dim=1, keepdim=True) / 127)
        self.codes = nn.Buffer((base.weight.detach() / self.scale).round().to(torch.int8))

    def product(self, x):
        return nn.functional.linear(x, (self.codes * self.scale).to(x.dtype))

    def forward(self, x):  # keeps x and the codes, not the unpacked W
        return torch.utils.checkpoint.checkpoint(self.product, x, use_reentrant=False)


layer, x = Int8Linear(nn.Linear(64, 1024, bias=False)), torch.randn(8, 64, requires_grad=True)
layer(x).sum().backward()
print(sum(buffer.nbytes for buffer in layer.buffers()), "bytes instead of", 4 * 64 * 1024)

# %% [markdown]
# ## Four questions

# %%
from course_utils.lessons import quiz

quiz(17)

# %% [markdown]
# ## Take home
# **Remember** Quantization shrinks the weights that stay, and nothing else: the 16-bit W exists while a product runs,
# activations and factors keep their bits.
#
# **Breaks when** one outlier sets the scale for all; when backward keeps the unpacked weights; below four bits.
#
# **Cheat-sheet line** frozen weights: 2 bytes, 1 in 8 bits, or 4.5 bits in NF4 (4.127 with rounded scales) · each bit
# halves the error · a scale costs 32/block bits per number · QLoRA: frozen bytes + 8 bytes per number of the factors.
#
# Now solve the [exercises of this lesson](../exercises/17_quantization.ipynb).
