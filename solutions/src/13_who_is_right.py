# ---
# jupyter:
#   course:
#     minutes: 60
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Exercises 13 · Who is right?
#
# **60 minutes** for all five; each one says its own. You should know what [lesson
# 13](../notebooks/13_who_is_right.ipynb) shows. No GPU is needed.
#
# Each exercise asks for one function. Write it, run the cell, then run the check below it. A check tells you what is
# off, never what the answer is. Stuck? Every exercise has three hints; open one at a time. (“Run All Cells” stops at
# the first check that is unsolved.)

# %%
from course_utils import TrainingRun, estimate, format_bytes
from course_utils.lessons.calculators import checks as check

# %% [markdown]
# ## 1 · Which unit did they mean?
# **Difficulty** ●●○○○ · **8 minutes** · **Trains** telling GB from GiB by the figures alone
#
# A report says "15.9" and no unit that you trust. You know how many bytes there really were. Return `"GB"` if the
# number is right in GB, `"GiB"` if it is right in GiB, and `"neither"` otherwise. Right means within 1 % of it.


# %%
def unit_meant(number: float, size: int) -> str:
    """The unit in which `number` says `size` bytes to within 1 %: "GB", "GiB" or "neither"."""
    ### BEGIN SOLUTION Return "GB", "GiB" or "neither".
    for name, one in (("GB", 10**9), ("GiB", 2**30)):
        if abs(number * one / size - 1) <= 0.01:
            return name
    return "neither"
    ### END SOLUTION


# %%
check.unit_meant(unit_meant)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# Turn the number into bytes twice: once as if it were GB, once as if it were GiB.
#
# </details>
# <details><summary>Hint 2: how near is near?</summary>
#
# 1 % is a part of the size, so compare a ratio with 1. A fixed number of bytes would be too much for small sizes and
# too little for large ones.
#
# </details>
# <details><summary>Hint 3: almost there</summary>
#
# `abs(number * 10**9 / size - 1) <= 0.01` is the question for GB. The number can be too large or too small.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# The two units differ by 7.4 %, so a tolerance of 1 % can never take one for the other. Of figures rounded to whole
# gigabytes it cannot always be told: below about 14 GB, where the two differ by less than one, both can give the same.

# %% [markdown]
# ## 2 · The last percent of a published figure
# **Difficulty** ●●●●○ · **15 minutes** · **Trains** explaining what a GPU counted, term by term
#
# An H800 counted 62.69 GiB (`torch.cuda.max_memory_allocated()`) in a training step of CS336's 2.7B model, 4 sequences
# of 512 tokens, bf16 autocast ([ShibukiZero/assignment2-systems](https://github.com/ShibukiZero/assignment2-systems) at
# 00f1480, `artifacts/experiments/ch1/1_1_6_memory/summary.md`). The course's network of the same sizes, with torch's
# own operations, comes to 4 % less. That code writes three operations out, in this order:
#
# | name | torch has | that code has |
# |---|---|---|
# | `norm` | `F.rms_norm`, eps 1e-5 | in fp32: x times the inverse root of its mean square + eps; then the weight |
# | `silu` | `F.silu` | x times its sigmoid |
# | `softmax` | `F.softmax` over the last axis | x less `torch.max(x, -1, keepdim=True)[0]`; exp; divided by its sum |
#
# Write the three functions, and find what each adds to the peak of the *whole* step, in bytes. Return a dictionary:
# each name has a pair, your function and the bytes. Within 4 % is near enough, for at the peak one layer may be gone
# already. The three together have to explain the gap to within 100 MB.

# %%
from inspect import getsource

import torch
from course_utils import difference
from course_utils.lessons.calculators.layer import PUBLISHED, RUN, Layer, gap, one_layer, step

print(getsource(Layer.forward), getsource(step), getsource(one_layer), sep="\n")
print(f"published {format_bytes(PUBLISHED, 'GB', 2)}, the course's estimate {format_bytes(gap(), 'GB', 2)} less")
print(f"at the peak of the whole step: {estimate(RUN).phase}")
torchs = one_layer()
for moment, breakdown in torchs.moments.items():
    print(f"{moment:16s} {breakdown.total:13,} bytes")
print(f"{'peak':16s} {torchs.peak:13,} bytes, in {torchs.peak_phase}")


