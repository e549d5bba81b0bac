# ---
# jupyter:
#   course:
#     minutes: 65
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Exercises 04 · Counting parameters
#
# **65 minutes** for all seven; each one says its own. You should know what [lesson
# 04](../notebooks/04_counting_parameters.ipynb) shows. No GPU is needed, and not even PyTorch: all of it is arithmetic.
#
# Each exercise asks for one function. Write it, run the cell, then run the check below it. A check tells you what is
# off, never what the answer is. Stuck? Every exercise has three hints; open one at a time. (“Run All Cells” stops at
# the first check that is unsolved.)

# %%
from course_utils import PRESETS, format_bytes, gpu
from course_utils.lessons.parameters import checks as check

# %% [markdown]
# ## 1 · One block
# **Difficulty** ●○○○○ · **5 minutes** · **Trains** counting matrix by matrix
#
# How many parameters does one block of a GPT have? `h` is its hidden size. With `bias=True` it is GPT-2's: every
# linear layer has biases, every LayerNorm a scale and a shift. With `bias=False` both biases and shifts are gone.


# %%
def block(h: int, bias: bool) -> int:
    """Parameters of one GPT block of hidden size h."""
    ### BEGIN SOLUTION Return a whole number.
    matrices = 3 * h * h + h * h + 4 * h * h + 4 * h * h
    biases = 3 * h + h + 4 * h + h if bias else 0
    norms = 2 * (2 * h if bias else h)
    return matrices + biases + norms
    ### END SOLUTION


# %%
check.block(block)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# Four linear layers: one that makes queries, keys and values, one behind attention, two in the MLP. Write down for
# each how many numbers go in and how many come out.
#
# </details>
# <details><summary>Hint 2: what is easily forgotten</summary>
#
# A bias has one number for each *output*. And a block has two norms, one before attention and one before the MLP.
#
# </details>
# <details><summary>Hint 3: almost there</summary>
#
# With biases: 12 matrices of h·h, then 3h + h + 4h + h of biases, then two norms of 2h. Without: the same matrices,
# and two norms of h.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# Everything beside the matrices is linear in h, so it fades as h grows. Look at its part below. Rules of thumb drop it
# with a good conscience; a check to the unit cannot.

# %% tags=["solution"]
for h in (64, 768, 12288):
    print(f"h = {h:6,}: {block(h, True):13,} parameters, {100 * (1 - 12 * h * h / block(h, True)):.3f} % beside 12h²")

# %% [markdown]
# ## 2 · A whole GPT-2
# **Difficulty** ●●○○○ · **6 minutes** · **Trains** what is there once, and what once a block
#
# V words, P learned positions, L blocks of hidden size h with biases, a tied head. How many parameters?


# %%
def gpt(V: int, P: int, h: int, L: int) -> int:
    """N of a GPT-2 of these sizes."""
    ### BEGIN SOLUTION Return a whole number.
    return V * h + P * h + L * (12 * h * h + 13 * h) + 2 * h
    ### END SOLUTION


# %%
check.gpt(gpt)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# Follow a token: it is looked up, its position is added, it goes through L blocks, and through one thing more before
# the head.
#
# </details>
# <details><summary>Hint 2: what is easily forgotten</summary>
#
# A last LayerNorm stands before the head. The head itself is tied: no matrix of its own.
#
# </details>
# <details><summary>Hint 3: almost there</summary>
#
# Two tables with h columns, L blocks of 12h² + 13h, and 2h for the last norm.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# It is the closed form of the lesson. The number of heads does not occur in it, and neither does the length of the
# sequences that you train on: only the *longest* possible one, P.

# %% tags=["solution"]
for name in ("gpt2", "gpt2-xl", "gpt3-175b"):
    model = PRESETS[name]
    print(f"{name:9s} {gpt(model.vocab, model.max_positions, model.hidden, model.layers):,}")

# %% [markdown]
# ## 3 · A Llama
# **Difficulty** ●●●○○ · **10 minutes** · **Trains** four changes to the block, each with its own count
#
# No biases, RMSNorm, SwiGLU of width `ffn`, `heads` query heads and `kv_heads` heads of keys and values, rotary
# positions, and a head that is `tied` or not.


