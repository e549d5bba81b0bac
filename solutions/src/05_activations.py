# ---
# jupyter:
#   course:
#     minutes: 70
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Exercises 05 · What does each operation keep?
#
# **70 minutes** for all six; each one says its own. You should know what [lesson
# 05](../notebooks/05_activations.ipynb) shows. No GPU is needed.
#
# Each exercise asks for one function. Write it, run the cell, then run the check below it. A check tells you what is
# off, never what the answer is. Stuck? Every exercise has three hints; open one at a time. (“Run All Cells” stops at
# the first check that is unsolved.)

# %%
from course_utils import TrainingRun, format_bytes
from course_utils.lessons.activations import checks as check
from course_utils.interactive.saved import saved_by
from course_utils.interactive.ledgers import show_ledger

# %% [markdown]
# ## 1 · Operations never seen before
# **Difficulty** ●●○○○ · **10 minutes** · **Trains** deriving what is kept from a derivative, and counting storages
#
# Five expressions of x and y, two tensors of *n* bf16 numbers that both need gradients. How many bytes does autograd
# keep for each? PyTorch runs them operation by operation, as they are written; what two operations keep together is
# stored once. Derive before you ask `saved_by`; the check asks it too.

# %%
list(check.EXPRESSIONS)


# %%
def expressions(n: int) -> dict[str, int]:
    """Bytes that autograd keeps for each expression, x and y being n bf16 numbers each."""
    ### BEGIN SOLUTION Return a dictionary with the five expressions as keys, in bytes.
    one = 2 * n
    return {
        "tanh(x + y)": one,  # tanh's output
        "relu(x) ** 2": one,  # ReLU's output, which is the square's input
        "x * sigmoid(x)": 2 * one,  # both factors; sigmoid's output is one of them
        "exp(x) + sin(x)": 2 * one,  # exp's output, sin's input
        "sigmoid(x) / 3 + y": one,  # sigmoid's output
    }
    ### END SOLUTION


# %%
check.expressions(expressions)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# Write down the derivative of each single operation. Can it be written with the *output*? tanh′ = 1 − tanh² can.
#
# </details>
# <details><summary>Hint 2: what keeps nothing</summary>
#
# Sums and multiplication by a plain number have a constant slope. A square has the slope 2x: it keeps what it squares.
#
# </details>
# <details><summary>Hint 3: almost there</summary>
#
# Now look for tensors that two operations keep: what one puts out and the next takes in is one storage.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# Sigmoid, tanh, exp, ReLU and softmax keep their output; sin, GELU, SiLU and a square keep their input; sums keep
# nothing. So the same function can cost more or less, depending on how it is written: x·sigmoid(x) by hand keeps twice
# what PyTorch's own SiLU keeps.

# %% tags=["solution"]
from torch import nn

n = 4096
by_hand = saved_by(check.EXPRESSIONS["x * sigmoid(x)"], (n,), (n,), dtype="bf16")
built_in = saved_by(nn.SiLU(), (n,), dtype="bf16")
print(f"SiLU by hand {sum(item.bytes for item in by_hand):,} bytes, built in {sum(i.bytes for i in built_in):,} bytes")

# %% [markdown]
# ## 2 · A layer never seen before
# **Difficulty** ●●○○○ · **10 minutes** · **Trains** the ledger of a layer, from its code
#
# GEGLU (Shazeer 2020) is an MLP with a gate: dropout((GELU(x·W₁) · (x·W₂))·W₃). W₁ and W₂ widen h to ffn, W₃ comes back
# to h; no biases. All is 16-bit, dropout's mask has one byte an element. What does it keep, besides its weights?


# %%
def mlp_bytes(s: int, b: int, h: int, ffn: int) -> int:
    """Bytes that GEGLU keeps for backward, for b sequences of s tokens."""
    ### BEGIN SOLUTION Return a number of bytes.
    x = 2 * s * b * h  # one storage for both first matrices
    wide = 2 * s * b * ffn
    return x + wide + wide + wide + wide + s * b * h  # GELU's input and output, the other factor, the product; mask
    ### END SOLUTION


# %%
check.mlp_bytes(mlp_bytes)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# Name every tensor between x and the result: x, x·W₁, GELU of it, x·W₂, their product, what W₃ makes of it.
#
# </details>
# <details><summary>Hint 2: who asks</summary>
#
# Ask of each one whether some derivative needs it. A product of two activations asks for both factors, a matrix asks
# for its input.
#
# </details>
# <details><summary>Hint 3: almost there</summary>
#
# x is asked for twice and stored once. Four wide tensors are left, each asked for by somebody. The output of W₃ is
# asked for by nobody; dropout keeps its mask alone.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# s·b·(3·h + 8·ffn) bytes. Here are the storages, as hooks find them in the genuine layer.

