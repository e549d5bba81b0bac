# ---
# jupyter:
#   course:
#     minutes: 100
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Exercises 19 · Will it fit?
#
# **100 minutes** for all four; each one says its own. You should know what [lesson
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

from course_utils import TrainingRun, estimate, fit, format_bytes, gpu, measure, on_gpu
from course_utils.estimating.step_time import lost_seconds, step_seconds
from course_utils.lessons.will_it_fit import checks as check
from course_utils.lessons.will_it_fit.detective import case
from course_utils.planning.twin import SAFETY

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
# ## 2 · Make this script fit
# **Difficulty** ●●●○○ · **35 minutes** · **Trains** accumulation, checkpoints and a chunked loss in one step
#
# A small Transformer, and the step that everybody writes:

# %%
print(inspect.getsource(check.SmallTransformer))
print(inspect.getsource(check.plain_step))


# %%
def peak_of(step):
    model = check.SmallTransformer()
    batch = [torch.zeros(8, 512, dtype=torch.long) for _ in range(2)]  # token ids and targets
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    parts = {"model": model, "optimizer": optimizer, "batch": batch}
    return measure(step=step, **parts, source="simulated").peak


N = sum(weight.numel() for weight in check.SmallTransformer().parameters())
print(f"weights, gradients and states: {format_bytes(16 * N, 'MB', 0)}")
print(f"the plain step's simulated peak: {format_bytes(peak_of(check.plain_step), 'MB', 0)}")

# %% [markdown]
# Write `fitting_step(model, optimizer, batch)`: the same step with the same gradient, but a peak of less than **160
# MB**. It returns nothing. Do not change the model, the optimizer or the batch, and keep model and loss under bf16
# autocast. The check compares gradients on a smaller model (fewer blocks, fewer words) in fp64, which autocast leaves
# unchanged. It uses batches such as 7 × 307 tokens, which few pieces divide. Then it simulates two steps of this model.
#
# You know three ways to save memory: several micro-batches ([lesson 08](../notebooks/08_gradient_accumulation.ipynb)),
# `checkpoint` for each block ([lesson 06](../notebooks/06_recomputation.ipynb)), and the loss in chunks of tokens, each
# through `checkpoint` ([lesson 05](../notebooks/05_activations.ipynb)). Use `use_reentrant=False` with both
# checkpoints. One way is not enough. Any two are, if you cut finely enough. `peak_of(fitting_step)` tells you how far
# you are.


# %%
def fitting_step(model, optimizer, batch) -> None:
    """Take one step on the whole batch, with the gradient of plain_step, in less than 160 MB."""

    ### BEGIN SOLUTION Take one optimizer step; return nothing.
    def loss_of(x, targets):
        return cross_entropy(model.head(x), targets, reduction="sum")

    tokens, targets = batch
    with torch.autocast(tokens.device.type, torch.bfloat16):
        x = model.embedding(tokens)
        for block in model.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        pieces = zip(x.flatten(0, 1).split(128), targets.flatten().split(128), strict=True)
        loss = (
            sum(checkpoint(loss_of, *piece, use_reentrant=False) for piece in pieces)
            / targets.numel()
        )
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    ### END SOLUTION


# %%
check.fitting_step(fitting_step)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# Begin with the largest: 8 · 512 tokens times 8,000 logits. Cut them by one of your ways, and ask `peak_of` again.
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
# logits first. Cut the blocks next, by either of the two other ways.

# %% tags=["solution"]
print(f"the fitting step's simulated peak: {format_bytes(peak_of(fitting_step), 'MB', 0)}")

# %% [markdown]
# ## 3 · Train GPT-2 large on a V100
# **Difficulty** ●●●○○ · **15 minutes** · **Trains** finding a plan without `fit`
#
# Find a plan for `gpt2-large`: 48 sequences of 1,024 tokens per step, all weights, AdamW, autocast, on one V100 of 16
# GB. Return a `TrainingRun` that fits the card with the reserve and loses at most 10 % more time than `fit`'s plan. Do
# not use `fit` this time. `shown` tells you what a run needs, and where it loses time. The check says how far you are
# from the plan.


# %%
def shown(run):
    """The run's peak, and seconds lost per step by cause, other than the model's own arithmetic."""
    seconds = step_seconds(run, card)
    causes = [f"{cause} {lost:.2f}" for cause, lost in seconds.items() if cause != "model"]
    peak = format_bytes(estimate(run).total, "GB", 2)
    return f"{peak}, {lost_seconds(run, card):.2f} s lost: {', '.join(causes)}"