# %%
def last_percent() -> dict:
    """For "norm", "silu" and "softmax" a pair: the operation written out, and the bytes it adds at the peak."""

    ### BEGIN SOLUTION Return a dictionary of three pairs.
    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.float32)
        return (weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5))).to(x.dtype)

    def softmax(x: torch.Tensor) -> torch.Tensor:
        exponentials = torch.exp(x - torch.max(x, dim=-1, keepdim=True)[0])
        return exponentials / exponentials.sum(-1, keepdim=True)

    b, s, h, ffn, a, layers = 4, 512, 2560, 10240, 32, 32
    return {
        "norm": (norm, (2 * layers + 1) * 4 * b * s * h),  # fp32, two in a layer and the last one
        "silu": (lambda x: x * torch.sigmoid(x), layers * 2 * b * s * ffn),  # the sigmoid in bf16
        "softmax": (softmax, 2 * 4 * b * a * s * s),  # two more temporaries of one layer's backward, in fp32
    }
    ### END SOLUTION


# %%
check.last_percent(last_percent)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# Write `silu` first, and measure one layer with it: `one_layer(silu=silu)`. From its `.moments["end of
# forward"].total` subtract that of `torchs`. That is one layer.
#
# </details>
# <details><summary>Hint 2: which tensors?</summary>
#
# `difference(torchs, one_layer(softmax=softmax))` names the tensors that have come at the peak, with shape and
# format. To see what waits for backward, compare the ends of forward.
#
# </details>
# <details><summary>Hint 3: almost there</summary>
#
# What forward keeps, every layer keeps: multiply by 32. What only backward makes is there for one layer at a time: take
# the difference of the peaks, once.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# Each single operation keeps its own inputs for backward; a fused one keeps the least that it can compute everything
# from. So the norm keeps x·scale as well, one fp32 tensor of width h, and the SiLU its sigmoid, one bf16 tensor of
# width ffn. The softmax keeps no more. But its backward makes two more s×s tensors, and this step's peak is there.

# %% tags=["solution"]
explained = {name: size for name, (_, size) in last_percent().items()}
for name, size in explained.items():
    print(f"{name:8s} {size / PUBLISHED:6.2%} of the published figure".replace("%", " %"))
print(f"left     {(gap() - sum(explained.values())) / PUBLISHED:6.2%}".replace("%", " %"))
difference(torchs, one_layer(softmax=last_percent()["softmax"][0]), count=4)

# %% [markdown]
# ## 3 · Judge a forum answer
# **Difficulty** ●●●○○ · **12 minutes** · **Trains** finding the mistake that makes a number
#
# "How much memory does this take?" Somebody always answers with a number. Here are some such answers (made up, their
# mistakes are common). `said` is the number, said to be GB, of the peak of `run`. Return the name of what it really
# is, if that is within 1 %:
#
# | name | what was computed |
# |---|---|
# | `"right"` | the estimated peak |
# | `"weights"` | two bytes a parameter |
# | `"states"` | 16 bytes a parameter |
# | `"eager"` | the peak with eager attention, though the run has flash |
# | `"GiB"` | the peak, in GiB |
# | `"unknown"` | none of these |

# %%
for post in check.posts():
    print(post)


# %%
def judge(said: float, run: TrainingRun) -> str:
    """What `said` (called GB) is: "right", "weights", "states", "eager", "GiB", or "unknown"."""
    ### BEGIN SOLUTION Return one of the six names.
    peak = estimate(run).total
    candidates = {
        "right": peak / 10**9,
        "weights": 2 * run.model.parameters / 10**9,
        "states": 16 * run.model.parameters / 10**9,
        "eager": estimate(run.replace(attention="eager")).total / 10**9,
        "GiB": peak / 2**30,
    }
    return next((name for name, value in candidates.items() if abs(said / value - 1) <= 0.01), "unknown")
    ### END SOLUTION


# %%
check.judge(judge)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# Compute all five candidates for the run, each as a number in GB (one of them in GiB), and compare `said` with each.
#
# </details>
# <details><summary>Hint 2: the tools</summary>
#
# `estimate(run).total` is bytes; `run.model.parameters` is N; `run.replace(attention="eager")` is the same run with
# another kernel.
#
# </details>
# <details><summary>Hint 3: almost there</summary>
#
# Put the candidates into a dictionary from name to number, return the first name within 1 %, and `"unknown"` if there
# is none.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# A wrong number is rarely random: it is the right answer to another question. If you can find that question, you can
# tell the author what to change, and that is worth more than "no".

