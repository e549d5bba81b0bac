# ---
# jupyter:
#   course:
#     minutes: 20
#     cpu_seconds: 15
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 00 · Start here
#
# **20 minutes.** You should know some Python, and that a tensor is a block of numbers. You need no GPU.
#
# This course answers one question: *where did the GPU memory go?* You need not believe its numbers: a formula estimates
# them, and a training step that really runs is measured or simulated. If the two differ, the lesson explains why.
#
# Click into the first gray cell and press **Shift + Enter**: that runs it and moves on.

# %% [markdown]
# ## What can this machine do?

# %% tags=["nbval-ignore-output", "this-machine"]
from course_utils.cli.doctor import report

report()

# %% [markdown]
# Every measurement has a [label](../docs/glossary.md#provenance) that names its origin:
#
# | label | what it is |
# |---|---|
# | *live on …* | measured now, on this machine's real GPU |
# | *simulated GPU* | PyTorch's real step, operator by operator, on tensors with no memory behind them |
# | *traced on the CPU* | a small model that really trains on your processor: real numbers, real losses |
# | *recorded on …* | measured or simulated earlier, on the named device, with its date |
#
# No kind is ever shown as another. If you have no GPU, the course [simulates](../docs/glossary.md#simulated-gpu) one.

# %% [markdown]
# ## How a lesson works
# Most sections have four parts: **predict**, **estimate**, **measure**, **explain the gap**. A guess, even a wild one,
# makes you remember the answer. Reading along does not.
#
# Type your guess and lock it with **Enter**, or choose *Show me*: either unfolds the answer and everything that gives
# it away. Your guesses stay on this machine.
#
# Try it on an old trap. A card sold with 80 GB has about 80 [*GiB*](../docs/glossary.md#gb-and-gib), each of 2³⁰ bytes.
# **How many GB (10⁹ bytes) are 80 GiB?**

# %%
from course_utils.interactive.guesses import predict, reveal, waits_for

predict("00.gib", unit="GB")

# %%
from course_utils.figures import bars
from course_utils.units import GB, GiB, format_bytes

reveal("00.gib", 80 * GiB)
title = f"A GiB is {100 * (GiB / GB - 1):.1f} % more than a GB"
bars({"80 GB": 80 * GB, "80 GiB": 80 * GiB}, title)

# %% [markdown]
# This can decide whether a run fits, so every number here says which it is in. The last two lines are what the drivers
# of two cards report.

# %%
from course_utils import gpu, parse_bytes

for text in ("80 GB", "80 GiB", "24 GiB"):
    size = parse_bytes(text)
    gb, gib = format_bytes(size, "GB"), format_bytes(size, "GiB")
    print(f"{text:>14s} = {size:>14,} bytes = {gb} = {gib}")
for name in ("A100-80GB", "H100-80GB"):
    size = gpu(name).memory
    gb, gib = format_bytes(size, "GB"), format_bytes(size, "GiB")
    print(f"{name:>14s} = {size:>14,} bytes = {gb} = {gib}")

# %% [markdown]
# ## One tensor's bytes
# Nearly everything that a training script puts on a GPU is a tensor. This one flows between two layers of the language
# model GPT-2 XL. It has b = 8 sequences of s = 1,024 tokens (pieces of words), and h = 1,600 numbers per token, in 16
# bits each: [bf16](../docs/glossary.md#fp16-and-bf16).
#
# **Your guess.** How many MB?

# %%
predict("00.tensor", unit="MB")

# %% [markdown]
# ### Estimate
# Multiply the number of elements by the bytes per element, 2 in bf16.
#
# $$\text{bytes} = 2 \cdot b \cdot s \cdot h$$

# %%
waits_for("00.tensor")
b, s, h = 8, 1024, 1600
estimated = 2 * b * s * h
print(f"2 · {b} · {s:,} · {h:,} = {estimated:,} bytes = {format_bytes(estimated, 'MB')}")

