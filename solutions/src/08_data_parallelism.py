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
# # Exercises 08 · Data parallelism
#
# **75 minutes** for all six; each one says its own. You should know what [lesson
# 08](../notebooks/08_data_parallelism.ipynb) shows. No GPU is needed.
#
# Each exercise asks for one function. Write it, run the cell, then run the check below it. A check tells you what is
# off, never what the answer is. Stuck? Every exercise has three hints; open one at a time. (“Run All Cells” stops at
# the first check that is unsolved.)

# %%
from contextlib import nullcontext

from torch.nn.functional import mse_loss

from course_utils import format_bytes
from course_utils.lessons.data_parallelism import checks as check

# %% [markdown]
# ## 1 · Three ways, in bytes
# **Difficulty** ●○○○○ · **8 minutes** · **Trains** counting what goes through which link
#
# D workers each have S bytes of gradients. Return a dictionary of bytes in one training step:
#
# - `server`: what passes through a parameter server's connection, in and out. It is a machine of its own; gradients
#   come in, and weights, as many bytes, go out.
# - `naive`: what *one* rank sends if everybody sends everything to everybody.
# - `ring`: what *one* rank sends in a ring all-reduce.


# %%
def traffic(D: int, S: int) -> dict[str, float]:
    """Bytes through the server's connection, and bytes that one rank sends in the naive way and in a ring."""
    ### BEGIN SOLUTION Return a dictionary with the keys server, naive and ring.
    return {"server": 2 * D * S, "naive": (D - 1) * S, "ring": 2 * (D - 1) * S / D}
    ### END SOLUTION


# %%
check.traffic(traffic)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# Draw three machines. An arrow is a message; write its bytes on it.
#
# </details>
# <details><summary>Hint 2: who is asked about</summary>
#
# `server` counts all arrows that end or begin at the server. `naive` and `ring` count the arrows that begin at one
# rank.
#
# </details>
# <details><summary>Hint 3: the ring</summary>
#
# A message of the ring holds one of D parts. There are D−1 steps until a part is complete. How many more until all
# ranks have it?
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# The server's link grows with D, and so does what a rank sends in the naive way. In the ring, the parts get smaller as
# steps get more: 2(D−1)/D never reaches 2.

# %% tags=["solution"]
for D in (2, 8, 64):
    found = traffic(D, 6_000_000_000)
    print(f"{D:2d} ranks:", {way: format_bytes(round(size), "GB", 1) for way, size in found.items()})

# %% [markdown]
# ## 2 · Write the ring
# **Difficulty** ●●●○○ · **20 minutes** · **Trains** the algorithm under every all-reduce
#
# You are rank `rank` of `ranks`. `parts` is the list of your gradient's parts, one tensor for each rank. `send(tensor,
# to)` sends a copy of a tensor to a rank and returns at once; `receive(source)` waits for the next tensor from a rank
# and returns it. Return the list of parts, each the sum over all ranks. Send to your right neighbor alone, `(rank + 1)
# % ranks`, and send no more than a ring needs.
#
# The check runs your function on up to 5 ranks at once, each a thread, and on one rank alone; then on three real
# processes, with torch's own `isend` and `recv`. (These get your function's text, so it needs nothing from other
# cells.)


# %%
def ring(parts, rank, ranks, send, receive):
    """The parts of this rank, each added up over all ranks, by sending to the right and receiving from the left."""
    ### BEGIN SOLUTION Return the list of parts.
    right, left = (rank + 1) % ranks, (rank - 1) % ranks
    for step in range(ranks - 1):
        send(parts[(rank - step) % ranks], right)
        comes = (rank - step - 1) % ranks
        parts[comes] = parts[comes] + receive(left)
    for step in range(ranks - 1):
        send(parts[(rank + 1 - step) % ranks], right)
        parts[(rank - step) % ranks] = receive(left)
    return parts
    ### END SOLUTION