# %%
def llama(V: int, h: int, L: int, heads: int, kv_heads: int, ffn: int, tied: bool) -> int:
    """N of a Llama of these sizes."""
    ### BEGIN SOLUTION Return a whole number.
    k = kv_heads * (h // heads)
    attention = h * h + 2 * h * k + h * h
    mlp = 3 * h * ffn
    words = V * h if tied else 2 * V * h
    return words + L * (attention + mlp + 2 * h) + h
    ### END SOLUTION


# %%
check.llama(llama)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# One head has h/heads numbers, whether it belongs to queries, keys or values. So how wide are the keys of a token?
#
# </details>
# <details><summary>Hint 2: the MLP</summary>
#
# SwiGLU goes up twice, once for the gate and once for the values that pass it, and comes down once.
#
# </details>
# <details><summary>Hint 3: almost there</summary>
#
# A block: h² for queries, h·k twice, h² for the output, 3·h·ffn, and two norms of h. Around the blocks: V·h once or
# twice, and a norm of h.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# The published counts come out to the unit. Try what grouped queries are worth in each model: with fewer heads of keys
# and values a block loses 2h·(h − k).

# %% tags=["solution"]
for name in ("llama3.2-1b", "llama3-8b", "llama3-70b"):
    m = PRESETS[name]
    now = llama(m.vocab, m.hidden, m.layers, m.heads, m.kv_heads, m.ffn, m.tied)
    full = llama(m.vocab, m.hidden, m.layers, m.heads, m.heads, m.ffn, m.tied)
    print(f"{name:11s} {now:14,}; with a key head for each query {full:14,}")

# %% [markdown]
# ## 4 · Experts
# **Difficulty** ●●●○○ · **10 minutes** · **Trains** telling stored parameters from active ones
#
# A Llama with an untied head in which every MLP is there E times. In each block a router, a matrix with a row of h
# numbers for each expert and no biases, sends a token to `chosen` of them. How many parameters are stored, and how
# many does one token use? (A lookup of one word counts as using the whole table.)


# %%
def experts(V: int, h: int, L: int, heads: int, kv_heads: int, ffn: int, E: int, chosen: int) -> tuple[int, int]:
    """(stored, active) parameters of a Llama with E experts in each block."""
    ### BEGIN SOLUTION Return two whole numbers.
    k = kv_heads * (h // heads)
    shared = 2 * V * h + h + L * (2 * h * h + 2 * h * k + 2 * h + E * h)
    one = L * 3 * h * ffn
    return shared + E * one, shared + chosen * one
    ### END SOLUTION


# %%
check.experts(experts)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# Take your Llama and mark each line: is it there once, or once for each expert?
#
# </details>
# <details><summary>Hint 2: what is easily forgotten</summary>
#
# To choose, a token is multiplied with the router's rows of *all* experts.
#
# </details>
# <details><summary>Hint 3: almost there</summary>
#
# Shared: words, head, attention, norms, and E·h of router in each block. One expert: 3·h·ffn in each block. Add the
# second E times, and `chosen` times.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# All experts lie in memory with their gradients and states, whether a token visits them or not. So experts buy
# parameters at the price of memory, not of time. The ratio below is what a step on this model wastes in bytes,
# compared with a dense model that is as fast.

# %% tags=["solution"]
m = PRESETS["mixtral-8x7b"]
stored, active = experts(m.vocab, m.hidden, m.layers, m.heads, m.kv_heads, m.ffn, m.experts, m.experts_per_token)
print(f"stored {stored:,}, active {active:,}: {stored / active:.2f} times as many bytes as a dense model as fast")

# %% [markdown]
# ## 5 · Which error was it?
# **Difficulty** ●●●●○ · **12 minutes** · **Trains** turning a formula round to explain a published number
#
# The GPT-2 paper's counts are wrong, and OpenAI does not say why. Suppose that everything about the models was right
# but the vocabulary: somebody took another V. Each row of the table then says something about it. Find the smallest
# and the largest V with which *every* row's N, in millions, rounds to the printed number.

# %%
for row in check.PAPER:
    print(row)


# %%
def vocabulary(table) -> tuple[int, int]:
    """(smallest, largest) V for which N of each row, {"h", "L", "P", "millions"}, rounds to its millions."""
    ### BEGIN SOLUTION Return two whole numbers.
    smallest, largest = 0, 10**9
    for row in table:
        rest = gpt(0, row["P"], row["h"], row["L"])
        low, high = row["millions"] * 10**6 - 500_000, row["millions"] * 10**6 + 500_000 - 1
        smallest = max(smallest, -((rest - low) // row["h"]))  # rounded up
        largest = min(largest, (high - rest) // row["h"])
    return smallest, largest
    ### END SOLUTION


# %%
check.vocabulary(vocabulary)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# N is V·h plus a rest that you know. A count that is printed as 117 million may be anything from 116.5 million up to,
# but not including, 117.5 million.
#
# </details>
# <details><summary>Hint 2: one row</summary>
#
# For one row, V·h lies between two numbers. Divide by h; the smallest V is rounded up, the largest down.
#
# </details>
# <details><summary>Hint 3: almost there</summary>
#
# All rows at once: the largest of the smallest, and the smallest of the largest. With whole numbers, `-(-a // h)`
# rounds a/h up. Or try every V from 1 to 200,000 and keep those that fit: slow, and just as right.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# All four rows agree on one narrow interval, which four independent mistakes would not. And in it lies a number that is
# known: GPT-1's vocabulary has 40,478 words (its released `config.json`). So the paper's counts are what you get for
# GPT-2's blocks with GPT-1's table of words. That fits; whether it is how it happened, only OpenAI could say.

# %% tags=["solution"]
smallest, largest = vocabulary(check.PAPER)
print(f"V between {smallest:,} and {largest:,}; GPT-2's own has 50,257")
for row in check.PAPER:
    print(f"with 40,478 words: {gpt(40_478, row['P'], row['h'], row['L']) / 1e6:8.2f} M, printed {row['millions']:,}")

# %% [markdown]
# ## 6 · The widest that fits
# **Difficulty** ●●●○○ · **10 minutes** · **Trains** going from bytes to an architecture
#
# You have `memory` bytes for weights, gradients and Adam's states, 16 bytes a parameter. You build GPT-2s with a layer
# for each 64 of width: h is a multiple of 64 and L = h/64. V words, P positions, biases, a tied head. What is the
# largest h that fits? Return 0 if not even 64 does.


# %%
def widest(memory: int, V: int, P: int) -> int:
    """The largest h, a multiple of 64 with L = h/64, whose 16·N bytes are at most memory; else 0."""
    ### BEGIN SOLUTION Return a whole number.
    h = 0
    while 16 * gpt(V, P, h + 64, (h + 64) // 64) <= memory:
        h += 64
    return h
    ### END SOLUTION


# %%
check.widest(widest)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# N grows with h. So walk up in steps of 64 and stop in time.
#
# </details>
# <details><summary>Hint 2: what is easily forgotten</summary>
#
# Your own `gpt` counts the words, too. And what fills the memory exactly still fits.
#
# </details>
# <details><summary>Hint 3: almost there</summary>
#
# Begin with h = 0. As long as 16 times `gpt` of h + 64 is at most the memory, add 64.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# N grows with the third power of h here, since depth follows width. So a card of twice the memory buys a model that is
# only a quarter wider. And this is with no activation at all: lessons 05 to 07 are about the room that those need.

# %% tags=["solution"]
for card in ("T4-16GB", "V100-32GB", "A100-80GB"):
    memory = gpu(card).memory
    h = widest(memory, 50257, 1024)
    print(f"{card:10s} {format_bytes(memory, 'GB', 1)}: h = {h:,}, N = {gpt(50257, 1024, h, h // 64):,}")

# %% [markdown]
# ## 7 · A checkpoint without names
# **Difficulty** ●●●●● · **12 minutes** · **Trains** reading an architecture off its shapes
#
# Somebody hands you the shapes of all tensors of a Llama (no biases, no experts, three blocks or more), sorted, the
# names lost. Find `hidden`, `layers`, `vocab`, `ffn`, `kv` (the width of keys) and `tied` (True or False). A linear
# layer's shape is (outputs, inputs), as in PyTorch. No two of the four widths are equal, except that `kv` may be
# `hidden`. Do not count on the vocabulary being the largest size: a model of bytes has 256 words.

# %%
shapes = check.anonymous_shapes(hidden=8, layers=3, vocab=11, kv=4, ffn=20, tied=False)
print(len(shapes), "tensors:", sorted(set(shapes)))


# %%
def read_shapes(shapes) -> dict:
    """hidden, layers, vocab, ffn, kv and tied of the Llama whose tensors have these shapes."""
    ### BEGIN SOLUTION Return a dictionary with the six keys.
    hidden = next(shape[0] for shape in shapes if len(shape) == 1)
    layers = (sum(len(shape) == 1 for shape in shapes) - 1) // 2
    ffn = next(shape[1] for shape in shapes if len(shape) == 2 and shape[1] != hidden)
    rows = [shape[0] for shape in shapes if len(shape) == 2 and shape[1] == hidden]
    words = [size for size in set(rows) if rows.count(size) % layers]
    others = [size for size in set(rows) if size not in (hidden, ffn, *words)]
    kv = others[0] if others else hidden
    return {"hidden": hidden, "layers": layers, "vocab": words[0], "ffn": ffn, "kv": kv,
            "tied": rows.count(words[0]) == 1}  # fmt: skip
    ### END SOLUTION


# %%
check.read_shapes(read_shapes)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# Vectors first: a Llama has no biases, so its only vectors are norms. Their length is h, and how many there are tells
# you L.
#
# </details>
# <details><summary>Hint 2: the MLP, and the words</summary>
#
# One shape has another number of columns than h: the way down of the MLP. And every shape of a block is there L times,
# 2L times, or more; only the words are there once or twice in all.
#
# </details>
# <details><summary>Hint 3: almost there</summary>
#
# Of the matrices with h columns, take away the rows h, f and V. What is left is k. If nothing is left, keys are as wide
# as queries.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# Shapes are nearly the whole architecture. What you cannot read off them: into how many heads the queries are cut, what
# the activation function is, and the base of the rotary angles. None of these has a parameter, so none changes N.

# %% tags=["solution"]
print(read_shapes(shapes))
print(f"{check.count_of(shapes):,} parameters in it, and by your own Llama {llama(11, 8, 3, 2, 1, 20, False):,}")

# %% [markdown]
# ## Take home
# **Remember** Count line by line, and say of each line how often it is there.
#
# **Breaks when** a published number is taken for a measurement: it may be another model's.
#
# **Cheat-sheet line** GPT block 12h² + 13h · Llama block 2h² + 2hk + 3fh + 2h · tied head: words once, untied: twice.