# %% tags=["solution"]
s, b, h, ffn = 512, 2, 256, 1024
found = saved_by(check.bilinear_mlp(h, ffn), (b, s, h), dtype="bf16", device="gpu")
show_ledger({"mlp_bytes": mlp_bytes(s, b, h, ffn)}, found, columns=("yours", "simulated"))

# %% [markdown]
# ## 3 · One block, four ways
# **Difficulty** ●●●○○ · **15 minutes** · **Trains** knowing which byte of a formula is whose
#
# Write the bytes that one GPT block keeps in 16-bit: for `attention` "eager" or "flash", with dropout or without, to
# the byte, the norms' statistics included. (You may leave out the 24 bytes of a flash kernel's random state.)
#
# Mind eager attention without dropout: count storages.


# %%
def block_bytes(s: int, b: int, h: int, a: int, attention: str, dropout: bool) -> int:
    """Bytes that one GPT block with an MLP of 4h keeps for backward."""
    ### BEGIN SOLUTION Return a number of bytes.
    matrices = 14 * s * b * h  # inputs of qkv, output, up, down
    qkv, gelu, norms = 6 * s * b * h, 8 * s * b * h, 4 * s * b * h
    statistics = 2 * 2 * 4 * s * b
    masks = 2 * s * b * h if dropout else 0
    pairs = a * s * s * b
    scores = (2 + 1 + 2) * pairs if dropout else 2 * pairs  # softmax's output, mask, dropout's result
    rows = 4 * a * s * b  # one fp32 number each
    core = rows if attention == "flash" else scores
    return matrices + qkv + gelu + norms + statistics + masks + core
    ### END SOLUTION


# %%
check.block_bytes(block_bytes)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# Copy the lesson's ledger of the eager block, one line of code for each group of rows, and get that case right first.
#
# </details>
# <details><summary>Hint 2: what dropout owns</summary>
#
# Three masks, and one more tensor: the result of dropping attention weights is not the weights themselves. Without
# dropout, the last product reads softmax's output directly.
#
# </details>
# <details><summary>Hint 3: almost there</summary>
#
# Two of the masks have s·b·h bytes, one has a·s²·b. For flash drop all of a·s² and add an fp32 number for each
# row of each head. Each norm has a mean and a deviation for each token, in fp32.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# Without dropout, eager attention keeps 2·a·s²·b, not 5 less 1: the mask goes, and so does dropout's result, because
# softmax's output and the factor of the next product become one storage. Here is what the course's estimate has.

# %% tags=["solution"]
from dataclasses import replace

from course_utils import PRESETS
from course_utils.estimating.exact.activations import block_saved

for rate in (0.1, 0.0):
    for attention in ("eager", "flash"):
        model = replace(PRESETS["gpt2"], dropout=rate)
        run = TrainingRun(model, 2, 512, "bf16-master", attention=attention)
        mine = block_bytes(512, 2, 768, 12, attention, rate > 0)
        size = sum(item.size for item in block_saved(run))
        print(f"{attention}, dropout {rate}: {format_bytes(mine, 'MB', 3)}, {size - mine} bytes less than the estimate")

# %% [markdown]
# ## 4 · How long can it be?
# **Difficulty** ●●●○○ · **10 minutes** · **Trains** turning a formula round
#
# You have `budget` bytes for activations. L blocks of eager attention keep L·s·b·h·(34 + 5·a·s/h) bytes. What is the
# largest whole number of tokens s that fits? Statistics and loss are left out. Return 0 where not one token fits.


# %%
def longest_sequence(budget: int, b: int, h: int, a: int, L: int) -> int:
    """The largest s for which L blocks of eager attention keep no more than budget bytes."""

    ### BEGIN SOLUTION Return a number of tokens.
    def kept(s):
        return L * s * b * (34 * h + 5 * a * s)

    low, high = 0, 1
    while kept(high) <= budget:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if kept(middle) <= budget else (low, middle)
    return low
    ### END SOLUTION


# %%
check.longest_sequence(longest_sequence)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# Set what is kept equal to the budget. That is a quadratic equation in s: 5·a·s² + 34·h·s − budget/(L·b) = 0.
#
# </details>
# <details><summary>Hint 2: or without algebra</summary>
#
# What is kept grows with s. Double s until it is too much, then halve the interval between the last that fits and the
# first that does not.
#
# </details>
# <details><summary>Hint 3: almost there</summary>
#
# With the formula, take `math.isqrt` and round down; floating point is off by one now and then. Check your result: s
# fits, s + 1 does not.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# With ten times the budget you get far less than ten times the length: at the end the square rules. Flash attention's
# length, beside it, grows in proportion.