# %% [markdown]
# ### Measure
# Make it, and ask PyTorch how large its [storage](../docs/glossary.md#storage) is, the memory behind the tensor.

# %%
import torch

stream = torch.empty(b, s, h, dtype=torch.bfloat16)
measured = stream.untyped_storage().nbytes()
reveal("00.tensor", measured, unit="MB")
print(f"estimated − measured: {estimated - measured} bytes")

# %% [markdown]
# ### The gap
# Estimated minus measured is [the gap](../docs/glossary.md#gap): here it is 0.
#
# Now a small tensor: the loss, a single fp32 number that says how wrong the model is. On a GPU it takes more than its 4
# bytes, because PyTorch hands out memory in multiples of one block size. That is a power of two, between a CPU's cache
# line (64 bytes) and a disk's block (4,096). **How many bytes does the loss take?**

# %%
predict("00.scalar", unit="B")

# %% [markdown]
# Inside `with on_gpu():`, `"cuda"` and `torch.cuda` are your GPU or, if you have none, a simulated one. The first line
# of output says which.

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
# This is the block size of PyTorch's [caching allocator](../docs/glossary.md#caching-allocator) (`kMinBlockSize` in its
# source). For a model it is a rounding error, but in some later tables it is the whole gap. A tensor of over 1 MiB may
# get a block that is up to 1 MiB too large ([lesson 12](12_allocator_and_fragmentation.ipynb)).
#
# Each section of a lesson has a line that ends in `# change this`. Change `()` to `(100,)`, then to `(200,)`: predict,
# then run.
#
# A `with on_gpu():` block runs any PyTorch code, and the next one can use its tensors. But a simulated GPU has no
# values: to print a loss, compute it on the CPU.

# %% [markdown]
# ## A slider
# What makes the first tensor large? Move a control. On the keyboard: **Tab** to a slider, then the **arrow keys**.
# **Space** opens a menu.

# %%
from course_utils.interactive.widgets import tensor_slider

tensor_slider(batch=8, sequence=1024, hidden=1600, dtype="bf16")

# %% [markdown]
# Double b, s or h, and the bytes double, as they do from bf16 to fp32. Nothing in this course is harder than this
# product. But there are many such tensors, and not all live at the same time.

# %% [markdown]
# ## A whole training step
# A training step has three phases: *forward* computes the loss, *backward* a [gradient](../docs/glossary.md#gradients)
# for each weight, and the *optimizer* changes the weights.
#
# One training [*run*](../docs/glossary.md#run) is one line of Python, here for the small GPT-2. **How much is
# [allocated](../docs/glossary.md#allocated-and-reserved) when its step is at its fullest?** Count the weights, what
# forward keeps for backward (the [activations](../docs/glossary.md#activations)), the gradients, and what the optimizer
# remembers (its [states](../docs/glossary.md#optimizer-states)).

# %%
from course_utils import TrainingRun

run = TrainingRun("gpt2", micro_batch=8, seq_len=1024)  # change this
print(run)
print(f"the weights, in fp32: {format_bytes(4 * run.model.parameters)}")
predict("00.gpt2", unit="GB")

# %% [markdown]
# **Estimate.** The heading names the fullest moment: backward has just begun, at the loss. *Weight copies* are the
# weights in 16 bits. [*Temporaries*](../docs/glossary.md#temporaries) live only for a part of the step.

# %%
from course_utils import estimate

waits_for("00.gpt2")
estimate(run)

# %% [markdown]
# **Measure.** The figure shows how much of each kind there is after each allocation of one step.

# %%
from course_utils import measure
from course_utils.figures import timeline

ran = measure(run)
reveal("00.gpt2", ran.peak)
timeline(ran, "GPT-2: most of the memory comes and goes within a step", steps=[2])

# %% [markdown]
# `compare` shows both, kind by kind, and says where the gap comes from.

# %%
from course_utils import compare

