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
# # Exercises 07 · Gradient accumulation and large batches
#
# **70 minutes** for all six; each one says its own. You should know what [lesson
# 07](../notebooks/07_gradient_accumulation.ipynb) shows, and from exercise 4 on [lesson
# 07b](../notebooks/07b_large_batches.ipynb). No GPU is needed.
#
# Each exercise asks for one function. Write it, run the cell, then run the check below it. A check tells you what is
# off, never what the answer is. Stuck? Every exercise has three hints; open one at a time. (“Run All Cells” stops at
# the first check that is unsolved.)

# %%
from math import sqrt

from course_utils.lessons.accumulation import checks as check
from course_utils.lessons.accumulation.micro_batches import mean_loss

# %% [markdown]
# ## 1 · Two bugs in the common loop
# **Difficulty** ●●○○○ · **12 minutes** · **Trains** writing the loop that everybody writes, right
#
# This is the common loop. `check.trial` tells how far two epochs with it end from where large batches end.


# %%
def common_loop(model, optimizer, parts, k):
    for i, part in enumerate(parts):
        loss = mean_loss(model, part)
        loss.backward()
        if (i + 1) % k == 0:
            optimizer.step()
            optimizer.zero_grad()


print(f"10 micro-batches in groups of 4: {check.trial(common_loop, count=10, k=4):.0%} off")
print(f" 8 micro-batches in groups of 4: {check.trial(common_loop, count=8, k=4):.0%} off")

# %% [markdown]
# Write one pass that ends exactly where large batches end: one step for every group of k micro-batches, and one for
# what is left in the last group. All micro-batches are equally long. Memory should be that of one micro-batch.


# %%
def one_pass(model, optimizer, parts, k):
    """Step once for every k micro-batches of the list `parts`, and once for an incomplete last group."""
    ### BEGIN SOLUTION Go through the micro-batches and step once for each group.
    for first in range(0, len(parts), k):
        group = parts[first : first + k]
        optimizer.zero_grad()
        for part in group:
            (mean_loss(model, part) / len(group)).backward()
        optimizer.step()
    ### END SOLUTION


# %%
check.one_pass(one_pass)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# There are two bugs. One shows with any number of micro-batches, the other only if k does not divide it. Compare the
# two lines printed above.
#
# </details>
# <details><summary>Hint 2: groups instead of a counter</summary>
#
# `for first in range(0, len(parts), k)` and `parts[first : first + k]` give you one group at a time, and Python's
# slices simply stop at the end of the list.
#
# </details>
# <details><summary>Hint 3: almost there</summary>
#
# In each group: clear, then for each micro-batch the loss divided by the size of *this* group, and backward at once;
# then step.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# The gradient of a mean over a group is the mean of its gradients, and the last group has a mean of its own, over fewer
# micro-batches. Adding up the *losses* and calling `backward` once gives the same numbers, but all graphs wait for it:
# that is the memory of the large batch.

# %% tags=["solution"]
for count in (10, 8):
    print(f"{count:2d} micro-batches in groups of 4: {check.trial(one_pass, count=count, k=4):.0%} off")

# %% [markdown]
# ## 2 · A token is a token
# **Difficulty** ●●○○○ · **8 minutes** · **Trains** averaging over what is meant
#
# Sequences differ in length, and the loss of a micro-batch is the mean over its own tokens. By what do you multiply
# each micro-batch's mean loss, so that their gradients add up to that of the mean over *all* tokens?


# %%
def factors(counts: list[int]) -> list[float]:
    """For each micro-batch, given its number of real tokens: the factor of its mean loss before backward."""
    ### BEGIN SOLUTION Return a list with one number for each micro-batch.
    return [count / sum(counts) for count in counts]
    ### END SOLUTION


