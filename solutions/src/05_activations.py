# ---
# jupyter:
#   course:
#     minutes: 85
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Exercises 05 · What does each operation keep?
#
# **85 minutes** for all four; each one says its own. You should know what [lesson
# 05](../notebooks/05_activations.ipynb) shows. No GPU is needed.
#
# Each exercise asks for one function, the last one for a class. Write it, run the cell, then run the check below it. A
# check tells you what is off, never what the answer is. Stuck? Every exercise has three hints. Open one at a time.
# (“Run All Cells” stops at the first unsolved check.)

# %%
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from course_utils.lessons.activations import checks as check
from course_utils.lessons.shared.judging import forward_backward
from course_utils.interactive.saved_tensors import saved_by

# %% [markdown]
# ## 1 · Operations never seen before
# **Difficulty** ●●○○○ · **10 minutes** · **Trains** deriving what is kept from a derivative, and counting storages
#
# How many bytes does autograd keep for each of five expressions of x and y? Write `expressions(n)`. x and y are tensors
# of *n* bf16 numbers, and both need gradients. Return a dictionary from each expression to its bytes.
#
# PyTorch runs the expressions operation by operation, as written. A storage that two operations keep counts once. x and
# y count, too, if they are kept. Derive first. Then you may ask autograd, as the check does:
# `saved_by(lambda x, y: …, (n,), (n,), dtype="bf16")`.

# %%
list(check.EXPRESSIONS)


# %%
def expressions(n: int) -> dict[str, int]:
    """Bytes that autograd keeps for each expression; x and y are n bf16 numbers each."""
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
# Sums, and products with a plain number, have a constant derivative. A square has the derivative 2x: it keeps its
# input.
#
# </details>
# <details><summary>Hint 3: almost there</summary>
#
# Now look for tensors that two operations keep. The output of one and the input of the next are one storage.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# Sigmoid, tanh, exp, ReLU and softmax keep their output. sin, GELU, SiLU and a square keep their input. Sums keep
# nothing. So the cost of a function depends on how it is written: x·sigmoid(x) by hand keeps twice as much as PyTorch's
# own SiLU.

# %% tags=["solution"]
n = 4096
by_hand = saved_by(check.EXPRESSIONS["x * sigmoid(x)"], (n,), (n,), dtype="bf16")
built_in = saved_by(nn.SiLU(), (n,), dtype="bf16")
for name, kept in {"by hand": by_hand, "built in": built_in}.items():
    total = sum(item.bytes for item in kept)
    print(f"SiLU {name} keeps {total:,} bytes (autograd was asked, on the CPU)")

# %% [markdown]
# ## 2 · Which module keeps it?
# **Difficulty** ●●●○○ · **18 minutes** · **Trains** asking autograd, module by module
#
# Which modules of a model keep how many bytes for backward? Write `kept_by_module(model, x)`. It runs forward once and
# returns a dictionary from module names to bytes. The names are those of `model.named_modules()` (the model itself is
# `""`).
#
# - A storage belongs to the module whose forward runs when it is saved for the first time. If modules are nested, that
#   is the innermost one.
# - A storage counts once, with all its bytes, even if only a small view of it is saved.
# - `x`, `model.parameters()`, `model.buffers()` and views of them are in memory anyway. Leave them out.
# - You may leave out modules that keep nothing.
#
# Inside `with names_running(model) as running:`, the list `running` holds the names of the modules whose forward is
# running. (You need not read how it does that.) A storage may be an element of a set.


# %%
@contextmanager
def names_running(model):
    """Yield a list with the names of the modules whose forward is running, the innermost last."""
    running, handles = [], []

    def enter(name, *_):
        running.append(name)

    def leave(*_):
        running.pop()

    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(partial(enter, name)))
        handles.append(module.register_forward_hook(leave))
    try:
        yield running
    finally:
        for handle in handles:
            handle.remove()


# %%
def kept_by_module(model: nn.Module, x: torch.Tensor) -> dict[str, int]:
    """Bytes that forward keeps for backward, by the name of the module whose forward kept them."""
    ### BEGIN SOLUTION Return a dictionary from names of modules to bytes.
    kept = {}
    seen = {tensor.untyped_storage() for tensor in (x, *model.parameters(), *model.buffers())}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage not in seen:
            seen.add(storage)
            kept[running[-1]] = kept.get(running[-1], 0) + storage.nbytes()
        return tensor.detach()

    with (
        names_running(model) as running,
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
    ):
        model(x)
    return kept
    ### END SOLUTION


