# ---
# jupyter:
#   course:
#     minutes: 63
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Exercises 03 · Mixed precision
#
# **63 minutes** for all four; each one says its own. You should know what [lesson
# 03](../notebooks/03_mixed_precision.ipynb) shows. No GPU is needed.
#
# Each exercise asks for one function. Write it, run the cell, then run the check below it. A check tells you what is
# off, never what the answer is. Stuck? Every exercise has three hints; open one at a time. (“Run All Cells” stops at
# the first unsolved check.)

# %%
import torch

from course_utils.lessons.precision import checks as check

# %% [markdown]
# ## 1 · A format from its bits
# **Difficulty** ●○○○○ · **10 minutes** · **Trains** deriving range and precision instead of remembering them
#
# Compute the limits of a number format. `limits(e, m)` gets the number of exponent bits `e` and of mantissa bits `m`;
# there is also one sign bit. Return three numbers: **epsilon** (the distance from 1 to the next number), the
# **largest** finite number, and the **smallest normal** number.
#
# The exponent field E stands for 2^(E − bias), with a bias of 2^(e−1) − 1. As in fp16 and bf16, the largest E is set
# aside for infinity and NaN, and E = 0 for subnormal numbers.


# %%
def limits(e: int, m: int) -> tuple[float, float, float]:
    """Return epsilon, largest finite and smallest normal number of a format with e and m bits."""
    ### BEGIN SOLUTION Return three numbers: epsilon, largest, smallest normal.
    bias = 2 ** (e - 1) - 1
    epsilon = 2.0**-m
    return epsilon, (2 - epsilon) * 2.0**bias, 2.0 ** (1 - bias)
    ### END SOLUTION


# %%
check.limits(limits)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# A normal number is 2^(E − bias) · (1 + M/2^m). For epsilon, write 1 in this form and change as little as you can.
#
# </details>
# <details><summary>Hint 2: which exponents there are</summary>
#
# For normal numbers E runs from 1 to 2^e − 2. What is E − bias at both ends?
#
# </details>
# <details><summary>Hint 3: almost there</summary>
#
# At the top, E − bias is the bias itself, and all mantissa bits are 1: so 1 + M/2^m is 2 − 2^−m. At the bottom, E is 1
# and M is 0.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# Precision depends only on m. Range depends only on e, except for a last factor of 2. That is why bf16 is "fp32 cut
# off": the same e, fewer m. With 5 and 10 you get fp16's 65,504.

# %% tags=["solution"]
for name, bits in {"fp32": (8, 23), "bf16": (8, 7), "fp16": (5, 10), "fp8 E5M2": (5, 2)}.items():
    print(
        f"{name:9s} epsilon {limits(*bits)[0]:.3g}, "
        f"largest {limits(*bits)[1]:.5g}, smallest {limits(*bits)[2]:.3g}"
    )

# %% [markdown]
# ## 2 · Right on average
# **Difficulty** ●●●○○ · **10 minutes** · **Trains** rounding without a bias
#
# Round a tensor *stochastically* to multiples of `step`: each number goes to the multiple below or to the one above, so
# that its expected value stays exactly the same. `round_at_random(values, step, u)` returns a tensor of the same shape.
# `u` has that shape too. It holds random numbers, uniformly distributed in [0, 1), as from `torch.rand`. Use no other
# randomness.


# %%
def round_at_random(values: torch.Tensor, step: float, u: torch.Tensor) -> torch.Tensor:
    """Round `values` to multiples of step, up or down by the random numbers u, without bias."""
    ### BEGIN SOLUTION Return a tensor of the same shape.
    return torch.floor(values / step + u) * step
    ### END SOLUTION


# %%
check.round_at_random(round_at_random)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# Take 0.3 and a step of 1. The result must be 0 or 1. How often must it be 1, so that the mean is 0.3?
#
# </details>
# <details><summary>Hint 2: a coin of any shape</summary>
#
# A number that is uniformly distributed in [0, 1) is below p with probability p. Here p is the distance from the
# multiple below to the value, in steps.
#
# </details>
# <details><summary>Hint 3: almost there</summary>
#
# Divide by the step, add u, then take the `floor`. The sum passes the next whole number with a probability equal to the
# fraction. This is right for negative numbers, too.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# A single rounding is worse than rounding to nearest: its error can be a whole step. But over many updates the errors
# cancel instead of all pointing the same way. So small updates survive without a master copy. In bits it is even
# simpler: the lesson adds random numbers to the lower half of an fp32 number.

