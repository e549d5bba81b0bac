# ---
# jupyter:
#   course:
#     minutes: 99
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Exercises 12 · Allocator and fragmentation
#
# **99 minutes** for all five; each exercise says how long it takes. You should know [lesson
# 12](../notebooks/12_allocator_and_fragmentation.ipynb). No GPU is needed.
#
# Each exercise asks for one function, the last for a function and a class. Write it, run the cell, then run the check below it. A
# check tells you what is off, but never the answer. Stuck? Every exercise has three hints. Open one at a time. (“Run
# All Cells” stops at the first check that is unsolved.)

# %%
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import nn

from course_utils import format_bytes, on_gpu, replay
from course_utils.lessons.allocator import checks as check
from course_utils.lessons.allocator.figures import segments_figure

MiB = 2**20

# %% [markdown]
# ## 1 · A report that does not move
# **Difficulty** ●●○○○ · **14 minutes** · **Trains** reading the right counter, at the right moment
#
# Find out why a report of peaks never changes, and write a loop that reports them correctly. A colleague has trained a
# small model with batches of 8,192, 4,096 and 2,048, one after the other in one process. The report concludes: "memory
# does not depend on the batch size".

# %%
print({batch: format_bytes(size, "MB", 1) for batch, size in check.report().items()})

# %% [markdown]
# Write the loop that reports each peak correctly. `make()` makes a model on the card. `draw(batch)` makes an input of
# `batch` rows for it. For each batch size in `batches`, in this order:
#
# 1. Make a model, and a `torch.optim.AdamW` for it.
# 2. Take **two** steps with the loss `model(draw(batch)).square().mean()`. (Other forms have other temporaries.) End
#    each step with `zero_grad`.
#
# Return a dictionary from the batch size, a whole number, to the peak in bytes. The peak is the most bytes that were
# allocated at once during this batch size's own training, weights and states included. Nothing of an earlier training
# may still be in memory. cuBLAS's workspaces stay and do count. So return the counter unchanged, and subtract nothing.
#
# The check calls your function inside `with on_gpu():`, with three models, and with batches in several orders.


# %%
def peaks(make, draw, batches: list[int]) -> dict[int, int]:
    """Peak bytes for each batch size, each in its own training: a new model, AdamW, two steps."""
    ### BEGIN SOLUTION Return a dictionary from batch to bytes.
    found = {}
    for batch in batches:
        model = make()
        optimizer = torch.optim.AdamW(model.parameters())
        torch.cuda.reset_peak_memory_stats()
        for _ in range(2):
            model(draw(batch)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found[batch] = torch.cuda.max_memory_allocated()
        del model, optimizer
    return found
    ### END SOLUTION


# %%
check.peaks(peaks)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# `torch.cuda` has counters for the bytes now, and counters for the most bytes since some moment. Which do you need, and
# since which moment?
#
# </details>
# <details><summary>Hint 2: reset the maximum</summary>
#
# The lesson's `reserved_for` resets a maximum. Do that once for each training, when nothing of the previous one is left. A
# model in a list is still there, and so is a loss with its graph.
#
# </details>
# <details><summary>Hint 3: almost there</summary>
#
# For each batch: model, optimizer, reset, two steps, read. Read *before* the next model is made. Read what was
# allocated, not what is reserved.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# `max_memory_allocated()` is the most since the process began, or since `reset_peak_memory_stats()`. Without the reset,
# batches that grow look right, but batches that fall all show the first one's peak. You need two steps because Adam's
# states do not exist before the first `optimizer.step()`. Leftovers of earlier trainings count, too: an optimizer holds
# its model's weights, and so does a loss with its graph. Even a name costs memory: in `output = model(draw(batch))` the
# output stays through backward. The check allows for that.


# %% tags=["solution"]
def layers():
    return nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 512)).to("cuda")


with on_gpu():
    found = peaks(layers, lambda batch: torch.randn(batch, 512, device="cuda"), [8192, 4096, 2048])
print({batch: format_bytes(size, "MB", 0) for batch, size in found.items()})

# %% [markdown]
# ## 2 · Out of memory with more than half free
# **Difficulty** ●●●○○ · **12 minutes** · **Trains** knowing what fragments memory
#
# Build a failure by fragmentation. `capacity` is the size of a GPU in bytes, at least 80 MiB and a multiple of 40 MiB.
# Return a list of events: (bytes, name) allocates, (−bytes, name) frees. All must succeed except the last one, a
# request. It must fail, although **more than half** of the GPU holds no tensor, and although the request is smaller
# than this free memory. The lesson's pattern leaves only 40 % free. To draw your events, use
# `segments_figure(replay(fragmented(80 * MiB), 80 * MiB))`.