card = gpu("V100-16GB")
room = format_bytes(round(card.room / SAFETY), "GB", 2)
print(f"room with the reserve: {room}; bf16: {card.has_bf16}")
start = TrainingRun("gpt2-large", 48, 1024, "amp-fp16", attention="efficient")
print(f"all at once: {shown(start)}")


# %%
def on_a_v100() -> TrainingRun:
    """A plan for GPT-2 large, 48 sequences per step, on a V100 of 16 GB."""
    ### BEGIN SOLUTION Return a TrainingRun.
    changes = {"micro_batch": 12, "accumulation_steps": 4, "recompute": "every-2", "loss_chunks": 8}
    return start.replace(optimizer="adamw-fused", **changes)
    ### END SOLUTION


# %%
check.on_a_v100(on_a_v100)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# Call `start.replace(...)` and print `shown` for each idea. Begin with what costs little time: `optimizer`,
# `loss_chunks`. Then try smaller micro-batches, with `accumulation_steps` so that the product stays 48. (An unknown
# name or value in `replace` prints those that exist.)
#
# </details>
# <details><summary>Hint 2: it is still too much</summary>
#
# 16 bytes per parameter are 12.4 of the 16.1 GB. The rest holds one sequence at a time, which is slow, or more of them
# if blocks are recomputed. Try `full` and `every-2`.
#
# </details>
# <details><summary>Hint 3: almost there</summary>
#
# With recomputed blocks, more than one sequence fits at a time. And every micro-batch reads all weights again. So take
# as many sequences as fit.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# Each micro-batch reads all weights and adds to all gradients. With 12.4 GB of states that takes long. So few, large
# micro-batches pay, and recomputing blocks makes room for them. `fit` tries 8 chunks of the loss. With 16, a still
# larger micro-batch fits. Did you find it?

# %% tags=["solution"]
print(fit("gpt2-large", "V100-16GB", global_batch=48))
chunked = on_a_v100().replace(micro_batch=16, accumulation_steps=3, loss_chunks=16)
print("with 16 chunks:", shown(chunked))

# %% [markdown]
# ## 4 · Diagnose
# **Difficulty** ●●●●○ · **28 minutes** · **Trains** reading an out-of-memory error
#
# Turn the detective into a function. It takes the evidence of a run that ran out of memory, and returns the name of the
# cause. The check has twenty such runs, on cards of other sizes than the lesson's. In none of them are the weights by
# themselves too large. Call it fragmentation if `free` is more than `requested` *and* more than a fifth of the card.
#
# Sizes are in bytes. `free` is all memory that holds no tensor, and `free_share` its share of the card. `alive` has the
# bytes of each kind of memory, and `parameters` is the number of weights. `step_starts` is what was allocated when each
# step began. `phase` is forward, loss, backward or optimizer. `heads` and `vocab` are 0 for a network without them. To
# try your function, use the lesson's six cases: `case(1).evidence` to `case(6).evidence`.

# %%
for name, words in check.CAUSES.items():
    print(f"{name:14s} {words}")
print("\nThe evidence of one such run, simulated:")
for name, value in vars(case(1).evidence).items():
    print(f"{name:13s} {dict(value) if name == 'alive' else value}")


# %%
def diagnose(seen) -> str:
    """The cause of the failure, one of check.CAUSES, from a run's evidence."""
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
# Write one `if` for each clue of the lesson's table. Begin with the clues that nothing else explains: later steps that
# each begin with more than the one before (from the third on, because the second begins with the optimizer's states),
# and much free memory that did not help.
#
# </details>
# <details><summary>Hint 2: sizes</summary>
#
# Compare `seen.requested` with multiples of `micro_batch · seq_len · vocab` (2 or 4 bytes per number, and the allocator
# rounds up a little), and of `micro_batch · heads · seq_len²`. For a program without heads and vocabulary both products
# are 0: mind the division.
#
# </details>
# <details><summary>Hint 3: almost there</summary>
#
# In `phase == "optimizer"` the states are complete at 8 bytes per parameter. What fails after that are copies that the
# update makes. The order of the questions matters: a leak can fail anywhere, in the optimizer's step, too.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# The last request is only the last straw. The cause is what grew before it: over steps, over a forward, in an update. A
# message has the request and the free bytes. A timeline has the rest, so record one before you need it.
