# ---
# jupyter:
#   course:
#     minutes: 88
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Exercises 10 · Data parallelism
#
# **88 minutes** for all five; each one says its own. You should know what [lesson
# 10](../notebooks/10_data_parallelism.ipynb) shows. No GPU is needed.
#
# Each exercise asks for one function. Write it, run the cell, then run the check below it. A check tells you what is
# off, never what the answer is. Stuck? Every exercise has three hints; open one at a time. (“Run All Cells” stops at
# the first check that is unsolved.)

# %%
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from course_utils.lessons.data_parallelism import checks as check

# %% [markdown]
# ## 1 · The exposed time
# **Difficulty** ●●○○○ · **10 minutes** · **Trains** what of an exchange hides behind backward, and what never does
#
# After backward has ended, the exchange of gradients may still go on. Return for how many seconds.
#
# - `ready` says when each bucket is full, in seconds and in order. Backward ends when the last one is.
# - `sizes` are their bytes.
# - The buckets leave over one link, one after the other. A bucket leaves when it is full and the one before it has
#   arrived.
# - A bucket of S bytes takes the time of a ring of D ranks: 2(D−1) messages of S/D bytes, each of `alpha` seconds plus
#   `beta` seconds per byte.


# %%
def exposed(ready: list[float], sizes: list[int], D: int, alpha: float, beta: float) -> float:
    """Return the seconds from the end of backward to the end of the last exchange."""
    ### BEGIN SOLUTION Return a number of seconds.
    free = 0.0
    for full, size in zip(ready, sizes, strict=True):
        free = max(free, full) + 2 * (D - 1) * (alpha + beta * size / D)
    return free - ready[-1]
    ### END SOLUTION


# %%
check.exposed(exposed)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# Draw the lesson's picture of the overlap with two buckets: a row for backward, a row for the link. Where does each box
# begin?
#
# </details>
# <details><summary>Hint 2: two conditions</summary>
#
# Remember when the link is free again. The next bucket begins then, or later, when it is full.
#
# </details>
# <details><summary>Hint 3: the end</summary>
#
# After the loop, the link is free when the last exchange has ended. When has backward ended?
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# The last bucket is full only when backward ends, so its exchange is always exposed. If exchanges are slower than
# backward, those before it wait, too, and push it back. Smaller buckets leave earlier, and the last one is short. But
# each costs 2(D−1)·α. So there is a best size, and DDP's 25 MiB are a guess at it.

# %% tags=["solution"]
backward, total, D, alpha, beta = 0.02, 500e6, 64, 5e-6, 1 / 50e9  # 500 MB over 50 GB/s
for count in (1, 4, 16, 64, 256):
    ready = [backward * (number + 1) / count for number in range(count)]
    late = exposed(ready, [total / count] * count, D, alpha, beta)
    print(f"{count:3d} buckets of {total / count / 1e6:5.1f} MB: {1000 * late:5.1f} ms exposed")

# %% [markdown]
# ## 2 · Write the ring
# **Difficulty** ●●●○○ · **20 minutes** · **Trains** the algorithm under every all-reduce
#
# Write both halves of the ring. (The lesson's ring stops half way, and torch hands out the complete parts.)
#
# You are rank `rank` of `ranks`. `parts` is the list of your gradient's parts, one tensor for each rank. You may
# change it.
#
# - `send(tensor, to)` sends a copy of a tensor to a rank and returns at once.
# - `receive(source)` waits for the next tensor from a rank and returns it.
# - Send only to your right neighbor, `(rank + 1) % ranks`, and no more than a ring needs: 2(D−1) messages, each one
#   part.
# - Return the list of parts in the same order, each the sum over all ranks.
#
# The check runs your function on up to 5 ranks at once, each a thread, and on one rank alone. Then it runs it on
# three real processes, with torch's own `isend` and `recv`. They get your function, and the imports and functions that
# it uses.


# %%
def ring(parts, rank, ranks, send, receive):
    """Return the parts, each added up over all ranks; send to the right, receive from the left."""
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
# In step 0 rank r sends part r. Then it receives part r−1 from the left, and adds its own to that.
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
# After D−1 steps you hold the complete sum of the part that you added to last. Send that one. From now on, what
# arrives replaces your part instead of being added.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# A part starts at its own rank and collects one contribution on every stop. After D−1 stops it has all. Then it makes
# the round again to be copied. In each step every rank sends and receives exactly one part: all links are busy, none
# twice.

