# ---
# jupyter:
#   course:
#     minutes: 70
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Exercises 12 · LoRA and quantization
#
# **70 minutes** for all six; each one says its own. You should know what [lesson
# 12](../notebooks/12_lora_and_quantization.ipynb) shows. No GPU is needed.
#
# Each exercise asks for one function. Write it, run the cell, then run the check below it. A check tells you what is
# off, never what the answer is. Stuck? Every exercise has three hints; open one at a time. (“Run All Cells” stops at
# the first check that is unsolved.)

# %%
from statistics import NormalDist

import torch

from course_utils import TrainingRun, estimate, format_bytes, gpu
from course_utils.lessons.lora import checks as check

# %% [markdown]
# ## 1 · What learns
# **Difficulty** ●○○○○ · **5 minutes** · **Trains** counting LoRA's numbers from shapes
#
# `shapes` lists the matrices that get an adapter, each as (n_out, n_in). How many numbers do the factors of rank `r`
# have, all matrices together?


# %%
def adapter(shapes: list[tuple[int, int]], r: int) -> int:
    """Numbers in LoRA's factors of rank r beside matrices of these shapes (n_out, n_in)."""
    ### BEGIN SOLUTION Return a whole number.
    return sum(r * (n_out + n_in) for n_out, n_in in shapes)
    ### END SOLUTION


# %%
check.adapter(adapter)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# One matrix first. ΔW = B·A has the shape (n_out, n_in).
#
# </details>
# <details><summary>Hint 2: the shapes of the factors</summary>
#
# B has n_out rows and r columns. A has r rows and n_in columns.
#
# </details>
# <details><summary>Hint 3: almost there</summary>
#
# Add the cells of B and of A. Then sum over the list.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# The count grows with the *sum* of a matrix's sides, the matrix with their product. So the larger the model, the
# smaller the share that a given rank trains.

# %% [markdown]
# ## 2 · Merge
# **Difficulty** ●●○○○ · **8 minutes** · **Trains** what a trained adapter is worth: one matrix
#
# A layer computes x·Wᵀ + (x·Aᵀ)·Bᵀ·alpha/r with A of shape (r, n_in) and B of shape (n_out, r). Return the one matrix
# that does the same. Leave W itself as it is: somebody may want to switch the adapter off again.


# %%
def merge(W: torch.Tensor, A: torch.Tensor, B: torch.Tensor, alpha: float) -> torch.Tensor:
    """The weight (n_out, n_in) that does what W with the factors A and B does."""
    ### BEGIN SOLUTION Return a new tensor of W's shape.
    r = A.shape[0]
    return W + B @ A * (alpha / r)
    ### END SOLUTION


# %%
check.merge(merge)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# (x·Aᵀ)·Bᵀ = x·(Aᵀ·Bᵀ). What is Aᵀ·Bᵀ, written as the transpose of one product?
#
# </details>
# <details><summary>Hint 2: the rank</summary>
#
# r is not handed over, but one of the tensors shows it.
#
# </details>
# <details><summary>Hint 3: almost there</summary>
#
# (B·A)ᵀ = Aᵀ·Bᵀ. Multiply by alpha/r, add W, and make a new tensor: no `+=`.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# Matrix products are associative: that is all of LoRA's promise of no cost at inference. Merging into a *quantized* W
# is another matter: the sum has to be rounded again, and a small difference may vanish in it.

# %% [markdown]
# ## 3 · QLoRA's account
# **Difficulty** ●●○○○ · **10 minutes** · **Trains** bits, blocks and who has which copy
#
# `N` parameters are frozen in `bits` bits, with one fp32 scale for every `block` of them (`block` divides `N`).
# `learning` parameters of LoRA are 16-bit, their gradients too; Adam's two moments are fp32; there are no master
# weights. Return a dictionary of bytes with the keys `frozen` (codes and scales), `adapters`, `gradients`, `states`.


# %%
def account(N: int, learning: int, bits: int, block: int) -> dict[str, float]:
    """Bytes of a QLoRA training that stay from step to step, by kind."""
    ### BEGIN SOLUTION Return a dictionary with the keys frozen, adapters, gradients and states.
    return {
        "frozen": N * bits / 8 + 4 * N / block,
        "adapters": 2 * learning,
        "gradients": 2 * learning,
        "states": 8 * learning,
    }
    ### END SOLUTION


# %%
check.account(account)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# Go line by line: how many numbers are there of it, and how many bytes does each take?
#
# </details>
# <details><summary>Hint 2: scales</summary>
#
# N/block blocks, a 4-byte scale for each. A code takes bits/8 bytes.
#
# </details>
# <details><summary>Hint 3: almost there</summary>
#
# What is frozen has neither gradient nor state. So the last three lines have `learning` in them and no `N`.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# 12 bytes for each number that learns, half a byte and a bit for each that does not. With half a percent learning, the
# account is nearly all frozen weights. What is missing in it is what this course is about: activations, and the moment
# in which a matrix is 16-bit again.

# %% tags=["solution"]
for kind, size in account(6_476_005_376, 39_976_960, 4, 64).items():
    print(f"{kind:10s} {format_bytes(round(size), 'GB', 2)}")