# %%
check.kept_by_module(kept_by_module)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# The lesson's `kept_by` has a hook that gets each saved tensor. In your hook, `running[-1]` is the name of the module
# that keeps the tensor.
#
# </details>
# <details><summary>Hint 2: what counts once</summary>
#
# Two tensors share memory if their `untyped_storage()` is the same. Keep a set of storages that must not count again.
#
# </details>
# <details><summary>Hint 3: almost there</summary>
#
# Put the storages of x, parameters and buffers into that set first: then they never count. `storage.nbytes()` is the
# size of the complete storage, `tensor.nbytes` only that of the view. Return `tensor.detach()` from your hook,
# or backward gets nothing back.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# This is PyTorch's own encoder layer, on the CPU. Parameters do not predict the table: a dropout has none, and keeps as
# much as a matrix. ReLU's output belongs to the layer itself, whose forward calls `relu` as a function. And the module
# that saves first gets the bill, though its neighbor may need the same storage. So read neighbors together.

# %% tags=["solution"]
layer = nn.TransformerEncoderLayer(64, 4, dim_feedforward=256, batch_first=True)
sizes = kept_by_module(layer, torch.randn(8, 32, 64, requires_grad=True))
print("kept for backward, on the CPU:")
for name, size in sorted(sizes.items(), key=lambda pair: -pair[1]):
    print(
        f"{name or 'the layer itself':20s} {size:>9,} bytes, "
        f"{size / (4 * 8 * 32 * 64):5.2f} · s·b·h numbers in fp32"
    )

# %% [markdown]
# ## 3 · Keeps too much
# **Difficulty** ●●●○○ · **22 minutes** · **Trains** repairing a module by what backward needs
#
# A colleague's block computes the right result but keeps too much. Write `lean(block, x)`: it does what `block(x)`
# does, with the block's own parts (`block.norm(x)`, `block.gate`, `block.rate` …), and returns the output.
#
# - Output and gradients of x and of all parameters are the same, in training and in `eval()`. From the same seed,
#   dropout drops the same elements.
# - It appends one number to `block.log`, equal to the one that the block logs: a float, or a tensor without a graph.
# - It keeps at most 2·h + 3·ffn numbers per token, including x, plus a few for statistics. It keeps no copy of a
#   weight.
# - No matrix product runs twice. Everything else may.
#
# `checkpoint(function, *tensors, use_reentrant=False)` keeps only the tensors. In backward it restores the random state
# and calls the function again. `forward_backward` runs code once on the CPU and traces it: `.kept` is the bytes that
# wait for backward, including the input.

# %%
from inspect import getsource

print(getsource(check.Wasteful))
h, ffn = 64, 256
x = torch.randn(100, 64)
block = check.Wasteful(h, ffn)
kept = forward_backward(block, [x], block.parameters()).kept  # for 100 tokens, 4 bytes per number
print(
    f"it keeps {kept // 400:,} numbers per token, "
    f"where 2·h + 3·ffn is {2 * h + 3 * ffn:,} (traced on the CPU)"
)