# %% [markdown]
# ## 3 · A token is a token, on every rank
# **Difficulty** ●●○○○ · **18 minutes** · **Trains** what "mean" means when texts differ in length
#
# Go forward and backward once, so that every `.grad` is the gradient of the mean loss over the tokens of *all* ranks.
# Return that mean loss as a number, the same on each rank.
#
# DDP does not do this by itself. Each rank's loss is the mean over *its* tokens, and DDP takes the plain mean of all
# ranks' gradients. That is something else if ranks have different numbers of tokens.
#
# `model` is in DDP and returns logits of shape (texts, length, classes). `targets` has shape (texts, length), with
# -100 where there is no token: `cross_entropy` leaves those out. It wants one row of logits for each target, so
# flatten both. Use all texts. A rank may have no token at all, but never all of them. `dist.all_reduce(x)` replaces a
# tensor x by its sum over all ranks.
#
# The check sends your function to three real processes, with the imports and functions that it uses.


# %%
def token_backward(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> float:
    """Go backward from the mean loss over the tokens of all ranks, and return that mean."""
    ### BEGIN SOLUTION Go backward, and return the mean loss of all ranks' tokens.
    tokens = (targets != -100).sum()
    dist.all_reduce(tokens)
    loss = cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), reduction="sum") / tokens
    (loss * dist.get_world_size()).backward()  # DDP divides by it
    mean = loss.detach()
    dist.all_reduce(mean)
    return mean.item()
    ### END SOLUTION


# %%
check.token_backward(token_backward)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# Write the mean over all tokens as a fraction. Above: a sum over ranks. Below: one number, which no rank knows alone.
#
# </details>
# <details><summary>Hint 2: what DDP does</summary>
#
# DDP adds up the ranks' gradients and divides by the number of ranks. The loss that you go backward from must undo
# that division.
#
# </details>
# <details><summary>Hint 3: a rank without tokens</summary>
#
# The mean over no token is 0/0, and one rank's NaN becomes everybody's. Which `reduction` of `cross_entropy` gives 0
# there?
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# You want the sum of all losses over the number of all tokens, but DDP's mean divides by D. So each rank divides its
# sum by everybody's tokens, and multiplies by D. That costs an all-reduce of one number before backward.
#
# With equal counts it changes nothing, so the mistake is easily missed. Texts of different lengths, or a last batch
# that is cut unevenly, bring it back. A rank without tokens must still go backward, because the others wait for its
# zeros.

# %% [markdown]
# ## 4 · Ranks that drift apart
# **Difficulty** ●●●○○ · **15 minutes** · **Trains** finding a mistake that raises no error
#
# Somebody's ranks drift apart. Find out why. Here is their training step; `model` is a network in
# `DistributedDataParallel`. It runs without an error.
#
# Run the cell: it takes ten seconds. It shows what three real ranks do, for 4, 6, 5 and 1 micro-batches in a step:
#
# - `apart`: the largest difference of a weight between ranks at the end,
# - `off`: the largest difference from one process with the batch of all ranks,
# - `exchanged`: how often all gradients were exchanged in a step.


# %%
def drifting_step(model, optimizer, micro_batches):
    """Take one optimizer step over micro-batches (inputs, targets). Something is wrong here."""
    for index, (inputs, targets) in enumerate(micro_batches):
        last = (index + 1) % 4 == 0
        with nullcontext() if last else model.no_sync():
            loss = mse_loss(model.module(inputs), targets) / 4
            loss.backward()
    optimizer.step()
    optimizer.zero_grad()


for count, found in check.on_real_ranks(drifting_step).items():
    print(
        f"{count} micro-batches: apart {found['apart'][-1]:.2f}, off {found['off'][-1]:.2f}, "
        f"exchanged {found['exchanged']:.0f} times"
    )

# %% [markdown]
# Write the step again, without the mistakes. For any list of micro-batches
#
# - the ranks stay equal to the last bit,
# - they take the step of the batch of all ranks,
# - DDP exchanges their gradients once,
# - and each rank keeps one micro-batch's activations at a time.
#
# All micro-batches are equally large. Your function need not return anything.


