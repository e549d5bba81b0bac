# ---
# jupyter:
#   course:
#     minutes: 77
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Exercises 18 · Who is right?
#
# **77 minutes** for all four; each one says its own. You should know what [lesson
# 18](../notebooks/18_who_is_right.ipynb) shows. No GPU is needed.
#
# Each exercise asks for one function. Write it, run the cell, then run the check below it. A check tells you what is
# off, never what the answer is. Stuck? Every exercise has three hints; open one at a time. (“Run All Cells” stops at
# the first check that is unsolved.)

# %%
import torch
from torch import nn
from torch.nn import functional as F

from course_utils import TrainingRun, format_bytes, on_gpu
from course_utils.lessons.calculators import checks as check

# %% [markdown]
# ## 1 · Let it run
# **Difficulty** ●●●○○ · **22 minutes** · **Trains** deciding a claim about bytes with a script of your own
#
# “A linear layer of 2,048 × 2,048, 8 tokens, fp32, AdamW? Weights, gradients, two states: 16 bytes per parameter.” Is
# that the peak? Guess. Then write the referee: a function that trains for a few steps and returns the bytes at four
# moments of a step that is *like all later ones*. Return a dictionary:
#
# | key | moment |
# |---|---|
# | `"begin"` | before the batch is made |
# | `"forward"` | when the loss is computed |
# | `"backward"` | after `loss.backward()`, before the optimizer's step |
# | `"peak"` | the most at any moment of the step |
#
# `make_model()` returns a module on the GPU. `make_batch()` returns a pair `(inputs, targets)` on the GPU. A step makes
# a batch, computes `F.cross_entropy(model(inputs), targets)`, goes backward, steps
# `torch.optim.AdamW(model.parameters())`, and calls `zero_grad()`. The batch and the loss keep their names until the
# step is over. The model's output gets no name. Only the model and the optimizer may survive a step.
#
# Other tensors may be on the GPU when your function is called, and the peak counter may still hold an older, higher
# peak. Count neither. Read `torch.cuda.memory_allocated()` and `torch.cuda.max_memory_allocated()`. The second keeps
# the maximum since `torch.cuda.reset_peak_memory_stats()`. The check calls your function inside `with on_gpu():`.


# %%
def referee(make_model, make_batch) -> dict[str, int]:
    """Bytes that a training needs on the GPU at four moments of a step like all later ones."""
    ### BEGIN SOLUTION Return a dictionary with the keys begin, forward, backward and peak.
    before = torch.cuda.memory_allocated()
    model, found = make_model(), {}
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):  # the first step makes Adam's states
        torch.cuda.reset_peak_memory_stats()
        found["begin"] = torch.cuda.memory_allocated()
        inputs, targets = make_batch()
        loss = F.cross_entropy(model(inputs), targets)
        found["forward"] = torch.cuda.memory_allocated()
        loss.backward()
        found["backward"] = torch.cuda.memory_allocated()
        optimizer.step()
        optimizer.zero_grad()
        found["peak"] = torch.cuda.max_memory_allocated()
        del inputs, targets, loss
    return {moment: size - before for moment, size in found.items()}
    ### END SOLUTION


# %%
check.referee(referee)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# Write one step as in a training script, and read the counter between its lines. Then ask: what makes the first step
# different from the second?
#
# </details>
# <details><summary>Hint 2: what does not count</summary>
#
# Read the counter once before the model is made, and subtract that from every reading. The peak belongs to one step:
# where do you reset it?
#
# </details>
# <details><summary>Hint 3: almost there</summary>
#
# A variable keeps its tensor until you assign something else to it or delete it. At the end of a step, `inputs`,
# `targets` and `loss` still hold theirs. And if the model's output has a name, it survives backward.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# Weights, gradients and two states are 16 bytes per parameter, and all of them are there when backward ends. But with 8
# tokens the peak comes later: AdamW makes a temporary as large as the weights. With 8,192 tokens it comes earlier, in
# backward, and is several times as high. So the claim holds for one moment of the step, not for its peak. A script that
# reads the counter after the first step, or before the optimizer, agrees with the claim.


