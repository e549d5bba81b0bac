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
# # Exercises 14 · Will it fit?
#
# **70 minutes** for all five; each one says its own. You should know what [lesson
# 14](../notebooks/14_will_it_fit.ipynb) shows. No GPU is needed.
#
# Each exercise asks for one function. Write it, run the cell, then run the check below it. A check tells you what is
# off, never what the answer is. Stuck? Every exercise has three hints; open one at a time. (“Run All Cells” stops at
# the first check that is unsolved.)

# %%
from course_utils import TrainingRun, estimate, fit, format_bytes, gpu
from course_utils.lessons.plans import checks as check
from course_utils.planning.twin import SAFETY

# %% [markdown]
# ## 1 · Choose
# **Difficulty** ●○○○○ · **8 minutes** · **Trains** what a search is looking for
#
# You get configurations, each a pair of bytes at the estimated peak and seconds that a step loses, and `room`, the
# bytes that a program gets on the card. Return the index of the one to take: it must fit with 5 % in reserve and lose
# the least. Of two that lose the same take the smaller. If nothing fits, return `None`.


# %%
def choose(configurations: list[tuple[int, float]], room: int) -> int | None:
    """The index of the configuration that fits `room` with 5 % in reserve and loses least; None if none fits."""
    ### BEGIN SOLUTION Return an index, or None.
    fitting = [index for index, (peak, _) in enumerate(configurations) if peak * 1.05 <= room]
    return min(fitting, key=lambda index: configurations[index][::-1], default=None)
    ### END SOLUTION


# %%
check.choose(choose)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# Two steps: first leave out what does not fit, then compare what is left.
#
# </details>
# <details><summary>Hint 2: the reserve</summary>
#
# 1.05 times the *estimate* has to be within the room.
#
# </details>
# <details><summary>Hint 3: almost there</summary>
#
# `min(..., key=..., default=None)` over the indices that fit. As a key, (lost, peak) settles both the time and the tie.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# Memory is a limit, not a price: below the line more free bytes earn nothing. Hence "the lowest peak" is the wrong
# goal, and so is "the fullest card".

# %% [markdown]
# ## 2 · Split the batch
# **Difficulty** ●●○○○ · **10 minutes** · **Trains** accumulation as the first resort
#
# A step learns from `batch` sequences. `fixed` GB are there whatever the micro-batch, and each sequence in it takes
# `each` GB more; the card has `room` GB. Return the largest micro-batch that divides the batch and fits with 5 % in
# reserve, and how many of them make a step: `(size, count)`. `None` if not even one sequence fits.


# %%
def split(batch: int, fixed: float, each: float, room: float) -> tuple[int, int] | None:
    """(sequences in a micro-batch, micro-batches), the largest that fits; None if one sequence is too much."""
    ### BEGIN SOLUTION Return (size, count), or None.
    for size in range(batch, 0, -1):
        if batch % size == 0 and (fixed + each * size) * 1.05 <= room:
            return size, batch // size
    return None
    ### END SOLUTION


# %%
check.split(split)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# Only divisors of the batch keep it whole. Go through them from the largest down.
#
# </details>
# <details><summary>Hint 2: the memory of one size</summary>
#
# `fixed + each * size`, and the reserve is on all of it.
#
# </details>
# <details><summary>Hint 3: almost there</summary>
#
# `for size in range(batch, 0, -1):` and `batch % size == 0`. The first that fits is the largest; after the loop nothing
# has.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# As memory grows with the micro-batch and lost time shrinks with it, the best size is the largest that fits. `fit` uses
# just that, and finds it by bisection.

# %% tags=["solution"]
xl = TrainingRun("gpt2-xl", 1, 1024, recompute="full", optimizer="adamw-fused", accumulation_steps=32)
one, two = estimate(xl).total, estimate(xl.replace(micro_batch=2, accumulation_steps=16)).total
each, room = (two - one) / 1e9, gpu("RTX5090-32GB").room / 1e9
print(f"GPT-2 XL, everything recomputed: {split(32, one / 1e9 - each, each, room)}")

# %% [markdown]
# ## 3 · Train GPT-2 large on a T4
# **Difficulty** ●●●○○ · **15 minutes** · **Trains** finding a plan without `fit`
#
# `gpt2-large`, 32 sequences of 1,024 tokens a step, all weights, AdamW, autocast, on one T4. Return a `TrainingRun`
# that fits it with the reserve and loses at most 10 % more time than the best plan. The course's `estimate` is your
# instrument; leave `fit` aside this once.

# %%
card = gpu("T4-16GB")
print(f"room with the reserve: {format_bytes(round(card.room / SAFETY), 'GB', 2)}; bf16: {card.has_bf16}")
start = TrainingRun("gpt2-large", 32, 1024, "amp-fp16", attention="efficient")
print(f"all at once: {format_bytes(estimate(start).total, 'GB', 1)}")


# %%
def on_a_t4() -> TrainingRun:
    """GPT-2 large, 32 sequences a step, on a T4."""
    ### BEGIN SOLUTION Return a TrainingRun.
    changes = {"micro_batch": 4, "accumulation_steps": 8, "recompute": "every-2", "loss_chunks": 8}
    return start.replace(optimizer="adamw-fused", **changes)
    ### END SOLUTION


