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
# # Exercises 06 · Recomputation
#
# **90 minutes** for all seven; each one says its own. You should know what [lesson
# 06](../notebooks/06_recomputation.ipynb) shows. No GPU is needed.
#
# Each exercise asks for one function. Write it, run the cell, then run the check below it. A check tells you what is
# off, never what the answer is. Stuck? Every exercise has three hints; open one at a time. (“Run All Cells” stops at
# the first check that is unsolved.)

# %%
from torch.utils.checkpoint import checkpoint

from course_utils import TrainingRun, estimate, format_bytes, gpu
from course_utils.lessons.recomputation import checks as check
from course_utils.figures import timeline

# %% [markdown]
# ## 1 · The cost of every k-th
# **Difficulty** ●○○○○ · **7 minutes** · **Trains** both sides of the trade, memory and work
#
# A chain of n nodes keeps the input of every k-th node as a checkpoint, the first node's included. In backward each
# stretch of k nodes runs again, leaves its k values, and goes backward. k divides n.
#
# Return a dictionary with `memory`, the most values kept at once (checkpoints and values of nodes count one each), and
# `forwards`, how often an f runs in all.


# %%
def cost(n: int, k: int) -> dict[str, int]:
    """Most values kept at once, and runs of f, for a chain of n nodes with a checkpoint every k (k divides n)."""
    ### BEGIN SOLUTION Return a dictionary with the keys memory and forwards.
    return {"memory": n // k + k, "forwards": 2 * n}
    ### END SOLUTION


# %%
check.cost(cost)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# When is memory fullest? Not at the end of forward: nothing but checkpoints is there then.
#
# </details>
# <details><summary>Hint 2: the fullest moment</summary>
#
# It is when the last stretch has just run again. All checkpoints are still there, and one stretch's values.
#
# </details>
# <details><summary>Hint 3: almost there</summary>
#
# How many checkpoints are n nodes, one every k? How many values does a stretch leave? And each f runs once in forward,
# and how often in backward?
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# n/k checkpoints and k values; n runs in forward, and n again, since each stretch runs again exactly once. The work
# does not depend on k, so choose k for memory alone.

# %% [markdown]
# ## 2 · The best interval
# **Difficulty** ●●○○○ · **10 minutes** · **Trains** adapting a rule of thumb to what it was not made for
#
# Now each node keeps c times as much for its backward as one checkpoint takes, as a transformer's block does. Memory
# is then n/k + c·k checkpoints. Which k needs the least? k has to divide n; if several are equally good, take the
# smallest.


# %%
def best_interval(n: int, c: float) -> int:
    """The k that divides n for which n/k + c·k is least, the smallest of them if several are."""
    ### BEGIN SOLUTION Return a whole number that divides n.
    return min((k for k in range(1, n + 1) if n % k == 0), key=lambda k: n / k + c * k)
    ### END SOLUTION


# %%
check.best_interval(best_interval)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# n is small. You need no calculus: try.
#
# </details>
# <details><summary>Hint 2: which to try</summary>
#
# All k from 1 to n with `n % k == 0`. For each, work out n/k + c·k.
#
# </details>
# <details><summary>Hint 3: almost there</summary>
#
# `min(candidates, key=...)` returns the first of several equally good ones. So let the candidates come in rising order.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# The minimum of n/k + c·k lies at √(n/c), and √n is right for c = 1 alone. Rounding √(n/c) to the next divisor often
# works, and sometimes not, as the sum is not symmetric around its minimum.

# %% tags=["solution"]
for c in (1, 5, 17):
    print(f"48 nodes, c = {c:2d}: k = {best_interval(48, c)}; √(48/c) = {(48 / c) ** 0.5:.1f}")

# %% [markdown]
# ## 3 · In groups
# **Difficulty** ●●●○○ · **15 minutes** · **Trains** using `checkpoint`, and not falling into its trap
#
# Run `x` through a list of blocks, with one checkpoint for every k of them: `checkpoint(function, x,
# use_reentrant=False)` runs `function(x)` and keeps its input alone. If k does not divide the number of blocks, the
# last group is smaller. The blocks may contain dropout: gradients have to be those of a network that keeps everything.
# Leave the list as it was. Return the output of the last block.


# %%
def in_groups(blocks, x, k):
    """x through all blocks in turn, keeping the input of every k-th block alone."""

    ### BEGIN SOLUTION Return the output of the last block.
    def run(group, x):
        for block in group:
            x = block(x)
        return x

    for first in range(0, len(blocks), k):
        x = checkpoint(run, blocks[first : first + k], x, use_reentrant=False)
    return x
    ### END SOLUTION


# %%
check.in_groups(in_groups)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# `blocks[first : first + k]` is a group, and for the last group Python's slices just stop at the end.
#
# </details>
# <details><summary>Hint 2: one function for a group</summary>
#
# Write a function that runs x through one group, and hand it to `checkpoint`. It takes further arguments too:
# `checkpoint(run, group, x, use_reentrant=False)` calls `run(group, x)`.
#
# </details>
# <details><summary>Hint 3: the trap</summary>
#
# The function runs again in backward, long after your loop has ended. If it looks up `group` or `first` from the loop,
# it finds the *last* one by then. Pass the group as an argument instead.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# A closure looks its variables up when it runs, and a checkpointed function runs twice, the second time after the loop.
# Sometimes PyTorch notices that the second run saved other tensors than the first; if the shapes agree, nobody
# notices, and the gradients are wrong. Pass what changes as an argument.

# %% [markdown]
# ## 4 · Percent of a step
# **Difficulty** ●●●○○ · **12 minutes** · **Trains** deriving an overhead instead of quoting it
#
# A GPT of L blocks, width h, vocabulary V runs sequences of s tokens. For each token, forward takes 24·h² + 4·s·h
# FLOPs in a block, of which 4·s·h are in the attention core, and 2·h·V in the head. Backward takes twice forward's.
#
# By how many **percent** does the arithmetic of the whole step (forward and backward) rise when backward runs every
# block again (`full`)? And when it runs the attention cores again, both products (`core`)?


# %%
def added(s: int, h: int, L: int, V: int) -> dict[str, float]:
    """Percent by which `full` recomputation of all blocks, and of their attention `core`, raise a step's FLOPs."""
    ### BEGIN SOLUTION Return a dictionary with the keys full and core, in percent.
    blocks, core, head = L * (24 * h * h + 4 * s * h), L * 4 * s * h, 2 * h * V
    step = 3 * (blocks + head)
    return {"full": 100 * blocks / step, "core": 100 * core / step}
    ### END SOLUTION


# %%
check.added(added)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# All terms are for one token, so s·b cancels. First write down forward's FLOPs for L blocks and one head.
#
# </details>
# <details><summary>Hint 2: the step</summary>
#
# The step is forward and backward: three times forward's FLOPs. That is what you divide by.
#
# </details>
# <details><summary>Hint 3: almost there</summary>
#
# What runs again is *one forward* of the blocks, or of the cores, without the head. Divide, and multiply by 100.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# Recomputation is forward alone, so it counts once against a step of three. Korthikanti et al.'s eq. 8 counts the core
# three times, which is how 2.7 % came to be.

# %% tags=["solution"]
for name, sizes in {"GPT-2": (1024, 768, 12, 50257), "GPT-3": (2048, 12288, 96, 50257)}.items():
    percent = added(*sizes)
    print(f"{name}: full {percent['full']:.1f} %, core {percent['core']:.2f} %")

# %% [markdown]
# ## 5 · The cheapest that fits
# **Difficulty** ●●●○○ · **13 minutes** · **Trains** choosing a policy as an expert does
#
# You have a run and a card. Among `POLICIES`, which raises the arithmetic least among those whose estimated peak fits
# the card? If several cost the same, take the one with the lowest peak. If none fits, return `None`.
# `check.added_percent(run)` is what a run's policy adds, in percent. A peak fits if it is at most `gpu(card).memory`.
# (`gpu(card).usable` is the part of it that a program is told there is; here both lead to the same choice.)

# %%
POLICIES = check.POLICIES
print(POLICIES)
run = TrainingRun("gpt2-xl", 8, 1024, "bf16-master", attention="eager", recompute="selective-attention")
print(f"{check.added_percent(run):.2f} %, {format_bytes(estimate(run).total, 'GB', 1)}")
print(format_bytes(gpu("A100-40GB").memory, "GB", 1))


# %%
def cheapest(run: TrainingRun, card: str) -> str | None:
    """The policy of POLICIES that fits the card and adds the least arithmetic, then the least memory; else None."""
    ### BEGIN SOLUTION Return one of POLICIES, or None.
    found = []
    for policy in POLICIES:
        candidate = run.replace(recompute=policy)
        peak = estimate(candidate).total
        if peak <= gpu(card).memory:
            found.append((check.added_percent(candidate), peak, policy))
    return min(found)[2] if found else None
    ### END SOLUTION


# %%
check.cheapest(cheapest)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# `run.replace(recompute=policy)` for each policy; `estimate(...).total` and `gpu(card).memory` are both bytes.
#
# </details>
# <details><summary>Hint 2: two wishes, one after the other</summary>
#
# Collect those that fit as tuples (percent, peak, policy). Tuples are compared by their first items, and by the next
# where those are equal.
#
# </details>
# <details><summary>Hint 3: almost there</summary>
#
# `min(found)` is the tuple you want. And with an empty list, `min` raises an error: look first.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# The order matters: recompute only as much as you must. With memory to spare, the policy with the lowest peak wastes
# time; and among the policies that run all blocks again, the work is the same, so memory decides.

# %% tags=["solution"]
for card in ("H200-141GB", "A100-80GB", "A100-40GB", "V100-32GB", "T4-16GB"):
    print(f"{card:12s} {cheapest(run.replace(micro_batch=8), card)}")

# %% [markdown]
# ## 6 · Count the teeth
# **Difficulty** ●●●●● · **18 minutes** · **Trains** reading a policy off a run's memory alone
#
# Someone sends you two steps of GPT-2 (12 blocks): its memory over time, and nothing else. Were blocks recomputed? Each
# stretch of blocks that runs again leaves a tooth in backward: activations climb while it runs, and fall while its own
# backward uses them. Count the teeth in backward of the *last* step. Return 0 if nothing was recomputed; a run with
# `"full"` has 12 teeth, one with `"every-3"` has 4.
#
# - `measurement.timeline.curves()["activations"]` is a list: the bytes of activations after each event, an event being
#   one tensor that comes or goes.
# - `measurement.timeline.marks` is a list, one mark for each phase: `mark.step` (1 or 2), `mark.phase` ("forward",
#   "loss", "backward", "optimizer", "zero_grad"), and `mark.event`, the number of events before it begins. So the list
#   from one mark's event to the next one's is one phase.
#
# Here is one of the runs.

# %%
timeline(check.example(), "A timeline with a secret", steps=[2])


# %%
def stretches(measurement) -> int:
    """Teeth in backward of the last step: how many stretches of blocks ran again; 0 if nothing was recomputed."""
    ### BEGIN SOLUTION Return a whole number from 0 to 12.
    marks = {mark.phase: mark.event for mark in measurement.timeline.marks}
    curve = measurement.timeline.curves()["activations"][marks["backward"] : marks["optimizer"]]
    rises, lowest, highest = [], curve[0], curve[0]
    for value in curve:
        if value < highest - (highest - lowest) / 2 and highest > lowest:
            rises.append(highest - lowest)
            lowest = highest = value
        if value < lowest:
            lowest = highest = value
        highest = max(highest, value)
    largest = max(rises, default=0)
    return sum(rise > largest / 2 for rise in rises) if largest > curve[0] / 100 else 0
    ### END SOLUTION


# %%
check.stretches(stretches)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# Without recomputation, activations only fall in backward. Each stretch that runs again makes them rise.
#
# </details>
# <details><summary>Hint 2: what is a tooth?</summary>
#
# A climb from a valley to a summit, with small steps back on the way. Cut the curve to backward first: marks of the
# last step come last, so a dictionary from phase to event keeps those.
#
# </details>
# <details><summary>Hint 3: almost there</summary>
#
# Remember the lowest point since the last summit, and the highest since that. When the curve has fallen by half of
# its climb, a tooth is over: note the climb, begin anew. In the end count the climbs that are at least half as high as
# the highest, as a small tensor may come and go.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# One tooth for each stretch: its activations come all at once when it runs again, then go one after the other. The
# height of a tooth says how long the stretch is, the floor under it how many checkpoints there are: fewer and higher
# teeth stand on a lower floor.

# %% [markdown]
# ## 7 · Two secrets
# **Difficulty** ●●●●○ · **15 minutes** · **Trains** inferring batch and policy from one curve
#
# `check.mystery(seed)` simulates a run of a small GPT (6 blocks) that is like `check.KNOWN`, but for its micro-batch
# and its policy, which is one of `check.SECRET_POLICIES`. All that you get is the timeline of its *activations*. Here
# are two of these runs. Their forward passes keep nearly the same. Which of the two trains more sequences at a time?

# %%
print(check.KNOWN, check.SECRET_POLICIES)
timeline(check.mystery(2), "Mystery 2: the activations of one step", unit="MB", steps=[2])

# %%
timeline(check.mystery(3), "Mystery 3: the activations of one step", unit="MB", steps=[2])

# %% [markdown]
# Find out both secrets, for these and for every other seed. `activation_bytes(run)` is what forward keeps of a run by
# the formulas, and `stretches` from exercise 6 will help.

# %%
from course_utils.estimating.exact.activations import activation_bytes


def infer(measurement) -> dict:
    """The micro_batch and the recompute of the run, from the timeline of its activations."""
    ### BEGIN SOLUTION Return a dictionary with the keys micro_batch and recompute.
    teeth = stretches(measurement)
    policy = {0: "none", 6: "full", 3: "every-2", 2: "every-3"}[teeth]
    marks = {mark.phase: mark.event for mark in measurement.timeline.marks}  # the last step's remain
    kept = measurement.timeline.curves()["activations"][marks["loss"] - 1]  # element k: after k + 1 events
    one_sequence = activation_bytes(check.KNOWN.replace(recompute=policy))
    return {"micro_batch": round(kept / one_sequence), "recompute": policy}
    ### END SOLUTION


# %%
check.infer(infer)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# The policy first: it shows in the shape, whatever the size. How many stretches has a model of 6 blocks under each?
#
# </details>
# <details><summary>Hint 2: then the batch</summary>
#
# What forward keeps is proportional to the micro-batch. `check.KNOWN.replace(recompute=policy)` has a micro-batch of 1.
#
# </details>
# <details><summary>Hint 3: almost there</summary>
#
# Read the curve where the last forward ends: at the mark of the last `loss`, before the loss adds its own tensors.
# Divide by what one sequence keeps under that policy, and round to the nearest whole number.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# The height of a curve is batch times policy, so no height alone tells either. The shape has no unit: it tells the
# policy, and with the policy the height tells the batch.

# %% tags=["solution"]
for seed in range(1, 7):
    print(seed, infer(check.mystery(seed)))