# %%
check.ring(ring)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# In step 0 rank r sends part r. What it then receives from the left is part r−1, and it adds its own to that.
#
# </details>
# <details><summary>Hint 2: the next step</summary>
#
# In each step you send what you have just added to. So the index of the part falls by one with each step, and `%`
# keeps it in range: Python's `-1 % 4` is 3.
#
# </details>
# <details><summary>Hint 3: the second half</summary>
#
# After D−1 steps you hold the whole sum of the part that you added to last. Send that one. From now on what arrives
# takes the place of yours, instead of being added.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# A part starts at its own rank and collects one contribution on every stop; after D−1 stops it has all. Then it makes
# the round again to be copied. In each step every rank sends and receives exactly one part: all links are busy, none
# twice.

# %% [markdown]
# ## 3 · Ranks with unequal work
# **Difficulty** ●●○○○ · **10 minutes** · **Trains** what "mean" means when texts differ in length
#
# Each rank's loss is the mean over *its* tokens, and DDP takes the plain mean of all ranks' gradients. If ranks have
# different numbers of tokens, that is not the gradient of the mean over *all* tokens. It is, if each rank multiplies
# its loss by the right factor before `backward()`. Which?


# %%
def loss_factor(counts: list[int], rank: int) -> float:
    """What `rank` multiplies its mean loss by, when rank r has counts[r] tokens."""
    ### BEGIN SOLUTION Return a number.
    return len(counts) * counts[rank] / sum(counts)
    ### END SOLUTION


# %%
check.loss_factor(loss_factor)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# Write the mean over all tokens as a sum over ranks: each rank's mean, times its number of tokens, over all tokens.
#
# </details>
# <details><summary>Hint 2: what DDP does</summary>
#
# DDP adds up the ranks' gradients and divides by the number of ranks D. Your factor has to undo that division.
#
# </details>
# <details><summary>Hint 3: try it</summary>
#
# With equal counts the factor must be 1 for every rank. And the factors of all ranks add up to D.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# Σ n_r·G_r / Σ n_r is wanted, and DDP computes Σ f_r·G_r / D: so f_r = D·n_r / Σ n. In practice a rank does not know
# the others' counts, so they are all-reduced first: one number, before backward.

# %% [markdown]
# ## 4 · Ranks that drift apart
# **Difficulty** ●●●●○ · **17 minutes** · **Trains** finding a mistake that raises no error
#
# Somebody's ranks drift apart. Here is their training step; `model` is a network in `DistributedDataParallel`. It runs
# without an error. Below it stands what three real ranks do with it, for 4 and for 6 micro-batches in a step: how far
# the ranks are apart at the end, how far off they are from one process with the whole batch, and how often all
# gradients were exchanged in a step.


# %%
def drifting_step(model, optimizer, micro_batches):
    """One optimizer step over micro-batches (inputs, targets). Something is wrong here."""
    for index, (inputs, targets) in enumerate(micro_batches):
        last = (index + 1) % 4 == 0
        with nullcontext() if last else model.no_sync():
            loss = mse_loss(model.module(inputs), targets) / 4
            loss.backward()
    optimizer.step()
    optimizer.zero_grad()


for count, found in check.on_real_ranks(drifting_step).items():
    print(f"{count} micro-batches: apart {found['apart'][-1]:.2f}, off {found['off'][-1]:.2f}, "
          f"exchanged {found['exchanged']:.0f} times")  # fmt: skip

# %% [markdown]
# Write it anew, so that for any number of micro-batches the ranks stay equal to the last bit, take the step of the
# whole batch, exchange their gradients once, and keep one micro-batch's activations at a time. (All micro-batches are
# equally large. Your function's text is sent to other processes, so use nothing from other cells but `nullcontext`,
# `mse_loss` and `torch`.)


# %%
def mended_step(model, optimizer, micro_batches):
    """One optimizer step of a DistributedDataParallel model over micro-batches (inputs, targets)."""
    ### BEGIN SOLUTION Train on all micro-batches, then step once.
    for index, (inputs, targets) in enumerate(micro_batches):
        last = index == len(micro_batches) - 1
        with nullcontext() if last else model.no_sync():
            loss = mse_loss(model(inputs), targets) / len(micro_batches)
            loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    ### END SOLUTION