# %% tags=["solution"]
for budget in (4, 40, 400):
    eager = longest_sequence(budget * 10**9, 1, 1600, 25, 48)
    flash = budget * 10**9 // (48 * 34 * 1600)
    print(f"{budget} GB for GPT-2 XL's blocks: {eager:,} tokens with eager attention, {flash:,} with 34·s·b·h alone")

# %% [markdown]
# ## 5 · Read a sweep
# **Difficulty** ●●●●○ · **15 minutes** · **Trains** diagnosing a kernel from a handful of measurements
#
# Somebody trained a model whose code you don't have, at a few sequence lengths, and noted what forward keeps. All you
# have is a dictionary from s to bytes, in no particular order. Which kernel of attention was it, "eager" or "flash"?
# And what will forward keep at *twice* the largest of these lengths (within 1 %)?

# %%
example = check.example_sweep()
example


# %%
def read_sweep(sweep: dict[int, int]) -> dict:
    """{"attention": "eager" or "flash", "next": bytes at twice the largest s}, from bytes by sequence length."""
    ### BEGIN SOLUTION Return a dictionary with the keys attention and next.
    short, long = min(sweep), max(sweep)
    slope, slope_later = sweep[short] / short, sweep[long] / long
    square = (slope_later - slope) / (long - short)  # bytes = linear·s + square·s²
    linear = slope - square * short
    bent = square * long > 0.02 * linear
    s = 2 * long
    return {"attention": "eager" if bent else "flash", "next": linear * s + square * s * s}
    ### END SOLUTION


# %%
check.read_sweep(read_sweep)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# What is kept is c₁·s + c₂·s². Divide by s. What does that look like with flash attention?
#
# </details>
# <details><summary>Hint 2: two lengths are enough</summary>
#
# bytes/s is c₁ + c₂·s, a straight line. Two points give both numbers. With flash attention c₂ is nothing but rounding.
#
# </details>
# <details><summary>Hint 3: almost there</summary>
#
# Take the shortest and the longest length: c₂ is the slope of the line through the two points, and c₁ is where the line
# meets s = 0. Rounding gives c₂ a small value with flash attention, too. So compare the two terms of bytes/s with each
# other at the longest length.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# The size tells nothing: a large model with flash attention keeps more than a small one with eager attention. The
# *bend* tells. The example's sweep, which is a tiny GPT's:

# %% tags=["solution"]
print(read_sweep(example)["attention"])
for s, size in example.items():
    print(f"s = {s:3d}: {size / s:10,.0f} bytes a token of the sequence")

# %% [markdown]
# ## 6 · Explain a timeline
# **Difficulty** ●●○○○ · **10 minutes** · **Trains** giving every rise and fall of a timeline its cause
#
# Here are two training steps of a small GPT with eager attention, under autocast, each of two micro-batches. Six
# moments have letters.

# %%
figure = check.story()
figure

# %% [markdown]
# What happens at each of them? Choose from these sentences; three of them are wrong of any moment.

# %%
for number, sentence in check.STATEMENTS.items():
    print(f"{number}  {sentence}")


# %%
def told() -> dict[str, int]:
    """For each letter from A to F, the number of the sentence that explains what is there at that moment."""
    ### BEGIN SOLUTION Return a dictionary with the keys A to F and the numbers of sentences.
    return {"A": 5, "B": 4, "C": 7, "D": 2, "E": 9, "F": 1}
    ### END SOLUTION


# %%
check.told(told)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# At each letter, name the kinds of memory that are there, by their colors. Then compare with the letter before: what
# has come, what has gone?
#
# </details>
# <details><summary>Hint 2: who frees what</summary>
#
# Three kinds go at three different times: activations while backward runs, gradients when they are set to none, the
# optimizer's states never.
#
# </details>
# <details><summary>Hint 3: almost there</summary>
#
# C and E look alike. One lies between two micro-batches of one step, where gradients must stay; the other between two
# steps. And what stays for good is no leak.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# A rise needs a maker, a fall needs a last user. Forward makes activations and backward is their last user, block by
# block. Backward makes gradients, and their last user is the optimizer, after all micro-batches. The optimizer makes
# its states at its first step and is never done with them: that is why every step but the first begins higher.

# %% [markdown]
# ## Take home
# **Remember** Derive, then count storages, then look for what is left over.
#
# **Breaks when** a kernel is fused: then PyTorch no longer keeps what the written operations would.
#
# **Cheat-sheet line** output kept: ReLU, sigmoid, tanh, exp, softmax · input kept: GELU, SiLU, linear, norm · both
# kept: a product · nothing kept: sums, division by a number.
