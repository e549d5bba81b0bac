# ---
# jupyter:
#   course:
#     minutes: 20
#     cpu_seconds: 5
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # The Explorer
#
# **20 minutes** for the tour, and as long as you like for your own runs. You should know what lives in a training step
# ([lesson 01](01_where_did_the_memory_go.ipynb)). The other lessons explain the controls.
#
# One page shows every choice of a training run. Its figures show the estimated peak, how the step gets there, and how
# much memory a program really gets on a card. Below the verdict you find what to change next: what each change saves,
# and what it costs in time.

# %% [markdown]
# ## One: how many micro-batches?
# The page below opens with the puzzle of the course: GPT-2 XL, 32 sequences per step, a card with 32 GB, no
# recomputation. You may change only one thing: how many micro-batches of equal size the 32 sequences are split into.
# **How many micro-batches do you need?**

# %%
from course_utils.interactive.guesses import predict, reveal, waits_for

predict("explorer.micro_batches", unit="micro-batches")

# %% [markdown]
# ## The page
# Run the next cell. The page opens when you lock your guess or press *Show me*. Everything works by keyboard: **Tab**
# moves to the next control, the **arrow keys** move a slider, **Enter** presses a button.

# %%
from course_utils.interactive.explorer_widget import explore

waits_for("explorer.micro_batches")
page = explore()
page

# %% [markdown]
# You see estimates by the course's closed form, which is checked against steps that really run ([lesson
# 01](01_where_did_the_memory_go.ipynb) shows how). They leave out the memory that CUDA itself takes, so a change counts
# as *fits* only with 5 % to spare. Seconds are work divided by the rates of the data sheet: good enough to rank
# changes, but not a promise.
#
# Your choice is available in Python, so you can measure it or compare it with another run:

# %%
print(page.run)
print(page.breakdown)

# %% [markdown]
# And the first question? This list has the same changes as the buttons:

# %%
from course_utils.interactive.explorer import next_changes

changes = next_changes({})  # of the puzzle
cut = next(change for change in changes if change.fits and change.chosen["accumulation_steps"] > 1)
reveal("explorer.micro_batches", cut.chosen["accumulation_steps"], "micro-batches")
for change in changes:
    print(f"{change.words}: {change.effect}")

# %% [markdown]
# Most people try recomputation first, but it is not enough: for 32 sequences the logits and their gradient are too
# large, and recomputation does not touch them.
#
# **Your turn:** press *Start over* on the page, then *recompute: full*, and look at what it offers next. Is the peak
# still in the same column? What fills it now? Then choose *chunks of the loss: 8*. Which of the next changes makes all
# 32 sequences fit at once?

# %% [markdown]
# ## Two: how many GPUs?
# Train Llama-3 8B with Adam and one sequence of 4,096 tokens per GPU. Every block is recomputed, the loss runs in 8
# chunks, and everything is sharded (ZeRO-3) in FSDP's own mixed precision: fp32 shards, and 16-bit weights while a
# block computes ([lesson 19](19_will_it_fit.ipynb)). One GPU with 40 GB cannot even hold the weights and their
# gradients in fp32. **How many of these GPUs do you need?**

# %%
predict("explorer.ranks", unit="GPUs")

# %%
from course_utils import format_bytes
from course_utils.interactive.explorer import dashboard

llama = {"model": "llama3-8b", "micro_batch": 1, "seq_len": 4096, "recompute": "full"}
llama |= {"gpu": "A100-40GB", "zero_stage": 3, "precision": "bf16-master", "loss_chunks": 8}
peaks = {ranks: dashboard(llama | {"world_size": ranks}) for ranks in (2, 4, 8, 16, 32, 64)}
reveal("explorer.ranks", min(ranks for ranks, shown in peaks.items() if shown.fits), "GPUs")
for ranks, shown in peaks.items():
    print(f"{ranks:>3} GPUs: {shown.title.partition(': ')[2]}. {shown.verdict}")

# %% [markdown]
# At first the peak is in the optimizer's step. It consists of shards, so twice as many GPUs halve it. Then the peak
# moves to backward. The shards keep shrinking, but three things stay: the block that each GPU gathers, the gradients of
# that block before they are sharded, and the activations of the GPU's own sequence. The page shows eight GPUs.

# %%
explore(**llama, world_size=8)

# %% [markdown]
# What if you use [autocast](../docs/glossary.md#autocast) instead of FSDP's mixed precision? Then each GPU also keeps
# 16-bit copies of all weights until the loss is computed. More GPUs do not make these copies smaller:

# %%
for ranks, shown in peaks.items():
    other = dashboard(llama | {"world_size": ranks, "precision": "amp-bf16"})
    copies = format_bytes(other.breakdown["weight_copies"], "GB", 1)
    print(
        f"{ranks:>3} GPUs: {format_bytes(shown.breakdown.total, 'GB', 1):>7}, "
        f"under autocast {format_bytes(other.breakdown.total, 'GB', 1):>7}, copies {copies}"
    )

# %% [markdown]
# ## Three: your own
# Choose the model and the card that you have. Then press *Arrange it for me*. It searches the configurations of the
# same training and shows what it changed. This is the plan that `fit` finds in [lesson 19](19_will_it_fit.ipynb). Copy
# the line of code and measure the run:
#
# ```python
# from course_utils import compare
# compare(page.run)
# ```
#
# ## Take home
# **Remember** First find the moment of the peak and what fills it. Only a change that touches that moment helps.
#
# **Breaks when** you read an estimate as a promise. Leave a few percent for what no formula covers, then measure.
