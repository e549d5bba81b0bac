# ---
# jupyter:
#   course:
#     minutes: 85
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Exercises 12 · LoRA and quantization
#
# **85 minutes** for all four; each one says its own. You should know what [lesson
# 12](../notebooks/12_lora_and_quantization.ipynb) shows. No GPU is needed.
#
# Each exercise asks for a class or a function. Write it, run the cell, then run the check below it. A check tells you
# what is off, never what the answer is. Stuck? Every exercise has three hints; open one at a time. (“Run All Cells”
# stops at the first check that is unsolved.)

# %%
from statistics import NormalDist

import torch
import torch.nn.functional as F
from torch import nn

from course_utils import on_gpu
from course_utils.lessons.lora import checks as check

# %% [markdown]
# ## 1 · A layer that merges
# **Difficulty** ●●●○○ · **22 minutes** · **Trains** LoRA as you would use it: trained, merged, taken out again
#
# The lesson's layer only adds. A useful one drops out some of the adapter's input, and merges: `merge()` puts the
# adapter into W, `unmerge()` takes it out again. This much is given (A and B are fp32, on the CPU):


# %%
class Adapter(nn.Module):
    def __init__(self, base: nn.Linear, r: int, alpha: float, dropout: float = 0.0):
        super().__init__()
        self.base, self.scale, self.merged = base.requires_grad_(False), alpha / r, False
        self.A = nn.Parameter(torch.randn(r, base.in_features) / base.in_features**0.5)
        self.B = nn.Parameter(torch.zeros(base.out_features, r))
        self.dropout = nn.Dropout(dropout)


# %% [markdown]
# Write the rest, in two cells. (After a change to the first, run the second again, too.)
#
# - `forward`: the base layer, plus B·A times the scale. Dropout acts on the adapter's input alone: use `self.dropout`.
#   A merged layer computes the base alone: then nothing is dropped, in training mode either. Between forward and
#   backward it may keep W, A, B, the input, what dropout needs and x·Aᵀ, but no other matrix of W's size.
# - `merge` adds scale·B·A to W in place, whatever dropout is. It keeps nothing else of W's size, and no graph. It
#   leaves `training` as it is. A second `merge()` changes nothing.
# - `unmerge` gives W back, up to rounding. A second `unmerge()` changes nothing.
#
# The check tries inputs of two and three dimensions, with dropout and without, and traces what is kept.


# %%
class TwoPaths(Adapter):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x·Wᵀ + bias, plus the adapter's part unless it is merged."""
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
# Take the lesson's forward. Where does `self.dropout` go, so that the base layer still sees all of x? Which of the two
# products with A and B comes first, so that nothing of W's size is made?
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
# `self.merged` says where the adapter is. Look at it before you change W, set it after, and let `forward` ask it, too.
# To take the adapter out you need no old W: A and B are still there.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# Matrix products are associative, so the same three matrices cost little in either use. In training, x·Aᵀ comes first
# and everything that is kept is thin. When training is over, B·A is one matrix, and it costs nothing more at inference.
# A copy of W would make `unmerge` exact, at the price of all that LoRA has saved. Merging into a *quantized* W is
# another matter: the sum has to be rounded again, and a small difference may vanish in it.

# %% tags=["solution"]
layer = LoraLinear(nn.Linear(512, 512), r=8, alpha=16)
nn.init.normal_(layer.B)
x, old = torch.randn(4, 512), layer.base.weight.clone()
apart = layer(x)
layer.merge()
print(f"merged: {(layer(x) - apart).abs().max():.3f} from the two paths")
layer.unmerge()
print(f"unmerged: {(layer.base.weight - old).abs().max():.3f} from the old W")
adapter = {name: weight for name, weight in layer.state_dict().items() if name in "AB"}
print(f"to save: {sum(weight.nbytes for weight in adapter.values()):,} bytes, W has {old.nbytes:,}")

# %% [markdown]
# ## 2 · Two to a byte
# **Difficulty** ●●●○○ · **35 minutes** · **Trains** 4-bit storage, without its traps
#
# No tensor has a type of 4 bits. Write a class that stores values in them: absmax, codes from −7 to 7, two codes to a
# byte. `block` neighbors of the flattened tensor share a scale: their largest magnitude over 7.
#
# - `Packed(values, block)` takes an fp32 tensor of any shape, transposed or not. Afterwards, and after `unpack()`, its
#   tensors hold half a byte for each number (if their count is odd, the last has a byte to itself) and an fp32 scale
#   for each block, to the byte. A slice keeps the whole storage that it was cut from, and that counts.
# - `unpack()` returns the values as fp32 in their old shape, each at most half a scale off, as often as it is called.
#
# `block` may be odd, and the last block shorter than the others. A block's largest magnitude may be 10⁻⁷, or 0. Never
# make an integer of 0/0, which is NaN, nor a `uint8` of a negative float: which one it becomes depends on the
# processor. (The lesson's layers do not guard against it.) Which code has the higher half of a byte is up to you. Of
# use may be:

