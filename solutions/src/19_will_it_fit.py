# ---
# jupyter:
#   course:
#     minutes: 97
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Exercises 19 · Will it fit?
#
# **97 minutes** for all four; each one says its own. You should know what [lesson
# 19](../notebooks/19_will_it_fit.ipynb) shows. No GPU is needed.
#
# Each exercise asks for one function. Write it, run the cell, then run the check below it. A check tells you what is
# off, never what the answer is. Stuck? Every exercise has three hints; open one at a time. (“Run All Cells” stops at
# the first check that is unsolved.)

# %%
import gc
import inspect

import torch
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from course_utils import TrainingRun, estimate, fit, gpu, on_gpu
from course_utils.estimating.step_time import step_seconds
from course_utils.lessons.will_it_fit import checks as check

# %% [markdown]
# ## 1 · Halve until it fits
# **Difficulty** ●●○○○ · **22 minutes** · **Trains** catching an out-of-memory error, and freeing what failed
#
# No estimate at hand? Then try. `build(size)` puts a model, its optimizer and a batch of `size` sequences on the GPU,
# and returns a function that takes one training step:


# %%
def build(size):
    model = torch.nn.Linear(4096, 4096, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.zeros(size, 1024, 4096, device="cuda")

    def step():
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


with on_gpu("1 GB"):
    try:
        build(64)()
    except torch.OutOfMemoryError:
        print("64 sequences: out of memory")

# %% [markdown]
# Write the search that libraries offer as "find the batch size". Try `start` sequences, then half (`//`), half of that,
# and so on down to 1. Return the first size that fits, or None if none fits. A size fits if `build` succeeds and *two*
# steps run.
#
# - Only `torch.OutOfMemoryError` means "too large". Let every other error pass through unchanged.
# - When an attempt begins, nothing of the one before may be alive. A name keeps what it refers to. An error keeps,
#   through its traceback, everything that the failed functions refer to, as long as its `except` block runs or the
#   error is stored. Some trainings also refer to themselves. Such a cycle waits for Python's garbage collector, and
#   `gc.collect()` runs it now.
# - The training that fits may not outlive your function, either: its caller needs the card.


# %%
def largest_micro_batch(build, start: int) -> int | None:
    """The first size of start, start // 2, … 1 that runs two steps; None if there is none."""
    ### BEGIN SOLUTION Return a whole number, or None.
    size = start
    while size:
        step = None
        gc.collect()
        torch.cuda.empty_cache()
        try:
            step = build(size)
            step()
            step()
            return size
        except torch.OutOfMemoryError:
            size //= 2
    return None
    ### END SOLUTION


# %%
check.largest_micro_batch(largest_micro_batch)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# Write a loop over sizes, with `try` and `except torch.OutOfMemoryError` in it. The next attempt belongs after the
# `except` block, not into it: inside, the error, its traceback and all their tensors are alive.
#
# </details>
# <details><summary>Hint 2: names</summary>
#
# `step = build(size)` first builds, and only then frees what `step` was before. So for a moment there are two
# trainings. And as long as the `except` block runs, the error holds what failed: `gc.collect()` finds no garbage there.
#
# </details>
# <details><summary>Hint 3: almost there</summary>
#
# At the top of the loop, set the name to None and collect garbage. Then try to build and to take two steps. A list of
# errors for later, or `as error` with a second name for it, would keep everything.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# An out-of-memory error is an exception like any other: the card is fine, and so is your program. A second attempt
# fails because of what the first one left behind. One step proves nothing: AdamW's states appear in its update, so the
# second step begins with 8 bytes per parameter more. `empty_cache` does not make room: the allocator returns its cached
# blocks by itself before it raises. It makes room for *other* programs on the card.

# %% tags=["solution"]
with on_gpu("1 GB"):
    print(largest_micro_batch(build, 64), "sequences")

# %% [markdown]
# ## 2 · Cure an out-of-memory error
# **Difficulty** ●●●○○ · **35 minutes** · **Trains** accumulation, checkpoints and a chunked loss in one step
#
# A small Transformer, and the step that everybody writes:

# %%
print(inspect.getsource(check.SmallTransformer))
print(inspect.getsource(check.plain_step))

# %% [markdown]
# On a card of 200 MB it takes no step. `try_on` shows torch's message, or what the allocator reserved:


# %%
def try_on(memory, step):
    with on_gpu(memory):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        refused = check.refusal(step)  # two steps
        peak = torch.cuda.max_memory_reserved()
    gc.collect()
    print(refused or f"works, reserved {peak / 1e6:.0f} MB")


try_on("200 MB", check.plain_step)
try_on("1 GB", check.plain_step)
N = sum(weight.numel() for weight in check.SmallTransformer().parameters())
print(f"weights, gradients and states: {16 * N / 1e6:.0f} MB")

# %% [markdown]
# Write `fitting_step(model, optimizer, batch)`: the same step with the same gradient, and it works on **200 MB**. It
# returns nothing. Do not change the model, the optimizer or the batch, and keep model and loss under bf16 autocast. The
# check compares gradients on a smaller model (fewer blocks, fewer words) in fp64, which autocast leaves unchanged. It
# uses batches such as 7 × 307 tokens, which few pieces divide. Then it tries two steps of this model on the small card.
#
# You know three ways to save memory: several micro-batches ([lesson 08](../notebooks/08_gradient_accumulation.ipynb)),
# `checkpoint` for each block ([lesson 06](../notebooks/06_recomputation.ipynb)), and the loss in chunks of tokens, each
# through `checkpoint` ([lesson 05](../notebooks/05_activations.ipynb)). Use `use_reentrant=False` with both
# checkpoints. One way is not enough, and cuBLAS's workspaces take 17 MB. Try yours on cards of other sizes, too.


# %%
def fitting_step(model, optimizer, batch) -> None:
    """Take one step on the whole batch, with the gradient of plain_step, on a card of 200 MB."""

    ### BEGIN SOLUTION Take one optimizer step; return nothing.
    def loss_of(x, targets):
        logits = model.head(x)
        return cross_entropy(logits, targets, reduction="sum") / batch[1].numel()

    for tokens, targets in zip(*(part.split(2) for part in batch), strict=True):
        with torch.autocast(tokens.device.type, torch.bfloat16):
            x = model.embedding(tokens)
            for block in model.blocks:
                x = block(x)
            pieces = zip(x.flatten(0, 1).split(128), targets.flatten().split(128), strict=True)
            loss = sum(checkpoint(loss_of, *piece, use_reentrant=False) for piece in pieces)
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    ### END SOLUTION


# %%
check.fitting_step(fitting_step)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# Begin with the largest: 8 · 512 tokens times 8,000 logits. Cut them by one of your ways, and call `try_on` again.
#
# </details>
# <details><summary>Hint 2: the same gradient</summary>
#
# Pieces need not be equally long. Add up *sums* of losses, and divide by the number of all tokens: then every token
# counts once, whatever the pieces.
#
# </details>
# <details><summary>Hint 3: almost there</summary>
#
# Do not call `model(tokens)`. Go through embedding and blocks yourself. Then you have the head's input, and can call
# head and loss for one piece at a time, through `checkpoint`. With micro-batches, each loss goes backward at once,
# outside autocast. The optimizer steps once.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# Weights, gradients and states take 16 bytes per parameter, and no change of the step reduces them. The rest is a
# budget, and each way to save has its price. With micro-batches, gradients wait while the next one runs. Checkpoints
# cost a second forward, chunks a second product with the head. Here the vocabulary is large for the model, so cut the
# logits first. Small pieces also leave smaller holes between the allocator's blocks.

# %% tags=["solution"]
try_on("200 MB", fitting_step)

# %% [markdown]
# ## 3 · Plan a cluster
# **Difficulty** ●●●○○ · **20 minutes** · **Trains** finding a plan without `fit`
#
# You rent machines of 8 H100s with 80 GB. Train all weights of `llama3-70b` with AdamW: 256 sequences of 4,096 tokens
# per step. How many machines do you need, and how do they train? Return a `TrainingRun` for the fewest machines. By the
# rule of 5 % it has to fit each card, and it may lose at most a quarter more time than `fit`'s plan. Do not use `fit`
# this time. `shown` tells you what a run needs, and where it loses time.


# %%
def shown(run):
    """Print the run's peak, its largest parts, and seconds per step by cause."""
    parts = estimate(run)
    largest = sorted(parts.items(), key=lambda part: -part[1])[:3]
    print(f"{1.05 * parts.total / 1e9:.1f} of {card.room / 1e9:.1f} GB, with the reserve")
    print({name: f"{size / 1e9:.1f} GB" for name, size in largest})
    print({cause: round(lost, 2) for cause, lost in step_seconds(run, card).items()})


card = gpu("H100-80GB")
start = TrainingRun("llama3-70b", 4, 4096, "bf16-master", world_size=64, zero_stage=2)
print(f"16·N = {16 * start.model.parameters / 1e9:,.0f} GB")
shown(start)


# %%
def cluster() -> TrainingRun:
    """A plan for Llama-3 70B, 256 sequences per step, on the fewest machines of 8 H100s."""
    ### BEGIN SOLUTION Return a TrainingRun.
    changes = {"world_size": 32, "zero_stage": 3, "micro_batch": 4, "accumulation_steps": 2}
    return start.replace(optimizer="adamw-fused", recompute="every-2", **changes)
    ### END SOLUTION


# %%
check.cluster(cluster)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# 16·N/D must be less than a card. Which is the smallest number of whole machines? Which stage of ZeRO shards all 16
# bytes?
#
# </details>
# <details><summary>Hint 2: it does not fit</summary>
#
# Micro-batch times `accumulation_steps` times `world_size` stays 256. Begin with one sequence at a time and
# `recompute="full"`. Then look at what is left.
#
# </details>
# <details><summary>Hint 3: it is too slow</summary>
#
# Under stage 3 each micro-batch gathers all weights again. So take as many sequences at once as fit, and recompute only
# as much as you must. `every-2` keeps a checkpoint for every second block.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# 16·N is more than a terabyte. On 16 cards the shards alone fill most of a card, and what is whole for a moment does not
# fit into the rest. On 32 cards half of each card is free for activations. `fit` fills it, because
# each further micro-batch would send all weights over the link again. More machines would not be cheaper, only sooner
# done: each step's gathers take as long with 64 cards as with 32.

# %% tags=["solution"]
print(fit("llama3-70b", card, global_batch=256, seq_len=4096, world_size=32))

# %% [markdown]
# ## 4 · Choose QLoRA for a card
# **Difficulty** ●●○○○ · **20 minutes** · **Trains** LoRA and quantization as choices of bytes
#
# You fine-tune models with LoRA on the card that you happen to get. Frozen weights have 16, 8 or 4 bits. Fewer bits
# round more ([lesson 17](../notebooks/17_quantization.ipynb)), so you want as many as the card allows.
# `check.adapted(model, bits, micro_batch)` is the run: rank 16 on every matrix, 4,096 tokens, full recomputation.

# %%
for bits in (16, 8, 4):
    peak = estimate(check.adapted("llama3-8b", bits, 1)).total
    print(f"{bits:2d} bits: {1.05 * peak / 1e9:.1f} GB with the reserve, for one sequence")

# %% [markdown]
# Write `qlora(model, card)`. First take the most bits that fit `card.room` with one sequence and the 5 % in reserve.
# Then take the largest micro-batch of 1 to 16 with these bits. Return both numbers, or (0, 0) if nothing fits.


# %%
def qlora(model, card) -> tuple[int, int]:
    """The bits of the frozen weights, and the largest micro-batch up to 16."""
    ### BEGIN SOLUTION Return two whole numbers.
    for bits in (16, 8, 4):
        for size in range(16, 0, -1):
            if 1.05 * estimate(check.adapted(model, bits, size)).total <= card.room:
                return bits, size
    return 0, 0
    ### END SOLUTION


# %%
check.qlora(qlora)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# Two loops: bits from 16 down, and in it sizes from 16 down. The first pair that fits is the answer.
#
# </details>
# <details><summary>Hint 2: which room</summary>
#
# `card.memory` is what the driver lists. `card.room` is what a program gets.
#
# </details>
# <details><summary>Hint 3: almost there</summary>
#
# `estimate(check.adapted(model, bits, size)).total` is the peak. Compare 1.05 times it with the room. Bits decide before
# the size does.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# LoRA has almost no gradients and moments, so frozen weights are the largest part: 2 bytes per parameter in 16 bits,
# about half a byte in 4. What remains is for activations, which fewer bits do not shrink. On a card with room, 4 bits
# buy only a larger micro-batch, and you could have that by accumulation, without rounding.

# %% tags=["solution"]
for name in ("RTX4090-24GB", "RTX4080-16GB", "A100-80GB"):
    print(name, qlora("llama3-8b", gpu(name)))