# %%
def lean(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Return and log the same as block(x), keeping at most 2·h + 3·ffn numbers per token."""

    ### BEGIN SOLUTION Return the block's output.
    def gated(gate, up):
        return F.dropout(F.silu(gate) * up, block.rate, block.training)

    normal = block.norm(x)
    hidden = checkpoint(gated, block.gate(normal), block.up(normal), use_reentrant=False)
    y = block.down(hidden)
    block.log.append(y.abs().mean().item())
    return x + y
    ### END SOLUTION


# %%
check.lean(lean)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# Which tensors fit into 2·h + 3·ffn numbers? Each matrix needs its input: one tensor that `gate` and `up` read, and one
# that `down` reads. x, which the norm reads, counts too.
#
# </details>
# <details><summary>Hint 2: the narrow ones</summary>
#
# A norm as one operation keeps its input and two numbers per token. And think of the log: who still refers to y after
# forward?
#
# </details>
# <details><summary>Hint 3: almost there</summary>
#
# Everything between the outputs of `gate` and `up` and the input of `down` is elementwise, so it is cheap to run again.
# Put it into one function of these two tensors. Dropout belongs into it, too.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# x and the norm's output make 2·h. gate, up and the input of `down` make 3·ffn. Everything else is computed again from
# these. A checkpoint around a few elementwise operations repeats no matrix product, and does what a fused kernel does.
# The log kept y, and with it a part of the graph, step after step. `.item()` keeps only a number. This is not the
# minimum: can you reach 2·h + 2·ffn without a second product? (A checkpoint's second run stops as soon as backward has
# what it needs.)

# %% tags=["solution"]
for name, forward in {"block(x)": block, "lean(block, x)": lambda x: lean(block, x)}.items():
    kept = forward_backward(forward, [x], block.parameters()).kept
    print(f"{name:15s} {kept // 400:,} numbers per token (traced on the CPU)")

# %% [markdown]
# ## 4 · An fp32 loss at two bytes per logit
# **Difficulty** ●●●●○ · **35 minutes** · **Trains** writing an operation that keeps less than torch's
#
# Write `LeanLoss`, a cross-entropy in fp32 for logits in bf16 that keeps only two bytes per logit. (torch keeps an fp32
# log-softmax, and has two or three such tensors at the peak.)
#
# - `LeanLoss.apply(logits, targets)` returns the mean over tokens of −log softmax(z)[target] = logsumexp(z) −
#   z[target], in fp32. Tokens with target −100 do not count; at least one token does.
# - Loss and gradient are computed in fp32. Only the result of `backward` has the logits' dtype.
# - Forward keeps the logits, or another 16-bit tensor of that size, and otherwise only a few numbers per token.
# - At any moment, only *one* fp32 tensor of the logits' size exists next to the logits. In backward, the 16-bit
#   gradient comes on top: at most 8 bytes per logit. Temporaries inside an operation count: `torch.logsumexp` makes one
#   more fp32 tensor.
# - The logits do not change, in backward either.
#
# The logits are (tokens, V). The gradient of one token's loss is softmax(z), minus 1 at its target. `backward` gets
# `dloss`, a number, and returns a gradient for each argument of `forward`: the logits' gradient and `None`.
#
# Names that end in `_` (`sub_`, `exp_`, `mul_`, `scatter_add_`) write over their tensor. `gather` looks up one number
# per row, `amax` the largest. The kept bytes are traced on the CPU. For the peaks, `check.peaks` and the check use a
# simulated GPU. It has no values, so it stops at `z[mask]`, `.item()` and `int()` of a tensor. Give each token a weight
# instead.

# %%
logits = torch.randn(64, 4096).bfloat16()
targets = torch.randint(4096, (64,))


def per_logit(loss):
    kept = forward_backward(loss, [logits, targets]).kept / logits.numel()
    forward, backward = check.peaks(loss)
    peaks = f"{forward:.1f} at forward's peak, {backward:.1f} at backward's (simulated)"
    return f"bytes per logit: {kept:.1f} kept (traced on the CPU), {peaks}"


print(per_logit(lambda logits, targets: F.cross_entropy(logits.float(), targets)))


# %%
class LeanLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets):
        ### BEGIN SOLUTION Save what backward needs, and return the mean loss.
        weight = (targets >= 0) / (targets >= 0).sum()
        top = logits.amax(-1, keepdim=True).float()
        sums = logits.float().sub_(top).exp_().sum(-1, keepdim=True).log_().add_(top)
        ctx.save_for_backward(logits, targets, sums, weight)
        return weight @ (sums - logits.gather(-1, targets.clamp(min=0)[:, None]))[:, 0]
        ### END SOLUTION

    @staticmethod
    def backward(ctx, dloss):
        ### BEGIN SOLUTION Return the gradient of the logits, and None for the targets.
        logits, targets, sums, weight = ctx.saved_tensors
        p = logits.float().sub_(sums).exp_()
        p.scatter_add_(-1, targets.clamp(min=0)[:, None], -torch.ones_like(sums))
        return p.mul_(dloss * weight[:, None]).to(logits.dtype), None
        ### END SOLUTION


# %%
check.lean_loss(LeanLoss)

# %% [markdown]
# <details><summary>Hint 1: where to start</summary>
#
# Start without −100. softmax(z) is exp(z − logsumexp(z)). So backward needs only the logits and one number per token.
#
# </details>
# <details><summary>Hint 2: one fp32 tensor</summary>
#
# `logits.float()` makes it. `logits.float() - sums` makes a second one while the first still exists; `sub_` does not.
# In forward, too, each step from z to the logsumexp can write over the step before.
#
# </details>
# <details><summary>Hint 3: almost there</summary>
#
# exp overflows above 88. Subtract each row's largest number first, and add it to the logarithm at the end.
#
# A row has no entry −100. For those tokens, look up entry 0 instead (`clamp`), and give each token a weight: 1 /
# (number of tokens that count), or 0. The loss is a sum with these weights, and the gradient's rows have the same
# weights.
#
# </details>

# %% [markdown] tags=["explanation"]
# ### Why
# Log-softmax is the logits minus one number per token. To keep it in fp32 is to keep the logits a second time, at twice
# the width. Computing it again loses nothing, because the logits were 16-bit. Liger Kernel goes one step further: in
# forward, it writes the gradient over the logits ([Hsu et al. 2024](https://arxiv.org/abs/2410.10989)). That is safe
# only if nothing else reads the logits.

# %% tags=["solution"]
print(f"torch's own loss of an fp32 copy: {per_logit(check.plain_loss)}")
print(f"LeanLoss:                         {per_logit(LeanLoss.apply)}")

# %% [markdown]
# ## Take home
# **Remember** Derive, then count storages, then look for what is left over.
#
# **Breaks when** a kernel is fused: it does not keep what the written-out operations would.
#
# **Cheat-sheet line** an operation keeps what its derivative is written with: the output where that is enough, else the
# input; a product keeps both factors; a constant derivative, nothing.
