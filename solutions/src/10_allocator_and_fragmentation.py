# ---
# jupyter:
#   course:
#     minutes: 80
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Exercises 10 · Allocator and fragmentation
#
# **80 minutes** for all seven; each one says its own. You should know what [lesson
# 10](../notebooks/10_allocator_and_fragmentation.ipynb) shows. No GPU is needed.
#
# Each exercise asks for one function. Write it, run the cell, then run the check below it. A check tells you what is
# off, never what the answer is. Stuck? Every exercise has three hints; open one at a time. (“Run All Cells” stops at
# the first check that is unsolved.)

# %%
import torch

from course_utils import format_bytes, replay
from course_utils.lessons.allocator import checks as check
from course_utils.lessons.allocator.figures import segments_figure
from course_utils.lessons.allocator.traces import curves
from course_utils.figures import lines

KiB, MiB = 2**10, 2**20

# %% [markdown]
# ## 1 · From request to segment
# **Difficulty** ●●○○○ · **10 minutes** · **Trains** the allocator's sizes
#
# A fresh process makes its first tensor, of `size` bytes, with standard settings. Return a dictionary of two numbers of
# bytes. `segment` is what the driver gives, by which *reserved* grows. `block` is the block that holds the tensor, by
# which *allocated* grows: the rounded request, and whatever the allocator does not split off.