# %%
codes = torch.tensor([3, -5], dtype=torch.int8)
print("the lower four bits:", (codes & 15).tolist(), "and 16 times as much:", (codes * 16).tolist())
print("the same bytes, unsigned:", codes.view(torch.uint8).tolist(), "shifted by four:", (codes >> 4).tolist())
print("filled up:", F.pad(codes, (0, 2)).tolist())


# %%
class Packed:
    def __init__(self, values: torch.Tensor, block: int):
        ### BEGIN SOLUTION Keep a byte for each two codes, the scales, and what shape they had.
        self.shape, self.block, count = values.shape, block, values.numel()
        rows = F.pad(values.flatten(), (0, -count % block)).view(-1, block)
        self.scales = rows.abs().amax(dim=1, keepdim=True) / 7
        codes = (rows / self.scales.clamp_min(1e-30)).round().to(torch.int8).flatten()[:count]
        first, second = F.pad(codes, (0, count % 2)).view(-1, 2).unbind(dim=1)
        self.packed = first * 16 | second & 15
        ### END SOLUTION

    def unpack(self) -> torch.Tensor:
        """The values, rounded to their codes."""
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
# Fill the flat values up to whole blocks, `.view(-1, block)`, and take the largest magnitude of each row. `-count %
# block` is how many are missing. Cut the codes to `count` again before you pack them. `clamp_min` keeps zeros out of
# what you divide by: which number is small enough?
#
# </details>
# <details><summary>Hint 2: one byte</summary>
#
# Make `int8` codes first, by rounding. Fill up to an even number, view as pairs. One code of a pair moves up by four
# bits, the other loses its upper four: those of a negative number are all ones.
#
# </details>
# <details><summary>Hint 3: the sign</summary>
#
# Four bits say 0 to 15, and 11 was −5. Subtract 16 from what is above 7, or store code + 8, which has no sign, as the
# lesson's bytes have none. Or let the processor do it: on `int8`, `>>` fills up with the sign. So move the four bits to
# the upper half first, then down.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# Each of these traps has been in somebody's release: the largest number for the largest magnitude, truncation without
# rounding, a lost sign, 0/0 in a block of zeros. And a slice of a larger tensor keeps all of its bytes. The scales cost
# 32/block bits per number: with blocks of 64 half a bit, with blocks of 8 as much as the codes themselves.

# %% tags=["solution"]
torch.manual_seed(0)
values = torch.randn(1000, 1001)
for block in (8, 64, 1024):
    small = Packed(values, block)
    bits, off = 8 * (small.packed.nbytes + small.scales.nbytes) / values.numel(), (small.unpack() - values).square()
    print(f"blocks of {block:5,}: {bits:.2f} bits per number, error {100 * off.mean().sqrt():.0f} % of the spread")

# %% [markdown]
# ## 3 · A product that keeps four bits
# **Difficulty** ●●●●○ · **18 minutes** · **Trains** deciding what is kept, by an `autograd.Function`
#
# Four bits in storage are worth little if autograd keeps the unpacked W until backward:

# %%
stored = check.FourBits(torch.randn(256, 512))  # a matrix in NF4; unpack() makes it in fp32
y = torch.randn(8, 512, requires_grad=True) @ stored.unpack().T
print(f"kept, on the CPU: {y.grad_fn._saved_mat2.nbytes:,} bytes; in four bits: {256 * 512 // 2:,} and the scales")

# %% [markdown]
# `checkpoint` is one cure, but it holds on to x. The lesson's count did not show that, because x existed before. Write
# `product(x, packed, bias)`, which returns x·Wᵀ + bias. `packed` is such a `FourBits`: you need its `unpack()` alone.
# For backward, nothing but `packed` is kept: neither x nor the unpacked W. Forward and backward call
# `packed.unpack()` once each.
#
# - x has two or three dimensions, its last one is W's second; W is (n_out, n_in).
# - x may be fp32 or bf16, and the output has its type. `unpack()` returns fp32.
# - bias is a vector of x's type, or `None`. It is frozen, as W is: only x gets a gradient.
#
# Write the class with a static `forward` and `backward`, then the function that applies it. [Lesson
# 06](../notebooks/06_recomputation.ipynb) writes one under *By hand*, and [torch's
# notes](https://docs.pytorch.org/docs/stable/notes/extending.html) have more. `save_for_backward` takes
# tensors alone; anything else is an attribute of `ctx`.


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
    """x·Wᵀ + bias, W from its four bits, with nothing but `packed` kept for backward."""
    ### BEGIN SOLUTION Return the output.
    return Product.apply(x, packed, bias)
    ### END SOLUTION


