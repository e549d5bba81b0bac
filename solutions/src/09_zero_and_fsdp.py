# ---
# jupyter:
#   course:
#     minutes: 75
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Exercises 09 · ZeRO and FSDP
#
# **75 minutes** for all six; each one says its own. You should know what [lesson
# 09](../notebooks/09_zero_and_fsdp.ipynb) shows. No GPU is needed, and no processes are started.
#
# Each exercise asks for one function. Write it, run the cell, then run the check below it. A check tells you what is
# off, never what the answer is. Stuck? Every exercise has three hints; open one at a time. (“Run All Cells” stops at
# the first check that is unsolved.)

# %%
from math import prod

import torch

from course_utils import TrainingRun, estimate, format_bytes, gpu
from course_utils.lessons.sharding import checks as check

# %% [markdown]
# ## 1 · One rank's bytes
# **Difficulty** ●○○○○ · **8 minutes** · **Trains** the three stages, with any number formats
#
# N parameters, D ranks. For each parameter there are `weight` bytes of weights, `gradient` bytes of gradients and
# `optimizer` bytes of optimizer states. Return the bytes that one rank keeps at ZeRO's stage 0 (nothing cut), 1, 2 or
# 3.


# %%
def rank_bytes(N: int, D: int, stage: int, weight: int, gradient: int, optimizer: int) -> float:
    """Bytes of states on one of D ranks."""
    ### BEGIN SOLUTION Return a number of bytes.
    parts = {3: weight, 2: gradient, 1: optimizer}  # by the first stage that cuts them
    return sum(each * N / (D if stage >= first else 1) for first, each in parts.items())
    ### END SOLUTION


# %%
check.rank_bytes(rank_bytes)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# There are three terms, one for each kind. Each is divided by D or it is not.
#
# </details>
# <details><summary>Hint 2: which is divided?</summary>
#
# From stage 1 on the optimizer's states are. What comes next at stage 2, and last at stage 3?
#
# </details>
# <details><summary>Hint 3: almost there</summary>
#
# `optimizer * N / (D if stage >= 1 else 1)` is one of the three terms.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# The largest kind is cut first: with K = 12 stage 1 alone takes most away. What is not cut is a floor for any D.

# %% tags=["solution"]
for stage in range(4):
    print(f"stage {stage}: {rank_bytes(7_500_000_000, 64, stage, 2, 2, 12) / 1e9:.1f} GB")

# %% [markdown]
# ## 2 · The padding of odd shards
# **Difficulty** ●●○○○ · **10 minutes** · **Trains** how FSDP2 cuts
#
# FSDP2 cuts each parameter along its first dimension, its rows, into D pieces of equally many rows, as few as possible.
# The last pieces are padded. Given the `shapes` of a unit's parameters, of one dimension or more, return a dictionary:
# `shard`, how many numbers one rank's pieces hold together, and `padding`, how many numbers in all ranks' pieces are
# padding.


