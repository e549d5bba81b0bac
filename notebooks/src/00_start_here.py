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
# # 00 · Start here
#
# **20 minutes.** You should know some Python, and that a tensor is a block of numbers. Nothing else, and no GPU.
#
# This course answers one question: *where did the GPU memory go?* It never asks you to believe a figure. Each one is
# computed from a formula, then measured on a training step that really runs, and what is left between the two is
# explained.
#
# Click into the first grey cell below and press **Shift + Enter**: that runs it and moves on.

# %% [markdown]
# ## What can this machine do?

# %% tags=["nbval-ignore-output", "this-machine"]
from course_utils.cli.doctor import report

report()

# %% [markdown]
# The lower half is what matters. Every measurement in the course carries a [label](../docs/glossary.md#provenance) that
# says where it comes from:
#
# | label | what it is |
# |---|---|
# | *live on …* | a real GPU, this one, now |
# | *simulated GPU* | PyTorch's genuine step, operator by operator, on tensors that have no memory behind them |
# | *traced on the CPU* | a small model really trained on your processor: real numbers, real losses |
# | *recorded on …* | measured or simulated earlier, on the device that it names, with its date |
#
# There is no fifth. Where a GPU is missing, the course [simulates](../docs/glossary.md#simulated-gpu) and says so; it
# never shows you one thing as another.

# %% [markdown]
# ## How a lesson works
# Each section has four beats: **predict**, **estimate**, **measure**, **explain the gap**. You make the first one. A
# guess, however wild, makes you remember the answer; reading along does not. Type it in and lock it with **Enter**. The
# answer, and whatever else would give it away, stays folded until then, or until you press *Show me*. Your guesses stay
# on this machine.
#
# Try it on the oldest trap of the field. A graphics card is sold with 80 GB. Inside, its memory is counted in powers of
# two: about 80 [*GiB*](../docs/glossary.md#gb-and-gib), of 2³⁰ bytes each. **How many GB (10⁹ bytes) are 80 GiB?**

# %%
from course_utils.interactive.guesses import predict, reveal, waits_for

predict("00.gib", unit="GB")

# %%
from course_utils.figures import bars
from course_utils.units import GB, GiB, format_bytes

reveal("00.gib", 80 * GiB)
bars({"80 GB": 80 * GB, "80 GiB": 80 * GiB}, f"A GiB is {100 * (GiB / GB - 1):.1f} % more than a GB")

# %% [markdown]
# That is the difference between a run that fits and one that dies. So every figure in this course says which of the two
# it is. `format_bytes` writes them, `parse_bytes` reads them. The last two lines are what two cards' drivers report.

# %%
from course_utils import gpu, parse_bytes

for text in ("80 GB", "80 GiB", "24 GiB"):
    size = parse_bytes(text)
    print(f"{text:>14s} = {size:>14,} bytes = {format_bytes(size, 'GB')} = {format_bytes(size, 'GiB')}")
for name in ("A100-80GB", "H100-80GB"):
    size = gpu(name).memory
    print(f"{name:>14s} = {size:>14,} bytes = {format_bytes(size, 'GB')} = {format_bytes(size, 'GiB')}")

# %% [markdown]
# ## One tensor's bytes
# Everything that fills a GPU is a tensor. Here is one that you will meet in every lesson: the numbers that flow between
# two layers of GPT-2 XL. It has b = 8 sequences of s = 1,024 tokens, and h = 1,600 numbers for each token, in
# [bf16](../docs/glossary.md#fp16-and-bf16).
#
# **Your guess.** How many MB?

# %%
predict("00.tensor", unit="MB")

# %% [markdown]
# ### Estimate
# Number of elements times bytes an element. bf16 has 16 bits, which is 2 bytes.
#
# $$\text{bytes} = 2 \cdot b \cdot s \cdot h$$

# %%
waits_for("00.tensor")
b, s, h = 8, 1024, 1600
estimated = 2 * b * s * h
print(f"2 · {b} · {s:,} · {h:,} = {estimated:,} bytes = {format_bytes(estimated, 'MB')}")

# %% [markdown]
# ### Measure
# Make it, and ask PyTorch how large the [storage](../docs/glossary.md#storage) behind it is.

# %%
import torch

stream = torch.empty(b, s, h, dtype=torch.bfloat16)
measured = stream.untyped_storage().nbytes()
reveal("00.tensor", measured, unit="MB")
print(f"estimate − measured: {estimated - measured} bytes")

# %% [markdown]
# ### The gap
# What is left, estimated minus measured, is [the gap](../docs/glossary.md#gap). It is nothing for a large tensor. Now a
# small one: the loss of a training step is a single number in fp32. On a GPU it does not take 4 bytes, because PyTorch
# hands out a GPU's memory in multiples of one block size, a power of two. A CPU's cache works in lines of 64 bytes, a
# disk in blocks of 4,096. The GPU's blocks are between the two. **How many bytes does the loss take?**

# %%
predict("00.scalar", unit="B")

# %% [markdown]
# Ask torch itself, in plain torch code. Inside `with on_gpu():`, `"cuda"` is your GPU where there is one. Elsewhere it
# is a simulated one, and `torch.cuda` answers for it. The block prints which it was.

# %%
from course_utils import on_gpu

waits_for("00.scalar")
with on_gpu():
    before = torch.cuda.memory_allocated()
    loss = torch.zeros((), device="cuda")  # change this
    allocated = torch.cuda.memory_allocated() - before
print(f"{loss.shape}, {loss.dtype}: {loss.nbytes} bytes of numbers, {allocated} bytes allocated")

# %%
reveal("00.scalar", allocated, unit="B")