# %%
check.factors(factors)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# The mean over all tokens is the sum of all their losses, divided by the number of all tokens.
#
# </details>
# <details><summary>Hint 2: from means to sums</summary>
#
# The sum of a micro-batch's losses is its mean times its number of tokens.
#
# </details>
# <details><summary>Hint 3: almost there</summary>
#
# So each mean is multiplied by its number of tokens, and divided by what all of them come to. If all lengths are equal,
# you should get 1/k.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# Weights of a mean add up to 1, and a micro-batch's weight is its share of tokens. You have to know all lengths of a
# group before its first backward: look at the group first, or multiply all gradients once before the step. With several
# GPUs the sum runs over all of them, too.

# %% [markdown]
# ## 3 · What did the change do?
# **Difficulty** ●●●○○ · **13 minutes** · **Trains** comparing two measurements
#
# A small language model in bf16 takes three steps of several micro-batches each, clean. Then somebody changes the step
# and its peak rises. `difference(before, after)` pairs the tensors of the two peaks, and lists those that came, went,
# grew or shrank. Its rows add up to the difference of the peaks, to the byte. Here are two of five changes:

# %%
from course_utils.lessons.accumulation.changes import changed

changed("batch")

# %%
changed("logits")

# %% [markdown]
# Write the function that reads such a difference and names the change:
#
# | | |
# |---|---|
# | `"batch"` | there are more sequences in a micro-batch |
# | `"graphs"` | losses are added up, and one backward comes at the end |
# | `"logits"` | each micro-batch's logits are kept, upcast to fp32 |
# | `"validation"` | a validation without `torch.no_grad()` keeps its result from step to step |
# | `"nothing"` | no tensor has changed |
#
# `found.rows` has the largest first. A row has `change` ("came", "went", "grew", "shrank") and signed `bytes`. `now`
# describes the tensors: `kind`, `module`, `operation`, `shape`, `dtype`, `made_in`, `line`. The last row is always
# "not attributed". Look at the other changes with `changed`, too.


# %%
def cause(found) -> str:
    """What a change did, by the difference of two measurements: one of the five names."""
    ### BEGIN SOLUTION Return one of the five names.
    first = found.rows[0]
    if first.change == "not attributed":
        return "nothing"
    if first.change == "grew":
        return "batch"
    if first.now.dtype == "float32":
        return "logits"
    return "graphs" if first.now.made_in.endswith("step 3") else "validation"
    ### END SOLUTION


# %%
check.cause(cause)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# Show all five with `changed(...)`. In each, one row is enough: the first. What is special about it?
#
# </details>
# <details><summary>Hint 2: grown, or come?</summary>
#
# With a larger batch no new tensor appears: each one grows. Whatever is kept too long appears *next to* the tensors
# that were there.
#
# </details>
# <details><summary>Hint 3: almost there</summary>
#
# Of what came, look at the dtype: the model computes in bf16. Then look at `made_in`. The peak is in step 3. A tensor
# of an earlier step should be gone by then.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# Three bugs keep tensors alive, and the peak alone tells none from the other. Losses that are added up keep a graph for
# each micro-batch, but only until the step's end. A validation's result keeps its graph for good, so every step adds
# one. Logits kept in fp32 have no graph at all, but s·b·V numbers of 4 bytes each are large without one.

# %% tags=["solution"]
changed("validation")

# %% [markdown]
# ## 4 · The noise scale for nothing
# **Difficulty** ●●●○○ · **12 minutes** · **Trains** measuring what a batch is worth
#
# On average the squared length of a batch's gradient is |G|² + tr(Σ)/B. You know it for two batch sizes: for a
# micro-batch (`small` sequences), and for what you accumulate (`big` sequences). What is the noise scale tr(Σ)/|G|²?


# %%
def noise_scale(small: int, big: int, length_small: float, length_big: float) -> float:
    """tr(Σ)/|G|², in sequences, from the mean squared length of the gradient for two batch sizes."""
    ### BEGIN SOLUTION Return a number of sequences.
    noise = (length_small - length_big) / (1 / small - 1 / big)
    signal = length_big - noise / big
    return noise / signal
    ### END SOLUTION


