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
# # Exercises 16 · LoRA
#
# **65 minutes** for all four; each one says its own. You should know what [lesson
# 16](../notebooks/16_lora.ipynb) shows. You need no GPU.
#
# Each exercise asks for a class or a function. Write it, run the cell, then run the check below it. A check tells you
# what is off, never what the answer is. Stuck? Every exercise has three hints; open one at a time. (“Run All Cells”
# stops at the first check that is unsolved.)

# %%
import torch
import torch.nn.functional as F
from torch import nn

from course_utils.lessons.lora import checks as check

# %% [markdown]
# ## 1 · A layer that merges
# **Difficulty** ●●●○○ · **22 minutes** · **Trains** LoRA as you would use it: trained, merged, taken out again
#
# Write a LoRA layer with dropout that can merge its adapter into W and take it out again. The lesson's layer can do
# neither. This much is given (A and B are fp32, on the CPU):


# %%
class Adapter(nn.Module):
    def __init__(self, base: nn.Linear, r: int, alpha: float, dropout: float = 0.0):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.scale, self.merged = alpha / r, False
        self.A = nn.Parameter(torch.randn(r, base.in_features) / base.in_features**0.5)
        self.B = nn.Parameter(torch.zeros(base.out_features, r))
        self.dropout = nn.Dropout(dropout)


# %% [markdown]
# Write the rest, in two cells. (After a change to the first, run the second again.)
#
# - `forward(x)` returns the base layer's output, plus the scale times B·A applied to x. Dropout acts only on the
#   adapter's input: use `self.dropout`. A merged layer only computes the base layer: then it drops nothing, in training
#   mode either. Between forward and backward it may keep W, A, B, the input, what dropout needs, and x·Aᵀ, but no other
#   matrix of W's size.
# - `merge()` adds scale·B·A to W in place, whatever dropout is. It keeps nothing else of W's size, and no graph. It
#   does not change `training`. A second `merge()` changes nothing.
# - `unmerge()` restores W, up to rounding. A second `unmerge()` changes nothing.
#
# The check tries inputs of two and three dimensions, with and without dropout, and traces what is kept.


# %%
class TwoPaths(Adapter):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x·Wᵀ + bias, plus the adapter's part unless it is merged."""
        ### BEGIN SOLUTION Return the output.
        y = self.base(x)
        if self.merged:
            return y
        return y + self.scale * (self.dropout(x) @ self.A.T) @ self.B.T
        ### END SOLUTION


# %%
class LoraLinear(TwoPaths):
    def merge(self) -> None:
        """Add the adapter to W, in place."""
        ### BEGIN SOLUTION Change the numbers of W.
        with torch.no_grad():
            if not self.merged:
                self.base.weight.add_(self.B @ self.A, alpha=self.scale)
        self.merged = True
        ### END SOLUTION

    def unmerge(self) -> None:
        """Take the adapter out of W, in place."""
        ### BEGIN SOLUTION Change the numbers of W back.
        with torch.no_grad():
            if self.merged:
                self.base.weight.sub_(self.B @ self.A, alpha=self.scale)
        self.merged = False
        ### END SOLUTION


# %%
check.lora_linear(LoraLinear)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# Start from the lesson's forward. Where does `self.dropout` go, so that the base layer still sees all of x? Which of
# the two products with A and B comes first, so that you make nothing of W's size?
#
# </details>
# <details><summary>Hint 2: in place, without a graph</summary>
#
# `tensor.add_(other, alpha=…)` adds a multiple of `other` in place. A and B require gradients, so whatever you compute
# from them has a graph. The decorator `@torch.no_grad()` on a method prevents that.
#
# </details>
# <details><summary>Hint 3: twice</summary>
#
# `self.merged` says where the adapter is. Look at it before you change W, set it afterwards, and use it in `forward`,
# too. To take the adapter out you need no old W: A and B are still there.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# Matrix products are associative, so the same three matrices are cheap in both uses. In training, x·Aᵀ comes first, and
# everything that is kept is thin. After training, B·A becomes part of W and costs nothing at inference. A copy of W
# would make `unmerge` exact, but it would cost all that LoRA has saved. Merging into a *quantized* W is different: the
# sum must be rounded again, and a small difference may vanish.

# %% tags=["solution"]
layer = LoraLinear(nn.Linear(512, 512), r=8, alpha=16)
nn.init.normal_(layer.B)
x = torch.randn(4, 512)
old = layer.base.weight.clone()
apart = layer(x)
layer.merge()
print(f"merged: {(layer(x) - apart).abs().max():.3f} away from the two paths")
layer.unmerge()
print(f"unmerged: {(layer.base.weight - old).abs().max():.3f} away from the old W")
adapter = {name: weight for name, weight in layer.state_dict().items() if name in "AB"}
print(f"to save: {sum(weight.nbytes for weight in adapter.values()):,} bytes, W has {old.nbytes:,}")

# %% [markdown]
# ## 2 · Where the input is an index
# **Difficulty** ●●○○○ · **12 minutes** · **Trains** LoRA on an embedding: new words for an old model
#
# An embedding looks up rows of W. Write LoRA for it. The embedding is frozen, and learns a difference.
#
# - `ids` are whole numbers of any shape, such as (b, s). W is (V, h), and V may be large.
# - A is (V, r), B is (r, h): the embedding's matrix would be W + scale·A·B.
# - Return (…, h): a row for each id. Make nothing of W's size, neither in forward nor in backward.