# %%
def padding(shapes: list[tuple[int, ...]], D: int) -> dict[str, int]:
    """Numbers in one rank's shard of parameters of these shapes, and padding in all D shards together."""
    ### BEGIN SOLUTION Return a dictionary with the keys shard and padding.
    shard = 0
    for rows, *others in shapes:
        shard += -(-rows // D) * prod(others)
    return {"shard": shard, "padding": D * shard - sum(prod(shape) for shape in shapes)}
    ### END SOLUTION


# %%
check.padding(padding)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# Take one parameter of shape (10, 6) on 3 ranks. How many rows does each rank get? How many numbers is that?
#
# </details>
# <details><summary>Hint 2: rounding up</summary>
#
# `-(-rows // D)` is rows / D, rounded up. `prod(shape[1:])` is how many numbers a row has; for a vector it is 1.
#
# </details>
# <details><summary>Hint 3: almost there</summary>
#
# All shards together hold D · shard numbers. How many of those are real?
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# Each parameter is rounded up by itself, by whole rows. So a long, thin matrix on many ranks pads little, and a short
# vector a lot: on 64 ranks a bias of 3 numbers becomes 64.

# %% tags=["solution"]
for D in (8, 64, 512):
    found = padding([(50257, 768), (1024, 768), (768,), (768,)], D)
    print(f"GPT-2's embeddings and last norm on {D:3d} ranks: {found}")

# %% [markdown]
# ## 3 · ZeRO-1 by hand
# **Difficulty** ●●●○○ · **15 minutes** · **Trains** what reduce-scatter and all-gather are for
#
# One process plays all ranks. `weights` is a flat tensor of N numbers, `gradients` a list of D such tensors, one from
# each rank's data. `momenta` is a list of D tensors of N/D numbers: rank r keeps the momentum of slice r alone.
#
# Make one step of SGD with momentum as ZeRO-1 does. For each rank: the mean gradient of its slice (that is the
# reduce-scatter), m ← β·m + g in place, w ← w − lr·m for its slice. Return all new weights (the all-gather). No tensor
# may hold the momenta of several ranks, as no rank has them.


# %%
def zero_1_step(weights, gradients, momenta, lr, beta):
    """The new weights; each rank's momentum is changed in place."""
    ### BEGIN SOLUTION Return a tensor as long as weights.
    D = len(momenta)
    slices = []
    for rank, momentum in enumerate(momenta):
        mean = sum(gradient.chunk(D)[rank] for gradient in gradients) / D  # reduce-scatter
        momentum.mul_(beta).add_(mean)
        slices.append(weights.chunk(D)[rank] - lr * momentum)
    return torch.cat(slices)  # all-gather
    ### END SOLUTION


# %%
check.zero_1_step(zero_1_step)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# `weights.chunk(D)[rank]` is the slice of a rank. It works for gradients, too.
#
# </details>
# <details><summary>Hint 2: reduce-scatter</summary>
#
# For slice r: take that slice of *every* rank's gradient, add them, divide by D.
#
# </details>
# <details><summary>Hint 3: almost there</summary>
#
# `momentum.mul_(beta).add_(mean)` changes the tensor that you were given. In the end `torch.cat` puts the slices
# together.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# Nothing in SGD or Adam looks across parameters. So it does not matter who steps which of them, as long as everybody
# gets the results. Optimizers that look at whole matrices (Muon, Adafactor) are not cut so easily.

# %% [markdown]
# ## 4 · Above the formula
# **Difficulty** ●●●○○ · **12 minutes** · **Trains** explaining why FSDP2's peak is above ZeRO-3's formula
#
# A model with `reshard_after_forward=True`, a unit for each block, bf16 parameters, gradients reduced in fp32. Backward
# is in the middle of the network. `outer` is how many numbers the unit outside the blocks has, `block` those of one
# block (padding included). Beside the shards of 16Ψ/D, four things of the communication are in memory. Return their
# bytes: `outer`, the weights of the outermost unit; `block`, those of the block at work; `next`, the flat buffer in
# which the next block's arrive; `reduce`, the flat copy of the last block's gradients that is being reduced.


# %%
def above(outer: int, block: int) -> dict[str, int]:
    """Bytes of communication in the middle of backward, by name."""
    ### BEGIN SOLUTION Return a dictionary with the keys outer, block, next and reduce.
    return {"outer": 2 * outer, "block": 2 * block, "next": 2 * block, "reduce": 4 * block}
    ### END SOLUTION


# %%
check.above(above)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# None of them is divided by D. That is the whole point.
#
# </details>
# <details><summary>Hint 2: which unit?</summary>
#
# The first is of the outermost unit, the other three are of one block each.
#
# </details>
# <details><summary>Hint 3: almost there</summary>
#
# Weights are gathered in bf16: 2 bytes a number. Gradients are reduced in fp32.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# ZeRO-3's formula counts what is kept *between* uses. While something is used it is whole, and FSDP2 overlaps: it
# gathers the next block while it works on this one, and reduces the last one's gradients meanwhile. So from some D on,
# more ranks hardly lower the peak; smaller units do.

# %% tags=["solution"]
llama = TrainingRun("llama3-8b", 1, 4096, "bf16-master", recompute="full", world_size=64, zero_stage=3, loss_chunks=8)
terms = above(*check.units(llama))
print({name: format_bytes(size, "GB", 2) for name, size in terms.items()})
print(f"together {format_bytes(sum(terms.values()), 'GB', 2)}; "
      f"the estimate has {format_bytes(estimate(llama)['communication'], 'GB', 2)}")  # fmt: skip

# %% [markdown]
# ## 5 · Choose for a cluster
# **Difficulty** ●●●●○ · **15 minutes** · **Trains** choosing stage and micro-batch for a given cluster
#
# You have `ranks` cards of one kind, and a run. Choose ZeRO's stage and the micro-batch: the *lowest* stage at which a
# micro-batch of at least `least` sequences fits, as a higher stage sends more and waits more; and at that stage the
# *largest* of `MICRO_BATCHES` that fits. It fits if the estimated peak is at most the card's memory. Return `(stage,
# micro_batch)`, or `None` if nothing fits. A replacement to begin with:

# %%
MICRO_BATCHES = check.MICRO_BATCHES
print(MICRO_BATCHES)
run = TrainingRun("llama3.2-1b", 1, 2048, "bf16-master", recompute="full")
candidate = run.replace(micro_batch=4, world_size=8, zero_stage=1)
print(f"{format_bytes(estimate(candidate).total, 'GB', 1)} of {format_bytes(gpu('RTX4080-16GB').memory, 'GB', 1)}")


# %%
def choose(run: TrainingRun, ranks: int, card: str, least: int) -> tuple[int, int] | None:
    """(stage, micro_batch): the lowest stage where `least` sequences fit, and the most that fit there; else None."""
    ### BEGIN SOLUTION Return a pair of whole numbers, or None.
    for stage in range(4):
        fitting = [
            b
            for b in MICRO_BATCHES
            if b >= least
            and estimate(run.replace(micro_batch=b, world_size=ranks, zero_stage=stage)).total <= gpu(card).memory
        ]
        if fitting:
            return stage, max(fitting)
    return None
    ### END SOLUTION


# %%
check.choose(choose)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# Two loops: over stages from 0, and over `MICRO_BATCHES`. `estimate` knows about buckets, gathered weights and
# activations.
#
# </details>
# <details><summary>Hint 2: the order of wishes</summary>
#
# For one stage, collect the micro-batches that fit and have at least `least` sequences. If there is one, you are done
# with stages.
#
# </details>
# <details><summary>Hint 3: almost there</summary>
#
# Inside the loop over stages: `if fitting: return stage, max(fitting)`. After it: `return None`.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# ZeRO's formula alone would choose too low a stage: buckets, gathered units and activations need room as well. And
# sharding more than you must sends more for nothing.

# %% tags=["solution"]
for card in ("A100-80GB", "A100-40GB", "RTX5090-32GB", "RTX4080-16GB"):
    print(f"Llama-3.2 1B on 8 cards {card}: {choose(run, 8, card, 1)}")

# %% [markdown]
# ## 6 · What tensor parallelism splits
# **Difficulty** ●●●○○ · **15 minutes** · **Trains** Korthikanti et al.'s table 2, from memory
#
# ZeRO does not cut activations. [Lesson 11](../notebooks/11_model_and_pipeline_parallelism.ipynb) does, by splitting
# matrices among t ranks. One block of a GPT with eager attention keeps s·b·h·(34 + 5·a·s/h) bytes in 16-bit. Of the 34,
# 10 belong to norms, their dropout, and the inputs of attention and MLP. Return the bytes that *one* of t
# tensor-parallel ranks keeps: without sequence parallelism those 10 stay whole on every rank; with it
# (`sequence=True`) they are split as well.


# %%
def rank_activations(s: int, b: int, h: int, a: int, t: int, sequence: bool) -> float:
    """Bytes that one block keeps on one of t ranks."""
    ### BEGIN SOLUTION Return a number of bytes.
    whole = 0 if sequence else 10
    split = 34 - whole + 5 * a * s / h
    return s * b * h * (whole + split / t)
    ### END SOLUTION


# %%
check.rank_activations(rank_activations)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# Write the sum in brackets as two parts: what is split by t, and what stays whole.
#
# </details>
# <details><summary>Hint 2: the scores</summary>
#
# Each rank has a part of the heads. So 5·a·s/h is always split.
#
# </details>
# <details><summary>Hint 3: almost there</summary>
#
# Three parts: the 10, the rest of the 34, and the scores. Which of them are divided by t in the first case, and which
# in the second?
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# With t = 8 the 10 alone are more than the 24/8 = 3 beside them: what is not split soon dominates, as always. Sequence
# parallelism costs no more communication, since an all-reduce is cut into the two halves that it consists of.

# %% tags=["solution"]
for t in (1, 2, 4, 8):
    one, other = (rank_activations(2048, 1, 12288, 96, t, sequence) / 1e9 for sequence in (False, True))
    print(f"t = {t}: {one:.2f} GB a block, {other:.2f} GB with sequence parallelism")