waits_for("00.gpt2")
compare(run)

# %% [markdown]
# Three lines are totals. *Tensors* is the sum of the kinds. The *allocator's counter* adds the rests of blocks that are
# larger than their tensors. *Reserved* is all that PyTorch has taken from the driver: it also has free blocks, kept for
# the next request. No formula gives these two. `nvidia-smi` would show even more, because CUDA needs memory of its own,
# its [context](../docs/glossary.md#context-cuda).
#
# **The gap** is what you saw at the loss: a tensor takes whole blocks of 512 bytes. The formula counts activations and
# temporaries without that, and leaves out tensors of a few numbers.

# %% [markdown]
# ## A real training, on your processor
# A simulation learns nothing, but your processor can train a small model. This tiny Llama takes ten steps on the same
# random tokens: the loss must fall.

# %% tags=["nbval-ignore-output"]
tiny = TrainingRun("tiny-llama", micro_batch=2, seq_len=128, precision="fp32", attention="eager")
trained = compare(tiny, source="cpu", steps=10)
print(f"{tiny.model.parameters:,} parameters")
print("loss:", " ".join(f"{loss:.2f}" for loss in trained.measurement.losses))

# %%
trained

# %% [markdown]
# **The gap** is negative: the step holds something that the formulas do not count. Which tensors?

# %%
real = trained.measurement
alive = real.alive_at(real.peak_event)
states = [item for item in alive if item.kind == "optimizer_states"]
counters = [item for item in states if item.shape == ()]
total = sum(item.bytes for item in counters)
print(f"{len(counters)} optimizer states with one number each: {total:,} bytes")

# %% [markdown]
# These are the step counters of Adam, the optimizer: one per parameter tensor. (The course counts blocks of 512 bytes
# on every device.) With a GPU they stay in the host's memory, so the estimate leaves them out. A CPU has only one
# memory, and the tracker sees them there. *Explain the gap* means exactly this: not "about right", but which tensor.

# %% [markdown]
# ## Where you are
# Most lessons have a short quiz, and exercises whose checks tell you at once whether you are right. The course
# remembers what you pass, on this machine only. Come back to this cell, or type `python3 -m course_utils progress`.
#
# **Short of time?** The core path takes ten hours: 00, 01, 02, 05, 06, 08, 12, 19, with some of their exercises ([by
# the clock](../docs/syllabi.md)). It needs nothing from the others. Lesson 16, on [LoRA](../docs/glossary.md#lora), may
# follow any time after 05. Lessons end in [recipes](../docs/recipes.md) for your own script.
#
# **Looking for something?** `from course_utils import find`, then `find("reserved memory")`: lessons, exercises,
# glossary and more, as links. Lessons link new words to the [glossary](../docs/glossary.md).
#
# **Does every lesson print here what it should?** In a terminal, `python3 -m course_utils test` executes them all and
# compares. If you installed the course by pip: `pytest --nbval notebooks`.
#
# **Want to turn every knob at once?** [The Explorer](explorer.ipynb) has all choices of a run, its peak next to a card,
# and what to change next.

# %% tags=["nbval-ignore-output"]
from course_utils.interactive.progress import progress

progress()

# %% [markdown]
# ## Take home
# **Remember** A training step computes with tensors that you can name: each has a shape, a type and a lifetime. The
# card also holds CUDA's context, workspaces of libraries, rests of blocks, and free blocks that PyTorch keeps.
#
# **Breaks when** somebody writes GB and means GiB: 7 % of your card is gone.
#
# **Cheat-sheet line** bytes = elements · bytes per element (fp32 4, bf16 and fp16 2, fp8 1), rounded up to 512; a large
# tensor's block may be up to 1 MiB larger · 1 GiB = 1.074 GB.
#
# Go on with [lesson 01: where did the memory go?](01_where_did_the_memory_go.ipynb) Save your notebooks as you go
# (Ctrl+S). An update of the course never overwrites what you changed.
