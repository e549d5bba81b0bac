# ---
# jupyter:
#   course:
#     minutes: 67
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Exercises 07 · torch.compile
#
# **67 minutes** for all five; each one says its own. You should know what [lesson
# 07](../notebooks/07_torch_compile.ipynb) shows. No GPU is needed.
#
# Each exercise asks for one function. Write it, run the cell, then run the check below it. A check tells you what is
# off, never what the answer is. Stuck? Every exercise has three hints. Open one at a time. (“Run All Cells” stops at
# the first unsolved check.)

# %%
import re

import torch
from torch.nn import functional as F

from course_utils.lessons.torch_compile import checks as check

# %% [markdown]
# ## 1 · From what can the rest be computed?
# **Difficulty** ●●○○○ · **12 minutes** · **Trains** finding the cheapest cut
#
# x and y are square matrices of n bf16 numbers each, and both require a gradient. Write `kept(n)`. It returns a
# dictionary: for each expression below, as a text, how many bytes its *compiled* form keeps for backward. x and y count,
# too, if they are kept. Dropout's mask is stored as bool.
#
# `exp(x) + sin(x)` · `exp(sin(x)) * y` · `sin(x + y) * cos(x + y)` · `dropout(gelu(x)) * y` · `gelu(x @ y)`


# %%
def kept(n):
    """Return bytes by expression, for x and y of n bf16 numbers each."""
    ### BEGIN SOLUTION Return a dictionary with the five expressions.
    return {
        "exp(x) + sin(x)": 2 * n,
        "exp(sin(x)) * y": 4 * n,
        "sin(x + y) * cos(x + y)": 2 * n,
        "dropout(gelu(x)) * y": 5 * n,
        "gelu(x @ y)": 6 * n,
    }
    ### END SOLUTION


# %%
check.expressions(kept)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# Write down every derivative. It contains tensors of forward. From which few tensors can all of these be computed?
#
# </details>
# <details><summary>Hint 2: what cannot be computed again?</summary>
#
# Two kinds of results: those of matrix products, because they are expensive, and random numbers.
#
# </details>
# <details><summary>Hint 3: not only inputs</summary>
#
# The tensors need not be x and y. For one expression there is a place in the middle where everything goes through one
# tensor.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# exp and sin both come from x. `exp(sin(x)) * y` needs x and y: exp(sin(x)) is computed again. Of `sin(x + y) * cos(x +
# y)` only the sum is needed, neither x nor y: autograd would keep four tensors. A mask cannot be drawn again, 1 byte per
# number, and GELU's input is x. The last one keeps both factors of the product and its result: three tensors, exactly
# like autograd.

# %% [markdown]
# ## 2 · One graph
# **Difficulty** ●●○○○ · **10 minutes** · **Trains** finding and curing a graph break
#
# `soft_clip` halves its result where a value is large. Python's `if` must know that value, so the compiler ends its
# graph there, and begins a second one.

# %%
from course_utils.lessons.torch_compile.checks import soft_clip

found = torch._dynamo.explain(soft_clip)(torch.linspace(-4, 4, 64, requires_grad=True), 2.0)
print(f"{found.graph_count} graphs. The reason: {found.break_reasons[0].reason.splitlines()[0]}")

# %% [markdown]
# Here is its text:
#
# ```python
# def soft_clip(x, limit):
#     wide = torch.tanh(x / limit) * limit
#     if wide.abs().max() > limit / 2:
#         wide = wide * 0.5
#     return wide * torch.sigmoid(x)
# ```
#
# Write `one_graph(x, limit)`: the same result and the same gradient, but one graph, which keeps only x.


# %%
def one_graph(x, limit):
    """Return what soft_clip returns, without a look at a value."""
    ### BEGIN SOLUTION Return a tensor like x.
    wide = torch.tanh(x / limit) * limit
    wide = torch.where(wide.abs().max() > limit / 2, wide * 0.5, wide)
    return wide * torch.sigmoid(x)
    ### END SOLUTION


# %%
check.one_graph(one_graph)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# The condition may stay a tensor. Which function of torch chooses between two tensors by a third one?
#
# </details>
# <details><summary>Hint 2: its arguments</summary>
#
# `torch.where(condition, one, other)` also takes a condition of a single number.
#
# </details>
# <details><summary>Hint 3: both ways</summary>
#
# Both branches are computed. That costs little: they are fused into the same kernel.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# At a graph break, the tensors that the second graph needs leave the first one. Each graph has a forward and a backward
# of its own, and keeps what *its* backward needs. So `wide` is kept next to x. `torch.where` computes both branches, in
# the same kernel.

# %% [markdown]
# ## 3 · A choice for a card
# **Difficulty** ●○○○○ · **8 minutes** · **Trains** reading memory against time
#
# A front maps the name of each choice to its peak and its milliseconds: `{"compiled": (9, 38.0), …}`. Write
# `choose(front, room)`: the name of the fastest choice whose peak is at most `room`. Where nothing fits, return None.