# %% tags=["solution"]
from functools import partial


def batch(tokens, width):
    inputs = torch.randn(tokens, width, device="cuda")
    return inputs, torch.randint(width, (tokens,), device="cuda")


with on_gpu():
    # makes cuBLAS's workspaces, which stay
    nn.Linear(1, 1, device="cuda")(torch.ones(1, 1, device="cuda")).backward()
    for width, tokens in ((2048, 8), (2048, 8192)):
        layer = partial(nn.Linear, width, width, device="cuda")
        found = referee(layer, partial(batch, tokens, width))
        states = format_bytes(16 * (width + 1) * width, "MB")
        print(f"{tokens:5,} tokens, 16 bytes per parameter: {states}")
        shown = [f"{moment} {format_bytes(size, 'MB')}" for moment, size in found.items()]
        print("             " + ", ".join(shown))

# %% [markdown]
# ## 2 · Find where it breaks
# **Difficulty** ●●●●○ · **25 minutes** · **Trains** knowing what a rule was made for
#
# For each of the three rules below, find a model that breaks it. People use all three, and each holds for many models:
#
# - `"batch"`: *twice the batch, nearly twice the memory.* It is broken if the peak is at most 1.2 times as high with
#   `torch.cat([x, x])` in place of x.
# - `"layers"`: *each layer keeps its input.* Add up the inputs of all modules that own a parameter. The rule is broken
#   if forward keeps at most half of that sum for backward, x and the loss's tensors included.
# - `"gradients"`: *at the peak, activations and all gradients are there.* It is broken if the peak is above the end of
#   forward by less than half of the gradients' bytes. The gradients must be more than a tenth of what forward keeps.
#
# Return a dictionary: for each key a *function* without arguments. The function returns a pair: an `nn.Module` (yours
# or one of `nn`) and its input x of at least 1 MB. Every parameter must learn or be frozen. The check moves both to the
# GPU, takes two steps on `model(x).square().mean()` with AdamW in fp32, and judges the second. `mlp` breaks no rule.
# For two of the three you only need to change its numbers.


# %%
def mlp(layers=6, width=512, tokens=2048):
    pairs = [layer for _ in range(layers) for layer in (nn.Linear(width, width), nn.GELU())]
    return nn.Sequential(*pairs), torch.randn(tokens, width)


# %%
def look(make):
    """Print what each of the three rules says about a model."""
    with on_gpu():
        step = check.second_step(make, "model")
        double = check.second_step(make, "model", times=2)
    times, kept = double.peak / step.peak, step.kept / step.inputs
    share = step.gradients / step.kept
    print(f"batch: doubling it takes {times:.2f} times the memory (broken: at most 1.2)")
    print(f"layers: forward keeps {kept:.2f} bytes per byte that they read (broken: at most 0.5)")
    print(f"gradients: the peak is {step.above:.2f} times theirs above forward (broken: below 0.5)")
    print(f"           they are {share:.2f} of what forward keeps (needed: over 0.1)")


look(mlp)