# %%
def fragmented(capacity: int) -> list[tuple[int, str]]:
    """Events; the last one, a request, fails on a GPU of `capacity` bytes with over half free."""
    ### BEGIN SOLUTION Return a list of (bytes, name) pairs.
    size, count = 4 * MiB, capacity // (4 * MiB)
    made = [(size, f"t{index}") for index in range(count)]
    # one stays in each segment
    freed = [(-size, f"t{index}") for index in range(count) if index % 5 != 0]
    return [*made, *freed, (4 * size + MiB, "late")]
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
# Then free some of them. In segments of 20 MiB, tensors of 4 MiB fit exactly. What keeps a segment from going back to
# the driver? How little of that is enough?
#
# </details>
# <details><summary>Hint 3: almost there</summary>
#
# If you free every second tensor, exactly half of the GPU is free, not more. Free neighbors join, so holes can be
# larger than one tensor. The last request must be larger than the largest hole, and smaller than all holes together.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# No segment is empty, so none goes back to the driver. No hole holds the request. One tensor in each segment is enough
# for that. With smaller tensors there, an even larger share could be free.

# %% tags=["solution"]
broken = replay(fragmented(80 * MiB), 80 * MiB)
share = 100 * broken.failure.free_share
title = f"{share:.0f} % of the GPU is free, and no hole is larger than 16 MiB"
segments_figure(broken, title=title)

# %% [markdown]
# ## 3 · Cure it by order
# **Difficulty** ●●●○○ · **13 minutes** · **Trains** the cure that no setting replaces
#
# Make a program fit by changing only its order. It computes features of documents, one document at a time, and keeps
# the features. The documents are sorted from short to long, as in many loaders. Guess before you run it: does it fit?


# %%
@torch.no_grad()
def in_turn(model, documents):
    return [model(tokens) for tokens in documents]


with on_gpu("680 MiB"):
    torch.cuda.empty_cache()
    model = nn.Sequential(nn.Embedding(1000, 4096), nn.GELU(), nn.Linear(4096, 2048)).to("cuda")
    documents = [torch.randint(1000, (length,), device="cuda") for length in range(2000, 5301, 300)]
    size = sum(len(tokens) for tokens in documents) * 2048 * 4
    print(f"{len(documents)} documents; all features: {format_bytes(size, 'MiB', 0)}")
    try:
        in_turn(model, documents)
    except torch.OutOfMemoryError as error:
        print(error)

# %% [markdown]
# Weights, all features and one document's forward need less than 560 MiB together. Write `embed`, so that the program
# fits. Return a list of fp32 tensors, one of shape (tokens, features) per document, **in the order of `documents`**.
# The number of features is `model[-1].out_features`.
#
# - Call `model` once for each document, with the whole document.
# - The features stay on the card, from the moment they are made.
# - Documents may come in any order, and two may have the same length.
# - Use no setting of the allocator.
#
# The check runs your function on simulated cards of three sizes, inside `with on_gpu(…):`, and with small inputs on the
# CPU. So take the device from `documents`.


# %%
@torch.no_grad()
def embed(model: nn.Sequential, documents: list[torch.Tensor]) -> list[torch.Tensor]:
    """Each document's features in the order of `documents`, made in an order that fits the card."""
    ### BEGIN SOLUTION Return a list of tensors.
    features = [None] * len(documents)
    for at in sorted(range(len(documents)), key=lambda at: len(documents[at]), reverse=True):
        features[at] = model(documents[at])
    return features
    ### END SOLUTION


# %%
check.embed(embed)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# Which tensors live long here? Which are gone when a document is done? Where does best fit put the first document's
# features, and what does the second document find there?
#
# </details>
# <details><summary>Hint 2: two ways</summary>
#
# Either the freed memory is large enough for everything that comes later. Or the long-lived tensors are there before
# the short-lived ones. Both ways change only the order.
#
# </details>
# <details><summary>Hint 3: almost there</summary>
#
# For the first way, sort the *positions* of the documents by length, so that you know where each result belongs. For
# the second, make empty tensors and copy results into them: `features[i] = …` would only put another tensor into the
# list.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# A document's features go into a segment that its own forward has just freed. From short to long, the rest of that
# segment is too small for the next document. In the lesson, such segments were empty and went back to the driver. Here
# the features keep them, and you lose about as many bytes as all features have. From long to short, each document fits
# where an earlier one has been. Or make room for all features first: then the segments of a forward are empty after it,
# and can go back.