# %% tags=["solution"]
dice = torch.Generator().manual_seed(0)
weight = torch.ones(1000)
for _ in range(1000):
    weight = round_at_random(weight + 1e-4, 2**-7, torch.rand(weight.shape, generator=dice))
print(f"1,000 weights of 1, each with 1,000 updates of 0.0001: mean {weight.mean():.2f}")
print("bf16 holds every one of them exactly:", torch.equal(weight, weight.bfloat16().float()))

# %% [markdown]
# ## 3 · A master copy in half the bytes
# **Difficulty** ●●●●○ · **25 minutes** · **Trains** adding in fp32 without a second copy of the weights
#
# A bf16 weight and its fp32 master take 6 bytes per parameter, and their upper 16 bits are nearly the same. The next
# cell prints the bits of three masters, each followed by the same number rounded to bf16. Which upper halves differ,
# and why?

# %%
masters = torch.tensor([1.1, -1.1, 0.7])
rounded = masters.bfloat16().float()
for pair in zip(masters.view(torch.int32), rounded.view(torch.int32), strict=True):
    for bits in pair:
        text = f"{bits.item() & 0xFFFFFFFF:032b}"
        print(text[:16], text[16:])

# %% [markdown]
# Write one optimizer step that keeps only what the bf16 weight lacks: the master's lower 16 bits, as an int16 `rest`.
# That is 4 bytes per parameter. `exact_step(weights, rests, update)` returns nothing. `weights` are bf16 parameters
# that have gradients. `rests` are int16 tensors of the same shapes, all 0 before the first step. For each weight in
# turn:
#
# 1. put its fp32 master together;
# 2. call `update(master, weight.grad)`, which changes the master in place;
# 3. store the new bits in the weight (the upper 16) and in the rest (the lower 16), both in place.
#
# Every master must equal that of fp32 training, bit by bit, including negative and infinite ones. Put one master
# together at a time, and keep none after the step.
#
# `x.view(torch.int32)` reads the same bytes as another type of equal size: bf16 and int16 have one size, fp32 and int32
# too. A weight is a parameter: look at it with `weight.detach()`, or work under `torch.no_grad()`. `x << 16` and
# `x >> 16` shift bits, and `x & 0xFFFF` keeps the lower 16. Converting int16 with `.to(torch.int32)` keeps the *value*,
# so a negative number fills the upper half with ones.


# %%
def exact_step(weights: list[torch.Tensor], rests: list[torch.Tensor], update) -> None:
    """Update fp32 masters, kept as bf16 weights and int16 rests, one after the other, in place."""
    ### BEGIN SOLUTION Change weights and rests in place; return nothing.
    for weight, rest in zip(weights, rests, strict=True):
        upper = weight.detach().view(torch.int16)  # the weight's own memory
        bits = (upper.int() << 16) | (rest.int() & 0xFFFF)
        update(bits.view(torch.float32), weight.grad)
        upper.copy_(bits >> 16)
        rest.copy_(bits)  # int32 to int16 drops the upper half
    ### END SOLUTION


# %%
check.exact_step(exact_step)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# Work with integers from beginning to end. A bf16 tensor can be read as int16, an int32 tensor as float32. Only
# `update` needs a floating-point number.
#
# </details>
# <details><summary>Hint 2: two halves, one number</summary>
#
# Make the upper half an int32 and shift it 16 places to the left. Make the lower half an int32 too, but remove the bits
# that its sign added. Then join them with `|`.
#
# </details>
# <details><summary>Hint 3: almost there</summary>
#
# A view shares its memory: if the master is a view of your int32 bits, `update` has changed the bits. The weight,
# detached and viewed as int16, is a view as well: `copy_` the shifted bits into it. `weight.copy_(master)` would round.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# Above, 1.1 and −1.1 have lower halves above 2¹⁵, so rounding carried into the upper ones. Here the weight *is* the
# upper half of its master: nothing is stored twice, and nothing is rounded in between. The recipe with masters drops
# from 2 + 2 + 12 bytes per parameter to 2 + 2 + 10, and trains exactly as before. Intel calls it [Split
# SGD](https://intel.github.io/intel-extension-for-pytorch/latest/tutorials/features/split_sgd.html). Forward reads a
# weight that is cut off, not rounded. If you prefer it rounded, count the rest from the rounded weight. The rest is
# then negative where the weight was rounded up.

