# ---
# jupyter:
#   course:
#     minutes: 65
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Exercises 11 · Model and pipeline parallelism
#
# **65 minutes** for all five; each one says its own. You should know what [lesson
# 11](../notebooks/11_model_and_pipeline_parallelism.ipynb) shows. No GPU is needed.
#
# Each exercise asks for one function. Write it, run the cell, then run the check below it. A check tells you what is
# off, never what the answer is. Stuck? Every exercise has three hints; open one at a time. (“Run All Cells” stops at
# the first check that is unsolved.)

# %%
from itertools import pairwise

from course_utils import TrainingRun, format_bytes
from course_utils.lessons.pipelines import checks as check
from course_utils.lessons.pipelines.figures import pipeline_figure
from course_utils.lessons.pipelines.schedules import simulate

# %% [markdown]
# ## 1 · Enough micro-batches
# **Difficulty** ●○○○○ · **8 minutes** · **Trains** the bubble, turned round
#
# A pipeline of p equal stages waits (p − 1)/(m + p − 1) of the time. Return the smallest number of micro-batches m for
# which that is at most `idle`, a part of 1.


# %%
def enough(p: int, idle: float) -> int:
    """The fewest micro-batches with which p stages wait at most the part `idle` of the time."""
    ### BEGIN SOLUTION Return a whole number of at least 1.
    m = 1
    while (p - 1) / (m + p - 1) > idle:
        m += 1
    return m
    ### END SOLUTION


# %%
check.enough(enough)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# More micro-batches, less waiting. You can simply try m = 1, 2, 3, …
#
# </details>
# <details><summary>Hint 2: when to stop</summary>
#
# At the first m whose bubble is *at most* `idle`: equal is good enough.
#
# </details>
# <details><summary>Hint 3: almost there</summary>
#
# Start with `m = 1`, and `while` the bubble is larger than `idle`, add 1. If you solve for m instead, round up, and
# mind that m is at least 1.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# Solved for m: m ≥ (p − 1)·(1/idle − 1). Halving the bubble takes about twice the micro-batches. Each is then half as
# large if the batch is to stay the same, and small matrices use a GPU badly: that is what limits m in the end.

# %% tags=["solution"]
for idle in (0.5, 0.2, 0.1, 0.05):
    print(f"8 stages, at most {idle:.0%} idle: {enough(8, idle)} micro-batches")

# %% [markdown]
# ## 2 · What each stage keeps
# **Difficulty** ●●○○○ · **10 minutes** · **Trains** the memory of a schedule
#
# p stages counted from 0, m micro-batches. Return a dictionary with `GPipe` and `1F1B`: how many micro-batches'
# activations does stage `stage` keep at its fullest moment? m may be smaller than p.


# %%
def kept(p: int, m: int, stage: int) -> dict[str, int]:
    """Micro-batches whose activations `stage` (from 0) of p keeps at most, for each of the two schedules."""
    ### BEGIN SOLUTION Return a dictionary with the keys GPipe and 1F1B.
    return {"GPipe": m, "1F1B": min(m, p - stage)}
    ### END SOLUTION


# %%
check.kept(kept)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# Draw it: `pipeline_figure(simulate("1F1B", 4, 8))`. Count in the row of a stage how many forwards stand before the
# first backward.
#
# </details>
# <details><summary>Hint 2: the last stage</summary>
#
# Under 1F1B the last stage takes a micro-batch backward right after its forward. How many does it keep? And the one
# before it?
#
# </details>
# <details><summary>Hint 3: almost there</summary>
#
# From stage to the end there are p − stage stages, itself included. And nobody keeps more micro-batches than there are.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# A micro-batch is kept from its forward to its backward. Under 1F1B, p − stage forwards fit before the first one is
# back; from then on one goes in for each that comes out. So m is free: choose it for the bubble, not for memory.

# %% tags=["solution"]
pipeline_figure(simulate("1F1B", 4, 8))

# %% [markdown]
# ## 3 · Write 1F1B
# **Difficulty** ●●●○○ · **15 minutes** · **Trains** a schedule as a program
#
# Return what one stage does under 1F1B, in order, as a list of words: `["F0", "F1", "B0", …]`. First the stage goes
# forward until it keeps as many micro-batches as it may (exercise 2). Then it alternates, one backward, one forward,
# until all forwards are done. What is left are backwards.


# %%
def order(p: int, m: int, stage: int) -> list[str]:
    """The works of one stage (from 0) of p under 1F1B with m micro-batches, in order: F0 forward, B0 backward, …"""
    ### BEGIN SOLUTION Return a list of 2·m words.
    ahead = min(m, p - stage)
    works = [f"F{micro}" for micro in range(ahead)]
    for micro in range(m):
        works.append(f"B{micro}")
        if micro + ahead < m:
            works.append(f"F{micro + ahead}")
    return works
    ### END SOLUTION


# %%
check.order(order)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# `ahead = min(m, p - stage)` forwards come first: F0 to F(ahead − 1).
#
# </details>
# <details><summary>Hint 2: the steady state</summary>
#
# Now a loop over all backwards, B0 to B(m − 1). After each comes one forward, the next that has not been done.
#
# </details>
# <details><summary>Hint 3: almost there</summary>
#
# After B0 comes F(ahead), after B1 F(ahead + 1), and so on, as long as that number is below m.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# Nothing in this list says *when*. A stage just does its works in this order, as soon as their inputs are there. That
# is all that PyTorch's `Schedule1F1B` does, too. Your lists are what the lesson's `one_stage` takes: try them there.

