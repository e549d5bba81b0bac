# ---
# jupyter:
#   course:
#     minutes: 80
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Exercises 17 · Quantization
#
# **80 minutes** for all four; each one says its own. You should know what [lesson
# 17](../notebooks/17_quantization.ipynb) shows. You need no GPU.
#
# Each exercise asks for a class or a function. Write it, run the cell, then run the check below it. A check tells you
# what is off, never what the answer is. Stuck? Every exercise has three hints; open one at a time. (“Run All Cells”
# stops at the first check that is unsolved.)

# %%
import torch
import torch.nn.functional as F

from course_utils import on_gpu
from course_utils.lessons.quantization import checks as check

# %% [markdown]
# ## 1 · Two to a byte
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
# ## 2 · A product that keeps four bits
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
# ## 3 · A product in eight bits
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

# %% [markdown]
# ## 4 · Which rank fits?
# **Difficulty** ●●○○○ · **12 minutes** · **Trains** choosing rank and bits for a card
#
# A card has `room` bytes left for the matrices of a model's blocks and for their LoRA. Write the largest rank that
# fits, for frozen matrices in 16, 8 or 4 bits.
#
# - `shapes` are the matrices, (n_out, n_in). All of them get factors of the same rank.
# - Frozen in 8 bits, a matrix has one fp32 scale per row. In 4 bits, it has one per 64 numbers, and all sizes divide
#   evenly. In 16 bits it has none.
# - Everything that learns is in 16 bits: factors, gradients, and Adam's two moments.
# - If the frozen matrices alone do not fit, return 0.


# %%
def largest_rank(shapes: list[tuple[int, int]], bits: int, room: int) -> int:
    """Return the largest rank whose matrices and states take at most `room` bytes."""
    ### BEGIN SOLUTION Return a whole number.
    scales = {16: lambda n_out, n_in: 0, 8: lambda n_out, n_in: n_out}
    scales[4] = lambda n_out, n_in: n_out * n_in // 64
    frozen = sum(bits * n_out * n_in // 8 + 4 * scales[bits](n_out, n_in) for n_out, n_in in shapes)
    one_rank = 8 * sum(n_out + n_in for n_out, n_in in shapes)
    return max(0, (room - frozen) // one_rank)
    ### END SOLUTION


# %%
check.largest_rank(largest_rank)

# %% [markdown]
# <details><summary>Hint 1: what is frozen</summary>
#
# One matrix takes bits/8 bytes per number, and 4 bytes per scale. How many scales has it?
#
# </details>
# <details><summary>Hint 2: what learns</summary>
#
# One more rank means a row of A and a column of B per matrix: n_in + n_out numbers. Each has a gradient and two
# moments. How many bytes is that?
#
# </details>
# <details><summary>Hint 3: whole numbers</summary>
#
# Divide what is left by the bytes of one rank, with `//`. What does that give if nothing is left?
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# Rank is cheap: on the matrices of an 8B model's blocks, one more takes about 20 MB, while 4 bits instead of 16 free
# ten gigabytes. So choose the bits by the card, and the rank by what the model must learn. Embedding, head, activations
# and the loss come on top: `estimate` has them all.

# %% tags=["solution"]
block = [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (14336, 4096), (14336, 4096)]
block.append((4096, 14336))
for bits in (16, 8, 4):
    print(
        f"{bits:2d} bits, 16 GB for 32 blocks: rank {largest_rank(32 * block, bits, 16 * 10**9):,}"
    )
