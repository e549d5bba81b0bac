# ---
# jupyter:
#   course:
#     minutes: 20
#     cpu_seconds: 10
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
# This course answers one question: *where did the GPU memory go?* Here is the whole answer in one picture. Click into
# the gray cell and press **Shift + Enter**: that runs it and moves on.

# %%
from course_utils import TrainingRun, measure
from course_utils.figures import timeline

run = TrainingRun("gpt2", micro_batch=8, seq_len=1024)
timeline(measure(run), "One training step: most of its memory comes and goes", steps=[2])

# %% [markdown]
# This is a training step of the small GPT-2, on 8 sequences of 1,024 tokens (pieces of words). *Forward* computes the
# loss, *backward* a gradient for each weight, and the *optimizer* changes the weights.
#
# | layer | what it is | how long it lives |
# |---|---|---|
# | parameters | the weights | the whole training |
# | [optimizer states](../docs/glossary.md#optimizer-states) | what the optimizer remembers | the whole training |
# | [activations](../docs/glossary.md#activations) | what forward keeps for backward | up in forward, down in backward |
# | [gradients](../docs/glossary.md#gradients) | how to change each weight | from backward to the step's end |
# | weight copies | the weights in 16 bits | from forward to backward |
# | [temporaries](../docs/glossary.md#temporaries) | results on the way to others | a moment |
#
# The model itself is the thin strip at the bottom. Each lesson explains a part of this picture, or makes one smaller.

# %% [markdown]
# ## The smallest tensor
# The loss is a single fp32 number of 4 bytes. On a GPU it takes more. PyTorch hands out memory in multiples of one
# block size: a power of two, between a CPU's cache line (64 bytes) and a disk's block (4,096).
#
# **Your guess.** How many bytes does the loss take? Type a number and lock it with **Enter**. Even a wild guess makes
# you remember the answer. It stays on this machine.

# %%
from course_utils.interactive.guesses import predict, reveal

predict("00.scalar", unit="B")

# %% [markdown]
# Ask PyTorch. Inside `with on_gpu():`, `"cuda"` and `torch.cuda` are your GPU or, if you have none, a
# [simulated](../docs/glossary.md#simulated-gpu) one. The answer stays folded until you guess, or choose *Show me*.

# %%
import torch

from course_utils import on_gpu

with on_gpu():
    before = torch.cuda.memory_allocated()
    loss = torch.zeros((), device="cuda")  # change this
    allocated = torch.cuda.memory_allocated() - before
reveal("00.scalar", allocated, unit="B")
print(f"{loss.nbytes} bytes of numbers, {allocated} bytes allocated")

# %% [markdown]
# This is the smallest block of PyTorch's [caching allocator](../docs/glossary.md#caching-allocator) (`kMinBlockSize` in
# its source). For a model it is a rounding error. In some later tables it is all that an estimate misses.
#
# Sections have a line that ends in `# change this`. Change `()` to `(100,)`, then to `(200,)`: predict, then run.

# %% [markdown]
# ## What can this machine do?

# %% tags=["nbval-ignore-output", "this-machine"]
from course_utils.cli.doctor import report

report()

# %% [markdown]
# Every measurement has a [label](../docs/glossary.md#provenance) that names its origin. You saw one under the picture.
#
# | label | what it is |
# |---|---|
# | *live on …* | measured now, on this machine's real GPU |
# | *simulated GPU* | PyTorch's real step, operator by operator, on tensors with no memory behind them |
# | *traced on the CPU* | a small model that really trains on your processor: real numbers, real losses |
# | *recorded on …* | measured or simulated earlier, on the named device, with its date |
#
# No kind is ever shown as another. A simulated GPU counts bytes, but has no values: to print a loss, compute it on the
# CPU.

# %% [markdown]
# ## How a lesson works
# Most sections have four parts: **predict**, **estimate**, **measure**, **explain the gap**. You have predicted one
# tensor. Now estimate any: the number of elements times the bytes per element. Then measure what PyTorch allocates for
# its [storage](../docs/glossary.md#storage), the memory behind it. [The gap](../docs/glossary.md#gap) is estimated
# minus measured.
#
# **Your turn.** In some cells you write a line yourself. Here two of three gaps are not 0. Explain them, and change the
# line until all are. (In [bf16](../docs/glossary.md#fp16-and-bf16) a number has 16 bits.)


# %%
def block_bytes(elements, bytes_each):
    """Return the bytes that PyTorch allocates for a tensor."""
    return elements * bytes_each  # write this line


tensors = {
    "a loss": ((), torch.float32),
    "a bias of GPT-2 XL": ((1600,), torch.bfloat16),
    "between two of its layers": ((16, 1024, 1600), torch.bfloat16),  # 16 sequences
}
with on_gpu():
    for name, (shape, dtype) in tensors.items():
        before = torch.cuda.memory_allocated()
        tensor = torch.empty(shape, dtype=dtype, device="cuda")
        gap = block_bytes(tensor.numel(), dtype.itemsize) + before - torch.cuda.memory_allocated()
        print(f"{name}:", f"Not yet, the gap is {gap:+} bytes." if gap else "Right.")
        del tensor

