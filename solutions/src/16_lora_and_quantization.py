# ---
# jupyter:
#   course:
#     minutes: 90
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Exercises 16 · LoRA and quantization
#
# **90 minutes** for all four; each one says its own. You should know what [lesson
# 16](../notebooks/16_lora_and_quantization.ipynb) shows. You need no GPU.
#
# Each exercise asks for a class or a function. Write it, run the cell, then run the check below it. A check tells you
# what is off, never what the answer is. Stuck? Every exercise has three hints; open one at a time. (“Run All Cells”
# stops at the first check that is unsolved.)

# %%
import torch
import torch.nn.functional as F
from torch import nn

from course_utils import on_gpu
from course_utils.lessons.lora import checks as check

# %% [markdown]
# ## 1 · A layer that merges
# **Difficulty** ●●●○○ · **22 minutes** · **Trains** LoRA as you would use it: trained, merged, taken out again
#
# Write a LoRA layer with dropout that can merge its adapter into W and take it out again. The lesson's layer can do
# neither. This much is given (A and B are fp32, on the CPU):


# %%
class Adapter(nn.Module):
    def __init__(self, base: nn.Linear, r: int, alpha: float, dropout: float = 0.0):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.scale, self.merged = alpha / r, False
        self.A = nn.Parameter(torch.randn(r, base.in_features) / base.in_features**0.5)
        self.B = nn.Parameter(torch.zeros(base.out_features, r))
        self.dropout = nn.Dropout(dropout)


# %% [markdown]
# Write the rest, in two cells. (After a change to the first, run the second again.)
#
# - `forward(x)` returns the base layer's output, plus the scale times B·A applied to x. Dropout acts only on the
#   adapter's input: use `self.dropout`. A merged layer only computes the base layer: then it drops nothing, in training
#   mode either. Between forward and backward it may keep W, A, B, the input, what dropout needs, and x·Aᵀ, but no other
#   matrix of W's size.
# - `merge()` adds scale·B·A to W in place, whatever dropout is. It keeps nothing else of W's size, and no graph. It
#   does not change `training`. A second `merge()` changes nothing.
# - `unmerge()` restores W, up to rounding. A second `unmerge()` changes nothing.
#
# The check tries inputs of two and three dimensions, with and without dropout, and traces what is kept.


# %%
class TwoPaths(Adapter):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x·Wᵀ + bias, plus the adapter's part unless it is merged."""
        ### BEGIN SOLUTION Return the output.
        y = self.base(x)
        if self.merged:
            return y
        return y + self.scale * (self.dropout(x) @ self.A.T) @ self.B.T
        ### END SOLUTION


# %%
class LoraLinear(TwoPaths):
    def merge(self) -> None:
        """Add the adapter to W, in place."""
        ### BEGIN SOLUTION Change the numbers of W.
        with torch.no_grad():
            if not self.merged:
                self.base.weight.add_(self.B @ self.A, alpha=self.scale)
        self.merged = True
        ### END SOLUTION

    def unmerge(self) -> None:
        """Take the adapter out of W, in place."""
        ### BEGIN SOLUTION Change the numbers of W back.
        with torch.no_grad():
            if self.merged:
                self.base.weight.sub_(self.B @ self.A, alpha=self.scale)
        self.merged = False
        ### END SOLUTION


# %%
check.lora_linear(LoraLinear)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# Start from the lesson's forward. Where does `self.dropout` go, so that the base layer still sees all of x? Which of
# the two products with A and B comes first, so that you make nothing of W's size?
#
# </details>
# <details><summary>Hint 2: in place, without a graph</summary>
#
# `tensor.add_(other, alpha=…)` adds a multiple of `other` in place. A and B require gradients, so whatever you compute
# from them has a graph. The decorator `@torch.no_grad()` on a method prevents that.
#
# </details>
# <details><summary>Hint 3: twice</summary>
#
# `self.merged` says where the adapter is. Look at it before you change W, set it afterwards, and use it in `forward`,
# too. To take the adapter out you need no old W: A and B are still there.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# Matrix products are associative, so the same three matrices are cheap in both uses. In training, x·Aᵀ comes first, and
# everything that is kept is thin. After training, B·A becomes part of W and costs nothing at inference. A copy of W
# would make `unmerge` exact, but it would cost all that LoRA has saved. Merging into a *quantized* W is different: the
# sum must be rounded again, and a small difference may vanish.