# %% [markdown]
# ## 4 · The term in letters
# **Difficulty** ●●●●○ · **15 minutes** · **Trains** deriving the term that every formula lacks
#
# Bf16 autocast, flash attention, a Llama without dropout. How many bytes does one block keep for its backward pass, for
# **one token**? Leave rounding and the random state aside. Under autocast:
#
# - the residual stream is fp32: the inputs of both norms are kept in fp32, with one fp32 statistic a token each;
# - each matrix whose input is fp32 keeps a 16-bit copy of it *of its own*: q, k, v, gate and up;
# - attention keeps q, k and v as the kernel sees them (k and v of kv numbers, each), its output, and one fp32 number a
#   head;
# - the matrix after attention reads the kernel's output itself, which is 16-bit already: nothing is kept twice;
# - SwiGLU keeps four tensors of width ffn.


# %%
def bytes_a_token(h: int, kv: int, ffn: int, a: int) -> int:
    """Bytes that a Llama's block keeps for one token under bf16 autocast with a flash kernel."""
    ### BEGIN SOLUTION Return a whole number of bytes.
    norms = 2 * (4 * h + 4)
    copies = 5 * 2 * h
    attention = 2 * h + 2 * kv + 2 * kv + 2 * h + 4 * a
    mlp = 4 * 2 * ffn
    return norms + copies + attention + mlp
    ### END SOLUTION


# %%
check.bytes_a_token(bytes_a_token)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# Go down the list, one line of code for each bullet. fp32 is 4 bytes, bf16 is 2.
#
# </details>
# <details><summary>Hint 2: the copies</summary>
#
# q, k and v read the same fp32 tensor, and still each makes its own copy: autocast remembers copies of *weights*, not
# of activations. gate and up do the same.
#
# </details>
# <details><summary>Hint 3: almost there</summary>
#
# Count widths: h appears in two norms, five copies, q and the output; kv in k and v; ffn in four tensors; a once.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# 22·h + 4·kv + 8·ffn + 4·a + 8. In a pure 16-bit recipe it would be 12·h in the place of 22·h: autocast keeps *more*
# activations than 16-bit weights do, which no calculator of the nine says.

# %% tags=["solution"]
llama = TrainingRun("llama3.1-8b", micro_batch=2, seq_len=8192).model
kept = bytes_a_token(llama.hidden, llama.kv, llama.ffn, llama.heads)
print(f"Llama 3.1 8B: {kept:,} bytes a token and block; GPT's 34·h would be {34 * llama.hidden:,}")

# %% [markdown]
# ## 5 · Your own erratum
# **Difficulty** ●●●●● · **10 minutes, or an evening** · **Trains** being wrong in public, and mending it
#
# Find a number about the memory of training that does not hold: in a blog, a README, a lecture, or your own notes. (Not
# one of this course's list.) Return a dictionary:
#
# | key | what |
# |---|---|
# | `claim` | the claim in a sentence, with its number |
# | `source` | where it stands, and when you read it |
# | `said` | the number claimed |
# | `evidence` | a function without arguments that computes the right number |
# | `lesson` | which lesson explains it, 1 to 14 |
#
# The check runs your evidence. It cannot know whether you quote the source fairly: that is up to you.


# %%
def erratum() -> dict:
    """A claim that does not hold, with evidence: keys claim, source, said, evidence, lesson."""

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
check.erratum(erratum)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# Search for "memory" and the name of a model that the course has as a preset. Numbers in prose are the best prey.
#
# </details>
# <details><summary>Hint 2: evidence</summary>
#
# `estimate(run).total / 10**9`, a count of parameters, or plain arithmetic. It has to return one number, in the unit of
# the claim.
#
# </details>
# <details><summary>Hint 3: nothing found?</summary>
#
# Look into your own notes of lesson 01, or at the guesses that you locked: some of them were wrong, too.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# A correction is worth something when it says what was claimed, where, and how anybody can check it. If yours is about
# a public text, tell its authors; if it is about this course, tell us.