# %% tags=["solution"]
weights = [torch.nn.Parameter(torch.ones(1000).bfloat16()) for _ in range(8)]
rests = [torch.zeros(1000, dtype=torch.int16) for _ in weights]
masters = [weight.detach().float() for weight in weights]
for _ in range(1000):
    for weight, master in zip(weights, masters, strict=True):
        weight.grad = torch.full_like(weight, -0.1)
        master.sub_(weight.grad, alpha=1e-3)
    exact_step(weights, rests, lambda master, gradient: master.sub_(gradient, alpha=1e-3))
bits = weights[0].detach().view(torch.int16).int() << 16 | rests[0].int() & 0xFFFF
joined = bits.view(torch.float32)
split = sum(tensor.nbytes for tensor in weights + rests)
whole = sum(tensor.nbytes for tensor in weights + masters)
print(f"weights and rests {split:,} bytes, weights and masters {whole:,}")
print(
    "after 1,000 steps of 0.0001: "
    f"the weight {weights[0][0].item():.4f}, its master {joined[0].item():.7f}"
)
print("every bit as in fp32:", torch.equal(joined, masters[0]))

# %% [markdown]
# ## 4 · Four bugs in one step
# **Difficulty** ●●●●○ · **18 minutes** · **Trains** putting scaling, clipping and master weights in the right order
#
# Here is a colleague's training step in fp16 with fp32 master weights. It runs, learns badly, and keeps more memory
# than it should. It has **four** bugs.

# %%
from torch.nn.utils import clip_grad_norm_


def buggy_step(weights, masters, optimizer, loss, scale: float) -> bool:
    """Take one step; return whether it was taken."""
    (loss * scale).backward()
    for weight, master in zip(weights, masters, strict=True):
        master.grad = (weight.grad / scale).float()
    clip_grad_norm_(masters, 1.0)
    optimizer.step()
    for weight in weights:
        weight.grad = None
    return True


# %% [markdown]
# Write it right: `good_step(weights, masters, optimizer, loss, scale)`. `weights` are fp16 parameters, `masters` are
# fp32 parameters with the same values, and `optimizer` steps on the masters. Clip the norm of all true gradients
# together at 1. Leave no gradients behind: none is in memory afterwards. If a gradient is not finite, change no weight
# and no master. Return `True` if the step was taken, `False` if not.


# %%
def good_step(weights, masters, optimizer, loss, scale: float) -> bool:
    """Take one fp16 step with masters, loss scaling and clipping; return whether it was taken."""
    ### BEGIN SOLUTION Return True if the step was taken, False if a gradient overflowed.
    (loss * scale).backward()
    for weight, master in zip(weights, masters, strict=True):
        master.grad, weight.grad = weight.grad.float() / scale, None
    norm = clip_grad_norm_(masters, 1.0)
    taken = bool(norm.isfinite())
    if taken:
        optimizer.step()
        with torch.no_grad():
            for weight, master in zip(weights, masters, strict=True):
                weight.copy_(master)
    for master in masters:
        master.grad = None
    return taken
    ### END SOLUTION


# %%
check.good_step(good_step)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# Follow one number from the loss to the weight that the next forward reads. Does it arrive? And where does it pass
# through fp16?
#
# </details>
# <details><summary>Hint 2: two of the four</summary>
#
# The weights never receive the step: who copies the masters back? And `weight.grad / scale` is an fp16 number. What was
# the scale good for, if small gradients are divided down to 0 again?
#
# </details>
# <details><summary>Hint 3: the other two</summary>
#
# Infinite gradients are used like any other: check `isfinite()` before the optimizer steps. And what is left behind?
# The weights' gradients are cleared, the masters' gradients are not.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# Upcast, *then* divide. Clip the true gradients, not the scaled ones. Look for infinities before you step, not after.
# Copy the masters to the weights. Left-over master gradients cost 4 bytes per parameter between the steps, and so do
# zeros: `zero_grad(set_to_none=False)` keeps the tensors. They are still there in the next forward, where the peak is.

# %% [markdown]
# ## Take home
# **Remember** Upcast before you divide, add or compare.
#
# **Breaks when** a step in fp16 looks right and is never tried with a gradient that overflows.
#
# **Cheat-sheet line** epsilon 2^−m · largest (2 − 2^−m)·2^bias, bias 2^(e−1) − 1 · unscale, clip, look for inf, step,
# copy to 16-bit.