# %%
def lora_embedding(
    ids: torch.Tensor, W: torch.Tensor, A: torch.Tensor, B: torch.Tensor, scale: float
) -> torch.Tensor:
    """Return the rows of W + scale·A·B that `ids` name."""
    ### BEGIN SOLUTION Return a tensor of one more dimension than ids.
    return F.embedding(ids, W) + scale * F.embedding(ids, A) @ B
    ### END SOLUTION


# %%
check.lora_embedding(lora_embedding)

# %% [markdown]
# <details><summary>Hint 1: a row</summary>
#
# `W[ids]` has a row of W for each id, whatever the shape of `ids`.
#
# </details>
# <details><summary>Hint 2: the difference's row</summary>
#
# Row i of A·B is row i of A, times B. So which of the two do you look up?
#
# </details>
# <details><summary>Hint 3: the order</summary>
#
# First look up, then multiply: (b, s, r) times (r, h). The other order makes (V, h).
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# Rows of A·B are rows of A times B, so nobody needs the others. With 128,000 words and h = 4,096, W has half a billion
# numbers, and Adam would take 16 bytes for each. Factors of rank 16 have 2.1 million. peft does the same for an
# `nn.Embedding` among its `target_modules`.

# %% tags=["solution"]
W, ids = torch.randn(50_000, 64), torch.randint(50_000, (4, 16))
A, B = torch.zeros(50_000, 8), torch.randn(8, 64)
print("at first, it is the old embedding:", torch.equal(lora_embedding(ids, W, A, B, 2.0), W[ids]))
print(f"numbers that learn: {A.numel() + B.numel():,} of {W.numel():,}")

# %% [markdown]
# ## 3 · A difference in two factors
# **Difficulty** ●●○○○ · **15 minutes** · **Trains** what a low rank can hold
#
# Somebody fine-tuned *all* weights of a model. Its difference from the base model, W' − W, is as large as W. Which
# factors of rank r come nearest to it? They would make a LoRA of it, a hundred times smaller.
#
# Write `two_factors(difference, r)`, which returns the pair B, A: B is (n_out, r), A is (r, n_in), and no other two come
# nearer by the sum of squared errors. The singular value decomposition has the answer: difference = U·diag(S)·V, with S
# falling. Its first r terms are the nearest matrix of rank r (Eckart and Young 1936).

# %%
U, S, V = torch.linalg.svd(torch.randn(6, 4), full_matrices=False)
print(U.shape, S.shape, V.shape, S.tolist() == sorted(S.tolist(), reverse=True))


# %%
def two_factors(difference: torch.Tensor, r: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return B and A of rank r whose product is nearest to `difference`."""
    ### BEGIN SOLUTION Return B, A.
    U, S, V = torch.linalg.svd(difference, full_matrices=False)
    return U[:, :r] * S[:r], V[:r]
    ### END SOLUTION


# %%
check.two_factors(two_factors)

# %% [markdown]
# <details><summary>Hint 1: columns and rows</summary>
#
# The first r terms need r columns of U, r numbers of S, and r rows of V. (The V that torch returns is transposed
# already.)
#
# </details>
# <details><summary>Hint 2: where S goes</summary>
#
# S belongs to one of the factors, or its square root to both. Without S, the product has the right directions and the
# wrong lengths.
#
# </details>
# <details><summary>Hint 3: shapes</summary>
#
# `U[:, :r] * S[:r]` multiplies each column by its number.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# If a fine-tuning needs few directions, few singular values are large, and a small rank loses little. Hu et al. made
# this guess first (section 1). Tools such as [mergekit](https://github.com/arcee-ai/mergekit) extract
# LoRAs from complete models this way.

# %% tags=["solution"]
torch.manual_seed(0)
thin = torch.randn(256, 4) @ torch.randn(4, 256) + 0.1 * torch.randn(256, 256)
for r in (2, 4, 8):
    B, A = two_factors(thin, r)
    lost = (thin - B @ A).norm() / thin.norm()
    print(f"rank {r}: {lost:.0%} of a nearly thin matrix is lost")

# %% [markdown]
# ## Unchecked · peft on a model of yours
# **Difficulty** ●●○○○ · **16 minutes or more** · **Trains** what a library does in your place
#
# Take a model of yours, or one of `torchvision` or `transformers`, and `pip install peft`. Add LoRA by `get_peft_model`,
# once on few layers and once on all linear ones. Before you run each, predict the numbers that learn, and the peak of a
# step. Then weigh it by `on_gpu()` and `torch.cuda.max_memory_allocated()`.


# %%
def weigh(model, step):
    """Return the numbers that learn, and the peak of a second `step(model)` in bytes."""
    ### BEGIN SOLUTION Count parameters that require gradients; read the peak after two steps.
    trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    for _ in range(2):
        step(model)
    return trained, torch.cuda.max_memory_allocated()
    ### END SOLUTION


# %% [markdown]
# <details><summary>Hint 1: names</summary>
#
# `for name, layer in model.named_modules(): print(name, type(layer).__name__)` shows which names you can give as
# `target_modules`.
#
# </details>
# <details><summary>Hint 2: nothing saved?</summary>
#
# Then activations fill the step. Halve the batch and weigh again: which part follows?
#
# </details>
# <details><summary>Hint 3: recomputation and frozen inputs</summary>
#
# With the old kind of checkpoints (`use_reentrant=True`), a block whose input needs no gradient trains nothing. An
# embedding is frozen, so its output needs none: call `model.enable_input_require_grads()`, or set
# `use_reentrant=False`.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# A library hides which layers it wraps, so look at the numbers that learn first. If they are as predicted and the peak
# is not, the rest is activations.