# %%
check.on_a_t4(on_a_t4)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# `start.replace(...)`, and print `estimate(...).total` for each idea. First what costs no time: `optimizer`,
# `loss_chunks`. Then smaller micro-batches, with `accumulation_steps` so that the product stays 32.
#
# </details>
# <details><summary>Hint 2: it is still too much</summary>
#
# 16 bytes a parameter are 12.4 of the 14.9 GB. What is left holds little, so blocks have to be recomputed. Try `full`
# and `every-2`.
#
# </details>
# <details><summary>Hint 3: almost there</summary>
#
# With recomputation of blocks more than one sequence fits at a time, and every micro-batch reads all weights again:
# take as many sequences as fit.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# On this card bandwidth is short, so the micro-batch should be large; recomputation of whole blocks makes it so.

# %% tags=["solution"]
print(fit("gpt2-large", "T4-16GB", global_batch=32))

# %% [markdown]
# ## 4 · Predict the peak
# **Difficulty** ●●●●○ · **20 minutes** · **Trains** an estimate on one line of paper
#
# A GPT under bf16 autocast with a flash kernel, full recomputation, the fused update, gradients added up over
# micro-batches. Return the bytes at the peak from its letters alone, to within 5 %. The check asks for runs from GPT-2
# with large batches to GPT-2 XL with small ones, and they do not all peak at the same moment.


# %%
def predicted_peak(N: int, L: int, h: int, a: int, V: int, s: int, b: int) -> float:
    """Bytes at the peak of a step: the fullest of its moments."""
    ### BEGIN SOLUTION Return bytes.
    always = 16 * N + 4 * s * b * h * L + 6 * s * b * h
    loss = always + 2 * (h * V + 12 * L * h * h) + 8 * s * b * V
    backward = always + 2 * h * V + 10 * s * b * V
    return max(loss, backward)
    ### END SOLUTION


# %%
check.predicted_peak(predicted_peak)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# What is there from the second micro-batch on, whatever happens: weights, gradients, two moments, all fp32. Then the
# checkpoints: one s·b·h for each block, and under autocast the residual stream is fp32.
#
# </details>
# <details><summary>Hint 2: two moments</summary>
#
# When the loss is computed, autocast's 16-bit copies of *all* matrices are still there. When its backward begins, the
# region has ended and those of the blocks are gone, but the head's is in use.
#
# </details>
# <details><summary>Hint 3: almost there</summary>
#
# Tensors of s·b·V numbers take 8 bytes a number at the loss, of which 6 stay for backward, and 10 in its backward,
# where the gradient takes 4. Return the larger of the two moments. The block that runs again is smaller here than
# either.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# Two candidates, one maximum. Adding them up is the commonest mistake of calculators ([lesson
# 13](../notebooks/13_who_is_right.ipynb)), and it is not even far off here: 2 bytes for each number in a matrix.

# %% tags=["solution"]
of = {"N": xl.model.parameters, "L": 48, "h": 1600, "a": 25, "V": 50257, "s": 1024}
for b in (1, 4, 32):
    real = estimate(xl.replace(micro_batch=b)).total
    error = predicted_peak(**of, b=b) / real - 1
    print(f"GPT-2 XL, b = {b:2d}: {format_bytes(real, 'GB', 1)}, predicted to within 1 %: {abs(error) < 0.01}")

# %% [markdown]
# ## 5 · Diagnose
# **Difficulty** ●●●●○ · **17 minutes** · **Trains** reading an out-of-memory error
#
# Turn the detective into a function. It gets the evidence of a run that is out of memory and returns the name of the
# cause. The check has fourteen such runs, on cards of other sizes than the lesson's.

# %%
for name, words in check.CAUSES.items():
    print(f"{name:14s} {words}")
print("\nThe evidence of one such run:")
for name, value in vars(check.example()).items():
    print(f"{name:13s} {dict(value) if name == 'alive' else value}")


# %%
def diagnose(seen) -> str:
    """The cause, one of check.CAUSES, of which the run with this evidence died."""
    ### BEGIN SOLUTION Return one of the names printed above.
    starts, tokens = seen.step_starts, seen.micro_batch * seen.seq_len
    if len(starts) > 3 and starts[-1] > starts[-2] > starts[-3]:
        return "graphs"
    if seen.free > seen.requested and seen.free_share > 0.2:
        return "fragmentation"
    if seen.phase == "optimizer":
        return "update" if seen.alive["optimizer_states"] >= 8 * seen.parameters else "states"
    if seen.vocab and seen.requested // (tokens * seen.vocab) in (2, 4):
        return "loss"
    if seen.heads and seen.requested % (seen.heads * tokens * seen.seq_len) == 0:
        return "attention"
    return "activations"
    ### END SOLUTION


# %%
check.diagnose(diagnose)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# One `if` for each clue of the lesson's table. Begin with those that cannot be confused: steps that each begin with
# more than the one before, and much free memory that did not help.
#
# </details>
# <details><summary>Hint 2: sizes</summary>
#
# `seen.requested` as a multiple of `micro_batch · seq_len · vocab` (2 or 4 bytes a number, and the allocator rounds
# up a little), and of `micro_batch · heads · seq_len²`. For a program without heads and words both products are 0:
# mind the division.
#
# </details>
# <details><summary>Hint 3: almost there</summary>
#
# In `phase == "optimizer"` the states are complete with 8 bytes a parameter: what fails after that are copies of the
# update. Free memory counts as fragmented if it is more than the request *and* more than a fifth of the card. The order
# of the questions matters: a leak fails anywhere.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# The last request is only the straw. What grew before it decides: over steps, over a forward, in an update. A message
# has the request and the free bytes, a timeline has the rest; so record one before you need it.