# %%
def breaks() -> dict:
    """Three functions, one per rule: each makes a model and an input that break the rule."""

    ### BEGIN SOLUTION Return a dictionary of three functions.
    class Shift(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.shift = nn.Parameter(torch.zeros(width))

        def forward(self, x):
            return x + self.shift

    return {
        "batch": lambda: mlp(layers=2, width=4096, tokens=64),
        "layers": lambda: (
            nn.Sequential(*[Shift(1024) for _ in range(6)]),
            torch.randn(1024, 1024),
        ),
        "gradients": lambda: mlp(layers=32, width=512, tokens=1024),
    }
    ### END SOLUTION


# %%
check.breaks(breaks)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# For each rule, ask which bytes it leaves out: those that no batch changes, operations that keep nothing, the moment of
# the peak.
#
# </details>
# <details><summary>Hint 2: layers</summary>
#
# A linear layer needs its input for the gradient of its weight. Which operation on x and a parameter has a gradient
# that needs neither of them? Lesson 05 has a table.
#
# </details>
# <details><summary>Hint 3: gradients</summary>
#
# When backward begins, all activations are there and no gradient is. Each layer then frees what it kept, and makes its
# gradient. If it frees more than it makes, the peak is at the beginning. But the optimizer's temporaries must stay
# below that peak, and one layer's backward must need little compared with the total.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# Weights, gradients and Adam's states do not grow with the batch. An addition keeps nothing: the gradient of a shift is
# a sum of the incoming gradient. And in a deep network the peak is at the beginning of backward, before any gradient
# exists. Nearly every calculator of the lesson adds them. A rule is right for what it was made for. Now you can write
# down a model that breaks it.

# %% tags=["solution"]
for rule, make in breaks().items():
    print(f"— a model that breaks {rule!r}")
    look(make)

# %% [markdown]
# ## 3 · The term in symbols
# **Difficulty** ●●●●○ · **15 minutes** · **Trains** deriving from code the term that every formula lacks
#
# How many bytes does this block keep for its backward pass, for **one token**? Its matrices are *fused*, as in
# inference engines: one makes q, k and v, another makes gate and up. The lesson's block has seven matrices and keeps
# s·b·(22·h + 4·kv + 8·ffn + 4·a + 8) bytes.


# %%
class FusedBlock(nn.Module):
    """A block like Llama's, without its rotary positions."""

    def __init__(self, h, kv, ffn, a):
        super().__init__()
        self.widths, self.head = (h, kv, kv), h // a
        self.norm_1, self.norm_2 = nn.RMSNorm(h), nn.RMSNorm(h)
        self.qkv, self.out = nn.Linear(h, h + 2 * kv, bias=False), nn.Linear(h, h, bias=False)
        self.gate_up, self.down = nn.Linear(h, 2 * ffn, bias=False), nn.Linear(ffn, h, bias=False)

    def forward(self, x):
        q, k, v = self.qkv(self.norm_1(x)).split(self.widths, dim=-1)
        q, k, v = (part.unflatten(-1, (-1, self.head)).transpose(1, 2) for part in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.norm_2(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


# %% [markdown]
# Train it under bf16 autocast, with a flash kernel. The block's input is fp32, and it counts. Take the sizes h, kv (the
# width of a token's keys), ffn and a, the number of query heads. Return a whole number of bytes. Leave out autocast's
# copies of the weights, rounding to blocks of memory, and the kernel's random state.


# %%
def bytes_a_token(h: int, kv: int, ffn: int, a: int) -> int:
    """Bytes that FusedBlock keeps for one token under bf16 autocast with a flash kernel."""
    ### BEGIN SOLUTION Return a whole number of bytes.
    norms = 2 * (4 * h + 4)  # the fp32 residual stream, and one fp32 statistic
    copies = 2 * 2 * h  # one for qkv, one for gate_up
    # q, k, v, the output, and one fp32 number per head
    attention = 2 * h + 2 * kv + 2 * kv + 2 * h + 4 * a
    mlp = 4 * 2 * ffn  # gate and up, SiLU's result, and the product
    return norms + copies + attention + mlp
    ### END SOLUTION


# %%
check.bytes_a_token(bytes_a_token)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# Go through `forward`. Ask of each operation: which tensors does its backward need
# ([lesson 05](../notebooks/05_activations.ipynb)), and which format do they have under autocast
# ([lesson 03](../notebooks/03_mixed_precision.ipynb))? fp32 is 4 bytes, bf16 is 2.
#
# </details>
# <details><summary>Hint 2: the copies</summary>
#
# In the lesson's block, q, k and v read the same fp32 tensor, and still each makes its own copy: autocast caches copies
# of *weights*, not of activations. How many matrices read a norm's output here? Does the matrix after attention need a
# copy, too?
#
# </details>
# <details><summary>Hint 3: almost there</summary>
#
# Slices of one tensor are kept once. SiLU, the product with up, and the last matrix each need something. And small fp32
# numbers are kept, too: by each norm for a token, and by the kernel for a head.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# The fused block keeps $16h + 4kv + 8\text{ffn} + 4a + 8$ bytes, the lesson's block $22h$ instead of $16h$: fusing
# saves three copies for the same arithmetic. In a pure 16-bit recipe both blocks would have $12h$. So autocast keeps
# *more* activations than 16-bit weights do. None of the nine calculators says so, and none asks whether the matrices
# are fused. A simulated forward pass agrees, apart from the kernel's random state:


# %% tags=["solution"]
def requested():
    return torch.cuda.memory_stats()["requested_bytes.all.current"]  # before rounding to blocks


sizes = h, kv, ffn, a = 4096, 1024, 14_336, 32  # Llama 3.1 8B's
tokens = 4096
with on_gpu():
    # makes cuBLAS's workspaces, which stay
    nn.Linear(1, 1, device="cuda")(torch.ones(1, 1, device="cuda")).backward()
    block = FusedBlock(*sizes).to("cuda")
    copies = 2 * sum(weight.numel() for weight in block.parameters() if weight.ndim == 2)
    before = requested()
    x = torch.randn(1, tokens, h, device="cuda", requires_grad=True)
    with torch.autocast("cuda", torch.bfloat16):
        y = block(x)
    kept = requested() - before - y.nbytes - copies
print(f"Llama 3.1 8B, fused: {bytes_a_token(*sizes):,} bytes per token; weighed: ", end="")
print(f"{kept // tokens:,}, and {kept % tokens:,} bytes for all tokens together")
print(f"not fused: {bytes_a_token(*sizes) + 6 * h:,}")

# %% [markdown]
# ## Unchecked · Your own erratum
# **Difficulty** ●●●●● · **15 minutes, or an evening** · **Trains** being wrong in public, and correcting it
#
# Find a number about the memory of training that does not hold: in a blog, a README, a lecture, or your own notes. It
# must not be on [this course's list](../docs/errata.md). Return a dictionary:
#
# | key | what |
# |---|---|
# | `claim` | the claim in a sentence, with its number in digits |
# | `source` | where you read it, and when (with the year) |
# | `said` | the number claimed |
# | `evidence` | a function without arguments that computes the right number, in the unit of `said` |
# | `lesson` | which lesson explains it |
#
# This task has no check. A program cannot know whether you quote the source fairly, or whether your evidence is about
# its claim. Show both to someone. Nothing found? Look at your own notes of lesson 01, or at the guesses that you
# locked: some of them were wrong, too.


# %%
def erratum() -> dict:
    """A claim that does not hold, with evidence: keys claim, source, said, evidence and lesson."""

    ### BEGIN SOLUTION Return a dictionary with these five keys.
    def gradients_in_gb() -> float:
        return 2 * TrainingRun("gpt2-xl").model.parameters / 10**9

    return {
        "claim": "The 16-bit gradients of GPT-2 XL are 1.5 GB",
        "source": "my own notes, 2026-11-21: I wrote down parameters, not bytes",
        "said": 1.5,
        "evidence": gradients_in_gb,
        "lesson": 1,
    }
    ### END SOLUTION


# %%
mine = erratum()
right = mine["evidence"]()
print(f"“{mine['claim']}” ({mine['source']})")
print(f"claimed {mine['said']:g}, computed {right:g}: {right / mine['said']:.3g} times as much")

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# Search for "memory" and the name of a model that the course has as a preset. Numbers in prose are the easiest to find
# and to check.
#
# </details>
# <details><summary>Hint 2: evidence</summary>
#
# `course_utils.estimate(run).total / 10**9`, a count of parameters, or plain arithmetic. It has to return one number,
# in the unit of the claim. Does it return the same number twice?
#
# </details>
# <details><summary>Hint 3: before you publish</summary>
#
# Look for a reading that makes the claim right. Divide the right number by the claimed one: is it about 1,000, a
# million, or 1.074? Then only the unit differs.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# A correction is useful when it says what was claimed, where, and how anybody can check it. If yours is about a public
# text, tell its authors. If it is about this course, tell us.