# %% tags=["solution"]
with on_gpu("680 MiB"):
    torch.cuda.empty_cache()
    features = embed(model, documents)
    reserved = format_bytes(torch.cuda.memory_reserved(), "MiB", 0)
    print(f"{len(features)} tensors; {reserved} reserved")

# %% [markdown]
# ## 4 · Find the leak
# **Difficulty** ●●●●○ · **15 minutes** · **Trains** comparing memory snapshots
#
# Find the line of code whose tensors pile up. Your function gets torch's memory snapshots of a training, one after each
# of four steps. A living block has `block["state"] == "active_allocated"`. `made_by(block)` is the line that made it.
#
# Do the living bytes of a line grow from each snapshot to the next? Return the line, as `made_by` has it. If no line
# does that, return `None`. A program that keeps something once, however large, has no leak.


# %%
def made_by(block: dict) -> str:
    """The line of code that made a block."""
    code = [frame["name"] for frame in block["frames"] if frame["line"]]
    return code[0] if code else "not made by this program"


snapshots = check.example_snapshots()
blocks = [block for segment in snapshots[-1]["segments"] for block in segment["blocks"]]
living = [block for block in blocks if block["state"] == "active_allocated"]
print(f"{len(living)} living blocks; the last: {living[-1]['size']:,} bytes, {made_by(living[-1])}")


# %%
def leak(snapshots: list[dict]) -> str | None:
    """Return the line whose tensors pile up from snapshot to snapshot, or None."""
    ### BEGIN SOLUTION Return a line of code, or None.
    held = [Counter() for _ in snapshots]
    for sizes, snapshot in zip(held, snapshots, strict=True):
        for segment in snapshot["segments"]:
            for block in segment["blocks"]:
                if block["state"] == "active_allocated":
                    sizes[made_by(block)] += block["size"]
    for line in held[-1]:
        if all(later[line] > earlier[line] for earlier, later in pairwise(held)):
            return line
    return None
    ### END SOLUTION


# %%
check.leak(leak)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# Weights are made once, before the first step. States are made once, in the first. What would a leak look like in two
# snapshots?
#
# </details>
# <details><summary>Hint 2: bytes by line</summary>
#
# For each snapshot, add up the sizes of the living blocks by line: a `Counter` for each snapshot.
#
# </details>
# <details><summary>Hint 3: almost there</summary>
#
# `itertools.pairwise` gives each snapshot with the next one. A leak's line has more bytes in *every* pair. What is kept
# once grows in one pair only.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# Size does not show a leak: a program may keep the largest tensor once, and for a good reason. A leak makes new tensors
# step after step, and none is freed. In a snapshot from a GPU, a block has all frames of Python's stack, from the inside
# out: the first one outside of torch is yours, with file and line number. The search is the same.

# %% tags=["solution"]
print(f"leak in the example: {leak(snapshots)}")

# %% [markdown]
# ## 5 · An allocator of forty lines
# **Difficulty** ●●●●○ · **45 minutes** · **Trains** every rule of the allocator, by writing it
#
# Write the allocator yourself, without a capacity, settings, or streams. Each pool is a list of segments, oldest first.
# A segment is a list of blocks, in the order of their addresses. Two classes are given:


# %%
@dataclass(eq=False)
class Block:
    size: int
    name: object = None  # None while the block is free


class Memory:
    def __init__(self):
        self.small, self.large = [], []  # the segments of each pool; a segment is a list of Blocks

    @property
    def reserved(self):
        return sum(block.size for segment in self.small + self.large for block in segment)

    @property
    def allocated(self):
        blocks = [block for segment in self.small + self.large for block in segment]
        return sum(block.size for block in blocks if block.name is not None)