# %%
check.product(product)

# %% [markdown]
# <details><summary>Hint 1: what backward needs</summary>
#
# Which gradients are asked for? Only that of x. It is made of the output's gradient and of W. So what does forward have
# to remember?
#
# </details>
# <details><summary>Hint 2: remember the small one</summary>
#
# Whatever is on `ctx` stays until backward. Which of the two is small: `packed`, or what `unpack()` returned?
#
# </details>
# <details><summary>Hint 3: shapes and types</summary>
#
# The output's gradient is (…, n_out), x's is (…, n_in), W is (n_out, n_in): no transpose is needed. Bring W to the type
# of what it is multiplied by. Backward returns as many values as forward takes after `ctx`, and `None` for what gets no
# gradient.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# That is what bitsandbytes does for QLoRA: the weight is unpacked for a moment, in forward and again in backward. The
# price is a little time, and one unpacked matrix at a time. LoRA's factors stay outside of this function and learn as
# always; they are what keeps x, once. A frozen layer without an adapter keeps nothing at all.

# %% tags=["solution"]
with on_gpu():
    packed = Packed(torch.randn(4096, 4096, device="cuda"), 64)
    x = torch.randn(512, 4096, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    F.linear(x[:1], x[:1])  # the first product takes cuBLAS's workspace
    plain = lambda x: F.linear(x, packed.unpack().to(x.dtype))  # noqa: E731
    for name, run in (("plain", plain), ("product", lambda x: product(x, packed, None))):
        before = torch.cuda.memory_allocated()
        y = run(x)
        print(f"{name:8s} keeps {(torch.cuda.memory_allocated() - before - y.nbytes) / 1e6:.1f} MB for backward")
        del y

# %% [markdown]
# ## 4 · NormalFloat for any number of bits
# **Difficulty** ●●○○○ · **10 minutes** · **Trains** reading a recipe, and making it general
#
# NF4 has eight probabilities from δ to ½ and nine from ½ to 1 − δ, evenly spaced in each half, with the ½ shared; its
# values are the normal distribution's quantiles there, divided by the largest. δ is the mean of 1/(2·16) and
# 1/(2·15): half a step from the end with 16 values, and with 15.
#
# Write it for any number of bits from two on: 2^bits values, rising, from −1 to 1, zero among them.
# `torch.special.ndtri` (of a tensor) and `NormalDist().inv_cdf` (of a number) make a quantile of a probability.


# %%
def normal_float(bits: int) -> list[float]:
    """NormalFloat with 2^bits values, rising from −1 to 1."""
    ### BEGIN SOLUTION Return a list of 2^bits numbers.
    count = 2**bits
    delta = (1 / (2 * count) + 1 / (2 * (count - 1))) / 2
    half = count // 2
    below = [delta + (0.5 - delta) * step / (half - 1) for step in range(half)]
    above = [0.5 + (0.5 - delta) * step / half for step in range(1, half + 1)]
    quantiles = [NormalDist().inv_cdf(probability) for probability in below + above]
    return [quantile / quantiles[-1] for quantile in quantiles]
    ### END SOLUTION


# %%
check.normal_float(normal_float)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# Take the lesson's cell and find every number in it that comes from 16: 32, 30, 8, 9.
#
# </details>
# <details><summary>Hint 2: the halves</summary>
#
# 2^(bits−1) probabilities from δ to ½, both ends included, and 2^(bits−1) more beyond ½ up to 1 − δ.
#
# </details>
# <details><summary>Hint 3: almost there</summary>
#
# Give the number of values a name, n, and write each of the four numbers of hint 1 with it. 8 is half of n, and 30
# twice one less. Then ask your function for 4 bits, and compare with the lesson.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# Two halves of unequal count make zero exact: a weight that is zero (padding, pruning) stays zero. The price is that
# the code is not quite symmetric.

# %% tags=["solution"]
for bits in (2, 3):
    print(bits, "bits:", " ".join(f"{round(value, 3) + 0:.3f}" for value in normal_float(bits)))