# %%
def choose(front, room):
    """Return the name of the fastest choice that fits, or None."""
    ### BEGIN SOLUTION Return a name or None.
    fits = [name for name, (peak, _) in front.items() if peak <= room]
    return min(fits, key=lambda name: front[name][1], default=None)
    ### END SOLUTION


# %%
check.choose(choose)

# %%
from course_utils.lessons.torch_compile.recorded import FRONT, WHERE

recorded = {name: (one["peak"], one["ms"]) for name, one in FRONT.items()}
for room in (4, 5, 6, 8, 10):  # change this
    print(f"{room} GB: {choose(recorded, room * 10**9)} ({WHERE})")

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# Two steps: which choices fit? Which of them is fastest?
#
# </details>
# <details><summary>Hint 2: the budgets</summary>
#
# A smaller budget does not always have a lower peak. Trust the peak, not the name.
#
# </details>
# <details><summary>Hint 3: nothing fits</summary>
#
# `min` of an empty list raises. It takes `default=…`.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# On this card no budget is ever chosen. For each there is a choice that is smaller *and* faster: a compiled model with a
# checkpoint for each block, or with the products kept.

# %% [markdown]
# ## 4 · Read a wrapper
# **Difficulty** ●●●○○ · **22 minutes** · **Trains** reading what the compiler writes
#
# Write `wrapper_peak(code)`: the most bytes that the buffers of a wrapper take at once. `code` is the text of a wrapper,
# with these lines among others:
#
# ```python
# buf0 = empty_strided_cuda((512, 1024), (1024, 1), torch.float32)
# buf1 = buf0; del buf0  # reuse
# del buf1
# return (buf2, )
# ```
#
# The first one allocates, the second gives the same memory another name, the third frees. Formats are torch.float32,
# torch.bfloat16 and torch.bool. The inputs (`primals_1`) are not the wrapper's, so they do not count.


# %%
def wrapper_peak(code):
    """Return the most bytes of buffers at once."""
    ### BEGIN SOLUTION Return a whole number of bytes.
    size = {"float32": 4, "bfloat16": 2, "bool": 1}
    live, peak = {}, 0
    for line in code.splitlines():
        if made := re.match(r"(\w+) = empty_strided_cuda\(\(([\d, ]*)\),.*torch\.(\w+)\)", line):
            name, shape, dtype = made.groups()
            numbers = [int(each) for each in shape.split(",") if each.strip()]
            live[name] = size[dtype] * torch.Size(numbers).numel()
        elif renamed := re.match(r"(\w+) = (\w+); del \2  # reuse", line):
            live[renamed[1]] = live.pop(renamed[2])
        elif freed := re.match(r"del (\w+)$", line):
            live.pop(freed[1], None)
        peak = max(peak, sum(live.values()))
    return peak
    ### END SOLUTION


# %%
check.wrapper_peak(wrapper_peak)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# Keep a dictionary of live buffers, name to bytes. Which lines add, which remove? After each line, add up.
#
# </details>
# <details><summary>Hint 2: a line as text</summary>
#
# `re.match` with groups takes a line apart: the name, the first parentheses, what follows `torch.`. A shape may have
# one number, as in `(64, )`.
#
# </details>
# <details><summary>Hint 3: what is not yours</summary>
#
# `del primals_1` frees an input, which is not in your dictionary: `live.pop(name, None)` ignores it.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# A wrapper is a plain list of allocations and frees, planned before anything runs. So the peak of a compiled step can
# be read off its text. The course's simulated GPU does the same, only it executes the text.

# %% [markdown]
# ## 5 · Compile the loss alone
# **Difficulty** ●●○○○ · **15 minutes** · **Trains** compiling the part that pays
#
# Write `make_loss(backend)`. It returns a function `loss(head, x, targets)`: the mean cross-entropy of `head(x)`,
# computed from fp32 logits. x is (tokens, h) in bf16, `head` is a linear layer in bf16. It is compiled with
# `torch.compile(…, backend=backend)`. It may keep at most the 16-bit logits: 2 bytes for each.


# %%
def make_loss(backend):
    """Return a compiled function of head, x (tokens, h) and targets (tokens,): the mean loss."""

    ### BEGIN SOLUTION Return a function.
    @torch.compile(backend=backend)
    def loss(head, x, targets):
        return F.cross_entropy(head(x).float(), targets)

    return loss
    ### END SOLUTION


# %%
check.compiled_loss(make_loss)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# Write the function first, without the compiler. `torch.compile` can be a decorator: `@torch.compile(backend=…)`.
#
# </details>
# <details><summary>Hint 2: what belongs inside?</summary>
#
# If only the cross-entropy is compiled, its input must be kept as it comes. Who makes the fp32 copy?
#
# </details>
# <details><summary>Hint 3: once</summary>
#
# A function that calls `torch.compile` in its body compiles each time. Where does the call belong?
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# Autograd keeps log-softmax's output, 4 bytes per logit. The compiler keeps the 16-bit logits, which the head makes
# anyway, and two fp32 numbers per token: the largest logit, and the logarithm of the sum. In backward it computes the
# rest again, within the kernel that writes the logits' gradient. This is all that the step of the lesson's GPT gains
# outside of its blocks.
