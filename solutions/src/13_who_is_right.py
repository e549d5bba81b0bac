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
from course_utils.lessons.calculators.calculators import CALCULATORS, TERMS

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
# ## 2 · The one term
# **Difficulty** ●●●○○ · **15 minutes** · **Trains** seeing what a calculator was made for
#
# GPT-2, 8 sequences of 1,024 tokens, bf16 autocast, flash attention. For five calculators you see below what their
# answer consists of, and what is there at the peak, by the course's estimate. For each, in which *one* term of the
# closed list is it furthest off, too high or too low? The check tells you how far it is off in the term that you named.

# %%
run = TrainingRun("gpt2", micro_batch=8, seq_len=1024, precision="amp-bf16", attention="flash")
answers = {one.name: one.parts(run) for one in CALCULATORS if one.name in check.SUSPECTS}
for name, parts in (answers | {"the estimated peak": estimate(run)}).items():
    shown = {part.replace("_", " "): format_bytes(size, "GB", 2) for part, size in parts.items() if size > 10**7}
    print(f"{name:19s}", "; ".join(f"{part} {size}" for part, size in shown.items()))
print("terms:", ", ".join(term.name for term in TERMS))


# %%
def missing_term(calculator: str) -> str:
    """The term in which this calculator's answer is furthest off, whatever the sign."""
    ### BEGIN SOLUTION Return one of the terms printed above.
    return {
        "accelerate": "linear part of a block",
        "DeepSpeed ZeRO-2": "linear part of a block",
        "ZeRO": "logits and loss",
        "Korthikanti et al.": "attention scores",
        "EleutherAI cookbook": "attention scores",
    }[calculator]
    ### END SOLUTION


# %%
check.missing_term(missing_term)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# Write a dictionary from the calculator's name to a term, and return what stands under `calculator`. Then look at one
# calculator at a time.
#
# </details>
# <details><summary>Hint 2: too high or too low?</summary>
#
# Look for what is in its answer and not in the step, and for what the step has and its answer lacks. A term can be far
# off although the total is near, so don't go by the total.
#
# </details>
# <details><summary>Hint 3: almost there</summary>
#
# Is there a part that a flash kernel never writes? Where there is none, compare two candidates: the blocks,
# 38·h + 4·a + 16 bytes for each token and block, less what it has; and the loss, 6·V bytes a token. GPT-2 is small, V
# is not.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# Those made for states know nothing of what blocks keep; those made for eager GPTs know too much. And ZeRO, which has
# the blocks roughly, lacks the loss: for a small model with a large vocabulary that is more. Putting the scores right
# makes Korthikanti et al. *worse* in total: what they have too much hid what they never meant to count.

# %% tags=["solution"]
for name in check.SUSPECTS:
    shares = {term.name: check.share_of_peak(name, term.name) for term in TERMS}
    term = missing_term(name)
    print(f"{name:20s} {sum(shares.values()):+6.1f} % in all, {shares[term]:+6.1f} % in {term}")

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