# %% [markdown]
# <details><summary>The line</summary>
#
# `return -(-elements * bytes_each // 512) * 512`: whole blocks of 512 bytes. Python's `//` rounds down, so two minus
# signs make it round up. A tensor of over 1 MiB may get a block that is up to 1 MiB too large ([lesson
# 12](12_allocator_and_fragmentation.ipynb)).
#
# </details>
#
# Nothing in this course is harder than such a line. But there are many tensors, and not all live at the same time.

# %% [markdown]
# ## GB or GiB?
# 1 GB is 10⁹ bytes, 1 [GiB](../docs/glossary.md#gb-and-gib) is 2³⁰ bytes. A card sold with 80 GB has about 80 *GiB*.
# Here is what the drivers of two cards report. Predict: is an `"A100-40GB"` closer to 40 GB or to 43? Add it.

# %%
from course_utils import gpu

for name in ("A100-80GB", "H100-80GB"):  # change this
    size = gpu(name).memory
    print(f"{name:>9}: {size:>14,} bytes = {size / 10**9:.1f} GB = {size / 2**30:.1f} GiB")

# %% [markdown]
# The 7 % between the two can decide whether a run fits, so every number in this course says which it is in.

# %% [markdown]
# ## Twice the batch
# Back to the picture. Its line `TrainingRun(...)` is a [*run*](../docs/glossary.md#run): a training in one line. It
# peaks at the loss, when backward has just begun.
#
# **Your guess.** Take 16 sequences instead of 8. Which layers of the picture double? How much is
# [allocated](../docs/glossary.md#allocated-and-reserved) at the peak?

# %%
predict("00.gpt2", unit="GB")

# %%
from course_utils import compare, estimate

doubled = estimate(run.replace(micro_batch=16))  # change this
reveal("00.gpt2", doubled.total)
doubled

# %% [markdown]
# Activations and temporaries belong to the batch, so they double. The rest belongs to the model. This is a formula: no
# step was taken. Is it right? `compare` puts it next to the step of the picture.

# %%
compare(run)

# %% [markdown]
# Three lines are totals. *Tensors* is the sum of the kinds. The *allocator's counter* adds the unused ends of blocks.
# *Reserved* is all that PyTorch has taken from the driver: it also has free blocks, kept for the next request. No
# formula gives these two. `nvidia-smi` shows even more, because CUDA needs memory of its own, its
# [context](../docs/glossary.md#context-cuda).
#
# **The gap** has two parts, in the last line: blocks of 512 bytes, which the formula ignores for activations and
# temporaries, and tensors of a few numbers. *Explain the gap* means exactly this: not "about right", but which bytes.

# %% [markdown]
# ## Where you are
# Lessons have a quiz, and exercises whose checks tell you at once whether you are right. This table remembers what you
# pass, on this machine only. In a terminal it is `python3 -m course_utils progress`.
#
# **Short of time?** The core path takes eleven hours: 00, 01, 02, 05, 06, 08, 12, 19, with some of their exercises
# ([by the clock](../docs/syllabi.md)). It needs nothing from the others. Lessons 16 and 17, on
# [LoRA](../docs/glossary.md#lora) and [quantization](../docs/glossary.md#quantization), may follow any time after 05.
# Lessons end in [recipes](../docs/recipes.md) for your own script.
#
# **Looking for something?** `from course_utils import find`, then `find("reserved memory")`: lessons, exercises,
# glossary and more, as links. [The Explorer](explorer.ipynb) has all choices of a run on one page.
#
# **Does every lesson print here what it should?** `python3 -m course_utils test` compares. If you installed the course
# by pip: `pytest --nbval notebooks`.

# %% tags=["nbval-ignore-output"]
from course_utils.interactive.progress import progress

progress()

# %% [markdown]
# ## Take home
# **Remember** A training step computes with tensors that you can name: each has a shape, a type and a lifetime. The
# card also holds CUDA's context, workspaces of libraries, unused ends of blocks, and free blocks that PyTorch keeps.
#
# **Breaks when** somebody writes GB and means GiB: 7 % of your card is gone.
#
# **Cheat-sheet line** bytes = elements · bytes per element (fp32 4, bf16 and fp16 2, fp8 1), rounded up to 512; a large
# tensor's block may be up to 1 MiB larger · 1 GiB = 1.074 GB.
#
# Go on with [lesson 01: where did the memory go?](01_where_did_the_memory_go.ipynb) Save your notebooks as you go
# (Ctrl+S). An update of the course never overwrites what you changed.