# %% tags=["solution"]
layer = LoraLinear(nn.Linear(512, 512), r=8, alpha=16)
nn.init.normal_(layer.B)
x = torch.randn(4, 512)
old = layer.base.weight.clone()
apart = layer(x)
layer.merge()
print(f"merged: {(layer(x) - apart).abs().max():.3f} away from the two paths")
layer.unmerge()
print(f"unmerged: {(layer.base.weight - old).abs().max():.3f} away from the old W")
adapter = {name: weight for name, weight in layer.state_dict().items() if name in "AB"}
print(f"to save: {sum(weight.nbytes for weight in adapter.values()):,} bytes, W has {old.nbytes:,}")

# %% [markdown]
# ## 2 · Two to a byte
# **Difficulty** ●●●○○ · **35 minutes** · **Trains** 4-bit storage, without its traps
#
# Write a class that stores values in 4 bits. No tensor has a 4-bit type, so put two codes into each byte. Use absmax
# with codes from −7 to 7. `block` neighbors of the flattened tensor share a scale: their largest magnitude divided by
# 7.
#
# - `Packed(values, block)` takes an fp32 tensor of any shape, transposed or not. Then, and also after `unpack()`, its
#   tensors hold exactly half a byte per number and one fp32 scale per block. (If the count is odd, the last number has
#   a byte of its own.) A slice keeps the complete storage that it was cut from, and that counts.
# - `unpack()` returns the values as fp32 in their old shape. Each is at most half a scale off. You can call it any
#   number of times.
#
# `block` may be odd, and the last block may be shorter than the others. A block's largest magnitude may be 10⁻⁷, or 0.
# Two conversions depend on the processor, so avoid them: an integer from 0/0, which is NaN, and a `uint8` from a
# negative float. (The lesson's layers do not avoid them.) You choose which code goes into the higher half of a byte.
# These lines may help:

# %%
codes = torch.tensor([3, -5], dtype=torch.int8)
print("the lower four bits:", (codes & 15).tolist(), "and 16 times as much:", (codes * 16).tolist())
unsigned, shifted = codes.view(torch.uint8).tolist(), (codes >> 4).tolist()
print("the same bytes, unsigned:", unsigned, "shifted by four:", shifted)
print("padded:", F.pad(codes, (0, 2)).tolist())


# %%
class Packed:
    def __init__(self, values: torch.Tensor, block: int):
        ### BEGIN SOLUTION Keep one byte per two codes, the scales, and the shape.
        self.shape, self.block, count = values.shape, block, values.numel()
        rows = F.pad(values.flatten(), (0, -count % block)).view(-1, block)
        self.scales = rows.abs().amax(dim=1, keepdim=True) / 7
        codes = (rows / self.scales.clamp_min(1e-30)).round().to(torch.int8).flatten()[:count]
        first, second = F.pad(codes, (0, count % 2)).view(-1, 2).unbind(dim=1)
        self.packed = first * 16 | second & 15
        ### END SOLUTION

    def unpack(self) -> torch.Tensor:
        """Return the values, rounded to their codes."""
        ### BEGIN SOLUTION Return a tensor of the old shape.
        count = self.shape.numel()
        codes = torch.stack([self.packed >> 4, self.packed << 4 >> 4], dim=1).flatten()[:count]
        rows = F.pad(codes, (0, -count % self.block)).view(-1, self.block)
        return (rows * self.scales).flatten()[:count].view(self.shape)
        ### END SOLUTION


# %%
check.packed(Packed)