# %%
def mended_step(model, optimizer, micro_batches):
    """Take one optimizer step of a DDP model over micro-batches (inputs, targets)."""
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
# Which backward is the last one with four micro-batches, and which with six? Go through the indices.
#
# </details>
# <details><summary>Hint 3: the size of the step</summary>
#
# The gradients of all micro-batches add up. By how much must you divide each loss, so that the sum is the whole
# batch's?
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# There are three mistakes, and none raises an error. `model.module(…)` calls the network past DDP, so nothing is ever
# exchanged. `% 4` takes every fourth micro-batch for the last, so with six the last two stay on their rank. And the 4
# in the loss makes a step of six micro-batches 1.5 times as long.
#
# How would you notice? Log the distance of the replicas now and then, by one all-reduce of a checksum. That finds the
# first two mistakes on the first day.

# %% [markdown]
# ## 5 · A script that trains
# **Difficulty** ●●●●○ · **25 minutes** · **Trains** DDP's part, and yours: start, data and what you log
#
# Somebody adds a new head to a network, `body`, and trains both with DDP. It runs without an error, but more than one
# thing is wrong.
#
# Run both cells: they take ten seconds. They show what three real ranks do with 24 samples: how far apart they are at
# the start and at the end, how many samples they draw in an epoch, and what each rank returns.


# %%
def careless_training(body, data, epochs, batch):
    """Return the model, trained on `data`, and the loss of each epoch.

    Something is wrong here, more than once.
    """
    losses = []
    model = DistributedDataParallel(body)
    model.module.append(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(data, batch, shuffle=True)
    for _ in range(epochs):
        for x, y in loader:
            loss = mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return model, losses


# %%
found = check.training_on_ranks(careless_training)["24"]
print(f"apart {found['start']:.2f} at the start, {found['end']:.2f} at the end")
print(f"{len(found['epochs'][0])} samples drawn in an epoch by all ranks together")
for rank, losses in enumerate(found["losses"]):
    print(f"rank {rank} returns", *(f"{loss:.2f}" for loss in losses))

# %% [markdown]
# Write the training again, without the mistakes. `body` is an `nn.Sequential` with different weights on each rank.
# You add the head, `nn.Linear(8, 1)`. `data` is a data set of pairs (x, y), and `batch` is the number of samples of
# one rank in one step.
#
# - In each epoch, the ranks together draw every sample, in another order than the epoch before. If D does not divide
#   them, up to D−1 are drawn twice.
# - All ranks' weights stay equal. They are those of one process that begins with rank 0's weights. It takes as many
#   SGD steps (learning rate 0.1), and its batch in each step is that of all ranks together.
# - Return the DDP model, with the new head, and a list with one loss per epoch, the same on every rank. It is the
#   mean of the loss that you went backward from, over all samples drawn on *all* ranks. A sample drawn twice counts
#   twice.
#
# `DistributedSampler(data)` chooses one rank's samples, shuffled, and `DataLoader` takes it as `sampler`. Its
# `set_epoch(epoch)` changes the order.


# %%
def fixed_training(body, data, epochs, batch):
    """Return the DDP model, trained on all ranks' parts of `data`, and each epoch's mean loss."""
    ### BEGIN SOLUTION Return the model and a list of losses.
    model = DistributedDataParallel(body.append(nn.Linear(8, 1)))  # now DDP knows the head, too
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sampler = DistributedSampler(data)
    losses = []
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros(1)
        for x, y in DataLoader(data, batch, sampler=sampler):
            loss = mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            total += len(x) * loss.detach()
        dist.all_reduce(total)
        losses.append(total.item() / len(sampler) / dist.get_world_size())
    return model, losses
    ### END SOLUTION


# %%
check.fixed_training(fixed_training)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# DDP does its work when you wrap: it sends rank 0's weights, and notes everything that will have gradients. It does
# not know what comes later.
#
# </details>
# <details><summary>Hint 2: whose samples?</summary>
#
# A loader knows nothing of ranks. The sampler does, and it shuffles alike on all of them: by its seed and the number
# of the epoch.
#
# </details>
# <details><summary>Hint 3: one number for all</summary>
#
# On each rank, add up the losses of the epoch, each times its number of samples. One exchange at the end of the epoch
# makes the sum of all ranks. `len(sampler)` is the number of samples that one rank draws.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# There are three mistakes, and none raises an error. A head that is added after wrapping starts from each rank's own
# random numbers, and DDP never exchanges its gradient. Without a sampler, every rank draws everything: one epoch then
# takes three times the work. And the last batch's loss on one rank is not the training's loss: it is noisy, and knows
# nothing of the other ranks.
#
# With the sampler comes a fourth trap: without `set_epoch`, it shuffles every epoch alike. DDP keeps equal replicas
# equal. Everything before and after is your job.