# %%
def handed_out(size: int) -> dict[str, int]:
    """Bytes of the block and of the segment for a first request of `size` bytes."""
    ### BEGIN SOLUTION Return a dictionary with the keys block and segment.
    rounded = -(-size // 512) * 512
    if rounded <= MiB:
        return {"block": rounded, "segment": 2 * MiB}  # the small pool splits always
    segment = 20 * MiB if rounded < 10 * MiB else -(-rounded // (2 * MiB)) * 2 * MiB
    return {"block": rounded if segment - rounded > MiB else segment, "segment": segment}
    ### END SOLUTION


# %%
check.handed_out(handed_out)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# First round the request up to a multiple of 512. From then on forget the request: everything depends on what it was
# rounded to. Then find the segment, and last the block.
#
# </details>
# <details><summary>Hint 2: three cases</summary>
#
# Up to 1 MiB; more than that, under 10 MiB; all others. The lesson's table of rules has what each asks the driver for.
# Does a rest stay that is not split off? The row *split* says when.
#
# </details>
# <details><summary>Hint 3: almost there</summary>
#
# Rounding up to a multiple of m is `-(-size // m) * m`. The third case rounds up to 2 MiB. Mind the limits: exactly
# 1 MiB is still small, exactly 10 MiB is already large. And try 11 MiB: how large is the rest of its segment?
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# Small and middling blocks share segments, so that the driver is asked rarely. Large ones would leave too much of a
# shared segment unused, so each gets its own. A rest that is not split off is why `memory_allocated()` can say more
# than your tensors have.

# %% tags=["solution"]
for size in (4, 700 * KiB, 4 * MiB, 11 * MiB, 786 * MiB + 1):
    print({name: format_bytes(value, "KiB", 1) for name, value in handed_out(size).items()})

# %% [markdown]
# ## 2 · A norm without a buffer
# **Difficulty** ●●○○○ · **12 minutes** · **Trains** doing without 4·N bytes
#
# Gradients come in 16 bits. Return the norm of all of them together, as one number or tensor, computed in fp32. At no
# moment may more than about one gradient's fp32 copy be there, however many gradients there are.


# %%
def lean_norm(gradients: list[torch.Tensor]) -> torch.Tensor:
    """The norm of all gradients together, in fp32, with at most about one of them in fp32 at a time."""
    ### BEGIN SOLUTION Return the norm, in fp32.
    return torch.stack([gradient.float().norm() for gradient in gradients]).norm()
    ### END SOLUTION


# %%
check.lean_norm(lean_norm)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# The norm of all is the root of the sum of all squares. A sum can be taken in parts.
#
# </details>
# <details><summary>Hint 2: one at a time</summary>
#
# `gradient.float()` makes the fp32 copy. It goes as soon as nothing refers to it, so don't put it into a list.
#
# </details>
# <details><summary>Hint 3: almost there</summary>
#
# What you keep of each gradient is a single number. How does the lesson's line with `torch.stack` put such numbers
# together?
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# `torch.cat([g.float().flatten() …])` is the flat buffer, and makes all the fp32 copies first: 8·N bytes at once. In
# 16 bits instead, squares overflow (fp16) or the sum has three digits (bf16).

# %% [markdown]
# ## 3 · A report that does not move
# **Difficulty** ●●●○○ · **10 minutes** · **Trains** reading the right counter
#
# A colleague has trained a small GPT with batches of 32, 16, 8 and 4, one after the other in one process, and reports:
# "memory does not depend on the batch size". Here is the report, and what the allocator really did.

# %%
process = check.process()
print({batch: format_bytes(size, "MB", 1) for batch, size in check.planted_report().items()})
print(process.spans)
title = "Four trainings in one process: each peak is lower than the last, and reserved stays where it was"
lines(curves(process.replayed), title, "allocations and frees so far", "GB", markers=False,
      provenance=process.replayed.provenance)  # fmt: skip

# %% [markdown]
# Each span says from which event to which a training went: `process.replayed.allocated[first:last]` are the bytes
# allocated after each of its events, and `process.replayed.reserved` those reserved. Write the report anew: for each
# label in `process.spans` the peak of its own training, in bytes. The check has a second process for your function.


# %%
def peaks(process) -> dict[str, int]:
    """For each label in `process.spans` the most bytes that were allocated at once during its training."""
    ### BEGIN SOLUTION Return a dictionary from label to bytes.
    return {label: max(process.replayed.allocated[first:last]) for label, (first, last) in process.spans.items()}
    ### END SOLUTION


# %%
check.peaks(peaks)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# Which curve knows when a tensor is freed, and which one keeps what it has?
#
# </details>
# <details><summary>Hint 2: one training</summary>
#
# `first, last = process.spans["16"]` are the limits of one. Cut the curve to them.
#
# </details>
# <details><summary>Hint 3: almost there</summary>
#
# `max(...)` of that piece. Then do it for every label of `process.spans.items()`.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# On a GPU: `torch.cuda.reset_peak_memory_stats()` before each training, `torch.cuda.max_memory_allocated()` after it.

# %% tags=["solution"]
print({batch: format_bytes(size, "MB", 1) for batch, size in peaks(process).items()})

# %% [markdown]
# ## 4 · Which counter was it?
# **Difficulty** ●●●○○ · **12 minutes** · **Trains** recognizing a wrong measurement
#
# Now name the counter that a report has read. You get a process and a report of it, a dictionary from label to bytes.
# Return one of `COUNTERS`.

# %%
COUNTERS = tuple(check.COUNTERS)
print(COUNTERS)


# %%
def culprit(process, report: dict[str, int]) -> str:
    """The one of COUNTERS that gives this report of this process."""
    ### BEGIN SOLUTION Return one of COUNTERS.
    allocated, reserved = process.replayed.allocated, process.replayed.reserved
    for label, (first, last) in process.spans.items():
        said = {
            "peak allocated": max(allocated[first:last]),
            "max_memory_allocated, never reset": max(allocated[:last]),
            "memory_allocated after the step": allocated[last - 1],
            "memory_reserved after the step": reserved[last - 1],
        }
        matching = [name for name in COUNTERS if said[name] == report[label]]
        if len(matching) == 1:
            return matching[0]
    return "peak allocated"
    ### END SOLUTION


# %%
check.culprit(culprit)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# Do what each counter does: compute all four reports, then see which one equals the given one.
#
# </details>
# <details><summary>Hint 2: each counter in terms of the curves</summary>
#
# A maximum that is never reset runs over `allocated[:last]`. A reading after the step is the curve's value at
# `last - 1`.
#
# </details>
# <details><summary>Hint 3: almost there</summary>
#
# For one label alone two counters can agree: after the first training, a maximum that was never reset *is* its peak.
# And where batches grow, it is so for every label. Compare labels until only one counter is left; where the two agree
# to the end, the report is right.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# Three wrong counters give a report that does not move, or hardly: a maximum never reset, with batches that fall;
# reserved memory, which never falls; and what is left after the step, which has no activations in it. The same code can
# give a right report when batches grow, and a wrong one when they fall.

# %% tags=["solution"]
print(culprit(process, check.planted_report()))

# %% [markdown]
# ## 5 · Out of memory with a third free
# **Difficulty** ●●●○○ · **12 minutes** · **Trains** knowing what fragments memory
#
# Build it. Return a list of events, (bytes, name) to allocate and (−bytes, name) to free, for a GPU of `capacity` bytes
# (at least 80 MiB, a multiple of 40 MiB). All must go well but the last one: that request must fail, while more than
# 30 % of the GPU is free, and more than it asks for.


# %%
def fragmented(capacity: int) -> list[tuple[int, str]]:
    """Events of which the last, a request, fails on a GPU of `capacity` bytes with more than 30 % free."""
    ### BEGIN SOLUTION Return a list of (bytes, name) pairs.
    size, count = 4 * MiB, capacity // (4 * MiB)
    made = [(size, f"t{index}") for index in range(count)]
    freed = [(-size, f"t{index}") for index in range(0, count, 2)]
    return [*made, *freed, (2 * size, "late")]
    ### END SOLUTION


# %%
check.fragmented(fragmented)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# Fill the GPU with tensors of one size, so that no segment has room for more.
#
# </details>
# <details><summary>Hint 2: holes</summary>
#
# Then free some of them, so that a tensor stays between any two holes. In segments of 20 MiB, tensors of 4 MiB fit
# exactly.
#
# </details>
# <details><summary>Hint 3: almost there</summary>
#
# Every second one is about half of the GPU. The last request asks for more than one hole, and for less than all of
# them: two tensors' size will do.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# No segment is empty, so nothing goes back to the driver; no hole holds the request. That is all it takes.

# %% tags=["solution"]
broken = replay(fragmented(80 * MiB), 80 * MiB)
share = 100 * broken.failure.free_share
segments_figure(broken, title=f"{share:.0f} % of the GPU is free, and no hole is larger than 4 MiB")

# %% [markdown]
# ## 6 · Cure it by order
# **Difficulty** ●●●○○ · **9 minutes** · **Trains** the cure that no setting replaces
#
# A step makes `tensors`, each a triple of name, bytes, and whether it lives long. Then the short-lived ones are freed,
# and a large late request comes. In the order of the step it fails. Return the names in an order in which it fits.


# %%
def order(tensors: list[tuple[str, int, bool]]) -> list[str]:
    """The names in an order in which the late request fits once the short-lived tensors are freed."""
    ### BEGIN SOLUTION Return a list of names.
    return [name for name, _, lives_long in sorted(tensors, key=lambda tensor: not tensor[2])]
    ### END SOLUTION


# %%
check.order(order)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# When the short-lived ones are gone, whole segments should be empty. Which tensors must not share a segment?
#
# </details>
# <details><summary>Hint 2: together</summary>
#
# Those that live alike should lie together: first all of the one kind, then all of the other. But best fit puts the
# second kind into what is left of the first kind's segments, too. Which kind may end up there?
#
# </details>
# <details><summary>Hint 3: almost there</summary>
#
# `sorted` takes a key; False comes before True. The third item of each triple says whether it lives long.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# Long-lived first is what happens by itself when optimizer states and gradient buffers are made before the first step.
# With a lazily made state, as in PyTorch, the first step puts long-lived tensors among activations.

# %% [markdown]
# ## 7 · Find the leak
# **Difficulty** ●●●●○ · **15 minutes** · **Trains** reading a memory snapshot
#
# You get a snapshot, as `read_snapshot` returns it, taken after five steps. Each living block
# (`block["state"] == "active_allocated"`) says in `block["frames"][0]["filename"]` which module's tensor it holds, and
# in `block["frames"][1]["filename"]` when it was made, as in "step 3 forward". Does something pile up, step after step?
# Return the module, or `None`. Tensors that the program keeps of one step alone are no leak.

# %%
snapshot = check.example_snapshot()
blocks = [block for segment in snapshot["segments"] for block in segment["blocks"]]
living = [block for block in blocks if block["state"] == "active_allocated"]
print(f"{len(living)} living blocks; one of them:", living[0])


# %%
def leak(snapshot: dict) -> str | None:
    """The module whose tensors pile up in the snapshot, step after step; None if none do."""
    ### BEGIN SOLUTION Return a module's name, or None.
    steps = {}
    for segment in snapshot["segments"]:
        for block in segment["blocks"]:
            if block["state"] == "active_allocated":
                made_by, when = (frame["filename"] for frame in block["frames"][:2])
                steps.setdefault(made_by, set()).add(when.split()[1])
    module = max(steps, key=lambda name: len(steps[name]))
    return module if len(steps[module]) > 2 else None
    ### END SOLUTION


# %%
check.leak(leak)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# Weights are made once, before the first step. States are made once, in the first. What would a leak look like?
#
# </details>
# <details><summary>Hint 2: count steps</summary>
#
# For each module collect the steps of its living blocks in a set. The number of the step is the second word of
# "step 3 forward".
#
# </details>
# <details><summary>Hint 3: almost there</summary>
#
# A weight and its gradient carry the same name, and are of two steps, the set-up and the last. So a leak has at least
# three. Without one, return `None`.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# Size does not tell: what is largest may be kept once, and honestly. A leak is what is made anew in each step and freed
# in none. In a snapshot from a GPU the frames are lines of your code, and the search is the same.

# %% tags=["solution"]
print(f"piles up in the example: {leak(snapshot)}")