# %% [markdown]
# PyTorch's [caching allocator](../docs/glossary.md#caching-allocator) hands out a GPU's memory in multiples of 512
# bytes (`kMinBlockSize` in its source). For one number it is a waste; for a model it is a rounding error. Remember it:
# it is the whole gap in some tables to come. Each section of a lesson has a line that ends in `# change this`. Here,
# make `()` into `(100,)`, then `(200,)`: predict, then run.
#
# Whatever torch code you write runs in such a block, and what you make in it lives on in the next. Only values do not
# exist on a simulated GPU: to print a loss, compute on the CPU.

# %% [markdown]
# ## A slider
# What makes that tensor large? Move a control and watch. With the keyboard: **Tab** to a slider, then the **arrow
# keys**; in a menu, **Space** opens it.

# %%
from course_utils.interactive.widgets import tensor_slider

tensor_slider(batch=8, sequence=1024, hidden=1600, dtype="bf16")

# %% [markdown]
# Doubling any of the three doubles the bytes, and so does going from bf16 to fp32. Nothing in this course is more
# complicated than that product; there are only many such tensors, and they don't all live at the same time.

# %% [markdown]
# ## A whole training step
# One training [*run*](../docs/glossary.md#run) is one line of Python. This is GPT-2, the small one, with 8 sequences of
# 1,024 tokens. **How much is allocated when its training step is at its fullest?** Its
# [activations](../docs/glossary.md#activations) count, its [gradients](../docs/glossary.md#gradients), its [optimizer
# states](../docs/glossary.md#optimizer-states).

# %%
from course_utils import TrainingRun

run = TrainingRun("gpt2", micro_batch=8, seq_len=1024)  # change this
print(run)
print(f"its weights alone, in fp32: {format_bytes(4 * run.model.parameters)}")
predict("00.gpt2", unit="GB")

# %% [markdown]
# **Estimate.** The table is headed by the moment when the step is at its fullest: the loss has just begun to go
# backward. Its *weight copies* are the weights once more, in 16 bits, and its
# [*temporaries*](../docs/glossary.md#temporaries) last for a part of the step only.

# %%
from course_utils import estimate

waits_for("00.gpt2")
estimate(run)

# %% [markdown]
# **Measure.** The next picture shows one step from left to right: after each allocation, how much there is of each
# kind.

# %%
from course_utils import measure
from course_utils.figures import timeline

ran = measure(run)
reveal("00.gpt2", ran.peak)
timeline(ran, "GPT-2: most of the memory comes and goes within a step", steps=[2])

# %% [markdown]
# You just watched one training step, allocation by allocation. The estimate before it came from formulas alone.
# `compare` lays the two side by side, kind by kind.

# %%
from course_utils import compare

compare(run)

# %% [markdown]
# ## A real one, on your processor
# A simulation has no numbers in it, so nothing is learned. Small models can be trained for real. This one is a tiny
# Llama, ten steps on the same random tokens: the loss must fall.

# %% tags=["nbval-ignore-output"]
tiny = TrainingRun("tiny-llama", micro_batch=2, seq_len=128, precision="fp32", attention="eager")
trained = compare(tiny, source="cpu", steps=10)
print(f"{tiny.model.parameters:,} parameters")
print("loss:", " ".join(f"{loss:.2f}" for loss in trained.measurement.losses))

# %%
trained

# %% [markdown]
# **The gap.** Estimate minus measured is negative: something is there that the formulas don't count. Which tensors are
# it?

# %%
real = trained.measurement
counters = [item for item in real.alive_at(real.peak_event) if item.kind == "optimizer_states" and item.shape == ()]
print(f"{len(counters)} optimizer states of a single number: {sum(item.bytes for item in counters):,} bytes")

# %% [markdown]
# They are Adam's step counters, one for each parameter tensor, in blocks of 512 bytes, as the course counts on every
# device so that figures compare. On a GPU they stay in the host's memory, and the estimate leaves them out; on a CPU
# there is only one memory, and the tracker sees them. That is what *explain the gap* means: not "about right", but
# which tensor.

# %% [markdown]
# ## Where you are
# Each lesson has exercises whose checks tell you at once whether you are right, and a short quiz. The course remembers
# what you have passed, on this machine alone. Come back to this cell, or type `python3 -m course_utils progress`.
#
# **Short of time?** The core path takes ten hours: 00, 01, 02, 05, 06, 07, 10, 14, with some of their exercises
# ([by the clock](../docs/syllabi.md)). It needs nothing that it leaves out. Lesson 12, on
# [LoRA](../docs/glossary.md#lora), may follow any time after 05. Each lesson ends in code for a script of your own:
# the [recipes](../docs/recipes.md).
#
# Looking for something that you have read? `from course_utils import find`, then `find("reserved memory")`: lessons,
# exercises, glossary and more, as links. A word that is new to you is a link to the
# [glossary](../docs/glossary.md) where a lesson first uses it.
#
# Want to turn every knob at once? [The Explorer](explorer.ipynb) has all choices of a run on one page, its peak beside
# a card, and what to change next.

# %% tags=["nbval-ignore-output"]
from course_utils.interactive.progress import progress

progress()

# %% [markdown]
# ## Take home
# **Remember** Every byte on the GPU belongs to a tensor that you can name: its shape, its type, and how long it lives.
#
# **Breaks when** somebody writes GB and means GiB: 7 % of your card are gone.
#
# **Cheat-sheet line** bytes = elements · bytes an element (fp32 4, bf16 and fp16 2, fp8 1), rounded up to 512 · 1 GiB =
# 1.074 GB.
#
# Go on with [lesson 01: where did the memory go?](01_where_did_the_memory_go.ipynb) Save your notebooks as you go
# (Ctrl+S); an update of the course never overwrites what you changed.