# %%
check.noise_scale(noise_scale)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# Write the formula down twice, once for each batch size. Two unknowns, |G|² and tr(Σ).
#
# </details>
# <details><summary>Hint 2: one of them goes</summary>
#
# Subtract the two equations: |G|² drops out.
#
# </details>
# <details><summary>Hint 3: almost there</summary>
#
# length_small − length_big = tr(Σ)·(1/small − 1/big). With tr(Σ) known, either equation gives |G|².
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# This is the estimator of McCandlish et al. 2018, appendix A.1. In practice both lengths are averaged over many steps
# first, since each one is noisy, and |G|² is a difference that may even come out negative.

# %% [markdown]
# ## 5 · Plan a ramp
# **Difficulty** ●●●○○ · **13 minutes** · **Trains** letting the batch grow with the noise
#
# During a training the noise scale was measured now and then: `scales` lists (tokens seen, noise scale), in order. The
# training starts with a batch of `first`. At each measurement the batch doubles, as often as *twice* the batch is not
# larger than the noise scale. It never shrinks.
#
# Return the ramp: a list of pairs (tokens seen, batch), one for the beginning, `(0, first)`, and one for each
# measurement at which the batch changes.


# %%
def ramp(first: int, scales: list[tuple[int, float]]) -> list[tuple[int, int]]:
    """(tokens seen, batch from then on), for the beginning and for every change."""
    ### BEGIN SOLUTION Return a list of pairs that begins with (0, first).
    planned, batch = [(0, first)], first
    for seen, scale in scales:
        while 2 * batch <= scale:
            batch *= 2
        if batch != planned[-1][1]:
            planned.append((seen, batch))
    return planned
    ### END SOLUTION


# %%
check.ramp(ramp)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# Keep the batch in a variable, and go through the measurements one by one.
#
# </details>
# <details><summary>Hint 2: more than once</summary>
#
# The scale may have grown a lot since the last measurement: `while`, not `if`.
#
# </details>
# <details><summary>Hint 3: almost there</summary>
#
# After the doubling, compare with the batch of the last pair in your list: only a change makes a new pair.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# Doubling while twice the batch is within the noise scale keeps the batch between half of the scale and all of it,
# where a larger batch still pays. Measurements are noisy, so one low value is no reason to shrink. Accumulation makes
# it easy: a doubled batch is a doubled number of micro-batches, at the same memory.

# %% tags=["solution"]
print(ramp(16, [(69, 33.0), (400, 50.0), (790, 70.0), (4700, 128.0)]))

# %% [markdown]
# ## 6 · The rate for a larger batch
# **Difficulty** ●●○○○ · **12 minutes** · **Trains** scaling rules, and a gradual warm-up
#
# A small batch learns well with `rate`. The batch becomes k times as large. The new peak rate is k times the old one
# for `"sgd"`, √k times for `"adam"`. The rate begins at the *old* one at step 0, rises in a straight line, reaches its
# peak at step `warm`, and stays there. What is it at `step`?


# %%
def rate(step: int, warm: int, rate: float, k: int, optimizer: str) -> float:
    """The learning rate at `step`, for a batch k times as large as the one that `rate` was found for."""
    ### BEGIN SOLUTION Return the rate of this step.
    peak = rate * (k if optimizer == "sgd" else sqrt(k))
    return peak if step >= warm else rate + (peak - rate) * step / warm
    ### END SOLUTION


# %%
check.rate(rate)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# First the peak. It depends on k and on the optimizer.
#
# </details>
# <details><summary>Hint 2: the straight line</summary>
#
# At step t, the part t / warm of the way from the old rate to the peak is done.
#
# </details>
# <details><summary>Hint 3: almost there</summary>
#
# Up to step `warm`: the old rate, and that part of what the peak adds to it. From there on: the peak.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# That is the gradual warm-up of Goyal et al. 2017. Other texts start from zero, α_max·t/T_w. Either way the rate is
# small while the gradient changes quickly, and large once k small steps and one large one lead to the same place.

# %% tags=["solution"]
for step in (0, 250, 500, 1000):
    print(f"step {step:4d}: SGD {rate(step, 500, 0.1, 32, 'sgd'):.3f}, Adam {rate(step, 500, 0.1, 32, 'adam'):.3f}")