# %% [markdown]
# <details><summary>Hint 1: blocks</summary>
#
# Pad the flat values to complete blocks, `.view(-1, block)`, and take the largest magnitude of each row. `-count %
# block` numbers are missing. Cut the codes to `count` again before you pack them. `clamp_min` keeps zeros out of the
# divisor: which number is small enough?
#
# </details>
# <details><summary>Hint 2: one byte</summary>
#
# First make `int8` codes, by rounding. Pad to an even number, view as pairs. One code of a pair moves up by four bits.
# The other loses its upper four bits, which are all ones in a negative number.
#
# </details>
# <details><summary>Hint 3: the sign</summary>
#
# Four bits give 0 to 15, and 11 was −5. Subtract 16 from what is above 7. Or store code + 8, which has no sign, like
# the lesson's bytes. Or let the processor do it: on `int8`, `>>` fills up with the sign. So move the four bits to the
# upper half first, then down.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# Each of these traps has been in somebody's release: the largest number instead of the largest magnitude, truncation
# instead of rounding, a lost sign, 0/0 in a block of zeros. And a slice of a larger tensor keeps all of its bytes. The
# scales cost 32/block bits per number: half a bit with blocks of 64, as much as the codes themselves with blocks of 8.

# %% tags=["solution"]
torch.manual_seed(0)
values = torch.randn(1000, 1001)
for block in (8, 64, 1024):
    small = Packed(values, block)
    bits = 8 * (small.packed.nbytes + small.scales.nbytes) / values.numel()
    off = (small.unpack() - values).square()
    print(
        f"blocks of {block:5,}: "
        f"{bits:.2f} bits per number, error {100 * off.mean().sqrt():.0f} % of the spread"
    )

# %% [markdown]
# ## 3 · A product that keeps four bits
# **Difficulty** ●●●●○ · **18 minutes** · **Trains** deciding what is kept, by an `autograd.Function`
#
# Write a product with a 4-bit W that keeps nothing else for backward. Storing W in four bits saves little if autograd
# keeps the unpacked W until backward:

# %%
stored = check.FourBits(torch.randn(256, 512))  # a matrix in NF4; unpack() returns it in fp32
y = torch.randn(8, 512, requires_grad=True) @ stored.unpack().T
kept, packed = y.grad_fn._saved_mat2.nbytes, 256 * 512 // 2
print(f"kept, on the CPU: {kept:,} bytes; in four bits: {packed:,} plus the scales")

# %% [markdown]
# `checkpoint` avoids that, but it keeps x. (The lesson's measurement did not show that, because x existed before.)
#
# Write `product(x, packed, bias)`, which returns x·Wᵀ + bias. For backward, keep only `packed`: neither x nor the
# unpacked W. Forward and backward call `packed.unpack()` once each.
#
# - `x` has two or three dimensions. The last one is W's second; W is (n_out, n_in). x may be fp32 or bf16, and the
#   output has x's type.
# - `packed` is such a `FourBits`. You only need its `unpack()`, which returns W in fp32.
# - `bias` is a vector of x's type, or `None`. It is frozen, as W is: only x gets a gradient.
#
# Write the class with a static `forward` and `backward`, then the function that applies it. [Lesson
# 06](../notebooks/06_recomputation.ipynb) writes one under *By hand*, and [torch's
# notes](https://docs.pytorch.org/docs/stable/notes/extending.html) explain more. `save_for_backward` takes only
# tensors; anything else becomes an attribute of `ctx`.


# %%
class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, packed, bias):
        ### BEGIN SOLUTION Return x·Wᵀ + bias.
        ctx.packed = packed
        return F.linear(x, packed.unpack().to(x.dtype), bias)
        ### END SOLUTION

    @staticmethod
    def backward(ctx, gradient):
        ### BEGIN SOLUTION Return one gradient for each argument of forward.
        return gradient @ ctx.packed.unpack().to(gradient.dtype), None, None
        ### END SOLUTION


# %%
def product(x: torch.Tensor, packed, bias: torch.Tensor | None) -> torch.Tensor:
    """Return x·Wᵀ + bias with W unpacked from four bits; keep only `packed` for backward."""
    ### BEGIN SOLUTION Return the output.
    return Product.apply(x, packed, bias)
    ### END SOLUTION


# %%
check.product(product)