# %% [markdown]
# First write the half that allocates. `allocate(name, size)` gives `size` bytes to `name` and returns nothing. (Rule 4
# has a function of its own.)
#
# 1. Round `size` up to a multiple of 512. From here on, only the rounded size counts.
# 2. Use the small pool for a size of up to 1 MiB, and the large pool for any other.
# 3. Take the smallest free block of that pool that is large enough. If several are equally small, take the first: in
#    the oldest segment, at the lowest address.
# 4. If there is none, append a segment with one free block. In the small pool it has 2 MiB. In the large pool it has 20
#    MiB for a size under 10 MiB; for any other, the size rounded up to a multiple of 2 MiB.
# 5. Split the rest off as a free block behind yours: in the small pool always, in the large pool if it is more than 1
#    MiB. Otherwise the rest stays with your block, and counts as allocated.
# 6. Give your block its name.
#
# `check.allocator(HalfAnAllocator)` checks everything that this half can show.


# %%
def segment_size(size: int) -> int:
    """Bytes to ask the driver for, where no free block holds a rounded size."""
    ### BEGIN SOLUTION Return a number of bytes.
    if size <= MiB:
        return 2 * MiB
    return 20 * MiB if size < 10 * MiB else -(-size // (2 * MiB)) * 2 * MiB
    ### END SOLUTION


# %%
class HalfAnAllocator(Memory):
    def allocate(self, name, size: int) -> None:
        """Name the block for `size` bytes: the best fit, or one in a new segment."""
        ### BEGIN SOLUTION Nothing is returned: change self.small or self.large.
        size = -(-size // 512) * 512
        pool = self.small if size <= MiB else self.large
        pairs = [(block, segment) for segment in pool for block in segment]
        free = [pair for pair in pairs if pair[0].name is None and pair[0].size >= size]
        if not free:
            pool.append([Block(segment_size(size))])
            free = [(pool[-1][0], pool[-1])]
        block, segment = min(free, key=lambda pair: pair[0].size)
        block.name = name
        rest = block.size - size
        if rest > (0 if pool is self.small else MiB):
            block.size = size
            segment.insert(segment.index(block) + 1, Block(rest))
        ### END SOLUTION


# %% [markdown]
# Now write the half that frees. `free(name)` frees the block with this name and joins it with the free neighbors in its
# own segment. Nothing goes back to the driver. A freed name may be used again.
#
# The check compares `allocated` and `reserved` with the course's own allocator after **every** event: in a short trace
# for each rule, in a training, and in thousands of random events. If a short trace goes wrong, the check quotes it for
# the lesson's player: `a=4 b=512K -a` allocates 4 MiB and 512 KiB, and frees the first.


# %%
class Allocator(HalfAnAllocator):
    def free(self, name) -> None:
        """Free the block with this name, and join it with its free neighbors."""
        ### BEGIN SOLUTION Nothing is returned: change the segment that has the block.
        for segment in self.small + self.large:
            for at, block in enumerate(segment):
                if block.name == name:
                    block.name = None
                    if at + 1 < len(segment) and segment[at + 1].name is None:
                        block.size += segment.pop(at + 1).size
                    if at > 0 and segment[at - 1].name is None:
                        segment[at - 1].size += segment.pop(at).size
                    return
        ### END SOLUTION


# %%
check.allocator(Allocator)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# Collect the free blocks that are large enough, each with its segment. You need the segment to put a rest behind the
# block. If the list is empty, ask the driver. Then go on as if the new block had been there before.
#
# </details>
# <details><summary>Hint 2: smallest, split, join</summary>
#
# `min` takes a key, and returns the first of several equal items. `list.insert` puts the rest behind the block. To
# join, add one neighbor's size to the other, and take it out of the list with `pop`.
#
# </details>
# <details><summary>Hint 3: almost there</summary>
#
# Join with the right neighbor first: the block's own position stays the same. Then look left. Watch the ends of the
# list: position −1 is the *last* block. Compare sizes *after* rounding. A block is free if its name `is None`. Two
# empty lists are equal, so use `is` to ask which pool you have.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# These rules alone decide where your tensors lie. The allocator does not plan ahead, and it moves nothing. Each rule is
# a trade. Best fit spares large blocks, segments of 20 MiB save calls of the driver, and unsplit rests avoid tiny
# holes. PyTorch's own code adds a capacity, streams and settings.

# %% tags=["solution"]
events = check.random_requests(seed=3)
memory = Allocator()
for size, name in events:
    if size > 0:
        memory.allocate(name, size)
    else:
        memory.free(name)
theirs = replay(events)
print(
    f"after {len(events):,} events: {memory.allocated:,} bytes allocated, "
    f"{memory.reserved:,} reserved"
)
apart = theirs.allocated[-1] - memory.allocated, theirs.reserved[-1] - memory.reserved
print(f"replay − yours: {apart[0]} and {apart[1]} bytes")