# %% tags=["solution"]
for stage in range(4):
    print(f"stage {stage}: {' '.join(order(4, 6, stage))}")

# %% [markdown]
# ## 4 · Cut by time
# **Difficulty** ●●●●○ · **18 minutes** · **Trains** balancing stages
#
# All stages wait for the slowest. `times` says how long each layer takes; cut the list into p stretches, each of at
# least one layer, so that the slowest stretch is as quick as it can be. Return how many layers each stage gets, from
# first to last. Several answers may be equally good.


# %%
def cut(times: list[float], p: int) -> list[int]:
    """Numbers of layers of p stages in a row, whose slowest stage is as quick as possible."""
    ### BEGIN SOLUTION Return a list of p whole numbers that add up to len(times).
    best: dict[tuple[int, int], tuple[float, list[int]]] = {}
    for first in range(len(times), -1, -1):
        for stages in range(1, p + 1):
            if stages == 1:
                best[first, 1] = (sum(times[first:]), [len(times) - first])
                continue
            options = []
            for end in range(first + 1, len(times) - stages + 2):
                rest, counts = best[end, stages - 1]
                options.append((max(sum(times[first:end]), rest), [end - first, *counts]))
            if options:
                best[first, stages] = min(options)
    return best[0, p][1]
    ### END SOLUTION


# %%
check.cut(cut)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# The lists are short. You may try every way to cut: `itertools.combinations(range(1, len(times)), p - 1)` gives all
# places for p − 1 cuts.
#
# </details>
# <details><summary>Hint 2: how good is a cut?</summary>
#
# As good as its slowest stage: the largest of the sums of the stretches. The smallest such largest sum wins.
#
# </details>
# <details><summary>Hint 3: almost there</summary>
#
# With `edges = (0, *cuts, len(times))` the stretches are `times[a:b]` for neighbors a, b of `edges`, and the numbers
# of layers are b − a.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# Equal numbers of layers are not equal times: the head of a small model costs as much as several blocks. PipeDream
# measures each layer and cuts by such a search (Narayanan et al. 2019, section 3.1). Memory has a say, too: stages
# that keep more micro-batches should get less.

# %% tags=["solution"]
times = [1.0] * 12 + [3.2]  # twelve blocks and a head
for counts in ([4, 3, 3, 3], cut(times, 4)):
    edges = [sum(counts[:stage]) for stage in range(5)]
    slowest = max(sum(times[a:b]) for a, b in pairwise(edges))
    print(f"{counts}: the slowest stage takes {slowest:.1f}, the mean is {sum(times) / 4:.2f}")

# %% [markdown]
# ## 5 · The deepest that fits
# **Difficulty** ●●●○○ · **14 minutes** · **Trains** choosing p and m for a card
#
# A run, a card's bytes, and a batch of `sequences` that is cut into micro-batches of `run.micro_batch`. Which is the
# *smallest* number of stages, out of 1, 2, 4, 8 and 16, with which every stage fits under 1F1B? Fewer stages wait
# less. Return `None` if none does.
#
# `check.stage_memory(run, "1F1B", p, m, stage)` is a stage's breakdown, `.total` its bytes.

# %%
run = TrainingRun("gpt2-xl", micro_batch=2, seq_len=1024, precision="bf16-master")
for stage in range(4):
    print(f"stage {stage} of 4: {format_bytes(check.stage_memory(run, '1F1B', 4, 16, stage).total, 'GB', 1)}")


# %%
def fewest_stages(run: TrainingRun, sequences: int, room: int) -> int | None:
    """The smallest of 1, 2, 4, 8, 16 stages of which each needs at most `room` bytes under 1F1B; else None."""
    ### BEGIN SOLUTION Return 1, 2, 4, 8, 16 or None.
    m = sequences // run.micro_batch
    for p in (1, 2, 4, 8, 16):
        if all(check.stage_memory(run, "1F1B", p, m, stage).total <= room for stage in range(p)):
            return p
    return None
    ### END SOLUTION


# %%
check.fewest_stages(fewest_stages)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# How many micro-batches are there? `sequences // run.micro_batch`.
#
# </details>
# <details><summary>Hint 2: every stage</summary>
#
# The first stage keeps the most micro-batches, the last one has the head and the loss. Either may be the fullest: look
# at all of them.
#
# </details>
# <details><summary>Hint 3: almost there</summary>
#
# Go through 1, 2, 4, 8, 16 in this order, and return the first p for which `all(... for stage in range(p))`. After the
# loop: `None`.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# With twice the stages a stage has half of the states, but the first one keeps twice as many micro-batches of half the
# layers: its activations do not shrink at all. Deeper pipelines cut states; activations are cut by smaller
# micro-batches, recomputation, or tensor parallelism.

# %% tags=["solution"]
for p in (1, 2, 4, 8, 16):
    first = check.stage_memory(run, "1F1B", p, 16, 0)
    states = first.total - first["activations"]
    print(f"p = {p:2d}: first stage's states {format_bytes(states, 'GB', 1)}, "
          f"activations {format_bytes(first['activations'], 'GB', 1)}")  # fmt: skip