# %% [markdown]
# ## 4 · Quantize
# **Difficulty** ●●●○○ · **15 minutes** · **Trains** absmax in blocks, without its traps
#
# Quantize `values`, a tensor of one dimension, by absmax in blocks of `block` neighbors. Return two tensors:
#
# - the codes, as `torch.int8`, one row per block: whole numbers from −(2^(bits−1) − 1) to 2^(bits−1) − 1;
# - the scales, in fp32, one per block: what a code has to be multiplied by.
#
# code · scale should be the value, give or take half a scale. A block may be all zeros. Its codes are zeros, and you
# must not divide 0 by 0 on the way: that is not a number, and each processor makes another integer of it. Leave
# `values` as it is.


# %%
def quantize(values: torch.Tensor, bits: int, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes (blocks, block) in int8 and a scale for each block, such that codes · scales is nearly `values`."""
    ### BEGIN SOLUTION Return the codes and the scales.
    rows = values.view(-1, block)
    scales = rows.abs().amax(dim=1) / (2 ** (bits - 1) - 1)
    codes = (rows / scales.clamp_min(1e-30).unsqueeze(1)).round()
    return codes.to(torch.int8), scales
    ### END SOLUTION


# %%
check.quantize(quantize)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# `values.view(-1, block)` has a row for each block, and `.amax(dim=1)` takes the largest of each row.
#
# </details>
# <details><summary>Hint 2: the scale</summary>
#
# The largest *magnitude* of a block has to get the largest code. So the scale is one over the other.
#
# </details>
# <details><summary>Hint 3: almost there</summary>
#
# `scales.unsqueeze(1)` makes a column of it. Divide, `.round()`, `.to(torch.int8)`. Before you divide, keep zeros out
# of the scales: `clamp_min`.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# Five lines, and each trap in them has been in somebody's release: the largest value for the largest magnitude, 2^bits
# for half of it, truncation by `.to(torch.int8)` without rounding, and 0/0 in a block of zeros.

# %% [markdown]
# ## 5 · NormalFloat for any number of bits
# **Difficulty** ●●●●○ · **17 minutes** · **Trains** reading a recipe, and making it general
#
# NF4 has eight probabilities from δ to ½ and nine from ½ to 1 − δ, evenly spaced in each half, with the ½ shared; its
# values are the normal distribution's quantiles there, over the largest. δ is the mean of 1/32 and 1/30: half a step
# from the end with 16 values, and with 15.
#
# Write it for any number of bits: 2^bits values, rising, from −1 to 1, zero among them.


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
# Take the lesson's cell and find every number in it that comes from 16: 32, 30, 7, 8, 9.
#
# </details>
# <details><summary>Hint 2: the halves</summary>
#
# 2^(bits−1) probabilities from δ to ½, both ends included, and 2^(bits−1) more beyond ½ up to 1 − δ.
#
# </details>
# <details><summary>Hint 3: almost there</summary>
#
# Give the number of values a name, and write each of the five numbers of hint 1 with it: which is twice that number,
# which is half of it, which is one less or one more? Then ask your function for 4 bits, and compare with the lesson.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# Two halves of unequal count make zero exact: a weight that is zero (padding, pruning) stays zero. The price is that
# the code is not quite symmetric.

# %% tags=["solution"]
for bits in (2, 3):
    print(bits, "bits:", " ".join(f"{round(value, 3) + 0:.3f}" for value in normal_float(bits)))

# %% [markdown]
# ## 6 · The best that fits
# **Difficulty** ●●●○○ · **15 minutes** · **Trains** deciding under a limit, in the right order
#
# You are to fine-tune with LoRA on a given card. Choose how many bits the frozen weights keep (one of `BITS`) and the
# rank (one of `RANKS`), such that the estimated peak fits the card. More bits come first, as the model is in them;
# among choices with the same bits the highest rank wins. Return the pair (bits, rank), or `None` if nothing fits.

# %%
BITS, RANKS = check.BITS, check.RANKS
run = TrainingRun("llama3-8b", 1, 2048, "bf16", recompute="full", lora_rank=8, lora_targets=("attention", "mlp"))
print(BITS, RANKS)
peak, room = estimate(run.replace(frozen_bits=4)).total, gpu("L4-24GB").memory
print(f"{format_bytes(peak, 'GB', 1)} of {format_bytes(room, 'GB', 1)}")


# %%
def best(run: TrainingRun, card: str) -> tuple[int, int] | None:
    """The bits and the rank for `run` that fit the card: the most bits, then the highest rank; None if none fit."""
    ### BEGIN SOLUTION Return a pair (bits, rank), or None.
    for bits in BITS:
        for rank in RANKS:
            if estimate(run.replace(frozen_bits=bits, lora_rank=rank)).total <= gpu(card).memory:
                return bits, rank
    return None
    ### END SOLUTION


# %%
check.best(best)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# `run.replace(frozen_bits=bits, lora_rank=rank)` is another run; `estimate(...).total` and `gpu(card).memory` are
# bytes.
#
# </details>
# <details><summary>Hint 2: the order</summary>
#
# Both lists come best first. Which of the two loops has to be the outer one?
#
# </details>
# <details><summary>Hint 3: almost there</summary>
#
# Bits outside, ranks inside, and return at the first pair that fits. After both loops, `return None`.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# Rank is cheap: from 2 to 64 it costs less than one step down in bits saves. So the order of the loops decides only at
# the edge, but there it decides between a 16-bit model and an 8-bit one.

# %% tags=["solution"]
for card in ("A100-80GB", "RTX4090-24GB", "RTX4080-16GB"):
    print(f"{card:13s} {best(run, card)}")
