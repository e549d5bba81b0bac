# ---
# jupyter:
#   course:
#     minutes: 20
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # The Explorer
#
# **20 minutes** for the tour, and as long as you like for your own runs. You should know what lives in a training step
# ([lesson 01](01_where_did_the_memory_go.ipynb)); each control is explained by the lesson that it belongs to.
#
# One page for all choices of a training run. The pictures show its estimated peak and how the step gets there, against
# what a program really gets of a card. Below the verdict stands what to change next, with what each change saves and
# what it costs in time.

# %% [markdown]
# ## One: how many micro-batches?
# The page below opens with the puzzle of the course: GPT-2 XL, 32 sequences a step, on a card with 32 GB. Nothing is
# recomputed, and nothing may change but how the 32 sequences are cut into micro-batches of equal size.
# **How many micro-batches must it be?**

# %%
from course_utils.interactive.guesses import predict, reveal, waits_for

predict("explorer.micro_batches", unit="micro-batches")

# %% [markdown]
# ## The page
# Run the next cell. The page opens once your guess is locked, or by *Show me*. Everything works by keyboard: **Tab**
# goes from control to control, the **arrow keys** move a slider, **Enter** presses a button.

# %%
from course_utils.interactive.explorer_widget import explore

waits_for("explorer.micro_batches")
page = explore()
page

# %% [markdown]
# What you see is an estimate by the course's exact engine, checked against steps that really run
# ([lesson 01](01_where_did_the_memory_go.ipynb) shows how). What CUDA itself takes is not in it, so a change counts as
# *fits* only with 5 % to spare. Seconds are work divided by the data sheet's rates: good for ranking, no promise.
#
# Whatever you have chosen is at hand in Python, to measure it or to lay it beside another run:

# %%
print(page.run)
print(page.breakdown)

# %% [markdown]
# And the first question? The list is what the buttons say:

# %%
from course_utils.interactive.explorer import next_changes

changes = next_changes({})  # of the puzzle
cut = next(change for change in changes if change.fits and change.chosen["accumulation_steps"] > 1)
reveal("explorer.micro_batches", cut.chosen["accumulation_steps"], "micro-batches")
for change in changes:
    print(f"{change.words}: {change.effect}")

# %% [markdown]
# Recomputing, which everybody tries first, is not enough alone: at 32 sequences the logits of one micro-batch and their
# gradient are too large, and recomputation never touches them.
#
# **Your turn:** press *Start over* on the page, then *full recomputation*, and look at what it offers next. Is the peak
# still at the same column, and of what is it made now? Then take *the loss in 8 chunks*: which of the next changes
# makes all 32 sequences fit at once?

# %% [markdown]
# ## Two: how many GPUs?
# Llama-3 8B, one sequence of 4,096 tokens on each GPU, Adam, every block recomputed, the loss in 8 chunks, everything
# sharded (ZeRO-3), in FSDP's own mixed precision: fp32 shards, 16-bit weights while a block computes ([lesson
# 14](14_will_it_fit.ipynb)). One GPU with 40 GB cannot even hold the weights and their gradients in fp32. **How many
# such GPUs suffice?**

# %%
predict("explorer.ranks", unit="GPUs")

# %%
from course_utils import format_bytes
from course_utils.interactive.explorer import dashboard

llama = {"model": "llama3-8b", "micro_batch": 1, "seq_len": 4096, "recompute": "full", "gpu": "A100-40GB"}
llama |= {"zero_stage": 3, "precision": "bf16-master", "loss_chunks": 8}
peaks = {ranks: dashboard(llama | {"world_size": ranks}) for ranks in (2, 4, 8, 16, 32, 64)}
reveal("explorer.ranks", min(ranks for ranks, shown in peaks.items() if shown.fits), "GPUs")
for ranks, shown in peaks.items():
    print(f"{ranks:>3} GPUs: {shown.title.partition(': ')[2]}. {shown.verdict}")

# %% [markdown]
# As long as the optimizer's step is the peak, it is made of shards, and twice the GPUs halve it. Then the peak moves to
# backward. What is sharded goes on shrinking. What stays is the block that each GPU gathers, with its whole gradients,
# and the sequence that the GPU works on. The page shows it for eight.

# %%
explore(**llama, world_size=8)

# %% [markdown]
# And with [autocast](../docs/glossary.md#autocast) in place of FSDP's mixed precision? Then each GPU also keeps 16-bit
# copies of all weights until the loss is there. No number of GPUs makes these smaller:

# %%
for ranks, shown in peaks.items():
    other = dashboard(llama | {"world_size": ranks, "precision": "amp-bf16"})
    copies = format_bytes(other.breakdown["weight_copies"], "GB", 1)
    print(f"{ranks:>3} GPUs: {format_bytes(shown.breakdown.total, 'GB', 1):>7}, "
          f"under autocast {format_bytes(other.breakdown.total, 'GB', 1):>7}, of it copies {copies}")  # fmt: skip

# %% [markdown]
# ## Three: your own
# Choose the model and the card that you have. Then let *Arrange it for me* look through the configurations of the
# same training, and read what it changed: it is the plan that `fit` of [lesson 14](14_will_it_fit.ipynb) finds. Copy
# the line of code, and measure it:
#
# ```python
# from course_utils import compare
# compare(page.run)
# ```
#
# ## Take home
# **Remember** First see which moment is the peak and of what it is made. Only a change that touches that moment helps.
#
# **Breaks when** an estimate is read as a promise: leave a few percent for what no formula sees, then measure.