# %% [markdown]
# <details><summary>Hint 1: what backward needs</summary>
#
# Which gradients does backward compute? Only that of x. You get it from the output's gradient and W. So what must
# forward remember?
#
# </details>
# <details><summary>Hint 2: remember the small one</summary>
#
# Whatever is on `ctx` stays until backward. Which of the two is small: `packed`, or what `unpack()` returned?
#
# </details>
# <details><summary>Hint 3: shapes and types</summary>
#
# The output's gradient is (…, n_out), x's is (…, n_in), W is (n_out, n_in): you need no transpose. Convert W to the
# type of the tensor that you multiply it by. Backward returns as many values as forward takes after `ctx`, with `None`
# for each argument that gets no gradient.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# bitsandbytes does the same for QLoRA: it unpacks the weight for a moment in forward, and again in backward. The price
# is a little time, and one unpacked matrix at a time. LoRA's factors stay outside of this function and learn as always.
# They keep x, once. A frozen layer without an adapter keeps nothing at all.

# %% tags=["solution"]
with on_gpu():
    packed = Packed(torch.randn(4096, 4096, device="cuda"), 64)
    x = torch.randn(512, 4096, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    F.linear(x[:1], x[:1])  # the first product allocates cuBLAS's workspace

    def plain(x):
        return F.linear(x, packed.unpack().to(x.dtype))

    for name, run in (("plain", plain), ("product", lambda x: product(x, packed, None))):
        before = torch.cuda.memory_allocated()
        y = run(x)
        kept = torch.cuda.memory_allocated() - before - y.nbytes
        print(f"{name:8s} keeps {kept / 1e6:.1f} MB for backward")
        del y

# %% [markdown]
# ## 4 · A product in eight bits
# **Difficulty** ●●●○○ · **15 minutes** · **Trains** dynamic quantization: where scales may go, and where not
#
# Write the product of a dynamically quantized layer. Its weights are rounded already: W is about `codes` · `scale`,
# with int8 `codes` of (n_out, n_in) and one fp32 scale per row, `scale` of (n_out, 1). The inputs are rounded while
# the model runs:
#
# - `x` is fp32 and has two or three dimensions. The last one is n_in: each vector along it is a token.
# - Each token has its own scale: its largest magnitude divided by 127. Round its numbers to the nearest whole number of
#   scales, from −127 to 127. A token may be all zeros, or tiny.
# - Multiply codes by codes, and add up exactly. These sums do not fit into int8. A GPU adds up in int32, and on the CPU
#   `@` also takes two int32 tensors.
# - Return fp32 of (…, n_out): each sum of codes, times the scales that belong to it.


# %%
def product8(x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return about x·Wᵀ, from 8-bit codes of x and of W."""
    ### BEGIN SOLUTION Return fp32 of (…, n_out).
    each = x.abs().amax(dim=-1, keepdim=True) / 127
    rounded = (x / each.clamp_min(1e-30)).round().int()
    return (rounded @ codes.int().T) * each * scale.T
    ### END SOLUTION


# %%
check.product8(product8)

# %% [markdown]
# <details><summary>Hint 1: scales of tokens</summary>
#
# `x.abs().amax(dim=-1, keepdim=True)` has one number per token. What happens to a token of zeros if you divide by it?
# `clamp_min` keeps zeros out of the divisor.
#
# </details>
# <details><summary>Hint 2: the sum</summary>
#
# Convert both codes to `int32` before you multiply. The result has one row per token and one column per row of W.
#
# </details>
# <details><summary>Hint 3: scales afterwards</summary>
#
# A token's scale belongs to its row of the result, a weight row's scale to a column. So one of the two needs a
# transpose: which one?
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# A scale per token and a scale per row of W are the same for all terms of a sum, so both can wait until the sum is
# there. A scale per input *channel* cannot: it changes within the sum. That is why channels with outliers are hard.
# LLM.int8() keeps those few channels in 16 bits ([Dettmers et al. 2022](https://arxiv.org/abs/2208.07339), section
# 3.2).

# %% tags=["solution"]
torch.manual_seed(0)
W, x = torch.randn(256, 512), torch.randn(64, 512)
scale = W.abs().amax(dim=1, keepdim=True) / 127
codes = (W / scale).round().to(torch.int8)
for name, factor in (("plain", 1), ("one channel 30 times as large", 30)):
    x[:, 7] *= factor
    off = (product8(x, codes, scale) - x @ W.T).norm() / (x @ W.T).norm()
    print(f"{name}: error {100 * off:.1f} % of the product")
