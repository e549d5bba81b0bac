# ---
# jupyter:
#   course:
#     minutes: 73
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Exercises 04 · Counting parameters
#
# **73 minutes** for all four; each one says its own. You should know what [lesson
# 04](../notebooks/04_counting_parameters.ipynb) shows. For exercise 2, you should have read an attention forward with
# heads once. No GPU is needed: networks are tiny here, or have no memory.
#
# Each exercise asks for one function or class. Write it, run the cell, then run the check below it. A check tells you
# what is off, never what the answer is. Stuck? Every exercise has three hints; open one at a time. (“Run All Cells”
# stops at the first unsolved check.)

# %%
import torch
import torch.nn.functional as F
from torch import nn

from course_utils import PRESETS
from course_utils.lessons.parameters import checks as check

# %% [markdown]
# ## 1 · Count without a byte
# **Difficulty** ●●○○○ · **11 minutes** · **Trains** asking what a network will take before it takes it
#
# Here is a small network with most of what makes counting hard. Its state dict gives 1,784 numbers. How many numbers
# are trained? How many bytes are in memory?


# %%
class Tricky(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(100, 8), nn.Linear(8, 100, bias=False)
        self.head.weight = self.words.weight
        self.positions = nn.Embedding(16, 8, dtype=torch.bfloat16).requires_grad_(False)
        self.register_buffer("steps", torch.arange(56))
        self.register_buffer("mask", torch.ones(16, 16, dtype=torch.bool).tril(), persistent=False)


stored = sum(tensor.numel() for tensor in Tricky().state_dict().values())
print(f"{stored:,} numbers in the state dict")

# %% [markdown]
# Make a network without allocating any of it, and count it. `count(build)` gets a function without arguments that makes
# and returns a network; `Tricky` is one, too. Return a dictionary of three whole numbers:
#
# - `"trained"`: numbers in parameters that get a gradient;
# - `"frozen"`: numbers in all other parameters;
# - `"bytes"`: bytes that all parameters *and buffers* take once they are in memory, each in its own format.
#
# A tensor with two names counts once. The check also builds a network of 70 billion parameters, and one without any.


# %%
def count(build) -> dict[str, int]:
    """Return trained and frozen numbers and bytes of `build()`'s network, without allocating it."""
    ### BEGIN SOLUTION Return a dictionary with the three keys.
    with torch.device("meta"):
        network = build()
    numbers = {True: 0, False: 0}
    for parameter in network.parameters():
        numbers[parameter.requires_grad] += parameter.numel()
    size = sum(tensor.nbytes for tensor in (*network.parameters(), *network.buffers()))
    return {"trained": numbers[True], "frozen": numbers[False], "bytes": size}
    ### END SOLUTION


# %%
check.count(count)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# The lesson counts GPT-3 on a laptop. What does it put around the line that builds it?
#
# </details>
# <details><summary>Hint 2: three lists</summary>
#
# A module has `parameters()`, `buffers()` and `state_dict()`. Two of them list each tensor once. Together, these two
# list everything in memory.
#
# </details>
# <details><summary>Hint 3: almost there</summary>
#
# Go through the parameters and sort them by `requires_grad`. A tensor knows its `numel()` and its `nbytes`, even on
# `meta`.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# On `meta` a constructor runs as always, so ties, formats and frozen parts are those of the real network. Large models
# are planned this way. They are loaded this way too: built without memory, then filled shard by shard. The three
# numbers are three bills. Trained parameters cost gradients and states, frozen ones only themselves. Buffers are on the
# card though no optimizer knows of them.


# %% tags=["solution"]
def gpt_3():
    return nn.ModuleList(nn.TransformerEncoderLayer(12_288, 96, 49_152) for _ in range(96))


print(count(Tricky))
print("GPT-3's shape:", count(gpt_3))

# %% [markdown]
# ## 2 · Build the block
# **Difficulty** ●●●●○ · **26 minutes** · **Trains** turning a closed form into a network that runs
#
# Write a Llama's block that runs. The lesson counts its parameters, **2h² + 2h·k + 3f·h + 2h**, in modules that cannot
# run. Yours has the same parameters in fewer matrices, as in inference engines. `Block(h, heads, kv_heads, f)` has
# modules without biases, with these names:
#
# | name | what it is | outputs |
# |---|---|---|
# | `norm1`, `norm2` | `nn.RMSNorm(h)`, before attention and before the MLP | h |
# | `qkv` | one linear layer: all queries, then all keys, then all values | h + 2k |
# | `output` | the linear layer behind attention | h |
# | `gate_up` | one linear layer: the gate's f outputs, then up's | 2f |
# | `down` | the linear layer that ends the MLP | h |
#
# `forward(x)` gets x of shape (b, s, h) and returns a tensor of the same shape:
#
# - Every head is h/heads wide. There are `heads` heads of queries, `kv_heads` heads of keys and `kv_heads` of values,
#   so k is kv_heads · h/heads.
# - The first heads/kv_heads heads of queries share head 0 of keys and values, the next ones head 1, and so on.
#   Attention is causal. Leave rotary positions out.
# - SwiGLU is down(SiLU(gate) · up).
# - Attention's result is added to x. This sum goes through norm2 and the MLP, and their result is added to the sum.
#
# `F.scaled_dot_product_attention(q, k, v, is_causal=True)` takes shapes (b, heads, s, width); with `enable_gqa=True`
# keys and values may have fewer heads. `unflatten` cuts a dimension into two.


# %%
class Block(nn.Module):
    def __init__(self, h: int, heads: int, kv_heads: int, f: int) -> None:
        super().__init__()
        ### BEGIN SOLUTION Make the six modules.
        self.heads, self.width = (heads, kv_heads, kv_heads), h // heads
        self.norm1, self.norm2 = nn.RMSNorm(h), nn.RMSNorm(h)
        self.qkv = nn.Linear(h, sum(self.heads) * self.width, bias=False)
        self.output = nn.Linear(h, h, bias=False)
        self.gate_up, self.down = nn.Linear(h, 2 * f, bias=False), nn.Linear(f, h, bias=False)
        ### END SOLUTION

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ### BEGIN SOLUTION Return a tensor of the shape of x.
        every = self.qkv(self.norm1(x)).unflatten(-1, (-1, self.width)).transpose(1, 2)
        parts = every.split(self.heads, dim=1)
        y = F.scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=True)
        x = x + self.output(y.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.norm2(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)
        ### END SOLUTION


# %%
check.block(Block)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# Write down the shape after each step. `qkv` of x is (b, s, h + 2k): heads next to each other, each h/heads wide. How
# many heads are there together?
#
# </details>
# <details><summary>Hint 2: attention</summary>
#
# Give heads a dimension of their own with `unflatten`, move it before the tokens, and `split` it into three. Afterwards
# go the same way back: tokens first, then the heads next to each other again.
#
# </details>
# <details><summary>Hint 3: almost there</summary>
#
# The block is two lines of `x = x + …`. The second line reads the result of the first. `chunk(2, dim=-1)` halves the
# output of `gate_up`; only the first half goes through SiLU.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# Matrices that read the same input may be joined into one, with exactly as many numbers. One large product keeps a GPU
# busier than three small ones. A closed form counts matrices, so it cannot see how attention uses them. Heads, the
# causal mask, SiLU and the residuals have no parameters. So a right count says little about whether the code is right.

# %% tags=["solution"]
llama = PRESETS["llama3-8b"]
h, k, f = llama.hidden, llama.kv, llama.ffn
with torch.device("meta"):
    block = Block(h, llama.heads, llama.kv_heads, f)
counted = sum(parameter.numel() for parameter in block.parameters())
closed = 2 * h * h + 2 * h * k + 3 * f * h + 2 * h
print(f"a block of Llama-3 8B: {counted:,}, by the closed form {closed:,}")

# %% [markdown]
# ## 3 · Experts
# **Difficulty** ●●●●○ · **22 minutes** · **Trains** making active parameters fewer than stored ones
#
# The lesson counts what a token *uses*. Whether it uses no more depends on the code. The forward of `Wasteful` below is
# right, but every expert computes every token.


# %%
class SwiGLU(nn.Module):
    def __init__(self, h: int, f: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(h, f, bias=False), nn.Linear(h, f, bias=False)
        self.down = nn.Linear(f, h, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


# %%
class Wasteful(nn.Module):
    def __init__(self, h: int, f: int, E: int, chosen: int) -> None:
        super().__init__()
        self.router, self.chosen = nn.Linear(h, E, bias=False), chosen
        self.experts = nn.ModuleList(SwiGLU(h, f) for _ in range(E))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        top, where = self.router(x).topk(self.chosen, dim=-1)
        shares = torch.zeros_like(self.router(x)).scatter(-1, where, top.softmax(-1))
        return sum(shares[..., n, None] * expert(x) for n, expert in enumerate(self.experts))


# %% [markdown]
# `topk` gives each token's largest scores (`top`) and the numbers of their experts (`where`). Shares are the softmax
# over those scores, and 0 for all other experts.
#
# Write a forward that returns the same, gradients included, and sends to each expert **only the tokens that chose it**.
# x has shape (…, h): any dimensions before the last, and possibly only one token. Return a tensor of the shape of x.
# Call the experts as modules. An expert that nobody chose computes nothing, and needs no gradient.
#
# For a mask with two dimensions, `mask.nonzero(as_tuple=True)` gives the rows and the columns where it is True.
# `y.index_add_(0, rows, values)` adds `values[i]` to `y[rows[i]]`, in place.


# %%
class Experts(Wasteful):
    """E experts and a router that sends each token to `chosen` of them, and to no others."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ### BEGIN SOLUTION Return a tensor of the shape of x.
        tokens = x.flatten(0, -2)
        top, where = self.router(tokens).topk(self.chosen, dim=-1)
        shares = top.softmax(dim=-1)
        y = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            rows, places = (where == number).nonzero(as_tuple=True)
            if len(rows):
                y.index_add_(0, rows, shares[rows, places, None] * expert(tokens[rows]))
        return y.view_as(x)
        ### END SOLUTION


# %%
check.experts(Experts)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# Bring all tokens into one dimension: a matrix of one row per token. Then loop over the experts, not over the tokens.
#
# </details>
# <details><summary>Hint 2: one expert</summary>
#
# `where` has a row per token and `chosen` columns. Where does it hold this expert's number? The rows say which tokens
# to send, the columns which of the token's shares belongs to this expert.
#
# </details>
# <details><summary>Hint 3: almost there</summary>
#
# Start with zeros in the tokens' shape. Multiply an expert's output by the shares, as a column. *Add* the result at the
# same rows, because a token gets something from several experts. At the end, give the sum the shape of x.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# Both networks store the same parameters, and their outputs agree. In yours a token is multiplied only with the router
# and `chosen` experts: this is what "active" means. It takes fewer activations, too, because an expert keeps only the
# rows that it has seen. Memory for weights, gradients and states is still that of all E. If few tokens choose an
# expert, its gradient comes from few tokens. That is why routers are trained to spread them.

# %% tags=["solution"]
rows = []
for kind in (Wasteful, Experts):
    torch.manual_seed(0)
    network = kind(64, 256, E=8, chosen=2)
    for expert in network.experts:
        expert.register_forward_hook(lambda _, inputs, output: rows.append(len(inputs[0])))
    network(torch.randn(100, 64))
    stored = sum(parameter.numel() for parameter in network.parameters())
    print(
        f"{kind.__name__:8s} stores {stored:,} parameters, "
        f"its experts compute {sum(rows)} rows for 100 tokens"
    )
    rows.clear()

# %% [markdown]
# ## 4 · A checkpoint without names
# **Difficulty** ●●●●○ · **14 minutes** · **Trains** reading an architecture from its shapes
#
# Find the sizes of a Llama from the shapes of its tensors. `read_shapes(shapes)` gets a sorted list with one shape per
# tensor, without names; a tied tensor is listed once. Return a dictionary with `hidden`, `layers`, `vocab`, `ffn`, `kv`
# (the width of keys) and `tied` (True or False).
#
# The Llama has no biases, no experts, and three blocks or more. A linear layer's shape is (outputs, inputs), as in
# PyTorch. No two of `hidden`, `vocab`, `ffn` and `kv` are equal, except that `kv` may equal `hidden`. Do not assume
# that one of them is the largest or the smallest: a model of bytes has 256 words.

# %%
shapes = check.anonymous_shapes(hidden=8, layers=3, vocab=11, kv=4, ffn=20, tied=False)
print(len(shapes), "tensors:", sorted(set(shapes)))


# %%
def read_shapes(shapes) -> dict:
    """Return hidden, layers, vocab, ffn, kv and tied of the Llama with tensors of these shapes."""
    ### BEGIN SOLUTION Return a dictionary with the six keys.
    hidden = next(shape[0] for shape in shapes if len(shape) == 1)
    layers = (sum(len(shape) == 1 for shape in shapes) - 1) // 2
    ffn = next(shape[1] for shape in shapes if len(shape) == 2 and shape[1] != hidden)
    rows = [shape[0] for shape in shapes if len(shape) == 2 and shape[1] == hidden]
    words = [size for size in set(rows) if rows.count(size) % layers]
    others = [size for size in set(rows) if size not in (hidden, ffn, *words)]
    kv = others[0] if others else hidden
    return {
        "hidden": hidden,
        "layers": layers,
        "vocab": words[0],
        "ffn": ffn,
        "kv": kv,
        "tied": rows.count(words[0]) == 1,
    }
    ### END SOLUTION


# %%
check.read_shapes(read_shapes)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# Vectors first: a Llama has no biases, so its only vectors are norms. Their length is h, and their number gives you L.
#
# </details>
# <details><summary>Hint 2: the MLP, and the words</summary>
#
# Only one shape has a number of columns other than h: the MLP's way down. Every shape of a block occurs L times, 2L
# times, or more. Only the words occur once or twice in total.
#
# </details>
# <details><summary>Hint 3: almost there</summary>
#
# Take the matrices with h columns, and remove the row counts h, f and V. What remains is k. If nothing remains, keys
# are as wide as queries.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# Shapes are nearly the whole architecture. You cannot read from them how many heads the queries are cut into, the
# activation function, or the base of the rotary angles. None of these has a parameter, so none changes N.

# %% tags=["solution"]
print(read_shapes(shapes))
h, L, V, k, f = 8, 3, 11, 4, 20
counted = sum(torch.Size(shape).numel() for shape in shapes)
closed = L * (2 * h * h + 2 * h * k + 3 * f * h + 2 * h) + h
print(f"{counted:,} parameters counted, by the closed form {2 * V * h + closed:,}")

# %% [markdown]
# ## Take home
# **Remember** Count tensors, not names, and say how often each line of a formula occurs.
#
# **Breaks when** you take a published number for a measurement: it may be another model's.
#
# **Cheat-sheet line** GPT block 12h² + 13h · Llama block 2h² + 2hk + 3fh + 2h · tied head: words once, untied: twice.