# %%
check.mended_step(mended_step)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# Is anything exchanged at all? DDP does its work around its own `forward`. Who calls that?
#
# </details>
# <details><summary>Hint 2: six micro-batches</summary>
#
# Which backward is the last one, with four micro-batches, and with six? Go through the indices.
#
# </details>
# <details><summary>Hint 3: the size of the step</summary>
#
# Gradients of all micro-batches add up. By how much must each loss be divided, so that the sum is the whole batch's?
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# Three mistakes, and none raises an error. `model.module(…)` calls the network and passes DDP by, so nothing is ever
# exchanged. `% 4` takes every fourth micro-batch for the last, so with six the last two stay on their rank. And the 4
# in the loss makes a step of six micro-batches half as long again. A training run that logs the distance of its
# replicas now and then, by one all-reduce of a checksum, finds the first two on its first day.

# %% [markdown]
# ## 5 · What does not hide
# **Difficulty** ●●●○○ · **10 minutes** · **Trains** reading the overlap of a trace
#
# `buckets` lists (ready, seconds): when a bucket's gradients are all there, and how long its all-reduce takes. They
# are in the order in which they become ready, and the network takes one at a time. Backward has computed its last
# gradient at time `computed`. How long does the step then still wait for the exchange?


# %%
def exposed(buckets: list[tuple[float, float]], computed: float) -> float:
    """Time from `computed` until the last bucket is through; 0 if it is through before."""
    ### BEGIN SOLUTION Return a time, 0 or more.
    end = 0.0
    for ready, seconds in buckets:
        end = max(end, ready) + seconds
    return max(0.0, end - computed)
    ### END SOLUTION


# %%
check.exposed(exposed)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# Keep one number: the time at which the network is free again. It begins with 0.
#
# </details>
# <details><summary>Hint 2: one bucket</summary>
#
# A bucket starts when it is ready *and* the network is free: the later of both.
#
# </details>
# <details><summary>Hint 3: almost there</summary>
#
# When all buckets are through, compare the end with `computed`. A negative wait is none.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# If transfers are shorter than the pauses between buckets, only the last one is exposed. If they are longer, they
# queue up, and the whole exchange is a chain that began with the first bucket: then smaller buckets do not help any
# more.

# %% tags=["solution"]
for seconds in (2, 10, 15):
    buckets = [(10, seconds), (20, seconds), (30, seconds)]
    print(f"three buckets, {seconds} each: the step waits for {exposed(buckets, 30):g}")

# %% [markdown]
# ## 6 · How many ranks?
# **Difficulty** ●●●○○ · **10 minutes** · **Trains** turning α and β into a decision
#
# A rank computes for `compute` seconds in each step, then all D ranks exchange `size` bytes in a ring of messages that
# take `alpha + beta·n` seconds for n bytes. Efficiency is compute / (compute + exchange). What is the largest D, up to
# `limit`, whose efficiency is `floor` or better? (More ranks are never more efficient.)


# %%
def most_ranks(alpha: float, beta: float, size: int, compute: float, floor: float, limit: int) -> int:
    """The largest number of ranks up to `limit` whose efficiency is at least `floor`."""
    ### BEGIN SOLUTION Return a whole number of at least 1.
    best = 1
    for D in range(2, limit + 1):
        exchange = 2 * (D - 1) * (alpha + beta * size / D)
        if compute / (compute + exchange) >= floor:
            best = D
    return best
    ### END SOLUTION


# %%
check.most_ranks(most_ranks)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# How many messages does one rank send, one after the other? How many bytes are in each?
#
# </details>
# <details><summary>Hint 2: one D</summary>
#
# The exchange takes the number of messages times `alpha + beta·n`, with n the bytes of one.
#
# </details>
# <details><summary>Hint 3: almost there</summary>
#
# `limit` is small enough to try every D from 1 on. One rank exchanges nothing.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# With D, the bytes approach 2·size·β: a fixed price, paid from a handful of ranks on. The 2(D−1) starts grow without
# end. Where that hurts, libraries arrange ranks in a tree instead, with about log D steps.

# %% tags=["solution"]
for compute in (0.25, 0.5, 1.0, 2.0):
    D = most_ranks(20e-6, 2e-11, 6_000_000_000, compute, 0.8, 4096)
    print(f"{compute:4} s of computing, at 80 % or better: D = {D:,}")
